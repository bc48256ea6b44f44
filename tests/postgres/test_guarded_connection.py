"""Only busload ends the transaction of a handler: whatever else tries to leaves no effect behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import django
import psycopg
import pytest
import sqlalchemy
from django.conf import settings as django_settings
from django.db import connections
from sqlalchemy.orm import Session
from sqlalchemy.pool import StaticPool

from busload import BatchCommand, Chunk, ChunkContext, Command, CommandBus, HandlerContext, RetryPolicy
from busload.errors import InvalidOperationError
from tests.given import DOMAIN, Database, Given

ONCE = RetryPolicy(max_attempts=1)
INSERT = "INSERT INTO effect VALUES (%s)"
EFFECTS = "SELECT array_agg(n ORDER BY n) FROM effect"
TEXTS = [
    "SET CONSTRAINTS ALL IMMEDIATE; COMMIT",
    "COMMIT /* SET CONSTRAINTS ALL IMMEDIATE */",
    "DO $$ BEGIN SET CONSTRAINTS ALL IMMEDIATE; COMMIT; END $$",
    "SAVEPOINT a; SET CONSTRAINTS ALL IMMEDIATE; ROLLBACK TO a; COMMIT",
    "COMMIT",
    "/* done */ cOmMiT",
    "END",
    "COMMIT AND CHAIN",
    "SELECT 1; COMMIT",
    "COMMIT; BEGIN",
    "COMMIT; BEGIN; INSERT INTO effect VALUES (3)",
    "ROLLBACK",
    "ABORT",
    "ROLLBACK AND CHAIN",
    "ROLLBACK; BEGIN; INSERT INTO effect VALUES (3)",
    "PREPARE TRANSACTION 'mine'",
    "CALL commit_in_between()",
    "DO $$ BEGIN INSERT INTO effect VALUES (3); COMMIT; END $$",
]


@pytest.fixture(autouse=True)
def effects(database: Database) -> Database:
    database.rows("CREATE TABLE effect (n integer)")
    database.rows(
        "CREATE PROCEDURE commit_in_between() LANGUAGE plpgsql AS"
        " $$ BEGIN INSERT INTO effect VALUES (3); COMMIT; INSERT INTO effect VALUES (4); END $$"
    )
    database.rows(
        "CREATE FUNCTION check_all() RETURNS void LANGUAGE plpgsql AS $$ BEGIN SET CONSTRAINTS ALL IMMEDIATE; END $$"
    )
    return database


def ends(bus: CommandBus, kind: str, end: Any, *, swallow: bool = False, **options: Any) -> None:
    """A handler that writes, does something else with its connection, and writes again

    What it does is `end`; without one, it executes the text that it is sent.
    """

    async def run_async(command: Command, ctx: HandlerContext) -> None:
        async with ctx.transaction() as conn:
            await conn.execute(INSERT, [1])
            try:
                await (conn.execute(command.data) if end is None else end(conn))
                await conn.execute(INSERT, [2])
            except Exception:
                if not swallow:
                    raise

    def run(command: Command, ctx: Any) -> None:
        with ctx.transaction() as conn:
            conn.execute(INSERT, [1])
            try:
                conn.execute(command.data) if end is None else end(conn)
                conn.execute(INSERT, [2])
            except Exception:
                if not swallow:
                    raise

    bus.handler(DOMAIN, "Debit", retry=ONCE, **options)(run if kind == "def" else run_async)


async def failed(given: Given, effects: Database) -> None:
    """Nothing is left of the effect or of the completion"""
    await given.sent()
    await given.drained()
    assert effects.value(EFFECTS) is None
    assert effects.value("SELECT count(*) FROM busload.guard") == 0
    assert effects.rows("SELECT outcome FROM busload.execution") == [("TROUBLESHOOTING",)]
    assert effects.value("SELECT count(*) FROM busload.troubleshooting") == 1
    effects.check_invariants()


@pytest.mark.parametrize("swallow", [False, True], ids=["raised", "swallowed"])
@pytest.mark.parametrize("kind", ["async", "def"])
async def test_no_text_ends_a_handlers_transaction_and_leaves_its_effect(
    bus: CommandBus, given: Given, effects: Database, kind: str, swallow: bool
) -> None:
    ends(bus, kind, None, swallow=swallow)
    sent = {await given.sent(data=text): text for text in TEXTS}
    await given.drained(concurrency=3)
    assert effects.value(EFFECTS) is None
    assert effects.value("SELECT count(*) FROM busload.guard") == 0
    assert effects.value("SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()") == 0
    ended = effects.rows("SELECT command_id, outcome FROM busload.execution JOIN busload.command ON id = command")
    assert {sent[command_id]: outcome for command_id, outcome in ended} == dict.fromkeys(TEXTS, "TROUBLESHOOTING")
    effects.check_invariants()


@pytest.mark.parametrize("swallow", [False, True], ids=["raised", "swallowed"])
@pytest.mark.parametrize("method", ["commit", "rollback", "close", "tpc_begin", "__exit__"])
@pytest.mark.parametrize("kind", ["async", "def"])
async def test_a_handlers_connection_refuses_to_end_its_transaction(
    bus: CommandBus, given: Given, effects: Database, kind: str, method: str, swallow: bool
) -> None:
    """If the handler does not mind, its first write commits with its completion"""
    arguments = {"tpc_begin": ("x",), "__exit__": (None, None, None)}.get(method, ())
    name = "__aexit__" if method == "__exit__" and kind == "async" else method
    ends(bus, kind, lambda conn: getattr(conn, name)(*arguments), swallow=swallow)
    if not swallow:
        await failed(given, effects)
        return
    await given.sent()
    await given.drained()
    assert effects.value(EFFECTS) == [1]
    assert effects.rows("SELECT outcome FROM busload.execution") == [("COMPLETED",)]


@pytest.mark.parametrize(
    "text",
    [
        "SET CONSTRAINTS ALL IMMEDIATE",
        " set  constraints all immediate ; ",
        "/* now */ SET CONSTRAINTS ALL IMMEDIATE",
        "-- now\nSET CONSTRAINTS ALL IMMEDIATE",
        "DO $$ BEGIN SET CONSTRAINTS ALL IMMEDIATE; END $$",
        "SELECT check_all()",
        "SET CONSTRAINTS ALL IMMEDIATE; SET CONSTRAINTS ALL DEFERRED",
        "SET CONSTRAINTS ALL IMMEDIATE; SET CONSTRAINTS ALL IMMEDIATE; SELECT 1",
        "SAVEPOINT a; SET CONSTRAINTS ALL IMMEDIATE; ROLLBACK TO a; SET CONSTRAINTS ALL IMMEDIATE; RELEASE a",
    ],
)
async def test_constraints_may_be_checked_within_a_handlers_transaction(
    bus: CommandBus, given: Given, effects: Database, text: str
) -> None:
    ends(bus, "async", None)
    await given.sent(data=text)
    await given.drained()
    assert effects.value(EFFECTS) == [1, 2]
    assert effects.value("SELECT count(*) FROM busload.guard") == 0
    assert effects.rows("SELECT outcome FROM busload.execution") == [("COMPLETED",)]


async def test_a_constraint_that_does_not_hold_fails_when_it_is_checked(
    bus: CommandBus, given: Given, effects: Database
) -> None:
    effects.rows("ALTER TABLE effect ADD CONSTRAINT once UNIQUE (n) DEFERRABLE INITIALLY DEFERRED")
    effects.rows("INSERT INTO effect VALUES (1)")
    errors = []

    async def check(conn: psycopg.AsyncConnection[Any]) -> None:
        try:
            await conn.execute("/* now */ SET CONSTRAINTS ALL IMMEDIATE")
        except psycopg.Error as error:
            errors.append(type(error))
            raise

    ends(bus, "async", check)
    await given.sent()
    await given.drained()
    assert errors == [psycopg.errors.UniqueViolation]


async def test_a_check_of_constraints_leaves_the_guard_where_it_was(
    bus: CommandBus, given: Given, effects: Database
) -> None:
    async def check_and_commit(conn: Any) -> None:
        await conn.execute("SET CONSTRAINTS ALL IMMEDIATE")
        await conn.execute("COMMIT")

    ends(bus, "async", check_and_commit)
    await failed(given, effects)


async def test_what_was_written_after_the_end_does_not_stay_either(
    bus: CommandBus, given: Given, effects: Database
) -> None:
    """Its connection is in autocommit mode, so every further statement would be a transaction by itself"""

    refused = []

    async def write_after(conn: psycopg.AsyncConnection[Any]) -> None:
        for statement in (
            "ROLLBACK",
            "INSERT INTO effect VALUES (5)",
            "BEGIN",
            "INSERT INTO effect VALUES (5)",
            "COMMIT",
        ):
            try:
                await conn.execute(statement.encode())
            except InvalidOperationError:
                refused.append(statement)

    ends(bus, "async", write_after, swallow=True)
    await failed(given, effects)
    assert len(refused) == 5


@pytest.mark.parametrize("kind", ["async", "def"])
async def test_savepoints_are_a_handlers_own(bus: CommandBus, given: Given, effects: Database, kind: str) -> None:
    texts = "SAVEPOINT a", "INSERT INTO effect VALUES (3)", "ROLLBACK TO SAVEPOINT a", "SELECT 1; RELEASE SAVEPOINT a"

    async def nest_async(conn: psycopg.AsyncConnection[Any]) -> None:
        for text in texts:
            await conn.execute(text.encode())
        async with conn.transaction(force_rollback=True):
            await conn.execute(INSERT, [4])
        async with conn.transaction():
            await conn.execute(INSERT, [5])

    def nest(conn: psycopg.Connection[Any]) -> None:
        for text in texts:
            conn.execute(text.encode())
        with conn.transaction(force_rollback=True):
            conn.execute(INSERT, [4])
        with conn.transaction():
            conn.execute(INSERT, [5])

    ends(bus, kind, nest if kind == "def" else nest_async)
    await given.batch(commands=3)
    await given.drained()
    assert effects.value(EFFECTS) == [1, 1, 1, 2, 2, 2, 5, 5, 5]
    assert effects.rows("SELECT DISTINCT outcome FROM busload.execution") == [("COMPLETED",)]
    assert effects.value("SELECT count(*) FROM busload.guard") == 0


async def test_a_chunk_that_ends_its_transaction_completes_no_command(
    bus: CommandBus, given: Given, effects: Database
) -> None:
    @bus.bulk_handler(DOMAIN, "Debit", max_wait=0.01, retry=ONCE)
    async def write(chunk: Chunk, ctx: ChunkContext) -> None:
        async with ctx.transaction() as conn:
            await conn.execute(INSERT, [1])
            await conn.execute("SELECT 1; COMMIT")

    await bus.create_batch(DOMAIN, [BatchCommand("Debit") for _ in range(3)])
    await given.drained()
    assert effects.value(EFFECTS) is None
    assert effects.rows("SELECT outcome, count(*) FROM busload.execution GROUP BY 1") == [("TROUBLESHOOTING", 3)]


# -- ORMs --------------------------------------------------------------------------------------------------------------


def engine_on(conn: psycopg.Connection[Any]) -> sqlalchemy.Engine:
    return sqlalchemy.create_engine("postgresql+psycopg://", creator=lambda: conn, poolclass=StaticPool)


def by_session(end: Callable[[Session], None]) -> Callable[[psycopg.Connection[Any]], None]:
    def run(conn: psycopg.Connection[Any]) -> None:
        with Session(engine_on(conn)) as session:
            session.execute(sqlalchemy.text("INSERT INTO effect VALUES (3)"))
            end(session)

    return run


@pytest.mark.parametrize("end", [Session.commit, Session.rollback, Session.close], ids=lambda end: end.__name__)
async def test_a_session_that_ends_the_transaction_loses_its_write_with_the_command(
    bus: CommandBus, given: Given, effects: Database, end: Callable[[Session], None]
) -> None:
    ends(bus, "def", by_session(end))
    await failed(given, effects)


@pytest.mark.parametrize("fails", [False, True], ids=["completes", "fails"])
async def test_a_session_within_savepoints_shares_the_fate_of_the_command(
    bus: CommandBus, given: Given, effects: Database, fails: bool
) -> None:
    """As docs/handlers.md shows it"""

    def within_savepoints(conn: psycopg.Connection[Any]) -> None:
        engine = engine_on(conn)
        for part in ("do_commit", "do_rollback", "do_close"):
            setattr(engine.dialect, part, lambda _: None)
        savepoints: Any = {"join_transaction_mode": "create_savepoint"}
        with engine.connect() as outer, outer.begin(), Session(outer, **savepoints) as session:
            session.execute(sqlalchemy.text("INSERT INTO effect VALUES (3)"))
            session.commit()
            session.execute(sqlalchemy.text("INSERT INTO effect VALUES (4)"))
            session.rollback()
        if fails:
            raise ValueError("no")

    ends(bus, "def", within_savepoints)
    if fails:
        await failed(given, effects)
        return
    await given.sent()
    await given.drained()
    assert effects.value(EFFECTS) == [1, 2, 3]
    assert effects.rows("SELECT outcome FROM busload.execution") == [("COMPLETED",)]


async def test_django_on_the_connection_of_a_handler_cannot_commit_it(
    bus: CommandBus, given: Given, effects: Database, dsn: str
) -> None:
    if not django_settings.configured:
        django_settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "NAME": "unused"}})
        django.setup()

    def by_django(conn: psycopg.Connection[Any]) -> None:
        wrapper = connections.create_connection("default")
        wrapper.connection = conn
        with wrapper.connection.cursor() as cursor:
            cursor.execute("INSERT INTO effect VALUES (3)")
        wrapper.autocommit = False
        wrapper.commit()

    ends(bus, "def", by_django)
    await failed(given, effects)
