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


@pytest.mark.parametrize("max_attempts", [0, -1, 1.5, True, "3", None])
def test_attempts_are_whole_numbers_from_one_on(max_attempts: Any) -> None:
    with pytest.raises(ValueError, match="max_attempts"):
        RetryPolicy(max_attempts)


@pytest.mark.parametrize("backoff", [(-1,), (True,), ("5",), (float("nan"),), (float("inf"),), (1, None)])
def test_pauses_are_seconds_from_zero_on(backoff: Any) -> None:
    with pytest.raises(ValueError, match="backoff"):
        RetryPolicy(3, backoff)
