"""`busload worker`: runs the commands of an application, in one process or several."""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar, NoReturn

import click
from click.core import ParameterSource

from busload.bus import CommandBus
from busload.cli import WAIT, Seconds, did_you_mean, options
from busload.cli.metrics_server import Address, address, pages, serve_pages
from busload.cli.options import Decorator
from busload.cli.processes import ASKED_TO_STOP, Processes, end_with_parent
from busload.cli.with_verbs import WithVerbs
from busload.cli.worker_list import ls, stop
from busload.errors import DatabaseUnavailableError, InvalidOperationError, kind_of
from busload.postgres.connection import connection_errors_explained
from busload.settings import WorkerSettings, from_environment
from busload.sync.bus import SyncCommandBus
from busload.sync.connection import connect_within
from busload.telemetry.logs import set_up_logging
from busload.worker import Worker
from busload.worker.os_signals import Signals

log = logging.getLogger("busload")

DEFAULTS = WorkerSettings()
LOG_LEVELS = ("debug", "info", "warning", "error")
LEAVE_WITHIN = 2.0
"""Seconds that a process has to end once everything was settled or handed back."""

PROGRAM = "busload.program"
"""Where the context keeps the command line, without options, that starts a process of --processes; default ours."""

LEFT_BEHIND = 3
"""The exit code of a process some of whose handlers did not end in time."""


