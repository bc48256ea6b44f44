"""`busload db`: the PostgreSQL that busload starts by itself when it is given none."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
from typing import Any

import click
import msgspec
from psycopg.conninfo import make_conninfo

from busload.errors import DatabaseUnusable
from busload.settings import Settings
from busload.store.dsn import read
from busload.store.embedded import EmbeddedPostgres


@click.group()
def db() -> None:
    """Look after the embedded PostgreSQL.

    \b
        busload db info
        busload db psql -c 'SELECT version()'
    """


@db.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def info(as_json: bool) -> None:
    """Show where the embedded PostgreSQL is, whether it runs, and who uses it.

    \b
        busload db info
        busload db info --json | jq -r .dsn
    """
    settings = Settings()
    try:
        found = _embedded().info
    except DatabaseUnusable as error:
        raise click.ClickException(str(error)) from error
    facts = {**dataclasses.asdict(found), "in_use": settings.database_url is None}
    if as_json:
        _echo_json(facts)
        return
    if not facts.pop("in_use"):
        click.echo("BUSLOAD_DATABASE_URL is set, or --dsn given, so busload does not use this server.")
    for name, value in facts.items():
        click.echo(f"{name:<11} {_for_people(value)}")


@db.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def stop(as_json: bool) -> None:
    """Stop the embedded PostgreSQL now, also while it is in use.

    Connections break, and it stays stopped until some process starts to use it anew. You need this rarely:
    it stops by itself when the last process that uses it has ended.

    \b
        busload db stop
        busload db stop --json | jq .stopped
    """
    try:
        stopped = _embedded().stop()
    except DatabaseUnusable as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        _echo_json({"stopped": stopped})
    else:
        click.echo("Stopped." if stopped else "It was not running.")


@db.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def psql(ctx: click.Context, arguments: tuple[str, ...]) -> None:
    """Open psql on the database that busload uses; ARGUMENTS are psql's own.

    \b
        busload db psql
        busload db psql -c 'SELECT count(*) FROM busload.command'
    """
    settings = Settings()
    try:
        if settings.database_url is not None:
            ctx.exit(_run_psql(settings.database_url, arguments, shutil.which("psql")))
        with _embedded() as server:
            found = server.info
            click.echo(found.notice, err=True)
            # The bundled psql first: an older one of the system describes a newer server wrongly.
            ctx.exit(_run_psql(found.dsn, arguments, shutil.which("psql", path=found.binaries)))
    except DatabaseUnusable as error:
        raise click.ClickException(str(error)) from error


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
    # Ctrl-C is psql's: it cancels a query there, and must not end us, who hold the lease.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        command = [program, "-d", make_conninfo("", **parts), *arguments]
        return subprocess.run(command, env={**os.environ, **password}, check=False).returncode
    finally:
        signal.signal(signal.SIGINT, before)


def _echo_json(facts: dict[str, Any]) -> None:
    click.echo(msgspec.json.encode(facts, enc_hook=str).decode())


def _for_people(value: object) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case None:
            return "-"
        case tuple():
            return ", ".join(str(pid) for pid in value) or "-"
        case _:
            return str(value)
