"""`busload trace`: every attempt at a task, drawn along the time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby

import click
from rich.cells import cell_len

from busload.cli import options
from busload.cli.answer import Answer, answers
from busload.cli.find import candidates, find_one, id_or_beginning
from busload.cli.output import NOTHING, aligned, joined, shown, tracebacks, width, wrapped
from busload.commands.execution import Execution, ExecutionStatus
from busload.commands.wording import counted
from busload.errors import InvalidOperationError
from busload.sync.bus import SyncCommandBus

WIDTH = 32
"""Characters of the time axis."""

MARKS = {
    ExecutionStatus.QUEUED: "…",
    ExecutionStatus.PROCESSING: ">",
    ExecutionStatus.COMPLETED: "✓",
    ExecutionStatus.FAILED: "✗",
    ExecutionStatus.LOST: "?",
    ExecutionStatus.DLQ: "!",
    ExecutionStatus.CANCELED: "-",
}


@click.command()
@click.argument("task_key")
@options.domain
@answers
def trace(bus: SyncCommandBus, task_key: str, domain: str | None) -> Answer:
    """Draw every attempt at a task, by its key: of every command that was sent for it, oldest first.

    You can also give the id of one of its commands, or the beginning of that id. In a bar, dots mean waiting and lines
    mean running.

        busload trace invoices:2026:7
        busload trace invoices:2026:7 --json | jq -r '.[].error'
    """
    found = bus.trace(task_key, domain=domain)
    if not found and (of_command := _task_of_command(bus, task_key, domain)):
        found = bus.trace(of_command, domain=domain)

    def show() -> None:
        if not found:
            where = "any domain" if domain is None else f"domain {domain!r}"
            hint = "Check the key; `busload command show` tells it."
            raise InvalidOperationError(f"No command was sent for the task {task_key!r} in {where}. {hint}")
        for line in timeline(found, now=datetime.now(UTC), room=width()):
            click.echo(line)

    return Answer(found, show, found=bool(found))


def _task_of_command(bus: SyncCommandBus, text: str, domain: str | None) -> str | None:
    """The key of the task that a command was sent for, if its id was given instead."""
    try:
        ids = id_or_beginning(text)
    except click.BadParameter:
        return None
    if not candidates(bus, "command", ids, domain, limit=1):
        return None
    domain, command_id = find_one(bus, "command", ids, domain)
    command = bus.get_command(domain, command_id)
    if command is not None and command.task_key is None:
        raise InvalidOperationError(
            f"Command {command_id} was sent without a task key. `busload command show {command_id}` shows its attempts."
        )
    return None if command is None else command.task_key


def timeline(found: Sequence[Execution], now: datetime, room: int = sys.maxsize) -> list[str]:
    """A line for the task, one for each command, and below it one for each attempt and each thing an operator did.

    Where that is wider than the `room` of a terminal, who did it and what was said follow on lines of their own.
    Below these is where attempts failed.
    """
    begin = min(one.enqueued_at for one in found)
    end = max(one.finished_at or now for one in found)
    commands = [list(attempts) for _, attempts in groupby(found, key=lambda one: (one.queue, one.command_id))]
    lines = [f"{shown(found[0].task_key)}: {counted(len(commands), 'command')}, {counted(len(found), 'attempt')}"]
    for attempts in commands:
        first = attempts[0]
        lines += ["", f"{first.command_id} in {first.queue}, sent {shown(first.enqueued_at)}"]
        rows, waiting_since = [], first.enqueued_at
        for one in attempts:
            bar = _bar(waiting_since, one.started_at, one.finished_at or now, begin, end)
            said = shown(joined(one.worker, one.error))
            rows.append([f"  {MARKS[one.status]} {one.status}", f"{one.attempt}", bar, _took(one, now), said])
            waiting_since = one.finished_at or now
            for action in one.actions:
                by = f"by {shown(action.operator or 'unknown')}"
                rows.append([f"    {action.type}", "", "", shown(action.at), by])
                waiting_since = action.at
        lines += _fitted(rows, room)
        lines += tracebacks([(one.attempt, one.traceback) for one in attempts])
    return lines


def _fitted(rows: Sequence[Sequence[str]], room: int) -> list[str]:
    whole = aligned(rows)
    if all(cell_len(line) <= room for line in whole):
        return whole
    lines = list[str]()
    for line, (*_, said) in zip(aligned([row[:-1] for row in rows]), rows, strict=True):
        lines += [line, *(f"      {part}" for part in wrapped(said, room - 6) if part != NOTHING)]
    return lines


def _bar(waiting: datetime, started: datetime | None, ended: datetime, begin: datetime, end: datetime) -> str:
    span = (end - begin).total_seconds() or 1.0

    def at(moment: datetime) -> int:
        return min(WIDTH, max(0, int((moment - begin).total_seconds() / span * WIDTH)))

    left, right = at(waiting), at(ended)
    middle = right if started is None else min(at(started), WIDTH - 1)
    running = "" if started is None else "━" * max(1, right - middle)
    return (" " * left + "·" * (middle - left) + running).ljust(WIDTH)[:WIDTH]


def _took(one: Execution, now: datetime) -> str:
    if one.started_at is None:
        return "-"
    seconds = ((one.finished_at or now) - one.started_at).total_seconds()
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:,.1f} s"
