"""Troubleshooting in a browser: by keyboard, with a live diff, in portions, on a phone and by the rules."""

from __future__ import annotations

import json

import pytest
from playwright.async_api import expect

from busload import BatchCommand, CommandBus, HandlerContext, PermanentCommandError
from busload.commands.command import Command
from busload.dashboard.pages import decision
from tests.dashboard.browser.conftest import OpenWindow
from tests.dashboard.browser.test_browser import AXE, RULES, press
from tests.given import DOMAIN, Given


async def fail(command: Command, ctx: HandlerContext) -> None:
    if "currency" not in command.data:
        n = command.data["n"]
        raise PermanentCommandError(f"Order {n} has no currency.", code="CURRENCY", details={"order": n})


@pytest.fixture
async def cause(given: Given, bus: CommandBus) -> str:
    """The address of a cause for which six commands wait."""
    given.handler("Pay", fail)
    sent = [BatchCommand("Pay", data={"n": n, "to": {"name": "Ada", "token": "x"}}, task_key=f"t{n}") for n in range(6)]
    await bus.create_batch(DOMAIN, sent, name="January")
    await given.drained()
    [group] = await bus.troubleshooting.groups(DOMAIN)
    return f"/troubleshooting/{DOMAIN}/{group.fingerprint}"


async def test_a_cause_is_retried_by_keyboard_alone(
    window: OpenWindow, cause: str, bus: CommandBus, given: Given
) -> None:
    page = await (await window()).open("/troubleshooting")
    await press(page, "Tab", f"a[href='{cause}']")
    await page.keyboard.press("Enter")
    await page.wait_for_url(f"**{cause}")
    await expect(page.locator('[data-live="count"]')).to_have_text("6")
    await press(page, "Tab", "a.button[href*='action=retry']")
    await page.keyboard.press("Enter")
    await page.get_by_role("heading", name="Retry 6 commands?").wait_for()
    assert await bus.troubleshooting.count(DOMAIN) == 6
    await press(page, "Tab", "form.decide button[type=submit]")
    await page.keyboard.press("Enter")
    await page.get_by_text("6 retried.").wait_for()
    await expect(page.locator("#notice")).to_be_focused()
    assert await bus.troubleshooting.count(DOMAIN) == 0


async def test_a_failed_batch_is_two_clicks_from_being_mended(
    window: OpenWindow, cause: str, bus: CommandBus, given: Given
) -> None:
    """From the list of causes, and from the page of the batch: one click to the preview, and one that confirms it."""
    [batch] = await bus.list_batches(DOMAIN)
    for start in ("/troubleshooting", f"/batches/{batch.batch_id}"):
        page = await (await window()).open(start)
        await page.get_by_role("link", name="Retry all…").click()
        await page.get_by_role("heading", name="Retry 6 commands?").wait_for()
        assert await bus.troubleshooting.count(DOMAIN) == 6
        await page.get_by_role("button", name="Retry 6 commands").click()
        await page.get_by_text("6 retried.").wait_for()
        assert await bus.troubleshooting.count(DOMAIN) == 0
        await given.drained()  # they fail again


