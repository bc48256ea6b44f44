"""`busload worker` at a shell: real processes and real signals."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import click
import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from busload import BatchCommand, BatchStatus, SyncCommandBus
from busload.cli import worker as cli_worker
from busload.commands import claim, rescue, settle
from busload.commands import search as report
from busload.commands.execution import Transition
from busload.sync.plan import perform
from tests.cli.conftest import Busload, Spawn, Until
from tests.given import DOMAIN, WITHIN, Database, closed_to_newcomers, pending
from tests.servers import free_ports

APPLICATION = """
import asyncio
import gc
import threading
from pathlib import Path

from busload import CommandBus

bus = CommandBus()
empty = CommandBus()
number = 42

@bus.handler("payments", "Debit")
async def debit(command, ctx):
    await asyncio.sleep(0.02)

@bus.handler("payments", "Wait")
async def wait(command, ctx):
    Path("begun").touch()
    while not Path("go").exists():
        await asyncio.sleep(0.01)

@bus.handler("payments", "Block")
def block(command, ctx):
    Path("begun").touch()
    threading.Event().wait()

@bus.handler("payments", "Stick", timeout=0.01)
def stick(command, ctx):
    threading.Event().wait()

@bus.handler("payments", "CountFrozen")
async def count_frozen(command, ctx):
    return {"frozen": gc.get_freeze_count(), "others": len(gc.get_objects())}

@bus.handler("crm", "Push")
async def push(command, ctx):
    pass
"""


@pytest.fixture(autouse=True)
def app(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APPLICATION)


def workers(database: Database) -> list[int]:
    """The processes that serve payments, from the names under which they registered: host:pid:random."""
    with database._conn.transaction():
        return [int(name.split(":")[1]) for name in perform(database._conn, report.living_workers(DOMAIN))]


def completed(database: Database) -> int:
    return int(database.value("SELECT coalesce(sum(completed_count), 0) FROM busload.batch"))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("processes", [1, 2])
def test_sigterm_lets_commands_finish_and_leaves_nothing_leased(
    spawn: Spawn, until: Until, sync_bus: SyncCommandBus, database: Database, processes: int
) -> None:
    sync_bus.create_batch(DOMAIN, [BatchCommand("Debit") for _ in range(5000)])
    process = spawn("worker", "app:bus", "--domains", DOMAIN, "--concurrency", 10, "--processes", processes)
    until(lambda: len(workers(database)) == processes and completed(database))

    process.terminate()

    assert process.wait(timeout=WITHIN) == 0
    assert workers(database) == []
    assert database.count("lease") == 0
    assert 0 < completed(database) < 5000
    assert not database.rows("SELECT FROM busload.event WHERE type = 'LEASE_LOST'")
    database.check_invariants()


def test_the_garbage_collector_leaves_out_what_was_imported(spawn: Spawn, sync_bus: SyncCommandBus) -> None:
    spawn("worker", "app:bus")
    command_id = sync_bus.send(DOMAIN, "CountFrozen").command_id
    found = sync_bus.wait_command(DOMAIN, command_id, timeout=WITHIN)
    assert found["frozen"] > 10 * found["others"]


def test_what_outlives_the_grace_time_is_handed_back(
    spawn: Spawn, until: Until, sync_bus: SyncCommandBus, database: Database
) -> None:
    sync_bus.create_batch(DOMAIN, [BatchCommand("Wait") for _ in range(5)])
    process = spawn("worker", "app:bus", "--grace", 0.1)
    until(lambda: database.count("lease"))
    process.terminate()
    assert process.wait(timeout=WITHIN) == 0
    # Those that had not begun may have been handed back before the others.
    assert database.rows("SELECT sum(hi - lo + 1)::integer, attempt FROM busload.queue GROUP BY attempt") == [(5, 1)]
    database.check_invariants()


def test_a_thread_that_never_returns_does_not_keep_the_process(
    spawn: Spawn, until: Until, sync_bus: SyncCommandBus, database: Database, tmp_path: Path
) -> None:
    sync_bus.create_batch(DOMAIN, [BatchCommand("Block")])
    process = spawn("worker", "app:bus", "--grace", 0.1)
    until((tmp_path / "begun").exists)
    process.terminate()
    assert process.wait(timeout=WITHIN) == 3
    assert database.rows("SELECT hi - lo + 1, attempt FROM busload.queue") == [(1, 1)]
    assert "Left behind and handed back 1 command that did not end in time" in (tmp_path / "said.txt").read_text()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_second_signal_does_not_wait(
    spawn: Spawn, until: Until, sync_bus: SyncCommandBus, database: Database, processes: int
) -> None:
    sync_bus.create_batch(DOMAIN, [BatchCommand("Wait") for _ in range(5)])
    process = spawn("worker", "app:bus", "--grace", 600, "--processes", processes)
    until(lambda: len(workers(database)) == processes and database.count("lease"))

    process.send_signal(signal.SIGINT)
    until(lambda: not pending(process.pid))  # two that arrive together are one
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=WITHIN) == 0
    assert database.count("lease") == 0
    database.check_invariants()


INTERRUPTED = """
import os
import signal
import sys

