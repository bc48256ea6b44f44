"""What a handler is given besides its command."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from uuid import UUID

import psycopg
from psycopg.pq import TransactionStatus

from busload.domain.command import BatchCommand, SendResult
from busload.domain.dedup import Dedup
from busload.domain.execution import Lease, Leased, Transition
from busload.domain.ids import new_id
from busload.errors import InvalidOperationError, Superseded
from busload.store.connection import AsyncConnection, Connection
from busload.store.guard import GuardedAsyncConnection, GuardedConnection, refuse_unfinished
from busload.store.plan import Plan, perform, perform_async
from busload.store.pool import AsyncPool, Pool
from busload.store.settle import lock

if TYPE_CHECKING:
    from busload.bus import CommandBus, SyncCommandBus

T = TypeVar("T")
COLLISIONS = "40P01", "40001"
"""Deadlocks, and transactions that cannot be serialized."""

Settle = Callable[[Transition], Plan[set[int]]]


class _Context:
    """Facts about this execution."""

    _leased: Leased
    _timed_out = False

    @property
    def execution_id(self) -> UUID:
        """This attempt and no other: an idempotency key for what must happen once per attempt."""
        return self._leased.execution_id

    @property
    def attempt(self) -> int:
        """1 for the first attempt; an operator's retry starts over."""
        return self._leased.lease.round_attempt

    @property
    def batch_id(self) -> UUID | None:
        return self._leased.lease.batch_id

    @property
    def cancelled(self) -> bool:
        """Whether it would be better to stop: the batch was canceled, the time is up, or the command was lost."""
        return self._leased.lease.canceled or self._leased.lease.lost or self._timed_out

    @property
    def _commands(self) -> Sequence[Leased]:
        return [self._leased]

    def _leases(self) -> set[Lease]:
        return {self._leased.lease}

    def _give_up(self) -> None:
        self._timed_out = True


class _ChunkFacts:
    """Facts about a chunk: its commands may be of several batches, and at different attempts."""

    def __init__(self, leased: Sequence[Leased]) -> None:
        self._commands = leased
        self._timed_out = False

    @property
    def cancelled(self) -> bool:
        """Whether it would be better to stop: the time is up, or every command of the chunk was canceled or lost."""
        return self._timed_out or all(one.lease.canceled or one.lease.lost for one in self._commands)

    def _leases(self) -> set[Lease]:
        return {one.lease for one in self._commands}

    def _give_up(self) -> None:
        self._timed_out = True


class Actions:
    """What an async handler can do besides its work."""

    _bus: CommandBus
    _transactions: AsyncPool
    _transaction: HandlerTransaction | None = None
    _leases: Callable[[], set[Lease]]

    def transaction(self) -> HandlerTransaction:
        """`async with ctx.transaction() as conn`: what is written on `conn` commits together with this completion.

        The transaction stays open until the handler returns, so that its result belongs to it; if the handler raises,
        or has lost its command meanwhile, everything is rolled back.
        """
        _refuse_second(self._transaction)
        self._transaction = HandlerTransaction(self._transactions, self._leases())
        return self._transaction

    async def send(
        self,
        domain: str,
        command_type: str,
        data: Any = None,
        *,
        command_id: UUID | None = None,
        task_key: str | None = None,
        dedup: Dedup | None = None,
        priority: int = 0,
        run_at: datetime | None = None,
        max_attempts: int | None = None,
        reply_to: str | None = None,
        correlation_id: UUID | None = None,
        batch_id: UUID | None = None,
    ) -> SendResult:
        """Send a command. Within `transaction()` it is sent with the commit: it exists if this execution completes."""
        command = BatchCommand(
            command_type,
            command_id,
            data,
            reply_to=reply_to,
            correlation_id=correlation_id,
            task_key=task_key,
            priority=priority,
            run_at=run_at,
            max_attempts=max_attempts,
        )
        if self._transaction is None or self._transaction.conn is None:
            return await self._bus._send(domain, command, batch_id, dedup=dedup)
        command.command_id = command_id or new_id()
        write = self._bus._requests.send(domain, command, batch_id)  # refuses what is wrong before anything is held
        if dedup is not None:
            async with self._transaction.holding:
                promised = self._transaction.promised.setdefault(domain, {})
                hold = self._bus._requests.hold(domain, command, dedup, promised)
                held = await perform_async(self._transaction.conn, hold)
                if not held.created:
                    return held
                promised[task_key or ""] = held.command_id
        self._transaction.send(write.plan, batch_id)
        return SendResult(write.command_ids[0], created=True)


