"""Every finding that the doctor knows: which check makes it, how bad it is, why it matters, and what to do."""

from __future__ import annotations

from dataclasses import dataclass

from busload.doctor.finding import Finding, FindingCode, Severity
from busload.health.health import HealthCode

Code = FindingCode | HealthCode
NOTICE, DEGRADED, CRITICAL = Severity


@dataclass(frozen=True, slots=True)
class Known:
    """What is always the same about a finding. `cure` is for the docs where the finding itself names more."""

    check: str
    severities: tuple[Severity, ...]
    why: str
    cure: str


def finding(
    code: Code,
    found: str,
    *,
    severity: Severity | None = None,
    cure: str | None = None,
    sql: tuple[str, ...] = (),
    run: tuple[str, ...] = (),
) -> Finding:
    """A finding of a known kind. Where its severity is not given, there is only one."""
    known = KNOWN[code]
    if severity is None:
        [severity] = known.severities
    return Finding(code, severity, known.check, found, known.why, cure or known.cure, sql, run)


_LOSES = "After a crash of the server, commands that were accepted may be lost, or the database may be damaged."
_STARTS = "Start a worker for it: `busload worker MODULE:BUS --domains DOMAIN`."
_RESTART = "Restart that worker, and look at its log: a handler does not end, or a part of the worker has failed."

