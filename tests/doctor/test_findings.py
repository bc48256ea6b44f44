"""What the doctor makes of facts, where a test cannot bring them about: full disks, old servers, wrong clocks."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from busload import Settings
from busload.doctor import Diagnosis, DoctorSettings, FindingCode, Severity
from busload.doctor.catalog import KNOWN, finding
from busload.doctor.facts import AliveWorker, Connections, Disk, Facts, Found, Holder, Server, Setting, Table
from busload.doctor.finding import CHECKS
from busload.doctor.findings import examine
from busload.doctor.findings_of_server import changed
from busload.doctor.findings_of_work import judge_health
from busload.health import Health, HealthCode, HealthReason, HealthState
from busload.postgres.schema.migrate import MIGRATIONS

NOW = datetime(2026, 11, 18, 12, tzinfo=UTC)
SERVER = Server(
    version=180006,
    in_recovery=False,
    now=NOW,
    role="app",
    is_superuser=False,
    by_network=True,
    database="shop",
    backend_pid=1,
    sees_all=True,
    notify_queue=0.0,
    frozen_age=1000,
)
GIB = 1024**3


def codes(facts: Facts, thresholds: DoctorSettings = DoctorSettings()) -> list[tuple[str, str]]:  # noqa: B008
    return [(found.code.value, found.severity.value) for found in examine(facts, thresholds)]


def schema(*versions: int) -> dict[str, Any]:
    table = Table("migration", False, False, False, 0, 0, None)
    applied = [(one.version, one.name) for one in MIGRATIONS if not versions or one.version in versions]
    return {"tables": [table], "objects": [Found("schema", "busload", "", True)], "migrations": applied}


@pytest.mark.parametrize(
    ("facts", "wanted"),
    [
        (Facts(server=replace(SERVER, version=140012)), ("SERVER_TOO_OLD", "CRITICAL")),
        (Facts(server=replace(SERVER, in_recovery=True), settings={}), ("IN_RECOVERY", "CRITICAL")),
        (Facts(server=replace(SERVER, notify_queue=0.5)), ("NOTIFICATIONS_PILE_UP", "DEGRADED")),
        (Facts(server=replace(SERVER, frozen_age=600_000_000)), ("WRAPAROUND", "DEGRADED")),
        (Facts(server=replace(SERVER, frozen_age=1_600_000_000)), ("WRAPAROUND", "CRITICAL")),
        (Facts(server=SERVER, disk=Disk("/data", 5 * GIB, 100 * GIB)), ("DISK_LOW", "DEGRADED")),
        (Facts(server=SERVER, disk=Disk("/data", GIB // 2, 100 * GIB)), ("DISK_LOW", "CRITICAL")),
        (Facts(server=SERVER, clock_ahead=-6.0), ("CLOCK_DIFFERS", "DEGRADED")),
        (
            Facts(server=SERVER, workers=[AliveWorker("w", NOW, NOW.timestamp() + 60, None)]),
            ("WORKER_CLOCK_DIFFERS", "DEGRADED"),
        ),
        (
            Facts(server=SERVER, workers=[AliveWorker("a", NOW, None, "0.1.0"), AliveWorker("b", NOW, None, "0.2.0")]),
            ("WORKER_VERSIONS", "NOTICE"),
        ),
        (
            Facts(
                server=SERVER,
                settings={"max_connections": Setting("20", "default")},
                connections=Connections(4, 0, None),
                workers=[AliveWorker("w", NOW, None, None)],
            ),
            ("CONNECTIONS_TOO_FEW", "NOTICE"),
        ),
        (
            Facts(
                server=SERVER,
                settings={"max_connections": Setting("20", "default")},
                connections=Connections(19, 0, None),
            ),
            ("CONNECTIONS_SCARCE", "CRITICAL"),
        ),
        (
            Facts(
                server=SERVER, holders=[Holder("standby", "10.0.0.7", "replica", "rep", "20000000", None, None, None)]
            ),
            ("STANDBY_HOLDS_SNAPSHOT", "DEGRADED"),
        ),
        (Facts(server=SERVER, heard=False), ("NOTIFICATIONS_LOST", "DEGRADED")),
    ],
    ids=lambda value: value[0] + value[1] if isinstance(value, tuple) else "",
)
def test_facts_that_no_test_can_bring_about_are_judged(facts: Facts, wanted: tuple[str, str]) -> None:
    assert codes(facts) == [wanted]


def test_what_is_as_it_should_be_is_no_finding() -> None:
    facts = Facts(
        server=replace(SERVER, notify_queue=0.49, frozen_age=499_999_999),
        settings={"max_connections": Setting("100", "default"), "statement_timeout": Setting("30000", "user")},
        connections=Connections(10, 5, ("app", 3)),
        disk=Disk("/data", 50 * GIB, 100 * GIB),
        clock_ahead=4.9,
        workers=[AliveWorker("a", NOW, NOW.timestamp() - 4, "0.1.0"), AliveWorker("b", NOW, None, "0.1.0")],
        heard=True,
    )
    assert codes(facts) == []


def test_a_schema_from_another_time_is_told_apart() -> None:
    newer = schema()
    newer["migrations"].append((99, "future"))
    seen = codes(Facts(server=SERVER, **newer))
    assert ("SCHEMA_NEWER", "NOTICE") in seen and ("TABLE_MISSING", "CRITICAL") in seen, "and it is looked into"
    assert codes(Facts(server=SERVER, **schema(1, 2))) == [("SCHEMA_OUTDATED", "CRITICAL")]
    other = schema()
    other["migrations"][0] = (1, "first_design")
    assert codes(Facts(server=SERVER, **other)) == [("SCHEMA_UNRELEASED", "CRITICAL")]


def test_a_superuser_is_found_who_comes_by_the_network() -> None:
    """Whoever comes by the socket of an embedded server is its superuser."""
    superuser = replace(SERVER, is_superuser=True)
    assert ("SUPERUSER", "NOTICE") in codes(Facts(server=superuser, **schema()))
    assert "SUPERUSER" not in dict(codes(Facts(server=replace(superuser, by_network=False), **schema())))
    assert "SUPERUSER" not in dict(codes(Facts(server=SERVER, **schema())))


@pytest.mark.parametrize(
    ("source", "context", "statements"),
    [
        ("database user", "user", ('ALTER ROLE "app" IN DATABASE "shop" RESET fsync;',)),
        ("user", "user", ('ALTER ROLE "app" RESET fsync;',)),
        ("database", "user", ('ALTER DATABASE "shop" RESET fsync;',)),
        ("configuration file", "user", ('ALTER ROLE "app" SET fsync = on;',)),
        ("configuration file", "sighup", ("ALTER SYSTEM SET fsync = on;", "SELECT pg_reload_conf();")),
        ("command line", "sighup", ()),
        ("client", "user", ()),
    ],
)
def test_a_setting_is_changed_where_it_was_made(source: str, context: str, statements: tuple[str, ...]) -> None:
    words, found = changed("fsync", Setting("off", source, context), "on", SERVER)
    assert found == statements
    assert "fsync" in words


def test_every_reason_of_the_health_has_its_cure_and_those_of_the_database_are_the_doctors() -> None:
    for code in HealthCode:
        for state in (HealthState.DEGRADED, HealthState.CRITICAL):
            found = list(judge_health(Health.of([HealthReason(code, state, "so", domain="it's here")])))
            if code.value.startswith(("DATABASE_", "SCHEMA_")):
                assert found == []
            else:
                assert found[0].code is code and found[0].cure and found[0].why
    [late] = judge_health(Health.of([HealthReason(HealthCode.NO_WORKER, HealthState.CRITICAL, "so", domain="a b")]))
    assert (late.severity, late.run) == (Severity.CRITICAL, ("busload worker MODULE:BUS --domains 'a b'",))


def test_every_code_is_known_and_made_by_a_known_check() -> None:
    assert set(FindingCode) | set(HealthCode) == set(KNOWN)
    assert {known.check for known in KNOWN.values()} == set(CHECKS)
    assert all(known.why.endswith(".") and known.cure.rstrip("`").endswith(".") for known in KNOWN.values())


def test_the_worst_finding_decides_and_comes_first() -> None:
    notice = finding(FindingCode.BATCH_HELD, "a")
    degraded, critical = finding(FindingCode.LOCK_WAIT, "b"), finding(FindingCode.READ_ONLY, "c")
    assert Diagnosis.of([notice], CHECKS).state is HealthState.HEALTHY
    assert Diagnosis.of([notice, degraded], CHECKS).state is HealthState.DEGRADED
    worst = Diagnosis.of([notice, degraded, critical], CHECKS)
    assert (worst.state, worst.findings) == (HealthState.CRITICAL, (critical, degraded, notice))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"dead_rows": 0}, "dead_rows must be a whole number from 1 on, found 0"),
        ({"lock_after": timedelta(0)}, "lock_after must be more than zero"),
        ({"connections_share": 1.5}, "connections_share must be more than 0 and at most 1, found 1.5"),
    ],
)
def test_thresholds_that_cannot_work_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DoctorSettings(**wrong)
    with pytest.raises(ValueError, match="doctor must be of type DoctorSettings"):
        Settings(doctor=wrong)  # type: ignore[arg-type]
