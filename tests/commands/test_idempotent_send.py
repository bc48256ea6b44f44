"""A command_id is accepted once in its domain, for ever."""

from __future__ import annotations

import asyncio
from uuid import UUID, uuid4

import pytest

from busload import BatchCommand, CommandBus, DuplicateCommandError
from tests.given import DOMAIN, Given

pytestmark = pytest.mark.usefixtures("invariants")


async def test_a_sent_command_is_there_with_all_that_belongs_to_it(bus: CommandBus, given: Given) -> None:
    """The fact, its place and its audit in one statement; an id is made if none is given"""
    result = await bus.send(DOMAIN, "Debit", {"cents": 5})
    assert (result.created, result.command_id.version) == (True, 7)
    command = await given.command_now(result.command_id)
    assert (command.status, command.command_type, command.data) == ("PENDING", "Debit", {"cents": 5})
    assert [event.type for event in await bus.get_audit_trail(DOMAIN, result.command_id)] == ["SENT"]
    assert given.database.count("queue") == 1


async def test_the_same_id_again_is_refused_by_name_and_writes_nothing(bus: CommandBus, given: Given) -> None:
    """Waiting, running or finished; with the same data or other data"""
    given.handler()
    command_id = await given.sent(data={"cents": 5})
    for _ in ("waiting", "running", "finished"):
        before = given.database.everything()
        for data in ({"cents": 5}, {"cents": 6}):
            with pytest.raises(DuplicateCommandError, match=str(command_id)) as refused:
                await bus.send(DOMAIN, "Debit", data, command_id=command_id)
            assert (refused.value.domain, refused.value.command_ids) == (DOMAIN, (command_id,))
        assert given.database.everything() == before
        if given.database.count("queue"):
            leased = given.claimed()
        elif given.database.count("lease"):
            given.settled(leased)
    found = await given.command_now(command_id)
    assert (found.status, found.data) == ("COMPLETED", {"cents": 5})


async def test_the_same_id_in_another_domain_is_another_command(bus: CommandBus, given: Given) -> None:
    command_id = await given.sent()
    assert (await bus.send("crm", "Debit", command_id=command_id)).command_id == command_id


async def test_many_are_sent_all_or_none(bus: CommandBus, given: Given) -> None:
    """Against the table and inside the list; every duplicate is named"""
    taken = [await given.sent() for _ in range(2)]
    twice = uuid4()
    before = given.database.everything()
    with pytest.raises(DuplicateCommandError) as refused:
        await bus.send_many(DOMAIN, [BatchCommand("Debit", id) for id in (uuid4(), taken[0], uuid4(), taken[1])])
    assert set(refused.value.command_ids) == set(taken)
    with pytest.raises(DuplicateCommandError) as refused:
        await bus.send_many(DOMAIN, [BatchCommand("Debit", id) for id in (twice, uuid4(), twice)])
    assert refused.value.command_ids == (twice,)
    assert given.database.everything() == before


async def test_results_come_in_the_order_of_the_input(bus: CommandBus, given: Given) -> None:
    """Though different priorities travel apart"""
    ids: list[UUID | None] = [uuid4() if n % 2 else None for n in range(20)]
    results = await bus.send_many(DOMAIN, [BatchCommand("Debit", id, n, priority=n % 3) for n, id in enumerate(ids)])
    assert all(result.created for result in results)
    assert [id for id in ids if id] == [r.command_id for r, id in zip(results, ids, strict=True) if id]
    for n, result in enumerate(results):
        assert (await given.command_now(result.command_id)).data == n
    assert await bus.send_many(DOMAIN, []) == []


async def test_one_of_many_senders_at_once_is_accepted(bus: CommandBus, given: Given) -> None:
    """Decided by a constraint, not by a look"""
    command_id = uuid4()
    outcomes = await asyncio.gather(
        *(bus.send(DOMAIN, "Debit", command_id=command_id) for _ in range(6)),
        *(bus.send_many(DOMAIN, [BatchCommand("Debit", command_id)]) for _ in range(3)),
        return_exceptions=True,
    )
    refused = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert len(refused) == 8
    assert {type(error) for error in refused} == {DuplicateCommandError}
    assert given.database.count("command") == 1


async def test_one_statement_notifies_once(bus: CommandBus, given: Given) -> None:
    """2,500 commands, one notification for their domain"""
    async with bus.pool.connection() as conn:
        await conn.execute("LISTEN busload_ready")
        await bus.send_many(DOMAIN, [BatchCommand("Debit") for _ in range(2500)])
        await bus.send("crm", "Debit")
        heard = []
        async for notification in conn.notifies(timeout=5, stop_after=2):
            heard.append(notification.payload)
        await conn.execute("UNLISTEN *")
    assert heard == [DOMAIN, "crm"]
