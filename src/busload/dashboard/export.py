"""Exports: all rows that the filter of a list selects, on whatever page, as CSV or JSON to be kept."""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import AsyncIterator, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from busload.commands.payload import WIDEST, encode
from busload.dashboard.problem import as_problem
from busload.dashboard.render import dashboard_of, masked, sees_payloads
from busload.dashboard.route import Export, Route, Rows

MOST_ROWS = 100_000
PORTION = 100
"""Rows that are read at once."""
PATIENCE = 5.0
"""Seconds that one portion may take."""
LONGEST = 300.0
"""Seconds after which an export ends: a search may look at many commands, and find few."""
FORMATS = {"csv": "text/csv; charset=utf-8", "json": "application/json"}
PAYLOADS = frozenset(
    (
        *("data", "result", "headers", "custom_data", "details"),
        *("message", "last_error_message", "last_traceback", "last_publish_error"),
    )
)
"""Fields that are left out for people who may not see payloads; for others, keys in them are masked."""
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""What a text begins with that a spreadsheet would take for a formula."""

Row: TypeAlias = dict[str, Any]


async def export(route: Route, format: str, request: Request) -> Response:
    """The rows of a list as a file. A wrong filter is told by a page, before the file begins."""
    assert route.export is not None
    first = await route.export.read(request, None, PORTION)
    headers = {"Content-Disposition": f'attachment; filename="busload-{route.name}.{format}"'}
    return StreamingResponse(_file(route, format, request, first), media_type=FORMATS[format], headers=headers)


async def _file(route: Route, format: str, request: Request, rows: Rows) -> AsyncIterator[str]:
    """The text of a file, portion by portion. If it does not have all rows, its end says so."""
    assert route.export is not None
    loop, left, cut = asyncio.get_running_loop(), MOST_ROWS, None
    end = loop.time() + LONGEST
    seen = _Seen(route.export, request)
    write = _Json() if format == "json" else _Csv(seen.names)
    yield write.begin()
    while True:
        if text := write.rows([seen.row(row) for row in rows.found[:left]]):
            yield text
        if len(rows.found) > left:
            cut = f"These are the first {MOST_ROWS:,} rows. Narrow the filter for the others."
            break
        left -= len(rows.found)
        if rows.next is None:
            break
        if loop.time() >= end:
            cut = f"These are the rows that were found in {LONGEST:.0f} seconds. Narrow the filter for the others."
            break
        try:
            async with asyncio.timeout(PATIENCE):
                rows = await route.export.read(request, rows.next, PORTION)
        except Exception as error:
            cut = f"{as_problem(error, route.name).title}: there may be more rows. Export again for all of them."
            break
    yield write.end(cut)


class _Seen:
    """Rows as JSON has them, as far as this person may see them."""

    def __init__(self, export: Export, request: Request) -> None:
        self._mask = dashboard_of(request).mask
        self._hidden = frozenset() if sees_payloads(request) else PAYLOADS
        self.names = [name for name in self._fields(export.kind) if name not in export.leaves_out]

    def row(self, row: Any) -> Row:
        return {name: self._plain(name, getattr(row, name)) for name in self.names}

    def _fields(self, kind: Any) -> list[str]:
        return [field.name for field in fields(kind) if field.name not in self._hidden]

    def _plain(self, name: str, value: Any) -> Any:
        """A value of a row, or of what a row holds, such as the stages of a job."""
        if name in PAYLOADS:
            return masked(value, self._mask)
        if is_dataclass(value):
            return {inner: self._plain(inner, getattr(value, inner)) for inner in self._fields(value)}
        if isinstance(value, tuple | list):
            return [self._plain(name, item) for item in value]
        if isinstance(value, datetime):
            return value.astimezone(UTC).isoformat()
        return msgspec.to_builtins(value)


class _Json:
    """One array of objects, a line for each."""

    def __init__(self) -> None:
        self._between = ""

    def begin(self) -> str:
        return "[\n"

    def rows(self, rows: Sequence[Row]) -> str:
        text = "".join(",\n" + encode(row, WIDEST) for row in rows)
        if text and not self._between:
            self._between, text = ",\n", text.removeprefix(",\n")
        return text

    def end(self, cut: str | None) -> str:
        return ("" if cut is None else self._between + encode({"cut_off": cut})) + "\n]\n"


class _Csv:
    """Names in the first line, and a line for each row. What is no text, number or time is JSON."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def begin(self) -> str:
        return _lines([self._names])

    def rows(self, rows: Sequence[Row]) -> str:
        return _lines([[_cell(row[name]) for name in self._names] for row in rows])

    def end(self, cut: str | None) -> str:
        return "" if cut is None else _lines([[f"# Cut off: {cut}"]])


def _cell(value: Any) -> str:
    """A cell that a spreadsheet shows and does not run."""
    if value is None:
        return ""
    if isinstance(value, str):
        return f"'{value}" if value.startswith(FORMULA) else value
    return encode(value, WIDEST)


def _lines(rows: Sequence[Sequence[str]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue()
