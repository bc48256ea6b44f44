"""An error decides where its command goes."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from busload import (
    BatchCommand,
    BusinessRuleError,
    Command,
    CommandBus,
    HandlerContext,
    PermanentCommandError,
    RetryPolicy,
    SyncHandlerContext,
    TransientCommandError,
)
from tests.given import DOMAIN, Given, counts, raising


async def wait_of(given: Given, command_id: Any) -> float:
    """Seconds until the command is tried again, by the database's clock from the end of the attempt."""
    return float(
        given.database.value(
            """SELECT extract(epoch FROM s.run_at - e.finished_at)::float8
                 FROM busload.scheduled s JOIN busload.command c ON c.id = s.lo
                 JOIN busload.execution e ON e.command = c.id AND e.attempt = s.attempt - 1
                WHERE c.command_id = %s AND s.reason = 'RETRY'""",
            command_id,
        )
    )


@pytest.mark.parametrize("error", [TransientCommandError("busy", code="BUSY"), KeyError("account")], ids=repr)
async def test_transient_and_unknown_errors_are_tried_three_times_after_10_and_60_seconds(
    bus: CommandBus, given: Given, error: Exception
) -> None:
    """No reply, no counter, the error kept each time"""
    tried = given.handler("Debit", raising(error))
    command_id = await given.sent(reply_to="ledger")

    for attempt, backoff in ((1, 10), (2, 60)):
        await given.drained()
        assert len(tried) == attempt
        waiting = await given.command_now(command_id)
        assert (waiting.status, waiting.attempts) == ("SCHEDULED", attempt)
        assert (waiting.last_error_type, waiting.last_error_message) == (type(error).__name__, str(error))
        assert backoff <= await wait_of(given, command_id) < backoff + 5
        given.make_due()
    await given.drained()

    assert len(tried) == 3
    parked = await given.command_now(command_id)
    assert (parked.status, parked.attempts) == ("IN_TROUBLESHOOTING_QUEUE", 3)
    [item] = await bus.troubleshooting.list(DOMAIN)
    assert (item.reason, item.attempts) == ("EXHAUSTED", 3)
    trail = await bus.get_audit_trail(DOMAIN, command_id)
    failed = [event for event in trail if event.type == "FAILED_ATTEMPT"]
    assert [event.details["kind"] for event in failed] == ["TRANSIENT", "TRANSIENT"]
    assert given.database.value("SELECT count(*) FROM busload.command WHERE domain = 'ledger'") == 0


async def test_the_third_pause_is_300_seconds_and_repeats(given: Given) -> None:
    given.handler("Debit", raising(TransientCommandError("busy")), retry=RetryPolicy(max_attempts=5))
    command_id = await given.sent()
    for backoff in (10, 60, 300, 300):
        await given.drained()
        assert backoff <= await wait_of(given, command_id) < backoff + 5
        given.make_due()


async def test_a_handler_may_have_its_own_policy_and_a_command_its_own_limit(bus: CommandBus, given: Given) -> None:
    """The command's limit wins"""
    tried = given.handler("Debit", raising(OSError("down")), retry=RetryPolicy(max_attempts=2, backoff=(1,)))
    usual, patient = await given.sent(), await given.sent(max_attempts=4)
    batch_id = await bus.create_batch(DOMAIN, [BatchCommand("Debit", max_attempts=1)])
    await given.drained()
    assert counts(await given.batch_now(batch_id)) == (1, 0, 0, 0, 1)
    assert 1 <= await wait_of(given, usual) < 5
    for _ in range(3):
        given.make_due()
        await given.drained()
    times = [command.command_id for command in tried]
    assert (times.count(usual), times.count(patient), len(times)) == (2, 4, 7)
    assert {item.reason for item in await bus.troubleshooting.list(DOMAIN)} == {"EXHAUSTED"}


