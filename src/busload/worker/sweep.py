"""What every worker repairs from time to time: what dead workers held, canceled batches, batches to start."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from psycopg.errors import LockNotAvailable

from busload.batches import cancel, guards, hold
from busload.commands import cancel as cancel_command
from busload.commands import expire, rescue
from busload.commands.wording import counted
from busload.limits import concurrency, order
from busload.postgres.connection import AsyncConnection
from busload.postgres.plan import Plan, many, perform_async
from busload.postgres.pool import AsyncPool
from busload.postgres.statements import statements
from busload.postgres.write import hurried

log = logging.getLogger("busload")

PATIENCE = 1000
"""Milliseconds that a part of the sweep waits for a row that others hold. Then the sweep goes on without it."""

T = TypeVar("T")

SQL = statements(__name__)


@dataclass(frozen=True, slots=True)
class RareWork:
    """Whether a sweep may find work: what most databases never have, or only now and then."""

    dead: bool
    leases: bool
    cancels: bool
    expires: bool
    canary_overdue: bool
    holds: bool
    stops: bool
    limits: bool
    orders: bool
    unused_limits: bool


async def sweep(pool: AsyncPool, *, worker: int, judge: bool, domains: Sequence[str] | None = None) -> Sequence[int]:
    """Repair as this worker, which serves these domains or all; with `judge`, it may declare others dead.

    Returns the commands that went to troubleshooting because they have taken down their workers.
    """
    async with pool.connection() as conn:
        look = many(RareWork, SQL.rare_work, worker=worker, judge=judge)
        [rare] = await perform_async(conn, look)
        returned = rescue.Returned()
        if rare.dead:
            returned = await _rescue(conn, worker, domains, judge)
            look = many(RareWork, SQL.rare_work, worker=worker, judge=judge)
            [rare] = await perform_async(conn, look)
        canceled = await _cancel_stragglers(conn) if rare.cancels else 0
        expired = await _expire(conn) if rare.expires else 0
        overdue = await _try(conn, guards.hold_overdue()) if rare.canary_overdue else 0
        if rare.holds:
            await _try(conn, hold.withhold_stragglers())
        stopped = await _try(conn, cancel_command.cancel_stopping()) if rare.stops else 0
        if rare.leases:
            await _try(conn, rescue.start_batches(worker=worker))
        if rare.limits:
            await _try(conn, concurrency.free_of_dead())
            await _try(conn, concurrency.wake_forgotten())
        if rare.orders:
            await _try(conn, order.sweep())
        if rare.unused_limits:
            await _try(conn, concurrency.forget())
            await _try(conn, order.forget_domains())
    if returned.commands:
        log.warning(
            "Took back %s from dead workers, %d to troubleshooting",
            counted(returned.commands, "command"),
            returned.parked,
        )
    if stopped:
        one, several = "command that was handed back after it", "commands that were handed back after they"
        log.info("Canceled %s had been asked to stop", counted(stopped, one, several))
    if overdue:
        log.warning("Held %s whose canary has not ended in its time", counted(overdue, "batch", "batches"))
    if expired:
        log.info("Canceled %s that had not started in time", counted(expired, "command"))
    if canceled:
        log.info("Canceled %s that came back to a canceled batch", counted(canceled, "command"))
    return returned.parked_ids


async def _rescue(conn: AsyncConnection, worker: int, domains: Sequence[str] | None, judge: bool) -> rescue.Returned:
    """Take back what dead workers held; if somebody holds a batch, everything else."""
    for free_only in (False, True):
        plan = rescue.rescue(worker=worker, domains=domains, judge=judge, free_only=free_only)
        returned = await _try(conn, plan)
        if returned is not None:
            return returned
    return rescue.Returned()


async def _expire(conn: AsyncConnection) -> int:
    """A transaction per page, until nothing is left."""
    total = 0
    for page in (expire.expire_commands, expire.expire_batch):
        while True:
            canceled = await _try(conn, page())
            if canceled is None:
                break
            total += canceled
    return total


async def _cancel_stragglers(conn: AsyncConnection) -> int:
    """A transaction per page, until nothing is left."""
    total = 0
    while True:
        canceled = await _try(conn, cancel.cancel_stragglers())
        if not canceled:
            return total
        total += canceled


async def _try(conn: AsyncConnection, plan: Plan[T]) -> T | None:
    """Carry out a part of the sweep in a transaction of its own; None if somebody holds a row that it needs.

    That may be a transaction of the application, which stays open for as long as it likes. The next sweep tries again.
    """
    try:
        async with conn.transaction():
            return await perform_async(conn, hurried(plan, PATIENCE))
    except LockNotAvailable:
        return None
