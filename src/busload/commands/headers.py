"""Headers: texts by name that travel beside the data of a command, such as a tenant or a trace context."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from uuid import UUID

import msgspec

from busload.commands.command import NewCommand
from busload.settings import InputLimits

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, str]).decode


def encode_headers(headers: Mapping[str, str] | None) -> str | None:
    """Headers as JSON text; None if there are none."""
    if not headers:
        return None
    return _encode({str(name): str(value) for name, value in headers.items()}).decode()


def with_context(text: str | None, context: Mapping[str, str], limits: InputLimits) -> str | None:
    """Headers with a trace context, which wins. What of it does not fit is left out: baggage can be large."""
    if not context:
        return text
    headers = decode_headers(text) or {}
    joined = encode_headers({**headers, **context})
    if joined is not None and len(joined.encode()) <= limits.headers_bytes:
        return joined
    for name, value in context.items():
        more = encode_headers(headers | {name: value})
        if more is not None and len(more.encode()) <= limits.headers_bytes:
            headers[name] = value
    return encode_headers(headers)


def decode_headers(text: str | None) -> dict[str, str] | None:
    """The headers of stored text. Text that other hands wrote, and that are no headers, counts for none."""
    if text is None:
        return None
    try:
        return _decode(text) or None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def joined_headers(of_batch: str | None, own: str | None) -> dict[str, str] | None:
    """The headers of a command: those of its batch and its own, which win."""
    if of_batch is None:
        return decode_headers(own)
    return _read_once(of_batch) | (decode_headers(own) or {}) or None


@lru_cache(maxsize=64)
def _read_once(of_batch: str) -> dict[str, str]:
    """The headers of a batch: its commands come one after the other, and each is given a copy."""
    return decode_headers(of_batch) or {}


def in_context(command: NewCommand, context: Mapping[str, str], limits: InputLimits) -> NewCommand:
    """A command that carries the context of its sender's span to its handler."""
    return msgspec.structs.replace(command, headers=with_context(command.headers, context, limits))


def facts_of(command: NewCommand, batch_id: UUID | None = None) -> dict[str, Any]:
    """What the span that sends a command says about it."""
    return {
        "command_id": command.command_id,
        "command_type": command.command_type,
        "task_key": command.task_key,
        "correlation_id": command.correlation_id,
        "batch_id": batch_id,
        "headers": decode_headers(command.headers),
    }
