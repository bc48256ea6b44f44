"""The world that is explored: a database, who works on it, and what must hold after every commit."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import psycopg
from psycopg import errors as pg

from tests.explorer.session import LATER, OPTIONS, SHORTLY, Session
from tests.explorer.turns import LostError, Turn, Turns
from tests.given import INVARIANTS, offenders_of

WITHIN = 30_000
"""Milliseconds after which a statement that waits for nobody must have ended."""

MORE_INVARIANTS = {
    "a lease knows how many of its commands are open": """
        SELECT l.lease_id FROM busload.lease AS l
         WHERE l.open <> (SELECT count(*) FROM busload.command AS c
                           WHERE c.id BETWEEN l.lo AND l.hi AND c.id <> ALL (l.returned)
                             AND NOT EXISTS (SELECT FROM busload.execution AS e
                                              WHERE e.command = c.id AND e.attempt = l.attempt))""",
    "nobody is declared dead who was seen": """
        SELECT worker FROM busload.worker WHERE lost AND seen_at >= stopped_at - lease_for""",
    "a task key has one holder": """
        SELECT c.task_key FROM busload.command_status AS c
         WHERE c.task_key IS NOT NULL AND c.status NOT IN ('COMPLETED', 'FAILED', 'CANCELED')
         GROUP BY c.domain, c.task_key HAVING count(*) > 1""",
    "no attempt is numbered twice or left out": """
        SELECT command FROM busload.execution GROUP BY command
        HAVING count(DISTINCT attempt) <> count(*)""",
    "an event in the history of a command ends it once": """
        SELECT c.id FROM busload.command AS c JOIN busload.event AS v ON c.id BETWEEN v.lo AND v.hi
         WHERE v.type IN ('CANCELED', 'OPERATOR_COMPLETED', 'OPERATOR_CANCELED')
         GROUP BY c.id HAVING count(*) > 1""",
    "a message is published for a load of the outbox or a ready one, and noted once": """
        SELECT lo FROM busload.event WHERE type = 'PUBLISHED' GROUP BY lo, details ->> 'publication'
        HAVING count(*) > 1""",
    "nothing is sealed twice": """
        SELECT batch_id::text FROM busload.event WHERE type = 'BATCH_SEALED'
         GROUP BY batch_id, type HAVING count(*) > 1""",
    "no more calls run than the limit allows": """
        SELECT limit_name FROM busload.permit GROUP BY limit_name, limit_subject HAVING count(*) > 1""",
}
CHECK = offenders_of(INVARIANTS | MORE_INVARIANTS)


NEVER_WAITS = {"claim", "claim-delivered", "promote"}
"""What passes by whatever others have locked."""


class ViolationError(AssertionError):
    """Something that busload promises does not hold."""


@dataclass
class Actor:
    """Somebody who does one thing after the other, each by the plans of the product."""

    name: str
    session: Session
    memory: dict[str, Any] = field(default_factory=dict)
    doing: str | None = None
    turns: Turns[str] | None = None
    next: Turn | None = None
    """Its next turn, if it has begun something."""
    waits: bool = False
    """Whether its statement was sent and waits for a lock."""
    taken: int = 0
    """How many turns it has taken since it began."""


class World:
    """A database of its own, with a connection for each actor."""

    def __init__(self, dsn: str, names: Sequence[str]) -> None:
        self.dsn = dsn
        self.look_every = 1
        """Invariants are checked after so many commits. What is wrong mostly stays so; a replay looks each time."""
        self.watch = psycopg.connect(dsn, autocommit=True, options=OPTIONS, prepare_threshold=0)
        self.watch.prepared_max = 1000
        self.watch.execute("SET lock_timeout = '10s'")  # nobody waits for who looks on
        # To go over to this role and back would have a session forget its plans, and all invariants are a large one.
        self._cleaner = psycopg.connect(dsn, autocommit=True, options=f"{OPTIONS} -c session_replication_role=replica")
        self._cleaner.execute("SET lock_timeout = '10s'")
        self.actors = {name: Actor(name, Session(dsn)) for name in names}
        self._reset = self._make_reset()
        self._used = 0
        self.story: list[str] = []
        self.clear()

    def close(self) -> None:
        for actor in self.actors.values():
            actor.session.close()
        self._cleaner.close()
        self.watch.close()

    def _make_reset(self) -> bytes:
        tables = self.rows("SELECT tablename FROM pg_tables WHERE schemaname = 'busload'")
        sequences = self.rows("SELECT sequencename FROM pg_sequences WHERE schemaname = 'busload'")
        kept = [name for (name,) in tables if self.rows(f"SELECT FROM busload.{name} LIMIT 1")]
        deletes = [f"DELETE FROM busload.{name}" for (name,) in tables if name not in kept]
        restarts = [f"SELECT setval('busload.{name}', 1, false)" for (name,) in sequences]
        self._vacuum = "; ".join(f"VACUUM busload.{name}" for (name,) in tables)
        return "; ".join(["BEGIN", *deletes, *restarts, "COMMIT"]).encode()

    def clear(self) -> None:
        """As if nothing had ever happened."""
        for actor in self.actors.values():
            self._forget(actor)
        self._cleaner.execute(self._reset, prepare=False)
        self._used += 1
        if self._used % 100 == 0:  # dead rows make everything slower
            for statement in self._vacuum.split("; "):
                self._cleaner.execute(statement, prepare=False)
        self.story = []
        self.accepted: dict[UUID, bool] = {}
        """The commands that were sent: whether their sender knows that they were accepted."""
        self.credited: Counter[tuple[int, int]] = Counter()
        self.decided = 0
        """Decisions of operators who were told that theirs was carried out."""
        self.facts: dict[str, Any] = {}
        self.outcomes: Counter[str] = Counter()
        self.commits = 0

    def rows(self, query: str, *params: Any) -> list[tuple[Any, ...]]:
        with self.watch.cursor() as cursor:
            cursor.execute(query, params or None)
            return cursor.fetchall() if cursor.description else []

    # -- turns -----------------------------------------------------------------------------------------------------

    def begin(self, actor: Actor, doing: str, turns: Turns[str]) -> None:
        """Somebody is about to take the first turn of something."""
        assert actor.turns is None
        actor.doing, actor.turns, actor.taken = doing, turns, 0
        self._answer(actor, None)

    def go_on(self, actor: Actor) -> None:
        """Take the next turn. It may end in waiting for a lock."""
        assert actor.next is not None and not actor.waits
        actor.session.start(actor.next.step)
        if not self._look(actor):
            self._answered(actor)

    def lose(self, actor: Actor, *, carried_out: bool) -> None:
        """The connection is lost before the next turn is carried out, or after that and before its answer comes.

        For the database that is a rollback of what was not committed, so a rollback is what happens here.
        """
        assert actor.next is not None
        committed = False
        if carried_out and not actor.waits:
            actor.session.start(actor.next.step)
            if not self._look(actor):
                try:
                    actor.session.answer()
                    committed = actor.next.commits
                except psycopg.Error as error:
                    self._refuse_deadlock(error)
        self._roll_back(actor)
        self._answer(actor, LostError("the connection is lost"))
        self._after_transaction(committed)

    def lose_patience(self, actor: Actor) -> None:
        """The statement has waited for a lock for as long as it may."""
        self._cancel(actor)
        self._answer(actor, pg.LockNotAvailable("canceling statement due to lock timeout"))
        self._after_transaction(False)

    def die(self, actor: Actor) -> None:
        """The process is gone, and whatever it knew."""
        self._forget(actor)
        self._after_transaction(False)

    def _forget(self, actor: Actor) -> None:
        if actor.turns is not None:
            actor.turns.close()
        self._roll_back(actor)
        actor.turns = actor.doing = actor.next = None
        actor.memory.clear()

    def _roll_back(self, actor: Actor) -> None:
        if actor.waits:
            self._cancel(actor)
        if actor.session.in_transaction:
            actor.session.perform(b"ROLLBACK")

    def _cancel(self, actor: Actor) -> None:
        self.watch.execute("SELECT pg_cancel_backend(%s)", [actor.session.pid])
        assert actor.session.ended(WITHIN), f"{actor.name} cannot be canceled"
        actor.waits = False

    def _answered(self, actor: Actor) -> None:
        """The statement has ended: its answer goes into the plan, which says what comes next."""
        assert actor.next is not None
        commits = actor.next.commits
        answer: list[Any] | Exception
        try:
            answer = actor.session.answer()
        except psycopg.Error as error:
            self._refuse_deadlock(error)
            answer = error
        actor.taken += 1
        self._answer(actor, answer)
        if not actor.session.in_transaction or commits:
            self._after_transaction(commits and not isinstance(answer, Exception))

    def _refuse_deadlock(self, error: Exception) -> None:
        if isinstance(error, pg.DeadlockDetected):
            raise ViolationError(f"a deadlock: {' '.join(str(error).split())[:400]}") from error

    def _answer(self, actor: Actor, answer: list[Any] | Exception | None) -> None:
        """Take what is aside, up to the next turn."""
        assert actor.turns is not None
        try:
            while True:
                if isinstance(answer, Exception):
                    turn = actor.turns.throw(answer)
                else:
                    turn = next(actor.turns) if answer is None else actor.turns.send(answer)
                if not turn.aside:
                    actor.next = turn
                    return
                actor.session.perform(turn.step.sql)
                answer = []
        except StopIteration as done:
            self.tell(f"{actor.name}: {actor.doing} → {done.value}")
            actor.turns = actor.doing = actor.next = None

    # -- locks -----------------------------------------------------------------------------------------------------

    def _look(self, actor: Actor) -> bool:
        """Wait until the statement has ended, or return True once it is seen to wait for a lock."""
        patience, left = SHORTLY, WITHIN
        while not actor.session.ended(patience):
            if self._is_blocked(actor):
                actor.waits = True
                if str(actor.doing).split()[0] in NEVER_WAITS:
                    raise ViolationError(f"{actor.doing} waits for a lock: of {self.waiting_for(actor)}")
                return True
            left -= patience
            patience = LATER
            if left < 0:
                raise ViolationError(f"{actor.name} never ends: {actor.doing}")
        actor.waits = False
        return False

    def _is_blocked(self, actor: Actor) -> bool:
        """Whether it waits for other actors; those who wait for each other are parted by PostgreSQL soon.

        Somebody else lets go soon by himself: a vacuum locks a table for a moment, to cut off what is empty at its end.
        """
        pids = [one.session.pid for one in self.actors.values()]
        blocking = self.rows("SELECT pid, pg_blocking_pids(pid) FROM unnest(%s::int[]) AS pid", pids)
        waits = {pid: actors for pid, by in blocking if (actors := set(by).intersection(pids))}
        if actor.session.pid not in waits:
            return False
        seen: set[int] = set()
        ahead = {actor.session.pid}
        while ahead:
            seen |= ahead
            ahead = set().union(*(waits.get(pid, set()) for pid in ahead))
            if actor.session.pid in ahead:
                return False
            ahead -= seen
        return True

    def _after_transaction(self, committed: bool) -> None:
        """What was committed is checked, and those who waited for it go on."""
        if committed:
            self.commits += 1
            if self.commits % self.look_every == 0:
                self.check()
        for other in self.actors.values():
            if other.waits and not self._look(other):
                self.tell(f"    {other.name} need not wait any more: {other.doing}")
                self._answered(other)

    def look_again(self) -> bool:
        """Whether one of those who waited need not wait any more: of two who wait for each other, one is told so."""
        before = [actor.waits for actor in self.actors.values()]
        deadline = time.monotonic() + WITHIN / 1000
        while [actor.waits for actor in self.actors.values()] == before and time.monotonic() < deadline:
            self._after_transaction(False)
        return [actor.waits for actor in self.actors.values()] != before

    def waiting_for(self, actor: Actor) -> list[str]:
        """Whom it waits for."""
        [(by,)] = self.rows("SELECT pg_blocking_pids(%s)", actor.session.pid)
        return [one.name for one in self.actors.values() if one.session.pid in by]

    # -- what must hold --------------------------------------------------------------------------------------------

    def tell(self, line: str) -> None:
        self.story.append(line)

    def check(self) -> None:
        """What must hold in every state that was committed."""
        if offenders := self.rows(CHECK):
            name, row = offenders[0]
            raise ViolationError(f"{name}: {row}")
        if doubled := [key for key, times in self.credited.items() if times > 1]:
            raise ViolationError(f"an attempt was credited twice: {doubled}")
        if self.decided and not self.facts.get("pruned"):
            [(noted,)] = self.rows("SELECT count(*) FROM busload.event WHERE type LIKE 'OPERATOR%%'")
            if noted < self.decided:
                raise ViolationError(f"of {self.decided} decisions that were carried out, {noted} are in the history")
        known = [command_id for command_id, surely in self.accepted.items() if surely]
        if known and not self.facts.get("pruned"):
            [(there,)] = self.rows("SELECT count(*) FROM busload.command WHERE command_id = ANY (%s)", known)
            if there != len(known):
                raise ViolationError(f"{len(known) - there} accepted commands are gone")
