"""Brokers die, forget, keep silent, repeat themselves and lie: every command has its effect once, and none is lost."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from busload import BatchCommand, CommandBus, DuplicateCommandError, SyncCommandBus
from busload.commands.load import Load
from busload.dispatch import envelope as message
from busload.dispatch.envelope import Envelope
from busload.errors import DispatchIncompleteError, InvalidOperationError, PublishError, RefusalReason
from busload.transports import Message, Transport, find_transport
from tests.brokers.nats import NatsServer
from tests.brokers.proxy import Proxy
from tests.brokers.rabbitmq import RabbitmqServer
from tests.chaos.harness import Workers, folder, seeded
from tests.chaos.nursery import STRATEGIES, bus_settings, create, new_creation
from tests.given import DOMAIN, Database, eventually

BROKERS = ["nats", "rabbitmq"]
OTHER = "salaries"
"""A domain whose commands nobody runs."""
KEY = "a secret of this test"


@dataclass
class Run:
    """Workers on a broker, a ledger in the database, and what must be in it at the end."""

    dsn: str
    database: Database
    workers: Workers
    options: dict[str, Any]

    def bus(self, url: str | None = None) -> CommandBus:
        return CommandBus(self.dsn, transport=url or self.options["transport"], settings=bus_settings(self.options))

    @property
    def queue(self) -> str:
        return f"{self.options['prefix']}.{DOMAIN}"

    def time_passes(self, by: timedelta = timedelta(minutes=2)) -> None:
        """Whoever held loads is thought dead, and whatever waits has waited longer."""
        self.database.rows("UPDATE busload.outbox SET due_at = due_at - %s, since = since - %s", by, by)
        self.database.rows("UPDATE busload.queue SET published_at = published_at - %s", by)
        self.database.rows("UPDATE busload.batch SET created_at = created_at - %s", by)
        self.database.rows("UPDATE busload.dispatch SET created_at = created_at - %s", by)

    async def each_once(
        self, promised: Collection[UUID], within: float = 60, *, held: Collection[UUID | None] = ()
    ) -> None:
        """None is lost, none had its effect twice or was so much as begun twice, and nothing is left over.

        Those that were `held` up have no effect.
        """
        await eventually(self.database.is_at_rest, within)
        assert set(self.workers.stop()) == {0}, self.workers.last_words()
        assert set(self.workers.ended.values()) == {0}, self.workers.last_words()
        expected = Counter(promised)
        found = Counter(command_id for (command_id,) in self.database.rows("SELECT command_id FROM effect"))
        assert found == expected, f"{len(expected - found)} lost, {len(found - expected)} too many"
        assert self.workers.noted("start") == expected + Counter(held)
        self.database.check_invariants()
        async with self.bus() as bus:
            await bus.recover()
        assert self.database.value("SELECT count(*) FROM busload.dispatch WHERE published_at IS NULL") == 0


@contextmanager
def run(dsn: str, database: Database, url: str, **options: Any) -> Iterator[Run]:
    database.rows("CREATE TABLE effect (command_id uuid)")
    about = {"transport": url, "prefix": f"run-{uuid4().hex[:12]}", "broker_poll": 0.5, "pause": 0.002, **options}
    with folder() as path, Workers(dsn, path, **about) as workers:
        yield Run(dsn, database, workers, about)


@pytest.fixture(params=BROKERS)
def url(request: pytest.FixtureRequest) -> str:
    """A broker that serves other tests as well, and must not be harmed."""
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found


@contextmanager
def own_broker(kind: str, home: Path) -> Iterator[NatsServer | RabbitmqServer]:
    home.mkdir(mode=0o755)
    with NatsServer(home) if kind == "nats" else RabbitmqServer(home) as server:
        yield server


def forget(home: Path) -> None:
    """What a broker does that does not sync its files."""
    shutil.rmtree(home / "jetstream", ignore_errors=True)
    shutil.rmtree(home / "data", ignore_errors=True)


def ids_of(creations: Sequence[dict[str, Any]]) -> list[UUID]:
    return [UUID(id) for creation in creations for id in creation["ids"]]


def broker_of(bus: CommandBus) -> Transport:
    assert bus.transport is not None
    return bus.transport


# -- a creator that is killed ----------------------------------------------------------------------------------------

# Write, ask which database this is, publish, mark, write down how it went, close; in checkpoints write, publish and
# mark three times.
STEPS = {"two_phase": 6, "optimistic": 6, "checkpoint": 12}


async def test_a_creator_that_is_killed_between_any_two_steps(dsn: str, database: Database, url: str) -> None:
    """With workers at it all the time; who was not told that it is done asks again"""
    with run(dsn, database, url) as chaos:
        chaos.workers.start(2)
        deaths = [(strategy, step, new_creation(strategy, 12)) for strategy in STEPS for step in range(STEPS[strategy])]
        pids = {
            pid for _, step, each in deaths for pid in chaos.workers.assist("dying creator", steps=step, creation=each)
        }
        await eventually(lambda: chaos.workers.look().keys() >= pids)
        assert {chaos.workers.ended.pop(pid) for pid in pids} == {-signal.SIGKILL}, chaos.workers.last_words()
        for strategy, step, creation in deaths:
            slices = sum(step > write for write in (0, 4, 7))
            written = 4 * slices if strategy == "checkpoint" else 12 * (step > 0)
            of_batch = "SELECT count(*) FROM busload.command WHERE batch_id = %s"
            assert database.value(of_batch, UUID(creation["batch_id"])) == written
        chaos.time_passes()
        async with chaos.bus() as bus:
            await bus.recover()
            for _, _, creation in deaths:
                await ask_again(bus, creation)
        await chaos.each_once(ids_of([creation for _, _, creation in deaths]))


async def ask_again(bus: CommandBus, creation: dict[str, Any]) -> None:
    """For the same batch; that it is there already is told, except of one in checkpoints."""
    try:
        await create(bus, creation)
    except (DuplicateCommandError, InvalidOperationError):
        if creation["strategy"] == "checkpoint":
            raise


@pytest.mark.chaos
async def test_creators_killed_at_any_moment(dsn: str, database: Database, url: str) -> None:
    """200 times, and not only between two steps"""
    chance = seeded()
    with run(dsn, database, url, size=30) as chaos:
        notes = chaos.workers.ledger.with_name("begun")
        notes.touch()
        chaos.workers.start(2)
        for _ in range(200):
            size = notes.stat().st_size
            [pid] = chaos.workers.assist("creator", notes=str(notes))
            await eventually(lambda size=size: notes.stat().st_size > size)  # type: ignore[misc]
            await asyncio.sleep(chance.uniform(0, 0.15))  # where it dies is left to chance
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda pid=pid: pid in chaos.workers.look())  # type: ignore[misc]
            assert chaos.workers.ended.pop(pid) == -signal.SIGKILL, chaos.workers.last_words()
        begun = [json.loads(line) for line in notes.read_text().splitlines()]
        chaos.time_passes()
        async with chaos.bus() as bus:
            for creation in begun:
                await ask_again(bus, creation)
        await chaos.each_once(ids_of(begun), within=300)
        print(f"{url.partition(':')[0]}: 200 kill -9 of creators during {len(begun)} batches: 0 lost, 0 duplicates")


# -- confirmations that are lost -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "racing"), [(30, ["optimistic"]), pytest.param(500, STRATEGIES, marks=pytest.mark.chaos)]
)
async def test_confirmations_that_never_come(
    dsn: str, database: Database, url: str, size: int, racing: Sequence[str]
) -> None:
    """The broker has the messages and nobody knows; they are sent again, and workers get both.

    First without workers, so that all is sent twice before any is run; then with workers, who are faster than the mark.
    """
    with run(dsn, database, url, envelope=1) as chaos:
        creations = []
        async with Proxy(url) as proxy, chaos.bus(f"{proxy.url}?timeout={size / 50}") as bus:
            for workers, strategies in ((0, STRATEGIES), (2, racing)):
                chaos.workers.start(workers)
                for strategy in strategies:
                    creations += [new_creation(strategy, 1), new_creation(strategy, size) | {"checkpoint_size": size}]
                    await create(bus, creations[-2])  # over a connection that is sound
                    proxy.swallow()
                    await create(bus, creations[-1])
                    told = await bus.get_dispatch(DOMAIN, UUID(creations[-1]["batch_id"]))
                    assert told is not None and told.error is not None and "UNREACHABLE" in told.error
                    if not workers:
                        assert told.retry_tasks == size
                if not workers:
                    assert await broker_of(bus).depth(chaos.queue) == 3 * (size + 1)
                    chaos.time_passes()
                    assert (await bus.recover()).relayed == 3 * size
        chaos.time_passes()
        await chaos.each_once(ids_of(creations))


# -- a broker that forgets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=pytest.mark.chaos)])
async def test_a_broker_that_forgets_what_it_confirmed(dsn: str, database: Database, rounds: int) -> None:
    """Killed, and its files are gone; commands that were published, and that nobody had claimed, are found.

    The first time all workers have their hands full until the broker is back: nothing but a look can find them then.
    """
    with folder() as path, own_broker("nats", path / "nats") as server:
        gate, busy = path / "gate", [BatchCommand("Wait", uuid4()) for _ in range(4)]
        options = {"concurrency": 2, "prefetch": 0, "gate": str(gate)}
        with run(dsn, database, server.url, **options) as chaos:
            creations = []
            async with chaos.bus() as bus:
                chaos.workers.start(2)
                await eventually(lambda: pulls(server) == 2)
                await bus.create_batch(DOMAIN, busy)
                await eventually(lambda: chaos.workers.noted("start").total() == len(busy))
                for number in range(rounds):
                    for strategy in STRATEGIES:
                        creations.append(new_creation(strategy, 60))
                        await create(bus, creations[-1])
                    await asyncio.to_thread(server.kill)
                    forget(path / "nats")
                    await asyncio.to_thread(server.start)
                    await eventually(lambda: pulls(server) == 2)
                    gate.touch()
                    done = len(busy) + 180 * number
                    await eventually(lambda done=done: database.count("execution") > done)  # type: ignore[misc]
            await chaos.each_once(ids_of(creations), within=120, held=[each.command_id for each in busy])


def pulls(server: NatsServer | RabbitmqServer) -> int:
    """How many workers wait for messages."""
    assert isinstance(server, NatsServer)
    told: Any = server.asked("jsz?consumers=1")
    streams = [stream for account in told.get("account_details", []) for stream in account.get("stream_detail", [])]
    return sum(consumer["num_waiting"] for stream in streams for consumer in stream.get("consumer_detail", []))


# -- long outages ----------------------------------------------------------------------------------------------------


async def test_an_outage_longer_than_anybody_waits(dsn: str, database: Database) -> None:
    """More than an hour; nothing expires, and all is published once the broker is back"""
    with folder() as path, own_broker("nats", path / "nats") as server, run(dsn, database, server.url) as chaos:
        creations = [new_creation(strategy, 50) | {"checkpoint_size": 50} for strategy in STRATEGIES]
        async with chaos.bus() as bus:
            await create(bus, creations[0])  # is known to the broker before it goes
            server.kill()
            chaos.workers.start(2)
            for creation in creations[1:]:
                await create(bus, creation)
        for rounds in (2, 3):
            chaos.time_passes(timedelta(minutes=31))
            await eventually(lambda rounds=rounds: fewest_rounds(database) >= rounds)  # type: ignore[misc]
        statuses = dict(database.rows("SELECT status, count(*) FROM busload.command_status GROUP BY 1"))
        assert statuses["PENDING_RETRY"] == 100 and database.count("troubleshooting") == 0
        assert database.value("SELECT min(now() - since) > interval '1 hour' FROM busload.outbox")
        # As after many rounds: when the broker is back, nobody waits for the end of the longest pause.
        database.rows("UPDATE busload.outbox SET rounds = 20, due_at = now() + interval '5 min', relay = NULL")
        server.start()
        await chaos.each_once(ids_of(creations))


def fewest_rounds(database: Database) -> int:
    return int(database.value("SELECT coalesce(min(rounds), 0) FROM busload.outbox"))


@pytest.mark.chaos
@pytest.mark.parametrize("kind", BROKERS)
async def test_an_outage_of_minutes(dsn: str, database: Database, kind: str) -> None:
    """Two real minutes, in which batches come all the time"""
    with folder() as path, own_broker(kind, path / kind) as server, run(dsn, database, server.url) as chaos:
        # So many that RabbitMQ has a leader for its queue, which release 3.10 loses if it dies within the first second.
        creations = [new_creation("two_phase", 100) for _ in range(30)]
        chaos.workers.start(2)
        async with chaos.bus() as bus:
            for creation in creations:
                await create(bus, creation)
            await eventually(database.is_at_rest)
            server.kill()
            end = time.monotonic() + 120
            while time.monotonic() < end:
                creations.append(new_creation(STRATEGIES[len(creations) % 3], 500) | {"checkpoint_size": 500})
                await create(bus, creations[-1])
                await asyncio.sleep(1)
        waiting = int(database.value("SELECT sum(hi - lo + 1) FROM busload.outbox"))
        began = time.monotonic()
        server.start()
        await eventually(lambda: not database.count("outbox"), 120)
        took = time.monotonic() - began
        await chaos.each_once(ids_of(creations), within=300)
        print(f"{kind}: {waiting} commands in the outbox after 120 s without it, {took:.1f} s from its start to none")


# -- repetitions and early messages ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [100, pytest.param(10_000, marks=pytest.mark.chaos)])
async def test_a_storm_of_repetitions_and_a_message_before_its_commands(
    dsn: str, database: Database, url: str, size: int
) -> None:
    """Two relays publish each load once; then every message comes a hundred times, one of them too early"""
    within = 60 + size / 20
    with run(dsn, database, url, envelope=10, broker_poll=3600, early=15) as chaos:  # the commit may be late
        chaos.workers.start(2, domains=[OTHER])
        with SyncCommandBus(dsn, transport=url, settings=bus_settings(chaos.options)) as sender:
            sent = [sender.send(DOMAIN, "Transfer").command_id for _ in range(size)]
        await eventually(lambda: not database.count("outbox"), within)
        known = all_ids(database)
        async with (
            chaos.bus() as bus,
            await psycopg.AsyncConnection.connect(dsn) as conn,
            aclosing(find_transport(url)) as broker,
        ):
            if broker.name == "nats":  # the other cannot be looked into
                assert sorted(await published(broker, chaos.queue)) == known
            chaos.workers.start(2)
            early = [BatchCommand("Transfer", uuid4()) for _ in range(10)]
            too_early = envelope(await created_unseen(bus, conn, early))
            storm = [envelope(*((id, id) for id in known[n : n + 10])) for n in range(0, size, 10)]
            await publish(broker, chaos.queue, [too_early, *storm])
            await eventually(lambda: database.count("execution") == size, within)
            await conn.commit()
            await eventually(lambda: database.count("execution") == size + 10)
            for _ in range(99):
                await publish(broker, chaos.queue, [too_early, *storm])
            await emptied(broker, chaos.queue, within)
        await chaos.each_once([*sent, *(each.command_id for each in early if each.command_id)])
        assert database.count("execution") == size + 10


async def created_unseen(
    bus: CommandBus, conn: psycopg.AsyncConnection[Any], commands: list[BatchCommand]
) -> tuple[int, int]:
    """In a transaction that stays open, and such that no relay publishes them: their ids."""
    batch_id = await bus.create_batch(DOMAIN, commands, conn=conn)
    await conn.execute("UPDATE busload.outbox SET due_at = now() + interval '1 h', relay = gen_random_uuid()")
    cursor = await conn.execute("SELECT min(id), max(id) FROM busload.command WHERE batch_id = %s", [batch_id])
    [(first, last)] = await cursor.fetchall()
    return first, last


def all_ids(database: Database) -> list[int]:
    return [id for (id,) in database.rows("SELECT id FROM busload.command ORDER BY id")]


async def published(broker: Transport, queue: str) -> list[int]:
    """The ids that messages are about, as often as they are."""
    bodies = await broker.peek(queue, limit=10**6)
    assert bodies is not None
    return [id for body in bodies for load in message.read(body).loads for id in load.ids]


def envelope(*ranges: tuple[int, int], domain: str = DOMAIN, key: str | None = None) -> bytes:
    return message.write(Envelope(domain, tuple(Load(*ends) for ends in ranges)), None if key is None else key.encode())


async def publish(broker: Transport, queue: str, bodies: Sequence[bytes]) -> None:
    """Each as a message of its own, also for a broker that drops what comes under the same id.

    A broker on a busy machine may confirm too late: what it has not confirmed is published again.
    """
    messages = [Message(queue, uuid4().hex, body) for body in bodies]
    async with asyncio.timeout(60):
        while messages:
            try:
                await broker.publish(messages)
                return
            except PublishError as error:
                if any(refused.reason is not RefusalReason.UNREACHABLE for refused in error.refused.values()):
                    raise
                messages = [messages[index] for index in error.refused]


async def emptied(broker: Transport, queue: str, within: float = 60) -> None:
    """Every message was taken, and comes no more."""
    async with asyncio.timeout(within):
        while await broker.depth(queue):
            await asyncio.sleep(0.02)


# -- a broker that is killed under load ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        ("nats", 3),
        ("rabbitmq", 2),
        pytest.param("nats", 200, marks=pytest.mark.chaos),
        pytest.param("rabbitmq", 50, marks=pytest.mark.chaos),
    ],
)
async def test_a_broker_that_is_killed_under_load(dsn: str, database: Database, kind: str, kills: int) -> None:
    """Two workers, a creator that takes each strategy in turn; every second time the files are gone, too"""
    chance = seeded()
    options = "?ack_wait=1" if kind == "nats" else ""  # what was on loan when it died comes again soon
    with folder() as path, own_broker(kind, path / kind) as server, run(dsn, database, server.url + options) as chaos:
        chaos.workers.start(2)
        load = Creator(chaos)
        loading = asyncio.create_task(load.run())
        for number in range(kills):
            # RabbitMQ 3.10 finds no leader for a quorum queue that was made in the second before.
            await load.goes_on(loading, 30 if kind == "rabbitmq" and number % 2 == 0 else 3)
            await asyncio.sleep(chance.uniform(0, 0.1))  # in the midst of what is left to chance
            await asyncio.to_thread(server.kill)
            await load.goes_on(loading, 1)
            if number % 2:
                forget(path / kind)
            await asyncio.to_thread(server.start)
        load.over = True
        await loading
        async with aclosing(find_transport(server.url)) as broker:
            await emptied(broker, chaos.queue, within=300)  # messages that had outlived a kill were taken, too
        await chaos.each_once(ids_of(load.creations), within=300)
        print(f"{kind}: {kills} kill -9 during {len(load.creations)} batches: 0 lost, 0 duplicates; {load.told()}")


class Creator:
    """Creates batches one after the other; one that stopped in between waits for the broker, and is asked for again."""

    def __init__(self, chaos: Run) -> None:
        self._chaos = chaos
        self.creations: list[dict[str, Any]] = []
        self.steps = self.stopped = 0
        self.over = False

    async def run(self) -> None:
        async with self._chaos.bus() as bus:
            while not self.over:
                self.creations.append(new_creation(STRATEGIES[len(self.creations) % 3], 12))
                while not await self._create(bus, self.creations[-1]):
                    self.stopped += 1
                await asyncio.sleep(0.05)

    async def goes_on(self, loading: asyncio.Task[None], steps: int) -> None:
        """With or without a broker, creations end, or stop at a checkpoint."""
        wanted = self.steps + steps
        await eventually(lambda: loading.done() or self.steps >= wanted, 120)

    async def _create(self, bus: CommandBus, creation: dict[str, Any]) -> bool:
        self.steps += 1
        try:
            await create(bus, creation)
        except DispatchIncompleteError:
            await asyncio.sleep(0.2)
            return False
        return True

    def told(self) -> str:
        rounds = self._chaos.database.value("SELECT count(*) FROM busload.dispatch WHERE rounds > 0")
        return f"{self.stopped} times one stopped at a checkpoint, {rounds} batches needed another round"


# -- hostile messages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "key", "volleys"),
    [
        ("nats", None, 3),
        ("rabbitmq", KEY, 3),
        *(pytest.param(kind, key, 100, marks=pytest.mark.chaos) for kind in BROKERS for key in (None, KEY)),
    ],
)
async def test_hostile_messages_under_load(
    request: pytest.FixtureRequest, dsn: str, database: Database, kind: str, key: str | None, volleys: int
) -> None:
    """Forged, replayed, malformed and oversize messages have no effect, and no worker minds"""
    url, chance, within = request.getfixturevalue(f"{kind}_url"), seeded(), 60 + volleys
    with run(dsn, database, url, key=key, envelope=10) as chaos:
        creations = [new_creation(STRATEGIES[number % 3], 100) for number in range(volleys)]
        async with chaos.bus() as bus, aclosing(find_transport(url)) as attacker:
            await attacker.declare([chaos.queue])
            await out_of_reach(bus, database)
            chaos.workers.start(2)
            for creation in creations:
                creating = asyncio.create_task(create(bus, creation))
                await publish(attacker, chaos.queue, hostile(chance, all_ids(database), key))
                await creating
            await publish(attacker, chaos.queue, oversize(attacker))
            await eventually(lambda: database.count("execution") >= 100 * volleys, within)
            await emptied(attacker, chaos.queue, within)
            assert "Traceback" not in chaos.workers.log.read_text(), chaos.workers.last_words()
            assert waiting(database) == {"SCHEDULED": 1, "PENDING": 1}
            await bus.cancel_batch(DOMAIN, OUT_OF_REACH, reason="was never in reach", operator="test")
            await bus.cancel_batch(OTHER, OUT_OF_REACH_ELSEWHERE, reason="was never in reach", operator="test")
        await chaos.each_once(ids_of(creations))


OUT_OF_REACH, OUT_OF_REACH_ELSEWHERE = uuid4(), uuid4()


async def out_of_reach(bus: CommandBus, database: Database) -> None:
    """Commands that no message may start: one is not due yet, one is another domain's."""
    later = BatchCommand("Transfer", run_at=database.value("SELECT now() + interval '1 day'"))
    await bus.create_batch(DOMAIN, [later], batch_id=OUT_OF_REACH)
    await bus.create_batch(OTHER, [BatchCommand("Transfer")], batch_id=OUT_OF_REACH_ELSEWHERE)


