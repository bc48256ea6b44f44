"""Ids that sort by time, so that indexes on them grow at one end."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from itertools import count, islice
from typing import TypeAlias
from uuid import UUID, SafeUUID

from busload.commands.load import position_of


def new_id() -> UUID:
    """A UUID of version 7."""
    return next(ascending_ids())


def new_ids(number: int) -> list[UUID]:
    """UUIDs of version 7 in ascending order."""
    return list(islice(ascending_ids(), number))


def ascending_ids() -> Iterator[UUID]:
    """UUIDs of version 7 without end, in ascending order."""
    for value in ascending_numbers():
        # What UUID(int=value) makes, at a third of the price: there is nothing to check about a value of ours.
        made = _make(UUID)
        _set_int(made, value)
        _set_is_safe(made, _UNKNOWN)
        yield made


def ascending_numbers() -> Iterator[int]:
    """The same as numbers: one millisecond and, below it, one random start that is counted up."""
    stamp = (time.time_ns() // 1_000_000) << 80
    drawn = int.from_bytes(os.urandom(10))
    # The lower 62 of the 74 free bits start below half of their range: counting up cannot reach the bits above them.
    first = stamp | 0x7 << 76 | (drawn >> 68) << 64 | 0x2 << 62 | drawn & 0x1FFF_FFFF_FFFF_FFFF
    return count(first)


_make, _UNKNOWN = object.__new__, SafeUUID.unknown
_set_int, _set_is_safe = vars(UUID)["int"].__set__, vars(UUID)["is_safe"].__set__


JobId: TypeAlias = UUID | str
"""The id of a job as a batch keeps it: of a job of busload's, or of the application's own, which may be any text."""


def job_id_of(text: JobId | None) -> JobId | None:
    """The id of a job. A text that is a UUID, written with hyphens, is that UUID."""
    return UUID(text) if isinstance(text, str) and _SPELT_AS_UUID.fullmatch(text) else text


_SPELT_AS_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


def execution_id(lease_id: UUID, command: int) -> UUID:
    """One attempt: its lease's id with the command's position in the low bits."""
    return UUID(int=lease_id.int | position_of(command))


def lease_id_of(execution_id: UUID) -> UUID:
    """The lease under which an attempt runs."""
    return UUID(int=execution_id.int & ~0xFFF)
