"""Which function runs a command, under which retry policy."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import wraps
from typing import Any, Literal, Unpack

from busload.buffers.declaration import EXHAUSTED, GROUP, BufferSettings
from busload.commands.checks import FLAG, Kind, given, instance, refuse, require, whole, wrong_name
from busload.commands.command import Command, refuse_unknown
from busload.commands.data_type import DataType
from busload.commands.result import refuse_result_type
from busload.commands.retry import RetryPolicy
from busload.commands.wording import counted
from busload.errors import HandlerAlreadyRegisteredError, InvalidOperationError, Problem
from busload.handlers.calling import form_of
from busload.jobs.job import PLAN, STAGE, wrong_stage
from busload.jobs.steps import advance, plan_stage
from busload.limits.concurrency import ConcurrencyLimit
from busload.limits.handler_options import Function, GroupHandlerOptions, HandlerOptions, PolicyOptions
from busload.limits.rate import RateLimit, is_async
from busload.settings import InputLimits
from busload.sync.steps import plan_stage as plan_stage_in_thread
from busload.troubleshooting.decisions import DECISION, RETRY, carry_out


class BulkOptions(GroupHandlerOptions, total=False):
    """What may be said about a bulk handler."""

    size: int
    """How many commands a chunk has at most; 1,000 if it is left out."""
    max_wait: timedelta | float
    """How long the first command of a chunk waits for others, in seconds if it is a number; 2 s if it is left out."""
    max_bytes: int | None
    """How many bytes of data a chunk has at most."""
    by: Callable[[Any], object] | None
    """A function of a command: the commands of a chunk have the same value of it."""


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
    concurrency_limit: ConcurrencyLimit | None = None
    data_type: DataType | None = None
    """What its data is converted to: by `function` itself, and of a bulk handler when its chunk is made."""
    on_failure: Callable[[Any], Any] | None = None
    plain: bool = field(init=False)
    """Whether it gets one command and may begin at once, in the event loop, without a limit to its time."""
    plain_with_permit: bool = field(init=False)
    """Whether only a concurrency limit keeps it from being plain."""

    def __post_init__(self) -> None:
        special = (self.timeout, self.rate_limit, self.gathering, self.buffer)
        plain = self.is_async and all(one is None for one in special)
        object.__setattr__(self, "plain", plain and self.concurrency_limit is None)
        object.__setattr__(self, "plain_with_permit", plain and self.concurrency_limit is not None)

    @property
    def ordered(self) -> bool:
        """Whether the commands of a key run in order."""
        return self.concurrency_limit is not None and self.concurrency_limit.ordered

    @property
    def takes_many(self) -> bool:
        """Whether one call takes several commands or events."""
        return self.gathering is not None or self.buffer is not None


BUILT_IN = {
    DECISION: Handler(carry_out, RETRY, timeout=None, is_async=True),
    STAGE: Handler(advance, RETRY, timeout=None, is_async=True),
}
"""What every worker runs, in every domain."""

MOST_GATHERED = 30_000
"""The largest chunk: a worker claims two at a time."""

DUE = "busload.Schedule."
"""The type of the command that plans the batch of a due time begins so, and ends with the name of the schedule."""

RESERVED = {*BUILT_IN, GROUP, EXHAUSTED}


class Handlers:
    """An explicit registry: a type name that comes with a command is looked up here and nowhere else."""

    def __init__(self) -> None:
        self._handlers: dict[tuple[str, str], Handler] = {}
        self.gathers = False
        """Whether there is a bulk handler."""
        self.limits = False
        """Whether there is a handler with a limit."""
        self.concurrency_limits = False
        """Whether there is a handler with a concurrency limit."""
        self.ordered: set[str] = set()
        """Domains with a handler whose commands run in order."""
        self.threaded = False
        """Whether there is a handler written with `def`."""
        self.calls_after_failures = False
        """Whether there is a handler with `on_failure`."""
        self.data_types: dict[tuple[str, str], DataType] = {}
        """The types of data that handlers want, by domain and command type."""
        self.bus_of_threads: type[Any] | None = None
        """The class of the `ctx.bus` of handlers written with `def`; if None, it is a `SyncCommandBus`."""

    def register(
        self,
        domain: str,
        command_type: str,
        *,
        gathering: Gathering | None = None,
        **options: Unpack[GroupHandlerOptions],
    ) -> Callable[[Function], Function]:
        """A decorator that returns the function unchanged."""
        limits = InputLimits()
        refuse(wrong_name(domain, "domain", limits) + wrong_name(command_type, "command_type", limits), writes=False)
        if command_type in RESERVED or command_type.startswith((PLAN, DUE)):
            message = f"found {command_type!r}, which busload uses itself; choose another name"
            refuse([Problem("INVALID_NAME", "/command_type", message)], writes=False)
        return self.add(domain, command_type, gathering=gathering, **options)

    def add(
        self,
        domain: str,
        command_type: str,
        *,
        gathering: Gathering | None = None,
        buffer: BufferSettings | None = None,
        **options: Unpack[GroupHandlerOptions],
    ) -> Callable[[Function], Function]:
        """As `register`, also for types that busload uses itself; `buffer` is the one whose groups are run."""
        retry, rate_limit = options.get("retry"), options.get("rate_limit")
        timeout, isolate_poison = options.get("timeout"), options.get("isolate_poison", False)
        require(instance(RateLimit, "a RateLimit"), **given(rate_limit=rate_limit))
        concurrency_limit = options.get("concurrency_limit")
        require(instance(ConcurrencyLimit, "a ConcurrencyLimit"), **given(concurrency_limit=concurrency_limit))
        require(FLAG, isolate_poison=isolate_poison)
        on_failure = options.get("on_failure")
        require(Kind("a function of a CommandFailure", callable), **given(on_failure=on_failure))
        require(instance(RetryPolicy, "a RetryPolicy"), **given(retry=retry))
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if seconds is not None and (type(seconds) not in (int, float) or not 0 < seconds < 10**9):
            kind = "planner" if command_type.startswith((PLAN, DUE)) else "handler"
            raise ValueError(
                f"A {kind}'s timeout must be a timedelta or seconds, more than 0 and less than 1,000,000,000 seconds, "
                f"found {timeout!r:.80}."
            )

        first = "chunk" if gathering else "group" if buffer or command_type == EXHAUSTED else "command"

        def add(function: Function) -> Function:
            form = form_of(function, "planned" if command_type.startswith((PLAN, DUE)) else first)
            if form.fields is None:
                refuse_function(function, f"handle({first}, ctx)")
            if buffer is None:  # whose handlers answer by their verdicts
                refuse_result_type(function)
            existing = self._handlers.get((domain, command_type))
            if existing is not None:
                raise HandlerAlreadyRegisteredError(domain, command_type, _name(existing.function))
            self._refuse_mixture(domain, command_type)
            if concurrency_limit is not None:
                self._refuse_other_limit(concurrency_limit, domain, command_type, first)
            if rate_limit is not None and rate_limit.name is not None:
                self._refuse_other_rate(rate_limit, domain, command_type)
            self._handlers[domain, command_type] = Handler(
                form.call,
                retry or RetryPolicy(),
                seconds,
                is_async(function),
                rate_limit,
                isolate_poison,
                gathering,
                buffer,
                concurrency_limit,
                form.data_type,
                on_failure,
            )
            self.calls_after_failures = self.calls_after_failures or on_failure is not None
            if form.data_type is not None:
                self.data_types[domain, command_type] = form.data_type
            self.gathers = self.gathers or gathering is not None
            self.limits = self.limits or rate_limit is not None
            self.concurrency_limits = self.concurrency_limits or concurrency_limit is not None
            if concurrency_limit is not None and concurrency_limit.ordered:
                self.ordered.add(domain)
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

    def copy(self) -> Handlers:
        """The same handlers in a registry of their own."""
        other = Handlers()
        other.become(self)
        return other

    def become(self, other: Handlers) -> None:
        """Take over everything that the other registry knows, at once."""
        vars(self).update({name: copy(value) for name, value in vars(other).items()})

    def _refuse_other_limit(self, limit: ConcurrencyLimit, domain: str, command_type: str, first: str) -> None:
        """Handlers that share a limit agree on it; and only a single command has a field that names its key."""
        if isinstance(limit.by, str) and first != "command":
            raise InvalidOperationError(
                f"The concurrency limit of {domain}/{command_type} has by={limit.by!r}, but a {first} has no fields. "
                f"Give it a function: by=lambda {first}: ..."
            )
        if limit.ordered and first != "command":
            raise InvalidOperationError(
                f"The concurrency limit of {domain}/{command_type} is ordered, but only single commands run in order, "
                f"and this handler gets a {first}. Use `handler`, or leave out ordered=True."
            )
        name = limit.name_for(domain, command_type)
        for (of, type), handler in self._handlers.items():
            other = handler.concurrency_limit
            if other is not None and other.name_for(of, type) == name and other.calls != limit.calls:
                raise InvalidOperationError(
                    f"The concurrency limit {name!r} allows {counted(other.calls, 'call')} at a time for {of}/{type}, "
                    f"and {limit.calls} for {domain}/{command_type}. Give both the same number, or another name to one."
                )
            if other is not None and other.name_for(of, type) == name and other.ordered != limit.ordered:
                raise InvalidOperationError(
                    f"The concurrency limit {name!r} has ordered={other.ordered} for {of}/{type}, and "
                    f"ordered={limit.ordered} for {domain}/{command_type}. Write the same for both, or give another "
                    "name to one."
                )

    def _refuse_other_rate(self, limit: RateLimit, domain: str, command_type: str) -> None:
        """Handlers that share a rate limit agree on it; only their `by` may differ."""
        for (of, type), handler in self._handlers.items():
            other = handler.rate_limit
            if other is not None and other.name == limit.name and replace(other, by=limit.by) != limit:
                found, wanted = (f"{one.calls:g} per {one.per}, burst {one.burst}" for one in (limit, other))
                raise InvalidOperationError(
                    f"The rate limit {limit.name!r} is {wanted} for {of}/{type}, and {found} for "
                    f"{domain}/{command_type}. Give both the same figures, or another name to one."
                )

    def find(self, domain: str, command_type: str) -> Handler | None:
        return self._handlers.get((domain, command_type)) or BUILT_IN.get(command_type)

    @property
    def names(self) -> list[tuple[str, str]]:
        """Domain and type of the commands that have a handler of the application."""
        return [name for name in self._handlers if name[1] not in BUILT_IN]

    def exchange(self, domain: str, command_type: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Let another function of the same kind run these commands, and return the one that ran them until now."""
        handler = self._handlers[domain, command_type]
        self._handlers[domain, command_type] = replace(handler, function=function)
        return handler.function

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


