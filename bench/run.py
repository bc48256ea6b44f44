"""Runs cases, each in a database and a process of its own, and takes the medians."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.case import Case, Extent, Measured, percentile
from bench.cases import ALL
from busload.testing import TestServer

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 1800
"""Seconds after which a process is given up."""


@dataclass(frozen=True, slots=True)
class Run:
    """What to measure: sizes of batches, and how many times to send, to sample a latency, and to repeat it all."""

    sizes: Sequence[int] = (20_000, 100_000)
    sends: int = 2_000
    samples: int = 300
    batch: int = 10_000
    repeat: int = 1
    peers: bool = True
    only: Sequence[str] = ()

    def jobs(self) -> list[tuple[Case, int]]:
        """Every case with every size; what is the same for all sizes is done once."""
        chosen = [case for case in ALL if self._wanted(case)]
        return list(dict.fromkeys((case, size) for case in chosen for size in self._extents(case)))

    def _wanted(self, case: Case) -> bool:
        if self.only and not any(part in case.key for part in self.only):
            return False
        return case.possible and (self.peers or not case.needs)

    def _extents(self, case: Case) -> list[int]:
        extents: dict[Extent, Sequence[int]] = {
            "size": self.sizes,
            "sends": [self.sends],
            "samples": [self.samples],
            "batch": [self.batch],
        }
        return [min(size, case.most or size) for size in extents[case.extent]]


@dataclass(slots=True)
class Result:
    """All runs of one case at one size."""

    case: Case
    size: int
    runs: list[Measured] = field(default_factory=list)

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
        return described


def measure(server: TestServer, run: Run, tell: Callable[[Case, int], None] = lambda case, size: None) -> list[Result]:
    """Measure every job `repeat` times, round by round: a machine that slows down then slows all of them."""
    results = [Result(case, size) for case, size in run.jobs()]
    for _ in range(run.repeat):
        for result in results:
            tell(result.case, result.size)
            result.runs.append(_measure_once(server, result.case, result.size))
    return results


def _measure_once(server: TestServer, case: Case, size: int) -> Measured:
    with server.database(migrated=case.migrated) as dsn:
        if case.prepare is not None:
            _process("prepare", case, dsn, size)
        return Measured(**json.loads(_process("measure", case, dsn, size).splitlines()[-1]))


def _process(phase: str, case: Case, dsn: str, size: int) -> str:
    command = [sys.executable, "-m", "bench.case", phase, case.key, dsn, str(size)]
    done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=LONGEST)
    if done.returncode:
        raise RuntimeError(f"{case.key} with {size:,} failed:\n{done.stderr[-4000:]}")
    return done.stdout


def _environment() -> dict[str, str]:
    """Ours without the settings of a bus: the measurements name their database themselves."""
    return {name: value for name, value in os.environ.items() if not name.startswith("BUSLOAD_")}
