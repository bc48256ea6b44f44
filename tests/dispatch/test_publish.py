"""Loads become messages, and each command's message has a fate that is known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import psycopg
import pytest

from busload import BatchCommand, CommandBus
from busload.commands.load import Load
from busload.dispatch import envelope as message
from busload.dispatch.outbox import Piece, Unpublished
from busload.dispatch.publish import Publisher, UnresponsiveQueues, pause
from busload.errors import Refusal, RefusalReason, TransportMisconfiguredError, TransportUnavailableError
from busload.postgres.plan import Plan
from busload.settings import PayloadLimits
from busload.transports import Message
from tests.brokers.faulty import AWAY, FaultyTransport, forget_unresponsive
from tests.given import DOMAIN, Database

LOADS = [Unpublished(Load(1024, 1024 + 249), DOMAIN, None, 0), Unpublished(Load(4096, 4096 + 9), DOMAIN, None, 2)]


@pytest.fixture
async def transport(dsn: str) -> AsyncIterator[FaultyTransport]:
    transport = FaultyTransport(dsn)
    yield transport
    await transport.aclose()


def publisher(transport: FaultyTransport, bus: CommandBus, **options: Any) -> Publisher:
    return Publisher(transport, bus.database.in_transaction, **{"prefix": "busload", "envelope_size": 100, **options})


def refusing(*indexes: int, reason: RefusalReason = RefusalReason.REFUSED) -> Callable[[int, Message], Refusal | None]:
    return lambda index, message: Refusal(reason, "no") if index in indexes else None


async def test_confirmed_commands_are_reported_by_load(
    transport: FaultyTransport, bus: CommandBus, database: Database
) -> None:
    one = publisher(transport, bus)
    assert await one.publish(LOADS) == [Piece(Load(1024, 1273)), Piece(Load(4096, 4105))]
    ours = database.value("SELECT left(database::text, 8) FROM busload.identity")
    assert [each.id for each in transport.confirmed] == [
        f"{ours}-1024-1123-0",
        f"{ours}-1124-1223-0",
        f"{ours}-1224-4105-0-69563bd5622d",  # of the ranges: there is a gap
    ]
    assert {each.queue for each in transport.confirmed} == {f"busload.{DOMAIN}"}
    assert (one.messages, one.confirmed, one.refused.total()) == (3, 3, 0)


async def test_only_commands_of_refused_messages_wait_for_another_round(
    transport: FaultyTransport, bus: CommandBus
) -> None:
    transport.refuses = refusing(1)
    one = publisher(transport, bus)
    pieces = await one.publish(LOADS)
    assert [(*piece.load, piece.reason) for piece in pieces] == [
        (1024, 1123, None),
        (1124, 1223, "REFUSED"),
        (1224, 1273, None),
        (4096, 4105, None),
    ]
    assert (one.messages, one.confirmed, dict(one.refused)) == (3, 2, {"REFUSED": 1})


async def test_a_later_message_about_the_same_commands_has_another_id_only_if_it_is_published_again(
    transport: FaultyTransport, bus: CommandBus
) -> None:
    """A broker that drops repetitions must drop the one after a lost confirm, and must not drop the second ring."""
    one = publisher(transport, bus)
    await one.publish(LOADS[1:])
    await one.publish(LOADS[1:])
    await one.publish(LOADS[1:], again=True)
    ids = [each.id.partition("-")[2] for each in transport.confirmed]
    assert ids == ["4096-4105-0", "4096-4105-0", "4096-4105-2"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TransportUnavailableError("away"), "UNREACHABLE"),
        (TimeoutError(), "UNREACHABLE"),
        (ConnectionResetError("reset"), "UNREACHABLE"),
        (TransportMisconfiguredError("no right"), "REFUSED"),
        (KeyError("a fault of the adapter"), "REFUSED"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
async def test_publishing_never_fails(
    transport: FaultyTransport, bus: CommandBus, error: Exception, reason: str
) -> None:
    transport.unusable = lambda queue: error
    pieces = await publisher(transport, bus).publish(LOADS)
    assert [(*piece.load, piece.reason) for piece in pieces] == [(1024, 1273, reason), (4096, 4105, reason)]
    assert all(piece.error and piece.pause > 0 for piece in pieces)


async def test_queues_are_declared_once_and_again_after_one_was_removed(
    transport: FaultyTransport, bus: CommandBus
) -> None:
    """An unroutable message is reported, and the next round makes its queue again."""
    one = publisher(transport, bus)
    await one.publish(LOADS)
    await one.publish(LOADS)
    assert transport.declared == [f"busload.{DOMAIN}"]
    transport.refuses = refusing(0, reason=RefusalReason.UNROUTABLE)
    assert (await one.publish(LOADS))[0].reason == "UNROUTABLE"
    await one.publish(LOADS)
    assert transport.declared == [f"busload.{DOMAIN}"] * 2


async def test_for_foreign_readers_each_command_has_a_message_of_its_own(
    transport: FaultyTransport, bus: CommandBus, database: Database
) -> None:
    batch_id = await bus.create_batch(DOMAIN, [BatchCommand("Debit", data={"n": n}) for n in range(3)], name="b")
    [(lo, hi)] = database.rows("SELECT min(id), max(id) FROM busload.command")
    transport.refuses = refusing(1)
    one = publisher(transport, bus, message_per_command=True, key=b"k")

    pieces = await one.publish([Unpublished(Load(lo, hi), DOMAIN, batch_id, 0)])

    assert [(piece.load.lo - lo, piece.load.hi - lo, piece.reason) for piece in pieces] == [
        (0, 0, None),
        (1, 1, "REFUSED"),
        (2, 2, None),
    ]
    said = [json.loads(each.body) for each in transport.tried]
    assert [(one["task_type"], one["parameters"], one["batch_id"]) for one in said] == [
        ("Debit", {"n": n}, str(batch_id)) for n in range(3)
    ]
    assert [message.read(each.body, b"k").loads for each in transport.tried] == [
        ((id, id),) for id in range(lo, hi + 1)
    ]


async def test_messages_with_gaps_are_not_taken_for_each_other(
    transport: FaultyTransport, bus: CommandBus, database: Database
) -> None:
    """A broker that drops repetitions must keep both, though they begin and end alike."""
    single = {n: Unpublished(Load(1024 * n, 1024 * n), DOMAIN, None, 0) for n in (1, 2, 3, 5)}
    for numbers in ((1, 3, 5), (1, 2, 5), (5, 2, 1)):
        await publisher(transport, bus).publish([single[n] for n in numbers])
    assert database.count("message") == 2
    assert len({each.id for each in transport.confirmed}) == 2


async def test_two_databases_on_one_broker_do_not_repeat_each_other(
    transport: FaultyTransport, bus: CommandBus, database: Database
) -> None:
    """Their ids are alike, and a broker that drops repetitions must keep the messages of both."""
    await publisher(transport, bus).publish(LOADS[1:])
    await publisher(transport, bus).publish(LOADS[1:])
    assert database.count("message") == 1
    database.rows("UPDATE busload.identity SET database = gen_random_uuid()")
    await publisher(transport, bus).publish(LOADS[1:])
    assert database.count("message") == 2


async def test_a_queue_that_cannot_be_used_refuses_only_its_own_messages(
    transport: FaultyTransport, bus: CommandBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried once per page, however many slices that has."""
    monkeypatch.setattr("busload.dispatch.publish.MOST_MESSAGES", 2)
    wrong = TransportMisconfiguredError("of another kind")
    transport.unusable = lambda queue: wrong if queue == "busload.bad" else None
    loads = [Unpublished(Load(1024 * n, 1024 * n + 249), ("bad", "good", "zeal")[n % 3], None, 0) for n in range(6)]
    pieces = await publisher(transport, bus).publish(loads)

    assert [(piece.load.number, piece.reason) for piece in pieces] == [
        (n, "REFUSED" if n % 3 == 0 else None) for n in range(6)
    ]
    assert {piece.error for piece in pieces if piece.reason} == {"of another kind"}
    assert sorted(transport.declared) == ["busload.bad", "busload.good", "busload.zeal"]
    assert {each.queue for each in transport.tried} == {"busload.good", "busload.zeal"}


