"""The connection of a handler's transaction is as new for the next handler, whatever the last one did with it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from busload import Chunk, ChunkContext, Command, CommandBus, HandlerContext, RetryPolicy
from busload.postgres import guarded_connection
from tests.given import DOMAIN, Database, Given

ONCE = RetryPolicy(max_attempts=1)
SETS = {
    "SET search_path = pg_temp": "SHOW search_path",
    "SET statement_timeout = '7min'": "SHOW statement_timeout",
    "SET app.tenant = 'blue'": "SELECT nullif(current_setting('app.tenant', true), '')",
    "SELECT set_config('work_mem', '7MB', false)": "SHOW work_mem",
    "DO $$ BEGIN SET work_mem = '7MB'; END $$": "SHOW work_mem",
    "SET ROLE pg_monitor": "SELECT current_user",
    "SET SESSION AUTHORIZATION pg_monitor": "SELECT session_user",
    "LISTEN news": "SELECT pg_listening_channels()",
    "CREATE TEMPORARY TABLE mine (n integer)": "SELECT to_regclass('pg_temp.mine')",
    "DECLARE mine CURSOR WITH HOLD FOR SELECT 1": "SELECT name FROM pg_cursors",
    "SELECT pg_advisory_lock(7)": "SELECT objid FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()",
}
PID = "SELECT pg_backend_pid()"


@pytest.fixture
def seen(bus: CommandBus) -> list[tuple[Any, Any]]:
    """What handlers saw of their session before they changed it, each with its backend."""
    seen: list[tuple[Any, Any]] = []

    async def look(conn: psycopg.AsyncConnection[Any], text: str) -> None:
        row = await (await conn.execute(SETS[text])).fetchone()
        seen.append((row, await (await conn.execute(PID)).fetchone()))
        await conn.execute(text)

    @bus.handler(DOMAIN, "async", retry=ONCE)
    async def change_async(command: Command, ctx: HandlerContext) -> None:
        async with ctx.transaction() as conn:
            await look(conn, command.data[0])
        if command.data[1]:
            raise ValueError("as it was told to")

    @bus.handler(DOMAIN, "def", retry=ONCE)
    def change(command: Command, ctx: Any) -> None:
        with ctx.transaction() as conn:
            seen.append((conn.execute(SETS[command.data[0]]).fetchone(), conn.execute(PID).fetchone()))
            conn.execute(command.data[0])
        if command.data[1]:
            raise ValueError("as it was told to")

    @bus.bulk_handler(DOMAIN, "chunk", size=1, max_wait=0, retry=ONCE)
    async def change_chunk(chunk: Chunk, ctx: ChunkContext) -> None:
        async with ctx.transaction() as conn:
            await look(conn, chunk.items[0].data[0])
        if chunk.items[0].data[1]:
            raise ValueError("as it was told to")

    return seen


@pytest.mark.parametrize("fails", [False, True], ids=["completed", "failed"])
@pytest.mark.parametrize("kind", ["async", "def", "chunk"])
async def test_what_a_handler_sets_for_its_session_is_not_there_for_the_next(
    bus: CommandBus, given: Given, seen: list[tuple[Any, Any]], kind: str, fails: bool
) -> None:
    """And the connection is kept: it is the same one all the time."""
    for text in SETS:
        for _ in range(2):
            await given.sent(kind, [text, fails])
    await given.drained(concurrency=1)
    first, second = seen[::2], seen[1::2]
    assert len(seen) == 2 * len(SETS)
    assert second == first
    assert len({pid for _, pid in seen}) == 1


async def test_how_a_handler_wants_its_rows_is_not_how_the_next_one_gets_them(bus: CommandBus, given: Given) -> None:
    rows: list[Any] = []

    @bus.handler(DOMAIN, "Debit", retry=ONCE)
    async def read(command: Command, ctx: HandlerContext) -> None:
        async with ctx.transaction() as conn:
            rows.append(await (await conn.execute("SELECT 7 AS n, 'x'::text AS t")).fetchone())
            conn.row_factory = dict_row
            conn.cursor_factory = psycopg.AsyncRawCursor
            conn.adapters.register_loader("text", psycopg.types.string.TextBinaryLoader)
            conn.adapters.register_loader("int4", psycopg.types.string.TextLoader)

    await given.sent()
    await given.sent()
    await given.drained(concurrency=1)
    assert rows == [(7, "x"), (7, "x")]


async def test_a_cleaning_that_fails_after_the_commit_fails_no_command(
    bus: CommandBus, given: Given, database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the next handler gets another connection."""
    monkeypatch.setattr(guarded_connection, "CLEAN", "SELECT 1 / 0")
    pids = []

    @bus.handler(DOMAIN, "Debit", retry=ONCE)
    async def debit(command: Command, ctx: HandlerContext) -> None:
        async with ctx.transaction() as conn:
            pids.append(await (await conn.execute(PID)).fetchone())

    await given.sent()
    await given.sent()
    await given.drained(concurrency=1)
    assert database.rows("SELECT outcome FROM busload.execution") == [("COMPLETED",)] * 2
    assert pids[0] != pids[1]
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


