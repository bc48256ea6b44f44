"""`busload troubleshooting` at a shell."""

from __future__ import annotations

import asyncio
import getpass
import json
import re
import shlex
from pathlib import Path
from typing import Annotated
from uuid import UUID, uuid4

import msgspec
import psycopg
import pytest

from busload import BatchStatus, Command, CommandStatus, HandlerContext, RetryPolicy
from busload.commands.data_type import DataType
from busload.dashboard import app
from tests.cli.conftest import Busload, Spawn, Until
from tests.dashboard.site import client
from tests.dashboard.test_pages import seen
from tests.given import DOMAIN, WITHIN, Given


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


async def cause_of(given: Given) -> str:
    [group] = await given.bus.troubleshooting.groups(DOMAIN)
    return group.fingerprint


async def test_groups_shows_what_waits_by_cause(busload: Busload, given: Given) -> None:
    _, command_ids = await given.in_troubleshooting(3)
    cause = await cause_of(given)
    [found] = json.loads(busload("troubleshooting", "groups", "--json").stdout)
    assert (found["fingerprint"], found["count"], found["domain"]) == (cause, 3, DOMAIN)
    assert set(found["command_ids"]) == {str(command_id) for command_id in command_ids}
    assert (found["command_types"], found["reasons"]) == (["Refuse"], ["PERMANENT"])
    columns, row = busload("troubleshooting", "groups", "--domain", DOMAIN, "--type", "Refuse").stdout.splitlines()
    assert columns.split()[:2] == ["GROUP", "COUNT"]
    assert row.split()[:3] == [cause, "3", DOMAIN]
    assert "CLOSED: account closed" in row
    for options in (("--type", "Debit"), ("--domain", "crm")):
        nothing = busload("troubleshooting", "groups", *options)
        assert nothing.stdout == "" and nothing.stderr.endswith("Nothing waits for a person.\n")
    [item, *_] = json.loads(busload("troubleshooting", "ls", "--json").stdout)
    assert item["fingerprint"] == cause


@pytest.mark.parametrize(
    ("verb", "options", "status", "event"),
    [
        ("retry", (), CommandStatus.IN_TROUBLESHOOTING_QUEUE, "OPERATOR_RETRIED"),  # tried again, and failed again
        ("complete", ("--result", '{"paid": 1}'), CommandStatus.COMPLETED, "OPERATOR_COMPLETED"),
        ("cancel", ("--reason", "paid twice"), CommandStatus.CANCELED, "OPERATOR_CANCELED"),
    ],
)
async def test_a_group_is_resolved_by_a_batch_of_its_own(
    busload: Busload, given: Given, verb: str, options: tuple[str, ...], status: str, event: str
) -> None:
    _, [first, second] = await given.in_troubleshooting(2)
    cause = await cause_of(given)
    before = given.database.everything()
    would = busload("troubleshooting", verb, "--group", cause, "--dry-run", *options)
    assert would.exit_code == 0
    assert would.stdout.startswith(f"Would {verb} 2 commands in {DOMAIN}; nothing was done.\n")
    assert given.database.everything() == before

    capitals = cause.upper()
    said = busload("troubleshooting", verb, "--group", capitals, "--operator", "ada", *options).stdout
    batch_id = UUID(said.split()[1])
    first_line, how_to_look = said.splitlines()
    assert first_line == f"Batch {batch_id} will {verb} 2 commands in {DOMAIN}."
    look = f"busload command ls --batch {batch_id} --json"
    assert f"`{look}`" in how_to_look
    await given.drained()
    assert (await given.batch_now(batch_id)).status == BatchStatus.COMPLETED
    [part] = json.loads(busload(*shlex.split(look)[1:]).stdout)
    assert part["result"] == {"moved": 2, "left": {}}
    for command_id in (first, second):
        assert await status_of(given, command_id) == status
        trail = await given.bus.get_audit_trail(DOMAIN, command_id)
        assert [(one.type, one.operator) for one in trail if one.operator] == [(event, "ada")]
    if verb != "retry":
        again = busload("troubleshooting", verb, "--group", cause, *options)
        assert (again.exit_code, again.stdout) == (0, f"Nothing waits for the cause {cause} in {DOMAIN} any more.\n")
    given.database.check_invariants()


