"""What a worker's log says about the worker itself: an outage once, a stop once, and nothing about ordinary work."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from busload import BatchCommand, Command, HandlerContext, SyncCommandBus, TaskTracker
from busload.bus import CommandBus
from busload.postgres import outage as outages
from busload.postgres.connection import Connection, has_unread_input
from busload.postgres.heartbeat_thread import NextBeat, beat
from busload.postgres.outage import Outage
from tests.given import Database, Given, closed_to_newcomers, eventually, until

AWAY = psycopg.OperationalError("connection refused")


@contextmanager
def away(dsn: str) -> Iterator[None]:
    """Nobody gets a connection to this database, and who had one loses it: as long as the block lasts."""
    name = conninfo_to_dict(dsn)["dbname"]
    with closed_to_newcomers(dsn) as admin:
        admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
        yield


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def test_an_outage_is_logged_once_for_all_parts_of_a_worker(
    given: Given, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    go = asyncio.Event()
    caplog.set_level(logging.DEBUG, "busload")

    def failures() -> Counter[str]:
        """How often each part has failed: `Outage` says so to whoever debugs."""
        return Counter(
            str(record.args[0])
            for record in caplog.records
            if record.msg == "%s failed: %r" and isinstance(record.args, tuple)
        )

    async def wait(command: Command, ctx: HandlerContext) -> None:
        await go.wait()

    seen = given.handler("Debit", wait)
    await given.sent()
    async with given.running() as worker:
        await eventually(lambda: seen)
        with away(dsn):
            go.set()  # its result cannot be settled
            await eventually(lambda: len(failures()) >= 3 and failures().total() >= 6)
        await eventually(lambda: "is back after" in caplog.text)
        await eventually(lambda: worker.stats.completed == 1)
    begin, end = warnings(caplog)
    assert begin.startswith("The database cannot be reached, trying until it is back: ")
    assert end.startswith("The database is back after ")


async def test_an_outage_that_lasts_is_logged_again_from_time_to_time(
    given: Given, dsn: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outages, "SAY_EVERY", 0.3)
    given.handler()
    async with given.running() as worker:
        await eventually(lambda: worker.stats.claims)
        with away(dsn):
            await eventually(lambda: caplog.text.count("The database has been away for") >= 2)
        await eventually(lambda: "is back after" in caplog.text)
    said = warnings(caplog)
    assert said[0].startswith("The database cannot be reached") and said[-1].startswith("The database is back")
    assert all(line.startswith("The database has been away for ") for line in said[1:-1])


async def test_a_tracker_logs_an_outage_once(bus: CommandBus, dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    async with TaskTracker(bus, name="cut off") as tracker:
        tracker._presence._every = 0.05
        queued = await tracker.enqueue("jobs:1", queue="jobs")
        assert queued is not None and queued.execution_id is not None
        taken = await tracker.claim("jobs:1", queued.execution_id)
        assert taken is not None
        with away(dsn):
            await eventually(lambda: "The database cannot be reached" in caplog.text)
        await eventually(lambda: "is back after" in caplog.text)
        await tracker.complete(taken)
    assert len(warnings(caplog)) == 2


def test_a_bus_that_is_closed_says_nothing_more(
    dsn: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that came a second later would be read as one about whatever runs then."""
    monkeypatch.setattr(outages, "QUIET", 600.0)  # it is about to speak for so long that the test sees it

    def about_to_speak() -> list[threading.Timer]:
        timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
        return [timer for timer in timers if timer.name == "busload-outage" and not timer.finished.is_set()]

    with SyncCommandBus(dsn) as bus:
        bus.create_batch("payments", [BatchCommand("Debit", uuid4(), {})], on_complete=lambda batch: None)
        with away(dsn):
            until(lambda: "The database cannot be reached" in caplog.text)
        until(about_to_speak)
    assert not about_to_speak()


def test_a_heartbeat_that_slept_through_an_outage_does_not_report_another_one(
    dsn: str, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """The others have said long before that the database is back."""
    pulse, beats = NextBeat(), list[Connection]()

    def end_its_connection() -> None:
        if beats:
            database.rows("SELECT pg_terminate_backend(%s)", beats[-1].info.backend_pid)
            until(lambda: has_unread_input(beats[-1]))

    def once(conn: Connection) -> None:
        conn.execute("SELECT")
        beats.append(conn)
        if len(beats) == 3:
            pulse.stop()

    beat(dsn, 0.01, pulse, once, Outage(), before=end_its_connection)
    assert len(set(beats)) == 3
    assert warnings(caplog) == []


async def test_an_ordinary_drain_at_full_speed_warns_of_nothing(given: Given, caplog: pytest.LogCaptureFixture) -> None:
    given.handler()
    await given.batch(commands=20_000)
    assert await given.drained(concurrency=100) == 20_000
    assert warnings(caplog) == []


async def test_a_worker_says_when_it_begins_to_stop_and_what_it_waits_for(
    given: Given, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "busload")
    go = asyncio.Event()

    async def wait(command: Command, ctx: HandlerContext) -> None:
        await go.wait()

    seen = given.handler("Debit", wait)
    await given.batch(commands=3)
    async with given.running() as worker:
        await eventually(lambda: len(seen) == 3)
        worker.stop()
        await eventually(lambda: "Stopping" in caplog.text)
        go.set()
    [said] = [line for line in caplog.messages if "Stopping" in line]
    assert said.startswith("Stopping: nothing more is claimed. 3 commands are in hand: what runs may take up to 5 s")


async def test_a_worker_that_stops_with_nothing_in_hand_says_just_that(
    given: Given, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "busload")
    given.handler()
    async with given.worker():
        pass
    [said] = [line for line in caplog.messages if "Stopping" in line]
    assert said == "Stopping: nothing more is claimed, and nothing is in hand"


def test_a_failure_for_another_reason_is_logged_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage()
    for _ in range(100):
        outage.failed("Claiming", ValueError("odd"))
        outage.failed("Sweeping", KeyError("other"))
    outage.worked("Claiming")
    outage.worked("Claiming")
    assert [line.partition(" after")[0] for line in warnings(caplog)] == [
        "Claiming failed, trying again: ValueError('odd')",
        "Sweeping failed, trying again: KeyError('other')",
        "Claiming works again",
    ]
    assert not outage.is_away


def test_a_success_between_two_failures_does_not_end_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    """Connections break one after the other: the last one must not make a second outage of it."""
    outage = Outage()
    outage.failed("Claiming", AWAY)
    for _ in range(10):
        outage.worked("Renewing leases", reached=True)
        outage.failed("Sweeping", AWAY)
    outage.worked("Claiming")  # it may have had nothing to ask the database
    outage.close()
    assert len(warnings(caplog)) == 1 and outage.is_away


def test_parts_may_report_from_any_thread(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "QUIET", 0.01)
    outage = Outage()

    def report() -> None:
        for _ in range(500):
            outage.failed("Renewing leases", AWAY)

    threads = [threading.Thread(target=report) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outage.worked("Renewing leases", reached=True)
    outage.close()
    assert [line[:27] for line in warnings(caplog)] == ["The database cannot be reac", "The database is back after "]
