"""How a single command that waits is put off, or brought forward."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from busload.commands.cancel import MOST_LOOKS, look, part, refuse_restless
from busload.commands.command import CommandStatus
from busload.errors import InvalidOperationError
from busload.postgres.plan import Plan, execute
from busload.postgres.statements import statements

SQL = statements(__name__)

WAITING = (
    CommandStatus.PENDING,
    CommandStatus.SCHEDULED,
    CommandStatus.PENDING_QUEUE,
    CommandStatus.PENDING_RETRY,
)


def reschedule(domain: str, command_id: UUID, run_at: datetime, *, operator: str | None) -> Plan[None]:
    """Let a command that waits run at `run_at`, or now if that is past; needs a transaction."""
    for _ in range(MOST_LOOKS):
        id, _, _, status = yield from look(domain, command_id, "rescheduled")
        if status not in WAITING:
            wanted = "Wait until its attempt has ended" if status is CommandStatus.IN_PROGRESS else "Retry it first"
            raise InvalidOperationError(
                f"Command {command_id} is {status}; only one that waits can be rescheduled. {wanted}."
            )
        parted = yield from part(id)
        if parted is None:
            continue
        batch_id, attempt, reason = parted
        if reason in ("HELD", "CANARY"):
            why = "is held. Resume the batch instead"
            if reason == "CANARY":
                why = "waits for its canary. Let all of it go instead: resume_batch(..., end_canary=True)"
            raise InvalidOperationError(f"Command {command_id} belongs to batch {batch_id}, which {why}.")
        yield from execute(
            SQL.reschedule, command=id, run_at=run_at, batch_id=batch_id, attempt=attempt, operator=operator
        )
        return
    refuse_restless(command_id)
