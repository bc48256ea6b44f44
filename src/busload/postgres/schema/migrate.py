"""Applies the numbered files under a lock, and says which of them a database has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.resources import files

import psycopg.errors as pg

from busload.errors import DatabaseUnusableError, SchemaOutdatedError
from busload.postgres.plan import Plan, Script, Statement

# The transaction-level lock needs no session, so it also works behind a pooler; the key is "busload" in ASCII.
LOCK = b"SELECT pg_catalog.pg_advisory_xact_lock(27711006262190436)"
EXISTS = b"""
SELECT EXISTS (SELECT FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
                WHERE n.nspname = 'busload'::name AND c.relname = 'migration'::name)
"""
APPLIED = b"SELECT version, name, applied_at FROM busload.migration ORDER BY version"

UNRELEASED = (
    "The database holds a busload schema from before the first release, which cannot be upgraded. "
    "Run DROP SCHEMA busload CASCADE, which deletes all its commands, batches and events, and apply the schema again: "
    "busload schema migrate."
)


@dataclass(frozen=True, slots=True)
class Migration:
    """One file: `0001_commands.sql`."""

    version: int
    name: str
    """The file without its number and ending: `commands`."""
    sql: str
    applied_at: datetime | None = None
    """None while the database does not have it."""


def _read_files() -> tuple[Migration, ...]:
    found = []
    for file in files("busload.postgres.schema").iterdir():
        if file.name.endswith(".sql"):
            version, _, name = file.name.removesuffix(".sql").partition("_")
            found.append(Migration(int(version), name, file.read_text(encoding="utf-8")))
    return tuple(sorted(found, key=lambda migration: migration.version))


MIGRATIONS = _read_files()
"""Every file of this release, in order. The functions below take another list in tests of releases to come."""


def migrate(release: Sequence[Migration] = MIGRATIONS) -> Plan[list[Migration]]:
    """Bring the database up to this release and return what was applied; needs a transaction.

    If nothing is missing, nothing is locked or written, so a role that may only read the schema may call it.
    """
    if not _missing((yield from status(release))):
        return []
    yield Statement(LOCK, {})
    missing = _missing((yield from status(release)))  # another process may have been faster
    if missing:
        try:
            yield Script(script(missing[0].version - 1, release).encode())
        except pg.InsufficientPrivilege as error:
            names = ", ".join(f"{m.version:04}_{m.name}" for m in missing)
            raise DatabaseUnusableError(
                f"The database lacks {names}, and this role may not apply them: {error.diag.message_primary}. Run "
                "`busload schema migrate` as the owner of the schema busload, or, if there is none yet, as a role that "
                "may create one: GRANT CREATE ON DATABASE."
            ) from error
    return missing


def status(release: Sequence[Migration] = MIGRATIONS) -> Plan[list[Migration]]:
    """Return the files of this release, each with the time when it was applied. Refuse an unreleased schema."""
    if not (yield Statement(EXISTS, {}))[0][0]:
        return list(release)
    try:
        rows = yield Statement(APPLIED, {})
    except pg.InsufficientPrivilege as error:
        raise DatabaseUnusableError(
            f"This role may not see which schema the database has: {error.diag.message_primary}. Let the owner of the "
            "schema busload grant it USAGE ON SCHEMA busload, SELECT ON busload.migration, and what else it needs."
        ) from error
    applied = {version: (name, at) for version, name, at in rows}
    found = []
    for migration in release:
        name, at = applied.get(migration.version, (migration.name, None))
        if name != migration.name:
            raise DatabaseUnusableError(UNRELEASED)
        found.append(replace(migration, applied_at=at))
    return found


def check(release: Sequence[Migration] = MIGRATIONS) -> Plan[None]:
    """Refuse a database that lacks a file of this release. A newer database is welcome: files only add."""
    missing = _missing((yield from status(release)))
    if missing:
        raise SchemaOutdatedError(found=missing[0].version - 1, needed=release[-1].version)


def script(since: int = 0, release: Sequence[Migration] = MIGRATIONS) -> str:
    """The files after version `since` as one statement, which applies those that the database lacks.

    One statement is all or nothing wherever it runs: within a transaction, or outside of one. Drivers that prepare
    what they are given take it as well. It leaves the search_path as it finds it.
    """
    begin = _FIRST if since == 0 else _LATER.format(since=since)
    parts = [begin, _RELEASED.format(first=release[0].name, message=UNRELEASED)]
    parts += [_ONE.format(version=m.version, name=m.name, sql=_harmless(m)) for m in release if m.version > since]
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
_RELEASED = """
IF EXISTS (SELECT FROM busload.migration WHERE version = 1 AND name <> '{first}') THEN
    RAISE EXCEPTION USING MESSAGE = '{message}';
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