def _duration(ctx: click.Context, param: click.Parameter, text: str) -> timedelta:
    """`0.05`, `0.05s` and `50ms` are the same."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?|\.\d{1,6})(ms|s|)", text.replace(" ", ""), re.ASCII)
    if found is None:
        raise click.BadParameter(f"found {text!r}, wanted seconds or milliseconds, e.g. 0.05 or 50ms")
    return timedelta(seconds=float(found[1]) / (1000 if found[2] == "ms" else 1))


def _count(option: str, most: int, default: int, help: str | None = None, **more: Any) -> Decorator:
    return click.option(option, type=click.IntRange(1, most), default=default, help=help, **more)


def _time(option: str, setting: str, help: str, least: float = 0) -> Decorator:
    return click.option(
        *(option, setting),
        type=Seconds(least),
        callback=lambda ctx, param, seconds: timedelta(seconds=seconds),
        default=getattr(DEFAULTS, setting).total_seconds(),
        metavar="SECONDS",
        help=help,
    )


class _WithList(WithVerbs):
    verbs: ClassVar = {"ls": ls, "stop": stop}


@click.command(cls=_WithList)
@click.argument("application", metavar="MODULE:BUS")
@click.option("--domains", metavar="D1,D2", help="Which domains to serve; default all that have handlers.")
@options.transport
@_count("--concurrency", 100_000, DEFAULTS.concurrency, "How many commands a process runs at a time.")
@_count(
    "--threads",
    10_000,
    DEFAULTS.most_threads,
    "How many handlers written with `def` a process runs at a time: each takes a thread.",
    show_default="cores + 4, at most 32",
)
@_count("--processes", 256, 1, "Worker processes to start; one that dies is replaced.")
@_time("--grace", "grace", "How long running commands may go on once the worker is told to stop.")
@_time("--wait", "wait_for_database", "How long to wait, at the start, for a database that cannot be reached.")
@_time("--lease", "lease_for", "How long a process may be silent before others take over its commands.", least=1)
@click.option(
    "--prefetch",
    callback=_duration,
    default=f"{DEFAULTS.prefetch.total_seconds() * 1000:g}ms",
    metavar="SECONDS|ms",
    help="How much work to claim before slots are free; 0 claims only what can start at once.",
)
@click.option(
    "--settle",
    type=click.Choice(["coalesced", "immediate"]),
    default=DEFAULTS.settle,
    help="Whether results wait a moment to be written together, or go at once.",
)
@options.age("--keep-for", "Remove what ended longer ago: 30d, 12h, 90m, 1w; default never. See `busload prune`.")
@click.option("--archive", is_flag=True, help="Move what --keep-for removes to busload.archive.")
@click.option(
    *("--metrics", "metrics_at"),
    callback=address,
    metavar="ADDRESS:PORT",
    help="Serve /metrics for Prometheus there, and /healthz and /readyz for probes, e.g. 127.0.0.1:9464; with several "
    "processes, each takes the next port.",
)
@click.option(
    "--log-level", type=click.Choice(LOG_LEVELS, case_sensitive=False), default="info", help="The least level to log."
)
@click.option("--log-json", is_flag=True, help="Log one JSON object per line.")
@click.option("--parent", type=int, hidden=True, help="End when this process has ended.")
@click.pass_context
def worker(
    ctx: click.Context,
    /,
    application: str,
    domains: str | None,
    processes: int,
    metrics_at: Address | None,
    log_level: str,
    log_json: bool,
    parent: int | None,
    **given: Any,
) -> None:
    """Run the commands of an application: BUS is the CommandBus in MODULE that its handlers are registered on.

    On SIGTERM or Ctrl-C it stops claiming, lets running commands finish within the grace time, settles every result
    and hands the rest back. A second signal does not wait for what runs, and a third one ends the process at once.

    Exit code 0: all went well. 1: there was an error, for example results that could not be settled. 2: the options
    were wrong. 3: handlers did not end in time; the log names their commands, which were handed back.
    130: Ctrl-C came during the start.

        busload worker app:bus
        busload worker app:bus --domains payments,crm --processes 2
        busload worker app:bus --metrics 127.0.0.1:9464

    Which workers there are, is told by `busload worker ls`; `busload worker stop NAME` asks one to stop.
    """
    if parent is not None:
        end_with_parent(parent)
    set_up_logging(log_level, as_json=log_json)
    bus = load_bus(application)
    served = _domains(domains, bus, application)
    if given["archive"] and given["keep_for"] is None:
        raise click.UsageError("--archive needs --keep-for, which says how old what is moved must be, e.g. 30d.")
    if WAIT in ctx.meta and ctx.get_parameter_source("wait_for_database") is ParameterSource.DEFAULT:
        given["wait_for_database"] = timedelta(seconds=ctx.meta[WAIT])  # it was given before `worker`
    try:
        settings = WorkerSettings(**given)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    serving = Worker(bus, domains=served, settings=settings)
    # Before anything is claimed: a port in use must not be found out by a worker that runs already.
    listening = _listen(metrics_at, processes)
    if processes == 1:
        _serve(serving, listening, supervised=parent is not None)
        return
    own = {**given, "domains": ",".join(served), "log_level": log_level, "log_json": log_json}
    program = ctx.meta.get(PROGRAM) or [sys.executable, "-m", "busload.cli", "worker", application]
    words = [*program, *_command_line(ctx, own)]

    def command_line(number: int) -> list[str]:
        return words if metrics_at is None else [*words, "--metrics", str(metrics_at.after(number))]

    with ExitStack() as stack:
        # Refuse here what every process would refuse, and keep an embedded server while one of them is replaced.
        shards = [shard for shard in bus.shards if any(bus.shard_of(domain) is shard for domain in served)]
        for shard in shards:
            probe = stack.enter_context(
                SyncCommandBus(shard.database.given_dsn, settings=shard.settings).open(wait=None)
            )
            # Of several databases, one that is away keeps only its own domains waiting.
            with suppress(*([DatabaseUnavailableError] if len(shards) > 1 else [])):
                _refuse_database(probe, 0.0 if len(shards) > 1 else given["wait_for_database"].total_seconds())
        code = asyncio.run(Processes(processes, command_line, _time_to_stop(settings)).run())
    raise click.exceptions.Exit(code)


def _refuse_database(probe: SyncCommandBus, wait: float) -> None:
    with (
        connection_errors_explained(probe.dsn, "--wait says how long a worker waits for it"),
        connect_within(probe.dsn, wait) as conn,
    ):
        probe.database.check_schema(conn)


def _command_line(ctx: click.Context, values: dict[str, Any]) -> list[str]:
    """The command line of a process that is to have these values."""
    words: list[str] = []
    for option in ctx.command.params:
        value = values.get(option.name or "")
        if isinstance(value, timedelta):
            exactly = f"{value.total_seconds():f}".rstrip("0").rstrip(".")
            words += [option.opts[0], f"{exactly}s" if option.name == "keep_for" else exactly]
        elif value is True:
            words.append(option.opts[0])
        elif value is not None and value is not False:
            words += [option.opts[0], str(value)]
    return words


def _time_to_stop(settings: WorkerSettings) -> timedelta:
    """How long a worker may take to stop: then something is wrong with it."""
    return settings.grace + 3 * settings.deadline + timedelta(seconds=LEAVE_WITHIN)


def load_bus(application: str, *, handlers: bool = True) -> CommandBus | SyncCommandBus:
    """The bus that `module:attribute` names, looked for in the current folder too, as `python -m` does.

    With `handlers` it must have some.
    """
    found = _imported(application)
    if not isinstance(found, CommandBus | SyncCommandBus):
        raise _wrong(f"{application!r} is {kind_of(found)}, wanted a CommandBus or SyncCommandBus")
    if handlers and not found.handlers.domains:
        raise _wrong(f"{application!r} has no handlers; register some with @bus.handler(domain, command_type)")
    url = None if found.transport is None else found.transport.url
    for variable, used, what, option in (
        ("BUSLOAD_DATABASE_URL", found.database.given_dsn, "database", "--dsn"),
        ("BUSLOAD_TRANSPORT_URL", url, "transport", "--transport"),
    ):
        if variable in click.get_current_context().meta and used != from_environment(variable):
            raise _wrong(f"{application!r} names a {what} of its own, which {option} does not change")
    return found


def _imported(application: str) -> object:
    module_name, colon, path = application.partition(":")
    if not module_name or not colon or not path:
        raise _wrong(f"found {application!r}, wanted e.g. app:bus")
    if module_name.startswith(".") or "/" in module_name or "\\" in module_name:
        likely = _module_of(module_name)
        hint = f". Did you mean '{likely}:{path}'?" if likely else "; start busload in the folder that has the module"
        raise _wrong(f"found the path {module_name!r}, wanted a module as Python imports it, e.g. app:bus{hint}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _unimportable(application, error) from error
        likely = f". Did you mean '{module_name.removesuffix('.py')}:{path}'?" if module_name.endswith(".py") else ""
        missing = f"there is no module {error.name!r}, neither in {here} nor among the installed ones"
        raise _wrong(f"{missing}{likely}") from None
    except Exception as error:
        raise _unimportable(application, error) from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise _wrong(f"{module_name!r} has no {path!r}.{did_you_mean(name, dir(found))}")
        found = getattr(found, name)
    return found


def _module_of(path: str) -> str | None:
    """The name by which Python imports the file of this path; None if it lies elsewhere than below this folder."""
    here = Path.cwd()
    file = Path(path.replace("\\", "/").removesuffix(".py")).expanduser()
    below = Path(os.path.normpath(here / file))
    if not below.is_relative_to(here):
        return None
    return ".".join(below.relative_to(here).parts).lstrip(".") or None


def _unimportable(application: str, error: Exception) -> InvalidOperationError:
    """The application has raised while it was imported: the error says where."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    where = f", in line {frames[-1].lineno} of {frames[-1].filename}" if len(frames) > 1 else ""
    return InvalidOperationError(
        f"{application!r} cannot be imported: {type(error).__name__}: {error}{where}. Mend that; "
        f"`python -c 'import {application.partition(':')[0]}'` shows the same."
    )


