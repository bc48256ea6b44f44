"""Tasks that another queue runs: claimed by name, settled like any command, and named again if nobody claims them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

from psycopg import sql

from busload.domain.command import SendResult
from busload.domain.dedup import TRACKED
from busload.domain.execution import Execution, ExecutionStatus, Lease, Leased, Outcome, Succeeded, decide
from busload.domain.ids import POSITIONS
from busload.domain.payload import PayloadLimits
from busload.domain.retry import RetryPolicy
from busload.errors import InvalidOperationError, Superseded
from busload.store import report, rescue, settle
from busload.store.plan import Plan, execute, many, one
from busload.store.statements import statements

SQL = statements("track")

AT_ONCE = RetryPolicy(backoff=(0,))
"""When a task is tried again is up to the queue that runs it; how often, its command says."""

LOOKS = 10
"""How often a claim looks again because the task moved while it looked."""


def new_execution_id() -> UUID:
    """A random id that can be a lease's: a task's command is the first of its load, so its position there is zero."""
    return UUID(int=uuid4().int & ~0xFFF)


@dataclass(frozen=True, slots=True)
class Claim:
    """What a claim took, if anything. `refused`: the worker that asked was declared dead.

    `passing`: a worker which takes whatever its domains have holds the task, and is about to give it back.
    """

    execution: Execution | None = None
    refused: bool = False
    passing: bool = False


@dataclass(frozen=True, slots=True)
class Newest:
    """How a task stands: its state, and the ids that its newest execution may go by."""

    task_id: str
    status: str
    announced: UUID
    execution_id: UUID | None

    @property
    def ids(self) -> set[str]:
        return {str(id) for id in (self.announced, self.execution_id) if id is not None}

    @property
    def shown_id(self) -> str:
        return str(self.execution_id or self.announced)


@dataclass(frozen=True, slots=True)
class OldTask:
    """The newest row of a task in the table of another tracker."""

    task_id: str
    status: str | None
    execution_id: str | None


def enqueue(
    send: Plan[SendResult], queue: str, task_id: str, metadata: Any, *, existing: bool
) -> Plan[Execution | None]:
    """Send the command of a task; for a duplicate the holder's execution, if `existing` asks for it."""
    sent = yield from send
    if not sent.created:
        return (yield from current(queue, sent.command_id)) if existing else None
    [(enqueued_at,)] = yield from execute(SQL.enqueued_at, domain=queue, command_id=sent.command_id)
    return Execution(
        execution_id=sent.command_id,  # announced now: its first claim takes it
        task_key=task_id,
        command_id=sent.command_id,
        queue=queue,
        attempt=1,
        status=ExecutionStatus.QUEUED,
        worker=None,
        enqueued_at=enqueued_at,
        started_at=None,
        finished_at=None,
        error=None,
        metadata=metadata,
    )


def claim(task_id: str, execution_id: UUID, *, worker: int, patience: int | None = None) -> Plan[Claim]:
    """Take a task that waits, also from a worker that died; needs a transaction.

    With `patience`, in milliseconds, it fails by `LockNotAvailable` if others hold the task for longer.
    """
    found = yield from execute(SQL.find, task_key=task_id, execution_id=execution_id, patience=patience)
    if not found:
        raise _stranger(task_id, execution_id)
    [(command, _)] = found
    for _ in range(LOOKS):
        [row] = yield from execute(SQL.claim, command=command, worker=worker, fresh=new_execution_id())
        refused, waits, lapsed, passing, *columns = row
        if refused or passing:
            return Claim(refused=refused, passing=passing)
        if columns[0] is not None:
            return Claim(report._execution(*columns))
        if lapsed:
            returned = yield from rescue.rescue()
            if not returned.commands:
                break
        elif not waits:
            break
    return Claim()


