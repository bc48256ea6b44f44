"""`busload worker`: runs the commands of an application, in one process or several."""

from __future__ import annotations

import asyncio
import importlib
import logging
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, NoReturn

import click
import msgspec
from click.core import ParameterSource

from busload.bus import CommandBus, SyncCommandBus
from busload.cli import DSN, WAIT, did_you_mean
from busload.cli.database import transport_option
from busload.cli.metrics import Address, MetricsServer, address
from busload.cli.prune import age
from busload.errors import kind_of
from busload.settings import WorkerSettings
from busload.store import connection
from busload.worker import Worker
from busload.worker.signals import Signals

log = logging.getLogger("busload")

DEFAULTS = WorkerSettings()
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before a process that ended by itself is replaced; the pause doubles until one lives for a minute."""
LEAVE_WITHIN = 2.0
"""Seconds that a process has to end once everything was settled or handed back."""

LEFT_BEHIND = 3
"""The exit code of a process some of whose handlers did not end in time."""

_PR_SET_PDEATHSIG = 1


def duration(ctx: click.Context, param: click.Parameter, text: str) -> timedelta:
    """`0.05`, `0.05s` and `50ms` are the same."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?|\.\d{1,6})(ms|s|)", text.replace(" ", ""), re.ASCII)
    if found is None:
        raise click.BadParameter(f"found {text!r}, wanted seconds or milliseconds, e.g. 0.05 or 50ms")
    return timedelta(seconds=float(found[1]) / (1000 if found[2] == "ms" else 1))


@click.command()
@click.argument("application", metavar="MODULE:BUS")
@click.option("--domains", metavar="D1,D2", help="Which domains to serve; default all that have handlers.")
@transport_option
@click.option(
    "--concurrency",
    type=click.IntRange(1, 100_000),
    default=DEFAULTS.concurrency,
    show_default=True,
    help="How many commands a process runs at a time.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 10_000),
    default=DEFAULTS.most_threads,
    show_default="cores + 4, at most 32",
    help="How many of them may be of handlers written with `def`: each takes a thread.",
)
@click.option("--processes", type=click.IntRange(1, 256), default=1, show_default=True)
@click.option(
    "--grace",
    type=click.FloatRange(0, 86_400),
    default=DEFAULTS.grace.total_seconds(),
    show_default=True,
    metavar="SECONDS",
    help="How long running commands may go on once the worker is told to stop.",
)
@click.option(
    "--wait",
    type=click.FloatRange(0, 86_400),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait, at the start, for a database that cannot be reached.",
)
@click.option(
    "--lease",
    type=click.FloatRange(1, 86_400),
    default=DEFAULTS.lease_for.total_seconds(),
    show_default=True,
    metavar="SECONDS",
    help="After how much silence of a process others take over its commands.",
)
@click.option(
    "--prefetch",
    callback=duration,
    default=f"{DEFAULTS.prefetch.total_seconds() * 1000:g}ms",
    show_default=True,
    metavar="SECONDS|ms",
    help="How much work to hold ahead of the free slots; 0 claims only what can start at once.",
)
@click.option(
    "--settle",
    type=click.Choice(["coalesced", "immediate"]),
    default=DEFAULTS.settle,
    show_default=True,
    help="Whether results wait a moment to be written together, or go at once.",
)
@click.option(
    "--keep-for",
    callback=age,
    metavar="AGE",
    help="Remove what ended longer ago: 30d, 12h, 90m, 1w; default never. See `busload prune`.",
)
@click.option("--archive", is_flag=True, help="Move what --keep-for removes to busload.archive.")
@click.option(
    "--metrics",
    "metrics_at",
    callback=address,
    metavar="ADDRESS:PORT",
    help="Serve /metrics for Prometheus there, e.g. 127.0.0.1:9464; more processes take the ports after it.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    default="info",
    show_default=True,
)
@click.option("--log-json", is_flag=True, help="Log one JSON object per line.")
@click.option("--parent", type=int, hidden=True, help="End when this process has ended.")
def worker(
    application: str,
    domains: str | None,
    concurrency: int,
    threads: int,
    processes: int,
    grace: float,
    wait: float,
    lease: float,
    prefetch: timedelta,
    settle: Literal["coalesced", "immediate"],
    keep_for: timedelta | None,
    archive: bool,
    metrics_at: Address | None,
    log_level: str,
    log_json: bool,
    parent: int | None,
) -> None:
    """Run the commands of an application: BUS is the CommandBus in MODULE that its handlers are registered on.

    On SIGTERM or Ctrl-C it stops claiming, lets running commands finish within the grace time, settles every result
    and hands the rest back. A second signal does not wait for what runs, and a third one ends the process at once.

    Exit code 0: all went well. 1: there was an error, for example results that could not be settled. 2: the options
    were wrong. 3: handlers did not end in time; the log names their commands, which were handed back.

    \b
        busload worker app:bus
        busload worker app:bus --domains payments,crm --processes 2
        busload worker app:bus --metrics 127.0.0.1:9464
    """
    if parent is not None:
        end_with(parent)
    set_up_logging(log_level, as_json=log_json)
    bus = load(application)
    served = _domains(domains, bus, application)
    if archive and keep_for is None:
        raise click.UsageError("--archive needs --keep-for, which says how old what is moved must be, e.g. 30d.")
    ctx = click.get_current_context()
    if ctx.get_parameter_source("wait") is ParameterSource.DEFAULT:
        wait = ctx.meta.get(WAIT, wait)
    if any(map(math.isnan, (lease, grace, wait))):
        raise click.UsageError("--lease, --grace and --wait take a number of seconds, found nan.")
    settings = WorkerSettings(
        concurrency=concurrency,
        threads=threads,
        lease_for=timedelta(seconds=lease),
        grace=timedelta(seconds=grace),
        wait_for_database=timedelta(seconds=wait),
        prefetch=prefetch,
        settle=settle,
        keep_for=keep_for,
        archive=archive,
    )
    try:
        serving = Worker(bus, domains=served, settings=settings)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    # Before anything is claimed: a port in use must not be found out by a worker that runs already.
    listening = _listen(metrics_at, processes)
    if processes == 1:
        _serve(serving, listening)
        return
    options = [
        "--domains",
        ",".join(served),
        "--concurrency",
        concurrency,
        "--threads",
        threads,
        "--grace",
        grace,
        "--lease",
        lease,
    ]
    options += ["--wait", wait, "--prefetch", f"{prefetch.total_seconds():f}", "--settle", settle]
    options += [] if keep_for is None else ["--keep-for", f"{keep_for.total_seconds():.0f}s"]
    options += ["--archive"] if archive else []
    options += ["--log-level", log_level, *(["--log-json"] if log_json else [])]

    def arguments(number: int) -> list[str]:
        metrics = [] if metrics_at is None else ["--metrics", metrics_at.after(number)]
        return [application, *map(str, [*options, *metrics])]

    with SyncCommandBus(bus._dsn, settings=bus.settings).open(wait=None) as probe:
        # Refuse here what every process would refuse, and keep an embedded server while one of them is replaced.
        with (
            connection.told(probe.dsn, "--wait says how long a worker waits for it"),
            connection.connect_within(probe.dsn, wait) as conn,
        ):
            probe._check_schema(conn)
        longest = settings.grace + 3 * settings.deadline + timedelta(seconds=LEAVE_WITHIN)
        code = asyncio.run(Processes(processes, arguments, longest).run())
    raise click.exceptions.Exit(code)


