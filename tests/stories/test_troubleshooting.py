"""What waits for a person: listed, retried, completed or canceled, with that person's name on it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from busload import (
    Command,
    CommandBus,
    HandlerContext,
    InvalidCommandError,
    PermanentCommandError,
    TransientCommandError,
)
from busload.errors import CommandNotFoundError, InvalidOperationError
from tests.given import DOMAIN, Given, counts, raising

Action = Callable[[CommandBus, UUID], Awaitable[None]]
ACTIONS: dict[str, Action] = {
    "retry": lambda bus, id: bus.troubleshooting.retry(DOMAIN, id, operator="ada"),
    "complete": lambda bus, id: bus.troubleshooting.complete(DOMAIN, id, operator="ada"),
    "cancel": lambda bus, id: bus.troubleshooting.cancel(DOMAIN, id, reason="no", operator="ada"),
}
every_action = pytest.mark.parametrize("action", ACTIONS.values(), ids=list(ACTIONS))


async def test_what_waits_is_listed_newest_first_with_its_data_and_its_error(bus: CommandBus, given: Given) -> None:
    given.handler("Debit", raising(PermanentCommandError("closed", code="CLOSED", details={"account": 7})))
    given.handler("Credit", raising(ValueError("what?")))
    first = await given.sent("Debit", {"cents": 1}, task_key="invoice:1", reply_to="ledger")
    await given.drained()
    second = await given.sent("Credit", {"cents": 2}, max_attempts=1)
    await given.drained()
    third = await given.sent("Debit", {"cents": 3})
    await given.drained()

    items = await bus.troubleshooting.list(DOMAIN)

    assert [item.command_id for item in items] == [third, second, first]
    oldest, exhausted = items[2], items[1]
    assert (oldest.command_type, oldest.data, oldest.task_key) == ("Debit", {"cents": 1}, "invoice:1")
    assert (oldest.reason, oldest.attempts, oldest.reply_to) == ("PERMANENT", 1, "ledger")
    assert (oldest.last_error_type, oldest.last_error_code) == ("PermanentCommandError", "CLOSED")
    assert (oldest.last_error_message, oldest.details) == ("closed", {"account": 7})
    assert (exhausted.reason, exhausted.last_error_type, exhausted.last_error_message) == (
        "EXHAUSTED",
        "ValueError",
        "what?",
    )
    assert items[0].since > items[1].since > items[2].since


async def test_what_waits_is_filtered_by_type_and_paged(bus: CommandBus, given: Given) -> None:
    _, debits = await given.in_troubleshooting(commands=5)
    given.handler("Credit", raising(PermanentCommandError("closed")))
    credit = await given.sent("Credit")
    await given.drained()

    assert [item.command_id for item in await bus.troubleshooting.list(DOMAIN, command_type="Credit")] == [credit]
    assert [item.command_id for item in await bus.troubleshooting.list(DOMAIN, command_type="Refuse")] == debits
    assert await bus.troubleshooting.list(DOMAIN, command_type="Other") == []
    pages = [await bus.troubleshooting.list(DOMAIN, limit=4, offset=offset) for offset in (0, 4)]
    assert [item.command_id for page in pages for item in page] == [credit, *debits]
    assert await bus.troubleshooting.list("crm") == []


async def test_a_retry_starts_the_attempts_over_and_the_chain_goes_on(bus: CommandBus, given: Given) -> None:
    """Three attempts more, numbered on; the audit keeps all of them"""
    attempts: list[int] = []

    async def busy(command: Command, ctx: HandlerContext) -> None:
        attempts.append(ctx.attempt)
        raise TransientCommandError("busy")

    async def tried_in_vain() -> None:
        for _ in range(3):
            given.make_due()
            await given.drained()

    given.handler("Debit", busy)
    command_id = await given.sent(data={"cents": 5})
    await tried_in_vain()
    assert (await given.command_now(command_id)).attempts == 3

    await bus.troubleshooting.retry(DOMAIN, command_id, operator="ada")

    waiting = await given.command_now(command_id)
    assert (waiting.status, waiting.attempts, waiting.data) == ("PENDING", 0, {"cents": 5})
    await tried_in_vain()
    assert attempts == [1, 2, 3, 1, 2, 3]
    [item] = await bus.troubleshooting.list(DOMAIN)
    assert (item.reason, item.attempts) == ("EXHAUSTED", 3)
    trail = await bus.get_audit_trail(DOMAIN, command_id)
    assert [event.attempt for event in trail if event.type == "RECEIVED"] == [1, 2, 3, 4, 5, 6]
    assert len({event.execution_id for event in trail if event.type == "RECEIVED"}) == 6
    [retried] = [event for event in trail if event.type == "OPERATOR_RETRIED"]
    assert retried.operator == "ada"


async def test_a_retried_command_may_succeed(bus: CommandBus, given: Given) -> None:
    fails = [PermanentCommandError("closed"), None]

    async def run(command: Command, ctx: HandlerContext) -> str:
        if error := fails.pop(0):
            raise error
        return "ok"

    given.handler("Debit", run)
    batch_id = await given.batch()
    await given.drained()
    [item] = await bus.troubleshooting.list(DOMAIN)
    await bus.troubleshooting.retry(DOMAIN, item.command_id)
    await given.drained()
    assert (await given.batch_now(batch_id)).status == "COMPLETED"
    done = await given.command_now(item.command_id)
    assert (done.status, done.result, done.last_error_message) == ("COMPLETED", "ok", "closed")


async def test_an_operator_completes_with_a_result(bus: CommandBus, given: Given) -> None:
    _, [command_id] = await given.in_troubleshooting()
    await bus.troubleshooting.complete(DOMAIN, command_id, result={"by": "phone"}, operator="ada")

    done = await given.command_now(command_id)
    assert (done.status, done.result) == ("COMPLETED", {"by": "phone"})
    assert done.finished_at is not None
    event = (await bus.get_audit_trail(DOMAIN, command_id))[-1]
    assert (event.type, event.operator, event.details) == ("OPERATOR_COMPLETED", "ada", {"result": {"by": "phone"}})
    assert await bus.troubleshooting.list(DOMAIN) == []


async def test_an_operator_cancels_with_a_reason(bus: CommandBus, given: Given) -> None:
    batch_id, [command_id] = await given.in_troubleshooting()
    await bus.troubleshooting.cancel(DOMAIN, command_id, reason="account closed", operator="ada")

    assert (await given.command_now(command_id)).status == "CANCELED"
    event = (await bus.get_audit_trail(DOMAIN, command_id))[-1]
    assert (event.type, event.operator, event.batch_id) == ("OPERATOR_CANCELED", "ada", batch_id)
    assert event.details == {"reason": "account closed"}


async def test_a_cancel_needs_a_reason(bus: CommandBus, given: Given) -> None:
    """Of a command and of a batch"""
    batch_id, [command_id] = await given.in_troubleshooting()
    before = given.database.everything()
    reasons: list[Any] = ["", None, 7, "x\0", "x" * 5000]
    for reason in reasons:
        for call in (
            bus.troubleshooting.cancel(DOMAIN, command_id, reason=reason),
            bus.cancel_batch(DOMAIN, batch_id, reason=reason),
        ):
            with pytest.raises(InvalidCommandError) as refused:
                await call
            assert [problem.path for problem in refused.value.problems] == ["/reason"]
    with pytest.raises(TypeError, match="reason"):
        await bus.troubleshooting.cancel(DOMAIN, command_id)  # type: ignore[call-arg]
    assert given.database.everything() == before


@every_action
async def test_only_what_is_in_troubleshooting_can_be_operated_on(
    bus: CommandBus, given: Given, action: Action
) -> None:
    """The message names the state"""
    given.handler("Done")
    done = await given.sent("Done")
    await given.drained()
    running = await given.sent("Debit")
    given.claimed()
    waiting = await given.sent("Debit")
    before = given.database.everything()
    for command_id, status in ((done, "COMPLETED"), (running, "IN_PROGRESS"), (waiting, "PENDING")):
        with pytest.raises(InvalidOperationError, match=f"{command_id} is {status}"):
            await action(bus, command_id)
    assert given.database.everything() == before


@every_action
async def test_a_command_nobody_knows_is_not_found(bus: CommandBus, given: Given, action: Action) -> None:
    """Nor one of another domain"""
    unknown = uuid4()
    with pytest.raises(CommandNotFoundError, match=str(unknown)) as refused:
        await action(bus, unknown)
    assert (refused.value.domain, refused.value.command_id) == (DOMAIN, unknown)
    elsewhere = (await bus.send("crm", "Debit")).command_id
    with pytest.raises(CommandNotFoundError):
        await action(bus, elsewhere)


@every_action
async def test_the_second_of_two_operators_is_refused(bus: CommandBus, given: Given, action: Action) -> None:
    """Counted once"""
    batch_id, [command_id, _] = await given.in_troubleshooting(commands=2)
    await action(bus, command_id)
    after = counts(await given.batch_now(batch_id))
    with pytest.raises(InvalidOperationError):
        await action(bus, command_id)
    assert counts(await given.batch_now(batch_id)) == after


@every_action
async def test_an_operator_may_act_in_a_transaction(bus: CommandBus, given: Given, action: Action, dsn: str) -> None:
    batch_id, [command_id] = await given.in_troubleshooting()
    before = given.database.everything()
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        if action is ACTIONS["retry"]:
            await bus.troubleshooting.retry(DOMAIN, command_id, conn=conn)
        elif action is ACTIONS["complete"]:
            await bus.troubleshooting.complete(DOMAIN, command_id, conn=conn)
        else:
            await bus.troubleshooting.cancel(DOMAIN, command_id, reason="no", conn=conn)
        await conn.rollback()
    assert given.database.everything() == before
    assert counts(await given.batch_now(batch_id)) == (1, 0, 0, 0, 1)


async def test_a_batch_says_once_that_only_a_person_can_move_it_on(bus: CommandBus, given: Given) -> None:
    """Once per stall, though several commands wait; again when it stalls again"""

    async def stalls() -> list[Any]:
        trail = await bus.get_batch_audit_trail(DOMAIN, batch_id)
        return [event.details for event in trail if event.type == "BATCH_STALLED"]

    batch_id, [first, second, third] = await given.in_troubleshooting(commands=3)
    assert await stalls() == [{"in_troubleshooting": 3}]

    await bus.troubleshooting.complete(DOMAIN, first)  # still nothing but troubleshooting: the same stall
    assert len(await stalls()) == 1

    await bus.troubleshooting.retry(DOMAIN, second)
    assert len(await stalls()) == 1
    await given.drained()
    assert await stalls() == [{"in_troubleshooting": 3}, {"in_troubleshooting": 2}]

    for command_id in (second, third):
        await bus.troubleshooting.complete(DOMAIN, command_id)
    assert len(await stalls()) == 2
    assert (await given.batch_now(batch_id)).status == "COMPLETED"


async def test_a_batch_that_still_has_work_is_not_stalled(bus: CommandBus, given: Given) -> None:
    """Nor is one that is not sealed"""
    given.handler("Refuse", raising(PermanentCommandError("closed")))
    async with bus.open_batch(DOMAIN) as batch:
        await batch.add("Refuse")
        await batch.checkpoint()
        await given.drained()
        types = [event.type for event in await bus.get_batch_audit_trail(DOMAIN, batch.batch_id)]
        assert "BATCH_STALLED" not in types
    trail = await bus.get_batch_audit_trail(DOMAIN, batch.batch_id)
    assert [event.type for event in trail] == ["BATCH_STARTED", "BATCH_SEALED", "BATCH_STALLED"]
