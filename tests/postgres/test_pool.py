"""The pools: who gets a connection, who is told what, and what happens while the server is away."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from busload import CommandBus
from busload.errors import DatabaseUnavailableError, InvalidOperationError
from busload.postgres.backoff import LONGEST_PAUSE, Backoff
from busload.postgres.own_connection import OwnAsyncConnection, connect_within_async
from busload.postgres.pool import AsyncPool, async_pool
from busload.sync.connection import OwnConnection, connect_within
from busload.sync.pool import Pool, pool
from tests.given import Database, eventually

WITHIN = 60.0


class Away:
    """Refuses so many tries to connect, and counts."""

    def __init__(self, tries: int) -> None:
        self.tries, self._refuses = 0, tries

    def look(self) -> None:
        self.tries += 1
        if self.tries <= self._refuses:
            raise psycopg.OperationalError("connection refused")


@pytest.fixture
async def connections(dsn: str) -> AsyncIterator[AsyncPool]:
    async with async_pool(dsn, 2) as connections:
        yield connections


def test_pauses_grow_to_two_seconds_and_no_further() -> None:
    backoff = Backoff()
    pauses = [backoff.pause() for _ in range(1000)]
    assert pauses[0] <= 0.1
    assert max(pauses) <= LONGEST_PAUSE <= 5
    assert min(pauses[10:]) >= LONGEST_PAUSE / 2
    assert len(set(pauses)) > 900  # not all of a fleet at once
    backoff.reset()
    assert backoff.pause() <= 0.1


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours of an outage pass within a second."""
    monkeypatch.setattr("busload.postgres.backoff.LONGEST_PAUSE", 0.01)


async def test_who_waits_is_served_soon_after_a_long_outage(dsn: str, hurried: None) -> None:
    """After a hundred tries in vain, the next one is not further away than the one before."""
    away = Away(tries=100)

    async def connect() -> OwnAsyncConnection:
        away.look()
        return await OwnAsyncConnection.connect(dsn, autocommit=True)

    connections = AsyncPool(connect, 1, timeout=WITHIN)
    async with asyncio.timeout(WITHIN), connections, connections.connection() as conn:
        assert not conn.closed
    assert away.tries == 101


def test_threads_are_served_soon_after_a_long_outage(dsn: str, hurried: None) -> None:
    away = Away(tries=100)

    def connect() -> OwnConnection:
        away.look()
        return OwnConnection.connect(dsn, autocommit=True)

    with Pool(connect, 1, timeout=WITHIN) as connections, connections.connection() as conn:
        assert not conn.closed
    assert away.tries == 101


async def test_one_connection_is_made_at_a_time_however_many_wait(dsn: str) -> None:
    making = most = 0

    async def connect() -> OwnAsyncConnection:
        nonlocal making, most
        making += 1
        most = max(most, making)
        try:
            return await OwnAsyncConnection.connect(dsn, autocommit=True)
        finally:
            making -= 1

    async with AsyncPool(connect, 5) as connections:

        async def use() -> None:
            async with connections.connection() as conn:
                await conn.execute("SELECT pg_sleep(0.01)")

        await asyncio.gather(*(use() for _ in range(30)))
        assert most == 1
        await eventually(lambda: connections.size == connections.idle)  # one may still have been made
        assert 1 <= connections.size <= 5


async def test_who_gets_no_connection_in_time_hears_why(connections: AsyncPool) -> None:
    async with connections.connection(), connections.connection():
        with pytest.raises(
            DatabaseUnavailableError, match=r"All 2 connections were in use for 0\.05 s.*raise pool_size"
        ):
            await connections.getconn(timeout=0.05)
    nobody_there = async_pool("postgresql://nobody@127.0.0.1:1/nothing", 2, timeout=1)
    with pytest.raises(DatabaseUnavailableError, match=r"no connection to PostgreSQL for 1 s.*refused"):
        await nobody_there.getconn()
    await nobody_there.close()


def test_a_thread_that_gets_no_connection_in_time_hears_why(dsn: str) -> None:
    in_use = pytest.raises(DatabaseUnavailableError, match=r"The only connection was in use for 0\.05 s")
    with pool(dsn, 1) as connections, connections.connection(), in_use:
        connections.getconn(timeout=0.05)
    with (
        pool("postgresql://nobody@127.0.0.1:1/nothing", 2, timeout=1) as nobody_there,
        pytest.raises(DatabaseUnavailableError, match=r"no connection to PostgreSQL for 1 s.*refused"),
    ):
        nobody_there.getconn()


