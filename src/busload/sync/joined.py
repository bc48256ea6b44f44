"""Made from busload.testing.joined by scripts/generate_sync.py. Change the source instead."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from inspect import isawaitable
from typing import Any

import psycopg

from busload.commands import claim, expire, rescue
from busload.commands.bulk_items import Chunk, Item
from busload.commands.execution import Leased, Transition, Unreadable, complete, decide, failure
from busload.commands.payload import UndecodableError, encode
from busload.errors import InvalidOperationError, SupersededError
from busload.handlers.hooks import name_of
from busload.handlers.middleware import within_middleware
from busload.handlers.registry import Handler
from busload.jobs.job import STAGE
from busload.postgres import waiting_in_threads as waiting
from busload.postgres.callers_connection import (
    AnySyncConnection,
    perform_in_threads,
    refuse_without_transaction,
    underneath_in_threads,
)
from busload.postgres.connection import Connection
from busload.postgres.plan import Plan, execute
from busload.postgres.write import Write
from busload.schedules.declare import declare
from busload.schedules.fire import fire
from busload.settings import Settings
from busload.sync.buffer import SyncBuffer
from busload.sync.bus import SyncCommandBus
from busload.sync.context import SyncCallersTransaction, SyncChunkContext, SyncHandlerContext, SyncHandlerTransaction
from busload.sync.database import Database
from busload.sync.plan import perform
from busload.sync.pool import Pool
from busload.sync.steps import advance
from busload.testing.faces import awaited, in_own_loop
from busload.testing.joined import (
    AT_A_TIME,
    BACK_TO_OWN_SAVEPOINT,
    BACK_TO_SAVEPOINT,
    NO_HANDLER_PAUSE,
    OWN_SAVEPOINT,
    RELEASE,
    SAVEPOINT,
    SQL,
    T,
    _begun,
    _no_psycopg,
    _of_buffer,
    _other_face,
    _script,
    _settled,
    log,
    result_of,
)
from busload.worker.call_handler import argument_of, command_of
from busload.worker.failure_calls import STATUSES, failure_of, functions_for


class JoinedDatabase(Database):
    """Everything is read and written on one connection, in the transaction that is open there."""

    joined: Any
    """What takes part in that transaction; known once the database is open."""

    def __init__(self, conn: AnySyncConnection, dsn: str | None, settings: Settings) -> None:
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
    def pool(self) -> Pool:
        raise InvalidOperationError("A bus inside of a transaction has one connection, the one it was given: use that.")

    def open(self, *, wait: float | None = 0.0) -> None:
        """There is nothing to connect to."""
        self.joined = underneath_in_threads(self.conn)
        self._open = True

    def close(self) -> None:
        """The connection is the caller's, and stays as it is."""
        self._open = False

    def read(self, plan: Plan[T], *, within: float | None = None) -> T:
        with self._one_at_a_time:
            return self._join(self.conn, _begun(plan))

    def in_transaction(self, plan: Plan[T], *, within: float | None = None) -> T:
        return self.read(plan)

    def write(self, write: Write[T], conn: AnySyncConnection | None = None) -> T:
        return self.read(write.plan)

    def script(self, sql: bytes) -> None:
        """Carry out a statement as it is, also if the transaction has failed."""
        perform_in_threads(self.joined, _script(sql))

    def is_failed(self) -> bool:
        """Whether the transaction takes no more statements, because one has failed."""
        try:
            self.script(b"SELECT")
        except psycopg.errors.InFailedSqlTransaction:
            return True
        return False


class JoinedBus(SyncCommandBus):
    """A bus like another one, with its handlers, inside of the transaction that is open on `conn`."""

    database: JoinedDatabase

    def __init__(self, like: SyncCommandBus, conn: AnySyncConnection) -> None:
        self._conn = conn
        settings = replace(like.settings, transport_url=None, dispatch=None, queues={})
        super().__init__(like.database.given_dsn, settings=settings)
        self.handlers, self.hooks = within_middleware(like.handlers, like.hooks), like.hooks
        self.declared_buffers, self.declared_schedules = like.declared_buffers, like.declared_schedules

    def _make_database(self) -> JoinedDatabase:
        return JoinedDatabase(self._conn, self._given_dsn, self.settings)


class JoinedTransaction(SyncHandlerTransaction):
    """The transaction of a handler as a savepoint of the test's transaction."""

    def __init__(self, conn: Connection, leases: set[Any]) -> None:
        super().__init__(None, leases)  # type: ignore[arg-type]  # it has no pool
        self._joined, self._block = conn, conn.transaction()

    def __enter__(self) -> Connection:
        self._block.__enter__()
        self.conn = self._joined  # type: ignore[assignment]  # it guards itself: psycopg refuses a commit in a savepoint
        return self._joined

    def commit(self, settle: Plan[T]) -> T | None:
        if self.conn is None:
            return None
        try:
            settled = perform(self.conn, self._end(settle))
        except BaseException:
            self.rollback()
            raise
        self.conn = None
        self._block.__exit__(None, None, None)
        return settled

    def rollback(self) -> None:
        if self.conn is not None:
            self.conn = None
            undo = psycopg.Rollback()
            self._block.__exit__(type(undo), undo, None)


