"""What a tracker asks for costs the same among many commands as among few."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import psycopg
import pytest

from busload import Dedup, Execution, PermanentCommandError
from busload.commands import rescue
from busload.commands.execution import Failed
from busload.errors import InvalidOperationError
from busload.settings import InputLimits, PayloadLimits
from busload.sync.plan import perform
from busload.tasks import compare, track
from busload.testing import TestServer
from tests.given import Database
from tests.postgres.test_statements import seq_scans

T = TypeVar("T")

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
        perform(conn, compare.newest(["jobs:7", "jobs:8"], queues=["jobs"]))
        perform(conn, compare.task_page(after="jobs:7", queues=["jobs"], limit=10))
        assert {table: n - before[table] for table, n in seq_scans(conn).items() if n > before[table]} == {}
        conn.rollback()


RUNS = """
    INSERT INTO busload.command (id, domain, command_id, command_type, data, task_key)
    SELECT nextval('busload.load_number') * 1024, 'cron', gen_random_uuid(), 'TrackedTask', '{}', 'cron:sync'
      FROM generate_series(1, 30000);
    INSERT INTO busload.execution (command, attempt, outcome, lease_id, worker, started_at, finished_at)
    SELECT id, 1, 'COMPLETED', command_id, 1, now(), now() FROM busload.command;
    INSERT INTO busload.troubleshooting (command, domain, command_type, priority, attempt, forgiven, reason)
    SELECT n * 3000 * 1024 + 1, 'other', 'Debit', 0, 1, 0, 'PERMANENT' FROM generate_series(1, 9) AS n;
    ANALYZE busload.command; ANALYZE busload.execution;
"""


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
def test_how_often_a_task_has_run_costs_nothing(either_server: TestServer, mode: str) -> None:
    """Of 30,000 finished runs of a task a call reads a few rows, and those of the newest."""
    with either_server.database() as dsn, psycopg.connect(dsn) as conn:
        conn.execute(RUNS)
        conn.execute(f"SET plan_cache_mode = {mode}; SET enable_seqscan = off".encode())
        worker = perform(conn, rescue.register(name="w", domains=[], concurrency=0, lease_for=timedelta(minutes=1)))
        existing = Dedup(on_conflict="return_existing")

        def enqueue() -> Execution:
            queued = perform(conn, track.new_task(InputLimits(), "cron:sync", "cron", dedup=existing).plan)
            assert queued is not None
            return queued

        queued, read = reads(conn, enqueue)
        assert read < 50
        again, read = reads(conn, enqueue)
        assert again == queued and read < 50
        execution_id = queued.command_id  # as it was announced
        taken, read = reads(conn, lambda: perform(conn, track.claim("cron:sync", execution_id, worker=worker)))
        assert taken.execution is not None and read < 50
        none, read = reads(conn, lambda: perform(conn, track.claim("cron:sync", execution_id, worker=worker)))
        assert none == track.Claim() and read < 50
        failed = Failed(PermanentCommandError("no"))
        ended = track.end(taken.execution, failed, workers=[worker], limits=PayloadLimits())
        perform(conn, ended)
        retried, read = reads(conn, lambda: perform(conn, track.retry("cron:sync", operator=None)))
        assert retried.command_id == queued.command_id and read < 50

        def nothing_to_retry() -> None:
            with pytest.raises(InvalidOperationError, match="newest execution is queued"):
                perform(conn, track.retry("cron:sync", operator=None))

        _, read = reads(conn, nothing_to_retry)
        assert read < 100
        conn.rollback()


def test_an_ordinary_worker_is_about_to_give_a_task_back(database: Database) -> None:
    """Not so another tracker, which takes tasks by name: it runs what it has."""
    worker, tracker, other = (
        database.perform(rescue.register(name="w", domains=[], concurrency=n, lease_for=timedelta(minutes=1)))
        for n in (10, 0, 0)
    )
    for name, holder, expected in (("1", worker, track.Claim(passing=True)), ("2", other, track.Claim())):
        queued = database.perform(track.new_task(InputLimits(), name, "jobs").plan)
        assert queued is not None
        assert database.perform(track.claim(name, queued.execution_id, worker=holder)).execution is not None
        assert database.perform(track.claim(name, queued.execution_id, worker=tracker)) == expected


def reads(conn: psycopg.Connection[Any], call: Callable[[], T]) -> tuple[T, int]:
    """What it returns, and how many rows it has read from our tables."""
    query = (
        "SELECT sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0))::integer FROM pg_stat_xact_user_tables"
        " WHERE schemaname = 'busload'"
    )
    before = conn.execute(query).fetchone()
    answer = call()
    after = conn.execute(query).fetchone()
    assert before is not None and after is not None
    return answer, after[0] - before[0]


def claimed(conn: psycopg.Connection[Any], task_id: str, worker: int) -> track.Claim:
    row = conn.execute("SELECT command_id FROM busload.command WHERE task_key = %s", [task_id]).fetchone()
    assert row is not None
    return perform(conn, track.claim(task_id, row[0], worker=worker))
