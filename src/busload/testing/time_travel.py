"""Time travel: the rows become older, so that what was to come is due now. No clock is changed."""

from __future__ import annotations

from collections.abc import Coroutine
from datetime import datetime, timedelta
from typing import Any, overload

from busload.bus import CommandBus
from busload.commands.checks import refuse, wrong_time
from busload.postgres.callers_connection import AnyConnection
from busload.postgres.plan import Plan, execute
from busload.postgres.statements import statements
from busload.sync.bus import SyncCommandBus
from busload.testing.faces import AnyBus, performed, refuse_no_bus

SQL = statements(__name__)


@overload
def travel(bus: CommandBus, by: timedelta, *, conn: AnyConnection | None = None) -> Coroutine[Any, Any, None]: ...
@overload
def travel(bus: SyncCommandBus, by: timedelta, *, conn: AnyConnection | None = None) -> None: ...
def travel(bus: AnyBus, by: timedelta, *, conn: AnyConnection | None = None) -> Any:
    """Go so far into the future: everything in busload's tables is older by that much.

    What was scheduled is due, and so are retries, expiry, dedup windows, rate limits, held task keys, the age of
    buffered events, and the leases of workers: a worker that runs meanwhile seems to have died. Travel between two
    drains. The clock of the database and that of Python stay as they are, and so do your own tables.
    """
    refuse_no_bus(bus)
    if not isinstance(by, timedelta) or by <= timedelta(0):
        raise ValueError(f"travel() wants a timedelta of more than 0, found {by!r:.80}. The past cannot be had.")
    return performed(bus, _make_older(by), conn)


@overload
def travel_to(bus: CommandBus, when: datetime, *, conn: AnyConnection | None = None) -> Coroutine[Any, Any, None]: ...
@overload
def travel_to(bus: SyncCommandBus, when: datetime, *, conn: AnyConnection | None = None) -> None: ...
def travel_to(bus: AnyBus, when: datetime, *, conn: AnyConnection | None = None) -> Any:
    """Go to that moment, which must know its time zone and lie in the future: as `travel`.

    Moments count from the real now: after a journey of a day, tomorrow is in the past.
    """
    refuse_no_bus(bus)
    refuse(wrong_time(when, "when"), writes=False)
    return performed(bus, _go_to(when), conn)


def _go_to(when: datetime) -> Plan[None]:
    [(now,)] = yield from execute(SQL.now)
    if when <= now:
        raise ValueError(f"travel_to() wants a moment in the future, found {when}; now is {now}.")
    yield from _make_older(when - now)


def _make_older(by: timedelta) -> Plan[None]:
    for (update,) in (yield from execute(SQL.updates)):
        yield from execute(update.encode(), by=by)
