"""Permits of concurrency limits: which calls of this worker may begin, and which of its permits are free again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from uuid import UUID

import psycopg

from busload.commands.bulk_items import Chunk, Group
from busload.commands.execution import Leased, Transition, Unreadable, failure
from busload.commands.ids import new_id
from busload.commands.payload import UndecodableError
from busload.handlers import Handler
from busload.limits import concurrency
from busload.limits.concurrency import Request
from busload.limits.limiter import Entered, LimitedError, PermitLostError
from busload.postgres.backoff import Backoff
from busload.worker.call_handler import command_of
from busload.worker.coalescer import Coalescer
from busload.worker.settlement import end_failed
from busload.worker.shared import Shared

ASKING = "Asking for permits"

FREED_WITHIN = timedelta(milliseconds=5)
"""How long a permit that is free waits for others, to be given back together with them."""


class Permit:
    """A call that may begin while its worker lives, as the database sees it."""

    __slots__ = ("_shared", "begun", "counted_for", "leased", "request", "worker")

    def __init__(self, shared: Shared, request: Request, leased: Sequence[Leased], worker: int) -> None:
        self._shared, self.request, self.leased = shared, request, leased
        self.worker = self.counted_for = worker
        self.begun = False

    def begin(self) -> None:
        """The call begins now. `PermitLostError` if somebody else may have its permit: this process was frozen."""
        alive = self._shared.surely_alive  # asked first: a new number comes before its first sign of life
        if not alive or self.worker != self._shared.number:
            raise PermitLostError(self.request.name)
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
        self._held: dict[UUID, Permit] = {}
        self._of: dict[Leased, Permit] = {}
        self._strange: set[UUID] = set()
        self._closed = False
        self._freed: Coalescer[UUID] = Coalescer(
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
        asking: dict[Leased, Request] = {}
        refused: list[Transition] = []
        without: set[Leased] = set()
        for one in leased:
            handler = self._shared.bus.handlers.find(one.lease.domain, one.command_type)
            if handler is None or handler.concurrency_limit is None or handler.takes_many:
                continue
            limit, kind = handler.concurrency_limit, (one.lease.domain, one.command_type)
            try:
                subject = limit.subject_of(command_of(one))
            except BaseException as error:
                without.add(one)
                refused.append(self._refused(one, error, handler))
            else:
                asking[one] = Request(new_id(), limit.name_for(*kind), subject, limit.calls, [(one.lease, one.id)])
        granted = await self._ask({request: [one] for one, request in asking.items()})
        without.update(one for one, request in asking.items() if request.permit not in granted)
        self._of.update({one: granted[request.permit] for one, request in asking.items() if one not in without})
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
        while True:
            request = Request(new_id(), name, subject, limit.calls, commands, size)
            try:
                granted = await self._ask({request: leased})
            except psycopg.Error as error:  # an earlier request may have been granted: `once` frees its permit
                if all(one.lease.lost for one in leased):
                    raise PermitLostError(name) from error
                pause = backoff.pause()
                self._shared.outage.failed(ASKING, error)
                await asyncio.sleep(pause)
                continue
            self._shared.outage.worked(ASKING, reached=True)
            if request.permit not in granted:
                raise LimitedError(name)
            return granted[request.permit]

    def of(self, leased: Leased) -> Permit | None:
        """The permit of a single command; None if its handler has no limit."""
        return self._of.get(leased)

    def free(self, permit: Permit) -> None:
        """The call has ended, or will not be made."""
        if self._held.pop(permit.request.permit, None) is not None:
            for one in permit.leased:
                self._of.pop(one, None)
            if not self._closed:  # else others free it, as this worker has stopped
                self._freed.offer(permit.request.permit)

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
        strange = {permit for permit in known if permit not in self._held}
        for permit_id in strange & self._strange:
            self._freed.offer(permit_id)
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
            await self._shared.perform(concurrency.adopt([permit.request for permit in running], worker=number))
            for permit in running:
                permit.counted_for = number
                if permit.request.permit not in self._held:  # it ended meanwhile
                    self._freed.offer(permit.request.permit)

    async def _ask(self, requests: dict[Request, Sequence[Leased]]) -> dict[UUID, Permit]:
        if not requests:
            return {}
        number = self._shared.number
        answers = await self._shared.perform(concurrency.take(list(requests), worker=number))
        granted: dict[UUID, Permit] = {}
        for (request, leased), answer in zip(requests.items(), answers, strict=True):
            if answer:
                granted[request.permit] = self._held[request.permit] = Permit(self._shared, request, leased, number)
            elif answer is None:
                self._hand_back(leased)
            else:
                for one in leased:
                    one.lease.running -= 1
                self._shared.held.settled(leased)
        return granted

    async def _flush(self, permits: Sequence[UUID]) -> None:
        async with asyncio.timeout(self._shared.settings.deadline.total_seconds()):
            await self._shared.perform(concurrency.free(permits))
        self._on_freed()

    def _refused(self, one: Leased, error: BaseException, handler: Handler) -> Transition:
        outcome = Unreadable(error) if isinstance(error, UndecodableError) else failure(one, error)
        transition = end_failed(one, outcome, handler)
        self._shared.failures.report(transition, outcome.error)
        return transition
