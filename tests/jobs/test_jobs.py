"""Jobs: stages that follow each other, each a batch, whatever dies in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from busload import (
    BatchCommand,
    BusinessRuleError,
    Command,
    CommandBus,
    DuplicateCommandError,
    HandlerContext,
    InvalidCommandError,
    RetryPolicy,
    Stage,
    SyncCommandBus,
    SyncHandlerContext,
)
from busload.errors import HandlerAlreadyRegisteredError, InvalidOperationError, JobNotFoundError
from busload.jobs import FinishedStage, JobMetadata
from busload.jobs.job import PART, read_part
from busload.sync import SyncFinishedStage
from tests.given import DOMAIN, Database, Given, counts, eventually, raising

pytestmark = pytest.mark.usefixtures("invariants")


def debits(count: int, **options: Any) -> list[BatchCommand]:
    return [BatchCommand("Debit", data={"n": n}, **options) for n in range(count)]


async def job_now(bus: CommandBus, job_id: UUID) -> JobMetadata:
    job = await bus.jobs.get(DOMAIN, job_id)
    assert job is not None
    return job


def shown(job: JobMetadata) -> list[tuple[str, str]]:
    return [(stage.name, stage.status.value) for stage in job.stages]


@pytest.fixture(autouse=True)
def jobs_are_sound(database: Database) -> Iterator[None]:
    """Whatever happens: a job that is under way has something that takes it on, and no batch beyond where it is."""
    yield
    assert not database.rows("""
        SELECT j.job_id FROM busload.job AS j JOIN busload.job_stage AS s USING (job_id, position)
         WHERE j.status = 'IN_PROGRESS'
           AND (CASE s.status WHEN 'IN_PROGRESS' THEN (SELECT count(*) FROM busload.batch WHERE batch_id = s.batch_id)
                              WHEN 'PLANNING' THEN (SELECT count(*) FROM busload.command WHERE command_id = s.plan_id)
                              ELSE 0 END) <> 1
        UNION ALL
        SELECT j.job_id FROM busload.job AS j JOIN busload.job_stage AS s USING (job_id)
          JOIN busload.batch AS b ON b.batch_id = s.batch_id WHERE s.position > j.position""")


async def test_a_stage_begins_when_the_one_before_is_complete(bus: CommandBus, given: Given) -> None:
    """The tasks of a stage carry the job's id and the stage"""
    seen = given.handler()
    job_id = await bus.jobs.create(
        DOMAIN,
        [Stage("extract", debits(3)), Stage("load", debits(2))],
        name="Nightly",
        custom_data={"run": 7},
    )
    job = await job_now(bus, job_id)
    assert (job.status, job.name, job.custom_data, job.started_at) == ("PENDING", "Nightly", {"run": 7}, None)
    assert shown(job) == [("extract", "PENDING"), ("load", "PENDING")]
    assert job.stages[0].batch is not None
    assert job.stages[1].batch is None

    await given.drained()
    job = await job_now(bus, job_id)
    assert (job.status, shown(job)) == ("COMPLETED", [("extract", "COMPLETED"), ("load", "COMPLETED")])
    assert [command.data["n"] for command in seen] == [0, 1, 2, 0, 1]
    extract, load = (stage.batch for stage in job.stages)
    assert extract is not None
    assert load is not None
    assert (counts(extract), counts(load)) == ((3, 3, 0, 0, 0), (2, 2, 0, 0, 0))
    assert (extract.job_id, extract.stage, extract.name) == (job_id, "extract", "Nightly: extract")
    assert (load.job_id, load.stage) == (job_id, "load")
    assert extract.completed_at is not None
    assert extract.completed_at <= load.created_at
    assert job.started_at == extract.started_at
    assert job.completed_at is not None
    assert load.completed_at is not None
    assert job.completed_at >= load.completed_at
    assert given.database.count("job_part") == 0


async def test_a_planner_fans_out_and_in_by_what_the_stage_before_returned(bus: CommandBus, given: Given) -> None:
    async def pages(command: Command, ctx: HandlerContext) -> Any:
        return {"pages": command.data["n"]}

    given.handler("Count", pages)
    rendered = given.handler("Render")
    reported = given.handler("Report")

    @bus.planner(DOMAIN, "render")
    async def fan_out(finished: FinishedStage, ctx: HandlerContext) -> list[BatchCommand]:
        assert (finished.name, finished.status, finished.job.name) == ("count", "COMPLETED", "Book")
        return [
            BatchCommand("Render", data={"page": page})
            async for command in finished.results()
            for page in range(command.result["pages"])
        ]

    @bus.planner(DOMAIN, "report")
    def fan_in(finished: SyncFinishedStage, ctx: SyncHandlerContext) -> list[BatchCommand]:
        assert finished.batch is not None
        pages = sum(1 for _ in finished.results("COMPLETED"))
        return [BatchCommand("Report", data={"pages": pages, "total": finished.batch.total_count})]

    first = [BatchCommand("Count", data={"n": n}) for n in (2, 3)]
    job_id = await bus.jobs.create(DOMAIN, [Stage("count", first), Stage("render"), Stage("report")], name="Book")
    await given.drained()
    job = await job_now(bus, job_id)
    assert (job.status, job.step) == ("COMPLETED", None)
    assert [stage.planned for stage in job.stages] == [False, True, True]
    assert len(rendered) == 5
    assert [command.data for command in reported] == [{"pages": 5, "total": 5}]


