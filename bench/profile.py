"""`python -m bench.profile`: where a command's microseconds go, in Python and in PostgreSQL.

Python is sampled by a timer that runs on CPU time, so a function is not charged for waiting and nothing is slowed down
as a tracing profiler would. PostgreSQL counts by itself: pg_stat_statements for what ran, EXPLAIN for where one claim
and one settlement spend their time.
"""

from __future__ import annotations

import asyncio
import importlib
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import click
import psycopg
from rich.console import Console
from rich.table import Table

import busload
from bench.__main__ import own_server
from bench.clock import settle_down
from bench.limits import LOAD
from bench.ours import DOMAIN, commands, fill, nothing
from busload import CommandBus, Worker
from busload.commands import claim, rescue, settle
from busload.commands.execution import COMPLETED, Transition
from busload.postgres.connection import Connection
from busload.postgres.plan import Plan, Statement
from busload.postgres.statements import statements
from busload.sync.plan import perform

SAMPLE_EVERY = 0.001
STATEMENTS = {
    "shared_preload_libraries": "pg_stat_statements",
    "pg_stat_statements.track": "all",
    "pg_stat_statements.track_planning": "on",
}
PACKAGE = Path(busload.__file__).parent
FILES = ("send", "task_keys", "claim", "settle", "rescue", "cancel", "search")
CONSTANT = re.compile(r"[%$']|\b\d")
COMMENT = re.compile(r"--.*")


@dataclass(slots=True)
class Profile:
    """Which functions the samples found at work: at the top of the stack, and anywhere on it."""

    cpu: float = 0.0
    seconds: float = 0.0
    samples: int = 0
    alone: Counter[CodeType] = field(default_factory=Counter)
    lines: Counter[tuple[CodeType, int]] = field(default_factory=Counter)
    with_callees: Counter[CodeType] = field(default_factory=Counter)

    def take(self, number: int, frame: FrameType | None) -> None:
        if frame is None:
            return
        self.samples += 1
        self.alone[frame.f_code] += 1
        self.lines[frame.f_code, frame.f_lineno] += 1
        seen: set[CodeType] = set()
        while frame is not None:
            seen.add(frame.f_code)
            frame = frame.f_back
        self.with_callees.update(seen)


@contextmanager
def sampled() -> Iterator[Profile]:
    profile = Profile()
    before = signal.signal(signal.SIGPROF, profile.take)
    cpu, began = time.process_time(), time.perf_counter()
    signal.setitimer(signal.ITIMER_PROF, SAMPLE_EVERY, SAMPLE_EVERY)
    try:
        yield profile
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        profile.cpu, profile.seconds = time.process_time() - cpu, time.perf_counter() - began
        signal.signal(signal.SIGPROF, before)


@click.command()
@click.option("--size", default=100_000, show_default=True, help="Commands in the batch.")
@click.option("--concurrency", default=100, show_default=True, help="Slots of the worker.")
@click.option("--top", default=25, show_default=True, help="Functions to show.")
@click.option("--uvloop", is_flag=True, help="Run the worker on uvloop, if it is installed.")
@click.option("--explain/--no-explain", default=True, help="Show the plans of one claim and one settlement.")
def main(size: int, concurrency: int, top: int, uvloop: bool, explain: bool) -> None:
    """Show where creating and draining a batch spends its time."""
    console = Console(width=160)
    with own_server(STATEMENTS) as server:
        with server.database() as dsn:
            with psycopg.connect(dsn, autocommit=True) as conn:
                conn.execute("CREATE EXTENSION pg_stat_statements")
            _show(console, "create", size, top, dsn, _profile(_create(dsn, size), uvloop))
            _show(console, f"drain, {concurrency} slots", size, top, dsn, _profile(_drain(dsn, concurrency), uvloop))
        if explain:
            with server.database() as dsn:
                _explain(console, dsn, concurrency)


def _profile(work: Any, uvloop: bool) -> Profile:
    if uvloop:
        profile: Profile = importlib.import_module("uvloop").run(work)
        return profile
    found: Profile = asyncio.run(work)
    return found


async def _create(dsn: str, size: int) -> Profile:
    batch = commands(size)
    async with CommandBus(dsn) as bus:
        await bus.list_batches(DOMAIN)
        _reset(dsn)
        with sampled() as profile:
            await bus.create_batch(DOMAIN, batch)
    return profile


async def _drain(dsn: str, concurrency: int) -> Profile:
    async with CommandBus(dsn) as bus:
        bus.handler(DOMAIN, "Nothing")(nothing)
        _reset(dsn)
        with sampled() as profile:
            await Worker(bus, concurrency=concurrency).drain()
    return profile


def _reset(dsn: str) -> None:
    settle_down(dsn)
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("SELECT pg_stat_statements_reset()")


