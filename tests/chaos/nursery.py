"""Forks workers on demand: everything is imported once, so that killing one and starting another costs milliseconds.

Run as a script of its own. Each line on stdin is JSON: `{"start": {...}}` is answered with the pid of a new worker,
`{"ended": true}` with `{pid: exit status}` of those that have ended since it was last asked. At the end of stdin, that
is also when the test dies, every worker is killed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

from busload import (
    BusinessRuleError,
    Command,
    CommandBus,
    HandlerContext,
    PermanentCommandError,
    RetryPolicy,
    Settings,
    SyncHandlerContext,
    TransientCommandError,
    Worker,
    WorkerSettings,
)

DOMAIN = "payments"
DID_NOT_START = 75
"""The exit status of a worker that found no database when it started: whoever runs workers starts another."""


class Ledger:
    """What handlers did, in a file that busload does not write: one line per fact, whole or not at all."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(self, fact: str, command: Command, execution_id: object) -> None:
        os.write(self._file, f"{fact} {command.command_id} {execution_id} {os.getpid()}\n".encode())


class Gate:
    """Opens when the test makes a file. One task looks for it, however many wait."""

    def __init__(self, path: str | None) -> None:
        self._path = Path(path) if path else None
        self._opened = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    async def wait(self) -> None:
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        await self._opened.wait()

    async def _look(self) -> None:
        assert self._path is not None, "a worker that waits needs a gate"
        while not self._path.exists():
            await asyncio.sleep(0.01)
        self._opened.set()


def register(bus: CommandBus, ledger: Ledger, options: dict[str, Any]) -> None:
    retry = RetryPolicy(max_attempts=3, backoff=(0.01,))
    pause = options.get("pause", 0.01)
    gate = Gate(options.get("gate"))

    @bus.handler(DOMAIN, "Work", retry=retry)
    async def work(command: Command, ctx: HandlerContext) -> int:
        ledger.note("start", command, ctx.execution_id)
        await asyncio.sleep(random.uniform(0, pause))
        ledger.note("end", command, ctx.execution_id)
        return 1

    @bus.handler(DOMAIN, "Transfer", retry=retry)
    async def transfer(command: Command, ctx: HandlerContext) -> None:
        ledger.note("start", command, ctx.execution_id)
        async with ctx.transaction() as conn:
            await conn.execute("INSERT INTO effect (command_id) VALUES (%s)", [command.command_id])
            await asyncio.sleep(random.uniform(0, pause))
        ledger.note("end", command, ctx.execution_id)

    @bus.handler(DOMAIN, "Block", retry=retry)
    def block(command: Command, ctx: SyncHandlerContext) -> None:
        ledger.note("start", command, ctx.execution_id)
        time.sleep(random.uniform(0, pause))
        ledger.note("end", command, ctx.execution_id)

    @bus.handler(DOMAIN, "Mixed", retry=retry)
    async def mixed(command: Command, ctx: HandlerContext) -> None:
        await asyncio.sleep(random.uniform(0, pause))
        match random.randrange(12):
            case 0:
                raise BusinessRuleError("no")
            case 1:
                raise PermanentCommandError("account closed")
            case 2 | 3:
                raise TransientCommandError("busy")

    @bus.handler(DOMAIN, "Suicide", retry=retry)
    async def suicide(command: Command, ctx: HandlerContext) -> None:
        ledger.note("start", command, ctx.execution_id)
        os._exit(9)

    @bus.handler(DOMAIN, "Wait", retry=retry)
    async def wait(command: Command, ctx: HandlerContext) -> str:
        """Runs until the test lets it go, with the heart beating meanwhile."""
        ledger.note("start", command, ctx.execution_id)
        await gate.wait()
        ledger.note("end", command, ctx.execution_id)
        return str(os.getpid())

    @bus.handler(DOMAIN, "Done", retry=retry)
    async def done(command: Command, ctx: HandlerContext) -> None:
        ledger.note("end", command, ctx.execution_id)


async def serve(options: dict[str, Any]) -> None:
    lease_for = timedelta(seconds=options.get("lease_for", 30))
    settings = WorkerSettings(
        lease_for=lease_for,
        poll_every=timedelta(milliseconds=100),
        sweep_every=timedelta(milliseconds=options.get("sweep_ms", 300)),
        grace=timedelta(seconds=options.get("grace", 5)),
        flush_every=timedelta(milliseconds=20),
        flush_size=options.get("flush_size", 1000),
        prefetch=timedelta(seconds=options.get("prefetch", 0.05)),
    )
    async with CommandBus(options["dsn"], settings=Settings(pool_size=4)) as bus:
        register(bus, Ledger(options["ledger"]), options)
        await Worker(bus, domains=[DOMAIN], concurrency=options.get("concurrency", 10), settings=settings).run()


def run_worker(options: dict[str, Any]) -> None:
    logging.basicConfig(filename=options["log"], level=logging.WARNING, format="%(process)d %(message)s")
    status = 1
    try:
        random.seed()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a process of its own
        asyncio.run(serve(options))
        status = 0
    except BaseException as error:
        logging.exception("The worker ended")
        if any(frame.name == "__aenter__" for frame in traceback.extract_tb(error.__traceback__)):
            status = DID_NOT_START
    finally:
        logging.shutdown()
        os._exit(status)


class Nursery:
    def __init__(self) -> None:
        self._children: set[int] = set()
        self._ended: dict[int, int] = {}

    def answer(self, request: dict[str, Any]) -> Any:
        self._reap()
        if "start" in request:
            # Until it listens, a signal ends it: Python may lose a KeyboardInterrupt in what it does after a fork.
            before = signal.signal(signal.SIGINT, signal.SIG_DFL)
            if (pid := os.fork()) == 0:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                run_worker(request["start"])
            signal.signal(signal.SIGINT, before)
            self._children.add(pid)
            return pid
        ended, self._ended = self._ended, {}
        return ended

    def _reap(self, *, wait: bool = False) -> None:
        for pid in list(self._children):
            found, status = os.waitpid(pid, 0 if wait else os.WNOHANG)
            if found:
                self._children.discard(pid)
                self._ended[pid] = os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        self._reap(wait=True)


def main() -> None:
    nursery = Nursery()
    try:
        for line in sys.stdin:
            print(json.dumps(nursery.answer(json.loads(line))), flush=True)
    finally:
        nursery.close()


if __name__ == "__main__":
    main()
