"""Troubleshooting by cause: what its pages show and refuse, and decisions that are bound to what was seen."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from uuid import UUID

import httpx
import psycopg
import pytest

from busload import BatchCommand, CommandBus, HandlerContext, PermanentCommandError
from busload.commands.command import Command
from busload.commands.data_type import DataType
from busload.dashboard import Role, app
from busload.dashboard.guard import MOST_BODY
from busload.dashboard.pages import decision, troubleshooting
from tests.dashboard.hostile import HOSTILE
from tests.dashboard.site import NOWHERE, SAME_ORIGIN, client, known_users, signed_in
from tests.dashboard.test_pages import Page, check_harmless, seen
from tests.given import DOMAIN, Database, Given

FIELDS = ("count", "until", "last", "digest")


async def fail(command: Command, ctx: HandlerContext) -> Any:
    """Fails with the code and the message that its data names; succeeds without one."""
    if (code := command.data.get("code")) is not None:
        raise PermanentCommandError(command.data.get("message", f"No {code}"), code=code, details={"about": code})


class Story:
    """Commands that fail as they are told to, and the addresses of their causes."""

    def __init__(self, given: Given, bus: CommandBus) -> None:
        self.given, self.bus = given, bus
        for domain, command_type in ((DOMAIN, "Pay"), (DOMAIN, "Refund"), ("crm", "Push")):
            given.bus.handler(domain, command_type)(fail)

    async def failed(
        self, code: str, count: int = 1, command_type: str = "Pay", domain: str = DOMAIN, **data: Any
    ) -> UUID:
        """A batch whose commands wait for a person."""
        sent = [BatchCommand(command_type, data={"code": code, "n": n, **data}) for n in range(count)]
        batch_id = await self.bus.create_batch(domain, sent, name=f"{code} batch")
        await self.given.drained(domains=[domain])
        return batch_id

    async def path(self, code: str, domain: str = DOMAIN) -> str:
        [cause] = [group for group in await self.bus.troubleshooting.groups(domain) if group.error_code == code]
        return f"/troubleshooting/{domain}/{cause.fingerprint}"

    async def waiting(self, domain: str = DOMAIN) -> int:
        return await self.bus.troubleshooting.count(domain)

    async def statuses(self, batch_id: UUID, domain: str = DOMAIN) -> set[str]:
        return {str(one.status) for one in await self.bus.list_batch_commands(domain, batch_id)}

    async def operators(self, batch_id: UUID, event: str) -> list[str | None]:
        found = []
        for one in await self.bus.list_batch_commands(DOMAIN, batch_id):
            found += [e.operator for e in await self.bus.get_audit_trail(DOMAIN, one.command_id) if e.type == event]
        return found


@pytest.fixture
def story(given: Given, bus: CommandBus) -> Story:
    return Story(given, bus)


async def posted(site: httpx.AsyncClient, path: str, status: int = 200, /, **fields: str) -> Page:
    answer = await site.post(path, data={"": "", **fields})
    assert answer.status_code == status, Page(answer.text).words
    return Page(answer.text)


def form_of(page: Page) -> dict[str, str]:
    """The hidden fields of a preview: what was seen."""
    hidden = {attrs["name"]: attrs["value"] for tag, attrs in page.tags if attrs.get("type") == "hidden"}
    return {name: value for name, value in hidden.items() if name in (*FIELDS, "example")}


async def previewed(site: httpx.AsyncClient, path: str, action: str, query: str = "") -> dict[str, str]:
    return form_of(await seen(site, f"{path}/preview?action={action}{query}"))


# -- what is shown -----------------------------------------------------------------------------------------------------


async def test_causes_of_all_domains_are_listed_the_largest_first(site: httpx.AsyncClient, story: Story) -> None:
    await story.failed("CLOSED", 2)
    await story.failed("EXPIRED", 3, "Refund")
    await story.failed("HTTP", 1, "Push", "crm")
    page = await seen(site, "/troubleshooting")
    assert "6 waiting for a person, by 3 causes" in page.words
    assert page.words.index("No EXPIRED") < page.words.index("No CLOSED") < page.words.index("No HTTP")
    assert "crm · Push · permanent" in page.words
    labels = [attrs["aria-label"] for tag, attrs in page.tags if tag == "svg" and attrs.get("class") == "spark"]
    assert labels[0] == "3 failed in the last 24 hours, most of them (3) in the last hour"
    assert {await story.path("CLOSED"), await story.path("HTTP", "crm")} <= set(page.links)


async def test_causes_are_filtered_by_everything(site: httpx.AsyncClient, story: Story) -> None:
    closed = await story.failed("CLOSED", 2)
    await story.failed("EXPIRED", 1, "Refund")
    await story.failed("HTTP", 1, "Push", "crm")
    found = {
        "domain=crm": {"HTTP"},
        "type=Refund": {"EXPIRED"},
        "text=no+closed": {"CLOSED"},
        "text=PERMANENTcommand": {"CLOSED", "EXPIRED", "HTTP"},
        "reason=PERMANENT": {"CLOSED", "EXPIRED", "HTTP"},
        "reason=EXHAUSTED": set(),
        f"batch={closed}": {"CLOSED"},
        f"batch={NOWHERE}": set(),
    }
    for query, codes in found.items():
        page = await seen(site, f"/troubleshooting?{query}")
        shown = {code for code in ("CLOSED", "EXPIRED", "HTTP") if f"No {code}" in page.words}
        assert shown == codes, query
        assert codes or "Nothing that waits for a person fits this filter." in page.words


async def test_causes_are_paged(site: httpx.AsyncClient, story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(troubleshooting, "LIMIT", 2)
    for code, count in (("A", 3), ("B", 2), ("C", 2), ("D", 2), ("E", 1)):
        await story.failed(code, count)
    shown, path = [], "/troubleshooting"
    while path:
        page = await seen(site, path)
        assert "10 waiting for a person, by 5 causes" in page.words
        shown += [attrs["data-row"] for _, attrs in page.tags if "data-row" in attrs]
        path = next((link for link in page.links if "after=" in link), "")
    assert len(shown) == len(set(shown)) == 5


async def test_a_spark_line_counts_by_hour(site: httpx.AsyncClient, story: Story, database: Database) -> None:
    await story.failed("CLOSED", 6)
    for hours, count in ((2.5, 3), (30, 1)):
        database.rows(
            "UPDATE busload.troubleshooting SET since = since - %s * interval '1 hour' WHERE command IN (SELECT command"
            " FROM busload.troubleshooting WHERE since > now() - interval '1 hour' ORDER BY command LIMIT %s)",
            hours,
            count,
        )
    page = await seen(site, await story.path("CLOSED"))
    [label] = [attrs["aria-label"] for tag, attrs in page.tags if attrs.get("class") == "spark"]
    assert label == "5 failed in the last 24 hours, most of them (3) in one hour, 3 hours ago"


async def test_a_cause_shows_an_example_and_its_commands(
    site: httpx.AsyncClient, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(troubleshooting, "COMMANDS", 3)
    batch_id = await story.failed("CLOSED", 5, to={"iban": "DE1", "api_token": "canary"})
    path = await story.path("CLOSED")
    first = await seen(site, path)
    for part in ("No CLOSED", "Waiting 5", "Traceback", "raise PermanentCommandError", "iban : DE1", "about CLOSED"):
        assert part.replace(" : ", " ") in first.words, part
    assert "canary" not in first.text
    [next_page] = [link for link in first.links if "after=" in link]
    second = await seen(site, next_page)
    rows = [attrs["data-row"] for page in (first, second) for _, attrs in page.tags if "data-row" in attrs]
    assert len(set(rows)) == len(rows) == 5
    assert f"/batches/{batch_id}" in first.links
    assert f"busload troubleshooting retry --group {path[-12:]} --domain {DOMAIN} --dry-run" in first.text


async def test_batch_and_command_lead_to_their_causes(site: httpx.AsyncClient, story: Story) -> None:
    batch_id = await story.failed("CLOSED", 3)
    assert f"/troubleshooting?batch={batch_id}" in (await seen(site, f"/batches/{batch_id}")).links
    [command, *_] = await story.bus.list_batch_commands(DOMAIN, batch_id)
    page = await seen(site, f"/commands/{DOMAIN}/{command.command_id}")
    assert "3 like this" in page.words
    assert await story.path("CLOSED") in page.links


async def test_an_empty_list_says_what_to_do_next(site: httpx.AsyncClient) -> None:
    page = await seen(site, "/troubleshooting")
    assert "Nothing waits for a person." in page.words
    assert any(attrs.get("class") == "empty" for _, attrs in page.tags)


async def test_the_pages_need_few_statements(site: httpx.AsyncClient, story: Story, sent: list[Any]) -> None:
    batch_id = await story.failed("CLOSED", 3)
    path = await story.path("CLOSED")
    form = await previewed(site, path, "patch")
    [command, *_] = await story.bus.list_batch_commands(DOMAIN, batch_id)
    needed = {}
    for one in ("/troubleshooting", path, f"{path}/preview?action=retry", f"{path}/preview?action=patch"):
        sent.clear()
        await seen(site, one)
        needed[one] = len(sent)
    sent.clear()
    await seen(site, f"/commands/{DOMAIN}/{command.command_id}")
    needed["command"] = len(sent)
    sent.clear()
    await posted(site, f"{path}/diff?action=patch", mode="patch", patch='[{"op": "remove", "path": "/n"}]', **form)
    needed["diff"] = len(sent)
    assert max(needed.values()) <= 12, needed


# -- decisions ---------------------------------------------------------------------------------------------------------


async def test_a_preview_says_what_it_will_touch(site: httpx.AsyncClient, story: Story, bus: CommandBus) -> None:
    whole = await story.failed("CLOSED", 2)
    await bus.create_batch(DOMAIN, [BatchCommand("Pay", data={"code": "CLOSED"}), BatchCommand("Other")], name="half")
    await bus.send(DOMAIN, "Pay", {"code": "CLOSED"})
    await story.given.drained()
    path = await story.path("CLOSED")
    words = (await seen(site, f"{path}/preview?action=complete")).words
    assert "Complete 4 commands?" in words
    assert "Batches 2 1 would complete" in words
    assert "CLOSED batch 2 completes" in words
    assert "half 1 stays open" in words
    assert "1 command is in no batch." in words
    assert "There is no undo." in words
    assert "2 count them as waiting again" in (await seen(site, f"{path}/preview?action=retry")).words
    words = (await seen(site, f"{path}/preview?action=cancel&batch={whole}")).words
    assert "Cancel 2 commands?" in words


@pytest.mark.parametrize(
    ("action", "fields", "event", "status", "said"),
    [
        ("retry", {}, "OPERATOR_RETRIED", "PENDING", "3 retried."),
        ("complete", {"result": '{"paid": "by hand"}'}, "OPERATOR_COMPLETED", "COMPLETED", "3 completed."),
        ("complete", {}, "OPERATOR_COMPLETED", "COMPLETED", "3 completed."),
        ("cancel", {"reason": "paid twice"}, "OPERATOR_CANCELED", "CANCELED", "3 canceled."),
    ],
    ids=["retry", "complete with a result", "complete", "cancel"],
)
async def test_all_of_a_cause_are_decided_under_the_name_of_the_operator(
    bus: CommandBus, story: Story, action: str, fields: dict[str, str], event: str, status: str, said: str
) -> None:
    batch_id, other = await story.failed("CLOSED", 3), await story.failed("EXPIRED", 2)
    path = await story.path("CLOSED")
    async with client(app(bus, authenticate=known_users()), **SAME_ORIGIN, **signed_in(Role.OPERATOR)) as site:
        form = await previewed(site, path, action)
        page = await posted(site, f"{path}/decide?action={action}", **form, **fields)
    assert said in page.words
    assert await story.statuses(batch_id) == {status}
    assert await story.statuses(other) == {"IN_TROUBLESHOOTING_QUEUE"}
    assert await story.operators(batch_id, event) == ["operator"] * 3
    if fields.get("result"):
        [one, *_] = await bus.list_batch_commands(DOMAIN, batch_id)
        assert one.result == {"paid": "by hand"}


async def test_some_are_decided_and_the_others_stay(site: httpx.AsyncClient, story: Story, bus: CommandBus) -> None:
    batch_id = await story.failed("CLOSED", 4)
    path = await story.path("CLOSED")
    ids = [one.command_id for one in await bus.list_batch_commands(DOMAIN, batch_id)]
    query = "".join(f"&command={command_id}" for command_id in ids[:2])
    page = await seen(site, f"{path}/preview?action=cancel&ticked=1{query}")
    assert "Cancel 2 commands?" in page.words
    assert f"busload troubleshooting cancel {ids[0]} {ids[1]} --domain {DOMAIN} --reason '…'" in page.text
    told = await posted(site, f"{path}/decide?action=cancel{query}", **form_of(page), reason="x")
    assert "2 canceled." in told.words
    now = {one.command_id: one.status for one in await bus.list_batch_commands(DOMAIN, batch_id)}
    assert [now[one] == "CANCELED" for one in ids] == [True, True, False, False]


async def test_a_filter_of_a_cause_binds_its_decisions(site: httpx.AsyncClient, story: Story) -> None:
    kept, batch_id = await story.failed("CLOSED", 2), await story.failed("CLOSED", 3)
    refunds = await story.failed("CLOSED", 1, "Refund")
    path = await story.path("CLOSED")
    for query, said in ((f"&batch={batch_id}", "3 retried."), ("&type=Refund&reason=PERMANENT", "1 retried.")):
        form = await previewed(site, path, "retry", query)
        assert said in (await posted(site, f"{path}/decide?action=retry{query}", **form)).words
    assert await story.statuses(kept) == {"IN_TROUBLESHOOTING_QUEUE"}
    assert await story.statuses(batch_id) == await story.statuses(refunds) == {"PENDING"}


async def test_new_failures_are_told_and_never_part_of_a_decision(site: httpx.AsyncClient, story: Story) -> None:
    old = await story.failed("CLOSED", 3)
    path = await story.path("CLOSED")
    form = await previewed(site, path, "retry")
    new = await story.failed("CLOSED", 2)
    refused = await posted(site, f"{path}/decide?action=retry", 409, **form)
    assert "Nothing was done" in refused.words
    assert "2 commands have failed for this cause since." in refused.words
    assert "You had seen 3 commands; now there are 5." in refused.words
    assert await story.waiting() == 5
    told = await posted(site, f"{path}/decide?action=retry", **form, leave_newer="1")
    assert "3 retried." in told.words
    assert await story.statuses(old) == {"PENDING"}
    assert await story.statuses(new) == {"IN_TROUBLESHOOTING_QUEUE"}


async def test_the_new_preview_of_a_refusal_can_be_confirmed(site: httpx.AsyncClient, story: Story) -> None:
    await story.failed("CLOSED", 3)
    path = await story.path("CLOSED")
    form = await previewed(site, path, "cancel")
    await story.failed("CLOSED", 2)
    refused = await posted(site, f"{path}/decide?action=cancel", 409, **form, reason="paid <twice>")
    filled = [attrs["value"] for _, attrs in refused.tags if attrs.get("name") == "reason"]
    assert filled == ["paid <twice>", "paid <twice>"]
    fresh: dict[str, str] = {}
    for _, attrs in refused.tags:
        if attrs.get("name") in FIELDS:
            fresh.setdefault(attrs["name"], attrs["value"])
    assert fresh["count"] == "5"
    assert "5 canceled." in (await posted(site, f"{path}/decide?action=cancel", **fresh, reason="x")).words


@pytest.mark.parametrize("leave_newer", ["", "1"])
async def test_what_another_operator_has_decided_is_told(
    site: httpx.AsyncClient, story: Story, bus: CommandBus, leave_newer: str
) -> None:
    batch_id = await story.failed("CLOSED", 3)
    path = await story.path("CLOSED")
    form = await previewed(site, path, "retry")
    [first, *_] = await bus.list_batch_commands(DOMAIN, batch_id)
    await bus.troubleshooting.cancel(DOMAIN, first.command_id, reason="faster", operator="ada")
    refused = await posted(site, f"{path}/decide?action=retry", 409, **form, leave_newer=leave_newer)
    assert "1 command was decided on by somebody else, or moved." in refused.words
    assert await story.waiting() == 2


async def test_one_that_went_and_one_that_came_are_noticed(
    site: httpx.AsyncClient, story: Story, bus: CommandBus, database: Database
) -> None:
    """A transaction that was open when the preview was made may add a failure with an earlier time."""
    batch_id = await story.failed("CLOSED", 3)
    path = await story.path("CLOSED")
    form = await previewed(site, path, "retry")
    [first, *_] = await bus.list_batch_commands(DOMAIN, batch_id)
    await bus.troubleshooting.cancel(DOMAIN, first.command_id, reason="faster")
    late = await story.failed("CLOSED", 1)
    database.rows("UPDATE busload.troubleshooting SET since = %s, command = 1 WHERE batch_id = %s", form["until"], late)
    refused = await posted(site, f"{path}/decide?action=retry", 409, **form)
    assert "1 command was decided on by somebody else, or moved. 1 command has failed" in refused.words


async def test_a_decision_without_a_preview_does_nothing(
    site: httpx.AsyncClient, story: Story, database: Database
) -> None:
    await story.failed("CLOSED", 3)
    path = await story.path("CLOSED")
    form = await previewed(site, path, "retry")
    before = database.everything()
    wrong: list[dict[str, str]] = [{}, {"count": "3"}]
    for name, values in {
        "count": ("", "x", "-1"),
        "until": ("", "yesterday", "2030-01-01"),
        "last": ("x", str(10**30), str(2**63)),
        "digest": ("x", str(2**70)),
        "after": ("x", str(10**30)),
    }.items():
        wrong += [{**form, name: value} for value in values]
    for fields in wrong:
        assert "Preview it first" in (await posted(site, f"{path}/decide?action=retry", 409, **fields)).words, fields
    assert (
        "Nothing was done" in (await posted(site, f"{path}/decide?action=retry", 409, **form | {"digest": "1"})).words
    )
    assert "Nothing was done" in (await posted(site, f"{path}/decide?action=retry", 409, **form | {"count": "2"})).words
    assert database.everything() == before


async def test_commands_of_a_canceled_batch_are_not_tried_again(
    site: httpx.AsyncClient, story: Story, bus: CommandBus
) -> None:
    canceled, open_batch = await story.failed("CLOSED", 2), await story.failed("CLOSED", 1)
    await bus.cancel_batch(DOMAIN, canceled, reason="x")
    path = await story.path("CLOSED")
    page = await seen(site, f"{path}/preview?action=retry")
    assert "Retry 1 command?" in page.words
    assert "2 more stay here: their batch was canceled" in page.words
    assert "1 retried." in (await posted(site, f"{path}/decide?action=retry", **form_of(page))).words
    assert await story.statuses(canceled) == {"IN_TROUBLESHOOTING_QUEUE"}
    assert await story.statuses(open_batch) == {"PENDING"}


# -- in portions -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request moves two commands."""
    monkeypatch.setattr(decision, "PORTION", 0.0)
    monkeypatch.setattr("busload.troubleshooting.selection.PART", 2)


