"""A task key names what a command is about; with a Dedup, one open command at a time holds it."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from busload import (
    BatchCommand,
    BusinessRuleError,
    Command,
    CommandBus,
    Dedup,
    DuplicateCommandError,
    HandlerContext,
    InvalidCommandError,
    SendResult,
    Settings,
    SyncCommandBus,
    SyncHandlerContext,
    task_key,
)
from busload.commands.task_keys import MANY
from busload.errors import DuplicateTaskError
from tests.given import DOMAIN, Database, Given, counts, eventually, short_and_long

pytestmark = pytest.mark.usefixtures("invariants")

KEY = "invoices:2026:7"
ONCE = Dedup()
BLOCKED = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
NO_WINDOW = Dedup(window=timedelta(0))


async def sent(
    bus: CommandBus, key: str = KEY, dedup: Dedup = ONCE, domain: str = DOMAIN, **options: Any
) -> SendResult:
    return await bus.send(domain, "Debit", task_key=key, dedup=dedup, **options)


async def test_the_second_sender_gets_the_first_ones_command(
    bus: CommandBus, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """Skipped, with a line in the log and a handle on the work that exists"""
    first = await sent(bus)
    before = database.everything()
    with caplog.at_level(logging.INFO, "busload"):
        second = await sent(bus)
    assert (first.created, second) == (True, SendResult(first.command_id, created=False))
    assert [KEY in line and str(first.command_id) in line for line in caplog.messages] == [True]
    assert database.everything() == before


async def test_return_existing_says_nothing_in_the_log(bus: CommandBus, caplog: pytest.LogCaptureFixture) -> None:
    first = await sent(bus)
    with caplog.at_level(logging.INFO, "busload"):
        second = await sent(bus, dedup=Dedup(on_conflict="return_existing"))
    assert (second.command_id, second.created, caplog.messages) == (first.command_id, False, [])


async def test_raise_names_the_holder_and_writes_nothing(bus: CommandBus, database: Database) -> None:
    first = await sent(bus)
    before = database.everything()
    with pytest.raises(DuplicateTaskError, match=f"{KEY}.*{first.command_id}.*Nothing was written") as refused:
        await sent(bus, dedup=Dedup(on_conflict="raise"))
    assert (refused.value.domain, refused.value.holders) == (DOMAIN, {KEY: first.command_id})
    assert database.everything() == before


async def test_without_dedup_a_key_is_only_a_label(bus: CommandBus) -> None:
    assert [(await bus.send(DOMAIN, "Debit", task_key=KEY)).created for _ in range(2)] == [True, True]
    assert (await sent(bus)).created


async def open_ready(given: Given) -> None:
    pass


async def open_scheduled(given: Given) -> None:
    [leased] = given.claimed()
    given.settled([leased], "FAILED_ATTEMPT", delay=3600.0)


async def open_running(given: Given) -> None:
    given.claimed()


async def open_lost(given: Given) -> None:
    worker = given.registered_worker()
    given.claimed(by=worker)
    given.died(worker)
    given.rescued()


async def open_in_troubleshooting(given: Given) -> None:
    given.settled(given.claimed(), "TROUBLESHOOTING", reason="PERMANENT")


async def open_retried(given: Given) -> None:
    await open_in_troubleshooting(given)
    [item] = await given.bus.troubleshooting.list(DOMAIN)
    await given.bus.troubleshooting.retry(DOMAIN, item.command_id)


@pytest.mark.parametrize(
    "still_open", [open_ready, open_scheduled, open_running, open_lost, open_in_troubleshooting, open_retried]
)
async def test_a_key_is_held_while_its_command_is_open_whatever_its_age(
    bus: CommandBus, given: Given, still_open: Callable[[Given], Any]
) -> None:
    """Older than any window"""
    first = await sent(bus, dedup=NO_WINDOW)
    await still_open(given)
    given.database.rows("UPDATE busload.task SET held_until = now() - interval '1 year'")
    assert await sent(bus, dedup=NO_WINDOW) == SendResult(first.command_id, created=False)
    given.database.check_invariants()


async def ended_completed(given: Given, first: UUID) -> None:
    given.settled(given.claimed())


async def ended_failed(given: Given, first: UUID) -> None:
    given.settled(given.claimed(), "FAILED")


async def ended_canceled_while_running(given: Given, first: UUID) -> None:
    given.settled(given.claimed(), "CANCELED")


async def ended_completed_by_an_operator(given: Given, first: UUID) -> None:
    await open_in_troubleshooting(given)
    await given.bus.troubleshooting.complete(DOMAIN, first)


async def ended_canceled_by_an_operator(given: Given, first: UUID) -> None:
    await open_in_troubleshooting(given)
    await given.bus.troubleshooting.cancel(DOMAIN, first, reason="twice")


ENDINGS = [
    ended_completed,
    ended_failed,
    ended_canceled_while_running,
    ended_completed_by_an_operator,
    ended_canceled_by_an_operator,
]


@pytest.mark.parametrize("ended", ENDINGS)
async def test_a_key_is_free_again_after_the_end_and_the_window(
    bus: CommandBus, given: Given, ended: Callable[[Given, UUID], Any]
) -> None:
    """Reused after terminal; within the window it is still held"""
    first = await sent(bus)
    await ended(given, first.command_id)
    assert await sent(bus, dedup=NO_WINDOW) == SendResult(first.command_id, created=False)
    given.database.rows("UPDATE busload.task SET held_until = now()")
    second = await sent(bus)
    assert second.created
    assert await sent(bus, dedup=NO_WINDOW) == SendResult(second.command_id, created=False)
    given.database.check_invariants()


async def test_a_key_is_free_after_its_batch_was_canceled(bus: CommandBus, given: Given) -> None:
    commands = [BatchCommand("Debit", task_key=f"k{n}") for n in range(3)]
    batch_id = await bus.create_batch(DOMAIN, commands, dedup=NO_WINDOW)
    assert not (await sent(bus, "k1", NO_WINDOW)).created
    await bus.cancel_batch(DOMAIN, batch_id, reason="wrong list")
    assert (await sent(bus, "k1", NO_WINDOW)).created


async def test_keys_of_two_domains_have_nothing_to_do_with_each_other(bus: CommandBus) -> None:
    assert [(await sent(bus, domain=domain)).created for domain in (DOMAIN, "crm", DOMAIN, "crm")] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("size", [5, 1500], ids=["arrays", "copy"])
async def test_many_are_judged_row_by_row_and_answered_in_order(bus: CommandBus, given: Given, size: int) -> None:
    """Taken before, repeated inside the call, new, without a key; by arrays and by COPY"""
    taken = await sent(bus, "taken")
    more = [BatchCommand("Debit", task_key=f"more{n}") for n in range(size - 5)]
    commands = [BatchCommand("Debit", task_key=key) for key in ("new", "taken", "new", None, "taken")] + more
    results = await bus.send_many(DOMAIN, commands, dedup=ONCE)
    assert [result.created for result in results] == [True, False, False, True, False] + [True] * len(more)
    assert results[1].command_id == results[4].command_id == taken.command_id
    assert results[2].command_id == results[0].command_id
    assert given.database.count("command") == 3 + len(more)
    again = await bus.send_many(DOMAIN, commands, dedup=ONCE)
    assert [result.created for result in again] == [False, False, False, True, False] + [False] * len(more)
    assert [r.command_id for r in again if not r.created] == [
        r.command_id for r, command in zip(results, commands, strict=True) if command.task_key
    ]
    given.database.check_invariants()


async def test_raise_in_a_list_names_every_holder_and_holds_nothing(bus: CommandBus, database: Database) -> None:
    taken = await sent(bus, "taken")
    before = database.everything()
    commands = [BatchCommand("Debit", task_key=key) for key in ("new", "taken", "new")]
    with pytest.raises(DuplicateTaskError, match="1 more") as refused:
        await bus.send_many(DOMAIN, commands, dedup=Dedup(on_conflict="raise"))
    assert refused.value.holders["taken"] == taken.command_id and set(refused.value.holders) == {"taken", "new"}
    assert database.everything() == before


async def test_a_batch_counts_what_was_really_inserted(bus: CommandBus, given: Given) -> None:
    given.handler()
    await sent(bus, "k1")
    batch_id = await bus.create_batch(
        DOMAIN, [BatchCommand("Debit", task_key=key) for key in ("k1", "k2", "k2", "k3")], dedup=ONCE
    )
    assert counts(await given.batch_now(batch_id)) == (2, 0, 0, 0, 0)
    await given.drained()
    batch = await given.batch_now(batch_id)
    assert (batch.status, batch.completed_count) == ("COMPLETED", 2)
    given.database.check_invariants()


async def test_a_batch_that_dedup_empties_completes_at_once_with_its_callback(bus: CommandBus, given: Given) -> None:
    done = given.handler("Done")
    given.handler()
    await sent(bus)
    batch_id = await bus.create_batch(
        DOMAIN, [BatchCommand("Debit", task_key=KEY)], dedup=ONCE, on_complete=BatchCommand("Done")
    )
    batch = await given.batch_now(batch_id)
    assert (batch.status, batch.total_count) == ("COMPLETED", 0)
    await given.drained()
    assert [command.data["batch"]["batch_id"] for command in done] == [str(batch_id)]
    given.database.check_invariants()


async def test_an_open_batch_skips_and_counts(bus: CommandBus, given: Given) -> None:
    await sent(bus, "k1")
    async with bus.open_batch(DOMAIN, checkpoint_size=2, dedup=ONCE) as batch:
        for key in ("k1", "k2", "k3", "k2", None):
            await batch.add("Debit", task_key=key)
    assert (batch.added, batch.skipped) == (3, 2)
    assert counts(await given.batch_now(batch.batch_id)) == (3, 0, 0, 0, 0)
    given.database.check_invariants()


async def test_an_open_batch_that_raises_keeps_what_it_may_write(bus: CommandBus, given: Given) -> None:
    """What is held elsewhere is dropped with the error; of two for one task the first stays"""
    taken = await sent(bus, "k1")
    async with bus.open_batch(DOMAIN, dedup=Dedup(on_conflict="raise")) as batch:
        for key in ("k1", "k2", "k2", "k3"):
            await batch.add("Debit", task_key=key)
        with pytest.raises(DuplicateTaskError) as refused:
            await batch.checkpoint()
        assert refused.value.holders["k1"] == taken.command_id
    assert (batch.added, batch.skipped) == (2, 0)
    listed = await bus.list_batch_commands(DOMAIN, batch.batch_id)
    assert [command.task_key for command in listed] == ["k2", "k3"]


async def test_adding_at_once_loses_nothing(bus: CommandBus, given: Given) -> None:
    """What is added while a checkpoint is being written belongs to the next one"""
    async with bus.open_batch(DOMAIN, checkpoint_size=7) as batch:
        added = await asyncio.gather(*(batch.add("Debit", n) for n in range(100)))
    assert (batch.added, len(set(added))) == (100, 100)
    assert counts(await given.batch_now(batch.batch_id)) == (100, 0, 0, 0, 0)
    given.database.check_invariants()


async def test_one_command_joins_an_open_batch_unless_its_key_is_held(bus: CommandBus, given: Given) -> None:
    async with bus.open_batch(DOMAIN) as batch:
        assert (await sent(bus, batch_id=batch.batch_id)).created
        assert not (await sent(bus, batch_id=batch.batch_id)).created
    assert counts(await given.batch_now(batch.batch_id)) == (1, 0, 0, 0, 0)


async def test_a_refused_command_id_leaves_its_key_free(bus: CommandBus, given: Given) -> None:
    taken = await given.sent()
    for send in (
        sent(bus, command_id=taken),
        bus.send_many(DOMAIN, [BatchCommand("Debit", taken, task_key=KEY)], dedup=ONCE),
    ):
        with pytest.raises(DuplicateCommandError):
            await send
    assert given.database.count("task") == 0
    assert (await sent(bus)).created


async def send_and_roll_back(bus: CommandBus, conn: psycopg.AsyncConnection, key: str) -> None:
    async with conn.transaction() as savepoint:
        assert (await sent(bus, key, conn=conn)).created
        with pytest.raises(DuplicateTaskError):
            await sent(bus, key, Dedup(on_conflict="raise"), conn=conn)
        raise psycopg.Rollback(savepoint)


async def test_a_key_sent_in_a_transaction_is_held_exactly_if_that_commits(
    bus: CommandBus, conn: psycopg.AsyncConnection, given: Given
) -> None:
    """A rollback, and a rollback to a savepoint, leave nothing"""
    for roll_back in (True, False):
        async with conn.transaction() as transaction:
            await send_and_roll_back(bus, conn, "inner")
            assert (await sent(bus, conn=conn)).created
            if roll_back:
                raise psycopg.Rollback(transaction)
    assert given.database.rows("SELECT task_key FROM busload.task") == [(KEY,)]
    assert not (await sent(bus)).created


@short_and_long("rounds", (100,), (1000,))
async def test_thirty_two_senders_at_once_one_wins(dsn: str, database: Database, rounds: int) -> None:
    """The others get the winner's id. Half of the rounds are without a window: open is enough"""
    async with CommandBus(dsn, settings=Settings(pool_size=32)) as bus:
        for n in range(rounds):
            dedup = ONCE if n % 2 else NO_WINDOW
            results = await asyncio.gather(*(sent(bus, f"round{n}", dedup) for _ in range(32)))
            assert sum(result.created for result in results) == 1
            assert len({result.command_id for result in results}) == 1
    assert database.count("command") == database.count("task") == rounds


