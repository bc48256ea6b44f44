"""Publishing for code that runs in threads. Transports know only asyncio, so an event loop in a thread runs them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from busload.dispatch.outbox import Piece, Unpublished
from busload.dispatch.publish import OnLoan, Publisher
from busload.errors import InvalidOperationError
from busload.postgres.plan import Plan
from busload.transports import Delivery, Transport

T = TypeVar("T")


class ThreadPublisher:
    """A `Publisher` whose calls block. The thread starts with the first call, and ends when the publisher is closed."""

    def __init__(self, transport: Transport, perform: Callable[[Plan[Any]], Any], **options: Any) -> None:
        async def perform_in_thread(plan: Plan[Any]) -> Any:
            return await asyncio.to_thread(perform, plan)

        self._publisher = Publisher(transport, perform_in_thread, **options)
        self._loop: LoopThread | None = None
        self._starting = threading.Lock()
        self.transport, self.key = transport, self._publisher.key
        self.queue, self.is_stuck = self._publisher.queue, self._publisher.is_stuck

    @property
    def page(self) -> int:
        return self._publisher.page

    @property
    def left_alone(self) -> list[str]:
        return self._publisher.left_alone

    def publish(self, loads: Sequence[Unpublished], *, again: bool = False) -> list[Piece]:
        return self._run(self._publisher.publish(loads, again=again))

    def depth(self, queue: str) -> int | None:
        return self._run(self._publisher.depth(queue))

    def peek(self, queue: str, *, limit: int) -> list[bytes] | None:
        return self._run(self._publisher.peek(queue, limit=limit))

    def lend(self, queue: str, most: int) -> ThreadOnLoan:
        return ThreadOnLoan(self._publisher.lend(queue, most), self._run)

    def close(self) -> None:
        with self._starting:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.close(self._publisher.close)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        with self._starting:
            if self._loop is None:
                self._loop = LoopThread()
        return self._loop.run(work)


class ThreadOnLoan:
    """Messages on loan, for a thread."""

    def __init__(self, on_loan: OnLoan, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._on_loan, self._run = on_loan, run

    def next_page(self) -> list[Delivery]:
        page: list[Delivery] = self._run(self._on_loan.next_page())
        return page

    def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        self._run(self._on_loan.acknowledge(deliveries))

    def reject(self, delivery: Delivery, why: str) -> None:
        self._run(self._on_loan.reject(delivery, why))

    def give_back(self) -> None:
        self._run(self._on_loan.give_back())


class LoopThread:
    """An event loop in a thread of its own, which does not keep the process from ending."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=asyncio.run, args=[self._serve()], name="busload-publish", daemon=True)
        self._thread.start()
        self._loop, self._stopping = self._started.result()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for work that is done in the loop. The work is cancelled if the wait is interrupted."""
        if self._process != os.getpid():
            work.close()
            raise InvalidOperationError("This bus was opened before a fork. Open a bus of its own in each process.")
        done = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return done.result()
        except BaseException:
            done.cancel()
            raise

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do a last piece of work and end the thread. A process that was forked off has no such thread."""
        if self._process != os.getpid():
            return
        try:
            self.run(last())
        finally:
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()

    async def _serve(self) -> None:
        stopping = asyncio.Event()
        self._started.set_result((asyncio.get_running_loop(), stopping))
        await stopping.wait()
