"""Numbers packed as PostgreSQL reads arrays are the lists they were made from."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from busload.postgres.arrays import Bigints, Floats, Integers, Packed, Texts
from busload.testing import TestServer

KINDS: list[tuple[type[Packed], str, Any]] = [
    (Integers, "integer", st.integers(-(2**31), 2**31 - 1)),
    (Bigints, "bigint", st.integers(-(2**63), 2**63 - 1)),
    (Floats, "float8", st.floats(allow_nan=False)),
    (Floats, "float8", st.none() | st.floats(allow_nan=False)),
    (Bigints, "bigint", st.none() | st.integers(-(2**63), 2**63 - 1)),
    (Texts, "text", st.none() | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))),
]
BOTH_WAYS = pytest.mark.parametrize("binary", [True, False], ids=["read as binary", "read as text"])


@pytest.fixture(scope="module")
def conn(server: TestServer) -> Iterator[psycopg.Connection[Any]]:
    with server.database() as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        yield conn


def through_the_server(conn: psycopg.Connection[Any], type: str, value: object, *, binary: bool = True) -> Any:
    """What the server understood, as an array and element by element."""
    query = f"SELECT array_agg(x ORDER BY n), %b::{type}[] FROM unnest(%b::{type}[]) WITH ORDINALITY AS u (x, n)"
    row = conn.execute(query.encode(), [value, value], binary=binary).fetchone()
    assert row is not None
    elements, array = row
    assert (elements or []) == array
    return array


@pytest.mark.parametrize(("kind", "type", "values"), KINDS, ids=lambda value: getattr(value, "__name__", ""))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_whatever_is_packed_arrives_as_it_was(
    conn: psycopg.Connection[Any], kind: type[Packed], type: str, values: Any, data: st.DataObject
) -> None:
    drawn = data.draw(st.lists(values, max_size=50))
    assert through_the_server(conn, type, kind.of(drawn)) == drawn
    assert through_the_server(conn, type, kind.of(drawn)) == through_the_server(conn, type, drawn)


@BOTH_WAYS
@pytest.mark.parametrize(
    ("kind", "type", "values"),
    [
        (Integers, "integer", [-(2**31), -1, 0, 1, 2**31 - 1]),
        (Bigints, "bigint", [-(2**63), -(2**31) - 1, -1, 0, 1, 2**32, 2**63 - 1]),
        (Floats, "float8", [0.0, 5e-324, 1.7976931348623157e308, -1.5, math.inf, -math.inf, 0.1]),
        (Integers, "integer", []),
        (Bigints, "bigint", []),
        (Floats, "float8", []),
        (Bigints, "bigint", list(range(10_000))),
    ],
)
def test_extremes_and_nothing_arrive_too(
    conn: psycopg.Connection[Any], kind: type[Packed], type: str, values: list[Any], binary: bool
) -> None:
    assert through_the_server(conn, type, kind.of(values), binary=binary) == values


def test_not_a_number_and_the_sign_of_zero_arrive_too(conn: psycopg.Connection[Any]) -> None:
    packed = Floats.of([math.nan, -0.0])
    [(number, zero)] = [row[0] for row in conn.execute("SELECT %b::float8[]", [packed], binary=True)]
    assert math.isnan(number) and math.copysign(1, zero) == -1


def test_whole_numbers_may_stand_among_floats(conn: psycopg.Connection[Any]) -> None:
    assert through_the_server(conn, "float8", Floats.of([1, 2.5, 3])) == [1.0, 2.5, 3.0]


def test_packed_numbers_carry_their_type(conn: psycopg.Connection[Any]) -> None:
    """Without a cast as well: a plan is made for that type and no other."""
    packed = [Integers.of([1]), Bigints.of([1]), Floats.of([1]), Texts.of(["1"])]
    told: list[Sequence[Any]] = [conn.execute("SELECT pg_typeof(%s)::text", [array]).fetchall() for array in packed]
    assert told == [[("integer[]",)], [("bigint[]",)], [("double precision[]",)], [("text[]",)]]


@pytest.mark.parametrize(
    ("kind", "value"), [(Integers, 2**31), (Integers, -(2**31) - 1), (Bigints, 2**63), (Bigints, -(2**63) - 1)]
)
def test_what_does_not_fit_is_refused_and_not_cut_off(kind: type[Packed], value: int) -> None:
    with pytest.raises(struct.error):
        kind.of([0, value])
