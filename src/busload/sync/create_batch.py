"""Made from busload.dispatch.create_batch by scripts/generate_sync.py. Change the source instead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import psycopg

from busload.commands import send
from busload.commands.command import BatchCommand, NewCommand
from busload.commands.dedup import Dedup
from busload.commands.load import LoadToPublish
from busload.commands.send import NewBatch, Via
from busload.commands.wording import counted
from busload.dispatch import creation_state
from busload.dispatch.create_batch import (
    CreationRecord,
    Input,
    _ms_since,
    _resume,
    choose,
    log,
    write_for_relay,
)
from busload.dispatch.creation_event import log_creation
from busload.dispatch.creation_state import Checkpoint, Cursor
from busload.dispatch.outbox import Piece, Unpublished
from busload.dispatch.publish_in_threads import ThreadPublisher
from busload.dispatch.strategy import Strategy
from busload.errors import (
    BatchNotFoundError,
    BatchSealedError,
    DispatchIncompleteError,
    InvalidOperationError,
    RefusalReason,
)
from busload.postgres.callers_connection import AnySyncConnection
from busload.postgres.plan import Plan
from busload.postgres.write import Write
from busload.sync.database import Database


def create_in_one_write(
    database: Database,
    batch: NewBatch,
    commands: Sequence[NewCommand],
    dedup: Dedup | None,
    via: Via,
    conn: AnySyncConnection | None,
) -> None:
    """Create a batch that nobody waits to publish: PostgreSQL delivers it or, with a broker, a relay publishes it."""
    began, relayed = time.perf_counter(), via.transport is not None
    write = write_for_relay(batch, commands, dedup, via) if relayed else send.write_batch(batch, commands, dedup)
    written = database.write(write, conn)
    took, count = round(_ms_since(began), 3), written if isinstance(written, int) else len(commands)
    strategy = Strategy.RELAY if relayed else None
    log_creation(batch, count, insert_ms=took, total_ms=took, transport=via.transport, strategy=strategy)


def create_and_publish(
    publisher: ThreadPublisher,
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
        creation.in_checkpoints(Input(commands, check), checkpoint_size)
    else:
        creation.at_once(check(commands))


class Creation(CreationRecord):
    """Writes a batch, publishes it, and marks what became of the messages."""

    def __init__(self, publisher: ThreadPublisher, database: Database, batch: NewBatch, strategy: Strategy) -> None:
        super().__init__(batch, publisher.transport.name, strategy)
        self.publisher, self.database = publisher, database
        self._unmarked: list[Piece] = []

    def at_once(self, commands: Sequence[NewCommand]) -> None:
        """Write all commands in one transaction, publish them, and say what became of the messages.

        Two-phase writes them into the outbox, where this process holds them. Optimistic writes them as ready: what the
        broker refuses goes back into the outbox, unless a worker was faster.
        """
        plan = creation_state.create(self.batch, commands, self.via(), self.strategy)
        loads: list[LoadToPublish] = self._write(plan, commands)
        self.written = len(commands)
        self._publish(loads)
        self._finish()

    def in_checkpoints(self, given: Input, size: int) -> None:
        """Write, publish and mark one slice after the other, from where the batch stands; seal it with the last one."""
        last = False
        while not last:
            try:
                commands, last = given.read(size)
                plan = creation_state.write_checkpoint(
                    self.batch, commands, self.via(), after=given.position, last=last, total=given.total
                )
                written: Checkpoint | Cursor = self._write(plan, commands)
                if isinstance(written, Cursor):
                    self.resumed = True
                    last = _resume(self.batch, given, written)
                    continue
            except (BatchNotFoundError, BatchSealedError, InvalidOperationError) as error:
                if self.written:
                    self.error = str(error)
                    self._finish()
                raise
            except Exception as error:
                if not given.position:
                    raise
                self.error = f"{type(error).__name__}: {error}"
                raise self._stopped(given) from error
            self.written += len(commands)
            given.move_to(given.position + len(commands))
            self._publish(written.loads, written.number)
            if self.refused and not last:
                raise self._stopped(given)
            if not self.refused:
                self.checkpoints.append(written.number)
        if self.written:
            self._finish()

    def _write(self, plan: Plan[Any], commands: Sequence[NewCommand]) -> Any:
        batch_id, count = self.batch.batch_id, counted(len(commands), "command")
        log.debug("Batch %s: writing %s", batch_id, count)
        with self.timing("insert_ms"):
            written = self.database.write(Write(plan, batch_id, (command.command_id for command in commands)))
        log.debug("Batch %s: wrote %s", batch_id, count)
        return written

    def _publish(self, loads: Sequence[LoadToPublish], checkpoint: int | None = None) -> None:
        """Publish a page of loads and mark it, then the next. A broker that is away is not asked for the others."""
        batch, size = self.batch, self.publisher.page
        left = [Unpublished(load, domain, batch.batch_id, 0) for load, domain in loads]
        while left:
            page, left = left[:size], left[size:]
            log.debug("Batch %s: publishing %s through %s", batch.batch_id, counted(len(page), "load"), self.transport)
            with self.timing("send_ms"):
                pieces = self.publisher.publish(page)
            if pieces and all(piece.reason == RefusalReason.UNREACHABLE for piece in pieces):
                pieces += [replace(pieces[0], load=one.load) for one in left]
                left = []
            self.count(pieces)
            confirmed = counted(self.confirmed, "command")
            log.debug("Batch %s: %s confirmed, %d refused", batch.batch_id, confirmed, self.refused)
            self._mark(pieces, checkpoint)

    def _mark(self, pieces: Sequence[Piece], checkpoint: int | None) -> None:
        """If the database is away now, nothing is lost: workers claim what was published, or a relay repeats it."""
        log.debug("Batch %s: marking what was published", self.batch.batch_id)
        try:
            with self.timing("mark_ms"):
                marked = self.database.in_transaction(self.marking(pieces, checkpoint))
            log.debug("Batch %s: marked, %s", self.batch.batch_id, marked)
        except psycopg.Error as error:
            self.warning = f"What was published could not be marked so: {error}"
            log.warning("Batch %s: %s", self.batch.batch_id, self.warning)
            self._unmarked += pieces

    def _take_back_again(self) -> None:
        """Optimistic: what was refused and not taken back looks as if it had been published, so try once more."""
        with suppress(psycopg.Error), self.timing("mark_ms"):
            self.database.in_transaction(self.marking(self._unmarked, None))

    def _finish(self) -> bool:
        """Log and store how it went. Returns whether the database has stored it: only that can fail."""
        if self.strategy is Strategy.OPTIMISTIC and self.refused and self._unmarked:
            self._take_back_again()
        outcome, batch_id = self.outcome(), self.batch.batch_id
        if self.refused:
            log.warning(
                "The broker (%s) did not confirm %s of batch %s; a relay publishes what is left: %s",
                *(self.transport, counted(self.refused, "command"), batch_id, outcome.error),
            )
        self.log(outcome)
        try:
            self.database.in_transaction(creation_state.finish(batch_id, outcome))
            self.database.in_transaction(creation_state.close([batch_id]))
        except psycopg.Error as error:
            log.warning("Could not store how batch %s was published: %s", batch_id, error)
            return False
        return True

    def _stopped(self, given: Input) -> DispatchIncompleteError:
        """The error to raise, with the database's report; if the database is away, with what is known here."""
        found = None
        if self._finish():
            with suppress(psycopg.Error):
                found = self.database.in_transaction(creation_state.find(self.batch.domain, self.batch.batch_id))
        return DispatchIncompleteError(self.batch.batch_id, found or self.report(given))
