"""How PostgreSQL lets calls go at the rate of their limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from busload.domain.execution import Lease
from busload.domain.rate import Adapted, LimitStatus, RateLimit
from busload.store.arrays import unless_all_null
from busload.store.plan import Plan, execute, many
from busload.store.statements import statements

SQL = statements("rate")
SKIPPING = SQL.ask.replace(b"FOR UPDATE", b"FOR UPDATE SKIP LOCKED")

AHEAD = 0.5
"""Seconds that a call is let go before its time, at most, so that who waits hears soon of a block."""

Key = tuple[str, str]
"""The name of a limit, and what its `by` has said."""


@dataclass(frozen=True, slots=True)
class Ask:
    """So many calls want to go. What an adaptive limit was when it last answered, and has become since."""

    limit: RateLimit
    wanted: int
    round: int = -1
    before: Adapted | None = None
    now: Adapted | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """So many calls may go: the first in `first` seconds (or at once), the others one after the other."""

    calls: int
    first: float
    every: float
    next: float
    """Seconds until the next one could go that was not granted."""
    round: int
    adapted: Adapted
    at: float
    """From when these seconds count, in seconds of the database's clock."""


@dataclass(frozen=True, slots=True)
class Late:
    """A command of a lease that a limit holds up for so many seconds."""

    lease: Lease
    id: int
    seconds: float
    limit: str


def ask(asks: Mapping[Key, Ask], *, skip_locked: bool = False) -> Plan[dict[Key, Grant]]:
    """Ask for calls of several limits at once; limits that are new begin with this.

    A row that others have locked for a second makes all of it fail; with `skip_locked`, there is no answer for it.
    """
    statement = SKIPPING if skip_locked else SQL.ask
    granted = yield from _ask(asks, statement)
    if len(granted) < len(asks):
        missing = {key: asked for key, asked in asks.items() if key not in granted}
        yield from _begin({key: asked.limit for key, asked in missing.items()})
        granted |= yield from _ask(missing, statement)
    return granted


def refuse(key: Key, limit: RateLimit, after: float, entered_ago: float | None) -> Plan[float]:
    """Nobody calls for `after` seconds; returns how long that will be.

    An adaptive limit is cut, by the first who says so: a call that entered before the last cut tells nothing new.
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


def reset(name: str, subject: str | None) -> Plan[int]:
    """Let calls go again at once, of one value of `by` or of all; returns how many limits that concerns."""
    rows = yield from execute(SQL.reset, name=name, subject=subject)
    if rows:
        yield from execute(SQL.bring_forward, name=name)
    return len(rows)


def limits(name: str | None, *, limit: int) -> Plan[list[LimitStatus]]:
    return many(LimitStatus, SQL.limits, name=name, limit=limit)


def forget() -> Plan[None]:
    """Remove what nobody has used for a day: values of a `by` come and go."""
    yield from execute(SQL.forget)


def postpone(late: Sequence[Late]) -> Plan[int]:
    """Let these wait, without burning an attempt; returns how many were ours to say so. Safe to repeat."""
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
    grown = [asked.now if asked.now is not None else Adapted(asked.limit.rate) for asked in asks.values()]
    rows = yield from execute(
        statement,
        names=[name for name, _ in asks],
        subjects=[subject for _, subject in asks],
        wanted=[asked.wanted for asked in asks.values()],
        rates=[
            now.rate if asked.limit.adaptive else asked.limit.rate
            for asked, now in zip(asks.values(), grown, strict=True)
        ],
        bursts=[asked.limit.burst for asked in asks.values()],
        rounds=unless_all_null(asked.round if asked.limit.adaptive else None for asked in asks.values()),
        steps=[
            0.0 if asked.before is None else now.progress - asked.before.progress
            for asked, now in zip(asks.values(), grown, strict=True)
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
