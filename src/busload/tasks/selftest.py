"""What a tracker promises, tried on the database that it would use. Whoever runs the plan rolls it back."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID, uuid4

from busload.commands import rescue
from busload.commands.dedup import Dedup
from busload.commands.execution import Execution
from busload.errors import PermanentCommandError
from busload.postgres.plan import Plan
from busload.settings import InputLimits
from busload.tasks import track
from busload.tasks.tracker import Tracker

QUEUE = "dev_partner_tasks"
CHAIN = ("failed", "dlq", "completed")


@dataclass(frozen=True, slots=True)
class Fact:
    """One promise of the tracker, whether it holds here, and what was seen."""

    name: str
    ok: bool
    seen: str


class SelfTest:
    """Five facts about a tracker, each found by a plan of its own. They need one transaction."""

    def __init__(self, tracker: Tracker, limits: InputLimits) -> None:
        self._tracker, self._limits = tracker, limits
        self._part = uuid4().hex[:12]  # so that no task of the application has the same id

    def facts(self) -> Plan[list[Fact]]:
        """Try everything, in a transaction that is to be rolled back."""
        workers = []
        for _ in range(2):
            workers.append((yield from self._worker()))
        return [
            self._task_ids(),
            (yield from self._execution_ids()),
            (yield from self._dedup()),
            (yield from self._claim(workers)),
            (yield from self._chain(workers[0])),
        ]

    def _task_ids(self) -> Fact:
        parts = ("SATLOC", "695d", "02220710")
        made = self._tracker.task_id(QUEUE, *parts)
        bare = self._tracker.task_id(self._tracker.queue_name(QUEUE), *parts)
        other = self._tracker.task_id(QUEUE, "SATLOC", "695d:02220710")
        return Fact("task ids are readable and stable", made == bare != other, made)

    def _execution_ids(self) -> Plan[Fact]:
        ids: list[UUID | None] = []
        for n in range(3):
            execution = yield from self._enqueue(f"ids{n}")
            ids.append(None if execution is None else execution.execution_id)
        random = all(id is not None and id.version == 4 for id in ids)
        return Fact("execution ids are unique", random and len(set(ids)) == 3, ", ".join(map(str, ids)))

    def _dedup(self) -> Plan[Fact]:
        first = yield from self._enqueue("dedup")
        second = yield from self._enqueue("dedup")
        existing = yield from self._enqueue("dedup", Dedup(on_conflict="return_existing"))
        ok = first is not None and second is None and existing == first
        return Fact("a duplicate is not enqueued", ok, f"second: {_shown(second)}, existing: {_shown(existing)}")

    def _claim(self, workers: list[int]) -> Plan[Fact]:
        queued = yield from self._enqueue("claim")
        taken = []
        for worker in workers:
            taken.append((yield from self._claimed(queued, worker)))
        ok = taken[0] is not None and taken[1] is None
        return Fact("a task is claimed once", ok, f"first: {_shown(taken[0])}, second: {_shown(taken[1])}")

    def _chain(self, worker: int) -> Plan[Fact]:
        """A failure, a failure that needs a person, a retry and a success, found by the task id alone."""
        queued = yield from self._enqueue("chain")
        for error in (TimeoutError("no answer"), PermanentCommandError("no such log"), None):
            running = yield from self._claimed(queued, worker)
            if running is None:
                break
            outcome = track.succeeded(self._limits, None) if error is None else track.failed(error)
            ended = yield from track.ending(self._limits, running, outcome, workers=[worker]).plan
            if ended.status == "dlq":
                queued = yield from track.retry(self._task_id("chain"), operator="selftest")
        chain = yield from track.history(self._task_id("chain"))
        statuses = tuple(str(one.status) for one in chain)
        ok = statuses == CHAIN and len({one.execution_id for one in chain}) == len(chain)
        return Fact("the task id alone finds the chain of retries", ok, ", ".join(statuses))

    def _worker(self) -> Plan[int]:
        return rescue.register(name="selftest", domains=[QUEUE], concurrency=0, lease_for=timedelta(minutes=1))

    def _enqueue(self, name: str, dedup: Dedup | None = None) -> Plan[Execution | None]:
        return track.new_task(self._limits, self._task_id(name), QUEUE, dedup=dedup or Dedup()).plan

    def _claimed(self, queued: Execution | None, worker: int) -> Plan[Execution | None]:
        if queued is None or queued.execution_id is None or queued.task_key is None:
            return None
        claim = yield from track.claim(queued.task_key, queued.execution_id, worker=worker)
        return claim.execution

    def _task_id(self, name: str) -> str:
        return self._tracker.task_id(QUEUE, "selftest", self._part, name)


def _shown(execution: Execution | None) -> str:
    return "none" if execution is None else f"{execution.status} {execution.execution_id}"
