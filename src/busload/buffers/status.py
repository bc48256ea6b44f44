"""What is known about buffers: how they were declared, how many events wait, and what workers have counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

import psycopg

from busload.buffers import event_table
from busload.buffers.declaration import BufferSettings
from busload.buffers.event_table import Relation, plain
from busload.errors import InvalidOperationError
from busload.postgres.plan import Plan, Savepoint, execute, one
from busload.postgres.statements import statements

SQL = statements(__name__)

AT_MOST = "500ms"
"""How long whoever only looks waits for a table that somebody has locked."""
LOCKED = "The table is locked by another transaction, perhaps a migration; nothing can be counted until that ends."

COUNTED = 10_000
"""How far people are told exactly how many wait; counting a million would take longer than they do."""


PLACES = ("ready", "running", "retrying", "in_troubleshooting")
"""Where groups may be."""


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


@dataclass(frozen=True, slots=True)
class Declared:
    """What is kept about a buffer. The table and its columns are None for busload's own table."""

    table: str | None = None
    id: str | None = None
    group_id: str | None = None
    created_at: str | None = None
    key: str | None = None
    partition: str | None = None
    calls: int = 0
    done: int = 0
    vanished: int = 0
    size: int | None = None
    max_age: timedelta | None = None
    problem: str | None = None


def declare(settings: BufferSettings, at: Relation) -> Plan[None]:
    """Keep what is known about a buffer that is served."""
    names = (at.table, at.id, at.group_id, at.created_at, at.key_column, at.partition_column)
    table, id, group, created, key, partition = [None if at.own or name is None else plain(name) for name in names]
    yield from execute(
        SQL.declare,
        buffer=settings.name,
        relation=table,
        id_column=id,
        group_column=group,
        created_column=created,
        key_column=key,
        partition_column=partition,
        archive=settings.archive,
        size=settings.size,
        max_age=settings.max_age,
    )


def note_problem(name: str, problem: str | None) -> Plan[None]:
    """Keep what prevents a buffer from making groups, for whoever looks; None if nothing does."""
    yield from execute(SQL.note_problem, buffer=name, problem=None if problem is None else problem.replace("\0", ""))


def refuse_rivals(settings: BufferSettings, at: Relation) -> Plan[None]:
    """No two buffers over one table: each would take what is meant for the other."""
    rows = yield from execute(SQL.rivals, buffer=settings.name, relation=at.table_name)
    if rows:
        raise InvalidOperationError(
            f"The table {at.table_name} is the buffer {rows[0][0]!r} already, which a worker serves, and cannot be "
            f"the buffer {settings.name!r} too: each would take events of the other. Declare it once; to rename a "
            "buffer, stop the workers of the old name first."
        )


def flush(settings: BufferSettings, *, operator: str | None = None) -> Plan[int]:
    """Let all events go that wait now; returns how many that are, counted up to a limit."""
    at = yield from _whereabouts(settings)
    if not at.own and not (yield from execute(SQL.declared, buffer=settings.name)):
        yield from declare(settings, at)
    about = {"size": settings.size, "max_age": settings.max_age, "operator": operator}
    yield from execute(SQL.flush, buffer=settings.name, **about)
    return (yield from _count_waiting(settings.name, at, COUNTED))


def names() -> Plan[list[str]]:
    """Every buffer that was declared, or in which events wait."""
    return [name for (name,) in (yield from execute(SQL.names))]


def waits(name: str, settings: BufferSettings | None) -> Plan[bool]:
    """Whether any event waits there; needs a transaction, and gives up on a table that is locked."""
    yield from execute(SQL.be_brief, within="100ms")
    at = yield from (_recalled(name) if settings is None else _whereabouts(settings))
    return bool((yield from _count_waiting(name, at, 1)))


def count(tallies: Sequence[tuple[str, int, int, int]]) -> Plan[None]:
    """Add calls, events done and events vanished to the counters of buffers."""
    buffers, calls, done, vanished = (list(column) for column in zip(*tallies, strict=True))
    yield from execute(SQL.count, buffers=buffers, calls=calls, done=done, vanished=vanished)