def interrupt(frame, event, argument):
    step = frame.f_code.co_name if event == "call" else getattr(argument, "__name__", None)
    while step in ("notify_all", "put") and frame is not None:
        if frame.f_code.co_name == "hear":
            sys.setprofile(None)
            os.kill(os.getpid(), signal.SIGINT)
        frame = frame.f_back

sys.setprofile(interrupt)
"""


def test_a_second_signal_may_come_while_the_first_is_heard(
    spawn: Spawn, until: Until, sync_bus: SyncCommandBus, database: Database, tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text(APPLICATION + INTERRUPTED)
    sync_bus.create_batch(DOMAIN, [BatchCommand("Wait") for _ in range(5)])
    process = spawn("worker", "app:bus", "--grace", 600)
    until(lambda: database.count("lease"))
    process.terminate()
    assert process.wait(timeout=WITHIN) == 0


def test_a_process_that_is_killed_is_replaced_and_its_commands_run(
    spawn: Spawn, until: Until, sync_bus: SyncCommandBus, database: Database, tmp_path: Path
) -> None:
    batch_id = sync_bus.create_batch(DOMAIN, [BatchCommand("Wait") for _ in range(20)])
    process = spawn("worker", "app:bus", "--processes", 2, "--concurrency", 10, "--lease", 2)
    first, second = until(lambda: len(pids := workers(database)) == 2 and database.count("lease") == 2 and pids)

    os.kill(first, signal.SIGKILL)
    until(lambda: set(workers(database)) - {first, second})
    (tmp_path / "go").touch()

    assert until(lambda: (b := sync_bus.get_batch(DOMAIN, batch_id)) and b.status.final and b.status)
    found = sync_bus.get_batch(DOMAIN, batch_id)
    assert found is not None
    assert (found.status, found.completed_count) == (BatchStatus.COMPLETED, 20)
    process.terminate()
    assert process.wait(timeout=WITHIN) == 0
    assert f"Worker process {first} ended with -9, starting another" in (tmp_path / "said.txt").read_text()
    database.check_invariants()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_worker_that_an_operator_stops_is_not_replaced(
    spawn: Spawn, until: Until, sync_bus: SyncCommandBus, database: Database, tmp_path: Path, processes: int
) -> None:
    process = spawn("worker", "app:bus", "--processes", processes)
    until(lambda: len(workers(database)) == processes)
    names = [worker.name for worker in sync_bus.workers.list()]
    said = ""
    for name in names:
        assert process.poll() is None
        assert sync_bus.workers.stop(name, operator="ada") == 1
        until(lambda name=name: name not in [worker.name for worker in sync_bus.workers.list()])
    assert process.wait(timeout=WITHIN) == 0
    said = (tmp_path / "said.txt").read_text()
    assert said.count("An operator has asked worker") == processes
    if processes > 1:
        assert "is not replaced: 1 process runs on" in said
        assert "is not replaced: 0 processes run on" in said
        assert "starting another" not in said


def test_a_thread_that_never_returns_does_not_outlive_the_request_to_stop(
    spawn: Spawn, until: Until, sync_bus: SyncCommandBus, database: Database, tmp_path: Path
) -> None:
    sync_bus.create_batch(DOMAIN, [BatchCommand("Block")])
    process = spawn("worker", "app:bus", "--grace", 0.1, "--processes", 2)
    until(lambda: len(workers(database)) == 2 and (tmp_path / "begun").exists())
    for worker in sync_bus.workers.list():
        sync_bus.workers.stop(worker.worker)
    assert process.wait(timeout=WITHIN) == 3
    assert database.rows("SELECT hi - lo + 1, attempt FROM busload.queue") == [(1, 1)]


def test_processes_stop_when_their_parent_is_killed(
    spawn: Spawn, until: Until, database: Database, tmp_path: Path
) -> None:
    process = spawn("worker", "app:bus", "--processes", 2)
    children = until(lambda: len(pids := workers(database)) == 2 and pids)
    process.kill()
    until(lambda: not any(map(alive, children)))
    assert workers(database) == [], (tmp_path / "said.txt").read_text()


MANY_THREADS = """
import os, subprocess, sys, threading

