"""A terminal that a person sits at: `busload` runs there, keys are pressed, and the screen is read."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pyte

from tests.given import WITHIN, until

KEYS = {"up": "\x1b[A", "down": "\x1b[B", "tab": "\t", "back-tab": "\x1b[Z"}


class WatchedTerminal:
    def __init__(self, columns: int, lines: int) -> None:
        self._ours, self.theirs = pty.openpty()
        self.raw = bytearray()
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self._drawing = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self._size(columns, lines)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def run(self, *words: str, **environment: str) -> None:
        here = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "busload.cli", *words],
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            start_new_session=True,
            env={**here, "TERM": "xterm-256color", **environment},
        )

    @property
    def lines(self) -> list[str]:
        with self._drawing:
            return [line.rstrip() for line in self._screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def press(self, *keys: str) -> None:
        for key in keys:
            os.write(self._ours, KEYS.get(key, key).encode())

    def shows(self, *texts: str) -> str:
        """Wait until all of these are on the screen."""

        def seen() -> bool:
            now = self.text
            return all(text in now for text in texts)

        try:
            until(seen)
        except AssertionError:
            raise AssertionError(f"never saw {texts}; the screen was:\n{self.text}") from None
        return self.text

    def resize(self, columns: int, lines: int) -> None:
        with self._drawing:
            self._screen.resize(lines, columns)
        self._size(columns, lines)
        assert self.process is not None
        self.process.send_signal(signal.SIGWINCH)

    def ended(self) -> int:
        assert self.process is not None
        return self.process.wait(WITHIN)

    def settings(self) -> object:
        return termios.tcgetattr(self.theirs)

    def _size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def _read(self) -> None:
        while True:
            try:
                chunk = os.read(self._ours, 65536)
            except OSError:  # how Linux says that the other side has closed
                return
            with self._drawing:
                self.raw.extend(chunk)
                self._stream.feed(chunk)

    def close(self) -> None:
        if self.process is not None:
            if self.process.poll() is None:
                self.process.kill()
            self.process.wait()
        os.close(self.theirs)
        self._reader.join(WITHIN)
        os.close(self._ours)


@contextmanager
def watched(columns: int = 120, lines: int = 30) -> Iterator[WatchedTerminal]:
    terminal = WatchedTerminal(columns, lines)
    try:
        yield terminal
    finally:
        terminal.close()
