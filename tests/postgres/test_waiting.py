"""The two ways to wait have one shape, so that code written for one can be generated for the other."""

from __future__ import annotations

import asyncio
import threading

import pytest

from busload.postgres import waiting, waiting_in_threads

SHORT, LONG = 0.01, 60.0


def _discard(result: object) -> None:
    """For a function that must return nothing."""


def test_both_ways_to_wait_offer_the_same_names() -> None:
    modules = ("asyncio", "math", "threading", "time", "waiting")
    in_threads = {name for name in vars(waiting_in_threads) if name[0] not in "_@" and name not in modules}
    imported = {"Any", "Callable", "Generator", "Generic", "PGconn", "Self", "T", "TracebackType", "TransactionStatus"}
    imported |= {"TypeVar", "annotations"}
    assert set(waiting.__all__) == in_threads - imported


@pytest.mark.parametrize("name", ["Activity", "TimeLimit"])
def test_both_ways_to_wait_offer_the_same_methods(name: str) -> None:
    awaited, in_threads = (
        {each.replace("__a", "__") for each in dir(getattr(module, name))} for module in (waiting, waiting_in_threads)
    )
    assert awaited == in_threads


async def test_an_event_is_waited_for_no_longer_than_its_time_out() -> None:
    event, thread_event = waiting.Event(), waiting_in_threads.Event()
    assert not await event.wait(SHORT)
    assert not thread_event.wait(SHORT)
    event.set()
    thread_event.set()
    assert await event.wait(LONG)
    assert thread_event.wait(LONG)


async def test_an_activity_that_is_cancelled_ends_at_once() -> None:
    activity = waiting.Activity(lambda: waiting.sleep(LONG), "test")
    await activity.join(SHORT)
    assert not activity.is_cancelled
    await activity.cancel()
    await activity.join(LONG)
    assert activity.is_cancelled


def test_an_activity_in_a_thread_ends_when_it_is_told_to() -> None:
    told = threading.Event()
    activity = waiting_in_threads.Activity(lambda: _discard(told.wait(LONG)), "test")
    activity.join(SHORT)
    assert any(thread.name == "test" for thread in threading.enumerate())
    told.set()
    activity.join(LONG)
    assert not any(thread.name == "test" for thread in threading.enumerate())


async def test_an_activity_may_wait_for_its_own_end() -> None:
    """Else a callback could not close its own bus."""
    activities: list[waiting.Activity] = []

    async def close_itself() -> None:
        await asyncio.sleep(0)
        await activities[0].join(LONG)
        await activities[0].cancel()

    activities.append(waiting.Activity(close_itself, "test"))
    async with asyncio.timeout(LONG / 2):
        await activities[0].join(LONG)
    assert not activities[0].is_cancelled


async def test_a_time_limit_interrupts_a_task_and_is_seen_by_a_thread() -> None:
    with pytest.raises(TimeoutError):
        async with waiting.TimeLimit(SHORT):
            await asyncio.sleep(LONG)
    with waiting_in_threads.TimeLimit(0) as limit:
        assert limit.patience == 0.0
        with pytest.raises(TimeoutError):
            limit.check()


async def test_without_any_time_there_is_time_for_one_look() -> None:
    async with waiting.TimeLimit(0) as limit:
        await asyncio.sleep(SHORT)
        with pytest.raises(TimeoutError):
            limit.check()


async def test_without_a_limit_nothing_is_too_late() -> None:
    async with waiting.TimeLimit(None) as limit:
        limit.check()
    with waiting_in_threads.TimeLimit(None) as in_thread:
        in_thread.check()
        assert in_thread.patience is None


async def test_a_function_of_the_application_may_be_async_or_not() -> None:
    async def later() -> int:
        return 1

    assert await waiting.result_of(later()) == 1
    assert await waiting.result_of(2) == 2
    assert waiting_in_threads.result_of(3) == 3