async def test_a_patch_comes_as_an_argument_or_in_a_file(busload: Busload, given: Given, tmp_path: Path) -> None:
    _, [command_id] = await given.in_troubleshooting()
    cause = await cause_of(given)
    patch = '[{"op": "add", "path": "/currency", "value": "EUR"}]'
    retry = ("troubleshooting", "retry", "--group", cause)
    would = busload(*retry, "--dry-run", "--patch", patch)
    assert would.stdout.splitlines()[2].split(maxsplit=1) == [str(command_id), '{"n":0}  {"n":0,"currency":"EUR"}']
    [item] = json.loads(busload(*retry, "--dry-run", "--patch", patch, "--json").stdout)["sample"]
    assert (item["before"], item["after"]) == ({"n": 0}, {"n": 0, "currency": "EUR"})

    (tmp_path / "patch.json").write_text(patch)
    found = json.loads(busload(*retry, "--rate", 5, "--patch", f"@{tmp_path}/patch.json", "--json").stdout)
    assert (found["count"], found["action"], found["domain"]) == (1, "retry", DOMAIN)
    batch = await given.batch_now(UUID(found["batch_id"]))
    assert batch.custom_data is not None
    assert (batch.custom_data["patch"], batch.custom_data["rate"]) == (json.loads(patch), 5)
    await given.drained()
    assert (await given.command_now(command_id)).data == {"n": 0, "currency": "EUR"}


async def test_the_audit_tells_patch_and_retry_from_a_plain_retry(busload: Busload, given: Given) -> None:
    _, [first, _] = await given.in_troubleshooting(2)
    busload("troubleshooting", "retry", first)
    patch = '[{"op": "add", "path": "/currency", "value": "EUR"}]'
    busload("troubleshooting", "retry", "--group", await cause_of(given), "--patch", patch)
    await given.drained()
    rows = busload("audit", "ls", "--action", "OPERATOR_RETRIED").stdout.splitlines()[1:]
    assert ["OPERATOR_RETRIED (patched)" in row for row in rows] == [True, False]
    found = json.loads(busload("audit", "ls", "--action", "OPERATOR_RETRIED", "--json").stdout)
    assert [row["patched"] for row in found] == [True, False]


async def test_wait_follows_the_batch_until_it_completes(busload: Busload, given: Given) -> None:
    await given.in_troubleshooting(3)
    cause = await cause_of(given)
    async with given.running():
        cancel = ("troubleshooting", "cancel", "--group", cause, "--reason", "no", "--wait")
        result = await asyncio.to_thread(busload, *cancel)
    assert result.exit_code == 0
    *_, progress, outcome = result.stdout.splitlines()
    assert progress.startswith("1/1  completed 1")
    assert progress.endswith("COMPLETED")
    assert outcome == "3 of 3 commands canceled."
    assert await given.bus.troubleshooting.list(DOMAIN) == []


