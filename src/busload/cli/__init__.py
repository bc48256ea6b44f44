"""`busload` at a shell: a noun, then a verb. Here are the nouns, the options of all commands, and the exit codes."""

from __future__ import annotations

import gc
import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from inspect import cleandoc
from textwrap import dedent, indent
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

NOUNS = {
    "audit": "See what operators did, when and why.",
    "batch": "Follow batches, learn why they are not finished, hold and cancel them.",
    "buffer": "See what waits in buffers, let it leave, and prepare tables to be buffers.",
    "command": "Find commands, see all that happened to them, wait for and cancel them.",
    "completion": "Print the script that lets a shell complete what you type.",
    "dashboard": "Serve the dashboard to a browser, and make its users.",
    "db": "Look after the embedded PostgreSQL.",
    "demo": "Run 10,000 commands as one batch, and see what busload does.",
    "doctor": "Look for faults, and say what to do about each.",
    "domain": "See what waits in domains, pause and resume them.",
    "health": "Say whether the database, the workers and the broker are well.",
    "import": "Take over tasks that wait in another queue.",
    "job": "Follow jobs stage by stage, resume and cancel them.",
    "limit": "See rate limits and concurrency limits, and reset rate limits.",
    "metrics": "Print the metrics of the whole database, as Prometheus reads them.",
    "outbox": "See what waits for a broker, try again, or go without it.",
    "prune": "Remove what ended long ago, or move it to the archive.",
    "schedule": "See schedules and what they fired, pause, resume and trigger them.",
    "schema": "Bring a database up to this release.",
    "send": "Send a command.",
    "top": "Watch rates, domains, batches, causes and workers live at a terminal.",
    "trace": "Draw every attempt at a task, by its key.",
    "tracker": "Follow tasks that other queues run.",
    "troubleshooting": "Resolve what waits for a person.",
    "worker": "Run the commands of an application.",
}

NO_BUS = ("worker", "db", "demo", "completion")
"""Nouns that ask no bus, or name it otherwise."""

MODULES = {"import": "import_tasks"}
"""Nouns whose name no module can have."""

BUS, WAIT, DEBUG = "busload.bus", "busload.wait", "busload.debug"
"""Where the context keeps what was given for the options that every command takes."""

TYPES = "busload.types"
"""Where it keeps the data types of the bus that the caller has, such as that of a Django project."""


class _Nouns(click.Group):
    """Imports a noun when it is asked for, and turns every error into one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(NOUNS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in NOUNS:
            return None
        module = MODULES.get(name, name)
        command: click.Command = getattr(_imported(f"busload.cli.{module}"), module)
        for one in (command, *getattr(command, "verbs", {}).values()):
            _prepare(one, bus=one.name not in NO_BUS)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in NOUNS and not args[0].startswith("-"):
            ctx.fail(
                f"No such command {args[0]!r:.80}.{did_you_mean(args[0], NOUNS) or self._nouns_with(ctx, args[0])}"
            )
        return super().resolve_command(ctx, args)

    def _nouns_with(self, ctx: click.Context, verb: str) -> str:
        """The end of a message about a verb without its noun: `busload explain`."""
        found = {noun: getattr(command, "commands", {}) for noun in NOUNS if (command := self.get_command(ctx, noun))}
        nouns = [noun for noun, verbs in found.items() if verb in verbs]
        return f" Did you mean {' or '.join(repr(f'{noun} {verb}') for noun in nouns[:3])}?" if nouns else ""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(NOUNS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        # Without this, every noun would be imported for its help whenever Tab is pressed.
        nouns = [CompletionItem(noun, help=help) for noun, help in NOUNS.items() if noun.startswith(incomplete)]
        return nouns + click.Command.shell_complete(self, ctx, incomplete)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(130) from None
        except click.UsageError as error:
            if not (meant := _as_option(error)):
                raise
            raise click.UsageError(error.message + meant, error.ctx) from None
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if ctx.meta.get(DEBUG):
                raise
            raise _wrong_environment(ctx, error) or _explained(error) from error


def _imported(module: str) -> ModuleType:
    """Import a noun, whose objects stay until the end: the search for garbage would only take time to find that."""
    if (known := sys.modules.get(module)) is not None:
        return known
    searching = gc.isenabled()
    gc.disable()
    try:
        return import_module(module)
    finally:
        gc.freeze()
        if searching:
            gc.enable()


class WrongInputError(click.ClickException):
    """What was given at the shell cannot be; nothing was done."""

    exit_code = 2


@click.group(
    cls=_Nouns,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True},
)
@click.version_option(package_name="busload", prog_name="busload")
def main() -> None:
    """A batch-native command bus for PostgreSQL.

        busload demo
        busload batch ls
        busload worker app:bus --domains payments --processes 2

    Exit codes: 0 done; 1 not found, refused, or a watched batch completed with failures; 2 wrong input;
    130 interrupted.
    """


def noun(name: str, *examples: str, more: str = "") -> click.Group:
    """The group of a noun's verbs. Its help says what the overview says of it, and `more`, and has lines to copy."""
    summary = NOUNS[name].removesuffix(".") + (more or ".")
    lines = "\n".join(f"    busload {name} {example}" for example in examples)
    return click.Group(name, help=f"{summary}\n\n{lines}")


