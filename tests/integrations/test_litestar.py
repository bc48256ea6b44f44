"""A bus in an application of Litestar."""

from __future__ import annotations

from pathlib import Path

import pytest
from litestar import Litestar, post
from litestar.di import Provide
from litestar.testing import AsyncTestClient

from busload import Command, CommandBus, HandlerContext, SyncCommandBus
from busload.errors import InvalidOperationError
from busload.integrations.litestar import Bus, BusloadPlugin
from tests.given import DOMAIN, Database, until
from tests.integrations.servers import serving


async def test_the_bus_is_open_as_long_as_the_application_and_found_by_its_name(dsn: str, database: Database) -> None:
    bus = CommandBus(dsn)

    @bus.handler(DOMAIN, "Debit")
    async def debit(command: Command, ctx: HandlerContext) -> dict[str, int]:
        return {"debited": 10}

    @post("/send")
    async def send(commands: Bus) -> dict[str, int]:
        sent = await commands.send(DOMAIN, "Debit", {})
        return await commands.wait_command(DOMAIN, sent.command_id, timeout=60)  # type: ignore[no-any-return]

    plugin = BusloadPlugin(bus, worker=True, name="commands", health_prefix="/internal")
    async with AsyncTestClient(Litestar([send], plugins=[plugin])) as http:
        assert (await http.post("/send")).json() == {"debited": 10}
        ready, alive = await http.get("/internal/readyz"), await http.get("/internal/healthz")
        assert (ready.status_code, ready.json()) == (200, {"state": "HEALTHY", "reasons": []})
        assert (alive.status_code, alive.headers["cache-control"]) == (200, "no-store")
    assert not bus.database.is_open
    assert database.value("SELECT count(*) FROM busload.worker WHERE stopped_at IS NULL") == 0


def test_what_cannot_be_is_refused(dsn: str) -> None:
    with pytest.raises(ValueError, match=r"needs a CommandBus, found a busload\.sync\.bus\.SyncCommandBus"):
        BusloadPlugin(SyncCommandBus(dsn))  # type: ignore[arg-type]
    taken = {"bus": Provide(lambda: None, sync_to_thread=False)}
    with pytest.raises(InvalidOperationError, match="has a dependency 'bus' already"):
        Litestar([], plugins=[BusloadPlugin(CommandBus(dsn))], dependencies=taken)


def test_the_shop_ships_what_was_ordered(dsn: str, database: Database, tmp_path: Path) -> None:
    words = ["-m", "uvicorn", "examples.litestar_shop.app:app", "--port", "PORT"]
    with serving(words, dsn, tmp_path / "said.txt", environment={"SHOP_WORKER": "1"}) as shop:
        accepted = shop.post("/orders", json={"item": "kettle", "amount": 1})
        assert accepted.status_code == 202, accepted.text
        order = f"/orders/{accepted.json()['command_id']}"
        until(lambda: shop.get(order).json()["status"] == "COMPLETED")
        assert database.value("SELECT count(*) FROM shop_order WHERE shipped_at IS NOT NULL") == 1
        assert shop.post("/orders", json={"item": "kettle", "amount": 101}).status_code == 409
        assert database.value("SELECT count(*) FROM shop_order") == 1, "it was rolled back"
        assert database.value("SELECT count(*) FROM busload.command") == 1, "it was rolled back"