async def test_an_error_that_waiting_does_not_change_is_raised_at_once(dsn: str) -> None:
    """A database that does not exist, as a wrong password, is no outage."""
    wrong = make_conninfo(dsn, dbname="there_is_none")
    async with asyncio.timeout(WITHIN), async_pool(wrong, 2, timeout=10 * WITHIN) as connections:
        with pytest.raises(psycopg.OperationalError, match="does not exist"):
            await connections.getconn()
        with pytest.raises(psycopg.OperationalError, match="does not exist"):
            await connect_within_async(wrong, None)
    with (
        pool(wrong, 2, timeout=10 * WITHIN) as threads,
        pytest.raises(psycopg.OperationalError, match="does not exist"),
    ):
        threads.getconn()
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        connect_within(wrong, None)


async def test_a_database_that_stays_away_is_not_waited_for_without_end(caplog: pytest.LogCaptureFixture) -> None:
    nobody = "postgresql://nobody@127.0.0.1:1/nothing"
    for wait in (connect_within_async(nobody, 1), asyncio.to_thread(connect_within, nobody, 1)):
        caplog.clear()
        with pytest.raises(DatabaseUnavailableError, match="could not be reached for"):
            await wait
        assert caplog.text.count("The database cannot be reached, waiting for it for up to 1 s") == 1
    with pytest.raises(psycopg.OperationalError, match="refused"):
        await connect_within_async(nobody, 0)


async def test_a_connection_that_was_ended_while_idle_is_not_handed_out(
    connections: AsyncPool, database: Database
) -> None:
    async with connections.connection() as conn:
        pid = conn.info.backend_pid
    database.rows("SELECT pg_terminate_backend(%s)", pid)
    await eventually(lambda: not database.rows("SELECT 1 FROM pg_stat_activity WHERE pid = %s", pid))
    async with connections.connection() as conn:
        assert await (await conn.execute("SELECT pg_backend_pid()")).fetchone() != (pid,)
    assert connections.size == connections.idle == 1


def test_a_thread_is_not_handed_a_connection_that_was_ended_while_idle(dsn: str, database: Database) -> None:
    with pool(dsn, 2) as connections:
        with connections.connection() as conn:
            pid = conn.info.backend_pid
        database.rows("SELECT pg_terminate_backend(%s)", pid)
        while database.rows("SELECT 1 FROM pg_stat_activity WHERE pid = %s", pid):
            time.sleep(0.01)
        with connections.connection() as conn:
            assert conn.execute("SELECT pg_backend_pid()").fetchone() != (pid,)
        assert connections.size == connections.idle == 1


async def test_a_transaction_that_was_left_open_is_rolled_back(connections: AsyncPool) -> None:
    conn = await connections.getconn()
    await conn.execute("BEGIN")
    await conn.execute("CREATE TABLE left_behind ()")
    await connections.putconn(conn)
    await eventually(lambda: connections.idle == 1)
    async with connections.connection() as again:
        assert again is conn
        found = await (await again.execute("SELECT to_regclass('left_behind')")).fetchone()
        assert found == (None,)


async def test_old_connections_and_those_that_nobody_needs_are_closed(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with async_pool(dsn, 3) as connections:
        async with connections.connection() as first, connections.connection() as second:
            assert connections.size == 2
        monkeypatch.setattr("busload.postgres.pool.UNUSED_FOR", -1.0)
        async with connections.connection():
            pass
        assert [first.closed, second.closed].count(True) >= 1
        connections._max_lifetime = 0.0
        async with connections.connection() as last:
            pass
        assert last.closed
        await eventually(lambda: connections.size == connections.idle)


async def test_a_closed_pool_serves_nobody_and_keeps_nothing(dsn: str) -> None:
    connections = async_pool(dsn, 1)
    held = await connections.getconn()
    waiting = asyncio.create_task(connections.getconn())
    await asyncio.sleep(0)
    await connections.close()
    with pytest.raises(InvalidOperationError):
        await waiting
    with pytest.raises(InvalidOperationError, match="closed"):
        await connections.getconn()
    await connections.putconn(held)
    assert held.closed
    assert connections.size == 0


def test_threads_share_few_connections_fairly_and_lose_none(dsn: str) -> None:
    with pool(dsn, 3) as connections, ThreadPoolExecutor(12) as threads:
        inside, most, lock = 0, 0, threading.Lock()
        all_at_once = threading.Barrier(3, timeout=WITHIN)

        def use(number: int) -> None:
            nonlocal inside, most
            with connections.connection() as conn:
                with lock:
                    inside += 1
                    most = max(most, inside)
                if number < 3:
                    all_at_once.wait()
                conn.execute("SELECT pg_sleep(0.001)")
                with lock:
                    inside -= 1

        list(threads.map(use, range(200)))
        assert most == 3
        assert connections.size == connections.idle == 3


async def test_settings_of_the_dsn_win_over_ours(dsn: str, database: Database) -> None:
    async with CommandBus(make_conninfo(dsn, application_name="billing")) as bus, bus.pool.connection() as conn:
        assert await (await conn.execute("SHOW application_name")).fetchone() == ("billing",)
