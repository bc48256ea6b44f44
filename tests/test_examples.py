"""What the README, the docs and the examples show really runs, and what they name really exists.

In a page, `<!-- run -->` above a fenced `python` or `sql` block has it run, all blocks of a page in order and on one
fresh database. Python blocks share their names and may `await` at the top, as at the prompt of `python -m asyncio`.
`<!-- prints -->` above a `text` block compares it with what was printed since the last one; `…` stands for anything.
"""

from __future__ import annotations

import ast
import asyncio
import codeop
import contextlib
import dataclasses
import inspect
import io
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from typing import Any

import click
import psycopg
import pytest

import busload
from busload.integrations.django_app import DjangoCommandBus
from busload.settings import VARIABLES, Settings, WorkerSettings
from busload.testing import TestServer
from busload.worker.metrics import figures_of, metrics_text
from busload.worker.stats import BrokerStats, CoalescerStats, HandlerStats, OutboxStats, WorkerStats
from tests.given import Database

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROSE = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

EXPECTED = {
    "bulk_import.py": ["COMPLETED_WITH_FAILURES     5000 of   5000, 5 failed", "Contact 1000: BAD_EMAIL, …"],
    "callbacks.py": [
        "Mail to cfo@example.com: March is COMPLETED, 100 pages",
        "This process hears: April is COMPLETED",
    ],
    "causes.py": [
        "250 commands: CURRENCY, such as: Refund of account 4 has no currency.",
        "retry CURRENCY: COMPLETED",
        "COMPLETED_WITH_FAILURES: 900 completed, 100 canceled",
        "OPERATOR_RETRIED by rosa: {'account': 4, 'cents': 400} -> {'account': 4, 'cents': 400, 'currency': 'EUR'}",
    ],
    "shards.py": [
        "Refused: OTHER_DATABASE",
        "A mail says thank you.",
        "101 commands ran; the batch of payments: COMPLETED, 100 of 100",
        "A database with 100 commands",
        "A database with 1 commands",
    ],
    "coalescer.py": [
        "Refused: -1000.0 of a broken one, CheckViolation",
        "5001 readings in … flushes, 9…% of transactions saved",
        "500 sensors, the latest of each at 9; 0 left behind",
    ],
    "celery_bridge.py": [
        "Ada: PENDING",
        "Ada is reminded, at attempt 3",
        "Nobody: IN_TROUBLESHOOTING_QUEUE, LookupError: Nobody is nobody's name",
        "Refused: The task 'celery_bridge.remind' is sent with a chain, which the bridge does not support. …",
    ],
    "dispatch.py": [
        "two_phase: success, 1000 of 1000 published",
        "two_phase: partial_success, 0 of 500 published",
        "500 commands are in the outbox: 1 round of publishing to the broker (postgresql) failed. …: It is off. …",
        "Recovered 500 commands",
        "two_phase: recovered, 500 of 500 published",
        "1500 commands have run",
    ],
    "explain.py": [
        "Not finished: 0 of 11 commands have ended; 11 without a worker.",
        "  PAUSED 11: 11 commands are ready, but domain 'savings' was paused … ago by rosa: the bank is down.",
        "  NO_HANDLER 1: 1 command is of a type that no worker had a handler for: Report. …",
        "  BACKOFF 2: 2 commands failed and will be tried again: … The last error was ConnectionError: The bank …",
    ],
    "typed_handlers.py": [
        "INVALID_DATA /data/due",
        "Pay is IN_TROUBLESHOOTING_QUEUE: LookupError",
        "paid 990 for acme at First Bank, due 01.03.",
        "14",
    ],
    "saga.py": [
        "book flight",
        "book hotel",
        "unbook hotel",
        "unbook flight",
        "Trip is FAILED, failures of its compensation: 0",
    ],
    "nightly_job.py": [
        "Large: 120 in the north",
        "Large: 300 in the west",
        "rate: COMPLETED, commands: 6",
        "Nightly is COMPLETED",
    ],
    "operators.py": [
        "IN_PROGRESS: 1 completed, 4 wait for a person",
        "  A-5 EXHAUSTED after 2: The bank did not answer.",
        "COMPLETED_WITH_FAILURES: 3 completed, 2 canceled",
        "  OPERATOR_RETRIED by rosa",
    ],
    "quickstart.py": [
        "Monthly billing: COMPLETED, 1000 of 1000 completed",
        "The first one: COMPLETED, attempt 1, result {'debited': 10}",
    ],
    "sync_app.py": ["Refused: a samovar is out of stock", "a kettle: shipped by …", "a teapot: shipped by …"],
    "tracker.py": [
        "1. The task id is made of queue and message: partner_tasks:SATLOC:695d:…",
        "2. Every execution has an id of its own: 4 executions, 4 ids",
        "3. A task that is queued or runs is not enqueued again: None",
        "4. Of ten workers with the same message one gets it: 1",
        "5. The task id alone finds the whole chain, also out of the dlq:",
        "   attempt 1: failed, no answer to attempt 1",
        "   attempt 3: dlq, no answer to attempt 3",
        "   attempt 4: completed, no error",
    ],
    "tracker_celery.py": [
        "renders:tracker_celery.render:January completed",
        "renders:tracker_celery.render:February completed",
        "renders:tracker_celery.render:March failed completed",
        "renders:tracker_celery.render:void dlq",
    ],
    "tracker_rabbitmq.py": [
        "flight_logs:…:02220710: completed by attempt 2",
        "flight_logs:…:forgotten: completed by attempt 2",
        "flight_logs:…:broken is dead-lettered",
    ],
    "transfer_money.py": ["20 transfers, each tried twice", "alice has 900, bob has 100, 20 receipts"],
}


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page: its language, the mark above it, and the line it begins on."""

    language: str
    mark: str
    text: str
    line: int


FENCE = re.compile(r"(?:^<!-- (\w+) -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start(3)) + 1
        yield Block(found[2], found[1] or "", found[3], line)


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_every_block_marked_to_run_does(
    page: Path, dsn: str, database: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BUSLOAD_DATABASE_URL", dsn)
    monkeypatch.chdir(tmp_path)
    run_page(page, dsn)
    assert not shared_with_others(page, database)


@pytest.mark.timeout(600)
def test_a_reader_can_follow_all_pages_on_one_database(
    dsn: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on the embedded one, which keeps what the pages leave there."""
    monkeypatch.setenv("BUSLOAD_DATABASE_URL", dsn)
    monkeypatch.chdir(tmp_path)
    for page in [ROOT / "README.md", *(ROOT / "docs" / name for name in pages_of_the_site())]:
        run_page(page, dsn)


