"""A run of the tests sees nothing of the machine's user, and leaves nothing with him."""

from __future__ import annotations

import ctypes
import os
import random
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.isolation import PREFIX, keep_locked, remove_abandoned
from tests.servers import LEADER, free_ports, is_leader, running, stop_servers, wait_for_port

ROOT = Path(__file__).parent.parent
LONGEST = 600.0

A_BIT_OF_EVERYTHING = (
    "tests/test_bench.py::test_the_table_shows_how_many_times_as_fast_we_are",
    "tests/cli/test_demo.py::test_the_demo_needs_nothing_and_its_batch_can_be_looked_at_afterwards",
)
"""The benchmark's report; an embedded server that a process starts, with workers on it, and `busload` at a shell."""

POISON = {
    ".cache/busload-bench/pgqueuer/failed": "a peer that was never installed here",
    ".config/matplotlib/matplotlibrc": "backend: nonsense",
    ".erlang.cookie": "not ours",
    ".local/share/busload/data/PG_VERSION": "9",
    ".pg_service.conf": "[wrong]\nhost=127.0.0.1\nport=1\n",
    ".pgpass": "*:*:*:*:wrong",
    ".psqlrc": "\\quit",
    ".postgresql/root.crt": "no certificate",
}


@pytest.mark.timeout(LONGEST)
def test_a_run_reads_and_writes_nothing_of_its_users(tmp_path: Path) -> None:
    """Whatever he has set leads astray, and the kernel tells of every file of his that is opened, by any program."""
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    temporary.mkdir()
    for name, text in POISON.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    folders = {f"XDG_{kind}_HOME": str(home / "xdg" / kind) for kind in ("CACHE", "CONFIG", "DATA", "STATE")}
    for folder in folders.values():
        Path(folder).mkdir(parents=True)
    settings = {
        "BUSLOAD_BENCH_HOME": str(home / ".cache/busload-bench"),
        "BUSLOAD_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/nowhere",
        "BUSLOAD_HOME": str(home / "busload"),
        "BUSLOAD_PG_BIN": str(home),
        "BUSLOAD_SERVER_HOME": str(home / "servers"),
        "BUSLOAD_TRANSPORT_URL": "redis://127.0.0.1:1",
        "COLUMNS": "20",
        "FORCE_COLOR": "1",
        "PGOPTIONS": "-c search_path=nowhere",
        "PGSERVICE": "wrong",
        "http_proxy": "http://127.0.0.1:1",
    }

    with opened(home) as seen:
        ran = run_of(*A_BIT_OF_EVERYTHING, HOME=str(home), TMPDIR=str(temporary), **folders, **settings)

    assert ran.returncode == 0, ran.stdout
    assert f"{len(A_BIT_OF_EVERYTHING)} passed" in ran.stdout
    assert not seen
    assert not list(temporary.iterdir())


RECIPE = """
from contextlib import contextmanager

@contextmanager
def run_nothing(home):
    yield "nothing://"
"""
LEAVING = """
import sys
from pathlib import Path
from tests import servers
from nothing import run_nothing

servers._start(Path(sys.argv[1]), run_nothing, leader=int(sys.argv[2]))
if sys.argv[3] == "left":
    servers.leave_servers()
"""


