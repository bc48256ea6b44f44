"""`busload batch` at a shell."""

from __future__ import annotations

import json
import signal
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest

from busload import BatchCommand, BatchStatus, SyncCommandBus
from busload.batches import Canary, FailureBudget
from tests.cli.conftest import Busload, Spawn, Until
from tests.given import DOMAIN, WITHIN, Database, Given


def test_ls_shows_the_batches_of_all_domains_newest_first(busload: Busload, sync_bus: SyncCommandBus) -> None:
    batch_ids = [sync_bus.create_batch(d, [BatchCommand("Debit")]) for d in ("payments", "crm", "payments")]
    found = json.loads(busload("batch", "ls", "--json").stdout)
    assert [batch["batch_id"] for batch in found] == [str(batch_id) for batch_id in reversed(batch_ids)]
    said = busload("batch", "ls").stdout.splitlines()
    assert said[0].split()[:4] == ["BATCH", "DOMAIN", "NAME", "STATUS"]
    assert said[1].split()[:5] == [str(batch_ids[2]), "payments", "-", "PENDING", "1"]


def test_ls_can_be_narrowed_to_a_domain_a_status_and_a_page(busload: Busload, sync_bus: SyncCommandBus) -> None:
    batch_ids = [str(sync_bus.create_batch("payments", [BatchCommand("Debit")])) for _ in range(4)]
    sync_bus.create_batch("crm", [BatchCommand("Push")])
    sync_bus.cancel_batch("payments", sync_bus.list_batches("payments")[0].batch_id, reason="test")

    def ls(*options: object) -> list[str]:
        return [batch["batch_id"] for batch in json.loads(busload("batch", "ls", "--json", *options).stdout)]

    assert ls("--domain", "payments") == batch_ids[::-1]
    assert ls("--domain", "payments", "--status", "completed_with_failures") == batch_ids[3:]
    assert ls("--domain", "payments", "--limit", 2, "--offset", 1) == [batch_ids[2], batch_ids[1]]
    assert ls("--limit", 2, "--offset", 1) == [batch_ids[3], batch_ids[2]]
    assert ls("--domain", "unknown") == []


@pytest.mark.parametrize("wrong", [("--status", "DONE"), ("--limit", "-1"), ("--offset", "-1"), ("--domain", "a b")])
def test_ls_refuses_what_makes_no_sense(busload: Busload, wrong: tuple[str, str]) -> None:
    assert busload("batch", "ls", *wrong).exit_code == 2


def test_ls_says_when_there_is_nothing(busload: Busload) -> None:
    result = busload("batch", "ls")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "There are no such batches.\n")


async def test_show_has_the_counters_and_what_happened(busload: Busload, given: Given) -> None:
    given.handler()
    batch_id = await given.batch(commands=1500, name="January", custom_data={"run": 7})
    await given.drained()

    found = json.loads(busload("batch", "show", batch_id, "--json").stdout)
    assert (found["total_count"], found["completed_count"], found["status"]) == (1500, 1500, "COMPLETED")
    assert found["custom_data"] == {"run": 7}
    assert datetime.fromisoformat(found["completed_at"]).tzinfo is not None
    assert [event["type"] for event in found["audit_trail"]][-1] == "BATCH_COMPLETED"

    said = busload("batch", "show", batch_id, "--domain", DOMAIN).stdout
    assert "completed           1,500\n" in said
    assert "name                January\n" in said
    assert "BATCH_COMPLETED" in said
    assert "\x1b" not in said


async def test_watch_ends_with_zero_when_all_completed(busload: Busload, given: Given) -> None:
    given.handler()
    batch_id = await given.batch(commands=3)
    await given.drained()
    result = busload("batch", "watch", batch_id)
    assert result.exit_code == 0
    assert result.stdout == "3/3  completed 3  failed 0  canceled 0  in troubleshooting 0  COMPLETED\n"


