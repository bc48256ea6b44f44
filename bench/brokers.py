"""Brokers of the benchmark's own, started for a run: as durable as PostgreSQL is, where a broker can be.

What it takes to start them is the tests' (`tests/servers.py`, `tests/brokers`); `make bench` installs it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.redis import own_redis

VARIABLE = "BENCH_BROKER_URL"
"""The environment variable by which the processes of a case are told where its broker is."""


def told_url() -> str:
    """In a process of a case: where its broker is."""
    return os.environ[VARIABLE]


@dataclass(frozen=True, slots=True)
class Broker:
    """Where it is, and how a queue is made that clients may not make themselves."""

    url: str
    make_queue: Callable[[str], object] = lambda queue: None


@dataclass(slots=True)
class Brokers:
    """Those that run, and why others do not."""

    running: dict[str, Broker] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


@contextmanager
def own_brokers(names: Sequence[str]) -> Iterator[Brokers]:
    """One that cannot be started keeps none of the others from it."""
    brokers = Brokers()
    with ExitStack() as stack:
        for name in names:
            try:
                brokers.running[name] = stack.enter_context(RECIPES[name]())
            except (ImportError, OSError, RuntimeError) as error:
                brokers.missing[name] = f"{name} could not be started: {error}"
        yield brokers


@contextmanager
def _rabbitmq() -> Iterator[Broker]:
    from tests.servers import EPMD, RABBITMQ, free_ports, rabbitmq_environment, running, wait_for_port

    if not RABBITMQ.exists():
        raise RuntimeError("rabbitmq-server is not installed; `apt-get install rabbitmq-server` brings it")
    port, distribution, names = free_ports(3)
    with _folder("rabbitmq") as home:
        quietly = ["sh", "-c", f"exec {RABBITMQ} >{home}/said.txt 2>&1"]
        with (
            running([EPMD, "-port", str(names), "-address", "127.0.0.1"], quickly=True),
            running(quietly, env=rabbitmq_environment(home, port, distribution, names)) as process,
        ):
            wait_for_port(port, process)
            yield Broker(f"amqp://guest:guest@127.0.0.1:{port}/")


@contextmanager
def _nats() -> Iterator[Broker]:
    """By default it flushes its files every two minutes; here, before it confirms."""
    from tests.brokers.nats import NATS_SERVER
    from tests.servers import free_ports, running, wait_for_port

    if not NATS_SERVER.exists():
        raise RuntimeError("nats-server is not installed; `make servers` installs it")
    [port] = free_ports(1)
    with _folder("nats") as home:
        configuration = home / "nats.conf"
        configuration.write_text(
            f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{home}", sync_interval: always }}\n'
            f'log_file: "{home / "nats.log"}"\n'
        )
        with running([NATS_SERVER, "-c", configuration]) as process:
            wait_for_port(port, process)
            yield Broker(f"nats://127.0.0.1:{port}")


@contextmanager
def _redis() -> Iterator[Broker]:
    if shutil.which("redis-server") is None:
        raise RuntimeError("redis-server is not installed; `apt-get install redis-server` brings it")
    with own_redis() as url:
        yield Broker(url)


@contextmanager
def _servicebus() -> Iterator[Broker]:
    """The look-alike of the tests: it keeps messages in memory, so its figures are those of the SDK."""
    import proton  # noqa: F401 - what the look-alike, a process of its own, is made of

    from tests.brokers.lookalike import ServiceBus

    servicebus = ServiceBus()
    try:
        yield Broker(servicebus.url, servicebus.create)
    finally:
        servicebus.stop()


@contextmanager
def _folder(name: str) -> Iterator[Path]:
    home = Path(tempfile.mkdtemp(prefix=f"busload-bench-{name}-"))
    home.chmod(0o755)
    try:
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


RECIPES: dict[str, Callable[[], AbstractContextManager[Broker]]] = {
    "rabbitmq": _rabbitmq,
    "nats": _nats,
    "redis": _redis,
    "servicebus": _servicebus,
}
