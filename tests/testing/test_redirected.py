"""A bus that is a global of its application, redirected to the database of a test."""

from __future__ import annotations

import pytest

from busload import CommandBus, SyncCommandBus
from busload.errors import InvalidOperationError
from busload.integrations.self_opening_bus import SelfOpeningBus
from busload.testing import TestServer, assert_not_sent, assert_sent
from busload.testing.application_bus import application_at, bus_of_test

URL = "redis://nowhere.invalid"


def test_a_bus_goes_to_another_database_and_comes_back(dsn: str, server: TestServer) -> None:
    bus = SyncCommandBus(dsn)
    events = bus.buffer("events", size=10)
    jobs, handlers = bus.jobs, bus.handlers
    with server.database() as other, bus.redirected(other), bus:
        assert bus.dsn == other
        bus.handler("payments", "Debit")(lambda command, ctx: None)
        bus.send("payments", "Debit")
        events.add(1)
        assert events.status().waiting == 1
        assert_sent(bus, "payments", "Debit", times=1)
    with bus:
        assert (bus.dsn, bus.jobs, bus.handlers, bus.handlers.names) == (dsn, jobs, handlers, [])
        assert events.status().waiting == 0
        assert_not_sent(bus, "payments", "Debit")


def test_a_bus_that_opens_itself_goes_to_another_database_and_comes_back(dsn: str, server: TestServer) -> None:
    """It looks for its database whenever it opens, also in the block: a test must not write to that of the users."""
    bus = SelfOpeningBus(dsn)
    bus.send("payments", "Debit")  # as a module may do when it is imported
    with server.database() as other, application_at(bus, other):
        assert bus.send("payments", "Debit").created
        assert bus.dsn == other
        bus.close()
        bus.send("payments", "Debit")
        assert_sent(bus, "payments", "Debit", times=2)
    assert_sent(bus, "payments", "Debit", times=1)
    assert bus.dsn == dsn
    bus.close()


def test_an_open_bus_is_not_redirected(sync_bus: SyncCommandBus, dsn: str) -> None:
    with pytest.raises(InvalidOperationError, match="The bus is open"):
        sync_bus.redirected(dsn).__enter__()
    assert sync_bus.database.is_open


async def test_the_application_uses_the_database_of_the_test_beside_a_bus_of_the_other_face(
    dsn: str, server: TestServer
) -> None:
    """A `CommandBus` whose test has the fixture `busload_sync_bus`; within it, `busload_bus` is that bus."""
    application = CommandBus(dsn)
    with server.database() as other, application_at(application, other):
        assert application.dsn == other  # a test with `busload_dsn` alone
        about = (application, other, None, None)
        with bus_of_test(SyncCommandBus, *about) as sync_bus, sync_bus, bus_of_test(CommandBus, *about) as same:
            assert same is application
            async with application:
                await application.send("payments", "Debit")
            assert_sent(sync_bus, "payments", "Debit", times=1)
    async with application:
        assert application.dsn == dsn
        await assert_not_sent(application, "payments", "Debit")


def test_an_application_that_opened_itself_in_a_test_is_closed(dsn: str, server: TestServer) -> None:
    application = SyncCommandBus(dsn)
    with server.database() as other, bus_of_test(CommandBus, application, other, URL, None) as bus:
        assert (bus.dsn, application.dsn, application.given_transport) == (other, other, URL)
        application.open()
    assert (application.dsn, application.given_transport, application.database.is_open) == (dsn, None, False)
