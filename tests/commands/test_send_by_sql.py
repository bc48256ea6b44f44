"""`busload.send(...)`: the same command as `bus.send` sends, from SQL, in the transaction of its caller."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from importlib.metadata import entry_points
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Json, Jsonb

from busload import BatchCommand, CommandBus, Dedup, SyncCommandBus
from busload.errors import (
    BatchNotFoundError,
    BatchSealedError,
    BusloadError,
    DuplicateCommandError,
    DuplicateTaskError,
    InvalidCommandError,
)
from tests.conftest import OLDEST
from tests.given import DOMAIN, Database, Given

LATER = datetime(2040, 1, 1, tzinfo=UTC)
TYPES = {"data": "jsonb", "headers": "jsonb", "priority": "integer", "max_attempts": "integer", "dedup": "interval"}
NIL, SOME = UUID(int=0), UUID(int=7)


def call(conn: psycopg.Connection[Any], domain: Any, command_type: Any, **options: Any) -> UUID:
    """Call the function with named parameters, as people do."""
    values = {"domain": domain, "command_type": command_type, **options}
    named = [
        sql.SQL("{} => %({})s{}").format(
            sql.Identifier(name), sql.SQL(name), sql.SQL(f"::{TYPES[name]}" if name in TYPES else "")
        )
        for name in values
    ]
    packed = {name: Jsonb(value) if isinstance(value, dict | list) else value for name, value in values.items()}
    row = conn.execute(sql.SQL("SELECT busload.send({})").format(sql.SQL(", ").join(named)), packed).fetchone()
    assert row is not None
    return UUID(str(row[0]))


@pytest.fixture
def mine(dsn: str) -> Any:
    with psycopg.connect(dsn) as conn:
        yield conn


def everything_about(database: Database, command_id: UUID) -> dict[str, Any]:
    """What the tables hold of a command, without what differs from one command to the next."""
    id = database.value("SELECT id FROM busload.command WHERE command_id = %s", command_id)
    found: dict[str, Any] = {}
    for table, key in (("command", "id"), *((place, "hi") for place in ("queue", "scheduled", "outbox", "expiry"))):
        query = f"SELECT to_jsonb(t) FROM busload.{table} AS t WHERE {key} = %s"
        found[table] = [
            {
                name: value
                for name, value in row.items()
                if name not in ("id", "lo", "hi", "command_id", "created_at", "since", "due_at", "entered")
            }
            for (row,) in database.rows(query, id)
        ]
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"data": {"text": "ä'\"\\", "n": [1, 2.5, None, True]}},
        {"priority": -7, "max_attempts": 3, "reply_to": "accounts", "correlation_id": SOME, "task_key": "k"},
        {"run_at": LATER, "expires_at": LATER + timedelta(days=1), "headers": {"tenant": "acme"}},
        {"run_at": datetime(2000, 1, 1, tzinfo=UTC), "fair_by": "acme", "headers": {}},
    ],
    ids=["bare", "data", "options", "later", "past"],
)
def test_the_function_writes_what_the_bus_writes(
    sync_bus: SyncCommandBus, database: Database, mine: psycopg.Connection[Any], options: dict[str, Any]
) -> None:
    """The same rows in the same places; it is there with the commit, and its id is given back"""
    rest = {name: value for name, value in options.items() if name != "data"}
    by_bus = sync_bus.send(DOMAIN, "Debit", options.get("data"), **rest)
    by_function = call(mine, DOMAIN, "Debit", **options)
    assert database.count("command") == 1
    mine.commit()
    assert everything_about(database, by_function) == everything_about(database, by_bus.command_id)
    found, same = sync_bus.get_command(DOMAIN, by_function), sync_bus.get_command(DOMAIN, by_bus.command_id)
    assert found is not None and same is not None and (found.data, found.status) == (same.data, same.status)
    trails = [sync_bus.get_audit_trail(DOMAIN, id) for id in (by_function, by_bus.command_id)]
    assert [event.type for event in trails[0]] == [event.type for event in trails[1]] == ["SENT"]


async def test_a_worker_runs_what_was_sent_and_hears_of_it_at_once(
    bus: CommandBus, given: Given, dsn: str, database: Database
) -> None:
    seen = given.handler()
    with psycopg.connect(dsn, autocommit=True) as listener, psycopg.connect(dsn) as mine:
        listener.execute("LISTEN busload_ready; LISTEN busload_outbox")
        sent = call(mine, DOMAIN, "Debit", data={"n": 1}, headers={"tenant": "acme"})
        late = call(mine, DOMAIN, "Debit", delay=timedelta(hours=1))
        call(mine, "broker", "Debit", transport="rabbitmq")
        mine.commit()
        told = {(note.channel, note.payload) for note in listener.notifies(timeout=5, stop_after=2)}
    assert told == {("busload_ready", DOMAIN), ("busload_outbox", "rabbitmq")}
    assert await given.drained() == 1
    assert [(command.command_id, command.data, command.headers) for command in seen] == [
        (sent, {"n": 1}, {"tenant": "acme"})
    ]
    assert (await given.command_now(late)).status == "SCHEDULED"
    assert database.rows("SELECT domain, transport FROM busload.outbox") == [("broker", "rabbitmq")]
    database.check_invariants()


BAD: list[tuple[str, str, dict[str, Any]]] = [
    ("pay ments", "Debit", {}),
    ("", "Debit", {}),
    ("p" * 256, "1Debit", {}),
    (DOMAIN, "busload.Group", {}),
    (DOMAIN, "Debit", {"priority": 40_000, "max_attempts": 0}),
    (DOMAIN, "Debit", {"reply_to": "x y", "task_key": "", "fair_by": "f" * 256}),
    (DOMAIN, "Debit", {"task_key": "k" * 513}),
    (DOMAIN, "Debit", {"run_at": datetime(2200, 1, 1, tzinfo=UTC)}),
    (DOMAIN, "Debit", {"headers": {"": "x"}}),
    (DOMAIN, "Debit", {"headers": {"a": ["x"]}}),
    (DOMAIN, "Debit", {"headers": ["a"]}),
    (DOMAIN, "Debit", {"headers": {"a": "x" * 9000}}),
    (DOMAIN, "Debit", {"command_id": NIL, "correlation_id": NIL}),
    (DOMAIN, "Debit", {"data": ["x" * 1_048_576]}),
    (DOMAIN, "Debit", {"expires_at": datetime(2020, 1, 1, tzinfo=UTC)}),
    (DOMAIN, "Debit", {"expires_at": LATER, "run_at": LATER}),
    (DOMAIN, "Debit", {"batch_id": SOME, "fair_by": "acme"}),
]


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_what_the_bus_refuses_the_function_refuses_for_the_same_reason(
    sync_bus: SyncCommandBus, database: Database, mine: psycopg.Connection[Any], bad: tuple[str, str, dict[str, Any]]
) -> None:
    domain, command_type, options = bad
    rest = {name: value for name, value in options.items() if name != "data"}
    with pytest.raises(InvalidCommandError) as by_bus:
        sync_bus.send(domain, command_type, options.get("data"), **rest)
    with pytest.raises(psycopg.errors.InvalidParameterValue) as by_function:
        call(mine, domain, command_type, **options)
    said = str(by_function.value)
    for problem in by_bus.value.problems:
        path = "/".join(problem.path.split("/")[:2])
        assert f"at {path}: " in said
    assert "Nothing was written." in said
    mine.rollback()
    assert database.count("command") == 0


@pytest.mark.parametrize("long_ago", ["-infinity", "0044-03-15 BC", "0001-01-01"])
def test_a_time_that_no_python_can_read_means_now(
    sync_bus: SyncCommandBus, mine: psycopg.Connection[Any], long_ago: str
) -> None:
    """As the year 1 does for the bus; lists that hold the command can be read"""
    command_id = call(mine, DOMAIN, "Debit", run_at=long_ago)
    mine.commit()
    [listed] = sync_bus.list_commands(DOMAIN).commands
    assert (listed.command_id, listed.status, listed.run_at) == (command_id, "PENDING", None)


NESTED: Callable[[int], Any] = lambda depth: [] if depth == 1 else [NESTED(depth - 1)]  # noqa: E731


def test_data_may_be_nested_as_deeply_as_by_the_bus_and_no_deeper(
    sync_bus: SyncCommandBus, mine: psycopg.Connection[Any]
) -> None:
    sync_bus.send(DOMAIN, "Debit", NESTED(64))
    call(mine, DOMAIN, "Debit", data=NESTED(64))
    with pytest.raises(InvalidCommandError):
        sync_bus.send(DOMAIN, "Debit", NESTED(65))
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="at /data: found more than 64 nested containers"):
        call(mine, DOMAIN, "Debit", data=NESTED(65))


LONGEST = 10**4300 - 1
TEXT = "1" * 9000


@pytest.mark.parametrize(
    "around", [lambda n: n, lambda n: ["x" * 3000, {"a": [n]}], lambda n: {"ä" * 2000: n, "b": TEXT}]
)
def test_a_number_may_have_as_many_digits_as_by_the_bus_and_no_more(
    sync_bus: SyncCommandBus, mine: psycopg.Connection[Any], around: Callable[[Any], Any]
) -> None:
    """Also a negative one, and one that is not whole; a text may have more digits"""
    mine.autocommit = True
    for number in (LONGEST, -LONGEST):
        sent = call(mine, DOMAIN, "Debit", data=Json(around(number)))
        found = sync_bus.get_command(DOMAIN, sent)
        assert found is not None and found.data == around(number)
    for number in (LONGEST + 1, -LONGEST - 1):
        too_long = pytest.raises(psycopg.errors.InvalidParameterValue, match=r"NUMBER_TOO_LONG at /data: .*4300 digits")
        with unlimited_digits(), too_long:
            call(mine, DOMAIN, "Debit", data=Json(around(number)))
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="NUMBER_TOO_LONG"):
        mine.execute("SELECT busload.send('payments', 'Debit', '[1.5e4300, 0.5]')")
    assert call(mine, DOMAIN, "Debit", data=Json(around(TEXT)))


@contextmanager
def unlimited_digits() -> Iterator[None]:
    most = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(most)


def test_the_function_knows_the_transports_of_busload_and_those_that_the_database_names(
    mine: psycopg.Connection[Any], database: Database
) -> None:
    names = {point.load().name for point in entry_points(group="busload.transports")}
    for name in names:
        call(mine, DOMAIN, "Debit", transport=name)
    for unknown in ("amqp", "pigeon", "RabbitMQ", "rabbitmq,nats"):
        with pytest.raises(psycopg.errors.InvalidParameterValue) as refused, mine.transaction():
            call(mine, DOMAIN, "Debit", transport=unknown)
        assert f"at /transport: found '{unknown}', wanted the name of a transport: nats, " in str(refused.value)
    mine.execute("SET busload.transports = 'pigeon,swallow'")
    for name in ("pigeon", "swallow", "nats"):
        call(mine, DOMAIN, "Debit", transport=name)
    mine.execute("RESET busload.transports")
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="found '', wanted"), mine.transaction():
        call(mine, DOMAIN, "Debit", transport="")
    mine.commit()
    assert database.count("outbox") == len(names) + 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delay": timedelta(hours=1), "run_at": LATER}, "at /delay: .* not both"),
        ({"delay": -timedelta(seconds=1)}, "at /delay: wanted zero or more"),
        ({"dedup": timedelta(minutes=1)}, "at /task_key: found none, wanted the key that dedup is about"),
        ({"dedup": timedelta(days=40_000), "task_key": "k"}, "at /dedup: found .* to 36525 days"),
        ({"dedup": timedelta(0), "task_key": "k", "on_conflict": "ignore"}, "at /on_conflict: found 'ignore'"),
        ({"transport": ""}, "at /transport: found ''"),
        ({"priority": None}, "at /priority: found NULL"),
    ],
    ids=str,
)
def test_options_of_the_function_alone_are_checked_too(
    mine: psycopg.Connection[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=message):
        call(mine, DOMAIN, "Debit", **options)


def test_what_exists_already_is_refused_in_the_words_of_the_bus(
    sync_bus: SyncCommandBus, mine: psycopg.Connection[Any]
) -> None:
    """A command_id, a batch that is sealed or unknown, a task key with on_conflict raise"""
    mine.autocommit = True
    taken = call(mine, DOMAIN, "Debit", task_key="k", dedup=timedelta(minutes=5))
    sealed = sync_bus.create_batch(DOMAIN, [BatchCommand("Debit")])
    once = Dedup(window=timedelta(minutes=5), on_conflict="raise")
    for error, code, options, of_bus in (
        (DuplicateCommandError, "23505", {"command_id": taken}, {"command_id": taken}),
        (BatchSealedError, "55000", {"batch_id": sealed}, {"batch_id": sealed}),
        (BatchNotFoundError, "55000", {"batch_id": taken}, {"batch_id": taken}),
        (
            DuplicateTaskError,
            "23505",
            {"task_key": "k", "dedup": timedelta(minutes=5), "on_conflict": "raise"},
            {"task_key": "k", "dedup": once},
        ),
    ):
        with pytest.raises(BusloadError) as by_bus:
            sync_bus.send(DOMAIN, "Debit", **of_bus)
        assert isinstance(by_bus.value, error)
        with pytest.raises(psycopg.Error) as by_function:
            call(mine, DOMAIN, "Debit", **options)
        assert by_function.value.sqlstate == code
        words = str(by_bus.value).split(";")[0]
        assert words in str(by_function.value)


def test_a_task_key_is_held_by_one_open_command_whoever_sends_it(
    sync_bus: SyncCommandBus, mine: psycopg.Connection[Any], database: Database
) -> None:
    """The holder's id comes back; a rollback frees the key"""
    mine.rollback()
    first = call(mine, DOMAIN, "Debit", task_key="k", dedup=timedelta(minutes=5))
    mine.rollback()
    second = call(mine, DOMAIN, "Debit", task_key="k", dedup=timedelta(minutes=5))
    assert second != first
    assert call(mine, DOMAIN, "Debit", task_key="k", dedup=timedelta(minutes=5)) == second
    mine.commit()
    assert sync_bus.send(DOMAIN, "Debit", task_key="k", dedup=Dedup()).command_id == second
    assert database.count("command") == 1


