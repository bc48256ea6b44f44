"""The audit of operators: everything that a person did is there, with name and reason, and nothing else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import psycopg
import pytest

from busload import BatchCommand, CommandBus, HandlerContext, PermanentCommandError
from busload.audit import actions
from busload.audit.actions import Action, ActionType
from busload.batches import FailureBudget
from busload.commands.command import Command
from busload.errors import InvalidCommandError
from busload.jobs.job import Stage
from busload.postgres.write import patient
from busload.tasks import Phase, phase
from tests.given import DOMAIN, Database, Given


async def _parked(given: Given, bus: CommandBus) -> Any:
    _, [command_id] = await given.in_troubleshooting()
    return command_id


async def _failed_job(given: Given, bus: CommandBus) -> Any:
    given.handler("Fail", _refuse)
    job_id = await bus.jobs.create(DOMAIN, [Stage("a", [BatchCommand("Fail")]), Stage("b", [BatchCommand("Fail")])])
    await given.drained()
    for item in await bus.troubleshooting.list(DOMAIN):
        await bus.troubleshooting.cancel(DOMAIN, item.command_id, reason="x")
    await given.drained()
    return job_id


async def _refuse(command: Command, ctx: HandlerContext) -> None:
    raise PermanentCommandError("no")


async def _limit(given: Given, bus: CommandBus) -> Any:
    given.database.rows(
        "INSERT INTO busload.rate_limit (name, subject, adaptive, rate, ceiling, progress, back, soon, round, "
        "next_at, blocked_until, calls, refused, used_at) SELECT 'crm', '', false, 1, 1, 1, 1, 0, 0, now(), now(), 0, "
        "0, now()"
    )


async def _unpublished(given: Given, bus: CommandBus) -> Any:
    await given.batch()
    given.database.rows(
        "INSERT INTO busload.outbox (lo, hi, domain, batch_id, transport, rounds, reason, error) "
        "SELECT lo, hi, domain, batch_id, 'redis', 1, 'REFUSED', 'full' FROM busload.queue"
    )
    given.database.rows("DELETE FROM busload.queue")


Act = Callable[[CommandBus, Any, str], Awaitable[Any]]
Before = Callable[[Given, CommandBus], Awaitable[Any]]


async def _batch(given: Given, bus: CommandBus) -> Any:
    return await given.batch(3)


async def _command(given: Given, bus: CommandBus) -> Any:
    return await given.sent()


async def _held(given: Given, bus: CommandBus) -> Any:
    batch_id = await given.batch(3)
    await bus.hold_batch(DOMAIN, batch_id, reason="x")
    return batch_id


async def _paused(given: Given, bus: CommandBus) -> Any:
    await bus.domains.pause(DOMAIN)


async def _job(given: Given, bus: CommandBus) -> Any:
    return await bus.jobs.create(DOMAIN, [Stage("a", [BatchCommand("Debit")])])


async def _scheduled(given: Given, bus: CommandBus) -> Any:
    bus.schedule("nightly", cron="0 2 * * *", command=BatchCommand("Debit"), domain=DOMAIN)
    await bus.schedules.sync()


async def _paused_schedule(given: Given, bus: CommandBus) -> Any:
    await _scheduled(given, bus)
    await bus.schedules.pause("nightly")


async def _worker(given: Given, bus: CommandBus) -> Any:
    return given.registered_worker()


async def _old_tracker(given: Given, bus: CommandBus) -> Any:
    await bus.database.read(phase.current("legacy"))


async def _switch(bus: CommandBus, operator: str) -> Any:
    to = partial(phase.switch, "legacy", Phase.DUAL_WRITE, operator=operator, reason=WHY, force=True)
    await bus.database.write(patient(to))


async def _nothing(given: Given, bus: CommandBus) -> Any:
    return None


WHY = "the bank complains"
LATER = datetime(2100, 1, 1, tzinfo=UTC)
DONE: dict[ActionType, tuple[Before, Act, str | None]] = {
    ActionType.OPERATOR_RETRIED: (_parked, lambda b, i, o: b.troubleshooting.retry(DOMAIN, i, operator=o), None),
    ActionType.OPERATOR_COMPLETED: (_parked, lambda b, i, o: b.troubleshooting.complete(DOMAIN, i, operator=o), None),
    ActionType.OPERATOR_CANCELED: (
        _parked,
        lambda b, i, o: b.troubleshooting.cancel(DOMAIN, i, reason=WHY, operator=o),
        WHY,
    ),
    ActionType.CANCELED: (_command, lambda b, i, o: b.cancel_command(DOMAIN, i, reason=WHY, operator=o), WHY),
    ActionType.RESCHEDULED: (_command, lambda b, i, o: b.reschedule_command(DOMAIN, i, LATER, operator=o), None),
    ActionType.REROUTED: (_unpublished, lambda b, i, o: b.outbox.reroute(operator=o), None),
    ActionType.OUTBOX_RETRIED: (_unpublished, lambda b, i, o: b.outbox.retry(domain=DOMAIN, operator=o), None),
    ActionType.BATCH_HELD: (_batch, lambda b, i, o: b.hold_batch(DOMAIN, i, reason=WHY, operator=o), WHY),
    ActionType.BATCH_RESUMED: (_held, lambda b, i, o: b.resume_batch(DOMAIN, i, operator=o), None),
    ActionType.BATCH_CANCELED: (_batch, lambda b, i, o: b.cancel_batch(DOMAIN, i, reason=WHY, operator=o), WHY),
    ActionType.BATCH_REPRIORITIZED: (_batch, lambda b, i, o: b.reprioritize_batch(DOMAIN, i, 5, operator=o), None),
    ActionType.BATCH_BUDGET_CHANGED: (
        _batch,
        lambda b, i, o: b.set_batch_budget(DOMAIN, i, FailureBudget(0.5), operator=o),
        None,
    ),
    ActionType.JOB_CANCELED: (_job, lambda b, i, o: b.jobs.cancel(DOMAIN, i, reason=WHY, operator=o), WHY),
    ActionType.JOB_RESUMED: (_failed_job, lambda b, i, o: b.jobs.resume(DOMAIN, i, operator=o), None),
    ActionType.DOMAIN_PAUSED: (_nothing, lambda b, i, o: b.domains.pause(DOMAIN, reason=WHY, operator=o), WHY),
    ActionType.DOMAIN_RESUMED: (_paused, lambda b, i, o: b.domains.resume(DOMAIN, operator=o), None),
    ActionType.LIMIT_RESET: (_limit, lambda b, i, o: b.limits.reset("crm", operator=o), None),
    ActionType.SCHEDULE_PAUSED: (
        _scheduled,
        lambda b, i, o: b.schedules.pause("nightly", reason=WHY, operator=o),
        WHY,
    ),
    ActionType.SCHEDULE_RESUMED: (_paused_schedule, lambda b, i, o: b.schedules.resume("nightly", operator=o), None),
    ActionType.SCHEDULE_TRIGGERED: (_scheduled, lambda b, i, o: b.schedules.trigger("nightly", operator=o), None),
    ActionType.SCHEDULE_REMOVED: (_scheduled, lambda b, i, o: b.schedules.remove("nightly", operator=o), None),
    ActionType.TRACKER_SWITCHED: (_old_tracker, lambda b, i, o: _switch(b, o), WHY),
    ActionType.BUFFER_FLUSHED: (_nothing, lambda b, i, o: b.buffers.flush("events", operator=o), None),
    ActionType.WORKER_ASKED_TO_STOP: (_worker, lambda b, i, o: b.workers.stop(i, reason=WHY, operator=o), WHY),
}


@pytest.mark.parametrize("action", DONE, ids=str)
async def test_what_an_operator_does_is_kept_with_name_and_reason(
    given: Given, bus: CommandBus, action: ActionType
) -> None:
    before, act, reason = DONE[action]
    about = await before(given, bus)
    began = given.database.value("SELECT clock_timestamp()")
    await act(bus, about, "ada")
    found = (await bus.audit.list()).actions
    [one] = [one for one in found if one.type == action]
    assert (one.operator, one.reason) == ("ada", reason)
    assert began <= one.at
    assert {one.operator for one in found} == {"ada"}  # what nobody is named for is not there
    wanted = {ActionType.LIMIT_RESET: None, ActionType.BUFFER_FLUSHED: "events", ActionType.WORKER_ASKED_TO_STOP: None}
    wanted[ActionType.TRACKER_SWITCHED] = None
    assert one.domain == wanted.get(action, DOMAIN)
    about_commands = one.command_id is not None
    assert about_commands is (action in list(ActionType)[:7])


async def test_what_changes_nothing_is_not_kept(given: Given, bus: CommandBus) -> None:
    await bus.domains.pause(DOMAIN, operator="ada")
    await bus.domains.pause(DOMAIN, operator="eve")
    await bus.limits.reset("unknown", operator="eve")
    await bus.outbox.retry(operator="eve")
    assert [one.operator for one in (await bus.audit.list()).actions] == ["ada"]


async def test_filters_leave_out_others(given: Given, bus: CommandBus, database: Database) -> None:
    await bus.domains.pause("crm", operator="ada")
    await bus.domains.pause(DOMAIN, operator="eve")
    await bus.domains.resume(DOMAIN, operator="ada")
    paused, resumed = ActionType.DOMAIN_PAUSED, ActionType.DOMAIN_RESUMED
    now = database.value("SELECT clock_timestamp()")

    async def found(domain: str | None = None, **options: Any) -> list[tuple[str, str | None]]:
        return [(one.operator, one.domain) for one in (await bus.audit.list(domain, **options)).actions]

    assert await found() == [("ada", DOMAIN), ("eve", DOMAIN), ("ada", "crm")]
    assert await found("crm") == [("ada", "crm")]
    assert await found(operator="eve") == [("eve", DOMAIN)]
    assert await found(action=resumed) == [("ada", DOMAIN)]
    assert await found(action=paused, operator="ada") == [("ada", "crm")]
    assert await found(since=now) == await found(until=now - timedelta(hours=1)) == []
    assert len(await found(since=now - timedelta(hours=1), until=now)) == 3


async def test_pages_go_on_where_the_last_one_ended(bus: CommandBus, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(7):
        await bus.domains.pause(f"d{n}", operator="ada")
    for most in (2000, 3):  # a page also ends where it has looked at enough
        monkeypatch.setattr(actions, "LOOKED_AT", most)
        domains, after = [], None
        while True:
            page = await bus.audit.list(after=after, limit=2)
            domains += [one.domain for one in page.actions]
            after = page.next
            if after is None:
                break
        assert domains == [f"d{n}" for n in reversed(range(7))]


async def test_an_action_on_many_commands_is_one(given: Given, bus: CommandBus) -> None:
    batch_id, ids = await given.in_troubleshooting(5)
    for command_id in ids[:4]:
        await bus.troubleshooting.cancel(DOMAIN, command_id, reason="closed", operator="ada")
    await bus.troubleshooting.cancel(DOMAIN, ids[4], reason="another", operator="ada")
    found = (await bus.audit.list()).actions
    assert [(one.reason, one.commands, one.batch_id) for one in found] == [
        ("another", 1, batch_id),
        ("closed", 4, batch_id),
    ]
    page = await bus.audit.list(limit=1)
    assert [one.commands for one in (await bus.audit.list(limit=1, after=page.next)).actions] == [4]


async def test_a_retry_with_patched_data_is_told_from_a_plain_one(given: Given, bus: CommandBus) -> None:
    _, [first, *_] = await given.in_troubleshooting(4)
    await bus.troubleshooting.retry(DOMAIN, first, operator="ada")
    [cause] = await bus.troubleshooting.groups(DOMAIN)
    patch = [{"op": "add", "path": "/currency", "value": "EUR"}]
    await bus.troubleshooting.retry_group(DOMAIN, cause.fingerprint, patch=patch, operator="ada")
    await given.drained()
    found = (await bus.audit.list()).actions
    assert [(one.type, one.patched, one.commands) for one in found] == [
        (ActionType.OPERATOR_RETRIED, True, 3),
        (ActionType.OPERATOR_RETRIED, False, 1),
    ]


def _action(seconds: float, **given: Any) -> Action:
    at = datetime(2030, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    usual: dict[str, Any] = {"batch_id": None, "domain": DOMAIN, "command_id": None, "reason": None}
    return Action(**{"event": 1, "at": at, "type": "CANCELED", "operator": "ada", "commands": 1, **usual, **given})


@pytest.mark.parametrize(
    ("earlier", "together"),
    [
        (_action(5), True),
        (_action(4.9), False),
        (_action(9, operator="eve"), False),
        (_action(9, type="OPERATOR_CANCELED"), False),
        (_action(9, reason="other"), False),
        (_action(9, domain="crm"), False),
        (_action(9, patched=True), False),
        (_action(9, commands=0), False),
    ],
)
def test_only_what_was_done_at_once_and_alike_is_one(earlier: Action, together: bool) -> None:
    assert earlier.goes_with(_action(10)) is together


@pytest.mark.parametrize(
    "wrong",
    [{"action": "NONE"}, {"after": "x"}, {"after": "1"}, {"after": "1.99999999999999999999"}, {"since": 3}],
    ids=str,
)
async def test_wrong_input_is_refused(bus: CommandBus, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidCommandError):
        await bus.audit.list(**wrong)


@pytest.mark.parametrize("way", ["create_batch", "open_batch"])
async def test_a_batch_that_an_operator_creates_exists_only_with_the_name(
    bus: CommandBus, database: Database, way: str
) -> None:
    """The event is written by a statement of its own, and by the same transaction."""

    async def create() -> None:
        if way == "create_batch":
            await bus.create_batch(DOMAIN, [BatchCommand("Debit")], operator="rosa")
            return
        async with bus.open_batch(DOMAIN, operator="rosa") as batch:
            await batch.add("Debit")

    database.rows("ALTER TABLE busload.event ADD CONSTRAINT nobody CHECK (type <> 'BATCH_CREATED')")
    with pytest.raises(psycopg.errors.CheckViolation):
        await create()
    assert (database.count("batch"), database.count("command")) == (0, 0)
    database.rows("ALTER TABLE busload.event DROP CONSTRAINT nobody")
    await create()
    [action] = (await bus.audit.list()).actions
    assert (action.type, action.operator) == ("BATCH_CREATED", "rosa")