async def test_show_watch_and_explain_say_when_a_batch_will_be_done(
    busload: Busload, given: Given, spawn: Spawn
) -> None:
    batch_id = await given.batch(commands=20)
    worker = given.registered_worker()
    given.settled(given.claimed(15, by=worker))

    shown = busload("batch", "show", batch_id).stdout
    assert "commands a second" in shown and "in about " in shown
    for verb in ("show", "explain"):
        found = json.loads(busload("batch", verb, batch_id, "--json").stdout)["forecast"]
        assert [*found] == [
            "made_at",
            "rate",
            "done_at",
            "earliest",
            "latest",
            "unknown",
            "changes",
            "in_troubleshooting",
        ]
        assert found["rate"] > 0 and found["unknown"] is None
        assert found["made_at"] <= found["earliest"] <= found["done_at"] <= found["latest"]
    said = busload("batch", "explain", batch_id).stdout.splitlines()
    assert said[0].startswith("On its way: 15 of 20 commands have ended, 0 running, 5 ready; done in about ")
    assert said[2].startswith("FORECAST, ") and said[3].startswith("  Done in about ")
    process = spawn("batch", "watch", batch_id, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert b"IN_PROGRESS  done in about " in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WITHIN)

    await given.bus.hold_batch(DOMAIN, batch_id, reason="wait")
    assert "unknown: HELD" in busload("batch", "show", batch_id).stdout
    assert "FORECAST" not in busload("batch", "explain", batch_id).stdout


def test_watch_follows_until_the_end_and_ends_with_one_when_some_did_not_complete(
    spawn: Spawn, sync_bus: SyncCommandBus
) -> None:
    batch_id = sync_bus.create_batch("payments", [BatchCommand("Debit") for _ in range(3)])
    process = spawn("batch", "watch", batch_id, "--json", stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["canceled_count"] == 0
    sync_bus.cancel_batch("payments", batch_id, reason="test")
    last = json.loads(process.stdout.read().splitlines()[-1])
    assert (last["canceled_count"], last["status"]) == (3, BatchStatus.COMPLETED_WITH_FAILURES)
    assert process.wait() == 1
    process.stdout.close()


def test_watch_says_once_why_nothing_moves(
    spawn: Spawn, sync_bus: SyncCommandBus, until: Until, tmp_path: Path
) -> None:
    batch_id = sync_bus.create_batch("payments", [BatchCommand("Debit")])
    sync_bus.hold_batch("payments", batch_id, reason="lunch")
    process = spawn("batch", "watch", batch_id)
    said = tmp_path / "said.txt"
    hint = f"1 held. `busload batch explain {batch_id}` says what to do."
    until(lambda: hint in said.read_text())
    sync_bus.cancel_batch("payments", batch_id, reason="test")
    assert process.wait(WITHIN) == 1
    assert said.read_text().count("says what to do") == 1


def test_watch_ends_with_130_when_interrupted(spawn: Spawn, sync_bus: SyncCommandBus) -> None:
    batch_id = sync_bus.create_batch("payments", [BatchCommand("Debit")])
    process = spawn("batch", "watch", batch_id, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"0/1  completed 0")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=WITHIN) == 130
    process.stdout.close()


def test_hold_and_resume_say_what_they_did_and_show_says_who_holds_it(
    busload: Busload, sync_bus: SyncCommandBus
) -> None:
    batch_id = str(sync_bus.create_batch("payments", [BatchCommand("Debit")]))
    hold = ("batch", "hold", batch_id, "--reason", "the bank complains", "--operator", "ada")
    assert busload(*hold).stdout == "Held. Nothing more of it starts.\n"
    assert json.loads(busload(*hold, "--json").stdout)["held"] is False
    shown = busload("batch", "show", batch_id).stdout
    assert "OPERATOR" in shown and "ada" in shown and "the bank complains" in shown
    assert json.loads(busload("batch", "show", batch_id, "--json").stdout)["held_by"] == "ada"
    assert "held" in busload("batch", "explain", batch_id).stdout
    assert json.loads(busload("batch", "resume", batch_id, "--json").stdout)["resumed"] is True
    assert busload("batch", "resume", batch_id).stdout == "It was not held.\n"
    sync_bus.cancel_batch("payments", UUID(batch_id), reason="test")
    assert busload(*hold).exit_code == 1


