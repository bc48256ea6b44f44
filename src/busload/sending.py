"""Sends of one bus that are under way at once leave together."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg

from busload.domain.command import NewCommand
from busload.domain.ids import LOAD_SIZE, POSITIONS
from busload.errors import InvalidOperationError, OutcomeUnknown
from busload.requests import PATIENCE, Write
from busload.store import send

log = logging.getLogger("busload")

NEIGHBOURS_FOR = 0.1
"""Seconds in which a send gets the id next to the last one's, and so may overtake what others have sent meanwhile."""

QUIET_FOR = 0.004
"""Seconds after a notification in which sends to the same domain carry none; one that comes later does again."""

OWED_FOR = 0.005
"""Seconds after which workers are told of sends that carried none and were followed by none that did."""


STUCK_AFTER = 1.0
"""Seconds after which those who wait for a statement to end leave in one of their own, on another connection."""


@dataclass(slots=True)
class _Waiting:
    """A caller in the queue: told that its command was sent, or that it must go by itself."""

    domain: str
    command: NewCommand
    sent: asyncio.Future[bool]

    def tell(self, sent: bool) -> None:
        if not self.sent.done():  # else its caller was cancelled
            self.sent.set_result(sent)

    def fail(self, error: BaseException) -> None:
        if isinstance(error, OutcomeUnknown):
            own = OutcomeUnknown(command_ids=[self.command.command_id])
            own.__cause__ = error.__cause__
            error = own
        if not self.sent.done():
            self.sent.set_exception(error)


class Sending:
    """One statement at a time. Who finds none under way leaves at once; who comes meanwhile shares the next one.

    Each caller returns after the commit of its own command, or with its own error. A statement that is stuck, on a
    connection that is dead or behind a lock, holds up its own callers only: others overtake it, in at most `lines`
    statements at once.
    """

    def __init__(
        self,
        write: Callable[[Write[Any]], Coroutine[Any, Any, Any]],
        via: send.Via = send.NO_BROKER,
        *,
        lines: int = 5,
    ) -> None:
        self._write, self._via, self._most_lines = write, via, lines
        self._busy = False
        self._line = 0
        """Which of the statements under way is the last one, and is waited for."""
        self._lines = 0
        self._since = 0.0
        self._overtaking: asyncio.TimerHandle | None = None
        self._waiting: deque[_Waiting] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._callers = 0
        self._closing = False
        self._all_gone = asyncio.Event()
        self._all_gone.set()
        self._neighbours = _Neighbours()
        self._bell = _Bell(self._ring)

    async def send(self, domain: str, command: NewCommand, *, chosen: bool) -> None:
        """Return once the command is committed; only an id that its caller has chosen can be that of another."""
        if self._closing:
            raise InvalidOperationError(
                "The bus is being closed and sends no more. Send before that, or open it again."
            )
        self._callers += 1
        self._all_gone.clear()
        try:
            sent = await (self._wait(domain, command) if self._busy else self._lead(domain, command, chosen))
            if not sent:  # and if it has to wait for another transaction, nobody waits with it
                alone = partial(send.send, domain, command, via=self._via)
                again = partial(alone, patience=PATIENCE)
                await self._write(Write(alone(), command_ids=[command.command_id], one_statement=True, again=again))
        finally:
            self._callers -= 1
            if not self._callers:
                self._all_gone.set()

    async def close(self) -> None:
        """Wait for all that is under way; more is refused."""
        self._closing = True
        await self._all_gone.wait()
        if self._overtaking is not None:
            self._overtaking.cancel()
        self._bell.ring_now()
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _wait(self, domain: str, command: NewCommand) -> bool:
        waiting = _Waiting(domain, command, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._overtaking is None:
            self._overtaking = asyncio.get_running_loop().call_later(STUCK_AFTER, self._overtake)
        return await waiting.sent

    def _overtake(self) -> None:
        """Those who wait go on by themselves if the statement before them does not end."""
        self._overtaking = None
        if not self._waiting:
            return
        left = self._since + STUCK_AFTER - time.monotonic()
        if left <= 0 and self._lines < self._most_lines:
            self._begin()
            self._start(self._send_waiting(self._line))
            left = STUCK_AFTER
        self._overtaking = asyncio.get_running_loop().call_later(max(left, 0.1), self._overtake)

    def _begin(self) -> int:
        """A line of statements of which one is under way at a time; returns its number."""
        self._busy = True
        self._since = time.monotonic()
        self._line += 1
        self._lines += 1
        return self._line

    def _end(self, line: int) -> None:
        self._lines -= 1
        if line == self._line:  # else it was overtaken, and is waited for no more
            self._busy = False

    async def _lead(self, domain: str, command: NewCommand, chosen: bool) -> bool:
        line = self._begin()
        try:
            await self._send_one(domain, command, PATIENCE if chosen else None)
            return True
        except psycopg.errors.LockNotAvailable:
            return False
        finally:
            if self._waiting and line == self._line:
                self._start(self._send_waiting(line))
            else:
                self._end(line)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="busload-send")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_waiting(self, line: int) -> None:
        try:
            while line == self._line and (group := list(self._next_group())):
                self._since = time.monotonic()
                await self._send_group(group)
        except BaseException:  # only if the event loop is ending
            for waiting in self._waiting:
                waiting.sent.cancel()
            self._waiting.clear()
            raise
        finally:
            self._end(line)

    def _next_group(self) -> Iterator[_Waiting]:
        count, size = 0, 0
        while self._waiting and count < send.SOME and size < send.SOME_BYTES:
            waiting = self._waiting.popleft()
            if not waiting.sent.done():
                count, size = count + 1, size + len(waiting.command.data)
                yield waiting

    async def _send_group(self, group: list[_Waiting]) -> None:
        try:
            if len(group) == 1:
                await self._send_one(group[0].domain, group[0].command, PATIENCE)
            else:
                await self._send_together(group)
        except BaseException as error:
            for waiting in group:
                if isinstance(error, psycopg.Error) and error.sqlstate is not None:
                    waiting.tell(False)  # nothing was written, perhaps because of one: the others must not suffer
                else:
                    waiting.fail(error)
            if not isinstance(error, Exception):
                raise
        else:
            for waiting in group:
                waiting.tell(True)

    async def _send_one(self, domain: str, command: NewCommand, patience: int | None) -> None:
        now = time.monotonic()
        kind = domain, command.priority
        id, notify = self._neighbours.next_id(kind, now), self._bell.due(domain, now)
        owed = notify and self._bell.ringing(domain, now)
        plan = send.send(domain, command, id=id, patience=patience, notify=notify, via=self._via)
        try:
            taken = await self._write(Write(plan, command_ids=[command.command_id], one_statement=True))
        except BaseException:
            if owed:
                self._bell.owe(domain)
            raise
        if id is None:
            self._neighbours.begin(kind, now, taken)
        if not notify:
            self._bell.owe(domain)

    async def _send_together(self, group: list[_Waiting]) -> None:
        commands: dict[str, list[NewCommand]] = {}
        for waiting in group:
            commands.setdefault(waiting.domain, []).append(waiting.command)
        ids = [waiting.command.command_id for waiting in group]
        plan = send.send_together(commands, PATIENCE, self._via)
        await self._write(Write(plan, command_ids=ids, one_statement=True))

    def _ring(self, domains: list[str]) -> None:
        async def notify() -> None:
            try:
                await self._write(Write(send.notify(domains, self._via), one_statement=True))
            except Exception as error:  # they look by themselves, a little later
                log.warning("Could not tell the workers of %s that there is work: %s", ", ".join(domains), error)

        self._start(notify())


