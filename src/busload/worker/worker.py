"""Starts the loops of a worker, and stops them in reverse."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence, Set
from contextlib import nullcontext, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Self
from uuid import UUID

import psycopg

from busload.bus import CommandBus, SyncCommandBus
from busload.domain.command import check_name, refuse
from busload.domain.counted import counted
from busload.domain.execution import CANCELED, COMPLETED, FAILED, FAILED_ATTEMPT, TROUBLESHOOTING, Leased
from busload.domain.retention import LONGEST
from busload.errors import InvalidOperationError, kind_of
from busload.settings import WorkerSettings
from busload.store import rescue
from busload.store.connection import connect, connect_within_async, told
from busload.store.guard import GuardedAsyncConnection
from busload.store.listen import CANCEL, LIMIT, OUTBOX, PAUSE, READY, AsyncListener
from busload.store.outage import Outage
from busload.store.plan import Plan, perform, perform_async
from busload.store.pool import AsyncPool, async_pool, engine_pool
from busload.store.rescue import Renewal
from busload.worker.claim import Claimer
from busload.worker.distribute import LOCK_TIMEOUT, Distributor, Tallies, warn_of_unserved, write_tallies
from busload.worker.execute import Executor
from busload.worker.held import Held
from busload.worker.limit import Limiter
from busload.worker.loop import Loop
from busload.worker.metrics import metrics_text
from busload.worker.pauses import Pauses
from busload.worker.prune import Prune
from busload.worker.receive import Receiver, prefetch_of
from busload.worker.relay import Recovery, Relay
from busload.worker.renew import Heartbeat
from busload.worker.settle import Settlement, capacity
from busload.worker.signals import Signals
from busload.worker.stats import BrokerStats, CoalescerStats, OutboxStats, Report, WorkerStats
from busload.worker.sweep import DesertedLeases, Sweep
from busload.worker.threads import Threads

log = logging.getLogger("busload")

ENGINE_CONNECTIONS = 5
"""One each for claiming, settling, promoting and sweeping, and one for results whose batch others hold; one more where
limits are asked, and one for a relay."""

MOST_DISTRIBUTING = 8
"""Connections of their own, at most, for distributing: so that locked tables hold up neither others nor the engine."""

MOST_NAMED = 20
"""Commands that one line of the log names."""

BRIEFLY = 1.0
"""Seconds that a worker which stops gives the database at least: for a claim under way, and to hand the rest back."""

PATIENCE = 24 * 3600.0
"""Seconds a handler waits for the connection of its transaction: those before it give theirs back sooner or later."""


class Worker:
    """Runs the commands of some domains: all that have handlers on the bus, unless `domains` says which.

    `concurrency` commands run at a time; at most `threads` of them have a handler written with `def`.

    `async with Worker(bus):` works beside your own code, `await run()` works until `stop()`, and `await drain()` works
    until nothing is ready or due: for tests and scripts. To stop means: claim no more, let what runs finish within the
    grace time, settle every result, and hand the rest back without burning an attempt. Signals are left to your
    program, unless it asks for them by `run(signals=True)`.
    """

    def __init__(
        self,
        bus: CommandBus | SyncCommandBus,
        *,
        domains: Sequence[str] | None = None,
        concurrency: int | None = None,
        threads: int | None = None,
        settings: WorkerSettings | None = None,
        name: str | None = None,
    ) -> None:
        if not isinstance(bus, CommandBus | SyncCommandBus):
            raise ValueError(f"A Worker needs a CommandBus or SyncCommandBus, found {kind_of(bus)}.")
        if not isinstance(settings, WorkerSettings | None):
            raise ValueError(f"settings must be a WorkerSettings, found {kind_of(settings)}.")
        self.settings = settings or WorkerSettings()
        self.concurrency = self.settings.concurrency if concurrency is None else concurrency
        self.threads = self.settings.most_threads if threads is None else threads
        self.name = name or f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
        self._bus = bus if isinstance(bus, CommandBus) else _async_face(bus)
        if isinstance(domains, str):
            raise ValueError(f"domains must be a list of names, found the text {domains!r}.")
        self._domains = list(domains) if domains is not None else None
        self._run: _Running | None = None
        self._beside: asyncio.Task[None] | None = None
        self._asked = 0
        """How urgently it was asked to stop: 1 with all its grace time, 2 without."""
        self._has_run = False
        self._left_behind: list[Leased] = []
        unused = WorkerStats(self.concurrency, CoalescerStats(capacity(self.settings, self.concurrency)))
        self._stats: Callable[[], WorkerStats] = lambda: unused
        _check(self.concurrency, self.threads, self.settings)

    @property
    def domains(self) -> list[str]:
        return self._domains if self._domains is not None else self._bus.handlers.domains

    @property
    def stats(self) -> WorkerStats:
        """The figures of this moment; once it has stopped, those of its last run."""
        return self._stats()

    def metrics(self) -> str:
        """The same for Prometheus, in its text format."""
        settings = self.settings
        about = {
            "domains": ",".join(self.domains),
            "settle": settings.settle,
            "prefetch": f"{settings.prefetch.total_seconds():g}",
        }
        return metrics_text(self.stats, worker=self.name, about=about)

    @property
    def left_behind(self) -> list[tuple[str, UUID]]:
        """Type and id of the commands whose handlers did not end though the last run has: they were handed back.

        A thread cannot be stopped, and an `async` handler may swallow that it was cancelled.
        """
        return [(one.command_type, one.command_id) for one in self._left_behind]

    async def run(self, *, signals: bool = False) -> None:
        """Work until told to stop.

        With `signals`, SIGTERM and SIGINT do that too: for a process that is all the worker's own. A second signal does
        not wait for what runs, and a third one ends the process.
        """
        with (
            Signals(self._hear) if signals else nullcontext(),
            suppress(_StoppedEarly),
        ):  # also while it starts and stops
            async with _Running(self) as running:
                await running.until_stopped()

    async def drain(self) -> int:
        """Work until nothing is ready or due, then return how many attempts were settled."""
        with suppress(_StoppedEarly):
            async with _Running(self) as running:
                return await running.until_drained()
        return 0

    async def __aenter__(self) -> Self:
        """Work beside the block; returns when it has started, and raises if it cannot."""
        if self._beside is not None:
            raise self._refusal()
        started = asyncio.get_running_loop().create_future()
        beside = self._beside = asyncio.create_task(self._run_beside(started), name="busload-worker")
        try:
            await asyncio.wait({beside, started}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            beside.cancel()
            await asyncio.wait({beside})
            self._beside = None
            raise
        if beside.done():
            self._beside = None
            beside.result()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop, with all the grace time; raises what the worker ended with."""
        beside, self._beside = self._beside, None
        if beside is not None:
            self.stop()
            await beside

    def stop(self, *, hurry: bool = False) -> None:
        """Stop; with `hurry`, without waiting for what runs.

        Call this as often as you like, at any moment and from any thread. Before the first run it is remembered, and
        that run ends as soon as it has begun. After a run it does nothing.
        """
        if self._run is None and self._has_run:
            return
        self._asked = max(self._asked, 2 if hurry else 1)
        if self._run is not None:
            self._run.wake()

    def _hear(self, signals: int) -> None:
        self.stop(hurry=signals > 1)

    def _abandon(self) -> None:
        """From another thread, while the event loop is blocked and before the process ends: hand everything back."""
        if self._run is not None:
            self._run.abandon()

    async def _run_beside(self, started: asyncio.Future[None]) -> None:
        with suppress(_StoppedEarly):
            async with _Running(self) as running:
                started.set_result(None)
                await running.until_stopped()

    def _begin(self, run: _Running) -> None:
        if self._run is not None:
            raise self._refusal()
        self._run, self._left_behind = run, []

    def _end(self) -> None:
        self._run, self._has_run, self._asked = None, True, 0

    def _refusal(self) -> InvalidOperationError:
        return InvalidOperationError(
            f"Worker {self.name} is running already. Wait until it has stopped, or make another Worker."
        )


