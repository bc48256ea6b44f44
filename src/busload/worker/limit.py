"""Calls as often as a receiver allows, by all workers together."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import psycopg

from busload.domain.execution import Leased
from busload.domain.rate import Adapted, RateLimit
from busload.errors import RateLimited
from busload.handlers import Handler
from busload.store import rate
from busload.store.connection import AsyncConnection
from busload.store.outage import Outage
from busload.store.plan import perform_async
from busload.store.pool import AsyncPool
from busload.store.rate import AHEAD, Ask, Grant, Key, Late
from busload.worker.coalescer import Coalescer
from busload.worker.held import Held
from busload.worker.loop import Loop

log = logging.getLogger("busload")

PATIENCE = 5.0
"""Seconds that a call may hold its slot while it waits for its turn."""

SHORTEST, LONGEST = 0.25, 3600.0
"""Seconds that a call is postponed for. What waits for longer looks again then: limits change."""

MOST_ASKED = 10_000
"""Calls that one line asks for at once."""

MOST_LINES = 1000
"""Limits that a worker remembers though nobody waits for them."""

HELD_UP = 1.0
"""A call that waits for longer than these seconds was held up."""

LONGEST_REST = 4.0
"""Seconds in which a domain is left alone at most: those who wait for their turn in a slot are gone by then."""

POSTPONED_PER_SECOND, SHORTEST_REST = 100, 0.25
"""Where calls are postponed at once, so many commands a second go by, in at most four claims: others may be behind."""

LOCKED_AGAIN = 1.0
"""Seconds after which a limit is asked again whose row somebody has locked."""

LATE, MOST_LATE = 0.05, 0.05
"""A call may begin so much of its period after its turn, or so many seconds if that is less: a loop has other work.
Where turns are rare, it is that part of the time between two of them."""

FORGET_EVERY = 3600.0


class Postponed(Exception):
    """It would have to wait for longer than a slot is worth: try again in `seconds`, without burning an attempt."""

    def __init__(self, limit: str, seconds: float) -> None:
        super().__init__(f"Limit {limit} lets it go in {seconds:.1f} s.")
        self.limit, self.seconds = limit, seconds


@dataclass(frozen=True, slots=True)
class Entered:
    """Under which limit a call was let go, when, and until when it may begin."""

    key: Key
    at: float
    until: float

    def refuse_late(self) -> None:
        """For whoever begins the call after another wait, such as one for a thread."""
        if time.monotonic() > self.until:
            raise Postponed(self.key[0], SHORTEST)


class Limiter:
    """Lets calls go at the rate of their limit. Callers check `handler.rate_limit is not None` before they ask.

    All calls that wait here are asked for in one statement, one at a time; none holds a lock or a connection meanwhile.
    """

    def __init__(self, pool: AsyncPool, held: Held, deadline: timedelta, outage: Outage) -> None:
        self._pool = pool
        self._postponement = Postponement(pool, held, deadline, outage)
        self._lines: dict[Key, _Line] = {}
        self._clock = _Clock()
        self._sitting: set[_Caller] = set()
        self._expelled: Collection[str] = ()
        self._forgot = time.monotonic()
        self.loop = Loop("Limiting", self.once, outage)
        self.rests = Rests()
        self.asks = 0
        """Statements so far."""

    async def enter(
        self, handler: Handler, domain: str, command_type: str, subject: object, *, patient: bool = False
    ) -> Entered:
        """Return when the call may be made: at once, or after seconds in which the slot is held.

        `subject` is what the handler gets (a Command, Group or Chunk), for `by`, which may raise anything: that is the
        failure of this command, group or chunk alone. Raises `Postponed` if it would take too long; with `patient`,
        nothing takes too long, and only a pause of the domain or the end of the worker cuts it short.
        """
        limit = handler.rate_limit
        assert limit is not None
        if patient:
            self._refuse_expelled(domain)
        key = _key(limit, domain, command_type, subject)
        while True:
            line = self._line(key, limit)
            caller = line.join(domain, patient=patient)
            self.loop.wake()
            try:
                await caller.go
            except asyncio.CancelledError:
                line.leave(caller)
                raise
            now = time.monotonic()
            if now <= caller.begin_until:
                return Entered(key, now, caller.begin_until)
            # The process stood still or its loop was blocked: others have had their turns since, so this one is over.

    def _line(self, key: Key, limit: RateLimit) -> _Line:
        line = self._lines.get(key)
        if line is None:
            self._forget_idle_lines()
            line = self._lines[key] = _Line(key[0], limit, self.rests)
        return line

    async def refused(
        self,
        handler: Handler,
        domain: str,
        command_type: str,
        subject: object,
        error: RateLimited,
        entered: Entered | None = None,
    ) -> Postponed:
        """The receiver has refused a call that entered then: everybody waits. Returns when to try this one again.

        Also for handlers that have no limit: then only this one waits.
        """
        limit = handler.rate_limit
        if limit is None:
            after = HELD_UP if error.after is None else min(error.after, LONGEST)
            return Postponed(f"{domain}/{command_type}", after)
        key = entered.key if entered is not None else _key(limit, domain, command_type, subject)
        after = min(_pause(limit) if error.after is None else error.after, LONGEST)
        ago = None if entered is None else time.monotonic() - entered.at
        try:
            async with self._pool.connection() as conn:
                after = await perform_async(conn, rate.refuse(key, limit, after, ago))
        except psycopg.Error as failed:
            log.warning("Could not tell the others that %s refuses calls: %s", key[0], failed)
        self._stand_back(key)
        self.rests.postponed(domain)
        return Postponed(key[0], min(after, LONGEST))

    async def sit_out(self, domain: str, refused: Postponed) -> None:
        """Wait in the slot until what was refused may be tried again; `Postponed` as from a patient `enter`."""
        self._refuse_expelled(domain)
        loop = asyncio.get_running_loop()
        caller = _Caller(domain, math.inf, loop.create_future())
        timer = loop.call_later(refused.seconds, _let, caller)
        self._sitting.add(caller)
        try:
            await caller.go
        finally:
            timer.cancel()
            self._sitting.discard(caller)

    async def postpone(self, leased: Iterable[Leased], postponed: Postponed) -> None:
        """These are not ours any more: they come back when their time has come, as the same attempt."""
        for one in leased:
            await self._postponement.put(one, postponed)

    async def close(self, deadline: timedelta) -> None:
        """Say what was postponed; what cannot be said in time is handed back with all else that this worker holds."""
        self.loop.stop()
        await self._postponement.close(deadline)

    @property
    def postponed(self) -> int:
        """How often a command was put off so far."""
        return self._postponement.postponed

    def hear(self, payload: str | None) -> None:
        """Somebody was refused under this limit, or nobody knows: what was let go and has not begun asks again."""
        try:
            name, subject = json.loads(payload or "")
        except (ValueError, TypeError):
            self._stand_back(None)
        else:
            self._stand_back((name, subject))

    def expel(self, domains: Collection[str]) -> None:
        """Nothing of these domains is to start here; of those that were named before, it may again."""
        self._expelled = frozenset(domains)
        for line in self._lines.values():
            line.expel(domains)
        for caller in self._sitting:
            if caller.domain in domains and not caller.go.done():
                caller.go.set_exception(Postponed(caller.domain, SHORTEST))

    async def once(self) -> float | None:
        """Ask for those who wait; returns how long the others can."""
        now = time.monotonic()
        busy = [line for line in self._lines.values() if line.waiting]
        for line in busy:
            line.lose_patience(now)
        due = {key: line for key, line in self._lines.items() if line.waiting and line.ask_at <= now}
        if due:
            self.asks += 1
            async with self._pool.connection() as conn:
                asked = time.monotonic()
                grants = await _ask(conn, due)
                answered = time.monotonic()
                for key, line in due.items():
                    if (grant := grants.get(key)) is not None:
                        line.let_go(grant, self._clock.here(grant.at, asked, answered))
                    else:
                        line.lock_out()
                if now - self._forgot > FORGET_EVERY:
                    self._forgot = now
                    await perform_async(conn, rate.forget())
        looks = [line.next_look for line in busy if line.waiting]
        return max(0.0, min(looks) - time.monotonic()) if looks else None

    def _refuse_expelled(self, domain: str) -> None:
        if domain in self._expelled:
            raise Postponed(domain, SHORTEST)

    def _stand_back(self, key: Key | None) -> None:
        for one, line in self._lines.items():
            if key is None or one == key:
                line.stand_back()
        self.loop.wake()

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
    """The database's clock, read on ours: by the quickest answer so far, so that a slow one moves nothing."""

    def __init__(self) -> None:
        self._apart = math.inf

    def here(self, at: float, asked: float, answered: float) -> float:
        """When it was that time there: after we asked, and before we had the answer."""
        self._apart = min(self._apart, answered - at)
        if at + self._apart < asked:  # their clock was set back, or runs slower than ours
            self._apart = answered - at
        return at + self._apart


