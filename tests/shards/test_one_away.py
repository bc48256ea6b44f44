"""One of three servers is stopped: the others go on, what is told of all names it, and it comes back by itself."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest

from busload import BatchCommand, CommandBus, Settings, SyncCommandBus
from busload.errors import DatabaseUnavailableError, DatabaseUnusableError
from busload.health.health import HealthCode, HealthState
from tests.shards.conftest import Three


@pytest.fixture
def settings() -> Settings:
    return Settings(pool_timeout=timedelta(seconds=2), poll_every=timedelta(milliseconds=200))


async def test_a_bus_opens_without_a_server_that_is_away_and_finds_it_later(
    three: Three, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    three.third.stop()
    with caplog.at_level(logging.WARNING):
        async with CommandBus(three.mapping, settings=settings) as bus:
            assert "The bus opens without one of its databases" in caplog.text
            assert (await bus.send("payments", "Do")).created
            assert (await bus.send("orders", "Do")).created
            with pytest.raises(DatabaseUnavailableError):
                await bus.send("crm", "Do")
            three.third.start()
            assert (await bus.send("crm", "Do")).created


def test_the_sync_face_opens_without_it_too(three: Three, settings: Settings) -> None:
    three.third.stop()
    with SyncCommandBus(three.mapping, settings=settings) as bus:
        assert bus.send("payments", "Do").created
        with pytest.raises(DatabaseUnavailableError):
            bus.send("crm", "Do")


async def test_a_bus_whose_servers_are_all_away_does_not_open(three: Three, settings: Settings) -> None:
    three.third.stop()
    bus = CommandBus({"crm": three.rest}, settings=settings)
    with pytest.raises(DatabaseUnavailableError, match="cannot be reached"):
        await bus.open()
    assert not bus.database.is_open


async def test_what_is_told_of_all_names_the_database_that_is_away(three: Three, settings: Settings) -> None:
    name = three.rest.partition("@/")[2].partition("?")[0]
    async with CommandBus(three.mapping, settings=settings) as bus:
        batch_id = await bus.create_batch("orders", [BatchCommand("Do")])
        assert (await bus.health()).state is not HealthState.CRITICAL
        three.third.stop()
        for ask in (lambda: bus.list_batches(None), bus.overview, lambda: bus.list_commands(), bus.domains.list):
            with pytest.raises(DatabaseUnavailableError, match=rf"{name} at .* does not answer.*bus\.shards"):
                await ask()
        assert (await bus.get_batch("orders", batch_id)) is not None
        health = await bus.health(timeout=2)
        assert health.state is HealthState.CRITICAL
        away = [one for one in health.reasons if one.code is HealthCode.DATABASE_UNREACHABLE]
        assert [one.message.startswith(f"{name} at ") for one in away] == [True]
        findings = [
            one for one in (await bus.doctor(timeout=20)).findings if one.code is HealthCode.DATABASE_UNREACHABLE
        ]
        assert [one.found.startswith(f"{name} at ") for one in findings] == [True]


async def test_a_wrong_password_or_database_is_told_when_the_bus_opens(three: Three, settings: Settings) -> None:
    name = three.orders.partition("@/")[2].partition("?")[0]
    bus = CommandBus({"payments": three.payments, "*": three.orders.replace(name, "nobody_made_it")}, settings=settings)
    with pytest.raises(DatabaseUnusableError, match="nobody_made_it"):
        await bus.open()
    assert not bus.database.is_open