class _StoppedEarly(Exception):
    """The worker was told to stop before it had found its database."""


class _Running:
    """One run of a worker: everything that is started, and the order in which it is stopped."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._settings, self._bus = worker, worker.settings, worker._bus
        self._tasks: list[asyncio.Task[None]] = []
        self._rounds: list[asyncio.Task[None]] = []
        self._handed_back = 0
        self._has_listened = False

    async def __aenter__(self) -> Self:
        self._refuse_domains()
        self._loop = asyncio.get_running_loop()
        self._stopping, self._hurry = asyncio.Event(), asyncio.Event()
        self._worker._begin(self)
        self._heed()
        self._opened_bus, self._assembled = self._bus._pool is None, False
        try:
            await self._bus.open(wait=None)
            await self._find_database()
            self._assemble()
            self._assembled = True
            await asyncio.to_thread(self._heartbeat.start)
            await self._pauses.once()
            await self._start_distributing()
        except BaseException:
            await self._undo_start()
            raise
        self._executor.start()
        worker = self._worker
        worker._stats = self.stats
        self._report = Report(self.stats)
        self._tasks.append(asyncio.create_task(Loop("Reporting", self._report.once).run()))
        self._tasks.append(asyncio.create_task(self._heeding.run()))
        self._tasks.append(asyncio.create_task(self._limiter.loop.run()))
        self._tasks.append(asyncio.create_task(self._looking.run()))
        log.info("Worker %s serves %s, %d at a time", worker.name, ", ".join(worker.domains), worker.concurrency)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._stop()
        finally:
            ending = asyncio.create_task(self._end())
            cancelled: asyncio.CancelledError | None = None
            while not ending.done():  # it takes seconds at most, and nobody else would do it
                try:
                    await asyncio.shield(ending)
                except asyncio.CancelledError as again:
                    cancelled = again
            if cancelled is not None:
                raise cancelled
            ending.result()

    async def _find_database(self) -> None:
        """Wait for a database that is away, unless told to stop; one that cannot be used is refused at once."""
        limit = self._settings.wait_for_database
        finding = asyncio.create_task(
            connect_within_async(self._bus.dsn, None if limit is None else limit.total_seconds())
        )
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({finding, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not finding.done():
                raise _StoppedEarly
            with told(self._bus.dsn, "wait_for_database (--wait) says how long a worker waits for it"):
                conn = await finding
            async with conn:
                await self._bus._check_schema(conn)
        finally:
            for task in (finding, stopping):
                task.cancel()
            found, _ = await asyncio.gather(finding, stopping, return_exceptions=True)
            if not isinstance(found, BaseException):  # the start may have been cancelled before it was used
                await found.close()

    def wake(self) -> None:
        """See what the worker was asked for; from any thread, and from a signal's handler."""
        self._loop.call_soon_threadsafe(self._heed)

    def abandon(self) -> None:
        self._heartbeat.let_go()
        try:
            with connect(self._bus.dsn, response_timeout=self._settings.deadline.total_seconds()) as conn:
                with conn.transaction():
                    perform(conn, rescue.release(self._held.lease_ids))
                perform(conn, rescue.retire(worker=self._number()))
        except psycopg.Error as error:
            log.warning("Could not hand back what is left; others will take it when the lease ends: %r", error)

    def _heed(self) -> None:
        if self._worker._asked:
            self._stopping.set()
        if self._worker._asked > 1:
            self._hurry.set()

    async def _start_distributing(self) -> None:
        for distributor in self._distributors:
            await distributor.start()
        served = {buffer.name for buffer in self._bus.handlers.buffers}
        await warn_of_unserved(self._pool, list(self._bus._buffers.values()), served)

    async def until_stopped(self) -> None:
        self._rounds = [asyncio.create_task(loop.run()) for loop in (self._claiming, self._promoting)]
        self._tasks += [*self._rounds, asyncio.create_task(self._sweeping.run())]
        self._tasks.append(asyncio.create_task(self._listener.run(), name="busload-listen"))
        self._tasks += [asyncio.create_task(loop.run()) for loop in (*self._pruning, *self._distributing)]
        if self._broker is not None:
            self._broker.start()
        await self._stopping.wait()

    async def until_drained(self) -> int:
        """Claim and run until a look finds nothing ready and nothing due; return how many attempts were settled."""
        self._claimer.draining = True
        await self._sweep.once()
        while not self._stopping.is_set():
            self._moved.clear()
            if self._broker is not None:
                await self._broker.relay.announce_due()
            pause = await self._claimer.once()
            if self._claimer.found_nothing and self._executor.gatherer.flush():
                continue  # nothing will join what was gathered for a bulk handler
            if pause == 0:
                await asyncio.sleep(0)
            elif self._executor.in_hand or self._settlement.waiting:
                await self._wait_for_a_move()
            elif self._moved.is_set():
                continue  # a settlement that the look may not have seen: it can have sent a callback or a reply
            elif not self._claimer.found_nothing:
                await asyncio.sleep(pause or 0)  # others had locked what is ready
            elif (await self._claimer.promote_due()).loads == 0 and not await self._distribute():
                break
        return self._settlement.settled

    async def _distribute(self) -> int:
        """Make groups of what is due in the buffers served here; returns how many."""
        return sum([await distributor.distribute() for distributor in self._distributors])

    def stats(self) -> WorkerStats:
        settlement, claimer = self._settlement, self._claimer
        return WorkerStats(
            concurrency=self._worker.concurrency,
            settlement=settlement.stats.snapshot(),
            claims=claimer.claims,
            empty_claims=claimer.empty_claims,
            claimed=claimer.claimed,
            in_hand=self._executor.in_hand,
            in_line=self._executor.in_line,
            prefetch=claimer.ahead,
            completed=settlement.outcomes[COMPLETED],
            failed=settlement.outcomes[FAILED],
            canceled=settlement.outcomes[CANCELED],
            parked=settlement.outcomes[TROUBLESHOOTING],
            failed_attempts=settlement.outcomes[FAILED_ATTEMPT],
            in_transactions=settlement.in_transactions,
            late=settlement.late,
            handed_back=claimer.handed_back + self._handed_back,
            lost_leases=self._held.lost,
            bulk_calls=self._executor.calls.made,
            bulk_items=self._executor.calls.items,
            broker=None if self._broker is None else self._broker.stats(),
        )

    def _refuse_domains(self) -> None:
        domains, limits = self._worker.domains, self._bus.settings.limits
        refuse([problem for domain in domains for problem in check_name(domain, "domains", limits)], writes=False)
        if not domains:
            raise InvalidOperationError("The worker has no domains: register a handler on its bus, or name domains.")

    def _assemble(self) -> None:
        worker, settings, bus = self._worker, self._settings, self._bus
        self._moved = asyncio.Event()
        buffers = [buffer for buffer in bus.handlers.buffers if buffer.name in worker.domains]
        more = bool(bus.handlers.limits) + bool(bus.transport)
        silence = bus.settings.response_timeout.total_seconds()
        self._pool = pool = engine_pool(bus.dsn, ENGINE_CONNECTIONS + more, response_timeout=silence)
        size = min(len(buffers), MOST_DISTRIBUTING)
        self._distribution = pool
        if buffers:
            self._distribution = engine_pool(
                bus.dsn, size, lock_timeout=LOCK_TIMEOUT, users_tables=True, response_timeout=silence
            )
        self._held = Held()
        self._outage = Outage()
        self._tallies = Tallies()
        self._pauses = Pauses(pool, worker.domains, settings.sweep_every, self._on_pauses)
        self._threads = Threads(bus, worker.threads, PATIENCE)
        self._transactions = async_pool(
            bus.dsn,
            bus.settings.pool_size,
            timeout=PATIENCE,
            response_timeout=silence,
            connection_class=GuardedAsyncConnection,
        )
        self._limiter = Limiter(pool, self._held, settings.deadline, self._outage)
        self._settlement = Settlement(pool, self._held, settings, worker.concurrency, self._on_settled, self._outage)
        self._executor = Executor(
            bus,
            self._transactions,
            self._threads,
            self._held,
            self._settlement,
            worker.concurrency,
            self._on_free,
            self._limiter,
            self._tallies,
            self._outage,
        )
        self._heartbeat = Heartbeat(
            bus.dsn,
            name=worker.name,
            domains=worker.domains,
            concurrency=worker.concurrency,
            lease_for=settings.lease_for,
            holding=lambda: self._held.leases,
            on_renewal=self._on_renewal,
            on_death=self._on_death,
            outage=self._outage,
        )
        self._broker = None if bus.transport is None else self._assemble_broker()
        self._claimer = Claimer(
            pool,
            bus.handlers,
            self._executor,
            self._settlement,
            self._held,
            self._pauses,
            worker.domains,
            settings,
            worker.concurrency,
            self._number,
            None if self._broker is None else self._broker.receiver,
        )
        self._distributors = [
            Distributor(self._distribution, buffer, self._pauses, self._tallies, settings.poll_every)
            for buffer in buffers
        ]
        self._distributing = [Loop(f"Distributing {one.name}", one.once, self._outage) for one in self._distributors]
        self._sweep = Sweep(pool, settings.sweep_every, self._number, lambda: self._heartbeat.in_touch)
        deserted = DesertedLeases(self._held, self._alive, self._hand_back, settings.sweep_every)
        self._looking = Loop("Looking for deserted leases", deserted.once, self._outage)
        self._claiming = Loop("Claiming", self._claimer.once, self._outage)
        self._promoting = Loop("Promoting", self._claimer.promote, self._outage)
        self._sweeping = Loop("Sweeping", self._sweep.once, self._outage)
        self._pruning = []
        if settings.keep_for is not None:
            prune = Prune(bus._perform_alone, settings.keep_for, settings.archive)
            self._pruning.append(Loop("Pruning", prune.once, self._outage))
        self._heeding = Loop("Heeding pauses", self._pauses.once, self._outage)
        channels = [READY, CANCEL, PAUSE, LIMIT, *([OUTBOX] if self._broker is not None else [])]
        self._listener = AsyncListener(bus.dsn, channels, self._hear, self._outage)

    def _assemble_broker(self) -> _Broker:
        broker = _Broker(self._worker, self._pool, self._on_ring, self._outage)
        self._held.on_gone = broker.receiver.rings.gone
        return broker

    async def _undo_start(self) -> None:
        """It was cancelled, or failed, half way: nothing was claimed yet."""
        if self._assembled:
            await self._transactions.close()
            await self._distribution.close()
            await self._pool.close()
            self._threads.close()
            try:
                await asyncio.to_thread(self._heartbeat.undo)
            except psycopg.Error as error:
                log.debug("The worker's row stays until its lease has ended: %s", error)
        await self._leave()

    async def _leave(self) -> None:
        if self._opened_bus:
            await self._bus.close()
        self._worker._end()

    async def _wait_for_a_move(self) -> None:
        try:
            async with asyncio.timeout(self._settings.poll_every.total_seconds()):
                await self._moved.wait()
        except TimeoutError:
            pass

    def _on_settled(self) -> None:
        self._moved.set()
        if self._claimer.ran_suspect and not self._held.has_suspect:
            self._claimer.heard = True  # the next suspect may run
            self._claiming.wake()
        elif self._claimer.waits_for_room:
            self._claiming.wake()  # there is some

    def _on_ring(self) -> None:
        self._claiming.wake()

    def _on_free(self) -> None:
        self._moved.set()
        if self._claimer.emptied and self._executor.in_hand == 0:
            self._settlement.flush_soon()  # no further result will join those that wait
        else:
            self._claiming.wake()

    def _number(self) -> int:
        """This worker's number in the database; a new one after it was declared dead."""
        return self._heartbeat.worker

    def _hear(self, channel: str | None, payload: str | None) -> None:
        if channel == CANCEL and payload is not None:
            try:
                self._held.cancel(UUID(payload))
            except ValueError:
                log.debug("Ignored a notification of a cancel without an id")
        elif channel == PAUSE:
            self._heeding.wake()
        elif channel == LIMIT:
            self._limiter.hear(payload)
        elif channel == OUTBOX:
            if self._broker is not None:
                self._broker.hear(payload)
        elif channel is None or payload in self._worker.domains:
            self._claimer.heard = True
            self._claiming.wake()
            if channel is None:
                self._heeding.wake()
                if self._broker is not None:
                    self._broker.hear(None)
                self._heartbeat.renew_soon()  # what was said meanwhile was not heard
                if self._has_listened:
                    self._limiter.hear(None)
                self._has_listened = True

    def _on_pauses(self) -> None:
        self._claimer.heed_pauses()
        self._limiter.expel(self._pauses.paused)
        self._moved.set()
        for loop in (self._claiming, *self._distributing):
            loop.wake()

    def _on_renewal(self, renewal: Renewal) -> None:
        strange = renewal.settled.difference(self._held.lease_ids)
        lost = self._held.reconcile(present=renewal.leases, canceled=renewal.canceled)
        if lost:
            log.warning("Lost %s; what these commands return will not count", counted(lost, "lease"))
        # An answer that waits behind a blocked loop is not lost; a claim sent later than that cannot be the one.
        asked_at = self._claimer.asked_at
        if strange and (asked_at is None or time.monotonic() - asked_at < self._settings.lease_for.total_seconds() / 3):
            self._tasks.append(asyncio.create_task(self._hand_back(list(strange))))

    def _on_death(self, lost: Set[UUID], resumed: Set[UUID]) -> None:
        self._held.lose(lost)
        if ended := resumed - set(self._held.lease_ids):  # their results were refused while they were taken up
            self._tasks.append(asyncio.create_task(self._hand_back(list(ended))))

    def _alive(self) -> Counter[UUID]:
        self._executor.revive()
        return self._claimer.alive()

    async def _hand_back(self, lease_ids: Sequence[UUID]) -> None:
        """Leases of ours whose commands do not run here: the answer to a claim was lost, or we stop."""
        async with self._pool.connection() as conn, conn.transaction():
            returned = await perform_async(conn, rescue.release(list(lease_ids)))
        self._held.drop(lease_ids)
        self._handed_back += returned.commands
        if returned.commands:
            log.info("Handed back %s", counted(returned.commands, "command"))

    async def _stop(self) -> None:
        """Stop claiming, let handlers finish, settle, hand back, say goodbye: each as far as the database allows."""
        if self._rounds and not (self._executor.in_hand or self._settlement.waiting):
            log.info("Stopping: nothing more is claimed, and nothing is in hand")
        elif self._rounds:
            log.info(
                "Stopping: nothing more is claimed. %s in hand: what runs may take up to %g s more, the rest is handed "
                "back; %s to be settled",
                counted(self._executor.in_hand, "command is", "commands are"),
                self._settings.grace.total_seconds(),
                counted(self._settlement.waiting, "result is", "results are"),
            )
        for loop in (self._claiming, self._promoting, *self._pruning, *self._distributing):
            loop.stop()
        deadline, grace = self._settings.deadline.total_seconds(), self._settings.grace.total_seconds()
        graceful = _Until(grace)
        first = _Until(min(deadline, max(grace, BRIEFLY)))  # part of the grace time: handlers go on meanwhile
        if self._broker is not None:
            await self._broker.stop_receiving(first.left)
        if self._rounds:  # a claim under way still brings commands, and only what we know of can be handed back
            await asyncio.wait(self._rounds, timeout=first.left)
        await self._let_line_go(first.left)
        self._limiter.expel(self._worker.domains)
        await self._finish_handlers(graceful.left)
        await self._executor.stop(deadline)
        in_vain = self._outage.is_away and not self._settlement.waiting
        last = _Until(BRIEFLY if in_vain else deadline)  # results are worth waiting for
        await self._limiter.close(timedelta(seconds=last.left))
        abandoned = await self._settlement.close(timedelta(seconds=last.left))
        self._sweeping.stop()
        if self._broker is not None:
            await self._broker.stop_relaying(last.left)
        try:
            async with asyncio.timeout(max(last.left, BRIEFLY)):
                await self._hand_back(self._held.lease_ids)
                await write_tallies(self._pool, self._tallies)
                async with self._pool.connection() as conn:
                    await perform_async(conn, rescue.retire(worker=self._number()))
        except (psycopg.Error, TimeoutError) as error:
            log.warning("Could not hand back what is left; others will take it when the lease ends: %r", error)
        if abandoned:
            raise InvalidOperationError(
                f"{counted(abandoned, 'result')} could not be settled before the worker stopped: what they are of runs "
                "again."
            )

    async def _end(self) -> None:
        """However far the stop came, nothing of this run goes on; what it still holds is rescued by others."""
        self._heartbeat.let_go()
        loops = (self._claiming, self._promoting, self._sweeping, self._heeding, self._looking)
        for loop in (*loops, *self._pruning, *self._distributing):
            loop.stop()
        for task in self._tasks:
            task.cancel()
        await self._executor.stop(within=1)
        self._say_what_is_left()
        if self._broker is not None:
            await self._broker.end()
        await self._limiter.close(timedelta(0))
        await self._settlement.close(timedelta(0))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._heartbeat.stop)
        self._outage.close()
        self._threads.close()
        self._report.finish()
        stats = self.stats()
        self._worker._stats = lambda: stats
        await self._transactions.close()
        await self._executor.close()
        await self._distribution.close()
        await self._pool.close()
        await self._leave()

    def _say_what_is_left(self) -> None:
        """Handlers that did not end go on as long as the process does; their commands are ready for others."""
        left = {one.command_id: one for one in (*self._executor.running, *self._threads.running)}
        self._worker._left_behind = list(left.values())
        if left:
            named = [f"{one.command_type} {one.command_id}" for one in list(left.values())[:MOST_NAMED]]
            more = f" and {len(left) - MOST_NAMED} more" if len(left) > MOST_NAMED else ""
            log.warning(
                "Left behind and handed back %s that did not end in time: %s%s",
                counted(len(left), "command"),
                ", ".join(named),
                more,
            )

    async def _let_line_go(self, seconds: float) -> None:
        """What has not started need not wait for what has: others can run it at once."""
        try:
            async with asyncio.timeout(seconds):
                await self._claimer.hand_back_line()
        except (psycopg.Error, TimeoutError) as error:
            log.debug("What has not started is handed back with the rest: %r", error)

    async def _finish_handlers(self, seconds: float) -> None:
        waits = [asyncio.create_task(self._executor.wait_idle()), asyncio.create_task(self._hurry.wait())]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)


