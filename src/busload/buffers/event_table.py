"""Where the events of a buffer are: busload's own table or an application's, and how statements about it are spelled.

A statement over a buffer's table is a template: `FROM {table} AS b WHERE {filter} AND b.{group_id} IS NULL`. Names come
from PostgreSQL's catalogue, quoted by PostgreSQL itself: no text of a user ever becomes SQL.
"""

from __future__ import annotations

import builtins
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache

from busload.buffers.declaration import BufferSettings, BufferTable
from busload.errors import InvalidOperationError
from busload.postgres.plan import Plan, execute, many
from busload.postgres.statements import statements

log = logging.getLogger("busload")

SQL = statements(__name__)

_IDENTIFIER = r'(?:[^\W\d][\w$]*|"(?:[^"\0]|"")+")'
READABLE = re.compile(rf"{_IDENTIFIER}(?:\.{_IDENTIFIER})?\Z")
"""Names that SQL reads as one of a table, perhaps with its schema: `to_regclass` may fail on others."""

_PLACE = re.compile(r"\{([a-z_]+)\}")
ORDINARY_KINDS = ("r", "p")
TEXTS = ("text", "character varying", "bpchar")
NOT_ORDINARY = "no table that rows can be locked in (a view, perhaps)"
NOT_GRANTED = "this role may not select, insert, update and delete there"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of an application's table: its name, as SQL spells it, and its type."""

    name: str
    spelled: str
    type: str
    not_null: bool = False


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
        """A statement about this table; `more` are texts for places of this statement alone.

        `{within}` is one partition of the table: that in the parameter, or the null one.
        """
        return _spell(self, statement, partition is None, tuple(more.items()))

    @property
    def table_name(self) -> str | None:
        """The name of the table in the commands of groups, as SQL spells it. If None, it is busload's own table."""
        return None if self.own else plain(self.table)


@lru_cache(maxsize=1024)
def _spell(relation: Relation, statement: bytes, null_partition: bool, more: tuple[tuple[str, str], ...]) -> bytes:
    within = "true"
    if relation.partition_column is not None:
        value = "IS NULL" if null_partition else f"= %(partition)s::text::{relation.partition_type}"
        within = f"b.{relation.partition_column} {value}"
    places = {field.name: getattr(relation, field.name) for field in fields(relation)}
    places |= {"within": within, "filter_of_g": relation.filter.replace("b.", "g."), **dict(more)}

    def fill(found: re.Match[str]) -> str:
        text = places[found[1]]
        if text is None:
            raise InvalidOperationError(f"Buffer {relation.buffer!r} has no {found[1]}, which this statement is about.")
        return str(text)

    return _PLACE.sub(fill, statement.decode()).encode()


def plain(spelled: str) -> str:
    """A name as SQL spells it outside of a statement with parameters."""
    return spelled.replace("%%", "%")


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
    """Find the table that holds the events of this buffer. A table that cannot be a buffer is refused."""
    if settings.table is None:
        return replace(OWN, buffer=settings.name)
    found = yield from _look_up(settings.table.name)
    return _relation(settings, settings.table, found)


def recall(buffer: str, spelled: Sequence[str | None]) -> Plan[Relation]:
    """Find the table of a buffer that was declared before.

    `spelled` names the table, and its columns for id, group, time, key and partition.
    """
    relation, *names = spelled
    if relation is None:
        return replace(OWN, buffer=buffer)
    found = yield from _look_up(relation)
    known = {} if found is None else {column.spelled: column.name for column in found.columns.values()}
    id, group, created, key, partition = (None if name is None else known.get(name, name) for name in names)
    table = BufferTable(relation, id or "id", group or "group_id", created or "created_at", key)
    return _relation(BufferSettings(buffer, table=table, partition_by=partition), table, found)


def check(settings: BufferSettings) -> Plan[Relation]:
    """Find the table of a buffer when a worker starts, and log a warning if an index is missing."""
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
    # What an event is about, and its partition, are columns that only the application can add.
    wanted = ((table.key, "key"), (partition_by, "partition_by"))
    unknown = [f"{name!r} ({meaning})" for name, meaning in wanted if name is not None and name not in found.columns]
    if unknown:
        raise InvalidOperationError(
            f"The table {found.spelled} has no column {' and none '.join(unknown)}; it has "
            f"{', '.join(found.columns) or 'none'}. Add it first, or name another one."
        )
    if found.kind not in ORDINARY_KINDS:
        return [_comment(f"{found.spelled} is {NOT_ORDINARY}: name another one.")]
    forbidden = [] if found.granted else [_comment(f"{found.spelled}: {NOT_GRANTED}.")]
    return forbidden + _lacking(table, partition_by, found)