class HandlerContext(_Context, Actions):
    """What an async handler is given besides its command."""

    def __init__(self, leased: Leased, bus: CommandBus, transactions: AsyncPool) -> None:
        self._leased, self._bus, self._transactions = leased, bus, transactions


class ChunkContext(_ChunkFacts, Actions):
    """What an async bulk handler is given besides its chunk.

    What is written in its `transaction()` commits together with the results of all commands of the chunk.
    """

    def __init__(self, leased: Sequence[Leased], bus: CommandBus, transactions: AsyncPool) -> None:
        super().__init__(leased)
        self._bus, self._transactions = bus, transactions


class _Transaction:
    """What a handler's transaction does at its end, awaited or not: settle, and after that send.

    The rows of all batches that this counts in, of what is settled and of what is sent, are locked before, in the order
    in which every settlement locks: otherwise handlers of two batches that send into each other's would deadlock.
    """

    conn: Connection | AsyncConnection | None

    def __init__(self, leases: set[Lease]) -> None:
        self._of_leases = leases
        self._sends: list[Plan[SendResult]] = []
        self._batches: set[UUID] = set()
        self._failed = False
        self.promised: dict[str, dict[str, UUID]] = {}
        """By domain, the task keys that are held for what will be sent."""

    def send(self, plan: Plan[SendResult], batch_id: UUID | None) -> None:
        """Send with the commit."""
        self._sends.append(plan)
        if batch_id is not None:
            self._batches.add(batch_id)

    def collided(self, error: BaseException) -> bool:
        """Whether PostgreSQL has undone it only because others wanted the same rows at the same moment.

        Then it is tried again and burns no attempt: the command has done nothing wrong.
        """
        self._look()
        return self._failed and any(getattr(one, "sqlstate", None) in COLLISIONS for one in _chain(error))

    def _look(self) -> None:
        if self.conn is not None and self.conn.info.transaction_status == TransactionStatus.INERROR:
            self._failed = True

    def _end(self, settle: Plan[T]) -> Plan[T]:
        if self._batches:
            yield from lock(self._of_leases, self._batches)
        settled = yield from settle
        if not settled:
            raise Superseded("Another worker has this command now; what the handler wrote was rolled back.")
        for send in self._sends:
            yield from send
        return settled


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error with those it was raised from: an ORM raises its own."""
    for _ in range(10):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


class HandlerTransaction(_Transaction):
    """A transaction that ends with the handler, and by nobody else.

    What was sent in it is written last, after the settlement: a batch's row is then locked after the lease, as every
    settlement does it, and for no longer than the commit takes.
    """

    def __init__(self, pool: AsyncPool, leases: set[Lease]) -> None:
        super().__init__(leases)
        self._pool = pool
        self.conn: GuardedAsyncConnection | None = None
        self.holding = asyncio.Lock()

    async def __aenter__(self) -> AsyncConnection:
        conn = await self._pool.getconn()
        assert isinstance(conn, GuardedAsyncConnection)
        self.conn = conn
        try:
            await self.conn.begin_guarded()
        except BaseException:
            await self._leave()
            raise
        return self.conn

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if error is not None:
            await self.rollback()
        return False

    async def commit(self, settle: Plan[T]) -> T | None:
        """Settle in this transaction and commit it; `Superseded` if the command is not ours any more."""
        if self.conn is None:
            return None
        try:
            refuse_unfinished(self.conn)
            settled = await perform_async(self.conn, self._end(settle))
            await self.conn.commit_guarded()
            return settled
        except psycopg.Error:
            self._failed = True  # also if it is the commit that failed, after which no transaction is left to look at
            raise
        finally:
            await self.rollback()

    async def rollback(self) -> None:
        """Undo what was not committed, and let the connection go."""
        if self.conn is not None:
            self._look()
            try:
                await self.conn.rollback_guarded()
            finally:
                await self._leave()

    async def _leave(self) -> None:
        if self.conn is not None:
            conn, self.conn = self.conn, None
            await self._pool.putconn(conn)


class SyncActions:
    """What a handler that runs in a thread can do besides its work."""

    _bus: SyncCommandBus
    _transactions: Pool
    _transaction: SyncHandlerTransaction | None = None
    _leases: Callable[[], set[Lease]]

    def transaction(self) -> SyncHandlerTransaction:
        """`with ctx.transaction() as conn`: see `HandlerContext.transaction`."""
        _refuse_second(self._transaction)
        self._transaction = SyncHandlerTransaction(self._transactions, self._leases())
        return self._transaction

    def send(
        self,
        domain: str,
        command_type: str,
        data: Any = None,
        *,
        command_id: UUID | None = None,
        task_key: str | None = None,
        dedup: Dedup | None = None,
        priority: int = 0,
        run_at: datetime | None = None,
        max_attempts: int | None = None,
        reply_to: str | None = None,
        correlation_id: UUID | None = None,
        batch_id: UUID | None = None,
    ) -> SendResult:
        """Send a command. Within `transaction()` it is sent with the commit: it exists if this execution completes."""
        command = BatchCommand(
            command_type,
            command_id,
            data,
            reply_to=reply_to,
            correlation_id=correlation_id,
            task_key=task_key,
            priority=priority,
            run_at=run_at,
            max_attempts=max_attempts,
        )
        if self._transaction is None or self._transaction.conn is None:
            return self._bus._write(self._bus._requests.send(domain, command, batch_id, dedup))
        command.command_id = command_id or new_id()
        write = self._bus._requests.send(domain, command, batch_id)  # refuses what is wrong before anything is held
        if dedup is not None:
            promised = self._transaction.promised.setdefault(domain, {})
            hold = self._bus._requests.hold(domain, command, dedup, promised)
            held = perform(self._transaction.conn, hold)
            if not held.created:
                return held
            promised[task_key or ""] = held.command_id
        self._transaction.send(write.plan, batch_id)
        return SendResult(write.command_ids[0], created=True)


class SyncHandlerContext(_Context, SyncActions):
    """What a handler written with `def` is given besides its command; it runs in a thread."""

    def __init__(self, leased: Leased, bus: SyncCommandBus, transactions: Pool) -> None:
        self._leased, self._bus, self._transactions = leased, bus, transactions


class SyncChunkContext(_ChunkFacts, SyncActions):
    """What a bulk handler written with `def` is given besides its chunk; see `ChunkContext`."""

    def __init__(self, leased: Sequence[Leased], bus: SyncCommandBus, transactions: Pool) -> None:
        super().__init__(leased)
        self._bus, self._transactions = bus, transactions


class SyncHandlerTransaction(_Transaction):
    """A transaction that ends with the handler; see `HandlerTransaction`."""

    def __init__(self, pool: Pool, leases: set[Lease]) -> None:
        super().__init__(leases)
        self._pool = pool
        self.conn: GuardedConnection | None = None

    def __enter__(self) -> Connection:
        conn = self._pool.getconn()
        assert isinstance(conn, GuardedConnection)
        self.conn = conn
        try:
            self.conn.begin_guarded()
        except BaseException:
            self._leave()
            raise
        return self.conn

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if error is not None:
            self.rollback()
        return False

    def commit(self, settle: Plan[T]) -> T | None:
        """Settle in this transaction and commit it; `Superseded` if the command is not ours any more."""
        if self.conn is None:
            return None
        try:
            refuse_unfinished(self.conn)
            settled = perform(self.conn, self._end(settle))
            self.conn.commit_guarded()
            return settled
        except psycopg.Error:
            self._failed = True  # also if it is the commit that failed, after which no transaction is left to look at
            raise
        finally:
            self.rollback()

    def rollback(self) -> None:
        """Undo what was not committed, and let the connection go."""
        if self.conn is not None:
            self._look()
            try:
                self.conn.rollback_guarded()
            finally:
                self._leave()

    def _leave(self) -> None:
        if self.conn is not None:
            conn, self.conn = self.conn, None
            self._pool.putconn(conn)


def _refuse_second(transaction: object) -> None:
    if transaction is not None:
        raise InvalidOperationError(
            "This execution has its transaction already: it ends with the handler, so there can be only one."
        )
