"""Which strategy publishes a batch, what is refused about it, and how the input of checkpoints is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from busload import BatchCommand, CommandBus, Dedup, InvalidCommandError, Settings, SyncCommandBus, WorkerSettings
from busload.commands import InputLimits
from busload.commands.check_commands import check_all
from busload.commands.command import NewCommand
from busload.commands.load import Load
from busload.dispatch import DispatchReport, DispatchStatus, Strategy, creation_state
from busload.dispatch.create_batch import MANY, Input, choose, decide
from busload.dispatch.outbox import Seen
from busload.dispatch.reconcile import Reconciliation, compared
from busload.errors import DispatchIncompleteError, InvalidOperationError, TransportMisconfiguredError
from tests.given import DOMAIN, Database

NOWHERE = "postgresql://ada:geheim@127.0.0.1:1/nowhere"


def command(n: int = 0) -> BatchCommand:
    return BatchCommand("Debit", data={"n": n})


@pytest.mark.parametrize(
    ("asked", "count", "expected"),
    [
        (None, 1, "two_phase"),
        (None, MANY, "two_phase"),
        (None, MANY + 1, "checkpoint"),
        ("optimistic", MANY + 1, "optimistic"),
        ("two_phase", MANY + 1, "two_phase"),
        ("checkpoint", 1, "checkpoint"),
    ],
)
@pytest.mark.parametrize("lazy", [False, True])
def test_the_number_of_commands_chooses_unless_somebody_does(
    asked: str | None, count: int, expected: str, lazy: bool
) -> None:
    """An iterator is read no further than that needs"""
    one, read = command(), 0

    def each() -> Iterator[BatchCommand]:
        nonlocal read
        for _ in range(count):
            read += 1
            yield one

    given = each() if lazy else [one] * count
    strategy, same = choose(None if asked is None else Strategy(asked), given)
    assert strategy == expected
    assert read == (0 if asked or not lazy else count)
    assert sum(1 for _ in same) == count


@pytest.mark.parametrize("lazy", [False, True])
def test_input_is_read_in_slices_from_where_it_is_needed(lazy: bool) -> None:
    firsts: list[int] = []

    def check(given: Sequence[BatchCommand], first: int) -> list[NewCommand]:
        firsts.append(first)
        return check_all(DOMAIN, given, InputLimits())

    sent = [command(n) for n in range(10)]
    given = Input(iter(sent) if lazy else sent, check)
    assert given.total == (None if lazy else 10)
    slices = []
    last = False
    while not last:
        found, last = given.read(4)
        assert given.read(4)[1] is last  # it does not move by itself
        slices.append([one.data for one in found])
        given.move_to(given.position + len(found))
    assert [len(one) for one in slices] == [4, 4, 2]
    assert [data for one in slices for data in one] == [f'{{"n":{n}}}' for n in range(10)]
    assert firsts == ([0, 0, 4, 4, 8, 8] if lazy else [0])
    assert given.ended

    given = Input(iter(sent) if lazy else sent, check)
    assert given.move_to(7) is sent[6]
    assert not given.ended
    assert (given.read(5)[1], given.position) == (True, 7)
    assert given.move_to(11) is None
    assert given.position == 10


@pytest.mark.parametrize(
    ("strategy", "confirmed", "refused", "more", "expected"),
    [
        ("two_phase", 5, 0, {}, "success"),
        ("two_phase", 4, 1, {}, "partial_success"),
        ("two_phase", 0, 5, {}, "partial_success"),
        ("two_phase", 5, 0, {"warning": True}, "success_with_warning"),
        ("two_phase", 4, 1, {"warning": True}, "partial_success"),
        ("optimistic", 4, 1, {}, "partial_success"),
        ("optimistic", 0, 5, {}, "failed_needs_recovery"),
        ("optimistic", 0, 0, {}, "success"),
        ("checkpoint", 5, 0, {"stopped": True}, "partial_success"),
        ("checkpoint", 5, 0, {"resumed": True}, "partial_success"),
    ],
)
def test_what_a_creation_came_to(
    strategy: str, confirmed: int, refused: int, more: dict[str, bool], expected: str
) -> None:
    how = {"stopped": False, "warning": False, "resumed": False} | more
    assert decide(Strategy(strategy), confirmed=confirmed, refused=refused, **how) == expected


def test_a_report_tells_what_is_missing() -> None:
    about: dict[str, Any] = {
        "batch_id": uuid4(),
        "transport": "nats",
        "strategy": Strategy.CHECKPOINT,
        "status": DispatchStatus.PARTIAL_SUCCESS,
        "checkpoints": (),
        "failed_checkpoint": None,
        "error": None,
        "warning": None,
        "rounds": 0,
        "insert_ms": None,
        "send_ms": None,
        "mark_ms": None,
        "total_ms": None,
        "created_at": datetime.now(UTC),
        "published_at": None,
    }
    for total, written, queued, expected in (
        (10, 10, 10, (0, 0, False, False)),
        (10, 8, 8, (2, 0, True, False)),
        (10, 10, 7, (0, 3, True, True)),
        (None, 8, 8, (None, 0, True, False)),
    ):
        told = DispatchReport(
            total_tasks=total, database_tasks=written, queued_tasks=queued, retry_needed=False, **about
        )
        assert (told.tasks_failed, told.retry_tasks, told.recovery_possible, told.recovery_scheduled) == expected


def test_both_sides_are_compared_by_load() -> None:
    """A message about a part of a load rings for as many of any part; what is beyond that is missing"""
    told = Reconciliation("nats", DOMAIN, "busload.payments", 0, None, looked_into=False)
    messages = [[Load(1024, 1123)], [Load(2048, 2050)], [Load(4096, 4100), Load(5120, 5121)]]
    seen = {
        1: Seen(exists=True, waits=True),
        2: Seen(exists=True, waits=False),
        4: Seen(exists=False, waits=False),
        5: Seen(exists=False, waits=False),
    }
    found, missing = compared(told, 4, messages, seen, [Load(1124, 1200), Load(3072, 3081)])
    assert missing == [(3072, 3081)]
    more, missing = compared(told, 4, messages, seen, [Load(1124, 1200), Load(1203, 1230)])
    assert (more.missing, missing) == (5, [(1226, 1230)])
    assert (found.looked_into, found.messages, found.answered, found.unknown) == (True, 4, 1, 2)
    assert found.missing == 10


async def test_what_makes_no_sense_is_refused_and_nothing_is_written(dsn: str, database: Database) -> None:
    before = database.everything()
    async with (
        CommandBus(dsn, transport=dsn) as bus,
        CommandBus(dsn) as plain,
        await psycopg.AsyncConnection.connect(dsn) as conn,
    ):
        with pytest.raises(InvalidCommandError, match="INVALID_OPTION at /publish_again_after"):
            await bus.recover(publish_again_after=5)  # type: ignore[arg-type]
        for options, why in (
            ({"dispatch": "eventually"}, "wanted one of two_phase, checkpoint, optimistic, relay"),
            ({"dispatch": 5}, "found 5, wanted one of"),
            ({"dispatch": "two_phase", "conn": conn}, "nothing is published before your commit"),
            ({"dispatch": "two_phase", "dedup": Dedup()}, "dedup= was given too"),
            ({"checkpoint_size": 0}, "wanted a whole number from 1"),
            ({"checkpoint_size": True}, "wanted a whole number from 1"),
            ({"checkpoint_size": 0, "dispatch": "checkpoint"}, "wanted a whole number from 1"),
            ({"checkpoint_size": 0, "dispatch": "relay"}, "wanted a whole number from 1"),
        ):
            with pytest.raises(InvalidCommandError, match=why):
                await bus.create_batch(DOMAIN, [command()], **options)
        for strategy in (None, "checkpoint", "relay"):
            with pytest.raises(InvalidCommandError, match="EMPTY_BATCH"):
                await bus.create_batch(DOMAIN, iter([]), dispatch=strategy)
            with pytest.raises(InvalidCommandError, match=r"INVALID_NAME at \[1\]"):
                await bus.create_batch(DOMAIN, iter([command(), BatchCommand("no name")]), dispatch=strategy)
        with pytest.raises(InvalidCommandError, match="this bus has no transport"):
            await plain.create_batch(DOMAIN, [command()], dispatch="two_phase")
        for call in (plain.recover(), plain.outbox.reconcile()):
            with pytest.raises(InvalidOperationError, match="has no transport"):
                await call
        assert await plain.get_dispatch(DOMAIN, uuid4()) is None
        with pytest.raises(InvalidCommandError, match="INVALID_NAME"):
            await bus.outbox.reroute(domain="no name")
        with pytest.raises(InvalidCommandError, match="INVALID_TEXT"):
            await bus.outbox.reroute(operator="")
        with pytest.raises(InvalidCommandError, match="INVALID_ID"):
            await bus.outbox.list(batch_id="7")  # type: ignore[arg-type]
    assert database.everything() == before


@pytest.mark.parametrize("face", [CommandBus, SyncCommandBus])
def test_a_bus_that_cannot_publish_is_not_made(face: type[CommandBus] | type[SyncCommandBus]) -> None:
    with pytest.raises(ValueError, match=r"dispatch must be one of two_phase, .* found 'later'"):
        face(NOWHERE, transport=NOWHERE, dispatch="later")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dispatch='optimistic' needs a transport"):
        face(NOWHERE, dispatch="optimistic")
    for settings, why in (
        (Settings(envelope_size=0), "envelope_size must be a whole number from 1 to 10000, found 0"),
        (Settings(envelope_size=True), "found True"),
        (Settings(queue_prefix="no good"), "queue_prefix must be a letter, .* found 'no good'"),
        (Settings(queue_prefix=""), "queue_prefix must be"),
        (Settings(message_per_command="no"), "message_per_command must be True or False, found 'no'"),  # type: ignore[arg-type]
        (Settings(message_key=""), "message_key must be a text that is not empty"),
        (Settings(message_key=b"geheim"), "message_key must be a text"),  # type: ignore[arg-type]
        (Settings(message_key="a b:geheim"), "message_key cannot be used. .* Wanted `secret`, `id:secret`"),
    ):
        with pytest.raises(TransportMisconfiguredError, match=why) as refused:
            face(NOWHERE, transport=NOWHERE, settings=settings)
        assert "geheim" not in str(refused.value)
    with pytest.raises(TransportMisconfiguredError, match="found the scheme 'carrier'") as refused:
        face(NOWHERE, transport="carrier://ada:geheim@pigeon")
    assert "geheim" not in str(refused.value)


async def test_a_broker_that_cannot_be_reached_does_not_keep_a_batch_from_being_accepted(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with CommandBus(dsn, transport=NOWHERE, dispatch="optimistic") as bus:
        batch_id = await bus.create_batch(DOMAIN, [command()])
        told = await bus.get_dispatch(DOMAIN, batch_id)
    assert told is not None and told.error is not None
    assert (told.strategy, told.status) == ("optimistic", "failed_needs_recovery")
    assert told.error.startswith("UNREACHABLE: ")
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "did not confirm 1 command of" in warnings[0]
    assert "geheim" not in told.error + caplog.text


async def test_what_was_given_up_does_not_count_as_published(dsn: str, database: Database) -> None:
    """Otherwise an alert on the share of published batches would miss those that never were"""
    async with CommandBus(dsn, transport=NOWHERE) as bus:
        with pytest.raises(DispatchIncompleteError) as stopped:
            await bus.create_batch(DOMAIN, [command(n) for n in range(5)], dispatch="checkpoint", checkpoint_size=2)
        await bus.cancel_batch(DOMAIN, stopped.value.batch_id, reason="no")
    assert database.perform(creation_state.close()) == 1
    assert database.rows("SELECT batches, published FROM busload.dispatch_daily") == [(1, 0)]


def test_recovery_runs_every_five_minutes_unless_told_otherwise() -> None:
    assert WorkerSettings().recover_every.total_seconds() == 300
