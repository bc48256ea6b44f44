"""The schema as SQL, for whoever applies it by means of his own: a revision of Alembic, asyncpg, psql.

op.execute(busload.schema.sql())
"""

from __future__ import annotations

from busload.store.schema import migrate


def version() -> int:
    """The schema that this release needs."""
    return migrate.migrations()[-1].version


def sql(since: int = 0) -> str:
    """One statement that applies what a database lacks, all or nothing, and records it as `migrate()` does.

    It joins the transaction it is run in, begins and ends none, and holds nothing that a driver takes for a parameter.
    Run again it does nothing. With `since` it is shorter: for a database that has that version already.
    """
    if type(since) is not int or not 0 <= since <= version():
        raise ValueError(f"since must be a version from 0 to {version()}, found {since!r:.80}.")
    return migrate.script(since)
