"""A worker from its start to its stop: what it claims, runs, settles and leaves behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from busload import (
    BatchCommand,
    Command,
    CommandBus,
    HandlerContext,
    RetryPolicy,
    SyncCommandBus,
    SyncHandlerContext,
    TransientCommandError,
    Worker,
    WorkerSettings,
)
from busload.commands.claim import Claim
from busload.commands.execution import Transition
from busload.errors import InvalidOperationError
from busload.worker.claimer import Claimer
from busload.worker.settlement import Settlement
from tests.given import DOMAIN, LISTENERS, LISTENING, Database, Given, eventually, raising

PATIENT = timedelta(hours=1)


async def test_drain_runs_everything_and_returns_how_many(given: Given, database: Database) -> None:
    seen = given.handler()
    batch_id = await given.batch(commands=1234)
    assert await given.drained(concurrency=50) == 1234
    assert len({command.command_id for command in seen}) == len(seen) == 1234
    assert (await given.batch_now(batch_id)).status == "COMPLETED"
    assert database.count("lease") == database.count("queue") == 0
    database.check_invariants()


async def test_drain_of_nothing_returns_at_once(given: Given, database: Database) -> None:
    given.handler()
    assert await given.drained() == 0
    assert database.rows("SELECT stopped_at IS NOT NULL, lost FROM busload.worker") == [(True, False)]


async def test_drain_also_runs_what_handlers_send(bus: CommandBus, given: Given) -> None:
    async def chain(command: Command, ctx: HandlerContext) -> None:
        if command.data["left"]:
            await ctx.send(DOMAIN, "Debit", {"left": command.data["left"] - 1})

    given.handler("Debit", chain)
    await bus.send(DOMAIN, "Debit", {"left": 5})
    assert await given.drained() == 6


async def test_drain_looks_again_after_a_settlement_that_its_look_may_not_have_seen(
    bus: CommandBus, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settlement that sends the callback commits after a claim has looked and before its answer is read."""
    given.handler()
    ran = given.handler("Done")
    claim, flush = Claimer._claim, Settlement._flush
    looked = asyncio.Event()

    async def claim_slowly(self: Claimer, domains: list[str], limit: int) -> Claim:
        taken = await claim(self, domains, limit)
        if not taken.leased:
            looked.set()
            await eventually(lambda: not self._settlement.stats.waiting)
        return taken

    async def flush_late(self: Settlement, transitions: Sequence[Transition]) -> None:
        await looked.wait()
        await flush(self, transitions)

    monkeypatch.setattr(Claimer, "_claim", claim_slowly)
    monkeypatch.setattr(Settlement, "_flush", flush_late)
    await bus.create_batch(DOMAIN, [BatchCommand("Debit")], on_complete=BatchCommand("Done"))
    assert await given.drained(settings=WorkerSettings(poll_every=timedelta(milliseconds=10))) == 2
    assert len(ran) == 1


async def test_drain_runs_retries_that_are_due_and_leaves_those_that_are_not(given: Given, database: Database) -> None:
    given.handler("Soon", raising(TransientCommandError("x")), retry=RetryPolicy(max_attempts=3, backoff=(0,)))
    given.handler("Later", raising(TransientCommandError("x")), retry=RetryPolicy(max_attempts=3, backoff=(60,)))
    await given.sent("Soon")
    await given.sent("Later")
    assert await given.drained() == 4
    assert database.value("SELECT reason FROM busload.troubleshooting") == "EXHAUSTED"
    assert database.count("scheduled") == 1


async def test_never_more_at_a_time_than_slots(given: Given) -> None:
    running = most = 0

    async def count(command: Command, ctx: HandlerContext) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1

    given.handler("Debit", count)
    await given.batch(commands=100)
    await given.drained(concurrency=7)
    assert most == 7


