"""The pages for running a bus: jobs, domains, limits, buffers, dispatch, retention, and the audit of operators."""

from __future__ import annotations

import asyncio
import shlex
from datetime import timedelta
from html import unescape
from importlib.resources import files
from typing import Any

import click
import httpx
import psycopg
import pytest
from jinja2 import nodes
from starlette.applications import Starlette

from busload import BatchCommand, CommandBus
from busload.cli import main as cli
from busload.dashboard import Role, app
from busload.dashboard.pages import dispatch
from busload.dashboard.pages.job import Graph
from busload.dashboard.render import _templates
from busload.jobs.job import Stage
from tests.dashboard.hostile import HOSTILE
from tests.dashboard.site import NOWHERE, SAME_ORIGIN, client, known_users, signed_in, stream
from tests.dashboard.story import RATE_LIMIT, Story, everything, failed_job, parked_group, unpublished
from tests.dashboard.test_pages import acted, check_harmless, seen
from tests.given import DOMAIN, WITHIN, Database, Given

LISTS = ("/jobs", "/domains", "/limits", "/buffers", "/dispatch", "/workers", "/audit", "/schedules")


@pytest.fixture
async def story(given: Given, bus: CommandBus) -> Story:
    return await everything(given, bus)


# -- every page --------------------------------------------------------------------------------------------------------


async def test_an_empty_page_says_what_to_do_next(site: httpx.AsyncClient) -> None:
    for path in LISTS:
        page = await seen(site, path)
        assert any(attrs.get("class") == "empty" for _, attrs in page.tags), path
    assert "Nothing was ever pruned" in (await seen(site, "/retention")).words


async def test_every_page_tells_what_there_is(
    site: httpx.AsyncClient, story: Story, sent: list[Any], bus: CommandBus
) -> None:
    """One look at all of them: what they say, how many statements they need, and that their streams say the same."""
    await site.get("/")
    [sick] = [one.reasons[0].message for one in await bus.workers.list() if one.reasons]
    job = await bus.jobs.get(None, story.job_id)
    assert job is not None
    assert job.stages[0].batch is not None
    said = {
        "/jobs": ["monthly report payments Compensating", "busload job ls"],
        f"/jobs/{story.job_id}": [
            *("load Completed 2 of 2", "check Completed with failures", "send Pending", "undo load"),
            *("undo check Not needed", "month", f"busload job show {story.job_id}"),
        ],
        "/domains": ["crm Paused 0 0 0 0 3 0", "ada: down again", "ada the crm is down", "busload domain ls"],
        "/limits": ["crm tenant 1 12.5/s Refuses calls", "1,234 7 adapts", "bank x 1 of 3", "busload limit ls"],
        "/buffers": ["contact_events Open 2", "3 at a time, or after", "busload buffer ls"],
        "/buffers/contact_events": [
            "Waiting 2",
            "Troubleshooting 1",
            "busload.Group",
            "CLOSED: account closed",
            "busload buffer show contact_events",
        ],
        "/dispatch": [
            "In the outbox 3",
            "crm redis Refused 3",
            "the broker is full",
            "busload outbox ls",
            "no job crm",
        ],
        "/workers": ["given Alive payments 1 10", "9.8.7", sick, "silent Silent"],
        f"/workers/{story.worker}": ["Holds 1 of 10 slots", "Debit payments 1", "busload worker stop given"],
        "/retention": ["0 commands and 0 batches that had ended more than", "busload prune --older-than 30d --dry-run"],
        "/schedules": [
            "hourly reports · Push On every 1:00:00 UTC",
            "nightly reports · Push Paused",
            "busload schedule ls",
        ],
        "/schedules/nightly": [
            *("Paused by eve", "year-end closing", "Triggered", "Due 4", "0 2 * * *", "Europe/Paris"),
            *("In Europe/Paris In your time zone", "02:00:00", "the latest is fired", "month"),
            "busload schedule show nightly",
        ],
        "/audit": ["eve Batch held payments", "the bank complains", "ada Domain paused crm crm", "busload audit ls"],
    }
    assert set(said) == set(story.paths)
    for path, parts in said.items():
        sent.clear()
        page = await seen(site, path)
        assert len(sent) <= 12, (path, sent)
        for part in parts:
            assert part in page.words, path
    assert f"/batches/{job.stages[0].batch.batch_id}" in (await seen(site, f"/jobs/{story.job_id}")).links
    assert f"/jobs/{story.job_id}" in (await seen(site, "/jobs")).links


