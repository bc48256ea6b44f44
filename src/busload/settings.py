"""Every default of busload, and what a setting may be. The environment is read here and only here."""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

VARIABLES = {
    "BUSLOAD_DATABASE_URL": "the PostgreSQL to use; without it an embedded one starts",
    "BUSLOAD_HOME": "where the embedded PostgreSQL keeps its data; default `~/.local/share/busload`",
    "BUSLOAD_PG_BIN": "the folder with `postgres` and `initdb` to use for the embedded server",
    "BUSLOAD_SERVER_HOME": "as root: for what the server's user cannot reach otherwise; default `/var/lib/busload`",
    "BUSLOAD_TRANSPORT_URL": "the broker to publish to, with its credentials; without it PostgreSQL delivers",
    "BUSLOAD_MESSAGE_KEY": "a secret that messages are signed with; messages without its signature are refused",
    "BUSLOAD_QUEUE_PREFIX": "the first part of queues' names at the broker; default `busload`",
    "BUSLOAD_DASHBOARD_USERS": "who may use the dashboard: `name:role:hash` entries of `busload dashboard user`",
    "BUSLOAD_TEST_DATABASE_URL": "the server on which the fixtures of pytest make databases; else an embedded one",
    "BUSLOAD_QUEUES": "queues at the broker that exist, by domain: `tiles=sb-tasks,mail=sb-mail`",
}
HOME = Path("~/.local/share/busload")
SERVER_HOME = Path("/var/lib/busload")
LONGEST = timedelta(days=36525)
"""The longest time that an age, a window or a wait may have: a century, so that no date overflows."""
LONGEST_FLUSH_EVERY = timedelta(seconds=5)
"""How long a result may wait for others at most: counters are as late as that."""

_MAY_BE_ZERO = ("grace", "lock_timeout", "no_handler_pause", "pool_timeout", "prefetch", "wait_for_database")


@dataclass(frozen=True, slots=True)
class PayloadLimits:
    """What a payload may measure: bytes of its JSON text, nested containers, digits of one integer.

    The ceilings protect a promise: CPython can write text beyond them, but it cannot read that text back.
    """

    data_bytes: int = 1024 * 1024
    depth: int = 64
    integer_digits: int = 4300

    def __post_init__(self) -> None:
        for name, ceiling in (("data_bytes", 16 * 1024 * 1024), ("depth", 500), ("integer_digits", 4300)):
            if not 1 <= getattr(self, name) <= ceiling:
                raise ValueError(f"{name} is {getattr(self, name)}; choose between 1 and {ceiling}.")


