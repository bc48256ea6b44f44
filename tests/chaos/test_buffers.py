"""Buffers, bulk calls and limits under fire: nothing lost, deleted unsent, put into two groups, or overrun."""

from __future__ import annotations

import json
import random
import signal
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest

from busload import BatchCommand, Settings, SyncCommandBus
from busload.buffers import BufferTable
from busload.buffers.declaration import EXHAUSTED, GROUP
from busload.buffers.event_table import all_ddl
from busload.sync import SyncBuffer
from busload.testing import TestServer
from tests.chaos.harness import Auditor, Call, Received, Server, Watcher, Workers, folder, retry_crashed, seeded
from tests.chaos.nursery import BULK, DID_NOT_START, LIMITED
from tests.given import Database, short_and_long, until

OWN, THEIRS = "own_events", "their_events"
WORKERS, PRODUCERS = 3, 2

# -- kills, frozen workers, a server that is cut off -----------------------------------------------------------------

APPLICATION = """
    CREATE TABLE activity (n bigint PRIMARY KEY, buffer text NOT NULL);
    CREATE TABLE activity_event (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, n bigint NOT NULL REFERENCES activity,
        group_id uuid, created_at timestamptz NOT NULL DEFAULT clock_timestamp());
"""
EVENT = f"""
    SELECT buffer, (data ->> 'n')::bigint AS n, group_id FROM busload.buffered
    UNION ALL SELECT '{THEIRS}', n, group_id FROM activity_event
"""
LIVE = "'PENDING', 'SCHEDULED', 'IN_PROGRESS', 'IN_TROUBLESHOOTING_QUEUE'"

# Of one snapshot: a group whose command has ended or never was, an event in two places, one of an activity that was
# rolled back; and the activities whose event has left, which the receiver must know of by now.
FACTS = f"""
    WITH event AS MATERIALIZED ({EVENT})
    SELECT 'orphan', buffer, 0 FROM (SELECT DISTINCT buffer, group_id FROM event WHERE group_id IS NOT NULL) AS g
     WHERE NOT EXISTS (SELECT FROM busload.command_status AS c WHERE c.domain = g.buffer AND c.command_id = g.group_id
                          AND c.command_type = '{GROUP}' AND c.status IN ({LIVE}) OFFSET 0)
    UNION ALL SELECT 'twice', buffer, n FROM event GROUP BY buffer, n HAVING count(*) > 1
    UNION ALL SELECT 'undone', buffer, n FROM event WHERE NOT EXISTS (SELECT FROM activity AS a WHERE a.n = event.n)
    UNION ALL SELECT 'left', buffer, n FROM activity AS a WHERE NOT EXISTS (SELECT FROM event WHERE event.n = a.n)
"""


class Watch(Watcher):
    """Looks at one snapshot after the other and keeps what must not be."""

    def __init__(self, dsn: str, receiver: Path, every: float = 0.25) -> None:
        super().__init__(dsn, every)
        self._received = Received(receiver)
        self._read, self._known = 0, set[tuple[str, int]]()
        self.wrong: list[Any] = []

    def _watch(self) -> None:
        with psycopg.connect(self._dsn, connect_timeout=5) as conn:
            facts = conn.execute(FACTS.encode()).fetchall()
        known = self._taken()  # later than the snapshot: an event leaves after its call
        self.wrong += [fact for fact in facts if fact[0] != "left" or fact[1:] not in known]
        self.snapshots += 1

    def _taken(self) -> set[tuple[str, int]]:
        calls = self._received.read()
        for call in calls[self._read :]:
            self._known |= {(call.name, data["n"]) for _, _, data in call.items}
        self._read = len(calls)
        return self._known


