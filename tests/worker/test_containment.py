"""What a handler or its error does affects its own command only."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

import psycopg
import pytest

from busload import (
    BatchCommand,
    Command,
    CommandBus,
    DuplicateCommandError,
    HandlerContext,
    PermanentCommandError,
    RateLimit,
    RetryPolicy,
    Worker,
)
from busload.buffers import Buffer
from busload.commands import claim
from busload.commands.ids import new_id
from busload.commands.payload import UndecodableError
from busload.errors import InvalidOperationError, SupersededError
from busload.limits.limiter import PostponedError
from busload.postgres.pool import engine_pool
from busload.worker.containment import references_to
from tests.given import DOMAIN, Database, Given, eventually


class Unspeakable(PermanentCommandError):
    """An error that cannot even be looked at."""

    @property
    def code(self) -> str:
        raise RuntimeError("no code for you")

    @code.setter
    def code(self, value: object) -> None: ...


async def test_an_error_that_cannot_be_described_costs_no_slot(bus: CommandBus, given: Given) -> None:
    async def refuse(command: Command, ctx: HandlerContext) -> None:
        raise Unspeakable("closed")

    given.handler("Refuse", refuse)
    seen = given.handler()
    for _ in range(3):
        await given.sent("Refuse")
    await given.sent()
    await given.drained(concurrency=2)
    assert len(seen) == 1
    items = await bus.troubleshooting.list(DOMAIN)
    assert [(item.reason, item.last_error_code, item.last_error_message) for item in items] == [
        ("PERMANENT", None, "closed")
    ] * 3


def test_a_retry_policy_of_another_kind_is_refused_when_it_is_registered(bus: CommandBus) -> None:
    with pytest.raises(ValueError, match="RetryPolicy"):
        bus.handler(DOMAIN, "Debit", retry=5)  # type: ignore[arg-type]


def test_one_domain_given_as_text_is_not_taken_for_its_letters(bus: CommandBus) -> None:
    with pytest.raises(ValueError, match="list of names"):
        Worker(bus, domains="payments")


async def test_a_handler_that_ends_its_transaction_itself_does_not_complete(bus: CommandBus, given: Given) -> None:
    async def commit(command: Command, ctx: HandlerContext) -> None:
        async with ctx.transaction() as conn:
            await conn.commit()

    given.handler("Commit", commit)
    command_id = await given.sent("Commit", max_attempts=1)
    await given.drained()
    found = await given.command_now(command_id)
    assert found.status == "IN_TROUBLESHOOTING_QUEUE"
    assert "commit() on the connection of ctx.transaction()" in (found.last_error_message or "")


async def test_an_id_twice_in_a_list_is_not_said_to_exist(bus: CommandBus, database: Database) -> None:
    command_id = new_id()
    with pytest.raises(DuplicateCommandError, match="more than once"):
        await bus.send_many(DOMAIN, [BatchCommand("Debit", command_id), BatchCommand("Debit", command_id)])
    assert database.count("command") == 0


def test_a_bus_that_was_opened_before_a_fork_is_refused_in_the_child(dsn: str) -> None:
    """Two processes on one connection would read each other's answers."""
    bus = CommandBus(dsn)
    asyncio.run(bus.open(wait=None))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover - runs in the child
        try:
            bus.pool  # noqa: B018
        except InvalidOperationError:
            os.write(writing, b"refused")
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as answer:
        assert answer.read() == b"refused"


async def test_the_statements_that_look_for_a_pooler_are_not_prepared(dsn: str) -> None:
    """PgBouncer before 1.21: what one client prepares stays on a server connection that another client gets."""
    pool = engine_pool(dsn, 1)
    async with pool.connection() as conn:
        cursor = psycopg.AsyncClientCursor(conn)
        await cursor.execute("SELECT count(*) FROM pg_prepared_statements")
        assert await cursor.fetchone() == (0,)
        await cursor.execute("SHOW jit")
        assert await cursor.fetchone() == ("off",)
    await pool.close()


