"""Commands for a bulk handler: gathered into chunks as they are claimed, run by one call, settled one by one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from uuid import UUID

from busload.bus import CommandBus
from busload.domain.bulk import Chunk, Item, Judgement
from busload.domain.execution import (
    Failed,
    Leased,
    Stopped,
    Transition,
    Unreadable,
    complete,
    decide,
    deciding,
    describe,
)
from busload.domain.payload import PayloadLimits, Undecodable
from busload.errors import RateLimited, Superseded, TransientCommandError
from busload.handlers import Gathering, Handler, Handlers
from busload.store import settle
from busload.store.plan import Plan
from busload.store.pool import AsyncPool
from busload.worker.calls import Call, Calls, command_of, failure, find_bad, isolates
from busload.worker.context import ChunkContext, SyncChunkContext
from busload.worker.failures import FailureLog
from busload.worker.limit import Limiter, Postponed
from busload.worker.settle import Settlement
from busload.worker.threads import Threads

log = logging.getLogger("busload")

AHEAD = 2
"""How many chunks of commands are held at most that do not run yet, whatever their keys."""

Key: TypeAlias = tuple[str, str, object, UUID | None]
"""Domain, type, what `by` has found, and the lease of a suspect: it must not be mixed with others."""

Failure: TypeAlias = Failed | Stopped | Unreadable


class _Place:
    """What the line asks of a lease: a chunk has many, and each may be lost alone."""

    __slots__ = ("claimed", "domain", "lost")

    def __init__(self, domain: str) -> None:
        self.domain, self.claimed, self.lost = domain, 0.0, False


class Gathered:
    """A chunk on its way to a slot; the line takes it for one command."""

    def __init__(self, key: Key, handler: Handler, gathering: Gathering) -> None:
        self.lease = _Place(key[0])
        self.command_type, self.key = key[1], key
        self.handler, self.gathering = handler, gathering
        self.leased: list[Leased] = []
        self.bytes = 0
        self.started = 0.0
        self.timer: asyncio.TimerHandle | None = None

    @property
    def execution_id(self) -> UUID:
        """Of one of its commands, for the log."""
        return self.leased[0].execution_id

    def has_room_for(self, weight: int) -> bool:
        most = self.gathering.max_bytes
        return len(self.leased) < self.gathering.size and (
            not self.leased or most is None or self.bytes + weight <= most
        )

    def add(self, one: Leased, weight: int) -> None:
        self.leased.append(one)
        self.bytes += weight

    @property
    def full(self) -> bool:
        most = self.gathering.max_bytes
        return len(self.leased) >= self.gathering.size or (most is not None and self.bytes >= most)


class Gatherer:
    """Holds what was claimed for bulk handlers until a chunk is full, or its first command has waited `max_wait`.

    Of a domain it holds two chunks' worth at most, whatever the keys. When no more may come, the fullest one leaves.
    """

    def __init__(
        self,
        handlers: Handlers,
        into_line: Callable[[Sequence[Gathered]], None],
        on_room: Callable[[], None],
        failures: FailureLog,
    ) -> None:
        self._handlers, self._into_line, self._on_room, self._failures = handlers, into_line, on_room, failures
        self._open: dict[Key, Gathered] = {}
        self._in_line: Counter[str] = Counter()
        self._held: Counter[str] = Counter()
        self._stuck: set[str] = set()

    @property
    def held(self) -> int:
        """Commands that were claimed and do not run yet."""
        return self._held.total()

    @property
    def gathered(self) -> Iterator[Leased]:
        """What waits for company."""
        return (one for gathered in self._open.values() for one in gathered.leased)

    def gathers(self, domain: str, command_type: str) -> bool:
        handler = self._handlers.find(domain, command_type)
        return handler is not None and handler.gathering is not None

    def only_gathers(self, domain: str) -> bool:
        """Whether every handler of a domain is a bulk handler: a claim there cannot bring too many of other kinds."""
        handlers = self._handlers.of_domain(domain)
        return bool(handlers) and all(handler.gathering is not None for handler in handlers)

    def room(self, domain: str) -> int | None:
        """How many more commands of a domain to claim, none if it is hardly worth it; None if it gathers nothing."""
        sizes = [h.gathering.size for h in self._handlers.of_domain(domain) if h.gathering is not None]
        if not sizes:
            return None
        largest = max(sizes)
        room = AHEAD * largest - self._held[domain]
        if domain in self._stuck:
            return 0
        if 4 * room >= largest:
            return room
        if not self._in_line[domain]:
            self._send_fullest(domain)
        return 0

    def take(self, leased: Iterable[Leased]) -> list[Transition]:
        """Gather these; returns the results of those that fail alone, as nobody can tell where they belong."""
        refused: list[Transition] = []
        suspects: list[Key] = []
        for one in leased:
            handler = self._handlers.find(one.lease.domain, one.command_type)
            assert handler is not None
            assert handler.gathering is not None
            try:
                key = _key(one, handler.gathering)
                self._gather(one, key, handler, handler.gathering)
            except Undecodable as error:
                refused.append(self._ended(one, Unreadable(error), handler))
            except BaseException as error:  # of `by`, or of a key that cannot be compared; also a SystemExit
                refused.append(self._ended(one, failure(one, error), handler))
            else:
                if one.lease.crashes:
                    suspects.append(key)
        for key in suspects:
            if key in self._open:
                self._leave(key)  # a suspect waits for nobody
        return refused

    def alone(self, one: Leased, handler: Handler) -> Gathered:
        """A chunk of one command that did not come through here."""
        assert handler.gathering is not None
        gathered = Gathered((one.lease.domain, one.command_type, None, None), handler, handler.gathering)
        gathered.add(one, 0)
        self._held[one.lease.domain] += 1
        self._in_line[one.lease.domain] += 1
        return gathered

    def flush(self) -> bool:
        """Let everything leave that was gathered; returns whether there was anything."""
        keys = list(self._open)
        for key in keys:
            self._leave(key)
        return bool(keys)

    def started(self, gathered: Gathered) -> None:
        """It has its slot: there is room for more."""
        self._let_go(gathered)
        self._on_room()

    def abandon(self, domains: Collection[str] | None = None) -> list[Leased]:
        """Gather these no more, and return them: they are to be handed back. None: of all domains."""
        found = [key for key in self._open if domains is None or key[0] in domains]
        return [one for key in found for one in self._drop(key)]

    def unpack(self, line: Iterable[Leased | Gathered]) -> list[Leased]:
        """Commands that stood in line, those of chunks too, which are none any more."""
        unpacked: list[Leased] = []
        for one in line:
            if isinstance(one, Gathered):
                self._let_go(one)
                unpacked += one.leased
            else:
                unpacked.append(one)
        return unpacked

    def stuck(self, domain: str) -> None:
        """Its chunks waited too long for a slot: claim no more before there is one."""
        self._stuck.add(domain)

    def slot_is_free(self) -> None:
        self._stuck.clear()

    def _ended(self, one: Leased, outcome: Failure, handler: Handler) -> Transition:
        transition = _ended(one, outcome, handler)
        self._failures.tell(transition, outcome.error)
        return transition

    def _gather(self, one: Leased, key: Key, handler: Handler, gathering: Gathering) -> None:
        weight = len(one.data.encode()) if one.data is not None and gathering.max_bytes is not None else 0
        gathered = self._open.get(key)
        if gathered is not None and not gathered.has_room_for(weight):
            self._leave(key)
            gathered = None
        if gathered is None:
            gathered = self._open[key] = Gathered(key, handler, gathering)
            wait = max(0.0, one.lease.claimed + gathering.max_wait - time.monotonic())
            gathered.timer = asyncio.get_running_loop().call_later(wait, self._leave, key)
        gathered.add(one, weight)
        self._held[key[0]] += 1
        if gathered.full:
            self._leave(key)

    def _leave(self, key: Key) -> None:
        gathered = self._open.pop(key)
        if gathered.timer is not None:
            gathered.timer.cancel()
        gathered.lease.claimed = time.monotonic()
        self._in_line[key[0]] += 1
        self._into_line([gathered])

    def _drop(self, key: Key) -> list[Leased]:
        gathered = self._open.pop(key)
        if gathered.timer is not None:
            gathered.timer.cancel()
        self._held[key[0]] -= len(gathered.leased)
        return gathered.leased

    def _let_go(self, gathered: Gathered) -> None:
        self._held[gathered.lease.domain] -= len(gathered.leased)
        self._in_line[gathered.lease.domain] -= 1

    def _send_fullest(self, domain: str) -> None:
        mine = [gathered for key, gathered in self._open.items() if key[0] == domain]
        if mine:
            self._leave(max(mine, key=lambda gathered: len(gathered.leased)).key)


@dataclass(frozen=True, slots=True)
class Settled:
    """What a handler's own transaction has settled."""

    transitions: list[Transition]


