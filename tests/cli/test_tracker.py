"""`busload tracker` at a shell."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from busload import Execution, PermanentCommandError, SyncCommandBus, SyncTaskTracker
from busload.tasks import phase
from busload.testing import TestServer
from tests.cli.conftest import Busload
from tests.given import Database

QUEUE = "partner_tasks"
OLD = ("tracker", "compare", "--table", "legacy.task_tracker")
STATUSES = ("queued", "processing", "completed", "failed", "dlq")


@pytest.fixture
def tracker(sync_bus: SyncCommandBus, database: Database) -> Iterator[SyncTaskTracker]:
    database.rows("CREATE SCHEMA legacy")
    database.rows(
        "CREATE TABLE legacy.task_tracker (task_id text, execution_id uuid, queue text, status text,"
        " created_at timestamptz DEFAULT clock_timestamp())"
    )
    with SyncTaskTracker(sync_bus) as tracker:
        yield tracker


def enqueued(tracker: SyncTaskTracker, name: str, queue: str = QUEUE) -> Execution:
    execution = tracker.enqueue(tracker.task_id(queue, name), queue=queue)
    assert execution is not None
    return execution


def brought_to(tracker: SyncTaskTracker, name: str) -> Execution:
    """A task in the state it is named after."""
    queued = enqueued(tracker, name)
    if name == "queued":
        return queued
    running = tracker.claim(str(queued.task_key), str(queued.execution_id))
    assert running is not None
    if name == "completed":
        return tracker.complete(running)
    if name == "processing":
        return running
    return tracker.fail(running, PermanentCommandError("no") if name == "dlq" else "timeout")


def wrote_both(database: Database, execution: Execution, status: str | None = None) -> None:
    """The old tracker's row for the same thing."""
    database.rows(
        "INSERT INTO legacy.task_tracker (task_id, execution_id, queue, status) VALUES (%s, %s, %s, %s)",
        execution.task_key,
        execution.execution_id,
        f"dev_{execution.queue}",
        status or str(execution.status),
    )


