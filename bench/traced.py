"""A drain with spans of OpenTelemetry: of all commands, of one in ten, and where handlers wait for somebody."""

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


async def drain_traced(dsn: str, size: int, *, share: float, waits: bool) -> Measured:
    """As `busload/drain`, with this share of the commands sampled. The exporter throws away what it gets."""
    provider = _provider(share) if share else None
    async with CommandBus(dsn, settings=Settings(tracer_provider=provider)) as bus:
        bus.handler(DOMAIN, "Nothing")(call if waits else nothing)
        worker = Worker(bus)
        with timed(dsn) as lap:
            settled = await worker.drain()
    if provider is not None:
        provider.shutdown()
    assert settled == size, f"settled {settled} of {size}"
    expect_completed(dsn)
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


def _case(metric: str, title: str, prepare: Prepare = fill, **how: Any) -> Case:
    return Case("busload", metric, title, partial(drain_traced, **how), prepare=prepare)


CASES = [
    _case("traced-none", "drain, no spans", share=0.0, waits=False),
    _case("traced-tenth", "drain, one command in ten has a span", share=0.1, waits=False),
    _case("traced-batch", "drain, one batch in ten and there one command in ten", fill_sampled, share=0.1, waits=False),
    _case("traced-all", "drain, each command has a span", share=1.0, waits=False),
    _case("traced-call-none", "drain, handlers wait 1 ms, no spans", share=0.0, waits=True),
    _case("traced-call-tenth", "drain, handlers wait 1 ms, one command in ten has a span", share=0.1, waits=True),
    _case("traced-call-all", "drain, handlers wait 1 ms, each command has a span", share=1.0, waits=True),
]
