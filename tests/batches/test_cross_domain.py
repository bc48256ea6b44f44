"""A batch whose commands run in several domains: one set of counters, one completion."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from busload import (
    BatchCommand,
    Command,
    CommandBus,
    Dedup,
    DuplicateCommandError,
    HandlerContext,
    InvalidCommandError,
    PermanentCommandError,
    Settings,
    Stage,
    SyncCommandBus,
    Worker,
)
from busload.dispatch.strategy import DispatchName
from busload.errors import DuplicateTaskError
from busload.jobs import FinishedStage
from tests.brokers.faulty import FaultyTransport
from tests.faces import FACES, bus_of
from tests.given import DOMAIN, Database, Given, counts

pytestmark = pytest.mark.usefixtures("invariants")

OTHER, THIRD = "ledger", "mail"
DOMAINS = [DOMAIN, OTHER, THIRD]


def mixed(count: int, **options: Any) -> list[BatchCommand]:
    """Commands for three domains in turns; those of the batch's own say nothing, or its name."""
    own = [None, OTHER, THIRD, DOMAIN]
    return [BatchCommand("Debit", data={"n": n}, domain=own[n % 4], **options) for n in range(count)]


@pytest.fixture
def seen(bus: CommandBus) -> list[tuple[str, int]]:
    """What ran, and the domain that it ran in."""
    ran: list[tuple[str, int]] = []

    async def handle(command: Command, ctx: HandlerContext) -> None:
        ran.append((command.domain, command.data["n"]))

    for domain in DOMAINS:
        bus.handler(domain, "Debit")(handle)
    return ran


def expected(count: int) -> list[tuple[str, int]]:
    return sorted(([DOMAIN, OTHER, THIRD, DOMAIN][n % 4], n) for n in range(count))