@dataclass(frozen=True, slots=True)
class InputLimits:
    """What the parts of a command may measure."""

    payload: PayloadLimits = PayloadLimits()
    name_bytes: int = 255
    task_key_bytes: int = 512
    headers_bytes: int = 8192
    other_database: Callable[[str], str | None] | None = field(default=None, repr=False, compare=False)
    """Of a bus over several databases: names the database in which a domain lives, if that is not the own one."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """How a worker paces itself. Times are the database's, never the worker's own clock.

    A value that cannot work is refused with a `ValueError` that names it.
    """

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
    wait_for_turn: timedelta = timedelta(seconds=5)
    recheck_table_after: timedelta = timedelta(minutes=1)
    keep_for: timedelta | None = None
    archive: bool = False
    broker_poll_every: timedelta = timedelta(seconds=5)
    recover_every: timedelta = timedelta(minutes=5)
    publish_again_after: timedelta = timedelta(minutes=5)

    @property
    def most_threads(self) -> int:
        """How many `def` handlers run at a time: `threads`, or as many as `ThreadPoolExecutor` would have."""
        return min(32, (os.cpu_count() or 1) + 4) if self.threads is None else self.threads

    @property
    def deadline(self) -> timedelta:
        """How long one settlement may take: `flush_deadline`, or a quarter of the lease, at most five seconds."""
        return self.flush_deadline or min(self.lease_for / 4, timedelta(seconds=5))

    def __post_init__(self) -> None:
        _check_counts(concurrency=self.concurrency, threads=self.most_threads, flush_size=self.flush_size)
        _check_times(self)
        if self.flush_every > LONGEST_FLUSH_EVERY:
            raise ValueError(
                f"flush_every must be at most {LONGEST_FLUSH_EVERY.total_seconds():g} seconds, found "
                f"{self.flush_every}: counters would be that late. For fewer and larger flushes, raise flush_size."
            )
        if self.prefetch > self.lease_for / 4:
            raise ValueError(
                f"prefetch ({self.prefetch}) must be from zero to a quarter of the lease ({self.lease_for}): "
                "what a worker holds ahead must run before its lease ends. Choose a longer lease_for or a shorter "
                "prefetch."
            )
        if self.keep_for is not None and self.keep_for > LONGEST:
            raise ValueError(f"keep_for must be at most {LONGEST.days} days, found {self.keep_for}; None is for ever.")
        if not isinstance(self.archive, bool):
            raise ValueError(f"archive must be True or False, found {self.archive!r:.80}.")
        if self.settle not in ("coalesced", "immediate"):
            raise ValueError(f"settle must be 'coalesced' or 'immediate', found {self.settle!r:.80}.")
        if self.lease_for < 4 * self.deadline:
            raise ValueError(
                f"A lease ({self.lease_for}) must last four flush deadlines ({self.deadline}): "
                "results would come too late otherwise. Choose a longer lease_for or a shorter flush_deadline."
            )


def _check_counts(**counts: object) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number from 1 on, found {value!r:.80}.")


def _check_times(settings: WorkerSettings | HealthSettings | DoctorSettings | Settings) -> None:
    for each in fields(settings):  # the annotation says what is a time, and which time may be None
        if "timedelta" in str(each.type):
            _check_time(each.name, getattr(settings, each.name), optional="None" in str(each.type))


def _check_time(name: str, value: object, *, optional: bool) -> None:
    if value is None and optional:
        return
    if not isinstance(value, timedelta):
        instead = f"; pass timedelta(seconds={value:.15g})" if type(value) in (int, float) else ""
        raise ValueError(f"{name} must be a timedelta, found {value!r:.80}{instead}.")
    if name in _MAY_BE_ZERO and value < timedelta(0):
        raise ValueError(f"{name} must be at least zero, found {value}.")
    if name not in _MAY_BE_ZERO and value <= timedelta(0):
        raise ValueError(f"{name} must be more than zero, found {value}.")


def from_environment(name: str) -> str | None:
    """The text of one of our `VARIABLES`; None if it is not set."""
    return os.environ.get(name)


def server_home() -> Path:
    """Where root keeps what the embedded server's own user must be able to reach."""
    return _path_from_environment("BUSLOAD_SERVER_HOME") or SERVER_HOME


def _path_from_environment(name: str) -> Path | None:
    value = from_environment(name)
    return Path(value).expanduser() if value else None


def _queues_from_environment(name: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in (from_environment(name) or "").split(",") if pair.strip()]
    queues = {domain.strip(): queue.strip() for domain, _, queue in pairs}
    if len(queues) < len(pairs) or not all(equals for _, equals, _ in pairs):
        wanted = "domain=queue pairs with commas between them, each domain once"
        raise ValueError(f"{name} must be {wanted}, found {from_environment(name)!r:.80}.")
    return queues


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """From when on something is wrong, for `bus.health()` and the probes of a worker.

    A value that cannot work is refused with a `ValueError` that names it.
    """

    late_after: timedelta = timedelta(hours=1)
    """Ready commands of a domain that is served are late from this age on."""
    critical_after: timedelta = timedelta(minutes=5)
    """If no worker serves ready commands, nobody fires a schedule, or commands cannot be published, that is CRITICAL
    from this time on."""
    failures_in_row: int = 10
    """A worker is DEGRADED when so many attempts in a row have failed."""
    stuck_threads: int = 3
    """A worker is CRITICAL when so many of its threads are stuck."""
    stuck_after: timedelta = timedelta(seconds=5)
    """A thread is stuck if its handler still runs so long after its timeout."""
    pool_exhaustions: int = 5
    """CRITICAL when a wait for a connection was in vain so many times."""
    look_back: timedelta = timedelta(minutes=10)
    """Failures and vain waits longer ago than this do not count."""

    def __post_init__(self) -> None:
        _check_counts(
            failures_in_row=self.failures_in_row,
            stuck_threads=self.stuck_threads,
            pool_exhaustions=self.pool_exhaustions,
        )
        _check_times(self)


