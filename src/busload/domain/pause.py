"""A domain that rests, and how much waits in one."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Pause:
    """Nothing new starts in this domain until somebody resumes it; one that is over says when that was, and who did."""

    domain: str
    since: datetime
    operator: str | None
    reason: str | None
    resumed_at: datetime | None = None
    resumed_by: str | None = None


@dataclass(frozen=True, slots=True)
class DomainOverview:
    """What is in a domain's places, in commands, and who serves it."""

    domain: str
    ready: int
    scheduled: int
    running: int
    in_troubleshooting: int
    workers: int
    pause: Pause | None
    unannounced: int = 0
    """Commands that wait in the outbox for a broker."""