@pytest.mark.parametrize(
    ("fails", "slice", "messages"), [("declare", 1, 1), ("declare", 1000, 1), ("publish", 1, 1), ("publish", 1000, 5)]
)
async def test_a_queue_that_does_not_answer_refuses_only_its_own_messages(
    transport: FaultyTransport,
    bus: CommandBus,
    monkeypatch: pytest.MonkeyPatch,
    fails: str,
    slice: int,
    messages: int,
) -> None:
    """One without a leader, say. It is tried once per page, also if the first slice is all its own."""
    monkeypatch.setattr("busload.dispatch.publish.MOST_MESSAGES", slice)
    if fails == "declare":
        silent = TransportUnavailableError("no leader")
        transport.unusable = lambda queue: silent if queue == "busload.bad" else None
    else:
        refusal = Refusal(RefusalReason.UNREACHABLE, "no leader")
        transport.refuses = lambda index, message: refusal if message.queue == "busload.bad" else None
    loads = [Unpublished(Load(1024 * n, 1024 * n + 249), ("bad", "good", "zeal")[n % 3], None, 0) for n in range(6)]
    pieces = await publisher(transport, bus).publish(loads)

    assert [(piece.load.number, piece.reason) for piece in pieces] == [
        (n, "UNREACHABLE" if n % 3 == 0 else None) for n in range(6)
    ]
    assert {piece.error for piece in pieces if piece.reason} == {"no leader"}
    tried = transport.declared if fails == "declare" else [message.queue for message in transport.tried]
    assert tried.count("busload.bad") == messages


