"""Why is this batch not finished? One call says what is in the way, and what to do about it.

python examples/explain.py
"""

from __future__ import annotations

import asyncio
from uuid import UUID

from busload import BatchCommand, Command, CommandBus, HandlerContext, PermanentCommandError, RetryPolicy, Worker

bus = CommandBus()


@bus.handler("savings", "Debit")
async def debit(command: Command, ctx: HandlerContext) -> None:
    pass


@bus.handler("savings", "Refund", retry=RetryPolicy(max_attempts=5, backoff=(3600,)))
async def refund(command: Command, ctx: HandlerContext) -> None:
    if command.data["account"] == "A-1":
        raise PermanentCommandError("Account A-1 is closed.", code="CLOSED")
    raise ConnectionError("The bank did not answer.")  # an unknown error is tried again, here after an hour


async def explain(batch_id: UUID) -> None:
    explanation = await bus.explain_batch("savings", batch_id)
    print(explanation.summary)
    for reason in explanation.reasons:
        print(f"  {reason.code} {reason.count}: {reason.message}")
        print(f"    {reason.advice}")


async def main() -> None:
    async with bus:
        await bus.migrate()
        commands = [BatchCommand("Debit") for _ in range(7)]
        commands += [BatchCommand("Refund", data={"account": f"A-{n}"}) for n in range(1, 4)]
        commands += [BatchCommand("Report")]
        batch_id = await bus.create_batch("savings", commands)
        await explain(batch_id)

        await bus.domains.pause("savings", reason="the bank is down", operator="rosa")
        assert await Worker(bus).drain() == 0  # nothing starts
        await explain(batch_id)

        await bus.domains.resume("savings", operator="rosa")
        await Worker(bus).drain()
        await explain(batch_id)


if __name__ == "__main__":
    asyncio.run(main())
