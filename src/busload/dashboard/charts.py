"""What the charts of the overview draw: numbers over time, and what they tell in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, TypeAlias

import msgspec

from busload.commands.wording import span
from busload.dashboard.render import number
from busload.health.overview import Overview
from busload.statistics.statistics import Point

Column: TypeAlias = list[float | None]

SHORTEST = timedelta(seconds=10)
"""The step that is under way has a rate from so much time on."""


class Last(StrEnum):
    """How much time the charts show."""

    HOUR = "hour"
    DAY = "day"

    @property
    def covers(self) -> timedelta:
        return timedelta(hours=1) if self is Last.HOUR else timedelta(days=1)

    @property
    def step(self) -> timedelta:
        return timedelta(minutes=1) if self is Last.HOUR else timedelta(minutes=15)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart."""

    key: str
    label: str
    colour: str
    """The variable of the style sheet that holds it."""


@dataclass(frozen=True, slots=True)
class Chart:
    key: str
    title: str
    unit: str
    """What a number means: `/s`, a count if it is empty, or `time` for seconds."""
    lines: tuple[Line, ...]


CHARTS = (
    Chart(
        "rates",
        "In and out, per second",
        "/s",
        (Line("sent", "sent", "--running"), Line("ended", "ended", "--completed")),
    ),
    Chart(
        "failures",
        "Failures, per second",
        "/s",
        (
            Line("troubled", "to troubleshooting", "--in-troubleshooting"),
            Line("failed", "failed", "--failed"),
            Line("retried", "tried again", "--canceled"),
        ),
    ),
    Chart(
        "depth",
        "Commands that have not ended",
        "",
        (
            Line("ready", "waiting", "--running"),
            Line("scheduled", "scheduled", "--canceled"),
            Line("running", "running", "--completed"),
            Line("in_troubleshooting", "troubleshooting", "--in-troubleshooting"),
        ),
    ),
    Chart("age", "Oldest that waits", "time", (Line("oldest_ready", "oldest", "--running"),)),
)
LINES = [line for chart in CHARTS for line in chart.lines]


@dataclass(frozen=True, slots=True)
class Drawing:
    """All charts at one moment: a time for each point, and a column of numbers for each line."""

    at: list[datetime]
    columns: dict[str, Column]

    @property
    def json(self) -> str:
        """What the browser draws: seconds since 1970, and numbers of three digits."""
        times = [int(at.timestamp()) for at in self.at]
        return msgspec.json.encode({"at": times, **self.columns}).decode()

    @property
    def rows(self) -> list[tuple[datetime, list[str]]]:
        """The same as a table, the newest first."""
        cells = [[shown(line, self.columns[line.key][at]) for line in LINES] for at in range(len(self.at))]
        return list(zip(self.at, cells, strict=True))[::-1]

    def summary(self, chart: Chart) -> str:
        """What a chart tells, in a sentence: what each line is now, and the most that it was."""
        parts = []
        for line in chart.lines:
            known = [value for value in self.columns[line.key] if value is not None]
            if not any(known):
                continue
            parts.append(f"{line.label} {shown(line, known[-1])}, at most {shown(line, max(known))}")
        return "; ".join(parts) or "nothing in this time"

    @property
    def live(self) -> dict[str, str]:
        return {"chart": self.json, **{f"chart.{chart.key}": self.summary(chart) for chart in CHARTS}}


def draw(points: Sequence[Point], now: Overview, step: timedelta) -> Drawing:
    """Numbers of the points. The last one is under way: what is where now is its end."""
    columns: dict[str, Column] = {line.key: [] for line in LINES}
    for point in points:
        last = point is points[-1]
        length = min(step, now.at - point.at) if last else step
        seconds = length.total_seconds() if not last or length >= SHORTEST else None
        for key, count in (
            ("sent", point.sent),
            ("ended", point.completed + point.failed + point.canceled),
            ("troubled", point.troubled),
            ("failed", point.failed),
            ("retried", point.retried),
        ):
            columns[key].append(None if seconds is None else _rounded(count / seconds))
        source: Any = now if last else point
        for key in ("ready", "scheduled", "running", "in_troubleshooting"):
            columns[key].append(getattr(source, key))
        columns["oldest_ready"].append(_oldest(now) if last else _rounded(point.oldest_ready or 0.0, point.ready))
    return Drawing([point.at for point in points], columns)


def _oldest(now: Overview) -> float:
    return 0.0 if now.oldest_ready is None else _rounded((now.at - now.oldest_ready).total_seconds()) or 0.0


def _rounded(value: float, seen: object = True) -> float | None:
    """Three digits; None if nobody has looked."""
    return None if seen is None else float(f"{value:.3g}") if value < 1000 else round(value)


def shown(line: Line, value: float | None) -> str:
    """A number of a line, for people."""
    if value is None:
        return "–"
    unit = next(chart.unit for chart in CHARTS if line in chart.lines)
    return span(timedelta(seconds=value)) if unit == "time" else f"{number(value)}{unit}"
