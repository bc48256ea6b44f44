"""Why a batch or a command is not finished: facts about places and workers go in, reasons in plain words come out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any
from uuid import UUID

from busload.domain.counted import counted
from busload.domain.dedup import TRACKED
from busload.domain.pause import Pause

LONG = timedelta(seconds=30)
"""No attempt is said to run long before."""
LONG_WITHOUT_COMPARISON = timedelta(minutes=10)
"""The same where no attempt has ended yet that it could be compared with."""
NOT_RELAYED = timedelta(seconds=10)
"""How long what is due may stay in the outbox before nobody is said to relay it."""
MUCH_LONGER = 10
"""How many times the usual an attempt must take to be called long."""


class Blocker(StrEnum):
    """What keeps a batch or a command from being finished, the most urgent first."""

    NOT_SEALED = "NOT_SEALED"
    CANCELING = "CANCELING"
    PAUSED = "PAUSED"
    NO_WORKER = "NO_WORKER"
    NOT_CLAIMED = "NOT_CLAIMED"
    NOT_CONFIRMED = "NOT_CONFIRMED"
    NOT_ANNOUNCED = "NOT_ANNOUNCED"
    IN_TROUBLESHOOTING = "IN_TROUBLESHOOTING"
    NO_HANDLER = "NO_HANDLER"
    WORKER_LOST = "WORKER_LOST"
    RUNNING_LONG = "RUNNING_LONG"
    IN_NO_PLACE = "IN_NO_PLACE"
    RATE_LIMITED = "RATE_LIMITED"
    BACKOFF = "BACKOFF"
    RUN_AT = "RUN_AT"
    BEHIND_PRIORITY = "BEHIND_PRIORITY"
    CALLBACK_FAILING = "CALLBACK_FAILING"
    CALLBACK_WAITING = "CALLBACK_WAITING"


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that is in the way: of how many commands, since when, and what to do about it."""

    code: Blocker
    count: int
    since: datetime | None
    message: str
    advice: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a batch or a command is not finished, at one moment. No reasons and not finished: it is on its way."""

    domain: str
    batch_id: UUID | None
    command_id: UUID | None
    finished: bool
    summary: str
    reasons: tuple[Reason, ...]
    remaining: int
    """Commands that have not ended."""
    eta: datetime | None
    """When a healthy batch will be done if it goes on at its rate so far; None before anything has ended."""


# -- the facts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """Commands of one priority that any worker could take."""

    priority: int
    count: int
    since: datetime | None


@dataclass(frozen=True, slots=True)
class Failure:
    """Attempts that failed alike, and one of their commands."""

    count: int
    error_type: str | None
    error_code: str | None
    message: str | None
    command_id: UUID


@dataclass(frozen=True, slots=True)
class Waiting:
    """Commands that are not due, all for one reason: RUN_AT, RETRY, NO_HANDLER or RATE_LIMITED."""

    reason: str
    count: int
    since: datetime | None
    next_at: datetime
    last_at: datetime
    failures: tuple[Failure, ...] = ()
    command_types: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Unconfirmed:
    """Commands in the outbox for one broker, all for one reason; without one, no round has failed for them yet."""

    transport: str
    reason: str | None
    count: int
    since: datetime
    rounds: int
    error: str | None
    next_try: datetime


@dataclass(frozen=True, slots=True)
class Running:
    """Commands that one worker holds; `long` of them have run for much longer than usual."""

    worker: str | None
    count: int
    since: datetime
    seen_at: datetime | None
    lease_ends_at: datetime | None
    lost: bool
    long: int = 0


@dataclass(frozen=True, slots=True)
class Cause:
    """Commands in troubleshooting for the same cause, and one of them."""

    count: int
    since: datetime
    reason: str
    error_type: str | None
    error_code: str | None
    message: str | None
    command_id: UUID
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class Places:
    """Where the commands are that have not ended."""

    ready: tuple[Ready, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    running: tuple[Running, ...] = ()
    causes: tuple[Cause, ...] = ()
    other_causes: int = 0
    """Commands in troubleshooting for causes that are not listed."""
    unconfirmed: tuple[Unconfirmed, ...] = ()

    @property
    def count(self) -> int:
        places = (self.ready, self.waiting, self.running, self.causes, self.unconfirmed)
        return sum(part.count for parts in places for part in parts) + self.other_causes


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The domain they are in: who serves it, and what else it has to do."""

    workers: int
    """Living ones that serve the domain."""
    last_seen: datetime | None = None
    """When the last of those that served it was seen."""
    anybody: bool = True
    """Whether any worker lives: each takes back what dead ones held, whatever domains it serves."""
    pause: Pause | None = None
    ahead: int = 0
    """Ready commands of others that have a higher priority than the lowest of ours."""
    ahead_priority: int | None = None
    """The highest priority among them."""
    usual: timedelta | None = None
    """How long an attempt takes, on average of those that have ended."""


