"""Two JSON texts side by side: what a patch would change, line by line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import groupby, zip_longest
from typing import Any

import msgspec

from busload.commands.payload import WIDEST, encode

AROUND = 3
"""Lines that are shown before and after a change."""
MOST_LINES = 400
MOST_COMPARED = 4000
"""Lines of a text beyond which nothing is compared: that would take seconds."""
MOST_PAIRS = 50_000
"""Pairs of equal lines between the first change and the last one beyond which lines are compared roughly.

To find out which of many equal lines has moved takes seconds, in which the process would serve nobody else.
"""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of both texts. `kind` is same, changed, removed, added, or gap where equal lines are left out."""

    kind: str
    old: str | None
    new: str | None


def compared(old: Any, new: Any) -> list[Line]:
    """The lines in which two values differ, with a few around them; empty if they are equal."""
    before, after = _lines(old), _lines(new)
    if max(len(before), len(after)) > MOST_COMPARED:
        return [Line("gap", f"{len(before):,} lines: too many to compare", f"{len(after):,} lines")]
    found: list[Line] = []
    matcher = _Matcher(_without_commas(before), _without_commas(after))
    for group in matcher.get_grouped_opcodes(AROUND):
        if found or group[0][1] > 0:
            found.append(Line("gap", "…", "…"))
        for tag, a, b, c, d in group:
            found += _rows(tag, before[a:b], after[c:d])
        if len(found) > MOST_LINES:
            return [*found[:MOST_LINES], Line("gap", "… more changes", "… more changes")]
    return found


class _Matcher(SequenceMatcher[str]):
    """Compares only what is between the first change and the last one, and more roughly where that would be dear."""

    def __init__(self, old: Sequence[str], new: Sequence[str]) -> None:
        super().__init__(None, old, new)
        self._old, self._new = old, new

    def get_opcodes(self) -> list[tuple[Any, int, int, int, int]]:
        old, new = self._old, self._new
        head = _alike(old, new)
        tail = _alike(old[head:][::-1], new[head:][::-1])
        a, b = len(old) - tail, len(new) - tail
        between = ((tag, *(at + head for at in where)) for tag, *where in _between(old[head:a], new[head:b]))
        codes = [("equal", 0, head, 0, head), *between, ("equal", a, len(old), b, len(new))]
        runs = [list(run) for _, run in groupby(codes, lambda code: code[0])]
        return [(run[0][0], run[0][1], run[-1][2], run[0][3], run[-1][4]) for run in runs]


def _alike(old: Sequence[str], new: Sequence[str]) -> int:
    """How many lines are equal before the first that is not."""
    pairs = zip(old, new, strict=False)
    return next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(old), len(new)))


def _between(old: Sequence[str], new: Sequence[str]) -> Iterator[tuple[Any, int, int, int, int]]:
    counts = Counter(new)
    dear = sum(counts[line] for line in old) > MOST_PAIRS
    for tag, a, b, c, d in SequenceMatcher(None, old, new, autojunk=dear).get_opcodes():
        if not dear or tag != "replace":
            yield tag, a, b, c, d
            continue
        # Frequent lines were passed over: those that stand in the same place have not changed.
        for at in range(max(b - a, d - c)):
            i, k = min(a + at, b), min(c + at, d)
            j, m = min(i + 1, b), min(k + 1, d)
            yield "equal" if old[i:j] == new[k:m] else "replace", i, j, k, m


def _rows(tag: str, old: Sequence[str], new: Sequence[str]) -> list[Line]:
    if tag == "equal":
        return [Line("same", left, right) for left, right in zip(old, new, strict=True)]
    rows = []
    for left, right in zip_longest(old, new):
        kind = "added" if left is None else "removed" if right is None else "changed"
        rows.append(Line(kind, left, right))
    return rows


def _without_commas(lines: Sequence[str]) -> list[str]:
    """What is compared: the comma at the end of a line says only that another line follows, which shows by itself."""
    return [line.removesuffix(",") for line in lines]


def _lines(value: Any) -> list[str]:
    return msgspec.json.format(encode(value, WIDEST), indent=2).split("\n")
