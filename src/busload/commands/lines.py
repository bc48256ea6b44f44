"""Lines for a shell in texts for people: each calls the command line as it was called itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

BUSLOAD = "busload"
called: ContextVar[str] = ContextVar("busload_called", default=BUSLOAD)
"""What the command line was called as in this process, such as `python manage.py busload`."""

_IN_A_TEXT = re.compile(r"(?<=`)busload [a-z][^`]*(?=`)")
_WORKERS = ("busload worker MODULE:BUS", "busload worker app:bus")


@contextmanager
def called_as(program: str) -> Iterator[None]:
    """Let lines within this block, and in what it starts, call this program. Its worker is `PROGRAM_worker`."""
    token = called.set(program)
    try:
        yield
    finally:
        called.reset(token)


def line_as_called(line: str) -> str:
    """A line that begins with `busload`, for the program that was called."""
    program = called.get()
    if program == BUSLOAD or not line.startswith(f"{BUSLOAD} "):
        return line
    for worker in _WORKERS:
        if line.startswith(worker):
            return f"{program}_worker{line.removeprefix(worker)}"
    return program + line.removeprefix(BUSLOAD)


def as_called(text: str) -> str:
    """A text with such lines between backticks."""
    return text if called.get() == BUSLOAD else _IN_A_TEXT.sub(lambda found: line_as_called(found[0]), text)
