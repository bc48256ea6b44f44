"""Verdicts of bulk calls, and the search for the bad among the good."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busload.commands.bulk_items import FRUITLESS, Chunk, Group, Item, isolate
from busload.errors import InvalidOperationError, TransientCommandError

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def items(count: int) -> list[Item]:
    return [Item(n, f"data {n}", None, NOW) for n in range(count)]


def group(count: int) -> Group:
    return Group("events", uuid4(), items(count))


def search(count: int, bad: set[int]) -> tuple[list[int], list[list[int]]]:
    """What is found, and the parts that were tried."""
    parts: list[list[int]] = []
    tries = isolate(list(range(count)))
    try:
        part = next(tries)
        while True:
            parts.append(part)
            part = tries.send(not bad & set(part))
    except StopIteration as end:
        return end.value, parts


def test_a_group_is_a_sequence_of_its_items() -> None:
    some = group(3)
    assert len(some) == 3 and [item.id for item in some] == [0, 1, 2] and some[-1].id == 2 and some[0] in some
    assert Chunk("crm", "Push", items(2), key="t1").key == "t1"


def test_without_verdicts_all_share_the_fate_of_the_call() -> None:
    done = group(3).judgement()
    assert (len(done.done), done.failed, done.answered) == (3, [], True)
    error = OSError("503")
    failed = group(3).judgement(error)
    assert (failed.done, [found for _, found in failed.failed], failed.answered) == ([], [error] * 3, False)


@given(st.lists(st.sampled_from(["yes", "no", "silent"]), min_size=1, max_size=30), st.booleans())
def test_with_a_verdict_each_item_ends_as_it_was_judged_and_the_silent_ones_fail(
    verdicts: list[str], raises: bool
) -> None:
    some = group(len(verdicts))
    for item, verdict in zip(some, verdicts, strict=True):
        if verdict == "yes":
            some.succeed(item, f"result {item.id}")
        elif verdict == "no":
            some.fail(item, f"error {item.id}")
    raised = RuntimeError("the call broke") if raises else None
    judgement = some.judgement(raised)
    if set(verdicts) == {"silent"}:
        assert judgement.answered is not raises
        return
    assert judgement.answered
    assert [item.id for item in judgement.done] == [n for n, verdict in enumerate(verdicts) if verdict == "yes"]
    assert judgement.results == {item.id: f"result {item.id}" for item in judgement.done}
    for item, error in judgement.failed:
        if verdicts[item.id] == "no":
            assert str(error) == f"error {item.id}" and isinstance(error, TransientCommandError)
        else:
            assert error is raised if raises else getattr(error, "code", None) == "NO_VERDICT"
    assert len(judgement.done) + len(judgement.failed) == len(verdicts)


@pytest.mark.parametrize("wrong", [None, 0, "0", [], object(), Item(0, "data 0", None, NOW), Item(9, "x", None, NOW)])
def test_a_verdict_for_what_is_no_item_of_the_call_is_refused(wrong: Any) -> None:
    """Not even one that looks like it: an item of an earlier attempt was read before."""
    some = group(2)
    for judge in (some.succeed, lambda item: some.fail(item, "no")):
        with pytest.raises(InvalidOperationError, match="There is no item"):
            judge(wrong)
    assert some.judgement().done == list(some)


def test_a_second_verdict_is_refused_and_the_first_stands() -> None:
    some = group(2)
    some.succeed(some[0])
    for judge in (some.succeed, lambda item: some.fail(item, "no")):
        with pytest.raises(InvalidOperationError, match="verdict already"):
            judge(some[0])
    assert some.judgement().done == [some[0]]


@pytest.mark.parametrize("error", [None, 5, b"no", ["no"]])
def test_a_failure_needs_an_exception_or_a_text(error: Any) -> None:
    """Above all it is no success: that would delete the item."""
    some = group(2)
    with pytest.raises(InvalidOperationError, match="an exception or a text"):
        some.fail(some[0], error)
    some.succeed(some[1])
    assert [item for item, _ in some.judgement().failed] == [some[0]]


@given(st.integers(2, 400), st.data())
def test_the_search_finds_exactly_the_bad_ones(count: int, data: st.DataObject) -> None:
    """Where good ones are to be found: with a few bad ones among many, or all of them apart."""
    bad = data.draw(st.sets(st.integers(0, count - 1), max_size=FRUITLESS - 1))
    found, parts = search(count, bad)
    if bad:
        assert sorted(found) == sorted(bad)
    else:
        assert len(found) <= 1, "the one that was left by elimination"
    passed = [n for part in parts if not bad & set(part) for n in part]
    assert len(passed) == len(set(passed)), "nobody passes twice"
    assert sorted(passed + found) == list(range(count))


@given(st.integers(2, 1000), st.data())
def test_each_bad_one_costs_a_logarithm_of_tries(count: int, data: st.DataObject) -> None:
    bad = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=8))
    _, parts = search(count, bad)
    assert len(parts) <= len(bad) * (math.ceil(math.log2(count)) + 2)


@pytest.mark.parametrize("place", [0, 1, 499, 500, 616, 998, 999])
def test_one_bad_one_of_a_thousand_is_alone_after_ten_tries_and_one_more_frees_the_rest(place: int) -> None:
    found, parts = search(1000, {place})
    assert found == [place] and len(parts) <= 11
    assert len([part for part in parts if place in part or len(part) < 500]) <= 10


def test_where_nothing_works_at_all_the_search_gives_up_soon() -> None:
    """A receiver that is down is not called two thousand times to find out that a thousand items are bad."""
    found, parts = search(1000, set(range(1000)))
    assert sorted(found) == list(range(1000))
    assert len(parts) <= FRUITLESS * 12
