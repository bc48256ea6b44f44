"""What operators do about commands that wait to be announced: look, try again, go without the broker, compare."""

from __future__ import annotations

import asyncio
import builtins
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import UUID

import psycopg

from busload.domain import message
from busload.domain.counted import counted
from busload.domain.dispatch import OutboxEntry, Reconciliation
from busload.domain.message import UnreadableMessage
from busload.errors import BusloadError, InvalidOperationError, PartlyDone
from busload.requests import Write
from busload.store import dispatch
from busload.store import outbox as store
from busload.store.outbox import Seen
from busload.store.send import Range
from busload.transport import Delivery
from busload.transport.base import give_back

if TYPE_CHECKING:
    from busload.bus import CommandBus, SyncCommandBus

log = logging.getLogger("busload")

SETTLED = timedelta(seconds=5)
"""What was announced so shortly before the look, or during it, is not missed yet."""

MOST_LOOKED_AT = 10_000
"""Messages, and loads, that one comparison looks at."""

PAGE = 500
"""Messages on loan that are looked up at once."""

QUIET, LONGEST_LOAN = 2.0, 30.0
"""Seconds without a message after which a queue is at its end, and for which messages are kept from workers at most."""

EARLY = 1.0
"""Seconds before a message about commands that are not here is looked at once more."""

_Ring = tuple[Delivery, Sequence[Range]]
"""A message on loan, and the commands it is about."""


class Outbox:
    """Commands that a broker has not confirmed a message about."""

    def __init__(self, bus: CommandBus) -> None:
        self._bus = bus

    async def list(self, *, domain: str | None = None, batch_id: UUID | None = None) -> list[OutboxEntry]:
        """What waits, by transport, domain and why."""
        return await self._bus._read(self._bus._requests.outbox(domain, batch_id))

    async def retry(self, *, domain: str | None = None, batch_id: UUID | None = None, dry_run: bool = False) -> int:
        """Let relays try again now what waits for another round; returns how many commands that are."""
        if dry_run:
            return await self._bus._read(self._bus._requests.retryable_outbox(domain, batch_id))
        return await self._bus._write(self._bus._requests.retry_outbox(domain, batch_id))

    async def reroute(
        self,
        *,
        domain: str | None = None,
        batch_id: UUID | None = None,
        failed_only: bool = True,
        operator: str | None = None,
        dry_run: bool = False,
    ) -> int:
        """Let PostgreSQL deliver what waits after a failed round, or all of it; returns how many commands that are.

        The audit trail of each has it as REROUTED, with the operator's name.
        """
        if dry_run:
            return _reroutable(await self.list(domain=domain, batch_id=batch_id), failed_only)
        rerouted = 0
        try:
            for write in self._bus._requests.reroute(domain, batch_id, failed_only=failed_only, operator=operator):
                moved = await self._bus._write(replace(write, goes_on=bool(rerouted)))
                if not moved:
                    break
                rerouted += moved
            await self._bus._write(Write(dispatch.close(), one_statement=True, goes_on=bool(rerouted)))
        except (BusloadError, psycopg.Error) as error:
            if not rerouted:
                raise
            raise _partly_rerouted(rerouted, error) from error
        _tell(rerouted, operator)
        return rerouted

    async def reconcile(self, *, domain: str | None = None, repair: bool = False) -> builtins.list[Reconciliation]:
        """Compare what the database has announced with what the broker holds; with `repair`, make both sides agree.

        Any command of a load answers any message about it, so what counts is how many of a load wait, and how many
        are rung for. To repair is to ring for what is missing, and to take out of the broker messages about loads of
        which nothing waits. For that the messages are taken on loan, some seconds long, and what is waited for goes
        back; so a broker that cannot be looked into is compared too. A message that a worker has on loan may not be
        seen, so what is missing may be on its way; to ring once more does no harm.
        """
        bus, announcer = self._bus, self._bus._announcer()
        found = []
        for each in await bus._read(self._bus._requests.reconcile(domain)):
            queue, transport, began = announcer.queue(each), announcer.transport, time.monotonic()
            depth, bodies = await transport.depth(queue), await transport.peek(queue, limit=MOST_LOOKED_AT)
            told = Reconciliation(transport.name, each, queue, announced=0, depth=depth, looked_into=False)
            removed = 0
            if repair and (depth or bodies or (depth is None and bodies is None)):
                removed, seen = await self._remove(told)
                bodies = seen if bodies is None else bodies
            elif repair:
                bodies = []
            before = SETTLED + timedelta(seconds=time.monotonic() - began)
            announced = await bus._read(store.announced(transport.name, each, older_than=before, limit=MOST_LOOKED_AT))
            told = replace(told, announced=_count(announced))
            if bodies is not None:
                told, missing = await self._compare(told, bodies, announced)
                if repair and missing:
                    loads = await bus._write(Write(store.ring(transport.name, missing), one_statement=True))
                    rung = await announcer.announce(loads, again=True)
                    told = replace(told, rung_again=_count([(p.lo, p.hi) for p in rung if p.reason is None]))
            found.append(replace(told, removed=removed))
        return found

    async def _remove(self, told: Reconciliation) -> tuple[int, builtins.list[bytes]]:
        """Take messages out that nothing waits for; how many, and the bodies of all that came.

        What is waited for stays on loan until the end: whatever goes back earlier would come again at once. So does
        what is about nothing here, which may be early: it is looked up once more.
        """
        most = MOST_LOOKED_AT if told.depth is None else min(told.depth, MOST_LOOKED_AT)
        removed, bodies = 0, []
        unknown: builtins.list[_Ring] = []
        transport = self._bus._announcer().transport
        on_loan = _OnLoan(transport.deliveries(told.queue, prefetch=most), most)
        try:
            async for page in on_loan.pages():
                bodies += [delivery.body for delivery in page]
                readable, unreadable = _sorted(page, told.domain, self._key)
                for delivery, why in unreadable:
                    await delivery.reject(f"Refused a message: {why}")
                answered, doubtful = await self._nothing_waits_for(readable)
                await _acknowledge(answered)
                removed += len(unreadable) + len(answered)
                unknown += doubtful
            await asyncio.sleep(EARLY if unknown else 0)
            answered, doubtful = await self._nothing_waits_for(unknown)
            late = answered + [delivery for delivery, _ in doubtful]
            await _acknowledge(late)
        finally:
            await on_loan.give_back()
        return removed + len(late), bodies

    async def _nothing_waits_for(
        self, messages: Sequence[_Ring]
    ) -> tuple[builtins.list[Delivery], builtins.list[_Ring]]:
        """Those of whose loads nothing waits any more, and those about loads that are not here."""
        seen = await self._look_up([ranges for _, ranges in messages])
        idle = [each for each in messages if not any(seen[load].waits for load in _loads(each[1]))]
        answered = [delivery for delivery, ranges in idle if all(seen[load].exists for load in _loads(ranges))]
        return answered, [each for each in idle if not all(seen[load].exists for load in _loads(each[1]))]

    async def _look_up(self, messages: Iterable[Sequence[Range]]) -> dict[int, Seen]:
        loads = sorted({load for ranges in messages for load in _loads(ranges)})
        found = await self._bus._read(store.look_up(loads)) if loads else []
        return dict(zip(loads, found, strict=True))

    @property
    def _key(self) -> bytes | None:
        return self._bus._announcer().key

    async def _compare(
        self, told: Reconciliation, bodies: Sequence[bytes], announced: Sequence[Range]
    ) -> tuple[Reconciliation, Sequence[Range]]:
        messages = list(_readable(bodies, told.domain, self._key))
        seen = await self._look_up(messages)
        whole = len(bodies) < MOST_LOOKED_AT
        return compare(told, len(bodies), messages, seen, announced if whole else [])