Spoil = Callable[[psycopg.AsyncConnection[Any]], Awaitable[None]]


async def fail_in_pipeline(conn: psycopg.AsyncConnection[Any]) -> None:
    async with conn.pipeline():
        await conn.execute("SELECT 1")
        await conn.execute("SELECT 1 / 0")
        await conn.execute("SELECT 2")


async def raise_in_pipeline(conn: psycopg.AsyncConnection[Any]) -> None:
    async with conn.pipeline():
        await conn.execute("SELECT 1 / 0")
        raise ValueError("while answers are on their way")


async def catch_in_pipeline(conn: psycopg.AsyncConnection[Any]) -> None:
    async with conn.pipeline() as pipeline:
        await conn.execute("SELECT 1 / 0")
        try:
            await pipeline.sync()
        except psycopg.Error:
            await conn.execute("SELECT 1")


async def stay_in_pipeline(conn: psycopg.AsyncConnection[Any]) -> None:
    kept.append(conn.pipeline())
    await kept[-1].__aenter__()
    await conn.execute("SELECT 1")


async def stay_in_failed_pipeline(conn: psycopg.AsyncConnection[Any]) -> None:
    kept.append(conn.pipeline())
    await kept[-1].__aenter__()
    await conn.execute("SELECT 1 / 0")


async def stay_in_savepoint(conn: psycopg.AsyncConnection[Any]) -> None:
    kept.append(conn.transaction())
    await kept[-1].__aenter__()


async def copy_half(conn: psycopg.AsyncConnection[Any]) -> None:
    kept.append(conn.cursor().copy("COPY busload.command TO STDOUT"))
    await kept[-1].__aenter__()


kept: list[Any] = []
SPOILS: list[Spoil] = [
    fail_in_pipeline,
    raise_in_pipeline,
    catch_in_pipeline,
    stay_in_pipeline,
    stay_in_failed_pipeline,
    stay_in_savepoint,
    copy_half,
]


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)
async def test_a_connection_that_a_handler_has_spoilt_is_not_given_to_the_next(
    bus: CommandBus, given: Given, database: Database, spoil: Spoil
) -> None:
    database.rows("CREATE TABLE effect (n integer)")

    @bus.handler(DOMAIN, "Spoil", retry=ONCE)
    async def spoils(command: Command, ctx: HandlerContext) -> None:
        async with ctx.transaction() as conn:
            await conn.execute("INSERT INTO effect VALUES (1)")
            await spoil(conn)

    @bus.handler(DOMAIN, "Debit", retry=ONCE)
    async def debit(command: Command, ctx: HandlerContext) -> None:
        async with ctx.transaction() as conn, conn.transaction():
            await conn.execute("INSERT INTO effect VALUES (2)")

    await given.sent("Debit")
    await given.sent("Spoil")
    await given.sent("Debit")
    await given.drained(concurrency=1)
    kept.clear()
    ended = database.rows(
        "SELECT command_type, outcome FROM busload.execution JOIN busload.command AS c ON c.id = command ORDER BY c.id"
    )
    assert [ended[0], ended[2]] == [("Debit", "COMPLETED")] * 2
    wrote = [1] if ended[1][1] == "COMPLETED" else []
    assert database.value("SELECT array_agg(n ORDER BY n) FROM effect") == [*wrote, 2, 2]
    database.check_invariants()
