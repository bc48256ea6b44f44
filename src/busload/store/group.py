"""How the events of a group are read, and how they leave it: done, parted off, exhausted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID, uuid5

import msgspec

from busload.domain.buffer import EXHAUSTED
from busload.domain.execution import Leased, Transition
from busload.domain.ids import new_id
from busload.errors import Superseded
from busload.store import rescue, settle
from busload.store.plan import Plan, Statement, execute
from busload.store.relation import Relation
from busload.store.statements import statements

SQL = statements("group")


class Row(msgspec.Struct, frozen=True, eq=False):
    """One event as it was read. `data` is the text of an own buffer's payload, or the other columns by their names."""

    id: Any
    key: str | None
    created_at: datetime
    data: Any


@dataclass(frozen=True, slots=True)
class Place:
    """A group that a worker runs: its events, its command, and the lease that fences all that happens to them."""

    relation: Relation
    leased: Leased
    archive: bool
    partition: str | None = None
    told: int | None = None
    """How many events its command says it holds."""

    @property
    def group_id(self) -> UUID:
        return self.leased.command_id

    def about(self) -> dict[str, Any]:
        return {"buffer": self.relation.buffer, "group_id": self.group_id}


@dataclass(slots=True)
class Ending:
    """What becomes of a group's events after a call; each list holds the ids of rows.

    `done` None: all of them, of which `expected` should be there. `left` is how many stay under the group's command.
    `parted` wait for a person at once, with `parted_error`. With `exhausted`, what stays has no attempts left: `hook`
    tells whether a function wants to know of it, `delete` whether it is deleted.
    """

    done: list[Any] | None = field(default_factory=list)
    expected: int = 0
    left: int = 0
    parted: list[Any] = field(default_factory=list)
    parted_error: str | None = None
    exhausted: bool = False
    hook: bool = False
    delete: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """What a group's end has come to: how many rows were done or `missing`, and whether the attempt counts."""

    done: int
    credited: bool
    missing: int = 0
    transition: Transition | None = None


def read(relation: Relation, group_id: UUID) -> Plan[list[Row]]:
    """The events of a group. A table's come as text: a type that only the application knows would be bytes else."""
    params = {"buffer": relation.buffer, "group_id": group_id}
    rows = yield Statement(relation.spell(SQL.read), params, binary=relation.own)
    if relation.own:
        return [Row(*row) for row in rows]
    names = [column.name for column in relation.columns]
    return [Row(id, key, since, dict(zip(names, data, strict=True))) for id, key, since, *data in rows]


def halve(place: Place, ids: Sequence[Any], left: int) -> Plan[bool]:
    """Part these off as a suspect of their own; False if the lease is not ours any more. Needs a transaction."""
    if not (yield from _hold(place)):
        return False
    if (yield from _part(place, ids, error=None)):
        yield from execute(SQL.unsuspect, lease_id=place.leased.lease.lease_id)
        yield from _count(place, left)
    return True


def end_part(place: Place, ids: Sequence[Any], left: int, *, fenced: bool) -> Plan[Ended]:
    """Some events are done while the group still runs; needs a transaction.

    They are also if the lease was lost: they were delivered. Not so with `fenced`, where what was written for them
    belongs to this transaction.
    """
    held = yield from _hold(place)
    if fenced and not held:
        raise Superseded("Another worker has this group now; what the handler wrote was rolled back.")
    if not held:
        return Ended((yield from _end_late(place, ids)), False)
    done = yield from _end(place, ids)
    yield from _count(place, left)
    return Ended(done, True, len(ids) - done)


def leave(place: Place, ending: Ending, *, fenced: bool) -> Plan[Ended]:
    """The same for a call after which the group is put off: also what waits for a person leaves it."""
    ended = yield from end_part(place, ending.done or [], ending.left, fenced=fenced)
    if ended.credited and ending.parted:
        yield from _part(place, ending.parted, error=ending.parted_error)
    return ended


def finish(
    place: Place, ending: Ending, conclude: Callable[[int], Transition], now: float, *, fenced: bool
) -> Plan[Ended]:
    """End a group's events and settle its command with what `conclude` says, given how many were done; a transaction.

    If the lease was lost, only what was delivered leaves; if it was closed by this very result, whose answer was lost,
    nothing is left to do.
    """
    held = yield from _hold(place)
    if not held:
        transition = conclude(0 if ending.done is None else len(ending.done))
        credited = yield from settle.settle([transition], now=now)
        if not credited and fenced:
            raise Superseded("Another worker has this group now; what the handler wrote was rolled back.")
        done = 0 if credited else (yield from _end_late(place, ending.done))
        return Ended(done, bool(credited), transition=transition)
    if ending.parted:
        yield from _part(place, ending.parted, error=ending.parted_error)
    done = yield from _end(place, ending.done)
    transition = conclude(done)
    if ending.exhausted and ending.hook:
        yield from _tell(place, transition.details)
    if ending.exhausted and ending.delete:
        yield from _end(place, None, outcome="EXHAUSTED")
    elif ending.left and ending.left != place.told:
        yield from _count(place, ending.left)
    credited = yield from settle.settle([transition], now=now)
    if not credited:
        raise Superseded("This attempt was settled in another way; nothing of this was written.")
    return Ended(done, True, ending.expected - done, transition)


def _hold(place: Place) -> Plan[bool]:
    """Lock the lease, as every settlement does first."""
    held = yield from execute(rescue.SQL.hold, leases=[place.leased.lease.lease_id])
    return bool(held)


def _end(place: Place, ids: Sequence[Any] | None, outcome: str = "DONE") -> Plan[int]:
    if ids is not None and not ids:
        return 0
    [(ended,)] = yield from execute(
        place.relation.spell(SQL.end_items),
        **place.about(),
        ids=None if ids is None else list(ids),
        archive=place.archive,
        outcome=outcome,
    )
    return int(ended)


def _end_late(place: Place, ids: Sequence[Any] | None) -> Plan[int]:
    """What was delivered leaves also the group of another worker, who need not wonder where it went."""
    done = yield from _end(place, ids)
    if done:
        yield from execute(SQL.deliver_late, command=place.leased.id, done=done, partition=place.partition)
    return done


def _part(place: Place, ids: Sequence[Any], *, error: str | None) -> Plan[int]:
    [(moved, _)] = yield from execute(
        place.relation.spell(SQL.part),
        **place.about(),
        ids=list(ids),
        new_group=new_id(),
        lease_id=place.leased.lease.lease_id,
        command=place.leased.id,
        partition=place.partition,
        error=error,
    )
    return int(moved)


def _count(place: Place, left: int) -> Plan[None]:
    yield from execute(SQL.count_items, command=place.leased.id, items=left, partition=place.partition)


def _tell(place: Place, error: str | None) -> Plan[None]:
    yield from execute(
        place.relation.spell(SQL.tell_exhausted),
        **place.about(),
        command=place.leased.id,
        hook_id=uuid5(place.group_id, str(place.leased.lease.attempt)),
        hook_type=EXHAUSTED,
        partition=place.partition,
        error=error,
    )
