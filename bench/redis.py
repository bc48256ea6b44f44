"""A Redis of the benchmark's own, for the peers that need one."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

START = 20.0


@contextmanager
def own_redis() -> Iterator[str]:
    """Its URL. What it accepted survives a crash, as with PostgreSQL: it flushes its log before it answers."""
    folder = tempfile.mkdtemp(prefix="busload-bench-redis-")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {
        "bind": "127.0.0.1",
        "port": str(port),
        "dir": folder,
        "save": "",
        "appendonly": "yes",
        "appendfsync": "always",
        "loglevel": "warning",
    }
    command = ["redis-server", *(word for name, value in options.items() for word in (f"--{name}", value))]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        _wait(server, port)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _wait(server: subprocess.Popen[bytes], port: int) -> None:
    until = time.monotonic() + START
    while server.poll() is None and time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.02)
    raise RuntimeError("redis-server did not start.")
