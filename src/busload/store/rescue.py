"""How leases outlive nobody: workers say that they live, and what dead ones held goes back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from busload.domain.execution import Lease
from busload.domain.ids import POSITIONS
from busload.store import cancel
from busload.store.plan import Plan, execute
from busload.store.statements import statements

SQL = statements("rescue")

MAX_CRASHES = 3
"""How many workers a command may take down alone before it waits for a person."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """What a living worker holds; those in `settled` have been there for longer than a claim takes to answer."""

    leases: frozenset[UUID]
    canceled: frozenset[UUID]
    settled: frozenset[UUID]


@dataclass(frozen=True, slots=True)
class Returned:
    """How many commands went back, and how many of them to troubleshooting."""

    commands: int = 0
    parked: int = 0


def register(*, name: str, domains: Sequence[str], concurrency: int, lease_for: timedelta) -> Plan[int]:
    [(worker,)] = yield from execute(
        SQL.register, name=name, domains=list(domains), concurrency=concurrency, lease_for=lease_for
    )
    return int(worker)


def renew(*, worker: int, settled: timedelta) -> Plan[Renewal | None]:
    """Say that this worker lives; None means that it was declared dead."""
    rows = yield from execute(SQL.renew, worker=worker, settled=settled)
    return Renewal(*map(frozenset, rows[0])) if rows else None


def come_back(
    *,
    buried: Sequence[int],
    leases: Sequence[Lease],
    name: str,
    domains: Sequence[str],
    concurrency: int,
    lease_for: timedelta,
) -> Plan[tuple[int, frozenset[UUID]]]:
    """A worker that was declared dead lives: give it a new number, and what nobody has taken over; needs a transaction.

    `buried` are the numbers that it had. Returns the new one and the leases that it holds again.
    """
    worker = yield from register(name=name, domains=domains, concurrency=concurrency, lease_for=lease_for)
    resumed = yield from resume(
        worker=worker,
        buried=buried,
        leases=[lease.lease_id for lease in leases],
        whole=[lease.lease_id for lease in leases if not lease.refused],
        loads={lease.lo // POSITIONS for lease in leases},
    )
    return worker, resumed


def resume(
    *, worker: int, buried: Sequence[int], leases: Sequence[UUID], whole: Sequence[UUID], loads: Collection[int]
) -> Plan[frozenset[UUID]]:
    """Take up again, of the leases that these dead numbers had, what nobody has taken over; needs a transaction.

    `loads` are the numbers of the loads that the leases are of. Returns those that are held again.
    """
    if not leases:
        return frozenset()
    held = yield from execute(
        SQL.resume, worker=worker, buried=list(buried), leases=list(leases), whole=list(whole), loads=list(loads)
    )
    return frozenset(lease_id for (lease_id,) in held)


def retire(*, worker: int) -> Plan[None]:
    yield from execute(SQL.retire, worker=worker)


def release(leases: Sequence[UUID]) -> Plan[Returned]:
    """Hand leases back on purpose: nobody is to blame. Needs a transaction."""
    if not leases:
        return Returned()
    yield from execute(SQL.hold, leases=list(leases))
    return (yield from _return(leases, blame=False))


def rescue(
    *, worker: int | None = None, judge: bool = True, free_only: bool = False, patience: int | None = None
) -> Plan[Returned]:
    """Take back what dead workers held; needs a transaction.

    Without `judge`, nobody is declared dead, and only what those held is taken back who were before. `worker` is who
    asks.
    With `patience`, in milliseconds, it fails by `LockNotAvailable` if others hold a batch for longer; with
    `free_only`, what belongs to such a batch stays for the next time.
    """
    leases = yield from execute(SQL.bury, worker=worker, judge=judge, free_only=free_only)
    if not leases:
        return Returned()
    if patience is not None:
        yield from execute(SQL.be_patient, patience=patience)
    return (yield from _return([lease_id for (lease_id,) in leases], blame=True))


def cancel_stragglers() -> Plan[int]:
    """Cancel what came back to a place while its batch was being canceled, or what was left by one who died at it.

    A page at a time; needs a transaction.
    """
    total = 0
    for batch_id, after, reason in (yield from execute(SQL.canceling_batches)):
        canceled, _ = yield from cancel.page(batch_id, after, reason=reason, operator=None, hold=None)
        total += canceled
        if total >= cancel.PAGE:
            break
    return total


def start_batches(*, worker: int) -> Plan[int]:
    [(started, _)] = yield from execute(SQL.start_batches, worker=worker)
    return int(started)


def _return(leases: Sequence[UUID], *, blame: bool) -> Plan[Returned]:
    [row] = yield from execute(SQL.return_leases, leases=list(leases), blame=blame, max_crashes=MAX_CRASHES)
    return Returned(*row)
