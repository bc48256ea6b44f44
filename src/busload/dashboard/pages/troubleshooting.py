"""Troubleshooting: what waits for a person by cause, over all domains, and one cause with its commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response

from busload.commands.checks import FINGERPRINT
from busload.dashboard import asked
from busload.dashboard.access import Permission
from busload.dashboard.problem import Problem, no_such_page, wrong_input
from busload.dashboard.render import ago, bus_of, cli, number, render, sees_payloads, tree, url
from busload.dashboard.route import Export, Live, Rows, page
from busload.troubleshooting import selection
from busload.troubleshooting.causes import Reason
from busload.troubleshooting.selection import Cause, Causes, Filter, Item, Place, Selection

LIMIT, COMMANDS = 25, 25
HEIGHT, STEP = 20, 4
"""Of a spark line, in its own units: how high it is, and how far one hour is from the next."""


# -- what pages show of a cause ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bar:
    """One hour of a spark line."""

    x: int
    y: float
    height: float


@dataclass(frozen=True, slots=True)
class Spark:
    """The failures of the last day, hour by hour, to be drawn and to be read aloud."""

    bars: tuple[Bar, ...]
    label: str


def spark(hours: Sequence[int]) -> Spark:
    most = max(hours, default=0)
    if not most:
        return Spark((), "Nothing failed in the last 24 hours")
    bars = []
    for at, count in enumerate(hours):
        height = max(round(HEIGHT * count / most, 1), 1.5) if count else 0.0
        bars.append(Bar(at * STEP, round(HEIGHT - height, 1), height))
    at = len(hours) - 1 - list(hours).index(most)
    when = "the last hour" if at == 0 else f"one hour, {at + 1} hours ago"
    return Spark(tuple(bars), f"{sum(hours):,} failed in the last 24 hours, most of them ({most:,}) in {when}")


def title_of(request: Request, cause: Cause) -> str:
    """What went wrong, as this person may see it."""
    if cause.message and sees_payloads(request):
        return cause.message
    return cause.error_code or cause.error_type or "Failed without an error"


def kind_of(cause: Cause) -> str:
    return cause.error_code or cause.error_type or "No error"


# -- all causes --------------------------------------------------------------------------------------------------------


def wanted_of(request: Request) -> Filter:
    """Which causes the address asks for."""
    text = asked.text(request, "text")
    if text is not None and not sees_payloads(request):
        raise Problem(403, "Only for operators", "Error texts are hidden from readers.", "Filter without the text.")
    return Filter(
        asked.text(request, "domain"),
        asked.text(request, "type"),
        asked.one_of(request, "reason", Reason),
        asked.id_of(request, "batch"),
        text,
    )


def names_of(wanted: Filter | Selection) -> dict[str, Any]:
    """The filters by their names in an address."""
    names = {"type": wanted.command_type, "reason": wanted.reason, "batch": wanted.batch_id}
    return {"domain": wanted.domain, "text": wanted.text, **names} if isinstance(wanted, Filter) else names


def _place(request: Request) -> Place | None:
    """Where the page before ends: `count-fingerprint-domain`."""
    found = asked.text(request, "after")
    if found is None:
        return None
    count, _, rest = found.partition("-")
    fingerprint, _, domain = rest.partition("-")
    if not count.isdecimal() or len(count) > 12 or not FINGERPRINT.match(fingerprint) or not domain:
        raise wrong_input(f"The page begins at {found!r:.80}, which is no cursor.", "Begin with the first page.")
    return Place(int(count), domain, fingerprint)


async def _found(request: Request, wanted: Filter, after: Place | None, limit: int) -> Causes:
    bus = bus_of(request)
    found = [
        await shard.database.read(selection.list_causes(shard.settings.limits, wanted, limit=limit, after=after))
        for shard in (bus.shards if wanted.domain is None else [bus.shard_of(wanted.domain)])
    ]
    causes = sorted((cause for one in found for cause in one.causes), key=_order)[:limit]
    return Causes(causes, sum(one.total for one in found), sum(one.commands for one in found))


def _order(cause: Cause) -> tuple[int, str, str]:
    """As a database lists them: the largest first."""
    return -cause.count, cause.domain, cause.fingerprint


async def _listed(request: Request) -> tuple[Filter, Causes]:
    wanted, after = wanted_of(request), _place(request)
    found = await _found(request, wanted, after, LIMIT + 1)
    if after is not None and not found.causes:
        raise no_such_page()
    return wanted, found


async def _exported_causes(request: Request, after: Place | None, limit: int) -> Rows:
    found = (await _found(request, wanted_of(request), after, limit)).causes
    return Rows(found, found[-1].place if len(found) == limit else None)


async def list_page(request: Request) -> Response:
    wanted, found = await _listed(request)
    names, shown = names_of(wanted), found.causes[:LIMIT]
    last = shown[-1].place if len(found.causes) > LIMIT else None
    after = None if last is None else f"{last.count}-{last.fingerprint}-{last.domain}"
    options = {**names, "error": names["text"], "text": None}
    return render(
        request,
        "troubleshooting.html",
        title="Troubleshooting",
        causes=[(cause, title_of(request, cause), kind_of(cause), spark(cause.hours)) for cause in shown],
        wanted=wanted,
        given=any(value is not None for value in names.values()),
        reasons=list(Reason),
        sees=sees_payloads(request),
        of_cause={name: names[name] for name in ("type", "reason", "batch")},
        live=_values(found),
        first=url(request, "troubleshooting", names) if asked.text(request, "after") else None,
        next=url(request, "troubleshooting", {**names, "after": after}) if after else None,
        cli=cli("troubleshooting", "groups", *(f"--{name}={value}" for name, value in options.items() if value)),
    )


async def live_list(request: Request) -> Live:
    _, found = await _listed(request)
    return _values(found)


def _values(found: Causes) -> Live:
    shown = found.causes[:LIMIT]
    values: dict[str, str | list[str]] = {"commands": number(found.commands), "causes": number(found.total)}
    values["rows"] = [f"{cause.domain}/{cause.fingerprint}" for cause in shown]
    for cause in shown:
        key = f"{cause.domain}/{cause.fingerprint}."
        values |= {f"{key}count": number(cause.count), f"{key}newest": f"{ago(cause.newest)} ago"}
    return values


# -- one cause ---------------------------------------------------------------------------------------------------------


def selection_of(request: Request, command_ids: Sequence[UUID] = ()) -> Selection:
    """The commands of a cause that the address asks for."""
    fingerprint = request.path_params["fingerprint"].lower()
    if not FINGERPRINT.match(fingerprint):
        raise wrong_input(f"{fingerprint!r:.80} is no cause.", "Use the 12 hex digits that the list of causes shows.")
    return Selection(
        request.path_params["domain"],
        fingerprint,
        asked.text(request, "type"),
        asked.one_of(request, "reason", Reason),
        asked.id_of(request, "batch"),
        tuple(command_ids),
    )


async def cause_of(request: Request, chosen: Selection) -> Cause | None:
    """The cause, as far as its filter lets it through; None if nothing waits for it."""
    bus = bus_of(request).shard_of(chosen.domain)
    return await bus.database.read(selection.find_cause(bus.settings.limits, chosen))


async def _cause_with_items(request: Request, chosen: Selection, limit: int) -> tuple[Cause | None, list[Item]]:
    bus, after = bus_of(request).shard_of(chosen.domain), _cursor(request)
    plan = selection.cause_with_items(bus.settings.limits, chosen, limit=limit, after=after)
    return await bus.database.in_transaction(plan)


def nothing_waits(chosen: Selection) -> Problem:
    return Problem(
        404,
        "Nothing waits for this cause",
        f"Nothing in domain {chosen.domain!r:.80} waits for the cause {chosen.fingerprint} now, or nothing that fits "
        "the filter. All of it was decided, or the address is wrong.",
        "Go back to the list of causes, which shows what waits.",
    )


def _cursor(request: Request) -> int:
    found = asked.text(request, "after")
    if found is None:
        return -1
    if not found.isdecimal() or len(found) > 18:
        raise wrong_input(f"The page begins at {found!r:.80}, which is no cursor.", "Begin with the first page.")
    return int(found)


async def show(request: Request, notice: str | None = None) -> Response:
    chosen, after, bus = selection_of(request), _cursor(request), bus_of(request)
    cause, found = await _cause_with_items(request, chosen, COMMANDS + 1)
    if cause is None:
        raise nothing_waits(chosen)
    if not found and after != -1:
        raise no_such_page()
    names, items = names_of(chosen), found[:COMMANDS]
    example = await bus.troubleshooting.get(chosen.domain, items[0].command_id if items else cause.example)
    here = {"domain": chosen.domain, "fingerprint": chosen.fingerprint}
    later = {**names, "after": items[-1].command} if len(found) > COMMANDS else None
    return render(
        request,
        "cause.html",
        title=title_of(request, cause),
        cause=cause,
        kind=kind_of(cause),
        spark=spark(cause.hours),
        chosen=chosen,
        given=any(value is not None for value in names.values()),
        names=names,
        reasons=list(Reason),
        items=items,
        example=example,
        data=tree(request, example.data) if example else None,
        details=tree(request, example.details) if example and example.details is not None else None,
        sees=sees_payloads(request),
        live=_cause_values(cause, items),
        first=url(request, "cause", names, **here) if after != -1 else None,
        next=url(request, "cause", later, **here) if later else None,
        cli=cli_of(chosen, "retry", "--dry-run"),
        notice=notice,
    )


def cli_of(chosen: Selection, action: str, *words: object) -> str | None:
    """The command line that decides about the same commands; None if it cannot name them."""
    if chosen.command_ids:
        if len(chosen.command_ids) > 10 or "--dry-run" in words:
            return None
        return cli("troubleshooting", action, *chosen.command_ids, "--domain", chosen.domain, *words)
    if chosen.reason is not None or chosen.batch_id is not None:
        return None
    of_type = ["--type", chosen.command_type] if chosen.command_type else []
    group = ["--group", chosen.fingerprint, "--domain", chosen.domain]
    return cli("troubleshooting", action, *group, *of_type, *words)


async def live(request: Request) -> Live:
    return _cause_values(*await _cause_with_items(request, selection_of(request), COMMANDS))


def _cause_values(cause: Cause | None, items: Sequence[Item]) -> Live:
    return {
        "count": number(0 if cause is None else cause.count),
        "newest": "–" if cause is None else f"{ago(cause.newest)} ago",
        "rows": [str(item.command_id) for item in items],
    }


async def _exported_commands(request: Request, after: int | None, limit: int) -> Rows:
    chosen = selection_of(request)
    if after is None and await cause_of(request, chosen) is None:
        raise nothing_waits(chosen)
    items = selection.items(chosen, limit=limit, after=-1 if after is None else after)
    found = await bus_of(request).shard_of(chosen.domain).database.read(items)
    return Rows(found, found[-1].command if len(found) == limit else None)


PATH = "/troubleshooting/{domain}/{fingerprint}"
ROUTES = (
    page(
        "troubleshooting",
        "/troubleshooting",
        list_page,
        Permission.READ,
        label="Troubleshooting",
        live=live_list,
        export=Export(Cause, _exported_causes),
    ),
    page(
        "cause",
        PATH,
        show,
        Permission.READ,
        live=live,
        export=Export(Item, _exported_commands, leaves_out=frozenset({"command"})),
    ),
)
