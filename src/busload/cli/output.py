"""How the CLI prints: rich tables for people at a terminal, plain columns for a pipe, JSON for programs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeAlias

import click
import msgspec

from busload.domain.batch import BatchMetadata

if TYPE_CHECKING:
    from rich.console import Console

COUNTERS = ("completed", "failed", "canceled", "in troubleshooting")
STYLES = {"completed": "green", "failed": "red", "canceled": "magenta", "in troubleshooting": "yellow"}
PLAIN_EVERY = 0.5
"""Seconds between two lines about a progress that nobody sees as a bar."""

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")

Cell: TypeAlias = object
Show: TypeAlias = Callable[[BatchMetadata], None]


def echo_json(value: Any) -> None:
    """One JSON document on one line."""
    click.echo(msgspec.json.encode(value, enc_hook=str))


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]], *, nothing: str) -> None:
    """Rows below their columns; `nothing` is what to say instead if there are none."""
    texts = [[shown(cell) for cell in row] for row in rows]
    if not texts:
        click.echo(nothing, err=not at_terminal())
    elif at_terminal():
        _print_table(columns, texts, rows)
    else:
        for line in aligned([columns, *texts]):
            click.echo(line)


def facts(pairs: Sequence[tuple[str, Cell]]) -> None:
    """Names and values, one pair a line; what is not there is left out."""
    known = [(name, shown(value)) for name, value in pairs if value is not None]
    for line in aligned(known):
        click.echo(line)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Plain columns, never cut: a pipe has no width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def shown(cell: Cell) -> str:
    """A value as text on one line. Data may hold anything, so what would steer the terminal is escaped."""
    match cell:
        case None:
            return "-"
        case bool():
            return "yes" if cell else "no"
        case int():
            return f"{cell:,}"
        case datetime():
            return f"{cell.astimezone():%Y-%m-%d %H:%M:%S.%f}"[:-3]
        case str():
            text = str(cell)
        case _:
            text = msgspec.json.encode(cell, enc_hook=str).decode() if isinstance(cell, dict | list) else str(cell)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shorten(text: str | None, width: int) -> str | None:
    """Cut at a terminal, where room is scarce; whole in a pipe."""
    if text is None or len(text) <= width or not at_terminal():
        return text
    return text[: width - 1] + "…"


def at_terminal() -> bool:
    return sys.stdout.isatty()


def console() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def counters(batch: BatchMetadata) -> dict[str, int]:
    """The five counters of a batch without the total, in our words."""
    values = (batch.completed_count, batch.failed_count, batch.canceled_count, batch.in_troubleshooting_count)
    return dict(zip(COUNTERS, values, strict=True))


@contextmanager
def progress() -> Iterator[Show]:
    """A function that shows how far a batch has come: as a bar at a terminal, as lines in a pipe."""
    with _bar() if at_terminal() else _lines() as show:
        yield show


@contextmanager
def _bar() -> Iterator[Show]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.text import Text

    class Counters(TextColumn):
        def render(self, task: Any) -> Text:
            text = Text()
            for name, count in task.fields["counters"].items():
                style = STYLES[name] if count else "dim"
                text.append(f"{name} ", "dim").append(f"{count:,}", style).append("  ")
            return text

    columns = (BarColumn(24), TextColumn("{task.completed:,}/{task.total:,}"), Counters(""), TimeElapsedColumn())
    with Progress(*columns, console=console(), refresh_per_second=12) as bar:
        task = None

        def show(batch: BatchMetadata) -> None:
            nonlocal task
            if task is None:
                task = bar.add_task("", total=batch.total_count, counters=counters(batch))
            bar.update(task, total=batch.total_count, completed=batch.finished_count, counters=counters(batch))

        yield show


@contextmanager
def _lines() -> Iterator[Show]:
    """At most two lines a second, but always the last state."""
    printed, waiting = 0.0, None

    def show(batch: BatchMetadata) -> None:
        nonlocal printed, waiting
        waiting = batch
        if time.monotonic() - printed >= PLAIN_EVERY or batch.status.final:
            click.echo(progress_line(batch))
            printed, waiting = time.monotonic(), None

    yield show
    if waiting is not None:
        click.echo(progress_line(waiting))


def progress_line(batch: BatchMetadata) -> str:
    counts = "  ".join(f"{name} {count:,}" for name, count in counters(batch).items())
    return f"{batch.finished_count:,}/{batch.total_count:,}  {counts}  {batch.status}"


def _print_table(columns: Sequence[str], texts: Sequence[Sequence[str]], rows: Sequence[Sequence[Cell]]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for position, name in enumerate(columns):
        number = all(isinstance(row[position], int) for row in rows)
        made.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in texts:
        made.add_row(*map(Text, row))
    console().print(made)
