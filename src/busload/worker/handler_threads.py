"""Threads for handlers written with `def`, with a bus for them. All of it is made when the first one runs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

from busload.bus import CommandBus
from busload.commands.execution import Leased
from busload.sync.bus import SyncCommandBus
from busload.sync.guarded_connection import GuardedConnection
from busload.sync.pool import Pool, pool

T = TypeVar("T")


class Threads:
    def __init__(self, bus: CommandBus, most: int, patience: float) -> None:
        self._async_bus, self._patience = bus, patience
        self.most = most
        """How many calls may run at a time. The caller of `submit` sees to that."""
        self._connections: tuple[SyncCommandBus, Pool] | None = None
        self._calls: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._running: dict[asyncio.Future[Any], Sequence[Leased]] = {}
        self._overdue: dict[asyncio.Future[Any], float] = {}
        """Since when calls run though their time is up."""

    @property
    def connections(self) -> tuple[SyncCommandBus, Pool]:
        """The bus of handlers in threads, and the connections for their transactions."""
        if self._connections is None:
            dsn, settings = self._async_bus.dsn, self._async_bus.settings
            make: type[SyncCommandBus] = self._async_bus.handlers.bus_of_threads or SyncCommandBus
            bus = make(dsn, transport=self._async_bus.given_transport, settings=settings).open(wait=None)
            bus.handlers, bus.hooks = self._async_bus.handlers, self._async_bus.hooks
            transactions = pool(
                dsn,
                settings.pool_size,
                timeout=self._patience,
                connection_class=GuardedConnection,
                response_timeout=settings.response_timeout.total_seconds(),
            )
            self._connections = bus, transactions
        return self._connections

    @property
    def running(self) -> list[Leased]:
        """The commands whose handlers run in threads now."""
        return [one for leased in self._running.values() for one in leased]

    @property
    def pools(self) -> list[Pool]:
        """The connections that handlers in threads use, as far as they were made."""
        return [] if self._connections is None else [self._connections[0].pool, self._connections[1]]

    def stuck(self, after: float) -> int:
        """How many calls still run so many seconds after their time was up."""
        now = time.monotonic()
        return sum(now - since >= after for since in list(self._overdue.values()))

    def time_is_up(self, future: asyncio.Future[Any]) -> None:
        """The time of this call is up. Its thread goes on until the handler returns."""
        self._overdue[future] = time.monotonic()

    def submit(self, call: Callable[[], T], leased: Sequence[Leased]) -> asyncio.Future[T]:
        """Run a call in a thread. No call waits, as there are never more calls than threads."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._running[future] = leased
        future.add_done_callback(self._forget)
        if len(self._threads) < min(len(self._running), self.most):
            # A daemon, unlike the threads of the standard library's executor: a handler that never returns must not
            # keep the process from ending.
            thread = threading.Thread(target=self._serve, name=f"busload-handler-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._calls.put((call, future))
        return future

    def _serve(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            result, error = None, None
            try:
                result = call()
            except BaseException as raised:
                error = raised
            loop = future.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(_end, future, result, error)
            del item, call, future, result, error  # what a handler held is let go before the next call

    def _forget(self, future: asyncio.Future[Any]) -> None:
        self._running.pop(future, None)
        self._overdue.pop(future, None)
        if not future.cancelled():
            future.exception()  # seen: what an overdue handler raises in the end is nobody's error any more

    def close(self) -> None:
        """End the threads. A handler that still runs cannot be stopped: it keeps its thread and its connections."""
        for _ in self._threads:
            self._calls.put(None)
        if self._connections is not None and not self._running:
            bus, transactions = self._connections
            transactions.close()
            bus.close()


def _end(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
