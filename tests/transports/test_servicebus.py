"""Azure Service Bus: the contract, and what is special about it, on a look-alike that the real SDK talks to."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from uuid import uuid4

import pytest

from busload.errors import PublishError, Refusal, RefusalReason, TransportMisconfiguredError
from busload.testing import TransportContract
from busload.testing.messages import SECRET, WITHIN, connected, messages, odd_names, reasons, receiving
from busload.transports import Transport, find_transport
from busload.transports.servicebus import LONGEST_NAME, MESSAGES_PER_BATCH, ServicebusTransport, spelled
from tests.brokers.lookalike import PEEKED_AT_ONCE, ServiceBus
from tests.brokers.proxy import Proxy
from tests.given import eventually
from tests.transports.patience import confirmed, is_so_for_one


class Restartable:
    def __init__(self, servicebus: ServiceBus) -> None:
        self._servicebus = servicebus

    @property
    def url(self) -> str:
        return self._servicebus.url

    async def restart(self) -> None:
        self._servicebus.cut()
        self._servicebus.unlock()


@pytest.fixture(scope="module")
async def shared(servicebus: ServiceBus) -> AsyncIterator[Transport]:
    """The SDK takes a second to close a connection: for all tests together, not for each."""
    transport = find_transport(f"{servicebus.url}&timeout={WITHIN}")
    yield transport
    await transport.aclose()


class TestServicebus(TransportContract):
    @pytest.fixture
    def transport(self, shared: Transport) -> Transport:
        return shared

    @pytest.fixture
    def queue(self, servicebus: ServiceBus) -> str:
        queue = servicebus.create(f"busload.test-{uuid4().hex}")
        servicebus.create(f"{queue}-b")
        return queue

    @pytest.fixture
    def odd_queues(self, servicebus: ServiceBus, queue: str) -> list[str]:
        """Those whose names the broker does not take as they are."""
        odd = [name for name in odd_names(queue) if spelled(name) != name]
        for name in odd:
            servicebus.create(spelled(name))
        return odd

    @pytest.fixture
    def unreachable_url(self) -> Iterator[str]:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            yield f"servicebus://someone:{SECRET}@127.0.0.1:{taken.getsockname()[1]}/?emulator=true"

    @pytest.fixture
    def wrong_credentials_url(self, servicebus: ServiceBus) -> str:
        return servicebus.url_with(SECRET)

    @pytest.fixture
    def restartable(self, servicebus: ServiceBus) -> Restartable:
        return Restartable(servicebus)


@pytest.fixture
def queue(servicebus: ServiceBus) -> str:
    return servicebus.create(f"busload.test-{uuid4().hex}")


@pytest.fixture
async def transport(servicebus: ServiceBus) -> AsyncIterator[Transport]:
    """One whose connections are new, so that what breaks is not taken for an old one that died."""
    transport = find_transport(f"{servicebus.url}&timeout={WITHIN}")
    yield transport
    await transport.aclose()


# -- batches ------------------------------------------------------------------------------------------------------


async def test_many_messages_go_out_in_batches_by_number_and_by_bytes(
    servicebus: ServiceBus, transport: Transport, queue: str
) -> None:
    """500 messages of 2 kB are more than one batch holds, in bytes as in number."""
    await transport.publish(messages(queue, [b"%04d" % n + bytes(1996) for n in range(500)]))
    found = servicebus.look(queue)
    assert (found["messages"], found["transfers"]) == (500, 5)

    await transport.publish(messages(queue, [b"%04d" % n + bytes(9996) for n in range(100)]))
    found = servicebus.look(queue)
    assert (found["messages"], found["transfers"]) == (600, 9)  # 26 times 10 kB is what 256 KiB hold


async def test_a_batch_that_fails_marks_only_its_own_messages(
    servicebus: ServiceBus, transport: Transport, queue: str
) -> None:
    """Throttled, cut off before or after it was stored, refused; the others are confirmed."""
    servicebus.fail(queue, "none", "busy", "none", "drop-before", "none", "drop-after", "full")
    batch = messages(queue, [b"%d" % n for n in range(8 * MESSAGES_PER_BATCH)])

    with pytest.raises(PublishError) as failed:
        await transport.publish(batch)

    by_batch = [
        {failed.value.refused.get(n * MESSAGES_PER_BATCH + k) for k in range(MESSAGES_PER_BATCH)} for n in range(8)
    ]
    told = [{refusal and (refusal.reason, refusal.after) for refusal in some} for some in by_batch]
    unreachable, throttled = {(RefusalReason.UNREACHABLE, None)}, {(RefusalReason.THROTTLED, 4.0)}
    assert told == [
        {None},
        throttled,
        {None},
        unreachable,
        {None},
        unreachable,
        {(RefusalReason.REFUSED, None)},
        {None},
    ]
    assert servicebus.look(queue)["messages"] == 5 * MESSAGES_PER_BATCH


async def test_what_was_stored_without_being_confirmed_comes_twice(
    servicebus: ServiceBus, transport: Transport, queue: str
) -> None:
    """The connection broke between the broker's disk and us. Sent again it comes twice, which does no harm."""
    batch = messages(queue, [b"one", b"two"])
    servicebus.fail(queue, "drop-after")
    with pytest.raises(PublishError) as failed:
        await transport.publish(batch)
    assert reasons(failed.value) == dict.fromkeys([0, 1], RefusalReason.UNREACHABLE)

    await transport.publish(batch)

    async with receiving(transport, queue) as receiver:
        assert sorted(each.body for each in await receiver.take(4)) == [b"one", b"one", b"two", b"two"]
        assert await receiver.nothing_for(0.1)