def continued(page: Page) -> dict[str, str] | None:
    """The form that the page sends by itself; None if it is at its end."""
    fields = {attrs["name"]: attrs["value"] for tag, attrs in page.tags if attrs.get("type") == "hidden"}
    return fields if any(attrs.get("hx-trigger") == "load" for tag, attrs in page.tags if tag == "form") else None


@pytest.mark.usefixtures("small_portions")
async def test_a_large_decision_goes_on_portion_by_portion(site: httpx.AsyncClient, story: Story) -> None:
    batch_id = await story.failed("CLOSED", 5)
    path = await story.path("CLOSED")
    fields: dict[str, str] | None = await previewed(site, path, "cancel") | {"reason": "a & b"}
    said = []
    while fields is not None:
        page = await posted(site, f"{path}/decide?action=cancel", **fields)
        said.append(page.words)
        fields = continued(page)
    assert "2 of 5 canceled" in said[0]
    assert "if you leave it, the rest stays as it is" in said[0]
    assert "4 of 5 canceled" in said[1]
    assert "5 canceled." in said[2]
    assert len(said) == 3
    assert await story.statuses(batch_id) == {"CANCELED"}
    trail = await story.bus.get_audit_trail(
        DOMAIN, (await story.bus.list_batch_commands(DOMAIN, batch_id))[4].command_id
    )
    assert [event.details for event in trail if event.type == "OPERATOR_CANCELED"] == [{"reason": "a & b"}]


