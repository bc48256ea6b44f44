"""A canary and a failure budget stop a batch before it does harm."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from busload import (
    BatchCommand,
    BatchJob,
    BusinessRuleError,
    Command,
    CommandBus,
    Dedup,
    HandlerContext,
    InvalidCommandError,
    PermanentCommandError,
    Settings,
    Stage,
    SyncCommandBus,
    Worker,
)
from busload.batches import Canary, FailureBudget
from busload.batches.guards import hold_overdue
from busload.commands import expire
from busload.errors import BatchNotFoundError, DuplicateCommandError, InvalidOperationError
from tests.brokers.faulty import FaultyTransport
from tests.faces import FACES, bus_of
from tests.given import DOMAIN, Database, Given, counts

pytestmark = pytest.mark.usefixtures("invariants")

WITHIN = timedelta(hours=2)


def numbered(count: int, **options: Any) -> list[BatchCommand]:
    return [BatchCommand("Debit", data={"n": n}, **options) for n in range(count)]


def failing(bus: CommandBus, those: set[int], error: type[Exception] = PermanentCommandError) -> list[int]:
    """A handler that fails for these numbers; returns the list of all numbers that it has seen."""
    seen: list[int] = []

    @bus.handler(DOMAIN, "Debit")
    async def handle(command: Command, ctx: HandlerContext) -> None:
        seen.append(command.data["n"])
        if command.data["n"] in those:
            raise error(f"wrong: {command.data.get('cause', 'amount')}")

    return seen


def wrong(message: str) -> str:
    return json.dumps({"type": "Wrong", "message": message})


async def trail(bus: CommandBus, batch_id: UUID) -> list[str]:
    return [event.type for event in await bus.get_batch_audit_trail(DOMAIN, batch_id)]


async def codes(bus: CommandBus, batch_id: UUID) -> list[tuple[str, int]]:
    return [(reason.code.value, reason.count) for reason in (await bus.explain_batch(DOMAIN, batch_id)).reasons]


# -- canary ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("total", "size"), [(1000, 10), (2500, 7), (10, 10), (3, 1)])
async def test_the_canary_is_spread_over_the_batch_and_the_rest_waits(
    bus: CommandBus, given: Given, total: int, size: int
) -> None:
    batch_id = await bus.create_batch(DOMAIN, numbered(total), canary=Canary(size, WITHIN))

    ready = await bus.list_batch_commands(DOMAIN, batch_id, status="PENDING", limit=total)
    numbers = [command.data["n"] for command in ready]
    assert len(numbers) == size
    bounds = [total * n // size for n in range(size + 1)]
    assert all(low <= number < high for low, number, high in zip(bounds[:-1], numbers, bounds[1:], strict=True))
    listed = await bus.list_batch_commands(DOMAIN, batch_id, limit=total)
    assert [command.data["n"] for command in listed] == list(range(total))
    batch = await given.batch_now(batch_id)
    assert (batch.canary_count, batch.canary_ended_at) == (size, None)
    assert batch.canary_until == batch.created_at + WITHIN
    if total > size:
        given.registered_worker()
        assert await codes(bus, batch_id) == [("CANARY", total - size)]


async def test_when_the_canary_has_completed_the_rest_runs(bus: CommandBus, given: Given) -> None:
    seen = failing(bus, set())
    batch_id = await bus.create_batch(DOMAIN, numbered(1000), canary=Canary(10, WITHIN))
    await given.drained()

    batch = await given.batch_now(batch_id)
    assert (batch.status, counts(batch)) == ("COMPLETED", (1000, 1000, 0, 0, 0))
    assert batch.canary_ended_at is not None
    assert sorted(seen[:10]) == [100 * n + 50 for n in range(10)]
    assert sorted(seen) == list(range(1000))
    assert await trail(bus, batch_id) == ["BATCH_SEALED", "BATCH_STARTED", "BATCH_CANARY_PASSED", "BATCH_COMPLETED"]
    assert await bus.get_batch(DOMAIN, batch_id) == batch


async def test_one_command_is_spoken_of_as_one(bus: CommandBus, given: Given) -> None:
    """A canary of one command, a batch of one, and one failure in a batch of many."""
    parked = {"reason": "PERMANENT", "details": wrong("amount")}
    alone = await bus.create_batch(DOMAIN, numbered(2), canary=Canary(1, WITHIN))
    [waits] = [one for one in (await bus.explain_batch(DOMAIN, alone)).reasons if one.code == "CANARY"]
    assert waits.message.startswith(
        "1 command is waiting for the canary of its batch: the command that runs first has not completed; it is to have"
    )
    given.settled(given.claimed(1), "TROUBLESHOOTING", **parked)
    assert (await given.batch_now(alone)).held_note == "The command that runs first has failed or waits for a person."
    one = await bus.create_batch(DOMAIN, numbered(1), budget=FailureBudget(0.5))
    given.settled(given.claimed(1), "TROUBLESHOOTING", **parked)
    many = await bus.create_batch(DOMAIN, numbered(10), budget=FailureBudget(0.01))
    given.settled(given.claimed(1), "TROUBLESHOOTING", **parked)
    assert [(await given.batch_now(batch_id)).held_note for batch_id in (one, many)] == [
        "1 of 1 command has failed or waits for a person, and its budget allows 0.",
        "1 of 10 commands has failed or waits for a person, and its budget allows 0.",
    ]


async def test_the_rest_waits_for_the_last_of_the_canary(given: Given) -> None:
    await given.bus.create_batch(DOMAIN, numbered(100), canary=Canary(10, WITHIN))
    *others, last = given.claimed(100)
    given.settled(others)
    assert len(others) == 9
    assert given.claimed(100) == []
    given.settled([last])
    assert len(given.claimed(100)) == 90


@pytest.mark.parametrize("error", [PermanentCommandError, BusinessRuleError])
async def test_a_canary_that_fails_holds_its_batch_until_a_person_lets_it_go(
    bus: CommandBus, given: Given, error: type[Exception]
) -> None:
    seen = failing(bus, {50}, error)
    batch_id = await bus.create_batch(DOMAIN, numbered(1000), canary=Canary(10, WITHIN))
    await given.drained()

    assert len(seen) <= 10
    batch = await given.batch_now(batch_id)
    assert (batch.held_reason, batch.held_by) == ("CANARY", None)
    assert batch.failed_count + batch.in_troubleshooting_count == 1
    [told] = [reason for reason in (await bus.explain_batch(DOMAIN, batch_id)).reasons if reason.code == "CANARY"]
    assert told.count == 1000 - len(seen)
    assert "1 of the 10 commands that run first has failed" in told.message
    assert "batch resume" in told.advice
    [held] = [event for event in await bus.get_batch_audit_trail(DOMAIN, batch_id) if event.type == "BATCH_HELD"]
    assert held.details["held_reason"] == "CANARY"
    assert held.details["failed"] + held.details["in_troubleshooting"] == 1
    await given.drained()
    assert len(seen) <= 10

    assert await bus.resume_batch(DOMAIN, batch_id, operator="ann")
    await given.drained()
    assert sorted(seen) == list(range(1000))
    batch = await given.batch_now(batch_id)
    assert (batch.completed_count, batch.held_at) == (999, None)
    assert batch.canary_ended_at is not None


async def test_a_held_canary_can_be_canceled(bus: CommandBus, given: Given) -> None:
    failing(bus, {50}, BusinessRuleError)
    batch_id = await bus.create_batch(DOMAIN, numbered(1000), canary=Canary(10, WITHIN))
    await given.drained()
    await bus.cancel_batch(DOMAIN, batch_id, reason="wrong amounts")
    batch = await given.batch_now(batch_id)
    assert batch.status == "COMPLETED_WITH_FAILURES"
    assert batch.canceled_count >= 990


@pytest.mark.parametrize("how", ["by a person", "by its expiry"])
async def test_a_canary_of_which_something_is_canceled_holds_its_batch(
    bus: CommandBus, given: Given, database: Database, how: str
) -> None:
    """It can never complete. What is canceled of the rest is no matter"""
    seen = failing(bus, set())
    at = datetime.now(UTC) + timedelta(hours=1)
    commands = [BatchCommand("Debit", data={"n": n}, expires_at=at + timedelta(seconds=n)) for n in range(100)]
    batch_id = await bus.create_batch(DOMAIN, commands, canary=Canary(10, WITHIN))
    [of_rest, *_] = await bus.list_batch_commands(DOMAIN, batch_id, status="SCHEDULED")
    [of_canary, *_] = await bus.list_batch_commands(DOMAIN, batch_id, status="PENDING")
    for one, held in ((of_rest, None), (of_canary, "CANARY")):
        if how == "by a person":
            await bus.cancel_command(DOMAIN, one.command_id, reason="a mistake")
        else:
            late = at + timedelta(seconds=one.data["n"])
            database.rows("UPDATE busload.expiry SET look_at = now() WHERE expires_at = %s", late)
            assert database.perform(expire.expire_commands()) == 1
        assert (await given.batch_now(batch_id)).held_reason == held
    assert (await given.batch_now(batch_id)).held_note == "1 of the 10 commands that run first was canceled."
    assert await given.drained() == 0

    assert await bus.resume_batch(DOMAIN, batch_id, operator="ann")
    await given.drained()
    assert set(range(100)) - set(seen) == {of_rest.data["n"], of_canary.data["n"]}
    batch = await given.batch_now(batch_id)
    assert (batch.status, counts(batch)) == ("COMPLETED_WITH_FAILURES", (100, 98, 0, 2, 0))
    assert batch.canary_ended_at is not None


async def test_a_canary_that_is_the_whole_batch_is_not_held_for_what_is_canceled(bus: CommandBus, given: Given) -> None:
    """Nothing waits for it"""
    seen = failing(bus, set())
    batch_id = await bus.create_batch(DOMAIN, numbered(3), canary=Canary(3, WITHIN))
    [first, *_] = await bus.list_batch_commands(DOMAIN, batch_id)
    await bus.cancel_command(DOMAIN, first.command_id, reason="a mistake")
    await given.drained()
    assert (seen, (await given.batch_now(batch_id)).status) == ([1, 2], "COMPLETED_WITH_FAILURES")


@pytest.mark.parametrize("rest", ["there is none", "is canceled"])
async def test_a_canary_that_is_all_of_its_batch_passes_with_it(bus: CommandBus, given: Given, rest: str) -> None:
    failing(bus, set())
    total = 3 if rest == "there is none" else 5
    batch_id = await bus.create_batch(DOMAIN, numbered(total), canary=Canary(3, WITHIN))
    for one in await bus.list_batch_commands(DOMAIN, batch_id, status="SCHEDULED"):
        await bus.cancel_command(DOMAIN, one.command_id, reason="a mistake")
    await given.drained()
    batch = await given.batch_now(batch_id)
    assert batch.canary_ended_at == batch.completed_at is not None
    assert (await trail(bus, batch_id))[-2:] == ["BATCH_CANARY_PASSED", "BATCH_COMPLETED"]


async def test_a_batch_that_ends_with_a_failed_canary_has_not_passed(bus: CommandBus, given: Given) -> None:
    failing(bus, {1}, BusinessRuleError)
    batch_id = await bus.create_batch(DOMAIN, numbered(3), canary=Canary(3, WITHIN))
    await given.drained()
    if (await given.batch_now(batch_id)).held_at is not None:
        await bus.cancel_batch(DOMAIN, batch_id, reason="enough")
    batch = await given.batch_now(batch_id)
    assert (batch.status, batch.canary_ended_at) == ("COMPLETED_WITH_FAILURES", None)
    assert "BATCH_CANARY_PASSED" not in await trail(bus, batch_id)


async def test_a_canary_that_expires_with_its_batch_holds_nothing(
    bus: CommandBus, given: Given, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page by page everything is canceled that has not started, so no person needs to decide"""
    batch_id = await bus.create_batch(DOMAIN, numbered(100), canary=Canary(10, WITHIN), expires_in=3600)
    database.rows("UPDATE busload.batch SET expires_at = now()")
    monkeypatch.setattr(expire, "PAGE", 20)
    while database.perform(expire.expire_batch()) is not None:
        pass
    assert (await given.batch_now(batch_id)).status == "COMPLETED_WITH_FAILURES"
    assert "BATCH_HELD" not in await trail(bus, batch_id)


