"""What each page of the dashboard costs in a large database: time, CPU and statements.

    python -m bench.pages              1,000,000 commands in 1,000 batches, 100,000 of them in troubleshooting
    python -m bench.pages --commands 20000 --batches 20 --troubled 2000

A page is asked for without the network between. CPU is that of the dashboard and of PostgreSQL together.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import psycopg

from bench.clock import timed
from busload import BatchCommand, Command, CommandBus, HandlerContext, PermanentCommandError, Worker
from busload.dashboard import app
from busload.jobs.job import BatchJob, Stage
from busload.postgres.own_connection import OwnAsyncConnection
from busload.testing import TestServer

DOMAIN, ELSEWHERE = "payments", "crm"
MOST_STATEMENTS, MOST_MS = 12, 100
COMMON = "ACCOUNT_CLOSED"
"""The cause that nine in ten commands in troubleshooting wait for."""
WAITING = 20
"""One batch in so many still waits."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a page costs: medians of its time, and means of CPU, in milliseconds."""

    page: str
    wall: float
    dashboard_cpu: float
    server_cpu: float
    statements: int

    @property
    def fits(self) -> bool:
        return self.statements <= MOST_STATEMENTS and self.wall < MOST_MS


# -- a large database --------------------------------------------------------------------------------------------------


async def fill(bus: CommandBus, dsn: str, *, commands: int, batches: int, troubled: int) -> Mapping[str, str]:
    """Fill a database, and return the pages to be looked at, by name."""
    every, size = commands // troubled, commands // batches

    async def pay(command: Command, ctx: HandlerContext) -> None:
        number = command.data["n"]
        if number % every == 0:
            rare = number // every % 10 == 0
            raise PermanentCommandError(f"no account {number}", code=f"CODE_{number % 19}" if rare else COMMON)

    bus.handler(DOMAIN, "Pay")(pay)
    worker, number = Worker(bus, name="bench:1:pages"), 0
    open_batches = max(batches // WAITING, 1)
    for batch in range(batches):
        if batch == batches - open_batches:
            await worker.drain()
        data = range(number, number + size)
        await bus.create_batch(
            DOMAIN,
            [BatchCommand("Pay", data={"n": n, "to": "ada"}, task_key=f"invoice:{n}") for n in data],
            name=f"Invoices {batch}",
        )
        number += size
    wide = await bus.create_batch(
        DOMAIN, [BatchCommand("Pay", data={"n": 1}, domain=f"{ELSEWHERE}_{n % 10}", run_at=_at(n)) for n in range(40)]
    )
    stages = [Stage("load", [BatchCommand("Load")]), Stage("send", [BatchCommand("Send")])]
    job_id = await bus.jobs.create(DOMAIN, stages, name="report")
    of_jobs = await bus.jobs.create_batch(DOMAIN, [BatchJob(stages) for _ in range(50)], name="reports")
    events = bus.buffer("contact_events", size=100, max_age=timedelta(hours=1))
    await events.add({"contact": 1})
    await bus.domains.pause(ELSEWHERE, reason="down", operator="ada")
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("VACUUM ANALYZE")
    return await _pages(bus, wide=wide, job_id=job_id, of_jobs=of_jobs)


def _at(number: int) -> datetime | None:
    return datetime(2099, 1, 1, tzinfo=UTC) if number % 2 else None


async def _pages(bus: CommandBus, *, wide: object, job_id: object, of_jobs: object) -> Mapping[str, str]:
    [common, *_] = await bus.troubleshooting.groups(DOMAIN)
    [item] = await bus.troubleshooting.list(DOMAIN, limit=1)
    [newest, *_] = await bus.list_batches(DOMAIN, name="Invoices", limit=1)
    [worker, *_] = await bus.workers.list(stopped_too=True)
    page = await bus.list_batches(DOMAIN, name="Invoices", limit=10)
    commands = await bus.list_commands(DOMAIN, limit=50)
    cause = f"/troubleshooting/{DOMAIN}/{common.fingerprint}"
    failed = "status=IN_TROUBLESHOOTING_QUEUE"
    return {
        "overview": "/",
        "overview, a day": "/?last=day",
        "batches": "/batches",
        "batches, the second page": f"/batches?after={page[-1].batch_id}",
        "batches by name": "/batches?name=Invoices%201",
        "batches by status": "/batches?status=COMPLETED",
        "a batch": f"/batches/{newest.batch_id}",
        "a batch: how it is": f"/batches/{newest.batch_id}/why?domain={DOMAIN}",
        "a batch with troubleshooting: how it is": f"/batches/{item.batch_id}/why?domain={DOMAIN}",
        "a batch of ten domains: how it is": f"/batches/{wide}/why?domain={DOMAIN}",
        "a batch of 50 jobs: how it is": f"/batches/{of_jobs}/why?domain={DOMAIN}",
        "commands": "/commands",
        "commands, the second page": f"/commands?after={commands.next}",
        "commands by status": f"/commands?{failed}",
        "commands by type and time": "/commands?type=Pay&since=2020-01-01",
        "commands by task key": "/commands?task_key=invoice:7",
        "commands by error, found": f"/commands?error=no+account&{failed}",
        "commands by error, not found": "/commands?error=nothing+like+it",
        "a command": f"/commands/{DOMAIN}/{item.command_id}",
        "a command that waits": f"/commands/{DOMAIN}/{commands.commands[0].command_id}",
        "a task": "/trace?task_key=invoice:7",
        "causes": "/troubleshooting",
        "causes by error": "/troubleshooting?text=no+account",
        "a cause": cause,
        "preview of a retry": f"{cause}/preview?action=retry",
        "preview of a patch": f"{cause}/preview?action=patch",
        "jobs": "/jobs",
        "a job": f"/jobs/{job_id}",
        "domains": "/domains",
        "limits": "/limits",
        "buffers": "/buffers",
        "a buffer": "/buffers/contact_events",
        "dispatch": "/dispatch",
        "workers": "/workers?all=yes",
        "a worker": f"/workers/{worker.worker}",
        "retention": "/retention",
        "audit": "/audit",
        "metrics": "/metrics",
    }


# -- what a page costs -------------------------------------------------------------------------------------------------


async def measure(bus: CommandBus, dsn: str, pages: Mapping[str, str], repeat: int) -> list[Cost]:
    async with _browser(bus) as http:
        found = []
        for name, path in pages.items():
            statements = await count(http, path)  # from now on statements are prepared, and caches are warm
            walls = []
            with timed(dsn) as lap:
                for _ in range(repeat):
                    began = time.perf_counter()
                    await http.get(path)
                    walls.append(1000 * (time.perf_counter() - began))
            own, theirs = (1000 * seconds / repeat for seconds in (lap.client_cpu, lap.server_cpu or 0.0))
            found.append(Cost(name, statistics.median(walls), own, theirs, statements))
    return found


@asynccontextmanager
async def _browser(bus: CommandBus) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app(bus))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
        await http.get("/")  # the first one also looks at the schema
        yield http


