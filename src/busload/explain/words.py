"""How reasons say things: what to run, when something is due, what an error said."""

from __future__ import annotations

from datetime import datetime

from busload.commands.wording import counted, span
from busload.explain.facts import Facts, Failure, Parked, Waiting


def progress_of_canary(facts: Facts) -> str:
    canary = facts.canary
    done, size = canary.completed or 0, canary.size or 0
    first = f"{done:,} of the {size:,} commands that run first {'has' if done == 1 else 'have'} completed"
    if size == 1:
        first = "the command that runs first has not completed"
    if canary.until is None:
        return first
    return f"{first}; {'it is' if size == 1 else 'they are'} to have completed {until(facts, canary.until)}"


def worker_line(facts: Facts) -> str:
    return f"busload worker MODULE:BUS --domains {facts.domain}"


def start_worker(facts: Facts) -> str:
    return f"Start one: `{worker_line(facts)}`."


def look_at(facts: Facts, status: str) -> str:
    if facts.command_id is not None:
        return f"`busload command show {facts.command_id}`"
    return (
        f'bus.list_batch_commands("{facts.batch_domain or facts.domain}", UUID("{facts.batch_id}"), status="{status}")'
    )


def how_to_decide(facts: Facts, parked: Parked) -> str:
    verb, verbs = ("complete", "complete or cancel") if facts.canceled_at else ("retry", "retry, complete or cancel")
    if parked.count == 1:
        deletes = "" if facts.events is None else f" Complete and cancel delete its {counted(facts.events, 'event')}."
        return f"Decide: `busload troubleshooting {verb} {parked.command_id}` ({verbs}).{deletes}"
    return (
        f"See one: `busload command show {parked.command_id}`. Then decide for all of this cause: "
        f"`busload troubleshooting {verb} --group {parked.fingerprint} --domain {facts.domain}` ({verbs})."
    )


def when_due(facts: Facts, waiting: Waiting) -> str:
    if waiting.next_at == waiting.last_at:
        return until(facts, waiting.next_at)
    return f"the next {until(facts, waiting.next_at)}, the last {until(facts, waiting.last_at)}"


def error_of(failure: Failure | Parked) -> str:
    parts = (failure.error_type, failure.error_code, line(failure.message))
    return ": ".join(part for part in parts if part) or "unknown"


def line(text: str | None) -> str:
    """An error in one short line."""
    return " ".join((text or "").split())[:200].removesuffix(".")


def are(count: int) -> str:
    return counted(count, "command is", "commands are")


def have(count: int) -> str:
    return counted(count, "command has", "commands have")


def ago(facts: Facts, then: datetime) -> str:
    return f"{span(facts.now - then)} ago"


def until(facts: Facts, then: datetime | None) -> str:
    if then is None:
        return "not planned"
    return f"in {span(then - facts.now)}"
