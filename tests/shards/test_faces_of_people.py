"""The dashboard and the command line over three databases: one view, and a choice of one of them."""

from __future__ import annotations

import asyncio
import html
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner

from busload import BatchCommand, Command, CommandBus, HandlerContext, PermanentCommandError, Settings, Worker
from busload.cli import main
from busload.commands import rescue
from busload.dashboard import app
from busload.dashboard.pages import commands
from busload.dashboard.render import DATABASE
from busload.postgres.write import Write
from tests.dashboard.site import SAME_ORIGIN, client, stream
from tests.dashboard.test_troubleshooting import posted, previewed
from tests.shards.conftest import Three

DOMAINS = ("payments", "orders", "crm")


@pytest.fixture(autouse=True)
def no_users_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BUSLOAD_DASHBOARD_USERS", raising=False)


async def _story(bus: CommandBus) -> dict[str, str]:
    """A batch in each database, a command of each in troubleshooting, and the id of that command by its domain."""

    async def fail(command: Command, ctx: HandlerContext) -> None:
        raise PermanentCommandError("the till is closed")

    failed = {}
    for domain in DOMAINS:
        bus.handler(domain, "Fail")(fail)
        await bus.create_batch(domain, [BatchCommand("Do"), BatchCommand("Do")], name=f"batch of {domain}")
        failed[domain] = str((await bus.send(domain, "Fail")).command_id)
    await Worker(bus).drain()
    return failed


async def test_lists_of_the_dashboard_have_all_databases(sharded: CommandBus) -> None:
    failed = await _story(sharded)
    async with client(app(sharded), **SAME_ORIGIN) as site, Worker(sharded) as worker:
        for path in ("/", "/batches", "/commands", "/troubleshooting", "/domains"):
            page = await site.get(path)
            assert page.status_code == 200, page.text
            assert [domain for domain in DOMAINS if domain not in page.text] == [], path
        for path in ("/jobs", "/schedules", "/limits", "/buffers", "/dispatch", "/retention", "/audit", "/workers"):
            assert (await site.get(path)).status_code == 200, path
        assert (await site.get("/workers")).text.count(worker.name) >= 3
        for known in await sharded.workers.list():
            assert (await site.get(f"/workers/{known.worker}")).status_code == 200
        for batch in await sharded.list_batches(None):
            page = await site.get(f"/batches/{batch.batch_id}")
            assert page.status_code == 200
            assert f"batch of {batch.domain}" in page.text
        for domain, command_id in failed.items():
            assert (await site.get(f"/commands/{domain}/{command_id}")).status_code == 200
        [cause] = await sharded.troubleshooting.groups("crm")
        assert (await site.get(f"/troubleshooting/crm/{cause.fingerprint}")).status_code == 200
        metrics = await site.get("/metrics")
        assert 'database="' in metrics.text


async def test_a_browser_chooses_one_database_and_goes_back_to_all(sharded: CommandBus, three: Three) -> None:
    await _story(sharded)
    async with client(app(sharded), **SAME_ORIGIN) as site:
        chosen = await site.get("/database/1")
        assert (chosen.status_code, chosen.headers["location"]) == (303, "/")
        page = (await site.get("/batches")).text
        assert "batch of orders" in page
        assert "batch of crm" not in page
        await site.get("/database/all")
        assert "batch of crm" in (await site.get("/batches")).text
        for wrong in ("3", "x", "-1", "٣"):
            assert (await site.get(f"/database/{wrong}")).status_code == 404


async def test_pages_of_commands_go_through_all_databases(sharded: CommandBus, monkeypatch: pytest.MonkeyPatch) -> None:
    await _story(sharded)
    monkeypatch.setattr(commands, "LIMIT", 2)
    found: list[str] = []
    async with client(app(sharded), **SAME_ORIGIN) as site:
        address: str | None = "/commands"
        while address is not None:
            page = await site.get(address)
            assert page.status_code == 200, page.text
            found += re.findall(r'href="(/commands/[a-z]+/[^"]+)"', page.text)
            address = next(map(html.unescape, re.findall(r'href="([^"]+)" rel="next"', page.text)), None)
        assert len(found) == len(set(found)) == 9
        for wrong in ("x", "1~2", "1~2~x", "end~end~end~end"):
            assert (await site.get("/commands", params={"after": wrong})).status_code in (400, 404), wrong


async def test_the_audit_leads_to_the_worker_that_was_stopped(sharded: CommandBus) -> None:
    await _register(sharded)
    async with client(app(sharded), **SAME_ORIGIN) as site:
        for known in await sharded.workers.list():
            await sharded.workers.stop(known.worker, reason="x", operator="eve")
            [action, *_] = (await sharded.audit.list(operator="eve")).actions
            assert (action.worker, action.worker_name) == (known.worker, known.name)
            link = f'<a href="/workers/{known.worker}">{known.name}</a>'
            assert link in (await site.get("/audit")).text


async def test_limits_of_the_same_name_have_the_numbers_of_their_own_databases(
    sharded: CommandBus, three: Three
) -> None:
    for dsn, calls in ((three.payments, 1234), (three.orders, 77)):
        with psycopg.connect(dsn) as conn:
            conn.execute(
                "INSERT INTO busload.rate_limit (name, subject, adaptive, rate, ceiling, calls, refused) "
                "VALUES ('bank', '', true, 1, 2, %s, 0)",
                [calls],
            )
    async with client(app(sharded), **SAME_ORIGIN) as site:
        page = (await site.get("/limits?name=bank")).text
    shown = re.findall(r'data-live="([^"]+[.]calls)">([^<]+)<', page)
    assert sorted(number for _, number in shown) == ["1,234", "77"]
    assert len({key for key, _ in shown}) == 2


