"""A batch of jobs: created all or none, counted as the commands of a batch are, canceled and removed together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from busload import (
    BatchCommand,
    BatchJob,
    BatchMetadata,
    BusinessRuleError,
    Command,
    CommandBus,
    DuplicateCommandError,
    HandlerContext,
    InvalidCommandError,
    PermanentCommandError,
    Settings,
    Stage,
    SyncCommandBus,
)
from busload.batches.batch import find_batch
from busload.commands.execution import CANCELED
from busload.errors import BatchNotFoundError, BatchSealedError, InvalidOperationError
from busload.explain import Blocker
from busload.jobs import FinishedStage, JobMetadata
from busload.jobs import batch as job_batch
from busload.jobs import cancel as job_cancel
from busload.postgres.plan import Plan, Statement
from busload.worker.sweep import sweep
from tests.faces import FACES, bus_of
from tests.given import DOMAIN, Database, Given, beside, counts, eventually, raising

pytestmark = pytest.mark.usefixtures("invariants")

MONTH = timedelta(days=30)
SAME = UUID("0198c5d2-7f3a-7c11-9d2e-5b1c8a6e4f01")


@pytest.fixture
def ran(given: Given) -> list[str]:
    """What was done, in order. `No` refuses, `Park` goes to troubleshooting, `Wait` has no handler."""
    names: list[str] = []

    async def do(command: Command, ctx: HandlerContext) -> None:
        names.append(command.data)

    given.handler("Do", do)
    given.handler("No", raising(BusinessRuleError("no")))
    given.handler("Park", raising(PermanentCommandError("no")))
    return names


def do(*names: str) -> list[BatchCommand]:
    return [BatchCommand("Do", data=name) for name in names]


NO, PARK, WAIT = BatchCommand("No"), BatchCommand("Park"), BatchCommand("Wait")


def job(*stages: Sequence[BatchCommand], undo: bool = False, **options: Any) -> BatchJob:
    """A job with a stage for each list of commands; with `undo`, each stage has a compensation."""
    undone = do("undo") if undo else None
    return BatchJob([Stage(f"s{n}", commands, undone) for n, commands in enumerate(stages)], **options)


async def jobs_of(bus: CommandBus, batch_id: UUID) -> list[JobMetadata]:
    """The jobs of a batch in the order in which they were given."""
    return (await bus.jobs.list(DOMAIN, batch_id=batch_id))[::-1]


def events_of(database: Database, batch_id: UUID) -> list[str]:
    rows = database.rows("SELECT type FROM busload.event WHERE batch_id = %s ORDER BY event", batch_id)
    return [type for (type,) in rows]


async def test_many_jobs_are_one_batch_which_counts_them_as_they_end(
    bus: CommandBus, given: Given, ran: list[str]
) -> None:
    told: list[Any] = []

    async def tell(command: Command, ctx: HandlerContext) -> None:
        told.append(command.data)

    given.handler("Tell", tell)
    jobs = [
        job(do("a"), do("b"), name="well"),
        job(do("c"), [NO], name="undone", undo=True),
        job([NO], do("never"), name="failed"),
        job([*do("d"), NO], do("e"), name="in spite of it", continue_after_failures=True),
    ]
    batch_id = await bus.jobs.create_batch(
        DOMAIN, jobs, name="Night", custom_data={"run": 7}, on_complete=BatchCommand("Tell", data={"to": "ada"})
    )
    batch = await given.batch_now(batch_id)
    assert (batch.batch_type, batch.status, counts(batch)) == ("JOBS", "PENDING", (4, 0, 0, 0, 0))
    assert (batch.name, batch.custom_data, batch.started_at) == ("Night", {"run": 7}, None)

    await given.drained()
    batch = await given.batch_now(batch_id)
    assert (batch.status, counts(batch)) == ("COMPLETED_WITH_FAILURES", (4, 2, 2, 0, 0))
    found = await jobs_of(bus, batch_id)
    assert [(one.name, one.status.value, one.batch_id) for one in found] == [
        ("well", "COMPLETED", batch_id),
        ("undone", "FAILED", batch_id),
        ("failed", "FAILED", batch_id),
        ("in spite of it", "COMPLETED", batch_id),
    ]
    assert sorted(ran) == ["a", "b", "c", "d", "e", "undo"]
    assert events_of(given.database, batch_id) == ["BATCH_SEALED", "BATCH_STARTED", "BATCH_COMPLETED"]
    assert batch.started_at == min(one.started_at for one in found if one.started_at)
    assert batch.completed_at is not None
    [data] = told
    assert (data["to"], data["batch"]["batch_id"], data["batch"]["status"]) == ("ada", str(batch_id), batch.status)
    assert (data["batch"]["total_count"], data["batch"]["failed_count"]) == (4, 2)


@pytest.mark.parametrize("face", FACES)
async def test_a_batch_of_jobs_is_found_waited_for_and_watched_in_both_faces(
    dsn: str, settings: Settings, given: Given, ran: list[str], face: str
) -> None:
    called: list[BatchMetadata] = []
    async with bus_of(face, dsn, settings=settings) as bus:
        other = await bus.create_batch(DOMAIN, do("x"))
        on_complete: Any = called.append if face == "sync" else _awaited(called)
        batch_id = await bus.jobs.create_batch(DOMAIN, [job(do("a")), job(do("b"))], on_complete=on_complete)
        assert [one.batch_id for one in await bus.list_batches(DOMAIN, batch_type="JOBS")] == [batch_id]
        found = await bus.list_batches(DOMAIN, batch_type="COMMANDS")
        assert {one.batch_type.value for one in found} == {"COMMANDS"}
        assert {other} == {one.batch_id for one in found if one.job_id is None}
        with pytest.raises(TimeoutError, match="0 of 2 jobs have ended"):
            await bus.wait_batch(DOMAIN, batch_id, timeout=0)
        with pytest.raises(InvalidCommandError, match="wanted one of COMMANDS, JOBS"):
            await bus.list_batches(DOMAIN, batch_type="STAGES")  # type: ignore[arg-type]
        async with given.running():
            assert counts(await bus.wait_batch(DOMAIN, batch_id, timeout=30)) == (2, 2, 0, 0, 0)
        assert await bus.list_batch_commands(DOMAIN, batch_id) == []
        await eventually(lambda: called)  # while the bus is open: a function hears of the end a moment later
    assert [one.completed_count for one in called] == [2]


def _awaited(called: list[BatchMetadata]) -> Callable[..., Any]:
    async def call(batch: BatchMetadata) -> None:
        called.append(batch)

    return call


async def test_many_jobs_are_written_by_as_few_statements_as_few_jobs(bus: CommandBus, database: Database) -> None:
    def counting(plan: Plan[UUID], requests: list[Any]) -> Plan[UUID]:
        request = next(plan)
        while True:
            requests.append(request)
            answer = yield request
            try:
                request = plan.send(answer)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    written = []
    for size in (2, 200):
        jobs = [job(do("a", "b"), do("c"), undo=True)] * size
        new = job_batch.new_job_batch(bus.settings.limits, DOMAIN, jobs, {}, None, awaits=True)
        requests: list[Any] = []
        database.perform(counting(job_batch.create(*new), requests))
        written.append(len(requests))
    assert written[0] == written[1]
    assert (database.count("job"), database.count("command"), database.count("job_part")) == (202, 404, 606)


async def test_jobs_that_are_written_together_keep_all_that_their_commands_have(
    bus: CommandBus, given: Given, ran: list[str], database: Database
) -> None:
    """A stage that is too large for the statement of the others is written by itself."""
    later, soon = datetime.now(UTC) + timedelta(hours=2), datetime.now(UTC) + timedelta(hours=1)
    rich = BatchCommand(
        "Do", data="x", task_key="t", correlation_id=SAME, reply_to="replies", priority=7, max_attempts=2
    )
    stages = [
        [rich, *do("a")],
        [BatchCommand("Do", data="later", run_at=later), BatchCommand("Do", data="soon", expires_at=soon)],
        [BatchCommand("Do", data="there", domain="elsewhere"), *do("here")],
        do(*map(str, range(1500))),
        do("b"),
    ]
    together = await bus.jobs.create_batch(DOMAIN, [job(commands, name=f"n{n}") for n, commands in enumerate(stages)])
    alone = [await bus.jobs.create(DOMAIN, [Stage("s0", commands)]) for commands in stages]

    async def written(job_id: UUID) -> Any:
        found = await bus.jobs.get(DOMAIN, job_id)
        assert found is not None
        batch = found.stages[0].batch
        assert batch is not None
        commands = await bus.list_batch_commands(DOMAIN, batch.batch_id, limit=2000)
        shown = [
            (c.domain, c.command_type, c.data, c.task_key, c.reply_to, c.priority, c.max_attempts, c.run_at, c.status)
            for c in commands
        ]
        expiring = "SELECT count(*) FROM busload.expiry WHERE batch_id = %s"
        places = "SELECT count(*), sum(hi - lo + 1), max(fair::text) FROM busload.{} WHERE batch_id = %s"
        counted = [database.rows(places.format(place), batch.batch_id) for place in ("queue", "scheduled")]
        assert {fair for [(_, _, fair)] in counted} <= {str(fair_of(database, batch.batch_id)), None}
        return shown, database.value(expiring, batch.batch_id), [rows[0][:2] for rows in counted], batch.total_count

    for one, other in zip(await jobs_of(bus, together), alone, strict=True):
        assert await written(one.job_id) == await written(other)
    found = await jobs_of(bus, together)
    assert [one.stages[0].batch.name for one in found if one.stages[0].batch] == [f"n{n}: s0" for n in range(5)]
    assert [one.stages[0].batch.stage for one in found if one.stages[0].batch] == ["s0"] * 5


def fair_of(database: Database, batch_id: UUID) -> int:
    return int(database.value("SELECT busload.fair_of(NULL, %s)", batch_id))


async def test_a_batch_of_jobs_exists_exactly_if_the_callers_transaction_commits(
    bus: CommandBus, given: Given, ran: list[str], conn: psycopg.AsyncConnection
) -> None:
    before = given.database.everything()
    batch_id, job_id = uuid4(), uuid4()
    async with conn.transaction(force_rollback=True):
        await bus.jobs.create_batch(DOMAIN, [job(do("a"), do("b"))], conn=conn)
    assert given.database.everything() == before
    async with conn.transaction():
        jobs = [job(do("a"), do("b"), job_id=job_id), job(do("c"))]
        assert await bus.jobs.create_batch(DOMAIN, jobs, batch_id=batch_id, conn=conn) == batch_id
        assert await bus.get_batch(DOMAIN, batch_id) is None
    assert counts(await given.batch_now(batch_id)) == (2, 0, 0, 0, 0)
    assert job_id in [one.job_id for one in await jobs_of(bus, batch_id)]
    await given.drained()
    assert counts(await given.batch_now(batch_id)) == (2, 2, 0, 0, 0)


def chosen(command_id: UUID) -> list[BatchCommand]:
    return [BatchCommand("Do", command_id, data="x")]


@pytest.mark.parametrize(
    ("jobs", "error", "match"),
    [
        ([], InvalidCommandError, "EMPTY_BATCH at /jobs: found no jobs"),
        ("no jobs", InvalidCommandError, "/jobs: found 'no jobs', wanted a list of BatchJob"),
        ([job(do("a")), Stage("s", do("b"))], InvalidCommandError, "at /jobs/1: found Stage.*wanted a BatchJob"),
        ([job(do("a")), BatchJob([])], InvalidCommandError, "/jobs/1/stages: .*wanted at least one Stage"),
        ([job(do("a")), BatchJob([Stage("s")])], InvalidCommandError, "EMPTY_BATCH at /jobs/1/stages/0/commands"),
        ([job(do("a"), [BatchCommand("a b")])], InvalidCommandError, "/jobs/0/stages/1/commands/0/command_type"),
        ([job(do("a"), name="")], InvalidCommandError, "/jobs/0/name"),
        ([job(do("a"), custom_data=3)], InvalidCommandError, "/jobs/0/custom_data"),
        ([job(do("a"), job_id="x")], InvalidCommandError, "/jobs/0/job_id"),
        ([job(do("a"), on_complete=3)], InvalidCommandError, "/jobs/0/on_complete"),
        ([job(do("a"), job_id=SAME)] * 2, InvalidCommandError, "/jobs/1/job_id: found a second job"),
        ([job(chosen(SAME)), job(do("a"), chosen(SAME))], DuplicateCommandError, "more than once"),
        (
            [job(do("a"), chosen(SAME)), job(do("a"), on_complete=BatchCommand("Do", SAME))],
            DuplicateCommandError,
            "once",
        ),
    ],
    ids=range(13),
)
async def test_bad_input_is_named_by_the_place_of_its_job_and_nothing_is_written(
    bus: CommandBus, database: Database, jobs: Any, error: type[Exception], match: str
) -> None:
    before = database.everything()
    with pytest.raises(error, match=match):
        await bus.jobs.create_batch(DOMAIN, jobs)
    assert database.everything() == before


async def test_all_offenders_are_named_at_once(bus: CommandBus, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidCommandError) as refused:
        await bus.jobs.create_batch(DOMAIN, [job(do("a"), name=""), job(do("a")), job([BatchCommand("")])])
    assert [problem.path.split("/")[2] for problem in refused.value.problems] == ["0", "2"]
    with pytest.raises(InvalidCommandError, match="/on_complete"):
        await bus.jobs.create_batch(DOMAIN, [job(do("a"))], on_complete=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="priority"):
        await bus.jobs.create_batch(DOMAIN, [job(do("a"))], priority=3)  # type: ignore[call-arg]
    monkeypatch.setattr(job_batch, "MOST", 2)
    with pytest.raises(InvalidCommandError, match="TOO_LARGE at /jobs: found 3 jobs, at most 2"):
        await bus.jobs.create_batch(DOMAIN, [job(do("a"))] * 3)


async def test_ids_that_are_taken_are_refused_and_nothing_is_written(
    bus: CommandBus, given: Given, database: Database
) -> None:
    await bus.send(DOMAIN, "Do", command_id=SAME)
    job_id = await bus.jobs.create(DOMAIN, [Stage("one", do("a"))])
    batch_id = await bus.jobs.create_batch(DOMAIN, [job(do("a"))])
    before = database.everything()
    free = job(do("a"), do("b"))
    for jobs in ([free, job(chosen(SAME))], [free, job(do("a"), chosen(SAME))], [job(do("a"), undo=True), free]):
        if jobs[0] is not free:
            jobs = [BatchJob([Stage("one", do("a"), chosen(SAME))]), free]
        with pytest.raises(DuplicateCommandError, match=str(SAME)):
            await bus.jobs.create_batch(DOMAIN, jobs)
    with pytest.raises(DuplicateCommandError, match=str(SAME)):
        await bus.jobs.create_batch(DOMAIN, [free], on_complete=BatchCommand("Do", SAME))
    with pytest.raises(InvalidOperationError, match=f"already a job {job_id}"):
        await bus.jobs.create_batch(DOMAIN, [free, job(do("a"), job_id=job_id)])
    with pytest.raises(InvalidOperationError, match=f"already a batch {batch_id}"):
        await bus.jobs.create_batch(DOMAIN, [free], batch_id=batch_id)
    assert database.everything() == before


async def test_a_job_that_is_resumed_or_canceled_after_it_failed_moves_between_the_counters(
    bus: CommandBus, given: Given, ran: list[str]
) -> None:
    jobs = [job([NO], do("a")), job([NO], do("b")), job([WAIT])]
    batch_id = await bus.jobs.create_batch(DOMAIN, jobs)
    await given.drained()
    first, second, third = [one.job_id for one in await jobs_of(bus, batch_id)]
    assert counts(await given.batch_now(batch_id)) == (3, 0, 2, 0, 0)
    await bus.jobs.resume(DOMAIN, first)
    assert counts(await given.batch_now(batch_id)) == (3, 0, 1, 0, 0)
    await bus.jobs.cancel(DOMAIN, second, reason="enough")
    assert counts(await given.batch_now(batch_id)) == (3, 0, 0, 1, 0)
    await given.drained()
    assert counts(await given.batch_now(batch_id)) == (3, 1, 0, 1, 0)
    await bus.jobs.cancel(DOMAIN, third, reason="enough")
    batch = await given.batch_now(batch_id)
    assert (batch.status, counts(batch)) == ("COMPLETED_WITH_FAILURES", (3, 1, 0, 2, 0))


async def test_a_failure_that_a_complete_batch_has_counted_stays(bus: CommandBus, given: Given, ran: list[str]) -> None:
    batch_id = await bus.jobs.create_batch(DOMAIN, [job([NO], do("a")), job(do("b"))])
    await given.drained()
    [failed, _] = await jobs_of(bus, batch_id)
    for call in (bus.jobs.resume(DOMAIN, failed.job_id), bus.jobs.cancel(DOMAIN, failed.job_id, reason="x")):
        with pytest.raises(InvalidOperationError, match=f"is FAILED, and its batch {batch_id} has completed"):
            await call
    assert counts(await given.batch_now(batch_id)) == (2, 1, 1, 0, 0)
    assert (await jobs_of(bus, batch_id))[0] == failed


async def test_the_batch_of_a_job_that_is_being_resumed_cannot_complete_before_it(
    dsn: str, bus: CommandBus, given: Given, ran: list[str], database: Database, conn: psycopg.AsyncConnection
) -> None:
    """Whoever comes second waits for the row of the batch, and sees what the first one has done."""
    batch_id = await bus.jobs.create_batch(DOMAIN, [job([NO], do("a")), job([WAIT])])
    await given.drained()
    [failed, other] = await jobs_of(bus, batch_id)
    async with conn.transaction():
        await bus.jobs.resume(DOMAIN, failed.job_id, conn=conn)
        begin = job_cancel.begin_to_cancel
        thread, answers = beside(dsn, lambda: begin(DOMAIN, other.job_id, reason="x", operator=None, in_pages=False))
        assert answers == []
    await asyncio.to_thread(thread.join)
    assert counts(await given.batch_now(batch_id)) == (2, 0, 0, 1, 0)
    await given.drained()
    assert counts(await given.batch_now(batch_id)) == (2, 1, 0, 1, 0)


async def test_jobs_that_wait_for_a_person_are_counted_until_the_person_has_decided(
    bus: CommandBus, given: Given, ran: list[str]
) -> None:
    bus.planner(DOMAIN, "plan")(raising(BusinessRuleError("no plan")))
    stuck = BatchJob([Stage("one", do("c")), Stage("plan")])
    half = job([PARK, WAIT])
    batch_id = await bus.jobs.create_batch(DOMAIN, [job([PARK, *do("a")], do("b")), stuck, half, job(do("d"))])
    await given.drained()
    batch = await given.batch_now(batch_id)
    assert counts(batch) == (4, 1, 0, 0, 2), "one stage is stalled, one planner is parked; of one stage something waits"
    assert (
        given.database.value(
            "SELECT in_troubleshooting_count FROM busload.command_bus_batch WHERE name IS NULL AND batch_id = %s",
            batch_id,
        )
        == 2
    )

    items = {item.command_type: item for item in await bus.troubleshooting.list(DOMAIN)}
    await bus.troubleshooting.complete(DOMAIN, items["busload.Plan.plan"].command_id)
    assert (await given.batch_now(batch_id)).in_troubleshooting_count == 2, "now it waits to be resumed"
    first, planned, _, _ = await jobs_of(bus, batch_id)
    await bus.jobs.resume(DOMAIN, planned.job_id)
    assert (await given.batch_now(batch_id)).in_troubleshooting_count == 1
    for item in await bus.troubleshooting.list(DOMAIN):
        await bus.troubleshooting.complete(DOMAIN, item.command_id)
    assert (await given.batch_now(batch_id)).in_troubleshooting_count == 0
    await bus.jobs.cancel(DOMAIN, planned.job_id, reason="no plan")
    await given.drained()
    assert counts(await given.batch_now(batch_id)) == (4, 2, 0, 1, 0)
    assert (await bus.jobs.get(DOMAIN, first.job_id)).status == "COMPLETED"  # type: ignore[union-attr]


async def test_a_job_whose_step_was_canceled_waits_for_a_person(bus: CommandBus, given: Given, ran: list[str]) -> None:
    """Also if the step ran, and was asked to stop."""
    batch_id = await bus.jobs.create_batch(DOMAIN, [job(do("a"), do("b")), job(do("c"), do("d"))])
    given.settled(given.claimed(limit=2))
    steps = [one.step for one in await jobs_of(bus, batch_id) if one.step is not None]
    [runs] = given.claimed()
    [waits] = [step.command_id for step in steps if step.command_id != runs.command_id]
    for stopped in (runs.command_id, waits):
        await bus.cancel_command(DOMAIN, stopped, reason="by mistake")
    assert (await given.batch_now(batch_id)).in_troubleshooting_count == 1, "one still runs"
    given.settled([runs], CANCELED)
    assert (await given.batch_now(batch_id)).in_troubleshooting_count == 2
    for one in await jobs_of(bus, batch_id):
        await bus.jobs.resume(DOMAIN, one.job_id)
    assert (await given.batch_now(batch_id)).in_troubleshooting_count == 0
    await given.drained()
    assert counts(await given.batch_now(batch_id)) == (2, 2, 0, 0, 0)


async def test_who_counts_jobs_that_wait_for_a_person_looks_at_no_others(
    bus: CommandBus, given: Given, ran: list[str], database: Database
) -> None:
    read = """SELECT sum(idx_tup_fetch + seq_tup_read)::integer FROM pg_stat_xact_user_tables
               WHERE relname IN ('job', 'job_stage', 'job_in_doubt', 'batch')"""

    def reading(batch_id: UUID) -> Plan[Any]:
        [(before,)] = yield Statement(read.encode(), {})
        found = yield from find_batch(DOMAIN, batch_id)
        assert found is not None
        [(after,)] = yield Statement(read.encode(), {})
        return found.in_troubleshooting_count, after - before

    few, many = [
        await bus.jobs.create_batch(DOMAIN, [job([PARK], [WAIT]), *[job([WAIT])] * others]) for others in (2, 200)
    ]
    await given.drained()
    assert database.perform(reading(few)) == database.perform(reading(many))
    assert database.perform(reading(many))[0] == 1
    assert database.count("job_in_doubt") == 2
    for item in await bus.troubleshooting.list(DOMAIN):
        await bus.troubleshooting.complete(DOMAIN, item.command_id)
    await given.drained()
    assert database.count("job_in_doubt") == 0, "they have gone on"


async def test_a_cancel_reaches_every_job_that_has_not_ended(
    bus: CommandBus, given: Given, ran: list[str], database: Database
) -> None:
    """What waits is canceled, what has done something is compensated, and what has ended stays as it ended."""
    jobs = [job(do("a"), [WAIT], undo=True), job([WAIT]), job([NO], do("b")), job(do("c")), job(do("d"), [WAIT])]
    batch_id = await bus.jobs.create_batch(DOMAIN, jobs)
    await given.drained()
    assert await bus.cancel_batch(DOMAIN, batch_id, reason="wrong list", operator="rosa") == 3
    batch = await given.batch_now(batch_id)
    assert counts(batch) == (5, 1, 1, 2, 0)
    [compensating, *_] = await jobs_of(bus, batch_id)
    assert (compensating.status, compensating.operator, compensating.reason) == ("COMPENSATING", "rosa", "wrong list")
    failed = (await jobs_of(bus, batch_id))[2]
    with pytest.raises(InvalidOperationError, match=f"its batch {batch_id} was canceled"):
        await bus.jobs.resume(DOMAIN, failed.job_id)
    assert await bus.cancel_batch(DOMAIN, batch_id, reason="again") == 0
    await given.drained()
    batch = await given.batch_now(batch_id)
    assert (batch.status, counts(batch)) == ("COMPLETED_WITH_FAILURES", (5, 1, 1, 3, 0))
    assert sorted(ran) == ["a", "c", "d", "undo"]
    assert await bus.cancel_batch(DOMAIN, batch_id, reason="too late") == 0
    trail = await bus.get_batch_audit_trail(DOMAIN, batch_id)
    assert next(one.operator for one in trail if one.type == "BATCH_CANCELED") == "rosa"
    assert database.value("SELECT canceling_until FROM busload.batch WHERE batch_id = %s", batch_id) is None
    with pytest.raises(BatchNotFoundError):
        await bus.cancel_batch(DOMAIN, uuid4(), reason="test")


async def test_a_cancel_can_be_one_transaction_of_the_callers(
    sync_bus: SyncCommandBus, dsn: str, given: Given, ran: list[str]
) -> None:
    batch_id = sync_bus.jobs.create_batch(DOMAIN, [job(do("a", "b")), job(do("c"), undo=True)])
    with psycopg.connect(dsn) as conn:
        assert sync_bus.cancel_batch(DOMAIN, batch_id, reason="no", conn=conn) == 2
        assert counts(sync_bus.get_batch(DOMAIN, batch_id)) == (2, 0, 0, 0, 0)  # type: ignore[arg-type]
        conn.rollback()
        assert given.database.value("SELECT canceled_at FROM busload.batch WHERE batch_id = %s", batch_id) is None
        assert sync_bus.cancel_batch(DOMAIN, batch_id, reason="no", conn=conn) == 2
    await given.drained()
    assert counts(await given.batch_now(batch_id)) == (2, 0, 0, 2, 0)
    assert ran == []


async def test_from_the_first_transaction_of_a_cancel_on_only_what_runs_goes_on(
    bus: CommandBus, given: Given, ran: list[str], database: Database
) -> None:
    jobs = [job(do("a"), do("b")), job(do("c"), do("d")), job(do("e"), do("f"), undo=True)]
    batch_id = await bus.jobs.create_batch(DOMAIN, jobs)
    [runs] = given.claimed()
    begin = partial(job_cancel.begin_to_cancel_batch, DOMAIN, batch_id, reason="wrong list", operator="rosa")
    begun = database.perform(begin(in_pages=True))
    assert (begun.done, len(begun.batch_ids)) == (3, 3)
    assert counts(await given.batch_now(batch_id)) == (3, 0, 0, 2, 0), "one is to be compensated"
    assert given.claimed() == [], "nobody claims what is to be canceled"
    given.settled([runs])
    await given.drained()
    stopped = await jobs_of(bus, batch_id)
    assert ran == ["undo"] * (stopped[2].compensated_at is not None), "if it was the third that ran, it is undone"
    assert {(one.operator, one.reason) for one in stopped} == {("rosa", "wrong list")}


async def test_a_worker_goes_on_with_a_cancel_whose_process_died(
    bus: CommandBus, given: Given, ran: list[str], database: Database
) -> None:
    batch_id = await bus.jobs.create_batch(DOMAIN, [job([WAIT] * 3), job(do("a"), [WAIT], undo=True)])
    await given.drained()
    begin = partial(job_cancel.begin_to_cancel_batch, DOMAIN, batch_id, reason="wrong list", operator="rosa")
    database.perform(begin(in_pages=True))
    canceled = "SELECT count(*) FROM busload.event WHERE type = 'CANCELED'"
    await sweep(bus.pool, worker=given.registered_worker(), judge=False)
    assert database.value(canceled) == 0, "whoever began may still be at it"
    database.rows("UPDATE busload.batch SET canceling_until = now() - interval '1 s' WHERE canceled_at IS NOT NULL")
    await sweep(bus.pool, worker=given.registered_worker(), judge=False)
    assert database.value("SELECT sum(hi - lo + 1) FROM busload.event WHERE type = 'CANCELED'") == 4
    await given.drained()
    assert counts(await given.batch_now(batch_id)) == (2, 0, 0, 2, 0)
    assert ran == ["a", "undo"]


async def test_a_cancel_that_is_repeated_goes_on_where_the_first_one_stopped(
    bus: CommandBus, given: Given, ran: list[str], database: Database
) -> None:
    batch_id = await bus.jobs.create_batch(DOMAIN, [job(do("a")), job(do("b"))])
    begin = partial(job_cancel.begin_to_cancel_batch, DOMAIN, batch_id, reason="x", operator=None)
    database.perform(begin(in_pages=True))
    assert await bus.cancel_batch(DOMAIN, batch_id, reason="again") == 0
    assert database.value("SELECT sum(hi - lo + 1) FROM busload.event WHERE type = 'CANCELED'") == 2
    assert database.value("SELECT count(*) FROM busload.batch WHERE canceling_until IS NOT NULL") == 0


async def test_a_job_that_is_being_resumed_does_not_escape_the_cancel_of_its_batch(
    dsn: str, bus: CommandBus, given: Given, ran: list[str], conn: psycopg.AsyncConnection
) -> None:
    batch_id = await bus.jobs.create_batch(DOMAIN, [job([NO], do("a")), job([WAIT])])
    await given.drained()
    [failed, _] = await jobs_of(bus, batch_id)
    async with conn.transaction():
        await bus.jobs.resume(DOMAIN, failed.job_id, conn=conn)
        begin = partial(job_cancel.begin_to_cancel_batch, DOMAIN, batch_id, reason="x", operator=None)
        thread, answers = beside(dsn, lambda: begin(in_pages=False))
        assert answers == []
    await asyncio.to_thread(thread.join)
    await given.drained()
    assert counts(await given.batch_now(batch_id)) == (2, 0, 0, 2, 0)


async def test_the_cancel_of_many_jobs_takes_a_handful_of_transactions(
    bus: CommandBus, given: Given, ran: list[str], database: Database
) -> None:
    """However many jobs there are: 700 jobs are two slices of batches, so two pages after the first transaction."""
    batch_id = await bus.jobs.create_batch(DOMAIN, [job(do("a"), do("b"), undo=n % 2 == 0) for n in range(700)])
    written = "SELECT count(DISTINCT xmin::text) FROM busload.event WHERE type IN ('CANCELED', 'BATCH_CANCELED')"
    assert await bus.cancel_batch(DOMAIN, batch_id, reason="wrong list") == 700
    assert database.value(written) == 3
    assert counts(await given.batch_now(batch_id)) == (700, 0, 0, 350, 0)
    await given.drained()
    batch = await given.batch_now(batch_id)
    assert (batch.status, counts(batch)) == ("COMPLETED_WITH_FAILURES", (700, 0, 0, 700, 0))
    assert ran == []


async def test_what_makes_no_sense_for_jobs_is_refused(bus: CommandBus, given: Given, database: Database) -> None:
    batch_id = await bus.jobs.create_batch(DOMAIN, [job([WAIT])])
    before = database.everything()
    with pytest.raises(BatchSealedError, match="is a batch of jobs, which takes no commands"):
        await bus.send(DOMAIN, "Do", batch_id=batch_id)
    for call in (
        bus.hold_batch(DOMAIN, batch_id, reason="x"),
        bus.resume_batch(DOMAIN, batch_id),
        bus.reprioritize_batch(DOMAIN, batch_id, 3),
    ):
        with pytest.raises(InvalidOperationError, match=r"is a batch of jobs, .* can be canceled, but not held"):
            await call
    assert await bus.seal_batch(DOMAIN, batch_id) is False
    assert await bus.get_dispatch(DOMAIN, batch_id) is None
    assert database.everything() == before


async def test_a_batch_starts_with_the_first_of_its_jobs_and_no_claim_waits_for_its_row(
    bus: CommandBus, given: Given, ran: list[str], conn: psycopg.AsyncConnection
) -> None:
    batch_id = await bus.jobs.create_batch(DOMAIN, [job(do("a")), job(do("b")), job(do("c"))])
    async with conn.transaction():
        await conn.execute("SELECT FROM busload.batch WHERE batch_id = %s FOR UPDATE", [batch_id])
        [first] = given.claimed()
    assert (await given.batch_now(batch_id)).status == "PENDING"
    [second] = given.claimed()
    batch = await given.batch_now(batch_id)
    assert (batch.status, batch.started_at is not None) == ("IN_PROGRESS", True)
    given.settled([first, second])
    await given.drained()
    assert events_of(given.database, batch_id).count("BATCH_STARTED") == 1


async def test_a_batch_of_jobs_and_its_jobs_are_kept_and_removed_together(
    bus: CommandBus, given: Given, ran: list[str], database: Database
) -> None:
    batch_id = await bus.jobs.create_batch(DOMAIN, [job(do("a")), job([WAIT])], on_complete=BatchCommand("Wait"))
    await given.drained()
    age = "UPDATE busload.{} SET {} = {} - interval '1 year'"
    old = (("job", "completed_at"), ("batch", "completed_at"), ("execution", "finished_at"), ("event", "at"))

    def grow_old() -> None:
        for table, column in (*old, ("command", "created_at")):
            database.rows(age.format(table, column, column))

    grow_old()
    assert (await bus.prune(MONTH, dry_run=True)).batches == 0
    assert (await bus.prune(MONTH)).batches == 0
    assert len(await jobs_of(bus, batch_id)) == 2, "an open batch keeps the jobs that have ended"
    await bus.cancel_batch(DOMAIN, batch_id, reason="enough")
    await given.drained()
    grow_old()
    assert (await bus.prune(MONTH)).batches == 0, "its callback has not ended"
    [callback] = database.rows(
        "SELECT command_id FROM busload.command WHERE command_type = 'Wait' AND batch_id IS NULL"
    )
    await bus.cancel_command(DOMAIN, callback[0], reason="nobody reads it")
    grow_old()
    assert (await bus.prune(MONTH, dry_run=True)).batches == 3
    pruned = await bus.prune(MONTH, archive=True)
    assert pruned.batches == 3
    assert await bus.get_batch(DOMAIN, batch_id) is None
    assert [database.count(table) for table in ("job", "batch", "command", "event")] == [0, 0, 0, 0]
    archived = database.rows("SELECT total_count, batch_type FROM busload.archived_batch WHERE batch_id = %s", batch_id)
    assert archived == [(2, "JOBS")]
    assert database.rows("SELECT DISTINCT batch_id FROM busload.archived_job") == [(batch_id,)]


async def test_a_batch_of_jobs_is_not_counted_as_commands(bus: CommandBus, database: Database) -> None:
    await bus.jobs.create_batch(DOMAIN, [job(do("a", "b")), job(do("c"))])
    created = "SELECT way, commands, batches FROM busload.created_daily"
    assert database.rows(created) == [("job", 3, 2)]
    assert database.value("SELECT sum(pending + queued + processing) FROM busload.dispatch_recent") == 3


async def test_with_a_broker_the_stages_of_all_jobs_wait_to_be_published(dsn: str, database: Database) -> None:
    with SyncCommandBus(dsn, transport="redis://127.0.0.1:1") as publishing:
        publishing.jobs.create_batch(DOMAIN, [job(do("a", "b")), job(do("c"))])
    assert database.value("SELECT sum(hi - lo + 1) FROM busload.outbox") == 3
    assert database.count("dispatch") == 2


async def test_a_job_that_has_ended_stays_as_it_ended(bus: CommandBus, given: Given, ran: list[str]) -> None:
    """Only a job that has failed and was not compensated can still be canceled."""
    done = await bus.jobs.create(DOMAIN, [Stage("one", do("a"))])
    undone = await bus.jobs.create(DOMAIN, [Stage("one", do("a"), do("undo")), Stage("two", [NO])])
    failed = await bus.jobs.create(DOMAIN, [Stage("one", [NO])])
    await given.drained()
    with pytest.raises(InvalidOperationError, match=f"Job {done} is COMPLETED: it has ended"):
        await bus.jobs.cancel(DOMAIN, done, reason="late")
    with pytest.raises(InvalidOperationError, match=f"Job {undone} is FAILED and was compensated: it has ended"):
        await bus.jobs.cancel(DOMAIN, undone, reason="late")
    assert await bus.jobs.cancel(DOMAIN, failed, reason="enough") == 0
    statuses = {one.job_id: one.status.value for one in await bus.jobs.list(DOMAIN)}
    assert statuses == {done: "COMPLETED", undone: "FAILED", failed: "CANCELED"}


async def test_planned_stages_of_many_jobs_are_planned_one_by_one(
    bus: CommandBus, given: Given, ran: list[str]
) -> None:
    @bus.planner(DOMAIN, "two")
    async def two(finished: FinishedStage, ctx: HandlerContext) -> list[BatchCommand]:
        return do(f"{finished.job.name} again")

    jobs = [BatchJob([Stage("one", do(str(n))), Stage("two")], name=str(n)) for n in range(3)]
    batch_id = await bus.jobs.create_batch(DOMAIN, jobs)
    await given.drained()
    assert counts(await given.batch_now(batch_id)) == (3, 3, 0, 0, 0)
    assert sorted(ran) == ["0", "0 again", "1", "1 again", "2", "2 again"]


async def test_a_batch_of_jobs_explains_what_is_in_the_way_of_its_jobs(
    bus: CommandBus, given: Given, ran: list[str]
) -> None:
    jobs = [job([PARK]), job([WAIT]), job([WAIT]), BatchJob([Stage("one", do("a")), Stage("plan")]), job(do("b"))]
    batch_id = await bus.jobs.create_batch(DOMAIN, jobs, on_complete=BatchCommand("Wait"))
    explained = await bus.explain_batch(DOMAIN, batch_id)
    assert [(one.code.value, one.count) for one in explained.reasons] == [("NO_WORKER", 5)]
    async with given.running():
        await _until_stuck(given)
        explained = await bus.explain_batch(DOMAIN, batch_id)
    found = {one.code.value: one for one in explained.reasons}
    assert {code: one.count for code, one in found.items()} == {"IN_TROUBLESHOOTING": 1, "NO_HANDLER": 3}
    first = (await jobs_of(bus, batch_id))[0]
    assert f"in stage 's0' of job {first.job_id}" in found["IN_TROUBLESHOOTING"].message
    assert "and alike in 2 other jobs" in found["NO_HANDLER"].message
    assert explained.summary.startswith("Not finished: 1 of 5 jobs have ended; jobs: 1 waiting for a person, 3 without")
    assert (explained.finished, explained.remaining, explained.eta) == (False, 4, None)
    await bus.cancel_batch(DOMAIN, batch_id, reason="enough")
    explained = await bus.explain_batch(DOMAIN, batch_id)
    assert explained.summary.startswith("COMPLETED_WITH_FAILURES: all 5 jobs ended")
    assert [one.code.value for one in explained.reasons] == ["CALLBACK_WAITING"]


async def test_a_job_whose_step_a_person_has_ended_is_explained_and_the_advice_helps(
    bus: CommandBus, given: Given, ran: list[str]
) -> None:
    """One job waits for its plan, another one for the step to its next stage. Neither is on its way."""
    bus.planner(DOMAIN, "two")(raising(PermanentCommandError("no plan")))
    planned = BatchJob([Stage("one", do("a")), Stage("two")])
    batch_id = await bus.jobs.create_batch(DOMAIN, [planned, job(do("b"), do("c"))])
    given.settled(given.claimed(limit=2))
    first, second = await jobs_of(bus, batch_id)
    assert first.step is not None and second.step is not None
    await bus.cancel_command(DOMAIN, second.step.command_id, reason="by mistake")
    await given.drained()
    [plan] = await bus.troubleshooting.list(DOMAIN)
    await bus.troubleshooting.complete(DOMAIN, plan.command_id, operator="rosa")
    explained = await bus.explain_batch(DOMAIN, batch_id)
    assert explained.summary == "Not finished: 0 of 2 jobs have ended; jobs: 2 stopped by hand."
    [reason] = explained.reasons
    assert (reason.code, reason.count) == (Blocker.STEP_ENDED, 2)
    assert f"ended the command that plans it, {plan.command_id}, which is COMPLETED" in reason.message
    assert f"in stage 'two' of job {first.job_id}, and alike in 1 other job." in reason.message
    assert f"`busload job resume {first.job_id}` plans the stage again" in reason.advice

    await bus.jobs.resume(DOMAIN, first.job_id)
    [reason] = (await bus.explain_batch(DOMAIN, batch_id)).reasons
    assert f"that follows it, {second.step.command_id}, which is CANCELED" in reason.message
    assert f"`busload job resume {second.job_id}` goes on with the next stage" in reason.advice
    await bus.jobs.resume(DOMAIN, second.job_id)
    await given.drained()
    assert counts(await given.batch_now(batch_id)) == (2, 1, 0, 0, 1)


async def _until_stuck(given: Given) -> None:
    """Until all that a worker can do is done: three commands have no handler, and one is parked."""
    done = """SELECT (SELECT count(*) FROM busload.scheduled) = 3 AND (SELECT count(*) FROM busload.troubleshooting) = 1
                 AND (SELECT max(completed_count) FROM busload.batch WHERE batch_type = 'JOBS') = 1"""
    await eventually(lambda: given.database.value(done))