class HandlerDecorators:
    """The decorators of a bus, which say what function runs which commands."""

    handlers: Handlers

    def handler(
        self, domain: str, command_type: str, **options: Unpack[HandlerOptions]
    ) -> Callable[[Function], Function]:
        """Register the function below to run commands of this `command_type`; the function is returned unchanged.

        It is called with the `Command` and a `HandlerContext`. If its first parameter is annotated with another type,
        such as a dataclass or a pydantic model, it gets the data of the command as that type. It may be `async def`, or
        `def`: then it runs in a thread. What it returns is kept as the command's result. `HandlerOptions` says what the
        options mean.
        """
        refuse_unknown("handler", options, HandlerOptions)
        return self.handlers.register(domain, command_type, **options)

    def bulk_handler(
        self, domain: str, command_type: str, **options: Unpack[BulkOptions]
    ) -> Callable[[Function], Function]:
        """Register the function below to run commands of this `command_type` in chunks of up to `size`.

        It is called with a `Chunk` and a `ChunkContext` once `size` commands were claimed, or `max_bytes` of data, or
        `max_wait` after the first one. If it returns, all are completed, with what it returns as their result. If it
        raises, all are tried again. `chunk.succeed` and `chunk.fail` judge one by one. Each command has its own
        attempts, result and batch, as with `handler`. `BulkOptions` says what the options mean.
        """
        refuse_unknown("bulk_handler", options, BulkOptions)
        gathering, others = gather(options)
        return self.handlers.register(domain, command_type, gathering=gathering, **others)

    def planner(self, domain: str, stage: str, **options: Unpack[PolicyOptions]) -> Callable[[Function], Function]:
        """Register the function below to plan every stage of the name `stage`, of any job in the domain.

        It is called with a `FinishedStage`, the stage before, and a `HandlerContext`, and returns the `BatchCommand`s
        of its stage. If it returns none, the stage is skipped. It may be `async def`, or `def`: then it runs in a
        thread. Like any handler it may be called again if it fails or its worker dies: what it has planned begins once.
        The function is returned unchanged.
        """
        refuse_unknown("planner", options, PolicyOptions)
        limits = InputLimits()
        refuse(wrong_name(domain, "domain", limits) + wrong_stage(stage, "stage", limits), writes=False)
        add = self.handlers.add(domain, PLAN + stage, **options)

        def register(function: Function) -> Function:
            refuse_function(function, "plan(stage, ctx)", kind="planner")
            add(_planner(function))
            return function

        return register


