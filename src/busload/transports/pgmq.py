"""PGMQ: queues inside of a PostgreSQL, by the functions of that extension.

    pgmq://user:password@host:5432/database
    pgmq:///database?host=/var/run/postgresql

A message is invisible to others while it is on loan, for a time that we prolong. PGMQ knows no duplicates, which does
no harm: the database decides what runs.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import psycopg
from psycopg import errors, sql

from busload.errors import (
    Refusal,
    RefusalReason,
    TransportError,
    TransportMisconfiguredError,
    TransportUnavailableError,
)
from busload.postgres.connection import AsyncConnection, is_refused
from busload.postgres.plan import Row
from busload.transports.base import Message, hashed_name
from busload.transports.broker import Consumer, HeldMessage, by_queue, said
from busload.transports.postgresql import PostgresBroker
from busload.transports.url import whole_number

LOST = (TimeoutError, psycopg.Error, OSError)

LONGEST_NAME = 47
"""PGMQ makes names of tables and indexes from the name of a queue."""

SOONEST, LATEST = 0.02, 0.5
"""Seconds between two looks into a queue: the longer it was empty, the rarer."""

EXISTING = b"SELECT queue_name, is_unlogged FROM pgmq.meta WHERE queue_name = ANY(%(queues)s::text[])"
CREATE = b"SELECT pgmq.create(%(queue)s::text)"
SEND = b"SELECT pgmq.send_batch(%(queue)s::text, %(messages)s::jsonb[])"
READ = b"SELECT msg_id, message FROM pgmq.read(%(queue)s::text, %(seconds)s::integer, %(limit)s::integer)"
SHOW_IN = (
    b"SELECT pgmq.set_vt(%(queue)s::text, id, %(seconds)s::integer) FROM pg_catalog.unnest(%(ids)s::bigint[]) AS id"
)
DELETE = b"SELECT pgmq.delete(%(queue)s::text, %(id)s::bigint)"
ARCHIVE = b"SELECT pgmq.archive(%(queue)s::text, %(id)s::bigint)"
LENGTH = b"SELECT queue_length FROM pgmq.metrics(%(queue)s::text)"
PEEK = "SELECT message FROM pgmq.{queue} ORDER BY msg_id LIMIT %(limit)s::bigint"


class PgmqTransport(PostgresBroker):
    """Queues of PGMQ. The option `visibility` is a whole number here."""

    name = "pgmq"
    title = "PGMQ's PostgreSQL"
    application_name = "busload pgmq"
    lost = LOST
    max_bytes = 16 * 1024 * 1024

    def __init__(self, url: str) -> None:
        super().__init__(url, whole_number(1, 86_400))

    async def declare(self, queues: Sequence[str]) -> None:
        if not queues:
            return
        names = {self.spelled(queue): queue for queue in queues}
        with self.translated():
            there: dict[str, bool] = dict(await self._ask(EXISTING, queues=list(names)))
            for name in names.keys() - there.keys():
                if name in self.existing:
                    raise TransportMisconfiguredError(
                        f"PGMQ has no queue {name!r}. Make it with `SELECT pgmq.create('{name}')`, or leave it out of "
                        "queues=."
                    )
                await self._ask(CREATE, queue=name)
        for name in (name for name, unlogged in there.items() if unlogged):
            raise TransportMisconfiguredError(
                f"The queue {name!r} of PGMQ, for {names[name]!r}, is unlogged: a crash of PostgreSQL would empty it. "
                f"Wanted a logged queue: drop it with `SELECT pgmq.drop_queue('{name}')`, and busload makes it anew."
            )

    async def publish_fitting(self, messages: Mapping[int, Message]) -> dict[int, Refusal]:
        refused: dict[int, Refusal] = {}
        for queue, some in by_queue(messages).items():
            if refusal := await self._send(queue, some):
                refused |= dict.fromkeys(some, refusal)
        return refused

    async def consumer(self, queue: str, prefetch: int) -> PgmqConsumer:
        async with self.in_time():
            return PgmqConsumer(queue, prefetch, await self.new_connection(), self)

    async def depth(self, queue: str) -> int | None:
        with self.translated(queue):
            if not await self._exists(queue):
                return 0
            [[length]] = await self._ask(LENGTH, queue=self.spelled(queue))
            return cast(int, length)

    async def peek(self, queue: str, *, limit: int) -> list[bytes] | None:
        table = sql.Identifier(f"q_{self.spelled(queue)}")
        with self.translated(queue):
            if not await self._exists(queue):
                return []
            rows = await self._ask(sql.SQL(PEEK).format(queue=table).as_bytes(), limit=limit)
            return [unwrapped(content) for [content] in rows]

    def translation(self, error: Exception, queue: str | None) -> TransportError:
        match error:
            case errors.UndefinedTable() if "pgmq.meta" not in str(error):
                return TransportMisconfiguredError(
                    f"A queue of PGMQ does not exist: {said(error)}. Make it with `SELECT pgmq.create(...)`, or start "
                    "a worker, which makes it."
                )
            case errors.UndefinedTable() | errors.UndefinedFunction() | errors.InvalidSchemaName():
                return TransportMisconfiguredError(
                    f"This database has no PGMQ that we can use: {said(error)}. Install it with `CREATE EXTENSION "
                    "pgmq`, or with the SQL of the package `pgmq`: `python -c 'from pgmq.install import "
                    'install_pgmq_from_sql; install_pgmq_from_sql(dsn="...")\'`.'
                )
            case errors.InsufficientPrivilege():
                return TransportMisconfiguredError(f"PGMQ refuses us: {said(error)}. Grant it, or use another user.")
            case psycopg.OperationalError() if is_refused(error):
                return TransportMisconfiguredError(f"{self.title} refuses to let us in: {said(error)}")
            case _:
                return TransportUnavailableError(f"{self.title} cannot be reached: {said(error)}")

    async def _send(self, queue: str, messages: Mapping[int, Message]) -> Refusal | None:
        """Send all messages of a queue by one statement; return why none of them was taken, if so."""
        try:
            with self.translated(queue):
                await self._ask(SEND, queue=self.spelled(queue), messages=[wrapped(each) for each in messages.values()])
        except TransportUnavailableError as error:
            return Refusal(RefusalReason.UNREACHABLE, str(error))
        except TransportMisconfiguredError as error:
            missing = isinstance(error.__context__, errors.UndefinedTable)
            return Refusal(RefusalReason.UNROUTABLE if missing else RefusalReason.REFUSED, str(error))
        return None

    def spelled(self, queue: str) -> str:
        return queue if queue in self.existing else spelled(queue)

    async def _exists(self, queue: str) -> bool:
        return bool(await self._ask(EXISTING, queues=[self.spelled(queue)]))

    async def _ask(self, statement: bytes, **params: Any) -> list[Row]:
        """On the connection for everything but deliveries; on a new connection if the first died while it rested."""
        async with self._lock():
            if self._conn and not self._conn.closed:
                try:
                    return await self.run(self._conn, statement, **params)
                except psycopg.OperationalError:
                    if not self._conn.closed:
                        raise
            async with self.in_time():
                self._conn = await self.new_connection()
            return await self.run(self._conn, statement, **params)


class PgmqConsumer(Consumer[int]):
    """On a connection of its own. PGMQ hides what is on loan for a while."""

    lost = LOST

    def __init__(self, queue: str, prefetch: int, conn: AsyncConnection, transport: PgmqTransport) -> None:
        super().__init__(queue, prefetch)
        self._conn, self._transport, self.loan_for = conn, transport, transport.visibility
        self._pause = SOONEST

    async def take(self, room: int) -> list[HeldMessage[int]]:
        """Finish also when cancelled: what was read is on loan, and has to be given back."""
        reading = asyncio.ensure_future(self._run(READ, seconds=self.loan_for, limit=room))
        try:
            rows = await asyncio.shield(reading)
        except asyncio.CancelledError:
            with suppress(Exception):
                self._hold_all(await reading)
            raise
        self._pause = SOONEST if rows else min(2 * self._pause, LATEST)
        if not rows:
            await asyncio.sleep(self._pause)
        return self._hold_all(rows)

    def _hold_all(self, rows: Sequence[tuple[int, Any]]) -> list[HeldMessage[int]]:
        return [self.hold(id, unwrapped(content)) for id, content in rows]

    async def tell_settled(self, key: int, reason: str | None) -> None:
        await self._run(DELETE if reason is None else ARCHIVE, id=key)

    async def renew(self, keys: Sequence[int]) -> None:
        await self._run(SHOW_IN, ids=list(keys), seconds=self.loan_for)

    async def give_back(self, keys: Sequence[int]) -> None:
        await self._run(SHOW_IN, ids=list(keys), seconds=0)

    async def check(self) -> None:
        if self._conn.closed:  # a renewal has found out
            raise psycopg.OperationalError("the connection is closed")

    async def disconnect(self) -> None:
        await self._conn.close()

    async def _run(self, statement: bytes, **params: Any) -> list[Row]:
        return await self._transport.run(self._conn, statement, queue=self._transport.spelled(self.queue), **params)


def spelled(queue: str) -> str:
    """A queue's name as PGMQ takes it: `busload.payments` is `busload_payments`, one that would not fit is hashed."""
    if re.fullmatch(r"busload\.[a-z0-9_]+", queue) and len(queue) <= LONGEST_NAME:
        return queue.replace(".", "_")
    return re.sub(r"[^a-z0-9_]", "_", hashed_name(queue, LONGEST_NAME, "_", digits=12).lower())


def wrapped(message: Message) -> str:
    """As JSON, which is all that PGMQ carries. As text it can be read in psql, and comes back byte by byte."""
    try:
        text = message.body.decode()
    except UnicodeDecodeError:
        text = "\x00"
    if "\x00" in text:  # jsonb cannot hold it
        return json.dumps({"id": message.id, "base64": base64.b64encode(message.body).decode()})
    return json.dumps({"id": message.id, "text": text}, ensure_ascii=False)


def unwrapped(content: Any) -> bytes:
    """The body; of a message that is not ours, its JSON: whoever reads it will reject it."""
    match content:
        case {"text": str(text)}:
            return text.encode()
        case {"base64": str(code)}:
            with suppress(ValueError):
                return base64.b64decode(code, validate=True)
    return json.dumps(content).encode()
