"""Two-phase, checkpoint, optimistic: the three ways to create a batch and publish its commands to a broker.

The database comes first: nothing is published before it is committed, and no transaction is open while the broker is
asked. Whatever happens in between, commands that are written wait in the outbox, where the relay of any worker finds
them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain, islice
from typing import Any
from uuid import UUID

import psycopg

from busload.commands import send
from busload.commands.checks import choice, refuse
from busload.commands.command import BatchCommand, NewCommand
from busload.commands.dedup import Dedup
from busload.commands.ids import new_id
from busload.commands.load import LoadToPublish
from busload.commands.send import NewBatch, Via
from busload.commands.wording import counted
from busload.dispatch import creation_state, outbox
from busload.dispatch.creation_event import log_creation
from busload.dispatch.creation_state import Checkpoint, Cursor, Outcome
from busload.dispatch.outbox import Piece, Unpublished
from busload.dispatch.publish import Publisher
from busload.dispatch.strategy import DispatchReport, DispatchStatus, Strategy, checkpoint_name
from busload.errors import (
    BatchNotFoundError,
    BatchSealedError,
    DispatchIncompleteError,
    InvalidOperationError,
    Problem,
    RefusalReason,
)
from busload.postgres.callers_connection import AnyConnection
from busload.postgres.database import Database
from busload.postgres.plan import Plan
from busload.postgres.write import Write, patient

log = logging.getLogger("busload")

MANY = 10_000
"""A batch of up to so many commands is written as a whole, a larger one in checkpoints, unless the caller chooses."""


def default_strategy(named: str | None, transport: object) -> Strategy | None:
    """The strategy of a bus that has this transport; None if each batch has its own."""
    if named is None:
        return None
    if named not in list(Strategy):
        raise ValueError(f"dispatch must be one of {', '.join(Strategy)}, found {named!r:.80}.")
    if transport is None:
        raise ValueError(f"dispatch={str(named)!r} needs a transport to publish by: CommandBus(dsn, transport=URL).")
    return Strategy(named)


def published_by(
    asked: str | None, default: Strategy | None, via: Via, *, joins: bool, waits: Sequence[str]
) -> Strategy | None:
    """How a batch is published; if None, the number of its commands decides that.

    `joins` says that the batch is written in a transaction of the caller's: then the relay publishes it, since nothing
    is published before the commit. `waits` are options with which the relay publishes, too.
    """
    if asked is None:
        return Strategy.RELAY if joins or waits else default
    strategy = choice(Strategy, asked, "dispatch", writes=True)
    why = None
    if via.transport is None:
        why = "this bus has no transport to publish by; give it one: CommandBus(dsn, transport=URL)"
    elif strategy is Strategy.RELAY:
        return strategy
    elif joins:
        why = "the batch joins your transaction, and nothing is published before your commit; leave dispatch out"
    elif waits:
        why = f"{waits[0]}= was given too, with which the relay publishes; leave one of them out"
    if why is not None:
        refuse([Problem("INVALID_OPTION", "/dispatch", f"found {str(asked)!r}, but {why}")])
    return strategy


def write_for_relay(batch: NewBatch, commands: Sequence[NewCommand], dedup: Dedup | None, via: Via) -> Write[Any]:
    """Create a batch in one transaction. A relay publishes the batch afterwards."""
    ids = (command.command_id for command in commands)
    create = partial(creation_state.create, via=via)
    if dedup is not None:
        return patient(lambda: send.create_batch_once(batch, commands, dedup, create), batch.batch_id, ids)
    return Write(create(batch, commands), batch.batch_id, ids)


async def create_in_one_write(
    database: Database,
    batch: NewBatch,
    commands: Sequence[NewCommand],
    dedup: Dedup | None,
    via: Via,
    conn: AnyConnection | None,
) -> None:
    """Create a batch that nobody waits to publish: PostgreSQL delivers it or, with a broker, a relay publishes it."""
    began, relayed = time.perf_counter(), via.transport is not None
    write = write_for_relay(batch, commands, dedup, via) if relayed else send.write_batch(batch, commands, dedup)
    written = await database.write(write, conn)
    took, count = round(_ms_since(began), 3), written if isinstance(written, int) else len(commands)
    strategy = Strategy.RELAY if relayed else None
    log_creation(batch, count, insert_ms=took, total_ms=took, transport=via.transport, strategy=strategy)


async def create_and_publish(
    publisher: Publisher,
    database: Database,
    batch: NewBatch,
    commands: Iterable[BatchCommand],
    check: Callable[..., list[NewCommand]],
    *,
    strategy: Strategy | None,
    checkpoint_size: int,
) -> None:
    """Create a batch and publish its commands; returns once all of it is in the database.

    `check` checks the commands: all at once, or for checkpoints slice by slice. If the broker refuses messages, this
    does not fail: `get_dispatch` tells of it, and a relay publishes the rest. Only a creation in checkpoints stops,
    with `DispatchIncompleteError`, if something is left to be written.
    """
    chosen, commands = choose(strategy, commands)
    creation = Creation(publisher, database, batch, chosen)
    if chosen is Strategy.CHECKPOINT:
        await creation.in_checkpoints(Input(commands, check), checkpoint_size)
    else:
        await creation.at_once(check(commands))


def choose(asked: Strategy | None, commands: Iterable[BatchCommand]) -> tuple[Strategy, Iterable[BatchCommand]]:
    """The strategy for these commands, and the same commands. An iterator is read only as far as needed."""
    if asked is not None:
        return asked, commands
    if isinstance(commands, Collection):
        many = len(commands) > MANY
    else:
        rest = iter(commands)
        first = list(islice(rest, MANY + 1))
        many = len(first) > MANY
        commands = chain(first, rest) if many else first
    return Strategy.CHECKPOINT if many else Strategy.TWO_PHASE, commands


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
        self.position = 0
        self.total: int | None = None
        if isinstance(commands, Collection):
            commands = list(commands)
            self._checked, self.total = check(commands, 0), len(commands)
        self._rest = iter(commands)
        self._ahead: list[BatchCommand] = []

    def read(self, size: int) -> tuple[Sequence[NewCommand], bool]:
        """The next commands, and whether they are the last. The position stays."""
        self._look(size + 1)
        last = len(self._ahead) <= size
        if self._checked is not None:
            return self._checked[self.position : self.position + size], last
        return self._check(self._ahead[:size], self.position), last

    def move_to(self, position: int) -> BatchCommand | None:
        """Skip the commands before a position; returns the last of them, or None if the input ends earlier."""
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
        self._ahead += islice(self._rest, max(0, count - len(self._ahead)))


@dataclass
class CreationRecord:
    """What is known of a batch that this process creates and publishes. Times are milliseconds."""

    batch: NewBatch
    transport: str
    strategy: Strategy
    relay: UUID = field(default_factory=new_id)
    began: float = field(default_factory=time.perf_counter)
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    insert_ms: float = 0.0
    send_ms: float = 0.0
    mark_ms: float = 0.0
    written: int = 0
    confirmed: int = 0
    refused: int = 0
    error: str | None = None
    warning: str | None = None
    resumed: bool = False
    checkpoints: list[int] = field(default_factory=list)
    """The numbers of those that were confirmed."""

    def via(self) -> Via:
        optimistic = self.strategy is Strategy.OPTIMISTIC
        return Via(self.transport, optimistic=True) if optimistic else Via(self.transport, relay=self.relay)

    def count(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if piece.reason is None:
                self.confirmed += piece.load.size
            else:
                self.refused += piece.load.size
                self.error = self.error or f"{piece.reason}: {piece.error}"

    def marking(self, pieces: Sequence[Piece], checkpoint: int | None) -> Plan[Any]:
        if self.strategy is Strategy.OPTIMISTIC:
            refused = [piece for piece in pieces if piece.reason is not None]
            yield from outbox.note_published(pieces)
            return (yield from outbox.take_back(self.transport, refused)) if refused else 0
        marked = yield from outbox.mark(self.relay, pieces)
        if checkpoint is not None and not self.refused:
            yield from creation_state.confirm_checkpoint(self.batch.batch_id, checkpoint)
        return marked

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + _ms_since(began))

    def outcome(self) -> Outcome:
        status = decide(
            self.strategy,
            confirmed=self.confirmed,
            refused=self.refused,
            stopped=self.error is not None,
            warning=self.warning is not None,
            resumed=self.resumed,
        )
        times = [round(each, 3) for each in (self.insert_ms, self.send_ms, self.mark_ms, _ms_since(self.began))]
        retry_needed = self.refused > 0 or self.resumed
        insert_ms, send_ms, mark_ms, total_ms = times
        return Outcome(
            status, retry_needed, self.error, self.warning, insert_ms, send_ms, mark_ms, total_ms, self.confirmed
        )

    def report(self, given: Input) -> DispatchReport:
        batch = self.batch
        return DispatchReport(
            batch_id=batch.batch_id,
            transport=self.transport,
            strategy=self.strategy,
            total_tasks=given.total,
            database_tasks=given.position,
            queued_tasks=given.position - self.refused,
            checkpoints=tuple(checkpoint_name(batch.job_id or batch.batch_id, number) for number in self.checkpoints),
            failed_checkpoint=None,
            rounds=min(self.refused, 1),
            created_at=self.created_at,
            published_at=None,
            job_id=batch.job_id,
            stage=batch.stage,
            **{name: value for name, value in asdict(self.outcome()).items() if name != "confirmed"}
            | {"retry_needed": self.refused > 0},
        )

    def log(self, outcome: Outcome) -> None:
        """What a creation cost, as one JSON object on a line."""
        known = {name: value for name, value in asdict(outcome).items() if name not in ("error", "warning")}
        log_creation(self.batch, self.written, transport=self.transport, strategy=self.strategy, **known)


class Creation(CreationRecord):
    """Writes a batch, publishes it, and marks what became of the messages."""

    def __init__(self, publisher: Publisher, database: Database, batch: NewBatch, strategy: Strategy) -> None:
        super().__init__(batch, publisher.transport.name, strategy)
        self.publisher, self.database = publisher, database
        self._unmarked: list[Piece] = []

    async def at_once(self, commands: Sequence[NewCommand]) -> None:
        """Write all commands in one transaction, publish them, and say what became of the messages.

        Two-phase writes them into the outbox, where this process holds them. Optimistic writes them as ready: what the
        broker refuses goes back into the outbox, unless a worker was faster.
        """
        plan = creation_state.create(self.batch, commands, self.via(), self.strategy)
        loads: list[LoadToPublish] = await self._write(plan, commands)
        self.written = len(commands)
        await self._publish(loads)
        await self._finish()

    async def in_checkpoints(self, given: Input, size: int) -> None:
        """Write, publish and mark one slice after the other, from where the batch stands; seal it with the last one."""
        last = False
        while not last:
            try:
                commands, last = given.read(size)
                plan = creation_state.write_checkpoint(
                    self.batch, commands, self.via(), after=given.position, last=last, total=given.total
                )
                written: Checkpoint | Cursor = await self._write(plan, commands)
                if isinstance(written, Cursor):
                    self.resumed = True
                    last = _resume(self.batch, given, written)
                    continue
            except (BatchNotFoundError, BatchSealedError, InvalidOperationError) as error:
                if self.written:
                    self.error = str(error)
                    await self._finish()
                raise
            except Exception as error:
                if not given.position:
                    raise
                self.error = f"{type(error).__name__}: {error}"
                raise await self._stopped(given) from error
            self.written += len(commands)
            given.move_to(given.position + len(commands))
            await self._publish(written.loads, written.number)
            if self.refused and not last:
                raise await self._stopped(given)
            if not self.refused:
                self.checkpoints.append(written.number)
        if self.written:
            await self._finish()

    async def _write(self, plan: Plan[Any], commands: Sequence[NewCommand]) -> Any:
        batch_id, count = self.batch.batch_id, counted(len(commands), "command")
        log.debug("Batch %s: writing %s", batch_id, count)
        with self.timing("insert_ms"):
            written = await self.database.write(Write(plan, batch_id, (command.command_id for command in commands)))
        log.debug("Batch %s: wrote %s", batch_id, count)
        return written

    async def _publish(self, loads: Sequence[LoadToPublish], checkpoint: int | None = None) -> None:
        """Publish a page of loads and mark it, then the next. A broker that is away is not asked for the others."""
        batch, size = self.batch, self.publisher.page
        left = [Unpublished(load, domain, batch.batch_id, 0) for load, domain in loads]
        while left:
            page, left = left[:size], left[size:]
            log.debug("Batch %s: publishing %s through %s", batch.batch_id, counted(len(page), "load"), self.transport)
            with self.timing("send_ms"):
                pieces = await self.publisher.publish(page)
            if pieces and all(piece.reason == RefusalReason.UNREACHABLE for piece in pieces):
                pieces += [replace(pieces[0], load=one.load) for one in left]
                left = []
            self.count(pieces)
            confirmed = counted(self.confirmed, "command")
            log.debug("Batch %s: %s confirmed, %d refused", batch.batch_id, confirmed, self.refused)
            await self._mark(pieces, checkpoint)

    async def _mark(self, pieces: Sequence[Piece], checkpoint: int | None) -> None:
        """If the database is away now, nothing is lost: workers claim what was published, or a relay repeats it."""
        log.debug("Batch %s: marking what was published", self.batch.batch_id)
        try:
            with self.timing("mark_ms"):
                marked = await self.database.in_transaction(self.marking(pieces, checkpoint))
            log.debug("Batch %s: marked, %s", self.batch.batch_id, marked)
        except psycopg.Error as error:
            self.warning = f"What was published could not be marked so: {error}"
            log.warning("Batch %s: %s", self.batch.batch_id, self.warning)
            self._unmarked += pieces

    async def _take_back_again(self) -> None:
        """Optimistic: what was refused and not taken back looks as if it had been published, so try once more."""
        with suppress(psycopg.Error), self.timing("mark_ms"):
            await self.database.in_transaction(self.marking(self._unmarked, None))

    async def _finish(self) -> bool:
        """Log and store how it went. Returns whether the database has stored it: only that can fail."""
        if self.strategy is Strategy.OPTIMISTIC and self.refused and self._unmarked:
            await self._take_back_again()
        outcome, batch_id = self.outcome(), self.batch.batch_id
        if self.refused:
            log.warning(
                "The broker (%s) did not confirm %s of batch %s; a relay publishes what is left: %s",
                *(self.transport, counted(self.refused, "command"), batch_id, outcome.error),
            )
        self.log(outcome)
        try:
            await self.database.in_transaction(creation_state.finish(batch_id, outcome))
            await self.database.in_transaction(creation_state.close([batch_id]))
        except psycopg.Error as error:
            log.warning("Could not store how batch %s was published: %s", batch_id, error)
            return False
        return True

    async def _stopped(self, given: Input) -> DispatchIncompleteError:
        """The error to raise, with the database's report; if the database is away, with what is known here."""
        found = None
        if await self._finish():
            with suppress(psycopg.Error):
                found = await self.database.in_transaction(creation_state.find(self.batch.domain, self.batch.batch_id))
        return DispatchIncompleteError(self.batch.batch_id, found or self.report(given))