class _OnLoan:
    """Messages that are kept from workers until they are given back."""

    def __init__(self, deliveries: AsyncIterator[Delivery], most: int) -> None:
        self._deliveries, self._most = deliveries, most
        self._next: asyncio.Future[Delivery] | None = None

    async def pages(self) -> AsyncIterator[list[Delivery]]:
        """As they come; ends after the most, when none has come for a while, or when it takes too long."""
        end, page = time.monotonic() + LONGEST_LOAN, []
        for _ in range(self._most):
            self._next = asyncio.ensure_future(anext(self._deliveries))
            # To cancel it would end the deliveries, and give back what is on loan.
            await asyncio.wait([self._next], timeout=max(0.0, min(QUIET, end - time.monotonic())))
            if not self._next.done():
                break
            page.append(self._next.result())
            if len(page) == PAGE:
                yield page
                page = []
        if page:
            yield page

    async def give_back(self) -> None:
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)
        await give_back(self._deliveries)


def _sorted(page: Sequence[Delivery], domain: str, key: bytes | None) -> tuple[list[_Ring], list[tuple[Delivery, str]]]:
    """Those that can be read, and those that a worker would refuse, with why."""
    readable: list[_Ring] = []
    unreadable: list[tuple[Delivery, str]] = []
    for delivery in page:
        try:
            readable.append((delivery, _read(delivery.body, domain, key)))
        except UnreadableMessage as error:
            unreadable.append((delivery, str(error)))
    return readable, unreadable


async def _acknowledge(deliveries: Sequence[Delivery]) -> None:
    await asyncio.gather(*(delivery.ack() for delivery in deliveries))


