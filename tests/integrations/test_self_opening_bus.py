"""A bus that opens itself in each process, and a worker in a thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest

from busload import BatchCommand, Command, Settings, SyncHandlerContext, Worker
from busload.integrations.self_opening_bus import SelfOpeningBus
from busload.integrations.worker_thread import WorkerThread
from tests.given import DOMAIN, Database, until


@pytest.fixture
def bus(dsn: str, settings: Settings) -> Iterator[SelfOpeningBus]:
    bus = SelfOpeningBus(dsn, settings=settings)
    yield bus
    bus.close()


def test_a_bus_opens_itself_for_whatever_is_asked_first(bus: SelfOpeningBus, database: Database) -> None:
    """Calls reach the database by different ways: each is the first of a bus that is closed."""
    events = bus.buffer("events")
    assert not bus.database.is_open
    first: Callable[[], object]
    for first in (
        lambda: bus.send(DOMAIN, "Debit", {}),
        lambda: bus.create_batch(DOMAIN, [BatchCommand("Debit")]),
        lambda: bus.list_commands(DOMAIN),
        lambda: bus.troubleshooting.list(DOMAIN),
        lambda: bus.health(),
        lambda: bus.migrate(),
        lambda: bus.dsn,
        lambda: events.add({"id": 1}),
    ):
        before = bus.database.is_open
        first()
        assert (before, bus.database.is_open) == (False, True)
        bus.close()
    assert database.value("SELECT count(*) FROM busload.command") == 2


def test_threads_that_come_first_at_once_open_it_once(bus: SelfOpeningBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second comes while the first has found the database, and has not opened all else yet."""
    half_open, go_on, failures = threading.Event(), threading.Event(), list[BaseException]()
    open_database = bus.database.open

    def stop_half_way(*, wait: float | None = 0.0) -> None:
        open_database(wait=wait)
        half_open.set()
        go_on.wait()

    def send() -> None:
        try:
            bus.send(DOMAIN, "Debit", {})
        except BaseException as error:
            failures.append(error)

    monkeypatch.setattr(bus.database, "open", stop_half_way)
    first, second = threading.Thread(target=send), threading.Thread(target=send)
    first.start()
    half_open.wait()
    second.start()
    second.join(0.1)
    waited = second.is_alive()
    go_on.set()
    first.join()
    second.join()
    assert waited
    assert failures == []
    assert len(bus.list_commands(DOMAIN)) == 2


def in_child(work: object) -> int:
    """Fork, work, and return the exit code: 0 if nothing was raised."""
    assert callable(work)
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_bus_that_was_used_before_a_fork_is_usable_on_both_sides(bus: SelfOpeningBus, database: Database) -> None:
    events = bus.buffer("events")  # holds the database of the bus, as parts of it do
    bus.send(DOMAIN, "Debit", {})

    def work() -> None:
        bus.send(DOMAIN, "Debit", {})
        events.add({"id": 1})
        assert len(bus.list_commands(DOMAIN)) == 2
        bus.close()

    assert in_child(work) == 0
    bus.send(DOMAIN, "Debit", {})
    assert database.value("SELECT count(*) FROM busload.command WHERE domain = %s", DOMAIN) == 3
    assert bus.health().state


def test_a_worker_in_a_thread_runs_commands_and_stops_with_its_process(bus: SelfOpeningBus, database: Database) -> None:
    @bus.handler(DOMAIN, "Debit")
    def debit(command: Command, ctx: SyncHandlerContext) -> None: ...

    thread = WorkerThread(Worker(bus))
    thread.start_once()
    thread.start_once()
    sent = bus.send(DOMAIN, "Debit", {})
    bus.wait_command(DOMAIN, sent.command_id, timeout=60)
    thread.stop()
    assert database.value("SELECT array_agg(stopped_at IS NOT NULL) FROM busload.worker") == [True]


def test_a_worker_that_cannot_start_says_so_in_the_log(bus: SelfOpeningBus, caplog: pytest.LogCaptureFixture) -> None:
    thread = WorkerThread(Worker(bus))
    thread.start_once()
    until(lambda: "no domains" in caplog.text)
    thread.stop()