def _as_option(error: click.UsageError) -> str:
    """The end of a message about a domain that was given as an argument, where it is an option: `command ls shop`."""
    extra = re.match(r"Got unexpected extra arguments? \((\S+)", error.message)
    options = {name for param in error.ctx.command.params for name in param.opts} if error.ctx else set()
    return f". Did you mean --domain {extra[1].rstrip(')')}?" if extra and "--domain" in options else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about a name that is not known: the known one that looks most like it, if one does."""
    from difflib import get_close_matches

    likely = get_close_matches(name, list(known), n=1)
    return f" Did you mean {likely[0]!r}?" if likely else ""


class Seconds(click.FloatRange):
    """A type of options: a number of seconds within a day."""

    def __init__(self, least: float = 0) -> None:
        super().__init__(least, 86_400)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds: float = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail("found nan, wanted a number of seconds", param, ctx)
        return seconds


def sets_variable(
    variable: str, check: Callable[[str], str | None]
) -> Callable[[click.Context, click.Parameter, str | None], None]:
    """The callback of an option that sets a variable of the environment, where every bus looks for it.

    This process and its children find the text there, and other users cannot see it. `check` refuses a wrong text, and
    returns what to use instead if the text holds a password. The context remembers that the option was given.
    """

    def pass_on(ctx: click.Context, param: click.Parameter, text: str | None) -> None:
        if text is None:
            return
        if ctx.resilient_parsing:  # Tab was pressed: only what completes ids has to know it
            ctx.meta[variable] = text
            return
        from busload.errors import BusloadError

        option = param.opts[0]
        try:
            rather = check(text)
        except BusloadError as error:  # which does not repeat the text: it may hold a password
            raise click.BadParameter(str(error), param_hint=option) from None
        if rather:
            warning = f"{option} holds a password, which every user of this machine can see."
            click.echo(f"Warning: {warning} Use {rather} instead.", err=True)
        ctx.meta[variable] = text
        ctx.call_on_close(partial(_set_variable, variable, os.environ.get(variable)))
        _set_variable(variable, text)

    return pass_on


def _set_variable(variable: str, text: str | None) -> None:
    if text is None:
        del os.environ[variable]
    else:
        os.environ[variable] = text


def check_dsn(dsn: str) -> str | None:
    from busload.postgres.dsn import read

    return "BUSLOAD_DATABASE_URL or a ~/.pgpass file" if read(dsn).get("password") else None


def check_transport(url: str) -> str | None:
    from urllib.parse import urlsplit

    from busload.transports import find_transport

    find_transport(url)
    return "BUSLOAD_TRANSPORT_URL" if urlsplit(url).password else None


def _keep(ctx: click.Context, param: click.Parameter, value: object) -> None:
    if value is not None and value is not False:
        ctx.meta[f"busload.{param.name}"] = value


def _prepare(command: click.Command, *, bus: bool = True) -> None:
    """Give a noun and its verbs lines to copy and the options of `busload`: people add --dsn at the end of a line."""
    common = (
        click.Option(
            ["--dsn"],
            metavar="URL",
            callback=sets_variable("BUSLOAD_DATABASE_URL", check_dsn),
            expose_value=False,
            help="The PostgreSQL to use; default BUSLOAD_DATABASE_URL, else an embedded one.",
        ),
        click.Option(
            ["--bus"],
            metavar="MODULE:BUS",
            callback=_keep,
            expose_value=False,
            help="The bus of an application, whose databases to use: one that is over several is shown as one.",
        ),
        click.Option(
            ["--wait"],
            type=Seconds(),
            metavar="SECONDS",
            callback=_keep,
            expose_value=False,
            help="How long to wait for a server that cannot be reached; default not at all.",
        ),
        click.Option(
            ["--debug"], is_flag=True, callback=_keep, expose_value=False, help="Show the traceback of an error."
        ),
    )
    command.help = _with_lines_to_copy(command.help or "")
    known = {name for param in command.params for name in param.opts}  # some verbs wait for something else
    known |= set() if bus else {"--bus"}
    command.params += [option for option in common if option.opts[0] not in known]
    if isinstance(command, click.Group):
        for verb in command.commands.values():
            _prepare(verb, bus=bus)


def _with_lines_to_copy(help: str) -> str:
    """Help whose paragraphs of `busload` lines are not wrapped: click leaves a paragraph after a backspace as it is."""
    paragraphs = cleandoc(help).split("\n\n")
    return "\n\n".join(
        "\b\n" + indent(dedent(each), "    ") if each.lstrip().startswith("busload ") else each for each in paragraphs
    )


def _wrong_environment(ctx: click.Context, error: Exception) -> click.ClickException | None:
    """A variable whose text cannot be is refused as the same text given for its option is."""
    from busload.errors import DatabaseUnusableError, TransportMisconfiguredError

    for kind, variable, check in (
        (DatabaseUnusableError, "BUSLOAD_DATABASE_URL", check_dsn),
        (TransportMisconfiguredError, "BUSLOAD_TRANSPORT_URL", check_transport),
    ):
        if isinstance(error, kind) and variable in os.environ:
            try:
                check(os.environ[variable])
            except kind as wrong:  # which does not repeat the text: it may hold a password
                return click.BadParameter(str(wrong), ctx, param_hint=variable)
    return None


def _explained(error: Exception) -> click.ClickException:
    """An error as one line for people, with the exit code that it means."""
    import psycopg

    from busload.commands.payload import PayloadRefusedError
    from busload.errors import BusloadError, DatabaseUnusableError, InvalidCommandError

    line = " ".join(str(error).split())
    if isinstance(error, InvalidCommandError | PayloadRefusedError):
        return WrongInputError(line)
    if isinstance(error, DatabaseUnusableError):
        return click.ClickException(str(error))  # may end with the server's last words, which are lines
    if isinstance(error, BusloadError):
        return click.ClickException(line)
    if isinstance(error, psycopg.OperationalError):
        return click.ClickException(f"The database cannot be reached: {line}")
    return click.ClickException(f"{type(error).__name__}: {line} (--debug shows where)")


_prepare(main)
