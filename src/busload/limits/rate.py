"""Rate limits: how many calls a receiver allows, and how to find out if nobody says.

All workers ask the database for calls, so a limit holds for all of them together.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from math import exp, isfinite
from typing import Any
from uuid import UUID

from busload.commands.checks import FLAG, MORE_THAN_ZERO, POSITIVE, require, shown, whole, wrong_name, wrong_text
from busload.commands.checks import refuse as refuse_invalid
from busload.commands.execution import Lease
from busload.commands.payload import safe_str
from busload.errors import PermanentCommandError
from busload.postgres.arrays import unless_all_null
from busload.postgres.plan import Plan, execute, many
from busload.postgres.statements import statements
from busload.settings import InputLimits

SQL = statements(__name__)
SKIPPING = SQL.ask.replace(b"FOR UPDATE", b"FOR UPDATE SKIP LOCKED")

FASTEST = 1_000_000.0
"""Calls per second."""
SLOWEST = 1 / (366 * 86400)
MOST_BURST = 1_000_000
KEY_BYTES = 512

KEPT = 0.86
"""What a cut leaves of the rate that was refused."""
SOON = 0.4
"""A refusal comes soon if the rate had recovered by less than this part. The rate was then much too high."""
MUCH = 0.7
"""What a cut leaves of the rate from the second soon refusal in a row on."""
BACK_SECONDS, BACK_CALLS = 2.0, 80
"""A rate takes at least so many seconds, and so many calls, to recover, so that refusals are rare among the calls."""
BACK_BLOCKS, BACK_ANSWERS, LONGEST_BACK = 12, 80, 60.0
"""A rate also takes so many times the pause that came with the refusal, and so many times what the answer took, since
all calls under way by then may be refused too; but no more than the last number of seconds."""
ON_SECONDS, ON_CALLS, ON_GROWTH = 1.0, 15, 0.1
"""Steps beyond the rate that was refused. They grow: a limit that has moved far up is found soon, and one that has not
moved is hardly overstepped."""
NOTICED = 0.75
"""The last of these steps before a refusal do not count, because a receiver may need a moment to notice."""


@dataclass(frozen=True, slots=True)
class RateLimit:
    """At most `calls` per period, for all workers together; `burst` of them may come at once after a quiet time.

    Calls with the same `name` share a limit; without a name, a handler has a limit of its own. `by` is called with a
    command, group or chunk, and each value that it returns has a limit of its own. With `adaptive`, `calls` is only the
    beginning: the rate grows little by little while calls pass, and is cut when the receiver refuses one
    (`RateLimitedError`).
    """

    calls: float
    per: timedelta = timedelta(seconds=1)
    burst: int = 1
    name: str | None = None
    by: Callable[[Any], object] | None = None
    adaptive: bool = False

    def __post_init__(self) -> None:
        require(POSITIVE, calls=self.calls)
        require(MORE_THAN_ZERO, per=self.per)
        if not SLOWEST <= self.rate <= FASTEST:
            raise ValueError(
                f"A limit is between one call a year and {FASTEST:,.0f} a second, found {self.calls:g} per {self.per}."
            )
        require(whole(1, MOST_BURST), burst=self.burst)
        if self.name is not None:
            refuse_invalid(wrong_name(self.name, "rate_limit/name", InputLimits()), writes=False)
        if self.by is not None and (not callable(self.by) or is_async(self.by)):
            raise ValueError(f"by must be a function, found {self.by!r:.80}, wanted one with def.")
        require(FLAG, adaptive=self.adaptive)

    @property
    def rate(self) -> float:
        """Calls per second."""
        return self.calls / self.per.total_seconds()

    def subject_of(self, called_with: object) -> str:
        """Return the value of `by` for a call, as text. `PermanentCommandError` if there is none."""
        if self.by is None:
            return ""
        try:
            found = self.by(called_with)
        except BaseException as error:  # a SystemExit ends a call, not the worker
            raise _refused(f"raised {type(error).__name__}: {safe_str(error, 200)}") from error
        value = found.value if isinstance(found, enum.Enum) else found
        if value is None:
            return ""
        text = key_text(value)
        if text is None:
            raise _refused(f"returned {shown(found)}")
        return text


def _refused(did: str) -> PermanentCommandError:
    return PermanentCommandError(
        f"The `by` of the rate limit {did}; wanted text of at most {KEY_BYTES} bytes, a number, a UUID, a date or "
        "None. Correct the data or the function, and retry the command.",
        code="INVALID_RATE_LIMIT_KEY",
    )


def key_text(found: object) -> str | None:
    """The value of a `by` as text; None if it cannot be one."""
    if type(found) is int and -(2**63) <= found < 2**63:  # the most frequent one
        return str(found)
    value = found.value if isinstance(found, enum.Enum) else found
    if not isinstance(value, str | int | float | Decimal | UUID | date | datetime):
        return None
    try:
        text = str(_alike(value))
    except ValueError:  # an int of thousands of digits, or a signaling NaN
        return None
    return None if text and wrong_text(text, "by", KEY_BYTES) else text


def _alike(value: object) -> object:
    """Values that are equal are one key: 7, 7.0 and Decimal("7.00"), or one moment in two time zones."""
    if isinstance(value, float | Decimal) and isfinite(value) and -(2**63) <= value <= 2**63:
        return int(value) if value == int(value) else value.normalize() if isinstance(value, Decimal) else value
    if isinstance(value, datetime) and value.tzinfo is not None:
        with suppress(OverflowError):  # the first and the last hours that a datetime can have
            return value.astimezone(UTC)
    return value


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a function is async, or an object whose `__call__` is."""
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


