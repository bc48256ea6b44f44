"""Replays recorded runs over the forecast: `python -m bench.calibration` writes the table into docs/forecast.md.

`bench.forecast` has recorded the runs. The constants of the forecast were fitted on the runs with even numbers, then
rounded and adjusted by hand with the table of all runs in view. So the runs with odd numbers are a weak check of it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from busload.batches.forecast import Forecast, Outlook, forecast

ROOT = Path(__file__).parents[1]
RECORDING = ROOT / "bench" / "forecast.jsonl"
PAGE = ROOT / "docs" / "forecast.md"
BEGIN, END = "<!-- calibration -->\n", "<!-- end of calibration -->\n"
NOW = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Look:
    """What a forecast was told at one moment of a run, and how many seconds later the batch was done."""

    run: int
    shape: str
    at: float
    done_in: float
    outlook: Outlook

    @property
    def tuned(self) -> bool:
        """Whether the constants of the forecast were fitted on this run."""
        return self.run % 2 == 0

    @property
    def forecast(self) -> Forecast:
        return forecast(self.outlook)


@dataclass(frozen=True, slots=True)
class Calibration:
    """How forecasts and ends agree, in shares of all forecasts. The width is in times of what really was left."""

    batches: int
    forecasts: int
    within: float
    before: float
    after: float
    width: float

    @classmethod
    def of(cls, looks: Sequence[Look]) -> Calibration:
        before = after = 0
        widths = []
        for look in looks:
            found = look.forecast
            assert found.earliest is not None, found.unknown
            assert found.latest is not None
            earliest, latest = ((end - NOW).total_seconds() for end in (found.earliest, found.latest))
            before += look.done_in < earliest
            after += look.done_in > latest
            widths.append((latest - earliest) / max(look.done_in, 1e-3))
        count = len(looks)
        batches = len({(look.run, look.outlook.total) for look in looks})
        return cls(
            batches, count, 1 - (before + after) / count, before / count, after / count, statistics.median(widths)
        )


def recorded(path: Path = RECORDING) -> list[Look]:
    return [look for line in path.read_text().splitlines() for look in _looks(json.loads(line))]


def _looks(run: dict[str, Any]) -> Iterator[Look]:
    for look in run["looks"]:
        at, done_in = look.pop("at"), look.pop("done_in")
        outlook = msgspec.convert({"now": NOW, "total": run["total"], **look}, Outlook)
        yield Look(run["run"], run["shape"], at, done_in, outlook)


def table(looks: Sequence[Look]) -> str:
    """The calibration as Markdown: all, both halves, by how much had ended, and by shape."""
    rows = [
        ("**all**", looks),
        ("runs it was fitted on", [look for look in looks if look.tuned]),
        ("other runs", [look for look in looks if not look.tuned]),
        *_grouped(looks, lambda look: f"{look.at:.0%} ended"),
        *_grouped(looks, lambda look: look.shape),
    ]
    lines = [
        "| | batches | forecasts | within | done earlier | done later | width |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for title, some in rows:
        c = Calibration.of(some)
        shares = " | ".join(f"{share:.1%}" for share in (c.within, c.before, c.after))
        lines.append(f"| {title} | {c.batches} | {c.forecasts} | {shares} | {c.width:.2f} |")
    return "\n".join(lines) + "\n"


def _grouped(looks: Iterable[Look], key: Callable[[Look], str]) -> list[tuple[str, list[Look]]]:
    groups: dict[str, list[Look]] = {}
    for look in looks:
        groups.setdefault(key(look), []).append(look)
    return sorted(groups.items())


def on_the_page() -> str:
    """The table that the docs show."""
    return _parts_of_the_page()[1].strip("\n") + "\n"


def _parts_of_the_page() -> tuple[str, str, str]:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    shown, _, after = rest.partition(END)
    return before, shown, after


if __name__ == "__main__":
    before, _, after = _parts_of_the_page()
    PAGE.write_text(f"{before}{BEGIN}\n{table(recorded())}\n{END}{after}")
    print(table(recorded()))
