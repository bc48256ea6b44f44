"""Spans and metrics by the messaging conventions of OpenTelemetry, for an application that has configured them.

This module imports OpenTelemetry, and `find.py` imports this one only where somebody uses it.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from opentelemetry import propagate
from opentelemetry.context import Context, attach
from opentelemetry.metrics import MeterProvider, NoOpMeter, get_meter_provider
from opentelemetry.trace import (
    INVALID_SPAN,
    Link,
    NoOpTracer,
    NoOpTracerProvider,
    ProxyTracerProvider,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TracerProvider,
    get_current_span,
    get_tracer_provider,
    set_span_in_context,
    use_span,
)

from busload.telemetry.durations import BUCKETS, GathersDurations
from busload.telemetry.running import Attempt

NAME = "busload"
UNIT = "s"
MOST_LINKS = 128
"""Links of one span: more are dropped by the SDK's default limit anyway."""

PROCESS_DURATION = "messaging.process.duration", UNIT, "How long handlers ran."

OWN = str(Path(__file__).parents[1])
"""Frames of busload itself say nothing about an error of a handler."""

NOTHING = Context()
"""No parent: a span that begins here is the first of its trace, whatever runs around the worker."""


def note_error(span: Span, error: BaseException) -> None:
    """Note an error by its type, its code and where it was raised. Its message stays here: it may hold data."""
    if not span.is_recording():
        return
    kind = type(error).__name__
    event = {"exception.type": kind, "exception.stacktrace": _frames(error)}
    code = getattr(error, "code", None)
    if isinstance(code, str):
        span.set_attribute("busload.error.code", code)
    span.add_event("exception", event)
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, kind))


