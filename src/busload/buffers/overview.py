"""All buffers at a glance, in one statement: for those who look again and again."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from busload.buffers.status import AT_MOST, COUNTED
from busload.buffers.status import SQL as STATUS
from busload.postgres.plan import Plan, execute, many
from busload.postgres.statements import statements

SQL = statements(__name__)


@dataclass(frozen=True, slots=True)
class BufferOverview:
    """How a buffer is doing. What cannot be read, because its table is gone or locked, is None, and `problem` says why.

    If more than 10,000 events wait, `waiting` is 10,001 and `oldest` is that of the first ones found.
    """

    name: str
    table: str | None
    """The application's table; None for one of busload's own."""
    waiting: int | None
    oldest: datetime | None
    groups_ready: int
    groups_running: int
    groups_retrying: int
    groups_in_troubleshooting: int
    calls: int
    done: int
    size: int | None
    max_age: timedelta | None
    paused: bool
    problem: str | None
    at: datetime
    """When the database was asked, by its own clock."""

    @property
    def waiting_capped(self) -> bool:
        return self.waiting is not None and self.waiting > COUNTED


def overview(*, limit: int) -> Plan[list[BufferOverview]]:
    """Read all of them; needs a transaction, and waits for no table that is locked."""
    yield from execute(STATUS.be_brief, within=AT_MOST)
    return (yield from many(BufferOverview, SQL.overview, most=COUNTED + 1, limit=limit))
