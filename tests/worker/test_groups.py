"""Groups run: verdicts, retries, what waits for a person, poison, crashes, and tables that change under a worker."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid5

import pytest

from busload import (
    BusinessRuleError,
    CommandBus,
    Group,
    HandlerContext,
    Item,
    PermanentCommandError,
    RateLimit,
    RateLimitedError,
    RetryPolicy,
    SyncHandlerContext,
    TransientCommandError,
)
from busload.buffers import Buffer, BufferTable
from busload.buffers.declaration import EXHAUSTED, GROUP
from busload.commands import claim
from busload.commands.retry import Verdict
from busload.errors import InvalidOperationError
from tests.given import Database, Given, eventually

EVENTS = "contact_events"
AT_ONCE = RetryPolicy(max_attempts=3, backoff=(0,))
ONCE = RetryPolicy(max_attempts=1)

TABLE = """
    CREATE TABLE contact (id bigint PRIMARY KEY);
    CREATE TYPE mood AS ENUM ('good', 'bad');
    CREATE TABLE contact_event (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        contact_id bigint REFERENCES contact,
        amount numeric,
        mood mood,
        group_id uuid,
        created_at timestamptz NOT NULL DEFAULT now());
    CREATE INDEX ON contact_event (created_at, id) WHERE group_id IS NULL;
    CREATE INDEX ON contact_event (group_id) WHERE group_id IS NOT NULL;
    INSERT INTO contact SELECT generate_series(1, 1000);
"""


class Ran:
    """What a handler was called with: a list of payloads per call, and the group ids."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []
        self.group_ids: list[UUID] = []
        self.attempts: list[int] = []

    def note(self, group: Group, ctx: Any) -> None:
        self.calls.append([item.data for item in group])
        self.group_ids.append(group.group_id)
        self.attempts.append(ctx.attempt)


def running(events: Buffer, judge: Callable[[Group, HandlerContext], Any] | None = None, **options: Any) -> Ran:
    """Register a handler that notes its calls, and then does what `judge` does."""
    ran = Ran()

    @events.handler(**{"retry": AT_ONCE, **options})
    async def handle(group: Group, ctx: HandlerContext) -> Any:
        ran.note(group, ctx)
        said = judge(group, ctx) if judge else None
        return await said if inspect.isawaitable(said) else said

    return ran


async def waiting(events: Buffer, payloads: list[Any]) -> None:
    await events.add_many(payloads)
    await events.flush()


async def drain(given: Given, *domains: str) -> int:
    """A lease is short here: a worker that was declared dead is its old self again after a third of it."""
    settings = replace(given.settings, lease_for=timedelta(seconds=3))
    return await given.drained(domains=list(domains or (EVENTS,)), settings=settings)


def left(database: Database) -> list[Any]:
    return [data for (data,) in database.rows("SELECT data FROM busload.buffered ORDER BY id")]


async def parked(bus: CommandBus) -> list[Any]:
    return await bus.troubleshooting.list(EVENTS)


# -- verdicts -----------------------------------------------------------------------------------------------------


