"""A failure can be seen: its traceback is kept with the attempt, shown to people, and logged once."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import Any

import pytest

from busload import (
    BusinessRuleError,
    Chunk,
    ChunkContext,
    Command,
    CommandBus,
    Group,
    HandlerContext,
    PermanentCommandError,
    RateLimitedError,
    RetryPolicy,
    SyncHandlerContext,
)
from tests.given import DOMAIN, Database, Given, raising

LINE = "    return command.data[\"b\"]\nKeyError: 'b'\n"


async def stumble(command: Command, ctx: HandlerContext) -> Any:
    return command.data["b"]


def failures(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if " failed" in record.getMessage() or " more like this" in record.msg]


async def test_every_failed_attempt_keeps_its_traceback(given: Given, bus: CommandBus) -> None:
    given.handler("Debit", stumble, retry=RetryPolicy(max_attempts=2, backoff=()))
    command_id = await given.sent("Debit", {"a": 1}, task_key="debit:1")
    await given.drained()

    first, second = await bus.trace("debit:1")
    assert first.traceback is not None and first.traceback.endswith(LINE)
    assert second.traceback == first.traceback
    assert first.traceback.startswith("Traceback (most recent call last):\n")
    assert "busload/worker/" not in first.traceback
    assert (await given.command_now(command_id)).last_traceback == first.traceback
    [item] = await bus.troubleshooting.list(DOMAIN)
    assert item.last_traceback == first.traceback
    assert await bus.troubleshooting.get(DOMAIN, command_id) == item
    trail = [event.details for event in await bus.get_audit_trail(DOMAIN, command_id) if event.details]
    assert [details["traceback"] for details in trail] == [first.traceback] * 2


async def test_a_thread_keeps_its_traceback(given: Given, bus: CommandBus) -> None:
    @bus.handler(DOMAIN, "Debit")
    def handle(command: Command, ctx: SyncHandlerContext) -> Any:
        return command.data["b"]

    command_id = await given.sent("Debit", {"a": 1})
    await given.drained()
    told = (await given.command_now(command_id)).last_traceback
    assert told is not None and told.endswith(LINE)


async def test_a_traceback_is_stored_once_and_does_not_change_the_cause(given: Given, database: Database) -> None:
    given.handler("Debit", stumble, retry=RetryPolicy(max_attempts=1))
    await given.sent("Debit", {"a": 1})
    await given.drained()
    [(error, fingerprint)] = database.rows("SELECT error, fingerprint FROM busload.troubleshooting")
    assert error == {"type": "KeyError", "kind": "TRANSIENT", "code": None, "message": "'b'"}
    plain = database.value("SELECT busload.fingerprint(%s::json)", json.dumps(error))
    assert fingerprint == plain
    assert fingerprint == database.value("SELECT busload.fingerprint(details) FROM busload.execution")


async def test_a_reply_brings_no_traceback(given: Given, bus: CommandBus) -> None:
    replies: list[Any] = []

    @bus.handler("orders", "DebitReply")
    async def hear(command: Command, ctx: HandlerContext) -> None:
        replies.append(command.data["error"])

    async def refuse(command: Command, ctx: HandlerContext) -> None:
        raise BusinessRuleError("Not owed.", code="NOT_OWED", details={"balance": -0.5})

    given.handler("Debit", refuse)
    await given.sent("Debit", reply_to="orders")
    await given.drained(domains=[DOMAIN, "orders"])
    assert replies == [
        {
            "type": "BusinessRuleError",
            "kind": "BUSINESS_RULE",
            "code": "NOT_OWED",
            "message": "Not owed.",
            "details": {"balance": -0.5},
        }
    ]


async def test_one_error_of_a_bulk_handler_is_kept_for_every_command_and_rendered_once(
    given: Given, bus: CommandBus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rendered = 0

    class Counted(KeyError):
        def __str__(self) -> str:
            nonlocal rendered
            rendered += 1
            return super().__str__()

    @bus.bulk_handler(DOMAIN, "Debit", size=200, max_wait=0)
    async def debit(chunk: Chunk, ctx: ChunkContext) -> None:
        raise Counted("b")

    batch_id = await given.batch(commands=200)
    await given.drained()
    found = await bus.list_batch_commands(DOMAIN, batch_id, limit=200)
    assert {command.last_error_message for command in found} == {"'b'"}
    [told] = {command.last_traceback for command in found}
    assert told is not None and 'raise Counted("b")' in told
    # By the description twice (message and traceback), by the log for its cause and when it is printed.
    assert rendered < 200 + 10
    first, rest = failures(caplog)
    assert "tried again in 10 s. Counted: 'b'" in first.getMessage()
    assert "and 199 more like this" in rest.getMessage()


async def test_a_group_keeps_its_traceback_and_is_logged_once(
    given: Given, bus: CommandBus, caplog: pytest.LogCaptureFixture
) -> None:
    contacts = bus.buffer("contacts", size=3)

    @contacts.handler(retry=RetryPolicy(max_attempts=1))
    async def sync(group: Group, ctx: HandlerContext) -> None:
        raise KeyError("b")

    await contacts.add_many([{"n": n} for n in range(3)])
    await contacts.flush()
    await given.drained(domains=["contacts"])
    [item] = await bus.troubleshooting.list("contacts")
    assert item.last_traceback is not None and item.last_traceback.endswith("raise KeyError(\"b\")\nKeyError: 'b'\n")
    [record] = failures(caplog)
    assert record.levelno == logging.ERROR
    assert "its attempts are used up; 3 events wait for a person" in record.getMessage()


async def test_a_time_out_says_where_the_handler_was(given: Given) -> None:
    async def slow(command: Command, ctx: HandlerContext) -> None:
        await asyncio.Event().wait()

    given.handler("Debit", slow, timeout=0.05)
    command_id = await given.sent()
    await given.drained()
    told = (await given.command_now(command_id)).last_traceback
    assert told is not None and "await asyncio.Event().wait()" in told and "did not finish within 0.05 s" in told


async def test_a_failure_is_logged_once_with_what_happens_next(
    given: Given, bus: CommandBus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "busload")

    async def fail(command: Command, ctx: HandlerContext) -> None:
        raise {"Retry": KeyError("b"), "Park": PermanentCommandError("closed"), "Refuse": BusinessRuleError("no")}[
            command.command_type
        ]

    expected = {
        "Retry": (logging.WARNING, "tried again in 10 s. KeyError: 'b'", "FAILED_ATTEMPT", None, 10.0),
        "Park": (logging.ERROR, "waits in troubleshooting (PERMANENT)", "TROUBLESHOOTING", "PERMANENT", None),
        "Refuse": (logging.INFO, "ended as FAILED. BusinessRuleError: no", "FAILED", None, None),
    }
    for command_type, (level, words, outcome, reason, retry_in) in expected.items():
        caplog.clear()
        given.handler(command_type, fail)
        command_id = await given.sent(command_type, task_key=f"task:{command_type}")
        await given.drained()
        [record] = failures(caplog)
        assert (record.levelno, words in record.getMessage()) == (level, True)
        assert str(command_id) in record.getMessage() and f"task 'task:{command_type}'" in record.getMessage()
        said: Any = record.__dict__
        assert (said["command_id"], said["domain"], said["attempt"]) == (str(command_id), DOMAIN, 1)
        assert (said["command_type"], said["task_key"]) == (command_type, f"task:{command_type}")
        assert (said["batch_id"], said["outcome"], said["reason"], said["retry_in"]) == (
            None,
            outcome,
            reason,
            retry_in,
        )
        assert bool(record.exc_info) == (level > logging.INFO)
        assert ("in fail\n" in caplog.text) == (level > logging.INFO)


async def test_failures_of_one_cause_are_logged_as_one_and_a_number(
    given: Given, bus: CommandBus, caplog: pytest.LogCaptureFixture, database: Database
) -> None:
    async def fail(command: Command, ctx: HandlerContext) -> None:
        n = command.data["n"]
        raise ValueError(f"no account {n}" if n < 200 else "another cause")

    given.handler("Debit", fail)
    await given.batch(commands=201)
    await given.drained()
    said = [record.getMessage() for record in failures(caplog)]
    assert len(said) == 3
    assert sum("another cause" in line for line in said) == 1
    [summed_up] = [line for line in said if line.startswith("... and 199 more like this within ")]
    assert re.search(r"within (1 second|[1-9]\d+ seconds|[2-9] seconds): ", summed_up)
    assert database.value("SELECT count(*) FROM busload.execution WHERE details ->> 'traceback' IS NOT NULL") == 201


async def test_what_somebody_else_does_with_the_log_changes_nothing_for_a_command(given: Given) -> None:
    class Broken(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            if record.levelno >= logging.WARNING:
                raise RuntimeError("the log is broken")
            return True

    given.handler("Debit", stumble)
    command_id = await given.sent("Debit", {"a": 1})
    broken = Broken()
    logging.getLogger("busload").addFilter(broken)
    try:
        await given.drained()
    finally:
        logging.getLogger("busload").removeFilter(broken)
    failed = await given.command_now(command_id)
    assert (failed.status, failed.last_error_type) == ("SCHEDULED", "KeyError")


async def test_a_message_that_no_stream_can_write_is_logged_all_the_same(
    given: Given, caplog: pytest.LogCaptureFixture
) -> None:
    given.handler("Debit", raising(ValueError("a\0b\ud800c" + "x" * 1_000_000)))
    await given.sent()
    await given.drained()
    assert len(caplog.text.encode()) < 20_000
    assert "ValueError: a\ufffdb\ufffdcxxx" in caplog.text


# -- exception groups ------------------------------------------------------------------------------------------------


def in_task_group(*errors: BaseException) -> Any:
    """A handler whose tasks raise these, each as soon as all have begun."""

    async def handle(command: Any, ctx: Any) -> None:
        begun = asyncio.Barrier(len(errors))

        async def task(error: BaseException) -> None:
            await begun.wait()
            raise error

        async with asyncio.TaskGroup() as tasks:
            for error in errors:
                tasks.create_task(task(error))

    return handle


OWED = BusinessRuleError("Not owed.", code="NOT_OWED", details={"balance": 0})
CLOSED = PermanentCommandError("closed", code="CLOSED")

ROUTES: list[tuple[list[BaseException], tuple[Any, ...]]] = [
    ([OWED], ("FAILED", "BusinessRuleError", "NOT_OWED", "Not owed.")),
    ([KeyError("b"), OWED], ("FAILED", "BusinessRuleError", "NOT_OWED", "Not owed.")),
    ([OWED, CLOSED], ("IN_TROUBLESHOOTING_QUEUE", "PermanentCommandError", "CLOSED", "closed")),
    (
        [ExceptionGroup("inner", [KeyError("b"), CLOSED])],
        ("IN_TROUBLESHOOTING_QUEUE", "PermanentCommandError", "CLOSED", "closed"),
    ),
    ([RateLimitedError(), OWED], ("FAILED", "BusinessRuleError", "NOT_OWED", "Not owed.")),
    (
        [KeyError("b")],
        ("SCHEDULED", "ExceptionGroup", None, "unhandled errors in a TaskGroup (1 sub-exception); KeyError: 'b'"),
    ),
]


@pytest.mark.parametrize(("errors", "expected"), ROUTES)
async def test_the_members_of_a_group_decide_the_route(
    given: Given, errors: list[BaseException], expected: tuple[Any, ...]
) -> None:
    given.handler("Debit", in_task_group(*errors))
    command_id = await given.sent()
    await given.drained()
    found = await given.command_now(command_id)
    assert (found.status, found.last_error_type, found.last_error_code, found.last_error_message) == expected
    assert found.last_traceback is not None and "unhandled errors in a TaskGroup" in found.last_traceback


async def test_the_message_of_the_group_is_kept_beside_that_of_the_member(given: Given, database: Database) -> None:
    given.handler("Debit", in_task_group(OWED))
    await given.sent()
    await given.drained()
    told = database.value("SELECT details FROM busload.execution")
    assert told["group"] == "unhandled errors in a TaskGroup (1 sub-exception)"
    assert (told["message"], told["details"]) == ("Not owed.", {"balance": 0})


async def test_a_group_of_refusals_burns_no_attempt(given: Given, database: Database) -> None:
    given.handler("Debit", in_task_group(RateLimitedError(after=30), RateLimitedError(after=60)))
    command_id = await given.sent()
    await given.drained()
    found = await given.command_now(command_id)
    assert (found.status, found.attempts, found.last_error_type) == ("SCHEDULED", 0, None)
    assert database.value("SELECT run_at > now() + interval '50 s' FROM busload.scheduled")


@pytest.mark.parametrize("kind", ["thread", "chunk", "buffer"])
async def test_the_members_decide_for_every_kind_of_handler(given: Given, bus: CommandBus, kind: str) -> None:
    error = ExceptionGroup("several", [KeyError("b"), CLOSED])
    if kind == "buffer":
        contacts = bus.buffer("contacts", size=2)

        @contacts.handler()
        async def sync(group: Group, ctx: HandlerContext) -> None:
            raise error

        await contacts.add_many([{"n": n} for n in range(2)])
        await contacts.flush()
    elif kind == "chunk":

        @bus.bulk_handler("contacts", "Debit", size=10, max_wait=0)
        async def debit_all(chunk: Chunk, ctx: ChunkContext) -> None:
            raise error

        await bus.send("contacts", "Debit")
    else:

        @bus.handler("contacts", "Debit")
        def debit(command: Command, ctx: SyncHandlerContext) -> None:
            raise error

        await bus.send("contacts", "Debit")
    await given.drained(domains=["contacts"])
    [item] = await bus.troubleshooting.list("contacts")
    assert (item.reason, item.last_error_type, item.last_error_code) == ("PERMANENT", "PermanentCommandError", "CLOSED")