async def test_a_queue_that_detects_duplicates_delivers_once(servicebus: ServiceBus, transport: Transport) -> None:
    """Since a message has the same id when it is sent again."""
    queue = servicebus.create(f"busload.test-{uuid4().hex}", drops_duplicates=True)
    batch = messages(queue, [b"one", b"two"])
    servicebus.fail(queue, "drop-after")
    with pytest.raises(PublishError):
        await transport.publish(batch)

    await transport.publish(batch)

    assert servicebus.look(queue)["ready"] == 2


async def test_a_queue_that_takes_no_batches_gets_messages_one_by_one(
    servicebus: ServiceBus, transport: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is partitioned and detects duplicates. It is found out once."""
    queue = servicebus.create(f"busload.test-{uuid4().hex}", drops_duplicates=True, refuses_batches=True)
    await transport.publish(messages(queue, [b"one", b"two", b"three"]))
    await transport.publish(messages(queue, [b"four", b"five"]))
    found = servicebus.look(queue)
    assert (found["messages"], found["transfers"]) == (5, 1 + 3 + 2)
    assert caplog.text.count("are sent one by one") == 1


async def test_a_connection_that_died_while_nobody_looked_is_replaced(
    servicebus: ServiceBus, transport: Transport, queue: str
) -> None:
    await transport.publish(messages(queue, [b"one"]))
    servicebus.cut()
    await transport.publish(messages(queue, [b"two"]))
    assert servicebus.look(queue)["messages"] == 2


async def test_a_broker_that_does_not_answer_is_given_up_in_time(servicebus: ServiceBus, queue: str) -> None:
    """The caller is not kept waiting, and the next call works again."""
    transport = find_transport(f"{servicebus.url}&timeout=1")
    try:
        await confirmed(transport, messages(queue, [b"one"]))
        servicebus.fail(queue, "silent")
        while "silent" not in servicebus.look(queue):  # it may have been too late to reach the broker
            with pytest.raises(PublishError) as failed:
                await transport.publish(messages(queue, [b"two"]))
            assert failed.value.refused == {0: Refusal(RefusalReason.UNREACHABLE, "not confirmed within 1 s")}
        before = servicebus.look(queue)["messages"]
        tries = await confirmed(transport, messages(queue, [b"three"]))
        assert 1 <= servicebus.look(queue)["messages"] - before <= tries
    finally:
        await transport.aclose()


async def test_who_gives_up_before_his_turn_leaves_the_others_alone(servicebus: ServiceBus, queue: str) -> None:
    """One caller at a time writes to a queue. Who is cancelled, or late, before it is his turn has broken nothing."""
    async with Proxy(servicebus.url) as proxy, connected(proxy.url) as transport:
        await transport.publish(messages(queue, [b"one"]))
        proxy.hold_answers()
        writing = asyncio.create_task(transport.publish(messages(queue, [b"two"])))
        assert await eventually(lambda: servicebus.look(queue)["messages"] == 2)
        waiting = asyncio.create_task(transport.publish(messages(queue, [b"three"])))
        for _ in range(10):  # to the line of those who wait
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        proxy.pass_answers()
        await writing


async def test_a_queue_is_looked_into_beyond_what_the_broker_shows_at_a_time(
    servicebus: ServiceBus, transport: Transport, queue: str
) -> None:
    bodies = [b"%d" % n for n in range(2 * PEEKED_AT_ONCE + 10)]
    await transport.publish(messages(queue, bodies))
    assert await transport.peek(queue, limit=1000) == bodies
    assert await transport.peek(queue, limit=PEEKED_AT_ONCE + 1) == bodies[: PEEKED_AT_ONCE + 1]


# -- queues and locks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [False, True], ids=["by the link", "by the token"])
async def test_a_queue_that_does_not_exist_is_reported_with_what_to_do(
    servicebus: ServiceBus, transport: Transport, hidden: bool
) -> None:
    """Only an administrator can make it."""
    missing = f"busload.missing-{uuid4().hex}"
    if hidden:
        servicebus.hide(missing)
    with pytest.raises(TransportMisconfiguredError, match=f"az servicebus queue create .*--name {missing}"):
        await transport.declare([missing])
    with pytest.raises(TransportMisconfiguredError, match="az servicebus queue create"):
        async with receiving(transport, missing) as receiver:
            await receiver.take(1)
    with pytest.raises(PublishError) as failed:
        await transport.publish(messages(missing, [b"one"]))
    assert failed.value.refused[0].reason == RefusalReason.UNROUTABLE
    assert await transport.peek(missing, limit=1) == []
    assert "az servicebus queue create" in failed.value.refused[0].message


async def test_domains_that_differ_by_capitals_have_queues_of_their_own(
    servicebus: ServiceBus, transport: Transport, queue: str
) -> None:
    """To the broker their names would be the same; the administrator is told which one to make."""
    capital = queue.replace("test", "Test")
    with pytest.raises(TransportMisconfiguredError, match=f"--name {spelled(capital)} "):
        await transport.declare([capital])
    servicebus.create(spelled(capital))
    await transport.declare([capital])
    await transport.publish(messages(capital, [b"one"]))
    async with receiving(transport, capital) as receiver:
        [delivery] = await receiver.take(1)
        assert (delivery.queue, delivery.body) == (capital, b"one")
        await delivery.ack()
    assert (servicebus.look(spelled(capital))["completed"], servicebus.look(queue)["ready"]) == (1, 0)


def test_names_are_spelled_as_the_broker_takes_them() -> None:
    """Small, ending with a letter or digit, of up to 260 bytes, and each in a way of its own."""
    long = "busload." + "x" * 300
    names = ["busload.a", "busload.A", "busload.a.", "busload.a-", long, f"{long}y", long[:260], long[:261]]
    found = [spelled(name) for name in names]
    assert [name for name in found if name in names] == ["busload.a", long[:260]]
    assert len({name.lower() for name in found}) == len(names)
    assert all(len(name) <= LONGEST_NAME and name[-1].isalnum() for name in found)


async def test_a_lock_is_renewed_while_a_message_is_on_loan(servicebus: ServiceBus, transport: Transport) -> None:
    """A handler may take longer than the broker's lock."""

    async def is_renewed(seconds: int) -> bool:
        queue = servicebus.create(f"busload.test-{uuid4().hex}", lock_for=seconds)
        await transport.publish(messages(queue, [b"one", b"two"]))
        async with receiving(transport, queue) as receiver:
            taken = await receiver.take(2)
            # Each for four thirds of the time, or too late once.
            await eventually(lambda: (now := servicebus.look(queue)).get("renewed", 0) >= 8 or "expired" in now)
            if "expired" in servicebus.look(queue):
                return False
            assert await receiver.nothing_for(0.0)
            for delivery in taken:
                await delivery.ack()
        found = servicebus.look(queue)
        return (found.get("completed"), found["ready"], found["locked"]) == (2, 0, 0)

    assert await is_so_for_one(is_renewed)


async def test_closing_gives_back_at_once(servicebus: ServiceBus, transport: Transport, queue: str) -> None:
    """Not only when the locks expire."""
    await transport.publish(messages(queue, [b"one", b"two"]))
    async with receiving(transport, queue) as receiver:
        await receiver.take(2)
    # The receiver may have got them once more before its link was closed, which gives them back as well.
    assert await eventually(lambda: servicebus.look(queue)["ready"] == 2)
    assert servicebus.look(queue).get("expired", 0) == 0


async def test_a_lost_lock_does_no_harm(servicebus: ServiceBus, transport: Transport) -> None:
    """The message comes again, here or elsewhere; who held it may say what he likes."""
    queue = servicebus.create(f"busload.test-{uuid4().hex}", lock_for=0.1)  # too short to be renewed in time
    await transport.publish(messages(queue, [b"one"]))
    async with receiving(transport, queue) as receiver:
        [late] = await receiver.take(1)
        assert await eventually(lambda: servicebus.look(queue).get("expired"))
        await late.ack()
        [again] = await receiver.take(1)
        assert again.body == b"one"
    assert servicebus.look(queue).get("completed", 0) == 0


async def test_a_rejected_message_is_a_dead_letter_with_its_reason(
    servicebus: ServiceBus, transport: Transport, queue: str
) -> None:
    await transport.publish(messages(queue, [b"unreadable"]))
    async with receiving(transport, queue) as receiver:
        [delivery] = await receiver.take(1)
        await delivery.reject("It is no JSON")
    found = servicebus.look(queue)
    assert (found["dead"], found["reasons"]) == ([b"unreadable"], ["It is no JSON"])


async def test_the_broker_puts_aside_what_was_given_back_too_often(
    servicebus: ServiceBus, transport: Transport
) -> None:
    """So the docs ask for the highest number that it takes."""
    queue = servicebus.create(f"busload.test-{uuid4().hex}", max_deliveries=2)
    await transport.publish(messages(queue, [b"one"]))
    for _ in range(2):
        async with receiving(transport, queue) as receiver:
            await receiver.take(1)
    assert await eventually(lambda: servicebus.look(queue)["reasons"] == ["MaxDeliveryCountExceeded"])


# -- the URL ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("servicebus://name:key@ns.servicebus.windows.net:5671/", "has a port"),
        ("servicebus://ns.servicebus.windows.net/", "has no name of a key"),
        ("servicebus://name@ns.servicebus.windows.net/", "has no key"),
        ("servicebus://name:key@/", "has no host"),
        ("servicebus://name:key@ns.servicebus.windows.net/payments", "has a path"),
        ("servicebus://name:key@ns.servicebus.windows.net:x/", "cannot be read"),
        ("servicebus://name:key@[ns/", "cannot be read"),
        ("servicebus://name:key%3Bx@ns.servicebus.windows.net/", "a semicolon"),
        ("servicebus://name:key@ns.servicebus.windows.net/?emulator=yes", "wanted one of true, false"),
        ("servicebus://name:key@ns.servicebus.windows.net/?timeuot=3", "Did you mean 'timeout'"),
    ],
)
def test_an_unusable_url_is_reported_without_its_key(url: str, said: str) -> None:
    with pytest.raises(TransportMisconfiguredError, match=said) as refused:
        find_transport(url)
    assert "name:key" not in str(refused.value)


def test_a_key_is_percent_encoded() -> None:
    transport = find_transport("servicebus://name:a%2Fb%2B%3D@ns.servicebus.windows.net/")
    assert isinstance(transport, ServicebusTransport)
    assert "SharedAccessKey=a/b+=" in transport._connection_string
    assert "windows.net:" not in transport._connection_string
    assert repr(transport) == "<ServicebusTransport servicebus://ns.servicebus.windows.net/>"


if "TEST_SERVICEBUS_URL" in os.environ:

    class TestRealServicebus(TransportContract):
        """A namespace in the cloud; TEST_SERVICEBUS_QUEUE is an empty queue in it, for this run alone."""

        quiet = 3.0

        @pytest.fixture
        def url(self) -> str:
            return os.environ["TEST_SERVICEBUS_URL"]

        @pytest.fixture
        def queue(self) -> str:
            return os.environ["TEST_SERVICEBUS_QUEUE"]

        @pytest.fixture
        def odd_queues(self) -> list[str]:
            return []

        @pytest.fixture
        def unreachable_url(self) -> str:
            return f"servicebus://someone:{SECRET}@127.0.0.1/"
