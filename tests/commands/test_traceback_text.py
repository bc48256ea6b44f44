"""The traceback of a failure as text: what it tells, what it leaves out, and that nothing keeps it from being told."""

from __future__ import annotations

import asyncio
import json
import traceback
from typing import Any

import pytest

from busload import PermanentCommandError
from busload.commands.execution import describe
from busload.commands.traceback_text import MOST_BYTES, traceback_text


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        if cause is None:
            raise error
        raise error from cause
    except BaseException as caught:
        return caught


def look_up(account: dict[str, int]) -> int:
    secret = "hunter2"  # noqa: F841
    return account["b"]


def test_a_traceback_reads_as_python_prints_it() -> None:
    try:
        look_up({"a": 1})
    except KeyError as error:
        told, printed = traceback_text(error), "".join(traceback.format_exception(error))
    plain = [line for line in printed.splitlines() if line.strip(" ^~")]
    assert told.splitlines() == plain
    assert told.splitlines()[-2:] == ['    return account["b"]', "KeyError: 'b'"]


def test_a_traceback_shows_no_value_of_a_variable() -> None:
    with pytest.raises(KeyError) as caught:
        look_up({"a": 1})
    assert "hunter2" not in describe(caught.value)


def test_causes_contexts_and_notes_are_shown_in_the_order_in_which_they_happened() -> None:
    try:
        try:
            try:
                raise ValueError("first")
            except ValueError:
                raise KeyError("second")  # noqa: B904
        except KeyError as error:
            error.add_note("a note")
            raise RuntimeError("third") from error
    except RuntimeError as error:
        told = traceback_text(error)
    order = [
        "ValueError: first",
        "During handling of the above",
        "KeyError: 'second'",
        "a note",
        "direct cause",
        "third",
    ]
    assert [told.index(part) for part in order] == sorted(told.index(part) for part in order)
    assert "first" not in traceback_text(raised(RuntimeError("alone"), None))


def test_a_context_that_was_suppressed_is_not_shown() -> None:
    try:
        try:
            raise ValueError("first")
        except ValueError:
            raise KeyError("second") from None
    except KeyError as error:
        told = traceback_text(error)
    assert "first" not in told


async def test_members_of_an_exception_group_are_shown_with_their_own_tracebacks() -> None:
    async def debit() -> None:
        look_up({})

    async def credit() -> None:
        raise PermanentCommandError("closed")

    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(debit())
            tasks.create_task(credit())
    except ExceptionGroup as group:
        told = traceback_text(ExceptionGroup("outer", [group]))
    assert "outer (1 sub-exception)" in told and "unhandled errors in a TaskGroup (2 sub-exceptions)" in told
    assert "  |   |     return account[\"b\"]\n  |   | KeyError: 'b'" in told
    assert "busload.errors.PermanentCommandError: closed" in told


class Hostile(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)

    @property
    def __notes__(self) -> Any:  # type: ignore[override]
        raise ValueError("no notes")


def circular() -> BaseException:
    one, other = raised(KeyError("one")), raised(KeyError("other"))
    one.__cause__, other.__cause__ = other, one
    return one


def endless(depth: int = 0) -> int:
    return endless(depth + 1)


def deep() -> BaseException:
    try:
        endless()
    except RecursionError as error:
        return error
    raise AssertionError


def long_chain() -> BaseException:
    error: BaseException = ValueError("root")
    for n in range(2000):
        error = raised(RuntimeError(f"link {n}"), error)
    return error


def wide() -> BaseException:
    return raised(BaseExceptionGroup("wide", [raised(ValueError("é" * 500)) for _ in range(500)]))


def nested() -> BaseException:
    group: Exception = ValueError("core")
    for n in range(300):
        group = ExceptionGroup(f"layer {n}", [group])
    return raised(group)


@pytest.mark.parametrize(
    "make",
    [
        lambda: raised(Hostile()),
        lambda: raised(ValueError("a\0b\ud800c")),
        lambda: raised(ValueError("x" * 50_000_000)),
        circular,
        deep,
        long_chain,
        wide,
        nested,
    ],
    ids=["hostile", "unstorable", "50 MB", "circular", "deep", "long chain", "wide group", "nested groups"],
)
def test_whatever_the_exception_its_traceback_is_bounded_and_can_be_stored(make: Any) -> None:
    """Also one whose own class raises"""
    error = make()
    told = json.loads(describe(error))["traceback"]
    assert 0 < len(told.encode()) <= MOST_BYTES
    assert "\0" not in told
    assert type(error).__name__ in told


def test_a_deep_recursion_keeps_its_beginning_and_its_end() -> None:
    told = traceback_text(deep())
    assert "in deep\n" in told and "frames left out]" in told
    assert told.rstrip().endswith("maximum recursion depth exceeded")


def test_a_long_message_keeps_its_head_and_the_innermost_frames() -> None:
    try:
        raise ValueError("begins here " + "x" * 100_000)
    except ValueError as error:
        told = traceback_text(error)
    assert "ValueError: begins here xxx" in told and "raise ValueError(" in told


def test_a_circle_of_causes_is_shown_once() -> None:
    told = traceback_text(circular())
    assert told.count("KeyError: 'one'") == told.count("KeyError: 'other'") == 1
    assert "[What comes before is told already]" in told