OPEN = """
    SELECT domain FROM busload.queue UNION SELECT domain FROM busload.scheduled
     UNION SELECT domain FROM busload.lease UNION SELECT domain FROM busload.troubleshooting
"""


def shared_with_others(source: Path, database: Database) -> dict[str, str]:
    """The domains in which a page or an example leaves commands open though others use them, and one of these.

    On one database their workers would find those commands: what is left open needs a domain of its own.
    """
    open_domains = [domain for (domain,) in database.rows(OPEN)]
    others = {other.name: runnable(other) for other in (*PAGES, *EXAMPLES) if other != source}
    return {domain: name for domain in open_domains for name, text in others.items() if f'"{domain}"' in text}


def runnable(source: Path) -> str:
    if source.suffix == ".py":
        return source.read_text()
    return "".join(block.text for block in blocks(source) if block.mark == "run")


def run_page(page: Path, dsn: str) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = io.StringIO()
    with asyncio.Runner() as runner, psycopg.connect(dsn, autocommit=True) as conn:
        for block in blocks(page):
            if block.mark == "run" and block.language == "python":
                with contextlib.redirect_stdout(printed):
                    run_python(block, page, names, runner)
            elif block.mark == "run" and block.language == "sql":
                conn.execute(block.text.encode())
            elif block.mark == "prints":
                assert matches(block.text, printed.getvalue()), f"{page.name}:{block.line}\n{printed.getvalue()}"
                printed = io.StringIO()
            else:
                assert block.mark == "", f"{page.name}:{block.line} is marked {block.mark!r} and cannot run"
        for bus in names.values():
            if isinstance(bus, busload.CommandBus):
                runner.run(bus.close())


