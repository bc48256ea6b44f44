"""The leases a worker holds, and how much of each is still unsettled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from uuid import UUID

from busload.domain.execution import Lease, Leased, Transition


class Held:
    def __init__(self) -> None:
        self._leases: dict[UUID, Lease] = {}

    def take(self, leased: Iterable[Leased]) -> None:
        for one in leased:
            self._leases[one.lease.lease_id] = one.lease

    @property
    def lease_ids(self) -> list[UUID]:
        return list(self._leases)

    @property
    def has_suspect(self) -> bool:
        """Whether a load is running that was there when a worker died; one at a time, so that a crash has a name."""
        return any(lease.crashes for lease in self._leases.values())

    def finishing(self, transitions: Sequence[Transition]) -> list[UUID]:
        """The leases that have nothing left once these are settled."""
        times = Counter(transition.leased.lease.lease_id for transition in transitions)
        return [id for id, n in times.items() if id in self._leases and self._leases[id].unsettled <= n]

    def settled(self, transitions: Iterable[Transition]) -> None:
        for transition in transitions:
            self.forget_one(transition.leased.lease)

    def forget_one(self, lease: Lease) -> None:
        lease.unsettled -= 1
        if lease.unsettled <= 0:
            self._leases.pop(lease.lease_id, None)

    def drop(self, lease_ids: Iterable[UUID]) -> None:
        for lease_id in lease_ids:
            self._leases.pop(lease_id, None)

    def cancel(self, batch_id: UUID) -> None:
        """Ask the commands of a canceled batch to stop."""
        for lease in self._leases.values():
            if lease.batch_id == batch_id:
                lease.canceled = True

    def reconcile(self, *, present: Set[UUID], canceled: Set[UUID]) -> int:
        """Compare with what the database says; returns how many leases were lost."""
        lost = [lease for lease_id, lease in self._leases.items() if lease_id not in present]
        for lease in lost:
            lease.lost = True
            del self._leases[lease.lease_id]
        for lease_id in canceled & self._leases.keys():
            self._leases[lease_id].canceled = True
        return len(lost)
