"""Every pair of transitions on the same rows: one is paused in its transaction, the other begins, then the first ends.

However they meet, nobody deadlocks, nobody fails in a way that is not documented, and the facts agree with the counters
at once and when everything has run to its end.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from msgspec import structs
from psycopg.conninfo import make_conninfo

from busload import BusloadError, Dedup
from busload.batches import cancel
from busload.commands import claim, rescue, send, settle
from busload.commands.command import NewCommand
from busload.commands.execution import COMPLETED, FAILED_ATTEMPT, TROUBLESHOOTING, Leased, Transition
from busload.commands.ids import new_ids
from busload.errors import BatchSealedError, InvalidOperationError
from busload.postgres.plan import Plan
from busload.retention import Pruned, prune
from busload.sync.plan import perform
from busload.testing import TestServer
from busload.troubleshooting import decisions
from busload.troubleshooting.decisions import Decision
from tests.given import DOMAIN, WITHIN, Database

PLACES = ["queue", "scheduled", "lease", "troubleshooting", "execution", "event", "command", "batch", "worker"]
HISTORY = ["execution", "event", "command", "batch", "task", "archive", "archived_batch"]
EMPTY_ALL = (
    "WITH "
    + ", ".join(f"{table}_gone AS (DELETE FROM busload.{table})" for table in dict.fromkeys([*PLACES, *HISTORY]))
    + " SELECT"
)
DEDUP = Dedup(window=timedelta(0))
AT_ONCE = timedelta(microseconds=1)
KEY = "invoice:7"
PLANNED_ONCE = "-c plan_cache_mode=force_generic_plan -c jit=off -c enable_seqscan=off"
"""As in the sessions of a worker. Else more than half of the time goes into planning the same statements again."""


@dataclass
class Scene:
    """A batch that is still open: 0 is in troubleshooting, 1 is due, 2 to 5 run, 6 and 7 are ready; its worker died.

    And what could be pruned: a batch that is complete, as is its callback; two commands without a batch that have
    ended, one of which has a task key; a third that has, but whose neighbour still runs under the same lease.
    """

    batch_id: UUID
    worker: int
    heir: int
    parked: UUID
    leased: list[Leased]


def new_commands(count: int) -> list[NewCommand]:
    return [NewCommand(id.int, "Debit", "{}", None, None, None, 0, None, None) for id in new_ids(count)]


def set_the_scene(database: Database) -> Scene:
    database.rows(EMPTY_ALL)
    batch_id = uuid4()
    worker, heir = registered(database), registered(database)
    the_past(database, heir)
    neighbours(database, worker)

    def claimed(worker: int, limit: int) -> list[Leased]:
        leased: list[Leased] = database.perform(claim.claim(worker=worker, domains=[DOMAIN], limit=limit)).leased
        return leased

    database.perform(send.open_batch(send.NewBatch(batch_id, DOMAIN, None, None, None)))
    database.perform(send.send_many(DOMAIN, new_commands(8), batch_id))
    [parked], [failed], leased = claimed(heir, 1), claimed(heir, 1), claimed(worker, 4)
    database.perform(settle.settle([Transition(parked, TROUBLESHOOTING, "{}", reason="PERMANENT")], now=0.0))
    database.perform(settle.settle([Transition(failed, FAILED_ATTEMPT, "{}", delay=0.0)], now=0.0))
    database.rows("UPDATE busload.worker SET seen_at = now() - interval '31 s' WHERE worker = %s", worker)
    database.check_invariants()
    return Scene(batch_id, worker, heir, parked.command_id, leased)


def the_past(database: Database, worker: int) -> None:
    """A batch with its callback, a command with a task key, and one without: all have ended."""
    [member, callback, keyed, plain] = new_commands(4)
    on_complete = json.dumps(
        {"command_id": str(callback.command_id), "command_type": "Tell", "data": {}, "priority": 0}
    )
    past = send.NewBatch(uuid4(), DOMAIN, None, None, on_complete)
    database.perform(send.create_batch(past, [member]))
    database.perform(send.send_once(DOMAIN, structs.replace(keyed, task_key=KEY), DEDUP))
    database.perform(send.send(DOMAIN, plain))
    for ended in (3, 1):  # the callback is sent with the last one
        leased = database.perform(claim.claim(worker=worker, domains=[DOMAIN], limit=9)).leased
        assert len(leased) == ended
        database.perform(settle.settle([Transition(one, COMPLETED) for one in leased], now=0.0))


def neighbours(database: Database, worker: int) -> None:
    """Two commands under one lease, of which one has ended."""
    [first, second] = new_commands(2)
    id = database.perform(send.send(DOMAIN, first))
    database.perform(send.send(DOMAIN, second, id=id + 1))
    leased = database.perform(claim.claim(worker=worker, domains=[DOMAIN], limit=2)).leased
    assert len(leased) == 2 and leased[0].lease == leased[1].lease
    database.perform(settle.settle([Transition(leased[0], COMPLETED)], now=0.0))


def pruned(archive: bool) -> Plan[Pruned]:
    """A whole run in one transaction: it holds everything that it removes until the end."""
    pruning = prune.Pruning(AT_ONCE, archive=archive)
    for plan in pruning.plans():
        yield from plan
    return pruning.pruned


def registered(database: Database) -> int:
    plan = rescue.register(name="w", domains=[DOMAIN], concurrency=9, lease_for=timedelta(seconds=30))
    return int(database.perform(plan))


def settling(some: slice, outcome: str, **details: Any) -> Callable[[Scene], Plan[Any]]:
    return lambda scene: settle.settle(
        [Transition(one, outcome, "{}", **details) for one in scene.leased[some]], now=0.0
    )


Operation = Callable[[Scene], Plan[Any]]
OPERATIONS: dict[str, Operation] = {
    "claim": lambda s: claim.claim(worker=s.heir, domains=[DOMAIN], limit=10),
    "claim a part": lambda s: claim.claim(worker=s.heir, domains=[DOMAIN], limit=1),
    "promote": lambda s: claim.promote(),
    "give back": lambda s: claim.give_back({s.leased[0].lease: [s.leased[3].id]}, pause=0, details=["{}"]),
    "settle ok": settling(slice(0, 2), COMPLETED),
    "settle all": settling(slice(0, 4), COMPLETED),
    "settle fail": settling(slice(1, 3), FAILED_ATTEMPT, delay=0.0),
    "settle park": settling(slice(2, 4), TROUBLESHOOTING, reason="EXHAUSTED"),
    "release": lambda s: rescue.release([s.leased[0].lease.lease_id]),
    "rescue": lambda s: rescue.rescue(),
    "renew": lambda s: rescue.renew(worker=s.worker, settled=timedelta(seconds=20)),
    "retire": lambda s: rescue.retire(worker=s.worker),
    "start": lambda s: rescue.start_batches(worker=s.worker),
    "cancel stragglers": lambda s: cancel.cancel_stragglers(),
    "cancel batch": lambda s: cancel.cancel_batch(DOMAIN, s.batch_id, reason="x", operator=None),
    "operator retry": lambda s: decisions.decide_one(DOMAIN, s.parked, Decision(action="retry", operator="ada")),
    "operator complete": lambda s: decisions.decide_one(
        DOMAIN, s.parked, Decision(action="complete", result=None, operator="ada")
    ),
    "operator cancel": lambda s: decisions.decide_one(
        DOMAIN, s.parked, Decision(action="cancel", reason="x", operator="ada")
    ),
    "add": lambda s: send.send_many(DOMAIN, new_commands(2), s.batch_id),
    "seal": lambda s: send.seal(DOMAIN, s.batch_id),
    "send for a task": lambda s: send.send_once(DOMAIN, structs.replace(new_commands(1)[0], task_key=KEY), DEDUP),
    "prune": lambda s: pruned(archive=False),
    "prune to the archive": lambda s: pruned(archive=True),
}
ONE_STATEMENT = {"claim", "claim a part", "promote", "give back", "start", "renew"} | {
    name for name in OPERATIONS if name.startswith("settle")
}

# A worker settles what it runs, and does not run what it has given back.
IMPOSSIBLE = {frozenset({"give back", "settle all"}), frozenset({"give back", "settle park"})}

# What may be refused, and by which words: what a documented error says when the other one was first.
DOCUMENTED: dict[str, type[BusloadError]] = {
    "operator retry": InvalidOperationError,
    "operator complete": InvalidOperationError,
    "operator cancel": InvalidOperationError,
    "add": BatchSealedError,
}


class Second:
    """The second session: does its work in a thread, in a transaction only if the engine uses one."""

    def __init__(self, dsn: str) -> None:
        self._conn = psycopg.connect(dsn, autocommit=True)
        self._watch = psycopg.connect(dsn, autocommit=True)

    def close(self) -> None:
        self._conn.close()
        self._watch.close()

    def begin(self, name: str, scene: Scene) -> threading.Thread:
        self.answer: Any = None
        thread = threading.Thread(target=self._work, args=(name, scene))
        thread.start()
        return thread

    def blocked(self) -> bool:
        pids = self._watch.execute("SELECT pg_blocking_pids(%s)", [self._conn.info.backend_pid]).fetchone()
        return pids != ([],)

    def _work(self, name: str, scene: Scene) -> None:
        try:
            if name in ONE_STATEMENT:
                self.answer = perform(self._conn, OPERATIONS[name](scene))
            else:
                with self._conn.transaction():
                    self.answer = perform(self._conn, OPERATIONS[name](scene))
        except BaseException as error:
            self.answer = error


def meet(first: str, second: str, scene: Scene, conn: psycopg.Connection[Any], other: Second, ending: str) -> None:
    perform(conn, OPERATIONS[first](scene))
    thread = other.begin(second, scene)
    deadline = time.monotonic() + WITHIN
    while thread.is_alive() and not other.blocked():
        assert time.monotonic() < deadline
        thread.join(0.002)
    getattr(conn, ending)()
    thread.join(WITHIN)
    assert not thread.is_alive(), f"{second} still waits after {first} has ended by {ending}"
    if isinstance(other.answer, BaseException):
        documented = DOCUMENTED.get(second, type(None))
        assert isinstance(other.answer, documented), f"{second} after {first}: {other.answer!r}"


def run_to_the_end(database: Database, scene: Scene) -> None:
    """As workers, sweep and an operator would; then the batch is complete, and every command has ended once."""
    database.rows("UPDATE busload.worker SET seen_at = '-infinity' WHERE stopped_at IS NULL")
    worker = registered(database)
    for _ in range(30):
        database.perform(rescue.rescue())
        database.perform(cancel.cancel_stragglers())
        database.rows("UPDATE busload.scheduled SET run_at = now()")
        database.perform(claim.promote())
        leased = database.perform(claim.claim(worker=worker, domains=[DOMAIN], limit=50)).leased
        database.perform(settle.settle([Transition(one, COMPLETED) for one in leased], now=0.0))
        for (command_id,) in database.rows(
            "SELECT command_id FROM busload.troubleshooting t JOIN busload.command c ON c.id = t.command"
        ):
            database.perform(
                decisions.decide_one(DOMAIN, command_id, Decision(action="complete", result=None, operator="ada"))
            )
        if not rows_left(database, PLACES[:4]):
            break
    database.check_invariants()
    database.perform(send.seal(DOMAIN, scene.batch_id))
    assert rows_left(database, PLACES[:4]) == []
    completed = "SELECT completed_at IS NOT NULL FROM busload.batch WHERE batch_id = %s"
    assert database.value(completed, scene.batch_id) is True
    database.check_invariants()
    commands = database.count("command")
    assert database.perform(pruned(archive=False)).commands == commands
    assert rows_left(database, HISTORY[:5]) == []


def rows_left(database: Database, tables: Sequence[str]) -> list[tuple[Any, ...]]:
    """The names of the tables that have rows, found by one statement."""
    return database.rows(
        " UNION ALL ".join(f"SELECT '{table}' WHERE EXISTS (SELECT FROM busload.{table})" for table in tables)
    )


@pytest.fixture(scope="module")
def stage(server: TestServer) -> Iterator[tuple[str, Database, Second]]:
    with server.database() as plain:
        dsn = make_conninfo(plain, options=PLANNED_ONCE)
        with Database(dsn) as database:
            second = Second(dsn)
            yield dsn, database, second
            second.close()


@pytest.mark.parametrize("ending", ["commit", "rollback"])
@pytest.mark.parametrize("first", OPERATIONS)
def test_a_pair_of_transitions_on_the_same_rows(stage: tuple[str, Database, Second], first: str, ending: str) -> None:
    dsn, database, other = stage
    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    before = database.value(deadlocks)
    with psycopg.connect(dsn) as conn:
        for second in OPERATIONS:
            if {first, second} in IMPOSSIBLE:
                continue
            scene = set_the_scene(database)
            try:
                meet(first, second, scene, conn, other, ending)
                database.check_invariants()
                run_to_the_end(database, scene)
            except AssertionError as error:
                raise AssertionError(f"{first} ({ending}), then {second}: {error}") from error
            finally:
                conn.rollback()
    assert database.value(deadlocks) == before
