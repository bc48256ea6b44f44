"""Redis Streams: a stream and a consumer group per queue.

A stream's entries stay until they are deleted, so what is acknowledged is deleted with it, and a stream's length is the
queue's depth. Redis does not take back what a dead consumer held: the living look after it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

from redis import exceptions as redis_errors
from redis.asyncio import BlockingConnectionPool, Connection, Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from busload.errors import (
    PublishFailed,
    Refusal,
    RefusalReason,
    TransportError,
    TransportMisconfigured,
    TransportUnavailable,
)
from busload.transport.base import Delivery, Message, Transport, heed_cancellation
from busload.transport.options import TLS_FILES, read_options, seconds, tls_context

GROUP = "workers"
DEFAULT_PORT = 6379
CONNECTIONS = 16

MAX_BYTES = 1024 * 1024
"""Redis takes more, but keeps every entry in memory."""

MOST_DEAD = 10_000
"""Entries that nobody can read: whoever can send us such ones must not fill Redis with them."""

AT_ONCE = 1000
"""Entries in one round trip."""

WAIT_FOR = 2.0
"""Seconds that the server lets us wait for an entry; so long may a connection be silent without being broken."""

LOOK_EVERY = 1.0
CLOSE_WITHIN, CONNECT_WITHIN = 2.0, 3.0

FORGET_AFTER = 600.0
"""Seconds after which the name of a consumer that holds nothing, and asks for nothing, is removed."""

LOST = (redis_errors.RedisError, OSError, TimeoutError)

NOT_NOW = ("READONLY", "LOADING", "MASTERDOWN", "TRYAGAIN", "CLUSTERDOWN", "MISCONF", "BUSY", "NOREPLICAS")
"""A failover, a start, a disk that is full: it passes without a change of ours."""

GONE = ("NOGROUP", "UNBLOCKED")
"""Somebody removed the stream or its group; the next call makes it again."""

log = logging.getLogger(__name__)


class RedisTransport(Transport):
    """`redis://[[user]:password@]host[:port][/database]`, or `rediss://` for TLS.

    Options: `min_idle`, the seconds after which what a dead worker held comes again (30), `timeout`, the seconds to
    wait for an answer (10), and for TLS `ca`, `cert` and `key`.
    """

    name: ClassVar[str] = "redis"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        options = read_options(url, {"min_idle": seconds, "timeout": seconds, **TLS_FILES})
        self._min_idle: float = options.get("min_idle", 30.0)
        self._timeout: float = options.get("timeout", 10.0)
        self._files: dict[str, str | None] = {name: options.get(name) for name in TLS_FILES}
        self._server = _server(url, self._files)
        self._client: Redis | None = None
        self._loans: set[_Loans] = set()
        self.max_bytes = MAX_BYTES

    async def declare(self, queues: Sequence[str]) -> None:
        try:
            for queue in dict.fromkeys(queues):
                await _make(self._redis(), queue)
        except LOST as error:
            raise _translated(error) from error

    async def publish(self, messages: Sequence[Message]) -> None:
        refused = {
            index: Refusal(RefusalReason.TOO_LARGE, f"{len(message.body)} bytes, at most {MAX_BYTES} pass")
            for index, message in enumerate(messages)
            if len(message.body) > MAX_BYTES
        }
        fitting = [index for index in range(len(messages)) if index not in refused]
        for start in range(0, len(fitting), AT_ONCE):
            some = fitting[start : start + AT_ONCE]
            try:
                answers = await self._add([messages[index] for index in some])
            except LOST as error:
                # What follows would fail like this, only later.
                refused |= dict.fromkeys(fitting[start:], _unreachable(error))
                break
            refused |= {i: _refusal(a) for i, a in zip(some, answers, strict=True) if isinstance(a, Exception)}
        if refused:
            raise PublishFailed({index: refused[index] for index in sorted(refused)})

    async def deliveries(self, queue: str, *, prefetch: int) -> AsyncIterator[Delivery]:
        await self.declare([queue])
        loans = _Loans(self._redis(), self._connect(1, WAIT_FOR), queue, prefetch, self._min_idle)
        self._loans.add(loans)
        try:
            await loans.open()
            while True:
                yield await loans.next()
        except LOST as error:
            raise _translated(error) from error
        finally:
            self._loans.discard(loans)
            await loans.close()

    async def depth(self, queue: str) -> int | None:
        try:
            return int(await self._redis().xlen(queue))
        except LOST as error:
            raise _translated(error) from error

    async def peek(self, queue: str, *, limit: int) -> list[bytes] | None:
        try:
            entries: Any = await self._redis().xrange(queue, count=limit)
        except LOST as error:
            raise _translated(error) from error
        return [fields.get(b"body", b"") for _, fields in entries]

    async def aclose(self) -> None:
        for loans in list(self._loans):
            await loans.close()
        client, self._client = self._client, None
        if client:
            await _close(client)

    def _redis(self) -> Redis:
        if self._client is None:
            self._client = self._connect(CONNECTIONS, 0)
        return self._client

    def _connect(self, connections: int, waits: float) -> Redis:
        """A pool that connects when it is used. It never tries again by itself: who asked is told."""
        if self._server["connection_class"] is SSLConnection:
            tls_context(**self._files)  # says which file cannot be read
        pool = BlockingConnectionPool(
            **self._server,
            max_connections=connections,
            timeout=self._timeout,
            socket_timeout=self._timeout + waits,
            socket_connect_timeout=CONNECT_WITHIN,
            retry=Retry(NoBackoff(), 0),
            client_name="busload",
            protocol=2,
        )
        return Redis.from_pool(pool)

    async def _add(self, messages: Iterable[Message]) -> list[Any]:
        async with self._redis().pipeline(transaction=False) as pipeline:
            for message in messages:
                pipeline.xadd(message.queue, {"id": message.id, "body": message.body})
            try:
                return list(await pipeline.execute(raise_on_error=False))
            except LOST as error:
                if isinstance(translated := _translated(error), TransportMisconfigured):
                    raise translated from error
                raise


class RedisDelivery(Delivery):
    def __init__(self, loans: _Loans, entry: bytes, fields: dict[bytes, bytes]) -> None:
        self.queue = loans.queue
        self.body = fields.get(b"body", b"")
        self.entry = entry
        self.fields = fields
        self._loans = loans

    async def ack(self) -> None:
        self._loans.end(self)

    async def reject(self, reason: str) -> None:
        log.warning("Put a message of %s that nobody can read into %s: %s", self.queue, _dead(self.queue), reason)
        self._loans.end(self, _dead(self.queue), reason)


@dataclass(frozen=True, slots=True)
class _Ending:
    """An entry that leaves the queue; it may be added to a stream: the same one, or that of the unreadable."""

    entry: bytes
    fields: dict[bytes, bytes]
    add_to: str | None
    reason: str


class _Loans:
    """What one iterator holds. It waits for entries on a connection of its own, and tells Redis the rest on others.

    What has become of them is told for many at a time: a round trip for each would be the slowest part of the work.
    """

    def __init__(self, redis: Redis, pool: Redis, queue: str, prefetch: int, min_idle: float) -> None:
        self.queue = queue
        self._redis = redis
        self._pool = pool
        self._reader = pool.client()  # keeps one connection: another one would hide that the first broke
        self._prefetch = prefetch
        self._min_idle = min_idle
        self._consumer = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._held: dict[bytes, RedisDelivery] = {}
        self._arrived: deque[RedisDelivery] = deque()
        self._ending: list[_Ending] = []
        self._told = 0
        self._room = asyncio.Event()
        self._to_tell = asyncio.Event()
        self._reading = asyncio.Lock()
        self._closed = False
        self._look_from: Any = b"0-0"
        self._look_at = 0.0
        self._renewing: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None

    async def open(self) -> None:
        await self._forget_the_gone()
        self._renewing = asyncio.create_task(self._renew())
        self._telling = asyncio.create_task(self._tell())

    async def next(self) -> Delivery:
        while True:
            while self._arrived:
                delivery = self._arrived.popleft()
                if delivery.entry in self._held:
                    return delivery
            if self._closed:
                raise TransportUnavailable("The connection to Redis was closed")
            heed_cancellation()
            room = self._prefetch - len(self._held) - len(self._ending) - self._told
            if room <= 0:
                await self._wait_for_room()
            else:
                async with self._reading:
                    self._take(await self._abandoned(room) or await self._new(room))

    def end(self, delivery: RedisDelivery, add_to: str | None = None, reason: str = "") -> None:
        """Tell Redis soon, unless it has been given back; if that cannot be told, it comes again by itself."""
        if self._held.pop(delivery.entry, None):
            self._ending.append(_Ending(delivery.entry, delivery.fields, add_to, reason))
            self._to_tell.set()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._held.clear()
        self._room.set()
        self._to_tell.set()
        if self._renewing:
            self._renewing.cancel()
        await self._stop_reading()
        with suppress(*LOST):
            async with asyncio.timeout(CLOSE_WITHIN):
                if self._telling:
                    await self._telling
                while mine := await self._mine():
                    await self._remove([_Ending(entry, fields, self.queue, "") for entry, fields in mine])

    # -- taking -----------------------------------------------------------------------------------------------------

    def _take(self, entries: Iterable[tuple[bytes, dict[bytes, bytes]]]) -> None:
        for entry, fields in entries:
            if entry not in self._held:
                delivery = RedisDelivery(self, entry, fields)
                self._held[entry] = delivery
                self._arrived.append(delivery)

    async def _new(self, room: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        wait = max(0.001, min(WAIT_FOR, self._look_at - time.monotonic()))
        answer: Any = await self._reader.xreadgroup(
            GROUP, self._consumer, {self.queue: ">"}, count=room, block=int(wait * 1000)
        )
        return [entry for _, entries in answer or [] for entry in entries]

    async def _abandoned(self, room: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Entries whose consumer has not renewed them. The list of what is held is gone through piece by piece."""
        if time.monotonic() < self._look_at:
            return []
        answer: Any = await self._reader.xautoclaim(
            self.queue, GROUP, self._consumer, int(self._min_idle * 1000), self._look_from, count=room
        )
        self._look_from, entries = answer[0], answer[1]
        if self._look_from == b"0-0":
            self._look_at = time.monotonic() + min(self._min_idle / 3, LOOK_EVERY * 10)
        return list(entries)

    async def _wait_for_room(self) -> None:
        """Meanwhile a broken connection must be noticed, though nothing is asked for."""
        self._room.clear()
        try:
            async with asyncio.timeout(LOOK_EVERY):
                await self._room.wait()
        except TimeoutError:
            async with self._reading:
                await self._reader.ping()

    async def _stop_reading(self) -> None:
        """Whoever waits for an entry is woken by the end of the connection; only then the client can be closed."""
        with suppress(*LOST):
            await self._pool.connection_pool.disconnect()
        async with self._reading:
            await _close(self._reader)
            await _close(self._pool)

    # -- keeping and giving back --------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        """At a third of the time, so that two renewals may fail before a message comes again."""
        while True:
            await asyncio.sleep(self._min_idle / 3)
            if self._held:
                with suppress(*LOST):
                    await self._redis.xclaim(self.queue, GROUP, self._consumer, 0, list(self._held), justid=True)

    async def _tell(self) -> None:
        """Until the iterator is closed, and all is told."""
        while self._ending or not self._closed:
            self._to_tell.clear()
            if not self._ending:
                await self._to_tell.wait()
                continue
            some, self._ending = self._ending[:AT_ONCE], self._ending[AT_ONCE:]
            self._told = len(some)
            with suppress(*LOST):
                await self._remove(some)
            self._told = 0
            self._room.set()

    async def _remove(self, endings: Sequence[_Ending]) -> None:
        """In one transaction, so that an entry is in one place."""
        ids = [ending.entry for ending in endings]
        async with self._redis.pipeline(transaction=True) as pipeline:
            for ending in endings:
                if ending.add_to and ending.fields:
                    reason = {b"reason": ending.reason.encode()} if ending.reason else {}
                    again: dict[Any, Any] = {**ending.fields, **reason}
                    most = None if ending.add_to == self.queue else MOST_DEAD
                    pipeline.xadd(ending.add_to, again, maxlen=most, approximate=True)
            pipeline.xack(self.queue, GROUP, *ids)
            pipeline.xdel(self.queue, *ids)
            await pipeline.execute()

    async def _mine(self) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """What Redis says that we hold: an answer that we did not wait for may have brought some."""
        answer: Any = await self._redis.xreadgroup(GROUP, self._consumer, {self.queue: "0"}, count=AT_ONCE)
        return [entry for _, entries in answer or [] for entry in entries]

    async def _forget_the_gone(self) -> None:
        for consumer in await self._redis.xinfo_consumers(self.queue, GROUP):
            if not consumer["pending"] and consumer["idle"] > FORGET_AFTER * 1000:
                await self._redis.xgroup_delconsumer(self.queue, GROUP, consumer["name"])


