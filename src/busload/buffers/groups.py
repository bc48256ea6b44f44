"""How the events of a group are read and merged, and how they leave it: done, parted off, exhausted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import UUID, uuid5

import msgspec
import psycopg

from busload.buffers.declaration import EXHAUSTED, Merge
from busload.buffers.event_table import Relation
from busload.commands import rescue, settle
from busload.commands.bulk_items import Group, Item
from busload.commands.command import Command
from busload.commands.execution import Leased, Transition, describe, summarise
from busload.commands.ids import new_id
from busload.commands.parts import find_failing
from busload.commands.payload import UndecodableError, decode, encode, safe_str, storable
from busload.errors import PermanentCommandError, SupersededError, TransientCommandError
from busload.postgres.connection import is_away
from busload.postgres.plan import Plan, Savepoint, Script, Statement, execute
from busload.postgres.statements import statements
from busload.settings import PayloadLimits

SQL = statements(__name__)

REFUSED = "BUFFER_REFUSED"
MOST_PROBES = 200
"""At most so many statements look for rows that cannot be deleted. What is not told apart by then counts as such."""
UNREADABLE = (psycopg.DataError, ValueError, ArithmeticError, RecursionError)
"""Errors of values that Python cannot hold: infinite times, times before Christ, numbers of 5,000 digits."""
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
    """Why Python cannot hold this row. Such a row has no data, and its time is not known."""


@dataclass(frozen=True, slots=True)
class RunningGroup:
    """A group that a worker runs: its events, its command, and its lease, the fence for everything that is written."""

    relation: Relation
    leased: Leased
    archive: bool
    partition: str | None = None
    expected: int | None = None
    """How many events its command says it holds."""
    versions: Mapping[Any, str | None] = field(default_factory=dict)
    """The versions of rows of an application's table. A row that was updated since was not delivered as it is now."""

    @property
    def group_id(self) -> UUID:
        return self.leased.command_id

    def about(self) -> dict[str, Any]:
        return {"buffer": self.relation.buffer, "group_id": self.group_id}


