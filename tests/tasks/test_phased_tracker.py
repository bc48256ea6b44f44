"""From a tracker of one's own to busload's: shadow, dual write, cut over."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from uuid import UUID, uuid4

import psycopg
import pytest

from busload import CommandBus, Dedup, Execution, Settings, SyncCommandBus, TaskTracker
from busload.errors import InvalidOperationError, SupersededError
from busload.retention.prune import Pruning
from busload.sync import SyncPhasedTracker
from busload.tasks import OldTracker, Phase, PhasedTracker
from busload.tasks import phase as phases
from examples.tracker_phases.sqlite_tracker import SqliteTracker
from tests.given import Database

QUEUE, TASK = "partner_tasks", "partner_tasks:SATLOC:695d"
OPERATIONS = ("enqueue", "claim", "complete", "fail", "retry", "history")
NO_WINDOW = Dedup(window=timedelta(0))


class Faulty(SqliteTracker):
    """An old tracker whose next call of an operation can be made to fail, or to wait for something."""

    def __init__(self, file: Path) -> None:
        super().__init__(str(file))
        self.failing: set[str] = set()
        self.instead: dict[str, Any] = {}
        self.calls: list[str] = []
        self.file = file

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in OPERATIONS:
            return found

        async def call(*args: object, **kwargs: object) -> Any:
            self.calls.append(name)
            if name in self.failing:
                raise ConnectionError("the old tracker is away")
            return await self.instead.get(name, found)(*args, **kwargs)

        return call

    def status(self) -> list[str]:
        with sqlite3.connect(self.file) as conn:
            return [status for (status,) in conn.execute("SELECT status FROM task_tracker ORDER BY created_at")]


@pytest.fixture
def old(tmp_path: Path) -> Faulty:
    return Faulty(tmp_path / "old.db")


@pytest.fixture
async def tracker(bus: CommandBus, old: Faulty) -> AsyncIterator[PhasedTracker]:
    async with PhasedTracker(bus, old) as tracker:
        old.calls.clear()
        yield tracker


async def enqueued(tracker: TaskTracker, task_id: str = TASK, **options: Any) -> Execution:
    execution = await tracker.enqueue(task_id, **{"queue": QUEUE, "dedup": NO_WINDOW, **options})
    assert execution is not None and execution.execution_id is not None
    return execution


async def claimed(tracker: TaskTracker, message: Execution) -> Execution:
    execution = await tracker.claim(str(message.task_key), str(message.execution_id))
    assert execution is not None
    return execution


async def run_once(tracker: TaskTracker, task_id: str = TASK) -> None:
    await tracker.complete(await claimed(tracker, await enqueued(tracker, task_id)))


async def switched(tracker: PhasedTracker, *to: Phase) -> None:
    for phase in to:
        assert await tracker.switch(phase, force=True)


async def own(bus: CommandBus) -> list[str]:
    """How busload's own tracker sees the task."""
    async with TaskTracker(bus) as tracker:
        return [str(one.status) for one in await tracker.history(TASK)]


async def said(tracker: PhasedTracker) -> list[tuple[str, str, str]]:
    """What was disagreed about, oldest first."""
    return [(one.operation, one.old, one.busload.split(":")[0]) for one in await tracker.disagreements()][::-1]


# -- each phase -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase.SHADOW, Phase.DUAL_WRITE])
async def test_both_trackers_are_written_and_agree(
    tracker: PhasedTracker, old: Faulty, bus: CommandBus, phase: Phase
) -> None:
    """Through failures, the dlq, a retry and the end; a duplicate and a second claim are refused by both."""
    await enqueued(tracker, "other")
    if phase is Phase.DUAL_WRITE:
        await switched(tracker, phase)
    queued = await enqueued(tracker)
    assert await tracker.enqueue(TASK, queue=QUEUE, dedup=NO_WINDOW) is None
    for status in ("failed", "failed", "dlq"):
        running = await claimed(tracker, queued)
        assert await tracker.claim(TASK, str(queued.execution_id)) is None
        assert (await tracker.fail(running, "no answer")).status == status
        await tracker.history(TASK)
    await tracker.complete(await claimed(tracker, await tracker.retry(TASK)))
    assert old.status()[1:] == ["dlq", "completed"]
    assert await own(bus) == ["failed", "failed", "dlq", "completed"]
    report = await tracker.report()
    assert (report.phase, report.disagreed, await said(tracker)) == (phase, 0, [])
    assert report.compared == {Phase.SHADOW: 18, Phase.DUAL_WRITE: 13}[phase]  # who decides alone is asked for refusals


