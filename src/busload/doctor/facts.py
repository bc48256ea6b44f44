"""The facts behind a diagnosis, read in few statements; what cannot be read is skipped, and the rest goes on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

import msgspec
import psycopg

from busload.doctor.finding import Skipped
from busload.health.health import Condition
from busload.postgres.connection import LOCAL_SAFE_SEARCH_PATH
from busload.postgres.grants import RIGHTS, Right, Role, needs
from busload.postgres.plan import Plan, Savepoint, Script, execute, many
from busload.postgres.statements import statements
from busload.settings import DoctorSettings

SQL = statements(__name__)
T = TypeVar("T")

BEGIN = b"SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY; SET LOCAL client_encoding = 'UTF8'"
"""Of a database without an encoding, text would come as bytes."""
GENTLE = f"SET LOCAL statement_timeout = '3s'; SET LOCAL lock_timeout = '300ms'; {LOCAL_SAFE_SEARCH_PATH}".encode()
"""The queue comes first: the doctor gives up what takes too long."""

SETTINGS = (
    "autovacuum",
    "autovacuum_freeze_max_age",
    "data_directory",
    "default_transaction_isolation",
    "default_transaction_read_only",
    "fsync",
    "full_page_writes",
    "idle_in_transaction_session_timeout",
    "idle_session_timeout",
    "max_connections",
    "reserved_connections",
    "server_encoding",
    "session_replication_role",
    "statement_timeout",
    "superuser_reserved_connections",
    "synchronous_commit",
    "TimeZone",
    "track_counts",
    "transaction_timeout",
)
WRITES = ("INSERT", "UPDATE", "DELETE")
ASKED = tuple(
    {right for role in Role for right in needs(role)}
    | {Right(each, one) for each in RIGHTS if each != "load_number" for one in WRITES}
)
MOST = 1000
"""Rows of a place that are looked at."""


@dataclass(frozen=True, slots=True)
class Setting:
    value: str
    source: str
    """Where it comes from: `default`, `configuration file`, `database`, `user`, `database user`, `client`, …"""
    context: str = "user"
    """Who can change it: `postmaster`, `sighup`, `user`, …"""


@dataclass(frozen=True, slots=True)
class Server:
    version: int
    in_recovery: bool
    now: datetime
    role: str
    is_superuser: bool
    by_network: bool
    database: str
    backend_pid: int
    sees_all: bool
    """Whether this role may see the sessions of others."""
    notify_queue: float
    """How full the queue of notifications is, from 0 to 1."""
    frozen_age: int
    """How many transactions old the oldest row of the database is that was not frozen."""


@dataclass(frozen=True, slots=True)
class Connections:
    total: int
    of_busload: int
    idlest: tuple[str, int] | None
    """The application with most idle sessions, and how many."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Whoever holds a snapshot: a `session`, a `prepared` transaction, a `slot` or a `standby`."""

    kind: str
    name: str
    application: str | None
    role: str | None
    state: str | None
    since: datetime | None
    query_start: datetime | None
    bytes: int | None


@dataclass(frozen=True, slots=True)
class LockWait:
    pid: int
    application: str | None
    since: datetime
    holder: int | None
    holder_application: str | None
    holder_state: str | None
    holder_since: datetime | None


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    unlogged: bool
    row_security: bool
    not_vacuumed: bool
    dead: int
    live: int
    vacuumed_at: datetime | None


@dataclass(frozen=True, slots=True)
class Found:
    """An index, a trigger, a function, the schema, a role for it, or a right, as the database has it."""

    kind: str
    name: str
    table: str
    usable: bool


@dataclass(frozen=True, slots=True)
class AliveWorker:
    name: str
    seen_at: datetime
    clock: float | None
    version: str | None


@dataclass(frozen=True, slots=True)
class Still:
    """Something that stands still: its code, what it is about, how many, and since when."""

    code: str
    subject: str
    count: int
    since: datetime
    domain: str | None


@dataclass(frozen=True, slots=True)
class Disk:
    path: str
    free: int
    total: int


@dataclass(slots=True)
class Facts:
    """What could be read; the rest is None, and among `skipped`."""

    settings: Mapping[str, Setting] | None = None
    server: Server | None = None
    connections: Connections | None = None
    holders: list[Holder] | None = None
    locks: list[LockWait] | None = None
    tables: list[Table] | None = None
    objects: list[Found] | None = None
    migrations: list[tuple[int, str]] | None = None
    workers: list[AliveWorker] | None = None
    still: list[Still] | None = None
    oldest_end: datetime | None = None
    clock_ahead: float | None = None
    """Seconds that the clock of this machine is ahead of the server's, as far as that can be told."""
    pooled: bool = False
    heard: bool | None = None
    """Whether a notification came round; None if that was not tried."""
    disk: Disk | None = None
    skipped: list[Skipped] = field(default_factory=list)

    @property
    def has_schema(self) -> bool:
        return any(each.kind == "schema" for each in self.objects or ())

    @property
    def rights(self) -> dict[Right, bool]:
        """Whether this login has each right that a role needs, and each right to write."""
        found = (each for each in self.objects or () if each.kind == "right")
        return {Right(each.table, *each.name.split()): each.usable for each in found}