async def test_run_works_until_it_is_stopped(given: Given, database: Database) -> None:
    seen = given.handler()
    async with given.running():
        await given.batch(commands=5)
        await eventually(lambda: len(seen) == 5)
        await given.sent()
        await eventually(lambda: len(seen) == 6)
    assert database.count("lease") == 0
    assert database.value("SELECT count(*) FROM busload.execution WHERE outcome = 'COMPLETED'") == 6
    assert database.rows("SELECT stopped_at IS NOT NULL, lost FROM busload.worker") == [(True, False)]


async def test_stop_lets_what_runs_finish_and_hands_the_rest_back(given: Given, database: Database) -> None:
    gate, seen = asyncio.Event(), []

    async def wait(command: Command, ctx: HandlerContext) -> None:
        seen.append(command.command_id)
        await gate.wait()

    given.handler("Debit", wait)
    await given.batch(commands=10)
    async with given.running(concurrency=3) as worker:
        await eventually(lambda: len(seen) == 3)
        worker.stop()
        await asyncio.sleep(0)
        gate.set()
    assert len(seen) == 3
    assert database.value("SELECT count(*) FROM busload.execution") == 3
    assert database.count("lease") == 0
    assert database.rows("SELECT DISTINCT attempt, crashes FROM busload.queue") == [(1, 0)]
    database.check_invariants()


async def test_what_does_not_finish_within_the_grace_time_is_handed_back_without_burning_an_attempt(
    given: Given, database: Database
) -> None:
    started = asyncio.Event()

    async def hang(command: Command, ctx: HandlerContext) -> None:
        started.set()
        await asyncio.Event().wait()

    given.handler("Debit", hang)
    command_id = await given.sent()
    settings = replace(given.settings, grace=timedelta(milliseconds=50))
    async with asyncio.timeout(25):
        async with given.running(settings=settings):
            await started.wait()
    assert database.count("lease") == database.count("execution") == 0
    assert (await given.command_now(command_id)).status == "PENDING"
    assert (await given.command_now(command_id)).attempts == 0
    assert database.rows("SELECT attempt, crashes FROM busload.queue") == [(1, 0)]
    trail = [event.type for event in await given.bus.get_audit_trail(DOMAIN, command_id)]
    assert trail == ["SENT", "RECEIVED", "RELEASED"]


async def test_a_handler_that_swallows_its_cancellation_does_not_keep_the_worker_from_stopping(
    given: Given, database: Database
) -> None:
    started = asyncio.Event()

    async def stubborn(command: Command, ctx: HandlerContext) -> str:
        started.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "done all the same"

    given.handler("Debit", stubborn)
    await given.batch(commands=3)
    settings = replace(given.settings, grace=timedelta(milliseconds=50))
    async with asyncio.timeout(25):
        async with given.running(settings=settings, concurrency=2):
            await started.wait()
    assert database.count("lease") == 0
    database.check_invariants()


async def test_a_second_stop_does_not_wait_for_what_runs(given: Given, database: Database) -> None:
    started = asyncio.Event()

    async def hang(command: Command, ctx: HandlerContext) -> None:
        started.set()
        await asyncio.Event().wait()

    given.handler("Debit", hang)
    await given.sent()
    settings = replace(given.settings, grace=timedelta(hours=1))
    async with asyncio.timeout(25):
        async with given.running(settings=settings) as worker:
            await started.wait()
            worker.stop(hurry=True)
    assert database.count("lease") == 0 and database.count("queue") == 1


async def test_a_claim_under_way_when_the_worker_stops_is_not_left_behind(
    given: Given, database: Database, dsn: str
) -> None:
    given.handler()
    database.rows(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN PERFORM pg_advisory_xact_lock_shared(77); RETURN NULL; END'"
    )
    database.rows("CREATE TRIGGER slow AFTER INSERT ON busload.lease FOR EACH ROW EXECUTE FUNCTION slow()")
    with psycopg.connect(dsn, autocommit=True) as brake:
        brake.execute("SELECT pg_advisory_lock(77)")
        async with given.running() as worker:
            await given.sent()
            blocked = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND database IN" + (
                " (SELECT oid FROM pg_database WHERE datname = current_database())"
            )
            await eventually(lambda: database.value(blocked) == 1)
            worker.stop()
            await asyncio.sleep(0)
            brake.execute("SELECT pg_advisory_unlock(77)")
    assert database.count("lease") == 0
    assert database.rows("SELECT crashes FROM busload.queue") in ([], [(0,)])
    assert database.value("SELECT count(*) FROM busload.event WHERE type = 'LEASE_LOST'") == 0
    database.check_invariants()


