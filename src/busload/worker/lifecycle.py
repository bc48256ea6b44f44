"""One run of a worker: everything that is started, and the order in which it is stopped."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Set
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any, Self
from uuid import UUID

import psycopg

from busload.buffers.distribute import write_tallies
from busload.bus import CommandBus
from busload.commands import claim, rescue
from busload.commands.execution import Leased
from busload.commands.rescue import Renewal
from busload.commands.wording import counted
from busload.errors import InvalidOperationError
from busload.handlers.middleware import HandlersInMiddleware
from busload.limits.limiter import Limiter
from busload.limits.pause import Pauses
from busload.postgres.guarded_connection import GuardedAsyncConnection
from busload.postgres.listen import CANCEL, HOLD, LIMIT, OUTBOX, PAUSE, READY, SCHEDULE, STOP
from busload.postgres.pool import async_pool, engine_pool
from busload.postgres.waiting import Event, TimeLimit
from busload.retention.prune import Prune
from busload.schedules.station import ScheduleStation
from busload.settings import WorkerSettings
from busload.statistics.recorder import Recorder
from busload.worker.broker_stations import Broker
from busload.worker.chunks import Gatherer
from busload.worker.claimer import Claimer
from busload.worker.condition import SelfCheck
from busload.worker.context import NO_STATE
from busload.worker.distribution import Distribution
from busload.worker.executor import Executor
from busload.worker.failure_calls import FailureCalls
from busload.worker.find_database import StoppedEarlyError, find_database
from busload.worker.hand_back import HandBack, hand_back_in_thread
from busload.worker.handler_threads import Threads
from busload.worker.heartbeat import Heartbeat
from busload.worker.lifespan import WorkerLifespan
from busload.worker.line import Line
from busload.worker.loop import Loop, ends_first
from busload.worker.metrics import gathered
from busload.worker.notifications import Notifications
from busload.worker.permits import Permits
from busload.worker.settlement import Outcomes, Settlement
from busload.worker.shared import Shared
from busload.worker.stats import Report, WorkerStats, handler_stats
from busload.worker.stop_log import log_left_behind, log_stopping
from busload.worker.sweep import sweep
from busload.worker.tracing import Spans, TracedHandlers, TracedOutcomes, TracedSettlement
from busload.worker.wake_ups import WakeListener

log = logging.getLogger("busload")

ENGINE_CONNECTIONS = 5
"""One each for claiming, settling, promoting and sweeping, and one for results whose batch others hold; one more where
limits are asked, and one for a relay."""

BRIEFLY = 1.0
"""Seconds that a stopping worker waits for the database at least: for a claim under way, and to hand back."""

ASLEEP_PAUSES = 6
"""A worker that nothing was sent to for a while is told of pauses, and looks for them this many times less often."""

PATIENCE = 24 * 3600.0
"""Seconds that a handler waits for a connection: a day, as other handlers give theirs back sooner or later."""


class Run:
    """`async with` starts everything but the claims, and stops it in reverse order."""

    def __init__(
        self,
        bus: CommandBus,
        settings: WorkerSettings,
        domains: list[str],
        name: str,
        on_asked_to_stop: Callable[[], None],
        lifespan: Callable[[], Any] | None = None,
    ) -> None:
        self._bus, self._settings, self._domains, self._name = bus, settings, domains, name
        self._on_asked_to_stop = on_asked_to_stop
        self._lifespan = WorkerLifespan(bus.hooks, bus.hooks.lifespan if lifespan is None else lifespan)
        self._failure_calls: FailureCalls | None = None
        self._loop = asyncio.get_running_loop()
        self._stopping, self._hurry, self._moved = asyncio.Event(), asyncio.Event(), Event()
        self._resources = AsyncExitStack()
        self._loops: list[Loop] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._rounds: list[asyncio.Task[None]] = []
        self.started = False
        self.left_behind: list[Leased] = []
        """Commands whose handlers have not ended, though the run has."""

    async def __aenter__(self) -> Self:
        bus = self._bus
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self._resources.aclose)
            if not bus.database.is_open:
                self._resources.push_async_callback(bus.close)
            await bus.open(wait=None)
            if not await ends_first(find_database(bus, self._settings.wait_for_database), self._stopping):
                raise StoppedEarlyError
            state = NO_STATE
            if self._lifespan.needed:
                self._resources.push_async_callback(self._lifespan.close)
                state = await self._lifespan.open()
            self._assemble(state)
            undo.push_async_callback(self._unregister)
            await asyncio.to_thread(self._heartbeat.start)
            await self._pauses.look()
            await self._distribution.start()
            await self._schedules.start()
            undo.pop_all()  # the start has succeeded
        self._executor.start()
        self.started = True
        self._report = Report(self.stats)
        self._start(Loop("Reporting", self._report.once), self._watching_pauses, self._limiting, self._finding_deserted)
        self._start(*self._freeing)
        log.info("Worker %s serves %s, %d at a time", self._name, ", ".join(self._domains), self._settings.concurrency)
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._stop()
        finally:
            ending = asyncio.create_task(self._end())
            cancelled: asyncio.CancelledError | None = None
            while not ending.done():  # it takes seconds at most, and has to be done
                try:
                    await asyncio.shield(ending)
                except asyncio.CancelledError as again:
                    cancelled = again
            if cancelled is not None:
                raise cancelled
            ending.result()

    async def until_stopped(self) -> None:
        self._rounds = self._start(*self._taking)
        self._start(self._sweeping, self._recording, self._firing, *self._pruning, *self._distribution.loops)
        self._tasks.append(asyncio.create_task(self._listener.run(), name="busload-listen"))
        if self._broker is not None:
            self._broker.start()
        await self._stopping.wait()

    async def until_drained(self) -> int:
        """Claim and run until a look finds nothing ready and nothing due; return how many attempts were settled."""
        await self._sweep_once()
        while not self._stopping.is_set():
            self._moved.clear()
            if self._broker is not None:
                await self._broker.relay.publish_due()
            look = await self._claimer.once(everywhere=True)
            if look.found_nothing and self._gatherer.flush():
                continue  # nothing will join what was gathered for a bulk handler
            if look.pause == 0:
                await asyncio.sleep(0)
            elif self._line.in_hand or self._settlement.waiting or self._shared.permits.freeing:
                await self._moved.wait(self._settings.poll_every.total_seconds())
            elif self._moved.is_set():
                continue  # a settlement that the look may not have seen: it can have sent a callback or a reply
            elif not look.found_nothing:
                await asyncio.sleep(look.pause or 0)  # others had locked what is ready
            elif not await self._make_ready():
                break
        return self._settlement.settled

    async def _make_ready(self) -> bool:
        """Make ready what is due: scheduled loads, schedules, events of buffers. Return whether anything was."""
        promoted = (await self._shared.perform(claim.promote())).loads
        return bool(promoted or await self._schedules.fire() or await self._distribution.distribute())

    def stop(self, *, hurry: bool) -> None:
        """Stop; with `hurry`, without waiting for what runs. From any thread, and from a signal's handler."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        if hurry:
            self._loop.call_soon_threadsafe(self._hurry.set)

    def abandon(self) -> None:
        """Hand everything back from another thread, while the event loop is blocked and before the process ends."""
        self._heartbeat.let_go()
        hand_back_in_thread(self._shared)

    def stats(self) -> WorkerStats:
        parts = {
            "claimer": self._claimer,
            "room": self._claimer.room,
            "settlement": self._settlement,
            "outcomes": self._settlement.outcomes,
            "line": self._line,
            "hand_back": self._hand_back,
            "held": self._held,
            "calls": self._executor.calls,
        }
        return gathered(
            WorkerStats,
            parts,
            concurrency=self._settings.concurrency,
            settlement=self._settlement.stats.snapshot(),
            in_line=len(self._line),
            handlers=handler_stats(self._settlement.attempts),
            broker=None if self._broker is None else self._broker.stats(),
        )

    # -- starting

    def _assemble(self, state: Any) -> None:
        bus, settings = self._bus, self._settings
        silence = bus.settings.response_timeout.total_seconds()
        more = bool(bus.handlers.limits) + bool(bus.transport)
        self._pool = pool = engine_pool(bus.dsn, ENGINE_CONNECTIONS + more, response_timeout=silence)
        about = {"timeout": PATIENCE, "response_timeout": silence}
        transactions = async_pool(bus.dsn, bus.settings.pool_size, **about, connection_class=GuardedAsyncConnection)
        self._threads = Threads(bus, settings.most_threads, PATIENCE)
        self._pauses, self._limiter = Pauses(pool, self._domains), Limiter(pool, settings.wait_for_turn.total_seconds())
        self._shared = shared = Shared(
            bus, settings, self._domains, pool, transactions, self._threads, self._pauses, self._limiter, state
        )
        self._held, self._outage = shared.held, shared.outage
        self._resources.push_async_callback(pool.close)
        self._distribution = Distribution(shared)
        self._resources.push_async_callback(self._distribution.close)
        self._assemble_stations(shared)
        self._resources.callback(shared.failures.close)
        self._resources.push_async_callback(self._executor.close)
        self._resources.push_async_callback(transactions.close)
        self._resources.callback(self._threads.close)
        self._claiming = Loop("Claiming", self._claim, self._outage)
        self._claimer.wake = self._claiming.wake
        self._claiming_newcomers = Loop("Claiming newcomers", self._claim_newcomers, self._outage)
        self._promoting = Loop("Promoting", self._claimer.promote, self._outage)
        self._taking = self._claiming, self._promoting, self._claiming_newcomers
        self._sweeping = Loop("Sweeping", self._sweep_once, self._outage)
        self._recording = Loop("Recording statistics", self._recorder.once, self._outage)
        declared = list(bus.declared_schedules.values())
        self._schedules = ScheduleStation(
            shared.perform, shared.in_transaction, declared, bus.via, bus.around_sends, bus.settings.limits
        )
        self._firing = Loop("Firing schedules", self._schedules.once, self._outage)
        self._finding_deserted = Loop("Looking for deserted leases", self._hand_back_deserted, self._outage)
        self._watching_pauses = Loop("Heeding pauses", self._heed_pauses, self._outage)
        self._limiting = Loop("Limiting", self._limiter.once, self._outage, self._limiter.due)
        freeing = Loop("Freeing permits", self._permits.once, self._outage)
        self._freeing = [freeing] if bus.handlers.concurrency_limits else []
        self._pruning = []
        if settings.keep_for is not None:
            prune = Prune(bus.database.in_transaction, settings.keep_for, settings.archive)
            self._pruning.append(Loop("Pruning", prune.once, self._outage))
        channels = [READY, CANCEL, HOLD, PAUSE, LIMIT, STOP, SCHEDULE, *([OUTBOX] if self._broker is not None else [])]
        self.notifications = Notifications(
            shared,
            self._claimer,
            self._heartbeat,
            self._broker,
            self._ask_to_stop,
            self._hand_on_soon,
            claiming=self._claiming,
            claiming_newcomers=self._claiming_newcomers,
            promoting=self._promoting,
            firing=self._firing,
            watching_pauses=self._watching_pauses,
        )
        self._listener = WakeListener(shared, channels, self.notifications.hear, self._outage, self._look_often)
        self._claimer.is_found = lambda: self._listener.is_found

    def _assemble_stations(self, shared: Shared) -> None:
        settings, telemetry = self._settings, shared.bus.database.telemetry
        spans = None if telemetry is None else Spans(telemetry)
        station = self._pool, self._held, settings, self._on_settled, self._outage
        self._settlement = Settlement(*station) if spans is None else TracedSettlement(spans, *station)
        hooks = shared.bus.hooks
        if hooks.middleware:
            within = HandlersInMiddleware(shared.bus.handlers, hooks.middleware)
            within.refuse_mixture(self._domains)
            shared.handlers = within
        if hooks.failure or shared.bus.handlers.calls_after_failures:
            self._failure_calls = FailureCalls(shared.bus.handlers, hooks.failure)
            self._settlement.on_failed = self._failure_calls.heed
        if spans is not None:
            shared.handlers = TracedHandlers(spans, shared.handlers)
            self._resources.callback(spans.close)
        self._recorder = Recorder(shared.in_transaction, self._settlement.attempts)
        self._hand_back = HandBack(shared)
        shared.permits = self._permits = Permits(shared, self._hand_back.add, self._moved.set)
        if shared.bus.handlers.ordered:
            self._permits.order.follow(self._settlement)
        self._outcomes = (
            Outcomes(shared, self._settlement) if spans is None else TracedOutcomes(spans, shared, self._settlement)
        )
        self._line = Line(settings.concurrency, settings.most_threads, self._on_low)
        self._gatherer = Gatherer(shared.handlers, self._line, shared.failures)
        self._executor = Executor(shared, self._line, self._gatherer, self._settlement, self._outcomes)
        self._broker = None if shared.bus.transport is None else Broker(shared, lambda: self._claiming.wake())
        self.self_check = SelfCheck(
            self._name, shared, self._settlement, self._broker, self._stopping, lambda: self._rounds
        )
        listeners = self._on_renewal, self._on_declared_dead, self.self_check.condition, self._on_asked_to_stop
        self._heartbeat = self.self_check.heartbeat = Heartbeat(shared, self._name, *listeners)
        if self._broker is not None:
            self._held.on_gone = self._broker.deliveries.gone
        self._claimer = Claimer(shared, self._hand_back, self._line, self._gatherer, self._settlement, self._broker)

    def _start(self, *loops: Loop) -> list[asyncio.Task[None]]:
        tasks = [asyncio.create_task(loop.run(), name=loop.name) for loop in loops]
        self._loops += loops
        self._tasks += tasks
        return tasks

    async def _unregister(self) -> None:
        """Undo a start that failed or was cancelled: nothing was claimed yet."""
        try:
            await asyncio.to_thread(self._heartbeat.undo)
        except psycopg.Error as error:
            log.debug("The worker's row stays until its lease has ended: %s", error)

    # -- rounds

    async def _claim(self) -> float | None:
        return (await self._claimer.once()).pause

    async def _claim_newcomers(self) -> float | None:
        try:
            return await self._claimer.newcomers.once()
        finally:
            self._claiming.wake()

    async def _sweep_once(self) -> float:
        number, judge = self._shared.number, self._heartbeat.in_touch
        parked = await sweep(self._pool, worker=number, domains=self._domains, judge=judge)
        if parked and self._failure_calls is not None:
            self._failure_calls.heed_parked(await self._shared.perform(rescue.parked(parked)))
        return self._settings.sweep_every.total_seconds()

    async def _heed_pauses(self) -> float:
        if await self._pauses.look():
            self._claimer.heed_pauses()
            self._limiter.refuse_domains(self._pauses.paused)
            self._moved.set()
            for loop in (self._claiming, self._sweeping, *self._distribution.loops):
                loop.wake()
        return self._settings.sweep_every.total_seconds() * (ASLEEP_PAUSES if self._claimer.asleep else 1)

    async def _hand_back_deserted(self) -> float:
        """Hand back attempts that nobody works at any more, whatever the fault.

        The heartbeat renews every lease of this worker, so no other worker would ever take such a lease over.
        """
        self._executor.replace_ended_tasks()
        if deserted := self._held.deserted(self._executor.alive() + self._hand_back.leaving):
            leases = counted(len(deserted), "lease")
            log.error("Handing back %s whose commands have neither run to an end nor wait to run", leases)
            await self._hand_back.release(deserted)
        return self._settings.sweep_every.total_seconds()

    # -- what stations and the heartbeat say

    def _ask_to_stop(self, commands: Iterable[int]) -> None:
        """Ask commands to stop; those of them that have not begun end at once."""
        self._held.ask_to_stop(commands)
        if stopped := self._claimer.take_out_stopping():
            self._tasks.append(asyncio.create_task(self._outcomes.stop(stopped)))

    def _hand_on_soon(self) -> None:
        self._tasks.append(asyncio.create_task(self._claimer.wake_ups.hand_on_at_once()))

    def _look_often(self) -> None:
        """Nobody finds this worker any more: look for everything by itself."""
        for loop in (self._claiming, self._promoting, self._watching_pauses):
            loop.wake()

    def _on_settled(self, room_wanted: bool) -> None:
        self._moved.set()
        self._line.let_in()
        if self._held.suspect_ended():
            self._claimer.look_at_queue()  # the next suspect may run
            self._claiming.wake()
        elif room_wanted:
            self._claiming.wake()

    def _on_low(self) -> None:
        self._moved.set()
        if self._claimer.emptied and self._line.in_hand == 0:
            self._settlement.flush_soon()  # no further result will join those that wait
        else:
            self._claiming.wake()

    def _on_renewal(self, renewal: Renewal) -> None:
        strange = renewal.settled.difference(self._held.lease_ids)
        lost = self._held.reconcile(present=renewal.leases, canceled=renewal.canceled)
        if lost:
            log.warning("Lost %s; what these commands return will not count", counted(lost, "lease"))
        if renewal.stopping:
            self._ask_to_stop(renewal.stopping)
        # An answer that waits behind a blocked loop is not lost; a claim sent later than that cannot be the one.
        sent_at = self._claimer.sent_at
        if strange and (sent_at is None or time.monotonic() - sent_at < self._settings.lease_for.total_seconds() / 3):
            self._release_soon(strange)

    def _on_declared_dead(self, lost: Set[UUID], resumed: Set[UUID]) -> None:
        self._held.lose(lost)
        if ended := resumed - set(self._held.lease_ids):  # their results were refused while they were taken up
            self._release_soon(ended)
        for loop in self._freeing:
            loop.wake()

    def _release_soon(self, lease_ids: Iterable[UUID]) -> None:
        self._tasks.append(asyncio.create_task(self._hand_back.release(list(lease_ids))))

    # -- stopping

    async def _stop(self) -> None:
        """Stop claiming, let handlers finish, settle, hand back, retire: each as far as the database allows."""
        if self._rounds:
            log_stopping(self._line.in_hand, self._settlement.waiting, self._settings.grace)
        self._claimer.empty_line()  # at once: a handler that ends meanwhile must not let the next command start
        beside = self._recording, self._firing, *self._pruning, *self._distribution.loops, *self._freeing
        for loop in (*self._taking, *beside):
            loop.stop()
        deadline, grace = self._settings.deadline.total_seconds(), self._settings.grace.total_seconds()
        graceful = TimeLimit(grace)
        first = TimeLimit(min(deadline, max(grace, BRIEFLY)))  # part of the grace time: handlers go on meanwhile
        if self._broker is not None:
            await self._broker.stop_receiving(first.left)
        try:
            async with asyncio.timeout(first.left):
                await self._listener.leave()
        except (psycopg.Error, TimeoutError) as error:
            log.debug("Others take this worker for one that listens until they look again: %r", error)
        if self._rounds:  # a claim under way still brings commands, and only what we know of can be handed back
            await asyncio.wait(self._rounds, timeout=first.left)
        try:
            async with asyncio.timeout(first.left):
                self._claimer.empty_line()
                await self._hand_back.once()  # without waiting for what runs
        except (psycopg.Error, TimeoutError) as error:
            log.debug("What has not started is handed back with the rest: %r", error)
        self._limiter.refuse_domains(self._domains)
        await ends_first(self._line.idle.wait(), self._hurry, graceful.left)
        await self._executor.stop(deadline)
        in_vain = self._outage.is_away and not self._settlement.waiting
        last = TimeLimit(BRIEFLY if in_vain else deadline)  # results are worth waiting for
        self._limiting.stop()
        await self._outcomes.close(timedelta(seconds=last.left))
        abandoned = await self._settlement.close(timedelta(seconds=last.left))
        await self._permits.close(timedelta(seconds=last.left))
        self._sweeping.stop()
        if self._broker is not None:
            await self._broker.stop_relaying(last.left)
        try:
            async with asyncio.timeout(max(last.left, BRIEFLY)):
                await self._hand_back.release(self._held.lease_ids)
                await write_tallies(self._pool, self._shared.tallies)
                # A heartbeat that came after the retirement would take it for a death, and register the worker again.
                await asyncio.to_thread(self._heartbeat.stop)
                await self._shared.perform(rescue.retire(worker=self._shared.number))
        except (psycopg.Error, TimeoutError) as error:
            log.warning("Could not hand back the remaining commands; others take them when the lease ends: %r", error)
        await self._recorder.close(BRIEFLY if self._outage.is_away else deadline)
        if self._failure_calls is not None:
            await self._failure_calls.close(max(last.left, BRIEFLY))
        if abandoned:
            again = "Its command runs again." if abandoned == 1 else "Their commands run again."
            raise InvalidOperationError(
                f"{counted(abandoned, 'result')} could not be settled before the worker stopped. {again}"
            )

    async def _end(self) -> None:
        """End everything, however far the stop came. Other workers rescue what this one still holds."""
        self._heartbeat.let_go()
        for loop in self._loops:
            loop.stop()
        for task in self._tasks:
            task.cancel()
        await self._executor.stop(within=1)
        self.left_behind = log_left_behind((*self._executor.running, *self._threads.running))
        if self._broker is not None:
            await self._broker.end()
        await self._outcomes.close(timedelta(0))
        await self._settlement.close(timedelta(0))
        await self._permits.close(timedelta(0))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._heartbeat.stop)
        self._outage.close()
        self._report.finish()
        await self._resources.aclose()
