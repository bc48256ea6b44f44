"""`busload command` at a shell."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from uuid import uuid4

from busload import Command, HandlerContext, SyncCommandBus
from tests.cli.conftest import Busload
from tests.given import DOMAIN, Given


async def test_show_has_the_command_and_its_audit_trail(busload: Busload, given: Given) -> None:
    batch_id, [command_id] = await given.in_troubleshooting()

    found = json.loads(busload("command", "show", command_id, "--json").stdout)
    assert (found["status"], found["batch_id"]) == ("IN_TROUBLESHOOTING_QUEUE", str(batch_id))
    assert (found["data"], found["last_error_code"]) == ({"n": 0}, "CLOSED")
    assert [event["type"] for event in found["audit_trail"]] == ["SENT", "RECEIVED", "MOVED_TO_TROUBLESHOOTING"]

    said = busload("command", "show", command_id).stdout
    assert re.search(r'^data +\{"n":0\}$', said, re.MULTILINE)
    assert re.search("^last error +PermanentCommandError: CLOSED: account closed$", said, re.MULTILINE)
    assert "MOVED_TO_TROUBLESHOOTING" in said
    assert "\x1b" not in said


def test_show_asks_for_the_domain_where_an_id_is_in_several(busload: Busload, sync_bus: SyncCommandBus) -> None:
    command_id = uuid4()
    for domain in ("payments", "crm"):
        sync_bus.send(domain, "Push", {"to": domain}, command_id=command_id)
    result = busload("command", "show", command_id)
    assert result.exit_code == 2
    assert "is in several domains: crm, payments. Add --domain." in result.stderr
    found = json.loads(busload("command", "show", command_id, "--domain", "crm", "--json").stdout)
    assert found["data"] == {"to": "crm"}


async def test_cancel_says_whether_the_command_has_ended(busload: Busload, given: Given) -> None:
    waiting = await given.sent()
    result = busload("command", "cancel", waiting, "--reason", "paid twice", "--operator", "rosa")
    assert (result.exit_code, result.stdout) == (0, f"Canceled {waiting} in {DOMAIN}.\n")
    running = await given.sent()
    given.claimed()
    found = json.loads(busload("command", "cancel", running, "--reason", "paid twice", "--json").stdout)
    assert found == {"command_id": str(running), "domain": DOMAIN, "done": "asked to stop"}
    again = busload("command", "cancel", waiting, "--reason", "paid twice")
    assert again.exit_code == 1
    assert "is CANCELED. It has ended" in again.stderr
    assert given.database.rows("SELECT operator FROM busload.event WHERE type = 'CANCELED'") == [("rosa",)]


async def test_reschedule_takes_a_span_a_time_and_now(busload: Busload, given: Given) -> None:
    command_id = await given.sent()
    for run_at in ("2h", "2030-01-01T08:00+00:00", "now"):
        result = busload("command", "reschedule", command_id, "--run-at", run_at)
        assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{command_id} in {DOMAIN} runs now.\n"
    times = [event.details["run_at"] for event in await given.bus.get_audit_trail(DOMAIN, command_id) if event.details]
    soon, later, _ = map(datetime.fromisoformat, times)
    assert timedelta(hours=1) < soon - datetime.now(UTC) <= timedelta(hours=2)
    assert later == datetime(2030, 1, 1, 8, tzinfo=UTC)
    wrong = busload("command", "reschedule", command_id, "--run-at", "soon")
    assert wrong.exit_code == 2
    assert "found 'soon', wanted now, a span" in wrong.stderr


async def test_wait_prints_the_result_and_ends_with_one_if_there_is_none(busload: Busload, given: Given) -> None:
    async def paid(command: Command, ctx: HandlerContext) -> object:
        return {"paid": True}

    given.handler(function=paid)
    command_id = await given.sent()
    late = busload("command", "wait", command_id, "--timeout", 0)
    assert (late.exit_code, "has not ended after 0.0 s: it is PENDING." in late.stderr) == (1, True)
    await given.drained()
    result = busload("command", "wait", command_id)
    assert (result.exit_code, result.stdout) == (0, '{"paid":true}\n')
    found = json.loads(busload("command", "wait", command_id, "--json").stdout)
    assert (found["status"], found["result"]) == ("COMPLETED", {"paid": True})
    _, [parked] = await given.in_troubleshooting()
    failed = busload("command", "wait", parked, "--no-operator", "--json")
    assert failed.exit_code == 1
    assert (json.loads(failed.stdout)["code"], json.loads(failed.stdout)["message"]) == ("CLOSED", "account closed")


async def test_ls_lists_what_was_asked_for_newest_first(busload: Busload, given: Given) -> None:
    batch_id, [parked] = await given.in_troubleshooting()
    others = [await given.sent(task_key=f"t:{n}") for n in range(3)]

    found = json.loads(busload("command", "ls", "--json").stdout)
    assert [one["command_id"] for one in found] == [*map(str, others[::-1]), str(parked)]

    first = busload("command", "ls", "--type", "Debit", "--limit", 2)
    assert first.stdout.splitlines()[1].startswith(str(others[2]))
    assert len(first.stdout.splitlines()) == 3
    cursor = first.stderr.removeprefix("There may be more: --after ").strip()
    rest = json.loads(busload("command", "ls", "--type", "Debit", "--after", cursor, "--json").stdout)
    assert [one["command_id"] for one in rest] == [str(others[0])]

    def ids(*filters: object) -> list[str]:
        answer = busload("command", "ls", "--json", *filters)
        assert answer.exit_code == 0, answer.stderr
        return [one["command_id"] for one in json.loads(answer.stdout)]

    assert ids("--error", "ACCOUNT closed") == [str(parked)]
    assert ids("--status", "in_troubleshooting_queue") == [str(parked)]
    assert ids("--batch", str(batch_id)) == [str(parked)]
    assert ids("--task-key", "t:1", "--domain", DOMAIN) == [str(others[1])]
    assert ids("--since", "1h", "--until", "now", "--error", "account") == [str(parked)]
    assert ids("--until", "1d") == []
    assert busload("command", "ls", "--until", "1d").stderr == "There are no such commands.\n"
    assert busload("command", "ls", "--after", "17x").exit_code == 2
