"""The shell of these tests: commands in this process, and real processes where signals and terminals matter."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from busload.cli import main
from tests.given import WITHIN

Busload = Callable[..., Result]
Spawn = Callable[..., "subprocess.Popen[bytes]"]
Until = Callable[..., Any]


NOWHERE = "postgresql://nobody@127.0.0.1:1/nowhere"


@pytest.fixture
def busload(dsn: str) -> Busload:
    """Run `busload` on the test's database."""

    def run(*arguments: object, url: str = dsn) -> Result:
        return CliRunner().invoke(main, list(map(str, arguments)), env={"BUSLOAD_DATABASE_URL": url})

    return run


@pytest.fixture
def offline() -> Busload:
    """Run what needs no database, and is given none."""

    def run(*arguments: object, url: str = NOWHERE) -> Result:
        return CliRunner().invoke(main, list(map(str, arguments)), env={"BUSLOAD_DATABASE_URL": url})

    return run


@pytest.fixture
def spawn(dsn: str, tmp_path: Path) -> Iterator[Spawn]:
    """Start `busload` as a process in `tmp_path`, its words in `said.txt`; what still runs at the end is killed."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: object, module: str | None = "busload.cli", **options: Any) -> subprocess.Popen[bytes]:
        python = [sys.executable, *(() if module is None else ("-m", module))]
        with (tmp_path / "said.txt").open("ab") as said:
            process = subprocess.Popen(
                [*python, *map(str, arguments)],
                **{
                    "cwd": tmp_path,
                    "env": {**os.environ, "BUSLOAD_DATABASE_URL": dsn},
                    "stdout": said,
                    "stderr": said,
                    **options,
                },
            )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.fixture
def until(tmp_path: Path) -> Until:
    """Look until something is so, and say what the processes said if it never is."""

    def look(condition: Callable[[], Any], seconds: float = WITHIN) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            if time.monotonic() > deadline:
                said = tmp_path / "said.txt"
                pytest.fail(f"It never came about. Said was:\n{said.read_text() if said.exists() else ''}")
            time.sleep(0.02)
        return found

    return look
