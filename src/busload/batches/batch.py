"""A batch: what it is, how it is checked before it is created, and how it is found."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from inspect import iscoroutinefunction
from typing import Any, Literal, TypeAlias, TypedDict, cast
from uuid import UUID

import msgspec

from busload.batches.forecast import Forecast, read_forecast
from busload.batches.guards import NO_GUARDS, Canary, FailureBudget
from busload.commands.check_commands import check_all, refuse_repeated_ids
from busload.commands.checks import encoded, given, problems_of, refuse, seconds_of, wrong
from busload.commands.command import BatchCommand, NewCommand, refuse_unknown
from busload.commands.data_type import DataInvalidError, DataType, DataTypes, is_model, plain_model
from busload.commands.dedup import Dedup
from busload.commands.headers import decode_headers, encode_headers
from busload.commands.ids import JobId, job_id_of, new_id
from busload.commands.payload import WIDEST, PayloadRefusedError, readable
from busload.commands.send import NewBatch
from busload.commands.wording import counted
from busload.errors import DuplicateCommandError, InvalidCommandError, Problem
from busload.postgres.plan import Plan, many, one
from busload.postgres.statements import statements
from busload.settings import LONGEST, InputLimits

BatchStatusName = Literal["PENDING", "IN_PROGRESS", "COMPLETED", "COMPLETED_WITH_FAILURES"]

BatchTypeName = Literal["COMMANDS", "JOBS"]

HeldReason = Literal["OPERATOR", "CANARY", "BUDGET"]


class BatchStatus(StrEnum):
    PENDING = "PENDING"
    IN_PROGRESS = "IN_PROGRESS"
    COMPLETED = "COMPLETED"
    COMPLETED_WITH_FAILURES = "COMPLETED_WITH_FAILURES"

    @property
    def final(self) -> bool:
        return self in (BatchStatus.COMPLETED, BatchStatus.COMPLETED_WITH_FAILURES)


class BatchType(StrEnum):
    """What a batch counts."""

    COMMANDS = "COMMANDS"
    JOBS = "JOBS"


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """A batch with its exact counters at one moment.

    A batch of jobs counts jobs where others count commands. Its `in_troubleshooting_count` are jobs that wait for a
    person.
    """

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
    job_id: JobId | None = None
    """The job that it is a stage of. A text that is a UUID comes back as a UUID."""
    stage: str | int | None = None
    expires_at: datetime | None = None
    """What has not started by then is canceled; None if it may always start."""
    held_at: datetime | None = None
    """Since when the batch is held; None if it is not."""
    held_reason: HeldReason | None = None
    """What holds it: a person, its canary or its failure budget."""
    held_by: str | None = None
    """The operator who holds it, if one does."""
    held_note: str | None = None
    """Why it is held, in words."""
    canary_count: int | None = None
    """How many commands run before all others; None without a canary."""
    canary_until: datetime | None = None
    """By when these are to have completed."""
    canary_ended_at: datetime | None = None
    """When the others were let go; None before that."""
    failure_budget: int | None = None
    """How many commands may fail before the batch is held, at its present size; None without a budget."""
    failure_budget_used: int | None = None
    """How many of them have failed or wait in troubleshooting, or for the worst cause with `per_cause`."""
    fair_by: str | None = None
    """The key by which it takes turns with others; None: by itself."""
    headers: dict[str, str] | None = None
    """What all its commands have among their headers."""
    batch_type: BatchType = BatchType.COMMANDS
    """What it counts: commands or, if `bus.jobs.create_batch` created it, jobs."""
    callback_id: UUID | None = None
    """The command that is sent, in the same domain, when it completes; None if `on_complete` is no command."""
    callback_type: str | None = None
    forecast: Forecast | None = field(default=None, compare=False)
    """When it will be done; None if it has ended, is a batch of jobs, or nobody asked.

    `get_batch` and `watch_batch` always look for it, and `list_batches` if it is told to.

    It differs from moment to moment, so it does not count when two are compared.
    """

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


SQL = statements(__name__)


def find_batch(domain: str | None, batch_id: UUID) -> Plan[BatchMetadata | None]:
    return one(_batch_with_forecast, SQL.batch, domain=domain, batch_id=batch_id)


def list_batches(
    domain: str | None,
    *,
    status: BatchStatus | None,
    limit: int,
    offset: int,
    after: UUID | None,
    job_id: JobId | None = None,
    batch_type: BatchType | None = None,
    name: str | None = None,
    created_after: datetime | None = None,
    created_before: datetime | None = None,
    forecast: bool = False,
) -> Plan[list[BatchMetadata]]:
    kinds = {"status": status and status.value, "batch_type": batch_type and batch_type.value, "name": name}
    page: dict[str, Any] = {"limit": limit, "offset": offset, "after": after, "forecast": forecast, **kinds}
    page |= {"created_after": created_after, "created_before": created_before}
    if job_id is not None:
        return many(_batch_with_forecast, SQL.batches_of_job, job_id=str(job_id_of(job_id)), domain=domain, **page)
    if domain is None:
        return many(_batch_with_forecast, SQL.batches_everywhere, **page)
    return many(_batch_with_forecast, SQL.batches, domain=domain, **page)


def existing_batches(batch_ids: Sequence[UUID]) -> Plan[list[BatchMetadata]]:
    return many(_batch, SQL.existing_batches, batch_ids=list(batch_ids))


def _batch(*row: Any) -> BatchMetadata:
    *columns, headers, batch_type, callback_id, callback_type = row
    batch_id, domain, name, custom_data, status, *others = columns
    others += [decode_headers(headers), BatchType(batch_type), callback_id, callback_type]
    batch = BatchMetadata(batch_id, domain, name, readable(custom_data), BatchStatus(status), *others)
    if batch.job_id is None and batch.stage is None:
        return batch
    return replace(batch, job_id=job_id_of(batch.job_id), stage=readable(cast(str | None, batch.stage)))


def _batch_with_forecast(*row: Any) -> BatchMetadata:
    *columns, outlook = row
    return replace(_batch(*columns), forecast=read_forecast(outlook))


class BatchOptions(TypedDict, total=False):
    """What may be said about a new batch, in every call that creates one."""

    batch_id: UUID | None
    """The id of the batch; a new one if it is left out."""
    name: str | None
    """A name for people to find the batch by."""
    custom_data: dict[str, Any] | None
    """Data of your own, which the batch keeps and its callback gets."""
    expires_in: timedelta | float | None
    """Cancel, with the reason EXPIRED, what has not started so long after the creation; a number is in seconds."""
    priority: int | None
    """The priority of commands that have none of their own, which is 0."""
    dedup: Dedup | None
    """Leave out commands whose task key another command holds. They do not count in the batch's total."""
    job_id: JobId | None
    """A job of your own to find the batch by: a UUID, or text of up to 255 characters. `bus.jobs.create` sets it for
    its batches."""
    stage: str | int | None
    """The stage of that job: its name or its number."""
    fair_by: str | None
    """Whose batch it is, such as a tenant: of equal priority, those with different keys take turns.

    Without a key the batch takes turns by itself.
    """
    headers: Mapping[str, str] | None
    """Texts by name that each of its commands, and its callback, has among its headers. They are kept once."""
    budget: FailureBudget | None
    """Hold the batch when more of it has failed than this. In an open batch it is a share of what was added so far."""
    operator: str | None
    """Who creates it, if a person does: the audit of operators keeps the name."""


