"""What a caller asks for, checked and turned into a plan: the one place where input is refused, for both faces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from inspect import iscoroutinefunction
from typing import Any, Generic, TypeVar
from uuid import UUID

from busload import store
from busload.domain.batch import BatchMetadata, BatchStatus
from busload.domain.buffer import SIZES, BufferSettings, BufferStatus, key_problems, partition_of
from busload.domain.cause import FINGERPRINT, RATES, Action, CauseGroup, Decision, GroupAction, Patch
from busload.domain.command import (
    AuditEvent,
    BatchCommand,
    CommandMetadata,
    CommandStatus,
    InputLimits,
    NewCommand,
    SendResult,
    TroubleshootingItem,
    check_all,
    check_name,
    check_number,
    check_text,
    check_uuid,
    refuse,
    refuse_repeated_ids,
)
from busload.domain.dedup import TRACKED, Dedup
from busload.domain.dispatch import CHECKPOINT_SIZES, DispatchReport, Input, OutboxEntry, Strategy, choose
from busload.domain.execution import Execution, ExecutionStatus, Failed, Succeeded
from busload.domain.explanation import Explanation
from busload.domain.ids import new_id
from busload.domain.job import JobMetadata, JobStatus, Stage, Step, check_stage
from busload.domain.pause import Pause
from busload.domain.payload import PayloadLimits, PayloadRefused, decode, encode
from busload.domain.rate import KEY_BYTES, LimitStatus
from busload.domain.retention import LONGEST
from busload.errors import (
    DuplicateCommandError,
    InvalidCommandError,
    InvalidOperationError,
    Problem,
    TransientCommandError,
)
from busload.store.plan import Plan
from busload.store.rescue import Returned
from busload.store.send import NO_BROKER, Via
from busload.store.track import Claim

T = TypeVar("T")
PAGE = range(2**31)
PATIENCE = 100
"""Milliseconds that a write of its own transaction waits for a lock, before it lets others have its connection."""

WIDEST = PayloadLimits(data_bytes=16 * 1024 * 1024, depth=500)
"""For what was checked already and is only wrapped once more."""


@dataclass(frozen=True, slots=True)
class Write(Generic[T]):
    """Something to be written, and the ids to repeat it with if nobody can say whether it was.

    One statement is a transaction by itself; several need one around them. `again` is for what may have to wait for a
    transaction of somebody else: it plans the same anew, and the plan fails if a lock takes longer than `PATIENCE`.
    """

    plan: Plan[T]
    batch_id: UUID | None = None
    command_ids: Sequence[UUID] = ()
    one_statement: bool = False
    job_id: UUID | None = None
    again: Callable[[], Plan[T]] | None = None
    goes_on: bool = False
    """The call has written before: who made it says so, and errors come as they are."""


@dataclass(frozen=True, slots=True)
class Order:
    """A batch to be created through a broker: with its commands, or for checkpoints with where they come from."""

    batch: store.send.NewBatch
    strategy: Strategy
    commands: Sequence[NewCommand] = ()
    input: Input | None = None
    checkpoint_size: int = 1000


class Requests:
    """Checks every call against the limits of this bus."""

    def __init__(self, limits: InputLimits, *, awaits: bool, via: Via = NO_BROKER) -> None:
        self._limits, self._payload, self._awaits = limits, limits.payload, awaits
        self._via = via

    def strategy(self, asked: object, default: Strategy | None, *, joins: bool, dedup: bool) -> Strategy | None:
        """Who announces a batch, and how; None: as many commands as it has decide that.

        Whoever joins a transaction of the caller's leaves it to the relay: nothing is published before the commit.
        """
        if asked is not None:
            refuse(self._strategy_problems(asked, joins=joins, dedup=dedup))
            return Strategy(str(asked))
        return Strategy.RELAY if joins or dedup or not self._awaits or self._via.transport is None else default

    def _strategy_problems(self, asked: object, *, joins: bool, dedup: bool) -> list[Problem]:
        if asked not in list(Strategy):
            return [Problem("INVALID_OPTION", "/dispatch", f"found {asked!r:.80}, wanted one of {', '.join(Strategy)}")]
        why = None
        if self._via.transport is None:
            why = "this bus has no transport to announce by; give it one: CommandBus(dsn, transport=URL)"
        elif asked == Strategy.RELAY:
            return []
        elif joins:
            why = "conn= was given too, and nothing is published before your commit; leave it out, a relay announces"
        elif dedup:
            why = "dedup= was given too, with which the relay announces; leave one of them out"
        elif not self._awaits:
            why = "SyncCommandBus leaves brokers to the relay of a worker; leave dispatch out, or use CommandBus"
        return [] if why is None else [Problem("INVALID_OPTION", "/dispatch", f"found {str(asked)!r}, but {why}")]

    def order(
        self,
        domain: str,
        commands: Iterable[BatchCommand],
        *,
        strategy: Strategy | None,
        checkpoint_size: int,
        batch_id: UUID | None,
        name: str | None,
        custom_data: dict[str, Any] | None,
        on_complete: object,
        job_id: UUID | None,
        stage: str | None,
    ) -> Order:
        """A batch that this process announces itself."""
        refuse(check_number(checkpoint_size, "checkpoint_size", CHECKPOINT_SIZES))
        batch = self._new_batch(domain, batch_id, name, custom_data, on_complete, job_id, stage)
        chosen, commands = choose(strategy, commands)
        if chosen is not Strategy.CHECKPOINT:
            return Order(batch, chosen, self._members(batch, commands))
        given = Input(commands, partial(self._members, batch))
        return Order(batch, chosen, input=given, checkpoint_size=checkpoint_size)

    def _members(
        self, batch: store.send.NewBatch, commands: Iterable[BatchCommand], first: int = 0
    ) -> list[NewCommand]:
        """The commands of a batch, or some of them; offenders are named by their place in all of them."""
        try:
            checked = self._check(batch.domain, commands)
        except InvalidCommandError as refused:
            if not first:
                raise
            problems = [replace(p, index=None if p.index is None else p.index + first) for p in refused.problems]
            raise InvalidCommandError(problems, refused.total) from None
        if not checked and not first:
            raise InvalidCommandError(
                [
                    Problem(
                        "EMPTY_BATCH", "/commands", "found no commands, wanted at least one; open_batch may stay empty"
                    )
                ]
            )
        if batch.callback_id is not None and any(command.command_id == batch.callback_id for command in checked):
            raise DuplicateCommandError(batch.domain, [batch.callback_id])
        return checked

    def send(
        self,
        domain: str,
        command: BatchCommand,
        batch_id: UUID | None,
        dedup: Dedup | None = None,
        via: Via | None = None,
    ) -> Write[SendResult]:
        via = via or self._via
        [checked] = self._check(domain, [command])
        ids = [checked.command_id]
        if batch_id is not None:
            refuse(check_uuid(batch_id, "batch_id"))
        if dedup is not None:
            _check_key(command, dedup)
            if batch_id is None:
                once = partial(store.send.send_once, domain, checked, dedup, via)
                return Write(once(), command_ids=ids, one_statement=True, again=partial(once, patience=PATIENCE))
            return _patient(
                lambda: _only(store.send.send_many_once(domain, [checked], dedup, batch_id, via)), batch_id, ids
            )
        result = SendResult(checked.command_id, created=True)
        if batch_id is None:
            plan = _then(store.send.send(domain, checked, via=via), result)
            if command.command_id is None:  # only an id that its caller has chosen can be that of another
                return Write(plan, command_ids=ids, one_statement=True)
            alone = partial(store.send.send, domain, checked, via=via, patience=PATIENCE)
            return Write(plan, command_ids=ids, one_statement=True, again=lambda: _then(alone(), result))
        add = partial(store.send.send_many, domain, [checked], batch_id, via)
        again = partial(add, patience=PATIENCE)
        return Write(_then(add(), result), batch_id, ids, one_statement=True, again=lambda: _then(again(), result))

    def hold(self, domain: str, command: BatchCommand, dedup: Dedup, promised: Mapping[str, UUID]) -> Plan[SendResult]:
        """Hold the task key of a command, which has its id and is sent later in the same transaction."""
        [checked] = self._check(domain, [command])
        _check_key(command, dedup)
        return _only(store.send.hold(domain, [checked], dedup, promised))

    def send_many(
        self,
        domain: str,
        commands: Iterable[BatchCommand],
        batch_id: UUID | None = None,
        dedup: Dedup | None = None,
    ) -> Write[list[SendResult]]:
        checked = self._check(domain, commands)
        if batch_id is not None:
            refuse(check_uuid(batch_id, "batch_id"))
        ids = [command.command_id for command in checked]
        if dedup is not None:
            _check_dedup(dedup)
            via = self._via
            return _patient(lambda: store.send.send_many_once(domain, checked, dedup, batch_id, via), batch_id, ids)
        results = [SendResult(command_id, created=True) for command_id in ids]
        write = _bulk(partial(store.send.send_many, domain, checked, batch_id, self._via), results, batch_id, checked)
        if batch_id is None and isinstance(commands, Sequence) and all(one.command_id is None for one in commands):
            return replace(write, again=None)  # there is nothing to wait for
        return write

    def create_batch(
        self,
        domain: str,
        commands: Iterable[BatchCommand],
        *,
        batch_id: UUID | None,
        name: str | None,
        custom_data: dict[str, Any] | None,
        on_complete: object,
        dedup: Dedup | None,
        job_id: UUID | None = None,
        stage: str | None = None,
        checkpoint_size: int = 1000,
    ) -> Write[UUID]:
        """A batch in one transaction; with a broker, a relay announces it afterwards."""
        refuse(check_number(checkpoint_size, "checkpoint_size", CHECKPOINT_SIZES))
        batch = self._new_batch(domain, batch_id, name, custom_data, on_complete, job_id, stage)
        checked = self._members(batch, commands)
        if dedup is not None:
            _check_dedup(dedup)
        if self._via.transport is not None:
            return self._create_for_relay(batch, checked, dedup)
        ids = [command.command_id for command in checked]
        if dedup is not None:
            return _patient(lambda: store.send.create_batch_once(batch, checked, dedup), batch.batch_id, ids)
        one_statement = store.send.in_one_statement(checked)
        return Write(store.send.create_batch(batch, checked), batch.batch_id, ids, one_statement=one_statement)

    def _create_for_relay(
        self, batch: store.send.NewBatch, commands: Sequence[NewCommand], dedup: Dedup | None
    ) -> Write[UUID]:
        ids, via = [command.command_id for command in commands], self._via
        if dedup is not None:
            once = partial(store.dispatch.create_once, batch, commands, dedup, via, Strategy.RELAY)
            return _patient(once, batch.batch_id, ids)
        plan = _then(store.dispatch.create(batch, commands, via, Strategy.RELAY), batch.batch_id)
        return Write(plan, batch.batch_id, ids)

    def outbox(self, domain: str | None, batch_id: UUID | None) -> Plan[list[OutboxEntry]]:
        refuse(self._where(domain, batch_id), writes=False)
        return store.outbox.waiting(domain=domain, batch_id=batch_id)

    def retry_outbox(self, domain: str | None, batch_id: UUID | None) -> Write[int]:
        refuse(self._where(domain, batch_id))
        plan = store.outbox.retry(domain=domain, batch_id=batch_id)
        return Write(plan, batch_id, one_statement=True)

    def retryable_outbox(self, domain: str | None, batch_id: UUID | None) -> Plan[int]:
        refuse(self._where(domain, batch_id), writes=False)
        return store.outbox.retryable(domain=domain, batch_id=batch_id)

    def reroute(
        self, domain: str | None, batch_id: UUID | None, *, failed_only: bool, operator: str | None
    ) -> Iterator[Write[int]]:
        """One transaction after the other, until one has found nothing."""
        problems = self._where(domain, batch_id) + self._operator(operator) + _check_flag(failed_only, "failed_only")
        refuse(problems)
        while True:
            plan = store.outbox.reroute(domain=domain, batch_id=batch_id, failed=failed_only, operator=operator)
            yield Write(plan, batch_id, one_statement=True)

    def recover(self, ring_again_after: timedelta) -> Plan[tuple[int, int]]:
        """What can be done without the broker: returns commands that are due now, and creations that are complete."""
        if not isinstance(ring_again_after, timedelta) or not timedelta(0) <= ring_again_after <= LONGEST:
            message = f"found {ring_again_after!r:.80}, wanted a timedelta from zero to {LONGEST.days} days"
            raise InvalidCommandError([Problem("INVALID_OPTION", "/ring_again_after", message)])
        return _both(store.outbox.retry(domain=None, batch_id=None), store.dispatch.close())

    def reconcile(self, domain: str | None) -> Plan[list[str]]:
        """The domains to compare."""
        if domain is None:
            return store.report.domains()
        refuse(self._name(domain), writes=False)
        return _given([domain])

    def _where(self, domain: str | None, batch_id: UUID | None) -> list[Problem]:
        problems = [] if domain is None else self._name(domain)
        return problems if batch_id is None else problems + check_uuid(batch_id, "batch_id")

    def get_dispatch(self, domain: str, batch_id: UUID) -> Plan[DispatchReport | None]:
        refuse(self._name(domain) + check_uuid(batch_id, "batch_id"), writes=False)
        return store.dispatch.find(domain, batch_id)

    def open_batch(
        self,
        domain: str,
        *,
        batch_id: UUID | None,
        name: str | None,
        custom_data: dict[str, Any] | None,
        on_complete: object,
        dedup: Dedup | None,
        job_id: UUID | None = None,
        stage: str | None = None,
    ) -> Write[UUID]:
        if dedup is not None:
            _check_dedup(dedup)
        batch = self._new_batch(domain, batch_id, name, custom_data, on_complete, job_id, stage)
        return Write(store.send.open_batch(batch), batch.batch_id, one_statement=True)

    def seal(self, domain: str, batch_id: UUID) -> Write[bool]:
        refuse(self._name(domain) + check_uuid(batch_id, "batch_id"))
        return _patient(partial(store.send.seal, domain, batch_id), batch_id)

    def check(self, domain: str, command: BatchCommand) -> NewCommand:
        """Refuse a bad command now rather than with its checkpoint."""
        [checked] = self._check(domain, [command])
        return checked

    def checkpoint(
        self, domain: str, commands: Sequence[NewCommand], batch_id: UUID, dedup: Dedup | None
    ) -> Write[int]:
        """Write some commands of an open batch; tells how many of them were sent."""
        if dedup is not None:
            ids, via = [command.command_id for command in commands], self._via
            once = partial(store.send.send_many_once, domain, commands, dedup, batch_id, via)
            return _patient(lambda: _count_created(once()), batch_id, ids)
        send = partial(store.send.send_many, domain, commands, batch_id, self._via)
        return _bulk(send, len(commands), batch_id, commands)

    def cancel_batch(self, domain: str, batch_id: UUID, *, reason: str, operator: str | None) -> Write[int]:
        self._check_operation(domain, batch_id, "batch_id", operator, reason)
        return Write(store.cancel.cancel_batch(domain, batch_id, reason=reason, operator=operator), batch_id)

    def cancel_batch_in_pages(
        self, domain: str, batch_id: UUID, *, reason: str, operator: str | None
    ) -> store.cancel.Canceling:
        self._check_operation(domain, batch_id, "batch_id", operator, reason)
        begin = partial(store.cancel.begin, domain, batch_id, reason=reason, operator=operator, in_pages=True)
        return store.cancel.Canceling(begin, reason=reason, operator=operator)

    def retry(self, domain: str, command_id: UUID, *, operator: str | None) -> Write[None]:
        self._check_operation(domain, command_id, "command_id", operator)
        plan = partial(store.operate.retry, domain, command_id, operator=operator)
        return _patient(plan, command_ids=[command_id])

    def complete(self, domain: str, command_id: UUID, *, result: Any, operator: str | None) -> Write[None]:
        self._check_operation(domain, command_id, "command_id", operator)
        text = None if result is None else self._encode(result, "/result")
        plan = partial(store.operate.complete, domain, command_id, result=text, operator=operator)
        return _patient(plan, command_ids=[command_id])

    def cancel(self, domain: str, command_id: UUID, *, reason: str, operator: str | None) -> Write[None]:
        self._check_operation(domain, command_id, "command_id", operator, reason)
        plan = partial(store.operate.cancel, domain, command_id, reason=reason, operator=operator)
        return _patient(plan, command_ids=[command_id])

    def get_batch(self, domain: str, batch_id: UUID) -> Plan[BatchMetadata | None]:
        refuse(self._name(domain) + check_uuid(batch_id, "batch_id"), writes=False)
        return store.report.batch(domain, batch_id)

    def list_batches(
        self,
        domain: str,
        *,
        status: str | None,
        limit: int,
        offset: int,
        after: UUID | None,
        job_id: UUID | None = None,
    ) -> Plan[list[BatchMetadata]]:
        problems = [] if job_id is None else check_uuid(job_id, "job_id")
        refuse(self._name(domain) + problems + _page(limit, offset, after), writes=False)
        return store.report.batches(
            domain, status=_status(BatchStatus, status), limit=limit, offset=offset, after=after, job_id=job_id
        )

    def create_job(
        self,
        domain: str,
        stages: Iterable[Stage],
        *,
        job_id: UUID | None,
        name: str | None,
        custom_data: object,
        on_complete: object,
        continue_after_failures: bool,
    ) -> Write[UUID]:
        """Every command of every stage is checked now: a job does not stop at a list that was wrong from the start."""
        problems = self._name(domain) + _check_flag(continue_after_failures, "continue_after_failures")
        if job_id is not None:
            problems += check_uuid(job_id, "job_id")
        if name is not None:
            problems += check_text(name, "name", self._limits.name_bytes)
        if custom_data is not None and not isinstance(custom_data, dict):
            problems.append(Problem("INVALID_OPTION", "/custom_data", f"found {custom_data!r:.80}, wanted a dict"))
        if on_complete is not None and not isinstance(on_complete, BatchCommand):
            message = f"found {on_complete!r:.80}, wanted a BatchCommand"
            problems.append(Problem("INVALID_OPTION", "/on_complete", message))
        refuse(problems)
        checked = self._stages(domain, stages)
        callback, callback_id = None, None
        if isinstance(on_complete, BatchCommand):
            callback, callback_id = self._callback(domain, on_complete, "job")
        chosen = [command_id for stage in checked for command_id in stage.chosen]
        refuse_repeated_ids(domain, chosen if callback_id is None else [*chosen, callback_id])
        text = None if custom_data is None else self._encode(custom_data, "/custom_data")
        new = store.job.NewJob(
            job_id or new_id(), domain, name, text, callback, continue_after_failures, checked, callback_id
        )
        return Write(store.job.create(new, self._via), job_id=new.job_id)

    def advance(self, domain: str, step: Step) -> Plan[str]:
        """Take a job on after a stage that has ended."""
        return store.job.advance(domain, step, self._via)

    def begin_planned(self, domain: str, step: Step, commands: Sequence[BatchCommand]) -> Plan[str]:
        """Begin a stage with what its planner returned."""
        return store.job.begin_planned(domain, step, self._check(domain, commands), self._via)

    def resume_job(self, domain: str, job_id: UUID, *, operator: str | None) -> Write[None]:
        self._check_operation(domain, job_id, "job_id", operator)
        plan = partial(store.job.resume, domain, job_id, operator=operator, via=self._via)
        return _patient(lambda: _then(plan(), None), job_id=job_id)

    def cancel_job(self, domain: str, job_id: UUID, *, reason: str, operator: str | None) -> Write[int]:
        self._check_operation(domain, job_id, "job_id", operator, reason)
        return Write(store.job.cancel_job(domain, job_id, reason=reason, operator=operator), job_id=job_id)

    def cancel_job_in_pages(
        self, domain: str, job_id: UUID, *, reason: str, operator: str | None
    ) -> store.cancel.Canceling:
        self._check_operation(domain, job_id, "job_id", operator, reason)
        begin = partial(store.job.begin_to_cancel, domain, job_id, reason=reason, operator=operator, in_pages=True)
        return store.cancel.Canceling(begin, reason=reason, operator=operator)

    def get_job(self, domain: str, job_id: UUID) -> Plan[JobMetadata | None]:
        refuse(self._name(domain) + check_uuid(job_id, "job_id"), writes=False)
        return store.job.job(domain, job_id)

    def list_jobs(self, domain: str, *, status: str | None, limit: int, offset: int) -> Plan[list[JobMetadata]]:
        refuse(self._name(domain) + _page(limit, offset, None), writes=False)
        return store.job.jobs(domain, status=_status(JobStatus, status), limit=limit, offset=offset)

    def groups(self, domain: str, *, command_type: str | None, limit: int) -> Plan[list[CauseGroup]]:
        refuse(self._name(domain) + self._type(command_type) + _page(limit, 0, None), writes=False)
        return store.operate.groups(domain, command_type=command_type, limit=limit)

    def decide(
        self,
        domain: str,
        action: Action,
        fingerprint: str,
        *,
        command_type: str | None,
        patch: Sequence[dict[str, Any]] | None = None,
        result: Any = None,
        reason: str | None = None,
        rate: float | None,
        operator: str | None,
        dry_run: bool,
    ) -> Write[GroupAction]:
        problems = self._name(domain) + self._type(command_type) + _check_fingerprint(fingerprint)
        problems += _check_rate(rate) + self._operator(operator) + _check_flag(dry_run, "dry_run")
        if action == "cancel":
            problems += check_text(reason, "reason", 4096)
        refuse(problems)
        if result is not None:
            result = decode(self._encode(result, "/result"))
        checked = None if patch is None else self._patch(patch)
        decision = Decision(
            action=action,
            fingerprint=fingerprint.lower(),
            operator=operator,
            patch=None if checked is None else checked.operations,
            result=result,
            reason=reason,
        )
        batch_id = new_id()
        plan = store.operate.decide(
            domain,
            decision,
            command_type=command_type,
            patch=checked,
            rate=rate,
            dry_run=dry_run,
            batch_id=batch_id,
        )
        return Write(plan, batch_id)

    def list_batch_commands(
        self, domain: str, batch_id: UUID, *, status: str | None, limit: int, offset: int, after: UUID | None
    ) -> Plan[list[CommandMetadata]]:
        refuse(self._name(domain) + check_uuid(batch_id, "batch_id") + _page(limit, offset, after), writes=False)
        return store.report.batch_commands(
            domain, batch_id, status=_status(CommandStatus, status), limit=limit, offset=offset, after=after
        )

    def get_command(self, domain: str, command_id: UUID) -> Plan[CommandMetadata | None]:
        refuse(self._name(domain) + check_uuid(command_id, "command_id"), writes=False)
        return store.report.command(domain, command_id)

    def get_audit_trail(self, domain: str, command_id: UUID) -> Plan[list[AuditEvent]]:
        refuse(self._name(domain) + check_uuid(command_id, "command_id"), writes=False)
        return store.report.audit_trail(domain, command_id)

    def get_batch_audit_trail(self, domain: str, batch_id: UUID) -> Plan[list[AuditEvent]]:
        refuse(self._name(domain) + check_uuid(batch_id, "batch_id"), writes=False)
        return store.report.batch_audit_trail(domain, batch_id)

    def prune(self, older_than: timedelta, *, archive: bool, dry_run: bool) -> store.prune.Pruning:
        problems = _check_flag(archive, "archive") + _check_flag(dry_run, "dry_run")
        if not isinstance(older_than, timedelta) or not timedelta(0) < older_than <= LONGEST:
            message = f"found {older_than!r:.80}, wanted a timedelta of more than zero and at most {LONGEST.days} days"
            problems.append(Problem("INVALID_OPTION", "/older_than", message))
        refuse(problems)
        return store.prune.Pruning(older_than, archive=archive, dry_run=dry_run)

    def explain_batch(self, domain: str, batch_id: UUID) -> Plan[Explanation]:
        refuse(self._name(domain) + check_uuid(batch_id, "batch_id"), writes=False)
        return store.explain.explain_batch(domain, batch_id)

    def explain_command(self, domain: str, command_id: UUID) -> Plan[Explanation]:
        refuse(self._name(domain) + check_uuid(command_id, "command_id"), writes=False)
        return store.explain.explain_command(domain, command_id)

    def pause(self, domain: str, *, reason: str | None, operator: str | None) -> Write[bool]:
        self._check_pause(domain, operator, reason)
        return Write(store.pause.pause(domain, reason=reason, operator=operator), one_statement=True)

    def resume(self, domain: str, *, operator: str | None) -> Write[bool]:
        self._check_pause(domain, operator)
        return Write(store.pause.resume(domain, operator=operator), one_statement=True)

    def list_limits(self, name: str | None, *, limit: int) -> Plan[list[LimitStatus]]:
        problems = [] if name is None else check_text(name, "name", 2 * self._limits.name_bytes + 1)
        refuse(problems + check_number(limit, "limit", PAGE), writes=False)
        return store.rate.limits(name, limit=limit)

    def reset_limit(self, name: str, by: str | None) -> Write[int]:
        problems = check_text(name, "name", 2 * self._limits.name_bytes + 1)
        refuse(problems + (check_text(by, "by", KEY_BYTES) if by not in (None, "") else []))
        return Write(store.rate.reset(name, by))

    def list_pauses(self) -> Plan[list[Pause]]:
        return store.pause.pauses()

    def pause_history(self, domain: str | None, *, limit: int) -> Plan[list[Pause]]:
        refuse(([] if domain is None else self._name(domain)) + check_number(limit, "limit", PAGE), writes=False)
        return store.pause.history(domain, limit=limit)

    def add(self, buffer: BufferSettings, data: Any, key: str | None) -> Write[Any]:
        """One event into a buffer."""
        if buffer.table is not None:
            row = self._row(buffer, data, key, None)
            return _patient(lambda: _only(store.buffer.insert(buffer, [row])))
        add = partial(store.buffer.add, buffer, self._event(buffer, data, key, None))
        return Write(add(), one_statement=True, again=_where_merged(buffer, add))

    def add_many(self, buffer: BufferSettings, items: object, key: object) -> Write[list[Any]]:
        """Many events, all or none; every offender is named by its index."""
        if isinstance(items, (str, bytes, Mapping)) or not isinstance(items, Iterable):
            message = f"found {items!r:.80}, wanted several payloads, for example a list of dicts"
            raise InvalidCommandError([Problem("INVALID_OPTION", "/items", message)])
        if key is not None and not callable(key):
            message = f"found {key!r:.80}, wanted a function that tells the key of a payload"
            raise InvalidCommandError([Problem("INVALID_OPTION", "/key", message)])
        checked: list[Any] = []
        problems: list[Problem] = []
        check = self._event if buffer.table is None else self._row
        for index, data in enumerate(items):
            try:
                checked.append(check(buffer, data, None if key is None else key(data), index))
            except InvalidCommandError as refused:
                problems += refused.problems
        refuse(problems)
        if buffer.table is not None:
            return _patient(partial(store.buffer.insert, buffer, checked))
        one = store.buffer.in_one_statement(checked)
        add = partial(store.buffer.add_many, buffer, checked)
        return Write(add(), one_statement=one, again=_where_merged(buffer, add))

    def claim(self, buffer: BufferSettings, callback: object, limit: int | None) -> int:
        """How many events a claim may take."""
        if not callable(callback):
            raise TypeError(f"claim() needs a function to call with the group_id, found {callback!r:.80}.")
        if iscoroutinefunction(callback) and not self._awaits:
            raise TypeError("claim() found an async function, which nobody awaits here; pass a plain one.")
        if limit is not None:
            refuse(check_number(limit, "limit", SIZES))
        return buffer.size if limit is None else limit

    def flush(self, buffer: BufferSettings) -> Write[int]:
        return _patient(partial(store.buffer.flush, buffer))

    def buffer_status(self, buffer: BufferSettings) -> Plan[BufferStatus]:
        return store.buffer.status(buffer)

    def list_buffers(self) -> Plan[list[BufferStatus]]:
        return store.buffer.statuses()

    def _event(self, buffer: BufferSettings, data: Any, key: str | None, index: int | None) -> store.buffer.NewEvent:
        partition, problems = partition_of(buffer, data)
        problems += key_problems(buffer, key)
        text = ""
        try:
            text = encode(data, self._payload)
        except PayloadRefused as refused:
            problems.append(refused.problem)
        refuse([Problem(p.code, p.path, p.message, index, p.limit) for p in problems])
        return store.buffer.NewEvent(partition, key, text)

    def _row(self, buffer: BufferSettings, data: Any, key: str | None, index: int | None) -> dict[str, Any]:
        """What goes into the columns of an application's table."""
        table = buffer.table
        assert table is not None
        problems: list[Problem] = []
        if not isinstance(data, dict) or not data or not all(isinstance(name, str) for name in data):
            message = f"found {data!r:.80}, wanted a dict of columns and values, since the buffer is a table of yours"
            problems.append(Problem("INVALID_OPTION", "/data", message, index))
        elif key is not None:
            if table.key is None:
                message = f"found {key!r:.80}, but no column for it; declare BufferTable(key=...)"
                problems.append(Problem("INVALID_OPTION", "/key", message, index))
            else:
                data = {table.key: key} | data
        refuse(problems)
        return dict(data)

    def trace(self, task_key: str, *, domain: str | None) -> Plan[list[Execution]]:
        problems = check_text(task_key, "task_key", self._limits.task_key_bytes)
        refuse(problems if domain is None else problems + self._name(domain), writes=False)
        return store.report.trace(task_key, domain=domain)

    def enqueue_task(
        self, task_id: str, queue: str, metadata: object, dedup: Dedup | None, max_attempts: int
    ) -> Write[Execution | None]:
        problems = check_text(task_id, "task_id", self._limits.task_key_bytes)
        if metadata is not None and not isinstance(metadata, dict):
            problems.append(Problem("INVALID_OPTION", "/metadata", f"found {metadata!r:.80}, wanted a dict"))
        refuse(problems)
        data = metadata or {}
        execution_id = store.track.new_execution_id()
        command = BatchCommand(TRACKED, execution_id, data, task_key=task_id, max_attempts=max_attempts)

        def plan() -> Plan[Execution | None]:
            send = self.send(queue, command, None, dedup, via=NO_BROKER)  # another queue tells of it
            existing = dedup is not None and dedup.on_conflict == "return_existing"
            return store.track.enqueue(send.plan, queue, task_id, data, existing=existing)

        return _patient(plan, None, [execution_id])

    def claim_task(self, task_id: str, execution_id: UUID | str) -> Callable[[int], Write[Claim]]:
        """Given the number of a worker: what it writes to take a task. The second key of a message is text."""
        problems = check_text(task_id, "task_id", self._limits.task_key_bytes)
        if isinstance(execution_id, str):
            with contextlib.suppress(ValueError):
                execution_id = UUID(execution_id)
        refuse(problems + check_uuid(execution_id, "execution_id"))
        assert isinstance(execution_id, UUID)
        claim, ids = partial(store.track.claim, task_id, execution_id), [execution_id]

        def write(worker: int) -> Write[Claim]:
            again = partial(claim, worker=worker, patience=PATIENCE)
            return Write(claim(worker=worker), command_ids=ids, again=again)

        return write

    def succeeded(self, result: Any) -> Succeeded:
        if result is not None:
            self._encode(result, "/result")
        return Succeeded(result)

    def failed(self, error: object) -> Failed:
        if isinstance(error, str):
            return Failed(TransientCommandError(error))
        if not isinstance(error, BaseException):
            message = f"found {error!r:.80}, wanted an exception or a text"
            raise InvalidCommandError([Problem("INVALID_OPTION", "/error", message)])
        return Failed(error)

    def end_task(self, execution: object, outcome: Succeeded | Failed, *, workers: Sequence[int]) -> Write[Execution]:
        if not isinstance(execution, Execution):
            message = f"found {execution!r:.80}, wanted the execution that claim returned"
            raise InvalidCommandError([Problem("INVALID_OPTION", "/execution", message)])
        if execution.execution_id is None or execution.status is ExecutionStatus.QUEUED:
            raise InvalidOperationError(
                f"This execution of task {execution.task_key!r:.200} is {execution.status}. "
                "Claim the task, and end the execution that claim returns."
            )
        end = partial(store.track.end, execution, outcome, workers=workers, limits=self._payload)
        return Write(end(), command_ids=[execution.command_id], again=partial(end, patience=PATIENCE))

    def retry_task(self, task_id: str, *, operator: str | None) -> Write[Execution]:
        refuse(check_text(task_id, "task_id", self._limits.task_key_bytes) + self._operator(operator))
        return _patient(partial(store.track.retry, task_id, operator=operator))

    def task_history(self, task_id: str) -> Plan[list[Execution]]:
        refuse(check_text(task_id, "task_id", self._limits.task_key_bytes), writes=False)
        return store.track.history(task_id)

    def rescue(self) -> Write[Returned]:
        """Take back what dead workers held."""
        return Write(store.rescue.rescue(), again=partial(store.rescue.rescue, patience=PATIENCE))

    def recover_tasks(
        self, queue: str, *, waiting_for: timedelta, limit: int, look_only: bool = False
    ) -> Write[list[Execution]]:
        problems = check_name(queue, "queue", self._limits) + check_number(limit, "limit", range(1, 100_001))
        if not isinstance(waiting_for, timedelta) or not timedelta(0) <= waiting_for <= LONGEST:
            message = f"found {waiting_for!r:.80}, wanted a timedelta from zero to {LONGEST.days} days"
            problems.append(Problem("INVALID_OPTION", "/waiting_for", message))
        refuse(problems)
        return Write(store.track.recover(queue, waiting_for=waiting_for, limit=limit, look_only=look_only))

    def troubleshooting(
        self, domain: str, *, command_type: str | None, limit: int, offset: int
    ) -> Plan[list[TroubleshootingItem]]:
        refuse(self._name(domain) + self._type(command_type) + _page(limit, offset, None), writes=False)
        return store.report.troubleshooting(domain, command_type=command_type, limit=limit, offset=offset)

    def troubleshooting_item(self, domain: str, command_id: UUID) -> Plan[TroubleshootingItem | None]:
        refuse(self._name(domain) + check_uuid(command_id, "command_id"), writes=False)
        return store.report.troubleshooting_item(domain, command_id)

    def _check(self, domain: str, commands: Iterable[BatchCommand]) -> list[NewCommand]:
        return check_all(domain, commands, self._limits)

    def _name(self, domain: str) -> list[Problem]:
        return check_name(domain, "domain", self._limits)

    def _type(self, command_type: str | None) -> list[Problem]:
        return [] if command_type is None else check_name(command_type, "command_type", self._limits)

    def _operator(self, operator: str | None) -> list[Problem]:
        return [] if operator is None else check_text(operator, "operator", self._limits.name_bytes)

    def _patch(self, operations: Sequence[dict[str, Any]]) -> Patch:
        self._encode(operations, "/patch")
        try:
            return Patch(operations, self._payload)
        except PayloadRefused as refused:
            raise InvalidCommandError([refused.problem]) from None

    def _encode(self, value: Any, path: str, limits: PayloadLimits | None = None) -> str:
        try:
            return encode(value, limits or self._payload, path=path)
        except PayloadRefused as refused:
            raise InvalidCommandError([refused.problem]) from None

    def _new_batch(
        self,
        domain: str,
        batch_id: UUID | None,
        name: str | None,
        custom_data: object,
        on_complete: object,
        job_id: UUID | None,
        stage: str | None,
    ) -> store.send.NewBatch:
        problems = self._name(domain)
        if batch_id is not None:
            problems += check_uuid(batch_id, "batch_id")
        if job_id is not None:
            problems += check_uuid(job_id, "job_id")
        if stage is not None:
            problems += check_text(stage, "stage", self._limits.name_bytes)
        if name is not None:
            problems += check_text(name, "name", self._limits.name_bytes)
        if custom_data is not None and not isinstance(custom_data, dict):
            problems.append(Problem("INVALID_OPTION", "/custom_data", f"found {custom_data!r:.80}, wanted a dict"))
        if on_complete is not None and not isinstance(on_complete, BatchCommand):
            problems += self._check_function(on_complete)
        refuse(problems)
        callback, callback_id = None, None
        if isinstance(on_complete, BatchCommand):
            callback, callback_id = self._callback(domain, on_complete)
        text = None if custom_data is None else self._encode(custom_data, "/custom_data")
        return store.send.NewBatch(batch_id or new_id(), domain, name, text, callback, callback_id, job_id, stage)

    def _check_function(self, on_complete: object) -> list[Problem]:
        if not callable(on_complete):
            message = f"found {on_complete!r:.80}, wanted a function or a BatchCommand"
            return [Problem("INVALID_OPTION", "/on_complete", message)]
        if iscoroutinefunction(on_complete) and not self._awaits:
            message = "found an async function, which nobody awaits here; pass a plain one, or use CommandBus"
            return [Problem("INVALID_OPTION", "/on_complete", message)]
        return []

    def _stages(self, domain: str, stages: object) -> list[store.job.NewStage]:
        if isinstance(stages, str | bytes | Mapping) or not isinstance(stages, Iterable) or not (found := list(stages)):
            message = f"found {stages!r:.80}, wanted at least one Stage"
            raise InvalidCommandError([Problem("INVALID_OPTION", "/stages", message)])
        problems: list[Problem] = []
        names: set[str] = set()
        for position, stage in enumerate(found):
            path = f"/stages/{position}"
            if not isinstance(stage, Stage):
                problems.append(Problem("INVALID_OPTION", path, f"found {stage!r:.80}, wanted a Stage"))
                continue
            problems += check_stage(stage.name, f"stages/{position}/name", self._limits)
            if isinstance(stage.name, str) and stage.name in names:
                message = f"found a second stage {stage.name!r:.80}, wanted each name once"
                problems.append(Problem("INVALID_OPTION", f"{path}/name", message))
            names.add(str(stage.name))
            given = stage.commands
            if given is not None and (isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable)):
                message = f"found {given!r:.80}, wanted a list of BatchCommand"
                problems.append(Problem("INVALID_OPTION", f"{path}/commands", message))
        refuse(problems)
        checked = [self._stage(domain, position, stage) for position, stage in enumerate(found)]
        if not checked[0].commands:
            message = "found no commands, wanted at least one: before the first stage there is nothing to plan it from"
            raise InvalidCommandError([Problem("EMPTY_BATCH", "/stages/0/commands", message)])
        return checked

    def _stage(self, domain: str, position: int, stage: Stage) -> store.job.NewStage:
        if stage.commands is None:
            return store.job.NewStage(stage.name, None)
        commands = list(stage.commands)
        try:
            checked = self._check(domain, commands)
        except InvalidCommandError as refused:
            path = f"/stages/{position}/commands"
            named = [Problem(p.code, path + p.path, p.message, p.index, p.limit) for p in refused.problems]
            raise InvalidCommandError(named, refused.total) from None
        chosen = [command.command_id for command in commands if command.command_id is not None]
        return store.job.NewStage(stage.name, checked, chosen)

    def _callback(self, domain: str, command: BatchCommand, of: str = "batch") -> tuple[str, UUID | None]:
        """The command to send on completion, as the row of the batch keeps it, and its id if the caller chose it.

        The batch itself, or the job, is added to its data then.
        """
        data = {} if command.data is None else command.data
        if not isinstance(data, dict) or of in data:
            message = f'wanted a dict without the key "{of}", which will hold the completed {of}'
            raise InvalidCommandError([Problem("INVALID_OPTION", "/on_complete/data", message)])
        if command.run_at is not None:
            message = f"a callback is sent when its {of} completes and cannot have a time of its own"
            raise InvalidCommandError([Problem("INVALID_OPTION", "/on_complete/run_at", message)])
        [checked] = self._check(domain, [command])
        text = self._encode(
            {
                "command_id": str(checked.command_id),
                "command_type": checked.command_type,
                "data": data,
                "correlation_id": str(checked.correlation_id) if checked.correlation_id else None,
                "reply_to": checked.reply_to,
                "task_key": checked.task_key,
                "priority": checked.priority,
                "max_attempts": checked.max_attempts,
            },
            "/on_complete",
            WIDEST,
        )
        return text, command.command_id

    def _check_pause(self, domain: str, operator: str | None, reason: str | None = None) -> None:
        problems = self._name(domain) + self._operator(operator)
        if reason is not None:
            problems += check_text(reason, "reason", 4096)
        refuse(problems)

    def _check_operation(self, domain: str, id: UUID, path: str, operator: str | None, *reason: str) -> None:
        problems = self._name(domain) + check_uuid(id, path) + self._operator(operator)
        for text in reason:
            problems += check_text(text, "reason", 4096)
        refuse(problems)