async def _register(bus: CommandBus) -> None:
    """Workers that have the same numbers in each database."""
    for at, shard in enumerate(bus.shards):
        for n in range(4):
            new = rescue.register(name=f"{at}-{n}", domains=["x"], concurrency=1, lease_for=timedelta(minutes=1))
            await shard.database.write(Write(new))


async def test_an_open_page_keeps_its_database_whatever_another_window_chooses(sharded: CommandBus) -> None:
    """The same number is one worker on the page of all databases, and another one on that of the second."""
    await _register(sharded)
    [first, *_] = [known for known in await sharded.workers.list() if known.name == "0-0"]
    served = app(sharded)
    async with client(served, **SAME_ORIGIN) as site:
        opened = (await site.get(f"/workers/{first.worker}")).text
        listed = (await site.get("/workers")).text
        await site.get("/database/1")
        assert "0-0" not in (await site.get(f"/workers/{first.worker}")).text
        [sends] = re.findall("hx-headers:inherited='([^']*)'", opened)
        stopped = await site.post(f"/workers/{first.worker}/stop", data={"reason": "x"}, headers=json.loads(sends))
        assert "0-0" in stopped.text
        [live] = re.findall('data-live-url="([^"]*)"', listed)
        async with stream(served, html.unescape(live), cookie=f"{DATABASE}=1") as events:
            _, values = await events.get()
            assert len(values["rows"]) == 12
    assert [known.name for known in await sharded.workers.list() if known.stop_requested_at] == ["0-0"]


async def test_a_dashboard_of_one_database_offers_no_choice(bus: CommandBus) -> None:
    async with client(app(bus), **SAME_ORIGIN) as site:
        assert "Databases" not in (await site.get("/")).text
        assert (await site.get("/database/0")).status_code == 404


async def test_an_operator_acts_where_the_command_lives(sharded: CommandBus) -> None:
    failed = await _story(sharded)
    async with client(app(sharded), **SAME_ORIGIN) as site:
        done = await site.post(f"/commands/crm/{failed['crm']}/retry", data={"again": "1"})
        assert done.status_code == 200, done.text
    assert await sharded.troubleshooting.count("crm") == 0
    assert await sharded.troubleshooting.count() == 2


async def test_a_cause_is_decided_in_the_database_of_its_domain(sharded: CommandBus) -> None:
    await _story(sharded)
    [cause] = await sharded.troubleshooting.groups("orders")
    path = f"/troubleshooting/orders/{cause.fingerprint}"
    async with client(app(sharded), **SAME_ORIGIN) as site:
        form = await previewed(site, path, "retry")
        await posted(site, f"{path}/decide?action=retry", **form)
    assert await sharded.troubleshooting.count("orders") == 0
    assert await sharded.troubleshooting.count() == 2


async def test_the_overview_tells_the_rest_while_one_server_is_away(three: Three) -> None:
    settings = replace(Settings(), pool_timeout=timedelta(seconds=1))
    async with CommandBus(three.mapping, settings=settings) as bus:
        await _story(bus)
        three.third.stop()
        async with client(app(bus), **SAME_ORIGIN) as site:
            page = await site.get("/")
            assert page.status_code == 200
            assert "payments" in page.text
            assert "cannot be reached" in page.text
            assert (await site.get("/batches")).status_code == 503
            await site.get("/database/0")
            assert "batch of payments" in (await site.get("/batches")).text


@pytest.fixture
def application(three: Three, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """`MODULE:BUS` of an application over the three databases, as a file in the current folder."""
    (tmp_path / "sharded_shop.py").write_text(f"from busload import CommandBus\nbus = CommandBus({three.mapping!r})\n")
    monkeypatch.chdir(tmp_path)
    yield "sharded_shop:bus"
    sys.modules.pop("sharded_shop", None)
    sys.path[:] = [path for path in sys.path if path != str(tmp_path)]


def test_the_command_line_shows_one_view_of_the_bus_of_an_application(three: Three, application: str) -> None:
    async def story() -> dict[str, str]:
        async with CommandBus(three.mapping) as bus:
            return await _story(bus)

    failed = asyncio.run(story())

    def run(*words: str, code: int = 0) -> str:
        result = CliRunner().invoke(main, [*words, "--bus", application])
        assert result.exit_code == code, result.output
        return result.output

    assert {one["domain"] for one in json.loads(run("batch", "ls", "--json"))} == set(DOMAINS)
    assert {one["domain"] for one in json.loads(run("domain", "ls", "--json"))} == set(DOMAINS)
    assert len(json.loads(run("troubleshooting", "ls", "--json"))) == 3
    assert json.loads(run("command", "show", failed["crm"], "--json"))["domain"] == "crm"
    run("troubleshooting", "retry", failed["crm"])
    assert len(json.loads(run("troubleshooting", "ls", "--json"))) == 2
    refused = run("troubleshooting", "retry", failed["orders"], failed["payments"], code=2)
    assert "live in different databases" in refused
    assert len(json.loads(run("schema", "status", "--json"))) % 3 == 0
    three.third.stop()
    assert "batch of orders" in run("batch", "ls", "--domain", "orders")
    assert "DATABASE_UNREACHABLE" in run("health", code=2)
