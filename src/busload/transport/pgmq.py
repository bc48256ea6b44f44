"""PGMQ: queues inside of a PostgreSQL, by the functions of that extension.

    pgmq://user:password@host:5432/database
    pgmq:///database?host=/var/run/postgresql

A message is invisible to others while it is on loan, for a time that we prolong. PGMQ knows no duplicates, which does
no harm: a message is a doorbell.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, cast
from urllib.parse import parse_qsl, urlencode, urlsplit

import psycopg
from psycopg import AsyncConnection, errors, pq, sql

from busload.errors import (
    PublishFailed,
    Refusal,
    RefusalReason,
    TransportError,
    TransportMisconfigured,
    TransportUnavailable,
)
from busload.store.connection import is_turned_away
from busload.transport.base import Delivery, Message, Transport, Turn, hashed_name
from busload.transport.options import connect_timeout, read_options, refuse_open_password, seconds

log = logging.getLogger("busload.transport")

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
PEEK = "SELECT message FROM pgmq.{queue} ORDER BY msg_id LIMIT {limit}"


class PgmqTransport(Transport):
    """Queues of PGMQ.

    Options of the URL, besides those of libpq: `timeout`, the seconds within which a call must succeed (10), and
    `visibility`, the whole seconds after which a message comes again if its holder is gone (30).
    """

    name = "pgmq"
    max_bytes = 16 * 1024 * 1024

    def __init__(self, url: str) -> None:
        super().__init__(url)
        _check(url)
        options = read_options(url, {"timeout": seconds, "visibility": _whole_seconds, **_of_libpq()})
        self._timeout: float = options.pop("timeout", 10.0)
        self._visibility: int = options.pop("visibility", 30)
        self._conninfo = _conninfo(url)
        self._conn: _Line | None = None
        self._desks: set[_Desk] = set()
        self._turn = Turn()

    async def declare(self, queues: Sequence[str]) -> None:
        if not queues:
            return
        names = {spelled(queue): queue for queue in queues}
        async with self._translated():
            there: dict[str, bool] = dict(await self._ask(EXISTING, queues=list(names)))
            for name in names.keys() - there.keys():
                await self._ask(CREATE, queue=name)
        for name in (name for name, unlogged in there.items() if unlogged):
            raise TransportMisconfigured(
                f"The queue {name!r} of PGMQ, for {names[name]!r}, is unlogged: a crash of PostgreSQL would empty it. "
                f"Wanted a logged one: drop it with `SELECT pgmq.drop_queue('{name}')`, and busload makes it anew."
            )

    async def publish(self, messages: Sequence[Message]) -> None:
        refused: dict[int, Refusal] = {}
        by_queue: dict[str, dict[int, Message]] = {}
        for index, message in enumerate(messages):
            if len(message.body) > self.max_bytes:
                text = f"found {len(message.body)} bytes, wanted at most {self.max_bytes}"
                refused[index] = Refusal(RefusalReason.TOO_LARGE, text)
            else:
                by_queue.setdefault(message.queue, {})[index] = message
        for queue, some in by_queue.items():
            if refusal := await self._send(queue, some.values()):
                refused |= dict.fromkeys(some, refusal)
        if refused:
            raise PublishFailed(dict(sorted(refused.items())))

    async def deliveries(self, queue: str, *, prefetch: int) -> AsyncIterator[Delivery]:
        async with self._translated():
            desk = _Desk(queue, await self._connected(), self._visibility, prefetch)
        self._desks.add(desk)
        renewing = asyncio.create_task(desk.keep_renewing())
        try:
            async with self._translated():
                pause = SOONEST
                while True:
                    await desk.wait_for_room()
                    came = await desk.take()
                    for delivery in came:
                        yield delivery
                    pause = SOONEST if came else min(2 * pause, LATEST)
                    if not came:
                        await asyncio.sleep(pause)
        finally:
            self._desks.discard(desk)
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            await desk.close()

    async def depth(self, queue: str) -> int | None:
        async with self._translated():
            if not await self._is_there(queue):
                return 0
            [[length]] = await self._ask(LENGTH, queue=spelled(queue))
            return cast(int, length)

    async def peek(self, queue: str, *, limit: int) -> list[bytes] | None:
        table = sql.Identifier(f"q_{spelled(queue)}")
        async with self._translated():
            if not await self._is_there(queue):
                return []
            rows = await self._ask(sql.SQL(PEEK).format(queue=table, limit=sql.Literal(limit)))
            return [unwrapped(content) for [content] in rows]

    async def aclose(self) -> None:
        desks, self._desks = self._desks, set()
        for desk in desks:
            await desk.close()
        if line := self._conn:
            self._conn = None
            await line.close()

    # -- steps ----------------------------------------------------------------------------------------------------

    async def _send(self, queue: str, messages: Collection[Message]) -> Refusal | None:
        """Why none of them was taken, if so: one statement sends them all."""
        try:
            async with self._translated():
                await self._ask(SEND, queue=spelled(queue), messages=[wrapped(each) for each in messages])
        except TransportUnavailable as error:
            return Refusal(RefusalReason.UNREACHABLE, str(error))
        except TransportMisconfigured as error:
            missing = isinstance(error.__cause__, errors.UndefinedTable)
            return Refusal(RefusalReason.UNROUTABLE if missing else RefusalReason.REFUSED, str(error))
        return None

    async def _is_there(self, queue: str) -> bool:
        return bool(await self._ask(EXISTING, queues=[spelled(queue)]))

    async def _ask(self, statement: bytes | sql.Composed, **parameters: Any) -> list[Any]:
        """On the connection for everything but deliveries; on a new one, if it died while it rested."""
        async with self._turn():
            if self._conn and not self._conn.broken:
                try:
                    return await self._conn.run(statement, **parameters)
                except psycopg.OperationalError:
                    if not self._conn.broken:
                        raise
            self._conn = await self._connected()
            return await self._conn.run(statement, **parameters)

    async def _connected(self) -> _Line:
        async with asyncio.timeout(self._timeout):
            conn = await AsyncConnection.connect(
                self._conninfo,
                autocommit=True,
                application_name="busload pgmq",
                connect_timeout=connect_timeout(psycopg.conninfo.conninfo_to_dict(self._conninfo), self._timeout),
            )
            return _Line(conn, self._timeout)

    @asynccontextmanager
    async def _translated(self) -> AsyncIterator[None]:
        """What PostgreSQL says, in our errors. None of its texts holds a password."""
        try:
            yield
        except (TimeoutError, psycopg.Error, OSError) as error:
            raise _translation(error, self._timeout) from error


class _Line:
    """A connection on which each statement has to end in time."""

    def __init__(self, conn: AsyncConnection[Any], timeout: float) -> None:
        self._conn, self._timeout = conn, timeout

    @property
    def broken(self) -> bool:
        return self._conn.closed

    async def run(self, statement: bytes | sql.Composed, **parameters: Any) -> list[Any]:
        try:
            async with asyncio.timeout(self._timeout):
                return await (await self._conn.execute(statement, parameters or None)).fetchall()
        except TimeoutError:
            await self.close()
            raise

    async def close(self) -> None:
        await self._conn.close()


class _Desk:
    """What one consumer has on loan, on a connection of its own."""

    def __init__(self, queue: str, line: _Line, visibility: int, prefetch: int) -> None:
        self.queue = queue
        self._name = spelled(queue)
        self._line, self._visibility, self._prefetch = line, visibility, prefetch
        self._loans: dict[int, _Loan] = {}
        self._changed = asyncio.Event()

    async def wait_for_room(self) -> None:
        while len(self._loans) >= self._prefetch:
            if self._line.broken:
                raise psycopg.OperationalError("the connection is closed")
            self._changed.clear()
            await self._changed.wait()

    async def take(self) -> list[_Loan]:
        """Finish also when cancelled: what was read is on loan, and has to be given back."""
        room = self._prefetch - len(self._loans)
        reading = asyncio.ensure_future(self._line.run(READ, queue=self._name, seconds=self._visibility, limit=room))
        try:
            rows = await asyncio.shield(reading)
        except asyncio.CancelledError:
            with suppress(Exception):
                self._lend(await reading)
            raise
        return self._lend(rows)

    async def settle(self, loan: _Loan, statement: bytes, **parameters: Any) -> None:
        """If it fails, the message becomes visible by itself, and comes again."""
        if self._loans.get(loan.id) is not loan or loan.settled:
            return
        loan.settled = True
        try:
            await self._line.run(statement, queue=self._name, **parameters)
        except (TimeoutError, psycopg.Error, OSError) as error:
            log.debug("A message of %s comes again: it could not be settled, %s", self.queue, error)
        finally:
            self._loans.pop(loan.id, None)
            self._changed.set()

    async def keep_renewing(self) -> None:
        """At a third of the time, so that two renewals may fail before a message is seen elsewhere."""
        while not self._line.broken:
            await asyncio.sleep(self._visibility / 3)
            with suppress(TimeoutError, psycopg.Error, OSError):
                await self._show_in(self._visibility)
        self._changed.set()

    async def close(self) -> None:
        with suppress(TimeoutError, psycopg.Error, OSError):
            await self._show_in(0)
        self._loans.clear()
        await self._line.close()
        self._changed.set()

    async def _show_in(self, seconds: int) -> None:
        ids = [loan.id for loan in self._loans.values() if not loan.settled]
        # Without any, it is a look whether the connection lives.
        await self._line.run(SHOW_IN, queue=self._name, ids=ids, seconds=seconds)

    def _lend(self, rows: Sequence[tuple[int, Any]]) -> list[_Loan]:
        loans = [_Loan(self, id, content) for id, content in rows]
        self._loans |= {loan.id: loan for loan in loans}
        return loans


class _Loan(Delivery):
    def __init__(self, desk: _Desk, id: int, content: Any) -> None:
        self.queue, self.body = desk.queue, unwrapped(content)
        self.id = id
        self.settled = False
        self._desk = desk

    async def ack(self) -> None:
        await self._desk.settle(self, DELETE, id=self.id)

    async def reject(self, reason: str) -> None:
        log.warning("A message of %s was archived by PGMQ: %s", self.queue, reason)
        await self._desk.settle(self, ARCHIVE, id=self.id)


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


def _translation(error: Exception, timeout: float) -> TransportError:
    match error:
        case TimeoutError():
            return TransportUnavailable(f"PGMQ's PostgreSQL did not answer within {timeout:g} s.")
        case errors.UndefinedTable() if "pgmq.meta" not in str(error):
            return TransportMisconfigured(
                f"A queue of PGMQ is not there: {_said(error)}. Make it with `SELECT pgmq.create(...)`, or let a "
                "worker start, which does so."
            )
        case errors.UndefinedTable() | errors.UndefinedFunction() | errors.InvalidSchemaName():
            return TransportMisconfigured(
                f"This database has no PGMQ that we can use: {_said(error)}. Install it with `CREATE EXTENSION pgmq`, "
                "or with the SQL of the package `pgmq`: `python -c 'from pgmq.install import install_pgmq_from_sql; "
                'install_pgmq_from_sql(dsn="...")\'`.'
            )
        case errors.InsufficientPrivilege():
            return TransportMisconfigured(f"PGMQ refuses us: {_said(error)}. Grant it, or use another user.")
        case psycopg.OperationalError() if is_turned_away(error):
            return TransportMisconfigured(f"PGMQ's PostgreSQL does not let us in: {_said(error)}")
        case _:
            return TransportUnavailable(f"PGMQ's PostgreSQL cannot be reached: {_said(error)}")


def _said(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _of_libpq() -> Mapping[str, Any]:
    return {option.keyword.decode(): str for option in pq.Conninfo.get_defaults()}


def _check(url: str) -> None:
    """That it can be taken apart, by us and by libpq."""
    try:
        refuse_open_password(url)
        psycopg.conninfo.conninfo_to_dict(urlsplit(url)._replace(scheme="postgresql", query="").geturl())
    except (ValueError, psycopg.Error):
        raise TransportMisconfigured(
            "The URL of PGMQ cannot be read: wanted pgmq://user:password@host:5432/database, with special characters "
            "percent-encoded."
        ) from None


def _conninfo(url: str) -> str:
    """The URL for libpq, without what is ours."""
    parts = urlsplit(url)
    query = [(name, value) for name, value in parse_qsl(parts.query) if name not in ("timeout", "visibility")]
    return f"postgresql://{parts.netloc}{parts.path}?{urlencode(query)}"


def _whole_seconds(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 86_400:
        raise ValueError("wanted whole seconds, from 1 to 86400")
    return int(text)
