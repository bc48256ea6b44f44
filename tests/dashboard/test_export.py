"""Lists as files: all that their filter selects, as CSV that no spreadsheet runs, and as JSON."""

from __future__ import annotations

import asyncio
import csv
import io
from datetime import UTC, timedelta
from typing import Any
from urllib.parse import quote

import httpx
import psycopg
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from busload import BatchCommand, CommandBus, HandlerContext, PermanentCommandError
from busload.commands.command import Command
from busload.dashboard import Role, app, export
from busload.dashboard.app import ROUTES, TIME_LIMIT
from busload.jobs.job import Stage
from tests.dashboard.site import SAME_ORIGIN, client, known_users, signed_in
from tests.dashboard.test_pages import Page, seen
from tests.given import DOMAIN, LOCKED_OUT, Database, Given, eventually, raising

LISTS = ("/batches", "/commands", "/troubleshooting", "/jobs", "/audit", "/schedules")


@pytest.fixture(autouse=True)
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "PORTION", 2)


async def rows_of(site: httpx.AsyncClient, path: str, query: str = "") -> list[dict[str, Any]]:
    """The rows of an export, which are the same in both formats."""
    answer = await site.get(f"{path}.json{query}")
    assert answer.status_code == 200, Page(answer.text).words
    rows: list[dict[str, Any]] = answer.json()
    table = table_of((await site.get(f"{path}.csv{query}")).text)
    assert len(table) == len(rows)
    for row, cells in zip(rows, table, strict=True):
        assert list(row) == list(cells)
    return rows


def table_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


async def fill(bus: CommandBus, given: Given) -> str:
    """Some rows in every list, with payloads everywhere; returns the path of a cause."""

    async def refuse(command: Command, ctx: HandlerContext) -> None:
        raise PermanentCommandError("canary-message", code=command.data["code"])

    async def answer(command: Command, ctx: HandlerContext) -> Any:
        return {"of": "canary-result"}

    given.handler("Refuse", refuse)
    given.handler("Pay", answer)
    given.handler("Load")
    data = {"of": "canary-data", "password": "hunter2", "code": "CLOSED"}
    own: dict[str, Any] = {"data": data, "headers": {"of": "canary-headers"}}
    for number in range(5):
        sent = [BatchCommand("Refuse", **own), BatchCommand("Pay", **own)]
        await bus.create_batch(DOMAIN, sent, name=f"batch {number}", custom_data={"of": "canary-custom"})
        await bus.jobs.create(
            DOMAIN, [Stage("only", [BatchCommand("Refuse", **own)])], custom_data={"of": "canary-custom"}
        )
        await bus.domains.pause(f"domain-{number}", reason="a test", operator="ada")
        every, command = timedelta(hours=1), BatchCommand("Pay", **own)
        bus.schedule(f"schedule-{number}", every=every, command=command, domain=DOMAIN)
    bus.planner(DOMAIN, "plan")(raising(PermanentCommandError("canary-step")))
    await bus.jobs.create(DOMAIN, [Stage("load", [BatchCommand("Load")]), Stage("plan")])
    for code in ("BLOCKED", "EXPIRED"):
        await bus.send(DOMAIN, "Refuse", {"code": code})
    await bus.schedules.sync()
    await given.drained()
    [cause] = [one for one in await bus.troubleshooting.groups(DOMAIN) if one.error_code == "CLOSED"]
    return f"/troubleshooting/{DOMAIN}/{cause.fingerprint}"


# -- what is in a file -------------------------------------------------------------------------------------------------


async def test_every_list_gives_all_its_rows_by_two_links(
    site: httpx.AsyncClient, bus: CommandBus, given: Given
) -> None:
    cause = await fill(bus, given)
    exported = {path: await rows_of(site, path) for path in (*LISTS, cause)}
    assert {route.export_path for route in ROUTES if route.export} == {
        *LISTS,
        "/troubleshooting/{domain}/{fingerprint}",
        "/schedules/{name}/history",
    }
    assert [row["name"] for row in exported["/batches"] if row["name"] not in ("only", "load")] == [
        f"batch {n}" for n in (4, 3, 2, 1, 0)
    ]
    assert len({row["command_id"] for row in exported["/commands"]}) == len(exported["/commands"]) >= 17
    assert [row["count"] for row in exported["/troubleshooting"]] == [10, 1, 1, 1]
    assert len({row["command_id"] for row in exported[cause]}) == 10
    assert len({row["job_id"] for row in exported["/jobs"]}) == 6
    assert {row["domain"] for row in exported["/audit"]} == {f"domain-{number}" for number in range(5)}
    assert [row["name"] for row in exported["/schedules"]] == [f"schedule-{number}" for number in range(5)]
    for path in exported:
        assert {f"{path}.csv", f"{path}.json"} <= set((await seen(site, path)).links)


