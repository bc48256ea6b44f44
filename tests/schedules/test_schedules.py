"""Schedules: each due time gives exactly one command, whoever looks, dies, deploys, pauses or triggers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar
from uuid import UUID, uuid4

import psycopg
import pytest

from busload import BatchCommand, Command, CommandBus, HandlerContext, InvalidCommandError, SyncCommandBus, Worker
from busload.commands import rescue
from busload.commands.send import NO_BROKER
from busload.errors import InvalidOperationError, ScheduleNotFoundError
from busload.schedules import station
from busload.schedules.declare import declare, release_of
from busload.schedules.fire import Fired, fire
from busload.schedules.planned import DueTime
from busload.schedules.schedule import Schedule
from busload.schedules.station import ScheduleStation
from busload.sync.plan import perform
from busload.worker import lifecycle
from tests.given import DOMAIN, Database, Given, at_once, eventually

pytestmark = pytest.mark.usefixtures("invariants")

EVERY = timedelta(hours=10)
START = datetime.now(UTC) - 100.5 * EVERY
RARELY: Any = {"every": EVERY, "domain": DOMAIN, "starts_at": START}
"""Due five hours from now, and not while these tests run."""


REGISTERED: Any = {"name": "w", "domains": [DOMAIN], "concurrency": 1, "lease_for": timedelta(seconds=30)}


def scheduled(bus: CommandBus, name: str = "billing", **options: Any) -> Schedule:
    """Declare a schedule that sends Debit, and is not due soon."""
    what = {} if "planner" in options else {"command": BatchCommand("Debit", data={"n": 1})}
    return bus.schedule(name, **{**RARELY, **what, **options})


async def due(bus: CommandBus, database: Database, since: str = "3 seconds") -> None:
    """Keep what was declared, and move time: everything is due since then."""
    await bus.schedules.sync()
    database.rows("UPDATE busload.schedule SET next_due_at = now() - %s::interval", since)


def fired(database: Database) -> Fired:
    result: Fired = database.perform(fire(NO_BROKER))
    return result


def keys(database: Database) -> list[str]:
    return [key for (key,) in database.rows("SELECT task_key FROM busload.command ORDER BY task_key")]


def next_due(database: Database, name: str = "billing") -> datetime:
    found: datetime = database.value("SELECT next_due_at FROM busload.schedule WHERE name = %s", name)
    return found


async def test_a_due_time_is_a_command_with_all_that_was_declared(
    bus: CommandBus, given: Given, database: Database
) -> None:
    seen, id = given.handler(), UUID(int=7)
    what = BatchCommand(
        "Debit", data={"€": [1, None]}, priority=7, correlation_id=id, max_attempts=2, headers={"tenant": "a"}
    )
    bus.schedule("nightly", cron="0 2 * * *", timezone="Europe/Paris", command=what, domain=DOMAIN)
    await due(bus, database)
    at = next_due(database, "nightly").astimezone(UTC)
    assert await given.drained() == 1
    [command] = seen
    assert (command.data, command.priority, command.correlation_id) == ({"€": [1, None]}, 7, id)
    assert command.headers == {"tenant": "a", "busload-schedule": "nightly", "busload-due-at": at.isoformat()}
    assert command.task_key == f"nightly@{at.replace(tzinfo=None).isoformat()}Z"
    assert [one.command_id for one in await bus.trace(command.task_key)] == [command.command_id]
    assert (await given.command_now(command.command_id)).max_attempts == 2
    found = await bus.schedules.get("nightly")
    assert found is not None
    assert (found.last_due_at, found.next_due_at) == (at, found.next_times[0])
    assert await given.drained() == 0


async def test_each_due_time_is_fired_once_by_many_at_once(
    bus: CommandBus, given: Given, database: Database, dsn: str
) -> None:
    for nth in range(300):
        scheduled(bus, f"billing-{nth:03}")
    await due(bus, database)
    counts: list[int] = []

    def look(conn: psycopg.Connection[Any]) -> None:
        for _ in range(3):
            with conn.transaction():
                counts.append(perform(conn, fire(NO_BROKER)).commands)

    at_once(dsn, [look] * 8)
    while fired(database).schedules:
        pass
    assert len({key.partition("@")[0] for key in keys(database)}) == len(keys(database)) == 300
    assert (database.count("fire"), database.count("queue")) == (300, database.count("queue"))
    assert sum(counts) == 300


async def test_a_worker_that_dies_before_its_commit_has_fired_nothing(
    bus: CommandBus, database: Database, conn: psycopg.AsyncConnection, dsn: str
) -> None:
    scheduled(bus)
    await due(bus, database)
    with psycopg.connect(dsn) as dying:
        assert perform(dying, fire(NO_BROKER)).commands == 1
        assert fired(database).commands == 0  # it is not waited for: the other one holds it
        dying.rollback()
    assert (database.count("command"), database.count("fire")) == (0, 0)
    assert (fired(database).commands, fired(database).commands) == (1, 0)


async def test_a_due_time_that_was_fired_is_not_fired_again_though_the_clock_goes_back(
    bus: CommandBus, database: Database
) -> None:
    """Also after the history was pruned: the id of its command is its own for ever."""
    scheduled(bus)
    scheduled(bus, "other")
    await due(bus, database)
    at = next_due(database)
    assert fired(database).commands == 2
    database.rows("UPDATE busload.schedule SET next_due_at = %s WHERE name = 'billing'", at)
    assert (fired(database).commands, fired(database).schedules) == (0, 0)
    database.rows("UPDATE busload.schedule SET next_due_at = %s", at)
    database.rows("DELETE FROM busload.fire")
    database.rows("UPDATE busload.command SET command_id = gen_random_uuid() WHERE task_key LIKE 'other@%'")
    assert (fired(database).commands, fired(database).schedules) == (1, 0)
    assert len(keys(database)) == 3


async def test_what_is_declared_is_kept_and_declared_again_writes_nothing(bus: CommandBus, database: Database) -> None:
    scheduled(bus)
    scheduled(bus, "other", every=timedelta(minutes=5), catch_up="all", catch_up_limit=7, expires_in=60)
    assert await bus.schedules.sync() == ["billing", "other"]
    before = database.dump()
    assert await bus.schedules.sync() == []
    assert database.dump() == before
    [billing, other] = await bus.schedules.list()
    assert (billing.when, billing.command_type, billing.data, billing.catch_up) == (
        *("every 10:00:00", "Debit", {"n": 1}, "one"),
    )
    assert (other.catch_up, other.catch_up_limit, other.expires_in) == ("all", 7, timedelta(minutes=1))
    assert [one.name for one in await bus.schedules.list(DOMAIN, after="billing", limit=5)] == ["other"]
    assert (await bus.schedules.list("elsewhere"), await bus.schedules.get("nobody")) == ([], None)


async def test_a_deploy_that_changes_the_command_leaves_the_due_times_alone(
    bus: CommandBus, database: Database, dsn: str
) -> None:
    scheduled(bus)
    await bus.schedules.sync()
    database.rows("UPDATE busload.schedule SET next_due_at = now() + interval '7 minutes'")
    before = next_due(database)
    async with CommandBus(dsn) as release:
        scheduled(release, command=BatchCommand("Debit", data={"n": 2}))
        assert await release.schedules.sync() == ["billing"]
    assert next_due(database) == before
    assert database.value("SELECT command -> 'data' ->> 'n' FROM busload.schedule") == "2"


async def test_a_deploy_that_changes_the_rule_loses_no_due_time_that_has_come(
    bus: CommandBus, database: Database, dsn: str
) -> None:
    scheduled(bus)
    await due(bus, database)
    at = next_due(database)
    async with CommandBus(dsn) as release:
        scheduled(release, every=timedelta(minutes=10), starts_at=None)
        assert await release.schedules.sync() == ["billing"]
        assert next_due(database) == at
        assert fired(database).commands == 1
        assert next_due(database).minute % 10 == 0
        assert timedelta(0) < next_due(database) - datetime.now(UTC) <= timedelta(minutes=10)
    async with CommandBus(dsn) as release:
        scheduled(release, cron="0 3 * * *", every=None)
        await release.schedules.sync()
        assert (next_due(database).astimezone(UTC).hour, fired(database).commands) == (3, 0)


async def test_two_releases_that_start_in_turn_fire_each_due_time_once(
    bus: CommandBus, database: Database, dsn: str
) -> None:
    """A rolling deploy: workers of the old release start again and again beside those of the new one."""
    scheduled(bus, every=timedelta(seconds=1), catch_up="all")
    async with CommandBus(dsn) as release:
        scheduled(release, every=timedelta(seconds=2), catch_up="all", command=BatchCommand("Debit", data={"n": 2}))
        for _ in range(4):
            for one in (bus, release):
                assert await one.schedules.sync() == ["billing"]
                database.rows("UPDATE busload.schedule SET next_due_at = next_due_at - interval '3 seconds'")
                fired(database)
    assert len(set(keys(database))) == len(keys(database)) == database.count("fire") > 2


async def test_a_process_of_an_old_release_that_starts_again_does_not_bring_its_declaration_back(
    bus: CommandBus, given: Given, dsn: str, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """In a rolling deploy the newest release wins that has a living worker, also against one that starts later"""
    caplog.set_level(logging.INFO)
    given.handler()

    def is_new() -> bool:
        return bool(database.value("SELECT command ->> 'data' IS NULL FROM busload.schedule"))

    async with CommandBus(dsn) as new:
        new.handler(DOMAIN, "Debit")(lambda command, ctx: None)
        scheduled(bus)
        scheduled(new, command=BatchCommand("Debit"))
        await given.drained()
        assert not is_new()
        running = Worker(new)
        task = asyncio.create_task(running.run())
        try:
            await eventually(is_new)
            await given.drained()
            assert is_new()
            [said] = [one for one in caplog.records if "not as it is declared here" in one.getMessage()]
            assert (said.levelname, "declared here: billing. " in said.getMessage()) == ("WARNING", True)
            assert "`busload schedule sync` gives the name to this one" in said.getMessage()
            assert await bus.schedules.changes() == ["billing"]
        finally:
            running.stop()
            await task
        await given.drained()  # a rollback: no worker of the newer release is left
        assert not is_new()
        await Worker(new).drain()
        assert is_new()


async def test_a_worker_that_gave_way_brings_its_declaration_back_when_the_newer_release_is_gone(
    bus: CommandBus, dsn: str, given: Given, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the last worker of it has died; a release that is declared by hand is the newest from then on"""

    async def on_its_own(plan: Any) -> Any:
        return database.perform(plan)

    def kept() -> str:
        return str(database.value("SELECT declaration FROM busload.schedule"))

    old, new = scheduled(bus), scheduled(CommandBus(dsn), command=BatchCommand("Debit"))
    database.perform(declare([old]))
    database.perform(declare([new]))
    newer = database.perform(rescue.register(**REGISTERED, release=release_of([new])))
    station = ScheduleStation(on_its_own, on_its_own, [old], NO_BROKER)
    await station.start()
    assert kept() == new.declaration
    monkeypatch.setattr("busload.schedules.station.LONGEST_PAUSE", 0)
    await station.once()
    assert kept() == new.declaration
    given.died(newer)
    await station.once()
    assert kept() == old.declaration
    database.perform(rescue.register(**REGISTERED, release=release_of([old])))
    assert database.perform(declare([new])) == ["billing"]
    assert await bus.schedules.sync() == ["billing"]
    assert database.perform(declare([new])) == []
    assert kept() == old.declaration