async def test_every_action_has_the_command_line_that_does_the_same(
    site: httpx.AsyncClient, story: Story, bus: CommandBus
) -> None:
    [waits, *_] = await bus.troubleshooting.list(None)
    others = [f"/batches/{story.batch_id}", f"/commands/{waits.domain}/{waits.command_id}", "/schedules/hourly"]
    done = set()
    for path in [*story.paths, *others]:
        html = (await site.get(path)).text
        dialogs = html.split("<dialog ")[1:]
        for dialog in dialogs:
            line = unescape(dialog.partition('<p class="line quiet">At the shell <code>')[2].partition("</code>")[0])
            noun, verb, *rest = shlex.split(line)[1:]
            command = cli.get_command(click.Context(cli), noun)
            verbs = command.commands if isinstance(command, click.Group) else getattr(command, "verbs", {})
            verbs[verb].make_context(verb, rest)  # refuses what it does not know, and what is missing
            done.add((noun, verb))
    assert {noun for noun, _ in done} == {
        *("batch", "buffer", "command", "domain", "job", "limit", "outbox", "schedule", "troubleshooting", "worker")
    }


def test_every_line_that_an_empty_page_offers_can_be_run() -> None:
    lines = set()
    for name in _templates().list_templates():
        source = (files("busload.dashboard") / "templates" / name).read_text(encoding="utf-8")
        for call in _templates().parse(source).find_all(nodes.Call):
            if isinstance(call.node, nodes.Getattr) and call.node.attr == "empty":
                lines |= {line.as_const() for line in call.args[1:]}
    assert {"busload demo", "busload worker app:bus"} <= lines
    for line in (line for line in lines if line.startswith("busload ")):  # others are Python
        noun, *rest = shlex.split(line)[1:]
        command = cli.get_command(click.Context(cli), noun)
        assert command is not None, line
        verbs = command.commands if isinstance(command, click.Group) else getattr(command, "verbs", {})
        if rest and rest[0] in verbs:
            noun, command = rest[0], verbs[rest.pop(0)]
        command.make_context(noun, rest)  # refuses what it does not know, and what is missing


async def test_a_page_and_its_stream_tell_the_same(dashboard: Starlette, story: Story) -> None:
    for path in story.paths:
        async with client(dashboard) as http, stream(dashboard, f"{path}/live") as events:
            html = (await http.get(path)).text
            _, values = await asyncio.wait_for(events.get(), WITHIN)
        shown = {part.partition('"')[0] for part in html.split('data-live="')[1:]}
        shown |= {
            pair.partition(":")[2]
            for part in html.split('data-live-attrs="')[1:]
            for pair in part.partition('"')[0].split()
        }
        assert shown <= set(values), path
        rows = {part.partition('"')[0].replace("&#43;", "+") for part in html.split('data-row="')[1:]}
        assert rows == set(values["rows"]), path
        assert shown or path == "/audit"


async def test_a_reader_sees_no_actions(bus: CommandBus, story: Story) -> None:
    async with client(app(bus, authenticate=known_users()), **signed_in(Role.READER)) as site:
        for path in story.paths:
            tags = (await seen(site, path)).tags
            assert not [tag for tag, _ in tags if tag == "dialog"], path
            assert not [attrs for _, attrs in tags if "hx-post" in attrs], path
    async with client(app(bus, authenticate=known_users()), **signed_in(Role.OPERATOR)) as site:
        acting = [path for path in story.paths if any(tag == "dialog" for tag, _ in (await seen(site, path)).tags)]
    assert acting == [
        *("/domains", "/limits", "/dispatch"),
        *(f"/jobs/{story.job_id}", f"/workers/{story.worker}", "/buffers/contact_events", "/schedules/nightly"),
    ]


@pytest.mark.parametrize("role", Role)
async def test_payloads_stay_hidden_from_readers(bus: CommandBus, story: Story, role: Role) -> None:
    texts = ""
    async with client(app(bus, authenticate=known_users(), hide_payloads=True), **signed_in(role)) as site:
        for path in story.paths:
            answer = await site.get(path)
            assert answer.status_code == 200, path
            texts += answer.text
    assert ("account closed" in texts) is (role is Role.OPERATOR)
    assert ("month" in texts.replace("monthly", "")) is (role is Role.OPERATOR)


