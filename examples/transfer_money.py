"""Effects exactly once: the handler's own writes and its completion commit in one transaction.

    python examples/transfer_money.py

The first attempt of every transfer moves the money and then fails. Its writes are rolled back with it, so the money
moves once, on the second attempt. The same holds when the worker is killed: nothing of an unfinished attempt stays.
"""

from __future__ import annotations

import asyncio

from busload import BatchCommand, Command, CommandBus, HandlerContext, RetryPolicy, TransientCommandError, Worker

TRANSFERS = 20

bus = CommandBus()


@bus.handler("bank", "Transfer", retry=RetryPolicy(max_attempts=3, backoff=(0,)))
async def transfer(command: Command, ctx: HandlerContext) -> None:
    amount, source, target = command.data["amount"], command.data["from"], command.data["to"]
    async with ctx.transaction() as conn:
        await conn.execute("UPDATE account SET balance = balance - %s WHERE name = %s", [amount, source])
        await conn.execute("UPDATE account SET balance = balance + %s WHERE name = %s", [amount, target])
        await ctx.send("bank", "Receipt", {"amount": amount})  # exists exactly if this attempt completes
        if ctx.attempt == 1:
            raise TransientCommandError("The line broke after the money had moved.")


@bus.handler("bank", "Receipt")
async def receipt(command: Command, ctx: HandlerContext) -> None:
    receipts.append(command.data["amount"])


receipts: list[int] = []


async def main() -> None:
    async with bus:
        await bus.migrate()
        async with bus.pool.connection() as conn:
            await conn.execute("CREATE TABLE IF NOT EXISTS account (name text PRIMARY KEY, balance integer NOT NULL)")
            await conn.execute("TRUNCATE account")
            await conn.execute("INSERT INTO account VALUES ('alice', 1000), ('bob', 0)")

        data = {"from": "alice", "to": "bob", "amount": 5}
        batch_id = await bus.create_batch("bank", [BatchCommand("Transfer", data=data) for _ in range(TRANSFERS)])
        await Worker(bus, concurrency=4).drain()

        batch = await bus.wait_batch("bank", batch_id, timeout=30)
        async with bus.pool.connection() as conn:
            cursor = await conn.execute("SELECT name, balance FROM account ORDER BY name")
            balances: dict[str, int] = dict(await cursor.fetchall())
        print(f"{batch.completed_count} transfers, each tried twice")
        print(f"alice has {balances['alice']}, bob has {balances['bob']}, {len(receipts)} receipts")


if __name__ == "__main__":
    asyncio.run(main())
