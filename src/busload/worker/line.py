"""The line before the slots: commands and chunks that were claimed, first come first served."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, TypeAlias
from uuid import UUID

from busload.commands.execution import Lease, Leased
from busload.handlers.registry import Gathering, Handler

if TYPE_CHECKING:
    from busload.worker.budget_gate import BudgetGate

Key: TypeAlias = tuple[str, str, object, UUID | None]
"""Domain, type, what `by` returned, and the lease of a suspect: a suspect runs apart from others."""

LEAST_URGENT = -32768
"""The lowest priority that a command can have."""


class Gathered:
    """A chunk on its way to a slot; in the line it counts as one command."""

    def __init__(self, key: Key, handler: Handler, gathering: Gathering, timer: asyncio.TimerHandle) -> None:
        self.key, self.handler, self.gathering, self.timer = key, handler, gathering, timer
        self.leased: list[Leased] = []
        self.bytes = 0
        self.in_line_since = 0.0
        self.started = 0.0

    @property
    def lease(self) -> Lease:
        """The lease of the first command. All commands have its domain, but others may have another lease."""
        return self.leased[0].lease

    def has_room_for(self, weight: int) -> bool:
        most = self.gathering.max_bytes
        return len(self.leased) < self.gathering.size and (
            not self.leased or most is None or self.bytes + weight <= most
        )

    def add(self, one: Leased, weight: int) -> None:
        self.leased.append(one)
        self.bytes += weight

    @property
    def full(self) -> bool:
        most = self.gathering.max_bytes
        return len(self.leased) >= self.gathering.size or (most is not None and self.bytes >= most)


Claimed: TypeAlias = Leased | Gathered
"""What stands in line: a single command, or a chunk."""


def commands_of(item: Claimed) -> list[Leased]:
    return [item] if isinstance(item, Leased) else item.leased


class Line:
    """More may stand here than there are slots.

    What needs a thread when none is free waits beside the line, so that others need not wait for a thread as well.
    What must not begin yet, because of the failure budget of its batch, waits at the `gate`. `on_low` is called when so
    few are in hand, or so many threads are free, as whoever fills the line has asked for.
    """

    def __init__(self, slots: int, threads: int, on_low: Callable[[], None]) -> None:
        self.ready: deque[Claimed] = deque()
        """What stands in line, for slots to take."""
        self.for_threads: deque[Claimed] = deque()
        """What waits for a thread."""
        self.gate: BudgetGate | None = None
        """None until a batch with a failure budget comes."""
        self.threads, self._in_threads = threads, 0
        self.on_low = on_low
        self.low_water = slots - 1
        """When no more than that are in hand, `on_low` is called once."""
        self.threads_wanted: int | None = None
        """When that many threads are free, `on_low` is called once."""
        self._resting: list[asyncio.Future[None]] = []
        self.idle = asyncio.Event()
        """Set while nothing is in hand."""
        self.idle.set()
        self._busy = self._busy_since = 0.0
        self.in_hand = 0
        """How many stand in line, wait for a thread or at the gate, or run."""
        self.finished = 0
        """How many have run."""

    @property
    def busy(self) -> float:
        """Seconds in which there was something in hand."""
        return self._busy + (time.monotonic() - self._busy_since if self.in_hand else 0.0)

    @property
    def items(self) -> list[Claimed]:
        """What has no slot yet."""
        return [*self.for_threads, *self.ready, *self.at_gate]

    @property
    def at_gate(self) -> Collection[Claimed]:
        """What may not begin yet."""
        return () if self.gate is None else self.gate.waiting

    @property
    def free_threads(self) -> int:
        """How many more commands threads could take now; negative if some wait for one."""
        return self.threads - self._in_threads - len(self.for_threads)

    def __len__(self) -> int:
        return len(self.ready) + len(self.for_threads) + len(self.at_gate)

    def add(self, items: Sequence[Claimed], *, first: bool = False) -> None:
        """Let these stand in line: behind the others, or with `first` before them.

        What is less urgent than something in line stands behind it in any case.
        """
        if items and self.in_hand == 0:
            self.idle.clear()
            self._busy_since = time.monotonic()
        self.in_hand += len(items)
        items = items if self.gate is None else self.gate.add(items)
        if first:
            urgent = max((one.lease.priority for one in self.ready), default=LEAST_URGENT)
            self.ready.extend(one for one in items if one.lease.priority < urgent)
            self.ready.extendleft(one for one in reversed(items) if one.lease.priority >= urgent)
        else:
            self.ready.extend(items)
        self.wake_two()

    def let_in(self) -> None:
        """Let what has waited at the gate into the line, as much as may begin now."""
        if self.at_gate and self.gate is not None:
            self.ready.extend(self.gate.let_in())
            self.wake_two()

    def drop(self, items: Collection[Claimed]) -> None:
        """Take these out: they have to be handed back."""
        if not items:
            return
        gone = set(map(id, items))
        for waiting in (self.for_threads, self.ready, *([] if self.gate is None else [self.gate.waiting])):
            others = [one for one in waiting if id(one) not in gone]
            waiting.clear()
            waiting.extend(others)
        self.in_hand -= len(items)
        self.became_fewer()

    def take_thread(self, item: Claimed) -> bool:
        """Whether there is a thread for what a slot has taken. If not, it waits beside the line."""
        if self._in_threads < self.threads:
            self._in_threads += 1
            return True
        self.for_threads.append(item)
        if not self.ready:
            self.on_low()
        return False

    def leave_thread(self) -> None:
        self._in_threads -= 1
        if self.for_threads:
            self.ready.appendleft(self.for_threads.popleft())
            self.wake_two()
        if self.threads_wanted is not None and self.free_threads >= self.threads_wanted:
            self.threads_wanted = None
            self.on_low()

    def wake_two(self) -> None:
        """Wake two slots; each wakes two more before it waits for something. If none waits, one does everything."""
        wanted = min(2, len(self.ready))
        while wanted > 0 and self._resting:
            wake = self._resting.pop()
            if not wake.done():  # else its task was cancelled
                wake.set_result(None)
                wanted -= 1

    async def rest(self) -> None:
        """Wait until there is something for this slot."""
        wake = asyncio.get_running_loop().create_future()
        self._resting.append(wake)
        await wake

    def became_fewer(self) -> None:
        if self.in_hand == 0:
            self._busy += time.monotonic() - self._busy_since
            self.idle.set()
        if self.in_hand <= self.low_water:
            self.low_water = -1  # said once; whoever fills the line asks again
            self.on_low()
