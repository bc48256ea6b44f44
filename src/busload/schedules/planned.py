"""Schedules with a planner: the batch of a due time is created by a command, so a planner that fails is tried again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from busload.batches.batch import CreateOptions, members, new_batch
from busload.commands import send
from busload.commands.command import BatchCommand, Command
from busload.commands.send import NewBatch
from busload.commands.send_middleware import around_send
from busload.errors import DuplicateCommandError, InvalidCommandError, PermanentCommandError
from busload.handlers.registry import DUE
from busload.postgres.callers_connection import perform_any
from busload.schedules.schedule import DUE_HEADER, batch_id_of

FINAL = DuplicateCommandError, InvalidCommandError
"""What is the same at the next attempt: a person must look."""


@dataclass(frozen=True, slots=True)
class DueTime:
    """What a planner gets: the schedule and the due time that it plans a batch for."""

    schedule: str
    due_at: datetime
    """When the schedule was due; if it was triggered, when that was."""
    batch_id: UUID
    """The id of the batch that will be created of what the planner returns."""


async def plan_batch(
    function: Callable[..., Any], command: Command, ctx: Any, on_complete: BatchCommand | None = None
) -> dict[str, Any]:
    """Create the batch of a due time with what the function returns, in the transaction that completes the command."""
    due, bus = _due_time(command), ctx.bus
    planned = _commands(due, await function(due, ctx))
    if not planned:
        return {"batch_id": None, "commands": 0}
    try:
        with around_send(bus.around_sends, "planner", command.domain, command.headers) as call:
            batch, checked = _batch(due, command, planned, on_complete, bus, call.headers)
            create = send.create_batch(batch, checked, bus.via)
            call.result = batch.batch_id
            used = None if ctx.own_transaction is None else ctx.own_transaction.conn
            if used is not None:  # the planner's own writes and the batch are one
                await perform_any(used, create)
            else:
                async with ctx.transaction() as conn:
                    await perform_any(conn, create)
    except FINAL as error:
        raise _for_a_person(error) from error
    return {"batch_id": str(batch.batch_id), "commands": len(checked)}


def _due_time(command: Command) -> DueTime:
    """The due time that a command was sent for."""
    due_at = (command.headers or {}).get(DUE_HEADER)
    if due_at is None:
        raise PermanentCommandError(f"The command has no header {DUE_HEADER}: no schedule has sent it.", code="NOT_DUE")
    name = command.command_type.removeprefix(DUE)
    return DueTime(name, datetime.fromisoformat(due_at), batch_id_of(command.command_id))


def _commands(due: DueTime, planned: object) -> list[BatchCommand]:
    """What a planner has returned, as a list."""
    if planned is None or isinstance(planned, str | bytes | dict | BatchCommand) or not isinstance(planned, Iterable):
        raise PermanentCommandError(
            f"The planner of schedule {due.schedule!r} returned {planned!r:.80}, wanted a list of BatchCommand; "
            "an empty one makes no batch.",
            code="INVALID_PLAN",
        )
    return list(planned)


def _batch(
    due: DueTime,
    command: Command,
    planned: list[BatchCommand],
    on_complete: BatchCommand | None,
    bus: Any,
    headers: dict[str, str],
) -> tuple[NewBatch, Any]:
    """The batch of a due time and its commands, checked."""
    options: CreateOptions = {
        "batch_id": due.batch_id,
        "name": due.schedule,
        "custom_data": {"schedule": due.schedule, "due_at": due.due_at.isoformat()},
        "headers": headers,
    }
    limits = bus.settings.limits
    batch = new_batch("schedule", limits, command.domain, options, on_complete, awaits=False, known=CreateOptions)
    return batch, members(limits, batch, planned, types=bus.data_types)


def _for_a_person(error: Exception) -> PermanentCommandError:
    """No retry would help."""
    return PermanentCommandError(str(error), code=getattr(error, "code", None) or type(error).__name__)
