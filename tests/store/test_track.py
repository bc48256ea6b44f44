"""What a tracker asks for costs the same among many commands as among few."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg
import pytest

from busload.domain.execution import Failed
from busload.domain.payload import PayloadLimits
from busload.errors import InvalidOperationError
from busload.store import rescue, track
from busload.store.plan import perform
from busload.testing import TestServer
from tests.store.test_statements import seq_scans

CROWD = """
    INSERT INTO busload.command (id, domain, command_id, command_type, data, task_key)
    SELECT n * 1024, 'jobs', gen_random_uuid(), 'TrackedTask', '{}', 'jobs:' || n FROM generate_series(1, 30000) AS n;
    INSERT INTO busload.queue (lo, hi, domain) SELECT id, id, domain FROM busload.command WHERE id <= 10000 * 1024;
    INSERT INTO busload.scheduled (lo, hi, domain, run_at, reason)
    SELECT id, id, domain, now() + interval '1 hour', 'RETRY' FROM busload.command
     WHERE id > 10000 * 1024 AND id <= 20000 * 1024;
    INSERT INTO busload.execution (command, attempt, outcome, lease_id, worker, started_at, finished_at)
    SELECT id, 1, 'COMPLETED', command_id, 1, now(), now() FROM busload.command WHERE id > 20000 * 1024;
    ANALYZE busload.command; ANALYZE busload.queue; ANALYZE busload.scheduled; ANALYZE busload.execution;
"""


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
def test_to_follow_one_task_reads_no_table_from_end_to_end(either_server: TestServer, mode: str) -> None:
    with either_server.database() as dsn, psycopg.connect(dsn) as conn:
        conn.execute(CROWD)
        conn.execute(f"SET plan_cache_mode = {mode}".encode())
        register = rescue.register(name="w", domains=[], concurrency=1, lease_for=timedelta(minutes=1))
        worker = perform(conn, register)
        execution = claimed(conn, "jobs:5000", worker)
        assert claimed(conn, "jobs:15000", worker).execution is not None
        assert claimed(conn, "jobs:25000", worker).execution is None
        before = seq_scans(conn)
        for name in ("jobs:5001", "jobs:15001", "jobs:25001"):
            claimed(conn, name, worker)
        assert execution.execution is not None
        failed = Failed(ValueError("no"))
        perform(conn, track.end(execution.execution, failed, workers=[worker], limits=PayloadLimits()))
        perform(conn, track.history("jobs:5000"))
        with pytest.raises(InvalidOperationError):
            perform(conn, track.retry("jobs:5000", operator=None))
        perform(conn, track.newest(["jobs:7", "jobs:8"], queue="jobs"))
        perform(conn, track.task_page(after="jobs:7", queue="jobs", limit=10))
        assert {table: n - before[table] for table, n in seq_scans(conn).items() if n > before[table]} == {}
        conn.rollback()


def claimed(conn: psycopg.Connection[Any], task_id: str, worker: int) -> track.Claim:
    row = conn.execute("SELECT command_id FROM busload.command WHERE task_key = %s", [task_id]).fetchone()
    assert row is not None
    return perform(conn, track.claim(task_id, row[0], worker=worker))
