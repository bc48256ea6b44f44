"""A model of the rate: what cores, round trips, the disk, payloads and batches make of it. docs/scaling.md explains it.

python -m bench.scaling calibrate    # measures here, and writes bench/scaling.json
python -m bench.scaling predict      # prints the tables of docs/scaling.md from that file
"""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import psycopg

from bench.clock import settle_down, timed
from bench.delay import far_away
from bench.ours import DOMAIN, nothing
from busload import BatchCommand, CommandBus, Worker
from busload.testing import TestServer

KEPT = Path(__file__).with_name("scaling.json")
PAGE = Path(__file__).parents[1] / "docs/scaling.md"
BEGIN, END = "<!-- scaling -->", "<!-- /scaling -->"
"""Between these, the page has what `predict` prints."""
BASE_BYTES = 10
"""Bytes of the data of a command where nothing else is said."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a run was like. Times are seconds."""

    what: str
    """`send` one by one, `create` one batch, or `drain` by one process."""
    count: int
    cores: int = 2
    round_trip: float = 0.0
    disk: float = 0.0
    """How much longer a flush of the log takes than it does anyway."""
    payload: int = BASE_BYTES


@dataclass(frozen=True, slots=True)
class Run:
    """A run, and what it took per command: seconds of time, of both processors, and bytes of the log."""

    setting: Setting
    seconds: float
    client: float
    server: float
    wal: float


@dataclass(frozen=True, slots=True)
class Costs:
    """What one command takes, in seconds of a processor and bytes of the log."""

    client: float
    server: float
    wal: float
    client_byte: float = 0.0
    server_byte: float = 0.0
    wal_byte: float = 0.0
    round_trips: float = 0.0
    """Round trips that a send, or a command of a batch or a drain, waits for."""
    flushes: float = 0.0
    """Likewise, flushes of the log."""
    overlap: float = 1.0
    """How many processors one client and its server keep busy: up to 2, and less than 1 if both wait for the disk."""
    wait: float = 0.0
    """Seconds that a send waits besides all this: the flush of the log here, and being woken."""


@dataclass(frozen=True, slots=True)
class Model:
    """The costs of each kind of work."""

    costs: dict[str, Costs]
    call: Costs
    """What a call to create a batch takes besides its commands."""

    def seconds(self, at: Setting) -> float:
        """The time that one command takes by one client and its server, both on these cores."""
        cost, more = self.costs[at.what], max(0, at.payload - BASE_BYTES)
        busy = cost.client + cost.server + more * (cost.client_byte + cost.server_byte)
        spent = busy / min(at.cores, cost.overlap) + cost.wait
        spent += cost.round_trips * at.round_trip + cost.flushes * at.disk
        if at.what == "create":
            call = self.call
            once = call.client + call.server + call.round_trips * at.round_trip + call.flushes * at.disk + call.wait
            spent += once / at.count
        return spent

    def primary(self, cores: int, log: float, payload: int = BASE_BYTES) -> dict[str, float]:
        """Commands a second, created and drained, that a server with these cores and this log (bytes/s) can take.

        The clients are elsewhere, and enough. Each bound holds by itself; the lowest is where the primary ends.
        """
        more = max(0, payload - BASE_BYTES)
        server = sum(self.costs[what].server + more * self.costs[what].server_byte for what in ("create", "drain"))
        wal = sum(self.costs[what].wal + more * self.costs[what].wal_byte for what in ("create", "drain"))
        client = sum(self.costs[what].client + more * self.costs[what].client_byte for what in ("create", "drain"))
        return {"cores": cores / server, "log": log / wal, "a client core": 1 / client}


