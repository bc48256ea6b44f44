"""An application without an event loop: commands join its own transaction, and handlers are plain functions.

    python examples/sync_app.py

An order and the command that ships it exist together or not at all.
"""

from __future__ import annotations

import asyncio
import time

import psycopg

from busload import Command, SyncCommandBus, SyncHandlerContext, Worker

bus = SyncCommandBus()


@bus.handler("shop", "ShipOrder", timeout=30)
def ship(command: Command, ctx: SyncHandlerContext) -> str:
    """A `def` handler runs in a thread, so it may block."""
    time.sleep(0.01)  # the carrier takes its time
    parcel = f"parcel {command.data['order']}"
    with ctx.transaction() as conn:  # the order is updated exactly if this command completes
        conn.execute("UPDATE orders SET parcel = %s WHERE id = %s", [parcel, command.data["order"]])
    return parcel


def place_order(conn: psycopg.Connection, item: str, *, in_stock: bool) -> None:
    with conn.transaction():
        row = conn.execute("INSERT INTO orders (item) VALUES (%s) RETURNING id", [item]).fetchone()
        assert row is not None
        bus.send("shop", "ShipOrder", {"order": row[0]}, conn=conn)
        if not in_stock:
            raise LookupError(f"{item} is out of stock")  # rolls back the order and its command


def main() -> None:
    with bus, psycopg.connect(bus.dsn, autocommit=True) as conn:
        bus.migrate()
        conn.execute("DROP TABLE IF EXISTS orders")
        conn.execute("CREATE TABLE orders (id integer GENERATED ALWAYS AS IDENTITY, item text, parcel text)")

        place_order(conn, "a kettle", in_stock=True)
        place_order(conn, "a teapot", in_stock=True)
        try:
            place_order(conn, "a samovar", in_stock=False)
        except LookupError as error:
            print(f"Refused: {error}")

        # In an application this is another process: `busload worker examples.sync_app:bus`.
        asyncio.run(Worker(bus).drain())
        for item, parcel in conn.execute("SELECT item, parcel FROM orders ORDER BY id"):
            print(f"{item}: shipped by {parcel}" if parcel else f"{item}: waits")


if __name__ == "__main__":
    main()
