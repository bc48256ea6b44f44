"""What pages show and refuse: data, actions, bad input, hostile texts, hidden payloads, a database in trouble."""

from __future__ import annotations

import html
import json
import re
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote
from uuid import UUID

import httpx
import psycopg
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from busload import (
    BatchCommand,
    CommandBus,
    HandlerContext,
    PermanentCommandError,
    RetryPolicy,
    Settings,
    SyncCommandBus,
)
from busload.audit import actions
from busload.batches.guards import Canary, FailureBudget
from busload.commands import listing
from busload.commands.command import Command
from busload.commands.execution import TROUBLESHOOTING
from busload.dashboard import Role, app
from busload.dashboard.app import ROUTES, TIME_LIMIT
from busload.dashboard.pages import batch, commands, overview
from busload.errors import InvalidCommandError, InvalidOperationError
from busload.health.health import HealthCode
from busload.integrations.self_opening_bus import SelfOpeningBus
from busload.jobs.job import BatchJob, Stage
from tests.dashboard.hostile import HOSTILE
from tests.dashboard.site import NOWHERE, SAME_ORIGIN, address, client, known_users, signed_in
from tests.dashboard.story import unpublished
from tests.given import DOMAIN, LOCKED_OUT, Database, Given, eventually, raising

LATER = datetime(2099, 1, 1, tzinfo=UTC)


