"""Contact activity goes to a marketing service in bulk; the service is called over HTTP and keeps a ledger."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from busload import SyncCommandBus
from examples.contact_activity.service import POISON, MarketingService
from examples.contact_activity.story import ACTIVITIES, LEADS
from tests.given import Database

ROOT = Path(__file__).parent.parent.parent
APPS = ("sqlalchemy_app", "django_app")
LOG2_OF_A_GROUP = 7


def run(app: str, dsn: str, url: str | None) -> list[str]:
    """What an application prints; a warning is an error."""
    environment = {**os.environ, "BUSLOAD_DATABASE_URL": dsn, "PYTHONWARNINGS": "error"}
    environment.pop("MARKETING_URL", None)
    if url is not None:
        environment["MARKETING_URL"] = url
    command = [sys.executable, "-m", f"examples.contact_activity.{app}"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def delivered(service: MarketingService, kind: str) -> dict[int, int]:
    """How often each record of a kind was taken, by its id."""
    names = {name: n for name, n in service.ledger.taken.items() if name.startswith(f"{kind}/")}
    return {int(name.partition("/")[2]): n for name, n in names.items()}


def recorded(database: Database) -> set[int]:
    """The ids of the activities whose transaction committed."""
    return {id for (id,) in database.rows("SELECT id FROM contact_activity")}


def poison(database: Database) -> int:
    return int(database.value("SELECT id FROM contact_activity WHERE comment LIKE %s", f"{POISON}%"))


def left_over(database: Database) -> list[int]:
    """The activities whose event has not been delivered."""
    return [id for (id,) in database.rows("SELECT contact_activity_id FROM contact_activity_event")]


@pytest.fixture(params=APPS)
def app(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_every_committed_activity_reaches_marketing_in_bulk(
    app: str, dsn: str, sync_bus: SyncCommandBus, database: Database
) -> None:
    """Single records in, bulk calls out, none after a rollback.

    The refused record waits alone. A service that wants fewer calls gets them, and nobody pays with an attempt.
    """
    with MarketingService(calls_per_second=3, busy=1) as service:
        said = run(app, dsn, service.url)

    bad = poison(database)
    assert len(recorded(database)) == ACTIVITIES
    assert delivered(service, "activities") == dict.fromkeys(recorded(database) - {bad}, 1)
    assert "They hung up." not in comments(service), "it was rolled back"
    assert left_over(database) == [bad]
    the_only_group_in_troubleshooting(sync_bus, "PERMANENT", code="422")

    assert service.ledger.answers[207] == len(set(service.ledger.keys)) == 5, "four groups of activities, one of scores"
    assert service.ledger.answers[429] > 0, "the limit was never met"
    assert no_attempt_failed(database)

    assert "Rolled back: nobody sends a fax any more" in said
    assert f"{ACTIVITIES} events wait, and {LEADS} scores, the last of each lead" in said
    assert synced("contact_activity_events", said) == (ACTIVITIES - 1, 1)
    assert synced("lead_scores", said) == (LEADS, 0)
    assert calls(said) == sum(service.ledger.answers.values()), "those that were refused too"
    assert any(re.fullmatch(r"A person must look at event \d+: 422, comment: not allowed", line) for line in said)
    scores_are_the_last_committed_ones(service, database)
    database.check_invariants()


def test_a_record_that_fails_every_call_is_isolated(
    app: str, dsn: str, sync_bus: SyncCommandBus, database: Database
) -> None:
    """A service that answers 500 to the whole call; 499 are delivered, and the bad one waits alone."""
    with MarketingService(strict=True) as service:
        said = run(app, dsn, service.url)

    bad = poison(database)
    assert delivered(service, "activities") == dict.fromkeys(recorded(database) - {bad}, 1)
    assert left_over(database) == [bad]
    the_only_group_in_troubleshooting(sync_bus, "EXHAUSTED", code="500")
    # One group fails twice as a whole; then each call halves what is suspected, and one more is for the others.
    assert service.ledger.answers[500] + service.ledger.answers[207] <= 5 + 1 + LOG2_OF_A_GROUP + 1
    assert len(service.ledger.keys) == len(set(service.ledger.keys)), "other items, another key"
    assert any(line.endswith(": 500, The service answered 500.") for line in said)
    scores_are_the_last_committed_ones(service, database)
    database.check_invariants()


def test_without_an_address_an_application_brings_its_own_service(dsn: str) -> None:
    assert synced("contact_activity_events", run(APPS[0], dsn, None)) == (ACTIVITIES - 1, 1)


def synced(buffer: str, said: list[str]) -> tuple[int, int]:
    """How many events an application says that it has synced, and how many are left."""
    [found] = [
        match for line in said if (match := re.fullmatch(rf"{buffer}: (\d+) synced, (\d+) left; calls: \d+", line))
    ]
    return int(found[1]), int(found[2])


def calls(said: list[str]) -> int:
    return sum(int(found) for line in said for found in re.findall(r"left; calls: (\d+)", line))


def scores_are_the_last_committed_ones(service: MarketingService, database: Database) -> None:
    """Five hundred were added by `add(..., conn=)` in an ORM's transaction, and one was sent for each lead."""
    assert delivered(service, "scores") == dict.fromkeys(range(1, LEADS + 1), 1)
    sent = {service.ledger.records[f"scores/{n}"]["score"] for n in range(1, LEADS + 1)}
    assert sent == {10 * ACTIVITIES // LEADS} == {score for (score,) in database.rows("SELECT score FROM lead")}


def comments(service: MarketingService) -> list[str]:
    return [record["comment"] for name, record in service.ledger.records.items() if name.startswith("activities/")]


def the_only_group_in_troubleshooting(bus: SyncCommandBus, reason: str, *, code: str) -> None:
    [group] = bus.troubleshooting.list("contact_activity_events")
    assert group.reason == reason
    assert [item["code"] for item in group.details["items"]] == [code]


def no_attempt_failed(database: Database) -> bool:
    return bool(database.value("SELECT count(*) = 0 FROM busload.execution WHERE outcome = 'FAILED_ATTEMPT'"))


# The service itself, so that what is asserted about its ledger means something.


@pytest.fixture
def service() -> Iterator[MarketingService]:
    with MarketingService(calls_per_second=3) as service:
        yield service


def post(service: MarketingService, records: Any, kind: str = "activities") -> tuple[int, Any]:
    request = urllib.request.Request(f"{service.url}/{kind}/bulk", json.dumps(records).encode())
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers.get("Retry-After") if error.code == 429 else json.load(error)


def test_the_service_answers_for_each_record(service: MarketingService) -> None:
    status, body = post(service, [{"id": 1, "comment": "fine"}, {"id": 2, "comment": POISON}])
    assert (status, [record["status"] for record in body["records"]]) == (207, [201, 422])
    status, body = post(service, [{"id": 1, "comment": "fine"}])
    assert (status, body["records"]) == (207, [{"id": 1, "status": 200}])
    assert service.ledger.taken == {"activities/1": 2}


def test_the_service_refuses_too_many_calls_and_too_many_records(service: MarketingService) -> None:
    assert post(service, [{"id": n} for n in range(1001)])[0] == 413
    assert post(service, ["no record"])[0] == 400
    assert post(service, [])[0] == 207
    assert post(service, [{"id": 1}]) == (429, "1")
    assert service.ledger.taken == {}


def test_the_service_starts_by_itself() -> None:
    command = [sys.executable, "-m", "examples.contact_activity.service", "--strict"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip().removeprefix("MARKETING_URL=")
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"{url}/activities/bulk", json.dumps([{"id": 1, "x": POISON}]).encode())
            with refused.value as error:
                assert error.code == 500
            with urllib.request.urlopen(f"{url}/ledger", timeout=10) as response:
                assert json.load(response) == {"taken": {}, "calls": {"500": 1}}
        finally:
            process.terminate()
