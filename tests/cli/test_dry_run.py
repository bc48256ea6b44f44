"""`--dry-run`: every command that changes many rows says how many, in one form, and touches nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import click
import pytest

from busload import BatchCommand, BatchJob, Stage, SyncCommandBus
from busload.testing import TestServer
from tests.cli.conftest import Busload
from tests.cli.test_cli import verbs
from tests.given import DOMAIN, Database, Given

BUFFER = "clicks"
CHANGES = {"cancel", "complete", "flush", "hold", "migrate", "prune", "reconcile", "recover", "reprioritize", "reroute"}
CHANGES |= {"reset", "resume", "retry"}
"""Verbs that can change many rows."""
ONE = {"command cancel", "domain resume", "schedule resume"}
"""What they mean where they change one row only."""


@dataclass(frozen=True)
class Shop:
    """Something of everything that commands at a shell can change."""

    batch: UUID
    held: UUID
    job: UUID
    jobs: UUID
    troubled: UUID
    cause: str


@pytest.fixture
async def shop(given: Given, sync_bus: SyncCommandBus, database: Database) -> Shop:
    bus = given.bus
    parked, [troubled, *_] = await given.in_troubleshooting(2)
    cause = database.value("SELECT fingerprint FROM busload.troubleshooting LIMIT 1")
    later = datetime.now(UTC) + timedelta(hours=1)
    batch = await bus.create_batch(DOMAIN, [BatchCommand("Debit"), BatchCommand("Debit", run_at=later)] * 3)
    given.claimed(1)
    held = await given.batch(4)
    await bus.hold_batch(DOMAIN, held, reason="wait")
    stage = Stage("one", [BatchCommand("Debit")] * 2)
    job = await bus.jobs.create(DOMAIN, [stage])
    jobs = await bus.jobs.create_batch(DOMAIN, [BatchJob([stage]), BatchJob([stage])])
    old = await given.batch(2)
    await bus.cancel_batch(DOMAIN, old, reason="old")
    ago = "now() - interval '40 days'"
    database.rows(f"UPDATE busload.batch SET completed_at = {ago} WHERE batch_id = %s", old)
    database.rows(f"UPDATE busload.event SET at = {ago} WHERE batch_id = %s", old)
    database.rows("INSERT INTO busload.rate_limit (name, adaptive, rate, ceiling) VALUES ('crm', false, 1, 1)")
    sent = [(await bus.send(DOMAIN, "Unpublished")).command_id for _ in range(3)]
    database.rows(
        """WITH load AS (DELETE FROM busload.queue
                          WHERE lo IN (SELECT id FROM busload.command WHERE command_id = ANY (%s)) RETURNING *)
           INSERT INTO busload.outbox (lo, hi, domain, transport, rounds, failed_at, due_at)
           SELECT lo, hi, domain, 'rabbitmq', 1, now(), now() + interval '1 hour' FROM load""",
        sent,
    )
    for n in range(3):
        sync_bus.buffer(BUFFER).add({"n": n})
    database.rows("INSERT INTO busload.buffer (buffer, size, max_age) VALUES (%s, 10, '1 hour')", BUFFER)
    assert parked != batch
    return Shop(batch, held, job, jobs, troubled, cause)


def runs(shop: Shop) -> Iterator[tuple[str, str, int]]:
    """Each command with what its dry run says, and the number that it gives to programs."""
    yield f"batch cancel {shop.batch} --reason no", "cancel 5 commands, and ask 1 running one to stop", 5
    yield f"batch cancel {shop.held} --reason no", "cancel 4 commands", 4
    yield f"batch cancel {shop.jobs} --reason no", "cancel 2 jobs with 4 commands", 2
    yield f"batch hold {shop.batch} --reason no", "hold 5 commands", 5
    yield f"batch hold {shop.held} --reason no", "hold 0 commands", 0
    yield f"batch resume {shop.held}", "let 4 commands go on", 4
    yield f"batch resume {shop.batch}", "let 0 commands go on", 0
    yield f"batch reprioritize {shop.batch} 9", "give 5 commands the priority 9", 5
    yield f"batch reprioritize {shop.batch} 0", "give 0 commands the priority 0", 0
    yield f"job cancel {shop.job} --reason no", f"cancel job {shop.job} with 2 commands", 2
    yield f"troubleshooting retry {shop.troubled}", "retry 1 command", 1
    yield f"troubleshooting complete {shop.troubled}", "complete 1 command", 1
    yield f"troubleshooting cancel {shop.troubled} --reason no", "cancel 1 command", 1
    yield "outbox retry", "try 3 commands again", 3
    yield "outbox reroute", "reroute 3 commands", 3
    yield f"buffer flush {BUFFER}", f"let 3 events leave {BUFFER}", 3
    yield "limit reset crm", "reset 1 limit and let 0 commands try again", 1
    yield "schema migrate", "apply nothing", 0


NUMBERS = ("canceled", "changed", "limits", "commands", "leaving", "applied")


def number(found: dict[str, Any]) -> int:
    """The count in the answer for programs."""
    value = next(found[name] for name in NUMBERS if name in found)
    return len(value) if isinstance(value, list) else int(value)


async def test_a_dry_run_says_how_many_and_touches_nothing(busload: Busload, shop: Shop, database: Database) -> None:
    before = database.dump()
    for line, what, count in runs(shop):
        words = line.split()
        assert busload(*words, "--dry-run").stdout == f"Would {what}; nothing was done.\n"
        found = json.loads(busload(*words, "--dry-run", "--json").stdout)
        assert (found["dry_run"], number(found)) == (True, count), line
    group = busload("troubleshooting", "retry", "--group", shop.cause, "--dry-run").stdout
    assert group.startswith("Would retry 2 commands in payments; nothing was done.\n")
    pruned = busload("prune", "--older-than", "30d", "--dry-run").stdout
    assert pruned.startswith("Would remove 2 commands, ") and pruned.endswith(" and 1 batch; nothing was done.\n")
    assert busload("tracker", "recover", "--queue", "q", "--dry-run").exit_code == 0
    assert database.dump() == before


async def test_the_real_run_touches_as_many_as_its_dry_run_has_said(
    busload: Busload, shop: Shop, database: Database
) -> None:
    for line in (
        f"batch reprioritize {shop.batch} 9",
        f"job cancel {shop.job} --reason no",
        f"batch cancel {shop.jobs} --reason no",
        f"troubleshooting retry {shop.troubled}",
        "outbox retry",
        "outbox reroute",
        f"buffer flush {BUFFER}",
        "limit reset crm",
        "schema migrate",
        f"batch cancel {shop.batch} --reason no",
    ):
        foretold = number(json.loads(busload(*line.split(), "--dry-run", "--json").stdout))
        done = busload(*line.split(), "--json")
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        assert (len(found) if isinstance(found, list) else number(found)) == foretold, line
    held = "SELECT coalesce(sum(hi - lo + 1), 0)::integer FROM busload.scheduled WHERE reason = 'HELD'"
    assert database.value(held) == 4
    for verb, left in (("resume", 0), ("hold", 4)):  # which say yes or no
        line = f"batch {verb} {shop.held}" + (" --reason no" if verb == "hold" else "")
        assert number(json.loads(busload(*line.split(), "--dry-run", "--json").stdout)) == 4
        busload(*line.split())
        assert database.value(held) == left


async def test_a_dry_run_is_refused_as_the_real_run_is(
    busload: Busload, shop: Shop, given: Given, sync_bus: SyncCommandBus
) -> None:
    ended = await given.batch(1)
    await given.bus.cancel_batch(DOMAIN, ended, reason="over")
    waits = (await given.bus.send(DOMAIN, "Debit")).command_id
    for line in (
        f"batch cancel {shop.job} --domain {DOMAIN} --reason no",
        f"batch hold {ended} --reason no",
        f"batch resume {ended}",
        f"batch reprioritize {ended} 5",
        f"batch hold {shop.jobs} --reason no",
        f"job cancel {ended} --domain {DOMAIN} --reason no",
        f"job resume {shop.job}",
        f"job resume {ended} --domain {DOMAIN}",
        f"troubleshooting retry {waits}",
        "limit reset unheard_of",
    ):
        dry, real = busload(*line.split(), "--dry-run"), busload(*line.split())
        assert (dry.exit_code, real.exit_code) == (1, 1), line
        if not line.startswith("troubleshooting"):
            assert dry.output == real.output


async def test_the_cancel_of_a_job_that_has_ended_is_refused_in_a_dry_run_as_well(
    busload: Busload, given: Given
) -> None:
    given.handler()
    job = await given.bus.jobs.create(DOMAIN, [Stage("one", [BatchCommand("Debit")])])
    await given.drained()
    line = f"job cancel {job} --reason no".split()
    dry, real = busload(*line, "--dry-run"), busload(*line)
    assert (dry.exit_code, dry.output) == (1, real.output)
    other = await given.bus.jobs.create(DOMAIN, [Stage("one", [BatchCommand("Debit")])])
    line = f"job cancel {other} --reason no".split()
    busload(*line)
    assert json.loads(busload(*line, "--dry-run", "--json").stdout)["canceled"] == 0, "it was canceled before"


def test_a_dry_run_of_a_migration_names_the_files(server: TestServer, busload: Busload) -> None:
    with server.database(migrated=False) as bare:
        said = busload("schema", "migrate", "--dry-run", url=bare).stdout
        assert said.startswith("Would apply 0001_commands, 0002_places, ") and said.endswith("; nothing was done.\n")
        assert busload("schema", "status", url=bare).exit_code == 1, "nothing was applied"


def test_every_verb_that_changes_many_rows_takes_dry_run_and_says_the_same_of_it() -> None:
    taken = {name: _option(command) for name, command in verbs()}
    may = {name for name in taken if name.split()[-1] in CHANGES} - ONE
    assert {name for name in may if taken[name] is None} == set()
    assert len(may) >= 15
    assert {option.help for option in taken.values() if option is not None} == {
        "Only say how much would be touched, and do nothing."
    }


def _option(command: click.Command) -> click.Option | None:
    return next((p for p in command.params if isinstance(p, click.Option) and p.name == "dry_run"), None)