async def test_a_worker_can_be_used_again(given: Given) -> None:
    given.handler()
    worker = given.worker()
    for _ in range(2):
        await given.sent()
        assert await worker.drain() == 1


async def test_without_domains_it_serves_those_that_have_handlers(bus: CommandBus, given: Given) -> None:
    seen = []

    async def handle(command: Command, ctx: HandlerContext) -> None:
        seen.append(command.domain)

    bus.handler("crm", "Push")(handle)
    bus.handler(DOMAIN, "Debit")(handle)
    await bus.send("crm", "Push")
    await bus.send(DOMAIN, "Debit")
    assert await Worker(bus, settings=given.settings).drain() == 2
    assert sorted(seen) == ["crm", DOMAIN]


async def test_without_any_handler_it_refuses_to_start(bus: CommandBus, database: Database) -> None:
    with pytest.raises(InvalidOperationError, match="no domains"):
        await Worker(bus).drain()
    assert database.count("worker") == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"concurrency": 0},
        {"concurrency": True},
        {"threads": 0},
    ],
)
async def test_options_that_cannot_work_are_refused(bus: CommandBus, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be a whole number from 1 on"):
        Worker(bus, domains=[DOMAIN], **wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lease_for": timedelta(0)},
        {"lease_for": timedelta(seconds=1), "flush_deadline": timedelta(seconds=5)},
        {"poll_every": timedelta(0)},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        WorkerSettings(**wrong)


async def test_a_notification_wakes_the_worker_however_seldom_it_polls(given: Given) -> None:
    seen = given.handler()
    settings = replace(given.settings, poll_every=PATIENT, sweep_every=PATIENT)
    async with given.running(settings=settings):
        await eventually(lambda: listening(given.database))
        for n in range(3):
            await given.sent()
            await eventually(lambda n=n: len(seen) == n + 1)  # type: ignore[misc]


def listening(database: Database) -> bool:
    return bool(database.value(LISTENERS))


async def test_a_poll_finds_commands_without_a_notification(given: Given, database: Database) -> None:
    """A notification is only a hint: here the rows are put in by hands that do not notify."""
    seen = given.handler()
    async with given.running(settings=replace(given.settings, poll_every=timedelta(milliseconds=20))):
        await eventually(lambda: listening(database))
        database.rows(
            "INSERT INTO busload.command (id, domain, command_id, command_type)"
            " VALUES (9999 * 1024, 'payments', gen_random_uuid(), 'Debit')"
        )
        database.rows("INSERT INTO busload.queue (lo, hi, domain) VALUES (9999 * 1024, 9999 * 1024, 'payments')")
        await eventually(lambda: len(seen) == 1)


async def test_a_lost_listener_is_replaced(given: Given, database: Database) -> None:
    seen = given.handler()
    settings = replace(given.settings, poll_every=PATIENT, sweep_every=PATIENT)
    async with given.running(settings=settings):
        await eventually(lambda: listening(database))
        assert database.rows(f"SELECT pg_terminate_backend(pid) FROM {LISTENING}") == [(True,)]
        await eventually(lambda: not listening(database))
        await given.sent()
        await eventually(lambda: len(seen) == 1)


async def test_what_becomes_due_is_run_without_waiting_for_a_poll(bus: CommandBus, given: Given) -> None:
    seen = given.handler()
    due = datetime.now(UTC) + timedelta(milliseconds=400)
    await bus.send(DOMAIN, "Debit", run_at=due)
    async with given.running(settings=replace(given.settings, poll_every=PATIENT)):
        await eventually(lambda: len(seen) == 1)
    assert datetime.now(UTC) >= due


async def test_an_unknown_type_waits_visibly_and_the_others_run(bus: CommandBus, given: Given) -> None:
    seen = given.handler()
    await bus.create_batch(DOMAIN, [BatchCommand("Debit"), BatchCommand("Strange"), BatchCommand("Debit")])
    assert await given.drained() == 2
    assert len(seen) == 2
    [waiting] = [c for c in given.database.rows("SELECT status, scheduled_reason FROM busload.command_status") if c[1]]
    assert waiting == ("SCHEDULED", "NO_HANDLER")
    assert given.database.count("lease") == 0
    given.database.check_invariants()


async def test_a_worker_that_knows_the_type_gets_it_later(bus: CommandBus, given: Given, database: Database) -> None:
    given.handler()
    await given.sent("Strange")
    await given.drained()
    seen = given.handler("Strange")
    given.make_due()
    assert await given.drained() == 1
    assert len(seen) == 1
    database.check_invariants()


async def test_a_give_back_that_fails_does_not_keep_the_other_commands_for_ever(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """What was claimed runs or goes back, although the statement after the claim failed."""
    seen = given.handler()
    database.rows("CREATE SEQUENCE tries")
    database.rows(
        "CREATE FUNCTION fail_once() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN IF nextval(''public.tries'') = 1 THEN RAISE ''out of order''; END IF; RETURN NULL; END'"
    )
    database.rows(
        "CREATE TRIGGER fail_once AFTER INSERT ON busload.scheduled FOR EACH ROW EXECUTE FUNCTION fail_once()"
    )
    await bus.create_batch(DOMAIN, [BatchCommand("Debit"), BatchCommand("Strange"), BatchCommand("Debit")])
    settings = replace(given.settings, lease_for=timedelta(milliseconds=600))
    async with given.running(settings=settings):
        await eventually(lambda: len(seen) >= 2 and database.count("scheduled") == 1 and not database.count("lease"))
    database.check_invariants()


async def test_handlers_written_with_def_run_side_by_side_in_threads(bus: CommandBus, given: Given) -> None:
    barrier = threading.Barrier(3, timeout=60)
    names = []

    def together(command: Command, ctx: SyncHandlerContext) -> int:
        names.append(threading.current_thread().name)
        return barrier.wait()

    bus.handler(DOMAIN, "Debit")(together)
    await given.batch(commands=3)
    assert await given.drained(concurrency=3) == 3
    assert all(name.startswith("busload-handler") for name in names)
    results = sorted(value for (value,) in given.database.rows("SELECT details FROM busload.execution"))
    assert results == [0, 1, 2]


async def test_a_sync_bus_can_have_a_worker_too(dsn: str, given: Given, database: Database) -> None:
    seen = []
    with SyncCommandBus(dsn) as bus:

        @bus.handler(DOMAIN, "Debit")
        def debit(command: Command, ctx: SyncHandlerContext) -> None:
            seen.append(ctx.attempt)
            ctx.send("crm", "Push")

        bus.send(DOMAIN, "Debit")
        assert await Worker(bus, settings=given.settings).drain() == 1
    assert seen == [1]
    assert database.value("SELECT count(*) FROM busload.command WHERE domain = 'crm'") == 1


async def test_two_workers_share_the_work_and_run_nothing_twice(given: Given, database: Database) -> None:
    """Nobody ends anything before all three have begun something"""
    begun = "SELECT count(DISTINCT worker) FROM busload.lease"
    all_begun = asyncio.Event()

    async def breathe(command: Command, ctx: HandlerContext) -> None:
        if not all_begun.is_set():
            await eventually(lambda: all_begun.is_set() or database.value(begun) == 3)
            all_begun.set()
        await asyncio.sleep(0.001)

    seen = given.handler("Debit", breathe)
    await given.batch(commands=600)
    done = await asyncio.gather(*(given.drained(concurrency=5) for _ in range(3)))
    assert sum(done) == 600 == len({command.command_id for command in seen}) == len(seen)
    assert all(done)
    database.check_invariants()


async def test_a_canceled_batch_asks_its_running_commands_to_stop(bus: CommandBus, given: Given) -> None:
    started = asyncio.Event()

    async def polite(command: Command, ctx: HandlerContext) -> None:
        started.set()
        await eventually(lambda: ctx.cancelled)
        raise TransientCommandError("stopped half way")

    given.handler("Debit", polite)
    batch_id = await given.batch(commands=1)
    async with given.running():
        await started.wait()
        await bus.cancel_batch(DOMAIN, batch_id, reason="enough")
        batch = await bus.wait_batch(DOMAIN, batch_id, timeout=25)
    assert (batch.canceled_count, batch.status) == (1, "COMPLETED_WITH_FAILURES")


async def test_nothing_is_left_behind_by_a_worker_that_stopped(given: Given, database: Database) -> None:
    given.handler()
    tasks, threads = len(asyncio.all_tasks()), threading.active_count()
    await given.batch(commands=20)
    await given.drained()
    async with given.running():
        pass
    await eventually(lambda: len(asyncio.all_tasks()) <= tasks + 4)  # the pool of the bus keeps some
    await eventually(lambda: threading.active_count() <= threads + 1)
    idle = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'"
    assert database.value(idle) == 0
    locks = "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database AND datname = current_database()"
    assert database.value(locks + " WHERE locktype = 'advisory'") == 0


async def test_a_stop_that_is_cancelled_leaves_nothing_running(given: Given, database: Database) -> None:
    """As `asyncio.wait_for(running, 1)` does it to a stop that takes longer; the leases must be free to end."""
    started = asyncio.Event()

    async def hang(command: Command, ctx: HandlerContext) -> None:
        started.set()
        await asyncio.Event().wait()

    given.bus.handler(DOMAIN, "Debit")(hang)
    await given.batch(commands=5)
    before = asyncio.all_tasks()
    worker = Worker(given.bus, settings=WorkerSettings(grace=PATIENT))
    running = asyncio.create_task(worker.run())
    async with asyncio.timeout(30):
        await started.wait()
        worker.stop()
        await eventually(lambda: worker.stats.in_line == 0)
        for _ in range(2):
            running.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await running
        await eventually(lambda: not [task for task in asyncio.all_tasks() - before if task is not running])
    assert "busload-renew" not in {thread.name for thread in threading.enumerate() if thread.is_alive()}
    assert database.count("execution") == 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"flush_deadline": timedelta(seconds=-1)}, "flush_deadline must be more than zero"),
        ({"flush_deadline": timedelta(0)}, "flush_deadline must be more than zero"),
        ({"flush_size": 0}, "flush_size must be a whole number from 1 on, found 0"),
        ({"flush_size": 2.5}, "flush_size must be a whole number"),
        ({"flush_every": timedelta(seconds=5.001)}, "flush_every must be at most 5 seconds, found 0:00:05.001"),
        ({"flush_every": timedelta(hours=1)}, "flush_every must be at most 5 seconds.*raise flush_size"),
        ({"flush_every": timedelta(seconds=-1)}, "flush_every must be"),
        ({"grace": timedelta(seconds=-1)}, "grace must be at least zero"),
        ({"no_handler_pause": timedelta(seconds=-1)}, "no_handler_pause must be at least zero"),
        ({"prefetch": 0.05}, "prefetch must be a timedelta, found 0.05"),
        ({"lease_for": 30}, r"lease_for must be a timedelta, found 30; pass timedelta\(seconds=30\)\.$"),
        ({"lease_for": 2.5}, r"found 2.5; pass timedelta\(seconds=2.5\)"),
        ({"lease_for": True}, r"lease_for must be a timedelta, found True\.$"),
        ({"lease_for": timedelta(milliseconds=1)}, r"a quarter of the lease \(0:00:00.001000\).* longer lease_for"),
        ({"lease_for": "x" * 999}, "lease_for must be a timedelta, found 'x{79}\\.$"),
    ],
)
async def test_a_wrong_setting_is_named(bus: CommandBus, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Worker(bus, settings=WorkerSettings(**wrong))