@dataclass
class Harm:
    """What is done to a fleet: kills, freezes beyond the lease, and a server that is cut off; and who is left."""

    server: Server
    workers: Workers
    chance: random.Random
    producers: list[int]
    start_producer: Callable[[], int]
    frozen: list[int] = field(default_factory=list)
    kills: int = 0
    woken: int = 0

    def do(self, *, kills: int, restarts: int, freezes: int) -> None:
        cuts, colds = self._spread(restarts, kills), self._spread(freezes, kills)
        for n in range(kills):
            seen = self.workers.receiver.stat().st_size
            if n in cuts:
                self.server.restart()
            # A worker that has made no call would be a waste of a kill; one between its call and the end of it is not.
            until(lambda seen=seen: self._goes_on(seen), 60)  # type: ignore[misc]
            time.sleep(self.chance.uniform(0, 0.05))  # where in its round it dies is left to chance
            if n in colds:
                self._freeze()
            self._kill()
        until(self._thaw, 60)

    @staticmethod
    def _spread(times: int, kills: int) -> set[int]:
        return {round((n + 1) * kills / (times + 1)) for n in range(times)}

    def _goes_on(self, seen: int) -> bool:
        self.workers.keep(WORKERS)
        self.producers = [pid for pid in self.producers if pid not in self.workers.ended]
        self.producers += [self.start_producer() for _ in range(PRODUCERS - len(self.producers))]
        self._thaw()
        return self.workers.receiver.stat().st_size > seen

    def _kill(self) -> None:
        if self.chance.randrange(5) == 0:
            self.workers.kill(self.producers.pop(self.chance.randrange(len(self.producers))))
        else:
            self.workers.kill(self.chance.choice(self.workers.alive))
        self.kills += 1

    def _freeze(self) -> None:
        pid = self.chance.choice(self.workers.alive)
        self.workers.alive.remove(pid)
        self.workers.kill(pid, signal.SIGSTOP)
        self.frozen.append(pid)

    def _thaw(self) -> bool:
        """Wake those that were declared dead meanwhile; true if nobody is left."""
        for pid in list(self.frozen):
            if self._is_lost(pid):
                self.workers.kill(pid, signal.SIGCONT)
                self.workers.alive.append(pid)
                self.frozen.remove(pid)
                self.woken += 1
        return not self.frozen

    def _is_lost(self, pid: int) -> bool:
        with suppress(psycopg.OperationalError), Database(self.server.dsn) as database:
            registered = (
                "SELECT coalesce(bool_and(stopped_at IS NOT NULL), true) FROM busload.worker WHERE name LIKE %s"
            )
            return bool(database.value(registered, f"%:{pid}:%"))
        return False