async def test_a_queue_that_is_silent_while_others_answer_is_left_alone_for_a_while(
    transport: FaultyTransport, bus: CommandBus
) -> None:
    """To wait for it takes seconds each time, which are the others' too."""
    bad, good = Unpublished(Load(1024, 1024), "bad", None, 0), Unpublished(Load(2048, 2048), "good", None, 0)
    one = publisher(transport, bus)

    async def tries() -> int:
        before = len(transport.tried)
        [piece] = await one.publish([bad])
        assert piece.reason == "UNREACHABLE" and piece.error == "nobody answers"
        return len(transport.tried) - before

    transport.refuses = lambda index, message: AWAY if message.queue == "busload.bad" else None
    assert [await tries(), await tries()] == [1, 1]  # the broker may be away
    assert not one.is_stuck("bad")
    await one.publish([bad, good])
    assert (one.is_stuck("bad"), one.is_stuck("good"), await tries()) == (True, False, 0)
    assert one.left_alone == ["bad"]
    forget_unresponsive(one)
    assert [await tries(), await tries()] == [1, 0]
    transport.mend()
    forget_unresponsive(one)
    assert (one.left_alone, one.recovered()) == ([], False)
    assert await one.publish([bad]) == [Piece(Load(1024, 1024))]
    assert (one.is_stuck("bad"), one.recovered(), one.recovered()) == (False, True, False)


def test_how_long_a_silent_queue_is_left_alone() -> None:
    """Growing, a minute at most; what was long ago does not count."""
    now = 1000.0
    queues = UnresponsiveQueues(clock=lambda: now)
    queues.learn([], {"bad": AWAY}, began=now)
    assert not queues.left_alone()
    assert not queues.learn(["good"], {}, began=now)
    for longest in (1, 2, 4, 8, 16, 32, 60, 60, 60):
        queues.learn([], {"bad": AWAY}, began=now)
        assert queues.left_alone() == {"bad": AWAY}
        now += 0.7 * longest
        assert queues.left_alone()
        now += 0.6 * longest
        assert not queues.left_alone()
    now += 121
    queues.learn([], {"bad": AWAY}, began=now)
    assert (queues.left_alone(), queues.is_stuck("bad")) == ({}, False)


@pytest.mark.parametrize(
    ("options", "page"),
    [({}, 100), ({"envelope_size": 1}, 20), ({"message_per_command": True}, 20), ({"envelope_size": 1000}, 100)],
    ids=str,
)
async def test_a_page_has_no_more_messages_than_a_broker_takes_in_time(
    transport: FaultyTransport, bus: CommandBus, options: dict[str, Any], page: int
) -> None:
    """What is left of it when its time is over would be taken for refused."""
    assert publisher(transport, bus, **options).page == page


