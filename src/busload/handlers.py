"""Which function runs a command, under which retry policy."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeVar

from busload.domain.buffer import EXHAUSTED, GROUP, BufferSettings
from busload.domain.cause import RESOLVE
from busload.domain.command import InputLimits, check_name, refuse
from busload.domain.job import PLAN, STAGE, check_stage
from busload.domain.rate import RateLimit, is_async
from busload.domain.result import refuse_result_type
from busload.domain.retry import RetryPolicy
from busload.errors import HandlerAlreadyRegisteredError, InvalidOperationError, Problem
from busload.job import advance, planner
from busload.resolve import RETRY, resolve

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Gathering:
    """How commands are gathered into chunks for a bulk handler. `max_wait` is in seconds."""

    size: int
    max_wait: float
    max_bytes: int | None = None
    by: Callable[[Any], object] | None = None


@dataclass(frozen=True, slots=True)
class Handler:
    """A registered function; one written with `def` runs in a thread. `timeout` is in seconds.

    With `gathering` it gets chunks of commands, with `buffer` groups of events, else one command at a time.
    """

    function: Callable[..., Any]
    retry: RetryPolicy
    timeout: float | None
    is_async: bool
    rate_limit: RateLimit | None = None
    isolate_poison: bool = False
    gathering: Gathering | None = None
    buffer: BufferSettings | None = None
    plain: bool = field(init=False)
    """Whether it gets one command and may begin at once, in the event loop, without a limit to its time."""

    def __post_init__(self) -> None:
        special = (self.timeout, self.rate_limit, self.gathering, self.buffer)
        object.__setattr__(self, "plain", self.is_async and all(one is None for one in special))


BUILT_IN = {
    RESOLVE: Handler(resolve, RETRY, timeout=None, is_async=True),
    STAGE: Handler(advance, RETRY, timeout=None, is_async=True),
}
"""What every worker runs, in every domain."""

MOST_GATHERED = 30_000
"""The largest chunk: a worker claims two at a time."""

RESERVED = {*BUILT_IN, GROUP, EXHAUSTED}


class Handlers:
    """An explicit registry: a type name that comes with a command is looked up here and nowhere else."""

    def __init__(self) -> None:
        self._handlers: dict[tuple[str, str], Handler] = {}
        self.gathers = False
        """Whether there is a bulk handler."""
        self.limits = False
        """Whether there is a handler with a limit."""
        self.threaded = False
        """Whether there is a handler written with `def`."""

    def register(
        self,
        domain: str,
        command_type: str,
        *,
        retry: RetryPolicy | None = None,
        timeout: timedelta | float | None = None,
        rate_limit: RateLimit | None = None,
        isolate_poison: bool = False,
        gathering: Gathering | None = None,
    ) -> Callable[[Function], Function]:
        """A decorator that returns the function unchanged."""
        limits = InputLimits()
        refuse(check_name(domain, "domain", limits) + check_name(command_type, "command_type", limits), writes=False)
        if command_type in RESERVED or command_type.startswith(PLAN):
            message = f"found {command_type!r}, which busload uses itself; choose another name"
            refuse([Problem("INVALID_NAME", "/command_type", message)], writes=False)
        return self._register(domain, command_type, retry, timeout, rate_limit, isolate_poison, gathering)

    def register_buffer(
        self,
        buffer: BufferSettings,
        *,
        retry: RetryPolicy | None = None,
        timeout: timedelta | float | None = None,
        rate_limit: RateLimit | None = None,
        isolate_poison: bool = False,
    ) -> Callable[[Function], Function]:
        """A decorator for the function that runs a buffer's groups."""
        return self._register(buffer.name, GROUP, retry, timeout, rate_limit, isolate_poison, buffer=buffer)

    def register_exhausted(
        self, buffer: BufferSettings, *, retry: RetryPolicy | None = None, timeout: timedelta | float | None = None
    ) -> Callable[[Function], Function]:
        """A decorator for the function that is told of a buffer's groups whose attempts are used up."""
        return self._register(buffer.name, EXHAUSTED, retry, timeout)

    def register_planner(
        self,
        domain: str,
        stage: str,
        *,
        retry: RetryPolicy | None = None,
        timeout: timedelta | float | None = None,
    ) -> Callable[[Function], Function]:
        """A decorator for the function that plans a stage; it returns the function unchanged."""
        limits = InputLimits()
        refuse(check_name(domain, "domain", limits) + check_stage(stage, "stage", limits), writes=False)
        add = self._register(domain, PLAN + stage, retry, timeout)

        def register(function: Function) -> Function:
            _refuse_function(function, "stage")
            add(planner(function))
            return function

        return register

    def _register(
        self,
        domain: str,
        command_type: str,
        retry: RetryPolicy | None,
        timeout: timedelta | float | None,
        rate_limit: RateLimit | None = None,
        isolate_poison: bool = False,
        gathering: Gathering | None = None,
        buffer: BufferSettings | None = None,
    ) -> Callable[[Function], Function]:
        if rate_limit is not None and not isinstance(rate_limit, RateLimit):
            raise ValueError(f"rate_limit must be a RateLimit, found {rate_limit!r:.80}.")
        if not isinstance(isolate_poison, bool):
            raise ValueError(f"isolate_poison must be True or False, found {isolate_poison!r:.80}.")
        if retry is not None and not isinstance(retry, RetryPolicy):
            raise ValueError(f"retry must be a RetryPolicy, found {retry!r:.80}.")
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if seconds is not None and (type(seconds) not in (int, float) or not 0 < seconds < 10**9):
            raise ValueError(f"A handler's timeout must be more than 0 seconds, found {timeout!r}.")

        first = "chunk" if gathering else "group" if buffer or command_type == EXHAUSTED else "command"

        def add(function: Function) -> Function:
            _refuse_function(function, first)
            if buffer is None:  # whose handlers answer by their verdicts
                refuse_result_type(function)
            existing = self._handlers.get((domain, command_type))
            if existing is not None:
                raise HandlerAlreadyRegisteredError(domain, command_type, _name(existing.function))
            self._refuse_mixture(domain, command_type)
            self._handlers[domain, command_type] = Handler(
                function,
                retry or RetryPolicy(),
                seconds,
                is_async(function),
                rate_limit,
                isolate_poison,
                gathering,
                buffer,
            )
            self.gathers = self.gathers or gathering is not None
            self.limits = self.limits or rate_limit is not None
            self.threaded = self.threaded or not is_async(function)
            return function

        return add

    def _refuse_mixture(self, domain: str, command_type: str) -> None:
        """The queue of a buffer's domain has room for so many groups: other commands would take it up."""
        known = {type for of, type in self._handlers if of == domain} | {command_type}
        if GROUP in known and (others := known - RESERVED):
            raise InvalidOperationError(
                f"The domain {domain!r} is a buffer, and cannot have commands of its own ({', '.join(others)}). "
                "Give them a domain of another name."
            )

    def find(self, domain: str, command_type: str) -> Handler | None:
        return self._handlers.get((domain, command_type)) or BUILT_IN.get(command_type)

    def threads(self, domain: str) -> Literal["none", "some", "all"]:
        """Which of a domain's handlers run in threads."""
        kinds = {handler.is_async for handler in self.of_domain(domain)}
        return "some" if len(kinds) == 2 else "all" if kinds == {False} else "none"

    def of_domain(self, domain: str) -> list[Handler]:
        return [handler for (of, _), handler in self._handlers.items() if of == domain]

    @property
    def buffers(self) -> list[BufferSettings]:
        """Every buffer that has a handler."""
        return [handler.buffer for handler in self._handlers.values() if handler.buffer is not None]

    @property
    def domains(self) -> list[str]:
        """Every domain that has a handler."""
        return sorted({domain for domain, _ in self._handlers})


