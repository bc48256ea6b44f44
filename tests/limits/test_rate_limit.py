"""What a limit may say, and how an adaptive one finds what a receiver allows."""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given as example_of
from hypothesis import settings
from hypothesis import strategies as st

from busload import ConcurrencyLimit, InvalidCommandError, PermanentCommandError, RateLimit, RateLimitedError
from busload.limits.rate import FASTEST, KEPT, Adapted


async def find_later(called_with: object) -> None: ...


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"calls": 0}, "calls must be a number of more than 0, found 0"),
        ({"calls": -1}, "found -1"),
        ({"calls": True}, "found True"),
        ({"calls": "10"}, "found '10'"),
        ({"calls": float("nan")}, "found nan"),
        ({"calls": float("inf")}, "found inf"),
        ({"calls": 10, "per": 1}, "per must be a timedelta"),
        ({"calls": 10, "per": timedelta(0)}, "more than zero"),
        ({"calls": 10**7}, "found 1e+07 per 0:00:01"),
        ({"calls": 1, "per": timedelta(days=10_000)}, "one call a year"),
        ({"calls": 10, "burst": 0}, "burst must be a whole number from 1"),
        ({"calls": 10, "burst": 1.5}, "found 1.5"),
        ({"calls": 10, "burst": True}, "found True"),
        ({"calls": 10, "by": "tenant"}, "by must be a function, found 'tenant'"),
        ({"calls": 10, "by": find_later}, "by must be a function, found <function find_later"),
        ({"calls": 10, "adaptive": 1}, "adaptive must be True or False, found 1"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused_where_it_is_made(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        RateLimit(**wrong)
    assert said in str(refused.value)


@pytest.mark.parametrize("name", ["", "with space", "crm/Push", "x" * 256, 5])
def test_a_name_is_checked_as_every_other(name: Any) -> None:
    with pytest.raises(InvalidCommandError) as refused:
        RateLimit(1, name=name)
    assert refused.value.code == "INVALID_NAME"


class Region(enum.Enum):
    NORTH = "north"


@pytest.mark.parametrize(
    ("found", "subject"),
    [
        ("tenant", "tenant"),
        ("", ""),
        (None, ""),
        (42, "42"),
        (UUID(int=7), "00000000-0000-0000-0000-000000000007"),
        (Region.NORTH, "north"),
        (date(2026, 1, 2), "2026-01-02"),
        ("é" * 256, "é" * 256),
    ],
)
def test_what_by_returns_becomes_text(found: object, subject: str) -> None:
    assert RateLimit(1, by=lambda called_with: found).subject_of(None) == subject


EAST = timezone(timedelta(hours=5, minutes=45))
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    "equal",
    [
        (7, 7.0, Decimal(7), Decimal("7.00")),
        (70, 70.0, Decimal("7E+1")),
        (0, 0.0, -0.0, Decimal("-0")),
        (0.5, Decimal("0.50")),
        (-(2**63), -(2.0**63), Decimal(-(2**63))),
        (NOON, NOON.astimezone(EAST)),
    ],
)
def test_values_that_are_equal_are_one_key(equal: tuple[object, ...]) -> None:
    """Else two calls for customer 7 would run at a time, if one of their senders has written 7.0."""
    assert len(set(equal)) == 1
    for limit in (RateLimit(1, by=lambda found: found), ConcurrencyLimit(1, by=lambda found: found)):
        assert len({limit.subject_of(found) for found in equal}) == 1


@pytest.mark.parametrize(
    "found", [float("nan"), float("inf"), Decimal("NaN"), Decimal("-Infinity"), Decimal("1E+99999"), 1e300]
)
def test_any_number_is_a_key(found: float | Decimal) -> None:
    assert ConcurrencyLimit(1, by=lambda called_with: found).subject_of(None)


def test_a_time_that_no_other_zone_has_is_a_key() -> None:
    last = datetime.max.replace(tzinfo=timezone(timedelta(hours=-1)))
    assert ConcurrencyLimit(1, by=lambda called_with: last).subject_of(None).startswith("9999-12-31 23:59:59.999999")


@pytest.mark.parametrize(
    "found",
    [
        [],
        {},
        object(),
        b"bytes",
        "x" * 513,
        "é" * 257,
        "a\0b",
        "\ud800",
        10**600,
        pytest.param(10**5000, id="digits"),
        Decimal("sNaN"),
    ],
)
def test_what_cannot_be_the_key_of_a_limit_is_refused(found: object) -> None:
    with pytest.raises(PermanentCommandError) as refused:
        RateLimit(1, by=lambda called_with: found).subject_of(None)
    assert refused.value.code == "INVALID_RATE_LIMIT_KEY"


def test_a_by_that_wants_to_end_the_process_fails_its_call() -> None:
    def leave(called_with: object) -> str:
        raise SystemExit(3)

    with pytest.raises(PermanentCommandError, match="raised SystemExit: 3"):
        RateLimit(1, by=leave).subject_of(None)


@pytest.mark.parametrize("after", [-1, float("nan"), "5", True, 10**9])
def test_a_pause_that_makes_no_sense_is_refused(after: Any) -> None:
    with pytest.raises(ValueError, match="wants seconds from 0 on"):
        RateLimitedError(after=after)


# -- the adaptive rate -------------------------------------------------------------------------------------------------


def test_a_cut_leaves_less_and_a_rate_comes_back_without_leaping_over_what_was_refused() -> None:
    cut = Adapted(100.0).cut(0.0)
    assert (cut.rate, cut.ceiling) == (KEPT * 100.0, 100.0)
    assert cut.grown(10**9).rate == 100.0  # one step never leads beyond it
    assert cut.grown(10).rate < cut.grown(20).rate < 100.0


def test_what_is_refused_again_and_again_falls_fast() -> None:
    """From 500 a second to 5 in less than fifteen refusals."""
    adapted, refusals = Adapted(500.0), 0
    while adapted.rate > 5:
        adapted, refusals = adapted.cut(0.0), refusals + 1
    assert refusals < 15


@example_of(st.lists(st.one_of(st.floats(0, 1e6), st.none()), max_size=200), st.floats(1e-6, 1e6))
def test_a_rate_stays_one_whatever_happens(steps: list[float | None], start: float) -> None:
    adapted = Adapted(start)
    for step in steps:
        before = adapted.rate
        adapted = adapted.cut(1.0) if step is None else adapted.grown(step)
        assert 0 < adapted.rate <= FASTEST
        assert adapted.rate < before if step is None and before > 1e-5 else adapted.rate >= before or step is None


@dataclass
class Receiver:
    """Allows so many calls a second at a time of its life: counted in windows, or as a bucket that fills."""

    limit: Callable[[float], float]
    window: float | None = None
    bucket: float = 5.0
    latency: float = 0.05

    def run(self, seconds: float, start: float) -> tuple[float, float]:
        """Call it at the rate of an adaptive limit; returns which part of what it allows was used, and was refused."""
        adapted, t, cut_at, blocked = Adapted(start), 0.0, -1.0, 0.0
        served = refused = 0
        answers: list[tuple[float, float, float]] = []
        while t < seconds:
            while answers and answers[0][0] <= t:
                at, entered, after = heapq.heappop(answers)
                if entered > cut_at:
                    adapted, cut_at = adapted.cut(after, self.latency), at
                blocked = max(blocked, at + after)
            if blocked > t:
                t = blocked
                continue
            wait = self._call(t)
            if wait is None:
                served += 1
            else:
                refused += 1
                heapq.heappush(answers, (t + self.latency, t, wait))
            adapted = adapted.grown(1)
            t += 1 / adapted.rate
        allowed = sum(self.limit(n / 100) / 100 for n in range(int(seconds * 100)))
        return served / allowed, refused / (served + refused)

    _used: int = 0
    _seen: float = 0.0

    def _call(self, t: float) -> float | None:
        limit = self.limit(t)
        if self.window is not None:
            number = int(t / self.window)
            if number != int(self._seen / self.window):
                self._used = 0
            self._seen = t
            if self._used >= limit * self.window:
                return (number + 1) * self.window - t
            self._used += 1
            return None
        self._level = min(self.bucket, getattr(self, "_level", self.bucket) + (t - self._seen) * limit)
        self._seen = t
        if self._level < 1:
            return 1 / limit
        self._level -= 1
        return None


@pytest.mark.parametrize("limit", [10, 50, 200, 500])
@pytest.mark.parametrize("window", [None, 1.0])
def test_what_a_receiver_allows_is_used_and_hardly_overstepped(limit: float, window: float | None) -> None:
    """Five minutes, beginning at 20 a second: at least 85 % used, fewer than 2 % refused."""
    used, refused = Receiver(lambda t: limit, window).run(300, start=20.0)
    assert used >= 0.85
    assert refused < 0.02


@pytest.mark.parametrize("window", [None, 0.25])
def test_a_limit_that_moves_is_followed(window: float | None) -> None:
    """It moves every 20 seconds, by a quarter to a half."""
    levels = [60, 40, 80, 50, 100, 70]
    used, refused = Receiver(lambda t: levels[int(t / 20) % 6], window).run(240, start=50.0)
    assert used >= 0.85
    assert refused < 0.02


@settings(max_examples=40)
@example_of(
    st.lists(st.floats(5, 500), min_size=2, max_size=5), st.sampled_from([None, 0.25, 1.0]), st.floats(0.001, 0.2)
)
def test_wherever_a_limit_moves_it_is_found(levels: list[float], window: float | None, latency: float) -> None:
    """Between 5 and 500 a second, every two minutes: it never starves, and never runs against a wall."""
    receiver = Receiver(lambda t: levels[min(int(t / 120), len(levels) - 1)], window, latency=latency)
    used, refused = receiver.run(120.0 * len(levels), start=20.0)
    assert used >= 0.5
    assert refused < 0.06