def end(
    execution: Execution,
    outcome: Outcome,
    *,
    workers: Sequence[int],
    limits: PayloadLimits,
    patience: int | None = None,
) -> Plan[Execution]:
    """Record how an execution ended, while one of these workers holds it; needs a transaction.

    To repeat it is harmless: what is recorded already is returned. With `patience`, in milliseconds, it fails by
    `LockNotAvailable` if others hold the task for longer.
    """
    held = yield from one(
        _leased,
        SQL.held,
        execution_id=execution.execution_id,
        command_id=execution.command_id,
        workers=list(workers),
    )
    if held is not None:
        yield from settle.settle([decide(held, outcome, AT_ONCE, limits)], now=0.0, patience=patience)
    ended = yield from one(
        report._execution,
        SQL.ended,
        domain=execution.queue,
        command_id=execution.command_id,
        execution_id=execution.execution_id,
    )
    if ended is None:
        raise Superseded(
            f"Execution {execution.execution_id} of task {execution.task_key!r:.200} does not hold it: its lease was "
            "lost or is another's, and another execution may run the task. Nothing was written; leave the task alone."
        )
    if (ended.status is ExecutionStatus.COMPLETED) is not isinstance(outcome, Succeeded):
        raise Superseded(
            f"Execution {execution.execution_id} of task {execution.task_key!r:.200} has already ended as "
            f"{ended.status}. Nothing was written."
        )
    return ended


def retry(task_id: str, *, operator: str | None) -> Plan[Execution]:
    """Take a task out of the dlq."""
    retried = yield from one(
        report._execution, SQL.retry, task_key=task_id, execution_id=new_execution_id(), operator=operator
    )
    if retried is None:
        found = yield from newest([task_id], queue=None)
        state = f"its newest execution is {found[0].status}" if found else "there is no such task"
        raise InvalidOperationError(
            f"Task {task_id!r:.200} has nothing in the dlq to retry: {state}. Nothing was written."
        )
    return retried


def history(task_id: str) -> Plan[list[Execution]]:
    """Every attempt of a task; one that waits goes by the id it can be claimed with, if that is not used up."""
    executions = yield from report.trace(task_id, domain=None)
    waiting = [one.command_id for one in executions if one.status is ExecutionStatus.QUEUED]
    if not waiting:
        return executions
    rows = yield from execute(SQL.announced, task_key=task_id, command_ids=waiting)
    announced = {command_id: None if used else id for command_id, id, used in rows}
    return [
        replace(one, execution_id=announced.get(one.command_id)) if one.status is ExecutionStatus.QUEUED else one
        for one in executions
    ]


def current(queue: str, command_id: UUID) -> Plan[Execution | None]:
    """The newest attempt of a command; one that waits goes by an id it can be claimed with."""
    rows = yield from execute(SQL.current, domain=queue, command_id=command_id)
    if not rows:
        return None
    [(command_type, *columns)] = rows
    _, task_key, command_id, domain, attempt, *_ = columns
    if command_type != TRACKED:
        raise InvalidOperationError(
            f"Task {task_key!r:.200} is held by command {command_id} of type {command_type!r} in domain {domain!r}, "
            "which is no tracked task and has no execution to claim. Give one of them another key. Nothing was written."
        )
    return report._execution(*columns) if attempt is not None else None


def recover(queue: str, *, waiting_for: timedelta, limit: int, look_only: bool = False) -> Plan[list[Execution]]:
    """What has waited for so long that its message may be lost; it is not named again as soon.

    With `look_only` nothing is written, and what dead workers hold is named as well: nobody has taken it back.
    """
    rows = yield from execute(SQL.waiting, domain=queue, waiting_for=waiting_for, limit=limit)
    found = {id: report._execution(*columns) for id, *columns in rows}
    if look_only:
        lost = yield from many(report._execution, SQL.lost, domain=queue, limit=limit)
        return [*lost, *found.values()][:limit]
    if not found:
        return []
    named = yield from execute(SQL.postpone, ids=list(found), waiting_for=waiting_for)
    ours = {id for (id,) in named}
    return [execution for id, execution in found.items() if id in ours]