async def test_a_retry_that_succeeds_completes_its_command(given: Given) -> None:
    executions = []

    async def second_time(command: Command, ctx: HandlerContext) -> int:
        executions.append(ctx.execution_id)
        if ctx.attempt == 1:
            raise TransientCommandError("busy")
        return ctx.attempt

    given.handler("Debit", second_time)
    batch_id = await given.batch()
    await given.drained()
    given.make_due()
    await given.drained()
    assert (await given.batch_now(batch_id)).status == "COMPLETED"
    [command] = await given.bus.list_batch_commands(DOMAIN, batch_id)
    assert (command.result, command.attempts, command.execution_id) == (2, 2, executions[1])
    assert executions[0] != executions[1]


async def test_a_permanent_error_goes_to_troubleshooting_at_once(bus: CommandBus, given: Given) -> None:
    """Code, message and details kept; no reply"""
    error = PermanentCommandError("no such account", code="ACCOUNT", details={"account": 7})
    tried = given.handler("Debit", raising(error))
    command_id = await given.sent(reply_to="ledger")
    await given.drained()
    given.make_due()
    await given.drained()

    assert len(tried) == 1
    parked = await given.command_now(command_id)
    assert parked.status == "IN_TROUBLESHOOTING_QUEUE"
    assert (parked.last_error_type, parked.last_error_code) == ("PermanentCommandError", "ACCOUNT")
    assert parked.last_error_message == "no such account"
    [item] = await bus.troubleshooting.list(DOMAIN)
    assert (item.reason, item.details) == ("PERMANENT", {"account": 7})
    assert given.database.value("SELECT count(*) FROM busload.command WHERE domain = 'ledger'") == 0


async def test_a_broken_business_rule_ends_the_command_as_failed(bus: CommandBus, given: Given) -> None:
    """No retry, no troubleshooting"""
    tried = given.handler("Debit", raising(BusinessRuleError("overdrawn", code="FUNDS")))
    command_id = await given.sent()
    await given.drained()
    given.make_due()
    await given.drained()

    assert len(tried) == 1
    failed = await given.command_now(command_id)
    assert (failed.status, failed.last_error_code, failed.last_error_message) == ("FAILED", "FUNDS", "overdrawn")
    assert failed.finished_at is not None
    assert await bus.troubleshooting.list(DOMAIN) == []


async def test_a_handler_that_takes_too_long_has_failed_an_attempt(bus: CommandBus, given: Given) -> None:
    """Async or in a thread, which cannot be stopped but no longer counts"""
    release = asyncio.Event()
    thread_may_end = asyncio.run_coroutine_threadsafe
    loop = asyncio.get_running_loop()

    async def slow(command: Command, ctx: HandlerContext) -> None:
        await release.wait()

    @bus.handler(DOMAIN, "SlowThread", timeout=timedelta(milliseconds=50))
    def slow_thread(command: Command, ctx: SyncHandlerContext) -> str:
        thread_may_end(release.wait(), loop).result(60)
        return "too late"

    given.handler("Slow", slow, timeout=0.05)
    slow_id, thread_id = await given.sent("Slow"), await given.sent("SlowThread")
    async with given.running():
        for command_id in (slow_id, thread_id):
            async with asyncio.timeout(25):
                while (await given.command_now(command_id)).status != "SCHEDULED":
                    await asyncio.sleep(0.01)
            assert (await given.command_now(command_id)).last_error_code == "TIMEOUT"
        release.set()
    assert (await given.command_now(thread_id)).status == "SCHEDULED"


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class FromTheBottom(BaseException):
    pass


ODD_ERRORS: list[tuple[BaseException, str]] = [
    (Unspeakable(), "<Unspeakable; its str() raised RuntimeError>"),
    (ValueError("a\0b\ud800c"), "a\ufffdb\ufffdc"),
    (FromTheBottom("deep"), "deep"),
    (KeyboardInterrupt(), ""),
    (SystemExit(3), "3"),
    (GeneratorExit(), ""),
    (asyncio.CancelledError("mine"), "mine"),
    (ExceptionGroup("several", [ValueError("one")]), "several (1 sub-exception); ValueError: one"),
]


