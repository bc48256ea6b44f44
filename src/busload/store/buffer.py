"""How events wait in a buffer, and how they leave it in groups."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias
from uuid import UUID

import msgspec
import psycopg
from psycopg.adapt import PyFormat, Transformer
from psycopg.types.json import Json, Jsonb

from busload.domain.buffer import BufferSettings, BufferStatus
from busload.domain.ids import new_id
from busload.errors import InvalidCommandError, InvalidOperationError, Problem
from busload.store import relation
from busload.store.arrays import unless_all_null
from busload.store.plan import Plan, Savepoint, execute
from busload.store.relation import Column, Relation
from busload.store.statements import statements

log = logging.getLogger("busload")

SQL = statements("buffer")

SOME, SOME_BYTES = 2000, 4_000_000
"""What one statement adds at most."""

MOST_PARTITIONS = 2000
"""How many partitions one look steps through: about ten microseconds each."""

AT_MOST = "500ms"
"""How long whoever only looks waits for a table that somebody has locked."""
LOCKED = "The table is locked by another transaction, perhaps a migration; nothing can be counted until that ends."

COUNTED = 10_000
"""How far people are told exactly how many wait; counting a million would take longer than they do."""


SAME = (
    "SELECT b.{{id}} AS id FROM {{table}} AS b"
    " WHERE {{filter}} AND {{within}} AND b.{{group_id}} IS NULL {waiting} AND b.{{key_column}} IN ("
    "SELECT k.{{key_column}} FROM {{table}} AS k WHERE k.{{id}} = ANY (ARRAY(SELECT id FROM chosen)))"
    " ORDER BY b.{{created_at}}, b.{{id}} LIMIT 10 * %(size)s::integer FOR UPDATE OF b SKIP LOCKED"
)
"""What waits for the same keys as the chosen events."""

KEPT_BACK = (
    "WITH first AS MATERIALIZED (SELECT k.key, o.at, o.id FROM (SELECT DISTINCT k.{{key_column}} AS key"
    " FROM {{table}} AS k WHERE k.{{id}} = ANY (ARRAY(SELECT id FROM chosen))) AS k CROSS JOIN LATERAL ("
    "SELECT b.{{created_at}} AS at, b.{{id}} AS id FROM {{table}} AS b"
    " WHERE {{filter}} AND b.{{group_id}} IS NULL {waiting} AND b.{{key_column}} = k.key"
    " AND b.{{id}} NOT IN (SELECT id FROM chosen UNION ALL SELECT id FROM same)"
    " ORDER BY b.{{created_at}}, b.{{id}} LIMIT 1) AS o)"
    " SELECT p.{{id}} AS id FROM {{table}} AS p JOIN first ON p.{{key_column}} = first.key"
    " AND (p.{{created_at}}, p.{{id}}) > (first.at, first.id)"
    " WHERE p.{{id}} = ANY (ARRAY(SELECT id FROM chosen UNION SELECT id FROM same))"
)
"""Those of them that are newer than the oldest event of their key that stays behind."""


class NewEvent(msgspec.Struct, frozen=True, gc=False):
    """An event that was checked: what goes into the table."""

    partition: str
    key: str | None
    data: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """A partition in which events wait: where its oldest one stands, the seconds until that is due; less: it is."""

    partition: str | None
    start: str
    due_in: float
    flushed: bool

    @property
    def due(self) -> bool:
        return self.flushed or self.due_in <= 0


def merges_at_once(settings: BufferSettings) -> bool:
    """Whether an event that arrives is merged into the one that waits for its key."""
    return bool(_rule(settings)["once"])


def add(settings: BufferSettings, event: NewEvent, *, patience: int | None = None) -> Plan[int | None]:
    """One event; None: it was merged into the one that waits for its key."""
    rows = yield from execute(
        SQL.add,
        **_rule(settings),
        partition=event.partition,
        key=event.key,
        data=event.data,
        bytes=len(event.data.encode()),
        patience=patience,
    )
    return rows[0][0] if rows else None


def add_many(
    settings: BufferSettings, events: Sequence[NewEvent], *, patience: int | None = None
) -> Plan[list[int | None]]:
    """Many events, all or none; ids in the order of the input."""
    rule = _rule(settings)
    if not rule["once"]:
        ids: list[int | None] = []
        for part in _parts(events):
            rows = yield from execute(SQL.add_some, **rule, **_arrays(part), patience=patience)
            ids += sorted(id for id, _ in rows)
        return ids
    kept: dict[str | None, int] = {}
    for index, event in enumerate(events):
        if rule["last"] or event.key not in kept:
            kept[event.key] = index
    firsts: dict[str | None, int] = {}
    for index, event in enumerate(events):
        firsts.setdefault(event.key, index)
    added: list[int | None] = [None] * len(events)
    # In the order of their keys, so that two such calls cannot wait for each other.
    for part in _parts([events[kept[key]] for key in sorted(kept, key=str)]):
        rows = yield from execute(SQL.add_some, **rule, **_arrays(part), patience=patience)
        for id, key in rows:
            added[firsts[key]] = id
    return added


def in_one_statement(events: Sequence[NewEvent]) -> bool:
    return len(list(_parts(events))) <= 1


def insert(settings: BufferSettings, rows: Sequence[dict[str, Any]]) -> Plan[list[Any]]:
    """Rows of an application's table; the keys of each are columns of it."""
    at = yield from relation.find(settings)
    assert settings.table is not None
    types = {settings.table.id: Column(settings.table.id, at.id, at.id_type)}
    types |= {column.name: column for column in at.columns}
    ids: list[Any] = []
    for index, row in enumerate(rows):
        if strange := [name for name in row if name not in types]:
            raise InvalidOperationError(
                f"The table {at.table} has no column {strange[0]!r:.80} that an event (number {index}) could fill; "
                f"it has {', '.join(types)}. Nothing was written."
            )
        names = ", ".join(types[name].spelled for name in row)
        values = ", ".join(f"%(v{nth})s::{types[name].type}" for nth, name in enumerate(row))
        adapted = {name: _as_json(value, types[name].type) for name, value in row.items()}
        params = {f"v{nth}": value for nth, value in enumerate(adapted.values())}
        try:
            [[id]] = yield from execute(at.spell(SQL.insert_row, names=names, values=values), **params)
        except (psycopg.DataError, psycopg.ProgrammingError, TypeError, ValueError) as error:
            if getattr(error, "sqlstate", None) is None:
                _refuse_unsendable(adapted, index if len(rows) > 1 else None)
            raise
        ids.append(id)
    return ids


