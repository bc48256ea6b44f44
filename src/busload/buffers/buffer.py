"""A buffer: single events in, bulk calls out; `bus.buffer(...)`."""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from inspect import iscoroutinefunction
from typing import Any, Protocol, Unpack

from busload.buffers import add, claim, event_table, overview, status
from busload.buffers.declaration import EXHAUSTED, GROUP, SIZES, BufferSettings, declared
from busload.buffers.event_table import Relation
from busload.buffers.overview import BufferOverview
from busload.buffers.status import BufferStatus
from busload.commands.checks import refuse, whole, wrong_text
from busload.commands.command import refuse_unknown
from busload.limits.handler_options import Function, GroupHandlerOptions, PolicyOptions
from busload.postgres import waiting
from busload.postgres.callers_connection import AnyConnection
from busload.postgres.database import Database
from busload.postgres.plan import Plan, perform_async
from busload.postgres.write import Write, patient
from busload.settings import PayloadLimits

PAGE = whole(1, 10_000)
MOST_OF_OPERATOR = 255
"""Bytes of the name of an operator."""


class Handlers(Protocol):
    """Where the functions are registered that run the groups of a buffer."""

    def add(
        self,
        domain: str,
        command_type: str,
        *,
        buffer: BufferSettings | None = None,
        **options: Unpack[GroupHandlerOptions],
    ) -> Callable[[Function], Function]: ...


class AnyBuffer:
    """What both faces share: the declaration, and the functions that run its groups."""

    settings: BufferSettings
    _handlers: Handlers

    @property
    def name(self) -> str:
        """The name of the buffer, which is also the domain of its groups."""
        return self.settings.name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    def handler(self, **options: Unpack[GroupHandlerOptions]) -> Callable[[Function], Function]:
        """Register the function below to run the groups of this buffer; it is returned unchanged.

        It is called with a `Group` and a `HandlerContext`. When it returns, the events are done and deleted; when it
        raises, all of them are tried again, with the same ids. Or it judges each: `group.succeed(item)` and
        `group.fail(item, error)`; what failed is tried again alone. With `isolate_poison`, a group that fails as a
        whole more than once is split until the bad events stand alone.
        """
        refuse_unknown("handler", options, GroupHandlerOptions)
        return self._handlers.add(self.name, GROUP, buffer=self.settings, **options)

    def exhausted(self, **options: Unpack[PolicyOptions]) -> Callable[[Function], Function]:
        """Register the function below to be called, with the `Group`, when attempts are used up.

        It runs as a command of its own, with its own retries: what it does about the events is done at least once.
        """
        refuse_unknown("exhausted", options, PolicyOptions)
        return self._handlers.add(self.name, EXHAUSTED, **options)


