"""The parts of a fault run: processes to kill, a ledger that busload does not write, and what must hold at the end."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import UUID

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import busload
from busload import SyncCommandBus
from busload.postgres.embedded.server import EmbeddedPostgres
from busload.postgres.embedded.supervisor import postmaster
from busload.postgres.schema import migrate
from busload.sync.plan import perform
from tests.given import Database, until

ROOT = Path(__file__).parents[2]
SOURCES = Path(busload.__file__).parents[1]


class Workers:
    """Worker processes that can be started, killed, frozen and told to stop."""

    def __init__(self, dsn: str, folder: Path, **options: Any) -> None:
        self.ledger, self.log = folder / "handlers", folder / "workers.log"
        self.receiver = folder / "receiver"
        files = {"ledger": str(self.ledger), "log": str(self.log), "receiver": str(self.receiver)}
        self._options = {"dsn": dsn, **files, **options}
        self.ledger.touch()
        self.receiver.touch()
        self.log.touch()  # a worker that is stopped early enough says nothing
        self.alive: list[int] = []
        self.ended: dict[int, int] = {}
        self._lock = threading.Lock()
        installed = [path for path in sys.path if path.endswith("site-packages")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={
                "PYTHONPATH": os.pathsep.join([str(SOURCES), str(ROOT), *installed]),
                "PATH": os.defpath,
                "HOME": "/",
            },
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill what is left, frozen ones too."""
        try:
            self._process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def start(self, count: int = 1, **options: Any) -> list[int]:
        pids = [int(self._ask({"start": {**self._options, **options}})) for _ in range(count)]
        self.alive += pids
        return pids

    def assist(self, role: str, count: int = 1, **options: Any) -> list[int]:
        """Start processes of another kind; whoever wants them to end tells them."""
        return [int(self._ask({"start": {**self._options, **options, "role": role}})) for _ in range(count)]

    def keep(self, count: int) -> None:
        """Start as many as have ended by themselves."""
        self.look()
        self.start(count - len(self.alive))

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        if number == signal.SIGKILL and pid in self.alive:
            self.alive.remove(pid)
        with suppress(ProcessLookupError):  # it ended by itself; `ended` tells how
            os.kill(pid, number)

    def look(self) -> dict[int, int]:
        """The exit status of every worker that has ended so far, by pid."""
        self.ended |= {int(pid): status for pid, status in self._ask({"ended": True}).items()}
        self.alive = [pid for pid in self.alive if pid not in self.ended]
        return self.ended

    def stop(self, within: float = 20) -> list[int]:
        """SIGTERM to all that live; returns their exit statuses."""
        pids = list(self.alive)
        for pid in pids:
            self.kill(pid, signal.SIGTERM)
        until(lambda: self.look().keys() >= set(pids), within)
        return [self.ended[pid] for pid in pids]

    def last_words(self) -> str:
        """Why workers ended, if they said so; else the end of what they logged."""
        said = self.log.read_text()
        return said[said.rfind("The worker ended") :][:6000] if "The worker ended" in said else said[-2000:]

    def notes(self) -> list[tuple[str, UUID, UUID, int]]:
        """What handlers wrote: fact, command, execution and process."""
        whole, _, _ = self.ledger.read_text().rpartition("\n")  # a line that is just being written does not count yet
        lines = (line.split() for line in whole.splitlines())
        return [(fact, UUID(command), UUID(execution), int(pid)) for fact, command, execution, pid in lines]

    def noted(self, fact: str) -> Counter[UUID]:
        return Counter(command for found, command, _, _ in self.notes() if found == fact)

    def _ask(self, request: dict[str, Any]) -> Any:
        with self._lock:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())


@dataclass(frozen=True, slots=True)
class Call:
    """A bulk call as its receiver saw it: id, key and payload of each item."""

    name: str
    group: str
    pid: int
    at: float
    items: list[tuple[str, str | None, Any]]


