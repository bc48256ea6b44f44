"""Every statement we own, prepared by the servers we support; and the plans of the hot ones over a backlog."""

from __future__ import annotations

import re
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql
from psycopg._queries import MAX_CACHED_STATEMENT_LENGTH

from busload import BatchCommand
from busload.buffers.event_table import OWN
from busload.commands import claim, rescue, settle, wake
from busload.commands.execution import COMPLETED, FAILED_ATTEMPT, TROUBLESHOOTING, Lease, Leased, Transition
from busload.commands.load import Load
from busload.commands.wording import counted
from busload.limits import order
from busload.postgres.arrays import Packed, Texts
from busload.postgres.plan import Plan, Statement, perform_async
from busload.postgres.pool import engine_pool
from busload.postgres.schema import migrate
from busload.postgres.statements import statements
from busload.sync.plan import perform
from busload.testing import TestServer
from tests.given import DOMAIN, Database, Given, eventually
from tests.imports.installed import install_queues

PACKAGE = Path(str(files("busload")))
SUBJECTS = sorted(
    ".".join(["busload", *file.relative_to(PACKAGE).with_suffix("").parts])
    for file in PACKAGE.rglob("*.sql")
    if file.parent.name != "schema"
)
PLACES = {"beyond": "true", "names": "key", "values": "%(v0)s::text"}
OWNED = {
    f"{subject.removeprefix('busload.')}.{name}": OWN.spell(text, **PLACES).decode()
    for subject in SUBJECTS
    for name, text in statements(subject).by_name.items()
} | {
    "migrate.lock": migrate.LOCK.decode(),
    "migrate.exists": migrate.EXISTS.decode(),
    "migrate.applied": migrate.APPLIED.decode(),
}
PARAMETER = re.compile(r"%\((\w+)\)[sbt]")
WIDEST_LINE = 110
HOT = {"queue", "lease", "command", "execution", "batch", "scheduled"}
BACKLOG = 100_000


def source_of(module: str, ending: str) -> str:
    return PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(ending).read_text()


def as_prepared(text: str) -> tuple[str, list[str]]:
    """A statement as the server sees it: `$1` for each parameter, and their names in that order."""
    names = list(dict.fromkeys(PARAMETER.findall(text)))
    numbered = PARAMETER.sub(lambda found: f"${names.index(found[1]) + 1}", text)
    return numbered.replace("%%", "%"), names


@pytest.mark.parametrize("name", OWNED)
def test_every_parameter_carries_its_cast(name: str) -> None:
    assert re.findall(r"%\(\w+\)[sbt](?!::[a-z])", OWNED[name]) == []


@pytest.mark.parametrize("name", OWNED)
def test_no_statement_is_too_long_to_be_remembered(name: str) -> None:
    """Beyond this length psycopg reads a statement anew for each call, which takes longer than to run it."""
    assert MAX_CACHED_STATEMENT_LENGTH == 4096
    assert len(OWNED[name].encode()) <= MAX_CACHED_STATEMENT_LENGTH


@pytest.mark.parametrize("subject", SUBJECTS)
def test_what_is_left_out_of_a_statement_to_shorten_it_is_not_missed(subject: str) -> None:
    """Comments and line breaks go; a text that holds two dashes or two spaces would lose them, so there is none."""
    source = source_of(subject, ".sql")
    code = re.sub(r"^--.*$", "", source, flags=re.MULTILINE)
    assert [text for text in re.findall(r"'[^'\n]*'", code) if "--" in text or "  " in text] == []
    for text in statements(subject).by_name.values():
        assert b"--" not in text and b"\n" not in text and b"  " not in text


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.sql")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_no_line_of_sql_is_too_long_to_be_read(file: Path) -> None:
    lines = enumerate(file.read_text().splitlines(), 1)
    assert [number for number, line in lines if len(line) > WIDEST_LINE] == []


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_statement_says_what_it_does(subject: str) -> None:
    assert re.findall(r"^-- name: (\w+)\n(?!-- )", source_of(subject, ".sql"), flags=re.MULTILINE) == []


