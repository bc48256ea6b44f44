"""A terminal that a person looks at for a while: keys as they are pressed, and a change of its size."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

ESCAPES = {
    "A": "up",
    "B": "down",
    "C": "right",
    "D": "left",
    "H": "home",
    "F": "end",
    "Z": "back-tab",
}
"""How a terminal spells keys that are no characters, after ESC and `[` or `O`."""
NAMES = {"\t": "tab", "\r": "enter", "\n": "enter", " ": "space", "\x7f": "backspace"}


class Keyboard:
    """Waits for keys, for a change of the terminal's size, or for a `wake` from another thread."""

    def __init__(self) -> None:
        self._keys = sys.stdin.fileno()
        self._woken, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        self._rest = b""

    def wake(self) -> None:
        """Let `wait` return; any thread may call it."""
        with suppress(OSError):  # nobody waits any more, or so many wakes do that one more says nothing new
            self._wakes.send(b"!")

    def wait(self, seconds: float | None) -> list[str]:
        """The keys that were pressed. None at all if somebody woke us, or after so many seconds."""
        ready, _, _ = select.select([self._keys, self._woken], [], [], seconds)
        if self._woken in ready:
            self._woken.recv(4096)
        if self._keys not in ready:
            return []
        typed = os.read(self._keys, 4096)
        if not typed:
            raise EOFError("The terminal is gone.")
        return list(self._spelt(typed))

    def _spelt(self, typed: bytes) -> Iterator[str]:
        """The names of keys. The beginning of one that a slow line cuts is kept for the next time."""
        text = (self._rest + typed).decode(errors="ignore")
        self._rest = b""
        while text:
            if text[0] != "\x1b":
                yield NAMES.get(text[0], text[0])
                text = text[1:]
            elif text == "\x1b" or text[1] not in "[O":
                yield "escape"
                text = text[1:]
            else:
                size = next((at + 1 for at, sign in enumerate(text) if at > 1 and "@" <= sign <= "~"), None)
                if size is None:
                    self._rest = text.encode()
                    return
                if (name := ESCAPES.get(text[size - 1])) is not None:
                    yield name
                text = text[size:]

    def close(self) -> None:
        self._woken.close()
        self._wakes.close()


@contextmanager
def keyboard() -> Iterator[Keyboard]:
    """Read keys without waiting for a line, and without showing them; the terminal is as before in the end."""
    keys = Keyboard()
    before = termios.tcgetattr(sys.stdin)

    def resized(signum: int, frame: FrameType | None) -> Any:
        keys.wake()

    def ended(signum: int, frame: FrameType | None) -> Any:
        raise SystemExit(128 + signum)  # so that the terminal is given back

    handlers = {signal.SIGWINCH: resized, signal.SIGTERM: ended, signal.SIGHUP: ended}
    old = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        tty.setcbreak(sys.stdin)
        now = termios.tcgetattr(sys.stdin)
        now[6][termios.VSUSP] = b"\0"  # a stopped process would leave its screen behind
        termios.tcsetattr(sys.stdin, termios.TCSANOW, now)
        yield keys
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        for number, handler in old.items():
            signal.signal(number, handler)
        keys.close()