for _ in range(100):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
subprocess.run([sys.executable, "-m", "busload.cli", "worker", "app:bus", "--parent", str(os.getpid())])
"""


def test_the_threads_of_a_parent_that_is_killed_tell_its_processes_to_stop_only_once(
    spawn: Spawn, until: Until, database: Database, tmp_path: Path
) -> None:
    """A third signal would end the process at once, with its commands in hand."""
    parent = spawn("-c", MANY_THREADS, module=None)
    [child] = until(lambda: workers(database))
    parent.kill()
    until(lambda: not alive(child))
    assert workers(database) == [], (tmp_path / "said.txt").read_text()


def test_results_that_cannot_be_settled_are_an_error(
    spawn: Spawn, until: Until, sync_bus: SyncCommandBus, database: Database, dsn: str, tmp_path: Path
) -> None:
    sync_bus.create_batch(DOMAIN, [BatchCommand("Wait")])
    process = spawn("worker", "app:bus", "--lease", 10, "--grace", 5)
    until((tmp_path / "begun").exists)
    name = conninfo_to_dict(dsn)["dbname"]
    with psycopg.connect(make_conninfo(dsn, dbname="postgres"), autocommit=True) as admin:
        admin.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(sql.Identifier(str(name))))
        admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
    (tmp_path / "go").touch()
    process.terminate()
    assert process.wait(timeout=WITHIN) == 1
    said = (tmp_path / "said.txt").read_text()
    assert "1 result could not be settled before the worker stopped. Its command runs again." in said


def test_a_log_for_programs_is_one_json_object_per_line(
    spawn: Spawn, until: Until, database: Database, tmp_path: Path
) -> None:
    process = spawn("worker", "app:bus", "--log-json")
    until(lambda: workers(database))
    process.terminate()
    assert process.wait(timeout=WITHIN) == 0
    lines = [json.loads(line) for line in (tmp_path / "said.txt").read_text().splitlines()]
    assert any("serves crm, payments, 100 at a time" in line["message"] for line in lines)
    assert {"at", "level", "logger", "process", "message"} <= lines[0].keys()


@pytest.mark.parametrize(
    ("application", "because"),
    [
        ("app", "wanted e.g. app:bus"),
        ("nowhere:bus", "there is no module 'nowhere'"),
        ("app.inner:bus", "there is no module 'app.inner'"),
        ("app.py:bus", "Did you mean 'app:bus'?"),
        (
            "./app:bus",
            "found the path './app', wanted a module as Python imports it, e.g. app:bus. Did you mean 'app:bus'?",
        ),
        ("./app.py:bus", "Did you mean 'app:bus'?"),
        ("shop/app.py:bus", "found the path 'shop/app.py', wanted a module"),
        (".\\shop\\app:bus", "Did you mean 'shop.app:bus'?"),
        (".app:bus", "Did you mean 'app:bus'?"),
        ("../elsewhere/app:bus", "e.g. app:bus; start busload in the folder that has the module"),
        ("/app:bus", "start busload in the folder that has the module"),
        ("app:missing", "'app' has no 'missing'"),
        ("app:number", "'app:number' is an int, wanted a CommandBus or SyncCommandBus"),
        ("app:empty", "'app:empty' has no handlers; register some with @bus.handler"),
    ],
)
def test_an_application_that_cannot_be_served_is_explained(
    offline: Busload, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, application: str, because: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "app", raising=False)
    result = offline("worker", application)
    assert result.exit_code == 2
    assert because in " ".join(result.stderr.split())


def test_a_module_that_fails_to_import_something_else_says_what(
    offline: Busload, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text("import no_such_library")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    result = offline("worker", "broken:bus")
    assert result.exit_code == 1
    said = " ".join(result.stderr.split())
    assert (
        "'broken:bus' cannot be imported: ModuleNotFoundError: No module named 'no_such_library', in line 1 of" in said
    )
    (tmp_path / "raising.py").write_text("x = 1\nraise RuntimeError('boom')")
    said = " ".join(offline("worker", "raising:bus").stderr.split())
    assert "'raising:bus' cannot be imported: RuntimeError: boom, in line 2 of" in said


def test_domains_without_a_handler_are_refused(spawn: Spawn, tmp_path: Path) -> None:
    assert spawn("worker", "app:bus", "--domains", "payments,sales").wait(timeout=WITHIN) == 2
    said = " ".join((tmp_path / "said.txt").read_text().split())
    assert "'app:bus' has no handler in 'sales', only in crm, payments" in said


def test_an_application_with_a_database_of_its_own_refuses_another(spawn: Spawn, dsn: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(APPLICATION.replace("bus = CommandBus()", "bus = CommandBus('dbname=own')", 1))
    assert spawn("--dsn", dsn, "worker", "own:bus").wait(timeout=WITHIN) == 2
    assert "names a database of its own" in " ".join((tmp_path / "said.txt").read_text().split())


def test_a_database_without_our_schema_stops_all_processes_before_they_start(
    spawn: Spawn, tmp_path: Path, dsn: str
) -> None:
    bare = make_conninfo(dsn, dbname="postgres")
    for processes in (1, 2):
        assert spawn("--dsn", bare, "worker", "app:bus", "--processes", processes).wait(timeout=WITHIN) == 1
    said = (tmp_path / "said.txt").read_text()
    assert said.count("Run `busload schema migrate`") == 2
    assert "Traceback" not in said


def ports(tmp_path: Path) -> list[int]:
    """Where metrics are served, as the processes have said so far."""
    said = (tmp_path / "said.txt").read_text()
    return [int(port) for port in re.findall(r"Metrics are at http://127\.0\.0\.1:(\d+)/metrics", said)]


def get(port: int, path: str = "/metrics", method: str = "GET") -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())
    finally:
        connection.close()


def refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=WITHIN).close()
    except ConnectionRefusedError:
        return True
    return False


def answer_to(port: int, request: bytes) -> bytes:
    """What the server says to something that need not be HTTP."""
    with socket.create_connection(("127.0.0.1", port), timeout=WITHIN) as raw:
        raw.sendall(request)
        return b"".join(iter(lambda: raw.recv(4096), b""))


def test_metrics_are_served_while_the_worker_runs_and_no_longer(
    spawn: Spawn, until: Until, sync_bus: SyncCommandBus, database: Database, tmp_path: Path
) -> None:
    """Over HTTP."""
    sync_bus.create_batch(DOMAIN, [BatchCommand("Debit") for _ in range(30)])
    process = spawn("worker", "app:bus", "--metrics", "127.0.0.1:0", "--settle", "immediate", "--prefetch", "20 ms")
    [port] = until(lambda: (tmp_path / "said.txt").exists() and ports(tmp_path))
    until(lambda: 'outcome="completed"} 30\n' in get(port)[1])
    status, text, headers = get(port, "/metrics?name=all")
    assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert int(headers["Content-Length"]) == len(text.encode())
    assert re.search(r'^busload_worker_claimed_total\{worker=".+"\} 30$', text, re.MULTILINE)
    assert re.search(r'^busload_worker_info\{.*settle="immediate",prefetch="0.02"\} 1$', text, re.MULTILINE)
    process.terminate()
    assert process.wait(timeout=WITHIN) == 0
    assert refused(port)
    assert "In this run 30 results were settled" in (tmp_path / "said.txt").read_text()


def test_only_get_of_metrics_is_answered_and_nothing_a_client_does_stops_it(
    spawn: Spawn, until: Until, database: Database, tmp_path: Path
) -> None:
    process = spawn("worker", "app:bus", "--metrics", "0")
    [port] = until(lambda: (tmp_path / "said.txt").exists() and ports(tmp_path))
    assert get(port, "/")[:2] == (404, "There is only /metrics, /healthz, /readyz.\n")
    assert get(port, "/metricsx")[0] == 404
    status, _, headers = get(port, method="POST")
    assert (status, headers["Allow"]) == (405, "GET")
    assert answer_to(port, b"hello\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert answer_to(port, b"GET /metrics HTTP/2.0\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert answer_to(port, b"GET /" + b"x" * 8 * 1024).startswith(b"HTTP/1.1 431 ")
    with socket.create_connection(("127.0.0.1", port), timeout=WITHIN) as silent:
        silent.sendall(b"GET /metrics HT")
        assert get(port)[0] == 200
        process.terminate()  # and one that never finishes its request does not keep it
        assert process.wait(timeout=WITHIN) == 0
    assert "Traceback" not in (tmp_path / "said.txt").read_text()


def test_probes_tell_whether_a_worker_lives_and_takes_work(
    spawn: Spawn, until: Until, sync_bus: SyncCommandBus, database: Database, dsn: str, tmp_path: Path
) -> None:
    """/healthz only fails if a new process would help; /readyz fails while the database is away, and while it stops"""
    process = spawn("worker", "app:bus", "--metrics", "0", "--lease", 1)
    [port] = until(lambda: (tmp_path / "said.txt").exists() and ports(tmp_path))
    until(lambda: get(port, "/readyz")[0] == 200)
    status, text, headers = get(port, "/healthz")
    assert (status, json.loads(text), headers["Content-Type"]) == (
        200,
        {"state": "HEALTHY", "reasons": []},
        "application/json",
    )
    with closed_to_newcomers(dsn) as admin:
        name = conninfo_to_dict(dsn)["dbname"]
        query = (
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND application_name = 'busload'"
        )
        admin.execute(query, [name])
        until(lambda: get(port, "/readyz")[0] == 503)
        assert "DATABASE_UNREACHABLE" in get(port, "/readyz")[1]
        assert get(port, "/healthz")[0] == 200
    until(lambda: get(port, "/readyz")[0] == 200)
    sync_bus.send(DOMAIN, "Wait")
    until(lambda: database.count("lease") == 1)
    process.terminate()
    until(lambda: get(port, "/readyz")[0] == 503)
    assert "NOT_RUNNING" in get(port, "/readyz")[1]
    assert get(port, "/healthz")[0] == 200
    (tmp_path / "go").touch()
    assert process.wait(timeout=WITHIN) == 0


def test_healthz_fails_when_threads_are_stuck(
    spawn: Spawn, until: Until, sync_bus: SyncCommandBus, tmp_path: Path
) -> None:
    process = spawn("worker", "app:bus", "--metrics", "0", "--grace", 0)
    [port] = until(lambda: (tmp_path / "said.txt").exists() and ports(tmp_path))
    sync_bus.send_many(DOMAIN, [BatchCommand("Stick") for _ in range(3)])
    until(lambda: get(port, "/healthz")[0] == 503)
    assert "STUCK_THREADS" in get(port, "/healthz")[1]
    process.terminate()
    assert process.wait(timeout=WITHIN) == 3


def test_clients_that_say_nothing_are_few_and_do_not_stay(spawn: Spawn, until: Until, tmp_path: Path) -> None:
    spawn("worker", "app:bus", "--metrics", "0")
    [port] = until(lambda: (tmp_path / "said.txt").exists() and ports(tmp_path))
    silent = [socket.create_connection(("127.0.0.1", port), timeout=WITHIN) for _ in range(20)]
    answers = [one.recv(4096) for one in silent]
    assert answers.count(b"") == 16
    assert sum(answer.startswith(b"HTTP/1.1 503 ") for answer in answers) == 4
    assert get(port)[0] == 200
    for one in silent:
        one.close()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_worker_removes_what_ended_longer_ago_than_it_keeps(
    spawn: Spawn, until: Until, sync_bus: SyncCommandBus, database: Database, processes: int
) -> None:
    """`--keep-for` and `--archive` reach the processes that a worker starts"""
    old = sync_bus.send(DOMAIN, "Debit").command_id
    leased = database.perform(claim.claim(worker=registered(database), domains=[DOMAIN], limit=1)).leased
    database.perform(settle.settle([Transition(leased[0], "COMPLETED")], now=0.0))
    database.rows("UPDATE busload.execution SET started_at = '2020-01-01', finished_at = '2020-01-01'")
    database.rows("UPDATE busload.command SET created_at = '2020-01-01'")
    process = spawn("worker", "app:bus", "--keep-for", "180d", "--archive", "--processes", processes)
    until(lambda: database.count("archive") == 1)
    assert database.value("SELECT command_id FROM busload.archive") == old
    assert database.count("command") == 0
    process.terminate()
    assert process.wait(timeout=WITHIN) == 0


def registered(database: Database) -> int:
    lease_for = timedelta(seconds=30)
    return int(database.perform(rescue.register(name="w", domains=[DOMAIN], concurrency=1, lease_for=lease_for)))


def test_several_processes_serve_their_metrics_on_ports_of_their_own(
    spawn: Spawn, until: Until, database: Database, tmp_path: Path
) -> None:
    first = two_free_ports()
    options = ("--processes", 2, "--metrics", f"127.0.0.1:{first}", "--settle", "immediate", "--prefetch", "0.05ms")
    process = spawn("worker", "app:bus", *options)
    until(lambda: (tmp_path / "said.txt").exists() and len(ports(tmp_path)) == 2)
    assert sorted(ports(tmp_path)) == [first, first + 1]
    names = {re.findall(r'busload_worker_info\{worker="([^"]+)"', get(port)[1])[0] for port in ports(tmp_path)}
    assert len(names) == 2
    assert 'settle="immediate",prefetch="5e-05"' in get(first)[1]
    killed, _ = until(lambda: len(pids := workers(database)) == 2 and pids)
    os.kill(killed, signal.SIGKILL)
    until(lambda: len(ports(tmp_path)) == 3)
    assert sorted(set(ports(tmp_path))) == [first, first + 1]
    process.terminate()
    assert process.wait(timeout=WITHIN) == 0


def two_free_ports() -> int:
    """The first of two that follow each other."""
    while True:
        [first] = free_ports(1)
        with suppress(OSError):
            socket.create_server(("127.0.0.1", first + 1)).close()
            return first


@pytest.mark.parametrize("processes", [1, 2])
def test_a_port_in_use_is_refused_before_the_worker_starts(
    spawn: Spawn, tmp_path: Path, database: Database, processes: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = spawn("worker", "app:bus", "--metrics", f"127.0.0.1:{port}", "--processes", processes)
        assert process.wait(timeout=WITHIN) == 2
    said = " ".join((tmp_path / "said.txt").read_text().split())
    assert f"Invalid value for --metrics: cannot listen on 127.0.0.1:{port}: Address already in use" in said
    assert "Traceback" not in said
    assert database.count("worker") == 0


def test_ports_past_the_last_are_refused(spawn: Spawn, tmp_path: Path) -> None:
    process = spawn("worker", "app:bus", "--metrics", "65535", "--processes", 2)
    assert process.wait(timeout=WITHIN) == 2
    said = " ".join((tmp_path / "said.txt").read_text().split())
    assert "cannot listen on 127.0.0.1:65536" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("options", "because"),
    [
        (["--metrics", "example.com:9464"], "wanted an IP address and a port, e.g. 127.0.0.1:9464"),
        (["--metrics", ":9464"], "wanted an IP address and a port, e.g. 127.0.0.1:9464"),
        (["--metrics", "127.0.0.1:"], "wanted a port from 0 to 65535"),
        (["--metrics", "127.0.0.1:65536"], "wanted a port from 0 to 65535"),
        (["--metrics", "127.0.0.1:-1"], "wanted a port from 0 to 65535"),
        (["--metrics", "here"], "wanted a port from 0 to 65535"),
        (["--metrics", "::1:9464"], "wanted an IPv6 address in brackets, e.g. [::1]:9464"),
        (["--keep-for", "30"], "wanted a number and a unit, e.g. 30d, 12h, 90m or 1w"),
        (["--archive"], "--archive needs --keep-for"),
        (["--prefetch", "soon"], "wanted seconds or milliseconds, e.g. 0.05 or 50ms"),
        (["--prefetch", "-1"], "wanted seconds or milliseconds, e.g. 0.05 or 50ms"),
        (["--prefetch", "1h"], "wanted seconds or milliseconds, e.g. 0.05 or 50ms"),
        (["--prefetch", "nan"], "wanted seconds or milliseconds, e.g. 0.05 or 50ms"),
        (["--prefetch", "8"], "prefetch (0:00:08) must be from zero to a quarter of the lease (0:00:30)"),
        (["--prefetch", "8", "--processes", "2"], "prefetch (0:00:08) must be from zero to a quarter of the lease"),
        (["--settle", "never"], "'never' is not one of 'coalesced', 'immediate'"),
    ],
)
def test_an_option_that_cannot_be_is_explained(
    offline: Busload, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str], because: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "app", raising=False)
    result = offline("worker", "app:bus", *options)
    assert result.exit_code == 2, result.output
    assert because in " ".join(result.stderr.split())


def test_every_option_of_a_worker_has_a_text() -> None:
    """`manage.py busload_worker` shows no types and defaults, so there an option without one says nothing."""
    options = [one for one in cli_worker.worker.params if isinstance(one, click.Option)]
    assert [one.name for one in options if not (one.help or one.hidden)] == []
