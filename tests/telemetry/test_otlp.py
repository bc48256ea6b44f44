"""Real OTLP: spans of senders and workers in processes of their own, and through brokers, at a receiver on loopback."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

from busload import BatchCommand, Command, CommandBus, HandlerContext, RetryPolicy, Settings, Worker, WorkerSettings
from busload.integrations.opentelemetry import BulkMeterProvider
from tests.given import DOMAIN, Given
from tests.telemetry.conftest import Telemetry, parent_of

APPLICATION = '''
"""An application as users write it: the SDK is set up first, then the bus."""
import os
import sys

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from busload import BatchCommand, CommandBus, RetryPolicy, SyncCommandBus, TransientCommandError

provider = TracerProvider(resource=Resource({"service.name": sys.argv[0].rpartition("/")[2]}))
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(os.environ["RECEIVER"])))
trace.set_tracer_provider(provider)

bus = CommandBus(os.environ["DSN"])


@bus.handler("payments", "Debit", retry=RetryPolicy(max_attempts=2, backoff=(0,)))
async def debit(command, ctx):
    if command.data["n"] == 1 and ctx.attempt == 1:
        raise TransientCommandError("the account DE00 secret is busy", code="BUSY")


@bus.handler("payments", "Done")
def done(command, ctx):
    ctx.send("payments", "Note")


@bus.handler("payments", "Note")
async def note(command, ctx):
    os.kill(os.getppid() if "--parent" in sys.argv else os.getpid(), 15)


if __name__ == "__main__":
    with SyncCommandBus(os.environ["DSN"]) as sender, trace.get_tracer("app").start_as_current_span("request"):
        commands = [BatchCommand("Debit", data={"n": n, "iban": "DE00 secret"}) for n in range(3)]
        sender.create_batch("payments", commands, on_complete=BatchCommand("Done"))
    provider.shutdown()
'''


class Receiver:
    """A tiny collector: OTLP over HTTP, decoded by the protocol's own messages."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: dict[bytes, str] = {}
        self.metrics: list[Metric] = []
        self.raw = b""

    def receive(self, path: str, body: bytes) -> None:
        self.raw += body
        if path == "/v1/metrics":
            measured = ExportMetricsServiceRequest()
            measured.ParseFromString(body)
            self.metrics += [m for r in measured.resource_metrics for s in r.scope_metrics for m in s.metrics]
            return
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        for resource in request.resource_spans:
            [service] = [a.value.string_value for a in resource.resource.attributes if a.key == "service.name"]
            for scope in resource.scope_spans:
                self.spans += scope.spans
                self.services |= dict.fromkeys((span.span_id for span in scope.spans), service)

    def find(self, name: str, command_type: str | None = None) -> list[Span]:
        named = [span for span in self.spans if span.name == name]
        return [span for span in named if command_type in (None, told(span).get("busload.command.type"))]


def told(span: Span) -> dict[str, str]:
    return {one.key: one.value.string_value or str(one.value.int_value) for one in span.attributes}


