"""What handlers return is kept as JSON, and finished work is never done twice for the sake of its result."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from busload import Chunk, ChunkContext, Command, CommandBus, HandlerContext, SyncHandlerContext
from tests.given import DOMAIN, Database, Given

AT = datetime(2026, 11, 17, 8, 30, tzinfo=UTC)


@dataclass
class Receipt:
    id: UUID
    at: datetime


class Session:
    pass


RECEIPT = {"id": str(UUID(int=7)), "at": "2026-11-17T08:30:00Z"}


@pytest.mark.parametrize("kind", ["async", "def", "chunk"])
async def test_a_result_of_common_types_completes_its_command(bus: CommandBus, given: Given, kind: str) -> None:
    if kind == "async":

        @bus.handler(DOMAIN, "Debit")
        async def debit(command: Command, ctx: HandlerContext) -> Receipt:
            return Receipt(UUID(int=7), AT)

    elif kind == "def":

        @bus.handler(DOMAIN, "Debit")
        def debit_in_thread(command: Command, ctx: SyncHandlerContext) -> Receipt:
            return Receipt(UUID(int=7), AT)

    else:

        @bus.bulk_handler(DOMAIN, "Debit", max_wait=0)
        async def debit_all(chunk: Chunk, ctx: ChunkContext) -> Receipt:
            return Receipt(UUID(int=7), AT)

    command_id = await given.sent()
    await given.drained()
    command = await given.command_now(command_id)
    assert (command.status, command.result) == ("COMPLETED", RECEIPT)


@pytest.mark.parametrize("kind", ["async", "def", "chunk"])
async def test_finished_work_is_completed_though_its_result_has_no_json_form(
    bus: CommandBus, given: Given, database: Database, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[int] = []

    if kind == "async":

        @bus.handler(DOMAIN, "Debit")
        async def debit(command: Command, ctx: HandlerContext) -> Any:
            ran.append(1)
            return Session()

    elif kind == "def":

        @bus.handler(DOMAIN, "Debit")
        def debit_in_thread(command: Command, ctx: SyncHandlerContext) -> Any:
            ran.append(1)
            return Session()

    else:

        @bus.bulk_handler(DOMAIN, "Debit", max_wait=0)
        async def debit_all(chunk: Chunk, ctx: ChunkContext) -> Any:
            ran.extend(1 for _ in chunk)
            return Session()

    batch_id = await given.batch(commands=20)
    await given.drained()
    given.make_due()
    await given.drained()
    assert len(ran) == 20
    found = await bus.list_batch_commands(DOMAIN, batch_id)
    assert {command.status for command in found} == {"COMPLETED"}
    [note] = found[0].result.items()
    assert note[0] == "result_not_kept"
    assert "Session, which has no JSON form. Return None, or a dict" in note[1]
    first, rest = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "returned what cannot be kept: completed without a result. The handler returned" in first.getMessage()
    assert "and 19 more like this" in rest.getMessage()
    database.check_invariants()


async def test_a_result_that_cannot_be_stored_is_logged(given: Given, caplog: pytest.LogCaptureFixture) -> None:
    async def answer(command: Command, ctx: HandlerContext) -> str:
        return "a\0"

    given.handler("Debit", answer)
    await given.sent()
    await given.drained()
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "returned what cannot be kept: waits in troubleshooting (RESULT_INVALID). NUL_IN_JSON" in record.getMessage()


async def test_a_coroutine_that_nobody_awaits_is_no_finished_work(bus: CommandBus, given: Given) -> None:
    async def debit(command: Command, ctx: SyncHandlerContext) -> None: ...

    @bus.handler(DOMAIN, "Debit")
    def forgotten(command: Command, ctx: SyncHandlerContext) -> Any:
        return debit(command, ctx)

    await given.sent()
    await given.drained()
    [item] = await bus.troubleshooting.list(DOMAIN)
    assert (item.reason, item.last_error_code) == ("PERMANENT", "NOT_RUN")


async def test_a_handler_that_can_only_return_what_is_not_kept_is_refused_when_registered(bus: CommandBus) -> None:
    with pytest.raises(ValueError, match="is annotated to return Session, which has no JSON form"):

        @bus.handler(DOMAIN, "Debit")
        async def debit(command: Command, ctx: HandlerContext) -> Session:
            return Session()

    assert bus.handlers.find(DOMAIN, "Debit") is None
