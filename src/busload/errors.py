"""Every exception busload raises on purpose.

BusloadError
├── InvalidCommandError (also ValueError)     refused before anything was written; `problems` says what and where
├── DuplicateCommandError                     a command_id is already taken in its domain
├── DuplicateTaskError                        an open command holds the task key
├── BatchNotFoundError                        no such batch in this domain
├── BatchSealedError                          the batch takes no more commands
├── CommandNotFoundError                      no such command in this domain
├── CommandFailedError                        the command that was waited for has failed
│   └── CommandCanceledError                  or was canceled
├── JobNotFoundError                          no such job in this domain
├── ScheduleNotFoundError                     no such schedule
├── InvalidOperationError                     the thing exists, but not in the state this needs
│   └── HandlerAlreadyRegisteredError
├── SchemaOutdatedError                       the database is older than this release
├── OutcomeUnknownError                       the connection broke while COMMIT was under way
├── DatabaseUnavailableError (also psycopg.OperationalError): PostgreSQL cannot be reached, or does not answer
├── NothingWrittenError (also the psycopg.Error behind it): PostgreSQL refused a write
│   └── DatabaseReadOnlyError                 a standby, or a transaction in which nothing may be written
├── LockWaitTimeoutError                      somebody's open transaction holds what was to be written; nothing was
├── DatabaseUnusableError                     the database cannot be used as it is (version, encoding, no server)
├── DispatchIncompleteError                   a large batch is written up to a checkpoint; the call can be repeated
├── PartlyDoneError                           a call of many transactions stopped after some of them; it can be repeated
├── TransportError                            about the broker
│   ├── TransportMisconfiguredError           a person must change the URL, a right or a queue
│   ├── TransportUnavailableError             it cannot be reached now
│   └── PublishError                          some messages were not confirmed; `refused` says which and why
├── UncommittedError                          a handler has completed its command in a transaction that did not commit
└── SupersededError                           this execution lost its command to another one

For handlers to raise:
├── TransientCommandError                     try again later
├── RateLimitedError                          the receiver refuses calls for now: no attempt is burnt
├── SnoozeError                               run it again later: no attempt is burnt; `ctx.snooze` raises it
├── PermanentCommandError                     a person must look: troubleshooting
└── BusinessRuleError                         a final, expected no: FAILED
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg

if TYPE_CHECKING:
    from busload.dispatch.strategy import DispatchReport


def kind_of(value: object) -> str:
    """What a value is, for people: `an int`, `a psycopg.Connection`, `an asyncpg.connection.Connection`."""
    if value is None:
        return "None"
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"  # u sounds like "you" in uuid and uvicorn


class BusloadError(Exception):
    """The root of all errors that busload raises on purpose."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with an input: what was found, where, and the limit it broke."""

    code: str
    path: str
    message: str
    index: int | None = None
    limit: int | None = None

    def __str__(self) -> str:
        where = self.path if self.index is None else f"[{self.index}]{self.path}"
        return f"{self.code} at {where or '/'}: {self.message.removesuffix('.')}"


class InvalidCommandError(BusloadError, ValueError):
    """An input was refused before anything was written.

    `problems` holds the first hundred offenders with code, path and index; `total` counts all of them. The message of a
    call that `writes` says that nothing was written; of a question or a declaration nobody would have thought so. If
    the command was not `listed` with others, the message names no place in a list.
    """

    def __init__(
        self, problems: Sequence[Problem], total: int | None = None, *, writes: bool = True, listed: bool = True
    ) -> None:
        self.problems = tuple(problems[:100])
        self.total = len(problems) if total is None else total
        named = [problem if listed else replace(problem, index=None) for problem in self.problems[:3]]
        shown = "; ".join(map(str, named))
        more = f" (and {self.total - 3} more)" if self.total > 3 else ""
        super().__init__(f"{shown}{more}." + (" Nothing was written." if writes else ""))

    @property
    def code(self) -> str:
        return self.problems[0].code


