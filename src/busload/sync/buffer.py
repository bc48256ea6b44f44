"""Made from busload.buffers.buffer by scripts/generate_sync.py. Change the source instead."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable
from typing import Any

from busload.buffers import add, claim, overview, status
from busload.buffers.buffer import (
    PAGE,
    AnyBuffer,
    Handlers,
    _check_claim,
    _flush,
    _serve,
    _takes_connection,
)
from busload.buffers.declaration import BufferSettings, declared
from busload.buffers.overview import BufferOverview
from busload.buffers.status import BufferStatus
from busload.commands.checks import refuse
from busload.postgres import waiting_in_threads as waiting
from busload.postgres.callers_connection import AnySyncConnection
from busload.settings import PayloadLimits
from busload.sync.database import Database
from busload.sync.plan import perform


class SyncBuffer(AnyBuffer):
    """A buffer of a `SyncCommandBus`: add events, see how many wait, and let them go before their time."""

    def __init__(
        self, database: Database, handlers: Handlers, settings: BufferSettings, payload: PayloadLimits
    ) -> None:
        self._database, self._handlers, self.settings, self._payload = database, handlers, settings, payload

    def add(self, data: Any, *, key: str | None = None, conn: AnySyncConnection | None = None) -> Any | None:
        """Add one event and return its id. With `conn` it exists exactly if that transaction commits.

        `key` names its subject; a buffer that merges needs it. None: it was merged into the event that waits for the
        same key, which then is not taken into a group before this transaction has ended. If that event is in a group
        already, the new one is the next. For a buffer that is a table of yours, `data` are columns and their values.
        """
        return self._database.write(add.add(self._payload, self.settings, data, key), conn)

    def add_many(
        self,
        items: Iterable[Any],
        *,
        key: Callable[[Any], str] | None = None,
        conn: AnySyncConnection | None = None,
    ) -> list[Any]:
        """Add many events, the payloads in `items`, all or none; returns their ids.

        Instead of an id there is None for an event that was merged into another. `key` tells the subject of a payload:
        `add_many(rows, key=lambda row: row["contact_id"])`. With `conn` they exist exactly if that transaction commits.
        """
        return self._database.write(add.add_many(self._payload, self.settings, items, key), conn)

    def claim(self, callback: Callable[..., Any], *, limit: int | None = None) -> list[Any]:
        """Make a group of what waits, due or not, and return the ids of its events; none if nothing waits.

        The group has at most `limit` events, or as many as the buffer's `size` says. `callback` is called with the
        group_id in the transaction that makes the group, and, if it takes two arguments, with its connection. If it
        raises, nothing was claimed. It may be async. Workers need none of this.
        """
        _check_claim(callback, limit, awaits=waiting.AWAITS)
        with self._database.pool.connection() as conn:
            self._database.check_schema(conn)
            with conn.transaction():
                at = perform(conn, _serve(self.settings))
            with conn.transaction():
                claimed = perform(conn, claim.claim(self.settings, at, limit or self.settings.size))
                if claimed is None:
                    return []
                group_id, ids = claimed
                answer = callback(group_id, conn) if _takes_connection(callback) else callback(group_id)
                waiting.result_of(answer)
                return ids

    def distribute(self) -> int:
        """Make groups of all that is due and has room, as every worker does that serves this buffer; how many."""
        at = self._database.in_transaction(_serve(self.settings))
        perform = self._database.in_transaction if claim.takes_turns(self.settings) else self._database.read
        groups, after = 0, None
        while True:
            round = claim.Round(self.settings, at, after, around=False)
            for plan in round.plans():
                perform(plan)
            groups, after = groups + round.groups, round.cursor
            if after is None or round.short_of_room:
                return groups

    def flush(self, *, operator: str | None = None) -> int:
        """Let all that waits now go without waiting for more; returns how many that is, counted up to 10,000.

        `operator` names who does it.
        """
        return self._database.write(_flush(self.settings, operator))

    def status(self) -> BufferStatus:
        """How many wait and since when, where its groups are, and what was done so far."""
        return self._database.in_transaction(status.status(self.settings))


class Buffers:
    """Every buffer of the database, whoever has declared it, by its `name`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def list(self) -> builtins.list[BufferStatus]:
        """Every buffer that a worker has served or in which events wait, and how it is doing."""
        return self._database.in_transaction(status.statuses())

    def overview(self, *, limit: int = 100) -> builtins.list[BufferOverview]:
        """Every buffer at a glance, at most `limit`, in one statement: `list` tells more, and takes longer."""
        refuse(PAGE(limit, "limit"))
        return self._database.in_transaction(overview.overview(limit=limit))

    def get(self, name: str) -> BufferStatus | None:
        """How one buffer is doing; None if nobody has declared it, and no event waits in it."""
        return self._database.in_transaction(status.find(name))

    def flush(self, name: str, *, operator: str | None = None) -> int:
        """Let all that waits now in a buffer go, as `SyncBuffer.flush` does, though it is not declared here.

        `operator` names who does it.
        """
        return self._database.write(_flush(declared(name, {}), operator))
