"""`busload doctor` at a shell: findings with their cures, an exit code, and few words if all is well."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.cli.conftest import NOWHERE, Busload
from tests.doctor.conftest import Patient, patient, ward

__all__ = ["patient", "ward"]  # fixtures


def test_the_exit_code_is_that_of_the_worst_finding(patient: Patient) -> None:
    well = patient.busload("doctor")
    assert (well.exit_code, well.stdout.splitlines()[0]) == (0, "HEALTHY")
    assert "In order: connection, settings, notifications, " in well.stdout
    patient.sql(f"ALTER DATABASE \"{patient.name}\" SET idle_session_timeout = '20s'")
    notice = patient.busload("doctor")
    assert (notice.exit_code, notice.stdout.splitlines()[0]) == (0, "HEALTHY")
    assert "NOTICE  TIMEOUT_TOO_SHORT  idle_session_timeout is 20 s, set for this database" in notice.stdout
    patient.sql("DROP INDEX busload.queue_ready")
    degraded = patient.busload("doctor")
    assert (degraded.exit_code, degraded.stdout.splitlines()[0]) == (1, "DEGRADED")
    said = degraded.stdout.splitlines()
    at = next(n for n, line in enumerate(said) if "INDEX_MISSING" in line)
    assert said[at] == "DEGRADED  INDEX_MISSING  The index queue_ready of busload.queue is missing."
    assert said[at + 2] == "    → Create the index again."
    assert said[at + 3].startswith("      CREATE INDEX CONCURRENTLY queue_ready")
    patient.sql("ALTER TABLE busload.execution DISABLE TRIGGER count_executions")
    critical = patient.busload("doctor", "--json")
    found = json.loads(critical.stdout)
    assert (critical.exit_code, found["state"]) == (2, "CRITICAL")
    assert [one["severity"] for one in found["findings"]] == ["CRITICAL", "DEGRADED", "NOTICE"]
    assert found["findings"][0]["sql"] == ["ALTER TABLE busload.execution ENABLE TRIGGER count_executions;"]


def test_quiet_is_silent_if_all_is_well(patient: Patient) -> None:
    patient.sql(f"ALTER DATABASE \"{patient.name}\" SET idle_session_timeout = '20s'")
    assert (patient.busload("doctor", "--quiet").exit_code, patient.busload("doctor", "--quiet").output) == (0, "")
    patient.sql("DROP INDEX busload.queue_ready")
    degraded = patient.busload("doctor", "--quiet")
    assert degraded.exit_code == 1
    assert "INDEX_MISSING" in degraded.stdout and "In order" not in degraded.stdout
    assert "TIMEOUT_TOO_SHORT" not in degraded.stdout


def test_a_database_that_is_away_or_refuses_us_is_the_finding(offline: Busload, dsn: str) -> None:
    for url, code in (
        (NOWHERE, "DATABASE_UNREACHABLE"),
        (make_conninfo(dsn, user="nobody_we_know"), "DATABASE_UNUSABLE"),
        (make_conninfo(dsn, dbname="nowhere"), "DATABASE_UNUSABLE"),
    ):
        away = offline("doctor", "--json", url=url)
        found = json.loads(away.stdout)
        assert (away.exit_code, found["state"]) == (2, "CRITICAL")
        assert [one["code"] for one in found["findings"]] == [code]
        assert {"schema", "work"} <= {one["check"] for one in found["skipped"]}
    said = offline("doctor").stdout
    assert "Not checked: settings, notifications, " in said and "The database cannot be asked." in said


def test_a_broker_whose_url_is_wrong_keeps_nobody_from_looking_at_the_rest(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUSLOAD_TRANSPORT_URL", "carrier-pigeon://roof")
    found = json.loads(patient.busload("doctor", "--json").stdout)
    assert [one["code"] for one in found["findings"]] == ["BROKER_REFUSES"]
    assert "schema" in found["checked"]


async def paused(patient: Patient) -> None:
    """A finding whose cure is one line."""
    async with patient.bus() as bus:
        await bus.domains.pause("payments")
        await bus.send("payments", "Debit")
    patient.sql("UPDATE busload.pause SET since = now() - interval '2 days'")


def lines_of(said: str) -> list[str]:
    """What a person would paste."""
    return [line.strip() for line in said.splitlines() if line.startswith("      busload ")]


async def test_lines_to_copy_name_the_database_that_was_looked_at(patient: Patient) -> None:
    await paused(patient)
    resume = "busload domain resume payments"
    by_variable = patient.busload("doctor").stdout
    assert lines_of(by_variable) == [resume]
    assert "The lines act on the database that BUSLOAD_DATABASE_URL names." in by_variable
    named = shlex.quote(patient.dsn)
    by_option = patient.elsewhere("doctor", "--dsn", patient.dsn)
    assert lines_of(by_option.stdout) == [f"{resume} --dsn {named}"]
    assert "The lines" not in by_option.stdout
    [found] = json.loads(patient.elsewhere("doctor", "--json", "--dsn", patient.dsn).stdout)["findings"]
    assert found["run"] == [f"{resume} --dsn {named}"]
    assert patient.elsewhere(*shlex.split(found["run"][0])[1:]).exit_code == 0
    assert "DOMAIN_PAUSED" not in patient.busload("doctor").stdout


async def test_lines_to_copy_leave_out_a_password(patient: Patient) -> None:
    await paused(patient)
    dsn = make_conninfo(patient.dsn, password="geheim it is", sslpassword="geheim as well")
    said = patient.elsewhere("doctor", "--dsn", dsn)
    [line] = lines_of(said.stdout)
    assert "geheim" not in said.output
    assert "The lines leave out the password of --dsn: put it into PGPASSWORD or a ~/.pgpass file." in said.stdout
    words = shlex.split(line)
    assert conninfo_to_dict(words[-1]) == conninfo_to_dict(patient.dsn)
    assert "geheim" not in patient.elsewhere("doctor", "--json", "--dsn", dsn).output
    assert patient.elsewhere(*words[1:]).exit_code == 0


async def test_lines_in_a_sentence_name_the_database_as_well(patient: Patient) -> None:
    async with patient.bus() as bus:
        await bus.send("payments", "Debit")
    patient.sql("UPDATE busload.command SET created_at = now() - interval '10 minutes'")
    [found] = json.loads(patient.elsewhere("doctor", "--json", "--dsn", patient.dsn).stdout)["findings"]
    assert f"`busload worker MODULE:BUS --domains DOMAIN --dsn {shlex.quote(patient.dsn)}`" in found["cure"]


async def test_lines_to_copy_name_the_application_that_was_given(
    patient: Patient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop_of_the_doctor.py").write_text(
        f"from busload import CommandBus\n\nbus = CommandBus({patient.dsn!r})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    await paused(patient)
    patient.sql("UPDATE busload.command SET created_at = now() - interval '10 minutes'")
    said = patient.elsewhere("doctor", "--bus", "shop_of_the_doctor:bus").stdout
    assert lines_of(said) == ["busload domain resume payments --bus shop_of_the_doctor:bus"]
    assert "The lines" not in said
    patient.sql("DELETE FROM busload.pause")
    said = patient.elsewhere("doctor", "--bus", "shop_of_the_doctor:bus").stdout
    assert lines_of(said) == ["busload worker shop_of_the_doctor:bus --domains payments"]
