"""Faults of the way from a result to its row: nothing handed over is lost, counted twice, or left standing."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import permutations
from typing import Any
from uuid import UUID

import psycopg
import pytest

from busload import BatchCommand, Command, CommandBus, HandlerContext, SyncCommandBus, Worker
from busload.commands import settle
from busload.commands.execution import COMPLETED, FAILED_ATTEMPT, Leased, Transition
from busload.errors import InvalidOperationError
from busload.sync.plan import perform
from busload.testing import TestServer
from busload.worker import Coalescer
from busload.worker.settlement import fold
from tests.chaos.harness import Auditor, Brake, Proxy, Server, Workers, deadlocks, folder, seeded
from tests.given import DOMAIN, Database, Given, at_once, eventually, short_and_long, until

FLUSH_SIZE, CONCURRENCY = 20, 10
WINDOW = 5 * FLUSH_SIZE
"""What a settlement of such a worker holds at most."""


# -- killed between the handler's return and the flush ---------------------------------------------------------------


@short_and_long("kills, at_once", (4, 2), (1000, 10))
def test_results_that_were_handed_over_and_not_flushed_run_again_and_no_others(
    server: TestServer, kills: int, at_once: int
) -> None:
    """A kill -9 costs at most what the settlement may hold, and nothing is lost."""
    commands, most = 2 * WINDOW * at_once, 0
    with (
        server.database() as dsn,
        folder() as path,
        Database(dsn) as database,
        SyncCommandBus(dsn) as bus,
        Brake(dsn) as brake,
        Workers(dsn, path, concurrency=CONCURRENCY, flush_size=FLUSH_SIZE, pause=0.001) as workers,
        Auditor(dsn) as auditor,
    ):
        for _ in range(kills // at_once):
            workers.ledger.write_text("")
            brake.hold()
            batch_id = bus.create_batch(DOMAIN, [BatchCommand("Work") for _ in range(commands)])
            pids = workers.start(at_once)
            until(lambda: len(workers.noted("end")) == WINDOW * at_once)
            # Each is full with results and takes no more, although as many again are ready.
            assert database.value("SELECT sum(open) FROM busload.lease") == WINDOW * at_once
            for pid in pids:
                workers.kill(pid)
            brake.terminate()
            brake.release()
            database.rows("UPDATE busload.worker SET seen_at = '-infinity' WHERE stopped_at IS NULL")  # time passes
            workers.start()
            batch = bus.wait_batch(DOMAIN, batch_id, timeout=60)
            assert (batch.completed_count, batch.status) == (commands, "COMPLETED")
            assert workers.stop() == [0], workers.last_words()
            runs = workers.noted("end")
            assert len(runs) == commands, "no command was lost"
            most = max(most, sum(runs.values()) - commands)
            assert most <= WINDOW * at_once
        assert auditor.mismatches == []
        assert database.value("SELECT max(attempt) FROM busload.execution") == 1
        assert database.count("lease") == 0
        database.check_invariants()
    print(f"{kills} workers killed with a full settlement, 0 lost, at most {most // at_once} run again by each")


# -- the same batches, in any order ----------------------------------------------------------------------------------


@short_and_long("seconds", (0.5,), (60.0,))
async def test_flushes_over_the_same_batches_in_any_order_never_deadlock(
    given: Given, dsn: str, seconds: float
) -> None:
    """Eight flushers settle a command of each of twenty batches at a time, each flusher in its own order."""
    flushers, batches = 8, 20
    chance, database = seeded(), given.database
    numbers = [given.registered_worker() for _ in range(flushers)]
    flushes, spent = 0, 0.0
    with Auditor(dsn) as auditor:
        while spent < seconds:
            rounds = 40
            shares: list[list[list[Leased]]] = [[] for _ in numbers]
            for _ in range(batches):
                await given.batch(commands=rounds * flushers)
                for number, share in zip(numbers, shares, strict=True):
                    share.append(given.claimed(rounds, by=number))
            began = time.monotonic()
            at_once(dsn, [partial(flush, share, chance) for share in shares])
            spent += time.monotonic() - began
            flushes += rounds * flushers
        assert auditor.mismatches == []
    assert deadlocks(database) == 0
    assert database.value("SELECT count(*) FROM busload.execution") == flushes * batches
    assert database.rows("SELECT DISTINCT status FROM busload.batch") == [("COMPLETED",)]
    assert database.count("lease") == 0
    database.check_invariants()
    print(f"{flushes} flushes of 8 flushers over 20 batches each, {flushes / spent:.0f}/s: no deadlock, exact")


def flush(share: list[list[Leased]], chance: random.Random, conn: psycopg.Connection[Any]) -> None:
    for leased in zip(*share, strict=True):
        transitions = [Transition(one, COMPLETED) for one in chance.sample(leased, len(leased))]
        assert len(perform(conn, settle.settle(transitions, now=0.0, again=False))) == len(leased)


# -- a deadlock that somebody else makes -----------------------------------------------------------------------------


@short_and_long("times", (3,), (200,))
async def test_a_flush_that_falls_victim_to_a_deadlock_is_repeated_and_counts_once(
    given: Given, dsn: str, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A user's transaction holds the batch and wants the lease; the flush holds the lease and wants the batch."""
    database = given.database
    seen = given.handler()
    with Brake(dsn) as brake, psycopg.connect(dsn) as user, Auditor(dsn) as auditor:
        user.execute("SET deadlock_timeout = '10min'")  # so the flush is the one that notices, and the victim
        user.commit()
        async with given.running():
            for n in range(times):
                brake.hold()
                batch_id = await given.batch(commands=5)
                await eventually(brake.blocked)
                user.execute("SELECT FROM busload.batch WHERE batch_id = %s FOR UPDATE", [batch_id])
                wanting = asyncio.create_task(asyncio.to_thread(user.execute, "SELECT FROM busload.lease FOR UPDATE"))
                await eventually(lambda: waits(database, user.info.backend_pid))
                brake.release()
                await wanting
                assert deadlocks(database) <= n + 1
                user.commit()
                batch = await given.bus.wait_batch(DOMAIN, batch_id, timeout=30)
                assert (batch.completed_count, batch.status) == (5, "COMPLETED")
        await eventually(lambda: deadlocks(database) == times)  # statistics come a little later
        assert auditor.mismatches == []
    assert len(seen) == len({command.command_id for command in seen}) == 5 * times, "results were kept, not made again"
    assert database.value("SELECT max(attempt) FROM busload.execution") == 1
    database.check_invariants()
    assert "DeadlockDetected" in caplog.text and "items are kept, failed" in caplog.text
    print(f"{times} deadlocks forced by a user's transaction, the flush a victim each time: every result counted once")


