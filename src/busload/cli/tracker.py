"""`busload tracker`: tasks that other queues run, and the way from another tracker to this one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeVar

import click
import psycopg

from busload.cli.database import note_unknown_domain, open_bus
from busload.cli.output import as_json, echo_json, table
from busload.cli.prune import age
from busload.domain.counted import counted
from busload.domain.execution import Execution
from busload.store import track
from busload.store.connection import Connection, connect
from busload.store.plan import Plan, perform
from busload.tracker import PREFIXES, SyncTaskTracker

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


def _table(ctx: click.Context, param: click.Parameter, name: str) -> str:
    parts = name.split(".")
    if len(parts) > 2 or not all(parts) or "\0" in name:
        raise click.BadParameter(f"found {name!r:.80}, wanted a table, or a schema, a dot and a table")
    return name


@click.group()
def tracker() -> None:
    """Follow tasks that other queues run.

    \b
        busload tracker recover --queue partner_tasks
        busload tracker compare --table legacy.task_tracker
    """


@tracker.command()
@click.option("--queue", required=True, help="The queue.")
@click.option("--waiting-for", default="5m", callback=age, metavar="AGE", show_default=True, help="30s, 5m, 2h, 1d.")
@click.option("--limit", default=PAGE, show_default=True, help="At most so many.")
@click.option(
    "--dry-run", is_flag=True, help="Only look; what dead workers hold is listed as lost, and not taken back from them."
)
@as_json
def recover(queue: str, waiting_for: timedelta, limit: int, dry_run: bool, as_json: bool) -> None:
    """List tasks that nobody has claimed for too long, for somebody to publish their two keys again.

    Each is listed once, and again when it has waited as long once more.

    \b
        busload tracker recover --queue partner_tasks
        busload tracker recover --queue partner_tasks --json | publish
    """
    with open_bus() as bus:
        tracker = SyncTaskTracker(bus)
        if dry_run:
            found = tracker._look(queue, waiting_for=waiting_for, limit=limit)
        else:
            found = tracker.recover(queue, waiting_for=waiting_for, limit=limit)
        if not found:
            note_unknown_domain(bus, tracker._queue(queue))
    if as_json:
        echo_json(found)
    else:
        _print_waiting(found)


@tracker.command()
@click.option(
    "--table", "old_table", required=True, callback=_table, help="The old table, for example legacy.task_tracker."
)
@click.option("--old-dsn", metavar="URL", help="The database it is in; default this one.")
@click.option("--queue", help="Compare the tasks of one queue only, in whatever environment.")
@click.option("--map", "names", multiple=True, metavar="NEW=OLD", help=f"Columns with other names than {COLUMNS}.")
@click.option(
    "--limit", default=100, type=click.IntRange(min=1), show_default=True, help="Stop after so many disagreements."
)
@as_json
def compare(
    old_table: str, old_dsn: str | None, queue: str | None, names: Sequence[str], limit: int, as_json: bool
) -> None:
    """List tasks about which an old tracker's table and busload disagree; exit code 1 if there are any.

    The newest execution of each task counts. What differs is looked at twice, so that a task which moved meanwhile
    is not listed. The old table needs one row per execution, with a task id, an execution id, a status (queued,
    processing, completed, failed, dlq) and a time of creation; the queue is needed for --queue.

    \b
        busload tracker compare --table legacy.task_tracker
        busload tracker compare --table tracker --map task_id=taskId --json
    """
    columns = _columns(names)
    with open_bus() as bus, ExitStack() as stack:
        queue = queue and SyncTaskTracker(bus)._queue(queue)
        old = track.OldTable(old_table, columns, _environments(queue))
        ours = stack.enter_context(bus.pool.connection())
        theirs = stack.enter_context(connect(old_dsn)) if old_dsn else ours
        comparison = _Comparison(ours, theirs, old, queue)
        found = comparison.disagreements(limit)
    if as_json:
        echo_json(found)
    else:
        rows = [(one.task_id, one.problem, one.here, one.there) for one in found]
        nothing = f"{counted(comparison.tasks, 'task')}, no disagreement."
        table(("TASK", "PROBLEM", "HERE", "THERE"), rows, nothing=nothing, elastic="TASK")
    if found:
        raise click.exceptions.Exit(1)


class _Comparison:
    """Page by page through the one, then through the other; each looks up what the other has of the same tasks."""

    def __init__(self, ours: Connection, theirs: Connection, old: track.OldTable, queue: str | None) -> None:
        self._ours, self._theirs, self._old, self._queue = ours, theirs, old, queue
        self.tasks = 0

    def disagreements(self, limit: int) -> list[Disagreement]:
        found: list[Disagreement] = []
        for task_ids in self._pages():
            suspects = [one.task_id for one in self._compared(task_ids)]
            found += self._compared(suspects) if suspects else []
            if len(found) >= limit:
                break
        return found[:limit]

    def _pages(self) -> Iterator[list[str]]:
        """All tasks of the old table, and those that only busload has."""
        for page in _paged(lambda after: self._there(self._old.page(after=after, limit=PAGE)), lambda row: row.task_id):
            task_ids = [row.task_id for row in page]
            self.tasks += len(task_ids)
            yield task_ids
        for names in _paged(lambda after: self._here(track.task_page(after=after, queue=self._queue, limit=PAGE)), str):
            known = {row.task_id for row in self._there(self._old.of(names))}
            missing = [task_id for task_id in names if task_id not in known]
            self.tasks += len(missing)
            yield missing

    def _compared(self, task_ids: Sequence[str]) -> list[Disagreement]:
        here = {one.task_id: one for one in self._here(track.newest(task_ids, queue=self._queue))}
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


def _disagreement(task_id: str, here: track.Newest | None, there: track.OldTask | None) -> Disagreement | None:
    if here is None:
        return Disagreement(task_id, "missing here", None, there.status) if there is not None else None
    if there is None:
        return Disagreement(task_id, "missing there", here.status, None)
    if here.status != there.status:
        return Disagreement(task_id, "status differs", here.status, there.status)
    if there.execution_id not in here.ids:
        return Disagreement(task_id, "execution differs", here.shown_id, there.execution_id)
    return None


def _paged(ask: Callable[[str], list[T]], key: Callable[[T], str]) -> Iterator[list[T]]:
    after = ""
    while page := ask(after):
        yield page
        after = key(page[-1])


def _columns(names: Sequence[str]) -> dict[str, str]:
    columns = {name: name for name in COLUMNS}
    for pair in names:
        new, equals, old = pair.partition("=")
        if not equals or not old or new not in columns:
            raise click.BadParameter(f"found {pair!r}, wanted one of {', '.join(COLUMNS)}, =, and a column")
        columns[new] = old
    return columns


def _environments(queue: str | None) -> list[str] | None:
    """What the old table may call a queue."""
    return None if queue is None else [queue, *(prefix + queue for prefix in PREFIXES)]


def _print_waiting(found: Sequence[Execution]) -> None:
    rows = [(one.task_key, one.execution_id, one.attempt, one.status, one.enqueued_at) for one in found]
    heads = ("TASK", "EXECUTION", "ATTEMPT", "STATUS", "ENQUEUED")
    table(heads, rows, nothing="Nothing has waited that long.", elastic="TASK")
