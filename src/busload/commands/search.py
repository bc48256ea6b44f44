"""What people ask about commands, and find by the beginning of an id: read-only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Literal, TypeVar
from uuid import UUID

from busload.commands.command import AuditEvent, CommandMetadata, CommandStatus, TroubledDomain, TroubleshootingItem
from busload.commands.execution import Execution, ExecutionStatus, OperatorAction
from busload.commands.headers import decode_headers
from busload.commands.ids import JobId, job_id_of
from busload.commands.payload import readable
from busload.errors import CommandCanceledError, CommandFailedError, CommandNotFoundError
from busload.postgres.plan import Plan, many, one
from busload.postgres.statements import statements

ENDED = (CommandStatus.COMPLETED, CommandStatus.FAILED, CommandStatus.CANCELED)

T = TypeVar("T")
SQL = statements(__name__)

Noun = Literal["batch", "command", "job", "job of batches"]
_FIND: dict[Noun, bytes] = {
    "batch": SQL.find_batch,
    "command": SQL.find_command,
    "job": SQL.find_job,
    "job of batches": SQL.find_job_of_batches,
}


@dataclass(frozen=True, slots=True)
class IdRange:
    """All ids that begin with the same hex digits; a whole id is a range of one."""

    digits: str

    @property
    def first(self) -> UUID:
        return UUID(self.digits.ljust(32, "0"))

    @property
    def last(self) -> UUID:
        return UUID(self.digits.ljust(32, "f"))

    @property
    def whole(self) -> UUID | None:
        return self.first if len(self.digits) == 32 else None

    def __str__(self) -> str:
        dashes = sum(len(self.digits) > place for place in (8, 12, 16, 20))
        return str(self.first)[: len(self.digits) + dashes]


@dataclass(frozen=True, slots=True)
class Found:
    """Something with an id in the range, and what a person recognises it by."""

    domain: str
    id: JobId
    about: str


class Last:
    """The last command of the page before. One that is given by its id alone is looked for in `domain` first."""

    def __init__(self, domain: str, after: UUID | CommandMetadata | None) -> None:
        self.command_id: UUID | None = after.command_id if isinstance(after, CommandMetadata) else after
        self.domain: str = after.domain if isinstance(after, CommandMetadata) else domain


def command(domain: str, command_id: UUID) -> Plan[CommandMetadata | None]:
    return one(command_of_row, SQL.command, domain=domain, command_id=command_id)


@dataclass(frozen=True, slots=True)
class Ending:
    """How far a command has come, and how it has ended if it has."""

    batch_id: UUID | None
    status: CommandStatus
    error_type: str | None
    error_code: str | None
    message: str | None
    result: Any


def ending(domain: str, command_id: UUID) -> Plan[Ending]:
    found = yield from one(_ending, SQL.ending, domain=domain, command_id=command_id)
    if found is None:
        raise CommandNotFoundError(domain, command_id)
    return found


def has_ended(status: CommandStatus, wait_for_operator: bool) -> bool:
    """Whether there is nothing more to wait for."""
    return status in ENDED or (status is CommandStatus.IN_TROUBLESHOOTING_QUEUE and not wait_for_operator)


def result_of(domain: str, command_id: UUID, ending: Ending) -> Any:
    """The result of a command that was completed; raises if it was not."""
    if ending.status is CommandStatus.COMPLETED:
        return ending.result
    kind = CommandCanceledError if ending.status is CommandStatus.CANCELED else CommandFailedError
    error = {"error_type": ending.error_type, "code": ending.error_code, "error_message": ending.message}
    raise kind(domain, command_id, ending.status, **error)


def commands(wanted: Sequence[tuple[str, UUID]]) -> Plan[list[CommandMetadata]]:
    """Those of these domains and ids that exist, in any order."""
    domains, ids = [domain for domain, _ in wanted], [command_id for _, command_id in wanted]
    return many(command_of_row, SQL.commands, domains=domains, command_ids=ids)


def batch_commands(
    domain: str, batch_id: UUID, *, status: CommandStatus | None, limit: int, offset: int, after: Last
) -> Plan[list[CommandMetadata]]:
    where = {"domain": domain, "batch_id": batch_id, "limit": limit, "offset": offset}
    where |= {"after": after.command_id, "after_domain": after.domain}
    if status is None:
        return many(command_of_row, SQL.batch_commands, **where)
    return many(command_of_row, SQL.batch_commands_in, status=status.value, **where)


def troubleshooting(
    domain: str | None, *, command_type: str | None, limit: int, offset: int
) -> Plan[list[TroubleshootingItem]]:
    """Those of one domain or, without one, of all domains together."""
    page = {"command_type": command_type, "limit": limit, "offset": offset}
    if domain is None:
        return many(_troubleshooting_item, SQL.troubleshooting_everywhere, **page)
    return many(_troubleshooting_item, SQL.troubleshooting, domain=domain, **page)


def troubleshooting_domains(domain: str | None, *, command_type: str | None) -> Plan[list[TroubledDomain]]:
    """The domains in which commands wait for a person, those with most first."""
    return many(TroubledDomain, SQL.troubleshooting_domains, domain=domain, command_type=command_type)


def troubleshooting_find(command_id: UUID) -> Plan[list[TroubleshootingItem]]:
    """The commands with this id that wait for a person, in whatever domain."""
    return many(_troubleshooting_item, SQL.troubleshooting_find, command_id=command_id)


def troubleshooting_item(domain: str, command_id: UUID) -> Plan[TroubleshootingItem | None]:
    return one(_troubleshooting_item, SQL.troubleshooting_item, domain=domain, command_id=command_id)


def audit_trail(domain: str, command_id: UUID) -> Plan[list[AuditEvent]]:
    return many(_audit_event, SQL.audit_trail, domain=domain, command_id=command_id)


def batch_audit_trail(domain: str, batch_id: UUID) -> Plan[list[AuditEvent]]:
    return many(_audit_event, SQL.batch_audit_trail, domain=domain, batch_id=batch_id)


def trace(task_key: str, *, domain: str | None) -> Plan[list[Execution]]:
    return many(as_execution, SQL.trace, task_key=task_key, domain=domain)


def find(noun: Noun, ids: IdRange, *, domain: str | None, limit: int) -> Plan[list[Found]]:
    """What has an id in this range; a "job of batches" is any job_id that batches have, which may be a text."""
    return many(_found, _FIND[noun], first=ids.first, last=ids.last, domain=domain, limit=limit)


def _found(domain: str, id: JobId, about: str) -> Found:
    found = job_id_of(id)
    assert found is not None
    return Found(domain, found, about)


def domains() -> Plan[list[str]]:
    """The domains that have a batch, or commands that have not ended."""
    return many(str, SQL.domains)


def known_domains() -> Plan[list[str]]:
    """Every domain that was sent a command or served by a worker, or that has a batch, a buffer or a pause."""
    return many(str, SQL.known_domains)


def living_workers(domain: str) -> Plan[list[str]]:
    """The names of the workers that serve a domain now."""
    return many(str, SQL.living_workers, domain=domain)


def _reader(kind: type[T], **conversions: Callable[[Any], Any]) -> Callable[..., T]:
    """Makes values of a dataclass from rows, whose columns stand in the order of its fields."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]

    def read(*row: Any) -> T:
        values = dict(zip(names, row, strict=True))
        for name, converted in conversions.items():
            values[name] = converted(values[name])
        return kind(**values)

    return read


def _actions(text: str | None) -> tuple[OperatorAction, ...]:
    return tuple(
        OperatorAction(type, datetime.fromisoformat(at), operator, details)
        for type, at, operator, details in readable(text) or []
    )


command_of_row = _reader(CommandMetadata, data=readable, status=CommandStatus, result=readable, headers=decode_headers)
_ending = _reader(Ending, status=CommandStatus, result=readable)
_troubleshooting_item = _reader(TroubleshootingItem, data=readable, details=readable)
_audit_event = _reader(AuditEvent, details=readable)
as_execution = _reader(Execution, status=ExecutionStatus, metadata=readable, actions=_actions)
