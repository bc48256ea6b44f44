"""`busload command` at a shell."""

from __future__ import annotations

import json
from uuid import uuid4

from busload import SyncCommandBus
from tests.cli.conftest import Busload
from tests.given import Given


async def test_show_has_the_command_and_its_audit_trail(busload: Busload, given: Given) -> None:
    batch_id, [command_id] = await given.in_troubleshooting()

    found = json.loads(busload("command", "show", command_id, "--json").stdout)
    assert (found["status"], found["batch_id"]) == ("IN_TROUBLESHOOTING_QUEUE", str(batch_id))
    assert (found["data"], found["last_error_code"]) == ({"n": 0}, "CLOSED")
    assert [event["type"] for event in found["audit_trail"]] == ["SENT", "RECEIVED", "MOVED_TO_TROUBLESHOOTING"]

    said = busload("command", "show", command_id).stdout
    assert 'data         {"n":0}\n' in said
    assert "last error   PermanentCommandError: CLOSED: account closed\n" in said
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
