"""A batch is in the database and at the broker, whatever fails in between."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from busload import (
    BatchCommand,
    BatchNotFoundError,
    Command,
    CommandBus,
    CommandStatus,
    Dedup,
    HandlerContext,
    Settings,
    SyncCommandBus,
    SyncHandlerContext,
    TaskTracker,
    Worker,
    WorkerSettings,
)
from busload.batches import Canary
from busload.commands import claim as claim_plans
from busload.commands.claim import DeliveredClaim
from busload.commands.load import Load
from busload.dispatch import DispatchStatus, creation_state
from busload.dispatch import envelope as message
from busload.dispatch.creation_state import Outcome
from busload.dispatch.envelope import Envelope
from busload.dispatch.relay import publish_page
from busload.dispatch.strategy import DispatchName, DispatchReport
from busload.errors import (
    BatchSealedError,
    DispatchIncompleteError,
    InvalidOperationError,
    PartlyDoneError,
    Refusal,
    RefusalReason,
)
from busload.postgres.plan import perform_async
from busload.postgres.write import Write
from busload.testing.messages import receiving
from busload.transports import Message
from tests.brokers.faulty import AWAY, Crash, FaultyTransport
from tests.faces import FACES, bus_of
from tests.given import DOMAIN, Database, Given
from tests.stepped import SteppedBus

REFUSED = Refusal(RefusalReason.REFUSED, "the queue is full")
STRATEGIES = ("two_phase", "checkpoint", "optimistic")


@pytest.fixture
def transport(dsn: str) -> FaultyTransport:
    return FaultyTransport(dsn)


@pytest.fixture(params=FACES)
async def bus(
    dsn: str, settings: Settings, transport: FaultyTransport, request: pytest.FixtureRequest
) -> AsyncIterator[CommandBus]:
    """Of either face. Nothing is told of the sync one that is not true of the async one."""
    async with bus_of(request.param, dsn, transport=transport, settings=settings) as bus:
        yield bus
    assert not {"busload-publish", "busload-listen"} & {thread.name for thread in threading.enumerate()}


def commands(count: int, **options: Any) -> list[BatchCommand]:
    return [BatchCommand("Debit", data={"n": n}, **options) for n in range(count)]


async def report(bus: CommandBus, batch_id: UUID) -> DispatchReport:
    found = await bus.get_dispatch(DOMAIN, batch_id)
    assert found is not None
    return found


async def all_run_once(bus: CommandBus, database: Database, worker_settings: WorkerSettings, expected: int) -> None:
    """Whatever happened before: a recovery and a worker end it, each command has run once, and nothing is left over."""
    database.rows("UPDATE busload.outbox SET due_at = now()")  # a minute goes by: who held loads is thought dead
    seen: list[int] = []
    await bus.recover()
    transport = FaultyTransport(bus.dsn)  # of the worker's event loop
    async with CommandBus(bus.dsn, transport=transport, settings=bus.settings) as serving:

        @serving.handler(DOMAIN, "Debit")
        async def debit(command: Command, ctx: HandlerContext) -> None:
            seen.append(command.data["n"])

        serving.handler("crm", "Push")(_nothing)
        await Worker(serving, settings=worker_settings).drain()
    assert sorted(seen) == list(range(expected))
    assert database.is_at_rest()
    database.check_invariants()
    assert database.value("SELECT count(*) FROM busload.dispatch WHERE published_at IS NULL AND written = total") == 0


async def test_all_commands_are_in_the_database_and_at_the_broker(
    bus: CommandBus, transport: FaultyTransport, database: Database
) -> None:
    """Ids in input order, published at a time with its zone"""
    batch_id = await bus.create_batch(DOMAIN, commands(10_000))
    told = await report(bus, batch_id)
    assert (told.strategy, told.status) == ("two_phase", "success")
    assert (told.database_tasks, told.queued_tasks, told.retry_needed) == (10_000, 10_000, False)
    assert told.published_at is not None and told.published_at.tzinfo is not None
    assert transport.commands == database.count("command") == 10_000
    loads = {load for envelope in transport.envelopes for load in envelope.loads}
    assert len(loads) == len(transport.confirmed) == 100
    found = await bus.list_batch_commands(DOMAIN, batch_id, limit=10_000)
    assert [command.data["n"] for command in found] == list(range(10_000))
    assert {command.status for command in found} == {CommandStatus.PENDING}
    assert database.value("SELECT count(*) FROM busload.queue WHERE published_at IS NULL") == 0


@pytest.mark.parametrize("strategy", ["two_phase", "checkpoint"])
async def test_nothing_is_published_before_it_is_committed(
    bus: CommandBus, transport: FaultyTransport, database: Database, strategy: DispatchName
) -> None:
    """Others see the rows, as PENDING_QUEUE, and no transaction is open"""
    seen: list[tuple[Any, ...]] = []

    async def look() -> None:
        seen.append(
            (
                database.rows("SELECT DISTINCT status FROM busload.command_status"),
                database.value(
                    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'"
                ),
            )
        )

    transport.before = look
    await bus.create_batch(DOMAIN, commands(30), dispatch=strategy)
    assert seen == [([("PENDING_QUEUE",)], 0)]


@pytest.mark.parametrize("strategy", [*STRATEGIES, "relay"])
async def test_an_error_of_the_database_in_the_first_phase_leaves_nothing(
    bus: CommandBus, transport: FaultyTransport, database: Database, strategy: DispatchName
) -> None:
    """It comes through as it is; the broker has heard nothing"""
    before = database.everything()
    database.rows("ALTER TABLE busload.dispatch ADD CONSTRAINT never CHECK (total < 0) NOT VALID")
    with pytest.raises(psycopg.errors.CheckViolation):
        await bus.create_batch(DOMAIN, commands(30), dispatch=strategy)
    assert database.everything() == before
    assert not transport.tried


async def test_what_the_broker_did_not_confirm_is_all_that_is_repeated(
    bus: CommandBus, transport: FaultyTransport, database: Database, worker_settings: WorkerSettings
) -> None:
    transport.refuse(REFUSED, 3, 7)
    batch_id = await bus.create_batch(DOMAIN, commands(1000))
    told = await report(bus, batch_id)
    assert (told.status, told.database_tasks, told.queued_tasks) == ("partial_success", 1000, 800)
    assert (told.retry_needed, told.error, told.rounds) == (True, "REFUSED: the queue is full", 1)
    assert (told.retry_tasks, told.recovery_possible, told.recovery_scheduled) == (200, True, True)
    statuses = dict(database.rows("SELECT status, count(*) FROM busload.command_status GROUP BY 1"))
    assert statuses == {"PENDING": 800, "PENDING_RETRY": 200}

    transport.mend()
    await all_run_once(bus, database, worker_settings, 1000)
    assert transport.commands == 1000
    told = await report(bus, batch_id)
    assert (told.status, told.retry_needed, told.queued_tasks) == ("recovered", False, 1000)


async def test_a_broker_that_is_away_loses_nothing_and_fails_nothing(
    bus: CommandBus,
    transport: FaultyTransport,
    database: Database,
    worker_settings: WorkerSettings,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Queued_tasks is 0; one line says so"""
    transport.refuse(AWAY)
    with caplog.at_level(logging.WARNING):
        batch_id = await bus.create_batch(DOMAIN, commands(2500))
    told = await report(bus, batch_id)
    assert (told.status, told.database_tasks, told.queued_tasks) == ("partial_success", 2500, 0)
    assert (told.retry_needed, told.error) == (True, "UNREACHABLE: nobody answers")
    [line] = [record.getMessage() for record in caplog.records]
    assert "did not confirm 2,500 commands" in line and "UNREACHABLE" in line
    transport.mend()
    await all_run_once(bus, database, worker_settings, 2500)


