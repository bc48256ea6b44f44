"""The Celery example tracks whatever an app does with its tasks: a worker of its own process, a broker in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from busload import SyncCommandBus

EXAMPLES = Path(__file__).parents[2] / "examples"

APP = """
import json
import sys
import time

sys.path.insert(0, sys.argv[1])
import tracker_celery as example
from celery.contrib.testing.worker import start_worker

ran = []

@example.app.task(bind=True, name="report")
def report(self, *args, **kwargs):
    ran.append([list(args), kwargs])

@example.app.task(bind=True, name="stubborn", max_retries=4)
def stubborn(self):
    if self.request.retries < 4:
        raise self.retry(countdown=0)

@example.app.task(bind=True, name="endless", max_retries=None)
def endless(self):
    pass

@example.app.task(bind=True, name="unstorable")
def unstorable(self, text):
    ran.append(text)

def published():
    for month in ("January", "February"):
        report.delay(month=month)
        report.delay(month=month)
    report.delay(1.5)
    report.delay(["a"], month=None)
    report.delay("")
    report.delay("x" * 1000)
    stubborn.delay()
    endless.delay()
    unstorable.delay(chr(0))  # what no metadata can hold

def ended():
    with example.tracker._bus.pool.connection() as conn:
        open = conn.execute("SELECT count(*) FROM busload.command_status WHERE status <> 'COMPLETED'").fetchone()[0]
        return not open and chr(0) in ran

if sys.argv[2] == "work":
    published()
    with start_worker(example.app, perform_ping_check=False, pool="solo", loglevel="CRITICAL"):
        deadline = time.monotonic() + 60
        while not ended() and time.monotonic() < deadline:
            time.sleep(0.05)
elif sys.argv[2] == "directly":
    ran = [example.render("January"), example.render.apply(("February",)).result]
elif sys.argv[2] == "recover":
    example.enqueue(([7], {"month": "May"}), {"task": "report"}, "dev_renders")  # and its message is lost
    example.recover(example.timedelta(0))
    with start_worker(example.app, perform_ping_check=False, pool="solo", loglevel="CRITICAL"):
        deadline = time.monotonic() + 60
        while not ran and time.monotonic() < deadline:
            time.sleep(0.05)
print(json.dumps(ran))
example.tracker.close()
"""


def ran(dsn: str, mode: str) -> Any:
    environment = {**os.environ, "BUSLOAD_DATABASE_URL": dsn, "AMQP_URL": "memory://"}
    arguments = [sys.executable, "-c", APP, str(EXAMPLES), mode]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def chains(sync_bus: SyncCommandBus, dsn: str) -> Any:
    """What the statuses of each task's executions are, and how many attempts it has."""

    def read() -> dict[str, tuple[list[str], int]]:
        with sync_bus.pool.connection() as conn:
            keys = conn.execute("SELECT task_key, max_attempts FROM busload.command ORDER BY id").fetchall()
        return {key: ([str(one.status) for one in sync_bus.trace(key)], attempts) for key, attempts in keys}

    return read


def test_calls_that_differ_are_different_tasks(dsn: str, chains: Any) -> None:
    """By what they are called with, in whatever way; the same call is the same task."""
    calls = ran(dsn, "work")
    for call in ({"month": "January"}, {"month": "February"}):
        assert calls.count([[], call]) == 1
    assert [[1.5], {}] in calls and [[["a"]], {"month": None}] in calls and [[""], {}] in calls
    assert [["x" * 1000], {}] in calls
    assert "\0" in calls  # it could not be tracked, and ran all the same
    found = chains()
    assert [chain for key, chain in found.items() if key.startswith("renders:report")] == [(["completed"], 4)] * 6
    assert found["renders:stubborn"] == (["failed"] * 4 + ["completed"], 5)
    assert found["renders:endless"] == (["completed"], 32767)
    assert len(found) == 8


def test_a_task_that_is_called_without_a_message_runs_untracked(dsn: str, chains: Any) -> None:
    assert ran(dsn, "directly") == ["1.pdf", "2.pdf"]
    assert chains() == {}


def test_what_is_recovered_is_published_as_it_was_called(dsn: str, chains: Any) -> None:
    """Under its own name, with all its arguments."""
    assert ran(dsn, "recover") == [[[7], {"month": "May"}]]
    assert [chain for chain, _ in chains().values()] == [["completed"]]