class Received:
    """The calls of a receiver's file, read as it grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._rest = path, 0, b""
        self.calls: list[Call] = []

    def read(self) -> list[Call]:
        """All so far. What is no whole line was a call of a process that was killed while it made it."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            fresh = file.read()
        self._offset += len(fresh)
        *lines, self._rest = (self._rest + fresh).split(b"\n")
        for line in lines:
            with suppress(ValueError):
                told = json.loads(line)
                self.calls.append(Call(**{**told, "items": [(id, key, data) for id, key, data in told["items"]]}))
        return self.calls


class Accepted:
    """What the producer was told is safe: written and synced after each acknowledgement."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a")

    def note(self, command_ids: list[UUID]) -> None:
        self._file.writelines(f"{command_id}\n" for command_id in command_ids)
        self._file.flush()
        os.fsync(self._file.fileno())

    def all(self) -> list[UUID]:
        return [UUID(line) for line in self._path.read_text().split()]

    def close(self) -> None:
        self._file.close()


class Server:
    """A PostgreSQL of the test's own, so that its restarts hurt nobody else."""

    def __init__(self, home: Path) -> None:
        self._postgres = EmbeddedPostgres(home, config={"deadlock_timeout": "100ms", "max_connections": "300"})

    def __enter__(self) -> Self:
        self._postgres.start()
        with psycopg.connect(self.dsn) as conn:
            perform(conn, migrate.migrate())
            conn.execute("CREATE TABLE effect (command_id uuid)")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._postgres.stop()
        self._postgres.close()

    @property
    def dsn(self) -> str:
        return self._postgres.dsn()

    def restart(self) -> None:
        """What a power cut is to the server: no checkpoint, no goodbye. Returns once it answers again."""
        data = self._postgres.info.data
        pid = until(lambda: postmaster(data))
        os.kill(pid, signal.SIGQUIT)
        until(lambda: postmaster(data) not in (None, pid), 30)
        until(self.answers, 60)

    def stop(self) -> None:
        """It is gone, and stays away until it is started."""
        self._postgres.stop()

    def start(self) -> None:
        self._postgres.start()

    def answers(self) -> bool:
        try:
            psycopg.connect(self.dsn, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True


class Brake:
    """Stops settlements in the server half way: they hold their leases and have written executions, but not counted."""

    KEY = 5005

    def __init__(self, dsn: str) -> None:
        self._conn = psycopg.connect(dsn, autocommit=True)
        self._conn.execute(
            "CREATE OR REPLACE FUNCTION brake() RETURNS trigger LANGUAGE plpgsql AS"
            " 'BEGIN IF EXISTS (SELECT FROM fresh) THEN"
            f" PERFORM pg_advisory_xact_lock_shared({self.KEY}); END IF; RETURN NULL; END'"
        )
        # Triggers fire in the order of their names, and the one that counts is called count_executions.
        self._conn.execute(
            "CREATE OR REPLACE TRIGGER brake AFTER INSERT ON busload.execution"
            " REFERENCING NEW TABLE AS fresh EXECUTE FUNCTION brake()"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._conn.close()

    def hold(self) -> None:
        self._conn.execute("SELECT pg_advisory_lock(%s)", [self.KEY])

    def release(self) -> None:
        self._conn.execute("SELECT pg_advisory_unlock(%s)", [self.KEY])

    def blocked(self) -> list[int]:
        """The backends whose settlement stands still."""
        rows = self._conn.execute(
            "SELECT l.pid FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database"
            " WHERE l.locktype = 'advisory' AND l.objid = %s AND NOT l.granted AND d.datname = current_database()",
            [self.KEY],
        )
        return [pid for (pid,) in rows]

    def terminate(self) -> None:
        """What stands still is undone: its connection is cut in the server."""
        for pid in self.blocked():
            self._conn.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])


