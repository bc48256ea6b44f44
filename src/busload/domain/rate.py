"""How many calls the outside world allows, and how to find out where nobody says."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from decimal import Decimal
from math import exp
from typing import Any
from uuid import UUID

from busload.domain.command import InputLimits, check_name, refuse
from busload.errors import PermanentCommandError

FASTEST = 1_000_000.0
"""Calls per second."""
SLOWEST = 1 / (366 * 86400)
MOST_BURST = 1_000_000
KEY_BYTES = 512

KEPT = 0.86
"""What a cut leaves of the rate that was refused."""
SOON = 0.4
"""A rate that is refused before it has come so far again was too high by more than that."""
MUCH = 0.7
"""What is left from the second such refusal in a row on."""
BACK_SECONDS, BACK_CALLS = 2.0, 80
"""How long a rate takes to come back to where it was refused: both, so that refusals are rare among the calls."""
BACK_BLOCKS, BACK_ANSWERS, LONGEST_BACK = 12, 80, 60.0
"""The same in times of the pause that came with the refusal, and of what the answer took, since all calls under
way by then may be refused too; and the most seconds that this may make."""
ON_SECONDS, ON_CALLS, ON_GROWTH = 1.0, 15, 0.1
"""Steps beyond it. They grow: a limit that has moved far up is found soon, one that has not is hardly overstepped."""
NOTICED = 0.75
"""Of these steps the last ones before a refusal do not count: a receiver may need a moment to notice."""


@dataclass(frozen=True, slots=True)
class RateLimit:
    """At most `calls` per period, for all workers together; `burst` of them may come at once after a quiet time.

    Calls with the same `name` share a limit; without one, a handler has its own. `by` tells a limit of its own for each
    value that it returns for a command, group or chunk. With `adaptive`, `calls` is where it begins: the rate grows
    little by little while calls pass, and is cut whenever the receiver refuses one (`RateLimited`).
    """

    calls: float
    per: timedelta = timedelta(seconds=1)
    burst: int = 1
    name: str | None = None
    by: Callable[[Any], object] | None = None
    adaptive: bool = False

    def __post_init__(self) -> None:
        if type(self.calls) not in (int, float) or not 0 < self.calls < float("inf"):
            raise ValueError(f"calls must be a number of more than 0, found {self.calls!r:.80}.")
        if not isinstance(self.per, timedelta) or self.per <= timedelta(0):
            raise ValueError(f"per must be a timedelta of more than zero, found {self.per!r:.80}.")
        if not SLOWEST <= self.rate <= FASTEST:
            raise ValueError(
                f"A limit is between one call a year and {FASTEST:,.0f} a second, found {self.calls:g} per {self.per}."
            )
        if type(self.burst) is not int or not 1 <= self.burst <= MOST_BURST:
            raise ValueError(f"burst must be a whole number from 1 to {MOST_BURST:,}, found {self.burst!r:.80}.")
        if self.name is not None:
            refuse(check_name(self.name, "rate_limit/name", InputLimits()), writes=False)
        if self.by is not None and (not callable(self.by) or is_async(self.by)):
            raise ValueError(f"by must be a function, found {self.by!r:.80}, wanted one with def.")
        if not isinstance(self.adaptive, bool):
            raise ValueError(f"adaptive must be True or False, found {self.adaptive!r:.80}.")

    @property
    def rate(self) -> float:
        """Calls per second."""
        return self.calls / self.per.total_seconds()

    def subject_of(self, called_with: object) -> str:
        """Which of its limits a call falls under, as text; what `by` raises is the failure of that call."""
        if self.by is None:
            return ""
        try:
            found = self.by(called_with)
        except Exception:
            raise
        except BaseException as error:  # a SystemExit ends a call, not the worker
            raise RuntimeError(f"The limit's `by` raised {error!r:.80}.") from error
        value = found.value if isinstance(found, enum.Enum) else found
        if value is None:
            return ""
        text = str(value) if isinstance(value, str | int | float | Decimal | UUID | date | datetime) else None
        if text is None or "\0" in text or not _fits(text):
            raise PermanentCommandError(
                f"The limit's `by` returned {found!r:.80}; wanted text of at most {KEY_BYTES} bytes, a number, a UUID, "
                "a date or None.",
                code="INVALID_RATE_LIMIT_KEY",
            )
        return text


def is_async(function: Callable[..., Any]) -> bool:
    """Also an object whose `__call__` is."""
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


@dataclass(frozen=True, slots=True)
class LimitStatus:
    """How a limit is doing: what people and `busload limit ls` see."""

    name: str
    subject: str
    """What `by` has said; empty without one."""
    adaptive: bool
    rate: float
    """Calls per second, as of now."""
    blocked_until: datetime | None
    """The receiver has refused calls until then; None: it takes them."""
    calls: int
    refused: int
    used_at: datetime


@dataclass(frozen=True, slots=True)
class Adapted:
    """The rate of an adaptive limit: what was refused last, and how far it has come back to that, or beyond (1)."""

    ceiling: float
    progress: float = 1.0
    back: float = BACK_SECONDS
    """Seconds that coming back takes."""
    soon: int = 0
    """How many refusals in a row came too soon."""

    @property
    def rate(self) -> float:
        """Fast at first, slower where it was refused before, then faster and faster: there may be far more."""
        if self.progress < 1:
            return self.ceiling * (1 - (1 - KEPT) * (1 - self.progress) ** 2)
        return min(self.ceiling * exp(min(ON_GROWTH * (self.progress - 1) ** 2, 30.0)), FASTEST)

    def grown(self, calls: float) -> Adapted:
        """After so many calls that had to wait for their turn: others say nothing about what is possible."""
        if self.progress < 1:
            progress = self.progress + calls / max(BACK_CALLS, self.back * self.rate)
            return replace(self, progress=min(progress, 1.0))
        return replace(self, progress=self.progress + calls / max(ON_CALLS, ON_SECONDS * self.rate))

    def cut(self, after: float, took: float = 0.0) -> Adapted:
        """After the receiver has refused a call, and all calls for so many seconds; its answer took so long."""
        soon = self.soon + 1 if self.progress < SOON else 0
        before = replace(self, progress=max(self.progress - NOTICED, min(self.progress, 1.0)))
        ceiling = max(before.rate * (MUCH if soon > 1 else 1.0), SLOWEST)
        back = max(BACK_SECONDS, BACK_BLOCKS * after, BACK_ANSWERS * took)
        return Adapted(ceiling, 0.0, min(back, LONGEST_BACK), soon)


def _fits(text: str) -> bool:
    try:
        return len(text.encode()) <= KEY_BYTES
    except UnicodeEncodeError:
        return False