def decide(
    strategy: Strategy, *, confirmed: int, refused: int, stopped: bool, warning: bool, resumed: bool
) -> DispatchStatus:
    """How a creation went. A creation that was resumed is over when nothing of it waits in the outbox any more."""
    if refused and not confirmed and strategy is Strategy.OPTIMISTIC:
        return DispatchStatus.FAILED_NEEDS_RECOVERY
    if refused or stopped or resumed:
        return DispatchStatus.PARTIAL_SUCCESS
    return DispatchStatus.SUCCESS_WITH_WARNING if warning else DispatchStatus.SUCCESS


def _resume(batch: NewBatch, given: Input, cursor: Cursor) -> bool:
    """Move to where the batch stands, and return whether it has all its commands. Other commands are refused."""
    batch_id = batch.batch_id
    if given.total is not None and cursor.total is not None and given.total != cursor.total:
        raise _other_input(batch_id, counted(cursor.total, "command"), f"{given.total:,}")
    before = given.position
    if cursor.commands < before:
        found = counted(cursor.commands, "command")
        raise InvalidOperationError(
            f"Batch {batch_id} has fewer commands than were written: found {found}, wanted {before:,}. "
            "The database may have failed over to a standby that lacks the last ones. Repeat the call with the same "
            "batch_id to go on from there."
        )
    last = given.move_to(cursor.commands)
    if given.position < cursor.commands:
        raise _other_input(batch_id, f"{counted(cursor.commands, 'command')} so far", f"{given.position:,}")
    if before < cursor.commands and last is not None and last.command_id not in (None, cursor.last_command):
        position = f"command {cursor.last_command} at position {cursor.commands - 1:,}"
        raise _other_input(batch_id, position, f"{last.command_id}")
    if not cursor.sealed:
        if given.ended:
            raise _other_input(batch_id, f"more than {counted(cursor.commands, 'command')}", "no more")
        return False
    if cursor.total != cursor.commands:
        raise BatchSealedError(batch.domain, batch_id, canceled=cursor.canceled)
    if not given.ended:
        raise _other_input(batch_id, counted(cursor.commands, "command"), "more")
    return True


def _other_input(batch_id: UUID, begun: str, found: str) -> InvalidOperationError:
    return InvalidOperationError(
        f"Batch {batch_id} was begun with other commands: it has {begun}, found {found}. Nothing was written now; "
        "repeat the call with the same commands in the same order, or choose another batch_id."
    )


def _ms_since(began: float) -> float:
    return (time.perf_counter() - began) * 1000
