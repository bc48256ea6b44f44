"""Tasks that another queue runs: claimed by name, settled like any command, and named again if nobody claims them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID, uuid4

from busload.commands import rescue, search, send, settle
from busload.commands.check_commands import check_one
from busload.commands.checks import check, encoded, problems_of, refuse, whole, wrong
from busload.commands.command import BatchCommand
from busload.commands.dedup import Dedup
from busload.commands.execution import Execution, ExecutionStatus, Failed, Lease, Leased, Outcome, Succeeded, decide
from busload.commands.load import Load, number_of
from busload.commands.retry import RetryPolicy
from busload.commands.task_keys import duplicate_results
from busload.errors import InvalidCommandError, InvalidOperationError, SupersededError, TransientCommandError
from busload.postgres.plan import Plan, execute, many, one
from busload.postgres.statements import statements
from busload.postgres.write import PATIENCE, Write, patient
from busload.settings import InputLimits, PayloadLimits
from busload.statistics import statistics
from busload.statistics.attempts import counts
from busload.tasks.compare import newest

SQL = statements(__name__)

TRACKED = "TrackedTask"
"""The type of the command behind a task that another queue runs."""

AT_ONCE = RetryPolicy(backoff=(0,))
"""The queue that runs a task decides when it is tried again; its command says how often."""

LOOKS = 10
"""How often a claim looks again because the task moved while it looked."""


def new_execution_id() -> UUID:
    """A random id that can be a lease's: a task's command is the first of its load, so its position there is zero."""
    return UUID(int=uuid4().int & ~0xFFF)


@dataclass(frozen=True, slots=True)
class Claim:
    """What a claim took, if anything. `refused` means that the worker which asked was declared dead.

    `passing` means that a worker which takes everything of its domains holds the task, and is about to give it back.
    """

    execution: Execution | None = None
    refused: bool = False
    passing: bool = False


def new_task(
    limits: InputLimits,
    task_id: str,
    queue: str,
    *,
    metadata: dict[str, Any] | None = None,
    dedup: Dedup | None = None,
    max_attempts: int = 3,
    others: Sequence[str] = (),
    execution_id: UUID | None = None,
) -> Write[Execution | None]:
    """Check a task that is about to be published, and plan to record it.

    With a `dedup`, the same task in one of these `others` is a duplicate too: other names of the same queue. Without an
    `execution_id` its first execution gets a new one.
    """
    check(limits, task_id=task_id, metadata=metadata)
    data = metadata or {}
    execution_id = execution_id or new_execution_id()
    command = BatchCommand(TRACKED, execution_id, data, task_key=task_id, max_attempts=max_attempts)
    checked = check_one(limits, queue, command, dedup=dedup)

    def existing(name: str, command_id: UUID) -> Plan[Execution | None]:
        wanted = dedup is not None and dedup.on_conflict == "return_existing"
        return (yield from current(name, command_id)) if wanted else None

    def plan() -> Plan[Execution | None]:
        if dedup is not None and (held := (yield from _held_elsewhere(task_id, others))):
            [(name, command_id)] = held
            duplicate_results(name, [task_id], {task_id: command_id}, dedup)
            return (yield from existing(name, command_id))
        # No broker of ours announces the task: another queue does.
        sent = yield from send.write(queue, checked, dedup=dedup).plan
        if not sent.created:
            return (yield from existing(queue, sent.command_id))
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
            metadata=data,
            can_retry=max_attempts > 1,
        )

    return patient(plan, None, [execution_id])


def taking(limits: InputLimits, task_id: str, execution_id: UUID | str) -> Callable[[int], Write[Claim]]:
    """Check the two keys of a message; the result makes the claim of a worker, given the worker's number."""
    if isinstance(execution_id, str):
        with suppress(ValueError):
            execution_id = UUID(execution_id)
    check(limits, task_id=task_id, execution_id=execution_id)
    assert isinstance(execution_id, UUID)
    taken, ids = partial(claim, task_id, execution_id), [execution_id]

    def write(worker: int) -> Write[Claim]:
        again = partial(taken, worker=worker, patience=PATIENCE)
        return Write(taken(worker=worker), command_ids=ids, again=again)

    return write


