"""What newcomers are told when they hold something wrong."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import msgspec
import psycopg
import pytest

from busload import (
    BatchCommand,
    CommandBus,
    Dedup,
    InvalidCommandError,
    RateLimit,
    RetryPolicy,
    Settings,
    Stage,
    SyncCommandBus,
    TaskTracker,
    Worker,
    WorkerSettings,
    task_key,
)
from busload.batches import FailureBudget
from busload.commands.payload import PayloadRefusedError, encode
from busload.errors import DatabaseReadOnlyError, InvalidOperationError, OutcomeUnknownError, kind_of
from tests.test_public import public_names

WRITTEN = "Nothing was written"
NOWHERE = "postgresql://nowhere"

QUESTIONS: dict[str, Callable[[CommandBus], Any]] = {
    "get_batch": lambda bus: bus.get_batch("a b", uuid4()),
    "list_batches": lambda bus: bus.list_batches("a b"),
    "list_batches status": lambda bus: bus.list_batches("payments", status="DONE"),  # type: ignore[arg-type]
    "list_batch_commands": lambda bus: bus.list_batch_commands("a b", uuid4()),
    "get_batch_audit_trail": lambda bus: bus.get_batch_audit_trail("a b", uuid4()),
    "get_command": lambda bus: bus.get_command("a b", uuid4()),
    "get_audit_trail": lambda bus: bus.get_audit_trail("a b", uuid4()),
    "get_dispatch": lambda bus: bus.get_dispatch("a b", uuid4()),
    "get_job": lambda bus: bus.jobs.get("a b", uuid4()),
    "list_jobs": lambda bus: bus.jobs.list("a b"),
    "explain_batch": lambda bus: bus.explain_batch("a b", uuid4()),
    "explain_command": lambda bus: bus.explain_command("a b", uuid4()),
    "trace": lambda bus: bus.trace("", domain="payments"),
    "list_limits": lambda bus: bus.limits.list(""),
    "pause_history": lambda bus: bus.domains.history("a b"),
    "troubleshooting.list": lambda bus: bus.troubleshooting.list("a b"),
    "troubleshooting.get": lambda bus: bus.troubleshooting.get("a b", uuid4()),
    "troubleshooting.groups": lambda bus: bus.troubleshooting.groups("a b"),
    "outbox.list": lambda bus: bus.outbox.list(domain="a b"),
    "tracker.history": lambda bus: TaskTracker(bus).history(""),
    "handler": lambda bus: bus.handler("a b", "Debit"),
    "handler type": lambda bus: bus.handler("payments", "busload.Group"),
    "planner": lambda bus: bus.planner("a b", "second"),
    "buffer": lambda bus: bus.buffer("events", size=0),
    "tracker": lambda bus: TaskTracker(bus, name=""),
    "Dedup": lambda bus: Dedup(window="soon"),  # type: ignore[arg-type]
    "task_key": lambda bus: task_key(),
    "RateLimit": lambda bus: RateLimit(1, name="a b"),
}

WRITES: dict[str, Callable[[CommandBus], Any]] = {
    "send": lambda bus: bus.send("a b", "Debit"),
    "send_many": lambda bus: bus.send_many("a b", [BatchCommand("Debit")]),
    "create_batch": lambda bus: bus.create_batch("a b", [BatchCommand("Debit")]),
    "create_job": lambda bus: bus.jobs.create("a b", [Stage("one", [BatchCommand("Debit")])]),
    "seal_batch": lambda bus: bus.seal_batch("a b", uuid4()),
    "cancel_batch": lambda bus: bus.cancel_batch("a b", uuid4(), reason="test"),
    "hold_batch": lambda bus: bus.hold_batch("a b", uuid4(), reason="test"),
    "reprioritize_batch": lambda bus: bus.reprioritize_batch("a b", uuid4(), 1),
    "set_batch_budget": lambda bus: bus.set_batch_budget("a b", uuid4(), FailureBudget(0.5)),
    "resume_batch": lambda bus: bus.resume_batch("a b", uuid4()),
    "cancel_job": lambda bus: bus.jobs.cancel("a b", uuid4(), reason="test"),
    "resume_job": lambda bus: bus.jobs.resume("a b", uuid4()),
    "pause": lambda bus: bus.domains.pause("a b"),
    "resume": lambda bus: bus.domains.resume("a b"),
    "reset_limit": lambda bus: bus.limits.reset(""),
    "prune": lambda bus: bus.prune(timedelta(0)),
    "retry": lambda bus: bus.troubleshooting.retry("a b", uuid4()),
    "outbox.retry": lambda bus: bus.outbox.retry(domain="a b"),
    "outbox.reroute": lambda bus: bus.outbox.reroute(domain="a b"),
    "buffer.add": lambda bus: bus.buffer("events", size=2, merge="keep_last", max_age=timedelta(1)).add(1),
}


@pytest.mark.parametrize("call", QUESTIONS)
async def test_a_question_or_declaration_does_not_say_that_nothing_was_written(bus: CommandBus, call: str) -> None:
    async def ask() -> None:
        if inspect.isawaitable(made := QUESTIONS[call](bus)):
            await made

    with pytest.raises(InvalidCommandError) as refused:
        await ask()
    assert WRITTEN not in str(refused.value)


@pytest.mark.parametrize("call", WRITES)
async def test_a_write_that_was_refused_says_that_nothing_was_written(bus: CommandBus, call: str) -> None:
    with pytest.raises(InvalidCommandError) as refused:
        await WRITES[call](bus)
    assert str(refused.value).endswith(f". {WRITTEN}.")


@pytest.mark.parametrize("kind", [kind for kind in public_names().values() if inspect.isclass(kind)])
def test_no_error_about_arguments_names_a_private_class(kind: type) -> None:
    """Python names a function by where it was defined."""
    for attribute in dir(kind):
        function = inspect.unwrap(inspect.getattr_static(kind, attribute))
        function = getattr(function, "__func__", function)
        ours = str(getattr(function, "__module__", "")).startswith("busload")
        if inspect.isfunction(function) and ours and (attribute == "__init__" or not attribute.startswith("_")):
            assert not any(part.startswith("_") for part in function.__qualname__.split(".")[:-1]), attribute


async def test_the_error_about_data_in_the_place_of_the_id_says_where_it_belongs(
    bus: CommandBus, sync_bus: SyncCommandBus
) -> None:
    wrong = BatchCommand("Debit", {"account": 7})  # type: ignore[arg-type]
    for call in (bus.create_batch("payments", [wrong]), bus.send_many("payments", [wrong])):
        with pytest.raises(
            InvalidCommandError, match=r"found \{'account': 7\}.*data is the third parameter: pass data="
        ) as refused:
            await call
        assert refused.value.problems[0].path == "/command_id"
    with pytest.raises(InvalidCommandError, match="data is the third parameter"):
        sync_bus.create_batch("payments", [wrong])
    text = BatchCommand("Debit", str(uuid4()))  # type: ignore[arg-type]
    with pytest.raises(InvalidCommandError, match=r"wanted a uuid\.UUID that is not nil; pass uuid\.UUID\(\.\.\.\)"):
        await bus.create_batch("payments", [text])


@pytest.mark.parametrize("wrong", [BatchCommand("Debit"), "Debit", {"Debit": 1}, 7, None])
async def test_what_is_no_list_of_commands_is_refused(bus: CommandBus, wrong: Any) -> None:
    for call in (bus.create_batch, bus.send_many):
        with pytest.raises(InvalidCommandError, match=r"/commands: found .*, wanted a list of BatchCommand"):
            await call("payments", wrong)


def test_the_error_about_a_wrong_type_names_the_type() -> None:
    any_kind: Any = WorkerSettings()
    with pytest.raises(ValueError, match=r"must be a Settings, found a busload\.settings\.WorkerSettings\."):
        CommandBus(NOWHERE, settings=any_kind)
    any_kind = Settings()
    with pytest.raises(ValueError, match=r"must be a WorkerSettings, found a busload\.settings\.Settings\."):
        Worker(CommandBus(NOWHERE), settings=any_kind)
    any_kind = NOWHERE
    with pytest.raises(ValueError, match=r"A Worker needs a CommandBus or SyncCommandBus, found a str\."):
        Worker(any_kind)
    any_kind = 10
    with pytest.raises(ValueError, match=r"backoff must hold seconds, e\.g\. \(10, 60\), found 10\."):
        RetryPolicy(3, any_kind)


async def test_a_time_limit_that_is_none_is_refused(bus: CommandBus, sync_bus: SyncCommandBus) -> None:
    wrong: Any
    for wrong in ("5s", float("nan"), [5]):
        for wait in (bus.wait_batch, bus.jobs.wait):
            with pytest.raises(ValueError, match="timeout must be a timedelta or seconds, 0 or more, found"):
                await wait("payments", uuid4(), timeout=wrong)
        for wait_here in (sync_bus.wait_batch, sync_bus.jobs.wait):
            with pytest.raises(ValueError, match="timeout must be a timedelta or seconds, 0 or more, found"):
                wait_here("payments", uuid4(), timeout=wrong)


class Session:
    """Stands for a connection of another library."""


class Invoice(msgspec.Struct):
    number: int


class Model:
    """As pydantic's models are."""

    def model_dump(self, *, mode: str) -> dict[str, int]:
        return {"number": 7}


