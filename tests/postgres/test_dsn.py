"""What is wrong with a DSN, or with the server it names, is told when the bus is opened, and never with a password."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from busload import BusloadError, Command, CommandBus, HandlerContext, Settings, SyncCommandBus, Worker
from busload.errors import DatabaseUnavailableError, DatabaseUnusableError, TransportMisconfiguredError
from busload.postgres.dsn import place, read
from busload.postgres.listen import READY, AsyncListener

CANARY = "c4n4ry"
PORT = "65533"
NOWHERE = f"127.0.0.1:{PORT}/db?connect_timeout=2"


async def opened(dsn: str | None, **options: object) -> None:
    async with CommandBus(dsn, settings=Settings(**options)):  # type: ignore[arg-type]
        pass


def opened_in_sync(dsn: str | None, **options: object) -> None:
    with SyncCommandBus(dsn, settings=Settings(**options)):  # type: ignore[arg-type]
        pass


# -- none, and an empty one --------------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", ["", "  ", "\t\n"])
async def test_an_empty_dsn_is_refused_and_starts_nothing(empty: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    ways: list[Callable[[], Awaitable[None]]] = [
        lambda: opened(empty, home=home),
        lambda: opened(None, home=home, database_url=empty),
        lambda: asyncio.to_thread(opened_in_sync, empty, home=home),
    ]
    for refused in ways:
        with pytest.raises(
            DatabaseUnusableError, match=r"The DSN is empty\. Wanted e\.g\. .* unset BUSLOAD_DATABASE_URL"
        ):
            await refused()
    assert not home.exists()


@pytest.mark.parametrize("how", ["variable", "option", "psql"])
def test_an_empty_dsn_at_the_shell_is_refused_and_starts_nothing(how: str, tmp_path: Path) -> None:
    env = os.environ | {"BUSLOAD_HOME": str(tmp_path / "home")}
    if how != "option":
        env["BUSLOAD_DATABASE_URL"] = ""
    arguments = {"variable": ["schema", "status"], "option": ["--dsn", "", "schema", "status"], "psql": ["db", "psql"]}
    said = shell(arguments[how], env)
    assert said.returncode in (1, 2)
    assert "The DSN is empty." in " ".join(said.stderr.split())
    assert not (tmp_path / "home").exists()


def test_an_empty_url_of_a_transport_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TransportMisconfiguredError, match="The URL of the transport is empty"):
        CommandBus("postgresql://host/db", transport="")
    monkeypatch.setenv("BUSLOAD_TRANSPORT_URL", " ")
    with pytest.raises(TransportMisconfiguredError, match="The URL of the transport is empty"):
        SyncCommandBus("postgresql://host/db")


def test_a_postgresql_that_happens_to_be_installed_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BUSLOAD_DATABASE_URL", raising=False)
    monkeypatch.setattr("busload.postgres.embedded.binaries.MODULE", "not_installed")
    with pytest.raises(DatabaseUnusableError, match=r"Pass a DSN .*pip install 'busload\[embedded\]'"):
        opened_in_sync(None, home=tmp_path / "home")
    assert not (tmp_path / "home").exists()


# -- what is wrong is told ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dsn", "told"),
    [
        ("postgresql+asyncpg://u@h/db", r"leave out \+asyncpg, so that it begins with postgresql://"),
        ("postgres+psycopg2://u@h/db", r"leave out \+psycopg2, so that it begins with postgres://"),
        ("mysql://u@h/db", "no connection string"),
        ("nonsense", "no connection string"),
        ("postgresql://u@h/db?sslmod=require", "did you mean sslmode?"),
        ("postgresql://u@h:54x2/db", "port that is no number"),
        ("postgresql://u@h:99999/db", "port that is no number"),
        ("host=h pasword=x", "did you mean password?"),
        ("postgresql://u@h/db?connect_timeout=5s", "connect_timeout that is no number"),
        ("postgresql://u@127.0.0.1:1/db?sslmode=on", "invalid sslmode value.*, database and options of the DSN"),
        ("service=there_is_none", 'definition of service "there_is_none" not found'),
    ],
)
async def test_open_refuses_a_dsn_that_makes_no_sense(dsn: str, told: str) -> None:
    with pytest.raises(DatabaseUnusableError, match=told):
        await opened(dsn)
    with pytest.raises(DatabaseUnusableError, match=told):
        opened_in_sync(dsn)


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://u:p%40ss@h:5432/db",
        "postgresql://u:a#b:c@h/db",
        "postgresql://u@[::1]:5432/db",
        "postgresql://h1:5432,h2:5433/db?target_session_attrs=read-write",
        "postgresql:///db?host=/var/run/postgresql&user=a@b",
        "postgresql://u%40azure@h/db",
        "host=/tmp dbname=db user=u password='a b@c/d'",
        "dbname=db",
    ],
)
def test_a_dsn_that_postgresql_understands_is_taken(dsn: str) -> None:
    assert read(dsn) == conninfo_to_dict(dsn)
    assert place(dsn).startswith("db at ")


class Url:
    """As SQLAlchemy and pydantic have one."""


@pytest.mark.parametrize(("found", "hint"), [(Url(), "Pass the text of it"), (Settings(), "Pass it as settings=")])
@pytest.mark.parametrize("face", [CommandBus, SyncCommandBus])
def test_a_dsn_that_is_no_text_is_refused(face: type[CommandBus | SyncCommandBus], found: object, hint: str) -> None:
    with pytest.raises(ValueError, match=rf"The DSN must be text, found a .*\.(Url|Settings)\. {hint}"):
        face(found)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"The DSN must be text, found a .*Url"):
        face(settings=Settings(database_url=Url()))  # type: ignore[arg-type]


def test_a_transport_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="transport must be a URL or a Transport, found an int"):
        CommandBus(NOWHERE, transport=5672)  # type: ignore[arg-type]


async def test_open_reports_a_server_that_is_not_there_with_its_address() -> None:
    dsn = f"postgresql://user:{CANARY}@127.0.0.1:{PORT}/shop"
    with pytest.raises(DatabaseUnavailableError, match=rf"shop at 127.0.0.1, port {PORT}.*open\(wait=30\)") as told:
        await opened(dsn)
    assert CANARY not in str(told.value)
    assert "?." not in str(told.value)
    with pytest.raises(DatabaseUnavailableError, match=rf"shop at 127.0.0.1, port {PORT}"):
        opened_in_sync(dsn)


async def test_open_reports_a_database_that_does_not_exist(dsn: str) -> None:
    name = str(conninfo_to_dict(dsn)["dbname"])
    wrong = dsn.replace(name, "missing")
    with pytest.raises(DatabaseUnusableError, match=r'does not let us into missing at .*"missing" does not exist'):
        await opened(wrong)
    with pytest.raises(DatabaseUnusableError, match="does not let us into missing at "):
        opened_in_sync(wrong)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_worker_tells_once_which_database_it_did_not_reach(processes: str, dsn: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "from busload import CommandBus\nbus = CommandBus()\nbus.handler('shop', 'Ok')(lambda command, ctx: None)\n"
    )
    worker = ["worker", "shop:bus", "--wait", "0.2", "--processes", processes]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    away = shell(worker, env | {"BUSLOAD_DATABASE_URL": f"postgresql://u@{NOWHERE}"})
    assert away.returncode == 1
    [error] = [line for line in away.stderr.splitlines() if line.startswith("Error: ")]
    assert error.count("reached") == 1
    assert f"The DSN names db at 127.0.0.1, port {PORT}" in error
    assert "--wait" in error
    wrong = dsn.replace(str(conninfo_to_dict(dsn)["dbname"]), "missing")
    missing = shell(worker, env | {"BUSLOAD_DATABASE_URL": wrong})
    assert missing.returncode == 1
    assert "does not let us into missing at " in missing.stderr


@contextmanager
def forwarding_later(target: str) -> Iterator[tuple[int, Callable[[], None]]]:
    """A port that is closed until it is opened, and then leads to the socket of a server."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))  # it is not free for others, and does not listen
    stack = [listening]

    def pump(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass
        for one in (source, sink):
            one.close()

    def serve() -> None:
        try:
            while True:
                client, _ = listening.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(target)
                stack.extend((client, server))
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()
        except OSError:
            pass

    def start() -> None:
        listening.listen()
        threading.Thread(target=serve, daemon=True).start()

    try:
        yield listening.getsockname()[1], start
    finally:
        for one in stack:
            one.close()


async def test_open_waits_for_a_server_as_long_as_it_is_told(dsn: str) -> None:
    found = conninfo_to_dict(dsn)
    for face in (CommandBus, SyncCommandBus):
        with forwarding_later(f"{found['host']}/.s.PGSQL.{found['port']}") as (port, start):
            bus = face(f"postgresql://{found['user']}@127.0.0.1:{port}/{found['dbname']}")
            timer = threading.Timer(0.5, start)
            timer.start()
            try:
                opening = bus.open(wait=60) if isinstance(bus, CommandBus) else asyncio.to_thread(bus.open, wait=60)
                await opening
                closing = bus.close() if isinstance(bus, CommandBus) else asyncio.to_thread(bus.close)
                await closing
            finally:
                timer.join()


async def test_a_bus_can_open_while_its_database_is_away() -> None:
    bus = await CommandBus(f"postgresql://u@{NOWHERE}").open(wait=None)
    await bus.close()
    SyncCommandBus(f"postgresql://u@{NOWHERE}").open(wait=None).close()


# -- never with a password ---------------------------------------------------------------------------------------

MISTYPED = [
    f"postgresql://user:{CANARY}@{NOWHERE}",  # right, but nobody is there
    f"postgresql://user:pa@{CANARY}@{NOWHERE}",
    f"postgresql://user:{CANARY}@x@{NOWHERE}",
    f"postgresql://user:pa/{CANARY}@{NOWHERE}",
    f"postgresql://user:{CANARY}/x@{NOWHERE}",
    f"postgresql://user:pa?{CANARY}@{NOWHERE}",
    f"postgresql://user:{CANARY}?x@{NOWHERE}",
    f"postgresql://user:1234/{CANARY}@{NOWHERE}",
    f"postgresql://user:{CANARY}%zz@{NOWHERE}",
    f"postgresql://user;{CANARY}@{NOWHERE}",
    f"postgresql://user:{CANARY}.{NOWHERE}",
    f"postgresql://user:{CANARY}:5432/db",
    f"postgresql:/user:{CANARY}@{NOWHERE}",
    f"postgresql//user:{CANARY}@{NOWHERE}",
    f"postgressql://user:{CANARY}@{NOWHERE}",
    f"postgresql+asyncpg://user:{CANARY}@{NOWHERE}",
    f"user:{CANARY}@{NOWHERE}",
    f"postgresql://user@{NOWHERE}&pasword={CANARY}",
    f"host=127.0.0.1 port={PORT} user=u password=a {CANARY}",
    f"host=127.0.0.1 port={PORT} user=u pasword={CANARY}",
    f"host=127.0.0.1 port={PORT} user=u password='{CANARY}",
    f"host=user:{CANARY}@127.0.0.1 port={PORT}",
    f"host=127.0.0.1 port={PORT} dbname=postgresql://user:{CANARY}@{NOWHERE}",
]


def words(error: BaseException | None) -> str:
    return "" if error is None else "".join(traceback.format_exception(error)) + repr(error)


async def listened(dsn: str) -> None:
    listening = asyncio.create_task(AsyncListener(dsn, [READY], lambda channel, payload: None).run())
    await asyncio.wait([listening], timeout=0.2)
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=False)


