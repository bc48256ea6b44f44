"""Decides about workers and work: what stands still, and who should have moved it. The health is asked beside this."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from busload.commands.wording import counted, span
from busload.doctor.catalog import KNOWN, finding
from busload.doctor.facts import Facts, Server, Still
from busload.doctor.finding import Finding, FindingCode, Severity
from busload.health.health import Health, HealthCode, HealthReason, HealthState
from busload.settings import DoctorSettings

OF_THE_DATABASE = frozenset({HealthCode.DATABASE_UNREACHABLE, HealthCode.DATABASE_UNUSABLE, HealthCode.SCHEMA_OUTDATED})
"""What the doctor has found out by itself, if it is so."""


def judge_work(facts: Facts, server: Server, thresholds: DoctorSettings) -> Iterator[Finding]:
    versions = sorted({worker.version for worker in facts.workers or () if worker.version is not None})
    if len(versions) > 1:
        found = f"Workers of several releases run: {', '.join(versions)}."
        yield finding(FindingCode.WORKER_VERSIONS, found, run=("busload worker ls",))
    for still in facts.still or ():
        yield _stands_still(still, server)
    if facts.oldest_end is not None and server.now - facts.oldest_end >= thresholds.keep_for:
        days = f"{thresholds.keep_for.days or 1}d"
        yield finding(
            FindingCode.HISTORY_GROWS,
            f"The oldest commands that are kept ended {span(server.now - facts.oldest_end)} ago.",
            run=(f"busload prune --older-than {days} --dry-run", f"busload prune --older-than {days}"),
        )


def judge_health(health: Health) -> Iterator[Finding]:
    """The reasons of the health, each with its cure."""
    for reason in health.reasons:
        if reason.code not in OF_THE_DATABASE:
            severity = Severity.CRITICAL if reason.state is HealthState.CRITICAL else Severity.DEGRADED
            possible = KNOWN[reason.code].severities
            run = _lines_of(reason)
            yield finding(
                reason.code, reason.message, severity=severity if severity in possible else possible[-1], run=run
            )


def _lines_of(reason: HealthReason) -> tuple[str, ...]:
    domain = shlex.quote(reason.domain or "DOMAIN")
    match reason.code:
        case HealthCode.NO_WORKER:
            return (f"busload worker MODULE:BUS --domains {domain}",)
        case HealthCode.COMMANDS_LATE:
            return (f"busload command ls --domain {domain} --status PENDING",)
        case HealthCode.WORKER_LOST:
            return ("busload worker MODULE:BUS",)
        case HealthCode.SCHEDULES_LATE:
            return ("busload worker MODULE:BUS", "busload schedule ls")
        case HealthCode.PUBLISHING_FAILS:
            return ("busload outbox retry", "busload outbox reroute")
        case HealthCode.FAILURES_IN_A_ROW:
            return ("busload troubleshooting groups",)
        case HealthCode.BROKER_UNREACHABLE:
            return ("busload outbox ls", "busload outbox reroute")
    return ()


def _stands_still(still: Still, server: Server) -> Finding:
    code, waited = FindingCode(still.code), span(server.now - still.since)
    subject, domain = shlex.quote(still.subject), shlex.quote(still.domain or "DOMAIN")
    commands = counted(still.count, "command has", "commands have")
    run: tuple[str, ...]
    match code:
        case FindingCode.OUTBOX_WAITS:
            found = f"{commands} waited for {waited} to be published to {still.subject}, and nobody has tried."
            run = ("busload outbox reroute --all --dry-run", "busload outbox reroute --all")
        case FindingCode.SCHEDULED_OVERDUE:
            are = counted(still.count, "command", "commands")
            found = f"{are} in {still.subject} should have become ready {waited} ago."
            run = (f"busload worker MODULE:BUS --domains {domain}",)
        case FindingCode.LEASES_LEFT:
            found = f"{still.subject} has stopped, and {counted(still.count, 'command')} still count as running there."
            run = ("busload worker MODULE:BUS",)
        case FindingCode.PERMITS_LEFT:
            found = (
                f"{counted(still.count, 'permit')} of the limit {still.subject} belong to workers that have stopped."
            )
            run = ("busload worker MODULE:BUS",)
        case FindingCode.CANCEL_LEFT:
            found = f"The cancel of batch {still.subject} in {still.domain} stopped half way, {waited} ago."
            run = (f"busload batch cancel {subject} --domain {domain} --reason 'the cancel goes on'",)
        case FindingCode.BATCH_HELD:
            found = f"Batch {still.subject} in {still.domain} has been held for {waited}."
            run = (f"busload batch resume {subject} --domain {domain}",)
        case FindingCode.BATCH_LEFT_OPEN:
            found = f"Batch {still.subject} in {still.domain} was opened {waited} ago and never sealed."
            run = (f"busload batch cancel {subject} --domain {domain} --reason 'left open'",)
        case FindingCode.BATCHES_STALLED:
            found = (
                f"{counted(still.count, 'batch waits', 'batches wait')} for a person in {still.domain}, for {waited}."
            )
            run = (f"busload troubleshooting groups --domain {domain}",)
        case FindingCode.DOMAIN_PAUSED:
            found = f"The domain {still.subject} has been paused for {waited}."
            run = (f"busload domain resume {subject}",)
        case FindingCode.SCHEDULE_PAUSED:
            found = f"The schedule {still.subject} has been paused for {waited}."
            run = (f"busload schedule resume {subject}",)
        case _:
            are = counted(still.count, "command waits", "commands wait")
            found = f"{are} for a person in {still.subject}, the oldest for {waited}."
            run = (
                f"busload troubleshooting groups --domain {domain}",
                f"busload troubleshooting retry --domain {domain} --group FINGERPRINT --dry-run",
            )
    return finding(code, found, run=run)
