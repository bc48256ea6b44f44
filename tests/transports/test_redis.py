"""Redis Streams, against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Connection, Redis

from busload.errors import RefusalReason, TransportMisconfiguredError, TransportUnavailableError
from busload.testing.messages import SECRET, WITHIN, connected, messages, receiving, refusals, said_by
from busload.transports import broker, find_transport
from busload.transports import redis as adapter
from tests.brokers.proxy import Proxy
from tests.brokers.redis import PASSWORD, RedisServer
from tests.transports.own_server import OwnServerContract
from tests.transports.patience import answered, confirmed, is_so_for_one, receives


@pytest.fixture(autouse=True)
def time_to_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was acknowledged last reaches a server that is slow to answer."""
    for module in (adapter, broker):
        monkeypatch.setattr(module, "CLOSE_WITHIN", WITHIN)


class TestRedis(OwnServerContract):
    quiet = 0.15

    @pytest.fixture
    def url(self, redis_url: str) -> str:
        """What is given back comes again at once, not after a time."""
        return f"{redis_url}?min_idle=120"

    @pytest.fixture
    def wrong_credentials_url(self, redis_url: str) -> str:
        return redis_url.replace(PASSWORD, SECRET)

    @pytest.fixture
    def restartable(self, tmp_path: Path) -> Iterator[RedisServer]:
        """It is killed, and starts with the files it had."""
        with RedisServer(tmp_path) as server:
            server.url += "?min_idle=1"
            yield server

    @pytest.fixture
    def secure_url(self, tmp_path: Path, certificate: tuple[Path, Path]) -> Iterator[str]:
        file, key = map(str, certificate)
        server = RedisServer(tmp_path, "--tls-cert-file", file, "--tls-key-file", key, "--tls-ca-cert-file", file)
        with server.with_options("--port", "0", "--tls-port", str(server.port)):
            yield f"rediss://127.0.0.1:{server.port}"


# -- the URL ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("redis://localhost?min_idel=3", "Did you mean 'min_idle'?"),
        ("redis://localhost?timeout=1&timeout=2", "twice"),
        ("redis://localhost?min_idle=0", "more than 0"),
        ("redis://localhost?timeout=soon", "more than 0"),
        ("redis://localhost?ca=/etc/ca.pem", "wanted rediss://"),
        (f"redis://me:{SECRET}@localhost:port", "cannot be read"),
        (f"redis://me:{SECRET}@localhost/zero", "cannot be read"),
        (f"redis://me:{SECRET}@[::1", "cannot be read"),
        ("redis://", "cannot be read"),
    ],
)
def test_a_url_that_makes_no_sense_is_refused_at_once(url: str, complaint: str) -> None:
    with pytest.raises(TransportMisconfiguredError) as refused:
        find_transport(url)
    assert complaint in str(refused.value)
    assert SECRET not in said_by(refused.value)


async def test_a_password_that_is_missing_is_reported(redis_url: str, queue: str) -> None:
    async with connected(redis_url.replace(f":{PASSWORD}@", "")) as transport:
        with pytest.raises(TransportMisconfiguredError, match="Authentication required"):
            await transport.declare([queue])
        assert await refusals(transport, messages(queue, [b"one"])) == {0: RefusalReason.REFUSED}


async def test_a_database_that_is_not_there_is_reported(redis_url: str, queue: str) -> None:
    async with connected(f"{redis_url.removesuffix('/0')}/5000") as transport:
        with pytest.raises(TransportMisconfiguredError, match="DB index"):
            await transport.declare([queue])


# -- streams ----------------------------------------------------------------------------------------------------------


async def test_a_key_of_another_type_is_reported(redis_url: str, queue: str) -> None:
    """By index when publishing; the others are confirmed."""
    async with connected(redis_url) as transport, administration(redis_url) as admin:
        await admin.set(queue, "a cache, perhaps")
        with pytest.raises(TransportMisconfiguredError, match=queue):
            await transport.declare([queue])
        mixed = [*messages(queue, [b"one"]), *messages(f"{queue}-b", [b"two"])]
        assert await refusals(transport, mixed) == {0: RefusalReason.REFUSED}
        assert await transport.depth(f"{queue}-b") == 1
        with pytest.raises(TransportMisconfiguredError):
            await transport.depth(queue)
        with pytest.raises(TransportMisconfiguredError):
            await transport.peek(queue, limit=1)


