"""Faults on demand: a handler that fails, a worker that dies, a broker that is away."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from busload.commands import rescue
from busload.commands.bulk_items import Chunk
from busload.commands.checks import require, whole
from busload.commands.command import Command
from busload.errors import (
    InvalidOperationError,
    PublishError,
    Refusal,
    RefusalReason,
    TransportUnavailableError,
    kind_of,
)
from busload.handlers.registry import Handler, Handlers
from busload.postgres.plan import Plan, execute
from busload.postgres.statements import statements
from busload.testing.faces import AnyBus, in_own_loop, refuse_no_bus
from busload.testing.run import draining
from busload.transports import Delivery, Message, Transport, find_transport
from busload.transports.base import DeliveryReader
from busload.worker.failure_calls import call_all, failure_of_parked, functions_for

SQL = statements(__name__)


@dataclass(slots=True)
class Fault:
    """How often a fault will still happen, and how often it has happened."""

    left: int
    happened: int = 0

    def happens(self) -> bool:
        """Whether the call that begins now is to fail."""
        if self.left == 0:
            return False
        self.left -= 1
        self.happened += 1
        return True


@contextmanager
def fail_next(
    bus: AnyBus, domain: str, command_type: str, error: BaseException | type[BaseException], *, times: int = 1
) -> Iterator[Fault]:
    """Let the next `times` calls of a handler raise `error` instead of running it, while the block lasts."""
    if not (isinstance(error, BaseException) or (isinstance(error, type) and issubclass(error, BaseException))):
        raise ValueError(f"fail_next() wants an exception, found {kind_of(error)}.")
    fault = _new_fault(times)

    def fail() -> None:
        if fault.happens():
            raise error

    def around(handler: Handler) -> Callable[..., Any]:
        @wraps(handler.function)
        async def awaited(subject: Any, ctx: Any) -> Any:
            fail()
            return await handler.function(subject, ctx)

        @wraps(handler.function)
        def called(subject: Any, ctx: Any) -> Any:
            fail()
            return handler.function(subject, ctx)

        return awaited if handler.is_async else called

    with _exchanged(bus, domain, command_type, around):
        yield fault


@contextmanager
def kill_worker(bus: AnyBus, domain: str, command_type: str, *, times: int = 1) -> Iterator[Fault]:
    """Let the worker die `times` times when this handler has just run, before its result is recorded.

    The work is done, but the lease is lost: the command is rescued and runs again, as after the death of a process.
    All that the worker held goes with it, and what the handler has written in `ctx.transaction()` is rolled back.
    After three deaths in a row the command waits in troubleshooting. A `drain` goes on with another worker.
    """
    fault = _new_fault(times)

    def around(handler: Handler) -> Callable[..., Any]:
        @wraps(handler.function)
        async def awaited(subject: Any, ctx: Any) -> Any:
            result = await handler.function(subject, ctx)
            if fault.happens():
                parked = await ctx.bus.database.in_transaction(_lose_worker(subject))
                await _tell(ctx.bus, parked)
                _end_drain()
            return result

        @wraps(handler.function)
        def called(subject: Any, ctx: Any) -> Any:
            result = handler.function(subject, ctx)
            if fault.happens():
                parked = ctx.bus.database.in_transaction(_lose_worker(subject))
                in_own_loop(partial(_tell, ctx.bus, parked))
                _end_drain()
            return result

        return awaited if handler.is_async else called

    with _exchanged(bus, domain, command_type, around):
        yield fault


def _lose_worker(subject: Command | Chunk) -> Plan[list[rescue.Parked]]:
    """Declare the worker that holds this command dead, and take back what it held; returns what waits for a person."""
    first = subject[0].command if isinstance(subject, Chunk) else subject
    assert first is not None, "items of a chunk are commands"
    yield from execute(SQL.lose_worker, domain=first.domain, command_id=first.command_id)
    returned = yield from rescue.rescue()
    yield from execute(SQL.forget_who_lost)  # else a worker that lives would take its commands up again
    return (yield from rescue.parked(returned.parked_ids))


async def _tell(bus: AnyBus, parked: Sequence[rescue.Parked]) -> None:
    """Call `on_failure`, as the worker does that finds the other one dead."""
    for one in parked:
        functions = functions_for(bus.handlers, bus.hooks.failure, one.domain, one.command_type)
        await call_all(functions, failure_of_parked(one))


def _end_drain() -> None:
    if (drain := draining.get()) is not None:
        drain.kill()


def _new_fault(times: int) -> Fault:
    require(whole(1, 1_000_000), times=times)
    return Fault(times)


@contextmanager
def _exchanged(
    bus: AnyBus, domain: str, command_type: str, around: Callable[[Handler], Callable[..., Any]]
) -> Iterator[None]:
    refuse_no_bus(bus)
    handler = bus.handlers.find(domain, command_type)
    if handler is None or (domain, command_type) not in bus.handlers.names:
        known = ", ".join(f"{of}/{name}" for of, name in bus.handlers.names) or "none"
        raise InvalidOperationError(f"There is no handler of {domain}/{command_type} on this bus. It has: {known}.")
    with exchanged(bus.handlers, domain, command_type, around(handler)):
        yield


@contextmanager
def exchanged(handlers: Handlers, domain: str, command_type: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let another function run these commands while the block lasts."""
    before = handlers.exchange(domain, command_type, function)
    try:
        yield
    finally:
        handlers.exchange(domain, command_type, before)


