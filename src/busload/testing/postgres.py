"""A real PostgreSQL for tests: one embedded server, and for each test a database of its own.

    server = TestServer(home).start()
    with server.database() as dsn:
        ...

A database is copied from a template that already holds busload's schema, which takes about twenty milliseconds. Give
every process of a parallel run the same `home`, and they share the server. If the server may lose its data in a power
failure, as that of tests may, give it `config={"fsync": "off"}`: databases are then copied as files, which is quicker.
`TestServer.at(url)` uses a server of yours instead.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from busload.errors import DatabaseUnusableError
from busload.postgres.dsn import place
from busload.postgres.embedded.server import EmbeddedPostgres
from busload.postgres.schema import migrate
from busload.sync.plan import perform

TEMPLATE = (
    "busload_template_" + hashlib.sha256("".join(each.sql for each in migrate.MIGRATIONS).encode()).hexdigest()[:12]
)
"""Named by the schema of this release: another release makes another template."""

MAY_CREATE = "SELECT FROM pg_roles WHERE rolname = current_user AND (rolcreatedb OR rolsuper)"


class TestServer:
    __test__ = False  # not a test, whatever pytest makes of its name

    def __init__(
        self, home: Path | str, *, pg_bin: Path | None = None, config: Mapping[str, str] | None = None
    ) -> None:
        self._embedded: EmbeddedPostgres | None = EmbeddedPostgres(Path(home), pg_bin=pg_bin, config=config)
        self._dsn: Callable[[str], str] = self._embedded.dsn
        self._strategy = sql.SQL("file_copy" if config and config.get("fsync") == "off" else "wal_log")
        self._conn: psycopg.Connection[Any] | None = None
        self._lock, self._process = threading.Lock(), 0
        self._admin_dsn = ""

    @classmethod
    def at(cls, url: str) -> Self:
        """A server that runs already, at this DSN. Its role must be allowed to create databases.

        The template stays there for the next run: it is a database whose name begins with `busload_template_`.
        """
        server = cls(Path())
        server._embedded, server._dsn = None, lambda name: make_conninfo(url, dbname=name)
        server._admin_dsn = url
        return server

    def start(self) -> Self:
        if self._embedded is not None:
            self._embedded.start()
            self._admin_dsn = self._dsn("postgres")
        self._make_template()
        return self

    def close(self) -> None:
        if self._conn is not None and self._process == os.getpid():
            self._conn.close()
        if self._embedded is not None:
            self._embedded.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def database(self, *, migrated: bool = True) -> Iterator[str]:
        """The DSN of a database that nobody else uses and that is dropped at the end."""
        name = f"test_{secrets.token_hex(6)}"
        template = TEMPLATE if migrated else "template0"
        with self._admin() as conn:
            conn.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY {}").format(
                    sql.Identifier(name), sql.Identifier(template), self._strategy
                )
            )
        try:
            yield self._dsn(name)
        finally:
            with self._admin() as conn:
                conn.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))

    def _make_template(self) -> None:
        with self._connect() as conn:
            if not conn.execute(MAY_CREATE).rowcount:
                raise DatabaseUnusableError(
                    f"Tests need a role that may create databases, and {conn.info.user!r} may not, at "
                    f"{place(self._admin_dsn)}. Run `ALTER ROLE {conn.info.user} CREATEDB` as a superuser."
                )
            # One process makes it, the others wait for that; the lock ends with the connection.
            conn.execute("SELECT pg_advisory_lock(27711006262190437)")
            if conn.execute("SELECT FROM pg_database WHERE datname = %s", [TEMPLATE]).rowcount:
                return
            making = sql.Identifier(TEMPLATE + "_making")
            conn.execute(sql.SQL("DROP DATABASE IF EXISTS {}").format(making))
            conn.execute(sql.SQL("CREATE DATABASE {}").format(making))
            with psycopg.connect(self._dsn(TEMPLATE + "_making")) as template:
                perform(template, migrate.migrate())
            conn.execute(sql.SQL("ALTER DATABASE {} RENAME TO {}").format(making, sql.Identifier(TEMPLATE)))

    @contextmanager
    def _admin(self) -> Iterator[psycopg.Connection[Any]]:
        """One connection makes and drops all databases of a process: to open one takes as long as half of that."""
        with self._lock:
            if self._conn is None or self._process != os.getpid() or not _answers(self._conn):
                self._conn, self._process = self._connect(), os.getpid()
                weakref.finalize(self, self._conn.close)
            yield self._conn

    def _connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self._admin_dsn, autocommit=True)


def _answers(conn: psycopg.Connection[Any]) -> bool:
    try:
        conn.execute("SELECT")
    except psycopg.OperationalError:
        return False
    return True
