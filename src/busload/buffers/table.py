"""Where the events of a buffer are: busload's own table or an application's, and how statements about it are spelled.

A statement over a buffer's table is a template: `FROM {table} AS b WHERE {filter} AND b.{group_id} IS NULL`. Names come
from PostgreSQL's catalogue, quoted by PostgreSQL itself: no text of a user ever becomes SQL.
"""

from __future__ import annotations

import builtins
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from busload.buffers.declaration import BufferSettings, BufferTable
from busload.errors import InvalidOperationError
from busload.postgres.plan import Plan, execute
from busload.postgres.statements import statements

log = logging.getLogger("busload")

SQL = statements(__name__)

_IDENTIFIER = r'(?:[^\W\d][\w$]*|"(?:[^"\0]|"")+")'
READABLE = re.compile(rf"{_IDENTIFIER}(?:\.{_IDENTIFIER})?\Z")
"""Names that SQL reads as one of a table, perhaps with its schema: `to_regclass` may fail on others."""

_PLACE = re.compile(r"\{([a-z_]+)\}")
ORDINARY_KINDS = ("r", "p")
TEXTS = ("text", "character varying", "bpchar")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of an application's table: its name, as SQL spells it, and its type."""

    name: str
    spelled: str
    type: str


@dataclass(frozen=True, slots=True)
class Relation:
    """How the table of a buffer is spelled in a statement. It is always called `b` there.

    Names of columns come without the `b.`: id, group_id, created_at, key_column, partition_column. Expressions, which
    have it: `since` (created_at with a time zone), `key` and `partition` (texts or null), `bytes` (the size of a row),
    `data` (what to select for its payload), `whole` (the row as json, for the archive), `payload` (the row as json, for
    a handler), `version` (what tells whether a row is updated later: nobody but busload updates its own table),
    `filter` (whose rows they are), `mergeable` (whether another event of its key may wait).
    """

    buffer: str
    table: str
    id: str
    id_type: str
    group_id: str
    created_at: str
    created_type: str
    since: str
    key: str
    partition: str
    filter: str
    bytes: str
    data: str
    whole: str
    payload: str
    version: str = "NULL::text"
    mergeable: str = "true"
    key_column: str | None = None
    partition_column: str | None = None
    partition_type: str | None = None
    columns: tuple[Column, ...] = ()
    """Of an application's table: those that `data` selects, in that order."""
    own: bool = False
    early: str = "false"
    """Whether a time `since` cannot be right, and nobody knows when such an event was added: it is due."""

    def spell(self, statement: builtins.bytes, partition: str | None = "", **more: str) -> builtins.bytes:
        """A statement about this table. `{within}` is one partition of it: that in the parameter, or the null one."""
        return _spell(self, statement, partition is None, tuple(more.items()))

    @property
    def told(self) -> str | None:
        """How the commands of groups name it: as SQL spells it; None is busload's own."""
        return None if self.own else self.table.replace("%%", "%")

    def within(self, null: bool = False) -> str:
        """The condition for one partition."""
        if self.partition_column is None:
            return "true"
        if null:
            return f"b.{self.partition_column} IS NULL"
        return f"b.{self.partition_column} = %(partition)s::text::{self.partition_type}"


@lru_cache(maxsize=1024)
def _spell(relation: Relation, statement: bytes, null_partition: bool, more: tuple[tuple[str, str], ...]) -> bytes:
    places: dict[str, str | None] = {name: getattr(relation, name) for name in _SPELLED}
    places["within"] = relation.within(null_partition)
    places["filter_of_g"] = relation.filter.replace("b.", "g.")
    for name, text in (_USUAL | dict(more)).items():
        # Names of columns are final: whatever one holds, it is no place to be filled.
        places[name] = text if (name, text) in more and name in _FINAL else _filled(text, places)

    def fill(found: re.Match[str]) -> str:
        text = places[found[1]]
        if text is None:
            raise InvalidOperationError(f"Buffer {relation.buffer!r} has no {found[1]}, which this statement is about.")
        return str(text)

    return _PLACE.sub(fill, statement.decode()).encode()


def _filled(text: str, places: dict[str, str | None]) -> str:
    return _PLACE.sub(lambda found: str(places[found[1]]), text)


_SPELLED = (
    "table",
    "id",
    "id_type",
    "group_id",
    "created_at",
    "created_type",
    "since",
    "early",
    "key",
    "partition",
    "filter",
    "bytes",
    "data",
    "whole",
    "payload",
    "version",
    "mergeable",
    "key_column",
    "partition_column",
    "partition_type",
)

_USUAL = {
    "beyond": "true",
    "names": "{key_column}",
    "values": "%(v0)s::text",
}
"""What parts of a statement are, unless it is spelled with others."""
_FINAL = ("names", "values")

