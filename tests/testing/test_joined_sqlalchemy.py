"""SQLAlchemy's recipe for tests: a transaction around each, in which the application commits and rolls back at will."""

from __future__ import annotations

import psycopg
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from busload import Command, SyncCommandBus, SyncHandlerContext
from busload.testing import assert_not_sent, assert_sent, drain
from tests.given import Database


def test_what_was_sent_in_a_transaction_of_sqlalchemy_runs_there_and_is_rolled_back(
    sync_bus: SyncCommandBus, dsn: str, database: Database
) -> None:
    database.rows("CREATE TABLE ledger (account integer)")
    engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn))

    @sync_bus.handler("payments", "Debit")
    def debit(command: Command, ctx: SyncHandlerContext) -> None:
        with ctx.transaction() as conn:
            conn.execute("INSERT INTO ledger VALUES (%s)", [command.data])

    with engine.connect() as connection:
        outer = connection.begin()
        with Session(bind=connection, join_transaction_mode="create_savepoint") as session:
            session.execute(text("INSERT INTO ledger VALUES (1)"))
            sync_bus.send("payments", "Debit", 2, conn=session)
            session.commit()  # a savepoint: the application thinks that it has committed
            sync_bus.send("payments", "Debit", 3, conn=session)
            session.rollback()

            assert drain(sync_bus, conn=session) == 1
            assert_sent(sync_bus, "payments", "Debit", 2, status="COMPLETED", times=1, conn=session)
            assert_not_sent(sync_bus, "payments", "Debit", 3, conn=session)
            assert session.scalars(text("SELECT account FROM ledger ORDER BY 1")).all() == [1, 2]
        outer.rollback()
    engine.dispose()

    assert database.count_rows("ledger") == 0
    assert_not_sent(sync_bus, "payments", "Debit")
