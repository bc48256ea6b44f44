"""What others do with the same work, on the same server and in the same run.

Each peer is a program in `bench/peers`, run in an environment of its own, that hears words and says lines of JSON
(`bench/peers/talk.py`). Everything is timed on this side of that, for all of them alike: from the word that starts it
to the moment at which every command is handled and the store says that nothing is left.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.case import Case, Helper, Measured, Store, started
from bench.clock import timed
from bench.ours import WARM_UP, Sent, latencies

ROOT = Path(__file__).resolve().parent.parent
QUIET = 120
"""Seconds without a word after which a peer is given up."""


def home() -> Path:
    """Where the environments of the peers are: outside of the repository, and kept from run to run."""
    return Path(os.environ.get("BUSLOAD_BENCH_HOME") or "~/.cache/busload-bench").expanduser()


PROGRAMS: dict[Store, str] = {"redis": "redis-server", "rabbitmq": "rabbitmq-server"}
"""What a store is run by, and the name of its package in Debian."""


def is_installed(program: str) -> bool:
    """Debian has RabbitMQ where only root looks."""
    return bool(shutil.which(program) or shutil.which(program, path="/usr/lib/rabbitmq/bin"))


@dataclass(frozen=True, slots=True)
class Peer:
    """A program beside ours, and the packages of its environment. `most` is how many commands it is given of a kind:
    rates are comparable, and the slow ones would take all day.
    """

    name: str
    title: str
    program: str
    packages: tuple[str, ...]
    store: Store = "postgresql"
    batches: bool = False
    batch_in_worker: bool = False
    most: Mapping[str, int] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        return home() / self.name

    @property
    def node(self) -> bool:
        return self.program.endswith(".mjs")

    @property
    def lacks(self) -> str | None:
        """Why it cannot be measured, or None if it can."""
        program = PROGRAMS.get(self.store)
        if program is not None and not is_installed(program):
            return f"{program} is not installed; `apt-get install {program}` brings it"
        failed, ready = self.home / "failed", self.home / "ready"
        if failed.exists():
            return failed.read_text().strip()
        if not ready.exists() or ready.read_text() != self.wanted:
            return "not installed; `python -m bench.install` does that"
        return None

    @property
    def wanted(self) -> str:
        """What a complete environment says in its file `ready`."""
        return json.dumps(self.packages)

    def command(self, role: str, url: str) -> list[str]:
        if self.node:
            own = self.home / "node_modules" / ".bin" / "node"
            return [str(own) if own.exists() else "node", str(ROOT / "bench" / "peers" / self.program), role, url]
        module = self.program.removesuffix(".py")
        return [str(self.home / "bin" / "python"), "-m", f"bench.peers.{module}", role, url]

    @property
    def folder(self) -> Path:
        """Where its program runs: Node looks for packages from there, Python for ours."""
        return self.home if self.node else ROOT


PEERS = [
    Peer(
        "pgqueuer",
        "PgQueuer",
        "pgqueuer.py",
        ("pgqueuer==1.6.0", "asyncpg==0.32.0", "uvloop==0.23.0"),
    ),
    Peer("graphile-worker", "Graphile Worker", "graphile.mjs", ("graphile-worker@0.18.0",), most={"singles": 5_000}),
    Peer("pg-boss", "pg-boss", "pgboss.mjs", ("pg-boss@12.35.0",), most={"singles": 5_000}),
    Peer(
        "procrastinate",
        "Procrastinate",
        "procrastinate.py",
        ("procrastinate==3.10.0", "psycopg[binary,pool]==3.3.8"),
        most={"create": 20_000, "drain": 2_000, "drain-2": 2_000, "singles": 1_000},
    ),
    Peer(
        "celery",
        "Celery (Redis)",
        "celery.py",
        ("celery[redis]==5.7.0", "redis[hiredis]==8.1.0"),
        store="redis",
        batches=True,
        most={"create": 4_000, "drain": 4_000, "drain-2": 4_000, "singles": 2_000},
    ),
    Peer(
        "celery-rabbitmq",
        "Celery (RabbitMQ)",
        "celery.py",
        ("celery==5.7.0",),
        store="rabbitmq",
        most={"create": 10_000, "drain": 4_000, "drain-2": 4_000, "singles": 2_000},
    ),
    Peer(
        "arq",
        "arq (Redis)",
        "arq.py",
        ("arq==0.28.0", "redis[hiredis]==5.3.1", "uvloop==0.23.0"),
        store="redis",
        most={"create": 10_000, "drain": 3_000, "drain-2": 3_000, "singles": 1_000},
    ),
    Peer(
        "reliable-cmd",
        "reliable-cmd",
        "reliable_cmd.py",
        ("reliable-cmd==0.2.2", "pgmq==1.1.4", "psycopg[binary,pool]==3.3.8"),
        batches=True,
        batch_in_worker=True,
        most={"create": 10_000, "drain": 3_000, "drain-2": 3_000, "singles": 1_000, "send": 500},
    ),
]


# -- words and lines -----------------------------------------------------------------------------------------------


def parse(line: str) -> dict[str, Any]:
    """What a line says; nothing if it is not one of ours, since libraries print what they like."""
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


class Voice:
    """The other end of a peer's program."""

    def __init__(self, helper: Helper) -> None:
        self._helper = helper

    def tell(self, words: str) -> None:
        self._helper.say(words)

    async def hear(self, word: str, timeout: float = QUIET) -> Any:
        """What the next line with this word says; others are skipped."""
        while word not in (said := parse(await self._helper.hear(timeout))):
            pass
        return said[word]

    async def ask(self, words: str, timeout: float = QUIET) -> Any:
        self.tell(words)
        return await self.hear("answer", timeout)