class CreateOptions(BatchOptions, total=False):
    """What may be said about a batch that is created with all its commands."""

    canary: Canary | None
    """Run some commands, spread over the batch, before all others."""


def new_batch(
    call: str,
    limits: InputLimits,
    domain: str,
    options: BatchOptions,
    on_complete: object,
    *,
    awaits: bool,
    known: type = BatchOptions,
    types: DataTypes | None = None,
) -> NewBatch:
    """Check everything about a new batch but its commands. `awaits` says that an async function may be its callback.

    `known` are all options of the call. `types` are those of data that are known, because handlers want them.
    """
    refuse_unknown(call, options, known)
    canary, budget = cast(CreateOptions, options).get("canary"), options.get("budget")
    name, custom_data, stage = options.get("name"), options.get("custom_data"), options.get("stage")
    fair_by, headers = options.get("fair_by"), options.get("headers")
    chosen = given(batch_id=options.get("batch_id"), job_of_batch=options.get("job_id"))
    problems = problems_of(
        limits,
        domain=domain,
        **chosen,
        stage=stage,
        name=name,
        custom_data=custom_data,
        fair_by=fair_by,
        headers=headers,
        **given(operator=options.get("operator")),
    )
    problems += problems_of(limits, expires_in=options.get("expires_in"), **given(priority=options.get("priority")))
    callback, callback_id = None, None
    if not isinstance(on_complete, BatchCommand | None):
        problems += _wrong_function(on_complete, awaits=awaits)
    problems += _wrong_guards(canary, budget)
    refuse(problems + problems_of(limits, dedup=options.get("dedup")))
    if isinstance(on_complete, BatchCommand):
        callback, callback_id = callback_of(limits, domain, on_complete, types=types)
    text = None if custom_data is None else encoded(custom_data, "/custom_data", limits.payload)
    batch_id = options.get("batch_id") or new_id()
    if callback_id is not None and budget is not None and budget.on_exceeded is not None:
        refuse_repeated_ids(domain, [callback_id, *given(id=budget.on_exceeded.command_id).values()])
    guards = None
    if canary is not None or budget is not None:
        guards = (
            NO_GUARDS | (budget_columns(limits, domain, budget, types) or {}) | (canary.columns() if canary else {})
        )
    job_id = job_id_of(options.get("job_id"))
    expires_in = seconds_of(options.get("expires_in"))
    return NewBatch(
        batch_id,
        domain,
        name,
        text,
        callback,
        callback_id,
        job_id,
        stage,
        guards,
        expires_in=None if expires_in is None else timedelta(seconds=expires_in),
        fair_by=fair_by,
        priority=options.get("priority") or 0,
        headers=encode_headers(headers),
        operator=options.get("operator"),
    )


