"""A bus inside of one transaction that is never committed, and a worker that runs its commands there.

Many test suites run each test in a transaction and roll it back: Django's `TestCase` does it, and so does a common
recipe for SQLAlchemy. A worker has connections of its own, and sees nothing of such a transaction. Here everything
happens on the connection of the test: claims, handlers, results. The sync face is generated from this.
"""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from inspect import isawaitable
from typing import Any, TypeVar

import psycopg

from busload.buffers.buffer import Buffer
from busload.bus import CommandBus
from busload.commands import claim, expire, rescue, settle
from busload.commands.bulk_items import Chunk, Item
from busload.commands.execution import Leased, Transition, Unreadable, complete, decide, failure
from busload.commands.payload import UndecodableError, encode
from busload.errors import InvalidOperationError, SupersededError, kind_of
from busload.handlers.hooks import name_of
from busload.handlers.middleware import within_middleware
from busload.handlers.registry import Handler
from busload.jobs.job import STAGE
from busload.jobs.steps import advance
from busload.postgres import waiting
from busload.postgres.callers_connection import (
    AnyConnection,
    perform_any,
    refuse_without_transaction,
    underneath,
)
from busload.postgres.connection import AsyncConnection
from busload.postgres.database import Database
from busload.postgres.plan import ONE_MOMENT, Plan, Script, execute, perform_async
from busload.postgres.pool import AsyncPool
from busload.postgres.statements import statements
from busload.postgres.write import Write
from busload.schedules.declare import declare
from busload.schedules.fire import fire
from busload.settings import Settings
from busload.testing.faces import awaited, in_own_loop
from busload.worker.call_handler import argument_of, command_of
from busload.worker.context import CallersTransaction, ChunkContext, HandlerContext, HandlerTransaction
from busload.worker.failure_calls import STATUSES, failure_of, functions_for

log = logging.getLogger("busload")

T = TypeVar("T")
SQL = statements(__name__)

AT_A_TIME = 100
"""Commands that are claimed at a time."""

NO_HANDLER_PAUSE = 3600.0
"""Seconds until a command is looked at again whose type has no handler: longer than any test."""


OUTSIDE = "commit, and drain without conn (in Django: in a CommandsTestCase, or with the fixture busload_django_bus)"
"""What to do about a handler that cannot run inside of a transaction."""

SAVEPOINT, BACK_TO_SAVEPOINT = b"SAVEPOINT busload_handler", b"ROLLBACK TO SAVEPOINT busload_handler"
OWN_SAVEPOINT, RELEASE = b"SAVEPOINT busload_transaction", b"RELEASE SAVEPOINT busload_transaction"
BACK_TO_OWN_SAVEPOINT = b"ROLLBACK TO SAVEPOINT busload_transaction; RELEASE SAVEPOINT busload_transaction"


class JoinedDatabase(Database):
    """Everything is read and written on one connection, in the transaction that is open there."""

    joined: Any
    """What takes part in that transaction; known once the database is open."""

    def __init__(self, conn: AnyConnection, dsn: str | None, settings: Settings) -> None:
        super().__init__(dsn, settings)
        refuse_without_transaction(conn)
        self.conn = conn
        self._one_at_a_time = waiting.Lock()
        self._open = False

    @property
    def is_open(self) -> bool:
        return self._open

    def refuse_closed(self) -> None:
        refuse_without_transaction(self.conn)

    @property
    def pool(self) -> AsyncPool:
        raise InvalidOperationError("A bus inside of a transaction has one connection, the one it was given: use that.")

    async def open(self, *, wait: float | None = 0.0) -> None:
        """There is nothing to connect to."""
        self.joined = await underneath(self.conn)
        self._open = True

    async def close(self) -> None:
        """The connection is the caller's, and stays as it is."""
        self._open = False

    async def read(self, plan: Plan[T], *, within: float | None = None) -> T:
        async with self._one_at_a_time:
            return await self._join(self.conn, _begun(plan))

    async def in_transaction(self, plan: Plan[T], *, within: float | None = None) -> T:
        return await self.read(plan)

    async def write(self, write: Write[T], conn: AnyConnection | None = None) -> T:
        return await self.read(write.plan)

    async def script(self, sql: bytes) -> None:
        """Carry out a statement as it is, also if the transaction has failed."""
        await perform_any(self.joined, _script(sql))

    async def is_failed(self) -> bool:
        """Whether the transaction takes no more statements, because one has failed."""
        try:
            await self.script(b"SELECT")
        except psycopg.errors.InFailedSqlTransaction:
            return True
        return False