def read(thresholds: DoctorSettings) -> Plan[Facts]:
    """Read all facts; needs a transaction of its own."""
    facts = Facts()
    yield Script(BEGIN)
    # Before our own time limits hide those of the role.
    settings = yield from _unless_refused(facts, "settings", many(_setting, SQL.settings, names=list(SETTINGS)))
    facts.settings = None if settings is None else dict(settings)
    yield Script(GENTLE)
    asked_at = time.time()
    servers = yield from _unless_refused(facts, "connection", many(Server, SQL.server))
    if servers:
        facts.server = servers[0]
        facts.clock_ahead = _ahead(asked_at, facts.server.now.timestamp(), time.time())
    counted = yield from _unless_refused(facts, "connections", many(_connections, SQL.connections))
    facts.connections = counted[0] if counted else None
    snapshots = many(
        Holder,
        SQL.snapshots,
        transaction_after=thresholds.transaction_after,
        slot_bytes=thresholds.slot_bytes,
        standby_age=thresholds.standby_age,
    )
    facts.holders = yield from _unless_refused(facts, "snapshots", snapshots)
    waits = many(LockWait, SQL.locks, lock_after=thresholds.lock_after)
    facts.locks = yield from _unless_refused(facts, "locks", waits)
    facts.tables = yield from _unless_refused(facts, "vacuum", many(Table, SQL.tables))
    relations, privileges, columns = zip(*ASKED, strict=True)
    asked = {"relations": list(relations), "privileges": list(privileges), "columns": list(columns)}
    facts.objects = yield from _unless_refused(facts, "schema", many(Found, SQL.objects, **asked))
    if facts.has_schema:
        yield from _read_ours(facts, thresholds)
    return facts


def _read_ours(facts: Facts, thresholds: DoctorSettings) -> Plan[None]:
    """What our own tables tell. Where a table is missing or may not be read, that is skipped."""
    migrations = yield from _unless_refused(facts, "schema", execute(SQL.migrations))
    facts.migrations = None if migrations is None else [(version, name) for version, name in migrations]
    facts.workers = yield from _unless_refused(facts, "workers", many(_worker, SQL.workers))
    limits = {"overdue": thresholds.overdue, "waits_after": thresholds.waits_after, "most": MOST}
    work = many(Still, SQL.work, **limits, troubles=thresholds.troubleshooting)
    found = yield from _unless_refused(facts, "work", work)
    left = yield from _unless_refused(facts, "work", many(Still, SQL.unfinished, **limits))
    known = [part for part in (found, left) if part is not None]
    facts.still = [one for part in known for one in part] if known else None
    history = yield from _unless_refused(facts, "retention", execute(SQL.history))
    facts.oldest_end = history[0][0] if history else None


def _unless_refused(facts: Facts, check: str, plan: Plan[T]) -> Plan[T | None]:
    """The answer of a plan; None if the database refuses it, which is noted, once for each check."""
    try:
        answer: T = yield Savepoint(plan)
    except psycopg.Error as error:
        if not any(one.check == check for one in facts.skipped):
            facts.skipped.append(Skipped(check, error.diag.message_primary or " ".join(str(error).split())))
        return None
    return answer


def _ahead(asked: float, server: float, answered: float) -> float:
    """By how much our clock is ahead at least: the server has looked at its own at some time in between."""
    if asked <= server <= answered:
        return 0.0
    return asked - server if asked > server else answered - server


def _setting(name: str, value: str, source: str, context: str) -> tuple[str, Setting]:
    return name, Setting(value, source, context)


def _connections(total: int, of_busload: int, idlest: str | None) -> Connections:
    application, idle = msgspec.json.decode(idlest) if idlest else ("", 0)
    return Connections(total, of_busload, (application, idle) if idle else None)


def _worker(name: str, seen_at: datetime, condition: Any, version: str | None) -> AliveWorker:
    try:
        clock = msgspec.convert(condition or {}, Condition).clock
    except msgspec.ValidationError:  # of another release
        clock = None
    return AliveWorker(name, seen_at, clock, version)
