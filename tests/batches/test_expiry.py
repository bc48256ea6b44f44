"""What has not started in time is canceled with the reason EXPIRED; what runs finishes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

from busload import (
    BatchCommand,
    Command,
    CommandBus,
    Dedup,
    HandlerContext,
    InvalidCommandError,
    RetryPolicy,
    Settings,
    Stage,
    SyncCommandBus,
    TransientCommandError,
)
from busload.commands import claim, expire
from busload.commands.execution import FAILED_ATTEMPT
from busload.postgres.plan import Plan
from busload.sync.plan import perform
from tests.faces import FACES, bus_of
from tests.given import DOMAIN, Database, Given, counts, eventually

pytestmark = pytest.mark.usefixtures("invariants")

SOON = timedelta(hours=1)


def soon(hours: float = 1) -> datetime:
    return datetime.now(UTC) + timedelta(hours=hours)


def pass_time(database: Database) -> None:
    """Every expiry is over now."""
    database.rows("UPDATE busload.batch SET expires_at = now() - interval '1 s' WHERE expires_at IS NOT NULL")
    database.rows("UPDATE busload.expiry SET look_at = now() - interval '1 s'")


def swept(database: Database) -> int:
    """Sweep once, and say how many commands have expired."""
    total = 0
    for page in (expire.expire_commands, expire.expire_batch):
        while (canceled := database.perform(page())) is not None:
            total += canceled
    return total


async def test_what_has_not_started_in_time_is_canceled_and_what_runs_finishes(
    bus: CommandBus, given: Given, database: Database
) -> None:
    batch_id = await given.batch(1500, expires_in=SOON, on_complete=BatchCommand("Done"))
    running = given.claimed(4)
    other = await given.batch(1)
    batch = await given.batch_now(batch_id)
    assert batch.expires_at is not None and timedelta(0) < batch.expires_at - batch.created_at <= SOON
    assert swept(database) == 0

    pass_time(database)

    assert swept(database) == 1496
    assert counts(await given.batch_now(batch_id)) == (1500, 0, 0, 1496, 0)
    assert counts(await given.batch_now(other)) == (1, 0, 0, 0, 0)
    given.settled(running)
    batch = await given.batch_now(batch_id)
    assert (batch.status, counts(batch)) == ("COMPLETED_WITH_FAILURES", (1500, 4, 0, 1496, 0))
    [expired] = [e for e in await bus.get_batch_audit_trail(DOMAIN, batch_id) if e.type == "BATCH_EXPIRED"]
    assert expired.operator is None
    last = (await bus.list_batch_commands(DOMAIN, batch_id, status="CANCELED"))[-1]
    assert (await bus.get_audit_trail(DOMAIN, last.command_id))[-1].details == {"reason": "EXPIRED"}
    assert sorted(one.command_type for one in given.claimed(9)) == ["Debit", "Done"]


async def test_a_worker_expires_what_is_late_by_itself(bus: CommandBus, given: Given, database: Database) -> None:
    seen = given.handler()
    batch_id = await bus.create_batch(
        DOMAIN, [BatchCommand("Debit", run_at=soon()), BatchCommand("Debit")], expires_in=7200.0
    )
    single = await bus.send(DOMAIN, "Debit", run_at=soon(), expires_at=soon(2))
    async with given.running():
        await eventually(lambda: len(seen) == 1)
        pass_time(database)
        batch = await bus.wait_batch(DOMAIN, batch_id, timeout=20)
        assert counts(batch) == (2, 1, 0, 1, 0)
        await eventually(lambda: database.count("expiry") == 0)
    assert (await given.command_now(single.command_id)).status == "CANCELED"


async def test_commands_have_times_of_their_own(bus: CommandBus, given: Given, database: Database) -> None:
    """Those that differ are cut apart; a load that a claim has split expires as far as it waits"""
    late, later = soon(1), soon(2)
    commands = [BatchCommand("Debit", data={"n": n}, expires_at=(late, later, None)[n % 3]) for n in range(30)]
    batch_id = await bus.create_batch(DOMAIN, commands)
    [first, *_] = given.claimed(3)
    assert first.data == '{"n":0}'
    database.rows("UPDATE busload.expiry SET look_at = now() WHERE expires_at = %s", late)
    assert swept(database) == 7
    assert counts(await given.batch_now(batch_id)) == (30, 0, 0, 7, 0)
    assert database.count("expiry") == 2  # three of the first are in a lease, and may come back
    pass_time(database)
    assert swept(database) == 10
    ended = await bus.list_batch_commands(DOMAIN, batch_id, status="CANCELED")
    assert {command.data["n"] % 3 for command in ended} == {0, 1}


async def test_one_transaction_cancels_a_page_of_commands_and_up_to_a_load_more(
    bus: CommandBus, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many loads are late, their batches are not held locked for long"""
    monkeypatch.setattr(expire, "PAGE", 3)
    for _ in range(5):
        await bus.create_batch(DOMAIN, [BatchCommand("Debit", expires_at=soon())] * 2)
    pass_time(database)
    assert [database.perform(expire.expire_commands()) for _ in range(4)] == [4, 4, 2, None]


