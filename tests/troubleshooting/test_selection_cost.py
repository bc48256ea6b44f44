"""What it costs to look at a large cause: its commands are read once, whatever plan the server keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import psycopg
import pytest

from busload import CommandBus
from busload.postgres.plan import Plan
from busload.settings import InputLimits
from busload.troubleshooting import selection
from busload.troubleshooting.selection import Filter, Selection
from tests.cost import rows
from tests.given import DOMAIN, Database, Given

COMMANDS, BATCHES = 20_000, 150
LARGEST = 0.85
"""The share of the largest of four causes."""

PARKED = """
    INSERT INTO busload.troubleshooting
           (command, domain, command_type, batch_id, priority, attempt, forgiven, reason, error)
    SELECT n, %s, 'Debit', (%s::uuid[])[n %% cardinality(%s::uuid[]) + 1], 0, 1, 0, 'PERMANENT',
           json_build_object('type', 'Refused', 'code', CASE WHEN n <= %s THEN 'CLOSED' ELSE 'OTHER_' || n %% 3 END)
      FROM generate_series(1, %s) AS n
"""


@pytest.fixture
async def fingerprint(bus: CommandBus, given: Given, database: Database) -> str:
    """The cause that most of what waits for a person has, in many batches."""
    ids: list[UUID] = [await given.batch() for _ in range(BATCHES)]
    database.rows(PARKED, DOMAIN, ids, ids, round(LARGEST * COMMANDS), COMMANDS)
    database.rows("ANALYZE busload.troubleshooting, busload.batch")
    [largest, *_] = await bus.troubleshooting.groups(DOMAIN)
    assert largest.count == LARGEST * COMMANDS
    return largest.fingerprint


LIMITS = InputLimits()
ASKED: dict[str, Callable[[str], Plan[Any]]] = {
    "preview": lambda cause: selection.preview(LIMITS, Selection(DOMAIN, cause), "retry"),
    "causes": lambda _: selection.list_causes(LIMITS, Filter(), limit=25),
    "cause": lambda cause: selection.find_cause(LIMITS, Selection(DOMAIN, cause)),
}


async def test_a_large_cause_is_read_once(dsn: str, fingerprint: str) -> None:
    """Neither sorted nor compared in pairs, by the plan that the server keeps for all filters."""
    with psycopg.connect(dsn) as conn:
        looked = {name: rows(conn, ask(fingerprint)) for name, ask in ASKED.items()}
    assert {name: count for name, count in looked.items() if count > 3 * COMMANDS} == {}