def come_back(*, worker: int, buried: Sequence[int], held: Sequence[Execution]) -> Plan[frozenset[UUID]]:
    """A tracker that was declared dead lives: nobody is blamed, and it goes on with what nobody has taken over.

    `buried` are the numbers that it had. Returns the executions that it holds again; needs a transaction.
    """
    if not held:
        return frozenset()
    ids = yield from execute(SQL.ids, domains=[one.queue for one in held], command_ids=[one.command_id for one in held])
    leases = [one.execution_id for one in held if one.execution_id is not None]
    loads = {id // POSITIONS for (id,) in ids}
    return (yield from rescue.resume(worker=worker, buried=buried, leases=leases, whole=leases, loads=loads))


def leave(workers: Sequence[int], *, hand_back: bool) -> Plan[int]:
    """Stop being any of these workers; returns how many executions they still held. Needs a transaction."""
    leases = [lease_id for (lease_id,) in (yield from execute(SQL.leases, workers=list(workers)))]
    if hand_back:
        yield from rescue.release(leases)
    yield from execute(SQL.retire, workers=list(workers))
    return len(leases)


def task_page(*, after: str, queue: str | None, limit: int) -> Plan[list[str]]:
    rows = yield from execute(SQL.task_page, after=after, domain=queue, limit=limit)
    return [task_id for (task_id,) in rows]


def newest(task_ids: Sequence[str], *, queue: str | None) -> Plan[list[Newest]]:
    return many(Newest, SQL.newest, task_keys=list(task_ids), domain=queue)


class OldTable:
    """The table of another tracker: one row per execution, the newest of each task counts."""

    def __init__(self, table: str, columns: dict[str, str], queues: Sequence[str] | None) -> None:
        name = {key: _identifier(column) for key, column in columns.items()}
        where = sql.SQL("{}::text = ANY (%(queues)s::text[])").format(name["queue"]) if queues else sql.SQL("true")
        self._queues = list(queues or ())
        self._select = sql.SQL(
            "SELECT DISTINCT ON ({task_id}::text) {task_id}::text, {status}::text, {execution_id}::text FROM {table}"
            " WHERE {condition} AND {where} ORDER BY {task_id}::text, {created_at} DESC"
        ).format
        self._names = name | {"table": _identifier(*table.split(".")), "where": where}

    def page(self, *, after: str, limit: int) -> Plan[list[OldTask]]:
        return self._read("{task_id}::text > %(after)s::text", " LIMIT %(limit)s::integer", after=after, limit=limit)

    def of(self, task_ids: Sequence[str]) -> Plan[list[OldTask]]:
        return self._read("{task_id}::text = ANY (%(task_ids)s::text[])", "", task_ids=list(task_ids))

    def _read(self, condition: str, end: str, **params: Any) -> Plan[list[OldTask]]:
        narrowed = sql.SQL(condition).format(**self._names)
        statement = self._select(**self._names, condition=narrowed) + sql.SQL(end)
        return many(OldTask, statement.as_bytes(None), **params, queues=self._queues)


def _identifier(*parts: str) -> sql.Identifier:
    """A name within a statement that has parameters."""
    return sql.Identifier(*(part.replace("%", "%%") for part in parts))


def _leased(*row: Any) -> Leased:
    command_id, command_type, task_key, max_attempts, seconds = row[10:]
    lease = Lease(*row[:10])
    leased = Leased(lease, lease.lo, command_id, command_type, None, task_key)
    leased.max_attempts, leased.started = max_attempts, -seconds
    return leased


def _stranger(task_id: str, execution_id: UUID) -> InvalidOperationError:
    return InvalidOperationError(
        f"Execution {execution_id} is none of task {task_id!r:.200}. Claim with the two keys that one enqueue or retry "
        "returned, and publish them only after its transaction has committed. Nothing was written."
    )
