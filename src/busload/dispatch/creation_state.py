"""How batches were created through a broker, and where a creation that stopped goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast
from uuid import UUID

from busload.commands import send, send_batches
from busload.commands.command import NewCommand
from busload.commands.ids import job_id_of
from busload.commands.load import LoadToPublish
from busload.commands.payload import readable
from busload.commands.send import NewBatch, Via
from busload.commands.send_batches import BatchToWrite
from busload.dispatch.strategy import DispatchReport, DispatchStatus, Strategy, checkpoint_name
from busload.errors import BatchNotFoundError, InvalidOperationError
from busload.postgres.plan import Plan, Savepoint, execute, one
from busload.postgres.statements import statements

SQL = statements(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the creating process knows at the end. Times are milliseconds."""

    status: DispatchStatus
    retry_needed: bool
    error: str | None
    warning: str | None
    insert_ms: float
    send_ms: float
    mark_ms: float
    total_ms: float
    confirmed: int = 0
    """Commands whose messages the broker has confirmed."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a creation in checkpoints stands: `commands` of `total` are written."""

    strategy: str
    total: int | None
    checkpoints: int
    commands: int
    last_command: UUID | None
    sealed: bool
    canceled: bool = False


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was written: its number, counted from 1, and what is to be published."""

    number: int
    loads: Sequence[LoadToPublish]


def create(
    batch: NewBatch, commands: Sequence[NewCommand], via: Via, strategy: Strategy = Strategy.RELAY
) -> Plan[list[LoadToPublish]]:
    """Write a batch with all its commands, and start its report. Returns the loads to be published."""
    loads = yield from send.create_batch(batch, commands, via)
    yield from _start(batch, via, strategy, len(commands), written=len(commands))
    return loads


def create_batches(batches: Sequence[BatchToWrite], via: Via) -> Plan[None]:
    """Write batches of one domain with all their commands, and start their reports: relays publish the commands."""
    yield from send_batches.create_batches(batches, via)
    sizes = [len(commands) for _, commands in batches]
    names = {"transport": via.transport, "strategy": str(Strategy.RELAY)}
    yield from execute(SQL.start_some, batch_ids=[batch.batch_id for batch, _ in batches], sizes=sizes, **names)


def write_checkpoint(
    batch: NewBatch,
    commands: Sequence[NewCommand],
    via: Via,
    *,
    after: int,
    last: bool,
    total: int | None,
) -> Plan[Checkpoint | Cursor]:
    """Write commands of a batch that come `after` so many others. The first ones open the batch, the last ones seal it.

    If the batch does not have exactly so many commands, another caller has written some: then nothing is written, and
    the cursor is returned. A batch that was begun and is gone is not begun again: its first commands would be missing.
    """
    cursor = yield from _locked_cursor(batch.domain, batch.batch_id)
    if cursor is None:
        if after:
            raise BatchNotFoundError(batch.domain, batch.batch_id)
        cursor = yield from _open(batch, via, total)
    if cursor.strategy != Strategy.CHECKPOINT:
        raise send.already_exists(batch.batch_id)
    if cursor.commands != after or cursor.sealed:
        return cursor
    loads = yield from send.send_many(batch.domain, commands, batch.batch_id, via)
    yield from execute(
        SQL.checkpoint,
        batch_id=batch.batch_id,
        checkpoint=cursor.checkpoints + 1,
        commands=len(commands),
        last_command=commands[-1].command_id,
        last=last,
    )
    if last:
        yield from send.seal(batch.domain, batch.batch_id)
    return Checkpoint(cursor.checkpoints + 1, loads)


def _locked_cursor(domain: str, batch_id: UUID) -> Plan[Cursor | None]:
    """Where a creation stands. Nobody else moves it before the end of the transaction."""
    yield from execute(SQL.hold, domain=domain, batch_id=batch_id)
    return (yield from one(Cursor, SQL.resume, domain=domain, batch_id=batch_id))


def _open(batch: NewBatch, via: Via, total: int | None) -> Plan[Cursor]:
    """Open a batch. If another caller has just opened it, return where that one stands."""

    def opening() -> Plan[None]:
        yield from send.open_batch(batch)
        yield from _start(batch, via, Strategy.CHECKPOINT, total, written=0)

    try:
        yield Savepoint(opening())
    except InvalidOperationError:
        cursor = yield from _locked_cursor(batch.domain, batch.batch_id)
        if cursor is None:
            raise
        return cursor
    return Cursor(Strategy.CHECKPOINT, total, 0, 0, None, sealed=False)


def _start(batch: NewBatch, via: Via, strategy: Strategy, total: int | None, *, written: int) -> Plan[None]:
    """Start the report, in the transaction that writes the batch."""
    names = {"batch_id": batch.batch_id, "transport": via.transport, "strategy": str(strategy)}
    yield from execute(SQL.start, **names, total=total, written=written)


def seal(domain: str, batch_id: UUID, via: Via) -> Plan[bool]:
    """Seal an open batch and, with a broker, start its report. Call `close` afterwards, as after a mark."""
    sealed = yield from send.seal(domain, batch_id)
    if sealed and via.transport is not None:
        yield from execute(SQL.start_sealed, batch_id=batch_id, transport=via.transport)
    return sealed


def finish(batch_id: UUID, outcome: Outcome) -> Plan[None]:
    """Store how a creation went. Call `close` afterwards, in a transaction of its own: relays skip it till then."""
    values = {name: getattr(outcome, name) for name in outcome.__slots__}
    yield from execute(SQL.finish, batch_id=batch_id, **values | {"status": str(outcome.status)})


def failed_round(batch_ids: Sequence[UUID]) -> Plan[None]:
    yield from execute(SQL.failed_round, batch_ids=list(batch_ids))


def close(batch_ids: Sequence[UUID] | None = None) -> Plan[int]:
    """Finish the reports of creations, these or all, of which nothing waits in the outbox; returns how many.

    Call it after the transaction that has moved their last loads: two that move loads at the same time do not see each
    other's.
    """
    return len((yield from execute(SQL.close, batch_ids=None if batch_ids is None else list(batch_ids))))


def find(domain: str, batch_id: UUID) -> Plan[DispatchReport | None]:
    return one(_report, SQL.find, domain=domain, batch_id=batch_id)


def confirm_checkpoint(batch_id: UUID, number: int) -> Plan[None]:
    yield from execute(SQL.confirm_checkpoint, batch_id=batch_id, checkpoint=number)


def _report(*columns: Any) -> DispatchReport:
    found = DispatchReport(*columns)
    return replace(
        found,
        strategy=Strategy(found.strategy),
        status=DispatchStatus(found.status),
        checkpoints=tuple(checkpoint_name(found.job_id or found.batch_id, int(number)) for number in found.checkpoints),
        job_id=job_id_of(found.job_id),
        stage=readable(cast(str | None, found.stage)),
        failed_checkpoint=found.failed_checkpoint
        and checkpoint_name(found.job_id or found.batch_id, int(found.failed_checkpoint)),
    )
