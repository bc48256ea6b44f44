"""Reads the facts behind an explanation at one moment, in the same few statements for one batch as for many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from busload.batches.forecast import read_forecast
from busload.errors import BatchNotFoundError, CommandNotFoundError
from busload.explain.facts import (
    ENDED,
    Barrier,
    Canary,
    Facts,
    Failure,
    Hold,
    Parked,
    Places,
    Ready,
    Running,
    Snapshot,
    Surroundings,
    Unconfirmed,
    Waiting,
    longer_than,
)
from busload.limits.pause import Pause
from busload.postgres.plan import ONE_MOMENT, Plan, execute
from busload.postgres.statements import statements

SQL = statements(__name__)

SNAPSHOT_AFTER = timedelta(minutes=1)
"""A session may have a snapshot for this long before an explanation names it."""

MANY_DEAD = 10_000
"""Dead rows of the queue that make claims slower."""

CAUSES = ("RETRY", "NO_HANDLER", "RATE_LIMITED", "LIMITED")
"""Reasons to wait that have a cause of their own."""


def read_batch(domain: str, batch_id: UUID) -> Plan[Facts]:
    """Needs a transaction of its own."""
    yield ONE_MOMENT
    found = yield from read_facts(domain, batches=[batch_id])
    if batch_id not in found:
        raise BatchNotFoundError(domain, batch_id)
    return found[batch_id]


def read_command(domain: str, command_id: UUID) -> Plan[Facts]:
    """Needs a transaction of its own."""
    yield ONE_MOMENT
    found = yield from read_facts(domain, commands=[command_id])
    if command_id not in found:
        raise CommandNotFoundError(domain, command_id)
    return found[command_id]


def read_facts(
    domain: str, *, batches: Sequence[UUID] = (), commands: Sequence[UUID] = (), forecast: bool = True
) -> Plan[dict[UUID, Facts]]:
    """What a transaction that sees one moment finds about batches and commands of a domain, by their ids.

    It takes the same few statements for one of them as for many, whatever domains their commands run in. A `forecast`
    is the dearest fact about a batch.
    """
    found: dict[UUID, Facts] = {}
    callbacks: dict[UUID, UUID] = {}
    asked: list[Asked] = []
    if batches:
        for batch_id, callback_id, first, last, domains, *about in (
            yield from execute(SQL.batches, domain=domain, batch_ids=list(batches), forecast=forecast)
        ):
            found[batch_id] = facts = _batch(domain, batch_id, *about)
            if facts.completed_at is None and not facts.of_jobs:  # jobs have no place of their own
                own = domain if set(domains) - {domain} else None
                parts = [replace(facts, domain=name, batch_domain=own) for name in domains or [domain]]
                asked += [Asked(part, first, last) for part in parts]
            elif facts.completed_at is not None and callback_id is not None:
                callbacks[batch_id] = callback_id
    if wanted := [*commands, *callbacks.values()]:
        for id, lease_id, *about in (yield from execute(SQL.commands, domain=domain, command_ids=wanted)):
            facts = _command(domain, *about)
            assert facts.command_id is not None
            found[facts.command_id] = facts
            if not facts.ended:
                asked.append(Asked(facts, id, id, lease_id))
    placed: dict[UUID, list[Facts]] = {}
    for facts in (yield from _with_places(asked)):
        placed.setdefault(facts.command_id or facts.batch_id or UUID(int=0), []).append(facts)
    found |= {key: _together(found[key], parts) for key, parts in placed.items()}
    return found | {key: replace(found[key], callback=found.get(callback)) for key, callback in callbacks.items()}


def _together(facts: Facts, parts: Sequence[Facts]) -> Facts:
    """The facts of a command or a batch, made of those for each domain."""
    if parts[0].batch_domain is None:
        return parts[0]
    places, own = Places(), next((part for part in parts if part.domain == facts.domain), parts[0])
    for part in parts:
        places += part.places
    return replace(facts, parts=tuple(parts), places=places, around=own.around)


def _batch(
    domain: str,
    batch_id: UUID,
    now: datetime,
    status: str,
    total: int,
    ended: int,
    created_at: datetime,
    started_at: datetime | None,
    sealed_at: datetime | None,
    canceled_at: datetime | None,
    completed_at: datetime | None,
    of_jobs: bool,
    outlook: str | None,
    *rest: Any,
) -> Facts:
    return Facts(
        now=now,
        domain=domain,
        batch_id=batch_id,
        status=status,
        total=total,
        ended=ended,
        created_at=created_at,
        started_at=started_at,
        sealed_at=sealed_at,
        canceled_at=canceled_at,
        completed_at=completed_at,
        hold=_hold(*rest[:4]),
        canary=Canary(*rest[4:]),
        of_jobs=of_jobs,
        forecast=read_forecast(outlook),
    )


def _command(
    domain: str,
    now: datetime,
    command_id: UUID,
    batch_id: UUID | None,
    command_type: str,
    status: str,
    created_at: datetime,
    canceled_at: datetime | None,
    stopping_since: datetime | None,
    items: str | None,
    *rest: Any,
) -> Facts:
    return Facts(
        now=now,
        domain=domain,
        batch_id=batch_id,
        command_id=command_id,
        command_type=command_type,
        status=status,
        ended=int(status in ENDED),
        created_at=created_at,
        canceled_at=canceled_at,
        stopping_since=stopping_since,
        hold=_hold(*rest[:4]),
        canary=Canary(*rest[4:]),
        events=int(items) if items is not None and items.isdecimal() else None,
    )


def _hold(since: datetime | None, reason: str, operator: str | None, note: str | None) -> Hold | None:
    return None if since is None else Hold(since, reason, operator, note)


# -- where commands are, and what goes on around them ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    """Facts whose places are asked for: those of the commands from the first to the last id in its domain."""

    facts: Facts
    first: int | None
    last: int | None
    lease_id: UUID | None = None
    """The lease of a command that runs."""


def _with_places(asked: Sequence[Asked]) -> Plan[list[Facts]]:
    """Add where the commands are and what goes on around them: for all that is asked in the same statements."""
    if not asked:
        return []
    everywhere = range(len(asked))
    usual: dict[int, timedelta | None] = dict((yield from execute(SQL.usual, **_params(asked, everywhere))))
    places = yield from _places(asked)
    can_run = [n for n in everywhere if asked[n].facts.command_id is None or asked[n].lease_id is not None]
    if can_run:
        limits = [longer_than(usual[n]) for n in can_run]
        leases = [asked[n].lease_id for n in can_run]
        found = _by_number(
            (yield from execute(SQL.running, **_params(asked, can_run), longer_than=limits, lease_ids=leases))
        )
        for n, rows in found.items():
            places[n] = replace(places[n], running=tuple(Running(*row) for row in rows))
    for n, rows in _by_number((yield from execute(SQL.parked, **_params(asked, everywhere)))).items():
        causes = tuple(Parked(*row[:-1]) for row in rows)
        others = rows[0][-1] - sum(cause.count for cause in causes)
        places[n] = replace(places[n], parked=causes, other_parked=others)
    around = yield from _surroundings(asked, places, usual)
    return [replace(asked[n].facts, places=places[n], around=around[n]) for n in everywhere]


def _params(asked: Sequence[Asked], numbers: Sequence[int]) -> dict[str, list[Any]]:
    """What the fragment `asked` is made of."""
    chosen = [asked[n] for n in numbers]
    return {
        "numbers": list(numbers),
        "batch_ids": [one.facts.batch_id for one in chosen],
        "domains": [one.facts.domain for one in chosen],
        "firsts": [one.first for one in chosen],
        "lasts": [one.last for one in chosen],
        "command_types": [one.facts.command_type for one in chosen],
    }


def _by_number(rows: Sequence[tuple[Any, ...]]) -> dict[int, list[tuple[Any, ...]]]:
    found: dict[int, list[tuple[Any, ...]]] = {}
    for number, *row in rows:
        found.setdefault(number, []).append(tuple(row))
    return found


def _places(asked: Sequence[Asked]) -> Plan[list[Places]]:
    """What is ready, waits for its time or waits for a broker, and why it waits."""
    found = _by_number((yield from execute(SQL.places, **_params(asked, range(len(asked))))))
    places = [_in_places(found.get(n, ())) for n in range(len(asked))]
    unclear = [n for n, one in enumerate(places) if any(each.reason in CAUSES for each in one.waiting)]
    if unclear:
        why = _by_number((yield from execute(SQL.causes, **_params(asked, unclear))))
        for n in unclear:
            waiting = tuple(_with_its_cause(each, why.get(n, ())) for each in places[n].waiting)
            places[n] = replace(places[n], waiting=waiting)
    return places


def _in_places(rows: Sequence[tuple[Any, ...]]) -> Places:
    ready, waiting, unconfirmed = [], [], []
    for place, priority, reason, transport, count, since, next_at, last_at, rounds, error in rows:
        match place:
            case "ready":
                ready.append(Ready(priority, count, since))
            case "waiting":
                waiting.append(Waiting(reason, count, since, next_at, last_at))
            case "unconfirmed":
                unconfirmed.append(Unconfirmed(transport, reason, count, since, rounds, error, next_at))
    return Places(ready=tuple(ready), waiting=tuple(waiting), unconfirmed=tuple(unconfirmed))


def _with_its_cause(waiting: Waiting, rows: Sequence[tuple[Any, ...]]) -> Waiting:
    """Add why the commands wait. Commands that wait for their run_at, or are held, need no cause."""
    own = [row[1:] for row in rows if row[0] == waiting.reason]
    if waiting.reason not in CAUSES or not own:
        return waiting
    since = min((row[0] for row in own if row[0] is not None), default=None)
    if waiting.reason == "RETRY":
        return replace(waiting, since=since, failures=tuple(Failure(*row[3:]) for row in own))
    [(_, names, ordered, *_)] = own
    if waiting.reason == "NO_HANDLER":
        return replace(waiting, since=since, command_types=tuple(names))
    return replace(waiting, since=since, limits=tuple(names), ordered=bool(ordered))


def _surroundings(
    asked: Sequence[Asked], places: Sequence[Places], usual: dict[int, timedelta | None]
) -> Plan[list[Surroundings]]:
    lowest = [min((one.priority for one in each.ready), default=None) for each in places]
    own = [each.facts.batch_id if each.facts.command_id is None else None for each in asked]
    params = _params(asked, range(len(asked)))
    found = []
    rows = yield from execute(
        SQL.surroundings,
        **params,
        priorities=lowest,
        own_batch_ids=own,
        snapshot_after=SNAPSHOT_AFTER,
        dead=MANY_DEAD,
    )
    for number, workers, last_seen, anybody, ordered, since, operator, reason, ahead, highest, *others in rows:
        holder, barrier = others[:4], others[4:]
        pause = Pause(asked[number].facts.domain, since, operator, reason) if since else None
        before = Barrier(*barrier) if barrier[0] is not None else None
        held = Snapshot(*holder) if holder[0] is not None else None
        found.append(
            Surroundings(workers, last_seen, anybody, pause, ahead, highest, usual[number], ordered, before, held)
        )
    return found
