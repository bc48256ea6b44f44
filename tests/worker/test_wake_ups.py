"""A single command wakes one worker, a burst wakes all that it can feed, and nobody waits for one who is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import psycopg
import pytest

from busload import BatchCommand, Command, CommandBus, HandlerContext
from busload.commands import wake
from busload.postgres.plan import Plan
from busload.postgres.pool import AsyncPool, engine_pool
from busload.worker import claimer as claiming
from busload.worker.lifecycle import Run
from busload.worker.sweep import sweep
from busload.worker.wake_ups import WakeUps
from tests.given import DOMAIN, Database, Given, closed_to_newcomers, eventually

READY = "busload_ready"
NEVER = timedelta(hours=1)
"""A worker that polls so seldom does only what it is woken for."""


def sessions(database: Database, domain: str = DOMAIN) -> list[int]:
    found = database.rows("SELECT sessions FROM busload.listener WHERE domain = %s", domain)
    return list(found[0][0]) if found else []


@asynccontextmanager
async def workers(
    given: Given, count: int, *, poll_every: timedelta = NEVER, **options: Any
) -> AsyncIterator[list[Run]]:
    """Workers that are woken, or else look only so often."""
    settings = replace(given.settings, poll_every=poll_every)
    async with AsyncExitStack() as stack:
        runs: list[Run] = []
        for _ in range(count):
            worker = given.worker(settings=settings, **options)
            run = await stack.enter_async_context(worker._running())
            runs.append(run)
            running = asyncio.create_task(run.until_stopped())
            stack.push_async_callback(_stopped, run, running)
        for run in runs:
            await eventually(partial(_is_ready, run))
        for run in runs:  # who entered at the same time may have overlooked each other
            given.database.perform(wake.listens(run._shared.number, _session(given.database, run)))
        assert len(sessions(given.database)) == count
        yield runs


def _is_ready(run: Run) -> bool:
    return run._listener.is_found and run._claimer.emptied


async def _stopped(run: Run, running: asyncio.Task[None]) -> None:
    run.stop(hurry=True)
    await running


def _session(database: Database, run: Run) -> int:
    return int(database.value("SELECT session FROM busload.worker WHERE worker = %s", run._shared.number))


async def heard(conn: psycopg.AsyncConnection) -> list[tuple[str, str]]:
    """All notifications up to now, and the next one if there was none yet."""
    found: list[tuple[str, str]] = []
    async for notification in conn.notifies(timeout=10, stop_after=1):
        found.append((notification.channel, notification.payload))
    await conn.execute("SELECT pg_notify('the_end', '')")
    while found[-1][0] != "the_end":
        found += [(one.channel, one.payload) async for one in conn.notifies(timeout=10, stop_after=1)]
    return found[:-1]


async def listen(conn: psycopg.AsyncConnection, numbers: Sequence[int]) -> None:
    for channel in (READY, "the_end", *map(wake.channel_of, numbers)):
        await conn.execute(f"LISTEN {channel}".encode())


async def frozen(given: Given, conn: psycopg.AsyncConnection) -> int:
    """A worker that lives for the server, and does nothing: this session is where it listens."""
    worker, session = given.registered_worker(), conn.info.backend_pid
    await listen(conn, [session])
    await conn.execute("SELECT pg_advisory_lock(27711008, pg_backend_pid())")
    given.database.perform(wake.listens(worker, session))
    return worker


@pytest.fixture
def asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers need no time without work before they look less often, and then claim only what they have seen."""
    monkeypatch.setattr(claiming, "ASLEEP_AFTER", 0.0)
    monkeypatch.setattr(claiming, "ASLEEP_CLAIMS", NEVER.total_seconds())


# -- who is woken ---------------------------------------------------------------------------------------------------


async def test_each_send_is_told_to_one_worker(
    bus: CommandBus, given: Given, database: Database, conn: psycopg.AsyncConnection
) -> None:
    given.handler()
    async with workers(given, 3):
        await listen(conn, sessions(database))
        told = set[str]()
        for _ in range(12):
            batch_id = await bus.create_batch(DOMAIN, [BatchCommand("Debit")])
            [(channel, domain)] = await heard(conn)
            assert channel.startswith(wake.WAKE) and domain == DOMAIN
            told.add(channel)
            await bus.wait_batch(DOMAIN, batch_id)
        assert len(told) > 1  # they take turns


