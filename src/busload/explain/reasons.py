"""What keeps a batch or a command from being finished: facts go in, reasons in plain words come out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from busload.commands.wording import counted, span
from busload.explain.blockers import Blocker, Reason
from busload.explain.facts import Barrier, Facts, Hold, Ready, Running, Snapshot, Unconfirmed, Waiting
from busload.explain.words import (
    ago,
    are,
    error_of,
    have,
    how_to_decide,
    line,
    look_at,
    progress_of_canary,
    start_worker,
    until,
    when_due,
    worker_line,
)
from busload.limits.pause import Pause
from busload.tasks.track import TRACKED

NOT_RELAYED = timedelta(seconds=10)
"""A load may be due in the outbox for this long before an explanation says that nobody relays it."""

BEING_PUBLISHED = timedelta(seconds=1)
"""A load may be in the outbox for this long before an explanation says that others wait behind it."""

_HOLDS = {"CANARY": Blocker.CANARY, "BUDGET": Blocker.BUDGET}
"""The code of a hold that no person has ordered."""


def reasons_of(facts: Facts) -> tuple[Reason, ...]:
    """Return what is in the way of a batch or a command, the most urgent first."""
    if facts.finished:
        return ()
    if facts.completed_at is not None and facts.callback is not None:
        return (_callback(facts, facts.callback),)
    return tuple(sorted(_reasons(facts), key=lambda reason: list(Blocker).index(reason.code)))


def _reasons(facts: Facts) -> Iterator[Reason]:
    if facts.command_id is None and facts.sealed_at is None:
        yield _not_sealed(facts)
    if facts.canceled_at is not None:
        yield from _canceling(facts, "batch", facts.canceled_at)
    elif facts.stopping_since is not None:
        yield from _canceling(facts, "command", facts.stopping_since)
    elif facts.command_type == TRACKED:
        yield from _not_claimed(facts)
        yield from _running_long(facts)
    else:
        if facts.hold is not None:
            yield from _held(facts, facts.hold)
        for part in facts.parts or (facts,):
            if facts.hold is None:
                for held in part.places.unconfirmed:
                    yield from _in_the_outbox(part, held)
                yield from _not_taken(part)
            for waiting in part.places.waiting:
                if waiting.reason not in ("HELD", "CANARY") or facts.hold is None:
                    yield _not_due(part, waiting)
            yield from _running_long(part)
    for part in facts.parts or (facts,):
        yield from _worker_lost(part)
        yield from _in_troubleshooting(part)
    if facts.remaining > facts.places.count:
        yield _in_no_place(facts, facts.remaining - facts.places.count)


def _callback(facts: Facts, callback: Facts) -> Reason:
    """The batch has completed. Its callback is a command with reasons of its own."""
    own = reasons_of(callback)
    failing = any(reason.code in (Blocker.BACKOFF, Blocker.IN_TROUBLESHOOTING) for reason in own)
    message = " ".join(reason.message for reason in own) or f"It is {callback.status} and on its way."
    return Reason(
        Blocker.CALLBACK_FAILING if failing else Blocker.CALLBACK_WAITING,
        1,
        own[0].since if own else facts.completed_at,
        f"All commands have ended, but the callback, command {callback.command_id} ({callback.command_type}), has "
        f"not. {message}",
        " ".join(reason.advice for reason in own) or "Nothing to do: it is about to end.",
        {
            "domain": callback.domain,
            "command_id": callback.command_id,
            "command_type": callback.command_type,
            "reasons": list(own),
        },
    )


def _not_sealed(facts: Facts) -> Reason:
    return Reason(
        Blocker.NOT_SEALED,
        facts.total,
        facts.created_at,
        f"The batch was opened {ago(facts, facts.created_at)} and is not sealed: more may be added, so it cannot "
        "complete.",
        f'If nothing is missing, seal it: bus.seal_batch("{facts.domain}", UUID("{facts.batch_id}")); or give it up: '
        f"`busload batch cancel {facts.batch_id} --reason TEXT`.",
    )


def _canceling(facts: Facts, what: str, canceled_at: datetime) -> Iterator[Reason]:
    places = facts.places
    runs = sum(running.count for running in places.running if not running.lost)
    waits = sum(part.count for parts in (places.ready, places.waiting, places.unconfirmed) for part in parts)
    if not runs + waits:
        return
    back = f" {are(waits)} back from a worker and will be canceled by the next sweep." if waits else ""
    yield Reason(
        Blocker.CANCELING,
        runs + waits,
        canceled_at,
        f"The {what} was canceled {ago(facts, canceled_at)}; {have(runs)} not stopped yet.{back}",
        "Handlers finish, or stop early if they look at ctx.cancelled."
        if facts.around.anybody
        else f"No worker lives that could cancel the rest. {start_worker(facts)}",
        {"running": runs, "waiting": waits},
    )


def _held(facts: Facts, hold: Hold) -> Iterator[Reason]:
    places = facts.places
    count = sum(part.count for parts in (places.ready, places.waiting, places.unconfirmed) for part in parts)
    parked = sum(part.count for part in places.parked) + places.other_parked
    if not count and not parked:
        return
    by = {"CANARY": " by its canary", "BUDGET": " by its failure budget"}.get(hold.reason, "")
    by = f" by {hold.operator}" if hold.operator else by
    why = f": {line(hold.note)}" if hold.note else ""
    budget = ", with `--budget SHARE` for another budget" if hold.reason == "BUDGET" else ""
    now = " By now no command of it waits for a person." if hold.reason in _HOLDS and not parked else ""
    held = f"held {ago(facts, hold.since)}{by}{why}.{now}"
    yield Reason(
        _HOLDS.get(hold.reason, Blocker.HELD),
        count,
        hold.since,
        f"{are(count)} waiting, but the batch was {held}"
        if count
        else f"The batch was {held} Nothing that is retried starts before it goes on.",
        f"Let it go on: `busload batch resume {facts.batch_id}`{budget}; or give it up: `busload batch cancel "
        f"{facts.batch_id} --reason TEXT`.",
        {"held_at": hold.since, "held_reason": hold.reason, "operator": hold.operator, "reason": hold.note},
    )


# -- in the outbox -----------------------------------------------------------------------------------------------------


def _in_the_outbox(facts: Facts, held: Unconfirmed) -> Iterator[Reason]:
    nobody = _nobody_relays(facts, held)
    if held.reason is None and nobody is None:
        return
    code = Blocker.NOT_PUBLISHED
    message = f"{are(held.count)} in the outbox since {span(facts.now - held.since)}, but {nobody}."
    details: dict[str, Any] = {
        "transport": held.transport,
        "rounds": held.rounds,
        "reason": held.reason,
        "error": held.error,
    }
    if held.reason is not None:
        code, details["next_try"] = Blocker.NOT_CONFIRMED, held.next_try
        when = "is due now" if held.next_try <= facts.now else f"is {until(facts, held.next_try)}"
        next_try = f"The next try {when}." if nobody is None else f"Nobody tries again: {nobody}."
        message = (
            f"{are(held.count)} in the outbox: {counted(held.rounds, 'round')} of publishing to the broker "
            f"({held.transport}) failed. The last time it was {held.reason}: {line(held.error)}. {next_try}"
        )
    advice = f"Start a worker whose bus has that transport: `{worker_line(facts)} --transport URL`. Or go"
    if nobody is None:
        advice = "Nothing to do if the broker comes back. Let it try now: `busload outbox retry`. Go"
    where = f"--domain {facts.domain}" if facts.command_id is not None else f"--batch {facts.batch_id}"
    advice += f" without the broker: `busload outbox reroute {where} --all`."
    yield Reason(code, held.count, held.since, message, advice, details)


def _nobody_relays(facts: Facts, held: Unconfirmed) -> str | None:
    """Say why nobody relays, if so: relays of living workers take a load at once when it is due."""
    if not facts.around.anybody:
        return "no worker lives"
    return f"no worker relays to {held.transport}" if facts.now - held.next_try > NOT_RELAYED else None


# -- ready -------------------------------------------------------------------------------------------------------------


def _not_taken(facts: Facts) -> Iterator[Reason]:
    """Say why ready commands are not taken by a worker."""
    ready, around = facts.places.ready, facts.around
    if not ready:
        return
    count, sent = _sum(ready), _oldest(ready) or facts.created_at
    if around.pause is not None:
        yield _paused(facts, around.pause, count, sent)
    if around.barrier is not None:
        yield from _behind_unpublished(facts, around.barrier)
    if around.workers == 0:
        yield _no_worker(facts, count, sent)
    elif around.pause is None and around.ahead_priority is not None:
        behind = [one for one in ready if one.priority < around.ahead_priority]
        if behind:
            yield _behind_priority(facts, behind)
    if around.workers and around.snapshot is not None:
        yield _old_snapshot(facts, around.snapshot, count, sent)


def _not_claimed(facts: Facts) -> Iterator[Reason]:
    """Another queue runs a tracked command: no worker looks for it, a process of that queue claims it by name."""
    places: tuple[Ready | Waiting, ...] = (*facts.places.ready, *facts.places.waiting)
    if not places:
        return
    since = _oldest(places) or facts.created_at
    if facts.around.pause is not None:
        yield _paused(facts, facts.around.pause, 1, since)
        return
    failures = [one for waiting in facts.places.waiting for one in waiting.failures if one.error_type]
    failed = f" The last error was {error_of(failures[0])}." if failures else ""
    yield Reason(
        Blocker.NOT_CLAIMED,
        1,
        since,
        f"No process of its queue, {facts.domain!r}, has claimed it for {span(facts.now - since)}.{failed}",
        "Publish its two keys again, its message may be lost: "
        f"`busload tracker recover --queue {facts.domain}` lists all that have waited too long.",
        {"failures": failures},
    )


def _paused(facts: Facts, pause: Pause, count: int, sent: datetime) -> Reason:
    by = f" by {pause.operator}" if pause.operator else ""
    why = f": {pause.reason}" if pause.reason else ""
    return Reason(
        Blocker.PAUSED,
        count,
        max(pause.since, sent),
        f"{are(count)} ready, but domain {facts.domain!r} was paused {ago(facts, pause.since)}{by}{why}.",
        f"Let it go on: `busload domain resume {facts.domain}`.",
        {"paused_at": pause.since, "operator": pause.operator, "reason": pause.reason},
    )


def _no_worker(facts: Facts, count: int, sent: datetime) -> Reason:
    seen = facts.around.last_seen
    last = "there has never been one" if seen is None else f"the last one was seen {ago(facts, seen)}"
    return Reason(
        Blocker.NO_WORKER,
        count,
        sent if seen is None else max(seen, sent),
        f"{are(count)} ready, but no living worker serves domain {facts.domain!r}; {last}.",
        start_worker(facts),
        {"last_seen": seen},
    )


def _behind_unpublished(facts: Facts, barrier: Barrier) -> Iterator[Reason]:
    if not barrier.rounds and facts.now - barrier.since < BEING_PUBLISHED:
        return
    said = f": {counted(barrier.rounds, 'round')} of publishing failed, {line(barrier.error)}" if barrier.rounds else ""
    yield Reason(
        Blocker.BEHIND_UNPUBLISHED,
        barrier.behind,
        barrier.since,
        f"{are(barrier.behind)} ready, but domain {facts.domain!r} runs in the order of sending, and an older "
        f"command, {barrier.command_id}, is in the outbox since {span(facts.now - barrier.since)}{said}.",
        "Nothing to do if a worker serves the domain: it goes on without the broker when the broker has refused that "
        f"command, or after ten seconds. Or do it now: `busload outbox reroute --domain {facts.domain} --all`.",
        {
            "domain": facts.domain,
            **{name: getattr(barrier, name) for name in ("command_id", "transport", "rounds", "error")},
        },
    )


def _behind_priority(facts: Facts, behind: Sequence[Ready]) -> Reason:
    count, ahead = _sum(behind), facts.around.ahead
    return Reason(
        Blocker.BEHIND_PRIORITY,
        count,
        _oldest(behind) or facts.created_at,
        f"{are(count)} ready, behind {counted(ahead, 'command')} of higher priority in domain {facts.domain!r}.",
        f"Nothing to do if that is meant. More workers get there sooner: `{worker_line(facts)}`.",
        {"ahead": ahead, "priority": max(ready.priority for ready in behind)},
    )


def _old_snapshot(facts: Facts, held: Snapshot, count: int, sent: datetime) -> Reason:
    by = f", application {held.application!r}," if held.application else ""
    return Reason(
        Blocker.OLD_SNAPSHOT,
        count,
        sent,
        f"{are(count)} ready. Session {held.pid}{by} has had a transaction open for {span(facts.now - held.since)}, so "
        f"{counted(held.dead, 'dead row')} of the queue cannot be removed, and workers claim more slowly.",
        f"End that transaction: `SELECT pg_terminate_backend({held.pid});`. `busload doctor` names all that are old.",
        {"pid": held.pid, "application": held.application, "since": held.since, "dead_rows": held.dead},
    )


# -- not due -----------------------------------------------------------------------------------------------------------


def _not_due(facts: Facts, waiting: Waiting) -> Reason:
    """Say why commands are scheduled for later."""
    count, when = waiting.count, when_due(facts, waiting)
    details: dict[str, Any] = {"next_at": waiting.next_at, "last_at": waiting.last_at}
    match waiting.reason:
        case "RETRY":
            code = Blocker.BACKOFF
            causes = "; ".join(error_of(failure) for failure in waiting.failures[:3])
            last = f" The last error was {causes}." if causes else ""
            message = f"{counted(count, 'command')} failed and will be tried again: {when}.{last}"
            shown = facts.command_id or (waiting.failures[0].command_id if waiting.failures else None)
            look = f" `busload command show {shown}` tells of every attempt." if shown else ""
            advice = f"Nothing to do if the cause passes by itself.{look}"
            details["failures"] = waiting.failures
        case "NO_HANDLER":
            code = Blocker.NO_HANDLER
            message = (
                f"{are(count)} of a type that no worker had a handler for: {', '.join(waiting.command_types)}. "
                f"The next try is {until(facts, waiting.next_at)}."
            )
            types = waiting.command_types or ("TYPE",)
            advice = f'Start a worker that has a handler: @bus.handler("{facts.domain}", "{types[0]}").'
            details = {"command_types": list(waiting.command_types), "next_at": waiting.next_at}
        case "RATE_LIMITED":
            code = Blocker.RATE_LIMITED
            message = f"{are(count)} held up by a rate limit, {', '.join(waiting.limits) or 'unknown'}: {when}."
            advice = (
                "Nothing to do: what is held up comes back by itself. "
                f"`busload limit show {waiting.limits[0] if waiting.limits else 'NAME'}` tells how many calls a "
                "second it allows, and until when the receiver refuses them."
            )
            details["limits"] = list(waiting.limits)
        case "LIMITED":
            code = Blocker.LIMITED
            names = ", ".join(waiting.limits) or "unknown"
            wait = counted(count, "command waits", "commands wait")
            if waiting.ordered:
                message = f"{wait} for {'its' if count == 1 else 'their'} predecessors in the order of {names}."
                rule = "each goes on when the one before it has ended, or waits for a person"
            else:
                message = f"{wait} for a concurrency limit, {names}."
                rule = "each goes on when a call under its limit has ended, or its worker was declared dead"
            advice = (
                f"Nothing to do: {rule}. "
                f"`busload limit concurrency {waiting.limits[0] if waiting.limits else 'NAME'}` tells how many calls "
                "run now, and on which workers."
            )
            details = {"limits": list(waiting.limits)}
        case "CANARY":
            code, canary = Blocker.CANARY, facts.canary
            whose = "its" if count == 1 else "their"
            message = f"{are(count)} waiting for the canary of {whose} batch: {progress_of_canary(facts)}."
            advice = (
                "Nothing to do: when all of these have completed, the others are let go. Or let them go now: "
                f"`busload batch resume {facts.batch_id} --end-canary`."
            )
            details = {"canary": canary.size, "completed": canary.completed, "until": canary.until}
        case "HELD":
            code = Blocker.HELD
            message = f"{are(count)} held back until the batch lets {'it' if count == 1 else 'them'} go."
            advice = f"Let them go now: `busload batch resume {facts.batch_id}`."
            details = {}
        case "SNOOZED":
            code = Blocker.RUN_AT
            message = f"{are(count)} put off by {'its' if count == 1 else 'their'} handler: {when}."
            advice = "Nothing to do: what is due becomes ready by itself."
        case _:
            code = Blocker.RUN_AT
            message = f"{have(count)} a run_at that has not come: {when}."
            advice = "Nothing to do: what is due becomes ready by itself."
    return Reason(code, count, waiting.since or facts.created_at, message, advice, details)


# -- running -----------------------------------------------------------------------------------------------------------


def _running_long(facts: Facts) -> Iterator[Reason]:
    stuck = [running for running in facts.places.running if running.long and not running.lost]
    if not stuck:
        return
    count, first = sum(running.long for running in stuck), min(stuck, key=lambda running: running.since)
    usual = facts.around.usual
    compared = "nothing to compare with has ended yet" if usual is None else f"usually it takes {span(usual)}"
    workers = ", ".join(sorted({running.worker or "unknown" for running in stuck}))
    yield Reason(
        Blocker.RUNNING_LONG,
        count,
        first.since,
        f"{are(count)} running for up to {span(facts.now - first.since)} on {workers}; {compared}.",
        f"See which: {look_at(facts, 'IN_PROGRESS')}. A handler registered with timeout= would be ended by itself.",
        {
            "workers": [running.worker for running in stuck],
            "usual_seconds": None if usual is None else usual.total_seconds(),
        },
    )


def _worker_lost(facts: Facts) -> Iterator[Reason]:
    lost = [running for running in facts.places.running if running.lost]
    if not lost:
        return
    count, last = _sum(lost), max(lost, key=lambda running: running.count)
    ends = max((running.lease_ends_at for running in lost if running.lease_ends_at), default=None)
    waits = ends is not None and ends > facts.now
    then = f"Its lease ends {until(facts, ends)}; then" if ends and waits else "Its lease has ended;"
    seen = f", not seen for {span(facts.now - last.seen_at)}" if last.seen_at else ""
    others = f" and {counted(len(lost) - 1, 'more worker')}" if len(lost) > 1 else ""
    yield Reason(
        Blocker.WORKER_LOST,
        count,
        min((running.seen_at for running in lost if running.seen_at), default=last.since),
        f"{are(count)} held by worker {last.worker or 'unknown'}{others}{seen}. {then} any living worker "
        "can take over.",
        f"Publish its two keys again, or take it back: `busload tracker recover --queue {facts.domain}`."
        if facts.command_type == TRACKED
        else "Nothing to do but wait; find out why the worker died."
        if facts.around.anybody
        else f"No worker lives that could take them back. {start_worker(facts)}",
        {"workers": [running.worker for running in lost], "lease_ends_at": ends},
    )


# -- in troubleshooting, or nowhere ------------------------------------------------------------------------------------


def _in_troubleshooting(facts: Facts) -> Iterator[Reason]:
    for parked in facts.places.parked:
        yield Reason(
            Blocker.IN_TROUBLESHOOTING,
            parked.count,
            parked.since,
            f"{are(parked.count)} waiting for a person, {parked.reason}: {error_of(parked)}.",
            how_to_decide(facts, parked),
            {
                "fingerprint": parked.fingerprint,
                "reason": parked.reason,
                "error_type": parked.error_type,
                "error_code": parked.error_code,
                "error_message": parked.message,
                "domain": facts.domain,
                "command_id": parked.command_id,
            },
        )
    if facts.places.other_parked:
        yield Reason(
            Blocker.IN_TROUBLESHOOTING,
            facts.places.other_parked,
            None,
            f"{are(facts.places.other_parked)} waiting for a person for other causes.",
            f"List them: `busload troubleshooting ls --domain {facts.domain}`.",
        )


def _in_no_place(facts: Facts, count: int) -> Reason:
    return Reason(
        Blocker.IN_NO_PLACE,
        count,
        facts.created_at,
        f"{are(count)} in no place (status PENDING_QUEUE): never put into one, or taken out by other hands than "
        "busload's. No worker can find what is in none.",
        f"See which: {look_at(facts, 'PENDING_QUEUE')}, and find out who writes to busload's tables.",
    )


# -- the words ---------------------------------------------------------------------------------------------------------


def _sum(parts: Iterable[Ready | Running]) -> int:
    return sum(part.count for part in parts)


def _oldest(parts: Iterable[Ready | Waiting]) -> datetime | None:
    return min((part.since for part in parts if part.since is not None), default=None)
