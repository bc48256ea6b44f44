"""How pages are made: the templates, what every page gets, and how data and times are shown."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import quote, urlencode

import jinja2
import msgspec
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import HTMLResponse

from busload.bus import CommandBus
from busload.commands.lines import as_called, line_as_called
from busload.commands.payload import WIDEST, encode
from busload.commands.wording import counted, span
from busload.dashboard.access import Permission, Principal, Role
from busload.dashboard.route import Live, Route
from busload.shards.databases import place

MASKED = "••••••"
DATABASE = "busload_database"
"""The cookie that keeps which database of several a browser has chosen."""
ALL = "all"
SHOWN = "X-Busload-Database"
"""By this header, and by the cookie's name in the address of its stream, an open page says which database it shows.

Another window of the browser may have chosen another one since then, where the same numbers mean other workers.
"""
MOST_NODES, MOST_DEPTH = 2000, 50
"""How many values of one payload are drawn, and how deep; the copy has all of them."""
TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "txt": "text/plain"}


@dataclass(frozen=True)
class Dashboard:
    """What was said when the dashboard was made."""

    bus: CommandBus
    title: str
    routes: Mapping[str, Route]
    hide_payloads: bool
    mask: Sequence[str]
    memory: dict[Any, Any] = field(default_factory=dict)
    """What pages remember between two requests, such as counts that make a rate."""

    @property
    def databases(self) -> list[str]:
        """The databases to choose from; none if there is only one."""
        shards = self.bus.shards
        return [place(shard) for shard in shards] if len(shards) > 1 else []

    @property
    def navigation(self) -> list[Route]:
        return [route for route in self.routes.values() if route.label]


def dashboard_of(request: Request) -> Dashboard:
    dashboard: Dashboard = request.app.state.dashboard
    return dashboard


def bus_of(request: Request) -> CommandBus:
    """The bus, or that of the one database of several that the page shows."""
    bus, chosen = dashboard_of(request).bus, chosen_database(request)
    return bus if chosen is None else bus.shards[chosen]


def chosen_database(request: Request) -> int | None:
    """The number of the database that the page shows, or that a new page would show; None if it is all of them."""
    shown = request.headers.get(SHOWN) or request.query_params.get(DATABASE)
    text, shards = shown or request.cookies.get(DATABASE, ""), dashboard_of(request).bus.shards
    if len(shards) == 1 or not (text.isascii() and text.isdecimal() and len(text) < 4 and int(text) < len(shards)):
        return None
    return int(text)


def principal_of(request: Request) -> Principal:
    principal: Principal = request.state.principal
    return principal


def sees_payloads(request: Request) -> bool:
    """Whether data, results and error texts may be shown to whoever asks."""
    return principal_of(request).role is Role.OPERATOR or not dashboard_of(request).hide_payloads


def url(request: Request, name: str, /, query: Mapping[str, Any] | None = None, **params: object) -> str:
    """The address of a route, below whatever prefix the dashboard is mounted at."""
    route = dashboard_of(request).routes[name]
    path = route.path
    for key, value in params.items():
        path = path.replace(f"{{{key}}}", quote(str(value), safe=""))
        path = path.replace(f"{{{key}:uuid}}", str(value)).replace(f"{{{key}:int}}", str(value))
    given = {key: value for key, value in (query or {}).items() if value not in (None, "")}
    return f"{request.scope.get('root_path', '')}{path}" + (f"?{urlencode(given)}" if given else "")


def page_of(request: Request) -> str:
    """The address of the page: that of an action is the address of its page, a slash and a verb."""
    path = request.url.path
    return path.rpartition("/")[0] if request.method == "POST" else path


def export_of(request: Request, format: str, part: str = "") -> str:
    """The address of the page, or of a part of it, as a file: all that its filter selects, from the first row on."""
    given = [(name, value) for name, value in request.query_params.multi_items() if name != "after" and value]
    return f"{quote(page_of(request))}{part and '/'}{part}.{format}" + (f"?{urlencode(given)}" if given else "")


def render(
    request: Request, template: str, /, *, title: str, status: int = 200, live: Live | None = None, **values: Any
) -> HTMLResponse:
    """A page. `live` are its live values, which templates know as `values`; `cli` is a command line that tells it too.

    `notice` is what an action has done.
    """
    principal: Principal | None = getattr(request.state, "principal", None)
    dashboard = dashboard_of(request)

    def address(name: str, /, query: Mapping[str, Any] | None = None, **params: object) -> str:
        return url(request, name, query, **params)

    database = chosen_database(request)
    shown = ALL if database is None else str(database)
    stream = [request.url.query, urlencode({DATABASE: shown}) if dashboard.databases else ""]
    page = {
        "title": title,
        "site": dashboard.title,
        "principal": principal,
        "operates": principal is not None and principal.may(Permission.OPERATE),
        "navigation": dashboard.navigation if principal else [],
        "databases": dashboard.databases if principal else [],
        "database": database,
        "sends": {"X-Busload": "1"} | ({SHOWN: shown} if dashboard.databases else {}),
        "here": page_of(request),
        "url": address,
        "static": lambda name: f"{request.scope.get('root_path', '')}/static/{assets()[name].digest}/{name}",
        "values": live or {},
        "live": live is not None,
        "stream": "&".join(filter(None, stream)),
        "asked": request.url.query,
        "cli": None,
        "shell": cli,
        "export": lambda format, part="": export_of(request, format, part),
        "notice": None,
    }
    html = _templates().get_template(template).render(page | values)
    return HTMLResponse(html, status)


def live_key(*parts: str) -> str:
    """A key of live values for something with names of any kind, which may have blanks that part keys."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def cli(*words: object) -> str:
    """A command line to copy."""
    return line_as_called(shlex.join(["busload", *map(str, words)]))