class Page(HTMLParser):
    """What a browser makes of a page: its tags with their attributes, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text, self._spaced = "", ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        self._spaced += " "

    def handle_data(self, data: str) -> None:
        self.text += data
        self._spaced += data

    @property
    def words(self) -> str:
        return " ".join(self._spaced.split())

    @property
    def times(self) -> list[str]:
        """Those that a browser shows in the zone of the reader."""
        return [attrs["datetime"] for tag, attrs in self.tags if tag == "time"]

    @property
    def links(self) -> list[str]:
        return [attrs["href"] for tag, attrs in self.tags if tag == "a"]


async def seen(site: httpx.AsyncClient, path: str, status: int = 200) -> Page:
    answer = await site.get(path)
    assert answer.status_code == status, Page(answer.text).words
    return Page(answer.text)


async def acted(site: httpx.AsyncClient, path: str, status: int = 200, **fields: str) -> Page:
    answer = await site.post(path, data={"": "", **fields})
    assert answer.status_code == status, Page(answer.text).words
    return Page(answer.text)


# -- with data, and without --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/batches", "/commands"])
async def test_an_empty_page_says_what_to_do_next(site: httpx.AsyncClient, path: str) -> None:
    assert "busload" in (await seen(site, path)).words
    assert any(attrs.get("class") == "empty" for _, attrs in (await seen(site, path)).tags)


async def test_every_page_has_the_command_line_that_tells_the_same(site: httpx.AsyncClient, given: Given) -> None:
    batch_id, [command_id] = await given.in_troubleshooting(name="it's closed")
    lines = {
        "/": "busload health",
        "/batches?name=it%27s&status=IN_PROGRESS": "busload batch ls --status IN_PROGRESS --name 'it'\"'\"'s'",
        f"/batches/{batch_id}": f"busload batch show {batch_id}",
        "/commands?status=FAILED": "busload command ls --status FAILED",
        f"/commands/{DOMAIN}/{command_id}": f"busload command show {command_id} --domain {DOMAIN}",
    }
    for path, line in lines.items():
        assert line in (await seen(site, path)).text


async def test_the_overview_counts_every_place(site: httpx.AsyncClient, given: Given, database: Database) -> None:
    await given.in_troubleshooting(2)
    await given.batch(5)
    given.claimed(1)
    words = (await seen(site, "/")).words
    assert "Waiting 4" in words
    assert "Running 1" in words
    assert "Troubleshooting 2" in words
    assert "Workers 1" in words  # the one that has claimed; the other one has stopped


async def test_the_overview_says_what_is_wrong(site: httpx.AsyncClient, given: Given) -> None:
    await given.batch(3)
    words = (await seen(site, "/")).words
    assert "Degraded" in words
    assert "3 commands are ready in payments, and no worker serves it." in words


async def test_the_overview_leads_to_where_an_operator_acts(site: httpx.AsyncClient, given: Given) -> None:
    batch_id, _ = await given.in_troubleshooting()
    await given.batch(3)
    page = await seen(site, "/")
    links = page.links
    assert "See its workers" in page.words
    assert {"/troubleshooting", "/dispatch", "/workers", f"/workers?domain={DOMAIN}"} <= set(links)
    assert f"/troubleshooting?domain={DOMAIN}" in links
    assert f"/troubleshooting?batch={batch_id}" in (await seen(site, "/batches")).links
    unseen = {"DATABASE_UNREACHABLE", "DATABASE_UNUSABLE", "SCHEMA_OUTDATED", "NOT_RUNNING"}  # there is no page then
    assert set(overview.WHERE) == set(HealthCode) - unseen


async def test_batches_are_filtered_and_paged(site: httpx.AsyncClient, given: Given, bus: CommandBus) -> None:
    for n in range(52):
        await given.batch(name=f"January {n}")
    await bus.create_batch("crm", [BatchCommand("Push")], name="contacts")
    assert "contacts" in (await seen(site, "/batches?domain=crm")).words
    assert "January" not in (await seen(site, "/batches?name=CONT")).words
    assert "There are no such batches" in (await seen(site, "/batches?status=COMPLETED")).words
    first = await seen(site, "/batches")
    [next_page] = [link for link in first.links if "after=" in link]
    second = await seen(site, next_page)
    rows = [attrs["data-row"] for page in (first, second) for _, attrs in page.tags if "data-row" in attrs]
    assert len(rows) == len(set(rows)) == 53


async def test_batches_are_filtered_by_the_time_of_their_creation(
    site: httpx.AsyncClient, given: Given, bus: CommandBus
) -> None:
    first, second = [await given.batch(name=name) for name in ("January", "February")]
    between = (await given.batch_now(second)).created_at
    at = quote(between.isoformat())
    assert [name in (await seen(site, f"/batches?since={at}")).words for name in ("January", "February")] == [0, 1]
    assert [name in (await seen(site, f"/batches?until={at}")).words for name in ("January", "February")] == [1, 0]
    assert f"--until {between.isoformat(timespec='milliseconds')}" in (await seen(site, f"/batches?until={at}")).words
    assert [batch.batch_id for batch in await bus.list_batches(DOMAIN, created_before=between)] == [first]
    assert "is no time" in (await seen(site, "/batches?since=yesterday", 400)).words
    with pytest.raises(InvalidCommandError, match="NAIVE_DATETIME at /created_after"):
        await bus.list_batches(DOMAIN, created_after=datetime(2030, 1, 1))


async def test_a_batch_shows_its_callback_and_where_it_is(site: httpx.AsyncClient, given: Given) -> None:
    given.handler()
    given.handler("Report")
    batch_id = await given.batch(on_complete=BatchCommand("Report"))
    assert "Callback Report is sent when the batch completes" in (await seen(site, f"/batches/{batch_id}")).words
    await given.drained()
    callback = (await given.batch_now(batch_id)).callback_id
    page = await seen(site, f"/batches/{batch_id}")
    assert f"/commands/{DOMAIN}/{callback}" in page.links and "Report Completed" in page.words


async def test_an_action_counts_only_what_it_can_reach(site: httpx.AsyncClient, given: Given, bus: CommandBus) -> None:
    """What waits in troubleshooting has not ended, and is neither held, nor resumed, nor canceled with its batch."""
    batch_id, _ = await given.in_troubleshooting(2)
    words = (await seen(site, f"/batches/{batch_id}")).words
    assert "Up to 0 commands will wait." in words
    assert "Up to 0 commands that have not started will never run." in words
    await bus.hold_batch(DOMAIN, batch_id, reason="the bank complains")
    assert "0 commands may start again" in (await seen(site, f"/batches/{batch_id}")).words
    assert "Canceled 0 commands." in (await acted(site, f"/batches/{batch_id}/cancel", reason="wrong list")).words


async def test_a_held_batch_is_resumed_with_another_budget(
    site: httpx.AsyncClient, given: Given, bus: CommandBus
) -> None:
    batch_id = await given.batch(10, budget=FailureBudget(0.1))
    await bus.hold_batch(DOMAIN, batch_id, reason="look", operator="ada")
    for wrong in ({"budget": "0"}, {"budget": "101"}, {"budget": "x"}, {"budget": "1", "at_least": "x"}):
        await acted(site, f"/batches/{batch_id}/resume", 400, **wrong)
    assert (await given.batch_now(batch_id)).held_at is not None
    page = await acted(site, f"/batches/{batch_id}/resume", budget="50", at_least="")
    assert "It has the new failure budget." in page.words and "0 of 5 used" in page.words
    assert (await given.batch_now(batch_id)).failure_budget == 5


async def test_what_waits_for_a_canary_is_let_go_while_the_canary_runs(site: httpx.AsyncClient, given: Given) -> None:
    batch_id = await given.batch(10, canary=Canary(2))
    for _ in range(2):  # a hold by a person does not end a canary, and nor does its end
        assert "End canary" in (await seen(site, f"/batches/{batch_id}")).words
        await acted(site, f"/batches/{batch_id}/hold", reason="look")
        assert "End canary" not in (await seen(site, f"/batches/{batch_id}")).words
        await acted(site, f"/batches/{batch_id}/resume")
    assert len(given.claimed(10)) == 2
    page = await acted(site, f"/batches/{batch_id}/resume", end_canary="yes")
    assert "Resumed." in page.words and "End canary" not in page.words
    assert len(given.claimed(10)) == 8


async def test_the_failure_budget_of_a_batch_is_changed_while_it_runs(
    site: httpx.AsyncClient, given: Given, bus: CommandBus
) -> None:
    batch_id = await given.batch(10)
    assert "It has no budget now." in (await seen(site, f"/batches/{batch_id}")).words
    for wrong in ({}, {"budget": "0"}, {"budget": "x"}):
        await acted(site, f"/batches/{batch_id}/set-budget", 400, **wrong)
    page = await acted(site, f"/batches/{batch_id}/set-budget", budget="30", at_least="")
    assert "It has the new failure budget." in page.words and "Now 3 commands may, and 0 count." in page.words
    given.settled(given.claimed(2), "FAILED", details="{}")
    page = await acted(site, f"/batches/{batch_id}/set-budget", budget="10")
    assert "It has the new failure budget, which holds it at once." in page.words
    assert (await given.batch_now(batch_id)).held_reason == "BUDGET"


async def test_a_batch_shows_its_counters_its_story_and_its_commands(
    site: httpx.AsyncClient, given: Given, bus: CommandBus
) -> None:
    batch_id, ids = await given.in_troubleshooting(3, name="closed accounts", custom_data={"month": "January"})
    page = await seen(site, f"/batches/{batch_id}")
    assert "Troubleshooting 3" in page.words
    why = (await seen(site, f"/batches/{batch_id}/why")).words
    assert "3 commands are waiting for a person, PERMANENT: PermanentCommandError: CLOSED: account closed." in why
    assert "Batch stalled" in page.words
    assert "January" in page.words
    assert {f"/commands/{DOMAIN}/{command_id}" for command_id in ids} <= set(page.links)
    none = await seen(site, f"/batches/{batch_id}?status=COMPLETED")
    assert "No command of this batch has this status." in none.words


async def test_the_forecast_of_a_batch_says_that_it_leaves_out_what_waits_for_a_person(
    site: httpx.AsyncClient, given: Given
) -> None:
    batch_id = await given.batch(100)
    worker = given.registered_worker()
    given.settled(given.claimed(30, by=worker))
    given.settled(given.claimed(3, by=worker), TROUBLESHOOTING, details='{"type": "E"}', reason="PERMANENT")
    page = await seen(site, f"/batches/{batch_id}")
    assert "not counting 3 commands in troubleshooting" in page.words


async def test_the_story_of_a_batch_has_blanks_between_its_words_and_times_of_the_readers_zone(
    site: httpx.AsyncClient, given: Given, bus: CommandBus, database: Database
) -> None:
    batch_id = await given.batch()
    await bus.hold_batch(DOMAIN, batch_id, reason="the bank complains", operator="root")
    database.rows("UPDATE busload.batch SET held_at = held_at - interval '1 hour'")
    held_at = (await given.batch_now(batch_id)).held_at
    await bus.resume_batch(DOMAIN, batch_id, operator="root")
    page = await seen(site, f"/batches/{batch_id}")
    text = " ".join(page.text.split())
    assert held_at is not None
    assert "by root held reason: OPERATOR, reason: the bank complains" in text
    assert f"by root held reason: OPERATOR, held at: {held_at:%Y-%m-%d %H:%M:%S} UTC" in text
    assert held_at.isoformat(timespec="milliseconds") in page.times


async def test_a_command_shows_its_data_its_attempts_and_its_error(site: httpx.AsyncClient, given: Given) -> None:
    batch_id, [command_id] = await given.in_troubleshooting()
    page = await seen(site, f"/commands/{DOMAIN}/{command_id}")
    for part in ("n 0", "Sent", "Received attempt 1", "CLOSED account closed", "Traceback", "test_pages"):
        assert part.replace("test_pages", "given.py") in page.words
    assert f"/batches/{batch_id}" in page.links


async def test_a_command_shows_its_headers_and_its_trace(site: httpx.AsyncClient, given: Given) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01", "tenant": "<b>acme</b>"}
    page = (await site.get(f"/commands/{DOMAIN}/{await given.sent(headers=headers)}")).text
    assert f'<span id="trace-id">{trace}</span>' in page and 'data-copy="trace-id"' in page
    assert "&lt;b&gt;acme&lt;/b&gt;" in page and "<b>acme" not in page
    plain = (await site.get(f"/commands/{DOMAIN}/{await given.sent()}")).text
    assert "Headers</h2>" not in plain and "trace-id" not in plain


async def test_a_command_that_has_ended_links_to_its_reply(
    site: httpx.AsyncClient, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    given.handler()
    ids = [await given.sent(reply_to="shop") for _ in range(3)]
    waiting = (await site.get(f"/commands/payments/{ids[0]}")).text
    assert "<dd>shop</dd>" in waiting
    await given.drained()
    replies = {one.data["command_id"]: one for one in (await given.bus.list_commands("shop")).commands}
    for command_id in ids:
        page = (await site.get(f"/commands/payments/{command_id}")).text
        assert f'<a href="/commands/shop/{replies[str(command_id)].command_id}">shop</a>' in page

    monkeypatch.setattr(commands, "REPLIES", 1)  # there are too many to look at all
    page = (await site.get(f"/commands/payments/{ids[0]}")).text
    [search] = re.findall(r'<dd><a href="([^"]+)">shop</a>', page)
    assert str(replies[str(ids[0])].command_id) in (await site.get(html.unescape(search))).text


async def test_a_command_of_another_domain_links_to_its_batch(site: httpx.AsyncClient, bus: CommandBus) -> None:
    batch_id = await bus.create_batch(DOMAIN, [BatchCommand("Push", data=1, domain="crm")])
    [command] = await bus.list_commands("crm")
    page = await seen(site, f"/commands/crm/{command.command_id}")
    assert f"/batches/{batch_id}" in page.links
    await seen(site, f"/batches/{batch_id}")


async def test_a_batch_links_to_what_waits_for_a_person_in_another_domain(
    site: httpx.AsyncClient, bus: CommandBus, given: Given
) -> None:
    @bus.handler("crm", "Push")
    async def push(command: Command, ctx: HandlerContext) -> None:
        raise PermanentCommandError("no such contact", code="NO_CONTACT")

    batch_id = await bus.create_batch(DOMAIN, [BatchCommand("Push", domain="crm"), BatchCommand("Debit")])
    await given.drained(domains=["crm"])
    links = (await seen(site, f"/batches/{batch_id}/why")).links
    [cause, retry] = [link for link in links if "troubleshooting" in link]
    assert retry == f"{cause.replace('?', '/preview?')}&action=retry"
    assert cause.startswith("/troubleshooting/crm/")
    assert cause.endswith(f"?batch={batch_id}")
    assert "no such contact" in (await seen(site, cause)).words


async def test_commands_and_batches_of_a_job_link_to_it(site: httpx.AsyncClient, bus: CommandBus) -> None:
    job_id = await bus.jobs.create(DOMAIN, [Stage("load", [BatchCommand("Load")])], name="monthly report")
    [own] = await bus.list_batches(DOMAIN)
    [command] = await bus.list_commands(batch_id=own.batch_id)
    for path in (f"/batches/{own.batch_id}", f"/commands/{DOMAIN}/{command.command_id}"):
        page = await seen(site, path)
        assert f"/jobs/{job_id}" in page.links
        assert "monthly report" in page.words
    for theirs in (NOWHERE, "invoice run 7"):  # jobs of another system
        batch_id = await bus.create_batch(DOMAIN, [BatchCommand("Debit")], job_id=theirs)
        page = await seen(site, f"/batches/{batch_id}")
        assert str(theirs) in page.words
        assert not [link for link in page.links if link.startswith("/jobs/")]


async def test_commands_are_searched_by_everything(site: httpx.AsyncClient, given: Given) -> None:
    batch_id, [closed] = await given.in_troubleshooting()
    ready = await given.sent(task_key="invoice 7")
    found = {
        "status=IN_TROUBLESHOOTING_QUEUE": closed,
        "status=PENDING": ready,
        "type=Debit": ready,
        "task_key=invoice+7": ready,
        f"batch={batch_id}": closed,
        "error=ACCOUNT+closed": closed,
        "domain=crm": None,
        "since=2100-01-01T00:00": None,
        "until=2000-01-01": None,
    }
    for query, command_id in found.items():
        page = await seen(site, f"/commands?{query}")
        links = [link for link in page.links if link.startswith(f"/commands/{DOMAIN}/")]
        assert links == ([] if command_id is None else [f"/commands/{DOMAIN}/{command_id}"]), query


async def test_a_task_shows_every_attempt_at_it(site: httpx.AsyncClient, given: Given) -> None:
    ids = [await given.sent(task_key="invoice & 7") for _ in range(2)]
    page = await seen(site, "/trace?task_key=invoice+%26+7")
    assert [link for link in page.links if link.startswith(f"/commands/{DOMAIN}/")] == [
        f"/commands/{DOMAIN}/{command_id}" for command_id in ids
    ]


async def test_no_page_leads_to_one_on_which_there_is_nothing(
    site: httpx.AsyncClient, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "LIMIT", 2)
    monkeypatch.setattr(batch, "COMMANDS", 2)
    batch_id = await given.batch(4)
    for path in ("/commands", "/commands?status=PENDING", f"/commands?batch={batch_id}", f"/batches/{batch_id}"):
        [second] = [link for link in (await seen(site, path)).links if "after=" in link]
        last = await seen(site, second)
        assert len([link for link in last.links if link.startswith(f"/commands/{DOMAIN}/")]) == 2, path
        assert [link for link in last.links if "after=" in link] == [], path


async def test_a_search_that_has_looked_at_everything_says_so(
    site: httpx.AsyncClient, given: Given, bus: CommandBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page looks at only so many rows, so nobody knows before whether anything fits on the next one."""
    monkeypatch.setattr(listing, "MOST_TEXTS", 1)
    monkeypatch.setattr(actions, "LOOKED_AT", 1)
    await given.in_troubleshooting()
    await bus.domains.pause(DOMAIN, reason="closed", operator="eve")
    for path, said in (
        ("/commands?error=unheard", "No further command fits."),
        ("/audit?operator=ada", "No operator did anything else like that."),
    ):
        [second] = [link for link in (await seen(site, path)).links if "after=" in link]
        assert said in (await seen(site, second)).words