async def test_whatever_a_handler_raises_is_the_failure_of_its_command_alone(given: Given) -> None:
    odd = {}
    for n, (error, _) in enumerate(ODD_ERRORS):
        given.handler(f"Odd{n}", raising(error))
        odd[n] = await given.sent(f"Odd{n}")
    seen = given.handler("Debit")
    await given.batch(commands=30)
    await given.drained(concurrency=3)

    assert len(seen) == 30
    for n, (error, message) in enumerate(ODD_ERRORS):
        failed = await given.command_now(odd[n])
        assert (failed.status, failed.attempts) == ("SCHEDULED", 1)
        assert (failed.last_error_type, failed.last_error_message) == (type(error).__name__, message)


async def test_a_message_of_megabytes_is_cut(given: Given) -> None:
    given.handler("Debit", raising(ValueError("é" * 5_000_000)))
    command_id = await given.sent()
    await given.drained()
    message = (await given.command_now(command_id)).last_error_message
    assert message is not None
    assert message.startswith("ééé")
    assert message.endswith("[cut]")
    assert len(message.encode()) <= 16 * 1024


async def test_whatever_a_thread_raises_is_the_failure_of_its_command(bus: CommandBus, given: Given) -> None:
    """Also StopIteration, which no future can carry"""
    errors = [StopIteration(), SystemExit(1), KeyError("x"), asyncio.CancelledError(), BusinessRuleError("no")]

    @bus.handler(DOMAIN, "Debit")
    def fail(command: Command, ctx: SyncHandlerContext) -> None:
        raise errors[command.data["n"]]

    batch_id = await given.batch(commands=5)
    async with asyncio.timeout(25):
        await given.drained()
    commands = await bus.list_batch_commands(DOMAIN, batch_id)
    assert [command.status for command in commands] == ["SCHEDULED"] * 4 + ["FAILED"]
    types = [command.last_error_type for command in commands]
    assert types == ["StopIteration", "SystemExit", "KeyError", "CancelledError", "BusinessRuleError"]


BAD_RESULTS = [
    ([[]] * 3 + [{"when": datetime(2026, 1, 1, tzinfo=UTC), "text": "a\0"}], "NUL_IN_JSON", "/result/3/text"),
    ([{1: "\ud800"}], "LONE_SURROGATE", "/result/0/1"),
    ("x" * 1_048_577, "TOO_LARGE", "/result"),
    ({"text": "a\0b"}, "NUL_IN_JSON", "/result/text"),
    (float("inf"), "NON_FINITE_NUMBER", "/result"),
    ("\ud800", "LONE_SURROGATE", "/result"),
]


async def test_a_result_that_cannot_be_kept_goes_to_troubleshooting_and_is_not_tried_again(
    bus: CommandBus, given: Given
) -> None:
    """Its neighbours in the flush are unaffected"""

    async def answer(command: Command, ctx: HandlerContext) -> Any:
        n = command.data["n"]
        return BAD_RESULTS[n][0] if n < len(BAD_RESULTS) else "fine"

    tried = given.handler("Debit", answer)
    batch_id = await given.batch(commands=10)
    await given.drained()
    given.make_due()
    await given.drained()

    assert len(tried) == 10
    assert counts(await given.batch_now(batch_id)) == (10, 4, 0, 0, 6)
    for item in await bus.troubleshooting.list(DOMAIN):
        _, code, path = BAD_RESULTS[item.data["n"]]
        assert (item.reason, item.last_error_code) == ("RESULT_INVALID", code)
        assert path in (item.last_error_message or "")


async def test_a_result_comes_back_as_it_was(bus: CommandBus, given: Given) -> None:
    results: list[Any] = [None, [], {}, "", 0, False, 2**64, 0.1, -0.0, "\\u0000", {"a": [None, "é👩"]}]

    async def answer(command: Command, ctx: HandlerContext) -> Any:
        return results[command.data["n"]]

    given.handler("Debit", answer)
    batch_id = await given.batch(commands=len(results))
    await given.drained()
    found = [command.result for command in await bus.list_batch_commands(DOMAIN, batch_id)]
    assert list(map(repr, found)) == list(map(repr, results))
