"""SIGTERM and SIGINT, for a process that runs nothing but a worker."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from busload.errors import InvalidOperationError

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """Calls `heard` with the number of the signal, counted from 1. The third signal ends the process.

    This works while the event loop is blocked, too. With `for_good` the process ends afterwards anyway, and another
    signal must not change its exit code.
    """

    def __init__(self, heard: Callable[[int], None], *, for_good: bool = False) -> None:
        self._heard, self._for_good = heard, for_good
        self._before: dict[int, Any] = {}
        self._count = 0

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise InvalidOperationError(
                "Signals reach the main thread only. Run this worker there, or without `signals` and call stop()."
            )
        self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._for_good else before or signal.SIG_DFL)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count == 2:
            for each in SIGNALS:  # the next signal ends the process
                signal.signal(each, signal.SIG_DFL)
        self._heard(self._count)