class DuplicateCommandError(BusloadError):
    """A `command_id` is unique in its domain for ever, also after the command has finished."""

    def __init__(self, domain: str, command_ids: Sequence[UUID], *, in_the_list: bool = False) -> None:
        shown = ", ".join(str(command_id) for command_id in command_ids[:3])
        more = f" and {len(command_ids) - 3} more" if len(command_ids) > 3 else ""
        if in_the_list:
            message = f"The list holds command {shown}{more} more than once. Nothing was written; give each its own id."
        else:
            message = (
                f"Domain {domain!r} already has command {shown}{more}. Nothing was written; "
                "look at it with `busload command show`, or send with another command_id."
            )
        super().__init__(message)
        self.domain, self.command_ids = domain, tuple(command_ids)


class DuplicateTaskError(BusloadError):
    """A task key is held by a command that is open, or was sent within the window of its `Dedup`.

    `holders` names the command of each key.
    """

    def __init__(self, domain: str, holders: Mapping[str, UUID]) -> None:
        [(task_key, command_id), *others] = holders.items()
        more = f" (and {len(others):,} more of these keys)" if others else ""
        super().__init__(
            f"In domain {domain!r} the task {task_key!r:.200} is held by command {command_id}{more}. Nothing was "
            'written; wait until it has ended, or send with Dedup(on_conflict="skip").'
        )
        self.domain, self.holders = domain, dict(holders)


class BatchNotFoundError(BusloadError):
    def __init__(self, domain: str, batch_id: UUID) -> None:
        super().__init__(
            f"There is no batch {batch_id} in domain {domain!r}. "
            "Check the domain, or list what there is with `busload batch ls`."
        )
        self.domain, self.batch_id = domain, batch_id


class BatchSealedError(BusloadError):
    def __init__(self, domain: str, batch_id: UUID, *, canceled: bool = False, of_jobs: bool = False) -> None:
        super().__init__(
            f"Batch {batch_id} in domain {domain!r} is a batch of jobs, which takes no commands: each stage of a job "
            "has a batch of its own. Put the command into a stage, or send it without a batch."
            if of_jobs
            else f"Batch {batch_id} in domain {domain!r} was canceled before all its commands were written, and takes "
            "no more. If they are to run after all, create a batch with another batch_id."
            if canceled
            else f"Batch {batch_id} in domain {domain!r} is sealed and takes no more commands. "
            "Open a batch with `open_batch` to add commands over time."
        )
        self.domain, self.batch_id = domain, batch_id


class CommandNotFoundError(BusloadError):
    def __init__(self, domain: str, command_id: UUID) -> None:
        super().__init__(
            f"There is no command {command_id} in domain {domain!r}. Check the domain and the id, and that the "
            "transaction which sends it is committed."
        )
        self.domain, self.command_id = domain, command_id


class CommandFailedError(BusloadError):
    """The command that `wait_command` waited for did not complete; `status` says where it is.

    `error_type`, `code` and `error_message` are those of the last error that its handler has raised.
    """

    def __init__(
        self,
        domain: str,
        command_id: UUID,
        status: str,
        *,
        error_type: str | None = None,
        code: str | None = None,
        error_message: str | None = None,
    ) -> None:
        why = ": ".join(text for text in (code or error_type, error_message) if text)
        super().__init__(f"Command {command_id} in domain {domain!r} is {status}" + (f": {why}" if why else "."))
        self.domain, self.command_id, self.status = domain, command_id, status
        self.error_type, self.code, self.error_message = error_type, code, error_message


class CommandCanceledError(CommandFailedError):
    """The command that `wait_command` waited for was canceled. `error_message` has the reason."""


class JobNotFoundError(BusloadError):
    def __init__(self, domain: str, job_id: UUID) -> None:
        super().__init__(
            f"There is no job {job_id} in domain {domain!r}. "
            "Check the domain, or list what there is with `busload job ls`."
        )
        self.domain, self.job_id = domain, job_id