@dataclass(frozen=True, slots=True)
class CommandFacts:
    now: datetime
    domain: str
    command_id: UUID
    batch_id: UUID | None
    command_type: str
    status: str
    created_at: datetime
    ended: bool
    canceled_at: datetime | None
    """When its batch was canceled."""
    places: Places
    around: Surroundings
    events: int | None = None
    """How many events it holds, if it is a group of a buffer."""


@dataclass(frozen=True, slots=True)
class BatchFacts:
    now: datetime
    domain: str
    batch_id: UUID
    status: str
    total: int
    ended: int
    created_at: datetime
    started_at: datetime | None
    sealed_at: datetime | None
    canceled_at: datetime | None
    completed_at: datetime | None
    places: Places = Places()
    around: Surroundings = Surroundings(workers=0)
    callback: CommandFacts | None = None


# -- the decisions -----------------------------------------------------------------------------------------------------


def explain_batch(facts: BatchFacts) -> Explanation:
    """Say why a batch is not finished; it is when it has completed and its callback, if it has one, has ended."""
    if facts.completed_at is not None:
        reasons, finished = _callback_reasons(facts), facts.callback is None or facts.callback.ended
    else:
        reasons, finished = _batch_reasons(facts), False
    return Explanation(
        facts.domain,
        facts.batch_id,
        None,
        finished,
        _batch_summary(facts, reasons),
        tuple(reasons),
        facts.total - facts.ended,
        None if reasons or finished else eta(facts),
    )


def explain_command(facts: CommandFacts) -> Explanation:
    """Say why a command is not finished."""
    reasons = [] if facts.ended else _command_reasons(facts)
    return Explanation(
        facts.domain,
        facts.batch_id,
        facts.command_id,
        facts.ended,
        _command_summary(facts, reasons),
        tuple(reasons),
        0 if facts.ended else 1,
        None,
    )


def eta(facts: BatchFacts) -> datetime | None:
    """When the rest will have ended, at the rate of what has."""
    if facts.started_at is None or not facts.ended:
        return None
    return facts.now + (facts.now - facts.started_at) / facts.ended * (facts.total - facts.ended)


def longer_than(usual: timedelta | None) -> timedelta:
    """From when on a running attempt is called long."""
    return LONG_WITHOUT_COMPARISON if usual is None else max(LONG, MUCH_LONGER * usual)


def _batch_reasons(facts: BatchFacts) -> list[Reason]:
    subject = _Subject.of(facts, batch_id=facts.batch_id)
    reasons = [*subject.reasons(nowhere=facts.total - facts.ended - facts.places.count)]
    if facts.sealed_at is None:
        reasons.append(_not_sealed(facts))
    return sorted(reasons, key=lambda reason: _URGENCY[reason.code])


def _command_reasons(facts: CommandFacts) -> list[Reason]:
    about = {"command_id": facts.command_id, "tracked": facts.command_type == TRACKED, "events": facts.events}
    subject = _Subject.of(facts, **about)
    return sorted(subject.reasons(nowhere=1 - facts.places.count), key=lambda reason: _URGENCY[reason.code])