def _as_json(value: Any, type: str) -> Any:
    """JSON is sent as such; None is null there too, and not the null of JSON."""
    if type not in ("json", "jsonb"):
        return Jsonb(value) if isinstance(value, dict) else value
    if value is None or isinstance(value, (Json, Jsonb)):
        return value
    return Json(value) if type == "json" else Jsonb(value)


def _refuse_unsendable(row: dict[str, Any], index: int | None) -> None:
    """Name the columns whose values psycopg cannot send."""
    problems: list[Problem] = []
    for name, value in row.items():
        try:
            Transformer().get_dumper(value, PyFormat.AUTO).dump(value)
        except (psycopg.Error, TypeError, ValueError) as error:
            given = value.obj if isinstance(value, (Json, Jsonb)) else value
            message = f"found {given!r:.80}, wanted a value that PostgreSQL can hold: {error}"
            problems.append(Problem("INVALID_OPTION", f"/data/{name}", message, index))
    if problems:
        raise InvalidCommandError(problems)


def declare(settings: BufferSettings, at: Relation) -> Plan[None]:
    """Keep what is known about a buffer that is served."""
    spelled = None if at.own else [_plain(text) for text in _spelled(at)]
    relation, id, group, created, key, partition = spelled or [None] * 6
    yield from execute(
        SQL.declare,
        buffer=settings.name,
        relation=relation,
        id_column=id,
        group_column=group,
        created_column=created,
        key_column=key,
        partition_column=partition,
        archive=settings.archive,
        size=settings.size,
        max_age=settings.max_age,
    )


