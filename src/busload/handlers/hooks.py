"""What is hooked into a bus: middleware around handlers and sends, the lifespan of workers, calls after failures."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, overload
from uuid import UUID

from busload.commands.send_middleware import SendMiddleware
from busload.errors import InvalidOperationError

Hook = TypeVar("Hook", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class CommandFailure:
    """A command that will not be tried again: `status` is FAILED, or IN_TROUBLESHOOTING_QUEUE with a `reason`."""

    domain: str
    command_type: str
    command_id: UUID
    data: Any
    batch_id: UUID | None
    task_key: str | None
    headers: dict[str, str]
    attempt: int
    status: str
    reason: str | None
    error_type: str | None
    error_code: str | None
    error_message: str | None


OnFailure = Callable[[CommandFailure], Any]
"""A function, also one with `async def`, that is called when a command will not be tried again."""


@dataclass(frozen=True, slots=True)
class Middleware:
    """A generator function around handlers, and whether it is also around those of chunks and groups."""

    function: Callable[..., Any]
    awaits: bool
    bulk: bool


@dataclass(slots=True)
class Hooks:
    """Everything that was hooked into a bus, each kind in the order of its registration."""

    lifespan: Callable[[], Any] | None = None
    startup: list[Callable[[], Any]] = field(default_factory=list)
    shutdown: list[Callable[[], Any]] = field(default_factory=list)
    failure: list[OnFailure] = field(default_factory=list)
    middleware: list[Middleware] = field(default_factory=list)
    sending: list[SendMiddleware] = field(default_factory=list)

    def copy(self) -> Hooks:
        """The same hooks in a registry of their own."""
        return Hooks(
            self.lifespan,
            [*self.startup],
            [*self.shutdown],
            [*self.failure],
            [*self.middleware],
            [*self.sending],
        )


class HookDecorators:
    """The decorators of a bus that hook functions in. Each returns its function unchanged."""

    hooks: Hooks

    def lifespan(self, function: Hook) -> Hook:
        """Open what handlers need when a worker starts, and close it when the worker has stopped.

        The `function` yields once: an object with database engines, HTTP clients and the like, which handlers find as
        `ctx.state`. It may be `async def` or `def`. It runs before the first command is claimed, and goes on after the
        last result is settled. Every worker, also of the same process, has its own. If it raises, the worker stops.
        """
        if self.hooks.lifespan is not None:
            raise InvalidOperationError(
                f"This bus has a lifespan already, {name_of(self.hooks.lifespan)}. Open everything in one, or pass "
                "Worker(bus, lifespan=...)."
            )
        generator_of(function, "lifespan", 0)
        self.hooks.lifespan = function
        return function

    def on_startup(self, function: Hook) -> Hook:
        """Call the `function` when a worker starts, after its lifespan was opened. If it raises, the worker stops."""
        _refuse(function, "start-up hook", 0)
        self.hooks.startup.append(function)
        return function

    def on_shutdown(self, function: Hook) -> Hook:
        """Call the `function` when a worker has stopped, before its lifespan is closed. Its errors are logged."""
        _refuse(function, "shut-down hook", 0)
        self.hooks.shutdown.append(function)
        return function

    def on_failure(self, function: Hook) -> Hook:
        """Call the `function` with a `CommandFailure` when a command has FAILED, or has gone to troubleshooting.

        It is called once, after that was written, in the process that decides it: by the worker whose attempt was the
        last one. If the command has taken down its workers, a worker that finds the last of them dead decides, and one
        that serves the domain goes first. A command that is canceled, or has expired, has not failed. This is best
        effort: a process that dies calls nobody, and errors of the function are logged. `on_failure=` of a handler does
        the same for the commands of that handler.
        """
        _refuse(function, "failure hook", 1)
        self.hooks.failure.append(function)
        return function

    @overload
    def middleware(self, function: Hook) -> Hook: ...

    @overload
    def middleware(self, *, bulk: bool) -> Callable[[Hook], Hook]: ...

    def middleware(self, function: Any = None, *, bulk: bool = False) -> Any:
        """Run the `function` around every handler: what stands before its `yield` before it, and the rest after it.

        It is called with the command and the context, as a handler. `result = yield` is what the handler returns. What
        the handler raises is raised by the `yield`: raise it again, unless the command counts as done. The first
        middleware is the outermost one. With `async def` it is around handlers with `async def`, with `def` around all.
        With `bulk=True` it is around bulk handlers and handlers of buffers too, and gets a `Chunk` or a `Group` there.
        """
        return partial(_hook_in, self.hooks, bulk) if function is None else _hook_in(self.hooks, bulk, function)

    def send_middleware(self, function: Hook) -> Hook:
        """Run the `function` around every call that sends commands, with a `SendCall`: it may add to their headers.

        The function is a generator with `def`, on both faces of the bus: what stands before its `yield` is done before
        the call sends, and the rest after it.
        """
        if inspect.isasyncgenfunction(inspect.unwrap(function)):
            raise ValueError(
                f"A middleware around sends is written with def, found async def {name_of(function)}: it serves both "
                "faces of the bus."
            )
        self.hooks.sending.append(generator_of(function, "middleware around sends", 1))
        return function


def _hook_in(hooks: Hooks, bulk: bool, function: Hook) -> Hook:
    generator = generator_of(function, "middleware", 2)
    hooks.middleware.append(Middleware(generator, inspect.isasyncgenfunction(generator), bulk))
    return function


def generator_of(function: Callable[..., Any], kind: str, arguments: int) -> Callable[..., Any]:
    """The generator function itself, also if it was decorated as a context manager; refuses all else."""
    found: Callable[..., Any] = inspect.unwrap(function) if callable(function) else function
    if not inspect.isasyncgenfunction(found) and not inspect.isgeneratorfunction(found):
        raise ValueError(f"A {kind} is a function with one `yield`, found {name_of(function)}.")
    _refuse(found, kind, arguments)
    return found


def name_of(function: object) -> str:
    return getattr(function, "__qualname__", None) or f"{function!r:.80}"


def _refuse(function: object, kind: str, arguments: int) -> None:
    if not callable(function):
        raise ValueError(f"A {kind} must be a function, found {function!r:.80}.")
    try:
        inspect.signature(function).bind(*(None,) * arguments)
    except TypeError:
        wanted = ("no arguments", "one argument", "two arguments")[arguments]
        found = f"{name_of(function)}{inspect.signature(function)}"
        raise ValueError(f"A {kind} is called with {wanted}, found {found}.") from None
