"""Every fault that somebody planted is named by the doctor, alone, and gone once its cure is applied."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from busload import BatchCommand
from busload.doctor import DoctorSettings, Severity
from busload.doctor.facts import read
from busload.doctor.finding import CHECKS
from busload.postgres.plan import Plan, Savepoint
from busload.postgres.schema import migrate
from busload.testing import TestServer
from tests.chaos.harness import folder
from tests.doctor.conftest import Patient
from tests.given import DOMAIN, LOCKED_OUT, Given, until
from tests.pgbouncer import PgBouncer

Fault = Callable[[Patient], AbstractAsyncContextManager[None]]
FAULTS: dict[str, tuple[str, Severity, Fault]] = {}
AT_ONCE = timedelta(milliseconds=1)
NOTICE, DEGRADED, CRITICAL = Severity


def fault(code: str, severity: Severity) -> Callable[[Callable[[Patient], AsyncIterator[None]]], None]:
    def keep(plant: Callable[[Patient], AsyncIterator[None]]) -> None:
        FAULTS[plant.__name__] = code, severity, asynccontextmanager(plant)

    return keep


def by_sql(name: str, code: str, severity: Severity, *statements: str, **settings: object) -> None:
    """A fault that statements plant. `{db}` is the database; `server:` begins what only a reload brings about."""

    async def plant(patient: Patient) -> AsyncIterator[None]:
        patient.settings = DoctorSettings(**settings)  # type: ignore[arg-type]
        of_server = [each.removeprefix("server:") for each in statements if each.startswith("server:")]
        for setting in of_server:
            patient.sql(f"ALTER SYSTEM SET {setting}", "SELECT pg_reload_conf()")
        patient.sql(*[each.format(db=f'"{patient.name}"') for each in statements if not each.startswith("server:")])
        try:
            yield
        finally:
            for setting in of_server:
                patient.sql(f"ALTER SYSTEM RESET {setting.partition(' ')[0]}", "SELECT pg_reload_conf()")

    FAULTS[name] = code, severity, asynccontextmanager(plant)


SERVED = """INSERT INTO busload.worker (name, domains, concurrency, lease_for)
            VALUES ('given', '{payments}', 10, '1 hour')"""
"""A worker that lives, though no process is behind it: commands that are ready are no fault then."""

by_sql("fsync", "FSYNC_OFF", CRITICAL, "server:fsync = off")
by_sql("full_page_writes", "FULL_PAGE_WRITES_OFF", CRITICAL, "server:full_page_writes = off")
by_sql("autovacuum", "AUTOVACUUM_OFF", DEGRADED, "server:autovacuum = off")
by_sql("synchronous_commit", "SYNCHRONOUS_COMMIT_OFF", DEGRADED, "ALTER DATABASE {db} SET synchronous_commit = off")
by_sql("track_counts", "TRACK_COUNTS_OFF", DEGRADED, "ALTER DATABASE {db} SET track_counts = off")
by_sql("triggers_off", "TRIGGERS_OFF", CRITICAL, "ALTER DATABASE {db} SET session_replication_role = replica")
by_sql("read_only", "READ_ONLY", CRITICAL, "ALTER DATABASE {db} SET default_transaction_read_only = on")
by_sql(
    "timeout_of_role",
    "TIMEOUT_TOO_SHORT",
    DEGRADED,
    "ALTER ROLE CURRENT_USER IN DATABASE {db} SET statement_timeout = '5s'",
)
by_sql("idle_timeout", "TIMEOUT_TOO_SHORT", NOTICE, "ALTER DATABASE {db} SET idle_session_timeout = '20s'")
by_sql("time_zone", "TIME_ZONE_UNKNOWN", NOTICE, "ALTER DATABASE {db} SET timezone = '<+03>-3'")
by_sql("table_not_vacuumed", "TABLE_NOT_VACUUMED", DEGRADED, "ALTER TABLE busload.queue SET (autovacuum_enabled = off)")
by_sql("no_schema", "SCHEMA_MISSING", CRITICAL, "DROP SCHEMA busload CASCADE")
by_sql("no_index", "INDEX_MISSING", DEGRADED, "DROP INDEX busload.queue_ready")
by_sql("no_unique_index", "INDEX_MISSING", CRITICAL, "DROP INDEX busload.pause_of_domain")
by_sql("no_primary_key", "INDEX_MISSING", CRITICAL, "ALTER TABLE busload.lease DROP CONSTRAINT lease_pkey")
by_sql("no_unique_key", "INDEX_MISSING", CRITICAL, "ALTER TABLE busload.command DROP CONSTRAINT command_once")
by_sql(
    "invalid_index",
    "INDEX_INVALID",
    DEGRADED,
    "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'busload.lease_of_worker'::regclass",
)
by_sql("no_trigger", "TRIGGER_MISSING", CRITICAL, "DROP TRIGGER count_events ON busload.event")
by_sql(
    "disabled_trigger",
    "TRIGGER_DISABLED",
    CRITICAL,
    "ALTER TABLE busload.execution DISABLE TRIGGER count_executions",
)
by_sql("no_function", "FUNCTION_MISSING", CRITICAL, "DROP FUNCTION busload.is_open")
by_sql("unlogged", "TABLE_UNLOGGED", CRITICAL, "ALTER TABLE busload.stopping SET UNLOGGED")
by_sql(
    "dead_rows",
    "DEAD_ROWS",
    DEGRADED,
    "INSERT INTO busload.stopping (command, attempt) SELECT n, 1 FROM generate_series(1, 500) AS n",
    "DELETE FROM busload.stopping",
    "SELECT pg_stat_force_next_flush()",
    "SELECT 1",
    dead_rows=200,
)


@fault("SCHEMA_OUTDATED", CRITICAL)
async def old_schema(patient: Patient) -> AsyncIterator[None]:
    patient.sql("DROP SCHEMA busload CASCADE")
    patient.database.perform(migrate.migrate(migrate.MIGRATIONS[:-1]))
    yield


@fault("OLD_TRANSACTION", DEGRADED)
async def old_transaction(patient: Patient) -> AsyncIterator[None]:
    patient.settings = DoctorSettings(transaction_after=AT_ONCE)
    with psycopg.connect(patient.dsn, application_name="report") as conn:
        conn.execute("SELECT count(*) FROM busload.command")
        found = await patient.is_found("OLD_TRANSACTION")
        assert f"Session {conn.info.backend_pid} of postgres, application 'report'" in found.findings[0].found
        assert "idle in transaction, its last statement began" in found.findings[0].found
        try:
            yield
        finally:
            conn.close()


@fault("PREPARED_TRANSACTION", DEGRADED)
async def prepared_transaction(patient: Patient) -> AsyncIterator[None]:
    patient.settings = DoctorSettings(transaction_after=AT_ONCE)
    name = f"it's {patient.name}"
    patient.sql("BEGIN", "CREATE TABLE left_behind ()", f"PREPARE TRANSACTION '{name.replace(chr(39), chr(39) * 2)}'")
    yield


@fault("SLOT_LEFT", DEGRADED)
async def slot_left(patient: Patient) -> AsyncIterator[None]:
    patient.settings = DoctorSettings(slot_bytes=1)
    patient.sql("SELECT pg_create_physical_replication_slot('forgotten', true)", "CREATE TABLE written ()")
    yield
    assert patient.database.rows("SELECT slot_name FROM pg_replication_slots") == []


@fault("LOCK_WAIT", DEGRADED)
async def lock_wait(patient: Patient) -> AsyncIterator[None]:
    patient.settings = DoctorSettings(lock_after=AT_ONCE)
    with psycopg.connect(patient.dsn, application_name="holder") as holder, psycopg.connect(patient.dsn) as waiter:
        holder.execute("SELECT pg_advisory_lock(1)")
        thread = threading.Thread(target=waiter.execute, args=["SELECT pg_advisory_lock(1)"])
        thread.start()
        until(lambda: patient.database.rows(LOCKED_OUT))
        found = await patient.is_found("LOCK_WAIT")
        assert f"which session {holder.info.backend_pid}, application 'holder' holds" in found.findings[0].found
        try:
            yield
        finally:
            thread.join()
            holder.close()


@fault("CONNECTIONS_SCARCE", DEGRADED)
async def connections_scarce(patient: Patient) -> AsyncIterator[None]:
    patient.settings = DoctorSettings(connections_share=0.5)
    with ExitStack() as hogs:
        conns = [hogs.enter_context(psycopg.connect(patient.dsn, application_name="hog's")) for _ in range(25)]
        try:
            yield
        finally:
            for conn in conns:
                conn.close()


@fault("OUTBOX_WAITS", DEGRADED)
async def outbox_waits(patient: Patient) -> AsyncIterator[None]:
    await _sent(patient)
    patient.sql(
        """WITH load AS (DELETE FROM busload.queue RETURNING *)
           INSERT INTO busload.outbox (lo, hi, domain, transport, since, due_at)
           SELECT lo, hi, domain, 'rabbitmq', now() - interval '1 hour', now() - interval '1 hour' FROM load"""
    )
    yield


@fault("SCHEDULED_OVERDUE", DEGRADED)
async def scheduled_overdue(patient: Patient) -> AsyncIterator[None]:
    await _sent(patient, run_at=datetime.now(UTC) + timedelta(hours=1))
    patient.sql("UPDATE busload.scheduled SET run_at = now() - interval '10 minutes'")
    yield


@fault("NO_WORKER", CRITICAL)
async def no_worker(patient: Patient) -> AsyncIterator[None]:
    await _sent(patient)
    patient.sql("DELETE FROM busload.worker", "UPDATE busload.command SET created_at = now() - interval '10 minutes'")
    yield


@fault("WORKER_LOST", DEGRADED)
async def worker_lost(patient: Patient) -> AsyncIterator[None]:
    async with patient.given() as given:
        await given.batch(2)
        worker = given.registered_worker()
        given.claimed(2, by=worker)
        given.died(worker)
    yield


@fault("LEASES_LEFT", DEGRADED)
async def leases_left(patient: Patient) -> AsyncIterator[None]:
    async with patient.given() as given:
        await given.batch(2)
        worker = given.registered_worker()
        given.claimed(2, by=worker)
        patient.sql("UPDATE busload.worker SET stopped_at = now()")
    yield


@fault("PERMITS_LEFT", NOTICE)
async def permits_left(patient: Patient) -> AsyncIterator[None]:
    patient.sql(
        "INSERT INTO busload.permit (limit_name, limit_subject, worker, command, since)"
        " VALUES ('crm', '', 4711, 1, now() - interval '1 hour')"
    )
    yield


@fault("BATCH_HELD", NOTICE)
async def batch_held(patient: Patient) -> AsyncIterator[None]:
    async with _batch(patient) as (given, batch_id):
        await given.bus.hold_batch(DOMAIN, batch_id, reason="it's late")
    patient.sql("UPDATE busload.batch SET held_at = now() - interval '2 days'")
    yield


@fault("BATCH_LEFT_OPEN", NOTICE)
async def batch_left_open(patient: Patient) -> AsyncIterator[None]:
    patient.sql(SERVED)
    async with patient.bus() as bus:
        batch = await bus.open_batch(DOMAIN, checkpoint_size=1).__aenter__()
        await batch.add("Debit")
    patient.sql("UPDATE busload.batch SET created_at = now() - interval '2 days'")
    yield


@fault("CANCEL_LEFT", DEGRADED)
async def cancel_left(patient: Patient) -> AsyncIterator[None]:
    async with _batch(patient):
        patient.sql(
            """UPDATE busload.batch SET canceled_at = now() - interval '1 hour',
                                        canceling_until = now() - interval '1 hour'"""
        )
    yield


@fault("DOMAIN_PAUSED", NOTICE)
async def domain_paused(patient: Patient) -> AsyncIterator[None]:
    await _sent(patient)
    async with patient.bus() as bus:
        await bus.domains.pause(DOMAIN)
    patient.sql("UPDATE busload.pause SET since = now() - interval '2 days'")
    yield


@fault("SCHEDULES_LATE", CRITICAL)
async def schedules_overdue(patient: Patient) -> AsyncIterator[None]:
    await _scheduled(patient)
    patient.sql("UPDATE busload.schedule SET next_due_at = now() - interval '10 minutes'")
    yield


@fault("SCHEDULE_PAUSED", NOTICE)
async def schedule_paused(patient: Patient) -> AsyncIterator[None]:
    await _scheduled(patient)
    patient.sql("UPDATE busload.schedule SET paused_at = now() - interval '2 days'")
    yield


async def _scheduled(patient: Patient) -> None:
    patient.sql(SERVED)
    async with patient.bus() as bus:
        bus.schedule("nightly", cron="0 2 * * *", command=BatchCommand("Debit"), domain=DOMAIN)
        await bus.schedules.sync()


@fault("HISTORY_GROWS", NOTICE)
async def history_grows(patient: Patient) -> AsyncIterator[None]:
    async with _batch(patient) as (given, batch_id):
        await given.bus.cancel_batch(DOMAIN, batch_id, reason="old")
    ago = "now() - interval '100 days'"
    patient.sql(f"UPDATE busload.batch SET completed_at = {ago}", f"UPDATE busload.event SET at = {ago}")
    yield


async def _sent(patient: Patient, **options: object) -> None:
    patient.sql(SERVED)
    async with patient.bus() as bus:
        await bus.send(DOMAIN, "Debit", **options)  # type: ignore[arg-type]


@asynccontextmanager
async def _batch(patient: Patient) -> AsyncIterator[tuple[Given, UUID]]:
    patient.sql(SERVED)
    async with patient.given() as given:
        yield given, await given.batch(3)


@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_is_found_with_a_cure_that_makes_it_green(patient: Patient, name: str) -> None:
    code, severity, plant = FAULTS[name]
    async with plant(patient):
        found = await patient.is_found(code)
        [finding] = found.findings
        assert (finding.severity, bool(finding.sql or finding.run)) == (severity, True)
        async with patient.cured(finding):
            assert (await patient.is_found()).state == "HEALTHY"


async def test_a_new_database_is_green_and_everything_was_looked_at(patient: Patient) -> None:
    found = await patient.diagnosis()
    assert (found.state, found.findings, found.skipped) == ("HEALTHY", (), ())
    assert found.checked == tuple(check for check in CHECKS if check != "broker")


async def test_commands_that_wait_for_a_person_are_found_until_somebody_decides(patient: Patient) -> None:
    async with patient.given() as given:
        await given.in_troubleshooting(3)
    patient.sql(
        "UPDATE busload.troubleshooting SET since = now() - interval '2 days'",
        "UPDATE busload.batch SET stalled_at = now() - interval '2 days'",
    )
    found = await patient.is_found("TROUBLESHOOTING_PILES_UP", "BATCHES_STALLED")
    assert found.findings[0].found == "3 commands wait for a person in payments, the oldest for 2 d."
    preview = found.findings[0].run[-1]
    assert preview.endswith(" --dry-run")
    await patient.is_found("TROUBLESHOOTING_PILES_UP", "BATCHES_STALLED")
    async with patient.worker():
        done = patient.busload(*patient.words(preview.removesuffix(" --dry-run")))
        assert done.exit_code == 0
        await patient.is_found()


@pytest.fixture
def role(patient: Patient) -> Iterator[str]:
    """A role that may do nothing but log in."""
    name = f"app_{patient.name}"
    patient.sql(f"CREATE ROLE {name} LOGIN")
    yield name
    patient.sql(f"DROP OWNED BY {name}", f"DROP ROLE {name}")


@pytest.fixture
def roles(patient: Patient) -> Iterator[None]:
    """The roles of `busload schema grants` belong to the server, so they are taken away again."""
    yield
    for name in ("busload_sender", "busload_worker", "busload_operator", "busload_reader", "shop_jobs"):
        if patient.database.rows(f"SELECT 1 FROM pg_roles WHERE rolname = '{name}'"):
            patient.sql(f"DROP OWNED BY {name}", f"DROP ROLE {name}")


@pytest.mark.usefixtures("roles")
async def test_a_login_without_rights_becomes_green_by_its_role(patient: Patient, role: str) -> None:
    owner, patient.dsn = patient.dsn, make_conninfo(patient.dsn, user=role)
    found = await patient.diagnosis()
    by_code = {one.code.value: one for one in found.findings}
    assert set(by_code) == {"PRIVILEGES_MISSING", "LITTLE_SEEN"}
    assert by_code["PRIVILEGES_MISSING"].severity is CRITICAL
    assert {one.check for one in found.skipped} >= {"schema", "workers", "work", "retention"}
    assert "permission denied" in next(one.why for one in found.skipped if one.check == "work")
    make, give = by_code["PRIVILEGES_MISSING"].run
    [weak] = patient.elsewhere("doctor", "--dsn", patient.dsn).stdout.split("busload schema grants --apply")[1:]
    assert weak.splitlines()[0] == " --dsn 'DSN of the owner'", "and not that of the login, which could not do it"
    patient.dsn = owner
    done = patient.busload(*patient.words(make))
    assert done.exit_code == 0, done.output
    patient.dsn = make_conninfo(owner, user=role)
    patient.sql(*by_code["LITTLE_SEEN"].sql)
    [missing] = (await patient.is_found("PRIVILEGES_MISSING")).findings
    assert missing.sql == (f'GRANT "busload_worker" TO "{role}";',), "the roles are there now"
    assert give == f"psql 'DSN of the owner' -c '{missing.sql[0]}'"
    patient.sql(*missing.sql)
    assert (await patient.is_found()).state == "HEALTHY"


@pytest.mark.usefixtures("roles")
@pytest.mark.parametrize("purpose", ["sender", "worker", "operator", "reader"])
async def test_a_login_is_judged_by_what_its_role_needs_and_is_cured_by_renewing_the_role(
    patient: Patient, role: str, purpose: str
) -> None:
    options = ["--worker", "shop_jobs"] if purpose == "worker" else []
    assert patient.busload("schema", "grants", "--apply", *options).exit_code == 0
    group = options[-1] if options else f"busload_{purpose}"
    patient.sql(f"GRANT pg_read_all_stats, {group} TO {role}")
    owner, patient.dsn = patient.dsn, make_conninfo(patient.dsn, user=role)
    await patient.is_found()
    patient.sql(f"REVOKE SELECT ON busload.migration FROM {group}")
    if purpose == "worker":
        patient.sql(f"REVOKE INSERT ON busload.lease FROM {group}")
    found = (await patient.diagnosis()).findings
    told = "INSERT, SELECT on lease, migration" if purpose == "worker" else "SELECT on migration"
    assert [(one.code, one.found) for one in found] == [
        ("PRIVILEGES_MISSING", f"The login {role}, which has the role {group}, lacks {told}.")
    ]
    renew = " ".join(["busload schema grants --apply", *options, "--dsn 'DSN of the owner'"])
    assert (found[0].sql, found[0].run) == ((), (renew,))
    patient.dsn = owner
    assert patient.busload(*patient.words(found[0].run[0])).exit_code == 0
    patient.dsn = make_conninfo(owner, user=role)
    await patient.is_found()


@pytest.mark.usefixtures("roles")
async def test_a_login_with_rights_of_its_own_is_judged_by_the_role_that_has_them_or_by_all(
    patient: Patient, role: str
) -> None:
    patient.sql(
        f"GRANT pg_read_all_stats TO {role}",
        f"GRANT USAGE ON SCHEMA busload TO {role}",
        f"GRANT SELECT ON ALL TABLES IN SCHEMA busload TO {role}",
        f"GRANT EXECUTE ON FUNCTION busload.outlook, busload.jobs_waiting TO {role}",
    )
    owner, patient.dsn = patient.dsn, make_conninfo(patient.dsn, user=role)
    await patient.is_found()
    patient.sql(f"GRANT INSERT ON busload.queue TO {role}")
    [more] = (await patient.is_found("PRIVILEGES_MISSING")).findings
    assert more.severity is CRITICAL and "EXECUTE of begin_canary, decide, merge_events" in more.found
    patient.sql(
        f"GRANT ALL ON ALL TABLES IN SCHEMA busload TO {role}",
        f"GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA busload TO {role}",
        f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA busload TO {role}",
    )
    green = await patient.is_found()
    assert {one.check for one in green.skipped} <= {"disk"}, "its folder is the superuser's to see"
    patient.sql("ALTER TABLE busload.queue ENABLE ROW LEVEL SECURITY")
    [hidden] = (await patient.is_found("ROW_SECURITY")).findings
    patient.sql(
        *hidden.sql, "REVOKE INSERT ON busload.queue FROM PUBLIC", f"REVOKE INSERT ON busload.queue FROM {role}"
    )
    [writes] = (await patient.is_found("PRIVILEGES_MISSING")).findings
    assert (writes.severity, writes.found) == (DEGRADED, f"The login {role} lacks INSERT on queue.")
    patient.dsn = owner
    await patient.is_found()


@pytest.mark.usefixtures("roles")
async def test_a_superuser_beside_the_roles_is_noted_until_the_dsn_names_a_login(patient: Patient, role: str) -> None:
    await patient.is_found()
    assert patient.busload("schema", "grants", "--apply").exit_code == 0
    [superuser] = (await patient.is_found("SUPERUSER")).findings
    assert superuser.severity is NOTICE
    assert "give it a role of `busload schema grants`, and name it in the DSN" in superuser.cure
    patient.sql(f"GRANT pg_read_all_stats, busload_worker TO {role}")
    patient.dsn = make_conninfo(patient.dsn, user=role)
    await patient.is_found()


async def test_behind_a_pooler_notifications_are_lost_and_a_direct_dsn_hears_them(patient: Patient) -> None:
    patient.settings = DoctorSettings(notify_within=timedelta(milliseconds=300))
    direct = patient.dsn
    with folder() as path, PgBouncer(Path(path) / "pgbouncer", direct) as pooler:
        patient.dsn = pooler.url
        [found] = (await patient.is_found("NOTIFICATIONS_LOST")).findings
        assert found.found.endswith("a pooler stands between us and the server.")
        assert "Give workers a DSN of the server itself" in found.cure
        patient.sql(f'ALTER DATABASE "{patient.name}" SET default_transaction_isolation = serializable')
        patient.dsn = direct
        assert await patient.codes() == [], "on connections of our own we choose the isolation level"
        patient.dsn = pooler.url
        await pooler.restart()
        isolation = next(one for one in (await patient.diagnosis()).findings if one.code == "ISOLATION")
        patient.sql(*isolation.sql)
        patient.dsn = direct
    patient.settings = DoctorSettings()
    await patient.is_found()


async def test_a_database_in_another_encoding_is_refused_with_how_to_make_one(
    ward: TestServer, patient: Patient
) -> None:
    name = f"{patient.name}_ascii"
    patient.sql(f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' TEMPLATE template0")
    patient_dsn, patient.dsn = patient.dsn, make_conninfo(patient.dsn, dbname=name)
    try:
        done = patient.busload("doctor", "--json")
        assert done.exit_code == 2
        assert '"code":"ENCODING"' in done.stdout and '"code":"SCHEMA_MISSING"' in done.stdout
        assert f"createdb -E UTF8 -T template0 {name}_utf8" in done.stdout
    finally:
        patient.dsn = patient_dsn
        patient.sql(f"DROP DATABASE {name} WITH (FORCE)")


async def test_a_broker_that_is_away_or_refuses_us_is_found(patient: Patient) -> None:
    patient.transport = "redis://127.0.0.1:1"
    [away] = (await patient.is_found("BROKER_UNREACHABLE")).findings
    assert away.severity is DEGRADED and "redis at redis://127.0.0.1:1 cannot be reached" in away.found
    patient.transport = make_url(make_conninfo(patient.dsn, dbname="nowhere"))
    [refuses] = (await patient.is_found("BROKER_REFUSES")).findings
    assert "does not exist" in refuses.found
    patient.transport = make_url(patient.dsn)
    found = await patient.is_found()
    assert "broker" in found.checked


def make_url(dsn: str) -> str:
    parts = psycopg.conninfo.conninfo_to_dict(dsn)
    return f"postgresql://{parts['user']}@/{parts['dbname']}?host={parts['host']}&port={parts['port']}"


async def test_the_doctor_writes_nothing_and_asks_little(patient: Patient) -> None:
    asked: list[str] = []

    def noted(plan: Plan[Any]) -> Plan[Any]:
        """The plan, with a note of each of its statements."""
        step = next(plan)
        while True:
            asked.extend([] if isinstance(step, Savepoint) else [type(step).__name__])
            answer = yield Savepoint(noted(step.plan)) if isinstance(step, Savepoint) else step
            try:
                step = plan.send(answer)
            except StopIteration as done:
                return done.value

    async with patient.bus() as bus:
        await bus.create_batch(DOMAIN, [BatchCommand("Debit")] * 3)
        before = patient.database.dump()
        assert (await bus.doctor()).state == "DEGRADED"
    assert patient.database.dump() == before
    assert patient.database.perform(noted(read(DoctorSettings()))).skipped == []
    assert len(asked) <= 14