async def test_a_planner_reads_more_results_than_fit_a_page(
    bus: CommandBus, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("busload.jobs.steps", "busload.sync.steps"):
        monkeypatch.setattr(f"{module}.PAGE", 2)
    given.handler()
    seen: list[list[int]] = []

    @bus.planner(DOMAIN, "one")
    async def one(finished: FinishedStage, ctx: HandlerContext) -> list[BatchCommand]:
        seen.append([command.data["n"] async for command in finished.results()])
        return debits(4)

    @bus.planner(DOMAIN, "two")
    def two(finished: SyncFinishedStage, ctx: SyncHandlerContext) -> list[BatchCommand]:
        seen.append([command.data["n"] for command in finished.results(status="COMPLETED")])
        return []

    await bus.jobs.create(DOMAIN, [Stage("zero", debits(5)), Stage("one"), Stage("two")])
    await given.drained()
    assert seen == [[0, 1, 2, 3, 4], [0, 1, 2, 3]]


async def test_a_stage_of_nothing_is_skipped_and_the_job_goes_on(bus: CommandBus, given: Given) -> None:
    given.handler()
    seen: list[FinishedStage] = []

    @bus.planner(DOMAIN, "maybe")
    async def maybe(finished: FinishedStage, ctx: HandlerContext) -> list[BatchCommand]:
        return []

    @bus.planner(DOMAIN, "last")
    async def last(finished: FinishedStage, ctx: HandlerContext) -> list[BatchCommand]:
        seen.append(finished)
        assert len([command async for command in finished.results()]) == (finished.batch is not None)
        return []

    job_id = await bus.jobs.create(
        DOMAIN, [Stage("first", debits(1)), Stage("none", []), Stage("maybe"), Stage("third", debits(1)), Stage("last")]
    )
    await given.drained()
    job = await job_now(bus, job_id)
    skipped = [("none", "SKIPPED"), ("maybe", "SKIPPED")]
    assert shown(job) == [("first", "COMPLETED"), *skipped, ("third", "COMPLETED"), ("last", "SKIPPED")]
    assert job.status == "COMPLETED"
    assert seen[0].name == "third"

    job_id = await bus.jobs.create(DOMAIN, [Stage("first", debits(1)), Stage("maybe"), Stage("last")])
    with pytest.raises(TimeoutError, match=r"is PENDING, at stage 'first' \(PENDING\)"):
        await bus.jobs.wait(DOMAIN, job_id, timeout=0)
    await given.drained()
    assert (seen[1].name, seen[1].batch) == ("maybe", None)


async def test_failures_stop_a_job_until_somebody_resumes_it(bus: CommandBus, given: Given) -> None:
    given.handler("Refuse", raising(BusinessRuleError("no")))
    seen = given.handler()
    job_id = await bus.jobs.create(DOMAIN, [Stage("one", [BatchCommand("Refuse")]), Stage("two", debits(1))])
    with pytest.raises(InvalidOperationError, match=r"IN_PROGRESS\. Only a job that has FAILED"):
        await bus.jobs.resume(DOMAIN, job_id)
    await given.drained()
    job = await bus.jobs.wait(DOMAIN, job_id, timeout=25)
    assert (job.status, seen) == ("FAILED", [])
    assert shown(job) == [("one", "COMPLETED_WITH_FAILURES"), ("two", "PENDING")]
    assert job.completed_at is not None
    assert [job.job_id for job in await bus.jobs.list(DOMAIN, status="FAILED")] == [job_id]

    await bus.jobs.resume(DOMAIN, job_id, operator="rosa")
    job = await job_now(bus, job_id)
    assert (job.status, job.operator, job.completed_at) == ("IN_PROGRESS", "rosa", None)
    await given.drained()
    job = await job_now(bus, job_id)
    assert (job.status, len(seen)) == ("COMPLETED", 1)
    with pytest.raises(InvalidOperationError, match="is COMPLETED"):
        await bus.jobs.resume(DOMAIN, job_id)


async def test_a_last_stage_with_failures_fails_the_job_too(bus: CommandBus, given: Given) -> None:
    given.handler("Refuse", raising(BusinessRuleError("no")))
    told = given.handler("Tell")
    job_id = await bus.jobs.create(DOMAIN, [Stage("one", [BatchCommand("Refuse")])], on_complete=BatchCommand("Tell"))
    await given.drained()
    assert ((await job_now(bus, job_id)).status, told) == ("FAILED", [])
    await bus.jobs.resume(DOMAIN, job_id)
    await given.drained()
    assert ((await job_now(bus, job_id)).status, len(told)) == ("COMPLETED", 1)


async def test_a_job_goes_on_after_failures_if_it_is_told_to(bus: CommandBus, given: Given) -> None:
    given.handler("Refuse", raising(BusinessRuleError("no")))
    seen = given.handler()
    told = given.handler("Tell")
    job_id = await bus.jobs.create(
        DOMAIN,
        [Stage("one", [BatchCommand("Refuse")]), Stage("two", debits(1))],
        continue_after_failures=True,
        name="Nightly",
        on_complete=BatchCommand("Tell", data={"to": "rosa"}),
    )
    await given.drained()
    job = await job_now(bus, job_id)
    assert (job.status, job.continue_after_failures, len(seen)) == ("COMPLETED", True, 1)
    [command] = told
    assert command.data["to"] == "rosa"
    summary = command.data["job"]
    assert (summary["job_id"], summary["name"], summary["status"]) == (str(job_id), "Nightly", "COMPLETED")
    assert [(s["name"], s["status"], s["failed_count"]) for s in summary["stages"]] == [
        ("one", "COMPLETED_WITH_FAILURES", 1),
        ("two", "COMPLETED", 0),
    ]


async def test_canceling_stops_the_stage_and_all_that_follow(bus: CommandBus, given: Given) -> None:
    seen = given.handler()
    job_id = await bus.jobs.create(DOMAIN, [Stage("one", debits(3)), Stage("two", debits(2))])
    assert await bus.jobs.cancel(DOMAIN, job_id, reason="wrong list", operator="rosa") == 3
    assert await bus.jobs.cancel(DOMAIN, job_id, reason="again", operator="otto") == 0
    job = await bus.jobs.wait(DOMAIN, job_id, timeout=25)
    assert (job.status, job.operator, job.reason) == ("CANCELED", "rosa", "wrong list")
    await given.drained()
    job = await job_now(bus, job_id)
    assert (job.status, shown(job)) == ("CANCELED", [("one", "COMPLETED_WITH_FAILURES"), ("two", "PENDING")])
    assert (seen, given.database.count("job_part"), given.database.is_at_rest()) == ([], 0, True)
    with pytest.raises(InvalidOperationError, match="is CANCELED"):
        await bus.jobs.resume(DOMAIN, job_id)


async def test_a_canceled_job_is_not_planned_any_more(bus: CommandBus, given: Given) -> None:
    given.handler()
    asked = []
    job_id = await bus.jobs.create(DOMAIN, [Stage("one", debits(1)), Stage("two")])
    await given.drained()
    assert shown(await job_now(bus, job_id)) == [("one", "COMPLETED"), ("two", "PLANNING")]

    @bus.planner(DOMAIN, "two")
    async def two(finished: FinishedStage, ctx: HandlerContext) -> list[BatchCommand]:
        asked.append(finished)
        await bus.jobs.cancel(DOMAIN, job_id, reason="while it is planned")
        return debits(5)

    given.make_due()
    await given.drained()
    job = await job_now(bus, job_id)
    assert (len(asked), job.status, shown(job)[1]) == (1, "CANCELED", ("two", "CANCELED"))

    other = await bus.jobs.create(DOMAIN, [Stage("one", debits(1)), Stage("two")])
    [leased] = given.claimed()
    given.settled([leased])
    worker = given.registered_worker()
    given.claimed(by=worker)  # the step was taken by a worker that is gone
    await bus.jobs.cancel(DOMAIN, other, reason="before it is planned")
    given.died(worker)
    given.rescued()
    await given.drained()
    assert ((await job_now(bus, other)).status, len(asked), given.database.is_at_rest()) == ("CANCELED", 1, True)


@pytest.mark.parametrize("place", ["queue", "scheduled", "troubleshooting"])
async def test_canceling_ends_the_planner_wherever_it_waits(bus: CommandBus, given: Given, place: str) -> None:
    job_id = await bus.jobs.create(DOMAIN, [Stage("one", debits(1)), Stage("two")])
    given.settled(given.claimed())
    if place == "queue":
        given.settled(given.claimed())  # the step: it begins with the planning of the next stage
        await bus.jobs.resume(DOMAIN, job_id)
    else:
        given.handler()
        if place == "troubleshooting":
            bus.planner(DOMAIN, "two")(raising(BusinessRuleError("no")))
        await given.drained()
    assert given.database.count(place) == 1
    step = (await job_now(bus, job_id)).step
    assert step is not None and step.command_type.endswith("two")

    assert await bus.jobs.cancel(DOMAIN, job_id, reason="wrong list", operator="rosa") == 1
    job = await job_now(bus, job_id)
    assert (job.status, shown(job)) == ("CANCELED", [("one", "COMPLETED"), ("two", "CANCELED")])
    ended = await bus.get_command(DOMAIN, step.command_id)
    assert ended is not None and ended.status == "CANCELED"
    last = (await bus.get_audit_trail(DOMAIN, step.command_id))[-1]
    assert (last.type.endswith("CANCELED"), last.operator, last.details) == (True, "rosa", {"reason": "wrong list"})
    assert given.database.is_at_rest()


async def test_the_step_waits_for_a_worker_that_has_the_planner(bus: CommandBus, given: Given) -> None:
    given.handler()
    job_id = await bus.jobs.create(DOMAIN, [Stage("one", debits(1)), Stage("two")])
    await given.drained()
    job = await job_now(bus, job_id)
    assert job.step is not None
    assert (job.step.command_type, job.step.status) == ("busload.Plan.two", "SCHEDULED")
    trail = await bus.get_audit_trail(DOMAIN, job.step.command_id)
    assert "NO_HANDLER" in [event.type for event in trail]

    @bus.planner(DOMAIN, "two")
    async def two(finished: FinishedStage, ctx: HandlerContext) -> list[BatchCommand]:
        return debits(1)

    given.make_due()
    await given.drained()
    assert (await job_now(bus, job_id)).status == "COMPLETED"


async def test_a_planner_that_fails_is_tried_again_and_then_waits_for_a_person(bus: CommandBus, given: Given) -> None:
    given.handler()
    broken = True

    @bus.planner(DOMAIN, "two", retry=RetryPolicy(max_attempts=2, backoff=(0,)))
    async def two(finished: FinishedStage, ctx: HandlerContext) -> list[BatchCommand]:
        if broken:
            raise ConnectionError("no answer")
        return debits(1)

    job_id = await bus.jobs.create(DOMAIN, [Stage("one", debits(1)), Stage("two")])
    await given.drained()
    job = await job_now(bus, job_id)
    assert job.step is not None
    assert (job.status, job.stage("two").status) == ("IN_PROGRESS", "PLANNING")
    assert (job.step.status, job.step.attempts) == ("IN_TROUBLESHOOTING_QUEUE", 2)
    assert job.step.last_error_message == "no answer"
    [listed] = await bus.jobs.list(DOMAIN)
    assert listed == job

    broken = False
    await bus.troubleshooting.retry(DOMAIN, job.step.command_id)
    await given.drained()
    assert (await job_now(bus, job_id)).status == "COMPLETED"


TAKEN = uuid4()


NO_STAGES = {
    "nothing": (None, "INVALID_PLAN", "The planner of stage 'nothing' returned None, wanted a list of BatchCommand"),
    "one": (BatchCommand("Debit"), "INVALID_PLAN", "wanted a list of BatchCommand"),
    "text": (["Debit"], "INVALID_OPTION", "found 'Debit', wanted a BatchCommand"),
    "bad": ([BatchCommand("no type")], "INVALID_NAME", "found 'no type'"),
    "taken": ([BatchCommand("Debit", TAKEN)], "DuplicateCommandError", f"already has command {TAKEN}"),
    "no": (BusinessRuleError("not today", code="HOLIDAY"), "HOLIDAY", "not today"),
}


async def test_what_cannot_be_a_stage_waits_for_a_person_at_once(bus: CommandBus, given: Given) -> None:
    given.handler()
    await bus.send(DOMAIN, "Debit", command_id=TAKEN)
    for name, (returned, _, _) in NO_STAGES.items():

        @bus.planner(DOMAIN, name)
        async def plan(finished: FinishedStage, ctx: HandlerContext, returned: Any = returned) -> Any:
            if isinstance(returned, Exception):
                raise returned
            return returned

    job_ids = {name: await bus.jobs.create(DOMAIN, [Stage("first", debits(1)), Stage(name)]) for name in NO_STAGES}
    await given.drained()
    for name, job_id in job_ids.items():
        step = (await job_now(bus, job_id)).step
        _, code, message = NO_STAGES[name]
        assert step is not None
        assert (step.status, step.attempts, step.last_error_code) == ("IN_TROUBLESHOOTING_QUEUE", 1, code)
        assert message in str(step.last_error_message)
        assert len(await bus.list_batches(DOMAIN, job_id=job_id)) == 1


async def test_what_a_planner_writes_in_its_transaction_is_there_if_its_stage_is(
    bus: CommandBus, given: Given, database: Database
) -> None:
    given.handler()
    database.rows("CREATE TABLE note (text text)")
    plans: list[Any] = [None, debits(1)]

    @bus.planner(DOMAIN, "two")
    async def two(finished: FinishedStage, ctx: HandlerContext) -> Any:
        async with ctx.transaction() as conn:
            await conn.execute("INSERT INTO note VALUES ('planned')")
        return plans.pop(0)

    job_id = await bus.jobs.create(DOMAIN, [Stage("one", debits(1)), Stage("two")])
    await given.drained()
    assert database.rows("SELECT * FROM note") == []
    job = await job_now(bus, job_id)
    assert job.step is not None
    await bus.troubleshooting.retry(DOMAIN, job.step.command_id)
    await given.drained()
    assert database.rows("SELECT * FROM note") == [("planned",)]
    assert (await job_now(bus, job_id)).status == "COMPLETED"


@pytest.mark.parametrize("planned", [False, True])
async def test_a_job_whose_step_an_operator_has_ended_can_be_resumed(
    bus: CommandBus, given: Given, planned: bool
) -> None:
    """Nobody would ever take it on otherwise"""
    given.handler()
    refuse = True

    @bus.planner(DOMAIN, "two")
    async def two(finished: FinishedStage, ctx: HandlerContext) -> Any:
        return None if refuse else debits(1)

    commands = None if planned else [BatchCommand("Debit", taken := uuid4())]
    job_id = await bus.jobs.create(DOMAIN, [Stage("one", debits(1)), Stage("two", commands)])
    if not planned:
        await bus.send(DOMAIN, "Debit", command_id=taken)  # the step will find its id used
    await given.drained()
    job = await job_now(bus, job_id)
    assert job.step is not None
    assert job.step.status == "IN_TROUBLESHOOTING_QUEUE"
    with pytest.raises(InvalidOperationError, match="Only a job that has FAILED"):
        await bus.jobs.resume(DOMAIN, job_id)
    await bus.troubleshooting.cancel(DOMAIN, job.step.command_id, reason="who sent this?")
    given.database.rows("DELETE FROM busload.job_part")
    refuse = False
    await bus.jobs.resume(DOMAIN, job_id, operator="rosa")
    await given.drained()
    job = await job_now(bus, job_id)
    assert (job.status, shown(job)[1][1]) == ("COMPLETED", "COMPLETED" if planned else "SKIPPED")


async def test_a_job_survives_a_worker_that_dies_between_two_stages(bus: CommandBus, given: Given) -> None:
    """The step is sent by the transaction that ends the stage: killed after it, the next worker takes it"""
    seen = given.handler()
    job_id = await bus.jobs.create(DOMAIN, [Stage("one", debits(2)), Stage("two", debits(2))])
    worker = given.registered_worker()
    given.settled(given.claimed(2, by=worker))  # its last settlement
    [step] = given.claimed(by=worker)
    assert step.command_type == "busload.Stage"
    given.died(worker)
    given.rescued()
    await given.drained()
    job = await job_now(bus, job_id)
    assert (job.status, len(seen)) == ("COMPLETED", 2)


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_a_planner_that_has_lost_its_step_begins_nothing(bus: CommandBus, given: Given, kind: str) -> None:
    """Its worker was thought dead while it planned; what the next one plans is the stage"""
    given.handler()
    calls: list[int] = []

    def planned() -> list[BatchCommand]:
        calls.append(len(calls))
        if len(calls) == 1:
            with Database(bus.dsn) as beside:
                assert beside.take_over().commands == 1
        return debits(len(calls))

    async def plan(finished: FinishedStage, ctx: HandlerContext) -> list[BatchCommand]:
        return planned()

    def plan_in_thread(finished: SyncFinishedStage, ctx: SyncHandlerContext) -> list[BatchCommand]:
        return planned()

    bus.planner(DOMAIN, "two")(plan if kind == "async" else plan_in_thread)
    job_id = await bus.jobs.create(DOMAIN, [Stage("one", debits(1)), Stage("two")])
    async with given.running(settings=replace(given.settings, lease_for=timedelta(seconds=2))):
        job = await bus.jobs.wait(DOMAIN, job_id, timeout=60)
    batch = job.stage("two").batch
    assert batch is not None
    assert batch.total_count == batch.completed_count == len(calls)  # those of its last call
    assert len(calls) > 1
    assert len(await bus.list_batches(DOMAIN, job_id=job_id)) == 2


async def test_a_step_that_is_repeated_begins_nothing_twice(bus: CommandBus, given: Given) -> None:
    """Steps are commands, which may run again, and which others can forge"""
    given.handler()
    asked = []

    @bus.planner(DOMAIN, "two")
    async def two(finished: FinishedStage, ctx: HandlerContext) -> list[BatchCommand]:
        asked.append(finished)
        return debits(2)

    stages = [Stage("one", debits(1)), Stage("two"), Stage("three", [BatchCommand("Later")]), Stage("four", debits(1))]
    job_id = await bus.jobs.create(DOMAIN, stages)
    await given.drained()  # nobody knows how to run what is Later
    before = await job_now(bus, job_id)
    assert shown(before)[2:] == [("three", "IN_PROGRESS"), ("four", "PENDING")]
    for position in (-1, 0, 1, 2, 3, 99):
        await given.sent("busload.Stage", {"job_id": str(job_id), "position": position})
        await given.sent("busload.Plan.two", {"job_id": str(job_id), "position": position})
    await given.sent("busload.Stage", {"job_id": str(uuid4()), "position": 0})
    await given.sent("busload.Stage", ["what?"])
    await given.drained()
    assert await job_now(bus, job_id) == before
    refused = sorted(str(item.last_error_message) for item in await bus.troubleshooting.list(DOMAIN))
    assert [text[:15] for text in refused] == ["Stage 'three' o", "Steps of a job ", "There is no job"]

    given.handler("Later")
    given.make_due()
    await given.drained()
    job = await job_now(bus, job_id)
    assert (job.status, len(asked)) == ("COMPLETED", 1)
    assert [batch.total_count for batch in await bus.list_batches(DOMAIN, job_id=job_id)] == [1, 1, 2, 1]


async def test_two_workers_and_many_jobs_begin_each_stage_once(bus: CommandBus, given: Given) -> None:
    """Exactly one batch for each stage, whoever takes the step"""
    seen = given.handler()

    @bus.planner(DOMAIN, "two")
    async def two(finished: FinishedStage, ctx: HandlerContext) -> list[BatchCommand]:
        return debits(3)

    told = given.handler("Tell")
    job_ids = [
        await bus.jobs.create(
            DOMAIN,
            [Stage("one", debits(2)), Stage("two"), Stage("three", debits(1))],
            on_complete=BatchCommand("Tell"),
        )
        for _ in range(10)
    ]
    async with given.running(), given.running():
        jobs = [await bus.jobs.wait(DOMAIN, job_id, timeout=30) for job_id in job_ids]
        await eventually(lambda: len(told) == 10)
    assert {job.status for job in jobs} == {"COMPLETED"}
    assert len(seen) == 60
    assert len(await bus.list_batches(DOMAIN)) == 30


async def test_a_long_list_is_kept_in_parts_and_leaves_in_order(
    bus: CommandBus, given: Given, database: Database
) -> None:
    given.handler()
    later = [
        BatchCommand("Debit", uuid4(), {"n": n, "text": 'ü\\"\u2028'}, task_key=f"t{n}", priority=3, max_attempts=2)
        for n in range(2 * PART + 1)
    ]
    job_id = await bus.jobs.create(DOMAIN, [Stage("one", debits(1)), Stage("two", later)])
    kept = database.rows("SELECT commands::text FROM busload.job_part ORDER BY part")
    assert [len(read_part(text)) for (text,) in kept] == [PART, PART, 1]
    await given.drained()
    job = await job_now(bus, job_id)
    assert (job.status, database.count("job_part")) == ("COMPLETED", 0)
    batch = job.stage("two").batch
    assert batch is not None
    assert batch.completed_count == len(later)
    commands = await bus.list_batch_commands(DOMAIN, batch.batch_id, limit=10_000)
    assert [(c.command_id, c.data, c.task_key, c.priority, c.max_attempts) for c in commands] == [
        (c.command_id, c.data, c.task_key, c.priority, c.max_attempts) for c in later
    ]


async def test_a_job_joins_a_transaction(bus: CommandBus, given: Given, conn: psycopg.AsyncConnection) -> None:
    stages = [Stage("one", debits(1)), Stage("two", debits(1))]
    before = given.database.everything()
    async with conn.transaction(force_rollback=True):
        job_id = await bus.jobs.create(DOMAIN, stages, conn=conn)
    assert given.database.everything() == before
    assert await bus.jobs.get(DOMAIN, job_id) is None
    async with conn.transaction():
        assert await bus.jobs.create(DOMAIN, stages, job_id=job_id, conn=conn) == job_id
    with pytest.raises(InvalidOperationError, match="already a job"):
        await bus.jobs.create(DOMAIN, stages, job_id=job_id)
    assert len(await bus.jobs.list(DOMAIN)) == 1


SAME = uuid4()


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, "/stages: found \\[\\], wanted at least one Stage"),
    (None, {}, "wanted at least one Stage"),
    (["one"], {}, "/stages/0: found 'one', wanted a Stage"),
    ([Stage("one")], {}, "EMPTY_BATCH at /stages/0/commands"),
    ([Stage("one", [])], {}, "EMPTY_BATCH at /stages/0/commands"),
    ([Stage("a b", debits(1))], {}, "INVALID_NAME at /stages/0/name"),
    ([Stage("x" * 201, debits(1))], {}, "at most 200"),
    ([Stage("one", BatchCommand("Debit"))], {}, "/stages/0/commands: found BatchCommand"),  # type: ignore[arg-type]
    ([Stage("one", debits(1)), Stage("one")], {}, "a second stage 'one'"),
    ([Stage("one", debits(1)), Stage("two", [BatchCommand("Debit"), BatchCommand("a b")])], {},
     r" /stages/1/commands/1/command_type"),
    ([Stage("one", debits(1))], {"name": ""}, "/name"),
    ([Stage("one", debits(1))], {"job_id": "7"}, "/job_id"),
    ([Stage("one", debits(1))], {"custom_data": [1]}, "/custom_data"),
    ([Stage("one", debits(1))], {"custom_data": {"x": object()}}, "/custom_data"),
    ([Stage("one", debits(1))], {"continue_after_failures": 1}, "/continue_after_failures"),
    ([Stage("one", debits(1))], {"on_complete": print}, "wanted a BatchCommand"),
    ([Stage("one", debits(1))], {"on_complete": BatchCommand("Tell", data={"job": 1})}, 'whose "job" is missing'),
]  # fmt: skip