async def test_a_mark_that_fails_is_a_warning_and_moves_nothing_backwards(
    bus: CommandBus, transport: FaultyTransport, database: Database, worker_settings: WorkerSettings
) -> None:
    """What workers have taken meanwhile stays theirs; the rest is published again"""
    database.rows("CREATE FUNCTION never() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'no space'; END$$")
    database.rows("CREATE TRIGGER never BEFORE DELETE ON busload.outbox EXECUTE FUNCTION never()")
    batch_id = await bus.create_batch(DOMAIN, commands(50))
    told = await report(bus, batch_id)
    assert (told.status, told.error) == ("success_with_warning", None)
    assert told.warning is not None and "no space" in told.warning
    assert (told.database_tasks, told.queued_tasks, told.retry_tasks, told.retry_needed) == (50, 50, 0, False)
    database.rows("DROP TRIGGER never ON busload.outbox")
    await all_run_once(bus, database, worker_settings, 50)
    assert (await report(bus, batch_id)).status == "success_with_warning"


async def test_a_relay_that_was_faster_than_its_creator_has_the_last_word(
    bus: CommandBus, transport: FaultyTransport, database: Database
) -> None:
    """The creator writes down `partial_success` when the rest was published already: it stays `recovered`"""
    transport.refuse(AWAY)
    batch_id = await bus.create_batch(DOMAIN, commands(3))
    transport.mend()
    await bus.recover()
    late = Outcome(DispatchStatus.PARTIAL_SUCCESS, True, "UNREACHABLE", None, 1.0, 2.0, 3.0, 6.0)
    database.perform(creation_state.finish(batch_id, late))
    told = await report(bus, batch_id)
    assert (told.status, told.error, told.total_ms) == ("recovered", "UNREACHABLE", 6.0)


@pytest.mark.parametrize(
    ("late", "retry_needed", "expected"),
    [
        ("success", False, "success"),
        ("success_with_warning", False, "success_with_warning"),
        ("partial_success", False, "success"),
        ("partial_success", True, "recovered"),
        ("failed_needs_recovery", True, "recovered"),
    ],
)
async def test_a_creation_that_is_closed_lacks_nothing_any_more(
    bus: CommandBus, database: Database, late: str, retry_needed: bool, expected: str
) -> None:
    """Whatever its creator has seen before: only whether it needed help is kept"""
    batch_id = await bus.create_batch(DOMAIN, commands(3))
    outcome = Outcome(DispatchStatus(late), retry_needed, None, None, 1.0, 2.0, 3.0, 6.0)
    database.perform(creation_state.finish(batch_id, outcome))
    assert (await report(bus, batch_id)).status == expected


async def test_what_is_taken_back_after_it_was_closed_is_closed_again(
    bus: CommandBus, transport: FaultyTransport, database: Database, worker_settings: WorkerSettings
) -> None:
    """Optimistic: nothing was in the outbox when a sweep came by, then the broker refused"""

    async def sweep() -> None:
        assert database.perform(creation_state.close()) == 1

    transport.before = sweep
    transport.refuse(AWAY)
    batch_id = await bus.create_batch(DOMAIN, commands(300), dispatch="optimistic")
    told = await report(bus, batch_id)
    assert (told.status, told.published_at, told.queued_tasks) == ("failed_needs_recovery", None, 0)
    transport.before = None
    transport.mend()
    await all_run_once(bus, database, worker_settings, 300)
    told = await report(bus, batch_id)
    assert told.status == "recovered" and told.published_at is not None


async def test_two_relays_that_mark_the_last_loads_at_once_close_the_creation(
    dsn: str, transport: FaultyTransport
) -> None:
    """Neither sees in its transaction what the other has moved"""
    sent = [BatchCommand("Debit", priority=priority) for priority in (1, 2)]
    bus = await CommandBus(dsn, transport=transport).open()
    batch_id = await bus.create_batch(DOMAIN, sent, dispatch="relay")
    both_have_marked = asyncio.Barrier(2)

    async def relay() -> int:
        calls = 0

        async def perform(plan: Any) -> Any:
            nonlocal calls
            calls += 1
            async with bus.pool.connection() as conn, conn.transaction():
                done = await perform_async(conn, plan)
                if calls == 2:
                    await both_have_marked.wait()
                return done

        return (await publish_page(bus.publisher, perform, uuid4(), 1)).ready

    async with asyncio.timeout(30):
        assert list(await asyncio.gather(relay(), relay())) == [1, 1]
    told = await report(bus, batch_id)
    assert told.status == "success" and told.published_at is not None
    await bus.close()


async def test_one_batch_takes_as_many_messages_as_it_needs(dsn: str, transport: FaultyTransport) -> None:
    """250 commands in messages of up to 100, and in one statement of the database"""
    for size, expected in ((100, [100, 100, 50]), (1, [1] * 250)):
        transport.confirmed.clear()
        async with CommandBus(dsn, transport=transport, settings=Settings(envelope_size=size)) as bus:
            await bus.create_batch(DOMAIN, commands(250))
        assert [envelope.commands for envelope in transport.envelopes] == expected


async def test_a_message_per_command_says_what_foreign_readers_need(dsn: str, transport: FaultyTransport) -> None:
    """Task id, parent job, type, parameters, stage"""
    job_id = "import-7"
    async with CommandBus(dsn, transport=transport, settings=Settings(message_per_command=True)) as bus:
        sent = [BatchCommand("Debit", uuid4(), {"cents": 5}), BatchCommand("Credit", uuid4(), {"cents": 7})]
        await bus.create_batch(DOMAIN, sent, job_id=job_id, stage=3)
    bodies = [json.loads(each.body) for each in transport.confirmed]
    assert [each.queue for each in transport.confirmed] == ["busload.payments"] * 2
    assert [(b["task_id"], b["task_type"], b["parameters"]) for b in bodies] == [
        (str(command.command_id), command.command_type, command.data) for command in sent
    ]
    assert {(b["parent_job_id"], b["stage"]) for b in bodies} == {("import-7", 3)}


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_each_phase_and_each_creation_is_logged(
    bus: CommandBus, caplog: pytest.LogCaptureFixture, strategy: DispatchName
) -> None:
    """One JSON line per creation, and the same figures in the report"""
    job_id = uuid4()
    with caplog.at_level(logging.DEBUG, "busload"):
        batch_id = await bus.create_batch(DOMAIN, commands(20), dispatch=strategy, job_id=job_id, stage="3")
    said = [record.getMessage() for record in caplog.records]
    for phase in ("writing 20 commands", "wrote 20 commands", "publishing 1 load", "20 commands confirmed", "marking"):
        assert any(phase in line for line in said), phase
    [event] = [json.loads(line) for line in said if line.startswith("{")]
    assert (event["event"], event["TaskCount"], event["batch_size"]) == ("BatchTaskCreation", 20, 20)
    assert (event["job_id"], event["stage"], event["strategy"]) == (str(job_id), "3", strategy)
    assert event["retry_needed"] is False
    told = await report(bus, batch_id)
    for name in ("insert_ms", "send_ms", "mark_ms", "total_ms"):
        assert event[name] == getattr(told, name)
    assert event["ElapsedMs"] == event["total_ms"] >= event["insert_ms"] > 0
    assert (told.job_id, told.stage) == (job_id, "3")


