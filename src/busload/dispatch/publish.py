"""Puts loads into messages, hands them to the broker, and says what became of each command's message."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import random
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import psycopg

from busload.commands.load import LOAD_SIZE, Load, number_of
from busload.commands.payload import PayloadRefusedError, storable
from busload.dispatch import envelope as message
from busload.dispatch import outbox
from busload.dispatch.envelope import Envelope
from busload.dispatch.outbox import Piece, Unpublished
from busload.errors import (
    BusloadError,
    PublishError,
    Refusal,
    RefusalReason,
    TransportError,
    TransportMisconfiguredError,
)
from busload.postgres.plan import Plan
from busload.transports import Message, Transport

if TYPE_CHECKING:
    from busload.telemetry.opentelemetry import Telemetry

log = logging.getLogger("busload")

Perform = Callable[[Plan[Any]], Coroutine[Any, Any, Any]]
"""Performs a plan in a transaction of its own."""

MOST_MESSAGES = 1000
"""Messages that are published by one call: transports allow it ten seconds."""

MOST_OF_A_PAGE = 20_000
"""Messages of one page, so that a broker that is not quick has taken them all in time."""

MOST_BYTES = 4 * 1024 * 1024
"""Bytes of payloads that are read and published at a time, unless one command has more."""

WITHIN = 40.0
"""Seconds that publishing a page may take: whoever publishes loads holds them for a minute."""

DECLARED_WITHIN = 10.0
"""Seconds for a queue to be made or found, also if others are before it."""

DECLARE_AGAIN = (RefusalReason.UNROUTABLE, RefusalReason.REFUSED)
"""Somebody has removed a queue, or the broker denies us something: to declare the queues says what is wrong."""

DIGEST = 12
"""Hex digits that tell messages about the same first and last command apart."""

LONGEST_PAUSE = 300.0

LONGEST_LEFT_ALONE, FORGOTTEN = 60.0, 120.0
"""Seconds for which an unresponsive queue is left alone at most, and after which its earlier silence is forgotten."""

VANISHED = Refusal(RefusalReason.REFUSED, "There is no such command in the database any more.")


class Publisher:
    """Publishes loads on one transport: as envelopes of many ids, or with a message per command for foreign readers."""

    def __init__(
        self,
        transport: Transport,
        perform: Perform,
        *,
        prefix: str,
        queues: Mapping[str, str] | None = None,
        envelope_size: int,
        message_per_command: bool = False,
        key: bytes | None = None,
    ) -> None:
        self.transport = transport
        self._perform = perform
        self._prefix, self._queues, self._size, self.key = prefix, dict(queues or {}), envelope_size, key
        self._domain_of = {queue: domain for domain, queue in self._queues.items()}
        transport.existing |= self._domain_of.keys()
        self._per_command = message_per_command
        if key is not None:
            message.keys(key)  # says so now if it is unusable
        self._declared: set[str] = set()
        self._unresponsive = UnresponsiveQueues()
        self._recovered = False
        self._database: str | None = None
        self.messages = self.confirmed = 0
        """Messages that were handed to the broker, and those it has confirmed."""
        self.refused: Counter[str] = Counter()
        """The others, by reason."""
        self.telemetry: Telemetry | None = None
        """The spans and metrics of the bus, if there are any."""

    def queue(self, domain: str) -> str:
        """The queue that messages about a domain go to: the one it was given, or one of its own name."""
        return self._queues.get(domain) or f"{self._prefix}.{domain}"

    @property
    def page(self) -> int:
        """Loads to publish together: none has to wait because the messages of the others take too long."""
        return max(1, min(outbox.MOST, MOST_OF_A_PAGE * (1 if self._per_command else self._size) // LOAD_SIZE))

    def is_stuck(self, domain: str) -> bool:
        """Whether its queue is unresponsive while others answer, so that the broker is not away."""
        return self._unresponsive.is_stuck(self.queue(domain))

    @property
    def left_alone(self) -> list[str]:
        """Domains whose queues are stuck, and not to be tried for now."""
        stuck = self._unresponsive.left_alone()
        return [self._domain_of.get(queue) or queue.removeprefix(f"{self._prefix}.") for queue in stuck]

    def recovered(self) -> bool:
        """Whether a queue that was stuck has answered since this was asked last: then nothing needs to wait for it."""
        heard, self._recovered = self._recovered, False
        return heard

    async def publish(self, loads: Sequence[Unpublished], *, again: bool = False) -> list[Piece]:
        """Publish messages about these loads, and return what became of them. This never fails: what the broker has not
        confirmed is told as refused.

        With `again`, the loads were published before and nobody has claimed them: the broker must not take their
        messages for repetitions.
        """
        if self.telemetry is None:
            return await self._publish(loads, again=again)
        domains = {one.domain for one in loads}
        domain = domains.pop() if len(domains) == 1 else None
        with self.telemetry.working("publish", "send", domain, sum(one.load.size for one in loads)):
            return await self._publish(loads, again=again)

    async def _publish(self, loads: Sequence[Unpublished], *, again: bool) -> list[Piece]:
        page = Page(loads, self.transport.name, again=again)
        queues = {self.queue(one.domain) for one in loads}
        page.unusable |= {queue: why for queue, why in self._unresponsive.left_alone().items() if queue in queues}
        return page.pieces(page.away(queues) or await self._publish_page(page, queues))

    async def close(self) -> None:
        await self.transport.aclose()

    async def _publish_page(self, page: Page, queues: Collection[str]) -> Refusal:
        """Publish slice by slice; returns why the rest was not published."""
        try:
            async with aclosing(self._slices(page)) as slices:
                async for envelopes in slices:
                    await self._publish_envelopes(page, envelopes)
                    if (away := page.away(queues)) is not None:
                        return away
        except TimeoutError:
            return Refusal(RefusalReason.UNREACHABLE, f"Reading and publishing all of it took more than {WITHIN:g} s.")
        except Exception as error:  # a load that nobody tells about would be held for a minute, and nobody knew why
            if not isinstance(error, psycopg.Error | BusloadError | OSError):
                log.exception("Could not read from the database what is to be published")
            told = str(error) or type(error).__name__
            return Refusal(RefusalReason.UNREACHABLE, f"The database could not be read for the message: {told}")
        return VANISHED

    async def _slices(self, page: Page) -> AsyncGenerator[list[Envelope], None]:
        """The contents of up to a thousand messages at a time, with no more payloads than fit into memory."""
        if self._database is None:
            self._database = await self._read(page, outbox.identity())
        if not self._per_command:
            envelopes = message.envelopes([(one.load, one.domain) for one in page.loads], self._size)
            while some := list(islice(envelopes, MOST_MESSAGES)):
                yield some
            return
        for thousand in message.envelopes([(one.load, "") for one in page.loads], MOST_MESSAGES):
            for ids in _by_bytes(await self._read(page, outbox.sizes(thousand.loads))):
                rows = await self._read(page, outbox.commands([Load(id, id) for id in ids]))
                if rows:
                    yield [message.of_one(*row) for row in rows]

    async def _read(self, page: Page, plan: Plan[Any]) -> Any:
        async with asyncio.timeout_at(page.deadline):
            return await self._perform(plan)

    async def _publish_envelopes(self, page: Page, envelopes: Sequence[Envelope]) -> None:
        messages: dict[int, Message] = {}
        refused: dict[int, Refusal] = {}
        for index, envelope in enumerate(envelopes):
            try:
                messages[index] = self._message(envelope, page.rounds if page.again else {})
            except PayloadRefusedError as error:
                refused[index] = Refusal(RefusalReason.TOO_LARGE, f"It does not fit into a message: {error}")
        if messages:
            began = time.monotonic()
            refused |= await self._publish_messages(messages, page)
            self._learn(page, messages, refused, began)
        self.messages += len(envelopes)
        self.confirmed += len(envelopes) - len(refused)
        self.refused.update(str(refusal.reason) for refusal in refused.values())
        for index, envelope in enumerate(envelopes):
            page.record(envelope.loads, refused.get(index))

    def _message(self, envelope: Envelope, rounds: dict[int, int]) -> Message:
        """The id must differ from that of any other message, or a broker would drop the message as a repetition. So it
        names the database, as a broker may serve two, and has a digest if the message leaves out commands between
        the first and the last one."""
        first, last = envelope.loads[0].lo, envelope.loads[-1].hi
        id = f"{self._database}-{first}-{last}-{rounds.get(number_of(last), 0)}"
        if len(envelope.loads) > 1:
            id += f"-{hashlib.sha256(repr(tuple(map(tuple, envelope.loads))).encode()).hexdigest()[:DIGEST]}"
        return Message(self.queue(envelope.domain), id, message.write(envelope, self.key))

    async def _publish_messages(self, messages: Mapping[int, Message], page: Page) -> dict[int, Refusal]:
        """A queue that cannot be used refuses its own messages; the others are published."""
        try:
            async with asyncio.timeout_at(page.deadline):
                unresponsive = await self._declare({each.queue for each in messages.values()}, page.unusable)
                unusable = page.unusable | unresponsive
                refused = {n: unusable[each.queue] for n, each in messages.items() if each.queue in unusable}
                usable = {n: each for n, each in messages.items() if n not in refused}
                return refused | await self._hand_over(usable)
        except (TransportError, TimeoutError, OSError) as error:
            return dict.fromkeys(messages, _unreachable(error))
        except Exception as error:  # a fault of the transport must not end the relay
            log.exception("The transport %s failed in a way that it should not", self.transport.name)
            return dict.fromkeys(messages, Refusal(RefusalReason.REFUSED, type(error).__name__))

    async def _declare(self, queues: set[str], unusable: dict[str, Refusal]) -> dict[str, Refusal]:
        """Declare each queue by itself, so that none waits for another; returns those that could not be reached."""
        missing = sorted(queues - self._declared - unusable.keys())
        found = await asyncio.gather(*map(self._declare_one, missing), return_exceptions=True)
        unresponsive: dict[str, Refusal] = {}
        for queue, error in zip(missing, found, strict=True):
            if error is None:
                self._declared.add(queue)
            elif isinstance(error, TransportMisconfiguredError):
                unusable[queue] = Refusal(RefusalReason.REFUSED, str(error))
            elif isinstance(error, TransportError | OSError):
                unresponsive[queue] = _unreachable(error)
            else:
                raise error
        return unresponsive

    async def _declare_one(self, queue: str) -> None:
        async with asyncio.timeout(DECLARED_WITHIN):
            await self.transport.declare([queue])

    async def _hand_over(self, messages: Mapping[int, Message]) -> dict[int, Refusal]:
        indexes = list(messages)
        try:
            if messages:
                await self.transport.publish(list(messages.values()))
        except PublishError as failed:
            if any(refusal.reason in DECLARE_AGAIN for refusal in failed.refused.values()):
                self._declared.clear()
            return {indexes[n]: refusal for n, refusal in failed.refused.items()}
        except TransportMisconfiguredError as error:
            self._declared.clear()
            return dict.fromkeys(indexes, Refusal(RefusalReason.REFUSED, str(error)))
        return {}

    def _learn(self, page: Page, messages: Mapping[int, Message], refused: Mapping[int, Refusal], began: float) -> None:
        """An unresponsive queue is tried once per page and, while others answer, not in each page."""
        heard = {each.queue for n, each in messages.items() if n not in refused}
        unresponsive = {
            each.queue: refused[n]
            for n, each in messages.items()
            if each.queue not in heard
            and each.queue not in page.unusable
            and refused[n].reason is RefusalReason.UNREACHABLE
        }
        self._recovered |= self._unresponsive.learn(heard, unresponsive, began)
        page.unusable |= unresponsive


def _by_bytes(sizes: Iterable[tuple[int, int]]) -> Iterator[list[int]]:
    """Ids of commands whose payloads may be in memory together."""
    ids: list[int] = []
    room = MOST_BYTES
    for id, size in sizes:
        if ids and size > room:
            yield ids
            ids, room = [], MOST_BYTES
        ids.append(id)
        room -= size
    if ids:
        yield ids


def _unreachable(error: Exception) -> Refusal:
    return Refusal(RefusalReason.UNREACHABLE, str(error) or f"It did not answer within {WITHIN:g} s.")


class Page:
    """Loads that are published together, and what is known of each command's message so far."""

    def __init__(self, loads: Sequence[Unpublished], transport: str, *, again: bool) -> None:
        self.loads, self.again = loads, again
        self._transport, self._publication = transport, secrets.token_hex(4)
        self._last_error = {one.load.number: one.error for one in loads if one.error is not None}
        self.rounds = {one.load.number: one.rounds for one in loads}
        self.deadline = asyncio.get_running_loop().time() + WITHIN
        self.unusable: dict[str, Refusal] = {}
        """Queues that the broker does not let us use, or that do not answer; they are not tried again for this page."""
        self._pieces: list[Piece] = []

    def away(self, queues: Iterable[str]) -> Refusal | None:
        """The refusal, if none of these queues answers: then the rest need not be tried."""
        why = [self.unusable.get(queue) for queue in queues]
        return why[0] if all(one is not None and one.reason is RefusalReason.UNREACHABLE for one in why) else None

    def record(self, loads: Iterable[Load], refusal: Refusal | None) -> None:
        for load in loads:
            if refusal is None:
                self._pieces.append(Piece(load, published=self._published(load.number)))
            else:
                wait = pause(self.rounds.get(load.number, 0), refusal.after)
                self._pieces.append(
                    Piece(load, str(refusal.reason), storable(refusal.message, 1000), wait, refusal.after)
                )

    def pieces(self, left: Refusal) -> list[Piece]:
        """What became of every command; those that nothing was recorded about fared like `left`.

        Nothing may be left out: the outbox moves a load only if it is told about all of its commands.
        """
        self.record(list(self._unrecorded()), left)
        return _joined(self._pieces)

    def _published(self, load: int) -> str:
        told = {"transport": self._transport, "attempts": self.rounds.get(load, 0) + 1}
        error = self._last_error.get(load)
        return json.dumps(told | ({"last_error": error} if error else {}) | {"publication": self._publication})

    def _unrecorded(self) -> Iterator[Load]:
        recorded: dict[int, list[Load]] = defaultdict(list)
        for piece in self._pieces:
            recorded[piece.load.number].append(piece.load)
        for one in self.loads:
            yield from one.load.subtract(recorded[one.load.number])


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours in a load that fared alike, as one."""
    joined: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.load):
        last = joined[-1] if joined else None
        load = last.load.join(piece.load) if last else None
        if last and load and (last.reason, last.error) == (piece.reason, piece.error):
            after = max(last.after or 0.0, piece.after or 0.0) or None
            joined[-1] = Piece(load, last.reason, last.error, max(last.pause, piece.pause), after, last.published)
        else:
            joined.append(piece)
    return joined


def pause(rounds: int, asked: float | None = None) -> float:
    """Seconds before the next round: doubling up to five minutes, not all at once, and no less than the broker asks."""
    doubled = min(2.0 ** min(rounds, 16), LONGEST_PAUSE)
    return max(doubled * random.uniform(0.8, 1.2), asked or 0.0)  # noqa: S311 - spreads rounds out, hides nothing


@dataclass(slots=True)
class _Unresponsive:
    since: float
    why: Refusal
    last: float = 0.0
    tries: int = 0
    until: float = 0.0


class UnresponsiveQueues:
    """Each of these queues is left alone for a while, which grows: to wait for them in vain would hold up the others.

    If no queue has answered since one became unresponsive, the broker may be away: then no queue is left alone.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._answered_at = clock, -math.inf
        self._queues: dict[str, _Unresponsive] = {}

    def is_stuck(self, queue: str) -> bool:
        return queue in self._queues and self._queues[queue].tries > 0

    def left_alone(self) -> dict[str, Refusal]:
        """The queues that are not to be tried now, each with the refusal of the last try."""
        now = self._clock()
        return {queue: one.why for queue, one in self._queues.items() if now < one.until}

    def learn(self, heard: Iterable[str], unresponsive: Mapping[str, Refusal], began: float) -> bool:
        """Note which queues have answered since `began`, and which have not; returns whether a stuck queue has."""
        now, stuck = self._clock(), False
        for queue in heard:
            self._answered_at = now
            stuck |= self.is_stuck(queue)
            self._queues.pop(queue, None)
        for queue, why in unresponsive.items():
            one = self._queues.get(queue)
            if one is None or now - one.last > FORGOTTEN:
                one = self._queues[queue] = _Unresponsive(began, why)
            one.why, one.last = why, now
            if self._answered_at >= one.since:
                one.until = now + min(pause(one.tries), LONGEST_LEFT_ALONE)
                one.tries += 1
        return stuck
