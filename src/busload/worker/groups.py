"""Groups of buffered events: read, handed to their function in one call, ended together with their command."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

import psycopg

from busload.bus import CommandBus
from busload.domain.buffer import EXHAUSTED, BufferSettings, Merge
from busload.domain.bulk import Group, Item, Judgement
from busload.domain.command import Command
from busload.domain.counted import counted
from busload.domain.execution import (
    COMPLETED,
    FAILED,
    TROUBLESHOOTING,
    Failed,
    Leased,
    Transition,
    decide,
    deciding,
    describe,
    summarise,
)
from busload.domain.payload import PayloadLimits, Undecodable, decode, encode, safe_str, storable
from busload.domain.retry import Backoff
from busload.errors import (
    BusinessRuleError,
    InvalidOperationError,
    PermanentCommandError,
    RateLimited,
    Superseded,
    TransientCommandError,
)
from busload.handlers import Handler
from busload.store import group as groups
from busload.store import relation
from busload.store.connection import AsyncConnection, is_away
from busload.store.group import Ended, Ending, Place, Row
from busload.store.outage import Outage
from busload.store.plan import Plan, perform_async
from busload.store.pool import AsyncPool, engine_pool
from busload.store.relation import Relation
from busload.worker.calls import FINAL_WORDS, Call, Calls, find_bad, isolates
from busload.worker.context import HandlerContext, SyncHandlerContext
from busload.worker.distribute import Tallies
from busload.worker.failures import FailureLog
from busload.worker.limit import Limiter, Postponed
from busload.worker.settle import Settlement
from busload.worker.threads import Threads

log = logging.getLogger("busload")

T = TypeVar("T")

CONNECTIONS = 4
"""Groups of one buffer that are read or ended at a time, apart from the engine's own statements: whoever locks an
application's table must not keep other buffers and domains waiting."""
FEWER_CONNECTIONS = 2
MANY_BUFFERS = 5
"""With so many or more of them, each has fewer."""

MOST_REFUSALS = 5
"""How often the end of one call is tried, each time without what was found to be in its way."""
MOST_TOLD = 1000
"""Items whose errors are kept with an attempt."""
WIDE = PayloadLimits(data_bytes=16 * 1024 * 1024)


class GroupRunner:
    """Runs the groups of buffers."""

    def __init__(
        self,
        bus: CommandBus,
        calls: Calls,
        transactions: AsyncPool,
        threads: Threads,
        limiter: Limiter,
        settlement: Settlement,
        tallies: Tallies,
        failures: FailureLog,
        outage: Outage,
    ) -> None:
        self._bus, self._calls, self._transactions, self._threads = bus, calls, transactions, threads
        self._limiter, self._settlement, self._tallies, self._failures = limiter, settlement, tallies, failures
        self._outage = outage
        self._pool: AsyncPool | None = None
        self._relations: dict[str, Relation] = {}
        self._turns: dict[str, asyncio.Semaphore] = {}

    async def run(self, leased: Leased, handler: Handler) -> Transition | None:
        """Raises what the attempt fails with; returns a result to settle, or None if it has settled itself."""
        assert handler.buffer is not None
        try:
            return await _Run(self, leased, handler, handler.buffer).all()
        except BusinessRuleError as error:  # a command would end as FAILED, and leave its events behind
            raise PermanentCommandError(str(error), code=error.code, details=error.details) from error

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()

    async def relation(self, leased: Leased, buffer: BufferSettings) -> Relation:
        """Where the buffer's events are. Looked up again after a statement about them was refused."""
        found = self._relations.get(buffer.name)
        if found is None:
            found = await self.insist(leased, buffer.name, lambda: relation.find(buffer))
            self._relations[buffer.name] = found
        return found

    async def insist(self, leased: Leased, buffer: str, plan: Callable[[], Plan[T]]) -> T:
        """Perform a plan in a transaction of its own, again and again while the database is away.

        What the database refuses is the failure of this attempt: trying the same again at once would hang the slot.
        """
        backoff = Backoff()
        while True:
            try:
                pool = self._connections()
                async with self._turn(buffer), pool.connection() as conn:
                    done = await _alone(conn, plan())
                self._outage.worked(f"Reading and ending groups of {buffer}", reached=True)
                return done
            except psycopg.Error as error:
                if not is_away(error):
                    self._relations.pop(buffer, None)
                    raise groups.refusal(buffer, error) from error
                if leased.lease.lost:
                    raise Superseded("Another worker has this group now; the database was away.") from error
                pause = backoff.pause()
                self._outage.failed(f"Reading and ending groups of {buffer}", error)
                await asyncio.sleep(pause)

    def _connections(self) -> AsyncPool:
        if self._pool is None:
            silence = self._bus.settings.response_timeout.total_seconds()
            size = self._each * max(1, self._buffers)
            self._pool = engine_pool(self._bus.dsn, size, users_tables=True, response_timeout=silence)
        return self._pool

    def _turn(self, buffer: str) -> asyncio.Semaphore:
        return self._turns.setdefault(buffer, asyncio.Semaphore(self._each))

    @property
    def _buffers(self) -> int:
        return len(self._bus.handlers.buffers)

    @property
    def _each(self) -> int:
        return CONNECTIONS if self._buffers < MANY_BUFFERS else FEWER_CONNECTIONS