async def test_after_the_cut_over_the_old_tracker_hears_nothing(
    tracker: PhasedTracker, old: Faulty, bus: CommandBus
) -> None:
    await run_once(tracker, "before")
    await switched(tracker, Phase.DUAL_WRITE, Phase.CUT_OVER)
    old.calls.clear()
    await run_once(tracker)
    assert (old.calls, old.status(), await own(bus)) == ([], ["completed"], ["completed"])
    assert (await tracker.report()).compared == 0


async def test_in_shadow_the_answer_of_the_old_tracker_counts(tracker: PhasedTracker, bus: CommandBus) -> None:
    """busload would hold a task for five minutes; the old one lets it be enqueued again, and busload follows."""
    for _ in range(2):
        await tracker.complete(await claimed(tracker, await enqueued(tracker, dedup=Dedup())))
    assert await own(bus) == ["completed", "completed"]
    assert await said(tracker) == [("enqueue", "enqueued", "duplicate")]


async def test_what_the_old_tracker_refuses_in_shadow_is_only_tried_here(
    tracker: PhasedTracker, old: Faulty, bus: CommandBus, database: Database
) -> None:
    queued = uuid4()
    assert await old.enqueue(TASK, queued, queue=QUEUE, metadata={})  # before the first phase began
    assert await old.claim(TASK, queued)
    assert await tracker.enqueue(TASK, queue=QUEUE) is None
    waiting = await enqueued(TaskTracker(bus))
    workers = database.count("worker")
    assert await tracker.claim(TASK, str(waiting.execution_id)) is None
    assert (await own(bus), database.count("worker")) == (["queued"], workers)
    assert await said(tracker) == [("enqueue", "duplicate", "enqueued"), ("claim", "not claimed", "claimed")]


async def test_in_dual_write_the_answer_of_busload_counts(tracker: PhasedTracker, old: Faulty, bus: CommandBus) -> None:
    await run_once(tracker, "before")
    await switched(tracker, Phase.DUAL_WRITE)
    assert await old.enqueue(TASK, uuid4(), queue=QUEUE, metadata={})  # somebody still writes there
    running = await claimed(tracker, await enqueued(tracker))
    assert (await tracker.history(TASK))[-1].status == "processing"
    await tracker.complete(running)
    assert await said(tracker) == [
        ("enqueue", "duplicate", "enqueued"),
        ("claim", "not claimed", "claimed"),
        ("history", "queued", "processing"),
    ]


async def test_nothing_is_published_again_while_the_old_tracker_decides(tracker: PhasedTracker) -> None:
    await enqueued(tracker)
    assert await tracker.recover(QUEUE, waiting_for=timedelta(0)) == []
    await switched(tracker, Phase.DUAL_WRITE)
    assert [one.task_key for one in await tracker.recover(QUEUE, waiting_for=timedelta(0))] == [TASK]


# -- faults -----------------------------------------------------------------------------------------------------


