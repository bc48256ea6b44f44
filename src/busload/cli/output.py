"""How the CLI prints text and JSON: lines that are wrapped at the terminal of a person, and whole in a pipe."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeAlias

import click
import msgspec
from rich.cells import cell_len, chop_cells

from busload.commands.lines import as_called

if TYPE_CHECKING:
    from rich.console import Console

GAP = 2
"""Characters between two columns."""

NOTHING = "-"
"""What stands for a value that is not there."""

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
    text = as_called(text)
    for number, line in enumerate(wrapped(text, width() - max(cell_len(first), cell_len(then)))):
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


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of texts as columns, which are never cut."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    padded = [[text + " " * (width - cell_len(text)) for text, width in zip(row, widths, strict=True)] for row in rows]
    return [(" " * GAP).join(row).rstrip() for row in padded]


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
            compact = msgspec.json.encode(cell, enc_hook=str)
            # At a terminal with spaces, where a long line can be wrapped.
            text = (msgspec.json.format(compact, indent=0) if at_terminal() else compact).decode()
        case _:
            text = str(cell)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


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
    """The width of the terminal, where the variable COLUMNS wins, as everywhere. A pipe has room for everything."""
    return console().width if at_terminal() else sys.maxsize


def console() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)
