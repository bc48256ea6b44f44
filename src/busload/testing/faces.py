"""One function for both faces of the bus: it returns an awaitable for a `CommandBus`, and a value for a sync one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias, TypeVar, cast

from busload.bus import CommandBus
from busload.errors import InvalidOperationError, kind_of
from busload.postgres.callers_connection import (
    AnyConnection,
    AnySyncConnection,
    perform_any,
    perform_in_threads,
    underneath,
    underneath_in_threads,
)
from busload.postgres.plan import Plan
from busload.sync.bus import SyncCommandBus

AnyBus: TypeAlias = CommandBus | SyncCommandBus
T = TypeVar("T")


def performed(bus: AnyBus, plan: Plan[T], conn: AnyConnection | None = None) -> Any:
    """What comes of a plan, in one transaction: that of `conn`, if it is given.

    The bus is opened if it is closed: an application may have closed it before a test looks at what it has sent.
    """
    if isinstance(bus, SyncCommandBus):
        if (joined := callers_connection(bus, conn)) is not None:
            return perform_in_threads(underneath_in_threads(joined), plan)
        return bus.open(wait=None).database.in_transaction(plan)
    refuse_no_bus(bus)
    return _performed(bus, plan, conn)


async def _performed(bus: CommandBus, plan: Plan[T], conn: AnyConnection | None) -> T:
    if conn is not None:
        return await perform_any(await underneath(conn), plan)
    return await (await bus.open(wait=None)).database.in_transaction(plan)


def callers_connection(bus: SyncCommandBus, conn: AnyConnection | None) -> AnySyncConnection | None:
    """The connection whose transaction the test is in: `conn`, or one that the bus knows of, as that of Django does."""
    return bus.database.callers_connection(cast("AnySyncConnection | None", conn))


def refuse_no_bus(bus: object) -> None:
    """Refuse what is no bus, before anything is done."""
    if not isinstance(bus, CommandBus | SyncCommandBus):
        raise InvalidOperationError(f"The first argument must be a CommandBus or SyncCommandBus, found {kind_of(bus)}.")


async def awaited(answer: Awaitable[T]) -> T:
    """What an awaitable comes to."""
    return await answer


def in_own_loop(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run something async for a caller that does not await; in a thread if an event loop runs in this one already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    ended: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            ended.append(asyncio.run(work()))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="busload-testing")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return ended[0]
