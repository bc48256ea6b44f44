"""`busload` at a shell: a noun, then a verb.

Exit codes, for all commands alike:

| code | meaning |
|---|---|
| 0 | done |
| 1 | not found, refused, or the answer is no: a watched batch completed with failures, the schema is outdated |
| 2 | the command line or an input is wrong; nothing was done |
| 130 | interrupted by Ctrl-C |
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import click
import psycopg
from psycopg.conninfo import conninfo_to_dict

from busload.domain.payload import PayloadRefused
from busload.errors import BusloadError, DatabaseUnusable, InvalidCommandError

NOUNS = {
    "batch": "Follow batches, learn why they are not finished, and cancel them.",
    "buffer": "See what waits in buffers, let it leave, prepare tables to be one.",
    "command": "Look at one command and all that happened to it.",
    "db": "Look after the embedded PostgreSQL.",
    "demo": "Run 10,000 commands as one batch, and see what busload does.",
    "domain": "See what waits in domains, pause and resume them.",
    "job": "Follow jobs stage by stage, resume and cancel them.",
    "limit": "See and reset rate limits.",
    "outbox": "See what waits for a broker, try again, or go without it.",
    "prune": "Remove what ended long ago, or move it to the archive.",
    "schema": "Bring a database up to this release.",
    "trace": "Draw every attempt at a task, by its key.",
    "tracker": "Follow tasks that other queues run.",
    "troubleshooting": "Resolve what waits for a person.",
    "worker": "Run the commands of an application.",
}


class _Nouns(click.Group):
    """Imports a noun when it is asked for, and turns every error into one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(NOUNS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in NOUNS:
            return None
        command: click.Command = getattr(import_module(f"busload.cli.{name}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(NOUNS.items()))

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(130) from None
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if ctx.params.get("debug"):
                raise
            wrong_input = isinstance(error, InvalidCommandError | PayloadRefused)
            raise (_WrongInput if wrong_input else click.ClickException)(_explain(error)) from error


class _WrongInput(click.ClickException):
    exit_code = 2


@click.group(cls=_Nouns, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--dsn", metavar="URL", help="The PostgreSQL to use; default BUSLOAD_DATABASE_URL, else an embedded one.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(package_name="busload", prog_name="busload")
@click.pass_context
def main(ctx: click.Context, dsn: str | None, debug: bool) -> None:
    """A batch-native command bus for PostgreSQL.

    \b
        busload demo
        busload batch ls
        busload worker app:bus --domains payments --processes 2

    Exit codes: 0 done; 1 not found, refused, or a watched batch completed with failures; 2 wrong input.
    """
    if dsn is not None:
        ctx.with_resource(_database_url(dsn))


@contextmanager
def _database_url(dsn: str) -> Iterator[None]:
    """Pass it on where every bus looks for it: in this process and, out of sight of other users, in its children."""
    try:
        parts = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        # The reason is not shown: it quotes the text, and that may hold a password.
        raise click.BadParameter("wanted e.g. postgresql://user@host:5432/database", param_hint="--dsn") from None
    if parts.get("password"):
        click.echo(
            "Warning: --dsn holds a password, which every user of this machine can see. "
            "Use BUSLOAD_DATABASE_URL or a ~/.pgpass file instead.",
            err=True,
        )
    before = os.environ.get("BUSLOAD_DATABASE_URL")
    os.environ["BUSLOAD_DATABASE_URL"] = dsn
    try:
        yield
    finally:
        if before is None:
            del os.environ["BUSLOAD_DATABASE_URL"]
        else:
            os.environ["BUSLOAD_DATABASE_URL"] = before


def _explain(error: Exception) -> str:
    if isinstance(error, DatabaseUnusable):
        return str(error)  # may end with the server's last words, which are lines
    line = " ".join(str(error).split())
    if isinstance(error, BusloadError | PayloadRefused):
        return line
    if isinstance(error, psycopg.OperationalError):
        return f"The database cannot be reached: {line}"
    return f"{type(error).__name__}: {line} (--debug shows where)"
