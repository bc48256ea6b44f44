"""Loads that wait to be published to a broker, and what became of the messages about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from busload.commands.load import Load
from busload.commands.send import HOLD
from busload.dispatch import creation_state
from busload.postgres.arrays import unless_all_null
from busload.postgres.plan import Plan, execute, many
from busload.postgres.statements import statements

SQL = statements(__name__)

MOST = 100
"""Loads that a relay takes at a time: up to 100,000 commands."""


@dataclass(frozen=True, slots=True)
class Unpublished:
    """A load to be published. `rounds` have failed; if it is published again, so many were made."""

    load: Load
    domain: str
    batch_id: UUID | None
    rounds: int
    error: str | None = None
    """What the broker said in the last round that failed."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What became of the message about a part of a load: confirmed, or to be repeated after `pause` seconds.

    `after` are the seconds that the broker asked for. `published` is what the audit trail tells of a confirmed message:
    JSON with the transport, the rounds it took, and a text by which the same news is known if it comes twice.
    """

    load: Load
    reason: str | None = None
    error: str | None = None
    pause: float = 0.0
    after: float | None = None
    published: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class OutboxEntry:
    """Commands that wait to be published, for the same reason. `reason` is None for those that were not tried yet."""

    transport: str
    domain: str
    reason: str | None
    commands: int
    loads: int
    oldest: datetime
    rounds: int
    error: str | None
    next_try: datetime
    being_published: int


@dataclass(frozen=True, slots=True)
class Lag:
    """What waits for one transport. `oldest` is the age of the oldest command in seconds."""

    transport: str
    commands: int
    failed: int
    oldest: float
    rounds: int


def take(transport: str, relay: UUID, limit: int = MOST, later: Sequence[str] = ()) -> Plan[list[Unpublished]]:
    """Hold loads to publish them. A relay that has not marked them within a minute is thought dead.

    Loads of domains that are to come `later` are left out.
    """
    return many(_unpublished, SQL.take, transport=transport, relay=relay, limit=limit, hold=HOLD, later=list(later))


def next_due(transport: str, later: Sequence[str] = ()) -> Plan[float | None]:
    [[seconds]] = yield from execute(SQL.next_due, transport=transport, later=list(later))
    return None if seconds is None else float(seconds)


def mark(relay: UUID, pieces: Sequence[Piece]) -> Plan[tuple[int, int]]:
    """Say what became of messages; returns how many commands are ready now, and how many wait for another round.

    Whoever calls this closes complete creations afterwards, in a transaction of its own: two relays that mark the last
    loads of a batch at once do not see each other's.
    """
    [[ready, again, failed]] = yield from execute(SQL.mark, relay=relay, **_arrays(pieces))
    if failed:
        yield from creation_state.failed_round(failed)
    return ready, again


def take_back(transport: str, pieces: Sequence[Piece]) -> Plan[int]:
    """Move commands whose message was refused from the queue back into the outbox, unless they were claimed."""
    [[again, failed]] = yield from execute(SQL.take_back, transport=transport, **_arrays(pieces))
    if failed:
        yield from creation_state.failed_round(failed)
    return int(again)


def note_published(pieces: Sequence[Piece]) -> Plan[None]:
    """Record that the broker has confirmed messages about loads that were ready before."""
    yield from execute(SQL.note_published, **_arrays([piece for piece in pieces if piece.reason is None]))


def hurry(transport: str) -> Plan[None]:
    yield from execute(SQL.hurry, transport=transport)


def unclaimed(transport: str, bound: timedelta, limit: int = MOST) -> Plan[list[Unpublished]]:
    """Loads that were published that long ago and never claimed. They count as published now."""
    return many(_unpublished, SQL.unclaimed, transport=transport, bound=bound, limit=limit)


def identity() -> Plan[str]:
    """Eight hex digits that tell this database from others."""
    [[identity]] = yield from execute(SQL.identity)
    return str(identity)


def sizes(loads: Sequence[Load]) -> Plan[list[tuple[int, int]]]:
    """The ids of commands that exist, with the bytes of their payloads."""
    rows = yield from execute(SQL.sizes, **_ends(loads))
    return [(id, size) for id, size in rows]


def commands(loads: Sequence[Load]) -> Plan[list[tuple[Any, ...]]]:
    return execute(SQL.commands, **_ends(loads))


def reroute(
    *,
    domain: str | None,
    batch_id: UUID | None = None,
    failed: bool,
    stuck_for: timedelta | None = None,
    operator: str | None = None,
    limit: int = 10_000,
) -> Plan[int]:
    """Let PostgreSQL deliver these commands, `limit` loads at most; returns how many commands that were.

    With `failed`, only those whose message was refused or, with `stuck_for`, that nobody has published for so long.
    Whoever calls this calls `creation_state.close` afterwards, in a transaction of its own, as after a mark.
    """
    which = {"domain": domain, "batch_id": batch_id, "failed": failed, "stuck_for": stuck_for}
    [[moved, _]] = yield from execute(SQL.reroute, **which, operator=operator, limit=limit)
    return int(moved)


def retry(*, domain: str | None, batch_id: UUID | None, operator: str | None = None) -> Plan[int]:
    [[commands, _]] = yield from execute(SQL.retry, domain=domain, batch_id=batch_id, operator=operator)
    return int(commands)


def note_repair(domain: str | None, *, operator: str) -> Plan[None]:
    yield from execute(SQL.note_repair, domain=domain, operator=operator)


def retryable(*, domain: str | None, batch_id: UUID | None) -> Plan[int]:
    """How many commands `retry` would take: not those that a relay holds, since it tries them already."""
    [[commands]] = yield from execute(SQL.retryable, domain=domain, batch_id=batch_id)
    return int(commands)


def waiting(*, domain: str | None, batch_id: UUID | None) -> Plan[list[OutboxEntry]]:
    return many(OutboxEntry, SQL.waiting, domain=domain, batch_id=batch_id)


def published(transport: str, domain: str, *, older_than: timedelta, limit: int) -> Plan[list[Load]]:
    return many(Load, SQL.published, transport=transport, domain=domain, older_than=older_than, limit=limit)


@dataclass(frozen=True, slots=True)
class Seen:
    """What the database knows of a load that a message is about."""

    exists: bool
    waits: bool


def look_up(loads: Sequence[int]) -> Plan[list[Seen]]:
    """In the order of the input."""
    return many(Seen, SQL.look_up, loads=list(loads))


def publish_again(transport: str, ends: Sequence[Load]) -> Plan[list[Unpublished]]:
    """Of these ends of loads, those that are still ready. They count as published now."""
    loads = yield from many(_unpublished, SQL.publish_again, transport=transport, his=[end.hi for end in ends])
    first = {end.hi: end.lo for end in ends}
    return [replace(one, load=Load(max(one.load.lo, first[one.load.hi]), one.load.hi)) for one in loads]


def lag() -> Plan[list[Lag]]:
    return many(Lag, SQL.lag)


def _unpublished(lo: int, hi: int, domain: str, batch_id: UUID | None, rounds: int, error: str | None) -> Unpublished:
    return Unpublished(Load(lo, hi), domain, batch_id, rounds, error)


def _ends(loads: Sequence[Load]) -> dict[str, list[int]]:
    return {"los": [load.lo for load in loads], "his": [load.hi for load in loads]}


def _arrays(pieces: Sequence[Piece]) -> dict[str, list[Any]]:
    return {
        **_ends([piece.load for piece in pieces]),
        "reasons": unless_all_null(piece.reason for piece in pieces),
        "errors": unless_all_null(piece.error for piece in pieces),
        "pauses": [piece.pause for piece in pieces],
        "published": unless_all_null(piece.published for piece in pieces),
    }