class Round:
    """One look at a buffer, and the claims that it calls for.

    Each plan is performed by itself, in a transaction if claims take turns. What is due by its age goes first, the
    oldest before the others; then partitions that are full. Only as many are looked at, and as many rows counted, as
    could become groups now: the next round goes on from there.
    """

    def __init__(
        self, settings: BufferSettings, at: Relation, after: str | None = None, *, around: bool = True
    ) -> None:
        self._settings, self._at, self._around = settings, at, around
        self._after, self._room, self._due, self._flushed_at = after, 0, list[Waiting](), ""
        self.groups = 0
        self.items = 0
        self.next_due: float | None = None
        """Seconds until the next event is due by its age, as far as this round has seen."""
        self.cursor: str | None = None
        """Where the next round goes on; None: at the beginning."""
        self.short_of_room = False

    def plans(self) -> Iterator[Plan[None]]:
        yield self._look()
        while self._due and self._room > 0:
            # Each has its turn, and one that is full has another.
            due, self._due = self._due, []
            for waiting in due:
                if self._room > 0:
                    yield self._claim(waiting)
                else:
                    self._due.append(waiting)
        self.short_of_room = bool(self._due)

    def _look(self) -> Plan[None]:
        settings = self._settings
        [[self._room, self._flushed_at]] = yield from execute(
            SQL.room, buffer=settings.name, max_groups=settings.max_groups
        )
        if self._room <= 0:
            self.cursor, self.short_of_room = self._after, True
            return
        seen = yield from self._partitions()
        aged = sorted((one for one in seen if one.due), key=lambda one: one.due_in)
        young = [one for one in seen if not one.due]
        self.next_due = min((one.due_in for one in young), default=None)
        self._due = aged + ((yield from self._full(young)) if self._room > len(aged) else [])

    def _partitions(self) -> Plan[list[Waiting]]:
        """Those with waiting events, from where the last round ended, and round to there if there are not many.

        Who wants to see each once does not look `around`, and comes to an end.
        """
        at = self._at
        if at.partition_column is None:
            return (yield from self._oldest(""))
        seen = yield from self._steps(self._after)
        if len(seen) == MOST_PARTITIONS:
            self.cursor = seen[-1].partition
        elif self._after is not None and self._around:
            more = yield from self._steps(None)
            known = {one.partition for one in seen}
            seen += [one for one in more if one.partition not in known][: MOST_PARTITIONS - len(seen)]
        if not at.own:
            seen += yield from self._oldest(None)
        return seen

    def _steps(self, after: str | None) -> Plan[list[Waiting]]:
        beyond = "true" if self._at.own else "b.{partition_column} IS NOT NULL"
        if after is not None:
            beyond = "b.{partition_column} > %(after)s::text::{partition_type}"
        sql = self._at.spell(SQL.partitions, beyond=beyond)
        rows = yield from execute(sql, **self._about(), after=after, most=MOST_PARTITIONS)
        return [Waiting(*row) for row in rows]

    def _oldest(self, partition: str | None) -> Plan[list[Waiting]]:
        rows = yield from execute(self._at.spell(SQL.oldest, partition), **self._about())
        return [Waiting(*row) for row in rows]

    def _full(self, young: Sequence[Waiting]) -> Plan[list[Waiting]]:
        """Those that hold a whole group, though nothing in them is due yet."""
        settings, at = self._settings, self._at
        named = [one for one in young if one.partition is not None]
        weighed: list[tuple[int, int]] = []
        if named:
            weighed = yield from execute(
                at.spell(SQL.weigh_some),
                **self._about(),
                partitions=[one.partition for one in named],
                starts=[one.start for one in named],
                budget=settings.size * settings.max_groups,
            )
            if len(weighed) < len(named):
                self.cursor = named[len(weighed) - 1].partition
        full = [one for one, (count, bytes) in zip(named, weighed, strict=False) if self._is_full(count, bytes)]
        for one in (one for one in young if one.partition is None):
            [[count, bytes]] = yield from execute(at.spell(SQL.weigh, None), **self._about(), start=one.start)
            full += [one] if self._is_full(count, bytes) else []
        return full

    def _is_full(self, count: int, bytes: int) -> bool:
        settings = self._settings
        return count >= settings.size or (settings.max_bytes is not None and bytes > settings.max_bytes)

    def _claim(self, waiting: Waiting) -> Plan[None]:
        """Only if something is due there when it is claimed: others may have been faster."""
        answer = (
            "(SELECT count(*)::integer FROM taken), (SELECT max(at)::text FROM taken),"
            " coalesce((SELECT is_full FROM due), false)"
        )
        yield from take_turns(self._settings)
        [[count, last, is_full, _]] = yield from _claim(
            self._settings, self._at, waiting, answer=answer, size=self._settings.size, anyway=False
        )
        if count:
            self.groups += 1
            self.items += count
            self._room -= 1
            if is_full or waiting.due:
                self._due.append(Waiting(waiting.partition, last, waiting.due_in, waiting.flushed))

    def _about(self) -> dict[str, Any]:
        settings = self._settings
        return {
            "buffer": settings.name,
            "size": settings.size,
            "max_bytes": settings.max_bytes,
            "max_age": settings.max_age,
            "flushed_at": self._flushed_at,
        }


