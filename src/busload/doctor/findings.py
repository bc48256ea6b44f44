"""Decides what the facts mean: every finding, with the cure that fits. Pure functions; nothing is asked here."""

from __future__ import annotations

from collections.abc import Iterator

from busload.commands.wording import counted, span
from busload.doctor.catalog import finding
from busload.doctor.facts import Facts, Server
from busload.doctor.finding import Finding, FindingCode, Severity
from busload.doctor.findings_of_schema import judge_schema
from busload.doctor.findings_of_server import judge_server, name, text
from busload.doctor.findings_of_work import judge_work
from busload.settings import DoctorSettings

GIB = 1024**3


def examine(facts: Facts, thresholds: DoctorSettings) -> Iterator[Finding]:
    """Every finding that the facts give."""
    if facts.server is None:
        return
    yield from judge_server(facts, facts.server, thresholds)
    yield from _judge_notifications(facts, facts.server)
    yield from _judge_snapshots(facts, facts.server)
    yield from _judge_locks(facts, facts.server)
    yield from _judge_vacuum(facts, facts.server, thresholds)
    yield from _judge_disk(facts)
    yield from judge_schema(facts, facts.server)
    yield from judge_work(facts, facts.server, thresholds)


def _judge_notifications(facts: Facts, server: Server) -> Iterator[Finding]:
    if facts.heard is False:
        by = "a pooler stands between us and the server" if facts.pooled else "nothing has come"
        yield finding(FindingCode.NOTIFICATIONS_LOST, f"A notification did not come round: {by}.")
    if server.notify_queue >= 0.5:
        yield finding(
            FindingCode.NOTIFICATIONS_PILE_UP,
            f"The queue of notifications is {server.notify_queue:.0%} full.",
            sql=(
                "SELECT pid, application_name, xact_start FROM pg_stat_activity WHERE xact_start IS NOT NULL "
                "ORDER BY xact_start LIMIT 5;",
            ),
        )


def _judge_snapshots(facts: Facts, server: Server) -> Iterator[Finding]:
    if not server.sees_all:
        yield finding(
            FindingCode.LITTLE_SEEN,
            f"The role {server.role} does not see the sessions of other roles.",
            sql=(f"GRANT pg_read_all_stats TO {name(server.role)};",),
        )
    for holder in facts.holders or ():
        by = f" of {holder.role}" if holder.role else ""
        with_application = f", application {holder.application!r}" if holder.application else ""
        if holder.kind == "session" and holder.since is not None:
            began = f", its last statement began {_ago(server, holder.query_start)}" if holder.query_start else ""
            yield finding(
                FindingCode.OLD_TRANSACTION,
                f"Session {holder.name}{by}{with_application}, has had a transaction open for "
                f"{span(server.now - holder.since)}: it is {holder.state}{began}.",
                sql=(f"SELECT pg_terminate_backend({holder.name});",),
            )
        elif holder.kind == "prepared" and holder.since is not None:
            yield finding(
                FindingCode.PREPARED_TRANSACTION,
                f"The transaction {holder.name!r}{by} was prepared {_ago(server, holder.since)} and is still open.",
                sql=(f"ROLLBACK PREPARED {text(holder.name)};",),
            )
        elif holder.kind == "slot":
            yield finding(
                FindingCode.SLOT_LEFT,
                f"Nobody reads the replication slot {holder.name!r}, which keeps {_size(holder.bytes or 0)} of WAL.",
                sql=(f"SELECT pg_drop_replication_slot({text(holder.name)});",),
            )
        elif holder.kind == "standby":
            yield finding(
                FindingCode.STANDBY_HOLDS_SNAPSHOT,
                f"The standby at {holder.name}{with_application}, reads rows as they were {holder.state} transactions "
                "ago.",
                run=(
                    "psql 'DSN of the standby' -c 'ALTER SYSTEM SET hot_standby_feedback = off' "
                    "-c 'SELECT pg_reload_conf()'",
                ),
            )


def _judge_locks(facts: Facts, server: Server) -> Iterator[Finding]:
    for wait in facts.locks or ():
        who = f"Session {wait.pid}, application {wait.application!r}," if wait.application else f"Session {wait.pid}"
        found = f"{who} has waited for a lock for {span(server.now - wait.since)}"
        if wait.holder is None:
            yield finding(FindingCode.LOCK_WAIT, f"{found}. Its holder is not to be seen.")
            continue
        by = f", application {wait.holder_application!r}" if wait.holder_application else ""
        state = f", which is {wait.holder_state}" if wait.holder_state else ""
        yield finding(
            FindingCode.LOCK_WAIT,
            f"{found}, which session {wait.holder}{by} holds{state}.",
            sql=(f"SELECT pg_terminate_backend({wait.holder});",),
        )


def _judge_vacuum(facts: Facts, server: Server, thresholds: DoctorSettings) -> Iterator[Finding]:
    for table in facts.tables or ():
        if table.not_vacuumed:
            yield finding(
                FindingCode.TABLE_NOT_VACUUMED,
                f"Autovacuum is off for busload.{table.name}.",
                sql=(f"ALTER TABLE busload.{table.name} RESET (autovacuum_enabled);",),
            )
        if table.dead >= thresholds.dead_rows and table.dead > table.live:
            last = f"vacuumed {_ago(server, table.vacuumed_at)}" if table.vacuumed_at else "never vacuumed"
            yield finding(
                FindingCode.DEAD_ROWS,
                f"busload.{table.name} has {counted(table.dead, 'dead row')} beside {counted(table.live, 'live one')}, "
                f"and was {last}.",
                sql=(f"VACUUM (ANALYZE) busload.{table.name};",),
            )
    if server.frozen_age >= WRAPAROUND[0]:
        yield finding(
            FindingCode.WRAPAROUND,
            f"The oldest rows of the database are {server.frozen_age:,} transactions old and not frozen.",
            severity=Severity.CRITICAL if server.frozen_age >= WRAPAROUND[1] else Severity.DEGRADED,
            sql=("VACUUM (FREEZE);",),
        )


WRAPAROUND = (500_000_000, 1_500_000_000)
"""Autovacuum freezes from 200,000,000 on, unless it is kept from that. At 2,100,000,000 nothing can be written."""


def _judge_disk(facts: Facts) -> Iterator[Finding]:
    disk = facts.disk
    if disk is None or disk.free >= min(0.1 * disk.total, 10 * GIB):
        return
    critical = disk.free < min(0.02 * disk.total, GIB)
    yield finding(
        FindingCode.DISK_LOW,
        f"The disk of {disk.path} has {_size(disk.free)} of {_size(disk.total)} left.",
        severity=Severity.CRITICAL if critical else Severity.DEGRADED,
        run=("busload prune --older-than 30d",),
    )


def _ago(server: Server, then: object) -> str:
    return f"{span(server.now - then)} ago"  # type: ignore[operator]


def _size(count: int) -> str:
    for unit, size in (("GiB", GIB), ("MiB", 1024**2), ("KiB", 1024)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
