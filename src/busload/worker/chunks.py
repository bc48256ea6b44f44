"""Chunks of commands for bulk handlers: gathered as commands are claimed, and run with one call for all of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from uuid import UUID

from busload.commands import settle
from busload.commands.bulk_items import Chunk, Item, Judgement
from busload.commands.data_type import DataInvalidError
from busload.commands.execution import (
    Leased,
    Transition,
    Unreadable,
    complete,
    deciding,
    describe,
    failure,
)
from busload.commands.payload import UndecodableError
from busload.errors import RateLimitedError, SupersededError, TransientCommandError
from busload.handlers.registry import Gathering, Handler, Handlers
from busload.limits.limiter import PostponedError
from busload.postgres.plan import Plan
from busload.worker.bulk_run import BulkCall, BulkRun, Stations
from busload.worker.call_handler import command_of, outlast
from busload.worker.failure_log import FailureLog
from busload.worker.line import Claimed, Gathered, Key, Line, commands_of
from busload.worker.settlement import Failure, end_failed

log = logging.getLogger("busload")

AHEAD = 2
"""How many chunks of a domain may wait for a slot, whatever their keys."""


class Gatherer:
    """Holds what was claimed for bulk handlers until a chunk is full, or its first command has waited `max_wait`.

    Of a domain it holds two chunks' worth at most, whatever the keys. When no more may come, the fullest one leaves.
    """

    def __init__(self, handlers: Handlers, line: Line, failures: FailureLog) -> None:
        self._handlers, self._line, self._failures = handlers, line, failures
        self._open: dict[Key, Gathered] = {}
        self._in_line: Counter[str] = Counter()
        self._held: Counter[str] = Counter()
        self._stuck: set[str] = set()

    @property
    def gathered(self) -> Iterator[Leased]:
        """Commands that wait until their chunk is full."""
        return (one for gathered in self._open.values() for one in gathered.leased)

    @property
    def has_chunks_in_line(self) -> bool:
        return any(self._in_line.values())

    def only_gathers(self, domain: str) -> bool:
        """Whether every handler of a domain is a bulk handler: a claim there cannot bring too many of other kinds."""
        handlers = self._handlers.of_domain(domain)
        return bool(handlers) and all(handler.gathering is not None for handler in handlers)

    def room(self, domain: str) -> int | None:
        """How many more commands of a domain to claim; 0 if it is not worth a claim; None without a bulk handler."""
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

    def take(self, leased: Iterable[Leased]) -> tuple[list[Leased], list[Transition]]:
        """Gather what bulk handlers run. Returns the other commands, and the results of those that fail at once.

        A command fails at once if its chunk cannot be determined.
        """
        others: list[Leased] = []
        refused: list[Transition] = []
        suspects: list[Key] = []
        for one in leased:
            handler = self._handlers.find(one.lease.domain, one.command_type)
            if handler is None or handler.gathering is None:
                others.append(one)
                continue
            try:
                key = _key(one, handler.gathering)
                self._gather(one, key, handler, handler.gathering)
            except UndecodableError as error:
                refused.append(self._ended(one, Unreadable(error), handler))
            except BaseException as error:  # of `by`, or of a key that cannot be compared; also a SystemExit
                refused.append(self._ended(one, failure(one, error), handler))
            else:
                if one.lease.crashes:
                    suspects.append(key)
        for key in suspects:
            if key in self._open:
                self._leave(key)  # a suspect waits for nobody
        return others, refused

    def flush(self) -> bool:
        """Send every chunk to the line, full or not; return whether there was any."""
        keys = list(self._open)
        for key in keys:
            self._leave(key)
        return bool(keys)

    def started(self, gathered: Gathered) -> None:
        """A chunk has its slot: there is room for more."""
        self._let_go(gathered)
        self._line.on_low()

    def abandon(
        self, domains: Collection[str] | None = None, *, batches: Collection[UUID] | None = None
    ) -> list[Leased]:
        """Drop what was gathered of these domains or batches, or all, and return it: it has to be handed back."""
        found = [
            self._close(key)
            for key, gathered in list(self._open.items())
            if (domains is None or key[0] in domains)
            and (batches is None or any(one.lease.batch_id in batches for one in gathered.leased))
        ]
        for gathered in found:
            self._held[gathered.key[0]] -= len(gathered.leased)
        return [one for gathered in found for one in gathered.leased]

    def unpack(self, items: Collection[Claimed]) -> list[Leased]:
        """The commands of what stood in line; their chunks are dissolved."""
        for item in items:
            if isinstance(item, Gathered):
                self._let_go(item)
        return [one for item in items for one in commands_of(item)]

    def stuck(self, domain: str) -> None:
        """Chunks of this domain waited too long for a slot: claim no more until a slot is free."""
        self._stuck.add(domain)

    def slot_is_free(self) -> None:
        self._stuck.clear()

    def _ended(self, one: Leased, outcome: Failure, handler: Handler) -> Transition:
        transition = end_failed(one, outcome, handler)
        self._failures.report(transition, outcome.error)
        return transition

    def _gather(self, one: Leased, key: Key, handler: Handler, gathering: Gathering) -> None:
        weight = len(one.data.encode()) if one.data is not None and gathering.max_bytes is not None else 0
        gathered = self._open.get(key)
        if gathered is not None and not gathered.has_room_for(weight):
            self._leave(key)
            gathered = None
        if gathered is None:
            wait = max(0.0, one.lease.claimed + gathering.max_wait - time.monotonic())
            timer = asyncio.get_running_loop().call_later(wait, self._leave, key)
            gathered = self._open[key] = Gathered(key, handler, gathering, timer)
        gathered.add(one, weight)
        self._held[key[0]] += 1
        if gathered.full:
            self._leave(key)

    def _close(self, key: Key) -> Gathered:
        gathered = self._open.pop(key)
        gathered.timer.cancel()
        return gathered

    def _leave(self, key: Key) -> None:
        gathered = self._close(key)
        gathered.in_line_since = time.monotonic()
        self._in_line[key[0]] += 1
        self._line.add([gathered])

    def _let_go(self, gathered: Gathered) -> None:
        self._held[gathered.key[0]] -= len(gathered.leased)
        self._in_line[gathered.key[0]] -= 1

    def _send_fullest(self, domain: str) -> None:
        mine = [gathered for key, gathered in self._open.items() if key[0] == domain]
        if mine:
            self._leave(max(mine, key=lambda gathered: len(gathered.leased)).key)


async def run_chunk(stations: Stations, gathered: Gathered) -> None:
    """Run a chunk: one call, or several with parts of it, to find the bad commands."""
    run = _ChunkRun(stations, gathered)
    try:
        await run.run()
    except Exception as error:  # ours, not the handler's: no command of the chunk may hang
        log.exception("Could not record how a chunk of %s ended", gathered.key[1])
        await run.fail_rest(TransientCommandError(f"The outcome could not be recorded: {type(error).__name__}."))
    finally:
        run.leave()


class _ChunkRun(BulkRun):
    def __init__(self, stations: Stations, gathered: Gathered) -> None:
        domain, command_type, self._common, _ = gathered.key
        super().__init__(stations, gathered.handler, domain, command_type)
        self._outcomes, self._failures = stations.outcomes, stations.shared.failures
        self._limits = stations.shared.bus.settings.limits.payload
        self._leased = {one.command_id: one for one in gathered.leased if not one.lease.lost}
        """Commands without a result yet."""
        self._errors: dict[UUID, BaseException | None] = {}
        """By which error a command has failed, for the log."""
        self._described: dict[int, str] = {}
        """Errors as text, by identity: all commands of a chunk may share one error."""

    async def run(self) -> None:
        items = await self._items()
        if not items:
            return
        attempt = max(one.lease.round_attempt for one in self._leased.values())
        try:
            call = await self._call(items, patient=False)
        except PostponedError as postponed:
            await self._postpone(items, postponed)
            return
        except Exception as error:  # of the limit's own `by`
            await self.fail_rest(error)
            return
        judgement, overdue = await self._find_bad(call, attempt)
        if self._cut_short is not None:
            await self._postpone([item for item, _ in judgement.failed], self._cut_short)
        else:
            await self._fail(judgement.failed)
        if overdue is not None:
            await outlast(overdue, self._handler, self._kind[1])

    async def fail_rest(self, error: BaseException) -> None:
        await self._put([self._ended(one, failure(one, error)) for one in self._leased.values()])

    async def _items(self) -> list[Item]:
        """The commands that can be decoded and whose data fits. Each of the others waits for a person."""
        items: list[Item] = []
        data_type = self._handler.data_type
        for one in list(self._leased.values()):
            try:
                command = command_of(one)
                if data_type is not None:
                    command.data = data_type.convert(command.data)
            except UndecodableError as error:
                await self._put([self._ended(one, Unreadable(error))])
            except DataInvalidError as invalid:
                await self._put([self._ended(one, failure(one, invalid.permanent()))])
            else:
                items.append(Item(one.command_id, command.data, command.task_key, command.created_at, command))
        return items

    async def _call_part(self, items: list[Item]) -> BulkCall | None:
        ours = self._ours(items)
        return await self._call(ours, patient=True) if ours else None

    async def _call(self, items: list[Item], *, patient: bool) -> BulkCall:
        """Make one call, and settle the commands that it has done."""
        chunk = Chunk(*self._kind, items, self._common)
        entered = await self._enter(chunk, [self._leased[item.id] for item in items], patient=patient)
        if (entered is not None or self._permit is not None) and len(ours := self._ours(items)) < len(items):
            if not ours:
                return BulkCall(Judgement([], [], {}, answered=True))
            items, chunk = ours, Chunk(*self._kind, ours, self._common)
        leased = [self._leased[item.id] for item in items]
        if not patient:  # the time of the attempt begins after that in which it waited
            now = time.monotonic()
            for one in leased:
                one.started = now
        context = self._shared.chunk_context(self._handler, leased)
        try:
            call = await self._make_call(chunk, context, leased, self._end, entered)
        except SupersededError as superseded:
            # Nothing of it was written. Some of its commands run elsewhere now, and the others are tried again.
            error = TransientCommandError(str(superseded), code="SUPERSEDED")
            return BulkCall(Judgement([], [(item, error) for item in items], {}, answered=True))
        if call.ended is not None:
            [transitions] = call.ended
            await self._settlement.look_for_holds(transitions)
            for transition in transitions:
                self._leased.pop(transition.leased.command_id, None)
                self._settlement.settled_elsewhere(transition)
            self._report(transitions)
        else:
            await self._put(self._completed(call))
        return call

    def _end(self, call: BulkCall) -> Plan[tuple[list[Transition]]]:
        """Settle in the handler's own transaction: all that the call has ended, or nothing is committed."""
        failed = call.judgement.failed
        ended = self._completed(call)
        ended += [self._failed(item, error) for item, error in failed if not self._waits(item, error)]
        now = time.monotonic()
        for transition in ended:
            transition.finished = now
        credited = (yield from settle.settle(ended, now=now)) if ended else set()
        if len(credited) < len(ended):
            raise SupersededError("Another worker has some of these commands now. What the handler wrote was undone.")
        return (ended,)  # true even if nothing has ended: a transaction without an answer is rolled back

    def _completed(self, call: BulkCall) -> list[Transition]:
        judgement = call.judgement
        if not judgement.done:
            return []
        leased = [self._leased[item.id] for item in judgement.done]
        shared = complete(leased[0], call.value, self._limits)
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
        error = self._errors[one.command_id] = outcome.error  # kept alive, so that no other error gets its identity
        if error is not None and id(error) not in self._described:
            self._described[id(error)] = describe(error)
        return end_failed(one, outcome, self._handler, None if error is None else self._described[id(error)])

    async def _fail(self, failed: Sequence[tuple[Item, BaseException]]) -> None:
        failed = [one for one in failed if one[0].id in self._leased]  # else a transaction has settled it
        late = [item for item, error in failed if self._waits(item, error)]
        await self._put([self._failed(item, error) for item, error in failed if not self._waits(item, error)])
        if self._postponed is not None:
            await self._postpone(late, self._postponed)

    def _waits(self, item: Item, error: BaseException) -> bool:
        """Whether the item is only put off. In a canceled batch it is not: there it has stopped, as it was asked to."""
        return isinstance(deciding(error), RateLimitedError) and not self._leased[item.id].canceled

    def _ours(self, items: Sequence[Item]) -> list[Item]:
        """Without those that another worker has now."""
        for item in items:
            if item.id in self._leased and self._leased[item.id].lease.lost:
                del self._leased[item.id]
        return [item for item in items if item.id in self._leased]

    async def _postpone(self, items: Sequence[Item], postponed: PostponedError) -> None:
        leased = [self._leased.pop(item.id) for item in items if item.id in self._leased]
        if leased:
            await self._outcomes.postpone(leased, postponed)

    async def _put(self, transitions: Sequence[Transition]) -> None:
        now = time.monotonic()
        for transition in transitions:
            transition.finished = now
            self._leased.pop(transition.leased.command_id, None)
        await self._settlement.put_many(transitions)
        self._report(transitions)

    def _report(self, transitions: Iterable[Transition]) -> None:
        for transition in transitions:
            if transition.leased.command_id in self._errors:
                self._failures.report(transition, self._errors[transition.leased.command_id])
            elif transition.reason is not None:
                self._failures.report_result(transition)


def _key(one: Leased, gathering: Gathering) -> Key:
    found = None if gathering.by is None else gathering.by(command_of(one))
    hash(found)  # what cannot be a key is refused here, and not later
    return one.lease.domain, one.command_type, found, one.lease.lease_id if one.lease.crashes else None
