"""The schema: numbered files, forward only, and the SQL of them for people who apply it by other means.

op.execute(busload.schema.sql())  # a revision of Alembic; asyncpg, psycopg and psql take it too
op.execute(busload.schema.grants())  # afterwards: the roles sender, worker, operator and reader, each with its rights
"""

from __future__ import annotations

from collections.abc import Mapping

from busload.postgres import grants as rights
from busload.postgres.schema import migrate


def version() -> int:
    """Return the number of the schema that this release needs."""
    return migrate.MIGRATIONS[-1].version


def sql(since: int = 0) -> str:
    """Return one statement that applies what a database lacks, all or nothing, and records it as `migrate()` does.

    It joins the transaction it is run in, begins and ends none, and holds nothing that a driver takes for a parameter.
    Run again it does nothing. With `since` it is shorter: for a database that has that version already.
    """
    if type(since) is not int or not 0 <= since <= version():
        raise ValueError(f"since must be a version from 0 to {version()}, found {since!r:.80}.")
    return migrate.script(since)


def grants(prefix: str = rights.PREFIX, *, names: Mapping[str, str] | None = None) -> str:
    """Return one statement that makes the roles sender, worker, operator and reader, and gives each what it needs.

    A role is named by the prefix, as in busload_sender, or as `names` says: {"sender": "shop_web"}. Repeated after a
    migration, the statement adds the rights that are new and revokes those that are too much, all or nothing. Whoever
    runs it owns the schema and may make roles, or the roles are there already. It makes no login: GRANT busload_sender
    TO app.
    """
    return rights.sql(prefix, names)
