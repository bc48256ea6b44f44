"""The pictures of a run, readable on light and on dark pages: four rates, and what a held snapshot costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import torture
from bench.beside import TITLES
from bench.report import OURS
from bench.run import Result

PANELS = {
    "create": "bulk create",
    "drain": "drain, 1 process",
    "drain-2": "drain, 2 processes",
    "batch": "batch with callback",
}
ACCENT, OTHERS, INK = "#e8590c", "#94a3b8", "#7d8590"


@dataclass(frozen=True, slots=True)
class Bar:
    """`rate` is None where a subject has no such thing, or was not measured."""

    subject: str
    title: str
    rate: float | None


def bars(results: Sequence[Result]) -> dict[str, list[Bar]]:
    """For each panel a bar for each subject, ours first and then the fastest, in the same order everywhere."""
    rates: dict[str, dict[str, float]] = {}
    for result in sorted((result for result in results if result.runs), key=lambda result: result.size):
        if result.case.metric in PANELS and result.case.subject in (OURS, *TITLES):
            rates.setdefault(result.case.subject, {})[result.case.metric] = result.rate
    order = sorted(rates, key=lambda subject: (subject != OURS, -rates[subject].get("drain", 0.0)))
    return {
        metric: [Bar(subject, TITLES.get(subject, OURS), rates[subject].get(metric)) for subject in order]
        for metric in PANELS
    }


def label(rate: float | None) -> str:
    if rate is None:
        return "–"
    return f"{rate / 1000:,.0f}k" if rate >= 10_000 else f"{rate / 1000:,.1f}k" if rate >= 100 else f"{rate:,.0f}"


def _pyplot() -> Any:
    import matplotlib  # type: ignore[import, unused-ignore]

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"font.family": "DejaVu Sans", "svg.hashsalt": "busload", "text.color": INK})
    from matplotlib import pyplot  # type: ignore[import, unused-ignore]

    return pyplot


def draw(results: Sequence[Result], folder: Path, caption: str = "") -> list[Path]:
    """Write bench.svg and bench.png, and return their paths; nothing where there is nothing to draw."""
    found = bars(results)
    subjects = found["create"]
    if not subjects:
        return []
    pyplot = _pyplot()
    height = 1.1 + 0.36 * len(subjects)
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(11, height), sharey=True)
    for axis, (metric, title) in zip(axes, PANELS.items(), strict=True):
        rates = [bar.rate or 0.0 for bar in found[metric]]
        colours = [ACCENT if bar.subject == OURS else OTHERS for bar in found[metric]]
        axis.barh(range(len(rates)), rates, color=colours, height=0.66)
        longest = max([*rates, 1.0])
        axis.set_xlim(0, longest * 1.28)
        for place, bar in enumerate(found[metric]):
            weight = "bold" if bar.subject == OURS else "normal"
            colour = ACCENT if bar.subject == OURS else INK
            where = (bar.rate or 0.0) + longest * 0.02
            axis.text(where, place, label(bar.rate), va="center", fontsize=9.5, color=colour, fontweight=weight)
        axis.set_title(title, loc="left", fontsize=11, color=INK, fontweight="bold", pad=8)
        axis.set_xticks([])
        axis.tick_params(left=False)
        for side in ("top", "right", "bottom"):
            axis.spines[side].set_visible(False)
        axis.spines["left"].set_color(INK)
        axis.spines["left"].set_alpha(0.5)
    axes[0].set_yticks(range(len(subjects)), [bar.title for bar in subjects], fontsize=10.5, color=INK)
    for tick, bar in zip(axes[0].get_yticklabels(), subjects, strict=True):
        if bar.subject == OURS:
            tick.set_color(ACCENT)
            tick.set_fontweight("bold")
    axes[0].invert_yaxis()
    figure.text(0.995, 0.01, caption, ha="right", va="bottom", fontsize=8, color=INK)
    figure.tight_layout(rect=(0, 0.05, 1, 1), w_pad=1.5)
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "bench.svg", folder / "bench.png"]
    figure.savefig(written[0], transparent=True, metadata={"Date": None})
    figure.savefig(written[1], transparent=True, dpi=160)
    pyplot.close(figure)
    return written


TORTURE = {"claim": "claim", "settle": "settle"}
DASHES = ("--", ":", "-.", (0, (5, 1)))


def draw_torture(results: Sequence[Result], folder: Path) -> list[Path]:
    """Write torture.svg: what claims and settlements take while a snapshot is held, over the minutes."""
    found = {
        result.case.subject: result.runs[-1].facts
        for result in results
        if result.case.metric == torture.METRIC and result.runs
    }
    if OURS not in found:
        return []
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, len(TORTURE), figsize=(11, 3.6))
    for axis, (kind, title) in zip(axes, TORTURE.items(), strict=True):
        others = iter(DASHES)
        for subject, facts in sorted(found.items(), key=lambda one: one[0] != OURS):
            taken = torture.series(facts, kind)
            ours = subject == OURS
            axis.plot(
                [seconds / 60 for seconds, _ in taken],
                [cost / 1000 for _, cost in taken],
                color=ACCENT if ours else OTHERS,
                linestyle="-" if ours else next(others),
                linewidth=2.4 if ours else 1.6,
                label=TITLES.get(subject, OURS),
            )
        axis.set_title(f"{title}: ms of the server per command", loc="left", fontsize=11, color=INK, fontweight="bold")
        axis.set_xlabel("minutes that the snapshot is held", fontsize=9, color=INK)
        axis.set_ylim(bottom=0)
        axis.tick_params(colors=INK, labelsize=9)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axis.spines[side].set_color(INK)
    axes[0].legend(frameon=False, fontsize=9, labelcolor=INK)
    figure.tight_layout(w_pad=2)
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / "torture.svg"
    figure.savefig(written, transparent=True, metadata={"Date": None})
    pyplot.close(figure)
    return [written]
