"""Tests of the shop, with the fixtures and helpers of busload. Run them with `pytest examples/testing`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from busload import CommandBus, TransientCommandError
from busload.testing import assert_not_sent, assert_sent, drain, eager, fail_next, kill_worker, run_handler, travel
from examples.testing.shop import bus, carrier, place_order


@pytest.fixture(autouse=True)
def empty_carrier() -> Iterator[None]:
    yield
    carrier.clear()


async def test_an_order_is_shipped(busload_bus: CommandBus) -> None:
    await place_order(7, weight=2)
    await assert_sent(busload_bus, "shipping", "Ship", {"order": 7}, task_key="order:7", times=1)
    await assert_not_sent(busload_bus, "mail", "OnItsWay")

    await drain(busload_bus)

    assert carrier == [7]
    await assert_sent(busload_bus, "mail", "OnItsWay", {"order": 7}, times=1)


async def test_a_carrier_that_refuses_is_asked_again_a_minute_later(busload_bus: CommandBus) -> None:
    with fail_next(busload_bus, "shipping", "Ship", TransientCommandError("The carrier is closed."), times=2):
        await place_order(7, weight=2)
        for _ in range(3):
            await drain(busload_bus)
            await travel(busload_bus, timedelta(minutes=1, seconds=15))

    [order] = await assert_sent(busload_bus, "shipping", "Ship", status="COMPLETED", times=1)
    assert order.result == {"attempt": 3}


async def test_a_handler_alone(busload_bus: CommandBus) -> None:
    assert await run_handler(busload_bus, "shipping", "Ship", {"order": 7, "weight": 2}) == {"attempt": 1}
    with pytest.raises(TransientCommandError, match="no more than 30 kg"):
        await run_handler(busload_bus, "shipping", "Ship", {"order": 8, "weight": 31})
    assert carrier == [7]


async def test_a_worker_that_dies_may_ship_twice(busload_bus: CommandBus) -> None:
    with kill_worker(busload_bus, "shipping", "Ship"):
        await place_order(7, weight=2)
        await drain(busload_bus)
    assert carrier == [7, 7]  # so the carrier should be told the command's id


async def test_at_once(busload_bus: CommandBus) -> None:
    with eager(busload_bus):
        await place_order(7, weight=2)
        assert carrier == [7]


async def test_the_application_sends_to_the_database_of_the_test(busload_bus: CommandBus) -> None:
    assert busload_bus is bus
    await assert_not_sent(busload_bus, "shipping", "Ship")  # nothing is left of the tests before
