"""How a single command is canceled: at once if it waits; if it runs, it is asked to stop."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import NoReturn
from uuid import UUID

from psycopg.errors import LockNotAvailable

from busload.commands.check_commands import SENT_BY_BUFFERS
from busload.commands.command import CommandStatus
from busload.commands.search import ENDED
from busload.errors import CommandNotFoundError, InvalidOperationError
from busload.postgres.plan import Plan, Row, Savepoint, execute
from busload.postgres.statements import statements
from busload.postgres.write import hurried

SQL = statements(__name__)

MOST_LOOKS = 20
"""How often a command is looked for that moves on between the look and the lock."""


class Cancellation(StrEnum):
    """What came of a call of `cancel_command`."""

    CANCELED = "canceled"
    """The command has ended."""
    ASKED_TO_STOP = "asked to stop"
    """A worker has it. It ends as its handler ends, and is not tried again."""


class _MovedError(Exception):
    """The command is not any more where it was seen."""


def cancel(
    domain: str,
    command_id: UUID,
    *,
    reason: str,
    operator: str | None,
    give_up: Callable[[], Plan[None]],
) -> Plan[Cancellation]:
    """Cancel a command wherever it is; needs a transaction.

    `give_up` cancels a command in troubleshooting. Locks are taken in the order in which everybody takes them: a batch
    before its loads, a lease before its batch. If the command has moved between the look and the lock, the locks are
    let go, and it is looked for again.
    """
    about = {"reason": reason, "operator": operator}
    for _ in range(MOST_LOOKS):
        id, command_type, batch_id, status = yield from look(domain, command_id, "canceled")
        try:
            if status is CommandStatus.IN_TROUBLESHOOTING_QUEUE:
                yield Savepoint(give_up())
                return Cancellation.CANCELED
            if command_type in SENT_BY_BUFFERS:
                raise InvalidOperationError(
                    f"Command {command_id} is a group of events of the buffer {domain!r}, which would be lost with it. "
                    "Let its handler run; if that fails, the group can be canceled in troubleshooting."
                )
            if status is CommandStatus.IN_PROGRESS:
                yield Savepoint(_ask_to_stop(id, **about))
                return Cancellation.ASKED_TO_STOP
            yield Savepoint(cancel_waiting(id, batch_id, **about))
            return Cancellation.CANCELED
        except _MovedError:
            continue
        except InvalidOperationError:
            if status is not CommandStatus.IN_TROUBLESHOOTING_QUEUE:
                raise
            if (yield from look(domain, command_id, "canceled"))[3] is status:  # it was refused for another reason
                raise
    refuse_restless(command_id)


def look(domain: str, command_id: UUID, done: str) -> Plan[tuple[int, str, UUID | None, CommandStatus]]:
    """The id, type, batch and status of a command; refuses one that has ended, which cannot be `done` any more."""
    found = yield from execute(SQL.find, domain=domain, command_id=command_id)
    if not found:
        raise CommandNotFoundError(domain, command_id)
    [(id, command_type, batch_id, status)] = found
    if status in ENDED:
        raise InvalidOperationError(f"Command {command_id} is {status}. It has ended, so it cannot be {done}.")
    return id, command_type, batch_id, CommandStatus(status)


def part(id: int) -> Plan[Row | None]:
    """Make a load of its own of a command that waits; None if it does not wait any more.

    Returns its batch and its attempt, and why it is scheduled if it is.
    """
    found = yield from execute(SQL.part, command=id)
    return found[0] if found else None


def cancel_waiting(id: int, batch_id: UUID | None, *, reason: str | None, operator: str | None) -> Plan[None]:
    """Cancel a command that waits to be run, or to be published; needs a transaction."""
    if batch_id is not None:
        yield from execute(SQL.hold_batch, batch_id=batch_id)
    if (yield from part(id)) is None:
        raise _MovedError
    yield from execute(SQL.cancel, command=id, reason=reason, operator=operator)


def _ask_to_stop(id: int, *, reason: str | None, operator: str | None) -> Plan[None]:
    yield from execute(SQL.hold_leases, command=id)
    if not (yield from execute(SQL.ask_to_stop, command=id, reason=reason, operator=operator)):
        raise _MovedError


def refuse_restless(command_id: UUID) -> NoReturn:
    """Refuse a command that was never where it had been seen a moment before."""
    raise InvalidOperationError(
        f"Command {command_id} moves from place to place so fast that it could not be held. Repeat the call."
    )


def cancel_stopping() -> Plan[int]:
    """Cancel commands that were asked to stop, and wait again; needs a transaction.

    Returns how many that were. Of the others, those are forgotten for which there is nothing more to do. What somebody
    else holds is left for the next time.
    """
    canceled, over = 0, []
    locked: set[UUID] = set()
    for id, operator, reason, batch_id, waits, done in (yield from execute(SQL.stopping)):
        if waits:
            if batch_id in locked:
                continue
            try:
                yield Savepoint(hurried(cancel_waiting(id, batch_id, reason=reason, operator=operator)))
            except _MovedError:
                continue  # a worker has it again, and hears of it with its next heartbeat
            except LockNotAvailable:
                if batch_id is not None:
                    locked.add(batch_id)
                continue
            canceled += 1
        if waits or done:
            over.append(id)
    if over:
        yield from execute(SQL.forget, commands=over)
    return canceled
