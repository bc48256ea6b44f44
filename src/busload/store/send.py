"""How commands get in: alone, some in one statement, many by COPY."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from operator import attrgetter
from struct import Struct
from typing import Any, NoReturn, TypeAlias, TypeVar
from uuid import UUID

import psycopg
from psycopg import errors as pg

from busload.domain.command import NewCommand, SendResult
from busload.domain.dedup import Dedup
from busload.domain.ids import LOAD_SIZE, POSITIONS
from busload.errors import (
    BatchNotFoundError,
    BatchSealedError,
    DuplicateCommandError,
    DuplicateTaskError,
    InvalidOperationError,
    LockHolder,
)
from busload.store.arrays import unless_all_null
from busload.store.plan import Copy, Plan, Row, Savepoint, execute, many
from busload.store.statements import statements

log = logging.getLogger("busload")

T = TypeVar("T")
SQL = statements("send")

SOME, SOME_BYTES = 1000, 4_000_000
"""Up to here one statement with arrays is cheaper than COPY, which needs a transaction and seven round trips: for 100
small commands by half, for 1,000 by a tenth. From 2,000 on COPY wins, by a third at 5,000."""

BLOCK = 65_536
"""Bytes that go out at once: large enough to be cheap, small enough for the server to work while we pack the next."""


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A batch that was checked: what goes into the table."""

    batch_id: UUID
    domain: str
    name: str | None
    custom_data: str | None
    on_complete: str | None
    callback_id: UUID | None = None
    """The id of the callback, if the caller chose it."""
    job_id: UUID | None = None
    stage: str | None = None

    def columns(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _COLUMNS_OF_BATCH}


_COLUMNS_OF_BATCH = "batch_id", "domain", "name", "custom_data", "on_complete", "job_id", "stage"


@dataclass(frozen=True, slots=True)
class Via:
    """Through which broker commands are announced.

    By whoever finds them in the outbox, or by the `relay` that writes them, within the time it holds them for. If that
    is `optimistic`, they are ready at once, and come into the outbox only if the broker refuses their message.
    """

    transport: str | None = None
    relay: UUID | None = None
    optimistic: bool = False

    def columns(self) -> dict[str, Any]:
        return {"transport": self.transport, "relay": self.relay, "hold": HOLD}


Range: TypeAlias = tuple[int, int]
"""The first and the last id of neighbouring commands."""

HOLD = timedelta(seconds=60)
"""How long whoever announces loads holds them; then another may think it dead. Longer than a publish can take."""

NO_BROKER = Via()
"""The row is the message: workers find it in the queue."""


def send(
    domain: str,
    command: NewCommand,
    *,
    id: int | None = None,
    patience: int | None = None,
    notify: bool = True,
    via: Via = NO_BROKER,
) -> Plan[int]:
    """One command without a batch, in one statement; returns its id: the given one, or one that begins a load."""
    options = {"id": id, "patience": patience, "notify": notify, "window": None, "transport": via.transport}
    [[taken, *_]] = yield from _send(domain, command, **options)
    return int(taken)


def send_once(
    domain: str, command: NewCommand, dedup: Dedup, via: Via = NO_BROKER, *, patience: int | None = None
) -> Plan[SendResult]:
    """One command without a batch, unless another one holds its task key; in one statement if none does."""
    assert command.task_key is not None
    options = {"id": None, "patience": patience, "notify": True, "window": dedup.window, "transport": via.transport}
    while True:
        sent = yield from _send(domain, command, **options)
        if sent:
            return SendResult(command.command_id, created=True)
        holders = yield from _holders(domain, [command.task_key])
        if holders:  # else it was pruned since: the key is free
            [result] = _duplicates(domain, [command.task_key], holders, dedup)
            return result


