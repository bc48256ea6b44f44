"""A bus whose spans and metrics can be read, and how to find one's way among them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler

from busload import CommandBus, Settings, WorkerSettings
from tests.given import Database, Given


@dataclass
class Telemetry:
    """Providers of a test's own, and what they were told."""

    sampler: Sampler = ParentBased(ALWAYS_ON)
    meter_provider: type[MeterProvider] = MeterProvider

    def __post_init__(self) -> None:
        self._spans, self._metrics = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracers, self.meters = TracerProvider(sampler=self.sampler), self.meter_provider([self._metrics])
        self.tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        self.tracer = self.tracers.get_tracer("the application")

    def settings(self, settings: Settings) -> Settings:
        return replace(settings, tracer_provider=self.tracers, meter_provider=self.meters)

    def spans(self, name: str | None = None, **attributes: Any) -> list[ReadableSpan]:
        """The spans that have ended, in the order in which they began, by name and attributes (`a__b` is `a.b`)."""
        wanted = {key.replace("__", "."): value for key, value in attributes.items()}
        found = sorted(self._spans.get_finished_spans(), key=lambda span: span.start_time or 0)
        return [
            span
            for span in found
            if (name is None or span.name == name)
            and all((span.attributes or {}).get(key) == value for key, value in wanted.items())
        ]

    def span(self, name: str, **attributes: Any) -> ReadableSpan:
        [found] = self.spans(name, **attributes)
        return found

    def metric(self, name: str) -> dict[tuple[str, ...], Any]:
        """The values of a metric, or the counts of a histogram, by operation, domain and type of error."""
        data = self._metrics.get_metrics_data()
        keys = ("messaging.operation.name", "messaging.destination.name", "error.type")
        return {
            tuple(str((point.attributes or {})[key]) for key in keys if key in (point.attributes or {})): getattr(
                point, "count", getattr(point, "value", None)
            )
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        }

    def close(self) -> None:
        self.tracers.shutdown()
        self.meters.shutdown()


def parent_of(span: ReadableSpan, spans: Sequence[ReadableSpan]) -> str | None:
    """The name of the span that this one is below; None if it begins a trace."""
    if span.parent is None:
        return None
    [parent] = [one for one in spans if one.context.span_id == span.parent.span_id]
    assert parent.context.trace_id == span.context.trace_id
    return parent.name


@pytest.fixture
def telemetry(request: pytest.FixtureRequest) -> Iterator[Telemetry]:
    given = getattr(request, "param", ParentBased(ALWAYS_ON))
    telemetry = Telemetry(given) if isinstance(given, Sampler) else Telemetry(meter_provider=given)
    yield telemetry
    telemetry.close()


@pytest.fixture
async def bus(dsn: str, settings: Settings, telemetry: Telemetry) -> AsyncIterator[CommandBus]:
    async with CommandBus(dsn, settings=telemetry.settings(settings)) as bus:
        yield bus


@pytest.fixture
def given(bus: CommandBus, database: Database, worker_settings: WorkerSettings) -> Given:
    return Given(bus, database, worker_settings)
