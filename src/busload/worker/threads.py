"""What handlers written with `def` need, made when the first one runs: threads, and a bus that waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from psycopg_pool import ConnectionPool

from busload.bus import CommandBus, SyncCommandBus
from busload.domain.execution import Leased
from busload.store import connection
from busload.store.connection import Connection
from busload.worker.context import SyncHandlerContext


class Threads:
    def __init__(self, bus: CommandBus, concurrency: int, patience: float) -> None:
        self._async_bus, self._concurrency, self._patience = bus, concurrency, patience
        self._bus: SyncCommandBus | None = None
        self._transactions: ConnectionPool[Connection] | None = None
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="busload-handler")
        self._running: set[asyncio.Future[Any]] = set()

    def context(self, leased: Leased) -> SyncHandlerContext:
        if self._bus is None or self._transactions is None:
            dsn, settings = self._async_bus.dsn, self._async_bus.settings
            self._bus = SyncCommandBus(dsn, settings=settings).open()
            self._transactions = connection.pool(dsn, settings.pool_size, min_size=0, timeout=self._patience)
            self._transactions.open()
        return SyncHandlerContext(leased, self._bus, self._transactions)

    def submit(self, call: Callable[[], Any]) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().run_in_executor(self._threads, call)
        self._running.add(future)
        future.add_done_callback(self._forget)
        return future

    def _forget(self, future: asyncio.Future[Any]) -> None:
        self._running.discard(future)
        if not future.cancelled():
            future.exception()  # seen: what an overdue handler raises in the end is nobody's error any more

    def close(self) -> None:
        """Let go of everything; a handler that still runs cannot be stopped and keeps its thread and connections."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._bus is not None and self._transactions is not None and not self._running:
            self._transactions.close()
            self._bus.close()
