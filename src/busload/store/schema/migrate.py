"""Applies the numbered files under a lock, and says which ones a database has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.resources import files

import psycopg.errors as pg

from busload.errors import DatabaseUnusable, SchemaOutdated
from busload.store.plan import Plan, Script, Statement

# The transaction-level lock needs no session, so it also works behind a pooler; the key is "busload" in ASCII.
LOCK = b"SELECT pg_catalog.pg_advisory_xact_lock(27711006262190436)"
EXISTS = b"""
SELECT EXISTS (SELECT FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
                WHERE n.nspname = 'busload'::name AND c.relname = 'migration'::name)
"""
APPLIED = b"SELECT version, name, applied_at FROM busload.migration ORDER BY version"


@dataclass(frozen=True, slots=True)
class Migration:
    """One file: `0001_loads_and_places.sql`; `applied_at` is None while the database does not have it."""

    version: int
    name: str
    sql: str
    applied_at: datetime | None = None


@cache
def migrations() -> tuple[Migration, ...]:
    """Every file of this release, in order."""
    found = []
    for file in files("busload.store.schema").iterdir():
        if file.name.endswith(".sql"):
            version, _, name = file.name.removesuffix(".sql").partition("_")
            found.append(Migration(int(version), name, file.read_text(encoding="utf-8")))
    return tuple(sorted(found, key=lambda migration: migration.version))


def migrate() -> Plan[list[Migration]]:
    """Bring the database up to this release and return what was applied; needs a transaction.

    Where nothing is missing nothing is locked or written, so whoever may read the schema may call it.
    """
    if not _missing((yield from status())):
        return []
    yield Statement(LOCK, {})
    missing = _missing((yield from status()))  # others may have been faster
    if missing:
        try:
            yield Script(script(since=missing[0].version - 1).encode())
        except pg.InsufficientPrivilege as error:
            names = ", ".join(f"{m.version:04}_{m.name}" for m in missing)
            raise DatabaseUnusable(
                f"The database lacks {names}, and this role may not apply them: {error.diag.message_primary}. Run "
                "`busload schema migrate` as the owner of the schema busload, or, if there is none yet, as a role that "
                "may create one: GRANT CREATE ON DATABASE."
            ) from error
    return missing


def status() -> Plan[list[Migration]]:
    """The files of this release, each with the time it was applied."""
    if not (yield Statement(EXISTS, {}))[0][0]:
        return list(migrations())
    try:
        rows = yield Statement(APPLIED, {})
    except pg.InsufficientPrivilege as error:
        raise DatabaseUnusable(
            f"This role may not see which schema the database has: {error.diag.message_primary}. Let the owner of the "
            "schema busload grant it USAGE ON SCHEMA busload, SELECT ON busload.migration, and what else it needs."
        ) from error
    applied = {version: at for version, _, at in rows}
    return [Migration(m.version, m.name, m.sql, applied.get(m.version)) for m in migrations()]


def check() -> Plan[None]:
    """Refuse a database that lacks a file of this release. A newer one is welcome: files only add."""
    missing = _missing((yield from status()))
    if missing:
        raise SchemaOutdated(found=missing[0].version - 1, needed=migrations()[-1].version)


def script(since: int = 0) -> str:
    """The files after version `since` as one statement, which applies those that the database lacks.

    One statement is all or nothing wherever it runs: within a transaction, or outside of one. Drivers that prepare
    what they are given take it as well. It leaves the search_path as it finds it.
    """
    parts = [_FIRST if since == 0 else _LATER.format(since=since)]
    parts += [_ONE.format(version=m.version, name=m.name, sql=_harmless(m)) for m in migrations() if m.version > since]
    return f"{_BEGIN}{''.join(parts)}{_END}"


def _missing(found: list[Migration]) -> list[Migration]:
    return [m for m in found if m.applied_at is None]


def _harmless(migration: Migration) -> str:
    """The text of a file in quotes, without what a driver could take for a parameter: `%s`, `:name`."""
    text = f"$file$\n{migration.sql.strip()}\n$file$"
    for sign, code, pattern in (("percent", 37, "%"), ("colon", 58, r"(?<![:\w]):(?=\w)|(?<=\\):")):
        if re.search(pattern, text):
            text = re.sub(pattern, f"{{{{{sign}}}}}", text)
            text = f"pg_catalog.replace({text}, '{{{{{sign}}}}}', pg_catalog.chr({code}))"
    return text


_BEGIN = """\
-- Applies what the database lacks of busload's schema, all or nothing.
DO $busload$
DECLARE
    path text DEFAULT pg_catalog.current_setting('search_path');
    known boolean DEFAULT false;
    strings text DEFAULT pg_catalog.current_setting('standard_conforming_strings');
BEGIN
PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
PERFORM pg_catalog.set_config('standard_conforming_strings', 'on', true);
PERFORM pg_catalog.pg_advisory_xact_lock(27711006262190436);
"""
_FIRST = """
IF pg_catalog.to_regnamespace('busload') IS NULL THEN
    CREATE SCHEMA busload;
END IF;
IF pg_catalog.to_regclass('busload.migration') IS NULL THEN
    CREATE TABLE busload.migration (
        version    integer     PRIMARY KEY,
        name       text        NOT NULL,
        applied_at timestamptz NOT NULL DEFAULT now()
    );
END IF;
"""
_LATER = """
IF pg_catalog.to_regclass('busload.migration') IS NOT NULL THEN
    known = EXISTS (SELECT FROM busload.migration WHERE version = {since});
END IF;
IF NOT known THEN
    RAISE EXCEPTION USING MESSAGE = 'The database has no busload schema {since}, after which this script begins.',
        HINT = 'Apply the whole schema: busload.schema.sql(), or busload schema print.';
END IF;
"""
_ONE = """
IF NOT EXISTS (SELECT FROM busload.migration WHERE version = {version}) THEN
EXECUTE {sql};
INSERT INTO busload.migration (version, name) VALUES ({version}, '{name}');
END IF;
"""
_END = """
PERFORM pg_catalog.set_config('standard_conforming_strings', strings, true);
PERFORM pg_catalog.set_config('search_path', path, true);
END
$busload$;
"""