@pytest.mark.parametrize("key", [" invoice 7 ", "\t", "k" * 512])
async def test_a_command_leads_to_its_task_whatever_the_key_is(site: httpx.AsyncClient, given: Given, key: str) -> None:
    command = f"/commands/{DOMAIN}/{await given.sent(task_key=key)}"
    [trace] = [link for link in (await seen(site, command)).links if link.startswith("/trace")]
    page = await seen(site, trace)
    assert command in page.links
    [search] = [link for link in page.links if link.startswith("/commands?")]
    assert command in (await seen(site, search)).links


async def test_pages_need_few_statements(site: httpx.AsyncClient, given: Given, sent: list[Any]) -> None:
    batch_id, [command_id] = await given.in_troubleshooting()
    given.handler("Busy", raising(RuntimeError("again")), retry=RetryPolicy(3, (3600,)))
    busy = await given.bus.create_batch(
        DOMAIN, [BatchCommand(kind) for kind in ("Busy", "Unknown", "Debit", "Debit", "Debit")]
    )
    await given.drained()  # one waits for its next attempt, one for a handler, and others in troubleshooting
    await given.bus.send(DOMAIN, "Debit", {}, priority=9)
    wide = await given.bus.create_batch(
        DOMAIN, [BatchCommand("Debit", domain=name, run_at=at) for name in ("a", "b", "c") for at in (None, LATER)]
    )
    stages = [Stage("load", [BatchCommand("Debit", run_at=LATER)]), Stage("send", [BatchCommand("Debit")])]
    of_jobs = await given.bus.jobs.create_batch(DOMAIN, [BatchJob(stages) for _ in range(5)])
    await site.get("/")  # the first one also looks at the schema
    needed = {}
    batch, command = f"/batches/{batch_id}", f"/commands/{DOMAIN}/{command_id}"
    explained = [f"/batches/{one}/why" for one in (batch_id, busy, wide, of_jobs)]
    for path in ("/", "/batches", batch, *explained, "/commands", command):
        sent.clear()
        await seen(site, path)
        needed[path] = len(sent)
    assert max(needed.values()) <= 12, needed