def takes_turns(settings: BufferSettings) -> bool:
    """Whether claims must come one after the other, each in a transaction: else one statement is all there is to it.

    Where at most one event of a key can wait, the next one comes after that has left: whoever sees it, sees both.
    """
    return settings.merge is not None and (callable(settings.merge) or settings.table is not None)


def take_turns(settings: BufferSettings) -> Plan[None]:
    """Before a claim, in its transaction: where events of a key leave in order, what has left must be seen."""
    if takes_turns(settings):
        yield from execute(SQL.take_turns, buffer=settings.name)


def claim(settings: BufferSettings, at: Relation, limit: int) -> Plan[tuple[UUID, list[Any]] | None]:
    """Put what waits into a group, due or not: the oldest partition first. Returns the group and its ids."""
    yield from take_turns(settings)
    look = Round(settings, at)
    look._flushed_at = "-infinity"
    group_id = new_id()
    for waiting in sorted((yield from look._partitions()), key=lambda one: one.due_in):
        [[ids, _]] = yield from _claim(
            settings,
            at,
            waiting,
            group_id=group_id,
            answer="ARRAY(SELECT id FROM taken ORDER BY at, id)",
            size=limit,
            anyway=True,
        )
        if ids:
            return group_id, ids
    return None


def _claim(
    settings: BufferSettings,
    at: Relation,
    waiting: Waiting,
    *,
    answer: str,
    size: int,
    anyway: bool,
    group_id: UUID | None = None,
) -> Plan[list[tuple[Any, ...]]]:
    how = {"answer": answer}
    if settings.merge is not None and at.key_column is not None:
        # From the very beginning: what was kept back at the last look may be free now, and goes first.
        how |= {"free": _free(at), "from_here": "true"}
    if takes_turns(settings) and at.key_column is not None:
        waiting_ones = "AND NOT b.once AND b.key IS NOT NULL" if at.own else ""
        how |= {"same": SAME.format(waiting=waiting_ones), "kept_back": KEPT_BACK.format(waiting=waiting_ones)}
    return execute(
        at.spell(SQL.claim, waiting.partition, **how),
        buffer=settings.name,
        partition=waiting.partition,
        start=waiting.start,
        size=size,
        max_bytes=settings.max_bytes,
        max_age=settings.max_age,
        anyway=anyway,
        group_id=group_id or new_id(),
        told_table=at.told,
    )


def _free(at: Relation) -> str:
    """No event of its key is in a group: it would be the next one."""
    return (
        f"NOT EXISTS (SELECT FROM {{table}} AS g WHERE {at.filter.replace('b.', 'g.')}"
        " AND g.{key_column} = b.{key_column} AND g.{group_id} IS NOT NULL OFFSET 0)"
    )


