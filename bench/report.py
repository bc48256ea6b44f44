"""What was found: as JSON for programs, as tables for people."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import psycopg
from rich.console import Console
from rich.table import Table

from bench.peers import PUBLISHED, Published
from bench.run import Result, Run
from busload.testing import TestServer

OURS = "busload"
BASE = {"drain-1000": "drain", "send-10": "send"}
"""Variants of ours that are compared with what others do in their one way."""


def as_json(run: Run, results: Sequence[Result], machine: dict[str, Any]) -> dict[str, Any]:
    """Everything, with our rates as multiples of the others'."""
    return {
        "machine": machine,
        "run": {"sizes": list(run.sizes), "batch": run.batch, "repeat": run.repeat, "peers": run.peers},
        "results": [result.as_dict() for result in results],
        "published": [
            {"subject": p.subject, "metric": p.metric, "per_second": p.rates} for p in _published(run, results)
        ],
        "ratios": [
            {
                "metric": ours.case.metric,
                "size": ours.size,
                "beside": beside.case.key,
                "beside_size": beside.size,
                "ratio": ratio(ours, beside),
            }
            for ours in _ours(results)
            for beside in _beside(ours, results)
        ],
    }


def describe_machine(server: TestServer) -> dict[str, Any]:
    with server.database() as dsn, psycopg.connect(dsn) as conn:
        found = conn.execute(
            "SELECT name, setting FROM pg_settings WHERE name IN"
            " ('server_version', 'fsync', 'synchronous_commit', 'full_page_writes', 'shared_buffers', 'max_wal_size')"
        ).fetchall()
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "processors": len(os.sched_getaffinity(0)),
        "load_before": list(os.getloadavg()),
        "python": platform.python_version(),
        "psycopg": version("psycopg"),
        "postgresql": dict(found),
    }


def ratio(ours: Result, beside: Result) -> float:
    """How many times as fast we are; above 1 we are faster."""
    mine, theirs = ours.latency_ms(50), beside.latency_ms(50)
    if mine is not None and theirs is not None:
        return theirs / mine
    return ours.rate / beside.rate


def show(console: Console, run: Run, results: Sequence[Result], machine: dict[str, Any]) -> None:
    load = ", ".join(f"{value:.1f}" for value in machine["load_before"])
    table = Table(
        title=f"Commands per second (medians of {run.repeat})",
        caption=f"PostgreSQL {machine['postgresql']['server_version']}, Python {machine['python']}, "
        f"{machine['processors']} processors, load before {load}. "
        "In brackets: how many times as fast busload is. CPU: milliseconds for 1,000 commands, client + server.",
    )
    for name in ("", "size"):
        table.add_column(name, justify="right" if name else "left")
    others = list(dict.fromkeys(r.case.subject for r in results if r.case.subject != OURS))
    published = _published(run, results)
    others += [p.subject for p in published if p.subject not in others]
    for name in (OURS, "CPU", *dict.fromkeys(others)):
        table.add_column(name, justify="right")
    for ours in _ours(results):
        row = [ours.case.title, f"{ours.size:,}", _figure(ours), _cpu(ours)]
        for other in dict.fromkeys(others):
            row.append(_cell(ours, other, results, published))
        table.add_row(*row)
    console.print(table)
    for published_rate in published:
        p = published_rate
        console.print(f"{p.subject} is not installed here; {p.metric}: {p.rates} as published.", highlight=False)


def _cell(ours: Result, other: str, results: Sequence[Result], published: Sequence[Published]) -> str:
    for beside in _beside(ours, results):
        if beside.case.subject == other:
            return f"{_figure(beside)} ({ratio(ours, beside):,.2f}×)\n[dim]{_cpu(beside)}[/dim]"
    for p in published:
        if p.subject == other and p.metric == _base(ours):
            low, high = ours.rate / p.highest, ours.rate / p.lowest
            return f"{p.rates} ({low:,.0f}×)" if low == high else f"{p.rates} ({low:,.0f}–{high:,.0f}×)"
    return ""


def _figure(result: Result) -> str:
    if (p50 := result.latency_ms(50)) is not None:
        return f"p50 {p50:.2f}  p95 {result.latency_ms(95):.2f}  p99 {result.latency_ms(99):.2f} ms"
    return f"{result.rate:,.0f}"


def _cpu(result: Result) -> str:
    server = "?" if result.server_cpu_ms is None else f"{result.server_cpu_ms:,.1f}"
    return f"{result.client_cpu_ms:,.1f} + {server}"


def _ours(results: Sequence[Result]) -> list[Result]:
    return [result for result in results if result.case.subject == OURS]


def _base(result: Result) -> str:
    return BASE.get(result.case.metric, result.case.metric)


def _beside(ours: Result, results: Sequence[Result]) -> list[Result]:
    """What others did of the same kind: the same variant if they have it, at our size or the one nearest to it."""
    found: dict[str, Result] = {}
    for metric in (_base(ours), ours.case.metric):
        candidates = [r for r in results if r.case.metric == metric and r.case.subject != OURS]
        for result in sorted(candidates, key=lambda r: abs(r.size - ours.size), reverse=True):
            found[result.case.subject] = result
    return list(found.values())


def _published(run: Run, results: Sequence[Result]) -> list[Published]:
    measured = {(result.case.subject, result.case.metric) for result in results}
    metrics = {result.case.metric for result in _ours(results)}
    return [p for p in PUBLISHED if run.peers and p.metric in metrics and (p.subject, p.metric) not in measured]
