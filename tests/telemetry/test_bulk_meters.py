"""A provider that is told durations many at once says the same of them as one that is told each."""

from __future__ import annotations

import random
from typing import Any

import pytest
from opentelemetry.sdk.metrics import Histogram, MeterProvider
from opentelemetry.sdk.metrics.export import AggregationTemporality as Temporality
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader, MetricReader
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from opentelemetry.sdk.trace import TracerProvider

from busload.integrations.opentelemetry import BulkMeterProvider
from busload.telemetry.durations import BUCKETS, MOST
from busload.telemetry.opentelemetry import Telemetry, configured

NAME = "messaging.process.duration"


def telemetry_to(meters: MeterProvider) -> Telemetry:
    found = configured(None, meters)
    assert found is not None
    return found


def measure(telemetry: Telemetry, durations: list[float], error: str | None = None) -> None:
    """What a worker does: handlers have run, and a settlement is measured beside them."""
    telemetry.processed("payments", durations, error)
    with telemetry.settling("payments", len(durations), []):
        pass


def points(reader: InMemoryMetricReader) -> dict[str | None, HistogramDataPoint]:
    data = reader.get_metrics_data()
    found = [
        metric
        for resource in (data.resource_metrics if data else ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == NAME
    ]
    assert len(found) <= 1
    told: dict[Any, Any] = {}
    for point in found[0].data.data_points if found else ():
        told[dict(point.attributes or {}).get("error.type")] = point
    return told


@pytest.mark.parametrize("temporality", [Temporality.CUMULATIVE, Temporality.DELTA])
def test_what_was_told_at_once_is_what_was_told_one_by_one(temporality: Temporality) -> None:
    chance = random.Random(14)
    readers = [InMemoryMetricReader({Histogram: temporality}) for _ in range(2)]
    each, bulk = MeterProvider([readers[0]]), BulkMeterProvider([readers[1]])
    for size in (3, 400, 1, 0):
        plain = [chance.expovariate(1 / 2) for _ in range(size)] + [*BUCKETS[:size]]
        for meters in (each, bulk):
            telemetry = telemetry_to(meters)
            if size:
                measure(telemetry, plain)
                measure(telemetry, [0.001] * size, "ValueError")
        [one_by_one, at_once] = [points(reader) for reader in readers]
        assert (
            one_by_one.keys()
            == at_once.keys()
            == (set() if temporality == Temporality.DELTA and not size else {None, "ValueError"})
        )
        for kind, wanted in one_by_one.items():
            found = at_once[kind]
            assert found.attributes == wanted.attributes
            assert (found.count, found.bucket_counts) == (wanted.count, wanted.bucket_counts)
            assert (found.explicit_bounds, found.min, found.max) == (wanted.explicit_bounds, wanted.min, wanted.max)
            assert found.sum == pytest.approx(wanted.sum)
            assert found.start_time_unix_nano < found.time_unix_nano
    for meters in (each, bulk):
        meters.shutdown()


def test_periods_of_deltas_follow_each_other_without_a_gap() -> None:
    reader = InMemoryMetricReader({Histogram: Temporality.DELTA})
    meters = BulkMeterProvider([reader])
    spans = []
    for _ in range(3):
        measure(telemetry_to(meters), [0.1])
        [point] = points(reader).values()
        spans.append((point.start_time_unix_nano, point.time_unix_nano))
    assert [first for first, _ in spans[1:]] == [last for _, last in spans[:-1]]
    meters.shutdown()


def test_what_a_reader_cannot_be_told_yet_it_is_told_later() -> None:
    """Nothing else was measured, so the SDK has nothing to hand on"""
    reader = InMemoryMetricReader({Histogram: Temporality.DELTA})
    meters = BulkMeterProvider([reader])
    telemetry = telemetry_to(meters)
    telemetry.processed("payments", [0.1])
    assert points(reader) == {}
    measure(telemetry, [0.1])
    assert points(reader)[None].count == 2
    meters.shutdown()


def test_each_reader_gets_everything_once() -> None:
    first, second = InMemoryMetricReader(), InMemoryMetricReader()
    meters = BulkMeterProvider([first])
    meters.add_metric_reader(second)
    meters.add_metric_reader(second)
    measure(telemetry_to(meters), [0.1, 0.2])
    assert [points(reader)[None].count for reader in (first, second, first)] == [2, 2, 2]
    meters.shutdown()


def test_two_workers_of_a_provider_are_added_up() -> None:
    reader = InMemoryMetricReader()
    meters = BulkMeterProvider([reader])
    for _ in range(2):
        measure(telemetry_to(meters), [0.1])
    assert points(reader)[None].count == 2
    meters.shutdown()


def test_a_view_is_heeded() -> None:
    """The SDK alone can apply it, so the SDK is told each duration"""
    reader = InMemoryMetricReader()
    view = View(instrument_name=NAME, aggregation=ExplicitBucketHistogramAggregation((1.0,)), attribute_keys=set())
    meters = BulkMeterProvider([reader], views=[view])
    measure(telemetry_to(meters), [0.5, 2.0, 3.0])
    [point] = points(reader).values()
    assert (point.explicit_bounds, point.bucket_counts, dict(point.attributes or {})) == ((1.0,), (1, 2), {})
    meters.shutdown()


def test_errors_of_countless_types_do_not_fill_the_memory() -> None:
    """They are told together, as the SDK does it"""
    each, bulk = InMemoryMetricReader(), InMemoryMetricReader()
    providers = MeterProvider([each]), BulkMeterProvider([bulk])
    for meters in providers:
        telemetry = telemetry_to(meters)
        for n in range(MOST + 3):
            telemetry.processed("payments", [0.1], f"Error{n}")
        measure(telemetry, [0.1], "Error0")
        meters_data = [each, bulk][meters is providers[1]]
        found = points(meters_data)
        assert (len(found), found[None].count, found["Error0"].count) == (MOST + 1, 3, 2)
        assert dict(found[None].attributes or {}) == {"otel.metric.overflow": True}
        meters.shutdown()


def test_an_sdk_that_is_switched_off_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    readers: list[MetricReader] = [InMemoryMetricReader()]
    assert configured(TracerProvider(), MeterProvider(readers)) is None
