"""The two faces of the bus agree, and neither works on a database it does not know."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

import busload
from busload import (
    BatchCommand,
    Buffer,
    CommandBus,
    FinishedStage,
    HandlerContext,
    InvalidOperationError,
    OpenBatch,
    Outbox,
    SchemaOutdated,
    Settings,
    SyncBuffer,
    SyncCommandBus,
    SyncFinishedStage,
    SyncHandlerContext,
    SyncOpenBatch,
    SyncOutbox,
    SyncTaskTracker,
    TaskTracker,
    Worker,
)
from busload.store import connection
from busload.store.schema.migrate import migrations
from busload.testing import TestServer
from busload.troubleshooting import SyncTroubleshooting, Troubleshooting
from busload.worker.context import HandlerTransaction, SyncHandlerTransaction
from tests.given import DOMAIN

PAIRS: list[tuple[type, type]] = [
    (CommandBus, SyncCommandBus),
    (Troubleshooting, SyncTroubleshooting),
    (Outbox, SyncOutbox),
    (OpenBatch, SyncOpenBatch),
    (Buffer, SyncBuffer),
    (FinishedStage, SyncFinishedStage),
    (TaskTracker, SyncTaskTracker),
    (HandlerContext, SyncHandlerContext),
    (HandlerTransaction, SyncHandlerTransaction),
]
TRANSLATED = {
    "AsyncConnection | Connection | None": "Connection | None",
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
    """S4-20 to S4-24, S081: one plan serves both"""
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


def test_the_calls_that_were_promised_have_their_names_and_defaults() -> None:
    """S4-21 to S4-24, DESIGN.md §5"""
    create = inspect.signature(CommandBus.create_batch).parameters
    assert list(create)[:3] == ["self", "domain", "commands"]
    for option in ("batch_id", "name", "custom_data", "on_complete", "conn"):
        assert (create[option].kind, create[option].default) == (inspect.Parameter.KEYWORD_ONLY, None)
    for method in (CommandBus.list_batches, CommandBus.list_batch_commands, Troubleshooting.list):
        parameters = inspect.signature(method).parameters
        assert (parameters["limit"].default, parameters["offset"].default) == (100, 0)
    send = inspect.signature(CommandBus.send).parameters
    assert {"command_id", "task_key", "priority", "run_at", "max_attempts", "reply_to", "correlation_id"} <= set(send)
    for name in ("CommandBus", "SyncCommandBus", "Worker", "BatchCommand", "BatchMetadata", "RetryPolicy"):
        assert name in busload.__all__


@pytest.fixture
def empty_dsn(server: TestServer) -> Iterator[str]:
    """A database that busload's schema was never applied to."""
    with server.database(migrated=False) as dsn:
        yield dsn


async def test_a_bus_on_an_unmigrated_database_says_what_to_do(empty_dsn: str, settings: Settings) -> None:
    """S046–S050, S001: reading and writing, both faces; migrating puts it right"""
    versions = [migration.version for migration in migrations()]
    async with CommandBus(empty_dsn, settings=settings) as bus:
        for call in (
            bus.send(DOMAIN, "Debit"),
            bus.create_batch(DOMAIN, [BatchCommand("Debit")]),
            bus.get_batch(DOMAIN, uuid4()),
            bus.troubleshooting.list(DOMAIN),
            bus.wait_batch(DOMAIN, uuid4(), timeout=5),
        ):
            with pytest.raises(SchemaOutdated, match="busload schema migrate") as refused:
                await call
            assert (refused.value.found, refused.value.needed) == (0, versions[-1])
        with SyncCommandBus(empty_dsn, settings=settings) as sync_bus:
            with pytest.raises(SchemaOutdated):
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
    """S046–S050: and leaves a bus as it found it"""
    bus = CommandBus(empty_dsn, settings=settings)
    if opened:
        await bus.open()
    worker = Worker(bus, domains=[DOMAIN])
    for start in (worker.run, worker.drain):
        with pytest.raises(SchemaOutdated):
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


async def test_many_first_calls_check_the_schema_on_the_connections_they_have(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If each needed another one for it, there would be more than the server allows."""

    async def another(dsn: str) -> None:
        pytest.fail("connected for the check alone")

    bus = await CommandBus(dsn).open()
    monkeypatch.setattr(connection, "connect_async", another)
    async with bus:
        assert await asyncio.gather(*(bus.get_command(DOMAIN, uuid4()) for _ in range(500))) == [None] * 500
        assert bus._schema_checked
        assert bus.pool.size <= bus.settings.pool_size
