"""How a batch is stopped: in pages, so that the cancel of a large one keeps nobody else waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeAlias
from uuid import UUID

from busload.errors import BatchNotFoundError
from busload.store import send
from busload.store.plan import Plan, execute
from busload.store.statements import statements

SQL = statements("cancel")

PAGE = 2000
"""Commands that one transaction cancels, and up to a load more: with replies, that takes it some tenths of a second."""

HOLD = timedelta(seconds=30)
"""How long whoever cancels may take for a page; then a sweep thinks it dead and goes on."""

BEGINNING = -1

Begun: TypeAlias = tuple[int, UUID | None]
"""How many commands were canceled so far, and the batch of which more are to be; None if that was all."""


class Canceling:
    """A cancel in pages: perform `begin()`, then `pages()` one by one, each in a transaction of its own."""

    def __init__(self, begin: Callable[[], Plan[Begun]], *, reason: str, operator: str | None) -> None:
        self._first, self._reason, self._operator = begin, reason, operator
        self._batch_id: UUID | None = None
        self._after = BEGINNING
        self.canceled = 0

    def begin(self) -> Plan[None]:
        """It may be performed again, if its transaction came to nothing."""
        self.canceled, self._batch_id = yield from self._first()

    def pages(self) -> Iterator[Plan[None]]:
        while self._batch_id is not None:
            yield self._page(self._batch_id)

    def _page(self, batch_id: UUID) -> Plan[None]:
        canceled, after = yield from page(
            batch_id, self._after, reason=self._reason, operator=self._operator, hold=HOLD
        )
        self.canceled += canceled
        if after is None:
            self._batch_id = None
        else:
            self._after = after


def begin(domain: str, batch_id: UUID, *, reason: str, operator: str | None, in_pages: bool) -> Plan[Begun]:
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
        if not (yield from execute(send.SQL.find_batch, domain=domain, batch_id=batch_id)):
            raise BatchNotFoundError(domain, batch_id)
        return 0, None
    yield from execute(send.SQL.decide, batch_id=batch_id)
    return 0, batch_id


def cancel_batch(domain: str, batch_id: UUID, *, reason: str, operator: str | None) -> Plan[int]:
    """Cancel what has not started and ask the rest to stop, all in one transaction, which this needs."""
    begun = yield from begin(domain, batch_id, reason=reason, operator=operator, in_pages=False)
    return (yield from finish(begun, reason=reason, operator=operator))


def finish(begun: Begun, *, reason: str, operator: str | None) -> Plan[int]:
    """The pages of a cancel that is one transaction."""
    total, batch_id = begun
    after: int | None = BEGINNING
    while batch_id is not None and after is not None:
        canceled, after = yield from page(batch_id, after, reason=reason, operator=operator, hold=None)
        total += canceled
    return total


def page(
    batch_id: UUID, after: int, *, reason: str | None, operator: str | None, hold: timedelta | None
) -> Plan[tuple[int, int | None]]:
    """Cancel the next page of what waits; returns how many that were, and where the next one begins, if there is one.

    Needs a transaction. With the last page the batch may be claimed from again: what comes back to it is swept.
    """
    yield from execute(SQL.hold_batch, batch_id=batch_id, hold=hold)
    [(canceled, next_one, _)] = yield from execute(
        SQL.cancel_page, batch_id=batch_id, after=after, limit=PAGE, reason=reason, operator=operator
    )
    if next_one is None:
        yield from execute(SQL.let_batch_go, batch_id=batch_id)
    return int(canceled), next_one
