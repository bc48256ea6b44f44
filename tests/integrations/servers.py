"""Web servers of the examples: real processes on a free port of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.given import until
from tests.servers import free_ports

ROOT = Path(__file__).parents[2]


@contextmanager
def running(
    words: Sequence[str], dsn: str, said: Path, *, cwd: Path = ROOT, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `python words...`, and tell it to stop at the end; it must end well. A warning is an error."""
    own = {**os.environ, "BUSLOAD_DATABASE_URL": dsn, "PYTHONWARNINGS": "error", **(environment or {})}
    with said.open("wb") as output:
        process = subprocess.Popen([sys.executable, *words], cwd=cwd, env=own, stdout=output, stderr=output)
    try:
        yield process
        process.terminate()
        process.wait(30)
    finally:
        process.kill()
        process.wait()


@contextmanager
def serving(
    words: Sequence[str], dsn: str, said: Path, *, cwd: Path = ROOT, environment: Mapping[str, str] | None = None
) -> Iterator[httpx.Client]:
    """Run a web server; `PORT` in its words stands for a free one. The client is there once the server answers."""
    [port] = free_ports(1)
    own = [word.replace("PORT", str(port)) for word in words]
    with (
        running(own, dsn, said, cwd=cwd, environment=environment) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http,
    ):

        def answers() -> bool:
            assert process.poll() is None, said.read_text()
            try:
                http.get("/healthz")
            except httpx.TransportError:
                return False
            return True

        until(answers)
        yield http
