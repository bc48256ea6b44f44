"""`busload troubleshooting` at a shell."""

from __future__ import annotations

import getpass
import json
from uuid import UUID, uuid4

import pytest

from busload import BatchStatus, CommandStatus
from tests.cli.conftest import Busload
from tests.given import DOMAIN, Given


async def status_of(given: Given, command_id: UUID) -> CommandStatus:
    found = await given.bus.get_command(DOMAIN, command_id)
    assert found is not None
    return found.status


async def last_event(given: Given, command_id: UUID) -> tuple[str, str | None]:
    event = (await given.bus.get_audit_trail(DOMAIN, command_id))[-1]
    return event.type, event.operator


async def test_ls_shows_what_waits_for_a_person(busload: Busload, given: Given) -> None:
    _, command_ids = await given.in_troubleshooting(3)
    found = json.loads(busload("troubleshooting", "ls", "--json").stdout)
    assert [item["command_id"] for item in found] == [str(command_id) for command_id in command_ids]
    assert {(item["reason"], item["last_error_code"]) for item in found} == {("PERMANENT", "CLOSED")}
    said = busload("troubleshooting", "ls", "--domain", DOMAIN, "--type", "Refuse", "--limit", 2).stdout.splitlines()
    assert len(said) == 3
    assert "CLOSED: account closed" in said[1]
    nothing = busload("troubleshooting", "ls", "--type", "Debit")
    assert (nothing.stdout, nothing.stderr) == ("", "Nothing waits for a person.\n")


async def test_retry_puts_commands_back_into_the_queue(busload: Busload, given: Given) -> None:
    _, command_ids = await given.in_troubleshooting(2)
    result = busload("troubleshooting", "retry", *command_ids, "--operator", "ada")
    assert result.exit_code == 0
    assert result.stdout == "".join(f"Retried {command_id} in payments.\n" for command_id in command_ids)
    for command_id in command_ids:
        assert await status_of(given, command_id) == CommandStatus.PENDING
        assert await last_event(given, command_id) == ("OPERATOR_RETRIED", "ada")
    given.database.check_invariants()


async def test_complete_keeps_the_result(busload: Busload, given: Given) -> None:
    batch_id, [command_id] = await given.in_troubleshooting()
    result = busload("troubleshooting", "complete", command_id, "--result", '{"paid": "by hand"}', "--json")
    assert json.loads(result.stdout) == [{"domain": DOMAIN, "command_id": str(command_id), "done": "completed"}]
    found = await given.bus.get_command(DOMAIN, command_id)
    assert found is not None
    assert (found.status, found.result) == (CommandStatus.COMPLETED, {"paid": "by hand"})
    assert await last_event(given, command_id) == ("OPERATOR_COMPLETED", getpass.getuser())
    batch = await given.bus.get_batch(DOMAIN, batch_id)
    assert batch is not None
    assert batch.status == BatchStatus.COMPLETED


async def test_cancel_keeps_the_reason(busload: Busload, given: Given) -> None:
    _, [command_id] = await given.in_troubleshooting()
    assert busload("troubleshooting", "cancel", command_id).exit_code == 2
    assert busload("troubleshooting", "cancel", command_id, "--reason", "paid twice").exit_code == 0
    assert await status_of(given, command_id) == CommandStatus.CANCELED
    event = (await given.bus.get_audit_trail(DOMAIN, command_id))[-1]
    assert "paid twice" in json.dumps(event.details)


async def test_several_commands_are_resolved_all_or_none(busload: Busload, given: Given) -> None:
    _, [first, second] = await given.in_troubleshooting(2)
    assert busload("troubleshooting", "retry", first).exit_code == 0
    refused = busload("troubleshooting", "cancel", second, first, "--reason", "test")
    assert refused.exit_code == 1
    assert str(first) in refused.stderr
    assert await status_of(given, second) == CommandStatus.IN_TROUBLESHOOTING_QUEUE
    given.database.check_invariants()


@pytest.mark.parametrize("result", ["{paid: 1}", '{"a": 1, "a": 2}', "NaN", "1e999", '"\\ud800"', "[" * 65 + "]" * 65])
async def test_a_result_that_is_not_strict_json_is_refused(busload: Busload, given: Given, result: str) -> None:
    _, [command_id] = await given.in_troubleshooting()
    refused = busload("troubleshooting", "complete", command_id, "--result", result)
    assert refused.exit_code == 2
    assert refused.stderr.startswith("Error: ")
    assert refused.stderr.count("\n") == 1
    assert await status_of(given, command_id) == CommandStatus.IN_TROUBLESHOOTING_QUEUE


def test_an_unknown_command_is_one_and_no_command_is_two(busload: Busload) -> None:
    assert busload("troubleshooting", "retry", uuid4()).exit_code == 1
    assert busload("troubleshooting", "retry", uuid4(), "--domain", DOMAIN).exit_code == 1
    assert busload("troubleshooting", "retry").exit_code == 2
