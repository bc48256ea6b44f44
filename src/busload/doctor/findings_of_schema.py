"""Decides about the schema: whether it is there, of this release, whole, and open to this role."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

from busload.doctor.catalog import finding
from busload.doctor.facts import WRITES, Facts, Found, Server, Table
from busload.doctor.finding import Finding, FindingCode, Severity
from busload.doctor.objects import SchemaObject, expected_here
from busload.health.health import HealthCode
from busload.postgres.grants import CALLS, PREFIX, Right, Role, calls, grant, needs
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
    """A login is judged by the roles that it has, or by the one whose rights it has, or else by all of them."""
    held = facts.rights
    roles = [each for each in facts.objects or () if each.kind == "role"]
    if server.is_superuser:
        if roles or server.by_network:
            yield finding(FindingCode.SUPERUSER, f"The login {server.role} is a superuser.")
        return
    members = [each for each in roles if each.usable]
    meant = {Role(each.table) for each in members} or _role_like(held)
    lacks = {right for right in frozenset().union(*map(needs, meant)) if not held.get(right, True)}
    closed = {each.name for each in facts.objects or () if each.kind == "function" and not each.usable}
    closed -= set(CALLS) - frozenset().union(*map(calls, meant))
    words = list[str]()
    if any(each.kind == "schema" and not each.usable for each in facts.objects or ()):
        words.append("USAGE of the schema")
    if lacks:
        words.append(
            f"{', '.join(sorted({each.privilege for each in lacks}))} on {_some({each.relation for each in lacks})}"
        )
    if closed:
        words.append(f"EXECUTE of {_some(closed)}")
    if not words:
        return
    reads = {each.privilege for each in lacks}.isdisjoint({"SELECT", "USAGE"})
    has = f", which has the role {' and '.join(each.name for each in members)}," if members else ""
    cure, sql, run = _give_rights(server.role, roles, members)
    yield finding(
        FindingCode.PRIVILEGES_MISSING,
        f"The login {server.role}{has} lacks {'; '.join(words)}.",
        severity=Severity.DEGRADED if reads and len(words) == bool(lacks) else Severity.CRITICAL,
        cure=cure,
        sql=sql,
        run=run,
    )


def _role_like(held: Mapping[Right, bool]) -> set[Role]:
    """The role whose rights this login has without being a member, if it may write nothing beyond; or else all."""
    writes = {right for right, has in held.items() if has and right.privilege in WRITES}
    for role in Role:
        wanted = needs(role)
        if all(held.get(right, True) for right in wanted) and all(
            right in wanted or right._replace(column=None) in wanted for right in writes
        ):
            return {role}
    return set(Role)


def _give_rights(
    login: str, roles: Sequence[Found], members: Sequence[Found]
) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """In words, in SQL and for a shell: renew the rights of the roles, or give a role to this login."""
    named = {Role(each.table): each.name for each in [*roles, *members]}
    others = [f" --{role} {name}" for role, name in sorted(named.items()) if name != f"{PREFIX}{role}"]
    renew = f"busload schema grants --apply{''.join(others)} --dsn 'DSN of the owner'"
    if members:
        return "Renew the rights of the role, as the owner of the schema.", (), (renew,)
    cure = "As the owner of the schema, give the login the role that it needs. Here it is a worker's:"
    cure += " a login that only sends, decides or reads needs less."
    statement = grant(named.get(Role.WORKER, f"{PREFIX}{Role.WORKER}"), login)
    if Role.WORKER in named:
        return cure, (statement,), ()
    return cure, (), (renew, f"psql 'DSN of the owner' -c {shlex.quote(statement)}")


def _some(names: set[str]) -> str:
    first = sorted(names)[:3]
    return f"{', '.join(first)}{' and others' if len(names) > len(first) else ''}"
