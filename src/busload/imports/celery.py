"""Tasks of Celery as commands, and those that wait in the lists of a Redis broker."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from busload.commands.command import BatchCommand
from busload.commands.payload import PayloadRefusedError, encode
from busload.errors import InvalidOperationError
from busload.imports.take_over import WaitingTask, command_id_of
from busload.postgres.connection import Connection

PRIORITY_STEPS = ("", "\x06\x163", "\x06\x166", "\x06\x169")
"""Celery keeps a list for each step of priority; on Redis, 0 is the highest."""

JSON = "application/json"

REST = "celery"
"""The header of a command that has, as JSON text, what else there is to know of its task, if there is anything."""

PROTOCOL = frozenset(
    {"argsrepr", "compression", "eta", "expires", "group", "group_index", "id", "ignore_result", "kwargsrepr", "lang"}
    | {"meth", "origin", "parent_id", "replaced_task_nesting", "retries", "root_id", "shadow", "stamped_headers"}
    | {"stamps", "task", "timelimit", "utc"}
)
"""Headers of a message that Celery makes. All others are of the sender."""


UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading a message raises that Celery has not written, or that came to harm. It stays; others are imported."""


def command_of_task(headers: Mapping[str, Any], args: Any, kwargs: Any, *, priority: int = 0) -> BatchCommand:
    """The command that a task becomes, by the headers of its message. `args` and `kwargs` are JSON.

    It has the id of the task, or one that is made from it, and the id of the task's root as its correlation id. Headers
    of the sender that are texts become headers of the command. All else is kept in one header, for who runs the task.
    """
    task_id, root_id = str(headers["id"]), headers.get("root_id")
    command_id = command_id_of("celery", task_id)
    own = {name: value for name, value in headers.items() if name not in PROTOCOL}
    texts = {name: value for name, value in own.items() if isinstance(value, str) and name != REST}
    rest = {
        "id": task_id if task_id != str(command_id) else None,
        "headers": {name: value for name, value in own.items() if name not in texts},
        **{name: headers.get(name) for name in ("parent_id", "retries", "shadow", "ignore_result")},
    }
    if rest := {name: value for name, value in rest.items() if value}:
        texts[REST] = encode(rest, path="/headers")
    return BatchCommand(
        str(headers["task"]),
        command_id,
        {"args": args, "kwargs": kwargs},
        priority=priority,
        run_at=time_of(headers.get("eta")),
        expires_at=time_of(headers.get("expires")),
        correlation_id=command_id_of("celery", root_id) if root_id and root_id != task_id else None,
        headers=texts or None,
    )


class Celery:
    """The queues of Celery at a Redis. A task becomes a command of the same id, with `args` and `kwargs` as its data.

    Stop the workers of Celery before: a message cannot be locked. What they hold already, also tasks with an `eta` that
    they have fetched, is not in the lists: it comes back there when they have stopped.
    """

    name = "celery"

    def __init__(self, url: str, queues: Sequence[str] = ("celery",), *, with_links: bool = False) -> None:
        try:
            import redis
        except ModuleNotFoundError as error:
            raise InvalidOperationError("To read from Redis, run `pip install 'busload[redis]'`.") from error
        self._redis: Any = redis.Redis.from_url(url)
        self._queues, self._with_links = list(queues), with_links

    def unacknowledged(self) -> int:
        """How many messages workers of Celery hold: these are not imported."""
        return int(self._redis.hlen("unacked"))

    def close(self) -> None:
        self._redis.close()

    def pages(self, size: int, *, locked: bool) -> Iterator[AbstractContextManager[_Page]]:
        for queue in self._queues:
            for step in PRIORITY_STEPS:
                yield from self._pages_of(queue, f"{queue}{step}", size)

    def _pages_of(self, queue: str, key: str, size: int) -> Iterator[AbstractContextManager[_Page]]:
        """A list is read from its end, where the oldest message is. What stays there is passed by."""
        kept = 0
        while messages := self._redis.lrange(key, -(kept + size), -(kept + 1))[::-1]:
            page = _Page([self._task(queue, message) for message in messages], self._redis, key)
            yield nullcontext(page)
            kept += len(messages) - page.removed

    def _task(self, queue: str, message: bytes) -> WaitingTask:
        try:
            envelope = json.loads(message)
            headers, properties = envelope["headers"], envelope["properties"]
            source_id, name = str(headers["id"]), str(headers["task"])
        except UNREADABLE as error:
            return WaitingTask("?", queue, "?", None, f"It is no message of Celery 4 or later: {error!r}.", message)
        try:
            problem, args, kwargs = self._body(envelope, properties, headers)
            if problem is not None:
                return WaitingTask(source_id, queue, name, None, problem, message)
            command = command_of_task(headers, args, kwargs, priority=-int(properties.get("priority") or 0))
        except PayloadRefusedError as refused:
            return WaitingTask(source_id, queue, name, None, f"Its headers cannot be stored: {refused}", message)
        except UNREADABLE as error:
            return WaitingTask(source_id, queue, name, None, f"Its message cannot be read: {error!r}.", message)
        return WaitingTask(source_id, queue, name, command, handle=message)

    def _body(self, envelope: Any, properties: Any, headers: Any) -> tuple[str | None, Any, Any]:
        if envelope.get("content-type") != JSON or headers.get("compression"):
            kind = headers.get("compression") or envelope.get("content-type")
            return f"Its body is {kind}, wanted {JSON}: only JSON is read.", None, None
        body = envelope["body"]
        if properties.get("body_encoding") == "base64":
            body = base64.b64decode(body)
        args, kwargs, embed = json.loads(body)
        links = [name for name in ("callbacks", "errbacks", "chain", "chord") if (embed or {}).get(name)]
        if links and not self._with_links:
            return f"It has {', '.join(links)}, which would be lost. --with-links imports the task alone.", None, None
        return None, args, kwargs


@dataclass(slots=True)
class _Page:
    tasks: Sequence[WaitingTask]
    redis: Any
    key: str
    conn: Connection | None = None
    removed: int = 0

    def remove(self, tasks: Sequence[WaitingTask]) -> int:
        with self.redis.pipeline(transaction=False) as pipeline:
            for task in tasks:
                pipeline.lrem(self.key, -1, task.handle)
            self.removed = sum(pipeline.execute())
        return self.removed


def time_of(found: datetime | str | None) -> datetime | None:
    """An `eta` or `expires` of Celery. Without a zone it is UTC, as for Celery's workers, whatever their time zone."""
    if found is None:
        return None
    found = datetime.fromisoformat(found) if isinstance(found, str) else found
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