def _bulk(send: Callable[..., Plan[Any]], result: T, batch_id: UUID | None, commands: Sequence[NewCommand]) -> Write[T]:
    ids = [command.command_id for command in commands]
    if not store.send.in_one_statement(commands):
        return _patient(lambda: _then(send(), result), batch_id, ids)
    again = partial(send, patience=PATIENCE)
    return Write(_then(send(), result), batch_id, ids, one_statement=True, again=lambda: _then(again(), result))


def _patient(
    plan: Callable[[], Plan[T]],
    batch_id: UUID | None = None,
    command_ids: Sequence[UUID] = (),
    job_id: UUID | None = None,
) -> Write[T]:
    """Several statements, of which one may have to wait for a transaction of somebody else."""
    return Write(plan(), batch_id, command_ids, job_id=job_id, again=lambda: store.send.hurried(plan(), PATIENCE))


def _where_merged(buffer: BufferSettings, add: Callable[..., Plan[T]]) -> Callable[[], Plan[T]] | None:
    """Only an event that may be merged into another one may have to wait for it."""
    return partial(add, patience=PATIENCE) if store.buffer.merges_at_once(buffer) else None


def in_pages(
    canceling: store.cancel.Canceling, *, batch_id: UUID | None = None, job_id: UUID | None = None
) -> Iterator[Write[None]]:
    """What a cancel writes, one by one. Once it has begun, nobody sends into the batch: no page waits long."""
    yield _patient(canceling.begin, batch_id, job_id=job_id)
    for page in canceling.pages():
        yield Write(page, batch_id, job_id=job_id, goes_on=True)


