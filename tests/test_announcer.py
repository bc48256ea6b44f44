"""Loads become messages, and each command's message has a fate that is known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import psycopg
import pytest

from busload import BatchCommand, CommandBus
from busload.announcer import Announcer, Silence, pause
from busload.domain import message
from busload.domain.payload import PayloadLimits
from busload.errors import Refusal, RefusalReason, TransportMisconfigured, TransportUnavailable
from busload.store.outbox import Piece, Unannounced
from busload.store.plan import Plan
from busload.transport import Message
from tests.brokers.faulty import AWAY, FaultyTransport, end_silence
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


async def test_what_was_confirmed_is_told_by_load(
    transport: FaultyTransport, bus: CommandBus, database: Database
) -> None:
    one = announcer(transport, bus)
    assert await one.announce(LOADS) == [Piece(1024, 1273), Piece(4096, 4105)]
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
    ids = [each.id.partition("-")[2] for each in transport.confirmed]
    assert ids == ["4096-4105-0", "4096-4105-0", "4096-4105-2"]


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


async def test_messages_with_gaps_are_not_taken_for_each_other(
    transport: FaultyTransport, bus: CommandBus, database: Database
) -> None:
    """A broker that drops repetitions must keep both, though they begin and end alike."""
    single = {n: Unannounced(1024 * n, 1024 * n, DOMAIN, None, 0) for n in (1, 2, 3, 5)}
    for numbers in ((1, 3, 5), (1, 2, 5), (5, 2, 1)):
        await announcer(transport, bus).announce([single[n] for n in numbers])
    assert database.count("message") == 2
    assert len({each.id for each in transport.confirmed}) == 2


async def test_two_databases_on_one_broker_do_not_repeat_each_other(
    transport: FaultyTransport, bus: CommandBus, database: Database
) -> None:
    """Their ids are alike, and a broker that drops repetitions must keep the messages of both."""
    await announcer(transport, bus).announce(LOADS[1:])
    await announcer(transport, bus).announce(LOADS[1:])
    assert database.count("message") == 1
    database.rows("UPDATE busload.identity SET database = gen_random_uuid()")
    await announcer(transport, bus).announce(LOADS[1:])
    assert database.count("message") == 2


async def test_a_queue_that_cannot_be_used_refuses_only_its_own_messages(
    transport: FaultyTransport, bus: CommandBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F53: and it is tried once per page, however many slices that has."""
    monkeypatch.setattr("busload.announcer.MOST_MESSAGES", 2)
    declared: list[str] = []
    theirs = transport.declare

    async def declare(queues: Sequence[str]) -> None:
        declared.extend(queues)
        if "busload.bad" in queues:
            raise TransportMisconfigured("of another kind")
        await theirs(queues)

    monkeypatch.setattr(transport, "declare", declare)
    loads = [Unannounced(1024 * n, 1024 * n + 249, ("bad", "good", "zeal")[n % 3], None, 0) for n in range(6)]
    pieces = await announcer(transport, bus).announce(loads)

    assert [(piece.lo >> 10, piece.reason) for piece in pieces] == [
        (n, "REFUSED" if n % 3 == 0 else None) for n in range(6)
    ]
    assert {piece.error for piece in pieces if piece.reason} == {"of another kind"}
    assert sorted(declared) == ["busload.bad", "busload.good", "busload.zeal"]
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
    """F53: one without a leader, say. It is tried once per page, also if the first slice is all its own."""
    monkeypatch.setattr("busload.announcer.MOST_MESSAGES", slice)
    tried: list[str] = []
    theirs = transport.declare

    async def declare(queues: Sequence[str]) -> None:
        if "busload.bad" in queues:
            tried.extend(queues)
            raise TransportUnavailable("no leader")
        await theirs(queues)

    def refuses(index: int, message: Message) -> Refusal | None:
        if message.queue != "busload.bad":
            return None
        tried.append(message.queue)
        return Refusal(RefusalReason.UNREACHABLE, "no leader")

    if fails == "declare":
        monkeypatch.setattr(transport, "declare", declare)
    else:
        transport.refuses = refuses
    loads = [Unannounced(1024 * n, 1024 * n + 249, ("bad", "good", "zeal")[n % 3], None, 0) for n in range(6)]
    pieces = await announcer(transport, bus).announce(loads)

    assert [(piece.lo >> 10, piece.reason) for piece in pieces] == [
        (n, "UNREACHABLE" if n % 3 == 0 else None) for n in range(6)
    ]
    assert {piece.error for piece in pieces if piece.reason} == {"no leader"}
    assert tried == ["busload.bad"] * messages


