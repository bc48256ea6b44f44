"""Wall time and CPU time of a stretch of work, on both sides of the connection.

On a machine that others use too, CPU seconds are the steadier figure: they say what a command costs, not how long it
had to wait for a processor.
"""

from __future__ import annotations

import gc
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psycopg

from bench.case import Measured

TICK = os.sysconf("SC_CLK_TCK")
LEAVING = 0.1
"""Seconds in which connections that were closed at the end take their leave; an idle server uses next to nothing."""


@dataclass(slots=True)
class Lap:
    seconds: float = 0.0
    client_cpu: float = 0.0
    server_cpu: float | None = None

    def measured(
        self, count: int, *, latencies: Sequence[float] = (), facts: Mapping[str, float] | None = None
    ) -> Measured:
        """What so many took; `facts` are other figures."""
        return Measured(count, self.seconds, self.client_cpu, self.server_cpu, latencies, facts or {})


@contextmanager
def timed(dsn: str) -> Iterator[Lap]:
    """Measure the block, right after a checkpoint so that every run meets the same WAL traffic."""
    server = settle_down(dsn)
    gc.collect()
    lap = Lap()
    client_cpu, server_cpu, began = _cpu_of_family(os.getpid()), _server_cpu(server), time.perf_counter()
    yield lap
    lap.seconds = time.perf_counter() - began
    time.sleep(LEAVING)
    lap.client_cpu = (_cpu_of_family(os.getpid()) or 0.0) - (client_cpu or 0.0)
    after = _server_cpu(server)
    if server_cpu is not None and after is not None:
        lap.server_cpu = after - server_cpu


def settle_down(dsn: str) -> int | None:
    """Write out what earlier work left behind, and say which process is the server's, if it runs here."""
    if dsn.startswith("redis://"):
        return _redis_process(dsn)
    if dsn.startswith("amqp://"):
        return None  # RabbitMQ does not say which process it is
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("CHECKPOINT")
        try:
            return int(_stat(conn.info.backend_pid)[1])
        except OSError:
            return None


def _redis_process(url: str) -> int:
    """Redis answers `INFO` without any library; it writes its log as it goes, so there is nothing to wait for."""
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port), timeout=10) as conn:
        conn.sendall(b"INFO server\r\n")
        found = re.search(rb"process_id:(\d+)", conn.recv(65536))
    assert found is not None
    return int(found[1])


def _server_cpu(postmaster: int | None) -> float | None:
    return None if postmaster is None else _cpu_of_family(postmaster)


def _cpu_of_family(pid: int) -> float | None:
    """CPU seconds of a process, its living children and those it has buried.

    A child that ends while we look would be missed among the living and among the buried, with all it ever used, so
    this looks again until nobody came or went.
    """
    try:
        while True:
            before = _buried(pid), sorted(_children(pid))
            living = sum(map(_cpu, (pid, *before[1])))
            if before == (_buried(pid), sorted(_children(pid))):
                return before[0] + living
    except OSError:
        return None


def _buried(pid: int) -> float:
    return sum(map(int, _stat(pid)[13:15])) / TICK


def _cpu(pid: int) -> float:
    """CPU seconds of a process, those of its threads that have ended too: to the nanosecond where the kernel tells.

    Of others it tells that for threads that live, and of the whole in ticks: also of one that has just ended, until its
    parent has buried it.
    """
    if pid == os.getpid():
        return time.process_time()
    living = whole = 0.0
    with suppress(OSError):  # it ended just now: the family has changed, and is looked at again
        threads = [thread / "schedstat" for thread in Path(f"/proc/{pid}/task").iterdir()]
        living = sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9
    with suppress(OSError):
        whole = sum(map(int, _stat(pid)[11:13])) / TICK
    return max(living, whole)


def _children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]


def _stat(pid: int) -> list[str]:
    """The fields after the name of the program, which may hold anything: state, parent, …, user and system time."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