def waits(database: Database, pid: int) -> bool:
    return bool(database.value("SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s", pid))


# -- handing over while it closes ------------------------------------------------------------------------------------


@short_and_long("races", (1000,), (10_000,))
async def test_a_result_handed_over_while_it_closes_is_flushed_or_refused_but_never_hangs(races: int) -> None:
    """Several producers hand over results while another task closes the coalescer."""
    chance = seeded()
    flushed = refused = 0
    for _ in range(races):
        written: list[int] = []

        async def write(items: Sequence[int], written: list[int] = written) -> None:
            if chance.random() < 0.5:
                await asyncio.sleep(0)
            written += items

        interval = timedelta(seconds=chance.choice([0, 0.001, 3600]))
        coalescer = Coalescer(write, max_size=chance.randint(1, 4), max_interval=interval, capacity=4)
        taken: list[int] = []
        denied: list[int] = []

        async def produce(
            first: int,
            coalescer: Coalescer[int] = coalescer,
            taken: list[int] = taken,
            denied: list[int] = denied,
        ) -> None:
            for item in range(first, first + 4):
                try:
                    await coalescer.put(item)
                    taken.append(item)
                except InvalidOperationError:
                    denied.append(item)
                if chance.random() < 0.3:
                    await asyncio.sleep(0)

        async def close(coalescer: Coalescer[int] = coalescer) -> None:
            for _ in range(chance.randrange(6)):
                await asyncio.sleep(0)
            assert await coalescer.close() == []

        async with asyncio.timeout(30):
            await asyncio.gather(*(produce(10 * n) for n in range(3)), close())
        assert sorted(written) == sorted(taken), "what was taken is flushed, once, and nothing else"
        assert len(taken) + len(denied) == 12, "and everything was answered"
        flushed, refused = flushed + len(taken), refused + len(denied)
    assert flushed > 100 and refused > 100
    print(f"{races} races with close, {flushed} results flushed, {refused} refused, 0 lost, 0 left waiting")


# -- the server goes while a flush is in it --------------------------------------------------------------------------


