"""Made from busload.batches.cancel by scripts/generate_sync.py. Change the source instead."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from uuid import UUID

import psycopg

from busload.batches.cancel import (
    BEGINNING,
    HOLD,
    Begun,
    Canceled,
    _partly_canceled,
    _slices,
    at_once,
    page,
)
from busload.errors import BusloadError
from busload.postgres.callers_connection import AnySyncConnection
from busload.postgres.plan import Plan
from busload.postgres.write import Write, patient
from busload.sync.database import Database


def cancel(
    database: Database,
    begin: Callable[..., Plan[Begun]],
    conn: AnySyncConnection | None,
    *,
    reason: str,
    operator: str | None,
    batch_id: UUID | None = None,
    job_id: UUID | None = None,
) -> Canceled:
    """Carry out a cancel, and return how much was canceled.

    Each page has a transaction of its own; with `conn`, all pages are in the caller's.
    If a page fails, `PartlyDoneError` says how many were canceled before. Once the first transaction has committed,
    nobody sends into the batch, so the others need not wait for a lock.
    """
    about = {"reason": reason, "operator": operator}
    if (conn := database.callers_connection(conn)) is not None:
        whole = at_once(begin, reason=reason, operator=operator)
        return database.write(Write(whole, batch_id, job_id=job_id), conn)
    begun = database.write(patient(partial(begin, **about, in_pages=True), batch_id, job_id=job_id))
    commands = 0
    try:
        for some in _slices(begun.batch_ids):
            after: int | None = BEGINNING
            while after is not None:
                plan = page(some, after, **about, hold=HOLD)
                more, after = database.write(Write(plan, batch_id, job_id=job_id, goes_on=True))
                commands += more
    except (BusloadError, psycopg.Error) as error:
        raise _partly_canceled(commands, error, batch_id, job_id) from error
    return Canceled(begun.done, commands)