async def worked(dsn: str) -> None:
    bus = CommandBus(dsn)

    @bus.handler("shop", "Ok")
    async def ok(command: Command, ctx: HandlerContext) -> None:
        return None

    async with asyncio.timeout(0.5):
        await Worker(bus).run()


@pytest.mark.parametrize("dsn", MISTYPED)
async def test_a_mistyped_dsn_shows_no_password(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    """Neither in what is raised nor in what is logged, by whatever way it comes in."""
    caplog.set_level(logging.DEBUG)
    said = []
    ways: list[Callable[[], Awaitable[None]]] = [
        lambda: opened(dsn),
        lambda: asyncio.to_thread(opened_in_sync, dsn),
        lambda: listened(dsn),
        lambda: worked(dsn),
    ]
    for way in ways:
        with pytest.raises((BusloadError, TimeoutError, asyncio.CancelledError)) as told:
            await way()
        said.append(words(told.value))
    assert CANARY not in "".join(said)
    assert CANARY not in caplog.text


def test_a_mistyped_dsn_shows_no_password_at_the_shell(tmp_path: Path) -> None:
    """All at once: each start of the command line takes a second."""
    script = (
        "import os, sys, json\nfrom click.testing import CliRunner\nfrom busload.cli import main\n"
        "for dsn in json.load(sys.stdin):\n"
        "    for args, env in ((['--dsn', dsn, '--debug', 'schema', 'status'], {}),"
        " (['schema', 'status'], {'BUSLOAD_DATABASE_URL': dsn})):\n"
        "        done = CliRunner().invoke(main, args, env=env)\n"
        "        assert done.exit_code, (args, env)\n"
        "        print(done.output, done.exception)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(MISTYPED),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert CANARY not in done.stdout + done.stderr


def shell(arguments: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "busload.cli", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
