"""One bus over three databases on three servers: where calls go, what is refused, and what is told of all together."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast
from uuid import uuid4

import psycopg
import pytest

from busload import (
    BatchCommand,
    Command,
    CommandBus,
    CommandMetadata,
    HandlerContext,
    InvalidCommandError,
    PermanentCommandError,
    Settings,
    Stage,
    SyncCommandBus,
    SyncTaskTracker,
    TaskTracker,
    Worker,
)
from busload.commands.listing import CommandPage
from busload.errors import DatabaseUnusableError, InvalidOperationError, ScheduleNotFoundError
from busload.shards import ShardedBus, SyncShardedBus
from tests.given import Database
from tests.shards.conftest import Three

DOMAINS = ("payments", "orders", "crm")
SHARED = {
    *("around_sends", "bulk_handler", "command", "data_types", "dsn", "handler", "lifespan", "middleware"),
    *("on_failure", "on_shutdown", "on_startup", "planner", "pool", "register", "send_middleware"),
}
"""What a bus over several databases has from a plain one: it asks no database, or leads to `bus.database`."""


def _public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_") and not name.isupper()}


@pytest.mark.parametrize(("face", "plain"), [(ShardedBus, CommandBus), (SyncShardedBus, SyncCommandBus)])
def test_every_method_of_a_bus_says_what_it_does_over_several_databases(face: type, plain: type) -> None:
    """A method that is not overridden would ask the database of a bus that has none."""
    assert _public(plain) - _public(face) == set()
    assert {name for name in _public(plain) if getattr(face, name) is getattr(plain, name)} - {"database"} == SHARED
    bus = face({"*": "postgresql://one/db"})
    parts = [part for part in vars(bus).values() if type(part).__name__.startswith("Sharded")]
    assert len(parts) == 10
    for part in parts:
        whole = type(part).__mro__[1]
        assert {name for name in _public(whole) if getattr(type(part), name) is getattr(whole, name)} == set(), part


async def _create(bus: CommandBus, size: int = 3) -> dict[str, Any]:
    return {
        domain: await bus.create_batch(domain, [BatchCommand("Do", data={"n": n}) for n in range(size)], name=domain)
        for domain in DOMAINS
    }


async def test_each_command_is_in_the_database_of_its_domain_and_in_no_other(sharded: CommandBus, three: Three) -> None:
    for domain, size in (("payments", 1), ("orders", 2), ("crm", 3)):
        for _ in range(size):
            await sharded.send(domain, "Do")
    for dsn, domain, size in ((three.payments, "payments", 1), (three.orders, "orders", 2), (three.rest, "crm", 3)):
        with Database(dsn) as database:
            assert database.rows("SELECT domain, count(*) FROM busload.command GROUP BY domain") == [(domain, size)]


def test_the_sync_face_does_the_same(three: Three, settings: Settings) -> None:
    with SyncCommandBus(three.mapping, settings=settings) as bus:
        sent = bus.send("crm", "Do", {"n": 1})
        batch_id = bus.create_batch("orders", [BatchCommand("Do")])
        assert [one.domain for one in bus.list_commands()] == ["orders", "crm"]
        assert bus.get_batch(None, batch_id) == bus.get_batch("orders", batch_id)
        assert bus.get_command("crm", sent.command_id) is not None
        assert bus.health().state is not None
    with Database(three.rest) as database:
        assert database.value("SELECT count(*) FROM busload.command") == 1


REFUSED: dict[str, Callable[[CommandBus], Any]] = {
    "send_many": lambda bus: bus.send_many("payments", [BatchCommand("Do"), BatchCommand("Do", domain="orders")]),
    "create_batch": lambda bus: bus.create_batch("payments", [BatchCommand("Do", domain="crm")]),
    "reply_to": lambda bus: bus.send("payments", "Do", reply_to="orders"),
    "on_complete": lambda bus: bus.create_batch(
        "payments", [BatchCommand("Do")], on_complete=BatchCommand("Done", reply_to="orders")
    ),
    "jobs.create": lambda bus: bus.jobs.create("payments", [Stage("one", [BatchCommand("Do", domain="orders")])]),
    "shard.send": lambda bus: bus.shard_of("payments").send("orders", "Do"),
    "shard.get_batch": lambda bus: bus.shard_of("payments").get_batch("orders", uuid4()),
}


@pytest.mark.parametrize("call", REFUSED)
async def test_what_would_need_two_databases_is_refused_and_nothing_is_written(
    sharded: CommandBus, three: Three, call: str
) -> None:
    with pytest.raises(InvalidCommandError, match="which lives in another database: test_") as raised:
        await REFUSED[call](sharded)
    assert raised.value.problems[0].code == "OTHER_DATABASE"
    for dsn in (three.payments, three.orders, three.rest):
        with Database(dsn) as database:
            assert database.value("SELECT count(*) FROM busload.command") == 0


async def test_commands_of_domains_of_the_same_database_go_together(three: Three, settings: Settings) -> None:
    async with CommandBus({"payments": three.payments, "refunds": three.payments, "*": three.orders}) as bus:
        sent = await bus.send_many("payments", [BatchCommand("Do"), BatchCommand("Do", domain="refunds")])
        assert len(sent) == 2


async def test_an_open_batch_is_filled_and_watched_where_it_lives(sharded: CommandBus, three: Three) -> None:
    async with sharded.open_batch("orders", name="open") as batch:
        await batch.add("Do", {"n": 1})
        with pytest.raises(InvalidCommandError, match="another database"):
            await batch.add("Do", {"n": 2}, domain="crm")
    [seen] = [seen async for seen in _first(sharded, "orders", batch.batch_id)]
    assert seen.total_count == 1
    assert await sharded.seal_batch("orders", batch.batch_id) is False


async def _first(bus: CommandBus, domain: str, batch_id: Any) -> Any:
    async for seen in bus.watch_batch(domain, batch_id):
        yield seen
        return


async def test_batches_of_all_databases_are_listed_newest_first_page_by_page(sharded: CommandBus) -> None:
    created = [(await _create(sharded, 1))[domain] for _ in range(3) for domain in DOMAINS]
    listed = [one.batch_id for one in await sharded.list_batches(None)]
    assert set(created) <= set(listed)
    times = [one.created_at for one in await sharded.list_batches(None)]
    assert times == sorted(times, reverse=True)
    pages, after = [], None
    while page := await sharded.list_batches(None, limit=2, after=after):
        pages += [one.batch_id for one in page]
        after = page[-1].batch_id
    assert pages == listed
    assert [one.batch_id for one in await sharded.list_batches(None, limit=3, offset=2)] == listed[2:5]
    assert {one.domain for one in await sharded.list_batches("crm")} == {"crm"}


async def test_commands_of_all_databases_are_searched_in_one_order_without_loss(sharded: CommandBus) -> None:
    for _ in range(4):
        for domain in DOMAINS:
            await sharded.send(domain, "Do")
    await sharded.send("crm", "Other")
    everything = list(await sharded.list_commands(limit=50))
    assert [one.created_at for one in everything] == sorted((one.created_at for one in everything), reverse=True)
    assert len(everything) == 13
    found, page = list[CommandMetadata](), CommandPage((), "")
    while page.next is not None:
        page = await sharded.list_commands(limit=3, after=page.next or None)
        found += page.commands
    assert found == everything
    assert [one.command_type for one in await sharded.list_commands(command_type="Other")] == ["Other"]
    for wrong in ("1", "x~y~z", "1~2~3~4"):
        with pytest.raises(InvalidCommandError, match="the `next` of the page before"):
            await sharded.list_commands(after=wrong)


async def test_what_is_told_of_all_databases_adds_up(sharded: CommandBus) -> None:
    await _create(sharded)

    @sharded.handler("crm", "Fail")
    async def fail(command: Command, ctx: HandlerContext) -> None:
        raise PermanentCommandError("no")

    for domain in ("payments", "crm"):
        sharded.handlers.register(domain, "Fails")(fail)
        await sharded.send(domain, "Fails", task_key="task")
    worker = Worker(sharded)
    assert await worker.drain() == 2
    assert await sharded.troubleshooting.count() == 2
    waiting = await sharded.troubleshooting.list(None)
    assert {one.domain for one in waiting} == {"crm", "payments"}
    assert waiting == sorted(waiting, key=lambda one: one.since, reverse=True)
    assert await sharded.troubleshooting.list(None, limit=1, offset=1) == waiting[1:]
    assert {one.domain: one.count for one in await sharded.troubleshooting.domains()} == {"crm": 1, "payments": 1}
    [trouble] = [one for one in waiting if one.domain == "crm"]
    [found] = await sharded.troubleshooting.find(trouble.command_id)
    assert found.domain == "crm"
    await sharded.troubleshooting.cancel("crm", trouble.command_id, reason="enough", operator="ada")
    assert await sharded.troubleshooting.count() == 1
    assert [one.type for one in (await sharded.audit.list()).actions] == ["OPERATOR_CANCELED"]
    assert {one.queue for one in await sharded.trace("task")} == {"payments", "crm"}

    overview = await sharded.overview()
    assert {one.domain for one in overview.domains} == set(DOMAINS)
    assert overview.ready + overview.scheduled == 9
    assert overview.in_troubleshooting == 1
    assert [one.domain for one in await sharded.domains.list()] == ["crm", "orders", "payments"]
    points = await sharded.statistics.series(last=timedelta(minutes=5))
    assert len({point.at for point in points}) == len(points) >= 5
    retention = await sharded.retention()
    assert retention.last is None
    pruned = await sharded.prune(timedelta(microseconds=1))
    assert pruned.commands == 1  # the canceled one
    metrics = str(await sharded.metrics())
    assert metrics.count('busload_commands{domain="orders",place="ready"') == 1
    assert metrics.count('database="test_') > 10


async def test_pauses_are_of_the_database_of_their_domain(sharded: CommandBus) -> None:
    assert await sharded.domains.pause("orders", reason="stock-taking", operator="ada") is True
    assert [one.domain for one in await sharded.domains.pauses()] == ["orders"]
    assert [one.domain for one in await sharded.domains.history()] == ["orders"]
    assert await sharded.shard_of("orders").domains.pauses() == await sharded.domains.pauses()
    assert await sharded.domains.resume("orders") is True


async def test_jobs_live_where_their_domain_does(sharded: CommandBus) -> None:
    job_ids = [await sharded.jobs.create(domain, [Stage("one", [BatchCommand("Do")])]) for domain in DOMAINS]
    listed = [one.job_id for one in await sharded.jobs.list(None)]
    assert sorted(listed) == sorted(job_ids)
    job = await sharded.jobs.get(None, job_ids[2])
    assert job is not None
    assert job.domain == "crm"
    assert [one.job_id for one in await sharded.jobs.list(None, after=listed[0])] == listed[1:]
    assert await sharded.jobs.cancel("crm", job_ids[2], reason="no") == 1


async def test_schedules_and_buffers_are_declared_in_the_database_of_their_domain(sharded: CommandBus) -> None:
    sharded.schedule("nightly", every=timedelta(hours=1), command=BatchCommand("Do", domain="orders"))
    sharded.schedule("hourly", every=timedelta(hours=1), domain="crm", command=BatchCommand("Do"))
    with pytest.raises(InvalidOperationError, match="was declared before"):
        sharded.schedule("nightly", every=timedelta(hours=1), domain="crm", command=BatchCommand("Do"))
    assert sorted(await sharded.schedules.changes()) == ["hourly", "nightly"]
    assert sorted(await sharded.schedules.sync()) == ["hourly", "nightly"]
    assert [one.name for one in await sharded.schedules.list()] == ["hourly", "nightly"]
    assert [one.name for one in await sharded.shard_of("orders").schedules.list()] == ["nightly"]
    command_id = await sharded.schedules.trigger("nightly", operator="ada")
    assert await sharded.get_command("orders", command_id) is not None
    assert await sharded.schedules.pause("hourly") is True
    assert [one.schedule for one in await sharded.schedules.history()] == ["nightly"]
    assert [one.schedule for one in await sharded.schedules.history("nightly")] == ["nightly"]
    assert await sharded.schedules.history("hourly") == []
    with pytest.raises(ScheduleNotFoundError):
        await sharded.schedules.history("weekly")
    with pytest.raises(ScheduleNotFoundError):
        await sharded.schedules.remove("weekly")
    events = sharded.buffer("events", size=10)
    await events.add({"n": 1})
    status = await sharded.buffers.get("events")
    assert status is not None
    assert [one.name for one in await sharded.shard_of("events").buffers.overview()] == ["events"]
    assert [one.name for one in await sharded.buffers.overview()] == ["events"]
    assert await sharded.buffers.flush("events") == 1


async def test_a_transaction_of_the_caller_joins_the_database_of_the_domain(sharded: CommandBus, three: Three) -> None:
    async with await psycopg.AsyncConnection.connect(three.orders) as conn:
        sent = await sharded.send("orders", "Do", conn=conn)
        await conn.rollback()
    assert await sharded.get_command("orders", sent.command_id) is None
    async with await psycopg.AsyncConnection.connect(three.orders) as conn:
        sent = await sharded.send("orders", "Do", conn=conn)
    assert await sharded.get_command("orders", sent.command_id) is not None
    with pytest.raises(InvalidOperationError, match="'migrate\\(conn=\\)' needs one of them"):
        await sharded.migrate(conn=conn)


async def test_migrate_brings_every_database_up(server: Any, second_server: Any) -> None:
    with server.database(migrated=False) as one, second_server.database(migrated=False) as two:
        async with CommandBus({"payments": one, "*": two}) as bus:
            done = await bus.migrate()
            assert len(done) % 2 == 0
            assert done[: len(done) // 2] == done[len(done) // 2 :]
            assert await bus.migrate() == []
            await bus.send("payments", "Do")
            await bus.send("crm", "Do")


async def test_two_names_of_one_database_are_refused_when_the_bus_opens(three: Three) -> None:
    other = three.payments.replace("?host=", "?host=/..", 1) if "?host=/" in three.payments else None
    assert other is not None, "the servers of the tests listen on sockets"
    bus = CommandBus({"payments": three.payments, "*": other.replace("/..", "/../")})
    with pytest.raises(DatabaseUnusableError, match="are one database"):
        await bus.open()
    assert not bus.database.is_open


async def test_a_tracker_and_the_one_database_are_asked_of_a_shard(sharded: CommandBus) -> None:
    with pytest.raises(InvalidOperationError, match=r"bus\.shard_of\(domain\)"):
        _ = sharded.dsn
    with pytest.raises(InvalidOperationError, match="'connection' needs one of them"):
        sharded.pool.connection()
    with pytest.raises(ValueError, match="pass the bus of one of them"):
        TaskTracker(sharded)
    with pytest.raises(ValueError, match="pass the bus of one of them"):
        SyncTaskTracker(cast(Any, sharded))
    async with TaskTracker(sharded.shard_of("crm")) as followed:
        assert await followed.enqueue("mail", queue="crm") is not None
