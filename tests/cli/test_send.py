"""`busload send` at a shell."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from click.testing import CliRunner

from busload import CommandMetadata, Dedup, SyncCommandBus
from busload.cli import main
from tests.cli.conftest import Busload
from tests.given import DOMAIN, Database, Given


def sent(busload: Busload, bus: SyncCommandBus, *arguments: object) -> CommandMetadata:
    result = busload("send", DOMAIN, "Debit", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    found = bus.get_command(DOMAIN, bus.list_commands(DOMAIN).commands[0].command_id)
    assert found is not None
    assert json.loads(result.stdout) == {"command_id": str(found.command_id), "domain": DOMAIN, "created": True}
    return found


def test_a_command_is_sent_with_all_its_options(busload: Busload, sync_bus: SyncCommandBus, tmp_path: Path) -> None:
    plain = busload("send", DOMAIN, "Debit")
    assert plain.stdout == f"Sent {sync_bus.list_commands().commands[0].command_id} to {DOMAIN}.\n"
    command_id = uuid4()
    options = ("--priority", 7, "--task-key", "a:1", "--max-attempts", 2, "--reply-to", "answers", "--id", command_id)
    found = sent(busload, sync_bus, "--data", '{"cents": 400}', "--run-at", "2090-01-01T08:00+00:00", *options)
    assert (found.command_id, found.data, found.priority, found.task_key) == (command_id, {"cents": 400}, 7, "a:1")
    assert (found.max_attempts, found.reply_to) == (2, "answers")
    assert found.run_at == datetime(2090, 1, 1, 8, tzinfo=UTC)
    (tmp_path / "debit.json").write_text('{"cents": 500}')
    assert sent(busload, sync_bus, "--data", f"@{tmp_path}/debit.json").data == {"cents": 500}


def test_a_command_that_expires_is_sent_and_shown(busload: Busload, sync_bus: SyncCommandBus) -> None:
    found = sent(busload, sync_bus, "--expires-at", "2090-01-01T08:00+00:00", "--fair-by", "customer-7")
    assert found.expires_at == datetime(2090, 1, 1, 8, tzinfo=UTC)
    shown = busload("command", "show", str(found.command_id))
    assert "expires" in shown.stdout and "2090-01-01" in shown.stdout
    [in_json] = json.loads(busload("command", "ls", "--json").stdout)
    assert datetime.fromisoformat(in_json["expires_at"]) == found.expires_at


def test_a_command_that_expires_too_early_is_not_sent(
    busload: Busload, sync_bus: SyncCommandBus, database: Database
) -> None:
    before = database.everything()
    past = busload("send", DOMAIN, "Debit", "--expires-at", "2020-01-01T08:00+00:00")
    assert past.exit_code != 0 and "which has passed; wanted a time to come" in past.stderr
    assert "INVALID_TIME at /expires_at" in past.stderr, "a single command has no place in a list"
    for never in ("now", "soon"):
        refused = " ".join(busload("send", DOMAIN, "Debit", "--expires-at", never).stderr.split())
        assert f"found '{never}', wanted a time to come: a span such as 30s, 2h or 1d, or a time such as" in refused
    early = busload("send", DOMAIN, "Debit", "--expires-at", "1h", "--run-at", "2h")
    assert early.exit_code != 0 and "wanted a time after run_at" in early.stderr
    of_batch = busload("send", DOMAIN, "Debit", "--fair-by", "x" * 256)
    assert of_batch.exit_code != 0 and "found 256 bytes, at most 255 are allowed" in of_batch.stderr
    assert database.everything() == before


def test_data_may_come_by_stdin(dsn: str, sync_bus: SyncCommandBus) -> None:
    arguments: list[Any] = ["send", DOMAIN, "Debit", "--data", "-"]
    result = CliRunner().invoke(main, arguments, env={"BUSLOAD_DATABASE_URL": dsn}, input='{"cents": 600}')
    assert result.exit_code == 0, result.stderr
    assert sync_bus.list_commands().commands[0].data == {"cents": 600}


async def test_a_command_joins_an_open_batch(busload: Busload, given: Given) -> None:
    async with given.bus.open_batch(DOMAIN) as batch:
        await batch.add("Debit")
        await batch.checkpoint()
        assert busload("send", DOMAIN, "Debit", "--batch", batch.batch_id).exit_code == 0
    assert (await given.batch_now(batch.batch_id)).total_count == 2


def test_a_task_key_that_is_held_sends_nothing(busload: Busload, sync_bus: SyncCommandBus) -> None:
    first = sync_bus.send(DOMAIN, "Debit", task_key="a:1", dedup=Dedup()).command_id
    result = busload("send", DOMAIN, "Debit", "--task-key", "a:1", "--dedup")
    assert result.stdout == f"Sent nothing: command {first} in {DOMAIN} has this task key.\n"
    assert len(sync_bus.list_commands()) == 1


def test_wrong_input_is_refused_and_nothing_is_sent(busload: Busload, sync_bus: SyncCommandBus) -> None:
    for wrong in (("--data", "{"), ("--data", "@nowhere.json"), ("--priority", "high"), ("--run-at", "soon")):
        result = busload("send", DOMAIN, "Debit", *wrong)
        assert result.exit_code == 2, wrong
    assert busload("send", DOMAIN, "no type").exit_code == 2
    assert busload("send", DOMAIN, "Debit", "--dedup").exit_code == 2
    assert len(sync_bus.list_commands()) == 0


def test_a_domain_that_nobody_knows_is_noted(busload: Busload, sync_bus: SyncCommandBus) -> None:
    sync_bus.send(DOMAIN, "Debit")
    result = busload("send", "paymens", "Debit")
    assert result.exit_code == 0
    assert "Note: No command was ever sent to 'paymens'" in result.stderr
    assert "Did you mean 'payments'?" in result.stderr


def test_with_a_bus_the_data_is_checked_by_the_handlers_of_that_bus(
    sync_bus: SyncCommandBus, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop_that_checks.py").write_text(
        f"from busload import CommandBus\n\nbus = CommandBus({dsn!r})\n\n\n"
        '@bus.handler("shop", "ShipOrder")\nasync def ship(data: dict[str, int], ctx) -> None: ...\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    send = ("send", "--bus", "shop_that_checks:bus", "shop", "ShipOrder", "--data")
    refused = CliRunner().invoke(main, [*send, '{"order": "x"}'])
    assert refused.exit_code == 2
    assert "does not fit dict: Expected `int`, got `str`" in refused.stderr
    assert not sync_bus.list_commands().commands
    assert CliRunner().invoke(main, [*send, '{"order": 4}']).exit_code == 0
