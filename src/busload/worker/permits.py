"""Permits of concurrency limits: which calls of this worker may begin, and which of its permits are free again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import msgspec
import psycopg

from busload.buffers.declaration import EXHAUSTED
from busload.commands.bulk_items import Chunk, Group
from busload.commands.execution import Leased, Transition, Unreadable, failure
from busload.commands.payload import UndecodableError
from busload.handlers.registry import Handler
from busload.limits import concurrency
from busload.limits.concurrency import ConcurrencyLimit, Ended, Granted, Held, Request, Singles
from busload.limits.limiter import Entered, LimitedError, PermitLostError
from busload.limits.order import Key
from busload.postgres.backoff import Backoff
from busload.postgres.plan import Plan
from busload.worker.call_handler import argument_of, command_of
from busload.worker.coalescer import Coalescer
from busload.worker.order import Order
from busload.worker.settlement import end_failed
from busload.worker.shared import Shared, clock

ASKING = "Asking for permits"

FREED_WITHIN = 0.005
"""Seconds that a permit that is free waits for others, to be given back together with them."""

FREED_TOGETHER = 1000
"""Permits that are given back without waiting for others."""

MADE_TWICE = 500
"""Characters of data up to which a command is made once for `by` and once more for its call.

To keep it would cost more: the garbage collector looks again and again at what lives for so long."""

_Kind: TypeAlias = tuple[Handler, ConcurrencyLimit, str]
"""A handler, its limit, and the name of the limit."""


class Permit(msgspec.Struct, eq=False, gc=False):  # it holds nothing that knows of it, and there are many
    """A call that may begin while its worker lives, as the database sees it."""

    granted: Granted
    nth: int
    """Its position among those that were granted together."""
    first: Leased
    """The first command of the call."""
    argument: Any = None
    """What a call with a single command gets, if it was kept since its `by` was asked for."""
    others: Sequence[Leased] = ()
    """The other commands of the call."""
    adopted_by: int = 0
    """The number for which the call counts, if its worker has a new one."""
    begun: bool = False
    freed: bool = False

    @property
    def name(self) -> str:
        return self.granted.name(self.nth)

    @property
    def number(self) -> int | None:
        return self.granted.numbers[self.nth]


class FirstInOrder(Permit):
    """The permit of a command that is the first of its key. It is not given back: the command stays the first."""


class Permits:
    """The permits that this worker holds.

    `hand_back` is called with commands that this worker will not run, `on_freed` after permits were given back.
    """

    def __init__(
        self, shared: Shared, hand_back: Callable[[Iterable[Leased]], None], on_freed: Callable[[], None]
    ) -> None:
        self._shared, self._hand_back, self._on_freed = shared, hand_back, on_freed
        self._of: dict[Leased, Permit] = {}
        """The permits of single commands."""
        self._of_calls: dict[int | None, Permit] = {}
        """The permits of calls with many items, by their numbers."""
        self._asked: list[float] = []
        """When the requests were sent that have no answer yet."""
        self._asking: list[list[Leased]] = []
        self._strange: set[Held] = set()
        self._first = Granted([""], [b""], [0])
        """What the permits of the last commands share that are the first of their keys."""
        self._closed = False
        self._free: list[Granted] = []
        """Where permits are free, and wait for others."""
        self._timer: asyncio.TimerHandle | None = None
        self._freeing: Coalescer[list[Ended]] = Coalescer(
            self._flush,
            max_size=10,
            max_interval=timedelta(0),
            capacity=1_000_000,
            name="permits",
            outage=shared.outage,
        )
        self.order = Order(shared, self._grant_first, self._refused, on_freed)

    @property
    def freeing(self) -> bool:
        """Whether permits are free, or keys wait for their next command, though the database does not know it yet."""
        return bool(self._free or self._freeing.stats.waiting or self.order.advancing)

    @property
    def asking(self) -> list[Leased]:
        """Single commands whose permits are asked for now."""
        return [one for leased in self._asking for one in leased]

    async def take(self, leased: list[Leased]) -> tuple[list[Leased], list[Transition]]:
        """Ask for the permits of single commands that were claimed.

        Returns those that may run, with those that need no permit, and the results of those whose `by` fails. All
        others wait in the database and are not ours any more.
        """
        asked = Singles()
        arguments: list[Any] = []
        refused: list[Transition] = []
        may_run: list[Leased] = []
        for (domain, command_type), some in _by_kind(leased):
            if (kind := self._kind(domain, command_type)) is None:
                may_run += some
                continue
            handler, limit, name = kind
            make = command_of if command_type != EXHAUSTED else argument_of
            subjects: list[str] = []
            taking: list[Leased] = []
            for one in some:
                try:
                    argument = make(one)
                    subject = limit.subject_of(argument)
                except BaseException as error:
                    refused.append(self._refused(one, error, handler))
                else:
                    taking.append(one)
                    subjects.append(subject)
                    arguments.append(argument if one.data is not None and len(one.data) > MADE_TWICE else None)
            asked.add(name, limit.calls, subjects, taking)
        if not arguments:
            return may_run, refused
        self._asking.append(asked.leased)
        try:
            granted = await self._ask(partial(concurrency.take_single, asked))
        finally:
            self._asking.remove(asked.leased)
        held, begin = self._of, asked.leased
        if all(granted.numbers):
            for nth, one, argument in zip(range(len(arguments)), asked.leased, arguments, strict=True):
                held[one] = Permit(granted, nth, one, argument)
        else:
            begin = []
            for nth, (one, argument) in enumerate(zip(asked.leased, arguments, strict=True)):
                if number := granted.numbers[nth]:
                    held[one] = Permit(granted, nth, one, argument)
                    begin.append(one)
                else:
                    self._not_granted([one], number)
        if not may_run:
            return begin, refused
        allowed = {*may_run, *begin}
        return [one for one in leased if one in allowed], refused

    async def enter(
        self, handler: Handler, domain: str, command_type: str, bulk: Chunk | Group, leased: Sequence[Leased]
    ) -> Permit:
        """Ask for the permit of a call with many items; `LimitedError` if its commands have to wait."""
        limit = handler.concurrency_limit
        assert limit is not None
        size = 1 if handler.gathering is None else handler.gathering.size
        name, commands = limit.name_for(domain, command_type), [(one.lease, one.id) for one in leased]
        subject, backoff = limit.subject_of(bulk), Backoff()
        request = Request(name, subject, limit.calls, commands, size)
        while True:
            try:
                granted = await self._ask(partial(concurrency.take, [request]))
            except psycopg.Error as error:  # it may have been granted all the same: `once` frees that permit
                if all(one.lease.lost for one in leased):
                    raise PermitLostError(name) from error
                pause = backoff.pause()
                self._shared.outage.failed(ASKING, error)
                await asyncio.sleep(pause)
                continue
            self._shared.outage.worked(ASKING, reached=True)
            if not (number := granted.numbers[0]):
                self._not_granted(leased, number)
                raise LimitedError(name)
            permit = self._of_calls[number] = Permit(granted, 0, leased[0], others=leased[1:])
            return permit

    def of(self, leased: Leased) -> Permit | None:
        """The permit of a single command; None if its handler has no limit."""
        return self._of.get(leased)

    def begin(self, permit: Permit) -> None:
        """A call begins now. `PermitLostError` if somebody else may have its permit: this process was frozen."""
        shared = self._shared
        # Nobody can have declared it dead if its last heartbeat is younger than a lease. That is asked first: a new
        # number comes before its first sign of life.
        alive = clock() - shared.renewed_at < shared.lease_seconds
        if not alive or permit.granted.worker != shared.number or permit.freed:
            raise PermitLostError(permit.name)
        permit.begun = True

    def begin_call(self, entered: Entered | None, permit: Permit | None) -> None:
        """Right before a call: raise a `PostponedError` if it must not begin."""
        if entered is not None:
            entered.refuse_late()
        if permit is not None:
            self.begin(permit)

    def free(self, permit: Permit) -> None:
        """The call has ended, or will not be made."""
        if permit.freed:
            return
        permit.freed = True
        if self._of.pop(permit.first, None) is None:
            self._of_calls.pop(permit.number, None)
        if type(permit) is FirstInOrder:
            self.order.left()
        else:
            self._give_back(permit.granted, permit.nth)

    def give_up(self, leased: Iterable[Leased]) -> None:
        """These commands are handed back: their calls will not be made."""
        if self._of:
            for one in leased:
                if (permit := self._of.get(one)) is not None:
                    self.free(permit)

    def lost(self, leased: Sequence[Leased]) -> None:
        """Others may have the permit of these: they are handed back."""
        self._hand_back(leased)

    async def once(self) -> float:
        """Free permits that nobody uses: their commands are not ours any more, or the answer to a request was lost."""
        for permit in self._permits():
            if not permit.begun and all(one.settled or one.lease.lost for one in (permit.first, *permit.others)):
                self.free(permit)
        gone = {one for one in self._of if one.settled or one.lease.lost}
        self.give_up(one for one in gone if isinstance(self._of[one], FirstInOrder) and not self._of[one].begun)
        self.order.forget_gone()
        await self._adopt()
        settings = self._shared.settings
        known = await self._shared.perform(
            concurrency.permits_of(self._shared.number, settled=settings.lease_for * 2 / 3)
        )
        mine = {permit.number for permit in self._permits()}
        strange = {held for held in known if held.permit not in mine}
        # An answer that is merely late is not lost; a request that was sent later cannot be the one.
        if all(clock() - sent_at < self._shared.lease_seconds / 3 for sent_at in self._asked):
            for held in strange & self._strange:
                self._give_back(held.alone(), 0)
        self._strange = strange
        return settings.sweep_every.total_seconds()

    async def close(self, deadline: timedelta) -> None:
        """Give back what is free. The permits of calls that still run are freed when this worker has stopped."""
        for permit in self._permits():
            if not permit.begun:
                self.free(permit)
        self._closed = True
        self._hand_over()
        await asyncio.gather(self._freeing.close(deadline), self.order.close(deadline))

    def _permits(self) -> list[Permit]:
        """The permits that this worker holds and has to give back."""
        return [*self._of_calls.values(), *(one for one in self._of.values() if type(one) is Permit)]

    def _give_back(self, granted: Granted, nth: int) -> None:
        """Tell the database that a permit is free, together with others."""
        if self._closed:  # others free it, as this worker has stopped
            return
        ended = granted.ended
        ended.append(nth)
        count = len(ended)
        if count == 1:
            self._free.append(granted)
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(FREED_WITHIN, self._hand_over)
        elif count == FREED_TOGETHER:
            self._hand_over()

    def _hand_over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._free:
            self._freeing.offer([(granted, granted.ended) for granted in self._free])
            for granted in self._free:
                granted.ended = []
            self._free = []

    async def _adopt(self) -> None:
        """If this worker has a new number, because it was declared dead, the calls that it still runs count again."""
        number = self._shared.number
        running = [one for one in self._permits() if one.begun and (one.adopted_by or one.granted.worker) != number]
        if running:
            calls = [(permit.granted, permit.nth, permit.first.id) for permit in running]
            await self._shared.perform(concurrency.adopt(calls, worker=number))
            for permit in running:
                permit.adopted_by = number
                permit.granted, permit.nth = permit.granted.alone(permit.nth), 0
                if permit.freed:  # it ended meanwhile
                    self._give_back(permit.granted, 0)

    def _kind(self, domain: str, command_type: str) -> _Kind | None:
        """What limits the commands of a type, one by one; None if nothing does."""
        handler = self._shared.bus.handlers.find(domain, command_type)
        if handler is None or (limit := handler.concurrency_limit) is None or handler.takes_many or limit.ordered:
            return None
        return handler, limit, limit.name_for(domain, command_type)

    async def _ask(self, take: Callable[..., Plan[Granted]]) -> Granted:
        sent_at = clock()
        self._asked.append(sent_at)
        try:
            return await self._shared.perform(take(worker=self._shared.number))
        finally:
            self._asked.remove(sent_at)

    def _not_granted(self, leased: Sequence[Leased], answer: int | None) -> None:
        """These commands wait in the database, or are not ours any more."""
        if answer is None:
            self._hand_back(leased)
            return
        for one in leased:
            one.lease.running -= 1
        self._shared.held.settled(leased)

    def _grant_first(self, one: Leased, key: Key, argument: Any, worker: int) -> None:
        """A command is the first of its key, and may run while this worker lives."""
        first = self._first
        if first.names[0] != key[0] or first.worker != worker:
            first = self._first = Granted([key[0]], [b""], [0], worker)
        self._of[one] = FirstInOrder(first, 0, one, argument)

    async def _flush(self, freed: Sequence[list[Ended]]) -> None:
        ended = freed[0]
        if len(freed) > 1:  # those of one answer may have come in several parts
            together: dict[Granted, list[int]] = {}
            for granted, nths in chain(*freed):
                together.setdefault(granted, []).extend(nths)
            ended = [*together.items()]
        async with asyncio.timeout(self._shared.settings.deadline.total_seconds()):
            await self._shared.perform(concurrency.free(ended))
        self._on_freed()

    def _refused(self, one: Leased, error: BaseException, handler: Handler) -> Transition:
        outcome = Unreadable(error) if isinstance(error, UndecodableError) else failure(one, error)
        transition = end_failed(one, outcome, handler)
        self._shared.failures.report(transition, outcome.error)
        return transition


def _by_kind(leased: Sequence[Leased]) -> Iterator[tuple[tuple[str, str], Sequence[Leased]]]:
    """Commands that follow each other and are alike in domain and type: most often all are."""
    start = 0
    while start < len(leased):
        domain, command_type = leased[start].lease.domain, leased[start].command_type
        for end in range(start + 1, len(leased)):
            one = leased[end]
            if one.command_type != command_type or one.lease.domain != domain:
                break
        else:
            end = len(leased)
        yield (domain, command_type), leased[start:end]
        start = end
