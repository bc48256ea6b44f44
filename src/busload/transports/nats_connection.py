"""A connection to NATS that never connects anew by itself: whoever waits for an answer learns that it is gone."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from urllib.parse import unquote, urlsplit

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from busload.errors import TransportMisconfiguredError, TransportUnavailableError
from busload.transports.broker import TIMEOUT, said
from busload.transports.url import TLS_FILES, read_options, seconds, tls_context, tls_files, whole_number

DEFAULT_PORT = 4222
MOST_REPLICAS = 5
PING_EVERY = 5
CONNECT_WITHIN, CLOSE_WITHIN, DROP_WITHIN = 3.0, 2.0, 0.5

LOST = (OSError, NatsError, asyncio.TimeoutError)
"""What the client raises when a connection is no more. A `TimeoutError` of NATS is one of asyncio, too."""

log = logging.getLogger("busload.transports")


class DeniedError(Exception):
    """The server does not let us publish to a subject."""


class Connection:
    """A client that never connects again, and the answers it waits for."""

    def __init__(self) -> None:
        self.client = Client()
        self.listeners: set[Callable[[str], None]] = set()
        """Called with the reason when the connection has ended."""
        self._waiting: dict[str, tuple[str, asyncio.Future[Msg]]] = {}
        self._tokens = count()
        self._inbox = ""

    @property
    def is_open(self) -> bool:
        return self.client.is_connected

    async def open(self, server: str, address: Address, tls: ssl.SSLContext | None) -> None:
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

    async def drop_if_dead(self) -> None:
        """After an answer did not come: a leader may be missing, or the whole server is dead."""
        if not await self._answers():
            await self.drop()

    async def close(self) -> None:
        """What was said last, acknowledgements for example, reaches the server."""
        if self.is_open:
            await self._answers()
        await self.drop()

    async def drop(self) -> None:
        with suppress(*LOST):
            async with asyncio.timeout(DROP_WITHIN):
                await self.client.close()

    async def _answers(self) -> bool:
        try:
            await self.client.flush(timeout=int(CLOSE_WITHIN))
        except LOST:
            return False
        return True

    async def _on_answer(self, message: Msg) -> None:
        _, future = self._waiting.get(message.subject.rpartition(".")[2], ("", None))
        if future and not future.done():
            future.set_result(message)

    async def _on_error(self, error: Exception) -> None:
        """NATS tells of a missing right beside its answers, with the subject in quotes and in small letters."""
        told = str(error).lower()
        log.debug("NATS: %s", said(error))
        if "permissions violation" in told:
            for subject, future in list(self._waiting.values()):
                if f'"{subject.lower()}"' in told and not future.done():
                    future.set_exception(DeniedError(said(error)))

    async def _on_closed(self) -> None:
        for _, future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(ConnectionResetError("the connection was closed"))
        for listener in list(self.listeners):
            listener("The connection to NATS is lost")


async def connect(address: Address) -> Connection:
    """Try the servers in any order, so that clients spread over them."""
    told = ""
    tls = tls_context(**address.files) if address.tls else None
    for server in random.sample(address.servers, len(address.servers)):
        connection = Connection()
        try:
            async with asyncio.timeout(min(CONNECT_WITHIN, address.timeout)):
                await connection.open(server, address, tls)
        except BaseException as error:
            await connection.drop()
            if isinstance(error, TransportMisconfiguredError) or not isinstance(error, LOST):
                raise
            if isinstance(error, ssl.SSLError):
                raise TransportMisconfiguredError(f"TLS with NATS failed: {said(error)}") from error
            if "authorization" in str(error).lower() or "authentication" in str(error).lower():
                raise TransportMisconfiguredError(
                    "NATS refuses to let us in: the user, password or token in the URL is missing or wrong."
                ) from error
            told = said(error)
        else:
            return connection
    raise TransportUnavailableError(f"NATS cannot be reached: {told}")


@dataclass(frozen=True, slots=True)
class Address:
    servers: list[str]
    user: str | None
    password: str | None = field(repr=False)
    token: str | None = field(repr=False)
    tls: bool
    files: dict[str, str | None]
    replicas: int | None
    ack_wait: float
    timeout: float


def read_address(url: str) -> Address:
    options = read_options(
        url, {"replicas": whole_number(1, MOST_REPLICAS), "ack_wait": seconds, "timeout": seconds, **TLS_FILES}
    )
    try:
        parts = urlsplit(url)
        credentials, _, hosts = parts.netloc.rpartition("@")
        servers = [_server(host) for host in hosts.split(",")]
    except ValueError:
        raise TransportMisconfiguredError(
            "The URL of NATS cannot be read. Wanted one like nats://user:password@host:4222,host2:4222?replicas=3."
        ) from None
    if parts.path not in ("", "/"):
        raise TransportMisconfiguredError(
            "The URL of NATS has a path, which means nothing. Several servers follow each other after a comma, without "
            "`nats://` and credentials of their own: nats://user:password@host:4222,host2:4222."
        )
    user, is_pair, password = (unquote(part) for part in credentials.partition(":"))
    return Address(
        servers=servers,
        user=user if is_pair else None,
        password=password if is_pair else None,
        token=user if user and not is_pair else None,
        tls=parts.scheme == "natss",
        files=tls_files(url, options, wanted="natss"),
        replicas=options.get("replicas"),
        ack_wait=options.get("ack_wait", 30.0),
        timeout=options.get("timeout", TIMEOUT),
    )


def _server(host: str) -> str:
    parts = urlsplit(f"nats://{host}")
    if not parts.hostname:
        raise ValueError
    name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"nats://{name}:{parts.port or DEFAULT_PORT}"


def _only_through_tls(client: Client, secret: str) -> Callable[[], str]:
    """The client would send it in the clear if the server said that it has no TLS."""

    def tell() -> str:
        _must_use_tls(client)
        return secret

    return tell


def _must_use_tls(client: Client) -> None:
    if not client._server_info.get("tls_required"):
        raise TransportMisconfiguredError("NATS offers no TLS there: found natss:// in the URL. Switch TLS on.")
