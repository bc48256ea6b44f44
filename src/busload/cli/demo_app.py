"""The application of `busload demo`: an ordinary module with a bus and its handlers, as yours would be.

It pays invoices at banks that exist only here, and it has two releases, because the first one has a bug:

    busload worker busload.cli.demo_app:first_release --processes 2
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from busload import (
    BatchCommand,
    BusinessRuleError,
    Command,
    CommandBus,
    HandlerContext,
    PermanentCommandError,
    RetryPolicy,
    TransientCommandError,
)

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


def _application(*, fixed: bool) -> CommandBus:
    bus = CommandBus()

    @bus.handler(DOMAIN, "PayInvoice", retry=RetryPolicy(max_attempts=3, backoff=(0.2, 0.4)))
    async def pay(command: Command, ctx: HandlerContext) -> dict[str, Any]:
        invoice = command.data
        await asyncio.sleep(random.uniform(0.02, 0.06))  # noqa: S311 - the bank takes its time
        if invoice["amount"] > LIMIT:
            raise BusinessRuleError("the amount is over the limit", code="OVER_LIMIT")
        if invoice["country"] == "MT" and not fixed:
            raise PermanentCommandError("no rule for MT", code="UNKNOWN_COUNTRY")
        if invoice.get("payee") == "closed":
            raise PermanentCommandError("payee has left", code="ACCOUNT_CLOSED")
        if invoice.get("copy"):
            raise PermanentCommandError("paid already", code="DUPLICATE")
        if invoice["bank"] == "moved" and not fixed:
            raise TransientCommandError("the bank is silent", code="NO_ANSWER")
        if invoice["bank"] == "busy" and ctx.attempt == 1:
            raise TransientCommandError("the bank is busy", code="BANK_BUSY")
        return {"paid": invoice["amount"]}

    @bus.handler(DOMAIN, "ReportPayments")
    async def report(command: Command, ctx: HandlerContext) -> dict[str, Any]:
        batch = command.data["batch"]
        return {"reported": batch["completed_count"], "to": command.data["to"]}

    return bus


first_release = _application(fixed=False)
second_release = _application(fixed=True)
