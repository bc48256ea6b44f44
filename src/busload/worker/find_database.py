"""How a worker that starts finds its database."""

from __future__ import annotations

from datetime import timedelta

from busload.bus import CommandBus
from busload.postgres.connection import connection_errors_explained
from busload.postgres.own_connection import connect_within_async


class StoppedEarlyError(Exception):
    """The worker was told to stop before it had found its database."""


async def find_database(bus: CommandBus, wait_for: timedelta | None) -> None:
    """Wait for a database that is away; one that cannot be used is refused at once."""
    seconds = None if wait_for is None else wait_for.total_seconds()
    with connection_errors_explained(bus.dsn, "wait_for_database (--wait) says how long a worker waits for it"):
        conn = await connect_within_async(bus.dsn, seconds)
    async with conn:
        await bus.database.check_schema(conn)