def test_a_fragment_is_written_once_because_several_places_include_it() -> None:
    sources = {subject: source_of(subject, ".sql") for subject in SUBJECTS}
    for subject, source in sources.items():
        known = [other for other, text in sources.items() if f"-- fragments of: {subject}\n" in text]
        for name in re.findall(r"^-- fragment: (\w+)$", source, flags=re.MULTILINE):
            included = sum(sources[each].count(f"{{{name}}}") for each in {subject, *known})
            assert included >= 2, f"{subject}: {name} is included {counted(included, 'time')}"


def test_the_server_prepares_every_statement(either_server: TestServer) -> None:
    assert len(OWNED) > 30
    refused = []
    with either_server.database() as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        install_queues(conn)
        for name, text in OWNED.items():
            if re.match(r"(--[^\n]*\n)*\s*COPY\b", text):
                continue  # cannot be prepared; the tests that send commands run it
            try:
                conn.execute(f'PREPARE "{name}" AS {as_prepared(text)[0]}'.encode())
            except psycopg.Error as error:
                refused.append(f"{name}: {error}")
    assert refused == []


@pytest.mark.parametrize("subject", SUBJECTS)
def test_python_asks_for_statements_that_exist_and_no_statement_is_left_over(subject: str) -> None:
    asked = set(re.findall(r"(?<![\w.])SQL\.(\w+)", source_of(subject, ".py")))
    assert asked | asked_elsewhere()[subject.rpartition(".")[2]] == set(statements(subject).by_name)


@cache
def asked_elsewhere() -> Mapping[str, set[str]]:
    """The statements that other modules ask for, as `claim.SQL.take`: by the name of the module that has them."""
    asked: defaultdict[str, set[str]] = defaultdict(set)
    for file in PACKAGE.rglob("*.py"):
        for module, name in re.findall(r"\b(\w+)\.SQL\.(\w+)", file.read_text()):
            asked[module].add(name)
    return asked


# -- the plans --------------------------------------------------------------------------------------------------

FILL = """
    INSERT INTO busload.worker (name, domains, concurrency, lease_for)
    SELECT 'w' || n, '{payments}', 100, '1 hour' FROM generate_series(1, 500) AS n;
    INSERT INTO busload.batch (batch_id, domain, status, total_count, sealed_at)
    SELECT gen_random_uuid(), 'payments', 'IN_PROGRESS', 1000, now() FROM generate_series(1, 20000);
    SELECT setval('busload.load_number', 1000000);

    -- the past: 200,000 commands that have ended
    INSERT INTO busload.command (id, domain, command_id, command_type, data)
    SELECT n / 1000 * 1024 + n % 1000, 'payments', gen_random_uuid(), 'Debit', '{}'
      FROM generate_series(0, 199999) AS n;
    INSERT INTO busload.execution (command, attempt, outcome, lease_id, worker, started_at, finished_at)
    SELECT id, 1, 'COMPLETED', gen_random_uuid(), 1, now(), now() FROM busload.command;

    -- the backlog: 100,000 single commands ready, and as many not due
    INSERT INTO busload.command (id, domain, command_id, command_type, data)
    SELECT (100000 + n) * 1024, 'payments', gen_random_uuid(), 'Debit', '{}'
      FROM generate_series(1, 2 * %(backlog)s) AS n;
    INSERT INTO busload.queue (lo, hi, domain)
    SELECT (100000 + n) * 1024, (100000 + n) * 1024, 'payments' FROM generate_series(1, %(backlog)s) AS n;
    INSERT INTO busload.scheduled (lo, hi, domain, run_at, reason)
    SELECT (100000 + n) * 1024, (100000 + n) * 1024, 'payments', now() + n * interval '1 s', 'RUN_AT'
      FROM generate_series(%(backlog)s + 1, 2 * %(backlog)s) AS n;

    -- batches that take turns: 2,000 with ten loads each
    INSERT INTO busload.queue (lo, hi, domain, batch_id, fair)
    SELECT (600000 + n) * 1024, (600000 + n) * 1024 + 4, 'tiles', md5((n %% 2000)::text)::uuid, hashint8(n %% 2000)
      FROM generate_series(1, 20000) AS n;

    -- what runs: 500 workers with a hundred leases each
    INSERT INTO busload.command (id, domain, command_id, command_type, data)
    SELECT (500000 + n) * 1024, 'payments', gen_random_uuid(), 'Debit', '{}' FROM generate_series(1, 50000) AS n;
    INSERT INTO busload.lease
           (lease_id, lo, hi, domain, batch_id, priority, attempt, forgiven, crashes, replies, fair, worker, open)
    SELECT (left(gen_random_uuid()::text, 33) || '000')::uuid, (500000 + n) * 1024, (500000 + n) * 1024, 'payments',
           batch_id, 0, 1, 0, 0, false, 0, n %% 500 + 1, 1
      FROM generate_series(1, 50000) AS n
      JOIN (SELECT batch_id, row_number() OVER () - 1 AS place FROM busload.batch) AS b ON place = n %% 20000;
    ANALYZE busload.worker; ANALYZE busload.batch; ANALYZE busload.command; ANALYZE busload.execution;
    ANALYZE busload.queue; ANALYZE busload.scheduled; ANALYZE busload.lease;
"""