def status(settings: BufferSettings) -> Plan[BufferStatus]:
    """How one buffer is doing; refuses a table that cannot be one."""
    unless_declared = Declared(size=settings.size, max_age=settings.max_age)
    return _status(settings.name, _whereabouts(settings), unless_declared, unreadable=())


UNREADABLE = (InvalidOperationError, psycopg.errors.SyntaxErrorOrAccessRuleViolation)
"""What a table that is gone, or not ours to read, fails with."""


def statuses() -> Plan[list[BufferStatus]]:
    """How every buffer is doing; one whose table is gone says so."""
    found: list[BufferStatus] = []
    for name in (yield from names()):
        found.append((yield from _status(name, _recalled(name), Declared(), unreadable=UNREADABLE)))
    return found


def find(name: str) -> Plan[BufferStatus | None]:
    """How one buffer is doing; None if there is none."""
    if name not in (yield from names()):
        return None
    return (yield from _status(name, _recalled(name), Declared(), unreadable=UNREADABLE))


def _status(
    name: str, whereabouts: Plan[Relation], unless_declared: Declared, *, unreadable: tuple[type[Exception], ...]
) -> Plan[BufferStatus]:
    """How a buffer is doing. Nothing is counted in a table that is locked or fails with one of `unreadable`."""
    problem, at, waiting, oldest, grouped = None, None, 0, None, 0
    try:
        at, waiting, oldest, places, grouped = yield Savepoint(_counts(name, whereabouts))
    except psycopg.errors.LockNotAvailable:
        problem = LOCKED
    except unreadable as error:
        problem = str(error)
    known = (yield from one(Declared, SQL.declared, buffer=name)) or unless_declared
    if at is None:
        places = yield from _places(name)
    return BufferStatus(
        name=name,
        table=known.table if at is None else at.table_name,
        waiting=min(waiting, COUNTED),
        waiting_capped=waiting > COUNTED,
        oldest=oldest,
        grouped=grouped,
        **{f"groups_{place}": len(places.get(place, ())) for place in PLACES},
        calls=known.calls,
        done=known.done,
        vanished=known.vanished,
        size=known.size,
        max_age=known.max_age,
        problem=known.problem if problem is None else problem,
    )


def _counts(
    name: str, whereabouts: Plan[Relation]
) -> Plan[tuple[Relation, int, datetime | None, dict[str, list[UUID]], int]]:
    """What the table of a buffer holds: how many events wait and since when, its groups, and how many are in them."""
    yield from execute(SQL.be_brief, within=AT_MOST)
    at = yield from whereabouts
    waiting = yield from _count_waiting(name, at, COUNTED + 1)
    oldest = yield from _since(name, at)
    places = yield from _places(name)
    groups = [group for ids in places.values() for group in ids]
    [[grouped]] = yield from execute(at.spell(SQL.in_groups), groups=groups, most=10 * COUNTED)
    return at, waiting, oldest, places, grouped


def _whereabouts(settings: BufferSettings) -> Plan[Relation]:
    """The table of a buffer as this process declares it or, if it knows of none, as a worker has."""
    return event_table.find(settings) if settings.table is not None else _recalled(settings.name)


def _recalled(name: str) -> Plan[Relation]:
    known = (yield from one(Declared, SQL.declared, buffer=name)) or Declared()
    columns = (known.id, known.group_id, known.created_at, known.key, known.partition)
    return (yield from event_table.recall(name, (known.table, *columns)))


def _count_waiting(name: str, at: Relation, most: int) -> Plan[int]:
    [[waiting]] = yield from execute(at.spell(SQL.waiting), buffer=name, most=most)
    return int(waiting)


def _since(name: str, at: Relation) -> Plan[datetime | None]:
    """When the oldest event was added that waits in any partition; in an application's table one may be null."""
    found = []
    if at.partition_column is not None:
        found += yield from execute(at.spell(SQL.since, beyond="true"), buffer=name, most=COUNTED)
    if at.partition_column is None or not at.own:
        found += yield from execute(at.spell(SQL.since_in, None), buffer=name)
    return min((since for (since,) in found if since is not None), default=None)


def _places(name: str) -> Plan[dict[str, list[UUID]]]:
    return dict((yield from execute(SQL.groups, buffer=name)))
