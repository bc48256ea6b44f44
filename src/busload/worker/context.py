"""What a handler is given besides its command."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack
from uuid import UUID

import psycopg
from psycopg.pq import TransactionStatus

from busload.commands import send
from busload.commands.check_commands import check_one
from busload.commands.checks import encoded
from busload.commands.command import SendOptions, SendResult, new_command
from busload.commands.execution import COMPLETED, Lease, Leased, Transition
from busload.commands.headers import facts_of, in_context, joined_headers
from busload.commands.ids import new_id
from busload.commands.send_middleware import around_send
from busload.commands.settle import credited, lock, settle_once
from busload.commands.task_keys import hold_task_keys
from busload.errors import InvalidOperationError, SupersededError
from busload.handlers.calling import Context
from busload.postgres import waiting
from busload.postgres.callers_connection import AnyConnection, perform_any, refuse_without_transaction
from busload.postgres.connection import AsyncConnection, Connection
from busload.postgres.guarded_connection import GuardedAsyncConnection, refuse_unfinished
from busload.postgres.plan import Plan, perform_async
from busload.postgres.pool import AsyncPool
from busload.postgres.write import Write, only
from busload.settings import InputLimits

if TYPE_CHECKING:
    from busload.bus import CommandBus

T = TypeVar("T")
NO_STATE = object()
"""The state of a worker without a lifespan."""
COLLISIONS = "40P01", "40001"
"""Deadlocks, and transactions that cannot be serialized."""


class _Context(Context):
    """Facts about this execution."""

    _leased: Leased
    timed_out: bool

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
        """The batch of this command; None if it has none."""
        return self._leased.lease.batch_id

    @property
    def cancelled(self) -> bool:
        """Whether it would be better to stop: the command or its batch was canceled, its time is up, or it was lost."""
        return self._leased.canceled or self._leased.lease.lost or self.timed_out

    @property
    def headers(self) -> dict[str, str]:
        """Texts by name that were sent beside the data: those of its batch and its own, which win."""
        return joined_headers(self._leased.lease.headers, self._leased.headers) or {}

    def _leases(self) -> set[Lease]:
        return {self._leased.lease}


class _ChunkFacts:
    """Facts about a chunk: its commands may be of several batches, and at different attempts."""

    _commands: Sequence[Leased]
    timed_out: bool

    @property
    def cancelled(self) -> bool:
        """Whether it would be better to stop: the time is up, or every command of the chunk was canceled or lost."""
        return self.timed_out or all(one.canceled or one.lease.lost for one in self._commands)

    def _leases(self) -> set[Lease]:
        return {one.lease for one in self._commands}


class Actions:
    """What an async handler can do besides its work."""

    bus: CommandBus
    """The bus of this worker, for what the context does not offer."""
    _transactions: AsyncPool
    own_transaction: HandlerTransaction | CallersTransaction | None = None
    """What `transaction()` has begun, or where `complete()` was called; None if the handler has done neither."""
    timed_out = False
    """Whether the time of this call is up: it has failed, and nothing that it still does counts."""
    _leases: Callable[[], set[Lease]]
    _state: Any = NO_STATE

    @property
    def state(self) -> Any:
        """What the lifespan of this worker has yielded: `@bus.lifespan`, or `Worker(bus, lifespan=...)`."""
        return given_state(self._state)

    @property
    def limits(self) -> InputLimits:
        """How large data and results may be, as the settings of the bus say."""
        return self.bus.settings.limits

    def transaction(self) -> HandlerTransaction:
        """`async with ctx.transaction() as conn`: what is written on `conn` commits together with this completion.

        The transaction stays open until the handler returns, so that its result belongs to it; if the handler raises,
        or has lost its command meanwhile, everything is rolled back.
        """
        _refuse_second(self.own_transaction)
        self.own_transaction = self._new_transaction()
        return self.own_transaction

    def _new_transaction(self) -> HandlerTransaction:
        return HandlerTransaction(self._transactions, self._leases())

    async def send(
        self,
        domain: str,
        command_type: str,
        data: Any = None,
        **options: Unpack[SendOptions],
    ) -> SendResult:
        """Send a command: `domain`, `command_type`, `data` and the options are as in `bus.send`.

        Within `transaction()` the command is sent with the commit: it exists if this execution completes.
        """
        if not isinstance(self.own_transaction, HandlerTransaction) or self.own_transaction.conn is None:
            return await self.bus.send(domain, command_type, data, **options)
        if not self.bus.around_sends:
            return await self._send_with_commit(self.own_transaction, domain, command_type, data, options)
        headers = options.get("headers")
        with around_send(self.bus.around_sends, "send", domain, headers, command_type) as call:
            options["headers"] = call.headers or headers
            call.result = await self._send_with_commit(self.own_transaction, domain, command_type, data, options)
        result: SendResult = call.result
        return result

    async def _send_with_commit(
        self, transaction: HandlerTransaction, domain: str, command_type: str, data: Any, options: SendOptions
    ) -> SendResult:
        dedup, batch_id = options.pop("dedup", None), options.pop("batch_id", None)
        fair_by = options.pop("fair_by", None)
        command = new_command("send", command_type, data, options, SendOptions)
        command.command_id = command.command_id or new_id()
        checked = check_one(self.bus.settings.limits, domain, command, batch_id, dedup, fair_by, self.bus.data_types)
        if (telemetry := self.bus.database.telemetry) is not None:
            with telemetry.sending("send", domain, **facts_of(checked, batch_id)) as context:
                checked = in_context(checked, context, self.bus.settings.limits)
        if dedup is not None:
            assert transaction.conn is not None
            async with transaction.holding:
                promised = transaction.promised.setdefault(domain, {})
                hold = only(hold_task_keys(domain, [checked], dedup, promised))
                held = await perform_any(transaction.conn, hold)
                if not held.created:
                    return held
                promised[checked.task_key or ""] = held.command_id
        plan: Plan[Any]
        if batch_id is None and checked.expires_at is None and checked.delay is None:
            plan = send.send(domain, checked, via=self.bus.via)
        else:
            plan = send.send_many(domain, [checked], batch_id, self.bus.via)
        transaction.send(plan, batch_id)
        return SendResult(checked.command_id, created=True)


class HandlerContext(_Context, Actions):
    """What an async handler is given besides its command."""

    of_group = False
    """Whether this is the call for a group of a buffer, which ends item by item."""

    def __init__(self, leased: Leased, bus: CommandBus, transactions: AsyncPool, state: Any = NO_STATE) -> None:
        self._leased, self.bus, self._transactions, self._state = leased, bus, transactions, state

    async def complete(self, *, conn: AnyConnection, result: Any = None) -> None:
        """Complete this command, with `result`, in your own transaction: that of an ORM session or another driver.

        `conn` is the connection or session that has the transaction open. Your writes and the completion commit
        together. If your transaction is rolled back, the command is not completed and is tried again. If another worker
        has the command meanwhile, or an earlier transaction of yours has completed it, `SupersededError` is raised: let
        it pass, so that your transaction is rolled back. So the writes of one attempt commit once, also if you repeat a
        transaction whose commit is unclear.

        Call it as the last thing before your commit, since the command and its batch are locked until then, and commit
        before the handler returns. What the handler returns does not count after that.
        """
        _refuse_uncompletable(self)
        refuse_without_transaction(conn)
        details = None if result is None else encoded(result, "/result", self.limits.payload)
        transition = Transition(self._leased, COMPLETED, details, finished=time.monotonic())
        before, self.own_transaction = self.own_transaction, CallersTransaction(self.bus, transition)
        try:
            await self.bus.database.write(Write(_fenced(transition, self.timed_out)), conn)
        except (InvalidOperationError, SupersededError):
            self.own_transaction = before or self.own_transaction  # it is the first that counts
            raise


class ChunkContext(_ChunkFacts, Actions):
    """What an async bulk handler is given besides its chunk.

    What is written in its `transaction()` commits together with the results of all commands of the chunk.
    """

    def __init__(
        self, leased: Sequence[Leased], bus: CommandBus, transactions: AsyncPool, state: Any = NO_STATE
    ) -> None:
        self._commands, self.bus, self._transactions, self._state = leased, bus, transactions, state


class _Transaction:
    """What a handler's transaction does at its end, awaited or not: settle, and after that send.

    The rows of all batches that this counts in, of what is settled and of what is sent, are locked before, in the order
    in which every settlement locks: otherwise handlers of two batches that send into each other's would deadlock.
    """

    conn: Connection | AsyncConnection | None

    def __init__(self, leases: set[Lease]) -> None:
        self._of_leases = leases
        self._sends: list[Plan[Any]] = []
        self._batches: set[UUID] = set()
        self._failed = False
        self.promised: dict[str, dict[str, UUID]] = {}
        """By domain, the task keys that are held for what will be sent."""

    def send(self, plan: Plan[Any], batch_id: UUID | None) -> None:
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
            raise SupersededError("Another worker has this command now; what the handler wrote was rolled back.")
        for sending in self._sends:
            yield from sending
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
        self.holding = waiting.Lock()

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
        """Settle in this transaction and commit it; `SupersededError` if the command is not ours any more."""
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


class CallersTransaction:
    """A transaction of the handler's own, in which the command was completed. Only the database knows how it ended."""

    conn = None

    def __init__(self, bus: CommandBus, transition: Transition) -> None:
        self._bus, self.transition = bus, transition

    async def is_committed(self) -> bool:
        """Whether the completion is in the database, for this attempt."""
        return bool(await self._bus.database.read(credited([self.transition])))

    def collided(self, error: BaseException) -> bool:
        """Whether PostgreSQL has undone it only because others wanted the same rows at the same moment."""
        return any(code in COLLISIONS for one in _chain(error) for code in _codes(one))

    async def rollback(self) -> None:
        """It ends by its owner alone."""