def test_a_command_joins_an_open_batch_which_counts_it(
    sync_bus: SyncCommandBus, mine: psycopg.Connection[Any], database: Database
) -> None:
    with sync_bus.open_batch(DOMAIN, fair_by="acme") as batch:
        by_bus = sync_bus.send(DOMAIN, "Debit", batch_id=batch.batch_id).command_id
        by_function = call(mine, DOMAIN, "Debit", batch_id=batch.batch_id)
        mine.commit()
    found = sync_bus.get_batch(DOMAIN, batch.batch_id)
    assert found is not None and found.total_count == 2
    assert by_bus != by_function
    assert database.rows("SELECT count(DISTINCT fair), count(*) FROM busload.queue") == [(1, 2)]
    database.check_invariants()


def test_a_strangers_function_is_not_called_in_its_place(mine: psycopg.Connection[Any]) -> None:
    """Whatever stands first on the search_path of who calls it"""
    mine.execute("CREATE SCHEMA evil")
    raises = "LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION $$planted$$; END'"
    for signature in (
        "now()",
        "coalesce(text)",
        "pg_notify(text, text)",
        "nextval(text)",
        "length(text)",
        "to_hex(int8)",
    ):
        mine.execute(f"CREATE FUNCTION evil.{signature} RETURNS text {raises}".encode())
    mine.execute("CREATE FUNCTION evil.eq(text, text) RETURNS boolean " + raises)
    mine.execute("CREATE OPERATOR evil.|| (LEFTARG = text, RIGHTARG = text, FUNCTION = evil.eq)")
    mine.execute("SET search_path = evil, public, pg_catalog")
    assert call(mine, DOMAIN, "Debit", task_key="k", dedup=timedelta(minutes=5), delay=timedelta(hours=1))


def test_ids_ascend_by_the_millisecond_and_are_of_version_7(mine: psycopg.Connection[Any]) -> None:
    ids = [call(mine, DOMAIN, "Debit") for _ in range(20)]
    assert {(id.version, id.variant) for id in ids} == {(7, "specified in RFC 4122")}
    assert [id.int >> 80 for id in ids] == sorted(id.int >> 80 for id in ids)
    assert len(set(ids)) == 20


def test_psql_sends_a_command(dsn: str, database: Database) -> None:
    statement = "SELECT busload.send('payments', 'Debit', '{\"account\": 7}', delay => '5 minutes')"
    done = subprocess.run([OLDEST / "psql", dsn, "-Atc", statement], capture_output=True, text=True, check=True)
    assert database.rows("SELECT command_id::text, data->>'account' FROM busload.command") == [
        (done.stdout.strip(), "7")
    ]