@short_and_long("rounds", (60,), (200,))
async def test_a_winner_that_rolls_back_is_followed_by_another(dsn: str, database: Database, rounds: int) -> None:
    """Rounds of 16 senders that need a key of a transaction which is rolled back; never nobody, never two"""
    async with (
        CommandBus(dsn, settings=Settings(pool_size=20)) as bus,
        await psycopg.AsyncConnection.connect(dsn) as winner,
    ):
        for n in range(rounds):
            key = f"round{n}"
            first = await sent(bus, key, conn=winner)
            waiting = [asyncio.create_task(sent(bus, key)) for _ in range(16)]
            if n % 20 == 0:  # in the other rounds it is left to chance who has begun to wait
                await eventually(lambda: database.value(BLOCKED) > 0)
            await winner.rollback()
            results = await asyncio.gather(*waiting)
            assert sum(result.created for result in results) == 1
            assert {result.command_id for result in results}.isdisjoint({first.command_id})
            assert len({result.command_id for result in results}) == 1
    assert database.count("command") == rounds


@pytest.mark.parametrize("size", [50, 2 * MANY], ids=["some", "many"])
@pytest.mark.parametrize("joined", [False, True], ids=["alone", "joined"])
async def test_lists_of_the_same_keys_in_any_order_do_not_deadlock(
    dsn: str, database: Database, joined: bool, size: int
) -> None:
    """Each key has one winner, and everybody is told the same one. No wait of a joined transaction is cut short"""
    keys = [f"k{n}" for n in range(size)]

    async def send_all(order: list[str], conn: psycopg.AsyncConnection[Any]) -> list[SendResult]:
        commands = [BatchCommand("Debit", task_key=key) for key in order]
        if not joined:
            return await bus.send_many(DOMAIN, commands, dedup=ONCE)
        async with conn.transaction():
            return await bus.send_many(DOMAIN, commands, dedup=ONCE, conn=conn)

    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(CommandBus(dsn, settings=Settings(pool_size=8)))
        connections = [
            await stack.enter_async_context(await psycopg.AsyncConnection.connect(dsn, autocommit=True))
            for _ in range(4)
        ]
        for n in range(20):
            orders = [[f"{n}{key}" for key in order] for order in (keys, keys[::-1], keys[25:] + keys[:25], keys[::2])]
            answers = await asyncio.gather(*map(send_all, orders, connections))
            winners: dict[str, set[UUID]] = {}
            created = 0
            for order, results in zip(orders, answers, strict=True):
                for key, result in zip(order, results, strict=True):
                    winners.setdefault(key, set()).add(result.command_id)
                    created += result.created
            assert created == len(keys) and all(len(ids) == 1 for ids in winners.values())
    assert database.count("command") == 20 * size
    database.check_invariants()


