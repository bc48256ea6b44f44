"""How the CLI prints: text and tables that fit the terminal of a person, plain lines for a pipe, JSON for programs."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

import click
import msgspec
from rich.cells import cell_len, chop_cells, set_cell_size

if TYPE_CHECKING:
    from rich.console import Console

GAP = 2
"""Characters between two columns."""

NOTHING = "-"
"""What stands for a value that is not there."""

NARROWEST, INDENT = 24, 4
"""Characters that an elastic column has at least, and those before the second line of a row."""

PLAIN_EVERY = 0.5
"""Seconds between two lines about progress in a pipe, where there is no bar."""

Cell: TypeAlias = object


def echo_json(value: Any) -> None:
    """One JSON document on one line."""
    click.echo(msgspec.json.encode(value, enc_hook=str))


def echo_styled(*parts: tuple[str, str]) -> None:
    """One line of texts, each with its rich style at a terminal and plain in a pipe."""
    if not at_terminal():
        click.echo("".join(text for text, _ in parts))
        return
    from rich.text import Text

    console().print(Text.assemble(*parts), soft_wrap=True)


def facts(pairs: Sequence[tuple[str, Cell]]) -> None:
    """Names and values, one pair a line; a value that is None is left out. At a terminal, long values are wrapped."""
    known = [(name, shown(value)) for name, value in pairs if value is not None]
    start = max(len(name) for name, _ in known) + GAP
    for name, value in known:
        paragraph(value, first=name.ljust(start), then=" " * start)


def paragraph(text: str, *, first: str = "", then: str = "") -> None:
    """A text that is wrapped at a terminal. Its first line begins with `first`, each further line with `then`."""
    lines = wrapped(text, width() - cell_len(then)) if at_terminal() else [text]
    for number, line in enumerate(lines):
        click.echo(((then if number else first) + line).rstrip())


def wrapped(text: str, room: int) -> list[str]:
    """The lines of a text. Text in backticks is for people to copy, so it stays on one line, as ids do."""
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


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    nothing: str,
    elastic: str | None = None,
    spare: Sequence[str] = (),
) -> None:
    """Rows below their columns; if there are no rows, `nothing` is said instead.

    Where a terminal is too narrow, the `elastic` column is cut. If that is not enough, `spare` columns are left out or
    the rest of a row goes to further lines, whichever takes fewer lines. Ids, numbers and times are never cut.
    """
    if not rows:
        click.echo(nothing, err=not at_terminal())
    elif at_terminal():
        whole = [
            _Column.of(name, cells, elastic=name == elastic)
            for name, cells in zip(columns, zip(*rows, strict=True), strict=True)
        ]
        _print(_fitted(whole, width(), spare), len(rows))
    else:
        for line in aligned([columns, *([shown(cell) for cell in row] for row in rows)]):
            click.echo(line)


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    texts: Sequence[str]
    number: bool
    rigid: bool
    """Whether it holds ids, numbers or times, of which nobody could use a part."""
    elastic: bool

    @classmethod
    def of(cls, name: str, cells: Sequence[Cell], *, elastic: bool) -> _Column:
        number = all(isinstance(cell, int) for cell in cells)
        rigid = not any(isinstance(cell, str | dict | list) and not isinstance(cell, Enum) for cell in cells)
        return cls(name, [shown(cell) for cell in cells], number, rigid, elastic)

    @property
    def width(self) -> int:
        return max(cell_len(text) for text in (self.name, *self.texts))

    @property
    def least(self) -> int:
        return min(self.width, max(NARROWEST, cell_len(self.name))) if self.elastic else self.width


@dataclass(frozen=True, slots=True)
class _Line:
    """Some columns side by side with their widths. A row takes one line, or several."""

    columns: Sequence[_Column]
    widths: Sequence[int]
    indent: int

    def row(self, texts: Sequence[str]) -> str:
        cells = []
        for column, room, text in zip(self.columns, self.widths, texts, strict=True):
            cut = text if cell_len(text) <= room else set_cell_size(text, room - 1).rstrip() + "…"
            space = " " * (room - cell_len(cut))
            cells.append(space + cut if column.number else cut + space)
        return (" " * self.indent + (" " * GAP).join(cells)).rstrip()


def _fitted(columns: Sequence[_Column], room: int, spare: Sequence[str]) -> list[_Line]:
    """The lines of a row: as few as can be, and of several ways to have so few, the one with most columns."""
    choices = (
        [column for column in columns if column.name not in spare[:left_out]] for left_out in range(len(spare) + 1)
    )
    return min((list(_folded(kept, room)) for kept in choices), key=len)


def _folded(columns: Sequence[_Column], room: int) -> Iterator[_Line]:
    """Columns side by side as long as there is room, then on the next line."""
    line, indent = list[_Column](), 0
    for column in columns:
        if line and _width([*line, column]) > room - indent:
            yield _spread(line, room - indent, indent)
            line, indent = [], INDENT
        line.append(column)
    yield _spread(line, room - indent, indent)


def _spread(columns: Sequence[_Column], room: int, indent: int) -> _Line:
    """Give the elastic column the rest of its line."""
    left = max(0, room - _width(columns))
    widths = [min(column.width, column.least + left) for column in columns]
    # Only a name or a text can be wider than a whole line.
    fitting = [width if column.rigid else min(width, room) for column, width in zip(columns, widths, strict=True)]
    return _Line(columns, fitting, indent)


def _width(columns: Sequence[_Column]) -> int:
    return sum(column.least + GAP for column in columns) - GAP


def _print(lines: Sequence[_Line], rows: int) -> None:
    for line in lines:
        echo_styled((line.row([column.name for column in line.columns]), "dim"))
    for number in range(rows):
        for position, line in enumerate(lines):
            texts = [column.texts[number] for column in line.columns]
            if position == 0 or any(text not in ("", NOTHING) for text in texts):
                click.echo(line.row(texts))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Plain columns, never cut: a pipe has no width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    gap = " " * GAP
    return [gap.join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def shown(cell: Cell) -> str:
    """A value as text on one line. Data may hold anything, so characters that would steer the terminal are escaped."""
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
        case dict() | list():
            text = _json(cell)
        case _:
            text = str(cell)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _json(value: Any) -> str:
    """Compact in a pipe; at a terminal with spaces, where a long line can be wrapped."""
    text = msgspec.json.encode(value, enc_hook=str)
    return (msgspec.json.format(text, indent=0) if at_terminal() else text).decode()


def joined(*parts: object) -> str | None:
    """The parts of an error that are known, in one line; None if none is."""
    return ": ".join(str(part) for part in parts if part) or None


def tracebacks(found: Sequence[tuple[int | None, str | None]]) -> list[str]:
    """The tracebacks of attempts, each below a line with its attempt; attempts that failed alike share one."""
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
    """The width of the terminal; the variable COLUMNS wins, as everywhere."""
    return console().width


def console() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)
