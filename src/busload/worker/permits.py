"""Permits of concurrency limits: which calls of this worker may begin, and which of its permits are free again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import msgspec
import psycopg

from busload.commands.bulk_items import Chunk, Group
from busload.commands.execution import Leased, Transition, Unreadable, failure
from busload.commands.payload import UndecodableError
from busload.handlers.registry import Handler
from busload.limits import concurrency
from busload.limits.concurrency import AnyPermit, ConcurrencyLimit, Held, Request, Singles
from busload.limits.limiter import Entered, LimitedError, PermitLostError
from busload.limits.order import Key
from busload.postgres.backoff import Backoff
from busload.postgres.plan import Plan
from busload.worker.call_handler import argument_of
from busload.worker.coalescer import Coalescer
from busload.worker.order import Order
from busload.worker.settlement import end_failed
from busload.worker.shared import Shared, clock

ASKING = "Asking for permits"

FREED_WITHIN = timedelta(milliseconds=5)
"""How long a permit that is free waits for others, to be given back together with them."""


_Kind: TypeAlias = tuple[Handler, ConcurrencyLimit, str]
"""A handler, its limit, and the name of the limit."""


class Permit(msgspec.Struct, eq=False):
    """A call that may begin while its worker lives, as the database sees it. `argument` is what a single one gets."""

    shared: Shared
    name: str
    subject: str
    permit: int
    leased: Sequence[Leased]
    argument: Any
    worker: int
    counted_for: int
    begun: bool = False
    freed: bool = False

    def begin(self) -> None:
        """The call begins now. `PermitLostError` if somebody else may have its permit: this process was frozen."""
        alive = self.shared.surely_alive  # asked first: a new number comes before its first sign of life
        if not alive or self.worker != self.shared.number or self.freed:
            raise PermitLostError(self.name)
        self.begun = True


class Place(Permit):
    """The place of a command that is the first of its key. It is not given back: it belongs to the command."""


def begin_call(entered: Entered | None, permit: Permit | None) -> None:
    """Right before a call: raise a `PostponedError` if it must not begin."""
    if entered is not None:
        entered.refuse_late()
    if permit is not None:
        permit.begin()


class Permits:
    """The permits that this worker holds.

    `hand_back` is called with commands that this worker will not run, `on_freed` after permits were given back.
    """

    def __init__(
        self, shared: Shared, hand_back: Callable[[Iterable[Leased]], None], on_freed: Callable[[], None]
    ) -> None:
        self._shared, self._hand_back, self._on_freed = shared, hand_back, on_freed
        self._held: dict[int, Permit] = {}
        self._of: dict[Leased, Permit] = {}
        self._asked: list[float] = []
        """When the requests were sent that have no answer yet."""
        self._asking: list[list[Leased]] = []
        self._strange: set[Held] = set()
        self._closed = False
        self._freed: Coalescer[AnyPermit] = Coalescer(
            self._flush,
            max_size=1000,
            max_interval=FREED_WITHIN,
            capacity=1_000_000,
            name="permits",
            outage=shared.outage,
        )
        self.order = Order(shared, self._place, self._refused, on_freed)

    @property
    def freeing(self) -> int:
        """Permits that are free, though the database does not know it yet."""
        return self._freed.stats.waiting + self.order.advancing

    @property
    def asking(self) -> list[Leased]:
        """Single commands whose permits are asked for now."""
        return [one for leased in self._asking for one in leased]

    async def take(self, leased: list[Leased]) -> tuple[list[Leased], list[Transition]]:
        """Ask for the permits of single commands that were claimed.

        Returns those that may run, with those that need no permit, and the results of those whose `by` fails. All
        others wait in the database and are not ours any more.
        """
        asked, arguments = Singles(), []
        refused: list[Transition] = []
        may_run: list[Leased] = []
        kinds: dict[tuple[str, str], _Kind | None] = {}
        for one in leased:
            kind_of = one.lease.domain, one.command_type
            try:
                kind = kinds[kind_of]
            except KeyError:
                kind = kinds[kind_of] = self._kind(*kind_of)
            if kind is None:
                may_run.append(one)
                continue
            handler, limit, name = kind
            try:
                argument = argument_of(one)
                subject = limit.subject_of(argument)
            except BaseException as error:
                refused.append(self._refused(one, error, handler))
            else:
                asked.add(name, subject, limit.calls, one)
                arguments.append(argument)
        if not arguments:
            return may_run, refused
        self._asking.append(asked.leased)
        try:
            answers, number = await self._ask(partial(concurrency.take_single, asked))
        finally:
            self._asking.remove(asked.leased)
        granted: list[Leased] = []
        columns = zip(asked.names, asked.subjects, asked.leased, arguments, answers, strict=True)
        for name, subject, one, argument, answer in columns:
            if answer:
                permit = Permit(self._shared, name, subject, answer, (one,), argument, number, number)
                self._held[answer] = self._of[one] = permit
                granted.append(one)
            else:
                self._not_granted([one], answer)
        if not may_run:
            return granted, refused
        allowed = {*may_run, *granted}
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
                [answer], number = await self._ask(partial(concurrency.take, [request]))
            except psycopg.Error as error:  # it may have been granted all the same: `once` frees that permit
                if all(one.lease.lost for one in leased):
                    raise PermitLostError(name) from error
                pause = backoff.pause()
                self._shared.outage.failed(ASKING, error)
                await asyncio.sleep(pause)
                continue
            self._shared.outage.worked(ASKING, reached=True)
            if not answer:
                self._not_granted(leased, answer)
                raise LimitedError(name)
            permit = Permit(self._shared, name, subject, answer, leased, None, number, number)
            self._held[answer] = permit
            return permit

    def of(self, leased: Leased) -> Permit | None:
        """The permit of a single command; None if its handler has no limit."""
        return self._of.get(leased)

    def free(self, permit: Permit) -> None:
        """The call has ended, or will not be made."""
        permit.freed = True
        if isinstance(permit, Place):
            for one in permit.leased:
                self._of.pop(one, None)
            self.order.left()
        elif self._held.pop(permit.permit, None) is not None:
            for one in permit.leased:
                self._of.pop(one, None)
            if not self._closed:  # else others free it, as this worker has stopped
                self._freed.offer(permit)

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
        for permit in list(self._held.values()):
            if not permit.begun and all(one.settled or one.lease.lost for one in permit.leased):
                self.free(permit)
        gone = {one for one in self._of if one.settled or one.lease.lost}
        self.give_up(one for one in gone if isinstance(self._of[one], Place) and not self._of[one].begun)
        self.order.forget_gone()
        await self._adopt()
        settings = self._shared.settings
        known = await self._shared.perform(
            concurrency.permits_of(self._shared.number, settled=settings.lease_for * 2 / 3)
        )
        strange = {held for held in known if held.permit not in self._held}
        # An answer that is merely late is not lost; a request that was sent later cannot be the one.
        if all(clock() - sent_at < self._shared.lease_seconds / 3 for sent_at in self._asked):
            for held in strange & self._strange:
                self._freed.offer(held)
        self._strange = strange
        return settings.sweep_every.total_seconds()

    async def close(self, deadline: timedelta) -> None:
        """Give back what is free. The permits of calls that still run are freed when this worker has stopped."""
        for permit in [permit for permit in self._held.values() if not permit.begun]:
            self.free(permit)
        self._closed = True
        await asyncio.gather(self._freed.close(deadline), self.order.close(deadline))

    async def _adopt(self) -> None:
        """If this worker has a new number, because it was declared dead, the calls that it still runs count again."""
        number = self._shared.number
        running = [permit for permit in self._held.values() if permit.begun and permit.counted_for != number]
        if running:
            calls: dict[AnyPermit, int] = {permit: permit.leased[0].id for permit in running}
            await self._shared.perform(concurrency.adopt(calls, worker=number))
            for permit in running:
                permit.counted_for = number
                if permit.permit not in self._held:  # it ended meanwhile
                    self._freed.offer(permit)

    def _kind(self, domain: str, command_type: str) -> _Kind | None:
        """What limits the commands of a type, one by one; None if nothing does."""
        handler = self._shared.bus.handlers.find(domain, command_type)
        if handler is None or (limit := handler.concurrency_limit) is None or handler.takes_many or limit.ordered:
            return None
        return handler, limit, limit.name_for(domain, command_type)

    async def _ask(self, take: Callable[..., Plan[list[int | None]]]) -> tuple[list[int | None], int]:
        """Ask for permits; returns the answers, and the number of this worker for which they are."""
        number, sent_at = self._shared.number, clock()
        self._asked.append(sent_at)
        try:
            return await self._shared.perform(take(worker=number)), number
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

    def _place(self, one: Leased, key: Key, argument: Any, worker: int) -> None:
        """A command is the first of its key, and may run while this worker lives."""
        self._of[one] = Place(self._shared, *key, 0, [one], argument, worker, worker)

    async def _flush(self, permits: Sequence[AnyPermit]) -> None:
        async with asyncio.timeout(self._shared.settings.deadline.total_seconds()):
            await self._shared.perform(concurrency.free(permits))
        self._on_freed()

    def _refused(self, one: Leased, error: BaseException, handler: Handler) -> Transition:
        outcome = Unreadable(error) if isinstance(error, UndecodableError) else failure(one, error)
        transition = end_failed(one, outcome, handler)
        self._shared.failures.report(transition, outcome.error)
        return transition
