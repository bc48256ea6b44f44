"""A life of commands in which nearly every statement of ours runs: for tests of what may surround them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import psycopg

from busload import (
    BatchCommand,
    Chunk,
    ChunkContext,
    Command,
    CommandBus,
    Dedup,
    Group,
    HandlerContext,
    PermanentCommandError,
    RateLimit,
    Stage,
    TaskTracker,
    TransientCommandError,
    Worker,
    WorkerSettings,
)
from busload.commands.retry import RetryPolicy
from busload.jobs import FinishedStage

MANY = 1500
"""So many that they are copied in."""


async def live(dsn: str, *, settings: WorkerSettings) -> None:
    """Send, run, retry, park, decide, cancel, prune: by the bus, on a connection of the caller's, and by a worker."""
    async with CommandBus(dsn) as bus:
        _register(bus)
        await _send(bus, dsn)
        await _run(bus, settings)
        await _operate(bus)
        await _look(bus)
        await _end(bus)
    async with CommandBus(dsn, transport=dsn) as bus:
        _register(bus)
        batch_id = await bus.create_batch(
            "shop", [BatchCommand("Ok", data={"n": n}) for n in range(3)], name="published"
        )
        await bus.send("shop", "Ok", run_at=datetime.now(UTC) - timedelta(hours=1))
        await Worker(bus, settings=settings).drain()
        assert await bus.recover(publish_again_after=timedelta(minutes=1)) is not None
        assert await bus.outbox.list() == []
        published = await bus.get_batch("shop", batch_id)
        assert published is not None and published.completed_count == 3


def _register(bus: CommandBus) -> None:
    @bus.handler("shop", "Ok")
    async def ok(command: Command, ctx: HandlerContext) -> dict[str, object]:
        return {"ä\\": ctx.attempt}

    @bus.handler("shop", "Second", retry=RetryPolicy(max_attempts=3, backoff=()))
    async def second(command: Command, ctx: HandlerContext) -> None:
        if ctx.attempt == 1:
            raise TransientCommandError("It may work \\ later: 'ä'.", code="LATER")

    @bus.handler("shop", "Park")
    async def park(command: Command, ctx: HandlerContext) -> None:
        raise PermanentCommandError("A person must look.", details={"n": [1.5, None]})

    @bus.handler("shop", "Within")
    async def within(command: Command, ctx: HandlerContext) -> None:
        async with ctx.transaction() as conn:
            await bus.send("shop", "Ok", {"from": "within"}, conn=conn)

    @bus.handler("shop", "Limited", rate_limit=RateLimit(1000, name="calls"))
    async def limited(command: Command, ctx: HandlerContext) -> None:
        return None

    @bus.bulk_handler("shop", "Bulk", size=10, max_wait=0.01)
    async def bulk(chunk: Chunk, ctx: ChunkContext) -> None:
        return None

    @bus.planner("shop", "second")
    async def plan(finished: FinishedStage, ctx: HandlerContext) -> list[BatchCommand]:
        return [BatchCommand("Ok", data=found.data) async for found in finished.results()]

    events = bus.buffer("events", size=2, archive=True)

    @events.handler()
    async def together(group: Group, ctx: HandlerContext) -> None:
        if any(item.data.get("bad") for item in group):
            raise PermanentCommandError("bad")