async def test_a_job_that_makes_no_sense_is_refused(bus: CommandBus, database: Database) -> None:
    before = database.everything()
    for stages, options, message in REFUSED:
        with pytest.raises(InvalidCommandError, match=message):
            await bus.jobs.create(DOMAIN, stages, **options)
    assert database.everything() == before


async def test_a_command_id_is_for_one_command_of_all_stages(bus: CommandBus, database: Database) -> None:
    one, two = Stage("one", [BatchCommand("Debit", SAME)]), Stage("two", [BatchCommand("Debit", SAME)])
    with pytest.raises(DuplicateCommandError, match="more than once"):
        await bus.jobs.create(DOMAIN, [one, two])
    with pytest.raises(DuplicateCommandError, match="more than once"):
        await bus.jobs.create(DOMAIN, [one], on_complete=BatchCommand("Tell", SAME))
    await bus.send(DOMAIN, "Debit", command_id=SAME)
    before = database.everything()
    for stages, callback in (
        ([one], None),
        ([Stage("zero", debits(1)), two], None),
        ([Stage("zero", debits(1))], SAME),
    ):
        on_complete = None if callback is None else BatchCommand("Tell", callback)
        with pytest.raises(DuplicateCommandError, match="already has command"):
            await bus.jobs.create(DOMAIN, stages, on_complete=on_complete)
    assert database.everything() == before


