"""When a batch will be done: how fast it goes, an interval for its end, and what would change it.

The row of a batch keeps its pace, and `busload.outlook` reads what else there is to know. The rest is computed here,
and calibrated on recorded runs: docs/forecast.md has the table, `tests/batches/test_calibration.py` replays them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import pairwise

import msgspec

from busload.commands.wording import counted, per_second, span

SCALES = (1.0, 10.0, 100.0, 1000.0)
"""Seconds over which the row of a batch keeps its pace."""

LAST_MINUTES = 2
"""Which of them is the rate that people see."""

STANDSTILL, EXPECTED = 60.0, 50.0
"""A batch stands still if nothing has ended for so many seconds, in which so many would have ended at its pace."""

FAR = 1e9
"""Seconds: no forecast is for a time after that."""

BUSY = 0.9
"""The share of its slots from which on a domain is called busy."""


class NoForecast(StrEnum):
    """Why nobody can tell when a batch will be done."""

    NOT_SEALED = "NOT_SEALED"
    CANARY = "CANARY"
    BUDGET = "BUDGET"
    HELD = "HELD"
    PAUSED = "PAUSED"
    NO_WORKER = "NO_WORKER"
    IN_TROUBLESHOOTING = "IN_TROUBLESHOOTING"
    NO_HANDLER = "NO_HANDLER"
    NOTHING_ENDED = "NOTHING_ENDED"
    STANDSTILL = "STANDSTILL"


@dataclass(frozen=True, slots=True)
class Forecast:
    """When a batch will be done, as far as can be told at one moment."""

    made_at: datetime
    rate: float
    """Commands that ended per second, over the last minutes."""
    done_at: datetime | None = None
    """When it will be done, most likely; None if nobody can tell."""
    earliest: datetime | None = None
    """The lower end of the interval: it is done before that in at most one of ten cases."""
    latest: datetime | None = None
    """The upper end of the interval: it is done after that in at most one of ten cases."""
    unknown: NoForecast | None = None
    """Why nobody can tell."""
    changes: tuple[str, ...] = ()
    """What would change it, in sentences."""
    in_troubleshooting: int = 0
    """Commands that wait for a person: it says when all others will have ended."""

    def __str__(self) -> str:
        """How long it takes from the moment on when this was made: `in about 40 s (30 s to 1 min)`."""
        if self.done_at is None or self.earliest is None or self.latest is None:
            return f"unknown: {self.unknown}"
        about, least, most = (span(time - self.made_at) for time in (self.done_at, self.earliest, self.latest))
        others = f", not counting {_commands(self.in_troubleshooting, 'in', 'in')} troubleshooting"
        return f"in about {about} ({least} to {most}){others if self.in_troubleshooting else ''}"


class Around(msgspec.Struct, frozen=True, kw_only=True):
    """A domain in which commands of a batch wait or run: who serves it, and what limits these commands there."""

    domain: str = ""
    waits: bool = True
    """Whether commands of the batch wait there: ready, or for a limit or their time."""
    rate_limited: int = 0
    limited: int = 0
    limit: str | None = None
    """The name of the limit that these wait for."""
    allowed: float | None = None
    """Calls that it allows: per second, or at a time."""
    by_key: bool = False
    """Whether that holds for each key by itself."""
    workers: int = 0
    slots: int = 0
    busy: int = 0
    """Commands that these workers hold, of this batch and of others."""
    paused: bool = False


class Outlook(Around, frozen=True, kw_only=True):
    """What is known about a batch that has not ended, as `busload.outlook` returns it. Times are seconds from now.

    Its domain is the one that holds it up most, if there are several.
    """

    now: datetime
    total: int
    ended: int
    parked: int = 0
    sealed: bool = True
    held: str | None = None
    """What holds it: OPERATOR, CANARY or BUDGET."""
    canary: bool = False
    """Whether all but the canary waits for the canary."""
    age: float | None = None
    """Since its first command started."""
    expires: float | None = None
    """Until it expires; less than nothing if it has expired."""
    idle: float = 0.0
    """Since the pace was counted."""
    paces: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """What ended, each command counted less the longer ago it was, on each of the scales."""
    running: int = 0
    longest: float = 0.0
    """How long the first of these has been held by its worker."""
    retries: int = 0
    last_retry: float = 0.0
    planned: int = 0
    last_planned: float = 0.0
    no_handler: int = 0
    elsewhere: tuple[Around, ...] = ()
    """Its other domains."""
    all_slots: int | None = None
    """Slots of all workers that serve any of its domains, if there are several."""

    @property
    def everywhere(self) -> tuple[Around, ...]:
        """All its domains."""
        return (self, *self.elsewhere)

    @property
    def left(self) -> int:
        """Commands that have not ended and wait for no person."""
        return self.total - self.ended - self.parked

    @property
    def in_slots(self) -> int:
        """Commands that run; a worker holds more, which wait for a slot."""
        return min(self.running, self.slots if self.all_slots is None else self.all_slots)

    @property
    def later(self) -> int:
        """Commands that are not due."""
        return self.retries + self.planned + self.no_handler

    @property
    def ready(self) -> int:
        """Commands that a worker could take, but for a limit."""
        return max(0, self.left - self.running - self.later)


def forecast(outlook: Outlook) -> Forecast:
    """Say when a batch will be done, or why nobody can tell."""
    rate = _rates(outlook, outlook.idle)[LAST_MINUTES][1]
    unknown = _unknown(outlook, rate)
    if unknown is not None:
        missing = (_what_is_missing(outlook, unknown),)
        return Forecast(outlook.now, rate, unknown=unknown, changes=missing, in_troubleshooting=outlook.parked)
    interval = [timedelta(seconds=min(seconds, FAR)) for seconds in _interval(outlook)]
    earliest, done_at, latest = (outlook.now + time for time in interval)
    changes = tuple(_changes(outlook, interval[1], _expires_before(outlook, interval[2].total_seconds())))
    return Forecast(outlook.now, rate, done_at, earliest, latest, changes=changes, in_troubleshooting=outlook.parked)


def read_forecast(outlook: str | None) -> Forecast | None:
    """The forecast of a batch by what `busload.outlook` says; None if it has ended."""
    return None if outlook is None else forecast(msgspec.json.decode(outlook, type=Outlook))


# -- how long it takes -------------------------------------------------------------------------------------------------

FLUSH = 0.1
"""Seconds until results are settled and counted, about."""
LOOK_BACK = 0.1
"""The rate is taken over so much time as this share of what the rest will take."""
ALWAYS, BY_RATES, BY_SHARE = 0.55, 0.3, 0.28
"""How wide the interval is: in any case, by how much the rates differ, and by how much is left of how much."""
MOST_DIFFERENT = 2.0
"""Beyond that, a difference of rates makes the interval no wider: it is a factor of seven."""
SWEEP = 5.0
"""Seconds between two sweeps, about: one of them cancels what has expired."""
UPWARDS = 1.15
"""How wide its upper part is, in times of the lower one."""
TAIL, LONGEST = 1.6, 0.15
"""How much later the end may be: in times that a command runs, and that the one runs that has run longest."""
AGAIN, MOST_AGAIN = 1.3, 1.7
"""How much of the longest wait for a retry is added, for each time that the last command may fail: likely, and at most.

