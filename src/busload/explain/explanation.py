"""Why a batch or a command is not finished, in one value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from busload.batches.forecast import Forecast
from busload.commands.wording import counted, span
from busload.explain.blockers import Blocker, Reason
from busload.explain.facts import Facts
from busload.explain.jobs import reasons_of_jobs
from busload.explain.reading import read_batch, read_command
from busload.explain.reasons import reasons_of
from busload.postgres.plan import Plan


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a batch or a command is not finished, at one moment. Without reasons, and not finished, it is on its way."""

    domain: str
    batch_id: UUID | None
    command_id: UUID | None
    finished: bool
    summary: str
    reasons: tuple[Reason, ...]
    remaining: int
    """Commands that have not ended; of a batch of jobs, jobs."""
    eta: datetime | None
    """When a healthy batch will be done, most likely; None if nobody can tell."""
    forecast: Forecast | None = None
    """When a batch will be done, with an interval and what would change it; None for a command, or if it has ended."""


def explain_batch(domain: str, batch_id: UUID) -> Plan[Explanation]:
    """Needs a transaction of its own."""
    facts = yield from read_batch(domain, batch_id)
    if not facts.of_jobs:
        return explain(facts)
    reasons = yield from reasons_of_jobs(facts)
    summary = _jobs_summary(facts, reasons)
    return Explanation(domain, batch_id, None, facts.finished, summary, reasons, facts.remaining, eta=None)


def explain_command(domain: str, command_id: UUID) -> Plan[Explanation]:
    """Needs a transaction of its own."""
    return explain((yield from read_command(domain, command_id)))


def explain(facts: Facts) -> Explanation:
    """Say why a batch or a command is not finished."""
    reasons = reasons_of(facts)
    healthy = not reasons and not facts.finished
    eta = facts.forecast.done_at if healthy and facts.forecast is not None else None
    summary = _batch_summary(facts, reasons, eta) if facts.command_id is None else _command_summary(facts, reasons)
    return Explanation(
        facts.domain,
        facts.batch_id,
        facts.command_id,
        facts.finished,
        summary,
        reasons,
        facts.remaining,
        eta,
        facts.forecast,
    )


def _batch_summary(facts: Facts, reasons: Sequence[Reason], eta: datetime | None) -> str:
    if facts.completed_at is not None:
        all_of_them = "its command" if facts.total == 1 else f"all {counted(facts.total, 'command')}"
        callback = "" if facts.callback is None else f"; the callback is {facts.callback.status}"
        return f"{facts.status}: {all_of_them} ended {span(facts.now - facts.completed_at)} ago{callback}."
    ended = f"{facts.ended:,} of {counted(facts.total, 'command has', 'commands have')} ended"
    if reasons:
        return f"Not finished: {ended}; {_labels(reasons)}."
    ready = sum(ready.count for ready in facts.places.ready)
    running = sum(running.count for running in facts.places.running)
    outbox = sum(held.count for held in facts.places.unconfirmed)
    published = f", {outbox:,} to be published" if outbox else ""
    done = "" if eta is None else f"; done {facts.forecast}"
    return f"On its way: {ended}, {running:,} running, {ready:,} ready{published}{done}."


def _jobs_summary(facts: Facts, reasons: Sequence[Reason]) -> str:
    if facts.completed_at is not None:
        callback = "" if facts.callback is None else f"; the callback is {facts.callback.status}"
        all_of_them = "its job" if facts.total == 1 else f"all {counted(facts.total, 'job')}"
        return f"{facts.status}: {all_of_them} ended {span(facts.now - facts.completed_at)} ago{callback}."
    ended = f"{facts.ended:,} of {counted(facts.total, 'job has', 'jobs have')} ended"
    if reasons:
        return f"Not finished: {ended}; jobs: {_labels(reasons)}."
    return f"On its way: {ended}."


def _command_summary(facts: Facts, reasons: Sequence[Reason]) -> str:
    if facts.finished:
        return f"{facts.status}: it has ended."
    it = "it" if facts.events is None else f"this group of {counted(facts.events, 'event')} of buffer {facts.domain!r}"
    if reasons:
        return f"Not finished: {it} is {facts.status}; {_labels(reasons)}."
    return f"On its way: {it} is {facts.status}."


def _labels(reasons: Sequence[Reason]) -> str:
    counts: Counter[Blocker] = Counter()
    for reason in reasons:
        counts[reason.code] += reason.count
    return ", ".join(
        f"{count:,} {code.label}" if count and code != Blocker.NOT_SEALED else code.label
        for code, count in counts.items()
    )