@pytest.mark.parametrize("statement", ["send", "send_many", "sql", "in_transaction"])
async def test_however_it_is_sent_one_worker_is_woken_and_runs_it(
    bus: CommandBus, given: Given, database: Database, conn: psycopg.AsyncConnection, dsn: str, statement: str
) -> None:
    seen = given.handler()
    async with workers(given, 2):
        await listen(conn, sessions(database))
        if statement == "send":
            await bus.send(DOMAIN, "Debit")
        elif statement == "send_many":
            await bus.send_many(DOMAIN, [BatchCommand("Debit")])
        elif statement == "sql":
            database.rows("SELECT busload.send(%s, 'Debit')", DOMAIN)
        else:
            async with await psycopg.AsyncConnection.connect(dsn) as mine:
                for _ in range(5):
                    await bus.send(DOMAIN, "Debit", conn=mine)
        [(channel, domain)] = await heard(conn)
        assert channel.startswith(wake.WAKE) and domain == DOMAIN
        await eventually(lambda: len(seen) == (5 if statement == "in_transaction" else 1))


async def test_many_commands_are_told_to_all(bus: CommandBus, given: Given, conn: psycopg.AsyncConnection) -> None:
    given.handler()
    async with workers(given, 2):
        await listen(conn, [])
        await given.batch(commands=101)
        assert await heard(conn) == [(READY, DOMAIN)]


async def test_where_nobody_listens_all_are_told(bus: CommandBus, conn: psycopg.AsyncConnection) -> None:
    await listen(conn, [])
    await bus.send(DOMAIN, "Debit")
    assert await heard(conn) == [(READY, DOMAIN)]


async def test_if_the_session_of_the_chosen_worker_is_gone_all_are_told(
    bus: CommandBus, given: Given, database: Database, conn: psycopg.AsyncConnection, dsn: str
) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as dying:
        session = dying.info.backend_pid
        await frozen(given, dying)
        await listen(conn, [session])
        await bus.send(DOMAIN, "Debit")
        [(channel, _)] = await heard(conn)
        assert channel == wake.channel_of(session)
    await eventually(lambda: not database.rows("SELECT FROM pg_locks WHERE pid = %s", session))
    await bus.create_batch(DOMAIN, [BatchCommand("Debit")])
    assert await heard(conn) == [(READY, DOMAIN)]


# -- what the one does that was woken -------------------------------------------------------------------------------


async def test_a_wake_up_during_a_claim_is_about_what_the_claim_did_not_see(
    given: Given, database: Database, conn: psycopg.AsyncConnection
) -> None:
    async def perform(plan: Plan[None]) -> None:
        database.perform(plan)

    wake_ups = WakeUps(perform)
    await given.batch(commands=1)
    await listen(conn, [])
    wake_ups.came(DOMAIN)
    before = wake_ups.count
    wake_ups.came(DOMAIN)  # while a claim is under way that finds nothing
    wake_ups.taken([DOMAIN], before)
    assert await wake_ups.hand_on(before) is None  # the next claim looks for it
    await conn.execute("SELECT pg_notify('the_end', 'nobody was told')")
    await wake_ups.hand_on(wake_ups.count)  # and does not take it
    told = [(one.channel, one.payload) async for one in conn.notifies(timeout=10, stop_after=2)]
    assert told == [("the_end", "nobody was told"), (READY, DOMAIN)]


async def test_a_busy_worker_takes_what_it_has_told_all_for_no_newcomer(
    bus: CommandBus, given: Given, database: Database
) -> None:
    given.handler()
    async with workers(given, 1) as [run]:
        claimer, told = run._claimer, run.notifications
        claimer.wake_ups.came(DOMAIN)
        await claimer.wake_ups.hand_on_at_once()
        claimer.emptied = False  # more is ready than it can take; the worker itself looks only in the next await
        told.hear(READY, DOMAIN)
        assert not claimer.newcomers.expected
        told.hear(READY, DOMAIN)  # somebody else has told all
        assert claimer.newcomers.expected