@short_and_long("kills, restarts, freezes, stock", (20, 2, 2, 500), (1000, 20, 50, 2000))
def test_kills_freezes_and_restarts_lose_no_event_and_send_none_that_was_rolled_back(
    kills: int, restarts: int, freezes: int, stock: int
) -> None:
    """In a buffer of ours and in an application's table, by the ledgers of the application and the receiver."""
    chance = seeded()
    with folder() as path, Server(path / "server") as server:
        with Database(server.dsn) as database, SyncCommandBus(server.dsn) as bus:
            prepare(database)
            for name, table in ((OWN, None), (THEIRS, "activity_event")):
                add_stock(database, bus.buffer(name, table=table), stock)
        buffers = {
            OWN: {"size": 30, "max_age": 0.3, "max_groups": 50},
            THEIRS: {"size": 20, "max_age": 0.3, "max_groups": 50, "table": "activity_event"},
        }
        notes = path / "notes"
        options: dict[str, Any] = {"buffers": buffers, "domains": list(buffers), "lease_for": 1.5}
        # Few groups at a time: those that a killed worker held run one after the other.
        options |= {"concurrency": 2, "prefetch": 0, "pause": 0.03}
        with Workers(server.dsn, path, moods=True, notes=str(notes), rest=0.005, **options) as workers:
            began = time.monotonic()
            start_producer = lambda: workers.assist("producer")[0]  # noqa: E731
            with Watch(server.dsn, workers.receiver) as watch:
                harm = Harm(server, workers, chance, [], start_producer)
                harm.do(kills=kills, restarts=restarts, freezes=freezes)
                harmed = time.monotonic() - began
                for pid in harm.producers:
                    workers.kill(pid, signal.SIGTERM)
                until(lambda: workers.look().keys() >= set(harm.producers))
                workers.keep(WORKERS)
                with Database(server.dsn) as database, SyncCommandBus(server.dsn) as bus:
                    parked = let_all_go(bus, database, within=60 + kills)
            took = time.monotonic() - began
            assert set(workers.stop()) == {0}, workers.last_words()
            assert set(workers.ended.values()) <= {0, 9, -signal.SIGKILL, DID_NOT_START}, workers.last_words()
            assert watch.wrong[:20] == []
            assert watch.snapshots > 0 and harm.woken == freezes
            with Database(server.dsn) as database:
                calls = Received(workers.receiver).read()
                repeated = check(database, calls, notes)
                events, undone = database.value("SELECT count(*) FROM activity"), notes.read_text().count("undone")
    print(
        f"buffers: {harm.kills} kill -9, {freezes} workers frozen beyond their lease and {restarts} immediate "
        f"restarts in {harmed:.0f} s during {events} committed and {undone} rolled back events in {len(calls)} "
        f"calls: 0 lost, 0 of rolled back ones, 0 in two places in {watch.snapshots} snapshots; {repeated} "
        f"delivered more than once, with the same ids; {parked} groups parked and retried, "
        f"all done after {took:.0f} s"
    )


def prepare(database: Database) -> None:
    for statement in APPLICATION.split(";\n"):
        if statement.strip():
            database.rows(statement)
    for statement in all_ddl(BufferTable("activity_event")):
        with suppress(psycopg.errors.DuplicateColumn):
            database.rows(statement)


def add_stock(database: Database, events: SyncBuffer, count: int) -> None:
    """So many wait from the beginning, so that there are whole groups."""
    numbers = range(2**53, 2**53 + count) if events.settings.table else range(2**54, 2**54 + count)
    with database._conn.transaction():
        database.rows("INSERT INTO activity (n, buffer) SELECT unnest(%s::bigint[]), %s", list(numbers), events.name)
        events.add_many([{"n": n} for n in numbers], conn=database._conn)


def let_all_go(bus: SyncCommandBus, database: Database, within: float) -> int:
    """Nothing waits for more; what was there whenever a worker died, or was refused for good, an operator retries."""
    parked = 0
    for name, table in ((OWN, None), (THEIRS, "activity_event")):
        bus.buffer(name, table=table).flush()

    def empty() -> bool:
        nonlocal parked
        for item in (item for name in (OWN, THEIRS) for item in bus.troubleshooting.list(name)):
            assert item.reason in ("CRASHED", "PERMANENT"), item
            bus.troubleshooting.retry(item.domain, item.command_id, operator="test")
            parked += 1
        return database.is_at_rest() and database.value(f"SELECT count(*) FROM ({EVENT}) AS event") == 0

    until(empty, within)
    return parked


