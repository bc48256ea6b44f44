"""How the CLI prints: rich tables for people at a terminal, plain columns for a pipe, JSON for programs."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

import click
import msgspec
from rich.cells import cell_len, chop_cells, set_cell_size

from busload.domain.batch import BatchMetadata

if TYPE_CHECKING:
    from rich.console import Console

COUNTERS = ("completed", "failed", "canceled", "in troubleshooting")
STYLES = {"completed": "green", "failed": "red", "canceled": "magenta", "in troubleshooting": "yellow"}
PLAIN_EVERY = 0.5
"""Seconds between two lines about a progress that nobody sees as a bar."""

GAP, NARROWEST, INDENT = 2, 24, 4
"""Characters between two columns of a table, of an elastic one at least, and before the second line of a row."""

WIDE = 100
"""Columns of a terminal that has room for a long bar."""

NOTHING = "-"
"""What stands for a value that is not there."""

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

    Where a terminal is too narrow, the `elastic` column is cut. If that is not enough, `spare` columns are left out and
    the rest of a row goes to further lines, whichever takes fewer lines. Ids, numbers and times are never cut.
    """
    texts = [[shown(cell) for cell in row] for row in rows]
    if not texts:
        click.echo(nothing, err=not at_terminal())
    elif at_terminal():
        cells = zip(*rows, strict=True)
        whole = [
            _Column(name, list(column), number=all(isinstance(cell, int) for cell in given), rigid=_is_rigid(given))
            for name, column, given in zip(columns, zip(*texts, strict=True), cells, strict=True)
        ]
        _print_lines(_fitted(whole, width(), elastic, spare))
    else:
        for line in aligned([columns, *texts]):
            click.echo(line)


def facts(pairs: Sequence[tuple[str, Cell]]) -> None:
    """Names and values, one pair a line; what is not there is left out. At a terminal, long values are wrapped."""
    known = [(name, shown(value)) for name, value in pairs if value is not None]
    if not at_terminal():
        for line in aligned(known):
            click.echo(line)
        return
    start = max(len(name) for name, _ in known) + GAP
    for name, value in known:
        paragraph(value, first=name.ljust(start), then=" " * start)


def paragraph(text: str, *, first: str = "", then: str = "") -> None:
    """A text that is wrapped at a terminal; `first` and `then` are what its first and its other lines begin with."""
    if at_terminal():
        for number, line in enumerate(wrapped(text, width() - cell_len(then))):
            click.echo((then if number else first) + line)
    else:
        click.echo(first + text)


def wrapped(text: str, room: int) -> list[str]:
    """The lines of a text. What stands in backticks is for people to copy and stays on one line, as do ids."""
    if cell_len(text) <= room:
        return [text]
    lines = [""]
    for word in re.findall(r"(?:`[^`]*`|\S)+", text):
        begin, *others = _parts(word, room)
        joined = f"{lines[-1]} {begin}" if lines[-1] else begin
        if cell_len(joined) <= room or not lines[-1]:
            lines[-1] = joined
        else:
            lines.append(begin)
        lines += others
    return lines


def _parts(word: str, room: int) -> list[str]:
    """A word cut into parts that fit: JSON has long ones. Names, ids and numbers are cut only if they do not fit."""
    if "`" in word or cell_len(word) <= room:
        return [word]
    parts = [""]
    for piece in re.findall(r"[\w.+-]+|[^\w.+-]", word):
        for some in chop_cells(piece, room):
            if cell_len(parts[-1] + some) > room:
                parts.append("")
            parts[-1] += some
    return parts


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Plain columns, never cut: a pipe has no width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def shown(cell: Cell) -> str:
    """A value as text on one line. Data may hold anything, so what would steer the terminal is escaped."""
    match cell:
        case None:
            return NOTHING
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
            text = _json(cell) if isinstance(cell, dict | list) else str(cell)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _json(value: Any) -> str:
    """Compact in a pipe; at a terminal with spaces, where a long line can be wrapped."""
    text = msgspec.json.encode(value, enc_hook=str)
    return (msgspec.json.format(text, indent=0) if at_terminal() else text).decode()


def tracebacks(found: Sequence[tuple[int | None, str | None]]) -> list[str]:
    """The tracebacks of attempts, each below a line that says whose it is; attempts that failed alike share one."""
    attempts: dict[str, list[str]] = {}
    for attempt, text in found:
        if text is not None:
            attempts.setdefault(text, []).append(f"{attempt}")
    lines: list[str] = []
    for text, numbers in attempts.items():
        lines += ["", f"Traceback of attempt{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}:"]
        lines += [f"  {shown(line)}" for line in text.splitlines()]
    return lines


def at_terminal() -> bool:
    return sys.stdout.isatty()