async def test_a_burst_wakes_all_that_it_can_feed(bus: CommandBus, given: Given) -> None:
    running, go = 0, asyncio.Event()

    async def wait(command: Command, ctx: HandlerContext) -> None:
        nonlocal running
        running += 1
        await go.wait()

    given.handler("Debit", wait)
    async with workers(given, 4, concurrency=1) as runs:
        await bus.send_many(DOMAIN, [BatchCommand("Debit") for _ in range(4)])
        await eventually(lambda: running == 4)
        assert [run._line.in_hand for run in runs] == [1, 1, 1, 1]
        go.set()


async def test_a_worker_without_a_free_slot_lets_others_take_what_it_was_woken_for(
    bus: CommandBus, given: Given, database: Database
) -> None:
    begun: list[Any] = []
    go = asyncio.Event()

    async def wait(command: Command, ctx: HandlerContext) -> None:
        begun.append(command.data)
        await go.wait()

    given.handler("Debit", wait)
    async with workers(given, 2, concurrency=1):
        await bus.send(DOMAIN, "Debit", 1)
        await eventually(lambda: begun == [1])
        [busy] = database.rows("SELECT session FROM busload.worker JOIN busload.lease USING (worker)")
        database.rows("UPDATE busload.listener SET sessions = ARRAY[%s::integer] RETURNING 1", busy[0])
        await bus.create_batch(DOMAIN, [BatchCommand("Debit", data=2)])
        await eventually(lambda: begun == [1, 2])
        go.set()


async def test_a_worker_that_stops_is_found_no_more_and_hands_its_wake_ups_on(
    bus: CommandBus, given: Given, database: Database, conn: psycopg.AsyncConnection
) -> None:
    go = asyncio.Event()
    begun = given.handler("Debit", lambda command, ctx: go.wait())
    async with workers(given, 1, concurrency=1) as [run]:
        await bus.send(DOMAIN, "Debit")
        await eventually(lambda: begun)
        [session] = sessions(database)
        run._claimer.empty_line()
        for loop in run._taking:
            loop.stop()
        await run._listener.leave()
        assert sessions(database) == []
        await listen(conn, [])
        await bus.create_batch(DOMAIN, [BatchCommand("Debit")])
        assert await heard(conn) == [(READY, DOMAIN)]
        database.rows("SELECT pg_notify(%s, %s)", wake.channel_of(session), DOMAIN)  # chosen a moment before it left
        assert await heard(conn) == [(READY, DOMAIN)]
        go.set()


async def test_a_worker_that_has_stopped_has_taken_itself_out(given: Given, database: Database) -> None:
    given.handler()
    async with workers(given, 1):
        assert len(sessions(database)) == 1
    assert sessions(database) == []


# -- who is woken and does nothing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sleeps", [False, True])
async def test_what_a_frozen_worker_was_woken_for_is_found_by_the_others(
    bus: CommandBus,
    given: Given,
    database: Database,
    conn: psycopg.AsyncConnection,
    request: pytest.FixtureRequest,
    sleeps: bool,
) -> None:
    if sleeps:
        request.getfixturevalue("asleep")
    seen = given.handler()
    async with workers(given, 1, poll_every=timedelta(milliseconds=200)) as [run]:
        await eventually(lambda: run._claimer.asleep is sleeps)
        await frozen(given, conn)
        database.rows("UPDATE busload.listener SET sessions = ARRAY[%s::integer] RETURNING 1", conn.info.backend_pid)
        await bus.create_batch(DOMAIN, [BatchCommand("Debit")])
        assert await heard(conn) == [(wake.channel_of(conn.info.backend_pid), DOMAIN)]
        await eventually(lambda: seen)


async def test_a_worker_that_is_silent_is_woken_no_more(
    given: Given, database: Database, conn: psycopg.AsyncConnection
) -> None:
    given.handler()
    async with workers(given, 1) as [run]:
        silent = await frozen(given, conn)
        mine = _session(database, run)
        assert sorted(sessions(database)) == sorted([mine, conn.info.backend_pid])
        database.rows(
            "UPDATE busload.worker SET seen_at = now() - lease_for * 0.6 WHERE worker = %s RETURNING 1", silent
        )
        database.perform(wake.listens(run._shared.number, mine))
        assert sessions(database) == [mine]


