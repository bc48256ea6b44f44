"""How a peer's program talks with the measurement: words in, lines of JSON out. talk.mjs is the same for Node.

A program is called with a role and the URL of its store:

- `install` makes the tables, or empties the store, and ends;
- `send` says `{"ready": 1}` and answers each line: `make 1000` gets inputs ready, `enqueue` sends them in bulk,
  `send 10` sends one after the other, `stamp` sends a single one and answers when it was called and when it
  returned, `batch` sends what was made as one batch with a callback, `left` answers whether anything is unfinished;
- `work` says `{"ready": 1}`, starts on `run` or `drain`, says `{"done": n}` as commands are handled, and `{"stamp": t}`
  or `{"callback": t}` as those start. Times are those of the monotonic clock, which all processes share.

Both end with their input. This is the standard library alone: no peer has to live with another's packages.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

Verbs = Mapping[str, Callable[[int], Awaitable[object]]]

SAY_EVERY = 0.01
"""Seconds between two lines about what was handled: a line for each would cost more than handling it."""


def say(**fact: object) -> None:
    sys.stdout.write(f"{json.dumps(fact)}\n")
    sys.stdout.flush()


def stamp() -> None:
    say(stamp=time.monotonic())


def callback() -> None:
    say(callback=time.monotonic())


class Handled:
    """What a worker process has done."""

    def __init__(self) -> None:
        self.count = 0
        self._said = 0

    def tell(self) -> None:
        if self.count != self._said:
            self._said = self.count
            say(done=self.count)

    async def tell_on(self) -> None:
        while True:
            await asyncio.sleep(SAY_EVERY)
            self.tell()


async def answer(verbs: Verbs) -> None:
    """The role `send`."""
    say(ready=1)
    while line := await _line():
        await _answer(verbs, line)


async def work(run: Callable[[Handled, bool], Coroutine[Any, Any, object]], verbs: Verbs | None = None) -> None:
    """The role `work`: `run` is called with what to count in, and whether to end when nothing is left."""
    handled = Handled()
    say(ready=1)
    how = await _line()
    if not how:
        return
    running = asyncio.create_task(run(handled, how == "drain"))
    running.add_done_callback(_end_if_failed)
    telling = asyncio.create_task(handled.tell_on())
    while line := await _line():
        await _answer(verbs or {}, line)
    telling.cancel()
    os._exit(0)  # the database is dropped next: nothing is worth a goodbye


async def _line() -> str:
    line: str = await asyncio.to_thread(sys.stdin.readline)
    return line.strip()


async def _answer(verbs: Verbs, line: str) -> None:
    verb, _, count = line.partition(" ")
    say(answer=await verbs[verb](int(count or 0)))


def _end_if_failed(running: asyncio.Task[object]) -> None:
    if not running.cancelled() and (error := running.exception()):
        traceback.print_exception(error)
        os._exit(1)