# -- a context of its own ----------------------------------------------------------------------------------------------

TENANT: ContextVar[str | None] = ContextVar("tenant", default=None)
KINDS = ["at once", "waits", "limited", "def", "bulk", "bulk def", "buffer"]


def served(bus: CommandBus, kind: str, function: Callable[[], Any], **options: Any) -> str:
    """Register a handler of this kind that calls a function; returns its domain."""

    async def at_once(subject: Any, ctx: Any) -> None:
        function()

    async def waits(subject: Any, ctx: Any) -> None:
        await asyncio.sleep(0)
        function()
        await asyncio.sleep(0)

    def threaded(subject: Any, ctx: Any) -> None:
        function()

    if kind == "buffer":
        events(bus).handler(**options)(at_once)
        return "events"
    if kind.startswith("bulk"):
        bus.bulk_handler(DOMAIN, "Debit", size=10, max_wait=0.01, **options)(threaded if "def" in kind else at_once)
        return DOMAIN
    if kind == "limited":
        options["timeout"] = 60
    bus.handler(DOMAIN, "Debit", **options)({"def": threaded, "waits": waits}.get(kind, at_once))
    return DOMAIN


async def filled(bus: CommandBus, domain: str, count: int) -> None:
    if domain == DOMAIN:
        await bus.create_batch(DOMAIN, [BatchCommand("Debit") for _ in range(count)])
    else:
        await events(bus).add_many([{"n": n} for n in range(count)])


def events(bus: CommandBus) -> Buffer:
    return bus.buffer("events", size=10, max_age=timedelta(milliseconds=1))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_context_variable_that_a_handler_sets_is_not_seen_by_the_next(
    bus: CommandBus, given: Given, kind: str
) -> None:
    seen: list[str | None] = []

    def take_over() -> None:
        seen.append(TENANT.get())
        TENANT.set("somebody")

    domain = served(bus, kind, take_over)
    await filled(bus, domain, 200)
    await given.drained(domains=[domain], concurrency=5)
    assert len(seen) >= 20 and set(seen) == {None}
    assert TENANT.get() is None


class Taking(partial[Any]):
    """An async function that does something as soon as it is called, before anybody awaits it."""

    def __call__(self, *args: Any) -> Any:
        self.keywords["first"]()
        return self.func(*args)


def taking(function: Callable[..., Any], first: Callable[[], None]) -> Callable[..., Any]:
    """The same as a plain function that is marked to return a coroutine."""

    def call(given: Any, ctx: Any) -> Any:
        first()
        return function(given, ctx)

    mark: Callable[..., Callable[..., Any]] = inspect.markcoroutinefunction  # type: ignore[attr-defined] # since 3.12
    return mark(call)


