"""A bus in a Django project: the example, and what its processes say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from busload import BatchCommand, SyncCommandBus
from busload.postgres.schema.migrate import MIGRATIONS
from busload.testing import TestServer
from tests.given import Database, until
from tests.integrations.servers import ROOT, running, serving

PROJECT = ROOT / "examples/django_shop"
BILLING = """
from busload import SyncHandlerContext
from busload.integrations.django_app import DjangoCommandBus

bus = DjangoCommandBus()


@bus.handler("billing", "Bill")
def bill(ctx: SyncHandlerContext, customer: int) -> None: ...
"""


def manage(dsn: str, *words: str, script: str = "manage.py") -> subprocess.CompletedProcess[str]:
    """Run a command of the project; a warning is an error."""
    path = os.pathsep.join(map(str, (PROJECT, ROOT, ROOT / "src")))
    own = {**os.environ, "BUSLOAD_DATABASE_URL": dsn, "PYTHONWARNINGS": "error", "PYTHONPATH": path}
    command = [sys.executable, script, *words]
    return subprocess.run(command, cwd=PROJECT, env=own, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def story(server: TestServer) -> Iterator[tuple[str, dict[str, Any]]]:
    """What `django_story.py` has found, from an empty database on, and that database."""
    with server.database(migrated=False) as dsn:
        ran = manage(dsn, script=str(ROOT / "tests/integrations/django_story.py"))
        assert ran.returncode == 0, ran.stderr
        assert "Exception ignored" not in ran.stderr, ran.stderr
        yield dsn, json.loads(ran.stdout)


@pytest.fixture
def told(story: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return story[1]


@pytest.fixture
def migrated(story: tuple[str, dict[str, Any]]) -> str:
    """The database of the story, which has the tables of the project, without commands and orders."""
    with psycopg.connect(story[0], autocommit=True) as conn:
        conn.execute("TRUNCATE shop_order, busload.worker RESTART IDENTITY")
    return story[0]


@pytest.fixture
def database(migrated: str) -> Iterator[Database]:
    with Database(migrated) as database:
        yield database


def test_a_test_redirects_the_bus_of_a_project(told: dict[str, Any]) -> None:
    found = told["redirected"]
    assert found["dsn"] == "host=127.0.0.1 port=1 dbname=elsewhere"
    assert "port 1" in found["sent"]
    assert (found["back"], found["written"]) == (True, False)


def test_migrate_brings_the_schema_up_to_the_release_and_never_deletes_commands(told: dict[str, Any]) -> None:
    newest = f"{MIGRATIONS[-1].version:04}_{MIGRATIONS[-1].name}"
    found = told["schema"]
    assert found["empty"] == [
        "busload.W002 The database 'default' has no schema of busload. Run `manage.py migrate`.",
    ]
    assert found["outdated"] == [
        "busload.W002 The schema of busload in the database 'default' is older than this release: it lacks "
        f"{newest}. Run `manage.py migrate`."
    ]
    assert f"Applied to the schema of busload: {newest}" in found["upgrade"]
    assert "busload:" not in found["again"]
    assert found["now"] == found["kept"] == []
    assert "Unapplying busload.0001_initial... OK" in found["backwards"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("unknown", "E001 BUSLOAD has 'BUSS', which is no setting of busload. Did you mean 'BUS'?"),
        ("no dict", "E001 BUSLOAD must be a dict, found a str."),
        ("wrong kind", "E001 BUSLOAD['WORKER'] must be True or False, found 'yes'."),
        ("no bus", 'E003 BUSLOAD names no bus. Set BUSLOAD = {"BUS": "shop.handlers:bus"} in your settings: the '),
        ("no colon", "E003 BUSLOAD['BUS'] is 'shop.bus', wanted module:attribute, e.g. 'shop.handlers:bus'."),
        ("no module", "E003 BUSLOAD['BUS'] is 'shop.nowhere:bus', and there is no module 'shop.nowhere'. Name the "),
        ("no attribute", "E003 BUSLOAD['BUS'] is 'shop.bus:buss', and 'shop.bus' has no 'buss'. Name the variable "),
        ("no bus of ours", "E003 BUSLOAD['BUS'] is 'shop.models:Order', which is a django.db.models.base.ModelBase, "),
        ("no alias", "E002 BUSLOAD['DATABASE'] is 'other', and DATABASES has only 'default', 'lite', "),
        ("no PostgreSQL", "E002 DATABASES['lite'] is sqlite, and busload needs PostgreSQL. Set its ENGINE to "),
    ],
)
def test_the_system_check_says_what_is_wrong_with_the_settings(told: dict[str, Any], wrong: str, said: str) -> None:
    [found] = told["settings"][wrong]
    assert found.startswith(f"busload.{said}")


def test_the_admin_finds_batches_and_commands(told: dict[str, Any]) -> None:
    found, ids = told["pages"], told["pages"]["ids"]
    assert found["attempts"] == 5
    assert found["fields"] == 3
    names = ("index", "batches", "batch", "commands", "command")
    assert {name: found[name][0] for name in names} == dict.fromkeys(names, 200)
    assert found["batches"][1] == found["batch by name"][1] == found["batch by id"][1] == [ids["batch"]]
    assert found["batch by status"][1] == found["nothing"][1] == []
    assert len(found["commands"][1]) == 5
    assert found["command by id"][1] == [str(ids["sent"])]
    assert len(found["commands of a batch"][1]) == len(found["in troubleshooting"][1]) == 3
    assert len(found["command of a task"][1]) == 1
    assert found["escaped"]


def test_the_admin_changes_nothing(told: dict[str, Any]) -> None:
    assert told["pages"]["refused"] == [403, 403, 403]


def test_probes_answer_for_this_process(told: dict[str, Any]) -> None:
    assert told["pages"]["readyz"] == [200, {"state": "HEALTHY", "reasons": []}]
    assert told["pages"]["healthz"] == [200, 405]


def test_tests_of_a_project_can_run_and_delete_commands(told: dict[str, Any]) -> None:
    assert (told["pages"]["deleted"], told["pages"]["still works"]) == (0, 1)


def test_a_worker_that_cannot_run_says_why_and_ends_with_2(told: dict[str, Any]) -> None:
    assert told["worker in a loop"].startswith("2 An event loop runs in this thread already, and busload_worker needs")
    assert told["worker of no bus"].startswith("2 BUSLOAD['BUS'] is 'shop.nowhere:bus', and there is no module")
    assert told["worker with a wrong option"].startswith("2 Invalid value for '--concurrency'")


def test_whoever_imports_the_bus_has_the_handlers_of_the_project(told: dict[str, Any]) -> None:
    assert told["known"] == ["shop/ShipOrder"]


def test_an_error_of_the_module_with_the_handlers_is_not_taken_for_a_wrong_name(
    migrated: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_handlers.py").write_text("import os\nos.no_such_thing\nbus = None\n")
    (tmp_path / "broken.py").write_text("from settings import *\nBUSLOAD = {'BUS': 'broken_handlers:bus'}\n")
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "broken")
    ran = manage(migrated, "check", "--pythonpath", str(tmp_path))
    assert "AttributeError: module 'os' has no attribute 'no_such_thing'" in ran.stderr


def test_the_command_line_works_on_the_database_of_the_project(told: dict[str, Any]) -> None:
    found = told["command line"]
    assert (found["batch"], found["help"]) == (True, True)
    assert found["worker"] == "2 Run the worker of a Django project by `manage.py busload_worker`."
    assert found["unknown"].startswith("1 There is no command that begins with 0000")
    assert found["usage"].startswith("2 No such command 'batches'.")


def test_the_command_line_checks_data_by_the_handlers_of_the_project(
    migrated: str, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "billing_handlers.py").write_text(BILLING)
    (tmp_path / "billing.py").write_text("from settings import *\nBUSLOAD = {'BUS': 'billing_handlers:bus'}\n")
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "billing")
    words = ["busload", "--pythonpath", str(tmp_path), "send", "billing", "Bill", "--data"]
    refused = manage(migrated, *words, '{"customer":"x"}')
    assert (refused.returncode, "INVALID_DATA at /data/customer" in refused.stderr) == (2, True), refused
    assert database.value("SELECT count(*) FROM busload.command WHERE domain = 'billing'") == 0
    sent = manage(migrated, *words, '{"customer":1}')
    assert sent.returncode == 0, sent.stderr
    database.rows("DELETE FROM busload.command WHERE domain = 'billing'")


def test_lines_to_copy_call_the_command_line_of_the_project(migrated: str, tmp_path: Path) -> None:
    """`busload` alone would look elsewhere for the database. Explanations, errors, the doctor and the dashboard."""
    with SyncCommandBus(migrated) as bus:
        sent = bus.send("nobodys", "Wait")
        line = "python manage.py busload"
        explained = manage(migrated, "busload", "command", "explain", str(sent.command_id)).stdout
        assert f"{line}_worker --domains nobodys" in explained
        doctor = manage(migrated, "busload", "doctor")
        assert f"\n      {line}_worker --domains nobodys\n" in doctor.stdout
        refused = manage(migrated, "busload", "schedule", "show", "x")
        assert f"`{line} schedule ls`" in refused.stderr
        words = ["manage.py", "busload", "dashboard", "--port", "PORT"]
        said = tmp_path / "said.txt"
        with serving(words, migrated, said, cwd=PROJECT, environment={"PYTHONWARNINGS": "default"}) as site:
            pages = [
                site.get(path).text for path in ("/", f"/commands/nobodys/{sent.command_id}", "/workers", "/audit")
            ]
        told = [explained, doctor.stdout, refused.stderr, *pages]
        assert all(line in one for one in told)
        assert [re.findall(r"(?:[`>]|^ *)busload [a-z]+ .*", one, re.M) for one in told] == [[]] * len(told)
        bus.cancel_command("nobodys", sent.command_id, reason="the test is over")


def test_an_async_view_calls_the_bus_in_a_thread(told: dict[str, Any]) -> None:
    assert told["async"] == "PENDING"


WRITTEN = {"send", "send_many", "create_batch", "open_batch", "handle", "buffer", "jobs.create"}
WRITTEN |= {"troubleshooting.retry", "domains.pause", "cancel_batch"}


@pytest.mark.parametrize("written", sorted(WRITTEN))
def test_what_the_bus_writes_in_atomic_belongs_to_the_block(told: dict[str, Any], written: str) -> None:
    assert told["joining"]["whatever"][written] == [True, True, True], "hidden, undone by a rollback, kept by a commit"


def test_a_savepoint_of_a_nested_block_takes_what_was_sent_in_it(told: dict[str, Any]) -> None:
    assert told["joining"]["savepoint"] == ["Kept", "KeptToo"]


def test_only_a_transaction_on_the_database_of_the_bus_is_joined(told: dict[str, Any]) -> None:
    assert told["joining"]["other alias"] == ["Sent"]
    assert told["joining"]["outside"] == [["Sent"], False], "and no connection of Django's is made"


def test_the_bus_joins_the_transaction_of_a_connection_without_autocommit(told: dict[str, Any]) -> None:
    assert told["joining"]["without autocommit"] == ["Kept"]


def test_what_is_sent_independently_commits_by_itself(told: dict[str, Any]) -> None:
    assert told["joining"]["independent"] == ["Sent"]


def test_an_async_view_joins_the_block_of_its_thread(told: dict[str, Any]) -> None:
    assert told["joining"]["async"] == ["Sent", "SentInTheLoop"]


def test_a_handler_in_a_thread_joins_its_block_by_the_bus_and_by_its_context(told: dict[str, Any]) -> None:
    assert told["joining"]["handler"] == ["Done", "SendAndFail"]


def test_a_block_reads_what_it_has_sent_and_does_not_wait_for_it(told: dict[str, Any]) -> None:
    assert told["joining"]["reads"] == [True, True, True]
    assert [name for name, same in told["joining"]["same"].items() if not same] == [], "as outside of the block"
    assert told["joining"]["waits"] == ["CommandNotFoundError", "BatchNotFoundError"]


def test_the_testing_kit_works_in_the_block_of_a_test(told: dict[str, Any]) -> None:
    assert (told["joining"]["drained"], told["joining"]["after the test"]) == (2, [])


def test_what_is_done_in_many_transactions_is_done_so_in_a_block_too(told: dict[str, Any]) -> None:
    assert told["joining"]["pruned"] == []
    assert told["joining with a broker"]["recovered"] == 0


def test_a_failed_block_is_refused(told: dict[str, Any]) -> None:
    assert told["joining"]["failed block"].startswith("The transaction of Django's connection 'default' has failed.")
    assert told["joining"]["after a failed block"] == []


def test_with_a_broker_the_relay_publishes_what_a_block_has_sent_after_the_commit(told: dict[str, Any]) -> None:
    found = told["joining with a broker"]
    assert found["strategies"] == ["relay", "two_phase"]
    assert [found[when] for when in ("before the commit", "after the commit")] == [0, 2]
    assert "the batch joins your transaction, and nothing is published before your commit" in found["refused"]


def test_the_shop_ships_what_was_ordered_by_a_worker_inside(migrated: str, database: Database, tmp_path: Path) -> None:
    words = ["manage.py", "runserver", "--noreload", "127.0.0.1:PORT"]
    with serving(words, migrated, tmp_path / "said.txt", cwd=PROJECT, environment={"SHOP_WORKER": "1"}) as shop:
        accepted = shop.post("/orders", json={"item": "kettle", "amount": 1})
        assert accepted.status_code == 202
        order = f"/orders/{accepted.json()['command_id']}"
        until(lambda: shop.get(order).json()["status"] == "COMPLETED")
        assert database.rows("SELECT shipped FROM shop_order") == [(True,)]
        written = "SELECT (SELECT count(*) FROM shop_order), (SELECT count(*) FROM busload.command)"
        before = database.rows(written)
        assert shop.post("/orders", json={"item": "kettle", "amount": 101}).status_code == 409
        assert database.rows(written) == before, "the command was rolled back with its order"
        assert shop.get("/readyz").status_code == 200


def test_worker_processes_know_the_project(migrated: str, database: Database, tmp_path: Path) -> None:
    database.rows("INSERT INTO shop_order (item, amount, shipped) VALUES ('kettle', 1, false)")
    commands = [BatchCommand("ShipOrder", data={"order": 1}) for _ in range(20)]
    words = ["manage.py", "busload_worker", "--processes", "2", "--concurrency", "5", "--settings", "settings"]
    said = tmp_path / "said.txt"
    with SyncCommandBus(migrated) as bus, running(words, migrated, said, cwd=PROJECT) as process:
        batch = bus.wait_batch("shop", bus.create_batch("shop", commands), timeout=60)
        assert batch.completed_count == 20, said.read_text()
        until(lambda: database.value("SELECT count(*) FROM busload.worker WHERE stopped_at IS NULL") == 2)
    assert process.returncode == 0
    assert database.value("SELECT count(*) FROM busload.worker WHERE stopped_at IS NULL") == 0
    assert database.rows("SELECT shipped FROM shop_order") == [(True,)]


@pytest.fixture
def of_test_run(server: TestServer) -> Iterator[str]:
    with server.database(migrated=False) as dsn:
        yield dsn


def test_the_tests_of_the_shop_pass_on_a_test_database(of_test_run: str) -> None:
    ran = manage(of_test_run, "test", "--noinput")
    assert ran.returncode == 0, ran.stderr
    assert "Ran 4 tests" in ran.stderr
    with Database(of_test_run) as database:
        assert database.value("SELECT to_regnamespace('busload')") is None, "nothing was done in the database itself"


def test_the_tests_with_pytest_pass_and_leave_no_command_and_no_connection(of_test_run: str) -> None:
    ran = manage(
        of_test_run, "-q", "-p", "no:asyncio", "-p", "no:randomly", "-p", "no:cacheprovider", script="-mpytest"
    )
    assert ran.returncode == 0, ran.stdout
    assert "4 passed" in ran.stdout
    assert "warning" not in ran.stdout, "a connection that is left keeps the test database from being dropped"
