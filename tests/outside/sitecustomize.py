"""Python runs this file at the start of each process of a test run, whose PYTHONPATH has its folder.

It notes what the process opens, lists, makes or removes outside of the run's folder, the repository and the system.
What is looked at but not opened, and what other programs do, leave no trace here; the environment of the run leads both
into its folder (see `tests/isolation.py`).
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

FOLDER = "PYTEST_BUSLOAD_FOLDER"
EVENTS = frozenset(
    ("open", "os.listdir", "os.scandir", "os.mkdir", "os.remove", "os.rmdir", "os.rename", "os.chmod", "os.chown")
)
DEVICES = ("/dev/null", "/dev/ptmx", "/dev/pts", "/dev/tty", "/dev/urandom")
SYSTEM = ("/bin", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr", *DEVICES)
SHORT_SOCKETS = "/tmp/busload-"  # the embedded server's, where the path of its folder is too long for a socket


def watch() -> None:
    run, repository = Path(os.environ[FOLDER]), Path(__file__).resolve().parents[2]
    python = [Path(path) for path in (sys.prefix, sys.base_prefix, *sys.path) if path]
    allowed = tuple(f"{path}/" for path in (run, repository, *python, *(path.resolve() for path in python), *SYSTEM))
    notes = run / "outside.txt"

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in EVENTS:
            return
        path = arguments[0]
        if path is None or isinstance(path, int):  # a descriptor
            return
        path = os.path.normpath(os.fsdecode(path))
        if not path.startswith("/"):  # in a folder that this process has opened or entered before
            return
        if f"{path}/".startswith(allowed) or path.startswith(SHORT_SOCKETS):
            return
        test = os.environ.get("PYTEST_CURRENT_TEST", "no test")
        with suppress(FileNotFoundError), notes.open("a") as file:  # after the run the folder is gone
            file.write(f"{event} {path} by {test}\n")

    sys.addaudithook(note)


if FOLDER in os.environ and __name__ == "sitecustomize":
    watch()
