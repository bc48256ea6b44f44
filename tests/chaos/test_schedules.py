"""Workers are killed while schedules are due through a leap day and two changes of the clock: each due time once."""

from __future__ import annotations

import time
from collections import Counter
from datetime import UTC, datetime, timedelta

from busload import SyncCommandBus
from busload.schedules.declare import declare
from busload.schedules.rule import Rule
from busload.schedules.schedule import CatchUp, Policy, Schedule, key_of
from tests.chaos.harness import Workers, folder, retry_crashed, seeded
from tests.given import DOMAIN, Database, short_and_long, until

LEAP_DAY, AUTUMN, END = (datetime(2024, *day, tzinfo=UTC) for day in ((2, 28), (10, 24), (11, 5)))
SPRING = datetime(2024, 3, 29, tzinfo=UTC)


def kinds(short: bool) -> list[tuple[datetime, Rule]]:
    """Since when each is due, and its rule: in zones that change their clocks on different days."""
    whole = END if not short else LEAP_DAY + timedelta(days=3)
    return [
        (LEAP_DAY, Rule(("30 2 * * *",), "Europe/Paris", ends_at=whole)),
        (SPRING, Rule(("*/30 * * * *",), "Europe/Paris", ends_at=SPRING + timedelta(days=1 if short else 3))),
        (AUTUMN, Rule(("30 1 * * *", "15 */3 * * *"), "America/New_York", ends_at=END)),
        (LEAP_DAY, Rule(("0 12 29 2 *", "0 0 L * *"), "Asia/Kathmandu", ends_at=END)),
        (LEAP_DAY, Rule(every=timedelta(hours=5), ends_at=whole if short else SPRING)),
    ]


@short_and_long("count, workers_count, kills", (30, 3, 4), (1000, 8, 60))
def test_each_due_time_is_fired_once_though_workers_are_killed(
    count: int, workers_count: int, kills: int, dsn: str, database: Database
) -> None:
    """Time is moved by moving rows: what was due in 2024 is caught up now, all of it."""
    chance, variants = seeded(), kinds(short=count < 100)
    made = [
        (since, Schedule(f"s{nth:04}", DOMAIN, rule, '{"command_type":"Work","data":null}', Policy(CatchUp.ALL, 1000)))
        for nth, (since, rule) in ((nth, variants[nth % len(variants)]) for nth in range(count))
    ]
    wanted = {key_of(one.name, due) for since, one in made for due in [*one.rule.after(since)]}
    database.perform(declare([one for _, one in made]))
    starts = {one.name: one.rule.next(since) for since, one in made}
    database.rows(
        "UPDATE busload.schedule AS s SET next_due_at = n.at"
        " FROM unnest(%s::text[], %s::timestamptz[]) AS n (name, at) WHERE s.name = n.name",
        list(starts),
        list(starts.values()),
    )
    with folder() as path, Workers(dsn, path, lease_for=1.5, concurrency=50, pause=0.001) as workers:
        began = time.monotonic()
        workers.start(workers_count)
        for nth in range(kills):  # spread over the time in which they fire
            share = (nth + 1) * len(wanted) // (kills + 1)
            until(lambda share=share: database.count("fire") >= share or all_fired(database))  # type: ignore[misc]
            workers.kill(chance.choice(workers.alive))
            workers.start()
        until(lambda: all_fired(database), 300)
        fired = time.monotonic() - began
        with SyncCommandBus(dsn) as bus:
            parked = retry_crashed(bus, database, DOMAIN)
        took = time.monotonic() - began
        assert workers.stop() == [0] * workers_count, workers.last_words()
    sent = Counter(key for (key,) in database.rows("SELECT task_key FROM busload.command"))
    twice = [key for key, times in sent.items() if times > 1]
    assert (sorted(wanted - sent.keys())[:5], sorted(sent.keys() - wanted)[:5], twice[:5]) == ([], [], [])
    assert database.value("SELECT count(*) FROM busload.execution WHERE outcome = 'COMPLETED'") == len(wanted)
    assert database.value("SELECT count(*) FROM busload.fire WHERE type = 'DUE'") == len(wanted)
    database.check_invariants()
    print(
        f"{count} schedules, {workers_count} workers, {kills} kills: {len(wanted):,} due times fired once each in "
        f"{fired:.0f} s, all run after {took:.0f} s, {parked} parked as CRASHED and retried"
    )


def all_fired(database: Database) -> bool:
    """Whether every schedule has ended."""
    return not database.value("SELECT EXISTS (SELECT FROM busload.schedule WHERE next_due_at IS NOT NULL)")
