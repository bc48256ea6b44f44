"""The charts of the overview: what is drawn of which numbers, and what they tell in words."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from busload.dashboard.charts import CHARTS, LINES, Last, draw
from busload.dashboard.pages import overview as page
from busload.health.overview import Overview
from busload.limits.pause import DomainOverview
from busload.postgres.plan import Plan
from busload.statistics.statistics import Point, series_until
from tests.dashboard.site import stream
from tests.given import Database, Given

NOW = datetime(2030, 1, 31, 8, 2, 30, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def _point(minute: int, *, sent: int = 0, completed: int = 0, ready: int | None = None, oldest: float = 0) -> Point:
    """A minute with a few failures; without `ready` nobody has looked at the places."""
    nowhere = None if ready is None else 0
    return Point(
        *(datetime(2030, 1, 31, 8, minute, tzinfo=UTC), sent, completed, 6, 3, 12, 18, 1.5),
        *(ready, nowhere, nowhere, nowhere, nowhere, oldest),
    )


def _overview(**places: int) -> Overview:
    domain = DomainOverview("payments", places.get("ready", 0), 0, 0, 0, 0, None)
    return Overview(NOW, NOW - timedelta(seconds=90), None, None, 0, 0, 0, 0, 0, (domain,))


def test_rates_are_per_second_of_their_step_also_while_it_is_under_way() -> None:
    drawn = draw([_point(0, sent=60), _point(1, sent=120), _point(2, sent=60, completed=21)], _overview(), MINUTE)
    assert drawn.columns["sent"] == [1.0, 2.0, 2.0]  # 60 in the 30 seconds of the last minute
    assert drawn.columns["ended"] == [0.15, 0.15, 1.0]  # completed, failed and canceled
    assert drawn.columns["retried"][0] == 0.2 and drawn.columns["troubled"][0] == 0.3


def test_a_step_that_has_just_begun_has_no_rate_yet() -> None:
    begun = datetime(2030, 1, 31, 8, 2, 4, tzinfo=UTC)
    now = Overview(begun, None, None, None, 0, 0, 0, 0, 0, ())
    assert draw([_point(1, sent=60), _point(2, sent=60)], now, MINUTE).columns["sent"] == [1.0, None]


def test_the_last_depth_is_that_of_now_and_where_nobody_looked_is_a_gap() -> None:
    drawn = draw([_point(0), _point(1, ready=5, oldest=7.0), _point(2)], _overview(ready=9), MINUTE)
    assert drawn.columns["ready"] == [None, 5, 9]
    assert drawn.columns["oldest_ready"] == [None, 7.0, 90.0]


def test_a_chart_is_told_in_words_and_as_a_table() -> None:
    drawn = draw([_point(1, sent=600, ready=5, oldest=7.0), _point(2, sent=60)], _overview(ready=9), MINUTE)
    told = {chart.key: drawn.summary(chart) for chart in CHARTS}
    assert told["rates"].startswith("sent 2/s, at most 10/s; ended ")
    assert told["depth"] == "waiting 9, at most 9"
    assert told["age"] == "oldest 90 s, at most 90 s"
    (newest, cells), (_, before) = drawn.rows
    assert newest == datetime(2030, 1, 31, 8, 2, tzinfo=UTC)
    assert len(cells) == len(LINES) and cells[0] == "2/s" and before[0] == "10/s"


async def test_the_overview_shows_an_hour_or_a_day(site: httpx.AsyncClient, database: Database) -> None:
    database.rows(
        "INSERT INTO busload.statistics (at, domain, completed)"
        " VALUES (date_trunc('hour', now()) - interval '5 hours', 'payments', 90000)"
    )
    for last, minutes, most in ((Last.HOUR, 1, "nothing in this time"), (Last.DAY, 15, "ended 0/s, at most 100/s")):
        text = (await site.get(f"/?last={last}")).text
        data = json.loads(text.partition('data-charts="')[2].partition('"')[0].replace("&#34;", '"'))
        assert {after - before for before, after in zip(data["at"], data["at"][1:], strict=False)} == {minutes * 60}
        assert len(data["at"]) == last.covers / last.step == text.count('<th scope="row"><time')
        assert most in text
    assert "hour, day" in (await site.get("/?last=year")).text
    assert (await site.get("/?last=year")).status_code == 400


async def test_live_charts_ask_for_points_only_now_and_then(
    dashboard: Starlette, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    def counted(*about: Any, **how: Any) -> Plan[list[Point]]:
        nonlocal asked
        asked += 1
        return series_until(*about, **how)

    monkeypatch.setattr(page, "series_until", counted)
    async with stream(dashboard, "/live") as events:
        name, values = await events.get()
        assert name == "values" and json.loads(values["chart"])["at"]
        await given.batch(3)
        while "ready" not in (await events.get())[1]:
            pass
    assert asked == 1 and page.AGE >= 5
