"""A bus in an application of Flask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from flask import Flask, current_app

from busload import Command, SyncCommandBus, SyncHandlerContext, Worker
from busload.errors import InvalidOperationError
from busload.integrations.flask import Busload, SelfOpeningBus, current_bus
from busload.testing import TestServer
from tests.given import DOMAIN, Database, until
from tests.integrations.servers import running, serving

APP = ["-m", "flask", "--app", "examples.flask_shop.app"]


@pytest.fixture
def bus(dsn: str) -> Iterator[SelfOpeningBus]:
    bus = SelfOpeningBus(dsn)
    yield bus
    bus.close()


def application(busload: Busload, **config: object) -> Flask:
    app = Flask("shop")
    app.config.update(NAME="shop", **config)
    busload.init_app(app)

    @app.post("/send")
    def send() -> str:
        return str(current_bus().send(DOMAIN, "Debit", {}).command_id)

    return app


@pytest.mark.parametrize("by_config", [True, False])
def test_a_worker_inside_runs_handlers_in_the_context_of_the_application(bus: SelfOpeningBus, by_config: bool) -> None:
    busload = Busload(bus, worker=not by_config)

    @bus.handler(DOMAIN, "Debit")
    @busload.with_app_context
    def debit(command: Command, ctx: SyncHandlerContext) -> dict[str, str]:
        return {"by": current_app.config["NAME"]}

    http = application(busload, **({"BUSLOAD_WORKER": True} if by_config else {})).test_client()
    try:
        http.post("/send")
        [sent] = bus.list_commands(DOMAIN)
        assert bus.wait_command(DOMAIN, sent.command_id, timeout=60) == {"by": "shop"}
        assert http.get("/healthz").json == {"state": "HEALTHY", "reasons": []}
        until(lambda: http.get("/readyz").status_code == 200)
    finally:
        busload.stop_worker()


def test_without_a_worker_inside_commands_wait(bus: SelfOpeningBus, database: Database) -> None:
    http = application(Busload(bus), BUSLOAD_WORKER=False).test_client()
    assert http.post("/send").status_code == 200
    ready = http.get("/readyz")
    assert (ready.status_code, ready.json["reasons"][0]["code"]) == (200, "NO_WORKER")  # type: ignore[index]
    assert ready.headers["Cache-Control"] == "no-store"
    assert database.value("SELECT count(*) FROM busload.worker") == 0


async def test_a_handler_without_an_application_says_so(bus: SelfOpeningBus) -> None:
    busload = Busload(bus)

    @bus.handler(DOMAIN, "Debit", timeout=5)
    @busload.with_app_context
    def debit(command: Command, ctx: SyncHandlerContext) -> None: ...

    sent = bus.send(DOMAIN, "Debit", {}, max_attempts=1)
    await Worker(bus).drain()
    found = bus.get_command(DOMAIN, sent.command_id)
    assert found is not None and "flask busload worker" in (found.last_error_message or "")


async def test_a_handler_in_the_context_may_take_fields(bus: SelfOpeningBus) -> None:
    busload = Busload(bus)
    application(busload)

    @bus.handler(DOMAIN, "Credit")
    @busload.with_app_context
    def credit(ctx: SyncHandlerContext, account: int) -> int:
        return account

    sent = bus.send(DOMAIN, "Credit", {"account": 7})
    await Worker(bus).drain()
    found = bus.get_command(DOMAIN, sent.command_id)
    assert found is not None and (found.status, found.result) == ("COMPLETED", 7)


def test_what_cannot_be_is_refused(bus: SelfOpeningBus, dsn: str) -> None:
    with pytest.raises(
        ValueError, match=r"needs a SelfOpeningBus, found a busload\.sync\.bus\.SyncCommandBus: processes"
    ):
        Busload(SyncCommandBus(dsn))  # type: ignore[arg-type]
    app = Flask("shop")
    with app.app_context(), pytest.raises(InvalidOperationError, match=r"'shop' has no bus\. Call Busload"):
        current_bus()
    Busload(bus, app, health_prefix=None)
    assert app.test_client().get("/healthz").status_code == 404
    with pytest.raises(InvalidOperationError, match="has a bus already"):
        Busload(bus, app)


def test_flask_migrates_and_runs_a_worker(server: TestServer) -> None:
    with server.database(migrated=False) as empty:
        bus = SelfOpeningBus(empty)
        runner = application(Busload(bus)).test_cli_runner()
        assert "Applied 0001_commands" in runner.invoke(args=["busload", "migrate"]).output
        assert runner.invoke(args=["busload", "migrate"]).output == "Nothing was missing.\n"
        refused = runner.invoke(args=["busload", "worker"])
        assert isinstance(refused.exception, InvalidOperationError), "it has no handlers"
        bus.close()


def test_the_shop_ships_what_was_ordered(dsn: str, database: Database, tmp_path: Path) -> None:
    """The web server, and the worker as a process of its own."""
    database.rows(
        "CREATE TABLE shop_order (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, item text, amount integer, "
        "shipped_at timestamptz)"
    )
    said = tmp_path / "worker.txt"
    with (
        running([*APP, "busload", "worker"], dsn, said) as worker,
        serving([*APP, "run", "--port", "PORT"], dsn, tmp_path / "said.txt") as shop,
    ):
        accepted = shop.post("/orders", json={"item": "kettle", "amount": 1})
        assert accepted.status_code == 202, accepted.text
        order = f"/orders/{accepted.json()['command_id']}"
        until(lambda: shop.get(order).json()["status"] == "COMPLETED")
        assert shop.get(order).json()["result"] == {"shipped": 1, "by": "the corner shop"}
        assert shop.post("/orders", json={"item": "kettle", "amount": 101}).status_code == 409
        assert database.value("SELECT count(*) FROM shop_order") == 1, "it was rolled back"
        assert database.value("SELECT count(*) FROM busload.command") == 1, "it was rolled back"
    assert worker.returncode == 0, said.read_text()
    assert database.value("SELECT count(*) FROM busload.worker WHERE stopped_at IS NULL") == 0
