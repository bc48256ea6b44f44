"""Where a command failed, at a shell and in the log of `busload worker`."""

from __future__ import annotations

import json
import logging
from typing import Any

from busload import Command, CommandBus, HandlerContext, RetryPolicy
from busload.telemetry.logs import JsonLines
from tests.cli.conftest import Busload
from tests.given import DOMAIN, Given

KEY = "debit:1"


async def stumble(command: Command, ctx: HandlerContext) -> Any:
    return command.data["b"]


async def test_people_see_where_attempts_failed(busload: Busload, bus: CommandBus, given: Given) -> None:
    given.handler("Debit", stumble, retry=RetryPolicy(max_attempts=2, backoff=()))
    command_id = await given.sent("Debit", {"a": 1}, task_key=KEY)
    await given.drained()

    for arguments, attempts in (
        (["command", "show", command_id], "attempts 1, 2"),
        (["trace", KEY], "attempts 1, 2"),
        (["troubleshooting", "show", command_id], "attempt 2"),
    ):
        said = busload(*arguments).stdout
        assert f"\nTraceback of {attempts}:\n  Traceback (most recent call last):\n" in said
        assert said.endswith("      return command.data[\"b\"]\n  KeyError: 'b'\n")
        assert said.count("Traceback of") == 1

    shown = json.loads(busload("command", "show", command_id, "--json").stdout)
    assert shown["last_traceback"].endswith("KeyError: 'b'\n")
    assert [event["details"]["traceback"] for event in shown["audit_trail"] if event["details"]] == [
        shown["last_traceback"]
    ] * 2
    traced = json.loads(busload("trace", KEY, "--json").stdout)
    assert [one["traceback"] for one in traced] == [shown["last_traceback"]] * 2
    item = json.loads(busload("troubleshooting", "show", command_id, "--json").stdout)
    assert item["last_traceback"] == shown["last_traceback"]


async def test_what_waits_for_nobody_is_not_shown_by_troubleshooting(busload: Busload, given: Given) -> None:
    command_id = await given.sent("Debit")
    result = busload("troubleshooting", "show", command_id)
    assert result.exit_code == 1
    assert f"Command {command_id} in domain {DOMAIN!r} does not wait for a person" in result.stderr


def said_by(record: logging.LogRecord) -> dict[str, Any]:
    line = JsonLines().format(record)
    assert "\n" not in line
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_log_for_programs_carries_fields_and_exceptions() -> None:
    def record(message: str, **extra: Any) -> logging.LogRecord:
        return logging.getLogger("shop").makeRecord("shop", logging.ERROR, "f", 1, message, (), None, extra=extra)

    assert said_by(
        record(
            "sold",
            command_id="7",
            tags={
                "a",
            },
            price=1.5,
        )
    ) | {"at": 0, "process": 0} == {
        "at": 0,
        "level": "ERROR",
        "logger": "shop",
        "process": 0,
        "message": "sold",
        "command_id": "7",
        "tags": ["a"],
        "price": 1.5,
    }
    try:
        raise KeyError("b")
    except KeyError as error:
        failed = record("failed")
        failed.exc_info = (KeyError, error, error.__traceback__)
    assert said_by(failed)["exception"].endswith("KeyError: 'b'")


def test_a_log_for_programs_takes_whatever_it_is_given() -> None:
    class Unspeakable:
        def __str__(self) -> str:
            raise RuntimeError

    for extra in ({"odd": Unspeakable()}, {"odd": {(1, 2): 3}}, {"odd": "\ud800"}, {"odd": object()}):
        record = logging.getLogger("shop").makeRecord("shop", 30, "f", 1, "sold \ud800", (), None, extra=extra)
        assert "sold" in said_by(record)["message"]
        assert "odd" in said_by(record)
