"""Two workers run commands while one server of a cluster is killed: python -m examples.cluster nats|rabbitmq|postgres

Run it where this repository is checked out, after `make test` has installed the servers once. It starts all servers on
loopback, with a PostgreSQL of its own, and stops them again.
"""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from uuid import uuid4

from busload import CommandBus
from examples.cluster.app import LEDGER, completed, create, insist
from examples.cluster.servers import CLUSTERS
from tests.brokers.cluster import heard
from tests.servers import own_server

BATCH = 100


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.cluster", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("cluster", choices=CLUSTERS)
    parser.add_argument("--commands", type=int, default=5000, help="how many to send, in batches of 100")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that nothing is left behind
    cluster = CLUSTERS[chosen.cluster]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        home.chmod(0o755)  # root's PostgreSQL runs as another user
        with own_server(home / "cluster", cluster.recipe) as started:
            nodes = heard(started)
            print(f"Servers: {', '.join(node.name for node in nodes)}")
            os.environ.pop("BUSLOAD_DATABASE_URL", None)
            os.environ |= {"BUSLOAD_HOME": str(home / "database"), **cluster.environment(nodes)}
            asyncio.run(story(partial(cluster.kill, nodes), max(chosen.commands // BATCH, 2)))


async def story(kill: Callable[[], str], batches: int) -> None:
    async with CommandBus() as bus:
        await bus.migrate()
        async with bus.pool.connection() as conn:
            await conn.execute(LEDGER.encode())
        with workers(2):
            batch_ids = [uuid4() for _ in range(batches)]
            for batch_id in batch_ids[: batches // 2]:
                await create(bus, batch_id, BATCH)
            await completed(bus, batch_ids[0])
            print(await asyncio.to_thread(kill))
            for batch_id in batch_ids[batches // 2 :]:
                await create(bus, batch_id, BATCH)
            ended = [await completed(bus, batch_id) for batch_id in batch_ids]
        print(f"{sum(batch.completed_count for batch in ended)} of {batches * BATCH} commands are completed")
        noted, once, hosts = await insist(lambda: ledger(bus))
        print(f"The ledger has {noted} notes about {once} commands, by {hosts} of 2 workers")


async def ledger(bus: CommandBus) -> tuple[int, int, int]:
    async with bus.pool.connection() as conn:
        cursor = await conn.execute("SELECT count(*), count(DISTINCT command_id), count(DISTINCT host) FROM ledger")
        row = await cursor.fetchone()
        assert row is not None
        return row[0], row[1], row[2]


@contextmanager
def workers(count: int) -> Iterator[None]:
    """As they would be started on each host. They tell on stderr what they lack."""
    command = [sys.executable, "-m", "busload.cli", "worker", "examples.cluster.app:bus", "--log-level", "warning"]
    running = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


if __name__ == "__main__":
    main()
