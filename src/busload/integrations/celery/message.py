"""What a call of Celery that sends a task says, and what of that a command cannot be."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from celery import signals
from celery.app.task import extract_exec_options
from kombu import serialization
from kombu.common import Broadcast
from kombu.exceptions import EncodeError

from busload.commands.command import BatchCommand
from busload.commands.ids import new_id
from busload.commands.payload import PayloadRefusedError
from busload.errors import InvalidCommandError, InvalidOperationError, Problem, kind_of
from busload.imports.celery import JSON, command_of_task

POSITIONS = (
    *("countdown", "eta", "task_id", "producer", "connection", "router", "result_cls", "expires", "publisher"),
    *("link", "link_error", "add_to_parent", "group_id", "group_index", "retries", "chord", "reply_to", "time_limit"),
    *("soft_time_limit", "root_id", "parent_id", "route_name", "shadow", "chain", "task_type"),
)
"""What `send_task` may be given by its place, after the arguments of the task."""

CANVAS = {
    "link": "link",
    "link_error": "link_error",
    "chain": "a chain",
    "chord": "a chord",
    "group_id": "a group, chord or chunks",
    "replaced_task_nesting": "self.replace()",
    "stamped_headers": "stamps",
}
"""What ties a task to others: the name of the option, and how people call it."""

OVER_ITEMS = {"celery.map": "map", "celery.starmap": "starmap or chunks"}
"""Tasks of Celery that call another task for each of their items, and how people call them."""

SENT = frozenset(
    {"conn", "countdown", "eta", "expires", "headers", "ignore_result", "parent_id", "priority", "queue", "root_id"}
    | {"route_name", "router", "serializer", "shadow", "soft_time_limit", "task_id", "task_type", "time_limit"}
    | {"exchange", "exchange_type", "routing_key"}
)
"""Options that say something about the command."""

OF_THE_BROKER = frozenset(
    {"add_to_parent", "argsrepr", "compression", "confirm_timeout", "connection", "declare", "delivery_mode"}
    | {"event_dispatcher", "expiration", "group_index", "immediate", "kwargsrepr", "mandatory", "origin", "producer"}
    | {"publisher", "reply_to", "result_cls", "retries", "retry", "retry_policy", "timeout"}
)
"""Options about the way to the broker, which a command does not take."""


@dataclass(slots=True)
class Call:
    """A call of `app.send_task`; options without a value are left out."""

    name: str
    args: Any
    kwargs: Any
    options: dict[str, Any]
    queue: Any = None
    task_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.task_id = str(self.options.get("task_id") or new_id())

    def route(self, app: Any, task: Any) -> str:
        """Find the queue as Celery does, by the options, the task and `task_routes`; returns its name."""
        if task is not None and self.options.get("task_type") is None:  # else they are among the options already
            own = {name: value for name, value in extract_exec_options(task).items() if value is not None}
            self.options = own | self.options
        router = self.options.get("router") or app.amqp.router
        where = self.options.get("route_name") or self.name
        routed = router.route(dict(self.options), where, self.args, self.kwargs, task)
        self.options, self.queue = routed, routed["queue"]
        return str(self.queue if isinstance(self.queue, str) else self.queue.name)

    def priority(self, app: Any) -> int:
        """Celery's number."""
        found, parent = self.options.get("priority"), app.current_worker_task
        if found is None and parent and app.conf.task_inherit_parent_priority:
            found = (parent.request.delivery_info or {}).get("priority")
        return int(found or 0)

    @property
    def delay(self) -> float | None:
        countdown = self.options.get("countdown")
        return max(0.0, float(countdown)) if countdown else None


@dataclass(slots=True)
class Message:
    """A message as Celery would publish it: receivers of its signals may have changed the headers."""

    name: str
    headers: dict[str, Any]
    body: tuple[Any, Any, Any]

    def command(self, priority: int) -> BatchCommand:
        """Its arguments are in the JSON that Celery writes: a datetime or a UUID is an object that names its type."""
        try:
            args, kwargs = plain(self.body[:2])
            return command_of_task(self.headers, args, kwargs, priority=priority)
        except EncodeError as error:
            what = f"the arguments of the task {self.name!r} are not JSON: {error}. Pass ids, numbers, texts or dates"
            raise InvalidCommandError([Problem("UNSERIALISABLE", "/data", what)]) from error
        except PayloadRefusedError as refused:
            raise InvalidCommandError([refused.problem]) from refused


