"""Applications with a transaction of their own, one for each kind of connection that a call can join."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import asyncpg
import django
import psycopg
import psycopg2
from django.conf import settings as django_settings
from django.db import connections, transaction
from django.db.backends.postgresql.base import DatabaseWrapper
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import URL, NullPool, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

if not django_settings.configured:
    django_settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "NAME": "unused"}})
    django.setup()


class Caller(ABC):
    """An application in a transaction. A new one begins after each end."""

    def __init__(self, conn: Any) -> None:
        self.conn = conn

    @abstractmethod
    async def execute(self, sql: str) -> None: ...

    @abstractmethod
    async def commit(self) -> None: ...

    @abstractmethod
    async def rollback(self) -> None: ...

    @asynccontextmanager
    async def undone_savepoint(self) -> AsyncIterator[None]:
        """A savepoint as this kind of connection has it, rolled back at the end of the block."""
        await self.execute("SAVEPOINT of_the_caller")
        yield
        await self.execute("ROLLBACK TO SAVEPOINT of_the_caller")


class OfPsycopg(Caller):
    async def execute(self, sql: str) -> None:
        await self.conn.execute(sql)

    async def commit(self) -> None:
        await self.conn.commit()

    async def rollback(self) -> None:
        await self.conn.rollback()

    @asynccontextmanager
    async def undone_savepoint(self) -> AsyncIterator[None]:
        async with self.conn.transaction(force_rollback=True):
            yield


class OfPsycopgThatBlocks(Caller):
    """Also of psycopg2, which has the same methods, but for savepoints."""

    async def execute(self, sql: str) -> None:
        with self.conn.cursor() as cursor:
            cursor.execute(sql)

    async def commit(self) -> None:
        self.conn.commit()

    async def rollback(self) -> None:
        self.conn.rollback()


class OfAsyncpg(Caller):
    def __init__(self, conn: Any) -> None:
        super().__init__(conn)
        self._transaction = conn.transaction()

    async def begin(self) -> OfAsyncpg:
        await self._transaction.start()
        return self

    async def execute(self, sql: str) -> None:
        await self.conn.execute(sql)

    async def commit(self) -> None:
        await self._transaction.commit()
        self._transaction = self.conn.transaction()
        await self.begin()

    async def rollback(self) -> None:
        await self._transaction.rollback()
        self._transaction = self.conn.transaction()
        await self.begin()

    @asynccontextmanager
    async def undone_savepoint(self) -> AsyncIterator[None]:
        nested = self.conn.transaction()
        await nested.start()
        yield
        await nested.rollback()


class OfSqlalchemy(Caller):
    async def execute(self, sql: str) -> None:
        self.conn.execute(text(sql))

    async def commit(self) -> None:
        self.conn.commit()

    async def rollback(self) -> None:
        self.conn.rollback()

    @asynccontextmanager
    async def undone_savepoint(self) -> AsyncIterator[None]:
        nested = self.conn.begin_nested()
        yield
        nested.rollback()


class OfAsyncSqlalchemy(Caller):
    async def execute(self, sql: str) -> None:
        await self.conn.execute(text(sql))

    async def commit(self) -> None:
        await self.conn.commit()

    async def rollback(self) -> None:
        await self.conn.rollback()

    @asynccontextmanager
    async def undone_savepoint(self) -> AsyncIterator[None]:
        nested = await self.conn.begin_nested()
        yield
        await nested.rollback()


class OfDjango(Caller):
    def __init__(self, conn: DatabaseWrapper) -> None:
        super().__init__(conn)
        self._begin()

    def _begin(self) -> None:
        self._atomic = transaction.atomic(self.conn.alias)
        self._atomic.__enter__()

    async def execute(self, sql: str) -> None:
        with self.conn.cursor() as cursor:
            cursor.execute(sql)

    async def commit(self) -> None:
        self._atomic.__exit__(None, None, None)
        self._begin()

    async def rollback(self) -> None:
        transaction.set_rollback(True, self.conn.alias)
        self._atomic.__exit__(None, None, None)
        self._begin()

    @asynccontextmanager
    async def undone_savepoint(self) -> AsyncIterator[None]:
        with transaction.atomic(self.conn.alias):
            yield
            transaction.set_rollback(True, self.conn.alias)

    def end(self) -> None:
        transaction.set_rollback(True, self.conn.alias)
        self._atomic.__exit__(None, None, None)


def url_of(dsn: str, driver: str) -> URL:
    found = conninfo_to_dict(dsn)
    return URL.create(
        f"postgresql+{driver}",
        username=str(found["user"]),
        host=str(found["host"]),
        port=int(str(found["port"])),
        database=str(found["dbname"]),
    )


async def connect_asyncpg(dsn: str) -> Any:
    found = conninfo_to_dict(dsn)
    return await asyncpg.connect(
        host=found["host"], port=found["port"], user=found["user"], database=found["dbname"], statement_cache_size=100
    )


def django_connection(dsn: str, alias: str = "joined") -> DatabaseWrapper:
    """A connection of Django, found by its alias as others are."""
    found = conninfo_to_dict(dsn)
    place = {"HOST": found["host"], "PORT": found["port"], "USER": found["user"], "NAME": found["dbname"]}
    conn = DatabaseWrapper({**connections["default"].settings_dict, **place}, alias)
    connections[alias] = conn
    return conn


@asynccontextmanager
async def psycopg_async(dsn: str) -> AsyncIterator[Caller]:
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        yield OfPsycopg(conn)


@asynccontextmanager
async def psycopg_sync(dsn: str) -> AsyncIterator[Caller]:
    with psycopg.connect(dsn) as conn:
        yield OfPsycopgThatBlocks(conn)


@asynccontextmanager
async def by_psycopg2(dsn: str) -> AsyncIterator[Caller]:
    conn = psycopg2.connect(dsn)
    try:
        yield OfPsycopgThatBlocks(conn)
    finally:
        conn.close()


@asynccontextmanager
async def by_asyncpg(dsn: str) -> AsyncIterator[Caller]:
    conn = await connect_asyncpg(dsn)
    try:
        yield await OfAsyncpg(conn).begin()
    finally:
        await conn.close()


def sqlalchemy_connection(driver: str) -> Callable[[str], AbstractAsyncContextManager[Caller]]:
    @asynccontextmanager
    async def connect(dsn: str) -> AsyncIterator[Caller]:
        with create_engine(url_of(dsn, driver), poolclass=NullPool).connect() as conn:
            yield OfSqlalchemy(conn)

    return connect


def sqlalchemy_session(driver: str) -> Callable[[str], AbstractAsyncContextManager[Caller]]:
    @asynccontextmanager
    async def connect(dsn: str) -> AsyncIterator[Caller]:
        with Session(create_engine(url_of(dsn, driver), poolclass=NullPool)) as session:
            yield OfSqlalchemy(session)

    return connect


def sqlalchemy_async_connection(driver: str) -> Callable[[str], AbstractAsyncContextManager[Caller]]:
    @asynccontextmanager
    async def connect(dsn: str) -> AsyncIterator[Caller]:
        async with create_async_engine(url_of(dsn, driver), poolclass=NullPool).connect() as conn:
            yield OfAsyncSqlalchemy(conn)

    return connect


def sqlalchemy_async_session(driver: str) -> Callable[[str], AbstractAsyncContextManager[Caller]]:
    @asynccontextmanager
    async def connect(dsn: str) -> AsyncIterator[Caller]:
        async with AsyncSession(create_async_engine(url_of(dsn, driver), poolclass=NullPool)) as session:
            yield OfAsyncSqlalchemy(session)

    return connect


@asynccontextmanager
async def by_django(dsn: str) -> AsyncIterator[Caller]:
    conn = django_connection(dsn)
    caller = OfDjango(conn)
    try:
        yield caller
    finally:
        caller.end()
        conn.close()
        del connections[conn.alias]


SYNC_KINDS = {
    "psycopg": psycopg_sync,
    "psycopg2": by_psycopg2,
    "sqlalchemy-connection-psycopg": sqlalchemy_connection("psycopg"),
    "sqlalchemy-connection-psycopg2": sqlalchemy_connection("psycopg2"),
    "sqlalchemy-session-psycopg": sqlalchemy_session("psycopg"),
    "sqlalchemy-session-psycopg2": sqlalchemy_session("psycopg2"),
    "django": by_django,
}
ASYNC_KINDS = {
    "psycopg-async": psycopg_async,
    "asyncpg": by_asyncpg,
    "sqlalchemy-async-connection-psycopg": sqlalchemy_async_connection("psycopg"),
    "sqlalchemy-async-connection-asyncpg": sqlalchemy_async_connection("asyncpg"),
    "sqlalchemy-async-session-psycopg": sqlalchemy_async_session("psycopg"),
    "sqlalchemy-async-session-asyncpg": sqlalchemy_async_session("asyncpg"),
}
KINDS = SYNC_KINDS | ASYNC_KINDS
