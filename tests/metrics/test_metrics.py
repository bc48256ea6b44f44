"""Metrics of the database and of handlers: text that Prometheus reads, and numbers that agree with the facts."""

from __future__ import annotations

import re
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given as hypothesis_given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from busload import (
    BatchCommand,
    CommandBus,
    HandlerContext,
    PermanentCommandError,
    RetryPolicy,
    SyncCommandBus,
    TransientCommandError,
)
from busload.commands.command import Command
from busload.dashboard import app
from busload.metrics.database import read
from busload.metrics.exposition import Metric, Sample, buckets, text
from busload.statistics import statistics
from busload.statistics.attempts import BOUNDS, AttemptsOfType
from busload.statistics.statistics import Counts
from tests.given import DOMAIN, Database, Given

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples_of(exposition: str) -> Samples:
    """What the parser of prometheus_client makes of a text."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((f"busload_{name}", frozenset(labels.items())))


async def mixed(given: Given) -> None:
    """Commands of two types that have ended in several ways."""

    async def handle(command: Command, ctx: HandlerContext) -> None:
        match command.data["n"]:
            case 1:
                raise PermanentCommandError("broken")
            case 2 if ctx.attempt == 1:
                raise TransientCommandError("not now")

    given.handler(function=handle, retry=RetryPolicy(backoff=(0,)))
    given.handler("Credit")
    await given.batch(10)
    await given.batch(5, "Credit")


async def test_every_metrics_text_passes_the_parser_and_the_linter_of_prometheus(bus: CommandBus, given: Given) -> None:
    await mixed(given)
    worker = given.worker(name='a "quoted" \\ name\nin two lines')
    await worker.drain()
    for exposition in (worker.metrics(), str(await bus.metrics())):
        assert samples_of(exposition)
        done = subprocess.run(["promtool", "check", "metrics"], input=exposition, capture_output=True, text=True)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


@hypothesis_given(st.text(max_size=20), st.floats() | st.integers(-(10**20), 10**20), st.text(min_size=1, max_size=20))
def test_any_label_value_and_help_come_out_as_they_went_in(label: str, number: float, help: str) -> None:
    help = " ".join(help.split()) or "x"  # the parser takes the first blanks for separators
    made = text([Metric("busload_one", "gauge", help, (Sample({"domain": label}, number),))])
    [family] = text_string_to_metric_families(made)
    [sample] = family.samples
    assert sample.labels == {"domain": label}
    assert repr(float(sample.value)) == repr(float(number))
    assert family.documentation == help


def test_a_metric_without_values_is_left_out() -> None:
    assert text([Metric("busload_none", "gauge", "Nothing.", ())]) == ""


async def test_the_metrics_of_schedules_agree_with_the_facts(bus: CommandBus, database: Database) -> None:
    for name in ("late", "paused", "well", "ended"):
        bus.schedule(name, every=timedelta(hours=1), domain=DOMAIN, command=BatchCommand("Debit"))
    await bus.schedules.sync()
    await bus.schedules.pause("paused")
    database.rows("UPDATE busload.schedule SET next_due_at = now() - interval '100 s' WHERE name IN ('late', 'paused')")
    database.rows("UPDATE busload.schedule SET next_due_at = NULL WHERE name = 'ended'")
    database.rows("UPDATE busload.schedule SET last_due_at = to_timestamp(1000000) WHERE name = 'well'")
    found = samples_of(str(await bus.metrics()))

    def of(name: str, schedule: str) -> float | None:
        return value(found, f"schedule_{name}", domain=DOMAIN, schedule=schedule)

    assert of("late_seconds", "late") == pytest.approx(100, abs=50)
    assert [of("late_seconds", one) for one in ("paused", "well", "ended")] == [0, 0, 0]
    assert [of("paused", one) for one in ("late", "paused", "well", "ended")] == [0, 1, 0, 0]
    assert [of("last_due_timestamp_seconds", one) for one in ("late", "well")] == [None, 1_000_000]
    well = await bus.schedules.get("well")
    assert well is not None and well.next_due_at is not None
    assert of("next_due_timestamp_seconds", "well") == pytest.approx(well.next_due_at.timestamp())
    assert of("next_due_timestamp_seconds", "ended") is None


async def test_the_metrics_of_the_database_agree_with_the_facts(
    bus: CommandBus, sync_bus: SyncCommandBus, given: Given, database: Database
) -> None:
    await mixed(given)
    await given.drained()
    await given.batch(4)
    given.claimed(1, by=given.registered_worker())
    given.died(given.registered_worker())
    await bus.domains.pause("other")
    database.rows("UPDATE busload.command SET created_at = now() - interval '100 s'")
    database.rows("UPDATE busload.troubleshooting SET since = now() - interval '200 s'")

    for found in (samples_of(str(await bus.metrics())), samples_of(str(sync_bus.metrics()))):
        places = {
            place: value(found, "commands", domain=DOMAIN, place=place)
            for place in ("ready", "scheduled", "running", "troubleshooting", "unpublished")
        }
        assert places == {"ready": 3, "scheduled": 0, "running": 1, "troubleshooting": 1, "unpublished": 0}
        assert value(found, "oldest_ready_seconds", domain=DOMAIN) == pytest.approx(100, abs=50)
        assert value(found, "oldest_ready_seconds", domain="other") is None
        assert value(found, "oldest_troubleshooting_seconds", domain=DOMAIN) == pytest.approx(200, abs=50)
        assert value(found, "domain_paused", domain="other") == 1
        assert value(found, "domain_paused", domain=DOMAIN) == 0
        assert value(found, "domain_workers", domain=DOMAIN) == 1
        assert [value(found, "workers", state=state) for state in ("alive", "silent")] == [1, 1]
        assert value(found, "slots") == 10
        ended = [
            value(found, "commands_ended_total", domain=DOMAIN, outcome=outcome)
            for outcome in ("completed", "failed", "canceled")
        ]
        assert ended == [14, 0, 0]
        assert value(found, "attempts_retried_total", domain=DOMAIN) == 1
        assert value(found, "commands_troubled_total", domain=DOMAIN) == 1
        assert (value(found, "handler_seconds_total", domain=DOMAIN) or 0) > 0
        assert value(found, "commands_sent_total") is not None
        assert len([name for name, _ in found if name == "busload_info"]) == 1

    counted = {key: number for key, number in found.items() if key[0].endswith("_total") and dict(key[1])}
    database.rows("UPDATE busload.statistics SET at = at - interval '100 days'")
    database.perform(statistics.tidy())
    later = samples_of(str(await bus.metrics()))
    assert {key: later[key] for key in counted} == counted


async def test_the_outbox_is_told_by_transport(bus: CommandBus, given: Given, database: Database) -> None:
    await given.batch(3)
    await given.batch(2)
    database.rows(
        "WITH moved AS (DELETE FROM busload.queue RETURNING *)"
        "INSERT INTO busload.outbox (lo, hi, domain, batch_id, transport, since, rounds)"
        " SELECT lo, hi, domain, batch_id, 'nats', now() - interval '90 s', (hi - lo + 1 = 2)::integer FROM moved"
    )
    found = samples_of(str(await bus.metrics()))
    assert value(found, "unpublished_commands", transport="nats") == 5
    assert value(found, "unpublished_failed_commands", transport="nats") == 2
    assert value(found, "oldest_unpublished_seconds", transport="nats") == pytest.approx(90, abs=50)
    assert value(found, "commands", domain=DOMAIN, place="unpublished") == 5


async def test_all_of_it_is_read_at_one_moment_in_few_statements(bus: CommandBus, given: Given) -> None:
    performed = list(statements_of(read()))
    assert len(performed) == 7  # the first one only makes them see one moment
    assert b"REPEATABLE READ" in performed[0]


def statements_of(plan: Any) -> Any:
    """What a plan asks, as long as every answer is empty but for the totals of the overview."""
    step = next(plan)
    while True:
        yield step.sql
        answer = [(None,) * 5 + (0, 0, 0, 0)[:4]] if b"tuples_inserted" in step.sql else []
        try:
            step = plan.send(answer)
        except StopIteration:
            return


async def test_a_reader_of_the_dashboard_gets_the_metrics(bus: CommandBus, given: Given) -> None:
    await given.batch(2)
    transport = httpx.ASGITransport(app(bus), client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        answer = await client.get("/metrics")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert value(samples_of(answer.text), "commands", domain=DOMAIN, place="ready") == 2


def test_the_docs_have_every_metric_of_the_database_and_no_other() -> None:
    docs = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    source = (Path(statistics.__file__).parents[1] / "metrics/database.py").read_text()
    told = set(re.findall(r"^\| `busload_(\w+)` \|", docs, re.MULTILINE))
    made = set(re.findall(r'(?:_metric\(\s*|^\s+\()"([a-z_]+)", ', source, re.MULTILINE))
    made |= set(re.findall(r'_metric\(\s*"([a-z_]+)",', source))
    assert told - {"handler_duration_seconds", "handler_attempts_total"} == made
    assert len(made) == 20


# -- handlers


async def test_handlers_are_told_by_domain_and_type(bus: CommandBus, given: Given, database: Database) -> None:
    await mixed(given)
    worker = given.worker(name="one")
    await worker.drain()
    found = samples_of(worker.metrics())

    def outcomes(command_type: str) -> list[float | None]:
        about = {"worker": "one", "domain": DOMAIN, "type": command_type}
        names = ("completed", "failed", "canceled", "parked", "failed_attempt")
        return [value(found, "handler_attempts_total", **about, outcome=name) for name in names]

    assert outcomes("Debit") == [9, 0, 0, 1, 1]
    assert outcomes("Credit") == [5, 0, 0, 0, 0]
    for command_type, attempts in (("Debit", 11), ("Credit", 5)):
        about = {"worker": "one", "domain": DOMAIN, "type": command_type}
        assert value(found, "handler_duration_seconds_count", **about) == attempts
        assert value(found, "handler_duration_seconds_bucket", **about, le="+Inf") == attempts
        [(took,)] = database.rows(
            "SELECT sum(extract(epoch FROM finished_at - started_at))::float8"
            "  FROM busload.execution AS e JOIN busload.command AS c ON c.id = e.command WHERE command_type = %s",
            command_type,
        )
        assert value(found, "handler_duration_seconds_sum", **about) == pytest.approx(took, abs=1e-4)
    stats = worker.stats.handlers
    assert [(each.domain, each.type, sum(each.durations)) for each in stats] == [
        (DOMAIN, "Credit", 5),
        (DOMAIN, "Debit", 11),
    ]


@hypothesis_given(st.lists(st.lists(st.sampled_from([0.0, *BOUNDS, 0.003, 7.0, 301.0]), min_size=1, max_size=30)))
def test_each_duration_is_in_the_bucket_of_the_first_bound_that_it_does_not_exceed(flushes: list[list[float]]) -> None:
    attempts = AttemptsOfType()
    for flush in flushes:
        attempts.add(["COMPLETED"] * len(flush), list(flush))
    every = [duration for flush in flushes for duration in flush]
    for index, bound in enumerate(BOUNDS):
        assert sum(attempts.buckets[: index + 1]) == sum(duration <= bound for duration in every)
    assert sum(attempts.buckets) == attempts.outcomes["COMPLETED"] == len(every)
    assert attempts.seconds == pytest.approx(sum(every))


def test_the_buckets_of_a_histogram_add_up() -> None:
    found = buckets({"type": "Debit"}, (0.1, 1.0), (2, 0, 3), 7.5)
    assert [(sample.suffix, sample.labels.get("le"), sample.value) for sample in found] == [
        ("_bucket", "0.1", 2),
        ("_bucket", "1.0", 2),
        ("_bucket", "+Inf", 5),
        ("_sum", None, 7.5),
        ("_count", None, 5),
    ]


def test_counts_add_up() -> None:
    total = Counts(1, 2, 3, 4, 5, 0.5)
    total.add(Counts(10, 20, 30, 40, 50, 1.0))
    assert total == Counts(11, 22, 33, 44, 55, 1.5)
    assert (total.ended, total.attempts) == (66, 165)