def _send(domain: str, command: NewCommand, **options: Any) -> Plan[list[Row]]:
    ready = command.run_at is options["window"] is options["transport"] is None
    try:
        rows = yield from execute(
            SQL.send_ready if ready else SQL.send,
            domain=domain,
            command_id=command.command_id,
            command_type=command.command_type,
            data=command.data,
            task_key=command.task_key,
            correlation_id=command.correlation_id,
            reply_to=command.reply_to,
            priority=command.priority,
            max_attempts=command.max_attempts,
            run_at=command.run_at,
            **options,
        )
    except pg.UniqueViolation:
        raise DuplicateCommandError(domain, [command.command_id]) from None
    return rows


def send_together(commands: Mapping[str, Sequence[NewCommand]], patience: int, via: Via = NO_BROKER) -> Plan[None]:
    """Commands of several senders, by domain, in one statement."""
    loads = [load for domain, those in commands.items() for load in _loads(domain, those)]
    yield from _send_some(loads, patience=patience, via=via)


def notify(domains: Sequence[str], via: Via = NO_BROKER) -> Plan[None]:
    """Tell the workers of these domains that there is work; with a broker, its relays."""
    yield from execute(SQL.notify, domains=domains, transport=via.transport)


def hurried(plan: Plan[T], patience: int) -> Plan[T]:
    """The same, but no lock is waited for any longer than so many milliseconds; needs a transaction."""
    yield from execute(SQL.hurry, patience=patience)
    return (yield from plan)


def lock_holders(waited: timedelta) -> Plan[list[LockHolder]]:
    """Who may hold what was waited for so long: a transaction that is as old, and has written there."""
    return many(LockHolder, SQL.lock_holders, waited=waited)


def in_one_statement(commands: Sequence[NewCommand]) -> bool:
    """Whether these are written by one statement, which is a transaction by itself."""
    return len(commands) <= SOME and sum(len(command.data) for command in commands) <= SOME_BYTES


def send_many(
    domain: str,
    commands: Sequence[NewCommand],
    batch_id: UUID | None = None,
    via: Via = NO_BROKER,
    *,
    patience: int | None = None,
) -> Plan[list[Range]]:
    """Many commands, all or none; with a batch, its total rises by as many. Returns those that are to be announced."""
    if not commands:
        return []
    loads = list(_loads(domain, commands))
    ranges: list[Range] | None
    try:
        if in_one_statement(commands):
            [[written, _, _, los, his]] = yield Savepoint(_send_some(loads, batch_id, patience, via=via))
            ranges = list(zip(los, his, strict=True)) if written else None
        else:
            ranges = yield Savepoint(_send_by_copy(loads, batch_id, via))
    except pg.UniqueViolation:
        yield from _refuse_existing(domain, commands)
    if ranges is None:
        assert batch_id is not None
        found = yield from execute(SQL.find_batch, domain=domain, batch_id=batch_id)
        raise (BatchSealedError if found else BatchNotFoundError)(domain, batch_id)
    return ranges


def send_many_once(
    domain: str,
    commands: Sequence[NewCommand],
    dedup: Dedup,
    batch_id: UUID | None = None,
    via: Via = NO_BROKER,
) -> Plan[list[SendResult]]:
    """The same without those whose task key another command holds; results come in the order of the input."""
    results = yield from hold(domain, commands, dedup)
    yield from send_many(domain, _created(commands, results), batch_id, via)
    return results


def create_batch_once(batch: NewBatch, commands: Sequence[NewCommand], dedup: Dedup) -> Plan[UUID]:
    """The same without those whose task key another command holds; if none is left, the batch completes at once."""
    kept = yield from hold_and_keep(batch.domain, commands, dedup)
    if kept:
        return (yield from create_batch(batch, kept))
    return (yield from create_empty(batch))


def create_empty(batch: NewBatch) -> Plan[UUID]:
    """A batch without commands, which completes at once."""
    yield from open_batch(batch)
    yield from seal(batch.domain, batch.batch_id)
    return batch.batch_id


def hold_and_keep(domain: str, commands: Sequence[NewCommand], dedup: Dedup) -> Plan[list[NewCommand]]:
    """Those of these commands that may be sent, whose task keys are held for them now."""
    results = yield from hold(domain, commands, dedup)
    return _created(commands, results)


