"""How events wait in a buffer, and how they leave it in groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import msgspec
import psycopg
from psycopg.adapt import PyFormat, Transformer
from psycopg.types.json import Json, Jsonb

from busload.buffers import table
from busload.buffers.declaration import BufferSettings
from busload.buffers.table import Column, Relation
from busload.commands.ids import new_id
from busload.errors import InvalidCommandError, InvalidOperationError, Problem
from busload.postgres.arrays import unless_all_null
from busload.postgres.plan import Plan, execute, many
from busload.postgres.statements import statements

SQL = statements(__name__)

SOME, SOME_BYTES = 2000, 4_000_000
"""What one statement adds at most."""

MOST_PARTITIONS = 2000
"""How many partitions one look steps through: about ten microseconds each."""


class NewEvent(msgspec.Struct, frozen=True, gc=False):
    """An event that was checked: what goes into the table."""

    partition: str
    key: str | None
    data: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """A partition in which events wait: where its oldest event stands, and the seconds until that one is due."""

    partition: str | None
    start: str
    due_in: float
    flushed: bool

    @property
    def due(self) -> bool:
        return self.flushed or self.due_in <= 0


@dataclass(frozen=True, slots=True)
class Claimed:
    """A slice that became a group of `count` events, the `last` of which was added then; no group if there are none."""

    count: int
    last: str
    was_full: bool
    ids: list[Any] | None
    notified: Any


def merges_at_once(settings: BufferSettings) -> bool:
    """Whether an event that arrives is merged into the one that waits for its key."""
    return bool(_rule(settings)["once"])


def add(settings: BufferSettings, event: NewEvent, *, patience: int | None = None) -> Plan[int | None]:
    """Add one event; None means that it was merged into the one that waits for its key."""
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
    """Add many events, all or none; returns their ids in the order of the input."""
    rule = _rule(settings)
    if not rule["once"]:
        rows = yield from _add_in_parts(events, rule, patience)
        return [id for id, _ in rows]
    kept: dict[str | None, int] = {}
    firsts: dict[str | None, int] = {}
    for index, event in enumerate(events):
        firsts.setdefault(event.key, index)
        if rule["last"] or event.key not in kept:
            kept[event.key] = index
    # In the order of their keys, so that two such calls cannot wait for each other.
    rows = yield from _add_in_parts([events[kept[key]] for key in sorted(kept, key=str)], rule, patience)
    added: list[int | None] = [None] * len(events)
    for id, key in rows:
        added[firsts[key]] = id
    return added


def _add_in_parts(events: Sequence[NewEvent], rule: dict[str, Any], patience: int | None) -> Plan[list[Any]]:
    rows: list[Any] = []
    for part in _parts(events):
        added = yield from execute(SQL.add_some, **rule, **_arrays(part), patience=patience)
        rows += added if rule["once"] else sorted(added)
    return rows


def in_one_statement(events: Sequence[NewEvent]) -> bool:
    return len(list(_parts(events))) <= 1


def insert(settings: BufferSettings, rows: Sequence[dict[str, Any]]) -> Plan[list[Any]]:
    """Rows of an application's table; the keys of each are columns of it."""
    at = yield from table.find(settings)
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


class Round:
    """One look at a buffer, and the claims that it calls for.

    Each plan is performed by itself, in a transaction if claims take turns. Partitions that are due by their age go
    first, the oldest before the others; then partitions that are full. Only as many are looked at, and as many rows
    counted, as could become groups now: the next round goes on from there.
    """

    def __init__(
        self, settings: BufferSettings, at: Relation, after: str | None = None, *, around: bool = True
    ) -> None:
        self._settings, self._at, self._around = settings, at, around
        self._after, self._room, self._due, self._flushed_at = after, 0, list[Waiting](), "-infinity"
        self.groups = 0
        self.items = 0
        self.next_due: float | None = None
        """Seconds until the next event is due by its age, as far as this round has seen."""
        self.cursor: str | None = None
        """Where the next round goes on; None means at the beginning."""
        self.short_of_room = False

    def plans(self) -> Iterator[Plan[None]]:
        yield self._look()
        while self._due and self._room > 0:
            # Each partition has its turn, and one that is full has another.
            due, self._due = self._due, []
            for waiting in due:
                if self._room > 0:
                    yield self._claim(waiting)
                else:
                    self._due.append(waiting)
        self.short_of_room = bool(self._due)

    def partitions(self) -> Plan[list[Waiting]]:
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

    def _look(self) -> Plan[None]:
        settings = self._settings
        [[self._room, self._flushed_at]] = yield from execute(
            SQL.room, buffer=settings.name, max_groups=settings.max_groups
        )
        if self._room <= 0:
            self.cursor, self.short_of_room = self._after, True
            return
        seen = yield from self.partitions()
        aged = sorted((one for one in seen if one.due), key=lambda one: one.due_in)
        young = [one for one in seen if not one.due]
        self.next_due = min((one.due_in for one in young), default=None)
        self._due = aged + ((yield from self._full(young)) if self._room > len(aged) else [])

    def _steps(self, after: str | None) -> Plan[list[Waiting]]:
        beyond = "true" if self._at.own else "b.{partition_column} IS NOT NULL"
        if after is not None:
            beyond = "b.{partition_column} > %(after)s::text::{partition_type}"
        sql = self._at.spell(SQL.partitions, beyond=beyond)
        return many(Waiting, sql, **self._about(), after=after, most=MOST_PARTITIONS)

    def _oldest(self, partition: str | None) -> Plan[list[Waiting]]:
        return many(Waiting, self._at.spell(SQL.oldest, partition), **self._about())

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
        yield from take_turns(self._settings)
        taken = yield from _claim(self._settings, self._at, waiting, new_id(), self._settings.size, anyway=False)
        if taken.count:
            self.groups += 1
            self.items += taken.count
            self._room -= 1
            if taken.was_full or waiting.due:
                self._due.append(Waiting(waiting.partition, taken.last, waiting.due_in, waiting.flushed))

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
    group_id = new_id()
    partitions = yield from Round(settings, at).partitions()
    for waiting in sorted(partitions, key=lambda one: one.due_in):
        taken = yield from _claim(settings, at, waiting, group_id, limit, anyway=True)
        if taken.ids:
            return group_id, taken.ids
    return None


def _claim(
    settings: BufferSettings, at: Relation, waiting: Waiting, group_id: UUID, size: int, *, anyway: bool
) -> Plan[Claimed]:
    statement = SQL.claim
    if settings.merge is not None and at.key_column is not None:
        statement = SQL.claim_in_order if takes_turns(settings) else SQL.claim_free_keys
    [row] = yield from execute(
        at.spell(statement, waiting.partition),
        buffer=settings.name,
        partition=waiting.partition,
        start=waiting.start,
        size=size,
        max_bytes=settings.max_bytes,
        max_age=settings.max_age,
        anyway=anyway,
        group_id=group_id,
        told_table=at.told,
    )
    return Claimed(*row)


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
