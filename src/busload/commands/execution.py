"""One attempt: what is leased, how it ends, and where the command goes next."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, TypeAlias
from uuid import UUID

import msgspec

from busload.commands import ids
from busload.commands.headers import joined_headers
from busload.commands.load import Load
from busload.commands.payload import PayloadRefusedError, decode, encode, safe_str, storable
from busload.commands.result import ResultNotKeptError, encode_result
from busload.commands.retry import VERDICTS, RetryPolicy, Verdict
from busload.commands.traceback_text import traceback_text
from busload.errors import (
    BusinessRuleError,
    PermanentCommandError,
    RateLimitedError,
    SnoozeError,
    TransientCommandError,
)
from busload.settings import PayloadLimits

COMPLETED = "COMPLETED"
FAILED = "FAILED"
CANCELED = "CANCELED"
TROUBLESHOOTING = "TROUBLESHOOTING"
FAILED_ATTEMPT = "FAILED_ATTEMPT"

RESULT_INVALID = "RESULT_INVALID"
"""The reason of a command in troubleshooting whose handler has returned JSON that cannot be stored."""

RESULT_NOT_KEPT = "result_not_kept"
"""If a result has no JSON form, the command has a note instead of it. This is the only key of that note."""


FINAL_ERRORS = (BusinessRuleError, PermanentCommandError)
"""After these, trying again would be in vain."""


class ExecutionStatus(StrEnum):
    """How far an attempt has come."""

    QUEUED = "queued"
    PROCESSING = "processing"
    COMPLETED = "completed"
    FAILED = "failed"
    LOST = "lost"
    """Its worker died, or lost its lease."""
    DLQ = "dlq"
    """It waits in troubleshooting, or did until an operator resolved it."""
    CANCELED = "canceled"


@dataclass(frozen=True, slots=True)
class OperatorAction:
    """What a person did after an attempt had ended in troubleshooting."""

    type: str
    at: datetime
    operator: str | None
    details: Any = None


@dataclass(frozen=True, slots=True)
class Execution:
    """One attempt at a task, as `trace` and `TaskTracker` show it."""

    execution_id: UUID | None
    """None while a command of our own waits for its worker: the attempt is named when it is claimed."""
    task_key: str | None
    command_id: UUID
    queue: str
    """The domain of the command: the name of the queue as `TaskTracker.enqueue` was given it."""
    attempt: int
    status: ExecutionStatus
    worker: str | None
    enqueued_at: datetime
    """When this attempt was created: when the task was enqueued, or when the attempt before it ended or was retried."""
    started_at: datetime | None
    finished_at: datetime | None
    error: str | None
    metadata: Any
    """The data of the command."""
    actions: tuple[OperatorAction, ...] = ()
    traceback: str | None = None
    """Where the error was raised, as Python prints it."""
    retry_count: int = 0
    """How many attempts had failed before this one, since the task was enqueued or an operator retried it."""
    can_retry: bool | None = None
    """Whether another attempt follows if this one fails. Once it has ended: whether another one follows.

    None if the handler decides, as for commands that were sent without `max_attempts`.
    """


class Lease(msgspec.Struct, eq=False):
    """A load that this worker holds: the fence for every result of its commands."""

    lease_id: UUID
    load: Load
    domain: str
    batch_id: UUID | None
    priority: int
    attempt: int
    forgiven: int
    crashes: int
    created_at: datetime
    """When its commands were sent, or the first of them."""
    unsettled: int = 0
    """Commands whose result is not known to be in the database."""
    running: int = 0
    """Commands that have no result yet, whether they have started or not."""
    remaining: int | None = None
    """What had not ended of its batch when it was claimed; None if there is no batch, or it may still grow."""
    has_budget: bool = False
    """Whether its batch had a failure budget when it was claimed."""
    headers: str | None = None
    """The headers of its batch, as JSON text: each of its commands has them, and its own."""
    claimed: float = 0.0
    """When it was claimed, on the worker's own clock."""
    canceled: bool = False
    stopping: frozenset[int] = frozenset()
    """The commands of it that were asked to stop, one by one."""
    lost: bool = False
    refused: bool = False
    """Whether the database has refused a result because the lease was gone. That command has to run again."""

    @property
    def round_attempt(self) -> int:
        """The attempt as the retry policy counts it: an operator's retry starts over."""
        return self.attempt - self.forgiven


