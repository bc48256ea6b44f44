"""What a person at a shell means: by the beginning of an id, and by the name of a domain."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from busload.postgres.plan import Plan, execute, many
from busload.postgres.statements import statements

SQL = statements(__name__)


@dataclass(frozen=True, slots=True)
class IdRange:
    """All ids that begin with the same hex digits; a whole id is a range of one."""

    digits: str

    @property
    def first(self) -> UUID:
        return UUID(self.digits.ljust(32, "0"))

    @property
    def last(self) -> UUID:
        return UUID(self.digits.ljust(32, "f"))

    @property
    def whole(self) -> UUID | None:
        return self.first if len(self.digits) == 32 else None

    def __str__(self) -> str:
        dashes = sum(len(self.digits) > place for place in (8, 12, 16, 20))
        return str(self.first)[: len(self.digits) + dashes]


@dataclass(frozen=True, slots=True)
class Found:
    """Something with an id in the range, and what a person recognises it by."""

    domain: str
    id: UUID
    about: str


def batches(ids: IdRange, *, domain: str | None, limit: int) -> Plan[list[Found]]:
    return _find(SQL.batches, ids, domain, limit)


def commands(ids: IdRange, *, domain: str | None, limit: int) -> Plan[list[Found]]:
    return _find(SQL.commands, ids, domain, limit)


def jobs(ids: IdRange, *, domain: str | None, limit: int) -> Plan[list[Found]]:
    return _find(SQL.jobs, ids, domain, limit)


def jobs_of_batches(ids: IdRange, *, domain: str | None, limit: int) -> Plan[list[Found]]:
    return _find(SQL.jobs_of_batches, ids, domain, limit)


def domains() -> Plan[list[str]]:
    """Every domain that was sent a command or served by a worker, or that has a batch, a buffer or a pause."""
    rows = yield from execute(SQL.domains)
    return [domain for (domain,) in rows]


def _find(statement: bytes, ids: IdRange, domain: str | None, limit: int) -> Plan[list[Found]]:
    return many(Found, statement, first=ids.first, last=ids.last, domain=domain, limit=limit)
