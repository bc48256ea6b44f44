"""`busload tracker`: tasks that other queues run, and the way from another tracker to this one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import BinaryIO, Literal, Protocol, TypeVar

import click
import psycopg

from busload.cli import did_you_mean, noun, options
from busload.cli.answer import Answer, answers, would
from busload.cli.find import note_unknown_domain
from busload.cli.output import paragraph, shown
from busload.cli.text_table import View
from busload.commands import search
from busload.commands.execution import Execution
from busload.commands.wording import counted
from busload.errors import InvalidOperationError
from busload.postgres.connection import Connection
from busload.postgres.plan import Plan
from busload.postgres.write import patient
from busload.sync.bus import SyncCommandBus
from busload.sync.connection import connect
from busload.sync.plan import perform
from busload.sync.tracker import SyncTaskTracker
from busload.tasks import phase
from busload.tasks.compare import Newest, OldTable, OldTask, newest, task_page
from busload.tasks.export import ExportError, OldExport
from busload.tasks.phase import AT_LEAST, Answers, Phase, PhaseReport
from busload.tasks.selftest import Fact, SelfTest

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
    "TASK=task_key EXECUTION=execution_id QUEUE ATTEMPT STATUS ENQUEUED=enqueued_at",
    nothing="Nothing has waited that long.",
    elastic="TASK",
)


def _table(ctx: click.Context, param: click.Parameter, name: str | None) -> str | None:
    if name is None:
        return None
    parts = name.split(".")
    if len(parts) > 2 or not all(parts) or "\0" in name:
        raise click.BadParameter(f"found {name!r:.80}, wanted a table, or a schema, a dot and a table")
    return name


REPORTS = View[PhaseReport](
    "OLD_TRACKER PHASE SINCE OPERATOR COMPARED AGREED DISAGREED=disagreed_at",
    nothing="No old tracker is known. A PhasedTracker makes its old tracker known by its first call.",
    elastic="OLD TRACKER",
    spare=("OPERATOR",),
)
ANSWERS = View[Answers]("AT OPERATION TASK=task_id OLD BUSLOAD", elastic="TASK")
_old = click.option("--old", "old_name", metavar="NAME", help="Which old tracker, if there are several.")


tracker = noun(
    "tracker",
    "recover --queue partner_tasks",
    "compare --table legacy.task_tracker",
    "report",
    "switch dual_write --dry-run",
    "selftest",
)


@tracker.command()
@click.option("--queue", required=True, help="The queue.")
@options.age("--waiting-for", "How long they must have waited: 30s, 5m, 2h, 1d.", default="5m")
@click.option("--limit", default=PAGE, help="How many tasks to list at most.")
@options.dry_run
@answers
def recover(bus: SyncCommandBus, queue: str, waiting_for: timedelta, limit: int, dry_run: bool) -> Answer:
    """List tasks that nobody has claimed for too long, so that you can publish their two keys again.

    Each task is listed once, and again when it has waited that long once more. With --dry-run, tasks that dead workers
    hold are listed as lost, and are not taken back from them. A queue without the prefix of an environment means the
    queue in every environment; QUEUE says where to publish.

        busload tracker recover --queue partner_tasks
        busload tracker recover --queue partner_tasks --json | publish
    """
    tracker = SyncTaskTracker(bus)
    found = tracker.recover(queue, waiting_for=waiting_for, limit=limit, dry_run=dry_run)
    known = bus.database.read(search.known_domains())
    if not found and not any(name in known for name in tracker.queue_names(queue)):
        note_unknown_domain(bus, queue)
    return WAITING.list(found)


@tracker.command()
@click.option("--table", "old_table", callback=_table, help="The old table, for example legacy.task_tracker.")
@click.option("--old-dsn", metavar="URL", help="The database it is in; default this one.")
@click.option(
    "--export",
    type=click.File("rb"),
    metavar="FILE",
    help="Instead of a table: JSON lines that the old store has exported, one document per execution; - is stdin.",
)
@click.option("--queue", help="Compare the tasks of one queue only, in any environment.")
@click.option("--map", "names", multiple=True, metavar="NEW=OLD", help=f"Columns with other names than {COLUMNS}.")
@click.option("--limit", default=100, type=click.IntRange(min=1), help="Stop after this many disagreements.")
@answers
def compare(
    bus: SyncCommandBus,
    old_table: str | None,
    old_dsn: str | None,
    export: BinaryIO | None,
    queue: str | None,
    names: Sequence[str],
    limit: int,
) -> Answer:
    """List tasks about which an old tracker and busload disagree; exit code 1 if there are any.

    The newest execution of each task counts. Differences are checked twice, so that a task which changed meanwhile
    is not listed. The old table needs one row per execution, with a task id, an execution id, a status (queued,
    processing, completed, failed, dlq) and a time of creation; the queue is needed for --queue. An export has one JSON
    document per execution, as `mongoexport` writes them: taskId, executionId, status, createdAt and queueName.

        busload tracker compare --table legacy.task_tracker
        busload tracker compare --table tracker --map task_id=taskId --json
        busload tracker compare --export executions.jsonl
    """
    if (old_table is None) is (export is None) or (old_dsn is not None and export is not None):
        raise click.UsageError(
            "Give the --table of the old tracker, with --old-dsn if it is elsewhere, or an --export."
        )
    mapped = _mapped(names)
    queues = None if queue is None else SyncTaskTracker(bus).queue_names(SyncTaskTracker(bus).queue_name(queue))
    with bus.pool.connection() as ours:
        if old_table is None:
            comparison = _Comparison(ours, _exported(export, mapped, queues), queues)
            found = comparison.disagreements(limit)
        else:
            columns = {name: mapped.get(name, name) for name in COLUMNS}
            with connect(old_dsn) if old_dsn else nullcontext(ours) as theirs:
                comparison = _Comparison(ours, _Table(theirs, OldTable(old_table, columns, queues)), queues)
                found = comparison.disagreements(limit)
    return DISAGREEMENTS.list(found, nothing=f"{counted(comparison.tasks, 'task')}, no disagreement.", ok=not found)


@tracker.command()
@_old
@options.limit(20)
@answers
def report(bus: SyncCommandBus, old_name: str | None, limit: int) -> Answer:
    """Show in which phase each old tracker is, and how far it and busload agree.

    Each phase has a line: how many calls both trackers have answered, how many of these in the same way, and when they
    last disagreed. Below are the newest disagreements of the phase that holds.

        busload tracker report
        busload tracker report --old legacy --json | jq '.disagreements[]'
    """
    found = bus.database.read(phase.reports(old_name))
    if not found and old_name is not None:
        _known(bus, old_name)
    newest = [
        one
        for report in found
        if not report.over
        for one in bus.database.read(phase.disagreements(report, limit=limit))
    ]

    def show() -> None:
        REPORTS.print_table(found)
        if newest:
            click.echo()
            ANSWERS.print_table(newest)

    return Answer({"phases": found, "disagreements": newest}, show)


@tracker.command()
@click.argument("to", type=click.Choice([one.value for one in Phase]), metavar="PHASE")
@_old
@options.age("--agreed-for", "How long the two must have agreed: 30m, 1h, 1d.", default="1h")
@click.option("--at-least", type=click.IntRange(min=0), default=AT_LEAST, help="How many calls must be compared.")
@click.option("--force", is_flag=True, help="Switch although it is not known to be safe.")
@options.reason(required=False)
@options.operator
@options.dry_run
@answers
def switch(
    bus: SyncCommandBus,
    to: str,
    old_name: str | None,
    agreed_for: timedelta,
    at_least: int,
    force: bool,
    reason: str | None,
    operator: str,
    dry_run: bool,
) -> Answer:
    """Switch all processes of an application to another phase: shadow, dual_write or cut_over.

    In shadow the old tracker decides, and busload is written beside it. In dual_write busload decides, and the old
    tracker is written beside it. In cut_over busload alone is written. A phase is left for the next one if enough calls
    were compared and the two have agreed for long enough, and for the one before if the old tracker is in step.

        busload tracker switch dual_write --dry-run
        busload tracker switch cut_over --agreed-for 1d
    """
    name = _known(bus, old_name)
    plan = partial(
        phase.switch,
        name,
        Phase(to),
        operator=operator,
        reason=reason,
        force=force,
        agreed_for=agreed_for,
        at_least=at_least,
        dry_run=dry_run,
    )
    left = bus.database.write(patient(plan))
    value = {"old_tracker": name, "phase": to, "switched": left is not None and not dry_run}
    if left is None:
        return Answer(value, f"{name} is in {to} already.")
    if dry_run:
        return would(f"switch {name} from {left.phase} to {to}", **value)
    return Answer(value, f"Switched {name} from {left.phase} to {to}. {AFTER[Phase(to)]}")


@tracker.command()
@answers
def selftest(bus: SyncCommandBus) -> Answer:
    """Try on this database what a tracker promises; exit code 1 if a promise does not hold.

    Tasks are enqueued, claimed, failed, retried and completed in one transaction, which is rolled back: nothing stays,
    and nobody sees anything of it.

        busload tracker selftest
        busload tracker selftest --json | jq .ok
    """
    test = SelfTest(SyncTaskTracker(bus), bus.settings.limits)
    with bus.pool.connection() as conn, conn.transaction(force_rollback=True):
        facts = perform(conn, test.facts())
    ok = all(fact.ok for fact in facts)

    def show() -> None:
        for fact in facts:
            paragraph(_told(fact), then="  ")

    return Answer({"ok": ok, "facts": facts}, show, ok=ok)


def _told(fact: Fact) -> str:
    return f"{'✓' if fact.ok else '✗'} {fact.name}: {fact.seen}"


AFTER = {
    Phase.SHADOW: "The old tracker decides.",
    Phase.DUAL_WRITE: "busload decides; the old tracker is still written.",
    Phase.CUT_OVER: "The old tracker is no longer written.",
}


def _known(bus: SyncCommandBus, old_name: str | None) -> str:
    """The old tracker of this name, or the only one."""
    names = list(dict.fromkeys(one.old_tracker for one in bus.database.read(phase.reports())))
    if old_name is None and len(names) == 1:
        return names[0]
    if not names:
        raise InvalidOperationError(REPORTS.nothing)
    if old_name is None:
        raise click.UsageError(f"There are several old trackers. Name one by --old: {', '.join(names)}.")
    if old_name not in names:
        likely = did_you_mean(old_name, names)
        raise InvalidOperationError(
            f"There is no old tracker {shown(old_name)!r:.200}.{likely} `busload tracker report` lists what there is."
        )
    return old_name


class _Old(Protocol):
    """Where the tasks of the other tracker are read."""

    def page(self, *, after: str, limit: int) -> Sequence[OldTask]: ...

    def of(self, task_ids: Sequence[str]) -> Sequence[OldTask]: ...


class _Table:
    """The table of the other tracker, on a connection to its database."""

    def __init__(self, conn: Connection, table: OldTable) -> None:
        self._conn, self._table = conn, table

    def page(self, *, after: str, limit: int) -> list[OldTask]:
        return self._read(self._table.page(after=after, limit=limit))

    def of(self, task_ids: Sequence[str]) -> list[OldTask]:
        return self._read(self._table.of(task_ids))

    def _read(self, plan: Plan[list[OldTask]]) -> list[OldTask]:
        try:
            return perform(self._conn, plan)
        except (psycopg.ProgrammingError, psycopg.NotSupportedError) as error:
            hint = "--map names columns that are called otherwise."
            found = error.diag.message_primary or error
            raise click.UsageError(f"The old table cannot be read: {found}. {hint}") from None


def _exported(export: BinaryIO | None, names: dict[str, str], queues: Sequence[str] | None) -> OldExport:
    try:
        return OldExport(export or (), names, queues)
    except ExportError as error:
        hint = "--map names fields that are called otherwise."
        raise click.UsageError(f"The export cannot be read: {error}. {hint}") from None


class _Comparison:
    """Page by page through the one, then through the other; each looks up what the other has of the same tasks."""

    def __init__(self, ours: Connection, old: _Old, queues: Sequence[str] | None) -> None:
        self._ours, self._old, self._queues = ours, old, queues
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
        """All tasks of the old tracker, and those that only busload has."""
        after = ""
        while page := self._old.page(after=after, limit=PAGE):
            yield [row.task_id for row in page]
            after = page[-1].task_id
        after = ""
        while names := self._here(task_page(after=after, queues=self._queues, limit=PAGE)):
            known = {row.task_id for row in self._old.of(names)}
            yield [task_id for task_id in names if task_id not in known]
            after = names[-1]

    def _compared(self, task_ids: Sequence[str]) -> list[Disagreement]:
        here = {one.task_id: one for one in self._here(newest(task_ids, queues=self._queues))}
        there = {one.task_id: one for one in self._old.of(task_ids)}
        pairs = ((task_id, here.get(task_id), there.get(task_id)) for task_id in task_ids)
        return [found for pair in pairs if (found := _disagreement(*pair)) is not None]

    def _here(self, plan: Plan[T]) -> T:
        return perform(self._ours, plan)


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


def _mapped(names: Sequence[str]) -> dict[str, str]:
    """What the old tracker calls by another name."""
    mapped = {}
    for pair in names:
        new, equals, old = pair.partition("=")
        if not equals or not old or new not in COLUMNS:
            raise click.BadParameter(f"found {pair!r}, wanted one of {', '.join(COLUMNS)}, =, and a column")
        mapped[new] = old
    return mapped
