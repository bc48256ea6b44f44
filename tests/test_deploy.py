"""The files in deploy/: linters accept them, every command in them exists, and their processes really run and stop."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from click.testing import CliRunner

from busload import BatchCommand, SyncCommandBus
from busload.cli import main
from busload.testing import TestServer
from tests.given import DOMAIN, Database, Given, until
from tests.servers import free_ports

DEPLOY = Path(__file__).parents[1] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
BIN = Path(sys.executable).parent


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def dockerfile(instruction: str) -> list[str]:
    """The words of an instruction of the last stage that is written as a list."""
    *_, found = re.findall(rf"\b{instruction} (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    words: list[str] = json.loads(found)
    return words


def setting(unit: Path, name: str) -> str:
    [found] = re.findall(rf"^{name}=(.*)$", unit.read_text(), re.MULTILINE)
    return str(found)


def procfile() -> dict[str, str]:
    return dict(re.findall(r"^(\w+): (.*)$", (DEPLOY / "Procfile").read_text(), re.MULTILINE))


def unit(name: str) -> list[str]:
    """The words of a unit's command after the program itself."""
    return shlex.split(setting(DEPLOY / "systemd" / f"{name}.service", "ExecStart"))[1:]


def containers() -> Iterator[dict[str, Any]]:
    for path in MANIFESTS:
        for document in documents(path):
            if document["kind"] in ("Deployment", "Job"):
                yield from document["spec"]["template"]["spec"]["containers"]


def services() -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = documents(DEPLOY / "compose.yaml")[0]["services"]
    return services


def commands() -> Iterator[list[str]]:
    """What each file has busload do."""
    assert dockerfile("ENTRYPOINT") == ["busload"]
    yield dockerfile("CMD")
    yield from (service["command"] for service in services().values() if "command" in service)
    yield from (container["args"] for container in containers())
    yield from (unit(path.stem) for path in UNITS)
    yield from (shlex.split(line)[2:] for line in procfile().values())


def grace(command: list[str]) -> float:
    return float(command[command.index("--grace") + 1])


# -- What linters say ------------------------------------------------------------------------------------------------


