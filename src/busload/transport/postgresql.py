"""PostgreSQL as the broker: for a database beside the one with the commands, and to try a broker without having one.

    postgresql://user:password@host:5432/database?visibility=30

Without any transport the rows of the queue are the messages, which is simpler; this one is not needed for that. The
database needs busload's schema.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

import psycopg
from psycopg.conninfo import conninfo_to_dict

from busload.domain.counted import counted
from busload.errors import (
    PublishFailed,
    Refusal,
    RefusalReason,
    TransportError,
    TransportMisconfigured,
    TransportUnavailable,
)
from busload.store import message as store
from busload.store.connection import PARAMETERS, AsyncConnection, OwnAsyncConnection, is_away, is_turned_away
from busload.store.listen import MESSAGE, AsyncListener
from busload.store.plan import Plan, perform_async
from busload.transport.base import Delivery, Message, Transport, Turn
from busload.transport.options import connect_timeout, read_options, refuse_open_password, seconds

log = logging.getLogger("busload")

T = TypeVar("T")

OWN_OPTIONS = {"visibility": seconds, "timeout": seconds}
VISIBILITY, TIMEOUT = 30.0, 10.0
LOOK_EVERY = 1.0
"""Seconds after which a receiver looks though it has heard nothing: a notification is only a hint."""


class PostgresqlTransport(Transport):
    name = "postgresql"
    max_bytes = 1024 * 1024

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._dsn, options = _read(url)
        self._loan = timedelta(seconds=options.get("visibility", VISIBILITY))
        self._timeout: float = options.get("timeout", TIMEOUT)
        self._parameters = PARAMETERS | {"connect_timeout": connect_timeout(conninfo_to_dict(self._dsn), self._timeout)}
        self._connecting = Turn()
        self._conn: AsyncConnection | None = None
        self._receivers: set[_Receiver] = set()

    async def declare(self, queues: Sequence[str]) -> None:
        """A queue is only a name here: what must be there is the table."""
        missing = await self._perform(store.missing_privileges())
        if missing is None:
            raise TransportMisconfigured(
                "The database of the transport has no table busload.message. Run `busload schema migrate` on it."
            )
        if missing:
            raise TransportMisconfigured(f"The user of the transport lacks {', '.join(missing)} on busload.message.")

    async def publish(self, messages: Sequence[Message]) -> None:
        too_large = Refusal(RefusalReason.TOO_LARGE, f"at most {self.max_bytes} bytes are taken")
        refused = {n: too_large for n, each in enumerate(messages) if len(each.body) > self.max_bytes}
        taken = {n: each for n, each in enumerate(messages) if n not in refused}
        if taken:
            refused |= dict.fromkeys(taken, refusal) if (refusal := await self._publish(list(taken.values()))) else {}
        if refused:
            raise PublishFailed(dict(sorted(refused.items())))

    async def deliveries(self, queue: str, *, prefetch: int) -> AsyncIterator[Delivery]:
        receiver = _Receiver(queue)
        self._receivers.add(receiver)
        helpers = [
            asyncio.create_task(AsyncListener(self._dsn, [MESSAGE], receiver.hear).run()),
            asyncio.create_task(self._keep(receiver)),
        ]
        try:
            while True:
                receiver.changed.clear()
                for id, number, body in await self._take(receiver, prefetch):
                    yield PostgresqlDelivery(self, receiver, id, number, body)
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY):
                        await receiver.changed.wait()
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            self._receivers.discard(receiver)
            with suppress(TransportError):
                await self._give_back(receiver)

    async def depth(self, queue: str) -> int | None:
        return await self._perform(store.depth(queue))

    async def peek(self, queue: str, *, limit: int) -> list[bytes] | None:
        return await self._perform(store.peek(queue, limit=limit))

    async def aclose(self) -> None:
        for receiver in list(self._receivers):
            receiver.closed = True
            with suppress(TransportError):
                await self._give_back(receiver)
            receiver.changed.set()
        await self._drop()

    async def settle(self, receiver: _Receiver, id: str, number: int, plan: Plan[None]) -> None:
        """Whatever is not settled comes again, which does no harm."""
        if receiver.held.get(id) == number:
            del receiver.held[id]
            receiver.changed.set()
            with suppress(TransportError):
                await self._perform(plan)

    async def _publish(self, messages: Sequence[Message]) -> Refusal | None:
        queues, ids, bodies = zip(*((each.queue, each.id, each.body) for each in messages), strict=True)
        try:
            await self._perform(store.publish(queues, ids, bodies))
        except TransportUnavailable as error:
            return Refusal(RefusalReason.UNREACHABLE, str(error))
        except TransportMisconfigured as error:
            return Refusal(RefusalReason.REFUSED, str(error))
        return None

    async def _take(self, receiver: _Receiver, prefetch: int) -> list[tuple[str, int, bytes]]:
        if receiver.closed:
            raise TransportUnavailable(f"The transport was closed while it delivered the queue {receiver.queue}.")
        room = prefetch - len(receiver.held)
        if room <= 0:
            return []
        taken = await self._perform(store.take(receiver.queue, limit=room, loan=self._loan))
        receiver.held |= {id: number for id, number, _ in taken}
        if len(taken) == room:
            receiver.changed.set()  # there may be more
        return taken

    async def _keep(self, receiver: _Receiver) -> None:
        """Renew at a third of the loan, so that two renewals may fail before others get what is on loan here."""
        while True:
            await asyncio.sleep(self._loan.total_seconds() / 3)
            if receiver.held:
                try:
                    await self._perform(store.renew(receiver.queue, dict(receiver.held), loan=self._loan))
                except TransportError as error:
                    log.warning("Could not renew %s on loan: %s", counted(len(receiver.held), "message"), error)

    async def _give_back(self, receiver: _Receiver) -> None:
        held, receiver.held = receiver.held, {}
        if held:
            await self._perform(store.release(receiver.queue, held))

    async def _perform(self, plan: Plan[T]) -> T:
        with _in_our_words():
            try:
                async with asyncio.timeout(self._timeout):
                    return await perform_async(await self._connected(), plan)
            except TimeoutError:
                await self._drop()
                raise

    async def _connected(self) -> AsyncConnection:
        async with self._connecting():
            if self._conn is None or self._conn.closed:
                self._conn = await OwnAsyncConnection.connect(
                    self._dsn, autocommit=True, prepare_threshold=None, **self._parameters
                )
            return self._conn

    async def _drop(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            await conn.close()


class PostgresqlDelivery(Delivery):
    def __init__(self, transport: PostgresqlTransport, receiver: _Receiver, id: str, number: int, body: bytes) -> None:
        self.queue, self.body = receiver.queue, body
        self._transport, self._receiver, self._id, self._number = transport, receiver, id, number

    async def ack(self) -> None:
        await self._settle(store.forget(self.queue, self._id, self._number))

    async def reject(self, reason: str) -> None:
        log.warning("Dropped the message %s of the queue %s: %s", self._id, self.queue, reason)
        await self._settle(store.forget(self.queue, self._id, self._number))

    async def _settle(self, plan: Plan[None]) -> None:
        await self._transport.settle(self._receiver, self._id, self._number, plan)


class _Receiver:
    """What one iterator has on loan, by id, with the number of its delivery."""

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self.held: dict[str, int] = {}
        self.changed = asyncio.Event()
        self.closed = False

    def hear(self, channel: str | None, queue: str | None) -> None:
        if queue is None or queue == self.queue:
            self.changed.set()


@contextmanager
def _in_our_words() -> Iterator[None]:
    """What psycopg raises, as what `declare` promises to raise. Its texts name host, user and database, no password."""
    try:
        yield
    except TimeoutError:
        raise TransportUnavailable("PostgreSQL did not answer in time.") from None
    except psycopg.Error as error:
        words = str(error).strip()
        if is_away(error) and not is_turned_away(error):
            raise TransportUnavailable(f"PostgreSQL cannot be reached: {words}") from None
        raise TransportMisconfigured(f"PostgreSQL refuses us: {words}") from None


def _read(url: str) -> tuple[str, Mapping[str, Any]]:
    """The DSN for libpq, and our own options, which it does not know."""
    try:
        parts = urlsplit(url)
        refuse_open_password(url)
        asked = parse_qsl(parts.query, keep_blank_values=True)
        ours = urlencode([pair for pair in asked if pair[0] in OWN_OPTIONS])
        theirs = urlencode([pair for pair in asked if pair[0] not in OWN_OPTIONS], quote_via=quote)
        dsn = urlunsplit(parts._replace(query=theirs))
        ports = conninfo_to_dict(dsn).get("port") or "0"
        _ = [int(port) for port in str(ports).split(",") if port]
    except (ValueError, psycopg.ProgrammingError):
        # What is wrong is not shown: it may be a piece of a password.
        raise TransportMisconfigured(
            "The URL of the transport cannot be read; wanted e.g. postgresql://user:password@host:5432/database, and "
            f"no options but libpq's and {', '.join(sorted(OWN_OPTIONS))}."
        ) from None
    return dsn, read_options(f"{parts.scheme}:?{ours}", OWN_OPTIONS)
