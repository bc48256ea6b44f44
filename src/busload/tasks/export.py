"""What another tracker has exported as JSON lines, such as `mongoexport` writes them: one document per execution."""

from __future__ import annotations

import base64
import binascii
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from busload.tasks.compare import OldTask

FIELDS: dict[str, tuple[str, ...]] = {
    "task_id": ("taskId", "task_id"),
    "execution_id": ("executionId", "execution_id"),
    "status": ("status",),
    "created_at": ("createdAt", "created_at", "enqueuedAt", "enqueued_at"),
    "queue": ("queueName", "queue", "queue_name"),
}
"""How documents name what is compared. The first name that a document has counts."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class ExportError(ValueError):
    """A line of an export that cannot be read."""


class OldExport:
    """The documents of another tracker: the newest document of each task counts, and is kept in memory."""

    def __init__(self, lines: Iterable[bytes], names: Mapping[str, str], queues: Sequence[str] | None) -> None:
        """`names` are fields that have another name than `FIELDS` says; `queues` leaves out documents of others."""
        self._fields = {field: (names[field],) if field in names else usual for field, usual in FIELDS.items()}
        newest: dict[str, tuple[datetime, int, OldTask]] = {}
        number, named = 0, False
        for number, document in _documents(lines):
            if queues is not None:
                queue = self._value(document, "queue", number)
                named = named or queue is not None
                if queue not in queues:
                    continue
            task_id = self._value(document, "task_id", number)
            if task_id is None:
                wanted = " or ".join(self._fields["task_id"])
                raise ExportError(f"document {number}: found no task id, wanted one in {wanted}")
            task = OldTask(
                task_id, self._value(document, "status", number), self._value(document, "execution_id", number)
            )
            at = _time(self._found(document, "created_at"), number)
            if task_id not in newest or (at, number) > newest[task_id][:2]:
                newest[task_id] = (at, number, task)
        if queues is not None and number and not named:
            wanted = " or ".join(self._fields["queue"])
            raise ExportError(f"found no queue in any of its documents, wanted one in {wanted}, or no --queue")
        self._tasks = {task_id: task for task_id, (_, _, task) in newest.items()}
        self._sorted = sorted(self._tasks)

    def page(self, *, after: str, limit: int) -> list[OldTask]:
        begin = bisect_right(self._sorted, after)
        return [self._tasks[task_id] for task_id in self._sorted[begin : begin + limit]]

    def of(self, task_ids: Sequence[str]) -> list[OldTask]:
        return [self._tasks[task_id] for task_id in task_ids if task_id in self._tasks]

    def _value(self, document: Mapping[str, Any], field: str, number: int) -> str | None:
        return _text(self._found(document, field), number)

    def _found(self, document: Mapping[str, Any], field: str) -> Any:
        return next((document[name] for name in self._fields[field] if document.get(name) is not None), None)


def _documents(lines: Iterable[bytes]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The documents with their numbers, one on each line; or one array of them, as `mongoexport --jsonArray` writes."""
    lines = iter(lines)
    number = 0
    for line in lines:
        if not (text := line.removeprefix(b"\xef\xbb\xbf").strip()):
            continue
        array = number == 0 and text.startswith(b"[")
        found = _parsed(b"".join([text, *lines]) if array else text, number + 1)
        for document in found if array and isinstance(found, list) else [found]:
            number += 1
            if not isinstance(document, Mapping):
                raise ExportError(f"document {number}: found {document!r:.80}, wanted a JSON object")
            yield number, document


def _parsed(text: bytes, number: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ExportError(
            f"document {number}: found {text[:60]!r}, wanted a JSON object on one line ({error})"
        ) from None


def _text(value: Any, number: int) -> str | None:
    """A text, a number, or what MongoDB writes for an id: {"$oid": …}, {"$uuid": …} or {"$binary": …}."""
    match value:
        case None | str():
            return value
        case bool():
            pass
        case int():
            return str(value)
        case {"$oid": str(id)} | {"$uuid": str(id)} | {"$numberLong": str(id)} | {"$numberInt": str(id)}:
            return id
        case {"$binary": {"base64": str(encoded)}} | {"$binary": str(encoded)}:
            try:
                return str(UUID(bytes=base64.b64decode(encoded, validate=True)))
            except (binascii.Error, ValueError):
                pass
    raise ExportError(f"document {number}: found {value!r:.80}, wanted a text")


def _time(value: Any, number: int) -> datetime:
    """An ISO date, milliseconds since 1970, or {"$date": …} of either. A date without a zone is UTC."""
    try:
        match value:
            case None:
                return datetime.min.replace(tzinfo=UTC)
            case {"$date": inner}:
                return _time(inner, number)
            case {"$numberLong": str(milliseconds)}:
                return EPOCH + timedelta(milliseconds=int(milliseconds))
            case int() | float() if not isinstance(value, bool):
                return EPOCH + timedelta(milliseconds=value)
            case str():
                at = datetime.fromisoformat(value)
                return at if at.tzinfo else at.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        pass
    wanted = 'an ISO date such as 2026-03-01T12:00:00Z, or {"$date": …}'
    raise ExportError(f"document {number}: found the date {value!r:.80}, wanted {wanted}")