async def test_every_link_stays_below_the_prefix_and_leads_somewhere(bus: CommandBus, story: Story) -> None:
    from starlette.routing import Mount

    outer = Starlette(routes=[Mount("/ops", app(bus))])
    async with client(outer) as site:
        for path in story.paths:
            for link in (await seen(site, f"/ops{path}")).links:
                if not link.startswith("#"):
                    assert link.startswith("/ops/"), (path, link)
                    assert (await site.get(link)).status_code == 200, (path, link)


# -- jobs --------------------------------------------------------------------------------------------------------------


async def test_jobs_are_filtered_and_paged(site: httpx.AsyncClient, bus: CommandBus) -> None:
    for n in range(52):
        await bus.jobs.create(DOMAIN if n else "crm", [Stage("a", [BatchCommand("Debit")])], name=f"January {n}")
    first = await seen(site, "/jobs")
    [more] = [link for link in first.links if "after=" in link]
    second = await seen(site, more)
    rows = [attrs["data-row"] for page in (first, second) for _, attrs in page.tags if "data-row" in attrs]
    assert len(rows) == len(set(rows)) == 52
    for query, count in {"domain=crm": 1, "name=JANUARY+51": 1, "status=FAILED": 0, f"batch={NOWHERE}": 0}.items():
        page = await seen(site, f"/jobs?{query}")
        assert len([1 for _, attrs in page.tags if "data-row" in attrs]) == count, query
    assert "busload job ls --domain crm --name Jan" in (await seen(site, "/jobs?domain=crm&name=Jan")).text


async def test_a_job_is_canceled_and_resumed(bus: CommandBus, given: Given) -> None:
    given.handler("Debit")
    stages = [Stage("a", [BatchCommand("Debit")] * 3), Stage("b", [BatchCommand("Debit")])]
    job_id = await bus.jobs.create(DOMAIN, stages)
    async with client(app(bus, authenticate=known_users()), **SAME_ORIGIN, **signed_in(Role.OPERATOR)) as site:
        assert "reason is empty" in (await acted(site, f"/jobs/{job_id}/cancel", 400)).words
        page = await acted(site, f"/jobs/{job_id}/cancel", reason="wrong list")
        assert "Canceled, 3 commands with it." in page.words
        assert "Decided by operator" in page.words
        assert "Cancel job" not in page.words
        assert "Not possible now" in (await acted(site, f"/jobs/{job_id}/resume", 409)).words
        failed = await bus.jobs.create(DOMAIN, stages)
        given.database.rows("UPDATE busload.job SET status = 'FAILED', completed_at = now() WHERE job_id = %s", failed)
        assert "Resume this job?" in (await seen(site, f"/jobs/{failed}")).words
        await acted(site, f"/jobs/{failed}/resume")
    job = await bus.jobs.get(DOMAIN, job_id)
    assert job is not None
    assert (job.status, job.operator, job.reason) == ("CANCELED", "operator", "wrong list")
    actions = [(one.type, one.job_id) for one in (await bus.audit.list(operator="operator")).actions if one.job_id]
    assert actions == [("JOB_RESUMED", str(failed)), ("JOB_CANCELED", str(job_id))]


async def test_the_graph_has_every_stage_and_what_undoes_it(bus: CommandBus, given: Given) -> None:
    job = await bus.jobs.get(None, await failed_job(given, bus))
    assert job is not None
    graph = Graph.of(job)
    assert [box.key for box in graph.boxes] == ["stage.0", "undo.0", "stage.1", "undo.1", "stage.2"]
    assert [line.undoes for line in graph.lines] == [True, False, True, False, True]
    for box in graph.boxes:
        assert 0 <= box.x <= graph.width - 190
        assert 0 <= box.y <= graph.height - 92
    assert len({(box.x, box.y) for box in graph.boxes}) == 5
    long = Graph.of(await _job_of_stages(bus, 12))
    assert long.height < 100  # nothing to undo


async def _job_of_stages(bus: CommandBus, count: int) -> Any:
    job_id = await bus.jobs.create(DOMAIN, [Stage(f"s{n}", [BatchCommand("Debit")]) for n in range(count)])
    return await bus.jobs.get(DOMAIN, job_id)


# -- domains and limits ------------------------------------------------------------------------------------------------


