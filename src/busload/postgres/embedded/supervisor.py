"""The process that keeps one embedded PostgreSQL running for as long as somebody uses it.

It is the parent of `postgres`: it makes the data folder, starts the server again after a crash, and stops it
once nobody holds a lease or an operator says so. `server.py` starts this file as a script of its own,
detached from the process that needed the server first. It imports the standard library only. So it is up in a
few hundredths of a second, and an upgrade of the package while it runs does not matter to it.

All that the processes agree on lies in one folder, and every claim in it is a lock of the kernel, which ends
with its process:

    lease.lock        held shared by each process that uses the server
    supervisor.lock   held exclusively by the supervisor, handed over by the process that started it
    mutex.lock        held exclusively while somebody starts to use the server, or while it stops
    stopped           exists from an operator's stop until the next start
    server.log        what initdb, postgres and this process had to say
    data/             the data folder of PostgreSQL, mode 0700
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

SOCKET = ".s.PGSQL.5432"

LOOK_EVERY = 0.25  # seconds: how soon an unused server stops
SETTLED_AFTER = 1.0  # seconds: a server that lived this long had started well
GIVE_UP_AFTER = 5  # starts in a row that did not settle; whoever still uses the server will start us again
SHUT_DOWN_WITHIN = 30.0  # seconds: then the fast shutdown becomes an immediate one
LOG_BYTES = 8 * 1024 * 1024

_PR_SET_PDEATHSIG = 1


class Folder:
    """Where things lie; see the top of this module."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lease = path / "lease.lock"
        self.supervisor = path / "supervisor.lock"
        self.mutex = path / "mutex.lock"
        self.stopped = path / "stopped"
        self.log = path / "server.log"
        self.data = path / "data"


@dataclass(frozen=True, slots=True)
class Server:
    """What to run, and as whom: `uid` and `gid` are given if we are root, which PostgreSQL refuses."""

    folder: str
    binaries: str
    sockets: str
    config: dict[str, str]
    uid: int | None
    gid: int | None


def launch(server: Server, lock: int) -> None:
    """Start a supervisor and hand it `lock`, the descriptor that holds `supervisor.lock`.

    The lock passes without a gap: it is free again exactly when that process is dead. Afterwards close the
    descriptor, but do not unlock it.
    """
    with _open_log(Folder(Path(server.folder)).log) as log:
        subprocess.run(
            [sys.executable, "-I", "-S", __file__, str(lock), json.dumps(asdict(server))],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            pass_fds=(lock,),
            start_new_session=True,
            check=True,
        )


