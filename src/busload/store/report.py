"""What people ask: read-only."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from busload.domain.batch import BatchMetadata, BatchStatus
from busload.domain.command import AuditEvent, CommandMetadata, CommandStatus, TroubleshootingItem
from busload.domain.payload import Undecodable, decode
from busload.store.plan import Plan, execute, many, one
from busload.store.statements import statements

SQL = statements("report")


def batch(domain: str, batch_id: UUID) -> Plan[BatchMetadata | None]:
    return one(_batch, SQL.batch, domain=domain, batch_id=batch_id)


def batches(
    domain: str, *, status: BatchStatus | None, limit: int, offset: int, after: UUID | None
) -> Plan[list[BatchMetadata]]:
    return many(
        _batch, SQL.batches, domain=domain, status=status and status.value, limit=limit, offset=offset, after=after
    )


def existing_batches(batch_ids: Sequence[UUID]) -> Plan[list[BatchMetadata]]:
    return many(_batch, SQL.completed_batches, batch_ids=list(batch_ids))


def command(domain: str, command_id: UUID) -> Plan[CommandMetadata | None]:
    return one(_command, SQL.command, domain=domain, command_id=command_id)


def batch_commands(
    domain: str, batch_id: UUID, *, status: CommandStatus | None, limit: int, offset: int, after: UUID | None
) -> Plan[list[CommandMetadata]]:
    return many(
        _command,
        SQL.batch_commands,
        domain=domain,
        batch_id=batch_id,
        status=status and status.value,
        limit=limit,
        offset=offset,
        after=after,
    )


def troubleshooting(
    domain: str, *, command_type: str | None, limit: int, offset: int
) -> Plan[list[TroubleshootingItem]]:
    return many(
        _troubleshooting_item,
        SQL.troubleshooting,
        domain=domain,
        command_type=command_type,
        limit=limit,
        offset=offset,
    )


def audit_trail(domain: str, command_id: UUID) -> Plan[list[AuditEvent]]:
    return many(_audit_event, SQL.audit_trail, domain=domain, command_id=command_id)


def batch_audit_trail(domain: str, batch_id: UUID) -> Plan[list[AuditEvent]]:
    return many(_audit_event, SQL.batch_audit_trail, domain=domain, batch_id=batch_id)


def domains() -> Plan[list[str]]:
    rows = yield from execute(SQL.domains)
    return [domain for (domain,) in rows]


def domains_of_batch(batch_id: UUID) -> Plan[list[str]]:
    rows = yield from execute(SQL.find_batch_domain, batch_id=batch_id)
    return [domain for (domain,) in rows]


def domains_of_command(command_id: UUID) -> Plan[list[str]]:
    rows = yield from execute(SQL.find_command_domains, command_id=command_id)
    return [domain for (domain,) in rows]


def _batch(
    batch_id: UUID, domain: str, name: str | None, custom_data: str | None, status: str, *counts_and_times: Any
) -> BatchMetadata:
    return BatchMetadata(batch_id, domain, name, _value(custom_data), BatchStatus(status), *counts_and_times)


def _command(
    command_id: UUID,
    domain: str,
    command_type: str,
    data: str | None,
    batch_id: UUID | None,
    task_key: str | None,
    correlation_id: UUID,
    reply_to: str | None,
    priority: int,
    created_at: datetime,
    status: str,
    *rest: Any,
) -> CommandMetadata:
    *facts, result = rest
    return CommandMetadata(
        command_id,
        domain,
        command_type,
        _value(data),
        batch_id,
        task_key,
        correlation_id,
        reply_to,
        priority,
        created_at,
        CommandStatus(status),
        *facts,
        _value(result),
    )


def _troubleshooting_item(
    command_id: UUID, domain: str, command_type: str, data: str | None, *rest: Any
) -> TroubleshootingItem:
    *facts, details = rest
    return TroubleshootingItem(command_id, domain, command_type, _value(data), *facts, _value(details))


def _audit_event(*row: Any) -> AuditEvent:
    *facts, details = row
    return AuditEvent(*facts, _value(details))


def _value(text: str | None) -> Any:
    """A stored value; what other hands wrote and cannot be decoded is shown as its text."""
    if text is None:
        return None
    try:
        return decode(text)
    except Undecodable:
        return text[:1000]
