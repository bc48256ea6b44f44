"""RabbitMQ: quorum queues, publisher confirms, and a dead-letter queue for what nobody can read.

    amqp://user:password@host:5672/vhost?hosts=host2:5672,host3:5672
    amqps://user:password@host:5671/vhost?cafile=/etc/ssl/ours.pem

It speaks through aiormq, the layer below aio-pika: a broken connection is to be seen here, not mended behind our back.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any
from urllib.parse import urlencode, urlsplit, urlunsplit

import aiormq
from aiormq import exceptions as amqp
from aiormq.abc import AbstractConnection, DeliveredMessage
from aiormq.channel import Channel

from busload.errors import (
    Refusal,
    RefusalReason,
    TransportError,
    TransportMisconfiguredError,
    TransportUnavailableError,
)
from busload.transports.base import Delivery, LoopLock, Message, heed_cancellation, short_name
from busload.transports.broker import TIMEOUT, Broker, in_windows, unreachable
from busload.transports.url import one_of, read_options, seconds

log = logging.getLogger("busload")

QUEUE_TYPES = ("quorum", "classic")
EXAMPLE = "e.g. amqp://user:password@host:5672/vhost"
CONNECT_WITHIN, CLOSE_WITHIN, DROP_WITHIN = 3.0, 3.0, 0.2
HEARTBEAT = 10
LIMIT = "x-delivery-limit"
NO_LIMIT = "Set it to -1 by a policy, or delete the queue while it is empty."
MOST_DEAD = 10_000
"""Messages in a dead-letter queue: whoever can send us what nobody can read must not fill the broker with it."""
MOST_PREFETCHED = 65_535

IN_FLIGHT = 1000
"""Messages written before their confirms are awaited."""

LONGEST_NAME = 255
DEAD = ":dead"
"""No domain has a colon: `payments.dead` would be one. Of other signs the library takes few."""

BROKEN = (amqp.AMQPError, OSError, RuntimeError)
"""What the library raises when a connection ends in use; sometimes it cancels the caller instead."""


_we_connect: ContextVar[bool] = ContextVar("busload_connects_to_rabbitmq", default=False)


def _is_for_users(record: logging.LogRecord) -> bool:
    """The library logs each connection it could not make as an error. About our connections, the caller is told."""
    return not (_we_connect.get() and str(record.msg).startswith("error when creating transport"))


logging.getLogger("aiormq.connection").addFilter(_is_for_users)


class RabbitmqTransport(Broker):
    name = "rabbitmq"
    title = "RabbitMQ"
    lost = (*BROKEN, ValueError)
    max_bytes = 16 * 1024 * 1024
    """What RabbitMQ 4 takes unless it is told otherwise; earlier releases take more."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        urls, options = _read(url)
        self._queue_type: str = options.get("queue_type", QUEUE_TYPES[0])
        self.timeout: float = options.get("timeout", TIMEOUT)
        # Two connections: a broker short of memory stops those that publish, and must not stop those that empty it.
        self._publishing, self._consuming = _Line(urls, self.timeout), _Line(urls, self.timeout)

    async def declare(self, queues: Sequence[str]) -> None:
        for queue in dict.fromkeys(queues):
            with self.translated(queue):
                if queue in self.existing:  # with what arguments, its owner knows
                    async with self.in_time(), self._publishing.channel() as channel:
                        await channel.queue_declare(queue, passive=True)
                    continue
                async with self.in_time(), self._publishing.channel() as channel:
                    dead: dict[str, Any] = {"x-queue-type": self._queue_type, "x-max-length": MOST_DEAD}
                    await channel.queue_declare(_dead(queue), durable=True, arguments=dead)
                    version = _major_version(channel.connection)
                await self._declare(_spelled(queue), _arguments(queue, self._queue_type, version))

    async def publish_fitting(self, messages: Mapping[int, Message]) -> dict[int, Refusal]:
        with self.translated():
            async with self.in_time():
                channel = await self._publishing.publisher()
        refused = await in_windows(messages, IN_FLIGHT, partial(self._confirmed, channel))
        away = [index for index, refusal in refused.items() if refusal.reason is RefusalReason.UNREACHABLE]
        if away and await _is_blocked(channel.connection):
            refused |= dict.fromkeys(away, Refusal(RefusalReason.THROTTLED, "RabbitMQ is short of memory or disk"))
        if away or any(refusal.reason is RefusalReason.THROTTLED for refusal in refused.values()):
            # Also when a queue takes no more: a channel that met the queue between two leaders refuses for ever.
            await self._publishing.drop(DROP_WITHIN if away else CLOSE_WITHIN)
        return refused

    async def deliveries(self, queue: str, *, prefetch: int) -> AsyncIterator[Delivery]:
        arrived: asyncio.Queue[DeliveredMessage | None] = asyncio.Queue()

        async def hear(message: DeliveredMessage) -> None:
            arrived.put_nowait(message)

        def end(_: object) -> None:
            arrived.put_nowait(None)

        with self.translated(queue):
            # Closing the channel gives back what is on loan.
            async with self._consuming.channel(confirms=False) as channel:
                channel.closing.add_done_callback(end)
                channel.on_consumer_cancel_callbacks.add(end)
                async with self.in_time():
                    await channel.basic_qos(prefetch_count=min(prefetch, MOST_PREFETCHED))
                    await channel.basic_consume(_spelled(queue), hear)
                heed_cancellation()
                while (message := await arrived.get()) is not None:
                    yield RabbitmqDelivery(self, queue, message)
        raise TransportUnavailableError(
            f"RabbitMQ no longer delivers {queue}: the connection ended, or the queue is gone."
        )

    async def depth(self, queue: str) -> int | None:
        """How many messages wait; AMQP does not tell how many are on loan."""
        with self.translated(queue), suppress(amqp.ChannelNotFoundEntity):
            async with self.in_time(), self._publishing.channel() as channel:
                return (await channel.queue_declare(_spelled(queue), passive=True)).message_count
        return 0

    async def disconnect(self) -> None:
        await self._consuming.drop()
        await self._publishing.drop()

    def translation(self, error: Exception, queue: str | None) -> TransportError:
        words = _words(error)
        match error:
            case amqp.ChannelPreconditionFailed():
                return TransportMisconfiguredError(
                    f"The queue {queue} cannot be declared with the settings we need: {words}. If it exists with other "
                    "settings, delete it (workers find its commands by polling), or choose its type by ?queue_type= in "
                    "the URL."
                )
            case amqp.ChannelNotFoundEntity():
                how = "Make it, or leave it out of queues=." if queue in self.existing else "Declare it first."
                return TransportMisconfiguredError(f"The queue {queue} does not exist: {words}. {how}")
            case amqp.ChannelAccessRefused():
                return TransportMisconfiguredError(
                    f"RabbitMQ refuses access to the queue {queue}: {words}. The user needs the permissions configure, "
                    "write and read on it and on its dead-letter queue."
                )
            case amqp.AuthenticationError() | amqp.ProbableAuthenticationError():
                return TransportMisconfiguredError(f"RabbitMQ refuses the user or password of the URL: {words}")
            case amqp.InvalidFrameError() if "OpenOk" in words and "Close" in words:
                # The library does not tell the reason that RabbitMQ gave.
                return TransportMisconfiguredError(
                    "RabbitMQ refuses the virtual host, the path of the URL. Does it exist, may the user use it, and "
                    "is its limit of connections not reached?"
                )
            case FileNotFoundError():
                return TransportMisconfiguredError(f"A file that the URL names is missing: {error.filename or words}")
            case ValueError():
                return TransportMisconfiguredError(f"RabbitMQ cannot be used with this URL or queue: {words}")
        if isinstance(error.__cause__, ssl.SSLCertVerificationError):
            return TransportMisconfiguredError(
                f"The certificate of RabbitMQ is not trusted: {words}. Name its CA by ?cafile=."
            )
        return TransportUnavailableError(f"RabbitMQ cannot be reached: {words}")

    async def _declare(self, queue: str, arguments: dict[str, Any]) -> None:
        try:
            async with self.in_time(), self._publishing.channel() as channel:
                await channel.queue_declare(queue, durable=True, arguments=arguments)
        except amqp.ChannelPreconditionFailed as error:
            if LIMIT not in arguments or LIMIT not in str(error):
                raise
            # Made by an earlier release of RabbitMQ, which knew no such limit.
            message = "The queue %s has a delivery limit: RabbitMQ drops a message after that many deliveries. %s"
            log.warning(message, queue, NO_LIMIT)
            await self._declare(queue, {name: value for name, value in arguments.items() if name != LIMIT})

    async def _confirmed(self, channel: Channel, messages: Mapping[int, Message]) -> dict[int, Refusal]:
        """Write all messages, then wait for all confirms: never a round trip for each."""
        tasks = {index: asyncio.ensure_future(_publish_one(channel, each)) for index, each in messages.items()}
        try:
            await asyncio.wait(tasks.values(), timeout=self.timeout)
        finally:
            for task in tasks.values():
                task.cancel()
            answers = await asyncio.gather(*tasks.values(), return_exceptions=True)
        refusals = {index: _refusal(answer, messages[index]) for index, answer in zip(tasks, answers, strict=True)}
        return {index: refusal for index, refusal in refusals.items() if refusal is not None}


