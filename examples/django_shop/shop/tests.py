"""The tests of the shop: `python manage.py test`."""

from django.test import TestCase

from busload.integrations.django_app.models import Batch, Command
from busload.integrations.django_app.testing import CommandsTestCase, run_commands
from busload.testing import drain
from shop.bus import bus
from shop.models import Order


class OrderTest(CommandsTestCase):
    """With a real worker: what is sent is committed."""

    def test_an_order_is_shipped(self) -> None:
        answer = self.client.post("/orders", {"item": "kettle", "amount": 1}, content_type="application/json")
        assert answer.status_code == 202
        assert run_commands() == 1
        assert Order.objects.get().shipped
        assert self.client.get(f"/orders/{answer.json()['command_id']}").json()["status"] == "COMPLETED"

    def test_an_order_that_is_refused_leaves_nothing(self) -> None:
        answer = self.client.post("/orders", {"item": "kettle", "amount": 101}, content_type="application/json")
        assert answer.status_code == 409
        assert (Order.objects.count(), Command.objects.count(), Batch.objects.count()) == (0, 0, 0)


class SendingTest(TestCase):
    """Without a worker, in the transaction of the test: quick, and rolled back at its end."""

    def test_an_order_sends_its_command(self) -> None:
        bus.send("shop", "ShipOrder", {"order": 1})
        assert [one.data for one in Command.objects.all()] == [{"order": 1}]

    def test_an_order_is_shipped_in_the_transaction_of_the_test(self) -> None:
        order = Order.objects.create(item="kettle", amount=1)
        bus.send("shop", "ShipOrder", {"order": order.id})
        assert drain(bus) == 1
        assert Order.objects.get().shipped