def check(database: Database, calls: list[Call], notes: Path) -> int:
    """What the application has committed against what the receiver got; returns how many it got more than once."""
    committed = {(buffer, n) for buffer, n in database.rows("SELECT buffer, n FROM activity")}
    said = defaultdict[str, set[tuple[str, int]]](set)
    for fact, buffer, n in (line.split() for line in notes.read_text().splitlines()):
        said[fact].add((buffer, int(n)))
    deliveries = defaultdict[tuple[str, int], list[tuple[str, str]]](list)
    for call in calls:
        for id, _, data in call.items:
            deliveries[call.name, data["n"]].append((id, call.group))
    assert said["added"] <= committed, "what was acknowledged is there"
    assert said["undone"] and not said["undone"] & deliveries.keys(), "what was rolled back was never sent"
    assert deliveries.keys() == committed, "all of it was sent, and nothing else"
    # The receiver can tell a second delivery by the item's id, and by that of its group unless it was parted off.
    origins = dict(database.rows("SELECT command_id::text, coalesce(correlation_id, command_id) FROM busload.command"))
    assert [one for one, sent in deliveries.items() if len({id for id, _ in sent}) > 1] == []
    assert [one for one, sent in deliveries.items() if len({origins[group] for _, group in sent}) > 1] == []
    for name in (OWN, THEIRS):
        ids = [sent[0][0] for (buffer, _), sent in deliveries.items() if buffer == name]
        assert len(ids) == len(set(ids)), "no two events have one id"
    ended = f"SELECT count(*) FROM busload.command_status WHERE command_type = '{GROUP}' AND status <> 'COMPLETED'"
    assert database.value(ended) == 0
    database.check_invariants()
    return sum(len(sent) > 1 for sent in deliveries.values())


# -- claimers that get in each other's way ---------------------------------------------------------------------------

PLAIN, MERGED, KEPT = "plain_events", "merged_events", "kept_events"
CLAIM_LOG = (
    "CREATE TABLE claim_log (buffer text, id bigint, was uuid, age interval)",
    "CREATE FUNCTION log_claim() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO claim_log VALUES"
    " (NEW.buffer, NEW.id, OLD.group_id, clock_timestamp() - NEW.created_at); RETURN NULL; END'",
    "CREATE TRIGGER log_claim AFTER UPDATE OF group_id ON busload.buffered FOR EACH ROW EXECUTE FUNCTION log_claim()",
)
LONGEST_AGE = 10.0
"""Seconds that an event may wait in a storm, however long that lasts; its max_age is a fraction of one."""


@contextmanager
def fleet(server: TestServer, **options: Any) -> Iterator[tuple[Workers, Database, SyncCommandBus, Path]]:
    with (
        server.database() as dsn,
        folder() as path,
        Database(dsn) as database,
        SyncCommandBus(dsn, settings=Settings(pool_size=3)) as bus,
        Workers(dsn, path, **options) as workers,
    ):
        yield workers, database, bus, path


