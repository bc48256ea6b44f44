"""Assertions about what was sent."""

from __future__ import annotations

from unittest.mock import ANY

import psycopg
import pytest

from busload import CommandBus, SyncCommandBus
from busload.errors import InvalidOperationError
from busload.testing import assert_not_sent, assert_sent, run_handler


async def test_a_part_of_the_data_is_enough_at_every_depth(bus: CommandBus) -> None:
    await bus.send("payments", "Debit", {"account": {"id": 7, "iban": "DE1"}, "lines": [{"n": 1}, {"n": 2}]})
    await bus.send("payments", "Debit", {"account": {"id": 8}}, task_key="eight", headers={"tenant": "a", "x": "y"})

    [seven] = await assert_sent(bus, "payments", "Debit", {"account": {"id": 7}, "lines": [{"n": 1}, ANY]}, times=1)
    [eight] = await assert_sent(bus, "payments", "Debit", task_key="eight", headers={"tenant": "a"})
    assert [seven.data["account"]["id"], eight.data["account"]["id"]] == [7, 8]
    assert len(await assert_sent(bus, "payments", "Debit", times=2)) == 2
    await assert_not_sent(bus, "payments", "Debit", {"account": {"id": 9}})
    await assert_not_sent(bus, "payments", "Debit", None)
    await assert_not_sent(bus, "mail", "Debit")


async def test_a_failure_says_what_was_sent_instead_the_nearest_first(bus: CommandBus) -> None:
    await bus.send("payments", "Debit", {"account": 8, "amount": 3})
    await bus.send("payments", "Debit", {"account": 7, "lines": [1]})
    await bus.send("payments", "Credit")

    with pytest.raises(AssertionError) as failed:
        await assert_sent(bus, "payments", "Debit", {"account": 7, "amount": 10, "lines": [1, 2]})

    lines = str(failed.value).splitlines()
    assert lines[0] == (
        "Wanted at least 1 command payments/Debit with data={'account': 7, 'amount': 10, 'lines': [1, 2]}, found 0."
    )
    assert lines[1] == "2 commands payments/Debit differ:"
    assert lines[3:5] == [
        "    data.amount: wanted 10, but there is no 'amount'",
        "    data.lines: wanted 2 items, found 1: [1]",
    ]
    assert lines[6:8] == ["    data.account: wanted 7, found 8", "    data.amount: wanted 10, found 3"]
    assert lines[-1] == "Other commands of payments: Credit (1)."


async def test_a_failure_says_how_often_and_that_nothing_was_sent(bus: CommandBus) -> None:
    await bus.send("payments", "Debit", {"account": 7})
    with pytest.raises(AssertionError, match=r"Wanted 2 command payments/Debit, found 1\."):
        await assert_sent(bus, "payments", "Debit", times=2)
    with pytest.raises(AssertionError, match=r"Wanted no command payments/Debit, but 1 was sent:\n.*'account': 7"):
        await assert_not_sent(bus, "payments", "Debit")
    with pytest.raises(AssertionError, match=r"Nothing was sent to mail\."):
        await assert_sent(bus, "mail", "Welcome")


def test_the_sync_face_needs_no_await(sync_bus: SyncCommandBus) -> None:
    sync_bus.send("payments", "Debit", {"account": 7})
    [sent] = assert_sent(sync_bus, "payments", "Debit", {"account": 7})
    assert sent.status == "PENDING"
    assert_not_sent(sync_bus, "payments", "Credit")


def test_a_bus_that_the_application_has_closed_is_looked_at_all_the_same(sync_bus: SyncCommandBus) -> None:
    sync_bus.send("payments", "Debit")
    sync_bus.close()
    assert_sent(sync_bus, "payments", "Debit", times=1)


def test_a_transaction_that_is_not_committed_is_seen_on_its_own_connection_only(
    sync_bus: SyncCommandBus, dsn: str
) -> None:
    with psycopg.connect(dsn) as conn:
        sync_bus.send("payments", "Debit", conn=conn)
        assert_sent(sync_bus, "payments", "Debit", times=1, conn=conn)
        assert_not_sent(sync_bus, "payments", "Debit")
        conn.rollback()
        assert_not_sent(sync_bus, "payments", "Debit", conn=conn)


async def test_what_a_test_ran_by_itself_was_not_sent(bus: CommandBus) -> None:
    @bus.handler("payments", "Debit")
    async def debit(command: object, ctx: object) -> None: ...

    await run_handler(bus, "payments", "Debit")
    await assert_not_sent(bus, "payments", "Debit")


async def test_a_wrong_question_is_refused(bus: CommandBus) -> None:
    with pytest.raises(TypeError, match=r"A command has no 'taskkey' to compare. It has .*task_key"):
        await assert_sent(bus, "payments", "Debit", taskkey="a")
    with pytest.raises(ValueError, match="times must be a whole number from 0 on, found -1"):
        await assert_sent(bus, "payments", "Debit", times=-1)
    with pytest.raises(InvalidOperationError, match="must be a CommandBus or SyncCommandBus, found"):
        assert_sent("bus", "payments", "Debit")  # type: ignore[call-overload]
