"""Jobs of PgQueuer become commands, each once. PgQueuer itself has made its tables and enqueued them."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from pgqueuer.adapters.drivers.psycopg import SyncPsycopgDriver
from pgqueuer.adapters.persistence.queries import SyncQueries

from busload import SyncCommandBus
from busload.cli import main
from busload.errors import InvalidOperationError
from busload.imports import take_over
from busload.imports.pgqueuer import PgQueuer
from busload.testing import TestServer, assert_sent, drain
from tests.given import Database
from tests.imports.installed import install_pgqueuer

DAY = timedelta(days=1)


@pytest.fixture
def jobs(dsn: str) -> str:
    return installed(dsn)


def installed(dsn: str) -> str:
    with psycopg.connect(dsn, autocommit=True) as conn:
        install_pgqueuer(conn)
        queue = SyncQueries(SyncPsycopgDriver(conn))
        queue.enqueue("welcome", b'{"user": 7}', priority=5, dedupe_key="welcome:7", headers={"tenant": "acme"})
        queue.enqueue("later", None, execute_after=DAY)
        queue.enqueue("raw", b"\x00\xff")
        queue.enqueue("runs", None)
        conn.execute("UPDATE pgqueuer SET status = 'picked' WHERE entrypoint = 'runs'")
    return dsn


def left(dsn: str) -> list[Any]:
    with psycopg.connect(dsn) as conn:
        return [name for (name,) in conn.execute("SELECT entrypoint FROM pgqueuer ORDER BY id").fetchall()]


def test_jobs_of_pgqueuer_are_imported_in_one_transaction(sync_bus: SyncCommandBus, jobs: str) -> None:
    dry = take_over(sync_bus, PgQueuer(jobs, joins=True), dry_run=True)
    assert (dry.found, dry.imported, left(jobs)) == (3, 2, ["welcome", "later", "raw", "runs"])
    assert sync_bus.list_commands().commands == ()

    report = take_over(sync_bus, PgQueuer(jobs, joins=True), domain="mail")

    assert (report.found, report.imported, report.taken_meanwhile) == (3, 2, 0)
    [skipped] = report.skipped
    assert (skipped.name, "--base64 imports it" in skipped.reason) == ("raw", True)
    options: Any = {"task_key": "welcome:7", "priority": 5, "headers": {"tenant": "acme"}}
    [welcome] = assert_sent(sync_bus, "mail", "welcome", {"user": 7}, times=1, **options)
    [later] = assert_sent(sync_bus, "mail", "later", None, times=1)
    assert (welcome.status, welcome.run_at, later.status) == ("PENDING", None, "SCHEDULED")
    assert later.run_at is not None
    assert abs(later.run_at - datetime.now(UTC) - DAY) < timedelta(minutes=5)
    assert left(jobs) == ["raw", "runs"]
    with psycopg.connect(jobs) as conn:
        log = "SELECT entrypoint FROM pgqueuer_log WHERE status = 'canceled' ORDER BY job_id"
        assert conn.execute(log).fetchall() == [("welcome",), ("later",)]

    again = take_over(sync_bus, PgQueuer(jobs, joins=True, in_base64=True))
    assert (again.found, again.imported, left(jobs)) == (1, 1, ["runs"])
    assert_sent(sync_bus, "pgqueuer", "raw", {"base64": "AP8="}, times=1)


def test_an_import_that_died_is_resumed(sync_bus: SyncCommandBus, server: TestServer) -> None:
    """From another database: the commands were committed, and then the connection to the source broke."""
    with server.database(migrated=False) as there:
        installed(there)
        with psycopg.connect(there, autocommit=True) as conn:
            conn.execute("CREATE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''died''; END'")
            conn.execute("CREATE TRIGGER die BEFORE DELETE ON pgqueuer EXECUTE FUNCTION die()")
            with pytest.raises(psycopg.errors.RaiseException):
                take_over(sync_bus, PgQueuer(there, joins=False), domain="mail")
            conn.execute("DROP TRIGGER die ON pgqueuer")
        assert left(there) == ["welcome", "later", "raw", "runs"]

        report = take_over(sync_bus, PgQueuer(there, joins=False), domain="mail")

        assert (report.imported, report.already_there, left(there)) == (0, 2, ["raw", "runs"])
        assert_sent(sync_bus, "mail", "welcome", times=1)


def test_jobs_of_the_same_number_in_two_databases_are_two_commands(
    sync_bus: SyncCommandBus, jobs: str, server: TestServer
) -> None:
    with server.database(migrated=False) as there:
        first = take_over(sync_bus, PgQueuer(jobs, joins=True, entrypoints=["later"]))
        second = take_over(sync_bus, PgQueuer(installed(there), joins=False, entrypoints=["later"]))
    assert (first.imported, second.imported, second.already_there) == (1, 1, 0)
    assert_sent(sync_bus, "pgqueuer", "later", times=2)


def test_a_job_that_waits_for_ever_stays_and_others_are_imported(sync_bus: SyncCommandBus, jobs: str) -> None:
    """Python reads no such time; one that has passed for ever runs at once."""
    with psycopg.connect(jobs, autocommit=True) as conn:
        conn.execute("UPDATE pgqueuer SET execute_after = 'infinity' WHERE entrypoint = 'later'")
        conn.execute("UPDATE pgqueuer SET execute_after = '-infinity' WHERE entrypoint = 'welcome'")
        for dry_run in (True, False):
            report = take_over(sync_bus, PgQueuer(jobs, joins=True, entrypoints=["welcome", "later"]), dry_run=dry_run)
            assert (report.found, report.imported) == (2, 1)
            assert "It is scheduled for infinity" in report.skipped[0].reason
    [welcome] = assert_sent(sync_bus, "pgqueuer", "welcome", times=1)
    assert (welcome.status, left(jobs)) == ("PENDING", ["later", "raw", "runs"])


def test_base64_is_offered_for_what_it_would_import(sync_bus: SyncCommandBus, jobs: str) -> None:
    """A payload that is too large is larger still in base64."""
    with psycopg.connect(jobs, autocommit=True) as conn:
        conn.execute("UPDATE pgqueuer SET payload = convert_to('\"' || repeat('x', 2000000) || '\"', 'UTF8')")
        conn.execute("UPDATE pgqueuer SET payload = %s WHERE entrypoint = 'raw'", [b'"\\u0000"'])
    report = take_over(sync_bus, PgQueuer(jobs, joins=True), dry_run=True)
    assert {one.name: "--base64" in one.reason for one in report.skipped} == {
        "welcome": False,
        "later": False,
        "raw": True,
    }


def test_a_database_without_pgqueuer_is_told(sync_bus: SyncCommandBus, dsn: str) -> None:
    with pytest.raises(InvalidOperationError, match="There is no table pgqueuer in this database"):
        take_over(sync_bus, PgQueuer(dsn, joins=True))


def test_at_a_shell(jobs: str, sync_bus: SyncCommandBus, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUSLOAD_DATABASE_URL", jobs)
    dry = CliRunner().invoke(main, ["import", "pgqueuer", jobs, "--dry-run"])
    assert (dry.exit_code, dry.output.splitlines()[0]) == (0, "Would import 2 of 3 tasks.")
    command = ["import", "pgqueuer", "--entrypoint", "welcome", "--entrypoint", "raw", "--base64", "--domain", "mail"]
    ran = CliRunner().invoke(main, [*command, "--json"])
    assert json.loads(ran.output)["by_name"] == {"pgqueuer/welcome": 1, "pgqueuer/raw": 1}
    for name in ("welcome", "raw"):
        sync_bus.handler("mail", name)(lambda command, ctx: None)
    assert drain(sync_bus) == 2
    database.check_invariants()
