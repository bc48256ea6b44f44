"""A job: stages, one batch each, that run one after the other; and how a job is checked before it is created."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal
from uuid import UUID

import msgspec

from busload.batches.batch import BatchMetadata, callback_of
from busload.commands.check_commands import check_all, refuse_repeated_ids
from busload.commands.checks import encoded, given, problems_of, refuse, wrong, wrong_list, wrong_name
from busload.commands.command import BatchCommand, CommandMetadata, NewCommand
from busload.commands.data_type import DataTypes
from busload.commands.parts import cut
from busload.errors import InvalidCommandError, PermanentCommandError, Problem
from busload.settings import InputLimits

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


JobStatusName = Literal["PENDING", "IN_PROGRESS", "COMPENSATING", "COMPLETED", "FAILED", "CANCELED"]


class JobStatus(StrEnum):
    PENDING = "PENDING"
    IN_PROGRESS = "IN_PROGRESS"
    COMPENSATING = "COMPENSATING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELED = "CANCELED"

    @property
    def final(self) -> bool:
        """Whether it has ended; a FAILED one that was not compensated can be resumed."""
        return self not in (JobStatus.PENDING, JobStatus.IN_PROGRESS, JobStatus.COMPENSATING)


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
    """A stage of a job: its commands or, without them, what the planner of that name returns once it is its turn.

    `compensate` is one command or several that undo the stage. They run if the job fails or is canceled after the
    stage has done something.
    """

    name: str
    commands: Iterable[BatchCommand] | None = None
    compensate: BatchCommand | Iterable[BatchCommand] | None = None


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A job of a batch of jobs: what `bus.jobs.create` is told about one."""

    stages: Iterable[Stage]
    job_id: UUID | None = None
    name: str | None = None
    custom_data: dict[str, Any] | None = None
    on_complete: BatchCommand | None = None
    continue_after_failures: bool = False


@dataclass(frozen=True, slots=True)
class StageMetadata:
    """A stage and how far it has come. There is a batch once its commands were sent."""

    name: str
    status: StageStatus
    planned: bool
    batch: BatchMetadata | None
    compensates: bool = False
    """Whether it has commands that undo it."""
    compensation: BatchMetadata | None = None
    """The batch of these commands, once they were sent."""


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
    compensated_at: datetime | None = None
    """When all that was to be undone was tried; `compensation_failures` says how much of it has failed."""
    batch_id: UUID | None = None
    """The batch of jobs that it counts in, if it was created with others by `create_batch`."""
    stages: tuple[StageMetadata, ...] = ()
    step: CommandMetadata | None = None
    """The command that is to take it to its next stage: what it waits for, its last error. None while a stage runs."""

    @property
    def compensation_failures(self) -> int:
        """Commands of its compensation that have failed, were canceled, or wait for a person in troubleshooting."""
        undone = [stage.compensation for stage in self.stages if stage.compensation is not None]
        return sum(one.failed_count + one.canceled_count + one.in_troubleshooting_count for one in undone)

    def stage(self, name: str) -> StageMetadata:
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(f"Job {self.job_id} has no stage {name!r}: {', '.join(stage.name for stage in self.stages)}.")


class Step(msgspec.Struct, frozen=True):
    """Which stage has ended or, with `undo`, was undone, for `busload.Stage`; or which is to be planned."""

    job_id: UUID
    position: int
    undo: bool = False


def wrong_stage(name: object, path: str, limits: InputLimits) -> list[Problem]:
    """The name of a stage is one like that of a type, and a little shorter."""
    return wrong_name(name, path, replace(limits, name_bytes=min(limits.name_bytes, NAME_BYTES)))


def read_step(data: Any) -> Step:
    try:
        return msgspec.convert(data, Step)
    except msgspec.ValidationError as error:
        raise PermanentCommandError(f"Steps of a job are sent by busload itself; this one was not: {error}") from None


def parts(commands: Sequence[NewCommand]) -> Iterator[str]:
    """The commands of a later stage as JSON texts, none of which is large."""
    for part in cut(commands, (len(command.data) for command in commands), PART, PART_BYTES):
        yield msgspec.json.encode(part).decode()


def read_part(text: str) -> list[NewCommand]:
    return _decoder.decode(text)


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


