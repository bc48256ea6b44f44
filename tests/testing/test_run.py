"""A handler alone, and a drain: also inside of a transaction that is never committed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import fields
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from busload import (
    BatchCommand,
    Chunk,
    ChunkContext,
    Command,
    CommandBus,
    HandlerContext,
    PermanentCommandError,
    RetryPolicy,
    SyncCommandBus,
    SyncHandlerContext,
    TransientCommandError,
)
from busload.errors import InvalidOperationError
from busload.handlers.hooks import Hooks, Middleware
from busload.testing import assert_sent, drain, run_handler
from tests.given import Database


async def test_a_handler_runs_alone_with_a_real_context(bus: CommandBus, database: Database) -> None:
    database.rows("CREATE TABLE ledger (account integer)")

    @bus.handler("payments", "Debit")
    async def debit(command: Command, ctx: HandlerContext) -> dict[str, Any]:
        async with ctx.transaction() as conn:
            await conn.execute("INSERT INTO ledger VALUES (%s)", [command.data["account"]])
            await ctx.send("mail", "Receipt", {"account": command.data["account"]})
        return {"attempt": ctx.attempt, "task": command.task_key, "headers": command.headers}

    await bus.send("payments", "Debit", {"account": 1})
    command_id = uuid4()
    options: Any = {"task_key": "a", "headers": {"tenant": "t"}, "attempt": 3, "command_id": command_id}
    result = await run_handler(bus, "payments", "Debit", {"account": 7}, **options)

    assert result == {"attempt": 3, "task": "a", "headers": {"tenant": "t"}}
    assert database.rows("SELECT account FROM ledger") == [(7,)]  # and not that of the command which waits
    await assert_sent(bus, "mail", "Receipt", {"account": 7}, times=1)
    [waiting] = await assert_sent(bus, "payments", "Debit", {"account": 1}, times=1)
    assert waiting.status == "PENDING"
    ran = await bus.get_command("payments", command_id)
    assert ran is not None
    assert (ran.status, ran.result) == ("COMPLETED", result)
    database.check_invariants()


async def test_a_handler_that_fails_alone_raises_and_ends_as_with_a_worker(bus: CommandBus, database: Database) -> None:
    database.rows("CREATE TABLE ledger (account integer)")
    command_id = uuid4()

    @bus.handler("payments", "Debit")
    async def debit(command: Command, ctx: HandlerContext) -> None:
        async with ctx.transaction() as conn:
            await conn.execute("INSERT INTO ledger VALUES (1)")
        raise PermanentCommandError("account closed", code="CLOSED")

    with pytest.raises(PermanentCommandError, match="account closed"):
        await run_handler(bus, "payments", "Debit", command_id=command_id)

    assert database.count_rows("ledger") == 0
    ended = await bus.get_command("payments", command_id)
    assert ended is not None
    assert (ended.status, ended.last_error_code) == ("IN_TROUBLESHOOTING_QUEUE", "CLOSED")
    database.check_invariants()


def test_a_handler_with_def_runs_alone_for_the_sync_face(sync_bus: SyncCommandBus, database: Database) -> None:
    database.rows("CREATE TABLE ledger (account integer)")

    @sync_bus.handler("payments", "Debit")
    def debit(command: Command, ctx: SyncHandlerContext) -> int:
        with ctx.transaction() as conn:
            conn.execute("INSERT INTO ledger VALUES (1)")
            ctx.send("mail", "Receipt")
        return ctx.attempt

    assert run_handler(sync_bus, "payments", "Debit") == 1
    assert_sent(sync_bus, "mail", "Receipt", times=1)
    assert database.count_rows("ledger") == 1


async def test_the_sync_face_can_be_drained_while_an_event_loop_runs(sync_bus: SyncCommandBus) -> None:
    sync_bus.handler("payments", "Debit")(lambda command, ctx: 5)
    sync_bus.send("payments", "Debit")
    assert drain(sync_bus) == 1


async def test_what_cannot_run_alone_is_refused(bus: CommandBus) -> None:
    bus.handler("payments", "Debit")(_nothing)
    bus.bulk_handler("payments", "Many")(_nothing)
    with pytest.raises(
        InvalidOperationError, match=r"no handler of payments/Credit on this bus. It has: payments/Debit"
    ):
        await run_handler(bus, "payments", "Credit")
    with pytest.raises(InvalidOperationError, match=r"takes many at a time. Send some and drain\(\)"):
        await run_handler(bus, "payments", "Many")
    with pytest.raises(ValueError, match="attempt"):
        await run_handler(bus, "payments", "Debit", attempt=0)


async def _nothing(subject: Any, ctx: Any) -> None: ...


def _nothing_in_a_thread(subject: Any, ctx: Any) -> None: ...


async def test_a_drain_inside_of_a_transaction_runs_what_was_sent_there_and_a_rollback_undoes_it(
    bus: CommandBus, dsn: str, database: Database
) -> None:
    database.rows("CREATE TABLE ledger (account integer)")
    before = database.everything()

    @bus.handler("payments", "Debit", retry=RetryPolicy(max_attempts=2, backoff=(0,)))
    async def debit(command: Command, ctx: HandlerContext) -> int:
        async with ctx.transaction() as conn:
            await conn.execute("INSERT INTO ledger VALUES (%s)", [command.data])
            await ctx.send("payments", "Receipt", command.data)
        if command.data == 13 and ctx.attempt == 1:
            raise TransientCommandError("no answer")
        return ctx.attempt

    @bus.handler("payments", "Receipt")
    async def receipt(command: Command, ctx: HandlerContext) -> None:
        await ctx.bus.send("mail", "Sent", command.data)

    @bus.handler("payments", "Refuse")
    async def refuse(command: Command, ctx: HandlerContext) -> None:
        async with ctx.transaction() as conn:
            await conn.execute("SELECT 1 / 0")

    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        options: Any = {"on_complete": BatchCommand("Done"), "conn": conn}
        batch_id = await bus.create_batch("payments", [BatchCommand("Debit", data=n) for n in (12, 13)], **options)
        await bus.send("payments", "Refuse", conn=conn, max_attempts=1)

        assert await drain(bus, conn=conn) == 6  # two debits, one of them twice, two receipts, a refusal

        sent = await assert_sent(bus, "payments", "Debit", batch_id=batch_id, times=2, conn=conn)
        assert [(one.status, one.result) for one in sent] == [("COMPLETED", 1), ("COMPLETED", 2)]
        await assert_sent(bus, "payments", "Receipt", status="COMPLETED", times=2, conn=conn)
        await assert_sent(bus, "mail", "Sent", times=2, conn=conn)
        [waits] = await assert_sent(bus, "payments", "Done", times=1, conn=conn)
        assert waits.status == "SCHEDULED"  # no handler
        [refused] = await assert_sent(bus, "payments", "Refuse", times=1, conn=conn)
        assert (refused.status, refused.last_error_type) == ("IN_TROUBLESHOOTING_QUEUE", "DivisionByZero")
        cursor = await conn.execute("SELECT account FROM ledger ORDER BY 1")
        assert await cursor.fetchall() == [(12,), (13,)]
        await conn.rollback()

    assert database.everything() == before
    assert database.count_rows("ledger") == 0


def test_bulk_handlers_run_inside_of_a_transaction_too(sync_bus: SyncCommandBus, dsn: str) -> None:
    sizes: list[int] = []

    @sync_bus.bulk_handler("crm", "Push", size=2, retry=RetryPolicy(max_attempts=1))
    def push(chunk: Chunk, ctx: ChunkContext) -> str:
        sizes.append(len(chunk))
        for item in chunk:
            if item.data == 3:
                chunk.fail(item, PermanentCommandError("bad"))
            else:
                chunk.succeed(item, item.data)
        return "pushed"

    with psycopg.connect(dsn) as conn:
        sync_bus.send_many("crm", [BatchCommand("Push", data=n) for n in range(1, 6)], conn=conn)
        assert drain(sync_bus, conn=conn) == 5
        assert sizes == [2, 2, 1]
        sent = assert_sent(sync_bus, "crm", "Push", times=5, conn=conn)
        assert [one.result for one in sent] == [1, 2, None, 4, 5]
        assert sent[2].status == "IN_TROUBLESHOOTING_QUEUE"
        conn.rollback()


async def test_a_drain_inside_of_a_transaction_does_not_pass_over_events_that_are_due(
    bus: CommandBus, sync_bus: SyncCommandBus, dsn: str
) -> None:
    """A worker would run the handler of a buffer now. What to do instead is named for Django, too."""
    said = r"buffer 'clicks' cannot run inside .* drain without conn \(in Django: in a CommandsTestCase, or with the "
    clicks, sync_clicks = bus.buffer("clicks", size=2), sync_bus.buffer("clicks", size=2)
    clicks.handler()(_nothing)
    sync_clicks.handler()(_nothing_in_a_thread)
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        await clicks.add(1, conn=conn)
        assert await drain(bus, conn=conn) == 0  # it waits for another one
        await clicks.add(2, conn=conn)
        assert await drain(bus, conn=conn, domains=["others"]) == 0
        with pytest.raises(InvalidOperationError, match=said):
            await drain(bus, conn=conn)
        await conn.rollback()
    with psycopg.connect(dsn) as sync_conn:
        sync_clicks.add_many([1, 2], conn=sync_conn)
        with pytest.raises(InvalidOperationError, match=said):
            drain(sync_bus, conn=sync_conn)
        sync_conn.rollback()


def test_a_handler_runs_alone_inside_of_a_transaction(sync_bus: SyncCommandBus, dsn: str, database: Database) -> None:
    database.rows("CREATE TABLE ledger (account integer)")

    @sync_bus.handler("payments", "Debit")
    def debit(command: Command, ctx: SyncHandlerContext) -> int:
        with ctx.transaction() as conn:
            conn.execute("INSERT INTO ledger VALUES (1)")
        if command.data == "bad":
            raise ValueError("bad")
        return ctx.attempt

    with psycopg.connect(dsn) as conn:
        assert run_handler(sync_bus, "payments", "Debit", conn=conn, attempt=2) == 2
        with pytest.raises(ValueError, match="bad"):
            run_handler(sync_bus, "payments", "Debit", "bad", conn=conn)
        assert conn.execute("SELECT count(*) FROM ledger").fetchone() == (1,)
        conn.rollback()
    assert database.count_rows("ledger") == 0


async def test_a_drain_names_commands_that_did_not_run_for_want_of_a_handler(
    bus: CommandBus, sync_bus: SyncCommandBus, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also those of a domain that the bus has no handler for at all; not those of domains that nobody asked about."""
    bus.handler("payments", "Debit")(_nothing)
    sync_bus.handler("payments", "Debit")(_nothing_in_a_thread)
    strange = [("payments", "Credit"), ("celery", "shop.mail"), ("celery", "shop.ship")]
    domain = "2 commands of the domain 'celery' did not run: this bus has no handler for it. Register its handlers"

    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        for one in strange:
            await bus.send(*one, conn=conn)
        assert await drain(bus, conn=conn) == 0
        assert "No handler for Credit in payments here" in caplog.text
        assert domain in caplog.text
        caplog.clear()
        assert await drain(bus, conn=conn, domains=["payments"]) == 0
        assert caplog.text == ""
        await conn.rollback()
    with psycopg.connect(dsn) as sync_conn:
        for one in strange:
            sync_bus.send(*one, conn=sync_conn)
        assert drain(sync_bus, conn=sync_conn) == 0
        assert domain in caplog.text
        sync_conn.rollback()
    for one in strange:
        await bus.send(*one)
    for drained in (bus, sync_bus):
        caplog.clear()
        assert (await drain(bus) if drained is bus else drain(sync_bus)) == 0
        assert domain in caplog.text


