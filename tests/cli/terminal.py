"""A terminal of some width, for what a person at one sees."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field

import click
import pytest


@dataclass
class Screen:
    """What was printed, without style."""

    descriptor: int
    raw: bytearray = field(default_factory=bytearray)

    @property
    def text(self) -> str:
        return click.unstyle(self.raw.decode()).replace("\r\n", "\n")

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


@contextmanager
def terminal(columns: int = 80) -> Iterator[Screen]:
    """A pseudo terminal, and what was printed there when the block has ended."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 25, columns, 0, 0))
    screen = Screen(theirs)

    def read() -> None:
        while chunk := _read(ours):
            screen.raw.extend(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield screen
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)


def at_terminal(
    command: click.Command, arguments: list[str], columns: int = 80, **environment: str
) -> tuple[Screen, int]:
    """Run a command in this process as if at a terminal; what it printed there, and its exit code."""
    with pytest.MonkeyPatch.context() as patch, terminal(columns) as screen:
        # The width by COLUMNS: rich asks the process's own terminal, which is that of the test run.
        for name, value in {"COLUMNS": str(columns), "TERM": "xterm-256color", **environment}.items():
            patch.setenv(name, value)
        out = os.fdopen(os.dup(screen.descriptor), "w")
        with out, redirect_stdout(out), pytest.raises(SystemExit) as ended:
            command.main(arguments, prog_name="busload")
    return screen, int(ended.value.code or 0)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # how Linux says that the other side has closed
        return b""
