"""A batch that is filled over time: streamed in checkpoints, and never complete before its seal."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from busload import BatchCommand, BatchNotFoundError, CommandBus, DuplicateCommandError, InvalidCommandError
from busload.errors import BatchSealedError, InvalidOperationError
from tests.given import DOMAIN, Given, counts

pytestmark = pytest.mark.usefixtures("invariants")


async def test_commands_leave_in_checkpoints_and_run_while_others_are_added(bus: CommandBus, given: Given) -> None:
    seen = given.handler()
    async with bus.open_batch(DOMAIN, name="import", custom_data={"file": "a.csv"}, checkpoint_size=10) as batch:
        ids = [await batch.add("Debit", {"n": n}) for n in range(25)]
        assert batch.added == 20
        assert counts(await given.batch_now(batch.batch_id)) == (20, 0, 0, 0, 0)

        await given.drained()

        assert len(seen) == 20
        running = await given.batch_now(batch.batch_id)
        assert (running.status, running.completed_at) == ("IN_PROGRESS", None)
        assert (running.name, running.custom_data) == ("import", {"file": "a.csv"})
    assert batch.added == 25
    commands = await bus.list_batch_commands(DOMAIN, batch.batch_id)
    assert [command.command_id for command in commands] == ids
    await given.drained()
    assert counts(done := await given.batch_now(batch.batch_id)) == (25, 25, 0, 0, 0)
    assert done.status == "COMPLETED"


async def test_a_batch_whose_members_have_all_ended_completes_with_its_seal_and_not_before(
    bus: CommandBus, given: Given
) -> None:
    given.handler()
    async with bus.open_batch(DOMAIN) as batch:
        for _ in range(3):
            await batch.add("Debit")
        await batch.checkpoint()
        await given.drained()
        open_still = await given.batch_now(batch.batch_id)
        assert (open_still.status, counts(open_still)) == ("IN_PROGRESS", (3, 3, 0, 0, 0))
        assert open_still.completed_at is None

    assert (await given.batch_now(batch.batch_id)).status == "COMPLETED"
    types = [event.type for event in await bus.get_batch_audit_trail(DOMAIN, batch.batch_id)]
    assert types == ["BATCH_STARTED", "BATCH_SEALED", "BATCH_COMPLETED"]


async def test_an_empty_batch_completes_with_its_seal(bus: CommandBus, given: Given) -> None:
    async with bus.open_batch(DOMAIN) as batch:
        assert (await given.batch_now(batch.batch_id)).status == "PENDING"
    done = await given.batch_now(batch.batch_id)
    assert (done.status, counts(done), done.started_at) == ("COMPLETED", (0, 0, 0, 0, 0), None)


async def test_an_error_in_the_block_leaves_the_batch_open(bus: CommandBus, given: Given) -> None:
    """What was written runs on; it can be added to, and sealed by hand"""
    given.handler()
    batch = bus.open_batch(DOMAIN, checkpoint_size=2)

    async def fill() -> None:
        async with batch:
            for _ in range(4):
                await batch.add("Debit")
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        await fill()
    await given.drained()
    left = await given.batch_now(batch.batch_id)
    assert (left.status, counts(left)) == ("IN_PROGRESS", (4, 4, 0, 0, 0))
    await given.sent(batch_id=batch.batch_id)
    await given.drained()
    assert (await given.batch_now(batch.batch_id)).status == "IN_PROGRESS"

    assert await bus.seal_batch(DOMAIN, batch.batch_id) is True

    done = await given.batch_now(batch.batch_id)
    assert (done.status, counts(done)) == ("COMPLETED", (5, 5, 0, 0, 0))
    assert await bus.seal_batch(DOMAIN, batch.batch_id) is False


async def test_sending_into_an_open_batch_raises_its_total(bus: CommandBus, given: Given) -> None:
    """One or many, so that it cannot complete early"""
    given.handler()
    async with bus.open_batch(DOMAIN) as batch:
        command_id = await given.sent(batch_id=batch.batch_id)
        await bus.send_many(DOMAIN, [BatchCommand("Debit"), BatchCommand("Debit")], batch_id=batch.batch_id)
        assert counts(await given.batch_now(batch.batch_id)) == (3, 0, 0, 0, 0)
        assert (await given.command_now(command_id)).batch_id == batch.batch_id
        await given.drained()
    done = await given.batch_now(batch.batch_id)
    assert (done.status, counts(done)) == ("COMPLETED", (3, 3, 0, 0, 0))


async def test_a_sealed_batch_takes_no_more_commands(bus: CommandBus, given: Given) -> None:
    """Sealed, and completed as well; total unchanged"""
    sealed = await given.batch()
    given.handler("Quick")
    completed = await given.batch(command_type="Quick")
    await given.drained()
    before = given.database.everything()
    for batch_id in (sealed, completed):
        with pytest.raises(BatchSealedError, match=str(batch_id)) as refused:
            await bus.send(DOMAIN, "Debit", batch_id=batch_id)
        assert (refused.value.domain, refused.value.batch_id) == (DOMAIN, batch_id)
        with pytest.raises(BatchSealedError):
            await bus.send_many(DOMAIN, [BatchCommand("Debit")], batch_id=batch_id)
        assert (await given.batch_now(batch_id)).total_count == 1
    assert given.database.everything() == before


async def test_adding_after_the_seal_is_refused(bus: CommandBus, given: Given) -> None:
    """Rather than kept in memory for ever"""
    async with bus.open_batch(DOMAIN) as batch:
        await batch.add("Debit")
    with pytest.raises(BatchSealedError):
        await batch.add("Debit")
    assert counts(await given.batch_now(batch.batch_id)) == (1, 0, 0, 0, 0)


async def test_a_batch_that_does_not_exist_is_named_with_its_domain(bus: CommandBus, given: Given) -> None:
    """Unknown, or of another domain"""
    unknown = uuid4()
    async with bus.open_batch(DOMAIN) as batch:
        before = given.database.everything()
        for domain, batch_id in ((DOMAIN, unknown), ("crm", batch.batch_id)):
            with pytest.raises(BatchNotFoundError, match=f"{batch_id} in domain '{domain}'") as refused:
                await bus.send(domain, "Debit", batch_id=batch_id)
            assert (refused.value.domain, refused.value.batch_id) == (domain, batch_id)
            with pytest.raises(BatchNotFoundError):
                await bus.send_many(domain, [BatchCommand("Debit")], batch_id=batch_id)
            with pytest.raises(BatchNotFoundError):
                await bus.seal_batch(domain, batch_id)
            with pytest.raises(BatchNotFoundError):
                await bus.cancel_batch(domain, batch_id, reason="no such thing")
            with pytest.raises(BatchNotFoundError):
                await bus.wait_batch(domain, batch_id, timeout=1)
        assert given.database.everything() == before


async def test_a_duplicate_leaves_the_total_as_it_was(bus: CommandBus, given: Given) -> None:
    taken = await given.sent()
    async with bus.open_batch(DOMAIN) as batch:
        with pytest.raises(DuplicateCommandError):
            await bus.send(DOMAIN, "Debit", command_id=taken, batch_id=batch.batch_id)
        assert (await given.batch_now(batch.batch_id)).total_count == 0


async def test_a_bad_command_is_refused_when_it_is_added(bus: CommandBus, given: Given) -> None:
    """Not with its checkpoint; what was added before stays"""
    async with bus.open_batch(DOMAIN) as batch:
        await batch.add("Debit")
        with pytest.raises(InvalidCommandError):
            await batch.add("Debit", {"amount": float("nan")})
        await batch.add("Debit")
    assert (await given.batch_now(batch.batch_id)).total_count == 2


async def test_a_stream_takes_the_memory_of_a_checkpoint(bus: CommandBus, given: Given) -> None:
    """24 MB of data pass through"""
    text = "x" * 8000
    async with bus.open_batch(DOMAIN, checkpoint_size=100) as batch:
        await batch.add("Debit", text)
        await batch.checkpoint()
        tracemalloc.start()
        try:
            for n in range(3000):
                await batch.add("Debit", f"{n}{text}")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 4_000_000
    assert (await given.batch_now(batch.batch_id)).total_count == 3001


async def test_a_whole_stream_may_join_a_transaction(bus: CommandBus, given: Given, dsn: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        async with bus.open_batch(DOMAIN, checkpoint_size=2, conn=conn) as lost:
            for _ in range(5):
                await lost.add("Debit")
        await conn.rollback()
        async with bus.open_batch(DOMAIN, checkpoint_size=2, conn=conn) as kept:
            for _ in range(5):
                await kept.add("Debit")
        await conn.commit()
    assert await bus.get_batch(DOMAIN, lost.batch_id) is None
    assert counts(await given.batch_now(kept.batch_id)) == (5, 0, 0, 0, 0)


async def test_a_checkpoint_holds_at_least_one(bus: CommandBus) -> None:
    sizes: list[Any] = [0, -1, True, 1.5, "10", None]
    for size in sizes:
        with pytest.raises(ValueError, match="checkpoint_size"):
            bus.open_batch(DOMAIN, checkpoint_size=size)


async def test_a_duplicate_in_a_checkpoint_is_refused_and_the_rest_goes_with_the_next(
    bus: CommandBus, given: Given
) -> None:
    """The error names what is taken; nothing else of the checkpoint is lost."""
    taken = (await bus.send(DOMAIN, "Debit")).command_id
    async with bus.open_batch(DOMAIN, checkpoint_size=4) as batch:
        first = await batch.add("Debit", 1)
        with pytest.raises(DuplicateCommandError):
            await batch.add("Debit", 2, command_id=first)
        await batch.add("Debit", 3, command_id=taken)
        await batch.add("Debit", 4)
        with pytest.raises(DuplicateCommandError) as refused:
            await batch.add("Debit", 5)
        assert refused.value.command_ids == (taken,)
        await batch.add("Debit", 6)
    commands = await bus.list_batch_commands(DOMAIN, batch.batch_id)
    assert [command.data for command in commands] == [1, 4, 5, 6]


async def test_an_open_batch_refuses_what_it_could_not_write(bus: CommandBus) -> None:
    """A bad command at once, index 0 since each is added alone; and any command outside of the block"""
    opened = bus.open_batch(DOMAIN)
    with pytest.raises(InvalidOperationError, match="block"):
        await opened.add("Debit")
    async with opened:
        with pytest.raises(InvalidCommandError) as refused:
            await opened.add("Debit", {"a": math.inf})
    [problem] = refused.value.problems
    assert (problem.code, problem.path, problem.index) == ("NON_FINITE_NUMBER", "/data/a", 0)
    assert opened.added == 0


async def test_what_was_added_is_durable_when_its_checkpoint_has_returned(bus: CommandBus, given: Given) -> None:
    """Not before: it is in memory until then"""
    async with bus.open_batch(DOMAIN, checkpoint_size=3) as batch:
        await batch.add("Debit")
        assert given.database.count("command") == 0
        await batch.checkpoint()
        assert given.database.count("command") == 1
        for _ in range(3):
            await batch.add("Debit")
        assert given.database.count("command") == 4, "the third one completes the number"
