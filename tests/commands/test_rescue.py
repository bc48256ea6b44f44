"""How leases outlive nobody: what dead workers held goes back, and what killed them is found."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from uuid import UUID

import psycopg
import pytest

from busload import BatchCommand, CommandBus
from busload.batches import cancel
from busload.commands import claim, rescue
from busload.commands.execution import COMPLETED, FAILED_ATTEMPT, Leased
from busload.commands.rescue import Returned
from busload.sync.plan import perform
from busload.troubleshooting import decisions
from busload.troubleshooting.decisions import Decision
from tests.given import DOMAIN, WITHIN, Database, Given, beside, counts

SETTLED = timedelta(seconds=20)


def loads(database: Database) -> list[tuple[int, int, int]]:
    """The ready loads as positions, each with its crashes."""
    return database.rows("SELECT lo & 1023, hi & 1023, crashes FROM busload.queue ORDER BY lo")


def crashed(given: Given, limit: int = 1) -> list[Leased]:
    """A worker claims and dies; returns what it had."""
    worker = given.registered_worker()
    leased = given.claimed(limit=limit, by=worker)
    given.died(worker)
    given.rescued()
    return leased


async def test_the_commands_of_a_dead_worker_go_back_to_the_queue(given: Given, database: Database) -> None:
    batch_id = await given.batch(commands=4)
    dead = given.registered_worker()
    given.claimed(limit=4, by=dead)
    given.died(dead)

    assert given.rescued() == Returned(commands=4, parked=0)

    assert database.count("lease") == 0
    assert database.rows("SELECT lost, stopped_at IS NOT NULL FROM busload.worker WHERE worker = %s", dead) == [
        (True, True)
    ]
    again = given.claimed(limit=10)
    assert {one.lease.attempt for one in again} == {1}, "a crash burns no attempt"
    [command, *_] = await given.bus.list_batch_commands(DOMAIN, batch_id)
    trail = [event.type for event in await given.bus.get_audit_trail(DOMAIN, command.command_id)]
    assert trail == ["SENT", "RECEIVED", "LEASE_LOST", "RECEIVED"]
    database.check_invariants()


async def test_a_living_worker_keeps_its_leases_whatever_their_age(given: Given, database: Database) -> None:
    await given.batch(commands=2)
    worker = given.registered_worker()
    given.claimed(limit=2, by=worker)
    database.rows("UPDATE busload.lease SET since = now() - interval '1 day'")
    assert given.rescued() == Returned()
    assert database.count("lease") == 1


async def test_a_lease_lasts_as_long_as_its_worker_said(given: Given, database: Database) -> None:
    await given.batch(commands=2)
    patient = given.registered_worker(lease_for=timedelta(seconds=300))
    given.claimed(by=patient)
    given.claimed(by=given.registered_worker(lease_for=timedelta(seconds=10)))
    database.rows("UPDATE busload.worker SET seen_at = now() - interval '60 s'")
    assert given.rescued().commands == 1
    assert database.value("SELECT worker FROM busload.lease") == patient


async def test_leases_without_a_worker_row_are_rescued(given: Given, database: Database) -> None:
    await given.batch(commands=2)
    worker = given.registered_worker()
    given.claimed(limit=2, by=worker)
    database.rows("DELETE FROM busload.worker")
    assert given.rescued().commands == 2
    database.check_invariants()


async def test_leases_of_a_worker_that_stopped_are_rescued(given: Given, database: Database) -> None:
    await given.batch(commands=1)
    worker = given.registered_worker()
    given.claimed(by=worker)
    database.perform(rescue.retire(worker=worker))  # its last claim was slower than its goodbye
    assert given.rescued().commands == 1
    assert loads(database) == [(0, 0, 0)], "nobody died"
    database.check_invariants()


async def test_a_heartbeat_keeps_a_worker_alive(given: Given, database: Database) -> None:
    await given.batch(commands=1)
    worker = given.registered_worker()
    [one] = given.claimed(by=worker)
    given.died(worker)
    renewal = database.perform(rescue.renew(worker=worker, settled=SETTLED))
    assert renewal.leases == {one.lease.lease_id} and renewal.settled == renewal.canceled == frozenset()
    assert given.rescued() == Returned()


async def test_a_heartbeat_after_the_worker_was_declared_dead_is_refused(given: Given, database: Database) -> None:
    worker = given.registered_worker()
    given.died(worker)
    given.rescued()
    assert database.perform(rescue.renew(worker=worker, settled=SETTLED)) is None
    assert database.value("SELECT stopped_at IS NOT NULL FROM busload.worker WHERE worker = %s", worker)


async def test_a_heartbeat_while_the_worker_is_declared_dead_waits_and_is_refused(given: Given, dsn: str) -> None:
    worker = given.registered_worker()
    given.died(worker)
    with psycopg.connect(dsn) as rescuer, psycopg.connect(dsn) as late:
        perform(rescuer, rescue.rescue())
        late.execute("SET lock_timeout = '200 ms'")
        late.commit()
        with pytest.raises(psycopg.errors.LockNotAvailable):
            perform(late, rescue.renew(worker=worker, settled=SETTLED))
        late.rollback()
        rescuer.commit()
        assert perform(late, rescue.renew(worker=worker, settled=SETTLED)) is None


async def test_a_worker_that_sends_a_heartbeat_meanwhile_is_not_declared_dead(given: Given, dsn: str) -> None:
    await given.batch(commands=1)
    worker = given.registered_worker()
    given.claimed(by=worker)
    given.died(worker)
    with psycopg.connect(dsn) as heartbeat:
        assert perform(heartbeat, rescue.renew(worker=worker, settled=SETTLED)) is not None
        assert given.rescued() == Returned()
        heartbeat.commit()
    assert given.rescued() == Returned()


async def test_a_renewal_tells_what_is_held_canceled_and_old(given: Given, database: Database) -> None:
    batch_id = await given.batch(commands=1)
    await given.batch(commands=1)
    worker = given.registered_worker()
    [one], [other] = given.claimed(by=worker), given.claimed(by=worker)
    database.perform(cancel.cancel_batch(DOMAIN, batch_id, reason="x", operator=None))
    database.rows("UPDATE busload.lease SET since = now() - interval '21 s' WHERE lease_id = %s", other.lease.lease_id)
    renewal = database.perform(rescue.renew(worker=worker, settled=SETTLED))
    assert renewal.leases == {one.lease.lease_id, other.lease.lease_id}
    assert renewal.canceled == {one.lease.lease_id}
    assert renewal.settled == {other.lease.lease_id}


async def test_two_rescues_at_once_take_back_everything_once(given: Given, database: Database, dsn: str) -> None:
    await given.batch(commands=3)
    dead = given.registered_worker()
    given.claimed(limit=3, by=dead)
    given.died(dead)
    with psycopg.connect(dsn) as first:
        assert perform(first, rescue.rescue()).commands == 3
        assert given.rescued() == Returned()
        first.commit()
    assert given.rescued() == Returned()
    assert database.value("SELECT count(*) FROM busload.event WHERE type = 'LEASE_LOST'") == 1
    database.check_invariants()


async def test_what_was_there_when_a_worker_died_is_halved_and_suspect(given: Given, database: Database) -> None:
    await given.batch(commands=7)
    crashed(given, limit=7)
    assert loads(database) == [(0, 3, 1), (4, 6, 1)]
    database.check_invariants()


async def test_what_was_not_claimed_is_not_suspect(given: Given, database: Database) -> None:
    await given.batch(commands=10)
    crashed(given, limit=4)
    assert loads(database) == [(0, 1, 1), (2, 3, 1), (4, 9, 0)]


async def test_settled_commands_of_a_lost_lease_stay_settled_and_the_rest_goes_back_as_islands(
    given: Given, database: Database
) -> None:
    batch_id = await given.batch(commands=9)
    dead = given.registered_worker()
    leased = given.claimed(limit=9, by=dead)
    given.settled([leased[0], leased[4]])
    given.settled([leased[5]], FAILED_ATTEMPT, delay=60.0)
    given.died(dead)
    assert given.rescued().commands == 6
    assert [(lo, hi) for lo, hi, _ in loads(database)] == [(1, 2), (3, 3), (6, 7), (8, 8)]
    assert counts(await given.batch_now(batch_id)) == (9, 2, 0, 0, 0)
    database.check_invariants()
    given.make_due()
    database.perform(claim.promote())
    while again := given.claimed(limit=20):
        given.settled(again)
    assert (await given.batch_now(batch_id)).status == "COMPLETED"
    database.check_invariants()


async def test_given_back_commands_do_not_come_back_twice(given: Given, database: Database) -> None:
    await given.batch(commands=3)
    dead = given.registered_worker()
    leased = given.claimed(limit=3, by=dead)
    database.perform(claim.give_back({leased[0].lease: [leased[1].id]}, pause=30, details=["{}"]))
    given.died(dead)
    assert given.rescued().commands == 2
    assert database.count("scheduled") == 1
    database.check_invariants()


async def test_a_release_burns_no_attempt_and_makes_nobody_a_suspect(given: Given, database: Database) -> None:
    await given.batch(commands=5)
    leased = given.claimed(limit=5)
    given.settled([leased[2]])
    assert database.perform(rescue.release([leased[0].lease.lease_id])) == Returned(commands=4)
    assert loads(database) == [(0, 1, 0), (3, 4, 0)]
    assert {one.lease.attempt for one in given.claimed(limit=9)} == {1}
    assert database.value("SELECT count(*) FROM busload.event WHERE type = 'RELEASED'") == 2
    database.check_invariants()


async def test_a_release_of_what_is_gone_changes_nothing(given: Given, database: Database) -> None:
    await given.batch(commands=1)
    [one] = given.claimed()
    given.settled([one])
    before = database.everything()
    assert database.perform(rescue.release([one.lease.lease_id])) == Returned()
    assert database.everything() == before


async def test_a_release_keeps_priority_attempt_and_suspicion(
    bus: CommandBus, given: Given, database: Database
) -> None:
    await bus.send(DOMAIN, "Debit", priority=5, reply_to="crm")
    database.rows("UPDATE busload.queue SET attempt = 4, forgiven = 2, crashes = 1")
    [one] = given.claimed()
    database.perform(rescue.release([one.lease.lease_id]))
    columns = "priority, attempt, forgiven, crashes, replies"
    assert database.rows(f"SELECT {columns} FROM busload.queue") == [(5, 4, 2, 1, True)]


async def test_a_command_that_kills_its_worker_ends_alone_and_parked(given: Given, database: Database) -> None:
    batch_id = await given.batch(commands=200)
    poison = database.value("SELECT min(id) + 77 FROM busload.command")
    deaths: Counter[int] = Counter()
    for _ in range(500):
        worker = given.registered_worker()
        leased = given.claimed(limit=50, by=worker)
        if not leased:
            break
        if any(one.id == poison for one in leased):
            deaths.update(one.id for one in leased)
            given.died(worker)
            given.rescued()
        else:
            given.settled(leased)
    assert database.rows("SELECT command, reason FROM busload.troubleshooting") == [(poison, "CRASHED")]
    assert counts(await given.batch_now(batch_id)) == (200, 199, 0, 0, 1)
    assert deaths[poison] <= 10, "log2 of what was claimed, and three of its own"
    trail = [event.type for event in await given.bus.get_audit_trail(DOMAIN, await parked_id(given))]
    assert trail.count("LEASE_LOST") == deaths[poison] and trail[-1] == "MOVED_TO_TROUBLESHOOTING"
    database.check_invariants()


async def parked_id(given: Given) -> UUID:
    [item] = await given.bus.troubleshooting.list(DOMAIN)
    return item.command_id


async def test_a_suspect_is_parked_after_three_crashes_of_its_own(given: Given, database: Database) -> None:
    await given.batch(commands=1)
    parked = []
    for _ in range(3):
        worker = given.registered_worker()
        assert len(given.claimed(by=worker)) == 1
        given.died(worker)
        parked.append(given.rescued().parked)
    assert parked == [0, 0, 1]
    assert given.claimed() == []
    [item] = await given.bus.troubleshooting.list(DOMAIN)
    assert item.reason == "CRASHED" and item.last_error_type == "WorkerCrashed"
    assert "3 times" in (item.last_error_message or "")
    database.check_invariants()


async def test_a_parked_command_that_an_operator_retries_has_all_its_chances_again(
    given: Given, database: Database
) -> None:
    batch_id = await given.batch(commands=1)
    for _ in range(3):
        crashed(given)
    database.perform(decisions.decide_one(DOMAIN, await parked_id(given), Decision(action="retry", operator="ada")))
    [again] = given.claimed()
    assert (again.lease.crashes, again.lease.round_attempt) == (0, 1)
    given.settled([again])
    assert (await given.batch_now(batch_id)).status == "COMPLETED"
    database.check_invariants()


async def test_bystanders_of_a_suspect_are_suspects_but_have_no_crash_counted(given: Given, database: Database) -> None:
    await given.batch(commands=1)
    crashed(given)  # the suspect
    await given.batch(commands=5)
    assert len(crashed(given, limit=10)) == 6
    assert len(crashed(given, limit=10)) == 1  # one suspect at a time, the oldest first
    assert database.count("troubleshooting") == 1
    assert loads(database) == [(0, 2, 1), (3, 4, 1)]
    database.check_invariants()


async def test_an_innocent_suspect_is_not_parked_for_the_crashes_of_a_new_poison(
    given: Given, database: Database
) -> None:
    """A suspect that runs beside fresh commands is not the only one who can have done it."""
    await given.batch(commands=4)
    crashed(given, limit=4)  # a deploy, a power cut: all four are suspects and innocent
    await given.batch(commands=1)
    poison = database.value("SELECT max(id) FROM busload.command")
    for _ in range(60):
        worker = given.registered_worker()
        leased = given.claimed(limit=10, by=worker)
        if not leased:
            break
        if any(one.id == poison for one in leased):
            given.died(worker)
            given.rescued()
        else:
            given.settled(leased)
    assert database.rows("SELECT command FROM busload.troubleshooting") == [(poison,)]
    database.check_invariants()


async def test_a_suspect_that_completes_is_forgiven(given: Given, database: Database) -> None:
    batch_id = await given.batch(commands=2)
    crashed(given, limit=2)
    crashed(given)
    for _ in range(2):
        given.settled(given.claimed(limit=5))
    assert (await given.batch_now(batch_id)).status == "COMPLETED"
    assert database.count("troubleshooting") == 0
    database.check_invariants()


async def test_a_worker_with_more_leases_than_one_sweep_takes_makes_no_single_suspect(
    given: Given, database: Database
) -> None:
    """The last page may hold a single command, which was not alone all the same."""
    database.rows(
        "INSERT INTO busload.command (id, domain, command_id, command_type)"
        " SELECT n * 1024, 'payments', gen_random_uuid(), 'Debit' FROM generate_series(1, 1001) AS n"
    )
    database.rows(
        "INSERT INTO busload.queue (lo, hi, domain)"
        " SELECT n * 1024, n * 1024, 'payments' FROM generate_series(1, 1001) AS n"
    )
    worker = given.registered_worker()
    assert len(given.claimed(limit=2000, by=worker)) == 1001
    given.died(worker)
    while given.rescued().commands:
        pass
    assert database.rows("SELECT crashes, count(*) FROM busload.queue GROUP BY crashes ORDER BY crashes") == [
        (0, 1),
        (1, 1000),
    ]


async def test_what_a_canceled_batch_had_running_is_canceled_when_its_worker_dies(
    given: Given, database: Database
) -> None:
    batch_id = await given.batch(commands=4)
    dead = given.registered_worker()
    leased = given.claimed(limit=3, by=dead)
    assert database.perform(cancel.cancel_batch(DOMAIN, batch_id, reason="stop", operator="ada")) == 1
    given.settled(leased[:1])
    assert (await given.batch_now(batch_id)).status == "IN_PROGRESS"
    given.died(dead)
    given.rescued()
    batch = await given.batch_now(batch_id)
    assert counts(batch) == (4, 1, 0, 3, 0) and batch.status == "COMPLETED_WITH_FAILURES"
    assert given.claimed(limit=9) == []
    database.check_invariants()


async def test_what_a_canceled_batch_had_running_is_canceled_when_its_worker_stops(
    given: Given, database: Database
) -> None:
    batch_id = await given.batch(commands=2)
    [one, _] = given.claimed(limit=2)
    database.perform(cancel.cancel_batch(DOMAIN, batch_id, reason="stop", operator=None))
    database.perform(rescue.release([one.lease.lease_id]))
    assert counts(await given.batch_now(batch_id)) == (2, 0, 0, 2, 0)
    database.check_invariants()


async def straggler(given: Given, dsn: str) -> UUID:
    """A canceled batch with a command that moved from one place to another while it was being canceled."""
    batch_id = await given.batch(commands=1)
    given.settled(given.claimed(), FAILED_ATTEMPT, delay=0.0)
    with psycopg.connect(dsn) as promoter:
        perform(promoter, claim.promote())
        thread, answers = beside(dsn, lambda: cancel.cancel_batch(DOMAIN, batch_id, reason="stop", operator=None))
        promoter.commit()
    thread.join(WITHIN)
    assert answers == [0]
    return batch_id


async def test_a_straggler_of_a_canceled_batch_is_canceled_by_the_sweep(
    given: Given, database: Database, dsn: str
) -> None:
    batch_id = await straggler(given, dsn)
    assert database.count("queue") == 1
    assert database.perform(cancel.cancel_stragglers()) == 1
    assert (await given.batch_now(batch_id)).status == "COMPLETED_WITH_FAILURES"
    database.check_invariants()


async def test_a_batch_that_started_while_its_row_was_taken_is_started_by_the_sweep(
    given: Given, database: Database, dsn: str
) -> None:
    batch_id = await given.batch(commands=1)
    worker = given.registered_worker()
    with psycopg.connect(dsn) as other:
        other.execute("SELECT FROM busload.batch FOR UPDATE")
        given.claimed(by=worker)
        assert database.perform(rescue.start_batches(worker=worker)) == 0
        other.rollback()
    assert database.perform(rescue.start_batches(worker=worker)) == 1
    assert database.perform(rescue.start_batches(worker=worker)) == 0
    assert (await given.batch_now(batch_id)).status == "IN_PROGRESS"
    database.check_invariants()


async def test_a_reply_tells_of_a_command_that_was_canceled_by_a_rescue(
    bus: CommandBus, given: Given, database: Database
) -> None:
    async with bus.open_batch(DOMAIN) as batch:
        await batch.add("Debit", reply_to="crm")
    dead = given.registered_worker()
    given.claimed(by=dead)
    database.perform(cancel.cancel_batch(DOMAIN, batch.batch_id, reason="stop", operator=None))
    given.died(dead)
    given.rescued()
    [(data,)] = database.rows("SELECT data FROM busload.command WHERE domain = 'crm'")
    assert data["outcome"] == "CANCELED"
    database.check_invariants()


# -- what went wrong elsewhere: RELIABILITY.md section 6 -----------------------------------------------------------


async def test_peer_river_1302(given: Given, database: Database, dsn: str) -> None:
    """A rescuer that works from an older read moves jobs back that completed meanwhile."""
    batch_id = await given.batch(commands=1)
    dead = given.registered_worker()
    [one] = given.claimed(by=dead)
    given.died(dead)
    with psycopg.connect(dsn) as rescuer:
        [(stale,)] = rescuer.execute("SELECT lease_id FROM busload.lease").fetchall()
        rescuer.commit()
        assert given.settled([one]) == {one.id}
        assert perform(rescuer, rescue.rescue()) == Returned()
        assert perform(rescuer, rescue.return_leases([stale], suspect=True)) == Returned()
        rescuer.commit()
    assert given.claimed(limit=5) == []
    assert (await given.batch_now(batch_id)).status == "COMPLETED"
    database.check_invariants()


async def test_peer_river_1318(given: Given, database: Database) -> None:
    """A full page of leases that must not be touched hides the stuck ones behind it."""
    living = given.registered_worker()
    database.rows(
        "INSERT INTO busload.lease"
        " (lease_id, lo, hi, domain, priority, attempt, forgiven, crashes, replies, fair, worker, open)"
        " SELECT ('00000000-0000-4000-8000-' || lpad(to_hex(n), 9, '0') || '000')::uuid, n * 1024, n * 1024,"
        "        'payments', 0, 1, 0, 0, false, 0, %s, 1 FROM generate_series(1, 20000) AS n",
        living,
    )
    database.rows("SELECT setval('busload.load_number', 30000)")
    await given.batch(commands=3)
    dead = given.registered_worker()
    given.claimed(limit=3, by=dead)
    database.rows("UPDATE busload.lease SET lease_id = 'ffffffff-ffff-4fff-bfff-fffffffff000' WHERE worker = %s", dead)
    given.died(dead)
    assert given.rescued().commands == 3


async def test_peer_river_1318_canceled_batches(given: Given, database: Database, dsn: str) -> None:
    """Canceled batches that wait for a person do not hide the one that has something to cancel."""
    waiting = await straggler(given, dsn)
    database.rows(
        "INSERT INTO busload.batch (batch_id, domain, total_count, in_troubleshooting_count, sealed_at, canceled_at)"
        " SELECT ('00000000-0000-4000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, 'payments', 1, 1, now(), now()"
        "   FROM generate_series(1, 150) AS n"
    )
    assert database.perform(cancel.cancel_stragglers()) == 1
    assert (await given.batch_now(waiting)).status == "COMPLETED_WITH_FAILURES"


async def test_peer_procrastinate_1518(given: Given, database: Database) -> None:
    """Pruning the row of a dead worker hides its jobs from the recovery for ever."""
    await given.batch(commands=2)
    dead = given.registered_worker()
    given.claimed(limit=2, by=dead)
    given.died(dead)
    database.rows("DELETE FROM busload.worker WHERE worker = %s", dead)
    assert given.rescued().commands == 2


async def test_peer_oban_862(given: Given, database: Database) -> None:
    """A restarted worker with the same name keeps the dead one's jobs alive."""
    await given.batch(commands=1)
    dead = given.registered_worker()
    given.claimed(by=dead)
    given.died(dead)
    restarted = given.registered_worker()  # the same name
    assert restarted != dead
    database.perform(rescue.renew(worker=restarted, settled=SETTLED))
    assert given.rescued().commands == 1


