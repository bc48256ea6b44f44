"""Ids that sort by time, so that indexes on them grow at one end."""

from __future__ import annotations

import os
import time
from uuid import UUID

LOAD_SIZE = 1000
"""How many commands travel in one load at most."""

POSITIONS = 1024
"""How many ids a load number stands for; a command's id is `load number * POSITIONS + position`."""


def new_id() -> UUID:
    """A UUID of version 7."""
    return new_ids(1)[0]


def new_ids(count: int) -> list[UUID]:
    """UUIDs of version 7 in ascending order: one millisecond and, below it, one random start that is counted up."""
    stamp = (time.time_ns() // 1_000_000) << 80
    # The 74 free bits start below half of their range, so that counting up cannot overflow them.
    start = int.from_bytes(os.urandom(10)) >> 7
    ids = []
    for low in range(start, start + count):
        ids.append(UUID(int=stamp | 0x7 << 76 | (low >> 62) << 64 | 0x2 << 62 | low & 0x3FFF_FFFF_FFFF_FFFF))
    return ids


def execution_id(lease_id: UUID, command: int) -> UUID:
    """One attempt: its lease's id with the command's position in the low bits."""
    return UUID(int=lease_id.int | command & (POSITIONS - 1))