def fit(runs: Sequence[Run]) -> Model:
    """Read the costs off the runs: each from those that differ from the plain one in one thing only."""
    costs = {
        what: _fit(what, [run for run in runs if run.setting.what == what]) for what in ("send", "create", "drain")
    }
    small = [run for run in runs if run.setting.what == "create" and run.setting.count == 1]
    each = costs["create"].client + costs["create"].server
    cpu = max(0.0, statistics.median(run.client + run.server for run in small) - each)
    wall = statistics.median(run.seconds for run in small)
    near = Model(costs, Costs(cpu, 0.0, 0.0, wait=max(0.0, wall - cpu - each), flushes=1.0))
    far = [run for run in runs if run.setting.what == "create" and _only(run.setting, "round_trip")]
    later = sum((run.seconds - near.seconds(run.setting)) * run.setting.count for run in far)
    trips = max(1.0, later / sum(run.setting.round_trip for run in far)) if far else 1.0
    return replace(near, call=replace(near.call, round_trips=trips))


def _fit(what: str, runs: Sequence[Run]) -> Costs:
    plain = [run for run in runs if _plain(run.setting)]
    most = max(run.setting.count for run in plain)
    plain = [run for run in plain if run.setting.count == most]
    client, server, wal, wall = (
        statistics.median(getattr(run, name) for run in plain) for name in ("client", "server", "wal", "seconds")
    )

    def slope(varied: str, of: str = "seconds", base: float = wall) -> float:
        """How much one unit more of what was varied adds."""
        found = [run for run in runs if _only(run.setting, varied)]
        by = [_by(run.setting, varied) for run in found]
        return max(0.0, sum(getattr(run, of) - base for run in found) / sum(by)) if found else 0.0

    busy = client + server
    overlap = min(2.0, busy / wall) if what != "send" else 1.0
    return Costs(
        client,
        server,
        wal,
        slope("payload", "client", client),
        slope("payload", "server", server),
        slope("payload", "wal", wal),
        slope("round_trip") if what != "create" else 0.0,
        slope("disk") if what != "create" else 0.0,
        overlap,
        max(0.0, wall - busy) if what == "send" else 0.0,
    )


def _by(at: Setting, varied: str) -> float:
    value: float = getattr(at, varied)
    return value - BASE_BYTES if varied == "payload" else value


def _plain(at: Setting) -> bool:
    return at.cores == 2 and not at.round_trip and not at.disk and at.payload == BASE_BYTES


def _only(at: Setting, varied: str) -> bool:
    plain = {"round_trip": 0.0, "disk": 0.0, "payload": BASE_BYTES, "cores": 2}
    return all((getattr(at, name) != value) is (name == varied) for name, value in plain.items())


# -- measuring ---------------------------------------------------------------------------------------------------------


def settings(scale: float) -> list[Setting]:
    """The runs of a calibration; `scale` makes them smaller."""

    def many(count: int) -> int:
        return max(1, round(count * scale))

    sends, created, drained = many(400), many(50_000), many(50_000)
    return [
        *(Setting("send", sends, round_trip=far) for far in (0.0, 0.0, 0.002, 0.005)),
        *(Setting("send", sends, disk=disk) for disk in (0.002, 0.01)),
        *(Setting("create", 1) for _ in range(5)),
        *(Setting("create", count) for count in (100, many(10_000), created, created)),
        *(Setting("create", many(5_000), payload=size) for size in (1_000, 8_000)),
        Setting("create", created, cores=1),
        Setting("create", many(10_000), round_trip=0.02),
        *(Setting("drain", drained) for _ in range(2)),
        *(Setting("drain", drained, round_trip=far) for far in (0.005, 0.02)),
        Setting("drain", drained, disk=0.02),
        Setting("drain", many(5_000), payload=8_000),
        Setting("drain", drained, cores=1),
    ]


def measure(server: TestServer, at: Setting) -> Run:
    with (
        server.database() as dsn,
        _slow_disk(dsn, at.disk),
        _on_cores(dsn, at.cores),
        far_away(dsn, at.round_trip) as far,
    ):
        before = _log(dsn)
        seconds, client, server_cpu = asyncio.run(_WORK[at.what](dsn, far, at))
        wal = _log(dsn) - before - (0 if at.what != "drain" else _LOG_OF_FILL.pop())
    return Run(at, seconds / at.count, client / at.count, server_cpu / at.count, max(0, wal) / at.count)