@pytest.mark.parametrize("form", ["partial", "marked"] if sys.version_info >= (3, 12) else ["partial"])
@pytest.mark.parametrize("kind", ["plain", "limited", "bulk", "buffer"])
async def test_what_a_handler_does_before_it_is_awaited_is_contained(
    bus: CommandBus, given: Given, kind: str, form: str
) -> None:
    seen: list[str | None] = []

    def take_over() -> None:
        seen.append(TENANT.get())
        TENANT.set("somebody")

    async def work(work: Any, ctx: Any) -> None:
        seen.append(TENANT.get())

    function = Taking(work, first=take_over) if form == "partial" else taking(work, take_over)
    domain = DOMAIN
    if kind == "buffer":
        events(bus).handler()(function)
        domain = "events"
    elif kind == "bulk":
        bus.bulk_handler(DOMAIN, "Debit", size=10, max_wait=0.01)(function)
    else:
        bus.handler(DOMAIN, "Debit", timeout=60 if kind == "limited" else None)(function)
    await filled(bus, domain, 30)
    await given.drained(domains=[domain], concurrency=1)
    assert len(seen) >= 6 and seen == [None, "somebody"] * (len(seen) // 2)
    assert TENANT.get() is None


@pytest.mark.parametrize("kind", KINDS)
async def test_a_handler_sees_the_context_that_its_worker_runs_in(bus: CommandBus, given: Given, kind: str) -> None:
    seen: list[str | None] = []
    domain = served(bus, kind, lambda: seen.append(TENANT.get()))
    await filled(bus, domain, 3)
    token = TENANT.set("the worker's")
    await given.drained(domains=[domain])
    TENANT.reset(token)
    assert set(seen) == {"the worker's"}


async def test_a_handler_has_one_context_from_beginning_to_end(bus: CommandBus, given: Given) -> None:
    """Also what it starts inherits it, and what it sets can be reset after it has waited."""
    found: list[tuple[str | None, ...]] = []

    async def child() -> str | None:
        await asyncio.sleep(0)
        return TENANT.get()

    async def rows() -> AsyncIterator[str | None]:
        for _ in range(2):
            await asyncio.sleep(0)
            yield TENANT.get()

    async def handle(command: Command, ctx: HandlerContext) -> None:
        mine = str(command.command_id)
        token = TENANT.set(mine)
        await asyncio.sleep(0)
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            task = group.create_task(child())
        loop = asyncio.get_running_loop()
        told = loop.create_future()
        loop.call_soon(lambda: told.set_result(TENANT.get()))
        saw = [TENANT.get(), task.result(), await asyncio.to_thread(TENANT.get), await told]
        saw += [row async for row in rows()]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await asyncio.Event().wait()
        found.append((mine, *saw, TENANT.get()))
        TENANT.reset(token)
        assert TENANT.get() is None

    given.handler("Debit", handle)
    await given.batch(commands=20)
    assert await given.drained(concurrency=7) == 20
    assert given.database.count("troubleshooting") == 0
    assert [len(set(saw)) for saw in found] == [1] * 20, "each has seen its own, everywhere"


# -- a cancellation of its own -----------------------------------------------------------------------------------------


class Vandal:
    """Handlers that do something to their own task. `pending` is what will still happen to it."""

    def __init__(self) -> None:
        self.pending = 0

    def cancel_soon(self, after: float = 0.002) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.pending += 1

        def fire() -> None:
            self.pending -= 1
            task.cancel()

        asyncio.get_running_loop().call_later(after, fire)

    async def cancels_and_returns(self, command: Command, ctx: HandlerContext) -> None:
        current().cancel()

    async def cancels_and_takes_it_back(self, command: Command, ctx: HandlerContext) -> None:
        current().cancel()
        current().uncancel()

    async def waits_cancels_and_returns(self, command: Command, ctx: HandlerContext) -> None:
        await asyncio.sleep(0)
        current().cancel()

    async def swallows(self, command: Command, ctx: HandlerContext) -> None:
        current().cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1)

    async def leaves_a_timer(self, command: Command, ctx: HandlerContext) -> None:
        self.cancel_soon()

    async def waits_and_leaves_a_timer(self, command: Command, ctx: HandlerContext) -> None:
        self.cancel_soon()
        await asyncio.sleep(0)

    async def leaves_a_child(self, command: Command, ctx: HandlerContext) -> None:
        self.pending += 1

        async def child(parent: asyncio.Task[Any]) -> None:
            await asyncio.sleep(0.002)
            self.pending -= 1
            parent.cancel()

        self.kept = asyncio.create_task(child(current()))

    async def never_leaves_a_timeout(self, command: Command, ctx: HandlerContext) -> None:
        await asyncio.timeout(0.001).__aenter__()


VANDALS = [name for name in vars(Vandal) if name not in ("cancel_soon", "pending") and not name.startswith("_")]


def current() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


