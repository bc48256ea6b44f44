"""What a batch is, and who is told when it completes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, TypeAlias
from uuid import UUID


class BatchStatus(StrEnum):
    PENDING = "PENDING"
    IN_PROGRESS = "IN_PROGRESS"
    COMPLETED = "COMPLETED"
    COMPLETED_WITH_FAILURES = "COMPLETED_WITH_FAILURES"

    @property
    def final(self) -> bool:
        return self in (BatchStatus.COMPLETED, BatchStatus.COMPLETED_WITH_FAILURES)


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """A batch with its exact counters at one moment."""

    batch_id: UUID
    domain: str
    name: str | None
    custom_data: dict[str, Any] | None
    status: BatchStatus
    total_count: int
    completed_count: int
    failed_count: int
    canceled_count: int
    in_troubleshooting_count: int
    created_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    job_id: UUID | None = None
    stage: str | None = None

    @property
    def finished_count(self) -> int:
        """Commands that have ended: completed, failed or canceled."""
        return self.completed_count + self.failed_count + self.canceled_count

    @property
    def remaining_count(self) -> int:
        """Commands that have not ended; those in troubleshooting are among them."""
        return self.total_count - self.finished_count


BatchCompletionCallback: TypeAlias = Callable[[BatchMetadata], Awaitable[None]]
SyncBatchCompletionCallback: TypeAlias = Callable[[BatchMetadata], None]