def _callback_reasons(facts: BatchFacts) -> list[Reason]:
    """The batch has completed; its callback is a command with reasons of its own."""
    callback = facts.callback
    if callback is None or callback.ended:
        return []
    own = _command_reasons(callback)
    failing = any(reason.code in (Blocker.BACKOFF, Blocker.IN_TROUBLESHOOTING) for reason in own)
    told = " ".join(reason.message for reason in own) or f"It is {callback.status} and on its way."
    advice = " ".join(reason.advice for reason in own) or "Nothing to do: it is about to end."
    return [
        Reason(
            Blocker.CALLBACK_FAILING if failing else Blocker.CALLBACK_WAITING,
            1,
            own[0].since if own else facts.completed_at,
            f"All commands have ended, but the callback, command {callback.command_id} ({callback.command_type}), has "
            f"not. {told}",
            advice,
            {"command_id": callback.command_id, "command_type": callback.command_type, "reasons": own},
        )
    ]


def _not_sealed(facts: BatchFacts) -> Reason:
    return Reason(
        Blocker.NOT_SEALED,
        facts.total,
        facts.created_at,
        f"The batch was opened {_ago(facts.now, facts.created_at)} and is not sealed: more may be added, so it cannot "
        "complete.",
        f'If nothing is missing, seal it: bus.seal_batch("{facts.domain}", UUID("{facts.batch_id}")); or give it up: '
        f"`busload batch cancel {facts.batch_id} --reason TEXT`.",
    )