def _wrong_guards(canary: object, budget: object) -> list[Problem]:
    problems = []
    if not isinstance(canary, Canary | None):
        problems.append(wrong(canary, "canary", "a Canary, for example Canary(size=50)"))
    if not isinstance(budget, FailureBudget | None):
        problems.append(wrong(budget, "budget", "a FailureBudget, for example FailureBudget(share=0.02)"))
    return problems


def budget_columns(
    limits: InputLimits, domain: str, budget: FailureBudget | None, types: DataTypes | None = None
) -> dict[str, Any] | None:
    """Check a failure budget: what the row of its batch keeps of it, if there is one."""
    refuse(_wrong_guards(None, budget))
    if budget is None:
        return None
    if (asked := budget.on_exceeded) is None:
        return budget.columns(None)
    return budget.columns(callback_of(limits, domain, asked, path="budget/on_exceeded", types=types)[0])


def members(
    limits: InputLimits,
    batch: NewBatch,
    commands: Iterable[BatchCommand],
    first: int = 0,
    types: DataTypes | None = None,
) -> list[NewCommand]:
    """Check the commands of a batch, or a slice of them that begins at `first`.

    An error names offenders by their place among all commands of the batch.
    """
    try:
        checked = check_all(batch.domain, commands, limits, types)
    except InvalidCommandError as refused:
        if not first:
            raise
        problems = [replace(p, index=None if p.index is None else p.index + first) for p in refused.problems]
        raise InvalidCommandError(problems, refused.total) from None
    if not checked and not first:
        message = "found no commands, wanted at least one; open_batch may stay empty"
        raise InvalidCommandError([Problem("EMPTY_BATCH", "/commands", message)])
    if batch.expires_in is not None:
        refuse(_too_late(batch.expires_in, checked, first))
    size = None if batch.guards is None else batch.guards["canary"]
    if size is not None and size > len(checked):
        message = f"found {size:,}, but the batch has {counted(len(checked), 'command')}; wanted no more than that"
        raise InvalidCommandError([Problem("INVALID_OPTION", "/canary/size", message)])
    if batch.guards is not None and batch.guards["within"] is not None:
        refuse(_canary_too_late(batch.guards["within"], checked))
    taken = (command.command_id for command in checked if command.domain is None)
    if batch.callback_id is not None and batch.callback_id in taken:
        raise DuplicateCommandError(batch.domain, [batch.callback_id])
    return with_priority(batch, checked)