class ScheduleNotFoundError(BusloadError):
    def __init__(self, name: str) -> None:
        super().__init__(
            f"There is no schedule {name!r:.200}. List what there is with `busload schedule ls`. A schedule that is "
            "declared in code is there once a worker of that code has started, or after `busload schedule sync`."
        )
        self.name = name


class InvalidOperationError(BusloadError):
    """What was asked for does not fit the state things are in; the message says which state was needed."""


class HandlerAlreadyRegisteredError(InvalidOperationError):
    def __init__(self, domain: str, command_type: str, existing: str) -> None:
        super().__init__(
            f"{domain!r} / {command_type!r} is already handled by {existing}, which stays. "
            "Register one handler per command type."
        )
        self.domain, self.command_type = domain, command_type


class SchemaOutdatedError(BusloadError):
    """The database lacks busload's schema, or a part of it. `database` is its name if the call joins a transaction."""

    def __init__(self, *, found: int, needed: int, database: str | None = None) -> None:
        schema = f"busload schema version {found}" if found else "no busload schema yet"
        holds = f"holds {schema}, this release needs {'' if found else 'schema '}version {needed}"
        if database is None:
            message = f"The database {holds}. Run"
        else:
            message = (
                f"The connection that this call joins is to database {database!r}, which {holds}. If you meant another "
                "database, pass a connection to that one. Else run"
            )
        super().__init__(
            f"{message} `busload schema migrate`, in a Django project `manage.py migrate`, or call migrate() of the "
            "bus, before sending or starting workers."
        )
        self.found, self.needed, self.database = found, needed, database


class OutcomeUnknownError(BusloadError):
    """The connection broke while COMMIT was under way: what was sent may or may not exist.

    Repeat the call with the ids given here. It is then accepted exactly once: either now, or the repetition
    raises `DuplicateCommandError` (for a batch or a job `InvalidOperationError`), which proves that the first call was
    accepted.
    """

    def __init__(
        self, *, batch_id: UUID | None = None, command_ids: Sequence[UUID] = (), job_id: UUID | None = None
    ) -> None:
        todo = "Repeat the call with the same ids: it will be accepted exactly once."
        if job_id:
            what = f"job {job_id}"
        elif batch_id:
            what = f"batch {batch_id}"
        elif len(command_ids) == 1:
            what = f"command {command_ids[0]}"
        elif command_ids:
            what = f"a call of {len(command_ids):,} commands"
        else:
            what, todo = "this call", "Check whether it was, or repeat the call: at worst it is there twice."
        super().__init__(
            f"The connection broke while {what} was being committed, so nobody can say whether that happened. {todo}"
        )
        self.batch_id, self.command_ids, self.job_id = batch_id, tuple(command_ids), job_id


class DatabaseUnavailableError(BusloadError, psycopg.OperationalError):
    """PostgreSQL cannot be reached now, does not answer, or no connection came free in time. Calling again may work."""


class NothingWrittenError(BusloadError):
    """PostgreSQL has failed or refused a write of ours, and nothing of the call was written.

    It is also an instance of the psycopg error that caused it, which is its `__cause__`: so `except
    psycopg.errors.InsufficientPrivilege` finds it. On a connection of yours (`conn=`) psycopg's own errors are raised,
    but for `DatabaseReadOnlyError`.
    """