def hold(
    domain: str, commands: Sequence[NewCommand], dedup: Dedup, promised: Mapping[str, UUID] | None = None
) -> Plan[list[SendResult]]:
    """Hold the task keys that are free, for commands which the same transaction sends; says for each whether it may.

    The first of several for the same key is the one. What has no task key may always be sent. `promised` are keys that
    this transaction holds for commands it has not sent yet, which the database cannot know of.
    """
    promised = promised or {}
    first = dict(promised)
    for command in commands:
        if command.task_key is not None:
            first.setdefault(command.task_key, command.command_id)
    wanted = [task_key for task_key in first if task_key not in promised]
    held: set[str] = set()
    if wanted:
        ids = [first[task_key] for task_key in wanted]
        rows = yield from execute(SQL.hold_tasks, domain=domain, window=dedup.window, task_keys=wanted, command_ids=ids)
        held = {task_key for (task_key,) in rows}
    holders = first
    if taken := [task_key for task_key in wanted if task_key not in held]:
        holders = first | (yield from _holders(domain, taken))
    duplicates = {
        command.command_id: command.task_key
        for command in commands
        if command.task_key is not None
        and (command.task_key not in held or first[command.task_key] != command.command_id)
    }
    answers = _duplicates(domain, list(duplicates.values()), holders, dedup)
    told = dict(zip(duplicates, answers, strict=True))
    return [told.get(c.command_id) or SendResult(c.command_id, created=True) for c in commands]


def _created(commands: Sequence[NewCommand], results: Sequence[SendResult]) -> list[NewCommand]:
    return [command for command, result in zip(commands, results, strict=True) if result.created]


def _holders(domain: str, task_keys: Sequence[str]) -> Plan[dict[str, UUID]]:
    return dict((yield from execute(SQL.holders, domain=domain, task_keys=task_keys)))


def _duplicates(domain: str, task_keys: Sequence[str], holders: Mapping[str, UUID], dedup: Dedup) -> list[SendResult]:
    """What the senders of commands for these tasks are told, which others hold."""
    if task_keys and dedup.on_conflict == "raise":
        raise DuplicateTaskError(domain, {task_key: holders[task_key] for task_key in task_keys})
    if task_keys and dedup.on_conflict == "skip":
        first = task_keys[0]
        more = f", and {len(task_keys) - 1} more" if len(task_keys) > 1 else ""
        log.info("Skipped a command in %s: task %r is held by %s%s", domain, first, holders[first], more)
    return [SendResult(holders[task_key], created=False) for task_key in task_keys]


def create_batch(batch: NewBatch, commands: Sequence[NewCommand]) -> Plan[UUID]:
    """Open a batch with all its commands and seal it; PostgreSQL delivers them."""
    yield from create_and_tell(batch, commands, NO_BROKER)
    return batch.batch_id


def create_and_tell(batch: NewBatch, commands: Sequence[NewCommand], via: Via) -> Plan[list[Range]]:
    """The same; returns its loads that are not for later: those a broker is told of."""
    yield from _refuse_callback(batch)
    loads = list(_loads(batch.domain, commands))
    ranges: list[Range]
    try:
        if in_one_statement(commands):
            [[los, his, *_]] = yield Savepoint(_create_some(batch, loads, via))
            ranges = list(zip(los, his, strict=True))
        else:
            ranges = yield Savepoint(_create_by_copy(batch, loads, via))
    except pg.UniqueViolation as violation:
        if violation.diag.table_name == "batch":
            raise already_exists(batch.batch_id) from None
        yield from _refuse_existing(batch.domain, commands)
    return ranges


def open_batch(batch: NewBatch) -> Plan[UUID]:
    yield from _refuse_callback(batch)
    try:
        yield from execute(SQL.open_batch, **batch.columns(), total=0, sealed=False)
    except pg.UniqueViolation:
        raise already_exists(batch.batch_id) from None
    return batch.batch_id