def succeeded(limits: InputLimits, result: Any) -> Succeeded:
    """The outcome of a task that is done, with a result that can be stored."""
    if result is not None:
        encoded(result, "/result", limits.payload)
    return Succeeded(result)


def failed(error: object) -> Failed:
    """The outcome of a task that failed by this error, or for this reason."""
    if isinstance(error, str):
        return Failed(TransientCommandError(error))
    if not isinstance(error, BaseException):
        raise InvalidCommandError([wrong(error, "error", "an exception or a text")])
    return Failed(error)


def ending(limits: InputLimits, execution: object, outcome: Outcome, *, workers: Sequence[int]) -> Write[Execution]:
    """Check an execution that has ended, and plan to record how."""
    if not isinstance(execution, Execution):
        raise InvalidCommandError([wrong(execution, "execution", "the execution that claim returned")])
    if execution.execution_id is None or execution.status is ExecutionStatus.QUEUED:
        raise InvalidOperationError(
            f"This execution of task {execution.task_key!r:.200} is {execution.status}. "
            "Claim the task, and end the execution that claim returns."
        )
    ended = partial(end, execution, outcome, workers=workers, limits=limits.payload)
    return Write(ended(), command_ids=[execution.command_id], again=partial(ended, patience=PATIENCE))


def recover(
    limits: InputLimits, queue: str, *, names: Sequence[str], waiting_for: timedelta, limit: int, dry_run: bool
) -> Write[list[Execution]]:
    """Name tasks that have waited for so long that their message may be lost. They are not named again as soon.

    `names` are those by which tasks of the `queue` may have been enqueued.
    With `dry_run` nothing is written, and tasks that dead workers hold are named as well: nobody has rescued them.
    """
    problems = problems_of(limits, queue=queue, waiting_for=waiting_for)
    refuse(problems + whole(1, 100_000)(limit, "limit"))

    def plan() -> Plan[list[Execution]]:
        rows = yield from execute(SQL.waiting, domains=list(names), waiting_for=waiting_for, limit=limit)
        found = {id: search.as_execution(*columns) for id, *columns in rows}
        if dry_run:
            lost = yield from many(search.as_execution, SQL.lost, domains=list(names), limit=limit)
            return [*lost, *found.values()][:limit]
        if not found:
            return []
        named = yield from execute(SQL.postpone, ids=list(found), waiting_for=waiting_for)
        ours = {id for (id,) in named}
        return [execution for id, execution in found.items() if id in ours]

    return Write(plan())


def claim(task_id: str, execution_id: UUID, *, worker: int, patience: int | None = None) -> Plan[Claim]:
    """Take a task that waits, also from a worker that died; needs a transaction.

    With `patience`, in milliseconds, it fails by `LockNotAvailable` if others hold the task for longer.
    """
    found = yield from execute(SQL.find, task_key=task_id, execution_id=execution_id, patience=patience)
    if not found:
        raise InvalidOperationError(
            f"Execution {execution_id} is none of task {task_id!r:.200}. Claim with the two keys that one enqueue or "
            "retry returned, and publish them only after its transaction has committed. Nothing was written."
        )
    [(command, _)] = found
    for _ in range(LOOKS):
        [row] = yield from execute(SQL.claim, command=command, worker=worker, fresh=new_execution_id())
        refused, waits, lapsed, passing, *columns = row
        if refused or passing:
            return Claim(refused=refused, passing=passing)
        if columns[0] is not None:
            return Claim(search.as_execution(*columns))
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
        transition = decide(held, outcome, AT_ONCE, limits)
        credited = yield from settle.settle([transition], now=0.0, patience=patience)
        if credited:
            counted = counts({transition.outcome: 1}, max(0.0, -held.started))
            yield from statistics.record({held.lease.domain: counted}, ago=0.0)
    ended = yield from one(
        search.as_execution,
        SQL.ended,
        domain=execution.queue,
        command_id=execution.command_id,
        execution_id=execution.execution_id,
    )
    if ended is None:
        raise SupersededError(
            f"Execution {execution.execution_id} of task {execution.task_key!r:.200} does not hold it: its lease was "
            "lost or is another's, and another execution may run the task. Nothing was written; leave the task alone."
        )
    if (ended.status is ExecutionStatus.COMPLETED) is not isinstance(outcome, Succeeded):
        raise SupersededError(
            f"Execution {execution.execution_id} of task {execution.task_key!r:.200} has already ended as "
            f"{ended.status}. Nothing was written."
        )
    return ended


