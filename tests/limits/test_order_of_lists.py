"""The order of a list: its commands run in it, though they differ in what keeps them from travelling together."""

from __future__ import annotations

import pytest

from busload import BatchCommand
from busload.limits import order
from tests.given import DOMAIN, Database, Given


@pytest.mark.parametrize("count", [30, 3000], ids=["arrays", "copy"])
@pytest.mark.parametrize("way", ["send_many", "create_batch"])
async def test_the_order_of_a_list_counts_though_its_commands_differ(
    given: Given, database: Database, way: str, count: int
) -> None:
    database.perform(order.register_domain(DOMAIN))
    commands = [
        BatchCommand("Debit", data={"n": n}, priority=n // 7 % 3, reply_to="replies" if n // 5 % 2 else None)
        for n in range(count)
    ]
    await getattr(given.bus, way)(DOMAIN, commands)
    found = [n for (n,) in database.rows("SELECT (data ->> 'n')::int FROM busload.command ORDER BY id")]
    assert found == list(range(count))


async def test_a_list_for_several_domains_is_cut_only_where_an_ordered_one_changes(
    given: Given, database: Database
) -> None:
    """Others travel together as before: each load of its own would cost them."""
    database.perform(order.register_domain(DOMAIN))
    commands = [
        BatchCommand("Debit", data={"n": n}, domain=(None, "crm")[n % 2], priority=n // 4 % 2) for n in range(40)
    ]
    await given.bus.create_batch(DOMAIN, commands)
    loads = dict(database.rows("SELECT domain, count(*) FROM busload.queue GROUP BY domain"))
    assert loads == {"crm": 2, DOMAIN: 10}
    ours = "SELECT (data ->> 'n')::int FROM busload.command WHERE domain = %s ORDER BY id"
    assert [n for (n,) in database.rows(ours, DOMAIN)] == list(range(0, 40, 2))
