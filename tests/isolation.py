"""Keep a run of the tests apart from the machine's user: his files, his settings, his temporary folder.

The run has a folder of its own, with a home and a folder for temporary files in it. All its processes inherit an
environment that leads there, and of the user's environment only the variables in `KEPT`. So the tests see the same on
every machine, and a run leaves nothing behind.

Each Python process of the run also notes what it opens elsewhere (see `outside/sitecustomize.py`), and the run fails if
there is anything.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import secrets
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from tests.servers import scratch

PREFIX = "busload-tests-"
FOLDER = "PYTEST_BUSLOAD_FOLDER"
"""The variable with the folder of the run."""

KEPT = (
    *("PATH", "LANG", "LC_*", "LD_*", "TERM", "USER", "LOGNAME", "SHELL", "CI"),
    *("PYTHON*", "PYTEST_*", "VIRTUAL_ENV", "HYPOTHESIS_*", "COVERAGE_*"),
    *("CHAOS_*", "TEST_SERVICEBUS_*"),  # which are ours: whoever sets them wants the tests to know
)

WATCH = Path(__file__).parent / "outside"


def enter() -> None:
    """Make the run's folder and lead this process there; those that it starts inherit it."""
    if FOLDER not in os.environ:
        remove_abandoned(scratch())
        _lead_into(scratch() / f"{PREFIX}{secrets.token_hex(4)}")
    tempfile.tempdir = None  # pytest has asked for it already, and it is remembered
    if not hasattr(sys.modules.get("sitecustomize"), "watch"):  # this process was not started by one of the run
        importlib.import_module("tests.outside.sitecustomize").watch()


def remove_abandoned(place: Path) -> None:
    """Remove the folders of killed runs, which may fill the memory. A run that lives keeps its folder locked."""
    for lock in place.glob(f"{PREFIX}*/lock"):
        with suppress(OSError), lock.open() as file:  # it is another user's, or was removed just now
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)


def keep_locked(run: Path) -> None:
    """Until this process ends, however it ends. The lock is there before its name is."""
    new = run / "lock.new"
    fcntl.flock(os.open(new, os.O_CREAT | os.O_RDONLY), fcntl.LOCK_EX)
    new.rename(run / "lock")


def folder() -> Path:
    return Path(os.environ[FOLDER])


def seen_outside() -> list[str]:
    """What processes of the run have opened outside of its folder: the path, and the test that did it."""
    return sorted(set((folder() / "outside.txt").read_text().splitlines()))


def _lead_into(run: Path) -> None:
    for path, mode in ((run, 0o755), (run / "home", 0o755), (run / "tmp", 0o1777)):  # servers run as other users
        path.mkdir()
        path.chmod(mode)
    keep_locked(run)
    notes = run / "outside.txt"
    notes.touch()
    notes.chmod(0o666)
    kept = {name: value for name, value in os.environ.items() if _is_kept(name)}
    paths = [str(WATCH), *filter(None, [kept.get("PYTHONPATH")])]
    os.environ.clear()
    os.environ.update(
        {
            **kept,
            FOLDER: str(run),
            "HOME": str(run / "home"),
            "TMPDIR": str(run / "tmp"),
            "BUSLOAD_SERVER_HOME": str(run / "servers"),
            "PYTHONPATH": os.pathsep.join(paths),
        }
    )


def _is_kept(name: str) -> bool:
    return any(name == kept or (kept.endswith("*") and name.startswith(kept[:-1])) for kept in KEPT)
