"""JSON patches (RFC 6902) of the data of commands, checked and bounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jsonpatch

from busload.commands.data_type import DataType
from busload.commands.payload import WIDEST, PayloadRefusedError, decode, encode
from busload.errors import Problem
from busload.settings import PayloadLimits

MOST_OPERATIONS = 1000
"""Of one patch: each operation may move half a million items of a list by one place."""


class Patch:
    """A JSON patch that was checked.

    Its work is bounded by the limits of data. Values that operations add are part of the patch, which is no larger than
    data may be. Copies are measured before they are made, and all copies together may be as large as data may be.
    """

    def __init__(self, operations: Sequence[Any], limits: PayloadLimits) -> None:
        self.operations: list[dict[str, Any]] = decode(encode(operations, WIDEST, path="/patch"))
        self._limits = limits
        flaw = _flaw(self.operations, limits)
        if flaw:
            raise PayloadRefusedError(
                Problem("INVALID_PATCH", "/patch", f"{flaw}; wanted operations as RFC 6902 has them")
            )
        kinds = jsonpatch.JsonPatch.operations
        self._steps = [kinds[operation["op"]](operation) for operation in self.operations]

    def apply(self, data: str, known: DataType | None = None) -> str:
        """Return the JSON text of a command's data after the patch.

        Raises `ValueError` if the patch does not apply, and `DataInvalidError` if what it makes does not fit the type
        that the handler wants, as far as that is `known`.
        """
        patched, room = decode(data), self._limits.data_bytes
        for index, (operation, step) in enumerate(zip(self.operations, self._steps, strict=True)):
            try:
                if operation["op"] == "copy":
                    room -= _size(patched, operation["from"], self._limits)
                    if room < 0:
                        raise ValueError(f"the copies take more than {self._limits.data_bytes:,} bytes together")
                patched = step.apply(patched)
            except jsonpatch.JsonPatchTestFailed:  # its message would repeat the data, which may be secret
                path = operation["path"]
                raise ValueError(f"operation {index} (test): another value, or none, is at {path!r:.200}") from None
            except jsonpatch.JsonPointerException as error:  # so would this one, from "not found in" on
                said = str(error).partition(" not found in ")[0]
                missing = f"nothing is at {said.removeprefix('member ')}" if said != str(error) else said
                raise ValueError(f"operation {index} ({operation['op']}): {missing:.200}{_hint(operation)}") from None
            except Exception as error:  # the library raises what Python does on data of another shape
                raise ValueError(f"operation {index} ({operation['op']}): {error!s:.200}{_hint(operation)}") from None
        text = encode(patched, self._limits, path="/data")
        if known is not None:
            known.convert(patched)
        return text


def _hint(operation: dict[str, Any]) -> str:
    """Problems of data are named by paths that begin with /data; those of a patch begin within it."""
    path: str = operation["path"]
    return f". Paths begin in the data: {path[5:]!r:.200}" if path.startswith("/data/") else ""


def _size(data: Any, pointer: str, limits: PayloadLimits) -> int:
    """How many bytes of JSON a part of the data is; refuses what is larger or deeper than data may be."""
    return len(encode(jsonpatch.JsonPointer(pointer).resolve(data), limits).encode())


def _flaw(operations: Any, limits: PayloadLimits) -> str | None:
    """What is wrong with a patch before it meets any data."""
    if not isinstance(operations, list) or not operations:
        return f"found {operations!r:.80}, which is no list of operations"
    if len(operations) > MOST_OPERATIONS:
        return f"found {len(operations):,} operations, at most {MOST_OPERATIONS:,}"
    try:
        jsonpatch.JsonPatch(operations)
    except Exception as error:
        return f"{error!s:.200}"
    for index, operation in enumerate(operations):
        needed = "from" if operation["op"] in ("move", "copy") else "value"
        if operation["op"] != "remove" and needed not in operation:
            return f"the operation {operation!r:.80} has no {needed!r}"
        for pointer in (operation["path"], operation["from"] if needed == "from" else ""):
            try:
                depth = len(jsonpatch.JsonPointer(pointer).parts)
            except Exception as error:
                return f"operation {index}: {error!s:.200}"
            if depth > limits.depth:
                return f"operation {index} points {depth:,} levels deep, and data may have {limits.depth}"
    return None
