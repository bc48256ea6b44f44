"""Every command at a terminal of 80 columns: nothing is wider, and ids and numbers are whole."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from rich.cells import cell_len

from busload import (
    BatchCommand,
    BusinessRuleError,
    Command,
    CommandBus,
    Group,
    HandlerContext,
    PermanentCommandError,
    RateLimit,
    RetryPolicy,
    Settings,
    Stage,
    SyncCommandBus,
    SyncTaskTracker,
    TransientCommandError,
)
from busload.cli import main
from busload.cli.output import wrapped
from busload.cli.progress_bar import counters_that_fit
from busload.limits import rate
from busload.limits.rate import Ask
from busload.tasks import phase
from tests.brokers.faulty import FaultyTransport
from tests.cli.conftest import Busload, Spawn
from tests.cli.terminal import at_terminal, terminal
from tests.cli.test_cli import verbs
from tests.given import DOMAIN, Given

LONG = "The bank answered 503 Service Unavailable after 30 s; account DE89 3704 0044 0532 0130 00 was not debited"
BUFFER, TABLE, QUEUE = "contact_activity_events", "contact_activity_event", "partner_tasks"
TASK = "invoices:2026:subsidiary-europe-west:000004711"
NIGHTLY = "nightly-billing-of-the-northern-region"
IMPORTS = {"import celery", "import pgqueuer", "import procrastinate", "import rq"}
WITHOUT_A_TABLE = {"dashboard", "demo", "top", "worker", "db psql", "db stop", "schedule sync", *IMPORTS}
"""They fill the screen, start or stop processes, read an application or another queue; others print what they print."""
TO_COPY = {"completion", "doctor", "metrics", "buffer ddl", "schema print", "schema grants", "db info"}
"""They print SQL and paths, which are of no use in pieces. Nor are tracebacks, which come last."""


@pytest.fixture
async def shop(given: Given, settings: Settings, dsn: str) -> dict[str, list[str]]:
    """A database with something for every command to show, and a line to run each."""
    bus, database = given.bus, given.database

    async def pay(command: Command, ctx: HandlerContext) -> dict[str, Any]:
        match command.data["n"] % 10:
            case 1:
                raise PermanentCommandError(LONG, code="BANK_UNAVAILABLE", details={"iban": "DE89370400440532013000"})
            case 2:
                raise BusinessRuleError("limit exceeded", code="LIMIT")
            case 3:
                raise TransientCommandError(LONG)
            case _:
                return {"paid": command.data["n"], "reference": "RF18539007547034" * 8}

    bus.handler(DOMAIN, "DebitAccount", retry=RetryPolicy(max_attempts=2, backoff=(0.0,)))(pay)
    custom_data = {"run": 4711, "note": LONG, "files": [f"s3://invoices/2026-07/{n:08}.xml" for n in range(8)]}
    commands = [BatchCommand("DebitAccount", data={"n": n, "memo": LONG}) for n in range(1034)]
    batch_id = await bus.create_batch(
        DOMAIN, commands, name="Invoices of July for all subsidiaries, corrected", custom_data=custom_data
    )
    await bus.send(DOMAIN, "DebitAccount", {"n": 1}, task_key=TASK)
    jobs = [
        await bus.jobs.create(
            DOMAIN,
            [Stage("debit", [BatchCommand("DebitAccount", data={"n": n})]), Stage("report-to-the-tax-office")],
            name="Nightly settlement of all accounts",
        )
        for n in (2, 4)
    ]
    await given.drained()
    given.make_due()
    await given.drained()
    trouble = await bus.troubleshooting.list(DOMAIN, limit=1000)
    [traced] = [item.command_id for item in trouble if item.task_key == TASK]
    await bus.troubleshooting.retry(DOMAIN, traced, operator="ada.lovelace@example.com")
    await given.drained()
    open_batch = await bus.create_batch(DOMAIN, commands[:2], name="Second run")
    await bus.domains.pause(DOMAIN, reason=LONG, operator="ada.lovelace@example.com")
    await bus.domains.pause("customer-notifications.europe-west", reason="deploy")
    await bus.domains.resume("customer-notifications.europe-west", operator="grace")

    events = bus.buffer(BUFFER, size=4, max_age=timedelta(hours=1))

    async def refuse(group: Group, ctx: HandlerContext) -> None:
        for item in group:
            group.fail(item, PermanentCommandError(LONG, code="NEGATIVE"))

    events.handler(retry=RetryPolicy(max_attempts=1))(refuse)
    for n in range(6):
        await events.add({"n": n, "memo": LONG}, key=f"contact {n}")
    await given.drained(domains=[BUFFER])
    database.rows(f"CREATE TABLE {TABLE} (contact_activity_id bigint NOT NULL)")

    limit = RateLimit(10, burst=3)
    tenants = {("crm.example.com/v3", f"tenant {n} of the holding"): Ask(limit, 1234) for n in range(2)}
    database.perform(rate.ask({("crm", ""): Ask(limit, 3), **tenants}))
    database.perform(rate.refuse(("notifications/SendConfirmationMail", ""), RateLimit(0.5), 60.0, None))

    database.rows(
        "INSERT INTO busload.permit (limit_name, limit_subject, worker, command)"
        " SELECT 'crm.example.com/v3', 'tenant 1 of the holding', max(worker), 1024"
        " FROM busload.worker"
    )

    transport = FaultyTransport(dsn)
    transport.refuse()
    async with CommandBus(dsn, transport=transport, settings=settings) as broken:
        published = await broken.create_batch("customer-notifications", [BatchCommand("SendConfirmationMail")] * 3)

    for name in (NIGHTLY, f"{NIGHTLY}-once"):
        bus.schedule(name, cron="0 2 * * *", command=BatchCommand("DebitAccount"), domain=DOMAIN)
    await bus.schedules.sync()
    await bus.schedules.trigger(NIGHTLY, operator="ada.lovelace@example.com")

    await asyncio.to_thread(track, given)
    fingerprint = (await bus.troubleshooting.groups(DOMAIN))[0].fingerprint
    batches_of_job = await bus.list_batches(DOMAIN, job_id=jobs[0])
    done = (await bus.list_batch_commands(DOMAIN, batch_id, status="COMPLETED"))[0].command_id
    waiting = [await given.sent("DebitAccount", {"n": n}) for n in range(2)]
    some, other = [item.command_id for item in trouble if item.command_id != traced][:2]
    return {
        name: line.split()
        for name, line in {
            "batch ls": "",
            "batch show": f"{batch_id}",
            "batch watch": f"{batches_of_job[0].batch_id}",
            "batch explain": f"{batch_id}",
            "batch dispatch": f"{published}",
            "batch hold": f"{open_batch} --reason wrong",
            "batch resume": f"{open_batch}",
            "batch budget": f"{open_batch} 0.5",
            "batch reprioritize": f"{open_batch} 5",
            "batch cancel": f"{open_batch} --reason wrong",
            "buffer ls": "",
            "buffer show": BUFFER,
            "buffer flush": f"{BUFFER} --dry-run",
            "buffer ddl": f"{TABLE} --all --key contact_activity_id",
            "command ls": "--limit 5",
            "command show": f"{traced}",
            "command wait": f"{done}",
            "command cancel": f"{waiting[0]} --reason wrong",
            "command reschedule": f"{waiting[1]} --run-at 2h",
            "command explain": f"{traced}",
            "completion": "bash",
            "db info": "",
            "doctor": "",
            "domain ls": "",
            "audit ls": "",
            "domain pauses": "",
            "domain pause": "customer-notifications",
            "domain resume": "customer-notifications",
            "health": "",
            "job ls": "",
            "job show": f"{jobs[0]}",
            "job resume": f"{jobs[0]}",
            "job cancel": f"{jobs[1]} --reason wrong",
            "limit ls": "",
            "limit show": "crm.example.com/v3",
            "limit reset": "crm.example.com/v3",
            "limit concurrency": "",
            "metrics": "",
            "outbox ls": "",
            "outbox retry": "--dry-run",
            "outbox reroute": "--dry-run",
            "outbox reconcile": f"--transport {dsn}",
            "prune": "--older-than 30d --dry-run",
            "send": f"{DOMAIN} DebitAccount",
            "schedule ls": "",
            "schedule show": NIGHTLY,
            "schedule history": NIGHTLY,
            "schedule pause": f"{NIGHTLY} --reason {LONG.split()[0]}",
            "schedule resume": NIGHTLY,
            "schedule trigger": NIGHTLY,
            "schedule rm": f"{NIGHTLY}-once",
            "schema migrate": "",
            "schema status": "",
            "schema print": "",
            "schema grants": "",
            "trace": TASK,
            "tracker compare": "--table legacy.task_tracker",
            "tracker selftest": "",
            "tracker report": "",
            "tracker switch": "dual_write --force --dry-run",
            "tracker recover": f"--queue {QUEUE} --waiting-for 1s --dry-run",
            "troubleshooting ls": "--limit 5",
            "troubleshooting domains": "",
            "troubleshooting groups": "",
            "troubleshooting show": f"{traced}",
            "troubleshooting retry": f"--group {fingerprint} --dry-run",
            "troubleshooting complete": f"{some}",
            "troubleshooting cancel": f"{other} --reason wrong",
        }.items()
    }


def track(given: Given) -> None:
    """Tasks of another queue, about which its old tracker says something else."""
    database = given.database
    database.rows("CREATE SCHEMA legacy")
    database.rows(
        "CREATE TABLE legacy.task_tracker (task_id text, execution_id uuid, queue text, status text,"
        " created_at timestamptz DEFAULT clock_timestamp())"
    )
    with SyncCommandBus(given.bus.dsn) as bus, SyncTaskTracker(bus) as tracker:
        for n in range(2):
            queued = tracker.enqueue(tracker.task_id(QUEUE, "partner-europe-west", "0000004711", n), queue=QUEUE)
            assert queued is not None
            database.rows(
                "INSERT INTO legacy.task_tracker VALUES (%s, %s, %s, 'queued')", queued.task_key, uuid4(), QUEUE
            )
        compared = phase.Comparisons("partner-tracker-of-europe-west")
        task_id = tracker.task_id(QUEUE, "partner-europe-west", "0000004711", 1)
        bus.database.read(phase.current("partner-tracker-of-europe-west"))
        for busload in ("not claimed", "InvalidOperationError: Execution 01a1ee7f is none of task partner_tasks"):
            compared.add(1, phase.Answers(task_id, "claim", "claimed", busload))
        bus.database.in_transaction(compared.write(compared.take()))
    database.rows("UPDATE busload.command SET created_at = now() - interval '1 h' WHERE domain = %s", QUEUE)


ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
PART_OF_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-|-[0-9a-f]{4}-[0-9a-f]{4}-")
NUMBERS = ("total_count", "completed_count", "count", "calls", "commands", "attempts")


async def test_every_command_fits_80_columns_with_whole_ids_and_numbers(
    shop: dict[str, list[str]], dsn: str, busload: Busload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUSLOAD_DATABASE_URL", dsn)
    assert {*shop, *WITHOUT_A_TABLE} == {name for name, _ in verbs()}
    wrong: list[str] = []
    for name, arguments in shop.items():
        screen, code = await asyncio.to_thread(at_terminal, main, [*name.split(), *arguments])
        assert code in ((0, 1, 2) if name in ("doctor", "health") else (0, 1)) and screen.text, name
        print(f"\n$ busload {name} {' '.join(arguments)}\n{screen.text}")
        if name not in TO_COPY:
            wrong += [f"{name}: {line}" for line in _before_tracebacks(screen.text) if _is_wrong(line)]
        if name.split()[-1] in ("ls", "groups") and name not in ("buffer ls", "domain ls"):
            rows = json.loads(busload(*name.split(), *arguments, "--json").stdout)
            assert rows, name
            wrong += _missing(name, screen.text, rows)
    assert not wrong


def _before_tracebacks(text: str) -> list[str]:
    return text.partition("\nTraceback of attempt")[0].splitlines()


def _is_wrong(line: str) -> bool:
    return cell_len(line) > 80 or PART_OF_ID.search(ID.sub("", line)) is not None


def _missing(name: str, text: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    """Ids and numbers that JSON has and a list does not show."""
    for row in rows:
        own_id = row.get("batch_id" if name == "batch ls" else "job_id" if name == "job ls" else "command_id")
        numbers = [f"{row[field]:,}" for field in NUMBERS if field in row]
        yield from (f"{name}: {wanted}" for wanted in filter(None, [own_id, *numbers]) if wanted not in text)


@pytest.mark.parametrize("columns", [40, 60, 100, 120, 200])
async def test_other_terminals_get_what_fits_them(
    given: Given, dsn: str, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("BUSLOAD_DATABASE_URL", dsn)
    batch_id = await given.batch(1234, name="Rechnungen für 東京 und 大阪, berichtigt am Monatsende" * 2)
    screen, code = await asyncio.to_thread(at_terminal, main, ["batch", "ls"], columns)
    assert code == 0
    assert str(batch_id) in screen.text and "1,234" in screen.text
    assert max(map(cell_len, screen.lines)) <= columns
    assert len(screen.lines) == (2 if columns >= 100 else 4 if columns > 60 else len(screen.lines))


async def test_an_id_is_whole_also_where_nothing_fits(given: Given, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUSLOAD_DATABASE_URL", dsn)
    batch_id = await given.batch(1234)
    screen, _ = await asyncio.to_thread(at_terminal, main, ["batch", "ls"], 20)
    assert str(batch_id) in screen.text and "1,234" in screen.text


def test_a_real_terminal_says_how_wide_it_is(spawn: Spawn, sync_bus: SyncCommandBus) -> None:
    batch_id = sync_bus.create_batch("payments", [BatchCommand("Debit")], name="a rather long name for a batch")
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    environment |= {"BUSLOAD_DATABASE_URL": sync_bus.dsn, "TERM": "xterm-256color"}
    for columns, lines in ((80, 4), (180, 2)):
        with terminal(columns) as screen:
            process = spawn("batch", "ls", stdin=screen.descriptor, stdout=screen.descriptor, env=environment)
            assert process.wait() == 0
        assert str(batch_id) in screen.text
        assert max(map(cell_len, screen.lines)) <= columns
        assert len(screen.lines) == lines
        assert b"\x1b[" in screen.raw  # a table with style


def test_a_pipe_gets_one_unbroken_line_per_record(
    busload: Busload, sync_bus: SyncCommandBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = "Invoices of July for all subsidiaries, corrected" * 4
    for _ in range(2):
        sync_bus.create_batch("payments", [BatchCommand("Debit")], name=name)
    lines = busload("batch", "ls").stdout.splitlines()
    assert len(lines) == 3
    assert all(name in line for line in lines[1:])


def test_texts_are_wrapped_between_words_and_never_in_what_people_copy() -> None:
    batch_id = uuid4()
    text = f"Look at it with `busload batch explain {batch_id}` and decide (see {batch_id})."
    for room in range(60, 140):
        lines = wrapped(text, room)
        assert " ".join(lines) == text
        assert any(f"`busload batch explain {batch_id}`" in line for line in lines)
        assert max(map(len, lines)) <= max(room, 66)
    assert wrapped("x" * 25, 10) == ["x" * 10, "x" * 10, "x" * 5]
    assert wrapped('{"a":"1234567","b":"1234567"}', 14) == ['{"a":"1234567"', ',"b":"1234567"', "}"]
    assert wrapped("a lone ` is no quotation", 12) == ["a lone ` is", "no quotation"]
    assert wrapped("東京都 大阪府", 8) == ["東京都", "大阪府"]
    assert wrapped("", 10) == [""]


def test_a_narrow_bar_leaves_out_counters_before_it_breaks_one() -> None:
    counts = {"completed": 1_000_000, "failed": 1_000, "canceled": 0, "in troubleshooting": 10}
    assert counters_that_fit(counts, 80) == counts
    assert list(counters_that_fit(counts, 60)) == ["completed", "failed", "in troubleshooting"]
    assert list(counters_that_fit(counts, 40)) == ["failed", "in troubleshooting"]