def disagreements(busload: Busload, *arguments: str) -> list[tuple[str, str, str | None, str | None]]:
    result = busload(*OLD, *arguments, "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == bool(found), result.output
    return [(one["task_id"], one["problem"], one["here"], one["there"]) for one in found]


def test_two_trackers_that_agree(busload: Busload, tracker: SyncTaskTracker, database: Database) -> None:
    """In every state that a task can have in both."""
    assert disagreements(busload) == []
    for status in STATUSES:
        wrote_both(database, brought_to(tracker, status))
    assert disagreements(busload) == []
    result = busload(*OLD)
    assert (result.exit_code, result.stderr) == (0, "5 tasks, no disagreement.\n")


def test_what_they_disagree_about_is_listed(busload: Busload, tracker: SyncTaskTracker, database: Database) -> None:
    """Four kinds, and exit code 1."""
    missing_there = brought_to(tracker, "queued")
    differs = brought_to(tracker, "processing")
    wrote_both(database, differs, "queued")
    other = brought_to(tracker, "completed")
    stranger = uuid4()
    database.rows(
        "INSERT INTO legacy.task_tracker (task_id, execution_id, queue, status) VALUES"
        " (%s, %s, 'partner_tasks', 'completed'), ('partner_tasks:gone', %s, 'partner_tasks', 'failed')",
        other.task_key,
        stranger,
        stranger,
    )
    assert disagreements(busload) == [
        ("partner_tasks:completed", "execution differs", str(other.execution_id), str(stranger)),
        ("partner_tasks:gone", "missing here", None, "failed"),
        ("partner_tasks:processing", "status differs", "processing", "queued"),
        ("partner_tasks:queued", "missing there", "queued", None),
    ]
    said = busload(*OLD).stdout.splitlines()
    assert said[0].split() == ["TASK", "PROBLEM", "HERE", "THERE"] and len(said) == 5
    assert missing_there.task_key is not None and missing_there.task_key in said[4]
    assert len(disagreements(busload, "--limit", "2")) == 2


def test_the_newest_execution_counts(busload: Busload, tracker: SyncTaskTracker, database: Database) -> None:
    """The old tracker makes a row when a task comes out of the dlq, and keeps it for automatic retries."""
    dead = brought_to(tracker, "dlq")
    wrote_both(database, dead)
    again = tracker.retry(str(dead.task_key))
    assert [problem for _, problem, _, _ in disagreements(busload)] == ["status differs"]
    wrote_both(database, again)
    assert disagreements(busload) == []
    running = tracker.claim(str(again.task_key), str(again.execution_id))
    assert running is not None
    tracker.fail(running, "timeout")
    database.rows("UPDATE legacy.task_tracker SET status = 'failed' WHERE execution_id = %s", again.execution_id)
    assert disagreements(busload) == []
    running = tracker.claim(str(again.task_key), str(again.execution_id))
    assert running is not None and running.execution_id != again.execution_id
    database.rows("UPDATE legacy.task_tracker SET status = 'processing' WHERE execution_id = %s", again.execution_id)
    assert disagreements(busload) == []
    database.rows("UPDATE legacy.task_tracker SET execution_id = %s WHERE status = 'dlq'", uuid4())
    assert disagreements(busload) == []


def test_the_newest_round_counts(busload: Busload, tracker: SyncTaskTracker, database: Database) -> None:
    """The same task, once more."""
    wrote_both(database, brought_to(tracker, "completed"))
    database.rows("UPDATE busload.task SET held_until = now() - interval '1 s'")
    again = enqueued(tracker, "completed")
    assert [(here, there) for _, _, here, there in disagreements(busload)] == [("queued", "completed")]
    wrote_both(database, again)
    assert disagreements(busload) == []


def test_one_queue_can_be_compared_alone(busload: Busload, tracker: SyncTaskTracker, database: Database) -> None:
    """Queues move over one by one; the old names of a queue have the prefixes of their environments."""
    wrote_both(database, enqueued(tracker, "both"))
    enqueued(tracker, "new", "jobs")
    database.rows(
        "INSERT INTO legacy.task_tracker VALUES ('notifications:1', gen_random_uuid(), 'notifications', 'dlq')"
    )
    assert disagreements(busload, "--queue", QUEUE) == []
    assert disagreements(busload, "--queue", "dev_jobs") == [("jobs:new", "missing there", "queued", None)]
    assert disagreements(busload, "--queue", "jobs") == [("jobs:new", "missing there", "queued", None)]
    assert len(disagreements(busload)) == 2


def test_a_queue_goes_by_the_name_it_has_in_any_environment(
    busload: Busload, tracker: SyncTaskTracker, database: Database
) -> None:
    """As for `recover`; the old table may have it with its prefix and without."""
    wrote_both(database, enqueued(tracker, "1"))
    database.rows("INSERT INTO legacy.task_tracker VALUES ('partner_tasks:2', NULL, 'partner_tasks', 'dlq')")
    expected = [("partner_tasks:2", "missing here", None, "dlq")]
    for name in (QUEUE, f"dev_{QUEUE}", f"prod_{QUEUE}"):
        assert disagreements(busload, "--queue", name) == expected


@pytest.mark.parametrize("kind", ["uuid", "bigint", "varchar(50)"])
def test_an_old_table_whose_ids_are_no_texts(
    busload: Busload, tracker: SyncTaskTracker, database: Database, kind: str
) -> None:
    task_id = str(uuid4()) if kind == "uuid" else "7"
    execution = tracker.enqueue(task_id, queue=QUEUE)
    assert execution is not None
    database.rows(f"ALTER TABLE legacy.task_tracker ALTER task_id TYPE {kind} USING NULL")
    wrote_both(database, execution)
    assert disagreements(busload) == []
    tracker.claim(task_id, str(execution.execution_id))
    assert disagreements(busload, "--queue", QUEUE) == [(task_id, "status differs", "processing", "queued")]


@pytest.mark.parametrize("name", ["", ".", "legacy.", ".task_tracker", "a.b.c", "a.b.c.d"])
def test_a_name_that_is_no_tables_is_refused(busload: Busload, name: str) -> None:
    result = busload("tracker", "compare", "--table", name)
    assert result.exit_code == 2 and "wanted a table" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("name", ["50%.s", "pg_catalog.pg_class", "100%s"])
def test_a_table_that_cannot_be_read_as_one_is_refused(busload: Busload, name: str) -> None:
    result = busload("tracker", "compare", "--table", name)
    assert result.exit_code == 2 and "does not exist" in result.stderr


@pytest.mark.parametrize("limit", [0, -1])
def test_a_comparison_that_lists_nothing_is_refused(busload: Busload, tracker: SyncTaskTracker, limit: int) -> None:
    """It would say that there is no disagreement."""
    enqueued(tracker, "1")
    result = busload(*OLD, "--limit", limit)
    assert result.exit_code == 2 and "--limit" in result.stderr


def test_an_old_table_elsewhere_with_other_names(
    busload: Busload, tracker: SyncTaskTracker, server: TestServer
) -> None:
    execution = enqueued(tracker, "1")
    maps = ["task_id=taskId", "execution_id=executionId", "created_at=createdAt", "queue=queueName"]
    with server.database(migrated=False) as elsewhere:
        with psycopg.connect(elsewhere) as conn:
            conn.execute(
                'CREATE TABLE trackers ("taskId" text, "executionId" text, "queueName" text, status text,'
                ' "createdAt" timestamp)'
            )
            conn.execute(
                "INSERT INTO trackers VALUES (%s, %s, %s, 'queued', now())",
                [execution.task_key, str(execution.execution_id), "dev_partner_tasks"],
            )
        old = ["tracker", "compare", "--table", "trackers", "--old-dsn", elsewhere, "--queue", QUEUE]
        result = busload(*old, *(word for pair in maps for word in ("--map", pair)))
        assert result.exit_code == 0, result.output
        unmapped = busload(*old)
        assert unmapped.exit_code == 2 and "--map" in unmapped.stderr and "does not exist" in unmapped.stderr


def test_more_tasks_than_a_page_holds(busload: Busload, tracker: SyncTaskTracker, database: Database) -> None:
    database.rows(
        "INSERT INTO busload.command (id, domain, command_id, command_type, data, task_key)"
        " SELECT n * 1024, 'jobs', gen_random_uuid(), 'TrackedTask', '{}', 'jobs:' || n"
        "   FROM generate_series(100001, 102500) AS n"
    )
    database.rows(
        "INSERT INTO busload.queue (lo, hi, domain) SELECT id, id, domain FROM busload.command WHERE domain = 'jobs'"
    )
    database.rows(
        "INSERT INTO legacy.task_tracker (task_id, execution_id, queue, status)"
        " SELECT task_key, command_id, domain, 'queued' FROM busload.command WHERE task_key < 'jobs:101800'"
        " UNION ALL SELECT 'old:' || n, gen_random_uuid(), 'jobs', 'dlq' FROM generate_series(1, 1200) AS n"
    )
    found = disagreements(busload, "--limit", "5000")
    assert len(found) == 1200 + 701
    assert len({task_id for task_id, *_ in found}) == len(found)
    assert {problem for _, problem, *_ in found} == {"missing here", "missing there"}


@pytest.mark.parametrize("pair", ["task_id", "task_id=", "nothing=taskId", "=taskId"])
def test_columns_that_mean_nothing_are_refused(busload: Busload, pair: str) -> None:
    result = busload(*OLD, "--map", pair)
    assert result.exit_code == 2 and "execution_id" in result.stderr


def test_an_old_table_that_is_not_there_is_refused(busload: Busload) -> None:
    result = busload("tracker", "compare", "--table", 'no"such.table')
    assert result.exit_code == 2 and "does not exist" in result.stderr


def test_recover_lists_what_should_be_published_again(
    busload: Busload, tracker: SyncTaskTracker, database: Database
) -> None:
    """Looking changes nothing; what was listed is not listed again before it has waited as long."""
    recover = ("tracker", "recover", "--queue", QUEUE)
    execution = enqueued(tracker, "1")
    enqueued(tracker, "2", "jobs")
    assert busload(*recover).stderr == "Nothing has waited that long.\n"
    database.rows("UPDATE busload.command SET created_at = created_at - interval '6 min'")
    assert busload(*recover, "--waiting-for", "7m").stdout == ""
    for _ in range(2):
        [found] = json.loads(busload(*recover, "--dry-run", "--json").stdout)
        assert (found["task_key"], found["execution_id"]) == (execution.task_key, str(execution.execution_id))
    said = busload(*recover).stdout.splitlines()
    assert len(said) == 2 and str(execution.execution_id) in said[1]
    assert json.loads(busload(*recover, "--json").stdout) == []
    assert tracker.claim(str(execution.task_key), str(execution.execution_id)) is not None


def test_recover_takes_back_what_dead_workers_held(
    busload: Busload, tracker: SyncTaskTracker, database: Database
) -> None:
    running = brought_to(tracker, "processing")
    database.rows("UPDATE busload.worker SET seen_at = now() - 2 * lease_for")
    assert busload("tracker", "recover", "--queue", QUEUE, "--dry-run").exit_code == 0
    assert [str(one.status) for one in tracker.history(str(running.task_key))] == ["processing"]
    assert busload("tracker", "recover", "--queue", QUEUE).exit_code == 0
    assert [str(one.status) for one in tracker.history(str(running.task_key))] == ["lost", "queued"]
    database.check_invariants()


def test_looking_shows_what_dead_workers_hold(busload: Busload, tracker: SyncTaskTracker, database: Database) -> None:
    """Nobody may have taken it back: without a loop that recovers, this is where it is seen."""
    running = brought_to(tracker, "processing")
    look = ("tracker", "recover", "--queue", QUEUE, "--dry-run", "--json")
    assert json.loads(busload(*look).stdout) == []
    database.rows("UPDATE busload.worker SET seen_at = now() - 2 * lease_for")
    for _ in range(2):
        [found] = json.loads(busload(*look).stdout)
        assert (found["task_key"], found["execution_id"]) == (running.task_key, str(running.execution_id))
        assert (found["status"], found["worker"]) == ("lost", running.worker)
    assert "lost" in busload(*look[:-1]).stdout
    database.rows("UPDATE busload.worker SET seen_at = now(), stopped_at = now()")
    assert len(json.loads(busload(*look).stdout)) == 1
    assert json.loads(busload("tracker", "recover", "--queue", "jobs", "--dry-run", "--json").stdout) == []
    assert [str(one.status) for one in tracker.history(str(running.task_key))] == ["processing"]


@pytest.mark.parametrize(
    "options", [("--queue", "no queue"), ("--queue", QUEUE, "--waiting-for", "soon"), ("--queue", QUEUE, "--limit", 0)]
)
def test_what_recover_cannot_mean_is_refused(busload: Busload, options: tuple[object, ...]) -> None:
    result = busload("tracker", "recover", *options)
    assert result.exit_code == 2 and result.stdout == ""


# -- an export of another store -----------------------------------------------------------------------------------


def document(execution: Execution, status: str | None = None, **fields: object) -> dict[str, object]:
    """What MongoDB writes about the same execution."""
    return {
        "_id": {"$oid": "64f1c0ffee64f1c0ffee64f1"},
        "taskId": execution.task_key,
        "executionId": str(execution.execution_id),
        "queueName": f"dev_{execution.queue}",
        "status": status or str(execution.status),
        "createdAt": {"$date": "2026-03-01T12:00:00Z"},
        **fields,
    }


def exported(path: Path, *documents: object) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in documents))
    return path


