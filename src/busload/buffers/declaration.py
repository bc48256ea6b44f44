"""What a buffer is: when its events leave, how many at a time, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias, TypedDict, get_args

from busload.commands.checks import FLAG, ZERO, Kind, between, refuse, whole, wrong, wrong_name, wrong_text
from busload.commands.command import refuse_unknown
from busload.errors import Problem
from busload.settings import InputLimits

GROUP = "busload.Group"
"""The type of the command that runs a group: its domain is the buffer's name, its command_id the group_id."""
EXHAUSTED = "busload.Exhausted"
"""The type of the command that runs the hook for a group whose attempts are used up."""

Merge: TypeAlias = Literal["keep_last", "keep_first"] | Callable[[Any, Any], Any]
OnExhausted: TypeAlias = Literal["troubleshoot", "delete"]

SIZES = whole(1, 100_000)
GROUPS = whole(1, 10_000)
AGES = between(ZERO, timedelta(days=366))
MERGES = Kind(
    '"keep_last", "keep_first" or a function of two payloads',
    lambda value: value in (None, "keep_last", "keep_first") or callable(value),
)
NAME_BYTES = 200
ENDS = Kind('"troubleshoot" or "delete"', lambda value: value in get_args(OnExhausted))


@dataclass(frozen=True, slots=True)
class BufferTable:
    """An application's own table as a buffer: which of its columns mean what.

    `busload buffer ddl` prints what a table lacks. `key` names the column that tells the subject of an event.
    """

    name: str
    id: str = "id"
    group_id: str = "group_id"
    created_at: str = "created_at"
    key: str | None = None


class BufferOptions(TypedDict, total=False):
    """What may be said about a buffer where it is declared."""

    size: int
    """How many events a group has at most; 1,000 if it is left out."""
    max_age: timedelta
    """A group leaves when its oldest event is this old; two minutes if it is left out."""
    max_groups: int
    """How many groups may wait in the queue for a worker; 20 if it is left out."""
    max_bytes: int | None
    """How many bytes of payload a group has at most."""
    partition_by: str | None
    """Events that differ in this key of their payload, or in this column, leave in different groups."""
    merge: Merge | None
    """Events of one key become one: "keep_last", "keep_first", or a function of the older and the newer payload."""
    archive: bool
    """Keep events that are done in `busload.buffer_archive`."""
    on_exhausted: OnExhausted
    """What becomes of events whose attempts are used up; "troubleshoot" if it is left out."""
    table: str | BufferTable | None
    """A table of your own that holds the events."""


@dataclass(frozen=True, slots=True)
class BufferSettings:
    """A buffer as it was declared; checked."""

    name: str
    size: int = 1000
    max_age: timedelta = timedelta(minutes=2)
    max_groups: int = 20
    max_bytes: int | None = None
    partition_by: str | None = None
    merge: Merge | None = None
    archive: bool = False
    on_exhausted: OnExhausted = "troubleshoot"
    table: BufferTable | None = None

    def __post_init__(self) -> None:
        problems = wrong_name(self.name, "name", InputLimits())
        problems += SIZES(self.size, "size")
        problems += GROUPS(self.max_groups, "max_groups")
        if self.max_bytes is not None:
            problems += whole(1, 2**40 - 1)(self.max_bytes, "max_bytes")
        problems += AGES(self.max_age, "max_age")
        if self.partition_by is not None:
            problems += wrong_text(self.partition_by, "partition_by", NAME_BYTES)
        problems += MERGES(self.merge, "merge")
        problems += FLAG(self.archive, "archive")
        problems += ENDS(self.on_exhausted, "on_exhausted")
        if self.table is not None:
            problems += self._problems_of_table()
        refuse(problems, writes=False)

    def _problems_of_table(self) -> list[Problem]:
        table: object = self.table
        if not isinstance(table, BufferTable):
            return [wrong(table, "table", "the name of a table or a BufferTable")]
        problems: list[Problem] = []
        for name in ("name", "id", "group_id", "created_at"):
            problems += wrong_text(getattr(table, name), f"table/{name}", NAME_BYTES)
        if table.key is not None:
            problems += wrong_text(table.key, "table/key", NAME_BYTES)
        elif self.merge is not None:
            problems.append(wrong(None, "table/key", "the column that tells the subject of an event, since it merges"))
        return problems


def declared(name: str, options: BufferOptions) -> BufferSettings:
    """The buffer that `bus.buffer(name, ...)` declares."""
    refuse_unknown("buffer", options, BufferOptions)
    table = options.get("table")
    settings: dict[str, Any] = {**options, "table": BufferTable(table) if isinstance(table, str) else table}
    return BufferSettings(name, **settings)
