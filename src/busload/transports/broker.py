"""What transports of brokers share: messages refused one by one, consumers, and the broker's errors in our words."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import Any, ClassVar, Generic, TypeVar

from busload.errors import (
    PublishError,
    Refusal,
    RefusalReason,
    TransportError,
    TransportMisconfiguredError,
    TransportUnavailableError,
)
from busload.transports.base import Delivery, Message, Transport, heed_cancellation

log = logging.getLogger("busload.transports")

TIMEOUT = 10.0
"""Seconds within which a call must succeed, unless the URL says otherwise."""

CHECK_EVERY = 1.0
"""Seconds between two looks at the connection of a consumer that holds all it may hold, and so asks for nothing."""

SETTLE_WITHIN, CLOSE_WITHIN = 10.0, 2.0

K = TypeVar("K", bound=Hashable)


class Broker(Transport):
    """A transport of which only the broker's own part is left to write."""

    title: ClassVar[str]
    """The broker's name as people write it: `RabbitMQ`."""

    lost: ClassVar[tuple[type[Exception], ...]]
    """What the broker's library raises when a call fails."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.timeout = TIMEOUT
        self._consumers: set[Consumer[Any]] = set()

    @abstractmethod
    async def publish_fitting(self, messages: Mapping[int, Message]) -> Mapping[int, Refusal]:
        """Publish messages that are small enough; return those that were not confirmed, by index.

        What this raises as a `TransportError` is told about all of them.
        """

    @abstractmethod
    def translation(self, error: Exception, queue: str | None) -> TransportError:
        """An error of the library, in our words: who can help, and how."""

    @abstractmethod
    async def disconnect(self) -> None: ...

    async def connect(self) -> None:
        """Learn from the broker what it must tell before messages are published."""

    async def consumer(self, queue: str, prefetch: int) -> Consumer[Any]:
        """A new consumer of a queue. A broker that pushes messages has none: it overrides `deliveries`."""
        raise NotImplementedError

    async def publish(self, messages: Sequence[Message]) -> None:
        if not messages:
            return
        refused: dict[int, Refusal] = {}
        fitting = dict(enumerate(messages))
        try:
            await self.connect()
            most = self.max_bytes
            refused = {index: too_large(each, most) for index, each in fitting.items() if len(each.body) > most}
            fitting = {index: each for index, each in fitting.items() if index not in refused}
            if fitting:
                refused |= await self.publish_fitting(fitting)
        except TransportUnavailableError as error:
            refused |= dict.fromkeys(fitting, unreachable(str(error)))
        except TransportMisconfiguredError as error:
            refused |= dict.fromkeys(fitting, Refusal(RefusalReason.REFUSED, str(error)))
        if refused:
            raise PublishError(dict(sorted(refused.items())))

    async def deliveries(self, queue: str, *, prefetch: int) -> AsyncIterator[Delivery]:
        with self.translated(queue):
            consumer = await self.consumer(queue, prefetch)
            self._consumers.add(consumer)
            try:
                async with aclosing(consumer.deliveries()) as deliveries:  # type: ignore[type-var]
                    async for delivery in deliveries:
                        yield delivery
            finally:
                self._consumers.discard(consumer)
                await consumer.close()

    async def aclose(self) -> None:
        try:
            for consumer in list(self._consumers):
                await consumer.close()
        finally:  # also if it is cancelled
            await self.disconnect()

    @contextmanager
    def translated(self, queue: str | None = None) -> Iterator[None]:
        """Errors of the library as what `declare` promises to raise. The library's own text may hold a password, so it
        is not chained."""
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise TransportUnavailableError(f"The connection to {self.title} has ended.") from None
        except TransportError:
            raise
        except TimeoutError:
            raise TransportUnavailableError(f"{self.title} did not answer within {self.timeout:g} s.") from None
        except self.lost as error:
            raise self.translation(error, queue) from None

    def in_time(self) -> asyncio.Timeout:
        return asyncio.timeout(self.timeout)


class HeldMessage(Delivery, Generic[K]):
    """A message that a consumer holds, under a key by which the broker knows it."""

    def __init__(self, consumer: Consumer[K], key: K, body: bytes) -> None:
        self.queue, self.key, self.body = consumer.queue, key, body
        self._consumer = consumer

    async def ack(self) -> None:
        await self._consumer.settle(self)

    async def reject(self, reason: str) -> None:
        log.warning("Removed a message from the queue %s: %s", self.queue, reason)
        await self._consumer.settle(self, reason)


class Consumer(ABC, Generic[K]):
    """At most `prefetch` messages of one consumer.

    A subclass says how its broker hands messages out, settles, renews and takes them back. Each of these may raise what
    `lost` names: a message that the broker was not told about comes again by itself.
    """

    lost: tuple[type[Exception], ...]
    """What the broker's library raises when a call fails."""

    loan_for: float
    """Seconds after which a message that was not renewed comes again."""

    def __init__(self, queue: str, prefetch: int) -> None:
        self.queue, self.prefetch = queue, prefetch
        self.held: dict[K, HeldMessage[K]] = {}
        self.changed = asyncio.Event()
        """Set when a message arrives or is settled, and when the consumer has to stop waiting."""
        self.broken: str | None = None
        """Why no message will come any more."""
        self._settling = 0
        self._closed = False
        self._renewing: asyncio.Task[None] | None = None

    @abstractmethod
    async def take(self, room: int) -> Sequence[HeldMessage[K]]:
        """Wait for messages, hold them, and return them: at most `room`, perhaps none."""

    @abstractmethod
    async def tell_settled(self, key: K, reason: str | None) -> None:
        """Let the broker forget a message. With a reason, nobody could read the message."""

    @abstractmethod
    async def renew(self, keys: Sequence[K]) -> None: ...

    @abstractmethod
    async def give_back(self, keys: Sequence[K]) -> None:
        """Let others have these messages at once."""

    @property
    def renewal_pause(self) -> float:
        """Seconds until the next renewal: a third of a loan, so two may fail before a message comes again."""
        return self.loan_for / 3

    async def check(self) -> None:
        """Raise if the connection is broken."""

    async def disconnect(self) -> None:
        """Close what belongs to this consumer alone; `take` ends by it."""

    @property
    def on_loan(self) -> int:
        return len(self.held) + self._settling

    def hold(self, key: K, body: bytes) -> HeldMessage[K]:
        message = self.held[key] = HeldMessage(self, key, body)
        return message

    async def deliveries(self) -> AsyncIterator[Delivery]:
        self._renewing = asyncio.create_task(self._keep_renewing())
        while True:
            room = await self._room()
            heed_cancellation()
            for message in await self.take(room):
                if self.held.get(message.key) is message:
                    yield message

    async def settle(self, message: HeldMessage[K], reason: str | None = None) -> None:
        """Only once, and only while the message is on loan."""
        if self.held.get(message.key) is not message:
            return
        del self.held[message.key]
        self._settling += 1
        try:
            async with asyncio.timeout(SETTLE_WITHIN):
                await self.tell_settled(message.key, reason)
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
        try:
            if self._renewing:
                self._renewing.cancel()
                await asyncio.gather(self._renewing, return_exceptions=True)
            with suppress(*self.lost):
                async with asyncio.timeout(CLOSE_WITHIN):
                    held, self.held = self.held, {}
                    await self.give_back(list(held))
        finally:  # also if it is cancelled
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
                if self.held:
                    await self.renew(list(self.held))
            except self.lost as error:
                log.debug("Could not renew the messages on loan of %s: %r", self.queue, error)


