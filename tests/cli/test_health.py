"""`busload health` at a shell: a word, its reasons, and an exit code for monitors."""

from __future__ import annotations

import json

from psycopg.conninfo import make_conninfo

from busload import SyncCommandBus
from tests.cli.conftest import Busload
from tests.given import DOMAIN, Database


def test_the_exit_code_tells_the_state(busload: Busload, sync_bus: SyncCommandBus, database: Database) -> None:
    healthy = busload("health")
    assert (healthy.exit_code, healthy.stdout) == (0, "HEALTHY\n")
    sync_bus.send(DOMAIN, "Debit")
    degraded = busload("health")
    assert degraded.exit_code == 1
    assert degraded.stdout.startswith(
        "DEGRADED\n  DEGRADED  NO_WORKER  1 command is ready in payments, and no worker serves it. Since "
    )
    database.rows("UPDATE busload.command SET created_at = now() - interval '1 day'")
    critical = busload("health")
    assert critical.exit_code == 2
    assert critical.stdout.startswith("CRITICAL\n  CRITICAL  NO_WORKER")


def test_programs_get_json(busload: Busload, sync_bus: SyncCommandBus) -> None:
    assert json.loads(busload("health", "--json").stdout) == {"state": "HEALTHY", "reasons": []}
    sync_bus.send(DOMAIN, "Debit")
    found = json.loads(busload("health", "--json").stdout)
    assert found["state"] == "DEGRADED"
    assert [(one["code"], one["domain"]) for one in found["reasons"]] == [("NO_WORKER", DOMAIN)]


def test_a_database_that_is_away_or_without_our_schema_is_critical(
    offline: Busload, busload: Busload, dsn: str
) -> None:
    away = offline("health", "--json")
    assert (away.exit_code, json.loads(away.stdout)["reasons"][0]["code"]) == (2, "DATABASE_UNREACHABLE")
    bare = busload("health", "--json", url=make_conninfo(dsn, dbname="postgres"))
    assert (bare.exit_code, json.loads(bare.stdout)["reasons"][0]["code"]) == (2, "SCHEMA_OUTDATED")