@asynccontextmanager
async def _role(peer: Peer, role: str, url: str, count: int = 1) -> AsyncIterator[list[Voice]]:
    async with started(peer.command(role, url), count, cwd=peer.folder) as processes:
        voices = [Voice(process) for process in processes]
        for voice in voices:
            await voice.hear("ready")
        yield voices


@asynccontextmanager
async def _sender_and_workers(peer: Peer, url: str, count: int = 1) -> AsyncIterator[tuple[Voice, list[Voice]]]:
    async with AsyncExitStack() as stack:
        [sender] = await stack.enter_async_context(_role(peer, "send", url))
        yield sender, await stack.enter_async_context(_role(peer, "work", url, count))


@asynccontextmanager
async def peer_at_work(peer: Peer, url: str) -> AsyncIterator[tuple[Voice, Voice]]:
    """Its sender and one worker process, which begins when it is told to."""
    async with _sender_and_workers(peer, url) as (sender, [worker]):
        yield sender, worker


@dataclass(frozen=True, slots=True)
class Begun:
    """When workers first said that they had handled something, and how much."""

    at: float
    count: int


async def handled(workers: Sequence[Voice], count: int, timeout: float = QUIET) -> Begun:
    """Return once the workers together have handled that many."""
    done = [0] * len(workers)
    enough = asyncio.Event()
    begun: list[Begun] = []

    async def follow(index: int, worker: Voice) -> None:
        while True:
            done[index] = await worker.hear("done", timeout)
            begun.append(Begun(time.monotonic(), sum(done)))
            if sum(done) >= count:
                enough.set()

    following = [asyncio.create_task(follow(index, worker)) for index, worker in enumerate(workers)]
    waiting = asyncio.create_task(enough.wait())
    try:
        await asyncio.wait([waiting, *following], return_when=asyncio.FIRST_COMPLETED)
        if not enough.is_set():
            [broken, *_] = [task for task in following if task.done()]
            await broken
    finally:
        for task in [waiting, *following]:
            task.cancel()
        await asyncio.gather(waiting, *following, return_exceptions=True)
    return begun[0]


