"""Who may do what in the database: the roles, the statements that each performs, and the rights that these need.

Everything about rights is decided in this module. `PERFORMED_BY` says of each statement of ours which roles perform it;
`RIGHTS` and `CALLS` say what these statements need. Tests compare the two by the answers of a server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from psycopg.sql import Identifier


class Role(StrEnum):
    SENDER = "sender"
    WORKER = "worker"
    OPERATOR = "operator"
    READER = "reader"


INCLUDES = {
    Role.SENDER: {Role.SENDER},
    Role.WORKER: {Role.WORKER, Role.SENDER},
    Role.OPERATOR: {Role.OPERATOR, Role.SENDER, Role.READER},
    Role.READER: {Role.READER},
}
"""Handlers send commands. Operators see what they decide about, and what they create is sent."""

PREFIX = "busload_"
NAME = re.compile(r"[a-z_][a-z0-9_]{0,50}")
"""Names that SQL spells without quotes, short enough to leave room for a role."""

PERFORMED_BY: dict[str, str] = {
    # A file of statements, or one statement where it differs from its file. The letters are those of the roles.
    "audit": "R",
    "batches.batch": "SR",
    "batches.cancel": "OW",
    "batches.cancel.canceling_batches": "W",
    "batches.cancel.mark_canceled": "O",
    "batches.guards": "W",
    "batches.hold": "O",
    "batches.hold.held_with_stragglers": "W",
    "batches.hold.withhold": "W",
    "batches.preview": "R",
    "batches.reprioritize": "O",
    "buffers.add": "S",
    "buffers.claim": "W",
    "buffers.event_table": "SW",
    "buffers.groups": "W",
    "buffers.overview": "R",
    "buffers.status": "W",
    "buffers.status.count": "W",
    "buffers.status.declared": "WR",
    "buffers.status.flush": "O",
    "buffers.status.groups": "R",
    "buffers.status.in_groups": "R",
    "buffers.status.names": "R",
    "buffers.status.since": "R",
    "buffers.status.since_in": "R",
    "buffers.status.waiting": "R",
    "commands.cancel": "O",
    "commands.cancel.forget": "W",
    "commands.cancel.stopping": "W",
    "commands.claim": "W",
    "commands.expire": "W",
    "commands.expire.note_expiry": "SW",
    "commands.listing": "R",
    "commands.load": "SR",
    "commands.marks": "W",
    "commands.reschedule": "O",
    "commands.rescue": "W",
    "commands.search": "R",
    "commands.send": "S",
    "commands.send.note_operator": "O",
    "commands.send_batches": "S",
    "commands.settle": "W",
    "commands.task_keys": "S",
    "commands.wake": "W",
    "dispatch.creation_state": "S",
    "dispatch.outbox": "W",
    "dispatch.outbox.identity": "S",
    "dispatch.outbox.lag": "R",
    "dispatch.outbox.look_up": "R",
    "dispatch.outbox.mark": "S",
    "dispatch.outbox.note_published": "S",
    "dispatch.outbox.note_repair": "O",
    "dispatch.outbox.publish_again": "O",
    "dispatch.outbox.published": "R",
    "dispatch.outbox.reroute": "O",
    "dispatch.outbox.retry": "O",
    "dispatch.outbox.retryable": "R",
    "dispatch.outbox.take_back": "S",
    "dispatch.outbox.waiting": "R",
    "dispatch.report": "R",
    "doctor": "R",
    "explain": "R",
    "health": "R",
    "health.workers.stop": "O",
    "jobs.batch": "S",
    "jobs.cancel": "O",
    "jobs.listing": "R",
    "jobs.listing.job": "SR",
    "jobs.listing.stages": "SR",
    "jobs.preview": "R",
    "jobs.progress": "W",
    "jobs.progress.create": "S",
    "jobs.progress.create_stages": "S",
    "jobs.progress.existing": "S",
    "jobs.progress.hold": "WO",
    "jobs.progress.keep_parts": "S",
    "limits.concurrency": "W",
    "limits.concurrency.concurrency": "R",
    "limits.order": "W",
    "limits.pause": "R",
    "limits.pause.pause": "O",
    "limits.pause.paused": "W",
    "limits.pause.resume": "O",
    "limits.rate": "W",
    "limits.rate.bring_forward": "O",
    "limits.rate.limits": "R",
    "limits.rate.reset": "O",
    "limits.rate.would_reset": "O",
    "metrics": "R",
    "migrate.applied": "SR",
    "migrate.exists": "SR",
    "postgres.write": "SR",
    "retention.kept": "R",
    "retention.prune": "W",
    "schedules.declare": "W",
    "schedules.declare.known": "WR",
    "schedules.declare.undeclared": "R",
    "schedules.fire": "W",
    "schedules.fire.note_trigger": "O",
    "schedules.fire.to_trigger": "O",
    "schedules.operate": "R",
    "schedules.operate.pause": "O",
    "schedules.operate.remove": "O",
    "schedules.operate.resume": "O",
    "statistics": "W",
    "statistics.statistics.minutes": "R",
    "statistics.statistics.now": "R",
    "statistics.statistics.totals": "R",
    "tasks": "W",
    "tasks.phase.disagreements": "R",
    "tasks.phase.reports": "R",
    "tasks.phase.switch": "O",
    "transports.postgresql": "W",
    "transports.postgresql.privileges": "S",
    "transports.postgresql.publish": "S",
    "troubleshooting.causes": "R",
    "troubleshooting.decisions": "O",
    "troubleshooting.selection": "R",
    "troubleshooting.selection.portion": "O",
    "worker": "W",
}

NOBODY: dict[str, str] = {
    "migrate.lock": "the owner of the schema migrates it",
    "buffers.add.insert_row": "writes to a table of the application, which grants it",
    "imports": "reads the tables of other queues, which grant it",
    "testing": "is for tests, which own their database",
}
"""Statements that need a right that is not ours to grant, or that only the owner of the schema performs."""

ALL = "SELECT, INSERT, UPDATE, DELETE"
READS = {"R": "SELECT"}
RIGHTS: dict[str, Mapping[str, str]] = {
    # For each table, view and sequence, what each role needs beyond the roles that it includes. A sender has the
    # columns without payload. An operator repairs data, and nobody changes what has happened.
    "archive": {"W": "INSERT", "R": "SELECT"},
    "archived_batch": {"W": "INSERT", "R": "SELECT"},
    "archived_job": {"W": "INSERT", "R": "SELECT"},
    "audit": READS,
    "batch": {
        "S": "SELECT (batch_id, batch_type, budget_from, canary_until, canceled_at, created_at, domain, fair_by,"
        " job_id, pruned_at, sealed_at, stage, started_at, status, total_count, way),"
        " INSERT (batch_id, batch_type, custom_data, domain, expires_at, fair_by, headers, job_id, name, on_complete,"
        " sealed_at, stage, total_count, way),"
        " UPDATE (budget_at_least, budget_from, budget_per_cause, budget_share, on_exceeded, sealed_at, total_count)",
        "W": "SELECT, UPDATE, DELETE",
        "O": "SELECT, UPDATE",
        "R": "SELECT",
    },
    "batch_cause": {"W": "SELECT, INSERT, UPDATE, DELETE", "O": "SELECT, INSERT, UPDATE, DELETE", "R": "SELECT"},
    "batch_metadata": {"S": "SELECT", "R": "SELECT"},
    "batch_recent": READS,
    "batch_to_claim": {"W": "SELECT"},
    "buffer": {"W": "SELECT, INSERT, UPDATE", "O": "INSERT, UPDATE", "R": "SELECT"},
    "buffer_archive": {"W": "INSERT", "O": "INSERT", "R": "SELECT"},
    "buffered": {
        "S": "SELECT (buffer, group_id, id, key, once, xmax), INSERT (buffer, bytes, data, key, once, partition),"
        " UPDATE (bytes, data, partition)",
        "W": "SELECT, UPDATE, DELETE",
        "O": "SELECT, DELETE",
        "R": "SELECT",
    },
    "checkpoint": {
        "S": "SELECT, INSERT, UPDATE (confirmed_at)",
    },
    "command": {
        "S": "SELECT (batch_id, command_id, domain, id, priority, reply_to, run_at),"
        " INSERT (batch_id, command_id, command_type, correlation_id, data, domain, headers, id, max_attempts,"
        " priority, reply_to, run_at, task_key)",
        "W": "SELECT, INSERT, UPDATE (data), DELETE",
        "O": "SELECT, UPDATE (data)",
        "R": "SELECT",
    },
    "command_bus_batch": READS,
    "command_bus_command": READS,
    "command_status": {"W": "SELECT", "R": "SELECT"},
    "concurrency_limit": {"W": ALL, "R": "SELECT"},
    "counted_batch": {"W": "SELECT", "R": "SELECT"},
    "created_daily": READS,
    "daily": {"W": "SELECT, INSERT, UPDATE", "R": "SELECT"},
    "dispatch": {"S": "SELECT, INSERT, UPDATE"},
    "dispatch_daily": READS,
    "dispatch_recent": READS,
    "dispatch_retry": READS,
    "event": {
        "S": "SELECT (hi, lo, type), INSERT (batch_id, details, hi, lo, type)",
        "W": "SELECT, INSERT, DELETE",
        "O": "SELECT, INSERT",
        "R": "SELECT",
    },
    "execution": {"S": "SELECT (command, outcome)", "W": "SELECT, INSERT, DELETE", "R": "SELECT"},
    "expiry": {"S": "INSERT", "W": "SELECT, UPDATE, DELETE", "R": "SELECT"},
    "fire": {"W": "SELECT, INSERT, DELETE", "O": "INSERT", "R": "SELECT"},
    "first_in_order": {"W": ALL, "R": "SELECT"},
    "guard": {"W": "SELECT, INSERT, DELETE"},
    "identity": {"S": "SELECT"},
    "job": {
        "S": "SELECT (batch_id, compensated_at, completed_at, continue_after_failures, created_at, custom_data, domain,"
        " job_id, name, operator, position, reason, status),"
        " INSERT (batch_id, continue_after_failures, custom_data, domain, job_id, name, on_complete)",
        "W": "SELECT, UPDATE, DELETE",
        "O": "SELECT, UPDATE",
        "R": "SELECT",
    },
    "job_in_doubt": {"W": "SELECT, INSERT, DELETE", "O": "SELECT, INSERT, DELETE"},
    "job_part": {"S": "INSERT", "W": "SELECT, DELETE", "O": "SELECT, DELETE"},
    "job_stage": {"S": "SELECT, INSERT", "W": "UPDATE", "O": "UPDATE", "R": "SELECT"},
    "lease": {"W": ALL, "O": "UPDATE", "R": "SELECT"},
    "listener": {"W": "SELECT, INSERT, UPDATE"},
    "load_number": {"S": "USAGE, SELECT"},
    "message": {"S": "SELECT (id, queue), INSERT (body, id, queue)", "W": "SELECT, UPDATE, DELETE"},
    "migration": {"S": "SELECT", "R": "SELECT"},
    "one_listener": {"S": "SELECT"},
    "order_sweep": {"W": "SELECT, UPDATE"},
    "ordered_domain": {"S": "SELECT", "W": "INSERT, UPDATE, DELETE", "R": "SELECT"},
    "outbox": {"S": "SELECT, INSERT, UPDATE (due_at, relay), DELETE", "W": "UPDATE", "O": "UPDATE", "R": "SELECT"},
    "pause": {"W": "SELECT", "O": "INSERT, UPDATE", "R": "SELECT"},
    "permit": {"W": ALL, "R": "SELECT"},
    "publication": {"S": "SELECT"},
    "queue": {"S": "SELECT, INSERT, UPDATE (published_at), DELETE", "W": "UPDATE", "O": "UPDATE", "R": "SELECT"},
    "rate_limit": {"W": ALL, "O": "UPDATE (blocked_until, next_at)", "R": "SELECT"},
    "ready": {"W": "SELECT, UPDATE", "R": "SELECT"},
    "release": {"W": "SELECT, INSERT, UPDATE"},
    "schedule": {
        "W": "SELECT, INSERT, UPDATE",
        "O": "UPDATE (pause_reason, paused_at, paused_by), DELETE",
        "R": "SELECT",
    },
    "scheduled": {
        "S": "SELECT (batch_id, domain, hi, lo, reason, run_at),"
        " INSERT (batch_id, domain, fair, hi, lo, priority, reason, replies, run_at)",
        "W": ALL,
        "O": ALL,
        "R": "SELECT",
    },
    "statistics": {"W": "SELECT, INSERT, DELETE", "O": "INSERT", "R": "SELECT"},
    "stopping": {"W": "SELECT, UPDATE, DELETE", "O": "INSERT, UPDATE", "R": "SELECT"},
    "task": {"S": "SELECT, INSERT, UPDATE (command_id, held_until)", "W": "UPDATE, DELETE"},
    "tracker_disagreement": {"W": "SELECT, INSERT, DELETE", "R": "SELECT"},
    "tracker_phase": {"W": "SELECT, INSERT, UPDATE", "O": "INSERT", "R": "SELECT"},
    "troubleshooting": {"W": "SELECT, INSERT, DELETE", "O": "UPDATE (since), DELETE", "R": "SELECT"},
    "turn": {"W": "SELECT, UPDATE", "R": "SELECT"},
    "unmarked": {"W": "SELECT, UPDATE", "R": "SELECT"},
    "worker": {"W": "SELECT, INSERT, UPDATE", "O": "UPDATE (stop_requested_at, stop_requested_by)", "R": "SELECT"},
}

CALLS: dict[str, str] = {
    # The functions that have the rights of their owner, and who may call them. Each says in the schema why it has them.
    "begin_canary": "S",
    "decide": "SWO",
    "jobs_waiting": "SR",
    "merge_events": "S",
    "outlook": "SR",
}
"""All other functions have the rights of whoever calls them, so every role may call them."""

LETTERS = {"S": Role.SENDER, "W": Role.WORKER, "O": Role.OPERATOR, "R": Role.READER}


def roles_of(letters: str) -> set[Role]:
    """The roles that include one of these."""
    meant = {LETTERS[letter] for letter in letters}
    return {role for role, included in INCLUDES.items() if included & meant}


def performers(statement: str) -> set[Role] | None:
    """The roles that perform a statement, such as `commands.send.send`. None: nobody has decided about it."""
    parts = statement.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in NOBODY:
            return set()
        if name in PERFORMED_BY:
            return roles_of(PERFORMED_BY[name])
    return None


def rights(relation: str, role: Role) -> list[str]:
    """What a role may do with a table, a view or a sequence."""
    own = {LETTERS[letter]: given for letter, given in RIGHTS[relation].items()}
    return [own[each] for each in Role if each in INCLUDES[role] and each in own]


class Right(NamedTuple):
    """A right on a table, a view or a sequence, or on one column."""

    relation: str
    privilege: str
    column: str | None = None


@cache
def needs(role: Role) -> frozenset[Right]:
    """What a role may do, one by one."""
    found = set[Right]()
    for relation in RIGHTS:
        for privilege, columns in (each for given in rights(relation, role) for each in _GIVEN.findall(given)):
            found |= {Right(relation, privilege, column or None) for column in columns.split(", ")}
    return frozenset(found)


def calls(role: Role) -> frozenset[str]:
    """The functions with the rights of their owner that a role may call."""
    return frozenset(function for function, letters in CALLS.items() if role in roles_of(letters))


_GIVEN = re.compile(r"(\w+)(?: \((.*?)\))?(?:, (?=[A-Z])|$)")


def role_names(prefix: str = PREFIX, names: Mapping[str, str] | None = None) -> dict[Role, str]:
    """The name of each role: the prefix and the role, or a name of its own."""
    found = {role: (names or {}).get(role.value, f"{prefix}{role.value}") for role in Role}
    for name in found.values():
        if not NAME.fullmatch(name) or name.startswith("pg_"):
            raise ValueError(
                f"The name of a role has small letters, digits and _, at most 51 and no digit first, and does not begin"
                f" with pg_; found {name!r:.80}."
            )
    if len(set(found.values())) < len(found):
        raise ValueError(f"Each role needs a name of its own, found {', '.join(found.values())}.")
    return found


def sql(prefix: str = PREFIX, names: Mapping[str, str] | None = None) -> str:
    """One statement that makes the roles where they are missing, and gives each of them its rights and no others."""
    roles = role_names(prefix, names)
    return f"{_BEGIN}{''.join(_steps(roles))}{_END}"


def _steps(roles: Mapping[Role, str]) -> Iterator[str]:
    for role, name in roles.items():
        yield _ROLE.format(role=role, name=name)
    for name in roles.values():
        yield f"REVOKE ALL ON SCHEMA busload FROM {name};\nGRANT USAGE ON SCHEMA busload TO {name};\n"
        yield f"REVOKE ALL ON ALL TABLES IN SCHEMA busload FROM {name};\n"
        yield f"REVOKE ALL ON ALL SEQUENCES IN SCHEMA busload FROM {name};\n"
        yield f"REVOKE ALL ON ALL FUNCTIONS IN SCHEMA busload FROM {name};\n"
    yield _INVOKERS.format(names=", ".join(roles.values()))
    for function, letters in CALLS.items():
        granted = ", ".join(roles[role] for role in Role if role in roles_of(letters))
        yield f"GRANT EXECUTE ON FUNCTION busload.{function} TO {granted};\n"
    for relation in RIGHTS:
        kind = "SEQUENCE " if relation == "load_number" else ""
        for role, name in roles.items():
            for given in rights(relation, role):
                yield f"GRANT {given} ON {kind}busload.{relation} TO {name};\n"


_BEGIN = """\
-- The roles of busload: each may do what it must, and nothing else. Repeat this after each migration.
-- Give a role to a login with: GRANT busload_sender TO app;
DO $busload$
BEGIN
IF to_regclass('busload.migration') IS NULL THEN
    RAISE EXCEPTION 'This database has no schema busload.' USING HINT = 'Run `busload schema migrate` first.';