@pytest.mark.usefixtures("small_portions")
async def test_failures_during_a_large_decision_are_not_part_of_it(
    site: httpx.AsyncClient, story: Story, bus: CommandBus
) -> None:
    """Some are new, and some have failed again: those of its first portion, and one that somebody else has retried."""
    await story.failed("CLOSED", 5)
    path = await story.path("CLOSED")
    page = await posted(site, f"{path}/decide?action=retry", **await previewed(site, path, "retry"))
    [again] = [item.command_id for item in await bus.troubleshooting.list(DOMAIN) if item.data["n"] == 4]
    await bus.troubleshooting.retry(DOMAIN, again, operator="ada")
    await story.failed("CLOSED", 2)
    while (fields := continued(page)) is not None:
        page = await posted(site, f"{path}/decide?action=retry", **fields)
    assert "4 retried. 1 command was decided on by somebody else meanwhile, or moved." in page.words
    trail = await bus.get_audit_trail(DOMAIN, again)
    assert [event.operator for event in trail if event.type == "OPERATOR_RETRIED"] == ["ada"]
    assert await story.waiting() == 5  # the one that failed again, the two of the first portion, and the new ones


@pytest.mark.usefixtures("small_portions")
async def test_what_others_decide_during_a_large_decision_is_told(
    site: httpx.AsyncClient, story: Story, bus: CommandBus
) -> None:
    batch_id = await story.failed("CLOSED", 5)
    path = await story.path("CLOSED")
    page = await posted(site, f"{path}/decide?action=retry", **await previewed(site, path, "retry"))
    left = [item.command_id for item in await bus.troubleshooting.list(DOMAIN)]
    await bus.troubleshooting.cancel(DOMAIN, left[0], reason="faster", operator="ada")
    while (fields := continued(page)) is not None:
        page = await posted(site, f"{path}/decide?action=retry", **fields)
    assert "4 retried. 1 command was decided on by somebody else meanwhile, or moved." in page.words
    assert await story.statuses(batch_id) == {"PENDING", "CANCELED"}


