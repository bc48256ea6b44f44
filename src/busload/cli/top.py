"""`busload top`: the whole bus at a terminal, live, with keys for what an operator does most."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import click
from rich.console import Console, Group
from rich.live import Live

from busload.batches.batch import BatchMetadata
from busload.cli import Seconds, options
from busload.cli.answer import open_bus
from busload.cli.keyboard import Keyboard, keyboard
from busload.cli.output import at_terminal, console, echo_json, shown
from busload.cli.top_frame import Cause, Frame, Looks, Reader
from busload.cli.top_screen import HELP, View, draw, rows_of, whole
from busload.commands.wording import counted
from busload.limits.pause import DomainOverview
from busload.sync.bus import SyncCommandBus

CONNECTION, RESPONSE = timedelta(seconds=2), timedelta(seconds=5)
"""How long to wait for a connection, and for an answer."""
FAREWELL = 1.0
"""Seconds in which what is under way at the database may end when a person quits."""


@click.command()
@click.option("--once", is_flag=True, help="Print what it shows once, and end.")
@options.as_json
@click.option("--interval", type=Seconds(0.1), default=1.0, metavar="SECONDS", help="Between two looks.")
@options.operator
def top(once: bool, as_json: bool, interval: float, operator: str) -> None:
    """Watch rates, domains, batches, causes and workers live at a terminal.

    Keys: tab and arrows choose, p pauses or resumes the chosen domain, r retries the chosen cause after a question, e
    explains the chosen batch, ? shows all keys, q quits. --once and --json need no terminal. They look twice, one
    interval apart, because rates need two looks.

        busload top
        busload top --once
        busload top --json | jq '.batches[] | {name, done: .forecast.done_at}'
    """
    if not (once or as_json):
        _refuse_without_terminal()
    with open_bus(pool_size=2, pool_timeout=CONNECTION, response_timeout=RESPONSE) as bus:
        if once or as_json:
            _print(_two_looks(bus, interval), as_json)
        else:
            Top(bus, operator).run(interval)


def _refuse_without_terminal() -> None:
    if not (sys.stdin.isatty() and at_terminal()) or console().is_dumb_terminal:
        raise click.UsageError(
            "This needs a terminal with a keyboard. `busload top --once` prints one frame anywhere, and `busload top "
            "--json` one for programs."
        )


def _two_looks(bus: SyncCommandBus, interval: float) -> Frame:
    looks = Looks(bus)
    looks.look()
    time.sleep(max(interval, 1.0))  # PostgreSQL's counts are up to a second late
    return looks.look()


def _print(frame: Frame, as_json: bool) -> None:
    if as_json:
        echo_json(frame.as_json())
        return
    out = console()
    for line in whole(frame):
        if at_terminal():
            out.print(line, no_wrap=True, overflow="ellipsis", crop=True)
        else:
            click.echo(line.plain.rstrip())


@dataclass(frozen=True, slots=True)
class Question:
    """Something that is done only if a person says yes."""

    text: str
    work: Callable[[], str]


class Top:
    """A person at a terminal: keys become choices, questions and actions."""

    def __init__(self, bus: SyncCommandBus, operator: str) -> None:
        self._bus, self._operator, self._view = bus, operator, View()
        self._question: Question | None = None
        self._reader: Reader
        self._keys: Keyboard

    def run(self, interval: float) -> None:
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal without these characters
        screen = console()
        with ExitStack() as stack:
            self._keys = stack.enter_context(keyboard())
            self._reader = Reader(self._bus, interval, self._keys.wake)
            self._reader.start()
            stack.callback(self._reader.stop, FAREWELL)
            live = Live(console=screen, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            stack.enter_context(live)
            while True:
                live.update(self._drawn(screen), refresh=True)
                for key in self._keys.wait(None):
                    if key == "q" and self._question is None:
                        return
                    self._press(key)

    def _drawn(self, screen: Console) -> Group:
        size, reader = screen.size, self._reader
        return Group(*draw(reader.frame, self._view, size.width, size.height, reader.trouble))

    def _press(self, key: str) -> None:
        view, frame = self._view, self._reader.frame
        if self._question is not None:
            self._answer(key)
        elif view.sheet is not None:
            view.sheet = None
        elif key == "?":
            view.sheet = "Keys", HELP
        elif key == "space":
            self._do(lambda: "")
        elif frame is None:
            return
        elif key in ("tab", "right", "back-tab", "left"):
            view.said = ""
            view.turn(1 if key in ("tab", "right") else -1)
        elif key in ("up", "k", "down", "j"):
            view.said = ""
            view.move(frame, 1 if key in ("down", "j") else -1)
        elif key in ACTS:
            section, act = ACTS[key]
            at = view.choose(frame, section)
            if at is None:
                view.said = f"There is nothing to choose in {section}."
            elif section not in view.visible:
                view.said = f"There is no room for {section}: press tab until they are shown."
            else:
                act(self, rows_of(frame, section)[at])

    def _answer(self, key: str) -> None:
        assert self._question is not None
        question, self._question, self._view.question = self._question, None, None
        if key in ("y", "Y"):
            self._do(question.work)
        else:
            self._view.said = "Nothing was done."

    def _do(self, work: Callable[[], str]) -> None:
        self._view.said = "At it …"
        self._reader.ask(work, self._say)

    def _say(self, said: str) -> None:
        self._view.said = said
        self._keys.wake()

    def _pause(self, domain: DomainOverview) -> None:
        """Pause or resume, as the person saw the domain: a domain that somebody else has paused stays paused."""
        name, seen = domain.domain, domain.pause

        def pause() -> str:
            if self._bus.domains.pause(name, reason="busload top", operator=self._operator):
                return f"Paused {name}: nothing new starts there. p resumes it."
            return f"{name} was paused already."

        def resume() -> str:
            resumed = self._bus.domains.resume(name, operator=self._operator)
            return f"Resumed {name}." if resumed else f"{name} was not paused any more."

        self._do(pause if seen is None else resume)

    def _retry(self, cause: Cause) -> None:
        """Ask, with the number that would be retried now. If more wait when the answer comes, ask again."""
        domain, fingerprint = cause.domain, cause.group.fingerprint
        nothing = f"Nothing waits for {fingerprint} in {domain} any more."

        def ask(seen: int | None = None) -> str:
            count = self._bus.troubleshooting.retry_group(domain, fingerprint, dry_run=True).count
            if count == 0:
                return nothing
            if seen is not None and count <= seen:
                return retry()
            more = "" if seen is None else "More wait now. "
            text = f"{more}Retry {counted(count, 'command')} in {domain} ({fingerprint})? y/n"
            self._question = Question(text, partial(ask, count))
            self._view.question = text
            return ""

        def retry() -> str:
            action = self._bus.troubleshooting.retry_group(domain, fingerprint, operator=self._operator)
            if action.count == 0:
                return nothing
            return f"Batch {action.batch_id} retries {counted(action.count, 'command')} in {domain}."

        self._do(ask)

    def _explain(self, batch: BatchMetadata) -> None:
        domain, batch_id = batch.domain, batch.batch_id

        def explain() -> str:
            found = self._bus.explain_batch(domain, batch_id)
            lines = [found.summary, ""]
            for reason in found.reasons:
                since = "" if reason.since is None else f" Since {shown(reason.since)}."
                lines += [f"- {reason.message}{since}", f"  {reason.advice}"]
            if found.forecast is not None:
                lines += found.forecast.changes
            self._view.sheet = f"Batch {batch_id}", [*lines, "", f"busload batch explain {batch_id}"]
            return ""

        self._do(explain)


ACTS: dict[str, tuple[str, Callable[..., None]]] = {
    "p": ("domains", Top._pause),
    "r": ("causes", Top._retry),
    "e": ("batches", Top._explain),
}
"""What a key does with the chosen row of a section."""
