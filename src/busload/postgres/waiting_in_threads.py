"""How the sync face waits: the names of `waiting`, for code that runs in threads."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future as Future
from typing import Any, Self, TypeVar

from psycopg import waiting
from psycopg.pq import TransactionStatus
from psycopg.pq.abc import PGconn

T = TypeVar("T")

Event = threading.Event
Lock = threading.Lock
Semaphore = threading.Semaphore
sleep = time.sleep
for_socket = waiting.wait

AWAITS = False
"""An async function is refused where a function of the application is called: nobody would await it."""

NAP = 0.2
"""Seconds that may be waited for in one piece. A thread cannot be cancelled, so it has to see that it shall stop."""

FAILURES: tuple[type[BaseException], ...] = (BaseException,)
"""What a function of the application may raise without ending the activity that calls it: even a SystemExit."""

INTERRUPTION = KeyboardInterrupt
"""What ends a wait from outside."""


class SilenceError(Exception):
    """No byte has come for too long."""


def for_answer(gen: Generator[Any, Any, T], pgconn: PGconn, seconds: float) -> T:
    """Wait for what psycopg waits for; `SilenceError` if no byte comes for so long.

    After that error, `gen` can be waited for again.
    """
    return for_socket(_watch(gen, pgconn, seconds), pgconn.socket, interval=0.1)


def _watch(gen: Generator[Any, Any, T], pgconn: PGconn, seconds: float) -> Generator[Any, Any, T]:
    ready: Any = None
    since = time.monotonic()
    try:
        while True:
            ready = yield gen.send(ready)
            if ready:
                since = time.monotonic()
            elif time.monotonic() - since > seconds and pgconn.transaction_status == TransactionStatus.ACTIVE:
                raise SilenceError
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]


def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Call a function that blocks, as everything here does."""
    return function(*args)


def result_of(called: Any) -> Any:
    """What a function of the application returned."""
    return called


def result_within(seconds: float, future: Future[T]) -> T:
    """Wait for what somebody gives to the future; `TimeoutError` if it takes longer."""
    return future.result(seconds)


class Activity:
    """Work that goes on beside the one who has started it, in a thread. It does not keep the process from ending."""

    is_cancelled = False

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._thread = threading.Thread(target=work, name=name, daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait until the work has ended, so many seconds at most."""
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def cancel(self) -> None:
        """A thread cannot be cancelled: it ends by itself once its owner has told it to."""


class TimeLimit:
    """`with TimeLimit(seconds)`: a limit that the block has to look at, since nobody can interrupt a thread."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._end = math.inf if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    @property
    def patience(self) -> float | None:
        """How many seconds a step of the block may wait; None if there is no limit."""
        return None if math.isinf(self._end) else self.left

    def check(self) -> None:
        if not self.left:
            raise TimeoutError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass
