"""`busload completion`: real shells complete nouns, domains and ids, and stay silent where there is no database."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from uuid import UUID

import pytest
from click.testing import CliRunner

from busload import BatchCommand, SyncCommandBus
from busload.cli import main
from tests.cli.conftest import NOWHERE, Busload
from tests.given import DOMAIN, Database, Given

PROGRAM = f'#!/bin/sh\nexec {sys.executable} -m busload.cli "$@"\n'
BASH = """
source '{script}'
COMP_WORDS=({words} '{last}') COMP_CWORD={count}
_busload_completion busload
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
ZSH = """
compdef() {{ :; }}
_describe() {{ print -rl -- ${{(P)3}}; }}
compadd() {{ while [[ $1 != '-a' ]]; do shift; done; print -rl -- ${{(P)2}}; }}
source <(sed '/^if \\[\\[ \\$zsh_eval_context/,$d' '{script}')
words=({words} '{last}') CURRENT={place}
_busload_completion
"""
FISH = """
source '{script}'
complete -C '{words} {last}'
"""
SCRIPTS = {"bash": ["bash", "--norc", "-c", BASH], "zsh": ["zsh", "-f", "-c", ZSH], "fish": ["fish", "-N", "-c", FISH]}


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where a shell finds `busload`: the one of these tests."""
    program = tmp_path / "busload"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    return f"{tmp_path}{os.pathsep}{os.environ['PATH']}"


def completed(words: str, url: str | None, *, at: int | None = None) -> list[str]:
    """What Tab offers for the last word, or that `at` a place, by click's own protocol with bash."""
    place = words.count(" ") if at is None else at
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(place), "_BUSLOAD_COMPLETE": "bash_complete"}
    result = CliRunner().invoke(main, prog_name="busload", env={**asked, "BUSLOAD_DATABASE_URL": url})
    assert (result.exit_code, result.stderr) == (0, ""), "nothing but an offer"
    return [line.partition(",")[2] for line in result.stdout.splitlines() if line]


@pytest.fixture
def batches(sync_bus: SyncCommandBus) -> list[UUID]:
    return [sync_bus.create_batch(domain, [BatchCommand("Debit")]) for domain in (DOMAIN, "postroom")]


@pytest.mark.parametrize("shell", SCRIPTS)
def test_a_real_shell_completes_verbs_and_ids(
    shell: str, path: str, dsn: str, batches: list[UUID], offline: Busload, tmp_path: Path
) -> None:
    if shutil.which(shell) is None:
        pytest.fail(f"There is no {shell}: `make test` installs it, see scripts/install-servers.sh.")
    script = tmp_path / "completion"
    script.write_text(offline("completion", shell).stdout)
    for words, last, wanted in (
        ("busload batch", "reprio", ["reprioritize"]),
        ("busload batch show", str(batches[0])[:8], sorted(map(str, batches), reverse=True)),
    ):
        count = words.count(" ") + 1
        *program, lines = SCRIPTS[shell]
        text = lines.format(script=script, words=words, last=last, count=count, place=count + 1)
        environment = {**os.environ, "PATH": path, "BUSLOAD_DATABASE_URL": dsn}
        done = subprocess.run([*program, text], env=environment, capture_output=True, text=True, check=False)
        found = [line.partition("\t")[0].partition(":")[0] for line in done.stdout.splitlines()]
        assert sorted(found, reverse=True) == wanted, done.stderr


async def test_domains_ids_and_names_are_offered_where_they_are_wanted(
    dsn: str, given: Given, database: Database
) -> None:
    _, [troubled] = await given.in_troubleshooting()
    batch = await given.batch(1)
    other = (await given.bus.send("postroom", "Letter")).command_id
    database.rows("INSERT INTO busload.buffer (buffer, size, max_age) VALUES ('clicks', 10, '1 hour')")
    database.rows("INSERT INTO busload.rate_limit (name, adaptive, rate, ceiling) VALUES ('crm', false, 1, 1)")
    database.rows(
        "INSERT INTO busload.schedule"
        " (name, domain, rule, command, catch_up, catch_up_limit, missed_after, declaration)"
        " VALUES ('nightly', 'payments', '{}', '{}', 'one', 1, '1 minute', '')"
    )
    cause = database.value("SELECT fingerprint FROM busload.troubleshooting")
    for words, wanted in {
        "busload batch ls --domain ": [DOMAIN, "postroom"],
        "busload batch ls --domain po": ["postroom"],
        "busload domain pause pay": [DOMAIN],
        "busload send po": ["postroom"],
        f"busload batch show {str(batch)[:23]}": [str(batch)],
        f"busload command show {other}": [str(other)],
        "busload troubleshooting retry ": [str(troubled)],
        "busload troubleshooting retry --group ": [cause],
        "busload buffer flush cl": ["clicks"],
        "busload limit show ": ["crm"],
        "busload schedule pause night": ["nightly"],
        "busload batch show nonsense": [],
        "busload batch ls --domain x'; DROP": [],
    }.items():
        assert completed(words, dsn) == wanted, words
    assert completed(f"busload batch ls --dsn '{dsn}' --domain po", NOWHERE, at=6) == ["postroom"], "the line wins"
    assert completed(f"busload --dsn '{dsn}' batch ls --domain po", NOWHERE, at=6) == ["postroom"]


@pytest.mark.parametrize("where", ["away", "not ours", "no embedded one"])
def test_without_a_database_tab_offers_nothing_and_says_nothing(
    where: str, dsn: str, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUSLOAD_HOME", str(tmp_path / "home"))
    database.rows("DROP SCHEMA busload CASCADE")
    url = {"away": NOWHERE, "not ours": dsn, "no embedded one": None}[where]
    assert completed("busload batch ls --domain ", url) == []
    assert not (tmp_path / "home").exists(), "Tab starts no server"


def test_the_script_is_printed_for_people_and_programs(offline: Busload) -> None:
    script = offline("completion", "fish").stdout
    assert script.startswith("function _busload_completion;")
    assert json.loads(offline("completion", "fish", "--json").stdout)["script"] == script.removesuffix("\n")
    assert offline("completion", "tcsh").exit_code == 2
