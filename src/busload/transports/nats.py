"""NATS JetStream: a stream and a durable pull consumer per queue.

A stream of its own keeps a queue's depth, limits and leader apart from those of other queues, so that one that grows or
is misconfigured does not stop the others.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from busload.errors import (
    Refusal,
    RefusalReason,
    TransportError,
    TransportMisconfiguredError,
    TransportUnavailableError,
)
from busload.transports.base import LoopLock, Message, short_name
from busload.transports.broker import Broker, Consumer, HeldMessage, in_windows, said, unreachable
from busload.transports.nats_connection import LOST, Connection, DeniedError, connect, read_address

CONSUMER = "workers"
LONGEST_NAME = 255

ROOM_FOR_HEADERS = 1024
"""NATS counts a message's id among its bytes."""

IN_FLIGHT = 1000
"""Messages published before their confirmations are awaited; the server buffers a few thousand."""

PULL_FOR, HEARTBEAT = 30.0, 2.0
SILENCE = 3 * HEARTBEAT
"""Seconds without a sign of life after which nobody is there any more."""

LOOK_WITHIN = 2.0

STREAM_MISSING, CONSUMER_MISSING = 10059, 10014
JETSTREAM_OFF = {10039, 10076}
REASONS = {10054: RefusalReason.TOO_LARGE} | dict.fromkeys([10023, 10028, 10047, 10077, 10167], RefusalReason.THROTTLED)
"""What the error codes of NATS mean. The codes for THROTTLED say that resources, memory or storage are used up, that a
limit of the stream is reached, or that too many requests are under way."""