async def in_windows(
    messages: Mapping[int, Message],
    size: int,
    publish: Callable[[Mapping[int, Message]], Awaitable[Mapping[int, Refusal]]],
) -> dict[int, Refusal]:
    """Publish some messages at a time, each window with the whole time-out.

    If a window finds that the broker cannot be reached, the others are not tried: each would take as long again.
    """
    refused: dict[int, Refusal] = {}
    indexes = list(messages)
    for start in range(0, len(indexes), size):
        window = {index: messages[index] for index in indexes[start : start + size]}
        try:
            found = await publish(window)
        except TransportUnavailableError as error:
            found = dict.fromkeys(window, unreachable(str(error)))
        refused |= found
        away = next((each for each in found.values() if each.reason is RefusalReason.UNREACHABLE), None)
        if away is not None:
            refused |= dict.fromkeys(indexes[start + size :], away)
            break
    return refused


def by_queue(messages: Mapping[int, Message]) -> dict[str, dict[int, Message]]:
    found: dict[str, dict[int, Message]] = {}
    for index, message in messages.items():
        found.setdefault(message.queue, {})[index] = message
    return found


def unreachable(why: str) -> Refusal:
    return Refusal(RefusalReason.UNREACHABLE, why)


def too_large(message: Message, most: int) -> Refusal:
    return Refusal(RefusalReason.TOO_LARGE, f"found {len(message.body)} bytes, wanted at most {most}")


def said(error: BaseException) -> str:
    """What an error says, on one line and without a full stop."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