class Leased(msgspec.Struct, eq=False, gc=False):  # a struct is made in a fifth of a dataclass's time
    """One command of a lease, as it was read: its data is not decoded yet."""

    lease: Lease
    id: int
    command_id: UUID
    command_type: str
    data: str | None
    task_key: str | None = None
    correlation_id: UUID | None = None
    reply_to: str | None = None
    max_attempts: int | None = None
    created_at: datetime | None = None
    """If None, the time of the lease counts: commands that were sent together share it."""
    headers: str | None = None
    """Its own headers, as JSON text; those of its batch are in its lease."""
    started: float = 0.0
    settled: bool = False

    @property
    def execution_id(self) -> UUID:
        return ids.execution_id(self.lease.lease_id, self.id)

    def facts(self) -> dict[str, Any]:
        """What log lines and spans of its handler say about it."""
        lease = self.lease
        facts: dict[str, Any] = {
            "command_id": self.command_id,
            "command_type": self.command_type,
            "domain": lease.domain,
        }
        if lease.batch_id is not None:
            facts["batch_id"] = lease.batch_id
        if self.task_key is not None:
            facts["task_key"] = self.task_key
        facts["attempt"] = lease.attempt - lease.forgiven
        facts["execution_id"] = ids.execution_id(lease.lease_id, self.id)
        return facts

    def traceparent(self) -> str | None:
        """The trace that its sender, or the creator of its batch, was in."""
        return (joined_headers(self.lease.headers, self.headers) or {}).get("traceparent")

    @property
    def canceled(self) -> bool:
        """Whether it was asked to stop, alone or with its batch."""
        return self.lease.canceled or self.id in self.lease.stopping


@dataclass(frozen=True, slots=True)
class Several:
    """What a bulk handler runs."""

    leased: Sequence[Leased]

    def facts(self) -> dict[str, Any]:
        """What its commands have in common, and how many they are."""
        of_one = [one.facts() for one in self.leased]
        shared = dict(set.intersection(*(set(facts.items()) for facts in of_one))) if of_one else {}
        return {name: value for name, value in of_one[0].items() if name in shared} | {"commands": len(of_one)}

    def traceparent(self) -> str | None:
        """None: each command may have a sender of its own."""
        return None


