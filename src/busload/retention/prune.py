"""How the past is removed: in small transactions, each complete in itself."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from datetime import UTC, datetime, timedelta
from operator import add
from typing import Any
from uuid import UUID

import msgspec

from busload.commands.load import first_id, number_of
from busload.commands.wording import counted
from busload.postgres.arrays import Bigints
from busload.postgres.plan import Plan, execute, many
from busload.postgres.statements import statements

log = logging.getLogger("busload")

SQL = statements(__name__)

SLICE = 5000
"""About so many commands go in one transaction: to the end of a load. It takes a tenth of a second or two."""

PAGE = 1000
"""Batches that are looked at or marked in one transaction."""

YOUNG_LOADS = 1000
"""After so many young loads in a row, no old ones are expected. Loads are not quite in the order of time: their numbers
are drawn before they are committed, and some are filled for a while."""

EVERY = timedelta(hours=1)
PAUSE = 0.05
"""Seconds between two transactions of a worker, so that the work of the others goes first."""

Steps = Generator[Plan[Any], Any, None]
"""Plans, each of which is answered with what it returned."""

_EVER = datetime(1, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Pruned:
    """How much was removed; with `dry_run`, how much would have been."""

    commands: int = 0
    executions: int = 0
    events: int = 0
    batches: int = 0

    def __add__(self, other: Pruned) -> Pruned:
        return Pruned(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class _Batch:
    batch_id: UUID = UUID(int=0)
    total: int = 0
    completed_at: datetime = _EVER


class Pruning:
    """One run over everything that is old: a series of plans, each of which needs a transaction of its own.

    `pruned` is what the plans have removed so far. The first plan fixes the cutoff, on the clock of the database.
    """

    def __init__(self, older_than: timedelta, *, archive: bool = False, dry_run: bool = False) -> None:
        self.pruned = Pruned()
        self._older_than, self._archive, self._dry_run = older_than, archive, dry_run
        self._cutoff = _EVER
        self._answer: Any = None

    def plans(self) -> Iterator[Plan[None]]:
        """Yield the plans; perform each one before you ask for the next."""
        steps = self._steps()
        try:
            step = next(steps)
            while True:
                yield self._keep_answer(step)
                step = steps.send(self._answer)
        except StopIteration:
            return

    def _keep_answer(self, plan: Plan[Any]) -> Plan[None]:
        self._answer = yield from plan

    def _steps(self) -> Steps:
        """Batches before single commands, all of them: a callback may go as soon as its batch is marked."""
        self._cutoff = yield self._find_cutoff()
        while not self._dry_run and (yield self._remove_jobs_and_notes()) == PAGE:
            pass
        yield from self._in_pages(self._mark, remove=self._dry_run)
        yield from self._in_pages(self._marked, remove=True)  # also those that an earlier run has marked
        start: int | None = 0
        while start is not None:
            start = yield self._remove_singles(start)
        if not self._dry_run:
            yield self._note_end()

    def _in_pages(self, find: Callable[[_Batch], Plan[list[_Batch]]], *, remove: bool) -> Steps:
        page = [_Batch()]
        while page:
            page = yield find(page[-1])
            for batch_ids in _packed(page) if remove else ():
                start = 0
                while start is not None:
                    start = yield self._remove_members(batch_ids, start)
            if len(page) < PAGE:
                return

    def _find_cutoff(self) -> Plan[datetime]:
        [(cutoff,)] = yield from execute(SQL.cutoff, older_than=self._older_than)
        return cutoff  # type: ignore[no-any-return]

    def _remove_jobs_and_notes(self) -> Plan[int]:
        """Remove the next jobs, whose batches may go from here on, and the next notes: what schedules fired, and what
        two trackers disagreed about.

        Returns how many were removed of that of which there were more.
        """
        yield from self._begin()
        [(jobs,)] = yield from execute(SQL.remove_jobs, cutoff=self._cutoff, limit=PAGE, archive=self._archive)
        [(fires,)] = yield from execute(SQL.remove_fires, cutoff=self._cutoff, limit=PAGE)
        [(disagreements,)] = yield from execute(SQL.remove_disagreements, cutoff=self._cutoff, limit=PAGE)
        return max(int(jobs), int(fires), int(disagreements))

    def _mark(self, after: _Batch) -> Plan[list[_Batch]]:
        """Mark the next batches that have ended."""
        yield from self._begin()
        page = yield from many(
            _Batch,
            SQL.ended_batches,
            cutoff=self._cutoff,
            after_time=after.completed_at,
            after=after.batch_id,
            limit=PAGE,
            dry_run=self._dry_run,
        )
        if page and not self._dry_run:
            yield from execute(SQL.mark, batch_ids=[batch.batch_id for batch in page])
        return page

    def _marked(self, after: _Batch) -> Plan[list[_Batch]]:
        yield from self._begin()
        return (yield from many(_Batch, SQL.marked_batches, after=after.batch_id, limit=PAGE))

    def _remove_members(self, batch_ids: Sequence[UUID], start: int) -> Plan[int | None]:
        """Remove the next loads of these batches, and with the last of them the batches. Return where to go on."""
        yield from self._begin()
        [(found, last, ids)] = yield from execute(SQL.members, batch_ids=batch_ids, after=start - 1, limit=SLICE)
        pruned = yield from self._remove(ids)
        if found < SLICE:
            pruned += yield from self._remove_empty(batch_ids)
        self.pruned += pruned
        return None if found < SLICE else last + 1

    def _remove_empty(self, batch_ids: Sequence[UUID]) -> Plan[Pruned]:
        if self._dry_run:
            [(batches, events)] = yield from execute(SQL.count_batches, batch_ids=batch_ids)
        else:
            [(batches, events)] = yield from execute(SQL.remove_batches, batch_ids=batch_ids, archive=self._archive)
        return Pruned(events=events, batches=batches)

    def _remove_singles(self, start: int) -> Plan[int | None]:
        """Remove the next commands without a batch, and return where to go on."""
        yield from self._begin()
        [(at, found, old)] = yield from execute(SQL.seek, start=start, cutoff=self._cutoff, limit=YOUNG_LOADS)
        if not found:
            return first_id(number_of(at) + 1) if old else None
        [(last, ids)] = yield from execute(
            SQL.singles, start=at, cutoff=self._cutoff, limit=SLICE, dry_run=self._dry_run
        )
        self.pruned += yield from self._remove(ids)
        return int(last) + 1

    def _remove(self, ids: Sequence[int]) -> Plan[Pruned]:
        if not ids:
            return Pruned()
        packed = Bigints.of(ids)
        rows = yield from execute(SQL.holding if self._dry_run else SQL.free_tasks, ids=packed)
        if kept := {load for (load,) in rows}:
            packed = Bigints.of([id for id in ids if number_of(id) not in kept])
        if self._dry_run:
            [counts] = yield from execute(SQL.count, ids=packed)
        else:
            [counts] = yield from execute(SQL.remove, ids=packed, archive=self._archive)
        return Pruned(*counts)

    def _note_end(self) -> Plan[None]:
        about = {"older_than": self._older_than.total_seconds(), "archive": self._archive}
        yield from execute(SQL.ended, details=msgspec.json.encode(about | asdict(self.pruned)).decode())

    def _begin(self) -> Plan[None]:
        yield from execute(SQL.begin, alone=not self._dry_run)


class Prune:
    """The station of a worker that prunes for all. Each round is one transaction, so that the worker can stop."""

    def __init__(
        self,
        perform: Callable[[Plan[Any]], Awaitable[Any]],
        keep_for: timedelta,
        archive: bool,
        every: timedelta = EVERY,
    ) -> None:
        self._perform, self._keep_for, self._archive, self._every = perform, keep_for, archive, every
        self._pruning: Pruning | None = None
        self._plans: Iterator[Plan[None]] = iter(())

    async def once(self) -> float:
        """Do one transaction, and return the seconds until the next."""
        if self._pruning is None:
            seconds: float | None = await self._perform(take_turn(self._every))
            if seconds is not None:
                return max(1.0, seconds)
            self._pruning = Pruning(self._keep_for, archive=self._archive)
            self._plans = self._pruning.plans()
        plan = next(self._plans, None)
        if plan is not None:
            try:
                await self._perform(plan)
            except BaseException:
                self._plans = self._pruning.plans()
                raise
            return PAUSE
        self._report(self._pruning.pruned)
        self._pruning = None
        return self._every.total_seconds()

    def _report(self, pruned: Pruned) -> None:
        if pruned != Pruned():
            log.info(
                "%s %s and %s that ended more than %s ago",
                "Archived" if self._archive else "Removed",
                counted(pruned.commands, "command"),
                counted(pruned.batches, "batch", "batches"),
                self._keep_for,
            )


def take_turn(every: timedelta) -> Plan[float | None]:
    """Return None if it is this worker's turn to prune for all; otherwise the seconds until it may be."""
    [(taken, seconds)] = yield from execute(SQL.take_turn, every=every)
    return None if taken else float(seconds)


def _packed(batches: Sequence[_Batch]) -> Iterator[list[UUID]]:
    """Yield batches that fit into one transaction together; a larger batch is alone."""
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
