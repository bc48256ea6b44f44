"""What is accepted comes back exactly, through every way in and to the handler."""

from __future__ import annotations

from typing import Any

import pytest

from busload import BatchCommand, CommandBus
from tests.given import DOMAIN, Given

pytestmark = pytest.mark.usefixtures("invariants")

VALUES: list[Any] = [
    None, [], {}, "", 0, False, True,  # empty values
    2**63, 2**64, -(2**63) - 1, 10**4299,  # beyond 64 bits
    0.1, 1.0, 5e-324, 1e22, 1.7976931348623157e308,  # floats
    "\\u0000", {"\\u0000": "\\\\u0000"},  # an escape as literal text
    "\ufffe\uffff", "\ue000", "👩‍👩‍👧", "e\u0301", "é", "\U0010ffff", "\u202eabc\u2066",  # every plane, both directions
    "<script>", "\x1b[31m\r\n\t\x7f", {"ключ": ["значение", {"": None}]},  # markup and control characters
]  # fmt: skip


async def test_data_comes_back_exactly_from_every_way_in(bus: CommandBus, given: Given) -> None:
    """One by one, in bulk, in a batch, streamed"""
    seen = given.handler()
    for value in VALUES:
        await given.sent(data=value)
    await bus.send_many(DOMAIN, [BatchCommand("Debit", data=value) for value in VALUES])
    batch_id = await bus.create_batch(DOMAIN, [BatchCommand("Debit", data=value) for value in VALUES])
    async with bus.open_batch(DOMAIN) as batch:
        for value in VALUES:
            await batch.add("Debit", value)
    stored = [command.data for command in await bus.list_batch_commands(DOMAIN, batch_id)]
    assert [repr(value) for value in stored] == [repr(value) for value in VALUES]

    await given.drained(concurrency=1)

    for owner, times in ((None, 2), (batch_id, 1), (batch.batch_id, 1)):  # these take turns
        came = [repr(command.data) for command in seen if command.batch_id == owner]
        assert came == [repr(value) for value in VALUES] * times


async def test_names_keys_and_texts_come_back_as_they_were(bus: CommandBus, given: Given) -> None:
    """What is free text is not normalised"""
    for text in ("e\u0301", "é", "<b>7</b>", "\u202e", "a:b", "'; DROP TABLE command; --", "x" * 255):
        batch_id = await bus.create_batch(
            DOMAIN, [BatchCommand("Debit", task_key=text)], name=text, custom_data={text: text}
        )
        batch = await given.batch_now(batch_id)
        assert (batch.name, batch.custom_data) == (text, {text: text})
        [command] = await bus.list_batch_commands(DOMAIN, batch_id)
        assert command.task_key == text
        await bus.cancel_batch(DOMAIN, batch_id, reason=text, operator=text)
        canceled = (await bus.get_audit_trail(DOMAIN, command.command_id))[-1]
        assert (canceled.operator, canceled.details) == (text, {"reason": text})
    for name in ("a", "A", "a-b_c.d9", "x" * 255):
        assert (await bus.send(name, name)).created
