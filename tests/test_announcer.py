"""Loads become messages, and each command's message has a fate that is known."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from busload import BatchCommand, CommandBus
from busload.announcer import Announcer, pause
from busload.domain import message
from busload.errors import Refusal, RefusalReason, TransportMisconfigured, TransportUnavailable
from busload.store.outbox import Piece, Unannounced
from busload.transport import Message
from tests.brokers.faulty import FaultyTransport
from tests.given import DOMAIN, Database

LOADS = [Unannounced(1024, 1024 + 249, DOMAIN, None, 0), Unannounced(4096, 4096 + 9, DOMAIN, None, 2)]


@pytest.fixture
async def transport(dsn: str) -> AsyncIterator[FaultyTransport]:
    transport = FaultyTransport(dsn)
    yield transport
    await transport.aclose()


def announcer(transport: FaultyTransport, bus: CommandBus, **options: Any) -> Announcer:
    return Announcer(transport, bus._perform_alone, **{"prefix": "busload", "envelope_size": 100, **options})


def refusing(*indexes: int, reason: RefusalReason = RefusalReason.REFUSED) -> Callable[[int, Message], Refusal | None]:
    return lambda index, message: Refusal(reason, "no") if index in indexes else None


async def test_what_was_confirmed_is_told_by_load(transport: FaultyTransport, bus: CommandBus) -> None:
    one = announcer(transport, bus)
    assert await one.announce(LOADS) == [Piece(1024, 1273), Piece(4096, 4105)]
    assert [each.id for each in transport.confirmed] == ["1024-1123-0", "1124-1223-0", "1224-4105-0"]
    assert {each.queue for each in transport.confirmed} == {f"busload.{DOMAIN}"}
    assert (one.messages, one.confirmed, one.refused.total()) == (3, 3, 0)


async def test_only_commands_of_refused_messages_wait_for_another_round(
    transport: FaultyTransport, bus: CommandBus
) -> None:
    """S1-D5, F52."""
    transport.refuses = refusing(1)
    one = announcer(transport, bus)
    pieces = await one.announce(LOADS)
    assert [(piece.lo, piece.hi, piece.reason) for piece in pieces] == [
        (1024, 1123, None),
        (1124, 1223, "REFUSED"),
        (1224, 1273, None),
        (4096, 4105, None),
    ]
    assert (one.messages, one.confirmed, dict(one.refused)) == (3, 2, {"REFUSED": 1})


async def test_a_later_message_of_the_same_commands_is_another_one_only_if_it_rings_again(
    transport: FaultyTransport, bus: CommandBus
) -> None:
    """A broker that drops repetitions must drop the one after a lost confirm, and must not drop the second ring."""
    one = announcer(transport, bus)
    await one.announce(LOADS[1:])
    await one.announce(LOADS[1:])
    await one.announce(LOADS[1:], again=True)
    assert [each.id for each in transport.confirmed] == ["4096-4105-0", "4096-4105-0", "4096-4105-2"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TransportUnavailable("away"), "UNREACHABLE"),
        (TimeoutError(), "UNREACHABLE"),
        (ConnectionResetError("reset"), "UNREACHABLE"),
        (TransportMisconfigured("no right"), "REFUSED"),
        (KeyError("a fault of the adapter"), "REFUSED"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
async def test_announcing_never_fails(
    transport: FaultyTransport, bus: CommandBus, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    async def fail(queues: Sequence[str]) -> None:
        raise error

    monkeypatch.setattr(transport, "declare", fail)
    pieces = await announcer(transport, bus).announce(LOADS)
    assert [(piece.lo, piece.hi, piece.reason) for piece in pieces] == [(1024, 1273, reason), (4096, 4105, reason)]
    assert all(piece.error and piece.pause > 0 for piece in pieces)


async def test_queues_are_declared_once_and_again_after_one_was_removed(
    transport: FaultyTransport, bus: CommandBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F53: an unroutable message is reported, and the next round makes its queue again."""
    declared: list[str] = []

    async def note(queues: Sequence[str]) -> None:
        declared.extend(queues)

    monkeypatch.setattr(transport, "declare", note)
    one = announcer(transport, bus)
    await one.announce(LOADS)
    await one.announce(LOADS)
    assert declared == [f"busload.{DOMAIN}"]
    transport.refuses = refusing(0, reason=RefusalReason.UNROUTABLE)
    assert (await one.announce(LOADS))[0].reason == "UNROUTABLE"
    await one.announce(LOADS)
    assert declared == [f"busload.{DOMAIN}"] * 2


async def test_for_foreign_readers_each_command_has_a_message_of_its_own(
    transport: FaultyTransport, bus: CommandBus, database: Database
) -> None:
    """S1-51."""
    batch_id = await bus.create_batch(DOMAIN, [BatchCommand("Debit", data={"n": n}) for n in range(3)], name="b")
    [(lo, hi)] = database.rows("SELECT min(id), max(id) FROM busload.command")
    transport.refuses = refusing(1)
    one = announcer(transport, bus, message_per_command=True, key=b"k")

    pieces = await one.announce([Unannounced(lo, hi, DOMAIN, batch_id, 0)])

    assert [(piece.lo - lo, piece.hi - lo, piece.reason) for piece in pieces] == [
        (0, 0, None),
        (1, 1, "REFUSED"),
        (2, 2, None),
    ]
    said = [json.loads(each.body) for each in transport.tried]
    assert [(one["task_type"], one["parameters"], one["batch_id"]) for one in said] == [
        ("Debit", {"n": n}, str(batch_id)) for n in range(3)
    ]
    assert [message.read(each.body, b"k").ranges for each in transport.tried] == [
        ((id, id),) for id in range(lo, hi + 1)
    ]


def test_rounds_are_spread_out_and_never_given_up() -> None:
    """S1-11: the pause doubles up to five minutes, and a broker that asks for more time gets it."""
    for rounds, middle in [(0, 1), (1, 2), (4, 16), (9, 300), (100_000, 300)]:
        assert 0.8 * middle <= pause(rounds) <= 1.2 * middle
    assert pause(0, asked=30.0) == 30.0
    assert pause(9, asked=1.0) >= 240