class JoinedBus(CommandBus):
    """A bus like another one, with its handlers, inside of the transaction that is open on `conn`."""

    database: JoinedDatabase

    def __init__(self, like: CommandBus, conn: AnyConnection) -> None:
        self._conn = conn
        settings = replace(like.settings, transport_url=None, dispatch=None, queues={})
        super().__init__(like.database.given_dsn, settings=settings)
        self.handlers, self.hooks = within_middleware(like.handlers, like.hooks), like.hooks
        self.declared_buffers, self.declared_schedules = like.declared_buffers, like.declared_schedules

    def _make_database(self) -> JoinedDatabase:
        return JoinedDatabase(self._conn, self._given_dsn, self.settings)


class JoinedTransaction(HandlerTransaction):
    """The transaction of a handler as a savepoint of the test's transaction."""

    def __init__(self, conn: AsyncConnection, leases: set[Any]) -> None:
        super().__init__(None, leases)  # type: ignore[arg-type]  # it has no pool
        self._joined, self._block = conn, conn.transaction()

    async def __aenter__(self) -> AsyncConnection:
        await self._block.__aenter__()
        self.conn = self._joined  # type: ignore[assignment]  # it guards itself: psycopg refuses a commit in a savepoint
        return self._joined

    async def commit(self, settle: Plan[T]) -> T | None:
        if self.conn is None:
            return None
        try:
            settled = await perform_async(self.conn, self._end(settle))
        except BaseException:
            await self.rollback()
            raise
        self.conn = None
        await self._block.__aexit__(None, None, None)
        return settled

    async def rollback(self) -> None:
        if self.conn is not None:
            self.conn = None
            undo = psycopg.Rollback()
            await self._block.__aexit__(type(undo), undo, None)


class OtherConnection:
    """What `ctx.transaction()` gives if the test's transaction is one of another driver, or of the other face.

    It performs what busload has to do. Handlers that write by it themselves want a connection of psycopg.
    """

    blocks = not waiting.AWAITS

    def __init__(self, database: JoinedDatabase) -> None:
        self._database = database

    async def perform(self, plan: Plan[T]) -> T:
        return await perform_any(self._database.joined, plan)

    def __getattr__(self, name: str) -> Any:
        raise _no_psycopg(name, self._database.conn)


class OtherTransaction(HandlerTransaction):
    """The transaction of a handler as a savepoint of a test's transaction that psycopg, in this face, cannot use."""

    def __init__(self, database: JoinedDatabase, leases: set[Any]) -> None:
        super().__init__(None, leases)  # type: ignore[arg-type]  # it has no pool
        self._database = database

    async def __aenter__(self) -> AsyncConnection:
        await self._database.script(OWN_SAVEPOINT)
        conn: Any = OtherConnection(self._database)
        self.conn = conn
        return conn  # type: ignore[no-any-return]

    async def commit(self, settle: Plan[T]) -> T | None:
        if self.conn is None:
            return None
        try:
            settled = await self._database.in_transaction(self._end(settle))
        except BaseException:
            await self.rollback()
            raise
        self.conn = None
        await self._database.script(RELEASE)
        return settled

    async def rollback(self) -> None:
        if self.conn is not None:
            self.conn = None
            await self._database.script(BACK_TO_OWN_SAVEPOINT)

    def _look(self) -> None:
        """A test has one transaction: there is nobody to collide with."""


def _transaction(database: JoinedDatabase, leases: set[Any]) -> HandlerTransaction:
    if isinstance(database.joined, psycopg.AsyncConnection):
        return JoinedTransaction(database.joined, leases)
    return OtherTransaction(database, leases)


class JoinedContext(HandlerContext):
    """What a handler gets: its transaction is a savepoint, and what it sends is sent in the test's transaction."""

    def __init__(self, leased: Leased, bus: JoinedBus, state: Any) -> None:
        super().__init__(leased, bus, None, state)  # type: ignore[arg-type]  # it has no pool
        self._database = bus.database

    def _new_transaction(self) -> HandlerTransaction:
        return _transaction(self._database, self._leases())


class JoinedChunkContext(ChunkContext):
    """The same for a bulk handler."""

    def __init__(self, leased: Sequence[Leased], bus: JoinedBus, state: Any) -> None:
        super().__init__(leased, bus, None, state)  # type: ignore[arg-type]  # it has no pool
        self._database = bus.database

    def _new_transaction(self) -> HandlerTransaction:
        return _transaction(self._database, self._leases())


