"""Lets calls go as often as a receiver allows, all workers together."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import psycopg

from busload.commands.execution import Leased
from busload.errors import RateLimitedError
from busload.limits import rate
from busload.limits.rate import AHEAD, Adapted, Ask, Grant, Key, RateLimit
from busload.postgres.connection import AsyncConnection
from busload.postgres.plan import perform_async
from busload.postgres.pool import AsyncPool
from busload.postgres.waiting import Event, TimeLimit

log = logging.getLogger("busload")

SHORTEST, LONGEST = 0.25, 3600.0
"""Seconds that a call is postponed for. After the longest time it asks again, because limits change."""

MOST_ASKED = 10_000
"""Calls that a line asks for at once, at most."""

MOST_LINES = 1000
"""Limits without waiting calls that a worker remembers, at most."""

HELD_UP = 1.0
"""Seconds after which a call that waits counts as held up by its limit."""

LOCKED_AGAIN = 1.0
"""Seconds until a limit is asked again after somebody had locked its row."""

LATE, MOST_LATE = 0.05, 0.05
"""How late a call may begin after its turn, because the event loop has other work: this share of the period, but no
more than so many seconds. If turns are rare, this share of the time between two turns."""

FORGET_EVERY = 3600.0

LONGEST_REST = 4.0
"""Seconds for which a domain rests, at most: calls that wait for their turn in a slot have left it by then."""

POSTPONED_PER_SECOND, SHORTEST_REST = 100, 0.25
"""While calls are postponed at once, claim so many commands a second, in four claims at most: others may be behind."""


class PostponedError(Exception):
    """The call would hold its slot for too long: try again in `seconds`, without burning an attempt."""

    def __init__(self, limit: str | None, seconds: float) -> None:
        super().__init__(f"Limit {limit} lets it go in {seconds:.1f} s.")
        self.limit, self.seconds = limit, seconds


class SnoozedError(PostponedError):
    """The handler itself has put its command off."""

    def __init__(self, seconds: float) -> None:
        super().__init__(None, seconds)


class TurnPassedError(PostponedError):
    """The call had its turn and could not begin in time: it needs another turn."""


class LimitedError(PostponedError):
    """The call has no permit. Its commands wait for one in the database already."""

    def __init__(self, limit: str) -> None:
        super().__init__(limit, SHORTEST)


class PermitLostError(PostponedError):
    """Somebody else may have the permit of the call, because this worker was silent for too long."""

    def __init__(self, limit: str) -> None:
        super().__init__(limit, SHORTEST)


@dataclass(frozen=True, slots=True)
class Entered:
    """The turn of a call: under which limit, since when, and until when the call may begin."""

    key: Key
    at: float
    until: float

    def refuse_late(self) -> None:
        """Raise `TurnPassedError` if the turn has passed, for example while the call waited for a thread."""
        if time.monotonic() > self.until:
            raise TurnPassedError(self.key[0], SHORTEST)


class RestingDomains:
    """Which domains rest. Without a rest, a worker would claim and postpone the same backlog again and again."""

    def __init__(self) -> None:
        self._brought: Counter[str] = Counter()
        self._held_up: Counter[str] = Counter()
        self._until: dict[str, float] = {}
        self._used = False

    def __bool__(self) -> bool:
        return self._used

    def claimed(self, leased: Iterable[Leased]) -> None:
        """A claim has brought these. What the claim before brought does not count any more."""
        for domain, count in Counter(one.lease.domain for one in leased).items():
            self._brought[domain], self._held_up[domain] = count, 0
            self._until.pop(domain, None)

    def waits(self, domain: str, seconds: float) -> None:
        """One more call of this domain holds its slot for so many seconds."""
        self._rest(domain, min(seconds, LONGEST_REST))

    def postponed(self, domain: str) -> None:
        """One more call of this domain was postponed at once."""
        self._rest(domain, min(max(self._brought[domain] / POSTPONED_PER_SECOND, SHORTEST_REST), LONGEST_REST))

    def _rest(self, domain: str, seconds: float) -> None:
        self._used = True
        self._held_up[domain] += 1
        self._until[domain] = max(time.monotonic() + seconds, self._until.get(domain, 0.0))

    def resting(self) -> dict[str, float]:
        """Which domains to leave alone, and for how many seconds."""
        now = time.monotonic()
        self._until = {domain: until for domain, until in self._until.items() if until > now}
        return {
            domain: until - now
            for domain, until in self._until.items()
            if 2 * self._held_up[domain] > self._brought[domain]
        }


class Limiter:
    """Lets calls go at the rate of their limit.

    One statement asks for the turns of all calls that wait here. While a call waits it holds no lock and no connection,
    but its slot, for `patience` seconds at most.
    """

    def __init__(self, pool: AsyncPool, patience: float) -> None:
        self._pool, self._patience = pool, patience
        self._lines: dict[Key, _Line] = {}
        self._clock = _Clock()
        self._refused_domains: Collection[str] = ()
        self._domains_changed = Event()
        self._forgot = time.monotonic()
        self.due = Event()
        """Set when `once` has something to ask for."""
        self.rests = RestingDomains()

    async def enter(
        self, limit: RateLimit, domain: str, command_type: str, subject: object, *, patient: bool = False
    ) -> Entered:
        """Wait until the call may be made: no time at all, or seconds in which the slot is held.

        `subject` is what the handler gets (a Command, Group or Chunk), for `by`, which may raise anything: that is the
        failure of this command, group or chunk alone. Raises `PostponedError` if it would take too long; with
        `patient`, nothing takes too long, and only a pause of the domain or the end of the worker cuts it short.
        """
        if patient:
            self._check_domain(domain)
        key = _key(limit, domain, command_type, subject)
        while True:
            if (line := self._lines.get(key)) is None:
                self._forget_idle_lines()
                line = self._lines[key] = _Line(key[0], limit, self.rests)
            caller = line.join(domain, math.inf if patient else self._patience)
            self.due.set()
            try:
                await caller.go
            except asyncio.CancelledError:
                line.leave(caller)
                raise
            now = time.monotonic()
            if now <= caller.begin_until:
                return Entered(key, now, caller.begin_until)
            # The event loop was blocked, and the turn has passed: ask for another one.

    async def refused(
        self,
        limit: RateLimit | None,
        domain: str,
        command_type: str,
        subject: object,
        error: RateLimitedError,
        entered: Entered | None = None,
    ) -> PostponedError:
        """The receiver has refused a call: all calls under this limit wait. Return when to try this call again.

        If its handler has no limit, only this call waits.
        """
        if limit is None:
            after = HELD_UP if error.after is None else min(error.after, LONGEST)
            return PostponedError(f"{domain}/{command_type}", after)
        key = entered.key if entered is not None else _key(limit, domain, command_type, subject)
        after = min(_pause(limit) if error.after is None else error.after, LONGEST)
        ago = None if entered is None else time.monotonic() - entered.at
        try:
            async with self._pool.connection() as conn:
                after = await perform_async(conn, rate.refuse(key, limit, after, ago))
        except psycopg.Error as failed:
            log.warning("Could not tell the others that %s refuses calls: %s", key[0], failed)
        self._ask_again(key)
        self.rests.postponed(domain)
        return PostponedError(key[0], min(after, LONGEST))

    async def wait_out(self, domain: str, refused: PostponedError) -> None:
        """Wait in the slot until what was refused may be tried again; `PostponedError` as from a patient `enter`."""
        self._check_domain(domain)
        time_limit = TimeLimit(refused.seconds)
        while await self._domains_changed.wait(time_limit.left):
            self._check_domain(domain)

    def hear(self, payload: str | None) -> None:
        """A receiver has refused calls under this limit, or under any: calls that have not begun ask again."""
        try:
            name, subject = json.loads(payload or "")
        except (ValueError, TypeError):
            self._ask_again(None)
        else:
            self._ask_again((name, subject))

    def refuse_domains(self, domains: Collection[str]) -> None:
        """Let no call of these domains start here. Domains that were refused before may start calls again."""
        self._refused_domains = frozenset(domains)
        for line in self._lines.values():
            line.refuse_domains(domains)
        changed, self._domains_changed = self._domains_changed, Event()
        changed.set()

    async def once(self) -> float | None:
        """Ask for the calls that wait; return the seconds until the next time."""
        now = time.monotonic()
        busy = [line for line in self._lines.values() if line.waiting]
        for line in busy:
            line.lose_patience(now)
        due = {key: line for key, line in self._lines.items() if line.waiting and line.ask_at <= now}
        if due:
            async with self._pool.connection() as conn:
                asked = time.monotonic()
                grants = await _ask(conn, due)
                answered = time.monotonic()
                for key, line in due.items():
                    if (grant := grants.get(key)) is not None:
                        line.give_turns(grant, self._clock.here(grant.at, asked, answered))
                    else:
                        line.ask_later()
                if now - self._forgot > FORGET_EVERY:
                    self._forgot = now
                    await perform_async(conn, rate.forget())
        looks = [line.next_look for line in busy if line.waiting]
        return max(0.0, min(looks) - time.monotonic()) if looks else None

    def _check_domain(self, domain: str) -> None:
        if domain in self._refused_domains:
            raise PostponedError(domain, SHORTEST)

    def _ask_again(self, key: Key | None) -> None:
        for one, line in self._lines.items():
            if key is None or one == key:
                line.ask_again()
        self.due.set()

    def _forget_idle_lines(self) -> None:
        if len(self._lines) >= MOST_LINES:
            self._lines = {key: line for key, line in self._lines.items() if not line.idle}


@dataclass(slots=True, eq=False)
class _Caller:
    domain: str
    patient_until: float
    go: asyncio.Future[None]
    begin_until: float = math.inf
    timer: asyncio.TimerHandle | None = None
    held_up: bool = False


class _Clock:
    """Converts times of the database to our clock, by the quickest answer so far: a slow answer says less."""

    def __init__(self) -> None:
        self._apart = math.inf

    def here(self, at: float, asked: float, answered: float) -> float:
        """The time `at` of the database on our clock: between the moments at which we asked and were answered."""
        self._apart = min(self._apart, answered - at)
        if at + self._apart < asked:  # their clock was set back, or runs slower than ours
            self._apart = answered - at
        return at + self._apart


class _Line:
    """Calls of one worker that wait for one limit, first come first served."""

    def __init__(self, name: str, limit: RateLimit, rests: RestingDomains) -> None:
        self._name, self._limit, self._rests = name, limit, rests
        self.waiting: deque[_Caller] = deque()
        self._granted: deque[_Caller] = deque()
        self.ask_at = 0.0
        self._next_at, self._every = 0.0, 0.0
        self._round = -1
        self._adapted: Adapted | None = None
        self._pressed = 0
        self._asked_before_refusal = False
        self.locked = False

    @property
    def idle(self) -> bool:
        return not self.waiting and not self._granted

    @property
    def next_look(self) -> float:
        return min(self.ask_at, min(caller.patient_until for caller in self.waiting))

    def join(self, domain: str, patience: float) -> _Caller:
        now = time.monotonic()
        caller = _Caller(domain, now + patience, asyncio.get_running_loop().create_future())
        self.waiting.append(caller)
        if self.ask_at > now:  # then it is known how long the call will wait
            self._check_wait(caller, len(self.waiting) - 1, now)
            if caller.go.done():
                self.waiting.pop()
        return caller

    def leave(self, caller: _Caller) -> None:
        if caller.timer is not None:
            caller.timer.cancel()
        for line in (self.waiting, self._granted):
            if caller in line:
                line.remove(caller)

    def ask(self) -> Ask:
        self._asked_before_refusal = False
        grown = self._adapted.grown(self._pressed) if self._adapted is not None else None
        self._pressed = 0
        return Ask(self._limit, min(len(self.waiting), MOST_ASKED), self._round, self._adapted, grown)

    def give_turns(self, grant: Grant, since: float) -> None:
        """Give the first calls their turns; postpone calls whose turn would come too late.

        `since` is when the turns were granted. Turns that have passed by now are lost; their calls ask again.
        """
        self.locked = False
        if self._asked_before_refusal:
            return  # this answer may be from before the refusal; the next one is not
        loop, now = asyncio.get_running_loop(), time.monotonic()
        self._every, self._next_at = grant.every, since + grant.next
        self._round, self._adapted = grant.round, grant.adapted if self._limit.adaptive else None
        late = max(LATE * grant.every, min(LATE * self._limit.per.total_seconds(), MOST_LATE))
        for position in range(min(grant.calls, len(self.waiting))):
            turn = since + max(grant.first + position * grant.every, 0.0)
            if turn + late < now:
                continue
            caller = self.waiting.popleft()
            caller.begin_until = turn + late
            if turn > now:
                self._pressed += 1
                caller.timer = loop.call_later(turn - now, self._go, caller)
                self._granted.append(caller)
            else:
                _begin(caller)
        # Half of the granted turns may be used up before more are asked for, so that asking is worth its round trip.
        self.ask_at = self._next_at - AHEAD / 2 if self.waiting or grant.next > AHEAD else 0.0
        for position, caller in enumerate(self.waiting):
            self._check_wait(caller, position, now)
        self.waiting = deque(caller for caller in self.waiting if not caller.go.done())

    def ask_later(self) -> None:
        """Somebody has locked the row of this limit: ask again later."""
        self.locked, self.ask_at = True, time.monotonic() + LOCKED_AGAIN

    def ask_again(self) -> None:
        for caller in self._granted:
            if caller.timer is not None:
                caller.timer.cancel()
        self.waiting.extendleft(reversed(self._granted))
        self._granted.clear()
        self._asked_before_refusal = True
        self.ask_at = 0.0

    def lose_patience(self, now: float) -> None:
        for caller in self.waiting:
            if caller.patient_until <= now:
                self._postpone(caller, max(self._next_at - now, 0.0))
        self.waiting = deque(caller for caller in self.waiting if not caller.go.done())

    def refuse_domains(self, domains: Collection[str]) -> None:
        for caller in [*self.waiting, *self._granted]:
            if caller.domain in domains:
                self.leave(caller)
                self._postpone(caller, 0.0)

    def _check_wait(self, caller: _Caller, position: int, now: float) -> None:
        """Postpone a call that would wait for too long. Otherwise, note if it will be held up."""
        wait = self._next_at + position * self._every - now
        if now + wait > caller.patient_until:
            self._postpone(caller, wait)
        elif wait > HELD_UP and not caller.held_up:
            caller.held_up = True
            self._rests.waits(caller.domain, wait - HELD_UP)

    def _go(self, caller: _Caller) -> None:
        if caller in self._granted:
            self._granted.remove(caller)
        _begin(caller)

    def _postpone(self, caller: _Caller, seconds: float) -> None:
        if not caller.go.done():
            if not caller.held_up:
                self._rests.postponed(caller.domain)
            # In quarters of a second, so that neighbours come back together, as one load.
            rounded = math.ceil(min(max(seconds, SHORTEST), LONGEST) * 4) / 4
            caller.go.set_exception(PostponedError(self._name, rounded))


async def _ask(conn: AsyncConnection, due: Mapping[Key, _Line]) -> dict[Key, Grant]:
    """Ask for turns. If somebody has locked the row of a limit, ask for the other limits without it."""
    asks = {key: line.ask() for key, line in due.items()}
    if not any(line.locked for line in due.values()):
        try:
            return await perform_async(conn, rate.ask(asks))
        except psycopg.errors.LockNotAvailable:
            log.warning("Somebody has locked the row of a rate limit; calls under it wait until it is free")
    return await perform_async(conn, rate.ask(asks, skip_locked=True))


def _begin(caller: _Caller) -> None:
    if not caller.go.done():
        caller.go.set_result(None)


def _key(limit: RateLimit, domain: str, command_type: str, subject: object) -> Key:
    return limit.name or f"{domain}/{command_type}", limit.subject_of(subject)


def _pause(limit: RateLimit) -> float:
    """Seconds to wait if the receiver does not say: a period, or a tenth of it if the limit lowers its rate itself."""
    return limit.per.total_seconds() / (10 if limit.adaptive else 1)
