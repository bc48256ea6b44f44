"""Columns for `unnest`, packed as PostgreSQL reads arrays: a tenth of the price of adapting a list."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, Self, TypeVar
from uuid import UUID

from psycopg import adapters
from psycopg.adapt import Buffer, Dumper
from psycopg.pq import Format

T = TypeVar("T")

_HEADER = struct.Struct("!iiIii")
_NULL = b"\xff\xff\xff\xff"
_SIXTEEN = (16).to_bytes(4)


class Packed(bytes):
    """An array of one dimension in binary form: before each element stands its width. Each subclass is one type."""

    array: int
    element: int
    code: str
    width: int

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Packed:
        count = len(values)
        if count == 0 or None in values:
            one = struct.Struct(f"!i{cls.code}")
            return cls._of([_NULL if value is None else one.pack(cls.width, value) for value in values])
        fields: list[float | None] = [cls.width] * (2 * count)
        fields[1::2] = values
        return cls(_HEADER.pack(1, 0, cls.element, count, 1) + struct.pack("!" + f"i{cls.code}" * count, *fields))

    def values(self) -> list[Any]:
        """The elements again, for a driver that packs them itself."""
        found: list[Any] = []
        at = _HEADER.size
        while at < len(self):
            width = int.from_bytes(self[at : at + 4], signed=True)
            at += 4
            found.append(None if width < 0 else self._unpacked(self[at : at + width]))
            at += max(0, width)
        return found

    @classmethod
    def _unpacked(cls, field: bytes) -> Any:
        return struct.unpack(f"!{cls.code}", field)[0]

    @classmethod
    def _of(cls, fields: Sequence[bytes]) -> Self:
        if not fields:
            return cls(struct.pack("!iiI", 0, 0, cls.element))
        return cls(_HEADER.pack(1, _NULL in fields, cls.element, len(fields), 1) + b"".join(fields))


class Integers(Packed):
    array, element, code, width = 1007, 23, "i", 4


class Bigints(Packed):
    array, element, code, width = 1016, 20, "q", 8


class Floats(Packed):
    array, element, code, width = 1022, 701, "d", 8


class Texts(Packed):
    array, element = 1009, 25

    @classmethod
    def of(cls, values: Sequence[str | None]) -> Packed:  # type: ignore[override]
        if None in values:
            return cls._of([_NULL if value is None else cls.field(value) for value in values])
        return cls._of(cls.fields(values))  # type: ignore[arg-type]

    @classmethod
    def of_few(cls, values: Sequence[str]) -> Packed:
        """The same where only few of the values are different."""
        fields = {value: cls.field(value) for value in dict.fromkeys(values)}
        return cls._of([fields[value] for value in values])

    @staticmethod
    def fields(values: Sequence[str]) -> list[bytes]:
        """The values, each packed: for those who send them more than once."""
        return [len(raw).to_bytes(4) + raw for raw in [value.encode() for value in values]]

    @classmethod
    def of_fields(cls, fields: Sequence[bytes]) -> Packed:
        """The same of values that are packed."""
        return cls._of(fields)

    @classmethod
    def _unpacked(cls, field: bytes) -> Any:
        return field.decode()

    @staticmethod
    def field(value: str) -> bytes:
        """A value, packed."""
        raw = value.encode()
        return len(raw).to_bytes(4) + raw


class Uuids(Packed):
    array, element = 2951, 2950

    @classmethod
    def of(cls, values: Sequence[UUID]) -> Packed:  # type: ignore[override]
        return cls._of([_SIXTEEN + value.int.to_bytes(16) for value in values])

    @classmethod
    def _unpacked(cls, field: bytes) -> Any:
        return UUID(bytes=field)


def unless_all_null(values: Iterable[T]) -> list[T]:
    """A column, or an empty one if all its values are null: `unnest` fills up what is missing.

    psycopg does not know the type of an array of nulls, and sends it as text. A server whose `array_nulls` is off would
    read NULL in it as a name.
    """
    found = list(values)
    return [] if found.count(None) == len(found) else found  # type: ignore[arg-type]


class _AsIs(Dumper):
    format = Format.BINARY

    def dump(self, obj: Packed) -> Buffer:
        return obj


for kind in (Integers, Bigints, Floats, Texts, Uuids):
    adapters.register_dumper(kind, type(f"{kind.__name__}Dumper", (_AsIs,), {"oid": kind.array}))
