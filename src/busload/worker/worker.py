"""Starts the loops of a worker, and stops them in reverse."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from uuid import UUID

import psycopg

from busload.bus import CommandBus, SyncCommandBus
from busload.domain.command import check_name, refuse
from busload.domain.execution import TROUBLESHOOTING, Transition, describe
from busload.errors import InvalidOperationError
from busload.settings import WorkerSettings
from busload.store import rescue, settle
from busload.store.listen import CANCEL, READY, AsyncListener
from busload.store.plan import perform_async
from busload.store.rescue import Renewal
from busload.worker.claim import Claimer
from busload.worker.coalescer import Coalescer
from busload.worker.execute import Executor, ThreadBus
from busload.worker.held import Held
from busload.worker.loop import Loop
from busload.worker.renew import Heartbeat
from busload.worker.sweep import Sweep

log = logging.getLogger("busload")


class Worker:
    """Runs the commands of some domains: all that have handlers on the bus, unless `domains` says which.

    `concurrency` commands run at a time. `await run()` works until SIGTERM, SIGINT or `stop()`: it stops claiming, lets
    what runs finish within the grace time, settles every result and hands the rest back without burning an attempt.
    `await drain()` works until nothing is ready or due, and returns: for tests and scripts.
    """

    def __init__(
        self,
        bus: CommandBus | SyncCommandBus,
        *,
        domains: Sequence[str] | None = None,
        concurrency: int | None = None,
        settings: WorkerSettings | None = None,
        name: str | None = None,
    ) -> None:
        self.settings = settings or WorkerSettings()
        self.concurrency = self.settings.concurrency if concurrency is None else concurrency
        self.name = name or f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
        self._given_bus = bus
        self._bus = bus if isinstance(bus, CommandBus) else _async_face(bus)
        self._domains = list(domains) if domains is not None else None
        self._stopping: asyncio.Event | None = None
        self._hurry: asyncio.Event | None = None
        self._heartbeat: Heartbeat | None = None
        self._claiming: Loop | None = None
        self._held = Held()
        _check(self.concurrency, self.settings)

    @property
    def domains(self) -> list[str]:
        return self._domains if self._domains is not None else self._bus.handlers.domains

    async def run(self) -> None:
        """Work until told to stop."""
        async with _Running(self) as running:
            with self._signals():
                await running.until_stopped()

    async def drain(self) -> int:
        """Work until nothing is ready or due, then return how many commands were settled."""
        async with _Running(self) as running:
            return await running.until_drained()

    def stop(self) -> None:
        """Stop as on SIGTERM; a second call does not wait for what runs."""
        if self._stopping is None or self._hurry is None:
            raise InvalidOperationError("The worker is not running.")
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT stop the worker, if it runs where signals can be heard."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


class _Running:
    """One run of a worker: everything that is started, and the order in which it is stopped."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._settings, self._bus = worker, worker.settings, worker._bus
        self._opened_bus = False

    async def __aenter__(self) -> _Running:
        worker, settings, bus = self._worker, self._settings, self._bus
        refuse([p for d in worker.domains for p in check_name(d, "domains", bus.settings.limits)])
        if not worker.domains:
            raise InvalidOperationError("The worker has no domains: register a handler on its bus, or name domains.")
        self._opened_bus = bus._pool is None
        await bus.open()
        await bus._check_schema()
        worker._stopping, worker._hurry = asyncio.Event(), asyncio.Event()
        self.settled = 0
        self._held = Held()
        self._results: Coalescer[Transition] = Coalescer(
            self._settle,
            max_size=settings.flush_size,
            max_interval=settings.flush_every,
            capacity=max(5 * settings.flush_size, worker.concurrency),
        )
        self._threads = ThreadBus(bus, worker.concurrency)
        self._executor = Executor(bus, self._threads, self._held, self._results, worker.concurrency, self._wake_claimer)
        self._heartbeat = Heartbeat(
            bus.dsn,
            name=worker.name,
            domains=worker.domains,
            concurrency=worker.concurrency,
            lease_for=settings.lease_for,
            on_renewal=self._on_renewal,
            on_death=self._on_death,
        )
        self._claimer = Claimer(bus, self._executor, self._held, worker.domains, settings, self._number)
        self._sweep = Sweep(bus, settings.sweep_every, self._number)
        self._claiming = Loop("Claiming", self._claimer.once)
        self._promoting = Loop("Promoting", self._claimer.promote)
        self._sweeping = Loop("Sweeping", self._sweep.once)
        self._listener = AsyncListener(bus.dsn, [READY, CANCEL], self._hear)
        self._tasks: list[asyncio.Task[None]] = []
        await asyncio.to_thread(self._heartbeat.start)
        self._executor.start()
        log.info("Worker %s serves %s, %d at a time", worker.name, ", ".join(worker.domains), worker.concurrency)
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._stop()
        finally:
            if self._opened_bus:
                await self._bus.close()
            self._worker._stopping = self._worker._hurry = None

    async def until_stopped(self) -> None:
        assert self._worker._stopping is not None
        self._start(self._claiming, self._promoting, self._sweeping)
        self._tasks.append(asyncio.create_task(self._listener.run(), name="busload-listen"))
        await self._worker._stopping.wait()

    async def until_drained(self) -> int:
        """Claim and run until a look finds nothing: no listening, since nothing is waited for."""
        assert self._worker._stopping is not None
        await self._sweep.once()
        while not self._worker._stopping.is_set():
            due = await self._claimer.promote() == 0
            taken = await self._claimer.claim(self._executor.free) if self._executor.free > 0 else None
            if taken and not taken.leased and not due and not taken.contended and self._executor.in_hand == 0:
                if self._results.stats.waiting == 0:
                    break
                self._results.flush_soon()
            await self._breathe(busy=bool(taken and taken.leased))
        return self.settled

    async def _breathe(self, *, busy: bool) -> None:
        """Let handlers run; when nothing was there to claim, wait for a slot that comes free."""
        if busy:
            await asyncio.sleep(0)
            return
        self._free = asyncio.Event()
        try:
            async with asyncio.timeout(0.02):
                await self._free.wait()
        except TimeoutError:
            pass

    def _start(self, *loops: Loop) -> None:
        self._tasks += [asyncio.create_task(loop.run()) for loop in loops]

    def _wake_claimer(self) -> None:
        self._claiming.wake()

    def _number(self) -> int:
        return self._heartbeat.worker

    def _hear(self, channel: str | None, payload: str | None) -> None:
        if channel == CANCEL and payload is not None:
            try:
                self._held.cancel(UUID(payload))
            except ValueError:
                log.debug("Ignored a notification of a cancel without an id")
        elif channel is None or payload in self._worker.domains:
            self._claiming.wake()

    def _on_renewal(self, renewal: Renewal) -> None:
        strange = renewal.settled.difference(self._held.lease_ids)
        lost = self._held.reconcile(present=renewal.leases, canceled=renewal.canceled)
        if lost:
            log.warning("Lost %d leases; what their commands return will not count", lost)
        if strange:
            self._tasks.append(asyncio.create_task(self._hand_back(list(strange))))

    def _on_death(self) -> None:
        self._held.lose_all()

    async def _settle(self, transitions: Sequence[Transition]) -> None:
        """Settle results; a lost answer is safe to repeat. One that cannot be stored is parked alone."""
        try:
            async with asyncio.timeout(self._settings.flush_deadline.total_seconds()):
                async with self._bus.pool.connection() as conn:
                    credited = await perform_async(
                        conn,
                        settle.settle(transitions, now=time.monotonic()),
                    )
        except (psycopg.DataError, psycopg.IntegrityError) as error:
            if len(transitions) == 1:
                await self._park(transitions[0], error)
                return
            middle = len(transitions) // 2
            await self._settle(transitions[:middle])
            await self._settle(transitions[middle:])
            return
        self._held.settled(transition.leased for transition in transitions)
        self.settled += len(credited)
        if len(credited) < len(transitions):
            log.warning("%d results came after their lease was lost and do not count", len(transitions) - len(credited))

    async def _park(self, transition: Transition, error: psycopg.Error) -> None:
        log.error("The result of execution %s cannot be stored: %s", transition.leased.execution_id, error)
        if transition.reason == "RESULT_INVALID":
            raise error
        refused = Transition(transition.leased, TROUBLESHOOTING, describe(error), reason="RESULT_INVALID")
        refused.finished = transition.finished
        await self._settle([refused])

    async def _hand_back(self, lease_ids: Sequence[UUID]) -> None:
        """Leases of ours whose commands do not run here: the answer to a claim was lost, or we stop."""
        async with self._bus.pool.connection() as conn:
            returned = await perform_async(conn, rescue.release(list(lease_ids)))
        self._held.drop(lease_ids)
        if returned.commands:
            log.info("Handed back %d commands", returned.commands)

    async def _stop(self) -> None:
        """Stop claiming, let handlers finish, settle, hand back, say goodbye: each as far as the database allows."""
        self._claiming.stop()
        self._promoting.stop()
        await self._drain_handlers()
        await self._executor.stop()
        abandoned = await self._results.close(self._settings.flush_deadline)
        self._sweeping.stop()
        try:
            async with asyncio.timeout(self._settings.flush_deadline.total_seconds()):
                await self._hand_back(self._held.lease_ids)
                async with self._bus.pool.connection() as conn:
                    await perform_async(conn, rescue.retire(worker=self._number()))
        except (psycopg.Error, TimeoutError) as error:
            log.warning("Could not hand back what is left; other workers will take it when the lease ends: %s", error)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._heartbeat.stop)
        self._threads.close()
        if abandoned:
            raise InvalidOperationError(
                f"{len(abandoned)} results could not be settled before the worker stopped; "
                "their commands will run again."
            )

    async def _drain_handlers(self) -> None:
        assert self._worker._hurry is not None
        self._executor.abandon_waiting()
        idle = asyncio.create_task(self._executor.wait_idle())
        hurry = asyncio.create_task(self._worker._hurry.wait())
        await asyncio.wait(
            {idle, hurry}, timeout=self._settings.grace.total_seconds(), return_when=asyncio.FIRST_COMPLETED
        )
        for task in (idle, hurry):
            task.cancel()
        await asyncio.gather(idle, hurry, return_exceptions=True)


def _async_face(bus: SyncCommandBus) -> CommandBus:
    face = CommandBus(bus._dsn, settings=bus.settings)
    face.handlers = bus.handlers
    return face


def _check(concurrency: int, settings: WorkerSettings) -> None:
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
        raise ValueError(f"concurrency must be a whole number from 1 on, found {concurrency!r}.")
    if settings.lease_for < 4 * settings.flush_every:
        raise ValueError(
            f"A lease ({settings.lease_for}) must last at least four flush intervals ({settings.flush_every}), "
            "or results would come too late."
        )
    if settings.lease_for <= timedelta(0) or settings.poll_every <= timedelta(0):
        raise ValueError("lease_for and poll_every must be more than zero.")