def _show(console: Console, what: str, size: int, top: int, dsn: str, profile: Profile) -> None:
    console.rule(
        f"{what}: {size:,} commands, {size / profile.seconds:,.0f}/s, "
        f"{1e6 * profile.cpu / size:.1f} µs of Python each, {profile.samples:,} samples"
    )
    console.print(_functions("Python, where it is: µs per command", profile, size, profile.alone.most_common(top)))
    ours = [(code, n) for code, n in profile.with_callees.most_common() if PACKAGE in Path(code.co_filename).parents]
    console.print(_functions("Python, on whose behalf: µs per command", profile, size, ours[:top]))
    console.print(_statements(dsn, size))


def _functions(title: str, profile: Profile, size: int, codes: Sequence[tuple[CodeType, int]]) -> Table:
    table = Table(title=title)
    for name in ("alone", "with callees", "function", "its busiest lines"):
        table.add_column(name, justify="right" if name in ("alone", "with callees") else "left")
    worth = 1e6 * profile.cpu / size / max(1, profile.samples)
    for code, _ in codes:
        lines = Counter({line: n for (owner, line), n in profile.lines.items() if owner is code})
        busiest = ", ".join(f"{line}: {n * worth:.2f}" for line, n in lines.most_common(3))
        file = Path(code.co_filename)
        name = f"{file.parent.name}/{file.name} {code.co_name}"
        alone, with_callees = profile.alone[code] * worth, profile.with_callees[code] * worth
        table.add_row(f"{alone:.2f}", f"{with_callees:.2f}", name, busiest)
    return table


def _statements(dsn: str, size: int) -> Table:
    table = Table(title="PostgreSQL: what ran (statements inside functions and triggers are indented)")
    for name in ("µs per command", "planning", "calls", "mean ms", "WAL bytes per command", "statement"):
        table.add_column(name, justify="left" if name == "statement" else "right")
    with psycopg.connect(dsn, autocommit=True) as conn:
        rows = conn.execute(
            "SELECT toplevel, calls, total_exec_time, total_plan_time, wal_bytes, query FROM pg_stat_statements"
            " WHERE calls > 0 AND dbid = (SELECT oid FROM pg_database WHERE datname = current_database())"
            " ORDER BY total_exec_time + total_plan_time DESC LIMIT 15"
        ).fetchall()
    for toplevel, calls, milliseconds, planning, wal, query in rows:
        table.add_row(
            f"{1000 * milliseconds / size:.2f}",
            f"{1000 * planning / size:.2f}",
            f"{calls:,}",
            f"{(milliseconds + planning) / calls:.3f}",
            f"{wal / size:,.0f}",
            ("" if toplevel else "    ") + _name(query),
        )
    return table


def _name(query: str) -> str:
    """The name we gave a statement, or how it begins: PostgreSQL remembers it with other parameters than ours."""
    text = " ".join(COMMENT.sub("", query).split())
    known = {
        " ".join(CONSTANT.split(COMMENT.sub("", sql.decode()), maxsplit=1)[0].split()): f"{file}.{name}"
        for file in FILES
        for name, sql in statements(f"busload.commands.{file}").by_name.items()
    }
    matches = [beginning for beginning in known if len(beginning) > 12 and text.startswith(beginning)]
    return f"{known[max(matches, key=len)]}" if matches else text[:90]


def _explain(console: Console, dsn: str, concurrency: int) -> None:
    asyncio.run(fill(dsn, 20 * LOAD))
    with psycopg.connect(dsn, autocommit=True) as conn:
        facts = {"name": "profile", "domains": [DOMAIN], "concurrency": concurrency}
        worker = perform(conn, rescue.register(**facts, lease_for=timedelta(minutes=5)))  # type: ignore[arg-type]
        conn.execute("ANALYZE")
        taking = claim.claim(worker=worker, domains=[DOMAIN], limit=concurrency)
        leased = perform(conn, claim.claim(worker=worker, domains=[DOMAIN], limit=concurrency)).leased
        settling = settle.settle([Transition(one, COMPLETED) for one in leased], now=0.0)
        for name, plan in (("claim", taking), ("settle", settling)):
            console.rule(f"{name} of {concurrency}")
            console.print(_plan_of(conn, plan), highlight=False, markup=False, soft_wrap=True)


def _plan_of(conn: Connection, plan: Plan[Any]) -> str:
    """The plan of a plan's first statement, which is run for that; a worker's generic plan may differ from it."""
    step = next(plan)
    assert isinstance(step, Statement)
    rows = conn.execute(b"EXPLAIN (ANALYZE, COSTS OFF, BUFFERS OFF, SUMMARY) " + step.sql, step.params).fetchall()
    return "\n".join(line for (line,) in rows)


if __name__ == "__main__":
    main()
