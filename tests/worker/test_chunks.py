"""Bulk handlers: commands gathered into chunks, one call for many, and each command settled as ever."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from busload import (
    BatchCommand,
    BusinessRuleError,
    Chunk,
    ChunkContext,
    Command,
    CommandBus,
    InvalidCommandError,
    PermanentCommandError,
    RateLimit,
    RateLimitedError,
    RetryPolicy,
    SyncChunkContext,
    SyncCommandBus,
    TransientCommandError,
    WorkerSettings,
)
from busload.errors import InvalidOperationError
from busload.limits import rate
from busload.worker.chunks import Gatherer
from tests.given import DOMAIN, Database, Given, counts, eventually

AT_ONCE = RetryPolicy(max_attempts=3, backoff=(0,))
ONCE = RetryPolicy(max_attempts=1)
AN_HOUR = timedelta(hours=1)


class Ran:
    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.keys: list[Any] = []

    @property
    def sizes(self) -> list[int]:
        return [len(call) for call in self.calls]


def bulk(
    bus: CommandBus, judge: Callable[[Chunk, ChunkContext], Any] | None = None, command_type: str = "Push", **more: Any
) -> Ran:
    """Register a bulk handler that notes the `n` of its commands, and then does what `judge` does."""
    ran = Ran()

    @bus.bulk_handler(DOMAIN, command_type, **{"retry": AT_ONCE, "max_wait": AN_HOUR, **more})
    async def handle(chunk: Chunk, ctx: ChunkContext) -> Any:
        ran.calls.append([item.data["n"] for item in chunk])
        ran.keys.append(chunk.key)
        return judge(chunk, ctx) if judge else None

    return ran


# -- when a chunk leaves --------------------------------------------------------------------------------------------


async def test_a_chunk_leaves_when_it_is_full_and_the_rest_when_nothing_else_comes(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """One slot is enough: chunks are far larger than the concurrency. A drain does not wait for `max_wait`."""
    ran = bulk(bus, size=40)
    batch_id = await given.batch(100, "Push")
    assert await given.drained(concurrency=1) == 100
    assert ran.sizes == [40, 40, 20] and sorted(n for call in ran.calls for n in call) == list(range(100))
    assert counts(await given.batch_now(batch_id)) == (100, 100, 0, 0, 0)
    database.check_invariants()


async def test_a_chunk_that_is_not_full_leaves_after_max_wait(bus: CommandBus, given: Given) -> None:
    ran = bulk(bus, size=1000, max_wait=0.2)
    async with given.running():
        await given.batch(7, "Push")
        await eventually(lambda: ran.sizes == [7])


async def test_a_chunk_that_is_not_full_waits_for_more_until_max_wait(
    bus: CommandBus, given: Given, database: Database
) -> None:
    ran = bulk(bus, size=10)
    async with given.running():
        for n in range(9):
            await given.sent("Push", {"n": n})
        await eventually(lambda: database.value("SELECT sum(open) FROM busload.lease") == 9)
        assert ran.calls == []
        await given.sent("Push", {"n": 9})
        await eventually(lambda: ran.sizes == [10])


async def test_a_chunk_leaves_before_its_bytes_are_too_many(bus: CommandBus, given: Given) -> None:
    ran = bulk(bus, size=1000, max_bytes=1000)
    commands = [BatchCommand("Push", data={"n": n, "text": "é" * 200}) for n in range(7)]
    commands.append(BatchCommand("Push", data={"n": 7, "text": "x" * 5000}))  # too large for any: alone
    commands.append(BatchCommand("Push", data={"n": 8}))
    await bus.create_batch(DOMAIN, commands)
    await given.drained()
    assert ran.calls == [[0, 1], [2, 3], [4, 5], [6], [7], [8]]


async def test_commands_of_a_chunk_have_in_common_what_by_has_found(bus: CommandBus, given: Given) -> None:
    ran = bulk(bus, size=10, by=lambda command: command.data["n"] % 3)
    await given.batch(15, "Push")
    await given.drained(concurrency=2)
    assert sorted(ran.keys) == [0, 1, 2] and ran.sizes == [5, 5, 5]
    assert all({n % 3 for n in call} == {key} for call, key in zip(ran.calls, ran.keys, strict=True))


async def test_more_keys_than_may_be_held_do_not_block_each_other(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """No chunk of 100 keys ever fills up before two chunks' worth are held: then the fullest leaves early."""
    ran = bulk(bus, size=10, by=lambda command: command.data["n"] % 100)
    batch_id = await given.batch(300, "Push")
    async with given.running(concurrency=2):
        await eventually(lambda: sum(ran.sizes) >= 280)
    await given.drained()
    assert sum(ran.sizes) == 300
    assert (await given.batch_now(batch_id)).completed_count == 300
    database.check_invariants()


class Incomparable:
    def __hash__(self) -> int:
        return hash("ok")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("apples and pears")


def leave(command: Command) -> object:
    raise SystemExit(3)


@pytest.mark.parametrize(
    "by",
    [
        lambda command: command.data["missing"],
        lambda command: [],
        lambda command: 1 / (command.data["n"] - 5),
        lambda command: Incomparable(),
        leave,
    ],
)
async def test_where_by_raises_or_finds_no_key_the_command_fails_alone(
    bus: CommandBus, given: Given, database: Database, by: Callable[[Command], object]
) -> None:
    def key(command: Command) -> object:
        return by(command) if command.data["n"] == 5 else "ok"

    ran = bulk(bus, size=10, by=key, retry=ONCE)
    batch_id = await given.batch(10, "Push")
    await given.drained()
    assert sorted(ran.calls[0]) == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert counts(await given.batch_now(batch_id)) == (10, 9, 0, 0, 1)
    database.check_invariants()