# -- actions -----------------------------------------------------------------------------------------------------------


async def test_an_action_happens_under_the_name_of_its_operator(bus: CommandBus, given: Given) -> None:
    batch_id = await given.batch(3)
    async with client(app(bus, authenticate=known_users()), **SAME_ORIGIN, **signed_in(Role.OPERATOR)) as site:
        held = await acted(site, f"/batches/{batch_id}/hold", reason="the bank complains")
        assert "Held. Nothing more of it starts." in held.words
        assert "the bank complains" in held.words
        now = await given.batch_now(batch_id)
        assert (now.held_by, now.held_note) == ("operator", "the bank complains")
        assert "It was held already." in (await acted(site, f"/batches/{batch_id}/hold", reason="again")).words
        assert "Resumed." in (await acted(site, f"/batches/{batch_id}/resume")).words
        assert (await given.batch_now(batch_id)).held_at is None
        changed = await acted(site, f"/batches/{batch_id}/reprioritize", priority="-5")
        assert "Gave 3 commands the priority -5." in changed.words
        canceled = await acted(site, f"/batches/{batch_id}/cancel", reason="wrong list")
        assert "Canceled 3 commands." in canceled.words
    assert (await given.batch_now(batch_id)).canceled_count == 3
    trail = await bus.get_batch_audit_trail(DOMAIN, batch_id)
    operators = {event.type: event.operator for event in trail if event.operator}
    assert operators == dict.fromkeys(
        ["BATCH_HELD", "BATCH_RESUMED", "BATCH_REPRIORITIZED", "BATCH_CANCELED"], "operator"
    )


