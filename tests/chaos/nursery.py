"""Forks workers on demand: everything is imported once, so that killing one and starting another costs milliseconds.

Run as a script of its own. Each line on stdin is JSON: `{"start": {...}}` is answered with the pid of a new worker, or
of whatever else its `role` names, `{"ended": true}` with `{pid: exit status}` of those that have ended since it was
last asked. At the end of stdin, that is also when the test dies, every one of them is killed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg

from busload import (
    BatchCommand,
    BusinessRuleError,
    Chunk,
    ChunkContext,
    Command,
    CommandBus,
    ConcurrencyLimit,
    Group,
    HandlerContext,
    Item,
    PermanentCommandError,
    RateLimit,
    RetryPolicy,
    Settings,
    SyncCommandBus,
    SyncHandlerContext,
    TransientCommandError,
    Worker,
    WorkerSettings,
)
from busload.buffers import Buffer
from busload.commands.ids import new_ids
from busload.dispatch import deliveries as receive
from busload.sync import SyncBuffer
from busload.transports import find_transport
from tests.stepped import SteppedBus

DOMAIN = "payments"
BULK, LIMITED, CONCURRENT, ORDERED = "crm", "partner", "storage", "accounts"
"""Domains of commands that run in chunks, that a limit holds up, that run few at a time, and that run in order."""
STRATEGIES = "two_phase", "checkpoint", "optimistic"
DID_NOT_START = 75
"""The exit status of a worker that found no database when it started: whoever runs workers starts another."""


class Ledger:
    """What handlers did, in a file that busload does not write: one line per fact, whole or not at all."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(self, fact: str, command: Command, execution_id: object) -> None:
        os.write(self._file, f"{fact} {command.command_id} {execution_id} {os.getpid()}\n".encode())


class Gate:
    """Opens when the test makes a file. One task looks for it, however many wait."""

    def __init__(self, path: str | None) -> None:
        self._path = Path(path) if path else None
        self._opened = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    async def wait(self) -> None:
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        await self._opened.wait()

    async def _look(self) -> None:
        assert self._path is not None, "a worker that waits needs a gate"
        while not self._path.exists():
            await asyncio.sleep(0.01)
        self._opened.set()


def register(bus: CommandBus, ledger: Ledger, options: dict[str, Any]) -> None:
    retry = RetryPolicy(max_attempts=3, backoff=(0.01,))
    pause = options.get("pause", 0.01)
    gate = Gate(options.get("gate"))

    @bus.handler(DOMAIN, "Work", retry=retry)
    async def work(command: Command, ctx: HandlerContext) -> int:
        ledger.note("start", command, ctx.execution_id)
        await asyncio.sleep(random.uniform(0, pause))
        ledger.note("end", command, ctx.execution_id)
        return 1

    @bus.handler(DOMAIN, "Transfer", retry=retry)
    async def transfer(command: Command, ctx: HandlerContext) -> None:
        ledger.note("start", command, ctx.execution_id)
        async with ctx.transaction() as conn:
            await conn.execute("INSERT INTO effect (command_id) VALUES (%s)", [command.command_id])
            await asyncio.sleep(random.uniform(0, pause))
        ledger.note("end", command, ctx.execution_id)

    @bus.handler(DOMAIN, "Block", retry=retry)
    def block(command: Command, ctx: SyncHandlerContext) -> None:
        ledger.note("start", command, ctx.execution_id)
        time.sleep(random.uniform(0, pause))
        ledger.note("end", command, ctx.execution_id)

    @bus.handler(DOMAIN, "Mixed", retry=retry)
    async def mixed(command: Command, ctx: HandlerContext) -> None:
        await asyncio.sleep(random.uniform(0, pause))
        match random.randrange(12):
            case 0:
                raise BusinessRuleError("no")
            case 1:
                raise PermanentCommandError("account closed")
            case 2 | 3:
                raise TransientCommandError("busy")

    @bus.handler(DOMAIN, "Refuse", retry=retry)
    async def refuse(command: Command, ctx: HandlerContext) -> None:
        ledger.note("start", command, ctx.execution_id)
        await asyncio.sleep(random.uniform(0, pause))
        raise random.choice([BusinessRuleError, PermanentCommandError])("account closed")

    @bus.handler(DOMAIN, "Suicide", retry=retry)
    async def suicide(command: Command, ctx: HandlerContext) -> None:
        ledger.note("start", command, ctx.execution_id)
        os._exit(9)

    @bus.handler(DOMAIN, "Wait", retry=retry)
    async def wait(command: Command, ctx: HandlerContext) -> str:
        """Runs until the test lets it go, with the heart beating meanwhile."""
        ledger.note("start", command, ctx.execution_id)
        await gate.wait()
        ledger.note("end", command, ctx.execution_id)
        return str(os.getpid())

    @bus.handler(DOMAIN, "Done", retry=retry)
    async def done(command: Command, ctx: HandlerContext) -> None:
        ledger.note("end", command, ctx.execution_id)