@pytest.fixture(scope="module", params=["18", "15"])
def backlog(request: pytest.FixtureRequest) -> Iterator[psycopg.Connection[Any]]:
    """A connection to a database that holds a backlog; what a test does there is rolled back."""
    server: TestServer = request.getfixturevalue("server" if request.param == "18" else "oldest_server")
    with server.database() as dsn, psycopg.connect(dsn) as conn:
        conn.execute((FILL.replace("%(backlog)s", str(BACKLOG)).replace("%%", "%")).encode())
        conn.commit()
        yield conn
        conn.rollback()


def leased_ones(conn: psycopg.Connection[Any], count: int) -> list[Leased]:
    rows = conn.execute(
        "SELECT lease_id, lo, hi, domain, batch_id, priority, attempt, forgiven, crashes, since FROM busload.lease"
        " WHERE hi > 512000000 ORDER BY hi LIMIT %s",
        [count],
    ).fetchall()
    return [Leased(Lease(row[0], Load(*row[1:3]), *row[3:]), row[1], uuid4(), "Debit", None) for row in rows]


def settlement(leased: list[Leased]) -> Plan[set[int]]:
    outcomes = [COMPLETED, FAILED_ATTEMPT, TROUBLESHOOTING]
    transitions = [
        Transition(one, outcomes[n % 3], "{}", delay=10.0, reason="PERMANENT" if n % 3 == 2 else None)
        for n, one in enumerate(leased)
    ]
    return settle.settle(transitions, now=0.0)


def hot_plans(conn: psycopg.Connection[Any]) -> dict[str, Plan[Any]]:
    one, *many = leased_ones(conn, 101)
    ids: list[UUID] = [leased.lease.lease_id for leased in many]
    return {
        "claim": claim.claim(worker=1, domains=["payments"], limit=100),
        "claim one of two domains": claim.claim(worker=1, domains=["payments", "crm"], limit=1),
        "claim all": claim.claim(worker=1, domains=["payments"], limit=100, no_turns=True),
        "claim in turns": claim.claim(worker=1, domains=["tiles", "payments"], limit=100, turns={"tiles": 7}),
        "promote": claim.promote(),
        "promote for an idle worker": claim.promote(domains=["payments", "crm"]),
        "tell all": wake.tell_all(["payments", "crm"]),
        "settle": settlement(many),
        "settle one": settlement([one]),
        "renew": rescue.renew(worker=1, settled=timedelta(seconds=20)),
        "return_leases": rescue.return_leases(ids, suspect=True),
        "return one": rescue.return_leases([one.lease.lease_id], suspect=False),
        "start_batches": rescue.start_batches(worker=1),
    }


def plain(value: Any) -> Any:
    """A packed array as the list it was made from."""
    if not isinstance(value, Packed):
        return value
    values: list[Any] = []
    place = 20
    while place < len(value):
        [width] = struct.unpack_from("!i", value, place)
        place += 4
        raw = value[place : place + max(width, 0)]
        values.append(None if width < 0 else raw.decode() if isinstance(value, Texts) else _number(value, raw))
        place += max(width, 0)
    return values


def _number(array: Packed, raw: bytes) -> Any:
    return struct.unpack(f"!{array.code}", raw)[0]


