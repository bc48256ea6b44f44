"""A shop with Litestar: an order and the command that ships it are written by one transaction, or neither is.

    SHOP_WORKER=1 litestar --app examples.litestar_shop.app:app run    # with a worker inside, for development
    litestar --app examples.litestar_shop.app:app run                  # in production, with the worker beside it:
    busload worker examples.litestar_shop.app:bus

Without BUSLOAD_DATABASE_URL an embedded PostgreSQL starts.
"""

from __future__ import annotations

import os
from typing import Any
from uuid import UUID

import msgspec
from litestar import Litestar, get, post
from litestar.exceptions import ClientException, NotFoundException
from litestar.params import FromPath, JSONBody

from busload import Command, CommandBus, HandlerContext
from busload.integrations.litestar import Bus, BusloadPlugin

bus = CommandBus()


class NewOrder(msgspec.Struct):
    item: str
    amount: int


@bus.handler("shop", "ShipOrder")
async def ship_order(command: Command, ctx: HandlerContext) -> dict[str, Any]:
    async with ctx.transaction() as conn:  # what is written here commits together with the command's completion
        await conn.execute("UPDATE shop_order SET shipped_at = now() WHERE id = %s", [command.data["order"]])
    return {"shipped": command.data["order"]}


@post("/orders", status_code=202)
async def create_order(data: JSONBody[NewOrder], bus: Bus) -> dict[str, Any]:
    async with bus.pool.connection() as conn, conn.transaction():
        insert = "INSERT INTO shop_order (item, amount) VALUES (%s, %s) RETURNING id"
        [order] = await (await conn.execute(insert, [data.item, data.amount])).fetchone() or [0]
        sent = await bus.send("shop", "ShipOrder", {"order": order}, conn=conn)
        if data.amount > 100:  # neither order nor command exists
            raise ClientException(f"There are not {data.amount} of {data.item}.", status_code=409)
    return {"order": order, "command_id": sent.command_id}


@get("/orders/{command_id:uuid}")
async def get_order(command_id: FromPath[UUID], bus: Bus) -> dict[str, Any]:
    command = await bus.get_command("shop", command_id)
    if command is None:
        raise NotFoundException("There is no such order.")
    return {"status": command.status, "result": command.result}


async def create_table() -> None:
    async with bus.pool.connection() as conn:
        await conn.execute(
            "CREATE TABLE IF NOT EXISTS shop_order (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
            "item text NOT NULL, amount integer NOT NULL, shipped_at timestamptz)"
        )


plugin = BusloadPlugin(bus, worker=os.environ.get("SHOP_WORKER") == "1", migrate=True)
app = Litestar([create_order, get_order], plugins=[plugin], on_startup=[create_table])