def _check_dedup(dedup: object) -> None:
    if not isinstance(dedup, Dedup):
        message = f"found {dedup!r:.80}, wanted a Dedup, for example Dedup(window=timedelta(minutes=5))"
        raise InvalidCommandError([Problem("INVALID_OPTION", "/dedup", message)])


def _check_key(command: BatchCommand, dedup: Dedup) -> None:
    _check_dedup(dedup)
    if command.task_key is None:
        message = "found none, wanted the key that dedup is about; pass task_key=, or leave dedup out"
        raise InvalidCommandError([Problem("INVALID_OPTION", "/task_key", message)])


def _only(plan: Plan[list[T]]) -> Plan[T]:
    [result] = yield from plan
    return result


def _count_created(plan: Plan[list[SendResult]]) -> Plan[int]:
    results = yield from plan
    return sum(result.created for result in results)


def _both(first: Plan[int], second: Plan[int]) -> Plan[tuple[int, int]]:
    one = yield from first
    return one, (yield from second)


def _given(result: T) -> Plan[T]:
    """No statement at all."""
    yield from ()
    return result


def _then(plan: Plan[Any], result: T) -> Plan[T]:
    yield from plan
    return result


def _page(limit: int, offset: int, after: UUID | None) -> list[Problem]:
    problems = check_number(limit, "limit", PAGE) + check_number(offset, "offset", PAGE)
    return problems + check_uuid(after, "after") if after is not None else problems


