"""How often, and how long in between."""

from __future__ import annotations

from typing import Any

import pytest

from busload.commands.retry import RetryPolicy


def test_three_attempts_after_10_60_and_300_seconds_unless_told() -> None:
    policy = RetryPolicy()
    assert [policy.exhausted(attempt) for attempt in (1, 2, 3, 4)] == [False, False, True, True]
    assert [policy.delay(attempt) for attempt in (1, 2, 3)] == [10.0, 60.0, 300.0]


def test_the_last_pause_repeats() -> None:
    assert [RetryPolicy(9, (1, 2)).delay(attempt) for attempt in (1, 2, 3, 8)] == [1.0, 2.0, 2.0, 2.0]
    assert RetryPolicy(3, ()).delay(1) == 0.0
    assert RetryPolicy(3, (0,)).delay(2) == 0.0


def test_a_commands_own_limit_wins() -> None:
    """Higher or lower"""
    assert RetryPolicy(3).exhausted(1, limit=1)
    assert not RetryPolicy(3).exhausted(3, limit=4)
    assert RetryPolicy(1).exhausted(1, limit=None)


def test_a_list_of_pauses_is_frozen() -> None:
    pauses: Any = [1, 2.5]
    policy = RetryPolicy(3, pauses)
    pauses.clear()
    assert policy.backoff == (1, 2.5)


def test_exponential_pauses_grow_up_to_the_longest() -> None:
    def pauses(**options: Any) -> list[float]:
        policy = RetryPolicy.exponential(jitter=0, **options)
        return [policy.delay(attempt) for attempt in range(1, 7)]

    assert pauses() == [1, 2, 4, 8, 16, 32]
    assert pauses(base=10, factor=3, longest=100) == [10, 30, 90, 100, 100, 100]
    assert pauses(base=10, longest=5) == [5, 5, 5, 5, 5, 5]
    assert pauses(base=7, factor=1) == [7, 7, 7, 7, 7, 7]
    assert pauses(base=0) == [0, 0, 0, 0, 0, 0]
    assert RetryPolicy.exponential(4).exhausted(4)
    assert len(RetryPolicy.exponential(factor=1.0000001, longest=10**8).backoff) == 1000


def test_jitter_makes_pauses_longer_or_shorter_by_a_share() -> None:
    policy = RetryPolicy(3, (100,), jitter=0.2)
    assert policy.delay(1, draw=lambda least, most: least) == pytest.approx(80)
    assert policy.delay(1, draw=lambda least, most: most) == pytest.approx(120)
    found = {policy.delay(1) for _ in range(100)}
    assert len(found) > 50
    assert all(80 <= one <= 120 for one in found)


def test_the_rule_of_the_nearest_class_wins() -> None:
    slow = RetryPolicy(9, (1000,))
    policy = RetryPolicy(rules={OSError: slow, ValueError: "permanent", UnicodeError: "failed"})
    assert policy.rule_for(ConnectionError()) is slow
    assert policy.rule_for(ValueError()) == "permanent"
    assert policy.rule_for(UnicodeDecodeError("x", b"", 0, 1, "x")) == "failed"
    assert policy.rule_for(KeyError()) is None
    assert len({policy, RetryPolicy(rules={})}) <= 2  # it can be hashed


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"jitter": 2}, "jitter must be a share"),
        ({"jitter": True}, "jitter must be a share"),
        ({"rules": [ValueError]}, "rules must be a dict"),
        ({"rules": {"ValueError": "permanent"}}, "found the key 'ValueError'"),
        ({"rules": {ValueError: "ignore"}}, "The rule for ValueError must be"),
        ({"rules": {ValueError: RetryPolicy(rules={KeyError: "failed"})}}, "rules of its own"),
    ],
)
def test_jitter_and_rules_that_cannot_be_are_refused(options: Any, found: str) -> None:
    with pytest.raises(ValueError, match=found):
        RetryPolicy(**options)


@pytest.mark.parametrize("options", [{"base": -1}, {"factor": 0.5}, {"longest": "x"}, {"base": float("nan")}])
def test_figures_of_an_exponential_backoff_that_cannot_be_are_refused(options: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        RetryPolicy.exponential(**options)


@pytest.mark.parametrize("max_attempts", [0, -1, 1.5, True, "3", None])
def test_attempts_are_whole_numbers_from_one_on(max_attempts: Any) -> None:
    with pytest.raises(ValueError, match="max_attempts"):
        RetryPolicy(max_attempts)


@pytest.mark.parametrize("backoff", [(-1,), (True,), ("5",), (float("nan"),), (float("inf"),), (1, None)])
def test_pauses_are_seconds_from_zero_on(backoff: Any) -> None:
    with pytest.raises(ValueError, match="backoff"):
        RetryPolicy(3, backoff)
