"""How a batch is stopped: in pages, so that the cancel of a large one keeps nobody else waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple
from uuid import UUID

import psycopg

from busload.commands import send
from busload.commands.wording import counted
from busload.errors import BatchNotFoundError, BusloadError, PartlyDoneError
from busload.postgres.callers_connection import AnyConnection
from busload.postgres.database import Database
from busload.postgres.plan import Plan, execute
from busload.postgres.statements import statements
from busload.postgres.write import Write, patient

SQL = statements(__name__)

PAGE = 2000
"""Commands that one transaction cancels, and up to a load more: with replies, that takes it some tenths of a second."""

HOLD = timedelta(seconds=30)
"""How long whoever cancels may take for a page; then a sweep thinks it dead and goes on."""

BEGINNING = -1

BATCHES = 500
"""Batches that one page looks at. Only the stages of a batch of jobs are so many."""


class Begun(NamedTuple):
    """How a cancel has begun: how much is canceled so far, and the batches of which commands are to be canceled."""

    done: int
    batch_ids: Sequence[UUID] = ()


class Canceled(NamedTuple):
    """What a cancel has done: with its first transaction, and how many commands after that."""

    begun: int
    commands: int


async def cancel(
    database: Database,
    begin: Callable[..., Plan[Begun]],
    conn: AnyConnection | None,
    *,
    reason: str,
    operator: str | None,
    batch_id: UUID | None = None,
    job_id: UUID | None = None,
) -> Canceled:
    """Carry out a cancel, and return how much was canceled.

    Each page has a transaction of its own; with `conn`, all pages are in the caller's.
    If a page fails, `PartlyDoneError` says how many were canceled before. Once the first transaction has committed,
    nobody sends into the batch, so the others need not wait for a lock.
    """
    about = {"reason": reason, "operator": operator}
    if (conn := database.callers_connection(conn)) is not None:
        whole = at_once(begin, reason=reason, operator=operator)
        return await database.write(Write(whole, batch_id, job_id=job_id), conn)
    begun = await database.write(patient(partial(begin, **about, in_pages=True), batch_id, job_id=job_id))
    commands = 0
    try:
        for some in _slices(begun.batch_ids):
            after: int | None = BEGINNING
            while after is not None:
                plan = page(some, after, **about, hold=HOLD)
                more, after = await database.write(Write(plan, batch_id, job_id=job_id, goes_on=True))
                commands += more
    except (BusloadError, psycopg.Error) as error:
        raise _partly_canceled(commands, error, batch_id, job_id) from error
    return Canceled(begun.done, commands)


def _slices(batch_ids: Sequence[UUID]) -> Iterator[Sequence[UUID]]:
    for start in range(0, len(batch_ids), BATCHES):
        yield batch_ids[start : start + BATCHES]


def _partly_canceled(commands: int, why: BaseException, batch_id: UUID | None, job_id: UUID | None) -> PartlyDoneError:
    what = f"batch {batch_id}" if job_id is None else f"job {job_id}"
    return PartlyDoneError(
        f"The cancel of {what} has begun, and {counted(commands, 'command is', 'commands are')} canceled so far",
        commands,
        why,
        todo="None of the others starts. Repeat the call to cancel them now; else a worker does so within a minute.",
    )


def begin_to_cancel(domain: str, batch_id: UUID, *, reason: str, operator: str | None, in_pages: bool) -> Plan[Begun]:
    """Mark a batch as canceled and ask what runs to stop; needs a transaction."""
    marked = yield from execute(
        SQL.mark_canceled,
        domain=domain,
        batch_id=batch_id,
        reason=reason,
        operator=operator,
        in_pages=in_pages,
        hold=HOLD,
    )
    if not marked:
        if not (yield from send.batch_exists(domain, batch_id)):
            raise BatchNotFoundError(domain, batch_id)
        return Begun(0)
    yield from send.complete_if_ended(batch_id)
    return Begun(0, [batch_id])


def cancel_batch(domain: str, batch_id: UUID, *, reason: str, operator: str | None) -> Plan[int]:
    """Cancel what has not started and ask the rest to stop, all in one transaction, which this needs."""
    canceled = yield from at_once(partial(begin_to_cancel, domain, batch_id), reason=reason, operator=operator)
    return canceled.commands


def at_once(begin: Callable[..., Plan[Begun]], *, reason: str, operator: str | None) -> Plan[Canceled]:
    """Every page of a cancel in one transaction, which this needs."""
    begun = yield from begin(reason=reason, operator=operator, in_pages=False)
    commands = 0
    for some in _slices(begun.batch_ids):
        after: int | None = BEGINNING
        while after is not None:
            canceled, after = yield from page(some, after, reason=reason, operator=operator, hold=None)
            commands += canceled
    return Canceled(begun.done, commands)


def page(
    batch_ids: Sequence[UUID], after: int, *, reason: str | None, operator: str | None, hold: timedelta | None
) -> Plan[tuple[int, int | None]]:
    """Cancel the next page of waiting commands of these batches; needs a transaction.

    Returns how many were canceled, and where the next page begins, if there is one. After the last page workers may
    claim from the batches again: a sweep cancels what comes back to them.
    """
    batches = {"batch_ids": list(batch_ids)}
    yield from execute(SQL.lock_batches, **batches, hold=hold)
    [(canceled, next_one, _)] = yield from execute(
        SQL.cancel_page, **batches, after=after, limit=PAGE, reason=reason, operator=operator
    )
    if next_one is None:
        yield from execute(SQL.let_batches_go, **batches)
    return int(canceled), next_one


def cancel_stragglers() -> Plan[int]:
    """Cancel commands that came back to a place after their batch was canceled, or that a cancel which died has left.

    One page at a time; needs a transaction.
    """
    found: dict[str | None, list[tuple[UUID, int]]] = {}
    for batch_id, after, reason in (yield from execute(SQL.canceling_batches)):
        found.setdefault(reason, []).append((batch_id, after))
    total = 0
    for reason, batches in found.items():
        batch_ids, first = [batch_id for batch_id, _ in batches], min(after for _, after in batches)
        canceled, _ = yield from page(batch_ids, first, reason=reason, operator=None, hold=None)
        total += canceled
        if total >= PAGE:
            break
    return total