class RabbitmqDelivery(Delivery):
    def __init__(self, transport: RabbitmqTransport, queue: str, message: DeliveredMessage) -> None:
        self.queue, self.body = queue, message.body
        self._transport = transport
        self._channel, self._tag = message.channel, message.delivery_tag or 0
        self._settled = False

    async def ack(self) -> None:
        await self._settle(self._channel.basic_ack)

    async def reject(self, reason: str) -> None:
        if self.queue in self._transport.existing:
            log.warning("Refused a message of the queue %s, as its dead letters are: %s", self.queue, reason)
        else:
            log.warning("Put a message of the queue %s into %s: %s", self.queue, _dead(self.queue), reason)
        await self._settle(partial(self._channel.basic_reject, requeue=False))

    async def _settle(self, how: Callable[[int], Awaitable[None]]) -> None:
        """Once only: RabbitMQ closes the channel if a message is settled twice."""
        if self._settled:
            return
        self._settled = True
        with suppress(TransportError), self._transport.translated(self.queue):
            await how(self._tag)


class _Line:
    """A connection that is made when it is needed, and given up when it breaks."""

    def __init__(self, urls: Sequence[str], timeout: float) -> None:
        self._urls, self._timeout = urls, timeout
        self._connecting = LoopLock()
        self._connection: AbstractConnection | None = None
        self._doubtful: AbstractConnection | None = None
        self._publisher: Channel | None = None
        self._answered_last = urls[0]

    @asynccontextmanager
    async def channel(self, *, confirms: bool = True) -> AsyncIterator[Channel]:
        async with self._connecting(), asyncio.timeout(self._timeout):
            connection = await self._connected()
        async with asyncio.timeout(self._timeout):
            channel = await self._open(connection, publisher_confirms=confirms)
        try:
            yield channel
        finally:
            with suppress(*BROKEN):
                async with asyncio.timeout(CLOSE_WITHIN):
                    await channel.close()

    async def publisher(self) -> Channel:
        """The channel that all publishing calls share."""
        async with self._connecting():
            if self._publisher is None or self._publisher.is_closed:
                connection = await self._connected()
                self._publisher = await self._open(connection, publisher_confirms=True, on_return_raises=True)
            return self._publisher

    async def drop(self, within: float = CLOSE_WITHIN) -> None:
        connection, self._connection, self._doubtful, self._publisher = self._connection, None, None, None
        if connection is not None:
            with suppress(*BROKEN):
                async with asyncio.timeout(within):
                    await connection.close(amqp.ConnectionClosed(0, "given up"))

    async def _open(self, connection: AbstractConnection, **how: bool) -> Channel:
        """A caller that got no answer leaves the connection in doubt; the next caller makes another."""
        try:
            channel = await connection.channel(**how)
        except BaseException:
            self._doubtful = connection
            raise
        assert isinstance(channel, Channel)
        return channel

    async def _connected(self) -> AbstractConnection:
        if self._connection is None or not self._connection.is_opened or self._connection is self._doubtful:
            await self.drop(DROP_WITHIN if self._doubtful else CLOSE_WITHIN)
            self._connection = await self._connect()
        return self._connection

    async def _connect(self) -> AbstractConnection:
        """Connect to the first host that answers in its share of the time, beginning with the last one that did."""
        first = self._urls.index(self._answered_last)
        [*others, last] = [*self._urls[first:], *self._urls[:first]]
        for url in others:
            try:
                async with asyncio.timeout(min(CONNECT_WITHIN, self._timeout / len(self._urls))):
                    return await self._connect_to(url)
            except (amqp.AMQPConnectionError, OSError, TimeoutError) as error:
                log.warning("Trying another RabbitMQ: %s", _words(error))
        return await self._connect_to(last)

    async def _connect_to(self, url: str) -> AbstractConnection:
        token = _we_connect.set(True)
        try:
            connection = await aiormq.connect(url)
        finally:
            _we_connect.reset(token)
        self._answered_last = url
        return connection


