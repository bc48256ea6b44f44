"""Headers: texts beside the data, from every way in to the handler, its retries, its reply and its callback."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

from busload import (
    BatchCommand,
    Command,
    CommandBus,
    HandlerContext,
    InvalidCommandError,
    RetryPolicy,
    TransientCommandError,
)
from busload.commands.dedup import Dedup
from busload.jobs.job import Stage
from tests.given import DOMAIN, Database, Given

pytestmark = pytest.mark.usefixtures("invariants")

H = {"tenant": "acme", "ключ": "значение\n\U0001f600", "empty": "", 'q"': "\\u0000"}


def batch_of(count: int, **options: Any) -> list[BatchCommand]:
    return [BatchCommand("Debit", data=n, **options) for n in range(count)]


async def test_headers_come_back_exactly_from_every_way_in(
    bus: CommandBus, given: Given, conn: psycopg.AsyncConnection
) -> None:
    """Alone, alone with every rare option, in bulk, in a batch of one statement, by COPY, streamed, in the caller's
    transaction"""
    seen = given.handler()
    later = datetime.now(UTC) + timedelta(hours=1)
    sends: list[dict[str, Any]] = [
        {},
        {"task_key": "t", "dedup": Dedup()},
        {"run_at": datetime(2020, 1, 1, tzinfo=UTC)},
        {"expires_at": later},
        {"conn": conn},
    ]
    for options in sends:
        sent = await bus.send(DOMAIN, "Debit", 0, headers=H, **options)
        await conn.commit()
        found = await bus.get_command(DOMAIN, sent.command_id)
        assert found is not None and found.headers == H, options
    await bus.send_many(DOMAIN, batch_of(3, headers=H))
    await bus.create_batch(DOMAIN, batch_of(3, headers=H))
    copied = await bus.create_batch(DOMAIN, batch_of(1001, headers=H))
    async with bus.open_batch(DOMAIN) as streamed:
        await streamed.add("Debit", headers=H)
    await given.drained()
    assert len(seen) == 5 + 3 + 3 + 1001 + 1
    assert all(command.headers == H for command in seen)
    assert all(one.headers == H for one in await bus.list_batch_commands(DOMAIN, copied, limit=5))


async def test_a_command_without_headers_has_none_beside_one_that_has_some(bus: CommandBus, given: Given) -> None:
    seen = given.handler()
    commands = [BatchCommand("Debit", data=n, headers={"n": str(n)} if n % 3 == 0 else None) for n in range(1200)]
    await bus.create_batch(DOMAIN, commands)
    await bus.send(DOMAIN, "Debit", -1, headers={})
    await given.drained()
    wanted = {n: {"n": str(n)} if n % 3 == 0 else None for n in range(1200)} | {-1: None}
    assert {command.data: command.headers for command in seen} == wanted


async def test_the_headers_of_a_batch_are_kept_once_and_its_commands_have_them_below_their_own(
    bus: CommandBus, given: Given, database: Database
) -> None:
    seen = given.handler()
    commands = [BatchCommand("Debit", data=1), BatchCommand("Debit", data=2, headers={"b": "own", "c": "3"})]
    batch_id = await bus.create_batch(DOMAIN, commands, headers={"a": "1", "b": "2"})
    async with bus.open_batch(DOMAIN, headers={"a": "open"}) as opened:
        await opened.add("Debit", 3)
    assert database.value("SELECT count(headers) FROM busload.command") == 1
    batch = await given.batch_now(batch_id)
    assert batch.headers == {"a": "1", "b": "2"}
    listed = await bus.list_batch_commands(DOMAIN, batch_id)
    await given.drained()
    wanted = {1: {"a": "1", "b": "2"}, 2: {"a": "1", "b": "own", "c": "3"}, 3: {"a": "open"}}
    assert {command.data: command.headers for command in seen} == wanted
    assert {command.data: command.headers for command in listed} == {n: wanted[n] for n in (1, 2)}


async def test_a_handler_that_changes_its_headers_changes_those_of_no_other_command_of_the_batch(
    bus: CommandBus, given: Given
) -> None:
    seen: list[dict[str, str]] = []

    @bus.handler(DOMAIN, "Debit")
    async def debit(command: Command, ctx: HandlerContext) -> None:
        assert command.headers is not None
        seen.append({**command.headers})
        command.headers["mine"] = "1"

    await bus.create_batch(DOMAIN, [BatchCommand("Debit"), BatchCommand("Debit")], headers={"a": "1"})
    await given.drained()
    assert seen == [{"a": "1"}] * 2


async def test_a_retry_a_reply_and_a_callback_have_the_headers(bus: CommandBus, given: Given) -> None:
    seen: list[tuple[str, int, Any]] = []

    @bus.handler(DOMAIN, "Debit", retry=RetryPolicy(max_attempts=2, backoff=(0,)))
    async def debit(command: Command, ctx: HandlerContext) -> None:
        seen.append(("Debit", ctx.attempt, command.headers))
        if ctx.attempt == 1:
            raise TransientCommandError("not yet")

    for kind in ("Done", "DebitReply"):

        @bus.handler(DOMAIN, kind)
        async def note(command: Command, ctx: HandlerContext, kind: str = kind) -> None:
            seen.append((kind, ctx.attempt, command.headers))

    done = BatchCommand("Done", headers={"done": "yes", "b": "done"})
    await bus.create_batch(
        DOMAIN,
        [BatchCommand("Debit", reply_to=DOMAIN, headers={"own": "1"})],
        on_complete=done,
        headers={"b": "batch"},
    )
    await given.drained()
    assert sorted(seen) == [
        ("Debit", 1, {"b": "batch", "own": "1"}),
        ("Debit", 2, {"b": "batch", "own": "1"}),
        ("DebitReply", 1, {"b": "batch", "own": "1"}),
        ("Done", 1, {"b": "done", "done": "yes"}),
    ]


async def test_commands_of_every_stage_of_a_job_and_its_callback_have_their_headers(
    bus: CommandBus, given: Given
) -> None:
    seen = given.handler()
    done = given.handler("Done")
    stages = [Stage(name, [BatchCommand("Debit", headers={"stage": name})]) for name in ("one", "two")]
    await bus.jobs.create(DOMAIN, stages, on_complete=BatchCommand("Done", headers={"job": "done"}))
    await given.drained()
    assert [command.headers for command in seen] == [{"stage": "one"}, {"stage": "two"}]
    assert [command.headers for command in done] == [{"job": "done"}]


@pytest.mark.parametrize(
    ("headers", "path", "says"),
    [
        ("tenant=acme", "/headers", "wanted a dict of texts"),
        ([("a", "b")], "/headers", "wanted a dict of texts"),
        ({"a": 1}, "/headers/a", "found 1, wanted text"),
        ({"a": None}, "/headers/a", "found None, wanted text"),
        ({"a": {"b": "c"}}, "/headers/a", "wanted text"),
        ({1: "a"}, "/headers", "a name: found 1, wanted text"),
        ({"": "a"}, "/headers", "a name: found ''"),
        ({"a": "x\0"}, "/headers/a", "without NUL"),
        ({"a": "\ud800"}, "/headers/a", "wanted text that UTF-8 can hold"),
        ({"a": "x" * 8183, "b": ""}, "/headers", "at most 8192 are allowed"),
    ],
)
async def test_wrong_headers_are_refused_by_name_and_nothing_is_written(
    bus: CommandBus, given: Given, database: Database, headers: Any, path: str, says: str
) -> None:
    for call in (
        lambda: bus.send(DOMAIN, "Debit", headers=headers),
        lambda: bus.create_batch(DOMAIN, [BatchCommand("Debit", headers=headers)]),
        lambda: bus.create_batch(DOMAIN, [BatchCommand("Debit")], headers=headers),
        lambda: bus.create_batch(DOMAIN, [BatchCommand("Debit")], on_complete=BatchCommand("Done", headers=headers)),
    ):
        with pytest.raises(InvalidCommandError, match="Nothing was written") as refused:
            await call()
        [problem] = refused.value.problems
        assert problem.path.removeprefix("/on_complete") == path
        assert says in problem.message
    assert database.value("SELECT (SELECT count(*) FROM busload.command) + (SELECT count(*) FROM busload.batch)") == 0


async def test_the_largest_headers_are_accepted(bus: CommandBus, given: Given) -> None:
    seen = given.handler()
    largest = {"a": "x" * (8192 - len(json.dumps({"a": ""}, separators=(",", ":"))))}
    await bus.send(DOMAIN, "Debit", headers=largest)
    await given.drained()
    assert seen[0].headers == largest


@pytest.mark.parametrize("stored", ["[1]", '"text"', '{"a": 1}', "{}"])
async def test_headers_that_other_hands_wrote_and_that_are_none_do_not_stop_a_command(
    bus: CommandBus, given: Given, database: Database, stored: str
) -> None:
    seen = given.handler()
    sent: UUID = (await bus.send(DOMAIN, "Debit")).command_id
    database.rows("UPDATE busload.command SET headers = %s", stored)
    found = await bus.get_command(DOMAIN, sent)
    await given.drained()
    assert found is not None and found.headers is None
    assert [command.headers for command in seen] == [None]


async def test_an_archived_command_and_its_batch_keep_their_headers(
    bus: CommandBus, given: Given, database: Database
) -> None:
    given.handler()
    await bus.create_batch(DOMAIN, [BatchCommand("Debit", headers={"own": "1"})], headers={"b": "2"})
    await given.drained()
    database.rows("UPDATE busload.batch SET completed_at = completed_at - interval '2 days'")
    await bus.prune(older_than=timedelta(days=1), archive=True)
    assert database.value("SELECT headers FROM busload.archive") == {"own": "1"}
    assert database.value("SELECT headers FROM busload.archived_batch") == {"b": "2"}