def test_an_export_of_another_store_is_compared(busload: Busload, tracker: SyncTaskTracker, tmp_path: Path) -> None:
    """In every state, in both directions, and exit code 1 if there is a disagreement."""
    ours = {status: brought_to(tracker, status) for status in STATUSES}
    file = exported(tmp_path / "export.jsonl", *(document(one) for one in ours.values()))
    result = busload("tracker", "compare", "--export", file)
    assert (result.exit_code, result.stderr) == (0, "5 tasks, no disagreement.\n")
    enqueued(tracker, "new")
    stranger = str(uuid4())
    exported(
        file,
        document(ours["queued"]),
        document(ours["processing"], "queued"),
        document(ours["completed"], executionId=stranger),
        document(ours["failed"]),
        document(ours["failed"], taskId="partner_tasks:gone"),
    )
    result = busload("tracker", "compare", "--export", file, "--json")
    assert result.exit_code == 1
    assert [(one["task_id"], one["problem"], one["there"]) for one in json.loads(result.stdout)] == [
        ("partner_tasks:completed", "execution differs", stranger),
        ("partner_tasks:gone", "missing here", "failed"),
        ("partner_tasks:processing", "status differs", "queued"),
        ("partner_tasks:dlq", "missing there", None),
        ("partner_tasks:new", "missing there", None),
    ]