def scans(node: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if "Relation Name" in node:
        yield node["Node Type"], node["Relation Name"]
    for child in node.get("Plans", ()):
        yield from scans(child)


PLANS = [
    "claim",
    "claim one of two domains",
    "claim all",
    "claim in turns",
    "promote",
    "promote for an idle worker",
    "tell all",
    "settle",
    "settle one",
    "renew",
    "return_leases",
    "return one",
    "start_batches",
]


def explained(
    conn: psycopg.Connection[Any], plan: Plan[Any], mode: str, options: str = "FORMAT JSON"
) -> dict[str, Any]:
    """What PostgreSQL plans for the first statement of a plan; with ANALYZE among the options it is run, and undone."""
    with conn.transaction(force_rollback=True):
        conn.execute(f"SET LOCAL plan_cache_mode = {mode}".encode())
        statement = next(plan)
        assert isinstance(statement, Statement)
        text, names = as_prepared(statement.sql.decode())
        conn.execute(f"PREPARE hot AS {text}".encode())
        try:
            values = sql.SQL(", ").join(sql.Literal(plain(statement.params[name])) for name in names)
            call = sql.SQL("EXECUTE hot ({})").format(values) if names else sql.SQL("EXECUTE hot")
            asked = sql.SQL("EXPLAIN ({}) {}").format(sql.SQL(options), call)
            [(found,)] = conn.execute(asked).fetchall()
        finally:
            conn.execute("DEALLOCATE hot")
    root: dict[str, Any] = found[0]["Plan"]
    return root


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("name", PLANS)
def test_with_a_backlog_of_100_000_the_hot_statements_use_their_indexes(
    backlog: psycopg.Connection[Any], name: str, mode: str
) -> None:
    read = list(scans(explained(backlog, hot_plans(backlog)[name], mode)))
    assert [table for kind, table in read if kind == "Seq Scan" and table in HOT] == []
    assert any(table in HOT for _, table in read)


def compared_in_vain(node: dict[str, Any]) -> int:
    """How many pairs of rows the joins of a plan have looked at that do not belong together."""
    own = node.get("Rows Removed by Join Filter", 0) * node.get("Actual Loops", 1)
    return int(own) + sum(map(compared_in_vain, node.get("Plans", ())))


async def test_a_settlement_of_many_failures_compares_no_result_with_all_others(given: Given, dsn: str) -> None:
    """A plan that was made for any number of results, by a database that has seen few"""
    commands = [BatchCommand("Debit", reply_to="answers") for _ in range(300)]
    await given.bus.send_many(DOMAIN, commands)
    worker = given.registered_worker()
    leased = [one for _ in range(100) for one in given.claimed(limit=3, by=worker)]  # three of each lease
    with psycopg.connect(dsn) as conn:
        plan = explained(conn, settlement(leased), "force_generic_plan", "ANALYZE, FORMAT JSON")
    assert compared_in_vain(plan) <= len(leased)


IN_PLACE = ("busload.fair_of(", "busload.turns(")
"""Functions whose body the planner can put in the place of their call: else each call would plan it anew."""


@pytest.mark.parametrize("name", [name for name, text in OWNED.items() if any(call in text for call in IN_PLACE)])
def test_the_planner_puts_functions_in_the_place_of_their_calls(backlog: psycopg.Connection[Any], name: str) -> None:
    with backlog.transaction(force_rollback=True):
        backlog.execute("SET LOCAL plan_cache_mode = force_generic_plan")
        text, names = as_prepared(OWNED[name])
        backlog.execute(f"PREPARE called AS {text}".encode())
        try:
            nulls = ", ".join("NULL" for _ in names)
            lines = backlog.execute(f"EXPLAIN (VERBOSE) EXECUTE called ({nulls})".encode()).fetchall()
        finally:
            backlog.execute("DEALLOCATE called")
    plan = "\n".join(line for (line,) in lines)
    assert "queue" in plan and not [call for call in IN_PLACE if call in plan]


@pytest.mark.parametrize("name", PLANS)
def test_triggers_of_the_hot_statements_read_no_hot_table_from_end_to_end(
    backlog: psycopg.Connection[Any], name: str
) -> None:
    """What EXPLAIN cannot show, because it happens inside functions: counted by the server while it runs."""
    with backlog.transaction(force_rollback=True):
        plan = hot_plans(backlog)[name]
        before = seq_scans(backlog)
        perform(backlog, plan)
        assert {table: n - before[table] for table, n in seq_scans(backlog).items() if n > before[table]} == {}


def seq_scans(conn: psycopg.Connection[Any]) -> dict[str, int]:
    rows = conn.execute(
        "SELECT relname, coalesce(seq_scan, 0) FROM pg_stat_xact_user_tables WHERE schemaname = 'busload'"
    ).fetchall()
    return {table: n for table, n in rows if table in HOT}


def test_a_claim_of_a_hundred_reads_about_as_many_rows_of_the_backlog(backlog: psycopg.Connection[Any]) -> None:
    with backlog.transaction(force_rollback=True):
        reads = "SELECT sum(idx_tup_fetch + seq_tup_read) FROM pg_stat_xact_user_tables WHERE relname = 'queue'"
        before = backlog.execute(reads).fetchone()
        taken = perform(backlog, claim.claim(worker=1, domains=["payments"], limit=100))
        after = backlog.execute(reads).fetchone()
        assert len(taken.leased) == 100
        assert before is not None and after is not None and after[0] - before[0] <= 500


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("limit", [1, 10, 100])
def test_a_claim_among_2000_batches_reads_about_as_many_rows_as_it_takes_commands(
    backlog: psycopg.Connection[Any], limit: int, mode: str
) -> None:
    """It leaps from batch to batch, and looks at eight or as many as it needs, wherever it begins."""
    with backlog.transaction(force_rollback=True):
        backlog.execute(f"SET LOCAL plan_cache_mode = {mode}".encode())
        reads = "SELECT sum(idx_tup_fetch + seq_tup_read) FROM pg_stat_xact_user_tables WHERE relname = 'queue'"
        for after in (-(2**63), 0, 2**62):
            before = backlog.execute(reads).fetchone()
            perform(backlog, claim.claim(worker=1, domains=["tiles"], limit=limit, turns={"tiles": after}))
            after_it = backlog.execute(reads).fetchone()
            assert before is not None and after_it is not None
            assert after_it[0] - before[0] <= 150 + 5 * limit


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("domain", ["payments", "tiles"])
def test_a_claim_in_order_reads_by_index_whatever_waits(
    backlog: psycopg.Connection[Any], domain: str, mode: str
) -> None:
    """100,000 single sends, or 20,000 loads of 2,000 batches, which lose their owners first."""
    with backlog.transaction(force_rollback=True):
        backlog.execute(f"SET LOCAL plan_cache_mode = {mode}".encode())
        if domain == "tiles":
            disowning = partial(order.claim_in_order, worker=1, domain=domain, limit=100, suspects=True, owned=True)
            for _ in range(20_000 // order.DISOWNED):
                assert perform(backlog, disowning(keys=lambda leased: {})) == order.BUSY
        reads = "SELECT sum(idx_tup_fetch + seq_tup_read) FROM pg_stat_xact_user_tables WHERE relname = 'queue'"
        [(before,)], scanned = backlog.execute(reads).fetchall(), seq_scans(backlog)
        keys = [order.Key("orders", str(n)) for n in range(10)]

        def keys_of(leased: Sequence[Leased]) -> dict[Leased, order.Key]:
            return {one: keys[n % 10] for n, one in enumerate(leased)}

        look = perform(backlog, order.look(domain, suspects=True))
        assert look == (True, False)
        plan = order.claim_in_order(worker=1, domain=domain, limit=100, suspects=True, owned=look.owned, keys=keys_of)
        taken = perform(backlog, plan)
        [(after,)] = backlog.execute(reads).fetchall()
        if domain == "payments":
            assert (len(taken.first), len(taken.waiting)) == (10, 90)
        assert after - before <= 1_000
        perform(backlog, settle.settle([Transition(one, COMPLETED) for one in taken.first], now=0.0))
        assert perform(backlog, order.advance(keys)) == (10 if domain == "payments" else 0)
        assert perform(backlog, order.sweep()) == 0
        assert {table: n for table, n in seq_scans(backlog).items() if n > scanned[table]} == {}


# -- plans that were made too early ---------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [False, True], ids=["first time", "repeated"])
async def test_a_plan_made_on_empty_tables_does_not_read_full_ones_from_end_to_end(
    given: Given, database: Database, dsn: str, again: bool
) -> None:
    """A worker plans each statement once, when its tables may be empty and known to be: then reading all is cheapest.

    Counted by the server in rows, not in time: to settle 20 times 1,000 reads what is settled, and not each time all
    that was settled before, or that others hold.
    """
    database.rows("VACUUM ANALYZE")
    async with engine_pool(dsn, 1) as pool, pool.connection() as conn:
        worker = given.registered_worker()
        empty = await perform_async(conn, claim.claim(worker=worker, domains=[DOMAIN], limit=1))
        assert empty.leased == []
        unknown = Lease(uuid4(), Load(1, 1), DOMAIN, None, 0, 1, 0, 0, datetime.now(UTC))
        for _ in range(10):  # more often than any server waits before it settles on a plan
            transition = Transition(Leased(unknown, 1, uuid4(), "Debit", None), COMPLETED)
            assert await perform_async(conn, settle.settle([transition], now=0.0, again=again)) == set()
        fill_aside(database)
        for _ in range(20):
            await given.batch(commands=1000)
        await conn.execute("SELECT pg_stat_force_next_flush()", prepare=False)
        before = rows_read(database)
        for _ in range(20):
            taken = await perform_async(conn, claim.claim(worker=worker, domains=[DOMAIN], limit=1000))
            transitions = [Transition(one, COMPLETED) for one in taken.leased]
            for part in (transitions[:500], transitions[500:]):  # the lease stays open, and is closed
                assert len(await perform_async(conn, settle.settle(part, now=0.0, again=again))) == 500
        await conn.execute("SELECT pg_stat_force_next_flush()", prepare=False)
        await conn.execute("SELECT 1", prepare=False)
        await eventually(lambda: rows_read(database)["execution"][2] - before["execution"][2] >= 20_000)
    after = rows_read(database)
    for table, most in {"execution": 0, "lease": 0, "batch": 0, "queue": 0, "command": 20_000}.items():
        scans, read = (after[table][n] - before[table][n] for n in range(2))
        assert scans == 0, f"{table} was read from end to end {scans} times"
        assert read <= most + 40 * 25, f"{read} rows of {table} were read for 20 claims and 40 flushes"
    counted = database.value("SELECT sum(completed_count) FROM busload.batch WHERE domain = %s", DOMAIN)
    assert counted == 20_000


def fill_aside(database: Database) -> None:
    """Others are at work as well: 3,000 leases, batches and executions that are not ours to read."""
    database.rows(
        "INSERT INTO busload.batch (batch_id, domain, status, total_count, sealed_at)"
        " SELECT gen_random_uuid(), 'crm', 'IN_PROGRESS', 1000, now() FROM generate_series(1, 3000)"
    )
    database.rows(
        "INSERT INTO busload.lease"
        " (lease_id, lo, hi, domain, priority, attempt, forgiven, crashes, replies, fair, worker, open)"
        " SELECT gen_random_uuid(), n * 1024, n * 1024, 'crm', 0, 1, 0, 0, false, 0, 1, 1"
        "   FROM generate_series(1000000, 1003000) AS n"
    )
    database.rows(
        "INSERT INTO busload.execution (command, attempt, outcome, lease_id, worker, started_at, finished_at)"
        " SELECT n::bigint * 1024, 1, 'COMPLETED', gen_random_uuid(), 1, now(), now()"
        "   FROM generate_series(1000000, 1003000) AS n"
    )


def rows_read(database: Database) -> dict[str, tuple[int, int, int]]:
    """Per table: how often it was read from end to end, how many rows were read, how many written."""
    rows = database.rows(
        "SELECT relname, seq_scan, seq_tup_read + coalesce(idx_tup_fetch, 0), n_tup_ins FROM pg_stat_user_tables"
        " WHERE schemaname = 'busload'"
    )
    return {table: (scans, read, written) for table, scans, read, written in rows}