async def test_very_many_messages_are_published_in_slices(
    transport: FaultyTransport, bus: CommandBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No single call may take longer than a transport allows itself."""
    sizes = transport.sizes
    loads = [Unpublished(Load(1024 * n, 1024 * n + 999), DOMAIN, None, 0) for n in range(3)]
    transport.refuses = refusing(1)
    pieces = await publisher(transport, bus, envelope_size=1).publish(loads)
    assert sizes == [1000, 1000, 1000]
    assert [(piece.load.lo % 1024, piece.load.hi % 1024, piece.reason) for piece in pieces] == [
        (0, 0, None),
        (1, 1, "REFUSED"),
        (2, 999, None),
    ] * 3


async def test_a_broker_that_is_away_is_not_asked_for_every_slice(
    transport: FaultyTransport, bus: CommandBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("busload.dispatch.publish.MOST_MESSAGES", 1)
    one = publisher(transport, bus)
    await one.publish(LOADS)
    transport.sizes.clear()
    transport.pull()
    pieces = await one.publish(LOADS)
    assert transport.publishes == 1
    assert [(*piece.load, piece.reason) for piece in pieces] == [
        (1024, 1273, "UNREACHABLE"),
        (4096, 4105, "UNREACHABLE"),
    ]


async def test_what_is_left_when_time_is_over_waits_for_another_round(
    transport: FaultyTransport, bus: CommandBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever publishes holds its loads for a minute, and must have told all about them by then."""
    monkeypatch.setattr("busload.dispatch.publish.MOST_MESSAGES", 1)
    one = publisher(transport, bus)
    await one.publish(LOADS)
    monkeypatch.setattr("busload.dispatch.publish.WITHIN", 3.0)
    calls = 0

    async def hang_after_the_first() -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            await asyncio.Event().wait()

    transport.before = hang_after_the_first
    pieces = await one.publish(LOADS)
    assert [(*piece.load, piece.reason) for piece in pieces] == [
        (1024, 1123, None),
        (1124, 1273, "UNREACHABLE"),
        (4096, 4105, "UNREACHABLE"),
    ]
    assert calls == 2


async def test_payloads_are_read_and_published_in_slices(
    transport: FaultyTransport, bus: CommandBus, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory does not grow with the page; a command that is larger than a slice goes alone."""
    monkeypatch.setattr("busload.dispatch.publish.MOST_MESSAGES", 4)
    monkeypatch.setattr("busload.dispatch.publish.MOST_BYTES", 1000)
    letters = [10, 10, 10, 10, 10, 400, 400, 400, 5000, 10, 10, 10]
    await bus.create_batch(DOMAIN, [BatchCommand("Debit", data={"x": "y" * n}) for n in letters], name="b")
    [(lo, hi)] = database.rows("SELECT min(id), max(id) FROM busload.command")
    sizes = transport.sizes
    pieces = await publisher(transport, bus, message_per_command=True).publish(
        [Unpublished(Load(lo, hi), DOMAIN, None, 0)]
    )
    assert pieces == [Piece(Load(lo, hi))]
    assert sizes == [4, 3, 1, 1, 3]
    assert [message.read(each.body).loads for each in transport.confirmed] == [((n, n),) for n in range(lo, hi + 1)]


@pytest.mark.parametrize("plan", ["identity", "sizes", "commands"])
@pytest.mark.parametrize(
    "error", [psycopg.OperationalError("gone"), ConnectionResetError(), KeyError("ours")], ids=repr
)
async def test_a_database_that_is_away_is_reported_like_a_broker_that_is_away(
    transport: FaultyTransport,
    bus: CommandBus,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    plan: str,
    error: Exception,
) -> None:
    """What was confirmed before stays so."""
    monkeypatch.setattr("busload.dispatch.publish.MOST_MESSAGES", 2)
    await bus.create_batch(DOMAIN, [BatchCommand("Debit") for _ in range(6)])
    [(lo, hi)] = database.rows("SELECT min(id), max(id) FROM busload.command")
    calls = 0

    async def perform(found: Plan[Any]) -> Any:
        nonlocal calls
        name = getattr(found, "__name__", "")
        calls += plan == ("commands" if name == "execute" else name)
        if calls == (1 if plan == "identity" else 2):
            found.close()
            raise error
        return await bus.database.in_transaction(found)

    one = Publisher(transport, perform, prefix="busload", envelope_size=100, message_per_command=True)
    pieces = await one.publish([Unpublished(Load(lo, hi), DOMAIN, None, 0)])
    confirmed = [] if plan == "identity" else [(0, 1, None)]
    assert [(piece.load.lo - lo, piece.load.hi - lo, piece.reason) for piece in pieces] == [
        *confirmed,
        (2 * len(confirmed), 5, "UNREACHABLE"),
    ]
    assert "database" in str(pieces[-1].error)


async def test_commands_that_vanished_are_reported_and_keep_no_others_back(
    transport: FaultyTransport, bus: CommandBus, database: Database
) -> None:
    """Of a load that is not told about as a whole nothing would move, and it would be published for ever."""
    await bus.create_batch(DOMAIN, [BatchCommand("Debit") for _ in range(5)])
    [(lo, hi)] = database.rows("SELECT min(id), max(id) FROM busload.command")
    database.rows("DELETE FROM busload.command WHERE id IN (%s, %s)", lo, lo + 3)
    one = publisher(transport, bus, message_per_command=True)
    nothing = Unpublished(Load(lo + 1024 * 9, lo + 1024 * 9 + 9), DOMAIN, None, 0)
    pieces = await one.publish([nothing, Unpublished(Load(lo, hi), DOMAIN, None, 0)])
    assert [(piece.load.lo - lo, piece.load.hi - lo, piece.reason) for piece in pieces] == [
        (0, 0, "REFUSED"),
        (1, 2, None),
        (3, 3, "REFUSED"),
        (4, 4, None),
        (1024 * 9, 1024 * 9 + 9, "REFUSED"),
    ]
    assert "no such command" in str(pieces[0].error)


@pytest.mark.parametrize("key", [b"", b"a:", b"new,", b"bad id:secret", b":secret"])
async def test_an_unusable_key_is_refused_at_once(transport: FaultyTransport, bus: CommandBus, key: bytes) -> None:
    with pytest.raises(ValueError, match="message key"):
        publisher(transport, bus, key=key)


def test_rounds_are_spread_out_and_never_given_up() -> None:
    """The pause doubles up to five minutes, and a broker that asks for more time gets it."""
    for rounds, middle in [(0, 1), (1, 2), (4, 16), (9, 300), (100_000, 300)]:
        assert 0.8 * middle <= pause(rounds) <= 1.2 * middle
    assert pause(0, asked=30.0) == 30.0
    assert pause(9, asked=1.0) >= 240


async def test_a_command_that_fits_into_no_message_is_refused_alone(
    transport: FaultyTransport, bus: CommandBus, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others of its page are published."""
    await bus.send_many(DOMAIN, [BatchCommand("Debit", data="x" * size) for size in (1, 5000, 1)])
    [(lo, hi)] = database.rows("SELECT lo, hi FROM busload.queue")
    monkeypatch.setattr(message, "WIDEST", PayloadLimits(data_bytes=4000))
    one = publisher(transport, bus, message_per_command=True)
    pieces = await one.publish([Unpublished(Load(lo, hi), DOMAIN, None, 0)])
    assert [(piece.load.lo - lo, piece.reason) for piece in pieces] == [(0, None), (1, "TOO_LARGE"), (2, None)]
    assert (one.messages, one.confirmed, dict(one.refused)) == (3, 2, {"TOO_LARGE": 1})


async def test_what_a_broker_says_can_be_stored(transport: FaultyTransport, bus: CommandBus) -> None:
    transport.refuses = lambda index, message: Refusal(RefusalReason.REFUSED, "no\0\ud800!")
    [*pieces] = await publisher(transport, bus).publish(LOADS)
    assert {piece.error for piece in pieces} == {"no\ufffd\ufffd!"}