@pytest.mark.parametrize(
    "newer",
    [
        {"$date": "2026-03-01T12:00:00.001Z"},
        {"$date": {"$numberLong": "1772366400001"}},
        {"$date": 1772366400001},
        "2026-03-01T13:00:00.001+01:00",
        "2026-03-01 12:00:00.001",
        1772366400001,
    ],
    ids=repr,
)
def test_the_newest_document_of_a_task_counts(
    busload: Busload, tracker: SyncTaskTracker, tmp_path: Path, newer: object
) -> None:
    """By any form of its date, wherever it stands in the file."""
    done = brought_to(tracker, "completed")
    documents = [document(done, createdAt=newer), document(done, "failed"), document(done, "queued", createdAt=None)]
    for order in (documents, documents[::-1]):
        result = busload("tracker", "compare", "--export", exported(tmp_path / "export.jsonl", *order))
        assert result.exit_code == 0, result.output


def test_an_export_can_have_other_names_and_forms(busload: Busload, tracker: SyncTaskTracker, tmp_path: Path) -> None:
    """Names that are mapped, ids in binary, an array, an empty file; and one queue of it alone."""
    one, other = enqueued(tracker, "1"), enqueued(tracker, "2", "jobs")
    assert one.execution_id is not None and other.execution_id is not None
    packed = {"$binary": {"base64": b64encode(one.execution_id.bytes).decode(), "subType": "04"}}
    file = tmp_path / "export.json"
    renamed = {"key": one.task_key, "run": packed, "state": "queued", "q": "prod_partner_tasks"}
    file.write_text("\n[\n" + json.dumps(renamed) + ",\n" + json.dumps(renamed | {"key": "jobs:9", "q": "jobs"}) + "]")
    maps = [word for pair in ("task_id=key", "execution_id=run", "status=state", "queue=q") for word in ("--map", pair)]
    mapped = ("tracker", "compare", "--export", file, *maps)
    assert busload(*mapped, "--queue", QUEUE).exit_code == 0
    found = json.loads(busload(*mapped, "--json").stdout)
    assert [(each["task_id"], each["problem"]) for each in found] == [
        ("jobs:9", "missing here"),
        ("jobs:2", "missing there"),
    ]
    file.write_text("")
    assert len(json.loads(busload("tracker", "compare", "--export", file, "--json").stdout)) == 2