async def test_checkpoints_are_transactions_of_their_own(
    bus: CommandBus, transport: FaultyTransport, database: Database, worker_settings: WorkerSettings
) -> None:
    """The last one is short and counts as it is; names are text"""
    totals: list[tuple[int, bool]] = []

    async def look() -> None:
        totals.append(database.rows("SELECT total_count, sealed_at IS NOT NULL FROM busload.batch")[0])

    transport.before = look
    batch_id = await bus.create_batch(DOMAIN, iter(commands(2500)), dispatch="checkpoint")
    assert totals == [(1000, False), (2000, False), (2500, True)]
    told = await report(bus, batch_id)
    assert (told.status, told.tasks_committed, told.tasks_failed) == ("success", 2500, 0)
    assert told.checkpoints == tuple(f"{batch_id}-cp-{number}" for number in (1, 2, 3))
    assert told.failed_checkpoint is None
    assert database.rows("SELECT commands FROM busload.checkpoint ORDER BY checkpoint") == [(1000,), (1000,), (500,)]
    transport.before = None
    await all_run_once(bus, database, worker_settings, 2500)


@pytest.mark.parametrize("given", [list, iter], ids=["list", "iterator"])
async def test_the_first_checkpoint_that_fails_stops_and_the_same_call_goes_on(
    bus: CommandBus,
    transport: FaultyTransport,
    database: Database,
    worker_settings: WorkerSettings,
    given: Callable[[list[BatchCommand]], Any],
) -> None:
    """Same ids, nothing twice; the failed one waits in the outbox, earlier ones run"""
    sent = [BatchCommand("Debit", uuid4(), {"n": n}) for n in range(50)]
    transport.refuse(AWAY, 2)
    with pytest.raises(DispatchIncompleteError, match=r"30 commands of .* are written") as stopped:
        await bus.create_batch(DOMAIN, given(sent), dispatch="checkpoint", checkpoint_size=10)
    told, batch_id = stopped.value.report, stopped.value.batch_id
    assert str(batch_id) in str(stopped.value)
    assert told == await report(bus, batch_id)
    assert (told.status, told.tasks_committed, told.recovery_possible) == ("partial_success", 30, True)
    assert told.tasks_failed == (20 if given is list else None)
    assert told.checkpoints == (f"{batch_id}-cp-1", f"{batch_id}-cp-2")
    assert (told.failed_checkpoint, told.queued_tasks) == (f"{batch_id}-cp-3", 20)
    batch = await bus.get_batch(DOMAIN, batch_id)
    assert batch is not None and (batch.total_count, batch.status.final) == (30, False)

    same = await bus.create_batch(DOMAIN, given(sent), batch_id=batch_id, dispatch="checkpoint", checkpoint_size=7)
    assert same == batch_id
    again = await bus.create_batch(DOMAIN, given(sent), batch_id=batch_id, dispatch="checkpoint")
    assert again == batch_id
    assert database.count("command") == 50
    found = await bus.list_batch_commands(DOMAIN, batch_id)
    assert {command.command_id for command in found} == {command.command_id for command in sent}
    await all_run_once(bus, database, worker_settings, 50)
    told = await report(bus, batch_id)
    assert (told.status, told.total_tasks, told.tasks_failed) == ("recovered", 50, 0)
    assert (told.failed_checkpoint, len(told.checkpoints)) == (None, 6)
    batch = await bus.get_batch(DOMAIN, batch_id)
    assert batch is not None and batch.status == "COMPLETED"


async def test_what_is_not_the_same_input_is_not_resumed(
    bus: CommandBus, transport: FaultyTransport, database: Database
) -> None:
    sent = [BatchCommand("Debit", uuid4(), {"n": n}) for n in range(40)]
    transport.refuse(AWAY, 2)
    with pytest.raises(DispatchIncompleteError) as stopped:
        await bus.create_batch(DOMAIN, iter(sent), dispatch="checkpoint", checkpoint_size=10)
    before, batch_id = database.everything(), stopped.value.batch_id
    other = [*sent[:29], BatchCommand("Debit", uuid4()), *sent[30:]]
    for wrong, why in (
        (iter(sent[:20]), "has 30 commands so far, found 20"),
        (iter(sent[:30]), "has more than 30 commands, found no more"),
        (iter(other), f"has command {sent[29].command_id} at position 29, found {other[29].command_id}"),
    ):
        with pytest.raises(InvalidOperationError, match="was begun with other commands") as refused:
            await bus.create_batch(DOMAIN, wrong, batch_id=batch_id, dispatch="checkpoint", checkpoint_size=10)
        assert why in str(refused.value)
    assert database.everything() == before
    await bus.create_batch(DOMAIN, sent, batch_id=batch_id, dispatch="checkpoint")
    for count in (39, 41):
        with pytest.raises(InvalidOperationError, match="was begun with other commands"):
            await bus.create_batch(DOMAIN, commands(count), batch_id=batch_id, dispatch="checkpoint")
    with pytest.raises(InvalidOperationError, match="already a batch"):
        await bus.create_batch(DOMAIN, commands(40), batch_id=batch_id)
    plain = await bus.create_batch(DOMAIN, commands(3))
    with pytest.raises(InvalidOperationError, match="already a batch"):
        await bus.create_batch(DOMAIN, commands(3), batch_id=plain, dispatch="checkpoint")
    assert database.count("command") == 43

    transport.tried.clear()
    with pytest.raises(DispatchIncompleteError) as stopped:
        await bus.create_batch(DOMAIN, commands(40), dispatch="checkpoint", checkpoint_size=10)
    for count in (35, 45):
        with pytest.raises(InvalidOperationError, match=f"has 40 commands, found {count}"):
            await bus.create_batch(DOMAIN, commands(count), batch_id=stopped.value.batch_id, dispatch="checkpoint")
    assert database.count("command") == 73


async def test_two_that_resume_at_once_write_each_command_once(
    bus: CommandBus, database: Database, worker_settings: WorkerSettings
) -> None:
    """Also when both begin at the beginning"""
    batch_id, sent = uuid4(), commands(60)
    calls = [
        bus.create_batch(DOMAIN, iter(sent), batch_id=batch_id, dispatch="checkpoint", checkpoint_size=size)
        for size in (3, 4, 5)
    ]
    assert await asyncio.gather(*calls) == [batch_id] * 3
    assert database.count("command") == 60
    await all_run_once(bus, database, worker_settings, 60)