class Attrs:
    __attrs_attrs__ = ()


@dataclass
class Data:
    number: int = 7


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (Invoice(7), "pass msgspec.to_builtins(value)"),
        (Model(), 'pass value.model_dump(mode="json")'),
        (Attrs(), "pass attrs.asdict(value)"),
        (Data(), "pass dataclasses.asdict(value)"),
        (uuid4(), "pass str(value)"),
        (Decimal(1), "pass str(value)"),
    ],
)
def test_the_error_says_how_a_value_without_json_form_becomes_json(value: Any, advice: str) -> None:
    with pytest.raises(PayloadRefusedError) as refused:
        encode({"value": value})
    assert str(refused.value).endswith(f"; {advice}")


async def test_a_connection_of_another_library_is_called_by_its_whole_name(
    bus: CommandBus, sync_bus: SyncCommandBus
) -> None:
    theirs: Any = Session()
    name = rf"is a {Session.__module__}\.Session; this bus joins psycopg\."
    with pytest.raises(InvalidOperationError, match=name):
        await bus.send("payments", "Debit", conn=theirs)
    with pytest.raises(InvalidOperationError, match=name):
        sync_bus.send("payments", "Debit", conn=theirs)
    async with await psycopg.AsyncConnection.connect(bus.dsn) as conn:
        with pytest.raises(InvalidOperationError, match=r"is a psycopg\.AsyncConnection; this bus joins"):
            sync_bus.send("payments", "Debit", conn=conn)  # type: ignore[arg-type]
    Session.__module__, Session.__qualname__ = "asyncpg.connection", "Connection"
    with pytest.raises(InvalidOperationError, match=r"is an asyncpg\.connection\.Connection;"):
        await bus.send("payments", "Debit", conn=theirs)


