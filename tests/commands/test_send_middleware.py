"""Middleware around calls that send."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any

import pytest

from busload import (
    BatchCommand,
    BatchJob,
    BusinessRuleError,
    Command,
    CommandBus,
    HandlerContext,
    InvalidCommandError,
    Stage,
    SyncCommandBus,
)
from busload.commands.send_middleware import SendCall
from busload.jobs import FinishedStage
from busload.schedules import DueTime
from tests.given import Database, Given, raising


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


def tenant(call: SendCall) -> Iterator[None]:
    call.headers.setdefault("tenant", "acme")
    yield


async def test_every_command_of_a_job_has_the_headers(bus: CommandBus, given: Given, database: Database) -> None:
    """Those of later and planned stages, of callbacks and of compensations too, whoever takes the job on"""
    seen: list[Any] = []

    @bus.send_middleware
    def add_tenant(call: SendCall) -> Iterator[None]:
        yield from tenant(call)
        seen.append((call.call, call.domain, call.result))

    @bus.planner("payments", "plan")
    async def plan(ended: FinishedStage, ctx: HandlerContext) -> list[BatchCommand]:
        return [BatchCommand("Planned")]

    for name in ("Debit", "Planned", "Undo", "Done"):
        given.handler(name)
    given.handler("No", raising(BusinessRuleError("no")))
    first = Stage("first", [BatchCommand("Debit", headers={"own": "1"})], compensate=BatchCommand("Undo"))
    last = Stage("last", [BatchCommand("No")])
    job_id = await bus.jobs.create("payments", [first, Stage("plan"), last])
    done = BatchCommand("Done")
    batch_id = await bus.jobs.create_batch("payments", [BatchJob([first], on_complete=done)], on_complete=done)
    stopped = await bus.jobs.create("payments", [first, Stage("unplanned")])
    resumed = await bus.jobs.create("payments", [last, Stage("later", [BatchCommand("Debit", headers={"own": "1"})])])
    await given.drained(domains=["payments"])
    await bus.jobs.cancel("payments", stopped, reason="late")
    await bus.jobs.resume("payments", resumed)
    await given.drained(domains=["payments"])
    rows = database.rows(
        "SELECT c.command_type, coalesce(c.headers ->> 'tenant', b.headers ->> 'tenant'), c.headers ->> 'own'"
        "  FROM busload.command AS c LEFT JOIN busload.batch AS b USING (batch_id)"
        " WHERE c.command_type NOT LIKE 'busload.%%' ORDER BY 1"
    )
    assert rows == [
        *([("Debit", "acme", "1")] * 4),
        *([("Done", "acme", None)] * 2),
        *([("No", "acme", None)] * 2),
        ("Planned", "acme", None),
        *([("Undo", "acme", None)] * 2),
    ]
    assert seen == [
        ("jobs.create", "payments", job_id),
        ("jobs.create_batch", "payments", batch_id),
        ("jobs.create", "payments", stopped),
        ("jobs.create", "payments", resumed),
        ("planner", "payments", "IN_PROGRESS"),
    ]


async def test_every_command_of_a_schedule_has_the_headers(bus: CommandBus, given: Given, database: Database) -> None:
    """By a due time and by a trigger, and so has every command of a planner"""
    seen: list[Any] = []

    @bus.send_middleware
    def add_tenant(call: SendCall) -> Iterator[None]:
        yield from tenant(call)
        seen.append((call.call, call.command_type, call.result is not None))

    async def plan(due: DueTime, ctx: HandlerContext) -> list[BatchCommand]:
        return [BatchCommand("Planned")]

    for name in ("Debit", "Planned"):
        given.handler(name)
    hourly: Any = {"every": timedelta(hours=1), "domain": "payments"}
    bus.schedule("billing", **hourly, command=BatchCommand("Debit", headers={"own": "1"}))
    bus.schedule("planned", **hourly, planner=plan)
    await bus.schedules.sync()
    database.rows("UPDATE busload.schedule SET next_due_at = now() - interval '3 s'")
    await given.drained(domains=["payments"])
    await bus.schedules.trigger("billing")
    assert database.rows(
        "SELECT c.command_type, coalesce(c.headers ->> 'tenant', b.headers ->> 'tenant'), c.headers ->> 'own',"
        "       coalesce(c.headers, b.headers) ->> 'busload-schedule'"
        "  FROM busload.command AS c LEFT JOIN busload.batch AS b USING (batch_id) ORDER BY 1"
    ) == [
        *([("Debit", "acme", "1", "billing")] * 2),
        ("Planned", "acme", None, "planned"),
        ("busload.Schedule.planned", "acme", None, "planned"),
    ]
    assert sorted(seen) == [
        ("planner", None, True),
        ("schedule", "Debit", True),
        ("schedule", "busload.Schedule.planned", True),
        ("schedules.trigger", "Debit", True),
    ]


async def test_a_schedule_that_middleware_refuses_stays_due_and_others_are_fired(
    bus: CommandBus, given: Given, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    refuses = True

    @bus.send_middleware
    def refuse_debits(call: SendCall) -> Iterator[None]:
        if refuses and call.command_type == "Debit":
            raise PermissionError("not now")
        yield
        raise LookupError("too late")

    given.handler("Debit")
    given.handler("Other")
    for name in ("Debit", "Other"):
        bus.schedule(name, every=timedelta(hours=1), domain="payments", command=BatchCommand(name))
    await bus.schedules.sync()
    database.rows("UPDATE busload.schedule SET next_due_at = now() - interval '3 s'")
    await given.drained(domains=["payments"])
    assert database.rows("SELECT command_type FROM busload.command") == [("Other",)]
    assert (
        "The schedule Debit stays due: a middleware around sends has raised PermissionError('not now')" in caplog.text
    )
    assert "A middleware around sends failed after schedules were fired" in caplog.text
    refuses = False
    await given.drained(domains=["payments"])
    assert database.rows("SELECT command_type FROM busload.command ORDER BY 1") == [("Debit",), ("Other",)]


async def test_headers_of_middleware_are_checked_for_jobs_and_triggers_too(
    bus: CommandBus, given: Given, database: Database
) -> None:
    @bus.send_middleware
    def wrong(call: SendCall) -> Iterator[None]:
        call.headers["tenant"] = 7  # type: ignore[assignment]
        yield

    bus.schedule("billing", every=timedelta(hours=1), domain="payments", command=BatchCommand("Debit"))
    await bus.schedules.sync()
    stages = [Stage("first", [BatchCommand("Debit")])]
    with pytest.raises(InvalidCommandError, match="/headers"):
        await bus.jobs.create("payments", stages)
    with pytest.raises(InvalidCommandError, match="/headers"):
        await bus.jobs.create_batch("payments", [BatchJob(stages)])
    with pytest.raises(InvalidCommandError, match="/headers"):
        await bus.schedules.trigger("billing")
    assert database.count("command") == 0


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


async def test_headers_that_are_no_mapping_are_refused_beside_middleware(bus: CommandBus, database: Database) -> None:
    """The command would have had the headers of the middleware, and the caller's would have been lost."""

    @bus.send_middleware
    def add_tenant(call: SendCall) -> Iterator[None]:
        call.headers["tenant"] = "acme"
        yield

    for wrong in ("x", [("tenant", "acme")], 0):
        options: Any = {"headers": wrong}
        with pytest.raises(InvalidCommandError, match="a dict of texts"):
            await bus.send("payments", "Debit", **options)
        with pytest.raises(InvalidCommandError, match="a dict of texts"):
            await bus.create_batch("payments", [BatchCommand("Debit")], **options)
        with pytest.raises(InvalidCommandError, match="a dict of texts"):
            bus.open_batch("payments", **options)
    assert database.count("command") == 0


def test_the_sync_face_has_it_too(sync_bus: SyncCommandBus, database: Database) -> None:
    @sync_bus.send_middleware
    def add_tenant(call: SendCall) -> Iterator[None]:
        call.headers["tenant"] = "acme"
        yield

    sync_bus.send("payments", "Debit")
    sync_bus.send_many("payments", [BatchCommand("Debit")])
    sync_bus.create_batch("payments", [BatchCommand("Debit")])
    sync_bus.jobs.create("payments", [Stage("first", [BatchCommand("Debit")])])
    sync_bus.jobs.create_batch("payments", [BatchJob([Stage("first", [BatchCommand("Debit")])])])
    assert headers_now(database) == [{"tenant": "acme"}] * 5


def test_it_is_written_with_def(bus: CommandBus) -> None:
    async def awaits(call: SendCall) -> AsyncIterator[None]:
        yield

    with pytest.raises(ValueError, match=r"written with def, found async def .*awaits"):
        bus.send_middleware(awaits)
    with pytest.raises(ValueError, match="one argument"):

        @bus.send_middleware
        def none() -> Iterator[None]:
            yield
