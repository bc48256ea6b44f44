"""`busload demo` at a shell."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Spawn
from tests.given import Database

Run = Callable[..., "subprocess.CompletedProcess[str]"]
LONGEST = 200.0
"""Seconds: on a busy machine a demo has taken fifty."""


@pytest.fixture
def alone() -> Iterator[Run]:
    """Run `busload` without any DSN, in a home of its own, which a server that runs as another user can reach."""
    folder = Path(tempfile.mkdtemp(prefix="busload-demo-")).resolve()
    folder.chmod(0o755)
    environment = {**os.environ, "BUSLOAD_HOME": str(folder / "home")}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "busload.cli", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONGEST, check=False)

    yield run
    run("db", "stop")
    shutil.rmtree(folder)


@pytest.mark.timeout(3 * LONGEST)
def test_the_demo_needs_nothing_and_its_batch_can_be_looked_at_afterwards(alone: Run) -> None:
    demo = alone("demo", "--commands", "300", "--json")
    assert demo.returncode == 0, demo.stderr
    [line] = demo.stderr.splitlines()
    assert line.startswith("using embedded PostgreSQL 18.")

    told = json.loads(demo.stdout)
    batch = told["batch"]
    assert (batch["total_count"], batch["failed_count"], batch["canceled_count"]) == (300, 1, 1)
    assert (batch["completed_count"], batch["in_troubleshooting_count"]) == (298, 0)
    assert batch["status"] == "COMPLETED_WITH_FAILURES"
    assert told["resolved"] == {"retry": 2, "complete": 1, "cancel": 1}
    assert told["callback"]["result"] == {"reported": 298, "to": "accounting"}
    assert [event["type"] for event in told["audit_trail"]][-3:] == ["OPERATOR_RETRIED", "RECEIVED", "COMPLETED"]

    [found] = json.loads(alone("batch", "ls", "--json").stdout)
    assert found == batch


@pytest.mark.timeout(2 * LONGEST)
def test_the_demo_in_a_pipe_is_plain_and_leaves_exact_counters(
    spawn: Spawn, tmp_path: Path, database: Database
) -> None:
    assert spawn("demo", "--commands", 300).wait(timeout=LONGEST) == 0, (tmp_path / "said.txt").read_text()
    said = (tmp_path / "said.txt").read_text()
    assert "296/300  completed 295  failed 1  canceled 0  in troubleshooting 4  IN_PROGRESS\n" in said
    assert "completed 298, failed 1, canceled 1, in troubleshooting 0\n" in said
    assert "busload batch show " in said
    assert "\x1b" not in said
    assert database.count("lease") == 0
    database.check_invariants()