def facts_of_batch(batch: NewBatch, commands: object = ()) -> dict[str, Any]:
    """What the span that creates a batch says about it. How many commands it has may not be known yet."""
    count = len(commands) if isinstance(commands, Sized) and commands else None
    return {"batch_id": batch.batch_id, "job_id": batch.job_id, "count": count} | {
        "headers": decode_headers(batch.headers)
    }


def _too_late(expires_in: timedelta, commands: Sequence[NewCommand], first: int) -> list[Problem]:
    """Commands that may start only after their batch has expired."""
    expiry = datetime.now(UTC) + expires_in
    return [
        Problem(
            "INVALID_TIME",
            "/run_at",
            f"found {command.run_at.isoformat()}, but expires_in cancels the batch at {expiry.isoformat()}: it would "
            "expire before it may start; wanted an earlier run_at, or a longer expires_in",
            index + first,
        )
        for index, command in enumerate(commands)
        if command.run_at is not None and command.run_at >= expiry
    ] + [
        Problem(
            "INVALID_TIME",
            "/delay",
            f"found {command.delay}, but expires_in cancels the batch after {expires_in}: it would expire before it "
            "may start; wanted a shorter delay, or a longer expires_in",
            index + first,
        )
        for index, command in enumerate(commands)
        if command.delay is not None and command.delay >= expires_in
    ]


def _canary_too_late(within: timedelta, commands: Sequence[NewCommand]) -> list[Problem]:
    """A canary none of whose commands may start before its time is over, whichever commands are chosen."""
    now = datetime.now(UTC)
    end, first = now + within, now + LONGEST
    for command in commands:
        due = command.run_at if command.delay is None else now + command.delay
        if due is None or due < end:
            return []
        first = min(first, due)
    message = (
        f"found {within}, but the first command of the batch may start only at {first.isoformat(timespec='seconds')}, "
        "so the canary would hold the batch before; wanted a longer within, or an earlier run_at or delay"
    )
    return [Problem("INVALID_OPTION", "/canary/within", message)]


def with_priority(batch: NewBatch, commands: list[NewCommand]) -> list[NewCommand]:
    """Give the priority of the batch to commands that have none of their own."""
    if not batch.priority:
        return commands
    given_one = msgspec.structs.replace
    return [one if one.priority else given_one(one, priority=batch.priority) for one in commands]


