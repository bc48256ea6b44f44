"""Middleware around calls that send."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from busload import BatchCommand, Command, CommandBus, HandlerContext, InvalidCommandError, SyncCommandBus
from busload.commands.send_middleware import SendCall
from tests.given import Database, Given


def headers_now(database: Database) -> list[Any]:
    return [
        headers
        for (headers,) in database.rows(
            "SELECT coalesce(c.headers, b.headers)::json FROM busload.command AS c LEFT JOIN busload.batch AS b"
            " USING (batch_id) ORDER BY c.id"
        )
    ]


async def test_every_call_that_sends_gets_the_headers(bus: CommandBus, given: Given, database: Database) -> None:
    """Those of the call, or of a command of many, win, or middleware may change them"""
    seen: list[Any] = []

    @bus.send_middleware
    def add_tenant(call: SendCall) -> Iterator[None]:
        call.headers.setdefault("tenant", "acme")
        yield
        seen.append((call.call, call.domain, call.command_type, call.result))

    sent = await bus.send("payments", "Debit", headers={"user": "ada"})
    own = await bus.send("payments", "Debit", headers={"tenant": "own"})
    many = await bus.send_many(
        "payments", iter([BatchCommand("Debit"), BatchCommand("Debit", headers={"tenant": "x"})])
    )
    batch_id = await bus.create_batch("payments", [BatchCommand("Debit")])
    async with bus.open_batch("payments") as batch:
        await batch.add("Debit")
    assert headers_now(database) == [
        {"user": "ada", "tenant": "acme"},
        {"tenant": "own"},
        {"tenant": "acme"},
        {"tenant": "x"},
        {"tenant": "acme"},
        {"tenant": "acme"},
    ]
    assert seen == [
        ("send", "payments", "Debit", sent),
        ("send", "payments", "Debit", own),
        ("send_many", "payments", None, many),
        ("create_batch", "payments", None, batch_id),
        ("open_batch", "payments", None, None),
    ]


async def test_what_handlers_send_goes_through_it_too(bus: CommandBus, given: Given, database: Database) -> None:
    @bus.send_middleware
    def add_tenant(call: SendCall) -> Iterator[None]:
        call.headers["tenant"] = "acme"
        yield

    @bus.handler("payments", "Debit")
    async def debit(command: Command, ctx: HandlerContext) -> None:
        async with ctx.transaction():
            await ctx.send("payments", "Within")
        await ctx.send("payments", "Within")

    await given.sent()
    await given.drained(domains=["payments"])
    assert headers_now(database) == [{"tenant": "acme"}] * 3


async def test_it_sees_what_the_call_raises(bus: CommandBus, database: Database) -> None:
    seen: list[BaseException] = []

    @bus.send_middleware
    def watch(call: SendCall) -> Iterator[None]:
        try:
            yield
        except InvalidCommandError as error:
            seen.append(error)
            raise

    @bus.send_middleware
    def refuse_strangers(call: SendCall) -> Iterator[None]:
        if call.domain == "strange":
            raise PermissionError("strange")
        yield

    wrong: Any = ["no", "mapping"]
    with pytest.raises(InvalidCommandError, match="a dict of texts"):
        await bus.send("payments", "Debit", headers=wrong)
    with pytest.raises(InvalidCommandError, match="wanted a list of BatchCommand"):
        await bus.send_many("payments", wrong[0])
    with pytest.raises(PermissionError):
        await bus.create_batch("strange", [BatchCommand("Debit")])
    assert len(seen) == 2
    assert database.count("command") == 0


def test_the_sync_face_has_it_too(sync_bus: SyncCommandBus, database: Database) -> None:
    @sync_bus.send_middleware
    def add_tenant(call: SendCall) -> Iterator[None]:
        call.headers["tenant"] = "acme"
        yield

    sync_bus.send("payments", "Debit")
    sync_bus.send_many("payments", [BatchCommand("Debit")])
    sync_bus.create_batch("payments", [BatchCommand("Debit")])
    assert headers_now(database) == [{"tenant": "acme"}] * 3


def test_it_is_written_with_def(bus: CommandBus) -> None:
    async def awaits(call: SendCall) -> AsyncIterator[None]:
        yield

    with pytest.raises(ValueError, match=r"written with def, found async def .*awaits"):
        bus.send_middleware(awaits)
    with pytest.raises(ValueError, match="one argument"):

        @bus.send_middleware
        def none() -> Iterator[None]:
            yield
