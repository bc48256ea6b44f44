"""`busload schedule`: what people see of schedules, and what they do with them."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from busload import BatchCommand, SyncCommandBus
from busload.commands.send import NO_BROKER
from busload.schedules.fire import fire
from tests.cli.conftest import Busload
from tests.given import DOMAIN, Database

APPLICATION = """
from datetime import timedelta
from busload import BatchCommand, CommandBus
bus = CommandBus({dsn!r})
bus.schedule("nightly", cron="0 2 * * *", timezone="Europe/Paris", command=BatchCommand("Debit"), domain="payments")
"""


@pytest.fixture
def declared(sync_bus: SyncCommandBus) -> SyncCommandBus:
    what = BatchCommand("Debit", data={"n": 1}, priority=3)
    sync_bus.schedule("nightly", cron="0 2 * * *", timezone="Europe/Paris", command=what, domain=DOMAIN)
    sync_bus.schedule("hourly", every=timedelta(hours=1), command=what, domain="crm", catch_up="all")
    sync_bus.schedules.sync()
    return sync_bus


@pytest.fixture
def application(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that declares one schedule, in the current folder."""
    (tmp_path / "nightly_app.py").write_text(APPLICATION.format(dsn=dsn))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield "nightly_app:bus"
    sys.modules.pop("nightly_app", None)


def test_schedules_are_listed_and_shown_with_their_next_due_times(busload: Busload, declared: SyncCommandBus) -> None:
    listed = busload("schedule", "ls").output.splitlines()
    assert [line.split()[0] for line in listed if not line.startswith(" ")] == ["NAME", "hourly", "nightly"]
    assert [one["name"] for one in json.loads(busload("schedule", "ls", "--domain", "crm", "--json").stdout)] == [
        "hourly"
    ]
    shown = busload("schedule", "show", "nightly")
    assert shown.exit_code == 0
    assert "Next due times in Europe/Paris: " in shown.output
    assert " 02:00:00" in shown.output
    found = json.loads(busload("schedule", "show", "nightly", "--json").stdout)
    assert (found["when"], found["priority"], len(found["next_times"])) == ("0 2 * * *", 3, 5)


def test_a_time_of_a_schedule_says_its_zone(
    busload: Busload, declared: SyncCommandBus, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The zone of the machine, beside that of the rule; a program reads UTC."""
    database.rows("UPDATE busload.schedule SET last_due_at = '2026-07-01 00:00:00Z'")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        told = busload("schedule", "show", "nightly").output
        listed = busload("schedule", "ls").output
        found = json.loads(busload("schedule", "show", "nightly", "--json").stdout)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert re.search(r"^next +\S+ (09|10):00:00.000 JST$", told, re.M), told
    assert re.search(r"Europe/Paris +\S+ (09|10):00:00.000 JST +2026-07-01 09:00:00.000 JST +-$", listed, re.M), listed
    assert re.search(r"^declared +\S+ \S+ JST$", told, re.M), told
    assert re.search(r"T0[01]:00:00(Z|\+00:00)$", found["next_due_at"]), found


def test_a_schedule_is_paused_resumed_and_triggered_by_somebody(
    busload: Busload, declared: SyncCommandBus, database: Database
) -> None:
    assert "Paused hourly." in busload("schedule", "pause", "hourly", "--reason", "audit", "--operator", "rosa").output
    assert "hourly was paused already." in busload("schedule", "pause", "hourly").output
    assert "by rosa: audit" in busload("schedule", "ls").output
    database.rows("UPDATE busload.schedule SET next_due_at = now() - interval '5 hours'")
    resumed = busload("schedule", "resume", "hourly").output
    assert resumed == "Resumed hourly. It has missed due times; its catch_up is all, at most 100.\n"
    assert "hourly was not paused." in busload("schedule", "resume", "hourly").output
    done = busload("audit", "ls").output.splitlines()[1:]
    assert len(done) == 2 and all(" hourly " in f"{line} " for line in done)
    sent = json.loads(busload("schedule", "trigger", "hourly", "--operator", "rosa", "--json").stdout)
    database.perform(fire(NO_BROKER))
    rows = json.loads(busload("schedule", "history", "hourly", "--json").stdout)
    assert ([row["type"] for row in rows].count("DUE"), rows[-1]["command_id"]) == (6, sent["command_id"])
    assert "TRIGGERED" in busload("schedule", "history").output
    assert [one.operator for one in declared.audit.list(operator="rosa").actions] == ["rosa", "rosa"]


def test_a_name_that_is_mistyped_is_refused_with_the_likely_one(busload: Busload, declared: SyncCommandBus) -> None:
    for verb in ("show", "pause", "resume", "trigger", "history", "rm"):
        refused = busload("schedule", verb, "nightyl")
        assert refused.exit_code == 1
        assert "There is no schedule 'nightyl'. Did you mean 'nightly'?" in refused.stderr


def test_schedules_are_removed_after_a_dry_run(busload: Busload, declared: SyncCommandBus, database: Database) -> None:
    would = busload("schedule", "rm", "nightly", "hourly", "--dry-run").stdout
    assert would == "Would remove 2 schedules: nightly, hourly; nothing was done.\n"
    assert database.count("schedule") == 2
    assert busload("schedule", "rm", "nightly", "hourly").stdout == "Removed nightly, hourly.\n"
    assert database.count("schedule") == 0
    assert "There are no schedules." in busload("schedule", "ls").output
    assert "Nothing was fired." in busload("schedule", "history").output


def test_an_application_is_kept_in_its_database_and_what_it_left_is_removed(
    busload: Busload, application: str, database: Database, sync_bus: SyncCommandBus
) -> None:
    sync_bus.schedule("old", every=timedelta(hours=1), command=BatchCommand("Debit"), domain=DOMAIN)
    sync_bus.schedule("foreign", every=timedelta(hours=1), command=BatchCommand("Debit"), domain="crm")
    sync_bus.schedules.sync()
    would = busload("schedule", "sync", application, "--remove", "--dry-run").stdout
    assert would == "Would declare 1 schedule (nightly), and remove 1 schedule (old); nothing was done.\n"
    assert [one.name for one in sync_bus.schedules.list()] == ["foreign", "old"]
    assert json.loads(busload("schedule", "sync", application, "--json").stdout) == {
        "declared": ["nightly"],
        "removed": [],
    }
    done = busload("schedule", "sync", application, "--remove", "--operator", "rosa").stdout
    assert done == "Declared 0 schedules, and removed 1 schedule (old).\n"
    assert [one.name for one in sync_bus.schedules.list()] == ["foreign", "nightly"]
    assert busload("schedule", "sync", "nowhere:bus").exit_code == 2
