"""How results are recorded: many attempts in one statement, each only while its lease exists."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, TypeAlias
from uuid import UUID

from psycopg import errors as pg

from busload.commands.execution import CANCELED, COMPLETED, Lease, Transition
from busload.postgres.arrays import Bigints, Floats, Integers, Packed, Texts, unless_all_null
from busload.postgres.plan import Plan, execute
from busload.postgres.statements import statements

SQL = statements(__name__)

Once: TypeAlias = Literal["RECORDED", "SAME TRANSACTION", "COMMITTED BEFORE", "LOST"]
"""What came of recording an attempt: now, before in the same transaction, before by another one, or not at all."""


def settle(
    transitions: Sequence[Transition], *, now: float, again: bool = True, patience: int | None = None
) -> Plan[set[int]]:
    """Record attempts; return the ids of the commands this credited.

    A retry that a cancel has turned into the end of its command becomes CANCELED in its transition, too.
    `now` is read from the same clock as `started` and `finished`. Only differences are sent, so that the clock of the
    database dates everything. Without `again` no attempt may be recorded already, which is cheaper. If one is, the
    statement fails and is repeated with more care: so this is not for use within a transaction. With `patience`, in
    milliseconds, it fails by `LockNotAvailable` if others hold a lease or a batch for longer.
    """
    columns = _columns(transitions, now, patience)
    try:
        rows = yield from execute(SQL.settle_again if again else SQL.settle, **columns)
    except pg.UniqueViolation:
        # A flush has recorded the same attempts before, but its answer was lost or came too late.
        rows = yield from execute(SQL.settle_again, **columns)
    recorded, canceled, _ = rows[0]
    if recorded == len(transitions):
        _note_canceled(transitions, canceled or ())
        return {t.leased.id for t in transitions}
    return (yield from credited(transitions))


def settle_once(transition: Transition, *, now: float) -> Plan[Once]:
    """Record an attempt within a caller's transaction; say if it was recorded before, which `settle` takes for success.

    A caller's transaction holds writes beside the settlement, so a second one of the same attempt must not commit.
    """
    try:
        [(recorded, *_)] = yield from execute(SQL.settle_again, **_columns([transition], now, None))
    except pg.UniqueViolation:  # the first transaction has committed while this one waited for the lease
        return "COMMITTED BEFORE"
    if recorded:
        return "RECORDED"
    leased = transition.leased
    rows = yield from execute(SQL.recorded_before, id=leased.id, lease_id=leased.lease.lease_id)
    if not rows:
        return "LOST"
    [(same_transaction,)] = rows
    return "SAME TRANSACTION" if same_transaction else "COMMITTED BEFORE"


def _columns(transitions: Sequence[Transition], now: float, patience: int | None) -> dict[str, Any]:
    leased = [t.leased for t in transitions]
    leases = [one.lease for one in leased]
    ordinals = {lease: ordinal for ordinal, lease in enumerate(dict.fromkeys(leases), 1)}  # to hash an id takes longer
    return {
        "ordinals": Integers.of([ordinals[lease] for lease in leases]),
        "leases": [lease.lease_id for lease in ordinals],
        "ids": Bigints.of([one.id for one in leased]),
        "outcomes": _outcomes(transitions),
        "started_ago": Floats.of([now - one.started for one in leased]),
        "finished_ago": Floats.of([now - t.finished for t in transitions]),
        "details": Texts.of(unless_all_null([t.details for t in transitions])),
        "delays": Floats.of(unless_all_null([t.delay for t in transitions])),
        "reasons": Texts.of(unless_all_null([t.reason for t in transitions])),
        "patience": patience,
    }


def credited(transitions: Sequence[Transition]) -> Plan[set[int]]:
    """The ids of the commands whose attempts are recorded already, just as these say they ended."""
    rows = yield from execute(
        SQL.credited,
        ids=Bigints.of([t.leased.id for t in transitions]),
        lease_ids=[t.leased.lease.lease_id for t in transitions],
        outcomes=_outcomes(transitions),
    )
    _note_canceled(transitions, [id for id, canceled in rows if canceled])
    return {id for id, _ in rows}


def _note_canceled(transitions: Sequence[Transition], canceled: Sequence[int]) -> None:
    if canceled:
        for transition in transitions:
            if transition.leased.id in canceled:
                transition.outcome = CANCELED


def held_batches(transitions: Iterable[Transition]) -> Plan[frozenset[UUID]]:
    """Which batches of these attempts are held, of those that have a failure budget. Others are not looked at."""
    batches = {t.leased.lease.batch_id for t in transitions if t.leased.lease.has_budget}
    rows = (yield from execute(SQL.held_batches, batches=list(batches))) if batches else []
    return frozenset(batch_id for (batch_id,) in rows)


def _outcomes(transitions: Sequence[Transition]) -> Packed:
    return Texts.of(unless_all_null([None if t.outcome == COMPLETED else t.outcome for t in transitions]))


def lock(leases: Collection[Lease], batch_ids: Iterable[UUID]) -> Plan[None]:
    """Lock the leases and batches of a transaction that settles commands of these leases and sends to these batches."""
    batches = {lease.batch_id for lease in leases if lease.batch_id is not None}.union(batch_ids)
    yield from execute(SQL.lock, leases=[lease.lease_id for lease in leases], batches=list(batches))


def locked(transitions: Sequence[Transition]) -> Plan[frozenset[UUID]]:
    """The leases and batches of these attempts that others hold right now."""
    leases = {t.leased.lease for t in transitions}
    [(held_leases, held_batches)] = yield from execute(
        SQL.locked,
        leases=[lease.lease_id for lease in leases],
        batches=list({lease.batch_id for lease in leases if lease.batch_id is not None}),
    )
    return frozenset(held_leases) | frozenset(held_batches)
