"""Tasks of other queues become commands, each once."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest
import redis
from celery import Celery as CeleryApp  # type: ignore[import-untyped,unused-ignore]
from click.testing import CliRunner

from busload import SyncCommandBus
from busload.cli import main
from busload.errors import InvalidOperationError
from busload.imports import take_over
from busload.imports.celery import Celery
from busload.imports.procrastinate import Procrastinate
from busload.testing import TestServer, assert_sent, drain
from tests.given import Database
from tests.imports.installed import install_procrastinate

TOMORROW = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)


@pytest.fixture
def jobs(dsn: str) -> str:
    return installed(dsn)


def installed(dsn: str) -> str:
    with psycopg.connect(dsn, autocommit=True) as conn:
        install_procrastinate(conn)
        conn.execute(
            "INSERT INTO procrastinate_jobs (queue_name, task_name, priority, lock, queueing_lock, args, scheduled_at,"
            " status) VALUES ('mail', 'welcome', 5, 'user:7', 'welcome:7', '{\"user\": 7}', NULL, 'todo'),"
            " ('mail', 'later', 0, NULL, NULL, '{}', %s, 'todo'), ('mail', 'runs', 0, NULL, NULL, '{}', NULL, 'doing'),"
            " ('other', 'count', 0, NULL, NULL, '{\"n\": 1}', NULL, 'todo')",
            [TOMORROW],
        )
    return dsn


def statuses(dsn: str) -> list[Any]:
    with psycopg.connect(dsn) as conn:
        return conn.execute("SELECT task_name, status::text FROM procrastinate_jobs ORDER BY id").fetchall()


def test_jobs_of_procrastinate_are_imported_in_one_transaction(sync_bus: SyncCommandBus, jobs: str) -> None:
    before = statuses(jobs)
    dry = take_over(sync_bus, Procrastinate(jobs, joins=True), dry_run=True)
    assert (dry.found, dry.imported, statuses(jobs)) == (3, 3, before)
    assert sync_bus.list_commands().commands == ()

    report = take_over(sync_bus, Procrastinate(jobs, joins=True, queues=["mail"]))

    assert (report.found, report.imported, report.skipped) == (2, 2, [])
    assert report.by_name == {"mail/welcome": 1, "mail/later": 1}
    options: Any = {"task_key": "welcome:7", "priority": 5, "headers": {"procrastinate-lock": "user:7"}}
    assert_sent(sync_bus, "mail", "welcome", {"user": 7}, times=1, **options)
    [later] = assert_sent(sync_bus, "mail", "later", {}, times=1)
    assert (later.status, later.run_at) == ("SCHEDULED", TOMORROW)
    assert [status for _, status in statuses(jobs)] == ["cancelled", "cancelled", "doing", "todo"]
    assert take_over(sync_bus, Procrastinate(jobs, joins=True, queues=["mail"])).found == 0


def test_an_import_that_died_is_resumed_without_sending_twice(
    sync_bus: SyncCommandBus, server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another database: the commands were committed, and then the connection to the source broke."""
    with server.database(migrated=False) as there:
        installed(there)
        with psycopg.connect(there, autocommit=True) as conn:
            conn.execute("CREATE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''died''; END'")
            conn.execute("CREATE TRIGGER die BEFORE UPDATE ON procrastinate_jobs EXECUTE FUNCTION die()")
            with pytest.raises(psycopg.errors.RaiseException):
                take_over(sync_bus, Procrastinate(there, joins=False), domain="post")
            conn.execute("DROP TRIGGER die ON procrastinate_jobs")
        assert [status for _, status in statuses(there)] == ["todo", "todo", "doing", "todo"]
        assert_sent(sync_bus, "post", "welcome", times=1)

        report = take_over(sync_bus, Procrastinate(there, joins=False), domain="post")

        assert (report.found, report.imported, report.already_there) == (3, 0, 3)
        assert_sent(sync_bus, "post", "welcome", times=1)
        assert [status for _, status in statuses(there)] == ["cancelled", "cancelled", "doing", "cancelled"]


