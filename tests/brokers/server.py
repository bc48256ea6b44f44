"""A broker that one test has for itself: it may be killed, frozen and started again with the files it had."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tests.servers import free_ports

READY_WITHIN = 30.0


class OwnServer(ABC):
    """Starts at a free port that stays its own: a client finds it there again."""

    url: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        [self.port] = free_ports(1)
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> Sequence[str | Path]:
        """What is run."""

    def start(self) -> None:
        self.launch()
        self.wait()

    def launch(self) -> None:
        with (self.folder / "said.txt").open("ab") as said:
            self._process = subprocess.Popen(
                [str(part) for part in self.command()], stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )

    def wait(self) -> None:
        """Until it is ready."""
        deadline = time.monotonic() + READY_WITHIN
        while not self.is_ready():
            if self._running().poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"It did not start. It said:\n{(self.folder / 'said.txt').read_text()[-4000:]}")
            time.sleep(0.02)

    def is_ready(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    @property
    def pid(self) -> int:
        return self._running().pid

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """Return once it stands still: a thread that is busy could still answer."""
        pid = self._running().pid
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED)

    def thaw(self) -> None:
        os.kill(self._running().pid, signal.SIGCONT)

    async def restart(self) -> None:
        self.kill()
        self.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "it is not started"
        return self._process

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.send_signal(signal.SIGCONT)  # a frozen one does not hear
            self._process.wait()
            self._process = None
