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
from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

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
    PublishFailed,
    Refusal,
    RefusalReason,
    TransportError,
    TransportMisconfigured,
    TransportUnavailable,
)
from busload.transport.base import Delivery, Message, Transport, Turn, hashed_name, heed_cancellation
from busload.transport.options import read_options, seconds

log = logging.getLogger("busload.transport")

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


class ServicebusTransport(Transport):
    """Queues of an Azure Service Bus namespace.

    Options of the URL: `timeout`, the seconds within which a call must succeed (10); `emulator=true` for Microsoft's
    emulator or what looks like it: a port of one's own, without TLS.
    """

    name = "servicebus"
    max_bytes = 254 * 1024  # of the 256 KiB of the standard tier; the rest is for what stands around a body

    def __init__(self, url: str) -> None:
        super().__init__(url)
        namespace = _namespace(url)
        options = read_options(url, {"timeout": seconds, "emulator": _flag})
        self._timeout: float = options.get("timeout", 10.0)
        self._connection_string = _connection_string(namespace, emulator=options.get("emulator", False))
        self._lines: dict[str, _Line] = {}
        self._turns: defaultdict[str, Turn] = defaultdict(Turn)
        self._singly: set[str] = set()
        self._desks: set[_Desk] = set()
        self._closing: set[asyncio.Task[None]] = set()

    async def declare(self, queues: Sequence[str]) -> None:
        await asyncio.gather(*(self._check(queue) for queue in set(queues)))

    async def publish(self, messages: Sequence[Message]) -> None:
        by_queue: dict[str, dict[int, Message]] = {}
        for index, message in enumerate(messages):
            by_queue.setdefault(message.queue, {})[index] = message
        refused: dict[int, Refusal] = {}
        for each in await asyncio.gather(*(self._publish_to(queue, some) for queue, some in by_queue.items())):
            refused |= each
        if refused:
            raise PublishFailed(dict(sorted(refused.items())))

    async def deliveries(self, queue: str, *, prefetch: int) -> AsyncIterator[Delivery]:
        receiver = self._client().get_queue_receiver(spelled(queue))
        desk = _Desk(queue, receiver, prefetch, self._timeout)
        self._desks.add(desk)
        renewing = asyncio.create_task(desk.keep_renewing())
        try:
            async with self._translated(queue):
                came: list[ServiceBusReceivedMessage] = []
                while True:
                    room = await desk.room()
                    heed_cancellation()
                    # For one message the SDK returns at once; for several it waits a moment whether more come.
                    asked_at = time.monotonic()
                    came = await receiver.receive_messages(room if came else 1, max_wait_time=IDLE_FOR)
                    if not came and time.monotonic() - asked_at < IDLE_FOR / 2:
                        raise ServiceBusConnectionError(message="The SDK has stopped receiving.")
                    for delivery in [desk.lend(message) for message in came]:
                        yield delivery
        finally:
            self._desks.discard(desk)
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            await desk.give_back()
            self._close_later(receiver)

    async def peek(self, queue: str, *, limit: int) -> list[bytes] | None:
        bodies: list[bytes] = []
        try:
            async with self._translated(queue), self._receiver(queue) as receiver:
                after = 0
                while page := await self._page(receiver, after, limit - len(bodies)):
                    bodies += [_body(each) for each in page]
                    after = page[-1].sequence_number or 0
        except TransportMisconfigured as error:
            if not _is_absent(error.__cause__):
                raise
        return bodies

    async def aclose(self) -> None:
        desks, self._desks = self._desks, set()
        lines, self._lines = self._lines, {}
        for desk in desks:
            await desk.give_back()
            self._close_later(desk.receiver)
        for line in lines.values():
            self._close_later(line.sender)
        while self._closing:
            await asyncio.wait(self._closing)

    # -- publishing -----------------------------------------------------------------------------------------------

    async def _publish_to(self, queue: str, messages: Mapping[int, Message]) -> dict[int, Refusal]:
        """What one queue did not confirm."""
        tally = _Tally(messages)
        line: _Line | None = None  # until it is our turn
        try:
            async with asyncio.timeout(self._timeout), self._turns[queue]():
                line = self._line(queue)
                await self._send_all(queue, line, tally)
                line.rested = True
        except asyncio.CancelledError:
            self._drop_line(queue, line)  # in the midst of a frame, perhaps
            raise
        except TimeoutError:
            self._drop_line(queue, line)
            late = Refusal(RefusalReason.UNREACHABLE, f"not confirmed within {self._timeout:g} s")
            tally.note(list(tally.open), late)
        except Exception as error:
            self._drop_line(queue, line)
            tally.note(list(tally.open), await self._refusal(queue, error))
        return tally.refused

    async def _send_all(self, queue: str, line: _Line, tally: _Tally) -> None:
        for parcel in await _parcels(line.sender, tally, self.max_bytes):
            refusal = None if queue in self._singly else await self._send(queue, line, parcel.batch)
            if queue not in self._singly:
                tally.note(parcel.indexes, refusal)
                continue
            for index in parcel.indexes:
                tally.note([index], await self._send(queue, line, _outgoing(tally.open[index])))

    async def _send(
        self, queue: str, line: _Line, content: ServiceBusMessage | ServiceBusMessageBatch
    ) -> Refusal | None:
        """Why it was not confirmed, if so. What comes after it may still be: the SDK connects anew for each."""
        try:
            await self._send_once(line, content)
        except ServiceBusError as error:
            if _refuses_batches(error) and isinstance(content, ServiceBusMessageBatch):
                log.warning("%s is partitioned and detects duplicates: its messages are sent one by one", queue)
                self._singly.add(queue)
            return await self._refusal(queue, error)
        return None

    async def _send_once(self, line: _Line, content: ServiceBusMessage | ServiceBusMessageBatch) -> None:
        rested, line.rested = line.rested, False
        try:
            await line.sender.send_messages(content)
        except ServiceBusConnectionError:
            # A connection that rested may have died while nobody looked: that is no news of the broker.
            if not rested:
                raise
            await line.sender.send_messages(content)

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
                return Refusal(RefusalReason.UNROUTABLE, _how_to_make(queue))
            case _ if isinstance(error, (*UNREACHABLE, ValueError)):  # the latter one is for a sender closed meanwhile
                return Refusal(RefusalReason.UNREACHABLE, _said(error))
            case _:
                return Refusal(RefusalReason.REFUSED, _said(error))

    async def _reason_of_lost_link(self, queue: str, error: Exception) -> Exception:
        try:
            async with asyncio.timeout(self._timeout), self._receiver(queue) as receiver:
                await _ask_as_receiver(receiver)
        except Exception as reason:
            return reason
        return error

    # -- queues ---------------------------------------------------------------------------------------------------

    async def _check(self, queue: str) -> None:
        """Raise if a queue is not there or not ours; nothing is taken from one that is."""
        async with self._translated(queue), self._receiver(queue) as receiver:
            await self._page(receiver, 0, 1)

    async def _page(self, receiver: ServiceBusReceiver, after: int, limit: int) -> list[ServiceBusReceivedMessage]:
        """What comes after a number, `limit` at most; the broker may show fewer, but none only if there are none."""
        if limit <= 0:
            return []
        async with asyncio.timeout(self._timeout):
            try:
                return await receiver.peek_messages(limit, sequence_number=after + 1)
            except ServiceBusError as error:
                if isinstance(error, (*UNREACHABLE, *REFUSED_US)):
                    raise
                await _ask_as_receiver(receiver)
                raise

    @asynccontextmanager
    async def _translated(self, queue: str) -> AsyncIterator[None]:
        """The SDK's errors as ours."""
        try:
            yield
        except (TransportError, GeneratorExit):
            raise
        except Exception as error:
            raise _translation(queue, error, self._timeout) from error

    # -- connections ----------------------------------------------------------------------------------------------

    def _client(self) -> ServiceBusClient:
        """It holds no connection: each sender and receiver has its own."""
        return ServiceBusClient.from_connection_string(self._connection_string, retry_total=0)

    @asynccontextmanager
    async def _receiver(self, queue: str) -> AsyncIterator[ServiceBusReceiver]:
        receiver = self._client().get_queue_receiver(spelled(queue))
        try:
            yield receiver
        finally:
            self._close_later(receiver)

    def _line(self, queue: str) -> _Line:
        if queue not in self._lines:
            self._lines[queue] = _Line(self._client().get_queue_sender(spelled(queue)))
        return self._lines[queue]

    def _drop_line(self, queue: str, line: _Line | None) -> None:
        if line is not None and self._lines.get(queue) is line:
            del self._lines[queue]
            self._close_later(line.sender)

    def _close_later(self, link: ServiceBusSender | ServiceBusReceiver) -> None:
        """The SDK takes a second for it, in which there is nothing to wait for."""
        task = asyncio.create_task(_close(link))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class _Tally:
    """What became of messages, by index."""

    def __init__(self, messages: Mapping[int, Message]) -> None:
        self.open = dict(messages)
        self.refused: dict[int, Refusal] = {}

    def note(self, indexes: Sequence[int], refusal: Refusal | None) -> None:
        """Without a refusal they are confirmed."""
        for index in indexes:
            del self.open[index]
            if refusal:
                self.refused[index] = refusal