async def test_two_operators_at_once_share_the_commands(
    story: Story, bus: CommandBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("busload.troubleshooting.selection.PART", 5)
    batch_id = await story.failed("CLOSED", 40)
    path = await story.path("CLOSED")
    async with client(app(bus), **SAME_ORIGIN) as ada, client(app(bus), **SAME_ORIGIN) as rosa:
        forms = [await previewed(ada, path, "retry"), await previewed(rosa, path, "cancel") | {"reason": "x"}]
        pages = await asyncio.gather(
            ada.post(f"{path}/decide?action=retry", data=forms[0]),
            rosa.post(f"{path}/decide?action=cancel", data=forms[1]),
        )
    statuses = [str(one.status) for one in await bus.list_batch_commands(DOMAIN, batch_id)]
    counts = {"retried": statuses.count("PENDING"), "canceled": statuses.count("CANCELED")}
    assert sum(counts.values()) == 40
    for (done, count), answer in zip(counts.items(), pages, strict=True):
        said = Page(answer.text).words
        assert f"{count} {done}." in said if answer.status_code == 200 else count == 0, said
    assert len(await story.operators(batch_id, "OPERATOR_RETRIED")) == counts["retried"]


@pytest.mark.usefixtures("small_portions")
async def test_a_decision_that_is_held_up_says_how_far_it_came(
    site: httpx.AsyncClient, story: Story, monkeypatch: pytest.MonkeyPatch, dsn: str
) -> None:
    await story.failed("CLOSED", 5)
    path = await story.path("CLOSED")
    page = await posted(site, f"{path}/decide?action=retry", **await previewed(site, path, "retry"))
    fields = continued(page)
    assert fields is not None
    monkeypatch.setattr(decision, "PATIENCE", 0.3)
    with psycopg.connect(dsn) as other:
        other.execute("SELECT FROM busload.troubleshooting FOR UPDATE")
        stopped = await posted(site, f"{path}/decide?action=retry", 503, **fields)
    assert "2 of 5 retried, and then it stopped." in stopped.words
    assert continued(stopped) is None
    assert await story.waiting() == 3


# -- patches -----------------------------------------------------------------------------------------------------------

ADD = '[{"op": "add", "path": "/code", "value": null}]'


async def test_a_patch_is_shown_before_it_is_confirmed(site: httpx.AsyncClient, story: Story) -> None:
    batch_id = await story.failed("CLOSED", 3, token="canary")
    path = await story.path("CLOSED")
    form = await previewed(site, path, "patch")
    page = await posted(site, f"{path}/diff?action=patch", **form, mode="patch", patch=ADD)
    assert "Applies to all 3 commands." in page.words
    assert '− "code": "CLOSED", + "code": null,' in page.words
    assert "canary" not in page.text
    assert await story.waiting() == 3
    told = await posted(site, f"{path}/decide?action=patch", **form, mode="patch", patch=ADD)
    assert "3 retried." in told.words
    await story.given.drained()
    assert await story.statuses(batch_id) == {"COMPLETED"}
    [one, *_] = await story.bus.list_batch_commands(DOMAIN, batch_id)
    assert one.data["token"] == "canary"
    [noted] = [
        e.details for e in await story.bus.get_audit_trail(DOMAIN, one.command_id) if e.type == "OPERATOR_RETRIED"
    ]
    assert (noted["before"]["code"], noted["after"]["code"]) == ("CLOSED", None)


@pytest.mark.usefixtures("small_portions")
@pytest.mark.parametrize(("action", "patch"), [("retry", {}), ("patch", {"mode": "patch", "patch": ADD})])
async def test_a_retry_says_what_of_it_waits_for_a_batch_that_is_held(
    site: httpx.AsyncClient, story: Story, action: str, patch: dict[str, str]
) -> None:
    held = await story.failed("CLOSED", 4)
    free = await story.failed("CLOSED", 2)
    path = await story.path("CLOSED")
    assert "held" not in (await seen(site, f"{path}/preview?action={action}")).words
    assert await story.bus.hold_batch(DOMAIN, held, reason="the bank is down")
    page = await seen(site, f"{path}/preview?action={action}")
    assert "4 commands belong to a batch that is held: they wait until somebody resumes it." in page.words
    assert "CLOSED batch 4 is held, waits until it is resumed CLOSED batch 2 goes on" in page.words
    for other in ("complete", "cancel"):  # these end at once, held or not
        assert "is held" not in (await seen(site, f"{path}/preview?action={other}")).words
    told = await posted(site, f"{path}/decide?action={action}", **form_of(page), **patch)
    while (fields := continued(told)) is not None:
        told = await posted(site, f"{path}/decide?action={action}", **fields)
    assert "6 retried. 4 of them wait until somebody resumes their batch, which is held." in told.words
    await story.given.drained()
    assert await story.statuses(held) == {"SCHEDULED"}
    assert not await story.statuses(free) & {"SCHEDULED", "PENDING"}


async def test_a_cancellation_says_nothing_of_a_batch_that_is_held(site: httpx.AsyncClient, story: Story) -> None:
    held = await story.failed("CLOSED", 2)
    assert await story.bus.hold_batch(DOMAIN, held, reason="the bank is down")
    path = await story.path("CLOSED")
    form = await previewed(site, path, "cancel")
    told = await posted(site, f"{path}/decide?action=cancel", **form, reason="not owed")
    assert "2 canceled." in told.words and "held" not in told.words
    assert await story.statuses(held) == {"CANCELED"}


async def test_a_patch_that_makes_what_the_handler_does_not_take_moves_nothing(
    site: httpx.AsyncClient, story: Story
) -> None:
    await story.failed("CLOSED", 3)
    path = await story.path("CLOSED")
    form = await previewed(site, path, "patch")
    [(domain, command_type)] = {(one.domain, one.command_type) for one in await story.bus.troubleshooting.list(DOMAIN)}
    story.bus.handlers.data_types[domain, command_type] = DataType(dict[str, int])
    page = await posted(site, f"{path}/diff?action=patch", **form, mode="patch", patch=ADD)
    assert "Does not apply to 3 of 3 commands. They would stay as they are." in page.words
    assert "INVALID_DATA at /data" in page.words
    told = await posted(site, f"{path}/decide?action=patch", **form, mode="patch", patch=ADD)
    assert "what the patch makes does not fit: INVALID_DATA at /data" in told.words
    assert await story.waiting() == 3


@pytest.mark.usefixtures("small_portions")
async def test_edited_data_becomes_a_patch_of_all(site: httpx.AsyncClient, story: Story) -> None:
    batch_id = await story.failed("CLOSED", 3, api_token="canary")
    path = await story.path("CLOSED")
    page = await seen(site, f"{path}/preview?action=patch")
    assert "canary" not in page.text
    edited = '{"code": null, "n": 0, "api_token": "••••••", "new": [1]}'
    fields: dict[str, str] | None = form_of(page) | {"mode": "data", "data": edited}
    shown = await posted(site, f"{path}/diff?action=patch", **form_of(page), mode="data", data=edited)
    assert "Applies to all 3 commands." in shown.words
    assert '"path":"/code"' in shown.text
    while fields is not None:
        page = await posted(site, f"{path}/decide?action=patch", **fields)
        fields = continued(page)
    assert "3 retried." in page.words
    await story.given.drained()
    assert await story.statuses(batch_id) == {"COMPLETED"}
    data = [one.data for one in await story.bus.list_batch_commands(DOMAIN, batch_id)]
    assert [one["n"] for one in data] == [0, 1, 2]
    assert {one["api_token"] for one in data} == {"canary"}


CARDS = [{"token": "canary-A", "amount": 1, "tags": ["x"]}, {"token": "canary-B", "amount": 2, "tags": ["y"]}]
A1, B2 = ({"token": "••••••", "amount": amount, "tags": [tag]} for amount, tag in ((1, "x"), (2, "y")))
REARRANGED: list[tuple[list[Any], str]] = [
    ([B2 | {"amount": 3}], "had 2 items and has 1 now"),
    ([A1, B2, {"amount": 3}], "had 2 items and has 3 now"),
    ([], "had 2 items and has 0 now"),
    ([B2, A1], "has 2 items that differ"),
    ([B2 | {"amount": 3}, A1 | {"amount": 4}], "has 2 items that differ"),
]


@pytest.mark.parametrize(("cards", "found"), REARRANGED)
async def test_an_edit_never_brings_a_masked_value_to_another_item(
    site: httpx.AsyncClient, story: Story, database: Database, cards: list[Any], found: str
) -> None:
    await story.failed("CLOSED", 1, deep=[{"cards": CARDS}])
    path = await story.path("CLOSED")
    form = await previewed(site, path, "patch")
    before = database.everything()
    edited = {"mode": "data", "data": json.dumps({"code": None, "n": 0, "deep": [{"cards": cards}]})}
    shown = await posted(site, f"{path}/diff?action=patch", **form, **edited)
    refused = await posted(site, f"{path}/decide?action=patch", 400, **form, **edited)
    for page in (shown, refused):
        assert f"The array at '/deep/0/cards' {found}" in page.words
        assert "or write a JSON patch" in page.words
    assert database.everything() == before


async def test_an_item_beside_masked_values_is_edited_where_it_is(site: httpx.AsyncClient, story: Story) -> None:
    batch_id = await story.failed("CLOSED", 1, cards=CARDS, plain=[1, 2, 3])
    path = await story.path("CLOSED")
    form = await previewed(site, path, "patch")
    cards = [A1, B2 | {"amount": 3, "tags": []}]
    edited = {"code": None, "n": 0, "cards": cards, "plain": [3, 1]}
    await posted(site, f"{path}/decide?action=patch", **form, mode="data", data=json.dumps(edited))
    [one] = await story.bus.list_batch_commands(DOMAIN, batch_id)
    assert one.data == edited | {"cards": [CARDS[0], CARDS[1] | {"amount": 3, "tags": []}]}


async def test_edits_of_an_example_that_somebody_else_took_are_told_and_do_not_reach_others(
    site: httpx.AsyncClient, story: Story, bus: CommandBus
) -> None:
    batch_id = await story.failed("CLOSED", 3)
    path = await story.path("CLOSED")
    form = await previewed(site, path, "patch")
    await bus.troubleshooting.cancel(DOMAIN, UUID(form["example"]), reason="faster", operator="ada")
    edited = {"mode": "data", "data": '{"code": null, "n": 0}'}
    refused = await posted(site, f"{path}/decide?action=patch", 409, **form, **edited)
    assert "1 command was decided on by somebody else, or moved." in refused.words
    assert "The example that you edited does not wait any more" in refused.words
    assert '{"code": null, "n": 0}' not in refused.text
    assert await story.waiting() == 2
    await posted(site, f"{path}/decide?action=patch", **form_of(refused), mode="data", data='{"code": null, "n": 1}')
    await story.given.drained()
    assert [one.data["n"] for one in await bus.list_batch_commands(DOMAIN, batch_id)] == [0, 1, 2]


async def test_a_patch_says_to_how_many_it_does_not_apply(
    site: httpx.AsyncClient, story: Story, bus: CommandBus
) -> None:
    batch_id = await bus.create_batch(
        DOMAIN, [BatchCommand("Pay", data={"code": "CLOSED", **({"old": 1} if n else {})}) for n in (1, 1, 0)]
    )
    await story.given.drained()
    path, patch = await story.path("CLOSED"), '[{"op": "remove", "path": "/old"}]'
    form = await previewed(site, path, "patch")
    page = await posted(site, f"{path}/diff?action=patch", **form, mode="patch", patch=patch)
    assert "Does not apply to 1 of 3 commands. They would stay as they are." in page.words
    assert "operation 0 (remove)" in page.words
    assert "old" in page.words
    told = await posted(site, f"{path}/decide?action=patch", **form, mode="patch", patch=patch)
    assert "2 retried. 1 command stays as it is: the patch does not apply" in told.words
    assert await story.statuses(batch_id) == {"PENDING", "IN_TROUBLESHOOTING_QUEUE"}


NO_PATCH = {
    "": "Write a JSON patch",
    "{": "not JSON",
    "[]": "no list of operations",
    "{}": "no list of operations",
    '[{"op": "grow", "path": "/x"}]': "no JSON patch",
    '[{"op": "add", "path": "x", "value": 1}]': "no JSON patch",
    '[{"op": "add", "path": "/x"}]': "has no 'value'",
    '[{"op": "add", "path": "/x", "value": "\\u0000"}]': "cannot",
    '[{"op": "remove", "path": "/missing"}]': "does not apply to the example: operation 0 (remove)",
    '[{"op": "copy", "from": "/api_token", "path": "/x"}]': "whose value nobody sees",
    '[{"op": "move", "from": "/deep/password/x", "path": "/x"}]': "whose value nobody sees",
    '[{"op": "test", "path": "/api_token", "value": "guess"}]': "whose value nobody sees",
    '[{"op": "test", "path": "/deep", "value": {"password": {"x": 1}}}]': "tests a key whose value nobody sees",
    '[{"op": "test", "path": "", "value": [{"deep": {"PASSWORD": 1}}]}]': "tests a key whose value nobody sees",
    '[{"op": "remove", "path": "/missing/x"}]': "does not apply to the example: operation 0 (remove): nothing is at",
    '[{"op": "add", "path": "/x", "value": ["••••••"]}]': "which stands for a value that nobody sees",
}


async def test_what_is_no_patch_is_told_and_does_nothing(
    site: httpx.AsyncClient, story: Story, database: Database
) -> None:
    await story.failed("CLOSED", 2, api_token="canary", deep={"password": {"x": 1}})
    path = await story.path("CLOSED")
    form = await previewed(site, path, "patch")
    before = database.everything()
    for patch, said in NO_PATCH.items():
        shown = await posted(site, f"{path}/diff?action=patch", **form, mode="patch", patch=patch)
        assert said in shown.words, patch
        assert "canary" not in shown.text
        if "does not apply" not in said:
            refused = await posted(site, f"{path}/decide?action=patch", 400, **form, mode="patch", patch=patch)
            assert said in refused.words, patch
            assert patch in refused.text  # what was written is there to be corrected
    for data, said in (("{", "not JSON"), ('{"a": 1, "a": 2}', "not JSON")):
        assert said in (await posted(site, f"{path}/diff?action=patch", **form, mode="data", data=data)).words
    answer = await site.post(f"{path}/decide?action=patch", data={**form, "patch": "x" * MOST_BODY})
    assert answer.status_code == 413
    assert database.everything() == before


async def test_a_failed_test_of_a_patch_does_not_repeat_the_data(site: httpx.AsyncClient, story: Story) -> None:
    await story.failed("CLOSED", 1, card={"number": "canary"})
    path = await story.path("CLOSED")
    form = await previewed(site, path, "patch")
    patch = '[{"op": "test", "path": "/card", "value": 1}, {"op": "remove", "path": "/n"}]'
    shown = await posted(site, f"{path}/diff?action=patch", **form, mode="patch", patch=patch)
    assert "operation 0 (test): another value, or none, is at '/card'" in shown.words
    assert "canary" not in shown.text


async def test_a_new_value_of_a_masked_key_is_seen_by_nobody(site: httpx.AsyncClient, story: Story) -> None:
    await story.failed("CLOSED", 1, password="canary-old", auth={"token": "canary-old"})
    path = await story.path("CLOSED")
    form = await previewed(site, path, "patch")
    patch = (
        '[{"op": "replace", "path": "/password", "value": "canary-new"},'
        ' {"op": "replace", "path": "/auth", "value": {"token": "canary-new"}},'
        ' {"op": "add", "path": "/seen", "value": "sesame"}]'
    )
    await posted(site, f"{path}/decide?action=patch", **form, mode="patch", patch=patch)
    page = await seen(site, f"/commands/{DOMAIN}/{form['example']}")
    assert "Operator retried" in page.words
    assert "canary" not in page.text
    assert "sesame" in page.text
    for address in ("/audit", "/audit.json", "/audit.csv", "/commands.json"):
        assert "canary" not in (await site.get(address)).text


# -- who may, and bad input --------------------------------------------------------------------------------------------


async def test_a_reader_looks_and_decides_nothing(bus: CommandBus, story: Story) -> None:
    await story.failed("CLOSED", 2)
    path = await story.path("CLOSED")
    async with client(app(bus, authenticate=known_users()), **SAME_ORIGIN, **signed_in(Role.READER)) as site:
        for one in (path, f"{path}/preview?action=patch", f"{path}/preview?action=cancel"):
            page = await seen(site, one)
            assert not [attrs for _, attrs in page.tags if "hx-post" in attrs or attrs.get("type") == "checkbox"]
            assert not [link for link in page.links if "action=" in link]
        for verb in ("decide", "diff"):
            assert "Only for operators" in (await posted(site, f"{path}/{verb}?action=retry", 403)).words
    assert await story.waiting() == 2


@pytest.mark.parametrize(("role", "hidden"), [(Role.READER, True), (Role.OPERATOR, False)])
async def test_texts_and_data_are_hidden_from_readers_on_request(
    bus: CommandBus, story: Story, role: Role, hidden: bool
) -> None:
    await story.failed("CODE", 2, to="canary-data", message="canary-message")
    path = await story.path("CODE")
    texts = ""
    async with client(app(bus, authenticate=known_users(), hide_payloads=True), **signed_in(role)) as site:
        for one in ("/troubleshooting", path, f"{path}/preview?action=patch"):
            answer = await site.get(one)
            assert answer.status_code == 200, one
            texts += answer.text
        searched = await site.get("/troubleshooting?text=canary")
    found = {kind for kind in ("data", "message", "Traceback") if f"canary-{kind}" in texts or kind in texts}
    assert {"canary-data" in texts, "canary-message" in texts, "Traceback" in texts} == {not hidden}, found
    assert searched.status_code == (403 if hidden else 200)
    assert "CODE" in texts


WRONG = {
    "/troubleshooting?domain=1": (400, "INVALID_NAME"),
    "/troubleshooting?type=%F0%9F%98%80": (400, "INVALID_NAME"),
    "/troubleshooting?reason=BAD": (400, "There is no reason 'BAD'. Use one of PERMANENT"),
    "/troubleshooting?batch=x": (400, "which is no id"),
    f"/troubleshooting?text={'x' * 501}": (400, "up to 500 characters"),
    "/troubleshooting?after=x": (400, "no cursor"),
    "/troubleshooting?after=1-0123456789ab-": (400, "no cursor"),
    "/troubleshooting?after=0-0123456789ab-zzz": (404, "Go back to the first page"),
    "/troubleshooting/payments": (404, "no page at this address"),
    "/troubleshooting/payments/xyz": (400, "is no cause"),
    "/troubleshooting/payments/0123456789ab": (404, "Nothing waits for this cause"),
    "/troubleshooting/1x/{cause}": (400, "domain"),
    "/troubleshooting/crm/{cause}": (404, "Nothing waits for this cause"),
    "/troubleshooting/payments/{cause}?reason=EXHAUSTED": (404, "nothing that fits the filter"),
    "/troubleshooting/payments/{cause}?after=x": (400, "no cursor"),
    "/troubleshooting/payments/{cause}?after=999999999999999": (404, "Go back to the first page"),
    "/troubleshooting/payments/{cause}/preview": (400, "There is no action None"),
    "/troubleshooting/payments/{cause}/preview?action=explode": (400, "Use one of retry, patch, complete, cancel"),
    "/troubleshooting/payments/{cause}/preview?action=retry&ticked=1": (400, "No command is ticked"),
    "/troubleshooting/payments/{cause}/preview?action=retry&command=x": (400, "no id"),
    "/troubleshooting/payments/{cause}/preview?action=retry" + "&command=x" * 101: (400, "101 commands are ticked"),
    f"/troubleshooting/payments/{{cause}}/preview?action=retry&command={NOWHERE}": (200, "Nothing is left to do here"),
    "/troubleshooting/crm/{cause}/preview?action=retry": (404, "Nothing waits for this cause"),
}


async def test_wrong_input_gets_a_page_that_says_what_to_do(site: httpx.AsyncClient, story: Story) -> None:
    await story.failed("CLOSED")
    fingerprint = (await story.path("CLOSED"))[-12:]
    for path, (status, said) in WRONG.items():
        page = await seen(site, path.replace("{cause}", fingerprint), status)
        assert said in page.words, path
    upper = await seen(site, f"/troubleshooting/{DOMAIN}/{fingerprint.upper()}")
    assert "No CLOSED" in upper.words


async def test_a_wrong_form_does_nothing(site: httpx.AsyncClient, story: Story, database: Database) -> None:
    await story.failed("CLOSED", 2)
    path = await story.path("CLOSED")
    form = await previewed(site, path, "retry")
    before = database.everything()
    for action, fields, said in (
        ("cancel", {}, "reason is empty"),
        ("cancel", {"reason": "a\0b"}, "without NUL"),
        ("complete", {"result": "{"}, "result cannot be stored"),
        ("complete", {"result": '{"a": 1e999}'}, "result cannot be stored"),
        ("patch", {"mode": "data", "data": "{}"}, "example is empty"),
        ("patch", {"mode": "data", "data": "{}", "example": "x"}, "no id"),
        ("patch", {"mode": "data", "data": "{}", "example": str(NOWHERE)}, "does not wait any more"),
        ("explode", {}, "There is no action"),
    ):
        assert said in (await posted(site, f"{path}/decide?action={action}", 400, **form, **fields)).words, said
    elsewhere = path.replace(DOMAIN, "crm")
    assert "Nothing waits" in (await posted(site, f"{elsewhere}/decide?action=retry", 404, **form)).words
    assert database.everything() == before


async def test_hostile_texts_stay_texts(site: httpx.AsyncClient, story: Story, bus: CommandBus) -> None:
    together = "".join(HOSTILE)
    sent = [
        BatchCommand("Pay", data={"code": text[:60], "message": text, text: text}, task_key=text[:500])
        for text in (*HOSTILE, together)
    ]
    await bus.create_batch(DOMAIN, sent, name=together[:200])
    await story.given.drained()
    groups = await bus.troubleshooting.groups(DOMAIN)
    paths = ["/troubleshooting"]
    for group in groups:
        path = f"/troubleshooting/{DOMAIN}/{group.fingerprint}"
        paths += [path, f"{path}/preview?action=cancel"]
    for path in paths:
        answer = await site.get(path)
        assert answer.status_code == 200, path
        check_harmless(answer.text)
    for text in HOSTILE:
        for name in ("text", "domain", "type", "reason", "batch", "after"):
            check_harmless((await site.get("/troubleshooting", params={name: text})).text)
    path = f"/troubleshooting/{DOMAIN}/{groups[0].fingerprint}"
    form = await previewed(site, path, "patch")
    for text in HOSTILE:
        answer = await site.post(f"{path}/diff?action=patch", data={**form, "mode": "patch", "patch": text})
        check_harmless(answer.text)
        value = [{"op": "add", "path": "/" + text.replace("~", "").replace("/", ""), "value": text}]
        answer = await site.post(
            f"{path}/diff?action=patch", data={**form, "mode": "patch", "patch": httpx.Response(200, json=value).text}
        )
        check_harmless(answer.text)
        for name in ("reason", "result", "mode", "data"):
            refused = await site.post(
                f"{path}/decide?action=cancel", data={**form, "digest": "1", "reason": "x", name: text}
            )
            assert refused.status_code == 409
            check_harmless(refused.text)
