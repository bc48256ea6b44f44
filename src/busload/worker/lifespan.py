"""The lifespan of a worker: what handlers need is opened before the first claim, and closed after the last result."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from inspect import isasyncgenfunction, isawaitable, iscoroutinefunction
from typing import Any

from busload.errors import InvalidOperationError
from busload.handlers.hooks import Hooks, generator_of, name_of
from busload.worker.context import NO_STATE

log = logging.getLogger("busload")


class WorkerLifespan:
    """Runs the lifespan and the hooks of a worker in a task of its own, so that it is left where it was entered."""

    def __init__(self, hooks: Hooks, lifespan: Callable[[], Any] | None) -> None:
        self._hooks, self._lifespan = hooks, lifespan
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def needed(self) -> bool:
        return self._lifespan is not None or bool(self._hooks.startup) or bool(self._hooks.shutdown)

    async def open(self) -> Any:
        """Open it, and return what handlers get as `ctx.state`. Whatever fails here ends with a clear error."""
        opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(opened), name="busload-lifespan")
        try:
            await asyncio.wait({opened, self._task}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        if opened.done():
            return opened.result()
        return self._task.result()  # raises

    async def close(self) -> None:
        """Call what is to be called at the end, and close it. Errors are logged: all results are settled already."""
        self._closing.set()
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _run(self, opened: asyncio.Future[Any]) -> None:
        async with AsyncExitStack() as stack:
            stack.push(_log_errors)
            state: Any = NO_STATE
            doing = "The worker has not started"
            try:
                if self._lifespan is not None:
                    doing = f"The lifespan {name_of(self._lifespan)} could not be opened"
                    state = await _enter(stack, self._lifespan)
                for hook in self._hooks.startup:
                    doing = f"The start-up hook {name_of(hook)} failed"
                    await _call(hook)
            except Exception as error:
                said = f"{type(error).__name__}: {error}".removesuffix(".")
                raise NotOpenedError(f"{doing}: {said}. The worker has not started.") from error
            opened.set_result(state)
            await self._closing.wait()
            for hook in self._hooks.shutdown:
                try:
                    await _call(hook)
                except Exception:
                    log.exception("The shut-down hook %s failed", name_of(hook))


class NotOpenedError(InvalidOperationError):
    """A worker has not started because its lifespan, or a hook, has failed."""


async def _enter(stack: AsyncExitStack, lifespan: Callable[[], Any]) -> Any:
    generator = generator_of(lifespan, "lifespan", 0)
    if isasyncgenfunction(generator):
        return await stack.enter_async_context(asynccontextmanager(generator)())
    return stack.enter_context(contextmanager(generator)())


def _log_errors(kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
    """What a lifespan raises while it is closed is logged; what it raises while it is opened is the worker's."""
    if error is None or isinstance(error, NotOpenedError) or not isinstance(error, Exception):
        return False
    log.error("The lifespan of the worker could not be closed", exc_info=error)
    return True


async def _call(hook: Callable[[], Any]) -> None:
    if iscoroutinefunction(hook):
        await hook()
        return
    answer = await asyncio.to_thread(hook)
    if isawaitable(answer):
        await answer
