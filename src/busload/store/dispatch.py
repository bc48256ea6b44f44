"""How creations of batches through a broker went, and where one that stopped goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from busload.domain.command import NewCommand
from busload.domain.dedup import Dedup
from busload.domain.dispatch import DispatchReport, DispatchStatus, Strategy, checkpoint_name
from busload.errors import BatchNotFoundError, InvalidOperationError
from busload.store import send
from busload.store.plan import Plan, Savepoint, execute, one
from busload.store.send import NewBatch, Range, Via
from busload.store.statements import statements

SQL = statements("dispatch")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the creator knows when it is done. Times are milliseconds."""

    status: DispatchStatus
    retry_needed: bool
    error: str | None
    warning: str | None
    insert_ms: float
    send_ms: float
    mark_ms: float
    total_ms: float


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
    """One that was written: its number, counted from 1, and what is to be announced."""

    number: int
    ranges: Sequence[Range]


def create(batch: NewBatch, commands: Sequence[NewCommand], via: Via, strategy: Strategy) -> Plan[list[Range]]:
    """A batch with all its commands, and the row that tells how they are announced; returns those that are to be."""
    ranges = yield from send.create_and_tell(batch, commands, via)
    yield from start(batch.batch_id, via.transport, strategy, len(commands))
    return ranges


def create_once(
    batch: NewBatch, commands: Sequence[NewCommand], dedup: Dedup, via: Via, strategy: Strategy
) -> Plan[UUID]:
    """The same without those whose task key another command holds; if none is left, nothing is announced."""
    kept = yield from send.hold_and_keep(batch.domain, commands, dedup)
    if kept:
        yield from create(batch, kept, via, strategy)
    else:
        yield from send.create_empty(batch)
    return batch.batch_id


def write_checkpoint(
    batch: NewBatch,
    commands: Sequence[NewCommand],
    via: Via,
    *,
    after: int,
    last: bool,
    total: int | None,
) -> Plan[Checkpoint | Cursor]:
    """Commands of a batch that come after so many others; the first ones open it, the last ones seal it.

    If the batch is not where the caller thinks, nothing is written: another one goes
    on with it too, or did so before. Then it returns where it stands. One that was
    begun and is gone is not begun again: its first commands would be missing.
    """
    cursor = yield from stand(batch.domain, batch.batch_id)
    if cursor is None:
        if after:
            raise BatchNotFoundError(batch.domain, batch.batch_id)
        cursor = yield from _open(batch, via, total)
    if cursor.strategy != Strategy.CHECKPOINT:
        raise send.already_exists(batch.batch_id)
    if cursor.commands != after or cursor.sealed:
        return cursor
    ranges = yield from send.send_many(batch.domain, commands, batch.batch_id, via)
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
    return Checkpoint(cursor.checkpoints + 1, ranges)


def stand(domain: str, batch_id: UUID) -> Plan[Cursor | None]:
    """Where a creation stands; nobody else moves it before the end of the transaction."""
    yield from execute(SQL.hold, domain=domain, batch_id=batch_id)
    return (yield from one(Cursor, SQL.resume, domain=domain, batch_id=batch_id))


def _open(batch: NewBatch, via: Via, total: int | None) -> Plan[Cursor]:
    """Open a batch, unless another one just has: then that one is as good."""

    def opening() -> Plan[None]:
        yield from send.open_batch(batch)
        yield from start(batch.batch_id, via.transport, Strategy.CHECKPOINT, total, written=0)

    try:
        yield Savepoint(opening())
    except InvalidOperationError:
        cursor = yield from stand(batch.domain, batch.batch_id)
        if cursor is None:
            raise
        return cursor
    return Cursor(Strategy.CHECKPOINT, total, 0, 0, None, sealed=False)


def start(
    batch_id: UUID,
    transport: str | None,
    strategy: Strategy,
    total: int | None,
    *,
    written: int | None = None,
) -> Plan[None]:
    """In the transaction that writes the batch."""
    yield from execute(
        SQL.start,
        batch_id=batch_id,
        transport=transport,
        strategy=str(strategy),
        total=total,
        written=total if written is None else written,
    )


def finish(batch_id: UUID, outcome: Outcome) -> Plan[None]:
    """To be followed by `close` in a transaction of its own: while this one holds the row, relays pass it over."""
    values = {name: getattr(outcome, name) for name in outcome.__slots__}
    yield from execute(SQL.finish, batch_id=batch_id, **values | {"status": str(outcome.status)})


def failed_round(batch_ids: Sequence[UUID]) -> Plan[None]:
    yield from execute(SQL.failed_round, batch_ids=list(batch_ids))


def close(batch_ids: Sequence[UUID] | None = None) -> Plan[int]:
    """Finish the reports of creations, these or all, of which nothing waits in the outbox any more; how many.

    Not in the transaction that has moved their last loads: others move some at the same time, and see ours no more
    than we see theirs.
    """
    return len((yield from execute(SQL.close, batch_ids=None if batch_ids is None else list(batch_ids))))


def find(domain: str, batch_id: UUID) -> Plan[DispatchReport | None]:
    return one(_report, SQL.find, domain=domain, batch_id=batch_id)


def confirm_checkpoint(batch_id: UUID, number: int) -> Plan[None]:
    yield from execute(SQL.confirm_checkpoint, batch_id=batch_id, checkpoint=number)


def _report(
    batch_id: UUID,
    transport: str,
    strategy: str,
    status: str,
    total: int | None,
    written: int,
    in_outbox: int,
    retry_needed: bool,
    error: str | None,
    warning: str | None,
    insert_ms: float | None,
    send_ms: float | None,
    mark_ms: float | None,
    total_ms: float | None,
    rounds: int,
    created_at: datetime,
    announced_at: datetime | None,
    confirmed: list[int],
    unconfirmed: list[int],
    job_id: UUID | None,
    stage: str | None,
    sealed: bool,
) -> DispatchReport:
    given_up = sealed and written != total
    if given_up and status == DispatchStatus.PENDING:
        status = DispatchStatus.PARTIAL_SUCCESS
    return DispatchReport(
        batch_id=batch_id,
        transport=transport,
        strategy=Strategy(strategy),
        status=DispatchStatus(status),
        total_tasks=total,
        database_tasks=written,
        queued_tasks=written - in_outbox,
        retry_needed=retry_needed,
        checkpoints=tuple(checkpoint_name(batch_id, number) for number in confirmed),
        failed_checkpoint=checkpoint_name(batch_id, unconfirmed[0]) if unconfirmed and status != "pending" else None,
        error=error,
        warning=warning,
        rounds=rounds,
        insert_ms=insert_ms,
        send_ms=send_ms,
        mark_ms=mark_ms,
        total_ms=total_ms,
        created_at=created_at,
        announced_at=announced_at,
        job_id=job_id,
        stage=stage,
        given_up=given_up,
    )
