"""What only a browser shows: live numbers, actions, the keyboard, contrast, and that no text becomes a program."""

from __future__ import annotations

import asyncio
from importlib.resources import files
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from playwright.async_api import Page, Route, expect

from busload import BatchCommand, BusinessRuleError, CommandBus, HandlerContext, PermanentCommandError
from busload.commands.command import Command
from busload.dashboard import live
from busload.dashboard.pages import overview
from busload.jobs.job import Stage
from tests.dashboard.browser.conftest import PATIENCE, OpenWindow
from tests.dashboard.hostile import HOSTILE
from tests.given import DOMAIN, Database, Given

AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text()
RULES = {
    "light": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
    "dark": ["color-contrast"],  # only colours differ
}
expect.set_options(timeout=PATIENCE)


async def test_numbers_and_bars_follow_the_database(window: OpenWindow, given: Given) -> None:
    batch_id = await given.batch(4, name="January")
    page = await (await window()).open(f"/batches/{batch_id}")
    completed, bar = page.locator('[data-live="completed"]'), page.locator("rect.completed")
    await expect(completed).to_have_text("0")
    await expect(page.locator("#feed")).to_have_text("live")
    given.settled(given.claimed(3))
    await expect(completed).to_have_text("3")
    await expect(bar).to_have_attribute("width", "75.000")
    await expect(page.locator("svg.bar")).to_have_attribute("aria-label", "75 % of 4 ended: 3 completed")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_charts_follow_the_database_and_do_not_move_the_page(
    window: OpenWindow, database: Database, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setattr(overview, "AGE", 0.0)
    opened = await window(color_scheme=scheme)
    page = await opened.open("/")
    await expect(page.locator("#feed")).to_have_text("live")
    await expect(page.locator(".chart canvas")).to_have_count(4)
    drawn = "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((n, i) => i % 4 == 3 && n)"
    assert all([await canvas.evaluate(drawn) for canvas in await page.locator(".chart canvas").all()])
    places = "() => [...document.querySelectorAll('.chart')].map(c => c.getBoundingClientRect().toJSON())"
    before = await page.evaluate(places)
    database.rows(
        "INSERT INTO busload.statistics (at, domain, completed, retried)"
        " VALUES (date_trunc('minute', now()) - interval '5 minutes', 'payments', 7200, 600)"
    )
    summary = page.locator('[data-live="chart.rates"]')
    await expect(summary).to_contain_text("ended 0/s, at most 120/s")
    await expect(page.locator('[data-live="chart.failures"]')).to_contain_text("tried again 0/s, at most 10/s")
    await page.locator(".chart").first.hover()
    await expect(page.locator(".u-legend").first).to_contain_text("ended")
    assert await page.evaluate(places) == before
    await page.reload()
    await page.get_by_text("As a table").click()
    await page.get_by_role("cell", name="120/s").first.wait_for()
    assert await page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--running')")
    assert opened.wrong == []  # no style or script that the policy forbids among it


async def test_new_rows_are_offered_and_do_not_move_the_page(window: OpenWindow, given: Given) -> None:
    await given.batch(name="January")
    page = await (await window()).open("/batches")
    await expect(page.locator("#feed")).to_have_text("live")
    await given.batch(name="February")
    offer = page.get_by_role("button", name="Show 1 change")
    await offer.wait_for()
    assert await page.get_by_text("February").count() == 0
    await offer.click()
    await page.get_by_text("February").wait_for()


async def test_times_are_those_of_the_reader(window: OpenWindow, given: Given) -> None:
    batch_id = await given.batch()
    created = (await given.batch_now(batch_id)).created_at
    shown = set()
    for zone in ("Asia/Tokyo", "America/New_York"):
        page = await (await window(timezone_id=zone, locale="en-GB")).open("/batches")
        time = page.locator("tbody time").first
        shown.add(await time.text_content())
        assert await time.get_attribute("datetime") == created.isoformat(timespec="milliseconds")
    assert len(shown) == 2


async def test_times_that_follow_the_database_are_those_of_the_reader(
    window: OpenWindow, bus: CommandBus, database: Database
) -> None:
    due = "UPDATE busload.schedule SET next_due_at = %s"
    bus.schedule("nightly", cron="0 2 * * *", command=BatchCommand("Bill"), domain=DOMAIN)
    await bus.schedules.sync()
    database.rows(due, "2030-01-31 02:00+00")
    page = await (await window(timezone_id="Asia/Tokyo", locale="en-GB")).open("/schedules")
    time, feed = page.locator('[data-live$=".next"]'), page.locator("#feed")
    await expect(feed).to_have_text("live")
    await expect(time).to_have_text("31 Jan 2030, 11:00:00")
    database.rows(due, "2030-02-01 02:00+00")
    await expect(time).to_have_text("01 Feb 2030, 11:00:00")
    await expect(time).to_have_attribute("title", "2030-02-01 02:00:00 UTC")
    database.rows("UPDATE busload.schedule SET next_due_at = NULL")
    await expect(time).to_have_text("–")


async def test_a_stream_that_was_refused_is_asked_for_again(
    window: OpenWindow, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = await given.batch(4)
    opened = await window()
    await opened.page.clock.install()
    with monkeypatch.context() as full:
        full.setattr(live, "MOST_STREAMS", 0)
        page = await opened.open(f"/batches/{batch_id}")
        await expect(page.locator("#feed")).to_have_text("stands still: no connection")
    await page.clock.fast_forward(6000)
    await expect(page.locator("#feed")).to_have_text("live")
    assert [text for text in opened.wrong if "503" not in text] == []
    opened.wrong.clear()


async def test_times_of_a_filter_are_those_of_the_reader(window: OpenWindow, given: Given) -> None:
    page = await (await window(timezone_id="Asia/Tokyo")).open("/batches")
    await page.get_by_label("Created since", exact=True).fill("2030-01-31T08:00")
    await page.get_by_role("button", name="Filter").click()
    await page.wait_for_url("**/batches?**since=2030-01-30T23%3A00%3A00**")
    await expect(page.get_by_label("Created since", exact=True)).to_have_value("2030-01-31T08:00")


async def test_a_page_that_nobody_sees_holds_no_connection(window: OpenWindow, given: Given) -> None:
    batch_id = await given.batch(4)
    page = await (await window()).open(f"/batches/{batch_id}")
    completed, feed = page.locator('[data-live="completed"]'), page.locator("#feed")
    await expect(feed).to_have_text("live")
    turn = "hidden => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});" + (
        " document.dispatchEvent(new Event('visibilitychange')); }"
    )
    await page.evaluate(turn, True)
    await expect(feed).to_have_text("")
    given.settled(given.claimed(3))
    await page.evaluate(turn, False)
    await expect(feed).to_have_text("live")
    await expect(completed).to_have_text("3")


async def test_more_windows_than_a_browser_has_connections_all_follow_the_database(
    window: OpenWindow, given: Given
) -> None:
    """A browser opens six connections to a host for all its windows, and each of these shows another batch."""
    batch_ids = [await given.batch(2) for _ in range(9)]
    first = await window()
    pages = [first.page, *[await first.page.context.new_page() for _ in batch_ids[1:]]]
    for page, batch_id in zip(pages, batch_ids, strict=True):
        await page.goto(f"{first.base}/batches/{batch_id}")
    for page in pages:
        await expect(page.locator("#feed")).to_have_text("live")
    given.settled(given.claimed(18))
    for page in pages:
        await expect(page.locator('[data-live="completed"]')).to_have_text("2")


async def test_windows_that_show_the_same_page_share_one_stream(
    window: OpenWindow, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MOST_STREAMS", 1)
    batch_id = await given.batch(2)
    first = await window()
    pages = [first.page, *[await first.page.context.new_page() for _ in range(2)]]
    for page in pages:
        await page.goto(f"{first.base}/batches/{batch_id}")
        await expect(page.locator("#feed")).to_have_text("live")
    await pages[0].close()
    given.settled(given.claimed(2))
    for page in pages[1:]:
        await expect(page.locator('[data-live="completed"]')).to_have_text("2")


async def test_a_browser_without_shared_workers_follows_the_database(window: OpenWindow, given: Given) -> None:
    batch_id = await given.batch(2)
    opened = await window()
    await opened.page.add_init_script("delete window.SharedWorker;")
    page = await opened.open(f"/batches/{batch_id}")
    await expect(page.locator("#feed")).to_have_text("live")
    given.settled(given.claimed(2))
    await expect(page.locator('[data-live="completed"]')).to_have_text("2")


async def test_a_batch_is_written_previewed_and_created(window: OpenWindow, given: Given, tmp_path: Path) -> None:
    opened = await window()
    page = await opened.open("/batches")
    await page.get_by_role("link", name="Create a batch").click()
    await page.get_by_label("Domain").fill(DOMAIN)
    await page.get_by_label("Type of all commands").fill("Debit")
    await page.get_by_label("Name", exact=True).fill("July")
    (tmp_path / "july.csv").write_text('invoice,who\n1,"<b>ada</b>"\n2,grace\n')
    await page.get_by_label("From a file").set_input_files(tmp_path / "july.csv")
    await expect(page.locator("#data")).to_have_value('invoice,who\n1,"<b>ada</b>"\n2,grace\n')
    await page.get_by_role("button", name="Preview").click()
    await page.get_by_text("Nothing was created: correct this first").wait_for()  # it is no JSON
    await page.get_by_text("Line 1: ").wait_for()
    await page.get_by_label("Format").select_option("csv")
    await page.get_by_role("button", name="Preview").click()
    await page.get_by_text("2 commands of type Debit").wait_for()
    await page.get_by_role("button", name="Create 2 commands").click()
    await page.wait_for_url("**/batches/*-*")
    await page.get_by_role("heading", name="July").wait_for()
    [batch] = await given.bus.list_batches(DOMAIN)
    found = (await given.bus.list_commands(batch_id=batch.batch_id)).commands
    opened.wrong = [text for text in opened.wrong if "400" not in text]  # what browsers say of a refused form
    assert {one.data["invoice"]: one.data["who"] for one in found} == {"1": "<b>ada</b>", "2": "grace"}


async def test_an_action_is_confirmed_and_happens(window: OpenWindow, given: Given) -> None:
    batch_id = await given.batch(3)
    page = await (await window()).open(f"/batches/{batch_id}")
    await page.get_by_role("button", name="Hold", exact=True).click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_text("Up to 3 commands will wait.").wait_for()
    assert (await given.batch_now(batch_id)).held_at is None
    await dialog.get_by_label("Reason").fill("the bank <complains>")
    await dialog.get_by_role("button", name="Hold").click()
    await page.get_by_text("Held. Nothing more of it starts.").wait_for()
    assert (await given.batch_now(batch_id)).held_note == "the bank <complains>"
    await page.get_by_role("button", name="Resume").click()
    await page.get_by_role("dialog").get_by_role("button", name="Resume").click()
    await page.get_by_text("Resumed.").wait_for()
    await expect(page.locator("#feed")).to_have_text("live")  # the page that came is live as well
    await page.get_by_role("button", name="Cancel batch").click()
    await page.get_by_role("dialog").get_by_label("Reason").fill("wrong list")
    await page.get_by_role("dialog").get_by_role("button", name="Cancel batch").click()
    await page.get_by_text("Canceled 3 commands.").wait_for()
    assert (await given.batch_now(batch_id)).canceled_count == 3


async def test_actions_and_the_explanation_follow_the_batch(window: OpenWindow, given: Given, bus: CommandBus) -> None:
    batch_id = await given.batch(2)
    opened = await window()
    await opened.page.add_init_script("setInterval = () => 0")  # nothing is read again because time has passed
    page = await opened.open(f"/batches/{batch_id}")
    buttons, explanation = page.get_by_role("group", name="Actions").get_by_role("button"), page.locator(".why")
    await expect(buttons).to_have_text(["Hold", "Change budget", "Change priority", "Cancel batch"])
    await expect(page.locator("#feed")).to_have_text("live")
    await bus.hold_batch(DOMAIN, batch_id, reason="the bank complains", operator="ada")
    await expect(buttons).to_have_text(["Resume", "Change priority", "Cancel batch"])
    await expect(explanation).to_contain_text("the bank complains")
    await bus.resume_batch(DOMAIN, batch_id, operator="ada")
    await expect(buttons).to_have_count(4)
    given.settled(given.claimed(2))
    await expect(page.get_by_role("group", name="Actions")).to_have_count(0)
    await expect(explanation).to_contain_text("COMPLETED: all 2 commands ended")


async def test_a_dialog_that_somebody_writes_in_stays_until_it_is_closed(
    window: OpenWindow, given: Given, bus: CommandBus
) -> None:
    batch_id = await given.batch(2)
    page = await (await window()).open(f"/batches/{batch_id}")
    await expect(page.locator("#feed")).to_have_text("live")
    await page.get_by_role("button", name="Cancel batch").click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_label("Reason").fill("wrong li")
    await bus.hold_batch(DOMAIN, batch_id, reason="the bank complains", operator="ada")
    await expect(page.locator('[data-live="status"]')).to_have_text("Held")
    await expect(dialog.get_by_label("Reason")).to_have_value("wrong li")
    await dialog.get_by_role("button", name="Leave it").click()
    await page.get_by_role("button", name="Resume").wait_for()


async def test_a_dialog_that_is_opened_while_its_part_is_read_anew_stays_as_well(
    window: OpenWindow, given: Given, bus: CommandBus
) -> None:
    batch_id = await given.batch(2)
    page = await (await window()).open(f"/batches/{batch_id}")
    await expect(page.locator("#feed")).to_have_text("live")
    asked, answers = asyncio.Event(), asyncio.Event()

    async def answer_later(route: Route) -> None:
        asked.set()
        await answers.wait()
        await route.continue_()

    await page.route(f"**/batches/{batch_id}", answer_later)
    await bus.hold_batch(DOMAIN, batch_id, reason="the bank complains", operator="ada")
    await asked.wait()
    await page.get_by_role("button", name="Cancel batch").click()
    reason = page.get_by_role("dialog").get_by_label("Reason")
    await reason.fill("wrong li")
    async with page.expect_request_finished(lambda request: request.url.endswith(str(batch_id))):
        answers.set()
    await page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    await expect(reason).to_have_value("wrong li", timeout=1000)
    await page.get_by_role("dialog").get_by_role("button", name="Leave it").click()
    await page.get_by_role("button", name="Resume").wait_for()


async def test_actions_and_the_explanation_follow_the_command(window: OpenWindow, given: Given) -> None:
    _, [command_id] = await given.in_troubleshooting()
    page = await (await window()).open(f"/commands/{DOMAIN}/{command_id}")
    await expect(page.locator("#feed")).to_have_text("live")
    await given.bus.troubleshooting.cancel(DOMAIN, command_id, reason="wrong list")
    await expect(page.get_by_role("group", name="Actions")).to_have_count(0)
    await expect(page.get_by_text("CANCELED: ")).to_be_visible()


async def test_actions_follow_the_job(window: OpenWindow, given: Given, bus: CommandBus) -> None:
    job_id = await bus.jobs.create(DOMAIN, [Stage("only", [BatchCommand("Debit")])])
    page = await (await window()).open(f"/jobs/{job_id}")
    await expect(page.locator("#feed")).to_have_text("live")
    await expect(page.get_by_role("button", name="Cancel job")).to_be_visible()
    await bus.jobs.cancel(DOMAIN, job_id, reason="wrong list")
    await given.drained()
    await expect(page.get_by_role("group", name="Actions")).to_have_count(0)


async def test_an_action_without_a_reason_is_not_sent(window: OpenWindow, given: Given) -> None:
    batch_id = await given.batch(3)
    page = await (await window()).open(f"/batches/{batch_id}")
    await page.get_by_role("button", name="Cancel batch").click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_role("button", name="Cancel batch").click()
    await expect(dialog.get_by_label("Reason")).to_be_focused()
    await dialog.get_by_role("button", name="Leave it").click()
    await expect(dialog).to_be_hidden()
    assert (await given.batch_now(batch_id)).canceled_count == 0


async def test_an_action_that_is_refused_says_why(window: OpenWindow, given: Given, bus: CommandBus) -> None:
    _, [command_id] = await given.in_troubleshooting()
    opened = await window()
    page = await opened.open(f"/commands/{DOMAIN}/{command_id}")
    await page.get_by_role("button", name="Retry").click()
    await bus.troubleshooting.cancel(DOMAIN, command_id, reason="somebody was faster")
    await page.get_by_role("dialog").get_by_role("button", name="Retry").click()
    await page.get_by_role("heading", name="Not possible now").wait_for()
    assert [text for text in opened.wrong if "409" not in text] == []
    opened.wrong.clear()


async def press(page: Page, key: str, until: str) -> None:
    """Press a key until the element that has the focus matches."""
    for _ in range(60):
        await page.keyboard.press(key)
        if await page.evaluate("selector => document.activeElement.matches(selector)", until):
            return
    pytest.fail(f"{key} never came to {until}")


async def test_the_keyboard_alone_is_enough(window: OpenWindow, given: Given) -> None:
    batch_id = await given.batch(2, name="January")
    page = await (await window()).open("/")
    await page.keyboard.press("Tab")
    await expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.locator("#main")).to_be_focused()
    await press(page, "Shift+Tab", "nav a[href='/batches']")
    await page.keyboard.press("Enter")
    await page.wait_for_url("**/batches")
    await press(page, "Tab", f"a[href='/batches/{batch_id}']")
    await page.keyboard.press("Enter")
    await page.wait_for_url(f"**/batches/{batch_id}")
    await press(page, "Tab", "button[data-opens='hold']")
    outline = await page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    await page.keyboard.press("Enter")
    await press(page, "Tab", "dialog[open] input[name='reason']")
    await page.keyboard.type("by keyboard")
    await page.keyboard.press("Enter")
    await expect(page.locator("#notice")).to_be_focused()
    assert (await given.batch_now(batch_id)).held_note == "by keyboard"
    await press(page, "Tab", "button[data-opens='cancel']")
    await page.keyboard.press("Enter")
    await page.keyboard.press("Escape")
    await expect(page.locator("dialog#cancel")).to_be_hidden()


@pytest.fixture
async def story(given: Given, bus: CommandBus) -> list[str]:
    """A batch with everything that a page can show; returns the addresses of all pages."""

    async def pay(command: Command, ctx: HandlerContext) -> Any:
        match command.data["n"] % 4:
            case 1:
                raise PermanentCommandError("account closed", code="CLOSED", details={"account": 7})
            case 2:
                raise BusinessRuleError("over the limit")
            case 3:
                raise TimeoutError("bank busy")
        return {"paid": [command.data["n"], None, True, "yes"]}

    given.handler("Pay", pay)
    sent = [BatchCommand("Pay", data={"n": n, "to": {"name": "Ada", "token": "x"}}, task_key=f"t{n}") for n in range(8)]
    batch_id = await bus.create_batch(DOMAIN, sent, name="January", custom_data={"month": 1})
    await given.drained()
    await bus.hold_batch(DOMAIN, batch_id, reason="the bank complains", operator="ada")
    await given.batch(3)
    commands = await bus.list_batch_commands(DOMAIN, batch_id, limit=2)
    return [
        "/",
        "/batches",
        f"/batches/{batch_id}",
        "/batches/new",
        "/commands",
        *(f"/commands/{DOMAIN}/{command.command_id}" for command in commands),
        "/trace?task_key=t1",
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_no_page_breaks_a_rule_of_accessibility(window: OpenWindow, story: list[str], scheme: str) -> None:
    opened = await window(color_scheme=scheme, bypass_csp=True)  # only for axe, which is no file of ours
    for path in [*story, "/batches?name=nothing", f"/batches/{UUID(int=1)}"]:
        page = await opened.open(path)
        if await page.locator(".why").count():
            await page.locator(".why p").first.wait_for()
            await page.get_by_role("button", name="Cancel batch").click()
        await page.evaluate(AXE)
        found = await page.evaluate("rules => axe.run({runOnly: rules, resultTypes: ['violations']})", RULES[scheme])
        broken = [(one["id"], [node["html"][:160] for node in one["nodes"]]) for one in found["violations"]]
        assert broken == [], path
    opened.wrong = [text for text in opened.wrong if "404" not in text]


async def test_every_page_fits_a_phone(window: OpenWindow, story: list[str]) -> None:
    opened = await window(viewport={"width": 390, "height": 844})
    for path in story:
        page = await opened.open(path)
        assert await page.evaluate("document.documentElement.scrollWidth") == 390, path


async def test_no_hostile_text_becomes_a_program(window: OpenWindow, given: Given, bus: CommandBus) -> None:
    async def fail(command: Command, ctx: HandlerContext) -> Any:
        text = command.data["text"]
        if command.data["fails"]:
            raise PermanentCommandError(text, code=text, details={text: text})
        return {text: [text]}

    given.handler("Hostile", fail)
    together = "".join(HOSTILE)
    sent = [
        BatchCommand("Hostile", data={"fails": fails, "text": text, text: text}, task_key=text[:500])
        for text in (*HOSTILE, together)
        for fails in (True, False)
    ]
    batch_id = await bus.create_batch(DOMAIN, sent, name=HOSTILE[3], custom_data=dict.fromkeys(HOSTILE, together))
    for text in HOSTILE:
        await bus.create_batch(DOMAIN, [BatchCommand("Hostile", data={"fails": False, "text": text})], name=text)
    await given.drained()
    await bus.hold_batch(DOMAIN, batch_id, reason=together, operator=HOSTILE[3])
    page_of = await bus.list_commands(DOMAIN, batch_id=batch_id, limit=2)
    opened = await window()
    paths = ["/", "/batches", f"/batches/{batch_id}", "/commands", f"/batches?name={HOSTILE[3]}"]
    paths += [f"/commands/{DOMAIN}/{command.command_id}" for command in page_of]
    for path in paths:
        page = await opened.open(path)
        if await page.locator("[data-live]").count():
            await expect(page.locator("#feed")).to_have_text("live")
        if await page.locator(".why").count():
            await page.locator(".why p").first.wait_for()
        assert await page.evaluate("document.querySelectorAll('iframe, img, object, base, main style').length") == 0
    assert opened.wrong == []
