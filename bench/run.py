"""Runs cases, each in a database and a process of its own, and takes the medians.

A case that fails is told with its reason, and the others are measured all the same.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from bench.beside import PEERS, ROOT
from bench.brokers import VARIABLE, Brokers
from bench.case import Case, Extent, Measured, percentile
from bench.cases import ALL
from bench.dispatch import queue_of
from busload.testing import TestServer

FEW = 10_000
"""Commands of a small backlog."""


@dataclass(frozen=True, slots=True)
class Run:
    """What to measure: sizes of batches, and how many times to send, to sample a latency, and to repeat it all;
    `torture` is in seconds."""

    sizes: Sequence[int] = (100_000,)
    sends: int = 1_000
    singles: int = 10_000
    samples: int = 200
    batch: int = 10_000
    hot: int = 20_000
    many: int = 1_000_000
    torture: int = 60
    repeat: int = 1
    peers: bool = True
    only: Sequence[str] = ()

    def jobs(self) -> list[tuple[Case, int]]:
        """Every case with every size; what is the same for all sizes is done once."""
        chosen = [case for case in ALL if self._wanted(case)]
        return list(dict.fromkeys((case, size) for case in chosen for size in self._extents(case)))

    def lacking(self) -> dict[str, str]:
        """The peers that were asked for and cannot be measured, and why."""
        asked = {case.subject for case in ALL if self.peers and self._named(case)}
        return {peer.name: peer.lacks for peer in PEERS if peer.name in asked and peer.lacks}

    def _wanted(self, case: Case) -> bool:
        peer = next((peer for peer in PEERS if peer.name == case.subject), None)
        return self._named(case) and (peer is None or (self.peers and not peer.lacks))

    def _named(self, case: Case) -> bool:
        return not self.only or any(part in case.key for part in self.only)

    def _extents(self, case: Case) -> list[int]:
        extents: dict[Extent, Sequence[int]] = {
            "size": self.sizes,
            "sends": [self.sends],
            "singles": [self.singles],
            "samples": [self.samples],
            "batch": [self.batch],
            "hot": [self.hot],
            "few": [min(FEW, self.many)],
            "many": [self.many],
            "torture": [self.torture],
        }
        return [min(size, case.most or size) for size in extents[case.extent]]


@dataclass(slots=True)
class Result:
    """All runs of one case at one size."""

    case: Case
    size: int
    runs: list[Measured] = field(default_factory=list)
    failure: str | None = None

    @property
    def rate(self) -> float:
        return statistics.median(run.rate for run in self.runs)

    @property
    def client_cpu_ms(self) -> float:
        """CPU milliseconds of our processes for a thousand commands."""
        return statistics.median(1e6 * run.client_cpu / run.count for run in self.runs)

    @property
    def server_cpu_ms(self) -> float | None:
        """CPU milliseconds of PostgreSQL for a thousand commands."""
        seen = [1e6 * run.server_cpu / run.count for run in self.runs if run.server_cpu is not None]
        return statistics.median(seen) if seen else None

    def latency_ms(self, percent: int) -> float | None:
        taken = [1000 * percentile(run.latencies, percent) for run in self.runs if run.latencies]
        return statistics.median(taken) if taken else None

    def fact(self, name: str) -> float | None:
        found = [run.facts[name] for run in self.runs if name in run.facts]
        return statistics.median(found) if found else None

    def as_dict(self) -> dict[str, Any]:
        described: dict[str, Any] = {
            "subject": self.case.subject,
            "metric": self.case.metric,
            "title": self.case.title,
            "size": self.size,
            "runs": len(self.runs),
            "per_second": self.rate,
            "per_second_lowest": min(run.rate for run in self.runs),
            "per_second_highest": max(run.rate for run in self.runs),
            "seconds": statistics.median(run.seconds for run in self.runs),
            "client_cpu_ms_per_1000": self.client_cpu_ms,
            "server_cpu_ms_per_1000": self.server_cpu_ms,
        }
        if self.latency_ms(50) is not None:
            del described["per_second"], described["per_second_lowest"], described["per_second_highest"]
            described |= {f"p{percent}_ms": self.latency_ms(percent) for percent in (50, 95, 99)}
        names = {name for run in self.runs for name in run.facts}
        return described | {name: self.fact(name) for name in sorted(names)}


def measure(
    server: TestServer,
    run: Run,
    tell: Callable[[Case, int], None] = lambda case, size: None,
    brokers: Brokers | None = None,
) -> list[Result]:
    """Measure every job `repeat` times, round by round: a machine that slows down then slows all of them."""
    results = [Result(case, size) for case, size in run.jobs()]
    for done in range(run.repeat):
        for result in results:
            if result.failure or (result.case.rounds or run.repeat) <= done:
                continue
            tell(result.case, result.size)
            try:
                result.runs.append(_measure_once(server, brokers or Brokers(), result.case, result.size))
            except Failed as failed:
                result.failure = str(failed)
    return results


class Failed(Exception):
    """A process of a case ended with an error, or took too long."""


def _measure_once(server: TestServer, brokers: Brokers, case: Case, size: int) -> Measured:
    broker = None
    if case.server is not None:
        broker = brokers.running.get(case.server)
        if broker is None:
            raise Failed(brokers.missing.get(case.server, f"There is no {case.server} to run it on."))
    if broker is not None and case.store == case.server:
        return _phases(case, broker.url, size)
    with server.database(migrated=case.migrated) as dsn:
        if broker is None:
            return _phases(case, dsn, size)
        broker.make_queue(queue_of(dsn))
        return _phases(case, dsn, size, broker.url)


def _phases(case: Case, dsn: str, size: int, broker: str | None = None) -> Measured:
    if case.prepare is not None:
        _process("prepare", case, dsn, size, broker)
    return Measured(**json.loads(_process("measure", case, dsn, size, broker).splitlines()[-1]))


def _process(phase: str, case: Case, dsn: str, size: int, broker: str | None) -> str:
    """Run a phase in a session of its own, so that whatever it started ends with it, even if we are interrupted."""
    command = [sys.executable, "-m", "bench.case", phase, case.key, dsn, str(size)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=ROOT, env=_environment(broker), stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    try:
        said, complaints = process.communicate(timeout=case.seconds)
    except subprocess.TimeoutExpired:
        raise Failed(f"{case.key} with {size:,}: {phase} took more than {case.seconds:.0f} seconds.") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        raise Failed(f"{case.key} with {size:,}: {phase} failed.\n{complaints[-4000:]}")
    return said


def _environment(broker: str | None) -> dict[str, str]:
    """Ours without the settings of a bus: the measurements name their database and their broker themselves."""
    kept = ("BUSLOAD_BENCH_HOME",)
    ours = {name: value for name, value in os.environ.items() if name in kept or not name.startswith("BUSLOAD_")}
    return ours if broker is None else ours | {VARIABLE: broker}