async def _publish_one(channel: Channel, message: Message) -> None:
    properties = aiormq.spec.Basic.Properties(
        delivery_mode=2,
        content_type="application/octet-stream",
        # Not as message_id: the library wants one of its own there, to tell returned messages of equal ids apart.
        correlation_id=message.id,
    )
    await channel.basic_publish(
        message.body, routing_key=_spelled(message.queue), properties=properties, mandatory=True, wait=False
    )


def _refusal(answer: BaseException | None, message: Message) -> Refusal | None:
    match answer:
        case None:
            return None
        case amqp.PublishError():
            return Refusal(RefusalReason.UNROUTABLE, f"there is no queue {message.queue}")
        case amqp.DeliveryError():
            return Refusal(RefusalReason.THROTTLED, f"the queue {message.queue} takes no more for now")
        case amqp.ChannelAccessRefused() | amqp.ChannelPreconditionFailed() | ValueError():
            return Refusal(RefusalReason.REFUSED, _words(answer))
        case asyncio.CancelledError():
            return unreachable("RabbitMQ did not confirm it in time")
        case amqp.AMQPError() | OSError() | RuntimeError():
            return unreachable(_words(answer))
        case _:
            raise answer


async def _is_blocked(connection: AbstractConnection) -> bool:
    """Whether RabbitMQ has no room. It tells its publishers so, and reads no more of what they write."""
    if connection.is_closed:
        return False
    try:
        async with asyncio.timeout(0):
            await connection.ready()
    except TimeoutError:
        return True
    return False