@dataclass(slots=True)
class _Line:
    """A way to one queue, for one caller at a time."""

    sender: ServiceBusSender
    rested: bool = False
    """Nothing was sent on it since an earlier call."""


@dataclass(frozen=True, slots=True)
class _Parcel:
    """What is confirmed or refused as a whole."""

    batch: ServiceBusMessageBatch
    indexes: list[int]


async def _parcels(sender: ServiceBusSender, tally: _Tally, max_bytes: int) -> list[_Parcel]:
    """S1-48: as large as the broker takes, by number and by bytes; what fits into none is refused."""
    parcels = [_Parcel(await sender.create_message_batch(), [])]
    for index, message in list(tally.open.items()):
        if len(message.body) > max_bytes:
            tally.note([index], _too_large(message, max_bytes))
            continue
        if len(parcels[-1].indexes) == MESSAGES_PER_BATCH or not _added(parcels[-1].batch, message):
            parcels.append(_Parcel(await sender.create_message_batch(), []))
            if not _added(parcels[-1].batch, message):
                tally.note([index], _too_large(message, parcels[-1].batch.max_size_in_bytes))
                continue
        parcels[-1].indexes.append(index)
    return [parcel for parcel in parcels if parcel.indexes]


def _added(batch: ServiceBusMessageBatch, message: Message) -> bool:
    try:
        batch.add_message(_outgoing(message))
    except MessageSizeExceededError:
        return False
    return True