@pytest.mark.parametrize("what", VANDALS)
@pytest.mark.parametrize("kind", ["plain", "limited", "bulk"])
async def test_a_cancellation_that_a_handler_leaves_behind_hits_nobody_else(
    bus: CommandBus, given: Given, database: Database, what: str, kind: str
) -> None:
    """Innocents run in the same slots before, between and after it, and wait for what was left behind."""
    vandal, slots = Vandal(), 5
    harm = getattr(vandal, what)
    met: set[UUID] = set()

    async def innocent(command: Command, ctx: HandlerContext) -> int:
        async with asyncio.timeout(60):
            await asyncio.sleep(0)
            while vandal.pending:
                await asyncio.sleep(0.001)
        return current().cancelling()

    async def meet(command: Command, ctx: HandlerContext) -> None:
        """Returns when all slots have one of these, so there must be as many as ever."""
        met.add(command.command_id)
        async with asyncio.timeout(60):
            while len(met) < slots:
                await asyncio.sleep(0.001)

    if kind == "bulk":
        bus.bulk_handler(DOMAIN, "Harm", size=1, max_wait=0, retry=RetryPolicy(max_attempts=1))(harm)
    else:
        options: dict[str, Any] = {"timeout": 60} if kind == "limited" else {}
        bus.handler(DOMAIN, "Harm", retry=RetryPolicy(max_attempts=1), **options)(harm)
    bus.handler(DOMAIN, "Help", retry=RetryPolicy(max_attempts=1))(innocent)
    bus.handler(DOMAIN, "Meet", retry=RetryPolicy(max_attempts=1))(meet)
    for _ in range(3):
        mixed = [BatchCommand(kind) for _ in range(20) for kind in ("Harm", "Help")]
        await bus.create_batch(DOMAIN, mixed)
    await given.drained(concurrency=slots)
    await bus.create_batch(DOMAIN, [BatchCommand("Meet") for _ in range(slots)])
    await given.drained(concurrency=slots)
    failed = await bus.troubleshooting.list(DOMAIN)
    assert {item.command_type for item in failed} <= {"Harm"}, failed
    helped = "SELECT DISTINCT details::text FROM busload.execution JOIN busload.command ON id = command"
    assert database.rows(helped + " WHERE command_type = 'Help'") == [("0",)], "each finds its task as it should be"
    assert len(met) == slots
    database.check_invariants()


async def test_a_worker_keeps_its_slots_whatever_handlers_do_to_their_tasks(bus: CommandBus, given: Given) -> None:
    """The slots are those of one run, and the last commands need all of them at once."""
    vandal, slots = Vandal(), 20
    harms = [getattr(vandal, what) for what in VANDALS]
    met: set[UUID] = set()

    async def harm(command: Command, ctx: HandlerContext) -> None:
        await harms[command.data["n"] % len(harms)](command, ctx)

    async def meet(command: Command, ctx: HandlerContext) -> None:
        met.add(command.command_id)
        while len(met) < slots:
            await asyncio.sleep(0.001)

    bus.handler(DOMAIN, "Harm", retry=RetryPolicy(max_attempts=1))(harm)
    bus.handler(DOMAIN, "Meet")(meet)
    async with given.running(concurrency=slots):
        batch_id = await given.batch(commands=400, command_type="Harm")
        await eventually(lambda: given.database.count("execution") == 400)
        await given.batch(commands=slots, command_type="Meet")
        await eventually(lambda: len(met) == slots)
        await eventually(lambda: given.database.is_at_rest() or given.database.count("troubleshooting"))
    assert (await given.batch_now(batch_id)).total_count == 400


async def test_handlers_that_leave_nothing_behind_share_their_task(bus: CommandBus, given: Given) -> None:
    """A task for each would cost as much as all else that is done for a command."""
    tasks: set[int] = set()

    async def look(command: Command, ctx: HandlerContext) -> None:
        tasks.add(id(asyncio.current_task()))
        async with asyncio.timeout(60):
            await asyncio.sleep(0 if command.data["n"] % 2 else 0.0001)

    bus.handler(DOMAIN, "Debit")(look)
    await given.batch(commands=100)
    assert await given.drained(concurrency=2) == 100
    assert len(tasks) <= 4


