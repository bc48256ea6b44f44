"""RabbitMQ, a real one: the contract, and what is its own."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import aiormq
import pytest
from aiormq.abc import AbstractChannel

from busload.errors import RefusalReason, TransportMisconfiguredError, TransportUnavailableError
from busload.testing import TransportContract
from busload.testing.messages import SECRET, WITHIN, connected, messages, receiving, refusals, until
from busload.transports import Transport, find_transport
from busload.transports import rabbitmq as adapter
from busload.transports.rabbitmq import LIMIT, RabbitmqTransport
from tests.brokers.proxy import Proxy
from tests.brokers.rabbitmq import RabbitmqServer
from tests.given import eventually
from tests.transports.patience import answered, confirmed, receives


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitmqServer]:
    with RabbitmqServer(tmp_path_factory.mktemp("rabbitmq")) as server:
        yield server


class TestRabbitmq(TransportContract):
    @pytest.fixture(autouse=True)
    def time_to_close(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What a receiver holds at its end reaches a broker that is slow to answer."""
        monkeypatch.setattr(adapter, "CLOSE_WITHIN", WITHIN)

    @pytest.fixture
    def url(self, rabbitmq_url: str) -> str:
        return rabbitmq_url

    @pytest.fixture
    def wrong_credentials_url(self, url: str) -> str:
        return url.replace("guest:guest", f"guest:{SECRET}")

    @pytest.fixture
    def restartable(self, own: RabbitmqServer) -> RabbitmqServer:
        return own


@pytest.fixture
async def transport(rabbitmq_url: str) -> AsyncIterator[Transport]:
    async with connected(rabbitmq_url) as transport:
        yield transport


@pytest.fixture
async def channel(rabbitmq_url: str) -> AsyncIterator[AbstractChannel]:
    """A second pair of eyes."""
    connection = await aiormq.connect(rabbitmq_url)
    yield await connection.channel()
    await connection.close()


async def has(transport: Transport, queue: str, depth: int) -> bool:
    async with asyncio.timeout(WITHIN):
        while await transport.depth(queue) != depth:
            await asyncio.sleep(0.02)
    return True


# -- queues -------------------------------------------------------------------------------------------------------


async def test_queues_are_quorum_queues_unless_the_url_says_otherwise(
    rabbitmq_url: str, transport: Transport, queue: str
) -> None:
    """One that is there with other settings is named, with what to do about it."""
    async with connected(f"{rabbitmq_url}?queue_type=classic") as classic:
        await classic.declare([queue])
        with pytest.raises(
            TransportMisconfiguredError, match=f"(?s){queue}.*'quorum' but current is 'classic'.*queue_type="
        ):
            await transport.declare([queue])
        await classic.publish(messages(queue, [b"one"]))
        assert await has(transport, queue, 1)


async def test_what_nobody_can_read_is_kept_in_another_queue(
    transport: Transport, channel: AbstractChannel, queue: str
) -> None:
    await transport.declare([queue])
    await transport.publish(messages(queue, [b"gibberish"]))
    async with receiving(transport, queue) as receiver:
        [delivery] = await receiver.take(1)
        await delivery.reject("It is no JSON")
    assert await has(transport, f"{queue}:dead", 1)
    assert (await channel.basic_get(f"{queue}:dead", no_ack=True)).body == b"gibberish"


async def test_names_that_are_too_long_for_rabbitmq_are_cut_and_stay_apart(
    transport: Transport, channel: AbstractChannel, queue: str
) -> None:
    """A domain has up to 255 bytes, a prefix up to 100; and its dead-letter queue needs a name, too."""
    long = queue.ljust(355, "x")
    names = [long, f"{long}y", long[:250], long[:251]]
    await transport.declare(names)
    await transport.publish([message for name in names for message in messages(name, [name.encode()])])
    for name in names:
        async with receiving(transport, name) as receiver:
            [delivery] = await receiver.take(1)
            assert (delivery.queue, delivery.body) == (name, name.encode())
            await delivery.reject("It is no JSON")
        assert await has(transport, name, 0)
    async with asyncio.timeout(WITHIN):
        while (await channel.queue_declare(f"{long[:250]}:dead", passive=True)).message_count != 1:
            await asyncio.sleep(0.02)