class DatabaseReadOnlyError(NothingWrittenError, psycopg.errors.ReadOnlySqlTransaction):
    """The transaction may not write: its server is a standby, or it was begun as read-only, as it may be by default.

    `database` is the name of the database. `standby` says whether its server is one.
    """

    def __init__(self, database: str, *, standby: bool, joined: bool) -> None:
        connection = "The connection that this call joins" if joined else "The connection of the bus"
        if standby:
            found = f"is to database {database!r} on a standby, which has a read-only transaction for everybody"
            todo = "Connect to the primary: name all servers in the DSN and add target_session_attrs=read-write."
        else:
            found = f"has a read-only transaction of database {database!r}"
            todo = "Begin one as READ WRITE, or, if nobody began it as READ ONLY, see default_transaction_read_only."
        super().__init__(f"{connection} {found}. Nothing of this call was written. {todo}")
        self.database, self.standby = database, standby


def nothing_written(error: psycopg.Error) -> psycopg.Error:
    """The same error, which says that nothing was written."""
    if isinstance(error, BusloadError):
        return error
    found = str(error).strip() or type(error).__name__
    kind = type(error)
    both = _BOTH.setdefault(kind, type(kind.__name__, (NothingWrittenError, kind), {"__module__": kind.__module__}))
    return both(f"{found.removesuffix('.')}. Nothing of this call was written.")


_BOTH: dict[type[psycopg.Error], type[psycopg.Error]] = {}


@dataclass(frozen=True, slots=True)
class LockHolder:
    """A session whose open transaction may hold what was waited for. What this role may not see of it is None."""

    pid: int
    application_name: str | None
    state: str | None
    since: datetime | None

    def __str__(self) -> str:
        name = f" ({self.application_name})" if self.application_name else ""
        since = f", in a transaction since {self.since:%Y-%m-%d %H:%M:%S %Z}" if self.since else ""
        return f"session {self.pid}{name}{since}" + (f", {self.state}" if self.state else "")


class LockWaitTimeoutError(BusloadError):
    """A task key, command, batch, job or event was waited for, and the transaction that holds it did not end in time.

    Nothing was written, so the call can be repeated. `holders` are the sessions that may hold it, the oldest first.
    """

    def __init__(self, waited: timedelta, holders: Sequence[LockHolder]) -> None:
        who = "; or ".join(map(str, holders)) or "transactions that followed each other"
        super().__init__(
            f"Waited {waited.total_seconds():g} s for a task key, command, batch, job or event that an open "
            f"transaction holds: most likely {who}. Nothing was written. End that transaction and repeat the call."
        )
        self.waited, self.holders = waited, tuple(holders)


class DatabaseUnusableError(BusloadError):
    """The database cannot be used as it is; the message says what was found and what is needed."""


class DispatchIncompleteError(BusloadError):
    """A creation in checkpoints stopped at one that failed. Those before it are written, run, and are published.

    Repeat the call with this `batch_id` and the same commands: it goes on where it stopped. `report` is a
    `DispatchReport`.
    """

    def __init__(self, batch_id: UUID, report: DispatchReport) -> None:
        total = "those of an iterator" if report.total_tasks is None else f"{report.total_tasks:,}"
        why = f": {report.error.removesuffix('.')}" if report.error else ""
        written = report.database_tasks
        commands, are = ("command", "is") if written == 1 else ("commands", "are")
        super().__init__(
            f"Of batch {batch_id} {written:,} {commands} of {total} {are} written; then it stopped{why}. "
            "What is written runs. To write the rest, repeat the call with the same commands and "
            f"batch_id=UUID('{batch_id}')."
        )
        self.batch_id, self.report = batch_id, report


class PartlyDoneError(BusloadError):
    """A call that is many transactions stopped after some of them, which stay.

    `commands` is how many commands they were about; of the transaction that failed nobody may know. Repeat the call: it
    goes on with the rest. `__cause__` is why it stopped.
    """

    def __init__(self, done: str, commands: int, why: BaseException, *, todo: str) -> None:
        said = " ".join(str(why).split()).removesuffix(".") or type(why).__name__
        super().__init__(f"{done}. Then it stopped: {said}. {todo}")
        self.commands = commands


class TransportError(BusloadError):
    """About the broker. Nothing is lost by it: the database is the truth."""