# -- static files ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asset:
    """A static file, with its digest: its address changes with it, so browsers may keep it for ever."""

    content: bytes
    digest: str
    kind: str


@cache
def assets() -> Mapping[str, Asset]:
    """Every static file by name. They are few and small, so they stay in memory."""
    found = {}
    for file in files("busload.dashboard").joinpath("static").iterdir():
        if (kind := TYPES.get(file.name.rpartition(".")[2])) is not None:
            content = file.read_bytes()
            found[file.name] = Asset(content, hashlib.sha256(content).hexdigest()[:16], kind)
    return found


# -- templates ---------------------------------------------------------------------------------------------------------


@cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("busload.dashboard"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "iso": iso,
        "utc": utc,
        "ago": ago,
        "words": words,
        "counted": counted,
        "short": short,
        "prose": prose,
    }
    environment.globals["line_as_called"] = line_as_called
    return environment


def number(value: float | None) -> str:
    """`1,234`, `12.5`; a dash for nothing."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:,.1f}"


def iso(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="milliseconds")


def utc(time: datetime) -> str:
    """What people see until their browser shows the time of their own zone."""
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def ago(time: datetime | None, now: datetime | None = None) -> str:
    """How long something has lasted: `90 s`; a dash for nothing."""
    if time is None:
        return "–"
    return span((now or datetime.now(UTC)) - time)


def words(name: str) -> str:
    """`IN_TROUBLESHOOTING_QUEUE` for people: `In troubleshooting queue`."""
    return str(name).replace("_", " ").capitalize()


def prose(text: str) -> Markup:
    """A sentence in which what stands between backticks is code."""
    parts = as_called(text).split("`")
    if len(parts) % 2 == 0:  # a backtick without its other half is a backtick
        return escape(text)
    code = [Markup("<code>{}</code>").format(part) if at % 2 else escape(part) for at, part in enumerate(parts)]
    return Markup("").join(code)


def short(id: object) -> str:
    """The beginning and the end of an id, which the CLI's tables do not cut but pages must."""
    text = str(id)
    return f"{text[:8]}…{text[-4:]}" if len(text) > 16 else text


# -- data --------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Node:
    """One value of a payload, to be drawn."""

    key: str | None
    kind: str
    text: str
    children: list[Node] = field(default_factory=list)
    more: int = 0
    """How many of its children are not drawn."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A payload to be drawn, and its JSON text to be copied."""

    root: Node
    json: str


def tree(request: Request, data: Any) -> Tree | None:
    """A payload as this person may see it; None if it is hidden."""
    if not sees_payloads(request):
        return None
    shown = masked(data, dashboard_of(request).mask)
    text = msgspec.json.format(encode(shown, WIDEST), indent=2)
    return Tree(_node(None, shown, [MOST_NODES]), text)


def masked(data: Any, patterns: Sequence[str]) -> Any:
    """The same data, with the values of all keys that match a pattern replaced, at any depth.

    So are values that an operation of a JSON patch gives to such keys.
    """
    if isinstance(data, Mapping):
        found, path = {}, data.get("path")
        sets = "op" in data and isinstance(path, str) and any(hides(key, patterns) for key in keys_of(path))
        for key, value in data.items():  # not by a comprehension: data may be nested deeper than those would go
            hidden = hides(str(key), patterns) or (sets and key == "value")
            found[key] = MASKED if hidden else masked(value, patterns)
        return found
    if not isinstance(data, list | tuple):
        return data
    items = []
    for item in data:
        items.append(masked(item, patterns))
    return items


def keys_of(pointer: str) -> list[str]:
    """The keys and places that a JSON pointer goes through."""
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]


def holds_masked(data: Any, patterns: Sequence[str]) -> bool:
    """Whether data has a key, at any depth, whose value is seen by nobody."""
    keyed = isinstance(data, Mapping)
    for key, value in data.items() if keyed else enumerate(data) if isinstance(data, list | tuple) else ():
        if (keyed and hides(str(key), patterns)) or holds_masked(value, patterns):
            return True
    return False


def hides(key: str, patterns: Sequence[str]) -> bool:
    """Whether the value of this key is seen by nobody."""
    return any(fnmatchcase(key.lower(), pattern.lower()) for pattern in patterns)


def _node(key: str | None, value: Any, left: list[int], depth: int = 0) -> Node:
    """A value to be drawn, with what it holds as far as there is room: `left` is how many values may still be drawn."""
    left[0] -= 1
    if isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        kind, one = ("object", "key") if isinstance(value, Mapping) else ("array", "item")
        node = Node(key, kind, counted(len(value), one))
        for name, item in items:
            if left[0] <= 0 or depth == MOST_DEPTH:
                node.more += 1
            else:
                node.children.append(_node(str(name), item, left, depth + 1))
        return node
    if isinstance(value, str):
        return Node(key, "string", value)
    return Node(key, {bool: "boolean", type(None): "null"}.get(type(value), "number"), encode(value, WIDEST))
