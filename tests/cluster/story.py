"""One story for every cluster: commands are sent and run while a server dies, and each has its effect once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from uuid import UUID, uuid4

from busload import DuplicateCommandError, Worker, WorkerSettings
from busload.batches.batch import BatchStatus
from examples.cluster.app import DOMAIN, application, commands, completed, create, insist
from tests.given import Database, eventually

COMMANDS, SIZE, SENDERS = 5_000, 100, 5
WITHIN = 120.0
"""Seconds: a lease whose answer was lost with a server lasts half a minute, and a busy machine takes its time."""
LONGEST = 5 * WITHIN
QUEUE = f"busload.{DOMAIN}"


class Hosts:
    """Two workers with connections of their own, as on two machines, and the bus of one who sends."""

    def __init__(self, dsn: str, transport: str | None, settings: WorkerSettings) -> None:
        self._buses = [application(dsn, transport, host=f"host-{number}") for number in range(2)]
        self.workers = [Worker(bus, settings=settings, concurrency=100) for bus in self._buses]
        self.bus = application(dsn, transport)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(worker.run()) for worker in self.workers]
        try:
            async with self.bus:
                yield
        finally:
            for worker, task in zip(self.workers, tasks, strict=True):
                if not task.done():
                    worker.stop()
            await asyncio.gather(*tasks)
            for bus in self._buses:
                await bus.close()

    def connected(self) -> bool:
        """Whether messages come to each."""
        return all(worker.stats.broker is not None and worker.stats.broker.connected for worker in self.workers)

    def claimed(self) -> int:
        """Commands that were claimed because a message came."""
        return sum(worker.stats.broker.claimed for worker in self.workers if worker.stats.broker is not None)

    async def nothing_is_left(self) -> None:
        """Wait until every message has been taken."""
        assert self.bus.transport is not None
        async with asyncio.timeout(WITHIN):
            while await self.bus.transport.depth(QUEUE):
                await asyncio.sleep(0.05)

    async def send(self) -> list[UUID]:
        """Batches by several senders; each waits for its last one, so that all the time some are sent and some run.

        Returns what was acknowledged.
        """
        async with asyncio.timeout(WITHIN):
            sent = await asyncio.gather(*(self._send_some() for _ in range(SENDERS)))
        return [batch_id for some in sent for batch_id in some]

    async def send_single_ones(self, enough: asyncio.Event) -> list[UUID]:
        """One after the other, so that at any moment one is under way; returns what was acknowledged."""
        command_ids: list[UUID] = []
        while not enough.is_set():
            command_ids.append(command_id := uuid4())
            with suppress(DuplicateCommandError):  # an earlier try was accepted, and its answer was lost
                await insist(partial(self.bus.send, DOMAIN, "Debit", command_id=command_id))
        return command_ids

    async def _send_some(self) -> list[UUID]:
        batch_ids = [uuid4() for _ in range(COMMANDS // SIZE // SENDERS)]
        for batch_id in batch_ids:
            await create(self.bus, batch_id, SIZE)
            await completed(self.bus, batch_id)
        return batch_ids


async def under_way(database: Database) -> None:
    """Wait until a quarter has been done: that is when a server dies."""
    await eventually(lambda: database.value("SELECT count(*) >= %s FROM ledger", COMMANDS // 4), within=WITHIN)
    assert database.value("SELECT count(*) FROM ledger") < COMMANDS


async def each_was_run_once(
    database: Database, batch_ids: Sequence[UUID], single_ones: Collection[UUID] = frozenset()
) -> None:
    await eventually(database.is_at_rest, within=WITHIN)
    in_batches = {command.command_id for batch_id in batch_ids for command in commands(batch_id, SIZE)}
    assert len(in_batches) == COMMANDS
    found = [command_id for (command_id,) in database.rows("SELECT command_id FROM ledger")]
    assert set(found) == in_batches.union(single_ones)
    assert len(found) == COMMANDS + len(single_ones)
    batches = database.rows("SELECT batch_id, status, completed_count FROM busload.batch")
    assert sorted(batches) == sorted((batch_id, BatchStatus.COMPLETED, SIZE) for batch_id in batch_ids)
    assert database.rows("SELECT DISTINCT host FROM ledger ORDER BY 1") == [("host-0",), ("host-1",)]
    assert database.count("outbox") == 0
    database.check_invariants()
