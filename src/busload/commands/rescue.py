"""How workers show that they are alive, and how the commands of dead workers go back."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

from busload.commands.execution import Lease
from busload.postgres.plan import Plan, execute, many
from busload.postgres.statements import statements
from busload.postgres.write import Write, patient

SQL = statements(__name__)

MAX_CRASHES = 3
"""How many workers a command may take down alone before it waits for a person."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """The leases of a living worker. Those in `settled` are older than a claim takes to answer."""

    leases: frozenset[UUID]
    canceled: frozenset[UUID]
    settled: frozenset[UUID]
    stopping: frozenset[int] = frozenset()
    """Commands of these leases that somebody has canceled."""
    asked_to_stop: bool = False
    """Whether an operator has asked the worker to stop."""


@dataclass(frozen=True, slots=True)
class Returned:
    """How many commands went back, how many of them to troubleshooting, and which these are."""

    commands: int = 0
    parked: int = 0
    parked_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Parked:
    """A command that waits for a person because it has taken down its workers."""

    domain: str
    command_type: str
    command_id: UUID
    data: str | None
    batch_id: UUID | None
    task_key: str | None
    headers_of_batch: str | None
    headers: str | None
    attempt: int
    reason: str
    error: str | None


def register(
    *,
    name: str,
    domains: Sequence[str],
    concurrency: int,
    lease_for: timedelta,
    version: str | None = None,
    release: str | None = None,
    dead: Sequence[int] = (),
) -> Plan[int]:
    """Give a worker a number. `dead` are those that it had before, if it was declared dead.

    `release` is a fingerprint of all schedules that its application declares.
    """
    [(worker,)] = yield from execute(
        SQL.register,
        name=name,
        domains=list(domains),
        concurrency=concurrency,
        lease_for=lease_for,
        version=version,
        host=socket.gethostname(),
        process_id=os.getpid(),
        release=release,
        dead=list(dead),
    )
    return int(worker)


def renew(*, worker: int, settled: timedelta, condition: str | None = None) -> Plan[Renewal | None]:
    """Say that this worker is alive, and in JSON how it is. None means that it was declared dead."""
    rows = yield from execute(SQL.renew, worker=worker, settled=settled, condition=condition)
    if not rows:
        return None
    *leases, asked_to_stop = rows[0]
    held, canceled, settled_ones, stopping = map(frozenset, leases)
    return Renewal(held, canceled, settled_ones, stopping, asked_to_stop)


def come_back(
    *,
    dead: Sequence[int],
    leases: Sequence[Lease],
    name: str,
    domains: Sequence[str],
    concurrency: int,
    lease_for: timedelta,
    version: str | None = None,
    release: str | None = None,
) -> Plan[tuple[int, frozenset[UUID]]]:
    """Give a worker that was declared dead a new number, and the leases that nobody has taken over.

    `dead` are the numbers that it had. Returns the new number, and the leases that it holds again. Needs a transaction.
    """
    facts: dict[str, Any] = {"lease_for": lease_for, "version": version, "release": release, "dead": dead}
    worker = yield from register(name=name, domains=domains, concurrency=concurrency, **facts)
    resumed = yield from resume(
        worker=worker,
        dead=dead,
        leases=[lease.lease_id for lease in leases],
        whole=[lease.lease_id for lease in leases if not lease.refused],
        loads={lease.load.number for lease in leases},
    )
    return worker, resumed


def resume(
    *, worker: int, dead: Sequence[int], leases: Sequence[UUID], whole: Sequence[UUID], loads: Collection[int]
) -> Plan[frozenset[UUID]]:
    """Give the leases of these dead numbers that nobody has taken over to this worker; needs a transaction.

    `loads` are the numbers of the loads of these leases. Returns the leases that are held again.
    """
    if not leases:
        return frozenset()
    held = yield from execute(
        SQL.resume, worker=worker, dead=list(dead), leases=list(leases), whole=list(whole), loads=list(loads)
    )
    return frozenset(lease_id for (lease_id,) in held)


def retire(*, worker: int) -> Plan[None]:
    yield from execute(SQL.retire, worker=worker)


def release(leases: Sequence[UUID]) -> Plan[Returned]:
    """Hand leases back on purpose: no command becomes a suspect. Needs a transaction."""
    if not leases:
        return Returned()
    yield from hold(leases)
    return (yield from return_leases(leases, suspect=False))


def hold(leases: Sequence[UUID]) -> Plan[bool]:
    """Lock leases, and wait for whoever settles commands of theirs right now. False if none of them exists."""
    return bool((yield from execute(SQL.hold, leases=list(leases))))


def write() -> Write[Returned]:
    """Take back the leases of dead workers, as a call of its own."""
    return patient(rescue)


def rescue(
    *, worker: int | None = None, domains: Sequence[str] | None = None, judge: bool = True, free_only: bool = False
) -> Plan[Returned]:
    """Take back what dead workers held; needs a transaction.

    Without `judge` no worker is declared dead: only leases of workers that are dead already are taken back. `worker` is
    the one that asks; it serves these `domains` or, without them, all. With `free_only`, commands of a batch that
    others hold are left for the next time.
    """
    about = {"worker": worker, "domains": None if domains is None else list(domains), "max_crashes": MAX_CRASHES}
    leases = yield from execute(SQL.declare_dead, **about, judge=judge, free_only=free_only)
    if not leases:
        return Returned()
    return (yield from return_leases([lease_id for (lease_id,) in leases], suspect=True))


def parked(commands: Sequence[int]) -> Plan[list[Parked]]:
    """What is known of commands that a rescue has sent to troubleshooting."""
    return many(Parked, SQL.parked, commands=list(commands))


def start_batches(*, worker: int) -> Plan[int]:
    [(started, _)] = yield from execute(SQL.start_batches, worker=worker)
    return int(started)


def return_leases(leases: Sequence[UUID], *, suspect: bool) -> Plan[Returned]:
    """Put back what these leases have not settled; with `suspect`, a worker died while it held them."""
    [row] = yield from execute(SQL.return_leases, leases=list(leases), suspect=suspect, max_crashes=MAX_CRASHES)
    commands, parked_ids = row
    return Returned(commands, len(parked_ids), tuple(parked_ids))
