"""PostgreSQL fails or refuses a write: the error is busload's, and says whether anything was written."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from uuid import UUID

import psycopg
import pytest

from busload import BatchCommand, BusloadError, CommandBus, Dedup, Stage, SyncCommandBus
from busload.commands import send
from busload.commands.ids import new_id
from busload.errors import DatabaseUnavailableError, NothingWrittenError, OutcomeUnknownError
from busload.postgres import plan
from busload.postgres.write import Write
from tests.given import DOMAIN, Database

pytestmark = pytest.mark.usefixtures("invariants")

MANY = [BatchCommand("Debit", data={"n": n}) for n in range(1500)]
"""So many that they are copied in, within a transaction"""

Call = Callable[[Any, UUID], Any]
CALLS: dict[str, Call] = {
    "send": lambda bus, batch: bus.send(DOMAIN, "Debit"),
    "send into a batch": lambda bus, batch: bus.send(DOMAIN, "Debit", batch_id=batch),
    "send once": lambda bus, batch: bus.send(DOMAIN, "Debit", task_key="k", dedup=Dedup()),
    "send_many": lambda bus, batch: bus.send_many(DOMAIN, MANY[:3]),
    "send_many by copy": lambda bus, batch: bus.send_many(DOMAIN, MANY),
    "create_batch": lambda bus, batch: bus.create_batch(DOMAIN, MANY[:3]),
    "create_batch by copy": lambda bus, batch: bus.create_batch(DOMAIN, MANY),
    "create_batch once": lambda bus, batch: bus.create_batch(
        DOMAIN, [BatchCommand("Debit", task_key="k")], dedup=Dedup()
    ),
    "create_job": lambda bus, batch: bus.jobs.create(DOMAIN, [Stage("one", MANY[:2])]),
    "seal": lambda bus, batch: bus.seal_batch(DOMAIN, batch),
    "cancel_batch": lambda bus, batch: bus.cancel_batch(DOMAIN, batch, reason="no"),
    "pause": lambda bus, batch: bus.domains.pause(DOMAIN),
    "buffer": lambda bus, batch: bus.buffer("events").add({"n": 1}),
}
WRITTEN = ("command", "batch", "queue", "pause", "buffered", "task", "job", "event")


async def made(call: Callable[[], Any]) -> Any:
    """A call of either face"""
    answer = call()
    return await answer if inspect.isawaitable(answer) else answer


@pytest.fixture
def batch_id(sync_bus: SyncCommandBus) -> UUID:
    batch_id = new_id()
    sync_bus.database.write(
        Write(send.open_batch(send.NewBatch(batch_id, DOMAIN, None, None, None)), one_statement=True)
    )
    return batch_id


@pytest.fixture
def read_only(dsn: str, database: Database, batch_id: UUID) -> Iterator[str]:
    """A database that takes no writes, as a standby"""
    name = database.value("SELECT current_database()")
    database.rows(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    yield dsn
    database.rows(f'ALTER DATABASE "{name}" RESET default_transaction_read_only')


@pytest.mark.parametrize("face", [CommandBus, SyncCommandBus])
async def test_a_write_that_is_refused_says_that_nothing_was_written(
    read_only: str, database: Database, batch_id: UUID, face: Any
) -> None:
    before = [database.count(table) for table in WRITTEN]
    bus = face(read_only)
    await made(bus.open)
    try:
        for name, call in CALLS.items():
            with pytest.raises(NothingWrittenError, match="Nothing of this call was written") as refused:
                await made(partial(call, bus, batch_id))
            assert isinstance(refused.value, psycopg.errors.ReadOnlySqlTransaction), name
            assert isinstance(refused.value.__cause__, psycopg.errors.ReadOnlySqlTransaction), name
            assert "read-only transaction" in str(refused.value), name
    finally:
        await made(bus.close)
    assert [database.count(table) for table in WRITTEN] == before


@pytest.mark.parametrize(
    ("does", "error"),
    [
        ("RAISE 'no space left on device' USING ERRCODE = 'disk_full'", psycopg.errors.DiskFull),
        ("RAISE 'no rights' USING ERRCODE = 'insufficient_privilege'", psycopg.errors.InsufficientPrivilege),
        ("RAISE 'slow' USING ERRCODE = 'query_canceled'", psycopg.errors.QueryCanceled),
        ("PERFORM pg_terminate_backend(pg_backend_pid())", psycopg.OperationalError),
    ],
    ids=["disk full", "privilege", "canceled", "killed"],
)
async def test_a_fault_in_the_middle_of_a_write_is_reported_as_what_it_was(
    bus: CommandBus, sync_bus: SyncCommandBus, database: Database, does: str, error: type[psycopg.Error]
) -> None:
    """A connection that broke in a single statement may have committed it: then the error says that"""
    database.rows(f"CREATE FUNCTION fault() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {does}; RETURN NEW; END $$")
    database.rows("CREATE TRIGGER fault BEFORE INSERT ON busload.command FOR EACH ROW EXECUTE FUNCTION fault()")
    before = [database.count(table) for table in WRITTEN]
    for name in ("send", "send_many", "send_many by copy", "create_batch", "create_batch by copy", "create_batch once"):
        for face in (bus, sync_bus):
            with pytest.raises(BusloadError) as told:
                await made(partial(CALLS[name], face, new_id()))
            wanted: type[BusloadError] = NothingWrittenError
            if error is psycopg.OperationalError:
                wanted = (
                    OutcomeUnknownError if name in ("send", "send_many", "create_batch") else DatabaseUnavailableError
                )
                assert wanted is OutcomeUnknownError or "nothing was written" in str(told.value)
            assert isinstance(told.value, wanted), (name, face)
            assert isinstance(told.value.__cause__, error), (name, face)
    assert [database.count(table) for table in WRITTEN] == before


def test_a_connection_that_breaks_while_it_is_written_to_is_lost_in_psycopgs_words(dsn: str) -> None:
    """Python may speak of a file descriptor instead, which says nothing about the write"""
    said = ValueError("file descriptor cannot be a negative integer (-1)")
    conn = psycopg.connect(dsn)
    assert plan._as_lost(conn, said) is said, "it is not about the connection"
    conn.close()
    lost = plan._as_lost(conn, said)
    assert isinstance(lost, psycopg.OperationalError)
    assert (lost.__cause__, lost.sqlstate) == (said, None)
