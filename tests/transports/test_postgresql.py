"""PostgreSQL as the broker: the contract, and what is its own."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from busload.errors import RefusalReason, TransportMisconfiguredError, TransportUnavailableError
from busload.postgres.embedded.server import EmbeddedPostgres
from busload.testing import TestServer, TransportContract
from busload.testing.messages import SECRET, connected, messages, receiving, refusals
from busload.testing.transport import Restartable
from busload.transports import Message, Transport, find_transport
from tests.conftest import server_home
from tests.given import Database
from tests.transports.patience import answered, confirmed, is_so_for_one

QUEUE = "busload.payments"


class OwnPostgres:
    def __init__(self, home: Path, url: str) -> None:
        self._postgres, self.url = EmbeddedPostgres(home), url

    async def restart(self) -> None:
        await asyncio.to_thread(self._postgres.stop)
        await asyncio.to_thread(self._postgres.start)

    def close(self) -> None:
        self._postgres.close()


class TestPostgresql(TransportContract):
    @pytest.fixture
    def url(self, dsn: str) -> str:
        return dsn

    @pytest.fixture
    def wrong_credentials_url(self, url: str) -> str:
        return url.replace("postgres@", f"nobody:{SECRET}@")

    @pytest.fixture
    def restartable(self) -> Iterator[Restartable]:
        home = server_home(f"restarted-{os.getpid()}")
        home.mkdir(mode=0o755, parents=True, exist_ok=True)
        with TestServer(home) as server, server.database() as url:
            own = OwnPostgres(home, url)
            yield own
            own.close()


@pytest.fixture
async def transport(dsn: str) -> AsyncIterator[Transport]:
    async with connected(dsn) as transport:
        yield transport


async def test_another_host_is_tried_when_the_first_says_nothing(dsn: str, pgmq_url: str) -> None:
    """A frozen server accepts connections. With PGMQ it is the same; together they take the time of one."""
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        urls = [behind(frozen.getsockname()[1], url) for url in (dsn, pgmq_url)]
        async with connected(urls[0]) as transport, connected(urls[1]) as pgmq:
            declares = [partial(each.declare, [QUEUE]) for each in (transport, pgmq)]
            await asyncio.gather(*map(answered, declares))


def behind(port: int, url: str) -> str:
    """The same server, as the second host of two."""
    scheme, _, rest = url.partition(":")
    real = conninfo_to_dict(f"postgresql:{rest}")
    hosts = f"127.0.0.1,{quote(str(real['host']), safe='')}"
    ports = f"{port},{real.get('port', 5432)}"
    return f"{scheme}://{real['user']}@/{real['dbname']}?host={hosts}&port={ports}&timeout=5"


# -- messages -----------------------------------------------------------------------------------------------------


async def test_a_repetition_is_dropped_while_the_first_is_there(transport: Transport, database: Database) -> None:
    """In the same call, in another, and while it is on loan; in another queue it is another one."""
    message = Message(QUEUE, "1-99-1", b"one")
    await transport.publish([message, message, Message("busload.other", "1-99-1", b"other")])
    async with receiving(transport, QUEUE) as receiver:
        [delivery] = await receiver.take(1)
        await transport.publish([message])
        assert await transport.depth(QUEUE) == 1
        await delivery.ack()
    assert database.rows("SELECT queue, body FROM busload.message") == [("busload.other", b"other")]
    await transport.publish([message])
    assert await transport.depth(QUEUE) == 1


async def test_what_is_on_loan_stays_so_while_its_receiver_lives(dsn: str, database: Database) -> None:
    async def is_renewed(seconds: int) -> bool:
        async with connected(f"{dsn}&visibility={seconds}") as transport:
            await transport.publish(messages(QUEUE, [b"one"]))
            async with receiving(transport, QUEUE) as receiver:
                [delivery] = await receiver.take(1)
                once = await receiver.nothing_for(seconds + 1.5)  # it looks every second
                await delivery.ack()
        once &= is_empty(database)
        database.rows("DELETE FROM busload.message")
        return once

    assert await is_so_for_one(is_renewed)


async def test_what_a_dead_receiver_had_goes_to_another_and_cannot_be_acknowledged_late(
    transport: Transport, database: Database
) -> None:
    """Its loan ends; then the message is another one's, whatever the first one says."""
    await transport.publish(messages(QUEUE, [b"one"]))
    async with receiving(transport, QUEUE) as dead, connected(transport.url) as second:
        [late] = await dead.take(1)
        database.rows("UPDATE busload.message SET visible_at = now()")
        async with receiving(second, QUEUE) as receiver:
            [delivery] = await receiver.take(1)
            await late.ack()
            assert await transport.depth(QUEUE) == 1
            await delivery.ack()
    assert is_empty(database)


