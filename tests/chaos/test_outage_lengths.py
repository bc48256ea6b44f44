"""How soon bus and worker are back after an outage, however long it lasted."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import pytest

from busload import BusloadError, Command, CommandBus, HandlerContext, SyncCommandBus, Worker, WorkerSettings
from tests.chaos.harness import Server, folder
from tests.given import DOMAIN

PROMISED = 5.0
"""Seconds from the return of the server."""


@dataclass(frozen=True, slots=True)
class Back:
    """Seconds from the server's return until a send was accepted, in both faces, and a command completed."""

    sent: float
    sent_by_thread: float
    completed: float


async def outage(server: Server, seconds: float) -> Back:
    """Stop the server for so long, while both faces send all the time."""
    ran: list[float] = []
    with SyncCommandBus(server.dsn) as sync_bus:
        async with CommandBus(server.dsn) as bus:

            @bus.handler(DOMAIN, "Debit")
            async def debit(command: Command, ctx: HandlerContext) -> None:
                ran.append(time.monotonic())

            worker = Worker(bus, settings=WorkerSettings())
            running = asyncio.create_task(worker.run())
            await bus.send(DOMAIN, "Debit")
            await asyncio.to_thread(sync_bus.send, DOMAIN, "Debit")
            while len(ran) < 2:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(server.stop)
            sending = asyncio.create_task(_send(bus))
            by_thread = asyncio.create_task(asyncio.to_thread(_send_by_thread, sync_bus))
            await asyncio.sleep(seconds)
            await asyncio.to_thread(server.start)
            returned = time.monotonic()
            sent, sent_by_thread = await asyncio.gather(sending, by_thread)
            while len(ran) < 3:
                await asyncio.sleep(0.01)
            worker.stop()
            await running
    return Back(*(max(0.0, at - returned) for at in (sent, sent_by_thread, ran[2])))


async def _send(bus: CommandBus) -> float:
    """Return when a send was accepted."""
    while True:
        try:
            await bus.send(DOMAIN, "Debit")
            return time.monotonic()
        except BusloadError:
            await asyncio.sleep(0.05)


def _send_by_thread(bus: SyncCommandBus) -> float:
    while True:
        try:
            bus.send(DOMAIN, "Debit")
            return time.monotonic()
        except BusloadError:
            time.sleep(0.05)


LONG = [pytest.param(seconds, PROMISED, marks=pytest.mark.chaos) for seconds in (5.0, 35.0, 75.0)]


@pytest.mark.parametrize(("seconds", "within"), [(4.0, 30.0), *LONG])  # a machine that runs all tests may be slow
async def test_bus_and_worker_are_back_within_seconds_however_long_the_outage(seconds: float, within: float) -> None:
    with folder() as path, Server(path / "server") as server:
        back = await outage(server, seconds)
    print(
        f"outage of {seconds} s: next accepted send {back.sent:.1f} s ({back.sent_by_thread:.1f} s by a thread), "
        f"next completed command {back.completed:.1f} s after the server's return"
    )
    assert max(back.sent, back.sent_by_thread, back.completed) <= within
