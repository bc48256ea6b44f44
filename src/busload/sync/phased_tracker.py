"""Made from busload.tasks.phased_tracker by scripts/generate_sync.py. Change the source instead."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Protocol
from uuid import UUID

from busload.commands import rescue
from busload.commands.checks import check, given
from busload.commands.dedup import Dedup
from busload.commands.execution import Execution, ExecutionStatus
from busload.errors import InvalidOperationError, kind_of
from busload.postgres import waiting_in_threads as waiting
from busload.postgres.callers_connection import AnySyncConnection
from busload.postgres.plan import Plan
from busload.postgres.write import Write, patient
from busload.sync.tracker import SyncTaskTracker, TrackedBus
from busload.tasks import phase, track
from busload.tasks.phase import Answers, Comparisons, CurrentPhase, Phase, PhaseReport
from busload.tasks.phased_tracker import (
    _PROCESSING,
    _QUEUED,
    AWAY,
    GLANCE,
    LOOKS,
    OPERATIONS,
    PATIENCE,
    T,
    _Claimed,
    _new,
    _newest,
    _said,
    _stand_in,
    _status,
    _taken,
    _undone,
    _UndoneError,
    log,
)
from busload.tasks.tracker import LEASE_FOR, ONE_AT_A_TIME, PREFIXES, WAITING_FOR


class SyncOldTracker(Protocol):
    """The tracker that an application moves away from: what the application calls today, in this form.

    A task has the same two keys in both trackers. What a call raises in shadow, where this tracker decides, goes to the
    application. In dual_write an error is recorded, and the application does not notice.
    """

    def enqueue(self, task_id: str, execution_id: UUID, *, queue: str, metadata: dict[str, Any]) -> bool:
        """Record a task with the id of its first execution; False says that the task is a duplicate."""

    def claim(self, task_id: str, execution_id: UUID | str) -> bool:
        """Take a task by the two keys of its message; False says that it is not the caller's to run."""

    def complete(self, task_id: str, execution_id: UUID | str, result: Any) -> None:
        """Record that a claimed task is done. The keys are those it was claimed by."""

    def fail(self, task_id: str, execution_id: UUID | str, error: BaseException | str) -> str:
        """Record that a claimed task has failed; return "failed" if it is tried again, else "dlq"."""

    def retry(self, task_id: str, execution_id: UUID) -> None:
        """Take a task out of the dlq, with the id of its next execution."""

    def history(self, task_id: str) -> Sequence[Execution]:
        """Every execution of a task, oldest first."""


