"""Real servers for the tests, as plain processes on free ports, each with a data folder of its own.

One of a kind serves the whole run, also when it is spread over processes: the first that needs it starts this file as a
keeper of its own, which stops the server when the run's leading process tells it to, or is gone. A recipe says how a
server is started and ended; a fixture hands out its URL:

    @contextmanager
    def run_redis(home: Path) -> Iterator[str]:
        [port] = free_ports(1)
        with running([REDIS, "--port", str(port), "--dir", str(home)]) as process:
            wait_for_port(port, process)
            yield f"redis://127.0.0.1:{port}"

    @pytest.fixture(scope="session")
    def redis_url() -> str:
        return shared_server("redis", run_redis)
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest

LEADER = "PYTEST_BUSLOAD_LEADER"
"""The process that leads the run; those it starts inherit the variable."""

RABBITMQ = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
EPMD = Path("/usr/bin/epmd")
START_WITHIN, STOP_WITHIN = 90.0, 20.0
LOWEST_PORT = 10_000

MEMORY, ROOM = Path("/dev/shm"), 4 * 2**30

Recipe: TypeAlias = Callable[[Path], contextlib.AbstractContextManager[str]]
"""Given an empty folder: runs a server inside the context, whose value is its URL. A function at a module's top."""

_keepers: dict[Path, subprocess.Popen[bytes]] = {}


def scratch() -> Path:
    """Where servers may keep their folders: in memory if there is room, else on disk.

    Each test makes and drops a database of some 400 files. On a disk whose file system has no journal that soon takes
    half a second: it passes over the inodes of all that was deleted in the last minutes, one by one, for each new file.
    """
    roomy = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= ROOM
    return MEMORY if roomy else Path(tempfile.gettempdir())


@pytest.fixture(scope="session")
def rabbitmq_url() -> str:
    """Where the broker is. Give each test queues of its own."""
    return shared_server("rabbitmq", run_rabbitmq)


def shared_server(name: str, recipe: Recipe) -> str:
    """The URL of this run's server of that name; whoever asks first starts it."""
    from tests.conftest import server_home

    home = server_home(name)
    home.mkdir(mode=0o755, parents=True, exist_ok=True)
    with _alone(home / "start.lock"):
        if not (home / "url").exists():
            _start(home, recipe, leader=int(os.environ[LEADER]))
    return (home / "url").read_text()


@contextlib.contextmanager
def own_server(home: Path, recipe: Recipe) -> Iterator[str]:
    """The URL of a server for this process alone: it stops at the end, or when this process is gone."""
    home.mkdir(mode=0o755, parents=True, exist_ok=True)
    try:
        _start(home, recipe, leader=os.getpid())
        yield (home / "url").read_text()
    finally:
        stop_servers(home.parent)


def name_leader() -> None:
    os.environ.setdefault(LEADER, str(os.getpid()))


def is_leader() -> bool:
    return os.environ.get(LEADER) == str(os.getpid())


def leave_servers() -> None:
    """Called by each other process at its end: the keepers it has started go on, and are stopped by the leader.

    Else Python warns, as it ends, of processes that still run.
    """
    for keeper in _keepers.values():
        keeper.returncode = 0
    _keepers.clear()


def stop_servers(folder: Path) -> None:
    """Called by the leading process, when all others have ended."""
    homes = [file.parent for file in folder.glob("*/keeper")]
    for home in homes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((home / "keeper").read_text()), signal.SIGTERM)
    for home in homes:
        with _alone(home / "running.lock"):  # the keeper holds it while a process of the server lives
            if home in _keepers:
                _keepers.pop(home).wait()


