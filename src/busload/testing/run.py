"""Run what was sent: until nothing is ready or due, or one handler alone."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from typing import Any, TypedDict, Unpack, cast, overload
from uuid import UUID

import busload.worker  # noqa: F401 before those of busload.sync: the contexts of both need each other

# isort: split

from busload.bus import CommandBus
from busload.commands import claim, rescue, send, settle
from busload.commands.check_commands import check_one
from busload.commands.checks import require, whole
from busload.commands.command import CommandOptions, NewCommand, new_command
from busload.commands.execution import Leased, Transition, complete, decide, failure
from busload.commands.ids import new_id
from busload.commands.send import NO_BROKER
from busload.commands.wording import counted
from busload.errors import InvalidOperationError
from busload.handlers.middleware import within_middleware
from busload.handlers.registry import Handler
from busload.postgres.callers_connection import AnyConnection
from busload.postgres.guarded_connection import GuardedAsyncConnection
from busload.postgres.plan import Plan, execute
from busload.postgres.pool import async_pool
from busload.postgres.statements import statements
from busload.sync import joined as sync_joined
from busload.sync.bus import SyncCommandBus
from busload.sync.context import SyncHandlerContext
from busload.testing import joined
from busload.testing.faces import AnyBus, callers_connection, in_own_loop, refuse_no_bus
from busload.testing.joined import result_of
from busload.worker.call_handler import Calls, Work, argument_of
from busload.worker.context import NO_STATE, HandlerContext
from busload.worker.handler_threads import Threads
from busload.worker.worker import Worker, async_face

SQL = statements(__name__)
log = logging.getLogger("busload")

PATIENCE = 60.0
"""Seconds that a handler waits for a connection."""

ran_alone: weakref.WeakKeyDictionary[AnyBus, set[UUID]] = weakref.WeakKeyDictionary()
"""By bus, the commands that a test has run by `run_handler`: nobody has sent them."""


class DrainingWorker:
    """The worker of a drain, for a fault that kills it: another worker takes its place."""

    def __init__(self, bus: AnyBus, domains: Sequence[str] | None, state: Any) -> None:
        self._bus, self._domains = bus, domains
        self._lifespan = None if state is NO_STATE else partial(_given, state)
        self._worker: Worker | None = None
        self._killed = False

    def kill(self) -> None:
        """Stop it without waiting for what runs, from any thread."""
        self._killed = True
        if self._worker is not None:
            self._worker.stop(hurry=True)

    async def drain(self) -> int:
        draining.set(self)
        settled = 0
        while True:
            self._worker, self._killed = Worker(self._bus, domains=self._domains, lifespan=self._lifespan), False
            settled += await self._worker.drain()
            if not self._killed:
                return settled


def _given(state: Any) -> Iterator[Any]:
    yield state


draining: ContextVar[DrainingWorker | None] = ContextVar("busload_testing_draining_worker", default=None)
"""The drain that a handler is called in."""


class RunOptions(TypedDict, total=False):
    """What may be said about the command that `run_handler` runs."""

    command_id: UUID | None
    task_key: str | None
    priority: int
    max_attempts: int | None
    reply_to: str | None
    correlation_id: UUID | None
    headers: Mapping[str, str] | None


@overload
def drain(
    bus: CommandBus,
    *,
    domains: Sequence[str] | None = None,
    conn: AnyConnection | None = None,
    state: Any = NO_STATE,
) -> Coroutine[Any, Any, int]: ...
@overload
def drain(
    bus: SyncCommandBus,
    *,
    domains: Sequence[str] | None = None,
    conn: AnyConnection | None = None,
    state: Any = NO_STATE,
) -> int: ...
def drain(
    bus: AnyBus,
    *,
    domains: Sequence[str] | None = None,
    conn: AnyConnection | None = None,
    state: Any = NO_STATE,
) -> Any:
    """Run commands until nothing is ready or due; returns how many attempts were settled.

    With `conn`, everything happens on that connection, in the transaction that is open there: commands that were sent
    in it are seen, handlers run in this task or thread, and a rollback undoes it all. `state` is what handlers find as
    `ctx.state`, in the place of what the lifespan of the bus would open; with `conn` no lifespan is opened.
    Commands that are ready and have no handler on this bus stay, and a warning in the log names them.
    """
    refuse_no_bus(bus)
    if isinstance(bus, SyncCommandBus):
        conn = callers_connection(bus, conn)
        if conn is None:
            settled = in_own_loop(DrainingWorker(bus, domains, state).drain)
            for shard in _looked_at(bus, domains):
                _warn(shard.database.in_transaction(_left(bus)))
            return settled
        with sync_joined.JoinedBus(bus, conn) as inside:
            settled = sync_joined.JoinedWorker(inside, state).drain(_domains(bus, domains))
            if domains is None:
                _warn(inside.database.in_transaction(_left(bus)))
            return settled
    return _drain(bus, domains, state) if conn is None else _drain_joined(bus, domains, conn, state)


async def _drain(bus: CommandBus, domains: Sequence[str] | None, state: Any) -> int:
    settled = await DrainingWorker(bus, domains, state).drain()
    for shard in _looked_at(bus, domains):
        _warn(await shard.database.in_transaction(_left(bus)))
    return settled


async def _drain_joined(bus: CommandBus, domains: Sequence[str] | None, conn: AnyConnection, state: Any) -> int:
    async with joined.JoinedBus(bus, conn) as inside:
        settled = await joined.JoinedWorker(inside, state).drain(_domains(bus, domains))
        if domains is None:
            _warn(await inside.database.in_transaction(_left(bus)))
        return settled


def _looked_at(bus: Any, domains: Sequence[str] | None) -> list[Any]:
    """Where to look for what has not run: nothing is opened for that."""
    return [shard for shard in bus.shards if shard.database.is_open] if domains is None else []


def _left(bus: AnyBus) -> Plan[list[Any]]:
    """What is ready in domains that the bus has no handlers for, and how much."""
    return (yield from execute(SQL.left_in_other_domains, domains=bus.handlers.domains))


def _warn(left: Sequence[Any]) -> None:
    for domain, commands in left:
        log.warning(
            "%s of the domain %r did not run: this bus has no handler for it. Register its handlers first: import "
            "their module, or call bridge.register() for tasks of Celery. If another program runs them, all is well",
            counted(commands, "command"),
            domain,
        )


def _domains(bus: AnyBus, domains: Sequence[str] | None) -> Sequence[str]:
    found = bus.handlers.domains if domains is None else domains
    if not found:
        raise InvalidOperationError(
            "The bus has no handlers, so nothing would run. Import the module that registers them, or name domains."
        )
    return found


@overload
def run_handler(
    bus: CommandBus,
    domain: str,
    command_type: str,
    data: Any = None,
    *,
    attempt: int = 1,
    batch_id: UUID | None = None,
    conn: AnyConnection | None = None,
    state: Any = NO_STATE,
    **options: Unpack[RunOptions],
) -> Coroutine[Any, Any, Any]: ...
@overload
def run_handler(
    bus: SyncCommandBus,
    domain: str,
    command_type: str,
    data: Any = None,
    *,
    attempt: int = 1,
    batch_id: UUID | None = None,
    conn: AnyConnection | None = None,
    state: Any = NO_STATE,
    **options: Unpack[RunOptions],
) -> Any: ...
def run_handler(
    bus: AnyBus,
    domain: str,
    command_type: str,
    data: Any = None,
    *,
    attempt: int = 1,
    batch_id: UUID | None = None,
    conn: AnyConnection | None = None,
    state: Any = NO_STATE,
    **options: Unpack[RunOptions],
) -> Any:
    """Run the handler of a type alone, without a worker: returns what it returns, and raises what it raises.

    The command is real. It is written to the database and leased, and it ends as a worker would have ended it, so its
    context is a real one: `ctx.transaction()` commits with the completion, `ctx.complete()` completes with the result
    that it is given, which is then what this returns, `ctx.send` sends, `ctx.attempt` is
    `attempt`, `ctx.bus` is the bus, `ctx.state` is `state`. The middleware of the bus is around the handler. No other
    command runs, and limits, the pause of the domain and the lifespan of the bus do not count.
    With `conn`, all of it happens in the transaction that is open there. `batch_id` names an open batch.
    """
    refuse_no_bus(bus)
    handler = _handler(bus, domain, command_type)
    require(whole(1, 1000), attempt=attempt)
    command = new_command("run_handler", command_type, data, cast("CommandOptions", options), RunOptions)
    command.command_id = command.command_id or new_id()
    checked = check_one(bus.settings.limits, domain, command, batch_id, None, None)
    ran_alone.setdefault(bus, set()).add(checked.command_id)
    lease = partial(_lease, domain, checked, batch_id, attempt)
    if isinstance(bus, CommandBus):
        if conn is None:
            return _run(bus, handler, lease, state)
        return _run_joined(bus, handler, lease, conn, state)
    conn = callers_connection(bus, conn)
    if conn is None:
        return in_own_loop(partial(_run_of_sync, bus, handler, lease, state))
    with sync_joined.JoinedBus(bus, conn) as inside:
        worker = sync_joined.JoinedWorker(inside, state)
        worker.register([domain])
        result = worker.run(inside.database.in_transaction(lease(worker.number)), handler)
        worker.retire()
    return _raised_or(result, worker.errors)


async def _run_joined(bus: CommandBus, handler: Handler, lease: Any, conn: AnyConnection, state: Any) -> Any:
    async with joined.JoinedBus(bus, conn) as inside:
        worker = joined.JoinedWorker(inside, state)
        await worker.register([])
        leased = await inside.database.in_transaction(lease(worker.number))
        result = await worker.run(leased, handler)
        await worker.retire()
    return _raised_or(result, worker.errors)


async def _run_of_sync(bus: SyncCommandBus, handler: Handler, lease: Any, state: Any) -> Any:
    async with async_face(bus.open(wait=None)) as face:
        return await _run(face, handler, lease, state)


async def _run(bus: CommandBus, handler: Handler, lease: Any, state: Any) -> Any:
    await bus.open(wait=None)
    register = rescue.register(name="testing", domains=[], concurrency=1, lease_for=timedelta(hours=1))
    worker = await bus.database.in_transaction(register)
    leased = await bus.database.in_transaction(lease(worker))
    payload, threads = bus.settings.limits.payload, Threads(bus, 1, PATIENCE)
    returned: list[Any] = []

    def judge(value: Any) -> Transition:
        returned.append(value)
        return complete(leased, value, payload)

    leased.started = time.monotonic()
    try:
        async with async_pool(
            bus.dsn, bus.settings.pool_size, timeout=PATIENCE, connection_class=GuardedAsyncConnection
        ) as transactions:
            context: HandlerContext | SyncHandlerContext
            if handler.is_async:
                context = HandlerContext(leased, bus, transactions, state)
            else:
                context = SyncHandlerContext(leased, *threads.connections, state)
            work = Work(handler, argument_of(leased), context, [leased], judge, lambda done: _settled([done]))
            call = await Calls(threads).make(work)
        if call.error is not None:
            decided = decide(leased, failure(leased, call.error), handler.retry, payload)
            await bus.database.in_transaction(_settled([decided]))
            raise call.error
        if call.void is not None:
            raise call.void
        if call.ended is None:
            await bus.database.in_transaction(_settled([call.judged]))
        return returned[-1] if returned else result_of(call.judged)
    finally:
        threads.close()
        await bus.database.in_transaction(rescue.retire(worker=worker))


def _lease(domain: str, command: NewCommand, batch_id: UUID | None, attempt: int, worker: int) -> Plan[Leased]:
    """Send a command and lease it, in one transaction: no worker can come between."""
    yield from send.send_many(domain, [command], batch_id, NO_BROKER)
    about = {"domain": domain, "command_id": command.command_id, "attempt": attempt, "worker": worker}
    [row] = yield from execute(SQL.lease_one, **about, lease=str(new_id()))
    _, leased = claim.read(row[:13], *row[13:])
    if not leased:
        raise InvalidOperationError(f"Batch {batch_id} is held or has a canary, so its commands wait. Resume it first.")
    return leased[0]


def _settled(transitions: Sequence[Transition]) -> Plan[set[int]]:
    now = time.monotonic()
    for transition in transitions:
        transition.finished = now
    return settle.settle(transitions, now=now)


def _handler(bus: AnyBus, domain: str, command_type: str) -> Handler:
    handler = within_middleware(bus.handlers, bus.hooks).find(domain, command_type)
    if handler is None:
        known = ", ".join(f"{of}/{name}" for of, name in bus.handlers.names) or "none"
        raise InvalidOperationError(
            f"There is no handler of {domain}/{command_type} on this bus. It has: {known}. Import the module that "
            "registers it, or name the application's bus by `busload_bus` in the settings of pytest."
        )
    if handler.takes_many:
        raise InvalidOperationError(
            f"The handler of {domain}/{command_type} takes many at a time. Send some and drain(), or call the function "
            "with make_chunk() or make_group()."
        )
    return handler


def _raised_or(result: Any, errors: Sequence[BaseException]) -> Any:
    if errors:
        raise errors[0]
    return result