@dataclass(frozen=True, slots=True)
class _Subject:
    """A batch or a command, and everything that could be in its way."""

    now: datetime
    domain: str
    created_at: datetime
    canceled_at: datetime | None
    places: Places
    around: Surroundings
    batch_id: UUID | None = None
    command_id: UUID | None = None
    tracked: bool = False
    """Another queue runs it: no worker looks for it, somebody has to claim it by name."""
    events: int | None = None

    @classmethod
    def of(cls, facts: BatchFacts | CommandFacts, **more: Any) -> _Subject:
        canceled_at, places, around = facts.canceled_at, facts.places, facts.around
        return cls(facts.now, facts.domain, facts.created_at, canceled_at, places, around, **more)

    @property
    def _start_one(self) -> str:
        return f"Start one: `busload worker MODULE:BUS --domains {self.domain}`."

    def reasons(self, *, nowhere: int) -> Iterator[Reason]:
        if self.canceled_at is not None:
            yield from self._canceling(self.canceled_at)
        elif self.tracked:
            yield from self._waits_for_a_claim()
            yield from self._running_long()
        else:
            for unconfirmed in self.places.unconfirmed:
                yield from self._in_the_outbox(unconfirmed)
            yield from self._ready()
            for waiting in self.places.waiting:
                yield _WAITING[waiting.reason](self, waiting)
            yield from self._running_long()
        yield from self._workers_lost()
        yield from self._in_troubleshooting()
        if nowhere > 0:
            yield self._in_no_place(nowhere)

    def _in_the_outbox(self, held: Unconfirmed) -> Iterator[Reason]:
        nobody = self._nobody_relays(held)
        details = {"transport": held.transport, "rounds": held.rounds, "reason": held.reason, "error": held.error}
        if held.reason is not None:
            said = " ".join((held.error or "").split())[:200].removesuffix(".")
            when = "is due now" if held.next_try <= self.now else f"is {_until(self.now, held.next_try)}"
            next_try = f"The next try {when}." if nobody is None else f"Nobody tries again: {nobody}."
            rounds = counted(held.rounds, "round")
            yield Reason(
                Blocker.NOT_CONFIRMED,
                held.count,
                held.since,
                f"{_are(held.count)} in the outbox: {rounds} of announcing to the broker ({held.transport}) failed. "
                f"The last time it was {held.reason}: {said}. {next_try}",
                self._relay_or(
                    "Nothing to do if the broker comes back. Let it try now: `busload outbox retry`. Go"
                    if nobody is None
                    else f"{self._start_a_relay} Or go"
                ),
                details | {"next_try": held.next_try},
            )
        elif nobody is not None:
            yield Reason(
                Blocker.NOT_ANNOUNCED,
                held.count,
                held.since,
                f"{_are(held.count)} in the outbox since {_span(self.now - held.since)}, but {nobody}.",
                self._relay_or(f"{self._start_a_relay} Or go"),
                details,
            )

    def _nobody_relays(self, held: Unconfirmed) -> str | None:
        """Why not, if so: relays of living workers take what is due at once."""
        if not self.around.anybody:
            return "no worker lives"
        return f"no worker relays to {held.transport}" if self.now - held.next_try > NOT_RELAYED else None

    @property
    def _start_a_relay(self) -> str:
        worker = f"busload worker MODULE:BUS --domains {self.domain} --transport URL"
        return f"Start a worker whose bus has that transport: `{worker}`."

    def _relay_or(self, first: str) -> str:
        where = f"--domain {self.domain}" if self.batch_id is None else f"--batch {self.batch_id}"
        return f"{first} without the broker: `busload outbox reroute {where} --all`."

    def _ready(self) -> Iterator[Reason]:
        count = sum(ready.count for ready in self.places.ready)
        if not count:
            return
        sent = _oldest(ready.since for ready in self.places.ready) or self.created_at
        if self.around.pause is not None:
            yield self._paused(self.around.pause, count, sent)
        if self.around.workers == 0:
            yield self._no_worker(count, sent)
        elif self.around.pause is None and self.around.ahead_priority is not None:
            top = self.around.ahead_priority
            behind = [ready for ready in self.places.ready if ready.priority < top]
            if behind:
                yield self._behind(behind)

    def _paused(self, pause: Pause, count: int, sent: datetime) -> Reason:
        by = f" by {pause.operator}" if pause.operator else ""
        why = f": {pause.reason}" if pause.reason else ""
        return Reason(
            Blocker.PAUSED,
            count,
            max(pause.since, sent),
            f"{_are(count)} ready, but domain {self.domain!r} was paused {_ago(self.now, pause.since)}{by}{why}.",
            f"Let it go on: `busload domain resume {self.domain}`.",
            {"paused_at": pause.since, "operator": pause.operator, "reason": pause.reason},
        )

    def _waits_for_a_claim(self) -> Iterator[Reason]:
        if not self.places.ready and not self.places.waiting:
            return
        places: tuple[Ready | Waiting, ...] = (*self.places.ready, *self.places.waiting)
        since = _oldest(place.since for place in places) or self.created_at
        if self.around.pause is not None:
            yield self._paused(self.around.pause, 1, since)
            return
        failures = [one for waiting in self.places.waiting for one in waiting.failures if one.error_type]
        failed = f" The last error was {_said(failures[0])}." if failures else ""
        yield Reason(
            Blocker.NOT_CLAIMED,
            1,
            since,
            f"No process of its queue, {self.domain!r}, has claimed it for {_span(self.now - since)}.{failed}",
            "Publish its two keys again, its message may be lost: "
            f"`busload tracker recover --queue {self.domain}` lists all that have waited too long.",
            {"failures": failures},
        )

    def _no_worker(self, count: int, sent: datetime) -> Reason:
        seen = self.around.last_seen
        last = "; there has never been one" if seen is None else f"; the last one was seen {_ago(self.now, seen)}"
        return Reason(
            Blocker.NO_WORKER,
            count,
            sent if seen is None else max(seen, sent),
            f"{_are(count)} ready, but no living worker serves domain {self.domain!r}{last}.",
            self._start_one,
            {"last_seen": seen},
        )

    def _behind(self, behind: Sequence[Ready]) -> Reason:
        count, ahead = sum(ready.count for ready in behind), self.around.ahead
        return Reason(
            Blocker.BEHIND_PRIORITY,
            count,
            _oldest(ready.since for ready in behind) or self.created_at,
            f"{_are(count)} ready, behind {_commands(ahead)} of higher priority in domain {self.domain!r}.",
            "Nothing to do if that is meant. More workers get there sooner: "
            f"`busload worker MODULE:BUS --domains {self.domain}`.",
            {"ahead": ahead, "priority": max(ready.priority for ready in behind)},
        )

    def _run_at(self, waiting: Waiting) -> Reason:
        return Reason(
            Blocker.RUN_AT,
            waiting.count,
            waiting.since or self.created_at,
            f"{_have(waiting.count)} a run_at that has not come: {self._when(waiting)}.",
            "Nothing to do: what is due becomes ready by itself.",
            {"next_at": waiting.next_at, "last_at": waiting.last_at},
        )

    def _backoff(self, waiting: Waiting) -> Reason:
        causes = "; ".join(_said(failure) for failure in waiting.failures[:3])
        shown = self.command_id or (waiting.failures[0].command_id if waiting.failures else None)
        look = f" `busload command show {shown}` tells of every attempt." if shown else ""
        return Reason(
            Blocker.BACKOFF,
            waiting.count,
            waiting.since or self.created_at,
            f"{_commands(waiting.count)} failed and will be tried again: {self._when(waiting)}."
            + (f" The last error was {causes}." if causes else ""),
            f"Nothing to do if the cause passes by itself.{look}",
            {"next_at": waiting.next_at, "last_at": waiting.last_at, "failures": waiting.failures},
        )

    def _no_handler(self, waiting: Waiting) -> Reason:
        types = ", ".join(waiting.command_types)
        handler = waiting.command_types[0] if waiting.command_types else "TYPE"
        return Reason(
            Blocker.NO_HANDLER,
            waiting.count,
            waiting.since or self.created_at,
            f"{_are(waiting.count)} of a type that no worker had a handler for: {types}. The next try is "
            f"{_until(self.now, waiting.next_at)}.",
            f'Start a worker that has a handler: @bus.handler("{self.domain}", "{handler}").',
            {"command_types": list(waiting.command_types), "next_at": waiting.next_at},
        )

    def _rate_limited(self, waiting: Waiting) -> Reason:
        limits = ", ".join(waiting.limits) or "unknown"
        shown = waiting.limits[0] if waiting.limits else "NAME"
        return Reason(
            Blocker.RATE_LIMITED,
            waiting.count,
            waiting.since or self.created_at,
            f"{_are(waiting.count)} held up by a rate limit, {limits}: {self._when(waiting)}.",
            f"Nothing to do: what is held up comes back by itself. `busload limit show {shown}` tells how many calls a "
            "second it allows, and until when the receiver refuses them.",
            {"limits": list(waiting.limits), "next_at": waiting.next_at, "last_at": waiting.last_at},
        )

    def _workers_lost(self) -> Iterator[Reason]:
        lost = [running for running in self.places.running if running.lost]
        if not lost:
            return
        count, last = sum(running.count for running in lost), max(lost, key=lambda running: running.count)
        ends = max((running.lease_ends_at for running in lost if running.lease_ends_at), default=None)
        if ends is not None and ends > self.now:
            then = f"Its lease ends {_until(self.now, ends)}; then"
        else:
            then = "Its lease has ended;"
        seen = f", not seen for {_span(self.now - last.seen_at)}" if last.seen_at else ""
        others = f" and {counted(len(lost) - 1, 'more worker')}" if len(lost) > 1 else ""
        yield Reason(
            Blocker.WORKER_LOST,
            count,
            _oldest(running.seen_at for running in lost) or last.since,
            f"{_are(count)} held by worker {last.worker or 'unknown'}{others}{seen}. {then} any living worker "
            "can take over.",
            f"Publish its two keys again, or take it back: `busload tracker recover --queue {self.domain}`."
            if self.tracked
            else "Nothing to do but wait; find out why the worker died."
            if self.around.anybody
            else f"No worker lives that could take them back. {self._start_one}",
            {"workers": [running.worker for running in lost], "lease_ends_at": ends},
        )

    def _running_long(self) -> Iterator[Reason]:
        stuck = [running for running in self.places.running if running.long and not running.lost]
        if not stuck:
            return
        count, first = sum(running.long for running in stuck), min(stuck, key=lambda running: running.since)
        usual = self.around.usual
        compared = "nothing to compare with has ended yet" if usual is None else f"usually it takes {_span(usual)}"
        yield Reason(
            Blocker.RUNNING_LONG,
            count,
            first.since,
            f"{_are(count)} running for up to {_span(self.now - first.since)} on "
            f"{', '.join(sorted({running.worker or 'unknown' for running in stuck}))}; {compared}.",
            f"See which: {self._look('IN_PROGRESS')}. A handler registered with timeout= would be ended by itself.",
            {
                "workers": [running.worker for running in stuck],
                "usual_seconds": None if usual is None else usual.total_seconds(),
            },
        )

    def _canceling(self, canceled_at: datetime) -> Iterator[Reason]:
        runs = sum(running.count for running in self.places.running if not running.lost)
        waits = sum(p.count for ps in (self.places.ready, self.places.waiting, self.places.unconfirmed) for p in ps)
        if not runs + waits:
            return
        back = f" {_are(waits)} back from a worker and will be canceled by the next sweep." if waits else ""
        yield Reason(
            Blocker.CANCELING,
            runs + waits,
            canceled_at,
            f"The batch was canceled {_ago(self.now, canceled_at)}; {_have(runs)} not stopped yet.{back}",
            "Handlers finish, or stop early if they look at ctx.cancelled."
            if self.around.anybody
            else f"No worker lives that could cancel the rest. {self._start_one}",
            {"running": runs, "waiting": waits},
        )

    def _in_troubleshooting(self) -> Iterator[Reason]:
        for cause in self.places.causes:
            yield Reason(
                Blocker.IN_TROUBLESHOOTING,
                cause.count,
                cause.since,
                f"{_are(cause.count)} waiting for a person, {cause.reason}: {_said(cause)}.",
                self._resolve(cause),
                {
                    "fingerprint": cause.fingerprint,
                    "reason": cause.reason,
                    "error_type": cause.error_type,
                    "error_code": cause.error_code,
                    "error_message": cause.message,
                    "command_id": cause.command_id,
                },
            )
        if self.places.other_causes:
            yield Reason(
                Blocker.IN_TROUBLESHOOTING,
                self.places.other_causes,
                None,
                f"{_are(self.places.other_causes)} waiting for a person for other causes.",
                f"List them: `busload troubleshooting ls --domain {self.domain}`.",
            )

    def _resolve(self, cause: Cause) -> str:
        verb = "complete" if self.canceled_at else "retry"
        verbs = "complete or cancel" if self.canceled_at else "retry, complete or cancel"
        if cause.count == 1:
            deletes = "" if self.events is None else f" Complete and cancel delete its {counted(self.events, 'event')}."
            return f"Decide: `busload troubleshooting {verb} {cause.command_id}` ({verbs}).{deletes}"
        return (
            f"See one: `busload command show {cause.command_id}`. Then decide for all of this cause: "
            f"`busload troubleshooting {verb} --group {cause.fingerprint} --domain {self.domain}` ({verbs})."
        )

    def _in_no_place(self, count: int) -> Reason:
        return Reason(
            Blocker.IN_NO_PLACE,
            count,
            self.created_at,
            f"{_are(count)} in no place (status PENDING_QUEUE): never put into one, or taken out by other hands than "
            "busload's. No worker can find what is in none.",
            f"See which: {self._look('PENDING_QUEUE')}, and find out who writes to busload's tables.",
        )

    def _look(self, status: str) -> str:
        if self.batch_id is None:
            return f"`busload command show {self.command_id}`"
        return f'bus.list_batch_commands("{self.domain}", UUID("{self.batch_id}"), status="{status}")'

    def _when(self, waiting: Waiting) -> str:
        if waiting.next_at == waiting.last_at:
            return _until(self.now, waiting.next_at)
        return f"the next {_until(self.now, waiting.next_at)}, the last {_until(self.now, waiting.last_at)}"


