"""Three nodes of RabbitMQ that make one cluster, with a name server of their own."""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.brokers.cluster import Node, told
from tests.brokers.rabbitmq import CONTROL
from tests.servers import EPMD, RABBITMQ, free_ports, rabbitmq_environment, running, wait_for_port

COUNT = 3


@contextlib.contextmanager
def run_rabbitmq_cluster(home: Path) -> Iterator[str]:
    """The nodes in the order in which clients try them, if they are given `cluster_url`."""
    names, *ports = free_ports(1 + 2 * COUNT)
    environments = _environments(home, names, ports[:COUNT], ports[COUNT:])
    with contextlib.ExitStack() as stack:
        stack.enter_context(running([EPMD, "-port", str(names), "-address", "127.0.0.1"], quickly=True))
        brokers = [
            stack.enter_context(running([RABBITMQ], env=each, cwd=each["HOME"], quickly=True)) for each in environments
        ]
        nodes = []
        for environment, port, broker in zip(environments, ports, brokers, strict=False):
            wait_for_port(port, broker)
            url = f"amqp://guest:guest@127.0.0.1:{port}/"
            nodes.append(Node(environment["RABBITMQ_NODENAME"], url, broker.pid, json.dumps(environment)))
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda node: _join(node, nodes[0]), nodes[1:]))
        yield told(nodes)


def cluster_url(nodes: Sequence[Node]) -> str:
    """One URL for all: the first that answers is taken."""
    first, *others = nodes
    return f"{first.url}?hosts={','.join(node.url.rpartition('@')[2].strip('/') for node in others)}"


def queue_leader(asked: Node, queue: str) -> str:
    """The name of the node that leads a queue."""
    said = control(asked, "list_queues", "--formatter", "json", "name", "leader")
    [leader] = [str(each["leader"]) for each in json.loads(said) if each["name"] == queue]
    return leader


def control(asked: Node, *command: str) -> str:
    """As an administrator does; takes a second."""
    done = subprocess.run(
        [str(CONTROL), "--quiet", *command], env=json.loads(asked.admin), check=True, capture_output=True, text=True
    )
    return done.stdout


def _environments(home: Path, names: int, ports: Sequence[int], distributions: Sequence[int]) -> list[dict[str, str]]:
    """Of each node: its own ports and folders, and the same cookie."""
    cookie = secrets.token_hex(16)
    environments: list[dict[str, str]] = []
    for number, (port, distribution) in enumerate(zip(ports, distributions, strict=True)):
        folder = home / f"node-{number}"
        folder.mkdir(parents=True)
        (folder / ".erlang.cookie").write_text(cookie)
        (folder / ".erlang.cookie").chmod(0o400)
        environments.append(rabbitmq_environment(folder, port, distribution, names))
    return environments


def _join(node: Node, first: Node) -> None:
    """Three commands of an administrator in one, which saves seconds."""
    control(node, "eval", f"rabbit:stop(), ok = rabbit_mnesia:join_cluster('{first.name}', disc), rabbit:start().")
