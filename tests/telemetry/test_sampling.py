"""Who decides what is traced, what the sampler is told, and what is left where nobody wants spans or metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Decision, ParentBased, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, get_current_span
from opentelemetry.trace.span import TraceState
from opentelemetry.util.types import Attributes

from busload import BatchCommand, Chunk, ChunkContext, Command, CommandBus, HandlerContext
from busload.integrations.opentelemetry import BulkMeterProvider
from tests.given import DOMAIN, Given
from tests.telemetry.conftest import Telemetry

pytestmark = pytest.mark.usefixtures("invariants")

PROCESS, SETTLE = f"process {DOMAIN}", f"settle {DOMAIN}"


class ByType(Sampler):
    """Samples what handlers do with commands of one type, and nothing else."""

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        wanted = (attributes or {}).get("busload.command.type") == "Debit"
        return SamplingResult(Decision.RECORD_AND_SAMPLE if wanted else Decision.DROP, attributes)

    def get_description(self) -> str:
        return "ByType"


@pytest.mark.parametrize("telemetry", [ByType()], indirect=True)
async def test_a_sampler_sees_what_is_known_of_a_command_and_its_span_has_it(
    dsn: str, bus: CommandBus, given: Given, telemetry: Telemetry
) -> None:
    given.handler()
    given.handler("Credit")
    async with CommandBus(dsn, settings=replace(bus.settings, tracer_provider=None, meter_provider=None)) as plain:
        batch_id = await plain.create_batch(DOMAIN, [BatchCommand("Debit", task_key="a"), BatchCommand("Credit")])
    await given.drained()
    span = telemetry.span(PROCESS)
    [debit] = [one for one in await bus.list_batch_commands(DOMAIN, batch_id) if one.command_type == "Debit"]
    assert dict(span.attributes or {}) == {
        "messaging.system": "busload",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": DOMAIN,
        "messaging.message.id": str(debit.command_id),
        "busload.command.type": "Debit",
        "busload.batch.id": str(batch_id),
        "busload.task_key": "a",
        "busload.attempt": 1,
        "busload.execution.id": str(debit.execution_id),
        "busload.outcome": "COMPLETED",
    }


@pytest.mark.parametrize("telemetry", [ALWAYS_ON, ALWAYS_OFF], indirect=True)
async def test_an_attempt_that_collides_is_one_attempt(bus: CommandBus, given: Given, telemetry: Telemetry) -> None:
    seen: list[int] = []

    @bus.handler(DOMAIN, "Debit")
    async def debit(command: Command, ctx: HandlerContext) -> None:
        seen.append(get_current_span().get_span_context().span_id)
        async with ctx.transaction() as conn:
            if len(seen) == 1:
                await conn.execute("DO $$ BEGIN RAISE EXCEPTION 'others were first' USING ERRCODE = '40001'; END $$")

    await given.sent()
    await given.drained()
    assert len(seen) == 2 and seen[0] == seen[1] != 0
    assert telemetry.metric("messaging.process.duration") == {("process", DOMAIN): 1}
    told = [(span.attributes or {})["busload.outcome"] for span in telemetry.spans(PROCESS)]
    assert told == (["COMPLETED"] if telemetry.sampler is ALWAYS_ON else [])


@pytest.mark.parametrize("telemetry", [ParentBased(ALWAYS_OFF)], indirect=True)
async def test_settlements_are_measured_also_where_nobody_gets_their_spans(
    bus: CommandBus, given: Given, telemetry: Telemetry
) -> None:
    given.handler()
    await bus.create_batch(DOMAIN, [BatchCommand("Debit"), BatchCommand("Debit")])
    await given.drained()
    assert telemetry.metric("messaging.client.operation.duration")["settle", DOMAIN] >= 1
    assert telemetry.spans() == []


@pytest.mark.parametrize("telemetry", [MeterProvider, BulkMeterProvider], indirect=True)
async def test_a_worker_with_metrics_alone_counts_everything_and_hands_the_context_on(
    dsn: str, bus: CommandBus, given: Given, telemetry: Telemetry
) -> None:
    @bus.handler(DOMAIN, "Debit")
    async def debit(command: Command, ctx: HandlerContext) -> None:
        await ctx.send("ledger", "Note")

    await given.sent()
    before = len(telemetry.spans())
    async with CommandBus(dsn, settings=replace(bus.settings, tracer_provider=None)) as other:
        other.handlers.become(bus.handlers)
        await Given(other, given.database, given.settings).drained()
    assert len(telemetry.spans()) == before
    assert telemetry.metric("messaging.process.duration") == {("process", DOMAIN): 1}
    assert telemetry.metric("messaging.client.consumed.messages") == {("process", DOMAIN): 1}
    [note] = await bus.list_commands("ledger")
    assert note.headers is not None
    assert note.headers["traceparent"].split("-")[1] == f"{telemetry.spans()[0].context.trace_id:032x}"


@pytest.mark.parametrize("telemetry", [MeterProvider, BulkMeterProvider], indirect=True)
async def test_domains_are_told_apart_also_where_their_results_are_settled_together(
    bus: CommandBus, given: Given, telemetry: Telemetry
) -> None:
    both: asyncio.Event = asyncio.Event()
    seen: list[Command] = []

    async def meet(command: Command, ctx: HandlerContext) -> None:
        seen.append(command)
        if len(seen) == 3:
            both.set()
        await both.wait()

    for domain in (DOMAIN, "ledger"):
        bus.handler(domain, "Debit")(meet)
    await bus.create_batch(DOMAIN, [BatchCommand("Debit"), BatchCommand("Debit")])
    await bus.create_batch("ledger", [BatchCommand("Debit")])
    await given.drained(domains=[DOMAIN, "ledger"])
    assert telemetry.metric("messaging.process.duration") == {("process", DOMAIN): 2, ("process", "ledger"): 1}
    assert telemetry.metric("messaging.client.consumed.messages") == {("process", DOMAIN): 2, ("process", "ledger"): 1}


@pytest.mark.parametrize("telemetry", [MeterProvider, BulkMeterProvider], indirect=True)
async def test_a_worker_with_metrics_alone_does_not_draw_what_handlers_send_into_the_trace_of_a_batch(
    dsn: str, bus: CommandBus, given: Given, telemetry: Telemetry
) -> None:
    """Nor into that of one sender among several."""
    seen: list[bool] = []

    @bus.handler(DOMAIN, "Debit")
    async def debit(command: Command, ctx: HandlerContext) -> None:
        seen.append(get_current_span().get_span_context().is_valid)

    @bus.bulk_handler(DOMAIN, "Credit", size=2)
    async def credit(chunk: Chunk, ctx: ChunkContext) -> None:
        seen.append(get_current_span().get_span_context().is_valid)

    await bus.create_batch(DOMAIN, [BatchCommand("Debit")])
    await given.sent("Credit")
    await given.sent("Credit")
    async with CommandBus(dsn, settings=replace(bus.settings, tracer_provider=None)) as other:
        other.handlers.become(bus.handlers)
        await Given(other, given.database, given.settings).drained()
    assert seen == [False, False]
    assert telemetry.metric("messaging.client.consumed.messages") == {("process", DOMAIN): 3}


async def test_a_worker_with_spans_alone_measures_nothing(
    dsn: str, bus: CommandBus, given: Given, telemetry: Telemetry
) -> None:
    given.handler()
    await given.sent()
    async with CommandBus(dsn, settings=replace(bus.settings, meter_provider=None)) as other:
        other.handlers.become(bus.handlers)
        await Given(other, given.database, given.settings).drained()
    assert [(span.attributes or {})["busload.outcome"] for span in telemetry.spans(PROCESS)] == ["COMPLETED"]
    assert len(telemetry.spans(SETTLE)) == 1
    assert telemetry.metric("messaging.process.duration") == {}
    assert telemetry.metric("messaging.client.consumed.messages") == {}