class ChunkRunner:
    """Runs chunks: one call each, or several small ones to find the command that spoils it."""

    def __init__(
        self,
        bus: CommandBus,
        calls: Calls,
        transactions: AsyncPool,
        threads: Threads,
        limiter: Limiter,
        settlement: Settlement,
        gatherer: Gatherer,
        failures: FailureLog,
        postpone: Callable[[Sequence[Leased], Postponed], Awaitable[None]],
    ) -> None:
        self._bus, self._calls, self._transactions, self._threads = bus, calls, transactions, threads
        self._limiter, self._settlement, self._gatherer = limiter, settlement, gatherer
        self._failures, self._postpone = failures, postpone

    async def run(self, gathered: Gathered) -> None:
        self._gatherer.started(gathered)
        run = _Run(self, gathered)
        try:
            await run.all()
        except Exception as error:  # ours, not the handler's: no command of the chunk may hang
            log.exception("Could not say how a chunk of %s ended", gathered.command_type)
            await run.fail_rest(TransientCommandError(f"The outcome could not be told: {type(error).__name__}."))


class _Run:
    """One chunk at work."""

    def __init__(self, runner: ChunkRunner, gathered: Gathered) -> None:
        self._runner, self._gathered, self._handler = runner, gathered, gathered.handler
        self._limits = runner._bus.settings.limits.payload
        self._settlement = runner._settlement
        self._leased = {one.command_id: one for one in gathered.leased if not one.lease.lost}
        """What has no result yet."""
        self._postponed: Postponed | None = None
        """Until when items wait that the receiver has refused."""
        self._cut_short: Postponed | None = None
        """The search for bad ones was: by a pause, or as the worker stops."""
        self._errors: dict[UUID, BaseException | None] = {}
        """What commands have failed by, for the log."""
        self._described: dict[int, str] = {}
        """What was said about an error, by its identity: one may be that of every command of the chunk."""
        self._began(self._leased.values())

    async def all(self) -> None:
        items = await self._items()
        if not items:
            return
        attempt = max(one.lease.round_attempt for one in self._leased.values())
        try:
            call = await self._call(items)
        except Postponed as postponed:
            await self._put_off(items, postponed)
            return
        except Exception as error:  # of the limit's own `by`
            await self.fail_rest(error)
            return
        failed, overdue = call.judgement.failed, call.overdue
        if isolates(self._handler, call, attempt):
            failed, overdue = await find_bad(failed, self._try)
        if self._cut_short is not None:
            await self._put_off([item for item, _ in failed], self._cut_short)
        else:
            await self._fail(failed)
        if overdue is not None:
            log.warning(
                "A handler of %s outlived its %s s; its slot is taken until it returns",
                self._gathered.command_type,
                self._handler.timeout,
            )
            await asyncio.wait({overdue})

    async def fail_rest(self, error: BaseException) -> None:
        await self._put([self._ended(one, failure(one, error)) for one in self._leased.values()])

    async def _items(self) -> list[Item]:
        """What can be decoded; the rest waits for a person, each alone."""
        items: list[Item] = []
        for one in list(self._leased.values()):
            try:
                command = command_of(one)
            except Undecodable as error:
                await self._put([self._ended(one, Unreadable(error))])
            else:
                items.append(Item(one.command_id, command.data, command.task_key, command.created_at, command))
        return items

    async def _try(self, items: list[Item]) -> Call | None:
        """Call with a part, however long its turn takes; None if there is no point in going on."""
        try:
            while items := self._ours(items):
                call = await self._call(items, patient=True)
                if call.judgement.answered or call.refusal is None or self._postponed is None:
                    return call
                if self._handler.rate_limit is None:  # else the next turn comes after the pause
                    await self._runner._limiter.sit_out(self._gathered.lease.domain, self._postponed)
        except Postponed as postponed:
            self._cut_short = postponed
        return None

    async def _call(self, items: list[Item], *, patient: bool = False) -> Call:
        """One call, with those that it has done settled."""
        runner, gathered, handler = self._runner, self._gathered, self._handler
        chunk = Chunk(gathered.lease.domain, gathered.command_type, items, gathered.key[2])
        entered = None
        if handler.rate_limit is not None:
            entered = await runner._limiter.enter(handler, chunk.domain, chunk.command_type, chunk, patient=patient)
            ours = self._ours(items)
            if not ours:
                return Call(Judgement([], [], {}, answered=True))
            if len(ours) < len(items):
                items, chunk = ours, Chunk(chunk.domain, chunk.command_type, ours, chunk.key)
            if not patient:
                self._began(self._leased[item.id] for item in items)
        about = (handler, chunk.domain, chunk.command_type, chunk)
        try:
            late = None if entered is None else entered.refuse_late
            call = await runner._calls.call(handler, chunk, self._context(items), self._end, late)
        except Superseded as superseded:
            # Nothing of it was written. Some of its commands run elsewhere now, and the others are tried again.
            error = TransientCommandError(str(superseded), code="SUPERSEDED")
            return Call(Judgement([], [(item, error) for item in items], {}, answered=True))
        if call.refusal is not None:
            self._postponed = await runner._limiter.refused(*about, call.refusal, entered)
        if call.ended is not None:
            for transition in call.ended.transitions:
                self._leased.pop(transition.leased.command_id, None)
                self._settlement.settled_elsewhere(transition.leased, transition.outcome)
            self._log(call.ended.transitions)
        else:
            await self._put(self._completed(call.judgement, call.value))
        return call

    def _context(self, items: list[Item]) -> ChunkContext | SyncChunkContext:
        leased = [self._leased[item.id] for item in items]
        if self._handler.is_async:
            return ChunkContext(leased, self._runner._bus, self._runner._transactions)
        return self._runner._threads.context(leased, SyncChunkContext)

    def _end(self, judgement: Judgement, value: Any) -> Plan[Settled]:
        """Settle what the handler's transaction ends, in that transaction: all of it, or nothing is committed."""
        transitions = self._completed(judgement, value)
        failed = [self._failed(item, error) for item, error in judgement.failed if not self._waits(item, error)]
        now = time.monotonic()
        ended = transitions + failed
        for transition in ended:
            transition.finished = now
        credited = (yield from settle.settle(ended, now=now)) if ended else set()
        if len(credited) < len(ended):
            raise Superseded("Another worker has some of these commands now; what the handler wrote was rolled back.")
        return Settled(ended)

    def _completed(self, judgement: Judgement, value: Any) -> list[Transition]:
        if not judgement.done:
            return []
        leased = [self._leased[item.id] for item in judgement.done]
        shared = complete(leased[0], value, self._limits)
        transitions = []
        for item, one in zip(judgement.done, leased, strict=True):
            if item.id in judgement.results:
                transitions.append(complete(one, judgement.results[item.id], self._limits))
            else:
                transitions.append(Transition(one, shared.outcome, shared.details, reason=shared.reason))
        return transitions

    def _failed(self, item: Item, error: BaseException) -> Transition:
        one = self._leased[item.id]
        return self._ended(one, failure(one, error))

    def _ended(self, one: Leased, outcome: Failure) -> Transition:
        error = self._errors[one.command_id] = outcome.error  # kept alive, so that no other gets its identity
        if error is not None and id(error) not in self._described:
            self._described[id(error)] = describe(error)
        return _ended(one, outcome, self._handler, None if error is None else self._described[id(error)])

    async def _fail(self, failed: Sequence[tuple[Item, BaseException]]) -> None:
        failed = [(item, error) for item, error in failed if item.id in self._leased]  # else a transaction has done it
        late = [item for item, error in failed if self._waits(item, error)]
        await self._put([self._failed(item, error) for item, error in failed if not self._waits(item, error)])
        if self._postponed is not None:
            await self._put_off(late, self._postponed)

    def _waits(self, item: Item, error: BaseException) -> bool:
        """Whether this one is only put off. Not in a canceled batch: there it has stopped, as it was asked to."""
        return isinstance(deciding(error), RateLimited) and not self._leased[item.id].lease.canceled

    def _ours(self, items: Sequence[Item]) -> list[Item]:
        """Without those that another worker has now."""
        for item in items:
            if item.id in self._leased and self._leased[item.id].lease.lost:
                del self._leased[item.id]
        return [item for item in items if item.id in self._leased]

    @staticmethod
    def _began(leased: Iterable[Leased]) -> None:
        """The time of their attempt begins, after that in which they waited for a limit."""
        now = time.monotonic()
        for one in leased:
            one.started = now

    async def _put_off(self, items: Sequence[Item], postponed: Postponed) -> None:
        leased = [self._leased.pop(item.id) for item in items if item.id in self._leased]
        if leased:
            await self._runner._postpone(leased, postponed)

    async def _put(self, transitions: Sequence[Transition]) -> None:
        now = time.monotonic()
        for transition in transitions:
            transition.finished = now
            self._leased.pop(transition.leased.command_id, None)
        await self._settlement.put_many(transitions)
        self._log(transitions)

    def _log(self, transitions: Iterable[Transition]) -> None:
        for transition in transitions:
            if transition.leased.command_id in self._errors:
                self._runner._failures.tell(transition, self._errors[transition.leased.command_id])
            elif transition.reason is not None:
                self._runner._failures.tell_result(transition)


def _key(one: Leased, gathering: Gathering) -> Key:
    found = None if gathering.by is None else gathering.by(command_of(one))
    hash(found)  # what cannot be a key is refused here, and not later
    return one.lease.domain, one.command_type, found, one.lease.lease_id if one.lease.crashes else None


def _ended(one: Leased, outcome: Failure, handler: Handler, described: str | None = None) -> Transition:
    """The result of one that did not succeed."""
    one.started = one.started or time.monotonic()
    transition = decide(one, outcome, handler.retry, PayloadLimits(), described)
    transition.finished = time.monotonic()
    return transition
