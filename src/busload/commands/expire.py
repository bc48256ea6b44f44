"""How commands end that have not started in time. Only the sweep looks for them, so others pay nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from busload.commands.command import NewCommand
from busload.commands.load import NewLoad
from busload.postgres.plan import Plan, execute
from busload.postgres.statements import statements

SQL = statements(__name__)

PAGE = 2000
"""Commands that one transaction cancels, and up to a load more."""
EXPIRED = "EXPIRED"
"""The reason that the audit trail and the reply of an expired command give."""
LOADS = 500
"""Loads with a time of their own that one transaction looks at."""


def expiring(commands: Iterable[NewCommand]) -> bool:
    """Whether one of these has a time by which it must have started, or a delay: either needs one more statement."""
    return any(command.expires_at is not None or command.delay is not None for command in commands)


def note_expiry(loads: Sequence[NewLoad]) -> Plan[None]:
    """Note until when these loads, which this transaction has just written, may start."""
    if limited := [load for load in loads if load.expires_at is not None]:
        yield from execute(
            SQL.note_expiry,
            domains=[load.domain for load in limited],
            firsts=[load.commands[0].command_id for load in limited],
            lasts=[load.commands[-1].command_id for load in limited],
            expires_ats=[load.expires_at for load in limited],
        )


def expire_commands() -> Plan[int | None]:
    """Cancel a page of commands whose own time is over and that have not started; needs a transaction.

    Returns how many were canceled; None if no time is over.
    """
    due = yield from execute(SQL.due, loads=LOADS, limit=PAGE)
    if not due:
        return None
    loads = {"los": [lo for lo, _ in due], "his": [hi for _, hi in due]}
    canceled = yield from _expire([hi for (hi,) in (yield from execute(SQL.waiting, **loads))])
    yield from execute(SQL.forget, **loads)
    return canceled


def expire_batch() -> Plan[int | None]:
    """Cancel a page of a batch whose time is over; needs a transaction.

    Returns how many commands were canceled; None if there is no such batch.
    """
    rows = yield from execute(SQL.expired_batch)
    if not rows:
        return None
    [(batch_id, first, last)] = rows
    yield from execute(SQL.note_expired, batch_id=batch_id)
    found = yield from execute(SQL.waiting_of_batch, batch_id=batch_id, first=first, last=last, limit=PAGE)
    return (yield from _expire([hi for (hi,) in found]))


def _expire(his: list[int]) -> Plan[int]:
    if not his:
        return 0
    [(canceled, _)] = yield from execute(SQL.expire, his=his, reason=EXPIRED)
    return int(canceled)