def test_hadolint_has_nothing_to_say_about_the_dockerfile() -> None:
    ran = subprocess.run([BIN / "hadolint", DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "")


def test_the_compose_file_follows_its_schema() -> None:
    command = [str(BIN / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(DEPLOY / "compose.yaml")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_the_manifests_follow_the_schema_of_kubernetes(path: Path) -> None:
    for document in documents(path):
        if "keda.sh" not in document["apiVersion"]:
            kubernetes_validate.validate(document, "1.33", strict=True)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for path in UNITS:
        there = path.read_text().replace("/srv/shop/.venv/bin/busload", str(BIN / "busload"))
        (tmp_path / path.name.replace("@", "@9464")).write_text(there)
    paths = map(str, sorted(tmp_path.glob("*.service")))
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=one", *paths]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    about_ours = [line for line in ran.stderr.splitlines() if "busload" in line]
    assert (ran.returncode, about_ours) == (0, [])


# -- What the files say ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", list(commands()), ids=" ".join)
def test_every_command_has_options_that_exist(command: list[str]) -> None:
    ran = CliRunner().invoke(main, [*command, "--help"])
    assert (ran.exit_code, ran.output.partition(":")[0]) == (0, "Usage"), ran.output


def test_a_worker_may_take_its_grace_time_before_it_is_killed() -> None:
    worker = services()["worker"]
    assert int(worker["stop_grace_period"].removesuffix("s")) >= grace(worker["command"]) + 20
    [pod] = [one["spec"]["template"]["spec"] for one in documents(MANIFESTS[-1]) if one["kind"] == "Deployment"]
    assert pod["terminationGracePeriodSeconds"] >= grace(pod["containers"][0]["args"]) + 20
    of_systemd = DEPLOY / "systemd/busload-worker@.service"
    assert int(setting(of_systemd, "TimeoutStopSec")) >= grace(unit(of_systemd.stem)) + 20
    assert grace(shlex.split(procfile()["worker"])) + 20 <= 30, "such platforms kill after 30 seconds"


def test_the_probes_ask_the_port_that_the_worker_answers_on() -> None:
    [worker] = [one for one in containers() if one["name"] == "worker"]
    [port] = worker["ports"]
    assert worker["args"][worker["args"].index("--metrics") + 1] == f"0.0.0.0:{port['containerPort']}"
    asked = {name: worker[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {name: (probe["path"], probe["port"]) for name, probe in asked.items()} == {
        "startupProbe": ("/healthz", port["name"]),
        "livenessProbe": ("/healthz", port["name"]),
        "readinessProbe": ("/readyz", port["name"]),
    }


def test_everything_that_refers_to_pods_finds_them() -> None:
    every = [document for path in MANIFESTS for document in documents(path)]
    deployments = {one["metadata"]["name"]: one for one in every if one["kind"] == "Deployment"}
    labels = [one["spec"]["template"]["metadata"]["labels"] for one in deployments.values()]
    [service] = [one for one in every if one["kind"] == "Service"]
    [budget] = [one for one in every if one["kind"] == "PodDisruptionBudget"]
    assert service["spec"]["selector"] in labels
    assert budget["spec"]["selector"]["matchLabels"] in labels
    [scaled] = [one["spec"] for one in every if one["kind"] == "ScaledObject"]
    [container] = deployments[scaled["scaleTargetRef"]["name"]]["spec"]["template"]["spec"]["containers"]
    assert container["name"] == scaled["scaleTargetRef"]["envSourceContainerName"]
    [trigger] = scaled["triggers"]
    assert trigger["metadata"]["connectionFromEnv"] in [one["name"] for one in container["env"]]


def test_the_docs_show_the_files_as_they_are() -> None:
    page = (DEPLOY.parent / "docs/deploy.md").read_text()
    assert (DEPLOY / "Procfile").read_text() in page
    [scaled] = documents(DEPLOY / "kubernetes/autoscale.yaml")
    query = scaled["spec"]["triggers"][0]["metadata"]["query"]
    assert query.split() == re.findall(r"```sql\n(.*?);\n```", page, re.DOTALL)[0].split()
    assert not [path.name for path in MANIFESTS if f"`{path.name}`" not in page]


# -- Autoscaling -----------------------------------------------------------------------------------------------------


def backlog(database: Database) -> int:
    [scaled] = documents(DEPLOY / "kubernetes/autoscale.yaml")
    value = database.value(scaled["spec"]["triggers"][0]["metadata"]["query"])
    assert isinstance(value, int)
    return value


def test_the_backlog_is_what_workers_could_run_or_run_now(
    sync_bus: SyncCommandBus, database: Database, given: Given
) -> None:
    assert backlog(database) == 0
    held = sync_bus.create_batch(DOMAIN, [BatchCommand("Count") for _ in range(30)])
    sync_bus.send("elsewhere", "Count")
    assert backlog(database) == 31
    sync_bus.hold_batch(DOMAIN, held, reason="to look at it")
    assert backlog(database) == 1, "no worker could run a batch that is held"
    sync_bus.resume_batch(DOMAIN, held)
    claimed = given.claimed(limit=10)
    assert (len(claimed), backlog(database)) == (10, 31), "a worker that is busy is not taken away"
    sync_bus.domains.pause(DOMAIN)
    assert backlog(database) == 11, "what waits in a paused domain needs no worker, what runs does"


# -- The processes ---------------------------------------------------------------------------------------------------


@contextmanager
def started(command: list[str], dsn: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A command of the files, in the folder of the application."""
    process = subprocess.Popen(
        [str(BIN / "busload"), *command],
        cwd=DEPLOY,
        env={**os.environ, "BUSLOAD_DATABASE_URL": dsn, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def answer(address: str) -> int:
    """The status that a server answers with; 0 if nobody answers."""
    try:
        with urlopen(address, timeout=5) as found:
            return int(found.status)
    except HTTPError as error:
        error.close()
        return error.code
    except (URLError, ConnectionError, TimeoutError):
        return 0


def ended(process: subprocess.Popen[str], within: float) -> int:
    """Send SIGTERM, and return the exit code."""
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=within)
    assert time.monotonic() - began < within
    assert "Traceback" not in said
    return process.returncode


def test_the_worker_of_systemd_answers_probes_works_and_stops(dsn: str, sync_bus: SyncCommandBus) -> None:
    [port] = free_ports(1)
    command = [word.replace("%i", str(port)) for word in unit("busload-worker@")]
    sent = sync_bus.send("shop", "ShipOrder", {"order": 7})
    check = health_check(port)
    assert subprocess.run(check, capture_output=True, check=False).returncode != 0, "nobody answers yet"
    with started(command, dsn) as process:
        assert sync_bus.wait_command("shop", sent.command_id, timeout=30) == {"shipped": 7}
        until(lambda: answer(f"http://127.0.0.1:{port}/readyz") == 200)
        assert answer(f"http://127.0.0.1:{port}/healthz") == 200
        assert subprocess.run(check, capture_output=True, check=False).returncode == 0, "as Docker asks"
        assert ended(process, float(setting(DEPLOY / "systemd/busload-worker@.service", "TimeoutStopSec"))) == 0


def health_check(port: int) -> list[str]:
    """What Docker runs to see whether a worker is well, asking another port."""
    text = (DEPLOY / "Dockerfile").read_text()
    [found] = re.findall(r"HEALTHCHECK .*\\\n +CMD (\[.*\])$", text, re.MULTILINE)
    python, *words = [word.replace("9464", str(port)) for word in json.loads(found)]
    assert python == "python" and str(port) in words[-1]
    return [sys.executable, *words]


def test_the_worker_of_the_procfile_works_and_stops(dsn: str, sync_bus: SyncCommandBus) -> None:
    variable, program, *command = shlex.split(procfile()["worker"])
    assert (variable, program) == ("BUSLOAD_DATABASE_URL=$DATABASE_URL", "busload")
    sent = sync_bus.send("shop", "ShipOrder", {"order": 8})
    with started(command, dsn) as process:
        assert sync_bus.wait_command("shop", sent.command_id, timeout=30) == {"shipped": 8}
        assert ended(process, 30) == 0


def test_the_dashboard_of_the_procfile_asks_for_a_user_and_stops(dsn: str) -> None:
    [port] = free_ports(1)
    said = CliRunner().invoke(main, ["dashboard", "user", "ada", "--json"])
    environment = {"BUSLOAD_DASHBOARD_USERS": json.loads(said.output)["entry"]}
    words = {"$PORT": str(port), "$DASHBOARD_HOST": "localhost"}
    _, _, *command = [words.get(word, word) for word in shlex.split(procfile()["web"])]
    with started(command, dsn, **environment) as process:
        until(lambda: answer(f"http://localhost:{port}/") == 401)
        assert ended(process, 30) in (0, -signal.SIGTERM)  # uvicorn ends by the signal itself


def test_the_migrate_job_makes_the_schema_and_may_run_again(server: TestServer) -> None:
    [job] = [one for one in containers() if one["name"] == "migrate"]
    assert unit("busload-migrate")[:2] == job["args"][:2] == services()["migrate"]["command"][:2]
    with server.database(migrated=False) as dsn:
        for _ in range(2):
            ran = CliRunner().invoke(main, job["args"], env={"BUSLOAD_DATABASE_URL": dsn})
            assert ran.exit_code == 0, ran.output
        with SyncCommandBus(dsn) as bus:
            assert bus.send("shop", "ShipOrder", {"order": 9}).command_id
