"""Failures by cause: the group that shares a fingerprint, what a person decides about it, and what became of that."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, Literal
from uuid import UUID

import jsonpatch
import msgspec

from busload.domain.command import NewCommand
from busload.domain.ids import ascending_ids
from busload.domain.payload import PayloadLimits, PayloadRefused, decode, encode
from busload.errors import PermanentCommandError, Problem

RESOLVE = "busload.Resolve"
"""The type of the commands that carry out a decision; every worker has the handler for them."""

FINGERPRINT = re.compile(r"[0-9a-f]{12}\Z")
CHUNK = 500
"""Items that one command moves, in one transaction: a few dozen milliseconds of the rows and batches it locks."""

CHUNK_BYTES = 4 * 1024 * 1024
"""What one command may write, so that large data do not make that seconds, or fill the memory of a worker."""

MOST_TOLD, REASON_LENGTH = 100, 100
"""Of how many commands a chunk's result says why they have not moved, and in how many characters."""

PRIORITY = 100
"""What a person decided should not wait behind a backlog, which is often the reason for the decision."""

RATES = 0.001, 1_000_000.0
"""Items a second: from one in a quarter of an hour to more than any database moves."""

WIDEST = PayloadLimits(data_bytes=16 * 1024 * 1024, depth=500)
"""For what was checked already and is only wrapped once more."""

MOST_OPERATIONS = 1000
"""Of one patch: each may move half a million items of a list by one place."""

Action = Literal["retry", "complete", "cancel"]


@dataclass(frozen=True, slots=True)
class CauseGroup:
    """What waits for a person for the same cause: one decision for all of it.

    `message` is that of the oldest command, of which `command_ids` names a few; `messages` are up to three different
    ones, to see in what they differ.
    """

    fingerprint: str
    reasons: tuple[str, ...]
    error_type: str | None
    error_code: str | None
    message: str | None
    command_types: tuple[str, ...]
    count: int
    oldest: datetime
    newest: datetime
    command_ids: tuple[UUID, ...]
    messages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GroupItem:
    """One command of a group, as it is and, if a patch was given, as it would be."""

    command_id: UUID
    before: Any
    after: Any = None


@dataclass(frozen=True, slots=True)
class GroupAction:
    """What was decided about a group: `count` commands are moved by the batch `batch_id`.

    There is no batch after a dry run, nor where nothing waits any more. A dry run shows the first items in `sample`.
    """

    batch_id: UUID | None
    action: Action
    fingerprint: str
    count: int
    sample: tuple[GroupItem, ...] = ()


class Decision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a person decided about a cause."""

    action: Action
    fingerprint: str
    operator: str | None = None
    patch: list[dict[str, Any]] | None = None
    result: Any = None
    reason: str | None = None


class Chunk(msgspec.Struct, frozen=True):
    """The part of a decision that one command carries out; what failed after `until` was not decided on."""

    decision: Decision
    until: datetime
    command_ids: list[UUID]


class Patch:
    """A JSON patch (RFC 6902) that was checked.

    Its work is bounded by the limits of data. What operations add is part of the patch, which is no larger than data
    may be. What they copy is measured before it is copied, and all copies together may be as large as data may be.
    """

    def __init__(self, operations: Sequence[Any], limits: PayloadLimits) -> None:
        self.operations: list[dict[str, Any]] = decode(encode(operations, WIDEST, path="/patch"))
        self._limits = limits
        flaw = _flaw(self.operations, limits)
        if flaw:
            raise PayloadRefused(Problem("INVALID_PATCH", "/patch", f"{flaw}; wanted operations as RFC 6902 has them"))
        kinds = jsonpatch.JsonPatch.operations
        self._steps = [kinds[operation["op"]](operation) for operation in self.operations]

    def apply(self, data: str) -> str:
        """The JSON text of a command's data after the patch; raises `ValueError` if that cannot be."""
        patched, room = decode(data), self._limits.data_bytes
        for index, (operation, step) in enumerate(zip(self.operations, self._steps, strict=True)):
            try:
                if operation["op"] == "copy":
                    room -= _size(patched, operation["from"], self._limits)
                    if room < 0:
                        raise ValueError(f"the copies take more than {self._limits.data_bytes:,} bytes together")
                patched = step.apply(patched)
            except Exception as error:  # the library raises what Python does on data of another shape
                raise ValueError(f"operation {index} ({operation['op']}): {error!s:.200}") from None
        return encode(patched, self._limits, path="/data")


def chunks(
    decision: Decision,
    command_ids: Sequence[UUID],
    sizes: Sequence[int],
    *,
    until: datetime,
    rate: float | None,
    now: datetime,
) -> Iterator[NewCommand]:
    """The commands that carry out a decision; with a rate, each moves what is due within a second.

    `sizes` are the bytes of each command's data; the decision itself is kept with each of them, so it counts as well.
    """
    most = CHUNK if rate is None else min(CHUNK, max(1, int(rate)))
    own = len(encode(msgspec.to_builtins(decision), WIDEST))
    fresh = ascending_ids()
    for start, end in _cuts([own + size for size in sizes], most):
        chunk = Chunk(decision, until, list(command_ids[start:end]))
        run_at = now + timedelta(seconds=start / rate) if rate is not None and start else None
        data = encode(msgspec.to_builtins(chunk), WIDEST)
        yield NewCommand(next(fresh), RESOLVE, data, None, None, None, PRIORITY, run_at, None)


def summary(moved: int, left: Mapping[UUID, str], limits: PayloadLimits) -> dict[str, Any] | None:
    """What a chunk did, as its result: as many of those left as may be told, and how many others there are.

    It must be stored, or nothing of the chunk is: where even the numbers are too much for the limits, it says nothing.
    """
    told = min(len(left), MOST_TOLD)
    while True:
        some = {str(command_id): why[:REASON_LENGTH] for command_id, why in islice(left.items(), told)}
        found = {"moved": moved, "left": some} | ({"others": len(left) - told} if told < len(left) else {})
        try:
            encode(found, limits)
            return found
        except PayloadRefused:
            if told == 0:
                return None
            told //= 2


def read_chunk(data: Any) -> Chunk:
    try:
        return msgspec.convert(data, Chunk)
    except msgspec.ValidationError as error:
        raise PermanentCommandError(f"{RESOLVE} is sent by busload itself; this one was not: {error}") from None


def _cuts(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """From where to where the parts go that are of `most` items and `CHUNK_BYTES` at most, or of one item."""
    start = total = 0
    for position, size in enumerate(sizes):
        if position - start == most or (position > start and total + size > CHUNK_BYTES):
            yield start, position
            start, total = position, 0
        total += size
    if start < len(sizes):
        yield start, len(sizes)


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
