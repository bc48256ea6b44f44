"""What all commands have in common: help, errors, exit codes, and which database they use."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from uuid import UUID, uuid4

import click
import psycopg
import pytest
from click.testing import CliRunner
from psycopg.conninfo import make_conninfo

from busload import BatchCommand, BatchNotFoundError, SyncCommandBus
from busload.cli import NOUNS, main
from busload.cli.output import shown
from busload.testing import TestServer
from tests.cli.conftest import NOWHERE, Busload, Spawn, Until
from tests.cli.terminal import at_terminal
from tests.given import LOCKED_OUT, Database


def verbs() -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, by its whole name."""
    ctx = click.Context(main)
    for noun in NOUNS:
        command = main.get_command(ctx, noun)
        assert command is not None
        if isinstance(command, click.Group):
            yield from ((f"{noun} {verb}", each) for verb, each in command.commands.items())
        else:
            yield noun, command


@pytest.mark.parametrize("name", [name for name, _ in verbs()])
def test_the_help_of_every_command_has_a_line_to_copy(offline: Busload, name: str) -> None:
    result = offline(*name.split(), "--help")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert any(
        line.strip().startswith("busload ") and f" {name}" in line
        for line in result.stdout.splitlines()[1:]
        if line.startswith("      ")
    )


def test_every_command_that_prints_can_print_json() -> None:
    without = [name for name, command in verbs() if not any(p.name == "as_json" for p in command.params)]
    assert without == ["dashboard", "db psql", "worker"]


def test_every_noun_says_in_its_help_what_the_overview_says_of_it(offline: Busload) -> None:
    for noun, summary in NOUNS.items():
        assert f"\n\n  {summary.removesuffix('.')}" in offline(noun, "--help").stdout


@pytest.mark.parametrize("asked", ["--help", "--version", "completion"])
def test_the_overview_imports_nothing_that_only_a_command_needs(asked: str) -> None:
    """What makes it quick; a time would depend on the machine."""
    completing = {"_BUSLOAD_COMPLETE": "bash_complete", "COMP_WORDS": "busload ba", "COMP_CWORD": "1"}
    arguments = [] if asked == "completion" else [asked]
    program = (
        f"import sys, atexit; sys.argv = ['busload', *{arguments!r}]; from busload.cli import main;"
        "atexit.register(lambda: print(*sorted(sys.modules), file=sys.stderr)); main(prog_name='busload')"
    )
    environment = {**os.environ, **(completing if asked == "completion" else {})}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout
    modules = {name.partition(".")[0] for name in done.stderr.split()}
    assert not modules & {"psycopg", "psycopg_pool", "msgspec", "jsonpatch", "rich", "asyncio", "ssl"}
    ours = {name for name in done.stderr.split() if name.startswith("busload")}
    assert ours == {"busload", "busload.cli"}


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("busload ba", "batch"),
        ("busload batch sh", "show"),
        ("busload batch ls --dom", "--domain"),
        ("busload batch ls --ds", "--dsn"),
    ],
)
def test_a_shell_completes_what_was_begun(words: str, completed: str) -> None:
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    environment = {"_BUSLOAD_COMPLETE": "bash_complete", **asked}
    assert CliRunner().invoke(main, prog_name="busload", env=environment).stdout == f"plain,{completed}\n"


@pytest.mark.parametrize("place", [0, 1, 2, 4])
def test_the_database_may_be_named_before_and_after_the_verb(offline: Busload, dsn: str, place: int) -> None:
    words = ["batch", "ls", "--json", "--limit=1"]
    result = offline(*words[:place], "--dsn", dsn, *words[place:])
    assert (result.exit_code, result.stdout) == (0, "[]\n")
    assert os.environ.get("BUSLOAD_DATABASE_URL") != dsn


def test_the_last_database_that_is_named_counts(offline: Busload, dsn: str) -> None:
    assert offline("--dsn", NOWHERE, "batch", "ls", "--dsn", dsn).exit_code == 0
    assert offline("--dsn", dsn, "batch", "ls", "--dsn", NOWHERE).exit_code == 1


