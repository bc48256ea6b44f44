"""A drain with spans of OpenTelemetry, of all commands and of few, and with metrics: of handlers that do nothing, that
wait and that work.

Beside it, the same number of spans without any command: that is the SDK's part, which busload cannot make smaller.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from bench.case import Case, Measured
from bench.clock import timed
from bench.ours import DOMAIN, commands, expect_completed, fill, nothing
from busload import Command, CommandBus, HandlerContext, Settings, Worker

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider

USUAL = 100
"""Batches, of which one is sampled, and commands of it, of which one has a span: what the docs advise."""

CALL = 0.001
"""Seconds that a handler waits for somebody, or works, where it does."""

MOST_WORK = 5_000
"""Commands whose handlers work: a worker does one after the other."""

Prepare = Callable[[str, int], Coroutine[Any, Any, None]]
Handler = Callable[[Command, HandlerContext], Coroutine[Any, Any, None]]
Meters = Literal["sdk", "bulk"]


async def call(command: Command, ctx: HandlerContext) -> None:
    await asyncio.sleep(CALL)


async def work(command: Command, ctx: HandlerContext) -> None:
    end = time.thread_time() + CALL
    while time.thread_time() < end:
        pass


async def fill_batches(dsn: str, size: int) -> None:
    """As many batches as `usual` has, of senders without telemetry."""
    each = max(1, size // USUAL)
    async with CommandBus(dsn) as bus:
        for begin in range(0, size, each):
            await bus.create_batch(DOMAIN, commands(min(each, size - begin)))


async def fill_sampled(dsn: str, size: int, *, batches: int) -> None:
    """So many batches, of which the sender was sampled for one."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON

    each = max(1, size // batches)
    for sampler, first, last in ((ALWAYS_ON, 0, each), (ALWAYS_OFF, each, size)):
        async with CommandBus(dsn, settings=Settings(tracer_provider=TracerProvider(sampler=sampler))) as bus:
            for begin in range(first, last, each):
                await bus.create_batch(DOMAIN, commands(min(each, last - begin)))


async def drain_traced(
    dsn: str, size: int, *, share: float, handler: Handler = nothing, meters: Meters | None = None
) -> Measured:
    """As `busload/drain`, with this share of the commands sampled. The exporter throws away what it gets."""
    tracer_provider = _provider(share) if share else None
    meter_provider = _meter_provider(meters) if meters else None
    async with CommandBus(
        dsn, settings=Settings(tracer_provider=tracer_provider, meter_provider=meter_provider)
    ) as bus:
        bus.handler(DOMAIN, "Nothing")(handler)
        worker = Worker(bus)
        with timed(dsn) as lap:
            settled = await worker.drain()
    for one in (tracer_provider, meter_provider):
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


def _meter_provider(meters: Meters) -> MeterProvider:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from busload.integrations.opentelemetry import BulkMeterProvider

    return (BulkMeterProvider if meters == "bulk" else MeterProvider)([InMemoryMetricReader()])


def _case(metric: str, title: str, prepare: Prepare = fill, **how: Any) -> Case:
    most = MOST_WORK if how.get("handler") is work else None
    return Case("busload", metric, title, partial(drain_traced, **how), prepare=prepare, most=most)


def _cases(prefix: str, title: str, handler: Handler) -> list[Case]:
    """The same handlers with every configuration. `usual` is what the docs advise."""
    tenth, hundredth = (partial(fill_sampled, batches=batches) for batches in (10, USUAL))
    return [
        _case(f"{prefix}-none", f"{title}, no spans", share=0.0, handler=handler),
        _case(
            f"{prefix}-usual-none", f"{title}, a hundred batches, no spans", fill_batches, share=0.0, handler=handler
        ),
        _case(
            f"{prefix}-usual",
            f"{title}, a hundred batches: spans of one, and there of one command in a hundred, and metrics",
            hundredth,
            share=1 / USUAL,
            handler=handler,
            meters="bulk",
        ),
        _case(
            f"{prefix}-batch",
            f"{title}, one batch in ten and there one command in ten",
            tenth,
            share=0.1,
            handler=handler,
        ),
        _case(f"{prefix}-hundredth", f"{title}, one command in a hundred has a span", share=0.01, handler=handler),
        _case(f"{prefix}-tenth", f"{title}, one command in ten has a span", share=0.1, handler=handler),
        _case(f"{prefix}-all", f"{title}, each command has a span", share=1.0, handler=handler),
    ]


CASES = [
    *_cases("traced", "drain", nothing),
    _case("traced-metrics", "drain, metrics and no spans", share=0.0, meters="sdk"),
    _case("traced-bulk-metrics", "drain, metrics told many at once and no spans", share=0.0, meters="bulk"),
    Case("busload", "traced-sdk", "spans of the SDK alone, no commands", partial(spans_alone, share=1.0)),
    Case("busload", "traced-sdk-tenth", "spans of the SDK alone, one in ten sampled", partial(spans_alone, share=0.1)),
    *_cases("traced-call", "drain, handlers wait 1 ms", call),
    *_cases("traced-work", "drain, handlers work 1 ms", work),
]
