"""The two faces of the bus agree, and neither works on a database it does not know."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from contextlib import AsyncExitStack
from datetime import timedelta
from enum import StrEnum
from typing import Any, get_args
from uuid import uuid4

import pytest

import busload
from busload import (
    BatchCommand,
    CommandBus,
    HandlerContext,
    Settings,
    SyncCommandBus,
    SyncHandlerContext,
    SyncTaskTracker,
    TaskTracker,
    Worker,
)
from busload.batches import OpenBatch
from busload.batches.batch import BatchStatus, BatchStatusName, CreateOptions
from busload.buffers import Buffer
from busload.buffers.buffer import Buffers
from busload.commands.command import CommandStatus, CommandStatusName, SendOptions
from busload.dispatch import Outbox
from busload.dispatch.strategy import DispatchName, Strategy
from busload.errors import InvalidOperationError, SchemaOutdatedError
from busload.jobs import FinishedStage
from busload.jobs.api import Jobs
from busload.jobs.job import JobStatus, JobStatusName
from busload.limits.api import Domains, Limits
from busload.postgres.schema.migrate import MIGRATIONS
from busload.sync import SyncBuffer, SyncFinishedStage, SyncOpenBatch, SyncOutbox
from busload.sync.buffer import Buffers as SyncBuffers
from busload.sync.context import SyncHandlerTransaction
from busload.sync.jobs import Jobs as SyncJobs
from busload.sync.limits import Domains as SyncDomains
from busload.sync.limits import Limits as SyncLimits
from busload.sync.troubleshooting import SyncTroubleshooting
from busload.testing import TestServer
from busload.troubleshooting.api import Troubleshooting
from busload.worker.context import HandlerTransaction
from tests.given import DOMAIN, closed_to_newcomers

PAIRS: list[tuple[type, type]] = [
    (CommandBus, SyncCommandBus),
    (Troubleshooting, SyncTroubleshooting),
    (Outbox, SyncOutbox),
    (Jobs, SyncJobs),
    (Limits, SyncLimits),
    (Domains, SyncDomains),
    (Buffers, SyncBuffers),
    (OpenBatch, SyncOpenBatch),
    (Buffer, SyncBuffer),
    (FinishedStage, SyncFinishedStage),
    (TaskTracker, SyncTaskTracker),
    (HandlerContext, SyncHandlerContext),
    (HandlerTransaction, SyncHandlerTransaction),
]
TRANSLATED = {
    "Publisher": "ThreadPublisher",
    "AsyncConnection | Connection | None": "Connection | None",
    "AnyConnection | None": "AnySyncConnection | None",
    "AnyConnection": "AnySyncConnection",
    "AsyncConnection | Connection": "Connection",
    "AsyncConnection": "Connection",
    "AsyncPool": "Pool",
    "BatchCompletionCallback | BatchCommand | None": "SyncBatchCompletionCallback | BatchCommand | None",
    "AsyncIterator[BatchMetadata]": "Iterator[BatchMetadata]",
    "AsyncIterator[CommandMetadata]": "Iterator[CommandMetadata]",
    "OpenBatch": "SyncOpenBatch",
    "Buffer": "SyncBuffer",
    "CommandBus": "SyncCommandBus",
    "HandlerTransaction": "SyncHandlerTransaction",
    "AsyncConnectionPool[AsyncConnection]": "ConnectionPool[Connection]",
}
DUNDERS = {"__aenter__": "__enter__", "__aexit__": "__exit__"}


def public(face: type) -> dict[str, Any]:
    named = {name: member for name, member in inspect.getmembers_static(face) if not name.startswith("_")}
    entering = {
        DUNDERS.get(name, name): vars(face)[name] for name in (*DUNDERS, *DUNDERS.values()) if name in vars(face)
    }
    return named | entering


def signature(function: Any, translated: dict[str, str]) -> list[tuple[str, Any, Any, str]]:
    parts = inspect.signature(function)
    shown = [
        (p.name, p.kind, p.default, translated.get(str(p.annotation), str(p.annotation)))
        for p in parts.parameters.values()
    ]
    returned = str(parts.return_annotation)
    return [*shown, ("return", None, None, translated.get(returned, returned))]


@pytest.mark.parametrize(("face", "sync_face"), PAIRS, ids=lambda face: face.__name__)
def test_both_faces_have_the_same_methods_with_the_same_parameters(face: type, sync_face: type) -> None:
    """One plan serves both"""
    members, sync_members = public(face), public(sync_face)
    assert members.keys() == sync_members.keys()
    for name, member in members.items():
        other = sync_members[name]
        if isinstance(member, property):
            assert signature(member.fget, TRANSLATED) == signature(other.fget, {}), name
        elif callable(member):
            assert signature(member, TRANSLATED) == signature(other, {}), name
            assert not inspect.iscoroutinefunction(other), name
            assert not inspect.isasyncgenfunction(other), name


@pytest.mark.parametrize(
    "face", [face for face, _ in PAIRS if face is not HandlerTransaction], ids=lambda face: face.__name__
)
def test_every_public_method_says_what_its_parameters_mean(face: type) -> None:
    """In its own docstring or in that of its class; typed options have a docstring each"""
    for name, member in inspect.getmembers(face):
        method = member.fget if isinstance(member, property) else member
        if name.startswith("_") or not inspect.isroutine(method):
            continue
        said = (inspect.getdoc(method) or "") + (face.__doc__ or "")
        assert inspect.getdoc(method), f"{name} has no docstring"
        for parameter in inspect.signature(method).parameters:
            assert parameter in ("self", "options") or f"`{parameter}" in said, f"{name} does not explain {parameter}"


def test_the_calls_that_were_promised_have_their_names_and_defaults() -> None:
    create = inspect.signature(CommandBus.create_batch).parameters
    assert list(create)[:3] == ["self", "domain", "commands"]
    for option in ("on_complete", "conn"):
        assert (create[option].kind, create[option].default) == (inspect.Parameter.KEYWORD_ONLY, None)
    assert create["options"].annotation == "Unpack[CreateOptions]"
    assert {"batch_id", "name", "custom_data"} <= CreateOptions.__optional_keys__
    for method in (CommandBus.list_batches, CommandBus.list_batch_commands, Troubleshooting.list):
        parameters = inspect.signature(method).parameters
        assert (parameters["limit"].default, parameters["offset"].default) == (100, 0)
    send = inspect.signature(CommandBus.send).parameters
    assert send["options"].annotation == "Unpack[SendOptions]"
    promised = {"command_id", "task_key", "priority", "run_at", "max_attempts", "reply_to", "correlation_id"}
    assert promised | {"dedup", "batch_id"} <= SendOptions.__optional_keys__
    for name in ("CommandBus", "SyncCommandBus", "Worker", "BatchCommand", "BatchMetadata", "RetryPolicy"):
        assert name in busload.__all__


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (BatchStatusName, BatchStatus),
        (CommandStatusName, CommandStatus),
        (JobStatusName, JobStatus),
        (DispatchName, Strategy),
    ],
)
def test_a_name_that_a_type_checker_takes_is_one_that_exists(names: Any, kind: type[StrEnum]) -> None:
    assert list(get_args(names)) == [member.value for member in kind]


async def test_an_option_that_does_not_exist_is_refused_with_those_that_do(bus: CommandBus) -> None:
    """A type checker sees it earlier"""
    opened: Any = bus.open_batch
    for call, named in (
        (bus.send(DOMAIN, "Debit", priorty=1), "send"),  # type: ignore[call-arg]
        (bus.create_batch(DOMAIN, [BatchCommand("Debit")], title="x"), "create_batch"),  # type: ignore[call-arg]
        (bus.troubleshooting.retry_group(DOMAIN, "0" * 12, dry=True), "retry_group"),  # type: ignore[call-arg]
    ):
        with pytest.raises(TypeError, match=rf"{named}\(\) has no option '\w+'\. Its options are \w+, .*\."):
            await call
    with pytest.raises(TypeError, match=r"open_batch\(\) has no option 'title'"):
        opened(DOMAIN, title="x")
    with pytest.raises(TypeError, match=r"buffer\(\) has no option 'sise'\. Its options are .*max_age.*size"):
        bus.buffer("contacts", sise=7)  # type: ignore[call-arg]


@pytest.fixture
def empty_dsn(server: TestServer) -> Iterator[str]:
    """A database that busload's schema was never applied to."""
    with server.database(migrated=False) as dsn:
        yield dsn


