"""Jobs: batches that run one after the other, stage by stage."""

from busload.jobs.api import FinishedStage
from busload.jobs.job import JobMetadata, JobStatus, StageMetadata, StageStatus

__all__ = ["FinishedStage", "JobMetadata", "JobStatus", "StageMetadata", "StageStatus"]
