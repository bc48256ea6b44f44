"""Commands are found by what they are, newest first, and a page looks at no more than it says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from busload import (
    BatchCommand,
    BusinessRuleError,
    CommandBus,
    CommandMetadata,
    HandlerContext,
    InvalidCommandError,
    PermanentCommandError,
)
from busload.commands import CommandPage, listing
from busload.commands.command import Command
from tests.faces import FACES, bus_of
from tests.given import DOMAIN, Given, raising

pytestmark = pytest.mark.usefixtures("invariants")


async def pages(bus: CommandBus, domain: str | None = DOMAIN, **wanted: Any) -> AsyncIterator[CommandPage]:
    """Page after page, until there is no next one."""
    after = None
    while True:
        page = await bus.list_commands(domain, after=after, **wanted)
        yield page
        after = page.next
        if after is None:
            return


async def all_of(bus: CommandBus, domain: str | None = DOMAIN, **wanted: Any) -> list[CommandMetadata]:
    return [command async for page in pages(bus, domain, **wanted) for command in page]


async def ids_of(bus: CommandBus, domain: str | None = DOMAIN, **wanted: Any) -> list[UUID]:
    return [command.command_id for command in await all_of(bus, domain, **wanted)]


@pytest.mark.parametrize("face", FACES)
async def test_commands_are_listed_newest_first(dsn: str, given: Given, face: str) -> None:
    sent = [await given.sent(data={"n": n}) for n in range(3)]
    elsewhere = (await given.bus.send("crm", "Push")).command_id
    async with bus_of(face, dsn) as bus:
        page = await bus.list_commands(DOMAIN)
        assert [command.command_id for command in page] == sent[::-1]
        assert ([command.data["n"] for command in page], page.next, len(page)) == ([2, 1, 0], None, 3)
        assert page.commands[0] == await bus.get_command(DOMAIN, sent[2])
        assert [command.command_id for command in await bus.list_commands()] == [elsewhere, *sent[::-1]]


async def test_pages_neither_overlap_nor_leave_anything_out(bus: CommandBus, given: Given) -> None:
    """Also while others send"""
    batch_id = await given.batch(7)
    sent = [one.command_id for one in await bus.list_batch_commands(DOMAIN, batch_id)]
    found, sizes = list[UUID](), list[int]()
    async for page in pages(bus, limit=3):
        found += [command.command_id for command in page]
        sizes.append(len(page))
        await given.sent()
    assert (found, sizes) == (sent[::-1], [3, 3, 1])


async def scene(bus: CommandBus, given: Given) -> dict[str, UUID]:
    """One command of every status, each of a type of its own."""
    given.handler("Completed")
    given.handler("Failed", raising(BusinessRuleError("Too little money", code="FUNDS")))
    ids = {name: await given.sent(name) for name in ("Completed", "Failed")}
    await given.drained()
    _, [ids["Parked"]] = await given.in_troubleshooting()
    ids["Canceled"] = await given.sent("Canceled")
    await bus.cancel_command(DOMAIN, ids["Canceled"], reason="no")
    ids["Running"] = await given.sent("Running")
    given.claimed()
    ids["Scheduled"] = await given.sent("Scheduled", run_at=datetime.now(UTC) + timedelta(hours=1))
    ids["Pending"] = await given.sent("Pending", task_key="a:1")
    ids["Boxed"] = await given.sent("Boxed")
    given.database.rows(
        """WITH load AS (DELETE FROM busload.queue WHERE hi = (SELECT max(hi) FROM busload.queue)
                         RETURNING lo, hi, domain, batch_id, fair)
           INSERT INTO busload.outbox (lo, hi, domain, batch_id, fair, transport) SELECT *, 'pgmq' FROM load"""
    )
    return ids


async def test_every_filter_finds_what_it_says(bus: CommandBus, given: Given) -> None:
    ids = await scene(bus, given)
    by_status = {
        "COMPLETED": "Completed",
        "FAILED": "Failed",
        "CANCELED": "Canceled",
        "IN_TROUBLESHOOTING_QUEUE": "Parked",
        "IN_PROGRESS": "Running",
        "SCHEDULED": "Scheduled",
        "PENDING": "Pending",
        "PENDING_QUEUE": "Boxed",
        "PENDING_RETRY": None,
    }
    for status, name in by_status.items():
        assert await ids_of(bus, status=status) == ([ids[name]] if name else []), status
        assert await ids_of(bus, None, status=status) == ([ids[name]] if name else []), status
        assert await ids_of(bus, "crm", status=status) == [], status
    for name, command_id in ids.items():
        assert await ids_of(bus, command_type=name if name != "Parked" else "Refuse") == [command_id]
    assert await ids_of(bus, task_key="a:1") == [ids["Pending"]]
    assert await ids_of(bus, error="little MONEY") == [ids["Failed"]]
    assert await ids_of(bus, error="closed") == [ids["Parked"]]
    assert await ids_of(bus, error="BusinessRule") == [ids["Failed"]]


async def test_filters_combine(bus: CommandBus, given: Given) -> None:
    commands = [BatchCommand("Debit" if n % 2 else "Credit", task_key=f"t:{n % 3}") for n in range(6)]
    batch_id = await bus.create_batch(DOMAIN, commands)
    others = await given.sent(task_key="t:1")
    sent = [one.command_id for one in await bus.list_batch_commands(DOMAIN, batch_id)]
    assert await ids_of(bus, batch_id=batch_id) == sent[::-1]
    assert await ids_of(bus, batch_id=batch_id, command_type="Debit") == [sent[5], sent[3], sent[1]]
    assert await ids_of(bus, task_key="t:1") == [others, sent[4], sent[1]]
    assert await ids_of(bus, task_key="t:1", batch_id=batch_id, command_type="Debit") == [sent[1]]
    assert await ids_of(bus, task_key="t:1", status="SCHEDULED") == []
    assert await ids_of(bus, batch_id=batch_id, status="PENDING", limit=2) == sent[::-1]
    assert await ids_of(bus, error="anything", status="PENDING", batch_id=batch_id) == []


async def test_times_are_a_range(bus: CommandBus, given: Given) -> None:
    sent = [await given.sent() for _ in range(3)]
    noon = datetime(2030, 5, 1, 12, tzinfo=UTC)
    for n, command_id in enumerate(sent):
        at = noon + n * timedelta(hours=1)
        given.database.rows("UPDATE busload.command SET created_at = %s WHERE command_id = %s", at, command_id)
    hours = [noon + n * timedelta(hours=1) for n in range(4)]
    assert await ids_of(bus, created_after=hours[1]) == [sent[2], sent[1]]
    assert await ids_of(bus, created_before=hours[1]) == [sent[0]]
    assert await ids_of(bus, created_after=hours[1], created_before=hours[2]) == [sent[1]]


@pytest.mark.parametrize("status", [None, "PENDING", "IN_PROGRESS"])
async def test_a_page_looks_at_so_many_commands_and_the_next_one_goes_on(
    bus: CommandBus, given: Given, monkeypatch: pytest.MonkeyPatch, status: str | None
) -> None:
    """The first pages are empty though there are more"""
    monkeypatch.setattr(listing, "MOST_EXAMINED", 10)
    wanted = await given.sent("Rare")
    await given.batch(25)
    if status == "IN_PROGRESS":
        given.claimed(26)
    found = [page async for page in pages(bus, command_type="Rare", status=status)]
    assert [len(page) for page in found][-1] == 1
    assert len(found) >= 3
    assert [command.command_id for page in found for command in page] == [wanted]


@pytest.mark.parametrize("status", [None, "IN_TROUBLESHOOTING_QUEUE"])
async def test_a_search_for_an_error_reads_so_many_errors_and_the_next_page_goes_on(
    bus: CommandBus, given: Given, monkeypatch: pytest.MonkeyPatch, status: str | None
) -> None:
    monkeypatch.setattr(listing, "MOST_TEXTS", 3)
    texts = iter(['a "quoted" text', "plain text", "ünïcode", "other", "other", "other", "other"])

    async def fail(command: Command, ctx: HandlerContext) -> None:
        raise PermanentCommandError(next(texts))

    given.handler("Pay", fail)
    given.handler()
    first = [await given.sent("Pay") for _ in range(3)]
    await given.drained(concurrency=1)
    [await given.sent("Pay") for _ in range(4)]
    await given.drained(concurrency=1)
    await given.batch(50)
    await given.drained()
    failed = {text: id for id, text in [(id, (await given.command_now(id)).last_error_message) for id in first]}
    for text, wanted in (('a "quoted"', 'a "quoted" text'), ("PLAIN tex", "plain text"), ("ünï", "ünïcode")):
        found = [page async for page in pages(bus, error=text, status=status)]
        assert [command.command_id for page in found for command in page] == [failed[wanted]]
        assert len(found) == (3 if status else 20)  # of 7 that are parked, or of 57, three at a time
    nothing = [page async for page in pages(bus, error="nothing like it", status=status)]
    assert sum(map(len, nothing)) == 0 and len(nothing) == (3 if status else 20)


async def test_a_search_ends_where_all_is_older(bus: CommandBus, given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MOST_EXAMINED", 5)
    await given.batch(20)
    given.database.rows("UPDATE busload.command SET created_at = now() - interval '1 day'")
    new = await given.sent()
    found = [page async for page in pages(bus, created_after=datetime.now(UTC) - timedelta(hours=2))]
    assert [len(page) for page in found] == [1, 0]
    assert found[0].commands[0].command_id == new


async def test_a_large_batch_is_read_no_further_than_the_page(bus: CommandBus, given: Given) -> None:
    batch_id = await given.batch(3000)
    page = await bus.list_commands(DOMAIN, batch_id=batch_id, limit=1)
    assert page.commands[0].data == {"n": 2999}
    assert page.next is not None


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"status": "SLEEPING"}, "/status"),
        ({"command_type": "no type"}, "/command_type"),
        ({"batch_id": "17"}, "/batch_id"),
        ({"created_after": datetime(2030, 1, 1)}, "/created_after"),
        ({"created_before": "today"}, "/created_before"),
        ({"error": ""}, "/error"),
        ({"limit": -1}, "/limit"),
        ({"after": "a page"}, "/after"),
        ({"after": "9" * 30}, "/after"),
    ],
)
async def test_a_wrong_filter_is_refused(bus: CommandBus, wrong: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidCommandError, match=where):
        await bus.list_commands(DOMAIN, **wrong)


async def test_an_unknown_filter_is_refused_by_name(bus: CommandBus) -> None:
    with pytest.raises(TypeError, match="list_commands\\(\\) has no option 'type'"):
        await bus.list_commands(DOMAIN, type="Debit")  # type: ignore[call-arg]