class Receiver:
    """The service that bulk calls reach, in a file that busload does not write: one line per call.

    A line that is cut off is the call of a process that was killed while it made it.
    """

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def take(self, name: str, group_id: object, items: Sequence[Item]) -> None:
        told = [(str(item.id), item.key, item.data) for item in items]
        line = {"name": name, "group": str(group_id), "pid": os.getpid(), "at": time.monotonic(), "items": told}
        os.write(self._file, f"\n{json.dumps(line, default=str)}\n".encode())

    def calls_of(self, name: str) -> int:
        return Path(f"/proc/self/fd/{self._file}").read_text().count(f'"name": "{name}"')


def appended(older: list[Any], newer: list[Any]) -> list[Any]:
    return older + newer


def declared(bus: Any, name: str, options: dict[str, Any]) -> Any:
    """A buffer as the test has described it, on either face."""
    told = dict(options["buffers"][name])
    if told.get("merge") == "append":
        told["merge"] = appended
    return bus.buffer(name, **{**told, "max_age": timedelta(seconds=told["max_age"])})


def register_buffers(bus: CommandBus, receiver: Receiver, options: dict[str, Any]) -> None:
    for name in options.get("buffers", {}):
        events = declared(bus, name, options)
        if name == "doomed":
            doom(events, receiver, options)
        else:
            deliver_in_bulk(events, receiver, options)


def deliver_in_bulk(events: Buffer, receiver: Receiver, options: dict[str, Any]) -> None:
    """With `moods`, a service that refuses a call, takes it and does not answer, or takes a part, some never."""
    pause, moods = options.get("pause", 0.01), options.get("moods", False)

    @events.handler(retry=RetryPolicy(max_attempts=1000, backoff=(0.02,)))
    async def deliver(group: Group, ctx: HandlerContext) -> None:
        mood = random.randrange(20) if moods else None
        if mood == 0:
            raise TransientCommandError("busy")
        await asyncio.sleep(random.uniform(0, pause))
        taken = [item for item in group if mood not in (1, 2, 3) or random.randrange(4)]
        receiver.take(group.buffer, group.group_id, taken)
        await asyncio.sleep(random.uniform(0, pause))
        if mood == 4:
            raise TransientCommandError("its answer was lost")
        if mood in (1, 2, 3):
            known = {item.id for item in taken}
            for item in group:
                if item.id in known:
                    group.succeed(item)
                else:
                    group.fail(item, "not now" if random.randrange(10) else PermanentCommandError("not like this"))


def doom(events: Buffer, receiver: Receiver, options: dict[str, Any]) -> None:
    """Nothing is taken, and the hook for that kills its worker the first times."""

    @events.handler(retry=RetryPolicy(max_attempts=2, backoff=(0.01,)))
    async def refuse(group: Group, ctx: HandlerContext) -> None:
        raise TransientCommandError("never")

    @events.exhausted(retry=RetryPolicy(max_attempts=2, backoff=(0.01,)))
    async def compensate(group: Group, ctx: HandlerContext) -> None:
        receiver.take("hook", group.group_id, group.items)
        if receiver.calls_of("hook") <= options["hook_crashes"]:
            os._exit(9)


def register_bulk(bus: CommandBus, receiver: Receiver, options: dict[str, Any]) -> None:
    pause = options.get("pause", 0.01)
    retry = RetryPolicy(max_attempts=50, backoff=(0.01,))

    @bus.bulk_handler(BULK, "Push", size=options["bulk"], max_wait=0.05, retry=retry)
    async def push(chunk: Chunk, ctx: ChunkContext) -> None:
        receiver.take(chunk.domain, "-", chunk.items)
        await asyncio.sleep(random.uniform(0, pause))
        if random.randrange(10) == 0:
            raise TransientCommandError("its answer was lost")


