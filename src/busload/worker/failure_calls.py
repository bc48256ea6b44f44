"""Calls that applications want after failures: `on_failure` of a bus and of its handlers. Best effort."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from inspect import isawaitable, iscoroutinefunction

from busload.commands.command import CommandStatus
from busload.commands.execution import FAILED, TROUBLESHOOTING, Leased, Transition
from busload.commands.headers import joined_headers
from busload.commands.payload import readable
from busload.commands.rescue import Parked
from busload.handlers.hooks import CommandFailure, OnFailure, name_of
from busload.handlers.registry import Handlers

log = logging.getLogger("busload")

STATUSES = {FAILED: CommandStatus.FAILED, TROUBLESHOOTING: CommandStatus.IN_TROUBLESHOOTING_QUEUE}


class FailureCalls:
    """Calls functions about commands that will not be tried again, once that is in the database."""

    def __init__(self, handlers: Handlers, functions: Sequence[OnFailure]) -> None:
        self._handlers, self._functions = handlers, tuple(functions)
        self._calls: set[asyncio.Task[None]] = set()

    def heed(self, transitions: Sequence[Transition]) -> None:
        """These attempts have been settled."""
        for transition in transitions:
            if transition.outcome in STATUSES:
                leased = transition.leased
                self._begin(leased.lease.domain, leased.command_type, partial(failure_of, transition))

    def heed_parked(self, parked: Sequence[Parked]) -> None:
        """These commands were sent to troubleshooting by this worker, because they have taken down others."""
        for one in parked:
            self._begin(one.domain, one.command_type, partial(failure_of_parked, one))

    def _begin(self, domain: str, command_type: str, failure: Callable[[], CommandFailure]) -> None:
        if functions := functions_for(self._handlers, self._functions, domain, command_type):
            call = asyncio.create_task(call_all(functions, failure()), name="busload-on-failure")
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def close(self, within: float) -> None:
        """Wait for calls that are under way, but not for ever."""
        if self._calls:
            _, late = await asyncio.wait(set(self._calls), timeout=within)
            for call in late:
                call.cancel()
            if late:
                log.warning("Gave up %d calls of on_failure that did not end", len(late))


def functions_for(
    handlers: Handlers, of_bus: Sequence[OnFailure], domain: str, command_type: str
) -> Sequence[OnFailure]:
    """Who is called about a command: that of its handler, then those of the bus. Nobody, if busload has sent it."""
    if command_type.startswith("busload."):
        return ()
    handler = handlers.find(domain, command_type)
    own = handler.on_failure if handler is not None else None
    return [*([own] if own is not None else []), *of_bus]


async def call_all(functions: Sequence[OnFailure], failure: CommandFailure) -> None:
    """Call one function after the other; their errors are logged."""
    for function in functions:
        try:
            answer = await (
                function(failure) if iscoroutinefunction(function) else asyncio.to_thread(function, failure)
            )
            if isawaitable(answer):
                await answer
        except Exception:
            log.exception("on_failure %s failed for command %s", name_of(function), failure.command_id)


def failure_of(transition: Transition) -> CommandFailure:
    """What the functions are told about an attempt that was the last one."""
    leased: Leased = transition.leased
    lease = leased.lease
    return CommandFailure(
        lease.domain,
        leased.command_type,
        leased.command_id,
        readable(leased.data),
        lease.batch_id,
        leased.task_key,
        joined_headers(lease.headers, leased.headers) or {},
        lease.round_attempt,
        STATUSES[transition.outcome],
        transition.reason,
        *_error(transition.details),
    )


def failure_of_parked(parked: Parked) -> CommandFailure:
    """What the functions are told about a command that has taken down its workers."""
    return CommandFailure(
        parked.domain,
        parked.command_type,
        parked.command_id,
        readable(parked.data),
        parked.batch_id,
        parked.task_key,
        joined_headers(parked.headers_of_batch, parked.headers) or {},
        parked.attempt,
        CommandStatus.IN_TROUBLESHOOTING_QUEUE,
        parked.reason,
        *_error(parked.error),
    )


def _error(text: str | None) -> tuple[str | None, str | None, str | None]:
    """The type, the code and the message of an error that was recorded."""
    found = readable(text)
    told = found if isinstance(found, dict) else {}
    return told.get("type"), told.get("code"), told.get("message")
