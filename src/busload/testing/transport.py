"""What every transport promises, as tests: an adapter is finished when it passes them.

    from busload.testing import TransportContract

    class TestCarrierPigeon(TransportContract):
        @pytest.fixture
        def url(self) -> str:
            return "pigeon://127.0.0.1:7000"

Needs pytest and pytest-asyncio. The other fixtures of the class can be overridden as well: each says what it is for.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import Protocol
from uuid import uuid4

import pytest
import pytest_asyncio

from busload.errors import PublishError, RefusalReason, TransportMisconfiguredError, TransportUnavailableError
from busload.testing.messages import (
    SECRET,
    WITHIN,
    Receiver,
    another,
    connected,
    messages,
    odd_names,
    publish,
    reasons,
    receiving,
    refusals,
    said_by,
    until,
)
from busload.transports import Transport, find_transport


class Restartable(Protocol):
    """A broker of the test's own."""

    @property
    def url(self) -> str: ...

    async def restart(self) -> None:
        """Return once it is up again, at the same URL."""


class TransportContract:
    pytestmark = pytest.mark.asyncio

    quiet = 0.15
    """Seconds without a message after which none is expected."""

    @pytest.fixture
    def url(self) -> str:
        """Override this one: where the broker is."""
        raise NotImplementedError("override the fixture `url`, or `transport`")

    @pytest_asyncio.fixture
    async def transport(self, url: str) -> AsyncIterator[Transport]:
        async with connected(url) as transport:
            yield transport

    @pytest.fixture
    def queue(self) -> str:
        """A queue that nobody else uses; override it where somebody has to make it first."""
        return f"busload.test-{uuid4().hex}"

    @pytest.fixture
    def odd_queues(self, queue: str) -> list[str]:
        """Override it where somebody has to make queues first; none if that cannot be done."""
        return odd_names(queue)

    @pytest.fixture
    def unreachable_url(self, transport: Transport) -> Iterator[str]:
        """Where no broker answers, with the password SECRET."""
        with socket.socket() as taken:  # it is not free for others, and does not listen
            taken.bind(("127.0.0.1", 0))
            scheme = transport.url.partition(":")[0]
            yield f"{scheme}://someone:{SECRET}@127.0.0.1:{taken.getsockname()[1]}/"

    @pytest.fixture
    def wrong_credentials_url(self) -> str | None:
        """Where the broker is, with the password SECRET, which is wrong; None if it lets everyone in."""
        return None

    @pytest.fixture
    def restartable(self) -> Restartable | None:
        """A broker that may be restarted, since nobody else uses it; None if that is tested elsewhere."""
        return None

    # -- carrying -------------------------------------------------------------------------------------------------

    async def test_a_queue_can_be_declared_twice(self, transport: Transport, queue: str) -> None:
        await publish(transport, queue, b"one")
        await transport.declare([queue, queue])
        await transport.declare([])
        assert await self._emptied(transport, queue, b"one") == {b"one": 1}

    async def test_each_message_comes_once_as_it_was(self, transport: Transport, queue: str) -> None:
        """In any order, and whatever its bytes are."""
        bodies = [
            b"[1,2]",
            "Grüße, 世界 🚌".encode(),
            bytes(range(256)),
            b"\x00",
            b" \n",
            b'{"a": "\\u0000"}',
            b"\xff\xfe",
        ]
        await publish(transport, queue, *bodies)
        async with receiving(transport, queue) as receiver:
            arrived = await receiver.take(len(bodies))
            assert {each.queue for each in arrived} == {queue}
            assert Counter(each.body for each in arrived) == Counter(bodies)
            for each in arrived:
                await each.ack()
            assert await receiver.nothing_for(self.quiet)

    async def test_publishing_nothing_does_nothing(self, transport: Transport, queue: str) -> None:
        await transport.publish([])
        await transport.declare([queue])
        await transport.publish([])
        async with receiving(transport, queue) as receiver:
            assert await receiver.nothing_for(self.quiet)

    async def test_a_thousand_messages_go_out_in_one_call(self, transport: Transport, queue: str) -> None:
        bodies = [b'{"commands": [[%d, %d]]}' % (n * 1024, n * 1024 + 99) for n in range(1000)]
        await publish(transport, queue, *bodies)
        async with receiving(transport, queue, prefetch=100) as receiver:
            arrived: list[bytes] = []
            while len(arrived) < len(bodies):
                [delivery] = await receiver.take(1)
                arrived.append(delivery.body)
                await delivery.ack()
        assert Counter(arrived) == Counter(bodies)

    async def test_one_call_serves_several_queues(self, transport: Transport, queue: str) -> None:
        """If the subclass can make only one, they are the same."""
        other = f"{queue}-b" if queue.startswith("busload.test-") else queue
        await transport.declare([queue, other])
        await transport.publish(messages(queue, [b"here"]) + messages(other, [b"there"]))
        if other == queue:
            assert await self._emptied(transport, queue, b"here", b"there") == {b"here": 1, b"there": 1}
        else:
            assert await self._emptied(transport, queue, b"here") == {b"here": 1}
            assert await self._emptied(transport, other, b"there") == {b"there": 1}

    async def test_another_connection_sees_what_was_published(self, transport: Transport, queue: str) -> None:
        await publish(transport, queue, b"one", b"two")
        async with another(transport) as second:
            assert await self._emptied(second, queue, b"one", b"two") == {b"one": 1, b"two": 1}

    async def test_whatever_a_domain_is_called_has_a_queue_of_its_own(
        self, transport: Transport, odd_queues: list[str]
    ) -> None:
        await transport.declare(odd_queues)
        await transport.publish([message for name in odd_queues for message in messages(name, [name.encode()])])

        async def arrives(name: str) -> None:
            async with receiving(transport, name) as receiver:
                [delivery] = await receiver.take(1)
                assert (delivery.queue, delivery.body) == (name, name.encode())
                await delivery.ack()

        await asyncio.gather(*map(arrives, odd_queues))

    # -- on loan --------------------------------------------------------------------------------------------------

    async def test_what_was_not_acknowledged_comes_again_after_closing(self, transport: Transport, queue: str) -> None:
        await publish(transport, queue, b"one", b"two", b"three")
        async with receiving(transport, queue) as receiver:
            await receiver.take(2)
        assert await self._emptied(transport, queue, b"one", b"two", b"three") == {b"one": 1, b"two": 1, b"three": 1}

    async def test_what_a_closed_connection_held_goes_to_another(self, transport: Transport, queue: str) -> None:
        await publish(transport, queue, b"one")
        async with another(transport) as second, receiving(second, queue) as receiver:
            await receiver.take(1)
            await second.aclose()
            assert await self._emptied(transport, queue, b"one") == {b"one": 1}

    async def test_a_rejected_one_does_not_come_again(self, transport: Transport, queue: str) -> None:
        await publish(transport, queue, b"unreadable")
        async with receiving(transport, queue) as receiver:
            [delivery] = await receiver.take(1)
            await delivery.reject("It is no JSON")
            await transport.publish(messages(queue, [b"readable"]))
            [delivery] = await receiver.take(1)
            assert delivery.body == b"readable"
            await delivery.ack()
        assert await self._emptied(transport, queue) == {}

    async def test_an_acknowledged_one_never_comes_again(self, transport: Transport, queue: str) -> None:
        await publish(transport, queue, b"one", b"two")
        async with receiving(transport, queue) as receiver:
            done, _ = await receiver.take(2)
            await done.ack()
        await transport.aclose()
        other = b"two" if done.body == b"one" else b"one"
        assert await self._emptied(transport, queue, other) == {other: 1}
        async with another(transport) as second:
            assert await self._emptied(second, queue) == {}

    async def test_no_more_are_on_loan_than_prefetched(self, transport: Transport, queue: str) -> None:
        """So another consumer gets the rest."""
        await publish(transport, queue, *(b"%d" % n for n in range(6)))
        async with receiving(transport, queue, prefetch=2) as receiver:
            first, second = await receiver.take(2)
            assert await receiver.nothing_for(self.quiet)
            async with receiving(transport, queue, prefetch=10) as other:
                rest = await other.take(4)
                assert len({each.body for each in [first, second, *rest]}) == 6
                for each in rest[:3]:
                    await each.ack()
                assert await receiver.nothing_for(self.quiet)
                await first.ack()
            [last] = await receiver.take(1)
            assert last.body == rest[3].body

    async def test_an_acknowledged_one_makes_room_for_the_next(self, transport: Transport, queue: str) -> None:
        await publish(transport, queue, *(b"%d" % n for n in range(5)))
        seen = set()
        async with receiving(transport, queue, prefetch=1) as receiver:
            for _ in range(5):
                [delivery] = await receiver.take(1)
                seen.add(delivery.body)
                await delivery.ack()
        assert len(seen) == 5

    async def test_consumers_share_a_queue(self, transport: Transport, queue: str) -> None:
        """None gets what another one has."""
        bodies = [b"%d" % n for n in range(60)]
        await publish(transport, queue, *bodies)
        arrived: list[bytes] = []

        async def consume(receiver: Receiver) -> None:
            while len(arrived) < len(bodies):
                if delivery := await receiver.next(0.05):
                    arrived.append(delivery.body)
                    await delivery.ack()

        async with (
            another(transport) as second,
            asyncio.timeout(WITHIN),
            receiving(transport, queue, prefetch=5) as a,
            receiving(transport, queue, prefetch=5) as b,
            receiving(second, queue, prefetch=5) as c,
        ):
            await asyncio.gather(consume(a), consume(b), consume(c))
        assert Counter(arrived) == Counter(bodies)

    async def test_an_ack_after_closing_does_no_harm(self, transport: Transport, queue: str) -> None:
        await publish(transport, queue, b"one", b"two")
        async with receiving(transport, queue) as receiver:
            late, later = await receiver.take(2)
        await late.ack()
        await transport.aclose()
        await later.ack()
        await later.reject("too late")
        await transport.publish(messages(queue, [b"three"]))
        assert b"three" in await self._emptied(transport, queue, b"three")

    async def test_closing_while_nothing_comes_ends_at_once(self, transport: Transport, queue: str) -> None:
        await transport.declare([queue])
        async with receiving(transport, queue) as receiver:
            assert await receiver.nothing_for(self.quiet)
            async with asyncio.timeout(WITHIN / 3):
                await receiver.close()
        await transport.publish(messages(queue, [b"one"]))
        assert await self._emptied(transport, queue, b"one") == {b"one": 1}

    async def test_a_message_wakes_the_one_who_waits(self, transport: Transport, queue: str) -> None:
        await transport.declare([queue])
        async with receiving(transport, queue) as receiver:
            assert await receiver.nothing_for(self.quiet)
            await transport.publish(messages(queue, [b"wake up"]))
            [delivery] = await receiver.take(1)
            assert delivery.body == b"wake up"
            await delivery.ack()

    async def test_after_closing_a_call_connects_again(self, transport: Transport, queue: str) -> None:
        await transport.aclose()
        await transport.declare([queue])
        await transport.aclose()
        await transport.publish(messages(queue, [b"one"]))
        await transport.aclose()
        await transport.aclose()
        assert await self._emptied(transport, queue, b"one") == {b"one": 1}

    async def test_closing_the_transport_ends_those_who_wait(self, transport: Transport, queue: str) -> None:
        await transport.declare([queue])
        async with another(transport) as second, receiving(second, queue) as receiver:
            await transport.publish(messages(queue, [b"one"]))
            [delivery] = await receiver.take(1)  # so it is connected
            await delivery.ack()
            assert await receiver.nothing_for(self.quiet)
            await second.aclose()
            with pytest.raises(TransportUnavailableError):
                await receiver.take(1)

    async def test_one_event_loop_after_another_can_use_it(self, transport: Transport, queue: str) -> None:
        """As a worker does that is run twice. Several calls at a time: only who waits for his turn knows his loop."""
        await transport.declare([queue])
        second = type(transport).from_url(transport.url)

        async def use(bodies: Sequence[bytes]) -> Counter[bytes]:
            async with aclosing(second):
                await asyncio.gather(*(second.publish(messages(queue, [body])) for body in bodies))
                return await self._emptied(second, queue, *bodies)

        for bodies in ([b"one", b"two", b"three"], [b"four", b"five", b"six"]):
            assert await asyncio.to_thread(asyncio.run, use(bodies)) == Counter(bodies)

    # -- what does not get through ----------------------------------------------------------------------------------

    async def test_a_large_body_passes(self, transport: Transport, queue: str) -> None:
        await transport.declare([queue])
        size = transport.max_bytes if transport.max_bytes <= 1024 * 1024 else 100_000
        body = b"x" * size
        await transport.publish(messages(queue, [body]))
        assert await self._emptied(transport, queue, body) == {body: 1}

    async def test_a_body_that_is_too_large_is_refused_alone(self, transport: Transport, queue: str) -> None:
        """The others are confirmed."""
        await transport.declare([queue])
        bodies = [b"one", bytes(transport.max_bytes + 1), b"three"]
        assert await refusals(transport, messages(queue, bodies)) == {1: RefusalReason.TOO_LARGE}
        assert await self._emptied(transport, queue, b"one", b"three") == {b"one": 1, b"three": 1}

    async def test_a_message_for_a_queue_that_is_not_there_is_not_lost_silently(
        self, transport: Transport, queue: str
    ) -> None:
        """Either the queue is made, or it is told by index; what has a queue is confirmed."""
        missing = f"busload.test-{uuid4().hex}"
        await transport.declare([queue])
        mixed = messages(queue, [b"one"]) + messages(missing, [b"lost"]) + messages(queue, [b"two"])
        refused = await refusals(transport, mixed)
        assert refused in ({}, {1: RefusalReason.UNROUTABLE})
        if not refused:
            assert await self._emptied(transport, missing, b"lost") == {b"lost": 1}
        assert await self._emptied(transport, queue, b"one", b"two") == {b"one": 1, b"two": 1}

    async def test_a_broker_that_does_not_answer_is_unreachable(
        self, unreachable_url: str, queue: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It is told within seconds, by index, and without a password."""
        caplog.set_level(logging.DEBUG)
        async with connected(unreachable_url) as transport, asyncio.timeout(WITHIN):
            with pytest.raises(TransportUnavailableError) as declared:
                await transport.declare([queue])
            with pytest.raises(PublishError) as published:
                await transport.publish(messages(queue, [b"one", b"two"]))
            with pytest.raises(TransportUnavailableError) as received:
                async with receiving(transport, queue) as receiver:
                    await receiver.take(1)
        assert reasons(published.value) == dict.fromkeys([0, 1], RefusalReason.UNREACHABLE)
        shown = [repr(transport), caplog.text, *map(said_by, (declared.value, published.value, received.value))]
        assert [text for text in shown if SECRET in text] == []

    async def test_a_broker_that_refuses_our_credentials_is_an_error(
        self, wrong_credentials_url: str | None, queue: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A person has to change something: trying again would not help. The password is not shown."""
        if wrong_credentials_url is None:
            return
        caplog.set_level(logging.DEBUG)
        async with connected(wrong_credentials_url) as transport, asyncio.timeout(WITHIN):
            with pytest.raises(TransportMisconfiguredError) as declared:
                await transport.declare([queue])
            with pytest.raises(TransportMisconfiguredError) as received:
                async with receiving(transport, queue) as receiver:
                    await receiver.take(1)
        shown = [repr(transport), caplog.text, said_by(declared.value), said_by(received.value)]
        assert [text for text in shown if SECRET in text] == []

    async def test_the_password_is_not_shown(self, transport: Transport, unreachable_url: str) -> None:
        assert SECRET not in repr(find_transport(unreachable_url))
        assert "@" not in repr(transport)

    async def test_confirmed_messages_survive_a_restart(self, restartable: Restartable | None, queue: str) -> None:
        """The same transport works again, for those who publish and those who wait."""
        if restartable is None:
            return
        bodies = [b"%d" % n for n in range(50)]
        async with connected(restartable.url) as transport:
            await publish(transport, queue, *bodies)
            async with receiving(transport, queue) as receiver:
                [done] = await receiver.take(1)
                await done.ack()
                # What the broker forgets of an acknowledgement comes again, which does no harm.
                await restartable.restart()
                with pytest.raises(TransportUnavailableError):
                    await receiver.take(len(bodies))
            assert await until(lambda: refusals(transport, messages(queue, [b"after"])), lambda refused: not refused)
            arrived = await self._emptied(transport, queue, *({*bodies, b"after"} - {done.body}))
            assert set(arrived) | {done.body} == {*bodies, b"after"}

    # -- looking into the queue -------------------------------------------------------------------------------------

    async def test_looking_into_a_queue_takes_nothing_away(self, transport: Transport, queue: str) -> None:
        await transport.declare([queue])
        bodies = [b"one", b"two", b"three"]
        await transport.publish(messages(queue, bodies))
        if await transport.depth(queue) is not None:
            assert await until(lambda: transport.depth(queue), lambda depth: depth == 3)
        if await transport.peek(queue, limit=10) is not None:
            for _ in range(2):
                peeked = await transport.peek(queue, limit=10)
                assert Counter(peeked) == Counter(bodies)
            assert len(await transport.peek(queue, limit=2) or []) == 2
        assert await self._emptied(transport, queue, *bodies) == Counter(bodies)
        if await transport.depth(queue) is not None:
            assert await until(lambda: transport.depth(queue), lambda depth: depth == 0)

    async def test_a_queue_that_is_not_there_is_empty(self, transport: Transport) -> None:
        missing = f"busload.test-{uuid4().hex}"
        assert await transport.depth(missing) in (0, None)
        assert await transport.peek(missing, limit=10) in ([], None)

    async def _emptied(self, transport: Transport, queue: str, *expected: bytes) -> Counter[bytes]:
        """How often each body is in the queue, once those expected have come: all are taken and acknowledged."""
        found: Counter[bytes] = Counter()
        async with receiving(transport, queue) as receiver:
            while delivery := await receiver.next(self.quiet if found.keys() >= set(expected) else WITHIN):
                found[delivery.body] += 1
                await delivery.ack()
        return found