async def test_an_on_complete_whose_id_was_used_meanwhile_does_not_hold_the_job_up(
    bus: CommandBus, given: Given
) -> None:
    given.handler()
    job_id = await bus.jobs.create(DOMAIN, [Stage("one", debits(1))], on_complete=BatchCommand("Tell", SAME))
    await bus.send(DOMAIN, "Debit", command_id=SAME)
    await given.drained()
    assert (await job_now(bus, job_id)).status == "COMPLETED"


async def test_what_there_is_not_is_said(bus: CommandBus, given: Given) -> None:
    unknown = uuid4()
    assert await bus.jobs.get(DOMAIN, unknown) is None
    assert await bus.jobs.list(DOMAIN) == []
    for call in (
        bus.jobs.resume(DOMAIN, unknown),
        bus.jobs.cancel(DOMAIN, unknown, reason="test"),
        bus.jobs.wait(DOMAIN, unknown, timeout=1),
    ):
        with pytest.raises(JobNotFoundError, match=f"no job {unknown} in domain 'payments'"):
            await call
    job_id = await bus.jobs.create(DOMAIN, [Stage("one", debits(1))])
    assert await bus.jobs.get("crm", job_id) is None
    with pytest.raises(KeyError, match="has no stage 'two': one"):
        (await job_now(bus, job_id)).stage("two")
    with pytest.raises(InvalidCommandError, match="wanted one of PENDING, IN_PROGRESS"):
        await bus.jobs.list(DOMAIN, status="DONE")  # type: ignore[arg-type]
    with pytest.raises(InvalidCommandError, match="/reason"):
        await bus.jobs.cancel(DOMAIN, job_id, reason="")


