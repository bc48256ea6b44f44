"""Concurrency limits: how many calls a receiver takes at a time, from all workers together.

A call needs a permit. A worker asks the database for the permits of many calls at once, and gives each permit back when
its call has ended. What gets no permit waits in the database and holds no slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeAlias
from uuid import UUID

import msgspec

from busload.commands.checks import FLAG, require, shown, whole, wrong_name
from busload.commands.checks import refuse as refuse_invalid
from busload.commands.execution import Lease, Leased
from busload.commands.payload import safe_str
from busload.errors import PermanentCommandError
from busload.limits.rate import KEY_BYTES, is_async, key_text
from busload.postgres.arrays import Bigints, Integers, Texts
from busload.postgres.plan import Plan, execute, many
from busload.postgres.statements import statements
from busload.settings import InputLimits

SQL = statements(__name__)

MOST_CALLS = 1_000_000

MANY = 100
"""Permits that are not given back one by one, if they were granted together."""


@dataclass(frozen=True, slots=True)
class ConcurrencyLimit:
    """At most `calls` at a time, for all workers together.

    Calls with the same `name` share a limit; without a name, a handler has a limit of its own. `by` is called with a
    command, group or chunk, and each value that it returns has a limit of its own. For a handler of single commands it
    may also be the name of a field of their data. A value is text of at most 512 bytes, a number, a UUID or a date. A
    command whose `by` raises, or returns anything else, waits for a person.

    With `ordered`, for handlers of single commands, one call at a time and a `by`: the commands of each value run in
    the order in which they were sent, and a retry runs before its successors.
    """

    calls: int
    by: Callable[[Any], object] | str | None = None
    name: str | None = None
    ordered: bool = False

    def __post_init__(self) -> None:
        require(whole(1, MOST_CALLS), calls=self.calls)
        if self.name is not None:
            refuse_invalid(wrong_name(self.name, "concurrency_limit/name", InputLimits()), writes=False)
        if isinstance(self.by, str):
            if not self.by:
                raise ValueError("by must be a function or the name of a field, found an empty name.")
        elif self.by is not None and (not callable(self.by) or is_async(self.by)):
            raise ValueError(f"by must be a function with def or the name of a field, found {self.by!r:.80}.")
        require(FLAG, ordered=self.ordered)
        if self.ordered and self.calls != 1:
            raise ValueError(f"ordered=True needs one call at a time, found calls={self.calls}. Write calls=1.")
        if self.ordered and self.by is None:
            raise ValueError(
                "ordered=True needs a `by`, which says whose commands run in order, found none. Name a field: "
                'by="customer".'
            )

    def name_for(self, domain: str, command_type: str) -> str:
        return self.name or f"{domain}/{command_type}"

    def subject_of(self, called_with: Any) -> str:
        """Return the value of `by` for a call, as text. `PermanentCommandError` if there is none."""
        if self.by is None:
            return ""
        try:
            found = called_with.data[self.by] if isinstance(self.by, str) else self.by(called_with)
        except BaseException as error:  # a SystemExit ends a call, not the worker
            raise _refused(f"raised {type(error).__name__}: {safe_str(error, 200)}") from error
        if type(found) is int and -(2**63) <= found < 2**63:  # the most frequent one
            return str(found)
        text = key_text(found)
        if text is None:
            raise _refused(f"returned {shown(found)}")
        return text


def _refused(did: str) -> PermanentCommandError:
    return PermanentCommandError(
        f"The `by` of the concurrency limit {did}; wanted text of at most {KEY_BYTES} bytes, a number, a UUID or a "
        "date. Correct the data or the function, and retry the command.",
        code="INVALID_LIMIT_KEY",
    )


@dataclass(frozen=True, slots=True)
class ConcurrencyStatus:
    """How a concurrency limit is used now: what `busload limit concurrency` shows."""

    name: str
    subject: str
    """The value of `by`; empty without a `by`."""
    most: int
    """Calls that may run at a time."""
    running: int
    """Calls that run, or are about to begin."""
    waiting: int
    """Commands that wait for a permit."""
    workers: tuple[str, ...]
    """Who runs the calls, the oldest call first."""
    commands: tuple[UUID | None, ...]
    """The first command of each of these calls; None if it was deleted.

    Of an ordered limit: the command whose turn it is, also while it waits for its retry.
    """
    since: datetime | None
    """When the oldest call got its permit, or since when it is the turn of the command."""


class Request(msgspec.Struct, frozen=True, eq=False, gc=False):  # made in a fifth of a dataclass's time
    """One call asks for a permit, with these commands of these leases. `size` is how many commands a call may take."""

    name: str
    subject: str
    most: int
    commands: list[tuple[Lease, int]]
    size: int = 1


class Granted(msgspec.Struct, eq=False):
    """Permits that were granted together, in columns, because there are many. A permit is known by its position."""

    names: Sequence[str]
    """The limits: one for all, or one for each."""
    packed: Sequence[bytes]
    """The values of `by`, as they are sent."""
    numbers: Sequence[int | None]
    worker: int = 0
    place: tuple[str, str] | None = None
    """Where in the table the first and the last of them are, if they are many and their numbers follow each other."""
    ended: list[int] = []
    """Positions of permits that are free, and wait for others to be given back."""

    def name(self, nth: int) -> str:
        return self.names[nth] if len(self.names) > 1 else self.names[0]

    def alone(self, nth: int) -> Granted:
        """One of them, by itself: wherever its row is now."""
        return Granted([self.name(nth)], [self.packed[nth]], [self.numbers[nth]], self.worker)


Ended: TypeAlias = tuple[Granted, list[int]]
"""Calls that have ended: the positions of their permits among those that were granted together."""


class Singles(msgspec.Struct):
    """As many requests, each for one command: in columns, because there are many."""

    names: list[str] = []
    subjects: list[str] = []
    most: list[int] = []
    leased: list[Leased] = []

    def add(self, name: str, most: int, subjects: Sequence[str], leased: Sequence[Leased]) -> None:
        """Ask for permits of one limit, one for each of these commands."""
        self.names += [name] * len(leased)
        self.most += [most] * len(leased)
        self.subjects += subjects
        self.leased += leased


class Held(msgspec.Struct, frozen=True, gc=False):
    """A permit, under its limit and the value of its `by`."""

    name: str
    subject: str
    permit: int

    def alone(self) -> Granted:
        return Granted([self.name], [Texts.field(self.subject)], [self.permit])


def take(requests: Sequence[Request], *, worker: int) -> Plan[Granted]:
    """Return the permit of each request. 0 means that there is none: what it is for waits and is not ours any more.

    None means that the worker holds none of its commands: it was declared dead, or lost their leases. For a connection
    that commits each statement: the second one waits until the permits are on the disk.
    """
    rows = [(id, nth, lease) for nth, one in enumerate(requests, 1) for lease, id in one.commands]
    commands, nths, leases = zip(*rows, strict=True)
    names, subjects = [one.name for one in requests], Texts.fields([one.subject for one in requests])
    most, sizes = [one.most for one in requests], [one.size for one in requests]
    return (yield from _take(worker, names, subjects, most, sizes, commands, nths, leases))


def take_single(asked: Singles, *, worker: int) -> Plan[Granted]:
    """The same for single commands."""
    commands, leases = [one.id for one in asked.leased], [one.lease for one in asked.leased]
    subjects = Texts.fields(asked.subjects)
    return (yield from _take(worker, asked.names, subjects, asked.most, [1], commands, (), leases))


def _take(
    worker: int,
    names: Sequence[str],
    subjects: Sequence[bytes],
    most: Sequence[int],
    sizes: Sequence[int],
    commands: Sequence[int],
    nths: Sequence[int],
    leases: Sequence[Lease],
) -> Plan[Granted]:
    """Ask in columns, as `busload.take_permits` has them."""
    if _alike(names) and _alike(most) and _alike(sizes):
        names, most, sizes = names[:1], most[:1], sizes[:1]
    elif len(sizes) < len(names):
        sizes = [*sizes] * len(names)
    ordinals = {lease: ordinal for ordinal, lease in enumerate(dict.fromkeys(leases), 1)}
    [(numbers, first, last)] = yield from execute(
        SQL.take,
        worker=worker,
        names=Texts.of_few(names),
        subjects=Texts.of_fields(subjects),
        most=Integers.of(most),
        sizes=Integers.of(sizes),
        leases=[lease.lease_id for lease in ordinals],
        commands=Bigints.of(commands),
        requests=Integers.of(nths),
        lease_ordinals=Integers.of([] if len(ordinals) == 1 else [ordinals[lease] for lease in leases]),
        different=len(set(subjects)) == len(subjects),
    )
    yield from execute(SQL.on_disk)
    if len(numbers) < len(subjects):
        numbers = range(numbers[0], numbers[0] + len(subjects))
    return Granted(names, subjects, numbers, worker, None if first is None else (first, last))


def _alike(values: Sequence[object]) -> bool:
    """Whether all are the same, as they are most often."""
    return values.count(values[0]) == len(values)


def free(ended: Sequence[Ended]) -> Plan[int]:
    """Give permits back; return how many commands may ask again. Safe to repeat.

    Many of them that follow each other are found where they were written; others one by one, by the values of `by`.
    """
    parts: list[tuple[str, str, int | None, int | None]] = []
    others: list[Ended] = []
    together = woken = 0
    for granted, nths in ended:
        first, last = min(nths), max(nths)
        if granted.place is not None and len(nths) >= MANY and last - first < len(nths):
            parts.append((*granted.place, granted.numbers[first], granted.numbers[last]))
            together += len(nths)
        else:
            others.append((granted, nths))
    if parts:
        first_rows, last_rows, first_permits, last_permits = zip(*parts, strict=True)
        [(freed, woken)] = yield from execute(
            SQL.free_rows,
            names=list({name for granted, _ in ended for name in granted.names}),
            first_rows=list(first_rows),
            last_rows=list(last_rows),
            first_permits=Bigints.of(first_permits),
            last_permits=Bigints.of(last_permits),
        )
        if freed < together:  # the table was written anew, or others have freed some
            others = [*ended]
    if others:
        names = [granted.name(nth) for granted, nths in others for nth in nths]
        [(also_woken,)] = yield from execute(
            SQL.free,
            names=Texts.of_few(names[:1] if _alike(names) else names),
            subjects=Texts.of_fields([granted.packed[nth] for granted, nths in others for nth in nths]),
            permits=Bigints.of([granted.numbers[nth] for granted, nths in others for nth in nths]),
        )
        woken += also_woken
    return woken


def sweep() -> Plan[int]:
    """Free the permits of dead workers, and wake what was forgotten; return how many commands may ask again."""
    return (yield from free_of_dead()) + (yield from wake_forgotten())


def free_of_dead() -> Plan[int]:
    """Free the permits of dead workers; return how many commands may ask again."""
    [(woken,)] = yield from execute(SQL.free_of_dead)
    return int(woken)


def wake_forgotten() -> Plan[int]:
    """Wake what waits for a limit though a permit is free; return how many commands may ask again."""
    [(names, subjects, calls)] = yield from execute(SQL.forgotten)
    if not names:
        return 0
    [(woken,)] = yield from execute(SQL.wake, names=names, subjects=subjects, calls=calls)
    return int(woken)


def forget() -> Plan[None]:
    """Remove limits that nobody has used for a day: handlers come and go."""
    yield from execute(SQL.forget)


def permits_of(worker: int, *, settled: timedelta) -> Plan[list[Held]]:
    """The permits of a worker, except for those that it may not know of yet."""
    return many(Held, SQL.permits_of, worker=worker, settled=settled)


def adopt(calls: Sequence[tuple[Granted, int, int]], *, worker: int) -> Plan[None]:
    """Count calls that still run though their worker was declared dead meanwhile.

    Of each, the position of its permit and its first command.
    """
    yield from execute(
        SQL.adopt,
        worker=worker,
        names=Texts.of([granted.name(nth) for granted, nth, _ in calls]),
        subjects=Texts.of_fields([granted.packed[nth] for granted, nth, _ in calls]),
        permits=Bigints.of([granted.numbers[nth] for granted, nth, _ in calls]),
        commands=Bigints.of([command for _, _, command in calls]),
    )


def concurrency(name: str | None, *, limit: int) -> Plan[list[ConcurrencyStatus]]:
    def status(
        name: str,
        subject: str,
        most: int,
        running: int,
        waiting: int,
        workers: list[str],
        commands: list[UUID | None],
        since: datetime | None,
    ) -> ConcurrencyStatus:
        return ConcurrencyStatus(name, subject, most, running, waiting, tuple(workers), tuple(commands), since)

    return many(status, SQL.concurrency, name=name, limit=limit)
