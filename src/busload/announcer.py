"""Puts loads into messages, hands them to the broker, and says what became of each command's message."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from typing import Any

import psycopg

from busload.domain import message
from busload.domain.ids import LOAD_SIZE
from busload.domain.message import Envelope
from busload.domain.payload import PayloadRefused, decode, storable
from busload.errors import (
    BusloadError,
    PublishFailed,
    Refusal,
    RefusalReason,
    TransportError,
    TransportMisconfigured,
)
from busload.store import outbox
from busload.store.outbox import Piece, Unannounced
from busload.store.plan import Plan
from busload.transport import Message, Transport

log = logging.getLogger("busload")

WITHIN = 40.0
"""Seconds that announcing may take: whoever does it holds its loads for a minute."""

LONGEST_PAUSE = 300.0

MOST_MESSAGES = 1000
"""Messages that are published by one call: transports allow it ten seconds."""

MOST_OF_A_PAGE = 20_000
"""Messages of one page, so that a broker that is not quick has taken them all in time."""

MOST_BYTES = 4 * 1024 * 1024
"""Bytes of payloads that are read and published at a time, unless one command has more."""

LONGEST_SILENCE, FORGOTTEN = 60.0, 120.0
"""Seconds for which a silent queue is left alone at most, and after which it does not matter that it was silent."""

DECLARED_WITHIN = 10.0
"""Seconds for a queue to be made or found, also if others are before it."""

DIGEST = 12
"""Hex digits that tell messages about the same first and last command apart."""

VANISHED = Refusal(RefusalReason.REFUSED, "There is no such command in the database any more.")


class Announcer:
    """Announces loads on one transport: as envelopes of many ids, or with a message per command for foreign readers."""

    def __init__(
        self,
        transport: Transport,
        perform: Callable[[Plan[Any]], Coroutine[Any, Any, Any]],
        *,
        prefix: str,
        envelope_size: int,
        message_per_command: bool = False,
        key: bytes | None = None,
    ) -> None:
        self.transport = transport
        self._perform = perform
        self._prefix, self._size, self.key = prefix, envelope_size, key
        self._per_command = message_per_command
        if key is not None:
            message.keys(key)  # says so now if it is unusable
        self._declared: set[str] = set()
        self._silence = Silence()
        self._heard_again = False
        self._database: str | None = None
        self.messages = self.confirmed = 0
        """Messages that were handed to the broker, and those it has confirmed."""
        self.refused: Counter[str] = Counter()
        """The others, by reason."""

    def queue(self, domain: str) -> str:
        return f"{self._prefix}.{domain}"

    @property
    def page(self) -> int:
        """Loads to announce together: none has to wait because the messages of the others take too long."""
        return max(1, min(outbox.MOST, MOST_OF_A_PAGE * (1 if self._per_command else self._size) // LOAD_SIZE))

    def is_stuck(self, domain: str) -> bool:
        """Whether its queue is silent while others answer, so that the broker is not away."""
        return self._silence.is_stuck(self.queue(domain))

    @property
    def left_alone(self) -> list[str]:
        """Domains whose queues are stuck, and not to be tried for now."""
        return [queue.removeprefix(f"{self._prefix}.") for queue in self._silence.left_alone()]

    def heard_again(self) -> bool:
        """Whether a queue that was stuck has answered since this was asked last: then nothing needs to wait for it."""
        heard, self._heard_again = self._heard_again, False
        return heard

    async def announce(self, loads: Sequence[Unannounced], *, again: bool = False) -> list[Piece]:
        """What became of the messages about these loads. Never fails: what nobody confirmed is told as refused.

        `again`: they were announced before, and nobody came; a broker must not take that for the same message.
        """
        page = _Page(loads, again=again)
        queues = {self.queue(load.domain) for load in loads}
        page.unusable |= {queue: why for queue, why in self._silence.left_alone().items() if queue in queues}
        if (away := page.away(queues)) is not None:
            return page.told(away)
        left = VANISHED
        try:
            if self._database is None:
                async with asyncio.timeout_at(page.deadline):
                    self._database = await self._perform(outbox.identity())
            async with aclosing(self._slices(page)) as slices:
                async for envelopes in slices:
                    await self._announce(page, envelopes)
                    if (away := page.away(queues)) is not None:
                        left = away
                        break
        except TimeoutError:
            left = Refusal(RefusalReason.UNREACHABLE, f"Reading and publishing all of it took more than {WITHIN:g} s.")
        except Exception as error:  # what is left untold would be held for a minute, and nobody would know why
            if not isinstance(error, psycopg.Error | BusloadError | OSError):
                log.exception("Could not read from the database what is to be announced")
            told = str(error) or type(error).__name__
            left = Refusal(RefusalReason.UNREACHABLE, f"The database could not be read for the message: {told}")
        return page.told(left)

    async def _slices(self, page: _Page) -> AsyncGenerator[list[Envelope], None]:
        """What the messages say, a thousand of them at most at a time, and no more payloads than fit into memory."""
        loads = page.loads
        if not self._per_command:
            envelopes = message.envelopes([(load.lo, load.hi, load.domain) for load in loads], self._size)
            while some := list(islice(envelopes, MOST_MESSAGES)):
                yield some
            return
        for ranges in _in_ranges(loads):
            async with asyncio.timeout_at(page.deadline):
                sizes = await self._perform(outbox.sizes(ranges))
            for ids in _by_bytes(sizes):
                async with asyncio.timeout_at(page.deadline):
                    rows = await self._perform(outbox.commands([(id, id) for id in ids]))
                if rows:
                    yield [_of_one(*row) for row in rows]

    async def _announce(self, page: _Page, envelopes: Sequence[Envelope]) -> None:
        messages: dict[int, Message] = {}
        refused: dict[int, Refusal] = {}
        for index, envelope in enumerate(envelopes):
            try:
                messages[index] = self._message(envelope, page.rounds if page.again else {})
            except PayloadRefused as error:
                refused[index] = Refusal(RefusalReason.TOO_LARGE, f"It does not fit into a message: {error}")
        if messages:
            began = time.monotonic()
            indexes = list(messages)
            theirs = await self._publish(list(messages.values()), page)
            refused |= {indexes[n]: why for n, why in theirs.items()}
            self._learn(page, messages, refused, began)
        self.messages += len(envelopes)
        self.confirmed += len(envelopes) - len(refused)
        self.refused.update(str(refusal.reason) for refusal in refused.values())
        for index, envelope in enumerate(envelopes):
            page.tell(envelope.ranges, refused.get(index))

    def _learn(self, page: _Page, messages: dict[int, Message], refused: dict[int, Refusal], began: float) -> None:
        """Which queues answer. One that does not is asked once per page, and while others do, not in each page."""
        heard = {each.queue for n, each in messages.items() if n not in refused}
        silent = {
            each.queue: refused[n]
            for n, each in messages.items()
            if each.queue not in heard
            and each.queue not in page.unusable
            and refused[n].reason is RefusalReason.UNREACHABLE
        }
        self._heard_again |= self._silence.learn(heard, silent, began)
        page.unusable |= silent

    def _message(self, envelope: Envelope, rounds: dict[int, int]) -> Message:
        """Its id says what it is about, or a broker would take it for the repetition of another message: the database,
        as a broker may serve two, and if there are gaps between the first and the last command, a digest."""
        first, last = envelope.ranges[0][0], envelope.ranges[-1][1]
        id = f"{self._database}-{first}-{last}-{rounds.get(last >> 10, 0)}"
        if len(envelope.ranges) > 1:
            id += f"-{hashlib.sha256(repr(envelope.ranges).encode()).hexdigest()[:DIGEST]}"
        return Message(self.queue(envelope.domain), id, message.write(envelope, self.key))

    async def _publish(self, messages: Sequence[Message], page: _Page) -> dict[int, Refusal]:
        """A queue that cannot be used refuses its own messages; the others are published."""
        try:
            async with asyncio.timeout_at(page.deadline):
                silent = await self._declare({each.queue for each in messages}, page.unusable)
                unusable = page.unusable | silent
                refused = {n: why for n, each in enumerate(messages) if (why := unusable.get(each.queue))}
                usable = [n for n in range(len(messages)) if n not in refused]
                if usable:
                    theirs = await self._hand_over([messages[n] for n in usable])
                    refused |= {usable[n]: why for n, why in theirs.items()}
            return refused
        except (TransportError, TimeoutError, OSError) as error:
            return dict.fromkeys(range(len(messages)), _unreachable(error))
        except Exception as error:  # an adapter's fault must not end the relay
            log.exception("The transport %s failed in a way that it should not", self.transport.name)
            return dict.fromkeys(range(len(messages)), Refusal(RefusalReason.REFUSED, type(error).__name__))

    async def _declare(self, queues: set[str], unusable: dict[str, Refusal]) -> dict[str, Refusal]:
        """Each by itself, so that none has to wait for another; returns those that could not be reached."""
        missing = sorted(queues - self._declared - unusable.keys())
        found = await asyncio.gather(*map(self._declare_one, missing), return_exceptions=True)
        silent: dict[str, Refusal] = {}
        for queue, error in zip(missing, found, strict=True):
            if error is None:
                self._declared.add(queue)
            elif isinstance(error, TransportMisconfigured):
                unusable[queue] = Refusal(RefusalReason.REFUSED, str(error))
            elif isinstance(error, TransportError | OSError):
                silent[queue] = _unreachable(error)
            else:
                raise error
        return silent

    async def _declare_one(self, queue: str) -> None:
        async with asyncio.timeout(DECLARED_WITHIN):
            await self.transport.declare([queue])

    async def _hand_over(self, messages: Sequence[Message]) -> dict[int, Refusal]:
        try:
            await self.transport.publish(messages)
        except PublishFailed as failed:
            if any(refusal.reason is RefusalReason.UNROUTABLE for refusal in failed.refused.values()):
                self._declared.clear()  # somebody has removed a queue
            return failed.refused
        except TransportMisconfigured as error:
            self._declared -= {each.queue for each in messages}
            return dict.fromkeys(range(len(messages)), Refusal(RefusalReason.REFUSED, str(error)))
        return {}


@dataclass(slots=True)
class _Silent:
    since: float
    why: Refusal
    last: float = 0.0
    tries: int = 0
    until: float = 0.0


class Silence:
    """Queues that do not answer while others do, say because they have no leader: each is left alone for a while, which
    grows, or those who wait for it in vain would hold up the others.

    As long as nobody has answered since a queue fell silent, the broker may be away: then no queue is left alone.
    """

    def __init__(self) -> None:
        self._answered_at = -math.inf
        self._silent: dict[str, _Silent] = {}

    def is_stuck(self, queue: str) -> bool:
        return queue in self._silent and self._silent[queue].tries > 0

    def left_alone(self) -> dict[str, Refusal]:
        """The queues that are not to be tried now, and what was said when they were."""
        now = time.monotonic()
        return {queue: one.why for queue, one in self._silent.items() if now < one.until}

    def learn(self, heard: Iterable[str], silent: Mapping[str, Refusal], began: float) -> bool:
        """Which queues have answered, and which have not, since `began`; whether one that was stuck has."""
        now, stuck = time.monotonic(), False
        for queue in heard:
            self._answered_at = now
            stuck |= self.is_stuck(queue)
            self._silent.pop(queue, None)
        for queue, why in silent.items():
            one = self._silent.get(queue)
            if one is None or now - one.last > FORGOTTEN:
                one = self._silent[queue] = _Silent(began, why)
            one.why, one.last = why, now
            if self._answered_at >= one.since:
                one.until = now + min(pause(one.tries), LONGEST_SILENCE)
                one.tries += 1
        return stuck


class _Page:
    """Loads that are announced together, and what is known of each command's message so far."""

    def __init__(self, loads: Sequence[Unannounced], *, again: bool) -> None:
        self.loads, self.again = loads, again
        self.rounds = {load.hi >> 10: load.rounds for load in loads}
        self.deadline = asyncio.get_running_loop().time() + WITHIN
        self.unusable: dict[str, Refusal] = {}
        """Queues that the broker does not let us use, or that do not answer; they are not tried again for this page."""
        self._pieces: list[Piece] = []

    def away(self, queues: Iterable[str]) -> Refusal | None:
        """What was said, if none of these queues answers: then the rest need not be tried."""
        why = [self.unusable.get(queue) for queue in queues]
        return why[0] if all(one is not None and one.reason is RefusalReason.UNREACHABLE for one in why) else None

    def tell(self, ranges: Iterable[tuple[int, int]], refusal: Refusal | None) -> None:
        for lo, hi in ranges:
            if refusal is None:
                self._pieces.append(Piece(lo, hi))
            else:
                wait = pause(self.rounds.get(hi >> 10, 0), refusal.after)
                self._pieces.append(
                    Piece(lo, hi, str(refusal.reason), storable(refusal.message, 1000), wait, refusal.after)
                )

    def told(self, left: Refusal) -> list[Piece]:
        """All of it; what nobody has told about yet fared like `left`. A load counts only if it is told as a whole."""
        self.tell(list(self._untold()), left)
        return list(_joined(self._pieces))

    def _untold(self) -> Iterator[tuple[int, int]]:
        told: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for lo, hi in sorted((piece.lo, piece.hi) for piece in self._pieces):
            told[hi >> 10].append((lo, hi))
        for load in self.loads:
            next_one = load.lo
            for lo, hi in told[load.hi >> 10]:
                if load.lo <= lo <= load.hi:
                    if next_one < lo:
                        yield next_one, lo - 1
                    next_one = hi + 1
            if next_one <= load.hi:
                yield next_one, load.hi


