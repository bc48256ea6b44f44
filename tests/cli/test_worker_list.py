"""`busload worker ls` and `stop` at a shell."""

from __future__ import annotations

import json

from tests.cli.conftest import Busload
from tests.given import DOMAIN, Given


async def test_workers_are_listed_with_what_they_hold(busload: Busload, given: Given) -> None:
    await given.batch(5)
    given.registered_worker()
    busy = given.registered_worker()
    given.claimed(3, by=busy)

    said = busload("worker", "ls")
    assert said.exit_code == 0, said.stderr
    assert said.stdout.split("\n")[0].split() == [
        *(
            "NAME",
            "STATE",
            "DOMAINS",
            "CONCURRENCY",
            "COMMANDS",
            "LEASES",
            "HOST",
            "PROCESS",
            "VERSION",
            "SEEN",
            "STARTED",
        )
    ]
    first, second = json.loads(busload("worker", "ls", "--json").stdout)
    assert (first["name"], first["state"], first["domains"], first["concurrency"]) == ("given", "ALIVE", [DOMAIN], 10)
    assert (first["commands"], first["leases"]) == (3, 1)
    assert (second["commands"], second["leases"]) == (0, 0)


async def test_each_state_is_told(busload: Busload, given: Given) -> None:
    silent, stopped, lost = (given.registered_worker() for _ in range(3))
    given.died(lost)
    given.rescued()
    given.died(silent)
    given.database.rows("UPDATE busload.worker SET stopped_at = now() WHERE worker = %s", stopped)

    def states(*options: str) -> list[str]:
        return [one["state"] for one in json.loads(busload("worker", "ls", "--json", *options).stdout)]

    assert states() == ["SILENT"]
    assert states("--all") == ["LOST", "STOPPED", "SILENT"]
    assert states("--all", "--domain", "crm") == []
    nothing = busload("worker", "ls", "--domain", "crm")
    assert "No worker runs." in nothing.stderr


async def test_a_worker_is_asked_to_stop(busload: Busload, given: Given) -> None:
    given.registered_worker()
    said = busload("worker", "stop", "given", "--reason", "replaced", "--operator", "ada")
    assert (said.exit_code, said.stdout) == (0, "Asked 1 worker to stop.\n")
    [seen] = json.loads(busload("worker", "ls", "--json").stdout)
    assert (seen["state"], seen["stop_requested_by"]) == ("STOPPING", "ada")
    assert "was asked to stop already" in busload("worker", "stop", "given").stdout
    unknown = busload("worker", "stop", "nobody")
    assert unknown.exit_code == 1
    assert "No worker 'nobody' runs" in unknown.stderr
    [action] = json.loads(busload("audit", "ls", "--operator", "ada", "--json").stdout)
    assert (action["type"], action["worker_name"], action["reason"]) == ("WORKER_ASKED_TO_STOP", "given", "replaced")
    assert "No operator did anything like that." in busload("audit", "ls", "--action", "DOMAIN_PAUSED").stderr
    listed = busload("audit", "ls", "--since", "1h").stdout
    assert "WORKER_ASKED_TO_STOP" in listed
    assert "replaced" in listed


def test_the_worker_itself_is_run_as_before(offline: Busload) -> None:
    assert "MODULE:BUS" in offline("worker", "--help").stdout
    assert "List workers" in offline("worker", "ls", "--help").stdout
    assert "--dsn" in offline("worker", "ls", "--help").stdout
