"""A worker inside somebody else's program: it takes no signals away, works as long as a block, says what it left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from busload import Command, CommandBus, HandlerContext, SyncCommandBus, Worker
from busload.errors import InvalidOperationError
from tests.chaos.harness import SOURCES
from tests.given import DOMAIN, Database, Given, eventually, pending, until
from tests.worker.test_coming_back import Line, Long

HOST = """
import asyncio, contextlib, sys
import uvicorn
from starlette.applications import Starlette
from busload import CommandBus, Worker

bus = CommandBus(sys.argv[1])

@bus.handler("payments", "Debit")
async def debit(command, ctx):
    print("started", flush=True)
    await asyncio.sleep(0.3)

@contextlib.asynccontextmanager
async def beside(app):
    async with bus, Worker(bus):
        yield

@contextlib.asynccontextmanager
async def by_hand(app):
    async with bus:
        worker = Worker(bus)
        running = asyncio.create_task(worker.run())
        yield
        worker.stop()
        await running

lifespan = {"beside": beside, "by hand": by_hand}[sys.argv[2]]
uvicorn.run(Starlette(lifespan=lifespan), port=0, log_level="warning")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("shape", ["beside", "by hand"])
def test_the_first_signal_stops_a_web_server_with_a_worker_in_it(
    dsn: str, sync_bus: SyncCommandBus, database: Database, shape: str, number: int
) -> None:
    sync_bus.send(DOMAIN, "Debit")
    paths = os.pathsep.join([str(SOURCES), *(path for path in sys.path if path.endswith("site-packages"))])
    process = subprocess.Popen(
        [sys.executable, "-c", HOST, dsn, shape],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": paths, "PATH": os.defpath, "HOME": "/"},
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        process.send_signal(number)
        assert process.wait(timeout=30) in (0, -number)  # uvicorn raises it again when all is closed
    finally:
        process.kill()
        process.communicate()
    assert database.rows("SELECT outcome FROM busload.execution") == [("COMPLETED",)], "what ran has had its time"
    assert database.is_at_rest()


async def test_signals_are_left_alone_unless_they_are_asked_for(given: Given) -> None:
    given.handler()
    await given.sent()
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    async with given.worker():
        assert [signal.getsignal(number) for number in numbers] == before
    await given.drained()
    worker = given.worker()
    running = asyncio.create_task(worker.run(signals=True))
    await eventually(lambda: signal.getsignal(signal.SIGTERM) != before[0])
    signal.raise_signal(signal.SIGTERM)
    await running
    assert [signal.getsignal(number) for number in numbers] == before


async def test_signals_cannot_be_had_outside_the_main_thread(dsn: str) -> None:
    bus = CommandBus(dsn)
    bus.handler(DOMAIN, "Debit")(lambda command, ctx: None)

    def run() -> None:
        asyncio.run(Worker(bus).run(signals=True))

    with pytest.raises(InvalidOperationError, match="main thread only"):
        await asyncio.to_thread(run)


async def test_a_worker_works_as_long_as_its_block(given: Given, database: Database) -> None:
    gate = asyncio.Event()

    async def wait(command: Command, ctx: HandlerContext) -> str:
        await gate.wait()
        return "done"

    seen = given.handler("Debit", wait)
    async with given.worker() as worker:
        assert database.value("SELECT count(*) FROM busload.worker WHERE stopped_at IS NULL") == 1, "it has started"
        command_id = await given.sent()
        await eventually(lambda: seen)
        asyncio.get_running_loop().call_later(0.05, gate.set)
    assert (await given.command_now(command_id)).result == "done", "what runs has its grace time"
    assert database.value("SELECT count(*) FROM busload.worker WHERE stopped_at IS NULL") == 0
    async with worker:  # once more
        await given.sent()
        await eventually(lambda: len(seen) == 2)
    database.check_invariants()


async def test_the_error_of_a_block_passes_and_its_worker_has_stopped(given: Given, database: Database) -> None:
    given.handler()
    with pytest.raises(KeyError, match="mine"):
        async with given.worker():
            raise KeyError("mine")
    assert database.value("SELECT count(*) FROM busload.worker WHERE stopped_at IS NULL") == 0


async def test_a_worker_that_cannot_start_says_so_where_its_block_begins(bus: CommandBus) -> None:
    worker = Worker(bus, domains=[])
    for _ in range(2):
        with pytest.raises(InvalidOperationError, match="no domains"):
            async with worker:
                raise AssertionError("not reached")


async def test_a_block_that_is_cancelled_while_its_worker_starts_leaves_nothing_behind(
    given: Given, database: Database
) -> None:
    given.handler()
    worker = given.worker()

    async def enter() -> None:
        async with worker:
            await asyncio.Event().wait()

    for turns in (0, 1, 3, 10, 30):
        task = asyncio.create_task(enter())
        for _ in range(turns):
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert database.value("SELECT count(*) FROM busload.worker WHERE stopped_at IS NULL") == 0


async def test_a_worker_may_be_told_to_stop_at_any_moment_and_any_number_of_times(given: Given) -> None:
    seen = given.handler()
    worker = given.worker()
    for _ in range(3):
        worker.stop()  # before it has ever run
    await given.sent()
    async with asyncio.timeout(30):
        await worker.run()
    assert seen == [], "it was stopped before it began"
    for _ in range(3):
        worker.stop()  # after it has run: that concerns no other run
    running = asyncio.create_task(worker.run())
    await eventually(lambda: len(seen) == 1)
    for _ in range(3):
        threading.Thread(target=worker.stop).start()
        worker.stop()
    async with asyncio.timeout(30):
        await running
    running = asyncio.create_task(worker.run())
    await asyncio.sleep(0)
    worker.stop()  # while it starts
    async with asyncio.timeout(30):
        await running


async def test_to_stop_twice_is_not_to_hurry(given: Given, database: Database) -> None:
    gate = asyncio.Event()

    async def wait(command: Command, ctx: HandlerContext) -> None:
        await gate.wait()

    seen = given.handler("Debit", wait)
    await given.sent()
    async with given.running(settings=replace(given.settings, grace=timedelta(minutes=10))) as worker:
        await eventually(lambda: seen)
        for _ in range(3):
            worker.stop()
            await asyncio.sleep(0.01)
        gate.set()
    assert database.rows("SELECT outcome FROM busload.execution") == [("COMPLETED",)]


async def test_a_second_run_of_a_worker_that_runs_is_refused(given: Given) -> None:
    seen = given.handler()
    worker = given.worker()
    async with worker:
        for again in (worker.run, worker.drain, worker.__aenter__):
            with pytest.raises(InvalidOperationError, match="running already"):
                await again()
        await given.sent()
        await eventually(lambda: seen)  # the first one goes on
    assert await worker.drain() == 0


@pytest.mark.parametrize("kind", ["async", "def"])
async def test_a_run_that_leaves_handlers_behind_ends_and_names_their_commands(
    bus: CommandBus, given: Given, database: Database, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    started, gate, ended = threading.Event(), threading.Event(), threading.Event()

    async def swallow(command: Command, ctx: HandlerContext) -> None:
        started.set()
        while not gate.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
        ended.set()

    def stuck(command: Command, ctx: HandlerContext) -> None:
        started.set()
        gate.wait(60)
        ended.set()

    bus.handler(DOMAIN, "Debit")(swallow if kind == "async" else stuck)
    given.handler("Quick")
    command_id = await given.sent()
    short = replace(given.settings, grace=timedelta(0), flush_deadline=timedelta(seconds=2))  # for each of its steps
    try:
        async with given.worker(settings=short) as worker:
            await eventually(started.is_set)
            quick = await given.sent("Quick")
            await eventually(lambda: worker.stats.finished)
        assert worker.left_behind == [("Debit", command_id)]
        assert f"Left behind and handed back 1 command that did not end in time: Debit {command_id}" in (caplog.text)
        assert (await given.command_now(quick)).status == "COMPLETED"
        assert (await given.command_now(command_id)).status == "PENDING"
        assert database.count("lease") == 0
        assert not [thread for thread in threading.enumerate() if thread.name == "busload-renew"]
    finally:
        gate.set()
        await eventually(ended.is_set)
    assert database.count("lease") == 0, "nothing of it is settled late"


async def test_a_worker_stops_after_its_grace_time_also_while_the_database_is_away(
    given: Given, database: Database, dsn: str
) -> None:
    """No step of the stop waits for the database as if it were the only one: each might take 20 s here."""
    long = Long()
    async with Line(dsn) as line, CommandBus(line.url, settings=given.bus.settings) as bus:
        bus.handler(DOMAIN, "Debit")(long)
        settings = replace(
            given.settings,
            grace=timedelta(seconds=0.1),
            flush_deadline=timedelta(seconds=20),
            lease_for=timedelta(seconds=80),
        )
        worker = Worker(bus, settings=settings, domains=[DOMAIN], concurrency=1)
        running = asyncio.create_task(worker.run())
        await given.sent()
        await given.sent()
        await eventually(lambda: long.began == 1)
        await line.break_down()
        await eventually(lambda: worker._run is not None and worker._run._outage.is_away)
        worker.stop()
        async with asyncio.timeout(15):
            await running
    database.check_invariants()


# -- `busload worker` owns its process ---------------------------------------------------------------------------------

APP = """
import asyncio, time
from busload import CommandBus

bus = CommandBus()

@bus.handler("payments", "Swallow")
async def swallow(command, ctx):
    print("started", flush=True)
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass

@bus.handler("payments", "Thread")
def thread(command, ctx):
    print("started", flush=True)
    time.sleep(600)

@bus.handler("payments", "Block")
async def block(command, ctx):
    print("started", flush=True)
    time.sleep(600)

@bus.handler("payments", "Quick")
async def quick(command, ctx):
    pass
"""


def program(dsn: str, folder: Path, *options: str) -> subprocess.Popen[str]:
    (folder / "app.py").write_text(APP)
    paths = os.pathsep.join([str(SOURCES), *(path for path in sys.path if path.endswith("site-packages"))])
    return subprocess.Popen(
        [sys.executable, "-m", "busload.cli", "worker", "app:bus", "--lease", "2", *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": paths, "PATH": os.defpath, "HOME": str(folder), "BUSLOAD_DATABASE_URL": dsn},
    )


@pytest.mark.parametrize("kind", ["Swallow", "Thread", "Block"])
def test_after_the_grace_time_the_process_ends_whatever_its_handlers_do(
    dsn: str, sync_bus: SyncCommandBus, database: Database, tmp_path: Path, kind: str
) -> None:
    quick = sync_bus.send(DOMAIN, "Quick", priority=1).command_id
    command_id = sync_bus.send(DOMAIN, kind).command_id
    process = program(dsn, tmp_path, "--grace", "0.2", "--settle", "immediate")
    try:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 3, log
    assert ("its event loop is blocked" in log) == (kind == "Block"), log
    assert kind == "Block" or f"{kind} {command_id}" in log
    found = sync_bus.get_command(DOMAIN, command_id)
    assert found is not None and found.status == "PENDING"
    assert set(database.rows("SELECT attempt, crashes FROM busload.queue")) == {(1, 0)}, "no attempt was burnt"
    if kind != "Block":  # a blocked loop may not have come to settle it
        done = sync_bus.get_command(DOMAIN, quick)
        assert done is not None and done.status == "COMPLETED"
    assert database.count("lease") == 0
    assert database.rows("SELECT lost, stopped_at IS NOT NULL FROM busload.worker") == [(False, True)]
    database.check_invariants()


@pytest.mark.parametrize("kind", ["Swallow", "Block"])
def test_a_third_signal_ends_the_process_at_once(dsn: str, sync_bus: SyncCommandBus, tmp_path: Path, kind: str) -> None:
    sync_bus.send(DOMAIN, kind)
    process = program(dsn, tmp_path, "--grace", "3600")
    try:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        for number in (signal.SIGTERM, signal.SIGINT):
            process.send_signal(number)
            until(lambda: not pending(process.pid))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode in (-signal.SIGTERM, 3)