def retry(task_id: str, *, operator: str | None, execution_id: UUID | None = None) -> Plan[Execution]:
    """Take a task out of the dlq. Without an `execution_id` its next execution gets a new one."""
    announced = execution_id or new_execution_id()
    retried = yield from one(
        search.as_execution, SQL.retry, task_key=task_id, execution_id=announced, operator=operator
    )
    if retried is None:
        found = yield from newest([task_id], queues=None)
        state = f"its newest execution is {found[0].status}" if found else "there is no such task"
        raise InvalidOperationError(
            f"Task {task_id!r:.200} has nothing in the dlq to retry: {state}. Nothing was written."
        )
    return retried


def history(task_id: str) -> Plan[list[Execution]]:
    """Every attempt of a task. An attempt that waits has the id by which it can be claimed, if that is not used up."""
    executions = yield from search.trace(task_id, domain=None)
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
    """The newest attempt of a command. If it waits, its id is one by which it can be claimed."""
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
    return search.as_execution(*columns) if attempt is not None else None


def come_back(*, worker: int, dead: Sequence[int], held: Sequence[Execution]) -> Plan[frozenset[UUID]]:
    """Give a tracker that was declared dead the executions that nobody has taken over. No task becomes a suspect.

    `dead` are the numbers that it had. Returns the executions that it holds again. Needs a transaction.
    """
    if not held:
        return frozenset()
    ids = yield from execute(SQL.ids, domains=[one.queue for one in held], command_ids=[one.command_id for one in held])
    leases = [one.execution_id for one in held if one.execution_id is not None]
    loads = {number_of(id) for (id,) in ids}
    return (yield from rescue.resume(worker=worker, dead=dead, leases=leases, whole=leases, loads=loads))


def leave(workers: Sequence[int], *, hand_back: bool) -> Plan[int]:
    """Stop being any of these workers; returns how many executions they still held. Needs a transaction."""
    leases = [lease_id for (lease_id,) in (yield from execute(SQL.leases, workers=list(workers)))]
    if hand_back:
        yield from rescue.release(leases)
    yield from execute(SQL.retire, workers=list(workers))
    return len(leases)


def _held_elsewhere(task_id: str, names: Sequence[str]) -> Plan[list[tuple[str, UUID]]]:
    """The queue and the command that hold a task, if it is one of these queues. Whoever asks the same waits until the
    end of the transaction, so that two names of a queue cannot both be free.
    """
    if not names:
        return []
    yield from execute(SQL.lock_task, task_key=task_id)
    return [(name, id) for name, id in (yield from execute(SQL.holder, task_key=task_id, domains=list(names)))]


def _leased(*row: Any) -> Leased:
    lease_id, lo, hi, *columns = row[:10]
    command_id, command_type, task_key, max_attempts, seconds = row[10:]
    lease = Lease(lease_id, Load(lo, hi), *columns)
    leased = Leased(lease, lease.load.lo, command_id, command_type, None, task_key)
    leased.max_attempts, leased.started = max_attempts, -seconds
    return leased
