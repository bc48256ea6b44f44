"""Zombies, lost answers and redeliveries: what a tracker must survive."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from uuid import UUID

import psycopg
import pytest

from busload import CommandBus, Execution, TaskTracker
from busload.commands import rescue
from busload.commands.execution import Succeeded
from busload.errors import SupersededError
from busload.settings import PayloadLimits
from busload.sync.connection import connect
from busload.tasks import track
from tests.given import Database, Given, eventually, until

pytestmark = pytest.mark.usefixtures("invariants")

QUEUE = "partner_tasks"
ZOMBIES, REDELIVERIES = 500, 1000
LIMITS = PayloadLimits()


@pytest.fixture
async def zombie(bus: CommandBus) -> AsyncIterator[TaskTracker]:
    """Its process is about to be frozen: declared dead, and then it goes on as if nothing had happened."""
    async with TaskTracker(bus, name="zombie") as tracker:
        yield tracker


@pytest.fixture
async def silent_zombie(bus: CommandBus) -> AsyncIterator[TaskTracker]:
    """One of which no heartbeat comes during a test. It would take up again what nobody has taken over yet."""
    async with TaskTracker(bus, name="zombie", lease_for=timedelta(hours=3)) as tracker:
        yield tracker


@pytest.fixture
async def living(bus: CommandBus) -> AsyncIterator[TaskTracker]:
    async with TaskTracker(bus, name="living") as tracker:
        yield tracker


async def running(tracker: TaskTracker, count: int) -> list[Execution]:
    """Tasks that were enqueued and claimed."""

    async def run(n: int) -> Execution:
        queued = await tracker.enqueue(f"jobs:{n}", queue=QUEUE, metadata={"n": n})
        assert queued is not None and queued.execution_id is not None
        execution = await tracker.claim(f"jobs:{n}", queued.execution_id)
        assert execution is not None
        return execution

    return [await run(0), *await asyncio.gather(*map(run, range(1, count)))]


def number(database: Database, name: str) -> int:
    return int(database.value("SELECT max(worker) FROM busload.worker WHERE name = %s", name))


async def redelivered(tracker: TaskTracker, message: Execution) -> Execution | None:
    assert message.task_key is not None and message.execution_id is not None
    return await tracker.claim(message.task_key, message.execution_id)


async def test_zombies_are_never_credited(
    silent_zombie: TaskTracker, living: TaskTracker, given: Given, database: Database
) -> None:
    """Each is told, whether it comes before or after the one who took over, and writes nothing."""
    late = await running(silent_zombie, ZOMBIES)
    given.died(number(database, "zombie"))

    async def race(n: int, old: Execution) -> None:
        current = await redelivered(living, old)
        assert current is not None and current.execution_id != old.execution_id
        if n % 2:
            await living.complete(current, {"by": "living"})
        with pytest.raises(SupersededError):
            await (silent_zombie.complete(old, {"by": "zombie"}) if n % 3 else silent_zombie.fail(old, "late"))
        if not n % 2:
            await living.complete(current, {"by": "living"})

    await race(0, late[0])
    await asyncio.gather(*(race(n, old) for n, old in enumerate(late[1:], 1)))
    credited = database.rows(
        "SELECT w.name, e.outcome, e.details ->> 'by', count(*) FROM busload.execution AS e"
        " JOIN busload.worker AS w USING (worker) GROUP BY 1, 2, 3"
    )
    assert credited == [("living", "COMPLETED", "living", ZOMBIES)]
    assert database.value("SELECT count(*) FROM busload.event WHERE type = 'LEASE_LOST'") == ZOMBIES


async def test_a_frozen_process_comes_back_to_nothing(
    living: TaskTracker, database: Database, dsn: str, bus: CommandBus
) -> None:
    """With real signals: SIGSTOP for longer than the lease, takeover, SIGCONT."""
    queued = await living.enqueue("jobs:frozen", queue=QUEUE)
    assert queued is not None and queued.execution_id is not None
    process = subprocess.Popen(
        [sys.executable, "-c", FROZEN, dsn, str(queued.execution_id)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert await asyncio.to_thread(process.stdout.readline) == "claimed\n"
        process.send_signal(signal.SIGSTOP)
        silent = "SELECT count(*) FROM busload.worker WHERE seen_at < now() - lease_for AND name <> 'living'"
        await eventually(lambda: database.value(silent))
        current = await redelivered(living, queued)
        assert current is not None
        process.send_signal(signal.SIGCONT)
        process.stdin.write("complete\n")
        process.stdin.flush()
        assert await asyncio.to_thread(process.stdout.readline) == "SupersededError\n"
        await living.complete(current)
        process.stdin.close()
        assert await asyncio.to_thread(process.wait, 30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert [str(one.status) for one in await living.history("jobs:frozen")] == ["lost", "completed"]


FROZEN = """
import sys
from datetime import timedelta
from busload import SyncCommandBus, SyncTaskTracker
from busload.errors import SupersededError

