"""`busload prune` at a shell."""

from __future__ import annotations

import json

import pytest

from busload.cli import prune as cli
from busload.retention import prune
from tests.cli.conftest import Busload
from tests.given import Database, Given


async def ended_long_ago(given: Given) -> None:
    """A batch of two and a command, all completed a year ago."""
    given.handler("Debit")
    await given.batch(2)
    await given.sent()
    await given.drained()
    for table, column in (("command", "created_at"), ("execution", "finished_at"), ("batch", "completed_at")):
        given.database.rows(f"UPDATE busload.{table} SET {column} = {column} - interval '1 year'")


async def test_prune_removes_what_is_older_and_says_how_much(
    busload: Busload, given: Given, database: Database
) -> None:
    await ended_long_ago(given)
    assert busload("prune", "--older-than", "60w").stdout == (
        "Removed 0 commands, 0 executions, 0 events and 0 batches.\n"
    )
    result = busload("prune", "--older-than", "30d")
    assert (result.exit_code, result.stdout) == (0, "Removed 3 commands, 3 executions, 3 events and 1 batch.\n")
    assert [database.count(table) for table in ("command", "batch", "archive")] == [0, 0, 0]


async def test_a_dry_run_only_counts(busload: Busload, given: Given, database: Database) -> None:
    await ended_long_ago(given)
    before = database.everything()
    said = busload("prune", "--older-than", "12h", "--dry-run").stdout
    assert said == "Would remove 3 commands, 3 executions, 3 events and 1 batch; nothing was done.\n"
    found = json.loads(busload("prune", "--older-than", "90m", "--dry-run", "--json").stdout)
    assert found == {
        "older_than_seconds": 5400.0,
        "archive": False,
        "dry_run": True,
        "commands": 3,
        "executions": 3,
        "events": 3,
        "batches": 1,
    }
    assert database.everything() == before


async def test_archive_moves_it(busload: Busload, given: Given, database: Database) -> None:
    await ended_long_ago(given)
    assert busload("prune", "--older-than", "1w", "--archive").stdout.startswith("Archived 3 commands, ")
    assert [database.count(table) for table in ("command", "archive", "archived_batch")] == [0, 3, 1]


async def test_a_long_one_shows_how_far_it_is(busload: Busload, given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    await ended_long_ago(given)
    monkeypatch.setattr(cli, "PLAIN_EVERY", 0.0)
    monkeypatch.setattr(prune, "SLICE", 1)
    result = busload("prune", "--older-than", "1w")
    assert "Removed 2 commands, 2 executions, 3 events and 1 batch …\n" in result.stderr
    assert result.stdout == "Removed 3 commands, 3 executions, 3 events and 1 batch.\n"
    assert busload("prune", "--older-than", "1w", "--json").stderr == ""


@pytest.mark.parametrize("age", ["30 x", "30", "d", "0d", "-3d", "1.5h", "30d12h", "", "٣d", "99999999d"])
def test_an_age_that_cannot_be_read_is_answered_with_examples(offline: Busload, age: str) -> None:
    refused = offline("prune", "--older-than", age)
    assert refused.exit_code == 2
    assert "30d, 12h, 90m or 1w" in refused.stderr


def test_an_age_that_is_too_long_is_refused(busload: Busload) -> None:
    refused = busload("prune", "--older-than", "9999999d")
    assert refused.exit_code == 2
    assert "at most 36525 days" in refused.stderr


def test_there_is_no_default_age(offline: Busload) -> None:
    assert offline("prune").exit_code == 2
