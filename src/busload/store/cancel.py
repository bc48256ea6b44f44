"""How a batch is stopped."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from busload.errors import BatchNotFoundError
from busload.store import send
from busload.store.plan import Plan, execute
from busload.store.statements import statements

SQL = statements("cancel")


def cancel_batch(domain: str, batch_id: UUID, *, reason: str, operator: str | None) -> Plan[int]:
    """Cancel what has not started and ask the rest to stop; needs a transaction."""
    marked = yield from execute(SQL.mark_canceled, domain=domain, batch_id=batch_id, reason=reason, operator=operator)
    if not marked:
        if not (yield from execute(send.SQL.find_batch, domain=domain, batch_id=batch_id)):
            raise BatchNotFoundError(domain, batch_id)
        return 0
    canceled = yield from cancel_waiting([batch_id], reason=reason, operator=operator)
    yield from execute(send.SQL.decide, batch_id=batch_id)
    return canceled


def cancel_waiting(batch_ids: Sequence[UUID], *, reason: str | None, operator: str | None) -> Plan[int]:
    """Cancel everything of these batches that waits in a place; their rows must be locked."""
    [(canceled, _)] = yield from execute(
        SQL.cancel_waiting, batch_ids=list(batch_ids), reason=reason, operator=operator
    )
    return int(canceled)
