"""Stands between a client and a broker, and lets nothing of what the broker says through when told so."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Proxy:
    """`async with Proxy(port) as proxy`: connect to `proxy.port`; connections made after `swallow()` are sound."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._sound: list[asyncio.Event] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def swallow(self) -> None:
        """From now on nothing that the broker says reaches those who are connected; what they say reaches it."""
        for sound in self._sound:
            sound.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        sound = asyncio.Event()
        sound.set()
        self._sound.append(sound)
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            with suppress(OSError, asyncio.CancelledError):
                await asyncio.gather(_copy(reader, back, None), _copy(there, writer, sound))
        finally:
            writer.close()
            back.close()
            self._tasks.discard(task)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sound: asyncio.Event | None) -> None:
    while data := await reader.read(65536):
        if sound is None or sound.is_set():
            writer.write(data)
            await writer.drain()
    writer.close()