class JoinedWorker:
    """Runs commands one after the other, on the connection of its bus and in the task or thread of the caller."""

    def __init__(self, bus: JoinedBus, state: Any) -> None:
        self._bus, self._database, self._state = bus, bus.database, state
        self._drains = False
        self._payload = bus.settings.limits.payload
        self.number = 0
        self.errors: list[BaseException] = []
        """What handlers have raised."""
        self.settled = 0

    async def register(self, domains: Sequence[str]) -> None:
        self.number = await self._perform(
            rescue.register(name="testing", domains=domains, concurrency=1, lease_for=timedelta(hours=1))
        )

    async def retire(self) -> None:
        await self._perform(rescue.retire(worker=self.number))

    async def drain(self, domains: Sequence[str]) -> int:
        """Run until nothing is ready or due; returns how many attempts were settled."""
        self._drains = True
        await self.register(domains)
        await self._perform(declare([*self._bus.declared_schedules.values()]))
        await self._perform(rescue.rescue(worker=self.number))
        while await self._perform(expire.expire_commands()) is not None:
            continue
        while True:
            await self._perform(execute(SQL.catch_up))
            promoted = (await self._perform(claim.promote())).loads
            claimed = claim.claim(worker=self.number, domains=list(domains), limit=AT_A_TIME)
            taken = (await self._perform(claimed)).leased
            if not (taken or promoted or await self._fire()):
                break
            await self._run_all(taken)
        await self._refuse_buffers(domains)
        await self.retire()
        return self.settled

    async def _refuse_buffers(self, domains: Sequence[str]) -> None:
        """A worker would make groups now of events that are due, and run their handlers."""
        for settings in self._bus.handlers.buffers:
            if settings.name in domains:
                served = Buffer(self._database, self._bus.handlers, settings, self._payload)
                if await served.distribute():
                    raise _of_buffer(settings.name)

    async def _fire(self) -> int:
        """Fire schedules that are due, as a worker does."""
        fired = await self._perform(fire(self._bus.via, (), self._bus.around_sends, self._bus.settings.limits))
        return fired.commands + fired.skipped

    async def _run_all(self, taken: Sequence[Leased]) -> None:
        chunks: dict[tuple[Any, ...], list[Leased]] = defaultdict(list)
        for one in taken:
            handler = self._bus.handlers.find(one.lease.domain, one.command_type)
            if handler is not None and one.command_type == STAGE:  # written for both faces
                handler = replace(handler, function=advance, is_async=waiting.AWAITS)
            if handler is None:
                await self._set_aside(one)
            elif handler.gathering is None:
                await self.run(one, handler)
            else:
                by = handler.gathering.by
                chunks[one.lease.domain, one.command_type, by(command_of(one)) if by else None].append(one)
        for (domain, command_type, key), together in chunks.items():
            handler = self._bus.handlers.find(domain, command_type)
            assert handler is not None
            size = handler.gathering.size if handler.gathering is not None else 1
            for start in range(0, len(together), size):
                await self._run_chunk(handler, together[start : start + size], key)

    async def run(self, leased: Leased, handler: Handler) -> Any:
        """Run one command and settle it; returns what its handler has returned, or None if it has raised."""
        self._refuse(handler, leased)
        context = JoinedContext(leased, self._bus, self._state)
        leased.started = time.monotonic()
        try:
            command = argument_of(leased)
            await self._database.script(SAVEPOINT)
            result = await waiting.result_of(handler.function(command, context))
            if isinstance(context.own_transaction, CallersTransaction):
                self.settled += 1
                return result_of(context.own_transaction.transition)
            transition = complete(leased, result, self._payload)
            if context.own_transaction is None or context.own_transaction.conn is None:
                await self._settle([transition])
            else:
                self.settled += len(await context.own_transaction.commit(_settled([transition])) or ())
            return result
        except SupersededError:
            return None
        except waiting.FAILURES as error:
            await self._fail([(leased, error)], handler, context)
        return None

    async def _run_chunk(self, handler: Handler, together: Sequence[Leased], key: Any) -> None:
        self._refuse(handler, together[0])
        by_id = {one.command_id: one for one in together}
        commands = [command_of(one) for one in together]
        items = [Item(one.command_id, one.data, one.task_key, one.created_at, one) for one in commands]
        chunk = Chunk(together[0].lease.domain, together[0].command_type, items, key)
        context, result, error = JoinedChunkContext(together, self._bus, self._state), None, None
        for one in together:
            one.started = time.monotonic()
        try:
            await self._database.script(SAVEPOINT)
            result = await waiting.result_of(handler.function(chunk, context))
        except waiting.FAILURES as raised:
            error = raised
        judgement = chunk.judgement(error)
        undone = error is not None and context.own_transaction is not None
        done = [] if undone else judgement.done
        failed = [*judgement.failed, *((item, error) for item in judgement.done if undone and error is not None)]
        transitions = [complete(by_id[item.id], judgement.results.get(item.id, result), self._payload) for item in done]
        if transitions and context.own_transaction is not None and context.own_transaction.conn is not None:
            self.settled += len(await context.own_transaction.commit(_settled(transitions)) or ())
        elif transitions:
            await self._settle(transitions)
        if failed:
            await self._fail([(by_id[item.id], why) for item, why in failed], handler, context)

    async def _fail(
        self,
        failed: Sequence[tuple[Leased, BaseException]],
        handler: Handler,
        context: JoinedContext | JoinedChunkContext,
    ) -> None:
        if context.own_transaction is not None:
            await context.own_transaction.rollback()
        # What a handler has written stays, as it would outside of a test. A failed statement must not end the test.
        if await self._database.is_failed():
            await self._database.script(BACK_TO_SAVEPOINT)
        self.errors += [error for _, error in failed]
        outcomes = [
            (one, Unreadable(error) if isinstance(error, UndecodableError) else failure(one, error))
            for one, error in failed
        ]
        transitions = [decide(one, outcome, handler.retry, self._payload) for one, outcome in outcomes]
        await self._settle(transitions)
        for transition in transitions:
            if self._drains and transition.outcome in STATUSES:
                await self._tell(transition)

    async def _tell(self, transition: Transition) -> None:
        """Call `on_failure`, as a worker does."""
        leased = transition.leased
        about = leased.lease.domain, leased.command_type
        for function in functions_for(self._bus.handlers, self._bus.hooks.failure, *about):
            try:
                answer = await waiting.result_of(function(failure_of(transition)))
                if isawaitable(answer):
                    in_own_loop(partial(awaited, answer))
            except Exception:
                log.exception("on_failure %s failed for command %s", name_of(function), leased.command_id)

    async def _settle(self, transitions: Sequence[Transition]) -> None:
        self.settled += len(await self._perform(_settled(transitions)))

    async def _set_aside(self, leased: Leased) -> None:
        log.warning("No handler for %s in %s here, so it did not run", leased.command_type, leased.lease.domain)
        details = encode({"command_types": [leased.command_type]})
        await self._perform(claim.give_back({leased.lease: [leased.id]}, pause=NO_HANDLER_PAUSE, details=[details]))

    async def _perform(self, plan: Plan[T]) -> T:
        return await self._bus.database.in_transaction(plan)

    def _refuse(self, handler: Handler, leased: Leased) -> None:
        where = f"{leased.lease.domain}/{leased.command_type}"
        if handler.buffer is not None:
            raise _of_buffer(leased.lease.domain)
        if handler.is_async != waiting.AWAITS:
            raise _other_face(where, handler)