def gather(options: BulkOptions) -> tuple[Gathering, GroupHandlerOptions]:
    """How a bulk handler wants its commands, and its other options; refuses what makes no chunk."""
    size, max_bytes, by = options.pop("size", 1000), options.pop("max_bytes", None), options.pop("by", None)
    max_wait = options.pop("max_wait", 2.0)
    require(whole(1, MOST_GATHERED), size=size)
    require(whole(1, 2**31 - 1), **given(max_bytes=max_bytes))
    seconds = max_wait.total_seconds() if isinstance(max_wait, timedelta) else max_wait
    if type(seconds) not in (int, float) or not 0 <= seconds < 10**9:
        raise ValueError(f"max_wait must be a timedelta or seconds from 0 on, found {max_wait!r:.80}.")
    if by is not None and (not callable(by) or is_async(by)):
        raise ValueError(f"by must be a function of a command, not one with async def, found {by!r:.80}.")
    return Gathering(size, float(seconds), max_bytes, by), options


def _planner(function: Callable[..., Any]) -> Callable[..., Any]:
    """A handler that begins a stage with what the function returns, in the transaction that completes the step."""

    @wraps(function)
    async def plan(command: Command, ctx: Any) -> dict[str, Any] | None:
        return await plan_stage(function, command, ctx)

    @wraps(function)
    def plan_in_thread(command: Command, ctx: Any) -> dict[str, Any] | None:
        return plan_stage_in_thread(function, command, ctx)

    return plan if is_async(function) else plan_in_thread


def refuse_function(function: object, example: str, *, kind: str = "handler") -> None:
    """A function that cannot be called would only be found out with its first command, which would pay for it."""
    if not callable(function):
        raise ValueError(f"A {kind} must be a function, found {function!r:.80}.")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have none
        return
    try:
        signature.bind(None, None)
    except TypeError:
        found = f"{_name(function)}{signature}."
        if "self" in signature.parameters:
            found += f" Declare methods with `@busload.{kind}`, and call bus.register()."
        raise ValueError(f"A {kind} is called with two arguments, e.g. `async def {example}`; found {found}") from None


def _name(function: Callable[..., Any]) -> str:
    if (name := getattr(function, "__qualname__", None)) is None:  # a partial, or an object that can be called
        return f"{function!r:.120}"
    return f"{function.__module__}.{name}"
