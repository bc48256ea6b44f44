"""Handlers within the middleware of their bus, composed when a worker starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

from busload.buffers.declaration import EXHAUSTED
from busload.errors import InvalidOperationError
from busload.handlers.hooks import Hooks, Middleware, name_of
from busload.handlers.registry import BUILT_IN, DUE, Handler, Handlers
from busload.jobs.job import PLAN


def within_middleware(handlers: Handlers, hooks: Hooks) -> Handlers:
    """The handlers of a bus as a worker calls them: each within the middleware of the bus, if it has any."""
    return HandlersInMiddleware(handlers, hooks.middleware) if hooks.middleware else handlers


class HandlersInMiddleware(Handlers):
    """The handlers of a bus, also those that are registered later, each within the middleware that is meant for it."""

    __slots__ = ("_composed", "_middleware")

    def __init__(self, handlers: Handlers, middleware: Sequence[Middleware]) -> None:
        self.__dict__ = handlers.__dict__
        self._middleware = tuple(middleware)
        self._composed: dict[int, tuple[Handler, Handler]] = {}

    def find(self, domain: str, command_type: str) -> Handler | None:
        handler = super().find(domain, command_type)
        if handler is None or command_type in BUILT_IN or command_type.startswith((PLAN, DUE)):
            return handler
        known = self._composed.get(id(handler))
        if known is None:
            many = handler.takes_many or command_type == EXHAUSTED
            around = [one for one in self._middleware if one.bulk or not many]
            known = self._composed[id(handler)] = handler, _compose(handler, around)
        return known[1]

    def refuse_mixture(self, domains: Sequence[str]) -> None:
        """A middleware that awaits cannot be around a handler that runs in a thread."""
        awaiting = [one for one in self._middleware if one.awaits]
        for domain in domains if awaiting else ():
            for handler in self.of_domain(domain):
                found = [one for one in awaiting if one.bulk or not handler.takes_many]
                if found and not handler.is_async:
                    raise InvalidOperationError(
                        f"The middleware {name_of(found[0].function)} is written with async def, and cannot be around "
                        f"the handler {name_of(handler.function)} of {domain}, which is written with def and runs in a "
                        "thread. Write the middleware with def: then it is around both kinds."
                    )


def _compose(handler: Handler, middleware: Sequence[Middleware]) -> Handler:
    function = handler.function
    for one in reversed(middleware):
        if not handler.is_async:
            function = _in_thread(one.function, function)
        else:
            function = (_awaited if one.awaits else _around_awaited)(one.function, function)
    return replace(handler, function=function)


def _awaited(middleware: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    async def call(subject: Any, context: Any) -> Any:
        steps = middleware(subject, context)
        try:
            await anext(steps)
        except StopAsyncIteration:
            raise _no_yield(middleware) from None
        try:
            result = await function(subject, context)
        except BaseException as error:
            try:
                await steps.athrow(error)
            except StopAsyncIteration:
                return None
        else:
            try:
                await steps.asend(result)
            except StopAsyncIteration:
                return result
        await steps.aclose()
        raise _many_yields(middleware)

    return call


def _around_awaited(middleware: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    async def call(subject: Any, context: Any) -> Any:
        steps = _begin(middleware, subject, context)
        try:
            result = await function(subject, context)
        except BaseException as error:
            return _fail(middleware, steps, error)
        return _end(middleware, steps, result)

    return call


def _in_thread(middleware: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(subject: Any, context: Any) -> Any:
        steps = _begin(middleware, subject, context)
        try:
            result = function(subject, context)
        except BaseException as error:
            return _fail(middleware, steps, error)
        return _end(middleware, steps, result)

    return call


def _begin(middleware: Callable[..., Any], subject: Any, context: Any) -> Any:
    steps = middleware(subject, context)
    try:
        next(steps)
    except StopIteration:
        raise _no_yield(middleware) from None
    return steps


def _fail(middleware: Callable[..., Any], steps: Any, error: BaseException) -> None:
    """Raise the error where the middleware yields. If it does not raise it again, the handler counts as done."""
    try:
        steps.throw(error)
    except StopIteration:
        return
    steps.close()
    raise _many_yields(middleware)


def _end(middleware: Callable[..., Any], steps: Any, result: Any) -> Any:
    try:
        steps.send(result)
    except StopIteration:
        return result
    steps.close()
    raise _many_yields(middleware)


def _no_yield(middleware: Callable[..., Any]) -> InvalidOperationError:
    found = f"The middleware {name_of(middleware)} returned before its yield"
    return InvalidOperationError(f"{found}, so the handler has not run. Raise an error instead.")


def _many_yields(middleware: Callable[..., Any]) -> InvalidOperationError:
    return InvalidOperationError(f"The middleware {name_of(middleware)} has a second yield. It must have one.")
