"""Create a batch, run it, look at the counters.

    python examples/quickstart.py

Without BUSLOAD_DATABASE_URL an embedded PostgreSQL starts, and stops again with this script.
"""

from __future__ import annotations

import asyncio

from busload import BatchCommand, Command, CommandBus, HandlerContext, Worker

bus = CommandBus()


@bus.handler("payments", "DebitAccount")
async def debit(command: Command, ctx: HandlerContext) -> dict[str, int]:
    """What a handler returns is kept as the result of its command."""
    return {"debited": command.data["amount"]}


async def main() -> None:
    async with bus:
        await bus.migrate()
        batch_id = await bus.create_batch(
            "payments",
            [BatchCommand("DebitAccount", data={"account": n, "amount": 10}) for n in range(1000)],
            name="Monthly billing",
        )

        # In an application this is another process: `busload worker examples.quickstart:bus`.
        await Worker(bus).drain()

        batch = await bus.wait_batch("payments", batch_id, timeout=30)
        print(f"{batch.name}: {batch.status}, {batch.completed_count} of {batch.total_count} completed")

        [first] = await bus.list_batch_commands("payments", batch_id, limit=1)
        print(f"The first one: {first.status}, attempt {first.attempts}, result {first.result}")


if __name__ == "__main__":
    asyncio.run(main())