def width() -> int:
    """Of the terminal; COLUMNS wins, as everywhere."""
    return console().width


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
    from rich.table import Column
    from rich.text import Text

    length = 20 if width() >= WIDE else 8

    class Counters(TextColumn):
        def render(self, task: Any) -> Text:
            room = width() - len(f"{indent}{' ' * length} {task.completed:,}/{task.total:,} ")
            return Text("  ").join(
                Text.assemble((f"{name} ", "dim"), (f"{count:,}", STYLES[name] if count else "dim"))
                for name, count in counters_that_fit(task.fields["counters"], room).items()
            )

    start = [TextColumn(indent[:-1])] if indent else []  # a column ends with a space of its own
    columns = (
        *start,
        BarColumn(length),
        TextColumn("{task.completed:,}/{task.total:,}", table_column=Column(no_wrap=True)),
        Counters("", table_column=Column(no_wrap=True)),
    )
    with Progress(*columns, console=console(), refresh_per_second=12) as bar:
        task = None

        def show(batch: BatchMetadata) -> None:
            nonlocal task
            if task is None:
                task = bar.add_task("", total=batch.total_count, counters=counters(batch))
            bar.update(task, total=batch.total_count, completed=batch.finished_count, counters=counters(batch))

        yield show


def counters_that_fit(counts: dict[str, int], room: int) -> dict[str, int]:
    """The counters that there is room for: first those of nothing go, then the completed ones, which the bar shows."""
    happened = {name: count for name, count in counts.items() if count}
    for tried in (counts, happened):
        if len("  ".join(f"{name} {count:,}" for name, count in tried.items())) <= room:
            return tried
    return {name: count for name, count in happened.items() if name != "completed"}


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
    texts: Sequence[str]
    number: bool
    rigid: bool

    @property
    def width(self) -> int:
        return max(cell_len(text) for text in (self.name, *self.texts))


@dataclass(frozen=True, slots=True)
class _Line:
    """Some columns of a table side by side, with their widths: a row takes one line, or several."""

    columns: Sequence[_Column]
    widths: Sequence[int]
    indent: int

    def row(self, texts: Sequence[str]) -> str:
        cells = []
        for column, width, text in zip(self.columns, self.widths, texts, strict=True):
            cut = text if cell_len(text) <= width else set_cell_size(text, width - 1).rstrip() + "…"
            space = " " * (width - cell_len(cut))
            cells.append(space + cut if column.number else cut + space)
        return (" " * self.indent + (" " * GAP).join(cells)).rstrip()


def _is_rigid(cells: Sequence[Cell]) -> bool:
    """Whether a column holds ids, numbers or times, which nobody could use half of."""
    return not any(isinstance(cell, str | dict | list) and not isinstance(cell, Enum) for cell in cells)


def _fitted(columns: Sequence[_Column], room: int, elastic: str | None, spare: Sequence[str]) -> list[_Line]:
    """The lines of a row that fit a terminal: as few as can be, and of those the ones with most columns."""
    choices = []
    for left_out in range(len(spare) + 1):
        kept = [column for column in columns if column.name not in spare[:left_out]]
        choices.append(_folded(kept, room, elastic))
    return min(choices, key=len)


def _folded(columns: Sequence[_Column], room: int, elastic: str | None) -> list[_Line]:
    """Side by side as long as there is room, then on the next line; the elastic column gets the rest of its line."""
    lines: list[list[_Column]] = [[]]
    for column in columns:
        tried = [*lines[-1], column]
        if lines[-1] and _width(tried, elastic) > room - _indent(len(lines) - 1):
            lines.append([])
        lines[-1].append(column)
    return [_spread(line, room - _indent(number), elastic, _indent(number)) for number, line in enumerate(lines)]


def _indent(line: int) -> int:
    return INDENT if line else 0


def _least(column: _Column, elastic: str | None) -> int:
    return min(column.width, max(NARROWEST, cell_len(column.name))) if column.name == elastic else column.width


def _width(columns: Sequence[_Column], elastic: str | None) -> int:
    return sum(_least(column, elastic) + GAP for column in columns) - GAP


def _spread(columns: Sequence[_Column], room: int, elastic: str | None, indent: int) -> _Line:
    left = max(0, room - _width(columns, elastic))
    widths = []
    for column in columns:
        width = _least(column, elastic)
        if column.name == elastic:
            width = min(column.width, width + left)
        # Only a name or a text can be wider than a whole line.
        widths.append(width if column.rigid else min(width, room))
    return _Line(columns, widths, indent)


def _print_lines(lines: Sequence[_Line]) -> None:
    from rich.text import Text

    out = console()
    for line in lines:
        out.print(Text(line.row([column.name for column in line.columns]), style="dim"), soft_wrap=True)
    for number in range(len(lines[0].columns[0].texts)):
        for position, line in enumerate(lines):
            texts = [column.texts[number] for column in line.columns]
            if position == 0 or any(text not in ("", NOTHING) for text in texts):
                click.echo(line.row(texts))
