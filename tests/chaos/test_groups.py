"""Groups under fire: workers that die right after the call, verdicts of every kind, poison anywhere."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from busload import (
    CommandBus,
    Group,
    HandlerContext,
    PermanentCommandError,
    RetryPolicy,
    Settings,
    SyncCommandBus,
    TransientCommandError,
    Worker,
    WorkerSettings,
)
from busload.testing import TestServer
from tests.chaos.harness import ROOT, SOURCES, folder, seeded
from tests.given import Database, short_and_long, until

EVENTS = "events"
QUICK = WorkerSettings(poll_every=timedelta(milliseconds=50), sweep_every=timedelta(milliseconds=100))
ATTEMPTS = 3


# -- workers that die after the outside call -------------------------------------------------------------------------


@contextmanager
def dying(**options: Any) -> Iterator[None]:
    """Workers that die after their calls, and others that take their place."""
    installed = [path for path in sys.path if path.endswith("site-packages")]
    paths = os.pathsep.join([str(SOURCES), str(ROOT), *installed])
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.dying", json.dumps(options)],
        stdin=subprocess.PIPE,
        cwd=ROOT,
        env={"PYTHONPATH": paths, "PATH": os.defpath, "HOME": "/"},
    )
    try:
        yield
    finally:
        process.communicate(timeout=30)


OPEN = """
    SELECT count(*) FROM busload.buffered AS b WHERE NOT EXISTS (
        SELECT FROM busload.troubleshooting AS t JOIN busload.command AS c ON c.id = t.command
         WHERE c.command_id = b.group_id)"""


@short_and_long("kills, events, within", (20, 400, 120), (1000, 20_000, 3000))
def test_workers_that_die_after_the_call_lose_no_event(
    server: TestServer, kills: int, events: int, within: float
) -> None:
    """A worker dies after the outside call, before its outcome is written; the next one sends the rest again."""
    size, concurrency = 10, 4
    with server.database() as dsn, folder() as path, Database(dsn) as database, SyncCommandBus(dsn) as bus:
        service, deaths = path / "service", path / "deaths"
        deaths.mkdir()
        buffer = bus.buffer(EVENTS, size=size)
        for first in range(0, events, 1000):
            buffer.add_many([{"n": n} for n in range(first, min(events, first + 1000))])
        files = {"service": str(service), "deaths": str(deaths)}
        with dying(dsn=dsn, kills=kills, size=size, concurrency=concurrency, **files):
            until(lambda: database.value(OPEN) == 0, within)
        calls = [json.loads(line) for line in service.read_text().splitlines()]
        delivered = Counter(id for call in calls for id in call["items"])
        assert set(delivered) == set(range(1, events + 1)), "each event is delivered at least once, under its own id"
        dead = len(list(deaths.iterdir()))
        assert dead >= kills / 2
        again = sum(delivered.values()) - events
        lost = database.value("SELECT sum(hi - lo + 1) FROM busload.event WHERE type = 'LEASE_LOST'")
        assert again <= lost * size, "only what was under way when a worker died, or seemed to, is delivered again"
        parked = database.value("SELECT count(*) FROM busload.buffered")
        assert parked == database.value(
            "SELECT coalesce(sum((c.data ->> 'items')::integer), 0)"
            " FROM busload.troubleshooting AS t JOIN busload.command AS c ON c.id = t.command"
        )
        database.check_invariants()
        print(f"groups: {events} events, {dead} kills after the call, {again} sent again, {parked} parked, 0 lost")


# -- partial success -------------------------------------------------------------------------------------------------

VERDICTS = st.lists(
    st.lists(st.sampled_from(["done", "later", "bad", "silent"]), min_size=ATTEMPTS, max_size=ATTEMPTS),
    min_size=1,
    max_size=8,
)


async def judged(dsn: str, plan: list[list[str]]) -> dict[int, str]:
    """The codes of the errors that are told about those that are left, by their ids."""
    async with CommandBus(dsn, settings=Settings(pool_size=2)) as bus:
        events = bus.buffer(EVENTS, size=len(plan))

        @events.handler(retry=RetryPolicy(max_attempts=ATTEMPTS, backoff=(0,)))
        async def handle(group: Group, ctx: HandlerContext) -> None:
            for item in group:
                match plan[item.data][ctx.attempt - 1]:
                    case "done":
                        group.succeed(item)
                    case "later":
                        group.fail(item, TransientCommandError("later", code=f"LATER_{item.data}"))
                    case "bad":
                        group.fail(item, PermanentCommandError("bad", code=f"BAD_{item.data}"))

        await events.add_many(list(range(len(plan))))
        await Worker(bus, settings=QUICK).drain()
        items = await bus.troubleshooting.list(EVENTS)
    return {one["id"]: one["code"] for item in items for one in item.details["items"]}


@short_and_long("examples", (60,), (500,))
def test_only_failed_items_remain_with_their_errors(server: TestServer, examples: int) -> None:
    with server.database() as dsn, Database(dsn) as database:

        @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(VERDICTS)
        def check(plan: list[list[str]]) -> None:
            for table in (
                "buffered",
                "troubleshooting",
                "command",
                "execution",
                "event",
                "queue",
                "scheduled",
                "lease",
            ):
                database.rows(f"DELETE FROM busload.{table}")
            told = asyncio.run(judged(dsn, plan))
            expected = {n: code for n, code in expectation(plan).items() if code is not None}
            rows = database.rows("SELECT (data #>> '{}')::integer, id FROM busload.buffered ORDER BY id")
            assert {n for n, _ in rows} == set(expected), "only failed items remain"
            assert {n: told[id] for n, id in rows} == expected, "with their errors"
            database.check_invariants()

        check()


def expectation(plan: list[list[str]]) -> dict[int, str | None]:
    """The model: the code of the error each item ends with; None if it is done."""
    ends: dict[int, str | None] = {}
    open_ones = list(range(len(plan)))
    for attempt in range(ATTEMPTS):
        said = {n: plan[n][attempt] for n in open_ones}
        if set(said.values()) == {"silent"}:  # no verdict at all: the call returned, so all are done
            return ends | dict.fromkeys(open_ones)
        for n, verdict in said.items():
            if verdict == "done":
                ends[n] = None
            elif verdict == "bad":
                ends[n] = f"BAD_{n}"
            elif attempt == ATTEMPTS - 1:
                ends[n] = f"LATER_{n}" if verdict == "later" else "NO_VERDICT"
        open_ones = [n for n in open_ones if n not in ends]
        if not open_ones:
            break
    return ends


# -- one poison event among many -------------------------------------------------------------------------------------


async def poisoned(dsn: str, place: int) -> list[int]:
    """A thousand events, one of which makes every call fail that it is in; returns the sizes of the calls."""
    sizes: list[int] = []
    async with CommandBus(dsn, settings=Settings(pool_size=2)) as bus:
        events = bus.buffer(EVENTS, size=1000)

        @events.handler(retry=RetryPolicy(max_attempts=2, backoff=(0,)), isolate_poison=True)
        async def handle(group: Group, ctx: HandlerContext) -> None:
            sizes.append(len(group))
            if any(item.data == place for item in group):
                raise TransientCommandError("500")

        await events.add_many(list(range(1000)))
        await Worker(bus, settings=QUICK).drain()
    return sizes


@short_and_long("places", (5,), (100,))
def test_one_poison_among_a_thousand_is_isolated_wherever_it_is(server: TestServer, places: int) -> None:
    most = 0
    for place in [616, *seeded().sample(range(1000), places - 1)]:
        with server.database() as dsn, Database(dsn) as database:
            sizes = asyncio.run(poisoned(dsn, place))
            assert sizes[:2] == [1000, 1000]
            further = sizes[2:]
            most = max(most, len(further))
            # Ten calls find it; where good ones were left aside meanwhile, one more sends them all.
            assert len(further) <= 11 and sum(sizes) <= 2000 + 2 * 1000
            assert database.rows("SELECT (data #>> '{}')::integer FROM busload.buffered") == [(place,)]
            assert database.value("SELECT done FROM busload.buffer") == 999
            assert database.count("troubleshooting") == 1
            database.check_invariants()
    print(f"poison: 1 of 1000 at {places} places, isolated in at most {most} further calls, 999 done each time")


# -- a hook that crashes ---------------------------------------------------------------------------------------------


async def hooked(dsn: str, rounds: int) -> None:
    async with CommandBus(dsn, settings=Settings(pool_size=2)) as bus:
        events = bus.buffer(EVENTS, size=5)
        once = RetryPolicy(max_attempts=1)

        @events.handler(retry=once)
        async def handle(group: Group, ctx: HandlerContext) -> None:
            raise TransientCommandError("500")

        @events.exhausted(retry=once)
        async def compensate(group: Group, ctx: HandlerContext) -> None:
            raise [OSError("disk"), SystemExit(1), asyncio.CancelledError(), MemoryError()][len(group) % 4]

        for n in range(rounds):
            await events.add_many(list(range(1 + n % 5)))
            await events.flush()
            await Worker(bus, settings=QUICK).drain()


@short_and_long("rounds", (10,), (200,))
def test_a_hook_that_crashes_deletes_nothing(server: TestServer, rounds: int) -> None:
    with server.database() as dsn, Database(dsn) as database:
        asyncio.run(hooked(dsn, rounds))
        assert database.count("buffered") == sum(1 + n % 5 for n in range(rounds)), "none is deleted"
        kinds = database.rows(
            "SELECT c.command_type, count(*)"
            " FROM busload.troubleshooting AS t JOIN busload.command AS c ON c.id = t.command GROUP BY 1"
        )
        assert dict(kinds) == {"busload.Group": rounds, "busload.Exhausted": rounds}
        database.check_invariants()
