"""Workers as others see them: which there are, what they hold, and that one stops when it is asked to."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import pytest

from busload import CommandBus, HandlerContext, Worker
from busload.commands import rescue
from busload.commands.command import Command
from busload.errors import InvalidCommandError, InvalidOperationError
from tests.given import DOMAIN, Database, Given, eventually

LEASE = timedelta(seconds=30)


async def test_a_worker_says_who_it_is_and_what_it_runs(given: Given, bus: CommandBus) -> None:
    running, go = asyncio.Event(), asyncio.Event()

    async def wait(command: Command, ctx: HandlerContext) -> None:
        running.set()
        await go.wait()

    given.handler("Debit", wait)
    batch_id = await given.batch(2)
    async with given.running(concurrency=3) as worker:
        await running.wait()
        [seen] = await bus.workers.list(DOMAIN)
        assert (seen.name, seen.state, seen.version) == (worker.name, "ALIVE", version("busload"))
        assert (seen.concurrency, seen.commands) == (3, 2)
        held = await bus.workers.running(seen.worker)
        assert [one.batch_id for one in held] == [batch_id] * 2
        assert await bus.workers.running(seen.worker, limit=1) == held[:1]
        assert await bus.workers.get(seen.worker) is not None
        assert await bus.workers.list("crm") == []
        go.set()
    assert await bus.workers.list() == []
    [stopped] = await bus.workers.list(stopped_too=True)
    assert stopped.state == "STOPPED"
    assert await bus.workers.list(stopped_too=True, after=stopped.worker) == []


async def test_what_is_settled_or_given_back_is_not_held(given: Given, bus: CommandBus) -> None:
    await given.batch(3)
    leased = given.claimed(3)
    [seen] = await bus.workers.list()
    given.settled(leased[:1])
    held = await bus.workers.running(seen.worker)
    assert [one.command_id for one in held] == [one.command_id for one in leased[1:]]


async def test_a_worker_that_is_asked_to_stop_lets_what_runs_finish_and_stops(
    given: Given, bus: CommandBus, database: Database
) -> None:
    running, go = asyncio.Event(), asyncio.Event()

    async def wait(command: Command, ctx: HandlerContext) -> None:
        running.set()
        await go.wait()

    given.handler("Debit", wait)
    await given.batch(3)
    worker = given.worker(concurrency=1)
    task = asyncio.create_task(worker.run())
    await running.wait()
    assert await bus.workers.stop(worker.name, reason="the machine is replaced", operator="ada") == 1
    [seen] = await bus.workers.list()
    assert (seen.state, seen.stop_requested_by) == ("STOPPING", "ada")
    await eventually(lambda: worker.asked_to_stop)
    go.set()
    await asyncio.wait_for(task, 60)
    assert database.value("SELECT count(*) FROM busload.execution") == 1  # the others were handed back
    [(operator, details)] = database.rows(
        "SELECT operator, details FROM busload.event WHERE type = 'WORKER_ASKED_TO_STOP'"
    )
    assert (operator, details) == ("ada", {"worker": worker.name, "reason": "the machine is replaced"})


async def test_a_heartbeat_tells_a_worker_that_heard_nothing(given: Given, database: Database) -> None:
    asked, other = given.registered_worker(), given.registered_worker()
    database.rows("UPDATE busload.worker SET stop_requested_at = now() WHERE worker = %s", asked)
    found = [database.perform(rescue.renew(worker=one, settled=LEASE)).asked_to_stop for one in (asked, other)]
    assert found == [True, False]


async def test_a_request_outlives_the_number_of_a_worker(database: Database, given: Given) -> None:
    asked, other = given.registered_worker(), given.registered_worker()
    database.rows(
        "UPDATE busload.worker SET stop_requested_at = now(), stop_requested_by = 'ada' WHERE worker = %s", asked
    )
    for dead, expected in ((asked, True), (other, False)):
        plan = rescue.come_back(dead=[dead], leases=[], name="given", domains=[DOMAIN], concurrency=1, lease_for=LEASE)
        number, _ = database.perform(plan)
        assert database.perform(rescue.renew(worker=number, settled=LEASE)).asked_to_stop is expected


async def test_a_stop_reaches_all_of_a_name_or_one_number(given: Given, bus: CommandBus, database: Database) -> None:
    first, second = given.registered_worker(), given.registered_worker()
    assert await bus.workers.stop(first) == 1
    assert await bus.workers.stop("given") == 1  # the first one was asked before
    assert await bus.workers.stop("given") == 0
    assert database.rows("SELECT worker FROM busload.worker WHERE stop_requested_at IS NOT NULL ORDER BY 1") == [
        (first,),
        (second,),
    ]
    assert database.count("event") == 0  # nobody was named


@pytest.mark.parametrize("name", ["nobody", 99, "gone", "tracker"])
async def test_only_a_worker_that_runs_can_be_asked(bus: CommandBus, database: Database, name: str | int) -> None:
    about: dict[str, Any] = {"domains": [DOMAIN], "lease_for": LEASE}
    database.perform(rescue.retire(worker=database.perform(rescue.register(name="gone", concurrency=1, **about))))
    database.perform(rescue.register(name="tracker", concurrency=0, **about))
    with pytest.raises(InvalidOperationError, match="busload worker ls"):
        await bus.workers.stop(name, operator="ada")
    assert database.count("event") == 0


async def test_wrong_input_is_refused(bus: CommandBus) -> None:
    with pytest.raises(ValueError, match="number of a worker"):
        await bus.workers.stop(-1)
    with pytest.raises(InvalidCommandError, match="reason"):
        await bus.workers.stop("w", reason="a\0b")
    assert await bus.workers.get(2**70) is None
    assert await bus.workers.running(0) == []


async def test_a_worker_runs_again_after_it_was_asked_to_stop(given: Given, bus: CommandBus) -> None:
    worker: Worker = given.worker()
    task = asyncio.create_task(worker.run())
    await eventually(lambda: worker.stats is not None and worker._run is not None and worker._run.started)
    await bus.workers.stop(worker.name)
    await asyncio.wait_for(task, 60)
    given.handler("Debit")
    await given.batch(2)
    assert await worker.drain() == 2
    assert not worker.asked_to_stop
