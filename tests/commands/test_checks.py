"""Bad input is refused before anything is written, with code, path and index.

These tests share one database: that a refused call leaves it as it was is what they prove.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest

from busload import BatchCommand, CommandBus, InvalidCommandError, Settings, SyncCommandBus
from busload.commands import InputLimits, PayloadLimits, checks
from busload.errors import Problem
from busload.testing import TestServer
from tests.given import DOMAIN, Database

pytestmark = pytest.mark.usefixtures("nothing_is_written")
ID = UUID(int=7)


@pytest.fixture(scope="module")
def dsn(server: TestServer) -> Iterator[str]:
    with server.database() as dsn:
        yield dsn


@pytest.fixture
def nothing_is_written(database: Database) -> Iterator[None]:
    before = database.everything()
    yield
    assert database.everything() == before


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def looped() -> Any:
    value: dict[str, Any] = {}
    value["me"] = value
    return value


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Account:
    number: int = 1


BAD_DATA: dict[str, tuple[Callable[[], Any], str, str]] = {
    "NUL in a value": (lambda: {"a": ["x", "y\0"]}, "NUL_IN_JSON", "/a/1"),
    "NUL in a key": (lambda: {"a": {"k\0": 1}}, "NUL_IN_JSON", "/a"),
    "lone surrogate in a value": (lambda: {"a": "\ud800"}, "LONE_SURROGATE", "/a"),
    "lone surrogate in a key": (lambda: {"\udfff": 1}, "LONE_SURROGATE", ""),
    "NaN": (lambda: [math.nan], "NON_FINITE_NUMBER", "/0"),
    "infinity": (lambda: {"a": -math.inf}, "NON_FINITE_NUMBER", "/a"),
    "integer of 4,301 digits": (lambda: {"n": 10**4300}, "NUMBER_TOO_LONG", "/n"),
    "Decimal": (lambda: {"a": Decimal("1.1")}, "UNSERIALISABLE", "/a"),
    "datetime": (lambda: [datetime.now(UTC)], "UNSERIALISABLE", "/0"),
    "date": (lambda: [date.today()], "UNSERIALISABLE", "/0"),
    "UUID": (lambda: {"id": uuid4()}, "UNSERIALISABLE", "/id"),
    "bytes": (lambda: [b"x"], "UNSERIALISABLE", "/0"),
    "set": (lambda: {"a": {1}}, "UNSERIALISABLE", "/a"),
    "dataclass": (lambda: {"a": Account()}, "UNSERIALISABLE", "/a"),
    "enum": (lambda: {"a": Colour.RED}, "UNSERIALISABLE", "/a"),
    "key that is no string": (lambda: {"a": {1: 1}}, "INVALID_KEY", "/a"),
    "65 deep": (lambda: {"a": nested(64)}, "TOO_DEEP", "/a" + "/0" * 63),
    "100,000 deep": (lambda: nested(100_000), "TOO_DEEP", "/0" * 64),
    "circular": (looped, "CIRCULAR", "/me"),
    "over a mebibyte": (lambda: {"a": "x" * (1024 * 1024)}, "TOO_LARGE", ""),
}


async def problems(call: Any) -> list[Problem]:
    with pytest.raises(InvalidCommandError) as refused:
        await call
    assert isinstance(refused.value, ValueError)
    assert refused.value.total == len(refused.value.problems)
    return list(refused.value.problems)


def short(path: str) -> str:
    return path if len(path) <= 60 else f"{path[:20]}…{path[-39:]}"


@pytest.mark.parametrize(("make", "code", "where"), BAD_DATA.values(), ids=list(BAD_DATA))
async def test_data_that_would_not_come_back_is_refused_wherever_it_goes_in(
    bus: CommandBus, sync_bus: SyncCommandBus, make: Callable[[], Any], code: str, where: str
) -> None:
    """Send, send_many, create_batch, custom_data, callback, result"""
    bad = make()
    fine = BatchCommand("Debit")
    calls = {
        ("/data", 0): bus.send(DOMAIN, "Debit", bad),
        ("/data", 1): bus.send_many(DOMAIN, [fine, BatchCommand("Debit", data=bad), fine]),
        ("/data", 2): bus.create_batch(DOMAIN, [fine, fine, BatchCommand("Debit", data=bad)]),
        ("/result", None): bus.troubleshooting.complete(DOMAIN, ID, result=bad),
    }
    if isinstance(bad, dict):
        calls["/custom_data", None] = bus.create_batch(DOMAIN, [fine], custom_data=bad)
        callback = BatchCommand("Done", data=bad)
        calls["/on_complete/data", None] = bus.create_batch(DOMAIN, [fine], on_complete=callback)
    for (path, index), call in calls.items():
        [problem] = await problems(call)
        assert (problem.code, problem.path, problem.index) == (code, path + short(where), index)
    with pytest.raises(InvalidCommandError):
        sync_bus.send(DOMAIN, "Debit", bad)
    if code == "TOO_LARGE":
        assert problem.limit == 1024 * 1024
    while isinstance(bad, list) and isinstance(bad[0], list):  # taken apart level by level, without recursion
        bad = bad[0]


BAD_NAMES: list[Any] = [
    "", " ", None, 7, b"x", ["x"],
    "a b", "a'b", 'a"b', "a;b", "a\\b", "a/b", "../a", "_a", "1a", "a\n", "a\0", "a\x1b[31m",
    'x"; DROP TABLE command; --', "x" * 256,
    "á", "e\u0301", "раyments", "pay\u202ements", "\u2066a", "\ud800",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: ascii(name)[:20])
async def test_a_name_is_a_letter_and_then_letters_digits_and_a_few_signs(bus: CommandBus, name: Any) -> None:
    """Of domains, types and reply_to, in every call"""
    named = "" if name is None else name  # None means all domains
    for path, index, call in (
        ("/domain", None, bus.send(name, "Debit")),
        ("/domain", None, bus.send_many(name, [BatchCommand("Debit")])),
        ("/domain", None, bus.create_batch(name, [BatchCommand("Debit")])),
        ("/domain", None, bus.get_batch(named, ID)),
        ("/domain", None, bus.list_batches(named)),
        ("/domain", None, bus.list_batch_commands(name, ID)),
        ("/domain", None, bus.seal_batch(name, ID)),
        ("/domain", None, bus.cancel_batch(name, ID, reason="x")),
        ("/domain", None, bus.get_command(name, ID)),
        ("/domain", None, bus.get_audit_trail(name, ID)),
        ("/domain", None, bus.get_batch_audit_trail(name, ID)),
        ("/domain", None, bus.troubleshooting.list(named)),
        ("/domain", None, bus.troubleshooting.retry(name, ID)),
        ("/domain", None, bus.troubleshooting.complete(name, ID)),
        ("/domain", None, bus.troubleshooting.cancel(name, ID, reason="x")),
        ("/command_type", 0, bus.send(DOMAIN, name)),
        ("/command_type", 0, bus.create_batch(DOMAIN, [BatchCommand(name)])),
    ):
        [problem] = await problems(call)
        assert (problem.code, problem.path, problem.index) == ("INVALID_NAME", path, index)
        assert len(str(problem)) < 250
    if name is not None:
        [problem] = await problems(bus.send(DOMAIN, "Debit", reply_to=name))
        assert (problem.code, problem.path) == ("INVALID_NAME", "/reply_to")
        [problem] = await problems(bus.troubleshooting.list(DOMAIN, command_type=name))
        assert (problem.code, problem.path) == ("INVALID_NAME", "/command_type")
    if name == "x" * 256:
        assert problem.limit == 255
    with pytest.raises(InvalidCommandError):
        bus.open_batch(name)


async def test_a_flag_is_true_or_false(bus: CommandBus) -> None:
    for bad in (None, 0, 1, "no", [], object()):
        for path, call in (
            ("/forecast", bus.list_batches(DOMAIN, forecast=bad)),  # type: ignore[arg-type]
            ("/wait_for_operator", bus.wait_command(DOMAIN, ID, wait_for_operator=bad)),  # type: ignore[arg-type]
        ):
            [problem] = await problems(call)
            assert (problem.path, problem.message.endswith("wanted True or False")) == (path, True)


BAD_IDS: list[Any] = ["", str(ID), str(ID).upper(), f"{{{ID}}}", 7, b"x" * 16, UUID(int=0), object()]


@pytest.mark.parametrize("bad", BAD_IDS, ids=lambda bad: repr(bad)[:12])
async def test_an_id_is_a_uuid_and_not_nil(bus: CommandBus, bad: Any) -> None:
    """Nothing is parsed, so nothing is misread"""
    for path, call in (
        ("/command_id", bus.send(DOMAIN, "Debit", command_id=bad)),
        ("/correlation_id", bus.send(DOMAIN, "Debit", correlation_id=bad)),
        ("/batch_id", bus.send(DOMAIN, "Debit", batch_id=bad)),
        ("/batch_id", bus.send_many(DOMAIN, [BatchCommand("Debit")], batch_id=bad)),
        ("/batch_id", bus.create_batch(DOMAIN, [BatchCommand("Debit")], batch_id=bad)),
        ("/batch_id", bus.get_batch(DOMAIN, bad)),
        ("/batch_id", bus.seal_batch(DOMAIN, bad)),
        ("/batch_id", bus.cancel_batch(DOMAIN, bad, reason="x")),
        ("/batch_id", bus.list_batch_commands(DOMAIN, bad)),
        ("/batch_id", bus.get_batch_audit_trail(DOMAIN, bad)),
        ("/after", bus.list_batches(DOMAIN, after=bad)),
        ("/after", bus.list_batch_commands(DOMAIN, ID, after=bad)),
        ("/command_id", bus.get_command(DOMAIN, bad)),
        ("/command_id", bus.get_audit_trail(DOMAIN, bad)),
        ("/command_id", bus.troubleshooting.retry(DOMAIN, bad)),
        ("/command_id", bus.troubleshooting.complete(DOMAIN, bad)),
        ("/command_id", bus.troubleshooting.cancel(DOMAIN, bad, reason="x")),
    ):
        [problem] = await problems(call)
        assert (problem.code, problem.path) == ("INVALID_ID", path)
    [problem] = await problems(bus.wait_batch(DOMAIN, bad))
    assert problem.code == "INVALID_ID"


async def test_priorities_attempts_and_pages_are_whole_numbers_in_range(bus: CommandBus) -> None:
    """A bool is no number, nor is a string of digits; negative limits"""
    numbers: dict[str, list[Any]] = {
        "priority": [-32769, 32768, 0.0, 1.5, True, False, "1", None, Decimal(0), math.nan],
        "max_attempts": [0, -1, 32768, 1.0, True, False, "3", math.inf],
    }
    for option, values in numbers.items():
        for value in values:
            for call in (
                bus.send(DOMAIN, "Debit", **{option: value}),
                bus.create_batch(DOMAIN, [BatchCommand("Debit", **{option: value})]),
            ):
                [problem] = await problems(call)
                assert (problem.code, problem.path, problem.index) == ("INVALID_OPTION", f"/{option}", 0)
    for option in ("limit", "offset"):
        for value in (-1, 2**31, 1.0, True, "10", None):
            page: dict[str, Any] = {option: value}
            for asked in (
                bus.list_batches(DOMAIN, **page),
                bus.list_batch_commands(DOMAIN, ID, **page),
                bus.troubleshooting.list(DOMAIN, **page),
            ):
                [problem] = await problems(asked)
                assert (problem.code, problem.path) == ("INVALID_OPTION", f"/{option}")


async def test_a_time_knows_its_zone_and_is_not_a_century_away(bus: CommandBus) -> None:
    times: list[tuple[Any, str]] = [
        (datetime(2030, 1, 1), "NAIVE_DATETIME"),
        (datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC), "INVALID_TIME"),
        (datetime.max.replace(tzinfo=timezone(timedelta(hours=-14))), "INVALID_TIME"),
        (datetime.now(UTC) + timedelta(days=36600), "INVALID_TIME"),
        ("2030-01-01T00:00:00Z", "INVALID_TIME"),
        (1893456000, "INVALID_TIME"),
        (math.nan, "INVALID_TIME"),
        (date(2030, 1, 1), "INVALID_TIME"),
        (timedelta(seconds=5), "INVALID_TIME"),
    ]
    for value, code in times:
        for call in (
            bus.send(DOMAIN, "Debit", run_at=value),
            bus.send_many(DOMAIN, [BatchCommand("Debit", run_at=value)]),
        ):
            [problem] = await problems(call)
            assert (problem.code, problem.path, problem.index) == (code, "/run_at", 0)


async def test_text_is_not_empty_and_can_be_stored(bus: CommandBus) -> None:
    """Task keys, batch names, operators"""
    texts: list[tuple[Any, str]] = [
        ("", "INVALID_TEXT"),
        ("a\0b", "INVALID_TEXT"),
        (7, "INVALID_TEXT"),
        ("\ud800", "LONE_SURROGATE"),
        ("é" * 300, "TOO_LONG"),
    ]
    for text, code in texts:
        for path, call in (
            ("/task_key", bus.send(DOMAIN, "Debit", task_key=text)),
            ("/name", bus.create_batch(DOMAIN, [BatchCommand("Debit")], name=text)),
            ("/operator", bus.cancel_batch(DOMAIN, ID, reason="x", operator=text)),
            ("/operator", bus.troubleshooting.retry(DOMAIN, ID, operator=text)),
            ("/operator", bus.troubleshooting.complete(DOMAIN, ID, operator=text)),
            ("/operator", bus.troubleshooting.cancel(DOMAIN, ID, reason="x", operator=text)),
        ):
            [problem] = await problems(call)
            assert (problem.code, problem.path) == (code, path)


async def test_a_callback_is_a_function_or_a_command_without_a_time(bus: CommandBus) -> None:
    fine = [BatchCommand("Debit")]
    bad: list[tuple[Any, str, str]] = [
        ("Done", "INVALID_OPTION", "/on_complete"),
        (BatchCommand("Done", data=[1]), "INVALID_OPTION", "/on_complete/data"),
        (BatchCommand("Done", data={"batch": 1}), "INVALID_OPTION", "/on_complete/data"),
        (BatchCommand("Done", run_at=datetime.now(UTC)), "INVALID_OPTION", "/on_complete/run_at"),
        (BatchCommand("Done", priority=40_000), "INVALID_OPTION", "/on_complete/priority"),
        (BatchCommand("Done", data={"x": b""}), "UNSERIALISABLE", "/on_complete/data/x"),
        (BatchCommand("no name"), "INVALID_NAME", "/on_complete/command_type"),
    ]
    for on_complete, code, path in bad:
        [problem] = await problems(bus.create_batch(DOMAIN, fine, on_complete=on_complete))
        assert (problem.code, problem.path) == (code, path)
        with pytest.raises(InvalidCommandError):
            bus.open_batch(DOMAIN, on_complete=on_complete)
    custom: Any
    for custom in ([1], "text", 7):
        [problem] = await problems(bus.create_batch(DOMAIN, fine, custom_data=custom))
        assert (problem.code, problem.path) == ("INVALID_OPTION", "/custom_data")


async def test_a_bulk_call_names_every_offender(bus: CommandBus, sync_bus: SyncCommandBus) -> None:
    """5 among 10,000, each with its own problem, and all problems of one command"""
    commands: list[Any] = [BatchCommand("Debit", data=n) for n in range(10_000)]
    commands[0] = BatchCommand("no name", priority=1.5, max_attempts=0)  # type: ignore[arg-type]
    commands[17] = BatchCommand("Debit", data={"x": [math.nan]})
    commands[4_000] = "Debit"
    commands[9_998] = None
    commands[9_999] = BatchCommand("Debit", UUID(int=0))
    expected = [
        (0, "INVALID_NAME", "/command_type"),
        (0, "INVALID_OPTION", "/priority"),
        (0, "INVALID_OPTION", "/max_attempts"),
        (17, "NON_FINITE_NUMBER", "/data/x/0"),
        (4_000, "INVALID_OPTION", ""),
        (9_998, "INVALID_OPTION", ""),
        (9_999, "INVALID_ID", "/command_id"),
    ]
    for call in (bus.send_many(DOMAIN, commands), bus.create_batch(DOMAIN, commands)):
        assert [(p.index, p.code, p.path) for p in await problems(call)] == expected
    with pytest.raises(InvalidCommandError) as refused:
        sync_bus.create_batch(DOMAIN, commands)
    assert [p.index for p in refused.value.problems] == [index for index, _, _ in expected]


async def test_the_first_hundred_of_very_many_offenders_are_kept_and_all_are_counted(bus: CommandBus) -> None:
    with pytest.raises(InvalidCommandError, match=r"and 247 more") as refused:
        await bus.create_batch(DOMAIN, [BatchCommand("no name") for _ in range(250)])
    assert [problem.index for problem in refused.value.problems] == list(range(100))
    assert refused.value.total == 250
    assert len(str(refused.value)) < 1000


async def test_a_misspelt_option_is_never_ignored(bus: CommandBus, sync_bus: SyncCommandBus) -> None:
    with pytest.raises(TypeError, match="prioritty"):
        await bus.send(DOMAIN, "Debit", prioritty=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="nmae"):
        await bus.create_batch(DOMAIN, [BatchCommand("Debit")], nmae="x")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="run_on"):
        BatchCommand("Debit", run_on=None)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="stauts"):
        sync_bus.list_batches(DOMAIN, stauts="PENDING")  # type: ignore[call-arg]


async def test_a_status_filter_is_one_of_the_words(bus: CommandBus) -> None:
    """The message lists them"""
    for call, words in (
        (bus.list_batches(DOMAIN, status="DONE"), "COMPLETED_WITH_FAILURES"),  # type: ignore[arg-type]
        (bus.list_batch_commands(DOMAIN, ID, status="DONE"), "IN_TROUBLESHOOTING_QUEUE"),  # type: ignore[arg-type]
    ):
        [problem] = await problems(call)
        assert (problem.code, problem.path) == ("INVALID_OPTION", "/status")
        assert words in problem.message


@pytest.fixture
async def narrow(dsn: str) -> AsyncIterator[CommandBus]:
    limits = InputLimits(PayloadLimits(data_bytes=100, depth=2, integer_digits=5), name_bytes=10, task_key_bytes=4)
    async with CommandBus(dsn, settings=Settings(limits=limits)) as bus:
        yield bus


async def test_limits_are_settings(narrow: CommandBus) -> None:
    """Each measured in bytes, with the limit in the problem"""
    for call, code, limit in (
        (narrow.send(DOMAIN, "Debit", "x" * 99), "TOO_LARGE", 100),
        (narrow.send(DOMAIN, "Debit", [[[]]]), "TOO_DEEP", 2),
        (narrow.send(DOMAIN, "Debit", 123456), "NUMBER_TOO_LONG", 5),
        (narrow.send("x" * 11, "Debit"), "INVALID_NAME", 10),
        (narrow.send(DOMAIN, "x" * 11), "INVALID_NAME", 10),
        (narrow.send(DOMAIN, "Debit", task_key="ééé"), "TOO_LONG", 4),
        (narrow.create_batch(DOMAIN, [BatchCommand("Debit")], custom_data={"a": "x" * 99}), "TOO_LARGE", 100),
        (narrow.troubleshooting.complete(DOMAIN, ID, result="x" * 99), "TOO_LARGE", 100),
    ):
        [problem] = await problems(call)
        assert (problem.code, problem.limit) == (code, limit)


def test_one_call_names_every_problem_in_the_order_of_the_parameters() -> None:
    """Each parameter is known by its name; what may be None is said once, and `given` leaves out what is not given"""
    with pytest.raises(InvalidCommandError) as refused:
        checks.check(InputLimits(), domain="a b", batch_id=None, operator=None, **checks.given(job_id=None), limit=-1)
    assert [problem.path for problem in refused.value.problems] == ["/domain", "/batch_id", "/limit"]
    assert "Nothing was written" in str(refused.value)
    with pytest.raises(InvalidCommandError) as asked:
        checks.check(InputLimits(), writes=False, domain="a b")
    assert "Nothing was written" not in str(asked.value)
    checks.check(InputLimits(), domain="payments", batch_id=ID, operator="rosa", limit=0, rate=None)


def test_a_setting_is_refused_with_what_it_must_be() -> None:
    checks.require(checks.whole(1), size=1, max_bytes=2**40)
    for kind, found, said in (
        (checks.whole(1), True, "size must be a whole number from 1 on, found True."),
        (checks.whole(1, 10), 11, "size must be a whole number from 1 to 10, found 11."),
        (checks.FLAG, 1, "size must be True or False, found 1."),
        (checks.between(timedelta(0), timedelta(days=2)), 5, "size must be a timedelta from zero to 2 days, found 5."),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
            checks.require(kind, size=found)
