"""A batch carries the job and the stage of the application's own: any text, any number."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from busload import BatchCommand, CommandBus, InvalidCommandError, Settings, Stage
from tests.faces import FACES, bus_of
from tests.given import DOMAIN, Database, Given

pytestmark = pytest.mark.usefixtures("invariants")

ONE = [BatchCommand("Debit")]
UUIDS = UUID("0198c5d2-7f3a-7c11-9d2e-5b1c8a6e4f00")


@pytest.fixture(params=FACES)
async def bus(dsn: str, settings: Settings, request: pytest.FixtureRequest) -> AsyncIterator[CommandBus]:
    async with bus_of(request.param, dsn, settings=settings) as bus:
        yield bus


JOBS: list[UUID | str] = ["import-7", "é" * 255, 'it\'s "7"', "42", UUIDS]
STAGES: list[str | int] = [3, 0, -1, 2**53 - 1, "3", "import", 'a "b"', "é" * 127]


async def test_a_job_and_a_stage_come_back_as_they_were_given(bus: CommandBus) -> None:
    """Every job with every stage."""
    for job_id in JOBS:
        batches = []
        for stage in STAGES:
            batches.append(await bus.create_batch(DOMAIN, ONE, job_id=job_id, stage=stage))
            await bus.create_batch(DOMAIN, ONE, job_id=uuid4(), stage=stage)
            found = await bus.get_batch(DOMAIN, batches[-1])
            assert found is not None
            assert (found.job_id, found.stage, type(found.stage)) == (job_id, stage, type(stage))
        assert [each.batch_id for each in await bus.list_batches(DOMAIN, job_id=job_id)] == batches[::-1]


async def test_a_text_that_is_a_uuid_is_that_uuid(bus: CommandBus) -> None:
    batch_id = await bus.create_batch(DOMAIN, ONE, job_id=str(UUIDS).upper())
    for spelt in (UUIDS, str(UUIDS), str(UUIDS).upper()):
        [found] = await bus.list_batches(DOMAIN, job_id=spelt)
        assert (found.batch_id, found.job_id) == (batch_id, UUIDS)


WRONG_JOBS: list[Any] = ["", "a\0b", "a" * 256, 7, b"x", UUID(int=0), "\ud800"]
WRONG_STAGES: list[Any] = ["", True, 1.5, 2**53, [], "a" * 256]


async def test_another_job_or_stage_is_refused_and_nothing_is_written(bus: CommandBus, database: Database) -> None:
    before = database.everything()
    for options in [{"job_id": each} for each in WRONG_JOBS] + [{"stage": each} for each in WRONG_STAGES]:
        with pytest.raises(InvalidCommandError, match=f"/{next(iter(options))}"):
            await bus.create_batch(DOMAIN, ONE, **options)
        if "job_id" in options:
            with pytest.raises(InvalidCommandError, match="/job_id"):
                await bus.list_batches(DOMAIN, **options)
    assert database.everything() == before


async def test_batches_of_a_job_that_is_a_text_are_archived_with_it(given: Given, database: Database) -> None:
    """Beside those of a job of busload's, which stay as long as their job."""
    await given.bus.create_batch(DOMAIN, ONE, job_id="import-7", stage=2)
    given.settled(given.claimed(1))
    job_id = await given.bus.jobs.create(DOMAIN, [Stage("one", ONE), Stage("two", ONE)])
    given.settled(given.claimed(1))
    pruned = await given.bus.prune(timedelta(microseconds=1), archive=True)
    assert (pruned.batches, pruned.commands) == (1, 1)
    assert database.rows("SELECT job_id, stage FROM busload.archived_batch") == [("import-7", 2)]
    [left] = await given.bus.list_batches(DOMAIN, job_id=job_id)
    assert (left.job_id, left.stage) == (job_id, "one")
