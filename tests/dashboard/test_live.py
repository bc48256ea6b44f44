"""Live values: what a stream sends, who shares it, and when it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest
from starlette.applications import Starlette

from busload import CommandBus, HandlerContext, PermanentCommandError
from busload.commands.command import Command
from busload.dashboard import Role, app, live
from busload.dashboard.render import number
from busload.health.overview import Overview, overview
from busload.postgres.plan import Plan, execute
from tests.dashboard.site import client, known_users, signed_in, stream
from tests.given import WITHIN, Database, Given, eventually

COUNTS = b"""
SELECT (SELECT coalesce(sum(hi - lo + 1), 0) FROM busload.queue), (SELECT count(*) FROM busload.troubleshooting)
"""
"""What is ready and in troubleshooting, counted row by row."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "EVERY", 0.02)
    monkeypatch.setattr(live, "REST", 1.0)


async def until(events: asyncio.Queue[tuple[str, Any]], key: str, value: object) -> list[Any]:
    """The values of all events up to the one that has this."""
    seen = []
    async with asyncio.timeout(WITHIN):
        while True:
            _, values = await events.get()
            seen.append(values)
            if values.get(key) == value:
                return seen


def feeds() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_name().startswith("busload-live-")]


async def test_a_stream_sends_all_values_and_then_those_that_change(dashboard: Starlette, given: Given) -> None:
    batch_id = await given.batch(4)
    async with stream(dashboard, f"/batches/{batch_id}/live") as events:
        [first] = await until(events, "completed", "0")
        assert first["total"] == "4"
        given.settled(given.claimed(3))
        later = await until(events, "completed", "3")
        assert later[-1]["percent"] == "75 %"
        assert all("total" not in values for values in later)


async def test_a_page_and_its_stream_tell_the_same(dashboard: Starlette, given: Given) -> None:
    batch_id, [command_id] = await given.in_troubleshooting()
    [item] = await given.bus.troubleshooting.list(None)
    waiting = ("/troubleshooting", f"/troubleshooting/payments/{item.fingerprint}")
    for path in ("/", "/batches", f"/batches/{batch_id}", f"/commands/payments/{command_id}", *waiting):
        async with client(dashboard) as http, stream(dashboard, f"{path.rstrip('/')}/live") as events:
            html = (await http.get(path)).text
            _, values = await asyncio.wait_for(events.get(), WITHIN)
        shown = {part.partition('"')[0] for part in html.split('data-live="')[1:]}
        shown |= {
            pair.partition(":")[2]
            for part in html.split('data-live-attrs="')[1:]
            for pair in part.partition('"')[0].split()
        }
        assert shown
        assert shown <= set(values), path
        rows = {part.partition('"')[0].replace("&#43;", "+") for part in html.split('data-row="')[1:]}
        assert rows == set(values["rows"]), path


async def test_a_cause_that_is_decided_about_counts_down_to_nothing(dashboard: Starlette, given: Given) -> None:
    _, ids = await given.in_troubleshooting(2)
    [item, _] = await given.bus.troubleshooting.list(None)
    async with stream(dashboard, f"/troubleshooting/payments/{item.fingerprint}/live") as events:
        await until(events, "count", "2")
        await given.bus.troubleshooting.cancel("payments", ids[0], reason="x")
        await until(events, "count", "1")
        await given.bus.troubleshooting.cancel("payments", ids[1], reason="x")
        assert (await until(events, "count", "0"))[-1]["rows"] == []


async def test_rows_that_come_are_told(dashboard: Starlette, given: Given) -> None:
    first = await given.batch()
    async with stream(dashboard, "/batches/live") as events:
        await until(events, "rows", [str(first)])
        second = await given.batch()
        await until(events, "rows", [str(second), str(first)])


async def test_a_stream_has_the_filters_of_its_page(dashboard: Starlette, given: Given) -> None:
    batch_id = await given.batch(name="January")
    await given.batch(name="February")
    async with stream(dashboard, "/batches/live?name=jan") as events:
        await until(events, "rows", [str(batch_id)])


async def test_those_who_look_at_the_same_page_share_one_look(dashboard: Starlette, given: Given) -> None:
    batch_id = await given.batch(2)
    path = f"/batches/{batch_id}/live"
    async with stream(dashboard, path) as one, stream(dashboard, path) as two, stream(dashboard, path) as three:
        for events in (one, two, three):
            await until(events, "completed", "0")
        assert len(feeds()) == 1
    await eventually(lambda: not feeds())


async def test_readers_and_operators_share_no_feed_if_payloads_are_hidden(bus: CommandBus, given: Given) -> None:
    served = app(bus, authenticate=known_users(), hide_payloads=True)
    async with (
        stream(served, "/live", **signed_in(Role.READER)) as reader,
        stream(served, "/live", **signed_in(Role.OPERATOR)) as operator,
    ):
        for events in (reader, operator):
            await until(events, "ready", "0")
        assert len(feeds()) == 2