KNOWN: dict[Code, Known] = {
    # -- connection
    HealthCode.DATABASE_UNREACHABLE: Known(
        "connection",
        (CRITICAL,),
        "Nothing is sent and nothing runs.",
        "Check host and port of the DSN, the network, and whether the server runs.",
    ),
    HealthCode.DATABASE_UNUSABLE: Known(
        "connection",
        (CRITICAL,),
        "Nothing is sent and nothing runs.",
        "Check user, password and database of the DSN, and `pg_hba.conf` of the server.",
    ),
    FindingCode.DATABASE_FULL: Known(
        "connection",
        (CRITICAL,),
        "Workers and senders cannot connect either once they need another connection.",
        "End sessions that nobody needs, or raise `max_connections`, or let a pooler share them.",
    ),
    FindingCode.SERVER_TOO_OLD: Known(
        "connection",
        (CRITICAL,),
        "busload's statements need PostgreSQL 15.",
        "Upgrade the server.",
    ),
    FindingCode.ENCODING: Known(
        "connection",
        (CRITICAL,),
        "Names and data may hold any character of Unicode.",
        "Create another database in UTF8, and name it in the DSN.",
    ),
    # -- settings
    FindingCode.IN_RECOVERY: Known(
        "settings",
        (CRITICAL,),
        "A standby is read-only: nothing can be sent, claimed or settled.",
        "Connect to the primary: name all servers in the DSN and add `target_session_attrs=read-write`. If the primary "
        "is gone for good, promote this server: `SELECT pg_promote()`.",
    ),
    FindingCode.READ_ONLY: Known(
        "settings",
        (CRITICAL,),
        "Nothing can be sent, claimed or settled.",
        "Let transactions write by default.",
    ),
    FindingCode.FSYNC_OFF: Known("settings", (CRITICAL,), _LOSES, "Turn `fsync` on."),
    FindingCode.FULL_PAGE_WRITES_OFF: Known("settings", (CRITICAL,), _LOSES, "Turn `full_page_writes` on."),
    FindingCode.SYNCHRONOUS_COMMIT_OFF: Known(
        "settings",
        (DEGRADED,),
        "After a crash of the server, commands that were accepted may be lost.",
        "Turn `synchronous_commit` on for the role of busload.",
    ),
    FindingCode.AUTOVACUUM_OFF: Known(
        "settings",
        (DEGRADED,),
        "Places such as the queue change with every command. Without vacuum, claims become slower from hour to hour.",
        "Turn `autovacuum` on.",
    ),
    FindingCode.TRACK_COUNTS_OFF: Known(
        "settings",
        (DEGRADED,),
        "Autovacuum does not know what to vacuum, so claims become slower from hour to hour.",
        "Turn `track_counts` on.",
    ),
    FindingCode.TRIGGERS_OFF: Known(
        "settings",
        (CRITICAL,),
        "No trigger runs for this role: counters of batches go wrong, batches do not complete, and limits are not "
        "kept.",
        "Let the role of busload use `session_replication_role = origin`. What ended meanwhile was not counted.",
    ),
    FindingCode.TIMEOUT_TOO_SHORT: Known(
        "settings",
        (NOTICE, DEGRADED),
        "PostgreSQL ends what busload does in the middle: the cancel of a large batch, "
        "a prune, the transaction of a handler, or a connection that listens. It is tried again, and ended again.",
        "Take the time limit away from the role of busload, or raise it.",
    ),
    FindingCode.ISOLATION: Known(
        "settings",
        (DEGRADED,),
        "Behind a pooler busload cannot change the isolation level, and calls that meet others "
        "fail with serialization errors.",
        "Let the role of busload use READ COMMITTED.",
    ),
    FindingCode.TIME_ZONE_UNKNOWN: Known(
        "settings",
        (NOTICE,),
        "Python does not know this time zone, so times are shown in UTC.",
        "Give the role of busload a time zone that has a name, such as UTC.",
    ),
    # -- notifications
    FindingCode.NOTIFICATIONS_LOST: Known(
        "notifications",
        (DEGRADED,),
        "Workers do not hear of new commands at once: they look every `poll_every`, and "
        "`wait_batch` and cancels are as late.",
        "Give workers a DSN of the server itself, past the pooler, or let the pooler use `pool_mode = session`.",
    ),
    FindingCode.NOTIFICATIONS_PILE_UP: Known(
        "notifications",
        (DEGRADED,),
        "When the queue of notifications is full, every transaction that notifies fails: "
        "no command can be sent or settled.",
        "End the session that listens and has had a transaction open for the longest time.",
    ),
    # -- connections
    FindingCode.CONNECTIONS_SCARCE: Known(
        "connections",
        (DEGRADED, CRITICAL),
        "If no connection is left, workers that start or come back cannot connect.",
        "End sessions that nobody uses, raise `max_connections`, or let a pooler share connections.",
    ),
    FindingCode.CONNECTIONS_TOO_FEW: Known(
        "connections",
        (NOTICE,),
        "At full load the workers need more connections than the server has: some will wait in vain.",
        "Raise `max_connections`, lower `pool_size` of the workers, or run fewer processes.",
    ),
    # -- clocks
    FindingCode.CLOCK_DIFFERS: Known(
        "clocks",
        (DEGRADED,),
        "A `run_at` or `expires_at` that is computed here means another time to PostgreSQL.",
        "Synchronise the clock of this machine.",
    ),
    FindingCode.WORKER_CLOCK_DIFFERS: Known(
        "clocks",
        (DEGRADED,),
        "A `run_at` that handlers on this machine compute means another time to PostgreSQL, and "
        "logs of several machines cannot be compared.",
        "Synchronise the clock of that machine.",
    ),
    # -- snapshots
    FindingCode.OLD_TRANSACTION: Known(
        "snapshots",
        (DEGRADED,),
        "Vacuum cannot remove what has ended since, so the queue grows and claims become "
        "slower; and rows that it has locked keep others waiting.",
        "End the transaction, or the session.",
    ),
    FindingCode.PREPARED_TRANSACTION: Known(
        "snapshots",
        (DEGRADED,),
        "It holds its locks and keeps vacuum from removing rows, also after a restart, until somebody ends it.",
        "Commit it or roll it back.",
    ),
    FindingCode.SLOT_LEFT: Known(
        "snapshots",
        (DEGRADED,),
        "The server keeps all WAL that this slot has not read, until the disk is full, and "
        "perhaps rows that vacuum would remove.",
        "Start what reads the slot, or drop the slot.",
    ),
    FindingCode.STANDBY_HOLDS_SNAPSHOT: Known(
        "snapshots",
        (DEGRADED,),
        "A query on a standby with `hot_standby_feedback` keeps vacuum here from removing "
        "rows, so claims become slower.",
        "End the old query on that standby, or turn its feedback off.",
    ),
    # -- locks
    FindingCode.LOCK_WAIT: Known(
        "locks",
        (DEGRADED,),
        "Whoever waits does nothing else, and holds a connection and perhaps other locks.",
        "End the session that holds the lock.",
    ),
    # -- vacuum
    FindingCode.DEAD_ROWS: Known(
        "vacuum",
        (DEGRADED,),
        "Claims and settlements read past dead rows: both become slower.",
        "Vacuum the table. If the dead rows stay, look for a snapshot that is held.",
    ),
    FindingCode.TABLE_NOT_VACUUMED: Known(
        "vacuum",
        (DEGRADED,),
        "Somebody has turned autovacuum off for this table: its dead rows stay.",
        "Turn autovacuum on again for this table.",
    ),
    FindingCode.WRAPAROUND: Known(
        "vacuum",
        (DEGRADED, CRITICAL),
        "At two thousand million transactions PostgreSQL refuses to write.",
        "Find out what keeps autovacuum from freezing, such as an old transaction, and vacuum the database.",
    ),
    # -- disk
    FindingCode.DISK_LOW: Known(
        "disk",
        (DEGRADED, CRITICAL),
        "When the disk is full, PostgreSQL stops.",
        "Make room: remove what ended long ago, drop replication slots that nobody reads, or enlarge the disk.",
    ),
    FindingCode.LITTLE_SEEN: Known(
        "snapshots",
        (NOTICE,),
        "Old transactions and locks of other roles cannot be seen.",
        "Let this role read statistics.",
    ),
    # -- schema
    FindingCode.SCHEMA_MISSING: Known(
        "schema",
        (CRITICAL,),
        "Every call fails.",
        "Apply the schema.",
    ),
    HealthCode.SCHEMA_OUTDATED: Known(
        "schema",
        (CRITICAL,),
        "Calls and workers of this release refuse the database.",
        "Apply what is missing.",
    ),
    FindingCode.SCHEMA_NEWER: Known(
        "schema",
        (NOTICE,),
        "All works, but this release does not know what is new there.",
        "Upgrade busload here.",
    ),
    FindingCode.SCHEMA_UNRELEASED: Known(
        "schema",
        (CRITICAL,),
        "Every call refuses a schema from before the first release.",
        "Drop the schema, which deletes all commands, and apply it again.",
    ),
    FindingCode.TABLE_MISSING: Known(
        "schema",
        (CRITICAL,),
        "Calls that need the table fail.",
        "Somebody has dropped it. Restore it from a backup, or drop the whole schema and apply it again.",
    ),
    FindingCode.TABLE_UNLOGGED: Known(
        "schema",
        (CRITICAL,),
        "After a crash of the server the table is empty, and its commands are lost.",
        "Make it a logged table again.",
    ),
    FindingCode.ROW_SECURITY: Known(
        "schema",
        (CRITICAL,),
        "Policies hide rows of this table from this role, so commands are overlooked.",
        "Turn row security off for this table.",
    ),
    FindingCode.INDEX_MISSING: Known(
        "schema",
        (CRITICAL, DEGRADED),
        "Statements that should look a row up read the whole table. If the index is "
        "unique, duplicates are no longer refused.",
        "Create the index again.",
    ),
    FindingCode.INDEX_INVALID: Known(
        "schema",
        (DEGRADED,),
        "PostgreSQL does not use the index: statements read the whole table.",
        "Build the index anew.",
    ),
    FindingCode.TRIGGER_MISSING: Known(
        "schema",
        (CRITICAL,),
        "Counters of batches go wrong, batches do not complete, or limits are not kept.",
        "Create the trigger again.",
    ),
    FindingCode.TRIGGER_DISABLED: Known(
        "schema",
        (CRITICAL,),
        "Counters of batches go wrong, batches do not complete, or limits are not kept.",
        "Enable the trigger again. Batches that ended meanwhile were not counted.",
    ),
    FindingCode.FUNCTION_MISSING: Known(
        "schema",
        (CRITICAL,),
        "Statements and triggers that call the function fail.",
        "Create the function again.",
    ),
    # -- privileges
    FindingCode.PRIVILEGES_MISSING: Known(
        "privileges",
        (DEGRADED, CRITICAL),
        "Calls that need these rights fail with `permission denied`.",
        "As the owner of the schema, give the login the role that it needs: `busload schema grants`.",
    ),
    FindingCode.SUPERUSER: Known(
        "privileges",
        (NOTICE,),
        "PostgreSQL checks no rights of a superuser: whoever has this login may do everything on the server.",
        "Make a login for the application, give it a role of `busload schema grants`, and name it in the DSN.",
    ),
    # -- workers
    HealthCode.NO_WORKER: Known("workers", (DEGRADED, CRITICAL), "These commands wait until a worker comes.", _STARTS),
    HealthCode.COMMANDS_LATE: Known(
        "workers",
        (DEGRADED,),
        "The workers of this domain do not keep up, or do not get on.",
        "Ask why: `busload command explain` or `busload batch explain`; or start more workers.",
    ),
    HealthCode.WORKER_LOST: Known(
        "workers",
        (DEGRADED,),
        "Its commands run again only when another worker takes them back.",
        "If other workers run, wait for as long as a lease lasts; otherwise start one: `busload worker MODULE:BUS`.",
    ),
    HealthCode.FAILURES_IN_A_ROW: Known(
        "workers",
        (DEGRADED,),
        "Most likely a receiver is away, or a deploy is broken: attempts are used up.",
        "See which errors: `busload troubleshooting groups`; pause the domain meanwhile: `busload domain pause`.",
    ),
    HealthCode.STUCK_THREADS: Known("workers", (DEGRADED, CRITICAL), "Each stuck thread is one slot less.", _RESTART),
    HealthCode.POOL_EXHAUSTED: Known(
        "workers",
        (DEGRADED, CRITICAL),
        "Calls fail after `pool_timeout`.",
        "Raise `Settings.pool_size` to the number of handlers that use `ctx` at a time.",
    ),
    HealthCode.LOOP_BLOCKED: Known(
        "workers",
        (DEGRADED,),
        "Nothing else runs in that worker, and results are late.",
        "Its log says where. Write that handler with `def` instead of `async def`, or await what it calls.",
    ),
    HealthCode.STATION_ENDED: Known(
        "workers", (CRITICAL,), "The worker runs, but does only part of its work.", _RESTART
    ),
    HealthCode.NOT_RUNNING: Known("workers", (CRITICAL,), "This worker takes no commands.", _RESTART),
    FindingCode.WORKER_VERSIONS: Known(
        "workers",
        (NOTICE,),
        "During a deploy that is as it should be. Later on, a worker was forgotten.",
        "Deploy the same release everywhere.",
    ),
    # -- work
    FindingCode.OUTBOX_WAITS: Known(
        "work",
        (DEGRADED,),
        "No relay publishes these commands, so no worker hears of them.",
        "Run a worker with this broker, or let PostgreSQL deliver them.",
    ),
    FindingCode.SCHEDULED_OVERDUE: Known(
        "work",
        (DEGRADED,),
        "Workers move due commands to the queue: none of them does.",
        _STARTS,
    ),
    FindingCode.LEASES_LEFT: Known(
        "work",
        (DEGRADED,),
        "Nobody runs these commands, and nobody takes them back.",
        "Start a worker: its sweep takes them back. `busload worker MODULE:BUS`.",
    ),
    FindingCode.PERMITS_LEFT: Known(
        "work",
        (NOTICE,),
        "They do not count, but nobody tidies up: most likely no worker with limits runs.",
        "Start a worker: its sweep frees them. `busload worker MODULE:BUS`.",
    ),
    FindingCode.CANCEL_LEFT: Known(
        "work",
        (DEGRADED,),
        "Nothing of this batch runs or ends until its cancel is finished.",
        "Repeat the cancel, or start a worker, which goes on with it.",
    ),
    FindingCode.BATCH_HELD: Known(
        "work",
        (NOTICE,),
        "Nothing of it starts until somebody decides.",
        "Resume or cancel it.",
    ),
    FindingCode.BATCH_LEFT_OPEN: Known(
        "work",
        (NOTICE,),
        "An open batch never completes. Most likely the process that filled it has died.",
        "Seal it in your program, `bus.seal_batch`, or cancel what has not started.",
    ),
    FindingCode.BATCHES_STALLED: Known(
        "work",
        (NOTICE,),
        "They wait for nothing but a decision about their commands in troubleshooting.",
        "Decide by cause: `busload troubleshooting groups`.",
    ),
    FindingCode.DOMAIN_PAUSED: Known(
        "work",
        (NOTICE,),
        "Nothing starts there. Perhaps somebody forgot to resume it.",
        "Resume the domain.",
    ),
    HealthCode.SCHEDULES_LATE: Known(
        "work",
        (DEGRADED, CRITICAL),
        "Any worker fires any schedule that is due: none of them does.",
        "Start a worker. If workers run, their log says which schedule they cannot read, or what a middleware refuses.",
    ),
    FindingCode.SCHEDULE_PAUSED: Known(
        "work",
        (NOTICE,),
        "It fires nothing. Perhaps somebody forgot to resume it.",
        "Resume the schedule.",
    ),
    FindingCode.TROUBLESHOOTING_PILES_UP: Known(
        "work",
        (DEGRADED,),
        "These commands wait for a person, and nobody comes.",
        "Decide by cause: retry, complete or cancel.",
    ),
    HealthCode.PUBLISHING_FAILS: Known(
        "work",
        (DEGRADED, CRITICAL),
        "No worker hears of these commands.",
        "See what the broker says: `busload outbox ls`. Once it is mended, try again, or let PostgreSQL deliver.",
    ),
    # -- retention
    FindingCode.HISTORY_GROWS: Known(
        "retention",
        (NOTICE,),
        "Commands, executions and events are kept until you remove them.",
        "Remove what ended long ago, once a day, or let workers do it with `keep_for`.",
    ),
    # -- broker
    HealthCode.BROKER_UNREACHABLE: Known(
        "broker",
        (DEGRADED,),
        "Commands wait in the outbox, and workers that look into the database are slower.",
        "Check the broker and its URL. Meanwhile PostgreSQL can deliver.",
    ),
    FindingCode.BROKER_REFUSES: Known(
        "broker",
        (CRITICAL,),
        "Commands wait in the outbox until somebody changes the URL or the rights.",
        "Check user, password and rights in BUSLOAD_TRANSPORT_URL.",
    ),
}
