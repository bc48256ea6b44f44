"""Decides about the server: its settings as they are for this role, its connections, and clocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from zoneinfo import ZoneInfo

from psycopg import sql

from busload.commands.wording import counted
from busload.doctor.catalog import finding
from busload.doctor.facts import Facts, Server, Setting
from busload.doctor.finding import Finding, FindingCode, Severity
from busload.postgres.connection import OLDEST_SERVER
from busload.settings import DoctorSettings

TIMEOUTS = {
    "statement_timeout": 30_000,
    "transaction_timeout": 60_000,
    "idle_in_transaction_session_timeout": 30_000,
    "idle_session_timeout": 60_000,
}
"""Milliseconds that each may have at least; 0 is no limit. A bus makes a lost connection anew, so the last one costs
only time."""

PER_WORKER = 17
"""Connections that a worker process with the defaults needs at full load, without those of its handlers."""

SWITCHES = {
    "fsync": FindingCode.FSYNC_OFF,
    "full_page_writes": FindingCode.FULL_PAGE_WRITES_OFF,
    "synchronous_commit": FindingCode.SYNCHRONOUS_COMMIT_OFF,
    "autovacuum": FindingCode.AUTOVACUUM_OFF,
    "track_counts": FindingCode.TRACK_COUNTS_OFF,
}


def name(identifier: str) -> str:
    """An identifier as SQL spells it."""
    return sql.Identifier(identifier).as_string(None)


def text(value: str) -> str:
    """A text as SQL spells it."""
    return sql.Literal(value).as_string(None)


def judge_server(facts: Facts, server: Server, thresholds: DoctorSettings) -> Iterator[Finding]:
    if server.version < OLDEST_SERVER:
        found = f"The server is PostgreSQL {server.version // 10000}, busload needs 15 or later."
        yield finding(FindingCode.SERVER_TOO_OLD, found)
    if facts.settings is not None:
        yield from _judge_settings(facts.settings, server, pooled=facts.pooled)
        yield from _judge_connections(facts, facts.settings, thresholds)
    yield from _judge_clocks(facts, thresholds)


def _judge_settings(settings: Mapping[str, Setting], server: Server, *, pooled: bool) -> Iterator[Finding]:
    encoding = settings.get("server_encoding")
    if encoding is not None and encoding.value != "UTF8":
        found = f"The database {server.database} is encoded in {encoding.value}, busload needs UTF8."
        run = (f"createdb -E UTF8 -T template0 {server.database}_utf8",)
        yield finding(FindingCode.ENCODING, found, run=run)
    if server.in_recovery:
        found = "The server is a standby, or recovers from a crash."
        yield finding(FindingCode.IN_RECOVERY, found)
    read_only = settings.get("default_transaction_read_only")
    if read_only is not None and read_only.value == "on" and not server.in_recovery:
        cure, statements = changed("default_transaction_read_only", read_only, "off", server)
        found = f"Transactions are read-only by default{_set_by(read_only)}."
        yield finding(FindingCode.READ_ONLY, found, cure=cure, sql=statements)
    for switch, code in SWITCHES.items():
        setting = settings.get(switch)
        if setting is not None and setting.value == "off":
            cure, statements = changed(switch, setting, "on", server)
            yield finding(code, f"{switch} is off{_set_by(setting)}.", cure=cure, sql=statements)
    replication = settings.get("session_replication_role")
    if replication is not None and replication.value == "replica":
        cure, statements = changed("session_replication_role", replication, "origin", server)
        found = f"session_replication_role is replica{_set_by(replication)}."
        yield finding(FindingCode.TRIGGERS_OFF, found, cure=cure, sql=statements)
    for limit, least in TIMEOUTS.items():
        setting = settings.get(limit)
        if setting is not None and 0 < int(setting.value) < least:
            cure, statements = changed(limit, setting, "0", server)
            severity = Severity.NOTICE if limit == "idle_session_timeout" else Severity.DEGRADED
            found = f"{limit} is {int(setting.value) / 1000:g} s{_set_by(setting)}; {least // 1000} s or more is safe."
            yield finding(FindingCode.TIMEOUT_TOO_SHORT, found, severity=severity, cure=cure, sql=statements)
    isolation = settings.get("default_transaction_isolation")
    if pooled and isolation is not None and isolation.value != "read committed":
        cure, statements = changed("default_transaction_isolation", isolation, "'read committed'", server)
        found = f"Behind the pooler, transactions are {isolation.value} by default{_set_by(isolation)}."
        yield finding(FindingCode.ISOLATION, found, cure=cure, sql=statements)
    zone = settings.get("TimeZone")
    if zone is not None and not _is_known(zone.value):
        cure, statements = changed("timezone", zone, "'UTC'", server)
        found = f"The time zone of sessions is {zone.value}{_set_by(zone)}."
        yield finding(FindingCode.TIME_ZONE_UNKNOWN, found, cure=cure, sql=statements)


def changed(setting_name: str, setting: Setting, value: str, server: Server) -> tuple[str, tuple[str, ...]]:
    """How to change a setting, in words and as SQL: it has to be changed where it was set."""
    role, database = name(server.role), name(server.database)
    where = {
        "database user": f"ALTER ROLE {role} IN DATABASE {database} RESET {setting_name};",
        "user": f"ALTER ROLE {role} RESET {setting_name};",
        "database": f"ALTER DATABASE {database} RESET {setting_name};",
    }
    if setting.source in where:
        return f"Take `{setting_name}` back; new sessions then have the server's own.", (where[setting.source],)
    if setting.source == "client":
        return f"Take `{setting_name}` out of the options of the DSN, or of the variable PGOPTIONS.", ()
    if setting.context in ("user", "superuser"):
        statement = f"ALTER ROLE {role} SET {setting_name} = {value};"
        return f"Set `{setting_name}` for the role of busload; new sessions have it.", (statement,)
    if setting.source == "command line":
        return f"Start the server without `-c {setting_name}={setting.value}`.", ()
    again = "SELECT pg_reload_conf();"
    return f"Set `{setting_name} = {value}`.", (f"ALTER SYSTEM SET {setting_name} = {value};", again)


def _set_by(setting: Setting) -> str:
    """Where it was set, if it was."""
    places = {
        "database user": ", set for this role in this database",
        "user": ", set for this role",
        "database": ", set for this database",
        "client": ", set by the DSN or PGOPTIONS",
        "configuration file": ", set in the configuration of the server",
        "command line": ", set on the command line of the server",
    }
    return places.get(setting.source, "")


def _is_known(zone: str) -> bool:
    """As psycopg looks a time zone up."""
    try:
        ZoneInfo(zone)
    except (OSError, ValueError, KeyError):  # ZoneInfoNotFoundError is a KeyError
        return False
    return True


def _judge_connections(facts: Facts, settings: Mapping[str, Setting], thresholds: DoctorSettings) -> Iterator[Finding]:
    found, most = facts.connections, settings.get("max_connections")
    if found is None or most is None:
        return
    kept = sum(int(settings[each].value) for each in RESERVED if each in settings)
    free_for_all = max(1, int(most.value) - kept)
    if found.total >= thresholds.connections_share * free_for_all:
        statements: tuple[str, ...] = ()
        idle = ""
        if found.idlest is not None:
            application, count = found.idlest
            idle = f" {counted(count, 'session')} of application {application!r} {'is' if count == 1 else 'are'} idle."
            statements = (END_IDLE.format(application=text(application)),)
        yield finding(
            FindingCode.CONNECTIONS_SCARCE,
            f"{found.total} of {free_for_all} connections are in use.{idle}",
            severity=Severity.CRITICAL if found.total >= 0.95 * free_for_all else Severity.DEGRADED,
            sql=statements,
        )
    workers, others = len(facts.workers or ()), found.total - found.of_busload
    if workers and workers * PER_WORKER > free_for_all - others:
        yield finding(
            FindingCode.CONNECTIONS_TOO_FEW,
            f"{counted(workers, 'worker')} may need {workers * PER_WORKER} connections, and the server has "
            f"{free_for_all - others} for them.",
            sql=(f"ALTER SYSTEM SET max_connections = {int(most.value) + workers * PER_WORKER};  -- and restart it",),
        )


END_IDLE = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE application_name = {application} AND state = 'idle' AND pid <> pg_backend_pid();"
)
RESERVED = ("superuser_reserved_connections", "reserved_connections")


def _judge_clocks(facts: Facts, thresholds: DoctorSettings) -> Iterator[Finding]:
    most = thresholds.clock_difference.total_seconds()
    cure = ("timedatectl set-ntp true",)
    if facts.clock_ahead is not None and abs(facts.clock_ahead) >= most:
        found = f"The clock of this machine {_ahead(facts.clock_ahead)} that of PostgreSQL."
        yield finding(FindingCode.CLOCK_DIFFERS, found, run=cure)
    for worker in facts.workers or ():
        if worker.clock is None:
            continue
        ahead = worker.clock - worker.seen_at.timestamp()
        if abs(ahead) >= most:
            found = f"The clock of worker {worker.name} {_ahead(ahead)} that of PostgreSQL."
            yield finding(FindingCode.WORKER_CLOCK_DIFFERS, found, run=cure)


def _ahead(seconds: float) -> str:
    return f"is {abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'}"
