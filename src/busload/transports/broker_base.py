"""What the transports of brokers share: messages refused one by one, loans, and the broker's errors in our words."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, ClassVar

from busload.errors import (
    PublishError,
    Refusal,
    RefusalReason,
    TransportError,
    TransportMisconfiguredError,
    TransportUnavailableError,
)
from busload.transports.base import Delivery, Message, Transport
from busload.transports.held_messages import Loans

TIMEOUT = 10.0
"""Seconds within which a call must succeed, unless the URL says otherwise."""


class Broker(Transport):
    """A transport of which only the broker's own part is left to write."""

    title: ClassVar[str]
    """The broker's name as people write it: `RabbitMQ`."""

    lost: ClassVar[tuple[type[Exception], ...]]
    """What the broker's library raises when a call fails."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.timeout = TIMEOUT
        self._lent: set[Loans[Any]] = set()

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

    async def lend(self, queue: str, prefetch: int) -> Loans[Any]:
        """A new consumer of a queue."""
        raise NotImplementedError

    async def publish(self, messages: Sequence[Message]) -> None:
        if not messages:
            return
        refused: dict[int, Refusal] = {}
        fitting = dict(enumerate(messages))
        try:
            await self.connect()
            refused = {index: too_large(each, self.max_bytes) for index, each in fitting.items() if self._exceeds(each)}
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
            loans = await self.lend(queue, prefetch)
            self._lent.add(loans)
            try:
                async with aclosing(loans.deliveries()) as deliveries:  # type: ignore[type-var]
                    async for delivery in deliveries:
                        yield delivery
            finally:
                self._lent.discard(loans)
                await loans.close()

    async def aclose(self) -> None:
        for loans in list(self._lent):
            await loans.close()
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

    def _exceeds(self, message: Message) -> bool:
        return len(message.body) > self.max_bytes


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
