"""How the past is removed: in small transactions, each complete in itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

from busload.domain.ids import POSITIONS
from busload.domain.retention import Pruned
from busload.store.arrays import Bigints
from busload.store.plan import Plan, execute
from busload.store.statements import statements

SQL = statements("prune")

SLICE = 5000
"""Commands that go in one transaction, about: to the end of a load. It takes a tenth of a second or two."""

PAGE = 1000
"""Batches that are looked at or marked in one transaction."""

YOUNG_LOADS = 1000
"""So many young loads in a row are the end of what is old. Loads are not quite in the order of time: their numbers
are drawn before they are committed, and some are filled for a while."""

_EVER = datetime(1, 1, 1, tzinfo=UTC)
_NO_BATCH = UUID(int=0)


@dataclass(frozen=True, slots=True)
class _Batch:
    batch_id: UUID
    total: int
    completed_at: datetime = _EVER


class Pruning:
    """One run over everything that is old: a series of plans, each of which needs a transaction of its own.

    `pruned` is what they have removed so far. The cutoff is fixed by the first of them, on the database's clock.
    """

    def __init__(self, older_than: timedelta, *, archive: bool = False, dry_run: bool = False) -> None:
        self.pruned = Pruned()
        self._older_than, self._archive, self._dry_run = older_than, archive, dry_run
        self._cutoff = _EVER
        self._page: list[_Batch] = []
        self._next: int | None = 0

    def plans(self) -> Iterator[Plan[None]]:
        """Batches before single commands, all of them: a callback may go as soon as its batch is marked."""
        yield self._fix_cutoff()
        self._next = 0
        while self._next is not None and not self._dry_run:
            yield self._remove_jobs()
        yield from self._ended_batches()
        yield from self._marked_batches()
        self._next = 0
        while self._next is not None:
            yield self._remove_singles(self._next)

    def _fix_cutoff(self) -> Plan[None]:
        [(self._cutoff,)] = yield from execute(SQL.cutoff, older_than=self._older_than)

    def _remove_jobs(self) -> Plan[None]:
        """The next jobs; their batches may go from here on."""
        yield from self._begin()
        [(gone,)] = yield from execute(SQL.remove_jobs, cutoff=self._cutoff, limit=PAGE, archive=self._archive)
        self._next = 0 if gone == PAGE else None

    def _ended_batches(self) -> Iterator[Plan[None]]:
        after = _Batch(_NO_BATCH, 0, _EVER)
        while True:
            yield self._mark(after)
            page = self._page
            if self._dry_run:
                yield from self._remove_batches(page)
            if len(page) < PAGE:
                return
            after = page[-1]

    def _mark(self, after: _Batch) -> Plan[None]:
        yield from self._begin()
        rows = yield from execute(
            SQL.ended_batches, cutoff=self._cutoff, after_time=after.completed_at, after=after.batch_id, limit=PAGE
        )
        self._page = [_Batch(batch_id, total, completed_at) for completed_at, batch_id, total in rows]
        if rows and not self._dry_run:
            yield from execute(SQL.mark, batch_ids=[batch.batch_id for batch in self._page])

    def _marked_batches(self) -> Iterator[Plan[None]]:
        """Also those that an earlier run has marked and not finished."""
        after = _NO_BATCH
        while True:
            yield self._look_for_marked(after)
            page = self._page
            yield from self._remove_batches(page)
            if len(page) < PAGE:
                return
            after = page[-1].batch_id

    def _look_for_marked(self, after: UUID) -> Plan[None]:
        yield from self._begin()
        rows = yield from execute(SQL.marked_batches, after=after, limit=PAGE)
        self._page = [_Batch(batch_id, total) for batch_id, total in rows]

    def _remove_batches(self, batches: Sequence[_Batch]) -> Iterator[Plan[None]]:
        for group in _packed(batches):
            self._next = 0
            while self._next is not None:
                yield self._remove_members(group, self._next)

    def _remove_members(self, batch_ids: Sequence[UUID], start: int) -> Plan[None]:
        """The next loads of these batches, and with the last of them the batches themselves."""
        yield from self._begin()
        [(found, last, ids)] = yield from execute(SQL.members, batch_ids=batch_ids, after=start - 1, limit=SLICE)
        pruned = yield from self._remove(ids)
        if found < SLICE:
            pruned += yield from self._remove_empty(batch_ids)
        self._next = None if found < SLICE else last + 1
        self.pruned += pruned

    def _remove_empty(self, batch_ids: Sequence[UUID]) -> Plan[Pruned]:
        if self._dry_run:
            [(batches, events)] = yield from execute(SQL.count_batches, batch_ids=batch_ids)
        else:
            [(batches, events)] = yield from execute(SQL.remove_batches, batch_ids=batch_ids, archive=self._archive)
        return Pruned(events=events, batches=batches)

    def _remove_singles(self, start: int) -> Plan[None]:
        """The next commands without a batch."""
        yield from self._begin()
        [(at, found, old)] = yield from execute(SQL.seek, start=start, cutoff=self._cutoff, limit=YOUNG_LOADS)
        if not found:
            self._next = (at | POSITIONS - 1) + 1 if old else None
            return
        [(last, ids)] = yield from execute(
            SQL.singles, start=at, cutoff=self._cutoff, limit=SLICE, dry_run=self._dry_run
        )
        pruned = yield from self._remove(ids)
        self._next = last + 1
        self.pruned += pruned

    def _remove(self, ids: Sequence[int]) -> Plan[Pruned]:
        if not ids:
            return Pruned()
        packed = Bigints.of(ids)
        rows = yield from execute(SQL.holding if self._dry_run else SQL.free_tasks, ids=packed)
        if kept := {load for (load,) in rows}:
            packed = Bigints.of([id for id in ids if id // POSITIONS not in kept])
        if self._dry_run:
            [counts] = yield from execute(SQL.count, ids=packed)
        else:
            [counts] = yield from execute(SQL.remove, ids=packed, archive=self._archive)
        return Pruned(*counts)

    def _begin(self) -> Plan[None]:
        yield from execute(SQL.begin, alone=not self._dry_run)


def take_turn(every: timedelta) -> Plan[float | None]:
    """None if it is this worker's turn to prune for all; otherwise the seconds until it may be."""
    [(taken, seconds)] = yield from execute(SQL.take_turn, every=every)
    return None if taken else float(seconds)


def _packed(batches: Sequence[_Batch]) -> Iterator[list[UUID]]:
    """Batches that fit into one transaction together; a larger one is alone."""
    group: list[UUID] = []
    total = 0
    for batch in batches:
        if group and total + batch.total >= SLICE:
            yield group
            group, total = [], 0
        group.append(batch.batch_id)
        total += batch.total
    if group:
        yield group
