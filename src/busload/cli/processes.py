"""The processes of `busload worker --processes`: one that dies is replaced."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import click

from busload.commands.wording import counted
from busload.postgres.waiting import Event
from busload.worker.os_signals import Signals

log = logging.getLogger("busload")

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before a process that ended by itself is replaced; the pause doubles until one lives for a minute."""

ASKED_TO_STOP = 64
"""What a process adds to its exit code if an operator has asked it to stop."""


class Processes:
    """Keeps some worker processes running, each a `busload worker` of its own, until it is told to stop."""

    def __init__(self, count: int, command_line: Callable[[int], Sequence[str]], stop_within: timedelta) -> None:
        self._count, self._command_line, self._stop_within = count, command_line, stop_within
        self._running: set[asyncio.subprocess.Process] = set()

    async def run(self) -> int:
        """Return the exit code: 0 if every process that was told to stop has stopped cleanly, else the highest."""
        self._stopping, self._loop = Event(), asyncio.get_running_loop()
        with Signals(self._hear, for_good=True):
            codes = await asyncio.gather(*(self._keep_one(number) for number in range(self._count)))
        return max(codes)

    async def _keep_one(self, number: int) -> int:
        """Keep one process running: another replaces it if it ends without having been told to.

        A process that an operator has asked to stop is not replaced. When all were, the command ends.
        """
        pause = FIRST_PAUSE
        while not self._stopping.is_set():
            began = time.monotonic()
            process = await self._spawn(number)
            code = await self._wait_for(process)
            if self._stopping.is_set():
                # A process that our signal killed was not serving yet, or no longer.
                return 0 if -code in (signal.SIGTERM, signal.SIGINT) else code if code >= 0 else 1
            if code >= ASKED_TO_STOP:
                return self._not_replaced(process, code - ASKED_TO_STOP)
            pause = FIRST_PAUSE if time.monotonic() - began > 60 else pause
            log.error("Worker process %d ended with %d, starting another in %.1f s", process.pid, code, pause)
            await self._stopping.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return 0

    def _not_replaced(self, process: asyncio.subprocess.Process, code: int) -> int:
        left = counted(len(self._running), "process runs", "processes run")
        what = "Worker process %d has stopped as an operator has asked, and is not replaced: %s on"
        log.warning(what, process.pid, left)
        return code

    async def _spawn(self, number: int) -> asyncio.subprocess.Process:
        # In a process group of its own, so that Ctrl-C at a terminal reaches it once: through us.
        process = await asyncio.create_subprocess_exec(
            *(*self._command_line(number), "--parent", str(os.getpid())),
            process_group=0,
        )
        self._running.add(process)
        log.info("Started worker process %d", process.pid)
        if self._stopping.is_set():
            process.terminate()
        return process

    async def _wait_for(self, process: asyncio.subprocess.Process) -> int:
        """Its exit code; a process that hangs after it was told to stop is killed."""
        ended, told = asyncio.create_task(process.wait()), asyncio.create_task(self._stopping.wait())
        await asyncio.wait({ended, told}, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        await asyncio.wait({ended}, timeout=self._stop_within.total_seconds())
        if not ended.done():
            log.error("Worker process %d did not stop in time and is killed", process.pid)
            process.kill()
        self._running.discard(process)
        return await ended

    def _hear(self, count: int) -> None:
        # Another signal the second time: two of one kind that arrive together are one.
        self._loop.call_soon_threadsafe(self._stop, signal.SIGTERM if count == 1 else signal.SIGINT)

    def _stop(self, number: signal.Signals) -> None:
        self._stopping.set()
        for process in self._running:
            if process.returncode is None:
                process.send_signal(number)


def end_with_parent(parent: int) -> None:
    """Tell this process to stop when its parent has ended, however that ended. Only Linux can.

    The kernel's own signal for this (PR_SET_PDEATHSIG) comes once for each thread of the parent, and a third signal
    ends a worker at once.
    """
    gone = click.ClickException(f"Process {parent}, which started this one, has ended.")
    if sys.platform == "linux":
        try:
            watched = os.pidfd_open(parent)
        except ProcessLookupError:
            raise gone from None

        def stop_after_parent() -> None:
            select.select([watched], [], [])
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=stop_after_parent, name="busload-parent", daemon=True).start()
    if os.getppid() != parent:  # another process has its number by now
        raise gone