class _Until:
    """A time that several steps share: a database that is away must not cost each of them all of it."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())


class _Broker:
    """What a worker runs beside its claims where a broker announces commands: relay, receiver, recovery."""

    def __init__(self, worker: Worker, pool: AsyncPool, on_ring: Callable[[], None], outage: Outage) -> None:
        bus, settings = worker._bus, worker.settings
        self._pool, self._announcer = pool, bus._announcer()
        self.relay = Relay(self._announcer, self._perform, settings.poll_every)
        recovery = Recovery(self._announcer, self._perform, settings.recover_every, settings.ring_again_after)
        self.receiver = Receiver(
            self._announcer,
            worker.domains,
            prefetch_of(worker.concurrency),
            settings,
            on_ring,
            self._on_connect,
        )
        self._recovery = recovery
        self._relaying, self._recovering = (
            Loop("Relaying", self.relay.once, outage),
            Loop("Recovering", recovery.once, outage),
        )
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self.receiver.start()
        self._tasks = [asyncio.create_task(loop.run()) for loop in (self._relaying, self._recovering)]

    def hear(self, transport: str | None) -> None:
        if transport in (None, self._announcer.transport.name):
            self._relaying.wake()

    async def stop_receiving(self, within: float) -> None:
        await self.receiver.stop(within)

    async def stop_relaying(self, within: float) -> None:
        """The round under way may end; if it cannot, others announce its loads again."""
        for loop in (self._relaying, self._recovering):
            loop.stop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.receiver.stop(within=1)

    def stats(self) -> BrokerStats:
        announcer, receiver, relay = self._announcer, self.receiver, self.relay
        rings = receiver.rings
        return BrokerStats(
            transport=announcer.transport.name,
            connected=receiver.connected,
            messages=announcer.messages,
            confirmed=announcer.confirmed,
            refused=dict(announcer.refused),
            rounds=relay.rounds,
            failed_rounds=relay.failed_rounds,
            relayed=relay.relayed,
            rung_again=self._recovery.rung_again,
            rings=rings.rings,
            rung=rings.claimed,
            duplicates=rings.duplicates,
            unknown=rings.unknown,
            refused_messages=receiver.refused,
            outbox=tuple(
                OutboxStats(lag.transport, lag.commands, lag.failed, lag.oldest, lag.rounds) for lag in relay.lag
            ),
        )

    def _on_connect(self) -> None:
        self.relay.broker_is_back()
        self._relaying.wake()

    async def _perform(self, plan: Plan[Any]) -> Any:
        async with self._pool.connection() as conn, conn.transaction():
            return await perform_async(conn, plan)


def _async_face(bus: SyncCommandBus) -> CommandBus:
    face = CommandBus(bus._dsn, transport=bus.transport, dispatch=bus.dispatch, settings=bus.settings)
    face.handlers, face._buffers = bus.handlers, bus._buffers
    return face


def _check(concurrency: int, threads: int, settings: WorkerSettings) -> None:
    for name, value in (("concurrency", concurrency), ("threads", threads), ("flush_size", settings.flush_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number from 1 on, found {value!r}.")
    more_than_zero = (
        *("lease_for", "poll_every", "sweep_every", "flush_every", "flush_deadline", "keep_for"),
        *("broker_poll_every", "recover_every", "ring_again_after"),
    )
    for name in (*more_than_zero, "grace", "no_handler_pause", "prefetch", "wait_for_database"):
        value = getattr(settings, name)
        if value is None and name in ("flush_deadline", "keep_for", "wait_for_database"):
            continue
        if not isinstance(value, timedelta):
            raise ValueError(f"{name} must be a timedelta, found {value!r}.")
        if value < timedelta(0) or (name in more_than_zero and not value):
            raise ValueError(
                f"{name} must be {'more than' if name in more_than_zero else 'at least'} zero, found {value}."
            )
    if not timedelta(0) <= settings.prefetch <= settings.lease_for / 4:
        raise ValueError(
            f"prefetch ({settings.prefetch}) must be from zero to a quarter of the lease ({settings.lease_for}): "
            "what a worker holds ahead must run before its lease ends."
        )
    if settings.keep_for is not None and settings.keep_for > LONGEST:
        raise ValueError(f"keep_for must be at most {LONGEST.days} days, found {settings.keep_for}; None is for ever.")
    if not isinstance(settings.archive, bool):
        raise ValueError(f"archive must be True or False, found {settings.archive!r}.")
    if settings.settle not in ("coalesced", "immediate"):
        raise ValueError(f"settle must be 'coalesced' or 'immediate', found {settings.settle!r}.")
    if settings.lease_for < 4 * settings.deadline:
        raise ValueError(
            f"A lease ({settings.lease_for}) must last four flush deadlines ({settings.deadline}): "
            "results would come too late otherwise. Choose a longer lease_for or a shorter flush_deadline."
        )
