"""NATS JetStream: a stream and a durable pull consumer per queue.

A stream of its own keeps a queue's depth, limits and leader apart from those of other queues, so that one that grows or
is misconfigured does not stop the others. The client is used for its protocol only: it never connects anew by itself,
and whoever waits for an answer learns at once that the connection is gone.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import random
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar
from urllib.parse import SplitResult, unquote, urlsplit

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from busload.errors import (
    PublishFailed,
    Refusal,
    RefusalReason,
    TransportMisconfigured,
    TransportUnavailable,
)
from busload.transport.base import Delivery, Message, Transport, Turn, heed_cancellation, short_name
from busload.transport.options import TLS_FILES, read_options, seconds, tls_context

CONSUMER = "workers"
DEFAULT_PORT = 4222
MOST_REPLICAS = 5
LONGEST_NAME = 255

ROOM_FOR_HEADERS = 1024
"""NATS counts a message's id among its bytes."""

IN_FLIGHT = 1000
"""Messages published before their confirmations are awaited; the server buffers a few thousand."""

PULL_FOR, HEARTBEAT = 30.0, 2.0
SILENCE = 3 * HEARTBEAT
"""Seconds without a sign of life after which nobody is there any more."""

PING_EVERY = 5
CONNECT_WITHIN, CLOSE_WITHIN, DROP_WITHIN, LOOK_WITHIN = 3.0, 2.0, 0.5, 2.0

LOST = (OSError, NatsError, asyncio.TimeoutError)
"""What the client raises when a connection is no more. A `TimeoutError` of NATS is one of asyncio, too."""

STREAM_MISSING, CONSUMER_MISSING = 10059, 10014
JETSTREAM_OFF = {10039, 10076}
TOO_LARGE_CODES = {10054}
FULL_CODES = {10023, 10028, 10047, 10077, 10167}
"""Resources, memory or storage used up, a limit of the stream reached, too many requests under way."""

log = logging.getLogger(__name__)


