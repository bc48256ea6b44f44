"""Batches that operators create by a form: checked line by line, previewed, and created as previewed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import httpx
import pytest

from busload import CommandBus
from busload.commands.ids import new_id
from busload.dashboard import app
from busload.dashboard.access import Role
from busload.dashboard.draft import MOST_COMMANDS, MOST_TEXT
from busload.dashboard.pages.new_batch import ROUTES
from tests.dashboard.site import SAME_ORIGIN, client, known_users, signed_in
from tests.dashboard.test_pages import Page
from tests.given import DOMAIN, Database, Given

NEW = "/batches/new"


@pytest.fixture
async def site(bus: CommandBus) -> AsyncIterator[httpx.AsyncClient]:
    """A browser on this machine, on a dashboard where operators may create batches."""
    async with client(app(bus, create=True), **SAME_ORIGIN) as http:
        yield http


def written(**fields: str) -> dict[str, str]:
    return {"batch_id": str(new_id()), "domain": DOMAIN, "type": "Debit", "data": '{"n": 1}\n{"n": 2}', **fields}


async def previewed(site: httpx.AsyncClient, fields: dict[str, str]) -> dict[str, str]:
    """The form as its preview would send it."""
    page = await site.post(f"{NEW}/preview", data=fields)
    assert page.status_code == 200, page.text
    return {**fields, "previewed": page.text.partition('name="previewed" value="')[2].partition('"')[0]}


async def test_a_previewed_batch_is_created_once(site: httpx.AsyncClient, given: Given, database: Database) -> None:
    more = {"name": "July", "canary": "1", "budget": "2.5", "at_least": "10", "priority": "7", "expires": "2h"}
    form = await previewed(site, written(**more, callback="Report", callback_data='{"to": "ada"}'))
    assert database.count("batch") == 0
    for _ in range(2):  # an impatient person clicks twice
        answer = await site.post(f"{NEW}/create", data=form)
        assert (answer.status_code, answer.headers["HX-Redirect"]) == (204, f"/batches/{form['batch_id']}")
    batch = await given.batch_now(UUID(form["batch_id"]))
    assert (batch.name, batch.total_count, batch.canary_count, batch.failure_budget) == ("July", 2, 1, 10)
    assert batch.callback_type == "Report" and batch.custom_data is not None and batch.custom_data["created_by"]
    [created] = (await given.bus.audit.list()).actions
    assert (created.type, created.operator) == ("BATCH_CREATED", batch.custom_data["created_by"])
    assert (created.batch_id, created.domain) == (batch.batch_id, batch.domain)
    assert f"by {created.operator}" in Page((await site.get(f"/batches/{batch.batch_id}")).text).words
    assert batch.expires_at is not None and (batch.expires_at - batch.created_at).total_seconds() == 7200
    commands = (await given.bus.list_commands(batch_id=batch.batch_id)).commands
    assert sorted((one.command_type, one.data["n"], one.priority) for one in commands) == [
        ("Debit", 1, 7),
        ("Debit", 2, 7),
    ]


async def test_only_what_was_previewed_is_created(site: httpx.AsyncClient, database: Database) -> None:
    form = await previewed(site, written())
    for changed in ({"data": '{"n": 1}'}, {"domain": "crm"}, {"priority": "9"}, {"callback": "Report"}):
        answer = await site.post(f"{NEW}/create", data={**form, **changed})
        assert "Nothing was created: the form has changed since its preview." in answer.text
    answer = await site.post(f"{NEW}/create", data=written())  # no preview at all
    assert "Nothing was created" in answer.text
    assert database.count("batch") == 0
    as_browsers_do = {**form, "data": form["data"].replace("\n", "\r\n")}
    assert (await site.post(f"{NEW}/create", data=as_browsers_do)).status_code == 204


@pytest.mark.parametrize(
    ("form", "types"),
    [
        ({"data": '[{"n": 1}, 2, null]'}, ["3 commands of type Debit"]),
        ({"data": '\n{"n": 1}\n\n"text"\n'}, ["2 commands of type Debit"]),
        ({"data": '"a\u2028b"\r\n"c\x85d"\r"e\u2029"'}, ["3 commands of type Debit"]),
        ({"format": "csv", "data": 'n,who\n1,"a\nb"\n2,c\n'}, ["2 commands of type Debit"]),
        (
            {"type": "", "data": '{"type": "A", "task_key": "k"}\n{"type": "B", "data": 1}\n{"type": "B"}'},
            ["2 commands of type B", "1 command of type A"],
        ),
        ({"type": "", "format": "csv", "data": "type,task_key\nA,1\nA,2"}, ["2 commands of type A"]),
    ],
)
async def test_a_preview_says_how_many_commands_of_which_types(
    site: httpx.AsyncClient, form: dict[str, str], types: list[str]
) -> None:
    page = await site.post(f"{NEW}/preview", data=written(**form))
    assert page.status_code == 200 and [text for text in types if text not in page.text] == []


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"data": '{"n": 1}\n{"n": 1, "n": 2}'}, "Line 2: The key &#39;n&#39; appears more than once"),
        ({"data": '{"n": 1}\n\n{"n": '}, "Line 3: "),
        ({"data": '[{"n": 1}, {"x": "\\u0000"}]'}, "data, /1/x: "),
        ({"data": "[1, 2"}, "data: "),
        ({"data": ""}, "commands: found no commands"),
        ({"format": "csv", "data": "a,b\n1,2\n1"}, "Line 3: found 1 columns, wanted 2"),
        ({"format": "csv", "data": "a,a\n1,2"}, "Line 1: a column has no name, or the name of another one"),
        ({"format": "csv", "data": 'a\n"1'}, "Line 2: unexpected end of data"),
        ({"type": "", "data": '{"type": "A"}\n{"data": 1}'}, "Line 2, /type: found no type"),
        ({"type": "", "data": '{"type": "A", "prio": 1}'}, "Line 1, /prio: is not known"),
        ({"type": "", "data": '{"type": "A"}\n{"type": "A", "priority": 99999}'}, "Line 2, /priority: "),
        ({"type": "x" * 300}, "Line 1, /command_type: "),
        ({"domain": ""}, "domain: "),
        ({"canary": "3"}, "canary/size: found 3, but the batch has 2 commands"),
        ({"canary": "many"}, "canary is &#39;many&#39;"),
        ({"budget": "200"}, "budget/share: "),
        ({"budget": "x"}, "The failure budget is &#39;x&#39;"),
        ({"priority": "1e9"}, "priority is &#39;1e9&#39;"),
        ({"expires": "soon"}, "expires: found &#39;soon&#39;"),
        ({"callback": "Report", "callback_data": "{"}, "callback data: "),
        ({"data": "1\n" * (MOST_COMMANDS + 1)}, f"at most {MOST_COMMANDS:,} can be created here"),
        ({"data": '"' + "x" * MOST_TEXT + '"'}, "The data has more than 1,024 KiB."),
    ],
)
async def test_whatever_is_wrong_is_named_by_line_and_path(
    site: httpx.AsyncClient, database: Database, form: dict[str, str], said: str
) -> None:
    for path in ("preview", "create"):
        page = await site.post(f"{NEW}/{path}", data=written(**form))
        assert page.status_code == 400 and said in page.text, page.text
    assert database.count("command") == 0


async def test_a_form_has_a_limit_of_its_own(site: httpx.AsyncClient) -> None:
    page = await site.post(f"{NEW}/preview", data=written(data='"' + "x" * 200_000 + '"'))
    assert "1 command of type Debit" in page.text  # more than other forms may have
    huge = await site.post(f"{NEW}/preview", data=written(data="%" * 2 * MOST_TEXT))
    assert huge.status_code == 413 and "4,096 KiB" in huge.text
    other = await site.post("/batches/00000000-0000-0000-0000-000000000000/hold", data={"reason": "x" * 100_000})
    assert other.status_code == 413 and "64 KiB" in other.text


async def test_creating_is_only_for_operators_and_only_where_it_is_allowed(bus: CommandBus, database: Database) -> None:
    async with client(app(bus), **SAME_ORIGIN) as http:
        assert {(await _asked(http, route.method, route.path)).status_code for route in ROUTES} == {404}
        assert "Create a batch" not in (await http.get("/batches")).text
    allowed = app(bus, create=True, authenticate=known_users())
    async with client(allowed, **SAME_ORIGIN, **signed_in(Role.READER)) as http:
        assert {(await _asked(http, route.method, route.path)).status_code for route in ROUTES} == {403}
        assert "Create a batch" not in (await http.get("/batches")).text
    async with client(allowed, **signed_in(Role.OPERATOR)) as http:  # from another site
        form = written()
        assert (await http.post(f"{NEW}/preview", data=form)).status_code == 403
        assert (await http.post(f"{NEW}/create", data=form)).status_code == 403
        assert "Create a batch" in (await http.get("/batches")).text
    assert database.count("batch") == 0


async def _asked(http: httpx.AsyncClient, method: str, path: str) -> Any:
    return await http.request(method, path, data=written() if method == "POST" else None)
