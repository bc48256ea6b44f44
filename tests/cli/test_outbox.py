"""`busload outbox`, `busload batch dispatch`, and brokers named at a shell."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from busload import BatchCommand, CommandBus, Settings
from busload.cli import main
from tests.brokers.faulty import FaultyTransport
from tests.cli.conftest import Busload, Spawn, Until
from tests.given import DOMAIN, WITHIN, Database


@pytest.fixture
def transport(dsn: str) -> FaultyTransport:
    return FaultyTransport(dsn)


@pytest.fixture
async def broken(dsn: str, settings: Settings, transport: FaultyTransport) -> AsyncIterator[CommandBus]:
    """A bus whose broker is away."""
    transport.refuse()
    async with CommandBus(dsn, transport=transport, settings=settings) as bus:
        yield bus


def commands(count: int) -> list[BatchCommand]:
    return [BatchCommand("Debit", data={"n": n}) for n in range(count)]


async def test_what_waits_is_listed_tried_again_and_rerouted(
    busload: Busload, broken: CommandBus, database: Database
) -> None:
    nothing = busload("outbox", "ls")
    assert (nothing.exit_code, nothing.stderr) == (0, "Nothing waits to be published.\n")
    batch_id = await broken.create_batch(DOMAIN, commands(30))
    await broken.send("crm", "Push")

    crm, payments = json.loads(busload("outbox", "ls", "--json").stdout)
    assert (crm["domain"], crm["commands"], crm["reason"]) == ("crm", 1, None)
    assert (payments["commands"], payments["rounds"], payments["reason"]) == (30, 1, "UNREACHABLE")
    heading, first, second = busload("outbox", "ls").stdout.splitlines()
    assert heading.split()[:4] == ["TRANSPORT", "DOMAIN", "COMMANDS", "ROUNDS"]
    assert "not tried yet" in first
    assert second.endswith("nobody answers")
    assert json.loads(busload("outbox", "ls", "--batch", batch_id, "--domain", "crm", "--json").stdout) == []
    assert "OUTBOX" in busload("domain", "ls").stdout

    assert busload("outbox", "retry", "--dry-run").stdout == "Would try 30 commands again; nothing was done.\n"
    database.rows("UPDATE busload.outbox SET relay = gen_random_uuid() WHERE rounds > 0")  # a relay has it in hand
    assert busload("outbox", "retry", "--dry-run").stdout == "Would try 0 commands again; nothing was done.\n"
    assert busload("outbox", "retry").stdout == "0 commands are due now.\n"
    database.rows("UPDATE busload.outbox SET relay = NULL")
    assert busload("outbox", "retry", "--domain", "crm").stdout == "0 commands are due now.\n"
    assert json.loads(busload("outbox", "retry", "--json").stdout) == {"commands": 30, "dry_run": False}
    assert database.value("SELECT count(*) FROM busload.outbox WHERE due_at > now()") == 0

    assert busload("outbox", "reroute", "--dry-run").stdout == "Would reroute 30 commands; nothing was done.\n"
    assert database.count("outbox") == 2
    done = busload("outbox", "reroute", "--batch", batch_id, "--operator", "rosa")
    assert (done.exit_code, done.stdout) == (0, "Rerouted 30 commands.\n")
    assert database.rows("SELECT operator, hi - lo + 1 FROM busload.event WHERE type = 'REROUTED'") == [("rosa", 30)]
    assert busload("outbox", "reroute").stdout == "Rerouted 0 commands.\n"
    assert json.loads(busload("outbox", "reroute", "--all", "--json").stdout) == {"commands": 1, "dry_run": False}
    assert database.count("outbox") == 0


async def test_dispatch_tells_how_a_batch_was_published(
    busload: Busload, broken: CommandBus, transport: FaultyTransport, dsn: str
) -> None:
    batch_id = await broken.create_batch(DOMAIN, commands(30), stage="import")
    said = busload("batch", "dispatch", batch_id).stdout
    assert "status           partial_success\n" in said
    assert "to be published  30\n" in said
    assert "UNREACHABLE: nobody answers" in said
    found = json.loads(busload("batch", "dispatch", batch_id, "--json").stdout)
    assert (found["database_tasks"], found["queued_tasks"], found["retry_needed"]) == (30, 0, True)
    assert (found["stage"], found["tasks_failed"], found["recovery_possible"]) == ("import", 0, True)
    async with CommandBus(dsn) as plain:
        without = await plain.create_batch(DOMAIN, commands(1))
    result = busload("batch", "dispatch", without)
    assert result.exit_code == 1
    assert "created without a broker" in result.stderr


async def test_both_sides_are_compared_at_a_shell(busload: Busload, dsn: str, database: Database) -> None:
    alone = busload("outbox", "reconcile")
    assert alone.exit_code == 2
    assert "BUSLOAD_TRANSPORT_URL" in alone.stderr
    async with CommandBus(dsn, transport=dsn) as bus:
        await bus.create_batch(DOMAIN, commands(30))
    database.rows("UPDATE busload.queue SET published_at = now() - interval '1 minute'")
    reconcile = ("outbox", "reconcile", "--transport", dsn)
    [found] = json.loads(run(dsn, *reconcile, "--json").stdout)
    assert (found["published"], found["messages"], found["missing"]) == (30, 1, 0)
    database.rows("DELETE FROM busload.message")
    result = run(dsn, *reconcile)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[1].split() == ["busload.payments", "30", "0", "0", "0", "0", "30", "0"]
    repaired = run(dsn, *reconcile, "--repair", "--json")
    assert (repaired.exit_code, json.loads(repaired.stdout)[0]["published_again"]) == (0, 30)
    assert database.count("message") == 1
    database.rows("UPDATE busload.message SET body = 'nonsense'")
    said = run(dsn, *reconcile, "--repair").stdout.splitlines()
    assert (said[0].endswith("REMOVED"), said[1].split()[-1]) == (True, "1")
    nothing = run(dsn, *reconcile, "--domain", "nosuch")
    assert (nothing.exit_code, nothing.stdout, nothing.stderr.splitlines()[-1]) == (
        0,
        "",
        "There is nothing in domain 'nosuch'.",
    )


async def test_the_shell_meets_the_queues_of_an_application_with_another_prefix(dsn: str, database: Database) -> None:
    async with CommandBus(dsn, transport=dsn, settings=Settings(queue_prefix="prod")) as bus:
        await bus.create_batch(DOMAIN, commands(30))
    database.rows("UPDATE busload.queue SET published_at = now() - interval '1 minute'")
    reconcile = ("outbox", "reconcile", "--transport", dsn, "--json")
    for result in (
        run(dsn, *reconcile, "--queue-prefix", "prod"),
        run(dsn, *reconcile, BUSLOAD_QUEUE_PREFIX="prod"),
    ):
        [found] = json.loads(result.stdout)
        assert (result.exit_code, found["queue"], found["messages"], found["missing"]) == (0, "prod.payments", 1, 0)
    assert json.loads(run(dsn, *reconcile).stdout)[0]["missing"] == 30
    refused = run(dsn, "outbox", "reconcile", "--queue-prefix", "no good")
    assert (refused.exit_code, "found 'no good'" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    "command", ["batch ls", "job ls", "outbox ls", "outbox retry", "outbox reroute", "schema migrate", "domain ls"]
)
def test_what_needs_no_broker_does_not_mind_one_that_cannot_be(dsn: str, command: str) -> None:
    result = run(dsn, *command.split(), BUSLOAD_TRANSPORT_URL="carrier://ada:geheim@pigeon")
    assert (result.exit_code, "carrier" in result.output) == (0, False)


def test_what_needs_a_broker_says_what_is_wrong_with_it(spawn: Spawn, dsn: str, tmp_path: Path) -> None:
    variables = {"BUSLOAD_TRANSPORT_URL": "carrier://ada:geheim@pigeon"}
    result = run(dsn, "outbox", "reconcile", **variables)
    assert (result.exit_code, "found the scheme 'carrier'" in result.stderr) == (2, True)
    helped = spawn("demo", "--help", env={**os.environ, **variables})
    assert helped.wait(WITHIN) == 0, (tmp_path / "said.txt").read_text()


def run(dsn: str, *arguments: str, **variables: str) -> Result:
    """In a thread, where it may have an event loop: this one has one that runs already."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(
            lambda: CliRunner().invoke(main, list(arguments), env={"BUSLOAD_DATABASE_URL": dsn} | variables)
        ).result()