@contextmanager
def receiving() -> Iterator[tuple[Receiver, str]]:
    receiver = Receiver()

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receiver.receive(self.path, self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    try:
        yield receiver, f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def run(*words: str, cwd: Path, **environment: str) -> int:
    own = {**os.environ, **environment}
    process = await asyncio.create_subprocess_exec(sys.executable, *words, cwd=cwd, env=own)
    return await process.wait()


async def test_a_collector_gets_one_story_from_the_processes_of_sender_and_worker(dsn: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APPLICATION)
    with receiving() as (receiver, url):
        assert await run("app.py", cwd=tmp_path, DSN=dsn, RECEIVER=f"{url}/traces") == 0
        worker = ("-m", "busload.cli", "worker", "app:bus", "--log-json")
        assert await run(*worker, cwd=tmp_path, DSN=dsn, RECEIVER=f"{url}/traces") == 0
    [request], [created] = receiver.find("request"), receiver.find("create_batch payments")
    assert (created.parent_span_id, created.kind) == (request.span_id, Span.SPAN_KIND_PRODUCER)
    assert told(created)["messaging.batch.message_count"] == "3"
    debits = receiver.find("process payments", "Debit")
    assert sorted((told(span)["busload.attempt"], told(span)["busload.outcome"]) for span in debits) == [
        ("1", "COMPLETED"),
        ("1", "COMPLETED"),
        ("1", "FAILED_ATTEMPT"),
        ("2", "COMPLETED"),
    ]
    for span in debits:
        assert [link.span_id for link in span.links] == [created.span_id] and not span.parent_span_id
        assert span.kind == Span.SPAN_KIND_CONSUMER
    [failed] = [span for span in debits if span.status.code == Status.STATUS_CODE_ERROR]
    assert [event.name for event in failed.events] == ["exception"] and told(failed)["busload.error.code"] == "BUSY"
    [done] = receiver.find("process payments", "Done")
    [sent] = receiver.find("send payments")
    [note] = receiver.find("process payments", "Note")
    assert (done.parent_span_id, sent.parent_span_id, note.parent_span_id) == (
        created.span_id,
        done.span_id,
        sent.span_id,
    )
    assert {span.trace_id for span in (request, created, done, sent, note)} == {request.trace_id}
    linked = {link.span_id for span in receiver.find("settle payments") for link in span.links}
    assert linked >= {span.span_id for span in debits}
    assert receiver.services[created.span_id] != receiver.services[done.span_id]
    assert b"secret" not in receiver.raw


@pytest.mark.parametrize("broker", ["rabbitmq_url", "nats_url"])
async def test_context_goes_through_a_broker_and_publishing_has_a_span(
    dsn: str,
    settings: Settings,
    worker_settings: WorkerSettings,
    telemetry: Telemetry,
    broker: str,
    request: pytest.FixtureRequest,
) -> None:
    seen: list[object] = []
    url = request.getfixturevalue(broker)
    async with CommandBus(dsn, transport=url, settings=telemetry.settings(settings)) as bus:

        @bus.handler(DOMAIN, "Debit")
        async def debit(command: object, ctx: object) -> None:
            seen.append(command)

        batch_id = await bus.create_batch(DOMAIN, [BatchCommand("Debit"), BatchCommand("Debit")])
        sent = await bus.send(DOMAIN, "Debit")
        async with Worker(bus, settings=worker_settings):
            await bus.wait_batch(DOMAIN, batch_id, timeout=60)
            await bus.wait_command(DOMAIN, sent.command_id, timeout=60)
    spans = telemetry.spans()
    published = telemetry.spans(f"publish {DOMAIN}")
    assert [parent_of(span, spans) for span in published] == [f"create_batch {DOMAIN}", None]  # the other by a relay
    counts = [(span.attributes or {})["messaging.batch.message_count"] for span in published]
    assert counts == [2, 1]
    created = telemetry.span(f"create_batch {DOMAIN}")
    processed = telemetry.spans(f"process {DOMAIN}")
    assert [parent_of(span, spans) for span in processed if span.parent] == [f"send {DOMAIN}"]
    assert [[link.context.span_id for link in span.links] for span in processed if span.links] == [
        [created.context.span_id]
    ] * 2


@pytest.mark.parametrize("preference", ["cumulative", "delta"])
@pytest.mark.parametrize("provider", [MeterProvider, BulkMeterProvider])
async def test_a_collector_gets_the_durations_of_handlers_whoever_adds_them_up(
    dsn: str,
    settings: Settings,
    given: Given,
    provider: type[MeterProvider],
    preference: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", preference)
    with receiving() as (receiver, url):
        meters = provider([PeriodicExportingMetricReader(OTLPMetricExporter(f"{url}/metrics"), float("inf"))])
        async with CommandBus(dsn, settings=replace(settings, meter_provider=meters)) as bus:

            @bus.handler(DOMAIN, "Debit", retry=RetryPolicy(max_attempts=2, backoff=(0,)))
            async def debit(command: Command, ctx: HandlerContext) -> None:
                if ctx.attempt == 1 and command.data == 0:
                    raise ValueError("no")

            worker = Given(bus, given.database, given.settings)
            for _ in range(2):
                await bus.create_batch(DOMAIN, [BatchCommand("Debit", data=n) for n in range(5)])
                await worker.drained()
                assert meters.force_flush()
        meters.shutdown()
    told = [metric for metric in receiver.metrics if metric.name == "messaging.process.duration"]
    assert {(metric.unit, metric.description) for metric in told} == {("s", "How long handlers ran.")}
    cumulative = preference == "cumulative"
    wanted = "AGGREGATION_TEMPORALITY_CUMULATIVE" if cumulative else "AGGREGATION_TEMPORALITY_DELTA"
    assert {AggregationTemporality.Name(metric.histogram.aggregation_temporality) for metric in told} == {wanted}
    counts = []
    for metric in told[:2]:
        found = {}
        for point in metric.histogram.data_points:
            attributes = {each.key: each.value.string_value for each in point.attributes}
            assert attributes.pop("messaging.system") == "busload"
            assert attributes.pop("messaging.operation.name") == attributes.pop("messaging.operation.type") == "process"
            assert attributes.pop("messaging.destination.name") == DOMAIN
            assert sum(point.bucket_counts) == point.count and len(point.bucket_counts) == 15
            assert 0 <= point.min <= point.sum / point.count <= point.max
            assert 0 < point.start_time_unix_nano < point.time_unix_nano
            found[attributes.pop("error.type", None)] = point.count
            assert not attributes
        counts.append(found)
    assert counts == [{None: 5, "ValueError": 1}, {None: 10, "ValueError": 2} if cumulative else counts[0]]
