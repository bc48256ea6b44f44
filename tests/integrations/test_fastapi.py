"""A bus in an application of FastAPI or Starlette."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from busload import Command, CommandBus, HandlerContext, Settings, SyncCommandBus, Worker
from busload.errors import InvalidOperationError, SchemaOutdatedError
from busload.integrations import probes
from busload.integrations.fastapi import Bus, get_bus, health_router, lifespan
from busload.integrations.starlette import health_routes
from busload.testing import TestServer
from tests.given import DOMAIN, Database, until
from tests.integrations.servers import serving


@asynccontextmanager
async def client(app: FastAPI | Starlette) -> AsyncIterator[httpx.AsyncClient]:
    """An application with its lifespan, called without a network."""
    async with app.router.lifespan_context(app) as state:

        async def with_state(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, "state": dict(state or {})}, receive, send)

        transport = httpx.ASGITransport(with_state)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            yield http


def application(bus: CommandBus, **options: Any) -> FastAPI:
    app = FastAPI(lifespan=lifespan(bus, **options))
    app.include_router(health_router())

    @app.post("/send")
    async def send(bus: Bus) -> dict[str, str]:
        sent = await bus.send(DOMAIN, "Debit", {})
        return {"command_id": str(sent.command_id)}

    return app


@pytest.fixture
def closed_bus(dsn: str, settings: Settings) -> CommandBus:
    bus = CommandBus(dsn, settings=settings)

    @bus.handler(DOMAIN, "Debit")
    async def debit(command: Command, ctx: HandlerContext) -> None: ...

    return bus


async def test_the_bus_is_open_exactly_as_long_as_the_application(closed_bus: CommandBus, database: Database) -> None:
    app = application(closed_bus)
    for sent in (1, 2):  # a second life of the same application, as in tests
        assert not closed_bus.database.is_open
        async with client(app) as http:
            assert (await http.post("/send")).status_code == 200
        assert not closed_bus.database.is_open
        assert database.value("SELECT count(*) FROM busload.command") == sent


async def test_a_bus_that_was_open_stays_open(bus: CommandBus) -> None:
    async with client(application(bus)) as http:
        assert (await http.post("/send")).status_code == 200
    assert (await bus.health()).state


@pytest.mark.parametrize("own", [False, True])
async def test_a_worker_runs_inside_the_application_and_stops_with_it(
    closed_bus: CommandBus, database: Database, own: bool
) -> None:
    worker = Worker(closed_bus, name="inside") if own else True
    async with client(application(closed_bus, worker=worker)) as http:
        await http.post("/send")
        async with CommandBus(closed_bus.dsn) as other:
            [command] = await other.list_commands(DOMAIN)
            await other.wait_command(DOMAIN, command.command_id, timeout=60)
        assert (await http.get("/healthz")).json() == {"state": "HEALTHY", "reasons": []}
        assert (await http.get("/readyz")).status_code == 200
    assert database.value("SELECT count(*) FROM busload.worker WHERE stopped_at IS NULL") == 0


async def test_a_schema_is_made_only_if_it_is_asked_for(server: TestServer, caplog: pytest.LogCaptureFixture) -> None:
    with server.database(migrated=False) as empty:
        async with client(application(CommandBus(empty))) as http:
            [said] = [one for one in caplog.records if one.levelname == "WARNING"]
            assert said.getMessage().startswith(
                "The application has started and cannot send yet: The database holds no"
            )
            assert "`busload schema migrate`" in said.getMessage()
            caplog.clear()
            ready = await http.get("/readyz")
            assert (ready.status_code, ready.json()["reasons"][0]["code"]) == (503, "SCHEMA_OUTDATED")
            assert (await http.get("/healthz")).status_code == 200
            with pytest.raises(SchemaOutdatedError):
                await http.post("/send")
        async with client(application(CommandBus(empty), migrate=True)) as http:
            assert (await http.post("/send")).status_code == 200
        async with client(application(CommandBus(empty))):
            assert [one for one in caplog.records if one.levelname == "WARNING"] == []


async def test_an_application_that_cannot_start_leaves_nothing_open(server: TestServer) -> None:
    with server.database(migrated=False) as empty:
        bus = CommandBus(empty)
        with pytest.raises(InvalidOperationError, match="no domains"):
            async with client(application(bus, worker=True)):
                pass
        assert not bus.database.is_open


async def test_a_probe_asks_for_a_usable_database_and_not_for_workers(
    closed_bus: CommandBus, database: Database
) -> None:
    """A domain that nobody serves is told. It would not help to take web processes out of service for it."""
    async with client(application(closed_bus)) as http:
        await http.post("/send")
        database.rows("UPDATE busload.command SET created_at = now() - interval '6 minutes'")  # so that it is CRITICAL
        ready = await http.get("/readyz")
        assert ready.status_code == 200
        [reason] = ready.json()["reasons"]
        assert (reason["code"], reason["domain"]) == ("NO_WORKER", DOMAIN)
        assert reason["state"] == ready.json()["state"] == "CRITICAL"
        assert ready.headers["cache-control"] == "no-store"


async def test_an_outage_fails_readiness_and_not_liveness_and_names_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "PATIENCE", 0.1)
    nowhere = "postgresql://nobody:secret@127.0.0.1:1/nowhere"
    bus = await CommandBus(nowhere).open(wait=None)
    try:
        async with client(application(bus)) as http:
            ready = await http.get("/readyz")
            assert (ready.status_code, ready.json()["state"]) == (503, "CRITICAL")
            assert ready.json()["reasons"] == [{"code": "DATABASE_UNREACHABLE", "state": "CRITICAL"}]
            assert (await http.get("/healthz")).status_code == 200
    finally:
        await bus.close()


async def test_starlette_has_the_same_routes_at_a_prefix(closed_bus: CommandBus) -> None:
    async def known(request: Request) -> JSONResponse:
        return JSONResponse(get_bus(request) is closed_bus)

    app = Starlette(lifespan=lifespan(closed_bus), routes=[*health_routes("/internal"), Route("/", known)])
    async with client(app) as http:
        assert (await http.get("/internal/readyz")).json()["state"] == "HEALTHY"
        assert (await http.get("/")).json() is True


async def test_an_application_without_the_lifespan_is_told_so() -> None:
    app = FastAPI()
    app.include_router(health_router())
    async with client(app) as http:
        with pytest.raises(InvalidOperationError, match=r"FastAPI\(lifespan=lifespan\(bus\)\)"):
            await http.get("/healthz")


def test_what_is_no_async_bus_or_no_worker_is_refused(closed_bus: CommandBus) -> None:
    with pytest.raises(
        ValueError, match=r"needs a CommandBus, found a busload\.sync\.bus\.SyncCommandBus: an event loop"
    ):
        lifespan(SyncCommandBus("postgresql://nowhere"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs a CommandBus, found a str"):
        lifespan("app:bus")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="worker must be True, False or a Worker, found an int"):
        lifespan(closed_bus, worker=2)  # type: ignore[arg-type]


# The example, served by uvicorn, with its worker inside.


@pytest.fixture
def shop(dsn: str, tmp_path: Path) -> Iterator[httpx.Client]:
    words = ["-m", "uvicorn", "examples.fastapi_shop.app:app", "--port", "PORT"]
    with serving(words, dsn, tmp_path / "said.txt", environment={"SHOP_WORKER": "1"}) as http:
        yield http


def test_the_shop_ships_what_was_ordered(shop: httpx.Client, database: Database) -> None:
    accepted = shop.post("/orders", json={"item": "kettle", "amount": 1})
    assert accepted.status_code == 202
    order = f"/orders/{accepted.json()['command_id']}"
    until(lambda: shop.get(order).json()["status"] == "COMPLETED")
    assert shop.get(order).json()["result"] == {"shipped": accepted.json()["order"]}
    assert database.value("SELECT count(*) FROM shop_order WHERE shipped_at IS NOT NULL") == 1

    assert shop.post("/orders", json={"item": "kettle", "amount": 101}).status_code == 409
    assert database.value("SELECT count(*) FROM shop_order") == 1, "it was rolled back"
    assert shop.post("/orders", json={"item": "", "amount": 0}).status_code == 422
    assert shop.post("/reminders").status_code == 409

    database.value("INSERT INTO shop_order (item, amount) VALUES ('teapot', 1) RETURNING id")
    batch_id = shop.post("/reminders").json()["batch_id"]
    until(lambda: database.value("SELECT status FROM busload.batch WHERE batch_id = %s", batch_id) == "COMPLETED")
    assert shop.get("/readyz").json() == {"state": "HEALTHY", "reasons": []}
    assert "Reminders" in shop.get("/ops/busload/batches").text