def read_call(name: str, args: Any, kwargs: Any, more: Sequence[Any], options: Mapping[str, Any]) -> Call:
    given = dict(zip(POSITIONS, more, strict=False)) | dict(options)
    if len(more) > len(POSITIONS):
        raise TypeError(
            f"send_task() takes {', '.join(POSITIONS)} after the arguments of the task; name other options."
        )
    return Call(name, args or (), kwargs or {}, {name: value for name, value in given.items() if value is not None})


def plain(value: Any) -> Any:
    """A value as the JSON serializer of Celery writes it."""
    return json.loads(serialization.dumps(value, serializer="json")[2])


def unplain(value: Any) -> Any:
    """What the JSON serializer of Celery reads from a value that `plain` has made."""
    return serialization.loads(json.dumps(value), JSON, "utf-8", accept={JSON})


def task_within(call: Call) -> str | None:
    """The name of the task that a `map`, a `starmap` or a chunk calls for each of its items; None of another task."""
    task = call.kwargs.get("task") if call.name in OVER_ITEMS and isinstance(call.kwargs, Mapping) else None
    return task.get("task") if isinstance(task, Mapping) else None


def unsupported(name: str, what: str) -> InvalidOperationError:
    return InvalidOperationError(
        f"The task {name!r} is sent with {what}, which the bridge does not support. Use batches with on_complete or "
        "jobs, or let this task stay with Celery's broker: leave it out of `tasks` of the bridge."
    )


def refuse_unsupported(call: Call, task: Any) -> None:
    """Refuse what would be lost if the task were sent as a command."""
    options, name = call.options, call.name
    if found := [told for option, told in CANVAS.items() if options.get(option)]:
        raise unsupported(name, " and ".join(found))
    serializer = options.get("serializer", "json")
    if serializer != "json":
        raise InvalidOperationError(
            f"The task {name!r} is sent with the serializer {serializer!r}; commands hold JSON alone. Set "
            'task_serializer="json" and pass ids in the place of objects, or let this task stay with Celery\'s broker.'
        )
    exchange = options.get("exchange")
    by_key = options.get("routing_key") and getattr(getattr(call.queue, "exchange", None), "type", None) != "direct"
    if exchange or by_key or isinstance(call.queue, Broadcast):
        raise InvalidOperationError(
            f"The task {name!r} is sent to an exchange, which may have any number of queues; a command goes to one "
            "domain. Name its queue, or let this task stay with Celery's broker."
        )
    for limit in ("time_limit", "soft_time_limit"):
        seconds, of_task = options.get(limit), getattr(task, limit, None)
        if seconds is not None and seconds != of_task:
            raise InvalidOperationError(
                f"The task {name!r} is sent with {limit}={seconds!r}, and its handler has {of_task!r}: the bridge "
                f"takes the limits of the task alone. Write @app.task({limit}={seconds!r}), or leave out {limit}."
            )
    if unknown := sorted(options.keys() - SENT - OF_THE_BROKER - CANVAS.keys()):
        raise TypeError(
            f"The task {name!r} is sent with the option {unknown[0]!r}, which the bridge does not know. It knows "
            f"{', '.join(sorted(SENT))}; and it leaves out {', '.join(sorted(OF_THE_BROKER))}."
        )


@contextmanager
def publishing(app: Any, call: Call) -> Iterator[Message]:
    """The message that the call makes, between the two signals that Celery sends around publishing it."""
    options, parent = call.options, app.current_worker_task
    root_id, parent_id = options.get("root_id"), options.get("parent_id")
    if parent:
        root_id, parent_id = root_id or parent.request.root_id or parent.request.id, parent_id or parent.request.id
    made = app.amqp.as_task_v2(
        call.task_id,
        call.name,
        call.args,
        call.kwargs,
        eta=options.get("eta"),
        expires=options.get("expires"),
        root_id=root_id,
        parent_id=parent_id,
        shadow=options.get("shadow"),
        ignore_result=options.get("ignore_result"),
    )
    headers, own = made.headers, options.get("headers") or {}
    if not isinstance(own, Mapping):
        raise InvalidOperationError(f"headers of the task {call.name!r} must be a dict, found {kind_of(own)}.")
    headers.update(own)
    queue = call.queue if isinstance(call.queue, str) else call.queue.name
    about = {"sender": call.name, "body": made.body, "exchange": "", "routing_key": queue, "headers": headers}
    signals.before_task_publish.send(**about, properties=made.properties, declare=[], retry_policy={})
    yield Message(call.name, headers, made.body)
    signals.after_task_publish.send(**about)
