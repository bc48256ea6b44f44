"""Metrics as text that Prometheus reads: exposition format 0.0.4.

It is written here and not by prometheus_client: a worker would pay for the import, and for a registry that several
processes cannot share. The tests read every text with the parser of prometheus_client, and with promtool.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "busload_"

Kind = Literal["counter", "gauge", "summary", "histogram"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric."""

    labels: Mapping[str, str]
    value: float
    suffix: str = ""
    """What follows the name of the metric: `_sum`, `_count` or `_bucket` of a summary or histogram."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric with its values."""

    name: str
    kind: Kind
    help: str
    samples: tuple[Sample, ...]


def text(metrics: Iterable[Metric]) -> str:
    """All metrics as text. Those without a value are left out."""
    return "".join(line for metric in metrics if metric.samples for line in _lines(metric))


def buckets(labels: Mapping[str, str], bounds: Iterable[float], counts: Iterable[int], total: float) -> list[Sample]:
    """The samples of a histogram: how many values lie at or below each bound, how many there are, and their total.

    `counts` has one number more than there are bounds: of the values above the last one.
    """
    samples, below = [], 0
    for bound, count in zip((*bounds, math.inf), counts, strict=True):
        below += count
        samples.append(Sample({**labels, "le": _number(bound)}, below, "_bucket"))
    return [*samples, Sample(labels, total, "_sum"), Sample(labels, below, "_count")]


def _lines(metric: Metric) -> Iterator[str]:
    yield f"# HELP {metric.name} {metric.help.replace(chr(92), chr(92) * 2).replace(chr(10), chr(92) + 'n')}\n"
    yield f"# TYPE {metric.name} {metric.kind}\n"
    for sample in metric.samples:
        shown = ",".join(f'{label}="{_escaped(value)}"' for label, value in sample.labels.items())
        yield f"{metric.name}{sample.suffix}{f'{{{shown}}}' if shown else ''} {_number(sample.value)}\n"


def _number(value: float) -> str:
    if math.isfinite(value):
        return str(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
