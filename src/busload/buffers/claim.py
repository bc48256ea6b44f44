"""How events of a buffer leave in groups: which partitions are due, and how a slice of one is claimed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from busload.buffers.declaration import BufferSettings
from busload.buffers.event_table import Relation
from busload.commands.ids import new_id
from busload.postgres.plan import Plan, execute, many
from busload.postgres.statements import statements

SQL = statements(__name__)

MOST_PARTITIONS = 2000
"""How many partitions one look steps through: about ten microseconds each."""


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
    """A slice that became a group of `count` events; `last` is when the newest was added. If 0, there is no group."""

    count: int
    last: str
    was_full: bool
    ids: list[Any] | None
    notified: Any


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
        self.short_of_room = self.short_of_room or bool(self._due)

    def partitions(self) -> Plan[list[Waiting]]:
        """The partitions in which events wait, beginning after the last one that the round before has seen.

        With `around`, the search goes on at the first partition after the last. Without it, each is seen once.
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
        at = self._at
        beyond = "true" if at.own else f"b.{at.partition_column} IS NOT NULL"
        if after is not None:
            beyond = f"b.{at.partition_column} > %(after)s::text::{at.partition_type}"
        sql = at.spell(SQL.partitions, beyond=beyond)
        return many(Waiting, sql, **self._about(), after=after, most=MOST_PARTITIONS)

    def _oldest(self, partition: str | None) -> Plan[list[Waiting]]:
        return many(Waiting, self._at.spell(SQL.oldest, partition), **self._about())

    def _full(self, young: Sequence[Waiting]) -> Plan[list[Waiting]]:
        """The partitions that hold a whole group, though nothing in them is due yet."""
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
        """Claim a slice of a partition, if something is still due there: another worker may have been faster."""
        yield from take_turns(self._settings)
        taken = yield from _claim(self._settings, self._at, waiting, new_id(), self._settings.size, anyway=False)
        if taken.count:
            self.groups += 1
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
    """Whether claims must come one after the other, each in a transaction. Otherwise a claim is one statement.

    If at most one event of a key can wait, claims need no turns: the next event is added after the last one has left.
    """
    return settings.merge is not None and (callable(settings.merge) or settings.table is not None)


def take_turns(settings: BufferSettings) -> Plan[None]:
    """Wait for other claims, if events of a key leave in order. Call this first in the transaction of a claim."""
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
        table_name=at.table_name,
    )
    return Claimed(*row)
