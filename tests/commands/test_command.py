"""What people send, and how a whole list of it is checked at once."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from inspect import signature
from typing import Any
from uuid import UUID, uuid4

import pytest

from busload.commands.check_commands import check_all
from busload.commands.command import AuditEvent, BatchCommand, Command, CommandMetadata, CommandStatus
from busload.errors import DuplicateCommandError, InvalidCommandError
from busload.settings import InputLimits

LIMITS = InputLimits()


def test_a_batch_command_takes_type_id_and_data_by_position() -> None:
    command_id = uuid4()
    command = BatchCommand("Debit", command_id, {"a": 1})
    assert (command.command_type, command.command_id, command.data) == ("Debit", command_id, {"a": 1})
    assert (command.reply_to, command.correlation_id) == (None, None)
    with pytest.raises(TypeError):
        BatchCommand("Debit", command_id, None, "ledger")  # type: ignore[call-arg]


def test_values_have_the_promised_fields() -> None:
    command = "command_id domain command_type data batch_id task_key correlation_id reply_to priority created_at"
    more = (
        "status attempts max_attempts run_at started_at finished_at worker execution_id "
        "last_error_type last_error_code last_error_message result last_traceback "
        "publish_attempts last_publish_error published_at checkpoint expires_at headers"
    )
    assert list(signature(Command).parameters) == [*command.split(), "headers"]
    assert list(signature(CommandMetadata).parameters) == f"{command} {more}".split()
    audit = "type at execution_id attempt worker operator batch_id details"
    assert list(signature(AuditEvent).parameters) == audit.split()


def test_statuses_are_the_documented_words() -> None:
    words = (
        "PENDING_QUEUE PENDING_RETRY SCHEDULED PENDING IN_PROGRESS COMPLETED FAILED CANCELED IN_TROUBLESHOOTING_QUEUE"
    )
    assert list(CommandStatus) == words.split()


def test_a_checked_list_keeps_its_order_and_gets_the_ids_it_lacks() -> None:
    mine = uuid4()
    checked = check_all(
        "payments", [BatchCommand("A", data=1), BatchCommand("B", mine), BatchCommand("A", data=2)], LIMITS
    )
    assert [command.data for command in checked] == ["1", "null", "2"]
    assert checked[1].command_id == mine
    assert checked[0].command_id < checked[2].command_id
    assert {checked[0].command_id.version, checked[2].command_id.version} == {7}
    assert check_all("payments", [], LIMITS) == []


def test_the_callers_commands_are_left_as_they_were() -> None:
    command = BatchCommand("Debit")
    check_all("payments", [command, command], LIMITS)
    assert command == BatchCommand("Debit")


def test_any_iterable_is_walked_once() -> None:
    walked = 0

    def rows() -> Iterator[BatchCommand]:
        nonlocal walked
        for _ in range(3):
            walked += 1
            yield BatchCommand("Debit")

    assert len(check_all("payments", rows(), LIMITS)) == 3
    assert walked == 3


def test_a_command_is_checked_in_full_though_one_like_it_was_fine() -> None:
    """What nearly all commands have in common is asked in a shorter way"""
    fine = BatchCommand("Debit", data={"n": 1})

    class Sub(BatchCommand):
        pass

    bad: list[tuple[Any, str]] = [
        (BatchCommand("Debit", UUID(int=0)), "/command_id"),
        (BatchCommand("Debit", reply_to=""), "/reply_to"),
        (BatchCommand("Debit", correlation_id=UUID(int=0)), "/correlation_id"),
        (BatchCommand("Debit", task_key=""), "/task_key"),
        (BatchCommand("Debit", priority=False), "/priority"),
        (BatchCommand("Debit", priority=0.0), "/priority"),  # type: ignore[arg-type]
        (BatchCommand("Debit", max_attempts=0), "/max_attempts"),
        (BatchCommand("Debit", run_at=datetime(2030, 1, 1)), "/run_at"),
        (BatchCommand(["Debit"]), "/command_type"),  # type: ignore[arg-type]
        (Sub("Debit", priority=False), "/priority"),
        ("Debit", ""),
    ]
    for command, path in bad:
        with pytest.raises(InvalidCommandError) as refused:
            check_all("payments", [fine, command, fine], LIMITS)
        assert [(p.path, p.index) for p in refused.value.problems] == [(path, 1)]


def test_problems_come_before_duplicates() -> None:
    """All offenders are named even if ids repeat"""
    twice = uuid4()
    commands = [BatchCommand("Debit", twice), BatchCommand("Debit", twice), BatchCommand("no name")]
    with pytest.raises(InvalidCommandError) as refused:
        check_all("no domain", commands, LIMITS)
    assert [(p.path, p.index) for p in refused.value.problems] == [("/domain", None), ("/command_type", 2)]
    with pytest.raises(DuplicateCommandError) as duplicate:
        check_all("payments", commands[:2], LIMITS)
    assert duplicate.value.command_ids == (twice,)


@pytest.mark.parametrize(
    "run_at",
    [
        datetime(1, 1, 1, tzinfo=UTC),
        datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14))),
        datetime(1970, 1, 1, tzinfo=UTC),
        datetime.now(UTC) + timedelta(days=36500),
    ],
    ids=["year 1", "before year 1", "1970", "in a century"],
)
def test_every_time_up_to_a_century_ahead_is_accepted(run_at: datetime) -> None:
    [checked] = check_all("payments", [BatchCommand("Debit", run_at=run_at)], LIMITS)
    assert checked.run_at in (run_at, None)


def test_a_problem_never_shows_much_of_the_input() -> None:
    """At most 80 characters, also of what cannot be shown"""

    class Secretive:
        def __repr__(self) -> str:
            raise RuntimeError("not telling")

    bad: Any
    for bad in ("x y" * 10_000, Secretive(), b"\0" * 10_000, UUID(int=0)):
        with pytest.raises(InvalidCommandError) as refused:
            check_all("payments", [BatchCommand(bad, bad)], LIMITS)
        assert all(len(problem.message) < 200 for problem in refused.value.problems)
