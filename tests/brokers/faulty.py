"""A broker that fails as it is told to: PostgreSQL's transport, with a switch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from busload.dispatch import envelope as message
from busload.dispatch.envelope import Envelope
from busload.dispatch.publish import Publisher
from busload.errors import PublishError, Refusal, RefusalReason, TransportUnavailableError
from busload.transports.base import Delivery, Message
from busload.transports.postgresql import PostgresqlTransport

AWAY = Refusal(RefusalReason.UNREACHABLE, "nobody answers")


def forget_unresponsive(publisher: Publisher) -> None:
    """The time is over for which queues that do not answer are left alone."""
    for one in publisher._unresponsive._queues.values():
        one.until = 0.0


class Crash(BaseException):
    """The process is gone: nothing of it runs on, not even what catches every error."""


class FaultyTransport(PostgresqlTransport):
    """`pull` the plug, or `refuse` messages; `mend` ends both. `before` is awaited before each publishing.

    `refuses` says of each message, by its index in the call, whether it is confirmed. `unusable` says of each queue
    whether it can be declared, and with which error it cannot.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._away = asyncio.Event()
        self.refuses: Callable[[int, Message], Refusal | None] = lambda index, message: None
        self.unusable: Callable[[str], Exception | None] = lambda queue: None
        self.before: Callable[[], Awaitable[None]] | None = None
        self.declared: list[str] = []
        self.tried: list[Message] = []
        self.confirmed: list[Message] = []
        self.sizes: list[int] = []
        """How many messages each call of `publish` has had."""

    def pull(self) -> None:
        """Nothing answers any more, neither to those who declare nor to those who receive."""
        self._away.set()

    def refuse(self, refusal: Refusal = AWAY, *numbers: int) -> None:
        """Messages with these numbers, counted by `tried`; or all."""
        self.refuses = lambda index, message: refusal if not numbers or len(self.tried) + index in numbers else None

    def mend(self) -> None:
        self._away.clear()
        self.refuses = lambda index, message: None

    async def declare(self, queues: Sequence[str]) -> None:
        self._refuse_if_away()
        self.declared += queues
        for queue in queues:
            if error := self.unusable(queue):
                raise error
        await super().declare(queues)

    async def publish(self, messages: Sequence[Message]) -> None:
        if self.before is not None:
            await self.before()
        refused = {n: AWAY if self._away.is_set() else self.refuses(n, each) for n, each in enumerate(messages)}
        self.sizes.append(len(messages))
        self.tried += messages
        taken = [each for n, each in enumerate(messages) if refused[n] is None]
        if taken:
            await super().publish(taken)
            self.confirmed += taken
        why = {n: refusal for n, refusal in refused.items() if refusal is not None}
        if why:
            raise PublishError(why)

    async def deliveries(self, queue: str, *, prefetch: int) -> AsyncIterator[Delivery]:
        self._refuse_if_away()
        theirs = super().deliveries(queue, prefetch=prefetch)
        away = asyncio.create_task(self._away.wait())
        try:
            while True:
                coming = asyncio.ensure_future(anext(theirs))
                try:
                    await asyncio.wait([coming, away], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not coming.done():
                        coming.cancel()
                        await asyncio.gather(coming, return_exceptions=True)
                self._refuse_if_away()
                yield coming.result()
        finally:
            away.cancel()
            await asyncio.gather(away, return_exceptions=True)
            await theirs.aclose()  # type: ignore[attr-defined]

    @property
    def publishes(self) -> int:
        return len(self.sizes)

    @property
    def envelopes(self) -> list[Envelope]:
        return [message.read(each.body) for each in self.confirmed]

    @property
    def commands(self) -> int:
        """How many commands the confirmed messages are about, each repetition counted."""
        return sum(envelope.commands for envelope in self.envelopes)

    def _refuse_if_away(self) -> None:
        if self._away.is_set():
            raise TransportUnavailableError("the plug is pulled")
