"""Handlers that say by an annotation which type their data has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import date, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, TypedDict
from uuid import UUID, uuid4

import attrs
import msgspec
import psycopg
import pydantic
import pytest

from busload import (
    BatchCommand,
    BatchJob,
    Chunk,
    ChunkContext,
    Command,
    CommandBus,
    HandlerContext,
    InvalidCommandError,
    Stage,
    SyncHandlerContext,
    handler,
)
from busload.batches import FailureBudget
from busload.handlers.registry import Handlers
from tests.given import DOMAIN, Database, Given

if TYPE_CHECKING:
    from busload import Command as OnlyForCheckers
    from busload.commands.command import CommandStatus as Status


class Line(msgspec.Struct):
    sku: str
    price: Decimal


@dataclasses.dataclass
class Report:
    to: str


@dataclasses.dataclass
class ReportOfBatch:
    to: str
    batch: dict[str, Any]


class StageOfJob(msgspec.Struct):
    completed_count: int


class JobInReport(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=3)]
    stages: list[StageOfJob]


class ReportOfJob(msgspec.Struct):
    to: str
    job: JobInReport


@dataclasses.dataclass
class DataclassOrder:
    customer: UUID
    due: date
    lines: list[Line]


@attrs.define
class AttrsOrder:
    customer: UUID
    due: date
    lines: list[Line]


class StructOrder(msgspec.Struct):
    customer: UUID
    due: date
    lines: list[Line]


class TypedDictOrder(TypedDict):
    customer: UUID
    due: date
    lines: list[Line]


class PydanticLine(pydantic.BaseModel):
    sku: str
    price: Decimal


class PydanticOrder(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)
    customer: Annotated[UUID, pydantic.Field(alias="customerId")]
    due: date
    lines: list[PydanticLine]


@pydantic.dataclasses.dataclass
class PydanticDataclassOrder:
    customer: UUID
    due: date
    lines: list[PydanticLine]


ORDERS = [
    DataclassOrder,
    AttrsOrder,
    StructOrder,
    TypedDictOrder,
    PydanticOrder,
    PydanticDataclassOrder,
]
CUSTOMER = uuid4()


def data_of(kind: Any, **changes: Any) -> dict[str, Any]:
    customer = "customerId" if kind is PydanticOrder else "customer"
    return {customer: str(CUSTOMER), "due": "2026-11-18", "lines": [{"sku": "a", "price": "9.90"}]} | changes


def taking(kind: Any, seen: list[Any]) -> Callable[..., Any]:
    async def handle(order: Any, ctx: HandlerContext) -> None:
        seen.append(order)

    handle.__annotations__["order"] = kind
    return handle


@pytest.mark.parametrize("kind", ORDERS, ids=lambda kind: kind.__name__)
async def test_the_handler_gets_its_data_as_the_annotated_type(bus: CommandBus, given: Given, kind: Any) -> None:
    seen: list[Any] = []
    bus.handler("payments", "Order")(taking(kind, seen))
    await bus.send("payments", "Order", data_of(kind))
    await given.drained()
    [order] = seen
    if kind is TypedDictOrder:
        assert (order["customer"], order["due"]) == (CUSTOMER, date(2026, 11, 18))
        assert order["lines"][0].price == Decimal("9.90")
    else:
        assert type(order) is kind
        assert (order.customer, order.due) == (CUSTOMER, date(2026, 11, 18))
        assert (order.lines[0].sku, order.lines[0].price) == ("a", Decimal("9.90"))


@pytest.mark.parametrize("kind", ORDERS, ids=lambda kind: kind.__name__)
async def test_data_that_does_not_fit_is_refused_when_it_is_sent(
    bus: CommandBus, database: Database, kind: Any
) -> None:
    """By every call that sends; the error names the path, and nothing is written"""
    bus.handler("payments", "Order")(taking(kind, []))
    bad = data_of(kind, lines=[{"sku": "a", "price": "1"}, {"sku": 7, "price": "1"}])
    commands = [BatchCommand("Order", data=data_of(kind)), BatchCommand("Order", data=bad)]
    before = database.everything()
    with pytest.raises(InvalidCommandError, match=r"INVALID_DATA at /data/lines/1/sku: does not fit") as alone:
        await bus.send("payments", "Order", bad)
    assert [(one.code, one.path) for one in alone.value.problems] == [("INVALID_DATA", "/data/lines/1/sku")]
    with pytest.raises(InvalidCommandError) as many:
        await bus.send_many("payments", commands)
    with pytest.raises(InvalidCommandError) as batch:
        await bus.create_batch("payments", iter(commands))
    for refused in (many, batch):
        assert [(one.index, one.path) for one in refused.value.problems] == [(1, "/data/lines/1/sku")]
    assert database.everything() == before
    async with bus.open_batch("payments") as open_batch:
        with pytest.raises(InvalidCommandError, match="/data/lines/1/sku"):
            await open_batch.add("Order", bad)
    assert open_batch.added == 0


@pytest.mark.parametrize("kind", ORDERS, ids=lambda kind: kind.__name__)
async def test_data_that_does_not_fit_waits_for_a_person_when_it_runs(
    bus: CommandBus, given: Given, dsn: str, kind: Any
) -> None:
    """It was sent by a program that does not know the handler; the handler is not called"""
    seen: list[Any] = []
    bus.handler("payments", "Order")(taking(kind, seen))
    async with CommandBus(dsn) as sender:
        sent = await sender.send("payments", "Order", data_of(kind, due="tomorrow"))
    await given.drained()
    [item] = await bus.troubleshooting.list("payments")
    assert (item.command_id, item.reason, item.attempts) == (sent.command_id, "PERMANENT", 1)
    assert (item.last_error_code, item.last_error_type) == ("INVALID_DATA", "PermanentCommandError")
    assert item.last_error_message is not None
    assert item.last_error_message.startswith("/data/due: does not fit")
    assert item.details["problems"][0]["path"] == "/data/due"
    assert seen == []


def endless() -> dict[str, Any]:
    data: dict[str, Any] = {}
    data["lines"] = [data]
    return data


@pytest.mark.parametrize("kind", ORDERS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "bad", ["\ud800", {"due": "\ud800"}, {"\ud800": 1}, endless()], ids=["text", "date", "key", "endless"]
)
async def test_what_is_not_even_json_is_refused_as_data_that_does_not_fit(bus: CommandBus, kind: Any, bad: Any) -> None:
    bus.handler("payments", "Order")(taking(kind, []))
    with pytest.raises(InvalidCommandError, match="INVALID_DATA at /data") as refused:
        await bus.send("payments", "Order", {**data_of(kind), **bad} if isinstance(bad, dict) else bad)
    assert [one.code for one in refused.value.problems] == ["INVALID_DATA"]


async def test_every_misfit_that_pydantic_finds_is_named(bus: CommandBus) -> None:
    bus.handler("payments", "Order")(taking(PydanticOrder, []))
    with pytest.raises(InvalidCommandError) as refused:
        await bus.send("payments", "Order", {"due": 5, "lines": [{}]})
    assert [one.path for one in refused.value.problems] == [
        "/data/customerId",
        "/data/due",
        "/data/lines/0/sku",
        "/data/lines/0/price",
    ]


async def test_every_way_in_is_checked_when_the_handler_is_known(bus: CommandBus, database: Database) -> None:
    """Stages of jobs and what undoes them, callbacks, schedules, failure budgets: the error names the place"""

    @bus.handler("payments", "Line")
    async def line(data: Line, ctx: HandlerContext) -> None: ...

    @bus.handler("payments", "Report")
    async def report(data: ReportOfBatch, ctx: HandlerContext) -> None: ...

    good, bad = BatchCommand("Line", data={"sku": "a", "price": "1"}), BatchCommand("Line", data={"sku": "a"})
    short, stage = BatchCommand("Report"), Stage("first", [good])
    every: Any = {"every": timedelta(hours=1), "domain": "payments"}

    async def schedule(command: BatchCommand) -> None:
        bus.schedule("hourly", **every, command=command)

    sends: dict[str, Callable[[], Any]] = {
        "/stages/0/commands/1/data": lambda: bus.jobs.create("payments", [Stage("first", [good, bad])]),
        "/stages/1/commands/0/data": lambda: bus.jobs.create("payments", [stage, Stage("later", [bad])]),
        "/stages/0/compensate/0/data": lambda: bus.jobs.create("payments", [Stage("first", [good], compensate=bad)]),
        "/jobs/0/stages/0/commands/0/data": lambda: bus.jobs.create_batch("payments", [BatchJob([Stage("a", [bad])])]),
        "/on_complete/data": lambda: bus.create_batch("payments", [good], on_complete=short),
        "/budget/on_exceeded/data": lambda: bus.create_batch(
            "payments", [good], budget=FailureBudget(share=0.1, on_exceeded=short)
        ),
        "/command/data": lambda: schedule(bad),
    }
    for path, call in sends.items():
        with pytest.raises(InvalidCommandError, match="INVALID_DATA") as refused:
            await call()
        assert [one.path for one in refused.value.problems] == [path]
    with pytest.raises(InvalidCommandError, match="INVALID_DATA at /on_complete/data"):
        await bus.jobs.create("payments", [stage], on_complete=short)
    with pytest.raises(InvalidCommandError, match="INVALID_DATA at /on_complete/data"):
        bus.open_batch("payments", on_complete=short)
    with pytest.raises(InvalidCommandError, match="INVALID_DATA at /on_complete/data"):
        await bus.jobs.create_batch("payments", [BatchJob([stage])], on_complete=short)
    assert database.count("command") == 0


async def test_a_callback_gets_its_own_data_and_the_batch_or_the_job_in_the_type_of_its_handler(
    bus: CommandBus, given: Given
) -> None:
    """A model may be its data, and a type that wants what the batch is cannot refuse what is not known yet"""
    seen: list[Any] = []

    @bus.handler("payments", "Report")
    async def report(data: ReportOfBatch, ctx: HandlerContext) -> None:
        seen.append((data.to, data.batch["completed_count"]))

    @bus.handler("payments", "JobReport")
    async def job_report(data: ReportOfJob, ctx: HandlerContext) -> None:
        seen.append((data.to, data.job.stages[0].completed_count))

    given.handler("Do")
    to_rosa = BatchCommand("Report", data=Report("rosa"), domain="payments")
    await bus.create_batch("payments", [BatchCommand("Do")], on_complete=to_rosa)
    to_sue = BatchCommand("JobReport", data={"to": "sue"})
    await bus.jobs.create("payments", [Stage("first", [BatchCommand("Do")])], name="nightly", on_complete=to_sue)
    await given.drained(domains=["payments"])
    assert sorted(seen) == [("rosa", 1), ("sue", 1)]


@pytest.mark.parametrize("known", [True, False], ids=["known handler", "unknown handler"])
@pytest.mark.parametrize("kind", [one for one in ORDERS if one is not TypedDictOrder], ids=lambda kind: kind.__name__)
async def test_a_model_can_be_sent(bus: CommandBus, given: Given, kind: Any, known: bool) -> None:
    """Also if this program does not know who will run it"""
    seen: list[Any] = []
    handle = taking(kind, seen)
    if known:
        bus.handler("payments", "Order")(handle)
    line = PydanticLine if "Pydantic" in kind.__name__ else Line
    order = kind(
        **{"customerId" if kind is PydanticOrder else "customer": CUSTOMER},
        due=date(2026, 11, 18),
        lines=[line(sku="a", price=Decimal("9.90"))],
    )
    sent = await bus.send("payments", "Order", order)
    [other] = await bus.send_many("payments", [BatchCommand("Order", data=order)])
    for one in (sent, other):
        assert (await given.command_now(one.command_id)).data == data_of(kind)
    if not known:
        bus.handler("payments", "Order")(handle)
    await given.drained()
    assert seen == [order, order]


async def test_a_model_whose_values_do_not_fit_is_refused(bus: CommandBus, database: Database) -> None:
    """Python lets a dataclass hold anything"""
    bus.handler("payments", "Order")(taking(DataclassOrder, []))
    wrong: Any = DataclassOrder(customer="nobody", due=date(2026, 1, 1), lines=[])  # type: ignore[arg-type]
    with pytest.raises(InvalidCommandError, match=r"INVALID_DATA at /data/customer"):
        await bus.send("payments", "Order", wrong)

    @dataclasses.dataclass
    class Holder:
        connection: Any

    for handlers_type in ("Order", "Unknown"):
        with pytest.raises(InvalidCommandError, match=r"found Database, which has no JSON form|UNSERIALISABLE"):
            await bus.send("payments", handlers_type, Holder(database))


async def test_a_command_with_a_type_has_converted_data_and_all_else(bus: CommandBus, given: Given) -> None:
    seen: list[Any] = []

    @bus.handler("payments", "Order")
    async def handle(command: Command[StructOrder], ctx: HandlerContext) -> None:
        seen.append((command.data.due, command.task_key, command.command_id))

    @bus.handler("payments", "Thread")
    def handle_in_thread(order: StructOrder, ctx: SyncHandlerContext) -> None:
        seen.append(order.due)

    sent = await bus.send("payments", "Order", data_of(StructOrder), task_key="7")
    await bus.send("payments", "Thread", data_of(StructOrder))
    await given.drained()
    assert date(2026, 11, 18) in seen
    assert (date(2026, 11, 18), "7", sent.command_id) in seen


async def test_a_transaction_that_is_made_again_gets_fresh_data(bus: CommandBus, given: Given) -> None:
    calls: list[Any] = []

    @bus.handler("payments", "Order")
    async def handle(command: Command[StructOrder], ctx: HandlerContext) -> None:
        calls.append((type(command.data), len(command.data.lines)))
        command.data.lines.clear()  # the next call must not see this
        async with ctx.transaction() as conn:
            if len(calls) == 1:
                await conn.execute("DO $$ BEGIN RAISE SQLSTATE '40001'; END $$")

    sent = await bus.send("payments", "Order", data_of(StructOrder))
    await given.drained()
    assert (await given.command_now(sent.command_id)).status == "COMPLETED"
    assert calls == [(StructOrder, 1), (StructOrder, 1)]


async def test_the_items_of_a_typed_chunk_are_converted_and_misfits_leave_alone(
    bus: CommandBus, given: Given, dsn: str
) -> None:
    seen: list[Any] = []

    @bus.bulk_handler("payments", "Order", max_wait=0)
    async def handle(chunk: Chunk[StructOrder], ctx: ChunkContext) -> None:
        seen.extend(item.data for item in chunk)
        assert all(item.command is not None and item.command.data is item.data for item in chunk)

    with pytest.raises(InvalidCommandError, match="/data/due"):
        await bus.send("payments", "Order", data_of(StructOrder, due=5))
    async with CommandBus(dsn) as sender:
        datas = [data_of(StructOrder), data_of(StructOrder, due=5), data_of(StructOrder)]
        sent = await sender.send_many("payments", [BatchCommand("Order", data=one) for one in datas])
    await given.drained()
    assert [type(one) for one in seen] == [StructOrder, StructOrder]
    statuses = [(await given.command_now(one.command_id)).status for one in sent]
    assert statuses == ["COMPLETED", "IN_TROUBLESHOOTING_QUEUE", "COMPLETED"]
    assert (await given.command_now(sent[1].command_id)).last_error_code == "INVALID_DATA"


async def test_what_a_handler_sends_in_its_transaction_is_checked_too(bus: CommandBus, given: Given) -> None:
    bus.handler("payments", "Order")(taking(StructOrder, []))
    refusals: list[str] = []

    @bus.handler("payments", "Async")
    async def send(command: Command, ctx: HandlerContext) -> None:
        async with ctx.transaction():
            with pytest.raises(InvalidCommandError) as refused:
                await ctx.send("payments", "Order", {})
            refusals.append(refused.value.problems[0].code)

    @bus.handler("payments", "Thread")
    def send_in_thread(command: Command, ctx: SyncHandlerContext) -> None:
        with pytest.raises(InvalidCommandError) as refused:
            ctx.send("payments", "Order", {})
        refusals.append(refused.value.problems[0].code)

    await bus.send("payments", "Async")
    await bus.send("payments", "Thread")
    await given.drained()
    assert refusals == ["INVALID_DATA", "INVALID_DATA"]


async def test_a_method_may_have_typed_data(bus: CommandBus, given: Given) -> None:
    class Accounts:
        opened: str | None = None

        @handler("payments", "Open")
        async def open(self, line: Line, ctx: HandlerContext) -> None:
            self.opened = line.sku

    accounts = Accounts()
    bus.register(accounts)
    await bus.send("payments", "Open", {"sku": "x", "price": "1"})
    await given.drained()
    assert accounts.opened == "x"


def test_handlers_without_a_type_are_registered_as_they_are() -> None:
    """They pay nothing: the worker calls the very function"""
    handlers = Handlers()

    async def bare(command, ctx): ...  # type: ignore[no-untyped-def]

    async def command(command: Command, ctx: HandlerContext) -> None: ...

    async def anything(command: Any, ctx: Any) -> None: ...

    async def command_of_anything(command: Command[Any], ctx: HandlerContext) -> None: ...

    async def only_for_checkers(command: OnlyForCheckers, ctx: HandlerContext) -> None: ...

    only_for_checkers.__annotations__["command"] = "somewhere.Command"
    for function in (bare, command, anything, command_of_anything, only_for_checkers):
        handlers.register("payments", function.__name__)(function)
        found = handlers.find("payments", function.__name__)
        assert found is not None
        assert found.function is function
    assert handlers.data_types == {}


def test_a_type_is_found_where_the_handler_is_defined() -> None:
    """Also one that is defined in a function, as in this test"""

    class Local(msgspec.Struct):
        amount: int

    handlers = Handlers()

    @handlers.register("payments", "Local")
    async def local(data: Local, ctx: HandlerContext) -> None: ...

    assert handlers.data_types["payments", "Local"].convert({"amount": 5}) == Local(5)


def test_an_annotation_that_cannot_be_used_is_refused() -> None:
    async def unknown(data: Status, ctx: HandlerContext) -> None: ...

    async def no_json(data: psycopg.AsyncConnection[Any], ctx: HandlerContext) -> None: ...

    async def ambiguous(data: Line | StructOrder, ctx: HandlerContext) -> None: ...

    handlers = Handlers()
    with pytest.raises(ValueError, match=r"'Status' for 'data', which cannot be found.*outside of TYPE_CHECKING"):
        handlers.register("payments", "A")(unknown)
    with pytest.raises(ValueError, match=r"AsyncConnection has no JSON form\), wanted Command, a pydantic model"):
        handlers.register("payments", "A")(no_json)
    with pytest.raises(ValueError, match="must be tagged"):
        handlers.register("payments", "A")(ambiguous)
    assert handlers.find("payments", "A") is None


@pytest.mark.parametrize("name", ["ctx", "context"])
@pytest.mark.parametrize(
    "annotation", [Line, Report, TypedDictOrder, PydanticOrder, Command, Command[Line], "somewhere.Command", "Line"]
)
def test_a_context_without_annotation_before_the_command_is_refused(name: str, annotation: Any) -> None:
    """It would be given the command, and each attempt would fail."""

    async def swapped(ctx, data): ...  # type: ignore[no-untyped-def]

    async def swapped_too(context, data): ...  # type: ignore[no-untyped-def]

    function = swapped if name == "ctx" else swapped_too
    function.__annotations__["data"] = annotation
    handlers = Handlers()
    said = (
        rf"has '{name}' before 'data'. The command \(or its data\) comes first and the context second: \(data, {name}\)"
    )
    with pytest.raises(ValueError, match=said):
        handlers.register("payments", "A")(function)
    assert handlers.find("payments", "A") is None


def test_a_name_alone_does_not_make_a_context() -> None:
    handlers = Handlers()

    async def bare(ctx, data): ...  # type: ignore[no-untyped-def]

    async def context_second(context, ctx: HandlerContext): ...  # type: ignore[no-untyped-def]

    async def for_checkers(context, ctx: Status): ...  # type: ignore[no-untyped-def]

    async def keyword(ctx, other=None, *, data: Line | None = None): ...  # type: ignore[no-untyped-def]

    for function in (bare, context_second, for_checkers, keyword):
        handlers.register("payments", function.__name__)(function)
        found = handlers.find("payments", function.__name__)
        assert found is not None and found.function is function


def test_pydantic_tells_models_apart_that_msgspec_could_not() -> None:
    handlers = Handlers()

    @handlers.register("payments", "Either")
    async def either(data: PydanticLine | PydanticOrder | None, ctx: HandlerContext) -> None: ...

    convert = handlers.data_types["payments", "Either"].convert
    assert convert({"sku": "a", "price": "1"}) == PydanticLine(sku="a", price=Decimal(1))
    assert convert(None) is None


async def test_a_model_after_the_context_is_said_to_be_one_field(bus: CommandBus) -> None:
    """The two arguments were swapped: the data is meant to be the model, and would have to be {"data": {...}}."""

    @bus.handler(DOMAIN, "Swapped")
    async def swapped(ctx: HandlerContext, data: StructOrder) -> None: ...

    @bus.handler(DOMAIN, "Fields")
    async def fields(ctx: HandlerContext, order: int) -> None: ...

    with pytest.raises(InvalidCommandError) as refused:
        await bus.send(DOMAIN, "Swapped", {"order": 1})
    assert "each is a field of the data: its context comes first. With the data first, it gets all" in str(
        refused.value
    )
    with pytest.raises(InvalidCommandError) as refused:
        await bus.send(DOMAIN, "Fields", {})
    assert "its context comes first" not in str(refused.value)
