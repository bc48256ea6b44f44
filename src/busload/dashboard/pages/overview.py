"""Overview: the whole bus on one page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from busload.bus import CommandBus
from busload.dashboard import asked
from busload.dashboard.access import Permission
from busload.dashboard.charts import CHARTS, Drawing, Last, draw
from busload.dashboard.render import (
    ago,
    bus_of,
    chosen_database,
    cli,
    dashboard_of,
    number,
    render,
    sees_payloads,
    words,
)
from busload.dashboard.route import Live, page
from busload.errors import DatabaseUnavailableError
from busload.health.health import Health, HealthCode, HealthReason
from busload.health.overview import Overview, Rates, overview
from busload.postgres.plan import Plan
from busload.shards import merge
from busload.statistics.statistics import Point, series_until

WHERE = {
    HealthCode.NO_WORKER: ("workers", "See its workers"),
    HealthCode.COMMANDS_LATE: ("workers", "See its workers"),
    HealthCode.WORKER_LOST: ("workers", "See the workers"),
    HealthCode.FAILURES_IN_A_ROW: ("troubleshooting", "See what fails"),
    HealthCode.STUCK_THREADS: ("workers", "See the workers"),
    HealthCode.LOOP_BLOCKED: ("workers", "See the workers"),
    HealthCode.STATION_ENDED: ("workers", "See the workers"),
    HealthCode.POOL_EXHAUSTED: ("workers", "See the workers"),
    HealthCode.PUBLISHING_FAILS: ("dispatch", "See the outbox"),
    HealthCode.BROKER_UNREACHABLE: ("dispatch", "See the outbox"),
    HealthCode.SCHEDULES_LATE: ("schedules", "See the schedules"),
}
"""The page on which an operator acts on a reason, and what its link says."""
AGE = 5.0
"""Seconds for which points are good enough."""
GAP = timedelta(minutes=1)
"""Who opens the page after such a time sees how fast it is now, and not the average of the night."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The bus at one moment."""

    overview: Overview
    health: Health
    rates: tuple[float, float] | None
    """Commands sent and attempts ended per second; None if nobody looked within the last minute."""
    drawing: Drawing

    @property
    def live(self) -> Live:
        now, found = self.overview, self.overview.at
        sent, ended = ("–", "–") if self.rates is None else map(number, self.rates)
        silent = f"{now.silent_workers} silent" if now.silent_workers else "all alive"
        values: dict[str, str | list[str]] = {
            "state": words(self.health.state),
            "state.code": self.health.state.value,
            "ready": number(now.ready),
            "ready.oldest": ago(now.oldest_ready, found),
            "running": number(now.running),
            "slots": number(now.slots),
            "scheduled": number(now.scheduled),
            "troubleshooting": number(now.in_troubleshooting),
            "troubleshooting.code": "IN_TROUBLESHOOTING_QUEUE" if now.in_troubleshooting else "",
            "troubleshooting.oldest": ago(now.oldest_in_troubleshooting, found),
            "unpublished": number(now.unpublished),
            "unpublished.oldest": ago(now.oldest_unpublished, found),
            "workers": number(now.workers),
            "workers.about": silent,
            "rate.in": sent,
            "rate.out": ended,
            "rows": [f"reason:{_key(reason)}" for reason in self.health.reasons] + [d.domain for d in now.domains],
        }
        for domain in now.domains:
            for name in ("ready", "scheduled", "running", "in_troubleshooting", "unpublished", "workers"):
                values[f"{domain.domain}.{name}"] = number(getattr(domain, name))
        return {**values, **self.drawing.live}


async def _see(request: Request) -> Seen:
    bus, last = bus_of(request), asked.one_of(request, "last", Last) or Last.HOUR
    memory = dashboard_of(request).memory.setdefault(chosen_database(request), {})
    known: dict[Last, tuple[float, list[Point]]] = memory.setdefault("points", {})
    until, points = known.get(last, (0.0, []))
    due = time.monotonic() >= until
    now, newer = await _looked_at_all(bus.shards, last if due else None)
    if newer is not None:
        points = newer
        known[last] = time.monotonic() + AGE, points
    rates: Rates = memory.setdefault("rates", Rates(GAP))
    return Seen(now, await bus.health(timeout=4), rates.of(now), draw(points, now, last.step))


async def _looked_at_all(shards: Sequence[CommandBus], last: Last | None) -> tuple[Overview, list[Point] | None]:
    """All databases together. One of several that is away is left out: the health says which."""
    found, away = [], None
    for shard in shards:
        try:
            found.append(await shard.database.in_transaction(_looked(last)))
        except DatabaseUnavailableError as error:
            away = error
    if not found:
        raise away or AssertionError
    if len(shards) == 1:
        return found[0]
    points = [newer for _, newer in found if newer is not None]
    return merge.overview([now for now, _ in found]), merge.series(points) if points else None


def _looked(last: Last | None) -> Plan[tuple[Overview, list[Point] | None]]:
    """The bus now, and the points of the charts if they are due. Workers tell of them every few seconds."""
    now = yield from overview()
    if last is None:
        return now, None
    return now, (yield from series_until(now.at, now.domains, None, last=last.covers, step=last.step))


async def show(request: Request) -> Response:
    seen = await _see(request)
    return render(
        request,
        "overview.html",
        title="Overview",
        seen=seen,
        live=seen.live,
        key=_key,
        message=lambda reason: _message(request, reason),
        where=lambda reason: WHERE.get(reason.code),
        charts=CHARTS,
        drawing=seen.drawing,
        lines=lambda chart: msgspec.json.encode(chart.lines).decode(),
        lasts=list(Last),
        last=asked.one_of(request, "last", Last) or Last.HOUR,
        cli=cli("health"),
    )


async def live(request: Request) -> Live:
    return (await _see(request)).live


def _message(request: Request, reason: HealthReason) -> str:
    """What a reason says. The broker's error is in one of them, and is for those who may see error texts."""
    if reason.code is HealthCode.PUBLISHING_FAILS and not sees_payloads(request):
        return words(reason.code)
    return reason.message


def _key(reason: HealthReason) -> str:
    return ":".join(filter(None, (reason.code, reason.domain, reason.worker)))


ROUTES = (page("overview", "/", show, Permission.READ, label="Overview", live=live),)
