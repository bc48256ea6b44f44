"""How everything that waits of a batch gets another priority."""

from __future__ import annotations

from uuid import UUID

from busload.batches.hold import NO_OTHER_PRIORITY, lock
from busload.postgres.plan import Plan, execute
from busload.postgres.statements import statements

SQL = statements(__name__)


def reprioritize(domain: str, batch_id: UUID, priority: int, *, operator: str | None) -> Plan[int]:
    """Give everything that waits of a batch another priority, and return how many commands that is.

    Needs a transaction.
    """
    yield from lock(domain, batch_id, NO_OTHER_PRIORITY)
    [(commands,)] = yield from execute(SQL.reprioritize, batch_id=batch_id, priority=priority, operator=operator)
    return int(commands)