class SyncPhasedTracker(SyncTaskTracker):
    """Has the methods of a `SyncTaskTracker`, and keeps an old tracker in step as the phase says.

    The phase is kept in the database under `old_name`, and read before each call: all processes switch at once, without
    a deploy. It begins as `shadow`. An execution ends in the phase in which it was claimed. What the two trackers
    answer is compared; what they disagree about is recorded. After the last phase, replace it by a `SyncTaskTracker`.
    """

    def __init__(
        self,
        bus: TrackedBus,
        old: SyncOldTracker,
        *,
        old_name: str = "old",
        prefixes: Sequence[str] = PREFIXES,
        lease_for: timedelta = LEASE_FOR,
        name: str | None = None,
    ) -> None:
        super().__init__(bus, prefixes=prefixes, lease_for=lease_for, name=name)
        missing = [operation for operation in OPERATIONS if not callable(getattr(old, operation, None))]
        if missing:
            raise ValueError(
                f"The old tracker has no {', no '.join(missing)}, found {kind_of(old)}. Wrap it in an object with the "
                "methods of SyncOldTracker."
            )
        check(self._limits, writes=False, name=old_name)
        self._old, self._old_name = old, old_name
        self._known: CurrentPhase | None = None
        self._away: tuple[float, Exception] | None = None
        self._claimed: dict[UUID | None, _Claimed] = {}
        self._comparisons = Comparisons(old_name)

    def close(self, *, hand_back: bool = False) -> None:
        """As `SyncTaskTracker.close`, and write what was compared."""
        self._write_comparisons()
        super().close(hand_back=hand_back)

    def report(self) -> PhaseReport:
        """The phase that holds, and how far the two trackers have agreed in it."""
        self._write_comparisons()
        self._database.in_transaction(phase.current(self._old_name))
        return (self._database.read(phase.reports(self._old_name)))[-1]

    def disagreements(self, *, limit: int = 100) -> list[Answers]:
        """What the two trackers have answered differently in the phase that holds, newest first."""
        check(self._limits, writes=False, limit=limit)
        return self._database.read(phase.disagreements(self.report(), limit=limit))

    def switch(
        self,
        to: Phase,
        *,
        operator: str | None = None,
        reason: str | None = None,
        force: bool = False,
        agreed_for: timedelta = phase.AGREED_FOR,
        at_least: int = phase.AT_LEAST,
    ) -> bool:
        """Let another phase hold for all processes; returns False if it held already.

        A phase is left for the next one if `at_least` so many calls were compared in it and the two trackers have
        agreed for `agreed_for`, and for the one before if the old tracker is in step. Otherwise `InvalidOperationError`
        says what is not safe; `force` switches nevertheless. `operator`, who does it, and the `reason` are kept.
        """
        check(self._limits, operator=operator, **given(reason=reason))
        self._write_comparisons()
        plan = partial(
            phase.switch,
            self._old_name,
            Phase(to),
            operator=operator,
            reason=reason,
            force=force,
            agreed_for=agreed_for,
            at_least=at_least,
        )
        return self._database.write(patient(plan)) is not None

    def enqueue(
        self,
        task_id: str,
        *,
        queue: str,
        metadata: dict[str, Any] | None = None,
        dedup: Dedup | None = ONE_AT_A_TIME,
        max_attempts: int = 3,
        conn: AnySyncConnection | None = None,
    ) -> Execution | None:
        """Record a task that is about to be published; None if it is a duplicate.

        An old tracker does not tell which execution a duplicate has, so `dedup` must be one that skips. With `conn` the
        task exists in busload exactly if that transaction commits. The old tracker is called at once.
        """
        if dedup is not None and dedup.on_conflict != "skip":
            raise InvalidOperationError(
                f'Found Dedup(on_conflict={dedup.on_conflict!r}), wanted "skip": an old tracker says only whether a '
                "task is a duplicate. Nothing was written."
            )
        at = self._look()
        execution_id = track.new_execution_id()

        def new(dedup: Dedup | None) -> Write[Execution | None]:
            return track.new_task(
                self._limits,
                task_id,
                queue,
                metadata=metadata,
                dedup=dedup,
                max_attempts=max_attempts,
                others=self._other_names(queue),
                execution_id=execution_id,
            )

        def here(dedup: Dedup | None = dedup) -> Execution | None:
            return self._database.write(new(dedup), conn)

        def there() -> bool:
            return self._old.enqueue(task_id, execution_id, queue=queue, metadata=metadata or {})

        def trial() -> Execution | None:
            return self._tried(new(dedup), conn)

        if at.phase is Phase.CUT_OVER:
            return here()
        if at.phase is Phase.DUAL_WRITE:
            enqueued = here()
            if enqueued is not None:
                self._compare(at, "enqueue", task_id, _new(_answer(there)), _new(enqueued))
            return enqueued
        taken = there()
        answer = self._answer_here(here if taken else trial, wanted=taken)
        self._compare(at, "enqueue", task_id, _new(taken), _new(answer))
        if not taken or (answer is None and self._has_left(at)):
            return None
        if answer is None:  # busload follows what the old tracker has decided
            answer = self._answer_here(partial(here, None))
        return answer if isinstance(answer, Execution) else _stand_in(_QUEUED, task_id, execution_id, queue, metadata)

    def claim(self, task_id: str, execution_id: UUID | str) -> Execution | None:
        """Take a task for this process to run; None if it is not yours to run, and its message can be acknowledged.

        In shadow, an execution that busload does not know has its two keys only.
        """
        at = self._look()
        here = partial(super().claim, task_id, execution_id)
        there = partial(self._old.claim, task_id, execution_id)
        if at.phase is Phase.CUT_OVER:
            return here()
        claimed: Execution | None
        if at.phase is Phase.DUAL_WRITE:
            claimed = here()
            if claimed is None:
                return None
            taken = _answer(there)
            self._compare(at, "claim", task_id, _taken(taken), _taken(claimed))
            if taken is False and self._has_left(at):  # the old tracker decides again, and has given it away
                self._give_back(claimed)
                return None
        else:
            taken = there()
            trial = partial(self._tried_claim, task_id, execution_id)
            answer = self._answer_here(here if taken else trial, wanted=taken)
            self._compare(at, "claim", task_id, _taken(taken), _taken(answer))
            if not taken or (answer is None and self._has_left(at)):
                return None
            claimed = answer if isinstance(answer, Execution) else _stand_in(_PROCESSING, task_id, execution_id)
        self._claimed[claimed.execution_id] = _Claimed(at, execution_id)
        return claimed

    def complete(self, execution: Execution, result: Any = None) -> Execution:
        """Say that a claimed task is done, with a `result` if there is one."""

        def there(task_id: str, execution_id: UUID | str) -> str:
            self._old.complete(task_id, execution_id, result)
            return ExecutionStatus.COMPLETED

        return self._ended("complete", execution, partial(super().complete, execution, result), there)

    def fail(self, execution: Execution, error: BaseException | str) -> Execution:
        """Say that a claimed task failed by this `error`, and see what becomes of it: `failed`, or `dlq`."""

        def there(task_id: str, execution_id: UUID | str) -> str:
            found = self._old.fail(task_id, execution_id, error)
            if found not in (ExecutionStatus.FAILED, ExecutionStatus.DLQ):
                raise InvalidOperationError(
                    f"fail of the old tracker returned {found!r:.80}, wanted 'failed' or 'dlq'."
                )
            return found

        return self._ended("fail", execution, partial(super().fail, execution, error), there)

    def retry(self, task_id: str, *, operator: str | None = None) -> Execution:
        """Take a task out of the dlq: the same task, a new execution. Publish its two keys."""
        at = self._look()
        check(self._limits, task_id=task_id, operator=operator)
        execution_id = track.new_execution_id()
        retry = partial(track.retry, task_id, operator=operator, execution_id=execution_id)

        def here() -> Execution:
            return self._database.write(patient(retry))

        def there() -> str:
            self._old.retry(task_id, execution_id)
            return ExecutionStatus.QUEUED

        if at.phase is Phase.CUT_OVER:
            return here()
        if at.phase is Phase.DUAL_WRITE:
            retried = here()
            self._compare(at, "retry", task_id, _status(_answer(there)), _status(retried))
            return retried
        old = there()
        answer = self._answer_here(here)
        self._compare(at, "retry", task_id, _status(old), _status(answer))
        return answer if isinstance(answer, Execution) else _stand_in(_QUEUED, task_id, execution_id)

    def history(self, task_id: str) -> list[Execution]:
        """Every execution of a task, oldest first, as the tracker that decides knows them."""
        at = self._look()
        here, there = partial(super().history, task_id), partial(self._old.history, task_id)
        if at.phase is Phase.CUT_OVER:
            return here()
        shadow = at.phase is Phase.SHADOW
        old: Any = None
        answer: Any = None
        for look in range(2):  # the task may have moved between the two
            if shadow:
                old = there()
                answer = self._answer_here(here)
            else:
                answer = here()
                old = _answer(there)
            if look or _newest(old) == _newest(answer) or isinstance(answer, Exception) or isinstance(old, Exception):
                break
        self._compare(at, "history", task_id, _newest(old), _newest(answer))
        return list(old if shadow else answer)

    def recover(
        self, queue: str, *, waiting_for: timedelta = WAITING_FOR, limit: int = 1000, dry_run: bool = False
    ) -> list[Execution]:
        """As `SyncTaskTracker.recover`. In shadow nothing is returned: the old tracker decides what is published."""
        if (self._look()).phase is Phase.SHADOW and not dry_run:
            return []
        return super().recover(queue, waiting_for=waiting_for, limit=limit, dry_run=dry_run)

    def _ended(
        self, operation: str, execution: Execution, here: Callable[..., Any], there: Callable[..., Any]
    ) -> Execution:
        """End an execution in both trackers, in the phase in which it was claimed."""
        at = self._look()
        id = getattr(execution, "execution_id", None)
        if id is None:
            at = at._replace(phase=Phase.CUT_OVER)  # busload refuses it, and says why
        at, execution_id = self._claimed.get(id, (at, id))
        task_id = getattr(execution, "task_key", None) or ""
        ask_old = partial(there, task_id, execution_id)
        ended: Execution
        if at.phase is Phase.CUT_OVER:
            ended = here()
        elif at.phase is Phase.DUAL_WRITE:
            ended = here()
            self._compare(at, operation, task_id, _status(_answer(ask_old)), _status(ended))
        else:
            old = ask_old()
            answer = self._answer_here(here)
            self._compare(at, operation, task_id, _status(old), _status(answer))
            known = answer if isinstance(answer, Execution) else replace(execution, finished_at=datetime.now(UTC))
            ended = replace(known, status=ExecutionStatus(old))
        self._claimed.pop(id, None)
        return ended

    def _look(self) -> CurrentPhase:
        """The phase that holds. In shadow, a process that cannot reach busload goes on without it."""
        shadow = self._known is not None and self._known.phase is Phase.SHADOW
        if shadow and self._away is not None and time.monotonic() < self._away[0]:
            assert self._known is not None
            return self._known
        try:
            plan = phase.current(self._old_name)
            known = self._database.read(plan, within=PATIENCE if shadow else None)
        except Exception as error:
            if not shadow:
                raise
            assert self._known is not None
            if self._away is None:
                log.warning("The old tracker goes on alone, in shadow: %s", _said(error))
            self._away = (time.monotonic() + AWAY, error)
            return self._known
        if self._known is not None and known != self._known:
            log.info("The tracker %s was switched from %s to %s", self._old_name, self._known.phase, known.phase)
        self._known, self._away = known, None
        return known

    def _has_left(self, at: CurrentPhase) -> bool:
        """Whether another phase holds meanwhile: then the tracker that was asked last decides."""
        return self._look() != at

    def _answer_here(self, ask: Callable[[], Any], *, wanted: bool | None = None) -> Any:
        """What busload answers in shadow: an error is an answer as well.

        If another answer is `wanted`, it is asked for again: the process that tells both trackers may be about to.
        """
        if self._away is not None:
            return self._away[1]
        answer: Any = None
        for look in range(LOOKS):
            if look:
                waiting.sleep(GLANCE)
            answer = _answer(ask)
            if wanted is None or isinstance(answer, Exception) or (answer is not None) is wanted:
                break
        return answer

    def _compare(self, at: CurrentPhase, operation: str, task_id: str, old: str, busload: str) -> None:
        answers = Answers(task_id, operation, old, busload)
        self._comparisons.add(at.number, answers)
        if not answers.agree:
            log.warning("Two trackers disagree about %s of %s: %s, busload %s", operation, task_id, old, busload)
        if self._comparisons.due and self._away is None:
            self._write_comparisons()

    def _write_comparisons(self) -> None:
        """Write what was compared; what cannot be written now is kept for later."""
        taken = self._comparisons.take()
        if not taken:
            return
        try:
            self._database.in_transaction(self._comparisons.write(taken), within=PATIENCE)
        except BaseException as error:
            self._comparisons.give_back(taken)
            if not isinstance(error, Exception):
                raise
            log.warning("What two trackers answered could not be recorded yet: %s", _said(error))

    def _tried(self, write: Write[T], conn: AnySyncConnection | None = None) -> T:
        """What a write would return; nothing of it stays."""
        again = None if write.again is None else partial(_undone, write.again)
        try:
            self._database.write(replace(write, plan=_undone(lambda: write.plan), again=again), conn)
        except _UndoneError as undone:
            return undone.result  # type: ignore[no-any-return]
        raise AssertionError("a trial is always undone")

    def _tried_claim(self, task_id: str, execution_id: UUID | str) -> Execution | None:
        """What a claim would return."""
        claim_by = track.taking(self._limits, task_id, execution_id)

        def claim() -> Plan[Execution | None]:
            worker = yield from rescue.register(name="trial", domains=[], concurrency=0, lease_for=LEASE_FOR)
            return (yield from claim_by(worker).plan).execution

        return self._tried(patient(claim))

    def _give_back(self, execution: Execution) -> None:
        """Let another process claim a task."""
        leases = [execution.execution_id] if execution.execution_id is not None else []
        self._database.write(Write(rescue.release(leases)))
        self._presence.ended(execution)


def _answer(ask: Callable[[], Any]) -> Any:
    """What the tracker that does not decide answers: an error is an answer as well."""
    try:
        return ask()
    except Exception as error:
        return error