async def test_a_canary_that_takes_too_long_holds_its_batch(bus: CommandBus, given: Given) -> None:
    batch_id = await bus.create_batch(DOMAIN, numbered(100), canary=Canary(10, WITHIN))
    assert given.database.perform(hold_overdue()) == 0
    given.database.rows("UPDATE busload.batch SET canary_until = now()")
    assert given.database.perform(hold_overdue()) == 1
    assert given.database.perform(hold_overdue()) == 0
    batch = await given.batch_now(batch_id)
    assert batch.held_reason == "CANARY"
    assert await codes(bus, batch_id) == [("CANARY", 100)]
    seen = failing(bus, set())
    assert await given.drained() == 0
    await bus.resume_batch(DOMAIN, batch_id)
    await given.drained()
    assert len(seen) == 100


async def test_a_worker_that_sweeps_holds_what_takes_too_long(bus: CommandBus, given: Given) -> None:
    batch_id = await bus.create_batch(DOMAIN, numbered(100), canary=Canary(10, timedelta(microseconds=1)))
    async with given.running(domains=["other"]):
        async for batch in bus.watch_batch(DOMAIN, batch_id, timeout=30):
            if batch.held_reason == "CANARY":
                break


async def test_a_person_may_hold_and_resume_while_the_canary_runs(bus: CommandBus, given: Given) -> None:
    """The rest still waits for the canary after that; if the canary ended meanwhile, the resume lets the rest go."""
    seen = failing(bus, set())
    batch_id = await bus.create_batch(DOMAIN, numbered(100), canary=Canary(10, WITHIN))
    await bus.hold_batch(DOMAIN, batch_id, reason="lunch")
    assert await given.drained() == 0
    await bus.resume_batch(DOMAIN, batch_id)
    assert await codes(bus, batch_id) == [("CANARY", 90), ("NO_WORKER", 10)]
    leased = given.claimed(100)
    assert len(leased) == 10
    await bus.hold_batch(DOMAIN, batch_id, reason="lunch")
    given.settled(leased)
    batch = await given.batch_now(batch_id)
    assert (batch.held_reason, batch.canary_ended_at) == ("OPERATOR", None)
    await bus.resume_batch(DOMAIN, batch_id)
    assert (await given.batch_now(batch_id)).canary_ended_at is not None
    await given.drained()
    assert len(seen) == 90


