"""CommandBus and SyncCommandBus: send commands, follow their batches, operate on what went wrong.

The two stand side by side: every call is checked and planned in `requests.py`, and performed here, awaited or not.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Self, TypeVar
from uuid import UUID

import psycopg

from busload.announcer import Announcer
from busload.announcing import recover
from busload.buffer import Buffer, SyncBuffer
from busload.completion import AsyncCompletions, Completions
from busload.dispatch import Dispatcher
from busload.domain import message
from busload.domain.batch import BatchCompletionCallback, BatchMetadata, SyncBatchCompletionCallback
from busload.domain.buffer import BufferSettings, BufferStatus, BufferTable, Merge, OnExhausted
from busload.domain.command import (
    AuditEvent,
    BatchCommand,
    Command,
    CommandMetadata,
    SendResult,
)
from busload.domain.counted import counted
from busload.domain.dedup import Dedup
from busload.domain.dispatch import DispatchReport, Recovered, Strategy
from busload.domain.execution import Execution
from busload.domain.explanation import Explanation
from busload.domain.job import JobMetadata, Stage
from busload.domain.pause import Pause
from busload.domain.rate import LimitStatus, RateLimit
from busload.domain.retention import Pruned
from busload.domain.retry import RetryPolicy
from busload.errors import (
    BatchNotFoundError,
    BusloadError,
    DatabaseUnavailable,
    InvalidOperationError,
    JobNotFoundError,
    LockWaitTimeout,
    OutcomeUnknown,
    PartlyDone,
    TransportMisconfigured,
    kind_of,
    nothing_written,
)
from busload.handlers import Function, Handlers, gather
from busload.lock_wait import LockWait, waiting_parts
from busload.open_batch import OpenBatch, SyncOpenBatch
from busload.outbox import Outbox, SyncOutbox
from busload.requests import Requests, Write, in_pages
from busload.sending import Sending
from busload.settings import Settings
from busload.store import cancel, connection, report
from busload.store.connection import AsyncConnection, Connection
from busload.store.embedded import EmbeddedPostgres
from busload.store.listen import BATCH
from busload.store.plan import Plan, perform, perform_async
from busload.store.pool import AsyncPool, Pool, async_pool, pool
from busload.store.schema import migrate
from busload.store.schema.migrate import Migration
from busload.store.send import NO_BROKER, Via, lock_holders
from busload.transport import Transport, find_transport
from busload.troubleshooting import SyncTroubleshooting, Troubleshooting

log = logging.getLogger("busload")

T = TypeVar("T")

QUEUE_PREFIX = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,99}")
ENVELOPE_SIZES = range(1, 10_001)
"""How many commands one message may tell of."""


class Bus:
    """What both faces share: where the database is, the handlers, and the checks."""

    def __init__(
        self,
        dsn: str | None = None,
        *,
        transport: Transport | str | None = None,
        dispatch: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        if not isinstance(settings, Settings | None):
            raise ValueError(f"settings must be a Settings, found {kind_of(settings)}.")
        self.settings = settings or Settings()
        self.handlers = Handlers()
        transport = self.settings.transport_url if transport is None else transport
        if not isinstance(transport, Transport | str | None):
            raise ValueError(f"transport must be a URL or a Transport, found {kind_of(transport)}.")
        self.transport = find_transport(transport) if isinstance(transport, str) else transport
        self.dispatch = _strategy(dispatch or self.settings.dispatch, self.transport)
        _check_messages(self.settings)
        self._dsn = self.settings.database_url if dsn is None else dsn
        if not isinstance(self._dsn, str | None):
            raise ValueError(
                f"The DSN must be text, found {kind_of(self._dsn)}. Pass "
                f"{'it as settings=' if isinstance(self._dsn, Settings) else 'the text of it'}."
            )
        self._embedded: EmbeddedPostgres | None = None
        self._via = Via(self.transport.name) if self.transport else NO_BROKER
        self._requests = Requests(self.settings.limits, awaits=isinstance(self, CommandBus), via=self._via)
        self._schema_checked = False
        self._process = os.getpid()
        self._buffers: dict[str, BufferSettings] = {}

    @property
    def dsn(self) -> str:
        """Where the database is; known once the bus is open."""
        if self._dsn is None:
            raise InvalidOperationError("The bus is not open. Use it in `with` or `async with`, or open() it first.")
        return self._dsn

    def handler(
        self,
        domain: str,
        command_type: str,
        *,
        retry: RetryPolicy | None = None,
        timeout: timedelta | float | None = None,
        rate_limit: RateLimit | None = None,
    ) -> Callable[[Function], Function]:
        """Register the function below to run these commands; it is returned unchanged.

        It is called with the `Command` and a `HandlerContext`, and may be `async def` or `def`, which runs in a thread.
        What it returns is kept as the command's result. With `rate_limit` it is called no more often than that, by all
        workers together.
        """
        return self.handlers.register(domain, command_type, retry=retry, timeout=timeout, rate_limit=rate_limit)

    def _declare(self, settings: BufferSettings) -> BufferSettings:
        """A buffer may be named in several places, but it is one and the same."""
        known = self._buffers.setdefault(settings.name, settings)
        if known != settings:
            raise InvalidOperationError(
                f"The buffer {settings.name!r} was declared before with other settings: {known}. "
                "Declare it once and use what bus.buffer() returns."
            )
        return known

    def bulk_handler(
        self,
        domain: str,
        command_type: str,
        *,
        size: int = 1000,
        max_wait: timedelta | float = timedelta(seconds=2),
        max_bytes: int | None = None,
        by: Callable[[Command], object] | None = None,
        retry: RetryPolicy | None = None,
        timeout: timedelta | float | None = None,
        isolate_poison: bool = False,
        rate_limit: RateLimit | None = None,
    ) -> Callable[[Function], Function]:
        """Register the function below to run these commands in chunks: one call for up to `size` of them.

        It is called with a `Chunk` and a `ChunkContext` once `size` commands were claimed, or `max_bytes` of data, or
        `max_wait` after the first one. `by` tells what the commands of a chunk must have in common. If it returns, all
        are completed, with what it returns as their result; if it raises, all are tried again; `chunk.succeed` and
        `chunk.fail` judge one by one. Each command has its own attempts, result and batch, as with `handler`.
        """
        gathering = gather(size=size, max_wait=max_wait, max_bytes=max_bytes, by=by)
        return self.handlers.register(
            domain,
            command_type,
            retry=retry,
            timeout=timeout,
            rate_limit=rate_limit,
            isolate_poison=isolate_poison,
            gathering=gathering,
        )

    def planner(
        self,
        domain: str,
        stage: str,
        *,
        retry: RetryPolicy | None = None,
        timeout: timedelta | float | None = None,
    ) -> Callable[[Function], Function]:
        """Register the function below to plan stages of this name, of any job in the domain; it is returned unchanged.

        It is called with a `FinishedStage`, the one before, and a `HandlerContext`, and returns the `BatchCommand`s of
        its stage; none, and the stage is skipped. It may be `async def` or `def`, which runs in a thread. Like any
        handler it may be called again if it fails or its worker dies: what it has planned begins once.
        """
        return self.handlers.register_planner(domain, stage, retry=retry, timeout=timeout)

    def _refuse_after_fork(self) -> None:
        """Two processes on one connection would read each other's answers."""
        if self._process != os.getpid():
            raise InvalidOperationError("This bus was opened before a fork. Open a bus of its own in each process.")

    def _find_database(self) -> None:
        self._process = os.getpid()
        if self._dsn is None:
            self._embedded = EmbeddedPostgres(self.settings.home, pg_bin=self.settings.pg_bin).start()
            self._dsn = self._embedded.dsn()

    def _leave_database(self) -> None:
        if self._embedded is not None:
            self._embedded.close()
            self._embedded, self._dsn = None, None


