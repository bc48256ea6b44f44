"""`busload schema`: the tables of a database, and those this release needs."""

from __future__ import annotations

import click
import psycopg

from busload.cli import noun, options
from busload.cli.answer import Answer, answers, open_bus, would
from busload.cli.output import echo_json
from busload.cli.text_table import View
from busload.errors import DatabaseUnusableError
from busload.postgres import grants as rights
from busload.postgres.plan import Plan, Script
from busload.postgres.schema import migrate as migrations
from busload.postgres.schema import sql
from busload.sync.bus import SyncCommandBus
from busload.sync.plan import perform

MIGRATIONS = View[migrations.Migration](
    "VERSION NAME APPLIED",
    {"VERSION": lambda m: f"{m.version:04}", "APPLIED": lambda m: m.applied_at or "missing"},
    nothing="This release has no schema.",
)


schema = noun("schema", "migrate", "print > busload.sql")


@schema.command()
@options.dry_run
@answers
def migrate(bus: SyncCommandBus, dry_run: bool) -> Answer:
    """Apply what is missing; safe to repeat, and to run from several machines at once.

    busload schema migrate --dry-run
    busload --dsn postgresql://app@db.example/shop schema migrate
    """
    if dry_run:
        missing = [m for m in _status(bus) if m.applied_at is None]
        files = ", ".join(f"{m.version:04}_{m.name}" for m in missing) or "nothing"
        return would(f"apply {files}", applied=[{"version": m.version, "name": m.name} for m in missing])
    applied = bus.migrate()
    said = [f"Applied {m.version:04}_{m.name}." for m in applied] or ["Nothing to do: the database is up to date."]
    value = [{"version": m.version, "name": m.name} for m in applied]
    return Answer(value, lambda: click.echo("\n".join(said)))


@schema.command()
@answers
def status(bus: SyncCommandBus) -> Answer:
    """Show what a database has. Ends with exit code 1 if it is older than this release.

    busload schema status || busload schema migrate
    busload schema status --json | jq '.[] | select(.applied_at == null)'
    """
    found = _status(bus)
    value = [{"version": m.version, "name": m.name, "applied_at": m.applied_at} for m in found]
    return MIGRATIONS.list(found, value=value, ok=all(m.applied_at is not None for m in found))


def _status(bus: SyncCommandBus) -> list[migrations.Migration]:
    found = list[migrations.Migration]()
    for shard in bus.shards:
        with shard.pool.connection() as conn:
            found += perform(conn, migrations.status())
    return found


@schema.command("print")
@click.option("--since", type=int, default=0, metavar="VERSION", help="Leave out what a database of that version has.")
@options.as_json
def print_(since: int, as_json: bool) -> None:
    """Print the schema as one SQL statement, to apply it by other means; needs no database.

    It applies what is missing, all or nothing, and may be repeated. From Python: busload.schema.sql().

        busload schema print | psql postgresql://app@db.example/shop
        busload schema print --json | jq -r '.[].name'
    """
    try:
        text = sql(since)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--since") from None
    if as_json:
        files = [m for m in migrations.MIGRATIONS if m.version > since]
        echo_json([{"version": m.version, "name": m.name, "sql": m.sql} for m in files])
    else:
        click.echo(text, nl=False)


@schema.command()
@click.option("--prefix", default=rights.PREFIX, show_default=True, help="What the names of the roles begin with.")
@click.option("--sender", metavar="NAME", help="Another name for this role; so for the others.")
@click.option("--worker", metavar="NAME")
@click.option("--operator", metavar="NAME")
@click.option("--reader", metavar="NAME")
@click.option("--apply", "applies", is_flag=True, help="Run the statement in the database, as the owner of the schema.")
@options.as_json
def grants(prefix: str, applies: bool, as_json: bool, **names: str | None) -> None:
    """Print the roles sender, worker, operator and reader as one SQL statement, each with its rights; or apply it.

    Repeat it after each migration: it adds what is new and revokes what is too much. Then give the roles to logins:
    GRANT busload_sender TO app. From Python: busload.schema.grants().

        busload schema grants | psql postgresql://owner@db.example/shop
        busload schema grants --apply
        busload schema grants --prefix shop_ --worker shop_jobs
    """
    given = {role: name for role, name in names.items() if name is not None}
    try:
        text = rights.sql(prefix, given)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if applies:
        with open_bus() as bus:
            for shard in bus.shards:
                with shard.pool.connection() as conn:
                    perform(conn, _granting(text))
    if as_json:
        echo_json({"roles": rights.role_names(prefix, given), "sql": text})
    elif applies:
        click.echo(f"Granted {', '.join(rights.role_names(prefix, given).values())} what they need, and no more.")
    else:
        click.echo(text, nl=False)


def _granting(text: str) -> Plan[None]:
    try:
        yield Script(text.encode())
    except psycopg.errors.RaiseException as error:
        raise DatabaseUnusableError(f"{error.diag.message_primary} {error.diag.message_hint}") from error
    except psycopg.errors.InsufficientPrivilege as error:
        raise DatabaseUnusableError(
            f"This role may not make or grant the roles: {error.diag.message_primary}. Run "
            "`busload schema grants` as the owner of the schema busload, who needs CREATEROLE to make roles."
        ) from error
