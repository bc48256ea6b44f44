"""The filter of a list: what its address asks for, and the pages of the list that have the same filter."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Self, TypeAlias

from starlette.requests import Request

from busload.dashboard.render import iso, url

Read: TypeAlias = Callable[[Request, str], Any]
"""Reads one filter of an address: `asked.text`, `asked.moment`, …"""


class Filter(dict[str, Any]):
    """Filters by their names in the address, which are those of the command line too; None for what is not asked."""

    @classmethod
    def of(cls, request: Request, **reads: Read) -> Self:
        return cls({name: read(request, name) for name, read in reads.items()})

    @property
    def given(self) -> bool:
        return any(value is not None for value in self.values())

    @property
    def words(self) -> list[str]:
        """The options of the command line that mean the same."""
        found = []
        for name, value in self.items():
            if value is not None:
                option = f"--{name.replace('_', '-')}"
                found += [option] if value is True else [option, _written(value)]
        return found

    def query(self, after: object = None) -> dict[str, str]:
        """What an address asks that has this filter, of the page behind a cursor."""
        asked = {**self, "after": after}
        return {name: _written(value) for name, value in asked.items() if value is not None}

    def shown(self, request: Request, route: str, *, after: object, next: object) -> dict[str, Any]:
        """What templates need: the filter, and links to the first page of the list and to the next one."""
        return {
            "wanted": self,
            "given": self.given,
            "first": None if after is None else url(request, route, self.query()),
            "next": None if next is None else url(request, route, self.query(next)),
        }


def _written(value: Any) -> str:
    if isinstance(value, datetime):
        return iso(value)
    return "yes" if value is True else str(value)