@short_and_long("seconds, merged_size", (4.0, 5), (30.0, 50))
def test_claimers_that_race_put_no_event_into_two_groups_and_keep_the_order_of_a_subject(
    server: TestServer, seconds: float, merged_size: int
) -> None:
    """Eight claimers and the claims of two workers against two producers, each a process, at full speed.

    A trigger in the database logs which event was put into a group; the receiver tells in which order numbers came.
    Small groups, so that several of a subject could leave at once if claims did not take turns.
    """
    buffers = {
        PLAIN: {"size": 50, "max_age": 0.2, "max_groups": 10_000},
        MERGED: {"size": merged_size, "max_age": 0.2, "max_groups": 10_000, "merge": "append"},
        KEPT: {"size": 50, "max_age": 0.2, "max_groups": 10_000, "merge": "keep_last"},
    }
    with fleet(server, buffers=buffers, domains=list(buffers), pause=0, lease_for=30) as (workers, database, _, path):
        for statement in CLAIM_LOG:
            database.rows(statement)
        notes = path / "sent"
        notes.mkdir()
        workers.start(2)
        claimers = workers.assist("claimer", 8)
        pourers = workers.assist("pourer", 2, notes=str(notes))
        until(lambda: workers.receiver.stat().st_size)
        time.sleep(seconds)  # the length of the storm, not a wait for something
        for pid in pourers:
            workers.kill(pid, signal.SIGTERM)
        until(lambda: workers.look().keys() >= set(pourers))
        poured = database.value("SELECT count(*) FROM claim_log"), database.count("buffered")
        until(lambda: database.count("buffered") == 0, 60)
        for pid in claimers:
            workers.kill(pid, signal.SIGTERM)
        until(lambda: workers.look().keys() >= set(claimers))
        assert workers.stop() == [0, 0], workers.last_words()
        assert set(workers.ended.values()) == {0}, workers.last_words()

        sent = Counter[str]()
        for file in notes.iterdir():
            sent.update(json.loads(file.read_text()))
        received = defaultdict[str, list[int]](list)
        for call in Received(workers.receiver).read():
            for _, key, numbers in call.items:
                received[str(key)] += numbers
        assert database.rows("SELECT * FROM claim_log WHERE was IS NOT NULL LIMIT 5") == [], "in a second group"
        claims = database.rows("SELECT count(*), count(DISTINCT id), extract(epoch FROM max(age)) FROM claim_log")
        [(claimed, events, age)] = claims
        kept = {key for key in sent if key.startswith(KEPT)}
        whole = sent.keys() - kept
        assert received.keys() == sent.keys()
        assert claimed == events == sum(sent[key] for key in whole) + sum(len(received[key]) for key in kept) > 0
        assert {key for key in whole if sorted(received[key]) != list(range(sent[key]))} == set(), "each once"
        out_of_order = {
            key for key in sent if not key.startswith(PLAIN) and received[key] != sorted(set(received[key]))
        }
        assert out_of_order == set(), "in their order, where they are merged"
        assert {key for key in kept if received[key][-1] != sent[key] - 1} == set(), "the last one wins"
        ages = "SELECT buffer, extract(epoch FROM max(age))::float FROM claim_log GROUP BY buffer"
        assert age < LONGEST_AGE, database.rows(ages)
        database.check_invariants()
        print(
            f"claimers: 8 processes and 2 workers, 2 producers, {seconds:.0f} s: {sent.total() / seconds:.0f} "
            f"events/s added one by one, {poured[0] / seconds:.0f}/s claimed meanwhile, {poured[1]} left to do, "
            f"oldest {age:.2f} s when claimed, 0 in two groups, 0 out of order among {len(sent)} subjects"
        )


# -- a hook that kills its worker ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("crashes", "ends"), [(2, "COMPLETED"), (1000, "IN_TROUBLESHOOTING_QUEUE")])
def test_a_hook_that_kills_its_worker_is_tried_again_and_no_event_is_deleted(
    server: TestServer, crashes: int, ends: str
) -> None:
    """The group waits for a person with all its events, whatever becomes of the hook."""
    buffers = {"doomed": {"size": 20, "max_age": 0.1}}
    with fleet(server, buffers=buffers, domains=["doomed"], hook_crashes=crashes) as (workers, database, bus, _):
        bus.buffer("doomed").add_many([{"n": n} for n in range(20)])
        of_hook = f"SELECT status FROM busload.command_status WHERE command_type = '{EXHAUSTED}'"
        deaths = 0
        while database.rows(of_hook) != [(ends,)]:
            assert deaths < 20
            if not workers.alive:
                workers.start()
            until(lambda: (workers.look() and not workers.alive) or database.rows(of_hook) == [(ends,)], 30)
            if not workers.alive:
                deaths += 1
                database.rows("UPDATE busload.worker SET seen_at = '-infinity' WHERE stopped_at IS NULL")  # time passes
        assert workers.stop() == [0]
        parked = {item.command_type: item for item in bus.troubleshooting.list("doomed")}
        group = parked[GROUP]
        assert group.reason == "EXHAUSTED"
        held = database.rows("SELECT (data ->> 'n')::int FROM busload.buffered WHERE group_id = %s", group.command_id)
        assert sorted(n for (n,) in held) == list(range(20)) and database.count("buffered") == 20
        if ends != "COMPLETED":
            assert parked[EXHAUSTED].reason == "CRASHED"
        hooked = [call for call in Received(workers.receiver).read() if call.name == "hook"]
        assert {call.group for call in hooked} == {str(group.command_id)}
        assert {len(call.items) for call in hooked} == {20}
        assert len(hooked) == deaths + (ends == "COMPLETED") >= 3
        database.check_invariants()


