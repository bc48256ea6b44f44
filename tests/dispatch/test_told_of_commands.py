"""What a command tells of its way to the broker: attempts, the last error, when, and the checkpoint it came with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest
from click.testing import CliRunner

from busload import BatchCommand, CommandBus, CommandMetadata, Settings, SyncCommandBus, WorkerSettings
from busload.cli import main
from busload.commands.expire import expire_batch
from busload.dispatch import outbox
from busload.dispatch.relay import publish_page
from busload.errors import CommandCanceledError
from tests.brokers.faulty import AWAY, FaultyTransport
from tests.faces import FACES, bus_of
from tests.given import DOMAIN, Database, Given

pytestmark = pytest.mark.usefixtures("invariants")


@pytest.fixture
def transport(dsn: str) -> FaultyTransport:
    return FaultyTransport(dsn)


@pytest.fixture(params=FACES)
async def bus(
    dsn: str, settings: Settings, transport: FaultyTransport, request: pytest.FixtureRequest
) -> AsyncIterator[CommandBus]:
    async with bus_of(request.param, dsn, transport=transport, settings=settings) as bus:
        yield bus


def chosen(count: int) -> list[BatchCommand]:
    return [BatchCommand("Debit", uuid4()) for _ in range(count)]


async def found(bus: CommandBus, command: BatchCommand) -> CommandMetadata:
    assert command.command_id is not None
    told = await bus.get_command(DOMAIN, command.command_id)
    assert told is not None
    return told


async def trail(bus: CommandBus, command: BatchCommand, *types: str) -> list[tuple[str, dict[str, object]]]:
    assert command.command_id is not None
    events = await bus.get_audit_trail(DOMAIN, command.command_id)
    return [(each.type, each.details) for each in events if each.type in types]


def told_of(command: CommandMetadata) -> tuple[int, str | None, bool]:
    return command.publish_attempts, command.last_publish_error, command.published_at is not None


async def test_what_the_broker_refused_is_still_told_after_a_hold_or_a_reschedule(
    bus: CommandBus, transport: FaultyTransport, given: Given
) -> None:
    """Both take the command out of the outbox, so PostgreSQL delivers it from then on"""
    transport.refuse(AWAY)
    first, second = commands = chosen(2)
    batch_id = await bus.create_batch(DOMAIN, commands)
    refused = told_of(await found(bus, first))
    assert refused[0] == 1 and refused[1]
    assert first.command_id is not None
    await bus.reschedule_command(DOMAIN, first.command_id, datetime.now(UTC) + timedelta(hours=1), operator="rosa")
    await bus.hold_batch(DOMAIN, batch_id, reason="the bank complains")
    for command in commands:
        assert told_of(await found(bus, command)) == refused
        [(_, details)] = await trail(bus, command, "REROUTED")
        assert details["attempts"] == 1
    await bus.resume_batch(DOMAIN, batch_id)
    assert told_of(await found(bus, second)) == refused


@pytest.mark.parametrize("how", ["with its batch", "by itself", "by its expiry"])
async def test_what_the_broker_refused_is_still_told_after_a_cancel(
    bus: CommandBus, transport: FaultyTransport, database: Database, how: str
) -> None:
    transport.refuse(AWAY)
    first, second = commands = chosen(2)
    batch_id = await bus.create_batch(DOMAIN, commands, expires_in=3600)
    refused = told_of(await found(bus, first))
    assert refused == (1, "nobody answers", False)
    if how == "with its batch":
        await bus.cancel_batch(DOMAIN, batch_id, reason="enough")
    elif how == "by itself":
        for command in commands:
            assert command.command_id is not None
            await bus.cancel_command(DOMAIN, command.command_id, reason="enough")
    else:
        database.rows("UPDATE busload.batch SET expires_at = now()")
        assert database.perform(expire_batch()) == 2
    for command in commands:
        told = await found(bus, command)
        assert (told.status, told_of(told)) == ("CANCELED", refused)
        [(_, details)] = await trail(bus, command, "CANCELED")
        reason = "EXPIRED" if how == "by its expiry" else "enough"
        refusal = {"transport": "postgresql", "attempts": 1, "last_error": "nobody answers"}
        assert details == {"reason": reason, **refusal}
    assert second.command_id is not None
    with pytest.raises(CommandCanceledError, match="EXPIRED" if how == "by its expiry" else "enough"):
        await bus.wait_command(DOMAIN, second.command_id)


def test_the_shell_shows_it(dsn: str, transport: FaultyTransport) -> None:
    with SyncCommandBus(dsn, transport=transport) as bus:
        transport.refuse(AWAY)
        [command] = commands = chosen(1)
        bus.create_batch(DOMAIN, commands, job_id="import-7", dispatch="checkpoint")

        def show() -> str:
            shell = {"BUSLOAD_DATABASE_URL": dsn}
            return CliRunner().invoke(main, ["command", "show", str(command.command_id)], env=shell).stdout

        assert "1 attempt: nobody answers" in show() and "import-7-cp-1" in show()
        transport.mend()
        bus.recover()
        assert "2 attempts: nobody answers" in show() and "PUBLISHED" in show()


async def test_without_a_broker_there_is_nothing_to_tell(dsn: str) -> None:
    async with CommandBus(dsn) as bus:
        [command] = chosen(1)
        await bus.create_batch(DOMAIN, [command])
        assert told_of(await found(bus, command)) == (0, None, False)
        assert await trail(bus, command, "PUBLISHED", "PUBLISH_FAILED") == []


@pytest.mark.parametrize("strategy", ["two_phase", "checkpoint", "optimistic", "relay"])
async def test_a_command_tells_how_it_was_published(
    bus: CommandBus, transport: FaultyTransport, database: Database, worker_settings: WorkerSettings, strategy: str
) -> None:
    """By every strategy, while it waits, when it is ready, and when it has ended."""
    commands = chosen(3)
    transport.refuse(AWAY)
    await bus.create_batch(DOMAIN, commands, dispatch=strategy)  # type: ignore[arg-type]
    await bus.recover()
    rounds = 1 if strategy == "relay" else 2
    for command in commands:
        assert told_of(await found(bus, command)) == (rounds, "nobody answers", False)
        [(event, details)] = await trail(bus, command, "PUBLISHED", "PUBLISH_FAILED")
        assert (event, details["attempts"], details["reason"]) == ("PUBLISH_FAILED", rounds, "UNREACHABLE")
    transport.mend()
    await bus.recover()
    given = Given(bus, database, worker_settings)
    given.settled(given.claimed(2))
    for command in commands:
        assert told_of(await found(bus, command)) == (rounds + 1, "nobody answers", True)
        [(event, details)] = await trail(bus, command, "PUBLISHED", "PUBLISH_FAILED")
        assert (event, details["attempts"], details["last_error"]) == ("PUBLISHED", rounds + 1, "nobody answers")
        assert details["transport"] == "postgresql"


@pytest.mark.parametrize("strategy", ["two_phase", "checkpoint", "optimistic"])
async def test_what_a_worker_took_before_the_mark_was_published_all_the_same(
    bus: CommandBus, database: Database, worker_settings: WorkerSettings, transport: FaultyTransport, strategy: str
) -> None:
    [command] = commands = chosen(1)

    async def claim() -> None:
        database.rows("UPDATE busload.outbox SET relay = NULL, due_at = now()")
        database.rows(
            "WITH taken AS (DELETE FROM busload.outbox RETURNING lo, hi, domain, batch_id)"
            " INSERT INTO busload.queue (lo, hi, domain, batch_id) SELECT * FROM taken"
        )
        given = Given(bus, database, worker_settings)
        given.settled(given.claimed(1))

    transport.before = claim
    await bus.create_batch(DOMAIN, commands, dispatch=strategy)  # type: ignore[arg-type]
    assert (await found(bus, command)).status == "COMPLETED"
    assert told_of(await found(bus, command)) == (1, None, True)


async def test_news_that_comes_twice_is_told_once(dsn: str, database: Database, transport: FaultyTransport) -> None:
    async with CommandBus(dsn, transport=transport) as bus:
        [command] = commands = chosen(1)
        await bus.send_many(DOMAIN, commands)
        publisher, perform = bus.publisher, bus.database.in_transaction
        done = await publish_page(publisher, perform, UUID(int=1), 10)
        await perform(outbox.mark(UUID(int=1), done.pieces))
        assert told_of(await found(bus, command)) == (1, None, True)
        database.rows("UPDATE busload.queue SET published_at = now() - interval '1 hour'")
        await bus.recover(publish_again_after=timedelta(minutes=5))
        assert told_of(await found(bus, command)) == (2, None, True)
        types = [event for event, _ in await trail(bus, command, "PUBLISHED", "PUBLISHED_AGAIN")]
        assert types == ["PUBLISHED", "PUBLISHED_AGAIN"]


async def test_rabbitmq_tells_a_command_the_same(dsn: str, rabbitmq_url: str) -> None:
    queue = f"test-{uuid4().hex}"
    async with CommandBus(dsn, transport=rabbitmq_url, settings=Settings(queue_prefix=queue)) as bus:
        [single, member] = chosen(2)
        await bus.send_many(DOMAIN, [single])
        await bus.create_batch(DOMAIN, [member])
        await bus.recover()
        for command in (single, member):
            assert told_of(await found(bus, command)) == (1, None, True)
            [(_, details)] = await trail(bus, command, "PUBLISHED")
            assert details["transport"] == "rabbitmq"


@pytest.mark.parametrize("job_id", ["import-7", None])
async def test_a_checkpoint_carries_the_job_and_is_found_from_a_command(
    bus: CommandBus, transport: FaultyTransport, job_id: str | None
) -> None:
    """Also commands that are not due, and those of a creation that went on later."""
    commands = chosen(7)
    commands[3] = BatchCommand("Debit", uuid4(), priority=5)
    batch_id = await bus.create_batch(DOMAIN, commands, dispatch="checkpoint", checkpoint_size=3, job_id=job_id)
    name = job_id or str(batch_id)
    expected = [f"{name}-cp-{1 + n // 3}" for n in range(7)]
    assert [(await found(bus, command)).checkpoint for command in commands] == expected
    report = await bus.get_dispatch(DOMAIN, batch_id)
    assert report is not None and list(report.checkpoints) == sorted(set(expected))
    [other] = chosen(1)
    await bus.create_batch(DOMAIN, [other])
    assert (await found(bus, other)).checkpoint is None
