"""`busload top`: the bus live at a terminal, keys that act, and one frame for a pipe."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace
from datetime import UTC, datetime
from uuid import uuid4

import pytest

from busload import CommandBus, PermanentCommandError, SyncCommandBus
from busload.batches.batch import BatchMetadata, BatchStatus
from busload.cli.options import user_here
from busload.cli.top_frame import Cause, Frame, Looks
from busload.cli.top_screen import LEAST_HEIGHT, LEAST_WIDTH, View, draw, whole
from busload.health.health import Health
from busload.health.overview import Overview
from busload.limits.pause import DomainOverview
from busload.troubleshooting.causes import CauseGroup
from tests.cli.conftest import Busload
from tests.cli.watched_terminal import watched
from tests.given import DOMAIN, Database, Given, closed_to_newcomers, raising, until

NOW = datetime(2030, 1, 31, 8, tzinfo=UTC)
NEVER = "\x1b]0;owned\x07\x1b[2J\r\n\u202e"
"""What would steer a terminal, or turn its text round."""


@pytest.fixture
async def story(bus: CommandBus, given: Given) -> None:
    """Two domains, a batch that waits, and three commands that wait for a person."""
    given.handler("Pay", raising(PermanentCommandError(f"the bank {NEVER}is down")))
    await given.batch(3, "Pay", name="failing")
    await bus.send("crm", "Push", {})
    await given.drained()
    await given.batch(4, name="January")


async def test_the_screen_follows_the_database(given: Given, story: None, dsn: str) -> None:
    with watched() as terminal:
        terminal.run("top", "--interval", "0.1", BUSLOAD_DATABASE_URL=dsn)
        terminal.shows("January", "crm", "the bank", "no worker")
        given.settled(given.claimed(3))
        terminal.shows("█████████░░░  75")
        terminal.shows("ALIVE")  # the worker that has claimed them
        assert b"\x1b]0;" not in terminal.raw  # what stands in an error steers no terminal


async def test_keys_pause_and_resume_the_chosen_domain(given: Given, story: None, dsn: str, database: Database) -> None:
    paused = "SELECT domain, operator FROM busload.pause WHERE resumed_at IS NULL"
    with watched() as terminal:
        terminal.run("top", BUSLOAD_DATABASE_URL=dsn)
        terminal.shows("▸ January")
        terminal.press("back-tab", "down")
        terminal.shows("▸ payments")
        terminal.press("p")
        terminal.shows("Paused payments", "PAUSED by")
        assert database.rows(paused) == [(DOMAIN, user_here())]
        terminal.press("up", "p")
        terminal.shows("Paused crm")
        assert {domain for domain, _ in database.rows(paused)} == {"crm", DOMAIN}
        terminal.press("p")
        terminal.shows("Resumed crm")
        assert database.rows(paused) == [(DOMAIN, user_here())]


async def test_a_cause_is_retried_only_after_a_yes(given: Given, story: None, dsn: str, database: Database) -> None:
    with watched() as terminal:
        terminal.run("top", "--operator", "ada", BUSLOAD_DATABASE_URL=dsn)
        terminal.shows("January")
        for no in ("n", "q", "x", "tab"):  # whatever is no yes
            terminal.press("r")
            terminal.shows("Retry 3 commands in payments", "y/n")
            terminal.press(no)
            terminal.shows("Nothing was done.")
        assert database.count("batch") == 2
        terminal.press("r")
        terminal.shows("Retry 3 commands in payments", "y/n")
        terminal.press("y")
        terminal.shows("retries 3 commands in payments.")
    assert database.count("batch") == 3
    assert (await given.drained()) >= 3
    assert database.rows("SELECT type, count(*) FROM busload.event WHERE operator = 'ada' GROUP BY 1") == [
        ("OPERATOR_RETRIED", 3)
    ]


async def test_a_retry_asks_again_if_more_have_failed_since_the_question(
    given: Given, story: None, dsn: str, database: Database
) -> None:
    with watched() as terminal:
        terminal.run("top", BUSLOAD_DATABASE_URL=dsn)
        terminal.shows("January")
        terminal.press("r")
        terminal.shows("Retry 3 commands in payments", "y/n")
        await given.batch(2, "Pay", name="late")
        await given.drained()
        batches = database.count("batch")
        terminal.press("y")
        terminal.shows("More wait now. Retry 5 commands in payments")
        assert database.count("batch") == batches
        terminal.press("y")
        terminal.shows("retries 5 commands in payments.")


async def test_a_person_asks_why_changes_the_size_and_gets_the_terminal_back(story: None, dsn: str) -> None:
    with watched() as terminal:
        before = terminal.settings()
        terminal.run("top", BUSLOAD_DATABASE_URL=dsn, NO_COLOR="1")
        terminal.shows("▸ January")
        terminal.press("e")
        terminal.shows("Not finished: 0 of 4 commands have ended; 4 without a worker.", "Start one: `busload worker")
        terminal.press("x")
        terminal.shows("▸ January")
        terminal.press("?")
        terminal.shows("pause the chosen domain, or resume it")
        terminal.press("x")
        terminal.resize(44, 12)
        terminal.shows("▸ January", "unknown: no worker")
        terminal.resize(8, 2)
        terminal.shows("Too sma…")
        terminal.resize(160, 50)
        terminal.shows("q quit", "No worker runs.")
        assert b"\x1b[?1049h" in terminal.raw
        terminal.press("q")
        assert terminal.ended() == 0
        until(lambda: terminal.raw.endswith(b"\x1b[?25h\x1b[?1049l"))  # its cursor, and what was there before
        assert terminal.settings() == before
        assert not re.search(rb"\x1b\[[0-9;]*[349][0-7][;m]", terminal.raw)  # no colour was asked for


async def test_a_database_that_goes_away_and_comes_back_is_survived(story: None, dsn: str, given: Given) -> None:
    with watched() as terminal:
        before = terminal.settings()
        terminal.run("top", "--interval", "0.2", BUSLOAD_DATABASE_URL=dsn)
        terminal.shows("▸ January")
        name = given.database.value("SELECT current_database()")
        with closed_to_newcomers(dsn) as admin:
            admin.execute(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
                " WHERE datname = %s AND application_name LIKE 'busload%%'",
                [name],
            )
            terminal.shows("Stands still. The database is away", "January")
            terminal.press("?")
            terminal.shows("pause the chosen domain")  # keys work meanwhile
            terminal.press("x")
        until(lambda: "Stands still" not in terminal.text)
        terminal.shows("▸ January")
        assert terminal.process is not None
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.ended() == 128 + signal.SIGTERM
        assert terminal.settings() == before


@pytest.mark.parametrize("flag", ["--once", "--json"])
async def test_one_frame_needs_no_terminal(busload: Busload, story: None, flag: str) -> None:
    printed = busload("top", flag, "--interval", "0.1")
    assert printed.exit_code == 0
    if flag == "--once":
        assert "\x1b" not in printed.stdout and "January" in printed.stdout and "busload health" in printed.stdout
        return
    found = json.loads(printed.stdout)
    assert [each["domain"] for each in found["domains"]] == ["crm", DOMAIN]
    assert (found["ready"], found["in_troubleshooting"], found["causes"][0]["count"]) == (5, 3, 3)
    assert found["sent_per_second"] == 0 and found["batches"][0]["name"] == "January"
    assert found["batches"][0]["forecast"]["unknown"] == "NO_WORKER"


def test_without_a_terminal_it_says_what_to_do(offline: Busload) -> None:
    refused = offline("top")
    assert refused.exit_code == 2
    assert "`busload top --once` prints one frame anywhere" in refused.stderr


def test_causes_are_read_again_once_something_was_done(sync_bus: SyncCommandBus, story: None) -> None:
    looks = Looks(sync_bus)
    [cause] = looks.look().causes
    sync_bus.troubleshooting.cancel(DOMAIN, cause.group.command_ids[0], reason="paid twice")
    looks.forget_causes()
    assert looks.look().causes[0].group.count == 2


# -- what is drawn -----------------------------------------------------------------------------------------------------


def _frame(*, domains: int = 3, batches: int = 30, causes: int = 12, text: str = "") -> Frame:
    named = tuple(DomainOverview(f"d{n}{text}", n, 0, 0, causes and 1, 0, None) for n in range(domains))
    overview = Overview(NOW, NOW, None, None, 0, 0, 0, 0, 0, named)
    rows = tuple(
        BatchMetadata(
            uuid4(), f"d{text}", f"batch {n}{text}", None, BatchStatus.PENDING, 9, n % 9, 0, 0, 0, NOW, None, None
        )
        for n in range(batches)
    )
    groups = tuple(
        Cause(f"d{text}", CauseGroup(f"{n:012x}", ("FAILED",), "E", None, text, ("T",), 5, NOW, NOW, (), ()))
        for n in range(causes)
    )
    return Frame(overview, Health.of([]), (12.0, 3_456.7), rows, groups, ())


@pytest.mark.parametrize("width", [1, LEAST_WIDTH, 37, 80, 250])
@pytest.mark.parametrize("height", [1, LEAST_HEIGHT, 9, 24, 70])
@pytest.mark.parametrize("text", ["", NEVER, "長い名前" * 30], ids=["plain", "hostile", "wide"])
def test_every_size_of_a_terminal_is_filled_and_never_exceeded(width: int, height: int, text: str) -> None:
    for frame in (None, _frame(text=text), _frame(domains=0, batches=0, causes=0)):
        for view in (View(), View(section="causes"), View(sheet=("Keys", [text * 3, "end"])), View(question=text)):
            lines = draw(frame, view, width, height, trouble=None)
            assert len(lines) == height
            assert max(line.cell_len for line in lines) <= width
            assert all(line.plain.isprintable() for line in lines)


def test_the_chosen_row_is_always_on_the_screen() -> None:
    frame, view = _frame(), View()
    for _ in range(29):
        assert f"▸ {frame.batches[view.choose(frame, 'batches') or 0].name}" in _drawn(frame, view)
        view.move(frame, 1)
    view.move(frame, 1)  # past the end is the end
    assert "▸ batch 29" in _drawn(frame, view)


def test_a_choice_stays_with_its_row_when_others_come_and_go() -> None:
    frame, view = _frame(batches=4), View()
    view.move(frame, 2)
    assert "▸ batch 2" in _drawn(frame, view)
    later = replace(frame, batches=(*_frame(batches=1).batches, *frame.batches[1:]))
    assert "▸ batch 2" in _drawn(later, view)
    gone = replace(frame, batches=frame.batches[:2])
    assert "▸ batch 1" in _drawn(gone, view)


def test_a_narrow_terminal_goes_without_columns_rather_than_without_the_forecast() -> None:
    assert (
        "DONE" in _drawn(_frame(), View(), width=44)
        and "DOMAIN  " not in _drawn(_frame(), View(), 44).split("BATCH")[1]
    )
    assert "TOTAL" in _drawn(_frame(), View(), width=120)


def test_a_whole_frame_has_every_row() -> None:
    text = "\n".join(line.plain for line in whole(_frame()))
    assert all(f"batch {n} " in text for n in range(30)) and "in 12/s  out 3,457/s" in text


def _drawn(frame: Frame, view: View, width: int = 100, height: int = 24) -> str:
    return "\n".join(line.plain for line in draw(frame, view, width, height))
