"""What comes in comes back exactly, or is refused with a code and a path."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import decimal
import enum
import json
import math
import sys
import tracemalloc
import types
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from busload.commands.payload import (
    PayloadRefusedError,
    UndecodableError,
    decode,
    decode_strict,
    encode,
    safe_str,
    storable,
)
from busload.errors import Problem
from busload.settings import PayloadLimits

MIB = 1024 * 1024
CODES = {
    "NUL_IN_JSON",
    "LONE_SURROGATE",
    "NON_FINITE_NUMBER",
    "NUMBER_TOO_LONG",
    "NUMBER_OUT_OF_RANGE",
    "TOO_DEEP",
    "CIRCULAR",
    "TOO_LARGE",
    "UNSERIALISABLE",
    "INVALID_KEY",
    "INVALID_JSON",
    "INVALID_UTF8",
    "DUPLICATE_KEY",
}


def problem_of(call: Callable[..., object], *args: Any, **options: Any) -> Problem:
    with pytest.raises(PayloadRefusedError) as refused:
        call(*args, **options)
    problem = refused.value.problem
    assert problem.code in CODES
    assert str(problem) == str(refused.value)
    return problem


def code_of(call: Callable[..., object], *args: Any, **options: Any) -> str:
    return problem_of(call, *args, **options).code


def outcome(call: Callable[..., Any], *args: Any) -> tuple[Any, Problem | None]:
    try:
        return call(*args), None
    except PayloadRefusedError as refused:
        return None, refused.problem


def as_it_comes_back(value: Any) -> Any:
    """Equal only to what has the same types all the way down; tuples count as lists, and -0.0 is not 0.0."""
    if isinstance(value, dict):
        return "dict", [(as_it_comes_back(key), as_it_comes_back(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return "list", [as_it_comes_back(item) for item in value]
    return type(value).__name__, repr(value)


def nested(depth: int, core: object = 0) -> Any:
    for _ in range(depth):
        core = [core]
    return core


def assert_round_trip(value: Any, limits: PayloadLimits | None = None) -> None:
    text = encode(value, limits or PayloadLimits())
    assert as_it_comes_back(decode(text)) == as_it_comes_back(value)


# What is accepted


@pytest.mark.parametrize("value", [None, [], {}, "", 0, False, True, 1.5, "text", {"a": {"b": [None]}}])
def test_any_json_value_is_a_payload(value: Any) -> None:
    assert_round_trip(value)


@pytest.mark.parametrize(
    "integer",
    [2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**100, 10**4300 - 1, -(10**4300 - 1)],
    ids=lambda integer: f"{integer.bit_length()}-bit-{'-' if integer < 0 else '+'}{integer % 2}",
)
def test_an_integer_of_up_to_4300_digits_comes_back_exactly(integer: int) -> None:
    assert_round_trip({"n": [integer]})
    assert decode_strict(encode([integer])) == [integer]


@pytest.mark.parametrize(
    "number", [0.1, 1.0, -0.0, 0.0, 5e-324, 1e16, 1e-7, 1.7976931348623157e308, 2.2250738585072014e-308]
)
def test_a_float_comes_back_as_the_same_float_with_its_sign(number: float) -> None:
    back = decode(encode(number))
    assert type(back) is float
    assert (back, math.copysign(1, back)) == (number, math.copysign(1, number))


def test_a_backslash_and_u0000_as_literal_text_are_accepted() -> None:
    assert_round_trip({"\\u0000": ["\\u0000", "\\\\u0000", 'C:\\u0000"']})


@pytest.mark.parametrize(
    "text",
    [
        "\ufffe\uffff",
        "\ue000",
        "👩‍👩‍👧",
        "e\u0301",
        "\U0010ffff",
        "\u202eabc\u2066",
        "\x1b[31m\r\n\x7f\x01",
        "<script>",
    ],
)
def test_unicode_and_control_characters_come_back_character_by_character(text: str) -> None:
    assert_round_trip({text: text})


def test_a_tuple_comes_back_as_a_list() -> None:
    assert decode(encode({"pair": (1, (2, ()))})) == {"pair": [1, [2, []]]}


class PlainStr(str):
    __slots__ = ()


class PlainInt(int):
    pass


class PlainFloat(float):
    pass


class PlainList(list[Any]):
    pass


@pytest.mark.parametrize(
    ("value", "builtin"),
    [
        (PlainStr("a"), "a"),
        (PlainInt(7), 7),
        (PlainInt(2**70), 2**70),
        (PlainFloat(-0.0), -0.0),
        (PlainList([PlainInt(1)]), [1]),
        (collections.OrderedDict(a=1), {"a": 1}),
        (collections.defaultdict(list, {"a": [PlainStr("b")]}), {"a": ["b"]}),
        (collections.Counter("aa"), {"a": 2}),
    ],
)
def test_a_subclass_that_equals_its_builtin_comes_back_as_the_builtin(value: Any, builtin: Any) -> None:
    assert as_it_comes_back(decode(encode([value]))) == as_it_comes_back([builtin])


def test_what_repeats_without_being_circular_is_accepted() -> None:
    shared = {"n": 2**70}
    assert_round_trip([shared, shared, {"again": shared}])


# What is refused


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("\0", "/data"),
        ({"a": [1, "x\0y"]}, "/data/a/1"),
        ({"a": ["\\u0000", "\0"]}, "/data/a/1"),
        ({"a~b": {"c/d": "\0"}}, "/data/a~0b/c~1d"),
        ({"a": {"k\0": 1}}, "/data/a"),
        ({"\0": 1}, "/data"),
    ],
)
def test_nul_is_refused_in_values_and_keys(value: Any, path: str) -> None:
    problem = problem_of(encode, value)
    assert (problem.code, problem.path) == ("NUL_IN_JSON", path)


@pytest.mark.parametrize("lone", ["\ud800", "\udfff", "a\udc00\ud800"])  # noqa: PT014 - they do differ
def test_a_lone_surrogate_is_refused_in_values_and_keys(lone: str) -> None:
    problem = problem_of(encode, [{"a": lone}])
    assert (problem.code, problem.path) == ("LONE_SURROGATE", "/data/0/a")
    assert code_of(encode, {lone: 1}) == "LONE_SURROGATE"


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, PlainFloat("nan"), PlainFloat("inf")])
def test_a_number_that_is_not_finite_is_refused(number: float) -> None:
    for value, where in (({"rates": [1.0, number]}, "/rates/1"), ({"from": 1.0, "to": number}, "/to"), (number, "")):
        problem = problem_of(encode, value)
        assert (problem.code, problem.path) == ("NON_FINITE_NUMBER", "/data" + where)


@pytest.mark.parametrize("integer", [10**4300, -(10**4300), 1 << 200_000], ids=["4301", "-4301", "60206"])
def test_an_integer_of_4301_digits_is_refused(integer: int) -> None:
    problem = problem_of(encode, {"n": integer})
    assert (problem.code, problem.path, problem.limit) == ("NUMBER_TOO_LONG", "/data/n", 4300)


def test_a_lower_limit_of_digits_is_kept_to_the_digit() -> None:
    limits = PayloadLimits(integer_digits=25)
    assert_round_trip([10**25 - 1, -(10**25) + 1], limits)
    assert problem_of(encode, 10**25, limits).limit == 25


def test_the_interpreters_own_limit_of_digits_is_respected() -> None:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(700)
    try:
        assert code_of(encode, 10**700) == "NUMBER_TOO_LONG"
        assert code_of(decode_strict, "1" * 701) == "NUMBER_TOO_LONG"
        assert code_of(decode_strict, "1e" + "9" * 701) == "NUMBER_OUT_OF_RANGE"
        with pytest.raises(UndecodableError):
            decode("[" + "1" * 701 + "]")
    finally:
        sys.set_int_max_str_digits(before)


class Colour(str, enum.Enum):  # noqa: UP042 - the older spelling of StrEnum counts as well
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Account:
    number: int = 1


class Point(NamedTuple):
    x: int = 1
    y: int = 2


class Shouting(str):
    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


class Raising(dict[str, int]):
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("never compare me")

    __hash__ = None


class EqualsAnything:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (decimal.Decimal("1.10"), "str(value)"),
        (uuid.UUID(int=1), "str(value)"),
        (datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), "isoformat()"),
        (datetime.date(2026, 1, 1), "isoformat()"),
        (datetime.timedelta(1), "str(value)"),
        (b"bytes", "b64encode"),
        (bytearray(b"bytes"), "b64encode"),
        ({1, 2}, "sorted(value)"),
        (frozenset(), "sorted(value)"),
        (Account(), "asdict(value)"),
        (Point(), "_asdict()"),
        (Colour.RED, ".value"),
        (Level.HIGH, ".value"),
        (Shouting("a"), "str(value)"),
        (Raising(), "dict(value)"),
        (EqualsAnything(), "str(value)"),
        (types.MappingProxyType({}), "dict"),
        (msgspec.Raw(b"{broken"), "str(value)"),
        (object(), "str(value)"),
        (1j, "str(value)"),
        (range(3), "str(value)"),
        (iter([1]), "str(value)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_type_that_would_not_come_back_is_refused_by_name_path_and_advice(value: Any, advice: str) -> None:
    problem = problem_of(encode, {"items": [0, value]})
    assert (problem.code, problem.path) == ("UNSERIALISABLE", "/data/items/1")
    assert type(value).__name__ in problem.message
    assert advice in problem.message


@pytest.mark.parametrize("key", [1, 1.5, None, True, (1,), b"a", Colour.RED, PlainStr("a"), uuid.UUID(int=1)])
def test_a_key_that_is_not_exactly_a_string_is_refused(key: Any) -> None:
    problem = problem_of(encode, {"a": {"fine": 1, key: 2}})
    assert (problem.code, problem.path) == ("INVALID_KEY", "/data/a")
    assert type(key).__name__ in problem.message


@pytest.mark.parametrize("core", [[], {}, (), [2**70], PlainList()], ids=repr)
def test_64_deep_is_accepted_and_65_deep_is_not(core: Any) -> None:
    assert_round_trip(nested(63, core))
    problem = problem_of(encode, nested(64, core))
    assert (problem.code, problem.limit) == ("TOO_DEEP", 64)


def test_a_scalar_at_the_deepest_level_is_accepted() -> None:
    assert_round_trip(nested(64, "x"))
    assert_round_trip(nested(64, 2**70))
    assert_round_trip({"a": {"b": 1}}, PayloadLimits(depth=2))
    assert problem_of(encode, {"a": {"b": {}}}, PayloadLimits(depth=2)).path == "/data/a/b"


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {"a": v}, lambda v: PlainList([v])])
def test_100000_deep_is_too_deep_without_recursion(wrap: Callable[[Any], Any]) -> None:
    value: Any = 0
    for _ in range(100_000):
        value = wrap(value)
    problem = problem_of(encode, value)
    assert (problem.code, problem.limit) == ("TOO_DEEP", 64)
    while not isinstance(value, int):  # taken apart level by level, or freeing a subclass would recurse
        value = value["a"] if isinstance(value, dict) else value[0]


def test_the_deepest_limit_there_is_can_still_be_written_and_read() -> None:
    for core in (0, 2**70, -(10**4300) + 1):
        value = nested(500, core)
        assert decode(encode(value, PayloadLimits(depth=500))) == value


def test_a_value_that_contains_itself_is_circular() -> None:
    loop: list[Any] = [1]
    loop.append({"back": loop})
    problem = problem_of(encode, {"loop": loop})
    assert (problem.code, problem.path) == ("CIRCULAR", "/data/loop/1/back")

    itself: dict[str, Any] = collections.OrderedDict()
    itself["self"] = itself
    assert code_of(encode, itself) == "CIRCULAR"


@pytest.mark.parametrize(
    "value",
    [
        "x" * 98,
        ["é" * 48],
        [1] * 49 + [11],
        {"k" * 94: 1},
        ["\n" * 48],
        [[]] * 33,
        10**99,
        17,
        {"a": [2**70, "x" * 10]},
        [PlainStr("x" * 96)],
    ],
)
def test_the_limit_is_met_to_the_byte(value: Any) -> None:
    size = len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())
    assert decode(encode(value, PayloadLimits(data_bytes=size))) == value
    problem = problem_of(encode, value, PayloadLimits(data_bytes=size - 1))
    assert (problem.code, problem.path, problem.limit) == ("TOO_LARGE", "/data", size - 1)
    assert f"{size:,} bytes, at most {size - 1:,}" in problem.message


def test_one_byte_over_a_mebibyte_names_size_and_limit() -> None:
    assert len(encode("x" * (MIB - 2))) == MIB
    problem = problem_of(encode, "x" * (MIB - 1))
    assert (problem.code, problem.limit) == ("TOO_LARGE", MIB)
    assert "1,048,577" in problem.message
    assert "1,048,576" in problem.message


def test_escapes_and_multibyte_characters_count_as_written() -> None:
    problem = problem_of(encode, "é" * 600_000)
    assert "1,200,002 bytes" in problem.message


HUGE = "x" * (64 * MIB)
SMALL = PayloadLimits(data_bytes=64 * 1024)  # tracing memory is slow, so few steps may lead to the refusal


def unfolding(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        HUGE,
        [HUGE] * 4,
        {HUGE: 1},
        {"é" * (16 * MIB): 1},
        {"a": {HUGE: HUGE}},
        [PlainStr("x" * 16 * MIB)],
        [[0] * 1000] * 100_000,
        {f"{number}": 0 for number in range(300_000)},
        unfolding(60),
        [10**4000] * 20_000,
        [{"k" * 60_000: 2**70}] * 2000,
        [2.2250738585072014e-308] * 2_000_000,
    ],
    ids=[
        "one huge string",
        "a huge string four times",
        "a huge key",
        "a huge key of two-byte letters",
        "a huge key in an object",
        "a huge string of a subclass",
        "a hundred million items",
        "300,000 keys",
        "a list that unfolds",
        "long integers",
        "long keys",
        "long floats",
    ],
)
def test_what_is_huge_or_would_unfold_is_refused_before_it_is_encoded(value: Any) -> None:
    tracemalloc.start()
    try:
        problem = problem_of(encode, value, SMALL)
        _, grown = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (problem.code, problem.path, problem.limit) == ("TOO_LARGE", "/data", 64 * 1024)
    assert grown < 8 * MIB


def test_what_is_shown_of_an_input_is_short() -> None:
    key = "k" * 5000
    for value in ({key: {key: object()}}, {key: math.nan}, {key: {key + "\0": 1}}, {key: "\ud800" * 5000}):
        assert str(problem_of(encode, value)).count("k") <= 80
    assert len(str(problem_of(encode, type("T" * 5000, (), {})()))) < 300
    assert len(problem_of(encode, nested(100)).path) < 80
    assert str(problem_of(decode_strict, f'{{"{key}":1,"{key}":2}}')).count("k") <= 80 + len("keykeep")


def test_the_path_starts_where_the_caller_says() -> None:
    assert problem_of(encode, [{1}], path="/commands/3/data").path == "/commands/3/data/0"
    assert problem_of(encode, {1}, path="").path == ""
    assert problem_of(decode_strict, '{"a":[NaN]}').path == "/a/0"
    assert problem_of(decode_strict, "[NaN]", path="/data").path == "/data/0"


@pytest.mark.parametrize("wrong", [{"depth": 501}, {"depth": 0}, {"integer_digits": 4301}, {"data_bytes": 2**25}])
def test_limits_beyond_what_can_be_read_back_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PayloadLimits(**wrong)


# What is stored comes back, or is undecodable


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "nul",
        "[1] 2",
        "NaN",
        "[Infinity]",
        "01",
        "\ufeff1",
        '"\x01"',
        '"\\ud800"',
        '"\ud800"',
        "1e400",
        "[-1e131071]",
        "1" * 4301,
        "-" + "1" * 4301,
        "-" + "1" * 4300 + ",",
        "[-" + "1" * 4300 + ",NaN]",
        "[-" + "1" * 4300 + ',"\\ud800"]',
        "[" * 5000 + "]" * 5000,
        "[" * 1_000_000,
        '{"a":' * 100_000,
        "-" + "1" * 4300 + " " + "[" * 100_000,
        "[" + "1" * 4301 + "," + "[" * 100_000,
    ],
    ids=lambda text: f"{text[:8]!a}-{len(text)}",
)
def test_stored_text_that_cannot_be_read_is_undecodable_and_nothing_worse(text: str) -> None:
    with pytest.raises(UndecodableError) as undecodable:
        decode(text)
    message = str(undecodable.value)
    assert "11111" not in message
    assert 30 < len(message) < 200
    assert undecodable.value.__cause__ is None


def test_stored_text_of_others_is_read_as_json() -> None:
    assert decode(' {"a" : [1e2, -0.0, 12345678901234567890123, "\\u00e9"], "a" : 1E+2}\n') == {"a": 100.0}
    assert math.copysign(1, decode("-0.0")) == -1
    assert decode("123456789012345678901234567890") == 123456789012345678901234567890


# What people and programs type


@pytest.mark.parametrize("raw", [' {"a": [1, 2.5, null, true, "é"]}\n', '{"a": [1, 2.5, null, true, "é"]}'.encode()])
def test_strict_reading_takes_text_and_bytes(raw: str | bytes) -> None:
    assert decode_strict(raw) == {"a": [1, 2.5, None, True, "é"]}


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ('{"a":1,"a":1}', ""),
        ('{"x":[{"b":1,"a":1,"b":2}]}', "/x/0"),
        ('{"a":{"c":1,"\\u0063":2},"a":3}', ""),
        ('[{"a":1},{"a":{"c":1,"\\u0063":2}}]', "/1/a"),
    ],
)
def test_a_repeated_key_is_refused_where_it_stands(raw: str, path: str) -> None:
    problem = problem_of(decode_strict, raw)
    assert (problem.code, problem.path) == ("DUPLICATE_KEY", path)


@pytest.mark.parametrize("raw", [b"\xef\xbb\xbf{}", "\ufeff{}"])
def test_a_byte_order_mark_is_invalid_at_offset_0(raw: bytes | str) -> None:
    problem = problem_of(decode_strict, raw)
    assert problem.code == "INVALID_JSON"
    assert "byte order mark at offset 0" in problem.message


@pytest.mark.parametrize(
    ("raw", "offset"),
    [
        ('["a\nb"]', 3),
        ('"\x00"', 1),
        ('"\x1f"', 1),
        ("[1,]", 3),
        ("", 0),
        ("[1] x", 4),
        ("{'a':1}", 1),
        ("+1", 0),
        ("01", 1),
    ],
)
def test_text_that_is_not_json_is_refused_with_its_offset(raw: str, offset: int) -> None:
    problem = problem_of(decode_strict, raw)
    assert problem.code == "INVALID_JSON"
    assert f"offset {offset})" in problem.message


@pytest.mark.parametrize(
    ("raw", "offset"),
    [(b'"ab\xff"', 3), (b"\xff\xfe1\x00", 0), (b'"\xed\xa0\x80"', 1), (b'"\xc0\x80"', 1), ('"a\udcff"', 2)],
)
def test_bytes_that_are_not_utf8_are_refused_with_their_offset(raw: bytes | str, offset: int) -> None:
    problem = problem_of(decode_strict, raw)
    assert problem.code == "INVALID_UTF8"
    assert f"offset {offset} " in problem.message


@pytest.mark.parametrize(
    "number",
    [
        "1e" + "9" * 4000,
        "1e-" + "9" * 4000,
        "0." + "0" * 400 + "1",
        "1" + "0" * 400 + ".0",
        "1e400",
        "-1e400",
        "1e131072",
        "1e131071",
        "1E309",
        "1.8e308",
        "0e309",
        "0e99999",
        "0.001e310",
        "1e-400",
        "0e-309",
        "-1.5e-9999",
    ],
    ids=lambda number: number[:12],
)
def test_a_number_that_no_double_holds_is_refused(number: str) -> None:
    problem = problem_of(decode_strict, f'{{"n":[{number}]}}')
    assert (problem.code, problem.path) == ("NUMBER_OUT_OF_RANGE", "/n/0")


@pytest.mark.parametrize("number", ["5e-324", "1e308", "1E+308", "1e-308", "12345e-320", "0.0", "-0.0", "0e5", "0.10"])
def test_a_number_that_a_double_holds_is_read_as_that_double(number: str) -> None:
    assert repr(decode_strict(number)) == repr(float(number))


@pytest.mark.parametrize("raw", ["1" * 4301, "-" + "1" * 4301, "1" * 500_000, "0." + "1" * 500_000])
def test_a_number_of_too_many_digits_is_refused_in_text(raw: str) -> None:
    assert code_of(decode_strict, raw) == "NUMBER_TOO_LONG"


@pytest.mark.parametrize(
    ("raw", "code", "path"),
    [
        ('{"a":[NaN]}', "NON_FINITE_NUMBER", "/a/0"),
        ('{"a":[-Infinity]}', "NON_FINITE_NUMBER", "/a/0"),
        ('{"a":["\\u0000"]}', "NUL_IN_JSON", "/a/0"),
        ('{"a":{"\\u0000":1}}', "NUL_IN_JSON", "/a"),
        ('{"a":["\\ud800"]}', "LONE_SURROGATE", "/a/0"),
    ],
)
def test_strict_reading_refuses_what_encode_refuses(raw: str, code: str, path: str) -> None:
    problem = problem_of(decode_strict, raw)
    assert (problem.code, problem.path) == (code, path)


def test_strict_reading_counts_depth_at_every_scale() -> None:
    assert decode_strict("[" * 64 + "]" * 64) == nested(63, [])
    assert decode_strict("[" * 500 + "]" * 500, PayloadLimits(depth=500)) == nested(499, [])
    for depth in (65, 900, 5000, 500_000):
        problem = problem_of(decode_strict, "[" * depth + "]" * depth)
        assert (problem.code, problem.limit) == ("TOO_DEEP", 64)


@pytest.mark.parametrize("raw", ['"' + "x" * 9 + '"', b'"' + b"x" * 9 + b'"', '"' + "é" * 5 + '"', " " * 10 + "1"])
def test_strict_reading_refuses_text_over_the_limit(raw: str | bytes) -> None:
    size = len(raw.encode() if isinstance(raw, str) else raw)
    decode_strict(raw, PayloadLimits(data_bytes=size))
    problem = problem_of(decode_strict, raw, PayloadLimits(data_bytes=size - 1))
    assert (problem.code, problem.limit) == ("TOO_LARGE", size - 1)
    assert f"{size:,}" in problem.message


# Text about failures is never refused


@pytest.mark.parametrize(
    ("text", "max_bytes", "stored"),
    [
        ("fine", 4, "fine"),
        ("", 0, ""),
        ("a\0b\ud800c\udfff", 100, "a\ufffdb\ufffdc\ufffd"),
        ("é" * 10, 20, "é" * 10),
        ("é" * 10, 19, "é" * 5 + "… [cut]"),
        ("é" * 10, 18, "é" * 4 + "… [cut]"),
        ("😀" * 10, 16, "😀… [cut]"),
        ("\0" * 10, 29, "\ufffd" * 6 + "… [cut]"),
        ("x" * 100, 9, "… [cut]"),
        ("x" * 100, 8, "x" * 8),
        ("é" * 100, 3, "é"),
        ("abc", 0, ""),
    ],
)
def test_text_about_a_failure_is_made_storable_and_marked_as_cut(text: str, max_bytes: int, stored: str) -> None:
    assert storable(text, max_bytes) == stored


@given(st.text(st.characters(exclude_categories=())), st.integers(0, 60))
def test_whatever_a_failure_says_fits_and_is_utf8(text: str, max_bytes: int) -> None:
    stored = storable(text, max_bytes)
    assert len(stored.encode()) <= max_bytes
    assert "\0" not in stored


class Mute(Exception):
    def __init__(self, raised: BaseException) -> None:
        self.raised = raised

    def __str__(self) -> str:
        raise self.raised


@pytest.mark.parametrize("raised", [RuntimeError(), SystemExit(), KeyboardInterrupt(), RecursionError()], ids=repr)
def test_an_exception_whose_str_raises_is_recorded_by_its_types(raised: BaseException) -> None:
    assert safe_str(Mute(raised), 100) == f"<Mute; its str() raised {type(raised).__name__}>"


class NotText(Exception):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]


class Tricky(str):
    __slots__ = ()

    def __getitem__(self, key: Any) -> str:
        raise RuntimeError("no slice of me")


class TrickyText(Exception):
    def __str__(self) -> str:
        return Tricky("tricky")


def test_an_exception_is_recorded_whatever_its_str_holds() -> None:
    assert safe_str(ValueError("plain"), 100) == "plain"
    assert safe_str(KeyboardInterrupt("nul \0"), 100) == "nul \ufffd"
    assert safe_str(ValueError("x" * 50_000_000), 20) == "x" * 11 + "… [cut]"
    assert "NotText" in safe_str(NotText(), 100)
    assert safe_str(TrickyText(), 100) == "tricky"


# Whatever comes


JSON_LIKE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**60), 10**60)
    | st.floats()
    | st.text(st.characters(exclude_categories=()))
    | st.sampled_from(["\0", "\\u0000", "\ud800", 2**63, 2**64, -(2**63) - 1, -0.0, -(10**4300) + 1])
    | st.sampled_from([b"", object(), decimal.Decimal(1), Colour.RED, PlainStr("p"), PlainInt(1)]),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(st.characters(exclude_categories=())) | st.just("\\u0000"), inner)
        | st.dictionaries(st.integers() | st.text(), inner, max_size=2)
    ),
    max_leaves=12,
)
PLAIN = (str, int, float, bool, type(None), list, tuple, dict)


def as_builtins(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_builtins(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_builtins(item) for item in value]
    return str(value) if isinstance(value, PlainStr) else int(value) if isinstance(value, PlainInt) else value


@hypothesis_settings(max_examples=500)
@given(JSON_LIKE, st.sampled_from([PayloadLimits(), PayloadLimits(data_bytes=40, depth=2, integer_digits=19)]))
@example({"account": 42, "amount": 1050, "note": "hello"}, PayloadLimits())
def test_accepted_means_it_comes_back_exactly_and_refused_means_a_known_code(value: Any, limits: PayloadLimits) -> None:
    text, problem = outcome(encode, value, limits)
    if problem:
        assert problem.code in CODES
        assert problem.path.startswith("/data")
        assert len(str(problem).encode()) < 1000
        return
    wanted = as_it_comes_back(as_builtins(value))
    assert as_it_comes_back(decode(text)) == wanted
    assert as_it_comes_back(json.loads(text)) == wanted, "another reader sees the same"
    assert len(text.encode()) <= limits.data_bytes
    assert as_it_comes_back(decode_strict(text, limits)) == wanted, "what we print can be typed in again"


@hypothesis_settings(max_examples=300)
@given(JSON_LIKE)
def test_a_refusal_is_for_a_reason(value: Any) -> None:
    """A second, naive opinion: refused is only what JSON, PostgreSQL or CPython cannot hold."""

    def reasons(part: Any) -> Iterator[str]:
        if isinstance(part, dict):
            for key, item in part.items():
                yield from reasons(key) if isinstance(key, str) else iter(["INVALID_KEY"])
                yield from reasons(item)
        elif isinstance(part, list | tuple):
            for item in part:
                yield from reasons(item)
        elif isinstance(part, str):
            yield from ["NUL_IN_JSON"] * ("\0" in part)
            yield from ["LONE_SURROGATE"] * any("\ud800" <= character <= "\udfff" for character in part)
            yield from ["UNSERIALISABLE"] * isinstance(part, Colour)
        elif isinstance(part, float):
            yield from ["NON_FINITE_NUMBER"] * (not math.isfinite(part))
        elif isinstance(part, int):
            yield from ["NUMBER_TOO_LONG"] * (abs(part) >= 10**4300)
        elif not isinstance(part, PLAIN):
            yield "UNSERIALISABLE"

    expected = set(reasons(value))
    if expected:
        assert code_of(encode, value) in expected
    else:
        encode(value)


@hypothesis_settings(max_examples=500)
@given(st.text(st.sampled_from(list('[]{}:,"\\u0d8 eE+-.19ntrueNa\ufeff\ud800é\n'))) | st.text() | st.binary())
def test_any_text_is_read_or_refused_and_never_a_crash(raw: str | bytes) -> None:
    value, problem = outcome(decode_strict, raw)
    if problem:
        assert problem.code in CODES
    else:
        assert_round_trip(value)
    if isinstance(raw, str):
        with contextlib.suppress(UndecodableError):
            decode(raw)