def try_lock(path: Path, kind: int) -> int | None:
    """Lock a file until the descriptor returned is closed, or return None at once if somebody else holds it.

    The file is its owner's only, for whoever can open it can lock it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def holders(path: Path) -> tuple[int, ...] | None:
    """Return the pids that hold a shared lock on a file, as far as the kernel shows them."""
    try:
        found = path.stat()
        locks = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    # 14: FLOCK  ADVISORY  READ 4711 fe:00:1311 0 EOF
    inode = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    held = (line.split() for line in locks if "FLOCK" in line)
    return tuple(sorted({int(lock[4]) for lock in held if lock[3] == "READ" and lock[5] == inode}))


def postmaster(data: Path) -> int | None:
    """Return the pid of the postgres that serves this folder, be its supervisor alive or dead."""
    pid = _noted_pid(data / "postmaster.pid")
    return pid if pid is not None and _serves(pid, data) else None


def end_orphan(data: Path) -> None:
    """Shut down a postgres whose supervisor was killed, and return once it is gone."""
    pid, began = postmaster(data), time.monotonic()
    while pid is not None and postmaster(data) == pid:
        hurry = time.monotonic() - began > SHUT_DOWN_WITHIN
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGQUIT if hurry else signal.SIGINT)
        time.sleep(0.05)


class Supervisor:
    """One server, from its first start to its stop. Lives in the main thread of a process of its own."""

    def __init__(self, server: Server, lock: int) -> None:
        self._server, self._lock = server, lock
        self._folder = Folder(Path(server.folder))
        self._told_to_end = False
        # Waited for in `_wait`, hence blocked; a SIGCHLD that an ancestor ignored would never arrive.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._signals = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)

    def run(self) -> None:
        """Return when the server has stopped and should stay so, or when it does not start."""
        if not self._folder.data.exists():
            self._create_data()
        end_orphan(self._folder.data)
        failures = 0
        while not self._over():
            began = time.monotonic()
            postgres = self._spawn()
            while postgres.poll() is None:
                if self._over():
                    self._shut_down(postgres)
                    return
                self._wait(LOOK_EVERY)
            _note(f"postgres ended with {postgres.returncode} while it was in use")
            failures = 0 if time.monotonic() - began > SETTLED_AFTER else failures + 1
            if failures == GIVE_UP_AFTER:
                raise SystemExit(1)
            # The backends of a killed postmaster may need a moment to notice and leave.
            self._wait(0.05 * 2**failures)

    def _over(self) -> bool:
        return self._told_to_end or self._displaced() or self._folder.stopped.exists() or self._unused()

    def _displaced(self) -> bool:
        """Say whether our folder was taken away, or replaced by another one, which then is not ours to touch."""
        try:
            return not os.path.samestat(os.fstat(self._lock), self._folder.supervisor.stat())
        except FileNotFoundError:
            return True

    def _unused(self) -> bool:
        """Say whether no lease is left. Then the mutex stays ours until we end, so nobody can start."""
        if self._leased() or (mutex := try_lock(self._folder.mutex, fcntl.LOCK_EX)) is None:
            return False
        if self._leased():
            os.close(mutex)
            return False
        return True

    def _leased(self) -> bool:
        if (lease := try_lock(self._folder.lease, fcntl.LOCK_EX)) is None:
            return True
        os.close(lease)
        return False

    def _create_data(self) -> None:
        """Make the data folder under another name first: a half-made one is never mistaken for data."""
        for abandoned in self._folder.path.glob("new-*"):
            shutil.rmtree(abandoned, ignore_errors=True)
        fresh = tempfile.mkdtemp(prefix="new-", dir=self._folder.path)
        if self._server.uid is not None and self._server.gid is not None:
            os.chown(fresh, self._server.uid, self._server.gid)
        initdb = self._start(
            "initdb", "-D", fresh, "-U", "postgres", "--auth-local=trust", "--auth-host=reject",
            "--encoding=UTF8", "--locale=C", "--data-checksums",
        )  # fmt: skip
        if initdb.wait() != 0:
            raise SystemExit("initdb failed")
        Path(fresh).rename(self._folder.data)
        folder = os.open(self._folder.path, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    def _spawn(self) -> subprocess.Popen[bytes]:
        data, sockets = self._folder.data, Path(self._server.sockets)
        if sockets != data:
            _make_private(sockets, self._server)
        # PostgreSQL takes a pid that exists for a running server. Of a dead pid it takes care itself.
        for note in (data / "postmaster.pid", sockets / f"{SOCKET}.lock"):
            pid = _noted_pid(note)
            if pid is not None and Path(f"/proc/{pid}").exists() and not _serves(pid, data):
                _note(f"{note} names process {pid}, which is not our postgres: removed")
                note.unlink()
        settings = [part for name, value in self._server.config.items() for part in ("-c", f"{name}={value}")]
        return self._start("postgres", "-D", str(data), *settings)

    def _start(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Run a program of PostgreSQL that shuts down by itself if we are killed."""
        switch: dict[str, Any] = {}
        if self._server.uid is not None:
            switch = {"user": self._server.uid, "group": self._server.gid, "extra_groups": []}
            switch["env"] = {"PATH": os.defpath, "LC_ALL": "C"}  # nothing else: it may hold secrets of root
        return subprocess.Popen(
            [str(Path(self._server.binaries) / program), *arguments],
            stdin=subprocess.DEVNULL,
            cwd="/",
            preexec_fn=_bound_to(os.getpid(), self._signals),
            **switch,
        )

    def _shut_down(self, postgres: subprocess.Popen[bytes]) -> None:
        # A server that may clean up would remove the socket of the one that has its place now.
        postgres.send_signal(signal.SIGKILL if self._displaced() else signal.SIGINT)
        try:
            postgres.wait(SHUT_DOWN_WITHIN)
        except subprocess.TimeoutExpired:
            postgres.send_signal(signal.SIGQUIT)
            postgres.wait()
        if Path(self._server.sockets) != self._folder.data:
            shutil.rmtree(self._server.sockets, ignore_errors=True)

    def _wait(self, seconds: float) -> None:
        """Wait until a child ends, somebody signals us or the time is up."""
        received = signal.sigtimedwait(self._signals, seconds)
        if received is not None and received.si_signo != signal.SIGCHLD:
            self._told_to_end = True


def _open_log(log: Path) -> BinaryIO:
    """Open the log for its owner only, because it may hold statements. A log that is too long is put aside."""
    if log.exists() and log.stat().st_size > LOG_BYTES:
        log.replace(log.with_suffix(".log.1"))
    return os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab")


def _bound_to(parent: int, blocked: set[signal.Signals]) -> Callable[[], None]:
    """Make what runs between fork and exec, after the switch of user, which would clear what is set here."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def bind() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)
        if os.getppid() != parent:  # killed before the line above could tell
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)

    return bind


def _noted_pid(note: Path) -> int | None:
    try:
        return int(note.read_text().split("\n", 1)[0])
    except (OSError, ValueError):
        return None


def _serves(pid: int, data: Path) -> bool:
    """Say whether a process is the postmaster of this folder: it runs as its owner and stands in it."""
    process = Path(f"/proc/{pid}")
    try:
        program = os.fsdecode((process / "cmdline").read_bytes().split(b"\0", 1)[0])
        if Path(program).name != "postgres" or process.stat().st_uid != data.stat().st_uid:
            return False
        return (process / "cwd").readlink() == data.resolve()
    except PermissionError:
        return True
    except OSError:
        return False


def _make_private(sockets: Path, server: Server) -> None:
    """Make a folder for the socket that nobody else can enter; refuse one that somebody else made there."""
    sockets.mkdir(mode=0o700, exist_ok=True)
    owner = os.geteuid() if server.uid is None else server.uid
    if sockets.lstat().st_uid == os.geteuid():
        os.chown(sockets, owner, -1, follow_symlinks=False)
    found = sockets.lstat()
    if sockets.is_symlink() or found.st_uid != owner or found.st_mode & 0o077:
        raise SystemExit(f"{sockets} is somebody else's. Remove it, or choose a shorter path for the data.")


def _note(message: str) -> None:
    sys.stderr.write(f"busload supervisor: {message}\n")
    sys.stderr.flush()


def main() -> None:
    lock, server = int(sys.argv[1]), Server(**json.loads(sys.argv[2]))
    if os.fork() != 0:  # so that the process that started us need not reap us
        os._exit(0)
    os.set_inheritable(lock, False)
    Supervisor(server, lock).run()


if __name__ == "__main__":
    main()
