"""Two JSON texts side by side: what a patch would change, line by line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any

import msgspec

from busload.commands.payload import WIDEST, encode

AROUND = 3
"""Lines that are shown before and after a change."""
MOST_LINES = 400
MOST_COMPARED = 4000
"""Lines of a text beyond which nothing is compared: that would take seconds."""


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
    for group in SequenceMatcher(None, before, after, autojunk=False).get_grouped_opcodes(AROUND):
        if found or group[0][1] > 0:
            found.append(Line("gap", "…", "…"))
        for tag, a, b, c, d in group:
            found += _rows(tag, before[a:b], after[c:d])
        if len(found) > MOST_LINES:
            return [*found[:MOST_LINES], Line("gap", "… more changes", "… more changes")]
    return found


def _rows(tag: str, old: Sequence[str], new: Sequence[str]) -> list[Line]:
    if tag == "equal":
        return [Line("same", left, right) for left, right in zip(old, new, strict=True)]
    rows = []
    for left, right in zip_longest(old, new):
        kind = "added" if left is None else "removed" if right is None else "changed"
        rows.append(Line(kind, left, right))
    return rows


def _lines(value: Any) -> list[str]:
    return msgspec.json.format(encode(value, WIDEST), indent=2).split("\n")