class CommandBus(Bus):
    """Send commands and follow their batches.

    Without a DSN it uses `BUSLOAD_DATABASE_URL`, and without that an embedded PostgreSQL. Pass `conn` to join a
    transaction of your own: what you send then exists exactly if that transaction commits. Without it, each call opens
    and commits its own, and has happened when it returns.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        transport: Transport | str | None = None,
        dispatch: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        super().__init__(dsn, transport=transport, dispatch=dispatch, settings=settings)
        self.troubleshooting = Troubleshooting(self)
        self.outbox = Outbox(self)
        self._pool: AsyncPool | None = None
        self._first_tries, self._waiting_room = map(asyncio.Semaphore, waiting_parts(self.settings.pool_size))
        self._sending: Sending | None = None
        self._completions: AsyncCompletions | None = None
        self._announces: Announcer | None = None

    @property
    def pool(self) -> AsyncPool:
        """The connections of an open bus: `bus.pool.connection()`. They are psycopg's, in autocommit mode."""
        if self._pool is None:
            raise InvalidOperationError("The bus is not open. Use it in `async with`, or await its open() first.")
        self._refuse_after_fork()
        return self._pool

    async def open(self, *, wait: timedelta | float | None = 0) -> Self:
        """Find the database, and see that it can be used: what is wrong with the DSN or the server is told here.

        A server that cannot be reached is waited for as long as `wait` says, in seconds if it is a number. With None
        it is not looked for: the bus opens while its database is away, and calls find it when it is back.
        """
        if self._pool is None:
            await asyncio.to_thread(self._find_database)
            if wait is not None:
                await self._look_for_database(wait)
            settings = self.settings
            self._pool = async_pool(
                self.dsn,
                settings.pool_size,
                timeout=settings.pool_timeout.total_seconds(),
                response_timeout=settings.response_timeout.total_seconds(),
            )
            self._first_tries, self._waiting_room = map(asyncio.Semaphore, waiting_parts(settings.pool_size))
            self._sending = Sending(self._write, self._via, lines=max(1, settings.pool_size // 2))
            self._completions = AsyncCompletions(
                self.dsn, self._existing_batches, self.settings.poll_every.total_seconds()
            )
        return self

    async def _look_for_database(self, wait: timedelta | float) -> None:
        try:
            await connection.look_async(self.dsn, _seconds(wait) or 0.0)
        except BaseException:
            self._leave_database()
            raise

    async def close(self) -> None:
        if self._sending is not None:
            await self._sending.close()
        if self._completions is not None:
            await self._completions.close()
        if self.transport is not None:
            await self.transport.aclose()
        if self._pool is not None:
            await self._pool.close()
        self._pool, self._sending, self._completions, self._schema_checked = None, None, None, False
        self._announces = None
        self._leave_database()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def migrate(self, *, conn: AsyncConnection | Connection | None = None) -> list[Migration]:
        """Bring the database's schema up to this release; safe to run from many processes at once.

        Where nothing is missing it needs no more than the right to read `busload.migration`. With `conn` the schema
        exists exactly if that transaction commits.
        """
        if conn is not None:
            return await self._join(conn, migrate.migrate(), any_schema=True)
        async with await connection.connect_async(self.dsn) as own, own.transaction():
            connection.refuse_server(own)
            return await perform_async(own, migrate.migrate())

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
        conn: AsyncConnection | Connection | None = None,
    ) -> SendResult:
        """Send one command. With `batch_id` it joins a batch that is still open, whose total rises with it.

        Calls that are under way at once share a transaction, unless they have `batch_id` or `conn`: a thousand senders
        cost little more than ten. Each returns when its own command is committed, and fails alone.

        With `dedup` it is sent only if no other command holds its `task_key`; the result then names the holder.
        """
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
        return await self._send(domain, command, batch_id, conn, dedup)

    async def send_many(
        self,
        domain: str,
        commands: Iterable[BatchCommand],
        *,
        batch_id: UUID | None = None,
        dedup: Dedup | None = None,
        conn: AsyncConnection | Connection | None = None,
    ) -> list[SendResult]:
        """Send many commands, all or none; results come in the order of the input.

        With `dedup`, those whose task key another command holds are left out, and their results name the holder.
        """
        return await self._write(self._requests.send_many(domain, commands, batch_id, dedup), conn)

    async def create_batch(
        self,
        domain: str,
        commands: Iterable[BatchCommand],
        *,
        batch_id: UUID | None = None,
        name: str | None = None,
        custom_data: dict[str, Any] | None = None,
        on_complete: BatchCompletionCallback | BatchCommand | None = None,
        dedup: Dedup | None = None,
        job_id: UUID | None = None,
        stage: str | None = None,
        dispatch: str | None = None,
        checkpoint_size: int = 1000,
        conn: AsyncConnection | Connection | None = None,
    ) -> UUID:
        """Create a batch with all its commands in one transaction, and return its id.

        `on_complete` is called, or if it is a `BatchCommand` sent, once every command has ended. The command is
        durable: it is inserted by the transaction that ends the last one, in the batch's domain, with the completed
        batch under the key "batch" of its data. The function is best effort: it lives and dies with this process.

        With `dedup`, commands whose task key another one holds are left out, also of the total; if none is left, the
        batch completes at once. `job_id` and `stage` are for you to find it by; `create_job` sets them itself.

        On a bus with a transport `dispatch` says how the commands are announced, and `get_dispatch` how that went:
        "two_phase" by default; "checkpoint" for more than 10,000, in transactions of `checkpoint_size` commands each,
        where repeating the call with the same `batch_id` goes on after `DispatchIncomplete` or a crash; "optimistic";
        or "relay", by a worker, which is how it is with `conn` or `dedup`.
        """
        joins, once = conn is not None, dedup is not None
        strategy = self._requests.strategy(dispatch, self.dispatch, joins=joins, dedup=once)
        about: dict[str, Any] = {
            "batch_id": batch_id,
            "name": name,
            "custom_data": custom_data,
            "on_complete": on_complete,
            "job_id": job_id,
            "stage": stage,
            "checkpoint_size": checkpoint_size,
        }
        if strategy is Strategy.RELAY:
            write = self._requests.create_batch(domain, commands, dedup=dedup, **about)
            created = await self._write(write, conn)
        else:
            order = self._requests.order(domain, commands, strategy=strategy, **about)
            created = await Dispatcher(self._announcer(), self._write, self._perform_alone).create(order)
        self._register(created, on_complete)
        return created

    def open_batch(
        self,
        domain: str,
        *,
        batch_id: UUID | None = None,
        name: str | None = None,
        custom_data: dict[str, Any] | None = None,
        on_complete: BatchCompletionCallback | BatchCommand | None = None,
        checkpoint_size: int = 1000,
        dedup: Dedup | None = None,
        job_id: UUID | None = None,
        stage: str | None = None,
        conn: AsyncConnection | Connection | None = None,
    ) -> OpenBatch:
        """A batch to fill over time: `async with bus.open_batch(...) as batch: await batch.add(...)`.

        Commands leave in checkpoints, each a transaction of its own, and run while the next ones are added. The batch
        is sealed when the block ends and cannot complete before. If the block raises, it stays open: the checkpoints
        that were written run on, and you may add to it by `send(batch_id=...)`, seal it by `seal_batch` or cancel it.
        """
        write = self._requests.open_batch(
            domain,
            batch_id=batch_id,
            name=name,
            custom_data=custom_data,
            on_complete=on_complete,
            dedup=dedup,
            job_id=job_id,
            stage=stage,
        )
        return OpenBatch(self, domain, write, on_complete, checkpoint_size, dedup, conn)

    async def seal_batch(
        self, domain: str, batch_id: UUID, *, conn: AsyncConnection | Connection | None = None
    ) -> bool:
        """Let an open batch complete; returns False if it was sealed already."""
        return await self._write(self._requests.seal(domain, batch_id), conn)

    async def get_batch(self, domain: str, batch_id: UUID) -> BatchMetadata | None:
        return await self._read(self._requests.get_batch(domain, batch_id))

    async def get_dispatch(self, domain: str, batch_id: UUID) -> DispatchReport | None:
        """How the creation of a batch was announced to the broker, and what of it still waits for that.

        None without a broker, and for what `open_batch` opened: that is announced as it is added, not created at once.
        """
        return await self._read(self._requests.get_dispatch(domain, batch_id))

    async def list_batches(
        self,
        domain: str,
        *,
        status: str | None = None,
        job_id: UUID | None = None,
        limit: int = 100,
        offset: int = 0,
        after: UUID | None = None,
    ) -> list[BatchMetadata]:
        """Newest first. `after`, the last batch of the page before, pages without drift while batches are created."""
        return await self._read(
            self._requests.list_batches(domain, status=status, limit=limit, offset=offset, after=after, job_id=job_id)
        )

    async def list_batch_commands(
        self,
        domain: str,
        batch_id: UUID,
        *,
        status: str | None = None,
        limit: int = 100,
        offset: int = 0,
        after: UUID | None = None,
    ) -> list[CommandMetadata]:
        """In the order in which they were added; `after` is the last command of the page before."""
        return await self._read(
            self._requests.list_batch_commands(domain, batch_id, status=status, limit=limit, offset=offset, after=after)
        )

    async def cancel_batch(
        self,
        domain: str,
        batch_id: UUID,
        *,
        reason: str,
        operator: str | None = None,
        conn: AsyncConnection | Connection | None = None,
    ) -> int:
        """Cancel what has not started yet, and return how many commands that was. The batch takes no more commands.

        Running commands are asked to stop and finish: taking a lease away would leave their side effects half done.
        What waits in troubleshooting stays there for its operator.

        It takes many small transactions, so a large batch keeps nobody waiting; meanwhile no worker claims commands of
        it. If this process dies, a worker goes on. With `conn` it is all one transaction: yours.
        """
        if conn is None:
            canceling = self._requests.cancel_batch_in_pages(domain, batch_id, reason=reason, operator=operator)
            return await self._cancel(canceling, batch_id=batch_id)
        return await self._write(self._requests.cancel_batch(domain, batch_id, reason=reason, operator=operator), conn)

    async def wait_batch(self, domain: str, batch_id: UUID, timeout: timedelta | float | None = None) -> BatchMetadata:
        """Return the batch once it is complete; `TimeoutError` says how far it came."""
        batch: BatchMetadata | None = None
        try:
            async with asyncio.timeout(_seconds(timeout)):
                async for seen in self.watch_batch(domain, batch_id):
                    batch = seen
        except TimeoutError:
            raise _late(batch_id, batch, timeout) from None
        assert batch is not None
        return batch

    async def watch_batch(self, domain: str, batch_id: UUID) -> AsyncIterator[BatchMetadata]:
        """Yield the batch now, whenever its counters have changed, and last when it is complete."""
        completions = self._completions
        if completions is None:
            raise InvalidOperationError("The bus is not open. Use it in `async with`, or await its open() first.")
        changed = completions.watch(batch_id)
        try:
            last: BatchMetadata | None = None
            while True:
                changed.clear()
                batch = await self.get_batch(domain, batch_id)
                if batch is None:
                    raise BatchNotFoundError(domain, batch_id)
                if batch != last:
                    last = batch
                    yield batch
                if batch.status.final:
                    return
                try:
                    async with asyncio.timeout(self.settings.poll_every.total_seconds()):
                        await changed.wait()
                except TimeoutError:
                    pass
        finally:
            completions.unwatch(batch_id, changed)

    async def create_job(
        self,
        domain: str,
        stages: Iterable[Stage],
        *,
        job_id: UUID | None = None,
        name: str | None = None,
        custom_data: dict[str, Any] | None = None,
        on_complete: BatchCommand | None = None,
        continue_after_failures: bool = False,
        conn: AsyncConnection | Connection | None = None,
    ) -> UUID:
        """Create a job with its first batch in one transaction, and return its id.

        Each stage becomes a batch once the one before is complete; a stage without commands is planned then, by the
        `planner` of its name. A stage that completes with failures stops the job as FAILED, unless
        `continue_after_failures`. `on_complete` is sent when the job is COMPLETED, with the job under the key "job" of
        its data.
        """
        write = self._requests.create_job(
            domain,
            stages,
            job_id=job_id,
            name=name,
            custom_data=custom_data,
            on_complete=on_complete,
            continue_after_failures=continue_after_failures,
        )
        return await self._write(write, conn)

    async def get_job(self, domain: str, job_id: UUID) -> JobMetadata | None:
        return await self._look(self._requests.get_job(domain, job_id))

    async def list_jobs(
        self, domain: str, *, status: str | None = None, limit: int = 100, offset: int = 0
    ) -> list[JobMetadata]:
        """Newest first."""
        return await self._look(self._requests.list_jobs(domain, status=status, limit=limit, offset=offset))

    async def resume_job(
        self,
        domain: str,
        job_id: UUID,
        *,
        operator: str | None = None,
        conn: AsyncConnection | Connection | None = None,
    ) -> None:
        """Let a FAILED job go on with its next stage; after the last one it is COMPLETED.

        So does a job whose step to the next stage an operator has completed or canceled in troubleshooting.
        """
        await self._write(self._requests.resume_job(domain, job_id, operator=operator), conn)

    async def cancel_job(
        self,
        domain: str,
        job_id: UUID,
        *,
        reason: str,
        operator: str | None = None,
        conn: AsyncConnection | Connection | None = None,
    ) -> int:
        """Stop a job and cancel the batch of its stage, as `cancel_batch` does; no further stage begins.

        Returns how many commands were canceled. A job that is COMPLETED or CANCELED is left as it is.
        """
        if conn is None:
            canceling = self._requests.cancel_job_in_pages(domain, job_id, reason=reason, operator=operator)
            return await self._cancel(canceling, job_id=job_id)
        return await self._write(self._requests.cancel_job(domain, job_id, reason=reason, operator=operator), conn)

    async def wait_job(self, domain: str, job_id: UUID, timeout: timedelta | float | None = None) -> JobMetadata:
        """Return the job once it is COMPLETED, FAILED or CANCELED; `TimeoutError` says how far it came."""
        completions = self._completions
        if completions is None:
            raise InvalidOperationError("The bus is not open. Use it in `async with`, or await its open() first.")
        changed = completions.watch(job_id)
        job: JobMetadata | None = None
        seconds = _seconds(timeout)
        try:
            async with asyncio.timeout(seconds or None):
                while True:
                    changed.clear()
                    job = await self.get_job(domain, job_id)
                    if job is None:
                        raise JobNotFoundError(domain, job_id)
                    if job.status.final:
                        return job
                    if seconds == 0:  # then one look is all there is time for
                        raise TimeoutError
                    try:
                        async with asyncio.timeout(self.settings.poll_every.total_seconds()):
                            await changed.wait()
                    except TimeoutError:
                        pass
        except TimeoutError:
            raise _late_job(job_id, job) from None
        finally:
            completions.unwatch(job_id, changed)

    async def get_command(self, domain: str, command_id: UUID) -> CommandMetadata | None:
        return await self._read(self._requests.get_command(domain, command_id))

    async def get_audit_trail(self, domain: str, command_id: UUID) -> list[AuditEvent]:
        """Everything that happened to a command, oldest first; empty for an unknown one."""
        return await self._read(self._requests.get_audit_trail(domain, command_id))

    async def trace(self, task_key: str, *, domain: str | None = None) -> list[Execution]:
        """Every attempt of every command that was sent for a task, oldest first; empty for an unknown one."""
        return await self._read(self._requests.trace(task_key, domain=domain))

    async def get_batch_audit_trail(self, domain: str, batch_id: UUID) -> list[AuditEvent]:
        """What happened to the batch itself: started, sealed, stalled, canceled, completed."""
        return await self._read(self._requests.get_batch_audit_trail(domain, batch_id))

    async def prune(self, older_than: timedelta, *, archive: bool = False, dry_run: bool = False) -> Pruned:
        """Remove commands of all domains that ended so long ago, and say how much that was.

        Their executions and events go with them; those of a batch go with their batch, once it is complete and its
        callback has ended. What is open stays, whatever its age. It takes many small transactions, so it may run beside
        the workers, and be interrupted: the next one goes on. With `archive` it all moves to `busload.archive` and
        `busload.archived_batch`; with `dry_run` it is only counted.
        """
        pruning = self._requests.prune(older_than, archive=archive, dry_run=dry_run)
        for plan in pruning.plans():
            await self._perform_alone(plan)
        return pruning.pruned

    async def _perform_alone(self, plan: Plan[T]) -> T:
        """In a transaction of its own. One that may be repeated: if its end is unknown, it does not matter."""
        async with self.pool.connection() as conn:
            await self._check_schema(conn)
            async with conn.transaction():
                return await perform_async(conn, plan)

    def _announcer(self) -> Announcer:
        """What announces for this bus and the worker that runs on it; the transport is closed with the bus."""
        if self.transport is None:
            raise InvalidOperationError("The bus has no transport. Give it one: CommandBus(dsn, transport=URL).")
        if self._announces is None:
            settings, key = self.settings, self.settings.message_key
            self._announces = Announcer(
                self.transport,
                self._perform_alone,
                prefix=settings.queue_prefix,
                envelope_size=settings.envelope_size,
                message_per_command=settings.message_per_command,
                key=None if key is None else key.encode(),
            )
        return self._announces

    async def recover(self, *, ring_again_after: timedelta = timedelta(minutes=5)) -> Recovered:
        """Announce now what waits in the outbox, and again what was announced that long ago and never claimed.

        Workers do so by themselves; this is for scripts and tests, and for applications without a worker of ours.
        """
        announcer = self._announcer()
        await self._perform_alone(self._requests.recover(ring_again_after))
        return await recover(announcer, self._perform_alone, ring_again_after=ring_again_after)

    async def explain_batch(self, domain: str, batch_id: UUID) -> Explanation:
        """Why a batch is not finished: each reason with count, since when, and what to do. A healthy one has an ETA."""
        return await self._look(self._requests.explain_batch(domain, batch_id))

    async def explain_command(self, domain: str, command_id: UUID) -> Explanation:
        """The same for one command."""
        return await self._look(self._requests.explain_command(domain, command_id))

    async def pause(
        self,
        domain: str,
        *,
        reason: str | None = None,
        operator: str | None = None,
        conn: AsyncConnection | Connection | None = None,
    ) -> bool:
        """Let nothing new start in a domain: what runs finishes, what is sent waits. False: it was paused already.

        Workers hear of it at once, or within `sweep_every` if the notification is lost. Until then a worker may claim
        once more; once it has heard, it starts nothing, and what it holds but has not begun goes back.
        """
        paused = await self._write(self._requests.pause(domain, reason=reason, operator=operator), conn)
        _tell("Paused", paused, domain, operator)
        return paused

    async def resume(
        self, domain: str, *, operator: str | None = None, conn: AsyncConnection | Connection | None = None
    ) -> bool:
        """Let a paused domain go on. False: it was not paused."""
        resumed = await self._write(self._requests.resume(domain, operator=operator), conn)
        _tell("Resumed", resumed, domain, operator)
        return resumed

    def buffer(
        self,
        name: str,
        *,
        size: int = 1000,
        max_age: timedelta = timedelta(minutes=2),
        max_groups: int = 20,
        max_bytes: int | None = None,
        partition_by: str | None = None,
        merge: Merge | None = None,
        archive: bool = False,
        on_exhausted: OnExhausted = "troubleshoot",
        table: str | BufferTable | None = None,
    ) -> Buffer:
        """Events that are added one at a time and leave in groups: one call of its handler for up to `size` of them.

        A group leaves when it is full, has `max_bytes`, or its oldest event is `max_age` old; at most `max_groups` wait
        in the queue for a worker. `partition_by` keeps what differs in a key of the payload, or in a column, in
        different groups. With `merge`, each event has a key, and those of one key become one: "keep_last",
        "keep_first", or a function of the older and the newer payload. `table` is a table of your own that holds the
        events. With `archive` events that are done are kept in `busload.buffer_archive`.
        """
        settings = BufferSettings(
            name,
            size=size,
            max_age=max_age,
            max_groups=max_groups,
            max_bytes=max_bytes,
            partition_by=partition_by,
            merge=merge,
            archive=archive,
            on_exhausted=on_exhausted,
            table=BufferTable(table) if isinstance(table, str) else table,
        )
        return Buffer(self, self._declare(settings))

    async def list_buffers(self) -> list[BufferStatus]:
        """Every buffer that a worker has served or in which events wait, and how it is doing."""
        return await self._look(self._requests.list_buffers())

    async def list_limits(self, name: str | None = None, *, limit: int = 100) -> list[LimitStatus]:
        """Every rate limit that was used within a day, or those of one name: the rate now, and what was refused."""
        return await self._read(self._requests.list_limits(name, limit=limit))

    async def reset_limit(self, name: str, by: str | None = None) -> int:
        """Let calls under a limit go again at once, though its receiver has refused some; returns how many limits.

        `by` is what its function of that name returns, as text; without it, all its values are meant.
        """
        return await self._write(self._requests.reset_limit(name, by), None)

    async def list_pauses(self) -> list[Pause]:
        """Every domain that is paused: since when, by whom and why."""
        return await self._read(self._requests.list_pauses())

    async def pause_history(self, domain: str | None = None, *, limit: int = 100) -> list[Pause]:
        """The pauses of a domain or of all, also those that are over: who paused and who resumed; newest first."""
        return await self._read(self._requests.pause_history(domain, limit=limit))

    def _register(self, batch_id: UUID, on_complete: BatchCompletionCallback | BatchCommand | None) -> None:
        if on_complete is not None and not isinstance(on_complete, BatchCommand):
            assert self._completions is not None
            self._completions.call(batch_id, on_complete)

    async def _existing_batches(self, batch_ids: Sequence[UUID]) -> list[BatchMetadata]:
        return await self._read(report.existing_batches(batch_ids)) if batch_ids else []

    async def _read(self, plan: Plan[T]) -> T:
        async with self.pool.connection() as conn:
            await self._check_schema(conn)
            return await perform_async(conn, plan)

    async def _look(self, plan: Plan[T]) -> T:
        """Read by several statements, in a transaction of their own."""
        async with self.pool.connection() as conn:
            await self._check_schema(conn)
            async with conn.transaction():
                return await perform_async(conn, plan)

    async def _send(
        self,
        domain: str,
        command: BatchCommand,
        batch_id: UUID | None = None,
        conn: AsyncConnection | Connection | None = None,
        dedup: Dedup | None = None,
    ) -> SendResult:
        if conn is not None or batch_id is not None or dedup is not None:
            return await self._write(self._requests.send(domain, command, batch_id, dedup), conn)
        checked = self._requests.check(domain, command)
        if self._sending is None:
            raise InvalidOperationError("The bus is not open. Use it in `async with`, or await its open() first.")
        self._refuse_after_fork()
        await self._sending.send(domain, checked, chosen=command.command_id is not None)
        return SendResult(checked.command_id, created=True)

    async def _write(self, write: Write[T], conn: AsyncConnection | Connection | None = None) -> T:
        if conn is not None:
            return await self._join(conn, write.plan)
        if write.again is not None:
            return await self._write_patiently(write, write.again)
        pool = self.pool
        own = await _connection_async(pool, write)
        try:
            await self._check_schema(own)
            return await self._commit(own, write)
        finally:
            await pool.putconn(own)

    async def _cancel(
        self, canceling: cancel.Canceling, *, batch_id: UUID | None = None, job_id: UUID | None = None
    ) -> int:
        done: int | None = None
        try:
            for write in in_pages(canceling, batch_id=batch_id, job_id=job_id):
                await self._write(write)
                done = canceling.canceled
        except (BusloadError, psycopg.Error) as error:
            if done is None:
                raise
            raise _partly_canceled(done, error, batch_id, job_id) from error
        return canceling.canceled

    async def _write_patiently(self, write: Write[T], again: Callable[[], Plan[T]]) -> T:
        """Try until the transaction ends that holds what this needs, and have no connection in between.

        First tries, and those that know that they wait, use a part of the pool each: the rest is for all other calls.
        """
        pool, waits = self.pool, LockWait(self.settings.lock_timeout)
        room = self._first_tries
        while True:
            async with room:
                own = await _connection_async(pool, write)
                try:
                    await self._check_schema(own)
                    return await self._commit(own, replace(write, plan=again()))
                except psycopg.errors.LockNotAvailable as error:
                    if waits.over:
                        holders = await perform_async(own, lock_holders(waits.limit))
                        raise LockWaitTimeout(waits.limit, holders) from error
                finally:
                    await pool.putconn(own)
            room = self._waiting_room
            await asyncio.sleep(waits.pause())

    async def _join(self, conn: AsyncConnection | Connection, plan: Plan[T], *, any_schema: bool = False) -> T:
        """In the caller's transaction, which a failure does not spoil."""
        connection.refuse_unusable(conn, psycopg.AsyncConnection, psycopg.Connection)
        if isinstance(conn, psycopg.Connection):
            if connection.about_to_begin(conn):
                conn.execute("SELECT")
            with conn.transaction():
                if not any_schema:
                    await self._check_schema(conn)
                return perform(conn, plan)
        if connection.about_to_begin(conn):
            await conn.execute("SELECT")
        async with conn.transaction():
            if not any_schema:
                await self._check_schema(conn)
            return await perform_async(conn, plan)

    async def _commit(self, conn: AsyncConnection, write: Write[T]) -> T:
        """A transaction whose COMMIT can be told from its statements when the connection breaks."""
        committing = write.one_statement
        try:
            if write.one_statement:
                return await perform_async(conn, write.plan)
            async with conn.transaction():
                result = await perform_async(conn, write.plan)
                committing = True
            return result
        except psycopg.Error as error:
            if write.goes_on:
                raise
            if not _connection_lost(error):
                raise nothing_written(error) from error
            if not committing:
                raise _broken(error) from error
            raise OutcomeUnknown(batch_id=write.batch_id, command_ids=write.command_ids, job_id=write.job_id) from error

    async def _check_schema(self, conn: AsyncConnection | Connection) -> None:
        """On the connection of the call that needs it: to wait for another one might be to wait for oneself."""
        if self._schema_checked:
            return
        connection.refuse_server(conn)
        if isinstance(conn, psycopg.Connection):
            perform(conn, migrate.check())
        else:
            await perform_async(conn, migrate.check())
        self._schema_checked = True


class SyncCommandBus(Bus):
    """`CommandBus` for code without an event loop; there is none hidden in it."""

    def __init__(
        self,
        dsn: str | None = None,
        *,
        transport: Transport | str | None = None,
        dispatch: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        super().__init__(dsn, transport=transport, dispatch=dispatch, settings=settings)
        self.troubleshooting = SyncTroubleshooting(self)
        self.outbox = SyncOutbox(self)
        self._pool: Pool | None = None
        self._first_tries, self._waiting_room = map(threading.Semaphore, waiting_parts(self.settings.pool_size))
        self._completions: Completions | None = None

    @property
    def pool(self) -> Pool:
        """The connections of an open bus: `bus.pool.connection()`. They are psycopg's, in autocommit mode."""
        if self._pool is None:
            raise InvalidOperationError("The bus is not open. Use it in `with`, or call its open() first.")
        self._refuse_after_fork()
        return self._pool

    def open(self, *, wait: timedelta | float | None = 0) -> Self:
        """Find the database, and see that it can be used; see `CommandBus.open`."""
        if self._pool is None:
            self._find_database()
            if wait is not None:
                self._look_for_database(wait)
            settings = self.settings
            self._pool = pool(
                self.dsn,
                settings.pool_size,
                timeout=settings.pool_timeout.total_seconds(),
                response_timeout=settings.response_timeout.total_seconds(),
            )
            self._completions = Completions(self.dsn, self._existing_batches, self.settings.poll_every.total_seconds())
        return self

    def _look_for_database(self, wait: timedelta | float) -> None:
        try:
            connection.look(self.dsn, _seconds(wait) or 0.0)
        except BaseException:
            self._leave_database()
            raise

    def close(self) -> None:
        if self._completions is not None:
            self._completions.close()
        if self._pool is not None:
            self._pool.close()
        self._pool, self._completions, self._schema_checked = None, None, False
        self._leave_database()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def migrate(self, *, conn: Connection | None = None) -> list[Migration]:
        """Bring the database's schema up to this release; safe to run from many processes at once.

        Where nothing is missing it needs no more than the right to read `busload.migration`. With `conn` the schema
        exists exactly if that transaction commits.
        """
        if conn is not None:
            return self._join(conn, migrate.migrate(), any_schema=True)
        with connection.connect(self.dsn) as own, own.transaction():
            connection.refuse_server(own)
            return perform(own, migrate.migrate())

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
        conn: Connection | None = None,
    ) -> SendResult:
        """Send one command. With `batch_id` it joins a batch that is still open, whose total rises with it."""
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
        return self._write(self._requests.send(domain, command, batch_id, dedup), conn)

    def send_many(
        self,
        domain: str,
        commands: Iterable[BatchCommand],
        *,
        batch_id: UUID | None = None,
        dedup: Dedup | None = None,
        conn: Connection | None = None,
    ) -> list[SendResult]:
        """Send many commands, all or none; results come in the order of the input; see `CommandBus.send_many`."""
        return self._write(self._requests.send_many(domain, commands, batch_id, dedup), conn)

    def create_batch(
        self,
        domain: str,
        commands: Iterable[BatchCommand],
        *,
        batch_id: UUID | None = None,
        name: str | None = None,
        custom_data: dict[str, Any] | None = None,
        on_complete: SyncBatchCompletionCallback | BatchCommand | None = None,
        dedup: Dedup | None = None,
        job_id: UUID | None = None,
        stage: str | None = None,
        dispatch: str | None = None,
        checkpoint_size: int = 1000,
        conn: Connection | None = None,
    ) -> UUID:
        """Create a batch with all its commands in one transaction, and return its id; see `CommandBus.create_batch`.

        This face leaves brokers to the relay of a worker: "relay" is all that `dispatch` can be.
        """
        joins, once = conn is not None, dedup is not None
        self._requests.strategy(dispatch, self.dispatch, joins=joins, dedup=once)
        write = self._requests.create_batch(
            domain,
            commands,
            batch_id=batch_id,
            name=name,
            custom_data=custom_data,
            on_complete=on_complete,
            dedup=dedup,
            job_id=job_id,
            stage=stage,
            checkpoint_size=checkpoint_size,
        )
        created = self._write(write, conn)
        self._register(created, on_complete)
        return created

    def open_batch(
        self,
        domain: str,
        *,
        batch_id: UUID | None = None,
        name: str | None = None,
        custom_data: dict[str, Any] | None = None,
        on_complete: SyncBatchCompletionCallback | BatchCommand | None = None,
        checkpoint_size: int = 1000,
        dedup: Dedup | None = None,
        job_id: UUID | None = None,
        stage: str | None = None,
        conn: Connection | None = None,
    ) -> SyncOpenBatch:
        """A batch to fill over time; see `CommandBus.open_batch`."""
        write = self._requests.open_batch(
            domain,
            batch_id=batch_id,
            name=name,
            custom_data=custom_data,
            on_complete=on_complete,
            dedup=dedup,
            job_id=job_id,
            stage=stage,
        )
        return SyncOpenBatch(self, domain, write, on_complete, checkpoint_size, dedup, conn)

    def seal_batch(self, domain: str, batch_id: UUID, *, conn: Connection | None = None) -> bool:
        """Let an open batch complete; returns False if it was sealed already."""
        return self._write(self._requests.seal(domain, batch_id), conn)

    def get_batch(self, domain: str, batch_id: UUID) -> BatchMetadata | None:
        return self._read(self._requests.get_batch(domain, batch_id))

    def get_dispatch(self, domain: str, batch_id: UUID) -> DispatchReport | None:
        """How the creation of a batch was announced to the broker, and what of it still waits for that.

        None without a broker, and for what `open_batch` opened: that is announced as it is added, not created at once.
        """
        return self._read(self._requests.get_dispatch(domain, batch_id))

    def list_batches(
        self,
        domain: str,
        *,
        status: str | None = None,
        job_id: UUID | None = None,
        limit: int = 100,
        offset: int = 0,
        after: UUID | None = None,
    ) -> list[BatchMetadata]:
        """Newest first. `after`, the last batch of the page before, pages without drift while batches are created."""
        return self._read(
            self._requests.list_batches(domain, status=status, limit=limit, offset=offset, after=after, job_id=job_id)
        )

    def list_batch_commands(
        self,
        domain: str,
        batch_id: UUID,
        *,
        status: str | None = None,
        limit: int = 100,
        offset: int = 0,
        after: UUID | None = None,
    ) -> list[CommandMetadata]:
        """In the order in which they were added; `after` is the last command of the page before."""
        return self._read(
            self._requests.list_batch_commands(domain, batch_id, status=status, limit=limit, offset=offset, after=after)
        )

    def cancel_batch(
        self,
        domain: str,
        batch_id: UUID,
        *,
        reason: str,
        operator: str | None = None,
        conn: Connection | None = None,
    ) -> int:
        """Cancel what has not started yet, and return how many that was; see `CommandBus.cancel_batch`."""
        if conn is None:
            canceling = self._requests.cancel_batch_in_pages(domain, batch_id, reason=reason, operator=operator)
            return self._cancel(canceling, batch_id=batch_id)
        return self._write(self._requests.cancel_batch(domain, batch_id, reason=reason, operator=operator), conn)

    def wait_batch(self, domain: str, batch_id: UUID, timeout: timedelta | float | None = None) -> BatchMetadata:
        """Return the batch once it is complete; `TimeoutError` says how far it came."""
        batch: BatchMetadata | None = None
        for seen in self._watch(domain, batch_id, _seconds(timeout)):
            batch = seen
        if batch is None or not batch.status.final:
            raise _late(batch_id, batch, timeout)
        return batch

    def watch_batch(self, domain: str, batch_id: UUID) -> Iterator[BatchMetadata]:
        """Yield the batch now, whenever its counters have changed, and last when it is complete."""
        return self._watch(domain, batch_id, None)

    def create_job(
        self,
        domain: str,
        stages: Iterable[Stage],
        *,
        job_id: UUID | None = None,
        name: str | None = None,
        custom_data: dict[str, Any] | None = None,
        on_complete: BatchCommand | None = None,
        continue_after_failures: bool = False,
        conn: Connection | None = None,
    ) -> UUID:
        """Create a job with its first batch in one transaction, and return its id; see `CommandBus.create_job`."""
        write = self._requests.create_job(
            domain,
            stages,
            job_id=job_id,
            name=name,
            custom_data=custom_data,
            on_complete=on_complete,
            continue_after_failures=continue_after_failures,
        )
        return self._write(write, conn)

    def get_job(self, domain: str, job_id: UUID) -> JobMetadata | None:
        return self._look(self._requests.get_job(domain, job_id))

    def list_jobs(
        self, domain: str, *, status: str | None = None, limit: int = 100, offset: int = 0
    ) -> list[JobMetadata]:
        """Newest first."""
        return self._look(self._requests.list_jobs(domain, status=status, limit=limit, offset=offset))

    def resume_job(
        self, domain: str, job_id: UUID, *, operator: str | None = None, conn: Connection | None = None
    ) -> None:
        """Let a FAILED job go on with its next stage; see `CommandBus.resume_job`."""
        self._write(self._requests.resume_job(domain, job_id, operator=operator), conn)

    def cancel_job(
        self,
        domain: str,
        job_id: UUID,
        *,
        reason: str,
        operator: str | None = None,
        conn: Connection | None = None,
    ) -> int:
        """Stop a job and cancel the batch of its stage; see `CommandBus.cancel_job`."""
        if conn is None:
            canceling = self._requests.cancel_job_in_pages(domain, job_id, reason=reason, operator=operator)
            return self._cancel(canceling, job_id=job_id)
        return self._write(self._requests.cancel_job(domain, job_id, reason=reason, operator=operator), conn)

    def wait_job(self, domain: str, job_id: UUID, timeout: timedelta | float | None = None) -> JobMetadata:
        """Return the job once it is COMPLETED, FAILED or CANCELED; `TimeoutError` says how far it came."""
        end = _end(timeout)
        with self._listening() as conn:
            while True:
                job = self._look(self._requests.get_job(domain, job_id), end)
                if job is None:
                    raise JobNotFoundError(domain, job_id)
                if job.status.final:
                    return job
                left = float("inf") if end is None else end - time.monotonic()
                if left <= 0:
                    raise _late_job(job_id, job)
                self._hear(conn, job_id, min(left, self.settings.poll_every.total_seconds()))

    def get_command(self, domain: str, command_id: UUID) -> CommandMetadata | None:
        return self._read(self._requests.get_command(domain, command_id))

    def get_audit_trail(self, domain: str, command_id: UUID) -> list[AuditEvent]:
        """Everything that happened to a command, oldest first; empty for an unknown one."""
        return self._read(self._requests.get_audit_trail(domain, command_id))

    def trace(self, task_key: str, *, domain: str | None = None) -> list[Execution]:
        """Every attempt of every command that was sent for a task, oldest first; empty for an unknown one."""
        return self._read(self._requests.trace(task_key, domain=domain))

    def get_batch_audit_trail(self, domain: str, batch_id: UUID) -> list[AuditEvent]:
        """What happened to the batch itself: started, sealed, stalled, canceled, completed."""
        return self._read(self._requests.get_batch_audit_trail(domain, batch_id))

    def prune(self, older_than: timedelta, *, archive: bool = False, dry_run: bool = False) -> Pruned:
        """Remove commands of all domains that ended so long ago, and say how much that was; see `CommandBus.prune`."""
        *_, pruned = self._prune(older_than, archive=archive, dry_run=dry_run)
        return pruned

    def _prune(self, older_than: timedelta, *, archive: bool, dry_run: bool) -> Iterator[Pruned]:
        """Yield how much it has removed so far."""
        pruning = self._requests.prune(older_than, archive=archive, dry_run=dry_run)
        for plan in pruning.plans():
            self._perform_alone(plan)
            yield pruning.pruned

    def recover(self, *, ring_again_after: timedelta = timedelta(minutes=5)) -> Recovered:
        """Tell relays to announce now what waits for another round: this face publishes nothing itself."""
        due, closed = self._perform_alone(self._requests.recover(ring_again_after))
        return Recovered(due=due, closed=closed)

    def explain_batch(self, domain: str, batch_id: UUID) -> Explanation:
        """Why a batch is not finished: each reason with count, since when, and what to do. A healthy one has an ETA."""
        return self._look(self._requests.explain_batch(domain, batch_id))

    def explain_command(self, domain: str, command_id: UUID) -> Explanation:
        """The same for one command."""
        return self._look(self._requests.explain_command(domain, command_id))

    def pause(
        self,
        domain: str,
        *,
        reason: str | None = None,
        operator: str | None = None,
        conn: Connection | None = None,
    ) -> bool:
        """Let nothing new start in a domain: what runs finishes, what is sent waits. False: it was paused already.

        Workers hear of it at once, or within `sweep_every` if the notification is lost. Until then a worker may claim
        once more; once it has heard, it starts nothing, and what it holds but has not begun goes back.
        """
        paused = self._write(self._requests.pause(domain, reason=reason, operator=operator), conn)
        _tell("Paused", paused, domain, operator)
        return paused

    def resume(self, domain: str, *, operator: str | None = None, conn: Connection | None = None) -> bool:
        """Let a paused domain go on. False: it was not paused."""
        resumed = self._write(self._requests.resume(domain, operator=operator), conn)
        _tell("Resumed", resumed, domain, operator)
        return resumed

    def buffer(
        self,
        name: str,
        *,
        size: int = 1000,
        max_age: timedelta = timedelta(minutes=2),
        max_groups: int = 20,
        max_bytes: int | None = None,
        partition_by: str | None = None,
        merge: Merge | None = None,
        archive: bool = False,
        on_exhausted: OnExhausted = "troubleshoot",
        table: str | BufferTable | None = None,
    ) -> SyncBuffer:
        """Events that are added one at a time and leave in groups; see `CommandBus.buffer`."""
        settings = BufferSettings(
            name,
            size=size,
            max_age=max_age,
            max_groups=max_groups,
            max_bytes=max_bytes,
            partition_by=partition_by,
            merge=merge,
            archive=archive,
            on_exhausted=on_exhausted,
            table=BufferTable(table) if isinstance(table, str) else table,
        )
        return SyncBuffer(self, self._declare(settings))

    def list_buffers(self) -> list[BufferStatus]:
        """Every buffer that a worker has served or in which events wait, and how it is doing."""
        return self._look(self._requests.list_buffers())

    def list_limits(self, name: str | None = None, *, limit: int = 100) -> list[LimitStatus]:
        """Every rate limit that was used within a day, or those of one name: the rate now, and what was refused."""
        return self._read(self._requests.list_limits(name, limit=limit))

    def reset_limit(self, name: str, by: str | None = None) -> int:
        """Let calls under a limit go again at once, though its receiver has refused some; returns how many limits.

        `by` is what its function of that name returns, as text; without it, all its values are meant.
        """
        return self._write(self._requests.reset_limit(name, by), None)

    def list_pauses(self) -> list[Pause]:
        """Every domain that is paused: since when, by whom and why."""
        return self._read(self._requests.list_pauses())

    def pause_history(self, domain: str | None = None, *, limit: int = 100) -> list[Pause]:
        """The pauses of a domain or of all, also those that are over: who paused and who resumed; newest first."""
        return self._read(self._requests.pause_history(domain, limit=limit))

    def _watch(self, domain: str, batch_id: UUID, seconds: float | None) -> Iterator[BatchMetadata]:
        """Yield changes until the batch is complete or the time is up, on a connection of its own."""
        end = _end(seconds)
        with self._listening() as conn:
            last: BatchMetadata | None = None
            while True:
                batch = self._read(self._requests.get_batch(domain, batch_id), end)
                if batch is None:
                    raise BatchNotFoundError(domain, batch_id)
                if batch != last:
                    last = batch
                    yield batch
                left = None if end is None else end - time.monotonic()
                if batch.status.final or (left is not None and left <= 0):
                    return
                poll = self.settings.poll_every.total_seconds()
                self._hear(conn, batch_id, poll if left is None else min(poll, left))

    @contextmanager
    def _listening(self) -> Iterator[Connection | None]:
        """A connection that hears of batches; None: it is not to be had, and looking from time to time will do."""
        conn: Connection | None = None
        try:
            conn = connection.connect(self.dsn, response_timeout=connection.RESPONSE_TIMEOUT)
            conn.execute(f"LISTEN {BATCH}".encode())
        except psycopg.OperationalError as error:
            log.warning("Cannot listen for changes of batches, polling instead: %s", error)
        try:
            yield conn
        finally:
            if conn is not None:
                conn.close()

    @staticmethod
    def _hear(conn: Connection | None, batch_id: UUID, seconds: float) -> None:
        try:
            if conn is not None and not conn.closed:
                for notification in conn.notifies(timeout=seconds):
                    if notification.payload == str(batch_id):
                        return
                return
        except psycopg.OperationalError as error:
            log.warning("Lost the connection that listens, polling instead: %s", error)
        time.sleep(seconds)

    def _register(self, batch_id: UUID, on_complete: SyncBatchCompletionCallback | BatchCommand | None) -> None:
        if on_complete is not None and not isinstance(on_complete, BatchCommand):
            assert self._completions is not None
            self._completions.call(batch_id, on_complete)

    def _existing_batches(self, batch_ids: Sequence[UUID]) -> list[BatchMetadata]:
        return self._read(report.existing_batches(batch_ids)) if batch_ids else []

    def _read(self, plan: Plan[T], end: float | None = None) -> T:
        with self.pool.connection(self._within(end)) as conn:
            self._check_schema(conn)
            return perform(conn, plan)

    def _perform_alone(self, plan: Plan[T]) -> T:
        """In a transaction of its own. One that may be repeated: if its end is unknown, it does not matter."""
        with self.pool.connection() as conn:
            self._check_schema(conn)
            with conn.transaction():
                return perform(conn, plan)

    def _within(self, end: float | None) -> float:
        """How long to wait for a connection, for a call that has to return by then."""
        longest = self.pool.timeout
        return longest if end is None else min(longest, max(0.0, end - time.monotonic()))

    def _look(self, plan: Plan[T], end: float | None = None) -> T:
        """Read by several statements, in a transaction of their own."""
        with self.pool.connection(self._within(end)) as conn:
            self._check_schema(conn)
            with conn.transaction():
                return perform(conn, plan)

    def _write(self, write: Write[T], conn: Connection | None = None) -> T:
        if conn is not None:
            return self._join(conn, write.plan)
        if write.again is not None:
            return self._write_patiently(write, write.again)
        pool = self.pool
        own = _connection(pool, write)
        try:
            self._check_schema(own)
            return self._commit(own, write)
        finally:
            pool.putconn(own)

    def _cancel(self, canceling: cancel.Canceling, *, batch_id: UUID | None = None, job_id: UUID | None = None) -> int:
        done: int | None = None
        try:
            for write in in_pages(canceling, batch_id=batch_id, job_id=job_id):
                self._write(write)
                done = canceling.canceled
        except (BusloadError, psycopg.Error) as error:
            if done is None:
                raise
            raise _partly_canceled(done, error, batch_id, job_id) from error
        return canceling.canceled

    def _write_patiently(self, write: Write[T], again: Callable[[], Plan[T]]) -> T:
        """Try until the transaction ends that holds what this needs; see `CommandBus`."""
        pool, waits = self.pool, LockWait(self.settings.lock_timeout)
        room = self._first_tries
        while True:
            with room:
                own = _connection(pool, write)
                try:
                    self._check_schema(own)
                    return self._commit(own, replace(write, plan=again()))
                except psycopg.errors.LockNotAvailable as error:
                    if waits.over:
                        holders = perform(own, lock_holders(waits.limit))
                        raise LockWaitTimeout(waits.limit, holders) from error
                finally:
                    pool.putconn(own)
            room = self._waiting_room
            time.sleep(waits.pause())

    def _join(self, conn: Connection, plan: Plan[T], *, any_schema: bool = False) -> T:
        """In the caller's transaction, which a failure does not spoil."""
        connection.refuse_unusable(conn, psycopg.Connection)
        if connection.about_to_begin(conn):
            conn.execute("SELECT")
        with conn.transaction():
            if not any_schema:
                self._check_schema(conn)
            return perform(conn, plan)

    def _commit(self, conn: Connection, write: Write[T]) -> T:
        """A transaction whose COMMIT can be told from its statements when the connection breaks."""
        committing = write.one_statement
        try:
            if write.one_statement:
                return perform(conn, write.plan)
            with conn.transaction():
                result = perform(conn, write.plan)
                committing = True
            return result
        except psycopg.Error as error:
            if write.goes_on:
                raise
            if not _connection_lost(error):
                raise nothing_written(error) from error
            if not committing:
                raise _broken(error) from error
            raise OutcomeUnknown(batch_id=write.batch_id, command_ids=write.command_ids, job_id=write.job_id) from error

    def _check_schema(self, conn: Connection) -> None:
        """On the connection of the call that needs it: to wait for another one might be to wait for oneself."""
        if not self._schema_checked:
            connection.refuse_server(conn)
            perform(conn, migrate.check())
            self._schema_checked = True


def _strategy(named: str | None, transport: Transport | None) -> Strategy | None:
    if named is None:
        return None
    if named not in list(Strategy):
        raise ValueError(f"dispatch must be one of {', '.join(Strategy)}, found {named!r:.80}.")
    if transport is None:
        raise ValueError(f"dispatch={str(named)!r} needs a transport to announce by: CommandBus(dsn, transport=URL).")
    return Strategy(named)


def _check_messages(settings: Settings) -> None:
    """What a person can get wrong about queues and messages, before anything is sent."""
    prefix, size = settings.queue_prefix, settings.envelope_size
    if not isinstance(prefix, str) or not QUEUE_PREFIX.fullmatch(prefix):
        raise TransportMisconfigured(
            f"queue_prefix must be a letter, then up to 99 letters, digits, '_', '.' or '-', found {prefix!r:.80}."
        )
    if type(size) is not int or size not in ENVELOPE_SIZES:
        raise TransportMisconfigured(
            f"envelope_size must be a whole number from 1 to {ENVELOPE_SIZES[-1]}, found {size!r:.80}."
        )
    found: object = settings.message_per_command
    if not isinstance(found, bool):
        raise TransportMisconfigured(f"message_per_command must be True or False, found {found!r:.80}.")
    key: object = settings.message_key
    if key is not None and not (isinstance(key, str) and key):
        # What it is instead is not shown: it may be the secret, as bytes.
        raise TransportMisconfigured("message_key must be a text that is not empty, or None to sign nothing.")
    if key is not None:
        try:
            message.keys(key.encode())
        except ValueError as error:
            raise TransportMisconfigured(f"message_key cannot be used. {error}") from None


def _connection(pool: Pool, write: Write[Any]) -> Connection:
    try:
        return pool.getconn()
    except DatabaseUnavailable as error:
        raise _no_connection(write, error) from error


async def _connection_async(pool: AsyncPool, write: Write[Any]) -> AsyncConnection:
    try:
        return await pool.getconn()
    except DatabaseUnavailable as error:
        raise _no_connection(write, error) from error


def _no_connection(write: Write[Any], error: DatabaseUnavailable) -> DatabaseUnavailable:
    """A pool cannot know what its connections are for."""
    return DatabaseUnavailable(str(error) if write.goes_on else f"{error} Nothing was written.")


def _partly_canceled(commands: int, why: BaseException, batch_id: UUID | None, job_id: UUID | None) -> PartlyDone:
    what = f"batch {batch_id}" if job_id is None else f"job {job_id}"
    return PartlyDone(
        f"The cancel of {what} has begun, and {counted(commands, 'command is', 'commands are')} canceled so far",
        commands,
        why,
        todo="None of the others starts. Repeat the call to cancel them now; else a worker does so within a minute.",
    )


def _broken(error: psycopg.Error) -> DatabaseUnavailable:
    why = " ".join(str(error).split())
    return DatabaseUnavailable(f"The connection broke before the commit, so nothing was written: {why}")


def _connection_lost(error: psycopg.Error) -> bool:
    """Whether the server could not say how it ended; an error that carries a code, other than its own shutdown, did."""
    if not isinstance(error, psycopg.OperationalError):
        return False
    return error.sqlstate is None or error.sqlstate.startswith(("57P", "08"))


def _tell(what: str, done: bool, domain: str, operator: str | None) -> None:
    if done:
        log.info("%s domain %s%s", what, domain, f", by {operator}" if operator else "")


def _seconds(timeout: timedelta | float | None) -> float | None:
    seconds: object = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if seconds is None or (isinstance(seconds, int | float) and seconds == seconds):  # NaN is not
        return seconds
    raise ValueError(f"timeout must be a timedelta or seconds, found {timeout!r:.80}.")


def _late(batch_id: UUID, batch: BatchMetadata | None, timeout: timedelta | float | None) -> TimeoutError:
    progress = (
        f"{batch.finished_count:,} of {counted(batch.total_count, 'command has', 'commands have')} ended"
        if batch
        else "nothing was seen"
    )
    return TimeoutError(f"Batch {batch_id} is not complete after {_seconds(timeout)} s: {progress}.")


def _end(timeout: timedelta | float | None) -> float | None:
    seconds = _seconds(timeout)
    return None if seconds is None else time.monotonic() + seconds


def _late_job(job_id: UUID, job: JobMetadata | None) -> TimeoutError:
    if job is None:
        return TimeoutError(f"Job {job_id} has not ended in time: nothing was seen.")
    at = next((stage for stage in job.stages if not stage.status.final), job.stages[-1])
    return TimeoutError(f"Job {job_id} has not ended in time: it is {job.status}, at stage {at.name!r} ({at.status}).")