class _Line:
    """Those of one worker who wait for one limit, first come first served."""

    def __init__(self, name: str, limit: RateLimit, rests: Rests) -> None:
        self._name, self._limit, self._rests = name, limit, rests
        self.waiting: deque[_Caller] = deque()
        self._let_go: deque[_Caller] = deque()
        self.ask_at = 0.0
        self._next_at, self._every = 0.0, 0.0
        self._round = -1
        self._adapted: Adapted | None = None
        self._pressed = 0
        self._asked_before_refusal = False
        self.locked = False

    @property
    def idle(self) -> bool:
        return not self.waiting and not self._let_go

    @property
    def next_look(self) -> float:
        return min(self.ask_at, min(caller.patient_until for caller in self.waiting))

    def join(self, domain: str, *, patient: bool) -> _Caller:
        now = time.monotonic()
        caller = _Caller(domain, math.inf if patient else now + PATIENCE, asyncio.get_running_loop().create_future())
        self.waiting.append(caller)
        if self.ask_at > now:  # then it is known how long this will take
            self._tell(caller, len(self.waiting) - 1, now)
            if caller.go.done():
                self.waiting.pop()
        return caller

    def leave(self, caller: _Caller) -> None:
        if caller.timer is not None:
            caller.timer.cancel()
        for line in (self.waiting, self._let_go):
            if caller in line:
                line.remove(caller)

    def ask(self) -> Ask:
        self._asked_before_refusal = False
        grown = self._adapted.grown(self._pressed) if self._adapted is not None else None
        self._pressed = 0
        return Ask(self._limit, min(len(self.waiting), MOST_ASKED), self._round, self._adapted, grown)

    def let_go(self, grant: Grant, since: float) -> None:
        """The first ones have their time; of the others, those go whose time would come too late.

        `since` is when it was granted: turns that have passed by now are lost, and whoever waited for one asks again.
        """
        self.locked = False
        if self._asked_before_refusal:
            return  # who knows whether this is from before or after; the next answer is not
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
                self._let_go.append(caller)
            else:
                _let(caller)
        # Half of what was let go ahead may be used up before more is asked for, so that asking is worth its round trip.
        self.ask_at = self._next_at - AHEAD / 2 if self.waiting or grant.next > AHEAD else 0.0
        for position, caller in enumerate(self.waiting):
            self._tell(caller, position, now)
        self.waiting = deque(caller for caller in self.waiting if not caller.go.done())

    def lock_out(self) -> None:
        """Nobody can say anything about this limit for now."""
        self.locked, self.ask_at = True, time.monotonic() + LOCKED_AGAIN

    def stand_back(self) -> None:
        for caller in self._let_go:
            if caller.timer is not None:
                caller.timer.cancel()
        self.waiting.extendleft(reversed(self._let_go))
        self._let_go.clear()
        self._asked_before_refusal = True
        self.ask_at = 0.0

    def lose_patience(self, now: float) -> None:
        for caller in self.waiting:
            if caller.patient_until <= now:
                self._postpone(caller, max(self._next_at - now, 0.0))
        self.waiting = deque(caller for caller in self.waiting if not caller.go.done())

    def expel(self, domains: Collection[str]) -> None:
        for caller in [*self.waiting, *self._let_go]:
            if caller.domain in domains:
                self.leave(caller)
                self._postpone(caller, 0.0)

    def _tell(self, caller: _Caller, position: int, now: float) -> None:
        wait = self._next_at + position * self._every - now
        if now + wait > caller.patient_until:
            self._postpone(caller, wait)
        elif wait > HELD_UP and not caller.held_up:
            caller.held_up = True
            self._rests.waits(caller.domain, wait - HELD_UP)

    def _go(self, caller: _Caller) -> None:
        if caller in self._let_go:
            self._let_go.remove(caller)
        _let(caller)

    def _postpone(self, caller: _Caller, seconds: float) -> None:
        if not caller.go.done():
            if not caller.held_up:
                self._rests.postponed(caller.domain)
            # In quarters of a second: neighbours that come back together are one load.
            rounded = math.ceil(min(max(seconds, SHORTEST), LONGEST) * 4) / 4
            caller.go.set_exception(Postponed(self._name, rounded))


