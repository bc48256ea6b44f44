"""The invoices that `busload demo` pays: apart from its application, which needs a broker that can be used."""

from __future__ import annotations

import random
from typing import Any

from busload import BatchCommand

DOMAIN = "demo"

# What an invoice of 10,000 may have about it, and how many of them do; at least one of each.
ODDITIES: tuple[tuple[dict[str, Any], int], ...] = (
    ({"bank": "busy"}, 200),  # asks us to come back, and then pays
    ({"country": "MT"}, 12),  # the first release cannot check accounts in Malta
    ({"bank": "moved"}, 5),  # the first release calls it at its old address
    ({"payee": "closed"}, 5),  # somebody has to pay these in another way
    ({"copy": True}, 3),  # nobody should pay these
    ({"amount": 2_000_000}, 10),  # over the limit: refused, and that is that
)
LIMIT = 1_000_000


def invoices(count: int) -> list[BatchCommand]:
    """Invoices to pay; the odd ones lie scattered among them."""
    chance = random.Random(count)  # noqa: S311 - nothing is secret here
    data = [{"invoice": n, "amount": 1_000 + n % 9_000, "country": "FR", "bank": "north"} for n in range(1, count + 1)]
    wanted = [oddity for oddity, often in ODDITIES for _ in range(max(1, often * count // 10_000))]
    for position, oddity in zip(chance.sample(range(count), len(wanted)), wanted, strict=True):
        data[position] |= oddity
    return [BatchCommand("PayInvoice", data=one) for one in data]
