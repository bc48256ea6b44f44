"""Every point at which a crash can come while commands are published: each turn of each plan, in each way.

A turn is a statement, a commit or a call of the broker, in the process that publishes, on real connections to both.
`python -m tests.explorer.publishing` writes how many there are into docs/crash-points.md.
"""

from __future__ import annotations

import asyncio
import re
import socket
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar
from unittest.mock import patch
from uuid import UUID, uuid4

import psycopg

from busload import BatchCommand, Command, CommandBus, HandlerContext, Settings, Worker, WorkerSettings
from busload.dispatch.relay import Relay
from busload.dispatch.strategy import DispatchName
from busload.errors import BusloadError, DatabaseUnavailableError, InvalidOperationError
from busload.postgres.database import Database as BusDatabase
from busload.postgres.own_connection import OwnAsyncConnection
from busload.postgres.pool import async_pool
from busload.testing import TestServer
from busload.testing.messages import until
from busload.transports import Message, Transport
from busload.transports.nats import NatsTransport
from busload.transports.postgresql import PostgresqlTransport
from busload.transports.redis import RedisTransport
from tests.brokers.faulty import Crash
from tests.brokers.proxy import Proxy
from tests.explorer.crash_points import BEFORE, DIES, PAGE, UNANSWERED
from tests.given import DOMAIN, WITHIN, Database, eventually

T = TypeVar("T")

LOST = "lost"
HOW = (BEFORE, DIES, UNANSWERED, LOST)
"""The process dies before a turn, or after it; or it lives, and the connection is lost after the turn and before its
answer, or before the turn."""

DECLARE, PUBLISH = "declare", "publish"
COMMANDS, CHECKPOINT, ENVELOPE = 4, 2, 2
"""Commands of a batch, of a checkpoint and of a message."""

MARK = "<!-- crash points of publishing -->\n"


class Peer(Protocol):
    """The other end of a connection."""

    async def hang_up(self) -> None:
        """Our process is gone."""

    async def unanswered(self, carry_out: Callable[[], Awaitable[T]]) -> T: ...
    async def lost(self, carry_out: Callable[[], Awaitable[T]]) -> T: ...


class Process:
    """Takes turns, and is interrupted at one of them. Once it is dead, nothing of it reaches anybody."""

    def __init__(self, watch: Database) -> None:
        self.watch, self.dead = watch, False
        self.begin(-1, BEFORE)

    def begin(self, at: int, how: str) -> None:
        """From now on turns are counted, and this one is interrupted."""
        self.at, self.how = at, how
        self.turns: list[str] = []

    async def take(self, turn: str, carry_out: Callable[[], Awaitable[T]], peer: Peer | None) -> T:
        if self.dead:
            raise Crash
        self.turns.append(turn)
        if len(self.turns) != self.at + 1:
            return await carry_out()
        assert peer is not None
        if self.how == UNANSWERED:
            return await peer.unanswered(carry_out)
        if self.how == LOST:
            return await peer.lost(carry_out)
        if self.how == DIES:
            await carry_out()
        self.dead = True
        await peer.hang_up()
        raise Crash


# -- the database -------------------------------------------------------------------------------------------------


UNSAID = ("_enter_gen", "_commit_gen")
"""BEGIN, after which nothing is different, and what psycopg does at the end of a block: here, nothing is open then."""


class SteppedConnection(OwnAsyncConnection):
    """A real connection, of which each round trip but BEGIN is a turn."""

    process: Process

    async def wait(self, gen: Generator[Any, Any, T], interval: float = 0.1, timeout: float | None = None) -> T:
        carry_out = partial(super().wait, gen, interval, timeout)
        name = getattr(gen, "__name__", "")
        if name in UNSAID and not self.process.dead:
            return await carry_out()
        return await self.process.take("commit" if name == "_exit_gen" else "statement", carry_out, self)

    async def hang_up(self) -> None:
        """Return once the server knows it, and has rolled back what was not committed."""
        pid = self.info.backend_pid
        with socket.socket(fileno=socket.dup(self.pgconn.socket)) as line:
            line.shutdown(socket.SHUT_RDWR)
        self.process.watch.rows("SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE pid = %s", pid)

    async def unanswered(self, carry_out: Callable[[], Awaitable[T]]) -> T:
        await carry_out()
        await self.hang_up()
        self.pgconn.exec_(b"SELECT")  # so that libpq knows it, too
        raise psycopg.OperationalError(self.pgconn.get_error_message())

    async def lost(self, carry_out: Callable[[], Awaitable[T]]) -> T:
        await self.hang_up()
        return await carry_out()


