"""Sends of one bus that are under way at once leave together."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg

from busload.commands import send
from busload.commands.command import NewCommand
from busload.commands.load import LOAD_SIZE, position_of
from busload.errors import InvalidOperationError, OutcomeUnknownError
from busload.postgres.write import PATIENCE, Write

log = logging.getLogger("busload")

NEIGHBOURS_FOR = 0.1
"""Seconds in which a send gets the id after the last one. It may then overtake commands that others sent meanwhile."""

QUIET_FOR = 0.004
"""Seconds after a notification in which sends to the same domain carry none."""

OWED_FOR = 0.005
"""Seconds after which workers are told of sends without a notification, if none with one has followed."""


STUCK_AFTER = 1.0
"""Seconds after which callers that wait for a statement to end send in another one, on another connection."""


@dataclass(slots=True)
class _Waiting:
    """A caller that waits until its command was sent, or until it has to send it by itself."""

    domain: str
    command: NewCommand
    sent: asyncio.Future[bool]

    def tell(self, sent: bool) -> None:
        if not self.sent.done():  # else its caller was cancelled
            self.sent.set_result(sent)

    def fail(self, error: BaseException) -> None:
        if isinstance(error, OutcomeUnknownError):
            own = OutcomeUnknownError(command_ids=[self.command.command_id])
            own.__cause__ = error.__cause__
            error = own
        if not self.sent.done():
            self.sent.set_exception(error)


class Sending:
    """Sends with one statement at a time. A caller that finds none under way sends at once; the others share the next.

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
        self._line: object = None
        """The line of statements that callers wait for, if one is under way. It may have overtaken others."""
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
        self._notices = _Notices(self._notify)

    async def send(self, domain: str, command: NewCommand, *, chosen: bool) -> None:
        """Return once the command is committed; only an id that its caller has chosen can be that of another."""
        if self._closing:
            raise InvalidOperationError(
                "The bus is being closed and sends no more. Send before that, or open it again."
            )
        self._callers += 1
        self._all_gone.clear()
        try:
            sent = await (self._wait(domain, command) if self._line else self._lead(domain, command, chosen))
            if not sent:  # and if it has to wait for another transaction, nobody waits with it
                await self._write(send.write(domain, command, via=self._via))
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
        self._notices.notify_now()
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _wait(self, domain: str, command: NewCommand) -> bool:
        waiting = _Waiting(domain, command, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._overtaking is None:
            self._overtaking = asyncio.get_running_loop().call_later(STUCK_AFTER, self._overtake)
        return await waiting.sent

    def _overtake(self) -> None:
        """If the statement under way does not end, those who wait for it send in another one."""
        self._overtaking = None
        if not self._waiting:
            return
        left = self._since + STUCK_AFTER - time.monotonic()
        if left <= 0 and self._lines < self._most_lines:
            self._start(self._send_waiting(self._begin()))
            left = STUCK_AFTER
        self._overtaking = asyncio.get_running_loop().call_later(max(left, 0.1), self._overtake)

    def _begin(self) -> object:
        """Begin a line of statements, of which one is under way at a time."""
        self._since = time.monotonic()
        self._lines += 1
        self._line = object()
        return self._line

    def _end(self, line: object) -> None:
        self._lines -= 1
        if line is self._line:  # else it was overtaken, and is waited for no more
            self._line = None

    async def _lead(self, domain: str, command: NewCommand, chosen: bool) -> bool:
        line = self._begin()
        try:
            await self._send_one(domain, command, PATIENCE if chosen else None)
            return True
        except psycopg.errors.LockNotAvailable:
            return False
        finally:
            if self._waiting and line is self._line:
                self._start(self._send_waiting(line))
            else:
                self._end(line)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="busload-send")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_waiting(self, line: object) -> None:
        try:
            while line is self._line and (group := list(self._next_group())):
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
        id, notify = self._neighbours.next_id(kind, now), self._notices.due(domain, now)
        owed = notify and self._notices.notifying(domain, now)
        plan = send.send(domain, command, id=id, patience=patience, notify=notify, via=self._via)
        try:
            taken = await self._write(Write(plan, command_ids=[command.command_id], one_statement=True))
        except BaseException:
            if owed:
                self._notices.owe(domain)
            raise
        if taken != id:
            self._neighbours.begin(kind, now, taken)
        if not notify:
            self._notices.owe(domain)

    async def _send_together(self, group: list[_Waiting]) -> None:
        commands: dict[str, list[NewCommand]] = {}
        for waiting in group:
            commands.setdefault(waiting.domain, []).append(waiting.command)
        ids = [waiting.command.command_id for waiting in group]
        plan = send.send_together(commands, PATIENCE, self._via)
        await self._write(Write(plan, command_ids=ids, one_statement=True))

    def _notify(self, domains: list[str]) -> None:
        async def notify() -> None:
            try:
                await self._write(Write(send.notify(domains, self._via), one_statement=True))
            except Exception as error:  # they look by themselves, a little later
                log.warning("Could not tell the workers of %s that there is work: %s", ", ".join(domains), error)

        self._start(notify())


class SendingInThreads:
    """Sends for threads. Each command leaves by itself, because a thread waits for its own statement anyway."""

    def __init__(
        self, write: Callable[[Write[Any]], Any], via: send.Via = send.NO_BROKER, *, lines: int | None = None
    ) -> None:
        self._write, self._via = write, via

    def send(self, domain: str, command: NewCommand, *, chosen: bool) -> None:
        """Return once the command is committed."""
        self._write(send.write(domain, command, via=self._via, chosen=chosen))

    def close(self) -> None:
        """Nothing is under way that its caller does not wait for."""


class _Neighbours:
    """The positions of load numbers that were drawn by single sends: workers take neighbours as one load.

    A position is given out once, whatever becomes of it.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[str, int], tuple[int, float]] = {}

    def next_id(self, kind: tuple[str, int], now: float) -> int | None:
        id, until = self._free.get(kind, (0, 0.0))
        if now >= until or position_of(id) >= LOAD_SIZE:
            return None
        self._free[kind] = id + 1, until
        return id

    def begin(self, kind: tuple[str, int], now: float, first: int) -> None:
        self._free[kind] = first + 1, now + NEIGHBOURS_FOR


class _Notices:
    """Notifies a domain's workers at once after a silence, then every few milliseconds as long as sends go on."""

    def __init__(self, notify: Callable[[list[str]], None]) -> None:
        self._notify = notify
        self._notified: dict[str, float] = {}
        self._owed: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None

    def due(self, domain: str, now: float) -> bool:
        return now - self._notified.get(domain, -QUIET_FOR) >= QUIET_FOR

    def notifying(self, domain: str, now: float) -> bool:
        """A send notifies now, and so tells of the sends before it as well. Returns whether there are any."""
        owed = domain in self._owed
        self._notified[domain] = now
        self._owed.discard(domain)
        if self._timer is not None and not self._owed:
            self._timer.cancel()
            self._timer = None
        return owed

    def owe(self, domain: str) -> None:
        self._owed.add(domain)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(OWED_FOR, self.notify_now)

    def notify_now(self) -> None:
        """Notify the workers of all domains that were not told yet."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._owed:
            self._notify(sorted(self._owed))
            self._owed.clear()
