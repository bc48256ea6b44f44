"""`busload import`: take over tasks that wait in another queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import click

from busload.cli import noun, options
from busload.cli.answer import Answer, answers
from busload.cli.output import paragraph
from busload.commands.wording import counted
from busload.imports.celery import Celery
from busload.imports.pgqueuer import PgQueuer
from busload.imports.procrastinate import Procrastinate
from busload.imports.rq import Rq
from busload.imports.take_over import Report, take_over
from busload.sync.bus import SyncCommandBus

MOST_SHOWN = 20
"""Tasks that were skipped, as the report for people shows them."""

import_tasks = noun("import", "celery redis://localhost/0 --queue mail --dry-run", "procrastinate --dry-run")

in_domain = click.option("--domain", help="The domain of all commands; default that of the name of their queue.")


@import_tasks.command()
@click.argument("url", metavar="REDIS_URL")
@click.option("--queue", "queues", multiple=True, default=("celery",), help="A queue; may be repeated. Default celery.")
@click.option("--with-links", is_flag=True, help="Import tasks without their callbacks, chains and chords.")
@in_domain
@options.dry_run
@answers
def celery(
    bus: SyncCommandBus, url: str, queues: Sequence[str], with_links: bool, domain: str | None, dry_run: bool
) -> Answer:
    """Take over the tasks that wait in a Redis broker of Celery. Stop the workers of Celery before.

    busload import celery redis://localhost:6379/0 --queue mail --dry-run
    busload import celery redis://localhost:6379/0 --queue mail --domain post
    """
    source = Celery(url, queues, with_links=with_links)
    try:
        report, held = take_over(bus, source, domain=domain, dry_run=dry_run), source.unacknowledged()
    finally:
        source.close()
    note = f"Workers of Celery hold {counted(held, 'more message')}: stop them, and import again." if held else None
    return _answer(report, note)


@import_tasks.command()
@click.option("--source", metavar="DSN", help="The database of procrastinate; default that of busload.")
@click.option("--queue", "queues", multiple=True, help="A queue; may be repeated. Default all.")
@in_domain
@options.dry_run
@answers
def procrastinate(
    bus: SyncCommandBus, source: str | None, queues: Sequence[str], domain: str | None, dry_run: bool
) -> Answer:
    """Take over the jobs of procrastinate that wait.

    busload import procrastinate --dry-run
    busload import procrastinate --source postgresql://db/old --queue mail
    """
    jobs = Procrastinate(source or bus.dsn, joins=source is None, queues=queues)
    return _answer(take_over(bus, jobs, domain=domain, dry_run=dry_run))


@import_tasks.command()
@click.argument("source", metavar="[DSN]", required=False)
@click.option("--entrypoint", "entrypoints", multiple=True, help="An entrypoint; may be repeated. Default all.")
@click.option("--base64", "in_base64", is_flag=True, help='Import payloads that are not JSON, as {"base64": "..."}.')
@in_domain
@options.dry_run
@answers
def pgqueuer(
    bus: SyncCommandBus,
    source: str | None,
    entrypoints: Sequence[str],
    in_base64: bool,
    domain: str | None,
    dry_run: bool,
) -> Answer:
    """Take over the jobs of PgQueuer that wait: in the database DSN, or else in that of busload.

    busload import pgqueuer --domain mail --dry-run
    busload import pgqueuer postgresql://db/old --entrypoint welcome
    """
    jobs = PgQueuer(source or bus.dsn, joins=source is None, entrypoints=entrypoints, in_base64=in_base64)
    return _answer(take_over(bus, jobs, domain=domain, dry_run=dry_run))


@import_tasks.command()
@click.argument("url", metavar="REDIS_URL")
@click.option("--queue", "queues", multiple=True, help="A queue; may be repeated. Default all.")
@click.option("--with-links", is_flag=True, help="Import jobs without their callbacks, repeats and dependents.")
@click.option("--trust-pickle", is_flag=True, help="Read pickles, which runs the code in them. For a Redis of yours.")
@in_domain
@options.dry_run
@answers
def rq(
    bus: SyncCommandBus,
    url: str,
    queues: Sequence[str],
    with_links: bool,
    trust_pickle: bool,
    domain: str | None,
    dry_run: bool,
) -> Answer:
    """Take over the jobs of RQ that wait or are scheduled. Stop the workers of RQ before.

    busload import rq redis://localhost:6379/0 --queue mail --dry-run
    busload import rq redis://localhost:6379/0 --queue mail --trust-pickle
    """
    source = Rq(url, queues, with_links=with_links, trusts_pickle=trust_pickle)
    try:
        report = take_over(bus, source, domain=domain, dry_run=dry_run)
        started, deferred = source.started(), source.deferred()
    finally:
        source.close()
    notes = []
    if started:
        notes.append(f"Workers of RQ hold {counted(started, 'more job')}: stop them, and import again.")
    if deferred:
        notes.append(f"RQ keeps {counted(deferred, 'job')} until other jobs have ended: these are not imported.")
    return _answer(report, " ".join(notes) or None)


def _answer(report: Report, note: str | None = None) -> Answer:
    def show() -> None:
        did = "Would import" if report.dry_run else "Imported"
        paragraph(f"{did} {report.imported} of {counted(report.found, 'task')}.")
        for name, count in report.by_name.items():
            click.echo(f"  {name}: {count}")
        if report.already_there:
            paragraph(f"{counted(report.already_there, 'task was', 'tasks were')} imported before.")
        if report.taken_meanwhile:
            taken = counted(report.taken_meanwhile, "task was", "tasks were")
            paragraph(f"{taken} taken by workers of the other queue meanwhile, and may run twice.")
        if report.skipped:
            paragraph(f"{counted(len(report.skipped), 'task stays where it is', 'tasks stay where they are')}:")
        for one in report.skipped[:MOST_SHOWN]:
            click.echo(f"  {one.queue}/{one.name} {one.source_id}: {one.reason}")
        if note is not None:
            paragraph(note)

    return Answer(asdict(report), show, ok=not report.taken_meanwhile)
