"""What a call writes, and how long it may wait for a lock while it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar
from uuid import UUID

from busload.errors import LockHolder
from busload.postgres.plan import Plan, Row, execute, many
from busload.postgres.statements import statements

T = TypeVar("T")
SQL = statements(__name__)

PATIENCE = 100
"""Milliseconds that a write in a transaction of its own waits for a lock before it lets others use its connection."""


@dataclass(frozen=True, slots=True)
class Write(Generic[T]):
    """Something to be written, with the ids by which the caller can look for it if the outcome is unknown.

    One statement is a transaction by itself; several statements need a transaction around them. A write that may have
    to wait for the transaction of somebody else has `again`, which makes a new plan of the same write. That plan fails
    if a lock takes longer than `PATIENCE`.
    """

    plan: Plan[T]
    batch_id: UUID | None = None
    command_ids: Iterable[UUID] = ()
    """Read once, and only if the outcome is unknown."""
    one_statement: bool = False
    job_id: UUID | None = None
    again: Callable[[], Plan[T]] | None = None
    goes_on: bool = False
    """This call has written before. Its caller reports that, so errors are raised as they are."""


def patient(
    plan: Callable[[], Plan[T]],
    batch_id: UUID | None = None,
    command_ids: Iterable[UUID] = (),
    job_id: UUID | None = None,
) -> Write[T]:
    """Several statements, one of which may have to wait for the transaction of somebody else."""
    return Write(plan(), batch_id, command_ids, job_id=job_id, again=lambda: hurried(plan()))


def then(plan: Plan[Any], result: T) -> Plan[T]:
    """Carry out the plan, and return this instead of its result."""
    yield from plan
    return result


def only(plan: Plan[list[T]]) -> Plan[T]:
    """The one result of a plan that returns a list of one."""
    [result] = yield from plan
    return result


def hurried(plan: Plan[T], patience: int = PATIENCE) -> Plan[T]:
    """Carry out the plan in a transaction that waits for no lock for longer than `patience`, in milliseconds."""
    yield from execute(SQL.limit_lock_waits, patience=patience)
    return (yield from plan)


def lock_holders(waited: timedelta) -> Plan[list[LockHolder]]:
    """Who may hold the lock that was waited for so long: transactions that are as old and have written."""
    return many(LockHolder, SQL.lock_holders, waited=waited)


def joined_database() -> Plan[Row]:
    """The name of the database that a call has joined, and whether its server is a standby."""
    return only(execute(SQL.joined_database))
