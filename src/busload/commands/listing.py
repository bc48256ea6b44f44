"""Search of commands by what they are, newest first: each page looks at so many commands and no more."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, TypedDict
from uuid import UUID

from busload.commands.checks import choice, given, problems_of, refuse, wrong, wrong_text, wrong_time
from busload.commands.command import CommandMetadata, CommandStatus, CommandStatusName, refuse_unknown
from busload.commands.search import command_of_row
from busload.postgres.plan import Plan, execute
from busload.postgres.statements import statements
from busload.settings import InputLimits

SQL = statements(__name__)

MOST_EXAMINED = 20_000
"""Commands that a page looks at, at most."""

MOST_TEXTS = 8_000
"""Commands that a page looks at, at most, if it has to read their errors."""

PLAIN = re.compile(r"[A-Za-z0-9 _.,:;()=+*#@!?%-]+", re.ASCII)
"""A text that stands in JSON as it is, within one value: errors in which it does not occur need not be parsed."""

NEWEST = 2**63 - 1
"""Where the first page begins."""

LONGEST_TRANSACTION = timedelta(hours=1)
"""A command is dated by the begin of its transaction, and numbered when it is written: so much may lie between."""

PLACES = {
    CommandStatus.PENDING: SQL.queued,
    CommandStatus.SCHEDULED: SQL.scheduled,
    CommandStatus.PENDING_QUEUE: SQL.unpublished,
    CommandStatus.PENDING_RETRY: SQL.unpublished,
    CommandStatus.IN_PROGRESS: SQL.running,
    CommandStatus.IN_TROUBLESHOOTING_QUEUE: SQL.parked,
}
"""Where commands of a status are found without looking at all others."""


@dataclass(frozen=True, slots=True)
class CommandPage:
    """Some commands, newest first, and where the next page begins.

    A page may be short, or empty, though there are more: then it has looked at as many commands as a page may. It was
    the last one only if `next` is None.
    """

    commands: tuple[CommandMetadata, ...]
    next: str | None
    """What to pass as `after` for the next page."""
    ids: tuple[int, ...] = field(default=(), repr=False, compare=False)
    """Where the next page would begin if it began behind each of the commands."""

    def __iter__(self) -> Iterator[CommandMetadata]:
        return iter(self.commands)

    def __len__(self) -> int:
        return len(self.commands)


class CommandFilter(TypedDict, total=False):
    """What commands must be that are listed; all that is given must hold."""

    status: CommandStatus | CommandStatusName | None
    """Where they are."""
    command_type: str | None
    """Of which type."""
    batch_id: UUID | None
    """Of which batch."""
    task_key: str | None
    """Of which task."""
    created_after: datetime | None
    """Sent then or later; the time must know its zone."""
    created_before: datetime | None
    """Sent earlier than that; the time must know its zone."""
    error: str | None
    """With a last error in whose type, code or message this text occurs; capitals do not matter."""


def list_commands(
    limits: InputLimits, domain: str | None, wanted: CommandFilter, *, limit: int, after: str | None
) -> Plan[CommandPage]:
    """Check what is wanted, and plan to find a page of it."""
    refuse_unknown("list_commands", wanted, CommandFilter)
    status = choice(CommandStatus, wanted.get("status"))
    filters: dict[str, Any] = {"domain": domain, **dict.fromkeys(CommandFilter.__annotations__), **wanted}
    times = given(**{name: filters[name] for name in ("created_after", "created_before")})
    problems = problems_of(limits, limit=limit, **given(domain=domain, batch_id=filters["batch_id"]))
    problems += problems_of(limits, command_type=filters["command_type"], task_key=filters["task_key"])
    problems += [problem for name, time in times.items() for problem in wrong_time(time, name)]
    if filters["error"] is not None:
        problems += wrong_text(filters["error"], "error", 4096)
    if after is not None and not (isinstance(after, str) and after.isdecimal() and int(after) <= NEWEST):
        problems.append(wrong(after, "after", "the `next` of the page before"))
    refuse(problems, writes=False)
    filters["status"] = status and status.value
    return _page(_statement(status, wanted), filters, limit, NEWEST if after is None else int(after))


def _statement(status: CommandStatus | None, wanted: CommandFilter) -> bytes:
    """The statement that reads the fewest commands to find those that are wanted."""
    if wanted.get("task_key") is not None:
        return SQL.of_task
    if wanted.get("batch_id") is not None:
        return SQL.of_batch
    return SQL.any if status is None else PLACES.get(status, SQL.any)


def _page(statement: bytes, filters: dict[str, Any], limit: int, after: int) -> Plan[CommandPage]:
    most = MOST_EXAMINED if filters["error"] is None else min(MOST_EXAMINED, MOST_TEXTS)
    plain = filters["error"] is not None and PLAIN.fullmatch(filters["error"]) is not None
    rows = yield from execute(statement, **filters, plain=plain, limit=limit, after=after, most=most)
    *_, examined, last, newest = rows[0]
    found = [(id, command_of_row(*row)) for *row, id, _, _, _ in rows if id is not None]
    begin = None
    if len(found) == limit:
        begin = found[-1][0] if found else after
    elif examined == most and not _is_past(newest, filters["created_after"]):
        begin = last
    ids = tuple(id for id, _ in found)
    return CommandPage(tuple(command for _, command in found), None if begin is None else str(begin), ids)


def _is_past(newest: datetime | None, created_after: datetime | None) -> bool:
    """Whether all commands that come now were sent before that."""
    return newest is not None and created_after is not None and newest < created_after - LONGEST_TRANSACTION