def _in_ranges(loads: Iterable[Unannounced]) -> Iterator[list[tuple[int, int]]]:
    """Ids of a thousand commands at a time."""
    for envelope in message.envelopes([(load.lo, load.hi, "") for load in loads], MOST_MESSAGES):
        yield list(envelope.ranges)


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


def pause(rounds: int, asked: float | None = None) -> float:
    """Seconds before the next round: doubling up to five minutes, not all at once, and no less than the broker asks."""
    doubled = min(2.0 ** min(rounds, 16), LONGEST_PAUSE)
    return max(doubled * random.uniform(0.8, 1.2), asked or 0.0)  # noqa: S311 - spreads rounds out, hides nothing


def _joined(pieces: Iterable[Piece]) -> Iterable[Piece]:
    """Neighbours in a load that fared alike, as one."""
    last: Piece | None = None
    for piece in sorted(pieces, key=lambda piece: piece.lo):
        alike = (
            last is not None
            and last.hi + 1 == piece.lo
            and last.hi >> 10 == piece.lo >> 10
            and (last.reason, last.error) == (piece.reason, piece.error)
        )
        if last is not None and alike:
            wait, after = max(last.pause, piece.pause), max(last.after or 0.0, piece.after or 0.0) or None
            last = Piece(last.lo, piece.hi, last.reason, last.error, wait, after)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _of_one(
    id: int,
    domain: str,
    command_id: Any,
    command_type: str,
    data: str | None,
    batch_id: Any,
    task_key: str | None,
    job_id: Any,
    stage: str | None,
) -> Envelope:
    return message.of_one(
        domain,
        id,
        command_id,
        command_type,
        None if data is None else decode(data),
        batch_id=batch_id,
        task_key=task_key,
        job_id=job_id,
        stage=stage,
    )
