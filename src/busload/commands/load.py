"""A load: commands whose ids follow one another, and which travel between places as one row.

The id of a command is the number of its load times `POSITIONS`, plus the command's position in the load. So an id tells
which load it belongs to, and any part of a load is written as its first and its last id.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from operator import attrgetter
from struct import Struct
from typing import Any, NamedTuple
from uuid import UUID

from busload.commands.command import NewCommand
from busload.postgres.arrays import unless_all_null
from busload.postgres.plan import Plan, execute
from busload.postgres.statements import statements

SQL = statements(__name__)

LOAD_SIZE = 1000
"""How many commands travel in one load at most."""

POSITIONS = 1024
"""How many ids the number of a load stands for."""


class Load(NamedTuple):
    """The commands from id `lo` to id `hi`: a load, or a part of one. Both ids have the number of the load."""

    lo: int
    hi: int

    @classmethod
    def of(cls, number: int, count: int) -> Load:
        """The first `count` commands of the load with this number."""
        lo = number * POSITIONS
        return cls(lo, lo + count - 1)

    @property
    def number(self) -> int:
        return self.hi // POSITIONS

    @property
    def size(self) -> int:
        """The number of its commands."""
        return self.hi - self.lo + 1

    @property
    def ids(self) -> range:
        return range(self.lo, self.hi + 1)

    def split(self, count: int) -> tuple[Load, Load | None]:
        """The first `count` commands, at least one, and the others, if there are any."""
        last = self.lo + count - 1
        return (self, None) if last >= self.hi else (Load(self.lo, last), Load(last + 1, self.hi))

    def join(self, other: Load) -> Load | None:
        """Both as one, if `other` begins in the same load where this one ends; otherwise None."""
        follows = self.hi + 1 == other.lo and self.number == other.number
        return Load(self.lo, other.hi) if follows else None

    def subtract(self, parts: Iterable[Load]) -> Iterator[Load]:
        """What is left without these parts, in order. Parts of other loads are ignored."""
        lo = self.lo
        for part in sorted(parts):
            if part.hi < lo or part.lo > self.hi:
                continue
            if lo < part.lo:
                yield Load(lo, part.lo - 1)
            lo = part.hi + 1
        if lo <= self.hi:
            yield Load(lo, self.hi)


class LoadToPublish(NamedTuple):
    """A new load that is due now, and the domain that runs it: if there is a broker, it is told of both."""

    load: Load
    domain: str


def number_of(id: int) -> int:
    """The number of the load that this command belongs to."""
    return id // POSITIONS


def position_of(id: int) -> int:
    """The place of this command within its load, counted from 0."""
    return id % POSITIONS


def first_id(number: int) -> int:
    """The id of the first command in the load with this number."""
    return number * POSITIONS


def count_commands(loads: Iterable[Load]) -> int:
    return sum(hi - lo + 1 for lo, hi in loads)


BLOCK = 65_536
"""Bytes that go out at once: large enough to be cheap, small enough for the server to work while we pack the next."""


@dataclass(frozen=True, slots=True)
class NewLoad:
    """Commands that will be neighbours, and what they share."""

    domain: str
    commands: Sequence[NewCommand]
    fair_by: str | None = None
    """The key of those who take turns, unless it is their batch, or they were sent by themselves."""
    due: datetime | None = None
    """When commands with a delay may run."""

    @property
    def priority(self) -> int:
        return self.commands[0].priority

    @property
    def run_at(self) -> datetime | None:
        return self.commands[0].run_at if self.due is None else self.due

    @property
    def expires_at(self) -> datetime | None:
        return self.commands[0].expires_at

    @property
    def replies(self) -> bool:
        return self.commands[0].reply_to is not None


_kind = attrgetter("priority", "run_at", "reply_to", "domain", "fair_by", "expires_at", "delay")


def cut(domain: str, commands: Sequence[NewCommand], fair_by: str | None = None) -> Plan[list[NewLoad]]:
    """Cut a list into loads, whose numbers follow each other.

    `domain` and `fair_by` are those of the commands which have none of their own. What differs in priority, times,
    reply or key cannot travel together. In a domain whose commands run in order the list is cut wherever it changes, so
    that ids follow the order of the list.
    """
    [loads] = yield from cut_all(domain, [commands], fair_by)
    return loads


def cut_all(
    domain: str, lists: Sequence[Sequence[NewCommand]], fair_by: str | None = None
) -> Plan[list[list[NewLoad]]]:
    """Cut each of these lists into loads, as `cut` does."""
    mixed = [commands for commands in lists if not _are_alike(commands)]
    if not mixed:
        return (yield from _timed([list(_slices(domain, commands, fair_by)) for commands in lists]))
    domains = sorted({command.domain or domain for commands in mixed for command in commands})
    [(ordered,)] = yield from execute(SQL.ordered_domains, domains=domains)
    return (yield from _timed([list(_groups(domain, commands, fair_by, ordered)) for commands in lists]))


def _timed(lists: list[list[NewLoad]]) -> Plan[list[list[NewLoad]]]:
    """Say when loads with a delay may run, by the clock of the database. Others are left as they are."""
    if all(load.commands[0].delay is None for loads in lists for load in loads):
        return lists
    [(now,)] = yield from execute(SQL.now)
    return [[_due(load, now) for load in loads] for loads in lists]


def _due(load: NewLoad, now: datetime) -> NewLoad:
    delay = load.commands[0].delay
    return load if delay is None else replace(load, due=now + delay)


def cut_together(domain: str, commands: Sequence[NewCommand]) -> Iterator[NewLoad]:
    """Cut commands into loads that were sent at the same time, and so are in no order."""
    return (_slices if _are_alike(commands) else _groups)(domain, commands)


def _are_alike(commands: Sequence[NewCommand]) -> bool:
    return len(set(map(_kind, commands))) <= 1


def _groups(
    domain: str, commands: Sequence[NewCommand], fair_by: str | None = None, ordered: Collection[str] = ()
) -> Iterator[NewLoad]:
    """Those that are alike together. In the `ordered` domains only neighbours are."""
    groups: dict[tuple[object, ...], list[NewCommand]] = {}
    last: dict[str, tuple[object, ...]] = {}
    for nth, command in enumerate(commands):
        own, replies = command.domain or domain, command.reply_to is not None
        times = command.run_at, command.expires_at, command.delay
        kind: tuple[object, ...] = own, command.priority, times, replies, command.fair_by
        if own in ordered:
            before = last.get(own, ())
            kind = last[own] = before if before[:-1] == kind else (*kind, nth)
        groups.setdefault(kind, []).append(command)
    for group in groups.values():
        yield from _slices(domain, group, fair_by)


def _slices(domain: str, alike: Sequence[NewCommand], fair_by: str | None = None) -> Iterator[NewLoad]:
    first = alike[0]
    for start in range(0, len(alike), LOAD_SIZE):
        yield NewLoad(first.domain or domain, alike[start : start + LOAD_SIZE], first.fair_by or fair_by)


def arrays(loads: Sequence[NewLoad]) -> dict[str, Any]:
    """Loads and commands as arrays. What no command has is an empty one: `unnest` makes nulls of it for all of them."""
    commands = [command for load in loads for command in load.commands]
    lasts = list(accumulate(len(load.commands) for load in loads))
    return {
        "firsts": [1, *(last + 1 for last in lasts[:-1])],
        "lasts": lasts,
        "domains": [load.domain for load in loads],
        "priorities": [load.priority for load in loads],
        "replies": [load.replies for load in loads],
        "run_ats": unless_all_null(load.run_at for load in loads),
        "fair_bys": unless_all_null(load.fair_by for load in loads),
        "command_ids": [command.command_id for command in commands],
        "command_types": [command.command_type for command in commands],
        "data": [command.data for command in commands],
        "task_keys": unless_all_null(command.task_key for command in commands),
        "correlation_ids": unless_all_null(command.correlation_id for command in commands),
        "reply_tos": unless_all_null(command.reply_to for command in commands),
        "max_attempts": unless_all_null(command.max_attempts for command in commands),
        "command_headers": unless_all_null(command.headers for command in commands),
    }


def blocks(loads: Sequence[NewLoad], places: Sequence[Load], batch_id: UUID | None) -> Iterator[bytes]:
    """The rows in the binary format of COPY: half the price of its text, here and in the server."""
    block, size = [b"PGCOPY\n\xff\r\n\0" + bytes(8)], 0
    for place, load in zip(places, loads, strict=True):
        shared = _text(load.domain) + _uuid(batch_id) + _smallint(load.priority) + _time(load.run_at)
        ends: dict[object, bytes] = {}  # neighbours that have the same options end alike
        for id, command in zip(place.ids, load.commands, strict=True):
            options = _options(command)
            end = ends.get(options)
            if end is None:
                command_type, task_key, correlation_id, reply_to, max_attempts, headers = options
                end = shared + _text(command_type) + _text(task_key) + _uuid(correlation_id) + _text(reply_to)
                end = ends[options] = end + _smallint(max_attempts) + _text(headers)
            data = command.data.encode()
            row = _row(_COLUMNS, 8, id, 16, command.id_as_int.to_bytes(16), len(data)) + data + end
            block.append(row)
            size += len(row)
            if size > BLOCK:
                yield b"".join(block)
                block, size = [], 0
    block.append(b"\xff\xff")
    yield b"".join(block)


_options = attrgetter("command_type", "task_key", "correlation_id", "reply_to", "max_attempts", "headers")
_row = Struct(">hiqi16si").pack  # how many columns; then each after its length: the id, the command_id, the data
_COLUMNS = 13
_NULL = b"\xff\xff\xff\xff"
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)


def _text(value: str | None) -> bytes:
    return _NULL if value is None else _field(value.encode())


def _uuid(value: UUID | None) -> bytes:
    return _NULL if value is None else _field(value.bytes)


def _smallint(value: int | None) -> bytes:
    return _NULL if value is None else _field(value.to_bytes(2, signed=True))


def _time(value: datetime | None) -> bytes:
    if value is None:
        return _NULL
    return _field(((value - _EPOCH) // timedelta(microseconds=1)).to_bytes(8, signed=True))


def _field(value: bytes) -> bytes:
    return len(value).to_bytes(4) + value
