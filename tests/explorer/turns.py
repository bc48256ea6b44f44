"""Plans of the product, taken apart into turns: a statement or a commit, between which anything may happen."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import psycopg

from busload.postgres.plan import Plan, Savepoint, Script, Statement
from busload.postgres.write import SQL as WRITE

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Turn:
    """A step of a plan. One `aside` is taken together with the next: nothing that others see comes between."""

    step: Statement | Script
    aside: bool = False
    commits: bool = False


Turns: TypeAlias = Generator[Turn, list[Any], T]

BEGIN = Turn(Script(b"BEGIN"), aside=True)
COMMIT = Turn(Script(b"COMMIT"), commits=True)
ROLLBACK = Turn(Script(b"ROLLBACK"), aside=True)


class LostError(psycopg.OperationalError):
    """The connection is lost: the client does not know whether its last statement was carried out."""


def in_transaction(plan: Plan[T]) -> Turns[T]:
    """A plan in a transaction of its own, as `Database.write` and `Database.in_transaction` perform it."""
    yield BEGIN
    try:
        result = yield from _inside(plan)
    except Exception:
        yield ROLLBACK
        raise
    yield COMMIT
    return result


def each_alone(plan: Plan[T]) -> Turns[T]:
    """A plan each of whose statements is a transaction, as on a connection in autocommit mode.

    Its commit is a turn all the same: between the end of a statement and its commit others see the locks, and not yet
    what was written.
    """
    try:
        step = next(plan)
        while True:
            try:
                if isinstance(step, Savepoint):
                    answer: Any = yield from (in_transaction if step.begins else each_alone)(step.plan)
                else:
                    assert isinstance(step, Statement | Script)
                    yield BEGIN
                    answer = yield Turn(step)
                    yield COMMIT
            except Exception as error:
                yield ROLLBACK
                step = plan.throw(error)
            else:
                step = plan.send(answer)
    except StopIteration as done:
        result: T = done.value
        return result


def _inside(plan: Plan[T]) -> Turns[T]:
    try:
        step = next(plan)
        while True:
            try:
                if isinstance(step, Savepoint):
                    answer: Any = yield from _savepoint(step.plan)
                elif isinstance(step, Statement) and step.sql == WRITE.limit_lock_waits:
                    answer = []  # a schedule says when somebody loses patience
                else:
                    assert isinstance(step, Statement | Script), "a COPY cannot be looked at while it waits"
                    answer = yield Turn(step)
            except Exception as error:
                step = plan.throw(error)
            else:
                step = plan.send(answer)
    except StopIteration as done:
        result: T = done.value
        return result


def _savepoint(plan: Plan[T]) -> Turns[T]:
    yield Turn(Script(b"SAVEPOINT part"), aside=True)
    try:
        result = yield from _inside(plan)
    except LostError:
        raise
    except Exception:
        yield Turn(Script(b"ROLLBACK TO SAVEPOINT part; RELEASE SAVEPOINT part"), aside=True)
        raise
    yield Turn(Script(b"RELEASE SAVEPOINT part"), aside=True)
    return result