def test_an_export_without_queues_cannot_be_asked_for_one(
    busload: Busload, tracker: SyncTaskTracker, tmp_path: Path
) -> None:
    """All tasks would be missing there. A few documents without a queue are of none that was asked for."""
    execution = tracker.enqueue(tracker.task_id(QUEUE, "1"), queue=QUEUE)
    assert execution is not None
    known = document(execution, queueName=QUEUE)
    renamed = {"place": known.pop("queueName"), **known}
    file = exported(tmp_path / "export.jsonl", renamed)
    options = ("tracker", "compare", "--export", file, "--queue", QUEUE)
    result = busload(*options)
    assert result.exit_code == 2
    assert "found no queue in any of its documents, wanted one in queueName or queue or queue_name" in result.stderr
    assert busload(*options, "--map", "queue=place").exit_code == 0
    exported(tmp_path / "export.jsonl", {**known, "taskId": "other"}, {**known, "queueName": QUEUE})
    assert busload(*options).exit_code == 0


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("nothing", "document 2"),
        ("[1]", "wanted a JSON object"),
        ('{"status": "queued"}', "found no task id, wanted one in taskId or task_id"),
        ('{"taskId": {"a": 1}}', "wanted a text"),
        ('{"taskId": "x", "createdAt": "yesterday"}', "found the date 'yesterday'"),
        ('{"taskId": "x", "createdAt": {"$date": true}}', "wanted an ISO date"),
        ('{"taskId": "x", "createdAt": 1e300}', "wanted an ISO date"),
        ('{"taskId": "x", "executionId": {"$binary": "%"}}', "wanted a text"),
        ("[" * 100_000, "document 2"),
    ],
)
def test_an_export_that_cannot_be_read_is_refused(busload: Busload, tmp_path: Path, line: str, found: str) -> None:
    """It says which document, and what is wrong with it."""
    file = tmp_path / "export.jsonl"
    file.write_text('{"taskId": "partner_tasks:1", "status": "queued"}\n' + line + "\n")
    result = busload("tracker", "compare", "--export", file)
    assert result.exit_code == 2 and "document 2" in result.stderr and found in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "options", [(), ("--table", "a", "--export", "-"), ("--export", "-", "--old-dsn", "postgresql://old")]
)
def test_one_old_tracker_is_compared_at_a_time(busload: Busload, options: tuple[str, ...]) -> None:
    result = busload("tracker", "compare", *options)
    assert result.exit_code == 2 and "--export" in result.stderr