def test_resume_says_that_the_budget_holds_what_a_person_held(busload: Busload, sync_bus: SyncCommandBus) -> None:
    batch_id = sync_bus.create_batch("payments", [BatchCommand("Debit")] * 3, budget=FailureBudget(0.1))
    sync_bus.hold_batch("payments", batch_id, reason="the bank complains")
    with psycopg.connect(sync_bus.dsn) as conn:  # commands that ran have failed meanwhile
        conn.execute("UPDATE busload.batch SET failed_count = 1")
    before = sync_bus.get_batch("payments", batch_id)
    dry = "Would let 0 commands go on, as the batch would be held again at once (1 of 3 commands has failed"
    assert busload("batch", "resume", str(batch_id), "--dry-run").stdout.startswith(dry)
    raised = json.loads(busload("batch", "resume", str(batch_id), "--budget", "0.5", "--dry-run", "--json").stdout)
    assert (raised["commands"], raised["held_again"]) == (3, False)
    assert sync_bus.get_batch("payments", batch_id) == before
    again = "Resumed, and held again at once by its budget: 1 of 3 commands has failed or waits for a person"
    assert busload("batch", "resume", str(batch_id)).stdout.startswith(again)
    assert json.loads(busload("batch", "resume", str(batch_id), "--json").stdout)["held_again"] is False


def test_show_tells_of_canary_and_budget_and_resume_raises_the_budget(
    busload: Busload, sync_bus: SyncCommandBus
) -> None:
    guards: Any = {"canary": Canary(2), "budget": FailureBudget(0.5)}
    batch_id = sync_bus.create_batch("payments", [BatchCommand("Debit") for _ in range(10)], **guards)
    shown = json.loads(busload("batch", "show", str(batch_id), "--json").stdout)
    assert (shown["canary_count"], shown["failure_budget"], shown["failure_budget_used"]) == (2, 5, 0)
    assert "failure budget" in busload("batch", "show", str(batch_id)).stdout
    assert "behind a canary" in busload("batch", "explain", str(batch_id)).stdout
    sync_bus.hold_batch("payments", batch_id, reason="lunch")
    assert busload("batch", "resume", str(batch_id), "--budget", "0.7", "--at-least", "8").stdout == "Resumed.\n"
    found = sync_bus.get_batch("payments", batch_id)
    assert found is not None and found.failure_budget == 8
    assert busload("batch", "resume", str(batch_id), "--budget", "7").exit_code == 2


def test_resume_says_how_to_end_a_canary_and_does_so_if_it_is_asked_to(
    busload: Busload, sync_bus: SyncCommandBus
) -> None:
    batch_id = str(sync_bus.create_batch("payments", [BatchCommand("Debit") for _ in range(10)], canary=Canary(2)))
    said = "It was not held. Its canary runs: with --end-canary, what waits for it starts now.\n"
    assert busload("batch", "resume", batch_id).stdout == said
    assert f"`busload batch resume {batch_id} --end-canary`" in busload("batch", "explain", batch_id).stdout
    would = busload("batch", "resume", batch_id, "--end-canary", "--dry-run").stdout
    assert "let 10 commands go on" in would
    found = sync_bus.get_batch("payments", UUID(batch_id))
    assert found is not None and found.canary_ended_at is None
    assert busload("batch", "resume", batch_id, "--end-canary").stdout == "Resumed.\n"
    assert len(sync_bus.list_batch_commands("payments", UUID(batch_id), status="PENDING")) == 10
    assert busload("batch", "resume", batch_id, "--end-canary").stdout == "It was not held.\n"


def test_set_budget_says_how_many_may_fail_and_whether_that_holds_the_batch(
    busload: Busload, sync_bus: SyncCommandBus
) -> None:
    batch_id = str(sync_bus.create_batch("payments", [BatchCommand("Debit")] * 10))
    assert busload("batch", "budget", batch_id, "0.3").stdout == "3 commands may fail, and 0 count.\n"
    with psycopg.connect(sync_bus.dsn) as conn:
        conn.execute("UPDATE busload.batch SET failed_count = 2")
    found = json.loads(busload("batch", "budget", batch_id, "0.1", "--at-least", "2", "--json").stdout)
    assert {name: value for name, value in found.items() if name not in ("batch_id", "domain")} == {
        "failure_budget": 2,
        "failure_budget_used": 2,
        "held": False,
        "held_at_once": False,
    }
    held = "1 command may fail, and 2 count. It is held at once: 2 of 10 commands have failed or wait for a person"
    assert busload("batch", "budget", batch_id, "0.1").stdout.startswith(held)
    still = "5 commands may fail, and 2 count. It is held: 2 of 10 commands"
    assert busload("batch", "budget", batch_id, "0.5").stdout.startswith(still)
    by_cause = json.loads(busload("batch", "budget", batch_id, "0.5", "--per-cause", "--json").stdout)
    assert (by_cause["failure_budget_used"], by_cause["held"]) == (0, True)


