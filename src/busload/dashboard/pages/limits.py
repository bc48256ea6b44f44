"""Limits: how often and how many at a time receivers are called, who waits for that, and what runs in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from busload.commands.wording import counted
from busload.dashboard import asked
from busload.dashboard.access import Permission
from busload.dashboard.problem import not_found
from busload.dashboard.render import ago, bus_of, cli, live_key, number, principal_of, render
from busload.dashboard.route import Live, action, page
from busload.limits.concurrency import ConcurrencyStatus
from busload.limits.rate import LimitStatus

LIMIT = 100
"""Limits of each kind that are shown."""


@dataclass(frozen=True, slots=True)
class Seen:
    """All limits at one moment."""

    name: str | None
    rates: list[LimitStatus]
    concurrent: list[ConcurrencyStatus]

    @property
    def live(self) -> Live:
        rows = [_rate_key(one) for one in self.rates] + [_key(one) for one in self.concurrent]
        values: dict[str, str | list[str]] = {"rows": rows}
        for one in self.rates:
            key = _rate_key(one)
            values |= {
                f"{key}.rate": f"{one.rate:.4g}/s",
                f"{key}.state": "Refuses calls" if one.blocked_until else "Takes calls",
                f"{key}.state.code": "FAILED" if one.blocked_until else "COMPLETED",
                f"{key}.calls": number(one.calls),
                f"{key}.refused": number(one.refused),
            }
        for each in self.concurrent:
            key = _key(each)
            values |= {
                f"{key}.running": f"{number(each.running)} of {number(each.most)}",
                f"{key}.waiting": number(each.waiting),
                f"{key}.since": ago(each.since),
            }
        return values


async def _see(request: Request) -> Seen:
    name, limits = asked.text(request, "name"), bus_of(request).limits
    return Seen(name, await limits.list(name, limit=LIMIT), await limits.concurrency(name, limit=LIMIT))


async def show(request: Request, notice: str | None = None) -> Response:
    seen = await _see(request)
    return render(
        request,
        "limits.html",
        title="Limits",
        seen=seen,
        rate_key=_rate_key,
        key=_key,
        workers=_workers,
        limit=LIMIT,
        live=seen.live,
        cli=cli("limit", "show", seen.name) if seen.name else cli("limit", "ls"),
        notice=notice,
    )


async def live(request: Request) -> Live:
    return (await _see(request)).live


def _rate_key(one: LimitStatus) -> str:
    return live_key("rate", one.name, one.subject)


def _key(one: ConcurrencyStatus) -> str:
    return live_key("concurrency", one.name, one.subject)


def _workers(one: ConcurrencyStatus) -> Sequence[str]:
    """Each worker once, that with the oldest call first."""
    return list(dict.fromkeys(one.workers))


async def reset(request: Request) -> Response:
    fields = await asked.form(request)
    name, by = asked.required(fields, "name"), fields.get("by") or None
    count = await bus_of(request).limits.reset(name, by, operator=principal_of(request).name)
    if not count:
        raise not_found(
            f"No limit {name!r:.200} was used within a day. Nothing was done.",
            "Look at the list of limits again: it may have changed.",
        )
    values = f", {counted(count, 'value')} of its `by`" if count > 1 else ""
    return await show(request, f"Calls under {name} may go again{values}.")


PATH = "/limits"
ROUTES = (
    page("limits", PATH, show, Permission.READ, label="Limits", live=live),
    action("limit.reset", f"{PATH}/reset", reset, Permission.OPERATE),
)
