"""The gate before the line: of a batch with a failure budget, one flush at most begins before its results count."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, groupby
from operator import attrgetter
from uuid import UUID

from busload.commands.execution import Lease, Leased
from busload.settings import WorkerSettings
from busload.worker.held_leases import HeldLeases
from busload.worker.line import Claimed, Gathered, commands_of


def one_flush(settings: WorkerSettings) -> int:
    """How many commands of a batch with a failure budget a worker has begun and not settled, at most."""
    return max(settings.flush_size, settings.concurrency)


class BudgetGate:
    """No more than `most` commands of such a batch pass before their results count in the database.

    After each flush the settlement looks whether the batch is held, and only then says that its results count. So what
    this worker has begun and not settled when the budget is exceeded, and all that it begins from then on, has passed
    the gate before any of it counted: that is no more than `most`, or one chunk if that is larger.

    `not_begun` are commands that the worker holds and that stand neither here nor in the line. `on_shut` is called when
    something has to wait here.
    """

    def __init__(
        self,
        held: HeldLeases,
        most: int,
        not_begun: Callable[[], Iterable[Leased]],
        on_shut: Callable[[], None],
    ) -> None:
        self._held, self._most, self._not_begun, self._on_shut = held, most, not_begun, on_shut
        self.waiting: deque[Claimed] = deque()

    def add(self, items: Sequence[Claimed]) -> list[Claimed]:
        """Let commands come to the gate; return those that may stand in line now. Commands without a budget may."""
        free: list[Claimed] = []
        for source, run in groupby(items, _source):
            leases = [source] if isinstance(source, Lease) else [one.lease for one in source.leased]
            (self.waiting if any(lease.has_budget for lease in leases) else free).extend(run)
        return free + self.let_in()

    def let_in(self) -> list[Claimed]:
        """Those that waited and may stand in line now, in their order."""
        if not self.waiting:
            return []
        begun = self._held.unsettled_by_batch()
        begun.subtract(_of_batches(self._not_begun()))
        begun.subtract(_of_batches(chain.from_iterable(map(commands_of, self.waiting))))
        passed: list[Claimed] = []
        waiting: list[Claimed] = []
        for source, run in groupby(self.waiting, _source):  # commands that were claimed together stand together
            alike = list(run)
            if not isinstance(source, Lease):
                mine = _of_batches(one for one in source.leased if one.lease.has_budget)
                may = all(begun[batch] <= 0 or begun[batch] + count <= self._most for batch, count in mine.items())
                begun.update(mine if may else ())
                (passed if may else waiting).append(source)
            elif source.batch_id is None or source.lost:
                passed += alike
            else:
                room = max(0, self._most - max(0, begun[source.batch_id]))
                begun[source.batch_id] += min(room, len(alike))
                passed += alike[:room]
                waiting += alike[room:]
        if passed:
            self.waiting.clear()
            self.waiting.extend(waiting)
        if waiting:
            self._on_shut()
        return passed


def _source(item: Claimed) -> Lease | Gathered:
    """The lease of a single command; or the chunk itself, as its commands may have several leases."""
    return item.lease if isinstance(item, Leased) else item


def _of_batches(leased: Iterable[Leased]) -> Counter[UUID]:
    """How many of these commands are of each batch. Those whose lease is lost count nowhere."""
    found: Counter[UUID] = Counter()
    for lease, count in Counter(map(attrgetter("lease"), leased)).items():
        if lease.batch_id is not None and not lease.lost:
            found[lease.batch_id] += count
    return found
