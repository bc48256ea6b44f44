"""What the doctor says: findings, each with its cure, and the diagnosis that they make together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from busload.health.health import HealthCode, HealthState


class Severity(StrEnum):
    """How bad a finding is: DEGRADED and CRITICAL as in the health, and what is only good to know."""

    NOTICE = "NOTICE"
    DEGRADED = "DEGRADED"
    CRITICAL = "CRITICAL"


class FindingCode(StrEnum):
    """What was found, for programs. What the health tells as well has the code of the health."""

    DATABASE_FULL = "DATABASE_FULL"
    SERVER_TOO_OLD = "SERVER_TOO_OLD"
    ENCODING = "ENCODING"
    IN_RECOVERY = "IN_RECOVERY"
    READ_ONLY = "READ_ONLY"
    FSYNC_OFF = "FSYNC_OFF"
    FULL_PAGE_WRITES_OFF = "FULL_PAGE_WRITES_OFF"
    SYNCHRONOUS_COMMIT_OFF = "SYNCHRONOUS_COMMIT_OFF"
    AUTOVACUUM_OFF = "AUTOVACUUM_OFF"
    TRACK_COUNTS_OFF = "TRACK_COUNTS_OFF"
    TRIGGERS_OFF = "TRIGGERS_OFF"
    TIMEOUT_TOO_SHORT = "TIMEOUT_TOO_SHORT"
    ISOLATION = "ISOLATION"
    TIME_ZONE_UNKNOWN = "TIME_ZONE_UNKNOWN"
    NOTIFICATIONS_LOST = "NOTIFICATIONS_LOST"
    NOTIFICATIONS_PILE_UP = "NOTIFICATIONS_PILE_UP"
    CONNECTIONS_SCARCE = "CONNECTIONS_SCARCE"
    CONNECTIONS_TOO_FEW = "CONNECTIONS_TOO_FEW"
    CLOCK_DIFFERS = "CLOCK_DIFFERS"
    WORKER_CLOCK_DIFFERS = "WORKER_CLOCK_DIFFERS"
    OLD_TRANSACTION = "OLD_TRANSACTION"
    PREPARED_TRANSACTION = "PREPARED_TRANSACTION"
    SLOT_LEFT = "SLOT_LEFT"
    STANDBY_HOLDS_SNAPSHOT = "STANDBY_HOLDS_SNAPSHOT"
    LOCK_WAIT = "LOCK_WAIT"
    DEAD_ROWS = "DEAD_ROWS"
    TABLE_NOT_VACUUMED = "TABLE_NOT_VACUUMED"
    WRAPAROUND = "WRAPAROUND"
    DISK_LOW = "DISK_LOW"
    LITTLE_SEEN = "LITTLE_SEEN"
    SCHEMA_MISSING = "SCHEMA_MISSING"
    SCHEMA_NEWER = "SCHEMA_NEWER"
    SCHEMA_UNRELEASED = "SCHEMA_UNRELEASED"
    TABLE_MISSING = "TABLE_MISSING"
    TABLE_UNLOGGED = "TABLE_UNLOGGED"
    ROW_SECURITY = "ROW_SECURITY"
    INDEX_MISSING = "INDEX_MISSING"
    INDEX_INVALID = "INDEX_INVALID"
    TRIGGER_MISSING = "TRIGGER_MISSING"
    TRIGGER_DISABLED = "TRIGGER_DISABLED"
    FUNCTION_MISSING = "FUNCTION_MISSING"
    PRIVILEGES_MISSING = "PRIVILEGES_MISSING"
    SUPERUSER = "SUPERUSER"
    WORKER_VERSIONS = "WORKER_VERSIONS"
    OUTBOX_WAITS = "OUTBOX_WAITS"
    SCHEDULED_OVERDUE = "SCHEDULED_OVERDUE"
    LEASES_LEFT = "LEASES_LEFT"
    PERMITS_LEFT = "PERMITS_LEFT"
    CANCEL_LEFT = "CANCEL_LEFT"
    BATCH_HELD = "BATCH_HELD"
    BATCH_LEFT_OPEN = "BATCH_LEFT_OPEN"
    BATCHES_STALLED = "BATCHES_STALLED"
    DOMAIN_PAUSED = "DOMAIN_PAUSED"
    SCHEDULE_PAUSED = "SCHEDULE_PAUSED"
    TROUBLESHOOTING_PILES_UP = "TROUBLESHOOTING_PILES_UP"
    HISTORY_GROWS = "HISTORY_GROWS"
    BROKER_REFUSES = "BROKER_REFUSES"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be."""

    code: FindingCode | HealthCode
    severity: Severity
    check: str
    """Which check has found it: `settings`, `schema`, `vacuum`, …"""
    found: str
    why: str
    """Why it matters."""
    cure: str
    """What to do, in a sentence."""
    sql: tuple[str, ...] = ()
    """Statements that do it, for a role that may."""
    run: tuple[str, ...] = ()
    """Lines for a shell that do it."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A check that could not be made, and why."""

    check: str
    why: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings, the worst first, and what was checked."""

    state: HealthState
    """The worst of all findings. A NOTICE leaves it HEALTHY."""
    findings: tuple[Finding, ...] = ()
    checked: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()

    @classmethod
    def of(cls, findings: Iterable[Finding], checked: Sequence[str], skipped: Sequence[Skipped] = ()) -> Diagnosis:
        ordered = sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity))
        state = STATES[ordered[0].severity] if ordered else HealthState.HEALTHY
        left_out = {one.check for one in skipped}
        return cls(state, tuple(ordered), tuple(one for one in checked if one not in left_out), tuple(skipped))


SEVERITIES = tuple(Severity)
STATES = {
    Severity.NOTICE: HealthState.HEALTHY,
    Severity.DEGRADED: HealthState.DEGRADED,
    Severity.CRITICAL: HealthState.CRITICAL,
}
CHECKS = (
    "connection",
    "settings",
    "notifications",
    "connections",
    "clocks",
    "snapshots",
    "locks",
    "vacuum",
    "disk",
    "schema",
    "privileges",
    "workers",
    "work",
    "retention",
    "broker",
)
"""Every check, in the order in which they are told."""
