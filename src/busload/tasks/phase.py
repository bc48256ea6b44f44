"""The phases in which an application moves from another tracker to this one, and how far the two agree in each."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, NamedTuple

from busload.commands.payload import storable
from busload.commands.wording import counted
from busload.errors import InvalidOperationError
from busload.postgres.plan import Plan, execute, many, one
from busload.postgres.statements import statements
from busload.tasks.tracker_heartbeat import after_fork

SQL = statements(__name__)

KEPT = 1000
"""Disagreements of a phase that are kept, the newest: in the database, and in a process that cannot write them."""

COUNT_EVERY = 1.0
"""Seconds for which a process counts what has agreed before it writes. A disagreement is written at once."""

LONGEST_TEXT = 1000
"""Bytes that are kept of an answer, which may be the text of an error, and of a task id."""

AGREED_FOR = timedelta(hours=1)
AT_LEAST = 1000


class Phase(StrEnum):
    """Which tracker decides, and which of the two are written."""

    SHADOW = "shadow"
    """The old tracker decides. busload is written beside it."""
    DUAL_WRITE = "dual_write"
    """busload decides. The old tracker is written beside it, so that one can go back."""
    CUT_OVER = "cut_over"
    """busload alone is written."""


ORDER = tuple(Phase)


class CurrentPhase(NamedTuple):
    """The phase that holds, and the how-manieth it is."""

    number: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class Answers:
    """What two trackers have answered to the same call."""

    task_id: str
    operation: str
    old: str
    busload: str
    at: datetime | None = None

    @property
    def agree(self) -> bool:
        return self.old == self.busload


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """How far two trackers have agreed in a phase."""

    old_tracker: str
    number: int
    phase: Phase
    since: datetime
    operator: str | None
    """Who has switched to this phase."""
    compared: int
    """Calls that both trackers have answered."""
    agreed: int
    """Calls that both have answered in the same way."""
    disagreed_at: datetime | None
    """When they last disagreed; None if they never did, or that was removed as old."""
    agreed_for: timedelta | None
    """How long ago that was."""
    over: bool
    """Whether another phase has followed."""

    @property
    def disagreed(self) -> int:
        return self.compared - self.agreed


def current(old_tracker: str) -> Plan[CurrentPhase]:
    """The phase that an old tracker is in; an old tracker that is named for the first time is in shadow."""
    found = yield from one(_current, SQL.current, old_tracker=old_tracker)
    if found is None:
        yield from execute(SQL.begin, old_tracker=old_tracker)
        found = yield from one(_current, SQL.current, old_tracker=old_tracker)
    assert found is not None  # no row is ever removed
    return found


def reports(old_tracker: str | None = None) -> Plan[list[PhaseReport]]:
    """Every phase of an old tracker, or of all of them, oldest first."""
    return many(_report, SQL.reports, old_tracker=old_tracker)


def disagreements(report: PhaseReport, *, limit: int) -> Plan[list[Answers]]:
    """What was answered differently in a phase, newest first."""
    return many(Answers, SQL.disagreements, old_tracker=report.old_tracker, number=report.number, limit=limit)


def objections(report: PhaseReport, to: Phase, *, agreed_for: timedelta, at_least: int) -> list[str]:
    """Why it is not safe to leave a phase for another one."""
    found = []
    forward = ORDER.index(to) > ORDER.index(report.phase)
    if report.phase is Phase.CUT_OVER:
        found.append(f"the old tracker has not been written since {report.since:%Y-%m-%d %H:%M}, so it lacks tasks")
    if forward and report.compared < at_least:
        found.append(f"{counted(report.compared, 'call')} compared in this phase, wanted at least {at_least:,}")
    if forward and report.agreed_for is not None and report.agreed_for < agreed_for:
        ago = timedelta(seconds=int(report.agreed_for.total_seconds()))
        found.append(f"the last of {counted(report.disagreed, 'disagreement')} is {ago} old, wanted {agreed_for}")
    if not forward and report.disagreed:
        found.append(f"the old tracker is not in step: it answered {counted(report.disagreed, 'call')} otherwise")
    return found


def switch(
    old_tracker: str,
    to: Phase,
    *,
    operator: str | None,
    reason: str | None = None,
    force: bool = False,
    agreed_for: timedelta = AGREED_FOR,
    at_least: int = AT_LEAST,
    dry_run: bool = False,
) -> Plan[PhaseReport | None]:
    """Let another phase hold, and return the report of the one that it follows; None if that phase held already.

    A phase can be left for the next one or the one before. Without `force`, it is left only if that is safe.
    """
    known = yield from reports()
    report = next((one for one in known if one.old_tracker == old_tracker and not one.over), None)
    if report is None:
        names = ", ".join(sorted({repr(one.old_tracker) for one in known})) or "none"
        raise InvalidOperationError(
            f"There is no old tracker {old_tracker!r:.200}, known are: {names}. A PhasedTracker makes its old tracker "
            "known by its first call."
        )
    if report.phase is to:
        return None
    if abs(ORDER.index(to) - ORDER.index(report.phase)) != 1:
        raise InvalidOperationError(
            f"From {report.phase} to {to} is more than one phase. Switch to {Phase.DUAL_WRITE} first. Nothing was "
            "written."
        )
    found = objections(report, to, agreed_for=agreed_for, at_least=at_least)
    if found and not force:
        raise InvalidOperationError(
            f"It is not safe to switch from {report.phase} to {to}: {'; '.join(found)}. `busload tracker report` lists "
            "what the two disagreed about; force it if that is explained. Nothing was written."
        )
    if dry_run:
        return report
    number = report.number + 1
    about = {"old_tracker": old_tracker, "number": number, "phase": to, "operator": operator, "reason": reason}
    if not (yield from execute(SQL.switch, **about)):
        raise InvalidOperationError(
            f"Somebody else has switched {old_tracker!r:.200} meanwhile. Look at `busload tracker report`. Nothing was "
            "written."
        )
    return report


@dataclass(slots=True)
class _Tally:
    """What a process has compared in a phase and not written yet."""

    compared: int = 0
    agreed: int = 0
    disagreed: list[tuple[float, Answers]] = field(default_factory=list)
    """With the time on the clock of this process."""


class Comparisons:
    """What a process has compared: counted here, and written together."""

    def __init__(self, old_tracker: str) -> None:
        self._old_tracker = old_tracker
        self._tallies: dict[int, _Tally] = {}
        self._process, self._written_at = os.getpid(), float("-inf")

    def add(self, number: int, answers: Answers) -> None:
        """Count an answer to a call in the phase of this number."""
        with after_fork.lock:
            tally = self._own().setdefault(number, _Tally())
            tally.compared += 1
            if answers.agree:
                tally.agreed += 1
            else:
                tally.disagreed = [*tally.disagreed[1 - KEPT :], (time.monotonic(), answers)]

    @property
    def due(self) -> bool:
        """Whether it is time to write."""
        with after_fork.lock:
            waited = time.monotonic() - self._written_at >= COUNT_EVERY
            return any(waited or tally.disagreed for tally in self._own().values())

    def take(self) -> dict[int, _Tally]:
        """Everything that is to be written."""
        with after_fork.lock:
            taken = self._own()
            self._tallies, self._written_at = {}, time.monotonic()
            return taken

    def give_back(self, taken: dict[int, _Tally]) -> None:
        """These could not be written."""
        with after_fork.lock:
            own = self._own()
            for number, tally in taken.items():
                newer = own.get(number, _Tally())
                own[number] = _Tally(
                    tally.compared + newer.compared,
                    tally.agreed + newer.agreed,
                    [*tally.disagreed, *newer.disagreed][-KEPT:],
                )

    def write(self, taken: dict[int, _Tally]) -> Plan[None]:
        """Write what was taken; needs a transaction."""
        now = time.monotonic()
        for number, tally in sorted(taken.items()):
            those = [answers for _, answers in tally.disagreed]
            yield from execute(
                SQL.record,
                old_tracker=self._old_tracker,
                number=number,
                compared=tally.compared,
                agreed=tally.agreed,
                most=KEPT,
                ago=[now - at for at, _ in tally.disagreed],
                task_keys=_storable(str(each.task_id) for each in those),
                operations=[each.operation for each in those],
                old=_storable(each.old for each in those),
                busload=_storable(each.busload for each in those),
            )

    def _own(self) -> dict[int, _Tally]:
        """A process that was forked off begins anew: its parent writes what it had counted."""
        if self._process != os.getpid():
            self._tallies, self._process = {}, os.getpid()
        return self._tallies


def _storable(texts: Iterable[str]) -> list[str]:
    return [storable(text, LONGEST_TEXT) for text in texts]


def _current(number: int, phase: str) -> CurrentPhase:
    return CurrentPhase(number, Phase(phase))


def _report(*row: Any) -> PhaseReport:
    old_tracker, number, phase, *rest = row
    return PhaseReport(old_tracker, number, Phase(phase), *rest)
