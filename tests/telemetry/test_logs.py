"""Log lines of handlers: each says which command it is about, wherever in a handler it is written."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from busload import (
    BatchCommand,
    Chunk,
    ChunkContext,
    Command,
    CommandBus,
    HandlerContext,
    RetryPolicy,
    Settings,
    SyncHandlerContext,
    WorkerSettings,
)
from busload.telemetry.logs import CommandFields, JsonLines, TextLines
from tests.given import DOMAIN, Database, Given
from tests.telemetry.conftest import Telemetry

pytestmark = pytest.mark.usefixtures("invariants")

application = logging.getLogger("some.application")
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


class Kept(logging.Handler):
    """Keeps each line as JSON has it, and as text."""

    def __init__(self) -> None:
        super().__init__()
        self.addFilter(CommandFields())
        self.lines: list[dict[str, Any]] = []
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(JsonLines().format(record)))
        self.texts.append(TextLines().format(record))

    def said(self, message: str) -> dict[str, Any]:
        """The fields of the line with this message."""
        [line] = [line for line in self.lines if line["message"] == message]
        return {name: line[name] for name in CommandFields.NAMES if name in line}


@pytest.fixture
def logs() -> Iterator[Kept]:
    kept, root = Kept(), logging.getLogger()
    root.addHandler(kept)
    application.setLevel(logging.INFO)
    yield kept
    root.removeHandler(kept)


@pytest.fixture
async def bus(dsn: str, settings: Settings) -> Any:
    """Without OpenTelemetry."""
    async with CommandBus(dsn, settings=settings) as bus:
        yield bus


async def test_every_line_of_a_handler_says_which_command_it_is_about(
    bus: CommandBus, given: Given, logs: Kept
) -> None:
    """After an await, in a task of its own, in a thread of its own, in a `def` handler, with a time limit"""

    async def debit(command: Command, ctx: HandlerContext) -> None:
        application.info("before %s", command.data)
        await asyncio.sleep(0)
        application.info("after %s", command.data)

        async def below() -> None:
            application.info("task %s", command.data)

        await asyncio.gather(below(), asyncio.to_thread(application.info, "thread %s", command.data))

    def threaded(command: Command, ctx: SyncHandlerContext) -> None:
        application.info("threaded")

    async def timed(command: Command, ctx: HandlerContext) -> None:
        application.info("timed")

    bus.handler(DOMAIN, "Debit")(debit)
    bus.handler(DOMAIN, "Threaded")(threaded)
    bus.handler(DOMAIN, "Timed", timeout=30)(timed)
    headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    batch_id = await bus.create_batch(DOMAIN, [BatchCommand("Debit", data=n, task_key=f"t{n}") for n in range(20)])
    single, other = [await given.sent(kind, headers=headers) for kind in ("Threaded", "Timed")]
    application.info("outside")
    await given.drained(concurrency=4)

    for one in await bus.list_batch_commands(DOMAIN, batch_id):
        wanted = {
            "command_id": str(one.command_id),
            "command_type": "Debit",
            "domain": DOMAIN,
            "batch_id": str(batch_id),
            "task_key": f"t{one.data}",
            "attempt": 1,
            "execution_id": str(one.execution_id),
        }
        for where in ("before", "after", "task", "thread"):
            assert logs.said(f"{where} {one.data}") == wanted
    for command_id, kind in ((single, "Threaded"), (other, "Timed")):
        said = logs.said(kind.lower())
        assert (said["command_id"], said["trace_id"]) == (str(command_id), TRACE)
        assert "batch_id" not in said and "task_key" not in said
    assert logs.said("outside") == {}


async def test_a_retry_says_its_attempt_and_a_chunk_what_its_commands_share(
    bus: CommandBus, given: Given, logs: Kept
) -> None:
    @bus.handler(DOMAIN, "Debit", retry=RetryPolicy(max_attempts=2, backoff=(0,)))
    async def debit(command: Command, ctx: HandlerContext) -> None:
        application.info("attempt %d", ctx.attempt)
        if ctx.attempt == 1:
            raise ValueError

    @bus.bulk_handler(DOMAIN, "Bulk", size=3, max_wait=5)
    async def bulk(chunk: Chunk, ctx: ChunkContext) -> None:
        application.info("chunk")

    batch_id = await bus.create_batch(DOMAIN, [BatchCommand("Bulk") for _ in range(3)])
    await given.sent()
    await given.drained()
    assert [logs.said(f"attempt {n}")["attempt"] for n in (1, 2)] == [1, 2]
    about = {"command_type": "Bulk", "domain": DOMAIN, "batch_id": str(batch_id), "attempt": 1, "commands": 3}
    assert logs.said("chunk") == about


async def test_what_the_worker_itself_logs_later_is_not_about_the_command_that_ran_first(
    bus: CommandBus, given: Given, logs: Kept, database: Database
) -> None:
    taken: list[object] = []

    @bus.handler(DOMAIN, "Debit")
    async def debit(command: Command, ctx: HandlerContext) -> None:
        if ctx.attempt == 1 and not taken:
            taken.append(database.take_over())  # its result comes too late

    await given.sent()
    await given.drained()
    [late] = [line for line in logs.lines if line["message"].startswith("Did not count")]
    assert "command_id" not in late


async def test_the_trace_id_is_that_of_the_handlers_span(
    dsn: str, settings: Settings, worker_settings: WorkerSettings, database: Database, telemetry: Telemetry, logs: Kept
) -> None:
    async with CommandBus(dsn, settings=telemetry.settings(settings)) as bus:

        @bus.handler(DOMAIN, "Debit")
        async def debit(command: Command, ctx: HandlerContext) -> None:
            application.info("here")

        await bus.create_batch(DOMAIN, [BatchCommand("Debit")])
        await Given(bus, database, worker_settings).drained()
    span = telemetry.span(f"process {DOMAIN}")
    assert logs.said("here")["trace_id"] == f"{span.context.trace_id:032x}"


async def test_a_line_of_text_ends_with_the_fields_and_cannot_be_forged(
    bus: CommandBus, given: Given, logs: Kept
) -> None:
    @bus.handler(DOMAIN, "Debit")
    async def debit(command: Command, ctx: HandlerContext) -> None:
        application.info("text", extra={"attempt": 7})

    command_id = await given.sent(task_key="a b]\nERROR attempt=9")
    await given.drained()
    [text] = [text for text in logs.texts if "some.application: text" in text]
    fields = f"[command_id={command_id} command_type=Debit domain={DOMAIN} task_key='a b]\\nERROR attempt=9' attempt=7"
    assert f"text  {fields} execution_id=" in text and "\n" not in text


@pytest.mark.parametrize("traceparent", ["", "nonsense", f"00-{'0' * 32}-00f067aa0ba902b7-01", "00-xyz"])
async def test_a_trace_that_other_hands_wrote_and_that_is_none_is_left_out(
    bus: CommandBus, given: Given, logs: Kept, traceparent: str
) -> None:
    @bus.handler(DOMAIN, "Debit")
    async def debit(command: Command, ctx: HandlerContext) -> None:
        application.info("here")

    await given.sent(headers={"traceparent": traceparent})
    await given.drained()
    assert "trace_id" not in logs.said("here")