async def test_commands_that_could_not_be_gathered_are_handed_back(
    bus: CommandBus, given: Given, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something of ours raises after the claim: nothing may hang in a lease that nobody works at."""
    ran, take = bulk(bus, size=3, max_wait=0), Gatherer.take
    raised: list[Any] = []

    def fail_once(gatherer: Gatherer, leased: Any) -> Any:
        if not raised:
            raised.append(list(leased))
            raise RuntimeError("ours")
        return take(gatherer, leased)

    monkeypatch.setattr(Gatherer, "take", fail_once)
    await given.batch(3, "Push")
    settings = WorkerSettings(lease_for=timedelta(seconds=2), prefetch=timedelta(0))
    async with given.running(settings=settings):
        await eventually(lambda: database.count("execution") == 3)
    assert raised and sum(ran.sizes) == 3
    database.check_invariants()


# -- what is held -------------------------------------------------------------------------------------------------


async def test_a_worker_holds_two_chunks_ahead_of_its_slots_and_no_more(
    bus: CommandBus, given: Given, database: Database
) -> None:
    gate = asyncio.Event()
    started: list[int] = []

    @bus.bulk_handler(DOMAIN, "Push", size=20, max_wait=AN_HOUR)
    async def handle(chunk: Chunk, ctx: ChunkContext) -> None:
        started.append(len(chunk))
        await gate.wait()

    await given.batch(500, "Push")
    async with given.running(concurrency=2) as worker:
        await eventually(lambda: len(started) == 2)
        await eventually(lambda: database.value("SELECT sum(open) FROM busload.lease") == 80)
        await eventually(lambda: worker.stats.in_hand == 4)  # a chunk is one in hand
        for _ in range(10):
            await asyncio.sleep(0.02)
            assert database.value("SELECT sum(open) FROM busload.lease") <= 80
        gate.set()
        await eventually(lambda: database.count("execution") == 500)
    assert set(started) == {20}


async def test_ordinary_commands_of_the_same_domain_are_not_claimed_beyond_the_slots(
    bus: CommandBus, given: Given, database: Database
) -> None:
    gate = asyncio.Event()
    ran = bulk(bus, size=50)

    async def slow(command: Command, ctx: Any) -> None:
        await gate.wait()

    seen = given.handler("Debit", slow)
    commands = [BatchCommand("Debit" if n % 2 else "Push", data={"n": n}) for n in range(100)]
    await bus.create_batch(DOMAIN, commands)
    settings = WorkerSettings(poll_every=timedelta(milliseconds=50), prefetch=timedelta(0))
    async with given.running(concurrency=3, settings=settings):
        await eventually(lambda: len(seen) == 3)
        for _ in range(10):
            await asyncio.sleep(0.02)
        held = database.rows("SELECT lo, hi FROM busload.lease")
        ordinary = [id for lo, hi in held for id in range(lo, hi + 1) if (id & 1023) % 2]
        assert len(ordinary) <= 3
        gate.set()
        await eventually(lambda: database.count("execution") >= 50)
    await given.drained()
    assert sum(ran.sizes) == 50 and len(seen) == 50
    database.check_invariants()


async def test_single_commands_and_chunks_of_another_domain_run_side_by_side(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """A domain of bulk handlers that is empty is not asked with every claim for single commands."""
    sizes: list[int] = []

    @bus.bulk_handler("crm", "Push", size=50, max_wait=AN_HOUR)
    async def handle(chunk: Chunk, ctx: ChunkContext) -> None:
        sizes.append(len(chunk))

    seen = given.handler()
    await given.batch(300)
    settings = WorkerSettings(poll_every=timedelta(seconds=30), prefetch=timedelta(0))
    async with given.running(concurrency=2, settings=settings, domains=[DOMAIN, "crm"]) as worker:
        await eventually(lambda: len(seen) == 300)
        stats = worker.stats
        assert stats.empty_claims < stats.claims / 2
        await bus.create_batch("crm", [BatchCommand("Push", data={"n": n}) for n in range(120)])
        await eventually(lambda: sizes == [50, 50])
        await given.batch(10)
        await eventually(lambda: len(seen) == 310)
    await given.drained(domains=["crm"])
    assert sizes == [50, 50, 20]
    database.check_invariants()


async def test_single_commands_that_wait_behind_stuck_slots_go_back_though_chunks_are_claimed(
    bus: CommandBus, given: Given, database: Database
) -> None:
    gate = asyncio.Event()

    @bus.bulk_handler("crm", "Push", size=50, max_wait=AN_HOUR)
    async def handle(chunk: Chunk, ctx: ChunkContext) -> None: ...

    quick = True

    async def slow(command: Command, ctx: Any) -> None:
        if not quick:
            await gate.wait()

    seen = given.handler("Debit", slow)
    settings = WorkerSettings(poll_every=timedelta(milliseconds=50), lease_for=timedelta(seconds=4))
    await given.batch(400)
    async with given.running(concurrency=2, settings=settings, domains=[DOMAIN, "crm"]) as worker:
        await eventually(lambda: len(seen) == 400)  # it knows by now that it may hold many ahead
        quick = False
        await given.batch(200)
        await eventually(lambda: worker.stats.in_line > 0)
        await eventually(lambda: worker.stats.in_line == 0)
        assert worker.stats.in_hand == 2 and len(seen) == 402
        gate.set()
    database.check_invariants()


async def test_what_was_gathered_and_not_started_is_handed_back_on_stop_without_burning_an_attempt(
    bus: CommandBus, given: Given, database: Database
) -> None:
    ran = bulk(bus, size=100)
    batch_id = await given.batch(30, "Push")
    async with given.running():
        await eventually(lambda: database.value("SELECT sum(open) FROM busload.lease") == 30)
    assert database.count("lease") == 0 and database.count("execution") == 0 and ran.calls == []
    assert database.value("SELECT sum(hi - lo + 1) FROM busload.queue WHERE attempt = 1") == 30
    await given.drained()
    assert (await given.batch_now(batch_id)).completed_count == 30
    assert database.value("SELECT max(attempt) FROM busload.execution") == 1
    database.check_invariants()


async def test_a_stopping_worker_does_not_start_what_it_has_gathered_while_others_finish(
    bus: CommandBus, given: Given, database: Database
) -> None:
    gate = asyncio.Event()
    calls: list[int] = []

    @bus.bulk_handler(DOMAIN, "Push", size=5, max_wait=AN_HOUR)
    async def handle(chunk: Chunk, ctx: ChunkContext) -> None:
        calls.append(len(chunk))
        await gate.wait()

    await given.batch(5, "Push")
    async with given.running(concurrency=2) as worker:
        await eventually(lambda: calls == [5])
        await given.batch(3, "Push")
        await eventually(lambda: database.value("SELECT sum(open) FROM busload.lease") == 8)
        worker.stop()
        await eventually(lambda: database.value("SELECT sum(hi - lo + 1) FROM busload.queue") == 3)
        gate.set()
    assert calls == [5] and database.value("SELECT sum(hi - lo + 1) FROM busload.queue") == 3
    database.check_invariants()


async def test_what_was_gathered_is_handed_back_when_its_domain_is_paused(
    bus: CommandBus, given: Given, database: Database
) -> None:
    ran = bulk(bus, size=100)
    async with given.running():
        await given.batch(30, "Push")
        await eventually(lambda: database.value("SELECT sum(open) FROM busload.lease") == 30)
        await bus.domains.pause(DOMAIN, reason="maintenance", operator="ann")
        await eventually(lambda: database.count("lease") == 0)
        assert database.value("SELECT sum(hi - lo + 1) FROM busload.queue") == 30
        await bus.domains.resume(DOMAIN, operator="ann")
        await eventually(lambda: database.value("SELECT sum(open) FROM busload.lease") == 30)
    assert ran.calls == []
    database.check_invariants()


async def test_gathered_commands_whose_lease_was_lost_do_not_run_here(
    bus: CommandBus, given: Given, database: Database
) -> None:
    ran = bulk(bus, size=100, max_wait=0.5)
    async with given.running(settings=WorkerSettings(lease_for=timedelta(seconds=20))) as worker:
        await given.sent("Push", {"n": 1})
        await eventually(lambda: worker.stats.claimed == 1)
        running = worker.stats
        assert running.in_hand == 0
        database.rows("DELETE FROM busload.lease")  # and nobody else has them: they are in no place any more
        worker_held(worker)
        await given.sent("Push", {"n": 2})
        await eventually(lambda: ran.calls == [[2]])


def worker_held(worker: Any) -> None:
    """What a heartbeat would tell: these leases are not ours any more."""
    held = worker._run._held
    held.lose(set(held.lease_ids))


async def test_chunks_that_wait_too_long_for_a_slot_go_back_to_other_workers(
    bus: CommandBus, given: Given, database: Database
) -> None:
    gate = asyncio.Event()
    calls: list[int] = []

    @bus.bulk_handler(DOMAIN, "Push", size=5, max_wait=AN_HOUR)
    async def handle(chunk: Chunk, ctx: ChunkContext) -> None:
        calls.append(len(chunk))
        if len(calls) == 1:
            await gate.wait()

    settings = WorkerSettings(
        poll_every=timedelta(milliseconds=50), lease_for=timedelta(seconds=2), prefetch=timedelta(0)
    )
    await given.batch(15, "Push")
    async with given.running(concurrency=1, settings=settings):
        await eventually(lambda: calls == [5])
        await eventually(lambda: database.value("SELECT sum(hi - lo + 1) FROM busload.queue") == 10)
        for _ in range(10):
            await asyncio.sleep(0.02)
            assert database.value("SELECT sum(hi - lo + 1) FROM busload.queue") == 10, "claimed again at once"
        gate.set()
        await eventually(lambda: calls == [5, 5, 5])
    database.check_invariants()


# -- verdicts -----------------------------------------------------------------------------------------------------


async def test_each_command_has_its_own_result_error_attempts_and_reply(
    bus: CommandBus, given: Given, database: Database
) -> None:
    def judge(chunk: Chunk, ctx: ChunkContext) -> None:
        for item in chunk:
            match item.data["n"]:
                case 0:
                    chunk.succeed(item)
                case 1:
                    chunk.succeed(item, {"remote": 1})
                case 2:
                    chunk.fail(item, PermanentCommandError("bad", code="BAD"))
                case 3:
                    chunk.fail(item, BusinessRuleError("no"))
                case 4:
                    chunk.fail(item, "later")
                case _:
                    pass  # nobody says anything

    bulk(bus, judge, size=6)
    replies: list[Command] = []
    bus.handler("answers", "PushReply")(lambda command, ctx: replies.append(command))
    commands = [
        BatchCommand("Push", data={"n": n}, reply_to="answers", max_attempts=2 if n == 4 else None) for n in range(6)
    ]
    batch_id = await bus.create_batch(DOMAIN, commands)
    await given.drained(domains=[DOMAIN, "answers"])
    found = {c.data["n"]: c for c in await bus.list_batch_commands(DOMAIN, batch_id)}
    assert [found[n].status for n in range(6)] == [
        "COMPLETED",
        "COMPLETED",
        "IN_TROUBLESHOOTING_QUEUE",
        "FAILED",
        "IN_TROUBLESHOOTING_QUEUE",
        "COMPLETED",  # in the end it was alone, and nobody was judged
    ]
    assert (found[0].result, found[1].result) == (None, {"remote": 1})
    assert [found[n].attempts for n in range(6)] == [1, 1, 1, 1, 2, 3]
    assert found[5].last_error_code == "NO_VERDICT" and found[2].last_error_code == "BAD"
    assert counts(await given.batch_now(batch_id)) == (6, 3, 1, 0, 2)
    assert sorted(reply.data["outcome"] for reply in replies) == ["FAILED", "SUCCESS", "SUCCESS", "SUCCESS"]
    database.check_invariants()


async def test_what_a_call_returns_is_the_result_of_every_command(bus: CommandBus, given: Given) -> None:
    bulk(bus, lambda chunk, ctx: {"request": 17}, size=3)
    batch_id = await given.batch(3, "Push")
    await given.drained()
    assert [c.result for c in await bus.list_batch_commands(DOMAIN, batch_id)] == [{"request": 17}] * 3


async def test_a_result_that_cannot_be_stored_parks_its_command_alone(
    bus: CommandBus, given: Given, database: Database
) -> None:
    def judge(chunk: Chunk, ctx: ChunkContext) -> None:
        for item in chunk:
            chunk.succeed(item, "a\0" if item.data["n"] == 1 else "ok")

    bulk(bus, judge, size=3)
    await given.batch(3, "Push")
    await given.drained()
    [item] = await bus.troubleshooting.list(DOMAIN)
    assert (item.reason, item.data) == ("RESULT_INVALID", {"n": 1})
    database.check_invariants()


async def test_a_chunk_with_more_results_than_the_settlement_holds_is_settled_all_the_same(
    bus: CommandBus, given: Given, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    bulk(bus, size=1000)
    batch_id = await given.batch(2000, "Push")
    settings = WorkerSettings(poll_every=timedelta(milliseconds=50), flush_size=50)
    assert await given.drained(concurrency=2, settings=settings) == 2000
    assert counts(await given.batch_now(batch_id)) == (2000, 2000, 0, 0, 0)
    assert "is full with" not in caplog.text
    database.check_invariants()


async def test_a_call_that_raises_tries_all_again(bus: CommandBus, given: Given, database: Database) -> None:
    def judge(chunk: Chunk, ctx: ChunkContext) -> None:
        if len(ran.calls) < 3:
            raise OSError("503")

    ran = bulk(bus, judge, size=4)
    batch_id = await given.batch(4, "Push")
    assert await given.drained() == 12
    assert ran.sizes == [4, 4, 4] and counts(await given.batch_now(batch_id)) == (4, 4, 0, 0, 0)
    database.check_invariants()


async def test_an_undecodable_command_waits_alone_and_the_chunk_runs(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """With `by` and without."""
    ran = bulk(bus, size=3)
    other = bulk(bus, command_type="Sort", size=3, by=lambda command: 1)
    await given.batch(3, "Push")
    await given.batch(3, "Sort")
    database.rows("""UPDATE busload.command SET data = '"\\ud800"' WHERE data ->> 'n' = '1'""")
    await given.drained()
    assert ran.calls == [[0, 2]] and other.calls == [[0, 2]]
    assert [item.reason for item in await bus.troubleshooting.list(DOMAIN)] == ["UNDECODABLE"] * 2
    database.check_invariants()


async def test_a_canceled_batch_asks_the_chunk_to_stop_and_what_raises_is_canceled(
    bus: CommandBus, given: Given, database: Database
) -> None:
    started = asyncio.Event()

    @bus.bulk_handler(DOMAIN, "Push", size=2, max_wait=AN_HOUR)
    async def handle(chunk: Chunk, ctx: ChunkContext) -> None:
        started.set()
        while not ctx.cancelled:
            await asyncio.sleep(0.01)
        raise RuntimeError("stopped half way")

    batch_id = await given.batch(2, "Push")
    async with given.running():
        await started.wait()
        await bus.cancel_batch(DOMAIN, batch_id, reason="no", operator="ann")
        await eventually(lambda: database.count("execution") == 2)
    assert counts(await given.batch_now(batch_id)) == (2, 0, 0, 2, 0)
    database.check_invariants()


async def test_a_refused_call_puts_the_rest_off_and_burns_no_attempt(
    bus: CommandBus, given: Given, database: Database
) -> None:
    def judge(chunk: Chunk, ctx: ChunkContext) -> None:
        if len(ran.calls) == 1:
            chunk.succeed(chunk[0])
            raise RateLimitedError(after=0)

    ran = bulk(bus, judge, size=3, max_wait=0.05, retry=ONCE)
    batch_id = await given.batch(3, "Push")
    async with given.running():
        await eventually(lambda: database.count("execution") == 3)
    assert ran.calls[0] == [0, 1, 2] and sorted(n for call in ran.calls[1:] for n in call) == [1, 2]
    assert counts(await given.batch_now(batch_id)) == (3, 3, 0, 0, 0)
    assert database.value("SELECT max(attempt) FROM busload.execution") == 1
    database.check_invariants()


async def test_a_refusal_item_by_item_in_a_transaction_puts_the_rest_off_too(
    bus: CommandBus, given: Given, database: Database
) -> None:
    calls: list[int] = []

    @bus.bulk_handler(DOMAIN, "Push", size=2, max_wait=0.05, retry=ONCE)
    async def handle(chunk: Chunk, ctx: ChunkContext) -> None:
        calls.append(len(chunk))
        async with ctx.transaction() as conn:
            await conn.execute("SELECT 1")
            for item in chunk:
                if len(calls) == 1:
                    chunk.fail(item, RateLimitedError(after=0))

    batch_id = await given.batch(2, "Push")
    async with given.running():
        await eventually(lambda: database.count("execution") == 2)
    assert counts(await given.batch_now(batch_id)) == (2, 2, 0, 0, 0)
    assert database.value("SELECT max(attempt) FROM busload.execution") == 1
    database.check_invariants()


@pytest.mark.parametrize("in_transaction", [False, True])
async def test_what_is_refused_waits_and_what_has_failed_otherwise_does_not(
    bus: CommandBus, given: Given, database: Database, in_transaction: bool
) -> None:
    @bus.bulk_handler(DOMAIN, "Push", size=5, retry=ONCE)
    async def handle(chunk: Chunk, ctx: ChunkContext) -> None:
        if in_transaction:
            async with ctx.transaction() as conn:
                await conn.execute("SELECT 1")
        errors = [None, PermanentCommandError("bad"), BusinessRuleError("no"), TransientCommandError("500")]
        for item in chunk:
            error = RateLimitedError(after=3600) if item.data["n"] == 4 else errors[item.data["n"]]
            chunk.succeed(item) if error is None else chunk.fail(item, error)

    batch_id = await given.batch(5, "Push")
    await given.drained()
    assert counts(await given.batch_now(batch_id)) == (5, 1, 1, 0, 2)
    assert database.rows("SELECT reason, attempt, sum(hi - lo + 1)::int FROM busload.scheduled GROUP BY 1, 2") == [
        ("RATE_LIMITED", 1, 1)
    ]
    database.check_invariants()


# -- threads, transactions, time ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["async", "def"])
@pytest.mark.parametrize("ends", ["returns", "judges", "raises"])
async def test_what_is_written_in_the_transaction_commits_with_all_results_of_the_chunk(
    bus: CommandBus, given: Given, database: Database, kind: str, ends: str
) -> None:
    database.rows("CREATE TABLE effect (n integer)")
    bus.handler(DOMAIN, "Next")(lambda command, ctx: None)

    def judge(chunk: Chunk) -> Any:
        if ends == "raises":
            chunk.succeed(chunk[0])
            raise TransientCommandError("no")
        if ends == "judges":
            for item in chunk:
                chunk.succeed(item, "fine") if item.data["n"] else chunk.fail(item, "zero")
        return "all"

    async def handle_async(chunk: Chunk, ctx: ChunkContext) -> Any:
        async with ctx.transaction() as conn:
            await conn.execute("INSERT INTO effect VALUES (%s)", [len(chunk)])
            await ctx.send(DOMAIN, "Next")
            return judge(chunk)

    def handle(chunk: Chunk, ctx: SyncChunkContext) -> Any:
        with ctx.transaction() as conn:
            conn.execute("INSERT INTO effect VALUES (%s)", [len(chunk)])
            ctx.send(DOMAIN, "Next")
            return judge(chunk)

    bus.bulk_handler(DOMAIN, "Push", size=3, retry=ONCE)(handle_async if kind == "async" else handle)
    batch_id = await given.batch(3, "Push")
    await given.drained()
    effects = [n for (n,) in database.rows("SELECT n FROM effect")]
    sent = database.value("SELECT count(*) FROM busload.command WHERE command_type = 'Next'")
    results = [c.result for c in await bus.list_batch_commands(DOMAIN, batch_id)]
    if ends == "raises":
        assert (effects, sent) == ([], 0)
        assert counts(await given.batch_now(batch_id)) == (3, 0, 0, 0, 3)
    else:
        assert (effects, sent) == ([3], 1)
        assert results == (["all"] * 3 if ends == "returns" else [None, "fine", "fine"])
    database.check_invariants()


async def test_a_chunk_that_lost_one_of_its_commands_commits_nothing(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """The transaction is one: the others are tried again, and the lost one runs elsewhere."""
    database.rows("CREATE TABLE effect (n integer)")
    calls: list[int] = []

    @bus.bulk_handler(DOMAIN, "Push", size=2, max_wait=AN_HOUR, retry=AT_ONCE)
    async def handle(chunk: Chunk, ctx: ChunkContext) -> None:
        calls.append(len(chunk))
        async with ctx.transaction() as conn:
            for item in chunk:
                await conn.execute("INSERT INTO effect VALUES (%s)", [item.data["n"]])
            if len(calls) == 1:
                database.rows("DELETE FROM busload.lease WHERE lo = (SELECT min(lo) FROM busload.lease)")
                database.rows(
                    "INSERT INTO busload.queue (lo, hi, domain) SELECT id, id, domain FROM busload.command"
                    " WHERE data ->> 'n' = '0'"
                )

    await given.sent("Push", {"n": 0})
    await given.sent("Push", {"n": 1}, priority=-1)  # a lease of its own
    await given.drained()
    assert sorted(n for (n,) in database.rows("SELECT n FROM effect")) == [0, 1]
    assert calls[0] == 2 and sum(calls) == 4
    database.check_invariants()


@pytest.mark.parametrize("kind", ["async", "def"])
async def test_results_that_cannot_be_kept_do_not_undo_the_transaction(
    bus: CommandBus, given: Given, database: Database, kind: str
) -> None:
    """As for single commands what was written stays, and nothing is done twice."""
    results = ["ok", "a\0", object()]
    database.rows("CREATE TABLE effect (n integer)")

    async def handle_async(chunk: Chunk, ctx: ChunkContext) -> None:
        async with ctx.transaction() as conn:
            for item in chunk:
                await conn.execute("INSERT INTO effect VALUES (%s)", [item.data["n"]])
                chunk.succeed(item, results[item.data["n"]])

    def handle(chunk: Chunk, ctx: SyncChunkContext) -> None:
        with ctx.transaction() as conn:
            for item in chunk:
                conn.execute("INSERT INTO effect VALUES (%s)", [item.data["n"]])
                chunk.succeed(item, results[item.data["n"]])

    bus.bulk_handler(DOMAIN, "Push", size=3, retry=AT_ONCE)(handle_async if kind == "async" else handle)
    batch_id = await given.batch(3, "Push")
    await given.drained()
    assert sorted(n for (n,) in database.rows("SELECT n FROM effect")) == [0, 1, 2]
    [parked] = await bus.troubleshooting.list(DOMAIN)
    assert (parked.reason, parked.data) == ("RESULT_INVALID", {"n": 1})
    first, _, third = await bus.list_batch_commands(DOMAIN, batch_id)
    assert (first.status, first.attempts, first.result) == ("COMPLETED", 1, "ok")
    assert (third.status, third.attempts, list(third.result)) == ("COMPLETED", 1, ["result_not_kept"])
    database.check_invariants()


async def test_what_was_lost_while_it_waited_for_a_limit_is_not_called(
    bus: CommandBus, given: Given, database: Database
) -> None:
    ran = bulk(bus, size=1, max_wait=0, rate_limit=RateLimit(2))
    async with given.running(concurrency=3) as worker:
        await given.sent("Push", {"n": 1})
        await eventually(lambda: database.count("execution") == 1)
        await given.sent("Push", {"n": 2})
        await eventually(lambda: worker.stats.in_hand == 1)
        database.rows("DELETE FROM busload.lease")
        worker_held(worker)
        await given.sent("Push", {"n": 3})
        await eventually(lambda: [3] in ran.calls)
    assert ran.calls == [[1], [3]]


async def test_an_attempt_begins_when_the_limit_lets_it_go(bus: CommandBus, given: Given) -> None:
    both = asyncio.Event()

    @bus.bulk_handler(DOMAIN, "Push", size=1, max_wait=0, rate_limit=RateLimit(4))
    async def handle(chunk: Chunk, ctx: ChunkContext) -> None:
        if chunk[0].data["n"] == 0:
            await both.wait()

    ids = [await given.sent("Push", {"n": 0}, task_key="first")]
    async with given.running(concurrency=2) as worker:
        await eventually(lambda: worker.stats.in_hand == 1)
        ids.append(await given.sent("Push", {"n": 1}, task_key="second"))
        await eventually(lambda: worker.stats.in_hand == 2)
        both.set()
        await eventually(lambda: worker.stats.completed == 2)
    [first], [second] = [await bus.trace(key) for key in ("first", "second")]
    assert first.finished_at is not None and second.started_at is not None
    assert second.started_at > first.finished_at


@pytest.mark.parametrize("kind", ["async", "def"])
async def test_a_call_that_takes_too_long_fails_what_it_did_not_judge(
    bus: CommandBus, given: Given, database: Database, kind: str
) -> None:
    gate = threading.Event()

    async def slow_async(chunk: Chunk, ctx: ChunkContext) -> None:
        chunk.succeed(chunk[0])
        await asyncio.Event().wait()

    def slow(chunk: Chunk, ctx: SyncChunkContext) -> None:
        chunk.succeed(chunk[0])
        gate.wait(30)
        assert ctx.cancelled

    handle = slow if kind == "def" else slow_async
    bus.bulk_handler(DOMAIN, "Push", size=3, retry=ONCE, timeout=1.0)(handle)  # a thread may not begin at once
    batch_id = await given.batch(3, "Push")
    try:
        async with given.running():
            await eventually(lambda: database.count("execution") == 3)
            gate.set()
    finally:
        gate.set()
    assert counts(await given.batch_now(batch_id)) == (3, 1, 0, 0, 2)
    assert {item.last_error_code for item in await bus.troubleshooting.list(DOMAIN)} == {"TIMEOUT"}
    database.check_invariants()


async def test_a_stopping_worker_hands_a_running_chunk_back(bus: CommandBus, given: Given, database: Database) -> None:
    started = asyncio.Event()

    @bus.bulk_handler(DOMAIN, "Push", size=2)
    async def handle(chunk: Chunk, ctx: ChunkContext) -> None:
        started.set()
        await asyncio.Event().wait()

    await given.batch(2, "Push")
    async with given.running() as worker:
        await started.wait()
        worker.stop(hurry=True)
    assert database.value("SELECT sum(hi - lo + 1) FROM busload.queue WHERE attempt = 1") == 2
    database.check_invariants()


# -- poison and crashes -----------------------------------------------------------------------------------------------


async def test_after_the_second_whole_failure_the_bad_command_is_found(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """64 commands, one poison, and each good one passes exactly once."""

    def judge(chunk: Chunk, ctx: ChunkContext) -> None:
        if any(item.data["n"] == 17 for item in chunk):
            raise TransientCommandError("500")

    ran = bulk(bus, judge, size=64, isolate_poison=True, retry=RetryPolicy(max_attempts=2, backoff=(0,)))
    batch_id = await given.batch(64, "Push")
    await given.drained()
    assert ran.sizes[:2] == [64, 64] and len(ran.calls) <= 2 + 7
    assert counts(await given.batch_now(batch_id)) == (64, 63, 0, 0, 1)
    [item] = await bus.troubleshooting.list(DOMAIN)
    assert item.data == {"n": 17}
    database.check_invariants()


@pytest.fixture
def impatient(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is put off unless its turn has come."""
    monkeypatch.setattr(rate, "AHEAD", 0.0)
    given.settings = replace(given.settings, wait_for_turn=timedelta(milliseconds=20))


@pytest.mark.usefixtures("impatient")
async def test_a_limit_never_makes_the_search_for_the_bad_one_begin_anew(
    bus: CommandBus, given: Given, database: Database
) -> None:
    def judge(chunk: Chunk, ctx: ChunkContext) -> None:
        if any(item.data["n"] == 2 for item in chunk):
            raise TransientCommandError("500")

    two = RetryPolicy(max_attempts=2, backoff=(0,))
    ran = bulk(bus, judge, size=4, isolate_poison=True, retry=two, rate_limit=RateLimit(15))
    batch_id = await given.batch(4, "Push")
    async with given.running():
        await eventually(lambda: database.count("execution") == 4 + 4)
    assert ran.sizes.count(4) == 2
    assert counts(await given.batch_now(batch_id)) == (4, 3, 0, 0, 1)
    database.check_invariants()


async def test_a_search_that_misses_its_turn_goes_on_with_the_next(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """The event loop is blocked between the turn of the first part and the call, which begins in a task of its own."""
    blocking: list[asyncio.Task[None]] = []

    async def block_when_a_task_begins() -> None:
        known = asyncio.all_tasks()
        while not asyncio.all_tasks() - known:
            await asyncio.sleep(0)
        time.sleep(0.2)

    def judge(chunk: Chunk, ctx: ChunkContext) -> None:
        if ran.sizes == [4, 4]:
            blocking.append(asyncio.create_task(block_when_a_task_begins()))
        if any(item.data["n"] == 2 for item in chunk):
            raise TransientCommandError("500")

    two = RetryPolicy(max_attempts=2, backoff=(0,))
    ran = bulk(bus, judge, size=4, isolate_poison=True, retry=two, rate_limit=RateLimit(20))
    batch_id = await given.batch(4, "Push")
    async with given.running():
        await eventually(lambda: database.count("execution") == 4 + 4)
    assert ran.sizes == [4, 4, 2, 1, 1] and blocking[0].done()
    assert counts(await given.batch_now(batch_id)) == (4, 3, 0, 0, 1)
    database.check_invariants()


@pytest.mark.parametrize("limit", [None, RateLimit(1000)])
async def test_a_refusal_in_the_middle_of_the_search_does_not_end_it(
    bus: CommandBus, given: Given, database: Database, limit: RateLimit | None
) -> None:
    """Every part is refused once: it waits its time, and is tried again."""
    refused: list[list[int]] = []

    def judge(chunk: Chunk, ctx: ChunkContext) -> None:
        if len(ran.calls) > 2 and ran.calls[-1] not in refused:
            refused.append(ran.calls[-1])
            raise RateLimitedError(after=0.01)
        if any(item.data["n"] == 2 for item in chunk):
            raise TransientCommandError("500")

    two = RetryPolicy(max_attempts=2, backoff=(0,))
    ran = bulk(bus, judge, size=4, isolate_poison=True, retry=two, rate_limit=limit)
    batch_id = await given.batch(4, "Push")
    async with given.running():
        await eventually(lambda: database.count("execution") == 4 + 4)
    assert refused and ran.sizes.count(4) == 2
    assert counts(await given.batch_now(batch_id)) == (4, 3, 0, 0, 1)
    database.check_invariants()


@pytest.mark.parametrize("limit", [None, RateLimit(1, per=AN_HOUR, burst=3)])
async def test_a_pause_cuts_the_search_short_and_burns_nothing(
    bus: CommandBus, given: Given, database: Database, limit: RateLimit | None
) -> None:
    def judge(chunk: Chunk, ctx: ChunkContext) -> None:
        if limit is None and len(ran.calls) == 3:
            raise RateLimitedError(after=3600)
        raise TransientCommandError("500")

    ran = bulk(bus, judge, size=4, isolate_poison=True, rate_limit=limit)
    await given.batch(4, "Push")
    async with given.running():
        await eventually(lambda: len(ran.calls) == 3)
        await bus.domains.pause(DOMAIN)
        await eventually(lambda: database.count("lease") == 0)
    assert len(ran.calls) == 3
    assert database.count("execution") == 4
    assert database.rows("SELECT reason, sum(hi - lo + 1)::int FROM busload.scheduled GROUP BY 1") == [
        ("RATE_LIMITED", 4)
    ]
    database.check_invariants()


@pytest.mark.parametrize("limit", [None, RateLimit(1000)])
async def test_a_pause_is_heeded_between_two_parts_of_the_search(
    bus: CommandBus, given: Given, database: Database, limit: RateLimit | None
) -> None:
    calls: list[int] = []

    @bus.bulk_handler(DOMAIN, "Push", size=4, max_wait=AN_HOUR, retry=AT_ONCE, isolate_poison=True, rate_limit=limit)
    async def handle(chunk: Chunk, ctx: ChunkContext) -> None:
        calls.append(len(chunk))
        if len(calls) == 3:
            await bus.domains.pause(DOMAIN)
            await eventually(lambda: worker._run is not None and DOMAIN in worker._run._pauses.paused)
            raise RateLimitedError(after=0)
        raise TransientCommandError("500")

    await given.batch(4, "Push")
    async with given.running() as worker:
        await eventually(lambda: len(calls) == 3 and database.count("lease") == 0)
    assert len(calls) == 3
    assert database.count("execution") == 4
    database.check_invariants()


async def test_where_the_business_says_no_to_all_the_one_it_means_is_found_at_once(
    bus: CommandBus, given: Given, database: Database
) -> None:
    def judge(chunk: Chunk, ctx: ChunkContext) -> None:
        if any(item.data["n"] == 5 for item in chunk):
            raise BusinessRuleError("no")

    bulk(bus, judge, size=8, isolate_poison=True)
    batch_id = await given.batch(8, "Push")
    await given.drained()
    assert counts(await given.batch_now(batch_id)) == (8, 7, 1, 0, 0)
    database.check_invariants()


async def test_a_suspect_is_not_mixed_with_others_and_waits_for_nobody(
    bus: CommandBus, given: Given, database: Database
) -> None:
    ran = bulk(bus, size=100)
    await given.batch(2, "Push")
    database.rows("UPDATE busload.queue SET crashes = 1")
    async with given.running():
        await eventually(lambda: ran.sizes == [2])
        await given.sent("Push", {"n": 9})
        await eventually(lambda: database.count("lease") == 1)
        assert ran.sizes == [2]
    database.check_invariants()


async def find_later(command: Command) -> object: ...


# -- counters, metrics, input -----------------------------------------------------------------------------------------


async def test_a_worker_says_how_many_calls_it_made_for_how_many_items(bus: CommandBus, given: Given) -> None:
    bulk(bus, size=10)
    await given.batch(25, "Push")
    worker = given.worker()
    await worker.drain()
    assert (worker.stats.bulk_calls, worker.stats.bulk_items, worker.stats.completed) == (3, 25, 25)
    assert "busload_worker_bulk_calls_total" in worker.metrics()
    assert 'busload_worker_bulk_items_total{worker="' in worker.metrics()


async def test_counters_are_exact_for_many_chunks_in_many_batches_by_two_workers(
    bus: CommandBus, given: Given, database: Database
) -> None:
    def judge(chunk: Chunk, ctx: ChunkContext) -> None:
        for item in chunk:
            match item.data["n"] % 10:
                case 7:
                    chunk.fail(item, BusinessRuleError("no"))
                case 8:
                    chunk.fail(item, PermanentCommandError("bad"))
                case 9 if item.command is not None and item.data["n"] not in seen:
                    seen.add(item.data["n"])
                    chunk.fail(item, "again")
                case _:
                    chunk.succeed(item, item.data["n"])

    seen: set[int] = set()
    bulk(bus, judge, size=33, max_wait=0.05, retry=RetryPolicy(max_attempts=5, backoff=(0,)))
    batches = [await given.batch(200, "Push") for _ in range(5)]
    async with given.running(concurrency=3), given.running(concurrency=3):
        await eventually(lambda: database.value("SELECT count(*) FROM busload.batch WHERE stalled_at IS NULL") == 0)
    for batch_id in batches:
        assert counts(await given.batch_now(batch_id)) == (200, 160, 20, 0, 20)
    database.check_invariants()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"size": 0}, "size"),
        ({"size": True}, "size"),
        ({"size": 1.5}, "size"),
        ({"size": None}, "size"),
        ({"size": 10**6}, "size"),
        ({"max_bytes": 0}, "max_bytes"),
        ({"max_bytes": "1 MB"}, "max_bytes"),
        ({"max_wait": -1}, "max_wait"),
        ({"max_wait": "2 s"}, "max_wait"),
        ({"max_wait": float("nan")}, "max_wait"),
        ({"by": "tenant"}, "by must be a function"),
        ({"by": find_later}, "by must be a function"),
        ({"isolate_poison": 1}, "isolate_poison"),
        ({"timeout": 0}, "timeout"),
        ({"retry": 3}, "retry"),
        ({"rate_limit": 5}, "rate_limit"),
    ],
)
async def test_wrong_options_of_a_bulk_handler_are_refused(
    bus: CommandBus, sync_bus: SyncCommandBus, options: dict[str, Any], said: str
) -> None:
    for face in (bus, sync_bus):
        with pytest.raises(ValueError, match=said):
            face.bulk_handler(DOMAIN, "Push", **options)
        assert face.handlers.domains == []


async def test_a_type_has_one_handler_bulk_or_not(bus: CommandBus) -> None:
    bulk(bus)
    with pytest.raises(InvalidOperationError, match="already handled"):
        bulk(bus)
    with pytest.raises(InvalidOperationError, match="already handled"):
        bus.handler(DOMAIN, "Push")(lambda command, ctx: None)
    with pytest.raises(InvalidCommandError, match="busload uses itself"):
        bus.bulk_handler(DOMAIN, "busload.Group")


async def test_a_verdict_for_a_command_of_another_chunk_is_refused(bus: CommandBus, given: Given) -> None:
    kept: list[Any] = []

    def judge(chunk: Chunk, ctx: ChunkContext) -> None:
        kept.append(chunk[0])
        if len(kept) == 2:
            with pytest.raises(InvalidOperationError, match="There is no item"):
                chunk.succeed(kept[0])

    bulk(bus, judge, size=1)
    await given.batch(2, "Push")
    before = time.monotonic()
    assert await given.drained(concurrency=1) == 2 and time.monotonic() > before
    assert len(kept) == 2