@dataclass(frozen=True, slots=True)
class LimitStatus:
    """How a limit is doing: what `busload limit ls` shows."""

    name: str
    subject: str
    """The value of `by`; empty without a `by`."""
    adaptive: bool
    rate: float
    """Calls per second, as of now."""
    blocked_until: datetime | None
    """Until when the receiver refuses calls; None if it takes them."""
    calls: int
    refused: int
    used_at: datetime


@dataclass(frozen=True, slots=True)
class Adapted:
    """The rate of an adaptive limit: the rate that was refused last, and how far it has recovered (1: fully)."""

    ceiling: float
    progress: float = 1.0
    back: float = BACK_SECONDS
    """Seconds that the recovery takes."""
    soon: int = 0
    """How many refusals in a row came soon."""

    @property
    def rate(self) -> float:
        """It grows fast at first, slower near the rate that was refused, then faster and faster."""
        if self.progress < 1:
            return self.ceiling * (1 - (1 - KEPT) * (1 - self.progress) ** 2)
        return min(self.ceiling * exp(min(ON_GROWTH * (self.progress - 1) ** 2, 30.0)), FASTEST)

    def grown(self, calls: float) -> Adapted:
        """Return the rate after so many calls that had to wait. Other calls say nothing about what is possible."""
        if self.progress < 1:
            progress = self.progress + calls / max(BACK_CALLS, self.back * self.rate)
            return replace(self, progress=min(progress, 1.0))
        return replace(self, progress=self.progress + calls / max(ON_CALLS, ON_SECONDS * self.rate))

    def cut(self, after: float, took: float = 0.0) -> Adapted:
        """Return the rate after a refusal of all calls for `after` seconds, which took `took` seconds to come."""
        soon = self.soon + 1 if self.progress < SOON else 0
        before = replace(self, progress=max(self.progress - NOTICED, min(self.progress, 1.0)))
        ceiling = max(before.rate * (MUCH if soon > 1 else 1.0), SLOWEST)
        back = max(BACK_SECONDS, BACK_BLOCKS * after, BACK_ANSWERS * took)
        return Adapted(ceiling, 0.0, min(back, LONGEST_BACK), soon)


# -- the database lets calls go ----------------------------------------------------------------------------------------

AHEAD = 0.5
"""Seconds that a call is granted before its time, at most, so that a waiting call hears soon of a block."""

Key = tuple[str, str]
"""The name of a limit, and the value of its `by`."""


@dataclass(frozen=True, slots=True)
class Ask:
    """So many calls want to go. `before` is an adaptive rate at the last answer, `now` as it has grown since."""

    limit: RateLimit
    wanted: int
    round: int = -1
    before: Adapted | None = None
    now: Adapted | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """So many calls may go: the first in `first` seconds (or at once), each further one `every` seconds later."""

    calls: int
    first: float
    """Seconds until the first call may go; less than 0 if it may go at once."""
    every: float
    """Seconds between two calls."""
    next: float
    """Seconds until the next call could go, which was not granted."""
    round: int
    adapted: Adapted
    at: float
    """The time of the database from which these seconds count."""


@dataclass(frozen=True, slots=True)
class Late:
    """A command of a lease that a limit holds up for so many seconds; without a limit, its handler has put it off."""

    lease: Lease
    id: int
    seconds: float
    limit: str | None