def _check_fingerprint(fingerprint: object) -> list[Problem]:
    if isinstance(fingerprint, str) and FINGERPRINT.match(fingerprint.lower()):
        return []
    message = f"found {fingerprint!r:.80}, wanted the 12 hex digits that `busload troubleshooting groups` shows"
    return [Problem("INVALID_OPTION", "/fingerprint", message)]


def _check_flag(value: object, name: str) -> list[Problem]:
    if isinstance(value, bool):
        return []
    return [Problem("INVALID_OPTION", f"/{name}", f"found {value!r:.80}, wanted True or False")]


def _check_rate(rate: object) -> list[Problem]:
    lowest, highest = RATES
    if rate is None or (type(rate) in (int, float) and lowest <= rate <= highest):  # type: ignore[operator]
        return []
    message = f"found {rate!r:.80}, wanted from {lowest:g} to {highest:,.0f} commands a second"
    return [Problem("INVALID_OPTION", "/rate", message)]


Status = TypeVar("Status", BatchStatus, CommandStatus, JobStatus)


def _status(kind: type[Status], status: str | None) -> Status | None:
    if status is None:
        return None
    try:
        return kind(status)
    except ValueError:
        message = f"found {status!r:.80}, wanted one of {', '.join(kind)}"
        raise InvalidCommandError([Problem("INVALID_OPTION", "/status", message)], writes=False) from None
