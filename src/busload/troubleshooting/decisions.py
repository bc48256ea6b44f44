"""What a person decides about commands in troubleshooting, and how a decision is carried out.

A decision about one command is carried out at once. A decision about all commands with a cause makes a batch; each of
its commands carries out a part, and every worker has the handler for them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, Literal, Protocol
from uuid import UUID

import msgspec
import psycopg

from busload.commands import rescue, search
from busload.commands.command import Command, CommandStatus, NewCommand
from busload.commands.data_type import DataInvalidError, DataTypes, KnowsTypes
from busload.commands.ids import ascending_numbers, lease_id_of
from busload.commands.parts import cut, find_failing
from busload.commands.payload import WIDEST, PayloadRefusedError, encode
from busload.commands.retry import RetryPolicy
from busload.commands.wording import counted
from busload.errors import CommandNotFoundError, InvalidOperationError, PermanentCommandError, SupersededError
from busload.postgres.callers_connection import perform_any
from busload.postgres.connection import AsyncConnection, is_away
from busload.postgres.plan import Plan, Row, Savepoint, Script, execute
from busload.postgres.statements import statements
from busload.settings import InputLimits, PayloadLimits
from busload.troubleshooting.patch import Patch

SQL = statements(__name__)
log = logging.getLogger("busload")

Action = Literal["retry", "complete", "cancel"]

DECISION = "busload.Decision"
"""The type of the commands that carry out a decision."""

RETRY = RetryPolicy(max_attempts=5, backoff=(1, 5, 30, 60))

PART = 500
"""Commands that one part moves, in one transaction: it locks their rows and batches for a few dozen milliseconds."""

PART_BYTES = 4 * 1024 * 1024
"""What one part may write, so that large data do not make that seconds, or fill the memory of a worker."""

MOST_TOLD, REASON_LENGTH = 100, 200
"""Of how many commands the result of a part says why they have not moved, and in how many characters."""

PRIORITY = 100
"""A decision does not wait behind a backlog, which is often the reason for the decision."""

REFUSED_HERE = "BUS01"


class Decision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a person decided, about a cause or, without a fingerprint, about a single command."""

    action: Action
    fingerprint: str = ""
    operator: str | None = None
    patch: list[dict[str, Any]] | None = None
    result: Any = None
    reason: str | None = None


class Part(msgspec.Struct, frozen=True):
    """The part of a decision that one command carries out. What failed after `until` was not decided on."""

    decision: Decision
    until: datetime
    command_ids: list[UUID]


class Summary(msgspec.Struct, frozen=True):
    """The result of a part: how many it moved, why some did not move, and how many `others` did not."""

    moved: int
    left: dict[UUID, str]
    others: int = 0


class Context(Protocol):
    """What carrying out a part needs of the context of a handler."""

    @property
    def execution_id(self) -> UUID: ...

    @property
    def limits(self) -> InputLimits: ...

    @property
    def bus(self) -> KnowsTypes: ...

    def transaction(self) -> AbstractAsyncContextManager[AsyncConnection]: ...


async def carry_out(command: Command, ctx: Context) -> dict[str, Any] | None:
    """Move the commands of a part. They move only if this command completes, so nothing is moved twice.

    Returns how many have moved, and which have not and why.
    """
    part, limits = read_part(command.data), ctx.limits.payload
    async with ctx.transaction() as conn:
        lease_id = lease_id_of(ctx.execution_id)
        about: dict[str, Any] = {"decision_batch": command.batch_id, "lease_id": lease_id}
        plan = move_part(command.domain, part, limits=limits, types=ctx.bus.data_types, **about)
        moved, left = await perform_any(conn, plan)
    if left and part.decision.patch is not None:
        log.warning(
            "A retry with a patch left %s of %s in domain %s where they were. The first: %s. The result of %s %s "
            "names the others.",
            f"{len(left):,}",
            counted(len(part.command_ids), "command"),
            command.domain,
            next(iter(left.values()))[:REASON_LENGTH],
            DECISION,
            command.command_id,
        )
    return summary(moved, left, limits)


def give_up(domain: str, command_id: UUID, reason: str, operator: str | None) -> Plan[None]:
    """Cancel a command that waits for a person."""
    return decide_one(domain, command_id, Decision(action="cancel", operator=operator, reason=reason))


