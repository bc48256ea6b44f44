"""What a worker opens for its handlers, the hooks around it, and the calls after failures."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from busload import (
    BatchCommand,
    BusinessRuleError,
    Chunk,
    ChunkContext,
    Command,
    CommandBus,
    HandlerContext,
    PermanentCommandError,
    RetryPolicy,
    SyncCommandBus,
    SyncHandlerContext,
    Worker,
    WorkerSettings,
)
from busload.commands import claim, rescue
from busload.errors import InvalidOperationError
from busload.handlers.hooks import CommandFailure
from tests.given import Database, Given, eventually, raising


async def test_handlers_find_what_the_lifespan_has_opened(bus: CommandBus, given: Given) -> None:
    """It is opened before the first claim, and closed when everything is settled, in the task that opened it"""
    seen: list[Any] = []

    @bus.lifespan
    async def resources() -> AsyncIterator[dict[str, str]]:
        opened_by = asyncio.current_task()
        seen.append("opened")
        async with asyncio.timeout(60):
            yield {"greeting": "hello"}
        assert asyncio.current_task() is opened_by
        seen.append(("closed", (await given.command_now(command_id)).status))

    @bus.on_startup
    async def start() -> None:
        seen.append("started")

    @bus.on_shutdown
    def stop() -> None:
        seen.append("stopped")

    @bus.handler("payments", "Debit")
    async def debit(command: Command, ctx: HandlerContext) -> None:
        seen.append(("async", ctx.state["greeting"]))

    @bus.handler("payments", "Thread")
    def in_thread(command: Command, ctx: SyncHandlerContext) -> None:
        seen.append(("thread", ctx.state["greeting"]))

    @bus.bulk_handler("payments", "Bulk", max_wait=0)
    async def bulk(chunk: Chunk, ctx: ChunkContext) -> None:
        seen.append(("bulk", ctx.state["greeting"]))

    command_id = await given.sent()
    await given.sent("Thread")
    await given.sent("Bulk")
    await given.drained()
    assert seen[:2] == ["opened", "started"]
    assert sorted(seen[2:5]) == [("async", "hello"), ("bulk", "hello"), ("thread", "hello")]
    assert seen[5:] == ["stopped", ("closed", "COMPLETED")]
    async with given.running():
        await eventually(lambda: seen[-1] == "started")
    assert seen[-2:] == ["stopped", ("closed", "COMPLETED")]


async def test_the_lifespan_of_a_worker_goes_before_that_of_its_bus(bus: CommandBus, given: Given) -> None:
    seen: list[Any] = []

    @bus.lifespan
    async def of_bus() -> AsyncIterator[str]:
        yield "bus"

    def of_worker() -> Iterator[str]:
        yield "worker"

    @bus.handler("payments", "Debit")
    async def debit(command: Command, ctx: HandlerContext) -> None:
        seen.append(ctx.state)

    await given.sent()
    await given.drained(lifespan=of_worker)
    await given.sent()
    await given.drained()
    assert seen == ["worker", "bus"]
    with pytest.raises(InvalidOperationError, match=r"has a lifespan already, .*of_bus"):
        bus.lifespan(of_worker)
    wrong: Any = len
    with pytest.raises(ValueError, match="a function with one `yield`"):
        Worker(bus, lifespan=wrong)


async def test_without_a_lifespan_there_is_no_state(bus: CommandBus, given: Given) -> None:
    @bus.handler("payments", "Debit", retry=RetryPolicy(1))
    async def debit(command: Command, ctx: HandlerContext) -> None:
        ctx.state.get("x")

    command_id = await given.sent()
    await given.drained()
    assert "No lifespan was opened for this handler" in str((await given.command_now(command_id)).last_error_message)


@pytest.mark.parametrize("what", ["lifespan", "hook"])
async def test_an_error_while_opening_stops_the_worker(bus: CommandBus, given: Given, what: str) -> None:
    """Nothing is claimed, and what was opened before is closed"""
    seen: list[str] = []

    @bus.lifespan
    async def resources() -> AsyncIterator[None]:
        if what == "lifespan":
            raise ConnectionError("no cache there")
        try:
            yield
        finally:
            seen.append("closed")

    @bus.on_startup
    def warm_up() -> None:
        raise ConnectionError("no cache there")

    given.handler()
    command_id = await given.sent()
    named = "lifespan .*resources could not be opened" if what == "lifespan" else "start-up hook .*warm_up failed"
    with pytest.raises(
        InvalidOperationError, match=f"The {named}: ConnectionError: no cache there. The worker has not"
    ):
        await given.drained()
    with pytest.raises(InvalidOperationError, match=named):
        async with given.worker():
            pytest.fail("it has not started")
    assert seen == ([] if what == "lifespan" else ["closed", "closed"])
    assert (await given.command_now(command_id)).status == "PENDING"


async def test_an_error_while_closing_is_logged(
    bus: CommandBus, given: Given, caplog: pytest.LogCaptureFixture
) -> None:
    @bus.lifespan
    async def resources() -> AsyncIterator[None]:
        yield
        raise ConnectionError("gone")

    @bus.on_shutdown
    async def say_goodbye() -> None:
        raise ValueError("speechless")

    given.handler()
    await given.sent()
    assert await given.drained() == 1
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(said) == 2
    assert re.search("shut-down hook .*say_goodbye failed", said[0])
    assert said[1] == "The lifespan of the worker could not be closed"


async def test_on_failure_is_called_for_what_will_not_be_tried_again(bus: CommandBus, given: Given) -> None:
    """After it was written; of its handler, and of the bus"""
    seen: list[tuple[str, CommandFailure]] = []

    @bus.on_failure
    async def of_bus(failure: CommandFailure) -> None:
        command = await given.command_now(failure.command_id)
        assert command.status == failure.status
        seen.append(("bus", failure))

    def of_handler(failure: CommandFailure) -> None:
        seen.append(("handler", failure))

    once = RetryPolicy(1)
    bus.handler("payments", "Rule", on_failure=of_handler)(raising(BusinessRuleError("no", code="NO")))
    bus.handler("payments", "Permanent")(raising(PermanentCommandError("look")))
    bus.handler("payments", "Exhausted", retry=once)(raising(OSError("down")))
    bus.handler("payments", "Again")(raising(OSError("down")))
    bus.handler("payments", "Fine")(lambda command, ctx: None)

    @bus.bulk_handler("payments", "Bulk", max_wait=0)
    async def bulk(chunk: Chunk, ctx: ChunkContext) -> None:
        raise BusinessRuleError("no")

    kinds = ("Rule", "Permanent", "Exhausted", "Again", "Fine", "Bulk")
    sent = {kind: await given.sent(kind, {"n": 1}, headers={"tenant": "acme"}) for kind in kinds}
    await given.drained()
    found = {(who, failure.command_type): failure for who, failure in seen}
    assert set(found) == {("bus", kind) for kind in ("Rule", "Permanent", "Exhausted", "Bulk")} | {("handler", "Rule")}
    assert found["handler", "Rule"] == CommandFailure(
        domain="payments",
        command_type="Rule",
        command_id=sent["Rule"],
        data={"n": 1},
        batch_id=None,
        task_key=None,
        headers={"tenant": "acme"},
        attempt=1,
        status="FAILED",
        reason=None,
        error_type="BusinessRuleError",
        error_code="NO",
        error_message="no",
    )
    assert (found["bus", "Exhausted"].status, found["bus", "Exhausted"].reason) == (
        "IN_TROUBLESHOOTING_QUEUE",
        "EXHAUSTED",
    )


async def test_on_failure_is_called_once_for_a_command_that_has_taken_down_its_workers(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """By the worker that finds the last of them dead; nobody is called as long as the command will run again"""
    seen: list[CommandFailure] = []
    bus.on_failure(seen.append)
    bus.handler("payments", "Debit", on_failure=seen.append)(lambda command, ctx: None)
    batch_id = await bus.create_batch(
        "payments", [BatchCommand("Debit", data={"n": 1}, task_key="k")], headers={"tenant": "acme"}
    )
    for crash in range(3):
        worker = given.registered_worker()
        assert len(given.claimed(by=worker)) == 1
        given.died(worker)
        assert not seen
        if crash < 2:
            given.rescued()
    await given.drained()
    await given.drained()
    [of_handler, of_bus] = seen
    assert (
        of_handler
        == of_bus
        == CommandFailure(
            domain="payments",
            command_type="Debit",
            command_id=of_bus.command_id,
            data={"n": 1},
            batch_id=batch_id,
            task_key="k",
            headers={"tenant": "acme"},
            attempt=1,
            status="IN_TROUBLESHOOTING_QUEUE",
            reason="CRASHED",
            error_type="WorkerCrashed",
            error_code=None,
            error_message="The worker died 3 times while it ran this command.",
        )
    )
    assert (await given.command_now(of_bus.command_id)).status == of_bus.status


async def test_who_serves_the_domain_decides_that_a_command_has_crashed_too_often(
    bus: CommandBus, given: Given, dsn: str, database: Database
) -> None:
    """A worker of another application leaves it to them, unless none of them is alive"""
    told: list[str] = []
    async with CommandBus(dsn) as other:
        other.on_failure(lambda failure: told.append("other"))
        other.handler("mails", "Send")(lambda command, ctx: None)
        bus.on_failure(lambda failure: told.append("own"))
        for own_is_alive in (True, False):
            command_id = await given.sent()
            for crash in range(3):
                worker = given.registered_worker()
                assert len(given.claimed(by=worker)) == 1
                given.died(worker)
                if crash < 2:
                    given.rescued()
            serving = given.registered_worker()
            if not own_is_alive:
                given.died(serving)
            await Worker(other).drain()
            if own_is_alive:
                assert told == []
                await given.drained()
            assert (await given.command_now(command_id)).status == "IN_TROUBLESHOOTING_QUEUE"
            database.rows("UPDATE busload.worker SET stopped_at = now() WHERE stopped_at IS NULL")
    assert told == ["own", "other"]


async def test_workers_that_leave_a_crash_to_each_other_do_so_for_seconds_only(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """A dead worker with crashing commands of two domains, each of which another worker serves"""
    dead = given.registered_worker()
    for domain in ("payments", "mails"):
        await bus.send(domain, "Debit")
        database.perform(claim.claim(worker=dead, domains=[domain], limit=1, suspects=True))
    database.rows("UPDATE busload.lease SET crashes = 3")
    of_payments, of_mails = given.registered_worker(), given.registered_worker()
    database.rows("UPDATE busload.worker SET domains = '{mails}' WHERE worker = %s", of_mails)
    given.died(dead)

    def rescued() -> list[int]:
        rescues = (
            rescue.rescue(worker=of_payments, domains=["payments"]),
            rescue.rescue(worker=of_mails, domains=["mails"]),
        )
        return [database.perform(each).commands for each in rescues]

    assert rescued() == [0, 0]
    database.rows("UPDATE busload.worker SET seen_at = seen_at - interval '10 s' WHERE worker = %s", dead)
    assert rescued() == [2, 0]


async def test_what_is_canceled_or_has_expired_has_not_failed(
    bus: CommandBus, given: Given, database: Database
) -> None:
    seen: list[CommandFailure] = []
    bus.on_failure(seen.append)
    given.handler("Debit")
    command_ids = [await given.sent(), await given.sent(expires_at=datetime.now(UTC) + timedelta(hours=1))]
    await bus.cancel_command("payments", command_ids[0], reason="no")
    database.rows("UPDATE busload.expiry SET expires_at = now(), look_at = now()")
    await given.drained()
    assert [(await given.command_now(id)).status for id in command_ids] == ["CANCELED", "CANCELED"]
    assert not seen


async def test_errors_of_on_failure_are_logged_and_change_nothing(
    bus: CommandBus, given: Given, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []

    @bus.on_failure
    def broken(failure: CommandFailure) -> None:
        raise ValueError("broken")

    @bus.on_failure
    def fine(failure: CommandFailure) -> None:
        seen.append(failure.command_type)

    bus.handler("payments", "Debit")(raising(BusinessRuleError("no")))
    command_id = await given.sent()
    await given.drained()
    assert (await given.command_now(command_id)).status == "FAILED"
    assert seen == ["Debit"]
    assert f"failed for command {command_id}" in caplog.text


async def test_a_worker_of_a_sync_bus_has_its_hooks(sync_bus: SyncCommandBus, worker_settings: WorkerSettings) -> None:
    seen: list[Any] = []

    @sync_bus.lifespan
    def resources() -> Iterator[str]:
        yield "engine"

    @sync_bus.middleware
    def watch(command: Command, ctx: SyncHandlerContext) -> Iterator[None]:
        seen.append("around")
        yield

    @sync_bus.handler("payments", "Debit")
    def debit(command: Command, ctx: SyncHandlerContext) -> None:
        seen.append(ctx.state)

    await asyncio.to_thread(sync_bus.send, "payments", "Debit")
    await Worker(sync_bus, settings=worker_settings).drain()
    assert seen == ["around", "engine"]


APP = """
import os
from pathlib import Path
from busload import CommandBus