async def test_messages_are_persistent_and_carry_their_id(
    transport: Transport, channel: AbstractChannel, queue: str
) -> None:
    await transport.declare([queue])
    [message] = messages(queue, [b"one"])
    await transport.publish([message])
    assert await has(transport, queue, 1)
    properties = (await channel.basic_get(queue, no_ack=True)).header.properties
    assert (properties.delivery_mode, properties.correlation_id) == (2, message.id)


async def test_a_message_is_not_dropped_for_coming_often(transport: Transport, queue: str) -> None:
    """Since release 4 a quorum queue drops what came 20 times, unless it is told not to."""
    await transport.declare([queue])
    await transport.publish(messages(queue, [b"one"]))
    for _ in range(30):
        await take(transport, queue)
    async with receiving(transport, queue) as receiver:
        [delivery] = await receiver.take(1)
        await delivery.ack()


async def test_a_queue_that_cannot_be_without_limit_is_used_as_it_is(
    rabbitmq_url: str, channel: AbstractChannel, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As one is that an earlier release of RabbitMQ has made, which knew no such limit."""
    await channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})
    transport = RabbitmqTransport(rabbitmq_url)
    await transport._declare(queue, {"x-queue-type": "quorum", LIMIT: -1})
    await transport.publish(messages(queue, [b"one"]))
    await transport.aclose()
    assert f"The queue {queue} has a delivery limit" in caplog.text


async def test_a_queue_we_may_not_have_is_refused(transport: Transport) -> None:
    with pytest.raises(TransportMisconfiguredError, match=r"refuses access to the queue amq\.ours.*permissions"):
        await transport.declare(["amq.ours"])
    await transport.declare([])


async def test_a_queue_that_is_not_there_delivers_nothing(transport: Transport, queue: str) -> None:
    with pytest.raises(TransportMisconfiguredError, match=f"{queue} does not exist"):
        await take(transport, queue)
    assert await transport.depth(queue) == 0


async def test_a_receiver_learns_that_the_queue_was_deleted(
    transport: Transport, channel: AbstractChannel, queue: str
) -> None:
    await transport.declare([queue])
    async with receiving(transport, queue) as receiver:
        await receives(transport, queue, receiver)
        await channel.queue_delete(queue)
        with pytest.raises(TransportUnavailableError, match=queue):
            await receiver.take(1)


async def test_a_virtual_host_that_is_not_there_is_reported(rabbitmq_url: str, queue: str) -> None:
    async with connected(f"{rabbitmq_url}nowhere") as transport:
        with pytest.raises(TransportMisconfiguredError, match="virtual host"):
            await transport.declare([queue])
        assert await refusals(transport, messages(queue, [b"one"])) == {0: RefusalReason.REFUSED}


async def test_who_settles_twice_keeps_the_rest(transport: Transport, queue: str) -> None:
    """RabbitMQ would close the channel, and take back what else is on loan."""
    await transport.declare([queue])
    await transport.publish(messages(queue, [b"one", b"two"]))
    async with receiving(transport, queue) as receiver:
        first, second = await receiver.take(2)
        for _ in range(2):
            await first.ack()
        await first.reject("It is no JSON")
        await second.ack()
        assert await receiver.nothing_for(0.1)
    assert await has(transport, queue, 0)


# -- connections --------------------------------------------------------------------------------------------------


async def test_all_are_written_before_the_first_is_confirmed(
    rabbitmq_url: str, transport: Transport, queue: str
) -> None:
    """A call costs one round trip, not one for each message."""
    await transport.declare([queue])
    async with Proxy(rabbitmq_url) as proxy, connected(proxy.url) as far:
        await far.publish(messages(queue, [b"first"]))
        proxy.hold_answers()
        publishing = asyncio.create_task(far.publish(messages(queue, [b"%d" % n for n in range(300)])))
        assert await has(transport, queue, 301)
        assert not publishing.done()
        proxy.pass_answers()
        await publishing


async def test_no_more_than_a_window_is_under_way(
    rabbitmq_url: str, transport: Transport, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each window has its own time. If one is not confirmed, the rest is not sent, and told."""
    monkeypatch.setattr(adapter, "IN_FLIGHT", 10)
    await transport.declare([queue])
    batch = messages(queue, [b"%d" % n for n in range(25)])
    async with Proxy(rabbitmq_url) as proxy, connected(proxy.url) as far:
        await far.publish(batch)
        assert await has(transport, queue, 25)
        proxy.hold_answers()
        publishing = asyncio.create_task(refusals(far, batch))
        assert await has(transport, queue, 35)
        await proxy.cut()
        assert await publishing == dict.fromkeys(range(25), RefusalReason.UNREACHABLE)
    assert await transport.depth(queue) == 35


async def test_a_lost_confirmation_is_reported_as_unreachable(
    rabbitmq_url: str, transport: Transport, queue: str
) -> None:
    """The broker has it, and gets it once more: two doorbells for one load."""
    await transport.declare([queue])
    batch = messages(queue, [b"one", b"two"])
    async with Proxy(rabbitmq_url) as proxy, connected(proxy.url) as far:
        await far.publish(messages(queue, [b"first"]))
        proxy.hold_answers()
        publishing = asyncio.create_task(refusals(far, batch))
        assert await has(transport, queue, 3)
        await proxy.cut()
        proxy.pass_answers()
        assert await publishing == dict.fromkeys([0, 1], RefusalReason.UNREACHABLE)
        await far.publish(batch)
        assert await has(transport, queue, 5)


async def test_a_broker_that_does_not_answer_is_reported_as_unreachable(
    rabbitmq_url: str, transport: Transport, queue: str
) -> None:
    """Within the time that the URL gives; afterwards all is well again."""
    await transport.declare([queue])
    async with Proxy(rabbitmq_url) as proxy, connected(f"{proxy.url}?timeout=1") as far:
        await confirmed(far, messages(queue, [b"first"]))
        proxy.hold_answers()
        assert await refusals(far, messages(queue, [b"one"])) == {0: RefusalReason.UNREACHABLE}
        with pytest.raises(TransportUnavailableError, match="did not answer within"):
            await far.declare([queue])
        with pytest.raises(TransportUnavailableError, match="did not answer within"):
            await take(far, queue)
        await proxy.cut()
        proxy.pass_answers()
        await confirmed(far, messages(queue, [b"two"]))


async def test_a_connection_on_which_nobody_answers_is_tried_once(rabbitmq_url: str, queue: str) -> None:
    """It is not broken, so nobody says so before the next heartbeats; the next call connects anew."""
    async with Proxy(rabbitmq_url) as proxy, connected(f"{proxy.url}?timeout=1") as far:
        await answered(lambda: far.declare([queue]))
        proxy.swallow()
        with pytest.raises(TransportUnavailableError, match="did not answer within"):
            await far.declare([queue])
        connections = proxy.accepted
        with suppress(TransportUnavailableError):  # if the machine is too busy to answer in time
            await far.declare([queue])
        await eventually(lambda: proxy.accepted > connections)
        await answered(lambda: far.declare([queue]))
        await confirmed(far, messages(queue, [b"one"]))


async def test_a_receiver_learns_that_the_connection_broke(rabbitmq_url: str, transport: Transport, queue: str) -> None:
    """What it had on loan goes to others; the next call connects anew."""
    await transport.declare([queue])
    await transport.publish(messages(queue, [b"one"]))
    async with Proxy(rabbitmq_url) as proxy, connected(proxy.url) as far:
        async with receiving(far, queue) as receiver:
            [lost] = await receiver.take(1)
            await proxy.cut()
            with pytest.raises(TransportUnavailableError):
                await receiver.take(1)
            await lost.ack()
        async with receiving(far, queue) as receiver:
            [again] = await receiver.take(1)
            assert again.body == b"one"
            await again.ack()


async def test_another_host_is_tried_when_the_first_is_gone(
    rabbitmq_url: str, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    real = rabbitmq_url.split("@")[1].rstrip("/")
    async with connected(f"amqp://guest:guest@127.0.0.1:1/?hosts=127.0.0.1:2,{real}") as transport:
        await transport.declare([queue])
        await transport.publish(messages(queue, [b"one"]))
    assert caplog.text.count("Trying another RabbitMQ") >= 2


async def test_another_host_is_tried_when_the_first_says_nothing(
    rabbitmq_url: str, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A frozen broker accepts connections. The next ones begin with the host that answered."""
    real = rabbitmq_url.split("@")[1].rstrip("/")
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        url = f"amqp://guest:guest@127.0.0.1:{frozen.getsockname()[1]}/?hosts={real}&timeout=4"
        async with connected(url) as transport:
            await answered(lambda: transport.declare([queue]))
            tried = caplog.text.count("Trying another RabbitMQ")
            assert tried >= 1
            assert isinstance(transport, RabbitmqTransport)
            await transport._publishing.drop()
            await transport.publish(messages(queue, [b"one"]))
            assert await has(transport, queue, 1)
    assert caplog.text.count("Trying another RabbitMQ") == tried


async def test_tls_checks_the_certificate(rabbitmq_url: str, queue: str, tmp_path: Path) -> None:
    key, cert = certificate(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    async with Proxy(rabbitmq_url, tls=tls) as proxy:
        url = proxy.url.replace("amqp://", "amqps://")
        async with connected(f"{url}?cafile={cert}") as transport:
            await transport.declare([queue])
            await transport.publish(messages(queue, [b"one"]))
        async with connected(url) as stranger:
            with pytest.raises(TransportMisconfiguredError, match=r"certificate.*cafile"):
                await stranger.declare([queue])
        async with connected(f"{url}?cafile={tmp_path}/none.pem") as mistaken:
            with pytest.raises(TransportMisconfiguredError, match="is missing"):
                await mistaken.declare([queue])


async def test_a_broker_without_room_throttles(own: RabbitmqServer, queue: str) -> None:
    """It can still be emptied, and takes messages once there is room."""
    async with connected(own.url) as transport, connected(f"{own.url}?timeout=1") as hasty:
        await transport.declare([queue])
        await transport.publish(messages(queue, [b"one"]))
        own.control("set_vm_memory_high_watermark", "0.000001")
        throttled = {0: RefusalReason.THROTTLED}
        # One that could not connect in time is told that it is unreachable.
        assert await until(lambda: refusals(hasty, messages(queue, [b"two"])), lambda refused: refused == throttled)
        async with receiving(transport, queue) as receiver:
            [delivery] = await receiver.take(1)
            await delivery.ack()
        own.control("set_vm_memory_high_watermark", "0.9")
        assert await until(lambda: refusals(hasty, messages(queue, [b"three"])), lambda refused: not refused)


# -- the URL ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("amqp:///", "names no host"),
        (f"amqp://guest:{SECRET}@/", "names no host"),
        (f"amqp://guest:{SECRET}/more@host:5672/", "names no host"),
        (f"amqp://guest:{SECRET}@host:port/", "names no host"),
        (f"amqp://guest:{SECRET}@[::1/", "names no host"),
        (f"amqp://guest:{SECRET}@host/?queue_typ=classic", "Did you mean 'queue_type'"),
        (f"amqp://guest:{SECRET}@host/?queue_type=stream", "quorum, classic"),
        (f"amqp://guest:{SECRET}@host/?timeout=0", "seconds"),
        (f"amqp://guest:{SECRET}@host/?hosts=a:{SECRET}@b", "hosts with commas"),
        (f"amqp://guest:{SECRET}@host/?heartbeat=often", "heartbeat"),
    ],
)
def test_a_url_that_cannot_work_is_refused_at_once(url: str, wanted: str) -> None:
    with pytest.raises(TransportMisconfiguredError, match=wanted) as refused:
        find_transport(url)
    assert SECRET not in str(refused.value)


async def take(transport: Transport, queue: str) -> None:
    async with receiving(transport, queue) as receiver:
        await receiver.take(1)


MAKE_CERTIFICATE = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost "
    "-addext subjectAltName=IP:127.0.0.1"
)


def certificate(folder: Path) -> tuple[Path, Path]:
    """A key and a certificate for 127.0.0.1 that only who is told trusts."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [*MAKE_CERTIFICATE.split(), "-keyout", str(key), "-out", str(cert)],
        check=True,
        capture_output=True,
    )
    return key, cert


async def test_a_connection_that_fails_is_reported_by_busload_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever needed it tells, once; the library would log an error each time. Other users of it still hear that."""
    url = "amqp://guest:guest@127.0.0.1:1/"
    async with connected(url) as transport:
        with pytest.raises(TransportUnavailableError):
            await transport.declare(["busload.nowhere"])
    assert [record for record in caplog.records if record.name.startswith("aiormq")] == []
    with pytest.raises(aiormq.AMQPError):
        await aiormq.connect(url)
    assert [record.levelname for record in caplog.records if record.name.startswith("aiormq")] == ["ERROR"]