def _codes(error: BaseException) -> tuple[object, object]:
    return getattr(error, "sqlstate", None), getattr(error, "pgcode", None)


def _fenced(transition: Transition, timed_out: bool) -> Plan[None]:
    """Complete the command, if this attempt still holds it and was not recorded before. The database decides that."""
    once = "LOST" if timed_out else (yield from settle_once(transition, now=transition.finished))
    if once == "SAME TRANSACTION":
        raise InvalidOperationError(
            "This transaction has completed the command already: ctx.complete() can be called once in it, and the "
            "first result counts. Commit, or roll back to a savepoint before that call."
        )
    if once == "COMMITTED BEFORE":
        raise SupersededError(
            "This attempt has completed already, in an earlier transaction or by the end of its handler. Roll this "
            "transaction back: let this error pass through it."
        )
    if once == "LOST":
        raise SupersededError(
            "Another worker has this command now, or the time of the handler is up. Roll your transaction back: let "
            "this error pass through it."
        )


def _refuse_uncompletable(context: HandlerContext) -> None:
    if context.of_group:
        raise InvalidOperationError(
            "ctx.complete() is for one command, and this is a group of a buffer. Use ctx.transaction(), or return."
        )
    if isinstance(context.own_transaction, HandlerTransaction):
        raise InvalidOperationError(
            "This execution has its transaction already, by ctx.transaction(): it completes the command when the "
            "handler returns. Use that one, or your own with ctx.complete(conn=...), and not both."
        )


def given_state(state: Any) -> Any:
    """The state of a worker; refuses if it has none."""
    if state is NO_STATE:
        raise InvalidOperationError(
            "No lifespan was opened for this handler, so it has no ctx.state. Declare one by `@bus.lifespan`, or pass "
            "Worker(bus, lifespan=...). In a test, run_handler and calls with conn= open none: pass them state=..., as "
            "in run_handler(..., state=engine), drain(bus, conn=conn, state=engine) or eager(bus, state=engine)."
        )
    return state


def _refuse_second(transaction: object) -> None:
    if transaction is not None:
        raise InvalidOperationError(
            "This execution has its transaction already: it ends with the handler, so there can be only one."
        )