async def test_a_command_is_retried_and_canceled(site: httpx.AsyncClient, given: Given) -> None:
    _, [command_id] = await given.in_troubleshooting()
    path = f"/commands/{DOMAIN}/{command_id}"
    for link in [link for link in (await seen(site, path)).links if "action=" in link]:
        assert re.search("(Patch and retry|Complete) 1 command[?]", (await seen(site, link)).words)
    assert "Put back into the queue" in (await acted(site, f"{path}/retry")).words
    assert (await given.command_now(command_id)).status == "PENDING"
    assert "Not possible now" in (await acted(site, f"{path}/retry", 409)).words
    assert "Canceled." in (await acted(site, f"{path}/cancel", reason="paid twice")).words
    assert (await given.command_now(command_id)).status == "CANCELED"
    assert "Not possible now" in (await acted(site, f"{path}/cancel", 409, reason="again")).words


async def test_a_reader_sees_no_actions(bus: CommandBus, given: Given) -> None:
    batch_id = await given.batch()
    async with client(app(bus, authenticate=known_users()), **signed_in(Role.READER)) as site:
        assert not [tag for tag, _ in (await seen(site, f"/batches/{batch_id}")).tags if tag == "dialog"]


# -- bad input ---------------------------------------------------------------------------------------------------------

WRONG = {
    f"/batches/{NOWHERE}": (404, "There is no batch"),
    f"/commands/{DOMAIN}/{NOWHERE}": (404, "There is no command"),
    "/commands/crm/{command}": (404, "There is no command"),
    f"/commands/1%2F2/{NOWHERE}": (404, "no page at this address"),
    f"/commands/1x/{NOWHERE}": (400, "domain"),
    "/batches/nonsense": (404, "no page at this address"),
    "/batches?status=DONE": (400, "There is no status 'DONE'. Use one of PENDING"),
    "/batches?type=X": (400, "There is no type 'X'"),
    "/batches?domain=1": (400, "INVALID_NAME"),
    "/batches?after=x": (400, "which is no id"),
    f"/batches?after={NOWHERE}": (404, "Go back to the first page"),
    f"/batches?name={'x' * 501}": (400, "up to 500 characters"),
    "/batches?name=%00": (400, "PostgreSQL cannot hold"),
    "/commands?after=x": (400, "no cursor"),
    "/commands?after=1": (404, "Go back to the first page"),
    "/commands?after=99999999999999999999": (400, "after"),
    "/commands?batch=x": (400, "which is no id"),
    "/commands?since=yesterday": (400, "which is no time"),
    "/commands?since=0001-01-01T00:00%2B23:59": (400, "which is no time"),
    "/commands?type=%F0%9F%98%80": (400, "INVALID_NAME"),
    "/trace": (400, "names no task"),
    "/trace?task_key=unknown": (404, "No command was ever sent for the task"),
    "/batches/{batch}?status=X": (400, "There is no status"),
}


async def test_wrong_input_gets_a_page_that_says_what_to_do(site: httpx.AsyncClient, given: Given) -> None:
    batch_id, [command_id] = await given.in_troubleshooting()
    for path, (status, said) in WRONG.items():
        page = await seen(site, path.replace("{batch}", str(batch_id)).replace("{command}", str(command_id)), status)
        assert said in page.words, path
        assert any(tag == "h1" for tag, _ in page.tags)