END IF;
"""
_ROLE = """\
IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = '{name}') THEN
    CREATE ROLE {name} NOLOGIN;
    COMMENT ON ROLE {name} IS 'busload: {role}';
END IF;
"""
_INVOKERS = """\
DECLARE each pg_catalog.regprocedure;
BEGIN
    FOR each IN SELECT oid FROM pg_catalog.pg_proc
                 WHERE pronamespace = 'busload'::pg_catalog.regnamespace AND NOT prosecdef LOOP
        EXECUTE pg_catalog.format('GRANT EXECUTE ON FUNCTION %s TO {names}', each);
    END LOOP;
END;
"""
_END = """\
END
$busload$;
"""


@cache
def _names_by_text() -> dict[bytes, str]:
    """Every statement of ours by its text."""
    from busload.postgres.statements import statements  # read only after an error

    package = files("busload")
    found: dict[bytes, str] = {}
    for folder in package.iterdir():
        for file in folder.iterdir() if folder.is_dir() else ():
            if file.name.endswith(".sql"):
                subject = f"{folder.name}.{file.name.removesuffix('.sql')}"
                for name, text in statements(f"busload.{subject}").by_name.items():
                    found.setdefault(text, f"{subject}.{name}")
    return found


def say_who_may(statement: bytes, user: str) -> str | None:
    """Which role is missing for a statement that was refused, and how to give it; None if none of ours would help."""
    name = _names_by_text().get(statement)
    roles = performers(name) if name is not None else None
    if not roles:
        return None
    fewest = min(roles, key=lambda role: [Role.SENDER, Role.READER, Role.OPERATOR, Role.WORKER].index(role))
    named = f"{PREFIX}{fewest}"
    return (
        f"This call needs the role that `busload schema grants` makes for {fewest}s: {named}, unless you have named it"
        f" otherwise. Run `busload schema grants --apply` as the owner of the schema, then {grant(named, user)}"
    )


def grant(role: str, login: str) -> str:
    """The statement that gives a role to a login."""
    return f"GRANT {Identifier(role).as_string(None)} TO {Identifier(login).as_string(None)};"
