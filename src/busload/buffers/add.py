"""How events are added to a buffer: what an event may be, and how events are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import psycopg
from psycopg.adapt import PyFormat, Transformer
from psycopg.types.json import Json, Jsonb

from busload.buffers import event_table
from busload.buffers.declaration import BufferSettings
from busload.buffers.event_table import Column
from busload.commands.checks import refuse, wrong, wrong_list, wrong_text
from busload.commands.parts import cut
from busload.commands.payload import PayloadRefusedError, encode
from busload.errors import InvalidCommandError, InvalidOperationError, Problem
from busload.postgres.arrays import unless_all_null
from busload.postgres.plan import Plan, execute
from busload.postgres.statements import statements
from busload.postgres.write import PATIENCE, Write, only, patient
from busload.settings import PayloadLimits

T = TypeVar("T")
SQL = statements(__name__)

SOME, SOME_BYTES = 2000, 4_000_000
"""What one statement adds at most."""

KEY_BYTES = 512


class NewEvent(msgspec.Struct, frozen=True, gc=False):
    """An event that was checked: what goes into the table."""

    partition: str
    key: str | None
    data: str


def add(limits: PayloadLimits, buffer: BufferSettings, data: Any, key: str | None) -> Write[Any]:
    """Add one event."""
    if buffer.table is not None:
        row = _row(limits, buffer, data, key)
        return patient(lambda: only(_insert(buffer, [row])))
    return _write(buffer, partial(_add, buffer, _event(limits, buffer, data, key)), one_statement=True)


def add_many(
    limits: PayloadLimits, buffer: BufferSettings, items: Iterable[Any], key: Callable[[Any], str] | None
) -> Write[list[Any]]:
    """Add many events, all or none; an error names every offender by its index."""
    refuse(wrong_list(items, "items", "several payloads, for example a list of dicts"))
    function: object = key
    if function is not None and not callable(function):
        refuse([wrong(key, "key", "a function that tells the key of a payload")])
    checked: list[Any] = []
    problems: list[Problem] = []
    check = _event if buffer.table is None else _row
    for index, data in enumerate(items):
        try:
            checked.append(check(limits, buffer, data, None if key is None else key(data), index))
        except InvalidCommandError as refused:
            problems += refused.problems
    refuse(problems)
    if buffer.table is not None:
        return patient(partial(_insert, buffer, checked))
    return _write(buffer, partial(_add_many, buffer, checked), one_statement=len(list(_parts(checked))) <= 1)


def _write(buffer: BufferSettings, adding: Callable[..., Plan[T]], *, one_statement: bool) -> Write[T]:
    """Only an event that may be merged into another event may have to wait for a transaction."""
    again = partial(adding, patience=PATIENCE) if _rule(buffer)["once"] else None
    return Write(adding(), one_statement=one_statement, again=again)


def _event(
    limits: PayloadLimits, buffer: BufferSettings, data: Any, key: str | None, index: int | None = None
) -> NewEvent:
    partition, problems = _partition_of(buffer, data)
    problems += _key_problems(buffer, key)
    text = ""
    try:
        text = encode(data, limits)
    except PayloadRefusedError as refused:
        problems.append(refused.problem)
    refuse([Problem(p.code, p.path, p.message, index, p.limit) for p in problems])
    return NewEvent(partition, key, text)


def _partition_of(settings: BufferSettings, data: Any) -> tuple[str, list[Problem]]:
    """The partition an event belongs to: what its payload holds under `partition_by`, as text; or the empty one."""
    name = settings.partition_by
    if name is None:
        return "", []
    if not isinstance(data, dict):
        return "", [wrong(data, "data", f"a dict, since the buffer is partitioned by its key {name!r}")]
    value = data.get(name)
    if value is None or value == "":
        return "", []
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        return "", [wrong(value, f"data/{name}", "text or a whole number, since it tells the partition")]
    return str(value), wrong_text(str(value), f"data/{name}", KEY_BYTES)


def _key_problems(settings: BufferSettings, key: object) -> list[Problem]:
    if key is not None:
        return wrong_text(key, "key", KEY_BYTES)
    if settings.merge is None:
        return []
    return [wrong(None, "key", "the subject of the event, since this buffer merges those of the same one; pass key=")]


def _row(
    limits: PayloadLimits, buffer: BufferSettings, data: Any, key: str | None, index: int | None = None
) -> dict[str, Any]:
    """The columns of an event in the application's table. The table has rules of its own, so `limits` do not count."""
    table = buffer.table
    assert table is not None
    if not isinstance(data, dict) or not data or not all(isinstance(name, str) for name in data):
        message = f"found {data!r:.80}, wanted a dict of columns and values, since the buffer is a table of yours"
        raise InvalidCommandError([Problem("INVALID_OPTION", "/data", message, index)])
    if key is None:
        return dict(data)
    if table.key is None:
        message = f"found {key!r:.80}, but no column for it; declare BufferTable(key=...)"
        raise InvalidCommandError([Problem("INVALID_OPTION", "/key", message, index)])
    return {table.key: key} | data


def _add(settings: BufferSettings, event: NewEvent, *, patience: int | None = None) -> Plan[int | None]:
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


def _add_many(
    settings: BufferSettings, events: Sequence[NewEvent], *, patience: int | None = None
) -> Plan[list[int | None]]:
    """Add many events, all or none; returns their ids in the order of the input."""
    rule = _rule(settings)
    if not rule["once"]:
        rows = yield from _add_in_parts(events, rule, patience)
        return [id for id, _ in rows]
    firsts: dict[str | None, int] = {}
    lasts: dict[str | None, int] = {}
    for index, event in enumerate(events):
        firsts.setdefault(event.key, index)
        lasts[event.key] = index
    kept = lasts if rule["last"] else firsts
    # In the order of their keys, so that two such calls cannot wait for each other.
    rows = yield from _add_in_parts([events[kept[key]] for key in sorted(kept, key=str)], rule, patience)
    added: list[int | None] = [None] * len(events)
    for id, key in rows:
        added[firsts[key]] = id
    return added


def _add_in_parts(events: Sequence[NewEvent], rule: dict[str, Any], patience: int | None) -> Plan[list[Any]]:
    rows: list[Any] = []
    for part in _parts(events):
        columns: dict[str, Any] = {
            "partitions": unless_all_null(event.partition for event in part),
            "keys": unless_all_null(event.key for event in part),
            "data": [event.data for event in part],
        }
        if rule["once"]:
            merging = {"buffer": rule["buffer"], "last": rule["last"], "patience": patience}
            rows += yield from execute(SQL.merge_some, **merging, **columns)
        else:
            rows += sorted((yield from execute(SQL.add_some, buffer=rule["buffer"], **columns)))
    return rows


def _parts(events: Sequence[NewEvent]) -> Iterator[Sequence[NewEvent]]:
    return cut(events, (len(event.data) for event in events), SOME, SOME_BYTES)


def _rule(settings: BufferSettings) -> dict[str, Any]:
    """Whether an event that arrives is merged into the one that waits for its key (`once`), and which data stays."""
    return {
        "buffer": settings.name,
        "once": settings.merge in ("keep_last", "keep_first"),
        "last": settings.merge == "keep_last",
    }


def _insert(settings: BufferSettings, rows: Sequence[dict[str, Any]]) -> Plan[list[Any]]:
    """Rows of an application's table; the keys of each are columns of it."""
    at = yield from event_table.find(settings)
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