# -- bulk handlers under kill -9 ---------------------------------------------------------------------------------------


@short_and_long("kills, commands", (12, 4000), (200, 60_000))
def test_bulk_handlers_that_are_killed_leave_exact_counters_and_nothing_undone(
    server: TestServer, kills: int, commands: int
) -> None:
    """Each command of a chunk completes once, and its batch once."""
    chance = seeded()
    options = {"bulk": 40, "domains": [BULK], "concurrency": 3, "lease_for": 1.5, "pause": 0.1}
    with fleet(server, **options) as (workers, database, bus, _):
        with Auditor(database._conn.info.dsn) as auditor:
            callback = BatchCommand("Push", data={"n": -1})
            pushes = [BatchCommand("Push", data=n) for n in range(commands // 4)]
            batches = [bus.create_batch(BULK, pushes, on_complete=callback) for _ in range(4)]
            workers.start(WORKERS)
            for _ in range(kills):
                seen = workers.receiver.stat().st_size
                until(lambda seen=seen: workers.receiver.stat().st_size > seen or not database.count("queue"), 30)  # type: ignore[misc]
                time.sleep(chance.uniform(0, 0.05))  # where in its round it dies is left to chance
                workers.kill(chance.choice(workers.alive))
                workers.start()
            parked = retry_crashed(bus, database, BULK)
            assert workers.stop() == [0] * WORKERS, workers.last_words()
        assert set(workers.ended.values()) == {0, -signal.SIGKILL}, workers.last_words()
        assert auditor.mismatches[:5] == [] and auditor.snapshots > 0
        taken = Counter(id for call in Received(workers.receiver).read() for id, _, _ in call.items)
        stored = {str(command_id) for (command_id,) in database.rows("SELECT command_id FROM busload.command")}
        assert taken.keys() == stored and len(stored) == commands + 4
        counted = database.rows("SELECT batch_id, completed_count, total_count, status FROM busload.batch ORDER BY 1")
        assert counted == [(batch_id, commands // 4, commands // 4, "COMPLETED") for batch_id in sorted(batches)]
        done = database.rows("SELECT count(*) FROM busload.event WHERE type = 'BATCH_COMPLETED' GROUP BY batch_id")
        assert done == [(1,)] * 4
        database.check_invariants()
        again = sum(n > 1 for n in taken.values())
        print(
            f"bulk handlers: {kills} kill -9 during {commands} commands in chunks of 40: 0 lost, counters exact in "
            f"{auditor.snapshots} snapshots, {again} sent more than once, {parked} parked"
        )


# -- limits across processes -------------------------------------------------------------------------------------------

RATE, BURST = 50, 5
LATE = 5
"""Calls that a busy machine may bunch: let go in time, they begin a twentieth of a second late, or somewhat more."""


@short_and_long("seconds, use", (4.0, 0.5), (30.0, 0.85))
def test_processes_that_share_a_limit_keep_it_and_use_it(server: TestServer, seconds: float, use: float) -> None:
    """In a short run a slow machine keeps a part of the limit for itself."""
    limit = {"calls": RATE, "burst": BURST}
    with fleet(server, limit=limit, domains=[LIMITED], concurrency=20) as (workers, database, bus, _):
        workers.start(3)
        until(lambda: database.count("worker") == 3)
        bus.create_batch(LIMITED, [BatchCommand("Call") for _ in range(round(RATE * seconds) + 500)])
        received = Received(workers.receiver)

        def callers() -> set[int]:
            return {call.pid for call in received.read()}

        until(lambda: len(callers()) == 3 and len(received.calls) >= RATE * seconds * 0.85, 10 * seconds)
        assert workers.stop() == [0] * 3, workers.last_words()
        calls = received.read()
        assert callers() == set(workers.ended), "all of them have called"
        at = sorted(call.at for call in calls)
        most = max(n for width in (0.1, 0.5, 1.0, 2.0) for n in [busiest(at, width) - RATE * width])
        assert most <= BURST + LATE
        used = (len(at) - BURST) / ((at[-1] - at[0]) * RATE)
        assert used >= use
        assert database.value("SELECT coalesce(max(attempt), 0) FROM busload.execution") == 1
        database.check_invariants()
        gap = max(b - a for a, b in pairwise(at))
        print(
            f"limits: 3 processes, {RATE}/s with a burst of {BURST}: {len(at)} calls in {at[-1] - at[0]:.1f} s, "
            f"{used:.1%} used, at most {most:.1f} more than the rate in any window, longest gap {gap * 1000:.0f} ms"
        )


def busiest(at: list[float], width: float) -> int:
    """The most calls in any window of so many seconds."""
    return max(bisect_right(at, start + width) - index for index, start in enumerate(at))


def test_a_process_that_was_frozen_begins_no_call_whose_turn_has_passed(server: TestServer) -> None:
    """Half of the calls that it was let go ahead would come at once, beside those of the other process"""
    rate = 100
    limit = {"calls": rate}
    with fleet(server, limit=limit, domains=[LIMITED], concurrency=100) as (workers, database, bus, _):
        frozen, _ = workers.start(2)
        until(lambda: database.count("worker") == 2)
        bus.create_batch(LIMITED, [BatchCommand("Call") for _ in range(10 * rate)])
        received = Received(workers.receiver)
        for round in range(2):
            until(lambda: Counter(call.pid for call in received.read())[frozen] > 20 * (round + 1))  # noqa: B023
            workers.kill(frozen, signal.SIGSTOP)
            before = len(received.read())
            until(lambda: len(received.read()) > before + rate * 0.7)  # noqa: B023
            workers.kill(frozen, signal.SIGCONT)
        thawed = len(received.read())
        until(lambda: len(received.read()) > thawed + rate)
        at = sorted(call.at for call in received.calls)
        assert busiest(at, 1.0) <= rate * 1.12
        assert busiest(at, 0.25) <= rate * 0.25 + rate * 0.12


# -- a graceful stop ---------------------------------------------------------------------------------------------------


def test_workers_that_are_told_to_stop_while_others_add_lose_no_event_and_send_none_twice(server: TestServer) -> None:
    """Groups that run finish; events of other groups stay in their group or wait."""
    buffers = {PLAIN: {"size": 5, "max_age": 0.05}}
    with fleet(server, buffers=buffers, domains=[PLAIN], pause=0.03, concurrency=2) as (workers, database, bus, _):
        events = bus.buffer(PLAIN)
        stopping: list[int] = []
        for first in range(0, 100, 20):
            working = workers.start()
            until(lambda n=first // 20 + 1: database.count("worker") == n)  # type: ignore[misc]  # it hears signals now
            seen = workers.receiver.stat().st_size
            events.add({"n": first})
            until(lambda seen=seen: workers.receiver.stat().st_size > seen)  # type: ignore[misc]
            for pid in stopping:  # once each: a third signal ends a process at once
                workers.kill(pid, signal.SIGTERM)
            for n in range(first + 1, first + 20):
                events.add({"n": n})
            stopping = working
        until(lambda: database.count("buffered") == 0)
        workers.stop()
        assert len(workers.ended) == 5 and set(workers.ended.values()) == {0}, workers.last_words()
        taken = Counter(data["n"] for call in Received(workers.receiver).read() for _, _, data in call.items)
        assert taken == Counter(range(100))
        assert database.value("SELECT max(attempt) FROM busload.execution") == 1
        assert database.value("SELECT count(*) FROM busload.event WHERE type = 'LEASE_LOST'") == 0
        database.check_invariants()