def test_every_command_takes_the_common_options(offline: Busload) -> None:
    for name, command in verbs():
        assert [p.name for p in command.params if p.name in ("dsn", "debug")] == ["dsn", "debug"], name


def test_a_mistyped_name_is_answered_with_one_that_looks_like_it(offline: Busload) -> None:
    assert "No such command 'btch'. Did you mean 'batch'?" in offline("btch", "ls").stderr
    assert "Did you mean 'ls'?" in offline("batch", "lst").stderr
    assert "'--domain'" in offline("batch", "ls", "--dmain", "x").stderr
    assert "(shop). Did you mean --domain shop?" in offline("command", "ls", "shop").stderr
    assert "No such command 'explain'. Did you mean 'batch explain' or 'command explain'?" in offline("explain").stderr
    unlike = offline("xyzzy")
    assert "No such command 'xyzzy'.\n" in unlike.stderr
    assert unlike.exit_code == 2


def test_a_password_on_the_command_line_is_warned_about_and_not_repeated(offline: Busload) -> None:
    result = offline("--dsn", "postgresql://ada:geheim@127.0.0.1:1/shop", "batch", "ls")
    assert result.exit_code == 1
    assert "Warning: --dsn holds a password" in result.stderr
    assert "geheim" not in result.output


@pytest.mark.parametrize("by", ["--dsn", "environment"])
def test_what_is_no_connection_string_is_refused_without_being_repeated(offline: Busload, by: str) -> None:
    wrong = "postgresql//ada:geheim@127.0.0.1:1/shop"
    result = offline("--dsn", wrong, "batch", "ls") if by == "--dsn" else offline("batch", "ls", url=wrong)
    assert result.exit_code == 2
    assert "Wanted e.g. postgresql://user:password@host:5432/database" in result.stderr
    assert "geheim" not in result.output


def test_the_command_line_wins_over_the_environment(offline: Busload, dsn: str) -> None:
    result = offline("--dsn", dsn, "batch", "ls", "--json")
    assert (result.exit_code, result.stdout) == (0, "[]\n")
    assert os.environ.get("BUSLOAD_DATABASE_URL") != dsn


def test_a_server_that_cannot_be_reached_is_reported_at_once_in_one_line(offline: Busload) -> None:
    result = offline("batch", "ls")
    assert result.exit_code == 1
    [line] = result.stderr.splitlines()
    assert line.startswith("Error: The database cannot be reached: ")
    assert "busload --wait 30" in line and "open(" not in line


@pytest.mark.parametrize("words", [("batch", "ls", "--wait", "0.3"), ("--wait", "0.3", "troubleshooting", "ls")])
def test_a_server_that_cannot_be_reached_is_waited_for_as_long_as_it_is_said(
    offline: Busload, words: tuple[str, ...]
) -> None:
    result = offline(*words)
    assert result.exit_code == 1
    assert "Error: The database could not be reached for 0.3 s" in result.stderr


@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_url_is_wrong_input_however_it_is_given(offline: Busload, empty: str) -> None:
    by_option, by_variable = offline("--dsn", empty, "batch", "ls"), offline("batch", "ls", url=empty)
    assert by_option.exit_code == by_variable.exit_code == 2
    assert "Error: Invalid value for BUSLOAD_DATABASE_URL: The DSN is empty." in by_variable.stderr
    assert by_variable.stderr == by_option.stderr.replace("for --dsn", "for BUSLOAD_DATABASE_URL")


def test_the_error_about_a_missing_schema_says_how_to_make_it(offline: Busload, server: TestServer) -> None:
    with server.database(migrated=False) as empty:
        result = offline("--dsn", empty, "batch", "ls")
    assert result.exit_code == 1
    [line] = result.stderr.splitlines()
    assert "busload schema migrate" in line


