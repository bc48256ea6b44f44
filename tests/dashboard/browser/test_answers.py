"""Answers that a page cannot use: too late, of a proxy, or none at all. The page stays as it is, and says so."""

from __future__ import annotations

import asyncio

import pytest
from playwright.async_api import Page, Route, expect

from busload import CommandBus
from tests.dashboard.browser.conftest import OpenWindow, Window
from tests.given import DOMAIN, Given

TROUBLE = "<!doctype html><body><header>Proxy</header><main id='main'><h1>The database is away</h1></main></body>"
LOST = "No answer of the dashboard came back."


async def answered(page: Page) -> None:
    """Begin to wait for the next answer that htmx has done with."""
    ended = "done => document.addEventListener('htmx:finally:request', done, { once: true })"
    await page.evaluate(f"() => {{ window.answered = new Promise({ended}) }}")


def only_refusals(opened: Window) -> None:
    """What the browser itself says of a refused request is no mistake of the page."""
    said = ("Failed to load resource", "htmx: htmx:error: Failed to fetch")
    assert [text for text in opened.wrong if not text.startswith(said)] == []
    opened.wrong.clear()


async def test_an_answer_for_a_part_that_is_gone_changes_nothing(
    window: OpenWindow, given: Given, bus: CommandBus
) -> None:
    batch_id = await given.batch(2)
    page = await (await window()).open(f"/batches/{batch_id}")
    await expect(page.locator("#feed")).to_have_text("live")
    await expect(page.locator(".why")).not_to_be_empty()
    asked, answers = asyncio.Event(), asyncio.Event()

    async def answer_later(route: Route) -> None:
        asked.set()
        await answers.wait()
        await route.continue_()

    await page.route(f"**/batches/{batch_id}", answer_later)
    await bus.hold_batch(DOMAIN, batch_id, reason="the bank complains", operator="ada")
    await asked.wait()
    await page.get_by_role("button", name="Change priority").click()
    await page.get_by_role("dialog").get_by_role("button", name="Change priority").click()
    await expect(page.locator("#notice")).to_be_focused()
    await expect(page.locator(".why")).not_to_be_empty()
    status = page.get_by_label("Status")
    await status.focus()
    await answered(page)
    answers.set()
    await page.evaluate("answered")
    await expect(status).to_be_focused(timeout=1000)
    await expect(page.locator("#feed")).to_have_text("live")


async def test_a_part_that_cannot_be_read_stays_and_is_asked_for_again(
    window: OpenWindow, given: Given, bus: CommandBus
) -> None:
    batch_id = await given.batch(2)
    opened = await window()
    page = await opened.open(f"/batches/{batch_id}")
    await expect(page.locator("#feed")).to_have_text("live")
    refused = asyncio.Event()

    async def refuse(route: Route) -> None:
        await route.fulfill(status=503, content_type="text/html", body=TROUBLE)
        refused.set()

    await page.route(f"**/batches/{batch_id}", refuse)
    await bus.hold_batch(DOMAIN, batch_id, reason="the bank complains", operator="ada")
    await refused.wait()
    await expect(page.locator('[data-live="status"]')).to_have_text("Held")
    await expect(page.get_by_role("group", name="Actions").get_by_role("button").first).to_have_text("Hold")
    await page.unroute(f"**/batches/{batch_id}")
    await page.get_by_role("button", name="Resume").wait_for()
    only_refusals(opened)


async def test_a_page_of_trouble_is_not_put_into_a_part(window: OpenWindow, given: Given) -> None:
    batch_id = await given.batch(2)
    opened = await window()
    await opened.page.route("**/why?*", lambda route: route.fulfill(status=503, content_type="text/html", body=TROUBLE))
    page = await opened.open(f"/batches/{batch_id}")
    await expect(page.locator(".why")).to_have_text("No answer yet. It is asked for again.")
    await expect(page.get_by_role("main")).to_have_count(1)
    only_refusals(opened)


@pytest.mark.parametrize("answer", ["a page of a proxy", "an empty answer", "a page to sign in", "no answer"])
async def test_an_action_whose_answer_is_lost_says_so_and_keeps_what_was_typed(
    window: OpenWindow, given: Given, answer: str
) -> None:
    batch_id = await given.batch(2)
    opened = await window()
    page = await opened.open(f"/batches/{batch_id}")
    answers = {
        "a page of a proxy": {"status": 502, "content_type": "text/html", "body": "<h1>Bad gateway</h1>"},
        "an empty answer": {"status": 504},
        "a page to sign in": {"status": 200, "content_type": "text/html", "body": "<form>Who are you?</form>"},
    }

    async def lose(route: Route) -> None:
        if answer in answers:
            await route.fulfill(**answers[answer])  # type: ignore[arg-type]
        else:
            await route.abort()

    await page.route("**/hold", lose)
    await page.get_by_role("button", name="Hold", exact=True).click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_label("Reason").fill("the bank complains")
    for _ in range(2):
        await answered(page)
        await dialog.get_by_role("button", name="Hold").click()
        await page.evaluate("answered")
        await expect(dialog.get_by_role("alert")).to_contain_text(LOST)
        await expect(dialog.get_by_role("alert")).to_be_focused()
    await expect(dialog.get_by_label("Reason")).to_have_value("the bank complains")
    await page.unroute("**/hold")
    await dialog.get_by_role("button", name="Hold").click()
    await page.get_by_text("Held. Nothing more of it starts.").wait_for()
    only_refusals(opened)


async def test_a_form_that_has_changed_since_its_preview_is_shown_anew(window: OpenWindow, given: Given) -> None:
    page = await (await window()).open("/batches/new")
    await page.get_by_label("Domain").fill(DOMAIN)
    await page.get_by_label("Type of all commands").fill("Debit")
    await page.locator("#data").fill('{"invoice": "1"}')
    await page.get_by_role("button", name="Preview").click()
    create = page.get_by_role("button", name="Create 1 command")
    await create.wait_for()
    await page.locator("#data").fill('{"invoice": "1"}\n{"invoice": "2"}')
    await create.click()
    await expect(page.locator("#notice")).to_contain_text("Nothing was created")
    await expect(page.get_by_role("main")).to_have_count(1)
    await page.get_by_role("button", name="Create 2 commands").wait_for()
    assert await given.bus.list_batches(DOMAIN) == []