@pytest.mark.parametrize("commits", [True, False], ids=["commits", "rolls back"])
async def test_many_new_keys_wait_for_a_sender_that_holds_one_of_them(
    bus: CommandBus, conn: psycopg.AsyncConnection, given: Given, commits: bool
) -> None:
    """Nobody can see that key yet. If its sender commits, the key is a duplicate, and all others are held"""
    keys = [f"k{n}" for n in range(2 * MANY)]
    async with conn.transaction() as transaction:
        winner = await sent(bus, keys[MANY], conn=conn)
        commands = [BatchCommand("Debit", task_key=key) for key in keys]
        waiting = asyncio.create_task(bus.create_batch(DOMAIN, commands, dedup=ONCE))
        await eventually(lambda: given.database.value(BLOCKED) > 0)
        if not commits:
            raise psycopg.Rollback(transaction)
    batch_id = await waiting
    assert (await given.batch_now(batch_id)).total_count == len(keys) - commits
    holders = dict(given.database.rows("SELECT task_key, command_id FROM busload.task"))
    assert holders.keys() == set(keys) and (holders[keys[MANY]] == winner.command_id) is commits
    assert given.database.value(
        "SELECT count(*) FROM busload.task JOIN busload.command USING (domain, task_key, command_id)"
    ) == len(keys)