def test_a_database_that_cannot_hold_our_text_is_refused_at_once(offline: Busload, server: TestServer) -> None:
    with server.database(migrated=False) as any_database, psycopg.connect(any_database, autocommit=True) as conn:
        conn.execute("CREATE DATABASE ascii_only ENCODING 'SQL_ASCII' TEMPLATE template0 LOCALE 'C'")
        try:
            ascii_only = make_conninfo(any_database, dbname="ascii_only")
            result = offline("--dsn", ascii_only, "schema", "migrate")
        finally:
            conn.execute("DROP DATABASE ascii_only")
    assert result.exit_code == 1
    [line] = result.stderr.splitlines()
    assert line == "Error: The database is encoded in SQL_ASCII, busload needs UTF8. Create it with `createdb -E UTF8`."


@pytest.mark.parametrize("where", [("batch", "show"), ("batch", "watch"), ("command", "show")])
def test_an_id_that_is_unknown_is_one_and_one_that_is_none_is_two(busload: Busload, where: tuple[str, str]) -> None:
    unknown = busload(*where, uuid4())
    assert unknown.exit_code == 1
    assert unknown.stderr.count("\n") == 1
    assert unknown.stderr.startswith("Error: There is no ")
    assert busload(*where, uuid4(), "--domain", "payments").exit_code == 1
    assert busload(*where, "471").exit_code == 2
    assert busload(*where, "no id").exit_code == 2
    assert busload(*where, UUID(int=0), "--domain", "payments").exit_code == 2
    assert busload(*where, uuid4(), "--domain", "not a domain").exit_code == 2


def test_debug_lets_the_error_itself_through(busload: Busload) -> None:
    for result in (
        busload("--debug", "batch", "show", uuid4(), "--domain", "payments"),
        busload("batch", "show", uuid4(), "--domain", "payments", "--debug"),
    ):
        assert isinstance(result.exception, BatchNotFoundError)


def test_what_would_steer_a_terminal_is_shown_and_not_obeyed() -> None:
    assert shown("\x1b[2Jgone\r\n") == "\\x1b[2Jgone\\r\\n"
    assert shown({"text": "Zoë \u202e"}) == '{"text":"Zoë \\u202e"}'


def test_a_reader_that_goes_away_is_no_error_of_ours(spawn: Spawn, sync_bus: SyncCommandBus) -> None:
    """`busload batch ls | head -1`."""
    for _ in range(50):
        sync_bus.create_batch("payments", [BatchCommand("Debit")], name="a" * 250)
    reading, writing = os.pipe()
    os.close(reading)
    process = spawn("batch", "ls", "--limit", 100, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (1, b"")


def test_no_command_waits_for_a_search_for_garbage_among_what_it_imports() -> None:
    """A command is a process of its own, which imports some hundred modules before it does anything."""
    program = (
        "import gc, sys\n"
        "from busload.cli import main\n"
        "searches = []\n"
        "gc.callbacks.append(lambda phase, info: searches.append((phase, info['generation'])))\n"
        "main(['health', '--help'], standalone_mode=False)\n"
        "print(searches.count(('start', 2)), gc.isenabled(), 'busload.sync.bus' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 True True"


def test_an_interrupted_command_ends_with_130_and_says_nothing(
    spawn: Spawn, sync_bus: SyncCommandBus, database: Database, until: Until
) -> None:
    with psycopg.connect(sync_bus.dsn) as holder:
        holder.execute("LOCK TABLE busload.batch")
        process = spawn("batch", "ls", "--domain", "payments", stderr=subprocess.PIPE)
        until(lambda: database.rows(LOCKED_OUT))
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, b"")


def test_a_terminal_that_wants_no_colours_gets_none(sync_bus: SyncCommandBus, monkeypatch: pytest.MonkeyPatch) -> None:
    batch_id = sync_bus.create_batch("payments", [BatchCommand("Debit")])
    sync_bus.cancel_batch("payments", batch_id, reason="test")
    monkeypatch.setenv("BUSLOAD_DATABASE_URL", sync_bus.dsn)
    watch = ["batch", "watch", str(batch_id)]
    colour = re.compile(rb"\x1b\[(3|4|9)\d")
    assert colour.search(at_terminal(main, watch)[0].raw)
    assert not colour.search(at_terminal(main, watch, NO_COLOR="1")[0].raw)
    assert b"\x1b[" not in at_terminal(main, ["batch", "ls"], TERM="dumb")[0].raw
