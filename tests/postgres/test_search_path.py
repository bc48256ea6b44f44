"""Who may create in a schema of our search_path cannot have his functions and operators run with our rights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from busload import WorkerSettings
from busload.postgres.own_connection import ABOUT
from busload.postgres.pool import engine_pool
from busload.testing import TestServer
from tests.imports.installed import install_queues
from tests.life import live
from tests.postgres.test_statements import OWNED, as_prepared

TYPES = "boolean smallint integer bigint numeric float8 text varchar uuid json jsonb timestamptz interval oid regclass"
ARRAYS = "bigint[] text[] uuid[] int8range int8multirange anyarray"

PLANT = """
DO $plant$
DECLARE
    raises text := $b$RETURNS boolean LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION $$planted$$; END'$b$;
    name text; a text; b text;
BEGIN
    FOREACH a IN ARRAY %(types)s::text[] LOOP
        FOREACH b IN ARRAY %(types)s::text[] LOOP
            EXECUTE format('CREATE FUNCTION evil.between(%%s, %%s) %%s', a, b, raises);
            FOREACH name IN ARRAY %(operators)s::text[] LOOP
                EXECUTE format('CREATE OPERATOR evil.%%s (LEFTARG = %%s, RIGHTARG = %%s, FUNCTION = evil.between)',
                               name, a, b);
            END LOOP;
        END LOOP;
        FOREACH name IN ARRAY %(functions)s::text[] LOOP
            EXECUTE format('CREATE FUNCTION evil.%%I(%%s) %%s', name, a, raises);
            EXECUTE format('CREATE FUNCTION evil.%%I(%%s, %%s) %%s', name, a, a, raises);
            IF a <> 'integer' THEN
                EXECUTE format('CREATE FUNCTION evil.%%I(%%s, integer) %%s', name, a, raises);
            END IF;
        END LOOP;
    END LOOP;
    FOREACH name IN ARRAY %(functions)s::text[] LOOP
        EXECUTE format('CREATE FUNCTION evil.%%I() %%s', name, raises);
    END LOOP;
END $plant$
"""
READ = """
    SET search_path = evil, public;
    SET client_min_messages = log;
    SET debug_pretty_print = off;
    SET debug_print_parse = on;
"""
CALLED = re.compile(r":(?:opno|opfuncid|funcid|aggfnoid|winfnoid)\s+(\d{5,})")
PLANTED = """
    SELECT oid::regprocedure::text FROM pg_proc WHERE oid = ANY (%(oids)s) AND pronamespace = 'evil'::regnamespace
     UNION
    SELECT oid::regoperator::text FROM pg_operator WHERE oid = ANY (%(oids)s) AND oprnamespace = 'evil'::regnamespace
"""
OURS = """
    SELECT prosrc FROM pg_proc WHERE pronamespace = to_regnamespace('busload')
     UNION ALL SELECT definition FROM pg_views WHERE schemaname = 'busload'
"""


def plant(conn: psycopg.Connection[Any]) -> None:
    """Rivals of every function and operator that our statements, functions and views name, for the types that occur."""
    ours = " ".join([*OWNED.values(), *(text for (text,) in conn.execute(OURS))])
    names = list(set(re.findall(r"[a-z_]\w*(?=\()", ours)))
    functions = conn.execute("SELECT DISTINCT proname FROM pg_proc WHERE proname = ANY (%s) AND oid < 16384", [names])
    operators = conn.execute("SELECT DISTINCT oprname FROM pg_operator WHERE strpos(%s, oprname) > 0", [ours])
    values = {
        "types": f"{TYPES} {ARRAYS}".split(),
        "functions": [name for (name,) in functions],
        "operators": [name for (name,) in operators],
    }
    assert len(values["functions"]) > 40 and len(values["operators"]) > 15
    conn.execute("CREATE SCHEMA evil")
    conn.execute(psycopg.ClientCursor(conn).mogrify(PLANT, values).encode())


@pytest.fixture(scope="module", params=["18", "15"])
def hostile(request: pytest.FixtureRequest) -> Iterator[str]:
    """A database with rivals of all that our statements call."""
    server: TestServer = request.getfixturevalue("server" if request.param == "18" else "oldest_server")
    with server.database() as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        install_queues(conn)
        plant(conn)
        yield dsn


class Parser:
    """Has the server read statements under a stranger's search_path, and tells what of his they would call."""

    def __init__(self, dsn: str) -> None:
        self._reads = psycopg.connect(dsn, autocommit=True)
        self._looks = psycopg.connect(dsn, autocommit=True)
        self._said: list[str] = []
        self._reads.add_notice_handler(lambda said: self._said.append(f"{said.message_primary} {said.message_detail}"))
        self._reads.execute(READ)

    def strangers(self, statement: str, *, run: bool = False) -> list[str]:
        self._said.clear()
        try:
            if run:
                self._reads.execute(statement.encode())
            elif refused := self._reads.pgconn.prepare(b"", statement.encode()).error_message:
                return [refused.decode()]
        except psycopg.Error as error:
            return [str(error)]
        tree = " ".join(self._said)
        assert ":targetList" in tree  # the server has shown how it read the statement
        oids = [int(oid) for oid in CALLED.findall(tree)]
        return [name for (name,) in self._looks.execute(PLANTED, {"oids": oids})]

    def close(self) -> None:
        self._reads.close()
        self._looks.close()