class NatsTransport(Broker):
    """`nats://[user:password@|token@]host[:port][,host[:port]…]`, or `natss://` for TLS.

    Options: `replicas` of a stream that is made here (1), `ack_wait`, the seconds after which what a dead worker held
    comes again (30), `timeout`, the seconds to wait for a confirmation (10), and for TLS `ca`, `cert` and `key`.
    """

    name: ClassVar[str] = "nats"
    title = "NATS"
    lost = LOST

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._address = read_address(url)
        self.timeout = self._address.timeout
        self._connection: Connection | None = None
        self._connecting = LoopLock()
        self.max_bytes = 1024 * 1024 - ROOM_FOR_HEADERS

    async def declare(self, queues: Sequence[str]) -> None:
        for queue in dict.fromkeys(queues):
            await self._make_stream(queue)
            await self._make_consumer(queue)

    async def connect(self) -> None:
        await self._connected()

    async def publish_fitting(self, messages: Mapping[int, Message]) -> dict[int, Refusal]:
        connection = await self._connected()
        refused = await in_windows(messages, IN_FLIGHT, partial(self._confirmed, connection))
        if any(refusal is NOT_CONFIRMED for refusal in refused.values()):
            await connection.drop_if_dead()
        # No stream answers: either the stream does not exist, or its leader is being elected.
        silent = list({messages[index].queue for index, refusal in refused.items() if refusal is NO_STREAM})
        exists = dict(zip(silent, await asyncio.gather(*map(self._exists, silent)), strict=True))
        return {
            index: NO_LEADER if refusal is NO_STREAM and exists[messages[index].queue] else refusal
            for index, refusal in refused.items()
        }

    async def consumer(self, queue: str, prefetch: int) -> NatsConsumer:
        await self.declare([queue])
        consumer = NatsConsumer(await self._connected(), queue, prefetch, self._address.ack_wait)
        await consumer.subscribe()
        return consumer

    async def depth(self, queue: str) -> int | None:
        state = await self._state(queue)
        return int(state["messages"]) if state else 0

    async def peek(self, queue: str, *, limit: int) -> list[bytes] | None:
        state = await self._state(queue)
        bodies: list[bytes] = []
        sequence = int(state["first_seq"]) if state else 0
        while state and len(bodies) < limit and sequence <= int(state["last_seq"]):
            wanted = {"seq": sequence, "next_by_subj": _subject(queue)}
            answer = await self._request(f"STREAM.MSG.GET.{_stream(queue)}", wanted)
            if "error" in answer:  # the last one was taken meanwhile
                break
            bodies.append(base64.b64decode(answer["message"].get("data", "")))
            sequence = int(answer["message"]["seq"]) + 1
        return bodies

    async def disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection:
            await connection.close()

    def translation(self, error: Exception, queue: str | None) -> TransportError:
        return TransportUnavailableError(f"The connection to NATS is lost: {said(error)}")

    async def _connected(self) -> Connection:
        async with self._connecting():
            if self._connection is None or not self._connection.is_open:
                self._connection = await connect(self._address)
                self.max_bytes = self._connection.client.max_payload - ROOM_FOR_HEADERS
            return self._connection

    async def _confirmed(self, connection: Connection, messages: Mapping[int, Message]) -> dict[int, Refusal]:
        """Write all messages, then wait for all confirmations: never a round trip for each."""
        waiting: list[asyncio.Future[Msg]] = []
        lost = NOT_CONFIRMED
        try:
            async with self.in_time():
                for message in messages.values():
                    headers = {"Nats-Msg-Id": message.id}
                    waiting.append(await connection.ask(_subject(message.queue), message.body, headers))
                await asyncio.wait(waiting)
        except TimeoutError:
            pass
        except LOST as error:
            lost = unreachable(said(error))
        finally:
            for future in waiting:
                future.cancel()
        answers = [_refusal(future, lost) for future in waiting]
        answers += [lost] * (len(messages) - len(waiting))
        return {index: answer for index, answer in zip(messages, answers, strict=True) if answer is not None}

    async def _exists(self, queue: str) -> bool:
        try:
            answer = await self._request(f"STREAM.INFO.{_stream(queue)}", within=LOOK_WITHIN)
        except (TransportUnavailableError, TransportMisconfiguredError):
            return True
        return _code(answer) != STREAM_MISSING

    # -- streams and consumers --------------------------------------------------------------------------------------

    async def _make_stream(self, queue: str) -> None:
        stream = _stream(queue)
        wanted = {"subjects": [_subject(queue)], "retention": "workqueue", "storage": "file", "no_ack": False}
        answer = await self._request(f"STREAM.INFO.{stream}")
        if _code(answer) == STREAM_MISSING and queue in self.existing:
            raise TransportMisconfiguredError(
                f"There is no stream {stream!r}. Make it, for the subject {_subject(queue)!r}, or leave it out of "
                "queues=."
            )
        if _code(answer) == STREAM_MISSING:
            config = wanted | {"name": stream, "discard": "new", "num_replicas": self._address.replicas or 1}
            answer = await self._request(f"STREAM.CREATE.{stream}", config)
        _must_succeed(answer, f"the stream {stream!r} cannot be made")
        config = {"no_ack": False, "num_replicas": 1} | answer["config"]
        if config["num_replicas"] < (self._address.replicas or 1):
            wanted["num_replicas"] = self._address.replicas
        fix = "Change it with `nats stream edit`, or empty and remove it."
        _must_fit(f"The stream {stream!r}", config, wanted, fix)

    async def _make_consumer(self, queue: str) -> None:
        stream = _stream(queue)
        wait = int(self._address.ack_wait * 1e9)
        answer = await self._request(f"CONSUMER.INFO.{stream}.{CONSUMER}")
        if _code(answer) == CONSUMER_MISSING or ("config" in answer and answer["config"].get("ack_wait") != wait):
            config = {
                "durable_name": CONSUMER,
                "ack_policy": "explicit",
                "deliver_policy": "all",
                "ack_wait": wait,
                "max_deliver": -1,
                "max_ack_pending": -1,
                "replay_policy": "instant",
            }
            request = {"stream_name": stream, "config": config}
            answer = await self._request(f"CONSUMER.CREATE.{stream}.{CONSUMER}", request)
        _must_succeed(answer, f"the consumer {CONSUMER!r} of the stream {stream!r} cannot be made")
        wanted = {"ack_policy": "explicit", "max_deliver": -1, "deliver_subject": "", "filter_subject": ""}
        fix = "Remove it with `nats consumer rm`: it is made anew."
        _must_fit(f"The consumer {CONSUMER!r} of the stream {stream!r}", answer["config"], wanted, fix)

    async def _state(self, queue: str) -> dict[str, Any] | None:
        answer = await self._request(f"STREAM.INFO.{_stream(queue)}")
        if _code(answer) == STREAM_MISSING:
            return None
        _must_succeed(answer, f"the queue {queue!r} cannot be looked into")
        state: dict[str, Any] = answer["state"]
        return state

    async def _request(
        self, subject: str, payload: dict[str, Any] | None = None, *, within: float | None = None
    ) -> dict[str, Any]:
        """Ask JetStream. Errors in its answer are for the caller, unless nobody answers or we may not ask."""
        body = json.dumps(payload).encode() if payload else b""
        connection = await self._connected()
        with self.translated():
            try:
                async with asyncio.timeout(min(within or self.timeout, self.timeout)):
                    answer = await (await connection.ask(f"$JS.API.{subject}", body))
            except DeniedError as error:
                raise TransportMisconfiguredError(f"NATS denies what the transport needs: {error}. Grant it.") from None
            except TimeoutError:
                await connection.drop_if_dead()
                raise TransportUnavailableError("JetStream did not answer in time; a leader may be missing") from None
        if _status(answer):
            raise TransportUnavailableError("JetStream does not answer; is it switched on (`nats-server -js`)?")
        found: dict[str, Any] = json.loads(answer.data)
        return found


