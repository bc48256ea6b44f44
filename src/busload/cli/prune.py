"""`busload prune`: removes what ended long ago."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta

import click

from busload.cli import options
from busload.cli.answer import answers
from busload.cli.output import at_terminal, console, echo_json
from busload.cli.progress_bar import PLAIN_EVERY
from busload.commands.wording import counted
from busload.retention.prune import Pruned
from busload.sync.bus import SyncCommandBus

SINGULAR = {"commands": "command", "executions": "execution", "events": "event", "batches": "batch"}


@click.command()
@options.age("--older-than", "How long ago it must have ended: 30d, 12h, 90m, 1w.", required=True)
@click.option("--archive", is_flag=True, help="Move it to busload.archive and busload.archived_batch.")
@options.dry_run
@answers(prints=True)
def prune(bus: SyncCommandBus, older_than: timedelta, archive: bool, dry_run: bool, *, as_json: bool) -> None:
    """Remove what ended long ago, or move it to the archive: commands of all domains, their executions and events.

    The commands of a batch go with their batch, once it is complete and its callback has ended. What is open stays,
    whatever its age. It runs in small transactions beside the workers, and may be interrupted: the next one goes on.

        busload prune --older-than 30d --dry-run
        busload prune --older-than 12w --archive
    """
    done = "Would remove" if dry_run else "Archived" if archive else "Removed"
    with _progress(done, silent=as_json) as show:
        pruned = bus.prune(older_than, archive=archive, dry_run=dry_run, progress=show)
    if as_json:
        given = {"older_than_seconds": older_than.total_seconds(), "archive": archive, "dry_run": dry_run}
        echo_json({**given, **asdict(pruned)})
    else:
        click.echo(f"{_line(done, pruned)}{'; nothing was done' if dry_run else ''}.")


@contextmanager
def _progress(done: str, *, silent: bool) -> Iterator[Callable[[Pruned], None]]:
    """How far it has come: a line that changes at a terminal, a line now and then in a pipe."""
    if silent:
        yield lambda pruned: None
    elif at_terminal():
        with console().status(done) as status:
            yield lambda pruned: status.update(f"{_line(done, pruned)} …")
    else:
        printed = time.monotonic()

        def show(pruned: Pruned) -> None:
            nonlocal printed
            if time.monotonic() - printed >= PLAIN_EVERY:
                click.echo(f"{_line(done, pruned)} …", err=True)
                printed = time.monotonic()

        yield show


def _line(done: str, pruned: Pruned) -> str:
    counts = [counted(count, SINGULAR[name], name) for name, count in asdict(pruned).items()]
    return f"{done} {', '.join(counts[:-1])} and {counts[-1]}"