async def test_ticked_commands_are_patched_with_a_live_diff(
    window: OpenWindow, cause: str, bus: CommandBus, given: Given
) -> None:
    page = await (await window()).open(cause)
    await page.get_by_label("Tick all on this page").check()
    await page.locator("input[name=command]").nth(5).uncheck()
    await page.get_by_role("group", name="Decide about the ticked commands").get_by_text("Patch and retry…").click()
    await page.get_by_role("heading", name="Patch and retry 5 commands?").wait_for()
    await page.get_by_text("The data is as it was. Change something.").wait_for()
    editor = page.get_by_role("textbox", name="Data of")
    data = json.loads(await editor.input_value())
    assert data["to"]["token"] == "••••••"
    await editor.fill("{")
    await page.get_by_text("This is not JSON that can be stored.").wait_for()
    await editor.fill(json.dumps({**data, "currency": "EUR"}))
    await page.get_by_text("Applies to all 5 commands.").wait_for()
    await expect(page.locator("tr.added td").last).to_have_text('+   "currency": "EUR"')
    await expect(editor).to_be_focused()  # the diff takes no focus from whoever types
    await page.get_by_label("Write a JSON patch").check()
    await page.get_by_role("textbox", name="JSON patch").fill('[{"op": "add", "path": "/currency", "value": "CHF"}]')
    await expect(page.locator("tr.added td").last).to_have_text('+   "currency": "CHF"')
    await page.get_by_role("button", name="Patch and retry 5 commands").click()
    await page.get_by_text("5 retried.").wait_for()
    await given.drained()
    [left] = await bus.troubleshooting.list(DOMAIN)
    assert left.data["n"] == 5
    done = [one.data for one in await bus.list_commands(DOMAIN, status="COMPLETED")]
    assert [(one["currency"], one["to"]["token"]) for one in done] == [("CHF", "x")] * 5


async def test_a_large_decision_shows_how_far_it_is(
    window: OpenWindow, cause: str, bus: CommandBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision, "PORTION", 0.0)
    monkeypatch.setattr("busload.troubleshooting.selection.PART", 2)
    opened = await window()
    page = await opened.open(f"{cause}/preview?action=cancel")
    seen: list[str] = []

    async def slowly(route: object) -> None:
        seen.append(await page.locator("#main").inner_text())
        await route.continue_()  # type: ignore[attr-defined]

    await page.route("**/decide*", slowly)
    await page.get_by_label("Reason").fill("wrong list")
    await page.get_by_role("button", name="Cancel 6 commands").click()
    await page.get_by_text("6 canceled.").wait_for()
    assert ["2 of 6 canceled" in text for text in seen] == [False, True, False]
    assert "4 of 6 canceled" in seen[2]
    await expect(page.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "6")
    assert len(await bus.list_commands(DOMAIN, status="CANCELED")) == 6


async def test_a_change_after_the_preview_is_told_and_can_be_confirmed(
    window: OpenWindow, cause: str, bus: CommandBus, given: Given
) -> None:
    opened = await window()
    page = await opened.open(f"{cause}/preview?action=retry")
    await bus.send(DOMAIN, "Pay", {"n": 7})
    await given.drained()
    await page.get_by_role("button", name="Retry 6 commands").click()
    await page.get_by_text("1 command has failed for this cause since.").wait_for()
    await expect(page.locator("#notice")).to_be_focused()
    await page.get_by_role("button", name="Retry only the 6 that I have seen").click()
    await page.get_by_text("6 retried.").wait_for()
    assert [item.data["n"] for item in await bus.troubleshooting.list(DOMAIN)] == [7]
    assert [text for text in opened.wrong if "409" not in text] == []
    opened.wrong.clear()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_pages_keep_the_rules_of_accessibility_and_fit_a_phone(
    window: OpenWindow, cause: str, scheme: str
) -> None:
    opened = await window(color_scheme=scheme, bypass_csp=True, viewport={"width": 390, "height": 844})
    previews = [f"{cause}/preview?action={action}" for action in ("patch", "complete", "cancel")]
    for path in ["/troubleshooting", "/troubleshooting?domain=crm", cause, *previews]:
        page = await opened.open(path)
        if "patch" in path:
            data = page.get_by_role("textbox", name="Data of")
            await data.fill((await data.input_value()).replace('"Ada"', '"Grace"'))
            await page.locator(".diff").wait_for()
        assert await page.evaluate("document.documentElement.scrollWidth") == 390, path
        await page.evaluate(AXE)
        found = await page.evaluate("rules => axe.run({runOnly: rules, resultTypes: ['violations']})", RULES[scheme])
        broken = [(one["id"], [node["html"][:160] for node in one["nodes"]]) for one in found["violations"]]
        assert broken == [], path