def waiting(database: Database) -> dict[str, int]:
    return dict(
        database.rows("SELECT status, count(*) FROM busload.command_status WHERE status <> 'COMPLETED' GROUP BY 1")
    )


def hostile(chance: random.Random, ids: Sequence[int], key: str | None) -> list[bytes]:
    """`ids` are real ones; whoever has `key` is one of us, whose messages were recorded."""
    one = chance.choice(ids)
    genuine = envelope((one, one), key=key)
    whole_load = (one >> 10) << 10, (one >> 10) << 10 | 1023
    bodies = [
        *malformed(chance, one, genuine),
        *(envelope((id, id), key=forger) for id in ids[:50] for forger in (None, "guessed")),
        *(envelope((made_up, made_up), key=key) for made_up in (0, 2**62, 2**63 - 1, chance.getrandbits(60))),
        envelope((one, one), domain=OTHER, key=key),
        envelope(*[whole_load] * 1000, key=key),
        *(envelope((id, id), key=key) for id in ids[-100:]),
    ]
    chance.shuffle(bodies)
    return bodies


def malformed(chance: random.Random, id: int, genuine: bytes) -> list[bytes]:
    about = {"v": 1, "domain": DOMAIN, "loads": [[id, id]]}
    loads: list[Any] = [
        "all", {"lo": id}, [], [id], [[id]], [[id, id, id]], [[id + 1, id]], [[-1, id]], [[-5, -1]], [[0, 2**63 - 1]],
        [[str(id), str(id)]], [[float(id), float(id)]], [[True, True]], [[None, id]], [[2**63, 2**63]],
        [[10**400, 10**400]], [[id, id + 1024]], [[id, id]] * 1001, [[[id, id]]],
    ]  # fmt: skip
    shapes: list[Any] = [
        [], 7, None, "ring", {}, {"v": 2}, {"v": True}, {"v": 1}, about | {"domain": None},
        about | {"signature": 7}, about | {"signature": "é" * 64}, *(about | {"loads": each} for each in loads),
    ]  # fmt: skip
    return [
        b"", b"\x00", b"\xff\xfe", genuine[:-1], genuine[1:], genuine * 2, b"[" * 100_000, b'{"v":' * 10_000,
        b'{"v": NaN}', b'{"v": 1e999}', b'{"v": ' + b"9" * 10_000 + b"}", chance.randbytes(chance.randrange(1, 5000)),
        b'{"v": 1, "domain": "\\ud800", "loads": [[0, 0]]}', *(json.dumps(shape).encode() for shape in shapes),
    ]  # fmt: skip


def oversize(broker: Transport) -> list[bytes]:
    """As much as the server takes, whatever we would send."""
    size = broker.max_bytes if broker.name == "nats" else 17 * 2**20
    broker.max_bytes = size
    return [bytes(size), b"[" * size]
