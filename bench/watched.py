"""A drain while ten pages of the dashboard are open: looking must not slow the queue down."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import psycopg

from bench.case import Case, Measured, heard, helpers, say
from bench.clock import timed
from bench.ours import DOMAIN, expect_completed, fill, nothing
from busload import CommandBus, Worker

if TYPE_CHECKING:
    from starlette.applications import Starlette


async def drain_watched(dsn: str, size: int) -> Measured:
    """As `busload/drain`, beside a process that serves the dashboard to ten readers."""
    async with helpers("busload/drain-watched", dsn, size) as [dashboard], CommandBus(dsn) as bus:
        assert await dashboard.hear() == "ready"
        bus.handler(DOMAIN, "Nothing")(nothing)
        worker = Worker(bus)
        with timed(dsn) as lap:
            settled = await worker.drain()
        dashboard.say("enough")
        events = int(await dashboard.hear())
    assert settled == size, f"settled {settled} of {size}"
    expect_completed(dsn)
    assert events >= 10, f"the pages got {events} events"
    return lap.measured(size)


async def watch(dsn: str, size: int) -> None:
    """Keep ten pages open, each another one, until told that it is enough."""
    from busload.dashboard import app  # here: the processes of all other cases would import it, too

    with psycopg.connect(dsn) as conn:
        batch, commands = conn.execute(
            "SELECT (SELECT batch_id FROM busload.batch LIMIT 1),"
            " ARRAY(SELECT command_id FROM busload.command ORDER BY id LIMIT 3)"
        ).fetchone() or (None, [])
    pages = [
        "/",
        "/?last=day",
        "/batches",
        f"/batches?domain={DOMAIN}",
        "/batches?status=IN_PROGRESS",
        "/batches?name=x",
    ]
    pages += [f"/batches/{batch}", *(f"/commands/{DOMAIN}/{command}" for command in commands)]
    events = [0]
    async with CommandBus(dsn) as bus:
        served, leave = app(bus), asyncio.Event()
        readers = [asyncio.create_task(_read(served, page, leave, events)) for page in pages]
        while events[0] < len(pages):
            await asyncio.sleep(0.01)
        say("ready")
        await heard()
        say(events[0])
        leave.set()
        await asyncio.gather(*readers)


async def _read(served: Starlette, page: str, leave: asyncio.Event, events: list[int]) -> None:
    """Read the live values of a page as a browser does, without the network between."""
    path, _, query = page.partition("?")
    path = f"{path.rstrip('/')}/live"

    async def receive() -> dict[str, Any]:
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 200, f"{page}: {message['status']}"
        events[0] += message.get("body", b"").count(b"event: values")

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(b"host", b"localhost")],
        "client": ("127.0.0.1", 9),
        "server": ("localhost", 80),
    }
    await served(scope, receive, send)


CASES = [
    Case(
        "busload",
        "drain-watched",
        "drain, 1 process, ten pages of the dashboard open",
        drain_watched,
        prepare=fill,
        work=watch,
    )
]