_WAITING = {
    "RUN_AT": _Subject._run_at,
    "RETRY": _Subject._backoff,
    "NO_HANDLER": _Subject._no_handler,
    "RATE_LIMITED": _Subject._rate_limited,
}
_URGENCY = {code: place for place, code in enumerate(Blocker)}


# -- the words ---------------------------------------------------------------------------------------------------------

_LABELS = {
    Blocker.NOT_SEALED: "not sealed",
    Blocker.CANCELING: "being canceled",
    Blocker.PAUSED: "paused",
    Blocker.NO_WORKER: "without a worker",
    Blocker.NOT_CLAIMED: "not claimed",
    Blocker.NOT_CONFIRMED: "refused by the broker",
    Blocker.NOT_ANNOUNCED: "not announced",
    Blocker.IN_TROUBLESHOOTING: "waiting for a person",
    Blocker.NO_HANDLER: "without a handler",
    Blocker.WORKER_LOST: "held by a lost worker",
    Blocker.RUNNING_LONG: "running long",
    Blocker.IN_NO_PLACE: "in no place",
    Blocker.RATE_LIMITED: "held up by a rate limit",
    Blocker.BACKOFF: "waiting for the next attempt",
    Blocker.RUN_AT: "waiting for their time",
    Blocker.BEHIND_PRIORITY: "behind higher priority",
    Blocker.CALLBACK_FAILING: "callback failing",
    Blocker.CALLBACK_WAITING: "callback waiting",
}


