"""How the CLI prints: rich tables for people at a terminal, plain columns for a pipe, JSON for programs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import click
import msgspec

from busload.domain.batch import BatchMetadata

if TYPE_CHECKING:
    from rich.console import Console

COUNTERS = ("completed", "failed", "canceled", "in troubleshooting")
STYLES = {"completed": "green", "failed": "red", "canceled": "magenta", "in troubleshooting": "yellow"}
PLAIN_EVERY = 0.5
"""Seconds between two lines about a progress that nobody sees as a bar."""

GAP, NARROWEST = 2, 16
"""Characters between two columns of a table, and those that an elastic one keeps."""

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")

Cell: TypeAlias = object
Show: TypeAlias = Callable[[BatchMetadata], None]


def echo_json(value: Any) -> None:
    """One JSON document on one line."""
    click.echo(msgspec.json.encode(value, enc_hook=str))


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    nothing: str,
    elastic: str | None = None,
    spare: Sequence[str] = (),
) -> None:
    """Rows below their columns; `nothing` is what to say instead if there are none.

    Where a terminal is too narrow, the `elastic` column is cut and the `spare` ones are left out; ids stay whole.
    """
    texts = [[shown(cell) for cell in row] for row in rows]
    if not texts:
        click.echo(nothing, err=not at_terminal())
    elif at_terminal():
        numbers = [all(isinstance(row[position], int) for row in rows) for position in range(len(columns))]
        _print_table(_fitted(columns, texts, numbers, elastic, spare))
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
            here = cell.astimezone()
            today = at_terminal() and here.date() == datetime.now(here.tzinfo).date()
            return f"{here:{'%H:%M:%S.%f' if today else '%Y-%m-%d %H:%M:%S.%f'}}"[:-3]
        case str():
            text = str(cell)
        case _:
            text = msgspec.json.encode(cell, enc_hook=str).decode() if isinstance(cell, dict | list) else str(cell)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


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
def progress(indent: str = "") -> Iterator[Show]:
    """A function that shows how far a batch has come: as a bar at a terminal, as lines in a pipe."""
    with _bar(indent) if at_terminal() else _lines(indent) as show:
        yield show


@contextmanager
def _bar(indent: str) -> Iterator[Show]:
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.text import Text

    class Counters(TextColumn):
        def render(self, task: Any) -> Text:
            counts: dict[str, int] = task.fields["counters"]
            return Text("  ").join(
                Text.assemble((f"{name} ", "dim"), (f"{count:,}", STYLES[name] if count else "dim"))
                for name, count in counts.items()
            )

    start = [TextColumn(indent[:-1])] if indent else []  # a column ends with a space of its own
    columns = (*start, BarColumn(20), TextColumn("{task.completed:,}/{task.total:,}"), Counters(""))
    with Progress(*columns, console=console(), refresh_per_second=12) as bar:
        task = None

        def show(batch: BatchMetadata) -> None:
            nonlocal task
            if task is None:
                task = bar.add_task("", total=batch.total_count, counters=counters(batch))
            bar.update(task, total=batch.total_count, completed=batch.finished_count, counters=counters(batch))

        yield show


@contextmanager
def _lines(indent: str) -> Iterator[Show]:
    """At most two lines a second, but always the last state."""
    printed, waiting = 0.0, None

    def show(batch: BatchMetadata) -> None:
        nonlocal printed, waiting
        waiting = batch
        if time.monotonic() - printed >= PLAIN_EVERY or batch.status.final:
            click.echo(indent + progress_line(batch))
            printed, waiting = time.monotonic(), None

    yield show
    if waiting is not None:
        click.echo(indent + progress_line(waiting))


def progress_line(batch: BatchMetadata) -> str:
    counts = "  ".join(f"{name} {count:,}" for name, count in counters(batch).items())
    return f"{batch.finished_count:,}/{batch.total_count:,}  {counts}  {batch.status}"


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    texts: list[str]
    number: bool
    width: int


def _fitted(
    columns: Sequence[str],
    texts: Sequence[Sequence[str]],
    numbers: Sequence[bool],
    elastic: str | None,
    spare: Sequence[str],
) -> list[_Column]:
    """The columns that fit this terminal, each with its width."""
    whole = [
        _Column(name, list(cells), number, max(map(len, (name, *cells))))
        for name, number, cells in zip(columns, numbers, zip(*texts, strict=True), strict=True)
    ]
    fitted = whole
    for left_out in range(len(spare) + 1):
        kept = [column for column in whole if column.name not in spare[:left_out]]
        excess = max(0, _width(kept) - console().width)
        fitted = [_cut(column, excess) if column.name == elastic else column for column in kept]
        if _width(fitted) <= console().width:
            break
    return fitted


def _cut(column: _Column, excess: int) -> _Column:
    return replace(column, width=max(min(NARROWEST, column.width), column.width - excess))


def _width(columns: Sequence[_Column]) -> int:
    return sum(column.width + GAP for column in columns) - GAP


def _print_table(columns: Sequence[_Column]) -> None:
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="dim")
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.number else "left"
        made.add_column(column.name, justify=justify, width=column.width, no_wrap=True, overflow="ellipsis")
    for row in zip(*(column.texts for column in columns), strict=True):
        made.add_row(*map(Text, row))
    # A table that is still too wide runs over the edge: better than a cut id.
    wide = console()
    wide.width = max(wide.width, _width(columns) + GAP)
    wide.print(made, crop=False)
