"""Messages on loan: what one consumer holds, until each message is settled or all of them go back."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from busload.errors import TransportUnavailableError
from busload.transports.base import Delivery, heed_cancellation

log = logging.getLogger("busload.transports")

CHECK_EVERY = 1.0
"""Seconds between two looks at the connection of a consumer that holds all it may hold, and so asks for nothing."""

SETTLE_WITHIN, CLOSE_WITHIN = 10.0, 2.0

K = TypeVar("K", bound=Hashable)


class Loan(Delivery, Generic[K]):
    """A message that `Loans` hold under a key by which the broker knows the message."""

    def __init__(self, loans: Loans[K], key: K, body: bytes) -> None:
        self.queue, self.key, self.body = loans.queue, key, body
        self._loans = loans

    async def ack(self) -> None:
        await self._loans.settle(self)

    async def reject(self, reason: str) -> None:
        log.warning("Removed a message from the queue %s: %s", self.queue, reason)
        await self._loans.settle(self, reason)


class Loans(ABC, Generic[K]):
    """At most `prefetch` messages of one consumer.

    A subclass says how its broker hands messages out, settles, renews and takes them back. Each of these may raise what
    `lost` names: a message that the broker was not told about comes again by itself.
    """

    lost: tuple[type[Exception], ...]
    """What the broker's library raises when a call fails."""

    def __init__(self, queue: str, prefetch: int) -> None:
        self.queue, self.prefetch = queue, prefetch
        self.held: dict[K, Loan[K]] = {}
        self.changed = asyncio.Event()
        """Set when a message arrives or is settled, and when the consumer has to stop waiting."""
        self.broken: str | None = None
        """Why no message will come any more."""
        self._settling = 0
        self._closed = False
        self._renewing: asyncio.Task[None] | None = None

    @abstractmethod
    async def take(self, room: int) -> Sequence[Loan[K]]:
        """Wait for messages, lend them, and return them: at most `room`, perhaps none."""

    @abstractmethod
    async def tell_settled(self, loan: Loan[K], reason: str | None) -> None:
        """Let the broker forget a message. With a reason, nobody could read the message."""

    @abstractmethod
    async def renew(self, loans: Sequence[Loan[K]]) -> None: ...

    @abstractmethod
    async def give_back(self, loans: Sequence[Loan[K]]) -> None:
        """Let others have these messages at once."""

    @property
    @abstractmethod
    def renewal_pause(self) -> float:
        """Seconds until the next renewal: a third of a loan, so two may fail before a message comes again."""

    async def check(self) -> None:
        """Raise if the connection is broken."""

    async def disconnect(self) -> None:
        """Close what belongs to this consumer alone; `take` ends by it."""

    @property
    def on_loan(self) -> int:
        return len(self.held) + self._settling

    def lend(self, key: K, body: bytes) -> Loan[K]:
        loan = self.held[key] = Loan(self, key, body)
        return loan

    async def deliveries(self) -> AsyncIterator[Delivery]:
        self._renewing = asyncio.create_task(self._keep_renewing())
        while True:
            room = await self._room()
            heed_cancellation()
            for loan in await self.take(room):
                if self.held.get(loan.key) is loan:
                    yield loan

    async def settle(self, loan: Loan[K], reason: str | None = None) -> None:
        """Only once, and only while the message is on loan."""
        if self.held.get(loan.key) is not loan:
            return
        del self.held[loan.key]
        self._settling += 1
        try:
            async with asyncio.timeout(SETTLE_WITHIN):
                await self.tell_settled(loan, reason)
        except self.lost as error:
            log.debug("A message of %s comes again, the broker was not told that it is settled: %r", self.queue, error)
        finally:
            self._settling -= 1
            self.changed.set()

    def lose(self, why: str) -> None:
        self.broken = self.broken or why
        self.changed.set()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.lose(f"The consumer of the queue {self.queue} was closed.")
        if self._renewing:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        with suppress(*self.lost):
            async with asyncio.timeout(CLOSE_WITHIN):
                held, self.held = self.held, {}
                await self.give_back(list(held.values()))
        await self.disconnect()

    async def _room(self) -> int:
        """Wait until the consumer may hold more messages, and return how many."""
        while True:
            if self.broken:
                raise TransportUnavailableError(self.broken)
            if (room := self.prefetch - self.on_loan) > 0:
                return room
            self.changed.clear()
            try:
                async with asyncio.timeout(CHECK_EVERY):
                    await self.changed.wait()
            except TimeoutError:
                await self.check()

    async def _keep_renewing(self) -> None:
        while not self._closed:  # a library may forget the cancellation; see `heed_cancellation`
            await asyncio.sleep(self.renewal_pause)
            try:
                await self.renew(list(self.held.values()))
            except self.lost as error:
                log.debug("Could not renew the messages on loan of %s: %r", self.queue, error)