async def test_a_worker_whose_listener_is_lost_looks_as_often_as_if_it_had_none(
    given: Given, database: Database, dsn: str, asleep: None
) -> None:
    seen = given.handler()
    async with workers(given, 1, poll_every=timedelta(milliseconds=50)) as [run]:
        await eventually(lambda: run._claimer.asleep)
        claims = run._claimer.claims
        run._claiming.wake()
        await eventually(lambda: run._claimer.claims > claims)  # from here on it claims no more by itself
        with closed_to_newcomers(dsn) as admin:
            [session] = sessions(database)
            admin.execute("SELECT pg_terminate_backend(%s)", [session])
            await eventually(lambda: not run._listener.is_found)
            database.rows("SELECT busload.send(%s, 'Debit')", DOMAIN)
            await eventually(lambda: seen)
        await eventually(lambda: run._listener.is_found)
        assert _session(database, run) != session


# -- workers without work -------------------------------------------------------------------------------------------


async def test_a_worker_that_sleeps_looks_less_often_and_at_random_times(given: Given, asleep: None) -> None:
    given.handler()
    async with workers(given, 1, poll_every=timedelta(seconds=60)) as [run]:
        pauses = [await run._claimer.promote() for _ in range(10)]
        assert all(120 <= pause <= 240 for pause in pauses) and len(set(pauses)) == 10
        run._claimer._empty_at = 0.0  # the worker may have claimed just now by itself: then this would be too soon
        assert (await run._claimer.once()).pause == claiming.ASLEEP_CLAIMS
        run._listener.is_found = False
        assert await run._claimer.promote() == 60
        run._listener.is_found = True


async def test_a_worker_that_has_just_worked_looks_as_often_as_it_is_told(bus: CommandBus, given: Given) -> None:
    seen = given.handler()
    async with workers(given, 1, poll_every=timedelta(seconds=60)) as [run]:
        await bus.send(DOMAIN, "Debit")
        await eventually(lambda: seen)
        await eventually(lambda: run._line.in_hand == 0)
        assert await run._claimer.promote() == 60


async def test_a_sweep_of_an_idle_database_is_one_transaction(given: Given, dsn: str) -> None:
    worker = given.registered_worker()
    async with engine_pool(dsn, 1) as pool:
        await sweep(pool, worker=worker, judge=True)  # its statements are prepared from here on
        before = await _transactions(pool)
        await sweep(pool, worker=worker, judge=True)
        assert await _transactions(pool) - before == 2  # and the one that asks


async def _transactions(pool: AsyncPool) -> int:
    """The number of the session's own transaction: it counts them all, also those that only read."""
    async with pool.connection() as conn:
        cursor = await conn.execute(
            "SELECT split_part(virtualtransaction, '/', 2)::bigint FROM pg_locks"
            " WHERE pid = pg_backend_pid() AND locktype = 'virtualxid'"
        )
        row = await cursor.fetchone()
    assert row is not None
    return int(row[0])


Sends = Callable[[CommandBus, datetime], Awaitable[object]]


async def _by_send(bus: CommandBus, at: datetime) -> None:
    await bus.send(DOMAIN, "Debit", run_at=at)


async def _by_batch(bus: CommandBus, at: datetime) -> None:
    await bus.create_batch(DOMAIN, [BatchCommand("Debit", run_at=at)])


async def _by_sql(bus: CommandBus, at: datetime) -> None:
    async with await psycopg.AsyncConnection.connect(bus.dsn, autocommit=True) as conn:
        await conn.execute("SELECT busload.send(%s, 'Debit', run_at => %s)", [DOMAIN, at])


async def _by_reschedule(bus: CommandBus, at: datetime) -> None:
    sent = await bus.send(DOMAIN, "Debit", run_at=at + timedelta(hours=1))
    await bus.reschedule_command(DOMAIN, sent.command_id, run_at=at)


@pytest.mark.parametrize("sends", [_by_send, _by_batch, _by_sql, _by_reschedule])
async def test_a_worker_that_sleeps_starts_in_time_what_is_due_soon(
    bus: CommandBus, given: Given, asleep: None, sends: Sends
) -> None:
    seen = given.handler()
    async with workers(given, 2):
        await sends(bus, datetime.now(UTC) + timedelta(seconds=1))
        await eventually(lambda: seen)
