"""Headers: texts by name that travel beside the data of a command, such as a tenant or a trace context."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, str]).decode


def encode_headers(headers: Mapping[str, str] | None) -> str | None:
    """Headers as JSON text; None if there are none."""
    if not headers:
        return None
    return _encode({str(name): str(value) for name, value in headers.items()}).decode()


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
    return (decode_headers(of_batch) or {}) | (decode_headers(own) or {}) or None
