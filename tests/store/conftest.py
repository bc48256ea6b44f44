"""The oldest server we support, beside the newest."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from busload.testing import TestServer

OLDEST = Path("/usr/lib/postgresql/15/bin")


@pytest.fixture(scope="session")
def oldest_server() -> Iterator[TestServer]:
    """PostgreSQL 15, one for the whole run, like `server`; its folder lies in that of the run and goes with it."""
    if not (OLDEST / "postgres").exists():
        pytest.fail(f"PostgreSQL 15 is not in {OLDEST}: `make test` installs it, see scripts/install-servers.sh.")
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"alone-{os.getpid()}")
    home = Path(tempfile.gettempdir()) / f"busload-tests-{run}" / "postgresql-15"
    home.parent.mkdir(mode=0o755, exist_ok=True)
    home.mkdir(mode=0o755, exist_ok=True)
    with TestServer(home, pg_bin=OLDEST, config={"deadlock_timeout": "100ms", "max_connections": "100"}) as server:
        yield server


@pytest.fixture(params=["18", "15"])
def either_server(request: pytest.FixtureRequest) -> TestServer:
    """The newest and the oldest server, in turn."""
    server: TestServer = request.getfixturevalue("server" if request.param == "18" else "oldest_server")
    return server