@pytest.mark.parametrize("count", [40, 4500], ids=["in one statement", "by COPY"])
async def test_commands_run_in_their_own_domains_and_are_counted_by_their_batch(
    bus: CommandBus, given: Given, seen: list[tuple[str, int]], count: int
) -> None:
    given.handler("Done")
    batch_id = await bus.create_batch(DOMAIN, mixed(count), on_complete=BatchCommand("Done"))

    await given.drained(domains=[OTHER])
    batch = await given.batch_now(batch_id)
    assert (batch.domain, batch.status, counts(batch)) == (DOMAIN, "IN_PROGRESS", (count, count // 4, 0, 0, 0))
    await given.drained(domains=DOMAINS)

    assert sorted(seen) == expected(count)
    batch = await given.batch_now(batch_id)
    assert (batch.status, counts(batch)) == ("COMPLETED", (count, count, 0, 0, 0))
    assert await bus.get_batch(OTHER, batch_id) is None
    assert given.database.value("SELECT count(*) FROM busload.command WHERE command_type = 'Done'") == 1


async def test_a_batch_of_one_domain_is_cut_into_as_few_loads_as_ever(bus: CommandBus, given: Given) -> None:
    """A name that is the batch's own makes no difference."""
    await bus.create_batch(DOMAIN, [BatchCommand("Debit", domain=DOMAIN if n % 2 else None) for n in range(2500)])
    assert given.database.count("queue") == 3


async def test_an_open_batch_takes_commands_of_other_domains(
    bus: CommandBus, given: Given, seen: list[tuple[str, int]]
) -> None:
    async with bus.open_batch(DOMAIN, checkpoint_size=7) as batch:
        for n in range(20):
            await batch.add("Debit", {"n": n}, domain=[None, OTHER, THIRD, DOMAIN][n % 4])
        await bus.send_many(DOMAIN, mixed(24)[20:], batch_id=batch.batch_id)
    await given.drained(domains=DOMAINS)

    assert sorted(seen) == expected(24)
    found = await given.batch_now(batch.batch_id)
    assert (found.status, counts(found)) == ("COMPLETED", (24, 24, 0, 0, 0))


async def test_stages_of_a_job_run_in_several_domains(
    bus: CommandBus, given: Given, seen: list[tuple[str, int]]
) -> None:
    """The first one, one that is kept until its turn, and one that is planned by what both domains returned."""

    @bus.planner(DOMAIN, "report")
    async def report(stage: FinishedStage, ctx: HandlerContext) -> list[BatchCommand]:
        ended = [command async for command in stage.results("COMPLETED")]
        return [BatchCommand("Debit", data={"n": 100 + len(ended)}, domain=THIRD)]

    job_id = await bus.jobs.create(DOMAIN, [Stage("load", mixed(8)), Stage("post", mixed(4)), Stage("report")])
    await given.drained(domains=DOMAINS)

    job = await bus.jobs.get(DOMAIN, job_id)
    assert job is not None and job.status == "COMPLETED"
    assert sorted(seen) == sorted([*expected(8), *expected(4), (THIRD, 104)])


@pytest.fixture(params=FACES)
async def broker_bus(dsn: str, settings: Settings, request: pytest.FixtureRequest) -> AsyncIterator[CommandBus]:
    async with bus_of(request.param, dsn, transport=FaultyTransport(dsn), settings=settings) as bus:
        yield bus


@pytest.mark.parametrize("dispatch", ["two_phase", "checkpoint", "optimistic", "relay"])
async def test_messages_go_to_the_queues_of_the_commands_domains(
    broker_bus: CommandBus, given: Given, dsn: str, database: Database, dispatch: DispatchName
) -> None:
    batch_id = await broker_bus.create_batch(DOMAIN, mixed(40), dispatch=dispatch, checkpoint_size=16)
    if dispatch == "relay":
        await broker_bus.recover()
    messages = dict(database.rows("SELECT queue, count(*) FROM busload.message GROUP BY queue"))
    assert set(messages) == {f"busload.{domain}" for domain in DOMAINS}

    ran: list[str] = []
    async with CommandBus(dsn, transport=FaultyTransport(dsn), settings=broker_bus.settings) as serving:

        async def handle(command: Command, ctx: HandlerContext) -> None:
            ran.append(command.domain)

        for domain in DOMAINS:
            serving.handler(domain, "Debit")(handle)
        await Worker(serving, settings=given.settings).drain()
    assert sorted(ran) == [OTHER] * 10 + [THIRD] * 10 + [DOMAIN] * 20
    assert (await given.batch_now(batch_id)).status == "COMPLETED"
    report = await broker_bus.get_dispatch(DOMAIN, batch_id)
    assert report is not None
    assert (report.total_tasks, report.queued_tasks) == (40, 40)


async def test_questions_about_the_batch_find_all_domains_and_those_about_a_command_its_own(
    bus: CommandBus, given: Given
) -> None:
    batch_id = await bus.create_batch(DOMAIN, mixed(40, task_key="month"))

    found = await bus.list_batch_commands(DOMAIN, batch_id)
    assert sorted((command.domain, command.data["n"]) for command in found) == expected(40)
    assert await bus.list_batch_commands(OTHER, batch_id) == []
    assert len(await bus.list_batch_commands(DOMAIN, batch_id, status="PENDING")) == 40
    [one] = [command for command in found if command.data["n"] == 1]
    assert (await given.command_now(one.command_id, OTHER)).batch_id == batch_id
    assert await bus.get_command(DOMAIN, one.command_id) is None
    [sent] = await bus.get_audit_trail(OTHER, one.command_id)
    assert sent.batch_id == batch_id
    assert {attempt.queue for attempt in await bus.trace("month")} == set(DOMAINS)


@pytest.mark.parametrize("by_id", [True, False], ids=["id", "command"])
@pytest.mark.parametrize("status", [None, "PENDING"])
async def test_pages_go_from_one_domain_to_the_next(bus: CommandBus, given: Given, status: Any, by_id: bool) -> None:
    batch_id = await bus.create_batch(DOMAIN, mixed(40))
    numbers: list[int] = []
    after: Any = None
    while page := await bus.list_batch_commands(DOMAIN, batch_id, status=status, limit=7, after=after):
        numbers += [command.data["n"] for command in page]
        after = page[-1].command_id if by_id else page[-1]
    assert sorted(numbers) == list(range(40))


async def test_an_id_that_two_domains_have_is_paged_by_its_command(bus: CommandBus, given: Given) -> None:
    """And an id is not taken for that of a command in the batch's domain which is not in the batch."""
    twice, apart = uuid4(), uuid4()
    await bus.send(DOMAIN, "Debit", command_id=apart)
    commands = [BatchCommand("Debit", twice, 0), BatchCommand("Debit", data=1), BatchCommand("Debit", data=2)]
    commands += [BatchCommand("Debit", twice, 3, domain=OTHER), BatchCommand("Debit", apart, 4, domain=OTHER)]
    commands += [BatchCommand("Debit", data=5, domain=OTHER)]
    batch_id = await bus.create_batch(DOMAIN, commands)

    seen: list[int] = []
    after = None
    while page := await bus.list_batch_commands(DOMAIN, batch_id, limit=1, after=after):
        [after] = page
        seen.append(after.data)
    assert seen == [0, 1, 2, 3, 4, 5]
    [following] = await bus.list_batch_commands(DOMAIN, batch_id, after=apart)
    assert following.data == 5


async def test_an_id_is_unique_in_the_domain_that_runs_its_command(bus: CommandBus, database: Database) -> None:
    here, there = uuid4(), uuid4()
    await bus.send(DOMAIN, "Debit", command_id=here)
    await bus.send(OTHER, "Debit", command_id=there)
    before = database.everything()

    for commands in (
        [BatchCommand("Debit"), BatchCommand("Debit", there, domain=OTHER)],
        [BatchCommand("Debit", data=n, domain=OTHER, command_id=there if n == 1999 else None) for n in range(2000)],
    ):
        with pytest.raises(DuplicateCommandError) as refused:
            await bus.create_batch(DOMAIN, commands)
        assert (refused.value.domain, refused.value.command_ids) == (OTHER, (there,))
    with pytest.raises(DuplicateCommandError, match="more than once") as refused:
        await bus.create_batch(DOMAIN, [BatchCommand("Debit", here, domain=OTHER)] * 2)
    assert refused.value.domain == OTHER
    with pytest.raises(DuplicateCommandError) as refused:
        await bus.jobs.create(
            DOMAIN, [Stage("a", [BatchCommand("Debit")]), Stage("b", [BatchCommand("Debit", there, domain=OTHER)])]
        )
    assert refused.value.domain == OTHER
    assert database.everything() == before

    await bus.create_batch(DOMAIN, [BatchCommand("Debit", here, domain=OTHER), BatchCommand("Debit", there)])
    callback = uuid4()
    await bus.create_batch(
        DOMAIN, [BatchCommand("Debit", callback, domain=OTHER)], on_complete=BatchCommand("Done", callback)
    )


async def test_a_duplicate_in_an_open_batch_is_dropped_where_it_is_one(bus: CommandBus, given: Given) -> None:
    """The command of the same id that runs in another domain is written by the next checkpoint."""
    taken = uuid4()
    await bus.send(OTHER, "Debit", command_id=taken)
    async with bus.open_batch(DOMAIN) as batch:
        await batch.add("Debit", command_id=taken)
        await batch.add("Debit", command_id=taken, domain=OTHER)
        with pytest.raises(DuplicateCommandError, match="more than once"):
            await batch.add("Debit", command_id=taken, domain=OTHER)
        with pytest.raises(DuplicateCommandError, match=OTHER):
            await batch.checkpoint()
    assert [command.domain for command in await bus.list_batch_commands(DOMAIN, batch.batch_id)] == [DOMAIN]


async def test_a_task_key_is_held_in_the_domain_that_runs_its_command(bus: CommandBus, given: Given) -> None:
    await bus.send(OTHER, "Debit", task_key="7", dedup=Dedup())
    keyed = [BatchCommand("Debit", data=d, task_key="7", domain=d) for d in (OTHER, None, THIRD, THIRD)]

    batch_id = await bus.create_batch(DOMAIN, keyed, dedup=Dedup())
    assert sorted(c.domain for c in await bus.list_batch_commands(DOMAIN, batch_id)) == [THIRD, DOMAIN]
    assert (await given.batch_now(batch_id)).total_count == 2
    with pytest.raises(DuplicateTaskError) as refused:
        await bus.create_batch(DOMAIN, keyed[2:], dedup=Dedup(on_conflict="raise"))
    assert refused.value.domain == THIRD
    results = await bus.send_many(DOMAIN, [*keyed, BatchCommand("Debit", domain=OTHER)], dedup=Dedup())
    assert [result.created for result in results] == [False, False, False, False, True]


async def test_a_cancel_reaches_every_domain(bus: CommandBus, given: Given, seen: list[tuple[str, int]]) -> None:
    batch_id = await bus.create_batch(DOMAIN, mixed(4500))
    assert await bus.cancel_batch(DOMAIN, batch_id, reason="wrong list") == 4500
    batch = await given.batch_now(batch_id)
    assert (batch.status, counts(batch)) == ("COMPLETED_WITH_FAILURES", (4500, 0, 0, 4500, 0))
    assert await given.drained(domains=DOMAINS) == 0


async def test_what_fails_waits_in_the_domain_that_ran_it(bus: CommandBus, given: Given) -> None:
    @bus.handler(OTHER, "Debit")
    async def fail(command: Command, ctx: HandlerContext) -> None:
        raise PermanentCommandError("account closed")

    batch_id = await bus.create_batch(DOMAIN, [BatchCommand("Debit", domain=OTHER)])
    await given.drained(domains=[OTHER])
    [item] = await bus.troubleshooting.list(OTHER)
    assert item.batch_id == batch_id
    assert counts(await given.batch_now(batch_id)) == (1, 0, 0, 0, 1)
    told = await bus.explain_batch(DOMAIN, batch_id)
    assert [(reason.code, reason.count) for reason in told.reasons] == [("IN_TROUBLESHOOTING", 1)]
    await bus.troubleshooting.complete(OTHER, item.command_id, operator="ann", result={"by": "hand"})
    assert (await given.batch_now(batch_id)).status == "COMPLETED"


async def test_an_explanation_looks_at_each_domain(bus: CommandBus, given: Given, seen: list[tuple[str, int]]) -> None:
    """One is paused, one has no worker, and the third one is on its way."""
    batch_id = await bus.create_batch(DOMAIN, mixed(40))
    given.registered_worker()
    await bus.domains.pause(THIRD, operator="ann", reason="audit")

    told = await bus.explain_batch(DOMAIN, batch_id)
    assert [(reason.code, reason.count) for reason in told.reasons] == [
        ("PAUSED", 10),
        ("NO_WORKER", 10),
        ("NO_WORKER", 10),
    ]
    assert OTHER in told.reasons[1].message
    assert f"--domains {OTHER}" in told.reasons[1].advice
    assert told.remaining == 40


async def test_a_pruned_batch_takes_its_commands_of_every_domain_along(
    bus: CommandBus, given: Given, seen: list[tuple[str, int]]
) -> None:
    await bus.create_batch(DOMAIN, mixed(40, task_key="month"), dedup=Dedup(window=timedelta(0)))
    await bus.create_batch(DOMAIN, mixed(40))
    await given.drained(domains=DOMAINS)
    pruned = await bus.prune(timedelta(microseconds=1), archive=True)
    assert pruned.commands == 43
    assert given.database.count("command") == given.database.count("batch") == given.database.count("task") == 0
    archived = dict(given.database.rows("SELECT domain, count(*) FROM busload.archive GROUP BY domain"))
    assert archived == {DOMAIN: 21, OTHER: 11, THIRD: 11}


@pytest.mark.parametrize("wrong", ["", "a b", "x" * 256, 7, b"ledger", UUID(int=1)])
async def test_a_wrong_domain_is_refused_by_the_index_of_its_command(
    bus: CommandBus, database: Database, wrong: Any
) -> None:
    before = database.everything()
    commands = [BatchCommand("Debit"), BatchCommand("Debit", domain=OTHER), BatchCommand("Debit", domain=wrong)]

    async def added() -> None:
        async with bus.open_batch(DOMAIN, batch_id=UUID(int=9)) as batch:
            await batch.add("Debit", domain=wrong)

    for call in (bus.create_batch(DOMAIN, commands), bus.send_many(DOMAIN, commands)):
        with pytest.raises(InvalidCommandError) as refused:
            await call
        [problem] = refused.value.problems
        assert (problem.index, problem.path, problem.code) == (2, "/domain", "INVALID_NAME")
    with pytest.raises(InvalidCommandError, match="/stages/0/commands/2/domain"):
        await bus.jobs.create(DOMAIN, [Stage("a", commands)])
    assert database.everything() == before
    with pytest.raises(InvalidCommandError, match="/domain"):
        await added()
    assert database.count("command") == 0


async def test_a_callback_runs_in_the_domain_of_its_batch(bus: CommandBus, database: Database) -> None:
    before = database.everything()
    with pytest.raises(InvalidCommandError, match="/on_complete/domain"):
        await bus.create_batch(DOMAIN, [BatchCommand("Debit")], on_complete=BatchCommand("Done", domain=OTHER))
    assert database.everything() == before


async def test_both_faces_send_to_several_domains(given: Given, sync_bus: SyncCommandBus) -> None:
    batch_id = sync_bus.create_batch(DOMAIN, mixed(8))
    with sync_bus.open_batch(DOMAIN) as batch:
        batch.add("Debit", {"n": 0}, domain=OTHER)
    assert len({command.domain for command in sync_bus.list_batch_commands(DOMAIN, batch_id)}) == 3
    assert [command.domain for command in sync_bus.list_batch_commands(DOMAIN, batch.batch_id)] == [OTHER]