def _outgoing(message: Message) -> ServiceBusMessage:
    return ServiceBusMessage(message.body, message_id=message.id)


def _too_large(message: Message, max_bytes: int) -> Refusal:
    return Refusal(RefusalReason.TOO_LARGE, f"found {len(message.body)} bytes, wanted at most {max_bytes}")


class _Desk:
    """What one receiver has on loan. Its locks are renewed until it is settled or given back."""

    def __init__(self, queue: str, receiver: ServiceBusReceiver, prefetch: int, timeout: float) -> None:
        self.queue, self.receiver = queue, receiver
        self._prefetch, self._timeout = prefetch, timeout
        self._loans: set[_Loan] = set()
        self._changed = asyncio.Event()
        self._broken: ServiceBusError | None = None

    async def room(self) -> int:
        """Wait until more may be on loan, and return how many."""
        while True:
            if self._broken:
                raise self._broken
            if room := self._prefetch - len(self._loans):
                return room
            self._changed.clear()
            await self._changed.wait()

    def lend(self, message: ServiceBusReceivedMessage) -> Delivery:
        loan = _Loan(self, message)
        self._loans.add(loan)
        return loan

    async def settle(self, loan: _Loan, settling: Coroutine[Any, Any, None]) -> None:
        """If it fails, the broker takes the message back by itself, and it comes again."""
        if loan not in self._loans or loan.settled:
            settling.close()
            return
        loan.settled = True
        await self._quietly(settling)
        self._end(loan)

    async def give_back(self) -> None:
        await asyncio.gather(*(loan.abandon() for loan in list(self._loans)))
        self._broken = ServiceBusConnectionError(message="closed")
        self._changed.set()

    async def keep_renewing(self) -> None:
        while True:
            due = min((loan.renew_at for loan in self._loans), default=time.monotonic() + 1.0)
            await asyncio.sleep(max(SHORTEST_RENEWAL / 2, min(due - time.monotonic(), 1.0)))
            for loan in [loan for loan in self._loans if loan.renew_at <= time.monotonic() and not loan.settled]:
                await self._renew(loan)

    async def _renew(self, loan: _Loan) -> None:
        try:
            await self.receiver.renew_message_lock(loan.message, timeout=self._timeout)
            loan.plan_renewal()
        except (MessageLockLostError, MessageAlreadySettled, ValueError):
            self._end(loan)
        except ServiceBusError as error:
            # A consumer that waits for room would not notice.
            self._broken = error
            self._changed.set()

    def _end(self, loan: _Loan) -> None:
        self._loans.discard(loan)
        self._changed.set()

    async def _quietly(self, settling: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                await settling
        except (ServiceBusError, ValueError, RuntimeError, TimeoutError) as error:
            log.debug("A message of %s comes again: it could not be settled, %s", self.queue, _said(error))


class _Loan(Delivery):
    def __init__(self, desk: _Desk, message: ServiceBusReceivedMessage) -> None:
        self.queue, self.body = desk.queue, _body(message)
        self.message = message
        self.settled = False
        self._desk = desk
        self.plan_renewal()

    def plan_renewal(self) -> None:
        """At a third of the lock, so that two renewals may fail before it is lost."""
        until = self.message.locked_until_utc or datetime.now(UTC)
        left = (until - datetime.now(UTC)).total_seconds()
        self.renew_at = time.monotonic() + max(SHORTEST_RENEWAL, left / 3)

    async def ack(self) -> None:
        await self._desk.settle(self, self._desk.receiver.complete_message(self.message))

    async def abandon(self) -> None:
        await self._desk.settle(self, self._desk.receiver.abandon_message(self.message))

    async def reject(self, reason: str) -> None:
        reason = reason[:1000]  # the broker takes up to 4,096 bytes
        burying = self._desk.receiver.dead_letter_message(self.message, reason=reason, error_description=reason)
        await self._desk.settle(self, burying)


async def _ask_as_receiver(receiver: ServiceBusReceiver) -> None:
    """Raise what is wrong with a queue: the SDK tells it only to those who would receive."""
    for message in await receiver.receive_messages(1, max_wait_time=1):
        await receiver.abandon_message(message)


def _body(message: ServiceBusReceivedMessage) -> bytes:
    return b"".join(message.body)


async def _close(link: ServiceBusSender | ServiceBusReceiver) -> None:
    with suppress(Exception):  # of a connection that is broken anyway
        async with asyncio.timeout(CLOSED_WITHIN):
            await link.close()


def _translation(queue: str, error: Exception, timeout: float) -> TransportError:
    match error:
        case _ if _is_missing(error):
            return TransportMisconfigured(_how_to_make(queue))
        case _ if isinstance(error, REFUSED_US):
            return TransportMisconfigured(
                f"Service Bus refuses the key for the queue {queue!r}: {_said(error)} Wanted a shared access policy "
                "with the rights Send and Listen; check its name and key in the URL."
            )
        case TimeoutError():
            return TransportUnavailable(f"Service Bus did not answer within {timeout:g} s.")
        case _:
            return TransportUnavailable(f"Service Bus cannot be reached: {_said(error)}")


def spelled(queue: str) -> str:
    """As Service Bus takes it: to it `A` and `a` are the same, so a name with capitals gets a hash at its end."""
    if PLAIN_NAME.fullmatch(queue) and len(queue) <= LONGEST_NAME:
        return queue
    return hashed_name(queue, LONGEST_NAME, "-").lower()


def _how_to_make(queue: str) -> str:
    queue = spelled(queue)
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


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("wanted true or false")
    return text == "true"


def _namespace(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise TransportMisconfigured(f"The Service Bus URL cannot be read: {WANTED}.") from None
    if not parts.hostname or not parts.username or not parts.password:
        missing = "host" if not parts.hostname else "name of a key" if not parts.username else "key"
        raise TransportMisconfigured(f"The Service Bus URL has no {missing}: {WANTED}.")
    if parts.path.strip("/"):
        raise TransportMisconfigured(f"The Service Bus URL has a path: {WANTED}; queues are named by busload.")
    return parts


def _connection_string(parts: SplitResult, *, emulator: bool) -> str:
    if parts.port and not emulator:
        raise TransportMisconfigured(f"The Service Bus URL has a port: {WANTED}. Only `emulator=true` takes a port.")
    host = parts.netloc.rpartition("@")[2]
    name, key = unquote(parts.username or ""), unquote(parts.password or "")
    if ";" in name + key:
        raise TransportMisconfigured(f"The Service Bus URL has a key with a semicolon: {WANTED}.")
    known = f"Endpoint=sb://{host}/;SharedAccessKeyName={name};SharedAccessKey={key}"
    return f"{known};UseDevelopmentEmulator=true" if emulator else known
