"""`busload db`: the PostgreSQL that busload starts by itself when it is given none."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from dataclasses import asdict

import click
from psycopg.conninfo import make_conninfo

from busload.cli import noun, options
from busload.cli.answer import Answer
from busload.cli.output import aligned, shown
from busload.postgres.dsn import read
from busload.postgres.embedded.server import EmbeddedPostgres
from busload.settings import Settings

db = noun("db", "info", "psql -c 'SELECT version()'")


@db.command()
@options.as_json
def info(as_json: bool) -> None:
    """Show where the embedded PostgreSQL is, whether it runs, and who uses it.

    busload db info
    busload db info --json | jq -r .dsn
    """
    found, in_use = asdict(_embedded().info), Settings().database_url is None

    def show() -> None:
        if not in_use:
            click.echo("BUSLOAD_DATABASE_URL is set, or --dsn given, so busload does not use this server.")
        for line in aligned([[name, _listed(value)] for name, value in found.items()]):
            click.echo(line)

    Answer({**found, "in_use": in_use}, show).print(as_json)


@db.command()
@options.as_json
def stop(as_json: bool) -> None:
    """Stop the embedded PostgreSQL now, also while it is in use.

    Connections break, and it stays stopped until some process starts to use it anew. You need this rarely:
    it stops by itself when the last process that uses it has ended.

        busload db stop
        busload db stop --json | jq .stopped
    """
    stopped = _embedded().stop()
    Answer({"stopped": stopped}, "Stopped." if stopped else "It was not running.").print(as_json)


@db.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def psql(ctx: click.Context, arguments: tuple[str, ...]) -> None:
    """Open psql on the database that busload uses; ARGUMENTS are psql's own.

    busload db psql
    busload db psql -c 'SELECT count(*) FROM busload.command'
    """
    url = Settings().database_url
    if url is not None:
        ctx.exit(_run_psql(url, arguments, None))
    with _embedded() as server:
        found = server.info
        click.echo(found.notice, err=True)
        # The bundled psql first: an older one of the system describes a newer server wrongly.
        ctx.exit(_run_psql(found.dsn, arguments, shutil.which("psql", path=found.binaries)))


def _embedded() -> EmbeddedPostgres:
    settings = Settings()
    return EmbeddedPostgres(settings.home, pg_bin=settings.pg_bin)


def _run_psql(dsn: str, arguments: tuple[str, ...], program: str | None) -> int:
    program = program or shutil.which("psql")
    if program is None:
        raise click.ClickException("There is no psql on the PATH. Install the client of PostgreSQL.")
    # The password goes by the environment: arguments can be read by every user of the machine.
    parts = read(dsn)
    password = {"PGPASSWORD": str(parts.pop("password"))} if "password" in parts else {}
    # Ctrl-C is for psql, where it cancels a query. It must not end this process, which holds the lease.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        command = [program, "-d", make_conninfo("", **parts), *arguments]
        return subprocess.run(command, env={**os.environ, **password}, check=False).returncode
    finally:
        signal.signal(signal.SIGINT, before)


def _listed(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or shown(None)
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else shown(value)
