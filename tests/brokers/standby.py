"""PostgreSQL twice: a primary that confirms only what its standby has written too, and the standby, to be promoted."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg

from busload.postgres.embedded.binaries import account, find_binaries, runnable_by
from tests.brokers.cluster import Node, told
from tests.given import until
from tests.servers import free_ports, running

DATABASE, STANDBY = "busload", "standby"


@contextlib.contextmanager
def run_primary_and_standby(home: Path) -> Iterator[str]:
    """`home` has to be a folder that other users can walk to: PostgreSQL does not run as root."""
    password, ports = secrets.token_hex(16), free_ports(2)
    programs = _Programs(home, password)
    admin, primary, standby = _url(password, ports[0], "postgres"), *(_url(password, port) for port in ports)
    with contextlib.ExitStack() as stack:
        programs.make_primary(home / "primary")
        first = stack.enter_context(running(programs.server(home / "primary", ports[0]), quickly=True))
        until(lambda: _answers(admin))
        _execute(admin, f"CREATE DATABASE {DATABASE}")
        programs.make_standby(home / "standby", of=admin)
        second = stack.enter_context(running(programs.server(home / "standby", ports[1]), quickly=True))
        # Only now, and only there: alone it would wait for ever, and so would the standby once it is promoted.
        _execute(primary, f"ALTER SYSTEM SET synchronous_standby_names = {STANDBY}", "SELECT pg_reload_conf()")
        until(lambda: _execute(primary, "SELECT FROM pg_stat_replication WHERE sync_state = 'sync'"))
        until(lambda: _answers(standby))
        yield told([Node("primary", primary, first.pid), Node("standby", standby, second.pid)])


def multi_host_dsn(nodes: Sequence[Node]) -> str:
    """One DSN for both: whoever connects goes on until he finds the one that can be written to."""
    parts = [urlsplit(node.url) for node in nodes]
    login = parts[0].netloc.rpartition("@")[0]
    hosts = ",".join(part.netloc.rpartition("@")[2] for part in parts)
    return f"postgresql://{login}@{hosts}/{DATABASE}?target_session_attrs=read-write"


def cut_off(primary: Node) -> None:
    """What it writes from now on reaches no standby, so it confirms nothing more."""
    for (pid,) in _execute(primary.url, "SELECT pid FROM pg_stat_replication"):
        os.kill(pid, signal.SIGSTOP)


def promote(standby: Node) -> None:
    """Return once it can be written to."""
    _execute(standby.url, "SELECT pg_promote(true, 60)")


class _Programs:
    """PostgreSQL's programs, run as another user if we are root."""

    def __init__(self, home: Path, password: str) -> None:
        found = find_binaries(None)
        self._prefix: list[str] = []
        self.secret = home / "password"
        self.secret.touch(mode=0o600)
        self.secret.write_text(password)
        if os.geteuid() == 0:
            user = account(home / "primary")
            found = runnable_by(user, found)
            self._prefix = ["setpriv", f"--reuid={user.uid}", f"--regid={user.gid}", "--clear-groups"]
            for path in (home, self.secret):
                os.chown(path, user.uid, user.gid)
        self._path = found.path

    def make_primary(self, data: Path) -> None:
        login = ("-U", "postgres", "--auth=scram-sha-256", f"--pwfile={self.secret}")
        self._run("initdb", "-D", data, "-E", "UTF8", "--locale=C", "--no-sync", *login)

    def make_standby(self, data: Path, *, of: str) -> None:
        self._run(
            "pg_basebackup", "-D", data, "-R", "-c", "fast", "--no-sync", "-d", f"{of}?application_name={STANDBY}"
        )

    def server(self, data: Path, port: int) -> list[str | Path]:
        # Without fsync: what a killed process has written is safe, only a machine's end would lose it.
        config = {"listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": "", "fsync": "off"}
        settings = [part for name, value in config.items() for part in ("-c", f"{name}={value}")]
        return [*self._prefix, self._path / "postgres", "-D", data, *settings]

    def _run(self, program: str, *arguments: str | Path) -> None:
        done = subprocess.run(
            [*self._prefix, str(self._path / program), *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stderr}")


def _url(password: str, port: int, database: str = DATABASE) -> str:
    return f"postgresql://postgres:{password}@127.0.0.1:{port}/{database}"


def _answers(url: str) -> bool:
    try:
        _execute(url, "SELECT 1")
    except psycopg.OperationalError:
        return False
    return True


def _execute(url: str, *statements: str) -> list[tuple[Any, ...]]:
    """The rows of the last one."""
    with psycopg.connect(url, autocommit=True) as conn:
        for statement in statements:
            cursor = conn.execute(statement.encode())
        return cursor.fetchall() if cursor.description is not None else []
