"""Three servers of NATS with three replicas, under load: the one that leads, and is connected to, is killed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest

from busload import WorkerSettings
from examples.cluster.app import LEDGER
from tests.brokers.cluster import Node, heard
from tests.brokers.nats_cluster import cluster_url, connections, make_leader, run_nats_cluster, stream_leader
from tests.cluster.story import LONGEST, QUEUE, WITHIN, Hosts, each_was_run_once, under_way
from tests.given import Database, eventually
from tests.servers import shared_server

STREAM = QUEUE.replace(".", "~")


@pytest.fixture
def nodes() -> list[Node]:
    return heard(shared_server("nats-cluster", run_nats_cluster))


@pytest.mark.timeout(LONGEST)
async def test_a_node_dies_and_all_commands_are_run_once(
    nodes: list[Node], dsn: str, database: Database, worker_settings: WorkerSettings
) -> None:
    """Workers hardly poll here: what is done after the kill was delivered by those that are left."""
    database.rows(LEDGER)
    url = cluster_url(nodes, "replicas=3&ack_wait=2&timeout=3")
    hosts = Hosts(dsn, url, replace(worker_settings, broker_poll_every=timedelta(minutes=1)))
    async with hosts.running():
        await eventually(hosts.connected, within=WITHIN)
        victim = max(nodes, key=connections)
        async with asyncio.timeout(WITHIN):
            await make_leader(victim, STREAM)
        sending = asyncio.create_task(hosts.send())
        await under_way(database)
        victim.kill()
        before = hosts.claimed()
        batch_ids = await sending
        await each_was_run_once(database, batch_ids)
        assert hosts.claimed() > before
        await hosts.nothing_is_left()
        survivor = next(node for node in nodes if node != victim)
        async with asyncio.timeout(WITHIN):
            assert await stream_leader(survivor, STREAM) != victim.name
