"""Threads publish by an event loop in a thread of its own, which ends with the bus."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator

import pytest

from busload import Settings
from busload.commands.load import Load
from busload.dispatch.outbox import Unpublished
from busload.dispatch.publish_in_threads import LoopThread, ThreadPublisher
from busload.errors import InvalidOperationError
from busload.sync.database import Database
from tests.brokers.faulty import FaultyTransport
from tests.given import DOMAIN

THREAD = "busload-publish"


@pytest.fixture
def threads() -> Callable[[], list[str]]:
    """Names of the threads that were started in the test and still run."""
    before = set(threading.enumerate())
    return lambda: [thread.name for thread in threading.enumerate() if thread not in before]


@pytest.fixture
def transport(dsn: str) -> FaultyTransport:
    return FaultyTransport(dsn)


@pytest.fixture
def publisher(dsn: str, settings: Settings, transport: FaultyTransport) -> Iterator[ThreadPublisher]:
    database = Database(dsn, settings)
    database.open()
    publisher = ThreadPublisher(transport, database.in_transaction, prefix="busload", envelope_size=100)
    yield publisher
    publisher.close()
    database.close()


def some(number: int = 1) -> Unpublished:
    return Unpublished(Load.of(number, 10), DOMAIN, None, 0)


def test_the_thread_starts_with_the_first_call_and_ends_when_it_is_closed(
    publisher: ThreadPublisher, transport: FaultyTransport, threads: Callable[[], list[str]]
) -> None:
    assert not threads()
    [piece] = publisher.publish([some()])
    assert piece.reason is None
    assert THREAD in threads()
    publisher.close()
    assert not threads()
    [piece] = publisher.publish([some()])
    assert (piece.reason, len(transport.confirmed)) == (None, 2)


def test_many_threads_share_one_loop(
    publisher: ThreadPublisher, transport: FaultyTransport, threads: Callable[[], list[str]]
) -> None:
    loads = [some(number) for number in range(1, 9)]
    callers = [threading.Thread(target=publisher.publish, args=[[load]]) for load in loads]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert threads().count(THREAD) == 1
    assert len(transport.confirmed) == 8


def test_a_broker_that_is_away_is_told_as_refused(publisher: ThreadPublisher, transport: FaultyTransport) -> None:
    transport.pull()
    [piece] = publisher.publish([some()])
    assert piece.reason == "UNREACHABLE"
    assert publisher.of_loop.left_alone == []


def test_the_loop_refuses_a_process_that_was_forked_off(threads: Callable[[], list[str]]) -> None:
    loop = LoopThread()
    loop.run(asyncio.sleep(0))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover - runs in the child
        try:
            loop.run(asyncio.sleep(0))
        except InvalidOperationError:
            loop.close(lambda: asyncio.sleep(0))
            os.write(writing, b"refused")
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as answer:
        assert answer.read() == b"refused"
    loop.close(lambda: asyncio.sleep(0))
    assert not threads()


def test_work_whose_wait_is_interrupted_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = LoopThread()
    ended = threading.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    monkeypatch.setattr("concurrent.futures.Future.result", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        loop.run(work())
    monkeypatch.undo()
    assert ended.wait(10)
    loop.close(lambda: asyncio.sleep(0))


def _interrupt(*args: object) -> None:
    raise KeyboardInterrupt