with SyncCommandBus(sys.argv[1]) as bus, SyncTaskTracker(bus, lease_for=timedelta(seconds=1)) as tracker:
    execution = tracker.claim("jobs:frozen", sys.argv[2])
    print("claimed", flush=True)
    sys.stdin.readline()
    try:
        tracker.complete(execution)
        print("credited", flush=True)
    except SupersededError as error:
        print(type(error).__name__, flush=True)
"""


async def test_a_zombies_heartbeat_is_refused(
    zombie: TaskTracker,
    living: TaskTracker,
    given: Given,
    database: Database,
    dsn: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It keeps none of its leases, and goes on under a new number, for the same queues."""
    late = await running(zombie, 20)
    old = number(database, "zombie")
    given.died(old)
    current = [await redelivered(living, one) for one in late]
    with connect(dsn) as conn, caplog.at_level(logging.WARNING, "busload"):
        zombie._presence.once(conn)
    assert "declared dead" in caplog.text
    rows = database.rows(
        "SELECT worker = %s, stopped_at IS NULL, lost, domains FROM busload.worker"
        " WHERE name = 'zombie' ORDER BY worker",
        old,
    )
    assert rows == [(True, False, True, [QUEUE]), (False, True, False, [QUEUE])]
    assert database.value("SELECT count(*) FROM busload.lease WHERE worker <> %s", number(database, "living")) == 0
    for one in late:
        with pytest.raises(SupersededError):
            await zombie.complete(one)
    for taken in current:
        assert taken is not None
        await living.complete(taken)


async def test_a_heartbeat_keeps_what_runs(bus: CommandBus, living: TaskTracker, database: Database) -> None:
    """Longer than any lease lasts, and while the process does something else."""
    async with TaskTracker(bus, name="busy", lease_for=timedelta(milliseconds=300)) as busy:
        [execution] = await running(busy, 1)
        beats = "SELECT seen_at - started_at > 4 * lease_for FROM busload.worker WHERE name = 'busy'"
        await eventually(lambda: database.value(beats))
        assert await redelivered(living, execution) is None
        assert (await busy.complete(execution)).status == "completed"


