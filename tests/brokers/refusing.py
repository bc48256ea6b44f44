"""A broker that refuses messages or takes its user down: PostgreSQL's own, with faults on demand."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from busload.domain import message
from busload.domain.message import Envelope
from busload.errors import PublishFailed, Refusal, RefusalReason
from busload.transport import Message
from busload.transport.postgresql import PostgresqlTransport

AWAY = Refusal(RefusalReason.UNREACHABLE, "nobody answers")


class Crash(BaseException):
    """The process is gone: nothing of it runs on, not even what catches every error."""


class RefusingTransport(PostgresqlTransport):
    """Publishes what it is not told to refuse; `refuses` tells of the message with a number, counted over its life."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.refuses: Callable[[int], Refusal | None] = lambda number: None
        self.before: Callable[[], Awaitable[None]] | None = None
        self.offered = 0
        self.published: list[Message] = []

    async def publish(self, messages: Sequence[Message]) -> None:
        if self.before is not None:
            await self.before()
        found = {index: self.refuses(self.offered + index) for index in range(len(messages))}
        refused = {index: refusal for index, refusal in found.items() if refusal is not None}
        self.offered += len(messages)
        taken = [each for index, each in enumerate(messages) if index not in refused]
        if taken:
            await super().publish(taken)
        self.published += taken
        if refused:
            raise PublishFailed(refused)

    def is_away(self) -> None:
        self.refuses = lambda number: AWAY

    def is_back(self) -> None:
        self.refuses = lambda number: None

    @property
    def envelopes(self) -> list[Envelope]:
        return [message.read(each.body) for each in self.published]

    @property
    def commands(self) -> int:
        """How many commands the messages it took are about, each repetition counted."""
        return sum(envelope.commands for envelope in self.envelopes)
