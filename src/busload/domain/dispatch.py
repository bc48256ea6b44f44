"""How the commands of a batch were announced to a broker."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from itertools import chain, islice
from uuid import UUID

from busload.domain.command import BatchCommand, NewCommand

MANY = 10_000
"""Up to here a batch is written as a whole; a larger one goes in checkpoints, unless somebody says otherwise."""

CHECKPOINT_SIZES = range(1, 100_001)


class Strategy(StrEnum):
    """`TWO_PHASE`: write, publish, mark. `CHECKPOINT`: so in slices, with a cursor. `OPTIMISTIC`: ready at once, then
    publish. `RELAY`: the writer left the broker to the relay of a worker.
    """

    TWO_PHASE = "two_phase"
    CHECKPOINT = "checkpoint"
    OPTIMISTIC = "optimistic"
    RELAY = "relay"


class DispatchStatus(StrEnum):
    """`PENDING`: under way. `RECOVERED`: it needed help, and all of it was announced in the end."""

    PENDING = "pending"
    SUCCESS = "success"
    SUCCESS_WITH_WARNING = "success_with_warning"
    PARTIAL_SUCCESS = "partial_success"
    FAILED_NEEDS_RECOVERY = "failed_needs_recovery"
    RECOVERED = "recovered"


@dataclass(frozen=True, slots=True)
class DispatchReport:
    """How the creation of a batch went, and what of it is still to be announced now. Times are milliseconds."""

    batch_id: UUID
    transport: str
    strategy: Strategy
    status: DispatchStatus
    total_tasks: int | None
    """Commands the caller gave; None while an iterator has not come to its end."""
    database_tasks: int
    """Those in the database: all, unless checkpoints are missing."""
    queued_tasks: int
    """Those of them that were announced, as of now."""
    retry_needed: bool
    """Whether some wait for another round, as of now."""
    checkpoints: tuple[str, ...]
    """Those that were confirmed: `<batch>-cp-<n>`."""
    failed_checkpoint: str | None
    error: str | None
    warning: str | None
    rounds: int
    """Rounds of announcing that have failed."""
    insert_ms: float | None
    send_ms: float | None
    mark_ms: float | None
    total_ms: float | None
    created_at: datetime
    announced_at: datetime | None
    job_id: UUID | None = None
    stage: str | None = None
    given_up: bool = False
    """Whether the batch was canceled, or sealed, before all was written: then the rest never is."""

    @property
    def tasks_committed(self) -> int:
        return self.database_tasks

    @property
    def tasks_failed(self) -> int | None:
        """Commands that are not in the database; repeating the call writes them. None: nobody knows how many."""
        return None if self.total_tasks is None else self.total_tasks - self.database_tasks

    @property
    def retry_tasks(self) -> int:
        """Commands in the database that are still to be announced, as of now."""
        return self.database_tasks - self.queued_tasks

    @property
    def recovery_possible(self) -> bool:
        """Whether something is missing: what is written heals by itself, repeating the call writes the rest."""
        return (self.tasks_failed != 0 and not self.given_up) or self.retry_tasks > 0

    @property
    def recovery_scheduled(self) -> bool:
        """Whether the relay of a worker has something left to announce; it needs no order to do so."""
        return self.retry_tasks > 0


def checkpoint_name(batch_id: UUID, checkpoint: int) -> str:
    return f"{batch_id}-cp-{checkpoint}"


@dataclass(frozen=True, slots=True)
class OutboxEntry:
    """Commands that wait to be announced, for the same reason. `reason` is None for those that were not tried yet."""

    transport: str
    domain: str
    reason: str | None
    commands: int
    loads: int
    oldest: datetime
    rounds: int
    error: str | None
    next_try: datetime
    being_announced: int


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a recovery did: commands it announced, those it rang for again, and creations that are complete by it.

    `due`: those that it told relays to announce, because it could not do so itself.
    """

    relayed: int = 0
    rung_again: int = 0
    closed: int = 0
    due: int = 0


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """What the database and the broker know of one queue, compared.

    `looked_into` is False if this broker, or this side of the bus, cannot look at messages: then only counts are told.
    """

    transport: str
    domain: str
    queue: str
    announced: int
    """Commands that are ready since some seconds, and that the broker has confirmed a message about."""
    depth: int | None
    """Messages that the broker holds; None if it does not tell."""
    looked_into: bool
    messages: int = 0
    """Messages that were looked at."""
    answered: int = 0
    """Those of them of whose loads nothing waits or runs any more: whoever gets one takes one look and drops it."""
    unknown: int = 0
    """Those about commands that do not exist here, or that nobody can read."""
    missing: int = 0
    """Commands that are announced beyond those that messages about their loads ring for."""
    rung_again: int = 0
    """Those of them that a new message was sent for."""
    removed: int = 0
    """Messages that nothing waits for, or that nobody can read, and that were taken out of the broker."""


def choose(asked: Strategy | None, commands: Iterable[BatchCommand]) -> tuple[Strategy, Iterable[BatchCommand]]:
    """The strategy for these commands, and the same commands: an iterator is read only as far as that needs."""
    if asked is None and not isinstance(commands, Collection):
        rest = iter(commands)
        first = list(islice(rest, MANY + 1))
        if len(first) > MANY:
            return Strategy.CHECKPOINT, chain(first, rest)
        commands = first
    if asked is None:
        assert isinstance(commands, Collection)
        asked = Strategy.CHECKPOINT if len(commands) > MANY else Strategy.TWO_PHASE
    return asked, commands


class Input:
    """The commands of a creation in checkpoints, one slice after the other.

    A list is checked as a whole before anything is written. An iterator is read and checked slice by slice, so that no
    more than one is in memory; how many commands it has, `total`, is known at its end.
    """

    def __init__(
        self, commands: Iterable[BatchCommand], check: Callable[[Sequence[BatchCommand], int], list[NewCommand]]
    ) -> None:
        self._check = check
        self._checked: list[NewCommand] | None = None
        self._ahead: list[BatchCommand] = []
        self.position = 0
        self.total: int | None = None
        if isinstance(commands, Collection):
            given = list(commands)
            self._checked, self.total = check(given, 0), len(given)
            commands = given
        self._rest: Iterator[BatchCommand] = iter(commands)

    def read(self, size: int) -> tuple[Sequence[NewCommand], bool]:
        """The next commands, and whether they are the last. Reading does not move on."""
        self._look(size + 1)
        last = len(self._ahead) <= size
        if self._checked is not None:
            return self._checked[self.position : self.position + size], last
        return self._check(self._ahead[:size], self.position), last

    def move_to(self, position: int) -> BatchCommand | None:
        """Leave out what comes before; returns the last of that, or None if the input ends earlier."""
        last: BatchCommand | None = None
        while self.position < position:
            self._look(1)
            if not self._ahead:
                return None
            step = min(len(self._ahead), position - self.position)
            last = self._ahead[step - 1]
            del self._ahead[:step]
            self.position += step
        return last

    @property
    def ended(self) -> bool:
        self._look(1)
        return not self._ahead

    def _look(self, count: int) -> None:
        self._ahead += islice(self._rest, count - len(self._ahead)) if count > len(self._ahead) else ()
