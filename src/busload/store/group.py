"""How the events of a group are read, and how they leave it: done, parted off, exhausted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid5

import msgspec
import psycopg

from busload.domain.buffer import EXHAUSTED
from busload.domain.execution import Leased, Transition
from busload.domain.ids import new_id
from busload.errors import Superseded, TransientCommandError
from busload.store import rescue, settle
from busload.store.connection import is_away
from busload.store.plan import Plan, Savepoint, Script, Statement, execute
from busload.store.relation import Relation
from busload.store.statements import statements

SQL = statements("group")

REFUSED = "BUFFER_REFUSED"
MOST_PROBES = 200
"""Statements that look for rows that cannot be deleted, at most; those that are not found by then share their fate."""
BY_COLUMN = {"payload": "(SELECT row_to_json(one) FROM (SELECT {data}) AS one)"}
"""A row of an application's table as its handler has it."""
WITH_VERSION = {"version": "b.xmin::text || ' ' || {content}"}
"""Of a row of an application's table: the transaction that wrote it, and a hash of what it holds."""
AS_READ = {
    "these": """((b.{id}, b.xmin::text) IN (SELECT id, pg_catalog.split_part(version, ' ', 1) FROM {as_read})
                 OR (b.{id}, {content}) IN (SELECT id, pg_catalog.split_part(version, ' ', 2) FROM {as_read})
                 OR pg_catalog.pg_xact_status((pg_catalog.pg_current_xact_id()::text::numeric
                                               - pg_catalog.pg_current_xact_id()::xid::text::numeric
                                               + b.xmin::text::numeric)::text::xid8) = 'in progress')"""
}
"""Rows that nobody has updated since they were read, but for the handler's own transaction. A migration that rewrites
their table updates none of them, though it writes them anew."""
UNREADABLE = (psycopg.DataError, ValueError, ArithmeticError, RecursionError)
"""What values raise that Python has no room for: times without end or before Christ, numbers of 5,000 digits."""
UNKNOWN_TIME = datetime.fromtimestamp(0, UTC)


class Row(msgspec.Struct, frozen=True, eq=False):
    """One event as it was read. `data` is the text of an own buffer's payload, or the other columns by their names."""

    id: Any
    key: str | None
    created_at: datetime
    version: str | None
    """What tells whether it is updated later; None for busload's own table."""
    data: Any
    flaw: Exception | None = None
    """Why Python cannot hold this row; then it has no data, and its time is not known."""


@dataclass(frozen=True, slots=True)
class Place:
    """A group that a worker runs: its events, its command, and the lease that fences all that happens to them."""

    relation: Relation
    leased: Leased
    archive: bool
    partition: str | None = None
    told: int | None = None
    """How many events its command says it holds."""
    versions: Mapping[Any, str | None] = field(default_factory=dict)
    """The rows of an application's table as they were read: one that is updated since was not delivered as it is."""

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
    try:
        rows = yield Statement(_with_version(relation, SQL.read), params, binary=relation.own)
    except UNREADABLE as error:
        if getattr(error, "sqlstate", None) is not None:
            raise
        return (yield from _read_apart(relation, params))
    return _rows(relation, rows)


def _read_apart(relation: Relation, params: dict[str, Any]) -> Plan[list[Row]]:
    """The same in ever smaller parts, until the rows that cannot be read stand alone."""
    keys = dict((yield Statement(relation.spell(SQL.read_keys), params, binary=relation.own)))
    found: dict[Any, Row] = {}
    parts = [list(keys)]
    while parts:
        part = parts.pop()
        try:
            rows = yield Statement(_with_version(relation, SQL.read_some), params | {"ids": part}, binary=relation.own)
        except UNREADABLE as error:
            if getattr(error, "sqlstate", None) is not None:
                raise
            if len(part) == 1:
                found[part[0]] = Row(part[0], keys[part[0]], UNKNOWN_TIME, None, None, error)
            else:
                parts += _halves(part)
        else:
            found |= {row.id: row for row in _rows(relation, rows)}
    return [found[id] for id in keys if id in found]


def _with_version(relation: Relation, statement: bytes) -> bytes:
    """Nobody but busload updates its own table."""
    return relation.spell(statement) if relation.own else relation.spell(statement, **WITH_VERSION)


def _rows(relation: Relation, rows: Sequence[Any]) -> list[Row]:
    if relation.own:
        return [Row(*row) for row in rows]
    names = [column.name for column in relation.columns]
    return [
        Row(id, key, since, version, dict(zip(names, data, strict=True))) for id, key, since, version, *data in rows
    ]


