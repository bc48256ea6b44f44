"""What waits for a person, by cause: one look, one decision and one batch for thousands of failures."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any
from uuid import UUID, uuid4

import jsonpatch
import msgspec
import psycopg
import pytest

from busload import (
    BatchCommand,
    Command,
    CommandBus,
    HandlerContext,
    InvalidCommandError,
    PermanentCommandError,
    Settings,
    SyncCommandBus,
    Worker,
)
from busload.commands import InputLimits, PayloadLimits
from busload.errors import InvalidOperationError, SupersededError
from busload.postgres.plan import execute, perform_async
from busload.troubleshooting import GroupAction, GroupItem
from busload.troubleshooting.causes import SQL
from busload.troubleshooting.decisions import DECISION, PART, PRIORITY, move_part, read_part
from tests.given import DOMAIN, Database, Given, counts

UNKNOWN = "0123456789ab"
EUROS = [{"op": "add", "path": "/currency", "value": "EUR"}]

Action = Callable[..., Awaitable[GroupAction]]
ACTIONS: dict[str, Callable[..., Awaitable[GroupAction]]] = {
    "retry": lambda bus, fingerprint, **how: bus.troubleshooting.retry_group(DOMAIN, fingerprint, **how),
    "complete": lambda bus, fingerprint, **how: bus.troubleshooting.complete_group(DOMAIN, fingerprint, **how),
    "cancel": lambda bus, fingerprint, **how: bus.troubleshooting.cancel_group(
        DOMAIN, fingerprint, **{"reason": "no", **how}
    ),
}
every_action = pytest.mark.parametrize("action", ACTIONS.values(), ids=list(ACTIONS))


def fails(given: Given, command_type: str = "Debit") -> set[str]:
    """A handler that fails for as long as the data has an error, which can be repaired: errors put in here are."""
    repaired: set[str] = set()

    async def run(command: Command, ctx: HandlerContext) -> Any:
        code = command.data.get("error")
        if code is not None and code not in repaired:
            raise PermanentCommandError(command.data.get("message", f"{code} of account 17"), code=code)
        return command.data

    given.handler(command_type, run)
    return repaired


async def failed(given: Given, codes: str, command_type: str = "Debit", **data: Any) -> UUID:
    """A batch with a command for each letter, which has failed with it as the code."""
    commands = [BatchCommand(command_type, data={"n": n, "error": code, **data}) for n, code in enumerate(codes)]
    batch_id = await given.bus.create_batch(DOMAIN, commands)
    await given.drained()
    return batch_id


async def fingerprint_of(bus: CommandBus, code: str) -> str:
    [found] = [group.fingerprint for group in await bus.troubleshooting.groups(DOMAIN) if group.error_code == code]
    return found


async def results_of(bus: CommandBus, batch_id: UUID | None) -> list[Any]:
    assert batch_id is not None
    return [command.result for command in await bus.list_batch_commands(DOMAIN, batch_id, limit=1000)]


async def custom_data_of(given: Given, batch_id: UUID) -> dict[str, Any]:
    custom_data = (await given.batch_now(batch_id)).custom_data
    assert custom_data is not None
    return custom_data


async def retries_of(bus: CommandBus, command_id: UUID) -> list[Any]:
    trail = await bus.get_audit_trail(DOMAIN, command_id)
    return [event for event in trail if event.type == "OPERATOR_RETRIED"]


# -- the groups -------------------------------------------------------------------------------------------------------


async def test_what_waits_is_grouped_by_cause_the_largest_first(bus: CommandBus, given: Given) -> None:
    fails(given)
    fails(given, "Credit")
    batch_id = await failed(given, "AABBB")
    await failed(given, "B", "Credit")

    [b, a] = await bus.troubleshooting.groups(DOMAIN)

    assert (a.count, b.count) == (2, 4)
    assert (a.error_type, a.error_code, a.message) == ("PermanentCommandError", "A", "A of account 17")
    assert (a.reasons, a.command_types, b.command_types) == (("PERMANENT",), ("Debit",), ("Credit", "Debit"))
    items = await bus.troubleshooting.list(DOMAIN)
    of_a = [item for item in items if item.fingerprint == a.fingerprint]
    assert {item.command_id for item in of_a} == set(a.command_ids)
    assert len(b.command_ids) == 3
    assert (a.oldest, a.newest) == (min(item.since for item in of_a), max(item.since for item in of_a))
    assert {item.batch_id for item in of_a} == {batch_id}

    [largest] = await bus.troubleshooting.groups(DOMAIN, limit=1)
    assert largest == b
    [credit] = await bus.troubleshooting.groups(DOMAIN, command_type="Credit")
    assert (credit.fingerprint, credit.count, credit.command_types) == (b.fingerprint, 1, ("Credit",))
    assert await bus.troubleshooting.groups("crm") == []


SAME = {
    "numbers": ["Account 17 is closed", "Account 4,018.50 is closed", "Account -3 is closed"],
    "ids": ["No key 0198c5d2-8000-7c11-9d2e-5b1c8a6e4f01", "No key ffffc5d2-8000-4c11-9d2e-5b1c8a6e4f02"],
    "hex": ["The hash deadbeefcafe is wrong", "The hash 12ADBEEF0000 is wrong"],
    "odd ids": ["Order ord_8Hx92kLq is lost", "Order ord_z1z99aBc is lost"],
    "long numbers": ["Invoice 9 is paid", "Invoice 123456 is paid", "Invoice 1234567890123 is paid"],
    "quotes": ["Customer 'Bob Ray' is unknown", "Customer 'Ann Lee' is unknown", "Customer 'C-17' is unknown"],
    "double quotes": ['No "x y" here', 'No "why not" here', 'No "user1234" here'],
    "names with a number": ["No table 'part_1'", "No table 'part_2'"],
    "bytes": ["byte 0xff in position 0", "byte 0xfe in position 10"],
    "no status": ["status of account 404 is odd", "status of account 503 is odd"],
    "numbers after status": ["status 1234", "status 99"],
    "apostrophes": ["can't find the customer's order 7", "can't find the customer's order 12"],
    "times": ["Late at 2026-11-16T04:53:56.123Z", "Late at 2026-11-17 04:53:56+02:00"],
    "e-mail": ["Nobody is bob@example.com here", "Nobody is ann.lee+x@mail.example.org here"],
    "paths": ["No file /srv/in/2024/invoice-7781.csv", "No file /srv/in/2025/invoice-12.csv"],
    "space": ["First line\n  second 1", "First line second 2"],
    "addresses": ["<Car at 0x7f3a12ff00>", "<Car at 0x7f3a12ff08>"],
}
OTHER = [
    "'NoneType' object has no attribute 'amount'",
    "'Order' object has no attribute 'currency'",
    "No module named 'foo'",
    "No module named 'bar.baz'",
    'duplicate key value violates unique constraint "orders_pkey"',
    'duplicate key value violates unique constraint "users_email_key"',
    'column "a" does not exist',
    'column "b" does not exist',
    "no such column: `a`",
    "no such column: `b`",
    "HTTP 404",
    "HTTP 503",
    "HTTP/1.1 404 from the bank",
    "HTTP/1.1 503 from the bank",
    "HTTP Error 404: no",
    "HTTP Error 503: no",
    "The bank said status_code=404",
    "The bank said status_code=503",
    "The bank said {'status': 404}",
    "The bank said {'status': 503}",
    "oauth2_token failed",
    "base64_decode failed",
    "'amount'",
    "'customer'",
    "S3 is away",
    "EC2 is away",
    "Step one failed",
    "Step two failed",
    "It can't open the customers' file",
    "It can't close the customers' file",
    "",
]


def test_messages_that_differ_in_what_varies_have_one_cause(database: Database) -> None:
    for what, messages in SAME.items():
        assert len({fingerprint(database, message) for message in messages}) == 1, what


def test_messages_that_differ_in_words_types_or_codes_have_not(database: Database) -> None:
    messages = [*OTHER, *(several[0] for several in SAME.values())]
    assert len({fingerprint(database, message) for message in messages}) == len(messages)
    kinds = [("KeyError", None), ("ValueError", None), ("KeyError", "A"), ("KeyErrorA", None)]
    assert len({fingerprint(database, "x", *kind) for kind in kinds}) == 4


async def test_a_group_shows_messages_that_differ(bus: CommandBus, given: Given) -> None:
    """At most three, the oldest first, so that a person sees what was taken for the same"""
    fails(given)
    for n in (1, 1, 2, 3, 4):
        await failed(given, "A", message=f"No account {n}")
    await failed(given, "B", message="Closed")
    [a, b] = await bus.troubleshooting.groups(DOMAIN)
    assert (a.count, a.message, a.messages) == (5, "No account 1", ("No account 1", "No account 2", "No account 3"))
    assert (b.messages, len(a.command_ids)) == (("Closed",), 3)


def fingerprint(database: Database, message: str, kind: str = "ValueError", code: str | None = None) -> str:
    error = json.dumps({"type": kind, "code": code, "message": message})
    found: str = database.value("SELECT busload.fingerprint(%s::json)", error)
    return found


def test_an_error_that_another_client_wrote_has_a_fingerprint_too(database: Database) -> None:
    for error in (None, "null", "5", "[1]", '"text"', "{}", '{"message": {"a": [1]}, "type": 5}'):
        assert len(database.value("SELECT busload.fingerprint(%s::json)", error)) == 12


def test_no_message_is_too_long_or_too_odd(database: Database) -> None:
    """Only its beginning counts, so the work is bounded"""
    for part in ("x", "1", "'", '"', "a-", "@", "a1 ", "2026-11-16T", "`'", "\n", "é"):
        first, second = fingerprint(database, part * 16_000), fingerprint(database, part * 16_000 + " and so on")
        assert first == second, part


# -- the decisions ----------------------------------------------------------------------------------------------------


async def test_a_group_is_retried_by_a_batch_of_its_own(bus: CommandBus, given: Given) -> None:
    """What is retried keeps its task key and gets a new execution"""
    repaired = fails(given)
    batch_id = await failed(given, "AAAB")
    single = await given.sent("Debit", {"error": "A"}, task_key="invoice:7")
    await given.drained()
    a, before = await fingerprint_of(bus, "A"), (await given.command_now(single)).execution_id

    action = await bus.troubleshooting.retry_group(DOMAIN, a, operator="ada")

    assert (action.action, action.fingerprint, action.count, action.sample) == ("retry", a, 4, ())
    assert action.batch_id is not None
    batch = await given.batch_now(action.batch_id)
    assert (batch.name, batch.custom_data) == (
        f"retry A ({a})",
        {"action": "retry", "fingerprint": a, "operator": "ada"},
    )
    [chunk] = await bus.list_batch_commands(DOMAIN, action.batch_id)
    assert (chunk.command_type, chunk.priority) == (DECISION, PRIORITY)
    assert len(await bus.troubleshooting.list(DOMAIN)) == 5  # a worker moves them, not this call

    repaired.add("A")
    await given.drained()

    assert (await bus.wait_batch(DOMAIN, action.batch_id, timeout=25)).status == "COMPLETED"
    assert await results_of(bus, action.batch_id) == [{"moved": 4, "left": {}}]
    assert counts(await given.batch_now(batch_id)) == (4, 3, 0, 0, 1)
    assert [group.error_code for group in await bus.troubleshooting.groups(DOMAIN)] == ["B"]
    now = await given.command_now(single)
    assert (now.status, now.task_key, now.attempts) == ("COMPLETED", "invoice:7", 1)
    assert now.execution_id != before
    [retried] = await retries_of(bus, single)
    assert (retried.operator, retried.details) == ("ada", {"batch_id": str(action.batch_id)})


async def test_a_group_is_completed_with_a_result(bus: CommandBus, given: Given) -> None:
    """For all of it"""
    fails(given)
    batch_id = await failed(given, "AAB")
    a = await fingerprint_of(bus, "A")
    action = await bus.troubleshooting.complete_group(DOMAIN, a, result={"by": [1.5, 10**30, -0.0]}, operator="ada")
    await given.drained()

    assert action.count == 2
    assert counts(await given.batch_now(batch_id)) == (3, 2, 0, 0, 1)
    done = await bus.list_batch_commands(DOMAIN, batch_id, status="COMPLETED")
    assert [repr(command.result) for command in done] == [repr({"by": [1.5, 10**30, -0.0]})] * 2
    event = (await bus.get_audit_trail(DOMAIN, done[0].command_id))[-1]
    assert (event.type, event.operator) == ("OPERATOR_COMPLETED", "ada")
    assert event.details["batch_id"] == str(action.batch_id)


async def test_a_group_is_canceled_with_a_reason(bus: CommandBus, given: Given) -> None:
    """For all of it"""
    fails(given)
    batch_id = await failed(given, "AA")
    a = await fingerprint_of(bus, "A")
    action = await bus.troubleshooting.cancel_group(DOMAIN, a, reason="paid twice", operator="ada")
    await given.drained()

    batch = await given.batch_now(batch_id)
    assert (batch.status, counts(batch)) == ("COMPLETED_WITH_FAILURES", (2, 0, 0, 2, 0))
    [first, _] = await bus.list_batch_commands(DOMAIN, batch_id, status="CANCELED")
    event = (await bus.get_audit_trail(DOMAIN, first.command_id))[-1]
    assert (event.type, event.operator) == ("OPERATOR_CANCELED", "ada")
    assert event.details == {"reason": "paid twice", "batch_id": str(action.batch_id)}


@pytest.mark.parametrize(
    ("name", "outcome", "part"),
    [("complete", "SUCCESS", {"data": 7}), ("cancel", "CANCELED", {"error": {"message": "no"}})],
)
async def test_who_waits_for_a_reply_gets_one(
    bus: CommandBus, given: Given, name: str, outcome: str, part: dict[str, Any]
) -> None:
    fails(given)
    ids = [await given.sent("Debit", {"error": "A"}, reply_to=to) for to in ("ledger", None, "ledger")]
    await given.drained()
    how = {"result": 7} if name == "complete" else {}
    await ACTIONS[name](bus, await fingerprint_of(bus, "A"), **how)
    await given.drained()
    replies = given.database.rows("SELECT data FROM busload.command WHERE domain = 'ledger'")
    assert {data["command_id"] for (data,) in replies} == {str(ids[0]), str(ids[2])}
    assert [data["outcome"] for (data,) in replies] == [outcome, outcome]
    assert all(data | part == data for (data,) in replies)


async def test_only_one_type_of_a_group_may_be_decided_on(bus: CommandBus, given: Given) -> None:
    fails(given)
    fails(given, "Credit")
    await failed(given, "AA")
    await failed(given, "A", "Credit")
    a = await fingerprint_of(bus, "A")
    action = await bus.troubleshooting.cancel_group(DOMAIN, a, command_type="Credit", reason="no")
    await given.drained()
    assert action.count == 1
    [left] = await bus.troubleshooting.groups(DOMAIN)
    assert (left.fingerprint, left.count, left.command_types) == (a, 2, ("Debit",))


async def test_a_type_of_which_nothing_waits_for_the_cause_is_refused(bus: CommandBus, given: Given) -> None:
    """A slip of the pen, not a decision that was carried out; one that was may be repeated"""
    fails(given)
    fails(given, "Credit")
    await failed(given, "A")
    await failed(given, "A", "Credit")
    a = await fingerprint_of(bus, "A")
    await bus.troubleshooting.cancel_group(DOMAIN, a, command_type="Credit", reason="no")
    await given.drained()
    before = given.database.everything()
    with pytest.raises(InvalidOperationError, match="of type 'Typo'"):
        await bus.troubleshooting.cancel_group(DOMAIN, a, command_type="Typo", reason="no")
    again = await bus.troubleshooting.cancel_group(DOMAIN, a, command_type="Credit", reason="no")
    assert (again.batch_id, again.count) == (None, 0)
    assert given.database.everything() == before


@every_action
async def test_a_fingerprint_may_be_in_capitals(bus: CommandBus, given: Given, action: Action) -> None:
    fails(given)
    await failed(given, "ABCDEF")
    a = max((group.fingerprint for group in await bus.troubleshooting.groups(DOMAIN)), key=lambda f: f != f.upper())
    done = await action(bus, a.upper())
    assert (done.fingerprint, done.count) == (a, 1)


async def test_what_belongs_to_a_canceled_batch_is_not_tried_again(bus: CommandBus, given: Given) -> None:
    """As a single retry would not; it can still be completed or canceled"""
    fails(given)
    canceled, other = await failed(given, "A"), await failed(given, "AA")
    a = await fingerprint_of(bus, "A")
    first = await bus.troubleshooting.retry_group(DOMAIN, a)
    await bus.cancel_batch(DOMAIN, canceled, reason="no")
    second = await bus.troubleshooting.retry_group(DOMAIN, a, dry_run=True)
    assert (first.count, second.count) == (3, 2)
    [left] = [item.command_id for item in await bus.troubleshooting.list(DOMAIN) if item.batch_id == canceled]
    await given.drained()

    assert first.batch_id is not None
    assert await results_of(bus, first.batch_id) == [{"moved": 2, "left": {str(left): "its batch was canceled"}}]
    assert await bus.troubleshooting.cancel_group(DOMAIN, a, reason="no")
    await given.drained()
    assert (await given.batch_now(canceled)).canceled_count == 1
    assert (await given.batch_now(other)).canceled_count == 2


async def test_an_action_is_divided_into_chunks(bus: CommandBus, given: Given) -> None:
    fails(given)
    batch_id = await failed(given, "A" * (2 * PART + 1))
    action = await bus.troubleshooting.cancel_group(DOMAIN, await fingerprint_of(bus, "A"), reason="no")
    assert action.batch_id is not None
    assert (await given.batch_now(action.batch_id)).total_count == 3
    await given.drained()
    assert [result["moved"] for result in await results_of(bus, action.batch_id)] == [PART, PART, 1]
    assert (await given.batch_now(batch_id)).canceled_count == 2 * PART + 1


async def test_a_chunk_of_a_patch_is_bounded_by_its_bytes(bus: CommandBus, given: Given) -> None:
    """Otherwise a few hundred large commands would be one transaction of many seconds"""
    repaired = fails(given)
    batch_id = await failed(given, "A" * 12, text="é" * 300_000)
    a = await fingerprint_of(bus, "A")
    plain = await bus.troubleshooting.retry_group(DOMAIN, a, dry_run=True)
    assert (plain.count, [item.before["n"] for item in plain.sample]) == (12, [0, 1, 2])

    action = await bus.troubleshooting.retry_group(DOMAIN, a, patch=EUROS)
    assert action.batch_id is not None
    parts = [len(c.data["command_ids"]) for c in await bus.list_batch_commands(DOMAIN, action.batch_id)]
    assert parts == [3, 3, 3, 3]
    repaired.add("A")
    await given.drained()
    assert counts(await given.batch_now(batch_id)) == (12, 12, 0, 0, 0)


async def test_what_a_decision_adds_counts_as_well(bus: CommandBus, given: Given) -> None:
    """It is kept with every command: in its data or in its trail"""
    fails(given)
    await failed(given, "A" * 10)
    a, large = await fingerprint_of(bus, "A"), "x" * 900_000
    patched = await bus.troubleshooting.retry_group(DOMAIN, a, patch=[{"op": "add", "path": "/a", "value": large}])
    completed = await bus.troubleshooting.complete_group(DOMAIN, a, result=large)
    for action, sizes in ((patched, [2] * 5), (completed, [4, 4, 2])):
        assert action.batch_id is not None
        parts = [len(c.data["command_ids"]) for c in await bus.list_batch_commands(DOMAIN, action.batch_id)]
        assert sorted(parts, reverse=True) == sizes


async def test_a_page_of_large_data_is_read_in_parts(database: Database, bus: CommandBus, given: Given) -> None:
    fails(given)
    await failed(given, "A" * 5, text="x" * 1000)
    commands = [command for (command,) in database.rows("SELECT command FROM busload.troubleshooting ORDER BY command")]
    for most, read in ((1, 1), (2000, 2), (10**9, 6)):
        plan = perform_plan(execute(SQL.data_of, commands=[*commands, -1], bytes=most), bus)
        texts = [text for (text,) in await plan]
        assert len(texts) == read
        assert [None if text is None else json.loads(text)["n"] for text in texts] == [0, 1, 2, 3, 4, None][:read]


async def perform_plan(plan: Any, bus: CommandBus) -> Any:
    async with bus.pool.connection() as conn:
        return await perform_async(conn, plan)


@pytest.mark.parametrize("data_bytes", [3000, 400, 60, 40, 4])
async def test_a_chunk_that_left_many_behind_completes_within_any_limit(
    dsn: str, bus: CommandBus, given: Given, data_bytes: int
) -> None:
    """Otherwise its result would be refused, and what it moved would be undone, each time it is tried"""
    fails(given)
    batch_id = await failed(given, "A" * 251)
    a = await fingerprint_of(bus, "A")
    action = await bus.troubleshooting.cancel_group(DOMAIN, a, reason="no")
    assert action.batch_id is not None
    for item in await bus.troubleshooting.list(DOMAIN, limit=250):
        await bus.troubleshooting.cancel(DOMAIN, item.command_id, reason="by hand")
    limits = InputLimits(payload=PayloadLimits(data_bytes=data_bytes))
    async with CommandBus(dsn, settings=Settings(limits=limits)) as small:
        small.handler(DOMAIN, "Debit")(nothing)
        await Worker(small).drain()

    [result] = await results_of(bus, action.batch_id)
    assert (await given.batch_now(action.batch_id)).status == "COMPLETED"
    assert (await given.batch_now(batch_id)).canceled_count == 251
    if data_bytes >= 60:
        assert (result["moved"], len(result["left"]) + result["others"]) == (1, 250)
    assert result is None or len(json.dumps(result, separators=(",", ":"))) <= data_bytes


async def nothing(command: Command, ctx: HandlerContext) -> None:
    """Runs, and that is all."""


async def test_a_chunk_tells_of_a_hundred_that_it_left_behind(bus: CommandBus, given: Given) -> None:
    fails(given)
    await failed(given, "A" * 120)
    action = await bus.troubleshooting.cancel_group(DOMAIN, await fingerprint_of(bus, "A"), reason="no")
    for item in await bus.troubleshooting.list(DOMAIN, limit=120):
        await bus.troubleshooting.cancel(DOMAIN, item.command_id, reason="by hand")
    await given.drained()
    [result] = await results_of(bus, action.batch_id)
    assert (result["moved"], len(result["left"]), result["others"]) == (0, 100, 20)
    assert set(result["left"].values()) == {"it is CANCELED"}


async def test_a_rate_spreads_an_action_over_time(bus: CommandBus, given: Given) -> None:
    """The chunks of a second are due a second apart"""
    fails(given)
    await failed(given, "A" * 10)
    a = await fingerprint_of(bus, "A")
    quick = await bus.troubleshooting.retry_group(DOMAIN, a, rate=4)
    slow = await bus.troubleshooting.retry_group(DOMAIN, a, rate=0.001)
    assert quick.batch_id is not None and slow.batch_id is not None
    for batch_id, sizes, apart in ((quick.batch_id, [4, 4, 2], 1), (slow.batch_id, [1] * 10, 1000)):
        first, *later = sorted(
            await bus.list_batch_commands(DOMAIN, batch_id), key=lambda c: (c.run_at is not None, c.run_at)
        )
        assert [len(command.data["command_ids"]) for command in (first, *later)] == sizes
        assert first.run_at is None
        times = [command.run_at for command in later if command.run_at is not None]
        assert {late - early for early, late in pairwise(times)} == {timedelta(seconds=apart)}
    assert (await custom_data_of(given, quick.batch_id))["rate"] == 4

    await bus.cancel_batch(DOMAIN, quick.batch_id, reason="too quick")
    await given.drained()
    assert (await given.batch_now(slow.batch_id)).completed_count == 1
    given.make_due()
    await given.drained()
    assert (await given.batch_now(slow.batch_id)).status == "COMPLETED"


@every_action
async def test_an_action_that_is_repeated_changes_nothing(bus: CommandBus, given: Given, action: Action) -> None:
    """While the first is under way, and when nothing is left"""
    repaired = fails(given)
    batch_id = await failed(given, "AAA")
    repaired.add("A")
    a = await fingerprint_of(bus, "A")
    first, second = await action(bus, a), await action(bus, a)
    await given.drained()
    done = counts(await given.batch_now(batch_id))

    assert first.batch_id is not None and second.batch_id is not None
    assert (first.count, second.count) == (3, 3)
    moved = [result["moved"] for each in (first, second) for result in await results_of(bus, each.batch_id)]
    assert sorted(moved) == [0, 3]
    [left] = [
        result["left"] for each in (first, second) for result in await results_of(bus, each.batch_id) if result["left"]
    ]
    assert len(left) == 3

    before = given.database.everything()
    third = await action(bus, a)
    assert third == GroupAction(None, first.action, a, 0)
    assert given.database.everything() == before
    assert counts(await given.batch_now(batch_id)) == done


async def test_what_fails_again_is_not_moved_by_a_decision_from_before(bus: CommandBus, given: Given) -> None:
    """Otherwise two retries of one group, given at once, would try each command twice"""
    fails(given)
    await failed(given, "AAA")
    a = await fingerprint_of(bus, "A")
    first = await bus.troubleshooting.retry_group(DOMAIN, a)
    [late] = [c.command_id for c in await bus.list_batch_commands(DOMAIN, first.batch_id)] if first.batch_id else []
    given.database.rows(
        "WITH held AS (DELETE FROM busload.queue WHERE priority = %s RETURNING *)"
        " INSERT INTO busload.scheduled (lo, hi, domain, batch_id, priority, run_at, reason)"
        " SELECT lo, hi, domain, batch_id, priority, now() + interval '1 hour', 'RUN_AT' FROM held",
        PRIORITY,
    )
    await bus.troubleshooting.retry_group(DOMAIN, a)
    await given.drained()
    given.make_due()
    await given.drained()

    result = (await given.command_now(late)).result
    assert (result["moved"], set(result["left"].values())) == (0, {"it failed again after the decision"})
    items = await bus.troubleshooting.list(DOMAIN)
    assert [len(await retries_of(bus, item.command_id)) for item in items] == [1, 1, 1]


async def test_a_chunk_says_what_it_did_not_move_and_why(bus: CommandBus, given: Given) -> None:
    repaired = fails(given)
    await failed(given, "AAAA")
    a = await fingerprint_of(bus, "A")
    items = [item.command_id for item in await bus.troubleshooting.list(DOMAIN)]
    action = await bus.troubleshooting.retry_group(DOMAIN, a)
    await bus.troubleshooting.complete(DOMAIN, items[0])
    await bus.troubleshooting.cancel(DOMAIN, items[1], reason="no")
    other = json.dumps({"type": "Other"})
    given.database.rows(
        "UPDATE busload.troubleshooting SET error = %s FROM busload.command WHERE id = command AND command_id = %s",
        other,
        items[2],
    )
    repaired.add("A")
    await given.drained()

    assert action.batch_id is not None
    [result] = await results_of(bus, action.batch_id)
    elsewhere = fingerprint(given.database, "", "Other")
    assert result == {
        "moved": 1,
        "left": {
            str(items[0]): "it is COMPLETED",
            str(items[1]): "it is CANCELED",
            str(items[2]): f"it waits for another cause now: {elsewhere}",
        },
    }


async def test_an_action_moves_its_items_with_its_completion_or_not_at_all(bus: CommandBus, given: Given) -> None:
    """A worker that lost its lease moves nothing"""
    fails(given)
    batch_id = await failed(given, "AA")
    action = await bus.troubleshooting.cancel_group(DOMAIN, await fingerprint_of(bus, "A"), reason="no")
    dead = given.registered_worker()
    [leased] = given.claimed(by=dead)
    given.died(dead)
    assert given.rescued().commands == 1
    assert leased.data is not None
    plan = move_part(
        DOMAIN,
        read_part(json.loads(leased.data)),
        decision_batch=action.batch_id,
        lease_id=leased.lease.lease_id,
        limits=PayloadLimits(),
        types={},
    )
    with pytest.raises(SupersededError):
        given.database.perform(plan)
    assert (await given.batch_now(batch_id)).in_troubleshooting_count == 2

    await given.drained()
    assert (await given.batch_now(batch_id)).canceled_count == 2


async def test_what_is_moved_is_undone_if_the_chunk_cannot_complete(bus: CommandBus, given: Given) -> None:
    """The database refuses its completion, so it is tried again; nothing has moved until it completes"""
    fails(given)
    batch_id = await failed(given, "AA")
    action = await bus.troubleshooting.cancel_group(DOMAIN, await fingerprint_of(bus, "A"), reason="no")
    assert action.batch_id is not None
    given.database.rows("ALTER TABLE busload.execution ADD CONSTRAINT refused CHECK (outcome <> 'COMPLETED') NOT VALID")
    await given.drained()
    assert counts(await given.batch_now(batch_id)) == (2, 0, 0, 0, 2)
    [chunk] = await bus.list_batch_commands(DOMAIN, action.batch_id)
    assert (chunk.attempts, chunk.last_error_type) == (1, "CheckViolation")

    given.database.rows("ALTER TABLE busload.execution DROP CONSTRAINT refused")
    given.make_due()
    await given.drained()
    assert (await given.batch_now(batch_id)).canceled_count == 2


async def test_two_workers_carry_out_two_actions_at_once(bus: CommandBus, given: Given) -> None:
    """Locks are taken in one order, so nobody waits in a circle; each item is moved once"""
    fails(given)
    batches = [await failed(given, "AB" * 300) for _ in range(3)]
    a, b = await fingerprint_of(bus, "A"), await fingerprint_of(bus, "B")
    actions = [
        await bus.troubleshooting.cancel_group(DOMAIN, each, reason="no", rate=50) for each in (a, b, a, b, a, b)
    ]
    given.make_due()
    await asyncio.gather(given.drained(concurrency=8), given.drained(concurrency=8))

    moved = 0
    for action in actions:
        assert action.batch_id is not None
        done = await given.batch_now(action.batch_id)
        assert (done.status, done.completed_count) == ("COMPLETED", 18)
        moved += sum(result["moved"] for result in await results_of(bus, action.batch_id))
    assert moved == 1800
    assert [(await given.batch_now(batch_id)).canceled_count for batch_id in batches] == [600, 600, 600]
    assert given.database.count("execution WHERE outcome = 'FAILED_ATTEMPT'") == 0


# -- patches ----------------------------------------------------------------------------------------------------------


async def test_a_patched_retry_changes_the_data_and_keeps_every_change(bus: CommandBus, given: Given) -> None:
    seen = []

    async def run(command: Command, ctx: HandlerContext) -> None:
        if "currency" not in command.data:
            raise PermanentCommandError("no currency", code="CURRENCY")
        seen.append(command.data)

    given.handler("Pay", run)
    data = {"cents": 10**25, "rate": -0.0, "much": 1e300, "text": "ä / \u2028", "list": [1, [2, {}]], "none": None}
    command_id = await given.sent("Pay", data)
    await given.drained()
    [group] = await bus.troubleshooting.groups(DOMAIN)

    patch: list[dict[str, Any]] = [
        {"op": "test", "path": "/cents", "value": 10**25},
        {"op": "add", "path": "/currency", "value": {"code": "EUR", "rate": -0.0, "units": 10**30}},
        {"op": "move", "from": "/list/1/0", "path": "/list/-"},
        {"op": "remove", "path": "/none"},
    ]
    stored = given.database.value("SELECT data::text FROM busload.command WHERE command_id = %s", command_id)
    action = await bus.troubleshooting.retry_group(DOMAIN, group.fingerprint, patch=patch, operator="ada")
    await given.drained()

    expected = jsonpatch.apply_patch(data, patch)
    assert [repr(one) for one in seen] == [repr(expected)]
    assert repr((await given.command_now(command_id)).data) == repr(expected)
    [event] = await retries_of(bus, command_id)
    assert event.operator == "ada"
    assert repr(event.details) == repr(
        {"batch_id": str(action.batch_id), "patch": patch, "before": data, "after": expected}
    )
    kept = "SELECT (details -> 'before')::text FROM busload.event WHERE type = 'OPERATOR_RETRIED'"
    assert given.database.value(kept) == stored
    assert action.batch_id is not None
    assert (await custom_data_of(given, action.batch_id))["patch"] == patch


async def test_a_dry_run_shows_what_would_be_done_and_writes_nothing(bus: CommandBus, given: Given) -> None:
    fails(given)
    await failed(given, "AAAAA")
    a = await fingerprint_of(bus, "A")
    before = given.database.everything()

    plain = await bus.troubleshooting.cancel_group(DOMAIN, a, reason="no", dry_run=True)
    patched = await bus.troubleshooting.retry_group(DOMAIN, a, patch=EUROS, dry_run=True)

    assert (plain.batch_id, plain.count, plain.action) == (None, 5, "cancel")
    assert [(item.before, item.after) for item in plain.sample] == [({"n": n, "error": "A"}, None) for n in range(3)]
    assert (patched.batch_id, patched.count) == (None, 5)
    first = patched.sample[0]
    assert first == GroupItem(first.command_id, {"n": 0, "error": "A"}, {"n": 0, "error": "A", "currency": "EUR"})
    assert given.database.everything() == before


async def test_a_patch_that_does_not_apply_to_every_item_is_refused(bus: CommandBus, given: Given) -> None:
    """Which item, and why; nothing written"""
    fails(given)
    await failed(given, "A" * 600)
    odd = await given.sent("Debit", {"error": "A", "n": "odd", "currency": "USD"})
    await given.drained()
    a = await fingerprint_of(bus, "A")
    before = given.database.everything()
    patch: list[dict[str, Any]] = [{"op": "test", "path": "/currency", "value": "USD"}]
    for dry_run in (False, True):
        with pytest.raises(InvalidCommandError) as refused:
            await bus.troubleshooting.retry_group(DOMAIN, a, patch=patch, dry_run=dry_run)
        assert (refused.value.code, refused.value.total, len(refused.value.problems)) == ("INVALID_PATCH", 600, 100)
        assert refused.value.problems[0].path == "/patch"
    patch = [{"op": "add", "path": "/m", "value": 1}, {"op": "add", "path": "/n/0", "value": 1}]
    given.database.rows("UPDATE busload.command SET data = '{\"n\": []}' WHERE command_id <> %s", odd)
    with pytest.raises(InvalidCommandError, match=f"does not apply to command {odd}: ") as refused:
        await bus.troubleshooting.retry_group(DOMAIN, a, patch=patch)
    assert refused.value.total == 1
    with pytest.raises(InvalidCommandError, match=r"nothing is at 'data'\. Paths begin in the data: '/m'"):
        await bus.troubleshooting.retry_group(DOMAIN, a, patch=[{"op": "remove", "path": "/data/m"}])
    assert given.database.everything() == before


async def test_what_a_patch_makes_must_be_what_could_be_sent(dsn: str, given: Given, database: Database) -> None:
    fails(given)
    await failed(given, "A", text="y" * 600)
    await failed(given, "B")
    small = Settings(limits=InputLimits(payload=PayloadLimits(data_bytes=1000, depth=3)))
    async with CommandBus(dsn, settings=small) as bus:
        a, b = await fingerprint_of(bus, "A"), await fingerprint_of(bus, "B")
        before = database.everything()
        twice = {"op": "copy", "from": "", "path": "/x"}  # each is small and flat; what they make is not
        for cause, patch, code in ((a, [twice], "TOO_LARGE"), (b, [twice] * 3, "TOO_DEEP")):
            with pytest.raises(InvalidCommandError, match=f"does not apply to command .*: {code} at /data"):
                await bus.troubleshooting.retry_group(DOMAIN, cause, patch=patch)
        assert (await bus.troubleshooting.retry_group(DOMAIN, b, patch=[twice], dry_run=True)).count == 1
        assert database.everything() == before


class Price(msgspec.Struct):
    n: int
    cents: int


async def test_a_patch_makes_what_fits_the_handler_or_is_refused(
    dsn: str, bus: CommandBus, given: Given, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """As a send is, by every bus that knows the handler; a worker that knows it moves nothing that does not fit."""
    fails(given)
    await failed(given, "AA")
    a = await fingerprint_of(bus, "A")
    free = [{"op": "add", "path": "/cents", "value": "free"}]
    before = database.everything()
    async with CommandBus(dsn) as knows:

        @knows.handler(DOMAIN, "Debit")
        async def debit(data: Price, ctx: HandlerContext) -> None: ...

        for dry_run in (True, False):
            with pytest.raises(
                InvalidCommandError, match=r"the patched data of command .* does not fit Price"
            ) as refused:
                await knows.troubleshooting.retry_group(DOMAIN, a, patch=free, dry_run=dry_run)
            assert refused.value.total == 2
            assert {(one.code, one.path) for one in refused.value.problems} == {("INVALID_DATA", "/data/cents")}
        assert database.everything() == before

        action = await bus.troubleshooting.retry_group(DOMAIN, a, patch=free)
        await Worker(knows).drain()
        [result] = await results_of(bus, action.batch_id)
        assert result["moved"] == 0
        assert all("INVALID_DATA at /data/cents: does not fit Price" in why for why in result["left"].values())
        [warning] = [one.message for one in caplog.records if "patch" in one.message]
        assert warning.startswith("A retry with a patch left 2 of 2 commands in domain payments where they were. ")
        assert "does not fit Price: Expected `int`, got `str`" in warning
        assert "free" not in warning

        caplog.clear()
        await knows.troubleshooting.retry_group(DOMAIN, a, patch=[{"op": "add", "path": "/cents", "value": 4}])
        await Worker(knows).drain()
    assert "patch" not in caplog.text
    assert await bus.troubleshooting.count(DOMAIN) == 0


async def test_a_patch_that_no_longer_applies_leaves_the_item_where_it_is(bus: CommandBus, given: Given) -> None:
    """Two patched retries at once: the second finds what the first has made"""
    fails(given)
    await failed(given, "AA")
    a = await fingerprint_of(bus, "A")
    action = await bus.troubleshooting.retry_group(DOMAIN, a, patch=[{"op": "remove", "path": "/n"}])
    given.database.rows("UPDATE busload.command SET data = '{\"error\": \"A\"}' WHERE data ->> 'n' = '1'")
    await given.drained()
    assert action.batch_id is not None
    [result] = await results_of(bus, action.batch_id)
    assert result["moved"] == 1
    [(left, why)] = result["left"].items()
    assert why.startswith("the patch does not apply: ")
    assert await retries_of(bus, UUID(left)) == []


async def test_a_command_without_data_can_be_given_some(bus: CommandBus, given: Given) -> None:
    """What other hands wrote may hold no JSON at all"""
    fails(given)
    await failed(given, "A")
    given.database.rows("UPDATE busload.command SET data = NULL")
    a = await fingerprint_of(bus, "A")
    patch = [{"op": "replace", "path": "", "value": {"n": 1}}]
    [item] = (await bus.troubleshooting.retry_group(DOMAIN, a, patch=patch, dry_run=True)).sample
    assert (item.before, item.after) == (None, {"n": 1})
    await bus.troubleshooting.retry_group(DOMAIN, a, patch=patch)
    await given.drained()
    now = await given.command_now(item.command_id)
    assert (now.status, now.data) == ("COMPLETED", {"n": 1})
    [event] = await retries_of(bus, item.command_id)
    assert (event.details["before"], event.details["after"]) == (None, {"n": 1})


# -- bad input --------------------------------------------------------------------------------------------------------


@every_action
async def test_a_cause_that_nobody_knows_is_refused(bus: CommandBus, given: Given, action: Action) -> None:
    """Nor is one of another domain known"""
    fails(given)
    await failed(given, "A")
    a = await fingerprint_of(bus, "A")
    before = given.database.everything()
    with pytest.raises(InvalidOperationError, match=f"{UNKNOWN}.*busload troubleshooting groups"):
        await action(bus, UNKNOWN)
    with pytest.raises(InvalidOperationError, match="'crm'"):
        await bus.troubleshooting.retry_group("crm", a)
    assert given.database.everything() == before


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a domain": ({"domain": "no domain"}, "/domain"),
    "a type": ({"command_type": "no type"}, "/command_type"),
    "a short fingerprint": ({"fingerprint": "abc"}, "/fingerprint"),
    "capitals that are no hex digits": ({"fingerprint": "ABCDEF01234G"}, "/fingerprint"),
    "no fingerprint": ({"fingerprint": None}, "/fingerprint"),
    "no rate": ({"rate": 0}, "/rate"),
    "a negative rate": ({"rate": -1.0}, "/rate"),
    "an endless rate": ({"rate": float("inf")}, "/rate"),
    "NaN": ({"rate": float("nan")}, "/rate"),
    "a rate that is true": ({"rate": True}, "/rate"),
    "a rate in words": ({"rate": "10"}, "/rate"),
    "NUL in the operator": ({"operator": "a\0da"}, "/operator"),
    "no operator": ({"operator": ""}, "/operator"),
    "a dry run in words": ({"dry_run": "no"}, "/dry_run"),
    "a dry run that is neither": ({"dry_run": None}, "/dry_run"),
}


@every_action
async def test_bad_input_is_refused(bus: CommandBus, given: Given, action: Action) -> None:
    """What was found, and where; nothing written"""
    name = {ACTIONS["retry"]: "retry_group", ACTIONS["complete"]: "complete_group"}.get(action, "cancel_group")
    call = getattr(bus.troubleshooting, name)
    how = {"domain": DOMAIN, "fingerprint": UNKNOWN} | ({"reason": "no"} if name == "cancel_group" else {})
    before = given.database.everything()
    for what, (wrong, path) in BAD.items():
        with pytest.raises(InvalidCommandError) as refused:
            await call(**how | wrong)
        assert [problem.path for problem in refused.value.problems] == [path], what
    assert given.database.everything() == before


async def test_a_group_is_not_canceled_without_a_reason(bus: CommandBus) -> None:
    reasons: list[Any] = ["", None, 7, "x\0", "x" * 5000]
    for reason in reasons:
        with pytest.raises(InvalidCommandError) as refused:
            await bus.troubleshooting.cancel_group(DOMAIN, UNKNOWN, reason=reason)
        assert [problem.path for problem in refused.value.problems] == ["/reason"]


PATCHES: list[Any] = [
    [],
    {},
    "remove",
    7,
    [1],
    [{}],
    [{"op": "remove"}],
    [{"op": "explode", "path": "/a"}],
    [{"op": "add", "path": "/a"}],
    [{"op": "replace", "path": "/a"}],
    [{"op": "test", "path": "/a"}],
    [{"op": "move", "path": "/a"}],
    [{"op": "copy", "path": "/a"}],
    [{"op": "add", "path": "a", "value": 1}],
    [{"op": "add", "path": "/a~2", "value": 1}],
    [{"op": "add", "path": 7, "value": 1}],
    [{"op": ["add"], "path": "/a", "value": 1}],
    [{"op": "add", "path": "/a", "value": {1}}],
    [{"op": "add", "path": "/a", "value": "\0"}],
    [{"op": "add", "path": "/a", "value": float("nan")}],
    [{"op": "copy", "from": "a", "path": "/a"}],
    [{"op": "move", "from": 7, "path": "/a"}],
    [{"op": "remove", "path": "/a" * 65}],
    [{"op": "copy", "from": "/a" * 65, "path": "/b"}],
    [{"op": "test", "path": "", "value": {}}] * 1001,
]


async def test_what_is_no_patch_is_refused(bus: CommandBus) -> None:
    """Before anything is looked at, so also where nothing waits"""
    for patch in PATCHES:
        with pytest.raises(InvalidCommandError) as refused:
            await bus.troubleshooting.retry_group(DOMAIN, UNKNOWN, patch=patch)
        [problem] = refused.value.problems
        assert problem.path.startswith("/patch"), patch


async def test_a_result_that_cannot_be_stored_is_refused(bus: CommandBus, given: Given) -> None:
    with pytest.raises(InvalidCommandError, match="/result"):
        await bus.troubleshooting.complete_group(DOMAIN, UNKNOWN, result={1, 2})


async def test_nobody_registers_a_handler_for_busloads_own_commands(bus: CommandBus) -> None:
    with pytest.raises(InvalidCommandError, match=DECISION):
        bus.handler("crm", DECISION)(print)
    assert bus.handlers.domains == []


async def test_a_command_of_busloads_own_type_that_somebody_else_sent_waits_for_a_person(
    bus: CommandBus, given: Given
) -> None:
    for data in (None, 7, {}, {"decision": {"action": "burn", "fingerprint": UNKNOWN}}):
        command_id = await given.sent(DECISION, data)
        await given.drained()
        now = await given.command_now(command_id)
        assert (now.status, now.last_error_type) == ("IN_TROUBLESHOOTING_QUEUE", "PermanentCommandError")


# -- in a transaction, without an event loop, and many ----------------------------------------------------------------


@every_action
async def test_a_group_may_be_decided_on_in_a_transaction(
    bus: CommandBus, given: Given, action: Action, dsn: str
) -> None:
    fails(given)
    await failed(given, "AA")
    a, before = await fingerprint_of(bus, "A"), given.database.everything()
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        assert (await action(bus, a, conn=conn)).count == 2
        await conn.rollback()
    assert given.database.everything() == before


async def test_the_sync_face_does_the_same(sync_bus: SyncCommandBus, bus: CommandBus, given: Given) -> None:
    repaired = fails(given)
    for codes in ("AA", "B", "C"):
        await failed(given, codes)
    prints = {group.error_code: group.fingerprint for group in sync_bus.troubleshooting.groups(DOMAIN)}
    repaired.add("A")
    sync = sync_bus.troubleshooting
    actions = [
        sync.retry_group(DOMAIN, prints["A"], patch=EUROS, operator="ada"),
        sync.complete_group(DOMAIN, prints["B"], result=1),
        sync.cancel_group(DOMAIN, prints["C"], reason="no"),
    ]
    await given.drained()
    assert [action.count for action in actions] == [2, 1, 1]
    assert sync.groups(DOMAIN) == []


CAUSES = {
    "NOT_FOUND": "There is no account {n}",
    "CLOSED": "Account 'A-{n}' is closed since 2026-01-{day:02}",
    "CURRENCY": "Order {uuid} has no currency",
    "LIMIT": "{n}.50 is over the limit of account {n}",
    "MAIL": "Nobody reads user{n}@example.com",
    "FILE": "/srv/in/{n}/invoice-{n}.csv cannot be read",
    None: "The bank said: <Answer at 0x{n:012x}>",
}


async def many_failures(given: Given, commands: int) -> UUID:
    """Commands that fail for seven causes, each with a message of its own."""
    codes = list(CAUSES)

    async def run(command: Command, ctx: HandlerContext) -> None:
        n = command.data["n"]
        code = codes[n % 7]
        if code == "CURRENCY" and "currency" in command.data:
            return
        message = CAUSES[code].format(n=n, day=n % 28 + 1, uuid=uuid4())
        raise PermanentCommandError(message, code=code)

    given.handler("Pay", run)
    batch_id = await given.bus.create_batch(
        DOMAIN, [BatchCommand("Pay", data={"n": n, "cents": n * 10**20, "tax": n / 7}) for n in range(commands)]
    )
    await given.drained(concurrency=100)
    return batch_id


@pytest.mark.parametrize(
    "commands", [14_000, pytest.param(100_000, marks=[pytest.mark.chaos, pytest.mark.timeout(600)])]
)
async def test_many_failures_of_seven_causes_are_seven_groups_and_the_audit_reproduces_every_change(
    bus: CommandBus, given: Given, database: Database, commands: int
) -> None:
    batch_id = await many_failures(given, commands)

    groups = await bus.troubleshooting.groups(DOMAIN)
    assert {group.error_code for group in groups} == CAUSES.keys()
    assert sum(group.count for group in groups) == commands
    assert Counter(group.count for group in groups) == Counter(len(range(n, commands, 7)) for n in range(7))

    original = dict(database.rows("SELECT command_id, data::text FROM busload.command"))
    [currency] = [group for group in groups if group.error_code == "CURRENCY"]
    patch = [*EUROS, {"op": "remove", "path": "/tax"}]
    action = await bus.troubleshooting.retry_group(DOMAIN, currency.fingerprint, patch=patch, operator="ada")
    await given.drained(concurrency=100)

    assert action.batch_id is not None and action.count == currency.count
    done = await bus.wait_batch(DOMAIN, action.batch_id, timeout=25)
    assert (done.status, done.completed_count) == ("COMPLETED", -(-currency.count // PART))
    assert counts(await given.batch_now(batch_id)) == (commands, currency.count, 0, 0, commands - currency.count)

    now = dict(database.rows("SELECT command_id, data FROM busload.command WHERE command_type = 'Pay'"))
    changes = database.rows(
        "SELECT c.command_id, e.operator, e.details FROM busload.event AS e JOIN busload.command AS c ON c.id = e.lo"
        " WHERE e.type = 'OPERATOR_RETRIED' ORDER BY e.event"
    )
    assert len(changes) == currency.count
    replayed = {command_id: json.loads(original[command_id]) for command_id in now}
    for command_id, operator, details in changes:
        assert operator == "ada"
        assert details["before"] == replayed[command_id]
        replayed[command_id] = jsonpatch.apply_patch(replayed[command_id], details["patch"])
        assert details["after"] == replayed[command_id]
    assert replayed == now

    before = database.everything()
    again = await bus.troubleshooting.retry_group(DOMAIN, currency.fingerprint, patch=patch, operator="ada")
    assert (again.batch_id, again.count) == (None, 0)
    assert database.everything() == before