async def test_a_wrong_form_does_nothing(site: httpx.AsyncClient, given: Given, database: Database) -> None:
    batch_id = await given.batch()
    before = database.everything()
    for verb, fields, said in (
        ("hold", {}, "reason is empty"),
        ("hold", {"reason": "  "}, "reason is empty"),
        ("hold", {"reason": "a\0b"}, "without NUL"),
        ("cancel", {}, "reason is empty"),
        ("reprioritize", {"priority": "high"}, "priority is 'high'"),
        ("reprioritize", {"priority": "99999"}, "priority"),
        ("reprioritize", {}, "priority is empty"),
    ):
        assert said in (await acted(site, f"/batches/{batch_id}/{verb}", 400, **fields)).words
    assert "There is no batch" in (await acted(site, f"/batches/{NOWHERE}/hold", 404, reason="x")).words
    assert database.everything() == before


# -- hostile texts -----------------------------------------------------------------------------------------------------


def check_harmless(html: str) -> None:
    """Nothing of a page is a program, but the scripts of the dashboard itself."""
    for tag, attrs in Page(html).tags:
        assert tag not in ("iframe", "object", "embed", "base", "style", "img", "video", "math", "textarea"), tag
        assert not [name for name in attrs if name.startswith("on") or name == "style" or "hx-on" in name], attrs
        if tag == "script":
            assert attrs["src"].startswith("/static/")
        for name in ("href", "action", "src", "hx-post", "data-live-url"):
            assert attrs.get(name, "/").startswith(("/", "#")) and not attrs.get(name, "/").startswith("//"), attrs


async def test_hostile_texts_stay_texts(site: httpx.AsyncClient, given: Given, bus: CommandBus) -> None:
    async def fail(command: Command, ctx: HandlerContext) -> Any:
        text = command.data["text"]
        if command.data["kind"] == "parked":
            raise PermanentCommandError(text, code=text, details={text: text})
        return {text: [text]}

    given.handler("Hostile", fail)
    batches, commands = [], []
    for text in HOSTILE:
        sent = [
            BatchCommand("Hostile", data={"kind": kind, "text": text, text: text}, task_key=text)
            for kind in ("parked", "done")
        ]
        batches.append(await bus.create_batch(DOMAIN, sent, name=text, custom_data={text: text}, fair_by=text))
    await given.drained()
    for batch_id, text in zip(batches, HOSTILE, strict=True):
        await bus.hold_batch(DOMAIN, batch_id, reason=text, operator=text)
        commands += await bus.list_batch_commands(DOMAIN, batch_id)
    paths = ["/", "/batches", "/commands", *(f"/batches/{id}{part}" for id in batches for part in ("", "/why"))]
    paths += [f"/commands/{DOMAIN}/{command.command_id}" for command in commands]
    for path in paths:
        answer = await site.get(path)
        assert answer.status_code == 200, path
        check_harmless(answer.text)
    for text in HOSTILE:
        for path, name in (("/batches", "name"), ("/commands", "status"), ("/trace", "task_key")):
            check_harmless((await site.get(path, params={name: text})).text)
    names = (await seen(site, "/batches")).text
    assert [text for text in HOSTILE if text not in names] == []


# -- what is hidden ----------------------------------------------------------------------------------------------------


@pytest.fixture
async def secrets(given: Given, bus: CommandBus) -> tuple[UUID, list[UUID]]:
    """A batch whose data, results and errors nobody should read."""

    async def pay(command: Command, ctx: HandlerContext) -> Any:
        if command.data["n"]:
            raise PermanentCommandError("canary-message", code="CODE", details={"about": "canary-details"})
        return {"paid": "canary-result"}

    given.handler("Pay", pay)
    sent = [BatchCommand("Pay", data={"n": n, "to": "canary-data"}, task_key="task") for n in (0, 1)]
    batch_id = await bus.create_batch(DOMAIN, sent, custom_data={"for": "canary-custom"})
    await given.drained()
    return batch_id, [command.command_id for command in await bus.list_batch_commands(DOMAIN, batch_id)]


async def _answered(site: httpx.AsyncClient, path: str) -> str:
    """The source of a page, with what a browser does not show."""
    answer = await site.get(path)
    assert answer.status_code == 200, (path, Page(answer.text).words)
    return answer.text


@pytest.mark.parametrize(("role", "hidden"), [(Role.READER, True), (Role.OPERATOR, False)])
async def test_payloads_are_hidden_from_readers_on_request(
    bus: CommandBus, secrets: tuple[UUID, list[UUID]], role: Role, hidden: bool
) -> None:
    batch_id, ids = secrets
    served = app(bus, authenticate=known_users(), hide_payloads=True)
    texts = ""
    async with client(served, **signed_in(role)) as site:
        for path in (
            "/",
            "/batches",
            "/commands",
            f"/batches/{batch_id}",
            f"/batches/{batch_id}/why",
            "/trace?task_key=task",
        ):
            texts += await _answered(site, path)
        for command_id in ids:
            texts += await _answered(site, f"/commands/{DOMAIN}/{command_id}")
        searched = await site.get("/commands?error=canary-message")
    found = {kind for kind in ("data", "result", "message", "details", "custom") if f"canary-{kind}" in texts}
    assert found == (set() if hidden else {"data", "result", "message", "details", "custom"})
    assert searched.status_code == (403 if hidden else 200)
    assert "CODE" in texts


