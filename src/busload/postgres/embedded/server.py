"""The PostgreSQL that starts when no DSN is given.

A process that uses the server holds a lease on it: a lock that the kernel drops when the process ends,
however it ends. A supervisor (see `supervisor.py`) runs the server for as long as there are leases, and a
small thread in every user starts the supervisor again should that be killed. So nothing here trusts a list
of pids, and nothing is left behind.

For Linux; elsewhere set `BUSLOAD_DATABASE_URL`.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Self
from urllib.parse import quote

import psycopg

from busload.errors import DatabaseUnusableError
from busload.postgres.embedded import supervisor
from busload.postgres.embedded.binaries import (
    Account,
    Binaries,
    account,
    find_binaries,
    make_folder,
    runnable_by,
    system_folder,
)
from busload.postgres.embedded.supervisor import Folder, try_lock
from busload.settings import server_home

__all__ = ["Binaries", "EmbeddedPostgres", "Info", "find_binaries"]

START_WITHIN = timedelta(seconds=120)  # crash recovery takes its time
GUARD_EVERY = timedelta(seconds=0.5)
POLL_EVERY = 0.02  # seconds
LONGEST_SOCKET_FOLDER = 85  # bytes: the path of the socket itself must stay below 108

DEFAULTS = {"max_connections": "200"}
OURS = ("listen_addresses", "port", "unix_socket_directories", "logging_collector")

log = logging.getLogger("busload")


@dataclass(frozen=True, slots=True)
class Info:
    """What there is to know about an embedded server. `users` are pids; None if the kernel does not tell."""

    version: str
    running: bool
    dsn: str
    data: Path
    sockets: Path
    log: Path
    postmaster: int | None
    users: tuple[int, ...] | None
    runs_as: str | None
    binaries: Path
    source: str

    @property
    def notice(self) -> str:
        """The line that tells people which database they are looking at."""
        return _notice(self.version, self.data)


class EmbeddedPostgres:
    """A PostgreSQL of our own below `home`, shared by all processes that name the same folder.

    Its socket opens for the user that it runs as and for root. PostgreSQL refuses to run as root: root's
    server runs as another user, and where that user cannot reach `home` the data lies in `BUSLOAD_SERVER_HOME`.

    Whichever process starts the server decides the `config`; that of others waits for their turn. A forked
    process holds no lease until it calls `start()` itself.
    """

    def __init__(self, home: Path, *, pg_bin: Path | None = None, config: Mapping[str, str] | None = None) -> None:
        self._home, self._pg_bin, self._config = home.expanduser().resolve(), pg_bin, dict(config or {})
        if refused := [name for name in OURS if name in self._config]:
            raise ValueError(f"The embedded server has a socket only, so {refused[0]!r} cannot be set.")
        self.forget_lease()
        _instances.add(self)

    def forget_lease(self) -> None:
        """Hold no lease, without giving one up: it is the parent's in a process that was forked."""
        self._lock, self._closing = threading.RLock(), threading.Event()
        self._lease: int | None = None
        self._guard: threading.Thread | None = None

    def start(self) -> Self:
        """Return once the server answers, be it started or found running; hold a lease on it until `close()`.

        Call it again at any time, say after an operator's stop, and it sees to it that the server is back.
        """
        with self._lock:
            try:
                with self._explained():
                    version = self._start()
            except BaseException:
                self.close()
                raise
            self._start_guard()
        if self._folder.path not in _announced:
            _announced.add(self._folder.path)
            log.info(_notice(version, self._folder.data))
        return self

    def dsn(self, database: str = "busload") -> str:
        host = quote(str(self._sockets))
        return f"postgresql://postgres@/{quote(database, safe='')}?host={host}&port=5432"

    def close(self) -> None:
        """Give up the lease. If it was the last one the server stops by itself; this does not wait for it."""
        with self._lock:
            if self._guard is not None:
                self._closing.set()
                self._guard.join()
                self._guard = None
                atexit.unregister(self.close)
            if self._lease is not None:
                _let_go(self._lease)
                self._lease = None

    def stop(self, timeout: timedelta = timedelta(seconds=40)) -> bool:
        """Stop the server now, also while others use it, and say whether it was running.

        Their connections break, and it stays stopped until somebody calls `start()`.
        """
        with self._explained():
            if not self._folder.supervisor.exists():
                return False
            deadline = time.monotonic() + timeout.total_seconds()
            late = f"The embedded PostgreSQL did not stop within {timeout}; {self._folder.log} may tell why."
            with self._mutex(deadline):
                running = supervisor.postmaster(self._folder.data) is not None
                if (lock := _try_lock(self._folder.supervisor, fcntl.LOCK_EX)) is None:
                    running = True
                    self._folder.stopped.touch()  # the supervisor looks for it, and so does every guard
                    lock = _lock_by(deadline, self._folder.supervisor, fcntl.LOCK_EX, late)
                supervisor.end_orphan(self._folder.data)
                _let_go(lock)
            return running

    @property
    def info(self) -> Info:
        with self._explained():
            try:
                running, version = True, self._greet()
            except psycopg.OperationalError:
                running, version = False, self._binaries.version
            return Info(
                version=version,
                running=running,
                dsn=self.dsn(),
                data=self._folder.data,
                sockets=self._sockets,
                log=self._folder.log,
                postmaster=supervisor.postmaster(self._folder.data),
                users=supervisor.holders(self._folder.lease),
                runs_as=self._user.name if self._user else None,
                binaries=self._binaries.path,
                source=self._binaries.source,
            )

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- where things are -----------------------------------------------------------------------------------

    @functools.cached_property
    def _folder(self) -> Folder:
        """Decide where the data lies: where it lies already, else in `home`, else where the server can go."""
        if os.geteuid() != 0 or (self._home / "data").exists():
            return Folder(self._home)
        elsewhere = server_home() / hashlib.sha256(os.fsencode(self._home)).hexdigest()[:12]
        if elsewhere.exists() or not account(self._home / "data").can_enter(self._home):
            return Folder(elsewhere)
        return Folder(self._home)

    @functools.cached_property
    def _user(self) -> Account | None:
        return account(self._folder.data) if os.geteuid() == 0 else None

    @functools.cached_property
    def _sockets(self) -> Path:
        """The data folder, which is private; a short name if a socket or a DSN cannot hold its path."""
        path = os.fsencode(self._folder.data)
        if len(path) <= LONGEST_SOCKET_FOLDER and not set(path) & set(b',"'):
            return self._folder.data
        return Path("/tmp") / f"busload-{hashlib.sha256(path).hexdigest()[:12]}"  # noqa: S108 made private, see supervisor

    @functools.cached_property
    def _binaries(self) -> Binaries:
        found = find_binaries(self._pg_bin)
        return runnable_by(self._user, found) if self._user else found

    # -- the steps of a start, in order ---------------------------------------------------------------------

    def _start(self) -> str:
        """Return the server's version once it answers."""
        deadline = time.monotonic() + START_WITHIN.total_seconds()
        self._refuse_another_major()
        if self._user is None:
            self._folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        else:
            make_folder(self._folder.path)
            if not self._user.can_enter(self._folder.path):
                raise PermissionError(f"user {self._user.name!r}, whom the server runs as, cannot get there")
        with self._mutex(deadline):
            if self._lease is None:
                busy = f"Somebody keeps {self._folder.lease} locked."
                self._lease = _lock_by(deadline, self._folder.lease, fcntl.LOCK_SH, busy)
            self._folder.stopped.unlink(missing_ok=True)
        return self._wait_until_it_answers(deadline)

    def _refuse_another_major(self) -> None:
        binaries = self._binaries
        with contextlib.suppress(FileNotFoundError):
            made_by = (self._folder.data / "PG_VERSION").read_text().strip()
            if made_by != binaries.major:
                there = system_folder(made_by) or f"the bin folder of a PostgreSQL {made_by}"
                raise DatabaseUnusableError(
                    f"The data in {self._folder.data} was made by PostgreSQL {made_by}, but the programs in "
                    f"{binaries.path} ({binaries.source}) are of {binaries.version}. "
                    f"To go on with this data, set BUSLOAD_PG_BIN to {there}. To begin anew, set "
                    "BUSLOAD_HOME to another folder; pg_dump and psql carry data from one to the other."
                )

    @contextlib.contextmanager
    def _mutex(self, deadline: float) -> Iterator[None]:
        late = f"Another process keeps {self._folder.mutex} locked: it starts or stops the server, and hangs."
        mutex = _lock_by(deadline, self._folder.mutex, fcntl.LOCK_EX, late)
        try:
            yield
        finally:
            _let_go(mutex)

    def _wait_until_it_answers(self, deadline: float) -> str:
        """Return the server's version. If the supervisor we launched ends it has given up, and so do we."""
        launched = False
        while True:
            if (lock := _try_lock(self._folder.supervisor, fcntl.LOCK_EX)) is not None:
                if launched:
                    _let_go(lock)
                    raise DatabaseUnusableError(f"The embedded PostgreSQL did not start. {self._last_words()}")
                # A server without supervisor still answers; nobody must take it for the new one, so it goes first.
                supervisor.end_orphan(self._folder.data)
                self._launch(lock)
                launched = True
            try:
                return self._greet()
            except psycopg.OperationalError as error:
                if time.monotonic() > deadline:
                    raise DatabaseUnusableError(f"It does not answer: {error}. {self._last_words()}") from error
                time.sleep(POLL_EVERY)

    def _launch(self, lock: int) -> None:
        folder, binaries, sockets = str(self._folder.path), str(self._binaries.path), str(self._sockets)
        ours = dict(zip(OURS, ("", "5432", sockets, "off"), strict=True))
        uid, gid = (self._user.uid, self._user.gid) if self._user else (None, None)
        try:
            config = {**DEFAULTS, **self._config, **ours}
            supervisor.launch(supervisor.Server(folder, binaries, sockets, config, uid, gid), lock)
        finally:
            _close(lock)

    def _greet(self) -> str:
        """Return the version of the server that answers, which has our database afterwards."""
        with psycopg.connect(self.dsn("postgres"), autocommit=True, connect_timeout=5) as conn:
            if not conn.execute("SELECT FROM pg_database WHERE datname = 'busload'").fetchall():
                # Whoever else starts at this moment creates it too; one of us is second.
                with contextlib.suppress(psycopg.errors.DuplicateDatabase, psycopg.errors.UniqueViolation):
                    conn.execute("CREATE DATABASE busload")
            return (conn.info.parameter_status("server_version") or "?").split()[0]

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, subprocess.SubprocessError) as error:
            raise DatabaseUnusableError(
                f"The embedded PostgreSQL cannot use {self._home}: {error}. "
                "Set BUSLOAD_HOME to a folder of yours, or BUSLOAD_DATABASE_URL to a server of yours."
            ) from error

    def _last_words(self) -> str:
        try:
            lines = self._folder.log.read_text(errors="replace").splitlines()[-15:]
        except OSError as error:
            return f"There is no log of it: {error}."
        return "\n".join((f"The end of {self._folder.log}:", *lines))

    # -- afterwards -----------------------------------------------------------------------------------------

    def _start_guard(self) -> None:
        if self._guard is None or not self._guard.is_alive():
            self._closing = threading.Event()
            self._guard = threading.Thread(target=self._bring_back, name="busload-embedded", daemon=True)
            self._guard.start()
            atexit.register(self.close)

    def _bring_back(self) -> None:
        """Launch the supervisor again whenever it died, but not after an operator's stop."""
        while not self._closing.wait(GUARD_EVERY.total_seconds()):
            try:
                if self._folder.stopped.exists():
                    continue
                if (lock := _try_lock(self._folder.supervisor, fcntl.LOCK_EX)) is not None:
                    log.warning("Starting the supervisor in %s again, it was gone", self._folder.path)
                    self._launch(lock)
            except FileNotFoundError as error:
                log.warning("The embedded PostgreSQL was removed while in use: %s", error)
                return
            except (OSError, subprocess.SubprocessError) as error:
                log.warning("The supervisor in %s did not start: %s", self._folder.path, error)