async def test_a_bus_on_an_unmigrated_database_says_what_to_do(empty_dsn: str, settings: Settings) -> None:
    """Reading and writing, both faces; migrating puts it right"""
    versions = [migration.version for migration in MIGRATIONS]
    async with CommandBus(empty_dsn, settings=settings) as bus:
        for call in (
            bus.send(DOMAIN, "Debit"),
            bus.create_batch(DOMAIN, [BatchCommand("Debit")]),
            bus.get_batch(DOMAIN, uuid4()),
            bus.troubleshooting.list(DOMAIN),
            bus.wait_batch(DOMAIN, uuid4(), timeout=5),
        ):
            with pytest.raises(SchemaOutdatedError, match="busload schema migrate") as refused:
                await call
            assert (refused.value.found, refused.value.needed) == (0, versions[-1])
        with SyncCommandBus(empty_dsn, settings=settings) as sync_bus:
            with pytest.raises(SchemaOutdatedError):
                sync_bus.send(DOMAIN, "Debit")
            assert [migration.version for migration in await bus.migrate()] == versions
            assert await bus.migrate() == []
            assert sync_bus.migrate() == []
            assert sync_bus.send(DOMAIN, "Debit").created
        assert (await bus.send(DOMAIN, "Debit")).created


@pytest.mark.parametrize("opened", [True, False])
async def test_a_worker_on_an_unmigrated_database_does_not_start(
    empty_dsn: str, settings: Settings, opened: bool
) -> None:
    """Leaves a bus as it found it"""
    bus = CommandBus(empty_dsn, settings=settings)
    if opened:
        await bus.open()
    worker = Worker(bus, domains=[DOMAIN])
    for start in (worker.run, worker.drain):
        with pytest.raises(SchemaOutdatedError):
            await start()
    worker.stop()
    if opened:
        assert bus.pool
    else:
        with pytest.raises(InvalidOperationError, match="not open"):
            _ = bus.pool
    await bus.close()


