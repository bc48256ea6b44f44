"""Middleware around handlers, composed when a worker starts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import psycopg
import pytest

from busload import (
    BatchCommand,
    Chunk,
    ChunkContext,
    Command,
    CommandBus,
    Group,
    HandlerContext,
    RetryPolicy,
    SyncHandlerContext,
)
from busload.errors import InvalidOperationError
from tests.given import Database, Given

tenant: ContextVar[str] = ContextVar("tenant", default="nobody")


async def test_middleware_runs_around_the_handler_the_first_one_outermost(bus: CommandBus, given: Given) -> None:
    """It sees the command, the context and the result"""
    seen: list[Any] = []

    @bus.middleware
    async def outer(command: Command, ctx: HandlerContext) -> AsyncIterator[None]:
        seen.append(("outer", command.data, ctx.attempt))
        result = yield
        seen.append(("outer", result))

    @bus.middleware
    def inner(command: Command, ctx: HandlerContext) -> Iterator[None]:
        seen.append("inner")
        result = yield
        seen.append(("inner", result))

    @bus.handler("payments", "Debit")
    async def debit(command: Command, ctx: HandlerContext) -> int:
        seen.append("handler")
        return 5

    command_id = await given.sent(data={"n": 1})
    await given.drained()
    assert seen == [("outer", {"n": 1}, 1), "inner", "handler", ("inner", 5), ("outer", 5)]
    assert (await given.command_now(command_id)).result == 5


@pytest.mark.parametrize("written", ["async def", "def"])
async def test_middleware_sees_exceptions_and_may_change_them(bus: CommandBus, given: Given, written: str) -> None:
    """One that it does not raise again counts as done"""
    seen: list[str] = []

    def judge(error: Exception) -> None:
        seen.append(f"{type(error).__name__}: {error}")
        if isinstance(error, KeyError):
            raise RuntimeError("changed") from error
        if isinstance(error, ValueError):
            raise error

    if written == "def":

        @bus.middleware
        def watch(command: Command, ctx: HandlerContext) -> Iterator[None]:
            try:
                yield
            except Exception as error:
                judge(error)
    else:

        @bus.middleware
        @asynccontextmanager
        async def watch_async(command: Command, ctx: HandlerContext) -> AsyncIterator[None]:
            try:
                yield
            except Exception as error:
                judge(error)

    @bus.handler("payments", "Debit", retry=RetryPolicy(1))
    async def debit(command: Command, ctx: HandlerContext) -> None:
        raise {"key": KeyError("k"), "value": ValueError("v"), "os": OSError("o")}[command.data]

    sent = {kind: await given.sent(data=kind) for kind in ("key", "value", "os")}
    await given.drained()
    found = {kind: await given.command_now(command_id) for kind, command_id in sent.items()}
    assert sorted(seen) == ["KeyError: 'k'", "OSError: o", "ValueError: v"]
    assert {kind: (one.status, one.last_error_type) for kind, one in found.items()} == {
        "key": ("IN_TROUBLESHOOTING_QUEUE", "RuntimeError"),
        "value": ("IN_TROUBLESHOOTING_QUEUE", "ValueError"),
        "os": ("COMPLETED", None),
    }


async def test_a_handler_in_a_thread_has_middleware_with_def(bus: CommandBus, given: Given) -> None:
    """In its own thread and context"""
    seen: list[Any] = []

    @bus.middleware
    def for_tenant(command: Command, ctx: HandlerContext | SyncHandlerContext) -> Iterator[None]:
        tenant.set(ctx.headers["tenant"])
        yield

    @bus.handler("payments", "Thread")
    def in_thread(command: Command, ctx: SyncHandlerContext) -> None:
        seen.append(("thread", tenant.get()))

    @bus.handler("payments", "Await")
    async def awaited(command: Command, ctx: HandlerContext) -> None:
        seen.append(("await", tenant.get()))

    await bus.send("payments", "Thread", headers={"tenant": "acme"})
    await bus.send("payments", "Await", headers={"tenant": "initech"})
    await given.drained()
    assert sorted(seen) == [("await", "initech"), ("thread", "acme")]
    assert tenant.get() == "nobody"


async def test_what_middleware_raises_afterwards_undoes_the_handlers_transaction(
    bus: CommandBus, given: Given, conn: psycopg.AsyncConnection, database: Database
) -> None:
    await conn.execute("CREATE TABLE public.seen (n integer)")

    @bus.middleware
    async def refuse(command: Command, ctx: HandlerContext) -> AsyncIterator[None]:
        yield
        raise ValueError("not after all")

    @bus.handler("payments", "Debit", retry=RetryPolicy(1))
    async def debit(command: Command, ctx: HandlerContext) -> None:
        async with ctx.transaction() as own:
            await own.execute("INSERT INTO public.seen VALUES (1)")

    command_id = await given.sent()
    await given.drained()
    assert database.value("SELECT count(*) FROM public.seen") == 0
    assert (await given.command_now(command_id)).last_error_message == "not after all"


async def test_bulk_handlers_and_buffers_have_only_middleware_that_asks_for_them(bus: CommandBus, given: Given) -> None:
    seen: list[str] = []

    @bus.middleware
    async def for_commands(command: Command, ctx: HandlerContext) -> AsyncIterator[None]:
        seen.append("commands")
        yield

    @bus.middleware(bulk=True)
    async def for_all(subject: Command | Chunk | Group, ctx: Any) -> AsyncIterator[None]:
        seen.append(type(subject).__name__)
        yield

    @bus.bulk_handler("payments", "Debit", max_wait=0)
    async def debit(chunk: Chunk, ctx: ChunkContext) -> None: ...

    events = bus.buffer("events", size=1)

    @events.handler()
    async def sync(group: Group, ctx: HandlerContext) -> None: ...

    await bus.create_batch("payments", [BatchCommand("Debit")])
    await given.drained()
    await events.add({"n": 1})
    await given.drained(domains=None)
    assert seen == ["Chunk", "Group"]


async def test_a_middleware_that_awaits_is_refused_around_threads_when_the_worker_starts(
    bus: CommandBus, given: Given
) -> None:
    @bus.middleware
    async def awaits(command: Command, ctx: HandlerContext) -> AsyncIterator[None]:
        yield

    @bus.handler("payments", "Debit")
    def debit(command: Command, ctx: SyncHandlerContext) -> None: ...

    with pytest.raises(InvalidOperationError, match=r"awaits is written with async def.*debit.*Write the middleware"):
        await given.drained()


async def test_a_middleware_yields_once(bus: CommandBus, given: Given) -> None:
    """If it yields never, or more than once, its command fails and says so"""

    @bus.middleware
    async def wrong(command: Command, ctx: HandlerContext) -> AsyncIterator[None]:
        for _ in range(command.data):
            yield

    @bus.handler("payments", "Debit", retry=RetryPolicy(1))
    async def debit(command: Command, ctx: HandlerContext) -> None: ...

    never, once, twice = [await given.sent(data=n) for n in range(3)]
    await given.drained()
    assert (await given.command_now(once)).status == "COMPLETED"
    assert "returned before its yield" in str((await given.command_now(never)).last_error_message)
    assert "second yield" in str((await given.command_now(twice)).last_error_message)


def test_what_is_no_middleware_is_refused(bus: CommandBus) -> None:
    async def no_yield(command: Command, ctx: HandlerContext) -> None: ...

    async def one_argument(command: Command) -> AsyncIterator[None]:
        yield

    with pytest.raises(ValueError, match=r"a function with one `yield`, found .*no_yield"):
        bus.middleware(no_yield)
    with pytest.raises(ValueError, match=r"called with two arguments, found .*one_argument\(command"):
        bus.middleware(one_argument)
    wrong: Any = 5
    with pytest.raises(ValueError, match="found 5"):
        bus.middleware(wrong)
    assert bus.hooks.middleware == []