class _Run:
    """One attempt at a group."""

    def __init__(self, runner: GroupRunner, leased: Leased, handler: Handler, buffer: BufferSettings) -> None:
        self._runner, self._leased, self._handler, self._buffer = runner, leased, handler, buffer
        told = decode(leased.data) if leased.data is not None else None
        self._told = told if isinstance(told, dict) else {}
        self._events = Events()
        self._postponed: Postponed | None = None
        """Until when it waits if the receiver has refused a call."""
        self._cut_short: Postponed | None = None
        """The search for bad items was: by a pause, or as the worker stops."""
        self._calls = self._rows = self._done = self._vanished = 0
        self._kept = False
        """What is left cannot be deleted, though it should be."""

    async def all(self) -> Transition | None:
        await self._read()
        if self._leased.lease.crashes > 1:
            await self._halve()
        if not self._events.items:
            return await self._finish(Judgement([], [], {}, answered=True))
        call = await self._call(self._events.items, self._end)
        judgement, overdue = call.judgement, call.overdue
        if call.ended is not None:
            return self._settled(call.ended, judgement)
        if isolates(self._handler, call, self._leased.lease.round_attempt):
            failed, overdue = await find_bad(judgement.failed, self._try)
            if self._cut_short is not None:
                raise self._cut_short
            judgement = Judgement([], failed, {}, answered=True)
        if self._postponed is not None and self._waits(judgement):
            self._count((await self._record(judgement, self._leave))[1])
            raise self._postponed
        transition = await self._finish(judgement)
        if overdue is not None:
            log.warning(
                "The handler of buffer %s outlived its %s s; its slot is taken until it returns",
                self._buffer.name,
                self._handler.timeout,
            )
            await asyncio.wait({overdue})
        return transition

    async def _read(self) -> None:
        found, rows = await self._look()
        partition, expected = self._told.get("partition"), self._told.get("items")
        self._place = Place(
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
        if self._place.told is not None:
            self._miss(self._place.told - len(rows))

    async def _look(self) -> tuple[Relation, list[Row]]:
        """Read the group. A table that was altered is looked up again: each connection may remember how it was."""
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
        """One that was renamed has the group's rows; one without them is another, and they wait in the first."""
        then = self._told.get("table", found.told)
        if then != found.told and not rows and self._place.told:
            raise TransientCommandError(
                f"The {self._place.told} events of this group are in {then or 'busload.buffered'}, but buffer "
                f"{self._buffer.name!r} is declared to be {found.told or 'busload.buffered'} now. Declare it as it was "
                "and retry the group, or complete or cancel it, which deletes them there.",
                code="BUFFER_MOVED",
            )

    async def _halve(self) -> None:
        """This group killed a worker: run the first half alone, so that the item to blame is soon a group of one.

        One that was merely there when a worker died runs whole, after the other suspects, as commands do.
        """
        items = self._events.all_items
        if len(items) < 2:
            return
        second = items[len(items) // 2 :]
        ids = self._events.rows_of(second)
        left = self._rows - len(ids)
        if not await self._insist(lambda: groups.halve(self._place, ids, left)):
            raise Superseded("Another worker has this group now.")
        self._events.drop(second)
        self._rows = left

    async def _call(
        self, items: Sequence[Item], end: Callable[[Judgement, Any], Plan[Ended]], *, patient: bool = False
    ) -> Call:
        runner, handler, name = self._runner, self._handler, self._buffer.name
        group = Group(name, self._leased.command_id, items, self._place.partition)
        about = (handler, name, self._leased.command_type, group)
        entered = None
        if handler.rate_limit is not None:
            try:
                entered = await runner._limiter.enter(*about, patient=patient)
            except (Postponed, RateLimited):
                raise
            except Exception as error:  # of its `by`: the failure of these items, as if the handler had raised it
                return Call(group.judgement(error))
            if self._leased.lease.lost:
                raise Superseded("Another worker has this group now.")
            if not patient:  # the time of the attempt begins after that in which it waited
                self._leased.started = time.monotonic()
        made = self._calls

        def begin() -> None:
            if entered is not None:
                entered.refuse_late()
            self._calls += 1

        try:
            call = await runner._calls.call(handler, group, self._context(), end, begin)
        finally:
            runner._tallies.add(name, calls=self._calls - made)
        if call.refusal is not None:
            self._postponed = await runner._limiter.refused(*about, call.refusal, entered)
        return call

    def _context(self) -> HandlerContext | SyncHandlerContext:
        if self._handler.is_async:
            return HandlerContext(self._leased, self._runner._bus, self._runner._transactions)
        return self._runner._threads.context(self._leased, SyncHandlerContext)

    async def _try(self, items: list[Item]) -> Call | None:
        """Call with a part, and end at once what passes; None if there is no point in going on."""
        call = await self._call_patiently(items)
        if call is None:
            return None
        if call.ended is None and call.judgement.done:
            call.judgement, call.ended = await self._record(call.judgement, self._pass)
        if call.ended is not None:
            self._count(call.ended)
        return call

    async def _call_patiently(self, items: list[Item]) -> Call | None:
        """However long its turn takes, and however often it is refused."""
        try:
            while not self._leased.lease.lost:
                call = await self._call(items, self._end_part, patient=True)
                if call.judgement.answered or call.refusal is None or self._postponed is None:
                    return call
                if self._handler.rate_limit is None:  # else the next turn comes after the pause
                    await self._runner._limiter.sit_out(self._buffer.name, self._postponed)
        except Postponed as postponed:
            self._cut_short = postponed
        return None

    def _waits(self, judgement: Judgement) -> bool:
        """Whether it is put off without burning an attempt: nothing but refusals stand in its way.

        What has failed otherwise burns one, but not the last: who was merely refused is not given up for that.
        """
        told = [deciding(error) for _, error in judgement.failed]
        passing = [error for error in told if not isinstance(error, FINAL_WORDS)]
        refused = [error for error in passing if isinstance(error, RateLimited)]
        if not refused:
            return False
        exhausted = self._handler.retry.exhausted(self._leased.lease.round_attempt, self._leased.max_attempts)
        return exhausted or len(refused) == len(passing)

    def _end_part(self, judgement: Judgement, value: Any) -> Plan[Ended]:
        """In the handler's own transaction, for a part."""
        return self._pass(judgement, fenced=True)

    def _pass(self, judgement: Judgement, fenced: bool = False) -> Plan[Ended]:
        ids = self._events.rows_of(judgement.done)
        return groups.end_part(self._place, ids, self._rows - self._done - len(ids), fenced=fenced)

    def _leave(self, judgement: Judgement) -> Plan[Ended]:
        return groups.leave(self._place, self._ending(judgement), fenced=False)

    def _end(self, judgement: Judgement, value: Any) -> Plan[Ended]:
        """In the handler's own transaction, for all of it."""
        ending = self._ending(judgement)
        if self._waits(judgement):
            return groups.leave(self._place, ending, fenced=True)
        return groups.finish(self._place, ending, self._conclude(judgement, ending), time.monotonic(), fenced=True)

    def _settled(self, ended: Ended, judgement: Judgement) -> Transition | None:
        """The handler's own transaction has ended it, or what could be ended before it is put off."""
        self._count(ended)
        if ended.transition is not None:
            self._tell(judgement, ended.transition)
            self._runner._settlement.settled_elsewhere(self._leased, ended.transition.outcome)
        elif self._postponed is not None:
            raise self._postponed
        return None

    async def _finish(self, judgement: Judgement) -> Transition | None:
        judgement, ended = await self._record(judgement, self._settle)
        self._count(ended)
        if not ended.credited or ended.transition is None:
            raise Superseded("Another worker has this group now; what was delivered has left it all the same.")
        self._tell(judgement, ended.transition)
        self._runner._settlement.settled_elsewhere(self._leased, ended.transition.outcome)
        return None

    def _tell(self, judgement: Judgement, transition: Transition) -> None:
        """Log what stands in the way of this group, if anything does."""
        failed = judgement.failed + self._events.unreadable
        if not failed:
            return
        passing = [error for _, error in failed if not isinstance(deciding(error), FINAL_WORDS)]
        ending = self._ending(judgement)
        error = passing[0] if passing else failed[0][1]
        if not ending.exhausted:
            self._runner._failures.tell(transition, error)
            return
        if ending.delete:
            fate = counted(ending.left, "event was", "events were") + " deleted"
        else:
            fate = counted(ending.left, "event waits", "events wait") + " for a person"
        then = f"its attempts are used up; {fate}"
        self._runner._failures.tell(transition, error, then, level=logging.ERROR)

    def _settle(self, judgement: Judgement) -> Plan[Ended]:
        ending = self._ending(judgement)
        return groups.finish(self._place, ending, self._conclude(judgement, ending), time.monotonic(), fenced=False)

    async def _record(self, judgement: Judgement, plan: Callable[[Judgement], Plan[Ended]]) -> tuple[Judgement, Ended]:
        """Write down what came of a call. What cannot be deleted has failed, and the others are done all the same."""
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
        """Look again at a table that was altered; find the rows that cannot be deleted; or keep what is left."""
        if _altered(error):
            try:
                self._place = replace(self._place, relation=await self._runner.relation(self._leased, self._buffer))
            except InvalidOperationError:
                raise error from error.__cause__
            return judgement
        ids = self._events.rows_of(judgement.done)
        refused = await self._insist(lambda: groups.find_refused(self._place, ids)) if ids else {}
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

    def _ending(self, judgement: Judgement) -> Ending:
        failed = judgement.failed + self._events.unreadable
        done = self._events.rows_of(judgement.done)
        if not failed:
            return Ending(done=None, expected=self._rows - self._done)
        final = [(item, error) for item, error in failed if isinstance(deciding(error), FINAL_WORDS)]
        passing = [(item, error) for item, error in failed if not isinstance(deciding(error), FINAL_WORDS)]
        if not passing:  # the group itself waits for a person, with these in it
            return Ending(done=done, expected=len(done), left=len(self._events.rows_of([item for item, _ in final])))
        ending = Ending(done=done, expected=len(done), left=len(self._events.rows_of([item for item, _ in passing])))
        if final:
            ending.parted = self._events.rows_of([item for item, _ in final])
            ending.parted_error = _described(final, self._rows, answered=True, listed=True)
        lease, retry = self._leased.lease, self._handler.retry
        if retry.exhausted(lease.round_attempt, self._leased.max_attempts):
            ending.exhausted = True
            ending.hook = self._runner._bus.handlers.find(self._buffer.name, EXHAUSTED) is not None
            ending.delete = self._buffer.on_exhausted == "delete" and not self._kept
        return ending

    def _conclude(self, judgement: Judgement, ending: Ending) -> Callable[[int], Transition]:
        """Where the group's command goes, given how many rows were done just now."""
        failed = judgement.failed + self._events.unreadable
        passing = [(item, error) for item, error in failed if not isinstance(deciding(error), FINAL_WORDS)]
        answered = judgement.answered or bool(self._events.unreadable)

        def conclude(done: int) -> Transition:
            if not failed:
                vanished = self._vanished + max(0, ending.expected - done)
                told = {"items": self._rows, "done": self._done + done, "calls": self._calls, "vanished": vanished}
                transition = Transition(self._leased, COMPLETED, encode(told))
            elif not passing:
                details = _described(failed, self._rows, answered=answered, listed=True)
                transition = Transition(self._leased, TROUBLESHOOTING, details, reason="PERMANENT")
            else:
                listed = answered or ending.exhausted
                details = _described(passing, self._rows, answered=answered, listed=listed)
                transition = decide(self._leased, Failed(passing[0][1]), self._handler.retry, WIDE, details)
                if ending.delete:
                    transition = Transition(self._leased, FAILED, details)
            transition.finished = time.monotonic()
            return transition

        return conclude

    def _count(self, ended: Ended) -> None:
        self._done += ended.done
        self._runner._tallies.add(self._buffer.name, done=ended.done)
        self._miss(ended.missing)

    def _miss(self, rows: int) -> None:
        """Other hands have deleted rows of this group: not fatal, but somebody should know."""
        if rows > 0:
            self._vanished += rows
            self._runner._tallies.add(self._buffer.name, vanished=rows)
            log.warning(
                "%s vanished from group %s in buffer %s: deleted by others meanwhile",
                counted(rows, "event"),
                self._leased.command_id,
                self._buffer.name,
            )

    async def _insist(self, plan: Callable[[], Plan[T]]) -> T:
        return await self._runner.insist(self._leased, self._buffer.name, plan)


@dataclass(slots=True)
class Events:
    """The items of a group, and the rows behind each: where events are merged, several rows are one item."""

    items: list[Item] = field(default_factory=list)
    unreadable: list[tuple[Item, BaseException]] = field(default_factory=list)
    """Those that fail alone before anybody is called: other hands wrote them, or their merge failed."""
    _rows: dict[Any, list[Any]] = field(default_factory=dict)
    """The rows of each item that has others than its own."""

    @classmethod
    def of(cls, rows: Sequence[Row], merge: Merge | None, *, own: bool) -> Events:
        events = cls()
        if merge is None:
            for row in rows:
                events._add([row], row, None, own)
            return events
        by_key: dict[Any, list[Row]] = {}
        for row in rows:
            by_key.setdefault((True, row.id) if row.key is None else (False, row.key), []).append(row)
        for members in by_key.values():
            chosen = members[-1] if merge == "keep_last" else members[0]
            events._rows[chosen.id] = [row.id for row in members]
            events._add(members, chosen, merge, own)
        return events

    def _add(self, rows: Sequence[Row], chosen: Row, merge: Merge | None, own: bool) -> None:
        try:
            data = _merged([_payload(row, own) for row in rows], merge)
        except Exception as error:
            item = Item(chosen.id, None, chosen.key, rows[0].created_at)
            self.unreadable.append((item, _unusable(error)))
        else:
            self.items.append(Item(chosen.id, data, chosen.key, rows[0].created_at))

    @property
    def all_items(self) -> list[Item]:
        return self.items + [item for item, _ in self.unreadable]

    def rows_of(self, items: Sequence[Item]) -> list[Any]:
        if not self._rows:
            return [item.id for item in items]
        return [row for item in items for row in self._rows[item.id]]

    def drop(self, items: Sequence[Item]) -> None:
        gone = {item.id for item in items}
        self.items = [item for item in self.items if item.id not in gone]
        self.unreadable = [(item, error) for item, error in self.unreadable if item.id not in gone]


def exhausted_group(command: Command) -> Group:
    """What the function for exhausted groups gets: the group as it was then. Rows of a table come as JSON has them."""
    told = command.data
    items = [Item(one["id"], one["data"], one["key"], _moment(one["created_at"])) for one in told["items"]]
    return Group(told["buffer"], UUID(told["group_id"]), items, told["partition"])


async def _alone(conn: AsyncConnection, plan: Plan[T]) -> T:
    try:
        async with conn.transaction():
            return await perform_async(conn, plan)
    except psycopg.NotSupportedError:
        # "Cached plan must not change result type": the table was altered, and this connection remembers how it was.
        await conn.close()
        raise


def _altered(error: TransientCommandError) -> bool:
    """Whether a refusal is about what the table is like, rather than about a row."""
    cause = error.__cause__
    return isinstance(cause, psycopg.Error) and (cause.sqlstate or "").startswith(("0A", "42"))


def _payload(row: Row, own: bool) -> Any:
    if row.flaw is not None:
        raise Undecodable(f"Python has no value for a column of this row: {row.flaw}")
    return decode(row.data) if own else row.data


def _merged(values: list[Any], merge: Merge | None) -> Any:
    if callable(merge):
        merged = values[0]
        for newer in values[1:]:
            merged = merge(merged, newer)
        return merged
    return values[-1] if merge == "keep_last" else values[0]


def _unusable(error: Exception) -> PermanentCommandError:
    if isinstance(error, Undecodable):
        return PermanentCommandError(str(error), code="UNDECODABLE")
    return PermanentCommandError(f"The merge of its events raised {type(error).__name__}: {error}", code="MERGE_FAILED")


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _described(failed: Sequence[tuple[Item, BaseException]], total: int, *, answered: bool, listed: bool) -> str:
    """The errors of an attempt: that of the first item speaks for all, and each is told if they differ."""
    described = decode(describe(failed[0][1]))
    if answered and total > 1:
        described["message"] = f"{len(failed)} of {total} items failed: {described['message']}"
    if listed:
        details: dict[str, Any] = {"items": [_told(item, error) for item, error in failed[:MOST_TOLD]]}
        if len(failed) > MOST_TOLD:
            details["more"] = len(failed) - MOST_TOLD
        if "details" in described:
            details["said"] = described["details"]
        described["details"] = details
    return encode(described, WIDE)


def _told(item: Item, error: BaseException) -> dict[str, Any]:
    described = summarise(error, 300)
    return {
        "id": item.id if isinstance(item.id, int | str) else storable(str(item.id), 300),
        "key": item.key,
        "type": described["type"],
        "code": described["code"],
        "message": safe_str(error, 300),
    }
