"""`python -m bench`: measures create, drain, send and latency on an embedded PostgreSQL of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import report, torture
from bench.brokers import Brokers, own_brokers
from bench.case import Case
from bench.chart import draw, draw_torture
from bench.run import Result, Run, measure
from busload.postgres.embedded.server import EmbeddedPostgres
from busload.testing import TestServer

CONFIG = {"max_connections": "400", **torture.SETTINGS}
"""Room for a crowd of workers; nothing that makes PostgreSQL faster or less durable."""


class Numbers(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    name = "n,n,…"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        try:
            numbers = [int(part) for part in str(value).replace("_", "").split(",")]
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 20000,100000.", param, ctx)
        if min(numbers) < 1:
            self.fail("Sizes must be at least 1.", param, ctx)
        return numbers


@click.command()
@click.option("--sizes", type=Numbers(), default="100000", show_default=True, help="Commands to create and drain.")
@click.option("--batch", default=10_000, show_default=True, help="Commands of the batch with a callback.")
@click.option("--sends", default=1_000, show_default=True, help="Commands sent one by one.")
@click.option("--singles", default=10_000, show_default=True, help="Commands sent one by one and then drained.")
@click.option("--hot", default=20_000, show_default=True, help="Commands for the crowd of small workers.")
@click.option("--many", default=1_000_000, show_default=True, help="Commands of a large backlog, and for memory.")
@click.option("--torture", "tortured", default=60, show_default=True, help="Seconds for which a snapshot is held.")
@click.option("--samples", default=200, show_default=True, help="Latencies taken.")
@click.option("--repeat", default=3, show_default=True, help="Runs of which the median counts.")
@click.option("--peers/--no-peers", default=True, help="Measure the other queues that `bench.install` installed.")
@click.option("--only", multiple=True, metavar="PART", help="Cases whose name holds this, such as busload/drain.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write everything here.")
@click.option("--chart", type=click.Path(file_okay=False, path_type=Path), help="Write the pictures here.")
def main(
    sizes: list[int],
    batch: int,
    sends: int,
    singles: int,
    hot: int,
    many: int,
    tortured: int,
    samples: int,
    repeat: int,
    peers: bool,
    only: tuple[str, ...],
    json_file: Path | None,
    chart: Path | None,
) -> None:
    """Measure busload beside what the machine allows and what its peers do.

    \b
        python -m bench
        python -m bench --sizes 20000 --repeat 1 --no-peers --only busload/drain
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that everything is stopped
    run = Run(sizes, sends, singles, samples, batch, hot, many, tortured, repeat, peers, only)
    console = Console()
    beside = sorted({case.server for case, _ in run.jobs() if case.server})
    with own_server(CONFIG) as server, own_brokers(beside) as brokers:
        machine = report.describe_machine(server)
        results = _measure_visibly(server, run, brokers)
        machine["load_after"] = list(os.getloadavg())
    report.show(console, run, results, machine)
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_json(run, results, machine), indent=2) + "\n")
    if chart is not None:
        for path in (*draw(results, chart, _caption(machine)), *draw_torture(results, chart)):
            console.print(f"Wrote {path}", highlight=False)
    broken = [result.case for result in results if result.failure and result.case.server not in brokers.missing]
    if any(case.subject == report.OURS for case in broken):
        sys.exit(1)


def _caption(machine: dict[str, Any]) -> str:
    return (
        f"Commands per second, no-op handlers. PostgreSQL {machine['postgresql']['server_version']}, "
        f"default durability, {machine['processors']} processors. –: no such feature, or not measured."
    )


@contextmanager
def own_server(config: dict[str, str] | None = None) -> Iterator[TestServer]:
    """An embedded PostgreSQL with default durability, in a folder that is removed afterwards."""
    home = Path(tempfile.mkdtemp(prefix="busload-bench-"))
    home.chmod(0o755)  # root's server runs as another user
    try:
        with TestServer(home, config=config) as server:
            yield server
    finally:
        EmbeddedPostgres(home).stop()
        shutil.rmtree(home, ignore_errors=True)


def _measure_visibly(server: TestServer, run: Run, brokers: Brokers) -> list[Result]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=sum(min(case.rounds or run.repeat, run.repeat) for case, _ in run.jobs()))
        started = False

        def tell(case: Case, size: int) -> None:
            nonlocal started
            progress.update(task, advance=1 if started else 0, description=f"{case.key}, {size:,}")
            started = True
            if not console.is_terminal:  # where nothing can be redrawn, a line for each
                done = progress.tasks[0]
                console.print(f"{done.completed:.0f}/{done.total:.0f} {case.key}, {size:,}", highlight=False)

        results = measure(server, run, tell, brokers)
        progress.update(task, advance=1, description="done")
    return results


if __name__ == "__main__":
    main()