_LOG_OF_FILL: list[int] = []
"""Bytes of the log that filling a queue has taken, before it is drained."""


async def _send(dsn: str, far: str, at: Setting) -> tuple[float, float, float]:
    async with CommandBus(far) as bus:
        for _ in range(20):
            await bus.send(DOMAIN, "Nothing", _data(at.payload))
        with timed(dsn) as lap:
            for _ in range(at.count):
                await bus.send(DOMAIN, "Nothing", _data(at.payload))
    return lap.seconds, lap.client_cpu, lap.server_cpu or 0.0


async def _create(dsn: str, far: str, at: Setting) -> tuple[float, float, float]:
    async with CommandBus(far) as bus:
        await bus.create_batch(DOMAIN, [BatchCommand("Nothing", data=_data(at.payload))])
        commands = [BatchCommand("Nothing", data=_data(at.payload)) for _ in range(at.count)]
        with timed(dsn) as lap:
            await bus.create_batch(DOMAIN, commands)
    return lap.seconds, lap.client_cpu, lap.server_cpu or 0.0


async def _drain(dsn: str, far: str, at: Setting) -> tuple[float, float, float]:
    before = _log(dsn)
    async with CommandBus(dsn) as bus:
        await bus.create_batch(DOMAIN, [BatchCommand("Nothing", data=_data(at.payload)) for _ in range(at.count)])
    _LOG_OF_FILL.append(_log(dsn) - before)
    async with CommandBus(far) as bus:
        bus.handler(DOMAIN, "Nothing")(nothing)
        with timed(dsn) as lap:
            settled = await Worker(bus).drain()
    assert settled == at.count, f"settled {settled} of {at.count}"
    return lap.seconds, lap.client_cpu, lap.server_cpu or 0.0


_WORK = {"send": _send, "create": _create, "drain": _drain}


def _data(size: int) -> dict[str, Any]:
    return {"n": 1, "text": "x" * (size - BASE_BYTES)} if size > BASE_BYTES else {"n": 1}


def _log(dsn: str) -> int:
    with psycopg.connect(dsn, autocommit=True) as conn:
        [(position,)] = conn.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn").fetchall()
    return int(position)


@contextmanager
def _slow_disk(dsn: str, seconds: float) -> Iterator[None]:
    """PostgreSQL sleeps so long before it flushes the log, whoever else commits."""

    def delay(micros: float) -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(f"ALTER SYSTEM SET commit_delay = {micros:.0f}".encode())
            conn.execute("ALTER SYSTEM SET commit_siblings = 0")
            conn.execute("SELECT pg_reload_conf()")
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                [(now,)] = conn.execute(
                    "SELECT setting::bigint FROM pg_settings WHERE name = 'commit_delay'"
                ).fetchall()
                if now == round(micros):
                    return
                time.sleep(0.05)
        raise RuntimeError("PostgreSQL has not taken commit_delay.")

    delay(1e6 * seconds)
    try:
        yield
    finally:
        delay(0)


@contextmanager
def _on_cores(dsn: str, count: int) -> Iterator[None]:
    """Let this process and the server, with all that it starts, run on so many processors."""
    ours = os.sched_getaffinity(0)
    postmaster = settle_down(dsn)
    if postmaster is None:
        raise RuntimeError("The server does not run on this machine.")
    few = set(sorted(ours)[:count])
    try:
        for pid in (0, postmaster):
            os.sched_setaffinity(pid, few)
        yield
    finally:
        for pid in (0, postmaster):
            os.sched_setaffinity(pid, ours)


