"""What a handler or its error does affects its own command only (P15)."""

from __future__ import annotations

import os

import psycopg
import pytest

from busload import (
    BatchCommand,
    Command,
    CommandBus,
    DuplicateCommandError,
    HandlerContext,
    InvalidOperationError,
    PermanentCommandError,
    Worker,
)
from busload.domain.ids import new_id
from busload.store import connection
from tests.given import DOMAIN, Database, Given


class Unspeakable(PermanentCommandError):
    """An error that cannot even be looked at."""

    @property
    def code(self) -> str:
        raise RuntimeError("no code for you")

    @code.setter
    def code(self, value: object) -> None: ...


async def test_an_error_that_cannot_be_described_costs_no_slot(bus: CommandBus, given: Given) -> None:
    async def refuse(command: Command, ctx: HandlerContext) -> None:
        raise Unspeakable("closed")

    given.handler("Refuse", refuse)
    seen = given.handler()
    for _ in range(3):
        await given.sent("Refuse")
    await given.sent()
    await given.drained(concurrency=2)
    assert len(seen) == 1
    items = await bus.troubleshooting.list(DOMAIN)
    assert [(item.reason, item.last_error_code, item.last_error_message) for item in items] == [
        ("PERMANENT", None, "closed")
    ] * 3


def test_a_retry_policy_of_another_kind_is_refused_when_it_is_registered(bus: CommandBus) -> None:
    with pytest.raises(ValueError, match="RetryPolicy"):
        bus.handler(DOMAIN, "Debit", retry=5)  # type: ignore[arg-type]


def test_one_domain_given_as_text_is_not_taken_for_its_letters(bus: CommandBus) -> None:
    with pytest.raises(ValueError, match="list of names"):
        Worker(bus, domains="payments")


async def test_a_handler_that_ends_its_transaction_itself_does_not_complete(bus: CommandBus, given: Given) -> None:
    async def commit(command: Command, ctx: HandlerContext) -> None:
        async with ctx.transaction() as conn:
            await conn.commit()

    given.handler("Commit", commit)
    command_id = await given.sent("Commit", max_attempts=1)
    await given.drained()
    found = await given.command_now(command_id)
    assert found.status == "IN_TROUBLESHOOTING_QUEUE"
    assert "ended ctx.transaction() itself" in (found.last_error_message or "")


async def test_an_id_twice_in_a_list_is_not_said_to_exist(bus: CommandBus, database: Database) -> None:
    command_id = new_id()
    with pytest.raises(DuplicateCommandError, match="more than once"):
        await bus.send_many(DOMAIN, [BatchCommand("Debit", command_id), BatchCommand("Debit", command_id)])
    assert database.count("command") == 0


def test_a_bus_that_was_opened_before_a_fork_is_refused_in_the_child(dsn: str) -> None:
    """Two processes on one connection would read each other's answers."""
    bus = CommandBus(dsn)
    bus._pool = connection.async_pool(dsn, 1)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover - runs in the child
        try:
            bus.pool  # noqa: B018
        except InvalidOperationError:
            os.write(writing, b"refused")
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as answer:
        assert answer.read() == b"refused"


async def test_the_statements_that_look_for_a_pooler_are_not_prepared(dsn: str) -> None:
    """PgBouncer before 1.21: what one client prepares stays on a server connection that another client gets."""
    pool = connection.engine_pool(dsn, 1)
    await pool.open()
    async with pool.connection() as conn:
        cursor = psycopg.AsyncClientCursor(conn)
        await cursor.execute("SELECT count(*) FROM pg_prepared_statements")
        assert await cursor.fetchone() == (0,)
        await cursor.execute("SHOW jit")
        assert await cursor.fetchone() == ("off",)
    await pool.close()
