"""`busload job` at a shell."""

from __future__ import annotations

import json
from uuid import UUID, uuid4

from click.testing import Result

from busload import BatchCommand, BatchJob, BusinessRuleError, Stage, SyncCommandBus
from tests.cli.conftest import Busload
from tests.given import DOMAIN, Database, Given, raising


def lines(result: Result) -> list[list[str]]:
    return [line.split() for line in result.stdout.splitlines()]


def test_ls_shows_the_jobs_of_all_domains_newest_first(busload: Busload, sync_bus: SyncCommandBus) -> None:
    assert busload("job", "ls").stderr == "There are no such jobs.\n"
    stages = [Stage("one", [BatchCommand("Debit")]), Stage("two", [BatchCommand("Debit")])]
    job_ids = [str(sync_bus.jobs.create(domain, stages, name="Nightly")) for domain in (DOMAIN, "crm", DOMAIN)]
    said = busload("job", "ls").stdout.splitlines()
    assert said[0].split() == ["JOB", "DOMAIN", "NAME", "STATUS", "STAGE", "CREATED"]
    assert said[1].split()[:6] == [job_ids[2], DOMAIN, "Nightly", "PENDING", "one", "(1/2)"]

    def ls(*options: object) -> list[str]:
        return [job["job_id"] for job in json.loads(busload("job", "ls", "--json", *options).stdout)]

    assert ls() == job_ids[::-1]
    assert ls("--domain", DOMAIN, "--limit", 1, "--offset", 1) == [job_ids[0]]
    assert ls("--status", "pending", "--domain", "crm") == [job_ids[1]]
    assert ls("--status", "FAILED") == []
    assert busload("job", "ls", "--status", "DONE").exit_code == 2

    batches = json.loads(busload("batch", "ls", "--job", job_ids[1], "--json").stdout)
    assert [(batch["job_id"], batch["stage"]) for batch in batches] == [(job_ids[1], "one")]
    rows = lines(busload("batch", "show", batches[0]["batch_id"]))
    assert [row for row in rows if row[:1] in (["job"], ["stage"])] == [["job", job_ids[1]], ["stage", "one"]]


def rows_of(database: Database) -> dict[str, list[str]]:
    """Every row as text, whoever has locked it meanwhile."""
    tables = {table: rows for table, rows in database.dump().items() if table != "sequences"}
    return {table: [row[-1] for row in rows] for table, rows in tables.items()}


async def test_a_failed_job_is_shown_and_resumed(busload: Busload, given: Given, database: Database) -> None:
    given.handler("Refuse", raising(BusinessRuleError("no")))
    job_id = await given.bus.jobs.create(
        DOMAIN, [Stage("one", [BatchCommand("Refuse")]), Stage("two"), Stage("three", [])], custom_data={"run": 7}
    )
    await given.drained()
    rows = lines(busload("job", "show", job_id))
    assert ["status", "FAILED"] in rows
    assert ["one", "COMPLETED_WITH_FAILURES"] in [row[:2] for row in rows]
    assert ["two", "PENDING", "-", "-", "-", "-", "-", "-"] in rows

    before = rows_of(database)
    dry = busload("job", "resume", job_id, "--dry-run")
    assert dry.stdout == f"Would make job {job_id} IN_PROGRESS, two (2/3), with 0 commands; nothing was done.\n"
    foretold = json.loads(busload("job", "resume", job_id, "--dry-run", "--json").stdout)
    assert (foretold["dry_run"], foretold["status"], foretold["stage"]) == (True, "IN_PROGRESS", "two (2/3)")
    assert rows_of(database) == before
    result = busload("job", "resume", job_id, "--operator", "rosa")
    assert result.stdout == f"Job {job_id} is IN_PROGRESS, two (2/3).\n"
    await given.drained()
    rows = lines(busload("job", "show", job_id, "--domain", DOMAIN))
    assert ["operator", "rosa"] in rows
    assert ["waits", "for", "busload.Plan.two"] in [row[:3] for row in rows]
    found = json.loads(busload("job", "show", job_id, "--json").stdout)
    assert [stage["status"] for stage in found["stages"]] == ["COMPLETED_WITH_FAILURES", "PLANNING", "PENDING"]
    assert (found["step"]["status"], found["custom_data"]) == ("SCHEDULED", {"run": 7})

    result = busload("job", "resume", job_id)
    assert result.exit_code == 1
    assert "is IN_PROGRESS. Only a job that has FAILED can be resumed" in result.stderr


def test_a_job_is_canceled(busload: Busload, sync_bus: SyncCommandBus) -> None:
    stages = [Stage("one", [BatchCommand("Debit"), BatchCommand("Debit")])]
    job_id = sync_bus.jobs.create(DOMAIN, stages)
    assert busload("job", "cancel", job_id).exit_code == 2
    result = busload("job", "cancel", job_id, "--reason", "wrong list")
    assert result.stdout == f"Job {job_id} is CANCELED; 2 commands were canceled.\n"
    assert json.loads(busload("job", "cancel", job_id, "--reason", "again", "--json").stdout) == {
        "job_id": str(job_id),
        "canceled": 0,
        "status": "CANCELED",
    }
    assert ["reason", "wrong", "list"] in lines(busload("job", "show", job_id))


