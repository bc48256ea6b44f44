"""Where an exception came from, as text that can be stored: as Python prints it, of bounded size, without any values.

Python's own `traceback` module is built for one exception that ends a program. A worker sees the same failure thousands
of times, so the text of each line of code is looked up once and remembered.
"""

from __future__ import annotations

import asyncio
import linecache
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import TracebackType

from busload.commands.payload import safe_str, storable
from busload.commands.wording import counted

MOST_BYTES = 8 * 1024
MOST_EXCEPTIONS = 12
"""Causes, contexts and members of groups that are told; the others are counted."""

MOST_FRAMES, OUTERMOST = 20, 4
"""Frames of one exception that are told: the handler's own first ones, and those where it happened."""

MESSAGE_BYTES, NOTE_BYTES, MOST_NOTES = 1024, 256, 5
DEEPEST = 5
"""Groups within groups."""

CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"

_PACKAGE = Path(__file__).parent.parent
_ENGINE = (*(f"{_PACKAGE / name}/" for name in ("worker", "handlers", "jobs")), f"{Path(asyncio.__file__).parent}/")


def traceback_text(error: BaseException, max_bytes: int = MOST_BYTES) -> str:
    """The traceback of an exception with its causes, notes and members, the root cause first.

    The engine's frames around the handler are left out. Whatever the exception is like, this returns.
    """
    try:
        return _cut(_chain(error, set(), 0), max_bytes)
    except BaseException as another:  # of the exception's own class: not even SystemExit may pass for ours
        return storable(f"{type(error).__name__}: its traceback could not be told: {type(another).__name__}", max_bytes)


def _chain(error: BaseException, seen: set[int], depth: int) -> list[str]:
    """The texts of an exception and of what led to it, in the order in which they happened.

    `seen` are the ids of exceptions that were told already: causes may form a circle.
    """
    told = [_one(error, seen, depth)]
    before, link = _before(error)
    while before is not None:
        if id(before) in seen:
            told.append(f"[What comes before is told already]\n{link}")
            break
        if len(seen) >= MOST_EXCEPTIONS:
            told.append(f"[Earlier exceptions are left out]\n{link}")
            break
        told.append(_one(before, seen, depth) + link)
        before, link = _before(before)
    told.reverse()
    return told


def _before(error: BaseException) -> tuple[BaseException | None, str]:
    if error.__cause__ is not None:
        return error.__cause__, CAUSE
    return (None, "") if error.__suppress_context__ else (error.__context__, CONTEXT)


def _one(error: BaseException, seen: set[int], depth: int) -> str:
    seen.add(id(error))
    frames = "".join(_frames(error.__traceback__))
    head = f"Traceback (most recent call last):\n{frames}" if frames else ""
    text = head + _words(error)
    if isinstance(error, BaseExceptionGroup):
        text += "".join(_members(error, seen, depth))
    return text


def _words(error: BaseException) -> str:
    """What stands below the frames: type, message, notes."""
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    message = safe_str(error, MESSAGE_BYTES)
    text = storable(name, 255) + (f": {message}\n" if message else "\n")
    notes = getattr(error, "__notes__", None)
    if isinstance(notes, list | tuple):
        text += "".join(f"{storable(note, NOTE_BYTES)}\n" for note in notes[:MOST_NOTES] if isinstance(note, str))
        if len(notes) > MOST_NOTES:
            text += f"[{counted(len(notes) - MOST_NOTES, 'more note')}]\n"
    return text


def _members(group: BaseExceptionGroup[BaseException], seen: set[int], depth: int) -> Iterator[str]:
    for number, member in enumerate(group.exceptions, 1):
        if depth == DEEPEST or id(member) in seen or len(seen) >= MOST_EXCEPTIONS:
            yield f"  | [{counted(len(group.exceptions) - number + 1, 'more sub-exception')}]\n"
            return
        yield f"  +---------------- {number} ----------------\n"
        lines = "".join(_chain(member, seen, depth + 1)).splitlines()
        yield "".join(f"  | {line}\n" for line in lines)


def _frames(trace: TracebackType | None) -> Iterator[str]:
    places: list[tuple[str, int, str]] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    first = next((n for n, (file, _, _) in enumerate(places) if not file.startswith(_ENGINE)), 0)
    places = places[first:]
    if len(places) <= MOST_FRAMES:
        return (_frame(*place) for place in places)
    left_out = f"  [{counted(len(places) - MOST_FRAMES, 'frame')} left out]\n"
    inner = places[OUTERMOST - MOST_FRAMES :]
    return iter([*(_frame(*one) for one in places[:OUTERMOST]), left_out, *(_frame(*one) for one in inner)])


@lru_cache(maxsize=4096)
def _frame(file: str, line: int, name: str) -> str:
    source = linecache.getline(file, line).strip() if line is not None else ""
    text = f'  File "{file[-300:]}", line {line}, in {name}\n'
    return storable(text + (f"    {source[:200]}\n" if source else ""), 1024)


def _cut(told: list[str], max_bytes: int) -> str:
    """All of it or, where that is too much, the beginning of the root cause and the end of what it led to."""
    text = "".join(told)
    raw = text.encode()
    if len(raw) <= max_bytes:
        return text
    mark = b"\n[... cut ...]\n"
    head = max_bytes // 4
    tail = max_bytes - head - len(mark)
    return (raw[:head] + mark + raw[-tail:]).decode(errors="ignore")