def _of_buffer(name: str) -> InvalidOperationError:
    """Its handler works through a group in several transactions."""
    return InvalidOperationError(
        f"The handler of the buffer {name!r} cannot run inside of a test's transaction. Instead, {OUTSIDE}."
    )


def _other_face(where: str, handler: Handler) -> InvalidOperationError:
    """A handler in a test's transaction has the connection of the test, and no other."""
    kind, bus = ("async def", "CommandBus") if handler.is_async else ("def", "SyncCommandBus")
    return InvalidOperationError(
        f"The handler of {where} is written with {kind}, so inside of a test's transaction it needs a {bus}. Pass one, "
        f"or {OUTSIDE}."
    )


def _no_psycopg(name: str, conn: object) -> InvalidOperationError:
    return InvalidOperationError(
        "ctx.transaction() gives a connection of psycopg, in the face of the handler, and the transaction of this test "
        f"is one of {kind_of(conn)}: it has no {name!r} for the handler. Write by the session or connection of the "
        "test, and complete the command there by ctx.complete(conn=...); or let the engine of the test begin with "
        f"postgresql+psycopg://; or {OUTSIDE}."
    )


def _begun(plan: Plan[T]) -> Plan[T]:
    """The plan without what only a transaction that has not begun can do: see everything at one moment."""
    try:
        step = next(plan)
        while True:
            try:
                answer = [] if step == ONE_MOMENT else (yield step)
            except Exception as error:
                step = plan.throw(error)
            else:
                step = plan.send(answer)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]


def _script(sql: bytes) -> Plan[None]:
    yield Script(sql)


def result_of(transition: Transition) -> Any:
    """The result that a handler has given to `ctx.complete()`."""
    return None if transition.details is None else json.loads(transition.details)


def _settled(transitions: Sequence[Transition]) -> Plan[set[int]]:
    now = time.monotonic()
    for transition in transitions:
        transition.finished = now
    return settle.settle(transitions, now=now)
