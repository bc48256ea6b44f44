"""Puts loads into messages, hands them to the broker, and says what became of each command's message."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from busload.domain import message
from busload.domain.message import Envelope
from busload.domain.payload import decode
from busload.errors import (
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
        self._declared: set[str] = set()
        self.messages = self.confirmed = 0
        """Messages that were handed to the broker, and those it has confirmed."""
        self.refused: Counter[str] = Counter()
        """The others, by reason."""

    def queue(self, domain: str) -> str:
        return f"{self._prefix}.{domain}"

    async def announce(self, loads: Sequence[Unannounced], *, again: bool = False) -> list[Piece]:
        """What became of the messages about these loads. Never fails: what nobody confirmed is told as refused.

        `again`: they were announced before, and nobody came; a broker must not take that for the same message.
        """
        envelopes = await self._envelopes(loads)
        rounds = {load.hi >> 10: load.rounds for load in loads}
        messages = [self._message(envelope, rounds if again else {}) for envelope in envelopes]
        refused = await self._publish(messages)
        self.messages += len(messages)
        self.confirmed += len(messages) - len(refused)
        self.refused.update(str(refusal.reason) for refusal in refused.values())
        pieces: list[Piece] = []
        for index, envelope in enumerate(envelopes):
            refusal = refused.get(index)
            for lo, hi in envelope.ranges:
                if refusal is None:
                    pieces.append(Piece(lo, hi))
                else:
                    wait = pause(rounds.get(hi >> 10, 0), refusal.after)
                    pieces.append(Piece(lo, hi, str(refusal.reason), refusal.message[:1000], wait))
        return list(_joined(pieces))

    async def _envelopes(self, loads: Sequence[Unannounced]) -> list[Envelope]:
        if not self._per_command:
            return list(message.envelopes([(load.lo, load.hi, load.domain) for load in loads], self._size))
        rows = await self._perform(outbox.commands([(load.lo, load.hi) for load in loads]))
        return [_of_one(*row) for row in rows]

    def _message(self, envelope: Envelope, rounds: dict[int, int]) -> Message:
        first, last = envelope.ranges[0][0], envelope.ranges[-1][1]
        again = rounds.get(last >> 10, 0)
        return Message(self.queue(envelope.domain), f"{first}-{last}-{again}", message.write(envelope, self.key))

    async def _publish(self, messages: Sequence[Message]) -> dict[int, Refusal]:
        try:
            async with asyncio.timeout(WITHIN):
                fresh = {each.queue for each in messages} - self._declared
                if fresh:
                    await self.transport.declare(sorted(fresh))
                    self._declared |= fresh
                await self.transport.publish(messages)
        except PublishFailed as failed:
            if any(refusal.reason is RefusalReason.UNROUTABLE for refusal in failed.refused.values()):
                self._declared.clear()  # somebody has removed a queue
            return failed.refused
        except TransportMisconfigured as error:
            return dict.fromkeys(range(len(messages)), Refusal(RefusalReason.REFUSED, str(error)))
        except (TransportError, TimeoutError, OSError) as error:
            told = str(error) or f"It did not answer within {WITHIN:g} s."
            return dict.fromkeys(range(len(messages)), Refusal(RefusalReason.UNREACHABLE, told))
        except Exception as error:  # an adapter's fault must not end the relay
            log.exception("The transport %s failed in a way that it should not", self.transport.name)
            return dict.fromkeys(range(len(messages)), Refusal(RefusalReason.REFUSED, type(error).__name__))
        return {}


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
            last = Piece(last.lo, piece.hi, last.reason, last.error, max(last.pause, piece.pause))
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