async def test_a_domain_is_paused_and_resumed(bus: CommandBus, given: Given) -> None:
    await given.batch(3)
    async with client(app(bus, authenticate=known_users()), **SAME_ORIGIN, **signed_in(Role.OPERATOR)) as site:
        assert "Paused payments." in (await acted(site, "/domains/pause", domain=DOMAIN, reason="down")).words
        [pause] = await bus.domains.pauses()
        assert (pause.domain, pause.operator, pause.reason) == (DOMAIN, "operator", "down")
        assert "was paused already" in (await acted(site, "/domains/pause", domain=DOMAIN, reason="x")).words
        refused = (await acted(site, "/domains/pause", 404, domain="paymets", reason="x")).words
        assert "No command was ever sent to 'paymets', and no worker serves it." in refused
        assert "paymets" not in (await seen(site, "/domains")).words
        assert "3 commands are ready in it" in (await acted(site, "/domains/resume", domain=DOMAIN)).words
        assert "was not paused" in (await acted(site, "/domains/resume", domain=DOMAIN)).words
    assert await bus.domains.pauses() == []
    assert [one.type for one in (await bus.audit.list()).actions] == ["DOMAIN_RESUMED", "DOMAIN_PAUSED"]


async def test_a_limit_is_reset(site: httpx.AsyncClient, database: Database, bus: CommandBus) -> None:
    for subject in ("a", "b"):
        database.rows(RATE_LIMIT, "crm", subject)
    assert "may go again." in (await acted(site, "/limits/reset", name="crm", by="a")).words
    assert [one.blocked_until is None for one in await bus.limits.list()] == [True, False]
    assert "2 values of its" in (await acted(site, "/limits/reset", name="crm")).words
    [act] = {attrs["hx-post"] for _, attrs in (await seen(site, "/limits?name=crm")).tags if "hx-post" in attrs}
    database.rows(RATE_LIMIT, "bank", "")
    assert "bank" not in (await acted(site, act, name="crm", by="a")).words  # the page keeps its filter
    assert "No limit 'unknown' was used" in (await acted(site, "/limits/reset", 404, name="unknown")).words
    assert [(one.type, one.limit) for one in (await bus.audit.list()).actions] == [
        ("LIMIT_RESET", "crm by a"),
        ("LIMIT_RESET", "crm"),
        ("LIMIT_RESET", "crm by a"),
    ]
    assert "busload limit show crm" in (await seen(site, "/limits?name=crm")).text
    assert "No rate limit was used" in (await seen(site, "/limits?name=other")).words


async def test_a_limit_of_one_value_is_reset_alone_whatever_the_value_is(
    site: httpx.AsyncClient, database: Database, bus: CommandBus
) -> None:
    for subject in ("", " ", " a ", "a"):
        database.rows(RATE_LIMIT, "crm", subject)
    assert "busload limit reset crm --by &#39;&#39;" in (await site.get("/limits")).text
    for subject in ("", " ", " a "):
        words = (await acted(site, "/limits/reset", name="crm", by=subject)).words
        assert "Calls under crm may go again." in words
    assert [one.subject for one in await bus.limits.list() if one.blocked_until] == ["a"]


# -- dispatch ----------------------------------------------------------------------------------------------------------


async def test_what_the_broker_did_not_take_is_tried_again(
    site: httpx.AsyncClient, given: Given, database: Database
) -> None:
    await given.batch(3)
    unpublished(database)
    database.rows("UPDATE busload.outbox SET due_at = now() + interval '1 hour'")
    assert "Nothing waits." in (await acted(site, "/dispatch/retry", domain="crm")).words
    assert "3 commands are due now" in (await acted(site, "/dispatch/retry", domain=DOMAIN)).words
    assert database.value("SELECT bool_and(due_at <= now()) FROM busload.outbox")