# -- telling -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured, when, and on what."""

    date: str
    cores: int
    load: float
    """Processes that wanted a processor during the runs, on average: more than `cores` means a busy machine."""
    runs: list[Run] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path = KEPT) -> Calibration:
        found = json.loads(path.read_text(encoding="utf-8"))
        runs = [Run(Setting(**run.pop("setting")), **run) for run in found.pop("runs")]
        return cls(**found, runs=runs)

    def write(self, path: Path = KEPT) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def compared(calibration: Calibration) -> str:
    """What was measured beside what the model says, as a table."""
    model = fit(calibration.runs)
    lines = [
        "| | commands | cores | round trip | log flush | data | measured | model | off |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for at in dict.fromkeys(run.setting for run in calibration.runs):
        real = statistics.median(run.seconds for run in calibration.runs if run.setting == at)
        said = model.seconds(at)
        lines.append(
            f"| {at.what} | {at.count:,} | {at.cores} | {1000 * at.round_trip:g} ms | +{1000 * at.disk:g} ms | "
            f"{at.payload:,} B | {_rate(real)} | {_rate(said)} | {100 * (real / said - 1):+.0f} % |"
        )
    return "\n".join(lines)


def _rate(seconds: float) -> str:
    return f"{1 / seconds:,.0f}/s"


def predicted(calibration: Calibration) -> str:
    """What servers of several sizes should reach, as a table."""
    model = fit(calibration.runs)
    lines = [
        "| primary | log | data | its cores allow | its log allows | so it ends at | client cores for that |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for cores, log, payload in ((2, 100, 10), (8, 200, 10), (32, 500, 10), (32, 500, 1_000), (32, 2_000, 1_000)):
        bounds = model.primary(cores, log * 1e6, payload)
        ends = min(bounds["cores"], bounds["log"])
        lines.append(
            f"| {cores} cores | {log:,} MB/s | {payload:,} B | {_thousands(bounds['cores'])} | "
            f"{_thousands(bounds['log'])} | {_thousands(ends)} | {ends / bounds['a client core']:.0f} |"
        )
    return "\n".join(lines)


def _thousands(rate: float) -> str:
    return f"{round(rate, -3):,.0f}/s"


def table_of_costs(calibration: Calibration) -> str:
    """The costs that the model is made of, as a table."""
    model = fit(calibration.runs)
    lines = [
        "| | client µs | server µs | bytes of log | µs per kB of data | round trips | log flushes |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for what, cost in model.costs.items():
        per_kilobyte = 1e9 * (cost.client_byte + cost.server_byte)
        lines.append(
            f"| {what} | {1e6 * cost.client:,.1f} | {1e6 * cost.server:,.1f} | {cost.wal:,.0f} | {per_kilobyte:,.1f} | "
            f"{cost.round_trips:.3g} | {cost.flushes:.3g} |"
        )
    return "\n".join(lines)


def text(calibration: Calibration) -> str:
    """All tables, as docs/scaling.md has them."""
    busy = calibration.load > calibration.cores
    note = (
        " Other work kept the machine busy: trust the costs and the bytes, not the rates, and calibrate on a quiet one."
        if busy
        else ""
    )
    about = (
        f"Measured on {calibration.date}, on {calibration.cores} cores, with a load of {calibration.load:.1f}.{note}"
    )
    return "\n\n".join((about, table_of_costs(calibration), compared(calibration), predicted(calibration)))


@click.group()
def main() -> None:
    """A model of the rate, calibrated here."""


@main.command()
@click.option("--scale", default=1.0, show_default=True, help="Make all runs so many times as large.")
def calibrate(scale: float) -> None:
    """Measure on this machine, and keep what was measured in bench/scaling.json; takes a few minutes."""
    runs, loads = [], []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        home.chmod(0o755)
        with TestServer(home, config={"max_connections": "100"}) as server:
            for at in settings(scale):
                loads.append(os.getloadavg()[0])
                runs.append(measure(server, at))
                click.echo(f"{at}  {1 / runs[-1].seconds:,.0f}/s", err=True)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    Calibration(today, os.cpu_count() or 1, statistics.mean(loads), runs).write()


@main.command()
@click.option("--write", is_flag=True, help="Write them into docs/scaling.md, too.")
def predict(write: bool) -> None:
    """Print the tables of docs/scaling.md."""
    tables = text(Calibration.read())
    click.echo(tables)
    if write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{tables}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