async def test_releases_that_start_at_once_do_not_wait_for_each_other(bus: CommandBus, dsn: str) -> None:
    def declaring(nth: int) -> Any:
        made = [
            scheduled(CommandBus(dsn), f"s{one:03}", command=BatchCommand("Debit", data=nth % 2)) for one in range(100)
        ]
        order = made if nth % 2 else made[::-1]

        def work(conn: psycopg.Connection[Any]) -> None:
            for _ in range(5):
                with conn.transaction():
                    perform(conn, declare(order))

        return work

    at_once(dsn, [declaring(nth) for nth in range(4)])


async def test_a_paused_schedule_fires_nothing_and_catches_up_as_its_policy_says(
    bus: CommandBus, database: Database
) -> None:
    for policy in ("skip", "one", "all"):
        scheduled(bus, policy, catch_up=policy)
    await due(bus, database)
    database.rows("UPDATE busload.schedule SET next_due_at = %s", START + 95 * EVERY)
    for policy in ("skip", "one", "all"):
        assert await bus.schedules.pause(policy, reason="audit", operator="rosa")
        assert not await bus.schedules.pause(policy, operator="ada")
    assert (await bus.schedules.sync(), fired(database).schedules) == ([], 0)
    paused = await bus.schedules.get("skip")
    assert paused is not None
    assert (paused.paused_by, paused.pause_reason) == ("rosa", "audit")
    for policy in ("skip", "one", "all"):
        assert await bus.schedules.resume(policy, operator="rosa")
        assert not await bus.schedules.resume(policy)
    fired(database)
    found = [key.partition("@")[0] for key in keys(database)]
    assert (found.count("skip"), found.count("one"), found.count("all")) == (0, 1, 6)
    skipped = {one.schedule: one.skipped for one in await bus.schedules.history() if one.type == "SKIPPED"}
    assert skipped == {"skip": 6, "one": 5}
    actions = [(one.type, one.operator, one.schedule) for one in (await bus.audit.list()).actions]
    assert len(actions) == 6
    assert ("SCHEDULE_PAUSED", "rosa", "skip") in actions


