"""How the CLI shows the progress of a batch: a bar at a terminal, a line now and then in a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import click

from busload.batches.batch import BatchMetadata
from busload.cli.output import at_terminal, console

PLAIN_EVERY = 0.5
"""Seconds between two lines about progress in a pipe, where there is no bar."""

STYLES = {"completed": "green", "failed": "red", "canceled": "magenta", "in troubleshooting": "yellow"}
WIDE = 100
"""Columns of a terminal that has room for a long bar."""

Show: TypeAlias = Callable[[BatchMetadata], None]


def counters(batch: BatchMetadata) -> dict[str, int]:
    """The counters of a batch without the total, in our words."""
    values = (batch.completed_count, batch.failed_count, batch.canceled_count, batch.in_troubleshooting_count)
    return dict(zip(STYLES, values, strict=True))


def progress(indent: str = "") -> AbstractContextManager[Show]:
    """A function that shows how far a batch has come: as a bar at a terminal, as lines in a pipe."""
    return _bar(indent) if at_terminal() else _lines(indent)


@contextmanager
def _bar(indent: str) -> Iterator[Show]:
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column
    from rich.text import Text

    screen = console()
    length = 20 if screen.width >= WIDE else 8

    class Counters(TextColumn):
        def render(self, task: Any) -> Text:
            taken = f"{indent}{' ' * length} {task.completed:,}/{task.total:,} {task.fields['done']} "
            room = screen.width - len(taken)
            return Text("  ").join(
                Text.assemble((f"{name} ", "dim"), (f"{count:,}", STYLES[name] if count else "dim"))
                for name, count in counters_that_fit(task.fields["counters"], room).items()
            )

    start = [TextColumn(indent[:-1])] if indent else []  # a column ends with a space of its own
    done = TextColumn("{task.completed:,}/{task.total:,}", table_column=Column(no_wrap=True))
    end = TextColumn("{task.fields[done]}", table_column=Column(no_wrap=True))
    columns = (*start, BarColumn(length), done, end, Counters("", table_column=Column(no_wrap=True)))
    with Progress(*columns, console=screen, refresh_per_second=12) as bar:
        task = bar.add_task("", visible=False)

        def show(batch: BatchMetadata) -> None:
            total, ended = batch.total_count, batch.finished_count
            bar.update(task, visible=True, total=total, completed=ended, counters=counters(batch), done=_done(batch))

        yield show


def counters_that_fit(counts: dict[str, int], room: int) -> dict[str, int]:
    """The counters that there is room for. Zeros go first, then the completed ones, which the bar shows."""
    happened = {name: count for name, count in counts.items() if count}
    for tried in (counts, happened):
        if len(_listed(tried)) <= room:
            return tried
    return {name: count for name, count in happened.items() if name != "completed"}


@contextmanager
def _lines(indent: str) -> Iterator[Show]:
    """At most two lines a second, but always the last state."""
    printed, waiting = 0.0, None

    def show(batch: BatchMetadata) -> None:
        nonlocal printed, waiting
        waiting = batch
        if time.monotonic() - printed >= PLAIN_EVERY or batch.status.final:
            click.echo(indent + _line(batch))
            printed, waiting = time.monotonic(), None

    yield show
    if waiting is not None:
        click.echo(indent + _line(waiting))


def _line(batch: BatchMetadata) -> str:
    done = _done(batch)
    line = f"{batch.finished_count:,}/{batch.total_count:,}  {_listed(counters(batch))}  {batch.status}"
    return f"{line}  {done}" if done else line


def _done(batch: BatchMetadata) -> str:
    """When the batch will be done; nothing if nobody can tell."""
    return "" if batch.forecast is None or batch.forecast.done_at is None else f"done {batch.forecast}"


def _listed(counts: dict[str, int]) -> str:
    return "  ".join(f"{name} {count:,}" for name, count in counts.items())
