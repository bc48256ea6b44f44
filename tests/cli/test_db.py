"""`busload db` at a shell."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner, Result

from busload.cli import main
from busload.postgres.embedded.server import EmbeddedPostgres

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="busload-test-")).resolve()
    folder.chmod(0o755)
    yield folder / "home"
    EmbeddedPostgres(folder / "home").stop()
    shutil.rmtree(folder)


@pytest.fixture
def run(home: Path) -> Run:
    def run(*arguments: str, **environment: str | None) -> Result:
        told = {
            "BUSLOAD_HOME": str(home),
            "BUSLOAD_DATABASE_URL": None,
            "BUSLOAD_PG_BIN": None,
            **environment,
        }
        return CliRunner().invoke(main, ["db", *arguments], env=told)

    return run


@pytest.fixture
def server(home: Path) -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(home) as server:
        yield server
    server.stop()


def test_info_tells_people_and_programs_where_the_server_is(run: Run, server: EmbeddedPostgres) -> None:
    facts = json.loads(run("info", "--json").stdout)
    assert facts["running"] is True
    assert facts["in_use"] is True
    assert facts["data"] == str(server.info.data)
    assert facts["postmaster"] == server.info.postmaster
    with psycopg.connect(facts["dsn"]) as conn:
        assert conn.info.dbname == "busload"
    said = run("info").stdout
    assert f"data        {server.info.data}\n" in said
    assert "running     yes\n" in said


def test_info_starts_nothing(run: Run, tmp_path: Path) -> None:
    facts = json.loads(run("info", "--json", BUSLOAD_HOME=str(tmp_path / "none")).stdout)
    assert facts["running"] is False
    assert facts["postmaster"] is None
    assert not (tmp_path / "none").exists()
    assert not Path(facts["data"]).exists()


def test_info_says_that_a_server_of_your_own_is_used_instead(run: Run) -> None:
    url = "postgresql://somewhere/else"
    assert json.loads(run("info", "--json", BUSLOAD_DATABASE_URL=url).stdout)["in_use"] is False
    assert "BUSLOAD_DATABASE_URL is set" in run("info", BUSLOAD_DATABASE_URL=url).stdout


def test_stop_stops_a_server_in_use_and_says_so(run: Run, server: EmbeddedPostgres) -> None:
    assert json.loads(run("stop", "--json").stdout) == {"stopped": True}
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(server.dsn())
    assert run("stop").stdout == "It was not running.\n"


def test_psql_runs_on_the_embedded_server(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    result = run("psql", "-X", "-Atc", "SELECT current_database(), 6 * 7")
    assert capfd.readouterr().out == "busload|42\n"
    assert result.exit_code == 0
    assert result.stderr.startswith("using embedded PostgreSQL 18.")
    assert run("psql", "-X", "-c", "SELECT nonsense").exit_code == 1


def test_psql_runs_on_a_server_of_your_own(
    run: Run, server: EmbeddedPostgres, capfd: pytest.CaptureFixture[str]
) -> None:
    url = server.dsn("template1").replace("postgres@", "postgres:secret@")
    result = run("psql", "-X", "-Atc", "SELECT current_database()", BUSLOAD_DATABASE_URL=url)
    assert capfd.readouterr().out == "template1\n"
    assert (result.exit_code, result.stderr) == (0, "")


@pytest.mark.parametrize("verb", ["info", "psql"])
def test_an_unusable_server_is_explained_without_a_traceback(run: Run, verb: str, tmp_path: Path) -> None:
    result = run(verb, BUSLOAD_PG_BIN=str(tmp_path))
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert "Set BUSLOAD_PG_BIN to the `bin` folder of a PostgreSQL" in result.stderr
