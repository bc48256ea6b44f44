"""The diff of a patch marks what has really changed, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from busload.dashboard.diff import compared

T = TypeVar("T")

MOST_CALLS = 1_000_000
"""Of functions, and returns from them, for one diff. Without a bound, the first of these needs 30 times as many."""


@pytest.mark.parametrize(
    ("old", "new", "marked"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, [("removed", '"b": 2', None)]),
        ({"a": 1}, {"a": 1, "b": 2}, [("added", None, '"b": 2')]),
        ([[1], [2, 3]], [[1], [2]], [("removed", "3", None)]),
        ({"a": {"b": 1}, "c": 2}, {"a": {"b": 1}}, [("removed", '"c": 2', None)]),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, [("changed", '"b": 2', '"b": 3')]),
        ({"a": "x"}, {"a": "x,"}, [("changed", '"a": "x"', '"a": "x,"')]),
        ({"a": 1}, {"a": 1}, []),
    ],
)
def test_only_lines_that_have_changed_are_marked(
    old: Any, new: Any, marked: list[tuple[str, str | None, str | None]]
) -> None:
    found = [
        (line.kind, line.old and line.old.strip(), line.new and line.new.strip())
        for line in compared(old, new)
        if line.kind not in ("same", "gap")
    ]
    assert found == marked


def test_an_untouched_line_is_shown_as_it_stands_on_either_side() -> None:
    [same] = [line for line in compared({"a": 1, "b": 2}, {"a": 1}) if "a" in (line.old or "")]
    assert (same.kind, same.old, same.new) == ("same", '  "a": 1,', '  "a": 1')


ORDER = {"sku": "A", "paid": True, "tags": []}


@pytest.mark.parametrize(
    ("old", "new", "marked"),
    [
        ([0] * 3900, [0] * 10 + [1] + [0] * 3800 + [2] + [0] * 88, 2),
        ([0] * 3900, [1, *[0] * 3899, 2], 2),
        ([ORDER] * 790, [*[ORDER] * 5, ORDER | {"paid": 1}, *[ORDER] * 780, ORDER | {"paid": 2}, *[ORDER] * 3], 2),
        ([ORDER] * 790, [ORDER, ORDER | {"paid": 1}, *[ORDER] * 789], 5),
        (
            [ORDER | {"n": n} for n in range(600)],
            [ORDER | {"n": n} | ({"new": n} if n == 9 else {}) for n in range(600) if n != 500],
            7,
        ),
    ],
)
def test_many_equal_lines_are_compared_while_nobody_waits(old: Any, new: Any, marked: int) -> None:
    """The process serves nobody else meanwhile: the pages of others, and the application around the dashboard."""
    found, calls = with_calls(lambda: compared(old, new))
    assert calls < MOST_CALLS
    assert len([line for line in found if line.kind not in ("same", "gap")]) == marked


def with_calls(work: Callable[[], T]) -> tuple[T, int]:
    """What the work returns, and how often it has called a function or returned from one."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        return work(), calls
    finally:
        sys.setprofile(before)
