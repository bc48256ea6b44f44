"""A reply is a command too, sent by the transition that ends the one it answers."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from busload import BatchCommand, BusinessRuleError, Command, CommandBus, HandlerContext
from tests.given import DOMAIN, Given, raising


def replies(given: Given) -> list[tuple[Any, ...]]:
    return given.database.rows(
        """SELECT command_type, data, correlation_id FROM busload.command WHERE domain = 'ledger' ORDER BY id"""
    )


async def test_success_is_replied_with_the_result(bus: CommandBus, given: Given) -> None:
    """The reply runs like any command"""

    async def run(command: Command, ctx: HandlerContext) -> dict[str, int]:
        assert (command.reply_to, command.correlation_id) == ("ledger", correlation_id)
        return {"balance": 7}

    correlation_id = uuid4()
    given.handler("Debit", run)
    command_id = await given.sent(reply_to="ledger", correlation_id=correlation_id)
    await given.drained()

    [(command_type, data, correlated)] = replies(given)
    assert command_type == "DebitReply"
    assert data == {
        "command_id": str(command_id),
        "correlation_id": str(correlation_id),
        "outcome": "SUCCESS",
        "data": {"balance": 7},
        "error": None,
    }
    assert correlated == correlation_id

    got: list[Command] = []

    @bus.handler("ledger", "DebitReply")
    async def book(command: Command, ctx: HandlerContext) -> None:
        got.append(command)

    await given.drained(domains=["ledger"])
    assert [(reply.data["outcome"], reply.correlation_id) for reply in got] == [("SUCCESS", correlation_id)]


async def test_a_broken_business_rule_is_replied_as_failed(given: Given) -> None:
    given.handler("Debit", raising(BusinessRuleError("overdrawn", code="FUNDS", details={"missing": 3})))
    command_id = await given.sent(reply_to="ledger")
    await given.drained()

    [(_, data, _)] = replies(given)
    assert (data["command_id"], data["outcome"], data["data"]) == (str(command_id), "FAILED", None)
    error = data["error"]
    assert (error["type"], error["code"], error["message"]) == ("BusinessRuleError", "FUNDS", "overdrawn")
    assert error["details"] == {"missing": 3}


async def test_an_operators_verdict_is_replied(bus: CommandBus, given: Given) -> None:
    """SUCCESS with the result, CANCELED with the reason; nothing on a retry"""
    await given.in_troubleshooting()
    ids = [await given.sent("Refuse", reply_to="ledger") for _ in range(3)]
    await given.drained()
    assert replies(given) == []

    await bus.troubleshooting.complete(DOMAIN, ids[0], result={"by": "phone"})
    await bus.troubleshooting.complete(DOMAIN, ids[1])
    await bus.troubleshooting.retry(DOMAIN, ids[2])
    await given.drained()
    await bus.troubleshooting.cancel(DOMAIN, ids[2], reason="account closed")

    found = [(d["command_id"], d["outcome"], d["data"], d["error"]) for _, d, _ in replies(given)]
    assert found == [
        (str(ids[0]), "SUCCESS", {"by": "phone"}, None),
        (str(ids[1]), "SUCCESS", None, None),
        (str(ids[2]), "CANCELED", None, {"message": "account closed"}),
    ]


async def test_without_a_correlation_id_the_command_id_is_it(bus: CommandBus, given: Given) -> None:
    """In the row, for the handler and in the reply"""
    seen = given.handler()
    command_id = await given.sent(reply_to="ledger")
    assert (await given.command_now(command_id)).correlation_id == command_id
    await given.drained()
    assert seen[0].correlation_id == command_id
    [(_, data, correlated)] = replies(given)
    assert (data["correlation_id"], correlated) == (str(command_id), command_id)


async def test_a_command_without_reply_to_gets_none(bus: CommandBus, given: Given) -> None:
    """Also beside some that do, in one batch"""
    given.handler()
    asked: UUID = uuid4()
    await bus.create_batch(
        DOMAIN, [BatchCommand("Debit"), BatchCommand("Debit", asked, reply_to="ledger"), BatchCommand("Debit")]
    )
    await given.drained()
    assert [data["command_id"] for _, data, _ in replies(given)] == [str(asked)]


async def test_a_reply_that_cannot_be_written_rolls_the_completion_back(given: Given) -> None:
    """Both or neither"""
    command_id = await given.sent(reply_to="ledger")
    leased = given.claimed()
    given.database.rows("ALTER TABLE busload.command ADD CONSTRAINT no_ledger CHECK (domain <> 'ledger')")
    with pytest.raises(psycopg.errors.CheckViolation, match="no_ledger"):
        given.settled(leased)
    assert (await given.command_now(command_id)).status == "IN_PROGRESS"
    given.database.rows("ALTER TABLE busload.command DROP CONSTRAINT no_ledger")
    given.settled(leased)
    assert len(replies(given)) == 1