async def test_a_queue_that_is_silent_while_others_answer_is_left_alone_for_a_while(
    transport: FaultyTransport, bus: CommandBus
) -> None:
    """F53: to wait for it takes seconds each time, which are the others' too."""
    bad, good = Unannounced(1024, 1024, "bad", None, 0), Unannounced(2048, 2048, "good", None, 0)
    one = announcer(transport, bus)

    async def tries() -> int:
        before = len(transport.tried)
        [piece] = await one.announce([bad])
        assert piece.reason == "UNREACHABLE" and piece.error == "nobody answers"
        return len(transport.tried) - before

    transport.refuses = lambda index, message: AWAY if message.queue == "busload.bad" else None
    assert [await tries(), await tries()] == [1, 1]  # the broker may be away
    assert not one.is_stuck("bad")
    await one.announce([bad, good])
    assert (one.is_stuck("bad"), one.is_stuck("good"), await tries()) == (True, False, 0)
    assert one.left_alone == ["bad"]
    end_silence(one)
    assert [await tries(), await tries()] == [1, 0]
    transport.mend()
    end_silence(one)
    assert (one.left_alone, one.heard_again()) == ([], False)
    assert await one.announce([bad]) == [Piece(1024, 1024)]
    assert (one.is_stuck("bad"), one.heard_again(), one.heard_again()) == (False, True, False)


def test_how_long_a_silent_queue_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Growing, a minute at most; what was long ago does not count."""
    now = 1000.0
    monkeypatch.setattr("busload.announcer.time.monotonic", lambda: now)
    silence = Silence()
    silence.learn([], {"bad": AWAY}, began=now)
    assert not silence.left_alone()
    assert not silence.learn(["good"], {}, began=now)
    for longest in (1, 2, 4, 8, 16, 32, 60, 60, 60):
        silence.learn([], {"bad": AWAY}, began=now)
        assert silence.left_alone() == {"bad": AWAY}
        now += 0.7 * longest
        assert silence.left_alone()
        now += 0.6 * longest
        assert not silence.left_alone()
    now += 121
    silence.learn([], {"bad": AWAY}, began=now)
    assert (silence.left_alone(), silence.is_stuck("bad")) == ({}, False)


@pytest.mark.parametrize(
    ("options", "page"),
    [({}, 100), ({"envelope_size": 1}, 20), ({"message_per_command": True}, 20), ({"envelope_size": 1000}, 100)],
    ids=str,
)
async def test_a_page_has_no_more_messages_than_a_broker_takes_in_time(
    transport: FaultyTransport, bus: CommandBus, options: dict[str, Any], page: int
) -> None:
    """What is left of it when its time is over would be taken for refused."""
    assert announcer(transport, bus, **options).page == page


async def test_very_many_messages_are_published_in_slices(
    transport: FaultyTransport, bus: CommandBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No single call may take longer than a transport allows itself."""
    sizes = published(transport, monkeypatch)
    loads = [Unannounced(1024 * n, 1024 * n + 999, DOMAIN, None, 0) for n in range(3)]
    transport.refuses = refusing(1)
    pieces = await announcer(transport, bus, envelope_size=1).announce(loads)
    assert sizes == [1000, 1000, 1000]
    assert [(piece.lo % 1024, piece.hi % 1024, piece.reason) for piece in pieces] == [
        (0, 0, None),
        (1, 1, "REFUSED"),
        (2, 999, None),
    ] * 3


