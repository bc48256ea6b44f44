"""The application of `busload demo`: an ordinary module with a bus and its handlers, as yours would be.

It pays invoices at banks that exist only here, and it has two releases, because the first one has a bug:

    busload worker busload.cli.demo_app:first_release --processes 2
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from busload import (
    BusinessRuleError,
    Command,
    CommandBus,
    HandlerContext,
    PermanentCommandError,
    RetryPolicy,
    TransientCommandError,
)
from busload.cli.demo import DOMAIN, LIMIT


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
