"""Take tasks over from another queue, page by page, so that each becomes one command however often this is repeated.

A page is sent, and then removed from its queue. If the process dies between the two, the next run finds the page again,
and its commands exist already: a task always gets the same command id.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID, uuid5

from busload.commands.check_commands import check_all
from busload.commands.command import BatchCommand
from busload.errors import DuplicateCommandError, InvalidCommandError
from busload.postgres.connection import Connection
from busload.sync.bus import SyncCommandBus

NAMESPACE = UUID("6f1b6f5c-53a0-4f0e-9d0f-7d1c5a3b8e21")
PAGE = 500
"""Tasks that are taken over at a time."""


@dataclass(frozen=True, slots=True)
class WaitingTask:
    """A task that waits elsewhere: the command that it becomes, or why it cannot become one."""

    source_id: str
    queue: str
    name: str
    command: BatchCommand | None
    problem: str | None = None
    handle: Any = None
    """By which the source finds the task again."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A task that stays where it is."""

    source_id: str
    queue: str
    name: str
    reason: str


@dataclass(slots=True)
class Report:
    """What an import has found and done. In a dry run, `imported` is what would have been imported."""

    dry_run: bool
    found: int = 0
    imported: int = 0
    already_there: int = 0
    """Tasks whose command an earlier run has sent."""
    taken_meanwhile: int = 0
    """Tasks that a worker of the other queue has taken while they were imported: they may run twice."""
    skipped: list[Skipped] = field(default_factory=list)
    by_name: dict[str, int] = field(default_factory=dict)
    """How many of each queue and task were imported."""


class Page(Protocol):
    """Some tasks, and the transaction in which they are removed, if commands can join it."""

    @property
    def tasks(self) -> Sequence[WaitingTask]: ...

    @property
    def conn(self) -> Connection | None: ...

    def remove(self, tasks: Sequence[WaitingTask]) -> int:
        """Let the other queue forget these tasks; returns how many of them were still there."""


class Source(Protocol):
    """A queue of another library."""

    name: str

    def pages(self, size: int, *, locked: bool) -> Iterator[AbstractContextManager[Page]]:
        """All tasks that wait, oldest first. If they are `locked`, no worker of that queue takes them meanwhile."""


def command_id_of(source: str, source_id: str) -> UUID:
    """The id of the command that a task becomes, always the same."""
    try:
        return UUID(source_id)
    except ValueError:
        return uuid5(NAMESPACE, f"{source}:{source_id}")


def take_over(bus: SyncCommandBus, source: Source, *, domain: str | None = None, dry_run: bool = False) -> Report:
    """Send a command for every task that waits in the source, and remove the task there.

    A task goes to the domain that is named like its queue, or to `domain`. What cannot be a command stays where it is,
    and the report says why. In a dry run nothing is written anywhere.
    """
    report = Report(dry_run)
    for page in source.pages(PAGE, locked=not dry_run):
        with page as opened:
            report.found += len(opened.tasks)
            good = [task for task in opened.tasks if task.command is not None]
            report.skipped += [_skipped(task, task.problem or "") for task in opened.tasks if task.command is None]
            sent = _sendable(bus, good, domain, report) if dry_run else _send(bus, good, domain, opened.conn, report)
            if not dry_run and sent:
                report.taken_meanwhile += len(sent) - opened.remove(sent)
            report.imported += len(sent)
            for name in (f"{task.queue}/{task.name}" for task in sent):
                report.by_name[name] = report.by_name.get(name, 0) + 1
    report.imported -= report.already_there
    return report


def _send(
    bus: SyncCommandBus,
    tasks: Sequence[WaitingTask],
    domain: str | None,
    conn: Connection | None,
    report: Report,
) -> list[WaitingTask]:
    """Send the commands of a page, together where that is possible; returns the tasks that have a command now."""
    sent: list[WaitingTask] = []
    by_domain: dict[str, list[WaitingTask]] = {}
    for task in tasks:
        by_domain.setdefault(domain or task.queue, []).append(task)
    for name, those in by_domain.items():
        try:
            bus.send_many(name, [_command(task) for task in those], conn=conn)
            sent += those
        except (DuplicateCommandError, InvalidCommandError):
            sent += [task for task in those if _send_one(bus, name, task, conn, report)]
    return sent


def _sendable(
    bus: SyncCommandBus, tasks: Sequence[WaitingTask], domain: str | None, report: Report
) -> list[WaitingTask]:
    """The tasks whose commands would not be refused; nothing is sent."""
    good: list[WaitingTask] = []
    for task in tasks:
        try:
            check_all(domain or task.queue, [_command(task)], bus.settings.limits, bus.data_types)
        except InvalidCommandError as refused:
            report.skipped.append(_skipped(task, str(refused)))
        else:
            good.append(task)
    return good


def _send_one(bus: SyncCommandBus, domain: str, task: WaitingTask, conn: Connection | None, report: Report) -> bool:
    try:
        bus.send_many(domain, [_command(task)], conn=conn)
    except DuplicateCommandError:
        report.already_there += 1
    except InvalidCommandError as refused:
        report.skipped.append(_skipped(task, str(refused)))
        return False
    return True


def _command(task: WaitingTask) -> BatchCommand:
    assert task.command is not None
    return task.command


def _skipped(task: WaitingTask, reason: str) -> Skipped:
    return Skipped(task.source_id, task.queue, task.name, reason)
