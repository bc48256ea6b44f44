"""What a person does to a command in troubleshooting: retry, complete, cancel."""

from __future__ import annotations

from uuid import UUID

from busload.domain.command import CommandStatus
from busload.errors import CommandNotFoundError, InvalidOperationError
from busload.store import report
from busload.store.plan import Plan, execute
from busload.store.statements import statements

SQL = statements("operate")


def retry(domain: str, command_id: UUID, *, operator: str | None) -> Plan[None]:
    moved = yield from execute(SQL.retry, domain=domain, command_id=command_id, operator=operator)
    if not moved:
        yield from _refuse(domain, command_id, "retried")


def complete(domain: str, command_id: UUID, *, result: str | None, operator: str | None) -> Plan[None]:
    moved = yield from execute(SQL.complete, domain=domain, command_id=command_id, result=result, operator=operator)
    if not moved:
        yield from _refuse(domain, command_id, "completed")


def cancel(domain: str, command_id: UUID, *, reason: str, operator: str | None) -> Plan[None]:
    moved = yield from execute(SQL.cancel, domain=domain, command_id=command_id, reason=reason, operator=operator)
    if not moved:
        yield from _refuse(domain, command_id, "canceled")


def _refuse(domain: str, command_id: UUID, action: str) -> Plan[None]:
    """Say why nothing was moved."""
    found = yield from report.command(domain, command_id)
    if found is None:
        raise CommandNotFoundError(domain, command_id)
    if found.status is CommandStatus.IN_TROUBLESHOOTING_QUEUE:
        raise InvalidOperationError(
            f"Command {command_id} belongs to a canceled batch, of which nothing is tried again. Complete or cancel it."
        )
    raise InvalidOperationError(
        f"Command {command_id} is {found.status}; "
        f"only one that is IN_TROUBLESHOOTING_QUEUE can be {action} by an operator."
    )