async def test_nobody_looks_once_all_have_left(dashboard: Starlette, given: Given) -> None:
    async with stream(dashboard, "/live") as events:
        await until(events, "ready", "0")
    await eventually(lambda: not feeds())


async def test_a_stream_ends_by_itself_so_that_everybody_is_asked_again(
    dashboard: Starlette, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "LONGEST", 0.05)
    async with client(dashboard) as http:
        answer = await asyncio.wait_for(http.get("/live"), WITHIN)
    assert answer.headers["content-type"].startswith("text/event-stream")
    await eventually(lambda: not feeds())


async def test_a_silent_stream_shows_that_it_lives(
    dashboard: Starlette, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "LONGEST", 0.5)
    monkeypatch.setattr(live, "HEARTBEAT", 0.01)
    batch_id = await given.batch()
    async with client(dashboard) as http:
        answer = await asyncio.wait_for(http.get(f"/batches/{batch_id}/live"), WITHIN)
    assert ": still here\n\n" in answer.text


async def test_there_is_an_end_to_the_number_of_streams(
    dashboard: Starlette, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MOST_STREAMS", 1)
    async with stream(dashboard, "/live") as events:
        await until(events, "ready", "0")
        async with client(dashboard) as http:
            assert (await http.get("/batches/live")).status_code == 503


async def test_trouble_is_told_and_ends(
    dashboard: Starlette, given: Given, bus: CommandBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = await given.batch()
    path = f"/batches/{batch_id}/live"

    async def away(*args: Any) -> Any:
        raise psycopg.OperationalError("canary")

    async with stream(dashboard, path) as events:
        await until(events, "completed", "0")
        with monkeypatch.context() as patched:
            patched.setattr(bus, "get_batch", away)
            assert await asyncio.wait_for(events.get(), WITHIN) == ("trouble", {"message": "The database is away"})
        name, _ = await asyncio.wait_for(events.get(), WITHIN)
        assert name == "values"


async def test_a_page_lives_again_soon_after_the_database_is_back_however_long_a_failed_look_took(
    dashboard: Starlette, given: Given, bus: CommandBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "REST", 1e9)  # one rest of that kind outlasts the test
    batch_id = await given.batch()

    async def away(*args: Any) -> Any:
        raise psycopg.OperationalError("canary")

    with monkeypatch.context() as patched:
        patched.setattr(bus, "get_batch", away)
        async with stream(dashboard, f"/batches/{batch_id}/live") as events:
            assert (await asyncio.wait_for(events.get(), WITHIN))[0] == "trouble"
            patched.undo()
            await until(events, "completed", "0")


async def test_every_event_agrees_with_the_database_while_a_worker_runs_at_full_speed(
    dashboard: Starlette, given: Given, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each committed state of the batch is kept, and the places are counted in the snapshot of each look."""
    database.rows("CREATE TABLE state (completed bigint, troubled bigint)")
    database.rows(
        "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO public.state VALUES"
        " (new.completed_count, new.in_troubleshooting_count); RETURN NULL; END $$"
    )
    database.rows("CREATE TRIGGER keep AFTER INSERT OR UPDATE ON busload.batch FOR EACH ROW EXECUTE FUNCTION keep()")
    looks: list[tuple[str, ...]] = []

    def counted() -> Plan[Overview]:
        found = yield from overview()
        [counts] = yield from execute(COUNTS)
        looks.append(tuple(number(int(count)) for count in counts))
        return found

    monkeypatch.setattr("busload.dashboard.pages.overview.overview", counted)

    half_seen = asyncio.Event()

    async def fail(command: Command, ctx: HandlerContext) -> None:
        if command.data["n"] == 1501:
            await half_seen.wait()  # however fast the worker is, some event comes in between
        if command.data["n"] % 50 == 0:
            raise PermanentCommandError("no")

    given.handler(function=fail)
    batch_id = await given.batch(3000)
    seen: list[tuple[int, int]] = []
    waiting: list[tuple[str, ...]] = []
    async with stream(dashboard, f"/batches/{batch_id}/live") as of_batch, stream(dashboard, "/live") as of_all:
        everything: dict[str, Any] = (await of_all.get())[1]
        async with given.running(concurrency=50):
            now: dict[str, Any] = {}
            while now.get("in_troubleshooting") != "60" or now.get("completed") != "2,940":
                now |= (await of_batch.get())[1]
                seen.append((int(now["completed"].replace(",", "")), int(now["in_troubleshooting"])))
                if seen[-1][0]:
                    half_seen.set()
        while waiting[-1:] != [("0", "60")]:
            everything |= (await of_all.get())[1]
            waiting.append((everything["ready"], everything["troubleshooting"]))
    states = {(int(a), int(b)) for a, b in database.rows("SELECT completed, troubled FROM state")}
    assert set(seen) <= states and any(0 < completed < 2940 for completed, _ in seen)
    assert set(waiting) <= set(looks)
