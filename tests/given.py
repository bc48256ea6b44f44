"""Where a story starts: batches, claimed commands, workers that died. And the invariants every story ends with."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import UUID

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from busload import (
    BatchCommand,
    BatchMetadata,
    CommandBus,
    CommandMetadata,
    HandlerContext,
    PermanentCommandError,
    Worker,
    WorkerSettings,
)
from busload.commands import claim, rescue, settle
from busload.commands.command import Command
from busload.commands.execution import COMPLETED, Leased, Transition
from busload.postgres.plan import Plan
from busload.sync.plan import perform

DOMAIN = "payments"

WITHIN = 60.0
"""Seconds after which something that must come about has not: so many that no busy machine takes them."""


def until(condition: Callable[[], Any], within: float = WITHIN) -> Any:
    """Return the first truthy answer. Tests wait here, or in `eventually`, and nowhere else."""
    deadline = time.monotonic() + within
    while not (found := condition()):
        assert time.monotonic() < deadline, f"still not so after {within} s"
        time.sleep(0.01)
    return found


async def eventually(condition: Callable[[], Any], within: float = WITHIN) -> Any:
    """The same, while the event loop goes on."""
    deadline = time.monotonic() + within
    while not (found := condition()):
        assert time.monotonic() < deadline, f"still not so after {within} s"
        await asyncio.sleep(0.01)
    return found


def at_once(dsn: str, works: Sequence[Callable[[psycopg.Connection[Any]], Any]]) -> None:
    """Do all of it at once, each in a thread and on a connection of its own; fail if any of it fails."""
    barrier = threading.Barrier(len(works), timeout=WITHIN)
    failures: list[BaseException] = []

    def run(work: Callable[[psycopg.Connection[Any]], Any]) -> None:
        try:
            with psycopg.connect(dsn, autocommit=True) as conn:
                barrier.wait()
                work(conn)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def beside(dsn: str, plan: Callable[[], Plan[Any]], *, autocommit: bool = False) -> tuple[threading.Thread, list[Any]]:
    """Perform a plan in another session and thread, and return once it waits for a lock."""
    answers: list[Any] = []
    conn = psycopg.connect(dsn, autocommit=autocommit)
    pid = conn.info.backend_pid

    def work() -> None:
        with conn:
            try:
                answers.append(perform(conn, plan()))
            except BaseException as error:
                answers.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    with psycopg.connect(dsn, autocommit=True) as watch:
        until(lambda: answers or watch.execute("SELECT cardinality(pg_blocking_pids(%s))", [pid]).fetchone() != (0,))
    return thread, answers


def short_and_long(names: str, short: tuple[Any, ...], long: tuple[Any, ...]) -> pytest.MarkDecorator:
    """Run a test in two sizes: the short one in every run, the long one only with `make chaos`."""
    sizes = [pytest.param(*short, id="short"), pytest.param(*long, id="long", marks=pytest.mark.chaos)]
    return pytest.mark.parametrize([name.strip() for name in names.split(",")], sizes)


def pending(pid: int) -> bool:
    """Whether the kernel has not delivered a signal to this process yet."""
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    return int(status["ShdPnd"], 16) != 0 or int(status["SigPnd"], 16) != 0


LOCKED_OUT = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
"""Connections that wait for a lock. Not by `pg_locks`, which knows those of other tests' databases, too."""

LISTENING = (
    "pg_stat_activity WHERE datname = current_database()"
    " AND (query LIKE 'LISTEN%' OR query LIKE 'SELECT busload.listens(%')"
)
"""The connections that have begun to listen, in this test's database; a worker then says where it is woken."""

LISTENERS = f"SELECT count(*) FROM {LISTENING}"
END_LISTENERS = f"SELECT pg_terminate_backend(pid, 10000) FROM {LISTENING}"


@contextmanager
def closed_to_newcomers(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """Nobody gets a new connection to this database as long as the block lasts; it is given one to another."""
    name = str(conninfo_to_dict(dsn)["dbname"])
    allow = sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}")
    with psycopg.connect(make_conninfo(dsn, dbname="postgres"), autocommit=True) as admin:
        admin.execute(allow.format(sql.Identifier(name), sql.SQL("false")))
        try:
            yield admin
        finally:
            admin.execute(allow.format(sql.Identifier(name), sql.SQL("true")))