async def test_a_reroute_is_bound_to_the_count_that_was_seen(
    site: httpx.AsyncClient, given: Given, database: Database, bus: CommandBus
) -> None:
    await given.batch(3)
    unpublished(database)
    page = await seen(site, "/dispatch")
    [count] = [attrs["value"] for tag, attrs in page.tags if attrs.get("name") == "count"]
    assert count == "3"
    await given.batch(2)
    unpublished(database)
    refused = await acted(site, "/dispatch/reroute", 409, domain=DOMAIN, count=count)
    assert "The page said that 3 commands wait" in refused.words
    assert database.count("queue") == 0
    assert "Rerouted 5 commands" in (await acted(site, "/dispatch/reroute", domain=DOMAIN, count="5")).words
    assert database.value("SELECT sum(hi - lo + 1) FROM busload.queue") == 5
    [done] = (await bus.audit.list(action="REROUTED")).actions
    assert done.commands == 5
    assert "count is 'all'" in (await acted(site, "/dispatch/reroute", 400, domain=DOMAIN, count="all")).words


async def test_what_has_not_failed_is_not_called_failed(site: httpx.AsyncClient, given: Given, bus: CommandBus) -> None:
    """One column has all that came to no good end: the page of the batch parts them."""
    await given.in_troubleshooting(2)
    await bus.cancel_batch(DOMAIN, await given.batch(3), reason="wrong list")
    words = (await seen(site, "/dispatch")).words
    assert "Completed Failed, canceled or parked no job payments 0 0 0 0 5" in words


async def test_only_a_bus_with_a_broker_can_compare(site: httpx.AsyncClient, story: Story) -> None:
    page = await seen(site, "/dispatch")
    assert "busload outbox reconcile --repair" in page.words
    assert "no transport" in (await acted(site, "/dispatch/repair", 409, domain=DOMAIN)).words


async def test_messages_of_a_broker_are_repaired(dsn: str, database: Database) -> None:
    async with CommandBus(dsn, transport=dsn) as bus:
        await bus.create_batch(DOMAIN, [BatchCommand("Debit")] * 3)
        database.rows("DELETE FROM busload.message")
        database.rows("UPDATE busload.queue SET published_at = now() - interval '1 hour'")
        async with client(app(bus), **SAME_ORIGIN) as site:
            page = await acted(site, "/dispatch/repair", domain=DOMAIN)
            assert "Published 3 commands again, and removed 0 messages." in page.words
            assert "Compared with the broker" in page.words
        assert [one.domain for one in (await bus.audit.list(action="OUTBOX_REPAIRED")).actions] == [DOMAIN]


async def test_the_days_do_not_forget_what_was_published(
    site: httpx.AsyncClient, bus: CommandBus, given: Given, database: Database
) -> None:
    given.handler("Debit")
    await given.batch(2)
    await given.drained()
    day = database.value("SELECT (now() AT TIME ZONE 'UTC')::date::text")
    assert f"{day} 1 1 100 %" in (await seen(site, "/dispatch")).words
    database.rows("UPDATE busload.batch SET completed_at = now() - interval '1 hour'")
    database.rows("UPDATE busload.execution SET finished_at = now() - interval '1 hour'")
    pruned = await bus.prune(timedelta(minutes=1))
    assert pruned.batches == 1
    assert f"{day} 1 1 100 %" in (await seen(site, "/dispatch")).words
    assert len((await bus.outbox.report(days=14)).daily) + 13 == dispatch.DAYS


# -- buffers -----------------------------------------------------------------------------------------------------------


async def test_a_buffer_is_flushed(site: httpx.AsyncClient, bus: CommandBus, database: Database) -> None:
    buffer = bus.buffer("events", size=100, max_age=timedelta(hours=1))
    await buffer.add_many([1, 2, 3])
    assert "3 events may leave" in (await acted(site, "/buffers/events/flush")).words
    assert database.value("SELECT flushed_at > now() - interval '1 minute' FROM busload.buffer")
    assert [one.buffer for one in (await bus.audit.list()).actions] == ["events"]
    await buffer.distribute()
    assert "Nothing waits in it." in (await acted(site, "/buffers/events/flush")).words
    assert "There is no buffer 'other'" in (await acted(site, "/buffers/other/flush", 404)).words


