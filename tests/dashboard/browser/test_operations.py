"""The pages for running a bus in a browser: their rules, phones, live values, and two actions to their effect."""

from __future__ import annotations

import asyncio

from playwright.async_api import expect

from busload import CommandBus, HandlerContext
from busload.commands.command import Command
from tests.dashboard.browser.conftest import PATIENCE, OpenWindow
from tests.dashboard.browser.test_browser import AXE, RULES
from tests.dashboard.story import everything
from tests.given import DOMAIN, Given

expect.set_options(timeout=PATIENCE)


async def test_a_tour_of_the_pages_breaks_no_rule_and_fits_a_phone(
    window: OpenWindow, given: Given, bus: CommandBus
) -> None:
    story = await everything(given, bus)
    for scheme in ("light", "dark"):
        opened = await window(color_scheme=scheme, bypass_csp=True)  # only for axe, which is no file of ours
        for path in story.paths:
            page = await opened.open(path)
            await page.evaluate(AXE)
            found = await page.evaluate(
                "rules => axe.run({runOnly: rules, resultTypes: ['violations']})", RULES[scheme]
            )
            broken = [(one["id"], [node["html"][:160] for node in one["nodes"]]) for one in found["violations"]]
            assert broken == [], (path, scheme)
    phone = await window(viewport={"width": 390, "height": 844})
    for path in story.paths:
        page = await phone.open(path)
        await expect(page.locator("#feed")).to_have_text("live")
        assert await page.evaluate("document.documentElement.scrollWidth") == 390, path


async def test_a_worker_is_asked_to_stop_and_the_page_follows(
    window: OpenWindow, given: Given, bus: CommandBus
) -> None:
    running, go = asyncio.Event(), asyncio.Event()

    async def wait(command: Command, ctx: HandlerContext) -> None:
        running.set()
        await go.wait()

    given.handler("Debit", wait)
    await given.batch()
    task = asyncio.create_task(given.worker().run())
    await running.wait()
    [worker] = await bus.workers.list()
    page = await (await window()).open(f"/workers/{worker.worker}")
    await page.get_by_role("button", name="Stop worker").click()
    await page.get_by_role("dialog").get_by_label("Reason").fill("the machine is replaced")
    await page.get_by_role("dialog").get_by_role("button", name="Stop worker").click()
    await page.get_by_text("Asked to stop. What runs finishes").wait_for()
    await expect(page.locator(".badge")).to_have_text("Stopping")
    go.set()
    await asyncio.wait_for(task, 60)
    await expect(page.locator(".badge")).to_have_text("Stopped")


async def test_a_domain_is_paused_by_the_keyboard_alone(window: OpenWindow, given: Given, bus: CommandBus) -> None:
    await given.batch(3)
    page = await (await window()).open("/domains")
    await page.get_by_role("button", name="Pause").focus()
    await page.keyboard.press("Enter")
    await page.get_by_role("dialog").get_by_text("3 commands wait in it now.").wait_for()
    await page.get_by_role("dialog").get_by_label("Reason").focus()
    await page.keyboard.type("the bank is down")
    await page.keyboard.press("Enter")
    await page.get_by_text("Paused payments.").wait_for()
    await expect(page.locator("#notice")).to_be_focused()
    [pause] = await bus.domains.pauses()
    assert (pause.domain, pause.reason) == (DOMAIN, "the bank is down")
    await bus.domains.resume(DOMAIN)
    await expect(page.locator(".badge")).to_have_text("Open")
    await page.get_by_role("button", name="Show").wait_for()  # the end of the pause is offered
