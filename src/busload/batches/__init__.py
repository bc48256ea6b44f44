"""Batches and jobs: created at once, filled over time, canceled, awaited."""

from busload.batches.batch import BatchCompletionCallback
from busload.batches.job import JobMetadata, JobStatus, StageMetadata, StageStatus
from busload.batches.job_control import FinishedStage
from busload.batches.open_batch import OpenBatch

__all__ = [
    "BatchCompletionCallback",
    "FinishedStage",
    "JobMetadata",
    "JobStatus",
    "OpenBatch",
    "StageMetadata",
    "StageStatus",
]
