"""Spans of sender, handler and settlement: who is whose parent, what is linked, what they say and what they do not."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from typing import Any

import pytest
from opentelemetry import baggage, context
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased
from opentelemetry.trace import SpanKind, StatusCode, get_current_span

from busload import (
    BatchCommand,
    Chunk,
    ChunkContext,
    Command,
    CommandBus,
    DuplicateCommandError,
    Group,
    HandlerContext,
    InvalidCommandError,
    PermanentCommandError,
    RetryPolicy,
    Settings,
    Stage,
    SyncCommandBus,
    SyncHandlerContext,
    TransientCommandError,
)
from busload.integrations.opentelemetry import BulkMeterProvider
from tests.given import DOMAIN, Given, eventually
from tests.telemetry.conftest import Telemetry, parent_of

pytestmark = pytest.mark.usefixtures("invariants")

PROCESS, SEND, CREATE, SETTLE = (f"{verb} {DOMAIN}" for verb in ("process", "send", "create_batch", "settle"))


async def test_a_command_that_is_sent_alone_runs_below_its_senders_span(
    bus: CommandBus, given: Given, telemetry: Telemetry
) -> None:
    given.handler()
    with telemetry.tracer.start_as_current_span("request"):
        command_id = await given.sent(data={"iban": "DE00 secret"}, task_key="order-7")
    await given.drained()

    sent, processed = telemetry.span(SEND), telemetry.span(PROCESS)
    assert (parent_of(sent, telemetry.spans()), parent_of(processed, telemetry.spans())) == ("request", SEND)
    assert (sent.kind, processed.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    about = {
        "messaging.system": "busload",
        "messaging.destination.name": DOMAIN,
        "messaging.message.id": str(command_id),
        "busload.command.type": "Debit",
        "busload.task_key": "order-7",
    }
    operation = {"messaging.operation.name": "send", "messaging.operation.type": "send"}
    assert dict(sent.attributes or {}) == about | operation
    execution_id = str((await given.command_now(command_id)).execution_id)
    assert dict(processed.attributes or {}) == about | {
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "busload.attempt": 1,
        "busload.execution.id": execution_id,
        "busload.outcome": "COMPLETED",
    }
    settled = telemetry.span(SETTLE)
    assert [link.context.span_id for link in settled.links] == [processed.context.span_id]
    assert settled.kind is SpanKind.CLIENT and settled.parent is None


async def test_the_commands_of_a_batch_are_linked_to_its_creation_and_its_callback_is_below_it(
    bus: CommandBus, given: Given, telemetry: Telemetry
) -> None:
    @bus.handler(DOMAIN, "Debit", retry=RetryPolicy(max_attempts=2, backoff=(0,)))
    async def debit(command: Command, ctx: HandlerContext) -> None:
        if command.data == 1 and ctx.attempt == 1:
            raise TransientCommandError("the account of DE00 secret is busy", code="BUSY")
        if command.data == 2:
            raise PermanentCommandError("no such account: DE00 secret")

    given.handler("Done")
    with telemetry.tracer.start_as_current_span("import"):
        commands = [BatchCommand("Debit", data=n) for n in range(3)]
        batch_id = await bus.create_batch(DOMAIN, commands, on_complete=BatchCommand("Done"))
    await given.drained()
    [broken] = await bus.list_batch_commands(DOMAIN, batch_id, status="IN_TROUBLESHOOTING_QUEUE")
    await bus.troubleshooting.cancel(DOMAIN, broken.command_id, reason="gone")
    await given.drained()

    created = telemetry.span(CREATE)
    assert (created.attributes or {})["messaging.batch.message_count"] == 3
    assert (created.attributes or {})["busload.batch.id"] == str(batch_id)
    attempts = telemetry.spans(PROCESS, busload__command__type="Debit")
    told = [
        ((span.attributes or {})["busload.attempt"], (span.attributes or {})["busload.outcome"]) for span in attempts
    ]
    assert sorted(told) == [(1, "COMPLETED"), (1, "FAILED_ATTEMPT"), (1, "TROUBLESHOOTING"), (2, "COMPLETED")]
    for span in attempts:
        assert span.parent is None
        assert [link.context.span_id for link in span.links] == [created.context.span_id]
    assert len({span.context.trace_id for span in attempts}) == 4
    callback = telemetry.span(PROCESS, busload__command__type="Done")
    assert parent_of(callback, telemetry.spans()) == CREATE


async def test_an_error_is_told_by_type_code_and_place_and_nothing_of_a_payload_is_in_a_span(
    bus: CommandBus, given: Given, telemetry: Telemetry
) -> None:
    @bus.handler(DOMAIN, "Debit", retry=RetryPolicy(max_attempts=1))
    async def debit(command: Command, ctx: HandlerContext) -> None:
        raise TransientCommandError(f"busy: {command.data}", code="BUSY")

    command_id = await given.sent(data="DE00 secret", headers={"token": "DE00 secret"})
    await given.drained()
    with pytest.raises(InvalidCommandError):
        await bus.send(DOMAIN, "Debit", object(), headers={"secret": "DE00 secret"})
    with pytest.raises(DuplicateCommandError):
        await given.sent(command_id=command_id)

    span = telemetry.span(PROCESS)
    assert span.status.status_code is StatusCode.ERROR and span.status.description == "TransientCommandError"
    attributes = dict(span.attributes or {})
    assert (attributes["error.type"], attributes["busload.error.code"]) == ("TransientCommandError", "BUSY")
    assert (attributes["busload.outcome"], attributes["busload.reason"]) == ("TROUBLESHOOTING", "EXHAUSTED")
    [event] = span.events
    told = dict(event.attributes or {})
    assert (event.name, told["exception.type"]) == ("exception", "TransientCommandError")
    assert str(told["exception.stacktrace"]).endswith(", in debit") and "executor.py" not in str(told)
    refused = telemetry.spans(SEND)[-1]
    assert refused.status.status_code is StatusCode.ERROR
    assert (refused.attributes or {})["error.type"] == "DuplicateCommandError"
    assert "secret" not in "".join(span.to_json() for span in telemetry.spans())


async def test_what_a_handler_sends_is_below_the_handlers_span_awaited_in_a_thread_and_in_its_transaction(
    bus: CommandBus, given: Given, telemetry: Telemetry
) -> None:
    @bus.handler(DOMAIN, "Awaited")
    async def awaited(command: Command, ctx: HandlerContext) -> None:
        await asyncio.sleep(0)
        async with asyncio.TaskGroup() as group:
            group.create_task(ctx.send(DOMAIN, "Debit"))

    @bus.handler(DOMAIN, "InTransaction")
    async def in_transaction(command: Command, ctx: HandlerContext) -> None:
        async with ctx.transaction():
            await ctx.send(DOMAIN, "Debit")

    @bus.handler(DOMAIN, "Threaded")
    def threaded(command: Command, ctx: SyncHandlerContext) -> None:
        ctx.send(DOMAIN, "Debit")

    @bus.handler(DOMAIN, "Timed", timeout=30)
    async def timed(command: Command, ctx: HandlerContext) -> None:
        await ctx.bus.create_batch(DOMAIN, [BatchCommand("Debit")])

    given.handler()
    kinds = ("Awaited", "InTransaction", "Threaded", "Timed")
    for kind in kinds:
        await given.sent(kind)
    await given.drained()

    spans = telemetry.spans()
    by_id = {span.context.span_id: span for span in spans}
    for kind in kinds:
        first = telemetry.span(PROCESS, busload__command__type=kind)
        assert (first.attributes or {})["busload.outcome"] == "COMPLETED"
        [sent] = [span for span in spans if span.parent and span.parent.span_id == first.context.span_id]
        assert sent.name == (CREATE if kind == "Timed" else SEND)
    debits = telemetry.spans(PROCESS, busload__command__type="Debit")
    assert len(debits) == 4
    below = [by_id[span.parent.span_id].name for span in debits if span.parent is not None]
    assert below == [SEND] * 3  # that of the batch is linked


async def test_a_reply_is_below_the_span_that_sent_its_command(
    bus: CommandBus, given: Given, telemetry: Telemetry
) -> None:
    given.handler()
    given.handler("DebitReply")
    await given.sent(reply_to=DOMAIN)
    await given.drained()
    reply = telemetry.span(PROCESS, busload__command__type="DebitReply")
    assert parent_of(reply, telemetry.spans()) == SEND


async def test_all_stages_of_a_job_and_its_callback_are_linked_to_or_below_its_creation(
    bus: CommandBus, given: Given, telemetry: Telemetry
) -> None:
    given.handler()
    given.handler("Done")

    @bus.planner(DOMAIN, "three")
    async def plan(stage: Any, ctx: HandlerContext) -> list[BatchCommand]:
        return [BatchCommand("Debit")]

    stages = [Stage(name, [BatchCommand("Debit")]) for name in ("one", "two")]
    await bus.jobs.create(DOMAIN, [*stages, Stage("three")], on_complete=BatchCommand("Done"))
    await given.drained()
    created = telemetry.span(f"create_job {DOMAIN}")
    debits = telemetry.spans(PROCESS, busload__command__type="Debit")
    assert [[link.context.span_id for link in span.links] for span in debits] == [[created.context.span_id]] * 3
    assert parent_of(telemetry.span(PROCESS, busload__command__type="Done"), telemetry.spans()) == created.name


async def test_many_commands_that_are_sent_or_added_are_followed_too(
    bus: CommandBus, given: Given, telemetry: Telemetry
) -> None:
    given.handler()
    await bus.send_many(DOMAIN, [BatchCommand("Debit"), BatchCommand("Debit")])
    async with bus.open_batch(DOMAIN) as batch:
        await batch.add("Debit")
    await given.drained()
    spans = telemetry.spans()
    sent, opened = telemetry.span(f"send_many {DOMAIN}"), telemetry.span(f"open_batch {DOMAIN}")
    assert (sent.attributes or {})["messaging.batch.message_count"] == 2
    processed = telemetry.spans(PROCESS)
    assert [parent_of(span, spans) for span in processed if span.parent] == [sent.name] * 2
    [linked] = [span for span in processed if span.links]
    assert linked.links[0].context.span_id == opened.context.span_id


async def test_a_chunk_has_one_span_for_each_call_which_is_linked_to_every_sender(
    bus: CommandBus, given: Given, telemetry: Telemetry
) -> None:
    @bus.bulk_handler(DOMAIN, "Debit", size=4, max_wait=0.01)
    async def debit(chunk: Chunk, ctx: ChunkContext) -> None:
        await ctx.bus.send("ledger", "Note")

    events = bus.buffer("clicks", size=2)

    @events.handler()
    async def click(group: Group, ctx: HandlerContext) -> None:
        raise PermanentCommandError("no")

    await bus.create_batch(DOMAIN, [BatchCommand("Debit"), BatchCommand("Debit")])
    await given.sent()
    await bus.send_many(DOMAIN, [BatchCommand("Debit")])
    await events.add_many([1, 2])
    await given.drained(domains=[DOMAIN, "clicks"])
    senders = {telemetry.span(name).context.span_id for name in (CREATE, SEND, f"send_many {DOMAIN}")}
    calls = telemetry.spans(PROCESS)
    assert {link.context.span_id for span in calls for link in span.links} == senders
    counts: list[Any] = [(span.attributes or {})["messaging.batch.message_count"] for span in calls]
    assert sum(counts) == 4
    assert {parent_of(span, telemetry.spans()) for span in telemetry.spans("send ledger")} == {PROCESS}
    group = telemetry.span("process clicks")
    assert group.status.status_code is StatusCode.ERROR
    assert (group.attributes or {})["messaging.batch.message_count"] == 2


@pytest.mark.parametrize("telemetry", [ParentBased(ALWAYS_OFF)], indirect=True)
async def test_what_was_sent_by_a_span_that_is_not_sampled_has_no_spans_and_sends_on_likewise(
    bus: CommandBus, given: Given, telemetry: Telemetry
) -> None:
    """Also where the worker itself would sample everything"""
    seen: list[tuple[bool, bool]] = []

    @bus.handler(DOMAIN, "Debit")
    async def debit(command: Command, ctx: HandlerContext) -> None:
        here = get_current_span().get_span_context()
        seen.append((here.is_valid, here.trace_flags.sampled))
        if command.data:
            await ctx.send(DOMAIN, "Debit")

    await bus.create_batch(DOMAIN, [BatchCommand("Debit", data=1)])
    await given.sent(data=1)
    eager = Telemetry(ParentBased(ALWAYS_ON))
    async with CommandBus(bus.dsn, settings=eager.settings(bus.settings)) as other:
        other.handlers.become(bus.handlers)
        await Given(other, given.database, given.settings).drained()
    assert seen == [(True, False)] * 4
    assert telemetry.spans() == [] and eager.spans() == []
    assert eager.metric("messaging.client.consumed.messages") == {("process", DOMAIN): 4}
    eager.close()


@pytest.mark.parametrize("telemetry", [ALWAYS_OFF], indirect=True)
async def test_a_sampler_that_heeds_no_parent_makes_no_span_below_a_sender_that_is_not_sampled(
    bus: CommandBus, given: Given, telemetry: Telemetry
) -> None:
    seen = given.handler()
    await bus.create_batch(DOMAIN, [BatchCommand("Debit")])
    await given.sent()
    eager = Telemetry(ALWAYS_ON)
    async with CommandBus(bus.dsn, settings=eager.settings(bus.settings)) as other:
        other.handlers.become(bus.handlers)
        await Given(other, given.database, given.settings).drained()
    assert len(seen) == 2 and eager.spans() == []
    eager.close()


async def test_a_command_whose_sender_had_no_span_begins_a_trace_of_its_own_even_beside_a_current_span(
    dsn: str, bus: CommandBus, given: Given, telemetry: Telemetry, settings: Settings
) -> None:
    given.handler()
    async with CommandBus(dsn, settings=settings) as plain:
        assert plain.database.telemetry is None
        await plain.send(DOMAIN, "Debit")
        await plain.send(DOMAIN, "Debit", headers={"traceparent": "nonsense"})
    with telemetry.tracer.start_as_current_span("around the worker"):
        await given.drained()
    processed = telemetry.spans(PROCESS)
    assert [(span.parent, span.links) for span in processed] == [(None, ())] * 2


async def test_headers_name_the_parent_if_no_span_is_current(
    bus: CommandBus, given: Given, telemetry: Telemetry
) -> None:
    """As a web framework, or a queue, hands them on"""
    seen = given.handler()
    trace, span = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    await given.sent(headers={"traceparent": f"00-{trace}-{span}-01", "tenant": "acme"})
    await given.drained()
    sent = telemetry.span(SEND)
    assert sent.parent is not None and f"{sent.parent.span_id:016x}" == span
    assert seen[0].headers is not None and seen[0].headers["tenant"] == "acme"
    assert seen[0].headers["traceparent"] == f"00-{trace}-{sent.context.span_id:016x}-01"


async def test_baggage_reaches_the_handler_unless_it_is_too_large_for_headers(
    bus: CommandBus, given: Given, telemetry: Telemetry
) -> None:
    seen: list[object] = []

    @bus.handler(DOMAIN, "Debit")
    async def debit(command: Command, ctx: HandlerContext) -> None:
        seen.append((baggage.get_baggage("tenant"), get_current_span().get_span_context().is_valid))

    for value in ("acme", "x" * 4000):  # a propagator reads no more than 4,096 bytes of one entry
        token = context.attach(baggage.set_baggage("tenant", value))
        await given.sent(headers={"mine": "y" * 5000})
        await bus.create_batch(DOMAIN, [BatchCommand("Debit")], headers={"mine": "y" * 5000})
        context.detach(token)
    await given.drained()
    assert sorted(seen, key=str) == [("acme", True)] * 2 + [(None, True)] * 2


async def test_a_span_ends_whatever_becomes_of_its_attempt(
    bus: CommandBus, given: Given, telemetry: Telemetry, caplog: pytest.LogCaptureFixture
) -> None:
    """It collides, returns what cannot be stored, is put off, outlives its time, or its worker stops"""
    caplog.set_level(logging.CRITICAL)
    began = asyncio.Event()

    @bus.handler(DOMAIN, "Unstorable")
    async def unstorable(command: Command, ctx: HandlerContext) -> str:
        return "\0"

    @bus.handler(DOMAIN, "Slow", timeout=0.01, retry=RetryPolicy(max_attempts=1))
    async def slow(command: Command, ctx: HandlerContext) -> None:
        await asyncio.Event().wait()

    @bus.handler(DOMAIN, "Stuck")
    async def stuck(command: Command, ctx: HandlerContext) -> None:
        began.set()
        await asyncio.Event().wait()

    for kind in ("Unstorable", "Slow"):
        await given.sent(kind)
    await given.drained()
    async with given.running() as worker:
        await given.sent("Stuck")
        await began.wait()
        worker.stop(hurry=True)
        await eventually(lambda: telemetry.spans(PROCESS, busload__command__type="Stuck"))
    told = {
        (span.attributes or {})["busload.command.type"]: (span.attributes or {}).get("busload.outcome")
        for span in telemetry.spans(PROCESS)
    }
    assert told == {"Unstorable": "TROUBLESHOOTING", "Slow": "TROUBLESHOOTING", "Stuck": "HANDED_BACK"}


async def test_a_span_ends_when_its_handler_has_ended_however_long_its_result_waits(
    bus: CommandBus, given: Given, telemetry: Telemetry
) -> None:
    ends: list[int] = []

    @bus.handler(DOMAIN, "Debit")
    async def debit(command: Command, ctx: HandlerContext) -> None:
        if ends:
            while time.time_ns() < ends[0] + 1_000_000_000:
                pass  # nothing else runs meanwhile, so the first result waits as long
        ends.append(time.time_ns())

    await given.sent()
    await given.sent()
    await given.drained()
    first, second = sorted(telemetry.spans(PROCESS), key=lambda span: span.end_time or 0)
    assert first.start_time is not None and first.end_time is not None and second.end_time is not None
    assert first.start_time <= first.end_time < ends[0] + 500_000_000
    assert ends[1] <= second.end_time


@pytest.mark.parametrize("telemetry", [MeterProvider, BulkMeterProvider], indirect=True)
async def test_metrics_count_what_was_sent_and_consumed_and_how_long_it_took(
    bus: CommandBus, given: Given, telemetry: Telemetry
) -> None:
    @bus.handler(DOMAIN, "Debit", retry=RetryPolicy(max_attempts=2, backoff=(0,)))
    async def debit(command: Command, ctx: HandlerContext) -> None:
        if ctx.attempt == 1 and command.data == 0:
            raise ValueError("no")

    await bus.create_batch(DOMAIN, [BatchCommand("Debit", data=n) for n in range(5)])
    await given.sent()
    await given.drained()
    assert telemetry.metric("messaging.client.sent.messages") == {("create_batch", DOMAIN): 5, ("send", DOMAIN): 1}
    assert telemetry.metric("messaging.client.consumed.messages") == {("process", DOMAIN): 7}
    ran = {("process", DOMAIN): 6, ("process", DOMAIN, "ValueError"): 1}
    assert telemetry.metric("messaging.process.duration") == ran
    took = telemetry.metric("messaging.client.operation.duration")
    assert (took["create_batch", DOMAIN], took["send", DOMAIN]) == (1, 1) and took["settle", DOMAIN] >= 2


def test_the_sync_bus_has_the_same_spans(dsn: str, settings: Settings, telemetry: Telemetry) -> None:
    with SyncCommandBus(dsn, settings=telemetry.settings(settings)) as bus:
        with telemetry.tracer.start_as_current_span("request"):
            bus.send(DOMAIN, "Debit")
            bus.create_batch(DOMAIN, [BatchCommand("Debit")])
        [found] = bus.list_commands(DOMAIN, batch_id=None, limit=1)
    spans = telemetry.spans()
    assert [(span.name, parent_of(span, spans)) for span in spans[1:]] == [(SEND, "request"), (CREATE, "request")]
    assert found.headers is not None and list(found.headers) == ["traceparent"]


PROGRAM = """
import json, sys
from busload import SyncCommandBus
from busload.worker import Worker
before = set(sys.modules)
if "installed" in sys.argv:
    import opentelemetry.trace, opentelemetry.metrics
with SyncCommandBus(sys.argv[1]) as bus:
    bus.send("payments", "Debit")
    [found] = bus.list_commands("payments", limit=1)
    mine = [name for name in sys.modules if name.startswith("busload.telemetry.open")]
    print(json.dumps([bus.database.telemetry is None, found.headers, mine, "opentelemetry" in sys.modules]))
"""


@pytest.mark.parametrize("installed", [False, True])
async def test_nothing_is_imported_or_sent_for_an_application_that_has_configured_nothing(
    dsn: str, installed: bool
) -> None:
    words = [sys.executable, "-c", PROGRAM, dsn, *(["installed"] if installed else [])]
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    mine = ["busload.telemetry.opentelemetry"] if installed else []
    assert json.loads(out) == [True, None, mine, installed]
