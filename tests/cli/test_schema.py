"""`busload schema` at a shell."""

from __future__ import annotations

import json
from collections.abc import Iterator
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from busload.testing import TestServer
from tests.cli.conftest import Busload


@pytest.fixture
def empty(server: TestServer) -> Iterator[str]:
    """A database that has never heard of us."""
    with server.database(migrated=False) as dsn:
        yield dsn


def test_migrate_brings_a_database_up_to_date_once(offline: Busload, empty: str) -> None:
    assert offline("--dsn", empty, "schema", "status").exit_code == 1
    first = offline("--dsn", empty, "schema", "migrate")
    assert first.exit_code == 0
    assert first.stdout.startswith("Applied 0001_")
    assert offline("--dsn", empty, "schema", "migrate").stdout == "Nothing to do: the database is up to date.\n"
    assert offline("--dsn", empty, "schema", "migrate", "--json").stdout == "[]\n"
    status = offline("--dsn", empty, "schema", "status", "--json")
    assert status.exit_code == 0
    assert all(migration["applied_at"] for migration in json.loads(status.stdout))


def test_status_names_what_is_missing(offline: Busload, empty: str) -> None:
    said = offline("--dsn", empty, "schema", "status").stdout.splitlines()
    assert said[0].split() == ["VERSION", "NAME", "APPLIED"]
    assert said[1].split()[0] == "0001"
    assert said[1].endswith("missing")
    found = json.loads(offline("--dsn", empty, "schema", "status", "--json").stdout)
    assert found[0]["applied_at"] is None


def test_what_print_prints_does_what_migrate_does(offline: Busload, empty: str) -> None:
    printed = offline("schema", "print")
    assert printed.exit_code == 0
    with psycopg.connect(empty, autocommit=True) as conn:
        conn.execute(printed.stdout.encode())
    assert offline("--dsn", empty, "schema", "status").exit_code == 0
    files = json.loads(offline("schema", "print", "--json").stdout)
    assert [f"VALUES ({file['version']}, '{file['name']}')" in printed.stdout for file in files] == [True] * len(files)


def test_print_leaves_out_what_a_database_has(offline: Busload) -> None:
    files = json.loads(offline("schema", "print", "--json").stdout)
    later = offline("schema", "print", "--since", str(files[-2]["version"]))
    assert f"VALUES ({files[-1]['version']}, " in later.stdout and "VALUES (1, " not in later.stdout
    assert "since must be a version" in offline("schema", "print", "--since", "9999").stderr


def test_grants_makes_the_roles_by_the_names_that_are_given(offline: Busload, empty: str) -> None:
    prefix = f"cli_{uuid4().hex[:8]}_"
    names = {role: f"{prefix}{role}" for role in ("sender", "worker", "operator", "reader")} | {
        "worker": f"{prefix}jobs"
    }
    words = ["schema", "grants", "--prefix", prefix, "--worker", names["worker"]]
    refused = offline(*words, "--apply", "--dsn", empty)
    assert refused.exit_code == 1
    assert refused.stderr == "Error: This database has no schema busload. Run `busload schema migrate` first.\n"
    offline("schema", "migrate", "--dsn", empty)
    printed = offline(*words).stdout
    assert json.loads(offline(*words, "--json").stdout) == {"roles": names, "sql": printed}
    with psycopg.connect(empty, autocommit=True) as conn:
        try:
            done = offline(*words, "--apply", "--dsn", empty).stdout
            assert done == f"Granted {', '.join(names.values())} what they need, and no more.\n"
            made = conn.execute("SELECT rolname::text FROM pg_roles WHERE rolname LIKE %s", [f"{prefix}%"]).fetchall()
            assert {name for (name,) in made} == set(names.values())
            conn.execute(f"CREATE ROLE {prefix}app LOGIN; GRANT {names['sender']} TO {prefix}app".encode())
            app = make_conninfo(empty, user=f"{prefix}app")
            other = offline(*words, "--apply", "--dsn", app)
            assert other.exit_code == 1
            assert "This role may not make or grant the roles: permission denied" in other.stderr
        finally:
            for name in [f"{prefix}app", *names.values()]:
                if conn.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [name]).fetchone():
                    conn.execute(f"DROP OWNED BY {name}; DROP ROLE {name}".encode())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--prefix", "Bad-"), "The name of a role has small letters, digits and _"),
        (("--sender", "x", "--reader", "x"), "Each role needs a name of its own"),
        (("--sender", "pg_x"), "does not begin with pg_"),
    ],
)
def test_names_of_roles_that_cannot_be_are_refused(offline: Busload, words: tuple[str, ...], said: str) -> None:
    refused = offline("schema", "grants", *words)
    assert refused.exit_code == 2
    assert said in " ".join(refused.stderr.split())
