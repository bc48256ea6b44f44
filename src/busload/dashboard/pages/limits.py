"""Limits: how often and how many at a time receivers are called, who waits for that, and what runs in order."""

from __future__ import annotations

from collections import Counter
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
    def rate_keys(self) -> list[str]:
        return _keys("rate", self.rates)

    @property
    def keys(self) -> list[str]:
        return _keys("concurrency", self.concurrent)

    @property
    def live(self) -> Live:
        values: dict[str, str | list[str]] = {"rows": self.rate_keys + self.keys}
        for key, one in zip(self.rate_keys, self.rates, strict=True):
            values |= {
                f"{key}.rate": f"{one.rate:.4g}/s",
                f"{key}.state": "Refuses calls" if one.blocked_until else "Takes calls",
                f"{key}.state.code": "FAILED" if one.blocked_until else "COMPLETED",
                f"{key}.calls": number(one.calls),
                f"{key}.refused": number(one.refused),
            }
        for key, each in zip(self.keys, self.concurrent, strict=True):
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
        workers=_workers,
        several=lambda one: sum(each.name == one.name for each in seen.rates) > 1,
        limit=LIMIT,
        live=seen.live,
        cli=cli("limit", "show", seen.name) if seen.name else cli("limit", "ls"),
        notice=notice,
    )


async def live(request: Request) -> Live:
    return (await _see(request)).live


def _keys(kind: str, limits: Sequence[LimitStatus] | Sequence[ConcurrencyStatus]) -> list[str]:
    """What tells each row from the others. Several databases may each have a limit of the same name and value."""
    found: Counter[str] = Counter()
    keys = []
    for one in limits:
        key = live_key(kind, one.name, one.subject)
        found[key] += 1
        keys.append(f"{key}.{found[key]}")
    return keys


def _workers(one: ConcurrencyStatus) -> Sequence[str]:
    """Each worker once, that with the oldest call first."""
    return list(dict.fromkeys(one.workers))


async def reset(request: Request) -> Response:
    fields = await asked.form(request, exact="by")
    name, by = asked.required(fields, "name"), fields.get("by")
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
