"""`python -m bench`: measures create, drain, send and latency on an embedded PostgreSQL of its own."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import report
from bench.case import Case
from bench.run import Result, Run, measure
from busload.store.embedded import EmbeddedPostgres
from busload.testing import TestServer


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
@click.option("--sizes", type=Numbers(), default="20000,100000", show_default=True, help="Commands per batch.")
@click.option("--batch", default=10_000, show_default=True, help="Commands of the batch with a callback.")
@click.option("--sends", default=2_000, show_default=True, help="Commands sent one by one.")
@click.option("--samples", default=300, show_default=True, help="Latencies taken.")
@click.option("--repeat", default=3, show_default=True, help="Runs of which the median counts.")
@click.option("--peers/--no-peers", default=True, help="Measure other queues too, if they are installed.")
@click.option("--only", multiple=True, metavar="PART", help="Cases whose name holds this, such as busload/drain.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write everything here.")
def main(
    sizes: list[int],
    batch: int,
    sends: int,
    samples: int,
    repeat: int,
    peers: bool,
    only: tuple[str, ...],
    json_file: Path | None,
) -> None:
    """Measure busload beside what the machine allows and what its peers do.

    \b
        python -m bench
        python -m bench --sizes 20000 --repeat 1 --no-peers --only busload/drain
    """
    run = Run(sizes, sends, samples, batch, repeat, peers, only)
    console = Console()
    with own_server() as server:
        machine = report.describe_machine(server)
        results = _measure_visibly(server, run)
        machine["load_after"] = list(os.getloadavg())
    report.show(console, run, results, machine)
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_json(run, results, machine), indent=2) + "\n")


@contextmanager
def own_server(config: dict[str, str] | None = None) -> Iterator[TestServer]:
    """An embedded PostgreSQL with default durability, in a folder that is removed afterwards."""
    home = Path(tempfile.mkdtemp(prefix="busload-bench-"))
    home.chmod(0o755)  # root's server runs as another user
    try:
        with TestServer(home, config=config) as server:
            yield server
        EmbeddedPostgres(home).stop()
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _measure_visibly(server: TestServer, run: Run) -> list[Result]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(run.jobs()) * run.repeat)
        started = False

        def tell(case: Case, size: int) -> None:
            nonlocal started
            progress.update(task, advance=1 if started else 0, description=f"{case.key}, {size:,}")
            started = True

        results = measure(server, run, tell)
        progress.update(task, advance=1, description="done")
    return results


if __name__ == "__main__":
    main()