@pytest.mark.parametrize("name", ["nightly", "nightly.csv"])
async def test_the_history_of_a_schedule_is_a_file(site: httpx.AsyncClient, bus: CommandBus, name: str) -> None:
    for one in (name, "another"):
        bus.schedule(one, every=timedelta(hours=1), command=BatchCommand("Pay"), domain=DOMAIN)
    await bus.schedules.sync()
    sent = [str(await bus.schedules.trigger(name, operator="ada")) for _ in range(5)]
    await bus.schedules.trigger("another", operator="eve")
    path = f"/schedules/{quote(name)}"
    rows = await rows_of(site, f"{path}/history")
    assert [row["command_id"] for row in rows] == sent[::-1]
    assert {(row["schedule"], row["type"], row["operator"]) for row in rows} == {(name, "TRIGGERED", "ada")}
    page = await seen(site, path)
    assert {f"{path}/history.csv", f"{path}/history.json"} <= set(page.links)
    unknown = await site.get("/schedules/nobody/history.csv")
    assert (unknown.status_code, "There is no schedule" in unknown.text) == (404, True)


async def test_a_file_has_what_the_filter_selects(site: httpx.AsyncClient, bus: CommandBus, given: Given) -> None:
    cause = await fill(bus, given)
    [batch] = [one for one in await bus.list_batches(DOMAIN) if one.name == "batch 3"]
    found = {
        f"/batches?name=batch+3&domain={DOMAIN}": 1,
        f"/commands?batch={batch.batch_id}&status=COMPLETED": 1,
        "/commands?type=Pay": 5,
        "/troubleshooting?reason=EXHAUSTED": 0,
        f"{cause}?batch={batch.batch_id}": 1,
        "/jobs?status=COMPLETED": 0,
        "/audit?domain=domain-2": 1,
        "/schedules?domain=crm": 0,
    }
    for address, count in found.items():
        path, _, query = address.partition("?")
        assert len(await rows_of(site, path, f"?{query}")) == count, address
        page = await seen(site, address)
        assert f"{path}.csv?{query}" in page.links, page.links


async def test_the_links_of_a_later_page_lead_to_the_file_from_its_first_row(bus: CommandBus, given: Given) -> None:
    ids = [await given.batch() for _ in range(3)]
    outer = Starlette(routes=[Mount("/ops", app(bus))])
    async with client(outer, **SAME_ORIGIN) as site:
        page = await seen(site, f"/ops/batches?domain={DOMAIN}&name=&after={ids[2]}")
        [link] = [link for link in page.links if ".json" in link]
        assert link == f"/ops/batches.json?domain={DOMAIN}"
        assert len((await site.get(link)).json()) == 3


async def test_rows_have_the_fields_of_the_api_and_times_in_utc(
    site: httpx.AsyncClient, bus: CommandBus, given: Given, database: Database
) -> None:
    name = database.value("SELECT current_database()")
    database.rows(f"""ALTER DATABASE "{name}" SET timezone = 'Asia/Tokyo'""")
    command_id = await given.sent(data={"n": [1, None, 10**30], "text": "naïve"}, priority=-3)
    command = await given.command_now(command_id)
    [row] = await rows_of(site, "/commands")
    assert row["command_id"] == str(command_id)
    assert (row["status"], row["priority"], row["data"]) == (command.status, -3, command.data)
    at = command.created_at.astimezone(UTC).isoformat()
    assert row["created_at"] == at and at.endswith("+00:00")
    [cells] = table_of((await site.get("/commands.csv")).text)
    assert (cells["created_at"], cells["priority"], cells["finished_at"]) == (at, "-3", "")
    assert cells["data"] == '{"n":[1,null,1000000000000000000000000000000],"text":"naïve"}'


async def test_a_file_is_an_attachment_that_nobody_keeps(site: httpx.AsyncClient) -> None:
    for path in LISTS:
        for format, kind in (("csv", "text/csv; charset=utf-8"), ("json", "application/json")):
            answer = await site.get(f"{path}.{format}?domain=crm")
            name = f"busload-{path.removeprefix('/')}.{format}"
            assert answer.headers["content-disposition"] == f'attachment; filename="{name}"'
            assert answer.headers["content-type"] == kind
            assert answer.headers["cache-control"] == "no-store"
        assert answer.json() == []


async def test_a_spreadsheet_runs_no_cell(site: httpx.AsyncClient, bus: CommandBus) -> None:
    hostile = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", '=HYPERLINK("//evil.example","x")', "a=1", "'=1"]
    for text in hostile:
        await bus.domains.pause(DOMAIN, reason=f"{text}, she said", operator="ada")
        await bus.domains.resume(DOMAIN, operator="ada")
        await bus.send(DOMAIN, "Debit", text)
    actions = await rows_of(site, "/audit", "?action=DOMAIN_PAUSED")
    cells = [row["reason"] for row in table_of((await site.get("/audit.csv?action=DOMAIN_PAUSED")).text)]
    data = [row["data"] for row in table_of((await site.get("/commands.csv")).text)]
    assert not [cell for cell in cells + data if cell[0] in "=+-@\t\r\n"]
    assert [row["data"] for row in await rows_of(site, "/commands")] == hostile[::-1]
    for cell, row in zip(cells, actions, strict=True):
        assert cell in (row["reason"], f"'{row['reason']}")
        assert (cell == row["reason"]) == (row["reason"][0] in "a'")