@dataclass(frozen=True, slots=True)
class NewStage:
    """A stage that was checked; without commands it is planned."""

    name: str
    commands: Sequence[NewCommand] | None
    chosen: Sequence[tuple[str, UUID]] = ()
    """Ids of commands that the caller chose, each with the domain that runs the command."""
    undo: Sequence[NewCommand] = ()
    """The commands that undo it."""
    undo_chosen: Sequence[tuple[str, UUID]] = ()


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job that was checked: what goes into the tables."""

    job_id: UUID
    domain: str
    name: str | None
    custom_data: str | None
    on_complete: str | None
    continue_after_failures: bool
    stages: Sequence[NewStage]
    callback_id: UUID | None = None


def new_job(limits: InputLimits, domain: str, job: BatchJob, fresh: UUID, types: DataTypes | None = None) -> NewJob:
    """Check a job with every command of every stage, so that no job stops at a list that was wrong from the start.

    `fresh` is its id if the caller has chosen none. `types` are those that handlers want.
    """
    problems = problems_of(
        limits,
        domain=domain,
        continue_after_failures=job.continue_after_failures,
        **given(job_id=job.job_id),
        name=job.name,
        custom_data=job.custom_data,
    )
    asked: object = job.on_complete
    if not isinstance(asked, BatchCommand | None):
        problems.append(wrong(asked, "on_complete", "a BatchCommand"))
    refuse(problems)
    checked = _stages(limits, domain, job.stages, types)
    callback, callback_id = None, None
    if job.on_complete is not None:
        callback, callback_id = callback_of(limits, domain, job.on_complete, "job", types=types)
    text = None if job.custom_data is None else encoded(job.custom_data, "/custom_data", limits.payload)
    new = NewJob(
        job.job_id or fresh, domain, job.name, text, callback, job.continue_after_failures, checked, callback_id
    )
    refuse_repeated([new])
    return new


def refuse_repeated(jobs: Sequence[NewJob], callback_id: UUID | None = None) -> None:
    """Refuse jobs that have chosen the same id for two commands; `callback_id` is that of a command beside them."""
    chosen = chosen_ids(jobs)
    if callback_id is not None:
        chosen.setdefault(jobs[0].domain, []).append(callback_id)
    for own, ids in chosen.items():
        refuse_repeated_ids(own, ids)


def chosen_ids(jobs: Iterable[NewJob], *, later: bool = False) -> dict[str, list[UUID]]:
    """The ids that the caller chose for commands of the stages, for what undoes them and for the callbacks.

    They are listed by the domain that runs them. With `later`, those that are sent at once are left out.
    """
    chosen: dict[str, list[UUID]] = {}
    for job in jobs:
        if job.callback_id is not None:
            chosen.setdefault(job.domain, []).append(job.callback_id)
        for position, stage in enumerate(job.stages):
            for own, command_id in (*(() if later and not position else stage.chosen), *stage.undo_chosen):
                chosen.setdefault(own, []).append(command_id)
    return chosen


def _stages(limits: InputLimits, domain: str, stages: Iterable[Stage], types: DataTypes | None) -> list[NewStage]:
    wanted = "at least one Stage"
    refuse(wrong_list(stages, "stages", wanted))
    if not (found := list(stages)):
        refuse([wrong(stages, "stages", wanted)])
    names: set[str] = set()
    refuse(
        [problem for position, stage in enumerate(found) for problem in _wrong_stage(stage, position, names, limits)]
    )
    checked = [_stage(limits, domain, position, stage, types) for position, stage in enumerate(found)]
    if not checked[0].commands:
        message = "found no commands, wanted at least one: before the first stage there is nothing to plan it from"
        raise InvalidCommandError([Problem("EMPTY_BATCH", "/stages/0/commands", message)])
    return checked


def _wrong_stage(stage: object, position: int, names: set[str], limits: InputLimits) -> list[Problem]:
    path = f"stages/{position}"
    if not isinstance(stage, Stage):
        return [wrong(stage, path, "a Stage")]
    problems = wrong_stage(stage.name, f"{path}/name", limits)
    if isinstance(stage.name, str) and stage.name in names:
        message = f"found a second stage {stage.name!r:.80}, wanted each name once"
        problems.append(Problem("INVALID_OPTION", f"/{path}/name", message))
    names.add(str(stage.name))
    if stage.commands is not None:
        problems += wrong_list(stage.commands, f"{path}/commands", "a list of BatchCommand")
    if not isinstance(stage.compensate, BatchCommand | None):
        problems += wrong_list(stage.compensate, f"{path}/compensate", "a BatchCommand, or a list of them")
    return problems


def _stage(limits: InputLimits, domain: str, position: int, stage: Stage, types: DataTypes | None) -> NewStage:
    undo = [stage.compensate] if isinstance(stage.compensate, BatchCommand) else list(stage.compensate or ())
    compensation = _checked(limits, domain, undo, f"/stages/{position}/compensate", types)
    if stage.commands is None:
        return NewStage(stage.name, None, (), *compensation)
    commands = list(stage.commands)
    checked = _checked(limits, domain, commands, f"/stages/{position}/commands", types)
    return NewStage(stage.name, *checked, *compensation)


def _checked(
    limits: InputLimits, domain: str, commands: Sequence[BatchCommand], path: str, types: DataTypes | None
) -> tuple[Sequence[NewCommand], Sequence[tuple[str, UUID]]]:
    """Commands that are in order, and the ids among them that the caller chose, each with the domain that runs it."""
    try:
        checked = check_all(domain, commands, limits, types)
    except InvalidCommandError as refused:
        named = [replace(p, path=f"{path}/{p.index}{p.path}", index=None) for p in refused.problems]
        raise InvalidCommandError(named, refused.total) from None
    ids = [(command.domain or domain, command.command_id) for command in commands]
    return checked, [(own, command_id) for own, command_id in ids if command_id is not None]