def _halves(ids: Sequence[Any]) -> list[list[Any]]:
    middle = len(ids) // 2
    return [list(ids[:middle]), list(ids[middle:])]


def refusal(buffer: str, error: psycopg.Error) -> TransientCommandError:
    return TransientCommandError(
        f"The database refuses a statement about the events of buffer {buffer!r}: {error}. If its table was changed, "
        "`busload buffer ddl` prints what it lacks.",
        code=REFUSED,
    )


def find_refused(place: Place, ids: Sequence[Any]) -> Plan[dict[Any, TransientCommandError]]:
    """Which of these rows cannot be deleted, and why. Needs a transaction, and leaves all as it is."""
    yield Script(b"SET CONSTRAINTS ALL IMMEDIATE")
    refused: dict[Any, TransientCommandError] = {}
    parts, probes = [list(ids)], 0
    while parts:
        part = parts.pop()
        error = yield from _probe(place, part)
        probes += 1
        if error is not None and len(part) > 1 and probes < MOST_PROBES:
            parts += _halves(part)
        elif error is not None:
            refused |= dict.fromkeys(part, error)
    return refused


class _Undo(Exception):
    """It would have worked."""


def _probe(place: Place, ids: Sequence[Any]) -> Plan[TransientCommandError | None]:
    def delete() -> Plan[None]:
        yield from _end(place, ids, expected=len(ids))
        raise _Undo

    try:
        yield Savepoint(delete())
    except _Undo:
        return None
    except TransientCommandError as kept:
        return kept
    except psycopg.Error as error:
        if is_away(error):
            raise
        return refusal(place.relation.buffer, error)
    return None


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
    done = yield from _end(place, ids, expected=len(ids))
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
    done = yield from _end(place, ending.done, expected=ending.expected)
    transition = conclude(done)
    if ending.exhausted and ending.hook:
        yield from _tell(place, transition.details)
    if ending.exhausted and ending.delete:
        yield from _end(place, None, expected=ending.left, outcome="EXHAUSTED")
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


def _end(
    place: Place, ids: Sequence[Any] | None, *, expected: int, outcome: str = "DONE", late: bool = False
) -> Plan[int]:
    """Delete rows. Fewer than expected have vanished, if they are not there; if they are, somebody has kept them.

    Rows that were updated since they were read become a group of their own, to be delivered as they are now. The group
    of another worker, who has read them later, is left alone.
    """
    if ids is not None and not ids:
        return 0
    about = place.about() | {"ids": None if ids is None else list(ids)}
    at, more = place.relation, {}
    if place.versions:
        known = list(place.versions if ids is None else ids)
        about |= {"ids": known, "versions": [place.versions.get(id) for id in known]}
        more = AS_READ
    [(ended,)] = yield from execute(at.spell(SQL.end_items, **more), **about, archive=place.archive, outcome=outcome)
    if ended < expected and more and not late:
        updated = yield Statement(at.spell(SQL.updated, **more), about, binary=False)
        if updated:
            ended += yield from _part(place, [id for (id,) in updated], error=None)
    about.pop("versions", None)
    if ended < expected:
        [(kept,)] = yield from execute(at.spell(SQL.kept), **about)
        if kept:
            raise TransientCommandError(
                f"{kept} events of buffer {at.buffer!r} are still in their group after they were deleted: a trigger or "
                f"a rule of {at.told} keeps them. Let it delete rows that have a {at.group_id}.",
                code=REFUSED,
            )
    return int(ended)


def _end_late(place: Place, ids: Sequence[Any] | None) -> Plan[int]:
    """What was delivered leaves also the group of another worker, who need not wonder where it went."""
    done = yield from _end(place, ids, expected=0 if ids is None else len(ids), late=True)
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
        told_table=place.relation.told,
        error=error,
    )
    return int(moved)


def _count(place: Place, left: int) -> Plan[None]:
    about = {"partition": place.partition, "told_table": place.relation.told}
    yield from execute(SQL.count_items, command=place.leased.id, items=left, **about)


def _tell(place: Place, error: str | None) -> Plan[None]:
    yield from execute(
        place.relation.spell(SQL.tell_exhausted, **({} if place.relation.own else BY_COLUMN)),
        **place.about(),
        command=place.leased.id,
        hook_id=uuid5(place.group_id, str(place.leased.lease.attempt)),
        hook_type=EXHAUSTED,
        partition=place.partition,
        error=error,
    )