# -- what is not -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("role", "hidden"), [(Role.READER, True), (Role.OPERATOR, False)])
async def test_files_hide_payloads_as_pages_do(bus: CommandBus, given: Given, role: Role, hidden: bool) -> None:
    cause = await fill(bus, given)
    served = app(bus, authenticate=known_users(), hide_payloads=True)
    kinds = ("data", "result", "message", "custom", "headers", "step")
    async with client(served, **signed_in(role)) as site:
        for format in export.FORMATS:
            texts = {path: (await site.get(f"{path}.{format}")).text for path in (*LISTS, cause)}
            found = {kind for kind in kinds if f"canary-{kind}" in "".join(texts.values())}
            assert found == (set() if hidden else set(kinds))
            assert "hunter2" not in "".join(texts.values())
            assert ("••••••" in texts["/commands"]) == (not hidden)
            assert "CLOSED" in texts["/commands"]
        searched = await site.get("/commands.csv?error=canary-message")
    assert searched.status_code == (403 if hidden else 200)


async def test_a_wrong_filter_gives_the_error_of_the_page(site: httpx.AsyncClient) -> None:
    wrong = {
        "/batches": "status=LOST",
        "/commands": "batch=1",
        "/troubleshooting": "reason=BAD",
        f"/troubleshooting/{DOMAIN}/0123456789ab": "type=Pay",
        f"/troubleshooting/{DOMAIN}/xyz": "type=Pay",
        "/jobs": f"domain={'x' * 300}",
        "/audit": "since=yesterday",
        "/schedules": f"domain={'x' * 300}",
    }
    for path, query in wrong.items():
        page = await site.get(f"{path}?{query}")
        file = await site.get(f"{path}.csv?{query}")
        assert file.status_code == page.status_code in (400, 404), path
        assert file.headers["content-type"] == page.headers["content-type"]
        assert "content-disposition" not in file.headers
        assert Page(file.text).words == Page(page.text).words


# -- bounds ------------------------------------------------------------------------------------------------------------


async def ends_of(site: httpx.AsyncClient, path: str) -> tuple[int, str | None]:
    """How many rows both files have, and what they say about others."""
    rows = (await site.get(f"{path}.json")).json()
    cut = rows.pop()["cut_off"] if "cut_off" in rows[-1] else None
    _, *lines = csv.reader(io.StringIO((await site.get(f"{path}.csv")).text, newline=""))
    if cut is not None:
        assert lines.pop() == [f"# Cut off: {cut}"]
    assert len(lines) == len(rows)
    return len(rows), cut


async def test_a_file_that_is_cut_off_says_so(
    site: httpx.AsyncClient, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(6):
        await given.batch()
    monkeypatch.setattr(export, "MOST_ROWS", 5)
    assert await ends_of(site, "/batches") == (5, "These are the first 5 rows. Narrow the filter for the others.")
    monkeypatch.setattr(export, "MOST_ROWS", 6)
    assert await ends_of(site, "/batches") == (6, None)
    monkeypatch.setattr(export, "LONGEST", 0.0)
    rows, cut = await ends_of(site, "/batches")
    assert rows == 2 and cut is not None and cut.startswith("These are the rows that were found in 0 seconds.")


async def test_a_slow_portion_ends_its_statement_and_is_told(
    dashboard: Starlette,
    given: Given,
    bus: CommandBus,
    database: Database,
    dsn: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for _ in range(3):
        await given.batch()
    monkeypatch.setattr(export, "PATIENCE", 0.3)
    list_batches = bus.list_batches
    with psycopg.connect(dsn) as blocker:

        async def and_then_lock(*args: Any, **options: Any) -> Any:
            found = await list_batches(*args, **options)
            blocker.execute("LOCK TABLE busload.batch IN ACCESS EXCLUSIVE MODE")
            return found

        monkeypatch.setattr(bus, "list_batches", and_then_lock)
        async with client(dashboard) as site, asyncio.timeout(10):
            rows = (await site.get("/batches.json")).json()
            monkeypatch.setitem(TIME_LIMIT, "GET", 0.3)
            refused = await site.get("/batches.json")
        await eventually(lambda: not database.rows(LOCKED_OUT))
    assert [list(row) == ["cut_off"] for row in rows] == [False, False, True]
    assert rows[-1]["cut_off"].startswith("No answer in time: there may be more rows.")
    assert refused.status_code == 503 and "PostgreSQL did not answer in time" in refused.text