@dataclass(frozen=True, slots=True)
class DoctorSettings:
    """From when on `bus.doctor()` calls something a fault.

    A value that cannot work is refused with a `ValueError` that names it.
    """

    transaction_after: timedelta = timedelta(minutes=5)
    """A transaction is old from this age on."""
    lock_after: timedelta = timedelta(seconds=30)
    """How long a session may wait for a lock."""
    overdue: timedelta = timedelta(minutes=1)
    """How long due commands, the outbox, leases and cancels may wait for a worker."""
    waits_after: timedelta = timedelta(days=1)
    """How long a hold, a pause, an open batch or a command in troubleshooting may last."""
    troubleshooting: int = 10_000
    """So many commands of a domain in troubleshooting are too many."""
    keep_for: timedelta = timedelta(days=90)
    """What ended longer ago should have been removed."""
    clock_difference: timedelta = timedelta(seconds=5)
    """How much clocks may differ."""
    connections_share: float = 0.8
    """The share of the server's connections that may be in use."""
    dead_rows: int = 100_000
    """So many dead rows of a table are too many, if they are more than the live ones."""
    slot_bytes: int = 1024**3
    """So many bytes of WAL a replication slot may hold that nobody reads."""
    standby_age: int = 10_000_000
    """So many transactions old a snapshot of a standby may be."""
    notify_within: timedelta = timedelta(seconds=2)
    """How long a notification may take to come round."""

    def __post_init__(self) -> None:
        _check_counts(
            troubleshooting=self.troubleshooting,
            dead_rows=self.dead_rows,
            slot_bytes=self.slot_bytes,
            standby_age=self.standby_age,
        )
        _check_times(self)
        if not 0 < self.connections_share <= 1:
            raise ValueError(f"connections_share must be more than 0 and at most 1, found {self.connections_share!r}.")


@dataclass(frozen=True, slots=True)
class Settings:
    """Where the database is, what inputs may measure, and how often to look where a notification may have been lost.

    What is not given comes from the environment, as `VARIABLES` says. A `BUSLOAD_*` variable that is not ours is most
    likely misspelt, so a warning names it. A value that cannot work is refused with a `ValueError` that names it.
    """

    database_url: str | None = field(default_factory=lambda: from_environment("BUSLOAD_DATABASE_URL"), repr=False)
    home: Path = field(default_factory=lambda: _path_from_environment("BUSLOAD_HOME") or HOME.expanduser())
    pg_bin: Path | None = field(default_factory=lambda: _path_from_environment("BUSLOAD_PG_BIN"))
    limits: InputLimits = InputLimits()
    pool_size: int = 10
    pool_timeout: timedelta = timedelta(seconds=30)
    response_timeout: timedelta = timedelta(seconds=10)
    lock_timeout: timedelta = timedelta(seconds=30)
    poll_every: timedelta = timedelta(seconds=1)
    health: HealthSettings = HealthSettings()
    doctor: DoctorSettings = DoctorSettings()
    transport_url: str | None = field(default_factory=lambda: from_environment("BUSLOAD_TRANSPORT_URL"), repr=False)
    dispatch: Literal["two_phase", "checkpoint", "optimistic", "relay"] | None = None
    queue_prefix: str = field(default_factory=lambda: from_environment("BUSLOAD_QUEUE_PREFIX") or "busload")
    queues: Mapping[str, str] = field(default_factory=lambda: _queues_from_environment("BUSLOAD_QUEUES"), hash=False)
    envelope_size: int = 100
    message_per_command: bool = False
    message_key: str | None = field(default_factory=lambda: from_environment("BUSLOAD_MESSAGE_KEY"), repr=False)
    tracer_provider: TracerProvider | None = field(default=None, repr=False)
    """Where spans go; None: to the global provider of OpenTelemetry, if the application has set one."""
    meter_provider: MeterProvider | None = field(default=None, repr=False)
    """Where metrics go, likewise."""

    def __post_init__(self) -> None:
        _check_counts(pool_size=self.pool_size)
        _check_times(self)
        kinds = (
            ("home", self.home, Path),
            ("limits", self.limits, InputLimits),
            ("health", self.health, HealthSettings),
            ("doctor", self.doctor, DoctorSettings),
        )
        for name, value, kind in kinds:
            if not isinstance(value, kind):
                raise ValueError(f"{name} must be of type {kind.__name__}, found {value!r:.80}.")
        for name in os.environ:
            if name.startswith("BUSLOAD_") and name not in VARIABLES:
                nearest = difflib.get_close_matches(name, VARIABLES, n=1)
                hint = f"; did you mean {nearest[0]}?" if nearest else f"; known are {', '.join(VARIABLES)}."
                warnings.warn(f"{name} is not a setting of busload{hint}", stacklevel=3)
