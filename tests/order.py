"""In which order tests run: pytest-xdist gives each process a piece of the list, and a process that is done steals from
the end of another's piece. So whatever is at the beginning of a piece is run by one process, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def dealt(items: Sequence[T], pieces: int, is_long: Callable[[T], bool]) -> list[T]:
    """The same items in pieces of equal length, each of which begins with its share of the long ones."""
    long, short = ([item for item in items if is_long(item) is kind] for kind in (True, False))
    order: list[T] = []
    for nth in range(pieces):
        share = long[nth::pieces]
        length = (len(items) - len(order)) // (pieces - nth)
        taken = max(0, length - len(share))
        order += share + short[:taken]
        del short[:taken]
    return order
