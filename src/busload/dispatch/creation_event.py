"""The event that tells of each batch that was created, whichever call created it: one line of JSON in the log."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from busload.commands.send import NewBatch

log = logging.getLogger("busload")

EVENT = "BatchTaskCreation"
"""The name under which every creation is logged, with its figures."""


def log_creation(
    batch: NewBatch,
    commands: int,
    *,
    total_ms: float,
    insert_ms: float,
    transport: str | None = None,
    strategy: str | None = None,
    **others: Any,
) -> None:
    """Log that a batch was created with so many commands, and how long that took. Times are milliseconds.

    `others` are what is known of publishing it. Where nobody listens it costs nothing.
    """
    if not log.isEnabledFor(logging.INFO):
        return
    fields = {
        "event": EVENT,
        "job_id": batch.job_id,
        "stage": batch.stage,
        "batch_id": batch.batch_id,
        "domain": batch.domain,
        "way": batch.way,
        "transport": transport,
        "strategy": strategy,
        "batch_size": commands,
        "TaskCount": commands,
        "ElapsedMs": total_ms,
    }
    unpublished = {"status": "success", "retry_needed": False, "send_ms": 0.0, "mark_ms": 0.0}
    costs = {**unpublished, **others, "insert_ms": insert_ms, "total_ms": total_ms}
    log.info("%s", msgspec.json.encode(fields | costs, enc_hook=str).decode())