async def test_keys_that_were_held_before_are_held_again_among_many_new_ones(bus: CommandBus, given: Given) -> None:
    """Of two whose windows are over, one command is still open"""
    given.handler()
    await sent(bus, "ended", NO_WINDOW)
    await given.drained()
    await sent(bus, "open", NO_WINDOW)
    keys = ["ended", "open", *(f"k{n}" for n in range(MANY))]
    results = await bus.send_many(DOMAIN, [BatchCommand("Debit", task_key=key) for key in keys], dedup=NO_WINDOW)
    assert [key for key, result in zip(keys, results, strict=True) if not result.created] == ["open"]
    holders = dict(given.database.rows("SELECT task_key, command_id FROM busload.task"))
    assert holders == {key: result.command_id for key, result in zip(keys, results, strict=True)}


async def test_a_repeated_send_whose_answer_was_lost_gets_its_own_command(bus: CommandBus, given: Given) -> None:
    command_id = uuid4()
    assert (await sent(bus, command_id=command_id)).created
    assert await sent(bus, command_id=command_id) == SendResult(command_id, created=False)


async def test_a_handler_sends_once(bus: CommandBus, given: Given) -> None:
    """Alone, and within its transaction: the key is held from the send on, and the command exists with the commit"""
    results: list[SendResult] = []

    async def spread(command: Command, ctx: HandlerContext) -> None:
        if command.data == "alone":
            results.append(await ctx.send(DOMAIN, "Debit", task_key=KEY, dedup=ONCE))
            return
        async with ctx.transaction():
            results.append(await ctx.send(DOMAIN, "Debit", task_key=KEY, dedup=ONCE))
            if command.data == "fails":
                raise BusinessRuleError("no")

    given.handler("Spread", spread)
    debits = given.handler()
    for data in ("fails", "in a transaction", "alone", "in a transaction"):
        await given.sent("Spread", data)
        await given.drained()
    assert [result.created for result in results] == [True, True, False, False]
    assert results[1].command_id == results[2].command_id == results[3].command_id == debits[0].command_id
    assert len(debits) == 1
    given.database.check_invariants()


