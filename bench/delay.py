"""A proxy that makes a server as far away as one likes: each byte arrives half a round trip later, in both directions.

It runs in a process of its own, so that it takes no time from the client that is measured:

    with far_away(dsn, round_trip=0.005) as dsn:
        ...
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from psycopg.conninfo import conninfo_to_dict, make_conninfo


@contextmanager
def far_away(dsn: str, round_trip: float) -> Iterator[str]:
    """The DSN of the same database, so many seconds of a round trip away; with 0 the DSN itself."""
    if not round_trip:
        yield dsn
        return
    found = conninfo_to_dict(dsn)
    command = [
        sys.executable,
        "-m",
        "bench.delay",
        str(found["host"]),
        str(found.get("port", 5432)),
        str(round_trip / 2),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as proxy:
        try:
            assert proxy.stdout is not None
            yield make_conninfo(dsn, host="127.0.0.1", port=int(proxy.stdout.readline()))
        finally:
            proxy.terminate()


async def serve(host: str, port: int, delay: float) -> None:
    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        socket = f"{host}/.s.PGSQL.{port}"
        opened = asyncio.open_unix_connection(socket) if host.startswith("/") else asyncio.open_connection(host, port)
        theirs, to_them = await opened
        await asyncio.gather(_pass(reader, to_them, delay), _pass(theirs, writer, delay))

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
    """What is on its way waits in a queue, so a delay costs no bandwidth."""
    loop, way = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]]()

    async def arrive() -> None:
        data = b"-"
        while data:
            at, data = await way.get()
            await asyncio.sleep(at - loop.time())
            if data:
                writer.write(data)
                await writer.drain()
        writer.close()

    arriving = asyncio.create_task(arrive())
    data = b"-"
    while data:
        with suppress(ConnectionError):
            data = await reader.read(1 << 18)
        way.put_nowait((loop.time() + delay, data))
    with suppress(ConnectionError):
        await arriving


if __name__ == "__main__":
    host, port, delay = sys.argv[1:]
    asyncio.run(serve(host, int(port), float(delay)))