def test_a_drain_of_a_bus_without_handlers_is_refused_inside_of_a_transaction_too(
    sync_bus: SyncCommandBus, dsn: str
) -> None:
    with (
        psycopg.connect(dsn) as conn,
        pytest.raises(InvalidOperationError, match="The bus has no handlers, so nothing"),
    ):
        drain(sync_bus, conn=conn)


def test_a_connection_that_cannot_serve_is_refused(sync_bus: SyncCommandBus, dsn: str) -> None:
    sync_bus.handler("payments", "Debit")(_nothing)
    with psycopg.connect(dsn, autocommit=True) as conn:
        with pytest.raises(
            InvalidOperationError, match=r"is in autocommit mode, so there is no transaction.*conn\.transaction\(\)"
        ):
            drain(sync_bus, conn=conn)
        with conn.transaction():
            sync_bus.send("payments", "Debit", conn=conn)
            with pytest.raises(InvalidOperationError, match=r"payments/Debit is written with async def, so .* needs a"):
                drain(sync_bus, conn=conn)
    with pytest.raises(InvalidOperationError, match=r"this bus joins psycopg.Connection"):
        drain(sync_bus, conn="dsn")  # type: ignore[call-overload]


@pytest.mark.parametrize("joined", [False, True])
async def test_middleware_is_around_a_handler_and_the_state_is_what_the_test_gives(
    bus: CommandBus, joined: bool
) -> None:
    seen: list[str] = []

    @bus.middleware
    async def note(command: Command, ctx: HandlerContext) -> AsyncIterator[None]:
        seen.append("before")
        yield
        seen.append("after")

    @bus.handler("payments", "Debit")
    async def debit(command: Command, ctx: HandlerContext) -> str:
        seen.append(ctx.state["bank"])
        return str(ctx.state["bank"])

    async with await psycopg.AsyncConnection.connect(bus.dsn) as conn:
        inside: Any = {"conn": conn} if joined else {}
        await conn.execute("SELECT 1")  # begins the transaction
        assert (
            await run_handler(bus, "payments", "Debit", state={"bank": "of the handler"}, **inside) == "of the handler"
        )
        await bus.send("payments", "Debit", **inside)
        assert await drain(bus, state={"bank": "of the drain"}, **inside) == 1
        await conn.rollback()

    assert seen == ["before", "of the handler", "after", "before", "of the drain", "after"]


