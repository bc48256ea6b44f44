"""Decides about the schema: whether it is there, of this release, whole, and open to this role."""

from __future__ import annotations

from collections.abc import Iterator

from busload.doctor.catalog import finding
from busload.doctor.facts import Facts, Server, Table
from busload.doctor.finding import Finding, FindingCode, Severity
from busload.doctor.findings_of_server import name
from busload.doctor.objects import SchemaObject, expected_here
from busload.health.health import HealthCode
from busload.postgres.schema.migrate import MIGRATIONS

MIGRATE = ("busload schema migrate",)
ON_PURPOSE = frozenset({"guard"})
"""Tables that are unlogged by design: their rows live as long as a transaction."""


def judge_schema(facts: Facts, server: Server) -> Iterator[Finding]:
    if facts.objects is None:
        return
    names = {each.name for each in facts.tables or ()}
    if not facts.has_schema or "migration" not in names:
        found = f"The database {server.database} has no schema busload."
        yield finding(FindingCode.SCHEMA_MISSING, found, run=MIGRATE)
        return
    yield from _judge_privileges(facts, server)
    whole = True
    if facts.migrations is not None:
        for each in _judge_release(dict(facts.migrations)):
            whole = whole and each.severity is not Severity.CRITICAL
            yield each
    if whole:
        yield from _judge_objects(facts)


def _judge_release(applied: dict[int, str]) -> Iterator[Finding]:
    if any(applied.get(each.version, each.name) != each.name for each in MIGRATIONS):
        yield finding(
            FindingCode.SCHEMA_UNRELEASED,
            "The schema is from before the first release.",
            sql=("DROP SCHEMA busload CASCADE;",),
            run=MIGRATE,
        )
        return
    missing = [each for each in MIGRATIONS if each.version not in applied]
    if missing:
        files = ", ".join(f"{each.version:04}_{each.name}" for each in missing)
        yield finding(HealthCode.SCHEMA_OUTDATED, f"The schema lacks {files}.", run=MIGRATE)
    newest, here = max(applied, default=0), MIGRATIONS[-1].version
    if newest > here:
        found = f"The schema has version {newest}, and this release knows those up to {here}."
        yield finding(FindingCode.SCHEMA_NEWER, found, run=("pip install --upgrade busload",))


def _judge_objects(facts: Facts) -> Iterator[Finding]:
    tables = {each.name: each for each in facts.tables or ()}
    found = {(each.kind, each.name, each.table): each for each in facts.objects or ()}
    for key, each in expected_here().items():
        if each.kind == "table":
            if each.name not in tables:
                text = f"The table busload.{each.name} is missing."
                yield finding(FindingCode.TABLE_MISSING, text)
        elif key not in found:
            if not each.table or each.table in tables:
                yield _missing(each)
        elif not found[key].usable:
            yield from _unusable(each)
    for table in tables.values():
        yield from _judge_table(table)


def _missing(each: SchemaObject) -> Finding:
    if each.kind == "index":
        severity = Severity.CRITICAL if each.is_unique else Severity.DEGRADED
        concurrently = each.sql.replace("INDEX ", "INDEX CONCURRENTLY ", 1)  # beside workers that run
        found = f"The index {each.name} of busload.{each.table} is missing."
        return finding(FindingCode.INDEX_MISSING, found, severity=severity, sql=(concurrently,))
    if each.kind == "trigger":
        found = f"The trigger {each.name} of busload.{each.table} is missing."
        return finding(FindingCode.TRIGGER_MISSING, found, sql=(each.sql,))
    return finding(FindingCode.FUNCTION_MISSING, f"The function busload.{each.name} is missing.", sql=(each.sql,))


def _unusable(each: SchemaObject) -> Iterator[Finding]:
    """A function that may not be called is a matter of privileges."""
    if each.kind == "index":
        yield finding(
            FindingCode.INDEX_INVALID,
            f"The index {each.name} of busload.{each.table} is invalid.",
            sql=(f"REINDEX INDEX CONCURRENTLY busload.{each.name};",),
        )
    if each.kind == "trigger":
        yield finding(
            FindingCode.TRIGGER_DISABLED,
            f"The trigger {each.name} of busload.{each.table} is disabled.",
            sql=(f"ALTER TABLE busload.{each.table} ENABLE TRIGGER {each.name};",),
        )


def _judge_table(table: Table) -> Iterator[Finding]:
    if table.unlogged and table.name not in ON_PURPOSE:
        yield finding(
            FindingCode.TABLE_UNLOGGED,
            f"The table busload.{table.name} is unlogged.",
            sql=(f"ALTER TABLE busload.{table.name} SET LOGGED;",),
        )
    if table.row_security:
        yield finding(
            FindingCode.ROW_SECURITY,
            f"Row security is on for busload.{table.name}.",
            sql=(f"ALTER TABLE busload.{table.name} DISABLE ROW LEVEL SECURITY;",),
        )


def _judge_privileges(facts: Facts, server: Server) -> Iterator[Finding]:
    role = name(server.role)
    closed = {each.kind for each in facts.objects or () if each.kind != "index" and not each.usable}
    closed -= {"trigger"}
    lacking = sorted({right for table in facts.tables or () for right in table.lacks})
    statements, words = list[str](), list[str]()
    if "schema" in closed:
        words.append("USAGE of the schema")
        statements.append(f"GRANT USAGE ON SCHEMA busload TO {role};")
    if lacking:
        some = [table.name for table in facts.tables or () if table.lacks]
        words.append(f"{', '.join(lacking)} on {', '.join(some[:3])}{' and others' if len(some) > 3 else ''}")
        statements.append(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA busload TO {role};")
    if "sequence" in closed:
        words.append("USAGE of sequences")
        statements.append(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA busload TO {role};")
    if "function" in closed:
        words.append("EXECUTE of functions")
        statements.append(f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA busload TO {role};")
    if statements:
        only_writes = lacking and "SELECT" not in lacking and not closed
        yield finding(
            FindingCode.PRIVILEGES_MISSING,
            f"The role {server.role} lacks {'; '.join(words)}.",
            severity=Severity.DEGRADED if only_writes else Severity.CRITICAL,
            sql=tuple(statements),
        )
