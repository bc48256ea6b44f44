"""What is wrong about a batch that looks after itself is refused in both faces: nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from busload import (
    BatchCommand,
    Chunk,
    ChunkContext,
    Command,
    CommandBus,
    ConcurrencyLimit,
    HandlerContext,
    InvalidCommandError,
    RateLimit,
    Settings,
    SyncCommandBus,
)
from busload.batches import Canary, FailureBudget
from busload.errors import InvalidOperationError
from tests.faces import FACES, bus_of
from tests.given import DOMAIN, Database, Given

YESTERDAY, TOMORROW = (datetime.now(UTC) + timedelta(days=days) for days in (-1, 1))


def debits(count: int = 10, **options: Any) -> list[BatchCommand]:
    return [BatchCommand("Debit", data={"n": n}, **options) for n in range(count)]


WRONG: dict[str, tuple[str, Callable[[CommandBus], Any]]] = {
    "the domain of a command": (
        "/domain: found 'no such domain', wanted a letter",
        lambda bus: bus.create_batch(DOMAIN, [*debits(2), BatchCommand("Debit", domain="no such domain")]),
    ),
    "an expiry that has passed": (
        "/expires_at: found .*, which has passed; wanted a time to come",
        lambda bus: bus.create_batch(DOMAIN, debits(expires_at=YESTERDAY)),
    ),
    "an expiry of nothing": (
        "/expires_in: found 0, wanted a timedelta or seconds, of more than zero",
        lambda bus: bus.create_batch(DOMAIN, debits(), expires_in=0),
    ),
    "an expiry before it may start": (
        "would expire before it may start; wanted an earlier run_at, or a longer expires_in",
        lambda bus: bus.create_batch(DOMAIN, debits(run_at=TOMORROW), expires_in=timedelta(hours=1)),
    ),
    "a canary larger than its batch": (
        "/canary/size: found 11, but the batch has 10 commands; wanted no more than that",
        lambda bus: bus.create_batch(DOMAIN, debits(), canary=Canary(11)),
    ),
    "a canary of nothing": (
        "/canary/size: found 0, wanted a whole number from 1",
        lambda bus: bus.create_batch(DOMAIN, debits(), canary=Canary(0)),
    ),
    "a budget of nothing": (
        "/budget/share: found 0, wanted a share of more than 0 and at most 1",
        lambda bus: bus.create_batch(DOMAIN, debits(), budget=FailureBudget(0)),
    ),
    "a budget of more than all": (
        "/budget/share: found 1.5, wanted a share of more than 0 and at most 1",
        lambda bus: bus.create_batch(DOMAIN, debits(), budget=FailureBudget(1.5)),
    ),
    "a budget that is a number": (
        "/budget: found 0.02, wanted a FailureBudget",
        lambda bus: bus.create_batch(DOMAIN, debits(), budget=0.02),  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("what", WRONG)
async def test_what_is_wrong_about_a_batch_is_refused_before_anything_is_written(
    face: str, dsn: str, settings: Settings, database: Database, what: str
) -> None:
    said, call = WRONG[what]
    before = database.everything()
    async with bus_of(face, dsn, settings=settings) as bus:
        with pytest.raises(InvalidCommandError, match=said):
            await call(bus)
    assert database.everything() == before


@pytest.mark.parametrize("face", FACES)
def test_limits_of_nothing_and_different_limits_of_one_name_are_refused(face: str) -> None:
    kind: Any = CommandBus if face == "async" else SyncCommandBus
    bus = kind("postgresql://nowhere")
    for limit, said in ((ConcurrencyLimit, "calls must be a whole number from 1"), (RateLimit, "found 0")):
        with pytest.raises(ValueError, match=said):
            limit(0)

    async def call(command: Command, ctx: HandlerContext) -> None: ...

    bus.handler("crm", "Push", concurrency_limit=ConcurrencyLimit(2, name="crm"))(call)
    bus.handler("crm", "Read", rate_limit=RateLimit(2, name="reads"))(call)
    with pytest.raises(InvalidOperationError, match="'crm' allows 2 calls at a time for crm/Push, and 3 for crm/Get"):
        bus.handler("crm", "Get", concurrency_limit=ConcurrencyLimit(3, name="crm"))(call)
    bus.handler("crm", "Find", rate_limit=RateLimit(2, name="reads", by=lambda command: 1))(call)
    said = "'reads' is 2 per 0:00:01, burst 1 for crm/Read, and 3 per 0:00:01, burst 1 for crm/List"
    with pytest.raises(InvalidOperationError, match=said):
        bus.handler("crm", "List", rate_limit=RateLimit(3, name="reads"))(call)
    assert (bus.handlers.find("crm", "Get"), bus.handlers.find("crm", "List")) == (None, None)


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no words for it")


KEYS: dict[str, Callable[[Command], object]] = {
    "None": lambda command: None,
    "without a repr": lambda command: Unspeakable(),
    "unhashable": lambda command: {},
    "10 kB": lambda command: "x" * 10_000,
    "raises": lambda command: command.data["missing"],
}


@pytest.mark.parametrize(
    ("limit", "kind"),
    [(ConcurrencyLimit, kind) for kind in KEYS] + [(RateLimit, kind) for kind in KEYS if kind != "None"],
)
async def test_a_key_that_cannot_be_one_parks_its_command_alone(
    bus: CommandBus, given: Given, limit: type[ConcurrencyLimit] | type[RateLimit], kind: str
) -> None:
    """For a rate limit None is a key: all such calls share one limit"""

    def by(command: Command) -> object:
        return KEYS[kind](command) if command.data["n"] == 3 else command.data["n"]

    option: Any = {"concurrency_limit" if limit is ConcurrencyLimit else "rate_limit": limit(1000, by=by)}
    seen = given.handler(**option)
    batch_id = await bus.create_batch(DOMAIN, debits())
    await given.drained()
    assert sorted(command.data["n"] for command in seen) == [n for n in range(10) if n != 3]
    batch = await given.batch_now(batch_id)
    assert (batch.completed_count, batch.in_troubleshooting_count) == (9, 1)
    [item] = await bus.troubleshooting.list(DOMAIN)
    assert item.data == {"n": 3}
    assert item.last_error_message is not None
    assert ("missing" if kind == "raises" else "wanted text of at most 512 bytes") in item.last_error_message


@pytest.mark.parametrize("kind", ["unhashable", "raises"])
async def test_a_key_that_no_chunk_can_have_parks_its_command_alone(bus: CommandBus, given: Given, kind: str) -> None:
    seen: list[int] = []

    def by(command: Command) -> object:
        return KEYS[kind](command) if command.data["n"] == 3 else command.data["n"] % 2

    @bus.bulk_handler(DOMAIN, "Debit", size=5, by=by)
    async def handle(chunk: Chunk, ctx: ChunkContext) -> None:
        seen.extend(item.data["n"] for item in chunk.items)

    batch_id = await bus.create_batch(DOMAIN, debits(max_attempts=1))
    await given.drained()
    assert sorted(seen) == [n for n in range(10) if n != 3]
    batch = await given.batch_now(batch_id)
    assert (batch.completed_count, batch.in_troubleshooting_count) == (9, 1)