# -- what is measured ----------------------------------------------------------------------------------------------


async def install(peer: Peer, url: str, size: int) -> None:
    process = await asyncio.create_subprocess_exec(*peer.command("install", url), cwd=peer.folder)
    if code := await process.wait():
        raise RuntimeError(f"{peer.title} could not make its tables: exit code {code}.")


async def fill(peer: Peer, url: str, size: int) -> None:
    await install(peer, url, size)
    async with _role(peer, "send", url) as [sender]:
        await sender.ask(f"make {size}")
        await sender.ask("enqueue")


async def fill_one_by_one(peer: Peer, url: str, size: int) -> None:
    await install(peer, url, size)
    async with _role(peer, "send", url) as [sender]:
        await sender.ask(f"send {size}")


async def create(peer: Peer, url: str, size: int) -> Measured:
    async with _role(peer, "send", url) as [sender]:
        await sender.ask(f"make {size}")
        with timed(url) as lap:
            await sender.ask("enqueue")
    return lap.measured(size)


async def drain(peer: Peer, url: str, size: int, *, processes: int = 1) -> Measured:
    async with _sender_and_workers(peer, url, processes) as (sender, workers):
        with timed(url) as lap:
            for worker in workers:
                worker.tell("drain")
            begun = await handled(workers, size)
            while await sender.ask("left"):
                await asyncio.sleep(0.002)
            ended = time.monotonic()
    rest = size - begun.count
    facts = {"begun_per_second": rest / (ended - begun.at)} if rest else {}
    return lap.measured(size, facts=facts)


async def send(peer: Peer, url: str, size: int) -> Measured:
    async with _role(peer, "send", url) as [sender]:
        await sender.ask(f"send {WARM_UP}")
        with timed(url) as lap:
            await sender.ask(f"send {size}")
    return lap.measured(size)


async def latency(peer: Peer, url: str, samples: int) -> Measured:
    async with _sender_and_workers(peer, url) as (sender, [worker]):
        worker.tell("run")

        async def once() -> Sent:
            called, committed = await sender.ask("stamp")
            return Sent(called, committed, await worker.hear("stamp"))

        return await latencies(url, samples, once)


async def batch(peer: Peer, url: str, size: int) -> Measured:
    """From the call to the first line of the callback, with one idle worker process."""
    async with _sender_and_workers(peer, url) as (sender, [worker]):
        worker.tell("run")
        await sender.ask("stamp")
        await worker.hear("stamp")
        creator = worker if peer.batch_in_worker else sender
        await creator.ask(f"make {size}")
        await asyncio.sleep(0.3)
        with timed(url) as lap:
            began = time.monotonic()
            creator.tell("batch")
            seconds = float(await worker.hear("callback", 2 * QUIET)) - began
    return Measured(size, seconds, lap.client_cpu, lap.server_cpu)


def cases(peer: Peer) -> list[Case]:
    def case(metric: str, title: str, measure: Any, prepare: Any = install, extent: Any = "size") -> Case:
        return Case(
            peer.name,
            metric,
            title,
            partial(measure, peer),
            prepare=partial(prepare, peer),
            migrated=False,
            extent=extent,
            most=peer.most.get(metric),
            store=peer.store,
        )

    found = [
        case("create", "bulk enqueue", create),
        case("drain", "drain, 1 process", drain, fill),
        case("drain-2", "drain, 2 processes", partial(drain, processes=2), fill),
        case("send", "one by one", send, extent="sends"),
        case("singles", "sent one by one, drained", drain, fill_one_by_one, extent="singles"),
        case("latency", "commit to start", latency, extent="samples"),
    ]
    return [*found, case("batch", "batch with callback", batch, extent="batch")] if peer.batches else found


CASES = [case for peer in PEERS for case in cases(peer)]
TITLES = {peer.name: peer.title for peer in PEERS}
