"""A worker in a thread of a web process, for development. In production, workers are processes of their own."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading

from busload.worker import Worker

log = logging.getLogger("busload")


class WorkerThread:
    """Runs a worker beside a web application that has no event loop. The worker stops when the process ends."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._thread: threading.Thread | None = None
        self._lock, self._process = threading.Lock(), 0

    def start_once(self) -> None:
        """Start the thread, if this process has none yet. If the worker cannot start, the log says why."""
        if self._process == os.getpid():
            return
        with self._lock:
            if self._process != os.getpid():
                self._process = os.getpid()
                self._thread = threading.Thread(target=self._run, name="busload-worker", daemon=True)
                self._thread.start()
                atexit.register(self.stop)

    def stop(self) -> None:
        """Stop the worker with its grace time, and wait for that."""
        thread, self._thread = self._thread, None
        if thread is not None and self._process == os.getpid():
            self.worker.stop()
            thread.join()
            self._process = 0
            atexit.unregister(self.stop)

    def _run(self) -> None:
        log.info("Worker %s runs inside this process, for development", self.worker.name)
        try:
            asyncio.run(self.worker.run())
        except Exception:
            log.exception("The worker inside this process has ended")
