"""A domain that rests, and how much waits in one."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Pause:
    """Nothing new starts in this domain until somebody resumes it."""

    domain: str
    since: datetime
    operator: str | None
    reason: str | None


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
