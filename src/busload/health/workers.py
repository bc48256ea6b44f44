"""`bus.workers`: which workers there are, what each of them runs, and how to ask one to stop."""

from __future__ import annotations

import builtins
import logging
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

from busload.commands.checks import check, given
from busload.commands.wording import counted
from busload.errors import InvalidOperationError
from busload.health.facts import condition_of
from busload.health.health import HealthReason, judge_worker
from busload.postgres.database import Database
from busload.postgres.plan import Plan, execute, many, one
from busload.postgres.statements import statements
from busload.postgres.write import Write
from busload.settings import HealthSettings, Settings

SQL = statements(__name__)

log = logging.getLogger("busload")


@dataclass(frozen=True, slots=True)
class KnownWorker:
    """A worker as the database knows it, and how much it holds."""

    worker: int
    """Its number, which no other worker ever had."""
    name: str
    domains: list[str]
    concurrency: int
    """How many commands it runs at a time; 0 for a tracker, which takes tasks by name."""
    started_at: datetime
    seen_at: datetime
    stopped_at: datetime | None
    state: str
    """ALIVE, STOPPING if it was asked to stop, SILENT for longer than its leases last, STOPPED by itself, or LOST:
    declared dead."""
    leases: int
    commands: int
    version: str | None = None
    """The release of busload that it runs."""
    host: str | None = None
    """The machine or container that it runs on, whatever its name is."""
    process_id: int | None = None
    """By which its host knows its process."""
    stop_requested_at: datetime | None = None
    stop_requested_by: str | None = None
    at: datetime | None = None
    """When the database was asked, by its own clock."""
    reasons: tuple[HealthReason, ...] = ()
    """What is wrong with it, as its last heartbeat has told."""


@dataclass(frozen=True, slots=True)
class HeldCommand:
    """A command that a worker has claimed and not settled: it runs, or is about to."""

    domain: str
    command_id: UUID
    command_type: str
    task_key: str | None
    batch_id: UUID | None
    attempt: int
    since: datetime


class Workers:
    """The workers of the database, wherever they run."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database, self._limits, self._health = database, settings.limits, settings.health

    async def list(
        self, domain: str | None = None, *, stopped_too: bool = False, after: int | None = None, limit: int = 100
    ) -> builtins.list[KnownWorker]:
        """The workers that have not stopped, at most `limit` and newest first; with `stopped_too` all of them.

        With `domain` only those that serve it, and with `after` only those older than the worker of that number.
        """
        check(self._limits, writes=False, **given(domain=domain), limit=limit)
        plan = workers(self._health, domain=domain, stopped_too=stopped_too, after=after, limit=limit)
        return await self._database.read(plan)

    async def get(self, worker: int) -> KnownWorker | None:
        """The worker of this number; None if there never was one, or if it is long forgotten."""
        return await self._database.read(find(self._health, worker)) if worker in NUMBERS else None

    async def running(self, worker: int, *, limit: int = 100) -> builtins.list[HeldCommand]:
        """The commands that a worker holds now, at most `limit`, and those first that it has held for longest."""
        check(self._limits, writes=False, limit=limit)
        return await self._database.read(running(worker, limit=limit)) if worker in NUMBERS else []

    async def stop(self, worker: str | int, *, reason: str | None = None, operator: str | None = None) -> int:
        """Ask a worker to stop, as SIGTERM does, and return how many workers were asked.

        `worker` is a name, or the number of one worker. All that have the name are asked. A worker claims nothing more,
        lets what runs finish within its grace time, settles every result and hands the rest back. It hears of it at
        once, or with its next heartbeat. Whether another one takes its place is up to whatever has started it:
        `busload worker --processes` starts none. Workers that were asked before do not count. A name that no running
        worker has is refused.
        """
        if isinstance(worker, int) and worker not in NUMBERS:
            raise ValueError(f"worker must be a name or a number of a worker, found {worker!r:.80}.")
        check(self._limits, operator=operator, **given(reason=reason))
        found = await self._database.write(Write(stop(worker, reason=reason, operator=operator), one_statement=True))
        if not found:
            raise InvalidOperationError(
                f"No worker {worker!r:.200} runs, so nothing was asked to stop. See those that run with "
                "`busload worker ls`."
            )
        asked = [name for name, is_asked_now in found if is_asked_now]
        if asked:
            by = f" by {operator}" if operator else ""
            log.info("Asked %s to stop%s: %s", counted(len(asked), "worker"), by, ", ".join(asked))
        return len(asked)


NUMBERS = range(1, 2**63)
"""What the number of a worker can be."""


def workers(
    health: HealthSettings, *, domain: str | None, stopped_too: bool, limit: int, after: int | None
) -> Plan[list[KnownWorker]]:
    """The workers, newest first; without `stopped_too` only those that have not stopped."""
    read = partial(_read, health)
    return many(read, SQL.workers, domain=domain, stopped_too=stopped_too, limit=limit, after=after)


def find(health: HealthSettings, worker: int) -> Plan[KnownWorker | None]:
    return one(partial(_read, health), SQL.worker, worker=worker)


def running(worker: int, *, limit: int) -> Plan[list[HeldCommand]]:
    return many(HeldCommand, SQL.running, worker=worker, limit=limit)


def stop(worker: str | int, *, reason: str | None, operator: str | None) -> Plan[list[tuple[str, bool]]]:
    """Ask workers to stop; returns the name of each that runs, and whether it was asked only now."""
    number, name = (worker, None) if isinstance(worker, int) else (None, worker)
    rows = yield from execute(SQL.stop, worker=number, name=name, reason=reason, operator=operator)
    return [(found, is_asked_now) for found, is_asked_now, _ in rows]


def _read(health: HealthSettings, *row: Any) -> KnownWorker:
    *known, condition = row
    worker = KnownWorker(*known)
    if worker.stopped_at is not None or worker.state == "SILENT":
        return worker
    return replace(worker, reasons=tuple(judge_worker(worker.name, condition_of(condition), health)))
