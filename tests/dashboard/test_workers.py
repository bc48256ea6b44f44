"""The pages of workers: who is there, what each runs, and how one is stopped."""

from __future__ import annotations

import asyncio
import os
import socket
from datetime import timedelta
from importlib.metadata import version

import httpx
import pytest

from busload import CommandBus, HandlerContext
from busload.commands import rescue
from busload.commands.command import Command
from busload.dashboard import Role, app
from tests.dashboard.hostile import HOSTILE
from tests.dashboard.site import SAME_ORIGIN, client, known_users, signed_in
from tests.dashboard.test_pages import acted, check_harmless, seen
from tests.given import DOMAIN, Database, Given

SICK = '{"failures_in_row": 50, "stuck_threads": 3}'


async def test_workers_are_listed_with_how_they_are(
    site: httpx.AsyncClient, given: Given, database: Database, bus: CommandBus
) -> None:
    sick, silent = given.registered_worker(), given.registered_worker()
    database.rows("UPDATE busload.worker SET condition = %s, name = 'sick' WHERE worker = %s", SICK, sick)
    database.rows(
        "UPDATE busload.worker SET seen_at = now() - interval '1 h', name = 'silent' WHERE worker = %s", silent
    )
    database.perform(rescue.retire(worker=given.registered_worker()))
    await given.batch(2)
    given.claimed(2, by=sick)
    page = await seen(site, "/workers")
    [health] = [one.reasons[0].message for one in await bus.workers.list() if one.name == "sick"]
    for part in ("sick Alive payments 2 10", health, "silent Silent", "ago"):
        assert part in page.words
    assert "given" not in page.words
    assert "given Stopped" in (await seen(site, "/workers?all=yes")).words
    assert "No worker serves this domain" in (await seen(site, "/workers?domain=crm")).words
    assert "busload worker ls --domain crm --all" in (await seen(site, "/workers?domain=crm&all=yes")).text


async def test_a_worker_shows_host_process_and_version_whatever_its_name_is(
    site: httpx.AsyncClient, bus: CommandBus, given: Given
) -> None:
    async with given.running(name="the nightly one"):
        while not (found := await bus.workers.list()):
            await asyncio.sleep(0.01)
        [worker] = found
        host, process, release = socket.gethostname(), os.getpid(), version("busload")
        assert (worker.host, worker.process_id, worker.version) == (host, process, release)
        page = await seen(site, "/workers")
        assert "Host Process Version" in page.words
        assert f"{host} {process} {release}" in page.words
        own = await seen(site, f"/workers/{worker.worker}")
        assert f"Host {host} Process {process}" in own.words


async def test_workers_are_paged(site: httpx.AsyncClient, given: Given) -> None:
    for _ in range(51):
        given.registered_worker()
    first = await seen(site, "/workers")
    [more] = [link for link in first.links if "after=" in link]
    second = await seen(site, more)
    rows = [attrs["data-row"] for page in (first, second) for _, attrs in page.tags if "data-row" in attrs]
    assert len(rows) == len(set(rows)) == 51


async def test_a_worker_shows_what_it_holds_oldest_first(
    site: httpx.AsyncClient, given: Given, database: Database
) -> None:
    batch_id = await given.batch(2)
    worker = given.registered_worker()
    first, second = given.claimed(1, by=worker)[0], given.claimed(1, by=worker)[0]
    database.rows("UPDATE busload.lease SET since = now() - interval '1 hour' WHERE hi = %s", second.id)
    page = await seen(site, f"/workers/{worker}")
    links = [link for link in page.links if link.startswith("/commands/")]
    assert links == [f"/commands/{DOMAIN}/{one.command_id}" for one in (second, first)]
    assert f"/batches/{batch_id}" in page.links
    assert "At the shell busload worker stop given --reason" in page.words
    assert page.words.endswith("At the shell busload worker ls Copy")
    database.perform(rescue.retire(worker=worker))
    assert "Stop worker" not in (await seen(site, f"/workers/{worker}")).words


async def test_a_worker_is_stopped(bus: CommandBus, given: Given, database: Database) -> None:
    running, go = asyncio.Event(), asyncio.Event()

    async def wait(command: Command, ctx: HandlerContext) -> None:
        running.set()
        await go.wait()

    given.handler("Debit", wait)
    await given.batch()
    worker = given.worker()
    task = asyncio.create_task(worker.run())
    await running.wait()
    [number] = [one.worker for one in await bus.workers.list()]
    async with client(app(bus, authenticate=known_users()), **SAME_ORIGIN, **signed_in(Role.OPERATOR)) as site:
        page = await acted(site, f"/workers/{number}/stop", reason="the machine is replaced")
        assert "Asked to stop." in page.words
        assert "Stopping" in page.words
        assert "Asked by operator" in page.words
        assert "Stop worker" not in page.words
        assert "It was asked before." in (await acted(site, f"/workers/{number}/stop", reason="again")).words
        go.set()
        await asyncio.wait_for(task, 60)
        assert "runs, so nothing was asked" in (await acted(site, f"/workers/{number}/stop", 409, reason="x")).words
    assert database.rows("SELECT operator, details ->> 'reason' FROM busload.event WHERE operator IS NOT NULL") == [
        ("operator", "the machine is replaced")
    ]


async def test_a_reader_cannot_stop_a_worker(bus: CommandBus, given: Given, database: Database) -> None:
    worker = given.registered_worker()
    async with client(app(bus, authenticate=known_users()), **SAME_ORIGIN, **signed_in(Role.READER)) as site:
        assert "Stop worker" not in (await seen(site, f"/workers/{worker}")).words
        await acted(site, f"/workers/{worker}/stop", 403, reason="x")
    assert database.value("SELECT stop_requested_at FROM busload.worker") is None


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/workers/99", 404, "There is no worker with the number 99"),
        (f"/workers/{2**80}", 404, "There is no worker"),
        ("/workers/x", 404, "no page at this address"),
        ("/workers?after=x", 400, "which is no worker"),
        (f"/workers?after={2**80}", 400, "which is no worker"),
        ("/workers?after=1", 404, "Go back to the first page"),
        ("/workers?domain=1", 400, "INVALID_NAME"),
    ],
)
async def test_wrong_input_is_told(site: httpx.AsyncClient, path: str, status: int, said: str) -> None:
    assert said in (await seen(site, path, status)).words


async def test_a_stop_without_a_reason_does_nothing(site: httpx.AsyncClient, given: Given, database: Database) -> None:
    worker = given.registered_worker()
    assert "reason is empty" in (await acted(site, f"/workers/{worker}/stop", 400)).words
    assert "There is no worker" in (await acted(site, "/workers/99/stop", 404, reason="x")).words
    assert database.value("SELECT stop_requested_at FROM busload.worker") is None


async def test_hostile_names_stay_texts(site: httpx.AsyncClient, database: Database, bus: CommandBus) -> None:
    for text in HOSTILE:
        plan = rescue.register(name=text, domains=[text], concurrency=1, lease_for=timedelta(1), version=text)
        number = database.perform(plan)
        await bus.workers.stop(number, reason=text, operator=text)
        check_harmless((await site.get(f"/workers/{number}")).text)
        check_harmless((await site.get("/workers", params={"domain": text})).text)
    listed = await site.get("/workers")
    check_harmless(listed.text)