def test_a_planner_is_registered_once_and_its_type_is_ours(bus: CommandBus) -> None:
    async def plan(finished: FinishedStage, ctx: HandlerContext) -> list[BatchCommand]:
        return []

    assert bus.planner(DOMAIN, "two")(plan) is plan
    with pytest.raises(HandlerAlreadyRegisteredError, match="plan"):
        bus.planner(DOMAIN, "two")(plan)
    for name in ("busload.Plan.two", "busload.Stage"):
        with pytest.raises(InvalidCommandError, match="busload uses itself"):
            bus.handler(DOMAIN, name)
    with pytest.raises(InvalidCommandError, match="/stage"):
        bus.planner(DOMAIN, "a b")
    with pytest.raises(ValueError, match="A planner must be a function, found 3"):
        bus.planner(DOMAIN, "three")(3)  # type: ignore[type-var]


async def test_jobs_are_listed_newest_first_and_by_status(bus: CommandBus, given: Given) -> None:
    job_ids = [await bus.jobs.create(DOMAIN, [Stage("one", debits(1))]) for _ in range(3)]
    await bus.jobs.create("crm", [Stage("one", debits(1))])
    await bus.jobs.cancel(DOMAIN, job_ids[0], reason="test")
    assert [job.job_id for job in await bus.jobs.list(DOMAIN)] == job_ids[::-1]
    assert [job.job_id for job in await bus.jobs.list(DOMAIN, limit=1, offset=1)] == [job_ids[1]]
    assert [job.job_id for job in await bus.jobs.list(DOMAIN, status="PENDING")] == job_ids[:0:-1]
    assert await bus.jobs.list(DOMAIN, status="IN_PROGRESS") == []
    given.claimed(2)  # the step of the canceled one comes first
    assert len(await bus.jobs.list(DOMAIN, status="IN_PROGRESS")) == 1


