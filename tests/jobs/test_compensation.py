"""A job that fails or is canceled undoes what its stages have done: the last one first, whatever fails or dies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from busload import (
    BatchCommand,
    BatchJob,
    BusinessRuleError,
    Command,
    CommandBus,
    HandlerContext,
    InvalidCommandError,
    PermanentCommandError,
    Stage,
    SyncCommandBus,
)
from busload.commands import claim
from busload.errors import DuplicateCommandError, InvalidOperationError
from busload.jobs import FinishedStage, JobMetadata
from tests.given import DOMAIN, Database, Given, raising


@pytest.fixture
def ran(given: Given) -> list[str]:
    """What was done, in order. `No` refuses, `Park` goes to troubleshooting, `Wait` has no handler yet."""
    names: list[str] = []

    async def do(command: Command, ctx: HandlerContext) -> None:
        names.append(command.data)

    given.handler("Do", do)
    given.handler("No", raising(BusinessRuleError("no")))
    given.handler("Park", raising(PermanentCommandError("no")))
    return names


@pytest.fixture(autouse=True)
def compensations_are_sound(database: Database) -> Iterator[None]:
    """A job that is compensating has something that takes it on. What undoes a stage is there once it has begun."""
    yield
    assert not database.rows("""
        SELECT job_id FROM busload.job AS j WHERE status = 'COMPENSATING' AND NOT EXISTS (
               SELECT FROM busload.job_stage AS s JOIN busload.batch AS b
                   ON b.batch_id = CASE WHEN s.undo = 'IN_PROGRESS' THEN s.undo_batch_id ELSE s.batch_id END
                WHERE s.job_id = j.job_id
                  AND (s.undo = 'IN_PROGRESS' OR s.position = j.position AND s.status = 'IN_PROGRESS'))
        UNION ALL
        SELECT job_id FROM busload.job_stage AS s WHERE (undo IN ('IN_PROGRESS', 'DONE')) IS DISTINCT FROM
               CASE WHEN undo IS NOT NULL
                    THEN EXISTS (SELECT FROM busload.batch AS b WHERE b.batch_id = s.undo_batch_id) END""")


def do(*names: str) -> list[BatchCommand]:
    return [BatchCommand("Do", data=name) for name in names]


NO, PARK, WAIT = BatchCommand("No"), BatchCommand("Park"), BatchCommand("Wait")


async def job_now(bus: CommandBus, job_id: UUID) -> JobMetadata:
    job = await bus.jobs.get(DOMAIN, job_id)
    assert job is not None
    return job


def undone(job: JobMetadata) -> list[tuple[int, int] | None]:
    """Of each stage: how many commands undo it, and how many of them have completed."""
    found = [stage.compensation for stage in job.stages]
    return [None if batch is None else (batch.total_count, batch.completed_count) for batch in found]


async def test_a_job_that_fails_undoes_its_stages_in_reverse(
    bus: CommandBus, given: Given, ran: list[str], invariants: None
) -> None:
    stages = [
        Stage("book", do("book"), compensate=do("unbook")),
        Stage("charge", do("charge"), compensate=do("refund", "tell")),
        Stage("note", do("note")),
        Stage("ship", [NO], compensate=do("unship")),
        Stage("thank", do("thank"), compensate=do("regret")),
    ]
    job_id = await bus.jobs.create(DOMAIN, stages, name="Trip")
    await given.drained(concurrency=1)
    job = await job_now(bus, job_id)
    assert ran == ["book", "charge", "note", "refund", "tell", "unbook"]
    assert (job.status, job.compensation_failures) == ("FAILED", 0)
    assert job.compensated_at is not None
    assert job.completed_at == job.compensated_at
    assert undone(job) == [(1, 1), (2, 2), None, None, None]
    assert [stage.compensates for stage in job.stages] == [True, True, False, True, True]
    batch = job.stages[1].compensation
    assert batch is not None
    assert (batch.job_id, batch.stage, batch.name) == (job_id, "charge", "Trip: compensate charge")
    assert given.database.count("job_part") == 0
    with pytest.raises(InvalidOperationError, match="was compensated"):
        await bus.jobs.resume(DOMAIN, job_id)


async def test_a_stage_that_was_done_in_part_is_undone_too(bus: CommandBus, given: Given, ran: list[str]) -> None:
    """Its handlers know best what there is to undo"""
    [back] = do("back")
    job_id = await bus.jobs.create(DOMAIN, [Stage("ship", [*do("one"), NO], compensate=back)])
    await given.drained()
    assert (ran, (await job_now(bus, job_id)).status) == (["one", "back"], "FAILED")


async def test_a_job_that_has_done_nothing_just_fails_and_can_be_resumed(
    bus: CommandBus, given: Given, ran: list[str]
) -> None:
    stages = [Stage("one", [NO], compensate=do("undo one")), Stage("two", do("two")), Stage("three", [NO])]
    job_id = await bus.jobs.create(DOMAIN, stages)
    await given.drained()
    job = await job_now(bus, job_id)
    assert (job.status, job.compensated_at, ran) == ("FAILED", None, [])
    await bus.jobs.resume(DOMAIN, job_id)
    await given.drained()
    assert ((await job_now(bus, job_id)).status, ran) == ("FAILED", ["two"])
    await bus.jobs.resume(DOMAIN, job_id)
    assert ((await job_now(bus, job_id)).status, given.database.count("job_part")) == ("COMPLETED", 0)


async def test_a_job_that_completes_undoes_nothing(bus: CommandBus, given: Given, ran: list[str]) -> None:
    """Nor does one that goes on after failures"""
    stages = [Stage("one", [*do("one"), NO], compensate=do("undo"))]
    job_id = await bus.jobs.create(DOMAIN, stages, continue_after_failures=True)
    await given.drained()
    job = await job_now(bus, job_id)
    assert (job.status, job.compensated_at, ran) == ("COMPLETED", None, ["one"])
    assert given.database.count("job_part") == 0


async def test_a_compensation_that_fails_is_recorded_and_does_not_stop_the_rest(
    bus: CommandBus, given: Given, ran: list[str], invariants: None
) -> None:
    """Whether it refuses, or waits in troubleshooting"""
    stages = [
        Stage("a", do("a"), compensate=do("undo a")),
        Stage("b", do("b"), compensate=[*do("undo b"), NO]),
        Stage("c", do("c"), compensate=[PARK, PARK]),
        Stage("d", [NO]),
    ]
    job_id = await bus.jobs.create(DOMAIN, stages)
    await given.drained()
    job = await job_now(bus, job_id)
    assert ran == ["a", "b", "c", "undo b", "undo a"]
    assert (job.status, job.compensation_failures) == ("FAILED", 3)
    assert undone(job) == [(1, 1), (2, 1), (2, 0), None]
    given.database.check_invariants()
    for item in await bus.troubleshooting.list(DOMAIN):
        await bus.troubleshooting.complete(DOMAIN, item.command_id)
    await given.drained()
    after = await job_now(bus, job_id)
    assert (after.status, after.compensation_failures, after.completed_at) == ("FAILED", 1, job.completed_at)


async def test_a_canceled_job_is_undone_once_what_runs_has_ended(
    bus: CommandBus, given: Given, ran: list[str], invariants: None
) -> None:
    stages = [
        Stage("a", do("a"), compensate=do("undo a")),
        Stage("b", [WAIT, WAIT], compensate=do("undo b")),
        Stage("c", do("c"), compensate=do("undo c")),
    ]
    job_id = await bus.jobs.create(DOMAIN, stages)
    await given.drained()
    given.make_due()
    given.database.perform(claim.promote())
    [running] = given.claimed()
    assert await bus.jobs.cancel(DOMAIN, job_id, reason="changed my mind", operator="rosa") == 1
    await given.drained()
    job = await job_now(bus, job_id)
    assert (job.status, job.completed_at, ran) == ("COMPENSATING", None, ["a"]), "one command runs"
    assert await bus.jobs.cancel(DOMAIN, job_id, reason="again", operator="otto") == 0
    given.settled([running])
    await given.drained()
    job = await job_now(bus, job_id)
    assert ran == ["a", "undo b", "undo a"]
    assert (job.status, job.operator, job.reason) == ("CANCELED", "rosa", "changed my mind")
    assert job.compensated_at is not None


async def test_a_job_that_is_canceled_while_it_plans_is_undone_at_once(
    bus: CommandBus, given: Given, ran: list[str]
) -> None:
    stages = [Stage("a", do("a"), compensate=do("undo a")), Stage("b", compensate=do("undo b"))]
    job_id = await bus.jobs.create(DOMAIN, stages)
    await given.drained()  # nobody has the planner
    assert await bus.jobs.cancel(DOMAIN, job_id, reason="no") == 1
    job = await job_now(bus, job_id)
    assert (job.status, [stage.status.value for stage in job.stages]) == ("COMPENSATING", ["COMPLETED", "CANCELED"])
    await given.drained()
    assert ((await job_now(bus, job_id)).status, ran) == ("CANCELED", ["a", "undo a"])


@pytest.mark.parametrize("in_batch", [False, True])
async def test_a_job_whose_step_an_operator_has_ended_is_undone_when_it_is_canceled(
    bus: CommandBus, given: Given, ran: list[str], in_batch: bool
) -> None:
    """No step will come that would begin to undo it"""
    stages = [Stage("flight", do("book"), compensate=do("unbook")), Stage("payment", do("pay"))]
    batch_id = await bus.jobs.create_batch(DOMAIN, [BatchJob(stages)])
    [job] = await bus.jobs.list(DOMAIN)
    given.settled(given.claimed())
    step = (await job_now(bus, job.job_id)).step
    assert step is not None
    await bus.cancel_command(DOMAIN, step.command_id, reason="by mistake")
    if in_batch:
        assert await bus.cancel_batch(DOMAIN, batch_id, reason="no trip") == 1
    else:
        assert await bus.jobs.cancel(DOMAIN, job.job_id, reason="no trip") == 0
    await given.drained()
    ended = await job_now(bus, job.job_id)
    assert (ended.status, ended.compensated_at is not None, ran) == ("CANCELED", True, ["unbook"])
    assert [stage.status for stage in ended.stages] == ["COMPLETED", "PENDING"]
    assert (await given.batch_now(batch_id)).status.final


async def test_a_canceled_job_that_has_done_nothing_is_just_canceled(
    bus: CommandBus, given: Given, ran: list[str]
) -> None:
    job_id = await bus.jobs.create(DOMAIN, [Stage("a", do("a"), compensate=do("undo a"))])
    assert await bus.jobs.cancel(DOMAIN, job_id, reason="no") == 1
    await given.drained()
    job = await job_now(bus, job_id)
    assert (job.status, job.compensated_at, ran) == ("CANCELED", None, [])
    assert given.database.count("job_part") == 0


async def test_a_planned_stage_is_undone_as_others_are(bus: CommandBus, given: Given, ran: list[str]) -> None:
    @bus.planner(DOMAIN, "b")
    async def plan(finished: FinishedStage, ctx: HandlerContext) -> list[BatchCommand]:
        return do("b")

    stages = [Stage("a", do("a")), Stage("b", compensate=do("undo b")), Stage("c", [NO])]
    await bus.jobs.create(DOMAIN, stages)
    await given.drained()
    assert ran == ["a", "b", "undo b"]


async def test_a_worker_that_dies_between_two_compensations_loses_and_doubles_nothing(
    bus: CommandBus, given: Given, ran: list[str], invariants: None
) -> None:
    """The step back is a command that the end of the compensation has sent, in the same transaction"""
    stages = [
        Stage("a", do("a"), compensate=[WAIT]),
        Stage("b", do("b"), compensate=[WAIT]),
        Stage("c", [NO]),
    ]
    job_id = await bus.jobs.create(DOMAIN, stages)
    await given.drained()
    given.make_due()
    given.database.perform(claim.promote())
    worker = given.registered_worker()
    given.settled(given.claimed(by=worker))
    [step] = given.claimed(by=worker)
    assert step.command_type == "busload.Stage"
    given.died(worker)
    given.rescued()
    assert (await job_now(bus, job_id)).step is not None
    seen = given.handler("Wait")
    await given.drained()
    job = await job_now(bus, job_id)
    assert (job.status, len(seen), undone(job)) == ("FAILED", 1, [(1, 1), (1, 1), None])


async def test_a_forged_or_repeated_step_undoes_nothing(bus: CommandBus, given: Given, ran: list[str]) -> None:
    stages = [Stage("a", do("a"), compensate=do("undo a")), Stage("b", [WAIT])]
    job_id = await bus.jobs.create(DOMAIN, stages)
    await given.drained()
    before = await job_now(bus, job_id)
    for position in (-1, 0, 1, 2):
        await given.sent("busload.Stage", {"job_id": str(job_id), "position": position, "undo": True})
    await given.drained()
    assert (await job_now(bus, job_id), ran) == (before, ["a"])
    await bus.jobs.cancel(DOMAIN, job_id, reason="no")
    await given.drained()
    job = await job_now(bus, job_id)
    for position in (0, 1):
        await given.sent("busload.Stage", {"job_id": str(job_id), "position": position, "undo": True})
    await given.drained()
    assert (await job_now(bus, job_id), ran) == (job, ["a", "undo a"])


async def test_a_compensation_whose_step_an_operator_has_ended_can_be_resumed(
    bus: CommandBus, given: Given, ran: list[str]
) -> None:
    stages = [Stage("a", do("a"), compensate=do("undo a")), Stage("b", do("b"), compensate=[WAIT]), Stage("c", [NO])]
    job_id = await bus.jobs.create(DOMAIN, stages)
    await given.drained()
    given.database.rows("""
        UPDATE busload.batch SET on_complete = jsonb_set(on_complete::jsonb, '{data}', '{"no": 1}')::json
         WHERE completed_at IS NULL""")
    given.handler("Wait")
    given.make_due()
    await given.drained()
    [item] = await bus.troubleshooting.list(DOMAIN)
    await bus.troubleshooting.cancel(DOMAIN, item.command_id, reason="broken")
    assert (await job_now(bus, job_id)).status == "COMPENSATING"
    await bus.jobs.resume(DOMAIN, job_id, operator="rosa")
    await given.drained()
    assert ((await job_now(bus, job_id)).status, ran) == ("FAILED", ["a", "b", "undo a"])


@pytest.mark.parametrize(
    ("wrong", "path"),
    [
        (5, "/stages/0/compensate"),
        ("Do", "/stages/0/compensate"),
        ([5], "/stages/0/compensate/0"),
        ([BatchCommand("not a name")], "/stages/0/compensate/0/command_type"),
    ],
)
async def test_a_compensation_that_cannot_be_is_refused_before_anything_is_written(
    bus: CommandBus, database: Database, wrong: Any, path: str
) -> None:
    before = database.everything()
    with pytest.raises(InvalidCommandError) as refused:
        await bus.jobs.create(DOMAIN, [Stage("a", do("a"), compensate=wrong)])
    assert refused.value.problems[0].path == path
    assert database.everything() == before


async def test_ids_of_compensations_are_for_one_command_each(
    bus: CommandBus, given: Given, database: Database, ran: list[str]
) -> None:
    taken = uuid4()
    await given.sent("Do", "x", command_id=taken)
    before = database.everything()
    other, twice = BatchCommand("Do", taken, "y"), BatchCommand("Do", uuid4(), "z")
    for stages in ([Stage("a", do("a"), compensate=other)], [Stage("a", [twice], compensate=twice)]):
        with pytest.raises(DuplicateCommandError):
            await bus.jobs.create(DOMAIN, stages)
        assert database.everything() == before


async def test_the_sync_face_compensates_and_joins_transactions(
    bus: CommandBus, sync_bus: SyncCommandBus, given: Given, ran: list[str], dsn: str
) -> None:
    with psycopg.connect(dsn) as conn:
        stages = [Stage("a", do("a"), compensate=do("undo a")), Stage("b", [WAIT])]
        job_id = sync_bus.jobs.create(DOMAIN, stages, conn=conn)
    await given.drained()
    with psycopg.connect(dsn) as conn:
        sync_bus.jobs.cancel(DOMAIN, job_id, reason="no", conn=conn)
    assert [job.job_id for job in sync_bus.jobs.list(DOMAIN, status="COMPENSATING")] == [job_id]
    await given.drained()
    assert sync_bus.jobs.wait(DOMAIN, job_id, timeout=25).status == "CANCELED"
    assert ran == ["a", "undo a"]
