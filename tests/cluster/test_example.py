"""The example of the guide, with the cluster that starts soonest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.story import LONGEST

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(LONGEST)
def test_the_example_kills_a_server_and_loses_nothing() -> None:
    command = [sys.executable, "-m", "examples.cluster", "nats", "--commands", "500"]
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    running = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        said, errors = running.communicate(timeout=LONGEST / 2)
    finally:
        running.terminate()  # it stops what it has started
        running.wait()
    assert running.returncode == 0, errors
    _, killed, completed, ledger = said.splitlines()
    assert killed.endswith("is killed, which most were connected to")
    assert completed == "500 of 500 commands are completed"
    assert ledger.startswith("The ledger has 500 notes about 500 commands, by ")  # one may have been quick enough alone
