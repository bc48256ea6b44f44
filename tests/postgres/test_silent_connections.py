"""A proxy or firewall drops what is said and closes nothing: calls end, connections are replaced, work goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from busload import BatchCommand, Command, CommandBus, HandlerContext, Settings, SyncCommandBus, Worker, WorkerSettings
from busload.commands.ids import new_id
from busload.errors import DatabaseUnavailableError, OutcomeUnknownError
from busload.postgres import connection, own_connection
from busload.postgres.listen import BATCH, AsyncListener
from busload.postgres.own_connection import CANCEL_WITHIN, CHECK_WITHIN, RESPONSE_TIMEOUT
from busload.postgres.waiting_in_threads import Activity
from busload.sync import connection as sync_connection
from busload.sync.connection import OwnConnection, connect
from busload.sync.listen import Listener
from tests.brokers.proxy import PostgresProxy
from tests.chaos.harness import folder
from tests.given import DOMAIN, Database, eventually
from tests.pgbouncer import PgBouncer

pytestmark = pytest.mark.usefixtures("invariants")

WITHIN = 60.0
"""Seconds after which a call hangs, also on a slow machine; it used to be for ever."""
SHORT = b"SELECT 1 FROM pg_sleep(1.3)"
LONG = b"SELECT 1 FROM pg_sleep(4)"
SOON = 0.3
HASTY = Settings(response_timeout=timedelta(seconds=SOON), poll_every=timedelta(milliseconds=100))
CALM = Settings(response_timeout=timedelta(seconds=2), poll_every=timedelta(milliseconds=100))
"""Doubts a connection late enough that its server has begun with the statement, also on a slow machine."""


@pytest.fixture
async def proxy(dsn: str) -> AsyncIterator[PostgresProxy]:
    async with asyncio.timeout(3 * WITHIN), PostgresProxy(dsn) as proxy:
        yield proxy


@pytest.fixture
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may take longer to let somebody in and to answer, as what is asked there is not whether it can."""
    monkeypatch.setitem(connection.PARAMETERS, "connect_timeout", int(WITHIN))
    monkeypatch.setitem(own_connection._QUESTION, "connect_timeout", int(WITHIN))
    served = own_connection.SERVED.replace("interval '1 s'", "interval '0.1 s'")
    for face in (own_connection, sync_connection):
        monkeypatch.setattr(face, "CHECK_WITHIN", WITHIN)
        monkeypatch.setattr(face, "SERVED", served)


def doubt(bus: CommandBus | SyncCommandBus) -> None:
    """The connections of now are doubted soon; those that replace them may be as slow as the machine is."""
    assert bus.pool._idle
    for _, conn in bus.pool._idle:
        conn.response_timeout = SOON


async def test_a_send_whose_answer_is_swallowed_ends_and_those_behind_it_are_sent(
    proxy: PostgresProxy, database: Database
) -> None:
    async with asyncio.timeout(WITHIN), CommandBus(proxy.url) as bus:
        await bus.send(DOMAIN, "Debit")
        doubt(bus)
        proxy.swallow()  # the server hears the question, nobody hears its answer
        first = asyncio.create_task(bus.send(DOMAIN, "Debit"))
        await asyncio.sleep(0)
        behind = [asyncio.create_task(bus.send(DOMAIN, "Debit")) for _ in range(20)]
        with pytest.raises(OutcomeUnknownError) as unknown:
            await first
        assert all(result.created for result in await asyncio.gather(*behind))
        assert database.count("command") == 22
        [command_id] = unknown.value.command_ids
        assert await bus.get_command(DOMAIN, command_id) is not None
        await eventually(lambda: bus.pool.size == bus.pool.idle)


async def test_sends_behind_a_stuck_one_do_not_wait_for_its_end(proxy: PostgresProxy) -> None:
    """Its connection is doubted only after ten minutes here: they leave on another one."""
    settings = replace(HASTY, response_timeout=timedelta(minutes=10))
    async with asyncio.timeout(WITHIN), CommandBus(proxy.url, settings=settings) as bus:
        await bus.send(DOMAIN, "Debit")
        proxy.swallow_all()
        first = asyncio.create_task(bus.send(DOMAIN, "Debit"))
        await asyncio.sleep(0)
        for _ in range(2):
            behind = [bus.send(DOMAIN, "Debit") for _ in range(20)]
            assert all(result.created for result in await asyncio.gather(*behind))
        assert not first.done()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first


async def test_a_cancelled_call_ends_though_its_connection_is_dead(proxy: PostgresProxy) -> None:
    async with asyncio.timeout(WITHIN), CommandBus(proxy.url) as bus:
        await bus.send(DOMAIN, "Debit")
        proxy.swallow_all(new=True)  # the request to cancel is swallowed as well
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await bus.get_command(DOMAIN, new_id())
        assert bus.pool.size == 0
        proxy.heal()
        assert (await bus.send(DOMAIN, "Debit")).created