@dataclass(slots=True)
class Ending:
    """What becomes of a group's events after a call; each list holds the ids of rows.

    If `done` is None, all events are done, and `expected` of them should be there. `left` is how many stay in the
    group. Events in `parted` wait for a person at once, with `parted_error`. If `exhausted`, the events that stay have
    no attempts left: `hook` says whether a function is told of them, `delete` whether they are deleted.
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
    """How a group has ended: how many rows were done or are `missing`, and whether the attempt counts."""

    done: int
    credited: bool
    missing: int = 0
    transition: Transition | None = None


def read(relation: Relation, group_id: UUID) -> Plan[list[Row]]:
    """The events of a group. If Python cannot hold a row, it comes with its flaw, and the others as they are."""
    params = {"buffer": relation.buffer, "group_id": group_id}
    rows = yield from _read(relation, SQL.read, params)
    if not isinstance(rows, Exception):
        return rows
    keys = dict((yield Statement(relation.spell(SQL.read_keys), params, binary=relation.own)))
    found: dict[Any, Row] = {}

    def read_some(ids: list[Any]) -> Plan[Exception | None]:
        rows = yield from _read(relation, SQL.read_some, params | {"ids": ids})
        if isinstance(rows, Exception):
            return rows
        found.update({row.id: row for row in rows})
        return None

    flaws = yield from find_failing(list(keys), read_some)
    found |= {id: Row(id, keys[id], UNKNOWN_TIME, None, None, flaw) for id, flaw in flaws.items()}
    return [found[id] for id in keys if id in found]


def _read(relation: Relation, sql: bytes, params: dict[str, Any]) -> Plan[list[Row] | Exception]:
    """Rows, or the error if Python cannot hold one of them.

    Those of an application's table come as text: values of its own types would be bytes.
    """
    try:
        rows = yield Statement(relation.spell(sql), params, binary=relation.own)
    except UNREADABLE as error:
        if getattr(error, "sqlstate", None) is not None:
            raise
        return error
    if relation.own:
        return [Row(*row) for row in rows]
    names = [column.name for column in relation.columns]
    return [
        Row(id, key, since, version, dict(zip(names, data, strict=True))) for id, key, since, version, *data in rows
    ]


def refusal(buffer: str, error: psycopg.Error) -> TransientCommandError:
    return TransientCommandError(
        f"The database refuses a statement about the events of buffer {buffer!r}: {error}. If its table was changed, "
        "`busload buffer ddl` prints what it lacks.",
        code=REFUSED,
    )


def find_refused(running: RunningGroup, ids: Sequence[Any]) -> Plan[dict[Any, TransientCommandError]]:
    """Find the rows that cannot be deleted, and why. This needs a transaction, and changes nothing."""
    yield Script(b"SET CONSTRAINTS ALL IMMEDIATE")
    return (yield from find_failing(ids, partial(_probe, running), most_tries=MOST_PROBES))


class _UndoError(Exception):
    """The delete would have worked: undo it."""


def _probe(running: RunningGroup, ids: Sequence[Any]) -> Plan[TransientCommandError | None]:
    def delete() -> Plan[None]:
        yield from _end(running, ids, expected=len(ids))
        raise _UndoError

    try:
        yield Savepoint(delete())
    except _UndoError:
        return None
    except TransientCommandError as kept:
        return kept
    except psycopg.Error as error:
        if is_away(error):
            raise
        return refusal(running.relation.buffer, error)
    return None


def halve(running: RunningGroup, ids: Sequence[Any], left: int) -> Plan[bool]:
    """Make these events a suspect group of their own. False if the lease is not ours any more. Needs a transaction."""
    if not (yield from _hold(running)):
        return False
    if (yield from _part(running, ids, error=None)):
        yield from execute(SQL.unsuspect, lease_id=running.leased.lease.lease_id)
        yield from _count(running, left)
    return True


def end_part(running: RunningGroup, ids: Sequence[Any], left: int, *, fenced: bool) -> Plan[Ended]:
    """Some events are done while the group still runs; needs a transaction.

    They are done even if the lease was lost, because they were delivered. With `fenced` they are not: then everything
    that was written for them belongs to this transaction.
    """
    held = yield from _hold(running)
    if fenced and not held:
        raise SupersededError("Another worker has this group now; what the handler wrote was rolled back.")
    if not held:
        return Ended((yield from _end_late(running, ids)), False)
    done = yield from _end(running, ids, expected=len(ids))
    yield from _count(running, left)
    return Ended(done, True, len(ids) - done)


def leave(running: RunningGroup, ending: Ending, *, fenced: bool) -> Plan[Ended]:
    """End some events of a group that is put off. Events that wait for a person leave it too."""
    ended = yield from end_part(running, ending.done or [], ending.left, fenced=fenced)
    if ended.credited and ending.parted:
        yield from _part(running, ending.parted, error=ending.parted_error)
    return ended


def finish(
    running: RunningGroup, ending: Ending, conclude: Callable[[int], Transition], now: float, *, fenced: bool
) -> Plan[Ended]:
    """End the events of a group and settle its command; needs a transaction.

    `conclude` is given how many events were done, and says where the command goes. If the lease was lost, only the
    delivered events leave. If this very result has closed the lease, and its answer was lost, nothing is left to do.
    """
    held = yield from _hold(running)
    if not held:
        # Only a look: a worker that was silent may get its lease back right now, and to settle its command here
        # would leave the events of the group behind.
        transition = conclude(0 if ending.done is None else len(ending.done))
        credited = yield from settle.credited([transition])
        if not credited and fenced:
            raise SupersededError("Another worker has this group now; what the handler wrote was rolled back.")
        done = 0 if credited else (yield from _end_late(running, ending.done))
        return Ended(done, bool(credited), transition=transition)
    if ending.parted:
        yield from _part(running, ending.parted, error=ending.parted_error)
    done = yield from _end(running, ending.done, expected=ending.expected)
    transition = conclude(done)
    if ending.exhausted and ending.hook:
        yield from _tell(running, transition.details)
    if ending.exhausted and ending.delete:
        yield from _end(running, None, expected=ending.left, outcome="EXHAUSTED")
    elif ending.left and ending.left != running.expected:
        yield from _count(running, ending.left)
    credited = yield from settle.settle([transition], now=now)
    if not credited:
        raise SupersededError("This attempt was settled in another way; nothing of this was written.")
    return Ended(done, True, ending.expected - done, transition)


def _hold(running: RunningGroup) -> Plan[bool]:
    """Lock the lease, as every settlement does first."""
    return rescue.hold([running.leased.lease.lease_id])


def _end(
    running: RunningGroup, ids: Sequence[Any] | None, *, expected: int, outcome: str = "DONE", late: bool = False
) -> Plan[int]:
    """Delete rows. It is an error if a trigger or a rule keeps some; those that others have deleted are no error.

    Rows that were updated since they were read become a group of their own, to be delivered as they are now. If another
    worker has the group by now (`late`), it has read those rows later, and they stay in its group.
    """
    if ids is not None and not ids:
        return 0
    about = running.about() | {"ids": None if ids is None else list(ids)}
    at, statement = running.relation, SQL.end_items
    if running.versions:
        known = list(running.versions if ids is None else ids)
        about |= {"ids": known, "versions": [running.versions.get(id) for id in known]}
        statement = SQL.end_items_as_read
    [(ended,)] = yield from execute(at.spell(statement), **about, archive=running.archive, outcome=outcome)
    if ended < expected and running.versions and not late:
        updated = yield Statement(at.spell(SQL.updated), about, binary=False)
        if updated:
            ended += yield from _part(running, [id for (id,) in updated], error=None)
    about.pop("versions", None)
    if ended < expected:
        [(kept,)] = yield from execute(at.spell(SQL.kept), **about)
        if kept:
            raise TransientCommandError(
                f"{kept} events of buffer {at.buffer!r} are still in their group after they were deleted: a trigger or "
                f"a rule of {at.table_name} keeps them. Let it delete rows that have a {at.group_id}.",
                code=REFUSED,
            )
    return int(ended)


def _end_late(running: RunningGroup, ids: Sequence[Any] | None) -> Plan[int]:
    """Remove delivered events from a group that another worker has by now, and correct the count of its command."""
    done = yield from _end(running, ids, expected=0 if ids is None else len(ids), late=True)
    if done:
        yield from execute(SQL.deliver_late, command=running.leased.id, done=done, partition=running.partition)
    return done


def _part(running: RunningGroup, ids: Sequence[Any], *, error: str | None) -> Plan[int]:
    [(moved, _)] = yield from execute(
        running.relation.spell(SQL.part),
        **running.about(),
        ids=list(ids),
        new_group=new_id(),
        lease_id=running.leased.lease.lease_id,
        command=running.leased.id,
        partition=running.partition,
        table_name=running.relation.table_name,
        error=error,
    )
    return int(moved)


def _count(running: RunningGroup, left: int) -> Plan[None]:
    about = {"partition": running.partition, "table_name": running.relation.table_name}
    yield from execute(SQL.count_items, command=running.leased.id, items=left, **about)


def _tell(running: RunningGroup, error: str | None) -> Plan[None]:
    yield from execute(
        running.relation.spell(SQL.tell_exhausted),
        **running.about(),
        command=running.leased.id,
        hook_id=uuid5(running.group_id, str(running.leased.lease.attempt)),
        hook_type=EXHAUSTED,
        partition=running.partition,
        error=error,
    )


@dataclass(slots=True)
class Events:
    """The items of a group, and the rows behind each: where events are merged, several rows are one item."""

    items: list[Item] = field(default_factory=list)
    unreadable: list[tuple[Item, BaseException]] = field(default_factory=list)
    """Those that fail alone before anybody is called: other hands wrote them, or their merge failed."""
    _rows: dict[Any, list[Any]] = field(default_factory=dict)
    """The rows of each item that has others than its own."""

    @classmethod
    def of(cls, rows: Sequence[Row], merge: Merge | None, *, own: bool) -> Events:
        events = cls()
        if merge is None:
            for row in rows:
                events.add([row], row, None, own=own)
            return events
        by_key: dict[Any, list[Row]] = {}
        for row in rows:
            by_key.setdefault((True, row.id) if row.key is None else (False, row.key), []).append(row)
        for members in by_key.values():
            events.add(members, members[-1] if merge == "keep_last" else members[0], merge, own=own)
        return events

    def add(self, rows: Sequence[Row], chosen: Row, merge: Merge | None, *, own: bool) -> None:
        """Add the item that these rows are; the item has the id of the `chosen` row."""
        if merge is not None:
            self._rows[chosen.id] = [row.id for row in rows]
        try:
            data = _merged([_payload(row, own) for row in rows], merge)
        except Exception as error:
            item = Item(chosen.id, None, chosen.key, rows[0].created_at)
            self.unreadable.append((item, _unusable(error)))
        else:
            self.items.append(Item(chosen.id, data, chosen.key, rows[0].created_at))

    @property
    def all_items(self) -> list[Item]:
        return self.items + [item for item, _ in self.unreadable]

    def rows_of(self, items: Sequence[Item]) -> list[Any]:
        if not self._rows:
            return [item.id for item in items]
        return [row for item in items for row in self._rows[item.id]]

    def drop(self, items: Sequence[Item]) -> None:
        gone = {item.id for item in items}
        self.items = [item for item in self.items if item.id not in gone]
        self.unreadable = [(item, error) for item, error in self.unreadable if item.id not in gone]


def exhausted_group(command: Command) -> Group:
    """What the function for exhausted groups gets: the group as it was then. Rows of a table come as JSON has them."""
    told = command.data
    items = [
        Item(one["id"], one["data"], one["key"], datetime.fromisoformat(one["created_at"])) for one in told["items"]
    ]
    return Group(told["buffer"], UUID(told["group_id"]), items, told["partition"])


def _payload(row: Row, own: bool) -> Any:
    if row.flaw is not None:
        raise UndecodableError(f"Python has no value for a column of this row: {row.flaw}")
    return decode(row.data) if own else row.data


def _merged(values: list[Any], merge: Merge | None) -> Any:
    if callable(merge):
        merged = values[0]
        for newer in values[1:]:
            merged = merge(merged, newer)
        return merged
    return values[-1] if merge == "keep_last" else values[0]


def _unusable(error: Exception) -> PermanentCommandError:
    if isinstance(error, UndecodableError):
        return PermanentCommandError(str(error), code="UNDECODABLE")
    return PermanentCommandError(f"The merge of its events raised {type(error).__name__}: {error}", code="MERGE_FAILED")


MOST_LISTED = 1000
"""Items whose errors are kept with an attempt."""

ROOMY = PayloadLimits(data_bytes=16 * 1024 * 1024)
"""The errors of many items may take more than a result."""


def describe_items(failed: Sequence[tuple[Item, BaseException]], total: int, *, answered: bool, listed: bool) -> str:
    """The errors of an attempt: that of the first item speaks for all, and each is told if they differ."""
    described = decode(describe(failed[0][1]))
    if answered and total > 1:
        described["message"] = f"{len(failed)} of {total} items failed: {described['message']}"
    if listed:
        details: dict[str, Any] = {"items": [_listed(item, error) for item, error in failed[:MOST_LISTED]]}
        if len(failed) > MOST_LISTED:
            details["more"] = len(failed) - MOST_LISTED
        if "details" in described:
            details["said"] = described["details"]
        described["details"] = details
    return encode(described, ROOMY)


def _listed(item: Item, error: BaseException) -> dict[str, Any]:
    described = summarise(error, 300)
    return {
        "id": item.id if isinstance(item.id, int | str) else storable(str(item.id), 300),
        "key": item.key,
        "type": described["type"],
        "code": described["code"],
        "message": safe_str(error, 300),
    }