# -- for recipes --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def running(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    quickly: bool = False,
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, ended with all it started; `quickly` for one that has nothing to finish."""
    process = subprocess.Popen([str(part) for part in command], env=env, cwd=cwd, start_new_session=True)
    try:
        yield process
    finally:
        _end(process, [signal.SIGKILL] if quickly else [signal.SIGTERM, signal.SIGKILL])


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    """Until this process listens there; if it has ended, somebody else does."""
    deadline = time.monotonic() + START_WITHIN
    while not listens(port) or process.poll() is not None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{process.args!r} does not listen on port {port}")
        time.sleep(0.05)


def free_ports(count: int) -> list[int]:
    """Below those that the kernel gives to outgoing connections, which would take one before its server listens there.

    Chosen by chance that no seed repeats: each process of the run would choose the same.
    """
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            port = LOWEST_PORT + secrets.randbelow(first_given - LOWEST_PORT)
            with contextlib.suppress(OSError):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
                found.append(port)
    return found


# -- RabbitMQ -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def run_rabbitmq(home: Path) -> Iterator[str]:
    """Debian's, with a name server of its own."""
    if not RABBITMQ.exists():
        raise RuntimeError(f"not in {RABBITMQ.parent}: `make test` installs it, see scripts/install-servers.sh")
    port, distribution, names = free_ports(3)
    with (
        running([EPMD, "-port", str(names), "-address", "127.0.0.1"], quickly=True),
        running([RABBITMQ], env=rabbitmq_environment(home, port, distribution, names), cwd=home) as broker,
    ):
        wait_for_port(port, broker)
        yield f"amqp://guest:guest@127.0.0.1:{port}/"


def rabbitmq_environment(home: Path, port: int, distribution: int, names: int) -> dict[str, str]:
    """Run it in its home: a node that dies leaves its dumps in the folder it was started from."""
    (home / "rabbitmq.conf").write_text(
        f"listeners.tcp.1 = 127.0.0.1:{port}\nloopback_users = none\ndisk_free_limit.absolute = 10MB\n"
    )
    (home / "plugins").write_text("[].\n")
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),  # of the cookie
        "LANG": "C.UTF-8",
        "ERL_EPMD_PORT": str(names),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODENAME": f"busload-{port}@localhost",
        "RABBITMQ_DIST_PORT": str(distribution),
        "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq.conf"),
        "RABBITMQ_CONF_ENV_FILE": str(home / "none.conf"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "plugins"),
        "RABBITMQ_MNESIA_BASE": str(home / "data"),
        "RABBITMQ_LOG_BASE": str(home / "log"),
        "RABBITMQ_PID_FILE": str(home / "pid"),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +sbwt none -kernel inet_dist_use_interface {127,0,0,1}",
    }


# -- the keeper ---------------------------------------------------------------------------------------------------


def keep(home: Path, leader: int, recipe: Recipe) -> None:
    """Run a server until SIGTERM, or until the leading process is gone."""
    signal.signal(signal.SIGTERM, _stop)
    (home / "keeper").write_text(str(os.getpid()))
    with _alone(home / "running.lock"), recipe(home) as url:
        (home / "url.new").write_text(url)
        (home / "url.new").rename(home / "url")
        while _lives(leader):
            time.sleep(0.1)


def _stop(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit


def _start(home: Path, recipe: Recipe, *, leader: int) -> None:
    task = f"{recipe.__module__}:{recipe.__name__}"
    with (home / "said.txt").open("ab") as said:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "tests.servers", str(home), str(leader), task],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    _keepers[home] = keeper
    deadline = time.monotonic() + START_WITHIN
    while not (home / "url").exists():
        if keeper.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"The server {home.name} did not start. It said:\n{(home / 'said.txt').read_text()[-4000:]}")
        time.sleep(0.05)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _end(process: subprocess.Popen[bytes], signals: Sequence[signal.Signals]) -> None:
    """Its data is thrown away, so it need not take its time."""
    for number in signals:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_WITHIN)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _recipe(task: str) -> Recipe:
    module, _, name = task.partition(":")
    found: Any = getattr(importlib.import_module(module), name)
    recipe: Recipe = found
    return recipe


if __name__ == "__main__":
    keep(Path(sys.argv[1]), int(sys.argv[2]), _recipe(sys.argv[3]))