@short_and_long("times", (1,), (50,))
async def test_a_flush_that_the_server_crashes_under_is_sent_again_and_counts_once(
    given: Given, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The server crashes before the commit, again and again; the worker lives through all of the crashes."""
    with folder() as path, Server(path / "server") as server:
        async with CommandBus(server.dsn) as bus:
            runs: list[UUID] = []

            @bus.handler(DOMAIN, "Debit")
            async def debit(command: Command, ctx: HandlerContext) -> None:
                runs.append(command.command_id)

            worker = Worker(bus, settings=given.settings)
            running = asyncio.create_task(worker.run())
            with Auditor(server.dsn) as auditor:
                for _ in range(times):
                    await crash_mid_flush(server, bus)
            assert auditor.mismatches == []
            assert not running.done(), "the worker lives"
            worker.stop()
            await running
        with Database(server.dsn) as database:
            assert len(runs) == len(set(runs)) == 10 * times, "results are kept: no handler ran again"
            assert database.rows("SELECT DISTINCT completed_count, status FROM busload.batch") == [(10, "COMPLETED")]
            assert database.value("SELECT count(*) FROM busload.execution") == 10 * times
            assert database.count("lease") == 0
            database.check_invariants()
    assert "The database cannot be reached" in caplog.text
    print(f"{times} crashes of the server with a flush in it: every result kept and counted once, the worker lived")


async def crash_mid_flush(server: Server, bus: CommandBus) -> None:
    with Brake(server.dsn) as brake:
        brake.hold()
        batch_id = await bus.create_batch(DOMAIN, [BatchCommand("Debit") for _ in range(10)])
        await eventually(brake.blocked)
        with Database(server.dsn) as database:
            database.rows(
                "SELECT pg_logical_emit_message(true, 'test', '')"
            )  # its commit takes the claim to the disk with it
        await asyncio.to_thread(server.restart)
    await wait_complete(server.dsn, batch_id)


async def wait_complete(dsn: str, batch_id: UUID, within: float = 30) -> None:
    with Database(dsn) as database:
        complete = "SELECT completed_at IS NOT NULL FROM busload.batch WHERE batch_id = %s"
        await eventually(lambda: database.value(complete, batch_id), within)


@short_and_long("times", (4,), (500,))
async def test_a_flush_whose_answer_is_lost_is_sent_again_and_counts_once(given: Given, dsn: str, times: int) -> None:
    """The flush commits, and the worker never hears of it: on a lease that is still open, and on one that is closed."""
    database = given.database
    with folder() as path, Brake(dsn) as brake, Proxy(dsn, path) as proxy, Auditor(dsn) as auditor:
        async with CommandBus(proxy.dsn) as bus:
            gate = asyncio.Event()
            runs: list[UUID] = []

            @bus.handler(DOMAIN, "Debit")
            async def debit(command: Command, ctx: HandlerContext) -> None:
                runs.append(command.command_id)
                if command.data == "last":
                    await gate.wait()

            worker = Worker(bus, settings=given.settings)
            running = asyncio.create_task(worker.run())
            for n in range(times):
                gate.clear()
                brake.hold()
                data = [None] * 9 + (["last"] if n % 2 == 0 else [None])
                batch_id = await given.bus.create_batch(DOMAIN, [BatchCommand("Debit", data=one) for one in data])
                await eventually(brake.blocked)
                proxy.losing_answers = True
                brake.release()
                await eventually(lambda n=n: database.count("execution") >= 10 * n + 9)  # type: ignore[misc]
                proxy.cut()
                proxy.losing_answers = False
                gate.set()
                await wait_complete(dsn, batch_id)
            worker.stop()
            await running
        assert auditor.mismatches == []
    assert len(runs) == len(set(runs)) == 10 * times
    assert database.rows("SELECT DISTINCT completed_count, status FROM busload.batch") == [(10, "COMPLETED")]
    assert database.value("SELECT count(*) FROM busload.execution") == 10 * times
    assert database.count("lease") == 0
    database.check_invariants()
    print(f"{times} flushes committed without an answer: every result counted once, no handler ran again")


# -- errors that pass ------------------------------------------------------------------------------------------------

TRANSIENT = ["40001", "40P01", "57P01", "57P03", "53300", "08000", "08003", "08006", "terminated"]


def trip(database: Database, failure: str) -> None:
    """The database answers settlements with an error, as often as the sequence `trips` was set to."""
    act = "PERFORM pg_terminate_backend(pg_backend_pid())" if failure == "terminated" else error(failure)
    database.rows("CREATE SEQUENCE trips INCREMENT -1 MAXVALUE 1000 START 1")
    database.rows("CREATE SEQUENCE statements")
    database.rows(
        "CREATE FUNCTION trip() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" PERFORM nextval('public.statements'); IF nextval('public.trips') >= 0 THEN {act}; END IF;"
        " RETURN NULL; END $$"
    )
    database.rows("CREATE TRIGGER trip AFTER INSERT ON busload.execution EXECUTE FUNCTION trip()")


def error(sqlstate: str) -> str:
    return f"RAISE EXCEPTION 'made up' USING ERRCODE = '{sqlstate}'"


@pytest.mark.parametrize("failure", TRANSIENT)
@short_and_long("flushes, fails", (1, 2), (100, 1))
async def test_a_flush_that_fails_in_passing_is_repeated_and_nothing_dropped(
    given: Given, failure: str, flushes: int, fails: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Every flush fails some times and then goes through."""
    database = given.database
    seen = given.handler()
    trip(database, failure)
    with Auditor(given.bus.dsn) as auditor:
        async with given.running():
            for _ in range(flushes):
                database.rows("SELECT setval('trips', %s)", fails)
                batch_id = await given.batch(commands=10)
                await wait_complete(given.bus.dsn, batch_id)
        assert auditor.mismatches == []
    assert len(seen) == len({command.command_id for command in seen}) == 10 * flushes, "nothing ran again"
    assert database.value("SELECT last_value FROM statements") >= (fails + 1) * flushes
    assert database.value("SELECT count(*) FROM busload.execution") == 10 * flushes
    assert database.value("SELECT max(attempt) FROM busload.execution") == 1
    assert database.count("lease") == database.count("troubleshooting") == 0
    database.check_invariants()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 2 or flushes > 1, "its beginning and its end"
    print(f"{failure} in {flushes} flushes, each repeated: nothing dropped, nothing counted twice")


# -- one result that cannot be stored --------------------------------------------------------------------------------

UNSTORABLE = ["22P05", "22P02", "22003", "22021", "54000", "54001", "23514"]


async def poisoned(given: Given, sqlstate: str, *, commands: int) -> int:
    """One result among many in one flush; returns how many statements it took to find it."""
    database = given.database
    database.rows("CREATE SEQUENCE statements")
    database.rows(
        "CREATE FUNCTION count_statement() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN PERFORM nextval(''public.statements''); RETURN NULL; END'"
    )
    database.rows("CREATE TRIGGER beginning BEFORE INSERT ON busload.execution EXECUTE FUNCTION count_statement()")
    database.rows(f"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {error(sqlstate)}; END $$")
    database.rows(
        "CREATE TRIGGER refuse BEFORE INSERT ON busload.execution FOR EACH ROW"
        " WHEN (NEW.details::text = '\"poison\"') EXECUTE FUNCTION refuse()"
    )
    started, everybody = 0, asyncio.Event()
    poison = seeded().randrange(commands)

    async def together(command: Command, ctx: HandlerContext) -> str:
        nonlocal started
        started += 1
        if started == commands:
            everybody.set()
        await everybody.wait()
        return "poison" if command.data["n"] == poison else "fine"

    given.handler("Debit", together)
    batch_id = await given.batch(commands=commands)
    settings = replace(given.settings, flush_size=commands, flush_every=timedelta(seconds=5))
    with Auditor(given.bus.dsn) as auditor:
        assert await given.drained(settings=settings, concurrency=commands) == commands
    assert auditor.mismatches == []
    batch = await given.batch_now(batch_id)
    assert (batch.completed_count, batch.in_troubleshooting_count) == (commands - 1, 1)
    [item] = await given.bus.troubleshooting.list(DOMAIN)
    assert (item.reason, item.data) == ("RESULT_INVALID", {"n": poison})
    assert "made up" in (item.last_error_message or "") and "poison" not in (item.last_error_message or "")
    assert database.count("lease") == 0
    database.check_invariants()
    return int(database.value("SELECT last_value FROM statements"))


@pytest.mark.parametrize(
    ("sqlstate", "commands", "times"),
    [
        *((sqlstate, 500, 1) for sqlstate in UNSTORABLE),
        ("22P05", 5000, 1),
        *(pytest.param(sqlstate, 5000, 150, marks=pytest.mark.chaos) for sqlstate in UNSTORABLE),
    ],
)
async def test_one_result_that_cannot_be_stored_is_parked_alone(
    server: TestServer, given: Given, sqlstate: str, commands: int, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Halving finds the bad result, so the others wait for a few statements only."""
    most = 0
    for _ in range(times):
        with server.database() as dsn, Database(dsn) as database:
            async with CommandBus(dsn) as bus:
                most = max(most, await poisoned(Given(bus, database, given.settings), sqlstate, commands=commands))
    assert most <= 2 * math.ceil(math.log2(commands)) + 4
    assert "cannot be stored" in caplog.text and "are kept" not in caplog.text
    print(f"{times} times one unstorable result among {commands}, parked alone; at most {most} statements per flush")


# -- what a worker holds ahead, and for how long ---------------------------------------------------------------------


async def test_the_last_results_of_a_batch_do_not_wait_for_others_to_join_them(
    given: Given, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour between flushes, and work that goes on, do not keep a batch from completing."""
    gate = asyncio.Event()

    async def wait(command: Command, ctx: HandlerContext) -> None:
        await gate.wait()

    given.handler("Long", wait)
    given.handler()
    await given.batch(commands=3, command_type="Long")
    monkeypatch.setattr("busload.settings.LONGEST_FLUSH_EVERY", timedelta(hours=1))
    async with given.running(settings=replace(given.settings, flush_every=timedelta(hours=1))):
        for _ in range(3):
            batch_id = await given.batch(commands=7)
            await wait_complete(given.bus.dsn, batch_id, within=15)
        gate.set()
    database.check_invariants()


async def test_slow_handlers_hold_no_more_than_they_run(given: Given, database: Database) -> None:
    """Without a pace there is nothing to hold ahead of the slots, so others get the rest."""
    gate, started = asyncio.Event(), []

    async def wait(command: Command, ctx: HandlerContext) -> None:
        started.append(command.command_id)
        await gate.wait()

    given.handler("Debit", wait)
    await given.batch(commands=300)
    async with given.running(concurrency=4), given.running(concurrency=6):
        await eventually(lambda: len(started) == 10)
        assert database.value("SELECT sum(open) FROM busload.lease") == 10
        gate.set()
        await eventually(lambda: database.value("SELECT completed_at IS NOT NULL FROM busload.batch"))
    database.check_invariants()


async def test_what_stands_in_line_behind_stuck_handlers_is_handed_back_and_run_by_others(
    given: Given, database: Database
) -> None:
    """They were never started, so no attempt is burnt, and they do not wait for the stuck ones."""
    gate = asyncio.Event()

    async def debit(command: Command, ctx: HandlerContext) -> None:
        if command.data["n"] in (2000, 2001):
            await gate.wait()

    seen = given.handler("Debit", debit)
    await given.batch(commands=3000)
    with Auditor(given.bus.dsn) as auditor:
        async with given.running(concurrency=2):
            released = "SELECT sum(hi - lo + 1) FROM busload.event WHERE type = 'RELEASED'"
            await eventually(lambda: database.value(released), within=40)
            async with given.running(concurrency=2):
                await eventually(lambda: database.value("SELECT completed_count FROM busload.batch") == 2998)
                gate.set()
                await eventually(lambda: database.value("SELECT completed_at IS NOT NULL FROM busload.batch"))
    assert auditor.mismatches == []
    assert len(seen) == len({command.command_id for command in seen}) == 3000
    assert database.rows("SELECT DISTINCT attempt FROM busload.execution") == [(1,)]
    assert database.count("lease") == 0
    database.check_invariants()


@pytest.mark.parametrize(
    "outcomes", sorted(set(permutations([COMPLETED, FAILED_ATTEMPT, FAILED_ATTEMPT]))), ids=" ".join
)
async def test_the_completion_counts_among_several_results_for_one_execution(
    given: Given, database: Database, outcomes: tuple[str, ...]
) -> None:
    """Whatever their order."""
    await given.batch(commands=2)
    mine, other = given.claimed(limit=2)
    results = [Transition(mine, outcome, delay=0.0) for outcome in outcomes] + [Transition(other, COMPLETED)]
    credited = database.perform(settle.settle(fold(results), now=0.0))
    assert credited == {mine.id, other.id}
    assert database.rows("SELECT DISTINCT outcome FROM busload.execution") == [(COMPLETED,)]
    database.check_invariants()


async def test_a_late_result_is_not_credited_although_the_new_holder_has_settled_the_same_attempt(
    given: Given, database: Database
) -> None:
    """Attempt and outcome are the same, the lease is not."""
    await given.batch(commands=3)
    late = given.claimed(limit=3, by=(dead := given.registered_worker()))
    given.died(dead)
    assert given.rescued().commands == 3
    heir = given.registered_worker()
    for _ in range(2):  # halves of a load that was there when a worker died
        assert given.settled(taken := given.claimed(limit=3, by=heir)) == {one.id for one in taken}
    assert given.settled(late) == set()
    assert database.value("SELECT completed_count FROM busload.batch") == 3
    database.check_invariants()
