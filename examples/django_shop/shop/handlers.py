"""What workers run. BUSLOAD names this module, so a worker has all handlers."""

from typing import Any

from busload import Command, SyncHandlerContext
from shop.bus import bus
from shop.models import Order

__all__ = ["bus"]


@bus.handler("shop", "ShipOrder")
def ship_order(command: Command, ctx: SyncHandlerContext) -> dict[str, Any]:
    Order.objects.filter(id=command.data["order"]).update(shipped=True)
    return {"shipped": command.data["order"]}
