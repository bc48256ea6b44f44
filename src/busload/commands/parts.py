"""How a long list is worked off in parts: parts that are not too large, or smaller and smaller ones after a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from busload.postgres.plan import Plan

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


def cut(items: Sequence[T], sizes: Iterable[int], most: int, most_bytes: int) -> Iterator[Sequence[T]]:
    """Yield parts of at most `most` items and `most_bytes`, in order; an item that is larger is a part by itself.

    `sizes` are the bytes of each item.
    """
    start = total = 0
    for position, size in enumerate(sizes):
        if position - start == most or (position > start and total + size > most_bytes):
            yield items[start:position]
            start, total = position, 0
        total += size
    if start < len(items):
        yield items[start:]


def find_failing(
    items: Sequence[T], attempt: Callable[[list[T]], Plan[E | None]], *, most_tries: int | None = None
) -> Plan[dict[T, E]]:
    """Try all items together, then each half of a part that fails; return the errors of the items that fail alone.

    `attempt` returns why a part fails, or None. After `most_tries` a part that fails counts with all its items.
    """
    failing: dict[T, E] = {}
    parts, tries = [list(items)], 0
    while parts:
        part = parts.pop()
        error = yield from attempt(part)
        tries += 1
        if error is not None and len(part) > 1 and (most_tries is None or tries < most_tries):
            middle = len(part) // 2
            parts += [part[:middle], part[middle:]]
        elif error is not None:
            failing |= dict.fromkeys(part, error)
    return failing
