"""What pages cost: how many statements each needs. `bench.pages` measures their time in a large database."""

from __future__ import annotations

import pytest

from bench import pages
from bench.pages import MOST_STATEMENTS, Cost
from busload import CommandBus


async def test_no_page_needs_more_than_twelve_statements(
    bus: CommandBus, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", "busload")
    found = await pages.fill(bus, dsn, commands=200, batches=20, troubled=40)
    needed = await pages.count_all(bus, found)
    assert len(needed) > 35
    assert {name: count for name, count in needed.items() if count > MOST_STATEMENTS} == {}


def test_the_table_says_what_each_page_costs() -> None:
    slow, dear = Cost("slow", 100.0, 1.0, 2.0, 12), Cost("dear", 1.0, 1.0, 2.0, 13)
    fine = Cost("fine", 99.9, 1.25, 2.0, 12)
    assert [cost.fits for cost in (slow, dear, fine)] == [False, False, True]
    assert pages.table([fine]).splitlines()[-1] == "| fine | 99.9 | 3.2 | 1.2 | 2.0 | 12 |"
