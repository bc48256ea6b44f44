"""The leases a worker holds: what it runs, and what it should stop running."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from uuid import UUID

from busload.commands.execution import Lease, Leased


class HeldLeases:
    def __init__(self) -> None:
        self._leases: dict[UUID, Lease] = {}
        self._refused: dict[UUID, Lease] = {}
        self._missing: set[UUID] = set()
        self._deserted: set[UUID] = set()
        self._ran_suspect = False
        self.has_budgets = False
        """Whether a lease came that belongs to a batch with a failure budget."""
        self.lost = 0
        """Leases that others took over."""
        self.on_gone: Callable[[Lease], None] | None = None
        """Called with each lease that is not held any more, whatever the reason."""

    def take(self, leases: Iterable[Lease]) -> None:
        now = time.monotonic()
        for lease in leases:
            lease.claimed = now
            self._ran_suspect = self._ran_suspect or lease.crashes > 0
            self.has_budgets = self.has_budgets or lease.has_budget
            self._leases[lease.lease_id] = lease

    @property
    def lease_ids(self) -> list[UUID]:
        return list(self._leases)

    @property
    def batches(self) -> set[UUID]:
        return {lease.batch_id for lease in self._leases.values() if lease.batch_id is not None}

    @property
    def has_suspect(self) -> bool:
        """Whether a suspect runs here: a load that ran when a worker died. One at a time, to know which one kills."""
        return any(lease.crashes for lease in self._leases.values())

    def suspect_ended(self) -> bool:
        """Whether the last suspect has ended, so that the next one may be claimed. True once for each."""
        ended = self._ran_suspect and not self.has_suspect
        if ended:
            self._ran_suspect = False
        return ended

    def unsettled_by_batch(self) -> Counter[UUID]:
        counts: Counter[UUID] = Counter()
        for lease in self._leases.values():
            if lease.batch_id is not None:
                counts[lease.batch_id] += lease.unsettled
        return counts

    def runs(self, batch_id: UUID) -> bool:
        """Whether a command of this batch has no result yet."""
        return any(lease.running > 0 for lease in self._leases.values() if lease.batch_id == batch_id)

    def settled(self, leased: Iterable[Leased]) -> None:
        """These commands are not ours to run any more. A second call changes nothing."""
        for one in leased:
            if not one.settled:
                one.settled = True
                one.lease.unsettled -= 1
                if one.lease.unsettled <= 0:
                    self._let_go(one.lease.lease_id)

    def refused(self, leased: Leased) -> None:
        """The database has refused the result of this command, because it did not know the lease.

        This worker may have been declared dead. The lease is remembered until that is known, so that the blame can be
        taken back.
        """
        leased.lease.refused = True
        self._refused[leased.lease.lease_id] = leased.lease
        self.settled([leased])

    def drop(self, lease_ids: Iterable[UUID]) -> None:
        for lease_id in lease_ids:
            self._let_go(lease_id)

    def cancel(self, batch_id: UUID) -> None:
        """Ask the commands of a canceled batch to stop."""
        for lease in self._leases.values():
            if lease.batch_id == batch_id:
                lease.canceled = True

    def ask_to_stop(self, commands: Iterable[int]) -> None:
        """Ask these commands to stop, one by one."""
        for command in commands:
            for lease in self._leases.values():
                if lease.load.lo <= command <= lease.load.hi:
                    lease.stopping |= {command}

    def reconcile(self, *, present: Set[UUID], canceled: Set[UUID]) -> int:
        """Compare with what the database says; returns how many leases were lost.

        A lease that was just claimed or closed may be in one picture and not yet in the other, so it is lost only when
        it is missing twice in a row.
        """
        missing = self._leases.keys() - present
        lost = missing & self._missing
        self._missing = missing
        self.lose(lost)
        for lease_id in canceled & self._leases.keys():
            self._leases[lease_id].canceled = True
        return len(lost)

    def deserted(self, alive: Mapping[UUID, int]) -> list[UUID]:
        """Leases with commands that have no result, though `alive` says that none of them waits or runs here.

        A command may be on its way from one to the other, so this must be found twice in a row. From then on nothing of
        such a lease begins here any more.
        """
        found = {id for id, lease in self._leases.items() if lease.running > 0 and not alive.get(id)}
        deserted, self._deserted = found & self._deserted, found
        for lease_id in deserted:
            self._leases[lease_id].lost = True
        return list(deserted)

    @property
    def leases(self) -> list[Lease]:
        """The leases held now, and those that the database refused a result of."""
        return list({**self._refused, **self._leases}.values())

    def lose(self, lease_ids: Set[UUID]) -> None:
        """Others have these leases now."""
        self._refused.clear()  # by now it is known whether this worker was declared dead
        for lease_id in lease_ids & self._leases.keys():
            self.lost += 1
            self._leases[lease_id].lost = True
            self._let_go(lease_id)

    def _let_go(self, lease_id: UUID) -> None:
        lease = self._leases.pop(lease_id, None)
        if lease is not None and self.on_gone is not None:
            self.on_gone(lease)