async def test_a_deploy_does_not_end_a_pause(bus: CommandBus, database: Database, dsn: str) -> None:
    scheduled(bus)
    await bus.schedules.sync()
    await bus.schedules.pause("billing")
    async with CommandBus(dsn) as release:
        scheduled(release, every=timedelta(seconds=1))
        assert await release.schedules.sync() == ["billing"]
    assert database.value("SELECT paused_at IS NOT NULL FROM busload.schedule")


async def test_a_trigger_sends_the_command_now_beside_its_due_times(
    bus: CommandBus, given: Given, database: Database
) -> None:
    seen = given.handler()
    scheduled(bus)
    await bus.schedules.sync()
    await bus.schedules.pause("billing")
    before = next_due(database)
    ids = {await bus.schedules.trigger("billing", operator="rosa") for _ in range(2)}
    assert await given.drained() == 2
    assert ids == {one.command_id for one in seen}
    assert {one.task_key for one in seen} == {f"billing@trigger:{id}" for id in ids}
    assert next_due(database) == before
    rows = await bus.schedules.history("billing")
    assert [(one.type, one.operator, one.status) for one in rows] == [("TRIGGERED", "rosa", "COMPLETED")] * 2
    actions = (await bus.audit.list()).actions
    assert [(one.type, one.operator) for one in actions] == [("SCHEDULE_TRIGGERED", "rosa")] * 2


