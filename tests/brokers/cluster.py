"""Servers that make one cluster: a keeper starts them (see `tests.servers`), a test kills one of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Node:
    """One server of a cluster, wherever it was started: its process is known by id."""

    name: str
    url: str
    pid: int
    admin: str = ""
    """Where an administrator asks, if that is elsewhere."""

    def kill(self) -> None:
        """As if its machine had lost power: no process of it says a word more."""
        pids = [self.pid]
        for pid in pids:
            pids += _children(pid)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def told(nodes: Sequence[Node]) -> str:
    """What a keeper tells about its cluster, where other recipes have one URL."""
    return json.dumps([asdict(node) for node in nodes])


def heard(text: str) -> list[Node]:
    return [Node(**node) for node in json.loads(text)]


def _children(pid: int) -> list[int]:
    """Of all its threads: any may have started some."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found
