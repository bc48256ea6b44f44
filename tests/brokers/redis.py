"""Redis for the tests: one for the whole run, and one for a test alone."""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import pytest

from tests.brokers.server import OwnServer
from tests.servers import free_ports, running, shared_server, wait_for_port

PASSWORD = "let-us-in"


class RedisServer(OwnServer):
    """Keeps what it has confirmed, also when it is killed; `options` are added to its command line."""

    def __init__(self, folder: Path, *options: str) -> None:
        super().__init__(folder)
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._options = options

    def command(self) -> Sequence[str | Path]:
        return [*_command(self.port, self.folder), "--appendonly", "yes", "--appendfsync", "always", *self._options]

    def is_ready(self) -> bool:
        """It listens before it has read its files; behind TLS it does not listen to us, but it is there."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=2) as probe:
                probe.sendall(b"PING\r\n")
                return not probe.recv(100).startswith(b"-LOADING")
        except ConnectionResetError:
            return True
        except OSError:
            return False

    def with_options(self, *options: str) -> Self:
        self._options += options
        return self


@contextlib.contextmanager
def run_redis(home: Path) -> Iterator[str]:
    [port] = free_ports(1)
    with running([*_command(port, home), "--requirepass", PASSWORD]) as process:
        wait_for_port(port, process)
        yield f"redis://:{PASSWORD}@127.0.0.1:{port}/0"


@pytest.fixture(scope="session")
def redis_url() -> str:
    """Where Redis is. Give each test queues of its own."""
    return shared_server("redis", run_redis)


def _command(port: int, folder: Path) -> list[str | Path]:
    binary = shutil.which("redis-server")
    if binary is None:
        raise RuntimeError("redis-server is not installed: `make test` does it, see scripts/install-servers.sh")
    return [binary, "--bind", "127.0.0.1", "--port", str(port), "--dir", folder, "--save", ""]
