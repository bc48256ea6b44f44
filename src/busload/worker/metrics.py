"""The figures of a worker, each declared once: its stats, its metrics and the tables in the docs are made from that."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from typing import Any, TypeVar

from busload.metrics.exposition import PREFIX, Kind, Metric, Sample, buckets, text
from busload.statistics.attempts import BOUNDS

T = TypeVar("T")
Getter = TypeVar("Getter", bound=Callable[..., Any])

SHARED = {
    "worker_settled_total": "Attempts whose result is committed, by how they ended.",
    "broker_messages_total": "Messages handed to the broker, by what became of them.",
}
"""The help text of each metric that several figures share."""
OF_A_TRANSPORT = ("broker", "outbox")
"""The first words of the metrics that have a label `transport`."""
QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Figure:
    """What a figure counts and, if Prometheus is to have it, as which metric."""

    help: str
    kind: Kind | None = None
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
        return f"{PREFIX}{self.metric}" + "".join(f'{{{name}="{text}"}}' for name, text in labels.items())


def figure(
    help: str,
    metric: str | None = None,
    source: str | None = None,
    *,
    kind: Kind | None = None,
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


def derived(metric: str | None = None, kind: Kind | None = None) -> Callable[[Getter], Getter]:
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
    found: list[tuple[Figure, Sample]] = [(info, Sample(about or {}, 1))]
    of_broker = [] if stats.broker is None else [stats.broker, *stats.broker.outbox]
    for one in (stats, *stats.handlers, stats.settlement, *of_broker):
        for name, figure in figures_of(type(one)).items():
            if figure.metric is not None:
                found += ((figure, sample) for sample in _samples(one, name, figure))
    families: dict[str, list[Sample]] = {}
    declared: dict[str, Figure] = {}
    for figure, sample in found:
        assert figure.metric is not None
        declared.setdefault(figure.metric, figure)
        labeled = Sample({"worker": worker, **sample.labels}, sample.value, sample.suffix)
        families.setdefault(figure.metric, []).append(labeled)
    return text(
        Metric(PREFIX + name, declared[name].kind or "gauge", SHARED.get(name, declared[name].help), tuple(samples))
        for name, samples in families.items()
    )


def _samples(stats: Any, name: str, figure: Figure) -> Iterator[Sample]:
    labels = dict(figure.labels or {})
    labels |= {label: getattr(stats, label) for label in getattr(type(stats), "LABELS", ())}
    if figure.metric is not None and figure.metric.startswith(OF_A_TRANSPORT):
        labels["transport"] = stats.transport
    value = getattr(stats, name)
    if figure.kind == "summary":
        for quantile in QUANTILES:
            yield Sample({"quantile": str(quantile)}, value(100 * quantile) if stats.measured else math.nan)
        yield Sample(labels, stats.measured_seconds, "_sum")
        yield Sample(labels, stats.measured, "_count")
    elif figure.kind == "histogram":
        yield from buckets(labels, BOUNDS, value, stats.seconds)
    elif figure.label is not None:
        for key, count in sorted(value.items()):
            yield Sample({**labels, figure.label: key.lower()}, count)
    else:
        yield Sample(labels, int(value) if isinstance(value, bool) else value)
