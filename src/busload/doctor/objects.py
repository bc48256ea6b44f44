"""The tables, indexes, triggers and functions that the schema of this release makes, read from its own files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from busload.postgres.schema.migrate import MIGRATIONS, Migration


@dataclass(frozen=True, slots=True)
class SchemaObject:
    """Something that a file creates. Of an index or a trigger, `table` is what it belongs to; else it is empty."""

    kind: str
    """`table`, `index`, `trigger` or `function`."""
    name: str
    table: str
    sql: str
    """The statement that makes it."""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.kind, self.name, self.table

    @property
    def is_unique(self) -> bool:
        return self.sql.startswith("CREATE UNIQUE")


def expected(release: Sequence[Migration] = MIGRATIONS) -> dict[tuple[str, str, str], SchemaObject]:
    """All objects of a release, by kind, name and table. What a later file drops is none of them."""
    found: dict[tuple[str, str, str], SchemaObject] = {}
    for statement in (one for migration in release for one in _BOUNDARY.split(migration.sql)):
        if dropped := _DROP.match(statement):
            found = {key: each for key, each in found.items() if not _is_dropped(each, *dropped.groups())}
        elif made := _made(statement):
            found[made.key] = made
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
_DROP = re.compile(r"DROP (TABLE|INDEX|FUNCTION|TRIGGER) (?:busload\.)?(\w+)(?:\([^)]*\))?(?: ON busload\.(\w+))?")


def _made(statement: str) -> SchemaObject | None:
    text = statement.strip()
    if table := _TABLE.match(text):
        return SchemaObject("table", table[1], "", text)
    if index := _INDEX.match(text):
        return SchemaObject("index", index[1], index[2], text)
    if trigger := _TRIGGER.match(text):
        return SchemaObject("trigger", trigger[1], trigger[2], text)
    if function := _FUNCTION.match(text):
        return SchemaObject("function", function[1], "", text)
    return None


def _is_dropped(each: SchemaObject, kind: str, name: str, table: str | None) -> bool:
    if kind == "TABLE":
        return name in (each.name if each.kind == "table" else "", each.table)
    return each.kind == kind.lower() and each.name == name and table in (None, each.table)
