"""What this worker cannot run, or what other hands wrote, waits visibly and holds nobody else up."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import pytest

from busload import BatchCommand, Command, CommandBus, HandlerContext, Worker
from busload.domain.execution import Lease
from busload.store import claim
from tests.given import DOMAIN, Given, counts


async def test_a_command_without_a_handler_waits_visibly_and_burns_no_attempt(
    bus: CommandBus, given: Given, caplog: pytest.LogCaptureFixture
) -> None:
    """S006, B51: its neighbours run; a worker that knows it takes it"""
    seen = given.handler("Debit")
    batch_id = await bus.create_batch(
        DOMAIN, [BatchCommand("Debit" if n % 3 else "Credit", data=n, max_attempts=1) for n in range(9)]
    )

    with caplog.at_level(logging.WARNING, logger="busload"):
        await given.drained()

    assert len(seen) == 6
    assert caplog.text.count("No handler for Credit in payments") == 1
    assert counts(await given.batch_now(batch_id)) == (9, 6, 0, 0, 0)
    waiting = await bus.list_batch_commands(DOMAIN, batch_id, status="SCHEDULED")
    assert [command.data for command in waiting] == [0, 3, 6]
    for command in waiting:
        assert (command.attempts, command.last_error_type) == (0, None)
        trail = await bus.get_audit_trail(DOMAIN, command.command_id)
        assert [event.type for event in trail] == ["SENT", "NO_HANDLER"]
        assert (trail[1].details, trail[1].batch_id) == ({"command_types": ["Credit"]}, batch_id)

    given.make_due()
    await given.drained()
    assert given.database.value("SELECT count(*) FROM busload.event WHERE type = 'NO_HANDLER'") == 3
    async with CommandBus(bus.dsn) as other:

        @other.handler(DOMAIN, "Credit")
        async def credit(command: Command, ctx: HandlerContext) -> None:
            assert ctx.attempt == 1

        given.make_due()
        await Worker(other).drain()
    assert (await given.batch_now(batch_id)).status == "COMPLETED"


UNDECODABLE = {
    "B13, nested 5,000 deep": "[" * 5000 + "]" * 5000,
    "B07, 5,000 digits": "1" * 5000,
    "B08a, a number beyond every double": "1e400",
    "B08b, an exponent bomb": "[" + ",".join(["1e131071"] * 1000) + "]",
    "B04, a lone surrogate": '"\\ud800"',
}


async def test_a_row_that_cannot_be_decoded_is_parked_alone_while_its_neighbours_run(
    bus: CommandBus, given: Given
) -> None:
    """B13, rule (e) of the catalogue: put in by other hands, in the middle of a load"""
    seen = given.handler()
    batch_id = await given.batch(commands=20)
    commands = await bus.list_batch_commands(DOMAIN, batch_id)
    bad: dict[UUID, str] = {}
    for command, (name, text) in zip(commands[3::3], UNDECODABLE.items(), strict=False):
        bad[command.command_id] = name
        given.database.rows(
            "UPDATE busload.command SET data = %s::text::json WHERE command_id = %s", text, command.command_id
        )

    await given.drained()

    assert len(seen) == 20 - len(bad)
    assert counts(await given.batch_now(batch_id)) == (20, 15, 0, 0, 5)
    items = await bus.troubleshooting.list(DOMAIN)
    assert {item.command_id for item in items} == bad.keys()
    for item in items:
        assert item.reason == "UNDECODABLE", bad[item.command_id]
        assert isinstance(item.data, str)  # shown as its text, cut
        assert len(item.data) <= 1000
    await bus.troubleshooting.cancel(DOMAIN, items[0].command_id, reason="garbage")
    assert (await given.command_now(items[0].command_id)).status == "CANCELED"


async def test_what_sql_put_in_runs_like_anything_else(given: Given) -> None:
    """S001: a load of one, with JSON null for no data"""
    seen = given.handler()
    given.database.rows(
        """WITH sent AS (INSERT INTO busload.command (id, domain, command_id, command_type)
                         VALUES (nextval('busload.load_number') * 1024, 'payments', gen_random_uuid(), 'Debit')
                         RETURNING id, domain)
           INSERT INTO busload.queue (lo, hi, domain) SELECT id, id, domain FROM sent"""
    )
    await given.drained()
    assert [command.data for command in seen] == [None]


async def test_a_place_without_a_command_disturbs_nobody(given: Given) -> None:
    """S004: a message without metadata is handled quietly"""
    seen = given.handler()
    given.database.rows("INSERT INTO busload.queue (lo, hi, domain) VALUES (1024000, 1024006, 'payments')")
    await given.sent()
    await given.drained()
    await given.drained()
    assert len(seen) == 1
    assert (given.database.count("queue"), given.database.count("lease")) == (0, 0)


async def test_a_finished_command_that_is_queued_again_is_not_counted_again(given: Given) -> None:
    """S004: a message of a terminal command is skipped"""
    given.handler()
    batch_id = await given.batch()
    await given.drained()
    given.database.rows(
        """INSERT INTO busload.queue (lo, hi, domain, batch_id)
           SELECT id, id, domain, batch_id FROM busload.command"""
    )
    await given.drained()
    batch = await given.batch_now(batch_id)
    assert (batch.status, counts(batch)) == ("COMPLETED", (1, 1, 0, 0, 0))
    given.database.rows("DELETE FROM busload.lease")


async def test_many_that_nobody_knows_are_given_back_together(
    bus: CommandBus, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second command of a batch is unknown, so each comes in a load and a lease of its own the second time"""
    given.handler("Known")
    types = ["Known", "Unknown"] * 200
    await bus.create_batch(DOMAIN, [BatchCommand(command_type) for command_type in types])
    assert await given.drained() == 200
    assert given.database.count("scheduled") == 200
    given.make_due()
    give_back, calls = claim.give_back, []

    def counted(parts: Mapping[Lease, Sequence[int]], **options: Any) -> Any:
        calls.append(len(parts))
        return give_back(parts, **options)

    monkeypatch.setattr(claim, "give_back", counted)
    assert await given.drained() == 0
    assert sum(calls) == 200 and len(calls) <= 4
    assert (given.database.count("scheduled"), given.database.count("lease")) == (200, 0)
    assert given.database.value("SELECT count(*) FROM busload.event WHERE type = 'NO_HANDLER'") == 200
    given.database.check_invariants()