OWN = Relation(
    buffer="",
    table="busload.buffered",
    id="id",
    id_type="bigint",
    group_id="group_id",
    created_at="created_at",
    created_type="timestamptz",
    since="b.created_at",
    key="b.key",
    partition="b.partition",
    filter="b.buffer = %(buffer)s::text",
    bytes="b.bytes",
    data="b.data::text",
    whole="b.data",
    payload="b.data",
    mergeable="NOT b.once AND b.key IS NOT NULL",
    key_column="key",
    partition_column="partition",
    partition_type="text",
    own=True,
)
"""busload's own table, in which every buffer has its own rows."""


def find(settings: BufferSettings) -> Plan[Relation]:
    """Where the events of this buffer are; refuses a table that cannot be one."""
    if settings.table is None:
        return replace(OWN, buffer=settings.name)
    found = yield from _look_up(settings.table.name)
    return _spelled(settings, _refuse(settings, found))


def recall(buffer: str, spelled: Sequence[str | None]) -> Plan[Relation]:
    """The same from what was declared before: the table, and its columns for id, group, time, key and partition."""
    relation, *names = spelled
    if relation is None:
        return replace(OWN, buffer=buffer)
    found = yield from _look_up(relation)
    known = {} if found is None else {column.spelled: column.name for column in found.columns}
    id, group, created, key, partition = (None if name is None else known.get(name, name) for name in names)
    table = BufferTable(relation, id or "id", group or "group_id", created or "created_at", key)
    settings = BufferSettings(buffer, table=table, partition_by=partition)
    return _spelled(settings, _refuse(settings, found))


def check(settings: BufferSettings) -> Plan[Relation]:
    """The same at the start of a worker, with a warning if an index is missing."""
    at = yield from find(settings)
    if settings.table is not None:
        missing = yield from ddl(settings.table, partition_by=settings.partition_by)
        if missing:
            log.warning(
                "The table %s of buffer %s will be slow when it is large. It lacks: %s",
                settings.table.name,
                settings.name,
                " ".join(missing),
            )
    return at


def ddl(table: BufferTable, *, partition_by: str | None = None) -> Plan[list[str]]:
    """The statements that make a table fit to be a buffer: what it lacks; none for one that is fit."""
    found = yield from _look_up(table.name)
    if found is None:
        raise InvalidOperationError(_no_table(table.name))
    _refuse_unknown(table, partition_by, found)
    if found.kind not in ORDINARY_KINDS:
        return [
            _comment(f"{found.spelled} is no table that rows can be locked in (a view, perhaps): name another one.")
        ]
    names = {column.name for column in found.columns}
    forbidden = f"{found.spelled}: this role may not select, insert, update and delete there."
    alter = [] if found.granted else [_comment(forbidden)]
    added = _columns(table, another_primary_key=found.has_primary_key)
    alter += [f"ALTER TABLE {found.spelled} {text};" for name, text in added if name not in names]
    alter += _mended(table, found)
    return alter + _missing_indexes(table, partition_by, found, merges=table.key is not None)


def _refuse_unknown(table: BufferTable, partition_by: str | None, found: _Found) -> None:
    """What an event is about, and its partition, are columns that only the application can add."""
    wanted = ((table.key, "key"), (partition_by, "partition_by"))
    unknown = [f"{name!r} ({meaning})" for name, meaning in wanted if name is not None and not found.column(name)]
    if unknown:
        raise InvalidOperationError(
            f"The table {found.spelled} has no column {' and none '.join(unknown)}; it has "
            f"{', '.join(one.name for one in found.columns) or 'none'}. Add it first, or name another one."
        )


def _mended(table: BufferTable, found: _Found) -> list[str]:
    """What makes columns fit that are there but are not as they must be; a comment where only a person can tell."""
    alter = f"ALTER TABLE {found.spelled}"
    lines: list[str] = []
    if (id := found.column(table.id)) is not None and _problems_of(id, "id", found):
        if found.has_primary_key:
            lines += [] if found.is_unique(id) else [f"{alter} ADD UNIQUE ({id.spelled});"]
            lines += [] if id.name in found.not_null else [f"{alter} ALTER COLUMN {id.spelled} SET NOT NULL;"]
        else:
            lines.append(f"{alter} ADD PRIMARY KEY ({id.spelled});")
    if (group := found.column(table.group_id)) is not None:
        if group.type in TEXTS:
            lines.append(f"{alter} ALTER COLUMN {group.spelled} TYPE uuid USING {group.spelled}::uuid;")
        elif group.type != "uuid":
            lines.append(_other_type(group, found, "uuid"))
        if group.name in found.not_null:
            lines.append(f"{alter} ALTER COLUMN {group.spelled} DROP NOT NULL;")
    if (created := found.column(table.created_at)) is not None:
        if created.type == "date":
            lines.append(f"{alter} ALTER COLUMN {created.spelled} TYPE timestamptz;")
        elif not created.type.startswith("timestamp"):
            lines.append(_other_type(created, found, "timestamptz"))
        if created.name not in found.not_null and created.type.startswith(("timestamp", "date")):
            lines += [
                f"{alter} ALTER COLUMN {created.spelled} SET DEFAULT now();",
                f"UPDATE {found.spelled} SET {created.spelled} = now() WHERE {created.spelled} IS NULL;",  # noqa: S608
                f"{alter} ALTER COLUMN {created.spelled} SET NOT NULL;",
            ]
    return lines