class Buffer(AnyBuffer):
    """A buffer of a `CommandBus`: add events, see how many wait, and let them go before their time."""

    def __init__(
        self, database: Database, handlers: Handlers, settings: BufferSettings, payload: PayloadLimits
    ) -> None:
        self._database, self._handlers, self.settings, self._payload = database, handlers, settings, payload

    async def add(self, data: Any, *, key: str | None = None, conn: AnyConnection | None = None) -> Any | None:
        """Add one event and return its id. With `conn` it exists exactly if that transaction commits.

        `key` names its subject; a buffer that merges needs it. None: it was merged into the event that waits for the
        same key, which then is not taken into a group before this transaction has ended. If that event is in a group
        already, the new one is the next. For a buffer that is a table of yours, `data` are columns and their values.
        """
        return await self._database.write(add.add(self._payload, self.settings, data, key), conn)

    async def add_many(
        self,
        items: Iterable[Any],
        *,
        key: Callable[[Any], str] | None = None,
        conn: AnyConnection | None = None,
    ) -> list[Any]:
        """Add many events, the payloads in `items`, all or none; returns their ids.

        Instead of an id there is None for an event that was merged into another. `key` tells the subject of a payload:
        `add_many(rows, key=lambda row: row["contact_id"])`. With `conn` they exist exactly if that transaction commits.
        """
        return await self._database.write(add.add_many(self._payload, self.settings, items, key), conn)

    async def claim(self, callback: Callable[..., Any], *, limit: int | None = None) -> list[Any]:
        """Make a group of what waits, due or not, and return the ids of its events; none if nothing waits.

        The group has at most `limit` events, or as many as the buffer's `size` says. `callback` is called with the
        group_id in the transaction that makes the group, and, if it takes two arguments, with its connection. If it
        raises, nothing was claimed. It may be async. Workers need none of this.
        """
        _check_claim(callback, limit, awaits=waiting.AWAITS)
        async with self._database.pool.connection() as conn:
            await self._database.check_schema(conn)
            async with conn.transaction():
                at = await perform_async(conn, _serve(self.settings))
            async with conn.transaction():
                claimed = await perform_async(conn, claim.claim(self.settings, at, limit or self.settings.size))
                if claimed is None:
                    return []
                group_id, ids = claimed
                answer = callback(group_id, conn) if _takes_connection(callback) else callback(group_id)
                await waiting.result_of(answer)
                return ids

    async def distribute(self) -> int:
        """Make groups of all that is due and has room, as every worker does that serves this buffer; how many."""
        at = await self._database.in_transaction(_serve(self.settings))
        perform = self._database.in_transaction if claim.takes_turns(self.settings) else self._database.read
        groups, after = 0, None
        while True:
            round = claim.Round(self.settings, at, after, around=False)
            for plan in round.plans():
                await perform(plan)
            groups, after = groups + round.groups, round.cursor
            if after is None or round.short_of_room:
                return groups

    async def flush(self, *, operator: str | None = None) -> int:
        """Let all that waits now go without waiting for more; returns how many that is, counted up to 10,000.

        `operator` names who does it.
        """
        return await self._database.write(_flush(self.settings, operator))

    async def status(self) -> BufferStatus:
        """How many wait and since when, where its groups are, and what was done so far."""
        return await self._database.in_transaction(status.status(self.settings))


class Buffers:
    """Every buffer of the database, whoever has declared it, by its `name`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def list(self) -> builtins.list[BufferStatus]:
        """Every buffer that a worker has served or in which events wait, and how it is doing."""
        return await self._database.in_transaction(status.statuses())

    async def overview(self, *, limit: int = 100) -> builtins.list[BufferOverview]:
        """Every buffer at a glance, at most `limit`, in one statement: `list` tells more, and takes longer."""
        refuse(PAGE(limit, "limit"))
        return await self._database.in_transaction(overview.overview(limit=limit))

    async def get(self, name: str) -> BufferStatus | None:
        """How one buffer is doing; None if nobody has declared it, and no event waits in it."""
        return await self._database.in_transaction(status.find(name))

    async def flush(self, name: str, *, operator: str | None = None) -> int:
        """Let all that waits now in a buffer go, as `Buffer.flush` does, though it is not declared here.

        `operator` names who does it.
        """
        return await self._database.write(_flush(declared(name, {}), operator))


def _serve(settings: BufferSettings) -> Plan[Relation]:
    at = yield from event_table.find(settings)
    yield from status.declare(settings, at)
    return at


def _flush(settings: BufferSettings, operator: str | None) -> Write[int]:
    refuse([] if operator is None else wrong_text(operator, "operator", MOST_OF_OPERATOR))
    return patient(partial(status.flush, settings, operator=operator))


def _takes_connection(callback: Callable[..., Any]) -> bool:
    """Whether it can be called with two arguments."""
    try:
        inspect.signature(callback).bind(None, None)
    except (TypeError, ValueError):
        return False
    return True


def _check_claim(callback: object, limit: int | None, *, awaits: bool) -> None:
    """Refuse a claim that cannot call its function, or asks for no number of events that a group may have."""
    if not callable(callback):
        raise TypeError(f"claim() needs a function to call with the group_id, found {callback!r:.80}.")
    if iscoroutinefunction(callback) and not awaits:
        raise TypeError("claim() found an async function, which nobody awaits here; pass a plain one.")
    if limit is not None:
        refuse(SIZES(limit, "limit"))
