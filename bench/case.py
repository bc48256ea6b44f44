"""One measurement, in a process of its own: `python -m bench.case measure busload/create DSN 20000`.

`prepare` fills the database before the clock runs, `measure` prints what it found as a line of JSON, and `work` is a
helper process that a measurement starts.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Extent = Literal["size", "sends", "singles", "samples", "batch", "hot", "few", "many", "torture"]
Store = Literal["postgresql", "redis", "rabbitmq"]


@dataclass(frozen=True, slots=True)
class Measured:
    """What one run took. CPU is None where the server's processes cannot be seen; `facts` are other figures."""

    count: int
    seconds: float
    client_cpu: float
    server_cpu: float | None
    latencies: Sequence[float] = field(default=(), repr=False)
    facts: Mapping[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return self.count / self.seconds


@dataclass(frozen=True, slots=True)
class Case:
    """Something to measure. `extent` says which number of the run's it is given, `most` how much it can bear.

    `prepare` and `measure` are called with the DSN of a fresh database, with busload's schema if `migrated`, or with
    the URL of another store; each may take `seconds`. Where the `broker` is that they need beside it, they are told by
    `brokers.told_url`. `rounds` is how often it is worth repeating.
    """

    subject: str
    metric: str
    title: str
    measure: Callable[[str, int], Coroutine[Any, Any, Measured]]
    prepare: Callable[[str, int], Coroutine[Any, Any, None]] | None = None
    work: Callable[[str, int], Coroutine[Any, Any, None]] | None = None
    migrated: bool = True
    extent: Extent = "size"
    most: int | None = None
    store: Store = "postgresql"
    broker: str | None = None
    seconds: float = 300
    rounds: int | None = None

    @property
    def key(self) -> str:
        return f"{self.subject}/{self.metric}"

    @property
    def server(self) -> str | None:
        """What has to run beside PostgreSQL."""
        return self.broker or (None if self.store == "postgresql" else self.store)


class Helper:
    """A process that works for a measurement: it hears and says lines, and ends when its input does."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._in, self._out = process, process.stdin, process.stdout

    async def hear(self, timeout: float = 60) -> str:
        async with asyncio.timeout(timeout):
            line = await self._out.readline()
        if not line:
            raise RuntimeError(f"A helper process ended early, with exit code {await self._process.wait()}.")
        return line.decode().strip()

    def say(self, line: str) -> None:
        self._in.write(f"{line}\n".encode())


def helpers(key: str, dsn: str, size: int, count: int = 1) -> AbstractAsyncContextManager[list[Helper]]:
    """Start `count` processes that run the `work` of a case; they are told to end afterwards."""
    return started([sys.executable, "-m", "bench.case", "work", key, dsn, str(size)], count)


@asynccontextmanager
async def started(command: Sequence[str], count: int = 1, cwd: Path | None = None) -> AsyncIterator[list[Helper]]:
    """The same for any program that ends with its input."""
    pipe = asyncio.subprocess.PIPE
    processes: list[asyncio.subprocess.Process] = []
    try:
        for _ in range(count):
            processes.append(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, cwd=cwd))
        yield [Helper(process) for process in processes]
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in processes:
            try:
                async with asyncio.timeout(30):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


async def heard() -> str:
    """In a helper: the next line of its input, or "" when it should end."""
    line: str = await asyncio.to_thread(sys.stdin.readline)
    return line.strip()


def say(line: object) -> None:
    """In a helper: a line to the measurement."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def percentile(values: Sequence[float], percent: int) -> float:
    if len(values) < 2:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def main(phase: str, key: str, dsn: str, size: str) -> None:
    from bench import cases

    [case] = [case for case in cases.ALL if case.key == key]
    if phase == "measure":
        say(json.dumps(asdict(asyncio.run(case.measure(dsn, int(size))))))
    else:
        function = case.prepare if phase == "prepare" else case.work
        assert function is not None
        asyncio.run(function(dsn, int(size)))


if __name__ == "__main__":
    main(*sys.argv[1:])
