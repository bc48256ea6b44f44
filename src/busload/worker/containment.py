"""Keeps what a handler does to its task and context from reaching the next handler.

Two things outlive a careless handler. Context variables that it set would be seen by the next handler of the same task.
And a cancellation of its task (by a timer that it forgot, or one that it swallowed) would hit the next one.

So each attempt runs in a fresh copy of the worker's context. A task for each attempt would cost as much as everything
else that a worker does for it. So attempts share tasks, and after each it is proven that nothing can cancel its task
any more; if that is not certain, the task is given up, and a new one goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import Context
from sys import getrefcount
from typing import Any

import msgspec

from busload.errors import TransientCommandError


class Ended(msgspec.Struct, frozen=True, eq=False, gc=False):  # a struct is made in a fifth of a dataclass's time
    """How a handler ended: it returned a result, or raised an error."""

    result: Any = None
    error: BaseException | None = None


RETURNED_NOTHING = Ended()
"""Most handlers return None: one value does for all of them."""


class Suspended:
    """A handler that waits for something. Awaiting this lets it go on, in its own context, until it has ended."""

    __slots__ = ("_context", "_coroutine", "_yielded")

    def __init__(self, context: Context, coroutine: Coroutine[Any, Any, Any], yielded: Any) -> None:
        self._context, self._coroutine, self._yielded = context, coroutine, yielded

    def __await__(self) -> Generator[Any, Any, Ended]:
        run, coroutine, yielded = self._context.run, self._coroutine, self._yielded
        step: tuple[Callable[[Any], Any], Any]
        while True:
            try:
                step = coroutine.send, (yield yielded)
            except GeneratorExit:
                run(coroutine.close)
                raise
            except BaseException as error:
                step = coroutine.throw, error
            try:
                yielded = run(*step)
            except StopIteration as stop:
                return Ended(stop.value)
            except BaseException as error:
                return Ended(error=error)
            finally:
                del step  # else an error would hold the frames that hold the error


def references_to(task: asyncio.Task[Any]) -> int:
    """How many references there are to the task that runs; -1 if somebody has asked to cancel it.

    If that is the same before and after a handler, the handler has left nothing behind that could cancel the task: for
    that one needs a reference to it. A cancellation that was asked for already is counted by the task or, if it was
    taken back and comes all the same (until Python 3.12), waits in it.
    """
    if task._must_cancel or task.cancelling():  # type: ignore[attr-defined]
        return -1
    return getrefcount(task)


async def in_own_task(context: Context, seconds: float | None, call: Callable[[], Awaitable[Any]]) -> Ended:
    """Run a handler in a task that ends with it; one that takes too long is cancelled and has failed.

    If the caller is cancelled, so is the handler, and the caller waits until it has ended.
    """
    running = asyncio.create_task(_run(call), context=context)
    try:
        async with asyncio.timeout(seconds) as limit:
            return await running
    except TimeoutError as error:
        if not limit.expired():
            raise
        if running.done() and not running.cancelled():
            return running.result()  # it ended at the very moment at which its time was up
        return Ended(error=timed_out(seconds, error.__cause__))
    except asyncio.CancelledError as error:
        caller = asyncio.current_task()
        if running.cancelled() and (caller is None or not caller.cancelling()):
            return Ended(error=error)  # by itself: nobody has cancelled the caller
        raise


def timed_out(seconds: float | None, cause: BaseException | None = None) -> TransientCommandError:
    """The failure of a handler whose time was up. The traceback of `cause`, a cancellation, says where it was."""
    error = TransientCommandError(f"The handler did not finish within {seconds} s.", code="TIMEOUT")
    error.__cause__ = cause
    return error


async def _run(call: Callable[[], Awaitable[Any]]) -> Ended:
    """A task would hand KeyboardInterrupt and SystemExit on to the event loop, so every error is returned."""
    try:
        return Ended(await call())
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return Ended(error=error)
