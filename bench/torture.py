"""Commands one by one at full speed, while somebody holds a snapshot and nothing that is dead can be removed.

Meanwhile autovacuum is off and a replication slot stays behind. What each command costs the server is taken window by
window, from `pg_stat_statements`: the claims, the settlements, and all statements together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg

from bench.beside import PEERS, Peer, Voice, install, peer_at_work
from bench.case import Case, Measured, heard, helpers, say
from bench.clock import timed
from bench.ours import DOMAIN, nothing, our_case
from busload import CommandBus, Worker

METRIC = "torture"
WARM_UP = 2.0
"""Seconds of work before the snapshot is taken: statements are prepared, and caches are filled."""

CHUNK = 50
"""Commands that a peer is told to send at a time."""

SETTINGS = {"shared_preload_libraries": "pg_stat_statements", "pg_stat_statements.track": "none"}
"""What the server needs. Statements are counted in the databases of these cases alone."""


@dataclass(frozen=True, slots=True)
class Statements:
    """How the statements of a subject are told apart, by a part of their text."""

    claim: str
    settle: str


STATEMENTS = {
    "busload": Statements("insert into busload.lease|queue_ready", "insert into busload.execution"),
    "pgqueuer": Statements("skip locked", "delete from"),
    "graphile-worker": Statements("skip locked|get_job", "complete_job|delete from .*_private_jobs"),
    "pg-boss": Statements("skip locked", "completed_on"),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """What some statements took of the server: how many there were, milliseconds, and pages of memory."""

    calls: int
    milliseconds: float
    pages: float


@dataclass(frozen=True, slots=True)
class Window:
    """What was handled in a stretch of time, and what it took."""

    ends_at: float
    handled: int
    costs: Mapping[str, Cost]


class Watch:
    """Reads what statements have cost since it looked last."""

    def __init__(self, dsn: str, statements: Statements) -> None:
        self._conn = psycopg.connect(dsn, autocommit=True)
        self._statements = statements

    def look(self) -> dict[str, Cost]:
        rows = self._conn.execute(
            "SELECT CASE WHEN query ~* %(claim)s THEN 'claim' WHEN query ~* %(settle)s THEN 'settle' ELSE 'other' END,"
            "       sum(calls)::bigint, sum(total_exec_time), sum(shared_blks_hit + shared_blks_read)::float8"
            "  FROM pg_stat_statements WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database())"
            "   AND query !~ 'pg_stat_statements' GROUP BY 1",
            {"claim": self._statements.claim, "settle": self._statements.settle},
        ).fetchall()
        self._conn.execute("SELECT pg_stat_statements_reset()")
        return {kind: Cost(*cost) for kind, *cost in rows}

    def close(self) -> None:
        self._conn.close()


async def count_statements(dsn: str) -> None:
    """Before anything else connects: count the statements of this database, and leave what is dead in its tables."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        await conn.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
        database = conn.info.dbname
        await conn.execute(f"ALTER DATABASE \"{database}\" SET pg_stat_statements.track = 'top'".encode())
        tables = await conn.execute(
            "SELECT oid::regclass::text FROM pg_class WHERE relkind = 'r' AND relnamespace::regnamespace::text"
            " NOT IN ('pg_catalog', 'information_schema')"
        )
        for (table,) in await tables.fetchall():
            await conn.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)".encode())


@contextmanager
def held(dsn: str) -> Iterator[None]:
    """A snapshot, and a replication slot that nobody reads."""
    with psycopg.connect(dsn) as conn, psycopg.connect(dsn, autocommit=True) as admin:
        slot = f"torture_{admin.info.backend_pid}"
        admin.execute("SELECT pg_create_physical_replication_slot(%s, true)", [slot])
        try:
            conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            conn.execute("SELECT count(*) FROM pg_class")
            yield
        finally:
            admin.execute("SELECT pg_drop_replication_slot(%s)", [slot])


async def torture(dsn: str, seconds: int, subject: str, send: Callable[[], Awaitable[int]], handled: Any) -> Measured:
    """`send` sends some and returns how many; `handled` says how many were handled so far."""
    watch = Watch(dsn, STATEMENTS[subject])
    width = min(max(seconds / 24, 1.0), 5.0)
    windows: list[Window] = []
    stop, sent = False, 0

    async def send_on() -> None:
        nonlocal sent
        while not stop:
            sent += await send()

    try:
        sending = asyncio.create_task(send_on())
        await asyncio.sleep(min(WARM_UP, seconds))
        with held(dsn), timed(dsn) as lap:
            watch.look()
            began, before = time.monotonic(), handled()
            while (now := time.monotonic() - began) < seconds:
                await asyncio.sleep(min(width, seconds - now))
                now_handled = handled()
                windows.append(Window(time.monotonic() - began, now_handled - before, watch.look()))
                before = now_handled
            stop = True
            await sending
    finally:
        watch.close()
    count = sum(window.handled for window in windows)
    assert count, "nothing was handled"
    return lap.measured(count, facts=facts_of(windows))


def facts_of(windows: Sequence[Window]) -> dict[str, float]:
    """What a claim and a settlement take at the start and at the end, and how often the one fits into the other.

    The start is the first tenth of the time, and the end the last. `…_us_at_…` is microseconds of the server for each
    command that was handled, by the second at which it was taken.
    """
    tenth = max(1, len(windows) // 10)
    facts: dict[str, float] = {}
    for kind in ("claim", "settle"):
        start, end = _sum(windows[:tenth], kind), _sum(windows[-tenth:], kind)
        for name, cost in (("start", start), ("end", end)):
            facts[f"{kind}_ms_{name}"] = cost.milliseconds / max(cost.calls, 1)
            facts[f"{kind}_pages_{name}"] = cost.pages / max(cost.calls, 1)
        for unit in ("ms", "pages"):
            if facts[f"{kind}_{unit}_start"]:
                facts[f"{kind}_{unit}_growth"] = facts[f"{kind}_{unit}_end"] / facts[f"{kind}_{unit}_start"]
        for window in windows:
            spent = _sum([window], kind).milliseconds
            facts[f"{kind}_us_at_{window.ends_at:04.0f}"] = 1000 * spent / max(window.handled, 1)
    for name, part in (("start", windows[:tenth]), ("end", windows[-tenth:])):
        seconds = len(part) * windows[-1].ends_at / len(windows)
        facts[f"per_second_{name}"] = sum(window.handled for window in part) / seconds
    return facts


def _sum(windows: Sequence[Window], kind: str) -> Cost:
    costs = [window.costs[kind] for window in windows if kind in window.costs]
    return Cost(
        sum(cost.calls for cost in costs), sum(cost.milliseconds for cost in costs), sum(cost.pages for cost in costs)
    )


def series(facts: Mapping[str, float], kind: str) -> list[tuple[float, float]]:
    """Seconds, and the microseconds for each command at that time."""
    prefix = f"{kind}_us_at_"
    return [(float(name.removeprefix(prefix)), cost) for name, cost in sorted(facts.items()) if name.startswith(prefix)]


# -- ours --------------------------------------------------------------------------------------------------------------


async def prepare_ours(dsn: str, seconds: int) -> None:
    await count_statements(dsn)


async def our_torture(dsn: str, seconds: int) -> Measured:
    async with helpers(f"busload/{METRIC}", dsn, seconds) as [worker], CommandBus(dsn) as bus:
        done = 0

        async def follow() -> None:
            nonlocal done
            while True:
                done = int(await worker.hear(600))

        async def send() -> int:
            await bus.send(DOMAIN, "Nothing", {"n": 1})
            return 1

        following = asyncio.create_task(follow())
        try:
            return await torture(dsn, seconds, "busload", send, lambda: done)
        finally:
            following.cancel()


async def work(dsn: str, seconds: int) -> None:
    """Run a worker until the input ends, and say how many commands it has run."""
    async with CommandBus(dsn) as bus:
        bus.handler(DOMAIN, "Nothing")(nothing)
        worker = Worker(bus)
        running = asyncio.create_task(worker.run())

        async def tell() -> None:
            while True:
                await asyncio.sleep(0.02)
                say(worker.stats.completed)

        telling = asyncio.create_task(tell())
        await heard()
        telling.cancel()
        worker.stop()
        await running


# -- others ------------------------------------------------------------------------------------------------------------


async def prepare_peer(peer: Peer, dsn: str, seconds: int) -> None:
    await install(peer, dsn, seconds)
    await count_statements(dsn)


async def peer_torture(peer: Peer, dsn: str, seconds: int) -> Measured:
    async with peer_at_work(peer, dsn) as (sender, worker), _followed(worker) as handled:

        async def send() -> int:
            await sender.ask(f"send {CHUNK}")
            return CHUNK

        worker.tell("run")
        return await torture(dsn, seconds, peer.name, send, handled)


@asynccontextmanager
async def _followed(worker: Voice) -> AsyncIterator[Callable[[], int]]:
    done = 0

    async def follow() -> None:
        nonlocal done
        while True:
            done = await worker.hear("done", 600)

    following = asyncio.create_task(follow())
    try:
        yield lambda: done
    finally:
        following.cancel()


TITLE = "single sends under a held snapshot"
CASES = [
    our_case(METRIC, TITLE, our_torture, prepare=prepare_ours, work=work, extent="torture", rounds=1, seconds=1200),
    *(
        Case(
            peer.name,
            METRIC,
            TITLE,
            partial(peer_torture, peer),
            prepare=partial(prepare_peer, peer),
            migrated=False,
            extent="torture",
            seconds=1200,
            rounds=1,
        )
        for peer in PEERS
        if peer.name in STATEMENTS
    ),
]
