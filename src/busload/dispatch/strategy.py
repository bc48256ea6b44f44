"""The ways to publish a batch to a broker, and the report on how that went."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Literal
from uuid import UUID

from busload.commands.ids import JobId

DispatchName = Literal["two_phase", "checkpoint", "optimistic", "relay"]
"""How a batch may be published: the name of a `Strategy`."""


class Strategy(StrEnum):
    """How a batch reaches the broker."""

    TWO_PHASE = "two_phase"
    """Write all commands, publish them, then mark them as published."""
    CHECKPOINT = "checkpoint"
    """Write, publish and mark slice by slice, with a cursor that says where to go on."""
    OPTIMISTIC = "optimistic"
    """Write all commands as ready, then publish them."""
    RELAY = "relay"
    """Write all commands, and leave the broker to the relay of a worker."""


class DispatchStatus(StrEnum):
    """How the creation of a batch went."""

    PENDING = "pending"
    """It is under way, or its process died."""
    SUCCESS = "success"
    SUCCESS_WITH_WARNING = "success_with_warning"
    """All of it was published, and the report's `warning` says what was unusual."""
    PARTIAL_SUCCESS = "partial_success"
    """A part was not published, or not written; the report says how much."""
    FAILED_NEEDS_RECOVERY = "failed_needs_recovery"
    """The strategy was optimistic, and the broker confirmed nothing."""
    RECOVERED = "recovered"
    """It needed help, and all of it was published in the end."""


@dataclass(frozen=True, slots=True)
class DispatchReport:
    """How the creation of a batch went, and what of it is still to be published now. Times are milliseconds."""

    batch_id: UUID
    transport: str
    strategy: Strategy
    status: DispatchStatus
    total_tasks: int | None
    """Commands that the caller gave; None while the end of an iterator is not known."""
    database_tasks: int
    """Commands in the database: all, unless checkpoints are missing."""
    queued_tasks: int
    """Commands that were published, as of now: those that left the outbox, or that the broker has confirmed."""
    retry_needed: bool
    """Whether commands wait for another round, as of now."""
    checkpoints: tuple[str, ...]
    """Checkpoints that the broker has confirmed: `<job>-cp-<n>`, or `<batch>-cp-<n>` of a batch without a job."""
    failed_checkpoint: str | None
    error: str | None
    warning: str | None
    rounds: int
    """Rounds of publishing that have failed."""
    insert_ms: float | None
    send_ms: float | None
    mark_ms: float | None
    total_ms: float | None
    created_at: datetime
    published_at: datetime | None
    job_id: JobId | None = None
    stage: str | int | None = None
    given_up: bool = False
    """Whether the batch was canceled or sealed before all was written: then the rest is never written."""

    @property
    def tasks_committed(self) -> int:
        return self.database_tasks

    @property
    def tasks_failed(self) -> int | None:
        """Commands that are not in the database: repeating the call writes them. None if their number is not known."""
        return None if self.total_tasks is None else self.total_tasks - self.database_tasks

    @property
    def retry_tasks(self) -> int:
        """Commands in the database that are still to be published, as of now."""
        return self.database_tasks - self.queued_tasks

    @property
    def recovery_possible(self) -> bool:
        """Whether something is missing: a relay publishes what is written, and repeating the call writes the rest."""
        return (self.tasks_failed != 0 and not self.given_up) or self.retry_tasks > 0

    @property
    def recovery_scheduled(self) -> bool:
        """Whether a relay has something left to publish. It does so by itself."""
        return self.retry_tasks > 0


def checkpoint_name(of: JobId, checkpoint: int) -> str:
    """The name of a checkpoint `of` a job or, without one, of a batch."""
    return f"{of}-cp-{checkpoint}"