async def test_what_is_done_with_conn_exists_exactly_if_that_transaction_commits(
    bus: CommandBus, database: Database, conn: psycopg.AsyncConnection
) -> None:
    scheduled(bus)
    async with conn.transaction(force_rollback=True):
        assert await bus.schedules.sync(conn=conn) == ["billing"]
        await bus.schedules.trigger("billing", conn=conn)
        await bus.schedules.pause("billing", conn=conn)
    assert (database.count("schedule"), database.count("fire"), database.count("command")) == (0, 0, 0)
    async with conn.transaction():
        await bus.schedules.sync(conn=conn)
        await bus.schedules.trigger("billing", conn=conn)
        await bus.schedules.remove("billing", conn=conn)
    assert (database.count("schedule"), database.count("fire"), database.count("command")) == (0, 1, 1)


async def test_a_schedule_that_is_not_there_is_named_and_nothing_is_written(
    bus: CommandBus, database: Database
) -> None:
    before = database.everything()
    schedules = bus.schedules
    for call in (schedules.pause, schedules.resume, schedules.trigger, schedules.remove):
        with pytest.raises(ScheduleNotFoundError, match="There is no schedule 'billng'"):
            await call("billng", operator="rosa")
    assert database.everything() == before


async def test_the_history_of_a_schedule_that_never_was_is_refused(bus: CommandBus, sync_bus: SyncCommandBus) -> None:
    """A schedule that has fired nothing yet has an empty one"""
    scheduled(bus)
    await bus.schedules.sync()
    assert await bus.schedules.history("billing") == []
    with pytest.raises(ScheduleNotFoundError, match="There is no schedule 'billng'"):
        await bus.schedules.history("billng")
    with pytest.raises(ScheduleNotFoundError):
        sync_bus.schedules.history("billng")


async def test_a_removed_schedule_fires_nothing_and_its_history_stays(bus: CommandBus, database: Database) -> None:
    scheduled(bus)
    scheduled(bus, "other", domain="elsewhere")
    await due(bus, database)
    fired(database)
    await due(bus, database)
    await bus.schedules.remove("billing", operator="rosa")
    assert (fired(database).commands, len(await bus.schedules.history("billing"))) == (1, 1)
    assert [one.type for one in (await bus.audit.list()).actions] == ["SCHEDULE_REMOVED"]
    assert await bus.schedules.sync() == ["billing"]  # the code still declares it


