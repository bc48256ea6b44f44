"""Compares what the database has published with the messages that a broker holds, and makes both sides agree."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

from busload.commands.load import Load, count_commands
from busload.dispatch import envelope as message
from busload.dispatch import outbox as store
from busload.dispatch.envelope import UnreadableMessageError
from busload.dispatch.outbox import Seen
from busload.dispatch.publish import Publisher
from busload.dispatch.strategy import Reconciliation
from busload.postgres import waiting
from busload.postgres.database import Database
from busload.postgres.write import Write
from busload.transports import Delivery

SETTLED = timedelta(seconds=5)
"""Commands that were published so shortly before the look, or during it, do not count as missing."""

MOST_LOOKED_AT = 10_000
"""Messages, and loads, that one comparison looks at."""

EARLY = 1.0
"""Seconds before a message about commands that do not exist is looked at once more."""

_Message = tuple[Delivery, Sequence[Load]]
"""A message on loan, and the commands it is about."""


class Reconciler:
    """Compares one domain after the other."""

    def __init__(self, publisher: Publisher, database: Database) -> None:
        self._publisher, self._database = publisher, database

    async def compare(self, domain: str, *, repair: bool) -> Reconciliation:
        """Say what both sides know of a domain; with `repair`, publish what is missing and remove what nobody needs."""
        publisher, transport = self._publisher, self._publisher.transport.name
        queue, began = publisher.queue(domain), time.monotonic()
        depth, bodies = await publisher.depth(queue), await publisher.peek(queue, limit=MOST_LOOKED_AT)
        told = Reconciliation(transport, domain, queue, published=0, depth=depth, looked_into=False)
        removed = 0
        if repair and (depth or bodies or (depth is None and bodies is None)):
            removed, seen = await self._remove(told)
            bodies = seen if bodies is None else bodies
        elif repair:
            bodies = []
        before = SETTLED + timedelta(seconds=time.monotonic() - began)
        look = store.published(transport, domain, older_than=before, limit=MOST_LOOKED_AT)
        published = await self._database.read(look)
        told = replace(told, published=count_commands(published), removed=removed)
        if bodies is None:
            return told
        told, missing = await self._look_into(told, bodies, published)
        if repair and missing:
            loads = await self._database.write(Write(store.publish_again(transport, missing), one_statement=True))
            again = await publisher.publish(loads, again=True)
            told = replace(told, published_again=count_commands(p.load for p in again if p.reason is None))
        return told

    async def _remove(self, told: Reconciliation) -> tuple[int, list[bytes]]:
        """Remove messages that nothing waits for; returns how many, and the bodies of all messages that came.

        What is waited for stays on loan until the end: whatever goes back earlier would come again at once. So does
        what is about nothing here, which may be early: it is looked up once more.
        """
        most = MOST_LOOKED_AT if told.depth is None else min(told.depth, MOST_LOOKED_AT)
        removed, bodies = 0, []
        unknown: list[_Message] = []
        on_loan = self._publisher.lend(told.queue, most)
        try:
            while page := await on_loan.next_page():
                bodies += [delivery.body for delivery in page]
                readable, unreadable = _sorted(page, told.domain, self._publisher.key)
                for delivery, why in unreadable:
                    await on_loan.reject(delivery, f"Refused a message: {why}")
                answered, doubtful = await self._nothing_waits_for(readable)
                await on_loan.acknowledge(answered)
                removed += len(unreadable) + len(answered)
                unknown += doubtful
            await waiting.sleep(EARLY if unknown else 0)
            answered, doubtful = await self._nothing_waits_for(unknown)
            late = answered + [delivery for delivery, _ in doubtful]
            await on_loan.acknowledge(late)
        finally:
            await on_loan.give_back()
        return removed + len(late), bodies

    async def _nothing_waits_for(self, messages: Sequence[_Message]) -> tuple[list[Delivery], list[_Message]]:
        """The messages whose loads have nothing that waits, and the messages about loads that do not exist."""
        seen = await self._look_up([loads for _, loads in messages])
        idle = [each for each in messages if not any(seen[load].waits for load in _numbers(each[1]))]
        answered = [delivery for delivery, loads in idle if all(seen[load].exists for load in _numbers(loads))]
        return answered, [each for each in idle if not all(seen[load].exists for load in _numbers(each[1]))]

    async def _look_up(self, messages: Iterable[Sequence[Load]]) -> dict[int, Seen]:
        numbers = sorted({number for loads in messages for number in _numbers(loads)})
        found = await self._database.read(store.look_up(numbers)) if numbers else []
        return dict(zip(numbers, found, strict=True))

    async def _look_into(
        self, told: Reconciliation, bodies: Sequence[bytes], published: Sequence[Load]
    ) -> tuple[Reconciliation, Sequence[Load]]:
        messages = list(_readable(bodies, told.domain, self._publisher.key))
        seen = await self._look_up(messages)
        whole = len(bodies) < MOST_LOOKED_AT
        return compared(told, len(bodies), messages, seen, published if whole else [])


def _sorted(
    page: Sequence[Delivery], domain: str, key: bytes | None
) -> tuple[list[_Message], list[tuple[Delivery, str]]]:
    """The messages that can be read, and those that a worker would refuse, each with the reason."""
    readable: list[_Message] = []
    unreadable: list[tuple[Delivery, str]] = []
    for delivery in page:
        try:
            readable.append((delivery, _read(delivery.body, domain, key)))
        except UnreadableMessageError as error:
            unreadable.append((delivery, str(error)))
    return readable, unreadable


def compared(
    told: Reconciliation,
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
    answered = sum(exists and not waits for exists, waits in zip(known, awaited, strict=True))
    unknown = bodies - len(messages) + known.count(False)
    return (
        replace(
            told,
            looked_into=True,
            messages=bodies,
            answered=answered,
            unknown=unknown,
            missing=count_commands(missing),
        ),
        missing,
    )


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
            yield _read(body, domain, key)


def _read(body: bytes, domain: str, key: bytes | None) -> Sequence[Load]:
    """The commands that a message names. Workers believe it only about the domain of its queue."""
    envelope = message.read(body, key)
    if envelope.domain != domain:
        raise UnreadableMessageError("it is about another domain than its queue")
    return envelope.loads


def _numbers(loads: Sequence[Load]) -> set[int]:
    return {load.number for load in loads}