def seal(domain: str, batch_id: UUID) -> Plan[bool]:
    """Take no more commands; sealing a sealed batch changes nothing and returns False."""
    sealed = yield from execute(SQL.seal, domain=domain, batch_id=batch_id)
    if sealed:
        yield from execute(SQL.decide, batch_id=batch_id)
        return True
    found = yield from execute(SQL.find_batch, domain=domain, batch_id=batch_id)
    if not found:
        raise BatchNotFoundError(domain, batch_id)
    return False


def _refuse_callback(batch: NewBatch) -> Plan[None]:
    if batch.callback_id is not None:
        ids = [batch.callback_id]
        if (yield from execute(SQL.existing_commands, domain=batch.domain, command_ids=ids)):
            raise DuplicateCommandError(batch.domain, ids)


def _refuse_existing(domain: str, commands: Sequence[NewCommand]) -> Plan[NoReturn]:
    ids = [command.command_id for command in commands]
    try:
        taken = yield from execute(SQL.existing_commands, domain=domain, command_ids=ids)
    except pg.OperationalError as error:  # must not pass for a write whose end nobody knows
        message = "Some of these commands exist already; the connection broke before we knew which"
        raise psycopg.DatabaseError(f"{message}. Nothing was written.") from error
    raise DuplicateCommandError(domain, [command_id for (command_id,) in taken]) from None


def already_exists(batch_id: UUID) -> InvalidOperationError:
    return InvalidOperationError(
        f"There is already a batch {batch_id}. Nothing was written; "
        "look at it with `busload batch show`, or choose another batch_id."
    )


@dataclass(frozen=True, slots=True)
class _Load:
    """Commands that will be neighbours, and what they share."""

    domain: str
    commands: Sequence[NewCommand]

    @property
    def priority(self) -> int:
        return self.commands[0].priority

    @property
    def run_at(self) -> datetime | None:
        return self.commands[0].run_at

    @property
    def replies(self) -> bool:
        return self.commands[0].reply_to is not None


_kind = attrgetter("priority", "run_at", "reply_to")


def _loads(domain: str, commands: Sequence[NewCommand]) -> Iterator[_Load]:
    """Cut a list into loads; what differs in priority, time or reply cannot travel together, so it is sorted apart."""
    groups: list[Sequence[NewCommand]] = [commands]
    if len(set(map(_kind, commands))) > 1:
        apart: dict[tuple[int, datetime | None, bool], list[NewCommand]] = {}
        for command in commands:
            kind = command.priority, command.run_at, command.reply_to is not None
            apart.setdefault(kind, []).append(command)
        groups = list(apart.values())
    for group in groups:
        for start in range(0, len(group), LOAD_SIZE):
            yield _Load(domain, group[start : start + LOAD_SIZE])


def _create_some(batch: NewBatch, loads: Sequence[_Load], via: Via) -> Plan[list[Row]]:
    return execute(SQL.create_some, **batch.columns(), **_arrays(loads), **via.columns(), optimistic=via.optimistic)


def _send_some(
    loads: Sequence[_Load],
    batch_id: UUID | None = None,
    patience: int | None = None,
    via: Via = NO_BROKER,
) -> Plan[list[Row]]:
    return execute(
        SQL.send_some,
        batch_id=batch_id,
        patience=patience,
        **via.columns(),
        domains=[load.domain for load in loads],
        **_arrays(loads),
    )


def _arrays(loads: Sequence[_Load]) -> dict[str, Any]:
    """Loads and commands as arrays. What no command has is an empty one: `unnest` makes nulls of it for all of them."""
    commands = [command for load in loads for command in load.commands]
    lasts = list(accumulate(len(load.commands) for load in loads))
    return {
        "firsts": [1, *(last + 1 for last in lasts[:-1])],
        "lasts": lasts,
        "priorities": [load.priority for load in loads],
        "replies": [load.replies for load in loads],
        "run_ats": unless_all_null(load.run_at for load in loads),
        "command_ids": [command.command_id for command in commands],
        "command_types": [command.command_type for command in commands],
        "data": [command.data for command in commands],
        "task_keys": unless_all_null(command.task_key for command in commands),
        "correlation_ids": unless_all_null(command.correlation_id for command in commands),
        "reply_tos": unless_all_null(command.reply_to for command in commands),
        "max_attempts": unless_all_null(command.max_attempts for command in commands),
    }