async def test_what_the_code_does_not_declare_is_named_and_stays(bus: CommandBus, database: Database, dsn: str) -> None:
    for name, domain in (("kept", DOMAIN), ("old", DOMAIN), ("foreign", "elsewhere")):
        scheduled(bus, name, domain=domain)
    await bus.schedules.sync()
    async with CommandBus(dsn) as release:
        scheduled(release, "kept")
        assert await release.schedules.sync() == []
        assert await release.schedules.undeclared() == ["old"]
        assert await release.schedules.undeclared("elsewhere", DOMAIN) == ["foreign", "old"]
    assert database.count("schedule") == 3


async def test_a_name_that_is_taken_over_from_another_domain_is_told(
    bus: CommandBus, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The schedule of the other application stops without another word."""
    scheduled(bus, "nightly", domain="shop")
    scheduled(bus, "hourly", domain="shop")
    await bus.schedules.sync()
    async with CommandBus(dsn) as other:
        scheduled(other, "nightly", domain="warehouse")
        scheduled(other, "hourly", domain="shop", expires_in=60)
        assert sorted(await other.schedules.sync()) == ["hourly", "nightly"]
    assert "'nightly' was of the domain 'shop' and is of 'warehouse' now" in caplog.text
    assert "'hourly'" not in caplog.text


async def test_the_history_says_how_late_what_was_sent_and_how_it_ended(
    bus: CommandBus, given: Given, database: Database
) -> None:
    given.handler()
    scheduled(bus)
    await due(bus, database, "42 seconds")
    await given.drained()
    [row] = await bus.schedules.history("billing")
    assert (row.type, row.status, row.skipped, row.batch_id) == ("DUE", "COMPLETED", 0, None)
    assert timedelta(seconds=42) <= row.late < timedelta(seconds=70)
    assert row.command_id is not None
    assert row.finished_at == (await given.command_now(row.command_id)).finished_at
    database.rows("UPDATE busload.fire SET fired_at = fired_at - interval '9 days'")
    await bus.prune(timedelta(days=10))
    assert len(await bus.schedules.history()) == 1
    await bus.prune(timedelta(days=8), dry_run=True)
    assert len(await bus.schedules.history()) == 1
    await bus.prune(timedelta(days=8))
    assert await bus.schedules.history() == []


async def test_a_command_that_does_not_start_in_time_expires(bus: CommandBus, given: Given, database: Database) -> None:
    seen = given.handler()
    scheduled(bus, expires_in=timedelta(minutes=5))
    await due(bus, database)
    fired(database)
    [(left,)] = database.rows("SELECT expires_at - now() FROM busload.expiry")
    assert timedelta(minutes=4) < left <= timedelta(minutes=5)
    database.rows("UPDATE busload.expiry SET expires_at = now(), look_at = now()")
    await given.drained()
    assert (seen, (await bus.schedules.history())[0].status) == ([], "CANCELED")


async def test_a_planner_makes_one_batch_of_a_due_time_though_it_fails_at_first(
    bus: CommandBus, given: Given, database: Database
) -> None:
    seen, asked = given.handler(), list[DueTime]()

    async def plan(due: DueTime, ctx: HandlerContext) -> list[BatchCommand]:
        asked.append(due)
        if len(asked) == 1:
            raise ConnectionError("the database of customers is away")
        return [BatchCommand("Debit", data={"n": n, "at": due.due_at.isoformat()}) for n in range(3)]

    scheduled(bus, planner=plan, catch_up="skip")
    await due(bus, database)
    at = next_due(database)
    await given.drained()
    assert [row.batch_id for row in await bus.schedules.history("billing")] == [None]
    given.make_due()
    await given.drained()
    assert ([one.due_at for one in asked], len(seen)) == ([at, at], 3)
    [row] = await bus.schedules.history("billing")
    assert row.batch_id == asked[0].batch_id
    batch = await given.batch_now(asked[0].batch_id)
    assert (batch.completed_count, batch.name, batch.status) == (3, "billing", "COMPLETED")
    assert batch.custom_data == {"schedule": "billing", "due_at": at.astimezone(UTC).isoformat()}
    assert row.command_id is not None
    assert (await given.command_now(row.command_id)).result == {"batch_id": str(row.batch_id), "commands": 3}


@pytest.mark.parametrize("in_thread", [False, True])
async def test_the_batch_of_a_planner_sends_its_callback_when_it_completes(
    bus: CommandBus, given: Given, database: Database, in_thread: bool
) -> None:
    seen, told = given.handler(), given.handler("Tell")

    async def plan(due: DueTime, ctx: HandlerContext) -> list[BatchCommand]:
        return [BatchCommand("Debit"), BatchCommand("Debit")]

    def plan_in_thread(due: DueTime, ctx: Any) -> list[BatchCommand]:
        return [BatchCommand("Debit"), BatchCommand("Debit")]

    callback = BatchCommand("Tell", data={"to": "ada"})
    scheduled(bus, planner=plan_in_thread if in_thread else plan, on_complete=callback)
    await due(bus, database)
    await given.drained()
    assert len(seen) == 2
    [command] = told
    assert (command.data["to"], command.data["batch"]["completed_count"]) == ("ada", 2)


async def test_planners_run_in_threads_return_nothing_or_nonsense(
    bus: CommandBus, given: Given, database: Database
) -> None:
    seen = given.handler()

    def plan(due: DueTime, ctx: Any) -> list[BatchCommand]:
        return [BatchCommand("Debit", data=due.schedule)]

    async def nothing(due: DueTime, ctx: HandlerContext) -> list[BatchCommand]:
        return []

    async def nonsense(due: DueTime, ctx: HandlerContext) -> Any:
        return "Debit"

    async def unusable(due: DueTime, ctx: HandlerContext) -> list[BatchCommand]:
        return [BatchCommand("no such name")]

    for planner in (plan, nothing, nonsense, unusable):
        scheduled(bus, planner.__name__, planner=planner)
    await due(bus, database)
    await given.drained()
    assert [one.data for one in seen] == ["plan"]
    assert database.count("batch") == 1
    parked = {item.last_error_code: item.last_error_message for item in await bus.troubleshooting.list(DOMAIN)}
    assert parked.keys() == {"INVALID_PLAN", "INVALID_NAME"}
    assert "returned 'Debit', wanted a list of BatchCommand" in str(parked["INVALID_PLAN"])


class NotedStation(ScheduleStation):
    """Notes how long it is going to rest after each look; None while it looks."""

    rests: ClassVar[list[float | None]]

    async def once(self) -> float:
        self.rests.append(None)
        self.rests[-1] = pause = await super().once()
        return pause


async def test_a_running_worker_fires_when_the_time_comes_and_hears_of_a_nearer_schedule(
    bus: CommandBus, given: Given, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is due for hours, so this worker rests for one. Only a notification can end that rest in time."""
    monkeypatch.setattr(station, "LONGEST_PAUSE", 3600.0)
    monkeypatch.setattr(lifecycle, "ScheduleStation", NotedStation)
    rests: list[float | None] = []
    monkeypatch.setattr(NotedStation, "rests", rests, raising=False)
    seen = given.handler()
    scheduled(bus)
    async with given.running() as worker:
        await eventually(lambda: getattr(getattr(worker._run, "notifications", None), "has_listened", False))
        firing = worker._run._firing  # type: ignore[union-attr]
        await eventually(lambda: not firing._wake.is_set() and (rests or [None])[-1])
        looks, rest = len(rests), rests[-1]
        assert database.count("schedule") == 1  # the worker has declared it
        scheduled(bus, "soon", every=timedelta(seconds=1))
        await bus.schedules.sync()
        await eventually(lambda: len(seen) >= 2)
        known = rests[looks:]
    assert rest == 3600.0
    assert known and all(pause is None or pause <= 1 for pause in known)  # to the next second that is due
    rows = await bus.schedules.history("soon")
    assert len({one.due_at for one in rows}) == len(rows) >= 2


async def test_a_station_without_schedules_looks_once_and_rests(given: Given, database: Database) -> None:
    async with given.worker()._running() as run:
        assert await run._schedules.once() == 60.0
        database.rows(
            "INSERT INTO busload.schedule (name, domain, rule, command, catch_up, catch_up_limit, missed_after,"
            " declaration, next_due_at) VALUES ('far', 'x', '{}', '{}', 'one', 1, '1 minute', 'x', now() + '1 year')"
        )
        assert await run._schedules.once() == 60.0
        database.rows("UPDATE busload.schedule SET next_due_at = now() + interval '20 seconds'")
        assert 10 < await run._schedules.once() <= 20


async def test_a_worker_that_finds_a_due_schedule_held_by_another_waits_longer_and_longer(
    bus: CommandBus, given: Given, database: Database, dsn: str
) -> None:
    given.handler()
    scheduled(bus)
    await due(bus, database)
    with psycopg.connect(dsn) as frozen:
        perform(frozen, fire(NO_BROKER))
        async with given.worker()._running() as run:
            pauses = [await run._schedules.once() for _ in range(12)]
            assert pauses[0] <= 0.02
            assert 0.5 <= pauses[-1] <= 1


async def test_a_schedule_that_cannot_be_read_is_left_to_others_and_named_once(
    bus: CommandBus, given: Given, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """A release to come may know rules and zones that this worker does not."""
    scheduled(bus)
    scheduled(bus, "strange")
    await due(bus, database)
    database.rows(
        "UPDATE busload.schedule SET rule = jsonb_build_object('moon', 'full'), next_due_at = now() - interval '1 day'"
        " WHERE name = 'strange'"
    )
    caplog.set_level(logging.ERROR)
    given.handler()
    async with given.worker()._running() as run:
        assert await run._schedules.once() > 1
        assert await run._schedules.once() > 1
    assert [key.partition("@")[0] for key in keys(database)] == ["billing"]
    errors = [record.message for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1 and "strange" in errors[0]


async def test_with_a_broker_the_command_waits_in_the_outbox(bus: CommandBus, database: Database, dsn: str) -> None:
    async with CommandBus(dsn, transport=dsn) as published:
        scheduled(published)
        await due(published, database)
        result: Fired = database.perform(fire(published.via))
        assert (result.commands, database.count("outbox"), database.count("queue")) == (1, 1, 0)
        seen: list[Command] = []

        async def handle(command: Command, ctx: HandlerContext) -> None:
            seen.append(command)

        published.handler(DOMAIN, "Debit")(handle)
        await published.schedules.trigger("billing")
        await Worker(published).drain()
        assert len(seen) == 2


def test_the_sync_face_does_the_same(sync_bus: SyncCommandBus, database: Database) -> None:
    made = sync_bus.schedule("billing", **RARELY, command=BatchCommand("Debit"))
    assert made.next_times(2)[1] - made.next_times(2)[0] == EVERY
    assert sync_bus.schedules.sync() == ["billing"]
    assert sync_bus.schedules.pause("billing", operator="rosa")
    assert sync_bus.schedules.resume("billing")
    id = sync_bus.schedules.trigger("billing")
    assert [one.command_id for one in sync_bus.schedules.history("billing")] == [id]
    assert [one.name for one in sync_bus.schedules.list()] == ["billing"]
    sync_bus.schedules.remove("billing")
    assert sync_bus.schedules.get("billing") is None


async def test_a_worker_of_a_sync_bus_declares_its_schedules(dsn: str, database: Database) -> None:
    bus = SyncCommandBus(dsn)
    bus.handler(DOMAIN, "Debit")(lambda command, ctx: None)
    bus.schedule("billing", **RARELY, command=BatchCommand("Debit"))
    await Worker(bus).drain()
    assert database.count("schedule") == 1


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"command": None}, "found none of them, wanted either a command or a planner"),
    ({"planner": print, "command": BatchCommand("Debit")}, "found both, wanted either"),
    ({"command": "Debit"}, "found 'Debit', wanted a BatchCommand"),
    ({"command": BatchCommand("no name")}, "INVALID_NAME at /command/command_type"),
    ({"command": BatchCommand("Debit", command_id=UUID(int=1))}, "each due time has its own; leave it out"),
    ({"command": BatchCommand("Debit", task_key="x")}, "at /command/task_key: found task_key, but each due time"),
    ({"command": BatchCommand("Debit", run_at=datetime.now(UTC))}, "at /command/run_at"),
    ({"command": BatchCommand("Debit", expires_at=datetime.max)}, "pass expires_in to the schedule"),
    ({"command": BatchCommand("Debit", domain="other")}, "found 'other', but the schedule has domain='payments'"),
    ({"domain": None}, "wanted the domain that runs it"),
    ({"domain": "a b"}, "INVALID_NAME at /domain"),
    ({"catch_up": "some"}, "wanted one of skip, one, all"),
    ({"catch_up_limit": 0}, "at /catch_up_limit: found 0, wanted a whole number from 1 to 1000"),
    ({"missed_after": timedelta(0)}, "at /missed_after"),
    ({"expires_in": 0}, "at /expires_in"),
    ({"timeout": 5}, "at /timeout: is for a planner"),
    ({"every": None}, "wanted exactly one of cron, every and calendar"),
    ({"every": timedelta(milliseconds=1)}, "wanted a timedelta from 1 second"),
    ({"every": None, "cron": "0 0 30 2 *"}, "which never comes"),
    ({"every": None, "cron": "0 0 * * *", "timezone": "Mars/Base"}, "UNKNOWN_TIME_ZONE"),
    ({"starts_at": datetime(2030, 1, 1)}, "NAIVE_DATETIME"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_a_declaration_that_cannot_be_is_refused_and_declares_nothing(options: dict[str, Any], message: str) -> None:
    bus = CommandBus("postgresql:///nowhere")
    with pytest.raises(InvalidCommandError) as refused:
        scheduled(bus, **{"command": BatchCommand("Debit"), **options})
    assert message in str(refused.value)
    assert (bus.declared_schedules, bus.handlers.domains) == ({}, [])


async def test_an_application_whose_schedule_has_ended_starts_as_before(
    bus: CommandBus, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """Its process starts again months later, and declares what it has always declared"""
    ends_at = datetime(2020, 12, 31, tzinfo=UTC)
    scheduled(bus, "campaign", cron="0 9 * * *", every=None, starts_at=None, ends_at=ends_at)
    scheduled(bus)
    assert sorted(await bus.schedules.sync()) == ["billing", "campaign"]
    assert "'campaign' has ended: nothing is due after 2020-12-31" in caplog.text
    campaign = await bus.schedules.get("campaign")
    assert campaign is not None
    assert (campaign.next_due_at, campaign.next_times, campaign.overdue) == (None, (), False)
    await Worker(bus, domains=[DOMAIN]).drain()
    assert keys(database) == []
    for start, end in ((ends_at, ends_at - timedelta(days=1)), (None, datetime(1969, 1, 1, tzinfo=UTC))):
        with pytest.raises(InvalidCommandError, match="never due again"):
            scheduled(bus, "never", starts_at=start, ends_at=end)


def test_two_schedules_of_one_name_are_refused() -> None:
    bus = CommandBus("postgresql:///nowhere")
    first = scheduled(bus)
    with pytest.raises(InvalidOperationError, match="'billing' was declared before"):
        scheduled(bus)
    assert bus.declared_schedules == {"billing": first}
    for name in ("", "a b", "x" * 201, None, "ä"):
        with pytest.raises(InvalidCommandError, match="INVALID_NAME at /name"):
            scheduled(bus, name)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="schedule\\(\\) has no option 'crom'"):
        bus.schedule("other", crom="* * * * *")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"A planner is called with two arguments, e\.g\. `async def plan"):
        scheduled(bus, "planned", planner=lambda due: [])
    with pytest.raises(ValueError, match=r"planner of 'planned' is an `async def` with a `yield`"):
        scheduled(bus, "planned", planner=generator)
    for wrong, said in (
        ({"on_complete": print}, "/on_complete: found .*, wanted a BatchCommand, which any worker can run"),
        ({"on_complete": BatchCommand("Tell", data=[])}, "/on_complete/data: wanted a dict or a model"),
        ({"on_complete": BatchCommand("Tell", uuid4())}, "/on_complete/command_id: found command_id, but each due"),
    ):
        with pytest.raises(InvalidCommandError, match=said):
            scheduled(bus, "planned", planner=lambda due, ctx: [], **wrong)
    with pytest.raises(InvalidCommandError, match="/on_complete: is for the batch of a planner; a command has none"):
        scheduled(bus, "planned", on_complete=BatchCommand("Tell"))
    assert "planned" not in bus.declared_schedules


async def generator(due: DueTime, ctx: HandlerContext) -> AsyncIterator[BatchCommand]:
    yield BatchCommand("Debit")


async def test_data_that_its_handler_would_refuse_is_refused_where_it_is_declared_or_planned(
    bus: CommandBus, given: Given, database: Database
) -> None:
    @bus.handler(DOMAIN, "Debit")
    async def debit(data: int, ctx: HandlerContext) -> None: ...

    with pytest.raises(InvalidCommandError, match="INVALID_DATA at /command/data"):
        scheduled(bus, command=BatchCommand("Debit", data="one"))

    async def plan(due: DueTime, ctx: HandlerContext) -> list[BatchCommand]:
        return [BatchCommand("Debit", data="one")]

    scheduled(bus, planner=plan)
    await due(bus, database)
    await given.drained()
    [parked] = await bus.troubleshooting.list(DOMAIN)
    assert (parked.last_error_code, database.count("batch")) == ("INVALID_DATA", 0)


def test_a_handler_cannot_take_the_place_of_a_planner() -> None:
    with pytest.raises(InvalidCommandError, match="which busload uses itself"):
        CommandBus("postgresql:///nowhere").handler(DOMAIN, "busload.Schedule.billing")