class BreakableTransport(Transport):
    """A transport that a test can take away: `CommandBus(dsn, transport=BreakableTransport("amqp://…"))`.

    While it is down it publishes nothing and delivers nothing, as a broker that cannot be reached.
    """

    def __init__(self, inner: Transport | str) -> None:
        self._inner = find_transport(inner) if isinstance(inner, str) else inner
        super().__init__(self._inner.url)
        self.name = self._inner.name  # type: ignore[misc]  # the outbox knows it by the name of what it carries
        self.max_bytes = self._inner.max_bytes
        self.is_down = False

    @classmethod
    def from_url(cls, url: str) -> BreakableTransport:
        return cls(url)

    async def declare(self, queues: Sequence[str]) -> None:
        self._refuse()
        self._inner.existing = self.existing
        await self._inner.declare(queues)

    async def publish(self, messages: Sequence[Message]) -> None:
        if self.is_down and messages:
            raise PublishError(dict.fromkeys(range(len(messages)), Refusal(RefusalReason.UNREACHABLE, DOWN)))
        await self._inner.publish(messages)

    async def deliveries(self, queue: str, *, prefetch: int) -> AsyncIterator[Delivery]:
        self._refuse()
        reader = DeliveryReader(self._inner.deliveries(queue, prefetch=prefetch))
        try:
            while True:
                delivery = await reader.next(LOOK_EVERY)
                self._refuse()
                if delivery is not None:
                    yield delivery
        finally:
            await reader.close()

    async def depth(self, queue: str) -> int | None:
        self._refuse()
        return await self._inner.depth(queue)

    async def peek(self, queue: str, *, limit: int) -> list[bytes] | None:
        self._refuse()
        return await self._inner.peek(queue, limit=limit)

    async def aclose(self) -> None:
        await self._inner.aclose()

    def _refuse(self) -> None:
        if self.is_down:
            raise TransportUnavailableError(DOWN)


DOWN = "The test has taken the broker away."
LOOK_EVERY = 0.05
"""Seconds after which a receiver sees that the broker was taken away."""


@contextmanager
def broker_down(bus: AnyBus) -> Iterator[BreakableTransport]:
    """Take the broker of a bus away while the block lasts. Its transport must be a `BreakableTransport`."""
    refuse_no_bus(bus)
    transport = bus.transport
    if not isinstance(transport, BreakableTransport):
        raise InvalidOperationError(
            f"broker_down() wants a bus whose transport is a BreakableTransport, found {kind_of(transport)}. Let the "
            "fixture `busload_transport` return one, or pass it: CommandBus(dsn, transport=BreakableTransport(url))."
        )
    transport.is_down = True
    try:
        yield transport
    finally:
        transport.is_down = False
