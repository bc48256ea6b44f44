"""A shop with FastAPI: an order and the command that ships it are written by one transaction, or neither is.

    SHOP_WORKER=1 uvicorn examples.fastapi_shop.app:app      # with a worker inside, for development
    uvicorn examples.fastapi_shop.app:app                       # in production, with the worker beside it:
    busload worker examples.fastapi_shop.app:bus

Without BUSLOAD_DATABASE_URL an embedded PostgreSQL starts. The dashboard is at /ops/busload/.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field

from busload import BatchCommand, Command, CommandBus, HandlerContext
from busload.dashboard import app as dashboard
from busload.integrations.fastapi import Bus, health_router, lifespan

bus = CommandBus()


class NewOrder(BaseModel):
    item: str = Field(min_length=1)
    amount: int = Field(gt=0)


class Accepted(BaseModel):
    order: int
    command_id: UUID


@bus.handler("shop", "ShipOrder")
async def ship_order(command: Command, ctx: HandlerContext) -> dict[str, Any]:
    async with ctx.transaction() as conn:  # what is written here commits together with the command's completion
        await conn.execute("UPDATE shop_order SET shipped_at = now() WHERE id = %s", [command.data["order"]])
    return {"shipped": command.data["order"]}


@bus.handler("shop", "SendReminder")
async def send_reminder(command: Command, ctx: HandlerContext) -> None:
    print(f"Reminder for order {command.data['order']}")


@asynccontextmanager
async def own_lifespan(app: FastAPI) -> AsyncGenerator[dict[str, Any], None]:
    with_worker = os.environ.get("SHOP_WORKER") == "1"
    async with lifespan(bus, worker=with_worker, migrate=True)(app) as state:
        async with bus.pool.connection() as conn:
            await conn.execute(
                "CREATE TABLE IF NOT EXISTS shop_order (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
                "item text NOT NULL, amount integer NOT NULL, shipped_at timestamptz)"
            )
        yield state


app = FastAPI(title="Shop", lifespan=own_lifespan)
app.include_router(health_router())
app.mount("/ops/busload", dashboard(bus))


@app.post("/orders", status_code=202)
async def create_order(new: NewOrder, bus: Bus) -> Accepted:
    async with bus.pool.connection() as conn, conn.transaction():
        insert = "INSERT INTO shop_order (item, amount) VALUES (%s, %s) RETURNING id"
        [order] = await (await conn.execute(insert, [new.item, new.amount])).fetchone() or [0]
        if new.amount > 100:
            raise HTTPException(409, f"There are not {new.amount} of {new.item}.")  # nothing was written
        sent = await bus.send("shop", "ShipOrder", {"order": order}, conn=conn)
    return Accepted(order=order, command_id=sent.command_id)


@app.get("/orders/{command_id}")
async def get_order(command_id: UUID, bus: Bus) -> dict[str, Any]:
    command = await bus.get_command("shop", command_id)
    if command is None:
        raise HTTPException(404, "There is no such order.")
    return {"status": command.status, "result": command.result}


@app.post("/reminders", status_code=202)
async def remind_everybody(bus: Bus) -> dict[str, Any]:
    async with bus.pool.connection() as conn:
        orders = await (await conn.execute("SELECT id FROM shop_order WHERE shipped_at IS NULL")).fetchall()
    if not orders:
        raise HTTPException(409, "No order waits.")
    commands = [BatchCommand("SendReminder", data={"order": order}) for (order,) in orders]
    return {"batch_id": await bus.create_batch("shop", commands, name="Reminders")}
