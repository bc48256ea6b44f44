"""Some commands go in by one statement, many by COPY: by both ways the same arrives, or nothing."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from busload import BatchCommand, CommandBus, DuplicateCommandError
from busload.commands import send
from busload.commands.command import NewCommand
from busload.commands.ids import new_ids
from busload.commands.load import BLOCK, Load, NewLoad, blocks
from busload.errors import InvalidOperationError
from busload.postgres.plan import Copy, Savepoint, Statement
from tests.given import DOMAIN, Database, Given

WAYS = {"one statement": 10_000_000, "COPY": 0}
COLUMNS = """domain, command_id, command_type, data::text, batch_id, task_key, correlation_id, reply_to, priority,
             max_attempts, run_at, id % 1024"""


@pytest.fixture(params=WAYS.values(), ids=list(WAYS))
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(send, "SOME", request.param)
    return int(request.param)


def new(count: int, **options: Any) -> list[NewCommand]:
    empty = dict.fromkeys(("reply_to", "correlation_id", "task_key", "run_at", "max_attempts"))
    return [
        NewCommand(**{"id_as_int": id.int, "command_type": "Debit", "data": "{}", "priority": 0, **empty, **options})
        for id in new_ids(count)
    ]


@pytest.mark.usefixtures("way")
async def test_every_column_arrives_as_it_was_sent(bus: CommandBus, given: Given) -> None:
    """With signs that a row of text would have to escape, and times to the microsecond"""
    soon = datetime.now(timezone(timedelta(hours=-7))) + timedelta(hours=1, microseconds=1)
    past = datetime(1970, 1, 1, 0, 0, 0, 1, tzinfo=UTC)
    data = ['\\ \t \n " \x7f \x1f é 𝄞 \\N \\.', -0.0, 2**70, None, {}, "x" * 200_000]
    commands = [
        BatchCommand("Debit", data=data),
        BatchCommand("Credit", uuid4(), priority=-32768, max_attempts=32767, run_at=soon),
        BatchCommand("Debit", task_key="\\N\t\n é", correlation_id=uuid4(), reply_to="ledger"),
        BatchCommand("Debit", task_key="\\N\t\n é", correlation_id=uuid4(), reply_to="shop"),
        BatchCommand("Debit", priority=32767, max_attempts=1, run_at=past),
        BatchCommand("Debit", data=1),
    ]
    batch_id = await bus.create_batch(DOMAIN, commands)
    found = {c.command_id: c for c in await bus.list_batch_commands(DOMAIN, batch_id)}
    results = await bus.send_many(DOMAIN, [BatchCommand(c.command_type, data=c.data) for c in commands])

    def by_content(c: Any) -> tuple[Any, ...]:
        return c.priority, c.command_type, c.task_key or "", c.reply_to or "", repr(c.data)

    for command, there in zip(sorted(commands, key=by_content), sorted(found.values(), key=by_content), strict=True):
        assert repr(there.data) == repr(command.data)
        for name in ("command_type", "task_key", "reply_to", "priority", "max_attempts"):
            assert getattr(there, name) == getattr(command, name)
        assert there.command_id == command.command_id or command.command_id is None
        assert there.correlation_id == (command.correlation_id or there.command_id)
        assert there.run_at == command.run_at
        assert there.status == ("SCHEDULED" if command.run_at == soon else "PENDING")
    for command, result in zip(commands, results, strict=True):
        assert repr((await given.command_now(result.command_id)).data) == repr(command.data)
    given.database.check_invariants()


@pytest.mark.usefixtures("way")
async def test_loads_are_cut_and_sorted_apart_the_same_way(given: Given) -> None:
    """At most a thousand neighbours, all of one priority, time and kind of reply"""
    given.database.perform(send.send_many(DOMAIN, new(2100) + new(3, priority=7) + new(2, reply_to="crm") + new(1)))
    found = given.database.rows("SELECT hi - lo + 1, priority, replies FROM busload.queue ORDER BY lo")
    assert found == [(1000, 0, False), (1000, 0, False), (101, 0, False), (3, 7, False), (2, 0, True)]
    given.database.check_invariants()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("joins", [False, True], ids=["a transaction of its own", "the caller's"])
async def test_what_exists_already_is_named_and_nothing_is_written(
    bus: CommandBus, given: Given, conn: psycopg.AsyncConnection, joins: bool
) -> None:
    """A transaction that was joined can go on"""
    taken = [await given.sent() for _ in range(2)]
    batch_id = await given.batch()
    before = given.database.everything()
    commands = [BatchCommand("Debit", id) for id in (None, taken[0], None, taken[1])]
    async with conn.transaction(force_rollback=True):
        within = conn if joins else None
        for call in (bus.send_many(DOMAIN, commands, conn=within), bus.create_batch(DOMAIN, commands, conn=within)):
            with pytest.raises(DuplicateCommandError) as refused:
                await call
            assert set(refused.value.command_ids) == set(taken)
        with pytest.raises(InvalidOperationError, match="already a batch"):
            await bus.create_batch(DOMAIN, [BatchCommand("Debit")], batch_id=batch_id, conn=within)
        await conn.execute("SELECT 1")
    assert given.database.everything() == before


async def test_a_small_batch_is_one_statement_and_a_large_one_a_copy() -> None:
    """What wins on the measured size; many bytes count as many commands"""
    batch = send.NewBatch(uuid4(), DOMAIN, None, None, None)
    for commands, kinds in (
        (new(1), [Statement]),
        (new(1000), [Statement]),
        (new(1001), [Statement, Statement, Copy, Statement]),
        (new(5, data="x" * 1_000_000), [Statement, Statement, Copy, Statement]),
    ):
        assert send.in_one_statement(commands) is (len(kinds) == 1)
        savepoint = next(send.create_batch(batch, commands))
        assert isinstance(savepoint, Savepoint)
        assert steps(savepoint.plan) == kinds


def steps(plan: Any) -> list[type]:
    """What a plan asks for, if every load number is 1."""
    kinds, step = [], next(plan)
    try:
        while True:
            kinds.append(type(step))
            step = plan.send([(1,), (2,)][: step.params.get("loads", 0)] if isinstance(step, Statement) else [])
    except StopIteration:
        return kinds


def test_a_large_batch_goes_out_in_blocks() -> None:
    """The server works while the next block is packed, and memory stays bounded"""
    loads = [NewLoad(DOMAIN, new(100, data="x" * 10_000))]
    sizes = [len(block) for block in blocks(loads, [Load.of(1, 100)], UUID(int=1))]
    assert len(sizes) > 10
    assert max(sizes) < BLOCK + 20_000


@pytest.mark.parametrize(
    "make",
    [
        lambda c: send.send_many(DOMAIN, c),
        lambda c: send.create_batch(send.NewBatch(uuid4(), DOMAIN, None, None, None), c),
    ],
    ids=["send_many", "create_batch"],
)
def test_a_connection_that_breaks_after_a_refusal_is_no_unknown_outcome(make: Any) -> None:
    """Otherwise repeating the call would be refused, and pass for the proof that it was accepted the first time"""
    plan = make(new(3))
    next(plan)
    looking = plan.throw(psycopg.errors.UniqueViolation())
    assert isinstance(looking, Statement)
    with pytest.raises(psycopg.DatabaseError, match="Nothing was written") as refused:
        plan.throw(psycopg.OperationalError("gone"))
    assert not isinstance(refused.value, psycopg.OperationalError)


def test_the_ids_of_a_callback_are_checked_only_if_the_caller_chose_them(database: Database) -> None:
    chosen = send.NewBatch(uuid4(), DOMAIN, None, None, None, callback_id=uuid4())
    assert isinstance(next(send.create_batch(chosen, new(1))), Statement)
    assert isinstance(next(send.create_batch(send.NewBatch(uuid4(), DOMAIN, None, None, None), new(1))), Savepoint)


SLOW = """
    CREATE TABLE slow (text text);
    CREATE FUNCTION sleep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(1); RETURN NEW; END';
    CREATE TRIGGER sleep BEFORE INSERT ON slow FOR EACH ROW WHEN (NEW.text = 'first') EXECUTE FUNCTION sleep();
"""
COPY_MUCH = """
import resource, sys
import psycopg
from busload.postgres.plan import Copy
from busload.sync.plan import perform

def much():
    yield b"first\\n"
    for _ in range(3000):
        yield b"x" * 65_535 + b"\\n"

def plan():
    yield Copy(b"COPY slow FROM STDIN", much())

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with psycopg.connect(sys.argv[1], autocommit=True) as conn:
    perform(conn, plan())
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_what_a_slow_server_has_not_taken_is_not_piled_up(dsn: str, database: Database) -> None:
    """200 MB of rows, produced while the server is busy with the first one, need a few MB here"""
    database.rows(SLOW)
    ran = subprocess.run([sys.executable, "-c", COPY_MUCH, dsn], capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 25
    assert database.value("SELECT count(*) FROM slow") == 3001