def test_reprioritize_says_how_many_commands_it_concerns(busload: Busload, sync_bus: SyncCommandBus) -> None:
    batch_id = str(sync_bus.create_batch("payments", [BatchCommand("Debit")] * 2))
    assert busload("batch", "reprioritize", batch_id, "9").stdout == "Gave 2 commands the priority 9.\n"
    result = json.loads(busload("batch", "reprioritize", batch_id, "-3", "--json").stdout)
    assert (result["priority"], result["changed"]) == (-3, 2)
    assert busload("batch", "reprioritize", batch_id, "40000").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("resume", "{held}", "--budget", "0"), "/budget/share: found 0.0, wanted a share of more than 0"),
        (("resume", "{held}", "--budget", "1.5"), "/budget/share: found 1.5, wanted a share of more than 0"),
        (("resume", "{held}", "--budget", "half"), "'half' is not a valid float"),
        (("resume", "{held}", "--budget", "0.5", "--at-least", "-1"), "/budget/at_least: found -1, wanted a whole"),
        (("resume", "{held}", "--at-least", "5"), "--at-least needs --budget"),
        (("budget", "{held}", "0"), "/budget/share: found 0.0, wanted a share of more than 0"),
        (("budget", "{held}"), "Missing argument 'SHARE'"),
        (("reprioritize", "{held}", "-40000"), "-40000 is not in the range"),
        (("reprioritize", "{held}", "high"), "'high' is not a valid integer"),
    ],
)
def test_what_is_wrong_at_the_shell_changes_nothing(
    busload: Busload, sync_bus: SyncCommandBus, database: Database, arguments: tuple[str, ...], said: str
) -> None:
    held = sync_bus.create_batch("payments", [BatchCommand("Debit")] * 10, budget=FailureBudget(0.5))
    sync_bus.hold_batch("payments", held, reason="lunch")
    before = database.everything(), sync_bus.get_batch("payments", held)
    result = busload("batch", *(argument.format(held=held) for argument in arguments))
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert (database.everything(), sync_bus.get_batch("payments", held)) == before


def test_cancel_keeps_the_reason_and_the_operator(
    busload: Busload, sync_bus: SyncCommandBus, database: Database
) -> None:
    batch_id = sync_bus.create_batch("payments", [BatchCommand("Debit") for _ in range(3)])
    result = busload("batch", "cancel", batch_id, "--reason", "wrong prices", "--operator", "ada")
    assert (result.exit_code, result.stdout) == (0, "Canceled 3 commands.\n")
    trail = json.loads(busload("batch", "show", batch_id, "--json").stdout)["audit_trail"]
    [canceled] = [event for event in trail if event["type"] == "BATCH_CANCELED"]
    assert canceled["operator"] == "ada"
    assert "wrong prices" in json.dumps(canceled["details"])
    again = json.loads(busload("batch", "cancel", batch_id, "--reason", "again", "--json").stdout)
    assert again == {"batch_id": str(batch_id), "domain": "payments", "canceled": 0}
    database.check_invariants()


def test_cancel_needs_a_reason(busload: Busload, sync_bus: SyncCommandBus) -> None:
    batch_id = sync_bus.create_batch("payments", [BatchCommand("Debit")])
    assert busload("batch", "cancel", batch_id).exit_code == 2
    assert busload("batch", "cancel", batch_id, "--reason", "").exit_code == 2
    found = sync_bus.get_batch("payments", batch_id)
    assert found is not None
    assert found.canceled_count == 0
