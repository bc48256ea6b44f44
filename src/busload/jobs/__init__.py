"""Jobs: batches that run one after the other, stage by stage."""

from busload.jobs.job import JobMetadata, JobStatus, StageMetadata, StageStatus
from busload.jobs.steps import FinishedStage

__all__ = ["FinishedStage", "JobMetadata", "JobStatus", "StageMetadata", "StageStatus"]