async def test_what_was_idle_is_not_trusted_after_one_connection_was_found_dead(proxy: PostgresProxy) -> None:
    """Else each would have to be found out by a call of its own."""
    async with asyncio.timeout(WITHIN), CommandBus(proxy.url) as bus:
        await asyncio.gather(*(bus.get_command(DOMAIN, new_id()) for _ in range(50)))
        await eventually(lambda: 1 < bus.pool.idle == bus.pool.size)
        doubt(bus)
        proxy.swallow_all()
        with pytest.raises(DatabaseUnavailableError):
            await bus.get_command(DOMAIN, new_id())
        assert await bus.get_command(DOMAIN, new_id()) is None


async def test_a_batch_whose_connection_dies_half_way_is_not_written(proxy: PostgresProxy, database: Database) -> None:
    commands = [BatchCommand("Debit", data={"text": "x" * 500}) for _ in range(20_000)]
    async with asyncio.timeout(WITHIN), CommandBus(proxy.url) as bus:
        await bus.send(DOMAIN, "Debit")
        doubt(bus)
        creating = asyncio.create_task(bus.create_batch(DOMAIN, commands))
        copying = "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'COPY%%' AND datname = current_database()"
        await eventually(lambda: database.rows(copying.replace("%%", "%")) or creating.done())
        proxy.swallow_all()
        with pytest.raises((DatabaseUnavailableError, OutcomeUnknownError)):
            await creating
        assert (await bus.send(DOMAIN, "Debit")).created
        await eventually(lambda: bus.pool.size == bus.pool.idle)
    assert database.count("command") == 2


@pytest.mark.usefixtures("slow_machine")
@pytest.mark.parametrize("way", ["directly", "by PgBouncer", "untracked"])
async def test_a_statement_may_take_longer_as_long_as_the_server_works_on_it(
    way: str, dsn: str, proxy: PostgresProxy
) -> None:
    with folder() as path, PgBouncer(Path(path) / "pgbouncer", dsn) as pooler:
        url = pooler.url if way == "by PgBouncer" else proxy.url
        if way == "untracked":
            url = make_conninfo(url, options="-c track_activities=off")
        async with asyncio.timeout(WITHIN), CommandBus(url, settings=CALM) as bus, bus.pool.connection() as conn:
            cursor = await conn.execute("SELECT 1 FROM pg_sleep(3)")
            assert await cursor.fetchone() == (1,)