def ask(asks: Mapping[Key, Ask], *, skip_locked: bool = False) -> Plan[dict[Key, Grant]]:
    """Ask for calls of several limits at once. A limit that is new begins with this.

    A row that others have locked for a second makes the whole call fail. With `skip_locked`, that limit has no answer.
    """
    statement = SKIPPING if skip_locked else SQL.ask
    granted = yield from _ask(asks, statement)
    if len(granted) < len(asks):
        missing = {key: asked for key, asked in asks.items() if key not in granted}
        yield from _begin({key: asked.limit for key, asked in missing.items()})
        granted |= yield from _ask(missing, statement)
    return granted


def refuse(key: Key, limit: RateLimit, after: float, entered_ago: float | None) -> Plan[float]:
    """Let nobody call for `after` seconds, and return how long the block will last.

    An adaptive limit is cut, but only once: a call that entered before the last cut tells nothing new.
    """
    about = {"name": key[0], "subject": key[1]}
    rows = yield from execute(SQL.refuse, **about, after=after, burst=limit.burst)
    if not rows:
        yield from _begin({key: limit})
        rows = yield from execute(SQL.refuse, **about, after=after, burst=limit.burst)
    [(blocked, round, ceiling, progress, back, soon, cut_ago, _)] = rows
    if limit.adaptive and (entered_ago is None or entered_ago < cut_ago):
        cut = Adapted(ceiling, progress, back, soon).cut(after, entered_ago or 0.0)
        yield from execute(
            SQL.cut, **about, round=round, ceiling=cut.ceiling, rate=cut.rate, back=cut.back, soon=cut.soon
        )
    return float(blocked)


def reset(name: str, subject: str | None, *, operator: str | None = None) -> Plan[int]:
    """Let calls go again at once, of one value of `by` or of all, and return how many limits that concerns."""
    rows = yield from execute(SQL.reset, name=name, subject=subject, operator=operator)
    if rows:
        yield from execute(SQL.bring_forward, name=name)
    return len(rows)


def would_reset(name: str, subject: str | None) -> Plan[tuple[int, int]]:
    """How many limits `reset` would reset, and how many commands wait for a limit of this name. Locks nothing."""
    [(limits, commands)] = yield from execute(SQL.would_reset, name=name, subject=subject)
    return int(limits), int(commands)


def limits(name: str | None, *, limit: int) -> Plan[list[LimitStatus]]:
    return many(LimitStatus, SQL.limits, name=name, limit=limit)


def forget() -> Plan[None]:
    """Remove limits that nobody has used for a day: values of a `by` come and go."""
    yield from execute(SQL.forget)


def postpone(late: Sequence[Late]) -> Plan[int]:
    """Let these commands wait without burning an attempt. Return how many this worker still held. Safe to repeat."""
    ordinals = {lease: ordinal for ordinal, lease in enumerate(dict.fromkeys(one.lease for one in late), 1)}
    [(count,)] = yield from execute(
        SQL.postpone,
        leases=[lease.lease_id for lease in ordinals],
        ids=[one.id for one in late],
        ordinals=[ordinals[one.lease] for one in late],
        delays=[one.seconds for one in late],
        names=[one.limit for one in late],
    )
    return int(count)


def _ask(asks: Mapping[Key, Ask], statement: bytes) -> Plan[dict[Key, Grant]]:
    asked = asks.values()
    grown = [one.now or Adapted(one.limit.rate) for one in asked]
    rows = yield from execute(
        statement,
        names=[name for name, _ in asks],
        subjects=[subject for _, subject in asks],
        wanted=[one.wanted for one in asked],
        rates=[now.rate if one.limit.adaptive else one.limit.rate for one, now in zip(asked, grown, strict=True)],
        bursts=[one.limit.burst for one in asked],
        rounds=unless_all_null(one.round if one.limit.adaptive else None for one in asked),
        steps=[
            now.progress - one.before.progress if one.before else 0.0 for one, now in zip(asked, grown, strict=True)
        ],
        ahead=AHEAD,
    )
    return {
        (name, subject): Grant(calls, first, every, next, round, Adapted(ceiling, progress, back, soon), at)
        for name, subject, calls, first, every, next, round, ceiling, progress, back, soon, at in rows
    }


def _begin(limits: Mapping[Key, RateLimit]) -> Plan[None]:
    yield from execute(
        SQL.begin,
        names=[name for name, _ in limits],
        subjects=[subject for _, subject in limits],
        adaptive=[limit.adaptive for limit in limits.values()],
        rates=[limit.rate for limit in limits.values()],
    )
