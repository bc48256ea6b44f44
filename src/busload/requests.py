"""What a caller asks for, checked and turned into a plan: the one place where input is refused, for both faces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import Any, Generic, TypeVar
from uuid import UUID

from busload import store
from busload.domain.batch import BatchMetadata, BatchStatus
from busload.domain.command import (
    AuditEvent,
    BatchCommand,
    CommandMetadata,
    CommandStatus,
    InputLimits,
    NewCommand,
    SendResult,
    TroubleshootingItem,
    check_all,
    check_name,
    check_number,
    check_text,
    check_uuid,
    refuse,
)
from busload.domain.ids import new_id
from busload.domain.payload import PayloadLimits, PayloadRefused, encode
from busload.errors import DuplicateCommandError, InvalidCommandError, Problem
from busload.store.plan import Plan

T = TypeVar("T")
PAGE = range(2**31)
WIDEST = PayloadLimits(data_bytes=16 * 1024 * 1024, depth=500)
"""For what was checked already and is only wrapped once more."""


@dataclass(frozen=True, slots=True)
class Write(Generic[T]):
    """Something to be written, and the ids to repeat it with if nobody can say whether it was.

    One statement is a transaction by itself; several need one around them.
    """

    plan: Plan[T]
    batch_id: UUID | None = None
    command_ids: Sequence[UUID] = ()
    one_statement: bool = False


class Requests:
    """Checks every call against the limits of this bus."""

    def __init__(self, limits: InputLimits, *, awaits: bool) -> None:
        self._limits, self._payload, self._awaits = limits, limits.payload, awaits

    def send(self, domain: str, command: BatchCommand, batch_id: UUID | None) -> Write[SendResult]:
        [checked] = self._check(domain, [command])
        result = SendResult(checked.command_id, created=True)
        if batch_id is None:
            plan: Plan[SendResult] = _then(store.send.send(domain, checked), result)
            return Write(plan, command_ids=[checked.command_id], one_statement=True)
        refuse(check_uuid(batch_id, "batch_id"))
        plan = _then(store.send.send_many(domain, [checked], batch_id), result)
        return Write(plan, batch_id, [checked.command_id], one_statement=True)

    def send_many(
        self, domain: str, commands: Iterable[BatchCommand], batch_id: UUID | None = None
    ) -> Write[list[SendResult]]:
        checked = self._check(domain, commands)
        if batch_id is not None:
            refuse(check_uuid(batch_id, "batch_id"))
        results = [SendResult(command.command_id, created=True) for command in checked]
        plan = _then(store.send.send_many(domain, checked, batch_id), results)
        return _bulk(plan, batch_id, checked)

    def create_batch(
        self,
        domain: str,
        commands: Iterable[BatchCommand],
        *,
        batch_id: UUID | None,
        name: str | None,
        custom_data: dict[str, Any] | None,
        on_complete: object,
    ) -> Write[UUID]:
        batch = self._new_batch(domain, batch_id, name, custom_data, on_complete)
        checked = self._check(domain, commands)
        if not checked:
            raise InvalidCommandError(
                [
                    Problem(
                        "EMPTY_BATCH", "/commands", "found no commands, wanted at least one; open_batch may stay empty"
                    )
                ]
            )
        if batch.callback_id is not None and any(command.command_id == batch.callback_id for command in checked):
            raise DuplicateCommandError(domain, [batch.callback_id])
        return _bulk(store.send.create_batch(batch, checked), batch.batch_id, checked)

    def open_batch(
        self,
        domain: str,
        *,
        batch_id: UUID | None,
        name: str | None,
        custom_data: dict[str, Any] | None,
        on_complete: object,
    ) -> Write[UUID]:
        batch = self._new_batch(domain, batch_id, name, custom_data, on_complete)
        return Write(store.send.open_batch(batch), batch.batch_id, one_statement=True)

    def seal(self, domain: str, batch_id: UUID) -> Write[bool]:
        refuse(self._name(domain) + check_uuid(batch_id, "batch_id"))
        return Write(store.send.seal(domain, batch_id), batch_id)

    def check(self, domain: str, command: BatchCommand) -> NewCommand:
        """Refuse a bad command now rather than with its checkpoint."""
        [checked] = self._check(domain, [command])
        return checked

    def checkpoint(self, domain: str, commands: Sequence[NewCommand], batch_id: UUID) -> Write[None]:
        return _bulk(store.send.send_many(domain, commands, batch_id), batch_id, commands)

    def cancel_batch(self, domain: str, batch_id: UUID, *, reason: str, operator: str | None) -> Write[int]:
        self._check_operation(domain, batch_id, "batch_id", operator, reason)
        return Write(store.cancel.cancel_batch(domain, batch_id, reason=reason, operator=operator), batch_id)

    def retry(self, domain: str, command_id: UUID, *, operator: str | None) -> Write[None]:
        self._check_operation(domain, command_id, "command_id", operator)
        return Write(store.operate.retry(domain, command_id, operator=operator), command_ids=[command_id])

    def complete(self, domain: str, command_id: UUID, *, result: Any, operator: str | None) -> Write[None]:
        self._check_operation(domain, command_id, "command_id", operator)
        text = None if result is None else self._encode(result, "/result")
        plan = store.operate.complete(domain, command_id, result=text, operator=operator)
        return Write(plan, command_ids=[command_id])

    def cancel(self, domain: str, command_id: UUID, *, reason: str, operator: str | None) -> Write[None]:
        self._check_operation(domain, command_id, "command_id", operator, reason)
        plan = store.operate.cancel(domain, command_id, reason=reason, operator=operator)
        return Write(plan, command_ids=[command_id])

    def get_batch(self, domain: str, batch_id: UUID) -> Plan[BatchMetadata | None]:
        refuse(self._name(domain) + check_uuid(batch_id, "batch_id"))
        return store.report.batch(domain, batch_id)

    def list_batches(
        self, domain: str, *, status: str | None, limit: int, offset: int, after: UUID | None
    ) -> Plan[list[BatchMetadata]]:
        refuse(self._name(domain) + _page(limit, offset, after))
        return store.report.batches(
            domain, status=_status(BatchStatus, status), limit=limit, offset=offset, after=after
        )

    def list_batch_commands(
        self, domain: str, batch_id: UUID, *, status: str | None, limit: int, offset: int, after: UUID | None
    ) -> Plan[list[CommandMetadata]]:
        refuse(self._name(domain) + check_uuid(batch_id, "batch_id") + _page(limit, offset, after))
        return store.report.batch_commands(
            domain, batch_id, status=_status(CommandStatus, status), limit=limit, offset=offset, after=after
        )

    def get_command(self, domain: str, command_id: UUID) -> Plan[CommandMetadata | None]:
        refuse(self._name(domain) + check_uuid(command_id, "command_id"))
        return store.report.command(domain, command_id)

    def get_audit_trail(self, domain: str, command_id: UUID) -> Plan[list[AuditEvent]]:
        refuse(self._name(domain) + check_uuid(command_id, "command_id"))
        return store.report.audit_trail(domain, command_id)

    def get_batch_audit_trail(self, domain: str, batch_id: UUID) -> Plan[list[AuditEvent]]:
        refuse(self._name(domain) + check_uuid(batch_id, "batch_id"))
        return store.report.batch_audit_trail(domain, batch_id)

    def troubleshooting(
        self, domain: str, *, command_type: str | None, limit: int, offset: int
    ) -> Plan[list[TroubleshootingItem]]:
        problems = self._name(domain) + _page(limit, offset, None)
        if command_type is not None:
            problems += check_name(command_type, "command_type", self._limits)
        refuse(problems)
        return store.report.troubleshooting(domain, command_type=command_type, limit=limit, offset=offset)

    def _check(self, domain: str, commands: Iterable[BatchCommand]) -> list[NewCommand]:
        return check_all(domain, commands, self._limits)

    def _name(self, domain: str) -> list[Problem]:
        return check_name(domain, "domain", self._limits)

    def _encode(self, value: Any, path: str, limits: PayloadLimits | None = None) -> str:
        try:
            return encode(value, limits or self._payload, path=path)
        except PayloadRefused as refused:
            raise InvalidCommandError([refused.problem]) from None

    def _new_batch(
        self,
        domain: str,
        batch_id: UUID | None,
        name: str | None,
        custom_data: object,
        on_complete: object,
    ) -> store.send.NewBatch:
        problems = self._name(domain)
        if batch_id is not None:
            problems += check_uuid(batch_id, "batch_id")
        if name is not None:
            problems += check_text(name, "name", self._limits.name_bytes)
        if custom_data is not None and not isinstance(custom_data, dict):
            problems.append(Problem("INVALID_OPTION", "/custom_data", "wanted a dict"))
        if on_complete is not None and not isinstance(on_complete, BatchCommand):
            problems += self._check_function(on_complete)
        refuse(problems)
        callback, callback_id = None, None
        if isinstance(on_complete, BatchCommand):
            callback, callback_id = self._callback(domain, on_complete)
        text = None if custom_data is None else self._encode(custom_data, "/custom_data")
        return store.send.NewBatch(batch_id or new_id(), domain, name, text, callback, callback_id)

    def _check_function(self, on_complete: object) -> list[Problem]:
        if not callable(on_complete):
            return [Problem("INVALID_OPTION", "/on_complete", "wanted a function or a BatchCommand")]
        if iscoroutinefunction(on_complete) and not self._awaits:
            message = "found an async function, which nobody awaits here; pass a plain one, or use CommandBus"
            return [Problem("INVALID_OPTION", "/on_complete", message)]
        return []

    def _callback(self, domain: str, command: BatchCommand) -> tuple[str, UUID | None]:
        """The command to send on completion, as the batch row keeps it, and its id if the caller chose it.

        The batch itself is added to its data then.
        """
        data = {} if command.data is None else command.data
        if not isinstance(data, dict) or "batch" in data:
            message = 'wanted a dict without the key "batch", which will hold the completed batch'
            raise InvalidCommandError([Problem("INVALID_OPTION", "/on_complete/data", message)])
        if command.run_at is not None:
            message = "a callback is sent when its batch completes and cannot have a time of its own"
            raise InvalidCommandError([Problem("INVALID_OPTION", "/on_complete/run_at", message)])
        [checked] = self._check(domain, [command])
        text = self._encode(
            {
                "command_id": str(checked.command_id),
                "command_type": checked.command_type,
                "data": data,
                "correlation_id": str(checked.correlation_id) if checked.correlation_id else None,
                "reply_to": checked.reply_to,
                "task_key": checked.task_key,
                "priority": checked.priority,
                "max_attempts": checked.max_attempts,
            },
            "/on_complete",
            WIDEST,
        )
        return text, command.command_id

    def _check_operation(self, domain: str, id: UUID, path: str, operator: str | None, *reason: str) -> None:
        problems = self._name(domain) + check_uuid(id, path)
        if operator is not None:
            problems += check_text(operator, "operator", self._limits.name_bytes)
        for text in reason:
            problems += check_text(text, "reason", 4096)
        refuse(problems)


def _bulk(plan: Plan[T], batch_id: UUID | None, commands: Sequence[NewCommand]) -> Write[T]:
    ids = [command.command_id for command in commands]
    return Write(plan, batch_id, ids, one_statement=store.send.in_one_statement(commands))


def _then(plan: Plan[Any], result: T) -> Plan[T]:
    yield from plan
    return result


def _page(limit: int, offset: int, after: UUID | None) -> list[Problem]:
    problems = check_number(limit, "limit", PAGE) + check_number(offset, "offset", PAGE)
    return problems + check_uuid(after, "after") if after is not None else problems


Status = TypeVar("Status", BatchStatus, CommandStatus)


def _status(kind: type[Status], status: str | None) -> Status | None:
    if status is None:
        return None
    try:
        return kind(status)
    except ValueError:
        message = f"found {status!r:.80}, wanted one of {', '.join(kind)}"
        raise InvalidCommandError([Problem("INVALID_OPTION", "/status", message)]) from None
