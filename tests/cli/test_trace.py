"""`busload trace` at a shell."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from uuid import UUID

from busload import CommandBus, Execution, PermanentCommandError
from busload.cli.trace import WIDTH, timeline
from busload.commands import ExecutionStatus, OperatorAction
from tests.cli.conftest import Busload
from tests.given import DOMAIN, Given, raising

KEY = "invoices:2026:7"
START = datetime(2026, 11, 16, 8, tzinfo=UTC)


async def test_a_trace_shows_attempts_errors_and_operators(busload: Busload, bus: CommandBus, given: Given) -> None:
    """As a timeline, and as JSON"""
    given.handler("Debit", raising(PermanentCommandError("account closed")))
    command_id = await given.sent(task_key=KEY)
    await given.drained()
    await bus.troubleshooting.retry(DOMAIN, command_id, operator="rosa")

    said = busload("trace", KEY).stdout
    assert said.startswith(f"{KEY}: 1 command, 2 attempts\n")
    assert f"{command_id} in {DOMAIN}, sent " in said
    order = ["! dlq", "account closed", "OPERATOR_RETRIED", "by rosa", "… queued"]
    assert [said.index(part) for part in order] == sorted(said.index(part) for part in order)

    [first, second] = json.loads(busload("trace", KEY, "--json").stdout)
    assert (first["status"], first["error"], first["actions"][0]["operator"]) == ("dlq", "account closed", "rosa")
    assert (second["status"], second["attempt"]) == ("queued", 2)


def test_a_task_that_nobody_sent_is_said_so(busload: Busload) -> None:
    result = busload("trace", "unknown", "--domain", "payments")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "No command was sent for the task 'unknown' in domain 'payments'" in result.stderr
    assert busload("trace", "unknown", "--json").stdout == "[]\n"
    assert busload("trace", "").exit_code == 2


def attempt(number: int, status: ExecutionStatus, started: float | None, ended: float | None) -> Execution:
    def at(seconds: float | None) -> datetime | None:
        return None if seconds is None else START + timedelta(seconds=seconds)

    action = OperatorAction("OPERATOR_RETRIED", START + timedelta(seconds=24), "rosa")
    actions = (action,) if status is ExecutionStatus.DLQ else ()
    return Execution(
        None, KEY, UUID(int=7), "payments", number, status, "w", START, at(started), at(ended), None, None, actions
    )


def test_bars_are_in_proportion() -> None:
    chain = [
        attempt(1, ExecutionStatus.DLQ, 8, 16),
        attempt(2, ExecutionStatus.PROCESSING, 28, None),
    ]
    lines = timeline(chain, now=START + timedelta(seconds=32))
    bars = [line[line.index(number) + 3 :][:WIDTH] for line, number in ((lines[3], "1"), (lines[5], "2"))]
    assert bars[0] == "········" + "━━━━━━━━" + " " * 16
    assert bars[1] == " " * 24 + "····━━━━"
    assert "8.0 s" in lines[3] and "4.0 s" in lines[5] and "by rosa" in lines[4]
