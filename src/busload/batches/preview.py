"""What a call about a batch would touch: refused as the call itself would be, and counted without a lock.

Only the resume of a batch that a person holds, and that has a canary or a budget, is performed and taken back: they
may hold the batch again at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from busload.batches import hold
from busload.batches.batch import find_batch
from busload.errors import BatchNotFoundError
from busload.postgres.plan import Plan, many, taken_back
from busload.postgres.statements import statements

SQL = statements(__name__)


@dataclass(frozen=True, slots=True)
class Waiting:
    """How many commands of a batch have not ended."""

    commands: int = 0
    """Commands that have not started."""
    held: int = 0
    """Of these, those that are held or wait for a canary."""
    of_other_priority: int = 0
    """Of these, those whose priority is not the one that was asked for."""
    running: int = 0


def of_cancel(domain: str, batch_id: UUID) -> Plan[Waiting]:
    """What a cancel would cancel, and how many running commands it would ask to stop."""
    batch = yield from find_batch(domain, batch_id)
    if batch is None:
        raise BatchNotFoundError(domain, batch_id)
    return Waiting() if batch.completed_at is not None else (yield from waiting([batch_id]))


def of_hold(domain: str, batch_id: UUID) -> Plan[Waiting]:
    """What a hold would keep from starting; nothing if the batch is held already."""
    held = yield from hold.look(domain, batch_id)
    return Waiting() if held else (yield from waiting([batch_id]))


def of_resume(
    domain: str, batch_id: UUID, budget: Mapping[str, Any] | None, *, end_canary: bool = False
) -> Plan[tuple[Waiting, str | None]]:
    """What a resume, with this budget if there is one, would let go, and why the batch would be held again at once."""
    held = yield from hold.look(domain, batch_id, to_hold=False)
    batch = yield from find_batch(domain, batch_id)
    has_canary = batch is not None and batch.canary_count is not None and batch.canary_ended_at is None
    if batch is None or not (held or (end_canary and has_canary)):
        return Waiting(), None
    guarded = batch.failure_budget is not None or has_canary
    again = None
    if batch.held_reason == "OPERATOR" and guarded:
        again = yield from taken_back(_resumed(domain, batch_id, budget, end_canary))
    return (yield from waiting([batch_id])) if again is None else Waiting(), again


def _resumed(domain: str, batch_id: UUID, budget: Mapping[str, Any] | None, end_canary: bool) -> Plan[str | None]:
    yield from hold.resume(domain, batch_id, operator=None, budget=budget, end_canary=end_canary)
    batch = yield from find_batch(domain, batch_id)
    return None if batch is None else batch.held_note


def of_reprioritize(domain: str, batch_id: UUID, priority: int) -> Plan[Waiting]:
    """What would get another priority: `of_other_priority`."""
    yield from hold.look(domain, batch_id, hold.NO_OTHER_PRIORITY, to_hold=False)
    return (yield from waiting([batch_id], priority))


def waiting(batch_ids: Sequence[UUID], priority: int = 0) -> Plan[Waiting]:
    """What has not ended of these batches together."""
    [found] = yield from many(Waiting, SQL.waiting, batch_ids=list(batch_ids), priority=priority)
    return found
