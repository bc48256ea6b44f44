"""What a buffer is: when its events leave, how many at a time, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, TypeAlias, get_args

from busload.domain.command import InputLimits, check_name, check_number, check_text, refuse
from busload.errors import Problem

GROUP = "busload.Group"
"""The type of the command that runs a group: its domain is the buffer's name, its command_id the group_id."""
EXHAUSTED = "busload.Exhausted"
"""The type of the command that runs the hook for a group whose attempts are used up."""

Merge: TypeAlias = Literal["keep_last", "keep_first"] | Callable[[Any, Any], Any]
OnExhausted: TypeAlias = Literal["troubleshoot", "delete"]

SIZES = range(1, 100_001)
GROUPS = range(1, 10_001)
BYTES = range(1, 2**40)
LONGEST = timedelta(days=366)
NAME_BYTES = 200
KEY_BYTES = 512


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
        problems = check_name(self.name, "name", InputLimits()) + check_number(self.size, "size", SIZES)
        problems += check_number(self.max_groups, "max_groups", GROUPS)
        if self.max_bytes is not None:
            problems += check_number(self.max_bytes, "max_bytes", BYTES)
        if not isinstance(self.max_age, timedelta) or not timedelta(0) <= self.max_age <= LONGEST:
            problems.append(_wrong("max_age", self.max_age, f"a timedelta from zero to {LONGEST.days} days"))
        if self.partition_by is not None:
            problems += check_text(self.partition_by, "partition_by", NAME_BYTES)
        if self.merge is not None and self.merge not in ("keep_last", "keep_first") and not callable(self.merge):
            problems.append(_wrong("merge", self.merge, '"keep_last", "keep_first" or a function of two payloads'))
        if self.archive not in (True, False):
            problems.append(_wrong("archive", self.archive, "True or False"))
        if self.on_exhausted not in get_args(OnExhausted):
            problems.append(_wrong("on_exhausted", self.on_exhausted, '"troubleshoot" or "delete"'))
        if self.table is not None:
            problems += self._problems_of_table()
        refuse(problems, writes=False)

    def _problems_of_table(self) -> list[Problem]:
        table: object = self.table
        if not isinstance(table, BufferTable):
            return [_wrong("table", table, "the name of a table or a BufferTable")]
        problems: list[Problem] = []
        for name in ("name", "id", "group_id", "created_at"):
            problems += check_text(getattr(table, name), f"table/{name}", NAME_BYTES)
        if table.key is not None:
            problems += check_text(table.key, "table/key", NAME_BYTES)
        elif self.merge is not None:
            problems.append(_wrong("table/key", None, "the column that tells the subject of an event, since it merges"))
        return problems


def partition_of(settings: BufferSettings, data: Any) -> tuple[str, list[Problem]]:
    """The partition an event belongs to: what its payload holds under `partition_by`, as text; or the empty one."""
    name = settings.partition_by
    if name is None:
        return "", []
    if not isinstance(data, dict):
        return "", [_wrong("data", data, f"a dict, since the buffer is partitioned by its key {name!r}")]
    value = data.get(name)
    if value is None or value == "":
        return "", []
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        return "", [_wrong(f"data/{name}", value, "text or a whole number, since it tells the partition")]
    return str(value), check_text(str(value), f"data/{name}", KEY_BYTES)


def key_problems(settings: BufferSettings, key: object) -> list[Problem]:
    if key is not None:
        return check_text(key, "key", KEY_BYTES)
    if settings.merge is None:
        return []
    return [_wrong("key", None, "the subject of the event, since this buffer merges those of the same one; pass key=")]


def _wrong(path: str, value: object, wanted: str) -> Problem:
    return Problem("INVALID_OPTION", f"/{path}", f"found {value!r:.80}, wanted {wanted}")


@dataclass(frozen=True, slots=True)
class BufferStatus:
    """How a buffer is doing: what people and `busload buffer ls` see."""

    name: str
    table: str | None
    """The application's table; None for one of busload's own."""
    waiting: int
    """Events in no group yet; counted up to `waiting_capped`."""
    waiting_capped: bool
    oldest: datetime | None
    """When the oldest waiting event was added."""
    grouped: int
    """Events in groups that have not ended."""
    groups_ready: int
    groups_running: int
    groups_retrying: int
    groups_in_troubleshooting: int
    calls: int
    """Calls of its handler so far."""
    done: int
    """Events that left it as done so far."""
    vanished: int
    """Events that others deleted while they were in a group."""
    size: int | None
    max_age: timedelta | None
    problem: str | None = None
    """What keeps it from making groups, if something does; if its table cannot be read, nothing was counted."""

    @property
    def items_per_call(self) -> float | None:
        return self.done / self.calls if self.calls else None

    @property
    def calls_saved(self) -> int:
        """How many more calls there would have been with one per event."""
        return max(0, self.done - self.calls)