async def test_what_is_handed_back_after_its_time_is_canceled(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """A worker had it in its line and has not begun"""
    batch_id = await bus.create_batch(DOMAIN, [BatchCommand("Debit", expires_at=soon())] * 3)
    worker = given.registered_worker()
    given.claimed(3, by=worker)
    pass_time(database)
    assert swept(database) == 0
    database.rows("UPDATE busload.worker SET stopped_at = now() WHERE worker = %s", worker)
    given.rescued()
    pass_time(database)
    assert swept(database) == 3
    assert (database.count("expiry"), (await given.batch_now(batch_id)).canceled_count) == (0, 3)


async def test_what_is_handed_back_while_the_sweep_looks_is_canceled_by_a_later_one(
    bus: CommandBus, given: Given, database: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was in a lease when the sweep looked for what waits, and waits when the sweep looks for leases"""
    await bus.send(DOMAIN, "Debit", expires_at=soon())
    [leased] = given.claimed(1)
    pass_time(database)
    cancel = expire._expire

    def hand_back_first(his: list[int]) -> Plan[int]:
        database.perform(claim.give_back({leased.lease: [leased.id]}))
        return (yield from cancel(his))

    with monkeypatch.context() as patched:
        patched.setattr(expire, "_expire", hand_back_first)
        with psycopg.connect(dsn) as sweeper:
            assert perform(sweeper, expire.expire_commands()) == 0
    assert database.count("expiry") == 1
    pass_time(database)
    assert (swept(database), database.count("expiry")) == (1, 0)


async def test_what_is_pruned_leaves_no_expiry(bus: CommandBus, given: Given, database: Database) -> None:
    """The expiry of a load stays until nothing of the load is left"""
    at, at_once = soon(), timedelta(microseconds=1)
    batch_id = await bus.create_batch(DOMAIN, [BatchCommand("Debit", expires_at=at)])
    await bus.cancel_batch(DOMAIN, batch_id, reason="a mistake")
    await bus.send_many(DOMAIN, [BatchCommand("Debit", expires_at=at), BatchCommand("Debit", expires_at=at)])
    given.settled(given.claimed(1))
    await bus.prune(at_once)
    assert (database.count("command"), database.count("batch"), database.count("expiry")) == (1, 0, 1)
    given.settled(given.claimed(1))
    await bus.prune(at_once)
    assert (database.count("command"), database.count("expiry")) == (0, 0)


@pytest.mark.parametrize("per_command", [True, False], ids=["per command", "per batch"])
async def test_a_retry_has_started_before_and_does_not_expire(
    bus: CommandBus, given: Given, database: Database, per_command: bool
) -> None:
    one = BatchCommand("Debit", expires_at=soon() if per_command else None)
    batch_id = await bus.create_batch(DOMAIN, [one], expires_in=None if per_command else SOON)
    given.settled(given.claimed(1), FAILED_ATTEMPT, delay=3600.0)
    pass_time(database)
    assert swept(database) == 0
    given.make_due()
    given.handler()
    await given.drained()
    assert counts(await given.batch_now(batch_id)) == (1, 1, 0, 0, 0)


async def test_what_snoozes_waits_no_longer_than_until_it_expires(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """It has come too early, so a limit on how often it may ask is its expiry; after a failure it has started."""

    async def snooze(command: Command, ctx: HandlerContext) -> None:
        if ctx.attempt == command.data["fails"]:
            raise TransientCommandError("busy")
        ctx.snooze(3600)

    given.handler("Debit", snooze, retry=RetryPolicy(backoff=(0.001,)))
    batch_id = await bus.create_batch(
        DOMAIN, [BatchCommand("Debit", data={"fails": n}) for n in (0, 1)], expires_in=SOON
    )
    async with given.running():
        await eventually(lambda: database.value("SELECT count(*) FROM busload.event WHERE type = 'SNOOZED'") == 2)
    pass_time(database)
    assert swept(database) == 1
    assert (await given.batch_now(batch_id)).canceled_count == 1
    [left] = await bus.list_batch_commands(DOMAIN, batch_id, status="SCHEDULED")
    assert left.data == {"fails": 1}


async def test_what_is_held_or_waits_for_its_time_expires_too(
    bus: CommandBus, given: Given, database: Database
) -> None:
    commands = [BatchCommand("Debit"), BatchCommand("Debit", run_at=soon(), expires_at=soon(2))]
    batch_id = await bus.create_batch(DOMAIN, commands, expires_in=SOON)
    own = await bus.create_batch(DOMAIN, [BatchCommand("Debit", expires_at=soon())])
    for one in (batch_id, own):
        await bus.hold_batch(DOMAIN, one, reason="the bank complains")
    pass_time(database)
    assert swept(database) == 3
    for one in (batch_id, own):
        assert (await given.batch_now(one)).status == "COMPLETED_WITH_FAILURES"
    assert database.count("scheduled") == 0


async def test_an_open_batch_expires_and_completes_with_its_seal(
    bus: CommandBus, given: Given, database: Database
) -> None:
    async with bus.open_batch(DOMAIN, expires_in=SOON, checkpoint_size=2) as batch:
        await batch.add("Debit")
        await batch.add("Debit", expires_at=soon())
        assert database.count("expiry") == 1
        pass_time(database)
        assert swept(database) == 2
        await bus.send(DOMAIN, "Debit", batch_id=batch.batch_id)
        assert (await given.batch_now(batch.batch_id)).status == "PENDING"
    assert swept(database) == 1
    found = await given.batch_now(batch.batch_id)
    assert (found.status, counts(found)) == ("COMPLETED_WITH_FAILURES", (3, 0, 0, 3, 0))


async def test_single_commands_expire_however_they_are_sent(
    bus: CommandBus, given: Given, database: Database, dsn: str
) -> None:
    at, sent = soon(), []
    sent.append(await bus.send(DOMAIN, "Debit", expires_at=at))
    sent.append(await bus.send(DOMAIN, "Debit", expires_at=at, task_key="a", dedup=Dedup(window=timedelta(hours=1))))
    sent += await bus.send_many(DOMAIN, [BatchCommand("Debit", expires_at=at), BatchCommand("Debit", reply_to="crm")])
    async with CommandBus(dsn, transport=dsn, settings=bus.settings) as broker:
        sent.append(await broker.send(DOMAIN, "Debit", expires_at=at))
    pass_time(database)
    assert swept(database) == 4
    found = [(await given.command_now(one.command_id)).status for one in sent]
    assert found == ["CANCELED", "CANCELED", "CANCELED", "PENDING", "CANCELED"]


async def test_an_expired_command_is_answered(bus: CommandBus, given: Given, database: Database) -> None:
    await bus.send(DOMAIN, "Debit", reply_to="crm", expires_at=soon())
    pass_time(database)
    assert swept(database) == 1
    [(reply,)] = database.rows("SELECT data FROM busload.command WHERE domain = 'crm'")
    assert (reply["outcome"], reply["error"]) == ("CANCELED", {"message": "EXPIRED"})


@pytest.mark.parametrize("dispatch", ["relay", "two_phase", "checkpoint", "optimistic"])
async def test_every_strategy_of_dispatch_keeps_the_expiry(
    dispatch: Any, database: Database, dsn: str, given: Given
) -> None:
    async with CommandBus(dsn, transport=dsn, settings=given.bus.settings) as bus:
        commands = [BatchCommand("Debit"), BatchCommand("Debit", expires_at=soon())]
        batch_id = await bus.create_batch(DOMAIN, commands, expires_in=SOON, dispatch=dispatch)
        assert (await given.batch_now(batch_id)).expires_at is not None
        assert database.count("expiry") == 1
        pass_time(database)
        assert swept(database) == 2
        assert (await given.batch_now(batch_id)).status == "COMPLETED_WITH_FAILURES"


async def test_commands_of_a_job_keep_their_expiry(bus: CommandBus, given: Given, database: Database) -> None:
    given.handler()
    stages = [Stage("first", [BatchCommand("Debit")]), Stage("second", [BatchCommand("Debit", expires_at=soon())])]
    job_id = await bus.jobs.create(DOMAIN, stages)
    await given.drained(domains=[DOMAIN])
    assert (await bus.jobs.wait(DOMAIN, job_id, timeout=20)).status == "COMPLETED"
    assert database.count("expiry") == 1


def test_the_sync_bus_has_expiry_too(sync_bus: SyncCommandBus, database: Database) -> None:
    batch_id: UUID = sync_bus.create_batch(DOMAIN, [BatchCommand("Debit")], expires_in=3600)
    sync_bus.send(DOMAIN, "Debit", expires_at=soon())
    pass_time(database)
    assert swept(database) == 2
    found = sync_bus.get_batch(DOMAIN, batch_id)
    assert found is not None and found.status == "COMPLETED_WITH_FAILURES"


WRONG: dict[str, Callable[[CommandBus], Any]] = {
    "in the past": lambda bus: bus.create_batch(DOMAIN, [BatchCommand("Debit", expires_at=soon(-1))]),
    "of a single one in the past": lambda bus: bus.send(DOMAIN, "Debit", expires_at=soon(-1)),
    "before run_at": lambda bus: bus.send(DOMAIN, "Debit", run_at=soon(2), expires_at=soon(1)),
    "without a zone": lambda bus: bus.send(DOMAIN, "Debit", expires_at=datetime(2999, 1, 1)),
    "of another kind": lambda bus: bus.send(DOMAIN, "Debit", expires_at=60),  # type: ignore[arg-type]
    "at once": lambda bus: bus.create_batch(DOMAIN, [BatchCommand("Debit")], expires_in=timedelta(0)),
    "negative": lambda bus: bus.create_batch(DOMAIN, [BatchCommand("Debit")], expires_in=-1.5),
    "not a number": lambda bus: bus.create_batch(DOMAIN, [BatchCommand("Debit")], expires_in=float("nan")),
    "a truth": lambda bus: bus.create_batch(DOMAIN, [BatchCommand("Debit")], expires_in=True),
    "a text": lambda bus: bus.create_batch(DOMAIN, [BatchCommand("Debit")], expires_in="1h"),  # type: ignore[arg-type]
    "of a batch, before a run_at": lambda bus: bus.create_batch(
        DOMAIN, [BatchCommand("Debit"), BatchCommand("Debit", run_at=soon(2))], expires_in=3600
    ),
    "of a callback": lambda bus: bus.create_batch(
        DOMAIN, [BatchCommand("Debit")], on_complete=BatchCommand("Done", expires_at=soon())
    ),
}


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("call", WRONG)
async def test_an_expiry_that_makes_no_sense_is_refused_before_anything_is_written(
    face: str, dsn: str, settings: Settings, database: Database, call: str
) -> None:
    before = database.everything()
    async with bus_of(face, dsn, settings=settings) as bus:
        with pytest.raises(InvalidCommandError, match=r"expires_.*(wanted|without a time zone|cannot have a time)"):
            await WRONG[call](bus)
    assert database.everything() == before


async def test_a_command_that_would_expire_before_it_may_start_is_named_by_its_index(bus: CommandBus) -> None:
    for_later = [BatchCommand("Debit", run_at=soon(n)) for n in (0.5, 1.5, 2.5)]
    with pytest.raises(InvalidCommandError, match="would expire before it may start") as refused:
        await bus.create_batch(DOMAIN, for_later, expires_in=timedelta(hours=1))
    assert [(p.index, p.path, p.code) for p in refused.value.problems] == [
        (1, "/run_at", "INVALID_TIME"),
        (2, "/run_at", "INVALID_TIME"),
    ]


async def test_a_command_tells_when_it_expires_until_it_has_ended(bus: CommandBus, given: Given) -> None:
    """By its own time or by that of its batch, whichever comes first"""
    at = soon(0.5)
    commands = [BatchCommand("Debit", expires_at=at), BatchCommand("Debit"), BatchCommand("Debit", expires_at=soon(2))]
    batch_id = await bus.create_batch(DOMAIN, commands, expires_in=3600)
    of_batch = (await given.batch_now(batch_id)).expires_at
    listed = await bus.list_batch_commands(DOMAIN, batch_id)
    assert [command.expires_at for command in listed] == [at, of_batch, of_batch]
    single = await bus.send(DOMAIN, "Debit", expires_at=at)
    found = await given.command_now(single.command_id)
    assert found.expires_at == at
    assert (await given.command_now((await bus.send(DOMAIN, "Debit")).command_id)).expires_at is None
    everywhere = {command.command_id: command.expires_at for command in await bus.list_commands(DOMAIN)}
    assert everywhere[single.command_id] == at
    given.handler()
    await given.drained()
    assert (await given.command_now(single.command_id)).expires_at is None
