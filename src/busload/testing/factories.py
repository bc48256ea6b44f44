"""Values for unit tests that need no database: a command as a handler gets it, a batch as a callback gets it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any, TypeVar
from uuid import UUID

from busload.batches.batch import BatchMetadata, BatchStatus
from busload.commands.bulk_items import Chunk, Group, Item
from busload.commands.command import (
    AuditEvent,
    Command,
    CommandMetadata,
    CommandStatus,
    TroubleshootingItem,
)
from busload.commands.ids import new_id

T = TypeVar("T")


def make_command(
    command_type: str = "Test",
    data: Any = None,
    *,
    domain: str = "test",
    command_id: UUID | None = None,
    batch_id: UUID | None = None,
    task_key: str | None = None,
    correlation_id: UUID | None = None,
    reply_to: str | None = None,
    priority: int = 0,
    created_at: datetime | None = None,
    headers: Mapping[str, str] | None = None,
) -> Command:
    """A command as a handler gets it. Each has an id of its own, and was sent now."""
    own = command_id or new_id()
    sent_at = created_at or datetime.now(UTC)
    others = None if headers is None else dict(headers)
    ids = (batch_id, task_key, correlation_id or own, reply_to, priority)
    return Command(own, domain, command_type, data, *ids, sent_at, others)


def make_command_metadata(command_type: str = "Test", data: Any = None, **given: Any) -> CommandMetadata:
    """A command as `get_command` tells about it; it waits in the queue, unless fields say otherwise."""
    command_id = given.get("command_id") or new_id()
    defaults = {
        "command_id": command_id,
        "domain": "test",
        "command_type": command_type,
        "data": data,
        "correlation_id": command_id,
        "priority": 0,
        "created_at": datetime.now(UTC),
        "status": CommandStatus.PENDING,
        "attempts": 0,
    }
    return _made(CommandMetadata, defaults, given)


def make_batch_metadata(total_count: int = 1, **given: Any) -> BatchMetadata:
    """A batch as `get_batch` and `on_complete` tell about it: all of it has completed, unless fields say otherwise."""
    now = datetime.now(UTC)
    counts = ("completed_count", "failed_count", "canceled_count", "in_troubleshooting_count")
    ended = {name: given.get(name, 0) for name in counts}
    if "completed_count" not in given:
        ended["completed_count"] = total_count - sum(ended.values())
    done = total_count == ended["completed_count"] + ended["failed_count"] + ended["canceled_count"]
    bad = ended["failed_count"] + ended["canceled_count"]
    over = BatchStatus.COMPLETED_WITH_FAILURES if bad else BatchStatus.COMPLETED
    defaults = {
        "batch_id": new_id(),
        "domain": "test",
        "status": over if done else BatchStatus.IN_PROGRESS,
        "total_count": total_count,
        "created_at": now,
        "started_at": now,
        "completed_at": now if done else None,
        **ended,
    }
    return _made(BatchMetadata, defaults, given)


def make_troubleshooting_item(command_type: str = "Test", data: Any = None, **given: Any) -> TroubleshootingItem:
    """A command that waits for a person, as `bus.troubleshooting.list` tells about it."""
    command_id = given.get("command_id") or new_id()
    defaults = {
        "command_id": command_id,
        "domain": "test",
        "command_type": command_type,
        "data": data,
        "correlation_id": command_id,
        "reason": "PERMANENT",
        "attempts": 1,
        "since": datetime.now(UTC),
        "fingerprint": "test",
    }
    return _made(TroubleshootingItem, defaults, given)


def make_audit_event(type: str = "SENT", **given: Any) -> AuditEvent:
    """Something that happened to a command, as `get_audit_trail` tells about it."""
    return _made(AuditEvent, {"type": type, "at": datetime.now(UTC)}, given)


def make_chunk(data: Iterable[Any], *, domain: str = "test", command_type: str = "Test", key: Any = None) -> Chunk:
    """What a bulk handler gets: a command for each of the data."""
    commands = [make_command(command_type, one, domain=domain) for one in data]
    items = [Item(one.command_id, one.data, one.task_key, one.created_at, one) for one in commands]
    return Chunk(domain, command_type, items, key)


def make_group(data: Iterable[Any], *, buffer: str = "test", partition: str | None = None) -> Group:
    """What the handler of a buffer gets: an event for each of the data."""
    now = datetime.now(UTC)
    return Group(buffer, new_id(), [Item(new_id(), one, None, now) for one in data], partition)


def _made(kind: type[T], defaults: Mapping[str, Any], given: Mapping[str, Any]) -> T:
    """A value whose fields are given, or have a default, or else are None."""
    names = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    if unknown := [name for name in given if name not in names]:
        raise TypeError(f"{kind.__name__} has no field {unknown[0]!r}. Its fields are {', '.join(names)}.")
    needed = {name: None for name in names if not _has_default(names[name])}
    return kind(**{**needed, **defaults, **given})


def _has_default(field: Any) -> bool:
    return any(getattr(field, name) is not _MISSING for name in ("default", "default_factory"))


_MISSING = fields(BatchMetadata)[0].default
