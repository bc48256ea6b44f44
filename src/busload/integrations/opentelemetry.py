"""A meter provider of OpenTelemetry's SDK to which a worker tells the durations of handlers many at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import AggregationTemporality as Temporality
from opentelemetry.sdk.metrics.export import (
    ExponentialHistogram,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricReader,
    MetricsData,
    ScopeMetrics,
)
from opentelemetry.sdk.metrics.view import View

from busload.telemetry.durations import BUCKETS, OTHERS, Durations, GathersDurations, Kind
from busload.telemetry.durations import Histogram as Gathered
from busload.telemetry.opentelemetry import NAME, PROCESS_DURATION, process_attributes

__all__ = ["BulkMeterProvider"]


class BulkMeterProvider(MeterProvider, GathersDurations):
    """The SDK's `MeterProvider`, with the same arguments by name; a worker pays next to nothing for its metrics.

    The API records one duration a call, and that takes longer than an empty handler and its command. To this provider
    a worker hands all durations of a settlement at once. It adds them to what its readers receive, as the histogram
    `messaging.process.duration` with the buckets, the attributes and the temporality that it would have otherwise.

    The SDK's views cannot be applied to it. With `views`, the SDK records each duration, as in any other provider.
    """

    def __init__(
        self, metric_readers: Sequence[MetricReader] = (), *, views: Sequence[View] = (), **others: Any
    ) -> None:
        self.gathers_durations = not views
        self._bridges: list[_Bridge] = []
        super().__init__(metric_readers, views=views, **others)
        for reader in metric_readers:
            self._bridge(reader)

    def add_durations(self, domain: str, error: str | None, durations: Sequence[float]) -> None:
        """Count how long handlers ran; workers call this."""
        for bridge in self._bridges:
            bridge.durations.add((domain, error), durations)

    def add_metric_reader(self, metric_reader: MetricReader) -> None:
        """Let another reader have the metrics from now on."""
        super().add_metric_reader(metric_reader)
        self._bridge(metric_reader)

    def _bridge(self, reader: MetricReader) -> None:
        if self.gathers_durations and all(bridge.reader is not reader for bridge in self._bridges):
            self._bridges = [*self._bridges, _Bridge(reader)]  # workers may go through the old list meanwhile


class _Bridge:
    """Adds the durations to what a reader receives: the SDK for Python has no producers of metrics as its standard has.

    `_receive_metrics` is what the SDK documents for readers of one's own to override.
    """

    def __init__(self, reader: MetricReader) -> None:
        self.reader = reader
        self.durations = Durations()
        self._receive: Callable[..., None] = reader._receive_metrics
        self._temporality: Temporality | None = None
        self._totals: dict[Kind, tuple[int, Gathered]] = {}
        """What the reader has received so far, and since when."""
        self._since = time.time_ns()
        reader._receive_metrics = self.receive  # type: ignore[method-assign]

    def receive(self, metrics_data: MetricsData, *others: Any, **more: Any) -> None:
        """Hand on what the SDK has collected, and the durations with it."""
        self._receive(self._with_durations(metrics_data), *others, **more)

    def _with_durations(self, data: MetricsData) -> MetricsData:
        """A worker measures its settlements by the SDK too, so there are metrics beside which the durations belong."""
        for n, resource in enumerate(data.resource_metrics):
            for m, scope in enumerate(resource.scope_metrics):
                if scope.scope.name == NAME:
                    scopes = list(resource.scope_metrics)
                    scopes[m] = self._in_scope(scope)
                    resources = list(data.resource_metrics)
                    resources[n] = replace(resource, scope_metrics=scopes)
                    return replace(data, resource_metrics=resources)
        return data

    def _in_scope(self, scope: ScopeMetrics) -> ScopeMetrics:
        """A reader wants all its histograms with one temporality, and tells it by those that it gets from the SDK."""
        for metric in scope.metrics:
            if isinstance(metric.data, Histogram | ExponentialHistogram):
                self._temporality = metric.data.aggregation_temporality
        if self._temporality is None or not (points := list(self._points(self._temporality))):
            return scope
        name, unit, description = PROCESS_DURATION
        durations = Metric(name, description, unit, Histogram(points, self._temporality))
        return replace(scope, metrics=[*scope.metrics, durations])

    def _points(self, temporality: Temporality) -> Iterator[HistogramDataPoint]:
        taken, now = self.durations.take(), time.time_ns()
        since, self._since = self._since, now
        if temporality == Temporality.DELTA:
            for kind, found in taken.items():
                yield _point(kind, found, since, now)
            return
        for kind, found in taken.items():
            if kind not in self._totals:
                self._totals[kind] = since, Gathered()
            self._totals[kind][1].merge(found)
        for kind, (first, total) in self._totals.items():
            yield _point(kind, total, first, now)


def _point(kind: Kind, found: Gathered, since: int, now: int) -> HistogramDataPoint:
    attributes = {"otel.metric.overflow": True} if kind == OTHERS else process_attributes(*kind)
    buckets = tuple(found.buckets)
    return HistogramDataPoint(
        attributes, since, now, sum(buckets), found.seconds, buckets, BUCKETS, found.least, found.most
    )
