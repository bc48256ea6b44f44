"""What was found: as JSON for programs, as tables for people."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import psycopg
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench import dispatch, reach
from bench.beside import PEERS, TITLES
from bench.run import Result, Run
from busload.testing import TestServer

OURS = "busload"
LIMITS = {"limit": "the machine: bare SQL", "statements": "our statements alone", "asyncio": "the machine: asyncio"}
BASE = {
    "drain-1000": "drain",
    "drain-2-1000": "drain-2",
    "send-10": "send",
}
"""Variants of ours that are compared with what others do in their one way."""

COLUMNS = {
    "create": "bulk create",
    "drain": "drain, 1 process",
    "drain-2": "drain, 2 processes",
    "send": "send, one by one",
    "singles": "drain of single sends",
    "batch": "batch with callback",
    "latency": "commit to start, ms\np50 / p95 / p99",
}

VARIANTS = {
    "drain-1000": "drain",
    "drain-2-1000": "drain-2",
    "send-10": "send",
    "drain-unbatched": "drain",
    "drain-1000-batches": "drain-unbatched",
    "drain-limited": "drain",
    "drain-watched": "drain",
    "create-100b": "create",
    "create-1kb": "create-100b",
    "create-10kb": "create-100b",
    "drain-100b": "drain",
    "drain-1kb": "drain-100b",
    "drain-10kb": "drain-100b",
    "drain-none": "drain",
    "drain-refused": "drain-none",
    "drain-retried": "drain-none",
    "crowd-1": "crowd-32",
    "crowd-32": None,
    "first-start-idle": None,
    "first-start-behind": "first-start-idle",
    "first-start-behind-calls": "first-start-idle",
    "wake-1": "latency",
    "wake-12": "wake-1",
    "wake-50": "wake-1",
    "idle": None,
    "claim-few": None,
    "claim-many": "claim-few",
    "claim-few-ones": "claim-few",
    "claim-many-ones": "claim-few-ones",
    "create-keys": "create",
    "create-once": "create-keys",
    "drain-keys": "drain",
    "send-once": "send",
    "trace": None,
    "traced-none": "drain",
    "traced-usual-none": "drain",
    "traced-usual": "traced-usual-none",
    "traced-batch": "traced-none",
    "traced-hundredth": "traced-none",
    "traced-tenth": "traced-none",
    "traced-all": "traced-none",
    "traced-metrics": "traced-none",
    "traced-bulk-metrics": "traced-none",
    "traced-sdk": None,
    "traced-sdk-tenth": None,
    "traced-call-none": None,
    "traced-call-usual-none": None,
    "traced-call-usual": "traced-call-usual-none",
    "traced-call-batch": "traced-call-none",
    "traced-call-hundredth": "traced-call-none",
    "traced-call-tenth": "traced-call-none",
    "traced-call-all": "traced-call-none",
    "traced-work-none": None,
    "traced-work-usual-none": None,
    "traced-work-usual": "traced-work-usual-none",
    "traced-work-batch": "traced-work-none",
    "traced-work-hundredth": "traced-work-none",
    "traced-work-tenth": "traced-work-none",
    "traced-work-all": "traced-work-none",
    "join-psycopg": None,
    "join-psycopg-async": "join-psycopg",
    "join-asyncpg": "join-psycopg",
    "join-psycopg2": "join-psycopg",
    "join-session": "join-psycopg",
    "join-session-psycopg2": "join-psycopg",
    "join-async-session": "join-psycopg",
    "join-async-session-asyncpg": "join-psycopg",
    "join-django": "join-psycopg",
    "join-sql": "join-psycopg",
    "buffer-singles": None,
    "buffer-drain": "buffer-singles",
    "buffer-bulk": "buffer-singles",
    "buffer-add": "send",
    "buffer-add-many": "create",
    "buffer-few": None,
    "buffer-many": "buffer-few",
    "dispatch-relay-singles": None,
    "dispatch-relay-envelopes": "dispatch-relay-singles",
    "torture": None,
    "bytes": None,
    "memory": None,
    "stream": None,
}
"""What only we are measured at, and which other figure of ours it is to be seen beside."""

THROUGH_BROKERS = [case.metric for case in dispatch.CASES if case.metric not in VARIANTS]
"""What has a table of its own."""


def as_json(run: Run, results: Sequence[Result], machine: dict[str, Any]) -> dict[str, Any]:
    """Everything, with our rates as multiples of the others'."""
    measured = _measured(results)
    return {
        "machine": machine,
        "run": {
            "sizes": list(run.sizes),
            "batch": run.batch,
            "singles": run.singles,
            "many": run.many,
            "repeat": run.repeat,
            "peers": run.peers,
        },
        "results": [result.as_dict() for result in measured],
        "peers": {peer.name: list(peer.packages) for peer in PEERS},
        "not_measured": not_measured(run, results),
        "ratios": [
            {
                "metric": ours.case.metric,
                "size": ours.size,
                "beside": beside.case.key,
                "beside_size": beside.size,
                "ratio": ratio(ours, beside),
            }
            for ours in measured
            if ours.case.subject == OURS
            for beside in _beside(ours, measured)
        ],
        "reach": [check.as_dict() for check in reach.check(measured)],
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


def not_measured(run: Run, results: Sequence[Result]) -> dict[str, str]:
    """Peers that are missing, and cases that failed, with the reason. A peer with results is not missing."""
    measured = {result.case.subject for result in _measured(results)}
    missing = {name: why for name, why in run.lacking().items() if name not in measured}
    return missing | {result.case.key: result.failure for result in results if result.failure}


def ratio(ours: Result, beside: Result) -> float:
    """How many times as fast we are; above 1 we are faster."""
    mine, theirs = ours.latency_ms(50), beside.latency_ms(50)
    if mine is not None and theirs is not None:
        return theirs / mine if mine > 0 else float("inf")
    return ours.rate / (_rate_once_begun(beside) if ours.case.metric in THROUGH_BROKERS else beside.rate)


def _rate_once_begun(result: Result) -> float:
    """Where our worker is idle before the clock starts, the time that others take to start theirs does not count."""
    return result.fact("begun_per_second") or result.rate


def show(console: Console, run: Run, results: Sequence[Result], machine: dict[str, Any]) -> None:
    measured = _measured(results)
    missing = not_measured(run, results)
    for table in (
        _beside_others(run, measured, machine, missing),
        _variants(measured),
        _through_brokers(measured),
        _reach(run, measured),
    ):
        if table.row_count:
            console.print(table)
    for name, why in missing.items():
        console.print(f"[bold]{TITLES.get(name, name)}[/bold] was not measured: {escape(_brief(why))}", highlight=False)


def _beside_others(run: Run, results: Sequence[Result], machine: dict[str, Any], missing: Mapping[str, str]) -> Table:
    """A row for each subject. Ours come once for every size."""
    load = ", ".join(f"{value:.1f}" for value in machine["load_before"])
    table = Table(
        title=f"Commands per second (medians of {run.repeat})",
        caption=f"PostgreSQL {machine['postgresql']['server_version']}, Python {machine['python']}, "
        f"{machine['processors']} processors, load before {load}. In brackets: how many times as fast busload is. "
        "Dim: CPU milliseconds for 1,000 commands, client + server.",
    )
    metrics = [metric for metric in COLUMNS if any(result.case.metric == metric for result in results)]
    for name in ("", *(COLUMNS[metric] for metric in metrics)):
        table.add_column(name, justify="right" if name else "left")
    ours = {metric: _largest(results, OURS, metric) for metric in metrics}
    for subject in dict.fromkeys([OURS, *LIMITS, *TITLES]):
        if subject in missing:
            table.add_row(TITLES[subject], *(["not measured"] + [""] * len(metrics))[: len(metrics)])
            continue
        row = []
        for metric in metrics:
            result, mine = _largest(results, subject, metric), ours[metric]
            if result is None:
                row.append("failed" if f"{subject}/{metric}" in missing else "")
            else:
                times = "" if mine is None or mine is result else f" ({ratio(mine, result):,.2f}×)"
                row.append(f"{_figure(result)}{times}\n[dim]{_below(result)}[/dim]")
        if any(row):
            table.add_row(_title(subject), *row)
    return table


def _variants(results: Sequence[Result]) -> Table:
    table = Table(title="busload under other conditions")
    for name in ("", "size", "per second", "CPU", "beside", "ratio"):
        table.add_column(name, justify="left" if name in ("", "beside") else "right")
    for metric, base in VARIANTS.items():
        for result in (r for r in results if r.case.subject == OURS and r.case.metric == metric):
            other = _largest(results, OURS, base) if base else None
            times = "" if other is None else f"{ratio(result, other):,.2f}×"
            beside = "" if other is None else other.case.title
            table.add_row(result.case.title, f"{result.size:,}", _figure(result), _cpu(result), beside, times)
    return table


def _through_brokers(results: Sequence[Result]) -> Table:
    """A row for each transport, with a row of those who were measured on the same broker below it."""
    table = Table(
        title="Through brokers, commands per second",
        caption="In brackets: for busload, beside no broker; for others, how many times as fast busload is on the same "
        "broker. Dim: CPU milliseconds for 1,000 commands, client + PostgreSQL.",
    )
    created, *others = dispatch.CREATIONS
    for name in ("", f"created and published,\n{created}", *others, "drain"):
        table.add_column(name, justify="right" if name else "left")
    base = {kind: _largest(results, OURS, metric) for kind, metric in dispatch.BASE.items()}
    for transport, title in dispatch.TRANSPORTS.items():
        ours = {
            what: _largest(results, OURS, dispatch.metric(transport, what)) for what in (*dispatch.CREATIONS, "drain")
        }
        if transport == dispatch.NONE:
            ours[created] = base["create"]
        row = [_with_times(one, base["drain" if what == "drain" else "create"]) for what, one in ours.items()]
        if any(row):
            table.add_row(f"[bold]{OURS}[/bold], {title}", *row)
        if (peer := dispatch.CELERY.get(transport)) and any(row):
            theirs = {"create": _largest(results, peer, "create"), "drain": _largest(results, peer, "drain")}
            mine = {"create": ours[created], "drain": ours["drain"]}
            cells = {kind: _with_times(one, mine[kind], theirs=True) for kind, one in theirs.items()}
            if any(cells.values()):
                table.add_row(TITLES[peer], cells["create"], *([""] * len(others)), cells["drain"])
    return table


def _with_times(result: Result | None, beside: Result | None, *, theirs: bool = False) -> str:
    if result is None:
        return ""
    times = ""
    if beside is not None and beside is not result:
        times = f" ({ratio(beside, result) if theirs else ratio(result, beside):,.2f}×)"
    rate = _rate_once_begun(result) if theirs else result.rate
    return f"{rate:,.0f}{times}\n[dim]{_cpu(result)}[/dim]"


def _reach(run: Run, results: Sequence[Result]) -> Table:
    table = Table(title="What is to be reached")
    for name in ("", "wanted", "found", ""):
        table.add_column(name, justify="right" if name else "left")
    colours = {True: "green", False: "red", None: "dim"}
    for check in reach.check(results):
        goal = check.goal
        if check.found is None and run.only:
            continue
        found = "" if check.found is None else f"{check.found:,.2f} {goal.unit}"
        bound = "≤" if goal.at_most else "≥"
        verdict = f"[{colours[check.met]}]{check.verdict}[/]"
        table.add_row(goal.name, f"{bound} {goal.wanted:g} {goal.unit}", found, verdict)
    return table


def _brief(why: str) -> str:
    """What failed and the error itself; the way between them is in the JSON."""
    lines = [line for line in why.splitlines() if line.strip()]
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"


def _title(subject: str) -> str:
    return f"[bold]{OURS}[/bold]" if subject == OURS else TITLES.get(subject) or LIMITS[subject]


def _figure(result: Result) -> str:
    if result.latency_ms(50) is not None:
        return " / ".join(f"{result.latency_ms(percent):.2f}" for percent in (50, 95, 99))
    if (peak := result.fact("peak_mb")) is not None:
        tenth = result.fact("tenth_peak_mb")
        earlier = "" if tenth is None else f"{tenth:.0f} MB after a tenth, "
        return f"{result.rate:,.0f}\n{earlier}{peak:.0f} MB at most"
    if (calls := result.fact("calls")) is not None:
        return f"{result.rate:,.0f}\n{calls:,.0f} calls, {result.fact('statements'):,.0f} statements"
    if (messages := result.fact("messages")) is not None:
        return f"{result.rate:,.0f}\n{messages:,.0f} messages"
    return f"{result.rate:,.0f}"


def _below(result: Result) -> str:
    whole = result.fact("from_call_p50_ms")
    return _cpu(result) if whole is None else f"p50 from the call {whole:.2f}"


def _cpu(result: Result) -> str:
    server = "?" if result.server_cpu_ms is None else f"{result.server_cpu_ms:,.1f}"
    return f"{result.client_cpu_ms:,.1f} + {server}"


def _measured(results: Sequence[Result]) -> list[Result]:
    return [result for result in results if result.runs]


def _largest(results: Sequence[Result], subject: str, metric: str) -> Result | None:
    found = [r for r in results if r.case.subject == subject and r.case.metric == metric]
    return max(found, key=lambda r: r.size, default=None)


def _beside(ours: Result, results: Sequence[Result]) -> list[Result]:
    """What others did of the same kind: the same variant if they have it, at our size or the one nearest to it."""
    found: dict[str, Result] = {}
    base = BASE.get(ours.case.metric, ours.case.metric)
    for metric in (base, ours.case.metric):
        candidates = [r for r in results if r.case.metric == metric and r.case.subject != OURS]
        for result in sorted(candidates, key=lambda r: abs(r.size - ours.size), reverse=True):
            found[result.case.subject] = result
    own = _largest(results, OURS, VARIANTS.get(ours.case.metric) or "")
    through = (_largest(results, *key.split("/")) for key in dispatch.BESIDE.get(ours.case.metric, []))
    return [*found.values(), *([own] if own else []), *(one for one in through if one)]