class _Neighbours:
    """The positions of load numbers that were drawn by single sends: workers take neighbours as one load.

    A position is given out once, whatever becomes of it.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[str, int], tuple[int, float]] = {}

    def next_id(self, kind: tuple[str, int], now: float) -> int | None:
        id, until = self._free.get(kind, (0, 0.0))
        if now >= until or id % POSITIONS >= LOAD_SIZE:
            return None
        self._free[kind] = id + 1, until
        return id

    def begin(self, kind: tuple[str, int], now: float, first: int) -> None:
        self._free[kind] = first + 1, now + NEIGHBOURS_FOR


class _Bell:
    """Notifies a domain's workers at once after a silence, then every few milliseconds as long as sends go on."""

    def __init__(self, ring: Callable[[list[str]], None]) -> None:
        self._ring = ring
        self._rang: dict[str, float] = {}
        self._owed: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None

    def due(self, domain: str, now: float) -> bool:
        return now - self._rang.get(domain, -QUIET_FOR) >= QUIET_FOR

    def ringing(self, domain: str, now: float) -> bool:
        """A send is under way that rings. It tells of those before as well: returns whether there are any."""
        owed = domain in self._owed
        self._rang[domain] = now
        self._owed.discard(domain)
        if self._timer is not None and not self._owed:
            self._timer.cancel()
            self._timer = None
        return owed

    def owe(self, domain: str) -> None:
        self._owed.add(domain)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(OWED_FOR, self.ring_now)

    def ring_now(self) -> None:
        """Ring for all that were not told yet."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._owed:
            self._ring(sorted(self._owed))
            self._owed.clear()
