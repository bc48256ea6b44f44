"""Typed data, handles, a lifespan and middleware: what type checkers see, and what a worker opens for its handlers."""

import asyncio
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import date

import msgspec

from busload import Command, CommandBus, HandlerContext, InvalidCommandError, RetryPolicy, Worker
from busload.handlers import CommandFailure

bus = CommandBus()
tenant: ContextVar[str] = ContextVar("tenant")


class Invoice(msgspec.Struct):
    number: int
    due: date
    cents: int


@dataclass
class Resources:
    """In your application: an HTTP client, an engine of SQLAlchemy."""

    bank: str


@bus.lifespan
async def resources() -> AsyncIterator[Resources]:
    yield Resources(bank="First Bank")


@bus.middleware
async def know_tenant(command: Command, ctx: HandlerContext) -> AsyncIterator[None]:
    tenant.set(ctx.headers.get("tenant", "nobody"))
    yield


@bus.on_failure
async def tell(failure: CommandFailure) -> None:
    print(f"{failure.command_type} is {failure.status}: {failure.error_type}")


@bus.command("dunning", "Pay", retry=RetryPolicy.exponential(rules={LookupError: "permanent"}))
async def pay(invoice: Invoice, ctx: HandlerContext) -> str:
    if invoice.cents > 100_000:
        raise LookupError("no such limit")
    return f"paid {invoice.cents} for {tenant.get()} at {ctx.state.bank}, due {invoice.due:%d.%m.}"


@bus.command("dunning", "Remind")
async def remind(ctx: HandlerContext, number: int, *, times: int = 1) -> int:
    return number * times


async def main() -> None:
    async with bus:
        await bus.migrate()
        one = Invoice(number=1, due=date(2026, 3, 1), cents=990)
        sent = await pay.options(headers={"tenant": "acme"}).send(one)
        await pay.send(Invoice(number=2, due=date(2026, 3, 1), cents=990_000))
        reminder = await remind.send(number=7, times=2)
        try:
            await bus.send("dunning", "Pay", {"number": 3, "due": "soon", "cents": 1})
        except InvalidCommandError as error:
            print(error.problems[0].code, error.problems[0].path)
        async with Worker(bus):
            print(await bus.wait_command("dunning", sent.command_id, timeout=60))
            print(await bus.wait_command("dunning", reminder.command_id, timeout=60))


if __name__ == "__main__":
    asyncio.run(main())