class OtherConnection:
    """What `ctx.transaction()` gives if the test's transaction is one of another driver, or of the other face.

    It performs what busload has to do. Handlers that write by it themselves want a connection of psycopg.
    """

    blocks = not waiting.AWAITS

    def __init__(self, database: JoinedDatabase) -> None:
        self._database = database

    def perform(self, plan: Plan[T]) -> T:
        return perform_in_threads(self._database.joined, plan)

    def __getattr__(self, name: str) -> Any:
        raise _no_psycopg(name, self._database.conn)


class OtherTransaction(SyncHandlerTransaction):
    """The transaction of a handler as a savepoint of a test's transaction that psycopg, in this face, cannot use."""

    def __init__(self, database: JoinedDatabase, leases: set[Any]) -> None:
        super().__init__(None, leases)  # type: ignore[arg-type]  # it has no pool
        self._database = database

    def __enter__(self) -> Connection:
        self._database.script(OWN_SAVEPOINT)
        conn: Any = OtherConnection(self._database)
        self.conn = conn
        return conn  # type: ignore[no-any-return]

    def commit(self, settle: Plan[T]) -> T | None:
        if self.conn is None:
            return None
        try:
            settled = self._database.in_transaction(self._end(settle))
        except BaseException:
            self.rollback()
            raise
        self.conn = None
        self._database.script(RELEASE)
        return settled

    def rollback(self) -> None:
        if self.conn is not None:
            self.conn = None
            self._database.script(BACK_TO_OWN_SAVEPOINT)

    def _look(self) -> None:
        """A test has one transaction: there is nobody to collide with."""


def _transaction(database: JoinedDatabase, leases: set[Any]) -> SyncHandlerTransaction:
    if isinstance(database.joined, psycopg.Connection):
        return JoinedTransaction(database.joined, leases)
    return OtherTransaction(database, leases)


class JoinedContext(SyncHandlerContext):
    """What a handler gets: its transaction is a savepoint, and what it sends is sent in the test's transaction."""

    def __init__(self, leased: Leased, bus: JoinedBus, state: Any) -> None:
        super().__init__(leased, bus, None, state)  # type: ignore[arg-type]  # it has no pool
        self._database = bus.database

    def _new_transaction(self) -> SyncHandlerTransaction:
        return _transaction(self._database, self._leases())


