"""What pages cost: how many statements each needs. `bench.pages` measures their time in a large database."""

from __future__ import annotations

import httpx
import pytest

from bench import pages
from bench.pages import MOST_STATEMENTS, Cost
from busload import BatchCommand, CommandBus, PermanentCommandError
from busload.explain import reading
from busload.jobs.job import BatchJob, Stage
from tests.given import DOMAIN, Given, raising


async def test_no_page_needs_more_than_twelve_statements(
    bus: CommandBus, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", "busload")
    found = await pages.fill(bus, dsn, commands=200, batches=20, troubled=40)
    needed = await pages.count_all(bus, found)
    assert len(needed) > 35
    assert {name: count for name, count in needed.items() if count > MOST_STATEMENTS} == {}


async def test_a_batch_of_jobs_over_several_domains_is_explained_in_twelve_statements(
    bus: CommandBus, given: Given, site: httpx.AsyncClient
) -> None:
    """The dearest batch: its jobs run, wait for a retry, for a person and for a planner, in domains of their own."""
    domains = [DOMAIN, *(f"crm_{number}" for number in range(12))]
    for domain in domains:
        bus.handler(domain, "Again")(raising(RuntimeError("busy")))
        bus.handler(domain, "Refuse")(raising(PermanentCommandError("closed")))
        bus.handler(domain, "Pay")(raising(RuntimeError("never runs here")))
    given.handler("Load")
    bus.planner(DOMAIN, "plan")(raising(PermanentCommandError("no plan")))
    types = ("Again", "Refuse")
    wide = Stage("load", [BatchCommand(one, domain=domain) for domain in domains for one in types])
    planned = BatchJob([Stage("first", [BatchCommand("Load")]), Stage("plan")])
    batch_id = await bus.jobs.create_batch(DOMAIN, [*(BatchJob([wide]) for _ in range(3)), planned])
    await given.drained(domains=domains)
    late = Stage("load", [BatchCommand("Pay", domain=domain) for domain in domains])
    open_batch = await bus.jobs.create_batch(DOMAIN, [BatchJob([late])])
    given.claimed(1)
    await site.get("/")  # the first one also looks at the schema
    asked = set()
    for one in (batch_id, open_batch):
        with pages.counted() as sent:
            assert (await site.get(f"/batches/{one}/why")).status_code == 200
        assert len(sent) <= MOST_STATEMENTS
        asked |= set(sent)
    assert {reading.SQL.causes, reading.SQL.parked, reading.SQL.running, reading.SQL.commands} <= asked


def test_the_table_says_what_each_page_costs() -> None:
    slow, dear = Cost("slow", 100.0, 1.0, 2.0, 12), Cost("dear", 1.0, 1.0, 2.0, 13)
    fine = Cost("fine", 99.9, 1.25, 2.0, 12)
    assert [cost.fits for cost in (slow, dear, fine)] == [False, False, True]
    assert pages.table([fine]).splitlines()[-1] == "| fine | 99.9 | 3.2 | 1.2 | 2.0 | 12 |"
