"""The metrics of the whole database: what waits where, who works, and what was counted so far."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version

from busload.health.overview import Overview, overview
from busload.metrics.exposition import PREFIX, Kind, Metric, Sample, text
from busload.postgres.plan import Plan, execute, many
from busload.postgres.statements import statements
from busload.statistics import statistics
from busload.statistics.statistics import Counts

SQL = statements(__name__)

PLACES = {
    "ready": "ready",
    "scheduled": "scheduled",
    "running": "running",
    "troubleshooting": "in_troubleshooting",
    "unpublished": "unpublished",
}
"""The label of each place, and where an overview counts what is in it."""
OUTCOMES = ("completed", "failed", "canceled")
MOST_SCHEDULES = 1000
"""Schedules that are told one by one: those that are due first."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """The metrics of the whole database at one moment; `str()` is the text that Prometheus reads."""

    metrics: tuple[Metric, ...]

    def __str__(self) -> str:
        return text(self.metrics)


@dataclass(frozen=True, slots=True)
class Unpublished:
    """What waits for the broker of a transport."""

    transport: str
    commands: int
    failed: int
    oldest: float


@dataclass(frozen=True, slots=True)
class ScheduleFacts:
    """A schedule: times are seconds since 1970, and `late` are seconds."""

    name: str
    domain: str
    last_due: float | None
    next_due: float | None
    late: float
    paused: bool


def read() -> Plan[Metrics]:
    """Read everything at one moment; needs a transaction of its own."""
    found = yield from overview()
    unpublished = yield from many(Unpublished, SQL.unpublished)
    schedules = yield from many(ScheduleFacts, SQL.schedules, most=MOST_SCHEDULES)
    troubled_since: dict[str, float] = dict((yield from execute(SQL.troubled_since)))
    totals = yield from statistics.totals()
    return Metrics(
        (
            _metric("info", "gauge", "The release that tells these metrics.", [({"version": version("busload")}, 1)]),
            *_of_domains(found, troubled_since),
            *_of_transports(unpublished),
            *_of_workers(found),
            *_of_schedules(schedules),
            *_of_totals(found, totals),
        )
    )


def _of_domains(found: Overview, troubled_since: Mapping[str, float]) -> Iterable[Metric]:
    yield _metric(
        "commands",
        "gauge",
        "Commands that have not ended, by the place they are in.",
        [
            ({"domain": each.domain, "place": place}, getattr(each, name))
            for each in found.domains
            for place, name in PLACES.items()
        ],
    )
    waits = [(each, each.oldest_ready) for each in found.domains if each.oldest_ready is not None]
    yield _metric(
        "oldest_ready_seconds",
        "gauge",
        "Seconds that the first command has waited that is ready and was not tried yet.",
        [({"domain": each.domain}, max(0.0, (found.at - since).total_seconds())) for each, since in waits],
    )
    yield _metric(
        "oldest_troubleshooting_seconds",
        "gauge",
        "Seconds that the oldest command in troubleshooting has waited for a person.",
        [({"domain": domain}, seconds) for domain, seconds in troubled_since.items()],
    )
    yield _metric(
        "domain_workers",
        "gauge",
        "Living workers that serve the domain.",
        [({"domain": each.domain}, each.workers) for each in found.domains],
    )
    yield _metric(
        "domain_paused",
        "gauge",
        "Whether the domain is paused: then nothing starts in it.",
        [({"domain": each.domain}, int(each.pause is not None)) for each in found.domains],
    )


def _of_transports(unpublished: Iterable[Unpublished]) -> Iterable[Metric]:
    unpublished = list(unpublished)
    about = (
        ("unpublished_commands", "Commands that wait for the broker to confirm a message.", "commands"),
        ("unpublished_failed_commands", "Commands of these after a failed round of publishing.", "failed"),
        ("oldest_unpublished_seconds", "Seconds that the oldest of these has waited.", "oldest"),
    )
    for name, help, field in about:
        samples = [({"transport": each.transport}, getattr(each, field)) for each in unpublished]
        yield _metric(name, "gauge", help, samples)


def _of_workers(found: Overview) -> Iterable[Metric]:
    yield _metric(
        "workers",
        "gauge",
        "Workers that have not stopped. A silent one was not seen for as long as its leases last.",
        [({"state": "alive"}, found.workers), ({"state": "silent"}, found.silent_workers)],
    )
    yield _metric("slots", "gauge", "Commands that the living workers can run at a time.", [({}, found.slots)])


def _of_schedules(schedules: Iterable[ScheduleFacts]) -> Iterable[Metric]:
    schedules = list(schedules)
    about = (
        ("schedule_last_due_timestamp_seconds", "The due time of the schedule that was fired last.", "last_due"),
        ("schedule_next_due_timestamp_seconds", "When the schedule is due next.", "next_due"),
        ("schedule_late_seconds", "Seconds since the oldest due time that was not fired; 0 if all were.", "late"),
        ("schedule_paused", "Whether the schedule is paused: then it fires nothing.", "paused"),
    )
    for name, help, field in about:
        values = [(each, getattr(each, field)) for each in schedules]
        samples = [
            ({"domain": each.domain, "schedule": each.name}, float(value))
            for each, value in values
            if value is not None
        ]
        yield _metric(name, "gauge", help, samples)


def _of_totals(found: Overview, totals: Mapping[str, Counts]) -> Iterable[Metric]:
    yield _metric(
        "commands_sent_total",
        "counter",
        "Commands that were ever sent, as PostgreSQL counts inserted rows.",
        [({}, found.sent)],
    )
    yield _metric(
        "commands_ended_total",
        "counter",
        "Commands that have ended, by how.",
        [
            ({"domain": domain, "outcome": outcome}, getattr(counts, outcome))
            for domain, counts in totals.items()
            for outcome in OUTCOMES
        ],
    )
    about = (
        ("attempts_retried_total", "Attempts that failed and are tried again.", "retried"),
        ("commands_troubled_total", "Commands that went to troubleshooting.", "troubled"),
        ("handler_seconds_total", "Seconds that handlers took together.", "seconds"),
    )
    for name, help, field in about:
        samples = [({"domain": domain}, getattr(counts, field)) for domain, counts in totals.items()]
        yield _metric(name, "counter", help, samples)


def _metric(name: str, kind: Kind, help: str, values: Iterable[tuple[Mapping[str, str], float]]) -> Metric:
    return Metric(PREFIX + name, kind, help, tuple(Sample(labels, value) for labels, value in values))