def decide_one(domain: str, command_id: UUID, decision: Decision) -> Plan[None]:
    """Carry out at once what a person has decided about a command."""
    picked = yield from pick(domain, [command_id], decision)
    if not picked:
        yield from _refuse(domain, command_id, decision.action)
    [(command, *_)] = picked
    if decision.action == "retry":
        yield from retry(decision, [command], [], None)
    elif (error := (yield from end(decision, [command]))) is not None:
        raise InvalidOperationError(f"Group {command_id} stays as it is. {why_kept(error)}") from error


def _refuse(domain: str, command_id: UUID, action: Action) -> Plan[None]:
    """Say why nothing was moved."""
    found = yield from search.command(domain, command_id)
    if found is None:
        raise CommandNotFoundError(domain, command_id)
    if found.status is CommandStatus.IN_TROUBLESHOOTING_QUEUE:
        raise InvalidOperationError(
            f"Command {command_id} belongs to a canceled batch, of which nothing is tried again. Complete or cancel it."
        )
    done = {"retry": "retried", "complete": "completed", "cancel": "canceled"}[action]
    raise InvalidOperationError(
        f"Command {command_id} is {found.status}; "
        f"only one that is IN_TROUBLESHOOTING_QUEUE can be {done} by an operator."
    )


def parts(
    decision: Decision,
    command_ids: Sequence[UUID],
    sizes: Sequence[int],
    *,
    until: datetime,
    rate: float | None,
    now: datetime,
) -> Iterator[NewCommand]:
    """Yield the commands that carry out a decision; with a rate, each moves what is due within a second.

    `sizes` are the bytes of each command's data. The decision itself is kept with each of them, so it counts as well.
    """
    most = PART if rate is None else min(PART, max(1, int(rate)))
    own = len(encode(msgspec.to_builtins(decision), WIDEST))
    fresh, before = ascending_numbers(), 0
    for some in cut(command_ids, (own + size for size in sizes), most, PART_BYTES):
        data = encode(msgspec.to_builtins(Part(decision, until, list(some))), WIDEST)
        run_at = now + timedelta(seconds=before / rate) if rate is not None and before else None
        yield NewCommand(next(fresh), DECISION, data, None, None, None, PRIORITY, run_at, None)
        before += len(some)


def read_part(data: Any) -> Part:
    try:
        return msgspec.convert(data, Part)
    except msgspec.ValidationError as error:
        raise PermanentCommandError(f"{DECISION} is sent by busload itself; this one was not: {error}") from None


def summary(moved: int, left: Mapping[UUID, str], limits: PayloadLimits) -> dict[str, Any] | None:
    """Return the result of a part: how many it moved, why some did not move, and how many others there are.

    The result must be stored, or nothing of the part is. If even the numbers are too much for the limits, it is None.
    """
    told = min(len(left), MOST_TOLD)
    while True:
        some = {str(command_id): why[:REASON_LENGTH] for command_id, why in islice(left.items(), told)}
        found = {"moved": moved, "left": some} | ({"others": len(left) - told} if told < len(left) else {})
        try:
            encode(found, limits)
            return found
        except PayloadRefusedError:
            if told == 0:
                return None
            told //= 2


def read_summary(result: Any) -> Summary | None:
    """Return what a part has told; None if it has told nothing, or a person completed it with another result."""
    try:
        return msgspec.convert(result, Summary)
    except msgspec.ValidationError:
        return None


def move_part(
    domain: str, part: Part, *, decision_batch: UUID | None, lease_id: UUID, limits: PayloadLimits, types: DataTypes
) -> Plan[tuple[int, dict[UUID, str]]]:
    """Carry out a decision for some commands, in the transaction that completes the command of this part.

    Returns how many have moved, and why the others have not. The lease is locked first, as in every settlement.
    """
    if not (yield from rescue.hold([lease_id])):
        raise SupersededError("Another worker has this part of the decision now.")
    decision = part.decision
    picked = yield from pick(domain, part.command_ids, decision, until=part.until, decision_batch=decision_batch)
    moved, left = yield from _move(domain, decision, picked, limits, types, decision_batch)
    gone = set(part.command_ids).difference(moved, left)
    if gone:
        left |= yield from _left_behind(domain, part, gone)
    return len(moved), left


def move(
    domain: str, decision: Decision, picked: Sequence[Row], limits: PayloadLimits, types: DataTypes
) -> Plan[tuple[int, dict[UUID, str]]]:
    """Carry out a decision for commands that were picked; returns how many have moved, and why the others have not."""
    moved, left = yield from _move(domain, decision, picked, limits, types, None)
    return len(moved), left