async def test_a_handlers_transaction_sends_once_for_a_key_whatever_the_window(bus: CommandBus, given: Given) -> None:
    """What it will send is not in the database yet; one after the other, and at the same time"""
    results: list[SendResult] = []

    async def spread(command: Command, ctx: HandlerContext) -> None:
        async with ctx.transaction():
            results.append(await ctx.send(DOMAIN, "Debit", task_key=KEY, dedup=NO_WINDOW))
            calls = (ctx.send(DOMAIN, "Debit", task_key=key, dedup=NO_WINDOW) for key in (KEY, "k2", "k2", KEY))
            results.extend(await asyncio.gather(*calls))

    given.handler("Spread", spread)
    debits = given.handler()
    await given.sent("Spread")
    await given.drained()
    assert [result.created for result in results] == [True, False, True, False, False]
    assert {result.command_id for result in results} == {command.command_id for command in debits}
    assert len(debits) == 2


async def test_a_send_that_is_refused_in_a_handlers_transaction_holds_nothing(bus: CommandBus, given: Given) -> None:
    async def spread(command: Command, ctx: HandlerContext) -> None:
        async with ctx.transaction():
            with pytest.raises(InvalidCommandError):
                await ctx.send(DOMAIN, "Debit", task_key=KEY, dedup=ONCE, batch_id="oops")  # type: ignore[arg-type]

    given.handler("Spread", spread)
    await given.sent("Spread")
    await given.drained()
    assert given.database.count("task") == 0
    assert (await sent(bus)).created


