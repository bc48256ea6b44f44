"""A command that waits can be put off, and brought forward."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from busload import CommandBus, InvalidCommandError, TransientCommandError
from busload.batches import Canary
from busload.commands import Cancellation
from busload.commands.command import CommandStatus
from busload.errors import CommandNotFoundError, InvalidOperationError
from tests.faces import FACES, bus_of
from tests.given import DOMAIN, Given, counts, raising

pytestmark = pytest.mark.usefixtures("invariants")

PAST = datetime(2020, 1, 1, tzinfo=UTC)


def in_an_hour() -> datetime:
    return datetime.now(UTC) + timedelta(hours=1)


async def ids_of(bus: CommandBus, batch_id: UUID) -> list[UUID]:
    return [one.command_id for one in await bus.list_batch_commands(DOMAIN, batch_id)]


@pytest.mark.parametrize("face", FACES)
async def test_a_command_in_the_queue_is_put_off(dsn: str, given: Given, face: str) -> None:
    """Alone: the others of its load run"""
    run_at, seen = in_an_hour(), given.handler()
    async with bus_of(face, dsn) as bus:
        batch_id = await given.batch(5)
        command_id = (await ids_of(bus, batch_id))[2]
        await bus.reschedule_command(DOMAIN, command_id, run_at, operator="ada")
        command = await bus.get_command(DOMAIN, command_id)
        assert command is not None
        assert (command.status, command.run_at, command.attempts) == (CommandStatus.SCHEDULED, run_at, 0)
        event = (await bus.get_audit_trail(DOMAIN, command_id))[-1]
        assert (event.type, event.operator) == ("RESCHEDULED", "ada")
        assert datetime.fromisoformat(event.details["run_at"]) == run_at
    await given.drained()
    assert sorted(command.data["n"] for command in seen) == [0, 1, 3, 4]
    given.make_due()
    await given.drained()
    assert counts(await given.batch_now(batch_id)) == (5, 5, 0, 0, 0)


@pytest.mark.parametrize("now", [PAST, datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14)))])
async def test_a_time_that_is_past_means_now(bus: CommandBus, given: Given, now: datetime) -> None:
    seen = given.handler()
    command_id = await given.sent(run_at=in_an_hour())
    await bus.reschedule_command(DOMAIN, command_id, now)
    assert (await given.command_now(command_id)).status == CommandStatus.PENDING
    await given.drained()
    assert [command.command_id for command in seen] == [command_id]


async def test_what_is_scheduled_is_put_off_or_brought_forward(bus: CommandBus, given: Given) -> None:
    command_id = await given.sent(run_at=in_an_hour())
    for run_at in (in_an_hour() + timedelta(days=1), in_an_hour() - timedelta(minutes=30)):
        await bus.reschedule_command(DOMAIN, command_id, run_at)
        command = await given.command_now(command_id)
        assert (command.status, command.run_at) == (CommandStatus.SCHEDULED, run_at)


async def test_a_retry_is_brought_forward_and_stays_the_attempt_that_it_was(bus: CommandBus, given: Given) -> None:
    given.handler(function=raising(TransientCommandError("not now")))
    command_id = await given.sent(max_attempts=2)
    await given.drained()
    await bus.reschedule_command(DOMAIN, command_id, PAST)
    await given.drained()
    command = await given.command_now(command_id)
    assert (command.status, command.attempts) == (CommandStatus.IN_TROUBLESHOOTING_QUEUE, 2)


async def test_what_is_ready_stays_ready(bus: CommandBus, given: Given) -> None:
    command_id = await given.sent()
    await bus.reschedule_command(DOMAIN, command_id, PAST)
    assert (await given.command_now(command_id)).status == CommandStatus.PENDING
    assert (await bus.get_audit_trail(DOMAIN, command_id))[-1].type == "RESCHEDULED"


async def test_what_is_not_published_yet_is_put_off_as_well(bus: CommandBus, given: Given) -> None:
    batch_id = await given.batch(3)
    given.database.rows(
        """WITH load AS (DELETE FROM busload.queue RETURNING lo, hi, domain, batch_id, fair)
           INSERT INTO busload.outbox (lo, hi, domain, batch_id, fair, transport) SELECT *, 'pgmq' FROM load"""
    )
    command_id = (await ids_of(bus, batch_id))[0]
    await bus.reschedule_command(DOMAIN, command_id, in_an_hour())
    assert (await given.command_now(command_id)).status == CommandStatus.SCHEDULED
    assert given.database.rows("SELECT hi - lo + 1 FROM busload.outbox") == [(2,)]


async def test_only_what_waits_is_rescheduled(bus: CommandBus, given: Given) -> None:
    running = await given.sent()
    given.claimed()
    with pytest.raises(InvalidOperationError, match="is IN_PROGRESS; only one that waits can be rescheduled"):
        await bus.reschedule_command(DOMAIN, running, PAST)
    _, [parked] = await given.in_troubleshooting()
    with pytest.raises(
        InvalidOperationError, match=r"is IN_TROUBLESHOOTING_QUEUE; only one that waits.*Retry it first"
    ):
        await bus.reschedule_command(DOMAIN, parked, PAST)
    await bus.cancel_command(DOMAIN, parked, reason="no")
    with pytest.raises(InvalidOperationError, match=r"is CANCELED\. It has ended, so it cannot be rescheduled"):
        await bus.reschedule_command(DOMAIN, parked, PAST)
    with pytest.raises(CommandNotFoundError):
        await bus.reschedule_command(DOMAIN, uuid4(), PAST)


@pytest.mark.parametrize("run_at", [None, "tomorrow", datetime(2030, 1, 1), datetime(9999, 1, 1, tzinfo=UTC)])
async def test_a_wrong_time_is_refused_before_anything_is_written(bus: CommandBus, given: Given, run_at: Any) -> None:
    command_id = await given.sent()
    before = given.database.everything()
    with pytest.raises(InvalidCommandError, match="/run_at"):
        await bus.reschedule_command(DOMAIN, command_id, run_at)
    assert given.database.everything() == before


async def test_with_conn_it_moves_with_the_commit(
    bus: CommandBus, given: Given, conn: psycopg.AsyncConnection[Any]
) -> None:
    command_id = await given.sent()
    async with conn.transaction(force_rollback=True):
        await bus.reschedule_command(DOMAIN, command_id, in_an_hour(), conn=conn)
    assert (await given.command_now(command_id)).status == CommandStatus.PENDING


async def test_what_is_held_with_its_batch_is_not_let_go_alone(bus: CommandBus, given: Given) -> None:
    """Neither by an operator's hold nor before its canary; it can be canceled"""
    held, guarded = await given.batch(3), await given.batch(5, canary=Canary(size=1))
    await bus.hold_batch(DOMAIN, held, reason="wrong price list")
    before = given.database.rows("SELECT lo, hi, reason FROM busload.scheduled ORDER BY hi")
    for batch_id, why in ((held, "is held"), (guarded, "waits for its canary")):
        command_id = given.database.value(
            """SELECT command_id FROM busload.command_status
                WHERE batch_id = %s AND status = 'SCHEDULED' ORDER BY id DESC LIMIT 1""",
            batch_id,
        )
        for run_at in (PAST, in_an_hour()):
            with pytest.raises(InvalidOperationError, match=f"belongs to batch {batch_id}, which {why}"):
                await bus.reschedule_command(DOMAIN, command_id, run_at)
        assert given.database.rows("SELECT lo, hi, reason FROM busload.scheduled ORDER BY hi") == before
        assert await bus.cancel_command(DOMAIN, command_id, reason="no") is Cancellation.CANCELED
        before = given.database.rows("SELECT lo, hi, reason FROM busload.scheduled ORDER BY hi")
        assert (await given.batch_now(batch_id)).canceled_count == 1
