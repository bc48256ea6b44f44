"""What it costs to join the caller's transaction, by the kind of connection: one transaction of single sends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from bench.case import Case, Measured
from bench.clock import timed
from bench.ours import DOMAIN, expect, our_case
from busload import CommandBus

Open = Callable[[str], AbstractAsyncContextManager[Any]]


@asynccontextmanager
async def by_psycopg_async(dsn: str) -> AsyncIterator[Any]:
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        yield conn


@asynccontextmanager
async def by_psycopg(dsn: str) -> AsyncIterator[Any]:
    with psycopg.connect(dsn) as conn:
        yield conn


@asynccontextmanager
async def by_psycopg2(dsn: str) -> AsyncIterator[Any]:
    import psycopg2

    with psycopg2.connect(dsn) as conn:
        yield conn
    conn.close()


@asynccontextmanager
async def by_asyncpg(dsn: str) -> AsyncIterator[Any]:
    import asyncpg

    found = conninfo_to_dict(dsn)
    conn = await asyncpg.connect(host=found["host"], port=found["port"], user=found["user"], database=found["dbname"])
    async with conn.transaction():
        yield conn
    await conn.close()


def _url(dsn: str, driver: str) -> Any:
    from sqlalchemy import URL

    found = conninfo_to_dict(dsn)
    about = {"username": found["user"], "host": found["host"], "port": int(str(found["port"]))}
    return URL.create(f"postgresql+{driver}", database=str(found["dbname"]), **about)  # type: ignore[arg-type]


@asynccontextmanager
async def by_session(dsn: str, driver: str) -> AsyncIterator[Any]:
    from sqlalchemy import NullPool, create_engine
    from sqlalchemy.orm import Session

    with Session(create_engine(_url(dsn, driver), poolclass=NullPool)) as session, session.begin():
        yield session


@asynccontextmanager
async def by_async_session(dsn: str, driver: str) -> AsyncIterator[Any]:
    from sqlalchemy import NullPool
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    async with AsyncSession(create_async_engine(_url(dsn, driver), poolclass=NullPool)) as session, session.begin():
        yield session


@asynccontextmanager
async def by_django(dsn: str) -> AsyncIterator[Any]:
    import os

    import django
    from django.conf import settings

    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"
    found = conninfo_to_dict(dsn)
    place = {"HOST": found["host"], "PORT": found["port"], "USER": found["user"], "NAME": found["dbname"]}
    if not settings.configured:
        settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "NAME": "unused"}})
        django.setup()
    from django.db import connections, transaction
    from django.db.backends.postgresql.base import DatabaseWrapper

    conn = connections["bench"] = DatabaseWrapper({**connections["default"].settings_dict, **place}, "bench")
    with transaction.atomic("bench"):
        yield conn
    conn.close()


async def send(dsn: str, size: int, *, connect: Open) -> Measured:
    async with CommandBus(dsn) as bus, connect(dsn) as conn:
        await bus.send(DOMAIN, "Nothing", conn=conn)  # its statements are prepared, and the schema is known
        with timed(dsn) as lap:
            for n in range(size):
                await bus.send(DOMAIN, "Nothing", {"n": n}, conn=conn)
    expect(dsn, "SELECT count(*) FROM busload.command", size + 1)
    return lap.measured(size)


async def send_by_function(dsn: str, size: int) -> Measured:
    """`busload.send(...)`, called by psycopg."""
    with psycopg.connect(dsn) as conn, timed(dsn) as lap:
        for n in range(size):
            conn.execute("SELECT busload.send('bench', 'Nothing', %s::jsonb)", [f'{{"n": {n}}}'])
    expect(dsn, "SELECT count(*) FROM busload.command", size)
    return lap.measured(size)


KINDS: dict[str, tuple[str, Open]] = {
    "psycopg-async": ("psycopg.AsyncConnection", by_psycopg_async),
    "psycopg": ("psycopg.Connection", by_psycopg),
    "asyncpg": ("asyncpg", by_asyncpg),
    "psycopg2": ("psycopg2", by_psycopg2),
    "session": ("a Session of SQLAlchemy on psycopg", partial(by_session, driver="psycopg")),
    "session-psycopg2": ("a Session of SQLAlchemy on psycopg2", partial(by_session, driver="psycopg2")),
    "async-session": ("an AsyncSession of SQLAlchemy on psycopg", partial(by_async_session, driver="psycopg")),
    "async-session-asyncpg": ("an AsyncSession of SQLAlchemy on asyncpg", partial(by_async_session, driver="asyncpg")),
    "django": ("Django", by_django),
}

CASES: list[Case] = [
    *(
        our_case(f"join-{name}", f"send in a transaction of {title}", partial(send, connect=connect), extent="sends")
        for name, (title, connect) in KINDS.items()
    ),
    our_case("join-sql", "send by busload.send() in SQL", send_by_function, extent="sends"),
]