@pytest.mark.parametrize("command", [("demo",), ("worker", "app:bus"), ("outbox", "reconcile")])
def test_a_broker_that_cannot_be_is_refused_without_its_password(offline: Busload, command: tuple[str, ...]) -> None:
    result = offline(*command, "--transport", "carrier://ada:geheim@pigeon")
    assert result.exit_code == 2
    assert "found the scheme 'carrier'" in result.stderr
    assert "geheim" not in result.output


def test_a_password_on_the_command_line_is_warned_about(offline: Busload) -> None:
    result = offline("outbox", "reconcile", "--transport", "postgresql://ada:geheim@127.0.0.1:1/shop")
    assert result.exit_code == 1
    assert "Warning: --transport holds a password" in result.stderr
    assert "geheim" not in result.output


def test_a_worker_refuses_a_broker_that_its_application_does_not_use(
    spawn: Spawn, tmp_path: Path, dsn: str, until: Until
) -> None:
    (tmp_path / "app.py").write_text(
        "from busload import CommandBus\n"
        "bus = CommandBus(transport='nats://127.0.0.1:4222')\n"
        "@bus.handler('payments', 'Debit')\n"
        "async def debit(command, ctx): pass\n"
    )
    process = spawn("worker", "app:bus", "--transport", dsn)
    assert process.wait(WITHIN) == 2
    assert "names a transport of its own" in " ".join((tmp_path / "said.txt").read_text().split())


@pytest.mark.timeout(400)
def test_the_demo_runs_through_a_broker(spawn: Spawn, dsn: str, tmp_path: Path, database: Database) -> None:
    with (tmp_path / "out.json").open("wb") as out:
        process = spawn("demo", "--commands", 300, "--transport", dsn, "--json", stdout=out)
        assert process.wait(200) == 0, (tmp_path / "said.txt").read_text()
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["batch"]["status"] == "COMPLETED_WITH_FAILURES"
    assert database.rows("SELECT strategy, status FROM busload.dispatch") == [("two_phase", "success")]
    assert database.is_at_rest()
    database.check_invariants()