# -- the self-test ------------------------------------------------------------------------------------------------


def test_the_self_test_tells_five_facts_and_leaves_nothing(
    busload: Busload, sync_bus: SyncCommandBus, database: Database
) -> None:
    before = database.everything()
    result = busload("tracker", "selftest")
    lines = result.stdout.splitlines()
    assert result.exit_code == 0 and [line[0] for line in lines] == ["✓"] * 5
    for line, words in zip(lines, ("task ids", "execution ids", "duplicate", "claimed once", "chain"), strict=True):
        assert words in line
    assert "partner_tasks:SATLOC:695d:02220710" in lines[0] and lines[4].endswith("failed, dlq, completed")
    told = json.loads(busload("tracker", "selftest", "--json").stdout)
    assert told["ok"] is True and [fact["ok"] for fact in told["facts"]] == [True] * 5
    assert database.everything() == before


def test_the_self_test_says_what_does_not_hold(busload: Busload, database: Database) -> None:
    """Exit code 1: here the database has lost the key by which one of two producers wins."""
    database.rows(
        "CREATE OR REPLACE FUNCTION busload.is_open(of_domain text, of_command_id uuid) RETURNS boolean"
        " LANGUAGE sql AS 'SELECT false'"
    )
    database.rows(
        "CREATE FUNCTION busload.forget() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN NEW.held_until := now() - interval ''1 s''; RETURN NEW; END'"
    )
    database.rows("CREATE TRIGGER forget BEFORE INSERT ON busload.task FOR EACH ROW EXECUTE FUNCTION busload.forget()")
    result = busload("tracker", "selftest")
    assert result.exit_code == 1
    assert [line[0] for line in result.stdout.splitlines()] == ["✓", "✓", "✗", "✓", "✓"]


