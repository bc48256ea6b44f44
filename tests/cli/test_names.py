"""What people type: the beginning of an id, and domains that may be mistyped."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest
from click.testing import Result

from busload import BatchCommand, RateLimit, Stage, SyncCommandBus
from busload.limits import rate
from busload.limits.rate import Ask
from tests.cli.conftest import Busload
from tests.given import DOMAIN, Database, Given

BATCH, TWIN = UUID("0198c5d2-7f3a-7c11-9d2e-5b1c8a6e4f00"), UUID("0198c5d2-7f3b-7c11-9d2e-5b1c8a6e4f00")
COMMAND = UUID("0298c5d2-7f3a-7c11-9d2e-5b1c8a6e4f00")
JOB = UUID("0398c5d2-7f3a-7c11-9d2e-5b1c8a6e4f00")
UNKNOWN = "No command was ever sent to 'paymnts', and no worker serves it. Did you mean 'payments'?"


@pytest.fixture
def shop(sync_bus: SyncCommandBus) -> None:
    sync_bus.create_batch(
        DOMAIN, [BatchCommand("Debit", COMMAND, task_key="invoice:7")], batch_id=BATCH, name="January"
    )
    sync_bus.create_batch("crm", [BatchCommand("Push")], batch_id=TWIN)
    sync_bus.jobs.create(DOMAIN, [Stage("debit", [BatchCommand("Debit")])], job_id=JOB)


def error(result: Result) -> str:
    return result.stderr.partition("Error: ")[2]


@pytest.mark.parametrize("beginning", ["0198c5d2-7f3a", "0198c5d27f3a7", "0198C5D2-7F3A-7", "0198c5d2-7f3a…", BATCH])
def test_the_beginning_of_an_id_will_do(busload: Busload, shop: None, beginning: object) -> None:
    assert json.loads(busload("batch", "show", beginning, "--json").stdout)["batch_id"] == str(BATCH)


def test_every_command_that_takes_an_id_takes_its_beginning(busload: Busload, shop: None) -> None:
    batch, command, job = "0198c5d2-7f3a", "0298", "0398c5"
    for words in (
        ("batch", "show", batch),
        ("batch", "explain", batch),
        ("batch", "ls", "--job", job),
        ("outbox", "ls", "--batch", batch),
        ("outbox", "retry", "--batch", batch),
        ("outbox", "reroute", "--batch", batch),
        ("command", "show", command),
        ("command", "show", command, "--domain", DOMAIN),
        ("command", "explain", command),
        ("job", "show", job),
        ("trace", command),
        ("trace", COMMAND),
        ("batch", "cancel", batch, "--reason", "test"),
        ("job", "cancel", job, "--reason", "test"),
    ):
        result = busload(*words)
        assert result.exit_code == 0, (words, result.output)
    assert error(busload("batch", "dispatch", batch)).startswith("There is no report: ")
    assert busload("batch", "watch", batch).exit_code == 1  # it was canceled
    assert f"{COMMAND}" in error(busload("troubleshooting", "retry", command))


def test_a_beginning_that_is_not_enough_is_answered_with_the_candidates(busload: Busload, shop: None) -> None:
    result = busload("batch", "show", "0198c5d27f")
    assert result.exit_code == 2
    assert error(result).splitlines() == [
        "There are several batches that begin with 0198c5d2-7f. Write more of the id:",
        f"  {BATCH}  payments  January, PENDING",
        f"  {TWIN}  crm       PENDING",
    ]
    assert busload("batch", "show", "0198c5d27f", "--domain", "crm").exit_code == 0


def test_many_candidates_are_listed_in_part(busload: Busload, sync_bus: SyncCommandBus) -> None:
    sync_bus.send_many(DOMAIN, [BatchCommand("Debit", UUID(int=(0x0298 << 112) + n)) for n in range(1, 20)])
    lines = error(busload("command", "show", "0298")).splitlines()
    assert len(lines) == 12
    assert lines[-1] == "  and more"


def test_a_beginning_of_nothing_is_not_found(busload: Busload, shop: None) -> None:
    result = busload("batch", "show", "0198c5d2-7f3c")
    assert result.exit_code == 1
    assert error(result) == (
        "There is no batch that begins with 0198c5d2-7f3c in any domain. Check the id, and which database is used.\n"
    )
    elsewhere = busload("batch", "show", "0198c5d2-7f3a", "--domain", "crm")
    assert elsewhere.exit_code == 1
    assert "that begins with 0198c5d2-7f3a in domain 'crm'" in error(elsewhere)


def test_a_command_id_in_two_domains_needs_its_domain(busload: Busload, sync_bus: SyncCommandBus) -> None:
    for domain in (DOMAIN, "crm", "mail"):
        sync_bus.send(domain, "Debit", command_id=COMMAND)
    result = busload("command", "show", "0298c5d2")
    assert result.exit_code == 2
    assert f"Command {COMMAND} is in several domains: crm, mail, payments. Add --domain." in result.stderr
    assert busload("command", "show", "0298c5d2", "--domain", "mail").exit_code == 0


def test_a_command_without_a_task_key_is_not_traced_but_shown(busload: Busload, sync_bus: SyncCommandBus) -> None:
    sync_bus.send(DOMAIN, "Debit", command_id=COMMAND)
    result = busload("trace", "0298c5d2")
    assert result.exit_code == 1
    assert f"`busload command show {COMMAND}`" in error(result)


def test_pausing_a_domain_that_nobody_knows_is_refused_unless_forced(busload: Busload, shop: None) -> None:
    result = busload("domain", "pause", "paymnts")
    assert result.exit_code == 1
    assert error(result) == f"{UNKNOWN} Nothing was paused; add --force to pause it all the same.\n"
    assert json.loads(busload("domain", "pauses", "--json").stdout) == []
    assert error(busload("domain", "resume", "paymnts")) == f"{UNKNOWN} Nothing was resumed.\n"
    forced = busload("domain", "pause", "paymnts", "--force")
    assert (forced.exit_code, forced.stdout) == (0, "Paused paymnts.\n")
    assert busload("domain", "resume", "paymnts").stdout == "Resumed paymnts.\n"


async def test_a_domain_is_known_by_what_happened_there(busload: Busload, given: Given) -> None:
    given.registered_worker()  # serves payments
    await given.bus.jobs.create("jobs", [Stage("debit", [BatchCommand("Debit")])])
    await given.bus.send("sent", "Debit")
    await given.bus.open_batch("opened").__aenter__()
    await given.bus.buffer("events", size=2, max_age=timedelta(1)).add(1)
    for domain in (DOMAIN, "jobs", "sent", "opened", "events"):
        assert busload("domain", "pause", domain).exit_code == 0, domain


def test_names_of_limits_buffers_and_buses_are_guessed_too(
    busload: Busload, sync_bus: SyncCommandBus, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.perform(rate.ask({("crm.example.com", ""): Ask(RateLimit(1), 1)}))
    sync_bus.buffer("contact_events", size=2, max_age=timedelta(1)).add(1)
    (tmp_path / "shop_app.py").write_text("from busload import CommandBus\nbus = CommandBus()")
    monkeypatch.chdir(tmp_path)
    assert "Did you mean 'crm.example.com'?" in busload("limit", "show", "crm.exmple.com").stderr
    assert "Did you mean" not in busload("limit", "reset", "crm.example.com", "--by", "x").stderr
    assert "Did you mean 'contact_events'?" in busload("buffer", "show", "contact_event").stderr
    assert "'shop_app' has no 'buss'. Did you mean 'bus'?" in busload("worker", "shop_app:buss").stderr


@pytest.mark.parametrize(
    "words",
    [
        "batch ls",
        "job ls",
        "troubleshooting ls",
        "troubleshooting groups",
        "outbox ls",
        "outbox retry",
        "outbox reroute",
        "domain pauses",
        "tracker recover",
    ],
)
def test_an_empty_answer_says_if_the_domain_is_not_known(busload: Busload, shop: None, words: str) -> None:
    option = {"domain pauses": [], "tracker recover": ["--queue"]}.get(words, ["--domain"])
    result = busload(*words.split(), *option, "paymnts")
    assert result.exit_code == 0
    assert f"Note: {UNKNOWN}\n" in result.stderr
    assert "Note: " not in busload(*words.split(), *option, "payments").stderr
