"""Stands between a client and its server: it can hold back or swallow what is said, and cut connections."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from psycopg.conninfo import conninfo_to_dict


class Proxy:
    """Connect to `url`, or `port`. `tls`: what it shows to clients; the broker is spoken to in plain."""

    def __init__(self, url: str, *, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        self._broker = parts.hostname or "127.0.0.1", parts.port
        self._url, self._tls = url, tls
        self._answering = asyncio.Event()
        self._answering.set()
        self._connections: set[_Connection] = set()
        self.accepted = 0
        """How many connections there were."""
        self.held_back = 0
        """How many answers, or parts of some, were held back; most of them went on afterwards."""
        self._cuts = 0
        self._swallows_new = False

    @property
    def url(self) -> str:
        return self._url.replace(f":{self._broker[1]}", f":{self.port}")

    def hold_answers(self) -> None:
        self._answering.clear()

    def pass_answers(self) -> None:
        self._answering.set()

    def swallow(self) -> None:
        """Nothing more that the broker says reaches those who are connected now; what they say reaches it."""
        for connection in self._connections:
            connection.swallows = True

    def swallow_all(self, *, new: bool = False) -> None:
        """Nothing reaches anybody on the connections of now, as behind a firewall that forgot them; with `new` ever."""
        self._swallows_new = new
        for connection in self._connections:
            connection.swallows = connection.swallows_questions = True

    def heal(self) -> None:
        """New connections work again; those that were swallowed stay as they are."""
        self._swallows_new = False

    async def cut(self) -> None:
        """Every connection; what was held back is lost."""
        self._cuts += 1
        connections, self._connections = self._connections, set()
        await asyncio.gather(*(connection.cut() for connection in connections))

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        await self.cut()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cuts = self._cuts
        broker_reader, broker_writer = await self._open()
        if cuts != self._cuts:  # a cut ends those that are being made, too
            broker_writer.close()
            writer.close()
            return
        connection = _Connection(self._hold)
        connection.swallows = connection.swallows_questions = self._swallows_new
        self._connections.add(connection)
        self.accepted += 1
        await connection.serve((reader, broker_writer), (broker_reader, writer))
        self._connections.discard(connection)

    async def _hold(self) -> None:
        if not self._answering.is_set():
            self.held_back += 1
        await self._answering.wait()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self._broker)


class PostgresProxy(Proxy):
    """Before a PostgreSQL that is reached by a socket in a folder."""

    def __init__(self, dsn: str) -> None:
        super().__init__("tcp://127.0.0.1:0")
        self._parts = conninfo_to_dict(dsn)

    def reach(self, host: str, port: int) -> None:
        """Stand before a pooler instead."""
        self._broker, self._parts["host"] = (host, port), None

    @property
    def url(self) -> str:
        return f"postgresql://{self._parts['user']}@127.0.0.1:{self.port}/{self._parts['dbname']}"

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._parts["host"] is None:
            return await super()._open()
        return await asyncio.open_unix_connection(f"{self._parts['host']}/.s.PGSQL.{self._parts['port']}")


class _Connection:
    def __init__(self, hold: Callable[[], Awaitable[None]]) -> None:
        self._hold = hold
        self._pumps: list[asyncio.Task[None]] = []
        self.swallows = self.swallows_questions = False

    async def serve(
        self,
        questions: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        answers: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        """Until one side ends."""
        self._pumps = [
            asyncio.create_task(self._pump(*questions, answers=False)),
            asyncio.create_task(self._pump(*answers, answers=True)),
        ]
        await asyncio.wait(self._pumps, return_when=asyncio.FIRST_COMPLETED)
        for _, writer in (questions, answers):
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
        await self.cut()

    async def cut(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, answers: bool) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                if answers:
                    await self._hold()
                if not (self.swallows if answers else self.swallows_questions):
                    sink.write(data)
                    await sink.drain()
