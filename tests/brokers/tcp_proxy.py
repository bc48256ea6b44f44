"""Stands between a transport and its broker: it can hold back the broker's answers, and cut connections."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit


class TcpProxy:
    """`tls`: what it shows to clients that want TLS; the broker is spoken to in plain."""

    def __init__(self, url: str, *, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        self._broker = parts.hostname or "127.0.0.1", parts.port
        self._url, self._tls = url, tls
        self._answering = asyncio.Event()
        self._answering.set()
        self._pumps: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return self._url.replace(f":{self._broker[1]}", f":{self.port}")

    def hold_answers(self) -> None:
        self._answering.clear()

    def pass_answers(self) -> None:
        self._answering.set()

    async def cut(self) -> None:
        """Every connection; what was held back is lost."""
        pumps, self._pumps = self._pumps, set()
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)

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
        broker_reader, broker_writer = await asyncio.open_connection(*self._broker)
        pumps = [
            asyncio.create_task(self._pump(reader, broker_writer, answers=False)),
            asyncio.create_task(self._pump(broker_reader, writer, answers=True)),
        ]
        self._pumps.update(pumps)
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for each in (writer, broker_writer):
            each.close()
            with suppress(OSError):
                await each.wait_closed()
        for pump in pumps:
            pump.cancel()
            self._pumps.discard(pump)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, answers: bool) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                if answers:
                    await self._answering.wait()
                sink.write(data)
                await sink.drain()