async def test_what_is_acknowledged_leaves_nothing_behind(redis_url: str, queue: str) -> None:
    async with connected(redis_url) as transport, administration(redis_url) as admin:
        await transport.publish(messages(queue, [b"one", b"two"]))
        async with receiving(transport, queue) as receiver:
            for delivery in await receiver.take(2):
                await delivery.ack()
        assert await admin.xlen(queue) == 0
        [group] = await admin.xinfo_groups(queue)
        assert group["pending"] == 0


async def test_the_last_acknowledgements_are_sent_before_the_connection_closes(redis_url: str, queue: str) -> None:
    """Though it takes several round trips."""
    async with connected(redis_url) as transport:
        await transport.publish(messages(queue, [b"%d" % n for n in range(5000)]))
        async with receiving(transport, queue, prefetch=5000) as receiver:
            for delivery in await receiver.take(5000):
                await delivery.ack()
        assert await transport.depth(queue) == 0


async def test_what_nobody_can_read_is_kept_aside(redis_url: str, queue: str) -> None:
    async with connected(redis_url) as transport, administration(redis_url) as admin:
        await transport.publish(messages(queue, [b"\xff"]))
        async with receiving(transport, queue) as receiver:
            [delivery] = await receiver.take(1)
            await delivery.reject("It is no JSON")
        [(_, kept)] = await admin.xrange(f"{queue}:dead")
        assert (kept[b"body"], kept[b"reason"]) == (b"\xff", b"It is no JSON")
        assert await admin.xlen(queue) == 0


