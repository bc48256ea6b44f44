"""PGMQ, in the tests' PostgreSQL: the contract, and what is special about it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any, TypeAlias
from urllib.parse import urlsplit
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from busload.errors import PublishError, RefusalReason, TransportMisconfiguredError
from busload.testing import TestServer, TransportContract
from busload.testing.messages import SECRET, messages, reasons, receiving
from busload.transports import Transport, find_transport
from busload.transports.pgmq import LONGEST_NAME, spelled
from tests.given import eventually
from tests.transports.patience import answered, confirmed, is_so_for_one

Connection: TypeAlias = psycopg.Connection[tuple[Any, ...]]


class Restartable:
    """To those who use it, a server that restarts is one that cuts their connections."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def restart(self) -> None:
        with connected(self.url) as conn:
            cut_all(conn)


def connected(url: str) -> Connection:
    url = url.replace("pgmq:", "postgresql:").removesuffix("&visibility=1")
    return psycopg.connect(url, autocommit=True)


def cut_all(conn: Connection) -> None:
    conn.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name = 'busload pgmq'"
    )


class TestPgmq(TransportContract):
    @pytest.fixture
    def url(self, pgmq_url: str) -> str:
        return pgmq_url

    @pytest.fixture
    def wrong_credentials_url(self, pgmq_url: str) -> str:
        """The tests' server asks for no password, but does not know everyone."""
        parts = urlsplit(pgmq_url)
        host = next(each for each in parts.query.split("&") if each.startswith("host="))
        return f"pgmq://stranger:{SECRET}@{parts.path}?{host}"

    @pytest.fixture
    def restartable(self, pgmq_url: str) -> Restartable:
        return Restartable(f"{pgmq_url}&visibility=1")


@pytest.fixture
def queue() -> str:
    return f"busload.test_{uuid4().hex}"


@pytest.fixture
async def transport(pgmq_url: str, request: pytest.FixtureRequest) -> AsyncIterator[Transport]:
    """With options as its parameter, if the test gives some."""
    options: str = getattr(request, "param", "")
    transport = find_transport(f"{pgmq_url}&{options}" if options else pgmq_url)
    yield transport
    await transport.aclose()


@pytest.fixture
def pgmq(pgmq_url: str) -> Iterator[Connection]:
    """A second pair of eyes."""
    with connected(pgmq_url) as conn:
        yield conn


async def test_a_message_stays_on_loan_longer_than_it_is_invisible(pgmq_url: str, queue: str, pgmq: Connection) -> None:
    """A handler may take longer than PGMQ hides its message."""

    async def is_renewed(seconds: int) -> bool:
        own = f"{queue}_{seconds}"
        table = f"pgmq.q_{spelled(own)}"
        async with aclosing(find_transport(f"{pgmq_url}&visibility={seconds}")) as transport:
            await transport.declare([own])
            await transport.publish(messages(own, [b"one"]))
            async with receiving(transport, own) as receiver:
                [delivery] = await receiver.take(1)
                [[until]] = pgmq.execute(f"SELECT vt FROM {table}").fetchall()
                passed = "SELECT WHERE clock_timestamp() > %s + interval '0.2 s'"
                assert await eventually(lambda: pgmq.execute(passed, [until]).rowcount)
                if pgmq.execute(f"SELECT FROM {table} WHERE read_ct > 1").rowcount:
                    return False
                if not pgmq.execute(f"SELECT FROM {table} WHERE vt > %s", [until]).rowcount:
                    return False
                if not await receiver.nothing_for(0.0):
                    return False
                await delivery.ack()
            return await transport.depth(own) == 0

    assert await is_so_for_one(is_renewed)


@pytest.mark.parametrize("transport", ["visibility=1"], indirect=True)
async def test_a_message_comes_again_when_its_holder_is_gone(
    transport: Transport, queue: str, pgmq: Connection
) -> None:
    """Without a word: its connection broke, so that nothing could be given back."""
    await transport.declare([queue])
    await transport.publish(messages(queue, [b"one"]))
    async with receiving(transport, queue) as receiver:
        await receiver.take(1)
        cut_all(pgmq)
    async with receiving(transport, queue) as receiver:
        [delivery] = await receiver.take(1)
        assert delivery.body == b"one"


async def test_text_that_json_of_postgresql_cannot_hold_comes_through(transport: Transport, queue: str) -> None:
    await transport.declare([queue])
    await transport.publish(messages(queue, [b"a\x00b"]))
    assert await transport.peek(queue, limit=1) == [b"a\x00b"]


async def test_a_rejected_message_is_archived(transport: Transport, queue: str, pgmq: Connection) -> None:
    await transport.declare([queue])
    await transport.publish(messages(queue, [b"unreadable"]))
    async with receiving(transport, queue) as receiver:
        [delivery] = await receiver.take(1)
        await delivery.reject("It is no JSON")
    assert pgmq.execute(f"SELECT message ->> 'text' FROM pgmq.a_{spelled(queue)}").fetchall() == [("unreadable",)]