async def test_the_overview_of_buffers_agrees_with_their_status(given: Given, bus: CommandBus) -> None:
    database = given.database
    database.rows(
        "CREATE TABLE public.event (id bigserial PRIMARY KEY, n int, group_id uuid, created_at timestamptz "
        "NOT NULL DEFAULT now())"
    )
    from busload.buffers.declaration import BufferTable

    theirs = bus.buffer("theirs", table=BufferTable("event"), size=2)
    theirs.handler()(lambda group, ctx: None)
    await given.drained(domains=["theirs"])
    await theirs.add_many([{"n": n} for n in range(5)])
    await parked_group(given, bus, "ours", ["a", "b"])
    await bus.buffer("new").add(1)
    for one in await bus.buffers.overview():
        status = await bus.buffers.get(one.name)
        assert status is not None
        names = (
            "table",
            "waiting",
            "oldest",
            "calls",
            "done",
            "size",
            "max_age",
            "problem",
            "groups_ready",
            "groups_in_troubleshooting",
        )
        assert [getattr(one, name) for name in names] == [getattr(status, name) for name in names], one.name
    assert len(await bus.buffers.overview(limit=2)) == 2
    database.rows("DROP TABLE public.event")
    [lost] = [one for one in await bus.buffers.overview() if one.name == "theirs"]
    assert lost.waiting is None
    assert "does not exist" in (lost.problem or "")


async def test_a_locked_table_holds_nobody_up(given: Given, bus: CommandBus, dsn: str, site: httpx.AsyncClient) -> None:
    from busload.buffers.declaration import BufferTable

    database = given.database
    database.rows(
        "CREATE TABLE public.event (id bigserial PRIMARY KEY, n int, group_id uuid, created_at timestamptz "
        "NOT NULL DEFAULT now())"
    )
    theirs = bus.buffer("theirs", table=BufferTable("event"), size=2)
    theirs.handler()(lambda group, ctx: None)
    await given.drained(domains=["theirs"])
    with psycopg.connect(dsn) as other:
        other.execute("LOCK TABLE public.event IN ACCESS EXCLUSIVE MODE")
        page = await seen(site, "/buffers")
        assert "theirs Problem ?" in page.words
        assert "locked by another transaction" in page.words


# -- retention ---------------------------------------------------------------------------------------------------------


async def test_the_last_prune_is_told(
    site: httpx.AsyncClient, given: Given, bus: CommandBus, database: Database
) -> None:
    given.handler("Debit")
    for age in (100, 10, 0):
        batch_id = await given.batch(2)
        await given.drained()
        database.rows(
            "UPDATE busload.batch SET completed_at = now() - %s * interval '1 day' WHERE batch_id = %s", age, batch_id
        )
        database.rows(
            "UPDATE busload.execution SET finished_at = now() - %s * interval '1 day'"
            "  FROM busload.command WHERE id = command AND batch_id = %s",
            age,
            batch_id,
        )
    old = {one.days: (one.batches, one.commands) for one in (await bus.retention()).old}
    assert old == {7: (2, 4), 30: (1, 2), 90: (1, 2), 365: (0, 0)}
    assert (await bus.retention()).last is None
    await bus.prune(timedelta(days=30), dry_run=True)
    assert (await bus.retention()).last is None
    pruned = await bus.prune(timedelta(days=30), archive=True)
    last = (await bus.retention()).last
    assert last is not None
    assert (last.older_than, last.archive, last.pruned) == (timedelta(days=30), True, pruned)
    assert "2 commands and 1 batch that had ended more than" in (await seen(site, "/retention")).words


# -- audit -------------------------------------------------------------------------------------------------------------


async def test_the_audit_is_filtered_and_paged(site: httpx.AsyncClient, bus: CommandBus, given: Given) -> None:
    for n in range(52):
        await bus.domains.pause(f"d{n}", operator="ada" if n else "eve", reason=f"reason {n}")
    first = await seen(site, "/audit")
    [more] = [link for link in first.links if "after=" in link]
    second = await seen(site, more)
    rows = [attrs["data-row"] for page in (first, second) for _, attrs in page.tags if "data-row" in attrs]
    assert len(rows) == len(set(rows)) == 52
    counts = {
        *(("operator=eve", 1), ("operator=eve&action=DOMAIN_PAUSED", 1), ("action=DOMAIN_RESUMED", 0)),
        *(("domain=d7", 1), ("since=2100-01-01T00:00", 0), ("until=2000-01-01T00:00", 0)),
    }
    for query, count in counts:
        page = await seen(site, f"/audit?{query}")
        assert len([1 for _, attrs in page.tags if "data-row" in attrs]) == count, query
    assert "busload audit ls --operator eve" in (await seen(site, "/audit?operator=eve")).text


