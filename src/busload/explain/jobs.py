"""What is in the way of a batch of jobs: what is in the way of the stages that its jobs are at."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

from busload.commands.wording import counted
from busload.explain.blockers import Blocker, Reason
from busload.explain.facts import Facts
from busload.explain.reading import read_facts
from busload.explain.reasons import reasons_of
from busload.postgres.plan import Plan, execute
from busload.postgres.statements import statements

SQL = statements(__name__)

LOOKED_AT = 50
"""Jobs that are looked at, the oldest first."""


def reasons_of_jobs(batch: Facts) -> Plan[tuple[Reason, ...]]:
    """What is in the way of the jobs of a batch, the most urgent first; each reason counts jobs, and names one."""
    if batch.completed_at is not None:
        return reasons_of(batch)
    found: dict[Blocker, Reason] = {}
    rows = yield from execute(SQL.stages, batch_id=batch.batch_id, limit=LOOKED_AT)
    facts = yield from read_facts(
        batch.domain,
        batches=[batch_id for _, _, batch_id, _, _ in rows if batch_id is not None],
        commands=[step_id for _, _, batch_id, step_id, _ in rows if batch_id is None and step_id is not None],
        forecast=False,
    )
    for job_id, stage, batch_id, step_id, plans in rows:
        at = facts.get(step_id if batch_id is None else batch_id)
        if at is None:
            continue
        own = (_step_ended(job_id, at, plans=plans),) if batch_id is None and at.finished else reasons_of(at)
        for code, reason in {one.code: one for one in reversed(own)}.items():
            about = {"job_id": job_id, "stage": stage, **reason.details}
            found.setdefault(code, replace(reason, count=0, details=about))
            found[code] = replace(found[code], count=found[code].count + 1)
    return tuple(_told(found[code]) for code in Blocker if code in found)


def _step_ended(job_id: UUID, step: Facts, *, plans: bool) -> Reason:
    """A step takes its job on when it completes. If the job is still there, somebody else has ended the step."""
    does, next_one = ("plans it", "plans the stage again") if plans else ("follows it", "goes on with the next stage")
    return Reason(
        Blocker.STEP_ENDED,
        1,
        None,
        f"A person has ended the command that {does}, {step.command_id}, which is {step.status}: the job does not go "
        "on by itself.",
        f"Let it go on: `busload job resume {job_id}` {next_one}; or give it up: "
        f"`busload job cancel {job_id} --reason TEXT`.",
        {"command_id": step.command_id, "command_type": step.command_type},
    )


def _told(reason: Reason) -> Reason:
    job_id, stage = reason.details["job_id"], reason.details["stage"]
    where = f"in stage {stage!r} of job {job_id}"
    others = f", and alike in {counted(reason.count - 1, 'other job')}" if reason.count > 1 else ""
    return replace(reason, message=f"{reason.message.removesuffix('.')}, {where}{others}.")