def _batch_summary(facts: BatchFacts, reasons: Sequence[Reason]) -> str:
    if facts.completed_at is not None:
        all_of_them = "its command" if facts.total == 1 else f"all {counted(facts.total, 'command')}"
        done = f"{facts.status}: {all_of_them} ended {_ago(facts.now, facts.completed_at)}"
        if facts.callback is None:
            return f"{done}."
        return f"{done}; the callback is {facts.callback.status}."
    ended = f"{facts.ended:,} of {counted(facts.total, 'command has', 'commands have')} ended"
    if reasons:
        return f"Not finished: {ended}; {_labels(reasons)}."
    ready = sum(ready.count for ready in facts.places.ready)
    running = sum(running.count for running in facts.places.running)
    outbox = sum(held.count for held in facts.places.unconfirmed)
    announced = f", {outbox:,} to be announced" if outbox else ""
    expected = eta(facts)
    done = "" if expected is None else f"; done in about {_span(expected - facts.now)}"
    return f"On its way: {ended}, {running:,} running, {ready:,} ready{announced}{done}."


def _command_summary(facts: CommandFacts, reasons: Sequence[Reason]) -> str:
    if facts.ended:
        return f"{facts.status}: it has ended."
    it = "it" if facts.events is None else f"this group of {counted(facts.events, 'event')} of buffer {facts.domain!r}"
    if reasons:
        return f"Not finished: {it} is {facts.status}; {_labels(reasons)}."
    return f"On its way: {it} is {facts.status}."


