"""For tests with short times: a busy machine that stands still for a moment must not decide them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from busload.errors import PublishError, RefusalReason, TransportUnavailableError
from busload.testing.messages import WITHIN, Receiver, messages
from busload.transports import Message, Transport

T = TypeVar("T")

LOANS = (1, 3, 9)
"""Seconds after which a message comes again that is not renewed."""


async def answered(call: Callable[[], Awaitable[T]]) -> T:
    """What the broker says, as soon as it says something within the transport's time-out."""
    async with asyncio.timeout(WITHIN):
        while True:
            try:
                return await call()
            except TransportUnavailableError:
                await asyncio.sleep(0.02)


async def confirmed(transport: Transport, batch: Sequence[Message]) -> int:
    """Publish as a relay does, until all is confirmed; returns how many tries that took."""
    tries = 0
    async with asyncio.timeout(WITHIN):
        while True:
            tries += 1
            try:
                await transport.publish(batch)
                return tries
            except PublishError as failed:
                if {refusal.reason for refusal in failed.refused.values()} != {RefusalReason.UNREACHABLE}:
                    raise
                await asyncio.sleep(0.02)


async def receives(transport: Transport, queue: str, receiver: Receiver) -> None:
    """Wait until a receiver is connected, which a message proves, and waits for the next one."""
    await transport.publish(messages(queue, [b"are you there?"]))
    [delivery] = await receiver.take(1)
    await delivery.ack()
    assert await receiver.nothing_for(0.1)


async def is_so_for_one(check: Callable[[int], Awaitable[bool]]) -> bool:
    """Whether a loan holds: for the shortest time, or for one in which the machine was quick enough to renew it."""
    for seconds in LOANS:
        if await check(seconds):
            return True
    return False