async def test_the_audit_tells_patch_and_retry_from_a_plain_retry(
    site: httpx.AsyncClient, bus: CommandBus, given: Given
) -> None:
    _, ids = await given.in_troubleshooting(3)
    await bus.troubleshooting.retry(DOMAIN, ids[0], operator="ada")
    [cause] = await bus.troubleshooting.groups(DOMAIN)
    patch = [{"op": "add", "path": "/currency", "value": "EUR"}]
    await bus.troubleshooting.retry_group(DOMAIN, cause.fingerprint, patch=patch, operator="ada")
    await given.drained()
    page = await seen(site, "/audit")
    assert "ada Operator retried with patched data payments 2 commands" in page.words
    assert "ada Operator retried payments command" in page.words


# -- schedules ---------------------------------------------------------------------------------------------------------


async def test_a_schedule_is_paused_resumed_and_triggered(
    site: httpx.AsyncClient, bus: CommandBus, database: Database
) -> None:
    for n in range(52):
        bus.schedule(f"s{n:02}", every=timedelta(hours=1), command=BatchCommand("Debit"), domain=DOMAIN)
    await bus.schedules.sync()
    assert "Paused s00." in (await acted(site, "/schedules/s00/pause", reason="audit")).words
    assert "s00 was paused already." in (await acted(site, "/schedules/s00/pause", reason="again")).words
    assert "Sent command " in (await acted(site, "/schedules/s00/trigger")).words
    assert "Resumed s00." in (await acted(site, "/schedules/s00/resume")).words
    assert "s00 was not paused." in (await acted(site, "/schedules/s00/resume")).words
    done = [(one.type, one.operator) for one in (await bus.audit.list()).actions]
    [operator] = {operator for _, operator in done}
    assert operator
    assert [type for type, _ in done] == ["SCHEDULE_RESUMED", "SCHEDULE_TRIGGERED", "SCHEDULE_PAUSED"]
    assert [one.operator for one in await bus.schedules.history("s00")] == [operator]
    [more] = [link for link in (await seen(site, "/schedules")).links if "after=" in link]
    assert "s51" in (await seen(site, more)).words
    database.rows("UPDATE busload.schedule SET next_due_at = now() - interval '2 minutes' WHERE name = 's01'")
    assert "s01 payments · Debit Overdue" in (await seen(site, "/schedules")).words
    [sent] = await bus.schedules.history("s00")
    assert sent.command_id is not None
    assert f"/commands/{DOMAIN}/{sent.command_id}" in (await seen(site, "/schedules")).links
    assert "Pending" in (await seen(site, "/schedules")).words
    await bus.cancel_command(DOMAIN, sent.command_id, reason="not today")
    assert "Canceled" in (await seen(site, "/schedules")).words
    database.rows("UPDATE busload.schedule SET rule = jsonb_build_object('moon', 'full') WHERE name = 's01'")
    assert "moon" in (await seen(site, "/schedules/s01")).words


# -- bad input ---------------------------------------------------------------------------------------------------------

WRONG = {
    f"/jobs/{NOWHERE}": (404, "There is no job"),
    "/jobs/x": (404, "no page at this address"),
    "/jobs?status=DONE": (400, "There is no status 'DONE'"),
    f"/jobs?after={NOWHERE}": (404, "Go back to the first page"),
    "/jobs?after=x": (400, "which is no id"),
    "/jobs?domain=1": (400, "INVALID_NAME"),
    "/jobs?batch=x": (400, "which is no id"),
    "/audit?action=LAUGH": (400, "There is no action 'LAUGH'. Use one of"),
    "/audit?after=x": (400, "after"),
    "/audit?after=1.1": (404, "Go back to the first page"),
    "/audit?since=soon": (400, "which is no time"),
    "/audit?domain=1": (400, "INVALID_NAME"),
    "/dispatch?domain=1": (400, "INVALID_NAME"),
    "/buffers/other": (404, "There is no buffer 'other'"),
    "/buffers/%00": (404, "There is no buffer"),
    "/limits?name=%00": (400, "PostgreSQL cannot hold"),
    "/schedules/other": (404, "There is no schedule 'other'"),
    "/schedules/%00": (400, "without NUL"),
    "/schedules?domain=1": (400, "INVALID_NAME"),
    "/schedules?after=zzz": (404, "Go back to the first page"),
}


async def test_wrong_input_gets_a_page_that_says_what_to_do(site: httpx.AsyncClient) -> None:
    for path, (status, said) in WRONG.items():
        assert said in (await seen(site, path, status)).words, path