class Proxy:
    """Stands between a worker and the server: it can lose the server's answers, and cut every connection."""

    def __init__(self, dsn: str, home: Path) -> None:
        told = conninfo_to_dict(dsn)
        self._server = f"{told['host']}/.s.PGSQL.{told.get('port', 5432)}"
        self.dsn = make_conninfo(dsn, host=str(home))
        self.losing_answers = False
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(str(home / Path(self._server).name))
        self._door.listen(100)
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        self.cut()

    def cut(self) -> None:
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):  # the door was closed
            while True:
                client, _ = self._door.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._server)
                self._pairs.append((client, server))
                threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if not (answers and self.losing_answers):
                    sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
        source.close()


@contextmanager
def folder() -> Iterator[Path]:
    """A folder that others can enter (the server runs as another user than root) and that is removed."""
    path = Path(tempfile.mkdtemp(prefix="busload-chaos-"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def deadlocks(database: Database) -> int:
    return int(database.value("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"))


def seeded() -> random.Random:
    """Randomness that can be repeated: the seed is printed with a failure."""
    seed = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(10**6))
    print(f"CHAOS_SEED={seed}")
    return random.Random(seed)


# In one snapshot: what the counters of a batch say against what the facts say. No row is right.
AUDIT = """
WITH ended AS (
    SELECT batch_id, count(*) FILTER (WHERE outcome = 'COMPLETED') AS completed,
           count(*) FILTER (WHERE outcome = 'FAILED') AS failed,
           count(*) FILTER (WHERE outcome = 'CANCELED') AS canceled
      FROM busload.execution JOIN busload.command ON id = command GROUP BY batch_id
), acted AS (
    SELECT batch_id, coalesce(sum(hi - lo + 1) FILTER (WHERE type = 'OPERATOR_COMPLETED'), 0) AS completed,
           coalesce(sum(hi - lo + 1) FILTER (WHERE type IN ('CANCELED', 'OPERATOR_CANCELED')), 0) AS canceled,
           count(*) FILTER (WHERE type = 'BATCH_COMPLETED') AS completions,
           count(*) FILTER (WHERE type = 'BATCH_STARTED') AS starts
      FROM busload.event GROUP BY batch_id
), parked AS (
    SELECT batch_id, count(*) AS n FROM busload.troubleshooting GROUP BY batch_id
), waiting AS (
    SELECT batch_id, sum(n) AS n FROM (
        SELECT batch_id, hi - lo + 1 AS n FROM busload.queue
        UNION ALL SELECT batch_id, hi - lo + 1 FROM busload.scheduled
        UNION ALL SELECT batch_id, hi - lo + 1 - cardinality(returned)
                       - (SELECT count(*) FROM busload.execution AS e
                           WHERE e.command BETWEEN l.lo AND l.hi AND e.attempt = l.attempt AND e.lease_id = l.lease_id)
                    FROM busload.lease AS l) AS places
     GROUP BY batch_id
), facts AS (
    SELECT b.*, coalesce(e.completed, 0) + coalesce(a.completed, 0) AS completed, coalesce(e.failed, 0) AS failed,
           coalesce(e.canceled, 0) + coalesce(a.canceled, 0) AS canceled, coalesce(p.n, 0) AS parked,
           coalesce(w.n, 0) AS waiting, coalesce(a.completions, 0) AS completions, coalesce(a.starts, 0) AS starts
      FROM busload.batch AS b LEFT JOIN ended AS e USING (batch_id) LEFT JOIN acted AS a USING (batch_id)
      LEFT JOIN parked AS p USING (batch_id) LEFT JOIN waiting AS w USING (batch_id)
     WHERE b.batch_type = 'COMMANDS'
), waits AS (   -- a job waits for a person: all that is left of its stage is parked, or its step is
    SELECT j.job_id FROM busload.job AS j JOIN busload.job_stage AS s USING (job_id, position)
      JOIN facts AS f ON f.batch_id = s.batch_id
     WHERE j.completed_at IS NULL AND f.parked > 0 AND f.waiting = 0
    UNION
    SELECT (c.data ->> 'job_id')::uuid FROM busload.troubleshooting AS t JOIN busload.command AS c ON c.id = t.command
     WHERE c.command_type LIKE 'busload.%'
), jobs AS (
    SELECT j.batch_id, count(*) AS total, count(*) FILTER (WHERE status = 'COMPLETED') AS completed,
           count(*) FILTER (WHERE status = 'FAILED') AS failed, count(*) FILTER (WHERE status = 'CANCELED') AS canceled,
           count(*) FILTER (WHERE completed_at IS NULL AND job_id IN (SELECT job_id FROM waits)) AS waiting
      FROM busload.job AS j WHERE j.batch_id IS NOT NULL GROUP BY j.batch_id
)
SELECT batch_id, total_count,
       (completed_count, failed_count, canceled_count, in_troubleshooting_count)::text AS counters,
       (completed, failed, canceled, parked, waiting)::text AS facts, status, completions, starts
  FROM facts
 WHERE (completed_count, failed_count, canceled_count, in_troubleshooting_count)
       IS DISTINCT FROM (completed, failed, canceled, parked)
    OR total_count <> completed + failed + canceled + parked + waiting
    OR (completed_at IS NOT NULL) <> (sealed_at IS NOT NULL AND completed + failed + canceled = total_count)
    OR completions <> (completed_at IS NOT NULL)::int OR starts > 1
UNION ALL
SELECT b.batch_id, b.total_count,
       (b.completed_count, b.failed_count, b.canceled_count, b.in_troubleshooting_count)::text,
       (j.completed, j.failed, j.canceled, j.waiting)::text, b.status, a.completions, a.starts
  FROM busload.command_bus_batch AS b JOIN jobs AS j USING (batch_id) LEFT JOIN acted AS a USING (batch_id)
 WHERE (b.total_count, b.completed_count, b.failed_count, b.canceled_count, b.in_troubleshooting_count)
       IS DISTINCT FROM (j.total, j.completed, j.failed, j.canceled, j.waiting)
    OR (b.completed_at IS NOT NULL) <> (j.completed + j.failed + j.canceled = j.total)
    OR a.completions <> (b.completed_at IS NOT NULL)::int OR a.starts > 1
"""


class Watcher:
    """Watches the database from a thread of its own for as long as the block lasts, also while the server is away."""

    def __init__(self, dsn: str, every: float) -> None:
        self._dsn, self._every = dsn, every
        self.snapshots = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            with suppress(psycopg.OperationalError):  # a server that was crashed on purpose comes back
                self._watch()
            self._stopping.wait(self._every)

    def _watch(self) -> None:
        raise NotImplementedError


class Auditor(Watcher):
    """Compares counters with facts, each time in one REPEATABLE READ snapshot."""

    def __init__(self, dsn: str, every: float = 0.05) -> None:
        super().__init__(dsn, every)
        self.mismatches: list[Any] = []

    def _watch(self) -> None:
        with psycopg.connect(self._dsn) as conn:
            conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            conn.read_only = True
            due = time.monotonic()
            while not self._stopping.wait(max(0.0, due - time.monotonic())):
                due += self._every
                self.mismatches += conn.execute(AUDIT.encode()).fetchall()
                conn.rollback()
                self.snapshots += 1


def retry_crashed(bus: SyncCommandBus, database: Database, domain: str) -> int:
    """Let all work end. Commands that were running whenever a worker died are parked: an operator retries them."""
    parked = 0

    def done() -> bool:
        nonlocal parked
        for item in bus.troubleshooting.list(domain):
            assert item.reason == "CRASHED", item
            bus.troubleshooting.retry(domain, item.command_id, operator="test")
            parked += 1
        return database.is_at_rest()

    until(done, 120)
    return parked
