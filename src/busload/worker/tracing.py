"""The spans of a worker: one for each attempt, one for each settlement.

A worker whose bus has telemetry is assembled from these stations instead of the plain ones, so that nobody has to ask,
command by command, whether there is any.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from busload.commands.execution import Leased, Outcome, Several, Succeeded, Transition
from busload.commands.retry import RetryPolicy
from busload.handlers.registry import Handler, Handlers
from busload.limits.limiter import PostponedError
from busload.telemetry.running import running
from busload.worker.settlement import Outcomes, Settlement

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext

    from busload.telemetry.opentelemetry import Telemetry

POSTPONED, SUPERSEDED, HANDED_BACK = "POSTPONED", "SUPERSEDED", "HANDED_BACK"
"""How an attempt can end that has no outcome: it was put off, another worker has it, or this worker has stopped."""

AT_ONCE = 50
"""Spans that end in one round of the event loop: about a millisecond of work."""


class Spans:
    """The spans of attempts: begun when a handler is called, ended when it is known what becomes of its command."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry = telemetry
        self.open: dict[Leased, Span] = {}
        """The spans of attempts that run."""
        self._measured: set[Leased] = set()
        """Attempts that run and whose durations somebody wants to have."""
        self._errors: dict[Leased, BaseException] = {}
        self._ended: dict[Leased, SpanContext] = {}
        """Spans of attempts that are not settled yet, for the span of their settlement."""

    def begin(self) -> None:
        """Begin the span of the attempt that is about to run in this context. It goes on until `end`."""
        leased, telemetry = running.get(), self.telemetry
        assert type(leased) is Leased
        if self.open and (span := self.open.get(leased)) is not None:
            telemetry.go_on(span)  # its transaction has collided with others, and the same attempt is made again
            return
        lease = leased.lease
        span = telemetry.begin(leased, lease.domain, leased.headers, lease.headers)
        if span is not None:
            self.open[leased] = span
        if telemetry.measures:
            self._measured.add(leased)

    @contextmanager
    def of_many(self, count: int) -> Iterator[None]:
        """The span of a call with so many commands or events. They may be of several senders, so all are linked."""
        what, began = running.get(), time.monotonic()
        assert what is not None
        leased = what.leased if isinstance(what, Several) else [what] if isinstance(what, Leased) else []
        domain = what.facts()["domain"]
        senders = [text for one in leased for text in (one.headers, one.lease.headers)]
        span = self.telemetry.begin_many(what, domain, senders, count)
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            if self.telemetry.measures:
                self.telemetry.processed(domain, [time.monotonic() - began], _type_of(error))
            if span is not None:
                if error is not None:
                    self.telemetry.note_error(span, error)
                span.end()
            del error

    def failed(self, leased: Leased, error: BaseException) -> None:
        """This is why the attempt has not succeeded."""
        self._errors[leased] = error

    def end(self, leased: Leased, outcome: str) -> None:
        """The attempt ends now, and so."""
        if leased in self._measured:
            self._measured.discard(leased)
            took = time.monotonic() - leased.started
            self.telemetry.processed(leased.lease.domain, [took], _type_of(self._errors.get(leased)))
        self._end_span(leased, outcome, None, None)

    def _end_span(self, leased: Leased, outcome: str, reason: str | None, ended: int | None) -> None:
        """End the span of an attempt, if it has one, at this time in nanoseconds; if it is None, now."""
        error = self._errors.pop(leased, None) if self._errors else None
        span = self.open.pop(leased, None)
        if span is None or not span.is_recording():
            return
        span.set_attribute("busload.outcome", outcome)
        if reason is not None:
            span.set_attribute("busload.reason", reason)
        if error is not None:
            self.telemetry.note_error(span, error)
        self._ended[leased] = span.get_span_context()
        span.end(ended)

    async def end_many(self, transitions: Sequence[Transition]) -> None:
        """These attempts ended at the time that their results tell.

        The SDK's work takes up to a third less if it is done for many spans in a row than between other work. The clock
        is read before the time of day, so no span ends before it began.
        """
        one_by_one = self.open or (self._measured and self.telemetry.gathering is None)
        step = AT_ONCE if one_by_one else max(1, len(transitions))
        for first in range(0, len(transitions), step):
            if not self.open and not self._errors and not self._measured:
                return
            if first:
                await asyncio.sleep(0)  # let others in between
            some = transitions[first : first + step]
            clock = time.monotonic()
            now = time.time_ns()
            if self._measured:
                self._measure(some)
            for one in some if self.open or self._errors else ():
                self._end_span(one.leased, one.outcome, one.reason, now - int(1e9 * (clock - one.finished)))

    def _measure(self, transitions: Sequence[Transition]) -> None:
        """Tell how long these ran: most often all are of one domain, and none has failed."""
        ran = [one for one in transitions if one.leased in self._measured]
        self._measured.difference_update([one.leased for one in ran])
        domains = {lease.domain for lease in {one.leased.lease for one in ran}}
        if len(domains) == 1 and not self._errors:
            self.telemetry.processed(domains.pop(), [one.finished - one.leased.started for one in ran])
            return
        apart: dict[tuple[str, str | None], list[float]] = {}
        for one in ran:
            kind = one.leased.lease.domain, _type_of(self._errors.get(one.leased))
            apart.setdefault(kind, []).append(one.finished - one.leased.started)
        for (domain, error), durations in apart.items():
            self.telemetry.processed(domain, durations, error)

    def settled(self, leased: Iterable[Leased]) -> None:
        """These have a result in the database, or never will."""
        if self._ended:
            for one in leased:
                self._ended.pop(one, None)

    def linked(self, transitions: Sequence[Transition]) -> list[SpanContext]:
        """The spans of these attempts, as far as somebody gets them."""
        if not self._ended:
            return []
        found = (self._ended.get(transition.leased) for transition in transitions)
        return [span for span in found if span is not None]

    def close(self) -> None:
        """End what is left when the worker has stopped: its commands were handed back."""
        for leased in {*self.open, *self._measured}:
            self.end(leased, HANDED_BACK)