class JoinedChunkContext(SyncChunkContext):
    """The same for a bulk handler."""

    def __init__(self, leased: Sequence[Leased], bus: JoinedBus, state: Any) -> None:
        super().__init__(leased, bus, None, state)  # type: ignore[arg-type]  # it has no pool
        self._database = bus.database

    def _new_transaction(self) -> SyncHandlerTransaction:
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

    def register(self, domains: Sequence[str]) -> None:
        self.number = self._perform(
            rescue.register(name="testing", domains=domains, concurrency=1, lease_for=timedelta(hours=1))
        )

    def retire(self) -> None:
        self._perform(rescue.retire(worker=self.number))

    def drain(self, domains: Sequence[str]) -> int:
        """Run until nothing is ready or due; returns how many attempts were settled."""
        self._drains = True
        self.register(domains)
        self._perform(declare([*self._bus.declared_schedules.values()]))
        self._perform(rescue.rescue(worker=self.number))
        while self._perform(expire.expire_commands()) is not None:
            continue
        while True:
            self._perform(execute(SQL.catch_up))
            promoted = (self._perform(claim.promote())).loads
            claimed = claim.claim(worker=self.number, domains=list(domains), limit=AT_A_TIME)
            taken = (self._perform(claimed)).leased
            if not (taken or promoted or self._fire()):
                break
            self._run_all(taken)
        self._refuse_buffers(domains)
        self.retire()
        return self.settled

    def _refuse_buffers(self, domains: Sequence[str]) -> None:
        """A worker would make groups now of events that are due, and run their handlers."""
        for settings in self._bus.handlers.buffers:
            if settings.name in domains:
                served = SyncBuffer(self._database, self._bus.handlers, settings, self._payload)
                if served.distribute():
                    raise _of_buffer(settings.name)

    def _fire(self) -> int:
        """Fire schedules that are due, as a worker does."""
        fired = self._perform(fire(self._bus.via, (), self._bus.around_sends, self._bus.settings.limits))
        return fired.commands + fired.skipped

    def _run_all(self, taken: Sequence[Leased]) -> None:
        chunks: dict[tuple[Any, ...], list[Leased]] = defaultdict(list)
        for one in taken:
            handler = self._bus.handlers.find(one.lease.domain, one.command_type)
            if handler is not None and one.command_type == STAGE:  # written for both faces
                handler = replace(handler, function=advance, is_async=waiting.AWAITS)
            if handler is None:
                self._set_aside(one)
            elif handler.gathering is None:
                self.run(one, handler)
            else:
                by = handler.gathering.by
                chunks[one.lease.domain, one.command_type, by(command_of(one)) if by else None].append(one)
        for (domain, command_type, key), together in chunks.items():
            handler = self._bus.handlers.find(domain, command_type)
            assert handler is not None
            size = handler.gathering.size if handler.gathering is not None else 1
            for start in range(0, len(together), size):
                self._run_chunk(handler, together[start : start + size], key)

    def run(self, leased: Leased, handler: Handler) -> Any:
        """Run one command and settle it; returns what its handler has returned, or None if it has raised."""
        self._refuse(handler, leased)
        context = JoinedContext(leased, self._bus, self._state)
        leased.started = time.monotonic()
        try:
            command = argument_of(leased)
            self._database.script(SAVEPOINT)
            result = waiting.result_of(handler.function(command, context))
            if isinstance(context.own_transaction, SyncCallersTransaction):
                self.settled += 1
                return result_of(context.own_transaction.transition)
            transition = complete(leased, result, self._payload)
            if context.own_transaction is None or context.own_transaction.conn is None:
                self._settle([transition])
            else:
                self.settled += len(context.own_transaction.commit(_settled([transition])) or ())
            return result
        except SupersededError:
            return None
        except waiting.FAILURES as error:
            self._fail([(leased, error)], handler, context)
        return None

    def _run_chunk(self, handler: Handler, together: Sequence[Leased], key: Any) -> None:
        self._refuse(handler, together[0])
        by_id = {one.command_id: one for one in together}
        commands = [command_of(one) for one in together]
        items = [Item(one.command_id, one.data, one.task_key, one.created_at, one) for one in commands]
        chunk = Chunk(together[0].lease.domain, together[0].command_type, items, key)
        context, result, error = JoinedChunkContext(together, self._bus, self._state), None, None
        for one in together:
            one.started = time.monotonic()
        try:
            self._database.script(SAVEPOINT)
            result = waiting.result_of(handler.function(chunk, context))
        except waiting.FAILURES as raised:
            error = raised
        judgement = chunk.judgement(error)
        undone = error is not None and context.own_transaction is not None
        done = [] if undone else judgement.done
        failed = [*judgement.failed, *((item, error) for item in judgement.done if undone and error is not None)]
        transitions = [complete(by_id[item.id], judgement.results.get(item.id, result), self._payload) for item in done]
        if transitions and context.own_transaction is not None and context.own_transaction.conn is not None:
            self.settled += len(context.own_transaction.commit(_settled(transitions)) or ())
        elif transitions:
            self._settle(transitions)
        if failed:
            self._fail([(by_id[item.id], why) for item, why in failed], handler, context)

    def _fail(
        self,
        failed: Sequence[tuple[Leased, BaseException]],
        handler: Handler,
        context: JoinedContext | JoinedChunkContext,
    ) -> None:
        if context.own_transaction is not None:
            context.own_transaction.rollback()
        # What a handler has written stays, as it would outside of a test. A failed statement must not end the test.
        if self._database.is_failed():
            self._database.script(BACK_TO_SAVEPOINT)
        self.errors += [error for _, error in failed]
        outcomes = [
            (one, Unreadable(error) if isinstance(error, UndecodableError) else failure(one, error))
            for one, error in failed
        ]
        transitions = [decide(one, outcome, handler.retry, self._payload) for one, outcome in outcomes]
        self._settle(transitions)
        for transition in transitions:
            if self._drains and transition.outcome in STATUSES:
                self._tell(transition)

    def _tell(self, transition: Transition) -> None:
        """Call `on_failure`, as a worker does."""
        leased = transition.leased
        about = leased.lease.domain, leased.command_type
        for function in functions_for(self._bus.handlers, self._bus.hooks.failure, *about):
            try:
                answer = waiting.result_of(function(failure_of(transition)))
                if isawaitable(answer):
                    in_own_loop(partial(awaited, answer))
            except Exception:
                log.exception("on_failure %s failed for command %s", name_of(function), leased.command_id)

    def _settle(self, transitions: Sequence[Transition]) -> None:
        self.settled += len(self._perform(_settled(transitions)))

    def _set_aside(self, leased: Leased) -> None:
        log.warning("No handler for %s in %s here, so it did not run", leased.command_type, leased.lease.domain)
        details = encode({"command_types": [leased.command_type]})
        self._perform(claim.give_back({leased.lease: [leased.id]}, pause=NO_HANDLER_PAUSE, details=[details]))

    def _perform(self, plan: Plan[T]) -> T:
        return self._bus.database.in_transaction(plan)

    def _refuse(self, handler: Handler, leased: Leased) -> None:
        where = f"{leased.lease.domain}/{leased.command_type}"
        if handler.buffer is not None:
            raise _of_buffer(leased.lease.domain)
        if handler.is_async != waiting.AWAITS:
            raise _other_face(where, handler)
