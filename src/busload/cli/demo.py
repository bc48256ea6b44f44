"""`busload demo`: 10,000 commands as one batch, with everything that happens to them in real life."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, TypeVar
from uuid import UUID

import click

from busload.bus import SyncCommandBus
from busload.cli.command import print_trail
from busload.cli.database import open_bus, transport_option
from busload.cli.demo_invoices import DOMAIN, invoices
from busload.cli.output import Show, as_json, at_terminal, console, counters, echo_json, progress, table, width, wrapped
from busload.domain.batch import BatchMetadata
from busload.domain.command import AuditEvent, BatchCommand, CommandMetadata, CommandStatus, TroubleshootingItem
from busload.domain.counted import counted
from busload.domain.ids import new_id
from busload.store import report

INDENT = " " * 10
OPERATOR = "ada"
PROCESSES, CONCURRENCY = 2, 200
PATIENCE = 60.0
"""Seconds without any progress after which the demo gives up."""

BY_HAND = {"ACCOUNT_CLOSED": "complete", "DUPLICATE": "cancel"}
"""What the operator does about an error; everything else is tried again with the next release."""

T = TypeVar("T")


@click.command()
@click.option("--commands", type=click.IntRange(100, 1_000_000), default=10_000, show_default=True)
@transport_option
@as_json
def demo(commands: int, as_json: bool) -> None:
    """Run 10,000 commands as one batch, and see what busload does.

    Two worker processes pay invoices: most are paid at once, some at the second attempt, and a few wait for a person
    until a new release and an operator have resolved them. It all stays in the domain `demo` for you to look at.

    \b
        busload demo
        busload demo --commands 100000
        busload demo --transport amqp://localhost
        busload demo --json | jq .drain.per_second
    """
    tell = _Teller(silent=as_json)
    with open_bus(transport=True) as bus:
        outcome = _run(bus, commands, tell)
    if as_json:
        echo_json(outcome)


@dataclass(frozen=True, slots=True)
class Pace:
    """How long something took, and how many commands that was per second."""

    commands: int
    seconds: float
    per_second: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the demo has to tell, for programs."""

    batch: BatchMetadata
    create: Pace
    drain: Pace
    resolved: dict[str, int]
    callback: CommandMetadata
    retried: UUID
    audit_trail: Sequence[AuditEvent]


def _run(bus: SyncCommandBus, commands: int, tell: _Teller) -> Outcome:
    bus.migrate()
    tell.title(f"{commands:,} invoices to pay, as one batch of commands")
    tell.step("Start", f"{PROCESSES} worker processes, each for {CONCURRENCY} commands at a time")
    with _workers(bus, "first_release", tell) as workers:
        batch_id, callback_id, create = _create(bus, commands, tell)
        tell.step("Run", "until only a person can go on")
        with tell.progress() as show:
            parked = _follow(bus, batch_id, workers, show, until=_only_a_person_can_go_on)
        drain = _drained(parked, bus.get_batch_audit_trail(DOMAIN, batch_id))
        tell.result(f"{drain.seconds:.1f} s, {drain.per_second:,} per second; every command waits 40 ms for its bank")
        waiting = _waiting(bus, batch_id)
        tell.queue(waiting)
    tell.step("Deploy", "the second release, which knows Malta and the bank's new address")
    with _workers(bus, "second_release", tell) as workers:
        resolved, retried = _resolve(bus, waiting, tell)
        with tell.progress() as show:
            _follow(bus, batch_id, workers, show, until=lambda batch: batch.status.final)
        callback = _wait_for(lambda: _ended(bus, callback_id), workers, "the callback")
    final = bus.get_batch(DOMAIN, batch_id)
    assert final is not None
    outcome = Outcome(final, create, drain, resolved, callback, retried, bus.get_audit_trail(DOMAIN, retried))
    tell.end(outcome)
    return outcome


def _create(bus: SyncCommandBus, commands: int, tell: _Teller) -> tuple[UUID, UUID, Pace]:
    prepared, callback_id = invoices(commands), new_id()
    on_complete = BatchCommand("ReportPayments", callback_id, {"to": "accounting"})
    began = time.monotonic()
    batch_id = bus.create_batch(DOMAIN, prepared, name=f"{commands:,} invoices", on_complete=on_complete)
    pace = _pace(commands, time.monotonic() - began)
    tell.step("Create", f"one batch of {commands:,} commands in one transaction")
    tell.result(f"{pace.seconds:.2f} s, {pace.per_second:,} per second")
    return batch_id, callback_id, pace