@pytest.mark.parametrize("face", FACES)
async def test_a_person_lets_the_batch_go_though_its_canary_runs(
    bus: CommandBus, dsn: str, given: Given, face: str
) -> None:
    batch_id = await bus.create_batch(DOMAIN, numbered(100), canary=Canary(10, WITHIN))
    leased = given.claimed(100)
    assert len(leased) == 10
    async with bus_of(face, dsn) as called:
        assert not await called.resume_batch(DOMAIN, batch_id, operator="rosa")
        assert given.claimed(100) == []
        assert await called.resume_batch(DOMAIN, batch_id, operator="rosa", end_canary=True)
        assert not await called.resume_batch(DOMAIN, batch_id, operator="rosa", end_canary=True)
    assert (await given.batch_now(batch_id)).canary_ended_at is not None
    [resumed] = [event for event in await bus.get_batch_audit_trail(DOMAIN, batch_id) if event.type == "BATCH_RESUMED"]
    assert resumed.operator == "rosa"
    assert resumed.details == {"held_reason": "CANARY", "canary": 10, "completed": 0}
    rest = given.claimed(100)
    assert len(rest) == 90
    given.settled(leased, "TROUBLESHOOTING", reason="PERMANENT", details=wrong("amount"))
    given.settled(rest)
    batch = await given.batch_now(batch_id)
    assert (batch.held_reason, counts(batch)) == (None, (100, 90, 0, 0, 10))


async def test_a_person_ends_the_canary_of_a_batch_that_a_person_holds(bus: CommandBus, given: Given) -> None:
    """What has failed of it while it was held does not hold it again."""
    batch_id = await bus.create_batch(DOMAIN, numbered(100), canary=Canary(10, WITHIN))
    leased = given.claimed(5)
    await bus.hold_batch(DOMAIN, batch_id, reason="lunch")
    given.settled(leased, "TROUBLESHOOTING", reason="PERMANENT", details=wrong("amount"))
    assert await bus.resume_batch(DOMAIN, batch_id, end_canary=True)
    batch = await given.batch_now(batch_id)
    assert batch.held_at is None and batch.canary_ended_at is not None
    assert len(given.claimed(100)) == 95