async def test_peer_solid_queue_589(given: Given, database: Database) -> None:
    """A live worker, pruned after a hiccup, and its successor both finish the job."""
    batch_id = await given.batch(commands=1)
    hiccup = given.registered_worker()
    [old] = given.claimed(by=hiccup)
    given.died(hiccup)
    given.rescued()
    [new] = given.claimed()
    assert given.settled([old], COMPLETED) == set()
    assert given.settled([new], "FAILED") == {new.id}
    assert counts(await given.batch_now(batch_id)) == (1, 0, 1, 0, 0)
    database.check_invariants()


async def test_peer_solid_queue_422(given: Given) -> None:
    """The jobs of a killed worker are marked failed instead of being run again."""
    await given.batch(commands=2)
    crashed(given, limit=2)
    assert len(given.claimed(limit=1)) == 1


async def test_peer_oban_1390(bus: CommandBus, given: Given, database: Database) -> None:
    """What a rescuer ends skips what a normal end does: here the batch must complete and its callback be sent."""
    batch_id = await given.batch(commands=1, on_complete=BatchCommand("Notify"))
    dead = given.registered_worker()
    given.claimed(by=dead)
    database.perform(cancel.cancel_batch(DOMAIN, batch_id, reason="stop", operator=None))
    given.died(dead)
    given.rescued()
    assert [one.command_type for one in given.claimed(limit=5)] == ["Notify"]
    database.check_invariants()