def _follow(
    bus: SyncCommandBus,
    batch_id: UUID,
    workers: _Workers,
    show: Show,
    *,
    until: Callable[[BatchMetadata], bool],
) -> BatchMetadata:
    """Show the batch until it is where we want it; fail if it stands still."""
    last: BatchMetadata | None = None
    changed = time.monotonic()
    while True:
        batch = bus.get_batch(DOMAIN, batch_id)
        assert batch is not None
        if batch != last:
            last, changed = batch, time.monotonic()
            show(batch)
        if until(batch):
            return batch
        workers.check()
        if time.monotonic() - changed > PATIENCE:
            raise workers.failure("no command has ended for a minute")
        time.sleep(0.05)


def _only_a_person_can_go_on(batch: BatchMetadata) -> bool:
    return batch.status.final or batch.finished_count + batch.in_troubleshooting_count == batch.total_count


def _drained(batch: BatchMetadata, trail: Sequence[AuditEvent]) -> Pace:
    """From the first claim to the last result, by the database's own clock."""
    at: dict[str, datetime] = {event.type: event.at for event in reversed(trail)}
    end = at.get("BATCH_STALLED") or at["BATCH_COMPLETED"]
    return _pace(batch.total_count, (end - at["BATCH_STARTED"]).total_seconds())


def _waiting(bus: SyncCommandBus, batch_id: UUID) -> list[TroubleshootingItem]:
    return [item for item in bus.troubleshooting.list(DOMAIN, limit=100_000) if item.batch_id == batch_id]


def _resolve(bus: SyncCommandBus, waiting: Sequence[TroubleshootingItem], tell: _Teller) -> tuple[dict[str, int], UUID]:
    """Do what an operator does, and return how often, and one command that was tried again."""
    for item in waiting:
        match _action(item):
            case "complete":
                result = {"paid": "by cheque"}
                bus.troubleshooting.complete(DOMAIN, item.command_id, result=result, operator=OPERATOR)
            case "cancel":
                bus.troubleshooting.cancel(DOMAIN, item.command_id, reason="paid already", operator=OPERATOR)
            case _:
                bus.troubleshooting.retry(DOMAIN, item.command_id, operator=OPERATOR)
    resolved = dict(Counter(map(_action, waiting)))
    tell.step("Resolve", ", ".join(f"{action} {resolved[action]}" for action in sorted(resolved, reverse=True)))
    retried = [item for item in waiting if _action(item) == "retry"]
    return resolved, max(retried, key=lambda item: item.attempts).command_id


def _action(item: TroubleshootingItem) -> str:
    return BY_HAND.get(item.last_error_code or "", "retry")


def _ended(bus: SyncCommandBus, command_id: UUID) -> CommandMetadata | None:
    found = bus.get_command(DOMAIN, command_id)
    return found if found is not None and found.status == CommandStatus.COMPLETED else None


def _pace(commands: int, seconds: float) -> Pace:
    return Pace(commands, round(seconds, 3), round(commands / max(seconds, 0.001)))


class _Workers:
    """A real `busload worker`, with processes of its own."""

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self._process, self._log = process, log

    def check(self) -> None:
        if self._process.poll() is not None:
            raise self.failure(f"the workers ended with {self._process.returncode}")

    def failure(self, what: str) -> click.ClickException:
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").strip().splitlines()
        return click.ClickException(
            f"The demo came to a halt: {what}. " + "\n".join(["The workers said:", *words[-8:]])
        )

    def stop(self) -> None:
        self._process.terminate()
        if self._process.wait(timeout=PATIENCE) != 0:
            raise self.failure(f"the workers ended with {self._process.returncode}")