class NatsTransport(Transport):
    """`nats://[user:password@|token@]host[:port][,host[:port]…]`, or `natss://` for TLS.

    Options: `replicas` of a stream that is made here (1), `ack_wait`, the seconds after which what a dead worker held
    comes again (30), `timeout`, the seconds to wait for a confirmation (10), and for TLS `ca`, `cert` and `key`.
    """

    name: ClassVar[str] = "nats"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._address = _read(url)
        self._connection: _Connection | None = None
        self._connecting = Turn()
        self._loans: set[_Loans] = set()
        self.max_bytes = 1024 * 1024 - ROOM_FOR_HEADERS

    async def declare(self, queues: Sequence[str]) -> None:
        connection = await self._connected()
        for queue in dict.fromkeys(queues):
            await self._make_stream(connection, queue)
            await self._make_consumer(connection, queue)

    async def publish(self, messages: Sequence[Message]) -> None:
        if not messages:
            return
        everyone = range(len(messages))
        try:
            connection = await self._connected()
        except TransportUnavailable as error:
            raise PublishFailed(dict.fromkeys(everyone, _unreachable(str(error)))) from error
        too_large = {
            index: Refusal(RefusalReason.TOO_LARGE, f"{len(message.body)} bytes, at most {self.max_bytes} pass")
            for index, message in enumerate(messages)
            if len(message.body) > self.max_bytes
        }
        refused = too_large | await self._publish(connection, messages, [i for i in everyone if i not in too_large])
        if refused:
            raise PublishFailed({index: refused[index] for index in sorted(refused)})

    async def deliveries(self, queue: str, *, prefetch: int) -> AsyncIterator[Delivery]:
        await self.declare([queue])
        loans = _Loans(await self._connected(), queue, prefetch, self._address.ack_wait)
        self._loans.add(loans)
        try:
            await loans.open()
            while True:
                yield await loans.next()
        finally:
            self._loans.discard(loans)
            await loans.close()

    async def depth(self, queue: str) -> int | None:
        state = await self._state(queue)
        return int(state["messages"]) if state else 0

    async def peek(self, queue: str, *, limit: int) -> list[bytes] | None:
        state = await self._state(queue)
        connection = await self._connected()
        bodies: list[bytes] = []
        sequence = int(state["first_seq"]) if state else 0
        while state and len(bodies) < limit and sequence <= int(state["last_seq"]):
            answer = await self._request(
                connection, f"STREAM.MSG.GET.{_stream(queue)}", {"seq": sequence, "next_by_subj": _subject(queue)}
            )
            if "error" in answer:  # the last one was taken meanwhile
                break
            bodies.append(base64.b64decode(answer["message"].get("data", "")))
            sequence = int(answer["message"]["seq"]) + 1
        return bodies

    async def aclose(self) -> None:
        for loans in list(self._loans):
            await loans.close()
        connection, self._connection = self._connection, None
        if connection:
            await connection.close()

    # -- connecting -----------------------------------------------------------------------------------------------

    async def _connected(self) -> _Connection:
        async with self._connecting():
            if self._connection is None or not self._connection.is_open:
                self._connection = await _connect(self._address)
                self.max_bytes = self._connection.max_payload - ROOM_FOR_HEADERS
            return self._connection

    async def _let_go_if_dead(self, connection: _Connection) -> None:
        """After an answer did not come: a leader may be missing, or the whole server; the latter we leave."""
        if not await connection.answers():
            await connection.drop()

    # -- publishing -----------------------------------------------------------------------------------------------

    async def _publish(
        self, connection: _Connection, messages: Sequence[Message], indexes: Sequence[int]
    ) -> dict[int, Refusal]:
        refused: dict[int, Refusal] = {}
        for start in range(0, len(indexes), IN_FLIGHT):
            some = indexes[start : start + IN_FLIGHT]
            answers = await self._confirmations(connection, [messages[index] for index in some])
            found = {index: answer for index, answer in zip(some, answers, strict=True) if answer is not None}
            refused |= found
            if any(refusal is NOT_CONFIRMED for refusal in found.values()):
                # Another window would take as long again.
                refused |= dict.fromkeys(indexes[start + IN_FLIGHT :], NOT_CONFIRMED)
                await self._let_go_if_dead(connection)
                break
        return await self._told_apart(connection, messages, refused)

    async def _confirmations(self, connection: _Connection, messages: Sequence[Message]) -> list[Refusal | None]:
        """For each message why it was refused, or None."""
        waiting: list[asyncio.Future[Msg]] = []
        lost = NOT_CONFIRMED
        try:
            async with asyncio.timeout(self._address.timeout):
                for message in messages:
                    headers = {"Nats-Msg-Id": message.id}
                    waiting.append(await connection.ask(_subject(message.queue), message.body, headers))
                await asyncio.wait(waiting)
        except TimeoutError:
            pass
        except LOST as error:
            lost = _unreachable(_said(error))
        finally:
            connection.forget(waiting)
        unsent = len(messages) - len(waiting)
        return [_refusal(future, lost) for future in waiting] + [lost] * unsent

    async def _told_apart(
        self, connection: _Connection, messages: Sequence[Message], refused: dict[int, Refusal]
    ) -> dict[int, Refusal]:
        """No stream answers: either there is none, or its leader is being elected."""
        silent = list({messages[index].queue for index, refusal in refused.items() if refusal is NO_STREAM})
        there = dict(zip(silent, await self._are_there(connection, silent), strict=True))
        return {
            index: NO_LEADER if refusal is NO_STREAM and there[messages[index].queue] else refusal
            for index, refusal in refused.items()
        }

    async def _are_there(self, connection: _Connection, queues: Sequence[str]) -> list[bool]:
        return await asyncio.gather(*(self._is_there(connection, queue) for queue in queues))

    async def _is_there(self, connection: _Connection, queue: str) -> bool:
        try:
            answer = await self._request(connection, f"STREAM.INFO.{_stream(queue)}", within=LOOK_WITHIN)
        except (TransportUnavailable, TransportMisconfigured):
            return True
        return _code(answer) != STREAM_MISSING

    # -- streams and consumers --------------------------------------------------------------------------------------

    async def _make_stream(self, connection: _Connection, queue: str) -> None:
        stream = _stream(queue)
        answer = await self._request(connection, f"STREAM.INFO.{stream}")
        if _code(answer) == STREAM_MISSING:
            answer = await self._request(
                connection,
                f"STREAM.CREATE.{stream}",
                {
                    "name": stream,
                    "subjects": [_subject(queue)],
                    "retention": "workqueue",
                    "storage": "file",
                    "discard": "new",
                    "num_replicas": self._address.replicas or 1,
                },
            )
        _must_succeed(answer, f"the stream {stream!r} cannot be made")
        self._check_stream(queue, answer["config"])

    def _check_stream(self, queue: str, config: dict[str, Any]) -> None:
        wanted = {"subjects": [_subject(queue)], "retention": "workqueue", "storage": "file", "no_ack": False}
        unfit = {key: config.get(key, False) for key, value in wanted.items() if config.get(key, False) != value}
        if config.get("num_replicas", 1) < (self._address.replicas or 1):
            unfit["num_replicas"] = config.get("num_replicas", 1)
            wanted["num_replicas"] = self._address.replicas
        if unfit:
            raise TransportMisconfigured(
                f"The stream {_stream(queue)!r} exists with settings that do not fit: found {unfit}, wanted "
                f"{ {key: wanted[key] for key in unfit} }. Change it with `nats stream edit`, or empty and remove it."
            )

    async def _make_consumer(self, connection: _Connection, queue: str) -> None:
        stream = _stream(queue)
        wait = int(self._address.ack_wait * 1e9)
        answer = await self._request(connection, f"CONSUMER.INFO.{stream}.{CONSUMER}")
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
            answer = await self._request(
                connection,
                f"CONSUMER.CREATE.{stream}.{CONSUMER}",
                {"stream_name": stream, "config": config},
            )
        _must_succeed(answer, f"the consumer {CONSUMER!r} of the stream {stream!r} cannot be made")
        _check_consumer(stream, answer["config"])

    async def _state(self, queue: str) -> dict[str, Any] | None:
        answer = await self._request(await self._connected(), f"STREAM.INFO.{_stream(queue)}")
        if _code(answer) == STREAM_MISSING:
            return None
        _must_succeed(answer, f"the queue {queue!r} cannot be looked into")
        state: dict[str, Any] = answer["state"]
        return state

    async def _request(
        self,
        connection: _Connection,
        subject: str,
        payload: dict[str, Any] | None = None,
        *,
        within: float | None = None,
    ) -> dict[str, Any]:
        """Ask JetStream; its errors are for the caller, unless nobody answers or we may not ask."""
        body = json.dumps(payload).encode() if payload else b""
        try:
            async with asyncio.timeout(min(within or self._address.timeout, self._address.timeout)):
                answer = await (await connection.ask(f"$JS.API.{subject}", body))
        except _Denied as error:
            raise TransportMisconfigured(f"NATS does not let us do what we must: {error}. Grant it.") from error
        except TimeoutError as error:
            await self._let_go_if_dead(connection)
            raise TransportUnavailable("JetStream did not answer in time; a leader may be missing") from error
        except LOST as error:
            raise TransportUnavailable(f"The connection to NATS is lost: {_said(error)}") from error
        if _status(answer):
            raise TransportUnavailable("JetStream does not answer; is it switched on (`nats-server -js`)?")
        found: dict[str, Any] = json.loads(answer.data)
        return found


