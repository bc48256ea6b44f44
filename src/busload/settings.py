"""Every default of busload. The environment is read here and only here.

| variable | meaning |
|---|---|
| `BUSLOAD_DATABASE_URL` | the PostgreSQL to use; without it an embedded one starts |
| `BUSLOAD_HOME` | where the embedded PostgreSQL keeps its data; default `~/.local/share/busload` |
| `BUSLOAD_TRANSPORT_URL` | the broker that announces commands, with its credentials; without it PostgreSQL delivers |
| `BUSLOAD_MESSAGE_KEY` | a secret that messages are signed with; those without its signature are refused |
| `BUSLOAD_QUEUE_PREFIX` | the first part of queues' names at the broker; default `busload` |
| `BUSLOAD_PG_BIN` | the folder with `postgres` and `initdb` to use for the embedded server |
| `BUSLOAD_SERVER_HOME` | as root: for what the server's user cannot reach otherwise; default `/var/lib/busload` |
"""

from __future__ import annotations

import difflib
import os
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal

from busload.domain.command import InputLimits

VARIABLES = (
    "BUSLOAD_DATABASE_URL",
    "BUSLOAD_HOME",
    "BUSLOAD_PG_BIN",
    "BUSLOAD_SERVER_HOME",
    "BUSLOAD_TRANSPORT_URL",
    "BUSLOAD_MESSAGE_KEY",
    "BUSLOAD_QUEUE_PREFIX",
)
HOME = Path("~/.local/share/busload")
SERVER_HOME = Path("/var/lib/busload")


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """How a worker paces itself. Times are the database's, never the worker's own clock."""

    concurrency: int = 100
    threads: int | None = None
    lease_for: timedelta = timedelta(seconds=30)
    poll_every: timedelta = timedelta(seconds=1)
    sweep_every: timedelta = timedelta(seconds=5)
    grace: timedelta = timedelta(seconds=30)
    wait_for_database: timedelta | None = timedelta(minutes=5)
    flush_size: int = 1000
    flush_every: timedelta = timedelta(milliseconds=100)
    flush_deadline: timedelta | None = None
    settle: Literal["coalesced", "immediate"] = "coalesced"
    prefetch: timedelta = timedelta(milliseconds=50)
    no_handler_pause: timedelta = timedelta(seconds=30)
    keep_for: timedelta | None = None
    archive: bool = False
    broker_poll_every: timedelta = timedelta(seconds=5)
    recover_every: timedelta = timedelta(minutes=5)
    ring_again_after: timedelta = timedelta(minutes=5)

    @property
    def most_threads(self) -> int:
        """How many `def` handlers run at a time: `threads`, or as many as `ThreadPoolExecutor` would have."""
        return min(32, (os.cpu_count() or 1) + 4) if self.threads is None else self.threads

    @property
    def deadline(self) -> timedelta:
        """How long one settlement may take: `flush_deadline`, or a quarter of the lease, at most five seconds."""
        return self.flush_deadline or min(self.lease_for / 4, timedelta(seconds=5))


def _from_environment(name: str) -> str | None:
    return os.environ.get(name) or None


def _path_from_environment(name: str) -> Path | None:
    value = _from_environment(name)
    return Path(value).expanduser() if value else None


def server_home() -> Path:
    """Where root keeps what the embedded server's own user must be able to reach."""
    return _path_from_environment("BUSLOAD_SERVER_HOME") or SERVER_HOME


@dataclass(frozen=True, slots=True)
class Settings:
    """Where the database is, what inputs may measure, and how often to look where a notification may have been lost.

    What is not given comes from the environment. A `BUSLOAD_*` variable that is not ours is most likely a misspelt one,
    so it is warned about.
    """

    database_url: str | None = field(default_factory=lambda: os.environ.get("BUSLOAD_DATABASE_URL"), repr=False)
    home: Path = field(default_factory=lambda: _path_from_environment("BUSLOAD_HOME") or HOME.expanduser())
    pg_bin: Path | None = field(default_factory=lambda: _path_from_environment("BUSLOAD_PG_BIN"))
    limits: InputLimits = InputLimits()
    pool_size: int = 10
    pool_timeout: timedelta = timedelta(seconds=30)
    response_timeout: timedelta = timedelta(seconds=10)
    lock_timeout: timedelta = timedelta(seconds=30)
    poll_every: timedelta = timedelta(seconds=1)
    transport_url: str | None = field(default_factory=lambda: os.environ.get("BUSLOAD_TRANSPORT_URL"), repr=False)
    dispatch: Literal["two_phase", "checkpoint", "optimistic", "relay"] | None = None
    queue_prefix: str = field(default_factory=lambda: _from_environment("BUSLOAD_QUEUE_PREFIX") or "busload")
    envelope_size: int = 100
    message_per_command: bool = False
    message_key: str | None = field(default_factory=lambda: os.environ.get("BUSLOAD_MESSAGE_KEY"), repr=False)

    def __post_init__(self) -> None:
        for name in os.environ:
            if name.startswith("BUSLOAD_") and name not in VARIABLES:
                nearest = difflib.get_close_matches(name, VARIABLES, n=1)
                hint = f"; did you mean {nearest[0]}?" if nearest else f"; known are {', '.join(VARIABLES)}."
                warnings.warn(f"{name} is not a setting of busload{hint}", stacklevel=3)