async def test_a_broker_that_is_away_is_not_asked_for_every_slice(
    transport: FaultyTransport, bus: CommandBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("busload.announcer.MOST_MESSAGES", 1)
    one = announcer(transport, bus)
    await one.announce(LOADS)
    transport.publishes = 0
    transport.pull()
    pieces = await one.announce(LOADS)
    assert transport.publishes == 1
    assert [(piece.lo, piece.hi, piece.reason) for piece in pieces] == [
        (1024, 1273, "UNREACHABLE"),
        (4096, 4105, "UNREACHABLE"),
    ]


async def test_what_is_left_when_time_is_over_waits_for_another_round(
    transport: FaultyTransport, bus: CommandBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever announces holds its loads for a minute, and must have told all about them by then."""
    monkeypatch.setattr("busload.announcer.MOST_MESSAGES", 1)
    one = announcer(transport, bus)
    await one.announce(LOADS)
    monkeypatch.setattr("busload.announcer.WITHIN", 3.0)
    theirs, calls = transport.publish, 0

    async def publish_one(messages: Sequence[Message]) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            await asyncio.Event().wait()
        await theirs(messages)

    monkeypatch.setattr(transport, "publish", publish_one)
    pieces = await one.announce(LOADS)
    assert [(piece.lo, piece.hi, piece.reason) for piece in pieces] == [
        (1024, 1123, None),
        (1124, 1273, "UNREACHABLE"),
        (4096, 4105, "UNREACHABLE"),
    ]
    assert calls == 2


async def test_payloads_are_read_and_published_in_slices(
    transport: FaultyTransport, bus: CommandBus, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S1-51: memory does not grow with the page; a command that is larger than a slice goes alone."""
    monkeypatch.setattr("busload.announcer.MOST_MESSAGES", 4)
    monkeypatch.setattr("busload.announcer.MOST_BYTES", 1000)
    letters = [10, 10, 10, 10, 10, 400, 400, 400, 5000, 10, 10, 10]
    await bus.create_batch(DOMAIN, [BatchCommand("Debit", data={"x": "y" * n}) for n in letters], name="b")
    [(lo, hi)] = database.rows("SELECT min(id), max(id) FROM busload.command")
    sizes = published(transport, monkeypatch)
    pieces = await announcer(transport, bus, message_per_command=True).announce([Unannounced(lo, hi, DOMAIN, None, 0)])
    assert pieces == [Piece(lo, hi)]
    assert sizes == [4, 3, 1, 1, 3]
    assert [message.read(each.body).ranges for each in transport.confirmed] == [((n, n),) for n in range(lo, hi + 1)]


@pytest.mark.parametrize("plan", ["identity", "sizes", "commands"])
@pytest.mark.parametrize(
    "error", [psycopg.OperationalError("gone"), ConnectionResetError(), KeyError("ours")], ids=repr
)
async def test_a_database_that_is_away_is_told_like_a_broker_that_is(
    transport: FaultyTransport,
    bus: CommandBus,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    plan: str,
    error: Exception,
) -> None:
    """F49: what was confirmed before stays so."""
    monkeypatch.setattr("busload.announcer.MOST_MESSAGES", 2)
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
        return await bus._perform_alone(found)

    one = Announcer(transport, perform, prefix="busload", envelope_size=100, message_per_command=True)
    pieces = await one.announce([Unannounced(lo, hi, DOMAIN, None, 0)])
    confirmed = [] if plan == "identity" else [(0, 1, None)]
    assert [(piece.lo - lo, piece.hi - lo, piece.reason) for piece in pieces] == [
        *confirmed,
        (2 * len(confirmed), 5, "UNREACHABLE"),
    ]
    assert "database" in str(pieces[-1].error)


async def test_commands_that_vanished_are_told_and_keep_no_others_back(
    transport: FaultyTransport, bus: CommandBus, database: Database
) -> None:
    """Of a load that is not told about as a whole nothing would move, and it would be announced for ever."""
    await bus.create_batch(DOMAIN, [BatchCommand("Debit") for _ in range(5)])
    [(lo, hi)] = database.rows("SELECT min(id), max(id) FROM busload.command")
    database.rows("DELETE FROM busload.command WHERE id IN (%s, %s)", lo, lo + 3)
    one = announcer(transport, bus, message_per_command=True)
    nothing = Unannounced(lo + 1024 * 9, lo + 1024 * 9 + 9, DOMAIN, None, 0)
    pieces = await one.announce([nothing, Unannounced(lo, hi, DOMAIN, None, 0)])
    assert [(piece.lo - lo, piece.hi - lo, piece.reason) for piece in pieces] == [
        (0, 0, "REFUSED"),
        (1, 2, None),
        (3, 3, "REFUSED"),
        (4, 4, None),
        (1024 * 9, 1024 * 9 + 9, "REFUSED"),
    ]
    assert "no such command" in str(pieces[0].error)


@pytest.mark.parametrize("key", [b"", b"a:", b"new,", b"bad id:secret", b":secret"])
async def test_an_unusable_key_is_refused_at_once(transport: FaultyTransport, bus: CommandBus, key: bytes) -> None:
    """Z24."""
    with pytest.raises(ValueError, match="message key"):
        announcer(transport, bus, key=key)


def published(transport: FaultyTransport, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many messages each call publishes, from now on."""
    sizes: list[int] = []
    theirs = transport.publish

    async def publish(messages: Sequence[Message]) -> None:
        sizes.append(len(messages))
        await theirs(messages)

    monkeypatch.setattr(transport, "publish", publish)
    return sizes


def test_rounds_are_spread_out_and_never_given_up() -> None:
    """S1-11: the pause doubles up to five minutes, and a broker that asks for more time gets it."""
    for rounds, middle in [(0, 1), (1, 2), (4, 16), (9, 300), (100_000, 300)]:
        assert 0.8 * middle <= pause(rounds) <= 1.2 * middle
    assert pause(0, asked=30.0) == 30.0
    assert pause(9, asked=1.0) >= 240


async def test_a_command_that_fits_into_no_message_is_refused_alone(
    transport: FaultyTransport, bus: CommandBus, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F53: the others of its page are announced."""
    await bus.send_many(DOMAIN, [BatchCommand("Debit", data="x" * size) for size in (1, 5000, 1)])
    [(lo, hi)] = database.rows("SELECT lo, hi FROM busload.queue")
    monkeypatch.setattr(message, "WIDEST", PayloadLimits(data_bytes=4000))
    one = announcer(transport, bus, message_per_command=True)
    pieces = await one.announce([Unannounced(lo, hi, DOMAIN, None, 0)])
    assert [(piece.lo - lo, piece.reason) for piece in pieces] == [(0, None), (1, "TOO_LARGE"), (2, None)]
    assert (one.messages, one.confirmed, dict(one.refused)) == (3, 2, {"TOO_LARGE": 1})


async def test_what_a_broker_says_can_be_stored(transport: FaultyTransport, bus: CommandBus) -> None:
    transport.refuses = lambda index, message: Refusal(RefusalReason.REFUSED, "no\0\ud800!")
    [*pieces] = await announcer(transport, bus).announce(LOADS)
    assert {piece.error for piece in pieces} == {"no\ufffd\ufffd!"}
