"""Runs groups of buffered events: reads them, calls the handler, and ends them together with their command."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias, TypeVar

import psycopg

from busload.buffers import event_table, groups
from busload.buffers.declaration import EXHAUSTED, BufferSettings
from busload.buffers.event_table import Relation
from busload.buffers.groups import ROOMY, Ended, Ending, Events, Row, RunningGroup, describe_items
from busload.commands.bulk_items import Group, Item, Judgement
from busload.commands.execution import (
    COMPLETED,
    FAILED,
    TROUBLESHOOTING,
    Failed,
    Leased,
    Transition,
    decide,
    deciding,
    is_final,
    policy_of,
)
from busload.commands.payload import UndecodableError, decode, encode
from busload.commands.wording import counted
from busload.errors import (
    BusinessRuleError,
    InvalidOperationError,
    PermanentCommandError,
    RateLimitedError,
    SupersededError,
    TransientCommandError,
)
from busload.handlers.registry import Handler
from busload.limits.limiter import PostponedError
from busload.postgres.backoff import Backoff
from busload.postgres.connection import AsyncConnection, is_away
from busload.postgres.plan import Plan, perform_async
from busload.postgres.pool import AsyncPool, engine_pool
from busload.worker.bulk_run import BulkCall, BulkRun, Stations
from busload.worker.call_handler import outlast

log = logging.getLogger("busload")

T = TypeVar("T")
Failures: TypeAlias = list[tuple[Item, BaseException]]

CONNECTIONS = 4
"""Groups of one buffer that are read or ended at a time, on connections of their own: a locked table of the application
must not keep other buffers and domains waiting."""
FEWER_CONNECTIONS = 2
MANY_BUFFERS = 5
"""With so many buffers or more, each has fewer connections."""

MOST_REFUSALS = 5
"""How often the end of one call is tried, each time without the rows that the database refused."""


class GroupRunner:
    """Runs the groups of buffers."""

    def __init__(self, stations: Stations) -> None:
        self._stations, self._bus, self._outage = stations, stations.shared.bus, stations.shared.outage
        self._pool: AsyncPool | None = None
        self._relations: dict[str, Relation] = {}
        buffers = len(self._bus.handlers.buffers)
        each = CONNECTIONS if buffers < MANY_BUFFERS else FEWER_CONNECTIONS
        self._connections = each * max(1, buffers)
        self._turns: dict[str, asyncio.Semaphore] = defaultdict(partial(asyncio.Semaphore, each))

    async def run(self, leased: Leased, handler: Handler) -> None:
        assert handler.buffer is not None
        outcomes = self._stations.outcomes
        try:
            run = _GroupRun(self._stations, self, leased, handler, handler.buffer)
            try:
                await run.run()
            finally:
                run.leave()
        except (PostponedError, SupersededError) as why:  # not of the handler: its errors judge its items
            await outcomes.drop(leased, why)
        except UndecodableError as error:
            await outcomes.fail_unreadable(leased, error)
        except BusinessRuleError as error:  # a command that ends as FAILED would leave its events behind
            permanent = PermanentCommandError(str(error), code=error.code, details=error.details)
            permanent.__cause__ = error
            await outcomes.fail(leased, handler, permanent, None)
        except BaseException as error:
            if self._stations.calls.stopping and isinstance(error, asyncio.CancelledError):
                raise  # it is handed back
            await outcomes.fail(leased, _without_failed(handler), error, None)

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()

    async def relation(self, leased: Leased, buffer: BufferSettings) -> Relation:
        """Where the buffer's events are. It is looked up again after a statement was refused."""
        found = self._relations.get(buffer.name)
        if found is None:
            found = await self.insist(leased, buffer.name, lambda: event_table.find(buffer))
            self._relations[buffer.name] = found
        return found

    async def insist(self, leased: Leased, buffer: str, plan: Callable[[], Plan[T]]) -> T:
        """Perform a plan in a transaction of its own, again and again while the database is away.

        What the database refuses is the failure of this attempt: trying the same again at once would hang the slot.
        """
        backoff = Backoff()
        while True:
            try:
                async with self._turns[buffer], self._opened_pool().connection() as conn:
                    done = await _alone(conn, plan())
                self._outage.worked(f"Reading and ending groups of {buffer}", reached=True)
                return done
            except psycopg.Error as error:
                if not is_away(error):
                    self._relations.pop(buffer, None)
                    raise groups.refusal(buffer, error) from error
                if leased.lease.lost:
                    raise SupersededError("Another worker has this group now; the database was away.") from error
                pause = backoff.pause()
                self._outage.failed(f"Reading and ending groups of {buffer}", error)
                await asyncio.sleep(pause)

    def _opened_pool(self) -> AsyncPool:
        if self._pool is None:
            silence = self._bus.settings.response_timeout.total_seconds()
            self._pool = engine_pool(self._bus.dsn, self._connections, users_tables=True, response_timeout=silence)
        return self._pool


