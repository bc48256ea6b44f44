"""One command is canceled wherever it is: at once if it waits, and asked to stop if it runs."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from busload import (
    BatchCommand,
    Command,
    CommandBus,
    HandlerContext,
    InvalidCommandError,
    SyncHandlerContext,
    WorkerSettings,
)
from busload.commands import Cancellation, cancel, claim, rescue, settle
from busload.commands.command import CommandStatus
from busload.commands.execution import FAILED_ATTEMPT, Transition
from busload.errors import CommandCanceledError, CommandNotFoundError, InvalidOperationError
from busload.postgres.plan import Plan, execute
from busload.sync.plan import perform
from busload.worker.sweep import sweep
from tests.faces import FACES, bus_of
from tests.given import DOMAIN, Given, at_once, beside, counts, eventually

pytestmark = pytest.mark.usefixtures("invariants")

IN_AN_HOUR = timedelta(hours=1)
DEAF_TO_HEARTBEATS = WorkerSettings(lease_for=IN_AN_HOUR, poll_every=timedelta(milliseconds=50))


async def canceled(bus: CommandBus, command_id: UUID) -> Cancellation:
    return await bus.cancel_command(DOMAIN, command_id, reason="paid twice", operator="ada")


async def statuses(bus: CommandBus, batch_id: UUID) -> list[str]:
    return [str(one.status) for one in await bus.list_batch_commands(DOMAIN, batch_id)]


@pytest.mark.parametrize("face", FACES)
async def test_a_waiting_command_is_canceled_at_once(dsn: str, given: Given, face: str) -> None:
    async with bus_of(face, dsn) as bus:
        command_id = (await bus.send(DOMAIN, "Debit")).command_id
        assert await canceled(bus, command_id) is Cancellation.CANCELED
        command = await bus.get_command(DOMAIN, command_id)
        assert command is not None
        assert (command.status, command.attempts) == ("CANCELED", 0)
        event = (await bus.get_audit_trail(DOMAIN, command_id))[-1]
        assert (event.type, event.operator, event.details) == ("CANCELED", "ada", {"reason": "paid twice"})
    seen = given.handler()
    await given.drained()
    assert seen == []


@pytest.mark.parametrize("n", [0, 4, 9])
async def test_a_load_is_split_around_the_command(bus: CommandBus, given: Given, n: int) -> None:
    """The first, one in the middle, the last: all others run, each once"""
    batch_id = await given.batch(10)
    commands = await bus.list_batch_commands(DOMAIN, batch_id)
    await canceled(bus, commands[n].command_id)
    given.database.check_invariants()
    seen = given.handler()
    await given.drained()
    assert sorted(command.data["n"] for command in seen) == [other for other in range(10) if other != n]
    batch = await given.batch_now(batch_id)
    assert (batch.status, counts(batch)) == ("COMPLETED_WITH_FAILURES", (10, 9, 0, 1, 0))


async def test_what_is_left_of_a_load_keeps_all_else(bus: CommandBus, given: Given) -> None:
    """Priority, attempt, transport: every column but the range, and the transaction that made the load ready."""
    commands = [BatchCommand("Debit", priority=7, reply_to="answers") for _ in range(3)]
    batch_id = await bus.create_batch(DOMAIN, commands)
    given.database.rows("UPDATE busload.queue SET crashes = 1, transport = 'x', published_at = now(), publications = 3")
    columns = given.database.value(
        """SELECT string_agg(column_name, ', ') FROM information_schema.columns
            WHERE table_schema = 'busload' AND table_name = 'queue' AND column_name NOT IN ('lo', 'hi', 'entered')"""
    )
    [before] = given.database.rows(f"SELECT {columns} FROM busload.queue")
    middle = (await bus.list_batch_commands(DOMAIN, batch_id))[1]
    await canceled(bus, middle.command_id)
    assert given.database.rows(f"SELECT {columns} FROM busload.queue WHERE domain = %s", DOMAIN) == [before, before]
    [reply] = given.database.rows("SELECT data FROM busload.command WHERE domain = 'answers'")
    assert (reply[0]["outcome"], reply[0]["error"]) == ("CANCELED", {"message": "paid twice"})
    assert reply[0]["command_id"] == str(middle.command_id)
    given.database.rows("UPDATE busload.queue SET crashes = 0")


async def test_what_is_scheduled_or_not_published_is_canceled_as_well(bus: CommandBus, given: Given) -> None:
    later = await given.sent(run_at=datetime.now(UTC) + IN_AN_HOUR)
    assert await canceled(bus, later) is Cancellation.CANCELED
    batch_id = await given.batch(3)
    given.database.rows(
        """WITH load AS (DELETE FROM busload.queue RETURNING lo, hi, domain, batch_id, fair)
           INSERT INTO busload.outbox (lo, hi, domain, batch_id, fair, transport) SELECT *, 'pgmq' FROM load"""
    )
    commands = await bus.list_batch_commands(DOMAIN, batch_id)
    assert [str(one.status) for one in commands] == 3 * ["PENDING_QUEUE"]
    assert await canceled(bus, commands[1].command_id) is Cancellation.CANCELED
    assert await statuses(bus, batch_id) == ["PENDING_QUEUE", "CANCELED", "PENDING_QUEUE"]
    assert given.database.rows("SELECT hi - lo + 1, transport FROM busload.outbox") == 2 * [(1, "pgmq")]


async def test_the_last_open_command_completes_its_batch_and_sends_the_callback(bus: CommandBus, given: Given) -> None:
    batch_id = await given.batch(2, on_complete=BatchCommand("Report"))
    first, second = await bus.list_batch_commands(DOMAIN, batch_id)
    given.settled(given.claimed())
    assert await canceled(bus, second.command_id) is Cancellation.CANCELED
    batch = await given.batch_now(batch_id)
    assert (batch.status, counts(batch)) == ("COMPLETED_WITH_FAILURES", (2, 1, 0, 1, 0))
    assert given.database.value("SELECT count(*) FROM busload.command WHERE command_type = 'Report'") == 1
    assert first.command_id != second.command_id


async def test_what_waits_in_troubleshooting_is_canceled_as_an_operator_does(bus: CommandBus, given: Given) -> None:
    batch_id, [command_id] = await given.in_troubleshooting()
    assert await canceled(bus, command_id) is Cancellation.CANCELED
    event = (await bus.get_audit_trail(DOMAIN, command_id))[-1]
    assert (event.type, event.operator, event.details) == ("OPERATOR_CANCELED", "ada", {"reason": "paid twice"})
    assert counts(await given.batch_now(batch_id)) == (1, 0, 0, 1, 0)


async def test_what_has_ended_or_never_was_is_refused(bus: CommandBus, given: Given) -> None:
    given.handler()
    command_id = await given.sent()
    await given.drained()
    before = given.database.everything()
    with pytest.raises(InvalidOperationError, match=f"Command {command_id} is COMPLETED. It has ended"):
        await canceled(bus, command_id)
    unknown = uuid4()
    with pytest.raises(CommandNotFoundError) as not_found:
        await canceled(bus, unknown)
    assert (not_found.value.domain, not_found.value.command_id) == (DOMAIN, unknown)
    with pytest.raises(InvalidCommandError, match="/reason"):
        await bus.cancel_command(DOMAIN, command_id, reason="")
    assert given.database.everything() == before


async def test_with_conn_it_is_canceled_with_the_commit(
    bus: CommandBus, given: Given, conn: psycopg.AsyncConnection[Any]
) -> None:
    command_id = await given.sent()
    async with conn.transaction(force_rollback=True):
        assert await bus.cancel_command(DOMAIN, command_id, reason="no", conn=conn) is Cancellation.CANCELED
    assert (await given.command_now(command_id)).status == CommandStatus.PENDING


async def test_a_running_command_is_asked_to_stop_and_its_neighbours_are_not(bus: CommandBus, given: Given) -> None:
    """By notification, long before the heartbeat"""
    all_run = asyncio.Barrier(4)
    go_on = asyncio.Event()
    contexts: dict[int, HandlerContext] = {}

    async def run(command: Command, ctx: HandlerContext) -> None:
        contexts[command.data["n"]] = ctx
        await all_run.wait()
        if command.data["n"] == 1:
            await eventually(lambda: ctx.cancelled)
            raise RuntimeError("stopped as asked")
        await go_on.wait()
        assert not ctx.cancelled

    given.handler("Debit", run)
    batch_id = await given.batch(3)
    async with given.running(concurrency=3, settings=DEAF_TO_HEARTBEATS):
        await all_run.wait()
        command = (await bus.list_batch_commands(DOMAIN, batch_id))[1]
        assert await canceled(bus, command.command_id) is Cancellation.ASKED_TO_STOP
        await eventually(lambda: contexts[1].cancelled)
        go_on.set()
        batch = await bus.wait_batch(DOMAIN, batch_id, timeout=60)
    assert counts(batch) == (3, 2, 0, 1, 0)
    stopped = await given.command_now(command.command_id)
    assert (stopped.status, stopped.last_error_message) == ("CANCELED", "stopped as asked")
    trail = {event.type: event for event in await bus.get_audit_trail(DOMAIN, command.command_id)}
    assert (trail["ASKED_TO_STOP"].operator, trail["ASKED_TO_STOP"].details) == ("ada", {"reason": "paid twice"})


async def test_what_ends_well_though_it_was_asked_to_stop_is_completed(bus: CommandBus, given: Given) -> None:
    command_id = await given.sent()
    leased = given.claimed()
    assert await canceled(bus, command_id) is Cancellation.ASKED_TO_STOP
    given.settled(leased)
    assert (await given.command_now(command_id)).status == CommandStatus.COMPLETED


async def test_what_was_asked_to_stop_is_not_tried_again(bus: CommandBus, given: Given) -> None:
    """The worker has not heard of it and reports an attempt that failed; of its neighbour, too"""
    batch_id = await given.batch(2)
    leased = given.claimed(2)
    await canceled(bus, leased[0].command_id)
    given.settled(leased, FAILED_ATTEMPT, delay=0.0)
    assert await statuses(bus, batch_id) == ["CANCELED", "SCHEDULED"]


async def test_what_was_asked_to_stop_does_not_outlive_its_worker(bus: CommandBus, given: Given) -> None:
    """Its neighbours go back into the queue"""
    batch_id = await given.batch(5)
    worker = given.registered_worker()
    leased = given.claimed(5, by=worker)
    await canceled(bus, leased[2].command_id)
    given.died(worker)
    assert given.rescued().commands == 5
    assert await statuses(bus, batch_id) == ["PENDING", "PENDING", "CANCELED", "PENDING", "PENDING"]
    event = (await bus.get_audit_trail(DOMAIN, leased[2].command_id))[-1]
    assert (event.type, event.details) == ("CANCELED", {"reason": "paid twice"})


async def test_what_is_handed_back_after_it_was_asked_to_stop_is_canceled_by_a_sweep(
    bus: CommandBus, given: Given
) -> None:
    batch_id = await given.batch(3)
    worker = given.registered_worker()
    leased = given.claimed(3, by=worker)
    await canceled(bus, leased[1].command_id)
    given.database.perform(claim.give_back({leased[0].lease: [one.id for one in leased[:2]]}, pause=None, details=()))
    assert await statuses(bus, batch_id) == ["PENDING", "PENDING", "IN_PROGRESS"]
    await sweep(bus.pool, worker=worker, judge=False)
    assert await statuses(bus, batch_id) == ["PENDING", "CANCELED", "IN_PROGRESS"]
    assert given.database.count("stopping") == 0


async def test_a_sweep_cancels_batch_by_batch_as_everybody_locks_them(bus: CommandBus, given: Given) -> None:
    """The older batch has the larger id. Somebody locks both by id while the sweep is at work: no deadlock"""
    small, large = sorted((uuid4(), uuid4()))
    await given.batch(1, batch_id=large)
    await given.batch(1, batch_id=small)
    leased = given.claimed(2)
    for one in leased:
        await canceled(bus, one.command_id)
        given.database.perform(claim.give_back({one.lease: [one.id]}, pause=None, details=()))
    assert [row[3] for row in given.database.perform(execute(cancel.SQL.stopping))] == [small, large]
    lock = "SELECT FROM busload.batch WHERE batch_id = %s FOR NO KEY UPDATE"
    with psycopg.connect(bus.dsn) as holder:
        holder.execute(lock, [small])
        thread, answers = beside(bus.dsn, cancel.cancel_stopping)
        holder.execute(lock, [large])
    thread.join()
    assert [type(answer) for answer in answers] == [int]
    given.database.perform(cancel.cancel_stopping())
    assert await statuses(bus, small) == await statuses(bus, large) == ["CANCELED"]


async def test_a_thousand_that_still_run_do_not_hide_one_that_was_handed_back(bus: CommandBus, given: Given) -> None:
    batch_id = await given.batch(1001)
    leased = given.claimed(1001)
    given.database.rows("INSERT INTO busload.stopping (command, attempt) SELECT id, 1 FROM busload.command")
    last = max(leased, key=lambda one: one.id)
    given.database.perform(claim.give_back({last.lease: [last.id]}, pause=None, details=()))
    assert given.database.perform(cancel.cancel_stopping()) == 1
    assert counts(await given.batch_now(batch_id)) == (1001, 0, 0, 1, 0)
    assert given.database.count("stopping") == 1000


async def retried_though_asked_to_stop(bus: CommandBus, given: Given) -> UUID:
    """A settlement waits for the cancel. Its snapshot is older than the request, so it schedules another attempt."""
    command_id = await given.sent()
    [one] = given.claimed()
    failed = [Transition(one, FAILED_ATTEMPT, delay=0.0)]
    with given.database.time_standing_still():
        assert given.database.perform(plan_of(command_id)) is Cancellation.ASKED_TO_STOP
        thread, answers = beside(bus.dsn, partial(settle.settle, failed, now=0.0))
        assert answers == []
    thread.join()
    assert (await given.command_now(command_id)).status == CommandStatus.SCHEDULED
    return command_id


async def test_a_settlement_that_waited_for_the_cancel_and_did_not_see_it_does_not_undo_it(
    bus: CommandBus, given: Given
) -> None:
    command_id = await retried_though_asked_to_stop(bus, given)
    await sweep(bus.pool, worker=given.registered_worker(), judge=False)
    assert (await given.command_now(command_id)).status == CommandStatus.CANCELED
    assert given.database.count("stopping") == 0


@pytest.mark.parametrize("dies", [False, True])
async def test_an_attempt_that_begins_before_the_sweep_comes_is_asked_to_stop_and_is_the_last(
    bus: CommandBus, given: Given, dies: bool
) -> None:
    command_id = await retried_though_asked_to_stop(bus, given)
    given.make_due()
    given.database.perform(claim.promote())
    worker = given.registered_worker()
    leased = given.claimed(by=worker)
    assert [one.lease.attempt for one in leased] == [2]
    renewed = given.database.perform(rescue.renew(worker=worker, settled=timedelta(0)))
    assert renewed is not None and renewed.stopping == {leased[0].id}
    if dies:
        given.died(worker)
        given.rescued()
    else:
        given.settled(leased, FAILED_ATTEMPT, delay=0.0)
    assert (await given.command_now(command_id)).status == CommandStatus.CANCELED


async def test_an_operators_retry_is_not_stopped_by_an_older_request(bus: CommandBus, given: Given) -> None:
    command_id = await given.sent()
    leased = given.claimed()
    await canceled(bus, command_id)
    given.settled(leased, "TROUBLESHOOTING", reason="PERMANENT", details='{"message": "no"}')
    await bus.troubleshooting.retry(DOMAIN, command_id)
    given.settled(given.claimed(), FAILED_ATTEMPT, delay=0.0)
    assert (await given.command_now(command_id)).status == CommandStatus.SCHEDULED
    await sweep(bus.pool, worker=given.registered_worker(), judge=False)
    assert given.database.count("stopping") == 0
    assert (await given.command_now(command_id)).status == CommandStatus.SCHEDULED


async def test_a_worker_that_missed_the_notification_hears_of_it_with_its_heartbeat(
    bus: CommandBus, given: Given
) -> None:
    begun = asyncio.Event()

    async def run(command: Command, ctx: HandlerContext) -> None:
        begun.set()
        await eventually(lambda: ctx.cancelled)
        raise RuntimeError("stopped as asked")

    given.handler("Debit", run)
    command_id = await given.sent()
    async with given.running(settings=WorkerSettings(lease_for=timedelta(seconds=3))):
        await begun.wait()
        given.database.rows(
            """INSERT INTO busload.stopping (command, attempt)
               SELECT id, 1 FROM busload.command WHERE command_id = %s""",
            command_id,
        )
        await eventually(lambda: given.database.is_at_rest())
    assert (await given.command_now(command_id)).status == CommandStatus.CANCELED


async def test_what_stands_in_line_never_begins(bus: CommandBus, given: Given) -> None:
    """It waits for the only thread, under a lease"""
    begun, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    seen: list[int] = []

    @bus.handler(DOMAIN, "Debit")
    def run(command: Command, ctx: SyncHandlerContext) -> None:
        seen.append(command.data["n"])
        loop.call_soon_threadsafe(begun.set)
        go_on.wait(60)

    given.handler("Credit")  # else no more is claimed than there are threads
    batch_id = await given.batch(2)
    settings = replace(DEAF_TO_HEARTBEATS, concurrency=2, threads=1)
    async with given.running(settings=settings):
        await begun.wait()
        await eventually(lambda: not given.database.count("queue"))
        second = (await bus.list_batch_commands(DOMAIN, batch_id))[1 - seen[0]]
        assert await canceled(bus, second.command_id) is Cancellation.ASKED_TO_STOP
        with pytest.raises(CommandCanceledError, match="canceled before it had begun"):
            await bus.wait_command(DOMAIN, second.command_id, timeout=60)
        go_on.set()
        await bus.wait_batch(DOMAIN, batch_id, timeout=60)
    assert len(seen) == 1


def plan_of(command_id: UUID) -> Plan[Cancellation]:
    return cancel.cancel(DOMAIN, command_id, reason="no", operator=None, give_up=partial(nothing_to_do))


def nothing_to_do() -> Plan[None]:
    raise AssertionError("nothing waits in troubleshooting")


async def test_cancels_and_claims_at_once_leave_every_command_in_one_place(bus: CommandBus, given: Given) -> None:
    batch_id, worker = await given.batch(200), given.registered_worker()
    ids = [one.command_id for one in await bus.list_batch_commands(DOMAIN, batch_id, limit=200)]

    def take(conn: psycopg.Connection[Any]) -> None:
        for _ in range(20):
            perform(conn, claim.claim(worker=worker, domains=[DOMAIN], limit=3, suspects=True))

    def give_up(some: list[UUID], conn: psycopg.Connection[Any]) -> None:
        for command_id in some:
            with conn.transaction():
                perform(conn, plan_of(command_id))

    at_once(bus.dsn, [take, take, *(partial(give_up, ids[n::8]) for n in (0, 3, 5))])
    given.database.check_invariants()
    given.died(worker)
    given.rescued()
    given.handler()
    await given.drained()
    assert counts(await given.batch_now(batch_id)) == (200, 125, 0, 75, 0)


async def test_a_cancel_waits_for_the_claim_that_splits_its_load(bus: CommandBus, given: Given) -> None:
    """And then asks the command to stop, since the claim has taken it"""
    batch_id, worker = await given.batch(10), given.registered_worker()
    command = (await bus.list_batch_commands(DOMAIN, batch_id))[1]
    with given.database.time_standing_still():
        given.database.perform(claim.claim(worker=worker, domains=[DOMAIN], limit=5, suspects=True))
        thread, answers = beside(bus.dsn, partial(plan_of, command.command_id))
        assert answers == []
    thread.join()
    assert answers == [Cancellation.ASKED_TO_STOP]


async def test_a_group_of_a_buffer_is_not_canceled(bus: CommandBus, given: Given) -> None:
    """Its events would be lost"""
    command_id = await given.sent()
    given.database.rows("UPDATE busload.command SET command_type = 'busload.Group'")
    with pytest.raises(InvalidOperationError, match="is a group of events"):
        await canceled(bus, command_id)
    given.database.rows("UPDATE busload.command SET command_type = 'Debit'")
