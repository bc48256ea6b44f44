"""What busload's statements, values and errors are for a driver other than psycopg.

Statements are written for psycopg: each parameter has a name and a cast, `%(ids)b::uuid[]`. Values go to another driver
as numbers, booleans and text only, and PostgreSQL reads the text as the cast says. So it does not matter what the
application has told its driver about UUIDs, times or JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from uuid import UUID

import psycopg
from psycopg.adapt import PyFormat, Transformer
from psycopg.pq import DiagnosticField

from busload.postgres.arrays import Packed

PARAMETER = re.compile(r"%\((?P<name>\w+)\)[bst](?:::(?P<type>\w+)(?P<array>\[\])?(?![\w(.\[]))?|%%")
"""A parameter with the type it is cast to, if that is a plain name; or a percent sign."""

NATIVE = frozenset(("bigint", "boolean", "float8", "integer", "smallint", "text"))
"""Types of which every driver sends values as PostgreSQL does."""

FAILED = "The connection given as conn is in a failed transaction. Roll it back before you send."
CLOSED = "The connection given as conn is closed. Pass an open one, or none."


class Numbered(NamedTuple):
    """A statement whose parameters are `$1`, `$2` and so on, and where their values come from."""

    sql: str
    parameters: tuple[tuple[str, Callable[[Any], Any]], ...]

    def values(self, params: Mapping[str, Any]) -> list[Any]:
        return [convert(params[name]) for name, convert in self.parameters]


def numbered(sql: bytes) -> Numbered:
    """The statement with numbers for names. A name that is cast to two types has two numbers."""
    found: dict[tuple[str, str], int] = {}
    converters: list[tuple[str, Callable[[Any], Any]]] = []

    def number(parameter: re.Match[str]) -> str:
        name, type, array = parameter["name"], parameter["type"], parameter["array"] or ""
        if name is None:
            return "%"
        native = type in NATIVE
        nth = found.get((name, f"{type}{array}"))
        if nth is None:
            nth = found[name, f"{type}{array}"] = len(found) + 1
            each = _as_is if native and type != "text" else as_text
            converters.append((name, as_list(each) if array else each))
        cast = f"::{type}{array}" if type else ""
        return f"${nth}{cast}" if native else f"${nth}::text{array}{cast}"

    text = PARAMETER.sub(number, sql.decode())
    return Numbered(text, tuple(converters))


def as_text(value: Any) -> str | None:
    """A value as PostgreSQL reads it from text; None stays None."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, UUID | int | float) and not isinstance(value, bool):
        return str(value)
    dumped = Transformer().get_dumper(value, PyFormat.TEXT).dump(value)
    return None if dumped is None else bytes(dumped).decode()


def as_list(each: Callable[[Any], Any]) -> Callable[[Any], list[Any] | None]:
    """The conversion of an array, by that of its elements."""

    def convert(values: Any) -> list[Any] | None:
        if values is None:
            return None
        if isinstance(values, Packed):
            values = values.values()
        return list(values) if each is _as_is else [each(value) for value in values]

    return convert


def _as_is(value: Any) -> Any:
    return value


def error_of_server(error: Exception, sqlstate: str, facts: Mapping[DiagnosticField, str | None]) -> psycopg.Error:
    """The error of psycopg that says the same, with the error of the driver as its cause."""
    try:
        kind = psycopg.errors.lookup(sqlstate)
    except KeyError:  # of an extension, or raised by a trigger
        kind = psycopg.DatabaseError
    info: dict[int, bytes | None] = {field: fact.encode() for field, fact in facts.items() if fact is not None}
    same = kind(str(error), info={**info, DiagnosticField.SQLSTATE: sqlstate.encode()})
    same.__cause__ = error
    return same
