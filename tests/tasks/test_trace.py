"""The retry chain: every attempt of every command of a task, in one indexed query."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg
import pytest

from busload import (
    BatchCommand,
    BusinessRuleError,
    CommandBus,
    Dedup,
    PermanentCommandError,
    RetryPolicy,
    TransientCommandError,
)
from busload.commands import ExecutionStatus, rescue, search
from tests.given import DOMAIN, Given, raising

pytestmark = pytest.mark.usefixtures("invariants")

KEY = "invoices:2026:7"
AT_ONCE = RetryPolicy(max_attempts=3, backoff=(0,))


async def chain(given: Given, key: str = KEY) -> list[tuple[int, str]]:
    return [(one.attempt, one.status) for one in await given.bus.trace(key)]


async def test_each_attempt_is_a_row_of_its_own(bus: CommandBus, given: Given) -> None:
    """Failed, failed, completed; ids, worker, times and errors; nothing is overwritten"""
    tries = 0

    async def third_time_lucky(*_: Any) -> str:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise TransientCommandError(f"timeout {tries}")
        return "paid"

    given.handler("Debit", third_time_lucky, retry=AT_ONCE)
    command_id = await given.sent(data={"cents": 5}, task_key=KEY)
    [waiting] = await bus.trace(KEY)
    assert (waiting.status, waiting.attempt, waiting.execution_id, waiting.started_at) == ("queued", 1, None, None)
    await given.drained()
    first, second, third = await bus.trace(KEY)
    assert [one.status for one in (first, second, third)] == ["failed", "failed", "completed"]
    assert isinstance(first.status, ExecutionStatus)
    assert [one.attempt for one in (first, second, third)] == [1, 2, 3]
    assert [one.error for one in (first, second, third)] == ["timeout 1", "timeout 2", None]
    assert len({one.execution_id for one in (first, second, third)} - {None}) == 3
    for one in (first, second, third):
        assert (one.command_id, one.task_key, one.queue, one.metadata) == (command_id, KEY, DOMAIN, {"cents": 5})
        assert one.worker is not None and one.started_at is not None and one.finished_at is not None
        assert one.enqueued_at <= one.started_at <= one.finished_at
    trail = await bus.get_audit_trail(DOMAIN, command_id)
    assert {event.execution_id for event in trail} - {None} == {one.execution_id for one in (first, second, third)}


async def test_what_runs_now_is_the_last_link(bus: CommandBus, given: Given) -> None:
    await given.sent(task_key=KEY)
    [leased] = given.claimed()
    [now] = await bus.trace(KEY)
    assert (now.status, now.execution_id, now.finished_at) == ("processing", leased.execution_id, None)
    given.settled([leased], "FAILED_ATTEMPT", delay=60.0, details='{"message": "timeout"}')
    assert await chain(given) == [(1, "failed"), (2, "queued")]


async def test_retrying_out_of_troubleshooting_keeps_the_key_and_names_the_operator(
    bus: CommandBus, given: Given
) -> None:
    """In the dlq first, then a new execution of the same task"""
    given.handler("Debit", raising(PermanentCommandError("account closed")))
    command_id = await given.sent(task_key=KEY)
    await given.drained()
    await bus.troubleshooting.retry(DOMAIN, command_id, operator="rosa")
    await given.drained()
    await bus.troubleshooting.cancel(DOMAIN, command_id, reason="given up", operator="li")
    first, second = await bus.trace(KEY)
    assert [(one.attempt, one.status, one.error) for one in (first, second)] == [
        (1, "dlq", "account closed"),
        (2, "dlq", "account closed"),
    ]
    assert first.execution_id != second.execution_id
    assert [(action.type, action.operator) for action in first.actions] == [("OPERATOR_RETRIED", "rosa")]
    assert [(action.type, action.operator, action.details) for action in second.actions] == [
        ("OPERATOR_CANCELED", "li", {"reason": "given up"})
    ]
    assert first.finished_at is not None and first.actions[0].at >= first.finished_at


async def test_a_lost_attempt_is_in_the_chain(bus: CommandBus, given: Given) -> None:
    await given.sent(task_key=KEY)
    worker = given.registered_worker()
    [lost] = given.claimed(by=worker)
    given.died(worker)
    given.rescued()
    [again] = given.claimed()
    first, second = await bus.trace(KEY)
    assert [(first.attempt, first.status), (second.attempt, second.status)] == [(1, "lost"), (1, "processing")]
    assert (first.execution_id, second.execution_id) == (lost.execution_id, again.execution_id)
    assert first.worker == "given" and first.started_at is not None and first.finished_at is not None


async def test_an_attempt_that_was_handed_back_is_in_the_chain(bus: CommandBus, given: Given) -> None:
    """Its execution id was given to a handler, so it is accounted for"""
    await given.sent(task_key=KEY)
    [leased] = given.claimed()
    given.database.perform(rescue.release([leased.lease.lease_id]))
    given.settled(given.claimed())
    first, second = await bus.trace(KEY)
    assert [(first.attempt, first.status), (second.attempt, second.status)] == [(1, "lost"), (1, "completed")]
    assert (first.execution_id, first.error) == (leased.execution_id, "The worker handed it back.")


async def test_a_command_that_kills_its_workers_ends_in_the_dlq(bus: CommandBus, given: Given) -> None:
    await given.sent(task_key=KEY)
    statuses = []
    while given.database.count("queue"):
        worker = given.registered_worker()
        given.claimed(by=worker)
        given.died(worker)
        given.rescued()
        statuses = [one.status for one in await bus.trace(KEY)]
    assert statuses == ["lost"] * (len(statuses) - 2) + ["lost", "dlq"] and len(statuses) == 3


async def test_a_trace_tells_business_refusals_from_cancels(bus: CommandBus, given: Given) -> None:
    given.handler("Debit", raising(BusinessRuleError("limit reached")))
    await given.sent(task_key=KEY)
    await given.drained()
    batch_id = await bus.create_batch(DOMAIN, [BatchCommand("Debit", task_key=KEY)])
    await bus.cancel_batch(DOMAIN, batch_id, reason="wrong list", operator="li")
    failed, canceled = await bus.trace(KEY)
    assert [(action.type, action.operator) for action in canceled.actions] == [("CANCELED", "li")]
    assert (failed.status, failed.error) == ("failed", "limit reached")
    assert (canceled.status, canceled.error, canceled.execution_id) == ("canceled", "wrong list", None)


async def test_all_commands_of_a_task_are_one_chain_over_all_domains(bus: CommandBus, given: Given) -> None:
    """No third key; oldest first; one domain alone on request"""
    given.handler()
    await given.sent(task_key=KEY)
    await given.drained()
    second = await given.sent(task_key=KEY)
    other = await bus.send("crm", "Push", task_key=KEY)
    await given.sent(task_key="another")
    assert [(one.queue, one.status) for one in await bus.trace(KEY)] == [
        (DOMAIN, "completed"),
        (DOMAIN, "queued"),
        ("crm", "queued"),
    ]
    assert [one.command_id for one in await bus.trace(KEY, domain="crm")] == [other.command_id]
    assert [one.command_id for one in await bus.trace(KEY, domain=DOMAIN)][-1] == second
    assert await bus.trace("unknown") == []


async def test_neighbours_in_a_load_do_not_mix(bus: CommandBus, given: Given) -> None:
    """One lease, one cancel event and one lost lease are about many commands; each chain shows its own part"""
    commands = [BatchCommand("Debit", task_key=f"k{n}") for n in range(10)]
    await bus.create_batch(DOMAIN, commands)
    worker = given.registered_worker()
    leased = given.claimed(10, by=worker)
    given.settled(leased[:3])
    given.died(worker)
    given.rescued()
    assert await chain(given, "k0") == [(1, "completed")]
    assert await chain(given, "k5") == [(1, "lost"), (1, "queued")]
    [first, *_] = await bus.trace("k5")
    assert first.execution_id == leased[5].execution_id


async def test_a_trace_reads_by_index(bus: CommandBus, given: Given, conn: psycopg.AsyncConnection) -> None:
    """Among many commands only those of the task are read"""
    for n in range(5):
        await bus.send_many(DOMAIN, [BatchCommand("Debit", task_key=f"other{n}-{m}") for m in range(2000)])
    await given.sent(task_key=KEY)
    await conn.execute("ANALYZE busload.command")
    statement = next(search.trace(KEY, domain=None))
    plan = await conn.execute(b"EXPLAIN (FORMAT JSON, ANALYZE) " + statement.sql, statement.params)  # type: ignore[union-attr]
    [[[explained]]] = await plan.fetchall()
    read: dict[str, int] = {}

    def walk(node: dict[str, Any]) -> None:
        if "Relation Name" in node:
            rows = node["Actual Rows"] * node["Actual Loops"] + node.get("Rows Removed by Filter", 0)
            read[node["Relation Name"]] = read.get(node["Relation Name"], 0) + rows
        for child in node.get("Plans", []):
            walk(child)

    walk(explained["Plan"])
    assert read["command"] <= 5


async def test_dedup_and_trace_tell_one_story(bus: CommandBus, given: Given) -> None:
    """A key, its executions, one open at a time"""
    once = Dedup(window=timedelta(0))
    given.handler()
    for _ in range(3):
        assert (await bus.send(DOMAIN, "Debit", task_key=KEY, dedup=once)).created
        assert not (await bus.send(DOMAIN, "Debit", task_key=KEY, dedup=once)).created
        await given.drained()
    assert await chain(given) == [(1, "completed")] * 3
    given.database.check_invariants()


@pytest.mark.parametrize("data", [None, 7, "text", [1, 2], {"a": {"b": 1}}])
async def test_metadata_is_the_data_of_the_command(bus: CommandBus, given: Given, data: Any) -> None:
    await given.sent(data=data, task_key=KEY)
    [one] = await bus.trace(KEY)
    assert one.metadata == data