async def test_an_iterator_is_read_as_it_is_needed_and_may_fail_half_way(
    bus: CommandBus, transport: FaultyTransport, database: Database, worker_settings: WorkerSettings
) -> None:
    """Bounded memory; what it raises is the cause, and the batch can be gone on with"""
    read, most = 0, 0

    async def look() -> None:
        nonlocal most
        most = max(most, read - database.count("command"))

    def lines(broken: bool) -> Iterator[BatchCommand]:
        nonlocal read
        read = 0
        for n in range(35):
            if broken and n == 25:
                raise OSError("the file ends here")
            read += 1
            yield BatchCommand("Debit", data={"n": n})

    transport.before = look
    with pytest.raises(DispatchIncompleteError, match="the file ends here") as stopped:
        await bus.create_batch(DOMAIN, lines(broken=True), dispatch="checkpoint", checkpoint_size=10)
    assert isinstance(stopped.value.__cause__, OSError)
    assert most == 1
    batch_id = stopped.value.batch_id
    wrong = [*lines(broken=False)][:25] + [BatchCommand("not a name")] * 10
    with pytest.raises(DispatchIncompleteError, match=r"INVALID_NAME at \[25\]"):
        await bus.create_batch(DOMAIN, iter(wrong), batch_id=batch_id, dispatch="checkpoint", checkpoint_size=10)
    await bus.create_batch(DOMAIN, lines(broken=False), batch_id=batch_id, dispatch="checkpoint", checkpoint_size=10)
    transport.before = None
    await all_run_once(bus, database, worker_settings, 35)


async def test_a_database_that_fails_half_way_is_reported_as_far_as_is_known(
    bus: CommandBus, database: Database, worker_settings: WorkerSettings
) -> None:
    """The checkpoint is rolled back; what came before stays, and the same call goes on"""
    database.rows("CREATE FUNCTION never() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'no space'; END$$")
    database.rows(
        "CREATE TRIGGER never BEFORE UPDATE ON busload.dispatch FOR EACH ROW WHEN (OLD.written >= 20)"
        " EXECUTE FUNCTION never()"
    )
    with pytest.raises(DispatchIncompleteError, match="no space") as stopped:
        await bus.create_batch(DOMAIN, commands(45), dispatch="checkpoint", checkpoint_size=10)
    assert isinstance(stopped.value.__cause__, psycopg.Error)
    told, batch_id = stopped.value.report, stopped.value.batch_id
    assert (told.status, told.tasks_committed, told.tasks_failed) == ("partial_success", 20, 25)
    assert told.checkpoints == (f"{batch_id}-cp-1", f"{batch_id}-cp-2")
    assert (told.queued_tasks, told.recovery_possible, told.recovery_scheduled) == (20, True, False)
    assert database.count("command") == 20
    database.rows("DROP TRIGGER never ON busload.dispatch")
    await bus.create_batch(DOMAIN, commands(45), batch_id=batch_id, dispatch="checkpoint")
    await all_run_once(bus, database, worker_settings, 45)


async def test_a_batch_that_was_canceled_half_way_is_not_gone_on_with(
    bus: CommandBus, transport: FaultyTransport, database: Database
) -> None:
    transport.refuse(AWAY, 1)
    with pytest.raises(DispatchIncompleteError) as stopped:
        await bus.create_batch(DOMAIN, commands(30), dispatch="checkpoint", checkpoint_size=10)
    assert (await report(bus, stopped.value.batch_id)).recovery_possible
    assert await bus.cancel_batch(DOMAIN, stopped.value.batch_id, reason="no") == 20
    with pytest.raises(BatchSealedError, match="was canceled before all its commands were written"):
        await bus.create_batch(DOMAIN, commands(30), batch_id=stopped.value.batch_id, dispatch="checkpoint")
    told = await report(bus, stopped.value.batch_id)
    assert (told.status, told.tasks_failed, told.given_up, told.recovery_possible) == (
        "partial_success",
        10,
        True,
        False,
    )
    database.rows("UPDATE busload.dispatch SET status = 'pending'")  # as a creator that died leaves it
    assert (await report(bus, stopped.value.batch_id)).status == "partial_success"
    database.check_invariants()
    assert database.is_at_rest()


@pytest.mark.parametrize("given", [list, iter], ids=["list", "iterator"])
async def test_a_batch_that_is_canceled_meanwhile_ends_its_creation(
    bus: CommandBus, transport: FaultyTransport, database: Database, given: Callable[[list[BatchCommand]], Any]
) -> None:
    """It is closed, promises nothing, and the same call says why it is not gone on with"""
    batch_id = uuid4()
    options: dict[str, Any] = {"batch_id": batch_id, "dispatch": "checkpoint", "checkpoint_size": 10}

    async def cancel() -> None:
        await bus.cancel_batch(DOMAIN, batch_id, reason="no")

    transport.before = cancel
    for _ in range(2):
        with pytest.raises(BatchSealedError, match="was canceled before all its commands were written"):
            await bus.create_batch(DOMAIN, given(commands(30)), **options)
        told = await report(bus, batch_id)
        assert (told.status, told.database_tasks, told.queued_tasks) == ("partial_success", 10, 10)
        assert told.published_at is not None and told.error is not None and "was canceled" in told.error
        assert (told.recovery_possible, told.failed_checkpoint) == (False, None)
    assert database.is_at_rest()


@pytest.mark.parametrize("how", ["held", "canceled", "put off"])
async def test_a_report_does_not_wait_for_what_will_never_be_published(
    bus: CommandBus, transport: FaultyTransport, how: str
) -> None:
    """Held, canceled or put off before the relay comes: PostgreSQL delivers what still runs"""
    for_later = commands(1)
    batch_id = await bus.create_batch(DOMAIN, for_later, dispatch="relay")
    assert (await report(bus, batch_id)).status == "pending"
    if how == "held":
        await bus.hold_batch(DOMAIN, batch_id, reason="lunch")
    elif how == "canceled":
        await bus.cancel_batch(DOMAIN, batch_id, reason="no")
    else:
        [command] = await bus.list_batch_commands(DOMAIN, batch_id)
        await bus.reschedule_command(DOMAIN, command.command_id, datetime.now(UTC) + timedelta(hours=1))
    told = await report(bus, batch_id)
    assert (told.status, told.retry_needed) == ("success", False)
    await bus.recover()
    assert (await report(bus, batch_id)).status == "success"


async def test_what_waits_for_a_canary_was_not_published(
    bus: CommandBus, transport: FaultyTransport, database: Database, worker_settings: WorkerSettings
) -> None:
    batch_id = await bus.create_batch(DOMAIN, commands(100), canary=Canary(10))
    assert (await report(bus, batch_id)).queued_tasks == 0
    await bus.recover()
    told = await report(bus, batch_id)
    assert (told.status, told.queued_tasks, told.database_tasks) == ("success", 10, 100)
    await all_run_once(bus, database, worker_settings, 100)
    assert (await report(bus, batch_id)).queued_tasks == 100