async def test_redelivery_while_running_never_loses_a_task(
    zombie: TaskTracker, living: TaskTracker, given: Given, database: Database
) -> None:
    """The messages are acknowledged, the rows come back by lease, and each task completes exactly once."""
    tasks = await running(zombie, REDELIVERIES // 10)
    for _ in range(10):
        answers = await asyncio.gather(*(redelivered(living, task) for task in tasks))
        assert answers == [None] * len(tasks)
    assert await living.recover(QUEUE, waiting_for=timedelta(0)) == []
    given.died(number(database, "zombie"))
    again = await living.recover(QUEUE, waiting_for=timedelta(0))
    assert {one.task_key for one in again} == {task.task_key for task in tasks}
    done = 0
    for message in again + tasks + again:
        if (execution := await redelivered(living, message)) is not None:
            await living.complete(execution)
            done += 1
    assert done == len(tasks)
    assert database.rows("SELECT outcome, count(*) FROM busload.execution GROUP BY 1") == [("COMPLETED", len(tasks))]
    assert await living.recover(QUEUE, waiting_for=timedelta(0)) == []


async def test_a_redelivery_in_the_moment_of_death_takes_over_once(
    zombie: TaskTracker, living: TaskTracker, given: Given, database: Database
) -> None:
    """Many messages of many tasks ring at once when their worker is declared dead."""
    tasks = await running(zombie, 50)
    given.died(number(database, "zombie"))
    answers = await asyncio.gather(*(redelivered(living, task) for task in tasks * 4))
    taken = [one for one in answers if one is not None]
    assert len({one.task_key for one in taken}) == len(taken)
    for execution in taken:
        await living.complete(execution)
    for message in await living.recover(QUEUE, waiting_for=timedelta(0)):
        again = await redelivered(living, message)
        assert again is not None
        await living.complete(again)
    assert database.value("SELECT count(*) FROM busload.execution WHERE outcome = 'COMPLETED'") == len(tasks)


async def test_a_dead_worker_with_very_many_tasks_is_taken_over_whole(
    zombie: TaskTracker, living: TaskTracker, given: Given, database: Database
) -> None:
    """A rescue takes a thousand leases at a time: a claim goes on until it has found its own among them."""
    [task] = await running(zombie, 1)
    dead = number(database, "zombie")
    database.rows(
        "INSERT INTO busload.command (id, domain, command_id, command_type, data, task_key)"
        " SELECT n * 1024, 'partner_tasks', gen_random_uuid(), 'TrackedTask', '{}', 'crowd:' || n"
        "   FROM generate_series(1000001, 1001500) AS n"
    )
    database.rows(
        "INSERT INTO busload.lease"
        " (lease_id, lo, hi, domain, priority, attempt, forgiven, crashes, replies, fair, worker, open)"
        " SELECT ('00000000-0000-4000-8000-' || lpad(to_hex(n), 9, '0') || '000')::uuid, n * 1024, n * 1024,"
        "        'partner_tasks', 0, 1, 0, 0, false, 0, %s, 1 FROM generate_series(1000001, 1001500) AS n",
        dead,
    )
    given.died(dead)
    execution = await redelivered(living, task)
    assert execution is not None
    await living.complete(execution)


async def test_a_claim_whose_answer_was_lost_is_handed_back(
    zombie: TaskTracker, living: TaskTracker, database: Database, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection broke after the commit: this process lives on and would keep a lease it does not know."""
    [known] = await running(zombie, 1)
    queued = await zombie.enqueue("jobs:unknown", queue=QUEUE)
    assert queued is not None and queued.execution_id is not None
    database.perform(track.claim("jobs:unknown", queued.execution_id, worker=number(database, "zombie")))
    with connect(dsn) as conn:
        zombie._presence.once(conn)
        assert await redelivered(living, queued) is None
        database.rows("UPDATE busload.lease SET since = since - interval '1 min'")
        with caplog.at_level(logging.WARNING, "busload"):
            zombie._presence.once(conn)
    assert "Handed back 1 task whose" in caplog.text
    execution = await redelivered(living, queued)
    assert execution is not None
    await living.complete(execution)
    await zombie.complete(known)


async def test_a_claim_whose_answer_was_not_read_yet_is_kept(bus: CommandBus, database: Database) -> None:
    """The database has committed it, and the event loop is blocked for longer than a claim can take to answer."""
    async with TaskTracker(bus, name="blocked", lease_for=timedelta(milliseconds=300)) as blocked:
        execution = await claimed_just_before_the_loop_is_blocked(blocked, database)
        assert (await blocked.complete(execution)).status == "completed"


async def claimed_just_before_the_loop_is_blocked(tracker: TaskTracker, database: Database) -> Execution:
    held = "SELECT count(*) FROM busload.lease"
    beats = (
        "SELECT w.seen_at - l.since > 3 * w.lease_for FROM busload.lease AS l JOIN busload.worker AS w USING (worker)"
    )
    [first] = await running(tracker, 1)
    await tracker.complete(first)
    for n in range(1, 1000):
        queued = await tracker.enqueue(f"jobs:{n}", queue=QUEUE)
        assert queued is not None
        asked = asyncio.create_task(redelivered(tracker, queued))
        while not asked.done() and not database.value(held):
            await asyncio.sleep(0)
        late = not asked.done()
        if late:
            until(lambda: database.value(held) == 0 or database.value(beats))  # and nothing else happens here
        execution = await asked
        assert execution is not None
        if late:
            return execution
        await tracker.complete(execution)
    raise AssertionError("Never was an answer late.")


async def test_a_completion_whose_answer_was_lost_can_be_repeated(
    zombie: TaskTracker, database: Database, dsn: str
) -> None:
    """It was recorded, the process does not know: the heartbeat forgets the lease, and saying it again is harmless."""
    [execution] = await running(zombie, 1)
    presence = zombie._presence
    done = database.perform(track.end(execution, Succeeded(None), workers=presence.workers, limits=LIMITS))
    with connect(dsn) as conn:
        presence.once(conn)
    assert presence._held == {}
    assert await zombie.complete(execution) == done


async def test_a_heartbeat_survives_a_broken_connection(bus: CommandBus, database: Database) -> None:
    async with TaskTracker(bus, name="cut off", lease_for=timedelta(seconds=30)) as tracker:
        [execution] = await running(tracker, 1)
        tracker._presence._every = 0.05
        await tracker.close()
        await running_again(tracker)
        for _ in range(5):  # between two heartbeats, and perhaps in the midst of one
            await eventually(lambda: broken(database))
        before = database.value("SELECT max(seen_at) FROM busload.worker WHERE name = 'cut off'")
        newest = "SELECT max(seen_at) FROM busload.worker WHERE name = 'cut off'"
        await eventually(lambda: database.value(newest) > before)
        assert (await tracker.complete(execution)).status == "completed"


async def running_again(tracker: TaskTracker) -> None:
    queued = await tracker.enqueue("jobs:again", queue=QUEUE)
    assert queued is not None
    taken = await redelivered(tracker, queued)
    assert taken is not None
    await tracker.complete(taken)


def broken(database: Database) -> bool:
    """End every connection that renews a worker, if there is one."""
    ended = database.rows(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND query LIKE '%UPDATE busload.worker SET seen_at%'"
        "   AND pid <> pg_backend_pid()"
    )
    return bool(ended)


async def test_a_claim_races_a_promotion_and_still_gets_its_task(
    living: TaskTracker, database: Database, dsn: str
) -> None:
    """A worker of the bus moves what is due from one place to the next while the message rings."""
    [execution] = await running(living, 1)
    await living.fail(execution, "timeout")
    with psycopg.connect(dsn) as conn:
        conn.execute(
            "WITH due AS (DELETE FROM busload.scheduled RETURNING *)"
            " INSERT INTO busload.queue (lo, hi, domain, attempt) SELECT lo, hi, domain, attempt FROM due"
        )
        claim = asyncio.create_task(redelivered(living, execution))
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        await eventually(lambda: database.value(waits) > 0)
        conn.commit()
    again = await claim
    assert again is not None and again.attempt == 2


async def test_a_rescue_by_anyone_frees_the_task(
    zombie: TaskTracker, living: TaskTracker, given: Given, database: Database
) -> None:
    """Also that of an ordinary worker, which knows nothing of trackers."""
    [task] = await running(zombie, 1)
    given.died(number(database, "zombie"))
    assert database.perform(rescue.rescue()).commands == 1
    execution = await redelivered(living, task)
    assert execution is not None and isinstance(execution.execution_id, UUID)
    await living.complete(execution)
