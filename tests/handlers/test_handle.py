"""Handles: what `@bus.command` returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from datetime import date
from typing import Any

import psycopg
import pydantic
import pytest

from busload import (
    BatchCommand,
    Command,
    CommandBus,
    HandlerContext,
    InvalidCommandError,
    PermanentCommandError,
    SyncCommandBus,
    SyncHandlerContext,
)
from busload.batches import FailureBudget
from tests.given import Database, Given


@dataclasses.dataclass
class Debit:
    account: int
    amount: int = 10


@dataclasses.dataclass
class Summary:
    to: str
    batch: dict[Any, Any] = dataclasses.field(default_factory=dict)


class Note(pydantic.BaseModel):
    text: str


async def test_a_handle_sends_the_fields_that_its_function_takes(bus: CommandBus, given: Given) -> None:
    seen: list[Any] = []

    @bus.command("payments", "Debit")
    async def debit(ctx: HandlerContext, account: int, due: date, *, amount: int = 5) -> dict[str, int]:
        seen.append((ctx.attempt, account, due, amount))
        return {"debited": amount}

    sent = await debit.send(7, due=date(2026, 11, 18))
    await debit.send(account=8, due=date(2026, 11, 19), amount=6)
    assert (await given.command_now(sent.command_id)).data == {"account": 7, "due": "2026-11-18"}
    await given.drained()
    assert sorted(seen) == [(1, 7, date(2026, 11, 18), 5), (1, 8, date(2026, 11, 19), 6)]
    assert (await given.command_now(sent.command_id)).result == {"debited": 5}


async def test_a_handle_sends_a_model(bus: CommandBus, given: Given) -> None:
    seen: list[Any] = []

    @bus.command("payments", "Debit")
    async def debit(data: Debit, ctx: HandlerContext) -> None:
        seen.append(data)

    @bus.command("payments", "Credit")
    async def credit(command: Command[Debit], ctx: HandlerContext) -> None:
        seen.append(command.data)

    @bus.command("payments", "Mixed")
    async def mixed(ctx: HandlerContext, note: Note, times: int = 1) -> None:
        seen.append((note, times))

    await debit.send(Debit(1))
    await credit.send(Debit(2, 20))
    await mixed.send(Note(text="hello"), times=2)
    await given.drained()
    assert len(seen) == 3
    for one in (Debit(1, 10), Debit(2, 20), (Note(text="hello"), 2)):
        assert one in seen


async def test_a_handle_can_be_called_as_the_function_it_is(bus: CommandBus, database: Database) -> None:
    @bus.command("payments", "Debit")
    async def debit(data: Debit, ctx: HandlerContext) -> int:
        """Take money."""
        return data.amount

    context: Any = object()
    assert await debit(Debit(1, 30), context) == 30
    assert (debit.__name__, debit.__doc__, repr(debit)) == ("debit", "Take money.", "<CommandHandle payments/Debit>")
    assert database.count("command") == 0


async def test_a_batch_is_made_of_commands_of_handles(bus: CommandBus, given: Given) -> None:
    """Each runs in the domain of its handle, whatever that of the batch"""
    seen: list[int] = []

    @bus.command("payments", "Debit")
    async def debit(ctx: HandlerContext, account: int) -> None:
        seen.append(account)

    batch_id = await bus.create_batch("billing", [debit.command(account=n) for n in range(3)])
    results = await debit.send_many(debit.command(n) for n in range(3, 5))
    assert [result.created for result in results] == [True, True]
    await given.drained()
    assert sorted(seen) == [0, 1, 2, 3, 4]
    assert (await given.batch_now(batch_id, "billing")).completed_count == 3


async def test_a_callback_is_a_command_of_a_handle(bus: CommandBus, given: Given) -> None:
    """Its type may have a field for the batch, which is empty when the batch is created"""
    told: list[tuple[str, str | None]] = []

    @bus.command("payments", "Debit")
    async def debit(ctx: HandlerContext, account: int) -> None:
        raise PermanentCommandError("closed")

    @bus.command("payments", "Tell")
    async def tell(data: Summary, ctx: HandlerContext) -> None:
        told.append((data.to, data.batch.get("held_reason")))

    @bus.command("payments", "Note")
    async def note(ctx: HandlerContext, to: str, batch: dict[str, Any] | None = None) -> None:
        assert batch is not None
        told.append((to, batch["status"]))

    budget = FailureBudget(0.5, on_exceeded=tell.command(Summary("ada")))
    await bus.create_batch("payments", [debit.command(n) for n in range(3)], budget=budget)
    await given.drained()
    await bus.create_batch("payments", [note.command("bob", {"status": "sent"})], on_complete=note.command("rosa"))
    await bus.create_batch(
        "payments", [tell.command(Summary("eve"))], on_complete=BatchCommand("Tell", data=Summary("cy"))
    )
    await given.drained()
    assert sorted(told, key=str) == [
        ("ada", "BUDGET"),
        ("bob", "sent"),
        ("cy", None),
        ("eve", None),
        ("rosa", "COMPLETED"),
    ]


async def test_a_callback_holds_nothing_where_its_batch_will_be(bus: CommandBus, database: Database) -> None:
    for given in (Summary("ada", {"status": "sent"}), {"batch": 0}, [1], Summary("ada", {1: object()})):
        with pytest.raises(InvalidCommandError, match="/on_complete/data"):
            await bus.create_batch("payments", [BatchCommand("Debit")], on_complete=BatchCommand("Tell", data=given))
    assert database.count("command") == 0


@pytest.mark.parametrize("around", [False, True], ids=["alone", "in middleware"])
async def test_the_traceback_of_a_handle_begins_in_its_function(bus: CommandBus, given: Given, around: bool) -> None:
    if around:

        @bus.middleware
        def measure(command: Command, ctx: HandlerContext) -> Iterator[None]:
            yield

    @bus.command("payments", "Debit")
    async def debit(ctx: HandlerContext, account: int) -> None:
        raise PermanentCommandError("closed")

    @bus.command("payments", "Write")
    def write(data: Note, ctx: SyncHandlerContext) -> None:
        raise PermanentCommandError("closed")

    for sent in (await debit.send(1), await write.send(Note(text="hello"))):
        await given.drained()
        told = (await given.command_now(sent.command_id)).last_traceback
        assert told is not None and f'File "{__file__}"' in told.splitlines()[1], told


async def test_options_are_those_of_send(
    bus: CommandBus, given: Given, conn: psycopg.AsyncConnection, database: Database
) -> None:
    @bus.command("payments", "Debit")
    async def debit(ctx: HandlerContext, account: int) -> None: ...

    urgent = debit.options(priority=5)
    sent = await urgent.options(task_key="t", headers={"tenant": "acme"}).send(1)
    found = await given.command_now(sent.command_id)
    assert (found.priority, found.task_key, found.headers) == (5, "t", {"tenant": "acme"})
    assert (urgent.command(1).priority, debit.command(1).priority) == (5, 0)
    async with conn.transaction(force_rollback=True):
        await debit.options(conn=conn).send(2)
    assert database.count("command") == 1
    unknown: Any = debit.options
    with pytest.raises(TypeError, match="has no option 'colour'"):
        unknown(colour="red")
    with pytest.raises(TypeError, match="has no option 'fair_by'"):
        debit.options(fair_by="x").command(1)


async def test_arguments_that_do_not_fit_are_refused_and_nothing_is_written(
    bus: CommandBus, database: Database
) -> None:
    @bus.command("payments", "Debit")
    async def debit(ctx: HandlerContext, account: int) -> None: ...

    @bus.command("payments", "Credit")
    async def credit(data: Debit, ctx: HandlerContext) -> None: ...

    untyped: Any = debit.send
    before = database.everything()
    with pytest.raises(InvalidCommandError, match=r"INVALID_DATA at /data/account: does not fit the parameters of"):
        await untyped(account="x")
    with pytest.raises(TypeError, match=r"payments/Debit takes \(account: .*unexpected keyword argument 'accout'"):
        await untyped(account=1, accout=1)
    with pytest.raises(TypeError, match="missing a required argument: 'account'"):
        await untyped()
    with pytest.raises(InvalidCommandError, match="UNSERIALISABLE"):
        await untyped(account=database)
    untyped = credit.send
    with pytest.raises(TypeError, match="takes its data as one argument"):
        await untyped(account=1)
    assert database.everything() == before


async def test_a_function_without_fields_takes_no_data(bus: CommandBus, given: Given) -> None:
    calls: list[int] = []

    @bus.command("payments", "Ping")
    async def ping(ctx: HandlerContext) -> None:
        calls.append(ctx.attempt)

    await ping.send()
    await bus.send("payments", "Ping")
    await given.drained()
    assert calls == [1, 1]


def test_fields_must_be_named(bus: CommandBus) -> None:
    with pytest.raises(ValueError, match=r"has \*fields: 'int', which is no single field|has \*fields"):

        @bus.command("payments", "Debit")
        async def debit(ctx: HandlerContext, *fields: int) -> None: ...


async def test_the_sync_face_has_handles_too(sync_bus: SyncCommandBus, given: Given) -> None:
    seen: list[int] = []

    @sync_bus.command("payments", "Debit")
    def debit(ctx: SyncHandlerContext, account: int) -> int:
        seen.append(account)
        return account

    sent = debit.send(account=5)
    debit.send_many([debit.command(6)])
    context: Any = object()
    assert debit(context, 7) == 7
    given.bus.handlers.become(sync_bus.handlers)
    await given.drained()
    assert sorted(seen) == [5, 6, 7]
    assert (await given.command_now(sent.command_id)).result == 5
