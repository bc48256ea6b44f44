"""How PostgreSQL carries messages when it is the broker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

from busload.store.plan import Plan, execute, many
from busload.store.statements import statements

SQL = statements("message")


def publish(queues: Sequence[str], ids: Sequence[str], bodies: Sequence[bytes]) -> Plan[None]:
    yield from execute(SQL.publish, queues=list(queues), ids=list(ids), bodies=list(bodies))


def take(queue: str, *, limit: int, loan: timedelta) -> Plan[list[tuple[str, int, bytes]]]:
    """Each with its id and the number of this delivery, by which it is settled."""
    return many(lambda id, number, body: (id, number, bytes(body)), SQL.take, queue=queue, limit=limit, loan=loan)


def renew(queue: str, held: Mapping[str, int], *, loan: timedelta) -> Plan[None]:
    yield from execute(SQL.renew, queue=queue, ids=list(held), deliveries=list(held.values()), loan=loan)


def release(queue: str, held: Mapping[str, int]) -> Plan[None]:
    yield from execute(SQL.release, queue=queue, ids=list(held), deliveries=list(held.values()))


def forget(queue: str, id: str, number: int) -> Plan[None]:
    """Unless it was delivered again meanwhile: then it is another one's."""
    yield from execute(SQL.forget, queue=queue, id=id, deliveries=number)


def depth(queue: str) -> Plan[int]:
    [(count,)] = yield from execute(SQL.depth, queue=queue)
    return int(count)


def peek(queue: str, *, limit: int) -> Plan[list[bytes]]:
    return many(bytes, SQL.peek, queue=queue, limit=limit)


def missing_privileges() -> Plan[list[str] | None]:
    """None: there is no table of messages."""
    rows = yield from execute(SQL.privileges)
    return list(rows[0][0]) if rows else None
