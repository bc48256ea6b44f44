"""What a job is: stages, one batch each, that run one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

import msgspec

from busload.domain.batch import BatchMetadata
from busload.domain.command import BatchCommand, CommandMetadata, InputLimits, NewCommand, check_name
from busload.errors import PermanentCommandError, Problem

STAGE = "busload.Stage"
"""The type of the command that takes a job on when a stage has ended; every worker has the handler for it."""

PLAN = "busload.Plan."
"""The type of the command that plans a stage begins so, and ends with the name of the stage."""

PRIORITY = 100
"""The step from one stage to the next should not wait behind a backlog."""

NAME_BYTES = 200
"""What the name of a stage may measure: it is part of a type's name."""

PART, PART_BYTES = 1000, 4_000_000
"""How many commands of a later stage are kept in one row, and how large they may be together."""


class JobStatus(StrEnum):
    PENDING = "PENDING"
    IN_PROGRESS = "IN_PROGRESS"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELED = "CANCELED"

    @property
    def final(self) -> bool:
        """Whether it has ended; a FAILED one can be resumed."""
        return self not in (JobStatus.PENDING, JobStatus.IN_PROGRESS)


class StageStatus(StrEnum):
    """How far a stage has come; once it has a batch, this is the batch's status.

    `CANCELED`: its job was canceled while the stage was planned."""

    PENDING = "PENDING"
    PLANNING = "PLANNING"
    IN_PROGRESS = "IN_PROGRESS"
    COMPLETED = "COMPLETED"
    COMPLETED_WITH_FAILURES = "COMPLETED_WITH_FAILURES"
    SKIPPED = "SKIPPED"
    CANCELED = "CANCELED"

    @property
    def final(self) -> bool:
        return self not in (StageStatus.PENDING, StageStatus.PLANNING, StageStatus.IN_PROGRESS)


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a job: its commands or, without them, what the planner of that name returns once it is its turn."""

    name: str
    commands: Iterable[BatchCommand] | None = None


@dataclass(frozen=True, slots=True)
class StageMetadata:
    """A stage and how far it has come. There is a batch once its commands were sent."""

    name: str
    status: StageStatus
    planned: bool
    batch: BatchMetadata | None


@dataclass(frozen=True, slots=True)
class JobMetadata:
    """A job with its stages at one moment.

    `operator` and `reason` are those of the last one who resumed or canceled it.
    """

    job_id: UUID
    domain: str
    name: str | None
    custom_data: dict[str, Any] | None
    status: JobStatus
    continue_after_failures: bool
    operator: str | None
    reason: str | None
    created_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    stages: tuple[StageMetadata, ...] = ()
    step: CommandMetadata | None = None
    """The command that is to take it to its next stage: what it waits for, its last error. None while a stage runs."""

    def stage(self, name: str) -> StageMetadata:
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(f"Job {self.job_id} has no stage {name!r}: {', '.join(stage.name for stage in self.stages)}.")


class Step(msgspec.Struct, frozen=True):
    """Which stage has ended, for `busload.Stage`, or is to be planned."""

    job_id: UUID
    position: int


def check_stage(name: object, path: str, limits: InputLimits) -> list[Problem]:
    """The name of a stage is one like that of a type, and a little shorter."""
    return check_name(name, path, replace(limits, name_bytes=min(limits.name_bytes, NAME_BYTES)))


def read_step(data: Any) -> Step:
    try:
        return msgspec.convert(data, Step)
    except msgspec.ValidationError as error:
        raise PermanentCommandError(f"Steps of a job are sent by busload itself; this one was not: {error}") from None


def parts(commands: Sequence[NewCommand]) -> Iterator[str]:
    """The commands of a later stage as JSON texts, none of which is large."""
    part: list[NewCommand] = []
    size = 0
    for command in commands:
        if part and (len(part) == PART or size + len(command.data) > PART_BYTES):
            yield _encoded(part)
            part, size = [], 0
        part.append(command)
        size += len(command.data)
    if part:
        yield _encoded(part)


def read_part(text: str) -> list[NewCommand]:
    return _decoder.decode(text)


def _encoded(part: Sequence[NewCommand]) -> str:
    return msgspec.json.encode(part).decode()


_decoder = msgspec.json.Decoder(list[NewCommand])


def summary(job: JobMetadata) -> dict[str, Any]:
    """What the command that is sent on completion gets under the key "job"."""
    return {
        "job_id": str(job.job_id),
        "name": job.name,
        "custom_data": job.custom_data,
        "status": job.status.value,
        "created_at": job.created_at.isoformat(),
        "stages": [_stage_summary(stage) for stage in job.stages],
    }


def _stage_summary(stage: StageMetadata) -> dict[str, Any]:
    told: dict[str, Any] = {"name": stage.name, "status": stage.status.value}
    if stage.batch is not None:
        counts = ("total_count", "completed_count", "failed_count", "canceled_count")
        told |= {"batch_id": str(stage.batch.batch_id)} | {name: getattr(stage.batch, name) for name in counts}
    return told
