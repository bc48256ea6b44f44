"""The tables, indexes, keys, triggers and functions that the schema of this release makes, read from its own files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from busload.postgres.schema.migrate import MIGRATIONS, Migration


@dataclass(frozen=True, slots=True)
class SchemaObject:
    """Something that a file creates. Of an index or a trigger, `table` is what it belongs to; else it is empty."""

    kind: str
    """`table`, `index`, `trigger` or `function`. A key of a table is its index."""
    name: str
    table: str
    sql: str
    """The statement that makes it."""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.kind, self.name, self.table

    @property
    def is_unique(self) -> bool:
        return self.sql.startswith(("CREATE UNIQUE", "ALTER TABLE"))


def expected(release: Sequence[Migration] = MIGRATIONS) -> dict[tuple[str, str, str], SchemaObject]:
    """All objects of a release, by kind, name and table. What a later file drops is none of them."""
    found: dict[tuple[str, str, str], SchemaObject] = {}
    for statement in (one for migration in release for one in _BOUNDARY.split(migration.sql)):
        if dropped := _DROP.match(statement):
            found = {key: each for key, each in found.items() if not _is_dropped(each, *dropped.groups())}
        else:
            found |= {made.key: made for made in _made(statement)}
    return found


@cache
def expected_here() -> dict[tuple[str, str, str], SchemaObject]:
    """The objects of this release."""
    return expected()


_BOUNDARY = re.compile(r"^(?=CREATE |COMMENT |INSERT |DROP |ALTER |--)", re.MULTILINE)
_TABLE = re.compile(r"CREATE (?:UNLOGGED )?TABLE busload\.(\w+)")
_INDEX = re.compile(r"CREATE (?:UNIQUE )?INDEX (\w+)\s+ON busload\.(\w+)")
_TRIGGER = re.compile(r"CREATE (?:CONSTRAINT )?TRIGGER (\w+) [^;]*? ON busload\.(\w+)")
_FUNCTION = re.compile(r"CREATE (?:OR REPLACE )?FUNCTION busload\.(\w+)")
_KEY = re.compile(
    r"^ +(?:CONSTRAINT (?P<name>\w+) +)?(?:(?P<column>[a-z]\w*) [^,\n-]*?)?(?P<kind>PRIMARY KEY|UNIQUE)\b"
    r"(?: +\((?P<columns>[^)]+)\))?",
    re.MULTILINE,
)
_DROP = re.compile(r"DROP (TABLE|INDEX|FUNCTION|TRIGGER) (?:busload\.)?(\w+)(?:\([^)]*\))?(?: ON busload\.(\w+))?")


def _made(statement: str) -> Iterator[SchemaObject]:
    text = statement.strip()
    if table := _TABLE.match(text):
        yield SchemaObject("table", table[1], "", text)
        yield from _keys(table[1], text)
    elif index := _INDEX.match(text):
        yield SchemaObject("index", index[1], index[2], text)
    elif trigger := _TRIGGER.match(text):
        yield SchemaObject("trigger", trigger[1], trigger[2], text)
    elif function := _FUNCTION.match(text):
        yield SchemaObject("function", function[1], "", text)


def _keys(table: str, text: str) -> Iterator[SchemaObject]:
    """The indexes of the keys that a table declares, with the names that PostgreSQL gives them."""
    for declared in _KEY.finditer(text):
        kind, columns = declared["kind"], declared["columns"] or declared["column"]
        words = [table, "pkey"] if kind == "PRIMARY KEY" else [table, *columns.split(", "), "key"]
        name = declared["name"] or "_".join(words)
        again = f"ALTER TABLE busload.{table} ADD CONSTRAINT {name} {kind} ({columns});"
        yield SchemaObject("index", name, table, again)


def _is_dropped(each: SchemaObject, kind: str, name: str, table: str | None) -> bool:
    if kind == "TABLE":
        return name in (each.name if each.kind == "table" else "", each.table)
    return each.kind == kind.lower() and each.name == name and table in (None, each.table)