async def test_wait_says_how_many_a_patch_has_not_moved_and_why(busload: Busload, given: Given) -> None:
    """The shell knows no types of handlers, so only the worker sees that what the patch makes does not fit."""
    _, command_ids = await given.in_troubleshooting(4)
    small = Annotated[int, msgspec.Meta(le=0)]
    given.bus.handlers.data_types[DOMAIN, "Refuse"] = DataType(dict[str, small])
    retry = ("troubleshooting", "retry", "--group", await cause_of(given), "--wait", "--patch")
    async with given.running():
        result = await asyncio.to_thread(busload, *retry, '[{"op": "add", "path": "/paid", "value": 0}]')
        assert result.exit_code == 1
        *_, progress, outcome, reason = result.stdout.splitlines()
        assert progress.startswith("1/1  completed 1")
        assert outcome == "1 of 4 commands retried. 3 stay as they are, for example:"
        command_id, why = reason.strip().split(": ", 1)
        assert UUID(command_id) in command_ids
        assert why.startswith("what the patch makes does not fit: INVALID_DATA at /data/")
        assert why.endswith("Expected `int` <= 0")
        nothing_fits = '[{"op": "replace", "path": "", "value": {"paid": "no"}}]'
        result = await asyncio.to_thread(busload, *retry, nothing_fits, "--json")
    told = json.loads(result.stdout.splitlines()[-1])
    assert (result.exit_code, told["moved"], told["unknown"]) == (1, 0, 0)
    assert told["stay"] == json.loads(result.stdout.splitlines()[0])["count"]
    [why] = told["reasons"].values()  # one is named for all that stay for the same reason
    assert "Expected `int`, got `str`" in why
    given.database.check_invariants()


async def test_wait_says_that_nothing_is_known_of_what_was_given_up(
    given: Given, spawn: Spawn, until: Until, tmp_path: Path
) -> None:
    await given.in_troubleshooting(3)
    process = spawn("troubleshooting", "cancel", "--group", await cause_of(given), "--reason", "no", "--wait")
    said = tmp_path / "said.txt"
    await asyncio.to_thread(until, lambda: "0/1" in said.read_text())
    await given.bus.cancel_batch(DOMAIN, UUID(said.read_text().split()[1]), reason="not now")
    assert await asyncio.to_thread(process.wait, WITHIN) == 1
    assert said.read_text().splitlines()[-2:] == [
        "0 of 3 commands canceled.",
        "Nothing is known of 3: the batch has no result about them.",
    ]


async def test_wait_says_once_why_nothing_moves(given: Given, spawn: Spawn, until: Until, tmp_path: Path) -> None:
    await given.in_troubleshooting(3)
    cause = await cause_of(given)
    await given.bus.domains.pause(DOMAIN, operator="rosa")
    process = spawn("troubleshooting", "cancel", "--group", cause, "--reason", "no", "--wait")
    said = tmp_path / "said.txt"
    await asyncio.to_thread(until, lambda: "paused" in said.read_text())
    await given.bus.domains.resume(DOMAIN)
    await given.drained()
    assert await asyncio.to_thread(process.wait, WITHIN) == 0
    assert said.read_text().count("paused") == 1
    progress, outcome = said.read_text().splitlines()[-2:]
    assert progress.startswith("1/1  completed 1")
    assert outcome == "3 of 3 commands canceled."


async def test_commands_are_held_in_one_order_whatever_the_order_of_their_ids(
    busload: Busload, given: Given, dsn: str, until: Until
) -> None:
    """Two operators who name the same commands in opposite order would wait for each other"""
    _, command_ids = await given.in_troubleshooting(2)
    low, high = sorted(command_ids)
    hold = (
        "SELECT FROM busload.troubleshooting WHERE command = (SELECT id FROM busload.command WHERE command_id = %s)"
        " FOR UPDATE NOWAIT"
    )
    waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with psycopg.connect(dsn) as first:
        first.execute(hold, [low])
        retry = asyncio.create_task(asyncio.to_thread(busload, "troubleshooting", "retry", high, low))
        await asyncio.to_thread(until, lambda: given.database.value(waits))
        with psycopg.connect(dsn) as second:
            second.execute(hold, [high])
    said = await retry
    assert said.stdout == f"Retried {high} in payments.\nRetried {low} in payments.\n"


