"""A shop with Flask: an order and the command that ships it are written by one transaction, or neither is.

    flask --app examples.flask_shop.app busload migrate
    SHOP_WORKER=1 flask --app examples.flask_shop.app run       # with a worker inside, for development
    flask --app examples.flask_shop.app run                     # in production, with the worker beside it:
    flask --app examples.flask_shop.app busload worker

Without BUSLOAD_DATABASE_URL an embedded PostgreSQL starts.
"""

from __future__ import annotations

import os
from typing import Any
from uuid import UUID

from flask import Flask, abort, current_app, request

from busload import Command, SyncHandlerContext
from busload.integrations.flask import Busload, SelfOpeningBus, current_bus

bus = SelfOpeningBus()
busload = Busload(bus)


@bus.handler("shop", "ShipOrder")
@busload.with_app_context
def ship_order(command: Command, ctx: SyncHandlerContext) -> dict[str, Any]:
    with ctx.transaction() as conn:  # what is written here commits together with the command's completion
        conn.execute("UPDATE shop_order SET shipped_at = now() WHERE id = %s", [command.data["order"]])
    return {"shipped": command.data["order"], "by": current_app.config["SHOP"]}


def create_app() -> Flask:
    app = Flask(__name__)
    app.config["SHOP"] = "the corner shop"
    app.config["BUSLOAD_WORKER"] = os.environ.get("SHOP_WORKER") == "1"
    busload.init_app(app)

    @app.post("/orders")
    def create_order() -> tuple[dict[str, Any], int]:
        new = request.get_json()
        with current_bus().pool.connection() as conn, conn.transaction():
            insert = "INSERT INTO shop_order (item, amount) VALUES (%s, %s) RETURNING id"
            [order] = conn.execute(insert, [new["item"], new["amount"]]).fetchone() or [0]
            sent = current_bus().send("shop", "ShipOrder", {"order": order}, conn=conn)
            if new["amount"] > 100:
                abort(409, f"There are not {new['amount']} of {new['item']}.")  # neither order nor command exists
        return {"order": order, "command_id": str(sent.command_id)}, 202

    @app.get("/orders/<uuid:command_id>")
    def get_order(command_id: UUID) -> dict[str, Any]:
        command = current_bus().get_command("shop", command_id)
        if command is None:
            abort(404, "There is no such order.")
        return {"status": command.status, "result": command.result}

    @app.cli.command("create-tables")
    def create_tables() -> None:
        """Create the table of orders."""
        with bus.pool.connection() as conn:
            conn.execute(
                "CREATE TABLE IF NOT EXISTS shop_order (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
                "item text NOT NULL, amount integer NOT NULL, shipped_at timestamptz)"
            )

    return app
