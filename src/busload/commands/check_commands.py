"""How commands that somebody wants to send are checked: one or a whole list, before anything is written.

Each option of a command has its rule in `checks`. An error names every offender by its place in the list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

import msgspec

from busload.commands.checks import (
    DELAY,
    check,
    given,
    problems_of,
    refuse,
    shown,
    wrong_domain,
    wrong_headers,
    wrong_id,
    wrong_list,
    wrong_name,
    wrong_text,
    wrong_time,
)
from busload.commands.command import BatchCommand, NewCommand
from busload.commands.data_type import DataTypes, fit_all, is_model, plain_model
from busload.commands.dedup import Dedup
from busload.commands.headers import encode_headers
from busload.commands.ids import ascending_numbers
from busload.commands.payload import PayloadRefusedError, encode
from busload.errors import DuplicateCommandError, InvalidCommandError, Problem
from busload.settings import InputLimits, PayloadLimits

SENT_BY_BUFFERS = ("busload.Group", "busload.Exhausted")
"""Types of commands that only buffers make."""

NO_PRIORITY = 0
"""There is one int of this value, and neither False nor 0.0 is it: whoever has another one is looked at closely."""


def check_all(
    domain: str, commands: Iterable[BatchCommand], limits: InputLimits, types: DataTypes | None = None
) -> list[NewCommand]:
    """Check a whole list and name every offender; nothing has been written when this raises.

    `types` are those of data that are known, because handlers want them.
    """
    problems = wrong_domain(domain, "domain", limits)
    if type(commands) is not list:
        refuse(problems + wrong_list(commands, "commands", "a list of BatchCommand"))
    if types:
        commands, misfits = fit_all(domain, list(commands), types)
        problems += misfits
    known_names: set[str] = set()
    checked: list[NewCommand] = []
    chosen: list[UUID] = []
    elsewhere: dict[str, list[UUID]] = {}
    fresh = ascending_numbers()
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
            and command.priority is NO_PRIORITY
            and command.max_attempts is None
            and command.run_at is None
            and command.domain is None
            and command.expires_at is None
            and command.headers is None
            and command.delay is None
        )
        found = [] if plain else _problems_of_command(command, known_names, limits)
        if not found:
            try:
                data = encode(command.data, limits.payload)
            except PayloadRefusedError as refused:
                data, found = _encode_model(command.data, limits.payload, refused.problem)
        if found:
            problems += [Problem(p.code, p.path, p.message, index, p.limit) for p in found]
            continue
        if plain:
            checked.append(NewCommand(next(fresh), command.command_type, data))
            continue
        command_id, own = command.command_id, None if command.domain == domain else command.domain
        if command_id is not None:
            (chosen if own is None else elsewhere.setdefault(own, [])).append(command_id)
        checked.append(
            NewCommand(
                next(fresh) if command_id is None else command_id.int,
                command.command_type,
                data,
                command.reply_to,
                command.correlation_id,
                command.task_key,
                command.priority,
                # Long past means now; some zones put year 1 before the first one that comes back as a datetime.
                None if command.run_at is None or command.run_at.year == 1 else command.run_at,
                command.max_attempts,
                own,
                expires_at=command.expires_at,
                headers=encode_headers(command.headers),
                delay=_duration(command.delay),
            )
        )
    refuse(problems)
    refuse_repeated_ids(domain, chosen)
    for own, ids in elsewhere.items():
        refuse_repeated_ids(own, ids)
    return checked


def _encode_model(value: object, limits: PayloadLimits, problem: Problem) -> tuple[str, list[Problem]]:
    """The JSON text of data that is a model; if it is none, or cannot be stored, what is wrong with it."""
    if not is_model(value):
        return "", [problem]
    try:
        return encode(plain_model(value), limits), []
    except PayloadRefusedError as refused:
        return "", [refused.problem]


def _problems_of_command(command: object, known_names: set[str], limits: InputLimits) -> list[Problem]:
    if not isinstance(command, BatchCommand):
        return [Problem("INVALID_OPTION", "", f"found {shown(command)}, wanted a BatchCommand")]
    problems: list[Problem] = []
    if not isinstance(command.command_type, str) or command.command_type not in known_names:
        problems = wrong_name(command.command_type, "command_type", limits)
        if not problems and command.command_type in SENT_BY_BUFFERS:
            message = f"found {command.command_type!r}, which busload sends itself; choose another name"
            problems = [Problem("INVALID_NAME", "/command_type", message)]
        if not problems:
            known_names.add(command.command_type)
    if command.command_id is not None:
        problems += _problems_of_id(command)
    # Asked one by one, since every command of a batch with task keys comes here.
    if command.reply_to is not None:
        problems += problems_of(limits, reply_to=command.reply_to)
    if command.correlation_id is not None:
        problems += problems_of(limits, correlation_id=command.correlation_id)
    if command.task_key is not None:
        problems += wrong_text(command.task_key, "task_key", limits.task_key_bytes)
    if type(command.priority) is not int or command.priority != 0:
        problems += problems_of(limits, priority=command.priority)
    if command.max_attempts is not None:
        problems += problems_of(limits, max_attempts=command.max_attempts)
    if command.run_at is not None:
        problems += problems_of(limits, run_at=command.run_at)
    if command.domain is not None:
        problems += wrong_domain(command.domain, "domain", limits)
    if command.delay is not None:
        problems += _wrong_delay(command)
    if command.expires_at is not None:
        problems += _wrong_expiry(command.expires_at, command.run_at)
    if command.headers is not None:
        problems += wrong_headers(command.headers, "headers", limits)
    return problems


def _duration(delay: timedelta | float | None) -> timedelta | None:
    return timedelta(seconds=delay) if isinstance(delay, int | float) else delay


def _wrong_delay(command: BatchCommand) -> list[Problem]:
    """A command has a delay or a time; and it must be able to start before it expires."""
    if problems := DELAY(command.delay, "delay"):
        return problems
    if command.run_at is not None:
        message = f"found {shown(command.delay)}, but there is a run_at too; wanted one of them"
        return [Problem("INVALID_OPTION", "/delay", message)]
    expires_at, delay = command.expires_at, _duration(command.delay)
    known = expires_at is not None and not wrong_time(expires_at, "expires_at")
    if known and delay is not None and expires_at is not None and expires_at <= datetime.now(UTC) + delay:
        message = f"found {expires_at.isoformat()}, wanted a time after the delay of {delay}"
        return [Problem("INVALID_TIME", "/expires_at", message)]
    return []


def _wrong_expiry(expires_at: object, run_at: object) -> list[Problem]:
    """A command must be able to start before it expires."""
    problems = wrong_time(expires_at, "expires_at")
    if problems or not isinstance(expires_at, datetime):
        return problems
    if expires_at <= datetime.now(UTC):
        message = f"found {expires_at.isoformat()}, which has passed; wanted a time to come, or None"
        return [Problem("INVALID_TIME", "/expires_at", message)]
    if not wrong_time(run_at, "run_at") and isinstance(run_at, datetime) and expires_at <= run_at:
        message = f"found {expires_at.isoformat()}, wanted a time after run_at, {run_at.isoformat()}"
        return [Problem("INVALID_TIME", "/expires_at", message)]
    return []


def _problems_of_id(command: BatchCommand) -> list[Problem]:
    """The id stands before the data, which newcomers put in its place."""
    problems = wrong_id(command.command_id, "command_id")
    if problems and command.data is None and not isinstance(command.command_id, UUID | str):
        message = f"found {shown(command.command_id)}, wanted a uuid.UUID; data is the third parameter: pass data=..."
        return [Problem("INVALID_ID", "/command_id", message)]
    return problems


def check_one(
    limits: InputLimits,
    domain: str,
    command: BatchCommand,
    batch_id: UUID | None = None,
    dedup: Dedup | None = None,
    fair_by: str | None = None,
    types: DataTypes | None = None,
) -> NewCommand:
    """Check a command that is sent by itself, or into an open batch."""
    try:
        [checked] = check_all(domain, [command], limits, types)
    except InvalidCommandError as refused:
        raise InvalidCommandError(refused.problems, refused.total, listed=False) from None
    if batch_id is not None or dedup is not None:
        check(limits, **given(batch_id=batch_id), dedup=dedup)
    if dedup is not None and command.task_key is None:
        message = "found none, wanted the key that dedup is about; pass task_key=, or leave dedup out"
        raise InvalidCommandError([Problem("INVALID_OPTION", "/task_key", message)])
    if fair_by is not None:
        check_fair_by(limits, fair_by, batch_id)
        checked = msgspec.structs.replace(checked, fair_by=fair_by)
    return checked


def check_fair_by(limits: InputLimits, fair_by: str | None, batch_id: UUID | None) -> None:
    """Check the key of what is sent by itself. What joins a batch has that of the batch."""
    check(limits, fair_by=fair_by)
    if fair_by is not None and batch_id is not None:
        message = f"found {shown(fair_by)}, but commands of a batch take their turns by it; pass it to open_batch"
        raise InvalidCommandError([Problem("INVALID_OPTION", "/fair_by", message)])


def refuse_repeated_ids(domain: str, command_ids: Sequence[UUID]) -> None:
    """Refuse a list in which a command_id stands twice."""
    if len(set(command_ids)) < len(command_ids):
        repeated = [command_id for command_id, times in Counter(command_ids).items() if times > 1]
        raise DuplicateCommandError(domain, repeated, in_the_list=True)
