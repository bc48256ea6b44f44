"""What a page module offers: routes, each with the permission that it needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from busload.dashboard.access import Permission

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]

Live: TypeAlias = Mapping[str, str | int | list[str]]
"""The values of a page that change: texts by key. `rows`, if there is one, lists the ids of the rows of its table."""

ReadLive: TypeAlias = Callable[[Request], Awaitable[Live]]


class Rows(NamedTuple):
    """Some rows of a list, and where the next ones begin; None if these are the last."""

    found: Sequence[Any]
    next: Any


ReadRows: TypeAlias = Callable[[Request, Any, int], Awaitable[Rows]]
"""Reads the rows of a list with the filter of its address: those behind `next` of the rows before, at most so many."""


@dataclass(frozen=True, slots=True)
class Export:
    """The rows of a list as a file. Their fields have the names of the dataclass `kind`."""

    kind: type[Any]
    read: ReadRows
    leaves_out: frozenset[str] = frozenset()
    """Fields that are of no use outside."""
    part: str = ""
    """The part of a page that it has, where a page is more than one list or its own name may end like a file's."""


@dataclass(frozen=True, slots=True)
class Route:
    """One address of the dashboard. A page is read by GET, and an action is done by POST."""

    name: str
    """What `url(name)` finds it by."""
    path: str
    handler: Handler
    permission: Permission
    method: str = "GET"
    label: str | None = None
    """What the navigation calls it; None if it is not there."""
    live: ReadLive | None = None
    """Reads the live values of a page: its URL and `/live` streams them."""
    export: Export | None = None
    """What a list gives as a file, at `export_path` and `.csv` or `.json`."""
    most_body: int | None = None
    """Bytes that its form may have, if they are more than usual."""

    @property
    def export_path(self) -> str:
        """Where its rows are, without the end that names the format."""
        return f"{self.path}/{self.export.part}" if self.export is not None and self.export.part else self.path

    def __post_init__(self) -> None:
        if not isinstance(self.permission, Permission):
            raise ValueError(f"Route {self.name!r} has no permission. Give it Permission.READ or Permission.OPERATE.")
        if (self.method == "POST") != (self.permission is Permission.OPERATE):
            raise ValueError(f"Route {self.name!r} is {self.method}: GET only reads, and POST needs OPERATE.")


def page(
    name: str,
    path: str,
    handler: Handler,
    permission: Permission,
    *,
    label: str | None = None,
    live: ReadLive | None = None,
    export: Export | None = None,
) -> Route:
    """A page: it changes nothing."""
    return Route(name, path, handler, permission, "GET", label, live, export)


def action(name: str, path: str, handler: Handler, permission: Permission, *, most_body: int | None = None) -> Route:
    """An action: it changes something, and answers with the page that shows what.

    Its path is that of its page, a slash and a verb.
    """
    return Route(name, path, handler, permission, "POST", most_body=most_body)
