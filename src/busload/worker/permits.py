"""Permits of concurrency limits: which calls of this worker may begin, and which of its permits are free again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import psycopg

from busload.commands.bulk_items import Chunk, Group
from busload.commands.execution import Leased, Transition, Unreadable, failure
from busload.commands.payload import UndecodableError
from busload.handlers.registry import Handler
from busload.limits import concurrency
from busload.limits.concurrency import Held, Request
from busload.limits.limiter import Entered, LimitedError, PermitLostError
from busload.postgres.backoff import Backoff
from busload.worker.call_handler import argument_of
from busload.worker.coalescer import Coalescer
from busload.worker.settlement import end_failed
from busload.worker.shared import Shared, clock

ASKING = "Asking for permits"

FREED_WITHIN = timedelta(milliseconds=5)
"""How long a permit that is free waits for others, to be given back together with them."""


class Permit:
    """A call that may begin while its worker lives, as the database sees it. `argument` is what a single one gets."""

    __slots__ = ("_shared", "argument", "begun", "counted_for", "freed", "held", "leased", "worker")

    def __init__(self, shared: Shared, held: Held, leased: Sequence[Leased], argument: Any, worker: int) -> None:
        self._shared, self.held, self.leased, self.argument = shared, held, leased, argument
        self.worker = self.counted_for = worker
        self.begun = self.freed = False

    def begin(self) -> None:
        """The call begins now. `PermitLostError` if somebody else may have its permit: this process was frozen."""
        alive = self._shared.surely_alive  # asked first: a new number comes before its first sign of life
        if not alive or self.worker != self._shared.number or self.freed:
            raise PermitLostError(self.held.name)
        self.begun = True


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
        self._strange: set[Held] = set()
        self._closed = False
        self._freed: Coalescer[Held] = Coalescer(
            self._flush,
            max_size=1000,
            max_interval=FREED_WITHIN,
            capacity=1_000_000,
            name="permits",
            outage=shared.outage,
        )

    @property
    def freeing(self) -> int:
        """Permits that are free, though the database does not know it yet."""
        return self._freed.stats.waiting

    async def take(self, leased: list[Leased]) -> tuple[list[Leased], list[Transition]]:
        """Ask for the permits of single commands that were claimed.

        Returns those that may run, with those that need no permit, and the results of those whose `by` fails. All
        others wait in the database and are not ours any more.
        """
        asking: list[tuple[Request, Sequence[Leased], Any]] = []
        refused: list[Transition] = []
        without: set[Leased] = set()
        find = self._shared.bus.handlers.find
        for one in leased:
            lease = one.lease
            handler = find(lease.domain, one.command_type)
            if handler is None or (limit := handler.concurrency_limit) is None or handler.takes_many:
                continue
            without.add(one)
            try:
                argument = argument_of(one)
                subject = limit.subject_of(argument)
            except BaseException as error:
                refused.append(self._refused(one, error, handler))
            else:
                name = limit.name_for(lease.domain, one.command_type)
                asking.append((Request(name, subject, limit.calls, [(lease, one.id)]), [one], argument))
        if asking:
            for permit in await self._ask(asking):
                [one] = permit.leased
                self._of[one] = permit
                without.discard(one)
        return [one for one in leased if one not in without], refused

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
                granted = await self._ask([(request, leased, None)])
            except psycopg.Error as error:  # it may have been granted all the same: `once` frees that permit
                if all(one.lease.lost for one in leased):
                    raise PermitLostError(name) from error
                pause = backoff.pause()
                self._shared.outage.failed(ASKING, error)
                await asyncio.sleep(pause)
                continue
            self._shared.outage.worked(ASKING, reached=True)
            if not granted:
                raise LimitedError(name)
            return granted[0]

    def of(self, leased: Leased) -> Permit | None:
        """The permit of a single command; None if its handler has no limit."""
        return self._of.get(leased)

    def free(self, permit: Permit) -> None:
        """The call has ended, or will not be made."""
        permit.freed = True
        if self._held.pop(permit.held.permit, None) is not None:
            for one in permit.leased:
                self._of.pop(one, None)
            if not self._closed:  # else others free it, as this worker has stopped
                self._freed.offer(permit.held)

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
        await self._freed.close(deadline)

    async def _adopt(self) -> None:
        """If this worker has a new number, because it was declared dead, the calls that it still runs count again."""
        number = self._shared.number
        running = [permit for permit in self._held.values() if permit.begun and permit.counted_for != number]
        if running:
            calls = {permit.held: permit.leased[0].id for permit in running}
            await self._shared.perform(concurrency.adopt(calls, worker=number))
            for permit in running:
                permit.counted_for = number
                if permit.held.permit not in self._held:  # it ended meanwhile
                    self._freed.offer(permit.held)

    async def _ask(self, asking: Sequence[tuple[Request, Sequence[Leased], Any]]) -> list[Permit]:
        shared = self._shared
        number, granted = shared.number, []
        sent_at = clock()
        self._asked.append(sent_at)
        try:
            answers = await shared.perform(concurrency.take([request for request, _, _ in asking], worker=number))
        finally:
            self._asked.remove(sent_at)
        for (request, leased, argument), answer in zip(asking, answers, strict=True):
            if answer:
                permit = Permit(shared, Held(request.name, request.subject, answer), leased, argument, number)
                self._held[answer] = permit
                granted.append(permit)
            elif answer is None:
                self._hand_back(leased)
            else:
                for one in leased:
                    one.lease.running -= 1
                shared.held.settled(leased)
        return granted

    async def _flush(self, permits: Sequence[Held]) -> None:
        async with asyncio.timeout(self._shared.settings.deadline.total_seconds()):
            await self._shared.perform(concurrency.free(permits))
        self._on_freed()

    def _refused(self, one: Leased, error: BaseException, handler: Handler) -> Transition:
        outcome = Unreadable(error) if isinstance(error, UndecodableError) else failure(one, error)
        transition = end_failed(one, outcome, handler)
        self._shared.failures.report(transition, outcome.error)
        return transition
