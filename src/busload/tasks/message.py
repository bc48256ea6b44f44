"""The two keys of a task in the message that another queue carries: in its body and in its headers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from busload.commands.checks import encoded, wrong
from busload.commands.execution import Execution
from busload.errors import InvalidCommandError, InvalidOperationError
from busload.settings import PayloadLimits

TASK_ID, EXECUTION_ID = "taskId", "executionId"
"""What the two keys are called in messages."""


@dataclass(frozen=True, slots=True)
class TaskMessage:
    """What to give to the queue that runs a task. Both keys are in the `body`, which is JSON, and in the `headers`."""

    body: bytes
    headers: dict[str, str]
    persistent: bool = True
    """The message has to survive a restart of the broker; tell the broker so."""


def task_message(execution: object, content: object, limits: PayloadLimits) -> TaskMessage:
    """A message with this content about an execution that waits to be claimed."""
    if not isinstance(execution, Execution):
        raise InvalidCommandError([wrong(execution, "execution", "what enqueue, retry or recover returned")])
    if execution.execution_id is None or execution.task_key is None:
        raise InvalidOperationError(
            f"This execution of task {execution.task_key!r:.200} has no id to be claimed by. "
            "Publish what `enqueue`, `retry` or `recover` returned."
        )
    if content is None:
        content = execution.metadata
    if not isinstance(content, Mapping):
        raise InvalidCommandError([wrong(content, "content", "a dict, which gets the two keys added")])
    keys = {TASK_ID: execution.task_key, EXECUTION_ID: str(execution.execution_id)}
    taken = [wrong(content[name], f"content/{name}", f"{keys[name]!r}, or no such key") for name in keys
             if name in content and content[name] != keys[name]]  # fmt: skip
    if taken:
        raise InvalidCommandError(taken)
    return TaskMessage(encoded({**content, **keys}, "/content", limits).encode(), keys)


def keys_of(body: object, headers: object = None) -> tuple[str, UUID]:
    """The two keys of a message that was received, from its headers or its body."""
    found = [keys for keys in (_in_headers(headers), _in_body(body)) if any(keys)]
    if not found or not all(found[0]):
        raise InvalidOperationError(
            f"The message has no {TASK_ID} and {EXECUTION_ID}, in its headers or as keys of a JSON object in its body. "
            "It is not one that `message` made: dead-letter it."
        )
    if len(found) == 2 and found[0] != found[1]:
        raise InvalidOperationError(
            f"The headers of the message say {found[0]!r:.200}, its body says {found[1]!r:.200}. Dead-letter it."
        )
    task_id, execution_id = found[0]
    try:
        return task_id, UUID(execution_id)
    except ValueError:
        raise InvalidOperationError(
            f"The {EXECUTION_ID} of the message is {execution_id!r:.80}, wanted a UUID. Dead-letter it."
        ) from None


def _in_headers(headers: object) -> tuple[str, str]:
    named = headers if isinstance(headers, Mapping) else {}
    return _text(named.get(TASK_ID)), _text(named.get(EXECUTION_ID))


def _in_body(body: object) -> tuple[str, str]:
    content: Any = body
    if isinstance(body, str | bytes | bytearray | memoryview):
        try:
            content = json.loads(bytes(body) if isinstance(body, memoryview) else body)
        except (ValueError, RecursionError):
            return "", ""
    return _in_headers(content)


def _text(value: object) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode(errors="replace")
    return value if isinstance(value, str) else str(value) if isinstance(value, UUID) else ""
