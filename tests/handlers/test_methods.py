"""Handlers that are methods of an object: declared in the class, registered all at once or not at all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from busload import (
    BatchCommand,
    Chunk,
    ChunkContext,
    Command,
    CommandBus,
    HandlerContext,
    InvalidCommandError,
    RateLimit,
    RetryPolicy,
    Stage,
    SyncCommandBus,
    SyncHandlerContext,
    Worker,
    WorkerSettings,
    bulk_handler,
    handler,
    planner,
)
from busload.errors import HandlerAlreadyRegisteredError, InvalidOperationError
from busload.jobs import FinishedStage

POLICY = RetryPolicy(max_attempts=7, backoff=(1,))


class Till:
    """A service with state, some handlers, and some methods that are none."""

    def __init__(self, name: str = "till") -> None:
        self.name, self.seen = name, list[Any]()

    @handler("payments", "Debit", retry=POLICY, timeout=3, rate_limit=RateLimit(1000))
    async def debit(self, command: Command, ctx: HandlerContext) -> dict[str, Any]:
        return {"by": self.name, "debited": command.data["amount"]}

    @handler("payments", "Credit")
    def credit(self, command: Command, ctx: SyncHandlerContext) -> str:
        return f"credited by {self.name}"

    @bulk_handler("payments", "Report", size=10, max_wait=0.01)
    async def report(self, chunk: Chunk, ctx: ChunkContext) -> int:
        self.seen += [command.data for command in chunk]
        return len(chunk)

    @planner("payments", "second")
    async def plan(self, stage: FinishedStage, ctx: HandlerContext) -> list[BatchCommand]:
        return [BatchCommand("Debit", data={"amount": 2})]

    @handler("payments", "Hidden")
    async def _hidden(self, command: Command, ctx: HandlerContext) -> None: ...

    def helper(self, command: Command, ctx: HandlerContext) -> None: ...


def types_of(bus: CommandBus | SyncCommandBus) -> list[str]:
    return sorted(type for _, type in bus.handlers._handlers)


async def test_methods_of_an_object_run_commands(bus: CommandBus, worker_settings: WorkerSettings) -> None:
    till = Till("first")
    bus.register(till)
    debit = await bus.send("payments", "Debit", {"amount": 5})
    credit = await bus.send("payments", "Credit")
    await bus.send_many("payments", [BatchCommand("Report", data=n) for n in range(3)])
    job_id = await bus.jobs.create("payments", [Stage("first", [BatchCommand("Credit")]), Stage("second")])
    await Worker(bus, settings=worker_settings).drain()
    results = [await bus.get_command("payments", sent.command_id) for sent in (debit, credit)]
    assert [found and found.result for found in results] == [{"by": "first", "debited": 5}, "credited by first"]
    assert sorted(till.seen) == [0, 1, 2]
    assert (await bus.jobs.wait("payments", job_id, 0)).status == "COMPLETED"


def test_options_are_those_of_the_decorators_of_a_bus() -> None:
    """On both faces"""
    for bus in (CommandBus("postgresql://nowhere"), SyncCommandBus("postgresql://nowhere")):
        bus.register(Till())
        debit, credit, report = (bus.handlers.find("payments", type) for type in ("Debit", "Credit", "Report"))
        assert debit and credit and report
        assert (debit.retry, debit.timeout, debit.is_async) == (POLICY, 3, True)
        assert (debit.rate_limit, bus.handlers.limits) == (RateLimit(1000), True)
        assert (credit.is_async, bus.handlers.threaded) == (False, True)
        assert report.gathering and report.gathering.size == 10
        assert bus.handlers.gathers


def test_private_methods_and_those_without_a_declaration_are_left_out() -> None:
    bus = CommandBus("postgresql://nowhere")
    bus.register(Till())
    assert types_of(bus) == ["Credit", "Debit", "Report", "busload.Plan.second"]


def test_a_duplicate_registers_none_of_an_object_and_the_first_handler_stays() -> None:
    bus = CommandBus("postgresql://nowhere")

    @bus.handler("payments", "Report")
    async def first(command: Any, ctx: Any) -> None: ...

    with pytest.raises(HandlerAlreadyRegisteredError, match=r"first.*stays") as refused:
        bus.register(Till())
    assert (refused.value.domain, refused.value.command_type) == ("payments", "Report")
    assert types_of(bus) == ["Report"]
    assert not (bus.handlers.gathers or bus.handlers.limits or bus.handlers.threaded)
    found = bus.handlers.find("payments", "Report")
    assert found and found.function is first


def test_several_objects_are_registered_all_or_none() -> None:
    class Mail:
        @handler("letters", "Send")
        def send(self, command: Any, ctx: Any) -> None: ...

    bus = CommandBus("postgresql://nowhere")
    with pytest.raises(HandlerAlreadyRegisteredError, match=r"Till\.debit"):
        bus.register(Mail(), Till("one"), Till("another"))
    assert types_of(bus) == []
    bus.register(Mail(), Till())
    assert bus.handlers.domains == ["letters", "payments"]
    with pytest.raises(HandlerAlreadyRegisteredError):
        bus.register(Till())


async def test_a_declared_method_stays_a_plain_method() -> None:
    """It can be called and tested like any other, with or without a bus"""
    command: Any = type("Fake", (), {"data": {"amount": 3}})()
    assert await Till("x").debit(command, None) == {"by": "x", "debited": 3}  # type: ignore[arg-type]
    assert Till.credit.__qualname__ == "Till.credit"

    def function(self: Any, command: Any, ctx: Any) -> None: ...

    assert handler("payments", "Debit")(function) is function


def test_inherited_methods_count_and_an_override_takes_the_place_of_the_one_below() -> None:
    class Special(Till):
        async def debit(self, command: Command, ctx: HandlerContext) -> dict[str, Any]:
            return {}

        @handler("payments", "CreditSpecial")
        def credit(self, command: Command, ctx: SyncHandlerContext) -> str:
            return ""

        report = None  # type: ignore[assignment]

    bus, special = CommandBus("postgresql://nowhere"), Special()
    bus.register(special)
    assert types_of(bus) == ["CreditSpecial", "Debit", "busload.Plan.second"]
    found = bus.handlers.find("payments", "Debit")
    assert found and found.function == special.debit and found.retry is POLICY


def test_one_method_may_run_several_types_and_need_no_instance() -> None:
    class Many:
        @handler("payments", "A")
        @handler("payments", "B")
        def both(self, command: Any, ctx: Any) -> None: ...

        @staticmethod
        @handler("payments", "C")
        def alone(command: Any, ctx: Any) -> None: ...

        @handler("payments", "D")
        @classmethod
        def of_class(cls, command: Any, ctx: Any) -> None: ...

        @property
        def trap(self) -> None:
            raise AssertionError("a property is not looked at")

    bus = CommandBus("postgresql://nowhere")
    bus.register(Many())
    assert types_of(bus) == ["A", "B", "C", "D"]


def test_a_wrapped_method_keeps_its_declaration() -> None:
    def logged(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(self: Any, command: Any, ctx: Any) -> Any:
            return function(self, command, ctx)

        return run

    class Logged:
        @logged
        @handler("payments", "A")
        def a(self, command: Any, ctx: Any) -> str:
            return "a"

    bus = CommandBus("postgresql://nowhere")
    bus.register(Logged())
    assert types_of(bus) == ["A"]


def test_what_cannot_be_registered_is_refused() -> None:
    """A class, an object without handlers, a method that takes too little"""
    bus = CommandBus("postgresql://nowhere")
    with pytest.raises(InvalidOperationError, match=r"found the class Till: pass Till\(\.\.\.\)"):
        bus.register(Till)
    with pytest.raises(InvalidOperationError, match=r"no public method .*@busload\.handler"):
        bus.register(Till(), object())

    class Short:
        @handler("payments", "A")
        def a(self, command: Any) -> None: ...

    with pytest.raises(ValueError, match=r"called with two arguments.*Short\.a"):
        bus.register(Till(), Short())
    assert types_of(bus) == []


def test_a_wrong_declaration_is_refused_where_it_is_written() -> None:
    wrong: Any = 5
    with pytest.raises(ValueError, match="retry must be a RetryPolicy"):
        handler("payments", "Debit", retry=wrong)
    with pytest.raises(InvalidCommandError):
        handler("not a name", "Debit")
    with pytest.raises(ValueError, match="size"):
        bulk_handler("payments", "Debit", size=0)
    with pytest.raises(ValueError, match="Only what a class defines"):
        handler("payments", "Debit")(Till().helper)


def test_the_decorator_of_a_bus_on_a_method_says_what_to_use() -> None:
    bus = CommandBus("postgresql://nowhere")
    with pytest.raises(ValueError, match=r"Declare methods with `@busload\.handler`, and call bus\.register\(\)"):

        class Wrong:
            @bus.handler("payments", "A")
            def a(self, command: Any, ctx: Any) -> None: ...