async def test_a_budget_holds_what_the_canary_does_not_keep_back_any_more(bus: CommandBus, given: Given) -> None:
    budget = FailureBudget(0.01, at_least=1)
    batch_id = await bus.create_batch(DOMAIN, numbered(100), canary=Canary(10, WITHIN), budget=budget)
    leased = given.claimed(5)
    await bus.hold_batch(DOMAIN, batch_id, reason="lunch")
    given.settled(leased, "TROUBLESHOOTING", reason="PERMANENT", details=wrong("amount"))
    assert await bus.resume_batch(DOMAIN, batch_id, end_canary=True)
    assert (await given.batch_now(batch_id)).held_reason == "BUDGET"
    assert given.claimed(100) == []
    assert await bus.resume_batch(DOMAIN, batch_id)
    assert len(given.claimed(100)) == 95


async def test_only_a_canary_that_runs_is_ended(bus: CommandBus, given: Given, database: Database) -> None:
    without = await bus.create_batch(DOMAIN, numbered(3))
    canceled = await bus.create_batch(DOMAIN, numbered(3), canary=Canary(1))
    given.claimed(100)
    await bus.cancel_batch(DOMAIN, canceled, reason="a mistake")
    before = database.everything()
    for batch_id in (without, canceled):
        assert not await bus.resume_batch(DOMAIN, batch_id, end_canary=True)
    with pytest.raises(InvalidCommandError, match="end_canary"):
        await bus.resume_batch(DOMAIN, without, end_canary="yes")  # type: ignore[arg-type]
    assert database.everything() == before


async def test_a_run_at_is_kept_while_the_canary_runs(bus: CommandBus, given: Given) -> None:
    seen = failing(bus, set())
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    later = [BatchCommand("Debit", data={"n": n}, run_at=tomorrow) for n in range(10, 20)]
    batch_id = await bus.create_batch(DOMAIN, numbered(10) + later, canary=Canary(2, WITHIN))
    given.database.rows("UPDATE busload.scheduled SET run_at = now() WHERE reason = 'RUN_AT'")
    await given.drained()
    assert sorted(seen) == [*range(10), 15]
    waiting = await bus.list_batch_commands(DOMAIN, batch_id, status="SCHEDULED")
    assert {command.run_at for command in waiting if command.data["n"] >= 10} == {tomorrow}
    given.database.rows("UPDATE busload.scheduled SET run_at = now() WHERE reason = 'RUN_AT'")
    await given.drained()
    assert (await given.batch_now(batch_id)).status == "COMPLETED"


async def test_a_canary_runs_in_several_domains(bus: CommandBus, given: Given) -> None:
    commands = [BatchCommand("Debit", domain="ledger" if n % 2 else None) for n in range(100)]
    batch_id = await bus.create_batch(DOMAIN, commands, canary=Canary(10, WITHIN))
    ready = await bus.list_batch_commands(DOMAIN, batch_id, status="PENDING")
    assert sorted(command.domain for command in ready) == ["ledger"] * 5 + [DOMAIN] * 5


async def test_duplicates_that_are_left_out_make_the_canary_smaller(bus: CommandBus, given: Given) -> None:
    """The caller cannot know how many are left out. A batch of which nothing is left is complete."""
    seen = failing(bus, set())
    keyed = [BatchCommand("Debit", data={"n": n}, task_key=str(n % 3)) for n in range(9)]
    batch_id = await bus.create_batch(DOMAIN, keyed, canary=Canary(5, WITHIN), dedup=Dedup())
    assert (await given.batch_now(batch_id)).canary_count == 3
    none_left = await bus.create_batch(DOMAIN, keyed, canary=Canary(5, WITHIN), dedup=Dedup())
    assert (await given.batch_now(none_left)).status == "COMPLETED"
    await given.drained()
    assert len(seen) == 3
    assert (await given.batch_now(batch_id)).status == "COMPLETED"


@pytest.mark.parametrize("face", FACES)
async def test_with_a_broker_the_relay_publishes_the_canary_first(
    face: str, dsn: str, settings: Settings, given: Given, database: Database
) -> None:
    async with bus_of(face, dsn, transport=FaultyTransport(dsn), settings=settings) as bus:
        batch_id = await bus.create_batch(DOMAIN, numbered(100), canary=Canary(10, WITHIN))
        report = await bus.get_dispatch(DOMAIN, batch_id)
        assert report is not None and report.strategy == "relay"
        assert (database.count("outbox"), database.count("queue")) == (10, 0)
        for dispatch in ("two_phase", "checkpoint", "optimistic"):
            with pytest.raises(InvalidCommandError, match="canary= was given too"):
                await bus.create_batch(DOMAIN, numbered(100), canary=Canary(10, WITHIN), dispatch=dispatch)
    seen: list[int] = []
    async with CommandBus(dsn, transport=FaultyTransport(dsn), settings=settings) as serving:

        @serving.handler(DOMAIN, "Debit")
        async def handle(command: Command, ctx: HandlerContext) -> None:
            seen.append(command.data["n"])

        await Worker(serving, settings=given.settings).drain()
    assert sorted(seen[:10]) == [10 * n + 5 for n in range(10)]
    assert (await given.batch_now(batch_id)).status == "COMPLETED"