def callback_of(
    limits: InputLimits,
    domain: str,
    command: BatchCommand,
    of: str = "batch",
    path: str = "on_complete",
    types: DataTypes | None = None,
) -> tuple[str, UUID | None]:
    """The command that is sent on completion, as the row of its batch or job keeps it, and its id if it was chosen.

    The batch, or job, is added to its data when it is sent. A model may have an empty field for it.
    """
    data = _data_of_callback(command.data, of, path)
    for time in ("run_at", "expires_at", "delay"):
        if getattr(command, time) is not None:
            message = f"a callback is sent when its {of} completes and cannot have a time of its own"
            raise InvalidCommandError([Problem("INVALID_OPTION", f"/{path}/{time}", message)])
    if command.domain not in (None, domain):
        message = f"found {command.domain!r}, but a callback runs in {domain!r}, the domain of its {of}"
        raise InvalidCommandError([Problem("INVALID_OPTION", f"/{path}/domain", message)])
    try:
        [checked] = check_all(domain, [replace(command, data=data)], limits)
    except InvalidCommandError as refused:
        problems = [replace(p, path=f"/{path}{p.path}", index=None) for p in refused.problems]
        raise InvalidCommandError(problems) from None
    if types and (known := types.get((domain, command.command_type))) is not None:
        refuse(_misfits(known, data, of, path))
    row = msgspec.to_builtins(checked) | {"data": data, "headers": decode_headers(checked.headers)}
    row["command_id"] = str(checked.command_id)
    del row["id_as_int"], row["run_at"], row["domain"], row["fair_by"], row["expires_at"], row["delay"]
    return encoded(row, f"/{path}", WIDEST), command.command_id


def _data_of_callback(given: Any, of: str, path: str) -> dict[str, Any]:
    """The data of a callback, without the field that a model has for its batch or job."""
    try:
        data = {} if given is None else plain_model(given) if is_model(given) else given
    except PayloadRefusedError as refused:
        raise InvalidCommandError([replace(refused.problem, path=f"/{path}{refused.problem.path}")]) from None
    if not isinstance(data, dict) or data.get(of) not in (None, {}):
        message = f'wanted a dict or a model whose "{of}" is missing, None or empty: the {of} will be put there'
        raise InvalidCommandError([Problem("INVALID_OPTION", f"/{path}/data", message)])
    return {name: value for name, value in data.items() if name != of} if of in data else data


_COUNTS = {"total_count": 1, "completed_count": 1, "failed_count": 0, "canceled_count": 0}
_ENDED: dict[str, dict[str, Any]] = {
    "batch": {
        "batch_id": str(UUID(int=0)),
        "name": "",
        "custom_data": {},
        "status": BatchStatus.COMPLETED.value,
        **_COUNTS,
        "in_troubleshooting_count": 0,
        "created_at": "2000-01-01T00:00:00+00:00",
        "started_at": "2000-01-01T00:00:00+00:00",
        "completed_at": "2000-01-01T00:00:00+00:00",
    },
    "job": {
        "job_id": str(UUID(int=0)),
        "name": "",
        "custom_data": {},
        "status": BatchStatus.COMPLETED.value,
        "created_at": "2000-01-01T00:00:00+00:00",
        "stages": [{"name": "", "status": BatchStatus.COMPLETED.value, "batch_id": str(UUID(int=0)), **_COUNTS}],
    },
}
"""What a batch and a job look like in the data of their callback. Only their form counts: see `_misfits`."""


def _misfits(known: DataType, data: dict[str, Any], of: str, path: str) -> list[Problem]:
    """What of a callback's data does not fit the type of its handler. How its batch or job will end is not known."""
    try:
        known.convert(data | {of: _ENDED[of]})
    except DataInvalidError as invalid:
        own = [one for one in invalid.problems if not f"{one.path}/".startswith(f"/data/{of}/")]
        return [replace(one, path=f"/{path}{one.path}") for one in own]
    return []


def _wrong_function(on_complete: object, *, awaits: bool) -> list[Problem]:
    if not callable(on_complete):
        return [wrong(on_complete, "on_complete", "a function or a BatchCommand")]
    if iscoroutinefunction(on_complete) and not awaits:
        message = "found an async function, which nobody awaits here; pass a plain one, or use CommandBus"
        return [Problem("INVALID_OPTION", "/on_complete", message)]
    return []