def _send_by_copy(loads: Sequence[_Load], batch_id: UUID | None, via: Via) -> Plan[list[Range] | None]:
    if batch_id is not None:
        count = sum(len(load.commands) for load in loads)
        if not (yield from execute(SQL.raise_total, domain=loads[0].domain, batch_id=batch_id, count=count)):
            return None
    return (yield from _copy(loads, batch_id, via))


def _create_by_copy(batch: NewBatch, loads: Sequence[_Load], via: Via) -> Plan[list[Range]]:
    total = sum(len(load.commands) for load in loads)
    yield from execute(SQL.open_batch, **batch.columns(), total=total, sealed=True)
    return (yield from _copy(loads, batch.batch_id, via))


def _copy(loads: Sequence[_Load], batch_id: UUID | None, via: Via) -> Plan[list[Range]]:
    numbers = yield from execute(SQL.number_loads, loads=len(loads))
    los = [number * POSITIONS for (number,) in numbers]
    yield Copy(SQL.copy_commands, _blocks(loads, los, batch_id))
    placed = yield from execute(
        SQL.place_loads,
        **via.columns(),
        optimistic=via.optimistic,
        domain=loads[0].domain,
        batch_id=batch_id,
        los=los,
        his=[lo + len(load.commands) - 1 for lo, load in zip(los, loads, strict=True)],
        priorities=[load.priority for load in loads],
        replies=[load.replies for load in loads],
        run_ats=unless_all_null(load.run_at for load in loads),
    )
    return [pair for starts, ends, *_ in placed for pair in zip(starts, ends, strict=True)]


def _blocks(loads: Sequence[_Load], los: Sequence[int], batch_id: UUID | None) -> Iterator[bytes]:
    """The rows in the binary format of COPY: half the price of its text, here and in the server."""
    block, size = [b"PGCOPY\n\xff\r\n\0" + bytes(8)], 0
    for lo, load in zip(los, loads, strict=True):
        place = _text(load.domain) + _uuid(batch_id) + _smallint(load.priority) + _time(load.run_at)
        ends: dict[object, bytes] = {}  # neighbours that have the same options end alike
        for id, command in enumerate(load.commands, lo):
            options = _options(command)
            end = ends.get(options)
            if end is None:
                command_type, task_key, correlation_id, reply_to, max_attempts = options
                end = place + _text(command_type) + _text(task_key) + _uuid(correlation_id) + _text(reply_to)
                end = ends[options] = end + _smallint(max_attempts)
            data = command.data.encode()
            row = _row(_COLUMNS, 8, id, 16, command.command_id.int.to_bytes(16), len(data)) + data + end
            block.append(row)
            size += len(row)
            if size > BLOCK:
                yield b"".join(block)
                block, size = [], 0
    block.append(b"\xff\xff")
    yield b"".join(block)


_options = attrgetter("command_type", "task_key", "correlation_id", "reply_to", "max_attempts")
_row = Struct(">hiqi16si").pack  # how many columns; then each after its length: the id, the command_id, the data
_COLUMNS = 12
_NULL = b"\xff\xff\xff\xff"
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)


def _text(value: str | None) -> bytes:
    return _NULL if value is None else _field(value.encode())


def _uuid(value: UUID | None) -> bytes:
    return _NULL if value is None else _field(value.bytes)


def _smallint(value: int | None) -> bytes:
    return _NULL if value is None else _field(value.to_bytes(2, signed=True))


def _time(value: datetime | None) -> bytes:
    if value is None:
        return _NULL
    return _field(((value - _EPOCH) // timedelta(microseconds=1)).to_bytes(8, signed=True))


def _field(value: bytes) -> bytes:
    return len(value).to_bytes(4) + value
