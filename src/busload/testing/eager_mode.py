"""Eager mode: what is sent runs at once, before the call that sends it returns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from busload.bus import CommandBus
from busload.errors import SnoozeError
from busload.handlers.registry import Handler
from busload.postgres import waiting
from busload.testing.faces import AnyBus, refuse_no_bus
from busload.testing.faults import exchanged
from busload.testing.run import drain
from busload.worker.context import NO_STATE

SENDS = ("send", "send_many", "create_batch", "seal_batch")
"""The methods of a bus after which commands run."""

_draining: ContextVar[bool] = ContextVar("busload_testing_draining", default=False)
"""Whether a handler sends: what it sends runs in the drain that it is part of."""


@contextmanager
def eager(bus: AnyBus, *, raises: bool = True, state: Any = NO_STATE) -> Iterator[None]:
    """While the block lasts, `send`, `send_many`, `create_batch` and `seal_batch` run what is ready before they return.

    Commands are written and run as always: results, batches, callbacks and replies are in the database afterwards, and
    retries that are due at once have been made. If a handler has raised, the call raises the same error, unless
    `raises` is False; a handler that snoozes has not failed. A call with `conn` runs the handlers in that transaction.
    `state` is what handlers find as `ctx.state`, in the place of what the lifespan of the bus would open; a call with
    `conn` opens no lifespan.

    It shows what a handler does, and not how busload works around it: nothing runs beside anything else, the sender
    waits for its handlers, and what is scheduled for later stays where it is.
    """
    refuse_no_bus(bus)
    errors: list[BaseException] = []
    with ExitStack() as undo:
        for domain, command_type in bus.handlers.names:
            handler = bus.handlers.find(domain, command_type)
            assert handler is not None
            undo.enter_context(exchanged(bus.handlers, domain, command_type, _recorded(handler, errors)))
        wrap = _AsyncSends if isinstance(bus, CommandBus) else _SyncSends
        sends = wrap(bus, errors if raises else None, state)
        for name in SENDS:
            undo.callback(_restored, bus, name)
            setattr(bus, name, sends.wrapped(getattr(bus, name)))
        yield


def _restored(bus: AnyBus, name: str) -> None:
    vars(bus).pop(name, None)


def _recorded(handler: Handler, errors: list[BaseException]) -> Callable[..., Any]:
    @wraps(handler.function)
    async def awaited(subject: Any, ctx: Any) -> Any:
        try:
            return await handler.function(subject, ctx)
        except SnoozeError:
            raise  # the command is put off, and its handler has not failed
        except waiting.FAILURES as error:
            errors.append(error)
            raise

    @wraps(handler.function)
    def called(subject: Any, ctx: Any) -> Any:
        try:
            return handler.function(subject, ctx)
        except SnoozeError:
            raise
        except Exception as error:
            errors.append(error)
            raise

    return awaited if handler.is_async else called


class _Sends:
    def __init__(self, bus: Any, errors: list[BaseException] | None, state: Any) -> None:
        self._bus, self._errors, self._state = bus, errors, state

    def _raise_first(self) -> None:
        if self._errors:
            error = self._errors[0]
            self._errors.clear()
            raise error


class _AsyncSends(_Sends):
    def __init__(self, bus: Any, errors: list[BaseException] | None, state: Any) -> None:
        super().__init__(bus, errors, state)
        self._lock = waiting.Lock()

    def wrapped(self, send: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(send)
        async def send_and_run(*args: Any, **options: Any) -> Any:
            result = await send(*args, **options)
            if not _draining.get():
                async with self._lock:
                    token = _draining.set(True)
                    try:
                        await drain(self._bus, conn=options.get("conn"), state=self._state)
                    finally:
                        _draining.reset(token)
                    self._raise_first()
            return result

        return send_and_run


class _SyncSends(_Sends):
    def __init__(self, bus: Any, errors: list[BaseException] | None, state: Any) -> None:
        super().__init__(bus, errors, state)
        self._lock = threading.Lock()

    def wrapped(self, send: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(send)
        def send_and_run(*args: Any, **options: Any) -> Any:
            result = send(*args, **options)
            if not _draining.get():
                with self._lock:
                    token = _draining.set(True)
                    try:
                        drain(self._bus, conn=options.get("conn"), state=self._state)
                    finally:
                        _draining.reset(token)
                    self._raise_first()
            return result

        return send_and_run
