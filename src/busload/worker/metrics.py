"""The figures of a worker, each declared once: its stats, its metrics and the tables in the docs are made from that.

Metrics are text as Prometheus reads it: exposition format 0.0.4.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from itertools import chain
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Getter = TypeVar("Getter", bound=Callable[..., Any])

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SHARED = {
    "worker_settled_total": "Attempts whose result is committed, by how they ended.",
    "broker_messages_total": "Messages handed to the broker, by what became of them.",
}
"""The help text of each metric that several figures share."""
OF_A_TRANSPORT = ("broker", "outbox")
"""The first words of the metrics that have a label `transport`."""
QUANTILES = (0.5, 0.95, 0.99)

Sample = tuple[str, Mapping[str, str], float]
"""What follows the name of the metric, the labels, and the value."""


@dataclass(frozen=True, slots=True)
class Figure:
    """What a figure counts and, if Prometheus is to have it, as which metric."""

    help: str
    kind: Literal["counter", "gauge", "summary"] | None = None
    metric: str | None = None
    source: str | None = None
    """Which part of a running worker counts it: under the same name, or under the one after a dot (`held.lost`)."""
    labels: Mapping[str, str] | None = None
    """What tells this figure from the others of its metric."""
    label: str | None = None
    """The label for the keys of a figure that is a mapping."""

    def named(self) -> str:
        """The metric for people, with its labels."""
        labels = {**(self.labels or {}), **({self.label: "…"} if self.label else {})}
        return f"busload_{self.metric}" + "".join(f'{{{name}="{text}"}}' for name, text in labels.items())


def figure(
    help: str,
    metric: str | None = None,
    source: str | None = None,
    *,
    kind: Literal["counter", "gauge"] | None = None,
    default: Any = 0,
    label: str | None = None,
    **labels: str,
) -> Any:
    """A field of a dataclass of stats, with the `Figure` that it is."""
    declared = Figure(help, kind, metric, source, labels, label)
    of_its_own = {"default_factory": default} if callable(default) else {"default": default}
    return field(metadata={"figure": declared}, **({} if default is MISSING else of_its_own))


counter = partial(figure, kind="counter")
gauge = partial(figure, kind="gauge")


def derived(
    metric: str | None = None, kind: Literal["counter", "gauge", "summary"] | None = None
) -> Callable[[Getter], Getter]:
    """A property or method that is made of other figures; its docstring says what it is."""

    def declare(function: Getter) -> Getter:
        help = (function.__doc__ or "").partition("\n\n")[0]
        function.__dict__["figure"] = Figure(help, kind, metric)
        return function

    return declare


def figures_of(stats: type[Any]) -> dict[str, Figure]:
    """Every figure of a class of stats by its name: first the fields, then what is derived from them."""
    declared = {one.name: one.metadata["figure"] for one in fields(stats) if "figure" in one.metadata}
    for name, member in vars(stats).items():
        function = member.fget if isinstance(member, property) else member
        if isinstance(found := getattr(function, "figure", None), Figure):
            declared[name] = found
    return declared


def gathered(stats: type[T], parts: Mapping[str, object], **given: object) -> T:
    """The stats of this moment: what is `given`, and each other figure from the part that counts it."""
    for name, one in figures_of(stats).items():
        if one.source is not None:
            part, _, other_name = one.source.partition(".")
            counts, key = parts[part], other_name or name
            given[name] = counts[key] if isinstance(counts, Counter) else getattr(counts, key)
    return stats(**given)


def docs_table(stats: type[Any]) -> str:
    """The figures as a table for the docs."""
    rows = [
        f"| {name} | {f'`{one.named()}`' if one.metric else ''} | {one.help.rstrip('.')} |"
        for name, one in figures_of(stats).items()
    ]
    return "\n".join(["| figure | metric | meaning |", "|---|---|---|", *rows])


def metrics_text(stats: Any, *, worker: str, about: Mapping[str, str] | None = None) -> str:
    """Every figure with the label `worker`; `about` are the labels of one more metric that says which worker it is."""
    info = Figure("What this worker is, in its labels.", "gauge", "worker_info")
    samples: list[tuple[Figure, Sample]] = [(info, ("", about or {}, 1))]
    of_broker = [] if stats.broker is None else [stats.broker, *stats.broker.outbox]
    for one in (stats, stats.settlement, *of_broker):
        for name, figure in figures_of(type(one)).items():
            if figure.metric is not None:
                samples += ((figure, sample) for sample in _samples(one, name, figure))
    families: dict[str, list[str]] = {}
    for figure, (suffix, labels, value) in samples:
        metric = f"busload_{figure.metric}"
        head = f"# HELP {metric} {SHARED.get(figure.metric or '', figure.help)}\n# TYPE {metric} {figure.kind}\n"
        pairs = {"worker": worker, **labels}.items()
        shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in pairs)
        line = f"{metric}{suffix}{{{shown}}} {'NaN' if math.isnan(value) else value}\n"
        families.setdefault(metric, [head]).append(line)
    return "".join(chain(*families.values()))


def _samples(stats: Any, name: str, figure: Figure) -> Iterator[Sample]:
    labels = dict(figure.labels or {})
    if figure.metric is not None and figure.metric.startswith(OF_A_TRANSPORT):
        labels["transport"] = stats.transport
    value = getattr(stats, name)
    if figure.kind == "summary":
        for quantile in QUANTILES:
            yield "", {"quantile": str(quantile)}, value(100 * quantile) if stats.measured else math.nan
        yield "_sum", labels, stats.measured_seconds
        yield "_count", labels, stats.measured
    elif figure.label is not None:
        for key, count in sorted(value.items()):
            yield "", {**labels, figure.label: key.lower()}, count
    else:
        yield "", labels, int(value) if isinstance(value, bool) else value


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
