"""What a command is: what people send, what a handler gets, and what is told about it afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, Literal, TypedDict
from uuid import UUID

import msgspec

from busload.commands.dedup import Dedup

if TYPE_CHECKING:  # a default, so that `Command` alone is `Command[Any]`; at run time nobody needs it
    from typing_extensions import TypeVar

    Data = TypeVar("Data", default=Any)
else:
    from typing import TypeVar

    Data = TypeVar("Data")

CommandStatusName = Literal[
    "PENDING_QUEUE",
    "PENDING_RETRY",
    "SCHEDULED",
    "PENDING",
    "IN_PROGRESS",
    "COMPLETED",
    "FAILED",
    "CANCELED",
    "IN_TROUBLESHOOTING_QUEUE",
]


class CommandStatus(StrEnum):
    """Where a command is."""

    PENDING_QUEUE = "PENDING_QUEUE"
    PENDING_RETRY = "PENDING_RETRY"
    SCHEDULED = "SCHEDULED"
    PENDING = "PENDING"
    IN_PROGRESS = "IN_PROGRESS"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELED = "CANCELED"
    IN_TROUBLESHOOTING_QUEUE = "IN_TROUBLESHOOTING_QUEUE"


@dataclass(slots=True)
class BatchCommand:
    """A command to be sent, alone or in a batch.

    `command_id` is yours or a new one; it is unique in its domain for ever. A higher `priority` runs earlier. `run_at`
    must know its time zone. `max_attempts` overrides the handler's retry policy. `reply_to` names the domain that gets
    the reply. `domain` is the domain that runs the command, if it is not that of the call: a command of a batch may
    run elsewhere, and its batch counts it all the same. `headers` are texts by name beside the data. `delay` says how
    long after it was written the command may run, instead of `run_at`.
    """

    command_type: str
    command_id: UUID | None = None
    data: Any = None
    reply_to: str | None = field(default=None, kw_only=True)
    correlation_id: UUID | None = field(default=None, kw_only=True)
    task_key: str | None = field(default=None, kw_only=True)
    priority: int = field(default=0, kw_only=True)
    run_at: datetime | None = field(default=None, kw_only=True)
    max_attempts: int | None = field(default=None, kw_only=True)
    domain: str | None = field(default=None, kw_only=True)
    expires_at: datetime | None = field(default=None, kw_only=True)
    headers: Mapping[str, str] | None = field(default=None, kw_only=True)
    delay: timedelta | float | None = field(default=None, kw_only=True)


class CommandOptions(TypedDict, total=False):
    """What may be said about a command, in every call that sends one."""

    command_id: UUID | None
    """The id of the command, unique in its domain for ever; a new one if it is left out."""
    task_key: str | None
    """The task that the command is for: `dedup` and `trace` go by it."""
    priority: int
    """A command of higher priority runs earlier; 0 if it is left out."""
    run_at: datetime | None
    """Do not run the command before this time, which must know its time zone."""
    delay: timedelta | float | None
    """Do not run the command until so long, in seconds if it is a number, after it was written: by the clock of the
    database. For a command that has no `run_at`."""
    expires_at: datetime | None
    """Cancel the command, with the reason EXPIRED, if it has not started by this time."""
    max_attempts: int | None
    """How often the command may be tried, instead of what the retry policy of its handler says."""
    reply_to: str | None
    """The domain that gets the reply."""
    correlation_id: UUID | None
    """An id that the reply and the handler get as well; that of the command if it is left out."""
    headers: Mapping[str, str] | None
    """Texts by name that are not part of the data, such as a tenant or a trace context: its handler gets them."""


class AddOptions(CommandOptions, total=False):
    """What may be said about a command that is added to an open batch."""

    domain: str | None
    """The domain that runs the command; that of the batch if it is left out."""


class SendOptions(CommandOptions, total=False):
    """What may be said where one command is sent."""

    dedup: Dedup | None
    """Send the command only if no other command holds its `task_key`; else the result names the holder."""
    batch_id: UUID | None
    """The open batch that the command joins. The total of the batch rises with it."""
    fair_by: str | None
    """Whose command it is, such as a tenant: of equal priority, those with different keys take turns."""


def new_command(
    call: str, command_type: str, data: Any, options: CommandOptions, known: type = CommandOptions
) -> BatchCommand:
    """The command that a call with these options sends; `known` are all options of the call."""
    try:
        return BatchCommand(command_type, data=data, **options)
    except TypeError:
        refuse_unknown(call, options, known)
        raise


def refuse_unknown(call: str, options: Mapping[str, object], known: type) -> None:
    """Refuse options that the call does not have; a type checker would have seen them."""
    names = known.__annotations__
    if unknown := [name for name in options if name not in names]:
        raise TypeError(f"{call}() has no option {unknown[0]!r}. Its options are {', '.join(sorted(names))}.")


class SendResult(msgspec.Struct, frozen=True, gc=False):
    """The id of the command that was sent, and whether this call created it."""

    command_id: UUID
    created: bool


class Command(msgspec.Struct, Generic[Data]):
    """What a handler gets. With `Command[T]` as annotation, its handler gets data of the type T."""

    command_id: UUID
    domain: str
    command_type: str
    data: Data
    batch_id: UUID | None
    task_key: str | None
    correlation_id: UUID
    reply_to: str | None
    priority: int
    created_at: datetime
    headers: dict[str, str] | None = None
    """Texts by name that were sent beside the data: those of its batch and its own, which win."""


@dataclass(frozen=True, slots=True)
class SentCommand:
    """A command as it was sent."""

    command_id: UUID
    domain: str
    command_type: str
    data: Any
    batch_id: UUID | None
    task_key: str | None
    correlation_id: UUID
    reply_to: str | None


@dataclass(frozen=True, slots=True)
class CommandMetadata(SentCommand):
    """A command and how far it has come."""

    priority: int
    created_at: datetime
    status: CommandStatus
    attempts: int
    max_attempts: int | None
    run_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    worker: str | None
    execution_id: UUID | None
    last_error_type: str | None
    last_error_code: str | None
    last_error_message: str | None
    result: Any
    last_traceback: str | None = None
    """Where the last error was raised, as Python prints it."""
    publish_attempts: int = 0
    """How often a broker was given a message about it, or should have been; 0 where PostgreSQL delivers."""
    last_publish_error: str | None = None
    """What the broker said when that failed last."""
    published_at: datetime | None = None
    """When the broker has confirmed the last message about it."""
    checkpoint: str | None = None
    """Of a batch that was created in checkpoints, the one that it came with: `<job>-cp-<n>`."""
    expires_at: datetime | None = None
    """When it is canceled if it has not started; None if it may always start, or has ended."""
    headers: dict[str, str] | None = None
    """Texts by name that were sent beside the data: those of its batch and its own, which win."""


@dataclass(frozen=True, slots=True)
class TroubleshootingItem(SentCommand):
    """A command that waits for a person: the original data, why it is here and since when."""

    reason: str
    attempts: int
    since: datetime
    last_error_type: str | None
    last_error_code: str | None
    last_error_message: str | None
    details: Any
    fingerprint: str
    """The same for all that failed for the same cause."""
    last_traceback: str | None = None
    """Where the last error was raised, as Python prints it."""


@dataclass(frozen=True, slots=True)
class TroubledDomain:
    """A domain in which commands wait for a person: how many, and since when the oldest and the newest of them."""

    domain: str
    count: int
    oldest: datetime
    newest: datetime


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """Something that happened to a command, or to a batch."""

    type: str
    at: datetime
    execution_id: UUID | None
    attempt: int | None
    worker: str | None
    operator: str | None
    batch_id: UUID | None
    details: Any


class NewCommand(msgspec.Struct, frozen=True, gc=False):
    """A `BatchCommand` that was checked: what goes into the table.

    A struct, because a million of them are made: it costs a third of a tuple with names, and leaves the garbage
    collector, which would walk through all of them again and again, out of it. For the same reason the id is a number:
    a million UUIDs would have the collector walk through the list of the caller as well.
    """

    id_as_int: int
    command_type: str
    data: str
    reply_to: str | None = None
    correlation_id: UUID | None = None
    task_key: str | None = None
    priority: int = 0
    run_at: datetime | None = None
    max_attempts: int | None = None
    domain: str | None = None
    """The domain that runs it, if that is not the domain of the call."""
    fair_by: str | None = None
    expires_at: datetime | None = None
    headers: str | None = None
    delay: timedelta | None = None

    @property
    def command_id(self) -> UUID:
        return UUID(int=self.id_as_int)


def by_domain(domain: str, commands: Sequence[NewCommand]) -> dict[str, list[NewCommand]]:
    """Commands by the domain that runs them; `domain` is that of the commands which have none of their own."""
    apart: dict[str, list[NewCommand]] = {}
    for command in commands:
        apart.setdefault(command.domain or domain, []).append(command)
    return apart