def _other_type(column: Column, found: _Found, wanted: str) -> str:
    return _comment(
        f"{found.spelled}: the column {column.spelled} is of type {column.type}, wanted {wanted}: name another one."
    )


def _comment(text: str) -> str:
    """In one line, whatever is in the names."""
    return "-- " + " ".join(text.splitlines())


def all_ddl(table: BufferTable, *, partition_by: str | None = None) -> list[str]:
    """The same for a table that nobody has looked at: every statement, for whoever writes a migration offline."""
    spelled = table.name if READABLE.match(table.name) else quoted(table.name)
    alter = [f"ALTER TABLE {spelled} {added};" for _, added in _columns(table)]
    unknown = _Found(0, spelled, "r", True, [], set(), [])
    return alter + _missing_indexes(table, partition_by, unknown, merges=table.key is not None)


def quoted(name: str) -> str:
    """As SQL spells a name in a script that a person reads before it runs; busload itself runs none of it."""
    if re.fullmatch(r"[a-z_][a-z0-9_]*", name):
        return name
    return '"' + name.replace('"', '""') + '"'


@dataclass(frozen=True, slots=True)
class _Found:
    """What the catalogue says about a table."""

    oid: int
    spelled: str
    kind: str
    granted: bool
    columns: list[Column]
    not_null: set[str]
    indexes: list[tuple[list[str], bool, str | None]]
    has_primary_key: bool = False

    def column(self, name: str) -> Column | None:
        return next((column for column in self.columns if column.name == name), None)

    def is_unique(self, column: Column) -> bool:
        """By itself, whatever other columns hold."""
        return any(unique and names == [column.name] and not where for names, unique, where in self.indexes)


def _look_up(name: str) -> Plan[_Found | None]:
    readable = READABLE.match(name) is not None
    rows = yield from execute(SQL.find_table, name=name, readable=readable)
    if not rows:
        return None
    [[oid, spelled, kind, granted]] = rows
    columns = yield from execute(SQL.find_columns, table=oid)
    indexes = yield from execute(SQL.find_indexes, table=oid)
    return _Found(
        oid,
        spelled,
        kind,
        granted,
        [Column(column, text, type) for column, text, type, _ in columns],
        {column for column, _, _, not_null in columns if not_null},
        [(names, unique, where) for names, unique, where, _ in indexes],
        any(primary for *_, primary in indexes),
    )


def _refuse(settings: BufferSettings, found: _Found | None) -> _Found:
    table = settings.table
    assert table is not None
    if found is None:
        raise InvalidOperationError(_no_table(table.name, settings.name))
    problems: list[str] = []
    if found.kind not in ORDINARY_KINDS:
        problems.append("it is no table that rows can be locked in (a view, perhaps)")
    if not found.granted:
        problems.append("this role may not select, insert, update and delete there")
    wanted = [(table.id, "id"), (table.group_id, "group_id"), (table.created_at, "created_at")]
    wanted += [(table.key, "key")] if table.key is not None else []
    wanted += [(settings.partition_by, "partition_by")] if settings.partition_by is not None else []
    for name, meaning in wanted:
        column = found.column(name)
        if column is None:
            known = ", ".join(one.name for one in found.columns)
            problems.append(f"there is no column {name!r} ({meaning}); it has {known}")
        else:
            problems += _problems_of(column, meaning, found)
    if problems:
        raise InvalidOperationError(
            f"The table {found.spelled} cannot be the buffer {settings.name!r}: {'; '.join(problems)}. Wanted: a "
            "unique id, a nullable uuid for the group, and a created time. "
            f"`busload buffer ddl {table.name}` prints what it lacks."
        )
    return found


def _problems_of(column: Column, meaning: str, found: _Found) -> list[str]:
    if meaning == "id" and (not found.is_unique(column) or column.name not in found.not_null):
        return [f"column {column.name!r} (id) is not unique and not null by itself; wanted a primary key"]
    if meaning == "group_id":
        if column.type != "uuid":
            return [f"column {column.name!r} (group_id) is of type {column.type}, wanted uuid"]
        if column.name in found.not_null:
            return [f"column {column.name!r} (group_id) must not be null, wanted one that is null while an event waits"]
    if meaning == "created_at":
        if not column.type.startswith("timestamp"):
            return [f"column {column.name!r} (created_at) is of type {column.type}, wanted timestamptz"]
        if column.name not in found.not_null:
            return [f"column {column.name!r} (created_at) may be null, wanted one that tells the age of every event"]
    return []


