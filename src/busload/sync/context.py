"""Made from busload.worker.context by scripts/generate_sync.py. Change the source instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Unpack
from uuid import UUID

import psycopg
from psycopg.pq import TransactionStatus

from busload.commands import send
from busload.commands.checks import check_one
from busload.commands.command import SendOptions, SendResult, new_command
from busload.commands.execution import Lease, Leased
from busload.commands.headers import facts_of, in_context
from busload.commands.ids import new_id
from busload.commands.settle import lock
from busload.errors import SupersededError
from busload.postgres import waiting_in_threads as waiting
from busload.postgres.connection import Connection
from busload.postgres.plan import Plan
from busload.postgres.write import only
from busload.settings import InputLimits
from busload.sync.guarded_connection import GuardedConnection, refuse_unfinished
from busload.sync.plan import perform
from busload.sync.pool import Pool

if TYPE_CHECKING:
    from busload.sync.bus import SyncCommandBus


from busload.worker.context import COLLISIONS, T, _chain, _ChunkFacts, _Context, _refuse_second


class Actions:
    """What an async handler can do besides its work."""

    bus: SyncCommandBus
    """The bus of this worker, for what the context does not offer."""
    _transactions: Pool
    own_transaction: SyncHandlerTransaction | None = None
    """What `transaction()` has begun; None if the handler has not asked for one."""
    timed_out = False
    """Whether the time of this call is up: it has failed, and nothing that it still does counts."""
    _leases: Callable[[], set[Lease]]

    @property
    def limits(self) -> InputLimits:
        """How large data and results may be, as the settings of the bus say."""
        return self.bus.settings.limits

    def transaction(self) -> SyncHandlerTransaction:
        """`with ctx.transaction() as conn`: what is written on `conn` commits together with this completion.

        The transaction stays open until the handler returns, so that its result belongs to it; if the handler raises,
        or has lost its command meanwhile, everything is rolled back.
        """
        _refuse_second(self.own_transaction)
        self.own_transaction = SyncHandlerTransaction(self._transactions, self._leases())
        return self.own_transaction

    def send(
        self,
        domain: str,
        command_type: str,
        data: Any = None,
        **options: Unpack[SendOptions],
    ) -> SendResult:
        """Send a command: `domain`, `command_type`, `data` and the options are as in `bus.send`.

        Within `transaction()` the command is sent with the commit: it exists if this execution completes.
        """
        if self.own_transaction is None or self.own_transaction.conn is None:
            return self.bus.send(domain, command_type, data, **options)
        dedup, batch_id = options.pop("dedup", None), options.pop("batch_id", None)
        fair_by = options.pop("fair_by", None)
        command = new_command("send", command_type, data, options, SendOptions)
        command.command_id = command.command_id or new_id()
        checked = check_one(self.bus.settings.limits, domain, command, batch_id, dedup, fair_by)
        if (telemetry := self.bus.database.telemetry) is not None:
            with telemetry.sending("send", domain, **facts_of(checked, batch_id)) as context:
                checked = in_context(checked, context, self.bus.settings.limits)
        if dedup is not None:
            with self.own_transaction.holding:
                promised = self.own_transaction.promised.setdefault(domain, {})
                hold = only(send.hold(domain, [checked], dedup, promised))
                held = perform(self.own_transaction.conn, hold)
                if not held.created:
                    return held
                promised[checked.task_key or ""] = held.command_id
        plan: Plan[Any]
        if batch_id is None and checked.expires_at is None:
            plan = send.send(domain, checked, via=self.bus.via)
        else:
            plan = send.send_many(domain, [checked], batch_id, self.bus.via)
        self.own_transaction.send(plan, batch_id)
        return SendResult(checked.command_id, created=True)


class SyncHandlerContext(_Context, Actions):
    """What an async handler is given besides its command."""

    def __init__(self, leased: Leased, bus: SyncCommandBus, transactions: Pool) -> None:
        self._leased, self.bus, self._transactions = leased, bus, transactions


class SyncChunkContext(_ChunkFacts, Actions):
    """What an async bulk handler is given besides its chunk.

    What is written in its `transaction()` commits together with the results of all commands of the chunk.
    """

    def __init__(self, leased: Sequence[Leased], bus: SyncCommandBus, transactions: Pool) -> None:
        self._commands, self.bus, self._transactions = leased, bus, transactions


class _Transaction:
    """What a handler's transaction does at its end, awaited or not: settle, and after that send.

    The rows of all batches that this counts in, of what is settled and of what is sent, are locked before, in the order
    in which every settlement locks: otherwise handlers of two batches that send into each other's would deadlock.
    """

    conn: Connection | None

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


class SyncHandlerTransaction(_Transaction):
    """A transaction that ends with the handler, and by nobody else.

    What was sent in it is written last, after the settlement: a batch's row is then locked after the lease, as every
    settlement does it, and for no longer than the commit takes.
    """

    def __init__(self, pool: Pool, leases: set[Lease]) -> None:
        super().__init__(leases)
        self._pool = pool
        self.conn: GuardedConnection | None = None
        self.holding = waiting.Lock()

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
        """Settle in this transaction and commit it; `SupersededError` if the command is not ours any more."""
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
