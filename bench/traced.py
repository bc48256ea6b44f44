"""A drain with spans of OpenTelemetry: of all commands, of one in ten, and where handlers wait; and one with metrics.

Beside it, the same number of spans without any command: that is the SDK's part, which busload cannot make smaller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.case import Case, Measured
from bench.clock import timed
from bench.ours import DOMAIN, commands, expect_completed, fill, nothing
from busload import Command, CommandBus, HandlerContext, Settings, Worker

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider

BATCHES = 10
CALL = 0.001
"""Seconds that a handler waits for somebody, where it does."""


Prepare = Callable[[str, int], Coroutine[Any, Any, None]]


async def call(command: Command, ctx: HandlerContext) -> None:
    await asyncio.sleep(CALL)


async def fill_sampled(dsn: str, size: int) -> None:
    """Ten batches, of which the sender was sampled for one."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON

    for first in range(0, size, max(1, size // BATCHES)):
        sampler = ALWAYS_OFF if first else ALWAYS_ON
        async with CommandBus(dsn, settings=Settings(tracer_provider=TracerProvider(sampler=sampler))) as bus:
            await bus.create_batch(DOMAIN, commands(min(max(1, size // BATCHES), size - first)))


async def drain_traced(dsn: str, size: int, *, share: float, waits: bool, measures: bool = False) -> Measured:
    """As `busload/drain`, with this share of the commands sampled. The exporter throws away what it gets."""
    provider = _provider(share) if share else None
    meters = _meter_provider() if measures else None
    async with CommandBus(dsn, settings=Settings(tracer_provider=provider, meter_provider=meters)) as bus:
        bus.handler(DOMAIN, "Nothing")(call if waits else nothing)
        worker = Worker(bus)
        with timed(dsn) as lap:
            settled = await worker.drain()
    for one in (provider, meters):
        if one is not None:
            one.shutdown()
    assert settled == size, f"settled {settled} of {size}"
    expect_completed(dsn)
    return lap.measured(size)


async def spans_alone(dsn: str, size: int, *, share: float) -> Measured:
    """As many spans as a drain has, with as many attributes, begun and ended one after the other."""
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind

    provider, first_of_its_trace = _provider(share), Context()
    start = provider.get_tracer("bench").start_span
    attributes = {f"busload.attribute.{n}": f"01a1ef28-0247-7a92-850f-0bc5aa6f0b4{n}" for n in range(9)}
    with timed(dsn) as lap:
        for _ in range(size):
            start(f"process {DOMAIN}", first_of_its_trace, SpanKind.CONSUMER, attributes).end()
    provider.shutdown()
    return lap.measured(size)


def _provider(share: float) -> TracerProvider:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    class Nowhere(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(share)))
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    return provider


def _meter_provider() -> MeterProvider:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    return MeterProvider([InMemoryMetricReader()])


def _case(metric: str, title: str, prepare: Prepare = fill, **how: Any) -> Case:
    return Case("busload", metric, title, partial(drain_traced, **how), prepare=prepare)


CASES = [
    _case("traced-none", "drain, no spans", share=0.0, waits=False),
    _case("traced-tenth", "drain, one command in ten has a span", share=0.1, waits=False),
    _case("traced-batch", "drain, one batch in ten and there one command in ten", fill_sampled, share=0.1, waits=False),
    _case("traced-all", "drain, each command has a span", share=1.0, waits=False),
    _case("traced-metrics", "drain, metrics and no spans", share=0.0, waits=False, measures=True),
    Case("busload", "traced-sdk", "spans of the SDK alone, no commands", partial(spans_alone, share=1.0)),
    Case("busload", "traced-sdk-tenth", "spans of the SDK alone, one in ten sampled", partial(spans_alone, share=0.1)),
    _case("traced-call-none", "drain, handlers wait 1 ms, no spans", share=0.0, waits=True),
    _case("traced-call-tenth", "drain, handlers wait 1 ms, one command in ten has a span", share=0.1, waits=True),
    _case("traced-call-all", "drain, handlers wait 1 ms, each command has a span", share=1.0, waits=True),
]
