"""Which sends of a Celery application become commands, and which of its tasks are handlers."""

from __future__ import annotations

import fnmatch
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from celery import Celery, signals
from kombu.common import Broadcast

from busload.bus import CommandBus
from busload.commands.checks import FLAG, Kind, given, require, wrong_name
from busload.errors import InvalidOperationError, kind_of
from busload.imports.take_over import command_id_of
from busload.integrations import AnySyncConnection
from busload.integrations.celery.message import (
    OVER_ITEMS,
    Call,
    publishing,
    read_call,
    refuse_unsupported,
    task_within,
    unsupported,
)
from busload.integrations.celery.result import CommandResult, CommandRows
from busload.integrations.celery.running import TaskRunner, asks_for_retry, options_of
from busload.integrations.celery.starting_django import without_starting_django_again
from busload.settings import InputLimits
from busload.sync.bus import SyncCommandBus

log = logging.getLogger("busload")

OF_CELERY = "celery."
"""Tasks that come with Celery begin so. They are about its result backend and its canvas, and stay with it."""


class CeleryBridge:
    """Sends the tasks of a Celery application through a bus, from the moment at which it is made.

    A task becomes a command: its queue is the domain, its name the command type, and its data has `args` and `kwargs`.
    `tasks` (names, patterns such as "shop.*", or tasks) and `queues` say which; all others stay with Celery's broker.
    Without them, every task goes through the bus. `domains` names the domain of a queue, if it is not that of its name.

    `conn` is called for each send, and returns the connection or session whose transaction the command joins, or None.
    `zero_is_urgent` says whether 0 is the most urgent of Celery's priorities; by default it is, if the broker is Redis.
    """

    def __init__(
        self,
        app: Any,
        bus: SyncCommandBus,
        *,
        tasks: Iterable[Any] | None = None,
        queues: Iterable[str] | None = None,
        domains: Mapping[str, str] | None = None,
        conn: Callable[[], AnySyncConnection | None] | None = None,
        zero_is_urgent: bool | None = None,
    ) -> None:
        if not isinstance(app, Celery):
            raise ValueError(f"A CeleryBridge needs the Celery application, found {kind_of(app)}.")
        given_bus: object = bus
        if not isinstance(given_bus, SyncCommandBus):
            raise ValueError(
                f"A CeleryBridge needs a SyncCommandBus, found {kind_of(given_bus)}: `delay` does not await. Make one "
                "with the same arguments; for processes that fork, a SelfOpeningBus."
            )
        if isinstance(vars(app).get("send_task"), _Send):
            raise InvalidOperationError(
                f"The Celery application {app.main!r} has a bridge already. Make one for all its tasks and queues."
            )
        require(Kind("a function that returns a connection or None", callable), **given(conn=conn))
        require(FLAG, **given(zero_is_urgent=zero_is_urgent))
        self.app, self.bus = app, bus
        self._tasks = None if tasks is None else [_name(one) for one in _listed(tasks, "tasks")]
        self._queues = None if queues is None else [str(one) for one in _listed(queues, "queues")]
        self._domains, self._conn, self._sends = dict(domains or {}), conn, True
        self._zero_is_urgent = _is_redis(app) if zero_is_urgent is None else zero_is_urgent
        self._send_by_celery = app.send_task
        app.send_task = _Send(self._send_task)

    def remove(self) -> None:
        """Let Celery's broker have all sends again. Workers run what was sent until now, if they have `register`."""
        self._sends = False

    def register(self, bus: CommandBus | SyncCommandBus | None = None) -> None:
        """Make every task that fits `tasks` a handler of the bus, or of another `bus`, whose workers run them then.

        The modules that the application names (`include`, `imports`, `autodiscover_tasks`) are imported before. A task
        may be sent to any queue: so it is a handler in the domain of each of `queues`, or else of each queue that the
        application knows. In Django, call it at the end of the module that BUSLOAD["BUS"] names.
        """
        with without_starting_django_again(self.app):
            self.app.loader.import_default_modules()
        self.app.set_default()  # for the threads of a worker, which have no current application
        self.app.finalize()
        tasks = {name: task for name, task in sorted(self.app.tasks.items()) if self._takes(name)}
        if not tasks:
            fitting = "" if self._tasks is None else f" that fits tasks={self._tasks!r:.200}"
            raise InvalidOperationError(
                f"The Celery application {self.app.main!r} has no task{fitting}. Import the modules of its tasks "
                "before register(), or name them in `include` of the application."
            )
        for pattern in self._tasks or ():
            if not fnmatch.filter(tasks, pattern):
                log.warning("The Celery application %s has no task that fits %r", self.app.main, pattern)
        on = self.bus if bus is None else bus
        for domain, queue in self._queue_by_domain(tasks).items():
            for name, task in tasks.items():
                runner = TaskRunner(self.app, task, queue, zero_is_urgent=self._zero_is_urgent)
                on.handler(domain, name, **options_of(task))(runner.handle)
        on.on_startup(_worker_started)
        on.on_shutdown(_worker_stopped)

    def result(self, task_id: str, *, queue: str | None = None) -> Any:
        """The result of a task that was sent before, such as by another process, as `app.AsyncResult` gives it.

        Without `queue`, the command is looked up in the domain of each known queue. If none has it, the result is that
        of Celery's own backend.
        """
        if queue is not None:
            return self._result(task_id, self._domain(queue))
        command_id = command_id_of("celery", task_id)
        named = dict.fromkeys(self._domains.get(one, one) for one in self._known_queues(self.app.tasks))
        for domain in named:  # Celery keeps any name that a call has used: what is no domain has no commands
            if not wrong_name(domain, "domain", InputLimits()) and self.bus.get_command(domain, command_id) is not None:
                return self._result(task_id, domain)
        return self.app.AsyncResult(task_id)

    def _send_task(self, name: str, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        """In the place of `app.send_task`, which every call of Celery that sends a task ends in."""
        call = read_call(name, args, kwargs, more, options)
        if call.options.get("retries"):  # a retry stays where its task runs: here, or in a worker of Celery
            recorded = asks_for_retry(call)
            return self._send_by_celery(name, args, kwargs, *more, **options) if recorded is None else recorded
        within = task_within(call)
        if within is not None and self._sends and self._takes(within) and self._has(call.route(self.app, None)):
            raise unsupported(within, OVER_ITEMS[name])
        if not self._sends or not self._takes(name):
            return self._leave_to_celery(call, args, kwargs, more, options)
        task = call.options.get("task_type") or self.app.tasks.get(name)
        queue = call.route(self.app, task)
        if not self._has(queue):
            return self._leave_to_celery(call, args, kwargs, more, options)
        if task is None and (self._tasks is None or name not in self._tasks):
            raise InvalidOperationError(
                f"The task {name!r} is not registered with the Celery application {self.app.main!r}, so nobody knows "
                "whether a worker of busload has it. Import its module; or name it in `tasks` of the bridge, if it is "
                "run by another program."
            )
        refuse_unsupported(call, task)
        return self._send(call, self._domain(queue))

    def _send(self, call: Call, domain: str) -> CommandResult:
        ours = call.options.get("conn")
        conn = self._conn() if ours is None and self._conn is not None else ours
        with publishing(self.app, call) as message:
            priority = -call.priority(self.app) if self._zero_is_urgent else call.priority(self.app)
            command = message.command(priority)
            self.bus.send(
                domain,
                command.command_type,
                command.data,
                conn=conn,
                command_id=command.command_id,
                priority=command.priority,
                run_at=command.run_at,
                delay=call.delay,
                expires_at=command.expires_at,
                correlation_id=command.correlation_id,
                headers=command.headers,
            )
        result = self._result(call.task_id, domain)
        result.ignored = bool(message.headers["ignore_result"])
        return result

    def _leave_to_celery(
        self, call: Call, args: Any, kwargs: Any, more: Sequence[Any], options: Mapping[str, Any]
    ) -> Any:
        if call.options.get("conn") is not None:
            raise InvalidOperationError(
                f"The task {call.name!r} goes to Celery's broker, which cannot join the transaction of conn. Leave out "
                "conn, or let the bridge take this task and its queue."
            )
        return self._send_by_celery(call.name, args, kwargs, *more, **options)

    def _result(self, task_id: str, domain: str) -> CommandResult:
        return CommandResult(task_id, backend=CommandRows(self.bus, domain), app=self.app)

    def _has(self, queue: str) -> bool:
        return self._queues is None or queue in self._queues

    def _takes(self, name: str) -> bool:
        if name.startswith(OF_CELERY):
            return False
        return self._tasks is None or any(fnmatch.fnmatchcase(name, pattern) for pattern in self._tasks)

    def _queue_by_domain(self, tasks: Mapping[str, Any]) -> dict[str, str]:
        """The domains of all queues that are known here; queues that share a domain have the name of the first one."""
        return {self._domain(queue): queue for queue in reversed(self._known_queues(tasks))}

    def _known_queues(self, tasks: Mapping[str, Any]) -> list[str]:
        if self._queues is not None:
            return self._queues
        declared = [name for name, queue in self.app.amqp.queues.items() if not isinstance(queue, Broadcast)]
        routed = [read_call(name, None, None, (), {}).route(self.app, task) for name, task in tasks.items()]
        return [*declared, *self._domains, *routed]

    def _domain(self, queue: str) -> str:
        domain = self._domains.get(queue, queue)
        if problems := wrong_name(domain, "domain", InputLimits()):
            raise InvalidOperationError(
                f"The queue {queue!r} cannot be a domain as it is: {problems[0].message}. Name one for it: "
                f"CeleryBridge(..., domains={{{queue!r}: ...}})."
            )
        return domain


class _Send:
    """Marks an application whose sends go through a bridge."""

    def __init__(self, send: Callable[..., Any]) -> None:
        self._send = send

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._send(*args, **options)


def _listed(found: Any, name: str) -> list[Any]:
    if isinstance(found, str) or not isinstance(found, Iterable):
        raise ValueError(f"{name} must be a list, found {found!r:.80}. For one, write {name}=[...].")
    return list(found)


def _name(task: Any) -> str:
    name = task if isinstance(task, str) else getattr(task, "name", None)
    if not isinstance(name, str) or not name:
        raise ValueError(f"tasks must hold names, patterns or tasks of Celery, found {task!r:.80}.")
    return name


def _is_redis(app: Any) -> bool:
    """Whether a lower number is more urgent for the broker, as it is for Redis alone."""
    url = app.conf.broker_write_url or app.conf.broker_url
    first = url if isinstance(url, str) else next(iter(url or ()), "")
    return str(first).startswith(("redis", "sentinel"))


def _worker_started() -> None:
    signals.worker_process_init.send(sender=None)


def _worker_stopped() -> None:
    signals.worker_process_shutdown.send(sender=None, pid=os.getpid(), exitcode=0)
