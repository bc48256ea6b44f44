"""How the CLI prints tables. A `View` says which columns a kind of value has; the rest fits columns to the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import click
from rich.cells import cell_len, set_cell_size

from busload.cli.answer import Answer
from busload.cli.output import GAP, NOTHING, Cell, at_terminal, echo_styled, facts, shown, width

NARROWEST, INDENT = 24, 4
"""Characters that an elastic column has at least, and those before the second line of a row."""

T = TypeVar("T")


@dataclass(frozen=True)
class View(Generic[T]):
    """How values are shown to people: as the rows of a table, or one as a list of facts.

    Each word of `names` is a column and the attribute that it shows, as in `"BATCH=batch.batch_id DOMAIN"`. Without
    `=` the attribute has the column's own name. `cells` has functions for columns that show more than an attribute.
    """

    names: str
    cells: Mapping[str, Callable[[T], Cell]] = field(default_factory=dict)
    nothing: str = ""
    elastic: str | None = None
    spare: tuple[str, ...] = ()

    @property
    def columns(self) -> dict[str, Callable[[T], Cell]]:
        pairs = (word.partition("=") for word in self.names.split())
        return {
            (title := name.replace("_", " ")): self.cells.get(title) or partial(_attribute, attribute or name.lower())
            for name, _, attribute in pairs
        }

    def without(self, name: str) -> View[T]:
        kept = [word for word in self.names.split() if word.partition("=")[0] != name]
        return replace(self, names=" ".join(kept))

    def list(
        self,
        found: Sequence[T],
        *,
        value: Any = None,
        nothing: str | None = None,
        notes: Sequence[str] = (),
        ok: bool = True,
    ) -> Answer:
        """All of them as a table, and people get the `notes` on stderr; programs get `value` if it is given."""

        def show() -> None:
            self.print_table(found, nothing=nothing)
            for note in notes:
                click.echo(note, err=True)

        return Answer(found if value is None else value, show, found=bool(found), ok=ok)

    def one(self, found: T, *, below: Answer | None = None, lines: Sequence[str] = (), **more: Any) -> Answer:
        """One of them as facts, then what else there is; programs get `more` among its fields."""

        def show() -> None:
            self.print_facts(found)
            if below is not None:
                click.echo()
                below.print(False)
            for line in lines:
                click.echo(line)

        return Answer({**_fields(found), **more} if more else found, show)

    def print_facts(self, found: T, **more: Cell) -> None:
        facts([*((name, cell(found)) for name, cell in self.columns.items()), *more.items()])

    def print_table(self, found: Sequence[T], *, nothing: str | None = None) -> None:
        columns = self.columns
        rows = [[cell(one) for cell in columns.values()] for one in found]
        nothing = self.nothing if nothing is None else nothing
        table([*columns], rows, nothing=nothing, elastic=self.elastic, spare=self.spare)


def _attribute(path: str, value: Any) -> Any:
    """An attribute of an attribute; None if there is none on the way."""
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return value


def _fields(found: Any) -> dict[str, Any]:
    """The fields of a dataclass as they are."""
    return {name: getattr(found, name) for name in found.__dataclass_fields__}


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
        return
    whole = [
        _Column(name, cells, elastic=name == elastic)
        for name, cells in zip(columns, zip(*rows, strict=True), strict=True)
    ]
    lines = _fitted(whole, width(), spare)
    for position, line in enumerate(lines):
        echo_styled((_row(line, [column.name for column, _ in line], position), "dim"))
    for number in range(len(rows)):
        for position, line in enumerate(lines):
            texts = [column.texts[number] for column, _ in line]
            if position == 0 or any(text not in ("", NOTHING) for text in texts):
                click.echo(_row(line, texts, position))


class _Column:
    def __init__(self, name: str, cells: Sequence[Cell], *, elastic: bool) -> None:
        self.name, self.texts = name, [shown(cell) for cell in cells]
        self.width = max(cell_len(text) for text in (name, *self.texts))
        self.least = min(self.width, max(NARROWEST, cell_len(name))) if elastic else self.width
        self.to_the_right = at_terminal() and all(isinstance(cell, int) for cell in cells)
        # Ids, numbers and times, of which nobody could use a part.
        self.rigid = not any(isinstance(cell, str | dict | list) and not isinstance(cell, Enum) for cell in cells)


_Line: TypeAlias = Sequence[tuple[_Column, int]]
"""Some columns side by side with their widths. A row takes one line, or several."""


def _fitted(columns: Sequence[_Column], room: int, spare: Sequence[str]) -> list[_Line]:
    """The lines of a row: as few as can be, and of several ways to have so few, the one with most columns."""
    choices = (
        [column for column in columns if column.name not in spare[:left_out]] for left_out in range(len(spare) + 1)
    )
    return min((list(_folded(kept, room)) for kept in choices), key=len)


def _folded(columns: Sequence[_Column], room: int) -> Iterator[_Line]:
    """Columns side by side as long as there is room, then on the next line."""
    line, room_below = list[_Column](), room - INDENT
    for column in columns:
        if line and _width([*line, column]) > room:
            yield _spread(line, room)
            line, room = [], room_below
        line.append(column)
    yield _spread(line, room)


def _spread(columns: Sequence[_Column], room: int) -> _Line:
    """Give the elastic column the rest of its line."""
    left = max(0, room - _width(columns))
    widths = [min(column.width, column.least + left) for column in columns]
    # Only a name or a text can be wider than a whole line.
    return [(one, wide if one.rigid else min(wide, room)) for one, wide in zip(columns, widths, strict=True)]


def _width(columns: Sequence[_Column]) -> int:
    return sum(column.least + GAP for column in columns) - GAP


def _row(line: _Line, texts: Sequence[str], position: int) -> str:
    cells = []
    for (column, room), text in zip(line, texts, strict=True):
        cut = text if cell_len(text) <= room else set_cell_size(text, room - 1).rstrip() + "…"
        space = " " * (room - cell_len(cut))
        cells.append(space + cut if column.to_the_right else cut + space)
    indent = " " * INDENT if position else ""
    return (indent + (" " * GAP).join(cells)).rstrip()