async def test_the_line_that_the_page_of_causes_shows_finds_what_the_page_shows(busload: Busload, given: Given) -> None:
    """With each filter of the page, and with all of them."""
    batch_id, _ = await given.in_troubleshooting(2)

    async def fail(command: Command, ctx: HandlerContext) -> None:
        raise RuntimeError("timed out")

    given.handler("Debit", fail, retry=RetryPolicy(max_attempts=1))
    bad = await given.batch(1)
    given.bus.handler("crm", "Push")(fail)
    await given.bus.send("crm", "Push", {}, max_attempts=1)
    await given.drained(domains=[DOMAIN, "crm"])
    of_each = {
        "": 3,
        "domain=crm": 1,
        "type=Refuse": 1,
        "reason=EXHAUSTED": 2,
        "reason=PERMANENT": 1,
        f"batch={bad}": 1,
        "text=TIMED+out": 2,
        "text=--it's": 0,
        f"domain={DOMAIN}&type=Refuse&reason=PERMANENT&batch={batch_id}&text=closed": 1,
        f"domain={DOMAIN}&type=Refuse&reason=PERMANENT&batch={bad}&text=closed": 0,
    }
    async with client(app(given.bus)) as site:
        for query, count in of_each.items():
            page = await seen(site, f"/troubleshooting?{query}")
            rows = [attributes["data-row"] for _, attributes in page.tags if "data-row" in attributes]
            [line] = re.findall("busload troubleshooting groups.*", page.text)
            words = shlex.split(line)[1:]
            found = json.loads(busload(*words, "--json").stdout)
            assert [f"{one['domain']}/{one['fingerprint']}" for one in found] == rows, query
            assert len(rows) == count, query


def test_groups_of_a_reason_that_there_is_not_are_refused(busload: Busload) -> None:
    assert busload("troubleshooting", "groups", "--reason", "BAD").exit_code == 2


async def test_groups_shows_in_what_messages_differ(busload: Busload, given: Given) -> None:
    await given.in_troubleshooting(2)
    given.database.rows(
        "UPDATE busload.troubleshooting SET error = json_build_object('type', 'E', 'message', 'No account ' || command)"
    )
    messages = json.loads(busload("troubleshooting", "groups", "--json").stdout)[0]["messages"]
    assert len(messages) == 2
    _, row, also = busload("troubleshooting", "groups").stdout.splitlines()
    assert f"E: {messages[0]}" in row
    assert also.strip() == f"also: {messages[1]}"


async def test_a_group_in_several_domains_needs_one_named(busload: Busload, given: Given) -> None:
    await given.in_troubleshooting()
    cause = await cause_of(given)
    error = '{"type": "PermanentCommandError", "code": "CLOSED", "message": "account closed"}'
    [(id,)] = given.database.rows("SELECT command FROM busload.troubleshooting")
    given.database.rows(
        "INSERT INTO busload.command (id, domain, command_id, command_type, data)"
        " VALUES (%s, 'crm', gen_random_uuid(), 'Refuse', '{}')",
        id + 1024 * 1024,
    )
    given.database.rows(
        "INSERT INTO busload.troubleshooting"
        " (command, domain, command_type, priority, attempt, forgiven, reason, error)"
        " VALUES (%s, 'crm', 'Refuse', 0, 1, 0, 'PERMANENT', %s)",
        id + 1024 * 1024,
        error,
    )
    refused = busload("troubleshooting", "retry", "--group", cause)
    assert refused.exit_code == 2
    assert "crm, payments. Add --domain." in refused.stderr
    found = json.loads(busload("troubleshooting", "retry", "--group", cause, "--domain", "crm", "--json").stdout)
    assert (found["domain"], found["count"]) == ("crm", 1)