async def test_any_batch_can_carry_a_job_and_a_stage(bus: CommandBus, sync_bus: SyncCommandBus, given: Given) -> None:
    """Without bus.jobs.create as well, in both faces"""
    job_id = uuid4()
    one = await bus.create_batch(DOMAIN, debits(1), job_id=job_id, stage="extract")
    async with bus.open_batch(DOMAIN, job_id=job_id, stage="load") as opened:
        await opened.add("Debit")
    two = await asyncio.to_thread(lambda: sync_bus.create_batch(DOMAIN, debits(1), job_id=job_id, stage="tidy up"))
    with sync_bus.open_batch(DOMAIN, job_id=job_id) as other:
        other.add("Debit")
    await given.batch()
    found = await bus.list_batches(DOMAIN, job_id=job_id)
    assert [batch.batch_id for batch in found] == [other.batch_id, two, opened.batch_id, one]
    assert [batch.stage for batch in found] == [None, "tidy up", "load", "extract"]
    assert {batch.job_id for batch in found} == {job_id}
    page = await bus.list_batches(DOMAIN, job_id=job_id, status="PENDING", limit=2, after=two)
    assert [batch.batch_id for batch in page] == [opened.batch_id, one]
    assert sync_bus.list_batches("crm", job_id=job_id) == []
    assert len(await bus.list_batches(DOMAIN)) == 5
    for wrong in ({"job_id": 7}, {"stage": ""}, {"stage": "x" * 256}):
        with pytest.raises(InvalidCommandError):
            await bus.create_batch(DOMAIN, debits(1), **wrong)


