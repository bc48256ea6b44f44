"""What a batch tells about itself."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from datetime import UTC, datetime
from uuid import uuid4

import pytest

from busload import BatchMetadata, BatchStatus

BATCH = BatchMetadata(
    uuid4(), "payments", "payroll", None, BatchStatus.PENDING, 10, 4, 2, 1, 3, datetime.now(UTC), None, None
)


def test_a_batch_has_the_thirteen_fields_that_were_promised_its_place_in_a_job_and_what_holds_it() -> None:
    assert [field.name for field in fields(BatchMetadata)] == [
        "batch_id",
        "domain",
        "name",
        "custom_data",
        "status",
        "total_count",
        "completed_count",
        "failed_count",
        "canceled_count",
        "in_troubleshooting_count",
        "created_at",
        "started_at",
        "completed_at",
        "job_id",
        "stage",
        "expires_at",
        "held_at",
        "held_reason",
        "held_by",
        "held_note",
        "canary_count",
        "canary_until",
        "canary_ended_at",
        "failure_budget",
        "failure_budget_used",
        "fair_by",
        "headers",
        "batch_type",
        "callback_id",
        "callback_type",
        "forecast",
    ]


def test_what_is_in_troubleshooting_has_not_ended() -> None:
    assert (BATCH.finished_count, BATCH.remaining_count) == (7, 3)


def test_a_status_equals_its_word() -> None:
    words = ["PENDING", "IN_PROGRESS", "COMPLETED", "COMPLETED_WITH_FAILURES"]
    assert list(BatchStatus) == words
    assert [BatchStatus(word).final for word in words] == [False, False, True, True]
    assert f"{BatchStatus.PENDING}" == "PENDING"


def test_the_metadata_of_a_batch_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        BATCH.completed_count = 5  # type: ignore[misc]
    assert replace(BATCH, completed_count=5) != BATCH