def test_jobs_of_the_same_number_in_two_databases_are_two_commands(
    sync_bus: SyncCommandBus, jobs: str, server: TestServer
) -> None:
    with server.database(migrated=False) as there:
        installed(there)
        assert take_over(sync_bus, Procrastinate(jobs, joins=True), domain="post").imported == 3
        report = take_over(sync_bus, Procrastinate(there, joins=False), domain="post")
    assert (report.imported, report.already_there) == (3, 0)
    assert_sent(sync_bus, "post", "welcome", times=2)


def test_a_job_that_waits_for_ever_stays_and_others_are_imported(sync_bus: SyncCommandBus, jobs: str) -> None:
    """Python reads no such time; one that has passed for ever runs at once."""
    with psycopg.connect(jobs, autocommit=True) as conn:
        conn.execute("UPDATE procrastinate_jobs SET scheduled_at = '12000-01-01' WHERE task_name = 'later'")
        conn.execute("UPDATE procrastinate_jobs SET scheduled_at = '-infinity' WHERE task_name = 'count'")
    for dry_run in (True, False):
        report = take_over(sync_bus, Procrastinate(jobs, joins=True), domain="mail", dry_run=dry_run)
        assert (report.found, report.imported) == (3, 2)
        assert "It is scheduled for 12000-01-01" in report.skipped[0].reason
    [count] = assert_sent(sync_bus, "mail", "count", {"n": 1}, times=1)
    assert (count.status, count.run_at) == ("PENDING", None)
    assert [status for _, status in statuses(jobs)] == ["cancelled", "todo", "doing", "cancelled"]