async def test_a_failure_of_busload_does_not_hurt_in_shadow(
    tracker: PhasedTracker, old: Faulty, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """Its tables refuse writes; later its database is away altogether."""
    await run_once(tracker, "before")
    database.rows("ALTER TABLE busload.command RENAME TO gone")
    await run_once(tracker)
    database.rows("ALTER TABLE busload.gone RENAME TO command")
    found = await said(tracker)
    assert [(operation, there) for operation, there, _ in found] == [
        ("enqueue", "enqueued"),
        ("claim", "claimed"),
        ("complete", "completed"),
    ]
    assert old.status() == ["completed", "completed"]


async def test_an_outage_of_the_database_is_waited_for_once_in_shadow(
    dsn: str, old: Faulty, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """What was compared meanwhile is written when the database is back."""
    settings = Settings(pool_timeout=timedelta(seconds=1))
    async with CommandBus(dsn, settings=settings) as bus, PhasedTracker(bus, old) as tracker:
        await run_once(tracker, "before")
        with psycopg.connect(dsn, dbname="postgres", autocommit=True) as server:
            name = database.value("SELECT current_database()")
            server.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false'.encode())
            server.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
            began = time.monotonic()
            with caplog.at_level(logging.WARNING):
                for n in range(5):
                    await run_once(tracker, f"away:{n}")
            assert time.monotonic() - began < 8  # 15 calls, each of which would wait a second for a connection
            server.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true'.encode())
        assert sum("goes on alone" in line.message for line in caplog.records) == 1
        assert old.status() == ["completed"] * 6
        for _ in range(20):  # each waits for a connection; the first ones may still find a broken one
            report = await tracker.report()
            if report.compared == 18:
                break
        assert (report.compared, report.agreed) == (18, 3)


async def test_a_failure_of_the_old_tracker_goes_to_the_caller_in_shadow_only(
    tracker: PhasedTracker, old: Faulty, bus: CommandBus
) -> None:
    old.failing = {"enqueue"}
    with pytest.raises(ConnectionError):
        await enqueued(tracker)
    assert await own(bus) == []
    await switched(tracker, Phase.DUAL_WRITE)
    old.failing = {"enqueue", "claim", "complete", "history"}
    await run_once(tracker)
    assert (await tracker.history(TASK))[-1].status == "completed"
    assert [there.split(":")[0] for _, there, _ in await said(tracker)] == ["ConnectionError"] * 4


async def test_a_failure_of_busload_goes_to_the_caller_in_dual_write(tracker: PhasedTracker, old: Faulty) -> None:
    await enqueued(tracker)
    await switched(tracker, Phase.DUAL_WRITE)
    old.calls.clear()
    with pytest.raises(InvalidOperationError, match="none of task"):
        await tracker.claim(TASK, uuid4())
    assert (old.calls, old.status()) == ([], ["queued"])


async def test_an_execution_ends_in_the_phase_in_which_it_was_claimed(
    tracker: PhasedTracker, old: Faulty, bus: CommandBus
) -> None:
    """The old tracker has given the task away, and busload does not know it: the old tracker hears its end."""
    queued = uuid4()
    assert await old.enqueue(TASK, queued, queue=QUEUE, metadata={})
    running = await tracker.claim(TASK, queued)
    assert running is not None
    await switched(tracker, Phase.DUAL_WRITE)
    assert (await tracker.complete(running)).status == "completed"
    assert old.status() == ["completed"]
    with pytest.raises(SupersededError):
        await tracker.complete(running)  # nobody knows it any more


async def test_a_failure_that_the_old_tracker_answers_with_another_word_is_refused(
    tracker: PhasedTracker, old: Faulty
) -> None:
    running = await claimed(tracker, await enqueued(tracker))

    async def retrying(*args: object) -> str:
        return "retrying"

    old.instead["fail"] = retrying
    with pytest.raises(InvalidOperationError, match="'retrying', wanted 'failed' or 'dlq'"):
        await tracker.fail(running, "no answer")


async def test_what_is_no_old_tracker_and_what_it_cannot_answer_is_refused(
    bus: CommandBus, tracker: PhasedTracker
) -> None:
    with pytest.raises(ValueError, match=r"no enqueue, no claim, .* found a str"):
        PhasedTracker(bus, cast(OldTracker, "tracker"))
    with pytest.raises(InvalidOperationError, match='wanted "skip"'):
        await tracker.enqueue(TASK, queue=QUEUE, dedup=Dedup(on_conflict="raise"))


# -- switching --------------------------------------------------------------------------------------------------


async def test_all_processes_switch_at_once(dsn: str, bus: CommandBus, tracker: PhasedTracker, old: Faulty) -> None:
    """Another process enqueues a task in each phase, and is told of none of them."""
    program = """
import asyncio, sys
from busload import CommandBus
from busload.tasks import PhasedTracker
from examples.tracker_phases.sqlite_tracker import SqliteTracker

async def main():
    async with CommandBus(sys.argv[1]) as bus, PhasedTracker(bus, SqliteTracker(sys.argv[2])) as tracker:
        for line in sys.stdin:
            await tracker.enqueue(line.strip(), queue="partner_tasks")
            print("done", flush=True)

asyncio.run(main())
"""
    await tracker.report()
    seen = []
    with subprocess.Popen(
        [sys.executable, "-c", program, dsn, str(old.file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        for phase in Phase:
            if phase is not Phase.SHADOW:
                await switched(tracker, phase)
            process.stdin.write(f"{phase}\n")
            process.stdin.flush()
            assert await asyncio.to_thread(process.stdout.readline) == "done\n"
            here = await TaskTracker(bus).history(phase)
            seen.append((len(here), len(old.status())))
        process.stdin.close()
        assert process.wait(30) == 0
    assert seen == [(1, 1), (1, 2), (1, 2)]
    counts = await bus.database.read(phases.reports("old"))
    assert [(one.phase, one.compared, one.agreed) for one in counts] == [
        (Phase.SHADOW, 1, 1),
        (Phase.DUAL_WRITE, 1, 1),
        (Phase.CUT_OVER, 0, 0),
    ]


@pytest.mark.parametrize("back", [False, True], ids=["on", "back"])
async def test_a_claim_that_meets_a_switch_is_given_to_one(
    bus: CommandBus, tmp_path: Path, old: Faulty, back: bool
) -> None:
    """One process has asked the tracker that decided so far, another one the tracker that decides from now on."""

    class Switching(SqliteTracker):
        """Meanwhile an operator switches, and another process claims the same task."""

        meanwhile: Any = None

        async def claim(self, task_id: str, execution_id: UUID | str) -> bool:
            if self.meanwhile is not None and not back:
                taken = await super().claim(task_id, execution_id)
                await self.meanwhile()
                return taken
            if self.meanwhile is not None:
                await self.meanwhile()
            return await super().claim(task_id, execution_id)

    slow = Switching(str(old.file))
    async with PhasedTracker(bus, slow) as late, PhasedTracker(bus, old, name="other") as other:
        queued = await enqueued(late)
        await enqueued(other, "other")
        if back:
            await switched(other, Phase.DUAL_WRITE)
        got: list[Execution | None] = []

        async def meanwhile() -> None:
            await switched(other, Phase.SHADOW if back else Phase.DUAL_WRITE)
            got.append(await other.claim(TASK, str(queued.execution_id)))

        slow.meanwhile = meanwhile
        got.append(await late.claim(TASK, str(queued.execution_id)))
        assert [one is not None for one in got] == [True, False]


async def test_a_phase_is_left_only_if_that_is_safe(tracker: PhasedTracker, old: Faulty, database: Database) -> None:
    await run_once(tracker)
    with pytest.raises(InvalidOperationError, match="3 calls compared in this phase, wanted at least 1,000"):
        await tracker.switch(Phase.DUAL_WRITE)
    with pytest.raises(InvalidOperationError, match="From shadow to cut_over is more than one phase"):
        await tracker.switch(Phase.CUT_OVER, force=True)
    await tracker.enqueue("twice", queue=QUEUE)
    await old.complete("twice", (await old.history("twice"))[-1].execution_id or "", None)
    await tracker.enqueue("twice", queue=QUEUE)
    with pytest.raises(InvalidOperationError, match=r"the last of 1 disagreement is 0:00:\d\d old, wanted 1:00:00"):
        await tracker.switch(Phase.DUAL_WRITE, at_least=5)
    database.rows("UPDATE busload.tracker_disagreement SET at = at - interval '1 hour'")
    assert await tracker.switch(Phase.DUAL_WRITE, at_least=5)
    assert not await tracker.switch(Phase.DUAL_WRITE)
    old.failing = {"enqueue"}
    await enqueued(tracker, "lost")
    with pytest.raises(InvalidOperationError, match="the old tracker is not in step: it answered 1 call otherwise"):
        await tracker.switch(Phase.SHADOW)
    await switched(tracker, Phase.CUT_OVER)
    with pytest.raises(InvalidOperationError, match=r"has not been written since .*, so it lacks tasks"):
        await tracker.switch(Phase.DUAL_WRITE)
    await switched(tracker, Phase.DUAL_WRITE, Phase.SHADOW)


async def test_disagreements_are_kept_in_a_bounded_form(
    tracker: PhasedTracker, bus: CommandBus, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest of each phase are kept, and go by their age; what they count as stays."""
    monkeypatch.setattr(phases, "KEPT", 3)
    queued = await enqueued(tracker)
    for _ in range(5):
        await tracker.claim(TASK, str(queued.execution_id))
        database.rows("DELETE FROM busload.lease")
        await tracker.history(TASK)
    report = await tracker.report()
    assert report.disagreed >= 5
    assert database.count("tracker_disagreement") == 3
    database.rows("UPDATE busload.tracker_disagreement SET at = at - interval '2 days' WHERE operation = 'history'")
    kept = database.value("SELECT count(*) FROM busload.tracker_disagreement WHERE operation <> 'history'")
    for plan in Pruning(timedelta(days=1)).plans():
        await bus.database.in_transaction(plan)
    assert database.count("tracker_disagreement") == kept < 3
    assert (await tracker.report()).disagreed == report.disagreed


def test_the_sync_face_moves_as_well(dsn: str, old: Faulty) -> None:
    class Waiting:
        """The same old tracker without await."""

        def __getattr__(self, name: str) -> Any:
            called = getattr(old, name)
            return lambda *args, **kwargs: asyncio.run(called(*args, **kwargs))

    with SyncCommandBus(dsn) as bus, SyncPhasedTracker(bus, Waiting()) as tracker:
        for phase in Phase:
            if phase is not Phase.SHADOW:
                assert tracker.switch(phase, at_least=4)
            queued = tracker.enqueue(phase, queue=QUEUE)
            assert queued is not None
            running = tracker.claim(phase, str(queued.execution_id))
            assert running is not None
            tracker.complete(running)
            assert [one.status for one in tracker.history(phase)] == ["completed"]
        counts = bus.database.read(phases.reports("old"))
        assert [(one.compared, one.agreed) for one in counts] == [(4, 4), (4, 4), (0, 0)]
    assert old.status() == ["completed", "completed"]


def test_the_example_moves_through_all_phases(dsn: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "examples.tracker_phases.move"],
        env={**os.environ, "BUSLOAD_DATABASE_URL": dsn},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert ran.stdout.splitlines() == [
        "shadow: 12 calls compared, 12 agreed",
        "dual_write: 12 calls compared, 12 agreed",
        "cut_over: 0 calls compared, 0 agreed",
    ], ran.stderr