class NatsDelivery(Delivery):
    def __init__(self, loans: _Loans, message: Msg) -> None:
        self.queue = loans.queue
        self.body = message.data
        self.reply = message.reply
        self._loans = loans

    async def ack(self) -> None:
        await self._loans.end(self, b"+ACK")

    async def reject(self, reason: str) -> None:
        log.warning("Threw away a message of %s that nobody can read: %s", self.queue, reason)
        await self._loans.end(self, b"+TERM " + reason.encode())


class _Loans:
    """What one iterator has asked for and holds.

    It may have several requests under way; what they can bring, and what is held, are never more than `prefetch`.
    """

    def __init__(self, connection: _Connection, queue: str, prefetch: int, ack_wait: float) -> None:
        self.queue = queue
        self._connection = connection
        self._prefetch = prefetch
        self._ack_wait = ack_wait
        self._held: dict[str, NatsDelivery] = {}
        self._arrived: deque[NatsDelivery] = deque()
        self._asked = 0
        self._broken: str | None = None
        self._changed = asyncio.Event()
        self._inbox = ""
        self._subscription: Subscription | None = None
        self._renewing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        self._connection.on_closed(self._lose)
        self._inbox = self._connection.client.new_inbox()
        try:
            self._subscription = await self._connection.client.subscribe(self._inbox, cb=self._receive)
        except LOST as error:
            raise TransportUnavailable(f"The connection to NATS is lost: {_said(error)}") from error
        self._renewing = asyncio.create_task(self._renew())

    async def next(self) -> Delivery:
        while True:
            while self._arrived:
                delivery = self._arrived.popleft()
                if delivery.reply in self._held:
                    await self._ask_for_more()
                    return delivery
            if self._broken:
                raise TransportUnavailable(self._broken)
            await self._ask_for_more()
            heed_cancellation()
            await self._wait()

    async def end(self, delivery: NatsDelivery, verdict: bytes) -> None:
        """Tell the broker, unless it has been given back; if the connection is lost, it comes again by itself."""
        if self._held.pop(delivery.reply, None):
            with suppress(*LOST):
                await self._connection.client.publish(delivery.reply, verdict)
            self._changed.set()

    async def close(self) -> None:
        self._connection.off_closed(self._lose)
        self._broken = self._broken or "The iterator is closed"
        self._changed.set()
        if self._renewing:
            self._renewing.cancel()
        subscription, self._subscription = self._subscription, None
        with suppress(*LOST):
            async with asyncio.timeout(CLOSE_WITHIN):
                if subscription:
                    await _drained(subscription)  # what is on its way to us arrives, and is given back
                for delivery in list(self._held.values()):
                    await self.end(delivery, b"-NAK")
                await self._connection.client.flush()
        self._held.clear()

    async def _receive(self, message: Msg) -> None:
        if message.reply.startswith("$JS.ACK."):
            delivery = NatsDelivery(self, message)
            self._held[message.reply] = delivery
            self._arrived.append(delivery)
            self._asked = max(0, self._asked - 1)
        else:
            self._hear(_status(message), message.headers or {})
        self._changed.set()

    def _hear(self, status: str, headers: dict[str, str]) -> None:
        said = headers.get("Description", "")
        if status in ("404", "408") or said == "Batch Completed":  # a request has ended
            self._asked = max(0, self._asked - int(headers.get("Nats-Pending-Messages", self._asked)))
        elif status != "100":  # 100 is a heartbeat
            self._lose(f"NATS has ended the request for messages: {said or status or 'no reason given'}")

    async def _ask_for_more(self) -> None:
        room = self._prefetch - len(self._held) - self._asked
        if room <= 0 or (self._asked and room < self._prefetch / 2):
            return
        request = {"batch": room, "expires": int(PULL_FOR * 1e9), "idle_heartbeat": int(HEARTBEAT * 1e9)}
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{_stream(self.queue)}.{CONSUMER}"
        try:
            await self._connection.client.publish(subject, json.dumps(request).encode(), reply=self._inbox)
        except LOST as error:
            raise TransportUnavailable(f"The connection to NATS is lost: {_said(error)}") from error
        self._asked += room

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(SILENCE if self._asked else None):
                await self._changed.wait()
        except TimeoutError:
            self._lose("NATS has gone silent")
        self._changed.clear()

    def _lose(self, reason: str) -> None:
        self._broken = self._broken or reason
        self._changed.set()

    async def _renew(self) -> None:
        """At a third of the time, so that two renewals may fail before a message comes again."""
        with suppress(*LOST):
            while True:
                await asyncio.sleep(self._ack_wait / 3)
                for delivery in list(self._held.values()):
                    await self._connection.client.publish(delivery.reply, b"+WPI")