async def test_a_canary_larger_than_its_batch_is_refused(bus: CommandBus, database: Database) -> None:
    before = database.everything()
    with pytest.raises(InvalidCommandError, match="/canary/size: found 11, but the batch has 10 commands"):
        await bus.create_batch(DOMAIN, numbered(10), canary=Canary(11))
    with pytest.raises(InvalidCommandError, match="/canary"):
        await bus.create_batch(DOMAIN, numbered(10), canary=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no option 'canary'"):
        bus.open_batch(DOMAIN, canary=Canary(5))  # type: ignore[call-arg]
    assert database.everything() == before


async def test_a_canary_that_no_command_can_join_in_time_is_refused(bus: CommandBus, database: Database) -> None:
    """All commands are due after its time, by run_at or by delay; one that is due before is enough"""
    before, later = database.everything(), datetime.now(UTC) + 2 * WITHIN
    late = [*numbered(5, run_at=later), *numbered(5, delay=WITHIN)]
    for commands in (numbered(3, run_at=later), numbered(3, delay=WITHIN.total_seconds()), late):
        with pytest.raises(InvalidCommandError, match=r"/canary/within: found 2:00:00, .* a longer within") as refused:
            await bus.create_batch(DOMAIN, commands, canary=Canary(2, WITHIN))
        assert refused.value.total == 1
    assert database.everything() == before

    for soon in ({}, {"delay": WITHIN - timedelta(seconds=1)}, {"run_at": later - 3 * WITHIN}):
        await bus.create_batch(DOMAIN, [*late, *numbered(1, **soon)], canary=Canary(2, WITHIN))
    await bus.create_batch(DOMAIN, late, canary=Canary(2, 2 * WITHIN))
    await bus.create_batch(DOMAIN, late)
    assert database.count("batch") == 5


@pytest.mark.parametrize("size", [0, -1, True, 1.5, "5", None, 2**31])
def test_a_canary_has_at_least_one_command(size: Any) -> None:
    with pytest.raises(InvalidCommandError, match="/canary/size"):
        Canary(size)


@pytest.mark.parametrize("within", [timedelta(0), timedelta(seconds=-1), 60, None, timedelta.max])
def test_a_canary_has_some_time(within: Any) -> None:
    with pytest.raises(InvalidCommandError, match="/canary/within"):
        Canary(5, within)


# -- failure budget ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "at_least", "allowed"), [(0.02, 20, 20), (0.05, 20, 50), (0.29, 0, 290), (1, 0, 1000), (0.0001, 0, 0)]
)
async def test_the_budget_is_a_share_of_all_commands_and_at_least_so_many(
    bus: CommandBus, given: Given, share: float, at_least: int, allowed: int
) -> None:
    batch_id = await given.batch(commands=1000, budget=FailureBudget(share, at_least))
    batch = await given.batch_now(batch_id)
    assert (batch.failure_budget, batch.failure_budget_used) == (allowed, 0)


@pytest.mark.parametrize("outcome", ["FAILED", "TROUBLESHOOTING"])
async def test_the_failure_that_exceeds_the_budget_holds_the_batch(given: Given, outcome: str) -> None:
    """Exactly as many as it allows do not; the next one does, in its own transaction."""
    error = wrong("amount")
    reason = {} if outcome == "FAILED" else {"reason": "PERMANENT"}
    batch_id = await given.batch(commands=100, budget=FailureBudget(0.02))
    given.settled(given.claimed(1))
    given.settled(given.claimed(2), outcome, details=error, **reason)
    assert (await given.batch_now(batch_id)).held_at is None
    given.settled(given.claimed(1), outcome, details=error, **reason)

    batch = await given.batch_now(batch_id)
    assert (batch.held_reason, batch.failure_budget_used) == ("BUDGET", 3)
    assert given.claimed(100) == []
    [held] = [e for e in await given.bus.get_batch_audit_trail(DOMAIN, batch_id) if e.type == "BATCH_HELD"]
    assert held.details == {
        "held_reason": "BUDGET",
        "reason": "3 of 100 commands have failed or wait for a person, and its budget allows 2.",
        "total": 100,
        "completed": 1,
        "failed": 3 if outcome == "FAILED" else 0,
        "canceled": 0,
        "in_troubleshooting": 0 if outcome == "FAILED" else 3,
    }
    told = await given.bus.explain_batch(DOMAIN, batch_id)
    [reason_told] = [one for one in told.reasons if one.code == "BUDGET"]
    assert reason_told.count == 96
    assert "its budget allows 2" in reason_told.message
    assert f"batch resume {batch_id}`, with `--budget SHARE` for another budget; or" in reason_told.advice


async def test_after_a_resume_the_budget_starts_anew(bus: CommandBus, given: Given) -> None:
    batch_id = await given.batch(commands=100, budget=FailureBudget(0.02))
    for held_after in (3, 6):
        given.settled(given.claimed(3), "FAILED", details="{}")
        batch = await given.batch_now(batch_id)
        assert (batch.held_reason, batch.failed_count) == ("BUDGET", held_after)
        await bus.resume_batch(DOMAIN, batch_id, operator="ann")
        assert (await given.batch_now(batch_id)).failure_budget_used == 0
        given.settled(given.claimed(1))
        assert (await given.batch_now(batch_id)).held_at is None
    given.settled(given.claimed(2), "FAILED", details="{}")
    assert (await given.batch_now(batch_id)).held_at is None
    assert (await trail(bus, batch_id)).count("BATCH_RESUMED") == 2


async def test_a_resume_may_raise_the_budget(bus: CommandBus, given: Given) -> None:
    batch_id = await given.batch(commands=100, budget=FailureBudget(0.02))
    assert not await bus.resume_batch(DOMAIN, batch_id, budget=FailureBudget(0.5))
    assert (await given.batch_now(batch_id)).failure_budget == 2
    given.settled(given.claimed(3), "FAILED", details="{}")
    assert await bus.resume_batch(DOMAIN, batch_id, budget=FailureBudget(0.1))
    batch = await given.batch_now(batch_id)
    assert (batch.failure_budget, batch.failure_budget_used) == (10, 0)
    given.settled(given.claimed(10), "FAILED", details="{}")
    assert (await given.batch_now(batch_id)).held_at is None
    given.settled(given.claimed(1), "FAILED", details="{}")
    assert (await given.batch_now(batch_id)).held_reason == "BUDGET"
    with pytest.raises(InvalidCommandError, match="/budget"):
        await bus.resume_batch(DOMAIN, batch_id, budget=0.5)  # type: ignore[arg-type]