def _wrong(message: str) -> click.BadParameter:
    return click.BadParameter(message, param_hint="MODULE:BUS")


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
    """The socket of a single process. Several processes have one each; here these are only tried."""
    if metrics_at is None:
        return None
    if processes == 1:
        return metrics_at.listen()
    for number in range(processes):
        metrics_at.after(number).listen().close()
    return None


def _serve(worker: Worker, listening: socket.socket | None, *, supervised: bool) -> None:
    """Serve until told to stop, and end the process even if handlers do not.

    The exit code of a `supervised` process says whether an operator has asked it to stop.
    """

    async def serve() -> None:
        async with nullcontext() if listening is None else serve_pages(pages(worker), listening):
            await worker.run()

    def code(number: int) -> int:
        return number + ASKED_TO_STOP if supervised and worker.asked_to_stop else number

    # A second signal may come while the first is heard, in the same thread: an Event would wait for its own lock then.
    told_to_stop: SimpleQueue[int] = SimpleQueue()

    def hear(count: int) -> None:
        worker.stop(hurry=count > 1)
        told_to_stop.put(count)

    # Started here: a signal may come while this thread holds the lock that starting another thread needs.
    threading.Thread(target=_end_stuck, args=(worker, told_to_stop, code), name="busload-stuck", daemon=True).start()
    worker.on_asked_to_stop = partial(hear, 1)
    # What was imported stays for good. A full collection would walk through it, and block the loop for 30 ms or more.
    gc.collect()
    gc.freeze()
    with Signals(hear, for_good=True):
        runner = asyncio.Runner()
        try:
            runner.run(serve())
        except Exception as error:
            if worker.left_behind or code(0):
                log.error("%s", error)
                _end_at_once(code(1))
            raise
        finally:
            if worker.left_behind:  # the loop would wait for them before it closes
                _end_at_once(code(LEFT_BEHIND))
            runner.close()
    if code(0):
        raise click.exceptions.Exit(code(0))


def _end_stuck(worker: Worker, told_to_stop: SimpleQueue[int], code: Callable[[int], int]) -> None:
    """End the process if the worker does not stop in time. Most likely a handler blocks the event loop then."""
    told_to_stop.get()
    time.sleep(_time_to_stop(worker.settings).total_seconds() - LEAVE_WITHIN / 2)
    log.critical("The worker could not stop: its event loop is blocked. The process ends now")
    worker.abandon()
    _end_at_once(code(LEFT_BEHIND))


def _end_at_once(code: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
