"""Applies the numbered files under a lock, and says which ones a database has."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.resources import files

from busload.errors import SchemaOutdated
from busload.store.plan import Plan, Script, Statement

# The transaction-level lock needs no session, so it also works behind a pooler; the key is "busload" in ASCII.
LOCK = b"SELECT pg_catalog.pg_advisory_xact_lock(27711006262190436)"
CREATE = b"""
CREATE SCHEMA IF NOT EXISTS busload;
CREATE TABLE IF NOT EXISTS busload.migration (
    version    integer     PRIMARY KEY,
    name       text        NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
);
"""
EXISTS = b"SELECT pg_catalog.to_regclass('busload.migration') IS NOT NULL"
APPLIED = b"SELECT version, name, applied_at FROM busload.migration ORDER BY version"
RECORD = b"INSERT INTO busload.migration (version, name) VALUES (%(version)s::integer, %(name)s::text)"


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
    """Bring the database up to this release and return what was applied; needs a transaction."""
    yield Statement(LOCK, {})
    yield Script(CREATE)
    present = {row[0] for row in (yield Statement(APPLIED, {}))}
    applied = [migration for migration in migrations() if migration.version not in present]
    for migration in applied:
        yield Script(migration.sql.encode())
        yield Statement(RECORD, {"version": migration.version, "name": migration.name})
    return applied


def status() -> Plan[list[Migration]]:
    """The files of this release, each with the time it was applied."""
    if not (yield Statement(EXISTS, {}))[0][0]:
        return list(migrations())
    applied = {version: at for version, _, at in (yield Statement(APPLIED, {}))}
    return [Migration(m.version, m.name, m.sql, applied.get(m.version)) for m in migrations()]


def check() -> Plan[None]:
    """Refuse a database that lacks a file of this release. A newer one is welcome: files only add."""
    missing = [m.version for m in (yield from status()) if m.applied_at is None]
    if missing:
        raise SchemaOutdated(found=missing[0] - 1, needed=migrations()[-1].version)


def script() -> str:
    """All files as one script, for whoever applies them by other means."""
    parts = [CREATE.decode().strip()]
    for m in migrations():
        record = f"INSERT INTO busload.migration (version, name) VALUES ({m.version}, '{m.name}');"  # noqa: S608 - our own file names
        parts += [f"-- {m.version:04}_{m.name}", m.sql.strip(), record]
    return "BEGIN;\n\n" + "\n\n".join(parts) + "\n\nCOMMIT;\n"