async def test_a_budget_can_be_changed_before_it_holds_the_batch(bus: CommandBus, given: Given) -> None:
    """What has failed counts, so a budget that is too small now holds the batch at once; one may come later, too."""
    batch_id = await given.batch(commands=100, budget=FailureBudget(0.02, on_exceeded=BatchCommand("Alarm")))
    given.settled(given.claimed(2), "FAILED", details="{}")
    assert not await bus.set_batch_budget(DOMAIN, batch_id, FailureBudget(0.1), operator="ann")
    batch = await given.batch_now(batch_id)
    assert (batch.failure_budget, batch.failure_budget_used) == (10, 2)
    given.settled(given.claimed(8), "FAILED", details="{}")
    assert (await given.batch_now(batch_id)).held_at is None
    assert await bus.set_batch_budget(DOMAIN, batch_id, FailureBudget(0.05, at_least=9))
    held = await given.batch_now(batch_id)
    assert (held.held_reason, held.held_note) == (
        "BUDGET",
        "10 of 100 commands have failed or wait for a person, and its budget allows 9.",
    )
    assert [one.command_type for one in await bus.list_commands(DOMAIN, command_type="Alarm")] == ["Alarm"]
    assert not await bus.set_batch_budget(DOMAIN, batch_id, FailureBudget(1), operator="ann"), "it was held before"
    assert (await given.batch_now(batch_id)).held_reason == "BUDGET"
    events = [e for e in await bus.get_batch_audit_trail(DOMAIN, batch_id) if e.type == "BATCH_BUDGET_CHANGED"]
    assert [(e.operator, e.details) for e in events] == [
        ("ann", {"share": 0.1, "at_least": 0, "per_cause": False}),
        (None, {"share": 0.05, "at_least": 9, "per_cause": False}),
        ("ann", {"share": 1.0, "at_least": 0, "per_cause": False}),
    ]

    without = await given.batch(commands=10)
    assert not await bus.set_batch_budget(DOMAIN, without, FailureBudget(0.1))
    given.settled(given.claimed(5), "FAILED", details="{}")
    assert (await given.batch_now(without)).held_reason == "BUDGET"


async def test_a_changed_budget_for_each_cause_counts_the_causes_that_it_knows(bus: CommandBus, given: Given) -> None:
    batch_id = await given.batch(commands=100, budget=FailureBudget(0.02, per_cause=True))
    for cause in ("one", "two"):
        given.settled(given.claimed(2), "FAILED", details=wrong(cause))
    assert not await bus.set_batch_budget(DOMAIN, batch_id, FailureBudget(0.03, per_cause=True))
    assert (await given.batch_now(batch_id)).failure_budget_used == 2
    assert not await bus.set_batch_budget(DOMAIN, batch_id, FailureBudget(0.04))
    assert (await given.batch_now(batch_id)).failure_budget_used == 4, "all causes together"
    assert not await bus.set_batch_budget(DOMAIN, batch_id, FailureBudget(0.01, per_cause=True))
    assert (await given.batch_now(batch_id)).failure_budget_used == 0, "nobody has counted by cause meanwhile"


async def test_a_budget_that_cannot_be_is_not_given(bus: CommandBus, given: Given, database: Database) -> None:
    ended, canceled = await given.batch(), await given.batch(commands=2)
    given.settled(given.claimed(1))
    given.claimed(1)
    await bus.cancel_batch(DOMAIN, canceled, reason="enough")
    jobs = await bus.jobs.create_batch(DOMAIN, [BatchJob([Stage("one", [BatchCommand("Debit")])])])
    before = database.everything()
    for batch_id, said in (
        (ended, "has ended, so it can have no other failure budget"),
        (canceled, "was canceled, so it can have no other failure budget"),
        (jobs, "is a batch of jobs"),
    ):
        with pytest.raises(InvalidOperationError, match=said):
            await bus.set_batch_budget(DOMAIN, batch_id, FailureBudget(0.5))
    with pytest.raises(BatchNotFoundError):
        await bus.set_batch_budget(DOMAIN, uuid4(), FailureBudget(0.5))
    for none in (None, 0.5):
        with pytest.raises(InvalidCommandError, match=r"/budget: found .*, wanted a FailureBudget"):
            await bus.set_batch_budget(DOMAIN, jobs, none)  # type: ignore[arg-type]
    assert database.everything() == before


async def test_what_an_operator_tries_again_is_no_failure_any_more(bus: CommandBus, given: Given) -> None:
    """Neither does it count twice: not for the budget before a resume, and not after it."""
    failing(bus, set(range(100)))
    batch_id = await bus.create_batch(DOMAIN, numbered(100), budget=FailureBudget(0.02))
    given.settled(given.claimed(3), "TROUBLESHOOTING", details="{}", reason="PERMANENT")
    await bus.resume_batch(DOMAIN, batch_id)
    for item in await bus.troubleshooting.list(DOMAIN):
        await bus.troubleshooting.retry(DOMAIN, item.command_id, operator="ann")
    batch = await given.batch_now(batch_id)
    assert (batch.in_troubleshooting_count, batch.failure_budget_used) == (0, 0)
    given.settled(given.claimed(2), "FAILED", details="{}")
    assert (await given.batch_now(batch_id)).held_at is None
    given.settled(given.claimed(1), "FAILED", details="{}")
    assert (await given.batch_now(batch_id)).held_reason == "BUDGET"


