"""Three servers of NATS, for whoever wants to know and decide which one leads."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nats
import nats.errors

from tests.brokers.cluster import Node, told
from tests.brokers.nats import nats_cluster

COUNT = 3


@contextlib.contextmanager
def run_nats_cluster(home: Path) -> Iterator[str]:
    with nats_cluster(home, COUNT) as servers:
        yield told(
            [
                Node(f"node-{number}", server.url, server.pid, f"http://127.0.0.1:{server.monitoring}")
                for number, server in enumerate(servers)
            ]
        )


def cluster_url(nodes: Sequence[Node], options: str = "replicas=3") -> str:
    """One URL for all: any that answers is taken."""
    return f"nats://{','.join(node.url.removeprefix('nats://') for node in nodes)}?{options}"


def connections(node: Node) -> int:
    """How many of ours."""
    with urllib.request.urlopen(f"{node.admin}/connz", timeout=5) as answer:
        found = json.load(answer)["connections"]
    return sum(each.get("name") == "busload" for each in found)


async def stream_leader(asked: Node, stream: str) -> str:
    """The name of the node that leads a stream; waits while one is elected."""
    while True:
        answer = await _ask(asked, f"STREAM.INFO.{stream}")
        if leader := answer.get("cluster", {}).get("leader"):
            return str(leader)


async def make_leader(node: Node, stream: str) -> None:
    while await stream_leader(node, stream) != node.name:
        await _ask(node, f"STREAM.LEADER.STEPDOWN.{stream}", {"placement": {"preferred": node.name}})


async def _ask(node: Node, subject: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
    """Nothing is answered while nobody leads."""
    client = await nats.connect(node.url)
    try:
        answer = await client.request(f"$JS.API.{subject}", json.dumps(payload or {}).encode(), timeout=2)
    except (nats.errors.TimeoutError, nats.errors.NoRespondersError):
        return {}
    finally:
        await client.close()
    found: dict[str, Any] = json.loads(answer.data)
    return found
