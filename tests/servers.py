"""A real RabbitMQ for the tests: Debian's, as plain processes on free ports, with a data folder of its own.

One serves the whole run, also when it is spread over processes: the first that needs it starts this file as a keeper
of its own, which stops the broker when the run's leading process tells it to, or is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

LEADER = "PYTEST_BUSLOAD_LEADER"
"""The process that leads the run; those it starts inherit the variable."""

RABBITMQ = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
EPMD = Path("/usr/bin/epmd")
START_WITHIN, STOP_WITHIN = 90.0, 20.0

_keepers: list[subprocess.Popen[bytes]] = []


@pytest.fixture(scope="session")
def rabbitmq_url() -> str:
    """Where the broker is. Give each test queues of its own."""
    from tests.conftest import server_home

    if not RABBITMQ.exists():
        pytest.fail(f"RabbitMQ is not in {RABBITMQ.parent}: `make test` installs it, see scripts/install-servers.sh.")
    home = server_home("rabbitmq")
    home.mkdir(mode=0o755, parents=True, exist_ok=True)
    with _alone(home / "start.lock"):
        if not (home / "url").exists():
            _start(home)
    return (home / "url").read_text()


def name_leader() -> None:
    os.environ.setdefault(LEADER, str(os.getpid()))


def stop_rabbitmq(home: Path) -> None:
    """Called by the leading process, when all others have ended."""
    if not (home / "keeper").exists():
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(int((home / "keeper").read_text()), signal.SIGTERM)
    with _alone(home / "running.lock"):  # the keeper holds it while a process of the broker lives
        for keeper in _keepers:
            keeper.wait()


def _start(home: Path) -> None:
    with (home / "said.txt").open("ab") as said:
        keeper = subprocess.Popen(
            [sys.executable, __file__, str(home), os.environ[LEADER]],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    _keepers.append(keeper)
    deadline = time.monotonic() + START_WITHIN
    while not (home / "url").exists():
        if keeper.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"RabbitMQ did not start. It said:\n{(home / 'said.txt').read_text()[-4000:]}")
        time.sleep(0.05)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def keep(home: Path, leader: int) -> None:
    """Run a broker until SIGTERM, or until the leading process is gone."""
    stopping = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    (home / "keeper").write_text(str(os.getpid()))
    with _alone(home / "running.lock"):
        port, distribution, names = _free_ports(3)
        epmd = subprocess.Popen([str(EPMD), "-port", str(names), "-address", "127.0.0.1"])
        broker = subprocess.Popen(
            [str(RABBITMQ)], env=_environment(home, port, distribution, names), start_new_session=True
        )
        try:
            while not stopping and broker.poll() is None and _lives(leader):
                if not (home / "url").exists() and _listens(port):
                    (home / "url.new").write_text(f"amqp://guest:guest@127.0.0.1:{port}/")
                    (home / "url.new").rename(home / "url")
                time.sleep(0.1)
        finally:
            _end(broker)
            epmd.kill()
            epmd.wait()


def _environment(home: Path, port: int, distribution: int, names: int) -> dict[str, str]:
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
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +sbwt none",
    }


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _end(broker: subprocess.Popen[bytes]) -> None:
    """Its data is thrown away, so it need not take its time."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(broker.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            broker.wait(STOP_WITHIN)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(broker.pid, signal.SIGKILL)


if __name__ == "__main__":
    keep(Path(sys.argv[1]), int(sys.argv[2]))
