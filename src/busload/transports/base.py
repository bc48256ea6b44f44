"""What every transport offers: it tells workers, wherever they are, that commands are ready.

A message carries the ids of commands, and PostgreSQL decides what runs. So a message that comes twice costs a look, one
that is lost costs a wait, and an adapter has nothing to remember. It is one module, the only one that imports its
broker's library, and is finished when it passes `busload.testing.TransportContract`.
"""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Self
from urllib.parse import urlsplit, urlunsplit

from busload.errors import TransportError


@dataclass(frozen=True, slots=True)
class Message:
    """Bytes for a queue. A repetition has the same `id`, by which some brokers drop it."""

    queue: str
    id: str
    body: bytes


class Delivery(ABC):
    """A message on loan: it comes again, here or elsewhere, unless it is acknowledged."""

    queue: str
    body: bytes

    @abstractmethod
    async def ack(self) -> None:
        """Let the broker forget the message. If the loan has ended, nothing happens: the message comes again."""

    @abstractmethod
    async def reject(self, reason: str) -> None:
        """Nobody can read the message: put it aside, or let the broker forget it. It does not come again."""


class Transport(ABC):
    """A broker, reached by URL.

    There is nothing to open: each call connects if it must, and after a broken connection the next call connects anew.
    Queue names hold ASCII letters, digits, `_`, `.` and `-`; an adapter spells them as its broker wants.
    """

    name: ClassVar[str]
    """The name in the outbox, in metrics and in docs: `rabbitmq`."""

    max_bytes: int
    """The largest body this broker takes."""

    existing: frozenset[str] = frozenset()
    """Queues that others have made, under names of their own: they are spelt as they are, and `declare` makes none."""

    def __init__(self, url: str) -> None:
        self.url = url
        """As it was given, with its credentials: never to be shown."""

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Check the URL without connecting; `TransportMisconfiguredError` says what is wrong with it."""
        return cls(url)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {without_password(self.url)}>"

    @abstractmethod
    async def declare(self, queues: Sequence[str]) -> None:
        """Make these queues, durable, unless they exist. Of those in `existing`, see that they can be used.

        Raises `TransportUnavailableError` if the broker cannot be reached, and `TransportMisconfiguredError` if it
        refuses us, if a queue exists with settings that do not fit, or if one of `existing` does not exist.
        """

    @abstractmethod
    async def publish(self, messages: Sequence[Message]) -> None:
        """Return once the broker has confirmed every message: they survive its restart.

        `PublishError` tells which ones were not confirmed, by index, and why; the broker may have them all the same.
        """

    @abstractmethod
    def deliveries(self, queue: str, *, prefetch: int) -> AsyncIterator[Delivery]:
        """Yield messages as they come, at most `prefetch` on loan at a time, until the iterator is closed.

        Raises what `declare` raises when the connection breaks. Closing gives back what was not acknowledged.
        """

    async def depth(self, queue: str) -> int | None:
        """How many messages wait in the queue; most brokers count those on loan too. None if this broker does not tell.

        A queue that is not there is an empty one, here and for `peek`.
        """
        return None

    async def peek(self, queue: str, *, limit: int) -> list[bytes] | None:
        """Bodies of messages in the queue, without taking them; None if this broker cannot be looked into."""
        return None

    @abstractmethod
    async def aclose(self) -> None:
        """Give everything back; a later call connects again, perhaps in another event loop."""


class LoopLock:
    """A lock that can be used in one event loop after another: an `asyncio.Lock` serves only its first.

    async with self._lock():
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self) -> asyncio.Lock:
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._lock, self._loop = asyncio.Lock(), loop
        return self._lock


def short_name(queue: str, limit: int, mark: str) -> str:
    """For a broker whose names are shorter than ours: a domain has up to 255 bytes, and there is the prefix.

    With a `mark` that no domain has, what is cut is never the name of another queue.
    """
    return queue if len(queue) <= limit else hashed_name(queue, limit, mark)


def hashed_name(queue: str, limit: int, mark: str, *, digits: int = 16) -> str:
    """The beginning of the name, for people, and a hash of the whole name."""
    digest = hashlib.sha256(queue.encode()).hexdigest()[:digits]
    return f"{queue[: limit - digits - len(mark)]}{mark}{digest}"


def without_password(url: str) -> str:
    """The URL as it may be shown: without credentials, nor options that could hold some."""
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
    except ValueError:
        return "(unreadable URL)"
    if "@" in f"{parts.path}{parts.query}{parts.fragment}":  # a password with a character that should be escaped
        return f"{parts.scheme}://(hidden)"
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


class DeliveryReader:
    """Takes deliveries one by one. Unlike `wait_for` it can wait for one that does not come, and go on."""

    def __init__(self, deliveries: AsyncIterator[Delivery]) -> None:
        self._deliveries = deliveries
        self._coming: asyncio.Future[Delivery] | None = None

    async def next(self, within: float) -> Delivery | None:
        """The next delivery, or None if it does not come within so many seconds."""
        if self._coming is None:
            self._coming = asyncio.ensure_future(anext(self._deliveries))
        # To cancel it would end the deliveries, and give back what is on loan.
        await asyncio.wait([self._coming], timeout=within)
        if not self._coming.done():
            return None
        came, self._coming = self._coming, None
        return came.result()

    async def close(self) -> None:
        """Give back all that is on loan."""
        if self._coming is None:
            await give_back(self._deliveries)
            return
        self._coming.cancel()
        await asyncio.wait([self._coming])
        await give_back(self._deliveries)
        with suppress(asyncio.CancelledError, StopAsyncIteration, TransportError):
            self._coming.result()


async def give_back(deliveries: AsyncIterator[Delivery]) -> None:
    """Close what `Transport.deliveries` returned: all that is on loan goes back."""
    close = getattr(deliveries, "aclose", None)
    if close is not None:
        await close()


def heed_cancellation() -> None:
    """For an adapter that is about to wait for a message: end the task if it was cancelled, though a library went on.

    Before Python 3.12 `asyncio.wait_for`, which the libraries use, forgets a cancellation that comes just when what it
    waits for is done. Whoever has cancelled us would wait as long as no message comes.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
