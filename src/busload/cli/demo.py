"""`busload demo`: 10,000 commands as one batch, with everything that happens to them in real life."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import IO, Any, TypeVar
from uuid import UUID

import click

from busload.batches.batch import BatchMetadata
from busload.cli import options
from busload.cli.answer import answers
from busload.cli.command import TRAIL
from busload.cli.dashboard import serving
from busload.cli.output import echo_json, echo_styled, width, wrapped
from busload.cli.progress_bar import counters, progress
from busload.cli.text_table import table
from busload.commands import search
from busload.commands.command import AuditEvent, BatchCommand, CommandMetadata, CommandStatus, TroubleshootingItem
from busload.commands.ids import new_id
from busload.commands.wording import counted
from busload.sync.bus import SyncCommandBus

DOMAIN, OPERATOR = "demo", "ada"
INDENT = " " * 10
PROCESSES, CONCURRENCY = 2, 200
PATIENCE = 60.0
"""Seconds without any progress after which the demo gives up."""

LIMIT = 1_000_000
"""The largest amount that the application pays."""

# What an invoice of 10,000 may have about it, and how many of them do; at least one of each.
ODDITIES: tuple[tuple[dict[str, Any], int], ...] = (
    ({"bank": "busy"}, 200),  # asks us to come back, and then pays
    ({"country": "MT"}, 12),  # the first release cannot check accounts in Malta
    ({"bank": "moved"}, 5),  # the first release calls it at its old address
    ({"payee": "closed"}, 5),  # somebody has to pay these in another way
    ({"copy": True}, 3),  # nobody should pay these
    ({"amount": 2_000_000}, 10),  # over the limit: refused, and that is that
)
BY_HAND = {"ACCOUNT_CLOSED": "complete", "DUPLICATE": "cancel"}
"""What the operator does about an error; everything else is tried again with the next release."""

T = TypeVar("T")


@click.command()
@click.option("--commands", type=click.IntRange(100, 1_000_000), default=10_000)
@click.option("--dashboard", "in_browser", is_flag=True, help="Serve the dashboard meanwhile, until Ctrl-C.")
@options.transport
@answers(transport=True, prints=True)
def demo(bus: SyncCommandBus, commands: int, in_browser: bool, *, as_json: bool) -> None:
    """Run 10,000 commands as one batch, and see what busload does.

    Two worker processes pay invoices: most are paid at once, some at the second attempt, and a few wait for a person
    until a new release and an operator have resolved them. It all stays in the domain `demo` for you to look at.

        busload demo
        busload demo --dashboard
        busload demo --commands 100000
        busload demo --transport amqp://localhost
        busload demo --json | jq .drain.per_second
    """
    if as_json and in_browser:
        raise click.UsageError("--json is for programs, and --dashboard for people: choose one of them.")
    if in_browser:
        _run_in_browser(bus, commands)
        return
    with redirect_stdout(StringIO()) if as_json else nullcontext():  # the story is for people
        outcome = _run(bus, commands)
    if as_json:
        echo_json(outcome)


def _run_in_browser(bus: SyncCommandBus, commands: int) -> None:
    """Play it all beside a dashboard, and leave that one open until somebody stops it."""
    bus.migrate()
    with serving(bus.dsn) as (address, dashboard):
        echo_styled(("Open ", ""), (address, "bold"))
        click.pause("and press any key to begin.")
        _run(bus, commands)
        click.echo()
        echo_styled((f"{'Browse':<{len(INDENT)}}", "bold cyan"), (f"{address}  (Ctrl-C stops the dashboard)", ""))
        dashboard.wait()


def _run(bus: SyncCommandBus, commands: int) -> dict[str, Any]:
    """Play it all, and return what there is to tell programs."""
    bus.migrate()
    echo_styled(("busload demo", "bold"), (f"   {commands:,} invoices to pay, as one batch of commands", ""))
    _tell("Start", f"{PROCESSES} worker processes, each for {CONCURRENCY} commands at a time")
    with _workers(bus, "first_release") as workers:
        prepared, callback_id = _invoices(commands), new_id()
        on_complete = BatchCommand("ReportPayments", callback_id, {"to": "accounting"})
        began = time.monotonic()
        batch_id = bus.create_batch(DOMAIN, prepared, name=f"{commands:,} invoices", on_complete=on_complete)
        create = _pace(commands, time.monotonic() - began)
        _tell("Create", f"one batch of {commands:,} commands in one transaction")
        _tell_result(f"{create['seconds']:.2f} s, {create['per_second']:,} per second")
        _tell("Run", "until only a person can go on")
        workers.follow(batch_id, until=_only_a_person_can_go_on)
        # From the first claim to the last result, by the database's own clock.
        at = {event.type: event.at for event in reversed(bus.get_batch_audit_trail(DOMAIN, batch_id))}
        ended = at.get("BATCH_STALLED") or at["BATCH_COMPLETED"]
        drain = _pace(commands, (ended - at["BATCH_STARTED"]).total_seconds())
        rate = f"{drain['seconds']:.1f} s, {drain['per_second']:,} per second"
        _tell_result(f"{rate}; every command waits 40 ms for its bank")
        waiting = [item for item in bus.troubleshooting.list(DOMAIN, limit=100_000) if item.batch_id == batch_id]
        _tell_queue(waiting)
    _tell("Deploy", "the second release, which knows Malta and the bank's new address")
    with _workers(bus, "second_release") as workers:
        resolved = Counter(_resolve(bus, item) for item in waiting)
        _tell("Resolve", ", ".join(f"{action} {resolved[action]}" for action in sorted(resolved, reverse=True)))
        batch = workers.follow(batch_id, until=lambda batch: batch.status.final)
        callback = workers.wait_for(lambda: _completed(bus, callback_id), "the callback")
    tried_again = [item for item in waiting if item.last_error_code not in BY_HAND]
    retried = max(tried_again, key=lambda item: item.attempts).command_id
    trail = bus.get_audit_trail(DOMAIN, retried)
    _tell_end(batch, callback, retried, trail)
    measured = {"create": create, "drain": drain, "resolved": resolved}
    return {"batch": batch, **measured, "callback": callback, "retried": retried, "audit_trail": trail}


def _invoices(count: int) -> list[BatchCommand]:
    """Invoices to pay; the odd ones lie scattered among them."""
    chance = random.Random(count)  # noqa: S311 - nothing is secret here
    data = [{"invoice": n, "amount": 1_000 + n % 9_000, "country": "FR", "bank": "north"} for n in range(1, count + 1)]
    wanted = [oddity for oddity, often in ODDITIES for _ in range(max(1, often * count // 10_000))]
    for position, oddity in zip(chance.sample(range(count), len(wanted)), wanted, strict=True):
        data[position] |= oddity
    return [BatchCommand("PayInvoice", data=one) for one in data]


def _pace(commands: int, seconds: float) -> dict[str, float]:
    """How long something took, and how many commands that was per second."""
    per_second = round(commands / max(seconds, 0.001))
    return {"commands": commands, "seconds": round(seconds, 3), "per_second": per_second}


def _only_a_person_can_go_on(batch: BatchMetadata) -> bool:
    return batch.status.final or batch.finished_count + batch.in_troubleshooting_count == batch.total_count


def _resolve(bus: SyncCommandBus, item: TroubleshootingItem) -> str:
    """Do what an operator does about a command, and return what that was."""
    action = BY_HAND.get(item.last_error_code or "", "retry")
    how: dict[str, Any] = {"complete": {"result": {"paid": "by cheque"}}, "cancel": {"reason": "paid already"}}
    getattr(bus.troubleshooting, action)(DOMAIN, item.command_id, operator=OPERATOR, **how.get(action, {}))
    return action


def _completed(bus: SyncCommandBus, command_id: UUID) -> CommandMetadata | None:
    found = bus.get_command(DOMAIN, command_id)
    return found if found is not None and found.status == CommandStatus.COMPLETED else None


class _Workers:
    """A real `busload worker` with processes of its own, and the patience to see what it does."""

    def __init__(self, bus: SyncCommandBus, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self._bus, self._process, self._log = bus, process, log

    def follow(self, batch_id: UUID, *, until: Callable[[BatchMetadata], bool]) -> BatchMetadata:
        """Show the batch until it is where we want it; fail if it stands still."""
        last: BatchMetadata | None = None

        def changed() -> BatchMetadata | None:
            batch = self._bus.get_batch(DOMAIN, batch_id)
            return batch if batch != last else None

        with progress(INDENT) as show:
            while last is None or not until(last):
                last = self.wait_for(changed, "a change of the batch")
                show(last)
        return last

    def wait_for(self, look: Callable[[], T | None], what: str) -> T:
        deadline = time.monotonic() + PATIENCE
        while not (found := look()):
            if self._process.poll() is not None:
                raise self._failure(f"the workers ended with {self._process.returncode}")
            if time.monotonic() > deadline:
                raise self._failure(f"{what} did not come within a minute")
            time.sleep(0.02)
        return found

    def stop(self) -> None:
        self._process.terminate()
        if code := self._process.wait(timeout=PATIENCE):
            raise self._failure(f"the workers ended with {code}")

    def _failure(self, what: str) -> click.ClickException:
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").strip().splitlines()
        said = "\n".join(["The workers said:", *words[-8:]])
        return click.ClickException(f"The demo came to a halt: {what}. {said}")


@contextmanager
def _workers(bus: SyncCommandBus, release: str) -> Iterator[_Workers]:
    """Serve with a release of the application, from the moment its processes are ready until the block ends."""
    others, began = set(bus.database.read(search.living_workers(DOMAIN))), time.monotonic()
    command = [sys.executable, "-m", "busload.cli", "worker", f"busload.cli.demo_app:{release}"]
    given = {"processes": PROCESSES, "concurrency": CONCURRENCY, "grace": 5, "parent": os.getpid()}
    command += [word for name, value in given.items() for word in (f"--{name}", str(value))]
    environment = {**os.environ, "BUSLOAD_DATABASE_URL": bus.dsn}
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=environment, process_group=0) as process,
    ):
        workers = _Workers(bus, process, log)

        def ready() -> bool:
            return len(set(bus.database.read(search.living_workers(DOMAIN))) - others) == PROCESSES

        try:
            workers.wait_for(ready, "the workers")
            _tell_result(f"{PROCESSES} processes ready in {time.monotonic() - began:.1f} s")
            yield workers
        except BaseException:
            process.kill()
            raise
        workers.stop()


def _tell(step: str, text: str) -> None:
    """A step of the story, after an empty line."""
    click.echo()
    begin, *others = wrapped(text, width() - len(INDENT))
    echo_styled((f"{step:<{len(INDENT)}}", "bold cyan"), (begin, ""))
    for line in others:
        click.echo(INDENT + line)


def _tell_result(text: str) -> None:
    for line in wrapped(text, width() - len(INDENT)):
        echo_styled((INDENT, ""), (line, "green"))


def _tell_queue(waiting: Sequence[TroubleshootingItem]) -> None:
    """The newest of each cause: the whole queue would be pages of the same."""
    wait = counted(len(waiting), "command waits", "commands wait")
    _tell("Inspect", f"the troubleshooting queue, where {wait} for a person")
    alike = Counter((item.reason, item.last_error_code) for item in waiting)
    newest = {(item.reason, item.last_error_code): item for item in reversed(waiting)}
    rows = [
        (one.command_id, one.reason, one.attempts, f"{one.last_error_code}: {one.last_error_message}", alike[cause])
        for cause, one in newest.items()
    ]
    table(("COMMAND", "REASON", "ATTEMPTS", "ERROR", "ALIKE"), rows, nothing="", elastic="ERROR")


def _tell_end(batch: BatchMetadata, callback: CommandMetadata, retried: UUID, trail: Sequence[AuditEvent]) -> None:
    counts = ", ".join(f"{name} {count:,}" for name, count in counters(batch).items())
    _tell("Complete", f"{batch.status}: {counts}")
    returned = ", ".join(f"{key} {item}" for key, item in (callback.result or {}).items())
    _tell_result(f"callback {callback.command_type} ran and returned {returned}")
    _tell("Trace", f"what happened to {retried}, one of the retried commands")
    TRAIL.print_table(trail)
    _tell("Next", "look further")
    called_by_path = Path(sys.argv[0]).name == "busload" and not shutil.which("busload")
    program = os.path.relpath(sys.argv[0]) if called_by_path else "busload"
    for line in (f"batch show {batch.batch_id}", f"command show {retried}", "batch ls", "dashboard"):
        echo_styled((INDENT, ""), (f"{program} {line}", "bold"))
