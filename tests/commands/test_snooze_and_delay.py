"""Commands that wait because somebody said so: handlers by `ctx.snooze`, senders by `delay`, policies by rules."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from busload import (
    BatchCommand,
    Command,
    CommandBus,
    ConcurrencyLimit,
    Dedup,
    HandlerContext,
    InvalidCommandError,
    RetryPolicy,
    SyncHandlerContext,
    TransientCommandError,
)
from busload.commands.execution import is_final
from busload.errors import CommandCanceledError, SnoozeError
from tests.given import Database, Given, raising


def snoozing(calls: list[int]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    async def handle(command: Command, ctx: HandlerContext) -> None:
        calls.append(ctx.attempt)
        if len(calls) < 3:
            ctx.snooze(timedelta(hours=2))

    def handle_in_thread(command: Command, ctx: SyncHandlerContext) -> None:
        calls.append(ctx.attempt)
        if len(calls) < 3:
            ctx.snooze(7200)

    return handle, handle_in_thread


@pytest.mark.parametrize("kind", ["async", "thread", "limited"])
async def test_a_snoozed_command_comes_back_and_burns_no_attempt(
    bus: CommandBus, given: Given, database: Database, kind: str
) -> None:
    """It is tried once, and may snooze more than once; each time stands in the audit trail"""
    calls: list[int] = []
    limit = ConcurrencyLimit(1) if kind == "limited" else None
    handle = snoozing(calls)[kind == "thread"]
    bus.handler("payments", "Debit", retry=RetryPolicy(1), concurrency_limit=limit)(handle)
    command_id = await given.sent()
    for times in (1, 2):
        await given.drained()
        assert (await given.command_now(command_id)).status == "SCHEDULED"
        assert database.rows("SELECT reason FROM busload.scheduled") == [("SNOOZED",)]
        wait = database.value("SELECT extract(epoch FROM run_at - now()) FROM busload.scheduled")
        assert 7100 < wait <= 7200
        assert len(calls) == times
        given.make_due()
    await given.drained()
    assert calls == [1, 1, 1]
    found = await given.command_now(command_id)
    assert (found.status, found.attempts) == ("COMPLETED", 1)
    trail = await bus.get_audit_trail("payments", command_id)
    snoozed = [event for event in trail if event.type == "SNOOZED"]
    assert [(event.attempt, set(event.details)) for event in snoozed] == [(1, {"run_at"})] * 2
    assert database.count("troubleshooting") == 0


async def test_a_snooze_undoes_the_transaction_of_its_handler(
    bus: CommandBus, given: Given, conn: psycopg.AsyncConnection, database: Database
) -> None:
    await conn.execute("CREATE TABLE public.seen (n integer)")

    @bus.handler("payments", "Debit")
    async def handle(command: Command, ctx: HandlerContext) -> None:
        async with ctx.transaction() as own:
            await own.execute("INSERT INTO public.seen VALUES (1)")
            ctx.snooze(60)

    await given.sent()
    await given.drained()
    assert database.value("SELECT count(*) FROM public.seen") == 0
    assert database.count("scheduled") == 1


async def test_a_batch_waits_for_what_is_snoozed_and_explains_it(bus: CommandBus, given: Given) -> None:
    bus.handler("payments", "Debit")(snoozing([])[0])
    batch_id = await given.batch()
    await given.drained()
    assert (await given.batch_now(batch_id)).completed_count == 0
    explanation = await bus.explain_batch("payments", batch_id)
    assert any("put off by its handler" in reason.message for reason in explanation.reasons)


async def test_a_canceled_command_does_not_snooze(bus: CommandBus, given: Given, database: Database) -> None:
    @bus.handler("payments", "Debit")
    async def handle(command: Command, ctx: HandlerContext) -> None:
        await bus.cancel_command("payments", command.command_id, reason="no more")
        while not ctx.cancelled:  # the worker is told by a notification
            await asyncio.sleep(0.01)
        ctx.snooze(60)

    command_id = await given.sent()
    async with given.running():
        with pytest.raises(CommandCanceledError, match="CANCELED"):
            await bus.wait_command("payments", command_id, timeout=30)
    assert (await given.command_now(command_id)).status == "CANCELED"


@pytest.mark.parametrize("after", [-1, float("nan"), "60", None, timedelta(seconds=-1), True])
def test_a_snooze_lasts_from_zero_on(after: Any) -> None:
    with pytest.raises(ValueError, match="seconds from 0 on"):
        SnoozeError(after)


async def test_a_delay_counts_from_the_clock_of_the_database(
    bus: CommandBus, given: Given, database: Database, conn: psycopg.AsyncConnection
) -> None:
    """However wrong the clock of the sender is, for every call that sends, with and without a transaction"""
    calls: list[int] = []

    @bus.handler("payments", "Debit")
    async def handle(command: Command, ctx: HandlerContext) -> None:
        calls.append(1)

    options: list[Any] = [timedelta(hours=1), 3600, 3600.0]
    sent = [(await bus.send("payments", "Debit", delay=delay)).command_id for delay in options]
    one = BatchCommand("Debit", delay=3600)
    sent += [(await bus.send_many("payments", [one]))[0].command_id]
    sent += [(await bus.send("payments", "Debit", delay=3600, task_key="k", dedup=Dedup())).command_id]
    async with conn.transaction():
        sent += [(await bus.send("payments", "Debit", delay=3600, conn=conn)).command_id]
        [(now,)] = await (await conn.execute("SELECT now()")).fetchall()
        [(due,)] = await (await conn.execute("SELECT max(run_at) FROM busload.scheduled")).fetchall()
        assert due - now == timedelta(hours=1)
    await bus.create_batch("payments", [one, BatchCommand("Debit")])
    await bus.create_batch("payments", [BatchCommand("Debit", delay=3600) for _ in range(1100)])
    async with bus.open_batch("payments") as batch:
        await batch.add("Debit", delay=timedelta(hours=1))
    waits = database.rows(
        "SELECT sum(s.hi - s.lo + 1)::integer FROM busload.scheduled AS s JOIN busload.command AS c ON c.id = s.hi"
        " WHERE s.run_at - c.created_at BETWEEN interval '59 minutes 59 seconds' AND interval '1 hour'"
        " AND s.reason = 'RUN_AT'"
    )
    assert waits == [(len(sent) + 1 + 1100 + 1,)]
    await given.drained()
    assert len(calls) == 1
    given.make_due()
    await given.drained()
    assert len(calls) == 1 + len(sent) + 1 + 1100 + 1


async def test_what_is_delayed_in_a_handler_is_too(bus: CommandBus, given: Given, database: Database) -> None:
    @bus.handler("payments", "Debit")
    async def handle(command: Command, ctx: HandlerContext) -> None:
        async with ctx.transaction():
            await ctx.send("payments", "Later", delay=60)

    await given.sent()
    await given.drained()
    assert database.count("scheduled") == 1


@pytest.mark.parametrize(
    ("options", "path", "found"),
    [
        ({"delay": -1}, "/delay", "from zero to"),
        ({"delay": timedelta(days=40000)}, "/delay", "from zero to"),
        ({"delay": "5"}, "/delay", "from zero to"),
        ({"delay": True}, "/delay", "from zero to"),
        ({"delay": float("nan")}, "/delay", "from zero to"),
        ({"delay": 1, "run_at": datetime(2030, 1, 1, tzinfo=UTC)}, "/delay", "there is a run_at too"),
        ({"delay": 7200, "expires_at": datetime.now(UTC) + timedelta(hours=1)}, "/expires_at", "after the delay"),
    ],
)
async def test_a_delay_that_cannot_be_is_refused(
    bus: CommandBus, database: Database, options: Any, path: str, found: str
) -> None:
    before = database.everything()
    with pytest.raises(InvalidCommandError, match=found) as refused:
        await bus.send("payments", "Debit", **options)
    assert [problem.path for problem in refused.value.problems] == [path]
    with pytest.raises(InvalidCommandError, match=found):
        await bus.create_batch("payments", [BatchCommand("Debit", **options)])
    assert database.everything() == before


async def test_a_delay_longer_than_its_batch_lives_is_refused(bus: CommandBus) -> None:
    with pytest.raises(InvalidCommandError, match="wanted a shorter delay"):
        await bus.create_batch("payments", [BatchCommand("Debit", delay=60)], expires_in=timedelta(seconds=30))
    with pytest.raises(InvalidCommandError, match="cannot have a time of its own"):
        await bus.create_batch("payments", [BatchCommand("Debit")], on_complete=BatchCommand("Done", delay=60))


async def test_rules_say_what_an_exception_means(bus: CommandBus, given: Given, database: Database) -> None:
    """Also of a member of a group, and instead of the policy that has them"""
    rules: Any = {ValueError: "permanent", KeyError: "failed", OSError: RetryPolicy(5, (500,))}
    retry = RetryPolicy(1, rules=rules)
    group = ExceptionGroup("two", [OSError("slow"), ValueError("bad")])
    errors = {"Bad": ValueError("bad"), "Gone": KeyError("x"), "Slow": TimeoutError("slow"), "Both": group}
    for command_type, error in errors.items():
        bus.handler("payments", command_type, retry=retry)(raising(error))
    bus.handler("payments", "Other", retry=retry)(raising(RuntimeError("other")))
    sent = {kind: await given.sent(kind) for kind in (*errors, "Other")}
    await given.drained()
    found = {kind: await given.command_now(command_id) for kind, command_id in sent.items()}
    assert {kind: one.status for kind, one in found.items()} == {
        "Bad": "IN_TROUBLESHOOTING_QUEUE",
        "Gone": "FAILED",
        "Slow": "SCHEDULED",
        "Both": "IN_TROUBLESHOOTING_QUEUE",
        "Other": "IN_TROUBLESHOOTING_QUEUE",
    }
    reasons = {item.command_id: item.reason for item in await bus.troubleshooting.list("payments")}
    assert reasons == {sent["Bad"]: "PERMANENT", sent["Both"]: "PERMANENT", sent["Other"]: "EXHAUSTED"}
    wait = database.value("SELECT extract(epoch FROM run_at - now()) FROM busload.scheduled")
    assert 490 < wait <= 500
    assert is_final(ValueError(), retry)
    assert not is_final(OSError(), retry)


async def test_a_rule_for_all_exceptions_says_nothing_of_a_transient_error(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """Neither of a timeout, which counts as one. A rule that names the class itself counts"""

    class BusyError(TransientCommandError):
        pass

    retry = RetryPolicy(2, (500,), rules={Exception: "permanent", BusyError: "failed"})
    errors = {"Transient": TransientCommandError("later"), "Busy": BusyError("busy"), "Other": KeyError("x")}
    for command_type, error in errors.items():
        bus.handler("payments", command_type, retry=retry)(raising(error))
    sent = {kind: await given.sent(kind) for kind in errors}
    await given.drained()
    found = {kind: (await given.command_now(command_id)).status for kind, command_id in sent.items()}
    assert found == {"Transient": "SCHEDULED", "Busy": "FAILED", "Other": "IN_TROUBLESHOOTING_QUEUE"}
