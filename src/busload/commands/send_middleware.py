"""Middleware around sends: functions that see each call that sends commands, and give headers to what it sends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from busload.commands.checks import no_headers
from busload.commands.command import BatchCommand
from busload.commands.data_type import DataTypes
from busload.errors import InvalidCommandError

CallName = Literal[
    "send",
    "send_many",
    "create_batch",
    "open_batch",
    "jobs.create",
    "jobs.create_batch",
    "schedules.trigger",
    "schedule",
    "planner",
]


@dataclass(slots=True)
class SendCall:
    """A call that sends commands, as middleware sees it. What it puts into `headers`, every command of the call gets.

    `headers` begin with those that the call was given. Commands of a list have their own besides, which win.
    """

    call: CallName
    """The method that was called; "schedule" when a due time is fired, and "planner" when a planner has returned."""
    domain: str
    command_type: str | None = None
    """The type of the command, if it is one."""
    headers: dict[str, str] = field(default_factory=dict)
    result: Any = None
    """What the call returns, once it has sent."""


SendMiddleware = Callable[[SendCall], Iterator[None]]
"""A generator function: what it does before its `yield` is done before the call sends, and the rest after it."""


class Sender(Protocol):
    """What every way in asks its bus before it sends: the types of data that handlers want, and the middleware."""

    @property
    def data_types(self) -> DataTypes: ...

    @property
    def around_sends(self) -> Sequence[SendMiddleware]: ...


@contextmanager
def around_send(
    middlewares: Sequence[SendMiddleware],
    call: CallName,
    domain: str,
    headers: object = None,
    command_type: str | None = None,
) -> Iterator[SendCall]:
    """Send within the block. The first middleware is the outermost one."""
    given = {} if headers is None else headers
    sending = SendCall(call, domain, command_type, {**given} if isinstance(given, Mapping) else {})
    with ExitStack() as stack:
        for middleware in middlewares:
            stack.enter_context(contextmanager(middleware)(sending))
        if not isinstance(given, Mapping):  # what middleware has added would take its place, and no check would see it
            raise InvalidCommandError([no_headers(given, "headers")])
        yield sending


def with_headers(commands: Iterable[BatchCommand], headers: Mapping[str, str]) -> list[BatchCommand]:
    """Commands with these headers besides their own, which win."""
    return [
        replace(one, headers={**headers, **(one.headers or {})})
        if isinstance(one, BatchCommand) and isinstance(one.headers, Mapping | None)
        else one
        for one in commands
    ]