def load(application: str) -> CommandBus | SyncCommandBus:
    """The bus that `module:attribute` names, looked for in the current folder too, as `python -m` does."""
    module_name, colon, path = application.partition(":")
    if not module_name or not colon or not path:
        raise click.BadParameter(f"found {application!r}, wanted e.g. app:bus", param_hint="MODULE:BUS")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        message = f"there is no module {error.name!r}, neither in {here} nor among the installed ones"
        raise click.BadParameter(message, param_hint="MODULE:BUS") from None
    for name in path.split("."):
        if not hasattr(found, name):
            message = f"{module_name!r} has no {path!r}.{did_you_mean(name, dir(found))}"
            raise click.BadParameter(message, param_hint="MODULE:BUS")
        found = getattr(found, name)
    if not isinstance(found, CommandBus | SyncCommandBus):
        message = f"{application!r} is {kind_of(found)}, wanted a CommandBus or SyncCommandBus"
        raise click.BadParameter(message, param_hint="MODULE:BUS")
    if not found.handlers.domains:
        message = f"{application!r} has no handlers; register some with @bus.handler(domain, command_type)"
        raise click.BadParameter(message, param_hint="MODULE:BUS")
    given = os.environ.get("BUSLOAD_DATABASE_URL")
    context = click.get_current_context()
    if DSN in context.meta and found._dsn != given:
        message = f"{application!r} names a database of its own, which --dsn does not change"
        raise click.BadParameter(message, param_hint="MODULE:BUS")
    by_option = context.get_parameter_source("transport") is ParameterSource.COMMANDLINE
    if by_option and (found.transport is None or found.transport._url != os.environ.get("BUSLOAD_TRANSPORT_URL")):
        message = f"{application!r} names a transport of its own, which --transport does not change"
        raise click.BadParameter(message, param_hint="MODULE:BUS")
    return found


