"""Made from busload.schedules.planned by scripts/generate_sync.py. Change the source instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from busload.commands import send
from busload.commands.command import BatchCommand, Command
from busload.commands.send_middleware import around_send
from busload.postgres.callers_connection import perform_in_threads
from busload.schedules.planned import FINAL, _batch, _commands, _due_time, _for_a_person


def plan_batch(
    function: Callable[..., Any], command: Command, ctx: Any, on_complete: BatchCommand | None = None
) -> dict[str, Any]:
    """Create the batch of a due time with what the function returns, in the transaction that completes the command."""
    due, bus = _due_time(command), ctx.bus
    planned = _commands(due, function(due, ctx))
    if not planned:
        return {"batch_id": None, "commands": 0}
    try:
        with around_send(bus.around_sends, "planner", command.domain, command.headers) as call:
            batch, checked = _batch(due, command, planned, on_complete, bus, call.headers)
            create = send.create_batch(batch, checked, bus.via)
            call.result = batch.batch_id
            used = None if ctx.own_transaction is None else ctx.own_transaction.conn
            if used is not None:  # the planner's own writes and the batch are one
                perform_in_threads(used, create)
            else:
                with ctx.transaction() as conn:
                    perform_in_threads(conn, create)
    except FINAL as error:
        raise _for_a_person(error) from error
    return {"batch_id": str(batch.batch_id), "commands": len(checked)}