def _notice(version: str, data: Path) -> str:
    return f"using embedded PostgreSQL {version} in {data}, set BUSLOAD_DATABASE_URL for your own"


def _try_lock(path: Path, kind: int) -> int | None:
    descriptor = try_lock(path, kind)
    if descriptor is not None:
        _descriptors.add(descriptor)
    return descriptor


def _lock_by(deadline: float, path: Path, kind: int, late: str) -> int:
    while (descriptor := _try_lock(path, kind)) is None:
        if time.monotonic() > deadline:
            raise DatabaseUnusableError(late)
        time.sleep(POLL_EVERY)
    return descriptor


def _let_go(descriptor: int) -> None:
    # Unlocked, not only closed: a process forked meanwhile may have the descriptor too.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    _close(descriptor)


def _close(descriptor: int) -> None:
    _descriptors.discard(descriptor)
    os.close(descriptor)


_instances: weakref.WeakSet[EmbeddedPostgres] = weakref.WeakSet()
_descriptors: set[int] = set()
_announced: set[Path] = set()


def _forget_after_fork() -> None:
    """A child shares the locks of its parent, and would keep them alive beyond the parent's death."""
    for descriptor in tuple(_descriptors):
        _close(descriptor)
    for instance in _instances:
        instance.forget_lease()
    _announced.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