async def _make(redis: Redis, queue: str) -> None:
    """From the start of the stream: what was published before the group was there counts."""
    try:
        await redis.xgroup_create(queue, GROUP, id="0", mkstream=True)
    except redis_errors.ResponseError as error:
        if not str(error).startswith("BUSYGROUP"):
            if str(error).startswith("WRONGTYPE"):
                raise TransportMisconfigured(
                    f"The key {queue!r} in Redis is no stream: something else uses this name. Give busload a "
                    "database of its own: `/1` at the end of the URL's address."
                ) from error
            raise


def _dead(queue: str) -> str:
    """No domain has a colon: `payments.dead` would be one."""
    return f"{queue}:dead"


async def _close(client: Redis) -> None:
    with suppress(*LOST):
        async with asyncio.timeout(CLOSE_WITHIN):
            await client.aclose()


def _server(url: str, files: dict[str, str | None]) -> dict[str, Any]:
    """What the pool needs to connect."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or DEFAULT_PORT
        database = int(parts.path.removeprefix("/") or "0")
        if not host or database < 0:
            raise ValueError
    except ValueError:
        raise TransportMisconfigured(
            "The URL of Redis cannot be read. Wanted one like redis://user:password@host:6379/0."
        ) from None
    tls = parts.scheme == "rediss"
    if any(files.values()) and not tls:
        raise TransportMisconfigured(f"ca, cert and key are for TLS: found {parts.scheme}://, wanted rediss://.")
    names = {"ca": "ssl_ca_certs", "cert": "ssl_certfile", "key": "ssl_keyfile"}
    return {
        "connection_class": SSLConnection if tls else Connection,
        "host": host,
        "port": port,
        "db": database,
        "username": unquote(parts.username) if parts.username else None,
        "password": unquote(parts.password) if parts.password else None,
        **{names[name]: file for name, file in files.items() if file},
    }


def _translated(error: BaseException) -> TransportError:
    said = _said(error)
    if isinstance(error, redis_errors.AuthenticationError | redis_errors.AuthorizationError):
        return TransportMisconfigured(f"Redis does not let us in: {said}. Put the right credentials into the URL.")
    if isinstance(error, redis_errors.NoPermissionError):
        return TransportMisconfigured(f"Redis does not let us do what we must: {said}. Grant it.")
    if isinstance(error, redis_errors.AskError | redis_errors.ClusterCrossSlotError):
        return TransportMisconfigured("This is a Redis Cluster, which is not supported. Use a single server.")
    if isinstance(error.__context__, ssl.SSLError) or isinstance(error.__cause__, ssl.SSLError):
        return TransportMisconfigured(f"Redis and we do not agree about TLS: {said}.")
    if not isinstance(error, redis_errors.ResponseError) or _passes(error):
        return TransportUnavailable(f"Redis cannot be used now: {said}")
    return TransportMisconfigured(f"Redis refuses: {said}.")


def _passes(error: redis_errors.ResponseError) -> bool:
    return isinstance(error, redis_errors.OutOfMemoryError) or _kind(error).startswith((*NOT_NOW, *GONE))


def _refusal(error: Exception) -> Refusal:
    if isinstance(error, redis_errors.OutOfMemoryError):
        return Refusal(RefusalReason.THROTTLED, f"Redis has no memory left: {_said(error)}")
    if _kind(error).startswith(NOT_NOW):
        return _unreachable(error)
    return Refusal(RefusalReason.REFUSED, _said(error))


def _unreachable(error: BaseException) -> Refusal:
    return Refusal(RefusalReason.UNREACHABLE, f"Redis cannot be used now: {_said(error)}")


def _kind(error: Exception) -> str:
    """The word that Redis puts first; the library takes some of them away."""
    return getattr(error, "status_code", None) or str(error)


def _said(error: BaseException) -> str:
    return str(error).strip().rstrip(".") or type(error).__name__