@dataclass(frozen=True, slots=True)
class Succeeded:
    result: Any = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The handler raised, or ran out of its time."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Stopped:
    """The handler gave up because its command or its batch was canceled."""

    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The stored data could not be decoded: somebody else wrote it."""

    error: BaseException


Outcome: TypeAlias = Succeeded | Failed | Stopped | Unreadable


class Transition(msgspec.Struct, eq=False, gc=False):
    """Where an attempt sends its command."""

    leased: Leased
    outcome: str
    details: str | None = None
    delay: float | None = None
    reason: str | None = None
    finished: float = 0.0
    held_up: bool = False
    """Whether it waits apart from the others for a batch that somebody holds."""

    def __repr__(self) -> str:
        return f"the result {self.outcome} of execution {self.leased.execution_id}"


def complete(leased: Leased, result: Any, limits: PayloadLimits) -> Transition:
    """Where a command goes once its handler has returned: its work is done, whatever becomes of its result.

    If a result has no JSON form, all commands of this handler have the same flaw: the command is completed, with a note
    for a result. If a result is JSON and cannot be stored, by its size or a character, the data of this command is the
    cause: it waits for a person. If the result shows that the handler has not run, that is a permanent failure.
    """
    if result is None:
        return Transition(leased, COMPLETED)
    try:
        return Transition(leased, COMPLETED, encode_result(result, limits))
    except ResultNotKeptError as flaw:
        return Transition(leased, COMPLETED, encode({RESULT_NOT_KEPT: str(flaw)}), reason=RESULT_NOT_KEPT)
    except PayloadRefusedError as refused:
        return Transition(leased, TROUBLESHOOTING, encode(summarise(refused), _ROOMY), reason=RESULT_INVALID)
    except PermanentCommandError as not_run:
        return Transition(leased, TROUBLESHOOTING, encode(summarise(not_run), _ROOMY), reason="PERMANENT")


def decide(
    leased: Leased, outcome: Outcome, retry: RetryPolicy, limits: PayloadLimits, described: str | None = None
) -> Transition:
    """Say where a command goes once its handler has returned or raised.

    `described` is what `describe` says about the outcome's error: many commands may share one.
    """
    if isinstance(outcome, Succeeded):
        return complete(leased, outcome.result, limits)
    if described is None and outcome.error is not None:
        described = describe(outcome.error)
    if isinstance(outcome, Unreadable):
        return Transition(leased, TROUBLESHOOTING, described, reason="UNDECODABLE")
    if isinstance(outcome, Stopped):
        return Transition(leased, CANCELED, described)
    after: float | None = None
    match deciding(outcome.error):
        case BusinessRuleError():
            return Transition(leased, FAILED, described)
        case PermanentCommandError():
            return Transition(leased, TROUBLESHOOTING, described, reason="PERMANENT")
        case TransientCommandError() as passing:
            after = passing.after
    match rule_of(outcome.error, retry):
        case "failed":
            return Transition(leased, FAILED, described)
        case "permanent":
            return Transition(leased, TROUBLESHOOTING, described, reason="PERMANENT")
        case RetryPolicy() as other:
            retry = other
    if retry.exhausted(leased.lease.round_attempt, leased.max_attempts):
        return Transition(leased, TROUBLESHOOTING, described, reason="EXHAUSTED")
    delay = retry.delay(leased.lease.round_attempt) if after is None else after
    return Transition(leased, FAILED_ATTEMPT, described, delay=delay)


def rule_of(error: BaseException, retry: RetryPolicy) -> RetryPolicy | Verdict | None:
    """What the rules of a policy say of an error; of a group, what they say of a member, and the gravest rule wins.

    A `TransientCommandError` says itself that the command is to be tried again, so a rule for all exceptions says
    nothing of it.
    """
    if not retry.rules:
        return None
    members = _members(error) if isinstance(error, BaseExceptionGroup) else [error]
    found = [rule for one in members if (rule := retry.rule_for(one, up_to=TransientCommandError)) is not None]
    for verdict in VERDICTS:
        if verdict in found:
            return verdict
    return found[0] if found else None


def policy_of(error: BaseException, retry: RetryPolicy) -> RetryPolicy:
    """The policy that counts after an error: that of a rule, or else `retry` itself."""
    rule = rule_of(error, retry)
    return rule if isinstance(rule, RetryPolicy) else retry


def is_final(error: BaseException, retry: RetryPolicy) -> bool:
    """Whether to try again would be in vain, by the class of the error or by a rule."""
    return isinstance(deciding(error), FINAL_ERRORS) or rule_of(error, retry) in VERDICTS


def failure(leased: Leased, error: BaseException) -> Failed | Stopped:
    """If it was asked to stop, an error means that the handler has stopped as asked, unless the error is final."""
    if leased.canceled and not isinstance(deciding(error), FINAL_ERRORS):
        return Stopped(error)
    return Failed(error)


def deciding(error: BaseException) -> BaseException:
    """The exception that decides where a command goes: in a group, as a `TaskGroup` raises it, one of its members.

    A permanent error goes before a business rule: if one part says that a person must look, a person looks. Both go
    before all other errors: those may pass, but to try again would be in vain. A refusal by rate, or a snooze, burns no
    attempt, so it decides only if there is no other error. A group without any of these decides itself, as a passing
    failure.
    """
    if not isinstance(error, BaseExceptionGroup):
        return error
    members = _members(error)
    for kind in (PermanentCommandError, BusinessRuleError):
        for member in members:
            if isinstance(member, kind):
                return member
    refusals = [member for member in members if isinstance(member, RateLimitedError | SnoozeError)]
    if refusals and len(refusals) == len(members):
        return max(refusals, key=lambda refusal: refusal.after or 0.0)
    return error


def describe(error: BaseException, max_bytes: int = 16 * 1024) -> str:
    """An error as JSON text that can always be stored: what `summarise` says, and the traceback."""
    return encode(summarise(error, max_bytes) | {"traceback": traceback_text(error)}, _ROOMY)


def summarise(error: BaseException, max_bytes: int = 16 * 1024) -> dict[str, Any]:
    """Type, kind, code, message and, if they are JSON, details: of a group those of the member that decides."""
    told = deciding(error)
    summary: dict[str, Any] = {
        "type": storable(type(told).__name__, 255),
        "kind": _kind(told),
        "code": _code(told),
        "message": _message(told, max_bytes),
    }
    details = _attribute(told, "details")
    if details is not None:
        try:
            summary["details"] = decode(encode(details, PayloadLimits(data_bytes=max_bytes)))
        except PayloadRefusedError as refused:
            summary["details"] = str(refused.problem)
    if told is not error:
        summary["group"] = safe_str(error, 1024)
    return summary


def _members(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """What failed in a group and in the groups within it. A cancellation follows a failure, and is none itself."""
    found: list[BaseException] = []
    groups, seen = [group], {id(group)}
    for one in groups:  # grows meanwhile, so that depth needs no recursion
        for member in one.exceptions:
            if isinstance(member, BaseExceptionGroup):
                if id(member) not in seen:
                    seen.add(id(member))
                    groups.append(member)
            elif not isinstance(member, CancelledError):
                found.append(member)
    return found


def _message(error: BaseException, max_bytes: int) -> str:
    """The message of an error. If a group decides itself, its message says little: its first members are added."""
    message = safe_str(error, max_bytes)
    if not isinstance(error, BaseExceptionGroup):
        return message
    members = [f"{type(member).__name__}: {safe_str(member, 1024)}" for member in _members(error)[:MOST_MEMBERS]]
    return storable("; ".join([message, *members]), max_bytes)


def _kind(error: BaseException) -> str:
    if isinstance(error, PermanentCommandError):
        return "PERMANENT"
    return "BUSINESS_RULE" if isinstance(error, BusinessRuleError) else "TRANSIENT"


def _code(error: BaseException) -> str | None:
    code = error.problem.code if isinstance(error, PayloadRefusedError) else _attribute(error, "code")
    return storable(code, 255) if isinstance(code, str) else None


def _attribute(error: BaseException, name: str) -> Any:
    """What a handler's error says beyond its message; a property that raises says nothing."""
    if not isinstance(error, _CODED):
        return None
    try:
        return getattr(error, name, None)
    except Exception:
        return None


MOST_MEMBERS = 3
"""Members of a group that its message names; its traceback has more of them."""

_CODED = (BusinessRuleError, PermanentCommandError, TransientCommandError)
_ROOMY = PayloadLimits(data_bytes=1024 * 1024)