def all_ddl(table: BufferTable, *, partition_by: str | None = None) -> list[str]:
    """Return every statement that makes a new table fit to be a buffer, for a migration that is written offline."""
    unknown = _Found(0, table.name if READABLE.match(table.name) else quoted(table.name))
    return _lacking(table, partition_by, unknown)


def _lacking(table: BufferTable, partition_by: str | None, found: _Found) -> list[str]:
    columns = ((table.id, "id"), (table.group_id, "group_id"), (table.created_at, "created_at"))
    mends = [mends for name, meaning in columns for _, mends in _flaws(name, meaning, found)]
    return [statement for some in mends for statement in some] + _missing_indexes(table, partition_by, found)


def _comment(text: str) -> str:
    """In one line, whatever is in the names."""
    return "-- " + " ".join(text.splitlines())


def quoted(name: str) -> str:
    """As SQL spells a name in a script that a person reads before it runs; busload itself runs none of it."""
    if re.fullmatch(r"[a-z_][a-z0-9_]*", name):
        return name
    return '"' + name.replace('"', '""') + '"'


@dataclass(frozen=True, slots=True)
class _Found:
    """What the catalogue says about a table: its columns by their names, and what its indexes hold."""

    oid: int
    spelled: str
    kind: str = "r"
    granted: bool = True
    columns: dict[str, Column] = field(default_factory=dict)
    indexes: Sequence[tuple[list[str], bool, str | None, bool]] = ()
    """Of each index its columns, whether it is unique, its condition, and whether it is the primary key."""

    @property
    def has_primary_key(self) -> bool:
        return any(primary for *_, primary in self.indexes)

    def is_unique(self, column: Column) -> bool:
        """By itself, whatever other columns hold."""
        return any(unique and names == [column.name] and not where for names, unique, where, _ in self.indexes)


def _look_up(name: str) -> Plan[_Found | None]:
    rows = yield from execute(SQL.find_table, name=name, readable=READABLE.match(name) is not None)
    if not rows:
        return None
    [[oid, spelled, kind, granted]] = rows
    columns = yield from many(Column, SQL.find_columns, table=oid)
    indexes = yield from execute(SQL.find_indexes, table=oid)
    return _Found(oid, spelled, kind, granted, {column.name: column for column in columns}, indexes)


def _flaws(name: str, meaning: str, found: _Found) -> list[tuple[str, list[str]]]:
    """What is wrong with a column, and the statements that mend it; a comment where only a person can tell."""
    column, alter = found.columns.get(name), f"ALTER TABLE {found.spelled}"
    if column is None:
        key = "UNIQUE" if found.has_primary_key else "PRIMARY KEY"
        types = {
            "id": f"bigint GENERATED ALWAYS AS IDENTITY {key}",
            "group_id": "uuid",
            "created_at": "timestamptz NOT NULL DEFAULT now()",
        }
        problem = f"there is no column {name!r} ({meaning}); it has {', '.join(found.columns)}"
        return [(problem, [f"{alter} ADD COLUMN {quoted(name)} {types[meaning]};"] if meaning in types else [])]
    its, alter_it = f"column {name!r} ({meaning})", f"{alter} ALTER COLUMN {column.spelled}"
    of_type = f"is of type {column.type}, wanted"
    another = f"{found.spelled}: the column {column.spelled} {of_type}"
    flaws: list[tuple[str, list[str]]] = []
    if meaning == "id":
        unique = found.is_unique(column)
        mends = [] if unique else [f"{alter} ADD UNIQUE ({column.spelled});"]
        mends += [] if column.not_null else [f"{alter_it} SET NOT NULL;"]
        if not found.has_primary_key:
            mends = [f"{alter} ADD PRIMARY KEY ({column.spelled});"]
        if not unique or not column.not_null:
            flaws.append((f"{its} is not unique and not null by itself; wanted a primary key", mends))
    elif meaning == "group_id":
        if column.type != "uuid":
            cast = f"{alter_it} TYPE uuid USING {column.spelled}::uuid;"
            mend = cast if column.type in TEXTS else _comment(f"{another} uuid: name another one.")
            flaws.append((f"{its} {of_type} uuid", [mend]))
        if column.not_null:
            problem = f"{its} must not be null, wanted one that is null while an event waits"
            flaws.append((problem, [f"{alter_it} DROP NOT NULL;"]))
    elif meaning == "created_at":
        is_date, is_time = column.type == "date", column.type.startswith("timestamp")
        if not is_time:
            cast = f"{alter_it} TYPE timestamptz;"
            mend = cast if is_date else _comment(f"{another} timestamptz: name another one.")
            flaws.append((f"{its} {of_type} timestamptz", [mend]))
        if not column.not_null and (is_time or is_date):
            now = f"UPDATE {found.spelled} SET {column.spelled} = now() WHERE {column.spelled} IS NULL;"  # noqa: S608
            mends = [f"{alter_it} SET DEFAULT now();", now, f"{alter_it} SET NOT NULL;"]
            flaws.append((f"{its} may be null, wanted one that tells the age of every event", mends))
    return flaws


