"""How the async face waits. `waiting_in_threads` has the same names for code that runs in threads.

The sync face is generated from the async one. A module can be generated if it waits by these names alone.
"""

from __future__ import annotations

import asyncio
import math
import time
from asyncio import Future, Lock, Semaphore, sleep
from collections.abc import Callable, Coroutine, Generator
from inspect import isawaitable
from types import TracebackType
from typing import Any, Self, TypeVar

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.pq.abc import PGconn
from psycopg.waiting import Ready, Wait
from psycopg.waiting import wait_async as for_socket

from busload.postgres import waiting_in_threads
from busload.postgres.waiting_in_threads import SilenceError

__all__ = [
    "AWAITS",
    "FAILURES",
    "INTERRUPTION",
    "NAP",
    "Activity",
    "Event",
    "Future",
    "Lock",
    "Semaphore",
    "SilenceError",
    "TimeLimit",
    "for_answer",
    "for_socket",
    "in_thread",
    "result_of",
    "result_within",
    "sleep",
]

T = TypeVar("T")

AWAITS = True
"""An async function may be given where a function of the application is called."""

NAP = math.inf
"""Seconds that may be waited for in one piece. A task can be cancelled at any moment, so it may wait for long."""

FAILURES: tuple[type[BaseException], ...] = (Exception, asyncio.CancelledError)
"""What a function of the application may raise without ending the activity that calls it."""

INTERRUPTION = asyncio.CancelledError
"""What ends a wait from outside."""


LONGEST_STRETCH = 0.005
"""Seconds after which work that never has to wait lets others go first."""

_let_others_go_at = 0.0


async def for_answer(gen: Generator[Any, Any, T], pgconn: PGconn, seconds: float) -> T:
    """Wait for what psycopg waits for, in less time of the processor; `SilenceError` if no byte comes for so long.

    After that error, `gen` can be waited for again.
    """
    global _let_others_go_at
    socket = pgconn.socket  # an error if the connection is closed: then nothing has begun that nobody would end
    try:
        try:
            wanted = gen.send(None)
        except StopIteration as done:
            if time.monotonic() - _let_others_go_at > LONGEST_STRETCH:
                await asyncio.sleep(0)
                _let_others_go_at = time.monotonic()
            return done.value  # type: ignore[no-any-return]
        answer: T = await _Answer(gen, pgconn, socket, seconds).wait(wanted)
        _let_others_go_at = time.monotonic()
        return answer
    except OSError as error:
        raise psycopg.OperationalError(f"the socket of the connection is closed: {error}") from error


class _Answer:
    """An answer that is read as its bytes come: the task that waits for it is woken once, by its end."""

    __slots__ = ("_ended", "_gen", "_loop", "_pgconn", "_seconds", "_since", "_socket", "_timer", "_wanted")

    def __init__(self, gen: Generator[Any, Any, Any], pgconn: PGconn, socket: int, seconds: float) -> None:
        self._gen, self._pgconn, self._socket, self._seconds = gen, pgconn, socket, seconds
        self._loop = asyncio.get_running_loop()
        self._ended: Future[Any] = self._loop.create_future()
        self._wanted = 0

    async def wait(self, wanted: int) -> Any:
        self._since = self._loop.time()
        self._timer = self._loop.call_at(self._since + self._seconds, self._look)
        try:
            self._watch(wanted)
            return await self._ended
        finally:
            self._timer.cancel()
            self._watch(0)
            del self._ended  # it holds its error, and the traceback of that holds this object

    def _watch(self, wanted: int) -> None:
        """Have the loop tell of these kinds of readiness, and of no others."""
        more, less = wanted & ~self._wanted, self._wanted & ~wanted
        self._wanted = wanted
        if more & Wait.R:
            self._loop.add_reader(self._socket, self._go_on, Ready.R)
        if more & Wait.W:
            self._loop.add_writer(self._socket, self._go_on, Ready.W)
        if less & Wait.R:
            self._loop.remove_reader(self._socket)
        if less & Wait.W:
            self._loop.remove_writer(self._socket)

    def _go_on(self, ready: int) -> None:
        if self._ended.done():  # its task was cancelled in the same moment, and goes on by itself
            return
        self._since = self._loop.time()
        try:
            wanted = self._gen.send(ready)
            if wanted != self._wanted:
                self._watch(wanted)
        except StopIteration as done:
            self._watch(0)
            self._ended.set_result(done.value)
        except (SystemExit, KeyboardInterrupt) as error:
            self._ended.set_exception(error)
            raise
        except BaseException as error:
            self._ended.set_exception(error)

    def _look(self) -> None:
        """See how long no byte has come, and look again when that can be too long."""
        silent = self._loop.time() - self._since
        if silent < self._seconds or self._pgconn.transaction_status != TransactionStatus.ACTIVE:
            self._timer = self._loop.call_later(max(self._seconds - silent, 0.1), self._look)
        elif not self._ended.done():
            self._ended.set_exception(SilenceError())


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Call a function that blocks."""
    return await asyncio.to_thread(function, *args)


async def result_of(called: Any) -> Any:
    """What a function of the application returned, awaited if it was an async one."""
    return await called if isawaitable(called) else called


async def result_within(seconds: float, future: Future[T]) -> T:
    """Wait for what somebody gives to the future; `TimeoutError` if it takes longer."""
    loop = asyncio.get_running_loop()
    timer = loop.call_at(loop.time() + seconds, _end, future)
    try:
        return await future
    finally:
        timer.cancel()


def _end(future: Future[Any]) -> None:
    if not future.done():
        future.set_exception(TimeoutError())


class Event:
    """An event that can be waited for with a time-out."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.set, self.clear, self.is_set = self._event.set, self._event.clear, self._event.is_set

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, or so many seconds; returns whether it is."""
        try:
            async with asyncio.timeout(timeout):
                return await self._event.wait()
        except TimeoutError:
            return self._event.is_set()


class Activity:
    """Work that goes on beside the one who has started it."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self._task = asyncio.create_task(work(), name=name)

    @property
    def is_cancelled(self) -> bool:
        """Whether the work was told to end at once."""
        return self._task.cancelling() > 0

    async def join(self, seconds: float) -> None:
        """Wait until the work has ended, so many seconds at most."""
        if self._task is not asyncio.current_task():
            await asyncio.wait({self._task}, timeout=seconds)

    async def cancel(self) -> None:
        """End the work at once."""
        if self._task is not asyncio.current_task():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class TimeLimit(waiting_in_threads.TimeLimit):
    """`async with TimeLimit(seconds)`: the block ends with a `TimeoutError` when the time is up.

    With no seconds at all there is time for one look: then the block has to see by itself that the time is up.
    """

    def __init__(self, seconds: float | None) -> None:
        super().__init__(seconds)
        self._timeout = asyncio.timeout(seconds if seconds is not None and seconds > 0 else None)

    @property
    def patience(self) -> float | None:
        """How many seconds a step of the block may wait; None, since the limit interrupts the step."""
        return None

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._timeout.__aexit__(kind, error, trace)