async def test_a_late_ack_leaves_the_next_loan_alone(transport: Transport, database: Database) -> None:
    """Also when the receiver is the same."""
    await transport.publish(messages(QUEUE, [b"one"]))
    async with receiving(transport, QUEUE) as receiver:
        [late] = await receiver.take(1)
        database.rows("UPDATE busload.message SET visible_at = now()")
        await transport.publish(messages(QUEUE, [b"two"]))  # wakes the receiver
        again = await receiver.take(2)
        assert {each.body for each in again} == {b"one", b"two"}
        for each in (late, *again):
            await each.ack()
    assert is_empty(database)


async def test_a_message_without_a_notification_is_found(transport: Transport, database: Database) -> None:
    """A notification is only a hint."""
    async with receiving(transport, QUEUE) as receiver:
        assert await receiver.nothing_for(0.05)
        database.rows("INSERT INTO busload.message (queue, id, body) VALUES (%s, '1-1-1', 'one')", QUEUE)
        [delivery] = await receiver.take(1)
        assert delivery.body == b"one"


async def test_a_message_that_another_one_is_taking_holds_nobody_up(
    transport: Transport, conn: psycopg.AsyncConnection
) -> None:
    await transport.publish([Message(QUEUE, "1-1-1", b"locked"), Message(QUEUE, "2-2-1", b"free")])
    async with conn.transaction():
        await conn.execute("SELECT FROM busload.message WHERE id = '1-1-1' FOR UPDATE")
        async with receiving(transport, QUEUE) as receiver:
            [delivery] = await receiver.take(1)
            assert delivery.body == b"free"
            await delivery.ack()


# -- the database -------------------------------------------------------------------------------------------------


async def test_a_database_without_the_table_is_reported(server: TestServer) -> None:
    with server.database(migrated=False) as dsn:
        async with connected(dsn) as transport:
            with pytest.raises(TransportMisconfiguredError, match="busload schema migrate"):
                await transport.declare([QUEUE])
            assert await refusals(transport, messages(QUEUE, [b"one"])) == {0: RefusalReason.REFUSED}


async def test_rights_that_are_missing_are_named(dsn: str, database: Database) -> None:
    role = "reader_" + dsn.rpartition("/test_")[2][:12]
    database.rows(f"CREATE ROLE {role} LOGIN")
    database.rows(f"GRANT USAGE ON SCHEMA busload TO {role}")
    database.rows(f"GRANT SELECT ON busload.message TO {role}")
    try:
        async with connected(dsn.replace("postgres@", f"{role}@")) as transport:
            with pytest.raises(TransportMisconfiguredError, match=r"lacks INSERT, UPDATE, DELETE on busload\.message"):
                await transport.declare([QUEUE])
            assert await refusals(transport, messages(QUEUE, [b"one"])) == {0: RefusalReason.REFUSED}
    finally:
        database.rows(f"DROP OWNED BY {role}")
        database.rows(f"DROP ROLE {role}")


async def test_a_database_that_does_not_answer_is_reported_in_time(dsn: str, database: Database) -> None:
    """And the next call finds it again."""
    async with connected(f"{dsn}&timeout=0.3") as transport:
        await confirmed(transport, messages(QUEUE, [b"one"]))
        with psycopg.connect(dsn) as stuck:
            stuck.execute("LOCK TABLE busload.message IN ACCESS EXCLUSIVE MODE")
            assert await refusals(transport, messages(QUEUE, [b"two"])) == {0: RefusalReason.UNREACHABLE}
            with pytest.raises(TransportUnavailableError, match=r"did not answer within 0\.3 s"):
                await transport.depth(QUEUE)
        await confirmed(transport, messages(QUEUE, [b"three"]))
        assert await answered(lambda: transport.depth(QUEUE)) == 2


async def test_a_broken_connection_is_reported_and_replaced(transport: Transport, database: Database) -> None:
    await transport.publish(messages(QUEUE, [b"one"]))
    database.rows(
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    assert await refusals(transport, messages(QUEUE, [b"two"])) == {0: RefusalReason.UNREACHABLE}
    await transport.publish(messages(QUEUE, [b"three"]))
    assert await transport.depth(QUEUE) == 2


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://user:{SECRET}@host:port/database",
        f"postgresql://user:{SECRET}@host/database?sslmod=require",
        f"postgresql://user:{SECRET}@host/database?visibility=0",
        f"postgresql://user:{SECRET}@host/database?timeout={SECRET}",
        f"postgresql://user:{SECRET}@[host/database",
    ],
)
def test_a_url_that_cannot_work_is_refused_at_once(url: str) -> None:
    with pytest.raises(TransportMisconfiguredError) as refused:
        find_transport(url)
    assert SECRET not in str(refused.value)


def test_several_hosts_are_tried_as_libpq_does() -> None:
    assert find_transport("postgresql://user@host1:5432,host2/database?target_session_attrs=read-write")


def is_empty(database: Database) -> bool:
    return bool(database.value("SELECT count(*) = 0 FROM busload.message"))
