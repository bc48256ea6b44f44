"""What tests of a transport do again and again: publish messages, take them, and read what was refused."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from uuid import uuid4

from busload.errors import PublishError, RefusalReason
from busload.transports import Delivery, Message, Transport, find_transport
from busload.transports.base import DeliveryReader

SECRET = "kept-to-ourselves"  # noqa: S105
"""The password in `unreachable_url` and `wrong_credentials_url`: nothing that is shown may hold it."""

WITHIN = 30.0
"""Seconds after which something that must come has not come."""


class Receiver(DeliveryReader):
    async def take(self, count: int) -> list[Delivery]:
        taken: list[Delivery] = []
        while len(taken) < count:
            delivery = await self.next(WITHIN)
            assert delivery is not None, f"{len(taken)} of {count} messages came within {WITHIN:.0f} s"
            taken.append(delivery)
        return taken

    async def nothing_for(self, seconds: float) -> bool:
        return await self.next(seconds) is None


@asynccontextmanager
async def receiving(transport: Transport, queue: str, *, prefetch: int = 10) -> AsyncIterator[Receiver]:
    receiver = Receiver(transport.deliveries(queue, prefetch=prefetch))
    try:
        yield receiver
    finally:
        await receiver.close()


def connected(url: str) -> AbstractAsyncContextManager[Transport]:
    return aclosing(find_transport(url))


def another(transport: Transport) -> AbstractAsyncContextManager[Transport]:
    """A second one like it, with connections of its own."""
    return aclosing(type(transport).from_url(transport.url))


async def publish(transport: Transport, queue: str, *bodies: bytes) -> None:
    """Declare the queue and publish these messages."""
    await transport.declare([queue])
    await transport.publish(messages(queue, bodies))


def messages(queue: str, bodies: Sequence[bytes]) -> list[Message]:
    """Each with an id as the relay makes them."""
    number = uuid4().int % 2**48
    return [Message(queue, f"{number + n}-{number + n}-1", body) for n, body in enumerate(bodies)]


def odd_names(queue: str) -> list[str]:
    """Those of domains may be as odd; they have up to 255 bytes, and the prefix up to 100."""
    ends = [".", "..", "..b", ".b", "_b", "-b", "-B", ".a.b", ".a_b", ".a-b"]
    long = queue.ljust(355, "x")
    return [*(f"{queue}{end}" for end in ends), *(long[:length] for length in (250, 251, 255, 256, 354, 355))]


async def until(ask: Callable[[], Awaitable[object]], fits: Callable[[object], bool]) -> bool:
    deadline = time.monotonic() + WITHIN
    while not fits(await ask()):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


async def refusals(transport: Transport, batch: Sequence[Message]) -> dict[int, RefusalReason]:
    try:
        await transport.publish(batch)
    except PublishError as failed:
        return reasons(failed)
    return {}


def reasons(failed: PublishError) -> dict[int, RefusalReason]:
    return {index: refusal.reason for index, refusal in failed.refused.items()}


def said_by(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