async def test_a_bus_that_is_not_open_says_so(dsn: str, settings: Settings) -> None:
    bus, sync_bus = CommandBus(dsn, settings=settings), SyncCommandBus(dsn, settings=settings)
    with pytest.raises(InvalidOperationError, match="not open"):
        await bus.send(DOMAIN, "Debit")
    with pytest.raises(InvalidOperationError, match="not open"):
        sync_bus.send(DOMAIN, "Debit")


async def test_a_closed_bus_may_be_opened_again(dsn: str, settings: Settings) -> None:
    bus = CommandBus(dsn, settings=settings)
    for _ in range(2):
        async with bus:
            assert await bus.open() is bus
            assert (await bus.send(DOMAIN, "Debit")).created
    sync_bus = SyncCommandBus(dsn, settings=settings)
    for _ in range(2):
        with sync_bus:
            assert sync_bus.open() is sync_bus
            assert sync_bus.send(DOMAIN, "Debit").created


async def test_many_first_calls_check_the_schema_on_the_connections_they_have(dsn: str) -> None:
    """If each call needed another connection for the check, there would be more than the server allows."""
    async with CommandBus(dsn) as bus, AsyncExitStack() as held:
        for _ in range(bus.settings.pool_size):
            await held.enter_async_context(bus.pool.connection())
        await held.aclose()
        with closed_to_newcomers(dsn):
            assert await asyncio.gather(*(bus.get_command(DOMAIN, uuid4()) for _ in range(500))) == [None] * 500
        assert bus.database.schema_checked
        assert bus.pool.size <= bus.settings.pool_size


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"pool_size": 0}, "pool_size must be a whole number from 1 on, found 0"),
        ({"pool_size": "x"}, "pool_size must be a whole number"),
        ({"pool_timeout": 5}, "pool_timeout must be a timedelta, found 5"),
        ({"response_timeout": timedelta(seconds=-1)}, "response_timeout must be more than zero"),
        ({"lock_timeout": timedelta(seconds=-1)}, "lock_timeout must be at least zero"),
        ({"limits": 5}, "limits must be of type InputLimits, found 5"),
        ({"home": "here"}, "home must be of type Path, found 'here'"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_at_once(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Settings(**wrong)
