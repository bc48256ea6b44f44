"""Whoever waits for a command gets its result, or hears why there is none."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from uuid import uuid4

import pytest

from busload import BusinessRuleError, Command, CommandBus, HandlerContext, InvalidCommandError, Settings
from busload.commands.command import CommandStatus
from busload.errors import CommandCanceledError, CommandFailedError, CommandNotFoundError
from tests.faces import FACES, bus_of
from tests.given import DOMAIN, Given, raising

pytestmark = pytest.mark.usefixtures("invariants")


@pytest.mark.parametrize("face", FACES)
async def test_the_result_is_what_the_handler_returned(dsn: str, given: Given, face: str) -> None:
    async def paid(command: Command, ctx: HandlerContext) -> object:
        return {"paid": command.data["cents"]}

    given.handler(function=paid)
    async with bus_of(face, dsn) as bus, given.running():
        command_id = (await bus.send(DOMAIN, "Debit", {"cents": 5})).command_id
        assert await bus.wait_command(DOMAIN, command_id, timeout=60) == {"paid": 5}
        assert await bus.wait_command(DOMAIN, command_id, timeout=0) == {"paid": 5}


async def test_a_command_of_a_batch_wakes_its_waiter_by_notification(dsn: str, given: Given) -> None:
    """Long before the next look, which is an hour away"""
    batch_id = await given.batch(2)
    async with CommandBus(dsn, settings=Settings(poll_every=timedelta(hours=1))) as bus:
        first, _ = await bus.list_batch_commands(DOMAIN, batch_id)
        waiting = asyncio.create_task(bus.wait_command(DOMAIN, first.command_id, timeout=3000))
        given.handler()
        async with given.running():
            assert await asyncio.wait_for(waiting, 120) is None


async def test_a_failure_raises_with_the_code_and_message_of_the_error(bus: CommandBus, given: Given) -> None:
    given.handler(function=raising(BusinessRuleError("too little money", code="FUNDS")))
    command_id = await given.sent()
    await given.drained()
    with pytest.raises(CommandFailedError, match="is FAILED: FUNDS: too little money") as failed:
        await bus.wait_command(DOMAIN, command_id)
    error = failed.value
    assert (error.domain, error.command_id, error.status) == (DOMAIN, command_id, CommandStatus.FAILED)
    assert (error.error_type, error.code, error.error_message) == ("BusinessRuleError", "FUNDS", "too little money")
    assert not isinstance(error, CommandCanceledError)


async def test_a_cancel_raises_with_its_reason(bus: CommandBus, given: Given) -> None:
    command_id = await given.sent()
    await bus.cancel_command(DOMAIN, command_id, reason="paid twice")
    with pytest.raises(CommandCanceledError, match="is CANCELED: paid twice") as canceled:
        await bus.wait_command(DOMAIN, command_id)
    assert canceled.value.error_message == "paid twice"


async def test_what_waits_in_troubleshooting_is_waited_for_unless_it_is_said_not_to(
    bus: CommandBus, given: Given
) -> None:
    _, [command_id] = await given.in_troubleshooting()
    with pytest.raises(CommandFailedError, match="is IN_TROUBLESHOOTING_QUEUE: CLOSED: account closed"):
        await bus.wait_command(DOMAIN, command_id, wait_for_operator=False)
    with pytest.raises(TimeoutError, match=r"has not ended after 0 s: it is IN_TROUBLESHOOTING_QUEUE\."):
        await bus.wait_command(DOMAIN, command_id, timeout=0)
    waiting = asyncio.create_task(bus.wait_command(DOMAIN, command_id, timeout=120))
    await bus.troubleshooting.complete(DOMAIN, command_id, result={"by": "hand"})
    assert await waiting == {"by": "hand"}


@pytest.mark.parametrize("face", FACES)
async def test_after_the_time_out_an_error_says_where_the_command_is(dsn: str, given: Given, face: str) -> None:
    async with bus_of(face, dsn) as bus:
        command_id = await given.sent()
        assert await bus.get_command(DOMAIN, command_id)  # the bus has a connection now
        with pytest.raises(TimeoutError, match=rf"Command {command_id} has not ended after 2\.0 s: it is PENDING\."):
            await bus.wait_command(DOMAIN, command_id, timeout=timedelta(seconds=2))


async def test_a_command_that_never_was_is_not_waited_for(bus: CommandBus) -> None:
    with pytest.raises(CommandNotFoundError):
        await bus.wait_command(DOMAIN, uuid4())
    with pytest.raises(InvalidCommandError, match="/command_id"):
        await bus.wait_command(DOMAIN, "17")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout must be"):
        await bus.wait_command(DOMAIN, uuid4(), timeout="soon")  # type: ignore[arg-type]
    for negative in (-1, -0.5, timedelta(seconds=-1), float("-inf"), float("nan")):
        with pytest.raises(ValueError, match=r"timeout must be a timedelta or seconds, 0 or more, found"):
            await bus.wait_command(DOMAIN, uuid4(), timeout=negative)
        with pytest.raises(ValueError, match=r"timeout must be a timedelta or seconds, 0 or more, found"):
            await bus.health(timeout=negative)
