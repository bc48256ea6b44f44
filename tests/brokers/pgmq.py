"""PGMQ inside of the tests' PostgreSQL: its SQL comes from the package of that name."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from pgmq.install import get_embedded_install_sql

from busload.testing import TestServer


@pytest.fixture(scope="session")
def pgmq_url(server: TestServer) -> Iterator[str]:
    """A database with PGMQ, for this process of the run. Give each test queues of its own."""
    with server.database(migrated=False) as dsn:
        with psycopg.connect(dsn) as conn:
            conn.execute(get_embedded_install_sql())
        yield dsn.replace("postgresql:", "pgmq:", 1)
