"""The same tests with pytest-django: `pip install pytest-django`, then `pytest`."""

import pytest
from django.test import Client
from shop.bus import bus
from shop.models import Order

from busload.integrations.django_app import DjangoCommandBus
from busload.testing import assert_not_sent, assert_sent, drain


@pytest.mark.django_db
def test_an_order_is_shipped_in_the_transaction_of_the_test(client: Client) -> None:
    """Quick, and rolled back at its end."""
    client.post("/orders", {"item": "kettle", "amount": 1}, content_type="application/json")
    assert_sent(bus, "shop", "ShipOrder", times=1)
    assert drain(bus) == 1
    assert Order.objects.get().shipped


@pytest.mark.django_db
def test_an_order_that_is_refused_sends_nothing(client: Client) -> None:
    answer = client.post("/orders", {"item": "kettle", "amount": 101}, content_type="application/json")
    assert answer.status_code == 409
    assert_not_sent(bus, "shop", "ShipOrder")


@pytest.mark.parametrize("item", ["kettle", "teapot"])
def test_an_order_is_shipped_by_a_worker(client: Client, busload_django_bus: DjangoCommandBus, item: str) -> None:
    """What is sent is committed, and deleted after the test."""
    client.post("/orders", {"item": item, "amount": 1}, content_type="application/json")
    assert drain(busload_django_bus) == 1
    assert_sent(busload_django_bus, "shop", "ShipOrder", status="COMPLETED", times=1)
    assert Order.objects.get().shipped