async def _send(bus: CommandBus, dsn: str) -> None:
    await bus.send("shop", "Ok", {"text": "ä \\ '%s' {NULL}"}, task_key="order:1", dedup=Dedup(on_conflict="skip"))
    again = await bus.send("shop", "Ok", task_key="order:1", dedup=Dedup(on_conflict="skip"))
    assert not again.created
    await bus.send("shop", "Ok", reply_to="replies")
    await bus.send("shop", "Ok", run_at=datetime.now(UTC) + timedelta(days=1), priority=3)
    await bus.send("shop", "Second", task_key="second:1")
    for kind in ("Park", "Park", "Park", "Within", "Limited", "Bulk"):
        await bus.send("shop", kind, {"kind": kind})
    some = [
        BatchCommand("Ok", data={"n": n}, task_key=f"k{n}" if n % 2 else None, max_attempts=n % 3 or None)
        for n in range(6)
    ]
    await bus.create_batch("shop", some, name="some", custom_data={"a": ["\\", None]}, on_complete=BatchCommand("Ok"))
    many = [BatchCommand("Ok", data={"n": n}, reply_to="replies" if n == 5 else None) for n in range(MANY)]
    await bus.create_batch("shop", many, name="many")
    async with bus.open_batch("shop", name="opened") as batch:
        await batch.add("Ok", {"n": 1})
        await batch.checkpoint()
        await bus.send("shop", "Ok", batch_id=batch.batch_id)
    await bus.jobs.create("shop", [Stage("first", [BatchCommand("Ok", data=1)]), Stage("second")], name="job")
    await bus.buffer("events", size=2, archive=True).add_many([{"n": 1}, {"n": 2}, {"n": 3, "bad": True}])
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        sent = await bus.send("shop", "Ok", {"n": 1}, conn=conn)
        await bus.send_many("shop", [BatchCommand("Ok", data={"n": n}) for n in range(3)], conn=conn)
        await bus.create_batch(
            "shop", [BatchCommand("Ok", data={"n": n}) for n in range(MANY)], name="theirs", conn=conn
        )
    assert (await bus.get_command("shop", sent.command_id)) is not None


async def _run(bus: CommandBus, settings: WorkerSettings) -> None:
    await bus.buffer("events", size=2, archive=True).flush()
    await Worker(bus, settings=settings).drain()
    [failed, second] = await bus.trace("second:1")
    assert (failed.status, second.status) == ("failed", "completed")


async def _operate(bus: CommandBus) -> None:
    parked = await bus.troubleshooting.list("shop")
    assert len(parked) == 3
    [cause] = await bus.troubleshooting.groups("shop")
    assert cause.count == 3
    first, second, third = (one.command_id for one in parked)
    await bus.troubleshooting.retry("shop", first, operator="ann")
    await bus.troubleshooting.complete("shop", second, operator="ann")
    await bus.troubleshooting.cancel("shop", third, reason="no", operator="ann")
    for one in await bus.troubleshooting.list("events"):
        await bus.troubleshooting.complete("events", one.command_id, operator="ann")
    canceled = await bus.create_batch("shop", [BatchCommand("Ok"), BatchCommand("Ok")], name="canceled")
    await bus.cancel_batch("shop", canceled, reason="no")
    assert await bus.domains.pause("shop", reason="stop") and await bus.domains.resume("shop")


async def _look(bus: CommandBus) -> None:
    batches = {batch.name: batch for batch in await bus.list_batches("shop")}
    assert {"some", "many", "theirs", "opened", "canceled"} <= set(batches)
    assert batches["some"].custom_data == {"a": ["\\", None]}
    for name, count in (("some", 6), ("many", MANY), ("theirs", MANY), ("opened", 2)):
        assert (batches[name].completed_count, batches[name].status) == (count, "COMPLETED")
        assert (await bus.explain_batch("shop", batches[name].batch_id)) is not None
    commands = await bus.list_batch_commands("shop", batches["some"].batch_id)
    assert {command.status for command in commands} == {"COMPLETED"}
    assert await bus.get_audit_trail("shop", commands[0].command_id)
    assert await bus.get_batch_audit_trail("shop", batches["some"].batch_id)
    assert (await bus.explain_command("shop", commands[0].command_id)) is not None
    [once] = await bus.trace("order:1")
    assert once.status == "completed"
    [job] = await bus.jobs.list("shop")
    assert job.status == "COMPLETED"
    assert [limit.name for limit in await bus.limits.list()] == ["calls"]
    assert await bus.limits.reset("calls") == 1
    assert [buffer.name for buffer in await bus.buffers.list()] == ["events"]
    async with TaskTracker(bus) as tracker:
        task_id = tracker.task_id("partner", "1")
        queued = await tracker.enqueue(task_id, queue="partner")
        assert queued is not None and queued.execution_id is not None
        execution = await tracker.claim(task_id, queued.execution_id)
        assert execution is not None
        await tracker.complete(execution, {"lines": 1})
        assert [one.status for one in await tracker.history(task_id)] == ["completed"]


async def _end(bus: CommandBus) -> None:
    counted = await bus.prune(timedelta(microseconds=1), dry_run=True)
    assert counted.commands > MANY
    pruned = await bus.prune(timedelta(microseconds=1), archive=True)
    assert pruned.commands >= counted.commands
