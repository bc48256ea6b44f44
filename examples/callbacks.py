"""Be told when a batch completes: by a command that survives every crash, or by a function of this process.

python examples/callbacks.py
"""

from __future__ import annotations

import asyncio

from busload import BatchCommand, BatchMetadata, Command, CommandBus, HandlerContext, Worker

bus = CommandBus()


@bus.handler("reports", "RenderPage")
async def render(command: Command, ctx: HandlerContext) -> None:
    pass


@bus.handler("reports", "MailReport")
async def mail(command: Command, ctx: HandlerContext) -> None:
    """The callback is a command like any other: it has retries, and the batch is in its data."""
    batch = command.data["batch"]
    print(f"Mail to {command.data['to']}: {batch['name']} is {batch['status']}, {batch['completed_count']} pages")


async def main() -> None:
    pages = [BatchCommand("RenderPage", data={"page": n}) for n in range(100)]
    called = asyncio.Event()

    async def on_complete(batch: BatchMetadata) -> None:
        print(f"This process hears: {batch.name} is {batch.status}")
        called.set()

    async with bus:
        await bus.migrate()

        # Durable: inserted by the transaction that ends the last command, whichever process that is.
        await bus.create_batch(
            "reports", pages, name="March", on_complete=BatchCommand("MailReport", data={"to": "cfo@example.com"})
        )
        # Best effort: for progress bars and the like; it lives and dies with this process.
        await bus.create_batch("reports", pages, name="April", on_complete=on_complete)

        await Worker(bus).drain()
        await asyncio.wait_for(called.wait(), 30)


if __name__ == "__main__":
    asyncio.run(main())