@pytest.mark.parametrize(("role", "hidden"), [(Role.READER, True), (Role.OPERATOR, False)])
async def test_what_a_broker_said_is_hidden_as_other_error_texts_are(
    bus: CommandBus, given: Given, database: Database, role: Role, hidden: bool
) -> None:
    command_id = await given.sent()
    unpublished(database, error="canary-broker")
    paths = ("/", "/dispatch", f"/commands/{DOMAIN}/{command_id}", "/commands.csv", "/commands.json")
    async with client(app(bus, authenticate=known_users(), hide_payloads=True), **signed_in(role)) as site:
        texts = {path: await _answered(site, path) for path in paths}
    assert {path for path, text in texts.items() if "canary" in text} == (set() if hidden else set(paths))
    for path in ("/dispatch", f"/commands/{DOMAIN}/{command_id}"):
        assert ("hidden" in Page(texts[path]).words) == hidden


async def test_a_reader_sees_type_and_code_of_an_error_and_that_the_rest_is_hidden(
    bus: CommandBus, given: Given
) -> None:
    async def lose(command: Command, ctx: HandlerContext) -> None:
        raise ConnectionResetError("canary-message")  # an error without a code

    given.handler("Lose", lose, retry=RetryPolicy(max_attempts=1))
    await given.batch(1, "Lose")
    _, [coded] = await given.in_troubleshooting()
    items = await bus.troubleshooting.list(DOMAIN)
    [plain] = [item.command_id for item in items if item.command_id != coded]
    async with client(app(bus, authenticate=known_users(), hide_payloads=True), **signed_in(Role.READER)) as site:
        pages = [(await seen(site, f"/commands/{DOMAIN}/{one}")).words for one in (coded, plain)]
    for page, error in zip(pages, ("CLOSED", "ConnectionResetError"), strict=True):
        assert f"{error} The rest is hidden from readers." in page
        assert "canary" not in page and "account closed" not in page and "Traceback" not in page


async def test_values_of_masked_keys_are_seen_by_nobody(bus: CommandBus, given: Given) -> None:
    data = {"IBAN": "canary-1", "deep": [{"card": {"number": "canary-2"}, "open": "sesame"}], "api_token": "canary-3"}
    command_id = await given.sent(data=data)
    async with client(app(bus, mask=("iban", "c?rd", "*token*"))) as site:
        answer = await site.get(f"/commands/{DOMAIN}/{command_id}")
    assert "canary" not in answer.text
    assert "sesame" in answer.text
    assert "••••••" in answer.text


async def test_data_of_every_kind_is_drawn(site: httpx.AsyncClient, given: Given) -> None:
    deep: Any = "bottom"
    for _ in range(63):
        deep = [deep]
    kinds: list[Any] = [None, 0, "", [], {}, 10**400, 1.5, True, deep, {"x": list(range(5000))}, {"": {"a": None}}]
    for data in kinds:
        command_id = await given.sent(data=data)
        page = await seen(site, f"/commands/{DOMAIN}/{command_id}")
        assert "".join(json.dumps(data).split()) in "".join(page.text.split())


# -- a database in trouble ---------------------------------------------------------------------------------------------


