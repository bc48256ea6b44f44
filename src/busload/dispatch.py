"""Two-phase, checkpoint, optimistic: the three ways to create a batch and announce its commands to a broker.

The database comes first: nothing is published before it is committed, and nothing is held open while the broker is
asked. Whatever happens in between, what is written waits in the outbox, where the relay of any worker finds it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
import psycopg

from busload.announcer import Announcer
from busload.domain.counted import counted
from busload.domain.dispatch import DispatchReport, DispatchStatus, Input, Strategy, checkpoint_name
from busload.domain.ids import new_id
from busload.errors import (
    BatchNotFoundError,
    BatchSealedError,
    DispatchIncomplete,
    InvalidOperationError,
    RefusalReason,
)
from busload.requests import Order, Write
from busload.store import dispatch as store
from busload.store import outbox
from busload.store.dispatch import Checkpoint, Cursor, Outcome
from busload.store.outbox import Piece, Unannounced
from busload.store.plan import Plan
from busload.store.send import Range, Via

log = logging.getLogger("busload")

EVENT = "BatchTaskCreation"
"""The name under which every creation is logged, with its figures."""


class Dispatcher:
    """Creates batches for a bus that has a transport."""

    def __init__(
        self,
        announcer: Announcer,
        write: Callable[[Write[Any]], Coroutine[Any, Any, Any]],
        perform: Callable[[Plan[Any]], Coroutine[Any, Any, Any]],
    ) -> None:
        self._announcer, self._write, self._perform = announcer, write, perform
        self._transport = announcer.transport.name

    async def create(self, order: Order) -> UUID:
        """Create what was ordered, and return the batch's id once it is in the database.

        A broker that refuses is no error then: `get_dispatch` tells of it, and the relay goes on. Only a creation in
        checkpoints stops, with `DispatchIncomplete`, if something is left to be written.
        """
        run = _Run(order)
        match order.strategy:
            case Strategy.CHECKPOINT:
                await self._in_checkpoints(run)
            case Strategy.OPTIMISTIC:
                await self._optimistic(run)
            case _:
                await self._two_phase(run)
        return order.batch.batch_id

    async def _two_phase(self, run: _Run) -> None:
        """Write, with every load held by us; publish; then say what became of it, without moving anything backwards."""
        via = Via(self._transport, relay=run.relay)
        plan = store.create(run.batch, run.order.commands, via, Strategy.TWO_PHASE)
        ranges: list[Range] = await self._insert(run, plan, run.order.commands)
        await self._announce(run, ranges, lambda pieces: outbox.mark(run.relay, pieces))
        await self._finish(run)

    async def _optimistic(self, run: _Run) -> None:
        """Write as ready, publish; what was refused goes back into the outbox, unless a worker was faster."""
        via = Via(self._transport, optimistic=True)
        plan = store.create(run.batch, run.order.commands, via, Strategy.OPTIMISTIC)
        ranges: list[Range] = await self._insert(run, plan, run.order.commands)
        await self._announce(run, ranges, lambda pieces: _take_back(self._transport, pieces))
        await self._finish(run)

    async def _in_checkpoints(self, run: _Run) -> None:
        """Write, publish and mark one slice after the other, from where the batch stands; seal it with the last one."""
        given = run.input
        last = False
        while not last:
            try:
                commands, last = given.read(run.order.checkpoint_size)
                written = await self._insert_checkpoint(run, commands, last=last)
                if isinstance(written, Cursor):
                    run.resumed = True
                    last = _go_on(run, written)
                    continue
            except (BatchNotFoundError, BatchSealedError, InvalidOperationError) as error:
                if run.wrote:
                    run.error = str(error)
                    await self._finish(run)
                raise
            except Exception as error:
                if not given.position:
                    raise
                run.error = f"{type(error).__name__}: {error}"
                raise await self._stopped(run) from error
            given.move_to(given.position + len(commands))
            await self._announce(run, written.ranges, _marking(run, written.number))
            if run.refused and not last:
                raise await self._stopped(run)
            run.confirmed_checkpoints += [written.number] if not run.refused else []
        if run.wrote:
            await self._finish(run)

    async def _insert_checkpoint(self, run: _Run, commands: Sequence[Any], *, last: bool) -> Checkpoint | Cursor:
        plan = store.write_checkpoint(
            run.batch,
            commands,
            Via(self._transport, relay=run.relay),
            after=run.input.position,
            last=last,
            total=run.input.total,
        )
        written: Checkpoint | Cursor = await self._insert(run, plan, commands)
        if isinstance(written, Checkpoint):
            run.wrote += len(commands)
        return written

    async def _insert(self, run: _Run, plan: Plan[Any], commands: Sequence[Any]) -> Any:
        batch_id = run.batch.batch_id
        log.debug("Batch %s: writing %s", batch_id, counted(len(commands), "command"))
        with run.taking("insert_ms"):
            written = await self._write(Write(plan, batch_id, [command.command_id for command in commands]))
        log.debug("Batch %s: wrote %s", batch_id, counted(len(commands), "command"))
        return written

    async def _announce(self, run: _Run, ranges: Sequence[Range], mark: Callable[[list[Piece]], Plan[Any]]) -> None:
        """Publish a page of loads and mark it, then the next. A broker that is away is not asked for the others."""
        batch, size = run.batch, self._announcer.page
        left = [Unannounced(lo, hi, batch.domain, batch.batch_id, 0) for lo, hi in ranges]
        while left:
            page, left = left[:size], left[size:]
            loads = counted(len(page), "load")
            log.debug("Batch %s: announcing %s through %s", batch.batch_id, loads, self._transport)
            with run.taking("send_ms"):
                pieces = await self._announcer.announce(page)
            if pieces and all(piece.reason == RefusalReason.UNREACHABLE for piece in pieces):
                pieces += [replace(pieces[0], lo=load.lo, hi=load.hi) for load in left]
                left = []
            run.hear(pieces)
            confirmed = counted(run.confirmed, "command")
            log.debug("Batch %s: %s confirmed, %d refused", batch.batch_id, confirmed, run.refused)
            await self._mark(run, mark(pieces))

    async def _mark(self, run: _Run, plan: Plan[Any]) -> None:
        """That the database is away now changes nothing: workers claim what rings, and a relay announces it again."""
        log.debug("Batch %s: marking what was announced", run.batch.batch_id)
        try:
            with run.taking("mark_ms"):
                marked = await self._perform(plan)
            log.debug("Batch %s: marked, %s", run.batch.batch_id, marked)
        except psycopg.Error as error:
            run.warning = f"What was announced could not be marked so: {error}"
            log.warning("Batch %s: %s", run.batch.batch_id, run.warning)

    async def _finish(self, run: _Run) -> bool:
        """Log and write down how it went; returns whether the database has taken it, which is all that can fail."""
        outcome = run.outcome()
        if run.refused:
            log.warning(
                "The broker (%s) did not confirm %s of batch %s; a relay announces what is left: %s",
                *(self._transport, counted(run.refused, "command"), run.batch.batch_id, outcome.error),
            )
        log.info("%s", _event(run, outcome, self._transport))
        try:
            await self._perform(store.finish(run.batch.batch_id, outcome))
            await self._perform(store.close([run.batch.batch_id]))
        except psycopg.Error as error:
            log.warning("Could not write down how batch %s was announced: %s", run.batch.batch_id, error)
            return False
        return True

    async def _stopped(self, run: _Run) -> DispatchIncomplete:
        """With a report as the database tells it; if that is away, as far as it is known here."""
        found = None
        if await self._finish(run):
            with suppress(psycopg.Error):
                found = await self._perform(store.find(run.batch.domain, run.batch.batch_id))
        return DispatchIncomplete(run.batch.batch_id, found or run.report(self._transport))


@dataclass(slots=True)
class _Run:
    """One creation under way: what it knows, and how long it has taken. Times are milliseconds."""

    order: Order
    relay: UUID = field(default_factory=new_id)
    began: float = field(default_factory=time.perf_counter)
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    insert_ms: float = 0.0
    send_ms: float = 0.0
    mark_ms: float = 0.0
    confirmed: int = 0
    refused: int = 0
    error: str | None = None
    warning: str | None = None
    wrote: int = 0
    resumed: bool = False
    confirmed_checkpoints: list[int] = field(default_factory=list)

    @property
    def batch(self) -> Any:
        return self.order.batch

    @property
    def input(self) -> Input:
        assert self.order.input is not None
        return self.order.input

    @property
    def size(self) -> int:
        return self.wrote if self.order.input is not None else len(self.order.commands)

    @contextmanager
    def taking(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + _ms_since(began))

    def hear(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            count = piece.hi - piece.lo + 1
            if piece.reason is None:
                self.confirmed += count
            else:
                self.refused += count
                self.error = self.error or f"{piece.reason}: {piece.error}"

    def outcome(self) -> Outcome:
        status = decide(
            self.order.strategy,
            confirmed=self.confirmed,
            refused=self.refused,
            stopped=self.error is not None,
            warning=self.warning is not None,
            resumed=self.resumed,
        )
        times = (self.insert_ms, self.send_ms, self.mark_ms, _ms_since(self.began))
        retry_needed = self.refused > 0 or self.resumed
        return Outcome(status, retry_needed, self.error, self.warning, *(round(each, 3) for each in times))

    def report(self, transport: str) -> DispatchReport:
        outcome, batch = self.outcome(), self.batch
        return DispatchReport(
            batch_id=batch.batch_id,
            transport=transport,
            strategy=self.order.strategy,
            status=outcome.status,
            total_tasks=self.input.total,
            database_tasks=self.input.position,
            queued_tasks=self.input.position - self.refused,
            retry_needed=self.refused > 0,
            checkpoints=tuple(checkpoint_name(batch.batch_id, number) for number in self.confirmed_checkpoints),
            failed_checkpoint=None,
            error=self.error,
            warning=self.warning,
            rounds=min(self.refused, 1),
            insert_ms=outcome.insert_ms,
            send_ms=outcome.send_ms,
            mark_ms=outcome.mark_ms,
            total_ms=outcome.total_ms,
            created_at=self.created_at,
            announced_at=None,
            job_id=batch.job_id,
            stage=batch.stage,
        )


def decide(
    strategy: Strategy, *, confirmed: int, refused: int, stopped: bool, warning: bool, resumed: bool
) -> DispatchStatus:
    """How a creation went. One that was resumed needed help: it is over when nothing waits in the outbox any more."""
    if refused and not confirmed and strategy is Strategy.OPTIMISTIC:
        return DispatchStatus.FAILED_NEEDS_RECOVERY
    if refused or stopped or resumed:
        return DispatchStatus.PARTIAL_SUCCESS
    return DispatchStatus.SUCCESS_WITH_WARNING if warning else DispatchStatus.SUCCESS


def _take_back(transport: str, pieces: Sequence[Piece]) -> Plan[int]:
    refused = [piece for piece in pieces if piece.reason is not None]
    if not refused:
        return 0
    return (yield from outbox.take_back(transport, refused))


def _marking(run: _Run, checkpoint: int) -> Callable[[list[Piece]], Plan[tuple[int, int]]]:
    """Marks a checkpoint; it is confirmed if all of it was."""

    def mark(pieces: list[Piece]) -> Plan[tuple[int, int]]:
        marked = yield from outbox.mark(run.relay, pieces)
        if not run.refused:
            yield from store.confirm_checkpoint(run.batch.batch_id, checkpoint)
        return marked

    return mark


def _go_on(run: _Run, cursor: Cursor) -> bool:
    """Move to where the batch stands; returns whether it has all its commands. Other ones than before are refused."""
    batch_id, given = run.batch.batch_id, run.input
    if given.total is not None and cursor.total is not None and given.total != cursor.total:
        raise _other_input(batch_id, counted(cursor.total, "command"), f"{given.total:,}")
    before = given.position
    if cursor.commands < before:
        found = counted(cursor.commands, "command")
        raise InvalidOperationError(
            f"Batch {batch_id} stands before what was written: it has {found}, wanted {before:,}. "
            "The database may have failed over to a standby that lacks the last ones. Repeat the call with the same "
            "batch_id to go on from there."
        )
    last = given.move_to(cursor.commands)
    if given.position < cursor.commands:
        raise _other_input(batch_id, f"{counted(cursor.commands, 'command')} so far", f"{given.position:,}")
    if before < cursor.commands and last is not None and last.command_id not in (None, cursor.last_command):
        position = f"command {cursor.last_command} at position {cursor.commands - 1:,}"
        raise _other_input(batch_id, position, f"{last.command_id}")
    if not cursor.sealed and given.ended:
        raise _other_input(batch_id, f"more than {counted(cursor.commands, 'command')}", "no more")
    if not cursor.sealed:
        return False
    if cursor.total != cursor.commands:
        raise BatchSealedError(run.batch.domain, batch_id, canceled=cursor.canceled)
    if not given.ended:
        raise _other_input(batch_id, counted(cursor.commands, "command"), "more")
    return True


def _other_input(batch_id: UUID, begun: str, found: str) -> InvalidOperationError:
    return InvalidOperationError(
        f"Batch {batch_id} was begun with other commands: it has {begun}, found {found}. Nothing was written now; "
        "repeat the call with the same commands in the same order, or choose another batch_id."
    )


def _event(run: _Run, outcome: Outcome, transport: str) -> str:
    """What a creation cost, as one JSON object on a line."""
    fields = {
        "event": EVENT,
        "job_id": run.batch.job_id,
        "stage": run.batch.stage,
        "batch_id": run.batch.batch_id,
        "domain": run.batch.domain,
        "transport": transport,
        "strategy": run.order.strategy,
        "status": outcome.status,
        "retry_needed": outcome.retry_needed,
        "batch_size": run.size,
        "insert_ms": outcome.insert_ms,
        "send_ms": outcome.send_ms,
        "mark_ms": outcome.mark_ms,
        "total_ms": outcome.total_ms,
        "TaskCount": run.size,
        "ElapsedMs": outcome.total_ms,
    }
    return msgspec.json.encode(fields, enc_hook=str).decode()


def _ms_since(began: float) -> float:
    return (time.perf_counter() - began) * 1000
