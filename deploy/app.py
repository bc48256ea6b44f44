"""The application that the files in this folder deploy: put your own in its place."""

from __future__ import annotations

from busload import Command, CommandBus, HandlerContext

bus = CommandBus()  # the database is in BUSLOAD_DATABASE_URL


@bus.handler("shop", "ShipOrder")
async def ship(command: Command, ctx: HandlerContext) -> dict[str, int]:
    return {"shipped": command.data["order"]}
