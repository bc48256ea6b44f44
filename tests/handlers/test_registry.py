"""Which function runs a command: an explicit registry, one function per domain and type."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from busload import CommandBus, InvalidCommandError, RetryPolicy, SyncCommandBus
from busload.errors import HandlerAlreadyRegisteredError
from busload.handlers.registry import Handlers


def test_a_function_is_found_by_domain_and_type() -> None:
    handlers = Handlers()

    async def debit(command: Any, ctx: Any) -> None: ...

    handlers.register("payments", "Debit")(debit)
    found = handlers.find("payments", "Debit")
    assert found is not None
    assert (found.function, found.is_async, found.timeout) == (debit, True, None)
    assert (found.retry.max_attempts, found.retry.backoff) == (3, (10, 60, 300))
    assert handlers.find("crm", "Debit") is None
    assert handlers.find("payments", "debit") is None


def test_the_decorator_returns_the_function_unchanged() -> None:
    """On both faces"""

    def debit(command: Any, ctx: Any) -> None: ...

    for bus in (CommandBus("postgresql://nowhere"), SyncCommandBus("postgresql://nowhere")):
        assert bus.handler("payments", "Debit")(debit) is debit


def test_a_second_registration_is_refused_and_the_first_stays() -> None:
    handlers = Handlers()

    def first(command: Any, ctx: Any) -> None: ...

    def second(command: Any, ctx: Any) -> None: ...

    handlers.register("payments", "Debit")(first)
    with pytest.raises(HandlerAlreadyRegisteredError, match=r"first.*stays") as refused:
        handlers.register("payments", "Debit")(second)
    assert (refused.value.domain, refused.value.command_type) == ("payments", "Debit")
    found = handlers.find("payments", "Debit")
    assert found is not None
    assert found.function is first
    handlers.register("crm", "Debit")(second)
    handlers.register("payments", "Credit")(second)


def test_domains_are_those_with_handlers() -> None:
    """What a worker serves unless it is told"""
    handlers = Handlers()
    for domain, command_type in (("payments", "Debit"), ("crm", "Tell"), ("payments", "Credit")):
        handlers.register(domain, command_type)(print)
    assert handlers.domains == ["crm", "payments"]


def test_def_runs_in_a_thread_and_async_def_in_the_loop() -> None:
    """Also for objects that can be called"""

    class Sync:
        def __call__(self, command: Any, ctx: Any) -> None: ...

    class Async:
        async def __call__(self, command: Any, ctx: Any) -> None: ...

    async def function(command: Any, ctx: Any) -> None: ...

    handlers = Handlers()
    for name, callable_, is_async in (
        ("A", Sync(), False),
        ("B", Async(), True),
        ("C", function, True),
        ("D", lambda command, ctx: None, False),
    ):
        handlers.register("payments", name)(callable_)
        found = handlers.find("payments", name)
        assert found is not None
        assert found.is_async is is_async


@pytest.mark.parametrize("name", ["", "a b", "1a", None, "x" * 256, "a;b", "á"])
def test_names_are_checked(name: Any) -> None:
    for domain, command_type, path in ((name, "Debit", "/domain"), ("payments", name, "/command_type")):
        with pytest.raises(InvalidCommandError) as refused:
            Handlers().register(domain, command_type)
        assert (refused.value.code, refused.value.problems[0].path) == ("INVALID_NAME", path)


def test_a_timeout_is_a_time_span_or_seconds() -> None:
    """A bool is no number"""
    handlers = Handlers()
    good: list[timedelta | float] = [timedelta(seconds=2), 2, 2.0]
    for n, timeout in enumerate(good):
        handlers.register("payments", f"T{n}", timeout=timeout)(print)
        found = handlers.find("payments", f"T{n}")
        assert found is not None
        assert found.timeout == 2
    bad: list[Any] = [0, -1, timedelta(0), float("nan"), float("inf"), True, "5", 10**9]
    for timeout in bad:
        with pytest.raises(
            ValueError, match=r"timeout must be .* more than 0 and less than 1,000,000,000 seconds, found"
        ):
            Handlers().register("payments", "Debit", timeout=timeout)


def test_a_policy_comes_with_its_handler() -> None:
    handlers = Handlers()
    policy = RetryPolicy(max_attempts=7, backoff=(1,))
    handlers.register("payments", "Debit", retry=policy)(print)
    found = handlers.find("payments", "Debit")
    assert found is not None
    assert found.retry is policy


class Till:
    """What may be a handler besides a function."""

    def debit(self, command: Any, ctx: Any) -> None: ...

    def short(self, command: Any) -> None: ...

    def __call__(self, command: Any, ctx: Any) -> None: ...


def one(command: Any) -> None: ...
async def none() -> None: ...
def three(command: Any, ctx: Any, session: Any) -> None: ...
def keyword(command: Any, ctx: Any, *, session: Any) -> None: ...
def default(command: Any, ctx: Any, session: Any = None, *, retries: int = 3) -> None: ...
def anything(*args: Any, **kwargs: Any) -> None: ...


REGISTRATIONS: dict[str, tuple[str, str, Callable[[CommandBus], Callable[[Any], Any]]]] = {
    "handler": ("A handler", "handle(command, ctx)", lambda bus: bus.handler("payments", "Debit")),
    "bulk": ("A handler", "handle(chunk, ctx)", lambda bus: bus.bulk_handler("payments", "Debit")),
    "buffer": (
        "A handler",
        "handle(group, ctx)",
        lambda bus: bus.buffer("events", size=2, max_age=timedelta(1)).handler(),
    ),
    "exhausted": (
        "A handler",
        "handle(group, ctx)",
        lambda bus: bus.buffer("events", size=2, max_age=timedelta(1)).exhausted(),
    ),
    "planner": ("A planner", "plan(stage, ctx)", lambda bus: bus.planner("payments", "second")),
}


@pytest.mark.parametrize("kind", REGISTRATIONS)
@pytest.mark.parametrize(
    ("function", "found"),
    [
        (one, r"test_registry\.one\(command: 'Any'\)"),
        (none, r"test_registry\.none\(\)"),
        (three, r"three\(command: 'Any', ctx: 'Any', session: 'Any'\)"),
        (keyword, r"keyword\(.*session"),
        (Till.debit, r"Till\.debit\(self, command: 'Any', ctx: 'Any'\)"),
        (Till().short, r"Till\.short\(command: 'Any'\)"),
        (functools.partial(three, 1, 2), r"functools\.partial\(.*\(session: 'Any'\)"),
    ],
)
def test_a_function_that_cannot_be_called_as_a_handler_is_refused_at_once(kind: str, function: Any, found: str) -> None:
    named, wanted, register = REGISTRATIONS[kind]
    bus = CommandBus("postgresql://nowhere")
    with pytest.raises(ValueError) as refused:
        register(bus)(function)
    assert str(refused.value).startswith(f"{named} is called with two arguments, e.g. `async def {wanted}`; found ")
    assert re.search(found, str(refused.value))
    assert not bus.handlers.domains


@pytest.mark.parametrize("kind", REGISTRATIONS)
@pytest.mark.parametrize(
    "function",
    [default, anything, Till().debit, Till(), functools.partial(three, session=1), functools.partial(three, 1)],
)
def test_whatever_takes_two_arguments_can_be_a_handler(kind: str, function: Any) -> None:
    register = REGISTRATIONS[kind][2]
    assert register(CommandBus("postgresql://nowhere"))(function) is function
