"""NATS for the tests: one for the whole run, one for a test alone, and a cluster of three."""

from __future__ import annotations

import contextlib
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.brokers.server import OwnServer
from tests.servers import free_ports, running, shared_server, wait_for_port

NATS_SERVER = Path(sys.executable).parent / "nats-server"

USER, PASSWORD = "busload", "let-us-in"


class NatsServer(OwnServer):
    """`configuration` is added to the server's own."""

    def __init__(self, folder: Path, configuration: str = "", *, jetstream: bool = True) -> None:
        super().__init__(folder)
        [self.monitoring] = free_ports(1)
        self.url = f"nats://127.0.0.1:{self.port}"
        store = f'jetstream {{ store_dir: "{folder}" }}' if jetstream else ""
        self._configuration = f"{store}\n{configuration}"

    def command(self) -> Sequence[str | Path]:
        (self.folder / "nats.conf").write_text(
            f'listen: "127.0.0.1:{self.port}"\nhttp: "127.0.0.1:{self.monitoring}"\n{self._configuration}\n'
        )
        return [_binary(), "-c", self.folder / "nats.conf"]

    def is_ready(self) -> bool:
        return self.asked("healthz").get("status") == "ok"

    def asked(self, what: str) -> dict[str, object]:
        """What the server tells about itself."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.monitoring}/{what}", timeout=2) as answer:
                found: dict[str, object] = json.load(answer)
                return found
        except (OSError, urllib.error.HTTPError):
            return {}


@contextlib.contextmanager
def nats_cluster(folder: Path, count: int) -> Iterator[list[NatsServer]]:
    """Servers that know each other and have elected a leader; joined by commas, their hosts make one URL."""
    routes = free_ports(count)
    servers = [
        NatsServer(
            folder / f"node-{number}",
            f"server_name: node-{number}\n"
            f'cluster {{ name: busload, listen: "127.0.0.1:{routes[number]}", '
            f"routes: [{', '.join(f'nats://127.0.0.1:{port}' for port in routes)}] }}",
        )
        for number in range(count)
    ]
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.kill)
        start_together(servers)
        yield servers


def start_together(servers: Sequence[NatsServer]) -> None:
    """None is ready before the others are there: a leader needs a majority."""
    for server in servers:
        server.launch()
    for server in servers:
        server.wait()


def cluster_url(servers: Sequence[NatsServer]) -> str:
    return "nats://" + ",".join(server.url.removeprefix("nats://") for server in servers)


@contextlib.contextmanager
def run_nats(home: Path) -> Iterator[str]:
    [port] = free_ports(1)
    (home / "nats.conf").write_text(
        f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{home}" }}\n'
        f"authorization {{ user: {USER}, password: {PASSWORD} }}\n"
    )
    with running([_binary(), "-c", home / "nats.conf"]) as process:
        wait_for_port(port, process)
        yield f"nats://{USER}:{PASSWORD}@127.0.0.1:{port}"


@pytest.fixture(scope="session")
def nats_url() -> str:
    """Where NATS is. Give each test queues of its own."""
    return shared_server("nats", run_nats)


def _binary() -> Path:
    if not NATS_SERVER.exists():
        raise RuntimeError(f"not in {NATS_SERVER.parent}: `make servers` installs it")
    return NATS_SERVER
