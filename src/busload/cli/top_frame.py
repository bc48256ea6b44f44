"""What `busload top` shows at one moment, and the thread that reads it again and again."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from typing import Any

import psycopg

from busload.batches.batch import BatchMetadata, BatchStatus
from busload.errors import BusloadError, DatabaseUnavailableError
from busload.health.health import Health
from busload.health.overview import Overview, Rates
from busload.health.workers import KnownWorker
from busload.sync.bus import SyncCommandBus
from busload.troubleshooting.causes import CauseGroup

MOST = 50
"""Batches, causes and workers that are read."""
REST = 9.0
"""Between two looks is at least so many times the time that a look has taken: looking must not hurt the queue."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause for which commands of a domain wait for a person."""

    domain: str
    group: CauseGroup

    @property
    def key(self) -> tuple[str, str]:
        return self.domain, self.group.fingerprint


@dataclass(frozen=True, slots=True)
class Frame:
    """The bus at one moment."""

    overview: Overview
    health: Health
    rates: tuple[float, float] | None
    """Commands sent and attempts ended per second; None if nobody looked before."""
    batches: tuple[BatchMetadata, ...]
    """Those under way, newest first."""
    causes: tuple[Cause, ...]
    """The largest first."""
    workers: tuple[KnownWorker, ...]

    @property
    def at(self) -> datetime:
        return self.overview.at

    def as_json(self) -> dict[str, Any]:
        """What programs get."""
        now = self.overview
        sent, ended = self.rates or (None, None)
        places = ("ready", "scheduled", "running", "in_troubleshooting", "unpublished")
        oldest = ("oldest_ready", "oldest_unpublished", "oldest_in_troubleshooting")
        return {
            "at": now.at,
            "health": self.health,
            "sent_per_second": sent,
            "ended_per_second": ended,
            **{name: getattr(now, name) for name in (*places, *oldest, "workers", "silent_workers", "slots")},
            "domains": now.domains,
            "batches": self.batches,
            "causes": [{"domain": cause.domain, **asdict(cause.group)} for cause in self.causes],
            "known_workers": self.workers,
        }


class Looks:
    """Reads frames. Causes are the dearest to read, so a frame may have those of the one before."""

    def __init__(self, bus: SyncCommandBus) -> None:
        self._bus, self._rates = bus, Rates()
        self._causes: tuple[Cause, ...] = ()
        self._causes_from = 0.0

    def look(self) -> Frame:
        bus = self._bus
        overview = bus.overview()
        under_way = (BatchStatus.IN_PROGRESS, BatchStatus.PENDING)
        batches = [
            batch for status in under_way for batch in bus.list_batches(None, status=status, limit=MOST, forecast=True)
        ]
        batches.sort(key=lambda batch: batch.created_at, reverse=True)
        workers = bus.workers.list(limit=MOST)
        return Frame(
            overview,
            bus.health(timeout=4),
            self._rates.of(overview),
            tuple(batches[:MOST]),
            self._read_causes(overview),
            tuple(worker for worker in workers if worker.concurrency > 0),  # a tracker runs nothing
        )

    def forget_causes(self) -> None:
        """Read them with the next frame."""
        self._causes_from = 0.0

    def _read_causes(self, overview: Overview) -> tuple[Cause, ...]:
        began = time.monotonic()
        if began < self._causes_from:
            return self._causes
        found = [
            Cause(each.domain, group)
            for each in overview.domains
            if each.in_troubleshooting
            for group in self._bus.troubleshooting.groups(each.domain, limit=MOST)
        ]
        found.sort(key=lambda cause: (-cause.group.count, cause.key))
        self._causes = tuple(found[:MOST])
        now = time.monotonic()
        self._causes_from = now + REST * (now - began)
        return self._causes


class Reader:
    """A thread that looks at the database every so often, and does there what a person asks for.

    The person's terminal never waits for the database.
    """

    def __init__(self, bus: SyncCommandBus, every: float, changed: Callable[[], None]) -> None:
        self._looks, self._every, self._changed = Looks(bus), every, changed
        self._asked: queue.SimpleQueue[Callable[[], Callable[[], None]] | None] = queue.SimpleQueue()
        self.frame: Frame | None = None
        self.trouble: str | None = None
        """Why the frame stands still; None if it does not."""
        self._thread = threading.Thread(target=self._run, name="busload-top", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask(self, work: Callable[[], str], done: Callable[[str], None]) -> None:
        """Let the thread do something, and look. Then hand what it says, or what went wrong, to `done`.

        Whoever reads that a domain is paused and presses the key again must mean the paused one.
        """

        def do() -> Callable[[], None]:
            try:
                said = work()
            except Exception as error:
                said = f"Not done. {in_words(error)}"
            self._looks.forget_causes()
            return partial(done, said)

        self._asked.put(do)

    def stop(self, seconds: float) -> None:
        """End the thread. One that waits for a database that does not answer is left behind."""
        self._asked.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        due = 0.0
        while True:
            tell: Callable[[], None] | None = None
            try:
                work = self._asked.get(timeout=max(due - time.monotonic(), 0.001))
                if work is None:
                    return
                tell = work()
            except queue.Empty:
                pass
            began = time.monotonic()
            try:
                self.frame, self.trouble = self._looks.look(), None
            except Exception as error:
                self.trouble = in_words(error)
            now = time.monotonic()
            due = now + max(self._every - (now - began), REST * (now - began) if self.trouble is None else 0.0)
            if tell is not None:
                tell()
            self._changed()


def in_words(error: Exception) -> str:
    """What went wrong, in one line."""
    said = " ".join(str(error).split())
    if isinstance(error, DatabaseUnavailableError | psycopg.OperationalError | OSError):
        return f"The database is away: {said}"
    return said if isinstance(error, BusloadError) and said else f"{type(error).__name__}: {said}"