async def test_the_sync_face_has_jobs_too(sync_bus: SyncCommandBus, given: Given) -> None:
    given.handler()
    job_id = sync_bus.jobs.create(DOMAIN, [Stage("one", debits(1)), Stage("two", debits(1))])
    async with given.running():
        job = await asyncio.to_thread(sync_bus.jobs.wait, DOMAIN, job_id, timedelta(seconds=20))
    assert job.status == "COMPLETED"
    assert sync_bus.jobs.get(DOMAIN, job_id) == job == sync_bus.jobs.list(DOMAIN)[0]
    other = sync_bus.jobs.create(DOMAIN, [Stage("one", debits(2))])
    with pytest.raises(TimeoutError, match="has not ended in time"):
        sync_bus.jobs.wait(DOMAIN, other, timeout=0)
    assert sync_bus.jobs.cancel(DOMAIN, other, reason="test") == 2
    with pytest.raises(InvalidOperationError):
        sync_bus.jobs.resume(DOMAIN, other)
    with pytest.raises(JobNotFoundError):
        sync_bus.jobs.wait(DOMAIN, uuid4())


async def test_with_a_broker_every_stage_waits_to_be_published(dsn: str, given: Given, database: Database) -> None:
    """As any batch does that is written in somebody's transaction"""
    waiting = "SELECT b.stage, d.strategy, o.hi - o.lo + 1 FROM busload.outbox o JOIN busload.batch b USING (batch_id)"
    waiting += " JOIN busload.dispatch d USING (batch_id)"
    with SyncCommandBus(dsn, transport="redis://127.0.0.1:1") as publishing:
        job_id = publishing.jobs.create(DOMAIN, [Stage("one", debits(3)), Stage("two", debits(2))])
        assert database.rows(waiting) == [("one", "relay", 3)]
        [batch] = publishing.list_batches(DOMAIN, job_id=job_id)
        publishing.cancel_batch(DOMAIN, batch.batch_id, reason="test")
        await given.drained()
        publishing.jobs.resume(DOMAIN, job_id)
        assert database.rows(waiting) == [("two", "relay", 2)]


