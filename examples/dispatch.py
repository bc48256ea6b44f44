"""A batch through a broker that is away for a while: nothing is lost, and everybody can see why it waits.

python examples/dispatch.py

The broker is PostgreSQL here, so that the example needs no other server. Yours may be RabbitMQ, NATS, Redis or another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from uuid import UUID

from busload import BatchCommand, Command, CommandBus, HandlerContext, SyncCommandBus, Worker
from busload.errors import PublishError, Refusal, RefusalReason
from busload.transports import Message
from busload.transports.postgresql import PostgresqlTransport


class Unreliable(PostgresqlTransport):
    """It can be switched off."""

    away = False

    async def publish(self, messages: Sequence[Message]) -> None:
        if self.away:
            raise PublishError(dict.fromkeys(range(len(messages)), Refusal(RefusalReason.UNREACHABLE, "It is off.")))
        await super().publish(messages)


async def main(dsn: str) -> None:
    broker = Unreliable(dsn)
    async with CommandBus(dsn, transport=broker) as bus:
        await bus.migrate()

        @bus.handler("payments", "Debit")
        async def debit(command: Command, ctx: HandlerContext) -> None:
            pass

        async def tell(batch: UUID) -> None:
            found = await bus.get_dispatch("payments", batch)
            assert found is not None
            print(f"{found.strategy}: {found.status}, {found.queued_tasks} of {found.database_tasks} published")

        batch = await bus.create_batch("payments", [BatchCommand("Debit") for _ in range(1000)])
        await tell(batch)

        broker.away = True
        batch = await bus.create_batch("payments", [BatchCommand("Debit") for _ in range(500)])
        await tell(batch)
        [reason] = (await bus.explain_batch("payments", batch)).reasons
        print(reason.message)

        broker.away = False
        recovered = await bus.recover()  # a worker that runs does it by itself
        print(f"Recovered {recovered.relayed} commands")
        await tell(batch)
        print(f"{await Worker(bus).drain()} commands have run")


if __name__ == "__main__":
    with SyncCommandBus() as database:
        asyncio.run(main(database.dsn))