async def test_a_database_that_is_repeatable_read_by_default_changes_nothing(dsn: str, database: Database) -> None:
    """Who waited for the winner is told its id, and does not fail"""
    database.rows(
        f"ALTER DATABASE {database.value('SELECT current_database()')} "
        "SET default_transaction_isolation = 'repeatable read'"
    )
    async with CommandBus(dsn, settings=Settings(pool_size=16)) as bus:
        for n in range(20):
            commands = [BatchCommand("Debit", task_key=f"many{n}")]
            calls: list[Any] = [sent(bus, f"one{n}") for _ in range(8)]
            calls += [bus.send_many(DOMAIN, commands, dedup=ONCE) for _ in range(8)]
            await asyncio.gather(*calls)
    assert database.count("command") == 40
    with SyncCommandBus(dsn) as sync_bus:
        assert not sync_bus.send(DOMAIN, "Debit", task_key="one0", dedup=ONCE).created
        with sync_bus.pool.connection() as conn:
            assert conn.execute("SHOW transaction_isolation").fetchone() == ("read committed",)


async def test_a_handler_with_def_sends_once(bus: CommandBus, given: Given) -> None:
    results: list[SendResult] = []

    def spread(command: Command, ctx: SyncHandlerContext) -> None:
        results.append(ctx.send(DOMAIN, "Debit", task_key="alone", dedup=ONCE))
        with ctx.transaction():
            results.append(ctx.send(DOMAIN, "Debit", task_key=KEY, dedup=NO_WINDOW))
            results.append(ctx.send(DOMAIN, "Debit", task_key=KEY, dedup=NO_WINDOW))

    bus.handler(DOMAIN, "Spread")(spread)
    debits = given.handler()
    for _ in range(2):
        await given.sent("Spread")
    await given.drained(concurrency=1)
    assert [result.created for result in results][:3] == [True, True, False]
    assert len(debits) == sum(result.created for result in results)