def run_python(block: Block, page: Path, names: dict[str, Any], runner: asyncio.Runner) -> None:
    source = "\n" * (block.line - 1) + block.text  # so that a traceback names the line of the page
    code = compile(source, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    if code.co_flags & inspect.CO_COROUTINE:
        runner.run(eval(code, names))
    else:
        exec(code, names)


def matches(expected: str, found: str) -> bool:
    pattern = ".*?".join(re.escape(part) for part in expected.strip().split("…"))
    return re.fullmatch(pattern, found.strip()) is not None


@pytest.mark.parametrize("page", PROSE, ids=names(PROSE))
def test_every_python_block_is_python(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            compile(block.text, f"{page.name}:{block.line}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_every_block_that_runs_can_be_pasted_at_a_prompt(page: Path) -> None:
    """The prompt of Python 3.11 and 3.12 ends a `for`, `with` or `class` at an empty line, and nowhere else."""
    for block in blocks(page):
        if (block.mark, block.language) == ("run", "python") and "\nclass Accounts:" not in block.text:  # says how
            compiler = codeop.CommandCompiler()
            compiler.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            typed: list[str] = []
            for number, line in enumerate([*block.text.splitlines(), ""], block.line):
                typed.append(line)
                try:
                    code = compiler("\n".join(typed), "<prompt>", "single")
                except SyntaxError as error:
                    pytest.fail(f"{page.name}:{number} {error.msg}: {line!r}")
                if code is not None:
                    typed.clear()
            assert not typed, f"{page.name}:{block.line}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("example", EXAMPLES, ids=names(EXAMPLES))
def test_every_example_ends_by_itself_and_says_what_it_should_whenever_it_is_run(
    example: Path, dsn: str, database: Database, request: pytest.FixtureRequest
) -> None:
    environment = {**os.environ, "BUSLOAD_DATABASE_URL": dsn, "PYTHONWARNINGS": "error"}
    if "AMQP_URL" in example.read_text():
        environment["AMQP_URL"] = request.getfixturevalue("rabbitmq_url")
        environment["PYTHONWARNINGS"] += ",ignore:You're running the worker"  # says Celery to root
    for _ in range(2):
        ran = subprocess.run(
            [sys.executable, str(example)], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert ran.returncode == 0, ran.stderr
        lines = ran.stdout.splitlines()
        for expected in EXPECTED[example.name]:
            assert any(matches(expected, line) for line in lines), f"{expected!r} is not in:\n{ran.stdout}"
    assert not shared_with_others(example, database)


def test_every_example_is_short_and_expected() -> None:
    assert {path.name for path in EXAMPLES} == EXPECTED.keys()
    assert not [path.name for path in EXAMPLES if len(path.read_text().splitlines()) >= 80]


@pytest.mark.parametrize("page", PROSE, ids=names(PROSE))
def test_every_link_leads_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(found), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """The names that headings get: lower case, without punctuation, words joined by dashes."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_the_site_has_every_page_once() -> None:
    assert sorted(pages_of_the_site()) == sorted(page.name for page in PAGES[1:])


def pages_of_the_site() -> list[str]:
    return re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)


def test_the_docs_name_every_extra_and_no_other() -> None:
    """An extra that no page names is of no use to users: what work on busload needs is a dependency group."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = dict(project["optional-dependencies"])
    sum_of_all = re.findall(r"\w+", extras.pop("all")[0])[1:]
    named = {name for page in PROSE for name in re.findall(r"busload\[(\w+)\]", page.read_text())}
    assert named - {"all"} == set(extras) == set(sum_of_all)
    assert "all" in named


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs/reference.md").read_text()
    assert not [name for name in busload.__all__ if f"`{name}" not in text]


def test_the_reference_has_every_public_method() -> None:
    text = (ROOT / "docs/reference.md").read_text()
    kinds = (busload.CommandBus, busload.Worker, busload.HandlerContext, busload.worker.Coalescer)
    for kind in (
        *kinds,
        busload.batches.OpenBatch,
        busload.buffers.Buffer,
        busload.Group,
        busload.Chunk,
        busload.ChunkContext,
    ):
        missing = [name for name in dir(kind) if not name.startswith("_") and f"{name}" not in text]
        assert not missing, kind.__name__


def test_the_reference_has_every_method_of_the_parts_of_a_bus() -> None:
    text = (ROOT / "docs/reference.md").read_text()
    bus = busload.CommandBus("postgresql://nowhere")
    parts = ("buffers", "domains", "jobs", "limits", "outbox", "troubleshooting")
    methods = [f"{part}.{name}" for part in parts for name in dir(getattr(bus, part)) if not name.startswith("_")]
    assert not [method for method in methods if f"`{method}(" not in text]


def test_the_docs_name_no_method_that_the_bus_lacks() -> None:
    bus = busload.CommandBus("postgresql://nowhere")
    only_open = ("pool", "dsn", "publisher")
    for page in PROSE:
        called = set(re.findall(r"\bbus\.([a-z_]+(?:\.[a-z_]+)?)\(", page.read_text()))
        named = {name for name in called if name.partition(".")[0] not in only_open}
        if page.name == "reference.md":
            [table] = re.findall(r"## CommandBus, SyncCommandBus\n(.*?)\n## ", page.read_text(), re.DOTALL)
            named |= set(re.findall(r"^\| `([a-z_]+(?:\.[a-z_]+)?)\(", table, re.MULTILINE))
        kinds = [bus, *([DjangoCommandBus] if "DjangoCommandBus" in page.read_text() else [])]
        for name in named:
            known = [kind for kind in kinds if hasattr(kind, name.partition(".")[0])]
            assert known and callable(attrgetter(name)(known[0])), f"{page.name}: bus.{name}"


def test_the_docs_have_every_setting_with_its_default() -> None:
    text = (ROOT / "docs/workers.md").read_text()
    for field in dataclasses.fields(WorkerSettings):
        assert f"| `{field.name}` | {for_people(field.default)} |" in text, field.name
    text = (ROOT / "docs/production.md").read_text()
    for field in dataclasses.fields(Settings):
        assert f"| `{field.name}` |" in text, field.name
    text = (ROOT / "docs/reference.md").read_text()
    assert not [name for name in VARIABLES if f"`{name}`" not in text]


def for_people(default: object) -> str:
    if isinstance(default, timedelta):
        seconds = default.total_seconds()
        return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1000:g} ms"
    return f"{default:,}" if isinstance(default, int) and not isinstance(default, bool) else str(default)


def test_the_reference_has_every_figure_as_it_is_declared() -> None:
    """`python scripts/generate_figures.py` writes the tables."""
    page = ROOT / "docs/reference.md"
    figures = runpy.run_path(str(ROOT / "scripts/generate_figures.py"))
    assert page.read_text() == figures["written"](page.read_text())


def test_the_docs_have_every_finding_of_the_doctor_with_its_cure() -> None:
    page = ROOT / "docs/doctor.md"
    figures = runpy.run_path(str(ROOT / "scripts/generate_figures.py"))
    assert page.read_text() == figures["written_findings"](page.read_text())


def test_the_docs_name_no_metric_that_a_worker_does_not_have() -> None:
    outbox = OutboxStats("postgresql", 1, 1, 1.0, 1)
    handler = HandlerStats("payments", "Debit", {"completed": 1}, (0,) * 17)
    stats = WorkerStats(1, CoalescerStats(1), handlers=(handler,), broker=BrokerStats("postgresql", outbox=(outbox,)))
    exposed = set(re.findall(r"^# TYPE (\w+)", metrics_text(stats, worker="one"), re.MULTILINE))
    kinds = (WorkerStats, HandlerStats, CoalescerStats, BrokerStats, OutboxStats)
    declared = {f"busload_{one.metric}" for kind in kinds for one in figures_of(kind).values() if one.metric}
    assert exposed == declared | {"busload_worker_info"}
    words = "worker|settlement|broker|relay|receive|outbox|handler_attempts|handler_duration"
    told = {name for page in PAGES for name in re.findall(rf"\bbusload_(?:{words})_[a-z_]+[a-z]", page.read_text())}
    assert told == exposed


def test_the_docs_have_every_code_of_a_refusal() -> None:
    text = (ROOT / "docs/sending.md").read_text()
    source = "".join(path.read_text() for path in (ROOT / "src/busload").rglob("*.py"))
    codes = set(re.findall(r"""(?:Problem|_Flaw)\(\s*"([A-Z][A-Z0-9_]+)",""", source))
    assert len(codes) > 15
    assert not [code for code in codes if f"`{code}`" not in text]


def test_the_reference_has_every_cli_command_and_the_docs_no_other() -> None:
    from busload.cli import main

    known = set(paths_of(main, ()))
    reference = (ROOT / "docs/reference.md").read_text()
    assert not [path for path in known if f"busload {' '.join(path)}" not in reference]
    for page in PROSE:
        inline = re.findall(r"`busload ([a-z]+(?: [a-z]+)?)", FENCE.sub("", page.read_text()))
        shell = "".join(block.text for block in blocks(page) if block.language == "sh")
        for said in inline + re.findall(r"(?:^|xargs )busload ([a-z]+(?: [a-z]+)?)", shell, re.MULTILINE):
            words = tuple(said.split())
            assert words in known or words[:1] in known, f"{page.name} says `busload {said}`"


def paths_of(group: click.Group, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from paths_of(command, (*path, name))
        else:
            yield (*path, name)


def test_a_server_of_ones_own_is_what_the_testing_page_says(server: TestServer) -> None:
    """The block cannot run here: it would start a second server."""
    shown = next(block for block in blocks(ROOT / "docs/testing.md") if "with TestServer(" in block.text)
    assert "server.database() as dsn" in shown.text
    with server.database(migrated=False) as dsn, psycopg.connect(dsn) as conn:
        assert conn.execute("SELECT to_regnamespace('busload')").fetchone() == (None,)