def _refuse(settings: BufferSettings, table: BufferTable, found: _Found) -> None:
    problems = [] if found.kind in ORDINARY_KINDS else [f"it is {NOT_ORDINARY}"]
    problems += [] if found.granted else [NOT_GRANTED]
    wanted = [(table.id, "id"), (table.group_id, "group_id"), (table.created_at, "created_at")]
    wanted += [(table.key, "key")] if table.key is not None else []
    wanted += [(settings.partition_by, "partition_by")] if settings.partition_by is not None else []
    for name, meaning in wanted:
        problems += [problem for problem, _ in _flaws(name, meaning, found)[:1]]
    if problems:
        raise InvalidOperationError(
            f"The table {found.spelled} cannot be the buffer {settings.name!r}: {'; '.join(problems)}. Wanted: a "
            "unique id, a nullable uuid for the group, and a created time. "
            f"`busload buffer ddl {table.name}` prints what it lacks."
        )


def _relation(settings: BufferSettings, table: BufferTable, found: _Found | None) -> Relation:
    """How statements spell a table that was found; refuses one that cannot be a buffer."""
    if found is None:
        raise InvalidOperationError(_no_table(table.name, settings.name))
    _refuse(settings, table, found)
    all_columns = {
        name: replace(column, spelled=_literal(column.spelled), type=_literal(column.type))
        for name, column in found.columns.items()
    }
    id, group, created = (all_columns[name] for name in (table.id, table.group_id, table.created_at))
    key = None if table.key is None else all_columns[table.key]
    partition = None if settings.partition_by is None else all_columns[settings.partition_by]
    columns = tuple(column for column in all_columns.values() if column not in (id, group))
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


def _missing_indexes(table: BufferTable, partition_by: str | None, found: _Found) -> list[str]:
    """What claims and reads would have to read the whole table for."""

    def spelled(name: str) -> str:
        return found.columns[name].spelled if name in found.columns else quoted(name)

    def create(names: Sequence[str], where: str, kind: str = "INDEX") -> str:
        return f"CREATE {kind} ON {found.spelled} ({', '.join(map(spelled, names))}) WHERE {where};"

    waits, runs = (f"{spelled(table.group_id)} IS {null}" for null in ("NULL", "NOT NULL"))
    indexes = [
        (have, None if of is None else _simplified(of, {waits: runs, runs: waits})) for have, _, of, _ in found.indexes
    ]
    in_order = [*([partition_by] if partition_by is not None else []), table.created_at, table.id]
    # Each with its condition, and how many of its first columns an index must have that does as well.
    wanted = [(in_order, waits, len(in_order)), ([table.group_id], runs, 1)]
    if table.key is not None:
        wanted += [([table.key], runs, 1), ([table.key, table.created_at, table.id], waits, 1)]
    missing: list[str] = []
    for names, where, most in wanted:
        conditions = [where] if where == waits else [where, None]
        if not any(have[:most] == names[:most] and of in conditions for have, of in indexes):
            missing.append(create(names, where))
    if table.key is not None and found.oid == 0:
        once = create([table.key], waits, "UNIQUE INDEX")
        missing.append(_comment(f"optional, at most one waiting event per key: {once}"))
    return missing


_NEGATES = {" = true": False, " <> false": False, " = false": True, " <> true": True}
"""Comparisons of a test for null that a planner does away with, and whether each negates the test."""


def _simplified(condition: str, negated: Mapping[str, str]) -> str:
    """A test for null as a planner sees it, however it is spelled: Django negates it as `NOT (x IS NULL)`."""
    for end, negates in _NEGATES.items():
        if condition.endswith(end):
            inner = _simplified(condition.removesuffix(end), negated)
            return negated.get(inner, condition) if negates else inner
    if condition.startswith("NOT "):
        return negated.get(_simplified(condition.removeprefix("NOT "), negated), condition)
    if condition.startswith("(") and condition.endswith(")"):
        return _simplified(condition[1:-1], negated)
    return condition