class _Denied(Exception):
    """The server does not let us publish to a subject."""


class _Connection:
    """A client that never connects again, and the answers it waits for."""

    def __init__(self) -> None:
        self.client = Client()
        self._waiting: dict[str, tuple[str, asyncio.Future[Msg]]] = {}
        self._tokens = count()
        self._inbox = ""
        self._listeners: list[Callable[[str], None]] = []

    @property
    def is_open(self) -> bool:
        return self.client.is_connected

    @property
    def max_payload(self) -> int:
        return self.client.max_payload

    async def open(self, server: str, address: _Address, tls: ssl.SSLContext | None) -> None:
        credentials: dict[str, Any] = {
            name: _only_through_tls(self.client, value) if tls else value
            for name, value in (("user", address.user), ("password", address.password), ("token", address.token))
            if value is not None
        }
        await self.client.connect(
            servers=[server],
            name="busload",
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            connect_timeout=int(CONNECT_WITHIN),
            ping_interval=PING_EVERY,
            tls=tls,
            error_cb=self._on_error,
            closed_cb=self._on_closed,
            **credentials,
        )
        if tls:
            _must_use_tls(self.client)
        self._inbox = self.client.new_inbox()
        await self.client.subscribe(f"{self._inbox}.*", cb=self._on_answer)

    async def ask(self, subject: str, body: bytes, headers: dict[str, str] | None = None) -> asyncio.Future[Msg]:
        token = str(next(self._tokens))
        future: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: self._waiting.pop(token, None))
        self._waiting[token] = (subject, future)
        try:
            await self.client.publish(subject, body, reply=f"{self._inbox}.{token}", headers=headers)
        except BaseException:
            future.cancel()
            raise
        return future

    def forget(self, futures: Iterable[asyncio.Future[Msg]]) -> None:
        for future in futures:
            future.cancel()

    async def answers(self) -> bool:
        try:
            await self.client.flush(timeout=int(CLOSE_WITHIN))
        except LOST:
            return False
        return True

    async def close(self) -> None:
        """What was said last, acknowledgements for example, reaches the server."""
        if self.is_open:
            await self.answers()
        await self.drop()

    async def drop(self) -> None:
        with suppress(*LOST):
            async with asyncio.timeout(DROP_WITHIN):
                await self.client.close()

    def on_closed(self, listener: Callable[[str], None]) -> None:
        self._listeners.append(listener)

    def off_closed(self, listener: Callable[[str], None]) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)

    async def _on_answer(self, message: Msg) -> None:
        _, future = self._waiting.get(message.subject.rpartition(".")[2], ("", None))
        if future and not future.done():
            future.set_result(message)

    async def _on_error(self, error: Exception) -> None:
        """A right that is missing is told beside the answers, with the subject in quotes, in small letters."""
        said = str(error).lower()
        log.debug("NATS: %s", _said(error))
        if "permissions violation" in said:
            for subject, future in list(self._waiting.values()):
                if f'"{subject.lower()}"' in said and not future.done():
                    future.set_exception(_Denied(_said(error)))

    async def _on_closed(self) -> None:
        for _, future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(ConnectionResetError("the connection was closed"))
        for listener in list(self._listeners):
            listener("The connection to NATS is lost")


