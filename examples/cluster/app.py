"""What runs on every host: `busload worker examples.cluster.app:bus`, wherever BUSLOAD_DATABASE_URL and
BUSLOAD_TRANSPORT_URL name all servers of a cluster."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from typing import TypeVar
from uuid import UUID, uuid5

import psycopg

from busload import BatchCommand, BatchMetadata, Chunk, ChunkContext, CommandBus, DuplicateCommandError, RetryPolicy
from busload.errors import InvalidOperationError, OutcomeUnknownError

DOMAIN = "transfers"
LEDGER = "CREATE TABLE IF NOT EXISTS ledger (command_id uuid NOT NULL, host text NOT NULL)"
NOTE = "INSERT INTO ledger (command_id, host) VALUES (%s, %s)"

T = TypeVar("T")


def application(dsn: str | None = None, transport: str | None = None, host: str | None = None) -> CommandBus:
    bus = CommandBus(dsn, transport=transport)
    host = host or f"{socket.gethostname()}:{os.getpid()}"

    @bus.bulk_handler(DOMAIN, "Debit", size=20, max_wait=0.05, retry=RetryPolicy(max_attempts=20, backoff=(0.5,)))
    async def debit(chunk: Chunk, ctx: ChunkContext) -> None:
        """The notes and the completions are one transaction: whatever dies, a command has both or neither."""
        async with ctx.transaction() as conn:
            await conn.cursor().executemany(NOTE, [(item.id, host) for item in chunk])

    return bus


bus = application()


def commands(batch_id: UUID, size: int) -> list[BatchCommand]:
    """Their ids follow from that of the batch: asked for twice, they are the same ones."""
    return [BatchCommand("Debit", uuid5(batch_id, str(number)), {"number": number}) for number in range(size)]


async def create(bus: CommandBus, batch_id: UUID, size: int) -> None:
    """Return once the batch is accepted, which it is once, however often that has to be asked for."""
    try:
        await insist(lambda: bus.create_batch(DOMAIN, commands(batch_id, size), batch_id=batch_id))
    except (DuplicateCommandError, InvalidOperationError):  # an earlier call was accepted, and its answer was lost
        if await insist(lambda: bus.get_batch(DOMAIN, batch_id)) is None:
            raise


async def completed(bus: CommandBus, batch_id: UUID) -> BatchMetadata:
    return await insist(lambda: bus.wait_batch(DOMAIN, batch_id))


async def insist(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask until the database answers; for calls that may be repeated."""
    while True:
        try:
            return await ask()
        except (psycopg.OperationalError, OutcomeUnknownError):
            await asyncio.sleep(0.1)