# -- queues -------------------------------------------------------------------------------------------------------


def _spelled(queue: str) -> str:
    """Short enough to leave room for the name of its dead-letter queue."""
    return short_name(queue, LONGEST_NAME - len(DEAD), ":")


def _dead(queue: str) -> str:
    return f"{_spelled(queue)}{DEAD}"


def _arguments(queue: str, queue_type: str, version: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "x-queue-type": queue_type,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": _dead(queue),
    }
    if queue_type == "quorum" and version >= 4:
        arguments[LIMIT] = -1  # since that release 20 is the limit of a queue that names none
    return arguments


def _major_version(connection: AbstractConnection) -> int:
    major, _, _ = str(connection.server_properties.get("version", "")).partition(".")
    return int(major) if major.isdecimal() else 0


def _words(error: BaseException) -> str:
    return " ".join(str(part) for part in error.args) or type(error).__name__


def _hosts(text: str) -> list[str]:
    hosts = [host.strip() for host in text.split(",")]
    if not all(re.fullmatch(r"[\w.-]+(:\d+)?|\[[0-9A-Fa-f:.]+\](:\d+)?", host) for host in hosts):
        raise ValueError("wanted hosts with commas between them, as in host2:5672,host3:5672")
    return hosts


OWN_OPTIONS: Mapping[str, Callable[[str], Any]] = {
    "queue_type": one_of(*QUEUE_TYPES),
    "hosts": _hosts,
    "timeout": seconds,
}
LIBRARY_OPTIONS: Mapping[str, Callable[[str], Any]] = {"heartbeat": int} | dict.fromkeys(
    ["name", "auth", "cafile", "capath", "cadata", "certfile", "keyfile", "no_verify_ssl"], str
)


def _read(url: str) -> tuple[list[str], dict[str, Any]]:
    """URLs as the library reads them, one for each host that may be tried, and the options."""
    try:
        parts = urlsplit(url)
        found = read_options(url, {**OWN_OPTIONS, **LIBRARY_OPTIONS})
        readable = bool(parts.hostname) and parts.port != 0
    except TransportMisconfiguredError:
        raise
    except ValueError:
        readable = False
    if not readable:
        # What is wrong is not shown: it may be a piece of a password.
        raise TransportMisconfiguredError(f"The URL of RabbitMQ names no host, or no port; wanted {EXAMPLE}")
    library = {"heartbeat": HEARTBEAT, "name": "busload"} | {k: v for k, v in found.items() if k in LIBRARY_OPTIONS}
    login, at, first = parts.netloc.rpartition("@")
    hosts = [first, *found.get("hosts", [])]
    rest = parts.path or "/", urlencode(library), ""
    return [urlunsplit((parts.scheme, f"{login}{at}{host}", *rest)) for host in hosts], found
