"""What a command is: what people send, what a handler gets, and what is told about it afterwards."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any
from uuid import UUID

import msgspec

from busload.domain.ids import ascending_ids
from busload.domain.payload import PayloadLimits, PayloadRefused, encode
from busload.errors import DuplicateCommandError, InvalidCommandError, Problem

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.\-]*\Z")
RESERVED = ("busload.Group", "busload.Exhausted")
"""Types of commands that buffers make: one without its events would be none."""
PRIORITIES = range(-32768, 32768)
MAX_ATTEMPTS = range(1, 32768)
FARTHEST = timedelta(days=36525)


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
    the reply.
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


class SendResult(msgspec.Struct, frozen=True, gc=False):
    """The id of the command that was sent, and whether this call created it."""

    command_id: UUID
    created: bool


class Command(msgspec.Struct):
    """What a handler gets."""

    command_id: UUID
    domain: str
    command_type: str
    data: Any
    batch_id: UUID | None
    task_key: str | None
    correlation_id: UUID
    reply_to: str | None
    priority: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class CommandMetadata:
    """A command and how far it has come."""

    command_id: UUID
    domain: str
    command_type: str
    data: Any
    batch_id: UUID | None
    task_key: str | None
    correlation_id: UUID
    reply_to: str | None
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


@dataclass(frozen=True, slots=True)
class TroubleshootingItem:
    """A command that waits for a person: the original data, why it is here and since when."""

    command_id: UUID
    domain: str
    command_type: str
    data: Any
    batch_id: UUID | None
    task_key: str | None
    correlation_id: UUID
    reply_to: str | None
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
    collector, which would walk through all of them again and again, out of it.
    """

    command_id: UUID
    command_type: str
    data: str
    reply_to: str | None
    correlation_id: UUID | None
    task_key: str | None
    priority: int
    run_at: datetime | None
    max_attempts: int | None


@dataclass(frozen=True, slots=True)
class InputLimits:
    """What the parts of a command may measure."""

    payload: PayloadLimits = PayloadLimits()
    name_bytes: int = 255
    task_key_bytes: int = 512


def check_all(domain: str, commands: Iterable[BatchCommand], limits: InputLimits) -> list[NewCommand]:
    """Check a whole list and name every offender; nothing has been written when this raises."""
    problems = check_name(domain, "domain", limits)
    if type(commands) is not list:
        refuse(problems + _problems_of_list(commands))
    known_names: set[str] = set()
    checked: list[NewCommand] = []
    chosen: list[UUID] = []
    fresh = ascending_ids()
    for index, command in enumerate(commands):
        # A million may come, nearly all of them like this: asked in place, for the price of one call.
        plain = (
            type(command) is BatchCommand
            and type(command.command_type) is str
            and command.command_type in known_names
            and command.command_id is None
            and command.reply_to is None
            and command.correlation_id is None
            and command.task_key is None
            and type(command.priority) is int
            and command.priority == 0
            and command.max_attempts is None
            and command.run_at is None
        )
        found = [] if plain else _problems_of(command, known_names, limits)
        if not found:
            try:
                data = encode(command.data, limits.payload)
            except PayloadRefused as refused:
                found = [refused.problem]
        if found:
            problems += [Problem(p.code, p.path, p.message, index, p.limit) for p in found]
            continue
        command_id = command.command_id
        if command_id is None:
            command_id = next(fresh)
        else:
            chosen.append(command_id)
        checked.append(
            NewCommand(
                command_id,
                command.command_type,
                data,
                command.reply_to,
                command.correlation_id,
                command.task_key,
                command.priority,
                # Long past means now; some zones put year 1 before the first one that comes back as a datetime.
                None if command.run_at is None or command.run_at.year == 1 else command.run_at,
                command.max_attempts,
            )
        )
    if problems:
        raise InvalidCommandError(problems)
    refuse_repeated_ids(domain, chosen)
    return checked


def check_name(name: object, path: str, limits: InputLimits) -> list[Problem]:
    """Names of domains and types: ASCII letters, digits, `_`, `.` and `-`, beginning with a letter."""
    if not isinstance(name, str) or not NAME.match(name):
        wanted = "wanted a letter, then letters, digits, '_', '.' or '-'"
        return [Problem("INVALID_NAME", f"/{path}", f"found {_shown(name)}, {wanted}")]
    if len(name) > limits.name_bytes:
        message = f"found {len(name)} bytes, at most {limits.name_bytes} are allowed"
        return [Problem("INVALID_NAME", f"/{path}", message, limit=limits.name_bytes)]
    return []


