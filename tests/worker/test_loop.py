"""What a worker repeats: rounds, pauses, wake-ups and the end."""

from __future__ import annotations

import asyncio

import pytest

from busload.worker.loop import Loop
from tests.given import eventually


class Rounds:
    def __init__(self, *answers: float | Exception | None) -> None:
        self.answers, self.done = list(answers), 0

    async def __call__(self) -> float | None:
        self.done += 1
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_a_round_without_a_pause_follows_at_once_and_none_waits_for_a_wake_up() -> None:
    rounds = Rounds(0, 0, None)
    loop = Loop("Testing", rounds)
    task = asyncio.create_task(loop.run())
    await eventually(lambda: rounds.done == 3)
    for _ in range(20):
        await asyncio.sleep(0)
    assert rounds.done == 3
    loop.wake()
    await eventually(lambda: rounds.done == 4)
    loop.stop()
    await task


async def test_a_pause_ends_by_itself() -> None:
    rounds = Rounds(0.01, 0.01)
    loop = Loop("Testing", rounds)
    task = asyncio.create_task(loop.run())
    await eventually(lambda: rounds.done == 3)
    loop.stop()
    await task


async def test_a_wake_up_cuts_the_pause_short() -> None:
    rounds = Rounds(3600)
    loop = Loop("Testing", rounds)
    task = asyncio.create_task(loop.run())
    await eventually(lambda: rounds.done == 1)
    loop.wake()
    await eventually(lambda: rounds.done == 2)
    loop.stop()
    await task


async def test_a_wake_up_during_a_round_is_not_forgotten() -> None:
    class Waking(Rounds):
        async def __call__(self) -> float | None:
            if self.done == 0:
                loop.wake()
            return await super().__call__()

    rounds = Waking(3600, None)
    loop = Loop("Testing", rounds)
    task = asyncio.create_task(loop.run())
    await eventually(lambda: rounds.done == 2)
    loop.stop()
    await task


async def test_a_round_that_fails_is_repeated(caplog: pytest.LogCaptureFixture) -> None:
    rounds = Rounds(ConnectionError("gone"), ConnectionError("still gone"), None)
    loop = Loop("Testing", rounds)
    task = asyncio.create_task(loop.run())
    await eventually(lambda: rounds.done == 3)
    loop.stop()
    await task
    assert [line.partition(" after")[0] for line in caplog.messages] == [
        "Testing failed, trying again: ConnectionError('gone')",
        "Testing works again",
    ]


async def test_a_loop_that_fails_again_and_again_does_not_spin() -> None:
    rounds = Rounds(*(ConnectionError("gone") for _ in range(1000)))
    loop = Loop("Testing", rounds)
    task = asyncio.create_task(loop.run())
    began = asyncio.get_running_loop().time()
    await eventually(lambda: asyncio.get_running_loop().time() - began > 0.5)
    assert 2 <= rounds.done <= 6
    loop.stop()
    await task


async def test_stop_ends_the_pause_and_lets_the_round_under_way_finish() -> None:
    gate, finished = asyncio.Event(), []

    async def once() -> None:
        await gate.wait()
        finished.append(1)

    loop = Loop("Testing", once)
    task = asyncio.create_task(loop.run())
    await asyncio.sleep(0)
    loop.stop()
    await asyncio.sleep(0)
    assert not task.done()
    gate.set()
    await task
    assert finished == [1]


async def test_a_loop_that_was_stopped_before_it_began_does_nothing() -> None:
    rounds = Rounds()
    loop = Loop("Testing", rounds)
    loop.stop()
    await loop.run()
    assert rounds.done == 0