def _type_of(error: BaseException | None) -> str | None:
    return None if error is None else type(error).__name__


class TracedHandlers(Handlers):
    """The handlers of a bus, also those that are registered later; each begins the span of its call."""

    __slots__ = ("_find", "_spans", "_traced")

    def __init__(self, spans: Spans, handlers: Handlers) -> None:
        self.__dict__ = handlers.__dict__
        self._find = handlers.find
        self._spans = spans
        self._traced: dict[int, tuple[Handler, Handler]] = {}

    def find(self, domain: str, command_type: str) -> Handler | None:
        handler = self._find(domain, command_type)
        known = self._traced.get(id(handler))
        return self._add(handler) if known is None else known[1]

    def _add(self, handler: Handler | None) -> Handler | None:
        if handler is None:
            return None
        function = self._of_many(handler) if handler.takes_many else self._of_one(handler.function)
        traced = replace(handler, function=function)
        self._traced[id(handler)] = handler, traced
        return traced

    def _of_one(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The span ends when it is known what becomes of the command: see `TracedSettlement`."""
        begin = self._spans.begin

        def call(command: Any, context: Any) -> Any:
            begin()
            return function(command, context)

        return call

    def _of_many(self, handler: Handler) -> Callable[..., Any]:
        """A chunk or a group may be called in parts, each with a span that ends with its call."""
        spans, function = self._spans, handler.function

        async def call(many: Any, context: Any) -> Any:
            with spans.of_many(len(many)):
                return await function(many, context)

        def call_in_thread(many: Any, context: Any) -> Any:
            with spans.of_many(len(many)):
                return function(many, context)

        return call if handler.is_async else call_in_thread


class TracedSettlement(Settlement):
    """Ends the spans of attempts when their results are settled, and has a span for each settlement of them."""

    def __init__(self, spans: Spans, *station: Any) -> None:
        super().__init__(*station)
        self._spans = spans

    def settled_elsewhere(self, transition: Transition) -> None:
        leased = transition.leased
        self._spans.end(leased, transition.outcome)
        self._spans.settled([leased])
        self._spans.telemetry.consumed(leased.lease.domain, 1)
        super().settled_elsewhere(transition)

    def superseded(self, leased: Leased) -> None:
        self._spans.end(leased, SUPERSEDED)
        self._spans.settled([leased])
        super().superseded(leased)

    async def _settle(self, transitions: Sequence[Transition], patience: float) -> int:
        await self._spans.end_many(transitions)
        links, telemetry = self._spans.linked(transitions), self._spans.telemetry
        if not links and not telemetry.measures:
            return await super()._settle(transitions, patience)
        domains = _domains(transitions)
        with telemetry.settling(next(iter(domains)) if len(domains) == 1 else None, len(transitions), links):
            settled = await super()._settle(transitions, patience)
        self._spans.settled(transition.leased for transition in transitions)
        for domain, count in domains.items() if telemetry.measures else ():
            telemetry.consumed(domain, count)
        return settled


def _domains(transitions: Sequence[Transition]) -> Mapping[str, int]:
    """How many are of each domain. Most often there is one."""
    found = {lease.domain for lease in {one.leased.lease for one in transitions}}
    if len(found) == 1:
        return {found.pop(): len(transitions)}
    return Counter(one.leased.lease.domain for one in transitions)


class TracedOutcomes(Outcomes):
    """Tells the spans of attempts why they failed, and ends those that were only put off."""

    def __init__(self, spans: Spans, *station: Any) -> None:
        super().__init__(*station)
        self._spans = spans

    async def postpone(self, leased: Sequence[Leased], postponed: PostponedError) -> None:
        for one in leased:
            self._spans.end(one, POSTPONED)
        self._spans.settled(leased)
        await super().postpone(leased, postponed)

    async def _decide(self, leased: Leased, outcome: Outcome, retry: RetryPolicy) -> None:
        if not isinstance(outcome, Succeeded) and outcome.error is not None:
            self._spans.failed(leased, outcome.error)
        await super()._decide(leased, outcome, retry)
