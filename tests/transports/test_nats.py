"""NATS JetStream, against a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, RetentionPolicy, StorageType, StreamConfig

from busload.errors import PublishError, RefusalReason, TransportMisconfiguredError, TransportUnavailableError
from busload.testing.messages import SECRET, WITHIN, connected, messages, receiving, refusals, said_by, until
from busload.transports import Message, Transport, broker, find_transport, nats_connection
from busload.transports import nats as adapter
from tests.brokers.nats import PASSWORD, NatsServer, cluster_url, nats_cluster
from tests.brokers.proxy import Proxy
from tests.transports.own_server import OwnServerContract
from tests.transports.patience import answered, confirmed, is_so_for_one, receives


@pytest.fixture(autouse=True)
def time_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared server may be slow to answer; a URL with a `timeout` has less."""
    monkeypatch.setattr(nats_connection, "CONNECT_WITHIN", WITHIN)


class TestNats(OwnServerContract):
    quiet = 0.15

    @pytest.fixture(autouse=True)
    def time_to_close(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What a receiver holds at its end reaches a server that is slow to answer."""
        for module in (broker, nats_connection):
            monkeypatch.setattr(module, "CLOSE_WITHIN", WITHIN)

    @pytest.fixture
    def url(self, nats_url: str) -> str:
        """What is given back comes again at once, not after a time."""
        return f"{nats_url}?ack_wait=120"

    @pytest.fixture
    def wrong_credentials_url(self, nats_url: str) -> str:
        return nats_url.replace(PASSWORD, SECRET)

    @pytest.fixture
    def restartable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NatsServer]:
        """It is killed, and starts with the files it had. Nobody has to wait for its silence to notice."""
        monkeypatch.setattr(adapter, "SILENCE", 120)
        with NatsServer(tmp_path) as server:
            server.url += "?ack_wait=1"
            yield server

    @pytest.fixture
    def secure_url(self, tmp_path: Path, certificate: tuple[Path, Path]) -> Iterator[str]:
        file, key = certificate
        with NatsServer(tmp_path, f'tls {{ cert_file: "{file}", key_file: "{key}" }}') as server:
            yield server.url.replace("nats://", "natss://")


# -- the URL ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("nats://localhost?replica=3", "Did you mean 'replicas'?"),
        ("nats://localhost?replicas=2&replicas=3", "twice"),
        ("nats://localhost?replicas=0", "from 1 to 5"),
        ("nats://localhost?replicas=many", "from 1 to 5"),
        ("nats://localhost?ack_wait=0", "more than 0"),
        ("nats://localhost?timeout=soon", "more than 0"),
        ("nats://localhost?ca=/etc/ca.pem", "wanted natss://"),
        ("nats://localhost:port", "cannot be read"),
        ("nats://", "cannot be read"),
        (f"nats://me:{SECRET}@a:1,nats://me:{SECRET}@b:2", "without `nats://`"),
        (f"nats://me:{SECRET}@[::1", "cannot be read"),
    ],
)
def test_a_url_that_makes_no_sense_is_refused_at_once(url: str, complaint: str) -> None:
    with pytest.raises(TransportMisconfiguredError) as refused:
        find_transport(url)
    assert complaint in str(refused.value)
    assert SECRET not in said_by(refused.value)


async def test_a_server_that_is_gone_does_not_matter_if_another_is_there(nats_url: str, queue: str) -> None:
    credentials, _, host = nats_url.rpartition("@")
    async with connected(f"{credentials}@127.0.0.1:1,{host},127.0.0.1:2") as transport:
        await transport.declare([queue])
        await transport.publish(messages(queue, [b"one"]))
        assert await transport.depth(queue) == 1
    assert "@" not in repr(transport)


async def test_a_token_and_odd_characters_in_a_password_are_accepted(tmp_path: Path, queue: str) -> None:
    with NatsServer(tmp_path / "token", 'authorization { token: "a/b@c" }') as server:
        async with connected(server.url.replace("//", "//a%2Fb%40c@")) as transport:
            await transport.declare([queue])
        async with connected(server.url) as transport:
            with pytest.raises(TransportMisconfiguredError, match="token in the URL is missing or wrong"):
                await transport.declare([queue])
            assert await refusals(transport, messages(queue, [b"one"])) == {0: RefusalReason.REFUSED}
    with NatsServer(tmp_path / "user", 'authorization { user: "a:b", password: "c@d" }') as server:
        async with connected(server.url.replace("//", "//a%3Ab:c%40d@")) as transport:
            await transport.declare([queue])


async def test_a_password_for_tls_is_never_sent_in_the_clear(queue: str) -> None:
    """Somebody in between says that the server has no TLS."""
    heard = bytearray()

    async def eavesdrop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.15.1","headers":true,"max_payload":1048576}\r\n')
        while data := await reader.read(1000):
            heard.extend(data)
            writer.write(b"PONG\r\n")
        writer.close()

    server = await asyncio.start_server(eavesdrop, "127.0.0.1", 0)
    async with server, connected(f"natss://me:{SECRET}@127.0.0.1:{server.sockets[0].getsockname()[1]}") as transport:
        with pytest.raises(TransportMisconfiguredError, match="no TLS"):
            await transport.declare([queue])
    assert SECRET.encode() not in heard


# -- queues as they must be -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        {"retention": RetentionPolicy.LIMITS},
        {"storage": StorageType.MEMORY},
        {"no_ack": True},
        {"subjects": ["something.else"]},
    ],
    ids=str,
)
async def test_a_stream_with_other_settings_is_reported(nats_url: str, queue: str, other: dict[str, Any]) -> None:
    wanted: dict[str, Any] = {"subjects": [queue], "retention": RetentionPolicy.WORK_QUEUE}
    async with administration(nats_url) as admin, connected(nats_url) as transport:
        if "subjects" in other:
            other["subjects"] = [f"other.{queue}"]
        await admin.add_stream(StreamConfig(name=stream_of(queue), **wanted | other))
        with pytest.raises(TransportMisconfiguredError) as told:
            await transport.declare([queue])
        assert stream_of(queue) in str(told.value) and next(iter(other)) in str(told.value)
        with pytest.raises(TransportMisconfiguredError):
            async with receiving(transport, queue) as receiver:
                await receiver.take(1)


async def test_a_stream_with_limits_of_its_own_is_fine_and_says_when_it_is_full(nats_url: str, queue: str) -> None:
    """By index; it takes more once there is room."""
    config = StreamConfig(name=stream_of(queue), subjects=[queue], retention=RetentionPolicy.WORK_QUEUE, max_msgs=2)
    config.discard = "new"  # type: ignore[assignment]
    async with administration(nats_url) as admin, connected(nats_url) as transport:
        await admin.add_stream(config)
        await transport.declare([queue])
        refused = await refusals(transport, messages(queue, [b"one", b"two", b"three", b"four"]))
        assert refused == dict.fromkeys([2, 3], RefusalReason.THROTTLED)


async def test_a_consumer_with_other_settings_is_reported(nats_url: str, queue: str) -> None:
    async with administration(nats_url) as admin, connected(nats_url) as transport:
        await admin.add_stream(
            StreamConfig(name=stream_of(queue), subjects=[queue], retention=RetentionPolicy.WORK_QUEUE)
        )
        await admin.add_consumer(stream_of(queue), ConsumerConfig(durable_name="workers", max_deliver=5, ack_wait=30))
        with pytest.raises(TransportMisconfiguredError, match="max_deliver"):
            await transport.declare([queue])


async def test_more_replicas_than_servers_are_reported(nats_url: str, queue: str) -> None:
    async with connected(f"{nats_url}?replicas=3") as transport:
        with pytest.raises(TransportMisconfiguredError, match="replicas"):
            await transport.declare([queue])
    async with connected(nats_url) as transport:
        await transport.declare([queue])
    async with connected(f"{nats_url}?replicas=2") as transport:
        with pytest.raises(TransportMisconfiguredError, match=r"found \{'num_replicas': 1\}"):
            await transport.declare([queue])


async def test_another_ack_wait_is_taken_over(nats_url: str, queue: str) -> None:
    for wanted in (5, 7):
        async with connected(f"{nats_url}?ack_wait={wanted}") as transport:
            await transport.declare([queue])
    async with administration(nats_url) as admin:
        config = (await admin.consumer_info(stream_of(queue), "workers")).config
        assert (config.ack_wait, config.max_deliver, config.max_ack_pending) == (7, -1, -1)


async def test_rights_that_are_missing_are_reported(tmp_path: Path, queue: str) -> None:
    """Within moments: NATS tells them beside its answers."""
    rights = (
        f"authorization {{ users: [{{ user: all, password: p }}, {{ user: few, password: p, permissions: "
        f'{{ publish: {{ deny: ["{queue}", "$JS.API.STREAM.CREATE.>"] }} }} }}] }}'
    )
    with NatsServer(tmp_path, rights) as server:
        async with (
            connected(server.url.replace("//", "//all:p@")) as all_rights,
            connected(server.url.replace("//", "//few:p@")) as few_rights,
        ):
            with pytest.raises(TransportMisconfiguredError, match="permissions violation"):
                await few_rights.declare([queue])
            await all_rights.declare([queue, f"{queue}-b"])
            await few_rights.declare([queue])  # it is there: nothing has to be made
            mixed = [*messages(queue, [b"one"]), *messages(f"{queue}-b", [b"two"])]
            assert await refusals(few_rights, mixed) == {0: RefusalReason.REFUSED}
            assert await all_rights.depth(f"{queue}-b") == 1


async def test_the_documented_rights_are_enough(tmp_path: Path) -> None:
    rights = (
        "authorization { users: [{ user: us, password: p, permissions: { "
        'publish: { allow: ["busload.>", "$JS.API.>", "$JS.ACK.>"] }, subscribe: { allow: ["_INBOX.>"] } } }] }'
    )
    with NatsServer(tmp_path, rights) as server:
        async with connected(server.url.replace("//", "//us:p@")) as transport:
            await transport.declare(["busload.orders"])
            await transport.publish(messages("busload.orders", [b"one", b"two", b"three"]))
            async with receiving(transport, "busload.orders", prefetch=2) as receiver:
                await (await receiver.take(1))[0].ack()
                await (await receiver.take(1))[0].reject("It is no JSON")
                await receiver.take(1)
            assert await transport.depth("busload.orders") == 1
            assert len(await transport.peek("busload.orders", limit=5) or []) == 1


async def test_a_server_without_jetstream_is_reported(tmp_path: Path, queue: str) -> None:
    with NatsServer(tmp_path, jetstream=False) as server:
        async with connected(server.url) as transport:
            with pytest.raises(TransportUnavailableError, match="-js"):
                await transport.declare([queue])
            assert set((await refusals(transport, messages(queue, [b"one"]))).values()) <= {
                RefusalReason.UNROUTABLE,
                RefusalReason.UNREACHABLE,
            }


# -- messages ---------------------------------------------------------------------------------------------------------


async def test_a_repetition_is_dropped(nats_url: str, queue: str) -> None:
    """The same id, for two minutes; another round has another id."""
    async with connected(nats_url) as transport:
        await transport.declare([queue])
        for _ in range(3):
            await transport.publish([Message(queue, "1024-2047-0", b"same")])
        await transport.publish([Message(queue, "1024-2047-1", b"same")])
        assert await transport.depth(queue) == 2


async def test_what_the_server_takes_at_most_is_asked_of_it(tmp_path: Path, queue: str) -> None:
    with NatsServer(tmp_path, "max_payload: 8KB") as server:
        async with connected(server.url) as transport:
            await transport.declare([queue])
            assert transport.max_bytes < 8192
            bodies = [bytes(transport.max_bytes), bytes(transport.max_bytes + 1), b"small"]
            assert await refusals(transport, messages(queue, bodies)) == {1: RefusalReason.TOO_LARGE}
            assert await transport.depth(queue) == 2


async def test_what_is_on_loan_is_renewed(nats_url: str, queue: str) -> None:
    """It does not come again while it is held, however long that is; it does once its holder is gone."""

    async def is_renewed(seconds: int) -> bool:
        url, own = f"{nats_url}?ack_wait={seconds}", f"{queue}-{seconds}"
        async with connected(url) as transport, connected(url) as dying:
            await transport.declare([own])
            await transport.publish(messages(own, [b"one"]))
            async with receiving(dying, own) as holder:
                await holder.take(1)
                async with receiving(transport, own) as other:
                    if not await other.nothing_for(1.5 * seconds) or not await holder.nothing_for(0.1):
                        return False
                    await cut(dying)
                    [again] = await other.take(1)
                    assert again.body == b"one"
                    await again.ack()
        return True

    assert await is_so_for_one(is_renewed)


async def test_what_is_not_asked_for_stays_where_it_is(nats_url: str, queue: str) -> None:
    """More than a request can bring, and slower than they expire: nothing is on loan beyond the prefetch."""
    async with connected(nats_url) as transport, administration(nats_url) as admin:
        await transport.declare([queue])
        await transport.publish(messages(queue, [b"%d" % n for n in range(20)]))
        async with receiving(transport, queue, prefetch=4) as receiver:
            for _ in range(3):
                for delivery in await receiver.take(4):
                    await delivery.ack()
            await receiver.take(4)

            async def held_and_waiting() -> tuple[object, object]:
                info = await admin.consumer_info(stream_of(queue), "workers")
                return info.num_ack_pending, info.num_pending

            # The server may still be busy with the last acknowledgements.
            assert await until(held_and_waiting, lambda found: found == (4, 4))


async def test_requests_that_expire_are_repeated(nats_url: str, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "PULL_FOR", 0.2)
    monkeypatch.setattr(adapter, "HEARTBEAT", 0.05)
    async with (
        connected(nats_url) as transport,
        administration(nats_url) as admin,
        receiving(transport, queue, prefetch=4) as receiver,
    ):
        assert await receiver.nothing_for(0.7)
        await transport.publish(messages(queue, [b"%d" % n for n in range(10)]))
        await receiver.take(4)
        assert await receiver.nothing_for(0.3)
        assert (await admin.consumer_info(stream_of(queue), "workers")).num_ack_pending == 4


async def test_a_message_of_another_client_is_delivered_too(nats_url: str, queue: str) -> None:
    """Also if it looks like a word of the server's."""
    async with connected(nats_url) as transport, administration(nats_url) as admin:
        await transport.declare([queue])
        await admin.publish(queue, b"", headers={"Status": "503", "Description": "Consumer Deleted"})
        async with receiving(transport, queue) as receiver:
            [delivery] = await receiver.take(1)
            assert delivery.body == b""
            await delivery.reject("It is empty\r\nand more")
            assert await receiver.nothing_for(0.15)
        assert await transport.depth(queue) == 0


async def test_silent_streams_are_asked_all_at_once(tmp_path: Path, queue: str) -> None:
    """Many without a leader cost no more than one. A client of ours plays JetStream, and waits until all were asked."""
    queues, asked = [f"{queue}-{n}" for n in range(5)], []

    async def answer(request: Msg) -> None:
        asked.append(request)
        for each in asked if len(asked) == len(queues) else ():
            await each.respond(json.dumps({"error": {"code": 404, "err_code": adapter.STREAM_MISSING}}).encode())

    with NatsServer(tmp_path, jetstream=False) as server:
        jetstream = await nats.connect(server.url)
        await jetstream.subscribe("$JS.API.STREAM.INFO.*", cb=answer)
        await jetstream.flush()
        async with connected(server.url) as transport:
            some = [message for each in queues for message in messages(each, [b"one"])]
            assert await refusals(transport, some) == dict.fromkeys(range(5), RefusalReason.UNROUTABLE)
        await jetstream.close()


# -- faults -----------------------------------------------------------------------------------------------------------


async def test_a_consumer_that_was_removed_is_made_again(nats_url: str, queue: str) -> None:
    async with connected(nats_url) as transport, administration(nats_url) as admin:
        await transport.declare([queue])
        async with receiving(transport, queue) as receiver:
            await receives(transport, queue, receiver)
            await admin.delete_consumer(stream_of(queue), "workers")
            with pytest.raises(TransportUnavailableError, match="Consumer Deleted"):
                await receiver.take(1)
        await transport.publish(messages(queue, [b"one"]))
        async with receiving(transport, queue) as receiver:
            await receiver.take(1)


async def test_a_confirmation_is_not_awaited_from_the_dead(tmp_path: Path, queue: str) -> None:
    with NatsServer(tmp_path) as server:
        async with connected(f"{server.url}?timeout=120") as transport, asyncio.timeout(WITHIN):
            await transport.declare([queue])
            server.freeze()
            publishing = asyncio.create_task(refusals(transport, messages(queue, [b"one"])))
            await asyncio.wait({publishing}, timeout=0.1)
            server.kill()
            assert await publishing == {0: RefusalReason.UNREACHABLE}


async def test_a_lost_confirmation_delivers_once(nats_url: str, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has it, and drops the repetition, which goes out through a new connection."""
    monkeypatch.setattr(nats_connection, "CLOSE_WITHIN", 1.0)
    async with Proxy(nats_url) as proxy, connected(f"{proxy.url}?timeout=1") as transport:
        await answered(lambda: transport.declare([queue]))
        some = messages(queue, [b"one"])
        proxy.swallow()
        assert await refusals(transport, some) == {0: RefusalReason.UNREACHABLE}
        await confirmed(transport, some)
        assert await answered(lambda: transport.depth(queue)) == 1


async def test_a_frozen_server_is_unreachable_until_it_thaws(
    tmp_path: Path, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is confirmed within the timeout; the server may have it, and then drops the repetition.

    Those who wait for a message notice it as well.
    """
    monkeypatch.setattr(adapter, "HEARTBEAT", 0.1)
    monkeypatch.setattr(nats_connection, "CLOSE_WITHIN", 1.0)
    with NatsServer(tmp_path) as server:
        async with connected(f"{server.url}?timeout=1") as transport:
            await answered(lambda: transport.declare([queue]))
            some = messages(queue, [b"%d" % n for n in range(1500)])

            async def heartbeats_are_heard(seconds: int) -> bool:
                monkeypatch.setattr(adapter, "SILENCE", seconds)
                try:
                    async with receiving(transport, queue) as receiver:
                        return await receiver.nothing_for(1.2 * seconds)
                except TransportUnavailableError:
                    return False

            assert await is_so_for_one(heartbeats_are_heard)
            monkeypatch.setattr(adapter, "SILENCE", 2.0)
            async with receiving(transport, queue) as receiver:
                assert await receiver.nothing_for(0.1)
                server.freeze()
                with pytest.raises(TransportUnavailableError, match="silent"):
                    await receiver.take(1)
            refused = await refusals(transport, some)
            assert refused == dict.fromkeys(range(1500), RefusalReason.UNREACHABLE)
            with pytest.raises(TransportUnavailableError):
                await transport.declare([queue])
            server.thaw()
            while refused:
                refused = await refusals(transport, some)
            assert await answered(lambda: transport.depth(queue)) == 1500


@pytest.mark.chaos
async def test_three_servers_outlive_the_death_of_a_leader(tmp_path: Path, queue: str) -> None:
    """While a leader is elected, calls fail as unreachable; nothing that was confirmed is lost."""
    with nats_cluster(tmp_path, 3) as servers:
        async with connected(f"{cluster_url(servers)}?replicas=3&ack_wait=2") as transport:
            await transport.declare([queue])
            await transport.publish(messages(queue, [b"before"]))
            async with administration(cluster_url(servers)) as admin:
                cluster = (await admin.stream_info(stream_of(queue))).cluster
            assert cluster is not None and cluster.leader is not None
            servers[int(cluster.leader[-1])].kill()
            await persistently(transport, messages(queue, [b"after"]))
            seen: set[bytes] = set()
            while len(seen) < 2:
                try:
                    async with receiving(transport, queue) as receiver:
                        while len(seen) < 2:
                            [delivery] = await receiver.take(1)
                            seen.add(delivery.body)
                            await delivery.ack()
                except TransportUnavailableError:
                    continue
            assert seen == {b"before", b"after"}


@asynccontextmanager
async def administration(url: str) -> AsyncIterator[JetStreamContext]:
    credentials, _, hosts = url.removeprefix("nats://").rpartition("@")
    client = await nats.connect([f"nats://{credentials}@{host}" if credentials else host for host in hosts.split(",")])
    try:
        yield client.jetstream()
    finally:
        await client.close()


async def cut(transport: Any) -> None:
    """As if its process had died: nothing is given back."""
    transport._connection.client._transport.close()
    await asyncio.sleep(0)


async def persistently(transport: Transport, batch: Sequence[Message]) -> None:
    while batch:
        try:
            await transport.publish(batch)
            return
        except PublishError as failed:
            batch = [batch[i] for i, refusal in failed.refused.items() if refusal.reason == RefusalReason.UNREACHABLE]
            if len(batch) < len(failed.refused):
                raise


def stream_of(queue: str) -> str:
    return queue.replace(".", "~")
