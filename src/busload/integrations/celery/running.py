"""Runs a task of Celery as the handler of a command, as a worker of Celery would run it."""

from __future__ import annotations

import json
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from celery import states
from celery.app import trace
from celery.exceptions import Reject
from celery.utils.nodenames import gethostname
from celery.utils.time import rate
from kombu.exceptions import EncodeError

from busload.commands.command import Command
from busload.commands.retry import RetryPolicy
from busload.errors import InvalidOperationError, PermanentCommandError, TransientCommandError
from busload.imports.celery import REST, time_of
from busload.integrations.celery.message import Call, plain, unplain
from busload.limits.handler_options import HandlerOptions
from busload.limits.rate import RateLimit
from busload.worker import SyncHandlerContext

REQUEUED_AFTER = 1.0
"""Seconds after which a task runs again that has raised `Reject(requeue=True)`."""


class RetryError(TransientCommandError):
    """The task has called `self.retry()`, or one of its `autoretry_for` was raised."""


UNTIL_CELERY_GIVES_UP = RetryPolicy(1, rules={RetryError: RetryPolicy(max_attempts=2**31 - 1, backoff=())})
"""Only a retry is tried again, and the task decides when and how often, by `max_retries`. All else is final."""


def options_of(task: Any) -> HandlerOptions:
    """What the attributes of a task say about its handler. A thread cannot be interrupted, so the limits are one."""
    limit = rate(task.rate_limit)
    return HandlerOptions(
        retry=UNTIL_CELERY_GIVES_UP,
        timeout=task.time_limit or task.soft_time_limit,
        rate_limit=RateLimit(limit, name=task.name) if limit else None,
    )


@dataclass(slots=True)
class Running:
    """A task that runs as a command. `retry_after` is there once it has asked for a retry."""

    task_id: str
    retries: int
    data: Any
    queue: str
    retry_after: float | None = None


running: ContextVar[Running | None] = ContextVar("busload_celery_running", default=None)


def asks_for_retry(call: Call) -> object | None:
    """If the task that runs here sends itself again, by `self.retry`, note when; the command is tried again then.

    None if the call is about another task. An error becomes a `Reject` in `self.retry`.
    """
    run = running.get()
    if run is None or call.task_id != run.task_id or call.options["retries"] != run.retries + 1:
        return None
    if plain([list(call.args), dict(call.kwargs)]) != [run.data["args"], run.data["kwargs"]]:
        raise InvalidOperationError(
            f"The task {call.name!r} retries with other arguments. The data of a command stays the same: call retry() "
            "without args and kwargs, or send a new task and return."
        )
    queue = call.options.get("queue")
    if queue is not None and (name := queue if isinstance(queue, str) else queue.name) != run.queue:
        raise InvalidOperationError(
            f"The task {call.name!r} retries in the queue {name!r}. A command stays in its domain: call retry() "
            "without queue, or send a new task and return."
        )
    eta = time_of(call.options.get("eta"))
    run.retry_after = (call.delay or 0.0) if eta is None else max(0.0, (eta - datetime.now(UTC)).total_seconds())
    return run


class TaskRunner:
    """The handler of one task, for the commands of one queue."""

    def __init__(self, app: Any, task: Any, queue: str, *, zero_is_urgent: bool) -> None:
        self._task, self._queue, self._zero_is_urgent = task, queue, zero_is_urgent
        self._trace = trace.build_tracer(task.name, task, app=app, eager=True)  # so it writes to no result backend

    def handle(self, command: Command, ctx: SyncHandlerContext) -> Any:
        args, kwargs = _arguments(command)
        rest = _rest(command)
        request = self._request(command, rest, ctx.attempt)
        run = Running(request["id"], request["retries"], command.data, self._queue)
        state, value = self._run(run, args, kwargs, request)
        if run.retry_after is not None:
            cause = value if isinstance(value, Exception) else None
            raise RetryError(str(value), code="RETRY", after=run.retry_after) from cause
        match state:
            case states.SUCCESS:
                return None if rest.get("ignore_result") else _kept(value)
            case states.IGNORED:
                return None
            case states.REJECTED if value.requeue:
                ctx.snooze(REQUEUED_AFTER)
            case states.REJECTED:
                raise PermanentCommandError(f"The task was rejected: {value.reason}", code="REJECTED") from value
        raise value

    def _run(self, run: Running, args: Any, kwargs: Any, request: dict[str, Any]) -> tuple[str, Any]:
        """Run the task, and return the state of Celery that it ends in, with what it has returned or raised."""
        token = running.set(run)
        try:
            traced = self._trace(run.task_id, args, kwargs, request)
        except Reject as rejected:  # by a hook of the task
            return states.REJECTED, rejected
        finally:
            running.reset(token)
        return (states.SUCCESS, traced.retval) if traced.info is None else (traced.info.state, traced.info.retval)

    def _request(self, command: Command, rest: dict[str, Any], attempt: int) -> dict[str, Any]:
        """What the task sees as `self.request`."""
        texts = {name: text for name, text in (command.headers or {}).items() if name != REST}
        task_id = rest.get("id") or str(command.command_id)
        priority = -command.priority if self._zero_is_urgent else command.priority
        return {
            **texts,
            **rest.get("headers", {}),
            "id": task_id,
            "task": self._task.name,
            "shadow": rest.get("shadow"),
            "root_id": task_id if command.correlation_id == command.command_id else str(command.correlation_id),
            "parent_id": rest.get("parent_id"),
            "correlation_id": task_id,
            "retries": rest.get("retries", 0) + attempt - 1,
            "timelimit": [self._task.time_limit, self._task.soft_time_limit],
            "ignore_result": rest.get("ignore_result", False),
            "is_eager": False,
            "utc": True,
            "hostname": gethostname(),
            "delivery_info": {"exchange": "", "routing_key": self._queue, "priority": priority, "redelivered": False},
        }


def _arguments(command: Command) -> tuple[Any, Any]:
    data = command.data
    if not isinstance(data, dict) or not isinstance(data.get("args"), list) or not isinstance(data.get("kwargs"), dict):
        raise PermanentCommandError(
            f'The data of a task is {{"args": [...], "kwargs": {{...}}}}, found {data!r:.200}. Mend it and retry.',
            code="INVALID_DATA",
        )
    try:
        args, kwargs = unplain([data["args"], data["kwargs"]])
    except Exception as error:
        raise PermanentCommandError(
            f"The arguments of the task cannot be read by Celery's JSON serializer: {error}", code="INVALID_DATA"
        ) from error
    return args, kwargs


def _rest(command: Command) -> dict[str, Any]:
    text = (command.headers or {}).get(REST)
    try:
        found = {} if text is None else json.loads(text)
    except ValueError:
        found = {}  # a header of somebody else
    return found if isinstance(found, dict) else {}


def _kept(value: Any) -> Any:
    """A result as Celery would store it. What its JSON cannot hold is kept as every handler's result is."""
    try:
        return plain(value)
    except EncodeError:
        return value
