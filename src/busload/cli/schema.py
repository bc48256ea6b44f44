"""`busload schema`: the tables of a database, and those this release needs."""

from __future__ import annotations

import click

from busload.cli.database import open_bus
from busload.cli.output import as_json, echo_json, table
from busload.schema import sql
from busload.store.plan import perform
from busload.store.schema import migrate as migrations


@click.group()
def schema() -> None:
    """Bring a database up to this release.

    \b
        busload schema migrate
        busload schema print > busload.sql
    """


@schema.command()
@as_json
def migrate(as_json: bool) -> None:
    """Apply what is missing; safe to repeat, and to run from several machines at once.

    \b
        busload schema migrate
        busload --dsn postgresql://app@db.example/shop schema migrate
    """
    with open_bus() as bus:
        applied = bus.migrate()
    if as_json:
        echo_json([{"version": m.version, "name": m.name} for m in applied])
        return
    for m in applied:
        click.echo(f"Applied {m.version:04}_{m.name}.")
    if not applied:
        click.echo("Nothing to do: the database is up to date.")


@schema.command()
@as_json
def status(as_json: bool) -> None:
    """Show what a database has. Ends with exit code 1 if it is older than this release.

    \b
        busload schema status || busload schema migrate
        busload schema status --json | jq '.[] | select(.applied_at == null)'
    """
    with open_bus() as bus, bus.pool.connection() as conn:
        found = perform(conn, migrations.status())
    if as_json:
        echo_json([{"version": m.version, "name": m.name, "applied_at": m.applied_at} for m in found])
    else:
        rows = [(f"{m.version:04}", m.name, m.applied_at or "missing") for m in found]
        table(("VERSION", "NAME", "APPLIED"), rows, nothing="This release has no schema.")
    if any(m.applied_at is None for m in found):
        raise click.exceptions.Exit(1)


@schema.command("print")
@click.option("--since", type=int, default=0, metavar="VERSION", help="Leave out what a database of that version has.")
@as_json
def print_(since: int, as_json: bool) -> None:
    """Print the schema as one SQL statement, for whoever applies it by other means; needs no database.

    It applies what is missing, all or nothing, and may be repeated. From Python: busload.schema.sql().

    \b
        busload schema print | psql postgresql://app@db.example/shop
        busload schema print --json | jq -r '.[].name'
    """
    try:
        text = sql(since)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--since") from None
    if as_json:
        files = [m for m in migrations.migrations() if m.version > since]
        echo_json([{"version": m.version, "name": m.name, "sql": m.sql} for m in files])
    else:
        click.echo(text, nl=False)
