"""Why is it not finished? Every reason, injected for real, is named with its count; a healthy batch has none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from busload import (
    BatchCommand,
    BatchNotFoundError,
    BusinessRuleError,
    Command,
    CommandBus,
    HandlerContext,
    InvalidCommandError,
    PermanentCommandError,
    RetryPolicy,
    SyncCommandBus,
    TransientCommandError,
)
from busload.commands import rescue
from busload.commands.command import CommandStatusName
from busload.commands.execution import COMPLETED, TROUBLESHOOTING
from busload.errors import CommandNotFoundError
from busload.explain import Blocker, Explanation
from busload.explain import explanation as explain
from busload.explain import reading as explain_reading
from busload.sync.plan import perform
from tests.given import DOMAIN, Database, Given, eventually, raising

pytestmark = pytest.mark.usefixtures("invariants")

TOMORROW = datetime.now(UTC) + timedelta(days=1)
ONCE_MORE = RetryPolicy(max_attempts=9, backoff=(3600,))

Scene = AbstractAsyncContextManager[UUID]


def found(explanation: Explanation) -> dict[Blocker, int]:
    """How many commands each reason is about."""
    counts: dict[Blocker, int] = {}
    for reason in explanation.reasons:
        counts[reason.code] = counts.get(reason.code, 0) + reason.count
    return counts


async def some_command(bus: CommandBus, batch_id: UUID, status: CommandStatusName) -> UUID:
    commands = await bus.list_batch_commands(DOMAIN, batch_id, status=status)
    return commands[0].command_id


def waiting_handler(given: Given) -> tuple[list[Command], asyncio.Event]:
    """A handler that waits until it is let go."""
    go = asyncio.Event()

    async def wait(command: Command, ctx: HandlerContext) -> None:
        await go.wait()

    return given.handler("Wait", wait), go


# -- the reasons -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def opened_and_not_sealed(given: Given) -> AsyncIterator[UUID]:
    given.handler()
    async with given.bus.open_batch(DOMAIN) as batch:
        for _ in range(3):
            await batch.add("Debit")
        await batch.checkpoint()
        await given.drained()
        yield batch.batch_id


@asynccontextmanager
async def sent_for_tomorrow(given: Given) -> AsyncIterator[UUID]:
    given.handler()
    commands = [BatchCommand("Debit", run_at=TOMORROW) for _ in range(4)] + [BatchCommand("Debit")]
    batch_id = await given.bus.create_batch(DOMAIN, commands)
    await given.drained()
    yield batch_id


@asynccontextmanager
async def failed_and_tried_again_later(given: Given) -> AsyncIterator[UUID]:
    given.handler("Fail", raising(TransientCommandError("no answer", code="TIMEOUT")), retry=ONCE_MORE)
    batch_id = await given.batch(3, "Fail")
    await given.drained()
    yield batch_id


@asynccontextmanager
async def served_by_nobody(given: Given) -> AsyncIterator[UUID]:
    given.handler()
    await given.drained()  # there was a worker, and it stopped
    yield await given.batch(7)


@asynccontextmanager
async def of_a_type_nobody_knows(given: Given) -> AsyncIterator[UUID]:
    given.handler()
    batch_id = await given.batch(3, "Unheard")
    await given.drained()
    yield batch_id


@asynccontextmanager
async def held_by_a_worker_that_went_silent(given: Given) -> AsyncIterator[UUID]:
    batch_id = await given.batch(5)
    worker = given.registered_worker(lease_for=timedelta(seconds=90))
    given.claimed(5, by=worker)
    given.database.rows("UPDATE busload.worker SET seen_at = now() - interval '60 s' WHERE worker = %s", worker)
    yield batch_id


@asynccontextmanager
async def held_by_a_worker_whose_lease_has_ended(given: Given) -> AsyncIterator[UUID]:
    batch_id = await given.batch(5)
    worker = given.registered_worker()
    given.claimed(5, by=worker)
    given.died(worker)
    yield batch_id
    given.rescued()


@asynccontextmanager
async def waiting_for_a_person(given: Given) -> AsyncIterator[UUID]:
    async def refuse(command: Command, ctx: HandlerContext) -> None:
        if command.data["n"] < 4:
            raise PermanentCommandError(f"account {command.data['n']} is closed", code="CLOSED")
        raise PermanentCommandError("no such currency", code="CURRENCY")

    given.handler("Refuse", refuse)
    batch_id = await given.batch(6, "Refuse")
    await given.drained()
    yield batch_id


@asynccontextmanager
async def in_a_paused_domain(given: Given) -> AsyncIterator[UUID]:
    seen = given.handler()
    await given.bus.domains.pause(DOMAIN, reason="the bank is down", operator="rosa")
    async with given.running():
        await eventually(lambda: given.database.count("worker"))
        batch_id = await given.batch(4)
        yield batch_id
        assert seen == []
        await given.bus.domains.resume(DOMAIN)
        await given.bus.wait_batch(DOMAIN, batch_id, timeout=20)


@asynccontextmanager
async def behind_others_of_higher_priority(given: Given) -> AsyncIterator[UUID]:
    _, go = waiting_handler(given)
    given.handler()
    async with given.running(concurrency=1) as worker:
        await given.sent("Wait")
        await eventually(lambda: worker.stats.in_hand == 1)
        batch_id = await given.batch(5)
        await given.bus.send_many(DOMAIN, [BatchCommand("Debit", priority=9) for _ in range(3)])
        yield batch_id
        go.set()


@asynccontextmanager
async def in_no_place(given: Given) -> AsyncIterator[UUID]:
    """Other hands took some out of the queue; they are put back, as every story ends with the invariants."""
    given.registered_worker()
    batch_id = await given.batch(5)
    [(lo, hi)] = given.database.rows("UPDATE busload.queue SET lo = lo + 2 RETURNING lo - 2, lo - 1")
    yield batch_id
    given.database.rows(
        "INSERT INTO busload.queue (lo, hi, domain, batch_id) VALUES (%s, %s, %s, %s)", lo, hi, DOMAIN, batch_id
    )


@asynccontextmanager
async def running_much_longer_than_usual(given: Given) -> AsyncIterator[UUID]:
    given.handler()
    seen, go = waiting_handler(given)
    commands = [*(BatchCommand("Debit") for _ in range(5)), *(BatchCommand("Wait") for _ in range(2))]
    batch_id = await given.bus.create_batch(DOMAIN, commands)
    async with given.running():
        await eventually(lambda: len(seen) == 2 and given.database.count("execution") == 5)
        given.database.rows("UPDATE busload.lease SET since = since - interval '31 s'")
        yield batch_id
        go.set()


@asynccontextmanager
async def canceled_and_not_stopped(given: Given) -> AsyncIterator[UUID]:
    seen, go = waiting_handler(given)
    batch_id = await given.batch(6, "Wait")
    async with given.running(concurrency=2):
        await eventually(lambda: len(seen) == 2)
        await given.bus.cancel_batch(DOMAIN, batch_id, reason="wrong prices")
        yield batch_id
        go.set()


REASONS: list[tuple[Callable[[Given], Scene], dict[Blocker, int], str]] = [
    (opened_and_not_sealed, {Blocker.NOT_SEALED: 3}, ""),
    (sent_for_tomorrow, {Blocker.RUN_AT: 4}, "SCHEDULED"),
    (failed_and_tried_again_later, {Blocker.BACKOFF: 3}, "SCHEDULED"),
    (served_by_nobody, {Blocker.NO_WORKER: 7}, "PENDING"),
    (of_a_type_nobody_knows, {Blocker.NO_HANDLER: 3}, "SCHEDULED"),
    (held_by_a_worker_that_went_silent, {Blocker.WORKER_LOST: 5}, "IN_PROGRESS"),
    (held_by_a_worker_whose_lease_has_ended, {Blocker.WORKER_LOST: 5}, "IN_PROGRESS"),
    (waiting_for_a_person, {Blocker.IN_TROUBLESHOOTING: 6}, "IN_TROUBLESHOOTING_QUEUE"),
    (in_a_paused_domain, {Blocker.PAUSED: 4}, "PENDING"),
    (behind_others_of_higher_priority, {Blocker.BEHIND_PRIORITY: 5}, "PENDING"),
    (in_no_place, {Blocker.IN_NO_PLACE: 2}, "PENDING_QUEUE"),
    (running_much_longer_than_usual, {Blocker.RUNNING_LONG: 2}, "IN_PROGRESS"),
    (canceled_and_not_stopped, {Blocker.CANCELING: 2}, "IN_PROGRESS"),
]


@pytest.mark.parametrize(("scene", "expected", "status"), REASONS, ids=[scene.__name__ for scene, _, _ in REASONS])
async def test_explain_names_what_is_in_the_way_and_how_many_it_concerns(
    bus: CommandBus,
    given: Given,
    scene: Callable[[Given], Scene],
    expected: dict[Blocker, int],
    status: CommandStatusName | None,
) -> None:
    """One call says why it is not finished; nothing else is named beside it."""
    async with scene(given) as batch_id:
        explanation = await bus.explain_batch(DOMAIN, batch_id)
        assert found(explanation) == expected
        assert (explanation.finished, explanation.eta) == (False, None)
        assert (explanation.batch_id, explanation.command_id) == (batch_id, None)
        assert explanation.remaining == (await given.batch_now(batch_id)).remaining_count
        assert all(reason.advice and reason.since is not None for reason in explanation.reasons)
        if status:
            command_id = await some_command(bus, batch_id, status)
            of_one = await bus.explain_command(DOMAIN, command_id)
            assert found(of_one) == dict.fromkeys(expected, 1)
            assert (of_one.finished, of_one.remaining, of_one.command_id) == (False, 1, command_id)
            assert of_one.batch_id == batch_id


async def test_a_healthy_batch_has_no_reasons_and_an_eta(bus: CommandBus, given: Given) -> None:
    given.handler()
    seen, go = waiting_handler(given)
    commands = [*(BatchCommand("Debit") for _ in range(5)), *(BatchCommand("Wait") for _ in range(20))]
    batch_id = await bus.create_batch(DOMAIN, commands)
    async with given.running(concurrency=2, settings=replace(given.settings, prefetch=timedelta(0))):
        await eventually(lambda: len(seen) == 2 and given.database.count("execution") == 5)
        explanation = await bus.explain_batch(DOMAIN, batch_id)
        assert (explanation.finished, explanation.reasons, explanation.remaining) == (False, (), 20)
        started = (await given.batch_now(batch_id)).started_at
        assert explanation.eta is not None and started is not None and explanation.eta > started
        assert explanation.summary.startswith("On its way: 5 of 25 commands have ended, 2 running, 18 ready; done in")
        of_one = await bus.explain_command(DOMAIN, seen[0].command_id)
        assert (of_one.finished, of_one.reasons, of_one.summary) == (False, (), "On its way: it is IN_PROGRESS.")
        go.set()
        await bus.wait_batch(DOMAIN, batch_id, timeout=20)
    finished = await bus.explain_batch(DOMAIN, batch_id)
    assert (finished.finished, finished.reasons, finished.remaining, finished.eta) == (True, (), 0, None)
    assert finished.summary.startswith("COMPLETED: all 25 commands ended")
    of_one = await bus.explain_command(DOMAIN, seen[0].command_id)
    assert (of_one.finished, of_one.reasons, of_one.summary) == (True, (), "COMPLETED: it has ended.")


async def test_work_that_is_ready_for_a_living_worker_is_healthy_before_anything_has_ended(
    bus: CommandBus, given: Given
) -> None:
    given.registered_worker()
    batch_id = await given.batch(3)
    explanation = await bus.explain_batch(DOMAIN, batch_id)
    assert (explanation.reasons, explanation.eta, explanation.remaining) == ((), None, 3)


async def test_what_is_due_and_not_yet_promoted_counts_as_ready(bus: CommandBus, given: Given) -> None:
    async with sent_for_tomorrow(given) as batch_id:
        given.make_due()
        assert found(await bus.explain_batch(DOMAIN, batch_id)) == {Blocker.NO_WORKER: 4}
        [command_id] = ((await bus.list_batch_commands(DOMAIN, batch_id, limit=1))[0].command_id,)
        assert found(await bus.explain_command(DOMAIN, command_id)) == {Blocker.NO_WORKER: 1}


# -- what each of them tells -----------------------------------------------------------------------------------------


async def test_each_cause_in_troubleshooting_is_a_reason_of_its_own(bus: CommandBus, given: Given) -> None:
    async with waiting_for_a_person(given) as batch_id:
        closed, currency = (await bus.explain_batch(DOMAIN, batch_id)).reasons
    assert (closed.count, closed.details["error_code"], closed.details["reason"]) == (4, "CLOSED", "PERMANENT")
    assert (currency.count, currency.details["error_code"]) == (2, "CURRENCY")
    assert currency.details["error_message"] == "no such currency"
    assert f"--group {closed.details['fingerprint']}" in closed.advice
    items = {item.command_id: item for item in await bus.troubleshooting.list(DOMAIN)}
    assert items[closed.details["command_id"]].last_error_code == "CLOSED"
    assert closed.since == min(item.since for item in items.values() if item.last_error_code == "CLOSED")


async def test_more_causes_than_anybody_reads_are_summed_up(bus: CommandBus, given: Given) -> None:
    batch_id = await given.batch(30)
    leased = given.claimed(30)
    for n, one in enumerate(leased):
        error = f'{{"type": "{"X" * (n + 1)}"}}'
        given.settled([one], TROUBLESHOOTING, details=error, reason="PERMANENT")
    reasons = (await bus.explain_batch(DOMAIN, batch_id)).reasons
    assert [reason.count for reason in reasons] == [1] * 20 + [10]
    assert "for other causes" in reasons[-1].message


async def test_several_reasons_come_together_the_most_urgent_first(bus: CommandBus, given: Given) -> None:
    given.handler("Fail", raising(TransientCommandError("no answer")), retry=ONCE_MORE)
    given.handler("Refuse", raising(PermanentCommandError("closed")))
    given.handler("Deny", raising(BusinessRuleError("no")))
    commands = [BatchCommand(kind) for kind in ("Fail", "Fail", "Refuse", "Deny")]
    batch_id = await bus.create_batch(DOMAIN, [*commands, BatchCommand("Fail", run_at=TOMORROW)])
    await given.drained()
    explanation = await bus.explain_batch(DOMAIN, batch_id)
    assert list(found(explanation).items()) == [
        (Blocker.IN_TROUBLESHOOTING, 1),
        (Blocker.BACKOFF, 2),
        (Blocker.RUN_AT, 1),
    ]
    assert explanation.summary == (
        "Not finished: 1 of 5 commands have ended; 1 waiting for a person, 2 waiting for the next attempt, "
        "1 waiting for their time."
    )


async def test_backoff_tells_why_the_last_attempts_failed_and_when_the_next_one_is(
    bus: CommandBus, given: Given, database: Database
) -> None:
    async with failed_and_tried_again_later(given) as batch_id:
        [reason] = (await bus.explain_batch(DOMAIN, batch_id)).reasons
    [failure] = reason.details["failures"]
    assert (failure.count, failure.error_type, failure.error_code) == (3, "TransientCommandError", "TIMEOUT")
    assert reason.details["next_at"] == database.value("SELECT min(run_at) FROM busload.scheduled")
    assert reason.since == database.value("SELECT min(finished_at) FROM busload.execution")
    assert "TIMEOUT: no answer" in reason.message


async def test_a_missing_handler_is_named(bus: CommandBus, given: Given, database: Database) -> None:
    async with of_a_type_nobody_knows(given) as batch_id:
        [reason] = (await bus.explain_batch(DOMAIN, batch_id)).reasons
    assert reason.details["command_types"] == ["Unheard"]
    assert reason.since == database.value("SELECT min(at) FROM busload.event WHERE type = 'NO_HANDLER'")
    assert '@bus.handler("payments", "Unheard")' in reason.advice


async def test_a_lost_worker_is_named_with_the_end_of_its_lease(
    bus: CommandBus, given: Given, database: Database
) -> None:
    async with held_by_a_worker_that_went_silent(given) as batch_id:
        [reason] = (await bus.explain_batch(DOMAIN, batch_id)).reasons
        [(seen_at, ends_at)] = database.rows("SELECT seen_at, seen_at + lease_for FROM busload.worker")
        assert (reason.since, reason.details) == (seen_at, {"workers": ["given"], "lease_ends_at": ends_at})
        assert "Its lease ends in 30 s" in reason.message
    async with held_by_a_worker_whose_lease_has_ended(given) as batch_id:
        [reason] = (await bus.explain_batch(DOMAIN, batch_id)).reasons
        assert "Its lease has ended" in reason.message
        assert "Nothing to do but wait" in reason.advice  # the first worker's row is still alive


async def test_what_a_worker_that_has_stopped_still_holds_is_taken_back_at_once(
    bus: CommandBus, given: Given, database: Database
) -> None:
    batch_id = await given.batch(2)
    worker = given.registered_worker()
    [command, _] = given.claimed(2, by=worker)
    database.perform(rescue.retire(worker=worker))
    for explanation in (
        await bus.explain_batch(DOMAIN, batch_id),
        await bus.explain_command(DOMAIN, command.command_id),
    ):
        [reason] = explanation.reasons
        assert reason.code == Blocker.WORKER_LOST and "Its lease has ended" in reason.message


async def test_nobody_takes_back_what_a_dead_worker_held_if_nobody_lives(bus: CommandBus, given: Given) -> None:
    async with held_by_a_worker_whose_lease_has_ended(given) as batch_id:
        [reason] = (await bus.explain_batch(DOMAIN, batch_id)).reasons
        assert "No worker lives" in reason.advice


async def test_a_worker_between_two_heartbeats_is_not_called_lost(
    bus: CommandBus, given: Given, database: Database
) -> None:
    batch_id = await given.batch(2)
    worker = given.registered_worker()
    given.claimed(2, by=worker)
    database.rows("UPDATE busload.worker SET seen_at = now() - interval '11 s'")  # a heartbeat comes every ten seconds
    assert (await bus.explain_batch(DOMAIN, batch_id)).reasons == ()
    database.perform(rescue.renew(worker=worker, settled=timedelta(seconds=20)))
    assert (await bus.explain_batch(DOMAIN, batch_id)).reasons == ()


async def test_explain_says_when_the_last_worker_was_seen(bus: CommandBus, given: Given, database: Database) -> None:
    never = await given.batch(1)
    [reason] = (await bus.explain_batch(DOMAIN, never)).reasons
    assert reason.details == {"last_seen": None} and "there has never been one" in reason.message
    worker = given.registered_worker()
    assert (await bus.explain_batch(DOMAIN, never)).reasons == ()
    database.perform(rescue.retire(worker=worker))
    [reason] = (await bus.explain_batch(DOMAIN, never)).reasons
    assert reason.since == reason.details["last_seen"] == database.value("SELECT stopped_at FROM busload.worker")
    other = database.perform(
        rescue.register(name="crm", domains=["crm"], concurrency=1, lease_for=timedelta(seconds=30))
    )
    assert other
    assert found(await bus.explain_batch(DOMAIN, never)) == {Blocker.NO_WORKER: 1}


async def test_explain_says_who_paused_a_domain_and_why(bus: CommandBus, given: Given) -> None:
    async with in_a_paused_domain(given) as batch_id:
        [reason] = (await bus.explain_batch(DOMAIN, batch_id)).reasons
        [pause] = await bus.domains.pauses()
    assert reason.details == {"paused_at": pause.since, "operator": "rosa", "reason": "the bank is down"}
    assert "by rosa: the bank is down" in reason.message
    assert "busload domain resume payments" in reason.advice


async def test_a_paused_domain_without_a_worker_needs_both(bus: CommandBus, given: Given) -> None:
    batch_id = await given.batch(2)
    await bus.domains.pause(DOMAIN)
    assert found(await bus.explain_batch(DOMAIN, batch_id)) == {Blocker.PAUSED: 2, Blocker.NO_WORKER: 2}


async def test_explain_counts_the_commands_ahead_by_priority_without_those_of_the_batch(
    bus: CommandBus, given: Given
) -> None:
    given.registered_worker()
    commands = [BatchCommand("Debit", priority=priority) for priority in (0, 0, 5, 9)]
    batch_id = await bus.create_batch(DOMAIN, commands)
    assert (await bus.explain_batch(DOMAIN, batch_id)).reasons == ()
    await bus.send_many(DOMAIN, [BatchCommand("Debit", priority=7) for _ in range(30)])
    await bus.send_many("crm", [BatchCommand("Debit", priority=8) for _ in range(30)])
    [reason] = (await bus.explain_batch(DOMAIN, batch_id)).reasons
    assert (reason.code, reason.count, reason.details) == (Blocker.BEHIND_PRIORITY, 3, {"ahead": 30, "priority": 5})


async def test_commands_of_equal_priority_are_not_in_the_way(bus: CommandBus, given: Given) -> None:
    given.registered_worker()
    await bus.send_many(DOMAIN, [BatchCommand("Debit") for _ in range(30)])
    batch_id = await given.batch(2)
    assert (await bus.explain_batch(DOMAIN, batch_id)).reasons == ()


async def test_long_is_ten_times_the_usual_and_at_least_thirty_seconds(
    bus: CommandBus, given: Given, database: Database
) -> None:
    batch_id = await given.batch(3)
    worker = given.registered_worker()
    [ended, *_] = given.claimed(3, by=worker)
    assert (await bus.explain_batch(DOMAIN, batch_id)).reasons == ()
    database.rows("UPDATE busload.lease SET since = now() - interval '9 min'")
    assert (await bus.explain_batch(DOMAIN, batch_id)).reasons == ()  # there is nothing to compare it with
    database.rows("UPDATE busload.lease SET since = now() - interval '11 min'")
    [reason] = (await bus.explain_batch(DOMAIN, batch_id)).reasons
    assert (reason.code, reason.count, reason.details["usual_seconds"]) == (Blocker.RUNNING_LONG, 3, None)
    given.settled([ended])
    database.rows("UPDATE busload.execution SET started_at = finished_at - interval '2 min'")
    assert (await bus.explain_batch(DOMAIN, batch_id)).reasons == ()  # they take two minutes here
    database.rows("UPDATE busload.execution SET started_at = finished_at - interval '1 min'")
    [reason] = (await bus.explain_batch(DOMAIN, batch_id)).reasons
    assert (reason.code, reason.count, reason.details["usual_seconds"]) == (Blocker.RUNNING_LONG, 2, 60.0)


async def test_the_usual_is_that_of_the_domain_before_anything_of_the_batch_has_ended(
    bus: CommandBus, given: Given, database: Database
) -> None:
    given.handler()
    await given.batch(5)
    await given.drained()
    batch_id = await given.batch(1)
    given.claimed(1)
    database.rows("UPDATE busload.lease SET since = now() - interval '31 s'")
    assert found(await bus.explain_batch(DOMAIN, batch_id)) == {Blocker.RUNNING_LONG: 1}


async def test_what_comes_back_to_a_canceled_batch_is_said_to_be_canceled_soon(
    bus: CommandBus, given: Given, database: Database
) -> None:
    batch_id = await given.batch(3)
    worker = given.registered_worker()
    leased = given.claimed(3, by=worker)
    await bus.cancel_batch(DOMAIN, batch_id, reason="wrong prices")
    [reason] = (await bus.explain_batch(DOMAIN, batch_id)).reasons
    assert (reason.code, reason.details) == (Blocker.CANCELING, {"running": 3, "waiting": 0})
    assert reason.since == database.value("SELECT canceled_at FROM busload.batch")
    given.settled(leased[:1], TROUBLESHOOTING, details='{"type": "E"}', reason="PERMANENT")
    reasons = (await bus.explain_batch(DOMAIN, batch_id)).reasons
    assert [(reason.code, reason.count) for reason in reasons] == [
        (Blocker.CANCELING, 2),
        (Blocker.IN_TROUBLESHOOTING, 1),
    ]
    assert "troubleshooting complete" in reasons[1].advice  # nothing of a canceled batch is retried
    given.settled(leased[1:])


# -- the callback ------------------------------------------------------------------------------------------------------


async def completed_with_callback(given: Given) -> UUID:
    given.handler()
    batch_id = await given.batch(2, on_complete=BatchCommand("Mail", data={"to": "cfo"}))
    given.settled(given.claimed(2, by=given.registered_worker()))
    return batch_id


async def test_a_callback_that_fails_is_explained_with_its_own_reasons(bus: CommandBus, given: Given) -> None:
    batch_id = await completed_with_callback(given)
    retry = RetryPolicy(max_attempts=2, backoff=(3600,))
    given.handler("Mail", raising(TransientCommandError("no answer", code="SMTP")), retry=retry)
    await given.drained()
    explanation = await bus.explain_batch(DOMAIN, batch_id)
    [reason] = explanation.reasons
    assert (explanation.finished, explanation.remaining, reason.code, reason.count) == (
        False,
        0,
        Blocker.CALLBACK_FAILING,
        1,
    )
    [own] = reason.details["reasons"]
    assert (own.code, reason.details["command_type"]) == (Blocker.BACKOFF, "Mail")
    assert "SMTP: no answer" in reason.message
    assert explanation.summary.endswith("; the callback is SCHEDULED.")

    given.make_due()
    await given.drained()
    [reason] = (await bus.explain_batch(DOMAIN, batch_id)).reasons
    [own] = reason.details["reasons"]
    assert (reason.code, own.code) == (Blocker.CALLBACK_FAILING, Blocker.IN_TROUBLESHOOTING)
    assert f"busload troubleshooting retry {reason.details['command_id']}" in reason.advice

    await bus.troubleshooting.complete(DOMAIN, reason.details["command_id"])
    explanation = await bus.explain_batch(DOMAIN, batch_id)
    assert (explanation.finished, explanation.reasons) == (True, ())
    assert explanation.summary.endswith("; the callback is COMPLETED.")


async def test_a_callback_that_waits_for_another_reason_is_explained_with_that(
    bus: CommandBus, given: Given, database: Database
) -> None:
    batch_id = await completed_with_callback(given)
    [reason] = (await bus.explain_batch(DOMAIN, batch_id)).reasons
    assert (reason.code, reason.details["reasons"]) == (Blocker.CALLBACK_WAITING, [])  # a worker lives
    database.rows("UPDATE busload.worker SET stopped_at = now()")
    explanation = await bus.explain_batch(DOMAIN, batch_id)
    [reason] = explanation.reasons
    [own] = reason.details["reasons"]
    assert (reason.code, own.code, explanation.finished) == (Blocker.CALLBACK_WAITING, Blocker.NO_WORKER, False)


# -- bad input, both faces, and the price ------------------------------------------------------------------------------


async def test_what_does_not_exist_cannot_be_explained(bus: CommandBus, given: Given) -> None:
    batch_id = await given.batch(1)
    [command] = await bus.list_batch_commands(DOMAIN, batch_id)
    with pytest.raises(BatchNotFoundError):
        await bus.explain_batch(DOMAIN, uuid4())
    with pytest.raises(BatchNotFoundError):
        await bus.explain_batch("crm", batch_id)
    with pytest.raises(CommandNotFoundError):
        await bus.explain_command(DOMAIN, uuid4())
    with pytest.raises(CommandNotFoundError):
        await bus.explain_command("crm", command.command_id)
    for wrong in ("a b", ""):
        with pytest.raises(InvalidCommandError):
            await bus.explain_batch(wrong, batch_id)
    with pytest.raises(InvalidCommandError):
        await bus.explain_command(DOMAIN, "no id")  # type: ignore[arg-type]


async def test_a_batch_that_is_being_pruned_is_not_found(bus: CommandBus, given: Given, database: Database) -> None:
    given.handler()
    batch_id = await given.batch(1)
    await given.drained()
    assert (await bus.explain_batch(DOMAIN, batch_id)).finished
    database.rows("UPDATE busload.batch SET pruned_at = now()")
    with pytest.raises(BatchNotFoundError):
        await bus.explain_batch(DOMAIN, batch_id)


def test_the_sync_bus_explains_the_same(sync_bus: SyncCommandBus) -> None:
    batch_id = sync_bus.create_batch(DOMAIN, [BatchCommand("Debit")])
    explanation = sync_bus.explain_batch(DOMAIN, batch_id)
    assert found(explanation) == {Blocker.NO_WORKER: 1}
    [command] = sync_bus.list_batch_commands(DOMAIN, batch_id)
    assert found(sync_bus.explain_command(DOMAIN, command.command_id)) == {Blocker.NO_WORKER: 1}


async def test_an_explanation_sees_one_moment(bus: CommandBus, given: Given, dsn: str) -> None:
    """Commands that move between two of its statements would be counted twice, or seem to be nowhere."""
    given.handler()
    batch_id = await given.batch(3)
    given.registered_worker()
    with psycopg.connect(dsn, autocommit=True) as conn, conn.transaction():
        plan = explain.explain_batch(DOMAIN, batch_id)
        step = next(plan)
        rest: Any = None
        for _ in range(2):  # the isolation level, and the first look
            rows = _perform_step(conn, step)
            step = plan.send(rows)
        given.settled(given.claimed(3), COMPLETED)
        rest = _to_the_end(conn, plan, step)
    assert rest.reasons == () and rest.remaining == 3
    assert (await bus.explain_batch(DOMAIN, batch_id)).finished


def _perform_step(conn: psycopg.Connection[Any], step: Any) -> list[tuple[Any, ...]]:
    cursor = conn.execute(step.sql, getattr(step, "params", None))
    return cursor.fetchall() if cursor.description else []


def _to_the_end(conn: psycopg.Connection[Any], plan: Any, step: Any) -> Any:
    try:
        while True:
            step = plan.send(_perform_step(conn, step))
    except StopIteration as done:
        return done.value


async def test_a_batch_of_many_is_explained_by_reading_few_rows(
    bus: CommandBus, given: Given, database: Database, dsn: str
) -> None:
    """The price is what waits in places, in loads: not the commands of the batch, nor what has ended."""
    await bus.send_many(DOMAIN, [BatchCommand("Debit", priority=-1) for _ in range(5000)])
    batch_id = await given.batch(50_000)
    await bus.send_many(DOMAIN, [BatchCommand("Debit", priority=-1) for _ in range(5000)])
    database.rows(  # and others have a backlog that was sent one by one
        "INSERT INTO busload.queue (lo, hi, domain, priority) SELECT n * 1024, n * 1024, %s, -1"
        "  FROM generate_series(1000000::bigint, 1005000) AS n",
        DOMAIN,
    )
    given.settled(given.claimed(20_000))
    given.claimed(5000)
    database.rows("ANALYZE")
    with psycopg.connect(dsn, autocommit=True) as conn, conn.transaction():
        explanation = perform(conn, explain.explain_batch(DOMAIN, batch_id))
        read: dict[str, int] = dict(
            conn.execute(
                "SELECT relname, seq_tup_read + coalesce(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables"
                " WHERE schemaname = 'busload'"
            ).fetchall()
        )
    assert explanation.reasons == () and explanation.remaining == 30_000
    assert sum(read.values()) < 2500, read
    database.rows("DELETE FROM busload.lease")
    database.rows("TRUNCATE busload.command, busload.queue, busload.execution, busload.batch, busload.event CASCADE")


async def test_a_command_that_was_asked_to_stop_is_being_canceled(bus: CommandBus, given: Given) -> None:
    command_id = await given.sent()
    given.claimed()
    await bus.cancel_command(DOMAIN, command_id, reason="no")
    explanation = await bus.explain_command(DOMAIN, command_id)
    assert found(explanation) == {Blocker.CANCELING: 1}
    assert "The command was canceled" in explanation.reasons[0].message


async def test_a_snapshot_that_makes_claims_slow_is_named(
    bus: CommandBus, given: Given, database: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given.registered_worker()
    batch_id = await given.batch(commands=3)
    with psycopg.connect(dsn, application_name="nightly report") as report:
        report.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        report.execute("SELECT count(*) FROM busload.batch")
        dead = explain_reading.MANY_DEAD
        database.rows(
            "INSERT INTO busload.queue (lo, hi, domain)"
            " SELECT -n << 10, -n << 10, 'old' FROM generate_series(1, %s) AS n",
            dead,
        )
        database.rows("DELETE FROM busload.queue WHERE hi < 0")
        database.rows("SELECT pg_stat_force_next_flush()")
        assert found(await bus.explain_batch(DOMAIN, batch_id)) == {}  # it is not old yet
        monkeypatch.setattr(explain_reading, "SNAPSHOT_AFTER", timedelta(0))
        [reason] = (await bus.explain_batch(DOMAIN, batch_id)).reasons
        assert (reason.code, reason.count) == (Blocker.OLD_SNAPSHOT, 3)
        assert reason.details["pid"] == report.info.backend_pid and reason.details["dead_rows"] >= dead
        assert "'nightly report'" in reason.message and str(report.info.backend_pid) in reason.advice
    given.claimed(9)