def check_text(text: object, path: str, max_bytes: int) -> list[Problem]:
    """Free text that is stored in a column: task keys, batch names, reasons, operators."""
    if not isinstance(text, str) or not text or "\0" in text:
        return [Problem("INVALID_TEXT", f"/{path}", f"found {_shown(text)}, wanted text without NUL that is not empty")]
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        return [Problem("LONE_SURROGATE", f"/{path}", f"found {_shown(text)}, wanted text that UTF-8 can hold")]
    if size > max_bytes:
        return [
            Problem("TOO_LONG", f"/{path}", f"found {size} bytes, at most {max_bytes} are allowed", limit=max_bytes)
        ]
    return []


def check_uuid(value: object, path: str) -> list[Problem]:
    if isinstance(value, UUID) and value.int:
        return []
    instead = "; pass uuid.UUID(...) of the text" if isinstance(value, str) and len(value) == 36 else ""
    return [Problem("INVALID_ID", f"/{path}", f"found {_shown(value)}, wanted a uuid.UUID that is not nil{instead}")]


def check_number(value: object, path: str, allowed: range) -> list[Problem]:
    if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
        message = f"found {_shown(value)}, wanted a whole number from {allowed[0]} to {allowed[-1]}"
        return [Problem("INVALID_OPTION", f"/{path}", message)]
    return []


def check_time(value: object, path: str) -> list[Problem]:
    if not isinstance(value, datetime):
        return [Problem("INVALID_TIME", f"/{path}", f"found {_shown(value)}, wanted a datetime")]
    if value.tzinfo is None or value.utcoffset() is None:
        message = f"found {value.isoformat()} without a time zone; use e.g. datetime.now(UTC)"
        return [Problem("NAIVE_DATETIME", f"/{path}", message)]
    if value - datetime.now(UTC) > FARTHEST:
        return [Problem("INVALID_TIME", f"/{path}", f"found {value.isoformat()}, which is over 100 years away")]
    return []


def refuse_repeated_ids(domain: str, command_ids: Sequence[UUID]) -> None:
    if len(set(command_ids)) < len(command_ids):
        repeated = [command_id for command_id, times in Counter(command_ids).items() if times > 1]
        raise DuplicateCommandError(domain, repeated, in_the_list=True)


def refuse(problems: Sequence[Problem], *, writes: bool = True) -> None:
    """Raise if there are any; `writes` is false for a question or a declaration."""
    if problems:
        raise InvalidCommandError(problems, writes=writes)


def _problems_of(command: object, known_names: set[str], limits: InputLimits) -> list[Problem]:
    if not isinstance(command, BatchCommand):
        return [Problem("INVALID_OPTION", "", f"found {_shown(command)}, wanted a BatchCommand")]
    problems: list[Problem] = []
    if not isinstance(command.command_type, str) or command.command_type not in known_names:
        problems = check_name(command.command_type, "command_type", limits)
        if not problems and command.command_type in RESERVED:
            message = f"found {command.command_type!r}, which busload sends itself; choose another name"
            problems = [Problem("INVALID_NAME", "/command_type", message)]
        if not problems:
            known_names.add(command.command_type)
    if command.command_id is not None:
        problems += _problems_of_id(command)
    if command.reply_to is not None:
        problems += check_name(command.reply_to, "reply_to", limits)
    if command.correlation_id is not None:
        problems += check_uuid(command.correlation_id, "correlation_id")
    if command.task_key is not None:
        problems += check_text(command.task_key, "task_key", limits.task_key_bytes)
    if type(command.priority) is not int or command.priority != 0:
        problems += check_number(command.priority, "priority", PRIORITIES)
    if command.max_attempts is not None:
        problems += check_number(command.max_attempts, "max_attempts", MAX_ATTEMPTS)
    if command.run_at is not None:
        problems += check_time(command.run_at, "run_at")
    return problems


def _problems_of_list(commands: object) -> list[Problem]:
    if isinstance(commands, Iterable) and not isinstance(commands, str | bytes | Mapping):
        return []
    return [Problem("INVALID_OPTION", "/commands", f"found {_shown(commands)}, wanted a list of BatchCommand")]


def _problems_of_id(command: BatchCommand) -> list[Problem]:
    """The id stands before the data, which newcomers put in its place."""
    problems = check_uuid(command.command_id, "command_id")
    if problems and command.data is None and not isinstance(command.command_id, UUID | str):
        message = f"found {_shown(command.command_id)}, wanted a uuid.UUID; data is the third parameter: pass data=..."
        return [Problem("INVALID_ID", "/command_id", message)]
    return problems


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else text[:77] + "..."