class SyncOutbox:
    """`Outbox` for code without an event loop. It cannot look into a broker, so it compares nothing."""

    def __init__(self, bus: SyncCommandBus) -> None:
        self._bus = bus

    def list(self, *, domain: str | None = None, batch_id: UUID | None = None) -> list[OutboxEntry]:
        """What waits, by transport, domain and why."""
        return self._bus._read(self._bus._requests.outbox(domain, batch_id))

    def retry(self, *, domain: str | None = None, batch_id: UUID | None = None, dry_run: bool = False) -> int:
        """Let relays try again now what waits for another round; returns how many commands that are."""
        if dry_run:
            return self._bus._read(self._bus._requests.retryable_outbox(domain, batch_id))
        return self._bus._write(self._bus._requests.retry_outbox(domain, batch_id))

    def reroute(
        self,
        *,
        domain: str | None = None,
        batch_id: UUID | None = None,
        failed_only: bool = True,
        operator: str | None = None,
        dry_run: bool = False,
    ) -> int:
        """Let PostgreSQL deliver what waits after a failed round, or all of it; see `Outbox.reroute`."""
        if dry_run:
            return _reroutable(self.list(domain=domain, batch_id=batch_id), failed_only)
        rerouted = 0
        try:
            for write in self._bus._requests.reroute(domain, batch_id, failed_only=failed_only, operator=operator):
                moved = self._bus._write(replace(write, goes_on=bool(rerouted)))
                if not moved:
                    break
                rerouted += moved
            self._bus._write(Write(dispatch.close(), one_statement=True, goes_on=bool(rerouted)))
        except (BusloadError, psycopg.Error) as error:
            if not rerouted:
                raise
            raise _partly_rerouted(rerouted, error) from error
        _tell(rerouted, operator)
        return rerouted

    def reconcile(self, *, domain: str | None = None, repair: bool = False) -> builtins.list[Reconciliation]:
        """What the database has announced; only `CommandBus` can look at the broker, and repair."""
        bus, transport = self._bus, self._bus.transport
        if transport is None:
            raise InvalidOperationError("The bus has no transport. Give it one: SyncCommandBus(dsn, transport=URL).")
        if repair:
            raise InvalidOperationError("SyncCommandBus cannot publish. Repair with CommandBus, or at the shell.")
        found = []
        for each in bus._read(bus._requests.reconcile(domain)):
            announced = bus._read(store.announced(transport.name, each, older_than=SETTLED, limit=MOST_LOOKED_AT))
            queue = f"{bus.settings.queue_prefix}.{each}"
            told = Reconciliation(transport.name, each, queue, _count(announced), None, looked_into=False)
            found.append(told)
        return found


def compare(
    told: Reconciliation,
    bodies: int,
    messages: Sequence[Sequence[Range]],
    seen: Mapping[int, Seen],
    announced: Sequence[Range],
) -> tuple[Reconciliation, list[Range]]:
    """What both sides know, and what is announced beyond what messages ring for: the last commands of such loads.

    `seen` tells of each load that a message is about.
    """
    waiting = [any(seen[load].waits for load in _loads(ranges)) for ranges in messages]
    known = [any(seen[load].exists for load in _loads(ranges)) for ranges in messages]
    missing = list(_unrung(announced, messages))
    answered = sum(exists and not waits for exists, waits in zip(known, waiting, strict=True))
    unknown = bodies - len(messages) + known.count(False)
    return (
        replace(
            told,
            looked_into=True,
            messages=bodies,
            answered=answered,
            unknown=unknown,
            missing=_count(missing),
        ),
        missing,
    )


def _unrung(announced: Sequence[Range], messages: Iterable[Sequence[Range]]) -> Iterator[Range]:
    rung: Counter[int] = Counter()
    for ranges in messages:
        for lo, hi in ranges:
            rung[hi >> 10] += hi - lo + 1
    for lo, hi in announced:
        answered = min(rung[hi >> 10], hi - lo + 1)
        rung[hi >> 10] -= answered
        if lo + answered <= hi:
            yield lo + answered, hi


def _readable(bodies: Sequence[bytes], domain: str, key: bytes | None) -> Iterator[Sequence[Range]]:
    for body in bodies:
        with suppress(UnreadableMessage):
            yield _read(body, domain, key)


def _read(body: bytes, domain: str, key: bytes | None) -> Sequence[Range]:
    """The commands that it rings for; workers believe it only about the domain of its queue."""
    envelope = message.read(body, key)
    if envelope.domain != domain:
        raise UnreadableMessage("it is about another domain than its queue")
    return envelope.ranges


def _loads(ranges: Sequence[Range]) -> set[int]:
    return {hi >> 10 for _, hi in ranges}


def _count(ranges: Sequence[Range]) -> int:
    return sum(hi - lo + 1 for lo, hi in ranges)


def _failed(entries: Sequence[OutboxEntry]) -> int:
    return sum(entry.commands for entry in entries if entry.rounds)


def _reroutable(entries: Sequence[OutboxEntry], failed_only: bool) -> int:
    return _failed(entries) if failed_only else sum(entry.commands for entry in entries)


def _tell(rerouted: int, operator: str | None) -> None:
    if rerouted:
        by = f", by {operator}" if operator else ""
        log.info("Rerouted %s to PostgreSQL%s", counted(rerouted, "command"), by)


def _partly_rerouted(commands: int, why: BaseException) -> PartlyDone:
    done = f"{counted(commands, 'command is', 'commands are')} rerouted to PostgreSQL so far"
    return PartlyDone(done, commands, why, todo="Repeat the call to reroute the rest.")