async def test_a_call_that_returns_has_done_all_and_they_are_deleted(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """What it returns is of no interest."""
    events = bus.buffer(EVENTS, size=10)
    ran = running(events, lambda group, ctx: {"ignored": True})
    await waiting(events, list(range(10)))
    assert await drain(given) == 1
    assert ran.calls == [list(range(10))] and left(database) == []
    command = await bus.get_command(EVENTS, ran.group_ids[0])
    assert command is not None
    assert command.command_type == GROUP and command.status == "COMPLETED"
    assert command.result == {"items": 10, "done": 10, "calls": 1, "vanished": 0}
    status = await events.status()
    assert (status.calls, status.done, status.vanished, status.grouped) == (1, 10, 0, 0)
    database.check_invariants()


async def test_a_call_that_raises_has_done_nothing_and_all_are_tried_again_with_the_same_ids(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """The engine retries, and no other group can take them meanwhile."""
    events = bus.buffer(EVENTS, size=3)
    seen: list[list[Any]] = []

    def judge(group: Group, ctx: HandlerContext) -> None:
        seen.append([(item.id, item.data, item.created_at) for item in group])
        if ctx.attempt < 3:
            raise TransientCommandError("busy")

    ran = running(events, judge)
    await waiting(events, ["a", "b", "c"])
    assert await drain(given) == 3
    assert seen[0] == seen[1] == seen[2] and len(set(ran.group_ids)) == 1 and ran.attempts == [1, 2, 3]
    assert left(database) == []
    database.check_invariants()


async def test_what_failed_is_tried_again_alone_and_what_succeeded_is_gone(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """Partial outcomes, per item."""
    events = bus.buffer(EVENTS, size=4)

    def judge(group: Group, ctx: HandlerContext) -> None:
        for item in group:
            if item.data in ("b", "d") and ctx.attempt < 3:
                group.fail(item, "not yet")
            else:
                group.succeed(item)

    ran = running(events, judge)
    await waiting(events, ["a", "b", "c", "d"])
    await drain(given)
    assert ran.calls == [["a", "b", "c", "d"], ["b", "d"], ["b", "d"]] and left(database) == []
    assert len(set(ran.group_ids)) == 1
    command = await bus.get_command(EVENTS, ran.group_ids[0])
    assert command is not None and command.result == {"items": 2, "done": 2, "calls": 1, "vanished": 0}
    database.check_invariants()


async def test_an_item_without_a_verdict_fails_if_others_have_one(
    bus: CommandBus, given: Given, database: Database
) -> None:
    events = bus.buffer(EVENTS, size=3)
    running(events, lambda group, ctx: group.succeed(group[0]), retry=ONCE)
    await waiting(events, ["a", "b", "c"])
    await drain(given)
    [item] = await parked(bus)
    assert left(database) == ["b", "c"]
    assert (item.reason, item.last_error_code) == ("EXHAUSTED", "NO_VERDICT")
    assert [one["code"] for one in item.details["items"]] == ["NO_VERDICT", "NO_VERDICT"]


async def test_what_was_judged_before_a_call_raised_stays_judged(
    bus: CommandBus, given: Given, database: Database
) -> None:
    events = bus.buffer(EVENTS, size=3)

    def judge(group: Group, ctx: HandlerContext) -> None:
        group.succeed(group[0])
        raise TransientCommandError("the connection broke")

    running(events, judge, retry=ONCE)
    await waiting(events, ["a", "b", "c"])
    await drain(given)
    assert left(database) == ["b", "c"]
    [item] = await parked(bus)
    assert item.last_error_message == "2 of 3 items failed: the connection broke"


async def test_exhausted_items_wait_for_a_person_with_their_errors_and_nothing_is_deleted(
    bus: CommandBus, given: Given, database: Database
) -> None:
    events = bus.buffer(EVENTS, size=4)

    def judge(group: Group, ctx: HandlerContext) -> None:
        for item in group:
            if item.data == "ok":
                group.succeed(item)
            else:
                group.fail(item, TransientCommandError(f"no {item.data}", code=f"NO_{item.data.upper()}"))

    ran = running(events, judge)
    await events.add_many(["ok", "x", "ok", "y"])
    await drain(given)
    assert ran.calls == [["ok", "x", "ok", "y"], ["x", "y"], ["x", "y"]]
    [item] = await parked(bus)
    assert (item.reason, item.command_id, item.data["items"]) == ("EXHAUSTED", ran.group_ids[0], 2)
    assert item.last_error_message == "2 of 2 items failed: no x"
    assert [(one["code"], one["message"], one["type"]) for one in item.details["items"]] == [
        ("NO_X", "no x", "TransientCommandError"),
        ("NO_Y", "no y", "TransientCommandError"),
    ]
    ids = [one["id"] for one in item.details["items"]]
    assert database.rows("SELECT id FROM busload.buffered ORDER BY id") == [(id,) for id in ids]
    database.check_invariants()


@pytest.mark.parametrize("error", [PermanentCommandError("closed", code="CLOSED"), BusinessRuleError("not ours")])
async def test_items_that_failed_for_good_are_parted_off_at_once_and_the_others_go_on(
    bus: CommandBus, given: Given, database: Database, error: Exception
) -> None:
    events = bus.buffer(EVENTS, size=4)

    def judge(group: Group, ctx: HandlerContext) -> None:
        for item in group:
            if item.data == "bad":
                group.fail(item, error)
            elif item.data == "slow" and ctx.attempt == 1:
                group.fail(item, "later")
            else:
                group.succeed(item)

    ran = running(events, judge)
    await events.add_many(["ok", "bad", "slow", "ok"])
    await drain(given)
    assert ran.calls == [["ok", "bad", "slow", "ok"], ["slow"]]
    [item] = await parked(bus)
    assert item.reason == "PERMANENT" and item.command_id != ran.group_ids[0]
    assert item.correlation_id == ran.group_ids[0] and item.data["items"] == 1
    assert database.rows("SELECT data, group_id FROM busload.buffered") == [("bad", item.command_id)]
    first = await bus.get_command(EVENTS, ran.group_ids[0])
    assert first is not None and first.status == "COMPLETED"
    assert [event.type for event in await bus.get_audit_trail(EVENTS, item.command_id)] == [
        "SENT",
        "MOVED_TO_TROUBLESHOOTING",
    ]
    database.check_invariants()


async def test_a_group_that_fails_for_good_as_a_whole_waits_for_a_person_as_it_is(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """Also by a business rule: a single command would end as FAILED, but here that would lose events."""
    events = bus.buffer(EVENTS, size=2)

    def judge(group: Group, ctx: HandlerContext) -> None:
        raise BusinessRuleError("no such account")

    ran = running(events, judge)
    await events.add_many(["a", "b"])
    await drain(given)
    [item] = await parked(bus)
    assert (item.command_id, item.reason) == (ran.group_ids[0], "PERMANENT")
    assert len(item.details["items"]) == 2 and left(database) == ["a", "b"]


async def test_a_verdict_for_an_unknown_item_or_twice_is_the_failure_of_the_call(
    bus: CommandBus, given: Given, database: Database
) -> None:
    events = bus.buffer(EVENTS, size=2)
    said: list[str] = []

    def judge(group: Group, ctx: HandlerContext) -> None:
        stranger = Item(999, "x", None, group[0].created_at)
        for wrong in (stranger, 999, None):
            with pytest.raises(InvalidOperationError, match="There is no item") as refused:
                group.succeed(wrong)  # type: ignore[arg-type]
            said.append(str(refused.value))
        group.succeed(group[0])
        with pytest.raises(InvalidOperationError, match="verdict already"):
            group.fail(group[0], "twice")
        group.fail(group[1], 5)  # type: ignore[arg-type]

    running(events, judge, retry=ONCE)
    await waiting(events, ["a", "b"])
    await drain(given)
    assert left(database) == ["b"] and len(said) == 3
    [item] = await parked(bus)
    assert item.last_error_type == "InvalidOperationError" and "an exception or a text" in item.last_error_message


@pytest.mark.parametrize("verdict", ["failed", "permanent"])
async def test_a_rule_that_gives_events_up_leaves_them_to_a_person(
    bus: CommandBus, given: Given, database: Database, verdict: Verdict
) -> None:
    """A command that ends as FAILED would leave its events behind, where nobody sees them. One event, and a group"""
    events = bus.buffer(EVENTS, size=3)

    def judge(group: Group, ctx: HandlerContext) -> None:
        if "all" in [item.data for item in group]:
            raise KeyError("all")
        for item in group:
            group.fail(item, KeyError("no such contact")) if item.data == "bad" else group.succeed(item)

    ran = running(events, judge, retry=RetryPolicy(3, (0,), rules={LookupError: verdict}))
    await events.add_many(["all", "b", "c", "ok", "bad", "fine"])
    await drain(given)
    assert len(ran.calls) == 2
    assert left(database) == ["all", "b", "c", "bad"]
    assert [item.reason for item in await parked(bus)] == ["PERMANENT", "PERMANENT"]
    database.check_invariants()


async def test_a_table_that_refuses_leaves_no_event_behind_whatever_the_rules_say(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """Whatever fails beside the handler is judged by the same rules"""
    events = bus.buffer(EVENTS, size=3)
    running(events, retry=RetryPolicy(3, (0,), rules={Exception: "failed"}))
    await events.add_many(["a", "b", "c"])
    database.rows(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''not now''; END';"
        " CREATE TRIGGER refuse BEFORE DELETE ON busload.buffered FOR EACH STATEMENT EXECUTE FUNCTION refuse()"
    )
    await drain(given)
    assert left(database) == ["a", "b", "c"]
    assert [item.status for item in (await bus.list_commands(EVENTS)).commands] == ["IN_TROUBLESHOOTING_QUEUE"]


@pytest.mark.parametrize(("attempts", "tried"), [(1, 1), (4, 4)])
async def test_a_policy_of_a_rule_says_when_the_attempts_of_a_group_are_used_up(
    bus: CommandBus, given: Given, database: Database, attempts: int, tried: int
) -> None:
    events = bus.buffer(EVENTS, size=3, on_exhausted="delete")

    def judge(group: Group, ctx: HandlerContext) -> None:
        raise KeyError("busy")

    ran = running(events, judge, retry=RetryPolicy(2, (0,), rules={KeyError: RetryPolicy(attempts, (0,))}))
    await events.add_many(["a", "b", "c"])
    await drain(given)
    assert len(ran.calls) == tried
    assert left(database) == [] and await parked(bus) == []


# -- exhaustion ---------------------------------------------------------------------------------------------------


async def test_with_on_exhausted_delete_the_rest_is_deleted_and_logged(
    bus: CommandBus, given: Given, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """Compensation, deletion of what is left, group id and error in the log."""
    events = bus.buffer(EVENTS, size=3, on_exhausted="delete", archive=True)

    def judge(group: Group, ctx: HandlerContext) -> None:
        for item in group:
            group.succeed(item) if item.data == "ok" else group.fail(item, "the service said 500")

    ran = running(events, judge)
    hooked: list[tuple[UUID, list[Any]]] = []

    @events.exhausted()
    async def compensate(group: Group, ctx: HandlerContext) -> None:
        hooked.append((group.group_id, [(item.id, item.data) for item in group]))

    await events.add_many(["ok", "x", "y"])
    await drain(given)
    assert left(database) == [] and await parked(bus) == []
    command = await bus.get_command(EVENTS, ran.group_ids[0])
    assert command is not None and command.status == "FAILED" and "500" in (command.last_error_message or "")
    assert str(ran.group_ids[0]) in caplog.text and "the service said 500" in caplog.text
    assert [data for _, data in hooked[0][1]] == ["x", "y"] and hooked[0][0] == ran.group_ids[0]
    assert database.rows("SELECT data #>> '{}', outcome FROM busload.buffer_archive ORDER BY id") == [
        ("ok", "DONE"),
        ("x", "EXHAUSTED"),
        ("y", "EXHAUSTED"),
    ]
    database.check_invariants()


@pytest.mark.parametrize("kind", ["async", "def"])
async def test_the_hook_for_exhausted_groups_is_a_command_with_its_own_retries(
    bus: CommandBus, given: Given, database: Database, kind: str
) -> None:
    """It may fail for ever; the items are in troubleshooting, and none is deleted."""
    events = bus.buffer(EVENTS, size=2, partition_by="tenant")

    def fail(group: Group, ctx: Any) -> None:
        raise TransientCommandError("busy")

    running(events, fail)
    hooked: list[Any] = []

    def compensate(group: Group, ctx: SyncHandlerContext) -> None:
        hooked.append(([item.data["n"] for item in group], group.partition, type(group[0].created_at)))
        raise OSError("the hook is broken")

    async def compensate_async(group: Group, ctx: HandlerContext) -> None:
        compensate(group, None)  # type: ignore[arg-type]

    retry = RetryPolicy(max_attempts=2, backoff=(0,))
    events.exhausted(retry=retry)(compensate if kind == "def" else compensate_async)
    await waiting(events, [{"tenant": "t1", "n": n} for n in range(2)])
    await drain(given)
    assert hooked == [([0, 1], "t1", datetime)] * 2
    items = {item.command_type: item for item in await parked(bus)}
    assert items[GROUP].reason == items[EXHAUSTED].reason == "EXHAUSTED"
    assert items[EXHAUSTED].command_id == uuid5(items[GROUP].command_id, "3")
    assert items[EXHAUSTED].last_error_message == "the hook is broken"
    assert len(left(database)) == 2
    await bus.troubleshooting.retry(EVENTS, items[GROUP].command_id, operator="ann")
    await drain(given)
    assert len(await parked(bus)) == 3, "each time attempts are used up, somebody is told"
    assert len(left(database)) == 2
    database.check_invariants()


# -- operators ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["own", "table"])
@pytest.mark.parametrize("action", ["complete", "cancel", "group complete", "group cancel"])
async def test_what_an_operator_decides_about_a_group_holds_for_its_events(
    bus: CommandBus, given: Given, database: Database, form: str, action: str
) -> None:
    """In the same transaction, one by one or by cause; history has them too."""
    if form == "table":
        database.rows(TABLE)
    table = BufferTable("contact_event", key="contact_id") if form == "table" else None
    events = bus.buffer(EVENTS, size=2, archive=True, table=table)

    def judge(group: Group, ctx: HandlerContext) -> None:
        raise PermanentCommandError("account closed")

    running(events, judge)
    if form == "table":
        database.rows("INSERT INTO contact_event (contact_id) SELECT generate_series(1, 4)")
    else:
        await events.add_many([1, 2, 3, 4])
    await events.flush()
    await drain(given)
    items = await parked(bus)
    assert len(items) == 2
    where = "contact_event" if form == "table" else "busload.buffered"
    if action == "complete":
        await bus.troubleshooting.complete(EVENTS, items[0].command_id, operator="ann")
    elif action == "cancel":
        await bus.troubleshooting.cancel(EVENTS, items[0].command_id, reason="no", operator="ann")
    else:
        how = bus.troubleshooting.complete_group if "complete" in action else bus.troubleshooting.cancel_group
        more: dict[str, Any] = {} if "complete" in action else {"reason": "no"}
        await how(EVENTS, items[0].fingerprint, operator="ann", **more)
        await drain(given)
    one_by_one = action in ("complete", "cancel")
    assert database.value(f"SELECT count(*) FROM {where}") == (2 if one_by_one else 0)
    outcome = "OPERATOR_COMPLETED" if "complete" in action else "OPERATOR_CANCELED"
    archived = database.rows("SELECT group_id, outcome, key IS NULL FROM busload.buffer_archive")
    assert {row[1:] for row in archived} == {(outcome, form == "own")}
    assert len(archived) == (2 if one_by_one else 4)
    if one_by_one:
        assert {group_id for group_id, *_ in archived} == {items[0].command_id}
    assert len(await parked(bus)) == (1 if one_by_one else 0)
    database.check_invariants()


async def test_a_retried_group_runs_again_with_all_its_attempts(
    bus: CommandBus, given: Given, database: Database
) -> None:
    events = bus.buffer(EVENTS, size=2)
    healed = False

    def judge(group: Group, ctx: HandlerContext) -> None:
        if not healed:
            raise TransientCommandError("down")

    ran = running(events, judge)
    await waiting(events, ["a", "b"])
    await drain(given)
    [item] = await parked(bus)
    healed = True
    await bus.troubleshooting.retry(EVENTS, item.command_id, operator="ann")
    await drain(given)
    assert ran.attempts == [1, 2, 3, 1] and left(database) == [] and len(set(ran.group_ids)) == 1
    database.check_invariants()


async def test_an_operator_can_end_a_group_whose_table_is_gone(
    bus: CommandBus, given: Given, database: Database
) -> None:
    database.rows(TABLE)
    events = bus.buffer(EVENTS, size=2, table="contact_event")
    running(events, lambda group, ctx: group.fail(group[0], PermanentCommandError("no")))
    database.rows("INSERT INTO contact_event (contact_id) VALUES (1)")
    await events.flush()
    await drain(given)
    [item] = await parked(bus)
    database.rows("DROP TABLE contact_event")
    with pytest.raises(InvalidOperationError, match=r"is not there.*forget the buffer") as refused:
        await bus.troubleshooting.complete(EVENTS, item.command_id, operator="ann")
    assert len(await parked(bus)) == 1, "it may have been renamed"
    database.rows(str(refused.value).split("forget the buffer (")[1].split(")")[0])
    await bus.troubleshooting.complete(EVENTS, item.command_id, operator="ann")
    assert await parked(bus) == []


async def test_a_table_that_was_renamed_is_not_taken_for_one_that_is_gone(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """Nothing ends while its events may be somewhere; once the buffer is declared with the new name, they end there."""
    await three_parked_rows(bus, given, database)
    [item] = await parked(bus)
    database.rows("ALTER TABLE contact_event RENAME TO contact_history")
    with pytest.raises(InvalidOperationError, match=r"The table public.contact_event of buffer contact_events is not"):
        await bus.troubleshooting.complete(EVENTS, item.command_id, operator="ann")
    assert database.value("SELECT count(*) FROM contact_history") == 3 and len(await parked(bus)) == 1
    database.rows("UPDATE busload.buffer SET relation = 'public.contact_history'")
    await bus.troubleshooting.complete(EVENTS, item.command_id, operator="ann")
    assert database.value("SELECT count(*) FROM contact_history") == 0 and await parked(bus) == []


async def three_parked_rows(bus: CommandBus, given: Given, database: Database, archive: bool = False) -> None:
    """Rows of a table in one group that waits for a person."""
    database.rows(TABLE)
    events = bus.buffer(EVENTS, size=3, table="contact_event", archive=archive)

    def judge(group: Group, ctx: HandlerContext) -> None:
        raise PermanentCommandError("account closed")

    running(events, judge)
    database.rows("INSERT INTO contact_event (contact_id) SELECT generate_series(1, 3)")
    await drain(given)


async def test_an_explanation_of_a_group_says_what_it_holds_and_what_a_decision_deletes(
    bus: CommandBus, given: Given, database: Database
) -> None:
    await three_parked_rows(bus, given, database)
    [item] = await parked(bus)
    told = await bus.explain_command(EVENTS, item.command_id)
    assert "this group of 3 events of buffer 'contact_events'" in told.summary
    assert "Complete and cancel delete its 3 events." in told.reasons[0].advice


@pytest.mark.parametrize("now", ["contact_event_2", None])
async def test_a_buffer_that_is_declared_to_be_another_table_does_not_lose_the_events_of_the_first(
    bus: CommandBus, dsn: str, given: Given, database: Database, now: str | None
) -> None:
    """Their group fails clearly, and ends where its events are."""
    await three_parked_rows(bus, given, database)
    [item] = await parked(bus)
    assert item.data["table"] == "public.contact_event"
    database.rows("CREATE TABLE contact_event_2 (LIKE contact_event INCLUDING ALL)")
    async with CommandBus(dsn) as later:
        events = later.buffer(EVENTS, size=3, table=now)
        running(events, retry=ONCE)
        await later.troubleshooting.retry(EVENTS, item.command_id, operator="ann")
        await Given(later, database, given.settings).drained(domains=[EVENTS])
        [item] = await parked(later)
        assert item.last_error_code == "BUFFER_MOVED" and "public.contact_event," in item.last_error_message
        assert database.value("SELECT count(*) FROM contact_event") == 3
        await later.troubleshooting.cancel(EVENTS, item.command_id, reason="moved", operator="ann")
    assert database.value("SELECT count(*) FROM contact_event") == 0
    database.check_invariants()


async def test_a_group_whose_table_was_renamed_runs_where_its_events_are(
    bus: CommandBus, dsn: str, given: Given, database: Database
) -> None:
    await three_parked_rows(bus, given, database)
    [item] = await parked(bus)
    database.rows("ALTER TABLE contact_event RENAME TO contact_history")
    async with CommandBus(dsn) as later:
        ran = running(later.buffer(EVENTS, size=3, table="contact_history"))
        await later.troubleshooting.retry(EVENTS, item.command_id, operator="ann")
        await Given(later, database, given.settings).drained(domains=[EVENTS])
    assert [len(call) for call in ran.calls] == [3]
    assert database.value("SELECT count(*) FROM contact_history") == 0


KEEPS = """
    CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
    CREATE TRIGGER keep BEFORE DELETE ON contact_event FOR EACH ROW WHEN (old.id = 2) EXECUTE FUNCTION keep()"""
REFERS = "CREATE TABLE note (event bigint REFERENCES contact_event); INSERT INTO note VALUES (2)"
REFERS_LATER = """
    CREATE TABLE note (event bigint REFERENCES contact_event DEFERRABLE INITIALLY DEFERRED);
    INSERT INTO note VALUES (2)"""


@pytest.mark.parametrize(("how", "said"), [(REFERS, 'referenced from table "note"'), (KEEPS, "a trigger or a rule")])
@pytest.mark.parametrize("action", ["complete", "cancel"])
async def test_the_error_says_why_the_events_of_a_group_cannot_be_deleted(
    bus: CommandBus, given: Given, database: Database, how: str, said: str, action: str
) -> None:
    """In words, and the group stays whole; a transaction that was joined can go on."""
    await three_parked_rows(bus, given, database, archive=True)
    [item] = await parked(bus)
    database.rows(how)
    async with bus.pool.connection() as conn, conn.transaction():
        more: dict[str, Any] = {} if action == "complete" else {"reason": "no"}
        decide = getattr(bus.troubleshooting, action)
        with pytest.raises(InvalidOperationError, match=said) as refused:
            await decide(EVENTS, item.command_id, operator="ann", conn=conn, **more)
        await conn.execute("SELECT 1")
    assert "DELETE" not in str(refused.value) and str(item.command_id) in str(refused.value)
    assert len(await parked(bus)) == 1 and database.count("buffer_archive") == 0
    assert database.value("SELECT count(*) FROM contact_event WHERE group_id IS NOT NULL") == 3


@pytest.mark.parametrize("how", [REFERS, KEEPS, REFERS_LATER])
@pytest.mark.parametrize("action", ["complete", "cancel"])
async def test_a_decision_by_cause_leaves_behind_the_group_that_cannot_be_deleted(
    bus: CommandBus, given: Given, database: Database, how: str, action: str
) -> None:
    database.rows(TABLE)
    events = bus.buffer(EVENTS, size=1, table="contact_event")

    def judge(group: Group, ctx: HandlerContext) -> None:
        raise PermanentCommandError("account closed")

    running(events, judge)
    database.rows("INSERT INTO contact_event (contact_id) SELECT generate_series(1, 5)")
    await drain(given)
    items = await parked(bus)
    database.rows(how)
    if action == "complete":
        decided = await bus.troubleshooting.complete_group(EVENTS, items[0].fingerprint, operator="ann")
    else:
        decided = await bus.troubleshooting.cancel_group(EVENTS, items[0].fingerprint, reason="no", operator="ann")
    await drain(given)
    [item] = await parked(bus)
    assert database.rows("SELECT id, group_id FROM contact_event") == [(2, item.command_id)]
    assert decided.batch_id is not None
    result = database.value(
        "SELECT details FROM busload.execution JOIN busload.command ON id = command WHERE batch_id = %s",
        decided.batch_id,
    )
    assert result["moved"] == 4 and list(result["left"]) == [str(item.command_id)]
    assert "contact_event" in result["left"][str(item.command_id)]
    database.check_invariants()


# -- an application's table -----------------------------------------------------------------------------------------


async def test_rows_of_a_table_come_with_python_types_and_end_with_their_group(
    bus: CommandBus, given: Given, database: Database
) -> None:
    database.rows(TABLE)
    events = bus.buffer(EVENTS, size=2, table="contact_event", archive=True)
    seen: list[Item] = []
    running(events, lambda group, ctx: seen.extend(group))
    database.rows("INSERT INTO contact_event (contact_id, amount, mood) VALUES (1, 1.50, 'good'), (2, NULL, 'bad')")
    await drain(given)
    assert [item.id for item in seen] == [1, 2]
    data = [{name: value for name, value in item.data.items() if name != "created_at"} for item in seen]
    assert data == [
        {"contact_id": 1, "amount": Decimal("1.50"), "mood": "good"},
        {"contact_id": 2, "amount": None, "mood": "bad"},
    ]
    assert seen[0].created_at == seen[0].data["created_at"] and seen[0].created_at.tzinfo is not None
    assert database.value("SELECT count(*) FROM contact_event") == 0
    archived = database.rows("SELECT id, data ->> 'amount', outcome FROM busload.buffer_archive ORDER BY id")
    assert archived == [("1", "1.50", "DONE"), ("2", None, "DONE")]


async def test_rows_that_vanish_while_they_are_in_a_group_are_counted_and_not_fatal(
    bus: CommandBus, given: Given, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    database.rows(TABLE)
    events = bus.buffer(EVENTS, size=5, table="contact_event")
    database.rows("INSERT INTO contact_event (contact_id) SELECT generate_series(1, 10)")

    def judge(group: Group, ctx: HandlerContext) -> None:
        database.rows("DELETE FROM contact_event WHERE id = 3")  # while it runs

    ran = running(events, judge)
    assert await events.distribute() == 2
    database.rows("DELETE FROM contact_event WHERE id = 2 OR id > 5")  # before it is read
    await drain(given)
    assert [len(call) for call in ran.calls] == [4], "a group without rows is not called"
    results = [
        result for (result,) in database.rows("SELECT details FROM busload.execution ORDER BY details ->> 'items'")
    ]
    assert results == [
        {"items": 0, "done": 0, "calls": 0, "vanished": 5},
        {"items": 4, "done": 3, "calls": 1, "vanished": 2},
    ]
    status = await events.status()
    assert (status.calls, status.done, status.vanished) == (1, 3, 7)
    assert "vanished from group" in caplog.text
    database.check_invariants()


async def test_what_has_vanished_is_counted_once_however_often_the_group_is_tried(
    bus: CommandBus, given: Given, database: Database
) -> None:
    events = bus.buffer(EVENTS, size=5)
    await events.add_many(list(range(5)))
    await events.distribute()
    database.rows("DELETE FROM busload.buffered WHERE id > 3")

    def judge(group: Group, ctx: HandlerContext) -> None:
        raise TransientCommandError("busy")

    running(events, judge)
    await drain(given)
    assert (await events.status()).vanished == 2
    [item] = await parked(bus)
    assert item.data == {"buffer": EVENTS, "items": 3, "partition": None, "table": None}


async def test_what_isolation_has_ended_does_not_count_as_vanished(
    bus: CommandBus, given: Given, database: Database
) -> None:
    events = bus.buffer(EVENTS, size=8)

    def judge(group: Group, ctx: HandlerContext) -> None:
        if any(item.data == 5 for item in group):
            raise TransientCommandError("500")

    running(events, judge, isolate_poison=True, retry=RetryPolicy(max_attempts=4, backoff=(0,)))
    await waiting(events, list(range(8)))
    await drain(given)
    [item] = await parked(bus)
    assert left(database) == [5] and item.data["items"] == 1
    assert (await events.status()).vanished == 0


async def altered(database: Database, how: str) -> None:
    """While the event loop goes on: whoever has the table locked must be able to finish."""
    await asyncio.to_thread(database.rows, f"ALTER TABLE contact_event {how}")


async def test_a_column_dropped_under_a_running_worker_fails_the_attempt_clearly_and_others_go_on(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """The slot does not hang, and once the table is whole again the group runs: nothing is lost."""
    database.rows(TABLE)
    events = bus.buffer(EVENTS, size=2, table="contact_event")
    other = bus.buffer("other_events", size=1)
    seen = running(other)

    async def judge(group: Group, ctx: HandlerContext) -> None:
        if len(ran.calls) == 1:
            await altered(database, "RENAME COLUMN group_id TO gone")

    ran = running(events, judge)
    database.rows("INSERT INTO contact_event (contact_id, amount) VALUES (1, 1), (2, 2)")
    async with given.running(domains=[EVENTS, "other_events"], concurrency=1):
        await eventually(lambda: database.count("troubleshooting") == 1)
        await other.add("x")
        await eventually(lambda: len(seen.calls) == 1)
        [item] = await parked(bus)
        assert "busload buffer ddl" in item.last_error_message
        errors = database.rows(
            "SELECT details ->> 'code' FROM busload.execution JOIN busload.command ON id = command"
            "  WHERE batch_id IS NULL"
        )
        assert ("BUFFER_REFUSED",) in errors
        await altered(database, "RENAME COLUMN gone TO group_id")
        await bus.troubleshooting.retry(EVENTS, item.command_id, operator="ann")
        await eventually(lambda: database.value("SELECT count(*) FROM contact_event") == 0)
    assert len(ran.calls) == 2 and len(set(ran.group_ids)) == 1


async def test_a_column_dropped_between_two_groups_of_one_run_is_looked_up_again(
    bus: CommandBus, given: Given, database: Database
) -> None:
    database.rows(TABLE)
    events = bus.buffer(EVENTS, size=1, table="contact_event")
    ran = running(events)
    async with given.running(domains=[EVENTS]):
        database.rows("INSERT INTO contact_event (contact_id, amount) VALUES (1, 1)")
        await eventually(lambda: len(ran.calls) == 1)
        await altered(database, "DROP COLUMN amount")
        database.rows("INSERT INTO contact_event (contact_id) VALUES (2)")
        await eventually(lambda: len(ran.calls) == 2)
        await eventually(lambda: database.value("SELECT count(*) FROM contact_event") == 0)
    assert set(ran.calls[1][0]) == {"contact_id", "mood", "created_at"}
    assert database.rows("SELECT outcome FROM busload.execution") == [("COMPLETED",)] * 2, "no attempt is burnt"


async def test_a_type_that_changes_while_a_group_runs_is_no_reason_to_call_again(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """The end of the group is spelled anew for the table as it is now."""
    database.rows(TABLE)
    events = bus.buffer(EVENTS, size=3, table="contact_event", archive=True)

    async def judge(group: Group, ctx: HandlerContext) -> None:
        if len(ran.calls) == 2:
            await altered(database, "ALTER id TYPE text, ALTER amount TYPE text")
        for item in group:
            group.succeed(item)
        if len(ran.calls) == 2:
            raise TransientCommandError("too late")  # so that it ends by ids

    ran = running(events, judge)
    database.rows("INSERT INTO contact_event (contact_id, amount) SELECT n, n FROM generate_series(1, 6) AS n")
    database.rows("ALTER TABLE contact_event ALTER id DROP IDENTITY")
    await drain(given)
    assert len(ran.calls) == 2 and database.value("SELECT count(*) FROM contact_event") == 0
    assert database.rows("SELECT outcome FROM busload.execution") == [("COMPLETED",)] * 2


async def test_rows_that_others_refer_to_cannot_be_deleted_and_the_attempt_says_so(
    bus: CommandBus, given: Given, database: Database
) -> None:
    database.rows(TABLE)
    database.rows("CREATE TABLE note (event bigint REFERENCES contact_event)")
    events = bus.buffer(EVENTS, size=1, table="contact_event")
    running(events, retry=ONCE)
    database.rows("INSERT INTO contact_event (contact_id) VALUES (1)")
    database.rows("INSERT INTO note VALUES (1)")
    await drain(given)
    [item] = await parked(bus)
    assert item.last_error_code == "BUFFER_REFUSED" and "note" in item.last_error_message
    assert database.value("SELECT count(*) FROM contact_event WHERE group_id IS NOT NULL") == 1


@pytest.mark.parametrize("how", [REFERS, KEEPS, REFERS_LATER])
@pytest.mark.parametrize("isolate", [False, True])
async def test_a_row_that_cannot_be_deleted_fails_alone_and_the_verdicts_of_the_others_hold(
    bus: CommandBus, given: Given, database: Database, how: str, isolate: bool
) -> None:
    database.rows(TABLE)
    events = bus.buffer(EVENTS, size=6, table="contact_event", archive=True)

    def judge(group: Group, ctx: HandlerContext) -> None:
        if isolate and len(group) == 6:
            raise PermanentCommandError("one of them is bad")
        for item in group:
            group.fail(item, "busy") if item.id == 5 and len(ran.calls) < 3 else group.succeed(item)

    ran = running(events, judge, isolate_poison=isolate)
    database.rows("INSERT INTO contact_event (contact_id) SELECT generate_series(1, 6)")
    database.rows(how)
    await drain(given)
    [item] = await parked(bus)
    assert item.reason == "EXHAUSTED" and item.last_error_code == "BUFFER_REFUSED"
    assert [(one["id"], one["code"]) for one in item.details["items"]] == [(2, "BUFFER_REFUSED")]
    assert database.rows("SELECT id, group_id FROM contact_event") == [(2, item.command_id)]
    assert database.value("SELECT array_agg(id ORDER BY id) FROM busload.buffer_archive") == ["1", "3", "4", "5", "6"]
    assert (await events.status()).vanished == 0
    database.check_invariants()


@pytest.mark.parametrize("how", [REFERS, KEEPS])
async def test_rows_to_delete_when_attempts_are_used_up_wait_for_a_person_if_they_cannot_be(
    bus: CommandBus, given: Given, database: Database, how: str
) -> None:
    """The hook is told all the same, with the columns that the handler had."""
    database.rows(TABLE)
    events = bus.buffer(EVENTS, size=3, table="contact_event", on_exhausted="delete")
    columns: list[set[str]] = []

    def judge(group: Group, ctx: HandlerContext) -> None:
        columns.extend(set(item.data) for item in group)
        for item in group:
            group.succeed(item) if item.id == 1 else group.fail(item, "busy")

    running(events, judge, retry=ONCE)
    hooked: list[Item] = []

    @events.exhausted()
    async def compensate(group: Group, ctx: HandlerContext) -> None:
        hooked.extend(group)

    database.rows("INSERT INTO contact_event (contact_id) SELECT generate_series(1, 3)")
    database.rows(how)
    await drain(given)
    [item] = await parked(bus)
    assert (item.reason, item.data["items"], item.last_error_message) == ("EXHAUSTED", 2, "2 of 3 items failed: busy")
    assert database.rows("SELECT id FROM contact_event ORDER BY id") == [(2,), (3,)]
    assert [one.id for one in hooked] == [2, 3]
    assert [set(one.data) for one in hooked] == columns[1:] and "contact_id" in columns[0]


async def test_a_limit_that_cannot_say_whose_turn_it_is_does_not_end_a_group(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """By a business rule a command would end as FAILED; events must not be left behind."""
    events = bus.buffer(EVENTS, size=2)

    def by(group: Any) -> str:
        raise BusinessRuleError("no such tenant", code="NO_TENANT")

    running(events, rate_limit=RateLimit(1000, by=by))
    await events.add_many(["a", "b"])
    await drain(given)
    [item] = await parked(bus)
    assert (item.reason, item.last_error_code) == ("PERMANENT", "INVALID_RATE_LIMIT_KEY") and left(database) == [
        "a",
        "b",
    ]
    assert "BusinessRuleError: no such tenant" in str(item.last_error_message)
    database.check_invariants()


async def test_what_the_server_refuses_for_good_is_the_failure_of_the_attempt(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """Not an outage, though psycopg calls it operational: waiting for it to pass would hang the slot."""
    database.rows(TABLE)
    events = bus.buffer(EVENTS, size=1, table="contact_event")
    running(events, retry=ONCE)
    database.rows("INSERT INTO contact_event (contact_id) VALUES (1)")
    database.rows(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN RAISE EXCEPTION ''not now'' USING ERRCODE = ''55000''; END';"
        "CREATE TRIGGER refuse BEFORE DELETE ON contact_event FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    async with given.running(domains=[EVENTS]):
        await eventually(lambda: database.count("troubleshooting") == 1)
    [item] = await parked(bus)
    assert item.last_error_code == "BUFFER_REFUSED" and "not now" in item.last_error_message


async def test_locked_rows_of_one_table_do_not_stop_other_buffers(
    bus: CommandBus, given: Given, database: Database
) -> None:
    database.rows(TABLE)
    events = bus.buffer(EVENTS, size=1, table="contact_event")
    other = bus.buffer("other_events", size=1)
    called = running(events)
    seen = running(other)
    database.rows("INSERT INTO contact_event (contact_id) SELECT generate_series(1, 6)")
    assert await events.distribute() == 6
    async with bus.pool.connection() as conn:
        await conn.execute("BEGIN")
        await conn.execute("SELECT FROM contact_event FOR UPDATE")
        async with given.running(domains=[EVENTS, "other_events"]):
            await eventually(lambda: len(called.calls) >= 4)  # as many as may wait for their rows at a time
            await other.add("x")
            await eventually(lambda: len(seen.calls) == 1)
            await eventually(lambda: database.count("buffered") == 0)
            await conn.execute("ROLLBACK")
            await eventually(lambda: database.value("SELECT count(*) FROM contact_event") == 0)


# -- what other hands wrote -------------------------------------------------------------------------------------------


async def test_a_payload_that_cannot_be_decoded_fails_alone(bus: CommandBus, given: Given, database: Database) -> None:
    """Written by other hands; the rest of the group runs."""
    events = bus.buffer(EVENTS, size=3)
    ran = running(events)
    await events.add_many(["a", "b", "c"])
    database.rows("""UPDATE busload.buffered SET data = ('"' || repeat('x', 3) || '\\ud800"')::json WHERE id = 2""")
    await drain(given)
    assert ran.calls == [["a", "c"]]
    [item] = await parked(bus)
    assert (item.reason, item.details["items"][0]["code"], item.details["items"][0]["id"]) == (
        "PERMANENT",
        "UNDECODABLE",
        2,
    )
    assert database.value("SELECT count(*) FROM busload.buffered") == 1
    database.check_invariants()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("at timestamptz", "'infinity'"),
        ("at date", "'0044-03-15 BC'"),
        ("at time", "'24:00'"),
        ("at json", "('[' || repeat('9', 5000) || ']')::json"),
        ("at tstzrange", "'[2020-01-01,infinity)'"),
    ],
)
@pytest.mark.parametrize("merge", [None, "keep_last"])
async def test_a_value_that_python_cannot_hold_fails_its_row_alone(
    bus: CommandBus, given: Given, database: Database, column: str, value: str, merge: Any
) -> None:
    database.rows(TABLE)
    database.rows(f"ALTER TABLE contact_event ADD COLUMN {column}")
    table = BufferTable("contact_event", key="contact_id")
    events = bus.buffer(EVENTS, size=5, table=table, merge=merge)
    seen: list[Any] = []
    running(events, lambda group, ctx: seen.extend(item.id for item in group))
    database.rows("INSERT INTO contact_event (contact_id) SELECT generate_series(1, 5)")
    database.rows(f"UPDATE contact_event SET at = {value} WHERE id = 4")
    await drain(given)
    assert seen == [1, 2, 3, 5]
    [item] = await parked(bus)
    assert item.reason == "PERMANENT"
    assert [(one["id"], one["key"], one["code"]) for one in item.details["items"]] == [(4, "4", "UNDECODABLE")]
    assert database.rows("SELECT id FROM contact_event") == [(4,)]
    database.check_invariants()


# -- merging ------------------------------------------------------------------------------------------------------


async def test_a_merge_function_makes_one_item_of_all_events_of_a_key(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """Its id is that of the first; ending it ends them all. A merge that raises fails its key alone."""

    def merge(older: Any, newer: Any) -> Any:
        if newer == "poison":
            raise KeyError("no")
        return older + newer

    events = bus.buffer(EVENTS, size=10, merge=merge)
    seen: list[Item] = []
    running(events, lambda group, ctx: seen.extend(group))
    for key, data in [("a", "1"), ("b", "x"), ("a", "2"), ("b", "poison"), ("a", "3")]:
        await events.add(data, key=key)
    await events.flush()
    await drain(given)
    assert [(item.id, item.key, item.data) for item in seen] == [(1, "a", "123")]
    [item] = await parked(bus)
    assert item.details["items"][0]["code"] == "MERGE_FAILED" and item.details["items"][0]["key"] == "b"
    assert database.rows("SELECT id FROM busload.buffered ORDER BY id") == [(2,), (4,)]
    database.check_invariants()


@pytest.mark.parametrize(("merge", "data", "id"), [("keep_last", 30, 3), ("keep_first", 10, 1)])
async def test_among_rows_with_one_key_the_last_or_first_wins_and_all_end(
    bus: CommandBus, given: Given, database: Database, merge: Any, data: int, id: int
) -> None:
    database.rows(TABLE)
    events = bus.buffer(EVENTS, size=10, merge=merge, table=BufferTable("contact_event", key="contact_id"))
    seen: list[Item] = []
    running(events, lambda group, ctx: seen.extend(group))
    database.rows("INSERT INTO contact_event (contact_id, amount) VALUES (1, 10), (2, 5), (1, 30)")
    await events.flush()
    await drain(given)
    assert [(item.id, int(item.data["amount"])) for item in seen] == [(id, data), (2, 5)]
    assert database.value("SELECT count(*) FROM contact_event") == 0


# -- what a handler can do --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["async", "def"])
@pytest.mark.parametrize("ends", ["returns", "judges", "raises"])
async def test_what_is_written_in_the_transaction_commits_with_the_end_of_the_group(
    bus: CommandBus, given: Given, database: Database, kind: str, ends: str
) -> None:
    events = bus.buffer(EVENTS, size=3)
    database.rows("CREATE TABLE effect (n integer)")
    bus.handler("next", "Next")(lambda command, ctx: None)

    def judge(group: Group) -> None:
        if ends == "raises":
            group.succeed(group[0])
            raise TransientCommandError("no")
        if ends == "judges":
            for item in group:
                group.succeed(item) if item.data else group.fail(item, "zero")

    async def handle_async(group: Group, ctx: HandlerContext) -> None:
        async with ctx.transaction() as conn:
            await conn.execute("INSERT INTO effect VALUES (%s)", [len(group)])
            await ctx.send("next", "Next")
            judge(group)

    def handle(group: Group, ctx: SyncHandlerContext) -> None:
        with ctx.transaction() as conn:
            conn.execute("INSERT INTO effect VALUES (%s)", [len(group)])
            ctx.send("next", "Next")
            judge(group)

    events.handler(retry=ONCE)(handle_async if kind == "async" else handle)
    await events.add_many([0, 1, 2])
    await drain(given)
    effects = [n for (n,) in database.rows("SELECT n FROM effect")]
    sent = database.value("SELECT count(*) FROM busload.command WHERE command_type = 'Next'")
    if ends == "raises":
        assert effects == [] and sent == 0 and left(database) == [0, 1, 2], "what it judged was rolled back too"
    else:
        assert effects == [3] and sent == 1 and left(database) == ([] if ends == "returns" else [0])
    if ends == "returns":
        told = database.value("SELECT details FROM busload.execution WHERE outcome = 'COMPLETED'")
        assert told == {"items": 3, "done": 3, "calls": 1, "vanished": 0}
    assert len(await parked(bus)) == (0 if ends == "returns" else 1)
    database.check_invariants()


async def test_a_group_that_was_lost_does_not_commit_its_transaction(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """Nor does it delete: what it wrote for the events was rolled back. Whoever has the group now runs it."""
    events = bus.buffer(EVENTS, size=1)
    database.rows("CREATE TABLE effect (n integer)")
    calls: list[int] = []

    @events.handler(retry=AT_ONCE)
    async def handle(group: Group, ctx: HandlerContext) -> None:
        calls.append(1)
        async with ctx.transaction() as conn:
            await conn.execute("INSERT INTO effect VALUES (1)")
            if len(calls) == 1:
                given.database.take_over()

    await events.add("a")
    await drain(given)
    await drain(given)
    assert database.rows("SELECT n FROM effect") == [(1,)] and len(calls) == 2 and left(database) == []
    database.check_invariants()


async def test_a_late_worker_cannot_park_retry_or_complete_but_what_it_delivered_is_done(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """Its items were delivered, so nobody sends them again; the rest belongs to whoever has the group now."""
    events = bus.buffer(EVENTS, size=3)
    calls: list[list[Any]] = []

    @events.handler(retry=AT_ONCE)
    async def handle(group: Group, ctx: HandlerContext) -> None:
        calls.append([item.data for item in group])
        if len(calls) == 1:
            given.database.take_over()
            group.succeed(group[0])
            group.fail(group[1], PermanentCommandError("bad"))
            group.fail(group[2], "later")

    await events.add_many(["a", "b", "c"])
    await drain(given)
    assert await parked(bus) == []
    await drain(given)
    assert sorted(map(tuple, calls[1:])) == [("b",), ("c",)], "one that was all its worker ran is halved"
    assert left(database) == [] and await parked(bus) == []
    assert (await events.status()).vanished == 0
    database.check_invariants()


async def test_a_handler_in_a_thread_judges_like_any_other(bus: CommandBus, given: Given, database: Database) -> None:
    events = bus.buffer(EVENTS, size=2)
    threads: list[str] = []

    @events.handler(retry=ONCE)
    def handle(group: Group, ctx: SyncHandlerContext) -> None:
        threads.append(threading.current_thread().name)
        group.succeed(group[0])
        group.fail(group[1], StopIteration("odd"))

    await events.add_many(["a", "b"])
    await drain(given)
    assert threads[0].startswith("busload-handler") and left(database) == ["b"]
    assert (await parked(bus))[0].last_error_type == "StopIteration"


@pytest.mark.parametrize("kind", ["async", "def"])
async def test_a_call_that_takes_too_long_fails_and_what_it_judged_counts(
    bus: CommandBus, given: Given, database: Database, kind: str
) -> None:
    events = bus.buffer(EVENTS, size=2)
    gate = threading.Event()

    async def slow_async(group: Group, ctx: HandlerContext) -> None:
        group.succeed(group[0])
        await asyncio.Event().wait()

    def slow(group: Group, ctx: SyncHandlerContext) -> None:
        group.succeed(group[0])
        gate.wait(30)
        assert ctx.cancelled

    events.handler(retry=ONCE, timeout=1.0)(slow if kind == "def" else slow_async)  # a thread may not begin at once
    await events.add_many(["a", "b"])
    try:
        async with given.running(domains=[EVENTS]):
            await eventually(lambda: database.count("troubleshooting") == 1)
            gate.set()
    finally:
        gate.set()
    [item] = await parked(bus)
    assert item.last_error_code == "TIMEOUT" and left(database) == ["b"]
    database.check_invariants()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), asyncio.CancelledError(), RecursionError("x")])
async def test_whatever_a_call_raises_is_the_failure_of_its_group(
    bus: CommandBus, given: Given, database: Database, error: BaseException
) -> None:
    events = bus.buffer(EVENTS, size=1)

    def judge(group: Group, ctx: HandlerContext) -> None:
        raise error

    running(events, judge, retry=ONCE)
    await events.add("a")
    await drain(given)
    assert (await parked(bus))[0].last_error_type == type(error).__name__ and left(database) == ["a"]


async def test_a_stopping_worker_hands_a_running_group_back_without_burning_an_attempt(
    bus: CommandBus, given: Given, database: Database
) -> None:
    events = bus.buffer(EVENTS, size=2)
    started = asyncio.Event()
    attempts: list[int] = []

    @events.handler()
    async def handle(group: Group, ctx: HandlerContext) -> None:
        attempts.append(ctx.attempt)
        if len(attempts) == 1:
            started.set()
            await asyncio.Event().wait()

    await events.add_many(["a", "b"])
    async with given.running(domains=[EVENTS]) as worker:
        await started.wait()
        worker.stop(hurry=True)
    assert left(database) == ["a", "b"] and database.count("execution") == 0
    await drain(given)
    assert attempts == [1, 1] and left(database) == []


async def test_a_refused_call_puts_the_rest_of_its_group_off_and_burns_no_attempt(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """`RateLimitedError`, as a whole or after verdicts: what is done stays, what failed for good waits for a person."""
    events = bus.buffer(EVENTS, size=3)
    calls: list[tuple[list[Any], int]] = []

    @events.handler(retry=ONCE)
    async def handle(group: Group, ctx: HandlerContext) -> None:
        calls.append(([item.data for item in group], ctx.attempt))
        if len(calls) == 1:
            raise RateLimitedError(after=0)
        if len(calls) == 2:
            group.succeed(group[0])
            group.fail(group[1], PermanentCommandError("bad"))
            raise RateLimitedError(after=0)

    await events.add_many(["a", "b", "c"])
    async with given.running(domains=[EVENTS]):
        await eventually(lambda: left(database) == ["b"])
    assert calls == [(["a", "b", "c"], 1), (["a", "b", "c"], 1), (["c"], 1)]
    [item] = await parked(bus)
    assert item.reason == "PERMANENT" and item.data["items"] == 1
    assert [row for (row,) in database.rows("SELECT attempt FROM busload.execution")] == [1]
    database.check_invariants()


# -- poison -------------------------------------------------------------------------------------------------------


async def test_a_group_that_fails_as_a_whole_twice_is_searched_for_its_poison(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """The good ones complete; parts have the same group id, and what passes is deleted at once."""
    events = bus.buffer(EVENTS, size=16)
    seen_left: list[int] = []

    def judge(group: Group, ctx: HandlerContext) -> None:
        seen_left.append(len(left(database)))
        if any(item.data in (3, 12) for item in group):
            raise TransientCommandError("500")

    ran = running(events, judge, isolate_poison=True, retry=RetryPolicy(max_attempts=2, backoff=(0,)))
    await waiting(events, list(range(16)))
    await drain(given)
    assert [len(call) for call in ran.calls[:2]] == [16, 16] and len(set(ran.group_ids)) == 1
    assert left(database) == [3, 12] and seen_left[-1] < 16
    delivered = [n for call in ran.calls[2:] if not {3, 12} & set(call) for n in call]
    assert sorted(delivered) == [n for n in range(16) if n not in (3, 12)], "each good one passes exactly once"
    [item] = await parked(bus)
    assert item.reason == "EXHAUSTED" and len(item.details["items"]) == 2
    database.check_invariants()


async def test_without_isolation_a_poisoned_group_is_only_tried_again(
    bus: CommandBus, given: Given, database: Database
) -> None:
    events = bus.buffer(EVENTS, size=4)

    def judge(group: Group, ctx: HandlerContext) -> None:
        raise TransientCommandError("500")

    ran = running(events, judge)
    await events.add_many([1, 2, 3, 4])
    await drain(given)
    assert [len(call) for call in ran.calls] == [4, 4, 4] and left(database) == [1, 2, 3, 4]


async def test_a_permanent_whole_failure_is_searched_at_once_and_the_bad_one_is_parted_off(
    bus: CommandBus, given: Given, database: Database
) -> None:
    events = bus.buffer(EVENTS, size=8)

    def judge(group: Group, ctx: HandlerContext) -> None:
        if any(item.data == 6 for item in group):
            raise PermanentCommandError("unknown record")

    ran = running(events, judge, isolate_poison=True)
    await waiting(events, list(range(8)))
    await drain(given)
    assert set(ran.attempts) == {1} and left(database) == [6]
    [item] = await parked(bus)
    assert item.reason == "PERMANENT" and item.last_error_message == "1 of 8 items failed: unknown record"
    database.check_invariants()


async def test_a_part_that_judges_its_items_is_not_asked_again_about_them(
    bus: CommandBus, given: Given, database: Database
) -> None:
    events = bus.buffer(EVENTS, size=8)

    def judge(group: Group, ctx: HandlerContext) -> None:
        if len(group) == 8:
            raise TransientCommandError("500")
        for item in group:
            group.fail(item, "bad") if item.data == 1 else group.succeed(item)

    ran = running(events, judge, isolate_poison=True, retry=RetryPolicy(max_attempts=2, backoff=(0,)))
    await waiting(events, list(range(8)))
    await drain(given)
    further = [n for call in ran.calls[2:] for n in call]
    assert sorted(further) == list(range(8)) and left(database) == [1]


async def test_no_event_is_poison_where_only_the_size_of_a_call_was_too_much(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """The last one, who is left by elimination, is tried alone before anybody thinks ill of it."""
    events = bus.buffer(EVENTS, size=8)

    def judge(group: Group, ctx: HandlerContext) -> None:
        if len(group) > 5:
            raise PermanentCommandError("too large")

    running(events, judge, isolate_poison=True)
    await waiting(events, list(range(8)))
    await drain(given)
    assert left(database) == [] and await parked(bus) == []


async def test_parts_commit_their_own_transactions(bus: CommandBus, given: Given, database: Database) -> None:
    events = bus.buffer(EVENTS, size=4)
    database.rows("CREATE TABLE effect (n integer UNIQUE)")
    database.rows("INSERT INTO effect VALUES (2)")

    @events.handler(retry=RetryPolicy(max_attempts=2, backoff=(0,)), isolate_poison=True)
    async def handle(group: Group, ctx: HandlerContext) -> None:
        async with ctx.transaction() as conn:
            for item in group:
                await conn.execute("INSERT INTO effect VALUES (%s)", [item.data])

    await events.add_many([0, 1, 2, 3])
    await drain(given)
    assert [n for (n,) in database.rows("SELECT n FROM effect ORDER BY n")] == [0, 1, 2, 3]
    assert left(database) == [2] and (await parked(bus))[0].last_error_type == "UniqueViolation"
    database.check_invariants()


async def test_one_percent_poison_costs_the_others_nothing(bus: CommandBus, given: Given, database: Database) -> None:
    """1,000 events in groups of 100, one poison in each: 990 are done, ten wait, each alone or with its like."""
    events = bus.buffer(EVENTS, size=100)

    def judge(group: Group, ctx: HandlerContext) -> None:
        if any(item.data % 100 == 42 for item in group):
            raise TransientCommandError("500")

    ran = running(events, judge, isolate_poison=True, retry=RetryPolicy(max_attempts=2, backoff=(0,)))
    await events.add_many(list(range(1000)))
    await drain(given)
    assert left(database) == [n for n in range(1000) if n % 100 == 42]
    assert len(await parked(bus)) == 10 and len(ran.calls) <= 10 * 12
    assert (await events.status()).done == 990
    database.check_invariants()


# -- crashes ------------------------------------------------------------------------------------------------------


async def test_a_group_that_kills_its_workers_is_halved_down_to_the_killer(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """Its innocent neighbours are not parked with it. A worker that dies is here one that is given up."""
    events = bus.buffer(EVENTS, size=16)
    done: list[int] = []
    deaths: list[int] = []

    @events.handler(retry=AT_ONCE)
    async def handle(group: Group, ctx: HandlerContext) -> None:
        if any(item.data == 11 for item in group):
            deaths.append(len(group))
            given.database.take_over()  # the others see it die; what it would say comes too late
            raise TransientCommandError("too late")
        done.extend(item.data for item in group)

    await events.add_many(list(range(16)))
    await events.distribute()
    for _ in range(20):
        await drain(given)
        if database.count("troubleshooting"):
            break
    [item] = await parked(bus)
    assert item.reason == "CRASHED" and item.data["items"] == 1
    assert left(database) == [11] and sorted(done) == [n for n in range(16) if n != 11]
    assert deaths == [16, 8, 4, 2, 1, 1, 1], "only what kills is halved, and only a single one is parked"
    assert item.attempts == 1
    database.check_invariants()


async def test_a_group_that_was_merely_there_when_a_worker_died_runs_once_more_and_whole(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """A crash must not cost every group that its worker held a dozen small calls."""
    events = bus.buffer(EVENTS, size=4)
    await events.add_many(list(range(8)))
    assert await events.distribute() == 2
    worker = given.registered_worker()
    claimed = database.perform(claim.claim(worker=worker, domains=[EVENTS], limit=10))
    assert len(claimed.leased) == 2
    given.died(worker)
    given.rescued()
    ran = running(events, retry=AT_ONCE)
    await drain(given)
    assert sorted(ran.calls) == [[0, 1, 2, 3], [4, 5, 6, 7]] and left(database) == []
    database.check_invariants()


# -- outages ------------------------------------------------------------------------------------------------------


async def test_a_connection_that_breaks_at_the_end_of_a_group_is_no_reason_to_call_again(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """The call was made: its end is written again and again until it is, and counts once."""
    events = bus.buffer(EVENTS, size=2)
    ran = running(events, retry=AT_ONCE)
    database.rows(
        "CREATE SEQUENCE once; CREATE FUNCTION break() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN IF nextval(''once'') <= 2 THEN PERFORM pg_terminate_backend(pg_backend_pid()); END IF;"
        " RETURN NULL; END';"
        "CREATE TRIGGER break BEFORE DELETE ON busload.buffered EXECUTE FUNCTION break()"
    )
    await events.add_many(["a", "b"])
    async with given.running(domains=[EVENTS]):
        await eventually(lambda: database.count("execution") == 1)
    assert ran.calls == [["a", "b"]] and left(database) == []
    assert (await events.status()).done == 2
    database.check_invariants()


async def test_while_no_connection_can_be_had_a_group_waits(bus: CommandBus, given: Given, database: Database) -> None:
    events = bus.buffer(EVENTS, size=2)

    def judge(group: Group, ctx: HandlerContext) -> None:
        database.rows(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )

    ran = running(events, judge)
    await events.add_many(["a", "b"])
    async with given.running(domains=[EVENTS]):
        await eventually(lambda: database.count("execution") == 1)
    assert ran.calls == [["a", "b"]] and left(database) == []
    database.check_invariants()
