"""Azure Service Bus: queues that an administrator made, with messages under a lock that we renew while we hold them.

    servicebus://RootManageSharedAccessKey:<key, percent-encoded>@<namespace>.servicebus.windows.net/

What we use of it is the data plane, which can neither make a queue nor count its messages. The SDK's own retries are
off: whoever calls is told what happened to which message, and repeats in his own time.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import unquote, urlsplit

from azure.servicebus import ServiceBusMessage, ServiceBusMessageBatch, ServiceBusReceivedMessage
from azure.servicebus.aio import ServiceBusClient, ServiceBusReceiver, ServiceBusSender
from azure.servicebus.exceptions import (
    MessageAlreadySettled,
    MessageLockLostError,
    MessageSizeExceededError,
    MessagingEntityDisabledError,
    MessagingEntityNotFoundError,
    OperationTimeoutError,
    ServiceBusAuthenticationError,
    ServiceBusAuthorizationError,
    ServiceBusCommunicationError,
    ServiceBusConnectionError,
    ServiceBusError,
    ServiceBusServerBusyError,
)

from busload.errors import (
    Refusal,
    RefusalReason,
    TransportError,
    TransportMisconfiguredError,
    TransportUnavailableError,
)
from busload.transports.base import LoopLock, Message, hashed_name
from busload.transports.broker import TIMEOUT, Broker, Consumer, HeldMessage, by_queue, said, too_large, unreachable
from busload.transports.url import one_of, read_options, seconds

log = logging.getLogger("busload.transports")

LONGEST_NAME = 260
PLAIN_NAME = re.compile(r"[a-z0-9._-]*[a-z0-9]")

MESSAGES_PER_BATCH = 100
"""What fails, fails by the batch; the other limit of a batch is its bytes, which the broker tells us."""

BUSY_FOR = 10.0
"""Seconds to leave a broker alone that is busy and does not say for how long."""

IDLE_FOR = 30.0
"""Seconds that one call of the SDK waits for a message."""

SHORTEST_RENEWAL, CLOSED_WITHIN = 0.1, 5.0

WANTED = "wanted servicebus://KEYNAME:KEY@NAMESPACE.servicebus.windows.net/ with the key percent-encoded"

UNREACHABLE = (ServiceBusConnectionError, ServiceBusCommunicationError, OperationTimeoutError, TimeoutError, OSError)
REFUSED_US = (ServiceBusAuthenticationError, ServiceBusAuthorizationError)


class ServicebusTransport(Broker):
    """Queues of an Azure Service Bus namespace.

    Options of the URL: `timeout`, the seconds within which a call must succeed (10); `emulator=true` for Microsoft's
    emulator or what looks like it: a port of one's own, without TLS.
    """

    name = "servicebus"
    title = "Service Bus"
    lost = (Exception,)
    max_bytes = 254 * 1024  # of the 256 KiB of the standard tier; the rest is for what stands around a body

    def __init__(self, url: str) -> None:
        super().__init__(url)
        options = read_options(url, {"timeout": seconds, "emulator": one_of("true", "false")})
        self.timeout: float = options.get("timeout", TIMEOUT)
        self._connection_string = _connection_string(url, emulator=options.get("emulator") == "true")
        self._senders: dict[str, _Sender] = {}
        self._locks: defaultdict[str, LoopLock] = defaultdict(LoopLock)
        self._singly: set[str] = set()
        self._closing: set[asyncio.Task[None]] = set()

    async def declare(self, queues: Sequence[str]) -> None:
        await asyncio.gather(*(self._check(queue) for queue in set(queues)))

    async def publish_fitting(self, messages: Mapping[int, Message]) -> dict[int, Refusal]:
        refused: dict[int, Refusal] = {}
        to_queues = (self._publish_to(queue, some) for queue, some in by_queue(messages).items())
        for each in await asyncio.gather(*to_queues):
            refused |= each
        return refused

    async def consumer(self, queue: str, prefetch: int) -> ServicebusConsumer:
        return ServicebusConsumer(queue, prefetch, self._client().get_queue_receiver(self._spelled(queue)), self)

    async def peek(self, queue: str, *, limit: int) -> list[bytes] | None:
        bodies: list[bytes] = []
        try:
            with self.translated(queue):
                async with self._receiver(queue) as receiver:
                    after = 0
                    while page := await self._page(receiver, after, limit - len(bodies)):
                        bodies += [_body(each) for each in page]
                        after = page[-1].sequence_number or 0
        except TransportMisconfiguredError as error:
            if not _is_absent(error.__context__):
                raise
        return bodies

    async def disconnect(self) -> None:
        senders, self._senders = self._senders, {}
        for sender in senders.values():
            self.close_later(sender.link)
        while self._closing:
            await asyncio.wait(self._closing)

    def translation(self, error: Exception, queue: str | None) -> TransportError:
        if _is_missing(error):
            return TransportMisconfiguredError(_how_to_make(self._spelled(queue or "")))
        if isinstance(error, REFUSED_US):
            return TransportMisconfiguredError(
                f"Service Bus refuses the key for the queue {queue!r}: {said(error)}. Wanted a shared access policy "
                "with the rights Send and Listen; check its name and key in the URL."
            )
        return TransportUnavailableError(f"Service Bus cannot be reached: {said(error)}")

    def close_later(self, link: ServiceBusSender | ServiceBusReceiver) -> None:
        """The SDK takes a second for it, in which there is nothing to wait for."""
        task = asyncio.create_task(_close(link))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    # -- publishing -----------------------------------------------------------------------------------------------

    async def _publish_to(self, queue: str, messages: Mapping[int, Message]) -> dict[int, Refusal]:
        """Publish to one queue; return what it did not confirm."""
        results: dict[int, Refusal | None] = {}
        sender: _Sender | None = None  # until it is our turn
        try:
            async with self.in_time(), self._locks[queue]():
                sender = self._sender(queue)
                await self._send_all(queue, sender, messages, results)
                sender.rested = True
        except BaseException as error:
            self._drop_sender(queue, sender)  # we may have stopped in the midst of a frame
            if not isinstance(error, Exception):
                raise
            late = isinstance(error, TimeoutError)
            why = unreachable(f"not confirmed within {self.timeout:g} s") if late else await self._refusal(queue, error)
            for index in messages:
                results.setdefault(index, why)
        return {index: refusal for index, refusal in results.items() if refusal is not None}

    async def _send_all(
        self, queue: str, sender: _Sender, messages: Mapping[int, Message], results: dict[int, Refusal | None]
    ) -> None:
        """Note in `results` what became of each message, as soon as it is known: None if it was confirmed."""
        for batch, indexes in await _batches(sender.link, messages, results):
            refusal = None if queue in self._singly else await self._send(queue, sender, batch)
            if queue not in self._singly:
                results |= dict.fromkeys(indexes, refusal)
                continue
            for index in indexes:
                results[index] = await self._send(queue, sender, _outgoing(messages[index]))

    async def _send(
        self, queue: str, sender: _Sender, content: ServiceBusMessage | ServiceBusMessageBatch
    ) -> Refusal | None:
        """Return why the content was not confirmed, if so. The next one may be: the SDK connects anew for each."""
        try:
            await self._send_once(sender, content)
        except ServiceBusError as error:
            if _refuses_batches(error) and isinstance(content, ServiceBusMessageBatch):
                log.warning("%s is partitioned and detects duplicates: its messages are sent one by one", queue)
                self._singly.add(queue)
            return await self._refusal(queue, error)
        return None

    async def _send_once(self, sender: _Sender, content: ServiceBusMessage | ServiceBusMessageBatch) -> None:
        rested, sender.rested = sender.rested, False
        try:
            await sender.link.send_messages(content)
        except ServiceBusConnectionError:
            # A connection that rested may have died while nobody looked: that is no news of the broker.
            if not rested:
                raise
            await sender.link.send_messages(content)

    async def _refusal(self, queue: str, error: Exception) -> Refusal:
        if _lost_its_link(error):
            error = await self._reason_of_lost_link(queue, error)
        match error:
            case ServiceBusServerBusyError():
                asked = re.search(r"wait (\d+) seconds", str(error))
                return Refusal(RefusalReason.THROTTLED, str(error), float(asked[1]) if asked else BUSY_FOR)
            case MessageSizeExceededError():
                return Refusal(RefusalReason.TOO_LARGE, str(error))
            case _ if _is_missing(error):
                return Refusal(RefusalReason.UNROUTABLE, _how_to_make(self._spelled(queue)))
            case _ if isinstance(error, (*UNREACHABLE, ValueError)):  # the latter one is for a sender closed meanwhile
                return unreachable(said(error))
            case _:
                return Refusal(RefusalReason.REFUSED, said(error))

    async def _reason_of_lost_link(self, queue: str, error: Exception) -> Exception:
        try:
            async with self.in_time(), self._receiver(queue) as receiver:
                await _ask_as_receiver(receiver)
        except Exception as reason:
            return reason
        return error

    # -- queues ---------------------------------------------------------------------------------------------------

    async def _check(self, queue: str) -> None:
        """Raise if we cannot use the queue; no message is taken from it."""
        with self.translated(queue):
            async with self._receiver(queue) as receiver:
                await self._page(receiver, 0, 1)

    async def _page(self, receiver: ServiceBusReceiver, after: int, limit: int) -> list[ServiceBusReceivedMessage]:
        """Messages after a sequence number, `limit` at most. The broker may show fewer, but none only at the end."""
        if limit <= 0:
            return []
        async with self.in_time():
            try:
                return await receiver.peek_messages(limit, sequence_number=after + 1)
            except ServiceBusError as error:
                if isinstance(error, (*UNREACHABLE, *REFUSED_US)):
                    raise
                await _ask_as_receiver(receiver)
                raise

    # -- connections ----------------------------------------------------------------------------------------------

    def _spelled(self, queue: str) -> str:
        return queue if queue in self.existing else spelled(queue)

    def _client(self) -> ServiceBusClient:
        """A client holds no connection: each sender and receiver has its own."""
        return ServiceBusClient.from_connection_string(self._connection_string, retry_total=0)

    @asynccontextmanager
    async def _receiver(self, queue: str) -> AsyncIterator[ServiceBusReceiver]:
        receiver = self._client().get_queue_receiver(self._spelled(queue))
        try:
            yield receiver
        finally:
            self.close_later(receiver)

    def _sender(self, queue: str) -> _Sender:
        if queue not in self._senders:
            self._senders[queue] = _Sender(self._client().get_queue_sender(self._spelled(queue)))
        return self._senders[queue]

    def _drop_sender(self, queue: str, sender: _Sender | None) -> None:
        if sender is not None and self._senders.get(queue) is sender:
            del self._senders[queue]
            self.close_later(sender.link)


@dataclass(slots=True)
class _Sender:
    """The link to one queue, for one caller at a time."""

    link: ServiceBusSender
    rested: bool = False
    """Nothing was sent on the link since an earlier call."""


async def _batches(
    sender: ServiceBusSender, messages: Mapping[int, Message], results: dict[int, Refusal | None]
) -> list[tuple[ServiceBusMessageBatch, list[int]]]:
    """Batches as large as the broker takes, by number and by bytes. A message that fits into none is refused."""
    batch, indexes = await sender.create_message_batch(), list[int]()
    batches = [(batch, indexes)]
    for index, message in messages.items():
        if len(indexes) == MESSAGES_PER_BATCH or not _added(batch, message):
            batch, indexes = await sender.create_message_batch(), []
            batches.append((batch, indexes))
            if not _added(batch, message):
                results[index] = too_large(message, batch.max_size_in_bytes)
                continue
        indexes.append(index)
    return [(batch, indexes) for batch, indexes in batches if indexes]


def _added(batch: ServiceBusMessageBatch, message: Message) -> bool:
    try:
        batch.add_message(_outgoing(message))
    except MessageSizeExceededError:
        return False
    return True


def _outgoing(message: Message) -> ServiceBusMessage:
    return ServiceBusMessage(message.body, message_id=message.id)


class ServicebusConsumer(Consumer[ServiceBusReceivedMessage]):
    """A message is held under itself. The broker says for how long it is locked."""

    lost = (ServiceBusError, ValueError, RuntimeError, TimeoutError, OSError)

    def __init__(self, queue: str, prefetch: int, receiver: ServiceBusReceiver, transport: ServicebusTransport) -> None:
        super().__init__(queue, prefetch)
        self.receiver, self._transport = receiver, transport
        self._came = 0
        self._renew_at: dict[ServiceBusReceivedMessage, float] = {}

    async def take(self, room: int) -> list[HeldMessage[ServiceBusReceivedMessage]]:
        # For one message the SDK returns at once; for several it waits a moment whether more come.
        asked_at = time.monotonic()
        came = await self.receiver.receive_messages(room if self._came else 1, max_wait_time=IDLE_FOR)
        if not came and time.monotonic() - asked_at < IDLE_FOR / 2:
            raise ServiceBusConnectionError(message="The SDK has stopped receiving.")
        self._came = len(came)
        for message in came:
            self._plan_renewal(message)
        return [self.hold(message, _body(message)) for message in came]

    async def tell_settled(self, key: ServiceBusReceivedMessage, reason: str | None) -> None:
        del self._renew_at[key]
        if reason is None:
            await self.receiver.complete_message(key)
        else:
            reason = reason[:1000]  # the broker takes up to 4,096 bytes
            await self.receiver.dead_letter_message(key, reason=reason, error_description=reason)

    @property
    def renewal_pause(self) -> float:
        """Until the next lock has to be renewed; a message that comes meanwhile may be the next."""
        due = min(self._renew_at.values(), default=time.monotonic() + 1.0)
        return max(SHORTEST_RENEWAL / 2, min(due - time.monotonic(), 1.0))

    async def renew(self, keys: Sequence[ServiceBusReceivedMessage]) -> None:
        for key in keys:
            if key in self.held and self._renew_at[key] <= time.monotonic():
                await self._renew(key)

    async def give_back(self, keys: Sequence[ServiceBusReceivedMessage]) -> None:
        await asyncio.gather(*(self.receiver.abandon_message(key) for key in keys), return_exceptions=True)

    async def disconnect(self) -> None:
        self._transport.close_later(self.receiver)

    async def _renew(self, key: ServiceBusReceivedMessage) -> None:
        try:
            await self.receiver.renew_message_lock(key, timeout=self._transport.timeout)
            self._plan_renewal(key)
        except (MessageLockLostError, MessageAlreadySettled, ValueError):
            self.held.pop(key, None)
            self._renew_at.pop(key, None)
            self.changed.set()
        except ServiceBusError as error:
            self.lose(
                f"Service Bus cannot be reached: {said(error)}"
            )  # a consumer that waits for room would not notice

    def _plan_renewal(self, message: ServiceBusReceivedMessage) -> None:
        until = message.locked_until_utc or datetime.now(UTC)
        left = (until - datetime.now(UTC)).total_seconds()
        self._renew_at[message] = time.monotonic() + max(SHORTEST_RENEWAL, left / 3)


async def _ask_as_receiver(receiver: ServiceBusReceiver) -> None:
    """Raise what is wrong with a queue: the SDK tells it only to those who would receive.

    A link must open within the time for which the SDK waits for a message. Where that is too short, we wait longer;
    whoever calls this bounds the whole.
    """
    for wait in (1, 2, 4, 8, 16):
        with suppress(OperationTimeoutError):
            for message in await receiver.receive_messages(1, max_wait_time=wait):
                await receiver.abandon_message(message)
            return


def _body(message: ServiceBusReceivedMessage) -> bytes:
    return b"".join(message.body)


async def _close(link: ServiceBusSender | ServiceBusReceiver) -> None:
    with suppress(Exception):  # of a connection that is broken anyway
        async with asyncio.timeout(CLOSED_WITHIN):
            await link.close()


def spelled(queue: str) -> str:
    """As Service Bus takes it: to it `A` and `a` are the same, so a name with capitals gets a hash at its end."""
    if PLAIN_NAME.fullmatch(queue) and len(queue) <= LONGEST_NAME:
        return queue
    return hashed_name(queue, LONGEST_NAME, "-").lower()


def _how_to_make(queue: str) -> str:
    return (
        f"There is no queue {queue!r} that can be used, and only an administrator can make it: "
        f"`az servicebus queue create --resource-group GROUP --namespace-name NAMESPACE --name {queue} "
        "--max-delivery-count 2000`."
    )


def _lost_its_link(error: Exception) -> bool:
    """A sender is not told why its link was closed; a queue that is not there is the likeliest reason."""
    return isinstance(error, ServiceBusConnectionError) and "amqp:unknown-error" in str(error)


def _is_missing(error: Exception) -> bool:
    """Not there, or switched off."""
    return _is_absent(error) or isinstance(error, MessagingEntityDisabledError)


def _is_absent(error: BaseException | None) -> bool:
    """The broker may say so already when it is shown a token for the queue."""
    status = getattr(getattr(error, "inner_exception", None), "status_code", None)
    return status == 404 or isinstance(error, MessagingEntityNotFoundError)


def _refuses_batches(error: ServiceBusError) -> bool:
    return "duplicate detection enabled" in str(error)


def _connection_string(url: str, *, emulator: bool) -> str:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise TransportMisconfiguredError(f"The Service Bus URL cannot be read: {WANTED}.") from None
    if not parts.hostname or not parts.username or not parts.password:
        missing = "host" if not parts.hostname else "name of a key" if not parts.username else "key"
        raise TransportMisconfiguredError(f"The Service Bus URL has no {missing}: {WANTED}.")
    if parts.path.strip("/"):
        raise TransportMisconfiguredError(f"The Service Bus URL has a path: {WANTED}; queues are named by busload.")
    if parts.port and not emulator:
        raise TransportMisconfiguredError(f"The Service Bus URL has a port: {WANTED}. Only `emulator=true` takes one.")
    host = parts.netloc.rpartition("@")[2]
    name, key = unquote(parts.username), unquote(parts.password)
    if ";" in name + key:
        raise TransportMisconfiguredError(f"The Service Bus URL has a key with a semicolon: {WANTED}.")
    known = f"Endpoint=sb://{host}/;SharedAccessKeyName={name};SharedAccessKey={key}"
    return f"{known};UseDevelopmentEmulator=true" if emulator else known