class Processes:
    """Keeps some worker processes running, each a `busload worker` of its own, until it is told to stop."""

    def __init__(self, count: int, arguments: Callable[[int], Sequence[str]], stop_within: timedelta) -> None:
        self._count, self._arguments, self._stop_within = count, arguments, stop_within
        self._running: set[asyncio.subprocess.Process] = set()

    async def run(self) -> int:
        """Return the exit code: 0 if every process that was told to stop has stopped cleanly, else the highest."""
        self._stopping, self._loop = asyncio.Event(), asyncio.get_running_loop()
        with Signals(self._hear, for_good=True):
            codes = await asyncio.gather(*(self._keep_one(number) for number in range(self._count)))
        return max(codes)

    async def _keep_one(self, number: int) -> int:
        """One place for a process: whoever ends there without having been told to is replaced."""
        pause = FIRST_PAUSE
        while not self._stopping.is_set():
            began = time.monotonic()
            process = await self._spawn(number)
            code = await self._wait_for(process)
            if self._stopping.is_set():
                # Killed by our signal: it had not begun to serve, or had ended to.
                return 0 if -code in (signal.SIGTERM, signal.SIGINT) else code if code >= 0 else 1
            pause = FIRST_PAUSE if time.monotonic() - began > 60 else pause
            log.error("Worker process %d ended with %d, starting another in %.1f s", process.pid, code, pause)
            await self._pause(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return 0

    async def _spawn(self, number: int) -> asyncio.subprocess.Process:
        # In a process group of its own, so that Ctrl-C at a terminal reaches it once: through us.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "busload.cli", "worker", *self._arguments(number), "--parent", str(os.getpid())),
            process_group=0,
        )
        self._running.add(process)
        log.info("Started worker process %d", process.pid)
        if self._stopping.is_set():
            process.terminate()
        return process

    async def _wait_for(self, process: asyncio.subprocess.Process) -> int:
        """Its exit code; one that hangs after it was told to stop is killed."""
        ended = asyncio.create_task(process.wait())
        told = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({ended, told}, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        try:
            async with asyncio.timeout(self._stop_within.total_seconds()):
                code = await asyncio.shield(ended)
        except TimeoutError:
            log.error("Worker process %d did not stop in time and is killed", process.pid)
            process.kill()
            code = await ended
        self._running.discard(process)
        return code

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass

    def _hear(self, count: int) -> None:
        # Another signal the second time: two of one kind that arrive together are one.
        self._loop.call_soon_threadsafe(self._stop, signal.SIGTERM if count == 1 else signal.SIGINT)

    def _stop(self, number: signal.Signals) -> None:
        self._stopping.set()
        for process in self._running:
            if process.returncode is None:
                process.send_signal(number)


def end_with(parent: int) -> None:
    """Have the kernel tell this process to stop when its parent ends, however that ends. Only Linux can."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        raise click.ClickException(f"Process {parent}, which started this one, has ended.")


def set_up_logging(level: str, *, as_json: bool) -> None:
    """The library logs and leaves it to programs where that goes; this program writes it to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else logging.Formatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])


_TEXT = "%(asctime)s %(levelname)-7s %(process)d %(name)s: %(message)s"


class JsonLines(logging.Formatter):
    """One object a line: the usual fields, whatever was given as `extra`, and the traceback as `exception`."""

    _USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {name: value for name, value in vars(record).items() if name not in self._USUAL}
        line |= {
            "at": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        if record.exc_text:
            line["exception"] = record.exc_text
        elif record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        try:
            return msgspec.json.encode(line, enc_hook=str).decode()
        except Exception:  # a lone surrogate, or an `extra` that is no JSON at all: better as text than not at all
            return msgspec.json.encode({name: ascii(value) for name, value in line.items()}).decode()


def _domains(text: str | None, bus: CommandBus | SyncCommandBus, application: str) -> list[str]:
    if text is None:
        return bus.handlers.domains
    named = [name.strip() for name in text.split(",")]
    unknown = [name for name in named if name not in bus.handlers.domains]
    if unknown:
        known = ", ".join(bus.handlers.domains)
        message = f"{application!r} has no handler in {', '.join(map(repr, unknown))}, only in {known}"
        raise click.BadParameter(message, param_hint="--domains")
    return list(dict.fromkeys(named))


def _listen(metrics_at: Address | None, processes: int) -> socket.socket | None:
    """The socket of a process of its own; of several, each has its own, and here they are only tried."""
    if metrics_at is None:
        return None
    if processes == 1:
        return metrics_at.listen()
    for number in range(processes):
        metrics_at.after(number).listen().close()
    return None


def _serve(worker: Worker, listening: socket.socket | None) -> None:
    """Serve until told to stop, and end the process even if handlers do not."""

    async def serve() -> None:
        if listening is None:
            await worker.run()
            return
        async with MetricsServer(worker.metrics, listening):
            await worker.run()

    def hear(count: int) -> None:
        worker.stop(hurry=count > 1)
        if count == 1:
            settings = worker.settings
            longest = settings.grace + 3 * settings.deadline + timedelta(seconds=LEAVE_WITHIN / 2)
            watch = threading.Timer(longest.total_seconds(), _end_stuck, [worker])
            watch.daemon = True
            watch.start()

    with Signals(hear, for_good=True):
        runner = asyncio.Runner()
        try:
            runner.run(serve())
        except Exception as error:
            if worker.left_behind:
                log.error("%s", error)
                _end_at_once(1)
            raise
        finally:
            if worker.left_behind:  # the loop would wait for them before it closes
                _end_at_once(LEFT_BEHIND)
            runner.close()


def _end_stuck(worker: Worker) -> None:
    """The worker was told to stop and had its time. Most likely a handler blocks the event loop."""
    log.critical("The worker could not stop: its event loop is blocked. The process ends now")
    worker._abandon()
    _end_at_once(LEFT_BEHIND)


def _end_at_once(code: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