@pytest.mark.parametrize("end", ["left", "forgotten"])
def test_a_process_that_leaves_its_servers_to_the_leader_ends_without_a_warning(tmp_path: Path, end: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "nothing.py").write_text(RECIPE)
    paths = os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT), str(tmp_path)])
    try:
        ran = subprocess.run(
            [sys.executable, "-W", "error::ResourceWarning", "-c", LEAVING, str(home), str(os.getpid()), end],
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        stop_servers(tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ("is still running" in ran.stderr) is (end == "forgotten"), ran.stderr


TELLTALES = """
import subprocess, sys
from pathlib import Path

OUTSIDE = Path({outside!r})

def test_that_reads_a_file():
    OUTSIDE.joinpath("read").read_text()

def test_whose_process_makes_a_folder():
    subprocess.run([sys.executable, "-c", f"import os; os.mkdir({{str(OUTSIDE / 'made')!r}})"], check=True)

def test_that_is_content_with_its_own(tmp_path):
    tmp_path.joinpath("own").write_text("fine")
    tmp_path.joinpath("own").unlink()
"""


@pytest.mark.timeout(LONGEST)
def test_a_run_that_opened_something_outside_fails_and_names_the_test(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "read").write_text("whose?")
    telltales = tmp_path / "test_telltales.py"
    telltales.write_text(TELLTALES.format(outside=str(outside)))

    ran = run_of("-c", str(ROOT / "pyproject.toml"), "-p", "tests.conftest", str(telltales))

    assert "3 passed" in ran.stdout
    assert ran.returncode == 1
    [_, told] = ran.stdout.split("opened outside of the run's folder")
    lines = [line.replace(str(outside), "") for line in told.splitlines() if str(outside) in line]
    found = {tuple(re.split(r" by .*::| \(call\)", line)[:2]) for line in lines}
    assert found == {
        ("open /read", "test_that_reads_a_file"),
        ("os.mkdir /made", "test_whose_process_makes_a_folder"),
    }


def test_a_process_that_was_only_spread_over_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a run within the run, as a test may start it: the folder is removed by the process that made it."""
    monkeypatch.setenv(LEADER, str(os.getpid()))
    assert is_leader()
    monkeypatch.setenv(LEADER, str(os.getppid()))
    assert not is_leader()


def test_what_a_killed_run_left_behind_is_removed_by_the_next(tmp_path: Path) -> None:
    killed, alive, others = (tmp_path / name for name in (f"{PREFIX}1", f"{PREFIX}2", "somebody-elses"))
    for folder in (killed, alive, others):
        (folder / "tmp").mkdir(parents=True)
        (folder / "lock").touch()
    keep_locked(alive)

    remove_abandoned(tmp_path)

    assert sorted(tmp_path.iterdir()) == [alive, others]


def test_no_outgoing_connection_takes_the_port_of_a_server() -> None:
    """Nor another process of the run, whose seed may be the same: the port is free until its server listens."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    random.seed(1)
    one = free_ports(20)
    random.seed(1)
    assert len({*one, *free_ports(20)}) > 20
    assert max(one) < first_given


def test_a_server_that_could_not_listen_is_not_taken_for_another_that_does() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, running([sys.executable, "-c", "raise OSError"]) as ended:
        ended.wait()
        with pytest.raises(RuntimeError, match="does not listen"):
            wait_for_port(other.getsockname()[1], ended)


def run_of(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A run of the tests that begins as one on a user's machine does: nothing leads it into this run's folder."""
    inherited = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    paths = [path for path in sys.path if path.endswith("/src")]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", *arguments],
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONGEST,
    )


@contextmanager
def opened(folder: Path) -> Iterator[set[str]]:
    """The names in a folder, at any depth, that any process opens, makes, changes or removes meanwhile."""
    libc = ctypes.CDLL(None)  # Python has no inotify
    watcher = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    folders = {
        libc.inotify_add_watch(watcher, os.fsencode(path), ctypes.c_uint32(ALL_EVENTS)): path
        for path in (folder, *folder.rglob("*"))
        if path.is_dir()
    }
    assert min(folders) > 0
    seen: set[str] = set()
    yield seen
    try:
        seen.update(_read(watcher, folders))
    finally:
        os.close(watcher)


ALL_EVENTS = 0xFFF
EVENT = struct.Struct("iIII")


def _read(watcher: int, folders: dict[int, Path]) -> Iterator[str]:
    try:
        told = os.read(watcher, 2**20)
    except BlockingIOError:
        return
    while told:
        watch, _, _, length = EVENT.unpack_from(told)
        name = told[EVENT.size : EVENT.size + length].rstrip(b"\0")
        yield str(folders[watch] / os.fsdecode(name))
        told = told[EVENT.size + length :]