async def test_what_a_task_has_waited_for_does_not_change_the_references_to_it() -> None:
    """Otherwise a reference that a handler keeps could be hidden by one that is gone."""
    counts: dict[str, int] = {}

    async def wait() -> None:
        task, loop = current(), asyncio.get_running_loop()

        async def fail() -> None:
            await asyncio.sleep(0)
            raise ValueError

        async def later(function: Callable[[], object]) -> None:
            await asyncio.sleep(0.001)
            function()

        counts["the first step"] = references_to(task)
        await asyncio.sleep(0)
        counts["a turn"] = references_to(task)
        await asyncio.sleep(0.001)
        counts["a timer"] = references_to(task)
        await asyncio.create_task(asyncio.sleep(0.001))
        counts["a task"] = references_to(task)
        with contextlib.suppress(ValueError):
            await asyncio.create_task(fail())
        counts["an error"] = references_to(task)
        await asyncio.to_thread(int)
        counts["a thread"] = references_to(task)
        done = loop.create_future()
        done.set_result(None)
        await done
        counts["nothing"] = references_to(task)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.001):
                await asyncio.Event().wait()
        counts["a timeout"] = references_to(task)
        kept = later(task.cancel)
        assert references_to(task) > counts["the first step"], "somebody has a hand on it"
        kept.close()

    await asyncio.Task(wait())
    assert len(counts) == 8 and len(set(counts.values())) == 1, counts


# -- an outcome of its own ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["SupersededError", "UndecodableError", "PostponedError"])
async def test_what_only_we_may_say_is_the_failure_of_a_handler_that_says_it(
    bus: CommandBus, given: Given, database: Database, kind: str, name: str
) -> None:
    """Only the loss of its own lease means that an attempt is not settled."""

    def fail() -> None:
        raise {
            "SupersededError": SupersededError("of others"),
            "UndecodableError": UndecodableError("x"),
            "PostponedError": PostponedError("x", 1),
        }[name]

    domain = served(bus, kind, fail, retry=RetryPolicy(max_attempts=1))
    await filled(bus, domain, 3)
    await given.drained(domains=[domain])
    items = await bus.troubleshooting.list(domain)
    assert {(item.reason, item.last_error_type) for item in items} == {("EXHAUSTED", name)}
    assert len(items) == (1 if kind == "buffer" else 3)
    assert database.count("lease") == 0
    database.check_invariants()


async def test_superseded_that_a_limits_key_raises_is_the_failure_of_its_command(bus: CommandBus, given: Given) -> None:
    def by(command: Command) -> str:
        raise SupersededError("of another one")

    given.handler("Debit", rate_limit=RateLimit(100, by=by))
    await given.sent()
    await given.drained()
    [item] = await bus.troubleshooting.list(DOMAIN)
    assert (item.reason, item.attempts) == ("PERMANENT", 1)
    assert "raised SupersededError: of another one" in str(item.last_error_message)
    assert given.database.count("lease") == 0


async def test_a_lease_that_nobody_works_at_is_handed_back(
    given: Given, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whatever fault of ours: its worker renews it, so no other one would take it over."""
    batch_id = await given.batch(commands=30)
    taken = database.perform(claim.claim(worker=given.registered_worker(), domains=[DOMAIN], limit=30, suspects=True))
    alive = Counter(one.lease.lease_id for one in taken.leased)
    rarely = replace(given.settings, sweep_every=timedelta(hours=1))
    async with given.worker(settings=rarely)._running() as run:
        held, look = run._held, run._hand_back_deserted
        held.take(taken.leases)
        monkeypatch.setattr(run._executor, "alive", lambda: alive)
        for _ in range(3):
            await look()
        assert database.count("lease") == 1 and not taken.leases[0].lost
        alive.clear()
        await look()
        assert database.count("lease") == 1, "a command may be on its way from the line to its slot"
        await look()
        assert database.count("lease") == 0 and held.lease_ids == []
        assert taken.leases[0].lost, "what is found again later must not begin"
    given.handler()
    assert await given.drained() == 30
    assert (await given.batch_now(batch_id)).completed_count == 30
    assert database.rows("SELECT DISTINCT attempt FROM busload.execution") == [(1,)], "no attempt was burnt"
    database.check_invariants()