def flush(settings: BufferSettings) -> Plan[int]:
    """Let all go that waits now; returns how many that is, counted up to a limit."""
    at = yield from _whereabouts(settings)
    if not at.own:
        yield from _declare_first(settings, at)
    yield from execute(SQL.flush, buffer=settings.name, size=settings.size, max_age=settings.max_age)
    [[count]] = yield from execute(at.spell(SQL.waiting), buffer=settings.name, most=COUNTED)
    return int(count)


def _declare_first(settings: BufferSettings, at: Relation) -> Plan[None]:
    if not (yield from execute(SQL.declared, buffer=settings.name)):
        yield from declare(settings, at)


def status(settings: BufferSettings) -> Plan[BufferStatus]:
    """How one buffer is doing; refuses a table that is none."""
    try:
        status: BufferStatus = yield Savepoint(_found_status(settings))
    except psycopg.errors.LockNotAvailable:
        return (yield from _told_without(settings.name, LOCKED, settings))
    return status


def _found_status(settings: BufferSettings) -> Plan[BufferStatus]:
    yield from execute(SQL.be_brief, within=AT_MOST)
    at = yield from _whereabouts(settings)
    return (yield from _status(settings.name, at, settings.size, settings.max_age))


def statuses() -> Plan[list[BufferStatus]]:
    """How every buffer is doing; one whose table is gone says so."""
    found: list[BufferStatus] = []
    for (name,) in (yield from execute(SQL.names)):
        found.append((yield from _any_status(name)))
    return found


def _any_status(name: str) -> Plan[BufferStatus]:
    try:
        status: BufferStatus = yield Savepoint(_recalled_status(name))
    except psycopg.errors.LockNotAvailable:
        return (yield from _told_without(name, LOCKED))
    except (InvalidOperationError, psycopg.errors.SyntaxErrorOrAccessRuleViolation) as error:
        return (yield from _told_without(name, str(error)))
    return status


def _recalled_status(name: str) -> Plan[BufferStatus]:
    yield from execute(SQL.be_brief, within=AT_MOST)
    at = yield from _recalled(name)
    return (yield from _status(name, at, None, None))


def _told_without(name: str, problem: str, settings: BufferSettings | None = None) -> Plan[BufferStatus]:
    """What is known about a buffer whose table cannot be read."""
    rows = yield from execute(SQL.declared, buffer=name)
    told = (None, None) if settings is None else (settings.size, settings.max_age)
    row = rows[0] if rows else _undeclared(*told)
    places = yield from _places(name)
    return _told(name, row[0], 0, None, 0, places, row[6:9], row[9], row[10], problem)


def _whereabouts(settings: BufferSettings) -> Plan[Relation]:
    """The table of a buffer as this process declares it or, if it knows of none, as a worker has."""
    if settings.table is not None:
        return (yield from relation.find(settings))
    return (yield from _recalled(settings.name))


def _recalled(name: str) -> Plan[Relation]:
    rows = yield from execute(SQL.declared, buffer=name)
    return (yield from relation.recall(name, rows[0][:6] if rows else [None] * 6))


_Places: TypeAlias = dict[str, list[UUID]]


def _status(name: str, at: Relation, size: int | None, max_age: timedelta | None) -> Plan[BufferStatus]:
    rows = yield from execute(SQL.declared, buffer=name)
    row = rows[0] if rows else _undeclared(size, max_age)
    [[waiting]] = yield from execute(at.spell(SQL.waiting), buffer=name, most=COUNTED + 1)
    oldest = yield from _since(name, at)
    places = yield from _places(name)
    groups = [group for ids in places.values() for group in ids]
    [[grouped]] = yield from execute(at.spell(SQL.in_groups), groups=groups, most=10 * COUNTED)
    table = None if at.own else _plain(at.table)
    return _told(name, table, waiting, oldest, grouped, places, row[6:9], row[9], row[10], row[11])


def _undeclared(size: int | None, max_age: timedelta | None) -> tuple[Any, ...]:
    return (None,) * 6 + (0, 0, 0, size, max_age, None)


def _since(name: str, at: Relation) -> Plan[Any]:
    if at.partition_column is None:
        rows = yield from execute(at.spell(SQL.since_in), buffer=name)
        return rows[0][0] if rows else None
    [[oldest]] = yield from execute(at.spell(SQL.since), buffer=name, most=COUNTED)
    rows = [] if at.own else (yield from execute(at.spell(SQL.since_in, None), buffer=name))
    return min([one for one in (oldest, rows[0][0] if rows else None) if one is not None], default=None)


