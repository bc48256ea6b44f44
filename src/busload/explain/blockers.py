"""What can be in the way of a batch or a command: every code that an explanation may have, and the form of a reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Self


class Blocker(StrEnum):
    """What keeps a batch or a command from being finished, the most urgent first."""

    label: str

    def __new__(cls, code: str, label: str) -> Self:
        blocker = str.__new__(cls, code)
        blocker._value_, blocker.label = code, label
        return blocker

    NOT_SEALED = "NOT_SEALED", "not sealed"
    CANCELING = "CANCELING", "being canceled"
    CANARY = "CANARY", "behind a canary"
    BUDGET = "BUDGET", "held by a failure budget"
    HELD = "HELD", "held"
    PAUSED = "PAUSED", "paused"
    NO_WORKER = "NO_WORKER", "without a worker"
    NOT_CLAIMED = "NOT_CLAIMED", "not claimed"
    NOT_CONFIRMED = "NOT_CONFIRMED", "refused by the broker"
    NOT_PUBLISHED = "NOT_PUBLISHED", "not published"
    BEHIND_UNPUBLISHED = "BEHIND_UNPUBLISHED", "behind a command that is not published"
    IN_TROUBLESHOOTING = "IN_TROUBLESHOOTING", "waiting for a person"
    STEP_ENDED = "STEP_ENDED", "stopped by hand"
    NO_HANDLER = "NO_HANDLER", "without a handler"
    WORKER_LOST = "WORKER_LOST", "held by a lost worker"
    RUNNING_LONG = "RUNNING_LONG", "running long"
    IN_NO_PLACE = "IN_NO_PLACE", "in no place"
    RATE_LIMITED = "RATE_LIMITED", "held up by a rate limit"
    LIMITED = "LIMITED", "waiting for a concurrency limit"
    BACKOFF = "BACKOFF", "waiting for the next attempt"
    RUN_AT = "RUN_AT", "waiting for their time"
    BEHIND_PRIORITY = "BEHIND_PRIORITY", "behind higher priority"
    OLD_SNAPSHOT = "OLD_SNAPSHOT", "claimed slowly because of a held snapshot"
    CALLBACK_FAILING = "CALLBACK_FAILING", "callback failing"
    CALLBACK_WAITING = "CALLBACK_WAITING", "callback waiting"


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that is in the way: of how many commands, since when, and what to do about it."""

    code: Blocker
    count: int
    since: datetime | None
    message: str
    advice: str
    details: dict[str, Any] = field(default_factory=dict)
