"""`busload tracker`: tasks that other queues run, and the way from another tracker to this one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeVar

import click
import psycopg

from busload.cli import noun, options
from busload.cli.answer import Answer, answers
from busload.cli.find import note_unknown_domain
from busload.cli.text_table import View
from busload.commands.execution import Execution
from busload.commands.wording import counted
from busload.postgres.connection import Connection
from busload.postgres.plan import Plan
from busload.sync.bus import SyncCommandBus
from busload.sync.connection import connect
from busload.sync.plan import perform
from busload.sync.tracker import SyncTaskTracker
from busload.tasks.compare import Newest, OldTable, OldTask, newest, task_page
from busload.tasks.tracker import PREFIXES

T = TypeVar("T")

COLUMNS = ("task_id", "execution_id", "status", "created_at", "queue")
PAGE = 1000


@dataclass(frozen=True, slots=True)
class Disagreement:
    """What two trackers say about the same task; None where one has nothing to say."""

    task_id: str
    problem: Literal["missing here", "missing there", "status differs", "execution differs"]
    here: str | None
    there: str | None


DISAGREEMENTS = View[Disagreement]("TASK=task_id PROBLEM HERE THERE", elastic="TASK")
WAITING = View[Execution](
    "TASK=task_key EXECUTION=execution_id ATTEMPT STATUS ENQUEUED=enqueued_at",
    nothing="Nothing has waited that long.",
    elastic="TASK",
)


def _table(ctx: click.Context, param: click.Parameter, name: str) -> str:
    parts = name.split(".")
    if len(parts) > 2 or not all(parts) or "\0" in name:
        raise click.BadParameter(f"found {name!r:.80}, wanted a table, or a schema, a dot and a table")
    return name


tracker = noun("tracker", "recover --queue partner_tasks", "compare --table legacy.task_tracker")


@tracker.command()
@click.option("--queue", required=True, help="The queue.")
@options.age("--waiting-for", "How long they must have waited: 30s, 5m, 2h, 1d.", default="5m")
@click.option("--limit", default=PAGE, help="How many tasks to list at most.")
@options.dry_run
@answers
def recover(bus: SyncCommandBus, queue: str, waiting_for: timedelta, limit: int, dry_run: bool) -> Answer:
    """List tasks that nobody has claimed for too long, so that you can publish their two keys again.

    Each task is listed once, and again when it has waited that long once more. With --dry-run, tasks that dead workers
    hold are listed as lost, and are not taken back from them.

        busload tracker recover --queue partner_tasks
        busload tracker recover --queue partner_tasks --json | publish
    """
    tracker = SyncTaskTracker(bus)
    found = tracker.recover(queue, waiting_for=waiting_for, limit=limit, dry_run=dry_run)
    if not found:
        note_unknown_domain(bus, tracker.queue_name(queue))
    return WAITING.list(found)


@tracker.command()
@click.option(
    "--table", "old_table", required=True, callback=_table, help="The old table, for example legacy.task_tracker."
)
@click.option("--old-dsn", metavar="URL", help="The database it is in; default this one.")
@click.option("--queue", help="Compare the tasks of one queue only, in any environment.")
@click.option("--map", "names", multiple=True, metavar="NEW=OLD", help=f"Columns with other names than {COLUMNS}.")
@click.option("--limit", default=100, type=click.IntRange(min=1), help="Stop after this many disagreements.")
@answers
def compare(
    bus: SyncCommandBus, old_table: str, old_dsn: str | None, queue: str | None, names: Sequence[str], limit: int
) -> Answer:
    """List tasks about which an old tracker's table and busload disagree; exit code 1 if there are any.

    The newest execution of each task counts. Differences are checked twice, so that a task which changed meanwhile
    is not listed. The old table needs one row per execution, with a task id, an execution id, a status (queued,
    processing, completed, failed, dlq) and a time of creation; the queue is needed for --queue.

        busload tracker compare --table legacy.task_tracker
        busload tracker compare --table tracker --map task_id=taskId --json
    """
    columns = _columns(names)
    queue = queue and SyncTaskTracker(bus).queue_name(queue)
    old_names = None if queue is None else [queue, *(prefix + queue for prefix in PREFIXES)]
    with bus.pool.connection() as ours, connect(old_dsn) if old_dsn else nullcontext(ours) as theirs:
        comparison = _Comparison(ours, theirs, OldTable(old_table, columns, old_names), queue)
        found = comparison.disagreements(limit)
    return DISAGREEMENTS.list(found, nothing=f"{counted(comparison.tasks, 'task')}, no disagreement.", ok=not found)


class _Comparison:
    """Page by page through the one, then through the other; each looks up what the other has of the same tasks."""

    def __init__(self, ours: Connection, theirs: Connection, old: OldTable, queue: str | None) -> None:
        self._ours, self._theirs, self._old, self._queue = ours, theirs, old, queue
        self.tasks = 0

    def disagreements(self, limit: int) -> list[Disagreement]:
        found: list[Disagreement] = []
        for task_ids in self._pages():
            self.tasks += len(task_ids)
            suspects = [one.task_id for one in self._compared(task_ids)]
            found += self._compared(suspects) if suspects else []
            if len(found) >= limit:
                break
        return found[:limit]

    def _pages(self) -> Iterator[list[str]]:
        """All tasks of the old table, and those that only busload has."""
        after = ""
        while page := self._there(self._old.page(after=after, limit=PAGE)):
            yield [row.task_id for row in page]
            after = page[-1].task_id
        after = ""
        while names := self._here(task_page(after=after, queue=self._queue, limit=PAGE)):
            known = {row.task_id for row in self._there(self._old.of(names))}
            yield [task_id for task_id in names if task_id not in known]
            after = names[-1]

    def _compared(self, task_ids: Sequence[str]) -> list[Disagreement]:
        here = {one.task_id: one for one in self._here(newest(task_ids, queue=self._queue))}
        there = {one.task_id: one for one in self._there(self._old.of(task_ids))}
        pairs = ((task_id, here.get(task_id), there.get(task_id)) for task_id in task_ids)
        return [found for pair in pairs if (found := _disagreement(*pair)) is not None]

    def _here(self, plan: Plan[T]) -> T:
        return perform(self._ours, plan)

    def _there(self, plan: Plan[T]) -> T:
        try:
            return perform(self._theirs, plan)
        except (psycopg.ProgrammingError, psycopg.NotSupportedError) as error:
            hint = "--map names columns that are called otherwise."
            found = error.diag.message_primary or error
            raise click.UsageError(f"The old table cannot be read: {found}. {hint}") from None


def _disagreement(task_id: str, here: Newest | None, there: OldTask | None) -> Disagreement | None:
    if here is None:
        return Disagreement(task_id, "missing here", None, there.status) if there is not None else None
    if there is None:
        return Disagreement(task_id, "missing there", here.status, None)
    if here.status != there.status:
        return Disagreement(task_id, "status differs", here.status, there.status)
    if there.execution_id not in here.ids:
        return Disagreement(task_id, "execution differs", here.shown_id, there.execution_id)
    return None


def _columns(names: Sequence[str]) -> dict[str, str]:
    columns = {name: name for name in COLUMNS}
    for pair in names:
        new, equals, old = pair.partition("=")
        if not equals or not old or new not in columns:
            raise click.BadParameter(f"found {pair!r}, wanted one of {', '.join(COLUMNS)}, =, and a column")
        columns[new] = old
    return columns