async def test_a_wrong_form_does_nothing(site: httpx.AsyncClient, story: Story, given: Given) -> None:
    before = given.database.everything()
    for path, status, fields, said in (
        ("/domains/pause", 400, {}, "domain is empty"),
        ("/domains/pause", 400, {"domain": DOMAIN}, "reason is empty"),
        ("/domains/pause", 400, {"domain": "1", "reason": "x"}, "INVALID_NAME"),
        ("/domains/pause", 400, {"domain": DOMAIN, "reason": "a\0b"}, "without NUL"),
        ("/domains/resume", 400, {}, "domain is empty"),
        ("/limits/reset", 400, {}, "name is empty"),
        ("/dispatch/reroute", 400, {"count": "1"}, "domain is empty"),
        ("/dispatch/reroute", 400, {"domain": "crm"}, "count is empty"),
        ("/dispatch/repair", 400, {}, "domain is empty"),
        (f"/jobs/{story.job_id}/cancel", 400, {}, "reason is empty"),
        (f"/jobs/{NOWHERE}/cancel", 404, {"reason": "x"}, "There is no job"),
        (f"/jobs/{NOWHERE}/resume", 404, {}, "There is no job"),
        ("/schedules/nightly/pause", 400, {}, "reason is empty"),
        ("/schedules/other/pause", 404, {"reason": "x"}, "There is no schedule 'other'"),
        ("/schedules/other/trigger", 404, {}, "There is no schedule 'other'"),
    ):
        assert said in (await acted(site, path, status, **fields)).words, path
    assert given.database.everything() == before


# -- hostile texts -----------------------------------------------------------------------------------------------------


async def test_hostile_texts_stay_texts(site: httpx.AsyncClient, given: Given, bus: CommandBus) -> None:
    database, together = given.database, "".join(HOSTILE)
    paths = ["/jobs", "/domains", "/limits", "/buffers", "/dispatch", "/audit", "/retention", "/schedules"]
    for n, text in enumerate(HOSTILE):
        what = BatchCommand("Debit", data={text: text})
        bus.schedule(f"hostile-{n}", every=timedelta(hours=1), command=what, domain=DOMAIN)
        await bus.schedules.sync()
        await bus.schedules.trigger(f"hostile-{n}", operator=text)
        await bus.schedules.pause(f"hostile-{n}", reason=text, operator=text)
        paths.append(f"/schedules/hostile-{n}")
        stages = [Stage("a", [BatchCommand("Debit", task_key=text)])]
        job_id = await bus.jobs.create(DOMAIN, stages, name=text, custom_data={text: text})
        await bus.jobs.cancel(DOMAIN, job_id, reason=text, operator=text)
        paths.append(f"/jobs/{job_id}")
        await bus.domains.pause(DOMAIN, reason=text, operator=text)
        await bus.domains.resume(DOMAIN, operator=text)
        database.rows(RATE_LIMIT, text, text)
        database.rows("INSERT INTO busload.concurrency_limit (name, most) VALUES (%s, 1)", text)
        database.rows(
            "INSERT INTO busload.permit (limit_name, limit_subject, worker, command) VALUES (%s, %s, 1, 1)", text, text
        )
        await bus.limits.reset(text, text, operator=text)
        about = {"job_id": text, "stage": text}
        await bus.create_batch(DOMAIN, [BatchCommand("Debit")], name=text, **about)  # type: ignore[arg-type]
        database.rows(
            "INSERT INTO busload.buffer (buffer, relation, size, max_age, problem) VALUES (%s, %s, 1, '1 s', %s)",
            text,
            text,
            text,
        )
        paths.append(f"/buffers/{text.replace('%', '%25').replace('/', '%2F').replace('#', '%23').replace('?', '%3F')}")
    unpublished(database, error=together)
    await bus.domains.pause(DOMAIN, reason=together, operator=HOSTILE[3])
    for path in paths:
        answer = await site.get(path)
        assert answer.status_code in (200, 400, 404), path
        check_harmless(answer.text)
    for text in HOSTILE:
        for path, name in (("/jobs", "name"), ("/audit", "operator"), ("/limits", "name"), ("/dispatch", "domain")):
            check_harmless((await site.get(path, params={name: text})).text)
    listed = (await seen(site, "/limits")).text
    assert [text for text in HOSTILE if text not in listed] == []