async def _connect(address: _Address) -> _Connection:
    """Try the servers in any order, so that clients spread over them."""
    said = ""
    tls = tls_context(**address.files) if address.tls else None
    for server in random.sample(address.servers, len(address.servers)):
        connection = _Connection()
        try:
            async with asyncio.timeout(min(CONNECT_WITHIN, address.timeout)):
                await connection.open(server, address, tls)
        except BaseException as error:
            await connection.drop()
            if isinstance(error, TransportMisconfigured) or not isinstance(error, LOST):
                raise
            if isinstance(error, ssl.SSLError):
                raise TransportMisconfigured(f"NATS and we do not agree about TLS: {_said(error)}") from error
            if "authorization" in str(error).lower() or "authentication" in str(error).lower():
                raise TransportMisconfigured(
                    "NATS does not let us in: the user, password or token in the URL is missing or wrong."
                ) from error
            said = _said(error)
        else:
            return connection
    raise TransportUnavailable(f"NATS cannot be reached: {said}")


@dataclass(frozen=True, slots=True)
class _Address:
    servers: list[str]
    user: str | None
    password: str | None
    token: str | None
    tls: bool
    files: dict[str, str | None]
    replicas: int | None
    ack_wait: float
    timeout: float

    def __repr__(self) -> str:  # it holds a password
        return "<_Address>"