def gather(
    *,
    size: int,
    max_wait: timedelta | float,
    max_bytes: int | None,
    by: Callable[[Any], object] | None,
) -> Gathering:
    """How a bulk handler wants its commands; refuses what makes no chunk."""
    for name, value in (("size", size), ("max_bytes", max_bytes)):
        if value is not None and (type(value) is not int or not 1 <= value < 2**31):
            raise ValueError(f"{name} must be a whole number from 1 on, found {value!r:.80}.")
    if size is None or size > MOST_GATHERED:
        raise ValueError(f"size must be a whole number from 1 to {MOST_GATHERED:,}, found {size!r:.80}.")
    seconds = max_wait.total_seconds() if isinstance(max_wait, timedelta) else max_wait
    if type(seconds) not in (int, float) or not 0 <= seconds < 10**9:
        raise ValueError(f"max_wait must be a timedelta or seconds from 0 on, found {max_wait!r:.80}.")
    if by is not None and (not callable(by) or is_async(by)):
        raise ValueError(f"by must be a function of a command, not one with async def, found {by!r:.80}.")
    return Gathering(size, float(seconds), max_bytes, by)


def _refuse_function(function: object, first: str) -> None:
    """A handler that cannot be called would only be found out with its first command, which would pay for it."""
    if not callable(function):
        raise ValueError(f"A handler must be a function, found {function!r:.80}.")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have none
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise ValueError(
            f"A handler is called with two arguments, e.g. `async def handle({first}, ctx)`; found "
            f"{_name(function)}{signature}."
        ) from None


def _name(function: Callable[..., Any]) -> str:
    if (name := getattr(function, "__qualname__", None)) is None:  # a partial, or an object that can be called
        return f"{function!r:.120}"
    return f"{function.__module__}.{name}"
