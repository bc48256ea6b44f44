"""What an order costs, however many owners and keys there are."""

from __future__ import annotations

import psycopg
import pytest

from busload.limits import order
from busload.limits.order import Key, OrderedClaim
from busload.postgres.plan import Plan
from tests.cost import pages, vacuumed
from tests.given import DOMAIN, Database, Given, until


def claiming(worker: int) -> Plan[OrderedClaim]:
    return order.claim_in_order(
        worker=worker, domain=DOMAIN, limit=100, suspects=True, owned=True, keys=lambda leased: {}
    )


def pages_of(dsn: str, plan: Plan[OrderedClaim] | Plan[int]) -> int:
    with psycopg.connect(dsn) as conn:
        for setting in ("plan_cache_mode = force_generic_plan", "jit = off", "enable_seqscan = off"):
            conn.execute(f"SET {setting}".encode())
        cost = pages(conn, plan)
        conn.rollback()
        return cost


def fill(database: Database, owners: int) -> None:
    """60,000 loads, each in the name of an owner: a batch, or a key of `fair_by`."""
    database.rows("TRUNCATE busload.queue")
    database.rows("ALTER TABLE busload.queue SET (autovacuum_enabled = false)")
    database.rows(
        "INSERT INTO busload.queue (lo, hi, domain, fair)"
        " SELECT n * 1024, n * 1024, %s, hashint8(n %% %s) FROM generate_series(1, 60000) AS n",
        DOMAIN,
        owners,
    )


def test_a_claim_in_order_reads_no_more_pages_among_30_000_owners_than_among_300(
    given: Given, database: Database, dsn: str
) -> None:
    cost, worker = {}, given.registered_worker()
    for owners in (300, 30_000):
        fill(database, owners)
        turns = 0
        while database.perform(order.look(DOMAIN, suspects=True)).owned:
            assert database.perform(claiming(worker)) == order.BUSY
            turns += 1
        assert turns == 60_000 / order.DISOWNED  # each at the price of the loads that lose their owner
        until(lambda: vacuumed(database, "busload.queue"))
        cost[owners] = pages_of(dsn, claiming(worker))
    assert cost[30_000] <= cost[300] * 1.1


def test_an_owner_whose_load_is_locked_is_not_passed_by(given: Given, database: Database, dsn: str) -> None:
    """Somebody holds the oldest load, so it keeps its owner; what comes behind it waits all the same."""
    fill(database, 300)
    database.rows("DELETE FROM busload.queue WHERE lo > 10 * 1024")
    worker = given.registered_worker()
    with psycopg.connect(dsn) as conn:
        conn.execute("SELECT FROM busload.queue WHERE hi = 1024 FOR UPDATE")
        taken = database.perform(claiming(worker))
        assert (taken.leased, taken.contended) == ([], True)
    assert database.value("SELECT count(*) FROM busload.queue WHERE fair <> 0") == 1


# -- the sweep ---------------------------------------------------------------------------------------------------------


def keys(database: Database, count: int) -> None:
    """So many keys, whose first command waits for its next attempt; and one more command of each that waits."""
    database.rows("TRUNCATE busload.first_in_order, busload.scheduled")
    database.rows(
        "INSERT INTO busload.first_in_order (limit_name, limit_subject, command)"
        " SELECT 'accounts', lpad(n::text, 6, '0'), n * 1024 FROM generate_series(1, %s) AS n",
        count,
    )
    database.rows(
        "INSERT INTO busload.scheduled (lo, hi, domain, run_at, reason)"
        " SELECT n * 1024, n * 1024, 'payments', now() + interval '1 h', 'RETRY' FROM generate_series(1, %s) AS n",
        count,
    )
    database.rows(
        "INSERT INTO busload.scheduled (lo, hi, domain, run_at, reason, limit_name, limit_subject)"
        " SELECT n * 1024 + 1, n * 1024 + 1, 'payments', 'infinity', 'LIMITED', 'accounts', lpad(n::text, 6, '0')"
        "   FROM generate_series(1, %s) AS n",
        count,
    )


def end(database: Database, *numbers: int) -> None:
    database.rows("DELETE FROM busload.scheduled WHERE reason = 'RETRY' AND hi = ANY (%s)", [n * 1024 for n in numbers])


def test_a_sweep_reads_no_more_pages_of_30_000_keys_than_of_3_000(
    database: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "SWEPT", 1000)
    cost = {}
    for count in (3_000, 30_000):
        keys(database, count)
        database.rows("ANALYZE busload.first_in_order")
        cost[count] = pages_of(dsn, order.sweep())
    assert cost[30_000] <= cost[3_000] * 1.2


def test_sweeps_go_on_where_the_last_one_stopped_so_that_each_lost_end_is_found(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever key it is, four sweeps of ten find it among 35; and what came before is looked at once more."""
    monkeypatch.setattr(order, "SWEPT", 10)
    for lost in range(1, 36):
        keys(database, 35)
        end(database, lost)
        assert sum(database.perform(order.sweep()) for _ in range(4)) == 1
        assert database.value("SELECT hi FROM busload.queue") == lost * 1024 + 1
        database.rows("TRUNCATE busload.queue")


def test_few_keys_are_all_looked_at_by_each_sweep_wherever_the_last_one_stopped(database: Database) -> None:
    database.rows("UPDATE busload.order_sweep SET limit_name = 'accounts', limit_subject = '000017'")
    keys(database, 35)
    end(database, 1, 17, 18, 35)
    assert database.perform(order.sweep()) == 4


def test_a_sweep_that_fails_does_not_pass_its_keys_by(
    database: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "SWEPT", 10)
    keys(database, 35)
    end(database, 5)

    def broken(_: list[Key]) -> Plan[int]:
        raise psycopg.errors.LockNotAvailable

    with monkeypatch.context() as patch:
        patch.setattr(order, "advance", broken)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            database.perform(order.sweep())
    assert database.perform(order.sweep()) == 1


def test_two_sweeps_at_once_do_not_wait_for_each_other(database: Database, dsn: str) -> None:
    keys(database, 5)
    end(database, 3)
    with psycopg.connect(dsn) as conn:
        conn.execute("SELECT FROM busload.order_sweep FOR UPDATE")
        assert database.perform(order.sweep()) == 0
    assert database.perform(order.sweep()) == 1