def _places(name: str) -> Plan[_Places]:
    return dict((yield from execute(SQL.groups, buffer=name)))


def _told(
    name: str,
    table: str | None,
    waiting: int,
    oldest: Any,
    grouped: int,
    places: _Places,
    counters: Sequence[int],
    size: int | None,
    max_age: timedelta | None,
    problem: str | None = None,
) -> BufferStatus:
    def count(place: str) -> int:
        return len(places.get(place, ()))

    return BufferStatus(
        name=name,
        table=table,
        waiting=min(waiting, COUNTED),
        waiting_capped=waiting > COUNTED,
        oldest=oldest,
        grouped=grouped,
        groups_ready=count("ready"),
        groups_running=count("running"),
        groups_retrying=count("retrying"),
        groups_in_troubleshooting=count("troubleshooting"),
        calls=counters[0],
        done=counters[1],
        vanished=counters[2],
        size=size,
        max_age=max_age,
        problem=problem,
    )


def note_problem(name: str, problem: str | None) -> Plan[None]:
    """Tell whoever looks what keeps a buffer from making groups; None: nothing does."""
    yield from execute(SQL.note_problem, buffer=name, problem=None if problem is None else problem.replace("\0", ""))


def refuse_rivals(settings: BufferSettings, at: Relation) -> Plan[None]:
    """No two buffers over one table: each would take what is meant for the other."""
    rows = yield from execute(SQL.rivals, buffer=settings.name, relation=None if at.own else _plain(at.table))
    if rows:
        raise InvalidOperationError(
            f"The table {_plain(at.table)} is the buffer {rows[0][0]!r} already, which a worker serves, and cannot be "
            f"the buffer {settings.name!r} too: each would take events of the other. Declare it once; to rename a "
            "buffer, stop the workers of the old name first."
        )


def names() -> Plan[list[str]]:
    """Every buffer that was declared, or in which events wait."""
    return [name for (name,) in (yield from execute(SQL.names))]


def waits(name: str, settings: BufferSettings | None) -> Plan[bool]:
    """Whether anything waits there; needs a transaction, and gives up on a table that is locked."""
    yield from execute(SQL.be_brief, within="100ms")
    at = yield from (_recalled(name) if settings is None else _whereabouts(settings))
    [[count]] = yield from execute(at.spell(SQL.waiting), buffer=name, most=1)
    return bool(count)


def count(tallies: Sequence[tuple[str, int, int, int]]) -> Plan[None]:
    """Add calls, events done and events vanished to the counters of buffers."""
    buffers, calls, done, vanished = (list(column) for column in zip(*tallies, strict=True))
    yield from execute(SQL.count, buffers=buffers, calls=calls, done=done, vanished=vanished)


def _rule(settings: BufferSettings) -> dict[str, Any]:
    return {
        "buffer": settings.name,
        "once": settings.merge in ("keep_last", "keep_first"),
        "last": settings.merge == "keep_last",
    }


def _parts(events: Sequence[NewEvent]) -> Iterator[Sequence[NewEvent]]:
    start, bytes = 0, 0
    for end, event in enumerate(events):
        if end > start and (end - start == SOME or bytes + len(event.data) > SOME_BYTES):
            yield events[start:end]
            start, bytes = end, 0
        bytes += len(event.data)
    if events:
        yield events[start:]


def _arrays(events: Sequence[NewEvent]) -> dict[str, Any]:
    return {
        "partitions": unless_all_null(event.partition for event in events),
        "keys": unless_all_null(event.key for event in events),
        "data": [event.data for event in events],
    }


def _spelled(at: Relation) -> list[str | None]:
    return [at.table, at.id, at.group_id, at.created_at, at.key_column, at.partition_column]


def _plain(spelled: str | None) -> str | None:
    """As SQL spells it, outside of a statement with parameters."""
    return None if spelled is None else spelled.replace("%%", "%")
