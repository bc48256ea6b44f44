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
    time.sleep(0.01)
    with ctx.transaction() as conn:
        conn.execute("UPDATE orders SET shipped = true WHERE id = %s", [command.data["order"]])
    return f"parcel-{command.data['order']}"


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
        conn.execute(
            "CREATE TABLE orders (id integer GENERATED ALWAYS AS IDENTITY, item text, shipped boolean DEFAULT false)"
        )

        place_order(conn, "a kettle", in_stock=True)
        place_order(conn, "a teapot", in_stock=True)
        try:
            place_order(conn, "a samovar", in_stock=False)
        except LookupError as error:
            print(f"Refused: {error}")

        # In an application this is another process: `busload worker examples.sync_app:bus`.
        settled = asyncio.run(Worker(bus).drain())
        print(f"{settled} commands ran")
        for item, shipped in conn.execute("SELECT item, shipped FROM orders ORDER BY id"):
            print(f"{item}: {'shipped' if shipped else 'waiting'}")


if __name__ == "__main__":
    main()