async def test_messages_of_other_clients_are_delivered_too(transport: Transport, queue: str, pgmq: Connection) -> None:
    """Whoever reads them decides; the transport neither falls over them nor keeps them."""
    await transport.declare([queue])
    strange = ['{"a": 1}', "[]", '"text"', '{"base64": "?"}', '{"text": 7}']
    pgmq.execute("SELECT pgmq.send_batch(%s, %s::jsonb[])", [spelled(queue), strange])
    async with receiving(transport, queue) as receiver:
        assert sorted(each.body for each in await receiver.take(5)) == sorted(each.encode() for each in strange)


async def test_a_connection_that_died_while_nobody_looked_is_replaced(
    transport: Transport, queue: str, pgmq: Connection
) -> None:
    await transport.declare([queue])
    cut_all(pgmq)
    await transport.publish(messages(queue, [b"one"]))
    assert await transport.depth(queue) == 1


@pytest.mark.parametrize("transport", ["timeout=2"], indirect=True)
async def test_a_server_that_does_not_answer_is_given_up_in_time(
    transport: Transport, queue: str, pgmq_url: str
) -> None:
    """The caller is not kept waiting, and the next call works again."""
    await answered(lambda: transport.declare([queue]))
    with connected(pgmq_url) as conn, conn.transaction():
        conn.execute(sql.SQL("LOCK TABLE pgmq.{}").format(sql.Identifier(f"q_{spelled(queue)}")))
        with pytest.raises(PublishError, match="did not answer within 2 s") as failed:
            await transport.publish(messages(queue, [b"one"]))
    assert reasons(failed.value) == {0: RefusalReason.UNREACHABLE}
    await confirmed(transport, messages(queue, [b"two"]))
    peeked = await answered(lambda: transport.peek(queue, limit=10))
    assert set(peeked or []) == {b"two"}


async def test_a_database_without_pgmq_is_reported_with_what_to_do(server: TestServer, queue: str) -> None:
    with server.database(migrated=False) as dsn:
        transport = find_transport(dsn.replace("postgresql:", "pgmq:"))
        try:
            with pytest.raises(TransportMisconfiguredError, match="CREATE EXTENSION pgmq"):
                await transport.declare([queue])
            with pytest.raises(PublishError, match="CREATE EXTENSION pgmq") as failed:
                await transport.publish(messages(queue, [b"one"]))
            assert reasons(failed.value) == {0: RefusalReason.REFUSED}
            with pytest.raises(TransportMisconfiguredError, match="CREATE EXTENSION pgmq"):
                async with receiving(transport, queue) as receiver:
                    await receiver.take(1)
        finally:
            await transport.aclose()


async def test_a_queue_that_a_crash_would_empty_is_not_used(transport: Transport, queue: str, pgmq: Connection) -> None:
    pgmq.execute("SELECT pgmq.create_unlogged(%s)", [spelled(queue)])
    with pytest.raises(TransportMisconfiguredError, match=r"is unlogged.*pgmq\.drop_queue"):
        await transport.declare([queue])


async def test_a_user_without_rights_is_reported(
    transport: Transport, queue: str, pgmq: Connection, pgmq_url: str
) -> None:
    await transport.declare([queue])
    role = f"outsider_{uuid4().hex}"
    pgmq.execute(f"CREATE ROLE {role} LOGIN")
    other = find_transport(pgmq_url.replace("postgres@", f"{role}@"))
    try:
        with pytest.raises(TransportMisconfiguredError, match="permission denied"):
            await other.declare([queue])
    finally:
        await other.aclose()
        pgmq.execute(f"DROP ROLE {role}")


@pytest.mark.parametrize(
    ("queue", "name"),
    [
        ("busload.payments", "busload_payments"),
        ("busload.a_b", "busload_a_b"),
        ("busload.a-b", "busload_a_b_7f5bddf3f17c"),
        ("busload.a.b", "busload_a_b_21d1dc77985a"),
        ("busload.A_B", "busload_a_b_388980bb747d"),
    ],
)
def test_names_fit_pgmq_and_stay_apart(queue: str, name: str) -> None:
    """They are kept in the database: another release must spell them alike."""
    assert spelled(queue) == name


async def test_a_long_name_fits_too(transport: Transport) -> None:
    queues = [f"busload.{'long' * 20}-{n}-{uuid4().hex}" for n in range(2)]
    assert {len(spelled(queue)) for queue in queues} == {LONGEST_NAME}
    await transport.declare(queues)
    await transport.publish([*messages(queues[0], [b"here"]), *messages(queues[1], [b"there"])])
    assert await transport.peek(queues[0], limit=10) == [b"here"]
    assert await transport.peek(queues[1], limit=10) == [b"there"]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("pgmq://u:kept@host/db?visibility=0", "whole number"),
        ("pgmq://u:kept@host/db?visibility=1.5", "whole number"),
        ("pgmq://u:kept@host/db?sslmod=require", "Did you mean 'sslmode'"),
        ("pgmq://u:kept@[host/db", "cannot be read"),
        ("pgmq://u:kept%@host/db", "cannot be read"),
    ],
)
def test_an_unusable_url_is_reported_without_its_password(url: str, said: str) -> None:
    with pytest.raises(TransportMisconfiguredError, match=said) as refused:
        find_transport(url)
    assert "kept" not in str(refused.value)
