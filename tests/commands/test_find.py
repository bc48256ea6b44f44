"""Ids by their beginning, and the names of domains, without reading whole tables."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from busload import BatchCommand, SyncCommandBus
from busload.commands import search
from busload.commands.search import IdRange, Noun
from busload.postgres.plan import Plan
from tests.given import Database


def test_a_range_of_ids_is_shown_as_it_would_be_typed() -> None:
    whole = "0198c5d27f3a7c119d2e5b1c8a6e4f00"
    for length in range(1, 33):
        ids = IdRange(whole[:length])
        assert str(ids).replace("-", "") == whole[:length]
        assert "0198c5d2-7f3a-7c11-9d2e-5b1c8a6e4f00".startswith(str(ids))
        assert str(ids.first).startswith(str(ids)) and str(ids.last).startswith(str(ids))
        assert (ids.whole is not None) == (length == 32)


@pytest.mark.parametrize("noun", get_args(Noun))
@pytest.mark.parametrize("domain", [None, "payments"])
def test_ids_are_found_by_an_index(database: Database, noun: Noun, domain: str | None) -> None:
    assert reads_by_index(database, search.find(noun, IdRange("0198"), domain=domain, limit=10))


def test_domains_are_found_from_one_to_the_next(database: Database, sync_bus: SyncCommandBus) -> None:
    for domain in ("a", "b", "c"):
        sync_bus.create_batch(domain, [BatchCommand("Debit")] * 3)
    assert database.perform(search.known_domains()) == ["a", "b", "c"]
    assert reads_by_index(database, search.known_domains())


def reads_by_index(database: Database, plan: Plan[object]) -> bool:
    """Whether no large table is read from end to end where an index can be used."""
    step = next(plan)
    with database._conn.transaction():
        database._conn.execute("SET LOCAL enable_seqscan = off")
        told = database._conn.execute(b"EXPLAIN " + step.sql, step.params).fetchall()  # type: ignore[union-attr]
    text = "\n".join(line for (line,) in told)
    assert "Index" in text
    return re.search(r"Seq Scan on (command|batch|job|buffered)\b", text) is None