@pytest.mark.usefixtures("slow_machine")
async def test_statements_that_take_all_connections_of_a_pooler_are_not_given_up(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the pooler has none for the question whether the server works on them."""
    monkeypatch.setattr(own_connection, "CHECK_WITHIN", 1.0)  # it gets no answer while they last
    with folder() as path, PgBouncer(Path(path) / "pgbouncer", dsn, pool_size=2) as pooler:

        def wait() -> tuple[int] | None:
            with SyncCommandBus(pooler.url, settings=CALM) as bus, bus.pool.connection() as conn:
                return conn.execute(LONG).fetchone()

        async with (
            asyncio.timeout(WITHIN),
            CommandBus(pooler.url, settings=CALM) as bus,
            bus.pool.connection() as conn,
        ):
            waiting = asyncio.create_task(asyncio.to_thread(wait))
            cursor = await conn.execute(LONG)
            assert (await cursor.fetchone(), await waiting) == ((1,), (1,))


@pytest.mark.usefixtures("slow_machine")
@pytest.mark.parametrize("face", ["async", "sync"])
async def test_an_answer_that_comes_while_the_server_is_asked_counts(face: str, dsn: str) -> None:
    """A pooler with one connection answers the question after the statement: nobody works on it any more."""
    with folder() as path, PgBouncer(Path(path) / "pgbouncer", dsn, pool_size=1) as pooler:

        def wait() -> tuple[int] | None:
            with SyncCommandBus(pooler.url, settings=HASTY) as bus, bus.pool.connection() as conn:
                return conn.execute(SHORT).fetchone()

        async with asyncio.timeout(WITHIN), CommandBus(pooler.url, settings=HASTY) as bus:
            if face == "sync":
                assert await asyncio.to_thread(wait) == (1,)
                return
            async with bus.pool.connection() as conn:
                cursor = await conn.execute(SHORT)
                assert await cursor.fetchone() == (1,)


async def test_a_connection_that_dies_behind_pgbouncer_is_found_out(dsn: str, database: Database) -> None:
    with folder() as path, PgBouncer(Path(path) / "pgbouncer", dsn) as pooler:
        async with asyncio.timeout(WITHIN), PostgresProxy(dsn) as proxy:
            proxy.reach("127.0.0.1", pooler.port)
            async with CommandBus(proxy.url) as bus:
                await bus.send(DOMAIN, "Debit")
                doubt(bus)
                proxy.swallow_all()
                with pytest.raises(OutcomeUnknownError):
                    await bus.send(DOMAIN, "Debit")
                assert (await bus.send(DOMAIN, "Debit")).created
    assert database.count("command") == 2


async def test_a_sync_send_whose_answer_is_swallowed_ends_too(proxy: PostgresProxy, database: Database) -> None:
    def story(bus: SyncCommandBus) -> None:
        with pytest.raises(OutcomeUnknownError):
            bus.send(DOMAIN, "Debit")
        assert bus.send(DOMAIN, "Debit").created

    bus = await asyncio.to_thread(SyncCommandBus(proxy.url).open)  # the proxy needs this loop
    await asyncio.to_thread(bus.send, DOMAIN, "Debit")
    doubt(bus)
    proxy.swallow_all()
    async with asyncio.timeout(WITHIN):
        await asyncio.to_thread(story, bus)
    await asyncio.to_thread(bus.close)
    assert database.count("command") == 2


@pytest.mark.usefixtures("slow_machine")
async def test_a_sync_statement_may_take_longer_as_long_as_the_server_works_on_it(
    dsn: str, proxy: PostgresProxy
) -> None:
    conn = await asyncio.to_thread(connect, proxy.url, response_timeout=CALM.response_timeout.total_seconds())
    with conn:
        row = await asyncio.to_thread(lambda: conn.execute("SELECT 1 FROM pg_sleep(3)").fetchone())
    assert row == (1,)


@pytest.mark.parametrize("new", [False, True], ids=["old_ones", "all"])
async def test_a_worker_goes_on_with_new_connections(
    dsn: str, proxy: PostgresProxy, database: Database, new: bool
) -> None:
    ran: list[Any] = []
    async with asyncio.timeout(2 * WITHIN), CommandBus(proxy.url, settings=HASTY) as bus:

        @bus.handler(DOMAIN, "Debit")
        async def debit(command: Command, ctx: HandlerContext) -> None:
            ran.append(command.command_id)
            await asyncio.sleep(0.01)

        with SyncCommandBus(dsn) as straight:
            straight.send_many(DOMAIN, [BatchCommand("Debit") for _ in range(300)])
            settings = WorkerSettings(poll_every=timedelta(milliseconds=100), sweep_every=timedelta(seconds=1))
            worker = Worker(bus, settings=settings, concurrency=5)
            running = asyncio.create_task(worker.run())
            await eventually(lambda: len(ran) > 20)
            before = proxy.accepted
            proxy.swallow_all(new=new)
            if new:
                await eventually(lambda: proxy.accepted > before + 3)  # they are tried, in vain
                proxy.heal()
            straight.send(DOMAIN, "Debit")
            await eventually(lambda: database.count("execution") == 301, within=WITHIN)
            worker.stop()
            await running
    assert database.count("lease") == 0
    database.check_invariants()


@pytest.mark.parametrize("face", ["awaited", "waiting"])
async def test_a_listener_notices_that_nobody_speaks_to_it_any_more(
    face: str, proxy: PostgresProxy, database: Database
) -> None:
    heard: list[Any] = []
    loop = asyncio.get_running_loop()

    def hear(channel: str | None, payload: str | None) -> None:
        loop.call_soon_threadsafe(heard.append, (channel, payload))

    if face == "awaited":
        listening = asyncio.create_task(AsyncListener(proxy.url, [BATCH], hear, check_every=0.5).run())
    else:
        listener = Listener(proxy.url, [BATCH], hear, check_every=0.5)
        thread = Activity(listener.run, name="busload-listen")
    await eventually(lambda: (None, None) in heard)
    proxy.swallow_all()

    def hears() -> bool:
        database.rows(f"SELECT pg_notify('{BATCH}', 'here')")
        return (BATCH, "here") in heard

    await eventually(hears, within=WITHIN)
    assert heard.count((None, None)) > 1
    if face == "awaited":
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
    else:
        listener.stop()
        await asyncio.to_thread(thread.join, WITHIN)


async def test_the_limits_add_up_to_fifteen_seconds() -> None:
    """What operators are promised: silence, then two seconds to connect and two for each of the question's answers."""
    assert Settings().response_timeout.total_seconds() == RESPONSE_TIMEOUT
    assert RESPONSE_TIMEOUT + 2 * CHECK_WITHIN <= 15
    assert 2 * CANCEL_WITHIN <= 5
    assert OwnConnection.response_timeout is None  # of a user's own statements, and of migrations