async def test_the_bus_without_an_event_loop_does_the_same(sync_bus: SyncCommandBus, database: Database) -> None:
    first = sync_bus.send(DOMAIN, "Debit", task_key=KEY, dedup=ONCE)
    second, third = sync_bus.send_many(
        DOMAIN, [BatchCommand("Debit", task_key=KEY), BatchCommand("Debit", task_key="new")], dedup=ONCE
    )
    assert (second, third.created) == (SendResult(first.command_id, created=False), True)
    with pytest.raises(DuplicateTaskError):
        sync_bus.create_batch(DOMAIN, [BatchCommand("Debit", task_key=KEY)], dedup=Dedup(on_conflict="raise"))
    with sync_bus.open_batch(DOMAIN, dedup=ONCE) as batch:
        batch.add("Debit", task_key="new")
        batch.add("Debit", task_key="newer")
    assert (batch.added, batch.skipped) == (1, 1)
    assert len(sync_bus.trace(KEY)) == 1
    database.check_invariants()


@pytest.mark.parametrize(
    "call",
    [
        lambda bus: bus.send(DOMAIN, "Debit", dedup=ONCE),
        lambda bus: bus.send(DOMAIN, "Debit", task_key="", dedup=ONCE),
        lambda bus: bus.send(DOMAIN, "Debit", task_key="a\0b", dedup=ONCE),
        lambda bus: bus.send(DOMAIN, "Debit", task_key="x" * 513, dedup=ONCE),
        lambda bus: bus.send(DOMAIN, "Debit", task_key=KEY, dedup="skip"),
        lambda bus: bus.send_many(DOMAIN, [BatchCommand("Debit", task_key=KEY)], dedup=timedelta(5)),
        lambda bus: bus.create_batch(DOMAIN, [BatchCommand("Debit", task_key="")], dedup=ONCE),
        lambda bus: bus.create_batch(DOMAIN, [BatchCommand("Debit", task_key=KEY)], dedup=5),
        lambda bus: bus.trace(""),
        lambda bus: bus.trace("a\0b"),
        lambda bus: bus.trace(KEY, domain="7"),
    ],
)
async def test_bad_keys_and_options_are_refused(bus: CommandBus, database: Database, call: Callable[..., Any]) -> None:
    before = database.everything()
    with pytest.raises(InvalidCommandError, match=r"wanted|allowed"):
        await call(bus)
    with pytest.raises(InvalidCommandError, match="wanted a Dedup"):
        bus.open_batch(DOMAIN, dedup=5)  # type: ignore[arg-type]
    assert database.everything() == before


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"window": timedelta(seconds=-1)}, "window"),
        ({"window": 300}, "window"),
        ({"window": timedelta(days=40_000)}, "window"),
        ({"on_conflict": "replace"}, "on_conflict"),
        ({"on_conflict": None}, "on_conflict"),
    ],
)
def test_a_dedup_that_makes_no_sense_cannot_be_made(options: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidCommandError, match=r"found .*wanted") as refused:
        Dedup(**options)
    assert refused.value.problems[0].path == f"/dedup/{path}"


def test_separators_inside_parts_cannot_make_two_keys_collide() -> None:
    parts = ["a", "b", ":", "%", "a:b", "%3A", "a%3Ab", "3A", "25"]
    made: dict[str, tuple[str, ...]] = {}
    for length in (1, 2, 3):
        for combination in itertools.product(parts, repeat=length):
            assert made.setdefault(task_key(*combination), combination) == combination
    assert task_key("invoices", 2026, UUID(int=7)) == f"invoices:2026:{UUID(int=7)}"


@pytest.mark.parametrize("parts", [(), ("",), ("a", ""), ("a", None), ("a", True), ("a", 1.5), (b"a",)])
def test_parts_that_name_nothing_are_refused(parts: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidCommandError, match="wanted"):
        task_key(*parts)
