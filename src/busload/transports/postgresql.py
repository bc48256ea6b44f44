"""PostgreSQL as the broker: for a database beside the one with the commands, and to try a broker without having one.

    postgresql://user:password@host:5432/database?visibility=30

Without any transport the rows of the queue are the messages, which is simpler; this one is not needed for that. The
database needs busload's schema.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import psycopg

from busload.errors import Refusal, TransportError, TransportMisconfiguredError, TransportUnavailableError
from busload.postgres.connection import PARAMETERS, AsyncConnection, is_away, is_refused
from busload.postgres.listen import MESSAGE, AsyncListener
from busload.postgres.own_connection import OwnAsyncConnection
from busload.postgres.plan import Row, execute, perform_async
from busload.postgres.statements import statements
from busload.transports.base import LoopLock, Message
from busload.transports.broker import TIMEOUT, Broker, Consumer, HeldMessage, said
from busload.transports.url import connect_timeout, read_libpq_url, seconds

SQL = statements(__name__)

LOOK_EVERY = 1.0
"""Seconds after which a receiver looks though it has heard nothing: a notification is only a hint."""


class PostgresBroker(Broker):
    """A broker inside of a PostgreSQL.

    Options of its URL, besides those of libpq: `timeout`, the seconds within which a call must succeed (10), and
    `visibility`, the seconds after which a message comes again if its holder is gone (30).
    """

    application_name = PARAMETERS["application_name"]

    def __init__(self, url: str, read_visibility: Callable[[str], float] = seconds) -> None:
        super().__init__(url)
        self.dsn, options = read_libpq_url(url, {"timeout": seconds, "visibility": read_visibility})
        self.timeout: float = options.get("timeout", TIMEOUT)
        self.visibility: float = options.get("visibility", 30)
        self._lock = LoopLock()
        self._conn: AsyncConnection | None = None

    async def disconnect(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            await conn.close()

    async def new_connection(self) -> AsyncConnection:
        parameters = PARAMETERS | {
            "application_name": self.application_name,
            "connect_timeout": connect_timeout(self.dsn, self.timeout),
        }
        return await OwnAsyncConnection.connect(self.dsn, autocommit=True, prepare_threshold=None, **parameters)

    async def run(self, conn: AsyncConnection, statement: bytes, **params: Any) -> list[Row]:
        """A connection on which a statement does not end in time is closed."""
        try:
            async with self.in_time():
                return await perform_async(conn, execute(statement, **params))
        except TimeoutError:
            await conn.close()
            raise


class PostgresqlTransport(PostgresBroker):
    name = "postgresql"
    title = "PostgreSQL"
    lost = (psycopg.Error,)
    max_bytes = 1024 * 1024

    async def declare(self, queues: Sequence[str]) -> None:
        """A queue is only a name here: what must exist is the table."""
        found = await self.rows(SQL.privileges)
        if not found:
            raise TransportMisconfiguredError(
                "The database of the transport has no table busload.message. Run `busload schema migrate` on it."
            )
        [(missing,)] = found
        if missing:
            raise TransportMisconfiguredError(
                f"The user of the transport lacks {', '.join(missing)} on busload.message."
            )

    async def publish_fitting(self, messages: Mapping[int, Message]) -> dict[int, Refusal]:
        queues, ids, bodies = zip(*((each.queue, each.id, each.body) for each in messages.values()), strict=True)
        await self.rows(SQL.publish, queues=list(queues), ids=list(ids), bodies=list(bodies))
        return {}

    async def consumer(self, queue: str, prefetch: int) -> PostgresqlConsumer:
        return PostgresqlConsumer(self, queue, prefetch)

    async def depth(self, queue: str) -> int | None:
        [(count,)] = await self.rows(SQL.depth, queue=queue)
        return int(count)

    async def peek(self, queue: str, *, limit: int) -> list[bytes] | None:
        return [bytes(body) for (body,) in await self.rows(SQL.peek, queue=queue, limit=limit)]

    def translation(self, error: Exception, queue: str | None) -> TransportError:
        if isinstance(error, psycopg.Error) and is_away(error) and not is_refused(error):
            return TransportUnavailableError(f"PostgreSQL cannot be reached: {said(error)}")
        return TransportMisconfiguredError(f"PostgreSQL refuses us: {said(error)}")

    async def rows(self, statement: bytes, **params: Any) -> list[Row]:
        with self.translated():
            async with self.in_time(), self._lock():
                if self._conn is None or self._conn.closed:
                    self._conn = await self.new_connection()
            return await self.run(self._conn, statement, **params)


class PostgresqlConsumer(Consumer[tuple[str, int]]):
    """A message is held under its id and the number of its delivery: a late holder settles nothing."""

    lost = (TransportError, TimeoutError)

    def __init__(self, transport: PostgresqlTransport, queue: str, prefetch: int) -> None:
        super().__init__(queue, prefetch)
        self._transport, self.loan_for = transport, transport.visibility
        self._heard = asyncio.Event()
        self._listening = asyncio.create_task(AsyncListener(transport.dsn, [MESSAGE], self._hear).run())

    async def take(self, room: int) -> list[HeldMessage[tuple[str, int]]]:
        self._heard.clear()
        taken = await self._transport.rows(SQL.take, queue=self.queue, limit=room, seconds=self.loan_for)
        messages = [self.hold((id, number), bytes(body)) for id, number, body in taken]
        if not messages:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY):
                    await self._heard.wait()
        return messages

    async def tell_settled(self, key: tuple[str, int], reason: str | None) -> None:
        """Unless the message was delivered again meanwhile: then it is another one's."""
        id, number = key
        await self._transport.rows(SQL.forget, queue=self.queue, id=id, deliveries=number)

    async def renew(self, keys: Sequence[tuple[str, int]]) -> None:
        await self._transport.rows(SQL.renew, **self._these(keys), seconds=self.loan_for)

    async def give_back(self, keys: Sequence[tuple[str, int]]) -> None:
        if keys:
            await self._transport.rows(SQL.release, **self._these(keys))

    async def disconnect(self) -> None:
        self._heard.set()
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)

    def _hear(self, channel: str | None, queue: str | None) -> None:
        if queue is None or queue == self.queue:
            self._heard.set()

    def _these(self, keys: Sequence[tuple[str, int]]) -> dict[str, Any]:
        ids, numbers = zip(*keys, strict=True)
        return {"queue": self.queue, "ids": list(ids), "deliveries": list(numbers)}
