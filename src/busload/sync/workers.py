"""Made from busload.health.workers by scripts/generate_sync.py. Change the source instead."""

from __future__ import annotations

import builtins

from busload.commands.checks import check, given
from busload.commands.wording import counted
from busload.errors import InvalidOperationError
from busload.health.workers import NUMBERS, HeldCommand, KnownWorker, find, log, running, stop, workers
from busload.postgres.write import Write
from busload.settings import Settings
from busload.sync.database import Database


class Workers:
    """The workers of the database, wherever they run."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database, self._limits, self._health = database, settings.limits, settings.health

    def list(
        self, domain: str | None = None, *, stopped_too: bool = False, after: int | None = None, limit: int = 100
    ) -> builtins.list[KnownWorker]:
        """The workers that have not stopped, at most `limit` and newest first; with `stopped_too` all of them.

        With `domain` only those that serve it, and with `after` only those older than the worker of that number.
        """
        check(self._limits, writes=False, **given(domain=domain), limit=limit)
        plan = workers(self._health, domain=domain, stopped_too=stopped_too, after=after, limit=limit)
        return self._database.read(plan)

    def get(self, worker: int) -> KnownWorker | None:
        """The worker of this number; None if there never was one, or if it is long forgotten."""
        return self._database.read(find(self._health, worker)) if worker in NUMBERS else None

    def running(self, worker: int, *, limit: int = 100) -> builtins.list[HeldCommand]:
        """The commands that a worker holds now, at most `limit`, and those first that it has held for longest."""
        check(self._limits, writes=False, limit=limit)
        return self._database.read(running(worker, limit=limit)) if worker in NUMBERS else []

    def stop(self, worker: str | int, *, reason: str | None = None, operator: str | None = None) -> int:
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
        found = self._database.write(Write(stop(worker, reason=reason, operator=operator), one_statement=True))
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