def register_limited(bus: CommandBus, receiver: Receiver, options: dict[str, Any]) -> None:
    @bus.handler(LIMITED, "Call", rate_limit=RateLimit(**options["limit"]))
    async def call(command: Command, ctx: HandlerContext) -> None:
        receiver.take(LIMITED, command.command_id, [])


def ledger_of(options: dict[str, Any]) -> Callable[[str, object, Command, HandlerContext | SyncHandlerContext], None]:
    """Notes when a call begins and ends: see `tests.chaos.ledger`."""
    ledger = os.open(options["calls"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(fact: str, key: object, command: Command, ctx: HandlerContext | SyncHandlerContext) -> None:
        n, at = command.data.get("n", 0), time.time_ns()
        os.write(ledger, f"{fact} {key} {n} {ctx.execution_id} {os.getpid()} {at}\n".encode())

    return note


def register_concurrent(bus: CommandBus, options: dict[str, Any]) -> None:
    """Types whose calls are limited to 1, 2, ... at a time for each key; each call notes when it begins and ends."""
    note_call = ledger_of(options)
    pause = options.get("pause", 0.01)
    retry = RetryPolicy(max_attempts=20, backoff=(0.01,))

    def note(fact: str, command: Command, ctx: HandlerContext | SyncHandlerContext) -> None:
        note_call(fact, f"{command.command_type}/{command.data['key']}", command, ctx)

    async def call(command: Command, ctx: HandlerContext) -> None:
        note("begin", command, ctx)
        await asyncio.sleep(random.uniform(0, pause))
        note("end", command, ctx)
        if random.randrange(20) == 0:
            raise TransientCommandError("busy")

    def call_in_thread(command: Command, ctx: SyncHandlerContext) -> None:
        note("begin", command, ctx)
        time.sleep(random.uniform(0, pause))
        note("end", command, ctx)

    for most in options["concurrent"]:
        limit = ConcurrencyLimit(most, by="key")
        handle: Any = call_in_thread if most == 2 else call
        bus.handler(CONCURRENT, f"At{most}", retry=retry, concurrency_limit=limit)(handle)


def register_ordered(bus: CommandBus, options: dict[str, Any]) -> None:
    """Types that share an order: each call notes when it begins and ends. They run in the event loop, in a thread or in
    a transaction of their own, and fail at times.
    """
    note_call = ledger_of(options)
    pause = options.get("pause", 0.01)
    retry = RetryPolicy(max_attempts=20, backoff=(0.01,))
    limit = ConcurrencyLimit(1, by="key", name="accounts", ordered=True)

    def note(fact: str, command: Command, ctx: HandlerContext | SyncHandlerContext) -> None:
        note_call(fact, command.data["key"], command, ctx)

    def fail_at_times() -> None:
        if random.randrange(20) == 0:
            raise TransientCommandError("busy")

    @bus.handler(ORDERED, "Plain", retry=retry, concurrency_limit=limit)
    async def plain(command: Command, ctx: HandlerContext) -> None:
        note("begin", command, ctx)
        await asyncio.sleep(random.uniform(0, pause))
        note("end", command, ctx)
        fail_at_times()

    @bus.handler(ORDERED, "InThread", retry=retry, concurrency_limit=limit)
    def in_thread(command: Command, ctx: SyncHandlerContext) -> None:
        note("begin", command, ctx)
        time.sleep(random.uniform(0, pause))
        note("end", command, ctx)
        fail_at_times()

    @bus.handler(ORDERED, "InTransaction", retry=retry, concurrency_limit=limit)
    async def in_transaction(command: Command, ctx: HandlerContext) -> None:
        note("begin", command, ctx)  # before it waits for anything: it may be frozen there
        async with ctx.transaction() as conn:
            await conn.execute("SELECT 1")
            await asyncio.sleep(random.uniform(0, pause))
            note("end", command, ctx)
            fail_at_times()


class Told:
    """Becomes true when this process is told to end; until then, `wait` waits."""

    def __init__(self) -> None:
        self._event = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: self._event.set())
        self.wait = self._event.wait

    def __bool__(self) -> bool:
        return self._event.is_set()


def produce(options: dict[str, Any]) -> None:
    """Record activities, each in a transaction of its own together with its event, until told to end.

    Every tenth is rolled back, and a few times in a thousand the process dies before it commits. What was acknowledged
    or rolled back is noted; each activity has a number that is never used again.
    """
    told, notes = Told(), os.open(options["notes"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    while not told:
        try:
            with SyncCommandBus(options["dsn"], settings=Settings(pool_size=1)) as bus:
                buffers = {name: declared(bus, name, options) for name in options["buffers"]}
                with psycopg.connect(options["dsn"], autocommit=True) as conn:
                    while not told:
                        name, n = random.choice(list(buffers)), random.getrandbits(52)
                        fact = record(conn, buffers[name], n)
                        os.write(notes, f"{fact} {name} {n}\n".encode())
                        told.wait(random.uniform(0, options["rest"]))
        except psycopg.OperationalError:
            told.wait(0.05)  # the server was cut off: whether that one was committed is written in its table


def record(conn: psycopg.Connection[Any], events: SyncBuffer, n: int) -> str:
    fate = random.randrange(1000)
    with conn.transaction(force_rollback=fate < 100):
        conn.execute("INSERT INTO activity (n, buffer) VALUES (%s, %s)", [n, events.name])
        if events.settings.table is not None and fate % 2:
            conn.execute("INSERT INTO activity_event (n) VALUES (%s)", [n])
        else:
            events.add({"n": n}, conn=conn)
        if fate >= 996:
            os._exit(9)
    return "undone" if fate < 100 else "added"


def pour(options: dict[str, Any]) -> None:
    """Add single events as fast as it goes: to the buffers that merge, a number of one of some subjects each time."""
    told, sent = Told(), Counter[str]()
    with SyncCommandBus(options["dsn"], settings=Settings(pool_size=1)) as bus:
        buffers = [declared(bus, name, options) for name in options["buffers"]]
        while not told:
            for events in buffers:
                key = f"{events.name}-{os.getpid()}-{random.randrange(20)}"
                events.add([sent[key]], key=key)
                sent[key] += 1
    Path(options["notes"], str(os.getpid())).write_text(json.dumps(sent))


def claim(options: dict[str, Any]) -> None:
    """Make groups as fast as it goes."""
    told = Told()
    with SyncCommandBus(options["dsn"], settings=Settings(pool_size=1)) as bus:
        buffers = [declared(bus, name, options) for name in options["buffers"]]
        while not told:
            for events in buffers:
                events.distribute()


def work(options: dict[str, Any]) -> None:
    asyncio.run(serve(options))


class DyingBus(SteppedBus):
    """A bus whose process is killed before a step of a creation: a transaction, or a call of the broker."""

    steps_left: int

    def step(self) -> None:
        if self.steps_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps_left -= 1


async def create_and_die(options: dict[str, Any]) -> None:
    """Create one batch, up to the step at which this process ends."""
    transport = find_transport(options["transport"])
    publish = transport.publish
    async with DyingBus(options["dsn"], transport=transport, settings=bus_settings(options)) as bus:

        async def publish_unless_dead(messages: Any) -> None:
            bus.step()
            await publish(messages)

        bus.steps_left = options["steps"]
        transport.publish = publish_unless_dead  # type: ignore[method-assign]
        await create(bus, options["creation"])


async def create_until_killed(options: dict[str, Any]) -> None:
    """Create batches by each strategy in turn; what is begun is noted first, so that it can be asked for again."""
    notes = os.open(options["notes"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    async with CommandBus(options["dsn"], transport=options["transport"], settings=bus_settings(options)) as bus:
        for strategy in itertools.cycle(STRATEGIES):
            creation = new_creation(strategy, options["size"])
            os.write(notes, f"{json.dumps(creation)}\n".encode())
            await create(bus, creation)


def new_creation(strategy: str, size: int) -> dict[str, Any]:
    """All that is needed to ask for the same batch again; in three checkpoints, if in any."""
    [batch_id, *ids] = map(str, new_ids(size + 1))
    return {"batch_id": batch_id, "ids": ids, "strategy": strategy, "checkpoint_size": -(-size // 3)}


async def create(bus: CommandBus, creation: dict[str, Any]) -> None:
    await bus.create_batch(
        DOMAIN,
        [BatchCommand("Transfer", UUID(id)) for id in creation["ids"]],
        batch_id=UUID(creation["batch_id"]),
        dispatch=creation["strategy"],
        checkpoint_size=creation["checkpoint_size"],
    )


def bus_settings(options: dict[str, Any]) -> Settings:
    return Settings(
        pool_size=4,
        queue_prefix=options.get("prefix", "busload"),
        envelope_size=options.get("envelope", 100),
        message_key=options.get("key"),
    )


def run_creator(options: dict[str, Any]) -> None:
    asyncio.run(create_until_killed(options))


def run_dying_creator(options: dict[str, Any]) -> None:
    asyncio.run(create_and_die(options))


ROLES = {
    "worker": work,
    "producer": produce,
    "pourer": pour,
    "claimer": claim,
    "creator": run_creator,
    "dying creator": run_dying_creator,
}


async def serve(options: dict[str, Any]) -> None:
    receive.EARLY = options.get("early", receive.EARLY)
    lease_for = timedelta(seconds=options.get("lease_for", 30))
    settings = WorkerSettings(
        lease_for=lease_for,
        poll_every=timedelta(milliseconds=100),
        sweep_every=timedelta(milliseconds=options.get("sweep_ms", 300)),
        grace=timedelta(seconds=options.get("grace", 5)),
        flush_every=timedelta(milliseconds=20),
        flush_size=options.get("flush_size", 1000),
        prefetch=timedelta(seconds=options.get("prefetch", 0.05)),
        broker_poll_every=timedelta(seconds=options.get("broker_poll", 5)),
        recover_every=timedelta(seconds=options.get("recover", 300)),
    )
    async with CommandBus(options["dsn"], transport=options.get("transport"), settings=bus_settings(options)) as bus:
        register(bus, Ledger(options["ledger"]), options)
        receiver = Receiver(options["receiver"])
        register_buffers(bus, receiver, options)
        if "bulk" in options:
            register_bulk(bus, receiver, options)
        if "limit" in options:
            register_limited(bus, receiver, options)
        if "concurrent" in options:
            register_concurrent(bus, options)
        if "ordered" in options:
            register_ordered(bus, options)
        domains = options.get("domains", [DOMAIN])
        await Worker(bus, domains=domains, concurrency=options.get("concurrency", 10), settings=settings).run(
            signals=True
        )


def run_worker(options: dict[str, Any]) -> None:
    logging.basicConfig(filename=options["log"], level=logging.WARNING, format="%(process)d %(message)s")
    status = 1
    try:
        random.seed()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a process of its own
        ROLES[options.get("role", "worker")](options)
        status = 0
    except BaseException as error:
        logging.exception("The worker ended")
        if any(frame.name == "__aenter__" for frame in traceback.extract_tb(error.__traceback__)):
            status = DID_NOT_START
    finally:
        logging.shutdown()
        os._exit(status)


class Nursery:
    def __init__(self) -> None:
        self._children: set[int] = set()
        self._ended: dict[int, int] = {}

    def answer(self, request: dict[str, Any]) -> Any:
        self._reap()
        if "start" in request:
            # Until it listens, a signal ends it: Python may lose a KeyboardInterrupt in what it does after a fork.
            before = signal.signal(signal.SIGINT, signal.SIG_DFL)
            if (pid := os.fork()) == 0:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                run_worker(request["start"])
            signal.signal(signal.SIGINT, before)
            self._children.add(pid)
            return pid
        ended, self._ended = self._ended, {}
        return ended

    def _reap(self, *, wait: bool = False) -> None:
        for pid in list(self._children):
            found, status = os.waitpid(pid, 0 if wait else os.WNOHANG)
            if found:
                self._children.discard(pid)
                self._ended[pid] = os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        self._reap(wait=True)


def main() -> None:
    nursery = Nursery()
    try:
        for line in sys.stdin:
            print(json.dumps(nursery.answer(json.loads(line))), flush=True)
    finally:
        nursery.close()


if __name__ == "__main__":
    main()