@pytest.fixture
def parser(hostile: str) -> Iterator[Parser]:
    parser = Parser(hostile)
    yield parser
    parser.close()


def test_the_planted_ones_are_found_where_a_statement_leaves_room_for_them(parser: Parser) -> None:
    """Otherwise the next test would prove nothing."""
    for careless in (
        "SELECT status::varchar = 'PENDING' FROM busload.batch",
        "SELECT details ->> 'type' FROM busload.event",
        "SELECT array_agg(batch_id) FROM busload.batch",
        "SELECT count(batch_id) FROM busload.batch",
        "SELECT 1 / rate FROM busload.rate_limit",
        "SELECT unnest(domains) FROM busload.worker",
        "SELECT nextval('busload.load_number')",
    ):
        assert parser.strangers(careless), careless
    assert parser.strangers("SELECT status = 'PENDING' FROM busload.batch") == []


def test_no_statement_of_ours_calls_what_a_stranger_has_planted(parser: Parser) -> None:
    texts = OWNED | {"connection.about": ABOUT}
    found = {
        name: strangers
        for name, text in texts.items()
        if not text.startswith("COPY ") and (strangers := parser.strangers(as_prepared(text)[0]))
    }
    assert found == {}


SEARCH_PATH = "search_path=pg_catalog, pg_temp"
NAMES_WHAT_IT_CALLS = {"buffer_depth", "end_groups", "removable"}


def test_every_function_of_ours_looks_nowhere_else(hostile: str) -> None:
    """But for three that name what they call, and those that PostgreSQL has read when they were created."""
    with psycopg.connect(hostile) as conn:
        rows = conn.execute(
            "SELECT proname, proconfig FROM pg_proc WHERE pronamespace = 'busload'::regnamespace AND prosqlbody IS NULL"
        ).fetchall()
    found = {name: settings for name, settings in rows if name not in NAMES_WHAT_IT_CALLS}
    assert len(found) > 5
    assert {name for name, settings in found.items() if SEARCH_PATH not in settings} == set()


def test_the_functions_that_name_what_they_call_call_nothing_else(parser: Parser) -> None:
    assert parser.strangers("SELECT * FROM busload.removable(ARRAY[1::bigint], 'infinity')", run=True) == []
    assert parser.strangers("SELECT busload.end_groups(ARRAY[1::bigint], 'COMPLETED'::text)", run=True) == []
    for table in ("NULL", "'busload.buffered'"):
        depth = f"SELECT * FROM busload.buffer_depth('b'::text, {table}::text, NULL, NULL, 5)"
        assert parser.strangers(depth, run=True) == []


@pytest.mark.parametrize(("users_tables", "path"), [(False, "pg_catalog, pg_temp"), (True, "evil,pg_catalog")])
async def test_a_worker_leaves_the_search_path_only_to_statements_about_tables_of_users(
    hostile: str, users_tables: bool, path: str
) -> None:
    pool = engine_pool(f"{hostile}&options=-csearch_path%3Devil%2Cpg_catalog", 1, users_tables=users_tables)
    async with pool, pool.connection() as conn:
        shown = await (await conn.execute("SHOW search_path")).fetchone()
    assert shown == (path,)


async def test_a_whole_life_of_commands_calls_nothing_that_was_planted(
    hostile: str, worker_settings: WorkerSettings
) -> None:
    """Each of the planted functions raises, and so does the function behind each operator."""
    await live(f"{hostile}&options=-csearch_path%3Devil%2Cpublic", settings=worker_settings)
