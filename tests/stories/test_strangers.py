"""What this worker cannot run, or what other hands wrote, waits visibly and holds nobody else up."""

from __future__ import annotations

import logging
from uuid import UUID

import pytest

from busload import BatchCommand, Command, CommandBus, HandlerContext, Worker
from tests.given import DOMAIN, Given, counts


async def test_a_command_without_a_handler_waits_visibly_and_burns_no_attempt(
    bus: CommandBus, given: Given, caplog: pytest.LogCaptureFixture
) -> None:
    """Its neighbours run; a worker that knows it takes it"""
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
    "nested 5,000 deep": "[" * 5000 + "]" * 5000,
    "5,000 digits": "1" * 5000,
    "a number beyond every double": "1e400",
    "an exponent bomb": "[" + ",".join(["1e131071"] * 1000) + "]",
    "a lone surrogate": '"\\ud800"',
}


async def test_a_row_that_cannot_be_decoded_is_parked_alone_while_its_neighbours_run(
    bus: CommandBus, given: Given
) -> None:
    """Another client wrote the rows, in the middle of a load."""
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
    """A load of one, with JSON null for no data"""
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
    """A message without metadata is handled quietly"""
    seen = given.handler()
    given.database.rows("INSERT INTO busload.queue (lo, hi, domain) VALUES (1024000, 1024006, 'payments')")
    await given.sent()
    await given.drained()
    await given.drained()
    assert len(seen) == 1
    assert (given.database.count("queue"), given.database.count("lease")) == (0, 0)


async def test_a_finished_command_that_is_queued_again_is_not_counted_again(given: Given) -> None:
    """A message of a terminal command is skipped"""
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


async def test_many_that_nobody_knows_are_given_back_together(bus: CommandBus, given: Given) -> None:
    """Every second command of a batch is unknown, so each comes in a load and a lease of its own the second time"""
    given.handler("Known")
    types = ["Known", "Unknown"] * 200
    await bus.create_batch(DOMAIN, [BatchCommand(command_type) for command_type in types])
    assert await given.drained() == 200
    assert given.database.count("scheduled") == 200
    given.make_due()
    given.database.rows("CREATE TABLE given_back (loads bigint)")
    given.database.rows(
        "CREATE FUNCTION count_loads() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN INSERT INTO public.given_back SELECT count(*) FROM moved HAVING count(*) > 0; RETURN NULL; END'"
    )
    given.database.rows(
        "CREATE TRIGGER count_loads AFTER INSERT ON busload.scheduled REFERENCING NEW TABLE AS moved"
        " EXECUTE FUNCTION count_loads()"
    )
    assert await given.drained() == 0
    [(statements, loads)] = given.database.rows("SELECT count(*), sum(loads) FROM given_back")
    assert loads == 200 and statements <= 4
    assert (given.database.count("scheduled"), given.database.count("lease")) == (200, 0)
    assert given.database.value("SELECT count(*) FROM busload.event WHERE type = 'NO_HANDLER'") == 200
    given.database.check_invariants()