class SteppedDatabase(BusDatabase):
    process: Process

    def start(self) -> None:
        super().start()
        kind = type("SteppedConnection", (SteppedConnection,), {"process": self.process})
        self._pool = async_pool(self.dsn, 1, connection_class=kind)


# -- the broker ---------------------------------------------------------------------------------------------------


class Line(Proxy):
    """Stands before a broker: it can be cut, and refuse new connections."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.refuses = False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            writer.close()
        else:
            await super()._serve(reader, writer)

    async def hang_up(self) -> None:
        """A broker that was only told something has nothing to take back."""

    async def unanswered(self, carry_out: Callable[[], Awaitable[T]]) -> T:
        """What is asked reaches the broker, and its answer nobody."""
        held = self.held_back
        self.hold_answers()
        asked = asyncio.ensure_future(carry_out())
        await eventually(lambda: self.held_back > held or asked.done())
        self.refuses = True
        await self.cut()
        self.pass_answers()
        return await self._refusing(asked)

    async def lost(self, carry_out: Callable[[], Awaitable[T]]) -> T:
        self.refuses = True
        await self.cut()
        return await self._refusing(carry_out())

    async def _refusing(self, asked: Awaitable[T]) -> T:
        try:
            return await asked
        finally:
            self.refuses = False


class Stepped(Transport):
    """A transport of the product, of which each call is a turn."""

    process: Process
    line: Line | None

    async def declare(self, queues: Sequence[str]) -> None:
        await self.process.take(DECLARE, partial(super().declare, queues), self.line)  # type: ignore[safe-super]

    async def publish(self, messages: Sequence[Message]) -> None:
        await self.process.take(PUBLISH, partial(super().publish, messages), self.line)  # type: ignore[safe-super]


class SteppedRedis(Stepped, RedisTransport):
    pass


class SteppedNats(Stepped, NatsTransport):
    pass


class SteppedPostgresql(Stepped, PostgresqlTransport):
    pass


# -- the plans ----------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """What a sender wants to be created, and may ask for again: it keeps the ids."""

    dispatch: DispatchName
    batch_id: UUID = field(default_factory=uuid4)
    ids: list[UUID] = field(default_factory=lambda: [uuid4() for _ in range(COMMANDS)])

    async def create(self, bus: CommandBus) -> None:
        commands = [BatchCommand("Debit", id, {"id": str(id)}) for id in self.ids]
        options = {"batch_id": self.batch_id, "dispatch": self.dispatch, "checkpoint_size": CHECKPOINT}
        await bus.create_batch(DOMAIN, commands, **options)  # type: ignore[arg-type]


async def create(bus: CommandBus, batch: Batch) -> None:
    await batch.create(bus)


async def relay(bus: CommandBus, batch: Batch) -> None:
    await Relay(bus.publisher, bus.database.in_transaction, bus.settings.poll_every).publish_due()


CarryOut = Callable[[CommandBus, Batch], Awaitable[None]]
PLANS: Mapping[str, tuple[DispatchName, CarryOut]] = {
    "create and publish, two-phase": ("two_phase", create),
    "create and publish, in two checkpoints": ("checkpoint", create),
    "create and publish, optimistic": ("optimistic", create),
    "publish by a relay": ("relay", relay),
}
"""How a batch is published, and what is crashed. The recovery, which is crashed with each of them, publishes again."""


@dataclass(frozen=True)
class Point:
    """A place where a plan is interrupted, and the turn at which its recovery is interrupted, too."""

    plan: str
    turn: int
    how: str
    recovery: int


class Site:
    """A database and a broker, processes that use them, and one that nothing happens to."""

    calm: CommandBus

    def __init__(self, dsn: str, database: Database, kind: type[Stepped], broker: str, line: Line | None) -> None:
        self.dsn, self.database, self.kind, self.broker, self.line = dsn, database, kind, broker, line
        self.settings = Settings(queue_prefix=f"crash-{uuid4().hex[:12]}", envelope_size=ENVELOPE)
        self.sent: list[Batch] = []

    @classmethod
    @asynccontextmanager
    async def opened(cls, *about: Any) -> AsyncIterator[Self]:
        site = cls(*about)
        async with CommandBus(site.dsn, transport=site.broker, settings=site.settings) as site.calm:
            yield site

    @asynccontextmanager
    async def process(self, at: int = -1, how: str = BEFORE) -> AsyncIterator[tuple[CommandBus, Process]]:
        """A process that is connected to both, and has not begun anything."""
        process = Process(self.database)
        transport = self.kind.from_url(self.line.url if self.line else self.broker)
        transport.process, transport.line = process, self.line
        with patch("busload.bus.Database", type("Its", (SteppedDatabase,), {"process": process})):
            bus = CommandBus(self.dsn, transport=transport, settings=self.settings)
        async with bus:
            await bus.get_dispatch(DOMAIN, uuid4())
            await transport.depth(bus.publisher.queue(DOMAIN))
            process.begin(at, how)
            yield bus, process

    async def turns_of(self, plan: str) -> list[str]:
        """The turns of a plan that nothing interrupts."""
        return (await self._carry_out(plan))[1]

    async def turns_of_a_recovery(self) -> list[str]:
        """The turns that it takes to publish a batch whose sender has died when it was written."""
        await self._carry_out("publish by a relay", 0, BEFORE)
        async with self.process() as (bus, process):
            await bus.recover()
        return process.turns

    async def interrupt(self, point: Point) -> None:
        """A plan is interrupted, and then its recovery. Another recovery and a repeated call make up for both."""
        try:
            await self._interrupt(point)
        except Exception as error:
            error.add_note(f"That was {point}.")
            raise

    async def _interrupt(self, point: Point) -> None:
        batch, _ = await self._carry_out(point.plan, point.turn, point.how)
        self._time_passes(batch)
        with suppress(Crash, psycopg.Error, BusloadError):
            async with self.process(point.recovery, HOW[point.recovery % len(HOW)]) as (bus, _):
                await bus.recover()
        self._time_passes(batch)
        with suppress(InvalidOperationError):  # there is already such a batch
            await batch.create(self.calm)
        await self.calm.recover()
        self._must_be_whole(batch)
        assert self.database.count("outbox") == 0
        report = await self.calm.get_dispatch(DOMAIN, batch.batch_id)
        assert report is not None and report.published_at is not None
        assert (report.queued_tasks, report.retry_needed) == (COMMANDS, False)

    async def run_everything(self) -> None:
        """A worker hears the messages, and runs every command that was ever sent: to one completion, and once."""
        runs: Counter[UUID] = Counter()
        async with CommandBus(self.dsn, transport=self.broker, settings=self.settings) as bus:

            @bus.handler(DOMAIN, "Debit")
            async def debit(command: Command, ctx: HandlerContext) -> None:
                runs[command.command_id] += 1

            worker = Worker(bus, settings=WorkerSettings(sweep_every=timedelta(milliseconds=200)))
            running = asyncio.create_task(worker.run())
            try:
                for batch in self.sent:
                    found = await bus.wait_batch(DOMAIN, batch.batch_id, timeout=WITHIN)
                    assert (found.total_count, found.completed_count) == (COMMANDS, COMMANDS)
                queue, transport = bus.publisher.queue(DOMAIN), bus.publisher.transport
                # messages that came twice find nothing, and go
                assert await until(partial(transport.depth, queue), lambda depth: not depth)
            finally:
                worker.stop()
                await running
        assert runs == Counter(id for batch in self.sent for id in batch.ids)
        assert self.database.is_at_rest()
        self.database.check_invariants()

    async def _carry_out(self, plan: str, at: int = -1, how: str = BEFORE) -> tuple[Batch, list[str]]:
        """What a plan needs is there, and a process carries it out, up to where it is interrupted."""
        dispatch, carry_out = PLANS[plan]
        batch = Batch(dispatch)
        self.sent.append(batch)
        if carry_out is not create:
            await batch.create(self.calm)
            self._time_passes(batch)
        try:
            async with self.process(at, how) as (bus, process):
                await carry_out(bus, batch)
                self._must_be_whole(batch)  # what a call has accepted is there when it returns
        except DatabaseUnavailableError:  # and nothing is, if it says so
            assert carry_out is not create or dispatch == "checkpoint" or not self._written(batch)
        except (Crash, psycopg.Error, BusloadError):
            pass
        assert len(process.turns) > at, "nothing was interrupted"
        return batch, process.turns

    def _must_be_whole(self, batch: Batch) -> None:
        assert self._written(batch) == COMMANDS

    def _written(self, batch: Batch) -> int:
        return int(self.database.value("SELECT count(*) FROM busload.command WHERE batch_id = %s", batch.batch_id))

    def _time_passes(self, batch: Batch) -> None:
        """Whoever held loads of it is thought dead, and what was published has waited for long."""
        moved = (("outbox", "due_at"), ("outbox", "since"), ("queue", "published_at"))
        for table, column in moved:
            moving = f"UPDATE busload.{table} SET {column} = {column} - interval '1 h' WHERE batch_id = %s"
            self.database.rows(moving, batch.batch_id)


def points(plan: str, turns: int, how: str, recovery: int, *, whole: bool) -> Iterator[Point]:
    """Each point with every crash of the recovery or, if that is not the `whole`, with one of them in turn."""
    for turn in range(turns):
        for second in range(recovery) if whole else ((turn * len(HOW) + HOW.index(how)) % recovery,):
            yield Point(plan, turn, how, second)


# -- the docs -----------------------------------------------------------------------------------------------------


def table(turns: Mapping[str, Sequence[str]], recovery: int) -> str:
    """The table of the docs."""
    lines = [
        "| plan | statements and commits | calls of the broker | crash points | with a crash during recovery |",
        "|---|---|---|---|---|",
    ]
    totals = [0, 0, 0, 0]
    for plan, taken in turns.items():
        calls = sum(turn in (DECLARE, PUBLISH) for turn in taken)
        count = len(taken) * len(HOW)
        figures = [len(taken) - calls, calls, count, count * recovery]
        totals = [total + figure for total, figure in zip(totals, figures, strict=True)]
        lines.append(f"| {plan} | {' | '.join(map(str, figures))} |")
    lines.append(f"| **all {len(turns)}** | {' | '.join(f'**{total}**' for total in totals)} |")
    return "\n".join(lines)


def written(page: str, turns: Mapping[str, Sequence[str]], recovery: int) -> str:
    [old] = re.findall(rf"{MARK}(?:\n(?:\|.*\n)+)?", page)
    return page.replace(old, f"{MARK}\n{table(turns, recovery)}\n")


async def counted(page: str, site: Site) -> str:
    """The page with the points that there are now."""
    turns = {plan: await site.turns_of(plan) for plan in PLANS}
    return written(page, turns, len(await site.turns_of_a_recovery()))


async def _write_down(dsn: str) -> None:
    """PostgreSQL's own transport has the same turns as a broker, and needs none."""
    with Database(dsn) as database:
        async with Site.opened(dsn, database, SteppedPostgresql, dsn, None) as site:
            PAGE.write_text(await counted(PAGE.read_text(), site))


if __name__ == "__main__":
    from tests.explorer.__main__ import CONFIG

    with tempfile.TemporaryDirectory(prefix="busload-explore-") as home:
        Path(home).chmod(0o755)
        with TestServer(Path(home), config=CONFIG) as server, server.database() as dsn:
            asyncio.run(_write_down(dsn))
