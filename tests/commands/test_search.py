"""What people ask about batches and their commands."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest

from busload import (
    BatchCommand,
    BusinessRuleError,
    Command,
    CommandBus,
    HandlerContext,
    InvalidCommandError,
    PermanentCommandError,
    TransientCommandError,
)
from busload.batches.batch import BatchStatus
from busload.commands.command import CommandStatus
from tests.given import DOMAIN, Given, raising

pytestmark = pytest.mark.usefixtures("invariants")


async def test_batches_are_listed_newest_first(bus: CommandBus, given: Given) -> None:
    created = [await given.batch(name=f"batch {n}") for n in range(4)]
    assert [batch.batch_id for batch in await bus.list_batches(DOMAIN)] == created[::-1]


async def test_pages_do_not_overlap(bus: CommandBus, given: Given) -> None:
    """Limit and offset; the last page is short, the one after it empty"""
    created = [await given.batch() for _ in range(7)]
    pages = [await bus.list_batches(DOMAIN, limit=3, offset=offset) for offset in (0, 3, 6, 9)]
    assert [len(page) for page in pages] == [3, 3, 1, 0]
    assert [batch.batch_id for page in pages for batch in page] == created[::-1]
    assert await bus.list_batches(DOMAIN, limit=0) == []


async def test_a_hundred_is_the_page_unless_asked(bus: CommandBus, given: Given) -> None:
    given.database.rows(
        """INSERT INTO busload.batch (batch_id, domain, created_at)
           SELECT gen_random_uuid(), 'payments', now() - n * interval '1 s' FROM generate_series(1, 101) AS n"""
    )
    assert len(await bus.list_batches(DOMAIN)) == 100
    batch_id = await given.batch(commands=101)
    assert len(await bus.list_batch_commands(DOMAIN, batch_id)) == 100


async def test_a_cursor_pages_without_drift_while_batches_are_created(bus: CommandBus, given: Given) -> None:
    """An offset would show one of them twice"""
    created = [await given.batch() for _ in range(6)]
    first = await bus.list_batches(DOMAIN, limit=3)
    newer = [await given.batch() for _ in range(2)]

    second = await bus.list_batches(DOMAIN, limit=3, after=first[-1].batch_id)

    assert [batch.batch_id for batch in first + second] == created[::-1]
    assert await bus.list_batches(DOMAIN, after=second[-1].batch_id) == []
    assert {b.batch_id for b in await bus.list_batches(DOMAIN, limit=3, offset=3)} & {b.batch_id for b in first}
    assert (await bus.list_batches(DOMAIN, limit=1))[0].batch_id == newer[-1]


async def test_a_cursor_tells_batches_of_one_moment_apart(bus: CommandBus, given: Given) -> None:
    """Batches of one transaction have the same created_at"""
    async with bus.pool.connection() as conn, conn.transaction():
        created = {await bus.create_batch(DOMAIN, [BatchCommand("Debit")], conn=conn) for _ in range(5)}
    seen: list[UUID] = []
    while page := await bus.list_batches(DOMAIN, limit=2, after=seen[-1] if seen else None):
        seen += [batch.batch_id for batch in page]
    assert len(seen) == 5
    assert set(seen) == created


async def test_batches_of_all_domains_are_one_list(bus: CommandBus, given: Given) -> None:
    first, second = await given.batch(), await bus.create_batch("crm", [BatchCommand("Push")], job_id="nightly")
    third = await given.batch(job_id="nightly")
    found = [batch.batch_id for batch in await bus.list_batches(None)]
    assert found == [third, second, first]
    assert [batch.batch_id for batch in await bus.list_batches(None, limit=1, after=third)] == [second]
    assert [batch.batch_id for batch in await bus.list_batches(None, job_id="nightly")] == [third, second]
    batch = await bus.get_batch(None, second)
    assert batch is not None and batch.domain == "crm"


async def test_batches_are_found_by_a_part_of_their_name(bus: CommandBus, given: Given) -> None:
    january = await given.batch(name="Invoices 100% of January_1")
    await given.batch(name="Invoices of February")
    await given.batch()
    for part in ("JANUARY", "100%", "january_", "s 1"):
        assert [batch.batch_id for batch in await bus.list_batches(DOMAIN, name=part)] == [january]
        assert [batch.batch_id for batch in await bus.list_batches(None, name=part)] == [january]
    assert await bus.list_batches(DOMAIN, name="%") != []
    assert await bus.list_batches(DOMAIN, name="Jan%") == []
    with pytest.raises(InvalidCommandError, match="name"):
        await bus.list_batches(DOMAIN, name="")


async def test_a_list_brings_forecasts_if_it_is_asked_to(bus: CommandBus, given: Given) -> None:
    batch_id = await given.batch()
    [without] = await bus.list_batches(DOMAIN)
    [with_one] = await bus.list_batches(DOMAIN, forecast=True)
    assert without.forecast is None
    assert with_one.forecast is not None and with_one.forecast.unknown == "NO_WORKER"
    assert with_one == without == await bus.get_batch(DOMAIN, batch_id)


async def test_batches_are_filtered_by_status(bus: CommandBus, given: Given) -> None:
    """Enums and their strings are equal"""

    async def run(command: Command, ctx: HandlerContext) -> None:
        if command.data["n"] == 1:
            raise BusinessRuleError("no")

    given.handler("Debit", run)
    completed = await given.batch(commands=1)
    with_failures = await given.batch(commands=2)
    await given.drained()
    in_progress, _ = await given.in_troubleshooting()
    pending = await given.batch(command_type="Later")

    for status, batch_id in {
        "PENDING": pending,
        "IN_PROGRESS": in_progress,
        "COMPLETED": completed,
        "COMPLETED_WITH_FAILURES": with_failures,
    }.items():
        wanted = BatchStatus(status)
        assert [b.batch_id for b in await bus.list_batches(DOMAIN, status=wanted)] == [batch_id]
        assert [b.batch_id for b in await bus.list_batches(DOMAIN, status=wanted, after=pending)] == (
            [] if batch_id == pending else [batch_id]
        )


async def test_every_call_is_scoped_by_its_domain(bus: CommandBus, given: Given) -> None:
    batch_id = await given.batch()
    [command] = await bus.list_batch_commands(DOMAIN, batch_id)

    assert await bus.get_batch("crm", batch_id) is None
    assert await bus.list_batches("crm") == []
    assert await bus.list_batch_commands("crm", batch_id) == []
    assert await bus.get_command("crm", command.command_id) is None
    assert await bus.get_audit_trail("crm", command.command_id) == []
    assert await bus.get_batch_audit_trail("crm", batch_id) == []
    assert await bus.troubleshooting.list("crm") == []


async def test_what_does_not_exist_is_none_or_empty(bus: CommandBus) -> None:
    assert await bus.get_batch(DOMAIN, uuid4()) is None
    assert await bus.get_command(DOMAIN, uuid4()) is None
    assert await bus.list_batch_commands(DOMAIN, uuid4()) == []
    assert await bus.get_audit_trail(DOMAIN, uuid4()) == []
    assert await bus.get_batch_audit_trail(DOMAIN, uuid4()) == []
    assert await bus.troubleshooting.list(DOMAIN) == []
    assert await bus.list_batches(DOMAIN) == []


async def test_commands_of_a_batch_are_paged_in_the_order_they_were_added(bus: CommandBus, given: Given) -> None:
    """By offset and by cursor"""
    batch_id = await given.batch(commands=1005)
    pages = [await bus.list_batch_commands(DOMAIN, batch_id, limit=500, offset=offset) for offset in (0, 500, 1000)]
    assert [command.data["n"] for page in pages for command in page] == list(range(1005))

    after, seen = None, []
    while page := await bus.list_batch_commands(DOMAIN, batch_id, limit=400, after=after):
        seen += page
        after = page[-1].command_id
    assert [command.data["n"] for command in seen] == list(range(1005))


async def test_commands_of_a_batch_are_filtered_by_status(bus: CommandBus, given: Given) -> None:
    """Every place has its word"""
    ends = {
        "COMPLETED": None,
        "FAILED": BusinessRuleError("no"),
        "IN_TROUBLESHOOTING_QUEUE": PermanentCommandError("ask"),
        "SCHEDULED": TransientCommandError("later"),
    }
    for status, error in ends.items():
        given.handler(status, raising(error) if error else None)
    async with bus.open_batch(DOMAIN) as batch:
        for status in ends:
            await batch.add(status)
        await batch.checkpoint()
        await given.drained()
        await batch.add("IN_PROGRESS")
        await batch.checkpoint()
        given.claimed(1)
        await batch.add("PENDING")

    for status in (*ends, "IN_PROGRESS", "PENDING"):
        found = await bus.list_batch_commands(DOMAIN, batch.batch_id, status=CommandStatus(status))
        assert [(command.command_type, command.status) for command in found] == [(status, status)]
    assert await bus.list_batch_commands(DOMAIN, batch.batch_id, status="CANCELED") == []
    await bus.cancel_batch(DOMAIN, batch.batch_id, reason="enough")
    canceled = await bus.list_batch_commands(DOMAIN, batch.batch_id, status="CANCELED")
    assert [command.command_type for command in canceled] == ["SCHEDULED", "PENDING"]


async def test_a_finished_command_tells_how_it_went(bus: CommandBus, given: Given) -> None:
    """Result, attempts, times, worker and execution"""
    executions: list[UUID] = []

    async def run(command: Command, ctx: HandlerContext) -> dict[str, int]:
        executions.append(ctx.execution_id)
        return {"balance": 7}

    given.handler("Debit", run)
    command_id = await given.sent(data={"cents": 5}, task_key="invoice:7")
    waiting = await given.command_now(command_id)
    assert (waiting.status, waiting.attempts, waiting.worker, waiting.result) == ("PENDING", 0, None, None)
    assert (waiting.started_at, waiting.finished_at, waiting.execution_id) == (None, None, None)

    await given.drained(name="worker-7")

    done = await given.command_now(command_id)
    assert (done.status, done.attempts, done.worker, done.result) == ("COMPLETED", 1, "worker-7", {"balance": 7})
    assert [done.execution_id] == executions
    assert done.started_at is not None
    assert done.finished_at is not None
    assert done.created_at <= done.started_at <= done.finished_at
    assert (done.last_error_type, done.last_error_code, done.last_error_message) == (None, None, None)


async def test_a_status_that_no_batch_has_is_refused(bus: CommandBus) -> None:
    """FAILED is a command's"""
    for status in ("DONE", "completed", "", "PENDING ", "FAILED"):
        with pytest.raises(InvalidCommandError) as refused:
            await bus.list_batches(DOMAIN, status=status)  # type: ignore[arg-type]
        assert (refused.value.code, refused.value.problems[0].path) == ("INVALID_OPTION", "/status")
