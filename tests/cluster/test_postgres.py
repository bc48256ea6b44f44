"""A primary with a synchronous standby, under load: the primary is killed, the standby is promoted."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from busload import WorkerSettings
from examples.cluster.app import LEDGER, application, create
from tests.brokers.cluster import Node, heard
from tests.brokers.standby import cut_off, multi_host_dsn, promote, run_primary_and_standby
from tests.cluster.story import LONGEST, SIZE, WITHIN, Hosts, each_was_run_once, under_way
from tests.given import Database, eventually
from tests.servers import shared_server

UNCONFIRMED = """
    SELECT count(*) FROM pg_stat_activity
     WHERE query LIKE 'WITH sent AS ( INSERT INTO busload.command %'
       AND (wait_event = 'SyncRep' OR wait_event_type = 'Lock')"""
"""Single sends that wait for the standby, or for one that notifies and waits for it."""


@pytest.fixture
def pair() -> list[Node]:
    return heard(shared_server("standby", run_primary_and_standby))


@pytest.mark.timeout(LONGEST)
async def test_what_was_acknowledged_outlives_the_primary(pair: list[Node], worker_settings: WorkerSettings) -> None:
    """The same bus and the same workers go on by a DSN of two hosts; no command is lost, none has an effect twice."""
    primary, standby = pair
    dsn = multi_host_dsn(pair)
    async with application(dsn) as bus:
        await bus.migrate()
    with psycopg.connect(dsn) as conn:
        conn.execute(LEDGER.encode())
    hosts = Hosts(dsn, None, worker_settings)
    async with hosts.running():
        enough = asyncio.Event()
        sending = asyncio.create_task(hosts.send())
        sending_single_ones = asyncio.create_task(hosts.send_single_ones(enough))
        with Database(primary.url) as database:
            await under_way(database)
            cut_off(primary)
            try:
                await eventually(lambda: database.value(UNCONFIRMED), within=WITHIN)
            finally:
                primary.kill()  # with a send that nobody else has: it was not acknowledged, and is lost
        await asyncio.to_thread(promote, standby)
        batch_ids = await sending
        await create(hosts.bus, batch_ids[0], SIZE)  # as if its answer had been lost
        enough.set()
        single_ones = await sending_single_ones
        with Database(dsn) as database:
            await each_was_run_once(database, batch_ids, single_ones)