async def test_a_slow_page_ends_its_statement(
    site: httpx.AsyncClient, given: Given, database: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await given.batch()
    await seen(site, "/batches")
    monkeypatch.setitem(TIME_LIMIT, "GET", 0.3)
    with psycopg.connect(dsn) as blocker:
        blocker.execute("LOCK TABLE busload.batch IN ACCESS EXCLUSIVE MODE")
        page = await seen(site, "/batches", 503)
        assert "PostgreSQL did not answer in time" in page.words
        await eventually(lambda: not database.rows(LOCKED_OUT))
    monkeypatch.undo()
    await seen(site, "/batches")


async def test_a_database_that_is_away_is_told_without_its_address() -> None:
    settings = Settings(pool_timeout=timedelta(seconds=0.2))
    bus = CommandBus("postgresql://canary_user:canary_password@127.0.0.1:1/canary_name", settings=settings)
    await bus.open(wait=None)
    try:
        async with client(app(bus), **SAME_ORIGIN) as site:
            for route in ROUTES:
                if route.name in ("static", "trace", "dispatch.repair"):  # they ask for something else first
                    continue
                asks = "?action=cancel" if route.name.startswith("cause.") else ""
                path = address(route, fingerprint="0123456789ab") + asks
                given = {"reason": "x", "priority": "1", "example": str(NOWHERE), "domain": DOMAIN, "name": "x"}
                given |= {"budget": "5"}
                bound = {"count": "1", "until": "2030-01-01T00:00:00Z", "last": "1", "digest": "1"}
                fields = {**given, **bound} if route.method == "POST" else None
                answer = await site.request(route.method, path, data=fields)
                assert answer.status_code == 503, route.name
                assert "The database is away" in answer.text
                assert "canary" not in answer.text
    finally:
        await bus.close()


async def test_a_read_only_database_is_told(dsn: str, bus: CommandBus, given: Given, database: Database) -> None:
    batch_id = await given.batch()
    name = database.value("SELECT current_database()")
    database.rows(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    async with CommandBus(dsn) as readonly, client(app(readonly), **SAME_ORIGIN) as site:
        await seen(site, f"/batches/{batch_id}")
        assert "The database is read-only" in (await acted(site, f"/batches/{batch_id}/hold", 503, reason="x")).words


async def test_a_schema_that_is_too_old_is_told(dsn: str, database: Database) -> None:
    database.rows("DELETE FROM busload.migration WHERE version = (SELECT max(version) FROM busload.migration)")
    async with CommandBus(dsn) as bus, client(app(bus)) as site:
        for path in ("/", "/batches", "/commands"):
            page = await seen(site, path, 503)
            assert "The schema is too old" in page.words
            assert "busload schema migrate" in page.words


async def test_a_database_without_a_schema_is_not_said_to_have_an_old_one(dsn: str, database: Database) -> None:
    database.rows("DROP SCHEMA busload CASCADE")
    async with CommandBus(dsn) as bus, client(app(bus)) as site:
        page = await seen(site, "/", 503)
    assert "There is no schema yet" in page.words and "too old" not in page.words
    assert "busload schema migrate" in page.words


async def test_a_schema_that_goes_away_under_open_pages_is_told_until_it_is_back(
    site: httpx.AsyncClient, given: Given, database: Database
) -> None:
    batch_id = await given.batch(1)
    await seen(site, f"/batches/{batch_id}")
    database.rows("ALTER SCHEMA busload RENAME TO gone")
    for path in ("/", "/batches", "/commands", "/retention", "/metrics", f"/batches/{batch_id}"):
        page = await seen(site, path, 503)
        assert "The schema is not whole" in page.words and "busload doctor" in page.words, path
    answer = await site.post(f"/batches/{batch_id}/hold", data={"reason": "x"})
    assert answer.status_code == 503 and "The schema is not whole" in answer.text
    database.rows("ALTER SCHEMA gone RENAME TO busload")
    await seen(site, f"/batches/{batch_id}")


async def test_a_role_without_rights_is_told(dsn: str, database: Database, given: Given) -> None:
    batch_id = await given.batch()
    name = "dashboard_reader_" + database.value("SELECT current_database()")[-8:].replace("-", "_")
    database.rows(f'CREATE ROLE "{name}" LOGIN')
    database.rows(f'GRANT USAGE ON SCHEMA busload TO "{name}"')
    database.rows(f'GRANT SELECT ON ALL TABLES IN SCHEMA busload TO "{name}"')
    database.rows(f'GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA busload TO "{name}"')
    try:
        their = psycopg.conninfo.make_conninfo(dsn, user=name)
        async with CommandBus(their) as bus, client(app(bus), **SAME_ORIGIN) as site:
            await seen(site, f"/batches/{batch_id}")
            page = await acted(site, f"/batches/{batch_id}/hold", 403, reason="x")
            assert "Not allowed by PostgreSQL" in page.words
    finally:
        database.rows(f'DROP OWNED BY "{name}"')
        database.rows(f'DROP ROLE "{name}"')


async def test_an_unexpected_error_shows_nothing_of_it(
    site: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, bus: CommandBus, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "canary"

    async def fail(*args: Any, **options: Any) -> Any:
        raise LookupError(secret)

    monkeypatch.setattr(bus, "list_batches", fail)
    page = await seen(site, "/batches", 500)
    assert "LookupError" in page.words
    assert "canary" not in page.text
    assert "LookupError" in caplog.text
    assert "canary" not in "".join(record.getMessage() for record in caplog.records)


# -- mounted elsewhere -------------------------------------------------------------------------------------------------


async def test_every_link_stays_below_the_prefix(bus: CommandBus, given: Given) -> None:
    batch_id, [command_id] = await given.in_troubleshooting()
    outer = Starlette(routes=[Mount("/ops/busload", app(bus))])
    async with client(outer, **SAME_ORIGIN) as site:
        paths = ["/ops/busload/"]
        for path in paths:
            page = await seen(site, path)
            for tag, attrs in page.tags:
                for name in ("href", "src", "hx-post", "data-live-url"):
                    value = attrs.get(name)
                    if value and not value.startswith(("#", "?")):
                        assert value.startswith("/ops/busload/"), (path, tag, name, value)
                        if name == "href" and tag == "a" and value not in paths and len(paths) < 60:
                            paths.append(value)
        assert f"/ops/busload/batches/{batch_id}" in paths
        assert f"/ops/busload/commands/{DOMAIN}/{command_id}" in paths
        held = await acted(site, f"/ops/busload/batches/{batch_id}/hold", reason="x")
        assert "Held." in held.words


async def test_the_bus_is_opened_and_closed_with_the_application(dsn: str) -> None:
    bus = CommandBus(dsn)
    served = app(bus)
    async with served.router.lifespan_context(served):
        await bus.list_batches(None)
    with pytest.raises(InvalidOperationError, match="not open"):
        await bus.list_batches(None)
    async with CommandBus(dsn) as given_bus:
        served = app(given_bus)
        async with served.router.lifespan_context(served):
            pass
        await given_bus.list_batches(None)


def test_a_bus_that_pages_cannot_await_is_refused_when_the_application_is_made(dsn: str) -> None:
    of_the_same: Any = SyncCommandBus(dsn), SelfOpeningBus(dsn)
    for one in of_the_same:
        with pytest.raises(ValueError, match=r"needs a CommandBus, found a .*Bus: its .*CommandBus\(bus\.dsn\)\."):
            app(one)
    none: Any = dsn
    with pytest.raises(ValueError, match=r"needs a CommandBus, found a str\."):
        app(none)