def test_tables_in_another_schema_are_imported_by_a_search_path(
    sync_bus: SyncCommandBus, server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of an import that found no table says how."""
    monkeypatch.setenv("BUSLOAD_DATABASE_URL", sync_bus.dsn)
    with server.database(migrated=False) as there:
        with psycopg.connect(there, autocommit=True) as conn:
            conn.execute("CREATE SCHEMA jobs; ALTER DATABASE " + conn.info.dbname + " SET search_path = jobs")
        installed(there)
        with psycopg.connect(there, autocommit=True) as conn:
            conn.execute("ALTER DATABASE " + conn.info.dbname + " RESET search_path")
        command = ["import", "procrastinate", "--source"]
        refused = CliRunner().invoke(main, [*command, there])
        assert (refused.exit_code, "options=-csearch_path%3DSCHEMA" in refused.output) == (1, True)
        found = CliRunner().invoke(main, [*command, f"{there}&options=-csearch_path%3Djobs"])
        assert (found.exit_code, found.output.splitlines()[0]) == (0, "Imported 3 of 3 tasks.")


def test_a_database_without_procrastinate_is_told(sync_bus: SyncCommandBus, dsn: str) -> None:
    with pytest.raises(InvalidOperationError, match="There is no table procrastinate_jobs in this database"):
        take_over(sync_bus, Procrastinate(dsn, joins=True))


def test_tasks_of_celery_are_imported_and_others_stay(sync_bus: SyncCommandBus, redis_url: str) -> None:
    """Sent by Celery itself; one has a chain, one is a pickle, one is no message at all."""
    app = CeleryApp("shop", broker=redis_url)
    client = redis.Redis.from_url(redis_url)
    queue = "kit-import"
    client.delete(queue, f"{queue}\x06\x166")
    sent = app.send_task("shop.mail", args=[7], kwargs={"kind": "welcome"}, queue=queue, eta=TOMORROW)
    app.send_task("shop.low", args=[1], queue=queue, priority=6)
    chained = app.signature("shop.a", queue=queue) | app.signature("shop.b", queue=queue)
    chained.apply_async()
    app.send_task("shop.pickled", args=[{1}], queue=queue, serializer="pickle")
    client.lpush(queue, b"nonsense")
    app.close()
    try:
        source = Celery(redis_url, [queue])
        dry = take_over(sync_bus, source, dry_run=True)
        assert (dry.found, dry.imported, len(dry.skipped), client.llen(queue)) == (5, 2, 3, 4)

        report = take_over(sync_bus, source)

        assert (report.found, report.imported, report.taken_meanwhile) == (5, 2, 0)
        assert [one.name for one in report.skipped] == ["shop.a", "shop.pickled", "?"]
        assert "It has chain, which would be lost" in report.skipped[0].reason
        assert "only JSON is read" in report.skipped[1].reason
        [mail] = assert_sent(sync_bus, queue, "shop.mail", {"args": [7], "kwargs": {"kind": "welcome"}}, times=1)
        assert (str(mail.command_id), mail.run_at) == (sent.id, TOMORROW)
        assert_sent(sync_bus, queue, "shop.low", priority=-6, times=1)
        assert (client.llen(queue), client.llen(f"{queue}\x06\x166")) == (3, 0)

        linked = take_over(sync_bus, Celery(redis_url, [queue], with_links=True))
        assert (linked.imported, client.llen(queue)) == (1, 2)
        source.close()
    finally:
        client.delete(queue)
        client.close()


def test_a_message_that_came_to_harm_stays_and_others_are_imported(sync_bus: SyncCommandBus, redis_url: str) -> None:
    """A dry run says the same of each as the import, also of what could be read and cannot be a command"""
    client = redis.Redis.from_url(redis_url)
    queue = "kit-harmed"
    app = CeleryApp("shop", broker=redis_url)
    client.delete(queue)
    app.send_task("shop.fine", queue=queue)
    app.close()
    sent: Any = client.lindex(queue, 0)
    fine = json.loads(sent)
    harmed: dict[str, tuple[Any, str]] = {
        "shop.eta": ({"headers": {"eta": "tomorrow"}}, "Invalid isoformat string: 'tomorrow'"),
        "shop.expires": ({"headers": {"expires": 5}}, "Its message cannot be read"),
        "shop.priority": ({"properties": {"priority": "high"}}, "Its message cannot be read"),
        "shop.body": ({"body": "%%%"}, "Its message cannot be read"),
        "shop.short": ({"body": "W10="}, "Its message cannot be read"),
        "shop.late": ({"headers": {"expires": "2020-01-01T00:00:00"}}, "/expires_at: found 2020-01-01"),
        "no name": ({}, "INVALID_NAME at"),
    }
    for name, (change, _) in harmed.items():
        ids = {"id": str(uuid4()), "task": name}
        message = {**fine, **change, "headers": {**fine["headers"], **ids, **change.get("headers", {})}}
        message["properties"] = {**fine["properties"], **change.get("properties", {})}
        client.rpush(queue, json.dumps(message))
    try:
        source = Celery(redis_url, [queue])
        for dry_run in (True, False):
            report = take_over(sync_bus, source, dry_run=dry_run)
            assert (report.found, report.imported) == (8, 1)
            said = {one.name: one.reason for one in report.skipped}
            assert [name for name, (_, reason) in harmed.items() if reason not in said[name]] == []
        assert client.llen(queue) == 7
        assert_sent(sync_bus, queue, "shop.fine", times=1)
        source.close()
    finally:
        client.delete(queue)
        client.close()


def test_at_a_shell(jobs: str, sync_bus: SyncCommandBus, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUSLOAD_DATABASE_URL", jobs)
    dry = CliRunner().invoke(main, ["import", "procrastinate", "--dry-run"])
    assert (dry.exit_code, dry.output.splitlines()[:2]) == (0, ["Would import 3 of 3 tasks.", "  mail/welcome: 1"])
    ran = CliRunner().invoke(main, ["import", "procrastinate", "--queue", "other", "--json"])
    assert json.loads(ran.output)["by_name"] == {"other/count": 1}
    sync_bus.handler("other", "count")(lambda command, ctx: command.data["n"])
    assert drain(sync_bus) == 1
    database.check_invariants()


def test_one_task_that_stays_is_one(dsn: str, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUSLOAD_DATABASE_URL", dsn)
    with redis.Redis.from_url(redis_url) as client:
        client.delete("kit-one")
        client.lpush("kit-one", "no message")
        ran = CliRunner().invoke(main, ["import", "celery", redis_url, "--queue", "kit-one"])
        client.delete("kit-one")
    assert "1 task stays where it is:" in ran.output
