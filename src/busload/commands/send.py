"""How commands get in: alone, some in one statement, many by COPY."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn
from uuid import UUID

import psycopg
from psycopg import errors as pg

from busload.commands.command import NewCommand, SendResult, by_domain
from busload.commands.dedup import Dedup
from busload.commands.expire import expiring, note_expiry
from busload.commands.ids import JobId
from busload.commands.load import Load, LoadToPublish, NewLoad, arrays, blocks, cut, cut_together
from busload.commands.task_keys import duplicate_results, find_duplicates, hold_task_keys, holders_of
from busload.errors import BatchNotFoundError, BatchSealedError, DuplicateCommandError, InvalidOperationError
from busload.postgres.arrays import unless_all_null
from busload.postgres.plan import Copy, Plan, Row, Savepoint, Statement, execute
from busload.postgres.statements import statements
from busload.postgres.write import PATIENCE, Write, patient, then

SQL = statements(__name__)

SOME, SOME_BYTES = 1000, 4_000_000
"""Up to here one statement with arrays is cheaper than COPY, which needs a transaction and seven round trips: for 100
small commands by half, for 1,000 by a tenth. From 2,000 on COPY wins, by a third at 5,000."""


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
    job_id: JobId | None = None
    stage: str | int | None = None
    guards: Mapping[str, Any] | None = None
    """Its canary and its failure budget, as columns, if it has any."""
    way: str = "create_batch"
    """The call that creates it, for those who count: also `open_batch`, or `job`."""
    fair_by: str | None = None
    expires_in: timedelta | None = None
    """What has not started so long after the creation is canceled."""
    priority: int = 0
    """The priority of commands that have none of their own."""
    headers: str | None = None
    """What all its commands have among their headers, as JSON text."""
    operator: str | None = None
    """Who creates it, if that is an operator."""

    @property
    def one_row(self) -> bool:
        """Whether nothing but its row is written of it: then one statement writes it with its commands."""
        return self.guards is None and self.operator is None

    def columns(self) -> dict[str, Any]:
        columns = {name: getattr(self, name) for name in self.__slots__}
        if self.job_id is not None:
            columns["job_id"] = str(self.job_id)
        if self.stage is not None:
            columns["stage"] = json.dumps(self.stage)
        return columns


@dataclass(frozen=True, slots=True)
class Via:
    """The broker through which commands are published, if there is one.

    Any relay publishes what it finds in the outbox. If `relay` is given, the writer itself publishes its commands, and
    holds them for as long as that may take. If it is `optimistic`, the commands are ready at once, and come into the
    outbox only if the broker refuses their message.
    """

    transport: str | None = None
    relay: UUID | None = None
    optimistic: bool = False

    def columns(self) -> dict[str, Any]:
        return {"transport": self.transport, "relay": self.relay, "hold": HOLD, "optimistic": self.optimistic}


HOLD = timedelta(seconds=60)
"""How long a publisher holds its loads: longer than a publish can take. Then others may take it for dead."""

NO_BROKER = Via()
"""The row is the message: workers find it in the queue."""


def send(
    domain: str,
    command: NewCommand,
    *,
    id: int | None = None,
    patience: int | None = None,
    notify: bool = True,
    window: timedelta | None = None,
    via: Via = NO_BROKER,
) -> Plan[int | None]:
    """Send one command without a batch, in one statement. Returns its id: the given one, or one that begins a load.

    In a domain whose commands run in order, the given one is used only if nobody has drawn a number since.

    With a `window`, the command is sent only if its task key is free, and holds it for so long. If it is not, the
    result is None.
    """
    values = {
        "id": id,
        "patience": patience,
        "notify": notify,
        "domain": domain,
        "command_id": command.command_id,
        "command_type": command.command_type,
        "data": command.data,
        "task_key": command.task_key,
        "correlation_id": command.correlation_id,
        "reply_to": command.reply_to,
        "priority": command.priority,
        "max_attempts": command.max_attempts,
        "fair_by": command.fair_by,
        "headers": command.headers,
    }
    try:
        rows: list[Row]
        if command.run_at is None and window is None and via.transport is None:
            rows = yield Statement(SQL.send_ready, values)
        else:
            later = {"window": window, "run_at": command.run_at, "batch_id": None}
            rows = yield from execute(SQL.send, **values, **later, **via.columns())
    except pg.UniqueViolation:
        raise DuplicateCommandError(domain, [command.command_id]) from None
    return rows[0][0] if rows else None


def send_once(
    domain: str, command: NewCommand, dedup: Dedup, via: Via = NO_BROKER, *, patience: int | None = None
) -> Plan[SendResult]:
    """Send one command without a batch, unless another one holds its task key. One statement, if the key is free."""
    assert command.task_key is not None
    while True:
        id = yield from send(domain, command, patience=patience, window=dedup.window, via=via)
        if id is not None:
            return SendResult(command.command_id, created=True)
        holders = yield from holders_of(domain, [command.task_key])
        if holders:  # otherwise the holder was pruned meanwhile, and the key is free
            [result] = duplicate_results(domain, [command.task_key], holders, dedup)
            return result


def write(
    domain: str, command: NewCommand, dedup: Dedup | None = None, via: Via = NO_BROKER, *, chosen: bool = True
) -> Write[SendResult]:
    """Send one command. `chosen` says that the caller chose its command_id, so that another command may have it."""

    def plan(patience: int | None = None) -> Plan[SendResult]:
        if dedup is not None:
            return send_once(domain, command, dedup, via, patience=patience)
        result = SendResult(command.command_id, created=True)
        return then(send(domain, command, patience=patience, via=via), result)

    again = partial(plan, PATIENCE) if chosen or dedup is not None else None
    return Write(plan(), command_ids=[command.command_id], one_statement=True, again=again)


def write_many(
    domain: str,
    commands: Sequence[NewCommand],
    *,
    batch_id: UUID | None = None,
    dedup: Dedup | None = None,
    via: Via = NO_BROKER,
    chosen: bool = True,
    fair_by: str | None = None,
) -> Write[list[SendResult]]:
    """Send many commands, all or none; `chosen` is as in `write`."""
    ids = [command.command_id for command in commands]
    if dedup is not None:
        return patient(lambda: send_many_once(domain, commands, dedup, batch_id, via, fair_by), batch_id, ids)
    results = [SendResult(command_id, created=True) for command_id in ids]

    def plan(patience: int | None = None) -> Plan[list[SendResult]]:
        return then(send_many(domain, commands, batch_id, via, patience=patience, fair_by=fair_by), results)

    waits = chosen or batch_id is not None  # a new command without a batch waits for nobody
    if in_one_statement(commands) and not expiring(commands):
        return Write(plan(), batch_id, ids, one_statement=True, again=partial(plan, PATIENCE) if waits else None)
    return patient(plan, batch_id, ids) if waits else Write(plan(), batch_id, ids)


def write_batch(batch: NewBatch, commands: Sequence[NewCommand], dedup: Dedup | None = None) -> Write[Any]:
    """Create a batch with all its commands, which PostgreSQL delivers."""
    ids = (command.command_id for command in commands)
    if dedup is not None:
        return patient(lambda: create_batch_once(batch, commands, dedup), batch.batch_id, ids)
    one_statement = batch.one_row and in_one_statement(commands) and not expiring(commands)
    return Write(create_batch(batch, commands), batch.batch_id, ids, one_statement=one_statement)


def send_together(commands: Mapping[str, Sequence[NewCommand]], patience: int, via: Via = NO_BROKER) -> Plan[None]:
    """Send the commands of several senders, by domain, in one statement."""
    loads = [load for domain, those in commands.items() for load in cut_together(domain, those)]
    yield from _send_some(loads, patience=patience, via=via)


def notify(domains: Sequence[str], via: Via = NO_BROKER) -> Plan[None]:
    """Tell the workers of these domains that commands are ready or, with a broker, tell its relays."""
    yield from execute(SQL.notify, domains=domains, transport=via.transport)


def in_one_statement(commands: Sequence[NewCommand]) -> bool:
    """Whether these commands are written by one statement, which is a transaction by itself."""
    return len(commands) <= SOME and sum(len(command.data) for command in commands) <= SOME_BYTES


def send_many(
    domain: str,
    commands: Sequence[NewCommand],
    batch_id: UUID | None = None,
    via: Via = NO_BROKER,
    *,
    patience: int | None = None,
    fair_by: str | None = None,
) -> Plan[list[LoadToPublish]]:
    """Send many commands, all or none; the total of their batch rises by as many. Returns the loads that are due."""
    if not commands:
        return []
    loads = yield from cut(domain, commands, fair_by)
    placed: list[LoadToPublish] | None
    try:
        if in_one_statement(commands):
            [[written, *due]] = yield Savepoint(_send_some(loads, domain, batch_id, patience, via=via))
            placed = _due(*due) if written else None
        else:
            placed = yield Savepoint(_send_by_copy(loads, domain, batch_id, via))
    except pg.UniqueViolation:
        yield from refuse_existing(domain, commands)
    if placed is None:
        assert batch_id is not None
        found = yield from execute(SQL.find_batch, domain=domain, batch_id=batch_id)
        raise BatchSealedError(domain, batch_id, of_jobs=found[0][0]) if found else BatchNotFoundError(domain, batch_id)
    yield from note_expiry(loads)
    return placed


def send_many_once(
    domain: str,
    commands: Sequence[NewCommand],
    dedup: Dedup,
    batch_id: UUID | None = None,
    via: Via = NO_BROKER,
    fair_by: str | None = None,
) -> Plan[list[SendResult]]:
    """Send the commands whose task key is free. The results come in the order of the input."""
    results = yield from hold_task_keys(domain, commands, dedup)
    yield from send_many(domain, _created(commands, results), batch_id, via, fair_by=fair_by)
    return results


def _created(commands: Sequence[NewCommand], results: Sequence[SendResult]) -> list[NewCommand]:
    return [command for command, result in zip(commands, results, strict=True) if result.created]


def create_batch(batch: NewBatch, commands: Sequence[NewCommand], via: Via = NO_BROKER) -> Plan[list[LoadToPublish]]:
    """Open a batch with all its commands and seal it. Returns the loads that are due now: a broker is told of them."""
    yield from _refuse_taken_callback(batch)
    loads = yield from cut(batch.domain, commands)
    placed: list[LoadToPublish]
    try:
        if in_one_statement(commands):
            create = execute(SQL.create_some, **batch.columns(), **arrays(loads), **via.columns())
            [due] = yield Savepoint(create)
            placed = _due(*due)
        else:
            placed = yield Savepoint(_create_by_copy(batch, loads, via))
    except pg.UniqueViolation as violation:
        if violation.diag.table_name == "batch":
            raise already_exists(batch.batch_id) from None
        yield from refuse_existing(batch.domain, commands)
    yield from note_expiry(loads)
    yield from _guard(batch, via)
    return placed


def create_batch_once(
    batch: NewBatch,
    commands: Sequence[NewCommand],
    dedup: Dedup,
    create: Callable[[NewBatch, Sequence[NewCommand]], Plan[Any]] = create_batch,
) -> Plan[int]:
    """Create a batch of the commands whose task key is free, and return how many that are.

    If none is left, the batch completes at once.
    """
    duplicates = yield from find_duplicates(batch.domain, commands, dedup)
    kept = commands
    if duplicates:
        kept = [one for one in commands if (one.domain or batch.domain, one.command_id) not in duplicates]
    if kept:
        yield from create(batch, kept)
    else:
        yield from open_batch(batch)
        yield from seal(batch.domain, batch.batch_id)
    return len(kept)


def open_batch(batch: NewBatch) -> Plan[None]:
    yield from _refuse_taken_callback(batch)
    try:
        yield from execute(SQL.open_batch, **batch.columns(), total=0, sealed=False)
    except pg.UniqueViolation:
        raise already_exists(batch.batch_id) from None
    yield from _guard(batch, NO_BROKER)


def _guard(batch: NewBatch, via: Via) -> Plan[None]:
    """Give a new batch its canary and its budget, and note its operator: statements for batches which have one."""
    if batch.operator is not None:
        yield from execute(SQL.note_operator, batch_id=batch.batch_id, operator=batch.operator)
    if batch.guards is None:
        return
    about = {"batch_id": batch.batch_id, **batch.guards}
    if about["share"] is not None:
        yield from execute(SQL.give_budget, **about)
    if about["canary"] is not None:
        yield from execute(SQL.begin_canary, transport=via.transport, **about)


def seal(domain: str, batch_id: UUID) -> Plan[bool]:
    """Take no more commands; sealing a sealed batch changes nothing and returns False."""
    sealed = yield from execute(SQL.seal, domain=domain, batch_id=batch_id)
    if sealed:
        yield from complete_if_ended(batch_id)
        return True
    if not (yield from batch_exists(domain, batch_id)):
        raise BatchNotFoundError(domain, batch_id)
    return False


def _refuse_taken_callback(batch: NewBatch) -> Plan[None]:
    if batch.callback_id is not None and (yield from taken_ids(batch.domain, [batch.callback_id])):
        raise DuplicateCommandError(batch.domain, [batch.callback_id])


def taken_ids(domain: str, command_ids: Sequence[UUID]) -> Plan[list[UUID]]:
    """Which of these ids commands have already."""
    rows = yield from execute(SQL.existing_commands, domain=domain, command_ids=list(command_ids))
    return [command_id for (command_id,) in rows]


def batch_exists(domain: str, batch_id: UUID) -> Plan[bool]:
    return bool((yield from execute(SQL.find_batch, domain=domain, batch_id=batch_id)))


def complete_if_ended(batch_id: UUID) -> Plan[None]:
    """Complete a sealed batch if all its commands have ended."""
    yield from execute(SQL.decide, batch_id=batch_id)


def refuse_existing(domain: str, commands: Sequence[NewCommand]) -> Plan[NoReturn]:
    """Say which of these commands exist already."""
    taken: list[UUID] = []
    try:
        for own, those in by_domain(domain, commands).items():
            domain = own
            taken = yield from taken_ids(own, [command.command_id for command in those])
            if taken:
                break
    except pg.OperationalError as error:  # must not pass for a write whose end nobody knows
        message = "Some of these commands exist already; the connection broke before we knew which"
        raise psycopg.DatabaseError(f"{message}. Nothing was written.") from error
    raise DuplicateCommandError(domain, taken) from None


def already_exists(batch_id: UUID) -> InvalidOperationError:
    return InvalidOperationError(
        f"There is already a batch {batch_id}. Nothing was written; "
        "look at it with `busload batch show`, or choose another batch_id."
    )


def _send_some(
    loads: Sequence[NewLoad],
    domain: str | None = None,
    batch_id: UUID | None = None,
    patience: int | None = None,
    via: Via = NO_BROKER,
) -> Plan[list[Row]]:
    about = {"domain": domain, "batch_id": batch_id, "patience": patience}
    return execute(SQL.send_some, **about, **via.columns(), **arrays(loads))


def _due(los: Sequence[int], his: Sequence[int], domains: Sequence[str], *_: object) -> list[LoadToPublish]:
    return list(map(LoadToPublish, map(Load, los, his), domains))


def _send_by_copy(
    loads: Sequence[NewLoad], domain: str, batch_id: UUID | None, via: Via
) -> Plan[list[LoadToPublish] | None]:
    if batch_id is not None:
        count = sum(len(load.commands) for load in loads)
        if not (yield from execute(SQL.raise_total, domain=domain, batch_id=batch_id, count=count)):
            return None
    return (yield from _copy(loads, batch_id, via))


def _create_by_copy(batch: NewBatch, loads: Sequence[NewLoad], via: Via) -> Plan[list[LoadToPublish]]:
    total = sum(len(load.commands) for load in loads)
    yield from execute(SQL.open_batch, **batch.columns(), total=total, sealed=True)
    return (yield from _copy(loads, batch.batch_id, via))


def _copy(loads: Sequence[NewLoad], batch_id: UUID | None, via: Via) -> Plan[list[LoadToPublish]]:
    numbers = yield from execute(SQL.number_loads, loads=len(loads))
    places = [Load.of(number, len(load.commands)) for (number,), load in zip(numbers, loads, strict=True)]
    yield Copy(SQL.copy_commands, blocks(loads, places, batch_id))
    placed = yield from execute(
        SQL.place_loads,
        **via.columns(),
        batch_id=batch_id,
        domains=[load.domain for load in loads],
        fair_bys=unless_all_null(load.fair_by for load in loads),
        los=[place.lo for place in places],
        his=[place.hi for place in places],
        priorities=[load.priority for load in loads],
        replies=[load.replies for load in loads],
        run_ats=unless_all_null(load.run_at for load in loads),
    )
    return [load for due in placed for load in _due(*due)]
