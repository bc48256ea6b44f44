"""Calls that applications want after failures: `on_failure` of a bus and of its handlers. Best effort."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from inspect import isawaitable, iscoroutinefunction

from busload.commands.command import CommandStatus
from busload.commands.execution import FAILED, TROUBLESHOOTING, Leased, Transition
from busload.commands.headers import joined_headers
from busload.commands.payload import readable
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
            if transition.outcome not in STATUSES:
                continue
            leased = transition.leased
            handler = self._handlers.find(leased.lease.domain, leased.command_type)
            own = handler.on_failure if handler is not None else None
            functions = [*([own] if own is not None else []), *self._functions]
            if functions and not leased.command_type.startswith("busload."):
                call = asyncio.create_task(_call_all(functions, transition), name="busload-on-failure")
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


async def _call_all(functions: Sequence[OnFailure], transition: Transition) -> None:
    failure = failure_of(transition)
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
    lease, details = leased.lease, readable(transition.details)
    told = details if isinstance(details, dict) else {}
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
        told.get("type"),
        told.get("code"),
        told.get("message"),
    )