async def test_each_cause_may_have_the_budget_for_itself(bus: CommandBus, given: Given) -> None:
    batch_id = await given.batch(commands=100, budget=FailureBudget(0.02, per_cause=True))
    other = await given.batch(commands=5)
    for number, cause in enumerate(["amount", "account", "amount", "account", "country"]):
        outcome = "FAILED" if number % 2 else "TROUBLESHOOTING"
        reason = {} if number % 2 else {"reason": "PERMANENT"}
        given.settled(given.claimed(1), outcome, details=wrong(f"{cause} of {number}"), **reason)
    batch = await given.batch_now(batch_id)
    assert (batch.held_at, batch.failure_budget, batch.failure_budget_used) == (None, 2, 2)
    given.settled(given.claimed(1), "FAILED", details=wrong("account of 99"))
    batch = await given.batch_now(batch_id)
    assert batch.held_reason == "BUDGET"
    assert batch.held_note is not None and "3 of 100" in batch.held_note and "for one cause" in batch.held_note
    assert given.database.value("SELECT count(*) FROM busload.batch_cause WHERE batch_id = %s", other) == 0

    await bus.resume_batch(DOMAIN, batch_id)
    given.settled(given.claimed(2), "FAILED", details=wrong("account of 99"))
    assert (await given.batch_now(batch_id)).held_at is None
    await bus.cancel_batch(DOMAIN, batch_id, reason="enough")


async def test_commands_that_kill_their_workers_use_up_the_budget(bus: CommandBus, given: Given) -> None:
    for per_cause in (False, True):
        batch_id = await given.batch(commands=3, budget=FailureBudget(0.01, per_cause=per_cause))
        for _ in range(4):
            worker = given.registered_worker()
            given.claimed(1, by=worker)
            given.died(worker)
            given.rescued()
        batch = await given.batch_now(batch_id)
        assert (batch.in_troubleshooting_count, batch.held_reason) == (1, "BUDGET")
        await bus.cancel_batch(DOMAIN, batch_id, reason="next")


async def test_a_command_is_sent_when_the_budget_is_exceeded(bus: CommandBus, given: Given) -> None:
    """By the transaction that holds the batch; each time that it is held."""
    chosen = uuid4()
    asked = BatchCommand("Alarm", chosen, {"to": "ann"}, priority=5)
    batch_id = await given.batch(commands=100, name="fees", budget=FailureBudget(0.02, on_exceeded=asked))
    given.settled(given.claimed(3), "FAILED", details="{}")
    first = await given.command_now(chosen)
    assert (first.command_type, first.priority, first.data["to"]) == ("Alarm", 5, "ann")
    assert first.data["batch"]["batch_id"] == str(batch_id)
    told = first.data["batch"]
    assert (told["name"], told["failed_count"]) == ("fees", 3)
    assert (told["held_reason"], told["failure_budget"], told["failure_budget_used"]) == ("BUDGET", 2, 3)
    assert told["held_note"] == "3 of 100 commands have failed or wait for a person, and its budget allows 2."
    assert told["failure_cause"] is None
    assert datetime.fromisoformat(told["held_at"]) == (await given.batch_now(batch_id)).held_at
    await bus.resume_batch(DOMAIN, batch_id, budget=FailureBudget(0.01))
    seen = given.handler("Alarm")
    await given.drained(domains=["nobody"])
    given.settled([one for one in given.claimed(5) if one.command_type == "Debit"], "FAILED", details="{}")
    assert (await given.batch_now(batch_id)).held_reason == "BUDGET"
    assert given.database.value("SELECT count(*) FROM busload.command WHERE command_type = 'Alarm'") == 2
    await bus.cancel_batch(DOMAIN, batch_id, reason="enough")
    given.database.bury()
    await given.drained()
    assert len(seen) == 2


async def test_the_command_tells_which_cause_has_exceeded_the_budget(bus: CommandBus, given: Given) -> None:
    chosen = uuid4()
    budget = FailureBudget(0.02, per_cause=True, on_exceeded=BatchCommand("Alarm", chosen))
    await given.batch(commands=100, budget=budget)
    given.settled(given.claimed(1), "FAILED", details=wrong("amount of 1"))
    given.settled(given.claimed(3), "TROUBLESHOOTING", details=wrong("account of 2"), reason="PERMANENT")
    told = (await given.command_now(chosen)).data["batch"]
    assert (told["failed_count"] + told["in_troubleshooting_count"], told["failure_budget_used"]) == (4, 3)
    [cause] = await bus.troubleshooting.groups(DOMAIN)
    assert told["failure_cause"] == cause.fingerprint


async def test_an_open_batch_has_a_budget_of_what_was_added(bus: CommandBus, given: Given) -> None:
    async with bus.open_batch(DOMAIN, budget=FailureBudget(0.1, at_least=1)) as batch:
        for n in range(50):
            await batch.add("Debit", {"n": n})
        await batch.checkpoint()
        assert (await given.batch_now(batch.batch_id)).failure_budget == 5
        given.settled(given.claimed(6), "FAILED", details="{}")
        assert (await given.batch_now(batch.batch_id)).held_reason == "BUDGET"
        await batch.add("Debit", {"n": 50})
    assert given.claimed(10) == []


async def test_the_last_failure_of_a_batch_completes_it(given: Given) -> None:
    """There is nothing left to hold."""
    batch_id = await given.batch(commands=2, budget=FailureBudget(0.01))
    given.settled(given.claimed(2), "FAILED", details="{}")
    batch = await given.batch_now(batch_id)
    assert (batch.status, batch.held_at) == ("COMPLETED_WITH_FAILURES", None)


