"""Whatever people and workers do, in whatever order: the real store against a model of a few dozen lines."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from busload.batches import cancel
from busload.commands import claim, rescue, send, settle
from busload.commands.execution import CANCELED, COMPLETED, FAILED, FAILED_ATTEMPT, TROUBLESHOOTING, Leased, Transition
from busload.errors import BatchSealedError, InvalidOperationError
from busload.testing import TestServer
from busload.troubleshooting import decisions
from busload.troubleshooting.decisions import Decision
from tests.commands.test_interleavings import PLACES, new_commands
from tests.given import DOMAIN, Database

READY, LATER, RUNNING, PARKED = "PENDING", "SCHEDULED", "IN_PROGRESS", "IN_TROUBLESHOOTING_QUEUE"
FINAL = {COMPLETED, FAILED, CANCELED}
STATE_AFTER = {FAILED_ATTEMPT: LATER, TROUBLESHOOTING: PARKED}


class Store(RuleBasedStateMachine):
    """`state` and `sealed` are the model; everything else is the database."""

    database: Database

    def __init__(self) -> None:
        super().__init__()
        for table in PLACES:
            self.database.rows(f"DELETE FROM busload.{table}")
        self.database.rows("ALTER SEQUENCE busload.load_number RESTART")  # the same steps give the same ids
        self.state: dict[int, str] = {}
        self.member: dict[int, UUID] = {}
        self.command_ids: dict[int, UUID] = {}
        self.sealed: dict[UUID, bool] = {}
        self.canceled: set[UUID] = set()
        self.held: dict[int, list[Leased]] = {}  # what living workers believe they run
        self.late: list[Leased] = []  # what workers run that were declared dead

    # -- people ------------------------------------------------------------------------------------------------

    @rule(size=st.integers(1, 4), sealed=st.booleans())
    def create(self, size: int, sealed: bool) -> None:
        batch = send.NewBatch(uuid4(), DOMAIN, None, None, None)
        commands = new_commands(size)
        if sealed:
            self.database.perform(send.create_batch(batch, commands))
        else:
            self.database.perform(send.open_batch(batch))
            self.database.perform(send.send_many(DOMAIN, commands, batch.batch_id))
        self.sealed[batch.batch_id] = sealed
        self._learn(batch.batch_id)

    @rule(data=st.data(), size=st.integers(1, 3))
    @precondition(lambda self: self.sealed)
    def add(self, data: Any, size: int) -> None:
        batch_id = data.draw(st.sampled_from(list(self.sealed)))
        plan = send.send_many(DOMAIN, new_commands(size), batch_id)
        if self.sealed[batch_id]:
            with pytest.raises(BatchSealedError):
                self.database.perform(plan)
        else:
            self.database.perform(plan)
        self._learn(batch_id)

    @rule(data=st.data())
    @precondition(lambda self: self.sealed)
    def seal(self, data: Any) -> None:
        batch_id = data.draw(st.sampled_from(list(self.sealed)))
        assert self.database.perform(send.seal(DOMAIN, batch_id)) is not self.sealed[batch_id]
        self.sealed[batch_id] = True

    @rule(data=st.data())
    @precondition(lambda self: self.sealed)
    def cancel_batch(self, data: Any) -> None:
        batch_id = data.draw(st.sampled_from(list(self.sealed)))
        complete = self._complete(batch_id)
        waiting = [id for id in self._members(batch_id) if self.state[id] in (READY, LATER)]
        done = self.database.perform(cancel.cancel_batch(DOMAIN, batch_id, reason="x", operator=None))
        assert done == len(waiting)
        if not complete:
            self.sealed[batch_id] = True
            self.canceled.add(batch_id)
        self.state |= dict.fromkeys(waiting, CANCELED)

    @rule(data=st.data(), action=st.sampled_from(["retry", "complete", "cancel"]))
    @precondition(lambda self: self.state)
    def operate(self, data: Any, action: str) -> None:
        parked = [id for id, state in self.state.items() if state == PARKED]
        id = data.draw(st.sampled_from(parked or sorted(self.state)))
        plan = {
            "retry": lambda: decisions.decide_one(
                DOMAIN, self.command_ids[id], Decision(action="retry", operator="ada")
            ),
            "complete": lambda: decisions.decide_one(
                DOMAIN, self.command_ids[id], Decision(action="complete", result=1, operator="ada")
            ),
            "cancel": lambda: decisions.decide_one(
                DOMAIN, self.command_ids[id], Decision(action="cancel", reason="x", operator="ada")
            ),
        }[action]()
        hopeless = action == "retry" and self.member[id] in self.canceled
        if not parked or hopeless:
            with pytest.raises(InvalidOperationError, match="canceled batch" if parked else self.state[id]):
                self.database.perform(plan)
            return
        self.database.perform(plan)
        self.state[id] = {"retry": READY, "complete": COMPLETED, "cancel": CANCELED}[action]

    # -- workers -----------------------------------------------------------------------------------------------

    @rule()
    @precondition(lambda self: len(self.held) < 3)
    def start_worker(self) -> None:
        plan = rescue.register(name="w", domains=[DOMAIN], concurrency=9, lease_for=timedelta(seconds=30))
        self.held[self.database.perform(plan)] = []

    @rule(data=st.data(), limit=st.integers(1, 8), suspects=st.booleans())
    @precondition(lambda self: self.held)
    def claim(self, data: Any, limit: int, suspects: bool) -> None:
        worker = data.draw(st.sampled_from(list(self.held)))
        taken = self.database.perform(claim.claim(worker=worker, domains=[DOMAIN], limit=limit, suspects=suspects))
        ready = [id for id, state in self.state.items() if state == READY]
        assert len(taken.leased) <= min(limit, len(ready)) and (taken.leased or not suspects or not ready)
        assert all(self.state[one.id] == READY for one in taken.leased)
        self.state |= {one.id: RUNNING for one in taken.leased}
        self.held[worker] += taken.leased

    @rule(
        data=st.data(),
        outcome=st.sampled_from([COMPLETED, COMPLETED, FAILED, CANCELED, TROUBLESHOOTING, FAILED_ATTEMPT]),
    )
    @precondition(lambda self: any(self.held.values()))
    def settle(self, data: Any, outcome: str) -> None:
        worker = data.draw(st.sampled_from([worker for worker, held in self.held.items() if held]))
        some = data.draw(st.lists(st.sampled_from(self.held[worker]), unique_by=id, min_size=1))
        for _ in range(data.draw(st.integers(1, 2))):  # an answer that was lost is asked for again
            assert self._settle(some, outcome) == {one.id for one in some}
        for one in some:
            stopped = outcome == FAILED_ATTEMPT and self.member[one.id] in self.canceled
            self.state[one.id] = CANCELED if stopped else STATE_AFTER.get(outcome, outcome)
        self.held[worker] = [one for one in self.held[worker] if one not in some]

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def drain(self, data: Any) -> None:
        """One worker finishes what it has and everything that is ready: batches come to their end this way."""
        worker = data.draw(st.sampled_from(list(self.held)))
        for _ in range(20):
            taken = self.database.perform(claim.claim(worker=worker, domains=[DOMAIN], limit=50))
            mine = self.held[worker] + taken.leased
            if not mine:
                break
            assert self._settle(mine, COMPLETED) == {one.id for one in mine}
            self.state |= {one.id: COMPLETED for one in mine}
            self.held[worker] = []

    @rule(outcome=st.sampled_from([COMPLETED, FAILED, FAILED_ATTEMPT, TROUBLESHOOTING]))
    @precondition(lambda self: self.late)
    def settle_late(self, outcome: str) -> None:
        assert self._settle(self.late, outcome) == set()

    @rule()
    def promote(self) -> None:
        self.database.rows("UPDATE busload.scheduled SET run_at = now()")
        later = [id for id, state in self.state.items() if state == LATER]
        self.database.perform(claim.promote())
        self.state |= dict.fromkeys(later, READY)

    @rule(data=st.data())
    @precondition(lambda self: any(self.held.values()))
    def release(self, data: Any) -> None:
        worker = data.draw(st.sampled_from([worker for worker, held in self.held.items() if held]))
        leases = {one.lease.lease_id for one in self.held[worker]}
        returned = self.database.perform(rescue.release(sorted(leases)))
        assert returned.commands == len(self.held[worker]) and returned.parked == 0
        self._back(self.held[worker])
        self.late += self.held[worker]
        self.held[worker] = []

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def die(self, data: Any) -> None:
        worker = data.draw(st.sampled_from(list(self.held)))
        self.database.rows("UPDATE busload.worker SET seen_at = '-infinity' WHERE worker = %s", worker)
        lost = self.held.pop(worker)
        assert self.database.perform(rescue.rescue()).commands == len(lost)
        assert self.database.perform(rescue.renew(worker=worker, settled=timedelta(seconds=20))) is None
        parked = {
            id for (id,) in self.database.rows("SELECT command FROM busload.troubleshooting WHERE reason = 'CRASHED'")
        }
        self._back([one for one in lost if one.id not in parked])
        self.state |= {one.id: PARKED for one in lost if one.id in parked}
        self.late += lost

    @rule()
    def sweep(self) -> None:
        self.database.perform(cancel.cancel_stragglers())
        waiting = [
            id for id, state in self.state.items() if state in (READY, LATER) and self.member[id] in self.canceled
        ]
        self.state |= dict.fromkeys(waiting, CANCELED)

    # -- what must hold after each step --------------------------------------------------------------------------

    @invariant()
    def the_store_agrees_with_the_model(self) -> None:
        shown = dict(self.database.rows("SELECT id, status FROM busload.command_status"))
        assert shown == self.state
        for batch_id, status, *counters in self.database.rows(
            "SELECT batch_id, status, total_count, completed_count, failed_count, canceled_count,"
            "       in_troubleshooting_count FROM busload.batch"
        ):
            states = [self.state[id] for id in self._members(batch_id)]
            expected = [len(states), *(states.count(state) for state in (COMPLETED, FAILED, CANCELED, PARKED))]
            assert counters == expected
            assert status.startswith("COMPLETED") is self._complete(batch_id)
        self.database.check_invariants()

    def _complete(self, batch_id: UUID) -> bool:
        return self.sealed[batch_id] and all(self.state[id] in FINAL for id in self._members(batch_id))

    def _members(self, batch_id: UUID) -> list[int]:
        return [id for id, batch in self.member.items() if batch == batch_id]

    def _learn(self, batch_id: UUID) -> None:
        rows = self.database.rows("SELECT id, command_id FROM busload.command WHERE batch_id = %s", batch_id)
        for id, command_id in rows:
            if id not in self.state:
                self.state[id], self.member[id], self.command_ids[id] = READY, batch_id, command_id

    def _settle(self, leased: list[Leased], outcome: str) -> set[int]:
        reason = "PERMANENT" if outcome == TROUBLESHOOTING else None
        delay = 60.0 if outcome == FAILED_ATTEMPT else None
        transitions = [Transition(one, outcome, "{}", delay, reason) for one in leased]
        credited: set[int] = self.database.perform(settle.settle(transitions, now=0.0))
        return credited

    def _back(self, leased: list[Leased]) -> None:
        for one in leased:
            self.state[one.id] = CANCELED if self.member[one.id] in self.canceled else READY


def test_the_store_agrees_with_the_model_whatever_happens(server: TestServer) -> None:
    with server.database() as dsn, Database(dsn) as database:
        Store.database = database
        run_state_machine_as_test(
            Store,
            settings=settings(
                max_examples=60,
                stateful_step_count=40,
                deadline=None,
                database=None,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
            ),
        )