class Database:
    """A second pair of eyes: plain SQL on the test's database, and plans performed at will."""

    def __init__(self, dsn: str) -> None:
        self._conn = psycopg.connect(dsn, autocommit=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._conn.close()

    def rows(self, query: str, *params: Any) -> list[tuple[Any, ...]]:
        cursor = self._conn.execute(query.encode(), params or None)
        return cursor.fetchall() if cursor.description else []

    def value(self, query: str, *params: Any) -> Any:
        return self.rows(query, *params)[0][0]

    def perform(self, plan: Plan[Any]) -> Any:
        with self._conn.transaction():
            return perform(self._conn, plan)

    def bury(self) -> rescue.Returned:
        """Declare every worker dead, however lively it is, and take back what they held: no heartbeat comes between."""
        with self._conn.transaction():
            self.rows("UPDATE busload.worker SET seen_at = '-infinity' WHERE stopped_at IS NULL")
            returned: rescue.Returned = perform(self._conn, rescue.rescue())
        return returned

    def take_over(self) -> rescue.Returned:
        """Others think that all workers are dead, and have put back what they held.

        It is as if other processes had died: a worker that lives takes nothing up again, and no blame back.
        """
        with self._conn.transaction():
            returned = self.bury()
            self.rows("UPDATE busload.event SET worker = NULL WHERE type = 'LEASE_LOST'")
        return returned

    @contextmanager
    def time_standing_still(self) -> Iterator[None]:
        """In a transaction, where `now()` is always the same."""
        with self._conn.transaction():
            yield

    def everything(self) -> dict[str, int]:
        """How many rows every table of ours holds: what a refused call must not change."""
        tables = self.rows("SELECT tablename FROM pg_tables WHERE schemaname = 'busload' AND tablename <> 'worker'")
        return {table: self.count(table) for (table,) in tables}

    def dump(self) -> dict[str, Any]:
        """Every row with its place and who has written or locked it, and every sequence: a mere look changes none."""
        tables = self.rows("SELECT tablename FROM pg_tables WHERE schemaname = 'busload'")
        rows = "SELECT ctid::text, xmin::text, xmax::text, t::text FROM busload.{} AS t ORDER BY ctid"
        sequences = self.rows("SELECT sequencename, last_value FROM pg_sequences WHERE schemaname = 'busload'")
        return {table: self.rows(rows.format(table)) for (table,) in tables} | {"sequences": sorted(sequences)}

    def count_rows(self, table: str) -> int:
        """Of a table of the test."""
        return int(self.value(f"SELECT count(*) FROM {table}"))

    def count(self, table: str) -> int:
        return int(self.value(f"SELECT count(*) FROM busload.{table}"))

    def is_at_rest(self) -> bool:
        """Whether no command is anywhere; in one snapshot, since the last settlement may put a callback somewhere."""
        places = "queue", "scheduled", "outbox", "lease", "troubleshooting"
        return not self.rows(" UNION ALL ".join(f"SELECT 1 FROM busload.{place}" for place in places))

    def check_invariants(self) -> None:
        """Counters equal the facts, and every command is in exactly one place."""
        offenders = self.rows(OFFENDERS)
        assert not offenders, offenders


def raising(error: BaseException) -> Callable[..., Awaitable[None]]:
    """A handler that can only fail."""

    async def fail(command: Command, ctx: HandlerContext) -> None:
        raise error

    return fail


def counts(batch: BatchMetadata) -> tuple[int, int, int, int, int]:
    """Total, completed, failed, canceled, in troubleshooting."""
    return (
        batch.total_count,
        batch.completed_count,
        batch.failed_count,
        batch.canceled_count,
        batch.in_troubleshooting_count,
    )


class Given:
    def __init__(self, bus: CommandBus, database: Database, settings: WorkerSettings) -> None:
        self.bus, self.database, self.settings = bus, database, settings

    def handler(
        self, command_type: str = "Debit", function: Callable[..., Any] | None = None, **options: Any
    ) -> list[Command]:
        """Register a handler; without a function it succeeds. Returns the list of commands it has seen."""
        seen: list[Command] = []

        async def handle(command: Command, ctx: HandlerContext) -> Any:
            seen.append(command)
            return await function(command, ctx) if function else None

        self.bus.handler(DOMAIN, command_type, **options)(handle)
        return seen

    async def batch(self, commands: int = 1, command_type: str = "Debit", **options: Any) -> UUID:
        return await self.bus.create_batch(
            DOMAIN, [BatchCommand(command_type, data={"n": n}) for n in range(commands)], **options
        )

    async def batch_now(self, batch_id: UUID, domain: str = DOMAIN) -> BatchMetadata:
        batch = await self.bus.get_batch(domain, batch_id)
        assert batch is not None
        return batch

    async def command_now(self, command_id: UUID, domain: str = DOMAIN) -> CommandMetadata:
        command = await self.bus.get_command(domain, command_id)
        assert command is not None
        return command

    async def sent(self, command_type: str = "Debit", data: Any = None, **options: Any) -> UUID:
        return (await self.bus.send(DOMAIN, command_type, data, **options)).command_id

    def worker(self, **options: Any) -> Worker:
        return Worker(self.bus, **{"settings": self.settings, "domains": [DOMAIN], **options})

    async def drained(self, **options: Any) -> int:
        """Run a worker until nothing is ready or due."""
        return await self.worker(**options).drain()

    @asynccontextmanager
    async def running(self, **options: Any) -> AsyncIterator[Worker]:
        """A worker that runs beside the test, and is stopped with the block."""
        worker = self.worker(**options)
        task = asyncio.create_task(worker.run())
        try:
            yield worker
        finally:
            worker.stop()
            await task

    def registered_worker(self, *, lease_for: timedelta = timedelta(seconds=30)) -> int:
        """The number of a worker that lives, though no process is behind it."""
        return int(
            self.database.perform(rescue.register(name="given", domains=[DOMAIN], concurrency=10, lease_for=lease_for))
        )

    def claimed(self, limit: int = 1, *, by: int | None = None, suspects: bool = True) -> list[Leased]:
        """Commands that a worker has claimed and not settled."""
        worker = self.registered_worker() if by is None else by
        taken = self.database.perform(claim.claim(worker=worker, domains=[DOMAIN], limit=limit, suspects=suspects))
        leased: list[Leased] = taken.leased
        return leased

    def settled(self, leased: Sequence[Leased], outcome: str = COMPLETED, **details: Any) -> set[int]:
        """Settle as a worker would; a lease is closed with its last command."""
        transitions = [Transition(one, outcome, **details) for one in leased]
        credited: set[int] = self.database.perform(settle.settle(transitions, now=0.0))
        return credited

    def died(self, worker: int) -> None:
        """Its process vanished: no heartbeat for longer than its leases last."""
        self.database.rows(
            "UPDATE busload.worker SET seen_at = now() - lease_for - interval '1 s' WHERE worker = %s", worker
        )

    def rescued(self) -> rescue.Returned:
        returned: rescue.Returned = self.database.perform(rescue.rescue())
        return returned

    def make_due(self) -> None:
        """Move time: everything scheduled is due now."""
        self.database.rows("UPDATE busload.scheduled SET run_at = now()")

    async def in_troubleshooting(self, commands: int = 1, **options: Any) -> tuple[UUID, list[UUID]]:
        """A batch whose commands have all failed for good."""

        async def refuse(command: Command, ctx: HandlerContext) -> None:
            raise PermanentCommandError("account closed", code="CLOSED")

        if self.bus.handlers.find(DOMAIN, "Refuse") is None:
            self.handler("Refuse", refuse)
        batch_id = await self.batch(commands, "Refuse", **options)
        await self.drained()
        items = await self.bus.troubleshooting.list(DOMAIN)
        return batch_id, [item.command_id for item in items if item.batch_id == batch_id]


# Each query returns the offenders, so no row is right.
INVARIANTS = {
    "what waits in the name of a batch has the owner of that batch, or none if a stranger put it there": """
        SELECT b.batch_id
          FROM (SELECT batch_id, fair FROM busload.queue UNION ALL SELECT batch_id, fair FROM busload.scheduled
                UNION ALL SELECT batch_id, fair FROM busload.outbox UNION ALL SELECT batch_id, fair FROM busload.lease
                UNION ALL SELECT batch_id, fair FROM busload.troubleshooting) AS load
          JOIN busload.batch AS b USING (batch_id)
         WHERE fair NOT IN (0, busload.fair_of(b.fair_by, b.batch_id))""",
    "every command is in one place or has ended, never both": """
        SELECT id, places FROM (
            SELECT c.id,
                   (SELECT count(*) FROM busload.queue q
                     WHERE q.lo >> 10 = c.id >> 10 AND c.id BETWEEN q.lo AND q.hi)
                 + (SELECT count(*) FROM busload.scheduled s
                     WHERE s.lo >> 10 = c.id >> 10 AND c.id BETWEEN s.lo AND s.hi)
                 + (SELECT count(*) FROM busload.outbox o
                     WHERE o.lo >> 10 = c.id >> 10 AND c.id BETWEEN o.lo AND o.hi)
                 + (SELECT count(*) FROM busload.troubleshooting t WHERE t.command = c.id)
                 + (SELECT count(*) FROM busload.lease l
                     WHERE c.id BETWEEN l.lo AND l.hi AND c.id <> ALL (l.returned)
                       AND NOT EXISTS (SELECT FROM busload.execution e
                                        WHERE e.command = c.id AND e.attempt = l.attempt))
                 + (SELECT count(*) FROM busload.execution e
                     WHERE e.command = c.id AND e.outcome IN ('COMPLETED', 'FAILED', 'CANCELED'))
                 + (SELECT count(*) FROM busload.event v
                     WHERE v.lo >> 10 = c.id >> 10 AND c.id BETWEEN v.lo AND v.hi
                       AND v.type IN ('CANCELED', 'OPERATOR_COMPLETED', 'OPERATOR_CANCELED')) AS places
              FROM busload.command c) AS found
         WHERE places <> 1""",
    "a batch's total is the number of its commands": """
        SELECT batch_id FROM busload.batch
          LEFT JOIN (SELECT batch_id, count(*) AS n FROM busload.command GROUP BY batch_id) AS members USING (batch_id)
         WHERE total_count <> coalesce(n, 0) AND pruned_at IS NULL AND batch_type = 'COMMANDS'""",
    "counters equal the facts": """
        SELECT batch_id FROM busload.batch AS b LEFT JOIN (
            SELECT batch_id, count(*) FILTER (WHERE status = 'COMPLETED') AS completed,
                   count(*) FILTER (WHERE status = 'FAILED') AS failed,
                   count(*) FILTER (WHERE status = 'CANCELED') AS canceled,
                   count(*) FILTER (WHERE status = 'IN_TROUBLESHOOTING_QUEUE') AS troubleshooting
              FROM busload.command_status GROUP BY batch_id) AS m USING (batch_id)
         WHERE b.pruned_at IS NULL AND b.batch_type = 'COMMANDS' AND
               (b.completed_count, b.failed_count, b.canceled_count, b.in_troubleshooting_count) IS DISTINCT FROM
               (coalesce(completed, 0), coalesce(failed, 0), coalesce(canceled, 0), coalesce(troubleshooting, 0))""",
    "a batch of jobs counts its jobs as they are": """
        SELECT batch_id FROM busload.batch AS b LEFT JOIN (
            SELECT batch_id, count(*) AS total, count(*) FILTER (WHERE status = 'COMPLETED') AS completed,
                   count(*) FILTER (WHERE status = 'FAILED') AS failed,
                   count(*) FILTER (WHERE status = 'CANCELED') AS canceled
              FROM busload.job WHERE batch_id IS NOT NULL GROUP BY batch_id) AS m USING (batch_id)
         WHERE b.pruned_at IS NULL AND b.batch_type = 'JOBS' AND
               (b.total_count, b.completed_count, b.failed_count, b.canceled_count, b.in_troubleshooting_count)
               IS DISTINCT FROM (m.total, m.completed, m.failed, m.canceled, 0)""",
    "completed exactly when sealed and nothing is open": """
        SELECT b.batch_id FROM busload.batch b
         WHERE (b.completed_at IS NOT NULL) IS DISTINCT FROM
               (b.sealed_at IS NOT NULL AND b.completed_count + b.failed_count + b.canceled_count = b.total_count)
            OR (b.completed_at IS NOT NULL) IS DISTINCT FROM (b.status LIKE 'COMPLETED%')""",
    "started and completed once each": """
        SELECT batch_id, type FROM busload.event WHERE type IN ('BATCH_STARTED', 'BATCH_COMPLETED')
         GROUP BY batch_id, type HAVING count(*) > 1
        UNION ALL
        SELECT b.batch_id, 'BATCH_COMPLETED' FROM busload.batch b WHERE b.completed_at IS NOT NULL
           AND NOT EXISTS (SELECT FROM busload.event e WHERE e.batch_id = b.batch_id AND e.type = 'BATCH_COMPLETED')
        UNION ALL
        SELECT b.batch_id, 'callback' FROM busload.batch b WHERE b.on_complete IS NOT NULL AND b.pruned_at IS NULL
           AND (b.on_complete -> 'stalled_too' IS NULL OR b.stalled_at IS NULL) AND
               (b.completed_at IS NOT NULL)::int <> (SELECT count(*) FROM busload.command c
                 WHERE c.domain = b.domain AND c.command_id = (b.on_complete ->> 'command_id')::uuid)""",
    "one final execution at most": """
        SELECT command FROM busload.execution
         WHERE outcome IN ('COMPLETED', 'FAILED', 'CANCELED') GROUP BY command HAVING count(*) > 1""",
    "loads of one place do not overlap": """
        SELECT a.hi FROM busload.queue a JOIN busload.queue b
            ON a.hi <> b.hi AND a.lo >> 10 = b.lo >> 10 AND a.lo <= b.hi AND b.lo <= a.hi""",
    "what is HELD belongs to a batch that is held": """
        SELECT s.hi FROM busload.scheduled s LEFT JOIN busload.batch b USING (batch_id)
         WHERE s.reason = 'HELD' AND b.held_at IS NULL""",
    "what waits for a canary belongs to a batch whose canary has not ended": """
        SELECT s.hi FROM busload.scheduled s LEFT JOIN busload.batch b USING (batch_id)
         WHERE s.reason = 'CANARY' AND (b.canary_until IS NULL OR b.canary_ended_at IS NOT NULL)""",
    "a batch whose budget is exceeded is held or has ended": """
        SELECT batch_id FROM busload.batch
         WHERE held_at IS NULL AND canceled_at IS NULL AND completed_at IS NULL AND NOT budget_per_cause
           AND failed_count + in_troubleshooting_count - budget_from
               > busload.failures_allowed(budget_share, budget_at_least, total_count)""",
    "an event in a group has a command that has not ended": """
        SELECT buffer, group_id
          FROM (SELECT DISTINCT buffer, group_id FROM busload.buffered WHERE group_id IS NOT NULL) b
         WHERE NOT EXISTS (
               SELECT FROM busload.command_status c
                WHERE c.domain = b.buffer AND c.command_id = b.group_id AND c.command_type = 'busload.Group'
                  AND c.status IN ('PENDING', 'SCHEDULED', 'IN_PROGRESS', 'IN_TROUBLESHOOTING_QUEUE'))""",
}


def offenders_of(invariants: Mapping[str, str]) -> str:
    """One statement for all: each row names an invariant, and what offends it."""
    return " UNION ALL ".join(
        f"SELECT '{name.replace(chr(39), chr(39) * 2)}', q::text FROM ({query}) AS q"
        for name, query in invariants.items()
    )


OFFENDERS = offenders_of(INVARIANTS)