async def test_a_creation_that_stopped_and_was_canceled_is_closed_by_a_recovery(
    bus: CommandBus, transport: FaultyTransport
) -> None:
    transport.refuse(AWAY, 1)
    with pytest.raises(DispatchIncompleteError) as stopped:
        await bus.create_batch(DOMAIN, commands(30), dispatch="checkpoint", checkpoint_size=10)
    await bus.cancel_batch(DOMAIN, stopped.value.batch_id, reason="no")
    await bus.recover()
    told = await report(bus, stopped.value.batch_id)
    assert (told.status, told.recovery_possible) == ("partial_success", False)
    assert told.published_at is not None


@pytest.mark.parametrize("lost", ["checkpoint", "batch"])
async def test_a_database_that_fell_behind_is_reported_and_not_written_to_for_ever(
    bus: CommandBus, transport: FaultyTransport, database: Database, worker_settings: WorkerSettings, lost: str
) -> None:
    """As after a failover to a standby that lacks a checkpoint, or all of it; the same call goes on from there"""
    batch_id, sent = uuid4(), [BatchCommand("Debit", uuid4(), {"n": n}) for n in range(40)]
    options: dict[str, Any] = {"batch_id": batch_id, "dispatch": "checkpoint", "checkpoint_size": 10}
    kept = 10 if lost == "checkpoint" else 0

    async def lose() -> None:
        if database.count("command") == 20:
            [(first,)] = database.rows("SELECT id FROM busload.command ORDER BY id OFFSET %s LIMIT 1", kept)
            for table, column in (("outbox", "lo"), ("queue", "lo"), ("command", "id")):
                database.rows(f"DELETE FROM busload.{table} WHERE {column} >= %s", first)
            database.rows("DELETE FROM busload.checkpoint WHERE checkpoint > %s", kept // 10)
            database.rows("UPDATE busload.dispatch SET written = %s", kept)
            database.rows("UPDATE busload.batch SET total_count = %s", kept)
            if not kept:
                database.rows("DELETE FROM busload.batch")

    transport.before = lose
    expected = InvalidOperationError if kept else BatchNotFoundError
    with pytest.raises(expected, match="found 10 commands, wanted 20" if kept else "There is no batch"):
        async with asyncio.timeout(30):
            await bus.create_batch(DOMAIN, sent, **options)
    assert database.count("command") == kept
    transport.before = None
    await bus.create_batch(DOMAIN, sent, **options)
    await all_run_once(bus, database, worker_settings, 40)


async def test_optimistic_takes_back_only_what_was_refused(
    bus: CommandBus, transport: FaultyTransport, database: Database, worker_settings: WorkerSettings
) -> None:
    """Ready at once; the refused indexes become PENDING_RETRY"""
    seen: list[Any] = []

    async def look() -> None:
        seen.append(database.rows("SELECT DISTINCT status FROM busload.command_status"))

    transport.before = look
    whole = await bus.create_batch(DOMAIN, commands(500), dispatch="optimistic")
    assert seen == [[("PENDING",)]]
    told = await report(bus, whole)
    assert (told.status, told.total_tasks, told.queued_tasks) == ("success", 500, 500)
    await bus.cancel_batch(DOMAIN, whole, reason="enough of it")

    transport.before = None
    transport.tried.clear()
    transport.refuse(REFUSED, 0, 4, 9)
    batch_id = await bus.create_batch(DOMAIN, commands(1000), dispatch="optimistic")
    told = await report(bus, batch_id)
    assert (told.status, told.total_tasks, told.queued_tasks, told.retry_tasks) == ("partial_success", 1000, 700, 300)
    again = database.rows("SELECT lo & 1023, hi & 1023, error FROM busload.outbox ORDER BY lo")
    assert again == [(0, 99, "the queue is full"), (400, 499, "the queue is full"), (900, 999, "the queue is full")]
    transport.mend()
    await all_run_once(bus, database, worker_settings, 1000)
    assert (await report(bus, batch_id)).status == "recovered"


async def test_optimistic_takes_back_what_was_refused_though_the_first_try_has_failed(
    bus: CommandBus, transport: FaultyTransport, database: Database, worker_settings: WorkerSettings
) -> None:
    """The report would say that all of it was published after all, and nobody would publish the refused ones"""
    database.rows("CREATE SEQUENCE tries")
    database.rows(
        "CREATE FUNCTION once() RETURNS trigger LANGUAGE plpgsql AS"
        " $$BEGIN IF nextval('public.tries') = 1 THEN RAISE 'no space'; END IF; RETURN NULL; END$$"
    )
    database.rows("CREATE TRIGGER once BEFORE DELETE ON busload.queue EXECUTE FUNCTION once()")
    transport.refuse(REFUSED, 0, 4, 9)
    batch_id = await bus.create_batch(DOMAIN, commands(1000), dispatch="optimistic")
    told = await report(bus, batch_id)
    assert told.warning is not None and "no space" in told.warning
    assert (told.status, told.queued_tasks, told.retry_tasks) == ("partial_success", 700, 300)
    statuses = dict(database.rows("SELECT status, count(*) FROM busload.command_status GROUP BY 1"))
    assert statuses == {"PENDING": 700, "PENDING_RETRY": 300}
    transport.mend()
    await all_run_once(bus, database, worker_settings, 1000)
    assert (await report(bus, batch_id)).status == "recovered"


async def test_optimistic_with_no_broker_at_all_recovers(
    bus: CommandBus, transport: FaultyTransport, database: Database, worker_settings: WorkerSettings
) -> None:
    """Nothing needs to be scheduled for it, the relay finds it"""
    transport.refuse(AWAY)
    batch_id = await bus.create_batch(DOMAIN, commands(1200), dispatch="optimistic")
    told = await report(bus, batch_id)
    assert (told.status, told.database_tasks, told.queued_tasks) == ("failed_needs_recovery", 1200, 0)
    assert told.recovery_scheduled
    transport.mend()
    await all_run_once(bus, database, worker_settings, 1200)
    told = await report(bus, batch_id)
    assert (told.status, told.recovery_scheduled) == (DispatchStatus.RECOVERED, False)


class Dying(SteppedBus):
    """A bus whose process ends before a step: a transaction, or a message to the broker."""

    steps = 0
    last = 10**6

    def step(self) -> None:
        if self.steps == self.last:
            raise Crash
        self.steps += 1

    async def before(self) -> None:
        self.step()


# Write, ask which database this is, publish, mark, write down how it went, close; in checkpoints write, publish and
# mark three times.
STEPS = {"two_phase": 6, "checkpoint": 12, "optimistic": 6}


@pytest.mark.parametrize("strategy", STEPS)
async def test_a_crash_anywhere_is_healed(
    dsn: str, settings: Settings, database: Database, worker_settings: WorkerSettings, strategy: DispatchName
) -> None:
    """The process dies before any step of any strategy; all that was accepted runs once"""
    for step in range(STEPS[strategy]):
        batch_id, sent = uuid4(), [BatchCommand("Debit", uuid4(), {"n": n}) for n in range(25)]
        options: dict[str, Any] = {"batch_id": batch_id, "dispatch": strategy, "checkpoint_size": 10}
        dying = Dying(dsn, transport=FaultyTransport(dsn), settings=settings)
        assert isinstance(dying.transport, FaultyTransport)
        dying.last, dying.transport.before = step, dying.before
        async with dying:
            with pytest.raises(Crash):
                await dying.create_batch(DOMAIN, sent, **options)
        written = database.value("SELECT count(*) FROM busload.command WHERE batch_id = %s", batch_id)
        checkpoints = min(25, 10 * ((max(step - 1, 1) + 2) // 3))
        assert written == (0 if step == 0 else checkpoints if strategy == "checkpoint" else 25)

        async with CommandBus(dsn, transport=FaultyTransport(dsn), settings=settings) as bus:
            if strategy == "checkpoint" or not written:
                await bus.create_batch(DOMAIN, sent, **options)
            await all_run_once(bus, database, worker_settings, 25)
            assert (await report(bus, batch_id)).published_at is not None


async def test_what_a_crash_left_of_checkpoints_runs_without_being_resumed(
    dsn: str, settings: Settings, database: Database, worker_settings: WorkerSettings
) -> None:
    """But the batch, which is not whole, does not complete"""
    batch_id = uuid4()
    dying = Dying(dsn, transport=FaultyTransport(dsn), settings=settings)
    dying.last = 5
    async with dying:
        with pytest.raises(Crash):
            await dying.create_batch(DOMAIN, commands(25), batch_id=batch_id, dispatch="checkpoint", checkpoint_size=10)
    async with CommandBus(dsn, transport=FaultyTransport(dsn), settings=settings) as bus:
        await all_run_once(bus, database, worker_settings, 20)
        batch = await bus.get_batch(DOMAIN, batch_id)
        assert batch is not None and (batch.completed_count, batch.status.final) == (20, False)
        told = await report(bus, batch_id)
        assert (told.database_tasks, told.queued_tasks, told.tasks_failed) == (20, 20, 5)


async def test_rounds_are_counted_and_nothing_expires(
    bus: CommandBus, transport: FaultyTransport, database: Database, worker_settings: WorkerSettings
) -> None:
    """After any time and any number of rounds it is published"""
    transport.refuse(AWAY)
    batch_id = await bus.create_batch(DOMAIN, commands(10))
    for rounds in range(1, 6):
        [entry] = await bus.outbox.list()
        assert (entry.commands, entry.rounds, entry.reason, entry.error) == (
            10,
            rounds,
            "UNREACHABLE",
            "nobody answers",
        )
        assert (await report(bus, batch_id)).rounds == rounds
        database.rows("UPDATE busload.outbox SET since = since - interval '31 minutes', due_at = now()")
        assert (await bus.recover()).relayed == 0
    [command] = await bus.list_batch_commands(DOMAIN, batch_id, limit=1)
    assert command.status == CommandStatus.PENDING_RETRY
    transport.mend()
    assert (await bus.recover()).relayed == 10
    [command] = await bus.list_batch_commands(DOMAIN, batch_id, limit=1)
    assert command.status == CommandStatus.PENDING
    await all_run_once(bus, database, worker_settings, 10)


def test_the_outbox_is_indexed_by_batch_and_by_failure(database: Database) -> None:
    found = "\n".join(text for (text,) in database.rows("SELECT indexdef FROM pg_indexes WHERE tablename = 'outbox'"))
    assert "(batch_id, rounds)" in found
    assert "WHERE (rounds > 0)" in found


async def test_an_operator_lets_postgresql_deliver(
    bus: CommandBus, transport: FaultyTransport, database: Database, worker_settings: WorkerSettings
) -> None:
    """Busload never gives up; an operator can do without the broker."""
    transport.refuse(AWAY)
    batch_id = await bus.create_batch(DOMAIN, commands(30))
    other = await bus.send("crm", "Push")
    assert await bus.outbox.reroute(batch_id=batch_id, dry_run=True) == 30
    assert await bus.outbox.reroute(domain="crm", dry_run=True) == 0
    assert await bus.outbox.reroute(domain="crm", failed_only=False, dry_run=True) == 1
    assert await bus.outbox.reroute(batch_id=batch_id, operator="rosa") == 30
    assert await bus.outbox.reroute(batch_id=batch_id, operator="rosa") == 0
    [command] = await bus.list_batch_commands(DOMAIN, batch_id, limit=1)
    assert command.status == CommandStatus.PENDING
    [event] = [e for e in await bus.get_audit_trail(DOMAIN, command.command_id) if e.type == "REROUTED"]
    assert event.operator == "rosa"
    assert (await report(bus, batch_id)).status == "recovered"
    assert await bus.outbox.reroute(domain="crm", failed_only=False) == 1
    found = await bus.get_command("crm", other.command_id)
    assert found is not None and found.status == CommandStatus.PENDING
    await all_run_once(bus, database, worker_settings, 30)


async def _nothing(command: Any, ctx: Any) -> None:
    pass


@pytest.mark.parametrize("how", ["conn", "dedup"])
async def test_who_joins_a_transaction_leaves_it_to_the_relay(
    dsn: str,
    bus: CommandBus,
    transport: FaultyTransport,
    database: Database,
    worker_settings: WorkerSettings,
    how: str,
) -> None:
    """Nothing is published before the commit, nor after a rollback"""
    if how == "conn":
        with psycopg.connect(dsn) as conn:  # which both faces can join
            await bus.create_batch(DOMAIN, commands(7), conn=conn)
            conn.rollback()
            batch_id = await bus.create_batch(DOMAIN, commands(5), conn=conn)
    else:
        sent = [BatchCommand("Debit", data={"n": n}, task_key=f"t{n}") for n in range(5)]
        batch_id = await bus.create_batch(DOMAIN, [*sent, sent[0]], dedup=Dedup())
        nothing_left = await bus.create_batch(DOMAIN, sent, dedup=Dedup())
        assert await bus.get_dispatch(DOMAIN, nothing_left) is None
    assert not transport.tried
    told = await report(bus, batch_id)
    assert (told.strategy, told.status, told.database_tasks, told.queued_tasks) == ("relay", "pending", 5, 0)
    await all_run_once(bus, database, worker_settings, 5)
    assert transport.commands == 5
    assert (await report(bus, batch_id)).status == "success"


async def test_a_worker_runs_on_a_sync_bus_that_publishes_and_so_do_its_handlers(
    dsn: str, settings: Settings, worker_settings: WorkerSettings, database: Database
) -> None:
    """Each event loop has a transport of its own, made from the URL."""
    began = {thread.name for thread in threading.enumerate()}
    created: list[UUID] = []
    with SyncCommandBus(dsn, transport=dsn, settings=settings) as bus:

        @bus.handler(DOMAIN, "Split")
        def split(command: Command, ctx: SyncHandlerContext) -> None:
            created.append(ctx.bus.create_batch(DOMAIN, commands(5)))

        @bus.handler(DOMAIN, "Debit")
        async def debit(command: Command, ctx: HandlerContext) -> None:
            pass

        created.append(await asyncio.to_thread(bus.create_batch, DOMAIN, [*commands(20), BatchCommand("Split")]))
        await Worker(bus, settings=worker_settings).drain()
        for batch_id, total in zip(created, (21, 5), strict=True):
            told, batch = bus.get_dispatch(DOMAIN, batch_id), bus.get_batch(DOMAIN, batch_id)
            assert told is not None and (told.strategy, told.status) == ("two_phase", "success")
            assert batch is not None and (batch.completed_count, batch.status) == (total, "COMPLETED")
    assert "busload-publish" not in {thread.name for thread in threading.enumerate()} - began


async def test_a_reroute_that_gets_no_connection_half_way_says_what_was_done(
    dsn: str, bus: CommandBus, transport: FaultyTransport, database: Database
) -> None:
    transport.refuse(AWAY)
    await bus.create_batch(DOMAIN, commands(5))
    settings = Settings(pool_size=1, pool_timeout=timedelta(seconds=0.1))
    with SyncCommandBus(dsn, transport=transport, settings=settings) as narrow:
        first = narrow.database.write

        def leave_no_connection(write: Write[Any], conn: Any = None) -> Any:
            result = first(write, conn)
            narrow.pool.getconn()
            narrow.database.write = first  # type: ignore[method-assign]
            return result

        narrow.database.write = leave_no_connection  # type: ignore[method-assign]
        with pytest.raises(PartlyDoneError, match="5 commands are rerouted to PostgreSQL so far") as told:
            narrow.outbox.reroute()
    assert told.value.commands == 5 and "othing was written" not in str(told.value)
    assert database.value("SELECT sum(hi - lo + 1) FROM busload.queue") == 5


async def test_both_sides_are_compared_and_missing_commands_are_published_again(
    bus: CommandBus, transport: FaultyTransport, database: Database, worker_settings: WorkerSettings
) -> None:
    """Messages that are lost, answered by others, or about nothing at all"""
    await bus.create_batch(DOMAIN, commands(2500))
    answered = await bus.create_batch(DOMAIN, commands(10))
    await bus.cancel_batch(DOMAIN, answered, reason="no")
    database.rows("UPDATE busload.queue SET published_at = now() - interval '1 minute'")
    [found] = await bus.outbox.reconcile()
    assert (found.domain, found.queue, found.looked_into) == (DOMAIN, "busload.payments", True)
    assert (found.published, found.messages, found.depth) == (2500, 26, 26)
    assert (found.answered, found.unknown, found.missing) == (1, 0, 0)

    [(second,)] = database.rows("SELECT lo FROM busload.queue ORDER BY lo OFFSET 1 LIMIT 1")
    database.rows("DELETE FROM busload.message WHERE id LIKE %s", f"%-{str(second)[:-3]}%")
    kept = transport.confirmed[0]
    await transport.publish([type(kept)(kept.queue, "x", b"nonsense")])
    made_up = b'{"v":1,"domain":"payments","loads":[[1073741824,1073741830]]}'
    await transport.publish([type(kept)(kept.queue, "y", made_up)])
    [found] = await bus.outbox.reconcile(domain=DOMAIN)
    assert found.unknown == 2
    assert found.missing > 0 and found.published_again == 0
    [repaired] = await bus.outbox.reconcile(domain=DOMAIN, repair=True)
    assert repaired.published_again == repaired.missing == found.missing
    assert repaired.removed == 3
    database.rows("UPDATE busload.queue SET published_at = now() - interval '1 minute'")
    [after] = await bus.outbox.reconcile(domain=DOMAIN)
    assert (after.missing, after.answered, after.unknown, after.removed) == (0, 0, 0, 0)
    assert database.value("SELECT count(*) FROM busload.message WHERE visible_at > now()") == 0


async def test_one_message_of_a_load_does_not_hide_that_its_others_are_lost(
    bus: CommandBus, transport: FaultyTransport, database: Database
) -> None:
    """As many commands as wait of a load must be rung for, also if it is in two parts"""
    transport.refuse(REFUSED, 3)
    await bus.create_batch(DOMAIN, commands(1000))
    database.rows("UPDATE busload.queue SET published_at = now() - interval '1 minute'")
    transport.mend()
    kept = transport.confirmed[5]
    database.rows("DELETE FROM busload.message WHERE id <> %s", kept.id)
    foreign = kept.body.replace(b"payments", b"salaries")  # workers refuse it, so it rings for nothing
    await transport.publish([Message(kept.queue, "foreign", foreign)])
    [found] = await bus.outbox.reconcile(domain=DOMAIN)
    assert (found.published, found.messages, found.answered, found.unknown) == (900, 2, 0, 1)
    assert (found.missing, found.published_again) == (800, 0)
    [repaired] = await bus.outbox.reconcile(domain=DOMAIN, repair=True)
    assert (repaired.missing, repaired.published_again, repaired.removed) == (800, 800, 1)
    assert database.count("message") == 9
    database.rows("UPDATE busload.queue SET published_at = now() - interval '1 minute'")
    [after] = await bus.outbox.reconcile(domain=DOMAIN)
    assert (after.messages, after.answered, after.unknown, after.missing) == (9, 0, 0, 0)


async def test_a_message_stays_while_anything_of_its_load_waits(
    bus: CommandBus, transport: FaultyTransport, given: Given, database: Database
) -> None:
    """Any command of a load answers any message about it"""
    await bus.create_batch(DOMAIN, commands(1000))
    database.rows("UPDATE busload.queue SET published_at = now() - interval '1 minute'")
    [(load,)] = database.rows("SELECT hi >> 10 FROM busload.queue")
    worker = given.registered_worker()

    def claimed(wanted: int) -> DeliveredClaim:
        plan = claim_plans.claim_delivered(worker=worker, domains=[DOMAIN], wanted={load: wanted})
        found: DeliveredClaim = database.perform(plan)
        return found

    given.settled(claimed(100).leased)  # the first commands have answered the last message
    database.rows("DELETE FROM busload.message WHERE id = %s", transport.confirmed[-1].id)
    [ready] = await bus.outbox.reconcile(domain=DOMAIN, repair=True)
    assert (ready.published, ready.messages, ready.answered, ready.missing, ready.removed) == (900, 9, 0, 0, 0)
    given.settled(claimed(800).leased)
    leased = claimed(100).leased
    [running] = await bus.outbox.reconcile(domain=DOMAIN, repair=True)
    assert (running.published, running.messages, running.answered, running.removed) == (0, 9, 0, 0)
    given.settled(leased)
    [ended] = await bus.outbox.reconcile(domain=DOMAIN, repair=True)
    assert (ended.messages, ended.answered, ended.missing, ended.removed) == (9, 9, 0, 9)

    await bus.create_batch(DOMAIN, commands(10), dispatch="relay")
    [(lo, hi)] = database.rows("SELECT lo, hi FROM busload.outbox")
    early = message.write(Envelope(DOMAIN, (Load(lo, hi),)))
    await transport.publish([Message("busload.payments", "early", early)])
    [written] = await bus.outbox.reconcile(domain=DOMAIN, repair=True)
    assert (written.messages, written.answered, written.removed) == (1, 0, 0)


async def test_a_broker_that_cannot_be_looked_into_is_repaired_in_both_directions(
    dsn: str, rabbitmq_url: str, database: Database, worker_settings: WorkerSettings
) -> None:
    """What nothing waits for leaves RabbitMQ, what is waited for stays, what is missing comes"""
    settings = Settings(queue_prefix=f"test-{uuid4().hex}")
    queue = f"{settings.queue_prefix}.{DOMAIN}"
    async with CommandBus(dsn, transport=rabbitmq_url, settings=settings) as bus:
        assert bus.transport is not None
        await bus.create_batch(DOMAIN, commands(1500))
        answered = await bus.create_batch(DOMAIN, commands(250))
        await bus.cancel_batch(DOMAIN, answered, reason="no")
        made_up = b'{"v":1,"domain":"payments","loads":[[1073741824,1073741830]]}'
        await bus.transport.publish([Message(queue, "x", b"nonsense"), Message(queue, "y", made_up)])
        database.rows("UPDATE busload.queue SET published_at = now() - interval '1 minute'")
        [found] = await bus.outbox.reconcile()
        assert (found.looked_into, found.depth, found.removed) == (False, 15 + 3 + 2, 0)
        [repaired] = await bus.outbox.reconcile(repair=True)
        assert (repaired.looked_into, repaired.removed, repaired.answered, repaired.unknown) == (True, 5, 3, 2)
        assert (repaired.messages, repaired.missing, repaired.published_again) == (20, 0, 0)
        async with asyncio.timeout(20):  # a closed channel gives back what it had in its own time
            while await bus.transport.depth(queue) != 15:
                await asyncio.sleep(0.02)
        async with receiving(bus.transport, queue, prefetch=100) as receiver:
            for delivery in await receiver.take(15):
                await delivery.ack()
        [again] = await bus.outbox.reconcile(repair=True)
        assert again.published_again == again.missing == 1500
        await all_run_once(bus, database, worker_settings, 1500)


async def test_what_needs_retry_is_counted_per_job(
    bus: CommandBus, transport: FaultyTransport, database: Database
) -> None:
    transport.refuse(AWAY)
    job_id = uuid4()
    for count in (3, 4):
        await bus.create_batch(DOMAIN, commands(count), job_id=job_id)
    await bus.create_batch(DOMAIN, commands(5))
    await bus.recover()
    await bus.create_batch(DOMAIN, commands(2), dispatch="relay")  # was not tried yet
    found = database.rows("SELECT job_id, commands, oldest IS NOT NULL, most_rounds FROM busload.dispatch_retry")
    assert sorted(found, key=lambda row: row[1]) == [(None, 5, True, 2), (str(job_id), 7, True, 2)]


async def test_the_rate_of_a_day_does_not_fall_when_its_commands_end(
    bus: CommandBus, transport: FaultyTransport, database: Database, worker_settings: WorkerSettings
) -> None:
    """Yesterday's figures are history"""
    await bus.create_batch(DOMAIN, commands(3))
    transport.refuse(AWAY)
    await bus.create_batch(DOMAIN, [BatchCommand("Debit", data={"n": n}) for n in range(3, 5)])
    database.rows("UPDATE busload.batch SET created_at = created_at - interval '1 day'")
    daily = "SELECT batches, published, rounds FROM busload.dispatch_daily"
    assert database.rows(daily) == [(2, 1, 1.5)]
    transport.mend()
    await bus.recover()
    assert database.rows(daily) == [(2, 2, 1.5)]
    await all_run_once(bus, database, worker_settings, 5)
    assert database.rows(daily) == [(2, 2, 1.5)]


async def test_the_last_hour_is_counted_per_job(
    bus: CommandBus, transport: FaultyTransport, database: Database, worker_settings: WorkerSettings
) -> None:
    given = Given(bus, database, worker_settings)
    job_id = uuid4()
    await bus.create_batch(DOMAIN, commands(5), job_id=job_id)
    leased = given.claimed(2)
    given.settled(leased[:1])
    old = await bus.create_batch(DOMAIN, commands(1))
    database.rows("UPDATE busload.batch SET created_at = now() - interval '2 hours' WHERE batch_id = %s", old)
    transport.refuse(AWAY)
    await bus.create_batch(DOMAIN, commands(4), job_id=job_id)
    columns = "job_id, pending, queued, processing, completed, failed"
    assert database.rows(f"SELECT {columns} FROM busload.dispatch_recent") == [(str(job_id), 4, 3, 1, 1, 0)]


async def test_an_outbox_that_does_not_move_explains_itself(
    bus: CommandBus, transport: FaultyTransport, database: Database, worker_settings: WorkerSettings
) -> None:
    """What the broker said, how often, and when it is tried again; or that nobody relays"""
    transport.refuse(AWAY)
    failed = await bus.create_batch(DOMAIN, commands(3))
    [reason] = (await bus.explain_batch(DOMAIN, failed)).reasons
    assert (reason.code, reason.count, reason.details["rounds"]) == ("NOT_CONFIRMED", 3, 1)
    assert "UNREACHABLE: nobody answers" in reason.message
    assert f"busload outbox reroute --batch {failed}" in reason.advice
    assert "Nobody tries again: no worker lives." in reason.message
    [command] = await bus.list_batch_commands(DOMAIN, failed, limit=1)
    [alone] = (await bus.explain_command(DOMAIN, command.command_id)).reasons
    assert (alone.code, alone.count) == ("NOT_CONFIRMED", 1)

    waiting = await bus.create_batch(DOMAIN, commands(4), dispatch="relay")
    [reason] = (await bus.explain_batch(DOMAIN, waiting)).reasons
    assert (reason.code, reason.count) == ("NOT_PUBLISHED", 4)
    assert "no worker lives" in reason.message
    [command] = await bus.list_batch_commands(DOMAIN, waiting, limit=1)
    [alone] = (await bus.explain_command(DOMAIN, command.command_id)).reasons
    assert (alone.code, alone.count) == ("NOT_PUBLISHED", 1)
    Given(bus, database, worker_settings).registered_worker()
    explained = await bus.explain_batch(DOMAIN, waiting)
    assert (explained.reasons, explained.summary.endswith("4 to be published.")) == ((), True)
    database.rows("UPDATE busload.outbox SET since = now() - interval '1 minute', due_at = now() - interval '1 minute'")
    [reason] = (await bus.explain_batch(DOMAIN, waiting)).reasons
    assert "no worker relays to postgresql" in reason.message


async def test_what_other_queues_run_is_not_published_by_us(dsn: str, transport: FaultyTransport) -> None:
    async with CommandBus(dsn, transport=transport) as bus, TaskTracker(bus) as tracker:
        execution = await tracker.enqueue("reports:1", queue="reports")
        assert execution is not None and execution.execution_id is not None
        assert await tracker.claim("reports:1", execution.execution_id) is not None
        assert await bus.outbox.list() == []


async def test_recover_publishes_again_what_nobody_claimed(
    bus: CommandBus, transport: FaultyTransport, database: Database
) -> None:
    await bus.create_batch(DOMAIN, commands(10))
    await bus.create_batch(DOMAIN, commands(5), dispatch="optimistic")
    assert (await bus.recover()).published_again == 0
    for minutes, expected in ((6, 15), (6, 0), (11, 15), (21, 15)):
        database.rows("UPDATE busload.queue SET published_at = now() - make_interval(mins => %s)", minutes)
        assert (await bus.recover(publish_again_after=timedelta(minutes=5))).published_again == expected
    assert len({message.id for message in transport.confirmed}) == len(transport.confirmed)
