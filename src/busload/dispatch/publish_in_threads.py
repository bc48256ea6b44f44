"""Publishing for code that runs in threads. Transports know only asyncio, so an event loop in a thread runs them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from busload.dispatch import relay
from busload.dispatch.outbox import Piece, Unpublished
from busload.dispatch.publish import Publisher
from busload.dispatch.reconcile import Reconciler, Reconciliation
from busload.errors import InvalidOperationError
from busload.postgres import waiting
from busload.postgres.plan import Plan
from busload.transports import Transport

if TYPE_CHECKING:
    from busload.telemetry.opentelemetry import Telemetry

T = TypeVar("T")


class ThreadPublisher:
    """A `Publisher` whose calls block. The thread starts with the first call, and ends when the publisher is closed."""

    def __init__(self, transport: Transport, perform: Callable[[Plan[Any]], Any], **options: Any) -> None:
        self.transport = transport
        self.of_loop = Publisher(transport, partial(waiting.in_thread, perform), **options)
        """The publisher that does the work, in the event loop."""
        self._loop: LoopThread | None = None
        self._starting = threading.Lock()

    @property
    def telemetry(self) -> Telemetry | None:
        return self.of_loop.telemetry

    @telemetry.setter
    def telemetry(self, telemetry: Telemetry | None) -> None:
        self.of_loop.telemetry = telemetry

    @property
    def page(self) -> int:
        return self.of_loop.page

    def publish(self, loads: Sequence[Unpublished]) -> list[Piece]:
        return self.run(self.of_loop.publish(loads))

    def close(self) -> None:
        with self._starting:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.close(self.transport.aclose)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        with self._starting:
            if self._loop is None:
                self._loop = LoopThread()
        return self._loop.run(work)


def recover(
    publisher: ThreadPublisher, perform: Callable[[Plan[Any]], Any], *, publish_again_after: timedelta
) -> relay.Recovered:
    perform_in_thread = partial(waiting.in_thread, perform)
    return publisher.run(relay.recover(publisher.of_loop, perform_in_thread, publish_again_after=publish_again_after))


class ThreadReconciler:
    """A `Reconciler` whose calls block."""

    def __init__(self, publisher: ThreadPublisher, read: Callable[..., Any], write: Callable[..., Any]) -> None:
        in_thread = (partial(waiting.in_thread, call) for call in (read, write))
        self._publisher, self._reconciler = publisher, Reconciler(publisher.of_loop, *in_thread)

    def compare(self, domain: str, *, repair: bool) -> Reconciliation:
        return self._publisher.run(self._reconciler.compare(domain, repair=repair))


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