class Rests:
    """Domains that bring mostly what limits hold up: left alone for a while, or a backlog would go round in circles."""

    def __init__(self) -> None:
        self._brought: Counter[str] = Counter()
        self._held_up: Counter[str] = Counter()
        self._until: dict[str, float] = {}
        self._used = False

    def __bool__(self) -> bool:
        return self._used

    def claimed(self, leased: Iterable[Leased]) -> None:
        """What a claim has brought; what the one before has brought does not count any more."""
        for domain, count in Counter(one.lease.domain for one in leased).items():
            self._brought[domain], self._held_up[domain] = count, 0
            self._until.pop(domain, None)

    def waits(self, domain: str, seconds: float) -> None:
        """One more call of this domain holds its slot for so long: more of them would find no turn any sooner."""
        self._rest(domain, min(seconds, LONGEST_REST))

    def postponed(self, domain: str) -> None:
        """One more call of this domain has gone back at once."""
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


class Postponement:
    """Commands on their way back to wait for a limit: many in one statement, kept until it is known to have worked."""

    def __init__(self, pool: AsyncPool, held: Held, deadline: timedelta, outage: Outage) -> None:
        self._pool, self._held, self._deadline = pool, held, deadline
        self._late: Coalescer[tuple[Leased, Postponed]] = Coalescer(
            self._flush,
            max_size=1000,
            max_interval=timedelta(milliseconds=10),
            capacity=20_000,
            name="postponement",
            outage=outage,
        )
        self.postponed = 0

    async def put(self, leased: Leased, postponed: Postponed) -> None:
        await self._late.put((leased, postponed))
        leased.lease.running -= 1

    async def close(self, deadline: timedelta) -> None:
        await self._late.close(deadline)

    async def _flush(self, late: Sequence[tuple[Leased, Postponed]]) -> None:
        rows = [Late(leased.lease, leased.id, postponed.seconds, postponed.limit) for leased, postponed in late]
        async with asyncio.timeout(self._deadline.total_seconds()), self._pool.connection() as conn:
            await perform_async(conn, rate.postpone(rows))
        self.postponed += len(rows)
        self._held.settled(leased for leased, _ in late)


async def _ask(conn: AsyncConnection, due: Mapping[Key, _Line]) -> dict[Key, Grant]:
    """Whoever locks the row of one limit must not hold up the others: those are asked without it."""
    asks = {key: line.ask() for key, line in due.items()}
    if not any(line.locked for line in due.values()):
        try:
            return await perform_async(conn, rate.ask(asks))
        except psycopg.errors.LockNotAvailable:
            log.warning("Somebody has locked the row of a rate limit; calls under it wait until it is free")
    return await perform_async(conn, rate.ask(asks, skip_locked=True))


def _let(caller: _Caller) -> None:
    if not caller.go.done():
        caller.go.set_result(None)


def _key(limit: RateLimit, domain: str, command_type: str, subject: object) -> Key:
    return limit.name or f"{domain}/{command_type}", limit.subject_of(subject)


def _pause(limit: RateLimit) -> float:
    """Where the receiver does not say how long: a period. An adaptive limit is cut, so a part of one will do."""
    return limit.per.total_seconds() / (10 if limit.adaptive else 1)
