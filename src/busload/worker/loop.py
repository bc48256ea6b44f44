"""Repeats a round of work until told to stop, the same way for everything a worker repeats."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from busload.postgres.backoff import Backoff
from busload.postgres.outage import Outage
from busload.postgres.waiting import Event


class Loop:
    """Calls `once`, which returns the seconds to wait before the next round; `wake` cuts the wait short.

    A round that fails is repeated after a pause that grows to two seconds, so that an outage neither stops the loop nor
    makes it spin. A station that asks for rounds by an event of its own gives that event as `wake`.
    """

    def __init__(
        self,
        name: str,
        once: Callable[[], Awaitable[float | None]],
        outage: Outage | None = None,
        wake: Event | None = None,
    ) -> None:
        self.name, self._once, self._outage = name, once, outage or Outage()
        self._wake = wake or Event()
        self._stopping = False
        self._backoff = Backoff()

    def wake(self) -> None:
        self._wake.set()

    def stop(self) -> None:
        """Begin no further round; the round under way comes to its end."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            try:
                pause = await self._once()
                self._outage.worked(self.name)
                self._backoff.reset()
            except Exception as error:
                pause = self._backoff.pause()
                self._outage.failed(self.name, error)
            if pause == 0:
                await asyncio.sleep(0)
            else:
                await self._wake.wait(pause)


async def ends_first(work: Coroutine[Any, Any, object], event: asyncio.Event, seconds: float | None = None) -> bool:
    """Work until it is done, the event is set or the time is up. Returns whether it is done."""
    tasks = [asyncio.create_task(work), asyncio.create_task(event.wait())]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if done := tasks[0].done():
            tasks[0].result()
        return done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