def _move(
    domain: str,
    decision: Decision,
    picked: Sequence[Row],
    limits: PayloadLimits,
    types: DataTypes,
    decision_batch: UUID | None,
) -> Plan[tuple[set[UUID], dict[UUID, str]]]:
    commands: dict[int, UUID] = {command: command_id for command, command_id, *_ in picked}
    data: dict[int, str] = {}
    left: dict[UUID, str] = {}
    if decision.patch is not None:
        patch = Patch(decision.patch, limits)
        for command, command_id, command_type, text, _ in picked:
            try:
                data[command] = patch.apply(text, types.get((domain, command_type)))
            except DataInvalidError as error:
                left[command_id] = f"what the patch makes does not fit: {error}"
            except ValueError as error:
                left[command_id] = f"the patch does not apply: {error}"
        commands = {command: commands[command] for command in data}
    if commands and decision.action == "retry":
        yield from retry(decision, list(commands), list(data.values()), decision_batch)
    elif commands:
        yield Script(b"SET CONSTRAINTS ALL IMMEDIATE")
        kept = yield from find_failing(list(commands), lambda some: end(decision, some, decision_batch))
        left |= {commands.pop(command): why_kept(error) for command, error in kept.items()}
    return set(commands.values()), left


def pick(
    domain: str,
    command_ids: Sequence[UUID],
    decision: Decision,
    *,
    until: datetime | None = None,
    decision_batch: UUID | None = None,
) -> Plan[Sequence[Row]]:
    """Lock the commands that a decision may move, and return id, command_id, type and, for a patch, data of each."""
    return execute(
        SQL.pick,
        domain=domain,
        command_ids=list(command_ids),
        fingerprint=decision.fingerprint or None,
        until=until,
        again=decision.action == "retry",
        with_data=decision.patch is not None,
        decision_batch=decision_batch,
    )


def retry(decision: Decision, commands: Sequence[int], data: Sequence[str], decision_batch: UUID | None) -> Plan[None]:
    """Put commands back into the queue, with their patched `data` if the decision has a patch."""
    patch = None if decision.patch is None else encode(decision.patch, WIDEST)
    about = {"commands": list(commands), "operator": decision.operator}
    yield from execute(SQL.retry, **about, data=list(data), patch=patch, decision_batch=decision_batch)


def end(decision: Decision, commands: Sequence[int], decision_batch: UUID | None = None) -> Plan[psycopg.Error | None]:
    """Complete or cancel commands. If one of them is a group whose events cannot be deleted, return that error."""
    details: dict[str, Any]
    if decision.action == "complete":
        type, details = "OPERATOR_COMPLETED", {"result": decision.result}
        outcome, reply = "SUCCESS", decision.result
    else:
        type, details = "OPERATOR_CANCELED", {"reason": decision.reason}
        outcome, reply = "CANCELED", {"message": decision.reason}
    details |= {} if decision_batch is None else {"batch_id": str(decision_batch)}
    ending = execute(
        SQL.end,
        commands=list(commands),
        operator=decision.operator,
        type=type,
        details=encode(details, WIDEST),
        outcome=outcome,
        reply=None if reply is None else encode(reply, WIDEST),
    )
    try:
        yield Savepoint(ending)
    except psycopg.Error as error:
        if is_away(error) or "busload.end_groups" not in (error.diag.context or ""):
            raise
        return error
    return None


def why_kept(error: psycopg.Error) -> str:
    """Why the events of a group cannot be deleted."""
    said = error.diag
    if error.sqlstate == REFUSED_HERE:
        return str(said.message_primary)
    details = f" ({said.message_detail})" if said.message_detail else ""
    return f"Its events cannot be deleted: {said.message_primary}{details}."


def _left_behind(domain: str, part: Part, command_ids: set[UUID]) -> Plan[dict[UUID, str]]:
    """Say why commands of a part were not picked."""
    rows = yield from execute(SQL.left_behind, domain=domain, command_ids=list(command_ids), until=part.until)
    why = dict.fromkeys(command_ids, "it is not there any more")
    for command_id, status, fingerprint, later in rows:
        if fingerprint is None:
            why[command_id] = f"it is {status}"
        elif fingerprint != part.decision.fingerprint:
            why[command_id] = f"it waits for another cause now: {fingerprint}"
        else:
            why[command_id] = "it failed again after the decision" if later else "its batch was canceled"
    return why