async def test_batches_stay_as_long_as_their_job_does_and_go_with_it(
    bus: CommandBus, given: Given, database: Database
) -> None:
    given.handler()

    @bus.planner(DOMAIN, "two")
    async def two(finished: FinishedStage, ctx: HandlerContext) -> Any:
        return None

    job_id = await bus.jobs.create(DOMAIN, [Stage("one", debits(2)), Stage("two")], name="Nightly")
    await given.drained()
    database.rows("UPDATE busload.batch SET completed_at = completed_at - interval '1 year'")
    database.rows("UPDATE busload.execution SET finished_at = finished_at - interval '1 year'")
    database.rows("UPDATE busload.command SET created_at = created_at - interval '1 year'")
    month = timedelta(days=30)
    assert (await bus.prune(month, dry_run=True)).batches == 0
    assert (await bus.prune(month)).batches == 0
    assert (await job_now(bus, job_id)).stage("one").batch is not None

    await bus.jobs.cancel(DOMAIN, job_id, reason="nobody wants it")
    assert (await bus.prune(month)).batches == 0
    database.rows("UPDATE busload.job SET completed_at = completed_at - interval '1 year'")
    assert (await bus.prune(month, dry_run=True)).batches == 1
    assert (await bus.prune(month, archive=True)).batches == 1
    assert await bus.jobs.get(DOMAIN, job_id) is None
    assert [database.count(table) for table in ("job", "job_stage", "batch")] == [0, 0, 0]
    [(name, stages)] = database.rows("SELECT name, stages FROM busload.archived_job")
    assert (name, [stage["name"] for stage in stages]) == ("Nightly", ["one", "two"])
    assert database.rows("SELECT job_id, stage FROM busload.archived_batch") == [(str(job_id), "one")]
