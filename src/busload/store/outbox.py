"""Loads that wait to be announced to a broker, and what became of their messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from uuid import UUID

from busload.domain.dispatch import OutboxEntry
from busload.store import dispatch
from busload.store.arrays import unless_all_null
from busload.store.plan import Plan, execute, many
from busload.store.send import HOLD
from busload.store.statements import statements

SQL = statements("outbox")

MOST = 100
"""Loads that a relay takes at a time: up to 100,000 commands."""


@dataclass(frozen=True, slots=True)
class Unannounced:
    """A load to be announced; `rounds` have failed, or for one that is rung for again, were made."""

    lo: int
    hi: int
    domain: str
    batch_id: UUID | None
    rounds: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What became of the message about neighbouring commands: confirmed, or to be repeated after `pause` seconds.

    `after` are those that the broker asked for.
    """

    lo: int
    hi: int
    reason: str | None = None
    error: str | None = None
    pause: float = 0.0
    after: float | None = None


@dataclass(frozen=True, slots=True)
class Lag:
    """What waits for one transport: commands, those after a failed round, and the age of the oldest in seconds."""

    transport: str
    commands: int
    failed: int
    oldest: float
    rounds: int


def take(transport: str, relay: UUID, limit: int = MOST, later: Sequence[str] = ()) -> Plan[list[Unannounced]]:
    """Hold loads to announce them; who does not say how it went within a minute is thought dead.

    Not those of domains that are to come `later`.
    """
    return many(Unannounced, SQL.take, transport=transport, relay=relay, limit=limit, hold=HOLD, later=list(later))


def next_due(transport: str, later: Sequence[str] = ()) -> Plan[float | None]:
    [[seconds]] = yield from execute(SQL.next_due, transport=transport, later=list(later))
    return None if seconds is None else float(seconds)


def mark(relay: UUID, pieces: Sequence[Piece]) -> Plan[tuple[int, int]]:
    """Say what became of messages; returns how many commands are ready by it, and how many wait for another round.

    Creations that are complete by it are closed in a transaction of their own, after this one: two that mark the last
    loads of a batch at once do not see each other's.
    """
    [[ready, again, failed]] = yield from execute(SQL.mark, relay=relay, **_arrays(pieces))
    if failed:
        yield from dispatch.failed_round(failed)
    return ready, again


def take_back(transport: str, pieces: Sequence[Piece]) -> Plan[int]:
    """Commands that were ready before their message was refused, and that nobody has claimed, wait in the outbox."""
    [[again, failed]] = yield from execute(SQL.take_back, transport=transport, **_arrays(pieces))
    if failed:
        yield from dispatch.failed_round(failed)
    return int(again)


def hurry(transport: str) -> Plan[None]:
    yield from execute(SQL.hurry, transport=transport)


def silent(transport: str, bound: timedelta, limit: int = MOST) -> Plan[list[Unannounced]]:
    """Loads that were announced that long ago and never claimed; they count as announced now."""
    return many(Unannounced, SQL.silent, transport=transport, bound=bound, limit=limit)


def identity() -> Plan[str]:
    """Eight hex digits that tell this database from others."""
    [[identity]] = yield from execute(SQL.identity)
    return str(identity)


def sizes(ranges: Sequence[tuple[int, int]]) -> Plan[list[tuple[int, int]]]:
    """Ids of the commands that exist, and the bytes of their payloads."""
    rows = yield from execute(SQL.sizes, los=[lo for lo, _ in ranges], his=[hi for _, hi in ranges])
    return [(id, size) for id, size in rows]


def commands(ranges: Sequence[tuple[int, int]]) -> Plan[list[tuple[Any, ...]]]:
    return execute(SQL.commands, los=[lo for lo, _ in ranges], his=[hi for _, hi in ranges])


def reroute(
    *, domain: str | None, batch_id: UUID | None, failed: bool, operator: str | None, limit: int = 10_000
) -> Plan[int]:
    """Let PostgreSQL deliver these; returns how many commands that were. At most `limit` loads at a time.

    To be followed by `dispatch.close` in a transaction of its own, like a mark.
    """
    [[moved, _]] = yield from execute(
        SQL.reroute, domain=domain, batch_id=batch_id, failed=failed, operator=operator, limit=limit
    )
    return int(moved)


def retry(*, domain: str | None, batch_id: UUID | None) -> Plan[int]:
    [[commands, _]] = yield from execute(SQL.retry, domain=domain, batch_id=batch_id)
    return int(commands)


def retryable(*, domain: str | None, batch_id: UUID | None) -> Plan[int]:
    """How many commands `retry` would take: what a relay has in hand is tried already."""
    [[commands]] = yield from execute(SQL.retryable, domain=domain, batch_id=batch_id)
    return int(commands)


def waiting(*, domain: str | None, batch_id: UUID | None) -> Plan[list[OutboxEntry]]:
    return many(OutboxEntry, SQL.waiting, domain=domain, batch_id=batch_id)


def announced(transport: str, domain: str, *, older_than: timedelta, limit: int) -> Plan[list[tuple[int, int]]]:
    rows = yield from execute(SQL.announced, transport=transport, domain=domain, older_than=older_than, limit=limit)
    return [(lo, hi) for lo, hi in rows]


@dataclass(frozen=True, slots=True)
class Seen:
    """What is behind the number of a load in a message: whether a command exists, and whether one waits or runs."""

    exists: bool
    waits: bool


def look_up(loads: Sequence[int]) -> Plan[list[Seen]]:
    """In the order of the input."""
    return many(Seen, SQL.look_up, loads=list(loads))


def ring(transport: str, ranges: Sequence[tuple[int, int]]) -> Plan[list[Unannounced]]:
    """Those of these ends of loads that are still ready; the loads count as announced now."""
    loads = yield from many(Unannounced, SQL.ring, transport=transport, his=[hi for _, hi in ranges])
    first = {hi: lo for lo, hi in ranges}
    return [replace(load, lo=max(load.lo, first[load.hi])) for load in loads]


def lag() -> Plan[list[Lag]]:
    return many(Lag, SQL.lag)


def _arrays(pieces: Sequence[Piece]) -> dict[str, list[Any]]:
    return {
        "los": [piece.lo for piece in pieces],
        "his": [piece.hi for piece in pieces],
        "reasons": unless_all_null(piece.reason for piece in pieces),
        "errors": unless_all_null(piece.error for piece in pieces),
        "pauses": [piece.pause for piece in pieces],
    }