async def test_a_group_is_named_instead_of_commands_and_exists(busload: Busload, given: Given) -> None:
    _, [command_id] = await given.in_troubleshooting()
    cause = await cause_of(given)
    before = given.database.everything()
    wrong: list[tuple[int, tuple[object, ...]]] = [
        (2, ("retry", command_id, "--group", cause)),
        (2, ("retry", command_id, "--wait")),
        (2, ("retry", command_id, "--rate", 1)),
        (2, ("retry", command_id, "--type", "Refuse")),
        (2, ("retry", command_id, "--patch", "[]")),
        (2, ("cancel", "--group", cause)),
        (2, ("complete", "--group", cause, "--patch", "[]")),
        (2, ("retry", "--group", cause, "--rate", 0)),
        (2, ("retry", "--group", cause, "--rate", "soon")),
        (2, ("retry", "--group", cause, "--patch", "[]")),
        (2, ("retry", "--group", cause, "--patch", "{no json")),
        (2, ("retry", "--group", cause, "--patch", "@no/such/file")),
        (2, ("retry", "--group", cause, "--patch", '[{"op": "remove", "path": "/no"}]')),
        (2, ("retry", "--group", cause, "--operator", "")),
        (2, ("retry", "--group", "abc", "--domain", DOMAIN)),
        (1, ("retry", "--group", "abc")),
        (1, ("retry", "--group", "0123456789ab")),
        (1, ("retry", "--group", "0123456789ab", "--domain", DOMAIN)),
        (1, ("retry", "--group", cause, "--domain", "crm")),
        (1, ("retry", "--group", cause, "--type", "Typo")),
        (1, ("retry", "--group", cause, "--type", "Typo", "--dry-run")),
    ]
    for exit_code, arguments in wrong:
        refused = busload("troubleshooting", *arguments)
        assert (refused.exit_code, refused.stdout) == (exit_code, ""), arguments
        assert "Error: " in refused.stderr
    assert given.database.everything() == before


async def test_all_domains_are_listed_together_with_their_total(busload: Busload, given: Given) -> None:
    _, command_ids = await given.in_troubleshooting(3)
    given.database.rows("UPDATE busload.command SET domain = 'crm' WHERE command_id = %s", command_ids[1])
    given.database.rows(
        "UPDATE busload.troubleshooting SET domain = c.domain FROM busload.command AS c WHERE c.id = command"
    )

    first = busload("troubleshooting", "ls", "--limit", 2)
    assert len(first.stdout.splitlines()) == 3
    assert first.stderr == "2 of 3 commands.\n"
    assert busload("troubleshooting", "ls").stderr == ""
    assert "1 of 2 commands." in busload("troubleshooting", "ls", "--domain", DOMAIN, "--limit", 1).stderr

    found = json.loads(busload("troubleshooting", "domains", "--json").stdout)
    assert [(each["domain"], each["count"]) for each in found] == [(DOMAIN, 2), ("crm", 1)]
    said = busload("troubleshooting", "domains")
    assert said.stdout.splitlines()[1].split()[:2] == [DOMAIN, "2"]
    assert said.stderr == "3 commands in 2 domains.\n"
    assert busload("troubleshooting", "domains", "--type", "Debit").stderr == "Nothing waits for a person.\n"


async def test_a_retry_says_that_a_batch_is_held(busload: Busload, given: Given) -> None:
    held, [first, _] = await given.in_troubleshooting(2)
    assert await given.bus.hold_batch(DOMAIN, held, reason="the bank is down")
    _, [free] = await given.in_troubleshooting(1)
    cause = await cause_of(given)
    says = f"They wait until the batch goes on: `busload batch resume {held}`."
    look = busload("troubleshooting", "retry", "--group", cause, "--dry-run").stdout
    assert look.splitlines()[-1] == f"Of these, 2 belong to a batch that is held. {says}"
    retried = busload("troubleshooting", "retry", free, first).stdout
    assert retried.splitlines()[2:] == [
        f"Of these, 1 belongs to a batch that is held. It waits until the batch goes on: `busload batch resume {held}`."
    ]
    answer = json.loads(busload("troubleshooting", "retry", "--group", cause, "--json").stdout)
    assert (answer["count"], answer["held"], answer["held_batches"]) == (1, 1, [str(held)])