@pytest.mark.parametrize("joined", [False, True])
async def test_a_handler_that_completes_in_its_own_transaction_runs_alone_and_in_a_drain(
    bus: CommandBus, database: Database, joined: bool
) -> None:
    @bus.handler("payments", "Debit")
    async def debit(command: Command, ctx: HandlerContext) -> None:
        if joined:
            await ctx.complete(conn=conn, result={"paid": command.data})
        else:
            async with bus.pool.connection() as own, own.transaction():
                await ctx.complete(conn=own, result={"paid": command.data})

    async with await psycopg.AsyncConnection.connect(bus.dsn) as conn:
        inside: Any = {"conn": conn} if joined else {}
        await conn.execute("SELECT 1")  # begins the transaction
        assert await run_handler(bus, "payments", "Debit", 1, **inside) == {"paid": 1}
        sent = await bus.send("payments", "Debit", 2, **inside)
        assert await drain(bus, **inside) == 1
        await conn.commit()

    found = await bus.get_command("payments", sent.command_id)
    assert found is not None
    assert (found.status, found.result) == ("COMPLETED", {"paid": 2})
    database.check_invariants()


async def test_without_a_state_a_handler_is_told_how_to_get_one(bus: CommandBus) -> None:
    @bus.handler("payments", "Debit")
    async def debit(command: Command, ctx: HandlerContext) -> str:
        return str(ctx.state)

    with pytest.raises(InvalidOperationError, match=r"lifespan.*In a test, .*run_handler\(\.\.\., state=engine\)"):
        await run_handler(bus, "payments", "Debit")


def test_a_copy_of_hooks_has_all_of_them_and_lists_of_its_own() -> None:
    hooks = Hooks(print, [print], [repr], [str], [Middleware(print, awaits=False, bulk=True)], [len])  # type: ignore[list-item]

    other = hooks.copy()

    assert other == hooks
    for one in fields(Hooks):
        if one.name != "lifespan":
            assert getattr(other, one.name) is not getattr(hooks, one.name)