def test_an_unknown_job_is_not_found(busload: Busload) -> None:
    unknown = uuid4()
    for verb in (["show"], ["resume"], ["cancel", "--reason", "test"]):
        result = busload("job", *verb, unknown)
        assert (result.exit_code, f"There is no job {unknown} in any domain" in result.stderr) == (1, True)
    result = busload("job", "show", unknown, "--domain", DOMAIN)
    assert (result.exit_code, f"There is no job {unknown} in domain" in result.stderr) == (1, True)


def test_the_shell_finds_batches_by_any_id_of_a_job(sync_bus: SyncCommandBus, busload: Busload) -> None:
    """A text as a whole, and a UUID by its beginning; a text may look like the beginning of one, or like all of it."""
    whole, digits = UUID("0198c5d2-7f3a-7c11-9d2e-5b1c8a6e4f00"), "1cdd2a59188143a89f85548f389d1b86"
    ids: list[str | UUID] = ["import-7", "cafe", whole, digits]
    batches = [str(sync_bus.create_batch(DOMAIN, [BatchCommand("Debit")], job_id=each, stage=3)) for each in ids]

    def ls(*options: object) -> str:
        return busload("batch", "ls", "--json", "--job", *options).stdout

    for given, batch_id in (("import-7", 0), ("cafe", 1), (whole, 2), ("0198c5", 2), (whole.hex, 2), (digits, 3)):
        for where in ((), ("--domain", DOMAIN)):
            found = ls(given, *where)
            assert batches[batch_id] in found and found.count("batch_id") == 1, (given, where)
    assert '"stage": 3' in ls("import-7").replace('"stage":3', '"stage": 3')
    assert ls("import").strip() == "[]"
    assert "import-7" in busload("batch", "show", batches[0]).stdout


async def test_a_compensated_job_shows_what_was_undone(busload: Busload, given: Given) -> None:
    given.handler()
    given.handler("Refuse", raising(BusinessRuleError("no")))
    undo = [BatchCommand("Debit"), BatchCommand("Refuse")]
    stages = [Stage("one", [BatchCommand("Debit")], compensate=undo), Stage("two", [BatchCommand("Refuse")])]
    job_id = await given.bus.jobs.create(DOMAIN, stages)
    await given.drained()
    rows = lines(busload("job", "show", job_id))
    assert ["status", "FAILED"] in rows
    assert ["compensation", "failures", "1"] in rows
    assert ["compensated", "at"] in [row[:2] for row in rows]
    found = json.loads(busload("job", "show", job_id, "--json").stdout)
    batch_id = found["stages"][0]["compensation"]["batch_id"]
    assert ["one", "COMPLETED", "1/2", batch_id] in [[*row[:2], *row[-2:]] for row in rows]
    assert found["stages"][1]["compensation"] is None


def test_a_batch_of_jobs_is_shown_listed_and_canceled(busload: Busload, sync_bus: SyncCommandBus) -> None:
    other = sync_bus.jobs.create(DOMAIN, [Stage("one", [BatchCommand("Debit")])])
    jobs = [BatchJob([Stage("one", [BatchCommand("Debit")])], name=name) for name in ("north", "south")]
    batch_id = str(sync_bus.jobs.create_batch(DOMAIN, jobs, name="Night"))
    rows = lines(busload("batch", "show", batch_id))
    assert [row for row in rows if row[:1] in (["type"], ["total"])] == [["type", "JOBS"], ["total", "2"]]

    def ids(key: str, *words: object) -> list[str]:
        return [one[key] for one in json.loads(busload(*words, "--json").stdout)]

    assert ids("batch_id", "batch", "ls", "--type", "jobs") == [batch_id]
    assert batch_id not in ids("batch_id", "batch", "ls", "--type", "COMMANDS")
    for wanted in (batch_id, batch_id[:18]):
        assert ids("name", "job", "ls", "--batch", wanted) == ["south", "north"]
    assert str(other) in ids("job_id", "job", "ls")
    [job_id, _] = ids("job_id", "job", "ls", "--batch", batch_id)
    assert ["batch", batch_id] in lines(busload("job", "show", job_id))
    explained = busload("batch", "explain", batch_id).stdout
    assert "Not finished: 0 of 2 jobs have ended; jobs: 2 without a worker." in explained
    assert f"of job {job_id}" in explained or "and alike in 1 other job" in explained
    assert busload("batch", "cancel", batch_id, "--reason", "wrong list").stdout == "Canceled 2 jobs.\n"
    assert busload("batch", "watch", batch_id).exit_code == 1
    assert "is a batch of jobs" in busload("batch", "hold", batch_id, "--reason", "x").stderr
