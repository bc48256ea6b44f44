"""Buffer and SyncBuffer: single events in, bulk calls out. `bus.buffer(...)`, in both faces."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from busload.domain.buffer import BufferSettings, BufferStatus
from busload.domain.rate import RateLimit
from busload.domain.retry import RetryPolicy
from busload.handlers import Function
from busload.store import buffer, relation
from busload.store.connection import AsyncConnection, Connection
from busload.store.plan import Plan, perform, perform_async
from busload.store.relation import Relation

if TYPE_CHECKING:
    from busload.bus import CommandBus, SyncCommandBus


class AnyBuffer:
    """What both faces share: the declaration, and the functions that run its groups."""

    _bus: CommandBus | SyncCommandBus
    settings: BufferSettings

    @property
    def name(self) -> str:
        return self.settings.name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    def handler(
        self,
        *,
        retry: RetryPolicy | None = None,
        timeout: timedelta | float | None = None,
        isolate_poison: bool = False,
        rate_limit: RateLimit | None = None,
    ) -> Callable[[Function], Function]:
        """Register the function below to run the groups of this buffer; it is returned unchanged.

        It is called with a `Group` and a `HandlerContext`. When it returns, the events are done and deleted; when it
        raises, all of them are tried again, with the same ids. Or it judges each: `group.succeed(item)` and
        `group.fail(item, error)`; what failed is tried again alone. With `isolate_poison`, a group that fails as a
        whole more than once is split until the bad events stand alone.
        """
        return self._bus.handlers.register_buffer(
            self.settings, retry=retry, timeout=timeout, isolate_poison=isolate_poison, rate_limit=rate_limit
        )

    def exhausted(
        self, *, retry: RetryPolicy | None = None, timeout: timedelta | float | None = None
    ) -> Callable[[Function], Function]:
        """Register the function below to be called, with the `Group`, when attempts are used up.

        It runs as a command of its own, with its own retries: what it does about the events is done at least once.
        """
        return self._bus.handlers.register_exhausted(self.settings, retry=retry, timeout=timeout)


class Buffer(AnyBuffer):
    """A buffer of a `CommandBus`: add events, see how many wait, and let them go before their time."""

    def __init__(self, bus: CommandBus, settings: BufferSettings) -> None:
        self._bus: CommandBus = bus
        self.settings = settings

    async def add(
        self, data: Any, *, key: str | None = None, conn: AsyncConnection | Connection | None = None
    ) -> Any | None:
        """Add one event and return its id. With `conn` it exists exactly if that transaction commits.

        `key` names its subject; a buffer that merges needs it. None: it was merged into the event that waits for the
        same key, which then is not taken into a group before this transaction has ended. If that event is in a group
        already, the new one is the next. For a buffer that is a table of yours, `data` are columns and their values.
        """
        return await self._bus._write(self._bus._requests.add(self.settings, data, key), conn)

    async def add_many(
        self,
        items: Iterable[Any],
        *,
        key: Callable[[Any], str] | None = None,
        conn: AsyncConnection | Connection | None = None,
    ) -> list[Any]:
        """Add many events, all or none; returns their ids, None for those that were merged into others.

        `key` tells the subject of a payload: `add_many(rows, key=lambda row: row["contact_id"])`.
        """
        return await self._bus._write(self._bus._requests.add_many(self.settings, items, key), conn)

    async def claim(self, callback: Callable[..., Any], *, limit: int | None = None) -> list[Any]:
        """Make a group of what waits, due or not, and return the ids of its events; none: nothing waits.

        `callback` is called with the group_id in the transaction that makes the group, and, if it takes two arguments,
        with its connection. If it raises, nothing was claimed. It may be async. Workers need none of this.
        """
        limit = self._bus._requests.claim(self.settings, callback, limit)
        at = await self._bus._perform_alone(_serve(self.settings))
        async with self._bus.pool.connection() as conn, conn.transaction():
            claimed = await perform_async(conn, buffer.claim(self.settings, at, limit))
            if claimed is None:
                return []
            group_id, ids = claimed
            answer = callback(group_id, conn) if _takes_connection(callback) else callback(group_id)
            if inspect.isawaitable(answer):
                await answer
            return ids

    async def distribute(self) -> int:
        """Make groups of all that is due and has room, as every worker does that serves this buffer; how many."""
        at = await self._bus._perform_alone(_serve(self.settings))
        perform = self._bus._perform_alone if buffer.takes_turns(self.settings) else self._bus._read
        groups, after = 0, None
        while True:
            round = buffer.Round(self.settings, at, after, around=False)
            for plan in round.plans():
                await perform(plan)
            groups, after = groups + round.groups, round.cursor
            if after is None or round.short_of_room:
                return groups

    async def flush(self) -> int:
        """Let all that waits now go without waiting for more; returns how many that is, counted up to 10,000."""
        return await self._bus._write(self._bus._requests.flush(self.settings))

    async def status(self) -> BufferStatus:
        """How many wait and since when, where its groups are, and what was done so far."""
        return await self._bus._look(self._bus._requests.buffer_status(self.settings))


class SyncBuffer(AnyBuffer):
    """`Buffer` for code without an event loop."""

    def __init__(self, bus: SyncCommandBus, settings: BufferSettings) -> None:
        self._bus: SyncCommandBus = bus
        self.settings = settings

    def add(self, data: Any, *, key: str | None = None, conn: Connection | None = None) -> Any | None:
        """Add one event and return its id; see `Buffer.add`."""
        return self._bus._write(self._bus._requests.add(self.settings, data, key), conn)

    def add_many(
        self, items: Iterable[Any], *, key: Callable[[Any], str] | None = None, conn: Connection | None = None
    ) -> list[Any]:
        """Add many events, all or none; see `Buffer.add_many`."""
        return self._bus._write(self._bus._requests.add_many(self.settings, items, key), conn)

    def claim(self, callback: Callable[..., Any], *, limit: int | None = None) -> list[Any]:
        """Make a group of what waits, due or not, and return the ids of its events; see `Buffer.claim`."""
        limit = self._bus._requests.claim(self.settings, callback, limit)
        at = self._bus._perform_alone(_serve(self.settings))
        with self._bus.pool.connection() as conn, conn.transaction():
            claimed = perform(conn, buffer.claim(self.settings, at, limit))
            if claimed is None:
                return []
            group_id, ids = claimed
            if _takes_connection(callback):
                callback(group_id, conn)
            else:
                callback(group_id)
            return ids

    def distribute(self) -> int:
        """Make groups of all that is due and has room, as every worker does that serves this buffer; how many."""
        at = self._bus._perform_alone(_serve(self.settings))
        perform = self._bus._perform_alone if buffer.takes_turns(self.settings) else self._bus._read
        groups, after = 0, None
        while True:
            round = buffer.Round(self.settings, at, after, around=False)
            for plan in round.plans():
                perform(plan)
            groups, after = groups + round.groups, round.cursor
            if after is None or round.short_of_room:
                return groups

    def flush(self) -> int:
        """Let all that waits now go without waiting for more; returns how many that is, counted up to 10,000."""
        return self._bus._write(self._bus._requests.flush(self.settings))

    def status(self) -> BufferStatus:
        """How many wait and since when, where its groups are, and what was done so far."""
        return self._bus._look(self._bus._requests.buffer_status(self.settings))


def _serve(settings: BufferSettings) -> Plan[Relation]:
    at = yield from relation.find(settings)
    yield from buffer.declare(settings, at)
    return at


def _takes_connection(callback: Callable[..., Any]) -> bool:
    """Whether it can be called with two arguments."""
    try:
        inspect.signature(callback).bind(None, None)
    except (TypeError, ValueError):
        return False
    return True