class NatsConsumer(Consumer[str]):
    """A message is held under the subject that its acknowledgement goes to.

    Several requests may be under way; what they can bring, and what is held, are never more than `prefetch`.
    """

    lost = LOST

    def __init__(self, connection: Connection, queue: str, prefetch: int, ack_wait: float) -> None:
        super().__init__(queue, prefetch)
        self._connection, self.loan_for = connection, ack_wait
        self._arrived: list[HeldMessage[str]] = []
        self._asked = 0
        self._inbox = connection.client.new_inbox()
        self._subscription: Subscription | None = None

    async def subscribe(self) -> None:
        self._connection.listeners.add(self.lose)
        self._subscription = await self._connection.client.subscribe(self._inbox, cb=self._receive)

    async def take(self, room: int) -> list[HeldMessage[str]]:
        if not self._arrived:
            self.changed.clear()
            await self._ask_for_more(room - self._asked)
            try:
                async with asyncio.timeout(SILENCE if self._asked else None):
                    await self.changed.wait()
            except TimeoutError:
                self.lose("NATS has gone silent")
        arrived, self._arrived = self._arrived, []
        return arrived

    async def tell_settled(self, key: str, reason: str | None) -> None:
        verdict = b"+ACK" if reason is None else b"+TERM " + reason.encode()
        await self._connection.client.publish(key, verdict)

    async def renew(self, keys: Sequence[str]) -> None:
        for key in keys:
            await self._connection.client.publish(key, b"+WPI")

    async def give_back(self, keys: Sequence[str]) -> None:
        self._connection.listeners.discard(self.lose)
        if self._subscription:
            drain: Callable[[], Awaitable[None]] = self._subscription.drain
            await drain()  # what is on its way to us arrives, and is given back
        for key in {*keys, *self.held}:
            await self._connection.client.publish(key, b"-NAK")
        self.held.clear()
        await self._connection.client.flush()

    async def _ask_for_more(self, room: int) -> None:
        """Not for a few while a request is under way: a request for each message would cost a round trip each."""
        if room <= 0 or (self._asked and room < self.prefetch / 2):
            return
        request = {"batch": room, "expires": int(PULL_FOR * 1e9), "idle_heartbeat": int(HEARTBEAT * 1e9)}
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{_stream(self.queue)}.{CONSUMER}"
        await self._connection.client.publish(subject, json.dumps(request).encode(), reply=self._inbox)
        self._asked += room

    async def _receive(self, message: Msg) -> None:
        if message.reply.startswith("$JS.ACK."):
            self._arrived.append(self.hold(message.reply, message.data))
            self._asked = max(0, self._asked - 1)
        else:
            self._hear(_status(message), message.headers or {})
        self.changed.set()

    def _hear(self, status: str, headers: dict[str, str]) -> None:
        told = headers.get("Description", "")
        if status in ("404", "408") or told == "Batch Completed":  # a request has ended
            self._asked = max(0, self._asked - int(headers.get("Nats-Pending-Messages", self._asked)))
        elif status != "100":  # 100 is a heartbeat
            self.lose(f"NATS has ended the request for messages: {told or status or 'no reason given'}")


def _stream(queue: str) -> str:
    """A stream's name has no dots; queues have no tilde."""
    return short_name(queue, LONGEST_NAME, "~").replace(".", "~")


def _subject(queue: str) -> str:
    """No part of a subject is empty, as `payments.` and `a..b` have one."""
    return ".".join(part or "~" for part in queue.split("."))


def _status(message: Msg) -> str:
    return (message.headers or {}).get("Status", "")


def _code(answer: dict[str, Any]) -> int:
    return int(answer.get("error", {}).get("err_code", 0))


def _must_succeed(answer: dict[str, Any], what: str) -> None:
    error = answer.get("error")
    if not error:
        return
    told = f"{what}: {error.get('description', 'no reason given')} ({error.get('err_code')})"
    if error.get("code") in (408, 503) and _code(answer) not in JETSTREAM_OFF:
        raise TransportUnavailableError(f"NATS is not ready, {told}")
    raise TransportMisconfiguredError(f"NATS refuses: {told}. Change its configuration or the URL's options.")


def _must_fit(what: str, config: dict[str, Any], wanted: dict[str, Any], fix: str) -> None:
    unfit = {name: config.get(name, "") for name in wanted if config.get(name, "") != wanted[name]}
    if unfit:
        raise TransportMisconfiguredError(
            f"{what} exists with settings that do not fit: found {unfit}, wanted "
            f"{ {name: wanted[name] for name in unfit} }. {fix}"
        )


def _refusal(future: asyncio.Future[Msg], lost: Refusal) -> Refusal | None:
    if future.cancelled():
        return lost
    if error := future.exception():
        return Refusal(RefusalReason.REFUSED, str(error)) if isinstance(error, DeniedError) else unreachable(str(error))
    message = future.result()
    if _status(message):
        return NO_STREAM
    answer = json.loads(message.data)
    if "error" not in answer:
        return None
    told = str(answer["error"].get("description", "no reason given"))
    away = answer["error"].get("code") in (408, 503)
    return Refusal(REASONS.get(_code(answer), RefusalReason.UNREACHABLE if away else RefusalReason.REFUSED), told)


NOT_CONFIRMED = unreachable("NATS did not confirm it in time")
NO_STREAM = Refusal(RefusalReason.UNROUTABLE, "no stream takes it; declare the queue first")
NO_LEADER = unreachable("its stream has no leader now")
