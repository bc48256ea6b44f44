"""The oldest server we support, beside the newest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from busload.testing import TestServer
from tests.conftest import server_home

OLDEST = Path("/usr/lib/postgresql/15/bin")


@pytest.fixture(scope="session")
def oldest_server() -> Iterator[TestServer]:
    """PostgreSQL 15, one for the whole run, like `server`, which also says who stops it."""
    if not (OLDEST / "postgres").exists():
        pytest.fail(f"PostgreSQL 15 is not in {OLDEST}: `make test` installs it, see scripts/install-servers.sh.")
    home = server_home("postgresql-15")
    home.mkdir(mode=0o755, parents=True, exist_ok=True)
    with TestServer(home, pg_bin=OLDEST, config={"deadlock_timeout": "100ms", "max_connections": "100"}) as server:
        yield server


@pytest.fixture(params=["18", "15"])
def either_server(request: pytest.FixtureRequest) -> TestServer:
    """The newest and the oldest server, in turn."""
    server: TestServer = request.getfixturevalue("server" if request.param == "18" else "oldest_server")
    return server