class TransportMisconfiguredError(TransportError, ValueError):
    """It will not work before a person has changed the URL, a right, or a queue that exists with other settings."""


class TransportUnavailableError(TransportError):
    """The broker cannot be reached now; what is to be published waits in the outbox."""


class RefusalReason(StrEnum):
    """Why a message was not confirmed."""

    UNREACHABLE = "UNREACHABLE"
    THROTTLED = "THROTTLED"
    UNROUTABLE = "UNROUTABLE"
    TOO_LARGE = "TOO_LARGE"
    REFUSED = "REFUSED"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why one message was not confirmed. `after` are seconds the broker asked us to wait."""

    reason: RefusalReason
    message: str
    after: float | None = None


class PublishError(TransportError):
    """Some messages were not confirmed: `refused` has them by index. The broker may hold them all the same."""

    def __init__(self, refused: Mapping[int, Refusal]) -> None:
        [first, *others] = refused.values()
        more = f", and {len(others)} more" if others else ""
        super().__init__(f"The broker did not confirm a message: {first.reason}, {first.message}{more}.")
        self.refused = dict(refused)


class SupersededError(BusloadError):
    """This execution no longer holds its command: the lease was lost and another worker may run it.

    Raised out of `ctx.transaction()`, so that the handler's writes are rolled back with it, and by a tracker. Also
    raised by `ctx.complete()`, there too if this execution has completed its command already in another transaction.
    """


class UncommittedError(BusloadError):
    """A handler has called `ctx.complete(conn=...)` and returned, but its transaction was not committed by then."""

    def __init__(self) -> None:
        super().__init__(
            "The handler completed its command by ctx.complete(conn=...), and that transaction was rolled back, or was "
            "not committed before the handler returned. Commit it in the handler, or raise."
        )


class HandlerError(BusloadError):
    """What a handler says about its failure: a message, a code for programs, details for people."""

    def __init__(self, message: str = "", *, code: str | None = None, details: Any = None) -> None:
        super().__init__(message)
        self.code, self.details = code, details


def _seconds(after: timedelta | float, call: str) -> float:
    seconds = after.total_seconds() if isinstance(after, timedelta) else after
    if type(seconds) not in (int, float) or not 0 <= seconds < 10**9:
        raise ValueError(f"{call} wants seconds from 0 on or a timedelta, found {after!r:.80}.")
    return float(seconds)


class TransientCommandError(HandlerError):
    """It may work later: retried under the handler's retry policy.

    With `after` (seconds, or a timedelta) the next attempt waits so long, whatever the policy says. How many attempts
    there are, the policy says.
    """

    after: float | None = None

    def __init__(
        self,
        message: str = "",
        *,
        after: timedelta | float | None = None,
        code: str | None = None,
        details: Any = None,
    ) -> None:
        super().__init__(message, code=code, details=details)
        self.after = None if after is None else _seconds(after, "TransientCommandError(after=...)")


class RateLimitedError(HandlerError):
    """The receiver wants fewer calls: all workers wait `after` (seconds, or a timedelta), and no attempt is burnt."""

    def __init__(
        self,
        message: str = "The receiver refuses calls for now.",
        *,
        after: timedelta | float | None = None,
        code: str | None = None,
        details: Any = None,
    ) -> None:
        super().__init__(message, code=code, details=details)
        self.after = None if after is None else _seconds(after, "RateLimitedError(after=...)")


class SnoozeError(HandlerError):
    """The handler wants its command to run again `after` so long (seconds, or a timedelta); no attempt is burnt."""

    def __init__(self, after: timedelta | float) -> None:
        self.after = _seconds(after, "snooze()")
        super().__init__(f"The handler has put its command off for {self.after:g} s.")


class PermanentCommandError(HandlerError):
    """It will not work without a person: goes to troubleshooting at once."""


class BusinessRuleError(HandlerError):
    """The business says no: the command ends as FAILED, without retries and without troubleshooting."""
