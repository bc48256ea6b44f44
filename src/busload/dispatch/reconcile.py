"""Compares what the database has published with the messages that a broker holds, and makes both sides agree."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from busload.commands.load import Load, count_commands
from busload.dispatch import envelope as message
from busload.dispatch import outbox as store
from busload.dispatch.envelope import UnreadableMessageError
from busload.dispatch.outbox import Seen
from busload.dispatch.publish import Perform, Publisher
from busload.postgres.write import Write
from busload.transports import Delivery
from busload.transports.base import DeliveryReader

SETTLED = timedelta(seconds=5)
"""Commands that were published so shortly before the look, or during it, do not count as missing."""

MOST_LOOKED_AT = 10_000
"""Messages, and loads, that one comparison looks at."""

EARLY = 1.0
"""Seconds before a message about commands that do not exist is looked at once more."""

PAGE = 500
"""Messages on loan that are looked up at once."""

QUIET, LONGEST_LOAN = 2.0, 30.0
"""Seconds without a message after which a queue is at its end, and for which messages are kept from workers at most."""

_Message = tuple[Delivery, Sequence[Load]]
"""A message on loan, and the commands it is about."""


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """What the database and the broker know of one queue, compared.

    `looked_into` is False if this broker, or this side of the bus, cannot look at messages: then only counts are told.
    """

    transport: str
    domain: str
    queue: str
    published: int
    """Commands that are ready for some seconds, with a message that the broker has confirmed."""
    depth: int | None
    """Messages that the broker holds; None if it does not tell."""
    looked_into: bool
    messages: int = 0
    """Messages that were looked at."""
    answered: int = 0
    """Messages whose loads have nothing that waits or runs any more: a worker drops them after one claim."""
    unknown: int = 0
    """Messages about commands that do not exist here, or that nobody can read."""
    missing: int = 0
    """Published commands beyond the number that the messages about their loads name."""
    published_again: int = 0
    """Missing commands that a new message was sent for."""
    removed: int = 0
    """Messages that were removed from the broker: nothing waits for them, or nobody can read them."""


class Reconciler:
    """Compares one domain after the other. `read` and `write` are those of the database."""

    def __init__(
        self, publisher: Publisher, read: Perform, write: Callable[[Write[Any]], Coroutine[Any, Any, Any]]
    ) -> None:
        self._publisher, self._read, self._write = publisher, read, write

    async def compare(self, domain: str, *, repair: bool) -> Reconciliation:
        """Say what both sides know of a domain; with `repair`, publish what is missing and remove what nobody needs."""
        transport, queue, began = self._publisher.transport, self._publisher.queue(domain), time.monotonic()
        depth, bodies = await transport.depth(queue), await transport.peek(queue, limit=MOST_LOOKED_AT)
        report = Reconciliation(transport.name, domain, queue, published=0, depth=depth, looked_into=False)
        removed = 0
        if repair and (depth or bodies or (depth is None and bodies is None)):
            removed, seen = await self._remove(report)
            bodies = seen if bodies is None else bodies
        elif repair:
            bodies = []
        before = SETTLED + timedelta(seconds=time.monotonic() - began)
        published = await self._read(store.published(transport.name, domain, older_than=before, limit=MOST_LOOKED_AT))
        report = replace(report, published=count_commands(published), removed=removed)
        if bodies is None:
            return report
        messages = list(_readable(bodies, domain, self._publisher.key))
        all_seen = len(bodies) < MOST_LOOKED_AT
        report, missing = compared(
            report, len(bodies), messages, await self._look_up(messages), published if all_seen else []
        )
        if repair and missing:
            loads = await self._write(Write(store.publish_again(transport.name, missing), one_statement=True))
            again = await self._publisher.publish(loads, again=True)
            report = replace(report, published_again=count_commands(p.load for p in again if p.reason is None))
        return report

    async def _remove(self, report: Reconciliation) -> tuple[int, list[bytes]]:
        """Remove messages that nothing waits for; returns how many, and the bodies of all messages that came.

        What is waited for stays on loan until the end: whatever goes back earlier would come again at once. So does
        what is about nothing here, which may be early: it is looked up once more.
        """
        most = MOST_LOOKED_AT if report.depth is None else min(report.depth, MOST_LOOKED_AT)
        removed = 0
        bodies: list[bytes] = []
        unknown: list[_Message] = []
        messages = DeliveryReader(self._publisher.transport.deliveries(report.queue, prefetch=most))
        end, page_is_full = time.monotonic() + LONGEST_LOAN, True
        try:
            while page_is_full:
                page = await _next_page(messages, most - len(bodies), end)
                page_is_full = len(page) == PAGE
                bodies += [delivery.body for delivery in page]
                readable: list[_Message] = []
                for delivery in page:
                    try:
                        loads = message.read(delivery.body, self._publisher.key, report.domain).loads
                        readable.append((delivery, loads))
                    except UnreadableMessageError as error:
                        await delivery.reject(f"Refused a message: {error}")
                        removed += 1
                answered, doubtful = await self._nothing_waits_for(readable)
                await _acknowledge(answered)
                removed += len(answered)
                unknown += doubtful
            await asyncio.sleep(EARLY if unknown else 0)
            answered, doubtful = await self._nothing_waits_for(unknown)
            late = answered + [delivery for delivery, _ in doubtful]
            await _acknowledge(late)
        finally:
            await messages.close()
        return removed + len(late), bodies

    async def _nothing_waits_for(self, messages: Sequence[_Message]) -> tuple[list[Delivery], list[_Message]]:
        """The messages whose loads have nothing that waits, and the messages about loads that do not exist."""
        seen = await self._look_up([loads for _, loads in messages])
        answered: list[Delivery] = []
        unknown: list[_Message] = []
        for delivery, loads in messages:
            about = [seen[number] for number in _numbers(loads)]
            if any(load.waits for load in about):
                continue
            if all(load.exists for load in about):
                answered.append(delivery)
            else:
                unknown.append((delivery, loads))
        return answered, unknown

    async def _look_up(self, messages: Iterable[Sequence[Load]]) -> dict[int, Seen]:
        numbers = sorted({number for loads in messages for number in _numbers(loads)})
        found = await self._read(store.look_up(numbers)) if numbers else []
        return dict(zip(numbers, found, strict=True))


async def _next_page(messages: DeliveryReader, most: int, end: float) -> list[Delivery]:
    """So many messages, or a page of them; fewer if none has come for a while, or when it takes too long."""
    page: list[Delivery] = []
    while len(page) < min(most, PAGE):
        delivery = await messages.next(max(0.0, min(QUIET, end - time.monotonic())))
        if delivery is None:
            break
        page.append(delivery)
    return page


async def _acknowledge(deliveries: Sequence[Delivery]) -> None:
    await asyncio.gather(*(delivery.ack() for delivery in deliveries))


def compared(
    report: Reconciliation,
    bodies: int,
    messages: Sequence[Sequence[Load]],
    seen: Mapping[int, Seen],
    published: Sequence[Load],
) -> tuple[Reconciliation, list[Load]]:
    """What both sides know, and the published commands that messages do not name: the last ones of their loads.

    `seen` tells of each load that a message is about.
    """
    awaited = [any(seen[load].waits for load in _numbers(loads)) for loads in messages]
    known = [any(seen[load].exists for load in _numbers(loads)) for loads in messages]
    missing = list(_unmentioned(published, messages))
    found = replace(
        report,
        looked_into=True,
        messages=bodies,
        answered=sum(exists and not waits for exists, waits in zip(known, awaited, strict=True)),
        unknown=bodies - len(messages) + known.count(False),
        missing=count_commands(missing),
    )
    return found, missing


def _unmentioned(published: Sequence[Load], messages: Iterable[Sequence[Load]]) -> Iterator[Load]:
    mentioned: Counter[int] = Counter()
    for loads in messages:
        for load in loads:
            mentioned[load.number] += load.size
    for load in published:
        answered = min(mentioned[load.number], load.size)
        mentioned[load.number] -= answered
        rest = load.split(answered)[1] if answered else load
        if rest is not None:
            yield rest


def _readable(bodies: Sequence[bytes], domain: str, key: bytes | None) -> Iterator[Sequence[Load]]:
    for body in bodies:
        with suppress(UnreadableMessageError):
            yield message.read(body, key, domain).loads


def _numbers(loads: Sequence[Load]) -> set[int]:
    return {load.number for load in loads}