class _GroupRun(BulkRun):
    def __init__(
        self, stations: Stations, runner: GroupRunner, leased: Leased, handler: Handler, buffer: BufferSettings
    ) -> None:
        super().__init__(stations, handler, buffer.name, leased.command_type)
        self._runner, self._leased, self._buffer = runner, leased, buffer
        data = decode(leased.data) if leased.data is not None else None
        self._data = data if isinstance(data, dict) else {}
        self._events = Events()
        self._rows = self._done = self._vanished = 0
        self._kept = False
        """Whether the remaining items stay, because something else forbids to delete them."""

    async def run(self) -> None:
        await self._read()
        if self._leased.lease.crashes > 1:
            await self._halve()
        if not self._events.items:
            await self._finish(Judgement([], [], {}, answered=True))
            return
        call = await self._call(self._events.items, self._end, patient=False)
        if call.ended is not None:
            self._settled(call.judgement, call.ended)
            return
        judgement, overdue = await self._find_bad(call, self._leased.lease.round_attempt)
        if self._cut_short is not None:
            raise self._cut_short
        await self._finish(judgement)
        if overdue is not None:
            await outlast(overdue, self._handler, f"buffer {self._buffer.name}")

    async def _read(self) -> None:
        found, rows = await self._read_rows()
        partition, expected = self._data.get("partition"), self._data.get("items")
        self._running = RunningGroup(
            found,
            self._leased,
            self._buffer.archive,
            partition if isinstance(partition, str) else None,
            expected if type(expected) is int else None,
            {} if found.own else {row.id: row.version for row in rows},
        )
        self._refuse_other_table(found, rows)
        self._events = Events.of(rows, self._buffer.merge, own=found.own)
        self._rows = len(rows)
        if self._running.expected is not None:
            self._count_vanished(self._running.expected - len(rows))

    async def _read_rows(self) -> tuple[Relation, list[Row]]:
        """If the table was altered, look it up again: each connection may remember its old shape."""
        refusals = 0
        while True:
            found = await self._runner.relation(self._leased, self._buffer)
            try:
                return found, await self._insist(partial(groups.read, found, self._leased.command_id))
            except TransientCommandError as error:
                refusals += 1
                if not _altered(error) or refusals > CONNECTIONS:
                    raise

    def _refuse_other_table(self, found: Relation, rows: Sequence[Row]) -> None:
        """Refuse a buffer that was declared on another table meanwhile. A renamed table still has the group's rows."""
        then = self._data.get("table", found.table_name)
        if then != found.table_name and not rows and self._running.expected:
            raise TransientCommandError(
                f"The {self._running.expected} events of this group are in {then or 'busload.buffered'}, but buffer "
                f"{self._buffer.name!r} is declared to be {found.table_name or 'busload.buffered'} now. Declare it "
                "as it was and retry the group, or complete or cancel it, which deletes them there.",
                code="BUFFER_MOVED",
            )

    async def _halve(self) -> None:
        """This group killed a worker: run its first half alone, so that the bad item is soon a group of one.

        A group that merely ran when a worker died runs whole, after the other suspects, as commands do.
        """
        items = self._events.all_items
        if len(items) < 2:
            return
        second = items[len(items) // 2 :]
        ids = self._events.rows_of(second)
        left = self._rows - len(ids)
        if not await self._insist(lambda: groups.halve(self._running, ids, left)):
            raise SupersededError("Another worker has this group now.")
        self._events.drop(second)
        self._rows = left

    async def _call(self, items: Sequence[Item], end: Callable[..., Plan[Ended]], *, patient: bool) -> BulkCall:
        group = Group(self._buffer.name, self._leased.command_id, items, self._running.partition)
        try:
            entered = await self._enter(group, [self._leased], patient=patient)
        except Exception as error:
            if isinstance(error, PostponedError) or isinstance(deciding(error), RateLimitedError):
                raise
            # Of the limit's `by`: these items fail, as if the handler had raised it.
            return BulkCall(group.judgement(error))
        if self._leased.lease.lost:
            raise SupersededError("Another worker has this group now.")
        if (entered or self._permit) and not patient:  # the time of the attempt begins after that in which it waited
            self._leased.started = time.monotonic()
        made = self._made
        try:
            context = self._shared.context(self._handler, self._leased)
            context.of_group = True
            return await self._make_call(
                group, context, [self._leased], lambda call: end(call.judgement, fenced=True), entered
            )
        finally:
            self._shared.tallies.add(self._buffer.name, calls=self._made - made)

    async def _call_part(self, items: list[Item]) -> BulkCall | None:
        if self._leased.lease.lost:
            return None
        call = await self._call(items, self._end_part, patient=True)
        if call.ended is None and call.judgement.done:
            call.judgement, call.ended = await self._record(call.judgement, self._end_part)
        if call.ended is not None:
            self._count(call.ended)
        return call

    def _waits(self, judgement: Judgement) -> bool:
        """Whether the group is put off without burning an attempt, because its calls were only refused.

        What has failed otherwise burns one, but not the last: who was merely refused is not given up for that.
        """
        _, passing = self._split(judgement)
        refused = [item for item, error in passing if isinstance(deciding(error), RateLimitedError)]
        return bool(refused) and (self._exhausted(passing) or len(refused) == len(passing))

    def _end_part(self, judgement: Judgement, *, fenced: bool = False) -> Plan[Ended]:
        """End what is done of a part; `fenced` in the handler's own transaction."""
        ids = self._events.rows_of(judgement.done)
        return groups.end_part(self._running, ids, self._rows - self._done - len(ids), fenced=fenced)

    def _end(self, judgement: Judgement, *, fenced: bool = False) -> Plan[Ended]:
        """End the group, or what is done of it before the rest is put off; `fenced` as above."""
        ending = self._ending(judgement)
        if self._waits(judgement):
            return groups.leave(self._running, ending, fenced=fenced)
        conclude = partial(self._conclude, judgement, ending)
        return groups.finish(self._running, ending, conclude, time.monotonic(), fenced=fenced)

    async def _finish(self, judgement: Judgement) -> None:
        self._settled(*await self._record(judgement, self._end))

    def _settled(self, judgement: Judgement, ended: Ended) -> None:
        """Count what was ended: the whole group, or a part before the rest is put off."""
        self._count(ended)
        if ended.transition is None:
            assert self._postponed is not None
            raise self._postponed
        if not ended.credited:
            raise SupersededError("Another worker has this group now; what was delivered has left it all the same.")
        self._report(judgement, ended.transition)
        self._settlement.settled_elsewhere(ended.transition)

    def _report(self, judgement: Judgement, transition: Transition) -> None:
        """Log why items of this group have failed, if any has."""
        final, passing = self._split(judgement)
        if not final and not passing:
            return
        ending = self._ending(judgement)
        then: str | None = None
        if ending.exhausted:
            if ending.delete:
                fate = counted(ending.left, "event was", "events were") + " deleted"
            else:
                fate = counted(ending.left, "event waits", "events wait") + " for a person"
            then = f"its attempts are used up; {fate}"
        [_, error], *_ = passing or final
        self._shared.failures.report(transition, error, then, level=logging.ERROR if ending.exhausted else None)

    async def _record(self, judgement: Judgement, plan: Callable[[Judgement], Plan[Ended]]) -> tuple[Judgement, Ended]:
        """Record what came of a call. Items whose rows cannot be deleted have failed; the others are done."""
        refusals = 0
        while True:
            try:
                return judgement, await self._insist(partial(plan, judgement))
            except TransientCommandError as error:
                refusals += 1
                if error.code != groups.REFUSED or refusals == MOST_REFUSALS:
                    raise
                judgement = await self._get_around(judgement, error)

    async def _get_around(self, judgement: Judgement, error: TransientCommandError) -> Judgement:
        """Look again at an altered table, or find the rows that cannot be deleted, or keep the rest."""
        if _altered(error):
            try:
                self._running = replace(self._running, relation=await self._runner.relation(self._leased, self._buffer))
            except InvalidOperationError:
                raise error from error.__cause__
            return judgement
        ids = self._events.rows_of(judgement.done)
        refused = await self._insist(lambda: groups.find_refused(self._running, ids)) if ids else {}
        if not refused:
            self._kept = True
            return judgement
        done: list[Item] = []
        failed = list(judgement.failed)
        for item in judgement.done:
            why = next((refused[row] for row in self._events.rows_of([item]) if row in refused), None)
            if why is None:
                done.append(item)
            else:
                failed.append((item, why))
        return Judgement(done, failed, judgement.results, answered=True)

    def _exhausted(self, passing: Failures) -> bool:
        """Whether this was the last attempt. The first of the errors decides, as for the delay."""
        retry = policy_of(passing[0][1], self._handler.retry)
        return retry.exhausted(self._leased.lease.round_attempt, self._leased.max_attempts)

    def _split(self, judgement: Judgement) -> tuple[Failures, Failures]:
        """The items that have failed for good, and those that may pass when they are tried again."""
        final: Failures = []
        passing: Failures = []
        for item, error in judgement.failed + self._events.unreadable:
            (final if self._is_final(error) else passing).append((item, error))
        return final, passing

    def _is_final(self, error: BaseException) -> bool:
        """A rule that says "failed" counts as "permanent": a group that is FAILED would leave its events behind."""
        return not isinstance(deciding(error), RateLimitedError) and is_final(error, self._handler.retry)

    def _ending(self, judgement: Judgement) -> Ending:
        final, passing = self._split(judgement)
        if not final and not passing:
            return Ending(done=None, expected=self._rows - self._done)
        done = self._events.rows_of(judgement.done)
        stays = passing or final  # without others, the group itself waits for a person, with the final ones
        ending = Ending(done=done, expected=len(done), left=len(self._events.rows_of([item for item, _ in stays])))
        if not passing:
            return ending
        if final:
            ending.parted = self._events.rows_of([item for item, _ in final])
            ending.parted_error = describe_items(final, self._rows, answered=True, listed=True)
        if self._exhausted(passing):
            ending.exhausted = True
            ending.hook = self._shared.bus.handlers.find(self._buffer.name, EXHAUSTED) is not None
            ending.delete = self._buffer.on_exhausted == "delete" and not self._kept
        return ending

    def _conclude(self, judgement: Judgement, ending: Ending, done: int) -> Transition:
        """Where the group's command goes, given how many rows were done just now."""
        final, passing = self._split(judgement)
        answered = judgement.answered or bool(self._events.unreadable)
        if not final and not passing:
            vanished = self._vanished + max(0, ending.expected - done)
            told = {"items": self._rows, "done": self._done + done, "calls": self._made, "vanished": vanished}
            transition = Transition(self._leased, COMPLETED, encode(told))
        elif not passing:
            details = describe_items(final, self._rows, answered=answered, listed=True)
            transition = Transition(self._leased, TROUBLESHOOTING, details, reason="PERMANENT")
        else:
            details = describe_items(passing, self._rows, answered=answered, listed=answered or ending.exhausted)
            transition = decide(self._leased, Failed(passing[0][1]), self._handler.retry, ROOMY, details)
            if ending.delete:
                transition = Transition(self._leased, FAILED, details)
        transition.finished = time.monotonic()
        return transition

    def _count(self, ended: Ended) -> None:
        self._done += ended.done
        self._shared.tallies.add(self._buffer.name, done=ended.done)
        self._count_vanished(ended.missing)

    def _count_vanished(self, rows: int) -> None:
        """Somebody else has deleted rows of this group: not fatal, but worth a warning."""
        if rows > 0:
            self._vanished += rows
            self._shared.tallies.add(self._buffer.name, vanished=rows)
            log.warning(
                "%s vanished from group %s in buffer %s: deleted by others meanwhile",
                counted(rows, "event"),
                self._leased.command_id,
                self._buffer.name,
            )

    async def _insist(self, plan: Callable[[], Plan[T]]) -> T:
        return await self._runner.insist(self._leased, self._buffer.name, plan)


def _without_failed(handler: Handler) -> Handler:
    """The handler with "permanent" for each rule that says "failed", which would leave the events behind."""
    rules = {kind: "permanent" if rule == "failed" else rule for kind, rule in handler.retry.rules.items()}
    return replace(handler, retry=replace(handler.retry, rules=rules)) if rules else handler


async def _alone(conn: AsyncConnection, plan: Plan[T]) -> T:
    try:
        async with conn.transaction():
            return await perform_async(conn, plan)
    except psycopg.NotSupportedError:
        # "Cached plan must not change result type": the table was altered, and this connection remembers how it was.
        await conn.close()
        raise


def _altered(error: TransientCommandError) -> bool:
    """Whether a refusal is about the shape of the table, rather than about a row."""
    cause = error.__cause__
    return isinstance(cause, psycopg.Error) and (cause.sqlstate or "").startswith(("0A", "42"))