async def test_what_nobody_can_read_does_not_fill_redis(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis throws the oldest away by the hundred; the queue itself has no bound."""
    monkeypatch.setattr(adapter, "MOST_DEAD", 100)
    async with connected(redis_url) as transport, administration(redis_url) as admin:
        await transport.publish(messages(queue, [b"%d" % n for n in range(500)]))
        async with receiving(transport, queue, prefetch=500) as receiver:
            for delivery in await receiver.take(500):
                await delivery.reject("It is no JSON")
        assert 100 <= await admin.xlen(f"{queue}:dead") < 300
        await transport.publish(messages(queue, [b"%d" % n for n in range(500)]))
        async with receiving(transport, queue, prefetch=500) as receiver:
            await receiver.take(500)
        assert await admin.xlen(queue) == 500


async def test_an_entry_of_another_client_is_delivered_too(redis_url: str, queue: str) -> None:
    """Its body is empty, which nobody can read."""
    async with connected(redis_url) as transport, administration(redis_url) as admin:
        await admin.xadd(queue, {"something": "else"})
        async with receiving(transport, queue) as receiver:
            [delivery] = await receiver.take(1)
            assert delivery.body == b""
            await delivery.reject("It is empty")
        assert await transport.depth(queue) == 0


async def test_what_a_dead_consumer_held_comes_again(redis_url: str, queue: str) -> None:
    """Redis would keep it for the dead one for ever."""
    async with connected(f"{redis_url}?min_idle=0.3") as transport, administration(redis_url) as admin:
        await transport.declare([queue])
        await transport.publish(messages(queue, [b"%d" % n for n in range(25)]))
        await admin.xreadgroup("workers", "dead", {queue: ">"}, count=25)
        async with receiving(transport, queue, prefetch=4) as receiver:
            seen: set[bytes] = set()
            while len(seen) < 25:  # one may come twice, if it is not acknowledged quickly enough
                [delivery] = await receiver.take(1)
                seen.add(delivery.body)
                await delivery.ack()


async def test_what_is_on_loan_is_renewed(redis_url: str, queue: str) -> None:
    """It does not come again while it is held, however long that is."""

    async def is_renewed(seconds: int) -> bool:
        url, own = f"{redis_url}?min_idle={seconds}", f"{queue}-{seconds}"
        async with connected(url) as transport, connected(url) as other:
            await transport.publish(messages(own, [b"one"]))
            async with receiving(transport, own) as holder, receiving(other, own) as second:
                [held] = await holder.take(1)
                if not await second.nothing_for(1.5 * seconds):
                    return False
                assert await holder.nothing_for(0.1)
                await held.ack()
            return await transport.depth(own) == 0

    assert await is_so_for_one(is_renewed)


async def test_no_more_are_taken_than_prefetched(redis_url: str, queue: str) -> None:
    async with connected(redis_url) as transport, administration(redis_url) as admin:
        await transport.publish(messages(queue, [b"%d" % n for n in range(20)]))
        async with receiving(transport, queue, prefetch=4) as receiver:
            for _ in range(3):
                for delivery in await receiver.take(4):
                    await delivery.ack()
            await receiver.take(4)
            [group] = await admin.xinfo_groups(queue)
            assert group["pending"] == 4
            assert await admin.xlen(queue) == 8


async def test_consumers_that_are_gone_are_forgotten(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each iterator has a name of its own. One that still holds something is kept: with it, that would be lost."""
    monkeypatch.setattr(adapter, "FORGET_AFTER", 0.001)
    async with connected(redis_url) as transport, administration(redis_url) as admin:
        await transport.declare([queue])
        await admin.xadd(queue, {"body": "held"})
        await admin.xreadgroup("workers", "holds", {queue: ">"})
        await admin.xgroup_createconsumer(queue, "workers", "idle")
        names = {b"holds", b"idle"}
        while b"idle" in names:
            async with receiving(transport, queue) as receiver:
                assert await receiver.nothing_for(0.05)
            names = {each["name"] for each in await admin.xinfo_consumers(queue, "workers")}
        assert b"holds" in names


# -- faults -----------------------------------------------------------------------------------------------------------


async def test_messages_for_which_redis_has_no_memory_are_refused_by_index(tmp_path: Path, queue: str) -> None:
    """It passes once there is some."""
    with RedisServer(tmp_path) as server:
        async with connected(server.url) as transport, administration(server.url) as admin:
            await transport.declare([queue])
            await admin.config_set("maxmemory", "1")
            refused = await refusals(transport, messages(queue, [b"one", b"two"]))
            assert refused == dict.fromkeys([0, 1], RefusalReason.THROTTLED)
            with pytest.raises(TransportUnavailableError):
                await transport.declare([f"{queue}-b"])
            await admin.config_set("maxmemory", "0")
            await transport.publish(messages(queue, [b"three"]))


async def test_a_replica_cannot_be_used_now(tmp_path: Path, queue: str) -> None:
    """After a failover the address may lead to one for a moment."""
    with RedisServer(tmp_path) as server:
        async with connected(server.url) as transport, administration(server.url) as admin:
            await admin.execute_command("REPLICAOF", "127.0.0.1", "1")
            assert await refusals(transport, messages(queue, [b"one"])) == {0: RefusalReason.UNREACHABLE}
            with pytest.raises(TransportUnavailableError, match="replica"):
                await transport.declare([queue])
            await admin.execute_command("REPLICAOF", "NO", "ONE")
            await transport.publish(messages(queue, [b"two"]))


async def test_rights_that_are_missing_are_reported(tmp_path: Path, queue: str) -> None:
    with RedisServer(tmp_path) as server:
        async with administration(server.url) as admin:
            await admin.execute_command("ACL", "SETUSER", "few", "on", ">p:w", "+@all", "-xgroup", f"~{queue}")
        async with connected(server.url.replace("//", "//few:p%3Aw@")) as transport:
            with pytest.raises(TransportMisconfiguredError, match="Grant it"):
                await transport.declare([queue])
            mixed = [*messages(queue, [b"one"]), *messages(f"{queue}-b", [b"two"])]
            assert await refusals(transport, mixed) == {1: RefusalReason.REFUSED}


async def test_the_documented_rights_are_enough(tmp_path: Path) -> None:
    rights = (
        "+xadd +xack +xdel +xlen +xrange +xgroup +xinfo +xreadgroup +xclaim +xautoclaim +multi +exec +ping +select "
        "+client ~busload.*"
    )
    with RedisServer(tmp_path) as server:
        async with administration(server.url) as admin:
            await admin.execute_command("ACL", "SETUSER", "us", "on", ">p", *rights.split())
        async with connected(f"redis://us:p@127.0.0.1:{server.port}/1?min_idle=1.2") as transport:
            await transport.publish(messages("busload.orders", [b"one", b"two", b"three"]))
            async with receiving(transport, "busload.orders", prefetch=1) as receiver:
                await (await receiver.take(1))[0].ack()
                await (await receiver.take(1))[0].reject("It is no JSON")
                await receiver.take(1)
                assert await receiver.nothing_for(0.5)
            assert await transport.depth("busload.orders") == 1
            assert len(await transport.peek("busload.orders", limit=5) or []) == 1


async def test_a_stream_that_was_removed_is_made_again(redis_url: str, queue: str) -> None:
    async with connected(redis_url) as transport, administration(redis_url) as admin:
        async with receiving(transport, queue) as receiver:
            await receives(transport, queue, receiver)
            await admin.delete(queue)
            with pytest.raises(TransportUnavailableError):
                await receiver.take(1)
        await transport.publish(messages(queue, [b"one"]))
        async with receiving(transport, queue) as receiver:
            await receiver.take(1)


async def test_a_lost_confirmation_is_reported(redis_url: str, queue: str) -> None:
    """The server has it; the repetition is delivered too."""
    async with Proxy(redis_url) as proxy, connected(f"{proxy.url}?timeout=1") as transport:
        await answered(lambda: transport.declare([queue]))
        some = messages(queue, [b"one"])
        proxy.swallow()
        assert await refusals(transport, some) == {0: RefusalReason.UNREACHABLE}
        tries = await confirmed(transport, some)
        assert await answered(lambda: transport.depth(queue)) in range(2, tries + 2)


async def test_a_frozen_server_is_unreachable_until_it_thaws(tmp_path: Path, queue: str) -> None:
    """Nothing is confirmed within the timeout; the server may have it all the same."""
    with RedisServer(tmp_path) as server:
        async with connected(f"{server.url}?timeout=1") as transport:
            await answered(lambda: transport.declare([queue]))
            some = messages(queue, [b"%d" % n for n in range(1500)])
            server.freeze()
            assert await refusals(transport, some) == dict.fromkeys(range(1500), RefusalReason.UNREACHABLE)
            with pytest.raises(TransportUnavailableError):
                await transport.declare([queue])
            server.thaw()
            await confirmed(transport, some)
            peeked = await answered(lambda: transport.peek(queue, limit=100_000))
            assert set(peeked or []) == {message.body for message in some}


async def test_one_who_is_cancelled_just_when_a_command_has_gone_out_does_not_wait_on(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Python 3.12 the client forgets such a cancellation, and goes on as if nothing had happened."""
    send = Connection._send_packed_command

    async def send_and_be_cancelled(connection: Connection, command: Any) -> None:
        await send(connection, command)
        if any(b"XREADGROUP" in part for part in command):
            waiting.cancel()

    async with connected(redis_url) as transport:
        deliveries = transport.deliveries(queue, prefetch=1)
        monkeypatch.setattr(Connection, "_send_packed_command", send_and_be_cancelled)
        waiting = asyncio.ensure_future(anext(deliveries))
        await asyncio.wait({waiting}, timeout=WITHIN)
        assert waiting.cancelled()


@asynccontextmanager
async def administration(url: str) -> AsyncIterator[Any]:
    client = Redis.from_url(url, protocol=2)
    try:
        yield client
    finally:
        await client.aclose()
