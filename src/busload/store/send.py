"""How commands get in: alone, in bulk, in a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import Any
from uuid import UUID

from psycopg import errors as pg

from busload.domain.command import NewCommand
from busload.domain.ids import LOAD_SIZE, POSITIONS
from busload.errors import BatchNotFoundError, BatchSealedError, DuplicateCommandError, InvalidOperationError
from busload.store.plan import Copy, Plan, Savepoint, execute
from busload.store.statements import statements

SQL = statements("send")


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A batch that was checked: what goes into the table."""

    batch_id: UUID
    domain: str
    name: str | None
    custom_data: str | None
    on_complete: str | None
    callback_id: UUID | None = None

    def columns(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("batch_id", "domain", "name", "custom_data", "on_complete")}


def send(domain: str, command: NewCommand) -> Plan[None]:
    """One command without a batch, in one statement."""
    try:
        yield from execute(
            SQL.send,
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
        )
    except pg.UniqueViolation:
        raise DuplicateCommandError(domain, [command.command_id]) from None


def send_many(domain: str, commands: Sequence[NewCommand], batch_id: UUID | None = None) -> Plan[None]:
    """Many commands, all or none; with a batch, its total rises by as many."""
    if not commands:
        return
    if batch_id is not None:
        yield from _raise_total(domain, batch_id, len(commands))
    try:
        yield Savepoint(_insert(domain, commands, batch_id))
    except pg.UniqueViolation:
        taken = yield from execute(
            SQL.existing_commands, domain=domain, command_ids=[command.command_id for command in commands]
        )
        raise DuplicateCommandError(domain, [command_id for (command_id,) in taken]) from None


def create_batch(batch: NewBatch, commands: Sequence[NewCommand]) -> Plan[UUID]:
    """Open a batch with all its commands and seal it; the caller's transaction makes it atomic."""
    yield from open_batch(batch)
    yield from send_many(batch.domain, commands, batch.batch_id)
    yield from seal(batch.domain, batch.batch_id)
    return batch.batch_id


def open_batch(batch: NewBatch) -> Plan[UUID]:
    if batch.callback_id is not None:
        ids = [batch.callback_id]
        if (yield from execute(SQL.existing_commands, domain=batch.domain, command_ids=ids)):
            raise DuplicateCommandError(batch.domain, ids)
    try:
        yield from execute(SQL.open_batch, **batch.columns())
    except pg.UniqueViolation:
        raise InvalidOperationError(
            f"There is already a batch {batch.batch_id}. Nothing was written; "
            "look at it with `busload batch show`, or choose another batch_id."
        ) from None
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


def _raise_total(domain: str, batch_id: UUID, count: int) -> Plan[None]:
    raised = yield from execute(SQL.raise_total, domain=domain, batch_id=batch_id, count=count)
    if raised:
        return
    found = yield from execute(SQL.find_batch, domain=domain, batch_id=batch_id)
    raise (BatchSealedError if found else BatchNotFoundError)(domain, batch_id)


@dataclass(frozen=True, slots=True)
class _Load:
    """Commands that will be neighbours, and what they share."""

    commands: Sequence[NewCommand]
    priority: int
    run_at: datetime | None
    replies: bool


def _insert(domain: str, commands: Sequence[NewCommand], batch_id: UUID | None) -> Plan[None]:
    loads = list(_loads(commands))
    numbers = yield from execute(SQL.number_loads, loads=len(loads))
    los = [number * POSITIONS for (number,) in numbers]
    yield Copy(SQL.copy_commands, _rows(domain, batch_id, loads, los))
    yield from execute(
        SQL.place_loads,
        domain=domain,
        batch_id=batch_id,
        los=los,
        his=[lo + len(load.commands) - 1 for lo, load in zip(los, loads, strict=True)],
        priorities=[load.priority for load in loads],
        replies=[load.replies for load in loads],
        run_ats=[load.run_at for load in loads],
    )


def _loads(commands: Sequence[NewCommand]) -> Iterator[_Load]:
    """Cut a list into loads; what differs in priority, time or reply cannot travel together, so it is sorted apart."""

    def shared(command: NewCommand) -> tuple[int, datetime | None, bool]:
        return (command.priority, command.run_at, command.reply_to is not None)

    kinds = {shared(command) for command in commands}
    if len(kinds) > 1:
        order = {kind: place for place, kind in enumerate(dict.fromkeys(shared(command) for command in commands))}
        commands = sorted(commands, key=lambda command: order[shared(command)])
    for (priority, run_at, replies), group in groupby(commands, key=shared):
        neighbours = list(group)
        for start in range(0, len(neighbours), LOAD_SIZE):
            yield _Load(neighbours[start : start + LOAD_SIZE], priority, run_at, replies)


def _rows(domain: str, batch_id: UUID | None, loads: list[_Load], los: list[int]) -> Iterator[tuple[Any, ...]]:
    for lo, load in zip(los, loads, strict=True):
        for id, c in enumerate(load.commands, lo):
            yield (
                id,
                domain,
                c.command_id,
                c.command_type,
                c.data,
                batch_id,
                c.task_key,
                c.correlation_id,
                c.reply_to,
                c.priority,
                c.max_attempts,
                c.run_at,
            )