def _read(url: str) -> _Address:
    options = read_options(url, {"replicas": _replicas, "ack_wait": seconds, "timeout": seconds, **TLS_FILES})
    try:
        parts = urlsplit(url)
        credentials, _, hosts = parts.netloc.rpartition("@")
        servers = [_server(host) for host in hosts.split(",")]
    except ValueError:
        raise TransportMisconfigured(
            "The URL of NATS cannot be read. Wanted one like nats://user:password@host:4222,host2:4222?replicas=3."
        ) from None
    if parts.path not in ("", "/"):
        raise TransportMisconfigured(
            "The URL of NATS has a path, which means nothing. Several servers follow each other after a comma, without "
            "`nats://` and credentials of their own: nats://user:password@host:4222,host2:4222."
        )
    user, is_pair, password = (unquote(part) for part in credentials.partition(":"))
    files = {name: options.get(name) for name in TLS_FILES}
    tls = parts.scheme == "natss"
    _check_files(tls, files, parts)
    return _Address(
        servers=servers,
        user=user if is_pair else None,
        password=password if is_pair else None,
        token=user if user and not is_pair else None,
        tls=tls,
        files=files,
        replicas=options.get("replicas"),
        ack_wait=options.get("ack_wait", 30.0),
        timeout=options.get("timeout", 10.0),
    )


def _check_files(tls: bool, files: dict[str, str | None], parts: SplitResult) -> None:
    if any(files.values()) and not tls:
        raise TransportMisconfigured(f"ca, cert and key are for TLS: found {parts.scheme}://, wanted natss://.")


def _server(host: str) -> str:
    parts = urlsplit(f"nats://{host}")
    if not parts.hostname:
        raise ValueError
    name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"nats://{name}:{parts.port or DEFAULT_PORT}"


def _replicas(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_REPLICAS:
        raise ValueError(f"wanted a number from 1 to {MOST_REPLICAS}")
    return int(text)


def _only_through_tls(client: Client, secret: str) -> Callable[[], str]:
    """The client would send it in the clear if the server said that it has no TLS."""

    def tell() -> str:
        _must_use_tls(client)
        return secret

    return tell


def _must_use_tls(client: Client) -> None:
    if not client._server_info.get("tls_required"):
        raise TransportMisconfigured("NATS offers no TLS there: found natss:// in the URL. Switch it on in the server.")


async def _drained(subscription: Subscription) -> None:
    drain: Callable[[], Awaitable[None]] = subscription.drain
    await drain()


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
    said = f"{what}: {error.get('description', 'no reason given')} ({error.get('err_code')})"
    if error.get("code") in (408, 503) and _code(answer) not in JETSTREAM_OFF:
        raise TransportUnavailable(f"NATS is not ready, {said}")
    raise TransportMisconfigured(f"NATS refuses: {said}. Change its configuration or the URL's options.")


def _check_consumer(stream: str, config: dict[str, Any]) -> None:
    wanted = {"ack_policy": "explicit", "max_deliver": -1, "deliver_subject": "", "filter_subject": ""}
    found = {key: config.get(key, "") for key in wanted}
    unfit = {key: value for key, value in found.items() if value != wanted[key]}
    if unfit:
        raise TransportMisconfigured(
            f"The consumer {CONSUMER!r} of the stream {stream!r} exists with settings that do not fit: found {unfit}, "
            f"wanted { {key: wanted[key] for key in unfit} }. Remove it with `nats consumer rm`: it is made anew."
        )


def _refusal(future: asyncio.Future[Msg], lost: Refusal) -> Refusal | None:
    if future.cancelled():
        return lost
    if error := future.exception():
        return Refusal(RefusalReason.REFUSED, str(error)) if isinstance(error, _Denied) else _unreachable(str(error))
    message = future.result()
    if _status(message):
        return NO_STREAM
    answer = json.loads(message.data)
    if "error" not in answer:
        return None
    said = str(answer["error"].get("description", "no reason given"))
    if _code(answer) in TOO_LARGE_CODES:
        return Refusal(RefusalReason.TOO_LARGE, said)
    if _code(answer) in FULL_CODES:
        return Refusal(RefusalReason.THROTTLED, said)
    if answer["error"].get("code") in (408, 503):
        return _unreachable(said)
    return Refusal(RefusalReason.REFUSED, said)


def _unreachable(said: str) -> Refusal:
    return Refusal(RefusalReason.UNREACHABLE, said)


def _said(error: BaseException) -> str:
    return str(error).strip() or type(error).__name__


NOT_CONFIRMED = _unreachable("NATS did not confirm it in time")
NO_STREAM = Refusal(RefusalReason.UNROUTABLE, "no stream takes it; declare the queue first")
NO_LEADER = _unreachable("its stream has no leader now")