@contextmanager
def _workers(bus: SyncCommandBus, release: str, tell: _Teller) -> Iterator[_Workers]:
    """Serve with a release of the application, from the moment its processes are ready until the block ends."""
    others, began = set(bus._read(report.living_workers(DOMAIN))), time.monotonic()
    command = [sys.executable, "-m", "busload.cli", "worker", f"busload.cli.demo_app:{release}"]
    options = {"processes": PROCESSES, "concurrency": CONCURRENCY, "grace": 5, "parent": os.getpid()}
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    environment = {**os.environ, "BUSLOAD_DATABASE_URL": bus.dsn}
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen([*command, *arguments], stdout=log, stderr=log, env=environment, process_group=0) as process,
    ):
        workers = _Workers(process, log)

        def ready() -> bool:
            return len(set(bus._read(report.living_workers(DOMAIN))) - others) == PROCESSES

        try:
            _wait_for(ready, workers, "the workers")
            tell.result(f"{PROCESSES} processes ready in {time.monotonic() - began:.1f} s")
            yield workers
        except BaseException:
            process.kill()
            raise
        workers.stop()


def _wait_for(look: Callable[[], T | None], workers: _Workers, what: str) -> T:
    deadline = time.monotonic() + PATIENCE
    while not (found := look()):
        workers.check()
        if time.monotonic() > deadline:
            raise workers.failure(f"{what} did not come within a minute")
        time.sleep(0.02)
    return found


class _Teller:
    """Tells the story to people; to programs it is silent."""

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent

    def title(self, text: str) -> None:
        self._print(("busload demo", "bold"), ("   " + text, ""))

    def step(self, verb: str, text: str) -> None:
        self._print(())
        begin, *others = self._lines(text)
        self._print((f"{verb:<{len(INDENT)}}", "bold cyan"), (begin, ""))
        for line in others:
            self._print((INDENT, ""), (line, ""))

    def result(self, text: str) -> None:
        for line in self._lines(text):
            self._print((INDENT, ""), (line, "green"))

    def _lines(self, text: str) -> list[str]:
        return wrapped(text, width() - len(INDENT)) if at_terminal() else [text]

    @contextmanager
    def progress(self) -> Iterator[Show]:
        if self._silent:
            yield lambda batch: None
        else:
            with progress(INDENT) as show:
                yield show

    def queue(self, waiting: Sequence[TroubleshootingItem]) -> None:
        """The newest of each cause: the whole queue would be pages of the same."""
        self.step(
            "Inspect",
            f"the troubleshooting queue, where {counted(len(waiting), 'command waits', 'commands wait')} for a person",
        )
        if self._silent:
            return
        shown = list({(item.reason, item.last_error_code): item for item in reversed(waiting)}.values())
        times = Counter((item.reason, item.last_error_code) for item in waiting)
        rows = [
            (
                item.command_id,
                item.reason,
                item.attempts,
                f"{item.last_error_code}: {item.last_error_message}",
                times[item.reason, item.last_error_code],
            )
            for item in shown
        ]
        table(("COMMAND", "REASON", "ATTEMPTS", "ERROR", "ALIKE"), rows, nothing="", elastic="ERROR")

    def end(self, outcome: Outcome) -> None:
        batch, callback = outcome.batch, outcome.callback
        counts = ", ".join(f"{name} {count:,}" for name, count in counters(batch).items())
        self.step("Complete", f"{batch.status}: {counts}")
        self.result(f"callback {callback.command_type} ran and returned {_brief(callback.result)}")
        self.step("Trace", f"what happened to {outcome.retried}, one of the retried commands")
        if self._silent:
            return
        print_trail(outcome.audit_trail)
        self.step("Next", "look further")
        called_by_path = Path(sys.argv[0]).name == "busload" and not shutil.which("busload")
        program = os.path.relpath(sys.argv[0]) if called_by_path else "busload"
        for line in (f"batch show {batch.batch_id}", f"command show {outcome.retried}", "batch ls"):
            self._print((INDENT, ""), (f"{program} {line}", "bold"))

    def _print(self, *parts: tuple[str, str] | tuple[()]) -> None:
        """Styled at a terminal, plain in a pipe."""
        if self._silent:
            return
        words = [part for part in parts if part]
        if not at_terminal():
            click.echo("".join(text for text, _ in words))
            return
        from rich.text import Text

        console().print(Text.assemble(*words))


def _brief(value: Any) -> str:
    return ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else str(value)