See `_times_again`.
"""


def _rates(outlook: Outlook, idle: float) -> list[tuple[float, float]]:
    """Commands per second over each of the scales, and since the start if that is longer ago, after an idle time."""
    ended = max(1, outlook.ended + outlook.parked)
    started = max(outlook.age or 0.0, 1e-3)
    # What runs is half done on average, and the first results took a flush to be counted.
    age = max(started * ended / (ended + outlook.in_slots / 2) - FLUSH, started / 4)
    rates = []
    for scale, pace in zip(SCALES, outlook.paces, strict=True):
        faded = pace * math.exp(-min(idle / scale, 500.0))
        rates.append((min(scale, age), faded / (scale * -math.expm1(-age / scale))))
    if age > SCALES[-1]:
        rates.append((age, ended / age))
    return rates


def _interval(outlook: Outlook) -> tuple[float, float, float]:
    """Seconds until the end: hardly less, most likely, hardly more."""
    # If all that is left waits for its time, being idle says nothing about the pace.
    rates = _rates(outlook, outlook.idle if outlook.left > outlook.later else 0.0)
    left, ended = outlook.left, max(1, outlook.ended + outlook.parked)
    known = [(window, max(rate, 0.5 / window)) for window, rate in rates]
    seconds = left / known[-1][1]
    for _ in range(3):  # the rate depends on how long it takes, and the other way round
        seconds = left / _rate_over(known, LOOK_BACK * seconds)
    rate = left / seconds
    differ = min(max(abs(math.log(one / rate)) for _, one in known), MOST_DIFFERENT)
    spread = math.hypot(ALWAYS, BY_RATES * differ, BY_SHARE * math.log1p(left / ended))
    due = max(outlook.last_retry, outlook.last_planned)
    again = outlook.last_retry * _times_again(outlook, rate)
    runs_on = TAIL * outlook.in_slots / rate + LONGEST * outlook.longest
    earliest = max(seconds * math.exp(-spread) - FLUSH, due, 0.0)
    likely = max(seconds, due) + AGAIN * again
    latest = max(seconds * math.exp(UPWARDS * spread), due) + runs_on + MOST_AGAIN * again + FLUSH
    if outlook.expires is not None and _expires_before(outlook, latest):  # what has started goes on
        over, started = max(outlook.expires, 0.0), outlook.last_retry
        earliest = min(earliest, max(over, started))
        likely = min(likely, max(over + SWEEP / 2, started) + AGAIN * again)
        latest = min(latest, max(over + SWEEP, started) + runs_on + MOST_AGAIN * again + FLUSH)
    return earliest, likely, max(latest, likely)


def _expires_before(outlook: Outlook, latest: float) -> bool:
    """Whether the batch expires before that, while some of it may not have started."""
    unstarted = outlook.left > outlook.running + outlook.retries
    return unstarted and outlook.expires is not None and outlook.expires < latest


def _times_again(outlook: Outlook, rate: float) -> float:
    """How often the unluckiest command that is left will fail, by the share of commands that wait for a retry now."""
    if not outlook.retries or outlook.last_retry <= 0:
        return 0.0
    fails = outlook.retries / (outlook.retries + rate * outlook.last_retry)
    return math.log1p(outlook.left) / -math.log(min(max(fails, 0.005), 0.9))


def _rate_over(rates: Sequence[tuple[float, float]], seconds: float) -> float:
    """The rate over so many seconds, between those of the two nearest scales."""
    for (shorter, fast), (longer, slow) in pairwise(rates):
        if seconds <= shorter:
            return fast
        if seconds < longer:
            share = math.log(seconds / shorter) / math.log(longer / shorter)
            return math.exp((1 - share) * math.log(fast) + share * math.log(slow))
    return rates[-1][1]


# -- what cannot be told -----------------------------------------------------------------------------------------------


def _unknown(outlook: Outlook, rate: float) -> NoForecast | None:
    """Why nobody can tell when the batch will be done, the most urgent reason first; None if one can."""
    waits = outlook.left > outlook.running
    if not outlook.sealed:
        return NoForecast.NOT_SEALED
    if outlook.held is not None and waits:
        return NoForecast.HELD if outlook.held == "OPERATOR" else NoForecast(outlook.held)
    if outlook.canary and waits:
        return NoForecast.CANARY
    if not outlook.left:
        return NoForecast.IN_TROUBLESHOOTING
    if waits and any(map(_is_paused, outlook.everywhere)):
        return NoForecast.PAUSED
    if not all(around.workers for around in outlook.everywhere):
        return NoForecast.NO_WORKER
    if outlook.no_handler:
        return NoForecast.NO_HANDLER
    if outlook.age is None or not any(outlook.paces):
        return NoForecast.NOTHING_ENDED
    before = rate * math.exp(min(outlook.idle / SCALES[LAST_MINUTES], 500.0))
    if outlook.idle > STANDSTILL and before * outlook.idle > EXPECTED and not outlook.later:
        return NoForecast.STANDSTILL
    return None


def _what_is_missing(outlook: Outlook, unknown: NoForecast) -> str:
    """What would have to happen before anybody can tell."""
    match unknown:
        case NoForecast.NOT_SEALED:
            return "The batch is not sealed: more may be added, so it has no end yet."
        case NoForecast.CANARY if outlook.held is None:
            return "Only the canary of the batch runs: the rest waits until all of it has completed."
        case NoForecast.CANARY:
            return "The canary of the batch holds it: nothing starts until the batch is resumed."
        case NoForecast.BUDGET:
            return "The failure budget of the batch holds it: nothing starts until the batch is resumed."
        case NoForecast.HELD:
            return "The batch is held: nothing starts until it is resumed."
        case NoForecast.PAUSED:
            paused = [around.domain for around in outlook.everywhere if _is_paused(around)]
            one = f"Domain {paused[0]!r} is paused: nothing starts there until it is resumed."
            several = f"Domains {_listed(paused)} are paused: nothing starts there until they are resumed."
            return one if len(paused) == 1 else several
        case NoForecast.NO_WORKER:
            unserved = [around.domain for around in outlook.everywhere if not around.workers]
            return f"No worker serves domain{'s' if len(unserved) > 1 else ''} {_listed(unserved)}: start one."
        case NoForecast.IN_TROUBLESHOOTING:
            return f"Only {_commands(outlook.parked, 'is', 'are')} left, in troubleshooting: a person has to decide."
        case NoForecast.NO_HANDLER:
            return f"{_commands(outlook.no_handler, 'has', 'have')} a type that no worker had a handler for."
        case NoForecast.NOTHING_ENDED:
            return "Nothing has run to an end yet, so the pace is not known."
        case NoForecast.STANDSTILL:
            return f"Nothing has ended for {span(timedelta(seconds=outlook.idle))}: it stands still."


# -- what would change it ----------------------------------------------------------------------------------------------


def _changes(outlook: Outlook, takes: timedelta, expires: bool) -> Iterator[str]:
    """What the end depends on now, in sentences. The rest `takes` that long, or `expires` before it has started."""
    if expires and outlook.expires is not None:
        yield (
            f"The batch expires {_in(outlook.expires)}: what has not started by then is canceled."
            if outlook.expires > 0
            else "The batch has expired: what has not started is canceled by the next sweep."
        )
    due = _in(outlook.last_retry)
    limiting = [
        said for around in outlook.everywhere for said in _limiting(outlook, around, None if expires else takes)
    ]
    yield from limiting
    if not limiting and outlook.running and outlook.running >= outlook.left - outlook.later:
        yield f"{_commands(outlook.running, 'runs', 'run')}, and no other is ready: more workers would change nothing."
    if outlook.retries:
        yield f"{_commands(outlook.retries, 'has', 'have')} failed and will be tried again, the last {due}."
    if outlook.planned:
        last = _in(outlook.last_planned)
        yield f"{_commands(outlook.planned, 'has', 'have')} a run_at that has not come, the last {last}."
    if outlook.parked:
        yield (
            f"{_commands(outlook.parked, 'waits', 'wait')} for a person in troubleshooting: the batch is not done "
            "before somebody decides."
        )


def _limiting(outlook: Outlook, around: Around, takes: timedelta | None) -> Iterator[str]:
    """What keeps commands that are ready in a domain from starting: a limit, or busy slots."""
    if not outlook.ready or not around.waits:
        return
    if around.rate_limited and around.limit is not None and around.allowed is not None:
        yield (
            f"Rate limit {around.limit} allows {per_second(around.allowed, 'call')}: a higher one would end the "
            "batch sooner, more workers would not."
        )
    elif around.limited and around.limit is not None and around.allowed is not None:
        each = " of one key" if around.by_key else ""
        yield (
            f"Concurrency limit {around.limit} allows {counted(int(around.allowed), f'call{each}', f'calls{each}')} "
            "at a time: a higher one would end the batch sooner, more workers would not."
        )
    elif around.busy >= BUSY * around.slots:
        yield from _busy_slots(outlook, around, takes)


def _busy_slots(outlook: Outlook, around: Around, takes: timedelta | None) -> Iterator[str]:
    """`takes` is None if the end is that of the time for it."""
    workers, others = around.workers, around.busy - outlook.running
    sooner = "more of the batch could start in time"
    if takes is not None:
        sooner = f"the batch could be done in {span(takes * workers / (workers + 1))} instead of {span(takes)}"
    serve = f"{counted(workers, 'worker')} with {counted(around.slots, 'slot')} serve{'s' if workers == 1 else ''}"
    yield (
        f"{serve} domain {around.domain!r}, and all slots are busy: with one more worker like "
        f"{'it' if workers == 1 else 'these'} {sooner}."
    )
    if others > (1 - BUSY) * around.busy:
        yield f"{_commands(others, 'is', 'are')} of others: when they have ended, this batch goes faster."


def _commands(count: int, one: str, several: str) -> str:
    return counted(count, f"command {one}", f"commands {several}")


def _is_paused(around: Around) -> bool:
    return around.paused and around.waits


def _listed(domains: Sequence[str]) -> str:
    return " and ".join(map(repr, domains))


def _in(seconds: float) -> str:
    return f"in {span(timedelta(seconds=seconds))}"