bus = CommandBus()

@bus.lifespan
async def resources():
    Path("opened").joinpath(str(os.getpid())).touch()
    yield {"pid": os.getpid()}
    Path("closed").joinpath(str(os.getpid())).touch()

@bus.handler("payments", "Debit")
async def debit(command, ctx):
    return ctx.state["pid"] == os.getpid()
"""


async def test_every_process_of_a_worker_has_a_lifespan_of_its_own(
    bus: CommandBus, dsn: str, database: Database, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(APP)
    opened, closed = tmp_path / "opened", tmp_path / "closed"
    opened.mkdir()
    closed.mkdir()
    batch_id = await bus.create_batch("payments", [BatchCommand("Debit") for _ in range(20)])
    program = [sys.executable, "-m", "busload.cli", "worker", "shop:bus", "--processes", "2"]
    environment = os.environ | {"BUSLOAD_DATABASE_URL": dsn}
    process = subprocess.Popen(program, cwd=tmp_path, env=environment, stderr=subprocess.PIPE)
    try:
        await eventually(lambda: len(list(opened.iterdir())) == 2)
        await bus.wait_batch("payments", batch_id, timeout=60)
    finally:
        process.terminate()
        said = await asyncio.to_thread(process.communicate)
    assert process.returncode == 0, said
    assert sorted(one.name for one in closed.iterdir()) == sorted(one.name for one in opened.iterdir())
    assert database.rows("SELECT DISTINCT details::text FROM busload.execution") == [("true",)]