@pytest.fixture
def legacy(sync_bus: SyncCommandBus) -> str:
    """An old tracker in shadow, with two calls compared and one disagreement."""
    compared = phase.Comparisons("legacy")
    at = sync_bus.database.read(phase.current("legacy"))
    compared.add(at.number, phase.Answers("jobs:1", "enqueue", "enqueued", "enqueued"))
    compared.add(at.number, phase.Answers("jobs:2", "claim", "claimed", "not claimed"))
    sync_bus.database.in_transaction(compared.write(compared.take()))
    return "legacy"


def test_the_report_says_how_far_two_trackers_agree(busload: Busload, legacy: str) -> None:
    assert "No old tracker is known" not in busload("tracker", "report").output
    found = json.loads(busload("tracker", "report", "--json").stdout)
    [shadow] = found["phases"]
    assert (shadow["old_tracker"], shadow["phase"], shadow["compared"], shadow["agreed"]) == ("legacy", "shadow", 2, 1)
    [one] = found["disagreements"]
    assert (one["task_id"], one["operation"], one["old"], one["busload"]) == (
        "jobs:2",
        "claim",
        "claimed",
        "not claimed",
    )
    assert one["at"] == shadow["disagreed_at"]
    shown = busload("tracker", "report").stdout
    assert "legacy" in shown and "jobs:2" in shown and "not claimed" in shown
    wrong = busload("tracker", "report", "--old", "legcy")
    assert wrong.exit_code == 1 and "Did you mean 'legacy'?" in wrong.stderr


def test_a_switch_is_refused_until_it_is_safe_and_is_kept_in_the_audit(
    busload: Busload, legacy: str, database: Database
) -> None:
    refused = busload("tracker", "switch", "dual_write")
    assert refused.exit_code == 1
    assert "2 calls compared in this phase, wanted at least 1,000" in " ".join(refused.stderr.split())
    assert "busload tracker report" in " ".join(refused.stderr.split())
    safe = ("--at-least", "2", "--agreed-for", "1h")
    database.rows("UPDATE busload.tracker_disagreement SET at = at - interval '2 hours'")
    tried = busload("tracker", "switch", "dual_write", *safe, "--dry-run")
    assert tried.stdout == "Would switch legacy from shadow to dual_write; nothing was done.\n"
    assert database.count("tracker_phase") == 1
    done = busload("tracker", "switch", "dual_write", *safe, "--operator", "rosa", "--reason", "it is quiet")
    assert done.exit_code == 0 and done.stdout.startswith("Switched legacy from shadow to dual_write.")
    assert busload("tracker", "switch", "dual_write").stdout == "legacy is in dual_write already.\n"
    [noted] = json.loads(busload("audit", "ls", "--json").stdout)
    assert (noted["type"], noted["operator"], noted["reason"]) == ("TRACKER_SWITCHED", "rosa", "it is quiet")
    assert (noted["old_tracker"], noted["phase"]) == ("legacy", "dual_write")
    assert "legacy to dual_write" in busload("audit", "ls").stdout


def test_an_old_tracker_is_named_if_there_are_several(busload: Busload, legacy: str, sync_bus: SyncCommandBus) -> None:
    sync_bus.database.read(phase.current("other"))
    result = busload("tracker", "switch", "dual_write", "--force")
    assert result.exit_code == 2 and "Name one by --old: legacy, other." in result.stderr
    assert busload("tracker", "switch", "dual_write", "--force", "--old", "other").exit_code == 0


def test_without_an_old_tracker_there_is_nothing_to_switch(busload: Busload, sync_bus: SyncCommandBus) -> None:
    result = busload("tracker", "switch", "dual_write")
    assert result.exit_code == 1 and "No old tracker is known." in result.stderr
