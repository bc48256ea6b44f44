"""How one batch is held, resumed and given another failure budget.

Nothing of a held batch starts, and what runs finishes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from busload.errors import BatchNotFoundError, InvalidOperationError
from busload.postgres.plan import Plan, Row, execute
from busload.postgres.statements import statements

SQL = statements(__name__)


NOT_HELD = "it can neither be held nor resumed"
NO_OTHER_PRIORITY = "its commands can have no other priority"
NO_OTHER_BUDGET = "it can have no other failure budget"
"""What cannot be done with a batch that has ended."""


def hold(domain: str, batch_id: UUID, *, reason: str, operator: str | None) -> Plan[bool]:
    """Hold a batch. Returns False if it was held already: that hold stays as it is. Needs a transaction."""
    held, canceled = yield from lock(domain, batch_id, NOT_HELD)
    if canceled:
        raise _nothing_left(domain, batch_id)
    if not held:
        yield from execute(SQL.hold, batch_id=batch_id, reason=reason, operator=operator)
    return not held


def resume(
    domain: str,
    batch_id: UUID,
    *,
    operator: str | None,
    budget: Mapping[str, Any] | None = None,
    end_canary: bool = False,
) -> Plan[bool]:
    """Let a held batch go on, with another failure budget if one is given, as columns. Needs a transaction.

    With `end_canary`, what waits for its canary goes on as well, also if the batch is not held. Returns False if the
    batch was not held, and no canary was ended: then nothing changes.
    """
    held, _ = yield from lock(domain, batch_id, NOT_HELD)
    ended = end_canary and bool((yield from execute(SQL.end_canary, batch_id=batch_id, operator=operator)))
    if ended:
        yield from execute(SQL.release_canary, batch_id=batch_id)
    if held:
        if budget is not None:
            yield from execute(SQL.set_budget, batch_id=batch_id, operator=operator, from_here=True, **budget)
        yield from execute(SQL.resume, batch_id=batch_id, operator=operator)
    return held or ended


def set_budget(domain: str, batch_id: UUID, budget: Mapping[str, Any], *, operator: str | None) -> Plan[bool]:
    """Give a batch another failure budget, as columns; what has failed counts. Needs a transaction.

    Returns whether more has failed already, so that the batch is held from now on. A hold that was there stays.
    """
    held, canceled = yield from lock(domain, batch_id, NO_OTHER_BUDGET)
    if canceled:
        raise InvalidOperationError(f"Batch {batch_id} in {domain!r} was canceled, so {NO_OTHER_BUDGET}.")
    yield from execute(SQL.set_budget, batch_id=batch_id, operator=operator, from_here=False, **budget)
    if held:
        return False
    yield from execute(SQL.guard, batch_id=batch_id)
    return (yield from lock(domain, batch_id, NO_OTHER_BUDGET))[0]


def lock(domain: str, batch_id: UUID, so: str) -> Plan[tuple[bool, bool]]:
    """Lock a batch that has not ended, and say whether it is held and canceled.

    The error about a batch that has ended says by `so` what cannot be done.
    """
    return _state(domain, batch_id, so, (yield from execute(SQL.lock, domain=domain, batch_id=batch_id)))


def look(domain: str, batch_id: UUID, so: str = NOT_HELD, *, to_hold: bool = True) -> Plan[bool]:
    """Whether a batch is held. Refuses what `hold` and `lock` refuse, and locks nothing."""
    held, canceled = _state(domain, batch_id, so, (yield from execute(SQL.look, domain=domain, batch_id=batch_id)))
    if canceled and to_hold:
        raise _nothing_left(domain, batch_id)
    return held


def _state(domain: str, batch_id: UUID, so: str, rows: Sequence[Row]) -> tuple[bool, bool]:
    if not rows:
        raise BatchNotFoundError(domain, batch_id)
    held, canceled, completed, of_jobs = rows[0]
    if of_jobs:
        raise InvalidOperationError(
            f"Batch {batch_id} in {domain!r} is a batch of jobs, which has no commands of its own: it can be canceled,"
            " but not held, resumed or given another priority or budget. The batches of its jobs can: list them with"
            " `busload batch ls --job ID`."
        )
    if completed:
        raise InvalidOperationError(f"Batch {batch_id} in {domain!r} has ended, so {so}.")
    return held, canceled


def _nothing_left(domain: str, batch_id: UUID) -> InvalidOperationError:
    return InvalidOperationError(f"Batch {batch_id} in {domain!r} was canceled, so nothing of it is left to hold.")


def withhold_stragglers() -> Plan[int]:
    """Take out of the queue what has come back to held batches; needs a transaction. Returns how many batches."""
    batches = [batch_id for (batch_id,) in (yield from execute(SQL.held_with_stragglers))]
    if batches:
        yield from execute(SQL.withhold, batches=batches)
    return len(batches)