async def test_a_canary_and_a_budget_work_together(bus: CommandBus, given: Given) -> None:
    failing(bus, {n for n in range(1000) if n % 100 == 7})
    guards: Any = {"canary": Canary(10, WITHIN), "budget": FailureBudget(0.005)}
    batch_id = await bus.create_batch(DOMAIN, numbered(1000), **guards)
    await given.drained()
    batch = await given.batch_now(batch_id)
    assert (batch.held_reason, batch.canary_ended_at is not None) == ("BUDGET", True)
    assert batch.failure_budget_used is not None and batch.failure_budget_used > 5


@pytest.mark.parametrize("dispatch", ["two_phase", "checkpoint", "optimistic", "relay"])
async def test_a_budget_is_kept_by_every_way_of_publishing(
    dsn: str, settings: Settings, given: Given, dispatch: Any
) -> None:
    async with CommandBus(dsn, transport=FaultyTransport(dsn), settings=settings) as bus:
        batch_id = await bus.create_batch(
            DOMAIN, numbered(100), dispatch=dispatch, checkpoint_size=40, budget=FailureBudget(0.02)
        )
        assert (await given.batch_now(batch_id)).failure_budget == 2


@pytest.mark.parametrize("share", [0, -0.1, 1.1, float("nan"), float("inf"), True, "0.5", None])
def test_a_budget_is_a_share_of_more_than_nothing(share: Any) -> None:
    with pytest.raises(InvalidCommandError, match="/budget/share: found"):
        FailureBudget(share)


async def test_what_cannot_be_a_budget_is_refused(bus: CommandBus, database: Database) -> None:
    before = database.everything()
    for odd in ({"at_least": -1}, {"at_least": 1.5}, {"per_cause": 1}, {"on_exceeded": "Alarm"}):
        with pytest.raises(InvalidCommandError, match=f"/budget/{next(iter(odd))}"):
            FailureBudget(0.5, **odd)
    with pytest.raises(InvalidCommandError, match=r"/budget: found 0\.02"):
        await bus.create_batch(DOMAIN, numbered(10), budget=0.02)  # type: ignore[arg-type]
    for asked in (BatchCommand("a b"), BatchCommand("Alarm", data=[1]), BatchCommand("Alarm", domain="ledger")):
        with pytest.raises(InvalidCommandError, match="/budget/on_exceeded"):
            await bus.create_batch(DOMAIN, numbered(10), budget=FailureBudget(0.5, on_exceeded=asked))
    same = uuid4()
    with pytest.raises(DuplicateCommandError):
        await bus.create_batch(
            DOMAIN,
            numbered(10),
            on_complete=BatchCommand("Done", same),
            budget=FailureBudget(0.5, on_exceeded=BatchCommand("Alarm", same)),
        )
    assert database.everything() == before


def test_the_sync_face_has_both(sync_bus: SyncCommandBus) -> None:
    guards: Any = {"canary": Canary(2), "budget": FailureBudget(0.5, 1)}
    batch_id = sync_bus.create_batch(DOMAIN, numbered(10), **guards)
    batch = sync_bus.get_batch(DOMAIN, batch_id)
    assert batch is not None
    assert (batch.canary_count, batch.failure_budget) == (2, 5)
    with sync_bus.open_batch(DOMAIN, budget=FailureBudget(0.5)) as opened:
        opened.add("Debit")
    assert sync_bus.hold_batch(DOMAIN, batch_id, reason="lunch")
    assert sync_bus.resume_batch(DOMAIN, batch_id, budget=FailureBudget(0.9))
    assert not sync_bus.set_batch_budget(DOMAIN, batch_id, FailureBudget(0.8))
    found = sync_bus.get_batch(DOMAIN, batch_id)
    assert found is not None and found.failure_budget == 8


async def test_the_hold_of_a_batch_is_named_though_all_that_is_left_waits_for_a_person(
    bus: CommandBus, given: Given
) -> None:
    """A retry of these commands does not start them: somebody has to resume the batch as well."""
    failing(bus, set(range(90, 100)))
    batch_id = await bus.create_batch(DOMAIN, numbered(100), budget=FailureBudget(0.02, at_least=1))
    await given.drained()

    assert await codes(bus, batch_id) == [("BUDGET", 0), ("IN_TROUBLESHOOTING", 10)]
    explanation = await bus.explain_batch(DOMAIN, batch_id)
    assert explanation.summary.endswith("ended; held by a failure budget, 10 waiting for a person.")
    held = explanation.reasons[0]
    assert held.message.endswith("its budget allows 2. Nothing that is retried starts before it goes on.")
    assert f"`busload batch resume {batch_id}`" in held.advice

    [group] = await bus.troubleshooting.groups(DOMAIN)
    for dry_run in (True, False):
        action = await bus.troubleshooting.retry_group(DOMAIN, group.fingerprint, dry_run=dry_run)
        assert (action.count, action.held, action.held_batches) == (10, 10, (batch_id,))
    await given.drained()
    assert await codes(bus, batch_id) == [("BUDGET", 10)]
    [held] = (await bus.explain_batch(DOMAIN, batch_id)).reasons
    assert held.message.endswith("its budget allows 2. By now no command of it waits for a person.")
    assert await bus.resume_batch(DOMAIN, batch_id)
    await given.drained()
    assert await codes(bus, batch_id) == [("BUDGET", 0), ("IN_TROUBLESHOOTING", 10)]
    canceled = await bus.troubleshooting.cancel_group(DOMAIN, group.fingerprint, reason="test", dry_run=True)
    assert (canceled.count, canceled.held) == (10, 0)
