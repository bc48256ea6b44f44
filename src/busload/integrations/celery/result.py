"""The result of a task that was sent as a command, where Celery gives an `AsyncResult`."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NoReturn

from celery import states
from celery.exceptions import TaskRevokedError
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import AsyncResult

from busload.commands.command import CommandMetadata, CommandStatus
from busload.errors import CommandFailedError, InvalidOperationError
from busload.imports.take_over import command_id_of
from busload.integrations.celery.message import unplain
from busload.sync.bus import SyncCommandBus

STATES = {
    CommandStatus.IN_PROGRESS: states.STARTED,
    CommandStatus.COMPLETED: states.SUCCESS,
    CommandStatus.FAILED: states.FAILURE,
    CommandStatus.IN_TROUBLESHOOTING_QUEUE: states.FAILURE,
    CommandStatus.CANCELED: states.REVOKED,
}
"""Where a command is, in the words of Celery. All others wait: PENDING, or RETRY if they have failed before."""


class CommandResult(AsyncResult):
    """An `AsyncResult` that reads the command: `get`, `state`, `ready()`, `result` and so on are those of Celery.

    If the task has failed, `get` raises a `CommandFailedError`: class and message of the task's error are texts in it.
    """

    def revoke(
        self,
        connection: Any = None,
        terminate: bool = False,
        signal: Any = None,
        wait: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Cancel the command. If the task runs, it runs to its end; and if it has ended, nothing happens."""
        if terminate:
            raise InvalidOperationError(
                "A task of busload runs in a thread, which cannot be terminated. Call revoke() without terminate: a "
                "task that waits ends at once, and one that runs is not tried again."
            )
        self.backend.cancel(self.id)

    def then(self, callback: Any, on_error: Any = None, weak: bool = False) -> NoReturn:
        raise InvalidOperationError("Nobody calls back when a command has ended: call get(), or look at ready().")


class CommandRows:
    """In the place of a result backend of Celery: the commands of one domain."""

    READY_STATES = states.READY_STATES
    supports_native_join = False

    def __init__(self, bus: SyncCommandBus, domain: str) -> None:
        self._bus, self._domain = bus, domain

    def get_task_meta(self, task_id: str) -> dict[str, Any]:
        found = self._bus.get_command(self._domain, command_id_of("celery", task_id))
        if found is None:  # its transaction is not committed yet, or it is pruned already
            return {"status": states.PENDING, "result": None, "task_id": task_id}
        data: Any = found.data if isinstance(found.data, dict) else {}
        status = STATES.get(found.status) or (states.RETRY if found.last_error_type else states.PENDING)
        return {
            "status": status,
            "result": _result(found, status),
            "traceback": found.last_traceback,
            "date_done": found.finished_at,
            "task_id": task_id,
            "name": found.command_type,
            "args": data.get("args"),
            "kwargs": data.get("kwargs"),
            "worker": found.worker,
            "retries": max(0, found.attempts - 1),
            "queue": found.domain,
            "children": None,
        }

    def wait_for_pending(
        self, result: AsyncResult, timeout: float | None = None, propagate: bool = True, callback: Any = None, **_: Any
    ) -> Any:
        if result.ready():  # which also sees what the caller's transaction has sent and a test has run in it
            return result.maybe_throw(propagate=propagate, callback=callback)
        try:
            self._bus.wait_command(self._domain, command_id_of("celery", result.id), timeout, wait_for_operator=False)
        except TimeoutError as error:
            raise CeleryTimeoutError(str(error)) from None
        except CommandFailedError:
            pass  # the command says what it was
        return result.maybe_throw(propagate=propagate, callback=callback)

    def cancel(self, task_id: str) -> None:
        with suppress(InvalidOperationError):  # it has ended
            self._bus.cancel_command(self._domain, command_id_of("celery", task_id), reason="The task was revoked.")

    def task_result_exists(self, task_id: str) -> bool:
        return self._bus.get_command(self._domain, command_id_of("celery", task_id)) is not None

    def meta_from_decoded(self, meta: dict[str, Any]) -> dict[str, Any]:
        return meta

    def forget(self, task_id: str) -> None:
        """The command stays until it is pruned, like every command."""

    def add_pending_result(self, result: AsyncResult, weak: bool = False) -> None:
        """Nobody waits for it but who calls `get`."""

    def remove_pending_result(self, result: AsyncResult) -> None:
        """As above."""


def _result(found: CommandMetadata, status: str) -> Any:
    if status == states.SUCCESS:
        return unplain(found.result)
    if status == states.REVOKED:
        return TaskRevokedError(found.last_error_message or "The command was canceled.")
    if status in (states.FAILURE, states.RETRY):
        return CommandFailedError(
            found.domain,
            found.command_id,
            found.status,
            error_type=found.last_error_type,
            code=found.last_error_code,
            error_message=found.last_error_message,
        )
    return None