def _labels(reasons: Sequence[Reason]) -> str:
    counts: dict[Blocker, int] = {}
    for reason in reasons:
        counts[reason.code] = counts.get(reason.code, 0) + reason.count
    return ", ".join(
        _LABELS[code] if code == Blocker.NOT_SEALED else f"{count:,} {_LABELS[code]}" for code, count in counts.items()
    )


def _said(failure: Failure | Cause) -> str:
    """An error in one short line."""
    message = " ".join((failure.message or "").split())[:200].removesuffix(".")
    return ": ".join(part for part in (failure.error_type, failure.error_code, message) if part) or "unknown"


def _commands(count: int) -> str:
    return counted(count, "command")


def _are(count: int) -> str:
    return counted(count, "command is", "commands are")


def _have(count: int) -> str:
    return counted(count, "command has", "commands have")


def _oldest(times: Iterator[datetime | None]) -> datetime | None:
    return min((time for time in times if time is not None), default=None)


def _ago(now: datetime, then: datetime) -> str:
    return f"{_span(now - then)} ago"


def _until(now: datetime, then: datetime) -> str:
    return f"in {_span(then - now)}"


def _span(span: timedelta) -> str:
    """A duration as people say it, in its largest unit."""
    seconds = max(span.total_seconds(), 0.0)
    if seconds < 10:
        return f"{seconds:.2g} s" if seconds >= 0.001 else "0 s"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
