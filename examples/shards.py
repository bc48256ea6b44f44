"""One bus over two databases: payments have one to themselves, all other domains share the second.

    python examples/shards.py

Each database here is an embedded PostgreSQL of its own. In an application both DSNs come from its configuration.
"""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import ExitStack
from pathlib import Path

from busload import BatchCommand, Command, CommandBus, HandlerContext, InvalidCommandError, Worker
from busload.postgres.embedded.server import EmbeddedPostgres


def application(payments: str, rest: str) -> CommandBus:
    bus = CommandBus({"payments": payments, "*": rest})

    @bus.handler("payments", "Pay")
    async def pay(command: Command, ctx: HandlerContext) -> None:
        if command.data["n"] == 1:
            await bus.send("mail", "Thank")  # by the bus of the application: mail lives in the other database

    @bus.handler("mail", "Thank")
    async def thank(command: Command, ctx: HandlerContext) -> None:
        print("A mail says thank you.")

    return bus


async def main(payments: str, rest: str) -> None:
    async with application(payments, rest) as bus:
        await bus.migrate()
        batch_id = await bus.create_batch("payments", [BatchCommand("Pay", data={"n": n}) for n in range(100)])
        try:
            await bus.create_batch("payments", [BatchCommand("Thank", domain="mail")])
        except InvalidCommandError as error:
            print(f"Refused: {error.problems[0].code}")

        # In production: `busload worker app:bus`, one process for both databases.
        settled = await Worker(bus).drain()
        batch = await bus.get_batch(None, batch_id)
        assert batch is not None
        print(f"{settled} commands ran; the batch of payments: {batch.status}, {batch.completed_count} of 100")
        for shard in bus.shards:
            print(f"A database with {sum(1 for _ in await shard.list_commands(limit=1000))} commands")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        Path(folder).chmod(0o755)
        servers = [stack.enter_context(EmbeddedPostgres(Path(folder) / name)) for name in ("payments", "rest")]
        asyncio.run(main(servers[0].dsn(), servers[1].dsn()))
        for server in servers:
            server.stop()