def _frames(error: BaseException) -> str:
    """Where an error was raised: files, lines and functions, without the text of the lines, and without our own."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(OWN)] or frames
    return "\n".join(f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}' for frame in theirs)


class Telemetry:
    """The spans and metrics of one bus and its workers.

    A span that is not sampled costs what the sampler costs, and makes no more work: nobody reads its attributes and
    errors, and no span is begun below it.
    """

    def __init__(
        self, tracer_provider: TracerProvider, meter_provider: MeterProvider, *, traces: bool, measures: bool
    ) -> None:
        self._start = tracer_provider.get_tracer(NAME).start_span
        self.traces = traces
        """Whether somebody gets the spans. If not, a worker begins none."""
        self.measures = measures
        """Whether somebody gets the metrics. If not, a worker does not count for them."""
        self._without_span = lru_cache(maxsize=1024)(self._context_without_span)
        meter = meter_provider.get_meter(NAME)
        boundaries: dict[str, Any] = {"explicit_bucket_boundaries_advisory": BUCKETS}
        self._operation_duration = meter.create_histogram(
            "messaging.client.operation.duration",
            UNIT,
            "How long it took to send, create, publish or settle commands.",
            **boundaries,
        )
        self._process_duration = meter.create_histogram(*PROCESS_DURATION, **boundaries)
        self.gathering: GathersDurations | None = None
        """What takes the durations of handlers many at once; if None, the SDK takes them one by one."""
        if isinstance(meter_provider, GathersDurations) and meter_provider.gathers_durations:
            self.gathering = meter_provider
        self._sent = meter.create_counter("messaging.client.sent.messages", "{message}", "Commands that were sent.")
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Commands that handlers were given."
        )

    @contextmanager
    def sending(
        self,
        operation: str,
        domain: str,
        *,
        count: int | None = None,
        headers: Mapping[str, str] | None = None,
        **about: object,
    ) -> Iterator[dict[str, str]]:
        """The span of a call that sends commands; yields the headers that carry its context to their handlers.

        `count` is how many commands there are, if they are several and it is known. If no span is current, `headers`
        may name the parent: they may come from elsewhere.
        """
        attributes = _attributes(operation, "send", domain, about)
        if count is not None:
            attributes["messaging.batch.message_count"] = count
        parent: Context | None = None
        if headers and get_current_span() is INVALID_SPAN:
            parent = propagate.extract(headers)
        span = self._start(f"{operation} {domain}", parent, SpanKind.PRODUCER, attributes)
        carried: dict[str, str] = {}
        began, told = time.perf_counter(), _shared(operation, "send", domain)
        with self._measured(span, began, told):
            propagate.inject(carried)
            yield carried
            self._sent.add(1 if count is None else count, told)

    @contextmanager
    def working(
        self, operation: str, kind: str, domain: str | None, count: int, links: Sequence[SpanContext] = ()
    ) -> Iterator[None]:
        """The span of work between the database, the broker and the worker. With `links` it begins a trace."""
        attributes = _attributes(operation, kind, domain, {}) | {"messaging.batch.message_count": count}
        name = operation if domain is None else f"{operation} {domain}"
        parent = NOTHING if links else None
        span = self._start(name, parent, SpanKind.CLIENT, attributes, [Link(one) for one in links[:MOST_LINKS]])
        with self._measured(span, time.perf_counter(), _shared(operation, kind, domain)):
            yield

    @contextmanager
    def settling(self, domain: str | None, count: int, links: Sequence[SpanContext]) -> Iterator[None]:
        """Results go to the database. Without `links` nobody gets spans of the attempts, so the settlement has none."""
        if links:
            with self.working("settle", "settle", domain, count, links):
                yield
        else:
            with self._measured(INVALID_SPAN, time.perf_counter(), _shared("settle", "settle", domain)):
                yield

    @contextmanager
    def _measured(self, span: Span, began: float, told: Mapping[str, str]) -> Iterator[None]:
        with use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            try:
                yield
            except BaseException as error:
                note_error(span, error)
                told = {**told, "error.type": type(error).__name__}
                raise
            finally:
                self._operation_duration.record(time.perf_counter() - began, told)

    def begin(self, attempt: Attempt, domain: str, own: str | None, of_batch: str | None) -> Span | None:
        """Begin the span of a handler, and make it the current one of this context, which is the handler's own.

        The sender of a command is the parent. A batch is linked: a trace of a hundred thousand spans helps nobody.
        If the sender was not sampled there is no span, and what the handler sends is not sampled either. `own` are the
        headers of the command itself, `of_batch` those of its batch, both as JSON text.

        Returns the span if it records anything: of all others nothing has to be remembered, and they need no end.
        """
        decided = self._without_span(own, of_batch)
        if decided is not None:
            attach(decided)
            return None
        sender, batch = _senders(own, of_batch)
        around = batch if batch.is_valid and not sender.is_valid else sender
        span = self._start(_process(domain), sender.context, SpanKind.CONSUMER, AboutAttempt(attempt), batch.links)
        attach(set_span_in_context(span, around.context))
        return span if span.is_recording() else None

    def _context_without_span(self, own: str | None, of_batch: str | None) -> Context | None:
        """Where a handler runs that has no span; None if it may have one. The commands of a load all ask the same."""
        sender, batch = _senders(own, of_batch)
        decided = batch if batch.is_valid and not sender.is_valid else sender
        if decided.refused:
            return decided.context
        if self.traces:
            return None
        return decided.context if decided is sender else decided.baggage

    def begin_many(self, attempt: Attempt, domain: str, senders: Iterable[str | None], count: int) -> Span | None:
        """As `begin`, for one call with so many commands or events. Their senders and their batches are all linked."""
        found = [_sender_of(text) for text in dict.fromkeys(senders) if text is not None]
        valid = [sender for sender in found if sender.is_valid]
        links = [link for sender in valid for link in sender.links]
        if valid and not links:
            attach(valid[0].context)
            return None
        around = valid[0].baggage if len(valid) == 1 else NOTHING
        if not self.traces:
            attach(around)
            return None
        about = AboutAttempt(attempt, count)
        span = self._start(_process(domain), NOTHING, SpanKind.CONSUMER, about, links[:MOST_LINKS])
        attach(set_span_in_context(span, around))
        return span if span.is_recording() else None

    @staticmethod
    def go_on(span: Span) -> None:
        """Make a span the current one of this context too."""
        attach(set_span_in_context(span))

    note_error = staticmethod(note_error)

    def processed(self, domain: str, durations: Sequence[float], error: str | None = None) -> None:
        """Handlers ran for so many seconds each, and have raised an error of this type, or none."""
        if self.gathering is not None:
            self.gathering.add_durations(domain, error, durations)
            return
        told = process_attributes(domain, error)
        for seconds in durations:
            self._process_duration.record(seconds, told)

    def consumed(self, domain: str, count: int) -> None:
        """So many commands were given to handlers."""
        self._consumed.add(count, _shared("process", "process", domain))


def configured(tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None) -> Telemetry | None:
    """Telemetry to these providers or the global ones; None if nobody has configured any."""
    tracers, meters = tracer_provider or get_tracer_provider(), meter_provider or get_meter_provider()
    no_spans = isinstance(tracers, ProxyTracerProvider | NoOpTracerProvider)
    no_spans = no_spans or isinstance(tracers.get_tracer(NAME), NoOpTracer)  # OTEL_SDK_DISABLED
    no_metrics = type(meters).__name__ in ("_ProxyMeterProvider", "NoOpMeterProvider")
    no_metrics = no_metrics or isinstance(meters.get_meter(NAME), NoOpMeter)
    if no_spans and no_metrics:
        return None
    return Telemetry(tracers, meters, traces=not no_spans, measures=not no_metrics)


def trace_id_here() -> str | None:
    """The id of the trace that this context is in."""
    found = get_current_span().get_span_context()
    return f"{found.trace_id:032x}" if found.is_valid else None


class AboutAttempt(Mapping[str, Any]):
    """The attributes of a handler's span. They are put together when somebody reads them.

    A sampler may read them, and a span that records does. Where a sampler says no without a look, nobody does.
    """

    __slots__ = ("_attempt", "_attributes", "_count")

    def __init__(self, attempt: Attempt, count: int | None = None) -> None:
        self._attempt = attempt
        self._count = count
        self._attributes: dict[str, Any] | None = None

    def _read(self) -> dict[str, Any]:
        if self._attributes is None:
            facts = self._attempt.facts()
            self._attributes = _attributes("process", "process", facts["domain"], facts)
            if self._count is not None:
                self._attributes["messaging.batch.message_count"] = self._count
        return self._attributes

    def __getitem__(self, name: str) -> Any:
        return self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def items(self) -> ItemsView[str, Any]:
        return self._read().items()


def _attributes(operation: str, kind: str, domain: str | None, about: Mapping[str, object]) -> dict[str, Any]:
    attributes: dict[str, Any] = {**_shared(operation, kind, domain)}
    for name, value in about.items():
        if name in _NAMES and value is not None:
            attributes[_NAMES[name]] = value if isinstance(value, _AS_THEY_ARE) else str(value)
    return attributes


_AS_THEY_ARE = (str, int)
_NAMES = {
    "command_id": "messaging.message.id",
    "correlation_id": "messaging.message.conversation_id",
    "command_type": "busload.command.type",
    "batch_id": "busload.batch.id",
    "job_id": "busload.job.id",
    "task_key": "busload.task_key",
    "attempt": "busload.attempt",
    "execution_id": "busload.execution.id",
}


@lru_cache(maxsize=4096)
def _process(domain: str) -> str:
    """The name of the span of a handler."""
    return f"process {domain}"


@lru_cache(maxsize=4096)
def _shared(operation: str, kind: str, domain: str | None) -> Mapping[str, str]:
    """What the spans and metrics of an operation have in common."""
    shared = {
        "messaging.system": "busload",
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
    }
    return shared if domain is None else shared | {"messaging.destination.name": domain}


def process_attributes(domain: str, error: str | None) -> Mapping[str, str]:
    """The attributes of a duration of handlers."""
    shared = _shared("process", "process", domain)
    return shared if error is None else {**shared, "error.type": error}


class Sender(NamedTuple):
    """The span that sent a command or created a batch, and the context that goes on from there."""

    context: Context
    is_valid: bool
    """Whether there is such a span. If not, the context may still have baggage."""
    baggage: Context
    """The context without the span: what goes on where a trace begins."""
    refused: bool
    """Whether there is such a span, and the sampler has said no to it."""
    links: tuple[Link, ...]
    """The link to that span, if somebody gets it."""


def _sender_in(context: Context) -> Sender:
    found = get_current_span(context).get_span_context()
    sampled = found.is_valid and found.trace_flags.sampled
    baggage = set_span_in_context(INVALID_SPAN, context)
    return Sender(context, found.is_valid, baggage, found.is_valid and not sampled, (Link(found),) if sampled else ())


NOBODY = _sender_in(NOTHING)


def _senders(own: str | None, of_batch: str | None) -> tuple[Sender, Sender]:
    return NOBODY if own is None else _sender_of(own), NOBODY if of_batch is None else _sender_of(of_batch)


@lru_cache(maxsize=1024)
def _sender_of(headers: str) -> Sender:
    """Who is in these headers. Commands that were sent together come one after the other, so they are read once."""
    try:
        return _sender_in(propagate.extract(_decode(headers), NOTHING))
    except (msgspec.MsgspecError, ValueError, RecursionError):  # other hands wrote it
        return NOBODY


_decode = msgspec.json.Decoder(dict[str, str]).decode