async def count(http: httpx.AsyncClient, path: str) -> int:
    """How many statements a page needs."""
    with counted() as sent:
        answer = await http.get(path)
    assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"
    return len(sent)


async def count_all(bus: CommandBus, pages: Mapping[str, str]) -> dict[str, int]:
    """How many statements each page needs."""
    async with _browser(bus) as http:
        return {name: await count(http, path) for name, path in pages.items()}


@contextmanager
def counted() -> Iterator[list[Any]]:
    """The statements that are sent while the block lasts."""
    sent: list[Any] = []
    execute, answer = psycopg.AsyncCursor.execute, OwnAsyncConnection.answer

    async def noted(self: Any, query: Any, *args: Any, **options: Any) -> Any:
        sent.append(query)
        return await execute(self, query, *args, **options)

    async def noted_too(self: Any, sql: bytes, params: dict[str, Any]) -> Any:
        sent.append(sql)
        return await answer(self, sql, params)

    psycopg.AsyncCursor.execute = noted  # type: ignore[method-assign]
    OwnAsyncConnection.answer = noted_too  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        psycopg.AsyncCursor.execute = execute  # type: ignore[method-assign]
        OwnAsyncConnection.answer = answer  # type: ignore[method-assign]


def table(costs: Sequence[Cost]) -> str:
    lines = [
        "| page | median ms | CPU ms | of the dashboard | of PostgreSQL | statements |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for cost in costs:
        cpu = (cost.dashboard_cpu + cost.server_cpu, cost.dashboard_cpu, cost.server_cpu)
        shown = " | ".join(f"{value:.1f}" for value in (cost.wall, *cpu))
        lines.append(f"| {cost.page} | {shown} | {cost.statements} |")
    return "\n".join(lines)


async def run(dsn: str, *, commands: int, batches: int, troubled: int, repeat: int) -> list[Cost]:
    async with CommandBus(dsn) as bus:
        pages = await fill(bus, dsn, commands=commands, batches=batches, troubled=troubled)
        return await measure(bus, dsn, pages, repeat)


def main() -> None:
    parser = argparse.ArgumentParser(description="What each page of the dashboard costs in a large database.")
    parser.add_argument("--commands", type=int, default=1_000_000)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--troubled", type=int, default=100_000, help="how many wait in troubleshooting")
    parser.add_argument("--repeat", type=int, default=11, help="how often each page is asked for")
    given = parser.parse_args()
    logging.getLogger("busload").setLevel(logging.CRITICAL)  # commands fail on purpose
    with tempfile.TemporaryDirectory() as home:
        Path(home).chmod(0o755)
        with TestServer(Path(home) / "server", config={"fsync": "off"}) as server, server.database() as dsn:
            costs = asyncio.run(run(dsn, **vars(given)))
    print(table(costs))
    wrong = [cost.page for cost in costs if not cost.fits]
    if wrong:
        sys.exit(f"Over {MOST_MS} ms, or over {MOST_STATEMENTS} statements: {', '.join(wrong)}.")


if __name__ == "__main__":
    main()