@pytest.mark.parametrize(
    "module", ["sqlalchemy.orm", "django.utils", "asyncpg", "psycopg2.extensions", "shop.database"]
)
def test_the_error_about_another_connection_says_what_can_be_passed(sync_bus: SyncCommandBus, module: str) -> None:
    foreign = type("Connection", (), {"__module__": module})()
    listed = (
        r"Connection; this bus joins psycopg\.Connection, the Connection and the Session of SQLAlchemy .* or a conn"
    )
    with pytest.raises(InvalidOperationError, match=listed):
        sync_bus.send("payments", "Debit", conn=foreign)


def test_an_error_names_a_kind_with_its_article() -> None:
    assert [kind_of(value) for value in (7, "text", None, UUID(int=1), [], object())] == [
        "an int",
        "a str",
        "None",
        "a uuid.UUID",
        "a list",
        "an object",
    ]


def test_an_unknown_outcome_says_of_what() -> None:
    one = uuid4()
    assert f"while command {one} was being committed" in str(OutcomeUnknownError(command_ids=[one]))
    assert "while a call of 1,234 commands was being committed" in str(OutcomeUnknownError(command_ids=[one] * 1234))


@pytest.mark.parametrize(
    ("standby", "joined", "said"),
    [
        (True, True, r"connection that this call joins is to database 'shop' on a standby.*target_session_attrs"),
        (True, False, r"connection of the bus is to database 'shop' on a standby.*Connect to the primary"),
        (False, True, r"joins has a read-only transaction of database 'shop'.*READ WRITE"),
        (False, False, r"connection of the bus has a read-only transaction.*default_transaction_read_only"),
    ],
)
def test_a_database_that_takes_no_writes_says_why_and_what_to_do(standby: bool, joined: bool, said: str) -> None:
    refused = DatabaseReadOnlyError("shop", standby=standby, joined=joined)
    assert re.search(said, str(refused)) and "Nothing of this call was written." in str(refused)
    assert (refused.database, refused.standby, refused.sqlstate) == ("shop", standby, "25006")
