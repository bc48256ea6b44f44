"""Workers that were cut off from the database and come back: nobody is blamed for an outage."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

from busload import CommandBus, HandlerContext, Worker
from busload.commands import claim, rescue
from busload.commands.command import Command
from busload.commands.execution import Leased
from busload.postgres.pool import engine_pool
from busload.sync.plan import perform
from busload.worker.held_leases import HeldLeases
from busload.worker.sweep import sweep
from tests.brokers.proxy import PostgresProxy
from tests.given import DOMAIN, END_LISTENERS, LISTENERS, LOCKED_OUT, Database, Given, eventually, until

LEASE = timedelta(seconds=3)
LOST = "SELECT count(*) FROM busload.event WHERE type = 'LEASE_LOST'"
CRASHES = (
    "SELECT max(crashes) FROM (SELECT crashes FROM busload.queue UNION ALL SELECT crashes FROM busload.lease) AS l"
)
RETIRING = LOCKED_OUT + " AND query LIKE 'UPDATE busload.worker SET stopped_at%'"
SILENT = "UPDATE busload.worker SET seen_at = now() - lease_for - interval '1 s' WHERE stopped_at IS NULL AND name = %s"


class Line(PostgresProxy):
    """The way to the database, which may be down."""

    down = False

    async def break_down(self) -> None:
        self.down = True
        await self.cut()

    def repair(self) -> None:
        self.down = False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.down:
            writer.close()
        else:
            await super()._serve(reader, writer)


class Long:
    """A handler that runs until it is let go."""

    def __init__(self) -> None:
        self.began, self.go = 0, asyncio.Event()

    async def __call__(self, command: Command, ctx: HandlerContext) -> None:
        self.began += 1
        await self.go.wait()


@asynccontextmanager
async def behind(line: Line, given: Given, name: str, handler: Any, domain: str = DOMAIN) -> AsyncIterator[Worker]:
    async with CommandBus(line.url, settings=given.bus.settings) as bus:
        bus.handler(domain, "Debit")(handler)
        cut_off = Given(bus, given.database, replace(given.settings, lease_for=LEASE))
        async with cut_off.running(name=name, domains=[domain]) as worker:
            await eventually(lambda: worker._run is not None and worker._run.started)  # it has begun
            try:
                yield worker
            finally:
                line.repair()


def in_touch(worker: Worker) -> bool:
    return worker._run is not None and worker._run._heartbeat.in_touch


async def test_after_an_outage_for_everybody_what_runs_goes_on_and_who_died_is_found(
    given: Given, database: Database, dsn: str
) -> None:
    """What they run goes on, and who died meanwhile is found all the same, a lease later."""
    long, quick = Long(), Long()
    quick.go.set()
    async with Line(dsn) as line, behind(line, given, "busy", long) as busy:
        await given.sent()
        await eventually(lambda: long.began == 1)
        async with behind(line, given, "idle", quick, "others") as idle:
            await line.break_down()
            dead = given.registered_worker()
            with psycopg.connect(dsn) as conn:  # unseen by a claim that was under way when the line broke
                await given.bus.send("others", "Debit", conn=conn)
                assert len(perform(conn, claim.claim(worker=dead, domains=["others"], limit=1)).leased) == 1
            given.died(dead)
            for worker in (busy, idle):
                database.rows(SILENT, worker.name)
            await eventually(lambda: not in_touch(busy) and not in_touch(idle))
            line.repair()
            seen = "SELECT count(*) FROM busload.worker WHERE seen_at > now() - interval '2 s' AND stopped_at IS NULL"
            await eventually(lambda: database.value(seen) == 2)
            await eventually(lambda: quick.began == 1)
            await eventually(lambda: in_touch(busy) or in_touch(idle))
        long.go.set()
        await eventually(lambda: database.count("lease") == 0)
    assert long.began == 1
    assert database.rows("SELECT DISTINCT outcome FROM busload.execution") == [("COMPLETED",)]
    database.check_invariants()


@pytest.mark.parametrize("in_touch", [True, False])
async def test_who_has_lost_touch_with_the_database_declares_nobody_dead(
    given: Given, database: Database, dsn: str, in_touch: bool
) -> None:
    await given.batch(2)
    silent, ended, judge = (given.registered_worker() for _ in range(3))
    assert len(given.claimed(by=silent)) == len(given.claimed(by=ended)) == 1
    given.died(silent)
    given.died(judge)  # its own heartbeat is late, too, but it lives: it asks
    database.perform(rescue.retire(worker=ended))
    async with engine_pool(dsn, 1) as pool:
        await sweep(pool, worker=judge, judge=in_touch)
    lost = "SELECT worker FROM busload.event WHERE type = 'LEASE_LOST' ORDER BY worker"
    assert database.rows(lost) == ([(silent,), (ended,)] if in_touch else [(ended,)])
    dead = database.rows("SELECT worker FROM busload.worker WHERE lost")
    assert dead == ([(silent,)] if in_touch else [])
    database.check_invariants()


async def test_a_worker_that_was_declared_dead_takes_up_again_what_nobody_has_taken_over(
    given: Given, database: Database, dsn: str
) -> None:
    long = Long()
    async with (
        Line(dsn) as line,
        Line(dsn) as other,
        behind(other, given, "judge", Long(), "others"),
        behind(line, given, "cut off", long) as worker,
    ):
        command_id = await given.sent()
        await eventually(lambda: long.began == 1)
        await line.break_down()
        database.rows(SILENT, worker.name)
        await eventually(lambda: database.value(LOST) == 1)
        line.repair()
        await eventually(lambda: database.count("lease") == 1)
        assert database.value(CRASHES) == 0
        long.go.set()
        await eventually(lambda: database.count("lease") == 0)
    assert long.began == 1
    assert (await given.command_now(command_id)).status == "COMPLETED"
    assert database.rows("SELECT details ->> 'resumed' FROM busload.event WHERE type = 'NOT_CRASHED'") == [("true",)]
    database.check_invariants()


def lost_and_back(given: Given, database: Database, leased: list[Leased], worker: int) -> tuple[int, frozenset[UUID]]:
    """A worker is silent for longer than its lease, is declared dead, and comes back."""
    given.died(worker)
    assert given.rescued().parked == 0
    plan = rescue.come_back(
        dead=[worker], leases=[leased[0].lease], name="w", domains=[DOMAIN], concurrency=1, lease_for=LEASE
    )
    back: tuple[int, frozenset[UUID]] = database.perform(plan)
    return back


@pytest.mark.parametrize("commands", [1, 8])
async def test_no_number_of_outages_parks_a_command_whose_worker_lives(
    given: Given, database: Database, commands: int
) -> None:
    batch_id = await given.batch(commands)
    worker = given.registered_worker()
    leased = given.claimed(commands, by=worker)
    for _ in range(5):
        worker, resumed = lost_and_back(given, database, leased, worker)
        assert resumed == {leased[0].lease.lease_id}
        assert database.value(CRASHES) == 0
        database.check_invariants()
    assert given.settled(leased) == {one.id for one in leased}
    assert (await given.batch_now(batch_id)).completed_count == commands
    database.check_invariants()


async def test_what_was_settled_or_given_back_before_stays_so(given: Given, database: Database) -> None:
    await given.batch(6)
    worker = given.registered_worker()
    leased = given.claimed(6, by=worker)
    given.settled(leased[2:3])
    database.perform(claim.give_back({leased[0].lease: [leased[3].id]}, pause=0, details=["{}"]))
    worker, resumed = lost_and_back(given, database, leased, worker)
    assert len(resumed) == 1
    database.check_invariants()
    rest = [one for one in leased if one not in leased[2:4]]
    assert given.settled(rest) == {one.id for one in rest}
    assert database.count("lease") == 0
    database.check_invariants()


async def test_a_worker_that_comes_back_only_clears_commands_that_another_has_begun(
    given: Given, database: Database
) -> None:
    """There is one winner: the lease of the worker that came back stays lost."""
    await given.batch(1)
    worker = given.registered_worker()
    leased = given.claimed(by=worker)
    for _ in range(4):
        given.died(worker)
        assert given.rescued().parked == 0
        heir = given.registered_worker()
        taken = given.claimed(by=heir)
        assert len(taken) == 1
        plan = rescue.come_back(
            dead=[worker], leases=[leased[0].lease], name="w", domains=[DOMAIN], concurrency=1, lease_for=LEASE
        )
        _, resumed = database.perform(plan)
        assert resumed == frozenset() and database.value(CRASHES) == 0
        assert given.settled(leased) == set()
        worker, leased = heir, taken
    assert given.settled(leased) == {leased[0].id}
    database.check_invariants()


async def test_a_command_that_kills_its_workers_is_still_parked(given: Given, database: Database) -> None:
    await given.batch(1)
    for parked in (0, 0, 1):
        worker = given.registered_worker()
        assert len(given.claimed(by=worker)) == 1
        given.died(worker)
        assert given.rescued().parked == parked
    database.check_invariants()


async def test_a_lease_of_which_others_have_begun_a_part_is_not_taken_up_again(
    given: Given, database: Database
) -> None:
    await given.batch(8)
    worker = given.registered_worker()
    leased = given.claimed(8, by=worker)
    given.died(worker)
    given.rescued()
    taken = given.claimed(4)
    assert len(taken) == 4
    plan = rescue.come_back(
        dead=[worker], leases=[leased[0].lease], name="w", domains=[DOMAIN], concurrency=1, lease_for=LEASE
    )
    _, resumed = database.perform(plan)
    assert resumed == frozenset() and database.value(CRASHES) == 0
    assert given.settled(leased) == set()
    assert len(given.settled(taken)) == 4 and len(given.settled(given.claimed(8))) == 4
    database.check_invariants()


class DeclaredDead:
    """A handler during whose first attempt its worker is declared dead. It ends before the worker has noticed."""

    def __init__(self, given: Given, *, transaction: bool, notices_first: bool) -> None:
        self._given, self._transaction, self._notices_first = given, transaction, notices_first
        self.crashes: list[int] = []

    async def __call__(self, command: Command, ctx: HandlerContext) -> None:
        if self._transaction:
            async with ctx.transaction():
                pass
        self.crashes.append(ctx._leased.lease.crashes)
        if len(self.crashes) == 1:
            self._given.database.bury()
            if self._notices_first:
                asyncio.get_running_loop().call_soon(self._block)

    def _block(self) -> None:
        """What the database has answered waits until the heartbeat, in its thread, has brought the worker back."""
        given_up = time.monotonic() + 30
        while not self._given.database.value(BACK) and time.monotonic() < given_up:
            time.sleep(0.01)


BACK = "SELECT count(*) FROM busload.event WHERE type = 'NOT_CRASHED'"


@pytest.mark.parametrize("notices_first", [False, True])
@pytest.mark.parametrize("transaction", [False, True])
async def test_a_command_whose_result_was_refused_runs_again_and_is_not_suspected(
    given: Given, database: Database, transaction: bool, notices_first: bool
) -> None:
    handler = DeclaredDead(given, transaction=transaction, notices_first=notices_first)
    given.bus.handler(DOMAIN, "Debit")(handler)
    settings = replace(given.settings, lease_for=timedelta(seconds=1.5), settle="immediate")
    async with given.running(settings=settings):
        command_id = await given.sent()
        await eventually(lambda: database.value("SELECT count(*) FROM busload.execution") == 1)
    assert handler.crashes in ([0], [0, 0])
    assert (await given.command_now(command_id)).status == "COMPLETED"
    assert database.value(BACK) == 1
    database.check_invariants()


async def test_a_lease_whose_result_is_refused_while_it_is_taken_up_again_is_handed_back(
    given: Given, database: Database, dsn: str
) -> None:
    """Else nobody would run its command before the next heartbeat."""
    go, runs = asyncio.Event(), []

    async def run(command: Command, ctx: HandlerContext) -> None:
        runs.append(ctx.execution_id)
        async with ctx.transaction():
            await go.wait()

    given.handler("Debit", run)
    with psycopg.connect(dsn) as holder:
        async with given.running(settings=replace(given.settings, lease_for=timedelta(hours=1))) as worker:
            command_id = await given.sent()
            await eventually(lambda: runs)
            # A worker that begins to listen asks for a heartbeat, and there is no other within the hour.
            await eventually(lambda: database.value("SELECT seen_at > started_at FROM busload.worker"))
            database.bury()
            # In a thread: a sweep of the worker may hold the table, and needs the event loop to end.
            await asyncio.to_thread(holder.execute, "LOCK TABLE busload.event IN SHARE MODE")
            database.rows(END_LISTENERS)  # then a worker asks at once how things are
            await eventually(lambda: database.rows(LOCKED_OUT))  # the worker that comes back
            go.set()
            await eventually(lambda: not worker.stats.in_hand)
            holder.commit()
            await eventually(lambda: len(runs) == 2)
    assert (await given.command_now(command_id)).status == "COMPLETED"
    assert len(set(runs)) == 2
    database.check_invariants()


async def test_a_worker_comes_back_though_its_first_try_is_not_committed(given: Given, database: Database) -> None:
    long = Long()
    given.bus.handler(DOMAIN, "Debit")(long)
    async with given.running(settings=replace(given.settings, lease_for=timedelta(seconds=1.5))):
        await given.sent()
        await eventually(lambda: long.began == 1)
        database.rows("CREATE SEQUENCE public.tries")
        try:
            database.rows(
                """CREATE FUNCTION public.stumble() RETURNS trigger LANGUAGE plpgsql AS $$
                   BEGIN
                       IF nextval('public.tries') = 1 THEN RAISE 'The server stumbles.'; END IF;
                       RETURN NULL;
                   END $$"""
            )
            await asyncio.to_thread(  # it waits for transactions of this worker, which need the event loop
                database.rows,
                "CREATE CONSTRAINT TRIGGER stumble AFTER INSERT ON busload.worker DEFERRABLE INITIALLY DEFERRED "
                "FOR EACH ROW EXECUTE FUNCTION public.stumble()",
            )
            database.bury()
            await eventually(lambda: database.value("SELECT last_value FROM public.tries") == 2)
            await eventually(lambda: database.value(BACK) == 1)
        finally:
            await asyncio.to_thread(database.rows, "DROP FUNCTION IF EXISTS public.stumble() CASCADE")
            database.rows("DROP SEQUENCE public.tries")
        assert database.rows("SELECT details ->> 'resumed' FROM busload.event WHERE type = 'NOT_CRASHED'") == [
            ("true",)
        ]
        long.go.set()
        await eventually(lambda: database.count("lease") == 0)
    assert long.began == 1
    database.check_invariants()


@pytest.mark.parametrize("answers_lost", [1, 2, 3])
@pytest.mark.parametrize("settled_between", [0, 1])
async def test_a_worker_that_missed_the_answer_to_its_return_returns_again(
    given: Given, database: Database, answers_lost: int, settled_between: int
) -> None:
    """It knows all the numbers that it had; each of them was declared dead with the same lease."""
    await given.batch(6)
    numbers = [given.registered_worker()]
    leased = given.claimed(6, by=numbers[0])
    [lease] = {one.lease.lease_id: one.lease for one in leased}.values()
    for back in range(answers_lost + 1):
        given.died(numbers[-1])
        assert given.rescued().parked == 0
        plan = rescue.come_back(
            dead=numbers, leases=[lease], name="w", domains=[DOMAIN], concurrency=6, lease_for=LEASE
        )
        worker, resumed = database.perform(plan)
        assert resumed == {lease.lease_id}
        assert database.value(CRASHES) == 0
        database.check_invariants()
        numbers.append(worker)
        if settled_between and back < answers_lost:
            assert given.settled([leased.pop()])
    assert given.claimed(6, by=given.registered_worker()) == []
    assert given.settled(leased) == {one.id for one in leased}
    assert (database.count("lease"), database.count("queue")) == (0, 0)
    assert database.value("SELECT count(*) FROM busload.execution") == 6
    database.check_invariants()


async def test_a_lease_that_nobody_has_taken_back_yet_goes_on(given: Given, database: Database, dsn: str) -> None:
    """Its batch was held by somebody while its worker was declared dead."""
    batch_id = await given.batch(2)
    worker = given.registered_worker()
    leased = given.claimed(2, by=worker)
    given.died(worker)
    with psycopg.connect(dsn) as holder:
        holder.execute("SELECT FROM busload.batch WHERE batch_id = %s FOR NO KEY UPDATE", [batch_id])
        assert database.perform(rescue.rescue(free_only=True)).commands == 0
    plan = rescue.come_back(
        dead=[worker], leases=[leased[0].lease], name="w", domains=[DOMAIN], concurrency=1, lease_for=LEASE
    )
    _, resumed = database.perform(plan)
    assert resumed == {leased[0].lease.lease_id}
    assert given.rescued().commands == 0
    assert given.settled(leased) == {one.id for one in leased}
    database.check_invariants()


async def test_what_was_claimed_meanwhile_is_not_lost_with_the_rest(given: Given) -> None:
    await given.batch(2)
    before, after = (given.claimed()[0].lease for _ in range(2))
    held = HeldLeases()
    held.take([before, after])
    held.lose({before.lease_id})
    assert (held.lease_ids, before.lost, after.lost) == ([after.lease_id], True, False)


def renewing() -> bool:
    """Whether a worker of this process sends heartbeats."""
    return any(thread.name == "busload-renew" for thread in threading.enumerate())


async def test_no_heartbeat_registers_a_worker_again_after_it_has_retired(
    given: Given, database: Database, dsn: str
) -> None:
    """A heartbeat that found the worker retired would take that for a death."""
    given.handler()
    with psycopg.connect(dsn) as conn:
        async with given.running() as worker:
            await eventually(lambda: database.value(LISTENERS) == 1)  # which asks for a heartbeat
            run = worker._run
            assert run is not None
            assert renewing()
            conn.execute("SELECT FROM busload.worker FOR UPDATE")
            worker.stop()
            await eventually(lambda: database.rows(RETIRING))
            # From here on the event loop stands still, and with it everything of the worker but its heartbeats.
            run._heartbeat.renew_soon()
            conn.commit()
            until(lambda: not renewing() or database.count("worker") == 2)
    assert database.rows("SELECT worker, stopped_at IS NOT NULL, lost FROM busload.worker") == [(1, True, False)]
