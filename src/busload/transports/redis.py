"""Redis Streams: a stream and a consumer group per queue.

A stream's entries stay until they are deleted, so what is acknowledged is deleted with it, and a stream's length is the
queue's depth. Redis does not take back what a dead consumer held: the living look after it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple
from urllib.parse import unquote, urlsplit

from redis import exceptions as redis_errors
from redis.asyncio import BlockingConnectionPool, Connection, Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from busload.errors import (
    Refusal,
    RefusalReason,
    TransportError,
    TransportMisconfiguredError,
    TransportUnavailableError,
)
from busload.transports.base import Message
from busload.transports.broker import TIMEOUT, Broker, Consumer, HeldMessage, in_windows, said, unreachable
from busload.transports.url import TLS_FILES, read_options, seconds, tls_context, tls_files

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
"""Seconds that the server lets us wait for an entry; a connection that is quiet for so long is not broken."""

LOOK_EVERY = 10.0
"""Seconds, at most, between two looks for entries whose consumer is dead."""

CLOSE_WITHIN, CONNECT_WITHIN = 2.0, 3.0

FORGET_AFTER = 600.0
"""Seconds after which the name of a consumer that holds nothing, and asks for nothing, is removed."""

LOST = (redis_errors.RedisError, OSError, TimeoutError)

NOT_NOW = ("READONLY", "LOADING", "MASTERDOWN", "TRYAGAIN", "CLUSTERDOWN", "MISCONF", "BUSY", "NOREPLICAS")
"""A failover, a start, a disk that is full: it passes without a change of ours."""

GONE = ("NOGROUP", "UNBLOCKED")
"""Somebody removed the stream or its group; the next call makes it again."""

Entry = tuple[bytes, dict[bytes, bytes]]


class RedisTransport(Broker):
    """`redis://[[user]:password@]host[:port][/database]`, or `rediss://` for TLS.

    Options: `min_idle`, the seconds after which what a dead worker held comes again (30), `timeout`, the seconds to
    wait for an answer (10), and for TLS `ca`, `cert` and `key`.
    """

    name: ClassVar[str] = "redis"
    title = "Redis"
    lost = LOST
    max_bytes = MAX_BYTES

    def __init__(self, url: str) -> None:
        super().__init__(url)
        options = read_options(url, {"min_idle": seconds, "timeout": seconds, **TLS_FILES})
        self._min_idle: float = options.get("min_idle", 30.0)
        self.timeout: float = options.get("timeout", TIMEOUT)
        self._files = tls_files(url, options, wanted="rediss")
        self._server = _server(url, self._files)
        self._client: Redis | None = None

    async def declare(self, queues: Sequence[str]) -> None:
        for queue in dict.fromkeys(queues):
            with self.translated(queue):
                await _make(self._redis(), queue, exists=queue in self.existing)

    async def publish_fitting(self, messages: Mapping[int, Message]) -> dict[int, Refusal]:
        return await in_windows(messages, AT_ONCE, self._add)

    async def consumer(self, queue: str, prefetch: int) -> RedisConsumer:
        await self.declare([queue])
        redis = self._redis()
        for consumer in await redis.xinfo_consumers(queue, GROUP):
            if not consumer["pending"] and consumer["idle"] > FORGET_AFTER * 1000:
                await redis.xgroup_delconsumer(queue, GROUP, consumer["name"])
        return RedisConsumer(redis, self._connect(1, WAIT_FOR), queue, prefetch, self._min_idle)

    async def depth(self, queue: str) -> int | None:
        with self.translated(queue):
            return int(await self._redis().xlen(queue))

    async def peek(self, queue: str, *, limit: int) -> list[bytes] | None:
        with self.translated(queue):
            entries: Any = await self._redis().xrange(queue, count=limit)
            return [fields.get(b"body", b"") for _, fields in entries]

    async def disconnect(self) -> None:
        client, self._client = self._client, None
        if client:
            await _close(client)

    def translation(self, error: Exception, queue: str | None) -> TransportError:
        told = said(error)
        if isinstance(error, redis_errors.AuthenticationError | redis_errors.AuthorizationError):
            return TransportMisconfiguredError(
                f"Redis refuses to let us in: {told}. Put the right credentials into the URL."
            )
        if isinstance(error, redis_errors.NoPermissionError):
            return TransportMisconfiguredError(f"Redis denies what the transport needs: {told}. Grant it.")
        if isinstance(error, redis_errors.AskError | redis_errors.ClusterCrossSlotError):
            return TransportMisconfiguredError("This is a Redis Cluster, which is not supported. Use a single server.")
        if isinstance(error.__context__, ssl.SSLError) or isinstance(error.__cause__, ssl.SSLError):
            return TransportMisconfiguredError(f"TLS with Redis failed: {told}.")
        if not isinstance(error, redis_errors.ResponseError) or _passes(error):
            return TransportUnavailableError(f"Redis cannot be used now: {told}")
        return TransportMisconfiguredError(f"Redis refuses: {told}.")

    def _redis(self) -> Redis:
        if self._client is None:
            self._client = self._connect(CONNECTIONS, 0)
        return self._client

    def _connect(self, connections: int, waits: float) -> Redis:
        """A pool that connects when it is used. It never tries again by itself: the caller is told."""
        if self._server["connection_class"] is SSLConnection:
            tls_context(**self._files)  # says which file cannot be read
        pool = BlockingConnectionPool(
            **self._server,
            max_connections=connections,
            timeout=self.timeout,
            socket_timeout=self.timeout + waits,
            socket_connect_timeout=CONNECT_WITHIN,
            retry=Retry(NoBackoff(), 0),
            client_name="busload",
            protocol=2,
        )
        return Redis.from_pool(pool)

    async def _add(self, messages: Mapping[int, Message]) -> dict[int, Refusal]:
        with self.translated():
            async with self._redis().pipeline(transaction=False) as pipeline:
                for message in messages.values():
                    pipeline.xadd(message.queue, {"id": message.id, "body": message.body})
                answers = list(await pipeline.execute(raise_on_error=False))
        found = zip(messages, answers, strict=True)
        return {index: _refusal(answer) for index, answer in found if isinstance(answer, Exception)}


class _Settled(NamedTuple):
    """An entry that leaves the queue. It may be added to a stream: again to the queue, or to that of the unreadable."""

    entry: bytes
    add_to: str = ""
    fields: Mapping[Any, Any] = {}


class RedisConsumer(Consumer[bytes]):
    """Entries come on a connection of their own; the rest is told to Redis on others.

    Redis is told of many settled entries at a time: a round trip for each would be the slowest part of the work.
    """

    lost = LOST

    def __init__(self, redis: Redis, pool: Redis, queue: str, prefetch: int, min_idle: float) -> None:
        super().__init__(queue, prefetch)
        self._redis, self._pool, self.loan_for = redis, pool, min_idle
        self._reader = pool.client()  # keeps one connection: another one would hide that the first broke
        self._consumer = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._fields: dict[bytes, dict[bytes, bytes]] = {}
        self._settled: list[_Settled] = []
        self._untold = 0
        self._to_tell = asyncio.Event()
        self._reading = asyncio.Lock()
        self._look_from: Any = b"0-0"
        self._look_at = 0.0
        self._telling = asyncio.create_task(self._keep_telling())

    @property
    def on_loan(self) -> int:
        return len(self.held) + self._untold

    async def take(self, room: int) -> list[HeldMessage[bytes]]:
        async with self._reading:
            entries = await self._abandoned(room) or await self._new(room)
        return [self._hold(*entry) for entry in entries if entry[0] not in self.held]

    async def check(self) -> None:
        async with self._reading:
            await self._reader.ping()

    async def tell_settled(self, key: bytes, reason: str | None) -> None:
        fields = self._fields.pop(key)
        self._untold += 1
        unreadable = reason and fields and {**fields, b"reason": reason.encode()}
        self._settled.append(_Settled(key, _dead(self.queue), unreadable) if unreadable else _Settled(key))
        self._to_tell.set()

    async def renew(self, keys: Sequence[bytes]) -> None:
        ids: list[Any] = list(keys)
        await self._redis.xclaim(self.queue, GROUP, self._consumer, 0, ids, justid=True)

    async def give_back(self, keys: Sequence[bytes]) -> None:
        """What Redis says that we hold: an answer that we did not wait for may have brought some."""
        await self._stop_reading()
        self._to_tell.set()
        await self._telling
        while mine := await self._read(self._redis, "0", count=AT_ONCE):
            await self._remove([_Settled(entry, self.queue, fields) for entry, fields in mine])

    async def disconnect(self) -> None:
        await self._stop_reading()  # once more, in case there was no time for it
        self._telling.cancel()
        await asyncio.gather(self._telling, return_exceptions=True)

    def _hold(self, entry: bytes, fields: dict[bytes, bytes]) -> HeldMessage[bytes]:
        self._fields[entry] = fields
        return self.hold(entry, fields.get(b"body", b""))

    async def _new(self, room: int) -> list[Entry]:
        wait = max(0.001, min(WAIT_FOR, self._look_at - time.monotonic()))
        return await self._read(self._reader, ">", count=room, block=int(wait * 1000))

    async def _abandoned(self, room: int) -> list[Entry]:
        """Entries whose consumer has not renewed them. The list of what is held is gone through piece by piece."""
        if time.monotonic() < self._look_at:
            return []
        answer: Any = await self._reader.xautoclaim(
            self.queue, GROUP, self._consumer, int(self.loan_for * 1000), self._look_from, count=room
        )
        self._look_from, entries = answer[0], answer[1]
        if self._look_from == b"0-0":
            self._look_at = time.monotonic() + min(self.loan_for / 3, LOOK_EVERY)
        return list(entries)

    async def _stop_reading(self) -> None:
        """The end of the connection wakes whoever waits for an entry; only then the client can be closed."""
        with suppress(*LOST):
            await self._pool.connection_pool.disconnect()
        async with self._reading:
            await _close(self._reader)
            await _close(self._pool)

    async def _keep_telling(self) -> None:
        """Tell Redis of settled entries, until the consumer is closed and all are told."""
        while self._settled or not self.broken:
            self._to_tell.clear()
            if not self._settled:
                await self._to_tell.wait()
                continue
            some, self._settled = self._settled[:AT_ONCE], self._settled[AT_ONCE:]
            with suppress(*LOST):
                await self._remove(some)
            self._untold -= len(some)
            self.changed.set()

    async def _remove(self, settled: Sequence[_Settled]) -> None:
        """In one transaction, so that an entry is in one place."""
        ids = [each.entry for each in settled]
        async with self._redis.pipeline(transaction=True) as pipeline:
            for _, add_to, fields in settled:
                if fields:
                    most = None if add_to == self.queue else MOST_DEAD
                    pipeline.xadd(add_to, dict(fields), maxlen=most, approximate=True)
            pipeline.xack(self.queue, GROUP, *ids)
            pipeline.xdel(self.queue, *ids)
            await pipeline.execute()

    async def _read(self, redis: Redis, after: str, **limits: Any) -> list[Entry]:
        answer: Any = await redis.xreadgroup(GROUP, self._consumer, {self.queue: after}, **limits)
        return [entry for _, entries in answer or [] for entry in entries]


async def _make(redis: Redis, queue: str, *, exists: bool) -> None:
    """Make a group that reads from the start of the stream, so that earlier entries are delivered too.

    The stream itself is made as well, unless it should exist.
    """
    try:
        await redis.xgroup_create(queue, GROUP, id="0", mkstream=not exists)
    except redis_errors.ResponseError as error:
        if "requires the key to exist" in str(error):
            raise TransportMisconfiguredError(
                f"There is no stream {queue!r} in Redis. Make it, or leave it out of queues=."
            ) from error
        if not str(error).startswith("BUSYGROUP"):
            if str(error).startswith("WRONGTYPE"):
                raise TransportMisconfiguredError(
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
        raise TransportMisconfiguredError(
            "The URL of Redis cannot be read. Wanted one like redis://user:password@host:6379/0."
        ) from None
    names = {"ca": "ssl_ca_certs", "cert": "ssl_certfile", "key": "ssl_keyfile"}
    return {
        "connection_class": SSLConnection if parts.scheme == "rediss" else Connection,
        "host": host,
        "port": port,
        "db": database,
        "username": unquote(parts.username) if parts.username else None,
        "password": unquote(parts.password) if parts.password else None,
        **{names[name]: file for name, file in files.items() if file},
    }


def _passes(error: redis_errors.ResponseError) -> bool:
    return isinstance(error, redis_errors.OutOfMemoryError) or _kind(error).startswith((*NOT_NOW, *GONE))


def _refusal(error: Exception) -> Refusal:
    if isinstance(error, redis_errors.OutOfMemoryError):
        return Refusal(RefusalReason.THROTTLED, f"Redis has no memory left: {said(error)}")
    if _kind(error).startswith(NOT_NOW):
        return unreachable(f"Redis cannot be used now: {said(error)}")
    return Refusal(RefusalReason.REFUSED, said(error))


def _kind(error: Exception) -> str:
    """The word that Redis puts first; the library takes some of them away."""
    return getattr(error, "status_code", None) or str(error)
