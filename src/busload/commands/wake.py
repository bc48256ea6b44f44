"""How a worker is found by those who have commands for it: one worker is woken, and tells the others if need be."""

from __future__ import annotations

from collections.abc import Iterable

from busload.postgres.plan import Plan, execute
from busload.postgres.statements import statements

SQL = statements(__name__)

WAKE = "busload_wake_"
"""Commands of a domain became ready, and one worker is told: its session's number ends the name of the channel."""


def channel_of(session: int) -> str:
    """The channel on which the worker that listens in this session of the server is woken."""
    return f"{WAKE}{session}"


def begin(worker: int, session: int) -> Plan[None]:
    """Have this worker woken in this session, which must be the one that performs this."""
    yield from execute(SQL.hold_session)
    yield from listens(worker, session)


def listens(worker: int, session: int | None) -> Plan[None]:
    """Have this worker woken in this session; if it is None, no longer."""
    yield from execute(SQL.listens, worker=worker, session=session)


def tell_all(domains: Iterable[str]) -> Plan[None]:
    """Tell all workers of these domains that there is work, if there is."""
    yield from execute(SQL.tell_all, domains=list(domains))
