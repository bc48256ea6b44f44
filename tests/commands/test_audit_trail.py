"""What happened to a command, in the order in which it happened."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from uuid import uuid4

import pytest

from busload import BatchCommand, Command, CommandBus, HandlerContext, PermanentCommandError, TransientCommandError
from tests.given import DOMAIN, Given, eventually

pytestmark = pytest.mark.usefixtures("invariants")


async def test_the_trail_of_a_long_life_is_in_order_with_the_batch_on_every_event(
    bus: CommandBus, given: Given
) -> None:
    """Sent, retried, parked, retried by an operator, completed"""
    script = [TransientCommandError("busy"), PermanentCommandError("closed", code="CLOSED"), None]

    async def run(command: Command, ctx: HandlerContext) -> str:
        if error := script.pop(0):
            raise error
        return "done"

    given.handler("Debit", run)
    batch_id = await given.batch()
    await given.drained(name="w1")
    given.make_due()
    await given.drained(name="w2")
    [item] = await bus.troubleshooting.list(DOMAIN)
    await bus.troubleshooting.retry(DOMAIN, item.command_id, operator="ada")
    await given.drained(name="w3")

    trail = await bus.get_audit_trail(DOMAIN, item.command_id)

    assert [(event.type, event.attempt, event.worker, event.operator) for event in trail] == [
        ("SENT", None, None, None),
        ("RECEIVED", 1, "w1", None),
        ("FAILED_ATTEMPT", 1, "w1", None),
        ("RECEIVED", 2, "w2", None),
        ("MOVED_TO_TROUBLESHOOTING", 2, "w2", None),
        ("OPERATOR_RETRIED", 2, None, "ada"),
        ("RECEIVED", 3, "w3", None),
        ("COMPLETED", 3, "w3", None),
    ]
    assert {event.batch_id for event in trail} == {batch_id}
    assert [event.at for event in trail] == sorted(event.at for event in trail)
    assert trail[2].details["message"] == "busy"
    assert (trail[4].details["code"], trail[7].details) == ("CLOSED", "done")
    executions = [event.execution_id for event in trail]
    assert executions[1] == executions[2]
    assert executions[3] == executions[4]
    assert len(set(executions) - {None}) == 3


async def test_a_running_command_shows_that_it_was_received(bus: CommandBus, given: Given) -> None:
    """Attempts count from the claim on"""
    batch_id = await given.batch(commands=2)
    [running, waiting] = await bus.list_batch_commands(DOMAIN, batch_id)
    [leased] = given.claimed(1)
    trail = await bus.get_audit_trail(DOMAIN, running.command_id)
    assert [(event.type, event.execution_id) for event in trail] == [("SENT", None), ("RECEIVED", leased.execution_id)]
    now = await given.command_now(running.command_id)
    assert (now.status, now.attempts, now.execution_id) == ("IN_PROGRESS", 1, leased.execution_id)
    assert [event.type for event in await bus.get_audit_trail(DOMAIN, waiting.command_id)] == ["SENT"]


async def test_a_lost_lease_is_in_the_trail_and_burns_no_attempt(bus: CommandBus, given: Given) -> None:
    command_id = await given.sent()
    worker = given.registered_worker()
    given.claimed(by=worker)
    given.died(worker)
    given.rescued()
    trail = await bus.get_audit_trail(DOMAIN, command_id)
    assert [event.type for event in trail] == ["SENT", "RECEIVED", "LEASE_LOST"]
    assert trail[1].execution_id == trail[2].execution_id
    assert (await given.command_now(command_id)).attempts == 0
    given.handler()
    await given.drained()
    assert [e.type for e in await bus.get_audit_trail(DOMAIN, command_id)][3:] == ["RECEIVED", "COMPLETED"]


async def test_the_trail_of_a_batch_has_its_own_events_only(bus: CommandBus, given: Given) -> None:
    given.handler()
    async with bus.open_batch(DOMAIN) as batch:
        await batch.add("Debit")
        await batch.checkpoint()
        await given.drained(name="w1")
    trail = await bus.get_batch_audit_trail(DOMAIN, batch.batch_id)
    assert [event.type for event in trail] == ["BATCH_STARTED", "BATCH_SEALED", "BATCH_COMPLETED"]
    assert {event.batch_id for event in trail} == {batch.batch_id}
    assert [event.at for event in trail] == sorted(event.at for event in trail)
    assert trail[0].worker == "w1"


async def test_a_trail_is_append_only(bus: CommandBus, given: Given) -> None:
    """What was told once is told again, with more after it.

    The time of RECEIVED is that of the claim while the attempt runs, and then that of its begin.
    """
    done = asyncio.Event()

    async def run(command: Command, ctx: HandlerContext) -> None:
        await done.wait()

    given.handler("Debit", run)
    [sent] = await bus.send_many(DOMAIN, [BatchCommand("Debit", uuid4())])
    before = await bus.get_audit_trail(DOMAIN, sent.command_id)
    async with given.running():
        await eventually(lambda: given.database.count("lease") == 1)
        during = await bus.get_audit_trail(DOMAIN, sent.command_id)
        done.set()
    after = await bus.get_audit_trail(DOMAIN, sent.command_id)
    assert [event.type for event in after] == ["SENT", "RECEIVED", "COMPLETED"]
    began = after[1].at
    assert before == after[:1] and began >= during[1].at
    assert [replace(event, at=began) for event in during[1:]] == after[1:2]
