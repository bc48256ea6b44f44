"""`busload batch explain`, `busload command explain` and `busload domain` at a shell."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from busload import BatchCommand, SyncCommandBus
from tests.cli.conftest import Busload
from tests.given import DOMAIN, Database, Given


async def test_batch_explain_has_a_line_that_sums_up_and_the_advice_below_each_reason(
    busload: Busload, given: Given
) -> None:
    batch_id, [command_id] = await given.in_troubleshooting()
    result = busload("batch", "explain", batch_id)
    summary, empty, code, message, advice = result.stdout.splitlines()
    assert (result.exit_code, empty) == (0, "")
    assert summary == "Not finished: 0 of 1 command has ended; 1 waiting for a person."
    assert code.startswith("IN_TROUBLESHOOTING, since ")
    assert message.endswith("PERMANENT: PermanentCommandError: CLOSED: account closed.")
    assert advice.startswith(f"  → Decide: `busload troubleshooting retry {command_id}`")

    found = json.loads(busload("batch", "explain", batch_id, "--domain", DOMAIN, "--json").stdout)
    assert (found["finished"], found["remaining"], found["eta"]) == (False, 1, None)
    [reason] = found["reasons"]
    assert (reason["code"], reason["count"]) == ("IN_TROUBLESHOOTING", 1)
    assert reason["details"]["command_id"] == str(command_id)


async def test_a_finished_batch_is_explained_by_one_line(busload: Busload, given: Given) -> None:
    given.handler()
    batch_id = await given.batch(3)
    await given.drained()
    result = busload("batch", "explain", batch_id)
    assert result.exit_code == 0
    assert result.stdout.startswith("COMPLETED: all 3 commands ended ")
    assert len(result.stdout.splitlines()) == 1


async def test_the_reasons_of_a_callback_are_printed_as_json_too(busload: Busload, given: Given) -> None:
    given.handler()
    batch_id = await given.batch(1, on_complete=BatchCommand("Mail"))
    await given.drained()  # nobody here knows how to mail
    found = json.loads(busload("batch", "explain", batch_id, "--json").stdout)
    [reason] = found["reasons"]
    assert (reason["code"], reason["details"]["reasons"][0]["code"]) == ("CALLBACK_WAITING", "NO_HANDLER")
    assert "CALLBACK_WAITING" in busload("batch", "explain", batch_id).stdout


def test_command_explain_says_why_it_waits(busload: Busload, sync_bus: SyncCommandBus) -> None:
    command_id = sync_bus.send(DOMAIN, "Debit").command_id
    result = busload("command", "explain", command_id)
    assert result.exit_code == 0
    assert result.stdout.startswith("Not finished: it is PENDING; 1 without a worker.\n")
    assert "busload worker MODULE:BUS --domains payments" in result.stdout
    found = json.loads(busload("command", "explain", command_id, "--json").stdout)
    assert (found["command_id"], [reason["code"] for reason in found["reasons"]]) == (str(command_id), ["NO_WORKER"])


@pytest.mark.parametrize("noun", ["batch", "command"])
def test_what_does_not_exist_is_not_found(busload: Busload, noun: str) -> None:
    result = busload(noun, "explain", uuid4())
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"There is no {noun}" in result.stderr
    result = busload(noun, "explain", uuid4(), "--domain", DOMAIN)
    assert (result.exit_code, result.stdout) == (1, "")
    assert busload(noun, "explain", "no-id").exit_code == 2


def test_what_would_steer_a_terminal_is_escaped(busload: Busload, sync_bus: SyncCommandBus) -> None:
    command_id = sync_bus.send(DOMAIN, "Debit").command_id
    sync_bus.domains.pause(DOMAIN, reason="\x1b[31mred")
    for said in (busload("command", "explain", command_id).stdout, busload("domain", "ls").stdout):
        assert "\x1b" not in said and "\\x1b[31mred" in said


def test_a_domain_is_paused_and_resumed_and_the_list_says_by_whom(
    busload: Busload, sync_bus: SyncCommandBus, database: Database
) -> None:
    sync_bus.send_many(DOMAIN, [BatchCommand("Debit") for _ in range(1500)])
    paused = busload("domain", "pause", DOMAIN, "--reason", "the bank is down", "--operator", "rosa")
    assert (paused.exit_code, paused.stdout) == (0, "Paused payments.\n")
    assert busload("domain", "pause", DOMAIN).stdout == "payments was paused already.\n"
    heading, line = busload("domain", "ls").stdout.splitlines()
    assert heading.split() == ["DOMAIN", "READY", "SCHEDULED", "RUNNING", "TROUBLE", "WORKERS", "PAUSED"]
    assert line.split(maxsplit=6) == ["payments", "1,500", "0", "0", "0", "0", "by rosa: the bank is down"]
    [found] = json.loads(busload("domain", "ls", "--json").stdout)
    assert (found["ready"], found["workers"], found["pause"]["operator"]) == (1500, 0, "rosa")

    assert busload("domain", "resume", DOMAIN).stdout == "Resumed payments.\n"
    again = busload("domain", "resume", DOMAIN)
    assert (again.exit_code, again.stdout) == (0, "payments was not paused.\n")
    assert json.loads(busload("domain", "pause", DOMAIN, "--json").stdout) == {"domain": DOMAIN, "paused": True}
    assert json.loads(busload("domain", "resume", DOMAIN, "--json").stdout) == {"domain": DOMAIN, "resumed": True}
    assert database.value("SELECT count(*) FROM busload.pause WHERE resumed_at IS NULL") == 0


def test_the_history_says_who_paused_and_who_resumed(busload: Busload, sync_bus: SyncCommandBus) -> None:
    nothing = busload("domain", "pauses")
    assert (nothing.exit_code, nothing.stdout, nothing.stderr) == (0, "", "Nothing was ever paused.\n")
    busload("domain", "pause", DOMAIN, "--force", "--reason", "the bank is down", "--operator", "rosa")
    busload("domain", "resume", DOMAIN, "--operator", "ada")
    busload("domain", "pause", "crm", "--force", "--operator", "bob")

    newest, oldest = json.loads(busload("domain", "pauses", "--json").stdout)
    assert (newest["domain"], newest["operator"], newest["resumed_by"]) == ("crm", "bob", None)
    assert (oldest["domain"], oldest["operator"], oldest["resumed_by"]) == (DOMAIN, "rosa", "ada")
    heading, line = busload("domain", "pauses", DOMAIN).stdout.splitlines()
    assert heading.split() == ["DOMAIN", "SINCE", "BY", "REASON", "RESUMED", "RESUMED", "BY"]
    assert "rosa  the bank is down" in line and line.endswith("ada")
    assert len(json.loads(busload("domain", "pauses", "--limit", 1, "--json").stdout)) == 1
    assert "payments" not in busload("domain", "ls").stdout
    sync_bus.send(DOMAIN, "Debit")
    [found] = [one for one in json.loads(busload("domain", "ls", "--json").stdout) if one["domain"] == DOMAIN]
    assert (found["ready"], found["pause"]) == (1, None)


async def test_the_list_counts_what_is_in_each_place(busload: Busload, given: Given) -> None:
    await given.in_troubleshooting(2)
    given.handler()
    await given.batch(5)
    given.claimed(3)
    await given.batch(1)
    await given.bus.send("crm", "Push", run_at=datetime.now(UTC) + timedelta(days=1))
    crm, payments = json.loads(busload("domain", "ls", "--json").stdout)
    assert (crm["domain"], crm["scheduled"], crm["ready"], crm["pause"]) == ("crm", 1, 0, None)
    counts = [payments[name] for name in ("ready", "scheduled", "running", "in_troubleshooting", "workers")]
    assert counts == [3, 0, 3, 2, 1]


def test_the_list_says_when_there_is_nothing(busload: Busload) -> None:
    result = busload("domain", "ls")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "Nothing waits in any domain.\n")


@pytest.mark.parametrize("wrong", [("pause", "a b"), ("resume", ""), ("pause", DOMAIN, "--force", "--reason", "")])
def test_what_makes_no_sense_is_refused(busload: Busload, database: Database, wrong: tuple[str, ...]) -> None:
    assert busload("domain", *wrong).exit_code == 2
    assert database.count("pause") == 0