def _spelled(settings: BufferSettings, found: _Found) -> Relation:
    table = settings.table
    assert table is not None

    def column(name: str) -> Column:
        one = found.column(name)
        assert one is not None
        return Column(one.name, _literal(one.spelled), _literal(one.type))

    id, group, created = column(table.id), column(table.group_id), column(table.created_at)
    key = None if table.key is None else column(table.key)
    partition = None if settings.partition_by is None else column(settings.partition_by)
    technical = {table.id, table.group_id}
    columns = tuple(column(one.name) for one in found.columns if one.name not in technical)
    data = ", ".join(f"b.{one.spelled}" for one in columns)
    since, early = f"b.{created.spelled}", "false"
    if created.type != "timestamp with time zone":
        # Nobody knows in which zone it was written: the earlier reading makes it leave too soon at worst, never late.
        since = f"least({since}::timestamptz, {since} AT TIME ZONE 'UTC')"
        early = "since > clock_timestamp()"
    return Relation(
        buffer=settings.name,
        table=_literal(found.spelled),
        id=id.spelled,
        id_type=id.type,
        group_id=group.spelled,
        created_at=created.spelled,
        created_type=created.type,
        since=since,
        key="NULL::text" if key is None else f"b.{key.spelled}::text",
        partition="NULL::text" if partition is None else f"b.{partition.spelled}::text",
        filter="true",
        bytes="octet_length((b.*)::text)",
        data=data,
        whole="row_to_json(b.*)",
        payload=f"(SELECT row_to_json(one) FROM (SELECT {data}) AS one)",  # noqa: S608 - names of the catalogue
        version="b.xmin::text || ' ' || pg_catalog.hashtextextended((b.*)::text, 0)::text",
        key_column=None if key is None else key.spelled,
        partition_column=None if partition is None else partition.spelled,
        partition_type=None if partition is None else partition.type,
        columns=columns,
        early=early,
    )


def _literal(spelled: str) -> str:
    """A name may hold a percent sign, which psycopg would take for a parameter."""
    return spelled.replace("%", "%%")


def _no_table(name: str, buffer: str | None = None) -> str:
    what = "" if buffer is None else f", which the buffer {buffer!r} is declared to be"
    return (
        f"There is no table {name!r}{what}. Create it (and name its schema, if it is in another one than the "
        "connection's search_path says); `busload buffer ddl` prints what it needs."
    )


def _columns(table: BufferTable, *, another_primary_key: bool = False) -> list[tuple[str, str]]:
    kind = "UNIQUE" if another_primary_key else "PRIMARY KEY"
    return [
        (table.id, f"ADD COLUMN {quoted(table.id)} bigint GENERATED ALWAYS AS IDENTITY {kind}"),
        (table.group_id, f"ADD COLUMN {quoted(table.group_id)} uuid"),
        (table.created_at, f"ADD COLUMN {quoted(table.created_at)} timestamptz NOT NULL DEFAULT now()"),
    ]


def _missing_indexes(table: BufferTable, partition_by: str | None, found: _Found, *, merges: bool) -> list[str]:
    """What claims and reads would have to read the whole table for."""

    def spelled(name: str) -> str:
        column = found.column(name)
        return quoted(name) if column is None else column.spelled

    waits, runs = f"({spelled(table.group_id)} IS NULL)", f"({spelled(table.group_id)} IS NOT NULL)"
    in_order = [*([partition_by] if partition_by is not None else []), table.created_at, table.id]
    missing: list[str] = []

    def lacks(names: Sequence[str], *conditions: str | None) -> bool:
        return not any(have[: len(names)] == list(names) and where in conditions for have, _, where in found.indexes)

    def create(names: Sequence[str], where: str, unique: bool = False) -> str:
        kind = "UNIQUE INDEX" if unique else "INDEX"
        return f"CREATE {kind} ON {found.spelled} ({', '.join(map(spelled, names))}) WHERE {where[1:-1]};"

    if lacks(in_order, waits):
        missing.append(create(in_order, waits))
    if lacks([table.group_id], runs, None):
        missing.append(create([table.group_id], runs))
    if merges and table.key is not None:
        if lacks([table.key], runs, None):
            missing.append(create([table.key], runs))
        if lacks([table.key], waits):
            missing.append(create([table.key, table.created_at, table.id], waits))
        if found.oid == 0:
            once = create([table.key], waits, unique=True)
            missing.append(_comment(f"optional, at most one waiting event per key: {once}"))
    return missing
